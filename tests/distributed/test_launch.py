"""Processes of a job: what they give back, how they fail, are ended, stall, stop; nothing is left of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cordillera.distributed.job import launch as job_launch
from cordillera.distributed.job.failures import RankTraceback, pack, unpack
from cordillera.distributed.job.job import join_job
from cordillera.distributed.job.launch import LaunchConfig, launch, tell
from cordillera.errors import CordilleraError, DataError, DependencyError, PeerError, PlanError, RankError, RecipeError
from tests.distributed.processes import needs_gloo

pytestmark = [needs_gloo, pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")]

ROOT = Path(__file__).parents[2]
DEADLINE_S, MARGIN_S = 8.0, 12.0  # the machine itself may stand still for seconds
REMEDY = "continue with --resume"


def sleep(rank: int, seconds: float) -> float:
    """Works without a word to anyone."""
    with join_job():
        time.sleep(seconds)
    return seconds


@pytest.mark.slow
def test_a_process_alone_needs_no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = job_launch.WatchdogConfig
    monkeypatch.setattr(job_launch, "WatchdogConfig", lambda deadline_s: plain(deadline_s, join_s=0.5))
    assert launch(sleep, 1, (3.0,), config=LaunchConfig(deadline_s=2.5)) == 3.0
    asked = [0]

    def stop() -> int:
        asked[0] += 1
        return 1

    assert launch(sleep, 1, (3.0,), config=LaunchConfig(deadline_s=2.5), asked=stop) == 3.0
    assert asked[0] > 1


def behave(rank: int, how: str, folder: str) -> dict[str, Any]:
    """Steps with a collective each, then rank 1 has a bad day while rank 0 waits for it."""
    Path(folder, f"{os.getpid()}.pid").touch()
    with join_job() as job:
        total = torch.ones(2) * rank
        for step in range(3):
            job.watchdog.at(f"step {step}")
            dist.all_reduce(total)
        if how == "well":
            be_disturbed()
            tell(["from rank", rank])
        if how == "killed" and rank == 1:
            with subprocess.Popen(["sleep", "1000"]) as helper:  # which nobody else would end
                Path(folder, f"{helper.pid}.pid").touch()
                bad_day(how)
        if how == "alike":
            Path(folder, f"{rank}.here").touch()
            while not all(Path(folder, f"{other}.here").exists() for other in range(2)):
                pass  # both are to fail before one of them hears of the other
            if rank == 1:  # which is slow to end
                tell_others = job.watchdog.tell
                job.watchdog.tell = lambda verdict: (tell_others(verdict), time.sleep(2.5))
            raise DataError("is empty", where="file.txt", remedy="fill it")
        if rank == 1:
            print("what it \x1b[2Jwrote last", flush=True)
            Path(folder, "begun").touch()
            bad_day(how)
        if how != "well":
            dist.all_reduce(total)
        heard = listening(os.getpid(), int(os.environ["MASTER_PORT"]))
    return {"rank": rank, "total": total.tolist(), "threads": torch.get_num_threads(), "addresses": sorted(heard)}


def be_disturbed() -> None:
    """Another program that found the job's port, but not its secret, writes into the store what it likes."""
    stranger = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    for key in (key for key in stranger.list_keys() if "cordillera" in key):
        if "heart" in key or "meet" in key or "here" in key:
            stranger.set(key, "not JSON \x1b[2J")
    stranger.set("cordillera/0/1/verdict", '[[0], "give up", "and go home", false]')
    stranger.set("cordillera/0/1/heart/0", b"\xff" * 1000)
    stranger.delete_key("cordillera/0/1/heart/1")
    time.sleep(1)


