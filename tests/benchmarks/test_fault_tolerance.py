"""``cordillera bench fault-tolerance`` with few replicas and failures: it runs and writes what the docs quote."""

from __future__ import annotations

from pathlib import Path

import fault_tolerance
import pytest

from tests.benchmarks.programs import part_of
from tests.distributed.processes import needs_gloo

pytestmark = [pytest.mark.slow, needs_gloo]


def test_policies_are_simulated(tmp_path: Path) -> None:
    found = part_of(fault_tolerance, "simulated", tmp_path)
    assert {row["policy"] for row in found["studies"]["published"]} == {"restart", "replicas", "decoupled"}
    assert len(found["checkpoints"]) == 4


def test_sums_are_timed_beside_gloo(tmp_path: Path) -> None:
    found = part_of(fault_tolerance, "all-reduce", tmp_path)
    assert [row["mebibytes"] for row in found["rows"]] == [1, 4]
    assert all(row["memory against gloo"]["median"] > 0 for row in found["rows"])
    assert all(peak["memory"] <= found["window_bytes"] for peak in found["peaks"])
    assert {one["transport"] for one in found["ends"]} == {"memory", "sockets"}


def test_jobs_with_pressed_time_are_accounted(tmp_path: Path) -> None:
    found = part_of(fault_tolerance, "emulated", tmp_path)
    assert found["results"].keys() == found["targets"].keys()
    assert all(0 < one["effective"] <= 1 and one["failures"] >= 1 for one in found["results"].values())
