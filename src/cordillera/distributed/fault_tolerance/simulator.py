"""Jobs with failures on a virtual clock: the useful time with restarts, absent replicas or decoupled learners.

The replicas of the policy ``replicas`` ask :func:`~cordillera.distributed.fault_tolerance.coordination.decide` before
their steps. Failures are Poisson, on devices drawn at random. Time is in seconds, and the time of a job is
counted as shares of its replicas' time, so that the categories of :class:`TimeUse` add up to the time elapsed.

Sources: FT-HSDP (arXiv 2602.00277); Decoupled DiLoCo (arXiv 2604.21428) for learners that do not wait for each other.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from cordillera.distributed.fault_tolerance.coordination import (
    Ask,
    Commit,
    CoordinationRules,
    CoordinatorState,
    Join,
    Leave,
    Membership,
    Refusal,
    ReplicaMessage,
    decide,
    initial_commit,
)
from cordillera.errors import PlanError

Policy = Literal["restart", "replicas", "decoupled"]

_CONFIGURATION = "simulated"
_AT_ONCE = 1e-6  # a restored job does not wait for the replicas that are absent


@dataclass(frozen=True)
class FaultyJob:
    """A job and its behaviour under failures. All times are in seconds.

    Attributes:
        policy: ``restart``: all replicas restart from the last checkpoint; ``replicas``: the others continue after a
            stall, without the failed replica; ``decoupled``: the others do not even stall.
        replicas: Number of replicas.
        between_s: Mean time between failures of the whole job, on exponential gaps.
        step_s: Time of a step.
        detect_s: Time after which the others notice a failure.
        resume_s: Time from there to their next step.
        repair_s: Time after which the replica that failed is back; for ``restart``, the job.
        rejoin_s: Stall of all when a replica is back.
        consensus_s: Time before each step in which replicas agree and do nothing else.
        save_s: For ``restart``, time for which a checkpoint stops training; 0 if there is none, and nothing is lost.
            Replicas save beside their steps, and need it only if all of them have failed.
        interval_s: Training time between checkpoints.
        together: Probability that a failure takes a second replica.
        queue: Whether overlapping recoveries run one after the other, as in the published closed forms, instead of
            restarting with each failure.
        merge_steps: For ``decoupled``, steps between merges; those since the last merge are lost with a learner.
    """

    policy: Policy = "replicas"
    replicas: int = 12
    between_s: float = 1080.0
    step_s: float = 20.0
    detect_s: float = 0.5
    resume_s: float = 0.5
    repair_s: float = 600.0
    rejoin_s: float = 0.0
    consensus_s: float = 0.0
    save_s: float = 0.0
    interval_s: float = 600.0
    together: float = 0.0
    queue: bool = False
    merge_steps: int = 100

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise PlanError(f"is {value:g}", where=one.name, remedy="choose a finite number, 0 or more")
        for name in ("between_s", "step_s", "interval_s", "replicas", "merge_steps"):
            if getattr(self, name) <= 0:
                raise PlanError(f"is {getattr(self, name):g}", where=name, remedy="choose a number above 0")
        if self.together > 1:
            raise PlanError(f"is {self.together:g}", where="together", remedy="choose a probability")


@dataclass
class TimeUse:
    """Seconds of a job, as means over its replicas.

    Attributes:
        elapsed: Duration; the sum of all others.
        useful: Steps that were kept.
        redone: Steps that were begun or made, and lost.
        stalled: Replicas that work wait, for others or for an agreement.
        absent: Replicas that failed, and have not yet caught up.
        saving: Checkpoints.
        failures: Number of failures.
        steps: Number of steps that were kept.
    """

    elapsed: float = 0.0
    useful: float = 0.0
    redone: float = 0.0
    stalled: float = 0.0
    absent: float = 0.0
    saving: float = 0.0
    failures: int = 0
    steps: int = 0

    @property
    def effective(self) -> float:
        """Share of useful time."""
        return self.useful / self.elapsed


def simulate_faults(job: FaultyJob, duration_s: float, seed: int) -> TimeUse:
    """Simulate a job until its first pause after ``duration_s``."""
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise PlanError(f"a duration of {duration_s} s", remedy="choose a number of seconds above 0")
    failures = _Failures(job, random.Random(f"faults {seed}"))
    run = {"restart": _restart, "replicas": _replicas, "decoupled": _decoupled}[job.policy]
    return run(job, duration_s, failures)


class _Failures:
    """Failures in the order of their times; each takes some replicas."""

    def __init__(self, job: FaultyJob, draw: random.Random) -> None:
        self._events = self._drawn(job, draw)
        self.next = next(self._events)
        self.count = 0

    @staticmethod
    def _drawn(job: FaultyJob, draw: random.Random) -> Iterator[tuple[float, tuple[int, ...]]]:
        now = 0.0
        while True:
            now += draw.expovariate(1 / job.between_s)
            count = min(job.replicas, 1 + (draw.random() < job.together))
            yield now, tuple(draw.sample(range(job.replicas), count))

    def pop(self) -> tuple[float, tuple[int, ...]]:
        """Return the next failure and go on to the one after."""
        found, self.next = self.next, next(self._events)
        self.count += 1
        return found


def _restart(job: FaultyJob, duration: float, failures: _Failures) -> TimeUse:
    """All replicas work, save and recover together."""
    use, now, unsaved, cycle = TimeUse(), 0.0, 0.0, job.interval_s if job.save_s else math.inf
    while now < duration:
        failed = failures.next[0]
        if failed > now:
            work = min(cycle - unsaved, failed - now, duration - now)
            now, unsaved = now + work, unsaved + work
            if unsaved >= cycle and now + job.save_s <= failed:
                now, use.saving = now + job.save_s, use.saving + job.save_s
                use.useful, unsaved = use.useful + unsaved, 0.0
                continue
            if now >= duration:
                break
            use.saving += max(0.0, failed - now)  # the failure came during a save
            now = max(now, failed)
        failures.pop()
        kept = unsaved if cycle == math.inf else 0.0
        use.useful, use.redone, unsaved = use.useful + kept, use.redone + unsaved - kept, 0.0
        end = now + job.repair_s
        while failures.next[0] < min(end, duration):
            again, _ = failures.pop()
            end = end + job.repair_s if job.queue else again + job.repair_s
        end = min(end, max(now, duration))
        now, use.stalled = end, use.stalled + end - now
    use.useful += unsaved
    use.elapsed, use.failures, use.steps = now, failures.count, int(use.useful / job.step_s)
    return use


@dataclass
class _Replica:
    """A replica of the simulated job: its state, and the time of its return if it is absent."""

    state: Commit
    back: float = 0.0
    discarded: bool = False
    joined: bool = False


class _Replicas:
    """A job whose replicas ask before each step.

    A failed replica returns with fresh weights. If all replicas have failed, the job restarts from its last checkpoint,
    which costs no time here.
    """

    def __init__(self, job: FaultyJob, duration: float, failures: _Failures) -> None:
        self.job, self.duration, self.failures = job, duration, failures
        self.use, self.now = TimeUse(), 0.0
        self.unsaved = self.saved_at = 0.0  # useful seconds since the last checkpoint, and its time
        self.replicas = [_Replica(initial_commit(_CONFIGURATION)) for _ in range(job.replicas)]
        self._begin()

    def _begin(self) -> None:
        rules = CoordinationRules(self.job.replicas, lease_s=1e9, grace_s=1e9, start_s=_AT_ONCE)
        self.state = CoordinatorState.begin(rules, _CONFIGURATION)
        for one in self.replicas:
            one.state, one.discarded, one.joined = initial_commit(_CONFIGURATION), False, False

    def run(self) -> TimeUse:
        while self.now < self.duration:
            membership = self._agree()
            if membership is None:
                self._wait(min((one.back for one in self.replicas if one.back > self.now), default=self.now + 1))
                continue
            if membership.donors:
                self._wait(self.now + self.job.rejoin_s)
            self._wait(self.now + self.job.consensus_s)
            self._train(membership)
        self.use.elapsed, self.use.failures = self.now, self.failures.count
        return self.use

    def _agree(self) -> Membership | None:
        messages: list[ReplicaMessage] = []
        for number, one in enumerate(self.replicas):
            name = f"{number:04d}"
            if one.back > self.now:
                messages += [Leave(name)] if one.joined else []
                one.joined = False
                continue
            messages += [] if one.joined else [Join(name, _CONFIGURATION)]
            messages.append(Ask(name, one.state, one.discarded))
            one.joined = True
        self.state, replies = decide(self.state, messages, self.now)
        if any(isinstance(one, Refusal) for one in replies):
            self.use.useful, self.use.redone = self.use.useful - self.unsaved, self.use.redone + self.unsaved
            self.unsaved = 0.0
            self._begin()
            return self._agree()
        return next((one for one in replies if isinstance(one, Membership)), None)

    def _train(self, membership: Membership) -> None:
        job, members = self.job, [self.replicas[int(name)] for name in membership.members]
        if any(one.back > self.now for one in members):
            return self._fail(self.now, members)
        cycle = job.step_s + job.consensus_s
        # Until the next failure or return of a replica, all steps have the same members.
        until = min([self.failures.next[0], self.duration, *(one.back for one in self.replicas if one.back > self.now)])
        repeats = 1 if membership.donors else max(1, math.floor((until - self.now) / cycle))
        end = self.now + job.step_s + (repeats - 1) * cycle
        while (failed := self.failures.next[0]) < end:
            if any(self.replicas[number].back <= self.now for number in self.failures.next[1]):
                return self._fail(failed, members)
            self._take()
        self._spend(end, membership, repeats)
        heads = [membership.head, membership.result]
        for _ in range(repeats - 1):
            heads.append(heads[-1].follow(membership.epoch, membership.participants))
        if repeats > 1:  # the state after agreeing on each of these steps in turn
            self.state = replace(self.state, head=heads[-2], previous=heads[-3])
        for one in members:
            one.state, one.discarded = heads[-1], False
        return None

    def _spend(self, end: float, membership: Membership, repeats: int) -> None:
        worked, agreed = repeats * self.job.step_s, (repeats - 1) * self.job.consensus_s
        share, active, behind = 1 / self.job.replicas, len(membership.participants), len(membership.donors)
        self.use.useful += worked * active * share
        self.use.stalled += agreed * (active + behind) * share
        self.use.absent += (worked * behind + (worked + agreed) * (self.job.replicas - active - behind)) * share
        self.use.steps += repeats
        self.now = end
        if saves := math.floor((end - self.saved_at) / self.job.interval_s):
            self.unsaved, self.saved_at = 0.0, self.saved_at + saves * self.job.interval_s
        self.unsaved += min(worked, end - self.saved_at) * active * share

    def _fail(self, failed: float, members: list[_Replica]) -> None:
        """Lose the step: those who are left notice, and go on after a stall."""
        share = 1 / self.job.replicas
        self.use.redone += (failed - self.now) * len(members) * share
        self.use.absent += (failed - self.now) * (self.job.replicas - len(members)) * share
        self.now = failed
        while self.failures.next[0] <= failed:
            self._take()
        stall = self.job.detect_s + self.job.resume_s
        self._wait(failed + stall, extend=stall)
        for one in members:
            one.discarded = one.back <= self.now and one.state.step > 0

    def _take(self) -> bool:
        """Apply the next failure to its replicas, and return whether one of them was working."""
        when, numbers = self.failures.pop()
        hit = any(self.replicas[number].back <= when for number in numbers)
        for number in numbers:
            self.replicas[number].back = when + self.job.repair_s
            self.replicas[number].state = initial_commit(_CONFIGURATION)
        return hit

    def _wait(self, end: float, extend: float = 0.0) -> None:
        """Stall working replicas until ``end``; a failure during the stall starts another one of ``extend`` seconds."""
        share = 1 / self.job.replicas
        while self.now < end:
            failed = self.failures.next[0]
            there = sum(one.back <= self.now for one in self.replicas)
            back = min((one.back for one in self.replicas if one.back > self.now), default=math.inf)
            stop = min(end, failed, back)
            self.use.stalled += (stop - self.now) * there * share
            self.use.absent += (stop - self.now) * (self.job.replicas - there) * share
            self.now = stop
            if failed <= stop and self._take() and extend:
                end = end + extend if self.job.queue else stop + extend


def _replicas(job: FaultyJob, duration: float, failures: _Failures) -> TimeUse:
    return _Replicas(job, duration, failures).run()


def _decoupled(job: FaultyJob, duration: float, failures: _Failures) -> TimeUse:
    """Each learner works alone; a failure takes it until it is repaired, with its steps since the last merge."""
    use, share, merge = TimeUse(), 1 / job.replicas, job.merge_steps * job.step_s
    since = [0.0] * job.replicas  # when the learner began to work
    back: list[tuple[float, int]] = []
    absent = set[int]()

    def end_work(number: int, now: float, is_lost: bool) -> None:
        worked = now - since[number]
        lost = worked % merge if is_lost else 0.0
        use.useful, use.redone = use.useful + (worked - lost) * share, use.redone + lost * share

    while (when := min(failures.next[0], back[0][0] if back else math.inf)) < duration:
        if back and back[0][0] <= failures.next[0]:
            _, number = heapq.heappop(back)
            absent.discard(number)
            since[number] = when
            continue
        _, numbers = failures.pop()
        for number in numbers:
            if number in absent:
                continue
            end_work(number, when, is_lost=True)
            absent.add(number)
            heapq.heappush(back, (when + job.repair_s, number))
            use.absent += min(job.repair_s, duration - when) * share
    for number in range(job.replicas):
        if number not in absent:
            end_work(number, duration, is_lost=False)
    use.elapsed, use.failures, use.steps = duration, failures.count, int(use.useful / job.step_s)
    return use
