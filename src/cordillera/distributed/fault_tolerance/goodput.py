"""Account of a job of replicas: the useful share of its time, the causes of the rest, and the cost of each failure.

All of it follows from the events that replicas, launcher and coordinator wrote. A step is useful if it is on the
winning lineage: the commits that lead to the newest one. Other commits were rolled back.

The time of each replica, from the job's first event to its last, is divided into :data:`TIME_PARTS`:

- ``useful``: computation of useful steps: forward and backward, the sum of gradients itself, the update. The gradients
  of a discarded step are useful if the next attempt of the same process used them again.
- ``redone``: the same of steps that were discarded or rolled back, and of the step in which a process failed.
- ``stalled``: waiting for others: asking, connecting, catching up, votes, sums of gradients beyond what is normal, and
  the whole step if the replica contributed nothing to it.
- ``paused``: time between steps and after the last one: evaluations, checkpoints, records.
- ``absent``: from the end of a process to the return of its replica, and from the epoch that began without a replica
  to the end of its attempt. If an absence began in a pause, the part beyond the longest other pause.
- ``starting``: from the start of the job to the first connection of the replica.

The normal time of a sum is the median over useful steps of the shortest time of their replicas. After the last record
of a process that failed, at most the median time of a step is redone; the rest is absent. Time between the end of a
job and its resumption is not part of it.

Source: effective training time of Llama 3 (arXiv 2407.21783), section 3.3.4; parts and rules are ours.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from cordillera.distributed.fault_tolerance.events import (
    count_of,
    find_gaps,
    is_times,
    name_of,
    names_of,
    time_of,
    value_of,
)  # fmt: skip
from cordillera.distributed.fault_tolerance.launcher import replica_names
from cordillera.distributed.stragglers import Straggler, find_stragglers
from cordillera.errors import RunError

TimePart: TypeAlias = Literal["useful", "redone", "stalled", "paused", "absent", "starting"]

TIME_PARTS: tuple[TimePart, ...] = ("useful", "redone", "stalled", "paused", "absent", "starting")
"""Parts of the time of a replica, which add up to the time of the job."""

COORDINATOR = "coordinator"
"""Name of the coordinator among those that fail and report."""

INJECTED = "injected: "
"""Beginning of messages of `cordillera chaos`."""

_WAITING = ("ask", "fetch", "connect")
_OUTCOMES = ("committed", "discarded")


class TimeSpan(NamedTuple):
    """Time of a replica that counts as one part, in seconds since the job's first event."""

    start: float
    end: float
    part: TimePart


@dataclass(slots=True)
class StepAttempt:
    """Attempt of a replica at a step.

    Attributes:
        at: End of the attempt, in seconds since the job's first event.
        launch: Number of times that the job had been resumed.
        process: Number of times that the replica had connected.
        targets: Number of targets of the whole step; 0 if it was discarded.
        seconds: Seconds of its phases, and of ``all``.
        is_useful: Whether it was committed, on the winning lineage.
        is_kept: Whether it was discarded and its gradients were used in a useful step.
        is_short: Whether it used the gradients of a discarded attempt.
    """

    replica: str
    at: float
    launch: int
    process: int
    is_committed: bool
    epoch: int
    step: int
    parent: str
    lineage: str
    participants: tuple[str, ...]
    members: tuple[str, ...]
    first: int
    iterations: int
    targets: int
    seconds: Mapping[str, float]
    is_useful: bool = False
    is_kept: bool = False
    is_short: bool = False

    @property
    def contributes(self) -> bool:
        """Whether the replica contributed gradients."""
        return self.replica in self.participants

    @property
    def own(self) -> range:
        """Iterations of this replica."""
        if not self.contributes:
            return range(0)
        whole = range(self.first, self.first + self.iterations)
        return whole[self.participants.index(self.replica) :: len(self.participants)]


class EpochBegin(NamedTuple):
    """Beginning of an epoch: time in seconds since the job's first event, and members."""

    at: float
    launch: int
    epoch: int
    step: int
    members: tuple[str, ...]


class JobMessage(NamedTuple):
    """A message for the reader: seconds since the job's first event, its subject, and a text."""

    at: float
    who: str
    text: str


