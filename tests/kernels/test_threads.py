"""Threads: they wait briefly, and their number follows quotas and what other processes do, unless somebody sets it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cordillera.kernels.threads import choose_threads, decide, quota, usable_cores, used_by_others

_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def _python(program: str, **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**environment, **settings}, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


_WAITING = "import os, cordillera; from cordillera.kernels.threads import spins_long; "
_WAITING += "print(os.environ.get('GOMP_SPINCOUNT'), spins_long())"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP")
def test_importing_cordillera_lets_threads_wait_briefly_unless_the_environment_says_how() -> None:
    found, said = _python(_WAITING).split(" ", 1)
    assert (found, said) in [("1000", "None"), ("10000", "GOMP_SPINCOUNT=10000 lets threads spin while they wait")]
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            assert _python(_WAITING) == "1000 None"
        finally:
            neighbour.kill()
    assert _python(_WAITING, OMP_WAIT_POLICY="passive") == "None None"
    assert _python(_WAITING, OMP_WAIT_POLICY="ACTIVE").startswith("None OMP_WAIT_POLICY lets threads spin")
    assert _python(_WAITING, GOMP_SPINCOUNT="infinity").startswith("infinity GOMP_SPINCOUNT=infinity lets threads")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP")
def test_importing_torch_first_is_noticed() -> None:
    assert "torch was imported before cordillera" in _python("import torch; " + _WAITING)


@pytest.mark.parametrize(
    ("cores", "share", "others", "spinning", "count"),
    [
        (2, None, 0.1, None, 2),  # nothing else runs
        (2, None, 2.0, None, 2),  # a share of both is more than a share of one
        (2, None, 2.0, "they spin", 1),
        (2, None, 1.0, "they spin", 1),
        (16, None, 2.0, None, 14),
        (16, None, 2.0, "they spin", 14),
        (16, None, 12.0, None, 16),
        (64, 1.5, 0.0, None, 2),
        (64, 0.2, 60.0, None, 1),
        (1, None, 0.0, None, 1),
    ],
)
def test_number_of_threads_beside_other_processes(
    cores: int, share: float | None, others: float, spinning: str | None, count: int
) -> None:
    choice = decide(cores, share, others, spinning)
    assert choice.count == count
    assert bool(choice.why) == (others >= 0.5 or share is not None)
    if others >= 0.5 and count < cores and spinning:
        assert spinning in choice.why


def test_what_somebody_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3 if usable_cores() != 3 else 4)
        for name in _SETTINGS:
            monkeypatch.delenv(name, raising=False)
        assert choose_threads().count == torch.get_num_threads()
        torch.set_num_threads(1)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert choose_threads() == type(choose_threads())(1, "")
    finally:
        torch.set_num_threads(before)


def test_quotas_of_control_groups_are_found(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    assert quota(tmp_path, own) is None
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert quota(tmp_path, own) == 1.5
    own.write_text("4:cpu,cpuacct:/there\n3:memory:/\n")
    folder = tmp_path / "cpu,cpuacct"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert quota(tmp_path, own) is None
    (folder / "cpu.cfs_quota_us").write_text("50000\n")
    assert quota(tmp_path, own) == 0.5


def _compute(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/stat")
def test_processes_that_compute_are_noticed() -> None:
    other = multiprocessing.get_context("spawn").Process(target=_compute, args=(20.0,))
    other.start()
    try:
        until, seen = time.perf_counter() + 15, 0.0
        while seen < 0.5 and time.perf_counter() < until:
            seen = used_by_others()
    finally:
        other.kill()
        other.join()
    assert 0.5 <= seen <= usable_cores()


def test_the_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import cordillera.kernels.threads as module

    clock = iter([10.0, 10.4])
    monkeypatch.setattr(module, "_busy_seconds", lambda: next(clock))
    monkeypatch.setattr(module.time, "process_time", iter([1.0, 1.4]).__next__)
    assert used_by_others(0.01) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("load", "others"), [(3.5, 2.5), (1.0, 0.0), (0.2, 0.0), (100.0, 8.0), (None, 0.0)])
def test_without_counts_of_processors_the_load_of_the_system_tells(
    load: float | None, others: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cordillera.kernels.threads as module

    def loads() -> tuple[float, float, float]:
        if load is None:
            raise OSError("unknown")
        return load, 0.0, 0.0

    monkeypatch.setattr(module, "_busy_seconds", lambda: None)
    monkeypatch.setattr(module, "usable_cores", lambda: 8)
    monkeypatch.setattr(module.os, "getloadavg", loads)
    assert used_by_others() == others


def test_busy_seconds_are_those_of_the_own_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """User, nice, system, idle, waiting, interrupts, soft interrupts, stolen; guests are in the first two already."""
    import cordillera.kernels.threads as module

    text = (
        "cpu 9 9 9 9 9 9 9 9 9 9\ncpu0 1 2 3 1000 2000 4 5 6 7 8\ncpu1 9 9 9 9 9 9 9 9 9 9\ncpu2 10 0 0 0 0 0 0 0 5 5\n"
    )
    monkeypatch.setattr(module.Path, "read_text", lambda self, encoding: text)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: {0, 2}, raising=False)
    monkeypatch.setattr(module.os, "sysconf", lambda name: 100)
    assert module._busy_seconds() == pytest.approx((21 + 10) / 100)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: {7}, raising=False)
    assert module._busy_seconds() is None
