"""Simulation of a pipeline schedule: every action and every message with its start and end.

Ranks take their actions in order, each as soon as the previous one is done and its inputs have arrived. A message
leaves when the action that produces it ends, waits for earlier messages on the same way (one first-in first-out queue
for each ordered pair of ranks, so that both directions are independent), occupies the way for its transmission, and
arrives after the latency. Times are exact for this model: no event is missed and nothing is averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cordillera.errors import PlanError
from cordillera.planning.network.contention import Contention
from cordillera.planning.pipeline.schedules import Action, Kind, Schedule

_ALONE = Contention()


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of the actions of every stage on its rank.

    Attributes:
        forward: Seconds of each stage's forward, ``F``.
        input_gradient: Seconds of each stage's input gradient, ``I``.
        weight_gradient: Seconds of each stage's weight gradient, ``W``; a whole backward takes both.
        joined: Time of a joined pair relative to the sum of its actions alone; below 1 if a kernel hides the
            communication of one behind the other.
        microbatches: Time of each microbatch as a multiple of these times; None if all are equal. Packed documents make
            microbatches of unequal work.
        contention: How the collectives inside an action and a reduction of gradients beside it slow each other, by kind
            and stage; what is missing does not.
    """

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    joined: float = 1.0
    microbatches: Sequence[float] | None = None
    contention: Mapping[tuple[Kind, int], Contention] = field(default_factory=dict)

    @classmethod
    def equal(cls, stages: int, forward: float, backward: float, joined: float = 1.0) -> StageSeconds:
        """Return equal times for all ``stages``; half of ``backward`` is for the input and half for the weights.

        The seconds of a forward are ``forward``; a joined pair takes ``joined`` times what its actions take alone.
        """
        half = [backward / 2] * stages
        return cls([forward] * stages, half, half, joined)

    def of(self, action: Action) -> float:
        """Return the seconds of one action alone."""
        times = 1.0 if self.microbatches is None else self.microbatches[action.microbatch]
        return times * self.of_kind(action.kind, action.stage)

    def of_kind(self, kind: Kind, stage: int) -> float:
        """Return the seconds of an action of a ``kind`` in a ``stage``, before the factor of its microbatch."""
        if kind is Kind.FORWARD:
            return self.forward[stage]
        if kind is Kind.INPUT:
            return self.input_gradient[stage]
        if kind is Kind.WEIGHT:
            return self.weight_gradient[stage]
        return self.input_gradient[stage] + self.weight_gradient[stage]

    def check(self, stages: int, microbatches: int) -> None:
        """Check that times are finite and not negative, and fit the numbers of ``stages`` and ``microbatches``.

        Raises:
            PlanError: If they do not; the message names the part and the stage or microbatch.
        """
        for name in ("forward", "input_gradient", "weight_gradient"):
            values = getattr(self, name)
            if len(values) != stages:
                raise PlanError(f"{len(values)} values for {stages} stages", where=f"stage seconds, {name}")
            for stage, value in enumerate(values):
                if not (math.isfinite(value) and value >= 0):
                    raise PlanError(f"{value} is not a time", where=f"stage seconds, {name}, stage {stage}")
        if not (math.isfinite(self.joined) and self.joined > 0):
            raise PlanError(f"{self.joined} is not a part of a time", where="stage seconds, joined")
        if self.microbatches is None:
            return
        if len(self.microbatches) != microbatches:
            raise PlanError(
                f"{len(self.microbatches)} values for {microbatches} microbatches", where="stage seconds, microbatches"
            )
        for microbatch, value in enumerate(self.microbatches):
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(f"{value} is not a multiple of a time", where=f"stage seconds, microbatch {microbatch}")