@dataclass(frozen=True)
class ReplicaFault:
    """End or disappearance of a replica, or end of the coordinator.

    Attributes:
        at: Time of its first record, in seconds since the job's first event.
        replica: Name of the replica, or :data:`COORDINATOR`.
        stall_s: Time between the commits of the steps before and after it, less pauses and the median step; for the
            coordinator, which is needed between steps only, up to the second step after it. In seconds, at least 0;
            NaN if no step followed.
        away_s: Time until the replica began a step to which it contributed, in seconds; NaN if it did not.
    """

    at: float
    replica: str
    what: str
    stall_s: float
    away_s: float


@dataclass(frozen=True)
class Goodput:
    """Account of the time of a job.

    Attributes:
        elapsed_s: Time from the job's first event to its last, in seconds.
        times: Seconds of each part of the time of each replica; those of a replica add up to ``elapsed_s``.
        spans: The same in order, without gaps, from 0 to ``elapsed_s``.
        steps: Number of useful steps.
        rolled_back: Number of committed steps that are not useful.
        discarded: Number of attempts of replicas that were discarded.
        degraded_s: Useful time of replicas in steps with fewer participants than are configured, in seconds.
        step_s: Median time of a useful step, in seconds; NaN if there is none.
        faults: Failures in order.
        stragglers: Replicas whose time for a target is far above that of the others, the slowest first.
        attempts: Attempts of each replica in order.
        epochs: Beginnings of epochs in order.
        launches: Times at which the job began (0) and was resumed, in seconds.
        messages: Rollbacks, replicas refused, left out or given up, injected faults, steps without events.
    """

    elapsed_s: float
    times: Mapping[str, Mapping[TimePart, float]]
    spans: Mapping[str, Sequence[TimeSpan]]
    steps: int
    rolled_back: int
    discarded: int
    degraded_s: float
    step_s: float
    faults: Sequence[ReplicaFault]
    stragglers: Sequence[Straggler]
    attempts: Mapping[str, Sequence[StepAttempt]]
    epochs: Sequence[EpochBegin]
    launches: Sequence[float]
    messages: Sequence[JobMessage]

    @property
    def goodput(self) -> float:
        """Useful share of the time of all configured replicas, from 0 to 1.

        A step with ``p`` of ``n`` participants thus counts as ``p / n`` of its time.
        """
        return self.share("useful")

    @property
    def degraded(self) -> float:
        """Share of the time of all configured replicas that was useful in steps with fewer participants."""
        return self._share(self.degraded_s)

    @property
    def mean_stall_s(self) -> float:
        """Mean stall of the faults that a step followed, in seconds; NaN if there is none."""
        known = [one.stall_s for one in self.faults if math.isfinite(one.stall_s)]
        return statistics.fmean(known) if known else math.nan

    def share(self, part: TimePart) -> float:
        """Return the share of a part in the time of all configured replicas."""
        return self._share(math.fsum(one[part] for one in self.times.values()))

    def _share(self, seconds: float) -> float:
        whole = self.elapsed_s * len(self.times)
        return min(1.0, seconds / whole) if whole > 0 else 0.0


def account(events: Iterable[Mapping[str, Any]], replicas: int) -> Goodput:
    """Return the account of a job from its events.

    Args:
        events: Result of :func:`~cordillera.distributed.fault_tolerance.events.read_events`.
        replicas: Number of replicas that the job is configured for.

    Raises:
        RunError: If there are no events, some are missing, or one lacks what it should have.
    """
    history = _History(replicas)
    history.read(sorted(events, key=time_of))
    history.check()
    _mark_useful(history)
    attempts = [one for found in history.attempts.values() for one in found]
    useful = [one for one in attempts if one.is_useful]
    step_s = statistics.median(one.seconds["all"] for one in useful) if useful else math.nan
    times = _Normal(_normal_sum(useful), step_s if useful else 0.0, _longest_pause(history))
    lanes = {name: _walk(history, name, times) for name in history.names}
    chain = {one.lineage for one in useful}
    return Goodput(
        elapsed_s=history.elapsed,
        times={name: lane.time() for name, lane in lanes.items()},
        spans={name: lane.spans for name, lane in lanes.items()},
        steps=len(chain),
        rolled_back=len({one.lineage for one in attempts if one.is_committed} - chain),
        discarded=sum(not one.is_committed for one in attempts),
        degraded_s=math.fsum(lane.degraded for lane in lanes.values()),
        step_s=step_s,
        faults=_faults(history, useful, step_s, lanes),
        stragglers=find_stragglers(_rates(useful)),
        attempts=history.attempts,
        epochs=history.epochs,
        launches=history.launches,
        messages=history.messages,
    )


