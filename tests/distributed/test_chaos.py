"""Faults that are injected into a job: what a plan brings, whom signals reach, and that nothing stays stopped."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from cordillera.distributed.fault_tolerance.chaos.injector import FaultInjector, InjectedFault, flip_bit, mend
from cordillera.distributed.fault_tolerance.chaos.plan import (
    Fault,
    FaultKind,
    FaultPlan,
    RandomFaults,
    drawn,
    read_fault_plan,
)
from cordillera.distributed.fault_tolerance.chaos.processes import JobLock, JobProcess, find_process
from cordillera.distributed.fault_tolerance.chaos.running_job import EventTail, RunningJob, find_job
from cordillera.distributed.fault_tolerance.events import EventLog, read_events
from cordillera.errors import CheckpointError, PlanError, RunError
from cordillera.run import Run
from cordillera.training import checkpoints
from tests.distributed.processes import needs_gloo

pytestmark = [needs_gloo, pytest.mark.skipif(sys.platform != "linux", reason="signals go through pidfd")]

NAMES = ["r0", "r1", "r2"]

# Plans


def plan_of(tmp_path: Path, text: str) -> FaultPlan:
    (tmp_path / "plan.toml").write_text(text)
    return read_fault_plan(tmp_path / "plan.toml")


def test_a_listed_plan_keeps_what_it_says_and_draws_the_rest(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        """
        seed = 3
        [[fault]]
        what = "kill"
        replica = "r2"
        at_step = 20
        [[fault]]
        what = "slow"
        rank = 1
        after_s = 2
        seconds = 3
        factor = 4
        [[fault]]
        what = "corrupt-checkpoint"
        """,
    )
    kill, slow, corrupt = drawn(plan, NAMES, 2)
    assert (kill.what, kill.replica, kill.at_step) == ("kill", "r2", 20)
    assert kill.rank in (0, 1)
    assert (slow.rank, slow.after_s, slow.seconds, slow.factor) == (1, 2.0, 3.0, 4.0)
    assert slow.replica in NAMES
    assert corrupt.place is not None
    assert 0 <= corrupt.place < 1
    assert corrupt.bit in range(8)
    assert drawn(plan, NAMES, 2) == [kill, slow, corrupt]
    without = plan.model_copy(update={"fault": plan.fault[:2]})
    assert drawn(without, NAMES, 2) == [kill, slow]


@pytest.mark.parametrize("when", [{"every_s": 10.0}, {"every_steps": 10.0}])
def test_drawn_faults_are_those_of_their_seed_and_of_their_weights(when: dict[str, float]) -> None:
    how = RandomFaults.model_validate({"count": 400, "kinds": {"kill": 3, "stop": 1}, "seconds": (1, 2), **when})
    found = drawn(FaultPlan(seed=1, random=how), NAMES, 2)
    assert found == drawn(FaultPlan(seed=1, random=how), NAMES, 2)
    assert found != drawn(FaultPlan(seed=2, random=how), NAMES, 2)
    kinds = Counter(fault.what for fault in found)
    assert 250 < kinds["kill"] < 350
    assert kinds["kill"] + kinds["stop"] == 400
    assert {(fault.replica, fault.rank) for fault in found} == {(name, rank) for name in NAMES for rank in (0, 1)}
    assert all(1 <= fault.seconds <= 2 for fault in found if fault.seconds is not None)
    times = [fault.after_s if fault.at_step is None else float(fault.at_step) for fault in found]
    assert times == sorted(times)
    assert 3000 < times[-1] < 5000  # the mean time between two is 10


def test_the_checkpoint_is_spared_unless_the_plan_names_it() -> None:
    found = drawn(FaultPlan(random=RandomFaults(every_steps=5, count=300)), NAMES, 1)
    assert {fault.what for fault in found} == set(get_args(FaultKind)) - {"corrupt-checkpoint", "full-disk"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[fault]]\nwhat = "kill"\nreplcia = "r0"', r"fault\[0\].replcia: is not a key here; did you mean 'replica'"),
        ('[[fault]]\nwhat = "explode"', r"fault\[0\].what: .*'explode'"),
        ('[[fault]]\nwhat = "stop"', r"fault\[0\]: stop needs seconds"),
        ('[[fault]]\nwhat = "slow"\nseconds = 2', r"fault\[0\]: slow needs factor"),
        ('[[fault]]\nwhat = "kill"\nseconds = 2\nbit = 1', r"fault\[0\]: kill has no seconds and no bit"),
        ('[[fault]]\nwhat = "kill-coordinator"\nreplica = "r0"', r"kill-coordinator has no replica"),
        ('[[fault]]\nwhat = "kill"\nafter_s = inf', r"fault\[0\].after_s: .*inf"),
        ("[random]\ncount = 3", r"random: needs either every_s or every_steps"),
        ("[random]\nevery_s = 3\nkinds = { kill = 0 }", r"random: kinds need weights above 0"),
        ("[random]\nevery_s = 3\nseconds = [3, 1]", r"random: seconds are the shortest and the longest"),
        ("[random]\nevery_s = 3\nseeds = 1", r"random.seeds: is not a key here"),
        ("seed = 1", r"plan: needs either \[\[fault\]\] or \[random\]"),
        ("[random", "is not TOML"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(tmp_path, text)


def test_a_replica_that_the_job_does_not_have_is_refused() -> None:
    with pytest.raises(PlanError, match=r"fault\[0\]\.replica: there is no replica 'r7'"):
        drawn(FaultPlan(fault=(Fault(what="kill", replica="r7"),)), NAMES, 1)
    with pytest.raises(PlanError, match=r"fault\[0\]\.rank: there is no rank 1"):
        drawn(FaultPlan(fault=(Fault(what="kill", rank=1),)), NAMES, 1)


# A job of sleeping processes, whose launcher is this one


def sleeper(name: str = "cordillera 0") -> subprocess.Popen[str]:
    code = f"open('/proc/self/comm', 'w').write({name!r}); import time; print(flush=True); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def state(process: subprocess.Popen[str]) -> str:
    """``S`` sleeps, ``T`` is stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def sleeps(*processes: subprocess.Popen[str]) -> bool:
    """Whether processes that were stopped go on; they run for an instant."""
    return all(comes(process, "S") for process in processes)


def comes(process: subprocess.Popen[str], wanted: str) -> bool:
    """Whether a process comes into a state; a signal takes an instant."""
    end = time.monotonic() + 5
    while state(process) != wanted and time.monotonic() < end:
        time.sleep(0.005)
    return state(process) == wanted


class Job:
    """The events of a job, and its processes: one of each replica, and the coordinator."""

    def __init__(self, folder: Path) -> None:
        self.run = Run.create(folder, "[fault_tolerance]\nreplicas = 2\n")
        self.processes: dict[str, subprocess.Popen[str]] = {}  # the newest of each
        self.started: list[subprocess.Popen[str]] = []
        self.logs = {name: EventLog(folder / "replicas" / f"{name}.jsonl") for name in ("r0", "r1", "launcher")}

    def start(self, name: str) -> subprocess.Popen[str]:
        if name == "coordinator":
            process = self._began(name, sleeper("python"))
            self.logs["launcher"].write("coordinator", process=process.pid, port=1)
        else:
            process = self._began(name, sleeper())
            self.logs["launcher"].write("started", replica=name, attempt=1)
            self.logs[name].write("joined", step=0, epoch=0, processes=[process.pid])
        return process

    def _began(self, name: str, process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        """Note a process before the log names it, which is when it may be killed."""
        self.processes[name] = process
        self.started.append(process)
        return process

    def step(self, step: int, outcome: str = "committed") -> None:
        self.logs["r0"].write("step", outcome=outcome, step=step)

    def told(self, kind: str = "fault") -> list[dict[str, Any]]:
        return [event for event in read_events(self.run.folder) if event["kind"] == kind]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path / "run")
    with made.run.lock():
        for name in ("coordinator", "r0", "r1"):
            made.start(name)
        try:
            yield made
        finally:
            for process in made.started:
                process.kill()
                process.communicate()


def injected(job: Job, *faults: Fault, on_fault: Callable[[InjectedFault], object] | None = None) -> list[Fault]:
    found = find_job(job.run.folder)
    plan = FaultPlan(fault=faults)
    return FaultInjector(found, drawn(plan, found.replicas, found.ranks), on_fault).inject()


def test_a_number_that_another_process_has_by_now_is_not_signalled(job: Job) -> None:
    launcher, mine = JobProcess(os.getpid()), job.processes["r0"].pid
    now = time.time()
    assert find_process(mine, written=now, launcher=launcher, name="cordillera 0") is not None
    assert find_process(mine, written=now - 60, launcher=launcher, name="cordillera 0") is None  # it began later
    assert find_process(mine, written=now, launcher=launcher, name="cordillera 1") is None
    assert find_process(mine, written=now, launcher=JobProcess(job.processes["r1"].pid), name="cordillera 0") is None
    assert find_process(2**40, written=now, launcher=launcher) is None
    assert find_process(os.getppid(), written=now, launcher=launcher) is None


def test_a_process_that_ended_gets_no_signal_of_its_own_handle(job: Job) -> None:
    process = job.processes["r0"]
    handle = JobProcess(process.pid)
    assert handle.is_running
    process.kill()
    process.wait()  # its number is free from here on
    assert not handle.is_running
    assert not handle.send(signal.SIGKILL)
    assert not handle.hold(1)
    handle.release(1)
    with pytest.raises(ProcessLookupError):
        JobProcess(process.pid)


def test_an_event_with_a_strangers_number_harms_nobody(job: Job) -> None:
    """The number in the newest event is of a process that began before it and is no rank of this job."""
    stranger = subprocess.Popen(["sleep", "100"])
    try:
        job.logs["r0"].write("joined", step=0, epoch=0, processes=[stranger.pid])
        job.logs["r1"].write("joined", step=0, epoch=0, processes=[os.getppid()])
        threading.Timer(0.5, lambda: job.start("r1")).start()
        left = injected(job, Fault(what="kill", replica="r1", seconds=None))
        assert not left
        assert stranger.poll() is None
        assert job.processes["r1"].wait(10) == -signal.SIGKILL
    finally:
        stranger.kill()
        stranger.wait()


def test_a_fault_comes_after_its_step_and_is_recorded(job: Job) -> None:
    job.step(3)
    job.step(5, "discarded")
    process, seen = job.processes["r1"], []
    threading.Timer(0.4, lambda: (seen.append(process.poll()), job.step(4), job.step(5))).start()
    assert not injected(job, Fault(what="kill", replica="r1", at_step=5))
    assert seen == [None]
    assert process.wait(10) == -signal.SIGKILL
    (event,) = job.told()
    told = {"what": "kill", "replica": "r1", "rank": 0, "process": process.pid, "seconds": None, "step": 5}
    assert told.items() <= event.items()
    assert event["writer"] == "chaos"


def test_a_fault_waits_for_the_successor_of_a_process_that_ended(job: Job) -> None:
    first, before = job.processes["r0"], len(job.started)
    kill = Fault(what="kill", replica="r0")

    def succeed(_: InjectedFault) -> None:
        if len(job.started) == before:
            threading.Timer(0.3, lambda: job.start("r0")).start()

    assert not injected(job, kill, kill, on_fault=succeed)
    assert first.wait(10) == -signal.SIGKILL
    assert job.processes["r0"] is not first
    assert job.processes["r0"].wait(10) == -signal.SIGKILL


def test_a_stopped_process_goes_on_when_all_that_stop_it_are_over(job: Job) -> None:
    process, seen = job.processes["r0"], []
    short, long = (Fault(what="stop", replica="r0", seconds=seconds) for seconds in (0.2, 3.0))

    def look() -> None:
        while not job.told("fault over"):
            time.sleep(0.01)
        seen.append(state(process))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    assert not injected(job, short, long)
    thread.join()
    assert seen == ["T"]
    assert sleeps(process)
    first, second = (event["seconds"] for event in job.told("fault over"))
    assert 0.2 <= first < 3.0 <= second


def test_a_slow_process_runs_in_its_part_of_the_time(job: Job) -> None:
    process, seen = job.processes["coordinator"], []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.003):
            seen.append(state(job.processes["r0"]))

    thread = threading.Thread(target=look)
    thread.start()
    assert not injected(job, Fault(what="slow", replica="r0", seconds=2.0, factor=4.0))
    is_over.set()
    thread.join()
    assert 0.3 < seen.count("T") / len(seen) < 0.98  # 0.75, where no other process takes the processors
    assert sleeps(job.processes["r0"])
    assert sleeps(process)


CONNECTS = """
import socket, sys
own = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
heard, plain = socket.create_server(("127.0.0.1", 0)), socket.socketpair()
print(heard.getsockname()[1], flush=True)
print(own.recv(1), flush=True)  # nothing comes until the connection ends
plain[0].send(b"x")
print(plain[1].recv(1), heard.accept()[0].recv(1), flush=True)
"""


def test_the_connections_of_a_process_are_cut_and_its_other_sockets_are_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        process = subprocess.Popen([sys.executable, "-c", CONNECTS, port], stdout=subprocess.PIPE, text=True)
        with process, server.accept()[0] as other:
            assert process.stdout is not None
            called = int(process.stdout.readline())
            assert JobProcess(process.pid).cut() == 1
            other.settimeout(10)
            assert other.recv(1) == b""
            assert process.stdout.readline() == "b''\n"
            with socket.create_connection(("127.0.0.1", called)) as later:
                later.send(b"y")
                assert process.stdout.readline() == "b'x' b'y'\n"


