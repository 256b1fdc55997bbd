"""What a pipeline schedule does in time: every action and every message with its start and end.

Ranks take their actions in order, each as soon as the one before is done and its inputs have arrived. A message leaves
when the action that makes it ends, waits for the messages before it on the same way (one first-in first-out queue for
each ordered pair of ranks, both directions at once), occupies the way for its transmission and arrives after the
latency. Times are exact for this model: no event is missed and nothing is averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cordillera.errors import PlanError
from cordillera.planning.schedules import Action, Kind, Schedule


@dataclass(frozen=True)
class StageSeconds:
    """How long a stage's actions take on its rank, in seconds.

    Attributes:
        forward: Of each stage, ``F``.
        input_gradient: Of each stage, ``I``.
        weight_gradient: Of each stage, ``W``; a whole backward takes both.
        joined: What the actions of a joined pair take, as a part of what they take alone; below 1 where a kernel hides
            the communication of one behind the other.
    """

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    joined: float = 1.0

    @classmethod
    def equal(cls, stages: int, forward: float, backward: float, joined: float = 1.0) -> StageSeconds:
        """All stages alike, half of a backward for the input and half for the weights.

        Args:
            stages: How many.
            forward: Seconds.
            backward: Seconds of the whole backward.
            joined: See above.
        """
        half = [backward / 2] * stages
        return cls([forward] * stages, half, half, joined)

    def of(self, action: Action) -> float:
        """Seconds of one action alone."""
        stage = action.stage
        if action.kind is Kind.FORWARD:
            return self.forward[stage]
        if action.kind is Kind.INPUT:
            return self.input_gradient[stage]
        if action.kind is Kind.WEIGHT:
            return self.weight_gradient[stage]
        return self.input_gradient[stage] + self.weight_gradient[stage]

    def check(self, stages: int) -> None:
        """Refuse times that are negative, not finite, or of another number of stages."""
        for name in ("forward", "input_gradient", "weight_gradient"):
            values = getattr(self, name)
            if len(values) != stages:
                raise PlanError(f"{len(values)} values for {stages} stages", where=f"stage seconds, {name}")
            for stage, value in enumerate(values):
                if not (math.isfinite(value) and value >= 0):
                    raise PlanError(f"{value} is not a time", where=f"stage seconds, {name}, stage {stage}")
        if not (math.isfinite(self.joined) and self.joined > 0):
            raise PlanError(f"{self.joined} is not a part of a time", where="stage seconds, joined")


@dataclass(frozen=True)
class Way:
    """How messages travel from one rank to another.

    Attributes:
        latency: One-way, seconds.
        forward: Seconds that a message of activations occupies the way.
        backward: Seconds that a message of gradients does; None for as long as activations.
    """

    latency: float = 0.0
    forward: float = 0.0
    backward: float | None = None

    def occupied(self, kind: Kind) -> float:
        """Seconds for the message that an action sends."""
        return self.forward if kind is Kind.FORWARD or self.backward is None else self.backward

    def check(self, where: str) -> None:
        """Refuse negative and infinite times."""
        for name in ("latency", "forward", "backward"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise PlanError(
                    f"a {name} of {value} s", where=where, remedy="a way needs a capacity above 0 and a finite latency"
                )


@dataclass(frozen=True)
class Message:
    """One transfer between ranks.

    Attributes:
        action: Whose result it carries.
        source: Rank.
        target: Rank.
        queued: When its producer ended, seconds.
        start: When it got the way.
        end: When it left the way.
        arrival: When it was there.
    """

    action: Action
    source: int
    target: int
    queued: float
    start: float
    end: float
    arrival: float


@dataclass
class Timeline:
    """A schedule in time.

    Attributes:
        schedule: What was simulated.
        starts: Of every action, by rank, seconds.
        ends: Of every action, by rank, seconds.
        messages: In order of their producers' ends within a rank.
    """

    schedule: Schedule
    starts: list[NDArray[np.float64]]
    ends: list[NDArray[np.float64]]
    messages: list[Message] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max((float(ends[-1]) for ends in self.ends if len(ends)), default=0.0)

    @property
    def busy(self) -> NDArray[np.float64]:
        """Seconds that each rank computes: ``[P]``."""
        return np.array([float((e - s).sum()) for s, e in zip(self.starts, self.ends, strict=True)])

    @property
    def bubble(self) -> float:
        """Part of all ranks' time that is not computation."""
        total = self.seconds * len(self.ends)
        return 1.0 - float(self.busy.sum()) / total if total else 0.0

    def waiting_for_messages(self) -> NDArray[np.float64]:
        """Seconds that each rank is idle while a message for its next action is on its way: ``[P]``.

        This is exposed communication. What remains of the idle time waits for other ranks' computation.
        """
        arrivals = {(m.action[:3], m.target): m for m in self.messages}
        exposed = np.zeros(len(self.ends))
        for rank, actions in enumerate(self.schedule.actions):
            free = 0.0
            for i, action in enumerate(actions):
                start = float(self.starts[rank][i])
                for need in self.schedule.needs(action):
                    message = arrivals.get((need, rank))
                    if message is not None and message.arrival > free:
                        exposed[rank] += max(0.0, min(start, message.arrival) - max(free, message.queued))
                free = float(self.ends[rank][i])
        return exposed


