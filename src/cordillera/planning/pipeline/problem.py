"""One pipeline step to schedule: times of its actions, ways of its messages, and limits of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from cordillera.errors import PlanError
from cordillera.planning.pipeline.schedules import Action, Kind, Schedule
from cordillera.planning.pipeline.simulator import StageSeconds, Timeline, Way, Ways, simulate

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741 (the field's letters)


@dataclass(frozen=True)
class Problem:
    """One step to schedule, checked once.

    Attributes:
        rank_of: Rank that holds each stage.
        microbatches: ``m``, number of microbatches.
        seconds: Seconds of the actions of the stages.
        ways: Ways that messages take, by pair of ranks.
        limits: Largest number of live forwards of each rank, at most all of them.
        split: Whether backwards are done in two parts.
    """

    rank_of: tuple[int, ...]
    microbatches: int
    seconds: StageSeconds
    ways: dict[tuple[int, int], Way]
    limits: tuple[int, ...]
    split: bool

    @classmethod
    def of(
        cls,
        rank_of: Sequence[int],
        microbatches: int,
        seconds: StageSeconds,
        ways: Ways | None,
        limits: Sequence[int] | None,
        split: bool,
    ) -> Problem:
        """Create a valid problem from the arguments of :func:`cordillera.planning.pipeline.tuning.tuned`.

        With ``split``, a backward is computed in two parts.

        Raises:
            PlanError: If times are invalid, or limits allow no microbatch.
        """
        if microbatches < 1:
            raise PlanError(f"{microbatches} is too few", where="microbatches", remedy="at least 1")
        ranks = max(rank_of, default=-1) + 1
        if not rank_of or set(rank_of) != set(range(ranks)):
            raise PlanError(
                f"{list(rank_of)} leaves ranks without a stage",
                where="rank_of",
                remedy="ranks count from 0 without gaps",
            )
        seconds.check(len(rank_of), microbatches)
        if seconds.microbatches is not None:
            raise PlanError(
                "schedules are searched for microbatches that are alike", where="stage seconds, microbatches"
            )
        pairs = {(a, b) for a, b in pairwise(rank_of) if a != b}
        found = {}
        for pair in sorted(pairs | {(b, a) for a, b in pairs}):
            found[pair] = ways(*pair) if callable(ways) else (ways or {}).get(pair, Way())
            found[pair].check(f"way from rank {pair[0]} to rank {pair[1]}")
        chunks = [list(rank_of).count(rank) for rank in range(ranks)]
        most = [microbatches * count for count in chunks]
        room = most if limits is None else list(limits)
        if len(room) != ranks:
            raise PlanError(f"{len(room)} values for {ranks} ranks", where="limits")
        for rank, (limit, count) in enumerate(zip(room, chunks, strict=True)):
            if limit < count:
                raise PlanError(
                    f"rank {rank} has room for {limit} live forwards and holds {count} stages",
                    where="limits",
                    remedy=f"a microbatch passes only where there is room for one of each stage: at least {count}",
                )
        return cls(tuple(rank_of), microbatches, seconds, found, tuple(map(min, room, most)), split)

    @property
    def ranks(self) -> int:
        """``P``, number of ranks."""
        return len(self.limits)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    @cached_property
    def own(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in order."""
        return tuple(tuple(s for s, holder in enumerate(self.rank_of) if holder == r) for r in range(self.ranks))

    @property
    def chunked(self) -> bool:
        """Whether some rank holds several stages."""
        return self.stages > self.ranks

    @property
    def back(self) -> Kind:
        """Kind of action that passes gradients on."""
        return I if self.split else B

    @property
    def free(self) -> Kind:
        """Kind of action that frees activations."""
        return W if self.split else B

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of actions."""
        return (F, I, W) if self.split else (F, B)

    @property
    def actions(self) -> int:
        """Number of actions."""
        return self.microbatches * self.stages * len(self.kinds)

    @cached_property
    def cost(self) -> dict[tuple[Kind, int], float]:
        """Seconds by kind and stage."""
        return {(kind, s): self.seconds.of(Action(kind, s, 0)) for s in range(self.stages) for kind in self.kinds}

    def target(self, kind: Kind, stage: int) -> tuple[Kind, int] | None:
        """Return the action that may begin when one has ended, elsewhere or in the last stage itself; None for none."""
        if kind is F:
            return (F, stage + 1) if stage + 1 < self.stages else (self.back, stage)
        return (kind, stage - 1) if kind is self.back and stage else None

    def crosses(self, kind: Kind, stage: int) -> tuple[int, int] | None:
        """Return the way that the message of an action takes, or None without a message."""
        target = self.target(kind, stage)
        if target is None or self.rank_of[target[1]] == self.rank_of[stage]:
            return None
        return self.rank_of[stage], self.rank_of[target[1]]

    def travel(self, kind: Kind, stage: int) -> float:
        """Return the seconds from the end of an action to its result's arrival over a free way."""
        pair = self.crosses(kind, stage)
        return 0.0 if pair is None else self.ways[pair].occupied(kind) + self.ways[pair].latency

    @cached_property
    def reach(self) -> tuple[list[float], list[float]]:
        """For each stage, the seconds before its first forward can start and those after its last backward."""
        before, after = [0.0], [0.0]
        for stage in range(self.stages - 1):
            before.append(before[-1] + self.cost[F, stage] + self.travel(F, stage))
            after.append(after[-1] + self.travel(self.back, stage + 1) + self.cost[self.back, stage])
        return before, after

    @cached_property
    def bound(self) -> float:
        """Lower bound in seconds: one microbatch, or a rank's work with what must precede and follow it."""
        before, after = self.reach
        last = self.stages - 1
        best = before[last] + self.cost[F, last] + self.cost[self.back, last] + after[last]
        for own in self.own:
            work = self.microbatches * sum(self.cost[kind, stage] for kind in self.kinds for stage in own)
            best = max(best, before[own[0]] + work + (0.0 if self.split else after[own[0]]))
        return best

    def under_way(self, stage: int) -> int:
        """Return the live forwards of a stage that keep its rank busy without waiting: round trip over period."""
        before, after = self.reach
        last = self.stages - 1
        there = before[last] - before[stage] + self.cost[F, last]
        back = after[last] - after[stage] + self.cost[self.back, last]
        period = sum(self.cost[kind, other] for kind in self.kinds for other in self.own[self.rank_of[stage]])
        return min(self.microbatches, math.ceil((there + back) / period - 1e-9)) if period else self.microbatches

    def timeline(self, schedule: Schedule) -> Timeline:
        """Simulate a schedule of this problem."""
        return simulate(schedule, self.seconds, self.ways)

    def fits(self, rank: int, actions: Sequence[Action]) -> bool:
        """Return whether a rank's list of actions keeps to its limit."""
        held = 0
        for action in actions:
            if action.kind is F:
                held += 1
                if held > self.limits[rank]:
                    return False
            elif action.kind is self.free:
                held -= 1
        return True

    def normal(self, schedule: Schedule) -> Schedule:
        """Return the schedule with microbatches in order, backwards whole or split as wanted, and no joined pairs."""
        lists = []
        for actions in schedule.actions:
            number: dict[tuple[Kind, int], int] = {}
            own = []
            for action in actions:
                parts = [I, W] if self.split and action.kind is B else [action.kind]
                for kind in parts:
                    place = number.setdefault((kind, action.stage), 0)
                    number[kind, action.stage] += 1
                    own.append(Action(kind, action.stage, place))
            lists.append(tuple(own))
        return replace(schedule, actions=tuple(lists))
