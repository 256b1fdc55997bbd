"""``cordillera bench fault-tolerance`` with few replicas and failures: it runs and writes what the docs quote."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import fault_tolerance
import pytest
from _replica_convergence import is_absent
from _replica_survival import unexplained

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


@pytest.mark.skipif(sys.platform != "linux", reason="faults are injected through /proc")
def test_a_job_survives_its_faults_and_is_trained_again(tmp_path: Path) -> None:
    found = part_of(fault_tolerance, "survival", tmp_path)
    (one,) = found["results"]
    assert sum(one["faults"].values()) == found["faults"] == 5
    assert one["equal"]
    assert one["unexplained"] == []
    assert one["steps"] > 10


def test_an_end_is_explained_by_a_fault_of_its_own_replica_since_its_last_start() -> None:
    kinds = ("fault", "ended", "fault", "ended", "ended")
    replicas = ("r0", "r0", "r1", "r0", "r1")
    events = [
        {"kind": kind, "replica": replica, "what": "kill", "at": float(at)}
        for at, (kind, replica) in enumerate(zip(kinds, replicas, strict=True))
    ]
    assert unexplained(events[::-1]) == [events[3]]


def test_losses_without_a_replica_are_compared(tmp_path: Path) -> None:
    found = part_of(fault_tolerance, "convergence", tmp_path)
    losses = {name: one["losses"] for name, (one,) in found["results"].items()}
    assert losses["constant"] == pytest.approx(losses["fault-free"], abs=1e-5)  # it sees the same text
    assert losses["shrink"] != pytest.approx(losses["fault-free"], abs=1e-3)
    assert found["results"]["fault-free"][0]["difference"] == 0


def test_a_replica_is_absent_in_two_blocks() -> None:
    absent = [is_absent(step, 1000) for step in range(1000)]
    assert sum(absent) == 730
    assert [sum(group) for is_in, group in itertools.groupby(absent) if is_in] == [365, 365]
    assert not absent[0]
    assert not absent[-1]
