"""Progress of a workflow, reported to its caller one line at a time."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], object]
"""Function that takes one line of text."""


def silent(text: str) -> None:
    """Ignore the text."""
