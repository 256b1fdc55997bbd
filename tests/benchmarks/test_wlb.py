"""``cordillera bench wlb``: counted work is that of brute force, and every part runs and writes what the docs quote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import wlb
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.distributed.context.shard_plan import per_document, per_sequence
from tests.benchmarks.programs import part_of
from tests.distributed.processes import needs_gloo

ROOT = Path(__file__).parents[2]
LENGTHS = Path(
    os.environ.get("CORDILLERA_WLB_LENGTHS") or ROOT.parent / "shared" / "data" / "wlb_document_lengths.json"
)

documents = st.lists(st.integers(1, 40), max_size=8)
context_ranks = st.integers(1, 5)


def mask(lengths: list[int]) -> np.ndarray:
    """Which token attends to which: ``[T, T]``."""
    of = np.repeat(np.arange(len(lengths)), lengths)
    return np.tril(of[:, None] == of[None])


@given(lengths=documents, ranks=context_ranks)
@settings(max_examples=80)
def test_pairs_per_sequence_are_those_of_the_mask(lengths: list[int], ranks: int) -> None:
    rows = np.array_split(mask(lengths).sum(axis=1, dtype=np.int64), 2 * ranks)
    plan = per_sequence(lengths, ranks)
    assert plan.tokens == tuple(len(rows[rank]) + len(rows[-1 - rank]) for rank in range(ranks))
    assert plan.work.tolist() == [rows[rank].sum() + rows[-1 - rank].sum() for rank in range(ranks)]


@given(lengths=documents, ranks=context_ranks)
@settings(max_examples=80)
def test_pairs_per_document_are_those_of_the_mask(lengths: list[int], ranks: int) -> None:
    rows, chunks = mask(lengths).sum(axis=1, dtype=np.int64), 2 * ranks
    tokens, pairs, cursor, start = [0] * ranks, [0] * ranks, 0, 0
    for length in lengths:
        longer = {(cursor + i) % chunks for i in range(length % chunks)}
        cursor = (cursor + length) % chunks
        for chunk in range(chunks):
            end = start + length // chunks + (chunk in longer)
            rank = min(chunk, chunks - 1 - chunk)
            tokens[rank] += end - start
            pairs[rank] += int(rows[start:end].sum())
            start = end
    plan = per_document(lengths, ranks)
    assert (plan.tokens, plan.work.tolist()) == (tuple(tokens), pairs)


@given(lengths=documents, ranks=context_ranks)
@settings(max_examples=80)
def test_documents_are_shared_out_equally(lengths: list[int], ranks: int) -> None:
    found = per_document(lengths, ranks)
    assert sum(found.tokens) == sum(lengths)
    assert found.work.sum() == sum(d * (d + 1) // 2 for d in lengths)
    assert max(found.tokens) - min(found.tokens) <= 1
    assert found.work.max() - found.work.min() <= 2 * (sum(lengths) + len(lengths))


@pytest.mark.slow
@pytest.mark.skipif(not LENGTHS.exists(), reason=f"{LENGTHS.name} (DistCA, Apache-2.0) is not here")
def test_packing_by_work_is_beside_its_baselines(tmp_path: Path) -> None:
    rows = part_of(wlb, "packing", tmp_path)["rows"]
    ours = rows["2 queues, 1.5 contexts"]
    for name in ("arrival order", "fixed length, window 1", "two queues, no variable length"):
        assert ours["imbalance"] < rows[name]["imbalance"]
    assert len({row["tokens"] for row in rows.values()}) == 1


@pytest.mark.slow
@pytest.mark.skipif(not LENGTHS.exists(), reason=f"{LENGTHS.name} (DistCA, Apache-2.0) is not here")
def test_a_pipeline_is_simulated_with_both_shardings(tmp_path: Path) -> None:
    content = part_of(wlb, "pipeline", tmp_path)
    for row in content["rows"].values():
        assert 1 <= row["times_perfect_balance"]["per document"] <= row["times_perfect_balance"]["per sequence"]
    for base in content["gains"]["2 queues, 1.5 contexts"].values():
        assert base["both"] > base["packing"]


@pytest.mark.slow
def test_absent_lengths_are_left_out_by_name(tmp_path: Path) -> None:
    environment = {**os.environ, "CORDILLERA_WLB_LENGTHS": str(tmp_path / "absent.json")}
    command = [sys.executable, str(ROOT / "benchmarks/wlb.py"), "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert "absent.json" in "".join(done.stdout.split())
    assert not list(tmp_path.iterdir())


@needs_gloo
@pytest.mark.slow
@pytest.mark.skipif(not LENGTHS.exists(), reason=f"{LENGTHS.name} (DistCA, Apache-2.0) is not here")
def test_a_pipeline_is_executed_beside_its_simulation(tmp_path: Path) -> None:
    found = part_of(wlb, "executed", tmp_path)
    assert set(found["gains"]) == {"fixed length, window 1", "arrival order"}
    for name, seconds in found["seconds"].items():
        assert seconds["median"] > 0
        assert found["simulated_seconds"][name] > 0
        assert found["work_seconds"][name] > 0
