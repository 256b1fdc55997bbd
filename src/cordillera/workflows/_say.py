"""Progress of a workflow, told to its caller one line at a time."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], object]
"""Function that takes one line of text."""


def silent(text: str) -> None:
    """Drop the text.

    Args:
        text: One line of text.
    """
