"""Heartbeats of a job's processes in a store, and the decision which process is silent, stuck or at fault.

Every process repeatedly writes a heartbeat: an increasing number, and the position of its loop. A process that was
ended or stopped writes no more; one whose loop hangs still writes, but makes no progress. The positions show which
of the stalled processes is at fault: the others wait in a collective. This module contains only the decision; threads
and time limits are in :mod:`cordillera.distributed.job.watchdog`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from cordillera.distributed.job.store import JobStore
from cordillera.errors import RankError, printable

_MOST_NAMED = 8
_MOST_COUNTED = 2**53
_MOST_PLACE, _MOST_TEXT = 300, 8_000  # characters


class Beat(NamedTuple):
    """Heartbeat of a process.

    Attributes:
        life: Number that increases if the loop reported its position or computed since the last beat.
        moves: Number of times that the loop has reported its position.
        where: Position of the loop, and the current line of its program.
    """

    number: int
    life: int
    moves: int
    where: str
    waits: bool


class Verdict(NamedTuple):
    """Reason why a job cannot continue: the ranks at fault (empty if unknown), a sentence, and advice.

    ``is_own`` says that the rank at fault reports its own failure; it then ends by itself.
    """

    ranks: tuple[int, ...]
    what: str
    remedy: str
    is_own: bool = False

    def error(self, where: str | None = None) -> RankError:
        """Return the verdict as an error that the rank ``where`` reports."""
        return RankError(self.what, ranks=self.ranks, where=where, remedy=self.remedy)


@dataclass
class _SeenBeat:
    """Last beat of one process, and the times of the last heartbeat and the last progress, on the reader's clock."""

    heard: float
    moved: float
    beat: Beat | None = None