def listening(process: int, port: int) -> set[str]:
    """Addresses, in hexadecimal, at which others can call a process, or the port."""
    held = set()
    for link in Path("/proc", str(process), "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held.add(os.readlink(link))
    heard = set()
    for name in ("tcp", "tcp6"):
        for row in map(str.split, Path("/proc/net", name).read_text().splitlines()[1:]):
            address, _, number = row[1].partition(":")
            if row[3] == "0A" and (int(number, 16) == port or f"socket:[{row[9]}]" in held):
                heard.add(address)
    return heard


def bad_day(how: str) -> None:
    if how == "error":
        raise DataError("is empty", where="file.txt", remedy="fill it")
    if how == "bug":
        {}["absent"]
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(7)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "stuck":
        time.sleep(1000)


def run(how: str, folder: Path, deadline_s: float = DEADLINE_S) -> tuple[Any, float]:
    """What a launch gave or raised, and how long that took from the bad day on."""
    folder.mkdir()
    config = LaunchConfig(threads=1, deadline_s=deadline_s, remedy=REMEDY)
    heard: list[Any] = []
    try:
        result = launch(behave, 2, (how, str(folder)), config=config, hear=heard.append)
        result["heard"] = sorted(heard)
    except Exception as error:
        result = error
    ended, begun = time.time(), folder / "begun"
    wait_for_ends(folder)
    return result, ended - (begun.stat().st_mtime if begun.exists() else ended)


def wait_for_ends(folder: Path) -> None:
    """Of all processes that said so in a folder: what was killed takes a moment to go."""
    until = time.monotonic() + 30
    while left := alive(folder):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def alive(folder: Path) -> list[str]:
    """Processes that said so in a folder and have not ended."""
    left = []
    for file in folder.glob("*.pid"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = Path("/proc", file.stem, "stat").read_text().rpartition(")")[2].split()[0]
            left += [file.stem] if state not in "ZX" else []
    return left


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[tuple[Any, float]]]]:
    """Days of each run of the tests at once, as most of each is waiting; others when they are asked for."""
    folder = tmp_path_factory.mktemp("launched")

    class Days(dict[str, Future[tuple[Any, float]]]):
        def __missing__(self, how: str) -> Future[tuple[Any, float]]:
            self[how] = pool.submit(run, how, folder / how)
            return self[how]

    with ThreadPoolExecutor(3) as pool:
        yield Days(
            {how: pool.submit(run, how, folder / how) for how in ("stopped", "stuck", "error", "killed", "exit")}
        )


@pytest.mark.slow
def test_the_result_of_rank_0_comes_back_whatever_strangers_write_into_the_store(launched: Any) -> None:
    result, _ = launched["well"].result()
    assert not isinstance(result, Exception), result
    assert result.pop("heard") == [["from rank", 0], ["from rank", 1]]
    assert result == {"rank": 0, "total": [4.0, 4.0], "threads": 1, "addresses": ["0100007F"]}  # 127.0.0.1 alone


