"""``cordillera bench multibalance`` with few steps: every part runs and writes what the docs quote."""

from __future__ import annotations

from pathlib import Path

import multibalance
import pytest

from tests.benchmarks.programs import part_of

pytestmark = pytest.mark.slow


def test_losses_are_scaled(tmp_path: Path) -> None:
    found = part_of(multibalance, "scales", tmp_path)
    assert {(one["method"], one["factor"]) for one in found["results"]} == {
        (method, factor)
        for method in ("plain sum", "balanced, equal", "balanced, min-norm")
        for factor in multibalance.FACTORS[1:]
    }
    assert all(len(values) == 1 for one in found["results"] for values in one["auc_changes"].values())


def test_methods_are_compared_on_two_data_sets(tmp_path: Path) -> None:
    found = part_of(multibalance, "methods", tmp_path)
    ours = [one for one in found["results"] if "balanced" in one["method"] or one["method"] == multibalance.ALONE]
    assert len(ours) == 8
    assert {len(one["ne"]) for one in ours} == {3}
    assert [one["worst_percent"] for one in ours if one["method"] == multibalance.ALONE] == [0.0, 0.0]


def test_steps_are_timed(tmp_path: Path) -> None:
    found = part_of(multibalance, "speed", tmp_path)
    assert {"plain sum", "balanced, equal", "balanced, min-norm"} <= {one["method"] for one in found["results"]}
    assert all(one["over plain"]["median"] > 0 for one in found["results"])
