"""Plans of documents over ranks: nothing lost, tokens and work level, choices as predicted."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.distributed.context.latency import AnalyticLatency
from cordillera.distributed.context.shard_plan import (
    SHARDINGS,
    DocumentChunk,
    ShardPlan,
    adaptive,
    contiguous,
    per_document,
    per_sequence,
)
from cordillera.errors import PlanError

LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 400)), max_size=12)
RANKS = st.integers(1, 9)
MIXED = [1024, *[64] * 16]


@pytest.mark.parametrize("mode", SHARDINGS)
@given(lengths=LENGTHS, ranks=RANKS)
@settings(max_examples=80)
def test_sharding_and_restoring_is_the_identity(mode: str, lengths: list[int], ranks: int) -> None:
    plan = SHARDINGS[mode](lengths, ranks)
    assert plan.size == ranks
    tokens = np.arange(sum(lengths)) * 7
    parts = [tokens[plan.indices(rank)] for rank in range(ranks)]
    assert tuple(map(len, parts)) == plan.tokens
    assert np.array_equal(np.concatenate(parts)[plan.restore], tokens)
    # positions and documents travel with the tokens
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.zeros(0, np.int64), *map(np.arange, lengths)])
    for rank in range(ranks):
        assert np.array_equal(plan.positions(rank), position[plan.indices(rank)])
        assert np.array_equal(plan.documents(rank), document[plan.indices(rank)])
        assert plan.work[rank] == (plan.positions(rank) + 1).sum()
        own = [np.arange(chunk.start, chunk.stop) for chunk in plan.ranks[rank]]
        assert np.array_equal(plan.positions(rank), np.concatenate([np.zeros(0, np.int64), *own]))
    assert ShardPlan.from_json(plan.to_json()) == plan
    assert SHARDINGS[mode](lengths, ranks) == plan


@given(lengths=LENGTHS, ranks=RANKS, whole_below=st.sampled_from([0, 20, 200]))
def test_ranks_hold_equal_numbers_of_tokens(lengths: list[int], ranks: int, whole_below: int) -> None:
    plans = [contiguous(lengths, ranks), per_sequence(lengths, ranks), per_document(lengths, ranks, whole_below)]
    for plan in plans:
        spread = max(plan.tokens) - min(plan.tokens)
        assert spread <= 1
        assert spread == 0 or sum(lengths) % (2 * ranks)


@given(lengths=LENGTHS, ranks=RANKS)
def test_ranks_have_equal_work_when_every_document_is_cut(lengths: list[int], ranks: int) -> None:
    plan = per_document(lengths, ranks)
    assert plan.work.max() - plan.work.min() <= 2 * (sum(lengths) + len(lengths))
    assert plan.work.sum() == sum(length * (length + 1) // 2 for length in lengths)
    if all(length % (2 * ranks) == 0 for length in lengths):
        assert plan.work.max() == plan.work.min()


def test_work_is_level_where_torch_leaves_it_uneven() -> None:
    """One long document and many short ones over four ranks, in pairs per rank."""
    assert per_document(MIXED, 4).imbalance == 1.0
    assert per_sequence(MIXED, 4).imbalance == pytest.approx(1.70, abs=0.01)
    try:
        from torch.distributed.tensor.experimental._context_parallel import _load_balancer
    except ImportError:
        pytest.skip("this torch has no such balancer")
    balancer = getattr(_load_balancer, "_PerDocumentHeadTailLoadBalancer", None)
    if balancer is None:
        pytest.skip("this torch has no such balancer")
    order = balancer([MIXED], 4, "cpu")._generate_indices()[0]
    position = torch.cat([torch.arange(length) for length in MIXED])[order]
    pairs = [int((own + 1).sum()) for own in position.chunk(4)]  # its sharder gives ranks consecutive parts
    assert max(pairs) * 4 / sum(pairs) == pytest.approx(1.88, abs=0.01)


class Model:
    """A latency with a fixed part, which makes short chunks dear."""

    def __init__(self, call: float) -> None:
        self.call = call

    def __call__(self, queries: np.ndarray, keys: np.ndarray) -> float:
        return float((queries * keys).sum() + self.call * len(queries))


@given(lengths=LENGTHS, ranks=RANKS, call=st.sampled_from([0.0, 100.0, 1e5]))
def test_the_adaptive_choice_is_no_slower_than_either(lengths: list[int], ranks: int, call: float) -> None:
    latency = Model(call)
    chosen = adaptive(lengths, ranks, latency).predicted(latency)
    assert chosen <= min(plan(lengths, ranks).predicted(latency) for plan in (per_sequence, per_document))


def test_the_adaptive_choice_follows_the_prediction() -> None:
    uneven, short = [1024, 1024, 4096, 1024, 1024], [256] * 32
    free = AnalyticLatency(tile=1)
    assert adaptive(uneven, 2, free).mode == "per_document"
    assert adaptive(short, 2, AnalyticLatency(tile=128)).mode == "per_sequence"
    # long documents are cut and short ones are not, which is better than either alone
    mixed = [4096, *[32] * 64]
    chosen = adaptive(mixed, 4)
    assert "together" in chosen.mode
    latency = AnalyticLatency()
    assert chosen.predicted(latency) < 0.95 * min(
        plan(mixed, 4).predicted(latency) for plan in (per_sequence, per_document)
    )


def test_whole_tiles_are_counted() -> None:
    assert AnalyticLatency(128)(np.array([100, 130]), np.array([100, 500])) == 128 * 50.5 + 256 * 435.5
    assert AnalyticLatency(1, seconds_per_call=3)(np.array([4]), np.array([4])) == 13


@pytest.mark.parametrize("mode", SHARDINGS)
@pytest.mark.parametrize(("lengths", "ranks", "said"), [([3, -1], 2, "document 1 has -1"), ([3], 0, "0 ranks")])
def test_impossible_documents_are_refused(mode: str, lengths: list[int], ranks: int, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        SHARDINGS[mode](lengths, ranks)


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([[(0, 0, 2)], [(0, 3, 4)]], "begin at token 2"),
        ([[(0, 0, 3)], [(0, 2, 4)]], "begin at token 3"),
        ([[(0, 0, 3)], []], "4 tokens, chunks hold 3"),
        ([[(0, 0, 4)], [(1, 0, 1)]], "1 documents"),
        ([[(0, 0, 0)], [(0, 0, 4)]], "empty"),
        ([[(0, 0, 4.0)], []], "not an integer"),
        ([[(0, 4)], []], "is not one"),
    ],
)
def test_plans_that_lose_or_repeat_tokens_are_refused(chunks: list[list[tuple[int, ...]]], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        ShardPlan.from_json(json.dumps({"mode": "made", "lengths": [4], "ranks": chunks}))


def test_texts_that_are_no_plan_are_refused() -> None:
    many = json.dumps({"mode": "made", "lengths": [2**62], "ranks": [[[0, 0, 2**62]]]})
    for text in ("", "[" * 100_000, "3", "[]", "{}", '{"mode": 1, "lengths": [NaN], "ranks": []}', many):
        with pytest.raises(PlanError, match="shard plan"):
            ShardPlan.from_json(text)


def test_a_plan_prints_what_each_rank_holds() -> None:
    plan = per_document([8, 3], 2)
    assert plan.ranks == (
        (DocumentChunk(0, 0, 2), DocumentChunk(0, 6, 8), DocumentChunk(1, 0, 1)),
        (DocumentChunk(0, 2, 6), DocumentChunk(1, 1, 3)),
    )
    lines = str(plan).splitlines()
    assert lines[0].startswith("per_document: 2 documents over 2 ranks, imbalance 1.")
    assert lines[2] == "  rank 1: 6 tokens, 23 pairs  0[2:6] 1[1:3]"
