"""``cordillera bench scaleacross`` with few points: every part runs and writes what the docs quote."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import scaleacross
from _executed_schedules import families, take_turns

from tests.benchmarks.programs import part_of
from tests.distributed.processes import needs_gloo, run_processes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MEASURED = ROOT.parent / "shared" / "data" / "megatron_multi_node_iteration_ms.csv"


_ENDLESS = """
from functools import partial
from pathlib import Path
from _executed_schedules import families, take_turns
from _processes import run_processes
run_processes(2, Path({folder!r}), partial(take_turns, schedules=families(2)[:1], rounds=10_000), 100)
"""


def test_the_grid_compares_with_production_and_with_each_dimension(tmp_path: Path) -> None:
    points = part_of(scaleacross, "grid", tmp_path)["points"]
    assert isinstance(points, list)
    assert points[0]["times_production"] >= 1
    assert points[0]["times_best_single"] >= 1
    assert set(points[0]["alone"]) == {"placement", "scheduling", "network"}


@pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="OR-tools is not installed")
def test_the_rules_are_compared_with_the_solver(tmp_path: Path) -> None:
    content = part_of(scaleacross, "solver", tmp_path)
    small, summary = content["small"], content["summaries"]["all"]
    assert isinstance(small, list)
    assert summary["cases"] == len(small) > 0
    for one in small:
        assert one["bound"] <= one["solver"] <= one["tuned"] * (1 + 1e-12)
        assert one["above_solver"] == pytest.approx(one["tuned"] / one["solver"] - 1)
    assert summary["worst_above_solver"] == max(one["above_solver"] for one in small) <= 0.03
    assert summary["equal"] <= summary["proven"] <= summary["cases"]


@needs_gloo
def test_schedules_are_executed_beside_their_simulation(tmp_path: Path) -> None:
    content = part_of(scaleacross, "executed", tmp_path)
    assert content["evidence"] == "emulated"
    rows = content["rows"]
    assert {row["processes"] for row in rows} == {2, 4}
    assert len({(row["family"], row["processes"]) for row in rows}) == len(rows)
    for row in rows:
        assert row["executed"]["count"] == len(row["rounds"]) > 0
        assert row["executed"]["median"] == statistics.median(row["rounds"])
        assert row["ratio"] == pytest.approx(row["executed"]["median"] / row["simulated"])
        assert row["ratio"] > 0.98  # a step that sleeps cannot be shorter; how much longer is for a quiet machine
    assert content["off"] == {
        "least": min(row["ratio"] for row in rows) - 1,
        "most": max(row["ratio"] for row in rows) - 1,
    }


@needs_gloo
def test_processes_that_pass_their_deadline_are_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = run_processes(2, tmp_path, partial(take_turns, schedules=families(2)[:1], rounds=10_000), 8)
    assert ended.codes == [None, None]
    assert not multiprocessing.active_children()
    assert time.monotonic() - began < 30


def _runs(process: Path) -> bool:
    """Whether a process of /proc is neither gone nor a zombie that nobody waits for."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists a process's children")
@needs_gloo
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_began_them(tmp_path: Path, how: signal.Signals) -> None:
    program = [sys.executable, "-c", _ENDLESS.format(folder=str(tmp_path))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), *sys.path])}
    children: list[Path] = []
    with subprocess.Popen(program, env=environment, stderr=subprocess.DEVNULL) as parent:
        listed = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        try:
            until = time.monotonic() + 60
            while not (tmp_path / "store").exists():  # both are under way
                assert parent.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            children = [Path("/proc", pid) for pid in listed.read_text().split()]
            assert len(children) >= 2
        finally:
            parent.send_signal(how)
            try:
                parent.wait(30)
            finally:
                parent.kill()
    until = time.monotonic() + 30
    while any(_runs(child) for child in children):
        assert time.monotonic() < until, children
        time.sleep(0.05)


@pytest.mark.skipif(not MEASURED.exists(), reason=f"{MEASURED.name} (vTrain, MIT) is not here")
@pytest.mark.parametrize("part", ["accuracy", "speed"])
def test_parts_beside_measurements(part: str, tmp_path: Path) -> None:
    content = part_of(scaleacross, part, tmp_path)
    if part == "accuracy":
        assert content["figures"]["ours"]["error"] < 0.10
    else:
        assert content["values"]["evaluations_per_s"]["ours"]["median"] > 1000


def test_recommendation_models_are_compared_with_published_rates_and_with_production(tmp_path: Path) -> None:
    content = part_of(scaleacross, "recommenders", tmp_path)
    (row,) = content["published"]
    assert row["off"] == pytest.approx(row["simulated_s"] / row["published_s"] - 1)
    assert content["times_neo"] > 1
    (gain,) = content["gains"]
    assert gain["with_messages"] >= gain["without_messages"] >= 1
