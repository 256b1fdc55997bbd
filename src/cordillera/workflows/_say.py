"""Progress of a workflow, reported to its caller one line or step at a time, also from processes that it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cordillera.distributed.job.launch import tell

Say = Callable[[str], object]
"""Function that takes one line of text."""

OnStep = Callable[[dict[str, Any], Any, int], None]
"""Function that takes the newest record of a training, its progress and its total number of steps."""


def silent(text: str) -> None:
    """Ignore the text."""


def to_launcher(rank: int) -> tuple[OnStep | None, Say]:
    """Return functions that send what rank 0 reports to the process that launched it; other ranks report nothing."""
    if rank > 0:
        return None, silent
    return lambda *step: tell(("step", *step)), lambda text: tell(("say", text))


def from_ranks(on_step: OnStep | None, say: Say) -> Callable[[tuple[Any, ...]], None]:
    """Return the function that passes on what rank 0 sends by :func:`to_launcher`."""

    def hear(message: tuple[Any, ...]) -> None:
        kind, *content = message
        if kind == "say":
            say(*content)
        elif on_step is not None:
            on_step(*content)

    return hear