@pytest.mark.slow
def test_processes_that_start_afresh_end_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with GPUs, and on systems other than Linux."""
    monkeypatch.setattr(job_launch, "process_context", lambda config: multiprocessing.get_context("spawn"))
    result, _ = run("well", tmp_path / "well", 60.0)  # each process loads torch
    assert not isinstance(result, Exception), result
    assert result.pop("heard") == [["from rank", 0], ["from rank", 1]]
    error, _ = run("exit", tmp_path / "exit", 60.0)
    assert "what it \\x1b[2Jwrote last" in str(error)


def test_an_error_keeps_its_class_and_gets_its_ranks_name(launched: Any) -> None:
    error, _ = launched["error"].result()
    assert type(error) is DataError
    assert str(error) == "rank 1, file.txt: is empty\n  -> fill it"
    assert (error.what, error.where, error.remedy) == ("is empty", "rank 1, file.txt", "fill it")


@pytest.mark.slow
def test_an_error_of_all_ranks_is_said_once_as_if_there_were_one(launched: Any) -> None:
    error, _ = launched["alike"].result()
    assert type(error) is DataError
    assert str(error) == "file.txt: is empty\n  -> fill it"


@pytest.mark.slow
def test_a_mistake_of_the_program_shows_its_ranks_traceback(launched: Any) -> None:
    error, _ = launched["bug"].result()
    assert type(error) is KeyError
    assert isinstance(error.__cause__, RankTraceback)
    assert str(error.__cause__).startswith("in rank 1:")
    assert "in bad_day" in str(error.__cause__)


@pytest.mark.parametrize(("how", "named"), [("killed", "SIGKILL"), ("exit", "exit code 7")])
def test_a_rank_that_dies_is_named_and_takes_the_others_along(launched: Any, how: str, named: str) -> None:
    error, _ = launched[how].result()
    assert type(error) is RankError
    assert error.ranks == (1,)
    assert f"rank 1 was ended by {named}" in str(error) or f"rank 1 ended with {named}" in str(error)
    assert REMEDY in str(error)
    assert (r"| what it \x1b[2Jwrote last" in str(error)) == (how == "exit")


@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_a_rank_that_stalls_is_named_by_the_deadline(launched: Any, how: str) -> None:
    error, seconds = launched[how].result()
    assert type(error) is RankError
    assert error.ranks == (1,)
    assert "rank 1 was last heard of at" in str(error)
    if how == "stuck":
        assert "in bad_day" in str(error)
    assert REMEDY in str(error)
    assert 0 < seconds < DEADLINE_S + MARGIN_S


@pytest.mark.parametrize(
    "error",
    [
        DataError("is empty", where="file.txt", remedy="fill it"),
        PlanError("does not fit"),
        RecipeError("mine.toml", [("model.layers", "must be 1 or more")]),
        PeerError("rank 2 is late", peer=2, stage=1, microbatch=3, where="rank 0"),
        RankError("rank 2 ended", ranks=(2,), remedy="see why"),
        FileNotFoundError(2, "No such file", "file.txt"),
        ValueError("no"),
    ],
)
def test_errors_are_carried_whole(error: Exception) -> None:
    carried = unpack(pack(error))
    assert type(carried) is type(error)
    assert str(carried) == str(error)
    assert carried.args == error.args
    assert vars(carried) == vars(error)
    if isinstance(error, CordilleraError):
        named = unpack(pack(error), "rank 2", ["rank 3 failed as well: ValueError"])
        assert str(named).startswith(f"rank 2{f', {error.where}' if error.where else ''}: {error.what}\nrank 3 failed")


def test_errors_that_cannot_be_carried_are_told() -> None:
    class Local(Exception):
        pass

    for error in (Local("of this place"), SystemExit("of this place"), KeyboardInterrupt("of this place")):
        told = unpack(pack(error), "rank 1")
        assert isinstance(told, RankError)
        assert str(told).startswith("rank 1: failed: ")
        assert str(told).endswith("of this place")


def test_more_processes_than_gpus_are_refused() -> None:
    count = torch.cuda.device_count() + 1
    with pytest.raises(DependencyError, match=f"{count} processes take {count} GPUs"):
        launch(behave, count, config=LaunchConfig(device_type="cuda"))


def train(rank: int, folder: str) -> int:
    """Steps until the ranks agree to stop."""
    Path(folder, f"{os.getpid()}.pid").touch()
    with join_job() as job:
        for step in range(100_000):
            job.watchdog.at(f"step {step}")
            is_asked = torch.tensor([float(job.watchdog.should_stop)])
            dist.all_reduce(is_asked)
            if step == 3:
                Path(folder, f"{rank}.begun").touch()
            if is_asked:
                Path(folder, f"{rank}.asked").touch()
            if is_asked and not Path(folder, "endless").exists():
                Path(folder, f"{rank}.stopped").write_text(str(step))
                return step
            time.sleep(0.01)
    return -1


_PROGRAM = """
import sys
from cordillera.distributed.job.launch import LaunchConfig, launch
from tests.distributed.test_launch import train
if __name__ == "__main__":
    print(launch(train, 2, (sys.argv[1],), config=LaunchConfig(threads=1, deadline_s=60)))
"""


def importing() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), *sys.path])}


def signalled(folder: Path, how: str) -> tuple[int, str, str]:
    """Exit code and outputs of a program whose launch got signals when its ranks were under way."""
    folder.mkdir()
    if how == "twice":
        (folder / "endless").touch()
    script = folder / "program.py"
    script.write_text(_PROGRAM)
    (folder / "temporary").mkdir()
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, **importing(), "TMPDIR": str(folder / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        try:
            until = time.monotonic() + 100
            while len(list(folder.glob("*.begun"))) < 2:
                assert parent.poll() is None, parent.communicate()
                assert time.monotonic() < until
                time.sleep(0.05)
            if how == "terminal":  # which sends it to all
                os.killpg(parent.pid, signal.SIGINT)
                for file in folder.glob("*.pid"):
                    os.kill(int(file.stem), signal.SIGINT)
            else:
                parent.send_signal({"killed": signal.SIGKILL, "twice": signal.SIGHUP}[how])
            if how == "twice":
                while not list(folder.glob("*.asked")):
                    assert time.monotonic() < until
                    time.sleep(0.05)
                time.sleep(2)  # signals within a second count as one
                parent.send_signal(signal.SIGINT)
            out, err = parent.communicate(timeout=100)
        finally:
            parent.kill()
    wait_for_ends(folder)
    assert not list((folder / "temporary").iterdir())
    return parent.returncode, out, err


@pytest.fixture(scope="module")
def signals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[tuple[int, str, str]]]]:
    folder = tmp_path_factory.mktemp("signals")
    with ThreadPoolExecutor(2) as pool:
        yield {how: pool.submit(signalled, folder / how, how) for how in ("terminal", "twice", "killed")}


@pytest.mark.slow
def test_ranks_that_are_asked_stop_at_the_same_step(signals: Any) -> None:
    code, out, err = signals["terminal"].result()
    assert code == 0, err
    assert int(out) > 0
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(signals: Any) -> None:
    code, out, err = signals["twice"].result()
    assert code != 0
    assert not out
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
def test_ranks_end_with_the_one_that_began_them_and_leave_no_files(signals: Any) -> None:
    code, _, _ = signals["killed"].result()
    assert code == -signal.SIGKILL


_UNPLUGGED = """
import os, pathlib, signal, subprocess, sys, threading, time
from cordillera.distributed.job.launch import LaunchConfig, launch
from cordillera.errors import CordilleraError
from tests.distributed.test_launch import train
folder, deadline_s = pathlib.Path(sys.argv[1]), float(sys.argv[2])
began = [0.0]

