"""Decisions on who takes part in which training step: one pure function of state, messages and time.

A job has replicas, each of which holds the whole model on ranks of its own. Before each step every replica asks. The
decision names the members of the step in the order of their ring, and a donor of the state for each that is behind.

A step number does not identify a state: two replicas may each have trained step 6, on other samples. Each commit
therefore extends a lineage by the epoch, the step and those who took part. The *head* is the commit to go on from.

Source: FT-HSDP (arXiv 2602.00277), abstract and introduction; the rules are ours.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordillera.errors import PlanError

_ATTEMPTS = 3  # attempts of a step with the same members before one is left out


@dataclass(frozen=True, order=True)
class Commit:
    """State of a model after a step; commits are ordered by epoch, then by step.

    Attributes:
        epoch: Epoch in which the step was trained; 0 before the first one.
        step: Number of steps that it includes.
        lineage: Digest of the whole history.
    """

    epoch: int
    step: int
    lineage: str

    def follow(self, epoch: int, participants: Iterable[str]) -> Commit:
        """Return the commit of the next step, trained in ``epoch`` by ``participants``."""
        text = json.dumps([self.lineage, epoch, self.step + 1, sorted(participants)])
        return Commit(epoch, self.step + 1, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


def initial_commit(configuration: str) -> Commit:
    """Return the state of freshly initialised weights of a job, whose configuration has the given digest."""
    return Commit(0, 0, hashlib.blake2b(configuration.encode(), digest_size=16).hexdigest())


@dataclass(frozen=True)
class Join:
    """A replica has connected.

    Attributes:
        configuration: Digest of all that must be equal on replicas: recipe, shapes, order of buckets.
    """

    replica: str
    configuration: str


@dataclass(frozen=True)
class Alive:
    """A sign of life."""

    replica: str


@dataclass(frozen=True)
class Leave:
    """The connection of a replica has ended."""

    replica: str


@dataclass(frozen=True)
class Ask:
    """A replica asks to take part in the step after its state.

    Attributes:
        state: Commit that it holds.
        discarded: Whether it was given a step since its last commit, and discarded it.
        durable: Largest step of a checkpoint that it knows of.
        restored: Whether it holds the state of the newest checkpoint, and has not trained since.
        missed: Replicas that sent nothing in time in the step that it discarded.
    """

    replica: str
    state: Commit
    discarded: bool = False
    durable: int = 0
    restored: bool = False
    missed: tuple[str, ...] = ()


ReplicaMessage: TypeAlias = Join | Alive | Leave | Ask


@dataclass(frozen=True)
class Membership:
    """Answer to all members of a step.

    Attributes:
        epoch: Epoch of the ring; what is sent in an older one is void.
        head: State that the step starts from.
        members: Replicas in the order of their ring.
        donors: Replica that gives its state to each member that is behind. Those take part with zeros.
    """

    epoch: int
    head: Commit
    members: tuple[str, ...]
    donors: Mapping[str, str]

    @property
    def participants(self) -> tuple[str, ...]:
        """Members that contribute gradients."""
        return tuple(name for name in self.members if name not in self.donors)

    @property
    def result(self) -> Commit:
        """State of all members once they commit the step."""
        return self.head.follow(self.epoch, self.participants)


@dataclass(frozen=True)
class Refusal:
    """Answer to a replica that cannot take part, with the reason.

    Attributes:
        again: Whether it can join after a restart that restores a checkpoint.
    """

    replica: str
    reason: str
    again: bool = False


@dataclass(frozen=True)
class Rollback:
    """Record of a commit that no live replica holds any more, and of the commit from which training continues."""

    lost: Commit
    kept: Commit


Reply: TypeAlias = Membership | Refusal | Rollback


@dataclass(frozen=True)
class CoordinationRules:
    """Settings of :func:`decide`.

    Attributes:
        replicas: Number of replicas that the job is configured for; at the start all are awaited for ``start_s``.
        least: Smallest number of members of a step.
        lease_s: Seconds after which a replica that gives no sign of life is absent.
        grace_s: Seconds for which live members that have not asked are awaited after the first member that has.
        start_s: Seconds for which all replicas are awaited at the start of the job.
    """

    replicas: int
    least: int = 1
    lease_s: float = 1.0
    grace_s: float = 10.0
    start_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.replicas:
            raise PlanError(f"least is {self.least}, of {self.replicas} replicas", remedy="choose 1 to all of them")
        for name in ("lease_s", "grace_s", "start_s"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise PlanError(f"{name} is {value}", remedy="choose a number of seconds above 0")


class FaultToleranceConfig(BaseModel):
    """Replicas of a model, and what happens when one fails.

    Attributes:
        replicas: Number of replicas, at most 65, each with as many processes as ``parallel`` has places; 1 for none.
        least: Smallest number of replicas that train; with fewer, they wait.
        deadline_s: Longest time in seconds that replicas wait for each other in a step, after which it is discarded.
            It must be longer than replicas differ in speed.
        grace_s: Longest time in seconds that replicas wait before a step for one that is alive and not ready.
        start_s: Longest time in seconds that replicas wait at the start of a job for all of them.
        patience_s: Longest time in seconds that replicas go on without a coordinator.
        batch: What a step is trained on when replicas are absent: ``shrink`` takes one iteration for each replica that
            is there, ``constant`` takes one for each that is configured and shares them out.
        rate: Factor of the learning rate for a share ``p`` of the configured iterations: ``none`` (1), ``linear``
            (``p``), ``sqrt`` (the root of ``p``).
        compare_every: Steps after which replicas compare digests of their weights; null for never.
        retries: Number of times in a row that a replica may end without a committed step, or because of the same
            file that cannot be read or written, before it is given up.
        local_folder: Folder on a disk of each machine, in which every replica also saves checkpoints of its own, more
            often than there are checkpoints in the run's folder; null for none. A replica is then on one machine.
        local_every: Steps between these.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: int = Field(1, ge=1, le=1000)
    least: int = Field(1, ge=1)
    deadline_s: float = Field(10.0, gt=0, allow_inf_nan=False)
    grace_s: float = Field(10.0, gt=0, allow_inf_nan=False)
    start_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    patience_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    batch: Literal["shrink", "constant"] = "shrink"
    rate: Literal["none", "linear", "sqrt"] = "none"
    compare_every: int | None = Field(100, ge=1)
    retries: int = Field(3, ge=0)
    local_folder: str | None = None
    local_every: int = Field(10, ge=1)

    @model_validator(mode="after")
    def _is_possible(self) -> FaultToleranceConfig:
        if self.least > self.replicas:
            raise ValueError(f"least ({self.least}) is more than replicas ({self.replicas})")
        return self

    @property
    def rules(self) -> CoordinationRules:
        """Rules of the coordinator; a replica is absent if it gives no sign of life for ``deadline_s``."""
        return CoordinationRules(self.replicas, self.least, self.deadline_s, self.grace_s, self.start_s)

    def iterations(self, participants: int) -> int:
        """Return the number of iterations of a step with a number of participants."""
        return self.replicas if self.batch == "constant" else participants

    def rate_factor(self, iterations: int) -> float:
        """Return the factor of the learning rate of a step on a number of iterations; at most 1."""
        share = min(1.0, iterations / self.replicas)
        return {"none": 1.0, "linear": share, "sqrt": share**0.5}[self.rate]