class HeartbeatBoard:
    """Heartbeats of all processes of a job, as one process reads them.

    Time in which the reader itself did not run reveals nothing about the others and is not counted. Every process reads
    every heartbeat each time, which suits hundreds of processes, not many thousands.

    Args:
        store: Store that all processes reach, used by this job and attempt only.
        deadline_s: Longest time in seconds for which a process may be silent, and for which all may stand still while
            they wait for one.
        join_s: Longest time until a first beat, in seconds.

    Attributes:
        verdict: Reason why the job cannot continue, once any process has reported one.
    """

    def __init__(
        self,
        store: JobStore,
        size: int,
        deadline_s: float,
        join_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.verdict: Verdict | None = None
        self._store, self._deadline, self._join, self._clock = store, deadline_s, join_s, clock
        now = self._looked = clock()
        self._seen = [_SeenBeat(now, now) for _ in range(size)]

    def beat(self, rank: int, beat: Beat) -> None:
        """Write a heartbeat (``beat``) of the process ``rank``."""
        self._store.set(f"heart/{rank}", beat._replace(where=beat.where[:_MOST_PLACE]))

    def look(self) -> None:
        """Read the heartbeats and the verdict."""
        now = self._clock()
        if now - self._looked > min(5.0, self._deadline / 2):
            for seen in self._seen:
                seen.heard += now - self._looked
                seen.moved += now - self._looked
        self._looked = now
        *values, verdict = self._store.read([*(f"heart/{rank}" for rank in range(len(self._seen))), "verdict"])
        for seen, value in zip(self._seen, values, strict=True):
            beat = _beat(value)
            if beat is None or (seen.beat is not None and beat.number <= seen.beat.number):
                continue  # no new beat
            seen.heard = now
            if seen.beat is None or beat.life != seen.beat.life:
                seen.moved = now
            seen.beat = beat
        self.verdict = self.verdict or _verdict(verdict, len(self._seen))

    def accuse(self, verdict: Verdict) -> Verdict:
        """Publish why the job cannot continue; return the first verdict that any process published."""
        texts = verdict.what[:_MOST_TEXT], verdict.remedy[:_MOST_TEXT]
        told = self._store.first("verdict", [verdict.ranks, *texts, verdict.is_own])
        self.verdict = _verdict(told, len(self._seen)) or verdict
        return self.verdict

    def judge(self) -> Verdict | None:
        """Return why the job cannot continue, from the last reading; None if it can, as far as is known."""
        now = self._clock()
        absent = [i for i, seen in enumerate(self._seen) if seen.beat is None and now - seen.heard > self._join]
        if absent:
            return Verdict(
                tuple(absent),
                f"{named(absent)} did not come within {self._join:g} s",
                "see why, or whether as many processes were started as the job is to have",
            )
        if silent := self.silent(self._deadline):
            were = "were" if len(silent) > 1 else "was"
            return self._late(silent, f"{named(silent)} {were} not heard of for {self._deadline:g} s")
        if any(seen.beat is None or now - seen.moved <= self._deadline for seen in self._seen):
            return None
        if not any(seen.beat and seen.beat.waits for seen in self._seen):
            return None  # each is computing
        return self.blame(self._deadline)

    def blame(self, seconds: float) -> Verdict:
        """Return the verdict on the ranks for which the others have waited this many seconds."""
        suspects = self.suspects()
        if suspects:
            return self._late(suspects, f"the others waited {seconds:g} s for {named(suspects)}")
        places = "; ".join(self.describe(rank) for rank in range(min(len(self._seen), _MOST_NAMED)))
        return Verdict(
            (),
            f"all processes have waited for one another for {seconds:g} s: {places}",
            "ranks must take part in the same collectives in the same order",
        )

    def silent(self, seconds: float) -> list[int]:
        """Return the ranks that have sent a heartbeat before, but none for ``seconds``."""
        now = self._clock()
        return [rank for rank, seen in enumerate(self._seen) if seen.beat and now - seen.heard > seconds]

    def still(self) -> float:
        """Return the seconds for which no process has moved."""
        return self._clock() - max(seen.moved for seen in self._seen)

    def suspects(self) -> list[int]:
        """Return the ranks that the others wait for; empty if they are indistinguishable."""
        busy = [rank for rank, seen in enumerate(self._seen) if not (seen.beat and seen.beat.waits)]
        if 0 < len(busy) < len(self._seen):
            return busy
        moves = [seen.beat.moves if seen.beat else 0 for seen in self._seen]
        behind = [rank for rank, count in enumerate(moves) if count == min(moves)]
        return behind if len(behind) < len(moves) else []

    def late(self, seconds: float) -> list[int]:
        """Return the ranks that are silent, or that others wait for, for at least this many seconds."""
        now = self._clock()
        waiting = [now - seen.moved > seconds for seen in self._seen if seen.beat and seen.beat.waits]
        suspects = [rank for rank in self.suspects() if now - self._seen[rank].moved > seconds] if any(waiting) else []
        return sorted({*self.silent(seconds), *suspects})

    def describe(self, rank: int) -> str:
        """Describe the position of a process at its last heartbeat."""
        beat = self._seen[rank].beat
        return f"rank {rank} was last heard of {beat.where}" if beat else f"rank {rank} has not come yet"

    def _late(self, ranks: list[int], what: str) -> Verdict:
        places = "; ".join(self.describe(rank) for rank in ranks[:_MOST_NAMED])
        do = "do" if len(ranks) > 1 else "does"
        return Verdict(
            tuple(ranks),
            f"{what}: {places}",
            f"see what {named(ranks)} {do}; if only slow, a longer parallel.deadline_s, of which that time is a part",
        )


def named(ranks: Iterable[int]) -> str:
    """Format one or more ranks for messages: ``rank 3``, ``ranks 3 and 5``."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) > _MOST_NAMED:
        numbers = [*numbers[: _MOST_NAMED - 1], f"{len(numbers) - _MOST_NAMED + 1} more"]
    *first, last = numbers
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _beat(value: Any) -> Beat | None:
    """Convert a value from the store to a beat; None if it is not valid."""
    if not isinstance(value, list) or len(value) != len(Beat._fields):
        return None
    number, life, moves, where, waits = value
    if not all(_is_count(count, _MOST_COUNTED) for count in (number, life, moves)):
        return None
    if not (isinstance(where, str) and len(where) <= _MOST_PLACE and isinstance(waits, bool)):
        return None
    return Beat(number, life, moves, printable(where), waits)


def _verdict(value: Any, size: int) -> Verdict | None:
    """Convert a value from the store to a verdict; None if it is not valid."""
    if not isinstance(value, list) or len(value) != len(Verdict._fields):
        return None
    ranks, *texts, is_own = value
    if not isinstance(ranks, list) or len(ranks) > size or not all(_is_count(rank, size) for rank in ranks):
        return None
    if not isinstance(is_own, bool) or not all(isinstance(text, str) and len(text) <= _MOST_TEXT for text in texts):
        return None
    what, remedy = (printable(text, lines=True) for text in texts)
    return Verdict(tuple(ranks), what, remedy, is_own)


def _is_count(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit
