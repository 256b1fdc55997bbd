"""The watch over a job's processes: whose fault it is, by what their hearts say, and what becomes of the others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cordillera.distributed.job import watchdog as watch
from cordillera.distributed.job.heartbeats import Beat, HeartbeatBoard, Verdict, named
from cordillera.distributed.job.store import JobStore
from cordillera.distributed.job.watchdog import ABANDONED, Watchdog, WatchdogConfig
from cordillera.errors import PeerError, RankError
from tests.distributed.processes import free_port, needs_gloo

pytestmark = needs_gloo

DEADLINE_S, JOIN_S = 10.0, 60.0


class Job:
    """Ranks that beat every second of a clock that the test turns."""

    def __init__(self, size: int) -> None:
        self.now, self.store = 1_000.0, JobStore(dist.HashStore())
        self.hearts = HeartbeatBoard(self.store, size, DEADLINE_S, JOIN_S, lambda: self.now)
        self.beats = [Beat(0, 0, 0, f"at step 1 of rank {rank}", False) for rank in range(size)]

    def run(self, seconds: int, dead: tuple[int, ...] = (), moving: tuple[int, ...] = ()) -> None:
        for _ in range(seconds):
            self.now += 1
            for rank, beat in enumerate(self.beats):
                if rank not in dead:
                    beat = beat._replace(number=beat.number + 1, life=beat.life + (rank in moving))
                    self.beats[rank] = beat
                    self.hearts.beat(rank, beat)
            self.hearts.look()

    def wait(self, *ranks: int) -> None:
        for rank in ranks:
            self.beats[rank] = self.beats[rank]._replace(waits=True)


def test_a_job_whose_ranks_move_or_work_by_themselves_goes_on() -> None:
    job = Job(3)
    job.run(100, moving=(0, 1, 2))
    assert job.hearts.judge() is None
    job.run(100)  # nobody waits for another
    assert job.hearts.judge() is None
    assert job.hearts.late(5) == []
    job.wait(0, 1)
    job.run(100, moving=(2,))  # slow, at work
    assert job.hearts.judge() is None


def test_a_silent_heart_is_named_after_the_deadline_and_not_before() -> None:
    job = Job(3)
    job.run(5, moving=(0, 1, 2))
    job.run(10, dead=(1,), moving=(0, 2))
    assert job.hearts.judge() is None
    assert job.hearts.late(5) == [1]
    job.run(1, dead=(1,), moving=(0, 2))
    verdict = job.hearts.judge()
    assert verdict is not None
    assert verdict.ranks == (1,)
    assert verdict.what == "rank 1 was not heard of for 10 s: rank 1 was last heard of at step 1 of rank 1"
    assert "a longer parallel.deadline_s, of which that time is a part" in verdict.remedy


def test_the_rank_that_others_wait_for_is_named() -> None:
    job = Job(3)
    job.run(5, moving=(0, 1, 2))
    job.wait(0, 2)
    job.run(11)
    verdict = job.hearts.judge()
    assert verdict is not None
    assert verdict.ranks == (1,)
    assert verdict.what.startswith("the others waited 10 s for rank 1: ")
    assert job.hearts.late(10) == [1]


def test_of_ranks_that_all_wait_the_one_behind_is_named() -> None:
    job = Job(3)
    job.run(5, moving=(0, 1, 2))
    job.wait(0, 1, 2)
    job.beats[0] = job.beats[0]._replace(moves=4)
    job.beats[2] = job.beats[2]._replace(moves=4)
    job.run(12)
    verdict = job.hearts.judge()
    assert verdict is not None
    assert verdict.ranks == (1,)
    job.beats[1] = job.beats[1]._replace(moves=4)
    job.run(1)
    verdict = job.hearts.judge()
    assert verdict is not None
    assert verdict.ranks == ()
    assert "all processes have waited for one another" in verdict.what


def test_a_rank_that_never_comes_is_named() -> None:
    job = Job(2)
    job.run(60, dead=(1,))
    assert job.hearts.judge() is None
    assert job.hearts.describe(1) == "rank 1 has not come yet"
    job.run(1, dead=(1,))
    verdict = job.hearts.judge()
    assert verdict is not None
    assert (verdict.ranks, verdict.what) == ((1,), "rank 1 did not come within 60 s")


def test_time_in_which_the_one_who_looks_stood_still_does_not_count() -> None:
    job = Job(2)
    job.run(5, moving=(0, 1))
    job.now += 1000
    job.hearts.look()
    assert job.hearts.judge() is None
    assert job.hearts.still() < 2
    job.run(11, dead=(1,), moving=(0,))
    verdict = job.hearts.judge()
    assert verdict is not None
    assert verdict.ranks == (1,)


def test_all_are_told_the_first_verdict() -> None:
    job = Job(2)
    first, second = Verdict((1,), "rank 1 ended", "see why"), Verdict((0,), "rank 0 ended", "see why")
    assert job.hearts.accuse(first) == first
    other = HeartbeatBoard(job.store, 2, DEADLINE_S, JOIN_S, lambda: job.now)
    assert other.accuse(second) == first
    third = HeartbeatBoard(job.store, 2, DEADLINE_S, JOIN_S, lambda: job.now)
    third.look()
    assert third.verdict == first
    error = first.error("rank 0")
    assert (error.ranks, error.peer) == ((1,), 1)
    assert str(error) == "rank 0: rank 1 ended\n  -> see why"


def test_ranks_are_named_as_people_do() -> None:
    assert [named([3]), named([3, 5]), named([1, 2, 3])] == ["rank 3", "ranks 3 and 5", "ranks 1, 2 and 3"]
    assert named(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 93 more"


@pytest.mark.parametrize("deadline_s", [1.0, 8.0, 300.0])
def test_a_lost_rank_is_found_and_the_others_are_ended_by_the_deadline(deadline_s: float) -> None:
    """A beat is missed, it is noticed at the next look, and processes that raise no error are ended after a grace."""
    config = WatchdogConfig(deadline_s)
    assert config.patience_s + config.grace_s + 2 * config.beat_s == pytest.approx(deadline_s)
    assert config.patience_s >= 0.7 * deadline_s


def test_errors_that_are_not_of_communication_stay_as_they_are() -> None:
    watch = Watchdog(WatchdogConfig(5.0), JobStore(dist.HashStore()), 0, 2)
    with pytest.raises(RuntimeError, match=r"^shapes"), watch.explaining():
        raise RuntimeError("shapes do not fit")
    with pytest.raises(RankError, match=r"^known$"), watch.explaining():
        raise RankError("known")


def test_a_late_message_with_a_known_sender_stays_as_it_is() -> None:
    watch = Watchdog(WatchdogConfig(1.0), JobStore(dist.HashStore()), 0, 2)
    given = PeerError("rank 1 did not give a message within 1 s", peer=1)
    assert watch.explain(given) is given


_PROGRAM = """
import json, os, signal, sys, time, torch, torch.distributed as dist
from cordillera.distributed.job.job import join_job
from cordillera.errors import RankError
how, rank = sys.argv[1], int(os.environ["RANK"])
try:
    with join_job(deadline_s=8, join_s=4 if "missing" in how else 60) as job:
        total = torch.ones(1)
        for step in range(3):
            job.watchdog.at(f"step {step}")
            dist.all_reduce(total)
        if how.startswith(f"{rank} "):
            if "loops" in how:
                while True:
                    time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGSTOP if "stops" in how else signal.SIGKILL)
        dist.all_reduce(total)
except RankError as error:
    print("raised:", error.ranks, error, flush=True)
    os._exit(3)
"""


@contextlib.contextmanager
def processes(
    folder: Path, how: str, ranks: tuple[int, ...] = (0, 1)
) -> Iterator[list[tuple[subprocess.Popen[bytes], Path]]]:
    """Of two ranks, and what they write, without any launcher: rank 0 holds the store."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    job |= {"PYTHONPATH": os.pathsep.join(sys.path), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    begun = []
    try:
        for number, rank in enumerate(ranks):
            path = folder / f"{how}-{number}.txt"
            with open(path, "wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, how],
                    env={**os.environ, **job, "RANK": str(rank)},
                    stdout=output,
                    stderr=output,
                )
            begun.append((process, path))
        yield begun
    finally:
        for process, _ in begun:
            process.kill()
            process.wait()


def survivor(folder: Path, how: str) -> tuple[int, str, float]:
    """Exit code and words of the process whose peer had a bad day, and how long it took."""
    culprit, began = int(how[0]), time.monotonic()
    with processes(folder, how) as begun:
        process, output = begun[1 - culprit]
        code, seconds = process.wait(120), time.monotonic() - began
        if "loops" in how:
            assert begun[culprit][0].wait(60) == ABANDONED
        return code, output.read_text(), seconds


DAYS = ("1 dies", "1 loops", "0 dies", "0 stops")


@pytest.fixture(scope="module")
def survivors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[tuple[int, str, float]]]]:
    folder = tmp_path_factory.mktemp("survivors")
    with ThreadPoolExecutor(3) as pool:
        yield {how: pool.submit(survivor, folder, how) for how in DAYS}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signals here")
@pytest.mark.parametrize("how", DAYS)
def test_without_a_launcher_the_others_end_and_name_the_rank(survivors: Any, how: str) -> None:
    code, said, seconds = survivors[how].result()
    assert code in (3, ABANDONED), said
    assert f"rank {how[0]}" in said
    assert f"rank {1 - int(how[0])} " not in said.partition("->")[0]
    assert seconds < 110


@pytest.mark.slow
def test_without_a_launcher_all_end_in_good_order(tmp_path: Path) -> None:
    with processes(tmp_path, "all well") as begun:
        assert [process.wait(120) for process, _ in begun] == [0, 0], [output.read_text() for _, output in begun]
        assert [output.read_text() for _, output in begun] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "ranks", "words"),
    [
        ("doubled", (0, 0), "two processes say that they are rank 0: process"),
        ("missing", (0,), "rank 1 did not come within 4 s"),
        ("missing", (1,), "rank 1: did not find the job's store at 127.0.0.1:"),
    ],
)
def test_ranks_that_are_doubled_or_missing_are_named_at_once(
    tmp_path: Path, how: str, ranks: tuple[int, ...], words: str
) -> None:
    with processes(tmp_path, how, ranks) as begun:
        for process, output in begun:
            assert process.wait(100) == 3, output.read_text()
            said = output.read_text()
            assert words in said
            assert len(said.splitlines()) == 2, said  # and nothing of torch's own


def test_a_process_is_ended_also_where_its_terminal_was_closed(monkeypatch):
    read, write = os.pipe()
    os.close(read)

    def ended(code):
        raise SystemExit(code)

    monkeypatch.setattr(watch.os, "_exit", ended)
    with open(write, "w", buffering=1) as closed:
        monkeypatch.setattr(watch.sys, "stderr", closed)
        with pytest.raises(SystemExit) as found:
            watch._abandon(RankError("rank 1 ended", ranks=[1]))
        assert found.value.code == ABANDONED
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), closed.fileno())  # what could not be written is flushed here


def test_a_process_that_does_not_end_by_itself_is_ended_after_its_grace() -> None:
    ended: list[tuple[float, RankError]] = []
    config = WatchdogConfig(deadline_s=4.0)
    guarded = Watchdog(
        config, JobStore(dist.HashStore()), 0, 2, abandon=lambda error: ended.append((time.monotonic(), error))
    )
    error = RankError("rank 1 was lost")
    guarded._error, began = error, time.monotonic()
    guard = threading.Thread(target=guarded._keep_guard)
    guard.start()
    while not ended and time.monotonic() - began < 10:
        time.sleep(0.01)
    guarded._left.set()
    guard.join(10)
    assert not guard.is_alive()
    assert ended[0][1] is error
    assert config.grace_s <= ended[0][0] - began < config.grace_s + 5