@dataclass(frozen=True)
class ReplicaStatus:
    """State of a connected replica.

    Attributes:
        heard: Time of its last message, in seconds.
        asked: Its open question.
        since: Time of that question.
    """

    heard: float
    asked: Ask | None = None
    since: float = math.inf


@dataclass(frozen=True)
class Isolation:
    """A replica that others do not reach.

    Attributes:
        until: Time until which steps are taken without it, in seconds.
        times: How often in a row that happened.
    """

    until: float
    times: int


@dataclass(frozen=True)
class CoordinatorState:
    """All that decisions depend on beside rules, messages and time.

    Attributes:
        rules: Settings.
        configuration: Digest that all replicas must have.
        epoch: Number of the current epoch; it never decreases.
        head: Commit that the next step starts from.
        previous: Previous head, from which training continues if no replica holds the head any more.
        members: Members of the current epoch.
        silent: Members that contribute nothing, as they were behind.
        began: Time of the first message.
        connected: Replicas with an open connection.
        attempts: Memberships of the same members since the last commit.
        isolated: Replicas that were left out, as others did not reach them, and have not committed a step since.
    """

    rules: CoordinationRules
    configuration: str
    epoch: int = 0
    head: Commit = Commit(0, 0, "")
    previous: Commit | None = None
    members: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    began: float = math.inf
    connected: Mapping[str, ReplicaStatus] = field(default_factory=dict)
    attempts: int = 0
    isolated: Mapping[str, Isolation] = field(default_factory=dict)

    @classmethod
    def begin(cls, rules: CoordinationRules, configuration: str) -> CoordinatorState:
        """Return the state of a job with these ``rules`` and ``configuration`` that has not begun."""
        return cls(rules, configuration, head=initial_commit(configuration))

    def live(self, now: float) -> dict[str, ReplicaStatus]:
        """Return connected replicas whose leases have not ended."""
        return {name: one for name, one in self.connected.items() if now - one.heard < self.rules.lease_s}

    def next_deadline(self, now: float) -> float:
        """Return the next time at which a decision may change without a message; infinite if there is none."""
        times = [one.heard + self.rules.lease_s for one in self.connected.values()]
        times += [one.since + self.rules.grace_s for one in self.connected.values()]
        times += [one.since + self.rules.start_s for one in self.connected.values()]
        times += [one.until for one in self.isolated.values()]
        times.append(self.began + self.rules.start_s)
        return min((one for one in times if one > now), default=math.inf)


