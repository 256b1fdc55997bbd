"""``cordillera bench context_parallel`` with small documents: it runs, is exact, and writes what the docs quote."""

from __future__ import annotations

from pathlib import Path

import context_parallel
import pytest

from tests.benchmarks.programs import part_of
from tests.distributed.processes import needs_gloo

pytestmark = pytest.mark.slow


@needs_gloo
def test_ways_to_shard_are_compared(tmp_path: Path) -> None:
    content = part_of(context_parallel, "sharding", tmp_path)
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
def test_conversations_are_compared_with_one_process(tmp_path: Path) -> None:
    content = part_of(context_parallel, "sessions", tmp_path)
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
