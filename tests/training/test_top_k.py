"""NDCG, recall and MRR of groups are those of the definition, averaged over all orders of tied samples."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from cordillera.errors import DataError
from cordillera.training.ranking.groups.top_k import TOP_K, rank_groups
from cordillera.training.ranking.metric_intervals import metric_intervals
from cordillera.training.ranking.metrics import ProgressiveMetrics, RankingMetrics, of_task

# few scores, so that most samples are tied
SAMPLE = st.tuples(st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 0.25, math.inf]), st.booleans(), st.integers(0, 2))


def of_order(labels: list[bool], k: int) -> tuple[float, float, float]:
    """NDCG, recall and reciprocal rank of labels in one order, by their definitions."""
    first = labels[:k]
    dcg = sum(1 / math.log2(rank + 1) for rank, label in enumerate(first, 1) if label)
    best = sum(1 / math.log2(rank + 1) for rank in range(1, min(k, sum(labels)) + 1))
    return dcg / best, sum(first) / sum(labels), 1 / (first.index(True) + 1) if True in first else 0.0


def by_permutations(scores: list[float], labels: list[bool], k: int) -> list[float]:
    """The mean of the metrics over all orders of one group that go down by score."""
    orders = [
        order
        for order in itertools.permutations(range(len(scores)))
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]
    found = [of_order([labels[i] for i in order], k) for order in orders]
    return [math.fsum(column) / len(orders) for column in zip(*found, strict=True)]


def metrics_of(scores: object, labels: object, groups: object, k: int, weights: object = None) -> RankingMetrics:
    metrics = RankingMetrics(ranking_k=k)
    metrics.update(
        np.asarray(scores, np.float64),
        np.asarray(labels, np.float64),
        None if weights is None else np.asarray(weights, np.float64),
        np.asarray(groups, np.int64),
    )
    return metrics


@given(st.lists(SAMPLE, min_size=1, max_size=14), st.integers(1, 8))
@settings(max_examples=150)
def test_metrics_are_means_over_all_orders_of_tied_samples(rows: list[tuple[float, bool, int]], k: int) -> None:
    expected, excluded = [], 0
    members = [[row for row in rows if row[2] == group][:6] for group in range(3)]
    for own in filter(None, members):
        if any(label for _, label, _ in own):
            expected.append(by_permutations([row[0] for row in own], [row[1] for row in own], k))
        else:
            excluded += 1
    kept = [row for own in members for row in own]
    metrics = metrics_of(*zip(*kept, strict=True), k)
    result = metrics.compute()
    assert (result["ranking_k"], result["ranking_groups"], result["ranking_excluded_groups"]) == (
        k, len(expected), excluded,
    )  # fmt: skip
    for place, name in enumerate(TOP_K):
        if expected:
            assert result[name] == pytest.approx(sum(one[place] for one in expected) / len(expected), abs=1e-12)
        else:
            assert math.isnan(result[name])
            assert metrics.undefined()[name] == "no group with a positive label"


@pytest.mark.parametrize("k", [1, 3, 10, 1000])
def test_ndcg_is_that_of_scikit_learn(k: int) -> None:
    random = np.random.default_rng(k)
    groups = random.integers(0, 60, 1500)
    scores, labels = np.round(random.normal(size=1500), 1), random.integers(0, 4, 1500) == 0
    each = [
        ndcg_score([labels[groups == one]], [scores[groups == one]], k=k)
        for one in range(60)
        if labels[groups == one].any()
    ]
    assert metrics_of(scores, labels, groups, k).compute()["ndcg"] == pytest.approx(np.mean(each), abs=1e-12)


@pytest.mark.parametrize("k", [1, 7, 40, 100, 10_000])
def test_one_large_tie_has_the_values_of_its_closed_forms(k: int) -> None:
    """Of n tied samples with one positive, all ranks are equally likely; with all positive, the first is."""
    n, top = 100, min(k, 100)
    result = metrics_of(np.zeros(n), np.arange(n) == 17, np.zeros(n), k).compute()
    assert result["recall"] == pytest.approx(top / n, rel=1e-13)
    assert result["mrr"] == pytest.approx(sum(1 / rank for rank in range(1, top + 1)) / n, rel=1e-13)
    assert result["ndcg"] == pytest.approx(sum(1 / math.log2(rank + 1) for rank in range(1, top + 1)) / n, rel=1e-13)
    result = metrics_of(np.zeros(n), np.ones(n), np.zeros(n), k).compute()
    assert (result["ndcg"], result["mrr"], result["recall"]) == (1.0, 1.0, pytest.approx(top / n, rel=1e-13))


def test_reciprocal_ranks_in_large_ties_are_those_of_the_hypergeometric_distribution() -> None:
    n, p, above, k = 3000, 40, 5, 200
    scores = np.r_[np.ones(above), np.zeros(n)]
    labels = np.r_[np.zeros(above), np.ones(p), np.zeros(n - p)]
    expected = sum(math.comb(n - place, p - 1) / math.comb(n, p) / (above + place) for place in range(1, k - above + 1))
    assert metrics_of(scores, labels, np.zeros(above + n), k).compute()["mrr"] == pytest.approx(expected, rel=1e-12)


@given(st.lists(SAMPLE, min_size=1, max_size=40), st.randoms(use_true_random=False), st.integers(1, 5))
@settings(max_examples=60)
def test_order_and_division_of_rows_do_not_change_a_bit(rows: list[tuple[float, bool, int]], random, k: int) -> None:  # type: ignore[no-untyped-def]
    whole = metrics_of(*zip(*rows, strict=True), k).compute()
    random.shuffle(rows)
    cut = random.randint(0, len(rows))
    parts = [metrics_of(*zip(*part, strict=True), k) for part in (rows[:cut], rows[cut:]) if part]
    merged = parts[0] if len(parts) == 1 else parts[0].merge(parts[1])
    assert {name: repr(value) for name, value in merged.compute().items()} == {
        name: repr(value) for name, value in whole.items()
    }


def test_weights_leave_ranks_alone_but_samples_of_weight_zero_are_left_out() -> None:
    random = np.random.default_rng(0)
    scores, labels, groups = np.round(random.normal(size=300), 1), random.random(300) < 0.3, random.integers(0, 20, 300)
    weights = random.integers(0, 4, 300) * 0.7
    kept = weights > 0
    weighted = metrics_of(scores, labels, groups, 4, weights).compute()
    plain = metrics_of(scores[kept], labels[kept], groups[kept], 4).compute()
    for name in (*TOP_K, "ranking_groups", "ranking_excluded_groups"):
        assert weighted[name] == plain[name]
    assert weighted["gauc"] != plain["gauc"]


def test_samples_without_a_label_are_left_out() -> None:
    logits = torch.tensor([[3.0], [2.0], [1.0], [0.5]])
    labels = torch.tensor([[math.nan], [0.0], [1.0], [math.nan]])
    metrics = RankingMetrics(ranking_k=2)
    metrics.update(*of_task(0, logits, labels, None, torch.zeros(4, dtype=torch.int64)))
    assert metrics.compute()["mrr"] == 0.5  # the first sample, which has no label, does not take the first rank


def test_metrics_of_groups_are_there_only_with_groups_and_exact_scores() -> None:
    ungrouped, binned = RankingMetrics(), RankingMetrics(auc_bins=8)
    ungrouped.update(np.arange(4.0), np.array([0, 1, 0, 1]))
    binned.update(np.arange(4.0), np.array([0, 1, 0, 1]), groups=np.zeros(4, np.int64))
    for metrics in (ungrouped, binned, RankingMetrics()):
        assert not {*TOP_K, "ranking_k"} & metrics.compute().keys()
        assert not set(TOP_K) & metrics.undefined().keys()


def test_windows_of_a_stream_take_the_number_of_samples_that_count() -> None:
    stream = ProgressiveMetrics(["click"], window=4, ranking_k=1)
    groups = np.zeros(8, np.int64)
    windows = stream.update(np.arange(8.0)[:, None], np.array([0, 0, 1, 0, 0, 0, 0, 1])[:, None], groups=groups)
    assert [one["tasks"]["click"]["recall"] for one in windows] == [0.0, 1.0]


def test_a_number_below_one_and_metrics_of_two_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="ranking_k"):
        RankingMetrics(ranking_k=0)
    with pytest.raises(ValueError, match="ranking_k 2 and 3"):
        RankingMetrics(ranking_k=2).merge(RankingMetrics(ranking_k=3))
    with pytest.raises(DataError, match="groups"):
        metrics_of([0.0], [1], [0, 1], 1)


def test_nothing_has_no_groups() -> None:
    empty, counts = np.empty(0), np.empty(0, np.int64)
    assert rank_groups(counts, empty, counts, counts, 3).ndcg.size == 0


def test_intervals_are_those_of_a_mean_over_groups() -> None:
    """The spread of the mean over groups that are drawn anew agrees with the interval's width."""
    random = np.random.default_rng(4)
    groups = np.repeat(np.arange(400), 12)
    labels = random.random(groups.size) < 0.25
    scores = random.normal(size=groups.size) + labels
    found = metric_intervals(scores, labels, np.ones(groups.size), groups, 0.95, 3)
    order = np.lexsort((scores, groups))
    ranked = rank_groups(groups[order], scores[order], labels[order] * 1, ~labels[order] * 1, 3)
    for name in TOP_K:
        values = getattr(ranked, name)
        means = values[random.integers(0, values.size, (2000, values.size))].mean(1)
        low, high = found[name]
        assert low < values.mean() < high
        assert (high - low) / (2 * 1.96) == pytest.approx(means.std(), rel=0.1)
    few = groups < 19
    assert not set(TOP_K) & metric_intervals(scores[few], labels[few], np.ones(few.sum()), groups[few]).keys()