WRITES = """
import sys
for _ in sys.stdin:
    try:
        with open(sys.argv[1], "ab", buffering=0) as file:
            file.write(b"x" * 100)
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def test_the_disk_is_full_for_a_process_and_for_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    words = [sys.executable, "-c", WRITES, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def writes() -> str:
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline()

        handle = JobProcess(process.pid)
        assert writes() == "written\n"
        before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        assert handle.fill_disk("one")
        assert handle.fill_disk("other")
        assert writes() == "File too large\n"
        path.with_name("other").write_bytes(b"x" * 100)
        handle.empty_disk("one")
        assert writes() == "File too large\n"
        handle.empty_disk("other")
        assert writes() == "written\n"
        assert path.stat().st_size == 200
        assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE) == before
        process.stdin.close()
        process.wait()
        assert not handle.fill_disk("one")
        handle.empty_disk("one")


def test_a_cut_and_a_full_disk_come_over_a_process_of_the_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    process, limits = job.processes["r0"], []
    monkeypatch.setattr(JobProcess, "cut", lambda self: 3 * (self.pid == job.processes["r1"].pid))
    fill = Fault(what="full-disk", replica="r0", seconds=0.3)
    before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)

    def look(one: InjectedFault) -> None:
        if one.fault.what == "full-disk":
            limits.append(resource.prlimit(process.pid, resource.RLIMIT_FSIZE))

    assert not injected(job, fill, Fault(what="cut", replica="r1"), on_fault=look)
    assert limits == [(0, before[1])]
    assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE) == before
    filled, cut = job.told()
    assert (filled["what"], filled["seconds"]) == ("full-disk", 0.3)
    assert (cut["what"], cut["connections"]) == ("cut", 3)


@pytest.mark.parametrize("what", ["kill-coordinator", "pause-coordinator"])
def test_the_coordinator_is_found(job: Job, what: Any) -> None:
    process = job.processes["coordinator"]
    seen: list[Any] = []
    seconds = 0.3 if what == "pause-coordinator" else None
    fault = Fault(what=what, seconds=seconds)
    assert not injected(job, fault, on_fault=lambda one: seen.append(one.process))
    assert seen == [process.pid]
    if seconds is None:
        assert process.wait(10) == -signal.SIGKILL
    else:
        assert sleeps(process)
        (event,) = job.told("fault over")
        assert event["seconds"] >= 0.3


def test_nothing_stays_stopped_after_an_error(job: Job) -> None:
    def fail(one: InjectedFault) -> None:
        if one.fault.what == "pause-coordinator":
            raise OSError("the terminal is closed")

    stop = Fault(what="stop", replica="r0", seconds=60)
    slow = Fault(what="slow", replica="r1", seconds=60, factor=100)
    with pytest.raises(OSError, match="terminal"):
        injected(job, stop, slow, Fault(what="pause-coordinator", after_s=0.2, seconds=60), on_fault=fail)
    assert sleeps(*job.processes.values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_stays_stopped_after_an_interruption(job: Job, number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def interrupt(one: InjectedFault) -> None:
        if one.fault.replica == "r1":
            threading.Timer(0.1, os.kill, (os.getpid(), number)).start()

    with pytest.raises(KeyboardInterrupt):
        injected(job, *(Fault(what="stop", replica=name, seconds=60) for name in ("r0", "r1")), on_fault=interrupt)
    assert sleeps(*job.processes.values())
    assert signal.getsignal(number) is before


def test_the_injection_ends_with_the_job(tmp_path: Path) -> None:
    with ExitStack() as stack:
        made = Job(tmp_path / "my run")
        lock = stack.enter_context(ExitStack())
        lock.enter_context(made.run.lock())
        for name in ("r0", "r1"):
            process = made.start(name)
            stack.callback(process.communicate)
            stack.callback(process.kill)
        stop = Fault(what="stop", replica="r0", rank=0, seconds=60)
        late = Fault(what="kill", replica="r1", rank=0, at_step=9)
        assert injected(made, stop, late, on_fault=lambda _: threading.Timer(0.2, lock.close).start()) == [late]
        assert sleeps(made.processes["r0"])
        with pytest.raises(RunError, match="no process on this machine trains it") as refused:
            find_job(made.run.folder)
        assert f"`cordillera train '{made.run.folder}' --resume`" in str(refused.value)


def test_a_job_is_one_whose_launcher_has_the_lock_open(tmp_path: Path, job: Job) -> None:
    lock = JobLock(job.run.folder)
    assert lock.launcher.pid == os.getpid()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".lock").write_text(str(os.getpid()))  # as a job that was killed leaves it
    with pytest.raises(LookupError):
        JobLock(tmp_path / "other")


def test_events_of_an_earlier_job_are_not_taken_for_those_of_this_one(job: Job) -> None:
    job.step(500)
    os.utime(job.run.folder / ".lock", (time.time() + 1, time.time() + 1))
    time.sleep(1.1)
    for name in ("r0", "r1"):
        job.processes[name].kill()
        job.processes[name].wait()
        job.start(name)
    found = find_job(job.run.folder)
    assert found.step == 0
    job.step(7)
    found.look()
    assert found.step == 7


def test_only_what_was_added_is_read(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "r0.jsonl")
    tail = EventTail(tmp_path / "r0.jsonl")
    log.write("joined", step=0, processes=[1])
    log.write("step", outcome="committed", step=1)
    log.write("step", outcome="committed", step=2)
    assert [event.get("step") for event in tail.added()] == [0, 2]
    assert tail.added() == []
    with open(tmp_path / "r0.jsonl", "ab") as file:
        file.write(b'{"kind": "joined", "half')
    assert tail.added() == []
    EventLog(tmp_path / "r0.jsonl").write("step", outcome="committed", step=3)  # cuts the half line off
    assert [event["step"] for event in tail.added()] == [3]
    with open(tmp_path / "r0.jsonl", "ab") as file:
        file.write(b'{"kind": "joined", "step": 4, "seal": "0123456789abcdef"}\n')
    with pytest.raises(RunError, match=r"r0\.jsonl.*checksum"):
        tail.added()


@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 0.999999])
def test_one_flipped_bit_of_the_newest_checkpoint_is_found_when_it_is_read(tmp_path: Path, place: float) -> None:
    assert flip_bit(tmp_path, place, 3) is None
    for step in (5, 10):
        checkpoints.save(tmp_path, {"model.weight": torch.arange(50.0)}, {"step": step})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    flipped = flip_bit(tmp_path, place, 3)
    assert flipped is not None
    assert flipped.path.parent.name == "step-000000010"
    changed = [path for path, content in before.items() if path.read_bytes() != content]
    assert changed == [flipped.path]
    now, then = flipped.path.read_bytes(), before[flipped.path]
    assert [n for n in range(len(then)) if now[n] != then[n]] == [flipped.offset]
    assert now[flipped.offset] ^ then[flipped.offset] == 8
    with pytest.raises(CheckpointError):
        checkpoints.load(flipped.path.parent)
    mend(flipped)
    assert checkpoints.load(flipped.path.parent).step == 10
    mend(flipped)  # nothing is done to what is not damaged
    assert flipped.path.read_bytes() == then


def test_a_checkpoint_that_is_to_be_mended_is_mended(job: Job) -> None:
    folder = checkpoints.save(job.run.checkpoints, {"model.weight": torch.arange(50.0)}, {"step": 1})
    fault = Fault(what="corrupt-checkpoint", seconds=0.2)

    def seen(one: InjectedFault) -> None:
        with pytest.raises(CheckpointError):
            checkpoints.load(folder)

    assert not injected(job, fault, on_fault=seen)
    assert checkpoints.load(folder).step == 1
    (event,) = job.told()
    assert event["file"].startswith("step-000000001/")
    assert event["bit"] in range(8)


def test_a_run_without_replicas_and_one_that_is_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        find_job(tmp_path / "none")
    run = Run.create(tmp_path / "alone", "[fault_tolerance]\nreplicas = 1\n")
    with run.lock(), pytest.raises(RunError, match="is not trained by replicas"):
        RunningJob(run)
    served = Run.create(tmp_path / "served", "[fault_tolerance]\nreplicas = 2\n")
    with served.lock():
        EventLog(served.folder / "replicas" / "launcher.jsonl").write("coordinator", process=os.getpid(), port=1)
        with pytest.raises(RunError, match="its replicas were started elsewhere"):
            find_job(served.folder)
    other = Run.create(tmp_path / "over", "[fault_tolerance]\nreplicas = 2\n")
    other.write_status("finished", 12, 12)
    with pytest.raises(RunError, match="its job is over: finished at step 12"):
        find_job(other.folder, 0.3)