class _Mark(NamedTuple):
    """An event of a replica: ``joined``, ``step``, ``ended``, ``finished`` or ``launch``."""

    at: float
    kind: str
    attempt: StepAttempt | None = None
    why: str = ""


@dataclass
class _History:
    """Events grouped by replica and lineage, timed by a clock that excludes downtime."""

    replicas: int
    names: tuple[str, ...] = ()
    elapsed: float = 0.0
    launches: list[float] = field(default_factory=lambda: [0.0])
    marks: dict[str, list[_Mark]] = field(default_factory=lambda: defaultdict(list))
    attempts: dict[str, list[StepAttempt]] = field(default_factory=dict)
    began_at: set[int] = field(default_factory=set)  # steps of the replicas' states when they connected
    epochs: list[EpochBegin] = field(default_factory=list)
    dropped: dict[str, list[EpochBegin]] = field(default_factory=lambda: defaultdict(list))
    replaced: dict[str, str] = field(default_factory=dict)  # lost lineages, with the lineages that replaced them
    coordinator_ends: list[_Mark] = field(default_factory=list)
    messages: list[JobMessage] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def read(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Add ``events``, which are in order of time."""
        if not events:
            raise RunError("there are no events of replicas", remedy="train with fault_tolerance.replicas above 1")
        offset = last = time_of(events[0])
        is_up, self.names = False, tuple(replica_names(self.replicas))
        for event in events:
            kind, writer, at = name_of(event, "kind"), name_of(event, "writer"), time_of(event)
            if writer == "launcher" and kind == "coordinator":
                if is_up:  # the previous launcher ended without an event
                    offset += at - last
                    self.launches.append(at - offset)
                    for name in self.names:
                        self.marks[name].append(_Mark(at - offset, "launch"))
                is_up = True
            elif writer == "launcher" and kind == "coordinator ended":
                is_up = False
            last = at
            self._take(event, kind, writer, at - offset)
        self.elapsed = last - offset
        self.messages += [JobMessage(self.elapsed, *gap) for gap in find_gaps(events)]
        for name in self.names:
            self.attempts[name] = [one.attempt for one in self.marks[name] if one.attempt is not None]

    def check(self) -> None:
        """Check that no replica lacks its events."""
        told = {name for found in self.attempts.values() for one in found for name in one.members}
        if silent := sorted(told - self.starts.keys()):
            raise RunError(f"{silent[0]} was a member of steps, and has no events", where=f"{silent[0]}.jsonl")
        if strangers := sorted((self.starts.keys() | self.marks.keys()) - set(self.names)):
            raise RunError(f"is none of {self.replicas} replicas", where=f"{strangers[0]}.jsonl")

    def _take(self, event: Mapping[str, Any], kind: str, writer: str, at: float) -> None:
        if writer == "launcher":
            self._take_launcher(event, kind, at)
        elif writer == COORDINATOR:
            self._take_coordinator(event, kind, at)
        elif kind == "joined":
            self.starts[writer] += 1
            self.began_at.add(count_of(event, "step"))
            self.marks[writer].append(_Mark(at, kind))
        elif kind == "step":
            self.marks[writer].append(_Mark(at, kind, self._attempt(event, writer, at)))
        elif kind == "left":
            self.marks[writer].append(_Mark(at, "finished"))
        elif kind == "fault":
            self.messages.append(JobMessage(at, event.get("replica") or COORDINATOR, INJECTED + name_of(event, "what")))

    def _take_launcher(self, event: Mapping[str, Any], kind: str, at: float) -> None:
        if kind in ("ended", "finished"):
            why = name_of(event, "why") if kind == "ended" else ""
            self.marks[name_of(event, "replica")].append(_Mark(at, kind, None, why))
        elif kind == "given up":
            self.messages.append(JobMessage(at, name_of(event, "replica"), f"given up: {name_of(event, 'why')}"))
        elif kind == "coordinator ended":
            self.coordinator_ends.append(_Mark(at, kind, None, f"it ended with code {event.get('code')}"))

    def _take_coordinator(self, event: Mapping[str, Any], kind: str, at: float) -> None:
        launch = len(self.launches) - 1
        if kind == "epoch":
            begun = EpochBegin(
                at, launch, count_of(event, "epoch"), count_of(event, "step"), names_of(event, "members")
            )
            if self.epochs and self.epochs[-1].launch == launch:
                for name in set(self.epochs[-1].members) - set(begun.members):
                    self.dropped[name].append(begun)
            self.epochs.append(begun)
        elif kind == "rollback":
            lost, kept = (value_of(event, k, lambda one: isinstance(one, Mapping), "a state") for k in ("lost", "kept"))
            self.replaced[str(lost.get("lineage"))] = str(kept.get("lineage"))
            text = f"step {lost.get('step')} was rolled back to step {kept.get('step')}"
            self.messages.append(JobMessage(at, COORDINATOR, text))
        elif kind in ("refused", "waiting", "isolated"):
            who = COORDINATOR if kind == "waiting" else name_of(event, "replica")
            self.messages.append(JobMessage(at, who, f"{kind}: {name_of({'why': 'not reached', **event}, 'why')}"))

    def _attempt(self, event: Mapping[str, Any], writer: str, at: float) -> StepAttempt:
        is_committed = value_of(event, "outcome", _OUTCOMES.__contains__, " or ".join(_OUTCOMES)) == "committed"
        return StepAttempt(
            writer, at, len(self.launches) - 1, self.starts[writer], is_committed, count_of(event, "epoch"),
            count_of(event, "step"), name_of(event, "parent"), name_of(event, "lineage"),
            names_of(event, "participants"), names_of(event, "members"), count_of(event, "first"),
            count_of(event, "iterations"),
            count_of(event, "targets") if is_committed else 0,
            dict(value_of(event, "seconds", is_times, "the times of phases and of all")),
        )  # fmt: skip


def _mark_useful(history: _History) -> None:
    """Mark the attempts on the winning lineage, and those whose gradients were used on it."""
    commits = {one.lineage: one for found in history.attempts.values() for one in found if one.is_committed}
    chain: set[str] = set()
    if commits:
        head = max(commits.values(), key=lambda one: (one.launch, one.epoch, one.step, one.at)).lineage
        replaced = dict(history.replaced)
        while head in replaced:
            head = replaced.pop(head)
        first = 0
        while head in commits and head not in chain:
            chain.add(head)
            head, first = commits[head].parent, commits[head].step
        if chain and first - 1 not in history.began_at:
            raise RunError(f"step {first} follows on a step that no event is of", where=f"step {first - 1}")
    for found in history.attempts.values():
        after: StepAttempt | None = None
        for one in reversed(found):
            one.is_useful = one.is_committed and one.lineage in chain
            if after is not None and not one.is_committed and one.contributes and after.contributes:
                after.is_short = (one.process, one.parent, one.own) == (after.process, after.parent, after.own)
                one.is_kept = after.is_short and (after.is_useful or after.is_kept)
            after = one


def _normal_sum(useful: Iterable[StepAttempt]) -> float:
    """Return the normal time of the sum of gradients in seconds."""
    shortest: dict[str, float] = {}
    for one in useful:
        if len(one.members) > 1 and one.contributes:
            seconds = one.seconds.get("reduce", 0.0)
            shortest[one.lineage] = min(seconds, shortest.get(one.lineage, seconds))
    return statistics.median(shortest.values()) if shortest else 0.0


def _longest_pause(history: _History) -> float:
    """Return the longest pause between attempts of one process in which no epoch began without it, in seconds."""
    longest = 0.0
    for name, attempts in history.attempts.items():
        for one, after in itertools.pairwise(attempts):
            begin = after.at - after.seconds["all"]
            if (one.launch, one.process) == (after.launch, after.process):
                longest = max(longest, begin - one.at if _without(history.dropped[name], one.at) > begin else 0.0)
    return longest


def _without(dropped: Sequence[EpochBegin], at: float) -> float:
    """Return when the first epoch after a time began without a replica; infinity if none did."""
    return next((one.at for one in dropped[bisect_right(dropped, at, key=lambda one: one.at) :]), math.inf)


class _Normal(NamedTuple):
    """Normal time of a sum of gradients and of a step, and the longest pause, in seconds."""

    sum_s: float
    step_s: float
    pause_s: float


class _Lane:
    """Time of one replica, filled from the job's beginning on."""

    def __init__(self) -> None:
        self.spans: list[TimeSpan] = []
        self.at = self.degraded = 0.0

    def until(self, end: float, part: TimePart) -> None:
        """Count the time up to ``end`` as a part; nothing if it has been counted."""
        if end <= self.at:
            return
        if self.spans and self.spans[-1].part == part:
            self.spans[-1] = TimeSpan(self.spans[-1].start, end, part)
        else:
            self.spans.append(TimeSpan(self.at, end, part))
        self.at = end

    def time(self) -> dict[TimePart, float]:
        found: dict[TimePart, list[float]] = {part: [] for part in TIME_PARTS}
        for start, end, part in self.spans:
            found[part].append(end - start)
        return {part: math.fsum(values) for part, values in found.items()}


def _walk(history: _History, name: str, normal: _Normal) -> _Lane:
    """Divide the time of a replica."""
    lane, phase, dropped = _Lane(), "starting", history.dropped[name]
    for mark in [*history.marks[name], _Mark(history.elapsed, "launch")]:
        if mark.kind == "joined":
            if phase == "running":  # the end before it was not recorded
                _fail(lane, mark.at, dropped, normal.step_s)
            lane.until(mark.at, "starting" if phase == "starting" else "absent")
            phase = "running"
        elif mark.attempt is not None:
            _divide(lane, mark.attempt, dropped, normal, len(history.names))
            phase = "running"
        elif phase == "running" and mark.kind != "finished":
            _fail(lane, mark.at, dropped, normal.step_s)
        elif phase == "running":
            _pause(lane, mark.at, dropped, normal.pause_s)
        else:
            lane.until(mark.at, _UNTIL[phase])
        if mark.kind in ("ended", "finished"):
            phase = mark.kind
        elif mark.kind == "launch":
            phase = "starting"
    return lane


_UNTIL: Mapping[str, TimePart] = {"starting": "starting", "ended": "absent", "finished": "paused"}


def _fail(lane: _Lane, at: float, dropped: Sequence[EpochBegin], step_s: float) -> None:
    """Count the time from the last record of a process to its end."""
    lane.until(min(at, _without(dropped, lane.at), lane.at + step_s), "redone")
    lane.until(at, "absent")


def _pause(lane: _Lane, until: float, dropped: Sequence[EpochBegin], longest: float) -> None:
    """Count the time between attempts; a replica that the others went on without has stood still in a part of it."""
    without = _without(dropped, lane.at)
    lane.until(until if without > until else min(without, lane.at + longest), "paused")
    lane.until(until, "absent")


def _divide(lane: _Lane, one: StepAttempt, dropped: Sequence[EpochBegin], normal: _Normal, replicas: int) -> None:
    """Count the time of an attempt, its phases in their order."""
    seconds = one.seconds
    _pause(lane, one.at - seconds["all"], dropped, normal.pause_s)
    later = (begun.at for begun in dropped if begun.launch == one.launch and begun.epoch > one.epoch)
    stop = min(one.at, next(later, math.inf))
    work: TimePart = "useful" if one.is_useful else "redone"
    compute: TimePart = "useful" if one.is_kept else work
    if not one.contributes:
        work = compute = "stalled"
    waiting = sum(seconds.get(phase, 0.0) for phase in _WAITING)
    summing, vote, update = (seconds.get(phase, 0.0) for phase in ("reduce", "vote", "update"))
    own = min(seconds.get("compute", 0.0), seconds["all"])
    rest = max(0.0, seconds["all"] - waiting - own - summing - vote - update)
    useful = 0.0
    for part, time in (
        ("stalled", waiting),
        (compute, own),
        (work, rest + min(summing, normal.sum_s)),
        ("stalled", max(0.0, summing - normal.sum_s) + vote),
        (work, update),
    ):
        begin = lane.at
        lane.until(min(stop, begin + time), part)  # type: ignore[arg-type]
        useful += lane.at - begin if part == "useful" else 0.0
    lane.until(stop, work)  # rounding
    lane.until(one.at, "absent")
    if len(one.participants) < replicas:
        lane.degraded += useful


def _faults(
    history: _History, useful: Iterable[StepAttempt], step_s: float, lanes: Mapping[str, _Lane]
) -> list[ReplicaFault]:
    """Return failures with their costs."""
    commits: dict[str, tuple[float, str]] = {}
    for one in useful:
        known = commits.get(one.lineage)
        commits[one.lineage] = (one.at, one.replica) if known is None else min(known, (one.at, one.replica))
    order = sorted(commits.values())

    def stall(at: float, steps: int) -> float:
        place = bisect_right(order, (at, "\U0010ffff"))
        if place + steps > len(order):
            return math.nan
        end, name = order[place + steps - 1]
        begin = order[place - 1][0] if place else at
        return max(0.0, end - begin - _paused(lanes[name].spans, begin, end) - steps * step_s)

    def away(name: str, at: float) -> float:
        back = (one for one in history.attempts[name] if one.at > at and one.is_useful and one.contributes)
        return next((max(0.0, one.at - one.seconds["all"] - at) for one in back), math.nan)

    found = [
        ReplicaFault(at, name, what, stall(at, 1), away(name, at))
        for name in history.names
        for at, what in _failures(history, name)
    ]
    ends = history.coordinator_ends
    found += [ReplicaFault(one.at, COORDINATOR, one.why, stall(one.at, 2), math.nan) for one in ends]
    return sorted(found, key=lambda one: (one.at, one.replica))


def _failures(history: _History, name: str) -> list[tuple[float, str]]:
    """Return times and texts of a replica's failures: one for an end and a disappearance without a record between."""
    marks, found = history.marks[name], []
    records = [one.at for one in marks if one.kind in ("joined", "step")]
    finished = [(one.at, one.kind) for one in marks if one.kind in ("finished", "launch")]
    told = [(one.at, one.why, True) for one in marks if one.kind == "ended"]
    steps = {one.at for one in marks if one.kind == "step"}
    for begun in history.dropped[name]:
        before = bisect_right(finished, (begun.at, "\U0010ffff"))
        if not before or finished[before - 1][1] != "finished":
            place = bisect_left(records, begun.at)
            came_back = "; the same process came back" if steps.intersection(records[place : place + 1]) else ""
            told.append((begun.at, f"left out of epoch {begun.epoch}{came_back}", False))
    for _, group in itertools.groupby(sorted(told), key=lambda one: bisect_left(records, one[0])):
        items = list(group)
        ends = [one[:2] for one in items if one[2]]
        found += [(min(items)[0], ends[0][1]), *ends[1:]] if ends else [items[0][:2]]
    return found


def _paused(spans: Sequence[TimeSpan], begin: float, end: float) -> float:
    """Return the pauses between two times in seconds."""
    place = max(0, bisect_right(spans, begin, key=lambda one: one.start) - 1)
    inside = itertools.takewhile(lambda one: one.start < end, itertools.islice(spans, place, None))
    return math.fsum(min(one.end, end) - max(one.start, begin) for one in inside if one.part == "paused")


def _rates(useful: Iterable[StepAttempt]) -> list[dict[str, float]]:
    """Return the seconds of computation for a target in each useful step, by replica.

    The targets of a replica are those of the step, divided by iterations. What was computed in an attempt before is
    left out.
    """
    rates: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for one in useful:
        targets = one.targets * len(one.own) / max(1, one.iterations)
        if targets > 0 and one.seconds.get("compute", 0.0) > 0 and not one.is_short:
            rates[one.launch, one.step][one.replica] = one.seconds["compute"] / targets
    return [rates[key] for key in sorted(rates)]