def simulate(
    schedule: Schedule,
    seconds: StageSeconds,
    ways: Mapping[tuple[int, int], Way] | Callable[[int, int], Way] | None = None,
) -> Timeline:
    """When every action and message of a schedule starts and ends.

    Args:
        schedule: Checked or not; one whose ranks wait for one another is refused.
        seconds: Of the stages' actions.
        ways: From rank to rank: a function of both, or a mapping in which a missing pair is a way that costs nothing.

    Raises:
        PlanError: For times that are not times, and for ranks that wait for one another.
    """
    seconds.check(schedule.stages)
    found: dict[tuple[int, int], Way] = {}

    def way(source: int, target: int) -> Way:
        pair = (source, target)
        if pair not in found:
            one = ways(source, target) if callable(ways) else (ways or {}).get(pair, Way())
            one.check(f"way from rank {source} to rank {target}")
            found[pair] = one
        return found[pair]

    rank_of, last = schedule.rank_of, schedule.stages - 1
    cost = {(kind, stage): seconds.of(Action(kind, stage, 0)) for kind in Kind for stage in range(schedule.stages)}
    arrived: dict[tuple[Kind, int, int], float] = {}  # when the action that needs it can start, by (kind, stage, mb)
    way_free: dict[tuple[int, int], float] = {}
    starts: list[list[float]] = [[] for _ in schedule.actions]
    ends: list[list[float]] = [[] for _ in schedule.actions]
    messages: list[Message] = []
    position = [0] * schedule.ranks
    forward, backward, weight = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
    runnable = list(range(schedule.ranks))
    left = sum(map(len, schedule.actions))

    def inputs(action: Action) -> float | None:
        """When an action's inputs are there; None while that is not known."""
        kind, stage, microbatch = action[:3]
        if kind is forward:
            return arrived.get((forward, stage, microbatch)) if stage else 0.0
        return arrived.get((backward, stage, microbatch)) if kind is not weight and stage < last else 0.0

    while runnable:
        rank = runnable.pop()
        actions, own_starts, own_ends = schedule.actions[rank], starts[rank], ends[rank]
        i = position[rank]
        free = own_ends[-1] if own_ends else 0.0
        while i < len(actions):
            action = actions[i]
            start = inputs(action)
            if start is None:
                break
            duration = cost[action[:2]]
            if action.joined:
                duration *= seconds.joined
            elif i + 1 < len(actions) and actions[i + 1].joined:  # both begin as one, when the inputs of both are there
                partner = inputs(actions[i + 1])
                if partner is None:
                    break
                start = max(start, partner)
                duration *= seconds.joined
            start = max(start, free)
            end = free = start + duration
            kind, stage, microbatch = action[:3]
            own_starts.append(start)
            own_ends.append(end)
            i += 1
            left -= 1
            # what the next stage, or the one before, can start with
            if kind is forward:
                if stage == last:
                    continue
                key, other = (forward, stage + 1, microbatch), rank_of[stage + 1]
            elif kind is weight or stage == 0:
                continue
            else:
                key, other = (backward, stage - 1, microbatch), rank_of[stage - 1]
            if other == rank:
                arrived[key] = end
                continue
            one = way(rank, other)
            begin = max(end, way_free.get((rank, other), 0.0))
            done = begin + one.occupied(kind)
            way_free[rank, other] = done
            arrived[key] = done + one.latency
            messages.append(Message(action, rank, other, end, begin, done, done + one.latency))
            if other not in runnable:
                runnable.append(other)
        position[rank] = i
    if left:
        schedule.check()  # says what is wrong with it
        raise PlanError("actions remain that cannot start", where=f"schedule {schedule.name}")
    return Timeline(schedule, [np.array(s) for s in starts], [np.array(e) for e in ends], messages)
