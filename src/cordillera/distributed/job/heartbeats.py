"""Hearts of a job's processes in a store that all of them reach: who is silent, who stands still, whose fault it was.

Every process writes a beat again and again: a number that rises, and where its loop is. A process that was ended or
stopped beats no more; one whose loop hangs still beats and does not move. Which of those that do not move is waited for
follows from where they are: the others stand in a collective. Here is the decision only; threads and time limits are
in :mod:`cordillera.distributed.job.watchdog`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from cordillera.distributed.job.store import JobStore
from cordillera.distributed.pipeline.runner import PeerError
from cordillera.errors import printable

_MOST_NAMED = 8
_MOST_COUNTED = 2**53
_MOST_PLACE, _MOST_TEXT = 300, 8_000  # characters


class RankError(PeerError):
    """A rank ended, stopped, stood still or failed, so that the others cannot go on.

    Args:
        what: One sentence that names the rank.
        ranks: Whose fault it was; empty where that cannot be said.
        where: Who says so.
        remedy: Advice on what to do about it.
    """

    def __init__(
        self, what: str, *, ranks: Iterable[int] = (), where: str | None = None, remedy: str | None = None
    ) -> None:
        self.ranks = tuple(ranks)
        super().__init__(what, peer=self.ranks[0] if len(self.ranks) == 1 else None, where=where, remedy=remedy)


class Beat(NamedTuple):
    """What a process says of itself.

    Attributes:
        number: Rises with every beat.
        life: Rises when the loop said where it is or computed since the last beat.
        moves: Number of times that the loop has reported its position.
        where: It was then, and the line of its program.
        waits: Whether that line waits for other processes.
    """

    number: int
    life: int
    moves: int
    where: str
    waits: bool


class Verdict(NamedTuple):
    """Why a job cannot go on.

    Attributes:
        ranks: Whose fault it was; empty where that cannot be said.
        what: One sentence.
        remedy: Advice on what to do about it.
    """

    ranks: tuple[int, ...]
    what: str
    remedy: str

    def error(self, where: str | None = None) -> RankError:
        """As what is raised.

        Args:
            where: Who says so.
        """
        return RankError(self.what, ranks=self.ranks, where=where, remedy=self.remedy)


@dataclass
class _SeenBeat:
    """Of one process, and when, by the clock of the one who looks."""

    heard: float
    moved: float
    beat: Beat | None = None


class HeartbeatBoard:
    """What a process knows of all processes of its job.

    Time in which the one who looks did not run itself says nothing about the others and is not counted. Every process
    reads every heart each time, which is for hundreds of processes, not for many thousands.

    Args:
        store: Store that all processes reach, used by this job and attempt only.
        size: Processes.
        deadline_s: The longest that a heart may be silent, and that all may stand still while one is waited for.
        join_s: Longest time until a first beat, in seconds.
        clock: Seconds.

    Attributes:
        verdict: Why the job cannot go on, once any process has said so.
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
        """Say where a process is.

        Args:
            rank: It.
            beat: Beat of this process.
        """
        self._store.set(f"heart/{rank}", beat._replace(where=beat.where[:_MOST_PLACE]))

    def look(self) -> None:
        """Read what the processes say."""
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
                continue  # nothing new
            seen.heard = now
            if seen.beat is None or beat.life != seen.beat.life:
                seen.moved = now
            seen.beat = beat
        self.verdict = self.verdict or _verdict(verdict, len(self._seen))

    def accuse(self, verdict: Verdict) -> Verdict:
        """Tell all processes why the job cannot go on.

        Args:
            verdict: Verdict to tell to all processes.

        Returns:
            What they are told: the first that any process came to.
        """
        told = self._store.first("verdict", [verdict.ranks, verdict.what[:_MOST_TEXT], verdict.remedy[:_MOST_TEXT]])
        self.verdict = _verdict(told, len(self._seen)) or verdict
        return self.verdict

    def judge(self) -> Verdict | None:
        """Why the job cannot go on, by what was read; None if it can, as far as is known."""
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
            return None  # each does something of its own
        return self.blame(self._deadline)

    def blame(self, seconds: float) -> Verdict:
        """Whom the others wait for.

        Args:
            seconds: Time that the processes have waited, in seconds.
        """
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
        """Ranks whose hearts were heard once and then no more.

        Args:
            seconds: For how long.
        """
        now = self._clock()
        return [rank for rank, seen in enumerate(self._seen) if seen.beat and now - seen.heard > seconds]

    def still(self) -> float:
        """Seconds for which no process has moved."""
        return self._clock() - max(seen.moved for seen in self._seen)

    def suspects(self) -> list[int]:
        """Ranks for which others wait, if they can be told from those."""
        busy = [rank for rank, seen in enumerate(self._seen) if not (seen.beat and seen.beat.waits)]
        if 0 < len(busy) < len(self._seen):
            return busy
        moves = [seen.beat.moves if seen.beat else 0 for seen in self._seen]
        behind = [rank for rank, count in enumerate(moves) if count == min(moves)]
        return behind if len(behind) < len(moves) else []

    def late(self, seconds: float) -> list[int]:
        """Ranks that others wait for, or that are silent.

        Args:
            seconds: For how long at least.
        """
        now = self._clock()
        waiting = [now - seen.moved > seconds for seen in self._seen if seen.beat and seen.beat.waits]
        suspects = [rank for rank in self.suspects() if now - self._seen[rank].moved > seconds] if any(waiting) else []
        return sorted({*self.silent(seconds), *suspects})

    def describe(self, rank: int) -> str:
        """Where a process was when it was last heard of.

        Args:
            rank: Its number.
        """
        beat = self._seen[rank].beat
        return f"rank {rank} was last heard of {beat.where}" if beat else f"rank {rank} has not come yet"

    def _late(self, ranks: list[int], what: str) -> Verdict:
        places = "; ".join(self.describe(rank) for rank in ranks[:_MOST_NAMED])
        do = "do" if len(ranks) > 1 else "does"
        return Verdict(
            tuple(ranks), f"{what}: {places}", f"see what {named(ranks)} {do}; a longer deadline_s if only slow"
        )


def named(ranks: Iterable[int]) -> str:
    """Ranks as people say them: ``rank 3``, ``ranks 3 and 5``.

    Args:
        ranks: At least one.
    """
    numbers = [str(rank) for rank in ranks]
    if len(numbers) > _MOST_NAMED:
        numbers = [*numbers[: _MOST_NAMED - 1], f"{len(numbers) - _MOST_NAMED + 1} more"]
    *first, last = numbers
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _beat(value: Any) -> Beat | None:
    """Beat of a value from the store; None if the value is not a beat."""
    if not isinstance(value, list) or len(value) != len(Beat._fields):
        return None
    number, life, moves, where, waits = value
    if not all(_is_count(count, _MOST_COUNTED) for count in (number, life, moves)):
        return None
    if not (isinstance(where, str) and len(where) <= _MOST_PLACE and isinstance(waits, bool)):
        return None
    return Beat(number, life, moves, printable(where), waits)


def _verdict(value: Any, size: int) -> Verdict | None:
    """Verdict of a value from the store; None if the value is not a verdict."""
    if not isinstance(value, list) or len(value) != len(Verdict._fields):
        return None
    ranks, *texts = value
    if not isinstance(ranks, list) or len(ranks) > size or not all(_is_count(rank, size) for rank in ranks):
        return None
    if not all(isinstance(text, str) and len(text) <= _MOST_TEXT for text in texts):
        return None
    return Verdict(tuple(ranks), *(printable(text, lines=True) for text in texts))


def _is_count(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit
