"""The benchmark of threads beside other processes runs and writes what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import threads

from cordillera.kernels.threads import usable_cores

from .programs import run

pytestmark = pytest.mark.slow


def test_threads_are_measured_beside_two_processes(tmp_path: Path) -> None:
    output = run(threads, tmp_path, "--workload", "int8")
    content = json.loads((tmp_path / "threads-neighbours.json").read_text())
    assert [(row["workload"], row["neighbours"]) for row in content["rows"]] == [("int8", 2)]
    for row in content["rows"]:
        assert 1 <= row["threads"] <= usable_cores()
        assert row["times_best"]["median"] > 0
    assert "2 processes" in output