def decide(
    state: CoordinatorState, messages: Sequence[ReplicaMessage], now: float
) -> tuple[CoordinatorState, list[Reply]]:
    """Return the next state and the replies.

    A membership is formed of the replicas that have asked, as soon as all live members of the epoch are among them, or
    ``grace_s`` after the first member. It starts a new epoch if its members are others than before, one of them
    discarded a step, or one is behind or was so in the last step.

    If the same members have aborted a step three times, the one from which most of them received nothing in time is
    left out for ``start_s``, and for twice as long with each repetition: replicas that cannot reach each other
    would otherwise try for ever.

    A commit becomes the head if it was made in the current epoch. A late report of a commit of an older epoch is void,
    as the current epoch began without it. If no replica that asks holds the head, training continues from the previous
    head, and the loss is recorded. If none holds that one either, all replicas are awaited, or all live ones for
    ``start_s``. Training then continues from the newest state that is no older than a checkpoint, or was restored from
    one; without such a state the replicas are refused, to restore a checkpoint if there is one.

    Args:
        state: State so far.
        messages: Messages since then, in order of arrival.
        now: Time in seconds, of a clock that does not go back.
    """
    replies: list[Reply] = []
    for message in messages:
        state, refused = _heard(state, message, now)
        replies += refused
    state, formed = _form(state, now)
    return state, [*replies, *formed]


def _heard(state: CoordinatorState, message: ReplicaMessage, now: float) -> tuple[CoordinatorState, list[Reply]]:
    name = message.replica
    connected = dict(state.connected)
    state = replace(state, began=min(state.began, now))
    if isinstance(message, Leave):
        connected.pop(name, None)
        return replace(state, connected=connected), []
    if isinstance(message, Join):
        if message.configuration != state.configuration:
            return state, [Refusal(name, "its configuration differs from that of the job")]
        connected[name] = ReplicaStatus(now)
        if name in state.isolated:  # a new process, which the others may reach, is tried at once
            state = replace(state, isolated={**state.isolated, name: replace(state.isolated[name], until=now)})
        return replace(state, connected=connected), []
    if name not in connected:
        return state, [Refusal(name, "it has not joined; connect again")]
    known = connected[name]
    if isinstance(message, Alive):
        connected[name] = replace(known, heard=now)
        return replace(state, connected=connected), []
    connected[name] = ReplicaStatus(now, message, known.since if known.asked else now)
    state = replace(state, connected=connected)
    reported = message.state
    if not state.members and reported > state.head:  # a job that goes on from a checkpoint, or without its log
        state = replace(state, head=reported, previous=None, epoch=max(state.epoch, reported.epoch))
    elif reported.epoch == state.epoch and reported > state.head:
        isolated = {name: one for name, one in state.isolated.items() if name not in state.members}
        state = replace(state, head=reported, previous=state.head, attempts=0, isolated=isolated)
    return state, []


