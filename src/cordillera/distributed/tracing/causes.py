"""Causes of a hang or of slowness, and words for ranks and communicators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cordillera.distributed.tracing.rank_trace import TracedCommunicator

CauseKind: TypeAlias = Literal[
    "RANK_PROCESS_DEAD",
    "RANK_UNRESPONSIVE",
    "RANK_ERROR",
    "STUCK_IN_INIT",
    "RANK_NOT_JOINED",
    "METADATA_MISMATCH",
    "COLLECTIVE_DEADLOCK",
    "NETWORK_STUCK",
    "SENDER_STUCK",
    "STUCK_INSIDE",
    "NETWORK_SLOW",
    "SLOW_RANK",
]


@dataclass(frozen=True)
class RootCause:
    """One cause of a hang or of slowness.

    Attributes:
        kind: Kind of the cause.
        ranks: Ranks to blame, ascending; empty if the traces do not show which.
        certain: Whether the traces prove these ranks at fault; if not, one or more of them are.
        communicator: TracedCommunicator in which others wait; None if no rank waits.
        op: Operation in which they wait.
        sequence: Its number.
        waited_s: Longest wait for it, in seconds; None if no rank waits.
        waiting: Number of ranks that wait for it, themselves or through others; 0 for slowness.
        facts: Evidence in the traces, one sentence each.
        circle: Ranks of a deadlock, each of which waits for the next one.
        factor: Time of a slow rank or connection, in that of the others.
    """

    kind: CauseKind
    ranks: tuple[int, ...]
    certain: bool = True
    communicator: TracedCommunicator | None = None
    op: str = ""
    sequence: int | None = None
    waited_s: float | None = None
    waiting: int = 0
    facts: tuple[str, ...] = ()
    circle: tuple[int, ...] = ()
    factor: float | None = None


@dataclass(frozen=True)
class Blame:
    """Causes of a hang or of slowness, and the ranks that suffer from them.

    Attributes:
        causes: Root causes; none for a healthy job.
        victims: Ranks that wait for others and are not to blame, ascending.
        ranks: Number of ranks of the job.
        absent: Ranks without a trace.
        notes: Questions that these traces leave open, one sentence each.
    """

    causes: tuple[RootCause, ...]
    victims: tuple[int, ...]
    ranks: int
    absent: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def culprits(self) -> frozenset[int]:
        """Ranks that a cause blames."""
        return frozenset(rank for cause in self.causes for rank in cause.ranks)


def named(ranks: Iterable[int], most: int = 12) -> str:
    """Return ranks as words: ``rank 3``, ``ranks 0-6, 9``.

    Args:
        ranks: The ranks.
        most: Number of ranges, after which the others are counted.
    """
    ordered = sorted(ranks)
    ranges: list[list[int]] = []
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    words = [
        str(low) if low == high else f"{low}{', ' if high == low + 1 else '-'}{high}" for low, high in ranges[:most]
    ]
    left = sum(high - low + 1 for low, high in ranges[most:])
    shown = ", ".join(words) if len(ordered) != 2 else f"{ordered[0]} and {ordered[1]}"
    return f"rank{'s' if len(ordered) != 1 else ''} {shown}" + (f" and {left:,} others" if left else "")


def label(communicator: TracedCommunicator) -> str:
    """Return the name and description of a communicator as words."""
    if not communicator.description or communicator.description in (communicator.name, "undefined"):
        return f"communicator {communicator.name}"
    return f"communicator {communicator.name} ({communicator.description})"
