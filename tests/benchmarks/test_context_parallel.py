"""``cordillera bench context_parallel`` with small documents: it runs, is exact, and writes what the docs quote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.processes import needs_gloo

ROOT = Path(__file__).parents[2]


@needs_gloo
@pytest.mark.slow
def test_ways_to_shard_are_compared(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/context_parallel.py"), "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "context_parallel-sharding.json").read_text())
    assert content["quick"] is True
    uneven = content["mixes"]["2 x 1024, 4096, 2 x 1024"]
    assert uneven["imbalance"]["per document, ring"] == pytest.approx(1, abs=0.01)
    assert uneven["imbalance"]["per sequence, ring"] == pytest.approx(1.6, abs=0.01)
    for mix in content["mixes"].values():
        assert mix["error"] < 1e-5
        assert mix["times_per_sequence"]["per sequence, all_gather"]["wall"]["median"] == 1
        for name, timing in mix["timings"].items():
            assert timing["seconds"]["median"] > 0, name
        assert all(rank["per document, ring"]["bytes"] > 0 for rank in mix["traffic"])
