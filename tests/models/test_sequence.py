"""Models that read histories, against each sample alone in float64; shared histories; refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec, RankingBatch, SparseFeature
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.errors import DataError
from cordillera.jagged import JaggedBatch, JaggedTensor, slice_samples
from cordillera.models.flops import count
from cordillera.models.ranking import build
from cordillera.models.ranking.sequence import (
    HSTU,
    HSTUConfig,
    SequenceConfig,
    SequenceModel,
    SharedHistories,
    TargetAttention,
    TargetAttentionConfig,
    share_histories,
)

SGD = TablesConfig(name="sgd", learning_rate=1.0)
SIZES: dict[str, Any] = {
    "embedding_dim": 4,
    "mlp": (8,),
    "heads": 2,
    "head_dim": 3,
    "positions": 5,
    "candidate": "film",
}
CONFIGS = {"target-attention": TargetAttentionConfig, "hstu": HSTUConfig}


def features_of(**changes: str) -> FeatureSpec:
    tables = {"film": "film", "seen": "film", "liked": "film", "user": "user", "tags": "tags"} | changes
    lists = ("seen", "liked", "tags")
    return FeatureSpec(
        dense=("age",),
        sparse=tuple(SparseFeature(name, table, is_list=name in lists) for name, table in tables.items()),
        tables={"film": 30, "user": 9, "tags": 7},
        tasks=("like",),
    )


def model_of(name: str, sequences: tuple[str, ...] = ("seen", "liked"), **changes: Any) -> SequenceModel:
    model = build(CONFIGS[name](**SIZES, sequences=sequences, **changes), features_of(), SGD)
    assert isinstance(model, SequenceModel)
    return model


def batch_of(histories: list[list[int]], seed: int = 0) -> RankingBatch:
    draw, size = torch.Generator().manual_seed(seed), len(histories)

    def one_each(rows: int) -> list[list[int]]:
        return torch.randint(rows, (size, 1), generator=draw).tolist()

    sparse = JaggedBatch.from_features(
        {
            "film": JaggedTensor.from_lists(one_each(30)),
            "seen": JaggedTensor.from_lists(histories),
            "liked": JaggedTensor.from_lists([history[::2] for history in histories]),
            "user": JaggedTensor.from_lists(one_each(9)),
            "tags": JaggedTensor.from_lists([[1, 2]] * size),
        }
    )
    return RankingBatch(torch.randn(size, 1, generator=draw), sparse, torch.ones(size, 1))


def alone(attention: TargetAttention | HSTU, rows: Tensor, candidate: Tensor) -> Tensor:
    """The summary of one history ``[L, d]`` for one candidate ``[d]``, by dense products."""
    positions, heads, dim = attention.positions.weight, attention.heads, attention.head_dim
    ages = torch.arange(len(rows) - 1, -1, -1).clamp(max=len(positions) - 1)
    x = rows + positions[ages]
    if isinstance(attention, TargetAttention):
        if not len(rows):
            return attention.out.bias
        q = attention.query(candidate).view(heads, dim)
        k, v = (layer(x).view(-1, heads, dim) for layer in (attention.key, attention.value))
        shares = (torch.einsum("hd,lhd->hl", q, k) / math.sqrt(dim)).softmax(-1)
        return attention.out(torch.einsum("hl,lhd->hd", shares, v).flatten())
    x = torch.cat([x, candidate[None]])
    for block in attention.blocks:
        u, v, q, k = torch.nn.functional.silu(block.into(block.norm_in(x))).chunk(4, -1)
        q, k, v = (part.view(-1, heads, dim) for part in (q, k, v))
        scores = torch.nn.functional.silu(torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)) / block.divisor
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        seen = (distance >= 0) & (distance < (attention.window or len(x)))
        found = torch.einsum("hqk,khd->qhd", scores * seen, v).flatten(1)
        x = x + block.out(block.norm_out(found) * u)
    return x[-1]


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=9), st.booleans())
def test_neighbours_with_equal_histories_share_one(lists: list[list[int]], weighted: bool) -> None:
    values = JaggedTensor.from_lists(lists)
    weights = (values.values + 1.0) / 2 if weighted else None
    shared = share_histories(JaggedTensor(values.values, values.offsets, weights))
    expected = [one for i, one in enumerate(lists) if not i or one != lists[i - 1]]
    assert JaggedTensor(shared.values, shared.offsets).to_lists() == expected
    assert [expected[g] for g in shared.of_sample.tolist()] == lists
    assert weights is None or (shared.weights is not None and shared.weights.equal((shared.values + 1.0) / 2))


def test_histories_that_differ_in_weights_alone_are_not_shared() -> None:
    shared = share_histories(JaggedTensor(torch.tensor([4, 4]), torch.tensor([0, 1, 2]), torch.tensor([1.0, 2.0])))
    assert shared.of_sample.tolist() == [0, 1]


@settings(max_examples=30)
@given(
    st.sampled_from([("target-attention", None), ("hstu", None), ("hstu", 2), ("hstu", 1)]),
    st.lists(st.lists(st.integers(0, 3), max_size=7), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_summaries_are_those_of_each_sample_alone(
    kind: tuple[str, int | None], lists: list[list[int]], seed: int
) -> None:
    torch.manual_seed(seed)
    name, window = kind
    if name == "hstu":
        attention: TargetAttention | HSTU = HSTU(HSTUConfig(**SIZES, window=window))
    else:
        attention = TargetAttention(SequenceConfig(**SIZES))
    attention.double()
    torch.nn.init.normal_(attention.positions.weight)
    table, candidates = torch.randn(4, 4, dtype=torch.float64), torch.randn(len(lists), 4, dtype=torch.float64)
    table.requires_grad_()
    shared = share_histories(JaggedTensor.from_lists(lists))
    found = attention(table[shared.values], shared, candidates)
    expected = torch.stack([alone(attention, table[torch.tensor(one, dtype=torch.int64)], candidate)
                            for one, candidate in zip(lists, candidates, strict=True)])  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    inputs = [table, *attention.parameters()]
    gradients = [torch.autograd.grad(x.sin().sum(), inputs, allow_unused=True) for x in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(
            zero if ours is None else ours + 0 * ours, torch.zeros_like(ours) if theirs is None and ours is not None
            else zero if theirs is None else theirs, rtol=1e-9, atol=1e-10,
        )  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_scores_and_learns_as_its_samples_do(name: str) -> None:
    model = model_of(name)
    batch = batch_of([[1, 2, 3], [1, 2, 3], [], [4], [5, 6, 7, 8, 9, 10]])
    together = model(batch)
    single = []
    for i in range(5):
        part = RankingBatch(batch.dense[i : i + 1], slice_samples(batch.sparse, i, i + 1), None)
        single.append(model(part))
    torch.testing.assert_close(torch.cat(single), together, rtol=1e-5, atol=1e-6)
    model.tables.discard()
    before = model.tables.weight.detach().clone()
    changes = []
    for logits in (model(batch).sum(), None):
        if logits is None:
            for i in range(5):
                part = RankingBatch(batch.dense[i : i + 1], slice_samples(batch.sparse, i, i + 1), None)
                model(part).sum().backward()
                model.tables.reduce_pending()
            assert model.tables.num_pending == 5
        else:
            logits.backward()
        model.tables.update()
        changes.append(model.tables.weight.detach() - before)
        model.tables.weight.detach().copy_(before)
    assert float(changes[0].abs().max()) > 1e-3
    torch.testing.assert_close(changes[0], changes[1], rtol=1e-4, atol=1e-6)


def test_gradients_of_the_tables_are_those_of_an_index() -> None:
    features = features_of()
    tables = EmbeddingTables(features, 4, SGD)
    ids, gradient = torch.tensor([3, 3, 29, 0]), torch.randn(4, 4)
    before = tables.weight.detach().clone()
    (tables.unpooled("seen", ids) * gradient).sum().backward()
    tables.update()
    expected = before.clone()
    expected.index_add_(0, ids, -gradient)
    torch.testing.assert_close(tables.weight.detach(), expected)
    with pytest.raises(DataError, match="does not lie in table 'film'"):
        tables.unpooled("seen", torch.tensor([30]))
    with pytest.raises(DataError, match="no sparse feature"):
        tables.unpooled("films", ids)


def test_candidates_of_one_request_share_what_is_read() -> None:
    model = model_of("hstu")
    read: list[int] = []
    unpooled = model.tables.unpooled

    def counting(feature: str, ids: Tensor) -> Tensor:
        read.append(ids.numel())
        return unpooled(feature, ids)

    model.tables.unpooled = counting  # type: ignore[method-assign]
    model(batch_of([[1, 2, 3, 4]] * 50))
    assert read == [4, 2]


@pytest.mark.parametrize(
    ("changes", "features", "message"),
    [
        ({"sequences": ("films",)}, {}, "model.sequences: no sparse feature 'films'"),
        ({"sequences": ("user",)}, {}, "'user' has one value in each sample"),
        ({"sequences": ("seen",), "candidate": "films"}, {}, "model.candidate: no sparse feature 'films'"),
        ({"sequences": ("liked",), "candidate": "seen"}, {}, "'seen' has a list in each sample"),
        ({"sequences": ("tags",)}, {}, "'tags' has not the table of 'film'"),
        ({"sequences": ("seen", "seen")}, {}, "stands twice"),
    ],
)
def test_features_that_do_not_fit_are_refused(changes: dict[str, Any], features: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(TargetAttentionConfig(**{**SIZES, **changes}), features_of(**features), SGD)


@pytest.mark.parametrize("tables", [{"rows": "int8"}, {"cache": 0.5}, {"dynamic": {}}])
def test_tables_that_sum_bags_are_refused_at_once(tables: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"reads rows of histories[\s\S]*rows = 'fp32'"):
        build(HSTUConfig(**SIZES, sequences=("seen",)), features_of(), TablesConfig(name="sgd", **tables))


def test_products_of_attention_are_counted() -> None:
    batch = batch_of([[1, 2, 3, 4], [5, 6]])
    short = batch_of([[1, 2], [5, 6]])
    macs = [count(model_of("target-attention", ("seen",)), one).forward_macs for one in (batch, short)]
    # a row more for each of two samples: keys and values, d * width each, and width for the score and for the value
    assert macs[0] - macs[1] == 2 * 4 * 6 + 2 * 6


def test_nobody_has_a_history() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    shared = SharedHistories(none, torch.tensor([0, 0]), torch.zeros(3, dtype=torch.int64), None)
    for attention in (TargetAttention(SequenceConfig(**SIZES)), HSTU(HSTUConfig(**SIZES))):
        found = attention(torch.zeros(0, 4), shared, torch.randn(3, 4))
        assert found.shape == (3, 4)
        assert bool(found.isfinite().all())
