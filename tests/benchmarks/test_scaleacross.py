"""``cordillera bench scaleacross`` with few points: every part runs and writes what the docs quote."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = ROOT.parent / "shared" / "data" / "megatron_multi_node_iteration_ms.csv"


def run(part: str, folder: Path) -> dict[str, object]:
    command = [sys.executable, str(ROOT / "benchmarks/scaleacross.py"), "--quick", "--part", part]
    done = subprocess.run(
        [*command, "--results", str(folder)], capture_output=True, text=True, timeout=200, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    content: dict[str, object] = json.loads((folder / f"scaleacross-{part}.json").read_text())
    assert content["quick"] is True
    return content


def test_the_grid_compares_with_production_and_with_each_dimension(tmp_path: Path) -> None:
    points = run("grid", tmp_path)["points"]
    assert isinstance(points, list)
    assert points[0]["times_production"] >= 1
    assert points[0]["times_best_single"] >= 1
    assert set(points[0]["alone"]) == {"placement", "scheduling", "network"}


@pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="OR-tools is not installed")
def test_the_rules_are_compared_with_the_solver(tmp_path: Path) -> None:
    content = run("solver", tmp_path)
    small, summary = content["small"], content["summaries"]["all"]  # type: ignore[index]
    assert isinstance(small, list)
    assert summary["cases"] == len(small) > 0
    for one in small:
        assert one["bound"] <= one["solver"] <= one["tuned"] * (1 + 1e-12)
        assert one["above_solver"] == pytest.approx(one["tuned"] / one["solver"] - 1)
    assert summary["worst_above_solver"] == max(one["above_solver"] for one in small) <= 0.03
    assert summary["equal"] <= summary["proven"] <= summary["cases"]


@pytest.mark.skipif(not MEASURED.exists(), reason=f"{MEASURED.name} (vTrain, MIT) is not here")
@pytest.mark.parametrize("part", ["accuracy", "speed"])
def test_parts_beside_measurements(part: str, tmp_path: Path) -> None:
    content = run(part, tmp_path)
    if part == "accuracy":
        assert content["figures"]["ours"]["error"] < 0.10  # type: ignore[index]
    else:
        assert content["values"]["evaluations_per_s"]["ours"]["median"] > 1000  # type: ignore[index]
