"""``cordillera bench context_parallel`` with small documents: it runs, is exact, and writes what the docs quote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import needs_gloo

ROOT = Path(__file__).parents[2]


def run_quickly(part: str, folder: Path) -> dict[str, Any]:
    """The result file of one part."""
    command = [sys.executable, str(ROOT / "benchmarks/context_parallel.py"), "--part", part, "--quick"]
    done = subprocess.run(
        [*command, "--results", str(folder)], capture_output=True, text=True, timeout=300, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads((folder / f"context_parallel-{part}.json").read_text())
    assert content["quick"] is True
    return content


@needs_gloo
@pytest.mark.slow
def test_ways_to_shard_are_compared(tmp_path: Path) -> None:
    content = run_quickly("sharding", tmp_path)
    uneven = content["mixes"]["2 x 1024, 4096, 2 x 1024"]
    assert uneven["imbalance"]["per document, ring"] == pytest.approx(1, abs=0.01)
    assert uneven["imbalance"]["per sequence, ring"] == pytest.approx(1.6, abs=0.01)
    for mix in content["mixes"].values():
        assert mix["error"] < 1e-5
        assert mix["times_per_sequence"]["per sequence, all_gather"]["wall"]["median"] == 1
        for name, timing in mix["timings"].items():
            assert timing["seconds"]["median"] > 0, name
        assert all(rank["per document, ring"]["bytes"] > 0 for rank in mix["traffic"])


@needs_gloo
@pytest.mark.slow
def test_conversations_are_compared_with_one_process(tmp_path: Path) -> None:
    content = run_quickly("sessions", tmp_path)
    runs = content["runs"]
    assert {(run["ranks"], run["transport"]) for run in runs} == {
        (ranks, transport) for ranks in (1, 2, 3, 4) for transport in ("pass_kv", "pass_q", "auto")
    }
    for run in runs:
        assert run["tokens_identical"], run
        assert run["largest_logit_difference"] < 1e-4
        assert run["largest_kv_difference"] <= 1
        assert run["bytes_as_formulas"]
        assert (run["attention_bytes"] > 0) == (run["ranks"] > 1)
