"""The account of a job of replicas: its parts add up, and what it calls useful is so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.distributed.fault_tolerance.events import FOLDER, EventLog, read_events
from cordillera.distributed.fault_tolerance.goodput import COORDINATOR, TIME_PARTS, Goodput, account
from cordillera.distributed.stragglers import find_stragglers
from cordillera.errors import RunError

Event = dict[str, Any]


class SampleJob:
    """A job of replicas whose events are written here, on a clock of its own."""

    def __init__(self, replicas: int, compute: Sequence[float] = (1.0,)) -> None:
        self.names = [f"r{number:0{len(str(replicas - 1))}d}" for number in range(replicas)]
        self.compute = {name: compute[number % len(compute)] for number, name in enumerate(self.names)}
        self.events: list[Event] = []
        self.now, self.epoch, self.step, self.head, self.first = 1000.0, 0, 0, "start", 0
        self.saved = 0, "start", 0
        self.history = [(0, "start", 0)]
        self.members: list[str] = []
        self.behind: set[str] = set()
        self.held: dict[str, Any] = {}
        self.is_new = self.is_settled = True  # settled: the newest commit is of this launch
        self.begin()

    def tell(self, writer: str, kind: str, **content: Any) -> None:
        self.events.append({"kind": kind, "at": self.now, "writer": writer, **content})

    def begin(self) -> None:
        self.tell("launcher", "coordinator", process=1, port=1)
        for name in self.names:
            self.tell("launcher", "started", replica=name, attempt=1)
        self.now += 2.0
        self.members, self.behind, self.held, self.is_new = list(self.names), set(), {}, True
        for name in self.names:
            self.tell(name, "joined", step=self.step, epoch=self.epoch, processes=[1])

    def attempt(self, outcome: str = "committed", ask: float = 0.05) -> None:
        """Let all members try a step; gradients of a discarded one are used again where they can be."""
        if not self.members:
            return
        contributing = [name for name in self.members if name not in self.behind] or self.members
        if self.is_new:
            self.epoch, self.is_new = self.epoch + 1, False
            self.tell(COORDINATOR, "epoch", epoch=self.epoch, step=self.step, members=list(self.members))
        count = len(contributing)
        own = {name: (self.head, self.first + place, count) for place, name in enumerate(contributing)}
        spent = {name: 0.0 if self.held.get(name) == own[name] else self.compute[name] for name in contributing}
        longest = max(spent.values())
        lineage = f"{self.head}/{self.epoch}.{self.step + 1}"
        self.now += ask + longest + 0.3
        for name in self.members:
            seconds = {"ask": ask, "vote": 0.02, "reduce": 0.1 + longest - spent.get(name, 0.0)}
            seconds |= {"compute": spent[name]} if name in spent else {}
            seconds |= {"update": 0.1} if outcome == "committed" else {}
            self.tell(
                name,
                "step",
                outcome=outcome,
                epoch=self.epoch,
                step=self.step + 1,
                parent=self.head,
                lineage=lineage,
                participants=contributing,
                members=list(self.members),
                first=self.first,
                iterations=count,
                **({"rate": 1.0, "targets": 100 * count, "loss": 1.0} if outcome == "committed" else {}),
                seconds={**seconds, "all": ask + longest + 0.3},
            )
        if outcome == "committed":
            self.step, self.head, self.first = self.step + 1, lineage, self.first + count
            self.history.append((self.step, self.head, self.first))
            self.behind, self.held, self.is_settled = set(), {}, True
            self.is_new = count < len(self.members)
        else:
            self.held, self.is_new = own, True
        self.now += 0.01

    def pause(self) -> None:
        self.now += 0.7
        self.saved = self.history[-1]

    def kill(self, name: str, why: str = "rank 0 was ended by SIGKILL") -> None:
        if name in self.members:
            self.now += 0.4
            self.members.remove(name)
            self.held.pop(name, None)
            self.tell("launcher", "ended", replica=name, attempt=1, why=why)
            self.is_new = True

    def rejoin(self, name: str) -> None:
        if name not in self.members:
            self.tell("launcher", "started", replica=name, attempt=2)
            self.now += 1.5
            self.tell(name, "joined", step=0, epoch=0, processes=[2])
            if self.members:
                self.behind.add(name)
            self.members = sorted([*self.members, name])
            self.is_new = True

    def roll_back(self) -> None:
        """Lose the newest commit."""
        if self.step > self.saved[0]:
            lost, self.history = self.history[-1], self.history[:-1]
            self.step, self.head, self.first = self.history[-1]
            states = [{"epoch": self.epoch, "step": one[0], "lineage": one[1]} for one in (lost, self.history[-1])]
            self.tell(COORDINATOR, "rollback", lost=states[0], kept=states[1])
            self.held, self.is_new = {}, True

    def resume(self) -> None:
        """Start the job anew from its checkpoint, an hour later."""
        self.now += 3600.0
        self.step, self.head, self.first = self.saved
        self.history = [one for one in self.history if one[0] <= self.step]
        self.is_settled = False
        self.begin()

    def finish(self) -> None:
        self.now += 0.5
        for name in self.members:
            self.tell("launcher", "finished", replica=name, attempt=1)

    def act(self, action: tuple[str, int]) -> None:
        kind, number = action
        name = self.names[number % len(self.names)]
        if kind in ("kill", "rejoin"):
            getattr(self, kind)(name)
        elif kind in ("committed", "discarded"):
            self.attempt(kind)
        else:
            getattr(self, kind)()


KINDS = ("committed", "committed", "committed", "discarded", "pause", "kill", "rejoin", "roll_back", "resume")
ACTIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), max_size=25)


def job_of(replicas: int, actions: Sequence[tuple[str, int]], *, is_finished: bool = True) -> SampleJob:
    job = SampleJob(replicas, compute=(1.0, 1.3))
    for action in actions:
        job.act(action)
    if is_finished:
        job.finish()
    return job


def check_parts(found: Goodput) -> None:
    for name, times in found.times.items():
        assert set(times) == set(TIME_PARTS)
        assert min(times.values()) >= 0
        assert math.fsum(times.values()) == pytest.approx(found.elapsed_s, abs=1e-3)
        spans, at = found.spans[name], 0.0
        for span in spans:
            assert span.start == at < span.end
            at = span.end
        assert at == pytest.approx(found.elapsed_s, abs=1e-9)
    assert 0 <= found.degraded <= found.goodput <= 1


@settings(max_examples=60)
@given(st.integers(1, 4), ACTIONS, st.booleans())
def test_parts_add_up_to_the_time_of_the_job(replicas: int, actions: list[tuple[str, int]], is_finished: bool) -> None:
    job = job_of(replicas, actions, is_finished=is_finished)
    found = account(job.events, replicas)
    check_parts(found)
    assert not [one for one in found.messages if "wrote nothing" in one.text]
    resumed = sum(kind == "resume" for kind, _ in actions)
    span = job.events[-1]["at"] - job.events[0]["at"]
    assert found.elapsed_s <= span - 3600 * resumed + 1e-6  # the time without a job is not part of it
    assert len(found.launches) == 1 + resumed
    if job.is_settled:
        assert found.steps == len(job.history) - 1
    assert all(one.stall_s >= 0 or math.isnan(one.stall_s) for one in found.faults)
    assert sum(event["kind"] == "ended" for event in job.events) == len(found.faults)


@settings(max_examples=60)
@given(st.integers(1, 4), ACTIONS, st.integers(0, 25), st.integers(1, 3))
def test_more_discarded_time_never_raises_goodput(
    replicas: int, actions: list[tuple[str, int]], place: int, more: int
) -> None:
    before = account(job_of(replicas, actions).events, replicas)
    longer = [*actions[:place], *[("discarded", 0)] * more, *actions[place:]]
    after = account(job_of(replicas, longer).events, replicas)
    assert after.steps == before.steps
    assert after.goodput <= before.goodput + 1e-9


@settings(max_examples=40)
@given(st.integers(1, 4), ACTIONS, st.randoms())
def test_the_order_of_events_does_not_matter(replicas: int, actions: list[tuple[str, int]], random: Any) -> None:
    events = job_of(replicas, actions).events
    for number, event in enumerate(events):  # no two at the same time
        event["at"] += number * 1e-7
    mixed = list(events)
    random.shuffle(mixed)
    assert account(mixed, replicas) == account(events, replicas)


def small_history() -> list[Event]:
    """Two replicas, of which one is killed in the second step and not replaced; 10 seconds."""

    def step(name: str, at: float, epoch: int, number: int, names: str, seconds: Event, is_well: bool = True) -> Event:
        return {
            "writer": name, "kind": "step", "at": 50.0 + at, "outcome": "committed" if is_well else "discarded",
            "epoch": epoch, "step": number, "parent": f"s{number - 1}", "lineage": f"s{number}" if is_well else "none",
            "participants": names.split(), "members": names.split(), "first": 2 * number - 2,
            "iterations": len(names.split()), "targets": 10, "seconds": seconds,
        }  # fmt: skip

    def other(writer: str, kind: str, at: float, **content: Any) -> Event:
        return {"writer": writer, "kind": kind, "at": 50.0 + at, **content}

    both, rest = ["r0", "r1"], {"ask": 0.1, "vote": 0.1}
    return [
        other("launcher", "coordinator", 0.0),
        *(other("launcher", "started", 0.0, replica=name) for name in both),
        *(other(name, "joined", 2.0, step=0) for name in both),
        other("coordinator", "epoch", 2.0, epoch=1, step=0, members=both),
        step("r0", 4.0, 1, 1, "r0 r1", {**rest, "compute": 1.5, "reduce": 0.2, "update": 0.1, "all": 2.0}),
        step("r1", 4.0, 1, 1, "r0 r1", {**rest, "compute": 1.6, "reduce": 0.1, "update": 0.1, "all": 2.0}),
        other("launcher", "ended", 5.0, replica="r1", why="killed"),
        step("r0", 6.0, 1, 2, "r0 r1", {"ask": 0.1, "compute": 1.5, "reduce": 0.4, "all": 2.0}, is_well=False),
        other("coordinator", "epoch", 6.0, epoch=2, step=1, members=["r0"]),
        step("r0", 6.5, 2, 2, "r0", {**rest, "compute": 0.0, "reduce": 0.0, "update": 0.3, "all": 0.5}),
        step("r0", 9.5, 2, 3, "r0", {"ask": 0.1, "compute": 1.7, "update": 0.2, "all": 2.0}),
        other("launcher", "given up", 9.6, replica="r1", why="no more"),
        other("launcher", "finished", 10.0, replica="r0"),
    ]  # fmt: skip


def test_a_small_history_is_counted_as_by_hand() -> None:
    found = account(small_history(), 2)
    assert found.times["r0"] == pytest.approx(
        # the gradients of the discarded second step were used in the next attempt: 1.5 s of it are useful
        {"useful": 1.7 + 1.5 + 0.3 + 1.9, "redone": 0.1, "stalled": 0.3 + 0.4 + 0.2 + 0.1, "paused": 1.0 + 0.5,
         "absent": 0.0, "starting": 2.0}
    )  # fmt: skip
    assert found.times["r1"] == pytest.approx(
        {"useful": 1.8, "redone": 1.0, "stalled": 0.2, "paused": 0.0, "absent": 5.0, "starting": 2.0}
    )
    assert found.goodput == pytest.approx((5.4 + 1.8) / 20)
    assert found.degraded == pytest.approx((0.3 + 1.9) / 20)
    assert (found.elapsed_s, found.steps, found.discarded, found.rolled_back, found.step_s) == (10.0, 3, 1, 0, 2.0)
    (fault,) = found.faults
    assert (fault.at, fault.replica, fault.what) == (5.0, "r1", "killed")
    assert fault.stall_s == pytest.approx(6.5 - 4.0 - 2.0)
    assert math.isnan(fault.away_s)
    assert [(one.who, one.text) for one in found.messages] == [("r1", "given up: no more")]


def test_a_replica_that_stands_still_is_absent_from_the_epoch_that_began_without_it() -> None:
    job = SampleJob(2)
    job.attempt()
    began = job.now
    job.now += 3.0
    given_up = {"outcome": "discarded", "epoch": 1, "step": 2, "parent": job.head, "lineage": "none", "iterations": 2}
    given_up |= {"participants": job.names, "members": job.names, "first": 2}
    job.tell("r0", "step", **given_up, seconds={"compute": 1.0, "reduce": 2.0, "all": 3.0})
    job.members, job.is_new = ["r0"], True
    job.attempt()
    job.now += 4.0
    seconds = {"compute": job.now - began, "all": job.now - began}
    job.tell("r1", "step", **given_up, seconds=seconds)
    found = account(job.events, 2)
    assert found.times["r1"]["redone"] == pytest.approx(3.0)
    assert found.times["r1"]["absent"] == pytest.approx(job.now - began - 3.0)
    (fault,) = found.faults
    assert fault.what == "left out of epoch 2; the same process came back"
    assert fault.stall_s == pytest.approx(3.0)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_replica_that_stands_still_between_steps_is_absent_beyond_the_longest_pause(is_over: bool) -> None:
    job = SampleJob(2)
    for _ in range(2):
        job.attempt()
        job.now += 0.2  # an evaluation
    began = job.now - 0.21
    job.now, job.members, job.epoch = job.now + 3.0, ["r0"], 2
    job.tell(COORDINATOR, "epoch", epoch=2, step=2, members=["r0"])
    job.now -= 3.0
    job.attempt(ask=3.05)
    job.attempt()
    if not is_over:
        job.members, job.behind, job.is_new = ["r0", "r1"], {"r1"}, True
        job.attempt()
    returned = job.now if is_over else job.now - 1.36
    job.members = job.names
    job.finish()
    found = account(job.events, 2)
    check_parts(found)
    assert found.times["r1"]["paused"] == pytest.approx(2 * 0.21 + (0.0 if is_over else 0.51))
    assert found.times["r1"]["absent"] == pytest.approx(returned - began - 0.21 + (0.5 if is_over else 0.0))
    assert found.times["r0"]["absent"] == 0.0


def test_replicas_that_are_started_elsewhere_need_no_launcher() -> None:
    job = SampleJob(3)
    for _ in range(3):
        job.attempt()
    job.members, job.is_new = ["r0", "r1"], True  # r2 ends, and nobody tells
    job.attempt()
    job.attempt()
    job.rejoin("r2")
    job.attempt()
    job.attempt()
    found = account([one for one in job.events if one["writer"] != "launcher"], 3)
    check_parts(found)
    assert [(one.replica, one.what) for one in found.faults] == [("r2", "left out of epoch 2")]
    assert found.times["r2"]["absent"] > 2.0


def test_an_end_of_the_coordinator_is_a_fault_of_no_replica() -> None:
    job = SampleJob(2)
    job.attempt()
    job.tell("launcher", "coordinator ended", code=-9)
    job.tell("launcher", "coordinator", process=2, port=1)
    job.attempt()
    job.attempt(ask=2.05)
    found = account(job.events, 2)
    assert [one.replica for one in found.faults] == [COORDINATOR]
    assert found.faults[0].stall_s == pytest.approx(2.0)
    assert found.launches == [0.0]


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_a_slow_replica_is_named_with_its_factor(replicas: int) -> None:
    job = SampleJob(replicas, compute=[2.5, *[1.0] * (replicas - 1)])
    for _ in range(20):
        job.attempt()
    (found,) = account(job.events, replicas).stragglers
    assert (found.name, found.steps) == (job.names[0], 20)
    assert found.factor == pytest.approx(2.5)


@settings(max_examples=50)
@given(st.integers(2, 6), st.randoms())
def test_noise_makes_no_stragglers(members: int, random: Any) -> None:
    times = [{str(one): random.uniform(0.95, 1.05) for one in range(members)} for _ in range(50)]
    assert find_stragglers(times) == []


def test_events_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no events of replicas"):
        account(read_events(tmp_path), 2)
    events = small_history()
    cases = [
        ([one for one in events if one["writer"] != "r1"], r"r1\.jsonl: r1 was a member"),
        ([one for one in events if one.get("step") != 2], "step 3 follows on a step that no event is of"),
        ([*events, {**events[-1], "replica": "r7"}], r"r7\.jsonl: is none of 2 replicas"),
    ]
    for found, message in cases:
        with pytest.raises(RunError, match=message):
            account(found, 2)
    for place, event in enumerate(events):
        for key in event.keys() - {"writer", "targets"} if event["kind"] == "step" else set():
            lacking = [*events[:place], {k: v for k, v in event.items() if k != key}, *events[place + 1 :]]
            with pytest.raises(RunError, match=key if key != "kind" else "kind"):
                account(lacking, 2)
    log = EventLog(tmp_path / FOLDER / "r0.jsonl")
    log.write("joined", step=0, epoch=0)
    log.write("joined", step=0, epoch=0)
    path = tmp_path / FOLDER / "r0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole)
    with pytest.raises(RunError, match=r"r0\.jsonl, line 3: is line 1 again"):
        read_events(tmp_path)
    path.write_bytes(whole + bytes(9))
    with pytest.raises(RunError, match=r"r0\.jsonl, line 3: ends with zeros"):
        read_events(tmp_path)
    path.write_bytes(whole)
    path.write_bytes(path.read_bytes().replace(b'"epoch": 0', b'"epoch": 1', 1))
    with pytest.raises(RunError, match=r"r0\.jsonl, line 1"):
        read_events(tmp_path)


def test_a_step_that_some_committed_and_others_gave_up_is_no_gap() -> None:
    job = SampleJob(2)
    job.attempt()
    torn = next(event for event in job.events if event["kind"] == "step" and event["writer"] == "r1")
    torn["outcome"] = "discarded"
    job.attempt()
    job.finish()
    assert account(job.events, 2).messages == []


def test_a_replica_that_was_left_out_is_told() -> None:
    job = SampleJob(2)
    job.attempt()
    job.tell(COORDINATOR, "isolated", replica="r1", why="not reached")
    job.tell(COORDINATOR, "isolated", replica="r1")  # as older versions wrote it
    job.attempt()
    told = [(one.who, one.text) for one in account(job.events, 2).messages]
    assert told == [("r1", "isolated: not reached")] * 2


@pytest.mark.parametrize(
    ("writer", "kept", "text"),
    [
        ("r1", 3, "wrote nothing about 4 committed steps from 3 to 6"),
        ("r1", 7, "wrote nothing about committed step 6"),
        (COORDINATOR, 0, "wrote nothing about 2 epochs from 1 to 2"),
        (COORDINATOR, 1, "wrote nothing about epoch 2"),
    ],
)
def test_files_that_lost_their_last_lines_are_named(writer: str, kept: int, text: str) -> None:
    job = SampleJob(2)
    for _ in range(3):
        job.attempt()
    job.attempt("discarded")
    for _ in range(3):
        job.attempt()
    job.finish()
    assert account(job.events, 2).messages == []
    own = [event for event in job.events if event["writer"] == writer]
    cut = [event for event in job.events if event not in own[kept:]]
    told = [(one.who, one.text) for one in account(cut, 2).messages]
    assert told == [(writer, text)]