def unplug():
    while len(list(folder.glob("*.begun"))) < 2:
        time.sleep(0.05)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    began[0] = time.monotonic()
    if deadline_s > 30:
        for _ in range(2):
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    threading.Thread(target=unplug, daemon=True).start()
    try:
        launch(train, 2, (str(folder),), config=LaunchConfig(threads=1, deadline_s=deadline_s))
    except (CordilleraError, KeyboardInterrupt) as error:
        print(round(time.monotonic() - began[0], 1), type(error).__name__, error, flush=True)
"""


def can_unplug() -> bool:
    """Whether a network of its own can be had here, whose loopback link can be taken down."""
    with contextlib.suppress(OSError):
        command = ["unshare", "-rn", "ip", "link", "set", "lo", "up"]
        return subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0
    return False


@pytest.mark.slow
@pytest.mark.parametrize("deadline_s", [8, 60], ids=["deadline", "Ctrl-C"])
def test_a_link_that_goes_down_ends_a_job_by_the_deadline_and_ctrl_c_at_once(tmp_path: Path, deadline_s: int) -> None:
    if not can_unplug():
        pytest.skip("takes unshare and ip, and the right to make a network namespace")
    script = tmp_path / "program.py"
    script.write_text(_UNPLUGGED)
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, str(script), str(tmp_path), str(deadline_s)],
        env={**os.environ, **importing(), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout, done.stderr
    assert not done.stderr
    seconds, kind = done.stdout.split()[:2]
    assert kind == ("RankError" if deadline_s == 8 else "KeyboardInterrupt")
    assert float(seconds) < 8 + MARGIN_S
    if deadline_s == 8:
        assert "the job's store, at 127.0.0.1, did not answer for" in done.stdout
        assert "see whether the loopback link is up" in done.stdout
    wait_for_ends(tmp_path)


_JOINED = """
import sys, torch, torch.distributed as dist
from cordillera.distributed.job.job import join_job
with join_job(deadline_s=60) as job:
    total = torch.ones(1)
    work = dist.all_reduce(total, async_op=True)
    mesh = dist.init_device_mesh("cpu", (job.size,))
    work.wait()
    if len(sys.argv) > 1 and job.rank == 1:
        raise SystemExit(5)
    if len(sys.argv) > 1:
        dist.all_reduce(total)
    print([job.rank, job.size, total.item()], flush=True)
"""


def under_launcher(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(_JOINED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [*launcher, *arguments], capture_output=True, text=True, timeout=120, check=False, env=environment
    )


@pytest.mark.slow
def test_processes_of_a_launcher_join_their_job_and_end_in_good_order(tmp_path: Path) -> None:
    done = under_launcher(tmp_path)
    assert done.returncode == 0, done.stderr
    # two processes write to one stream: lines may run into one another
    assert sorted(re.findall(r"\[[^]]*\]", done.stdout)) == ["[0, 2, 2.0]", "[1, 2, 2.0]"]
    assert "terminate called" not in done.stderr


@pytest.mark.slow
def test_processes_of_a_launcher_name_the_one_that_failed(tmp_path: Path) -> None:
    done = under_launcher(tmp_path, "fail")
    assert done.returncode != 0
    assert "RankError: rank 1 failed: SystemExit: 5" in done.stderr, done.stderr


def test_a_process_alone_is_a_job() -> None:
    assert "RANK" not in os.environ
    for _ in range(2):
        with join_job() as job, join_job() as same:
            assert same is job
            assert (job.rank, job.size, dist.get_world_size()) == (0, 1, 1)
            job.watchdog.at("step 1")
            assert not job.watchdog.should_stop
            os.kill(os.getpid(), signal.SIGTERM)
            assert job.watchdog.should_stop
            assert job.watchdog.late() == []
        assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"^of its own$"), join_job():
        raise RuntimeError("of its own")
    assert not dist.is_initialized()


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(PlanError, match="RANK and WORLD_SIZE are set, MASTER_ADDR is not"), join_job():
        pass