def _form(state: CoordinatorState, now: float) -> tuple[CoordinatorState, list[Reply]]:
    rules, live = state.rules, state.live(now)
    asked = {name: one.asked for name, one in live.items() if one.asked is not None}
    if len(asked) < rules.least or not _is_complete(state, live, asked, now):
        return state, []
    state, asked = _reached(state, asked, now)
    reason, replies, epoch = None, [], state.epoch
    states, durable = {ask.state for ask in asked.values()}, max(ask.durable for ask in asked.values())
    able = [ask.state for ask in asked.values() if ask.restored or ask.state.step >= max(1, durable)]
    if state.head not in states and state.previous in states:
        replies.append(Rollback(state.head, state.previous))
        state, epoch = replace(state, head=state.previous, previous=None), epoch + 1
    elif state.head not in states:
        first = min(one.since for one in live.values())
        if len(asked) < len(live) or (len(asked) < rules.replicas and now < first + rules.start_s):
            return state, []  # one that is live, or comes back, may hold more
        if able:
            replies.append(Rollback(state.head, max(able)))
            state, epoch = replace(state, head=max(able), previous=None), epoch + 1
    if state.head not in states:
        held = max(one.step for one in states)
        remedy = "restore a checkpoint" if durable else "there is no checkpoint"
        reason = f"step {state.head.step} was committed, and replicas hold step {held} at most; {remedy}"
    if state.head.step == 0 < durable:
        reason = f"there are fresh weights only, and a checkpoint of step {durable}; resume from it"
    connected = {
        name: replace(one, asked=None, since=math.inf) if name in asked else one
        for name, one in state.connected.items()
    }
    state = replace(state, epoch=epoch, connected=connected)
    if reason is not None:
        again = durable > 0 and state.head.step > 0
        return state, [*replies, *(Refusal(name, reason, again) for name in sorted(asked))]
    members = tuple(sorted(asked))
    holders = [name for name in members if asked[name].state == state.head]
    donors = {
        name: holders[place % len(holders)] for place, name in enumerate(one for one in members if one not in holders)
    }
    has_changed = members != state.members or bool(donors) or bool(state.silent)
    is_new = has_changed or any(ask.discarded for ask in asked.values())
    attempts = state.attempts + 1 if members == state.members else 1
    state = replace(state, epoch=epoch + is_new, members=members, silent=tuple(donors), attempts=attempts)
    return state, [*replies, Membership(state.epoch, state.head, members, donors)]


def _reached(state: CoordinatorState, asked: dict[str, Ask], now: float) -> tuple[CoordinatorState, dict[str, Ask]]:
    """Leave out who is isolated, if a step is possible without: return the questions of the others."""
    rules, members = state.rules, [asked[name] for name in state.members if name in asked]
    missed = Counter(name for ask in members for name in ask.missed if name in asked)
    if missed and len(members) == len(state.members):
        name = max(missed, key=lambda one: (missed[one], one))
        times = state.isolated[name].times if name in state.isolated else 0
        if state.attempts >= (1 if times else _ATTEMPTS) and len(asked) > rules.least:
            isolation = Isolation(now + rules.start_s * 2**times, times + 1)
            state = replace(state, isolated={**state.isolated, name: isolation})
    out = {name for name, one in state.isolated.items() if now < one.until}
    others = {name: ask for name, ask in asked.items() if name not in out}
    if len(others) < rules.least or all(ask.state != state.head for ask in others.values()):
        return state, asked
    return state, others


def _is_complete(
    state: CoordinatorState, live: Mapping[str, ReplicaStatus], asked: Mapping[str, Ask], now: float
) -> bool:
    """Return whether no other replica must be awaited."""
    rules = state.rules
    if not state.members:
        return len(asked) >= rules.replicas or now >= state.began + rules.start_s
    awaited = [live[name] for name in state.members if name in live]
    if all(one.asked is not None for one in awaited):
        return True
    return now >= min(one.since for one in awaited) + rules.grace_s