@dataclass(frozen=True)
class Way:
    """The way of messages from one rank to another.

    Attributes:
        latency: One-way latency, seconds.
        forward: Seconds that a message of activations occupies the way.
        backward: Seconds that a message of gradients occupies the way; None for as long as activations.
        slowed: Factor by which a message takes longer during a reduction of gradients.
        lost: Part of its rate that the reduction loses meanwhile.
    """

    latency: float = 0.0
    forward: float = 0.0
    backward: float | None = None
    slowed: float = 1.0
    lost: float = 0.0

    def occupied(self, kind: Kind) -> float:
        """Return the seconds that the message of an action occupies the way."""
        return self.forward if kind is Kind.FORWARD or self.backward is None else self.backward

    def check(self, where: str) -> None:
        """Check that times are finite and not negative; errors name ``where``."""
        for name in ("latency", "forward", "backward"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise PlanError(
                    f"a {name} of {value} s", where=where, remedy="a way needs a capacity above 0 and a finite latency"
                )
        if not (1 <= self.slowed < math.inf and 0 <= self.lost <= 1):
            raise PlanError(f"messages {self.slowed} times as long, {self.lost} of a rate lost", where=where)

    def beside(self, seconds: float, reduction: float) -> tuple[float, float]:
        """Return the time of a message during a reduction of gradients, and the delay of the reduction, in seconds.

        Alone, the message takes ``seconds`` and the rest of the reduction ``reduction``.
        """
        together = seconds * self.slowed
        if self.lost * together + reduction < together:  # the reduction ends first
            together = reduction / (1.0 - self.lost)
        return seconds + together * (1.0 - 1.0 / self.slowed), together * self.lost


@dataclass(frozen=True)
class StageMessage:
    """One transfer between ranks; times are in seconds.

    Attributes:
        action: Action whose result the message carries.
        source: Rank that sends.
        target: Rank that receives.
        queued: Time at which its producer ended.
        start: Time at which transmission began.
        end: Time at which transmission ended.
        arrival: Time at which it arrived.
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
    """A simulated schedule.

    Attributes:
        schedule: The schedule.
        starts: Start of every action, by rank, seconds.
        ends: End of every action, by rank, seconds.
        waiting: Seconds that each rank is idle while a message for its next action is in transit: ``[P]``. This is
            exposed communication; the rest of the idle time waits for computation on other ranks.
        delayed: Seconds by which messages and collectives inside actions delayed reductions of gradients, by rank and
            position of the action with which the reduction began.
        slowed: Seconds by which reductions made the actions of each rank longer: ``[P]``.
    """

    schedule: Schedule
    starts: list[NDArray[np.float64]]
    ends: list[NDArray[np.float64]]
    waiting: NDArray[np.float64]
    delayed: dict[tuple[int, int], float] = field(default_factory=dict)
    slowed: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    _sent: list[tuple[int, int, int, float, float, float]] = field(default_factory=list, repr=False)

    @cached_property
    def messages(self) -> list[StageMessage]:
        """Every message, ordered by rank and by the end of its producer."""
        return [
            StageMessage(
                self.schedule.actions[source][i], source, target, float(self.ends[source][i]), start, end, arrival
            )
            for source, target, i, start, end, arrival in self._sent
        ]

    @property
    def seconds(self) -> float:
        """Time of the last end, seconds from the start."""
        return max((float(ends[-1]) for ends in self.ends if len(ends)), default=0.0)

    @property
    def busy(self) -> NDArray[np.float64]:
        """Seconds that each rank computes: ``[P]``."""
        return np.array([float((e - s).sum()) for s, e in zip(self.starts, self.ends, strict=True)])


class _Step(NamedTuple):
    """A prepared action: positions in the table of arrivals, and its times."""

    need: int  # position of its input; -1 if it needs none
    out: int  # position of its result; -1 if none is passed on
    way: int  # number of the way to its target; -1 on the same rank
    target: int  # rank that receives the result
    seconds: float
    occupied: float  # seconds that its message occupies the way
    leads: bool  # whether the next action begins at the same time


Ways = Mapping[tuple[int, int], Way] | Callable[[int, int], Way]


def _prepared(schedule: Schedule, seconds: StageSeconds, ways: Ways | None) -> tuple[list[list[_Step]], list[Way]]:
    """Return every rank's actions, and the ways that they use."""
    seconds.check(schedule.stages, schedule.microbatches)
    numbers: dict[tuple[int, int], int] = {}
    known: list[Way] = []

    def number(source: int, target: int) -> int:
        pair = (source, target)
        if pair not in numbers:
            one = ways(source, target) if callable(ways) else (ways or {}).get(pair, Way())
            one.check(f"way from rank {source} to rank {target}")
            numbers[pair] = len(known)
            known.append(one)
        return numbers[pair]

    m, last = schedule.microbatches, schedule.stages - 1
    back = schedule.stages * m  # activations arrive in the first half of the table, gradients in the second
    cost = {(kind, stage): seconds.of_kind(kind, stage) for kind in Kind for stage in range(schedule.stages)}
    times = [1.0] * m if seconds.microbatches is None else seconds.microbatches
    programs: list[list[_Step]] = []
    for rank, actions in enumerate(schedule.actions):
        program: list[_Step] = []
        for i, (kind, stage, microbatch, joined) in enumerate(actions):
            place, need, out, other = stage * m + microbatch, -1, -1, rank
            if kind is Kind.FORWARD:
                need = place if stage else -1
                if stage < last:
                    out, other = place + m, schedule.rank_of[stage + 1]
            elif kind is not Kind.WEIGHT:
                need = back + place if stage < last else -1
                if stage:
                    out, other = back + place - m, schedule.rank_of[stage - 1]
            way = number(rank, other) if other != rank else -1
            leads = i + 1 < len(actions) and actions[i + 1].joined
            duration = cost[kind, stage] * times[microbatch] * (seconds.joined if joined or leads else 1.0)
            occupied = known[way].occupied(kind) if way >= 0 else 0.0
            program.append(_Step(need, out, way, other, duration, occupied, leads))
        programs.append(program)
    return programs, known


def _stuck(schedule: Schedule) -> PlanError:
    schedule.check()  # raises the specific error
    return PlanError("actions remain that cannot start", where=f"schedule {schedule.name}")


# One loop over local lists: searches run it for every candidate, and calls cost time in Python.
def simulate(
    schedule: Schedule,
    seconds: StageSeconds,
    ways: Ways | None = None,
    reductions: Sequence[Mapping[int, float]] | None = None,
) -> Timeline:
    """Compute when every action and message of a schedule starts and ends.

    Args:
        schedule: Schedule, which need not have been checked.
        seconds: Seconds of the actions of the stages.
        ways: Ways from rank to rank: a function of both, or a mapping in which a missing pair costs nothing.
        reductions: Seconds of the gradient reductions that each rank runs beside its computation, one after the other,
            by the position of the action with which each begins; None for none. They and the messages that the rank
            sends meanwhile slow each other as the ways say, they and the rank's actions as their contention says.

    Raises:
        PlanError: If times are invalid, or ranks wait for one another.
    """
    programs, known = _prepared(schedule, seconds, ways)
    begins = reductions or [{}] * len(programs)
    reducing = [0.0] * len(programs)  # time until which each rank reduces gradients
    latest = [-1] * len(programs)  # position of the action with which the last reduction began
    delayed: dict[tuple[int, int], float] = {}
    back = schedule.stages * schedule.microbatches
    ready: list[float | None] = [None] * (2 * back)
    sent_at = [-1.0] * (2 * back)  # when a message was queued; -1 for results that stay on their rank
    way_free, latency = [0.0] * len(known), [way.latency for way in known]
    starts: list[list[float]] = [[] for _ in programs]
    ends: list[list[float]] = [[] for _ in programs]
    waiting, slowed, crowded = [0.0] * schedule.ranks, [0.0] * schedule.ranks, seconds.contention
    sent: list[tuple[int, int, int, float, float, float]] = []
    position = [0] * schedule.ranks
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        program, own_starts, own_ends = programs[rank], starts[rank], ends[rank]
        i, exposed = position[rank], 0.0
        free = own_ends[-1] if own_ends else 0.0
        while i < len(program):
            need, out, way, other, duration, occupied, leads = program[i]
            start = free
            if need >= 0:
                arrival = ready[need]
                if arrival is None:
                    break
                if arrival > start:
                    start = arrival
            if leads:  # both begin together, when the inputs of both have arrived
                partner = program[i + 1].need
                if partner >= 0:
                    arrival = ready[partner]
                    if arrival is None:
                        break
                    if arrival > start:
                        start = arrival
                        need = partner
            if start > free and sent_at[need] >= 0.0:
                exposed += start - max(free, sent_at[need])
            if i in begins[rank]:
                reducing[rank], latest[rank] = max(reducing[rank], start) + begins[rank][i], i
            if crowded and reducing[rank] > start:
                action = schedule.actions[rank][i]
                longer, later = crowded.get(action[:2], _ALONE).beside(duration, reducing[rank] - start)
                duration, slowed[rank], reducing[rank] = (
                    duration + longer,
                    slowed[rank] + longer,
                    reducing[rank] + later,
                )
                delayed[rank, latest[rank]] = delayed.get((rank, latest[rank]), 0.0) + later
            free = start + duration
            own_starts.append(start)
            own_ends.append(free)
            if out >= 0:
                if way < 0:
                    ready[out] = free
                else:
                    begin = way_free[way]
                    if begin < free:
                        begin = free
                    if reducing[rank] > begin:
                        occupied, later = known[way].beside(occupied, reducing[rank] - begin)
                        reducing[rank] += later
                        delayed[rank, latest[rank]] = delayed.get((rank, latest[rank]), 0.0) + later
                    done = begin + occupied
                    way_free[way] = done
                    arrival = done + latency[way]
                    ready[out] = arrival
                    sent_at[out] = free
                    sent.append((rank, other, i, begin, done, arrival))
                    if other not in runnable:
                        runnable.append(other)
            i += 1
        position[rank] = i
        waiting[rank] += exposed
    if any(i < len(program) for i, program in zip(position, programs, strict=True)):
        raise _stuck(schedule)
    times = ([np.array(s) for s in starts], [np.array(e) for e in ends], np.array(waiting))
    return Timeline(schedule, *times, delayed, np.array(slowed), sent)


def simulate_late(
    schedule: Schedule,
    seconds: StageSeconds,
    ways: Ways | None,
    late: Callable[[Way], NDArray[np.float64]],
    keep: Sequence[Collection[int]],
) -> list[dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]]:
    """Run :func:`simulate` for many draws at once, with an individual delay of every message in each draw.

    The schedule fixes the order of all actions and messages whatever their times, so one pass computes all draws, with
    an array where :func:`simulate` has a number. The arguments ``schedule``, ``seconds`` and ``ways`` are those of
    :func:`simulate`.

    Args:
        late: Function called once for each message with its way; returns the delays of arrival in seconds, ``[draws]``.
        keep: Positions of the wanted actions, by rank.

    Returns:
        For each rank, start and end of each wanted action, seconds: ``[draws]`` each.

    Raises:
        PlanError: If times are invalid, or ranks wait for one another.
    """
    programs, known = _prepared(schedule, seconds, ways)
    arrived: dict[int, NDArray[np.float64]] = {}
    way_free: list[NDArray[np.float64] | float] = [0.0] * len(known)
    free: list[NDArray[np.float64]] = [np.zeros(1)] * schedule.ranks
    found: list[dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]] = [{} for _ in programs]
    position = [0] * schedule.ranks
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        program = programs[rank]
        for i in range(position[rank], len(program)):
            one = program[i]
            needs = [need for need in (one.need, program[i + 1].need if one.leads else -1) if need >= 0]
            if any(need not in arrived for need in needs):
                break
            start = free[rank]
            for need in needs:
                start = np.maximum(start, arrived[need])
            if one.need >= 0:
                del arrived[one.need]  # not needed again; the table would keep the draws of every message
            free[rank] = end = start + one.seconds
            if i in keep[rank]:
                found[rank][i] = (start, end)
            if one.out >= 0 and one.way < 0:
                arrived[one.out] = end
            elif one.out >= 0:
                way_free[one.way] = done = np.maximum(way_free[one.way], end) + one.occupied
                arrived[one.out] = done + known[one.way].latency + late(known[one.way])
                if one.target not in runnable:
                    runnable.append(one.target)
            position[rank] = i + 1
    if any(i < len(program) for i, program in zip(position, programs, strict=True)):
        raise _stuck(schedule)
    return found
