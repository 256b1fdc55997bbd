"""Metrics are exact, do not depend on how data is cut, and never turn what is undefined into a number."""

from __future__ import annotations

import io
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from cordillera.errors import CheckpointError, DataError, TrainingError
from cordillera.training.ranking import exact_sum
from cordillera.training.ranking.exact_sum import ExactSum
from cordillera.training.ranking.metrics import (
    ProgressiveMetrics,
    RankingMetrics,
    binary_entropy,
    cross_entropy,
    sigmoid,
)

ROW = st.tuples(
    st.floats(-40, 40, width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0]),
    st.booleans(),
    st.floats(0, 10) | st.just(1.0),
    st.integers(0, 3),
)


def metrics_of(rows: list[tuple[float, bool, float, int]], **options: Any) -> RankingMetrics:
    metrics = RankingMetrics(**options)
    if rows:
        columns = [np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)]
        metrics.update(columns[0], columns[1], columns[2], columns[3].astype(np.int64))
    return metrics


def same(a: dict[str, float], b: dict[str, float]) -> bool:
    return a.keys() == b.keys() and all(a[key] == b[key] or (math.isnan(a[key]) and math.isnan(b[key])) for key in a)


@st.composite
def cut_rows(draw: st.DrawFn) -> tuple[list[Any], list[list[Any]]]:
    rows = draw(st.lists(ROW, max_size=40))
    shards: list[list[Any]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for row in draw(st.permutations(rows)):
        shards[draw(st.integers(0, len(shards) - 1))].append(row)
    return rows, shards


@given(cut_rows())
@settings(max_examples=120)
def test_merging_any_shards_in_any_order_gives_the_bits_of_the_union(cut: tuple[list[Any], list[list[Any]]]) -> None:
    rows, shards = cut
    whole, merged = metrics_of(rows), RankingMetrics()
    for shard in shards:
        merged.merge(metrics_of(shard))
    assert same(whole.compute(), merged.compute())
    assert whole.undefined() == merged.undefined()


@given(st.lists(ROW, min_size=1, max_size=40), st.integers(1, 7))
@settings(max_examples=60)
def test_batches_do_not_matter_and_neither_does_compaction(rows: list[Any], size: int) -> None:
    whole, parts = metrics_of(rows), RankingMetrics()
    for start in range(0, len(rows), size):
        parts.merge(metrics_of(rows[start : start + size]))
        parts.compute()
    assert same(whole.compute(), parts.compute())


def test_a_ratio_beyond_the_largest_float_is_infinite() -> None:
    result = metrics_of([(0.0, False, 1.0, 0), (0.0, True, 5e-324, 0)]).compute()
    assert result["calibration"] == result["ne"] == math.inf
    total = ExactSum()
    total.add(np.full(3, 1e308))
    assert total.value() == math.inf
    total.add(np.full(6, -1e308))
    assert total.value() == -math.inf


@pytest.mark.parametrize("signs", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
def test_zeros_of_either_sign_are_one_score(signs: tuple[int, int]) -> None:
    metrics = RankingMetrics()
    metrics.update(np.array([math.copysign(0.0, sign) for sign in signs]), np.array([0, 1]))
    assert metrics.compute()["auc"] == 0.5


def test_what_remains_of_a_difference_is_kept_whatever_its_bit() -> None:
    for bit in range(53):
        total = ExactSum()
        total.add(np.array([1 + 2.0**-bit, -1.0]))
        assert total.value() == 2.0**-bit


def test_vector_lengths_do_not_change_a_bit() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=1003) * 3
    labels = random.integers(0, 2, 1003)
    whole, single = RankingMetrics(), RankingMetrics()
    whole.update(logits, labels)
    for start, stop in [(0, 1), (1, 8), (8, 500), (500, 1003)]:
        single.update(logits[start:stop], labels[start:stop])
    assert same(whole.compute(), single.compute())


@given(st.lists(st.tuples(st.integers(-4, 4), st.booleans(), st.integers(1, 5)), min_size=2, max_size=30))
@settings(max_examples=100)
def test_auc_is_the_share_of_pairs_won_with_ties_as_half(rows: list[tuple[int, bool, int]]) -> None:
    wins = pairs = Fraction(0)
    for x, positive, w in rows:
        for other, other_positive, v in rows:
            if positive and not other_positive:
                pairs += w * v
                wins += w * v * (1 if x > other else Fraction(1, 2) if x == other else 0)
    metrics = metrics_of([(x, y, w, 0) for x, y, w in rows])
    auc = metrics.compute()["auc"]
    if pairs:
        assert auc == pytest.approx(float(wins / pairs), abs=1e-14)
    else:
        assert math.isnan(auc)
        assert "auc" in metrics.undefined()


@pytest.mark.parametrize("weighted", [False, True])
def test_agrees_with_scikit_learn(weighted: bool) -> None:
    random = np.random.default_rng(1)
    logits = np.round(random.normal(-1, 1.5, size=5000), 2)
    labels = (random.random(5000) < sigmoid(logits)).astype(float)
    weights = random.random(5000) * 3 if weighted else None
    metrics = RankingMetrics()
    metrics.update(torch.tensor(logits), torch.tensor(labels), None if weights is None else torch.tensor(weights))
    result = metrics.compute()
    assert result["auc"] == pytest.approx(roc_auc_score(labels, logits, sample_weight=weights), abs=1e-12)
    assert result["log_loss"] == pytest.approx(log_loss(labels, sigmoid(logits), sample_weight=weights), rel=1e-12)
    w = np.ones(5000) if weights is None else weights
    rate = (w * labels).sum() / w.sum()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert result["ne"] == pytest.approx(result["log_loss"] / entropy, rel=1e-12)
    assert result["calibration"] == pytest.approx((w * sigmoid(logits)).sum() / (w * labels).sum(), rel=1e-12)
    assert result["examples"] == 5000
    assert result["positives"] == labels.sum()
    assert result["weight"] == pytest.approx(w.sum(), rel=1e-12)


def test_gauc_is_the_weighted_mean_over_groups_with_both_classes() -> None:
    random = np.random.default_rng(2)
    logits, labels = random.normal(size=600), random.integers(0, 2, 600)
    weights, groups = random.random(600), random.integers(0, 150, 600)
    total = mass = excluded = 0.0
    for group in np.unique(groups):
        inside = groups == group
        if labels[inside].min() == labels[inside].max():
            excluded += 1
            continue
        auc = roc_auc_score(labels[inside], logits[inside], sample_weight=weights[inside])
        total += auc * weights[inside].sum()
        mass += weights[inside].sum()
    metrics = RankingMetrics()
    metrics.update(logits, labels, weights, groups)
    result = metrics.compute()
    assert result["gauc"] == pytest.approx(total / mass, abs=1e-12)
    assert result["gauc_excluded_groups"] == excluded > 0
    assert result["gauc_groups"] == np.unique(groups).size - excluded


def test_the_constant_base_rate_has_ne_one_and_calibration_one() -> None:
    metrics = RankingMetrics()
    labels = np.r_[np.ones(30), np.zeros(970)]
    metrics.update(np.full(1000, math.log(0.03 / 0.97)), labels)
    result = metrics.compute()
    assert result["ne"] == pytest.approx(1.0, abs=1e-12)
    assert result["calibration"] == pytest.approx(1.0, abs=1e-12)
    assert result["auc"] == 0.5


def test_an_integer_weight_is_a_repeated_sample() -> None:
    logits, labels, weights = np.array([0.3, -1.0, 2.0, 0.3]), np.array([1, 0, 0, 0]), np.array([2, 1, 3, 2])
    weighted, repeated = RankingMetrics(), RankingMetrics()
    weighted.update(logits, labels, weights)
    repeated.update(np.repeat(logits, weights), np.repeat(labels, weights))
    for key in ("ne", "auc", "log_loss", "calibration", "weight", "base_rate"):
        assert weighted.compute()[key] == pytest.approx(repeated.compute()[key], rel=1e-14)


@pytest.mark.parametrize(("labels", "why"), [([0, 0, 0], "no positive labels"), ([1, 1, 1], "no negative labels")])
def test_one_class_is_undefined_and_never_a_number(labels: list[int], why: str) -> None:
    metrics = RankingMetrics()
    metrics.update(np.array([0.1, 0.2, 0.3]), np.array(labels))
    result, undefined = metrics.compute(), metrics.undefined()
    assert math.isnan(result["ne"])
    assert math.isnan(result["auc"])
    assert undefined["ne"] == undefined["auc"] == why
    assert math.isfinite(result["log_loss"])
    assert math.isnan(result["calibration"]) == (labels[0] == 0)


def test_nothing_is_undefined_and_so_are_zero_weights() -> None:
    empty, weightless = RankingMetrics(), RankingMetrics()
    empty.update(np.empty(0), np.empty(0))
    weightless.update(np.array([1.0, 2.0]), np.array([0, 1]), np.zeros(2))
    for metrics, why in ((empty, "no examples"), (weightless, "all weights are 0")):
        result = metrics.compute()
        for key in ("ne", "auc", "log_loss", "calibration", "gauc", "base_rate"):
            assert math.isnan(result[key])
        assert metrics.undefined()["auc"] == why
    assert weightless.compute()["examples"] == 2


def test_over_confidence_is_not_hidden() -> None:
    metrics = RankingMetrics()
    metrics.update(np.array([800.0, -800.0]), np.array([0, 1]))
    assert metrics.compute()["log_loss"] == 800.0
    right, wrong = RankingMetrics(), RankingMetrics()
    right.update(np.array([np.inf, -np.inf, 0.0]), np.array([1, 0, 1]))
    assert right.compute()["log_loss"] == pytest.approx(math.log(2) / 3)
    wrong.update(np.array([np.inf, 0.0]), np.array([0, 1]))
    result = wrong.compute()
    assert result["log_loss"] == result["ne"] == math.inf
    assert result["auc"] == 0.0
    assert same(RankingMetrics().merge(wrong).compute(), result)


def test_cross_entropy_keeps_precision_at_both_ends() -> None:
    x = np.array([-745.0, -40.0, 40.0, 710.0])
    assert cross_entropy(x, np.ones(4, bool)) == pytest.approx([745.0, 40.0, math.exp(-40), math.exp(-710)], rel=1e-12)
    assert sigmoid(np.array([-700.0]))[0] == pytest.approx(math.exp(-700), rel=1e-12)
    assert binary_entropy(1e-300, 1.0) > 0


def test_nan_logits_are_refused_with_their_count_and_leave_no_trace() -> None:
    metrics = RankingMetrics()
    metrics.update(np.array([0.0, 1.0]), np.array([0, 1]))
    before = metrics.compute()
    with pytest.raises(TrainingError, match=r"2 of 3 logits are NaN, the first at position 1"):
        metrics.update(np.array([0.0, np.nan, np.nan]), np.array([0, 1, 1]))
    assert same(before, metrics.compute())


@pytest.mark.parametrize(
    ("labels", "weights", "message"),
    [
        ([0, 2], None, "position 1 holds 2.0"),
        ([0, math.nan], None, "labels must be 0 or 1"),
        ([0, 1], [1, -1], "weights must be finite"),
        ([0, 1], [math.inf, 1], "weights must be finite"),
        ([0, 1, 1], None, "one length"),
    ],
)
def test_bad_labels_weights_and_shapes_are_refused(labels: Any, weights: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        RankingMetrics().update(np.zeros(2), np.array(labels), None if weights is None else np.array(weights))


def test_groups_come_always_or_never() -> None:
    metrics = RankingMetrics()
    metrics.update(np.zeros(2), np.array([0, 1]), groups=np.array([1, 2]))
    with pytest.raises(DataError, match="every batch or with none"):
        metrics.update(np.zeros(2), np.array([0, 1]))
    other = RankingMetrics()
    other.update(np.zeros(2), np.array([0, 1]))
    with pytest.raises(DataError, match="cannot merge"):
        metrics.merge(other)


@given(st.integers(0, 1000), st.sampled_from([4, 64, 4096]))
@settings(max_examples=25)
def test_binned_auc_is_within_the_error_that_it_states(seed: int, bins: int) -> None:
    random = np.random.default_rng(seed)
    logits, labels = random.normal(size=200) * 8, random.integers(0, 2, 200)
    labels[:2] = 0, 1
    exact, binned = RankingMetrics(), RankingMetrics(auc_bins=bins)
    exact.update(logits, labels)
    binned.update(logits[:70], labels[:70])
    rest = RankingMetrics(auc_bins=bins)
    rest.update(logits[70:], labels[70:])
    binned.merge(rest)
    result = binned.compute()
    assert abs(result["auc"] - exact.compute()["auc"]) <= result["auc_error"] + 1e-12
    assert result["ne"] == exact.compute()["ne"]


@pytest.mark.parametrize("options", [{}, {"auc_bins": 128}])
def test_state_survives_a_checkpoint_without_pickle(options: dict[str, int]) -> None:
    random = np.random.default_rng(3)
    metrics = RankingMetrics(**options)
    metrics.update(random.normal(size=50), random.integers(0, 2, 50), random.random(50), random.integers(0, 5, 50))
    file = io.BytesIO()
    torch.save(metrics.state_dict(), file)
    file.seek(0)
    restored = RankingMetrics(**options)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert same(restored.compute(), metrics.compute())
    more = random.normal(size=9), random.integers(0, 2, 9), random.random(9), random.integers(0, 5, 9)
    restored.update(*more)
    metrics.update(*more)
    assert same(restored.compute(), metrics.compute())
    with pytest.raises(CheckpointError, match="auc_bins"):
        RankingMetrics(auc_bins=7).load_state_dict(metrics.state_dict())
    with pytest.raises(CheckpointError, match="not complete"):
        restored.load_state_dict({"auc_bins": options.get("auc_bins", 0)})


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300), max_size=30))
@settings(max_examples=150)
def test_sums_are_exact(values: list[float]) -> None:
    total = ExactSum()
    total.add(np.array(values))
    assert total.value() == math.fsum(values)
    assert ExactSum.from_state(total.state()).value() == total.value()


def test_sums_name_infinities_and_refuse_nan() -> None:
    total = ExactSum()
    total.add(np.array([1.0, math.inf]))
    assert total.value() == math.inf
    total.add(np.array([-math.inf]))
    assert math.isnan(total.value())
    with pytest.raises(ValueError, match="NaN"):
        total.add(np.array([math.nan]))


def test_bfloat16_logits_and_boolean_labels_are_read() -> None:
    metrics = RankingMetrics()
    metrics.update(torch.tensor([0.5, -0.5], dtype=torch.bfloat16), torch.tensor([True, False]))
    assert metrics.compute()["auc"] == 1.0


def test_progressive_windows_are_the_metrics_of_their_samples() -> None:
    random = np.random.default_rng(4)
    logits, labels = random.normal(size=(1050, 2)), random.integers(0, 2, (1050, 2))
    progressive = ProgressiveMetrics(["a", "b"], window=100, auc_bins=None)
    done = []
    for start in range(0, 1050, 70):
        done += progressive.update(logits[start : start + 70], labels[start : start + 70])
        if start == 490:
            state = progressive.state_dict()
            progressive = ProgressiveMetrics(["a", "b"], window=100, auc_bins=None)
            progressive.load_state_dict(state)
    assert [(entry["begin"], entry["end"]) for entry in done] == [(100 * i, 100 * i + 100) for i in range(10)]
    assert progressive.windows == done
    for entry in done:
        part = RankingMetrics()
        part.update(logits[entry["begin"] : entry["end"], 1], labels[entry["begin"] : entry["end"], 1])
        assert same(entry["tasks"]["b"], part.compute())
    whole = RankingMetrics()
    whole.update(logits[:, 0], labels[:, 0])
    assert same(progressive.compute()["a"], whole.compute())


def test_progressive_metrics_refuse_other_tasks_and_shapes() -> None:
    progressive = ProgressiveMetrics(["a"], window=10)
    with pytest.raises(DataError, match=r"\[B, 1\]"):
        progressive.update(np.zeros((3, 2)), np.zeros((3, 2)))
    with pytest.raises(CheckpointError, match="window 20"):
        progressive.load_state_dict(ProgressiveMetrics(["a"], window=20).state_dict())


@pytest.mark.parametrize("bins", [2, 64])
def test_binned_auc_is_the_exact_auc_of_scores_that_share_their_bins(bins: int) -> None:
    random = np.random.default_rng(6)
    logits = np.r_[random.normal(size=400) * 12, -16.0, 16.0, 0.0, -50.0, 50.0]
    labels, weights = random.integers(0, 2, logits.size), random.integers(1, 4, logits.size)
    place = np.searchsorted(np.linspace(-16, 16, bins + 1)[1:-1], logits, side="right")
    binned, exact = RankingMetrics(auc_bins=bins), RankingMetrics()
    binned.update(logits, labels, weights)
    exact.update(place.astype(float), labels, weights)
    result = binned.compute()
    assert result["auc"] == pytest.approx(exact.compute()["auc"], rel=1e-12)
    positives, negatives = (np.bincount(place, weights * (labels == side), minlength=bins) for side in (1, 0))
    ties = (positives * negatives).sum() / (positives.sum() * negatives.sum())
    assert result["auc_error"] == pytest.approx(ties / 2, rel=1e-12)
    with pytest.raises(ValueError, match="at least 2"):
        RankingMetrics(auc_bins=1)


def test_sums_of_parts_and_of_states_keep_infinities() -> None:
    def of(*values: float) -> ExactSum:
        total = ExactSum()
        total.add(np.array(values))
        return ExactSum.from_state(total.state())

    up, down = of(1.0, math.inf), of(2.0, -math.inf)
    assert (up.value(), down.value()) == (math.inf, -math.inf)
    for parts, value in (((up, of(3.0)), math.inf), ((of(3.0), down), -math.inf), ((up, down), math.nan)):
        total = ExactSum()
        for part in parts:
            total.merge(part)
        assert total.value() == pytest.approx(value, nan_ok=True)
    assert (up.ratio(of(2.0)), down.ratio(of(2.0))) == (math.inf, -math.inf)
    assert of(7.0).ratio(of(3.0, 4.0)) == 1.0
    assert of(1.0).ratio(of(3.0)) == 1 / 3
    assert of(-1e308, -1e308).ratio(of(1e-300)) == -math.inf
    for undefined in (of(1.0).ratio(of(1.0, -1.0)), of(1.0).ratio(up), up.ratio(up)):
        assert math.isnan(undefined)


def test_long_arrays_are_summed_in_chunks_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(7).normal(size=100) * 10.0 ** np.arange(-50, 50)
    monkeypatch.setattr(exact_sum, "_CHUNK", 7)
    total = ExactSum()
    total.add(values.reshape(4, 25))
    assert total.value() == math.fsum(values)


def test_weights_and_groups_of_a_stream_belong_to_their_samples() -> None:
    random = np.random.default_rng(8)
    logits, labels = random.normal(size=(95, 2)), random.integers(0, 2, (95, 2))
    weights, groups = random.random(95), random.integers(0, 4, 95)
    progressive = ProgressiveMetrics(["a", "b"], window=40, auc_bins=None)
    done = []
    for part in (slice(0, 90), slice(90, 95)):
        done += progressive.update(logits[part], labels[part], weights[part], groups[part])
    assert [(entry["begin"], entry["end"]) for entry in done] == [(0, 40), (40, 80)]
    for task, name in enumerate("ab"):
        for begin, end, found in ((40, 80, done[1]["tasks"][name]), (0, 95, progressive.compute()[name])):
            part = RankingMetrics()
            part.update(logits[begin:end, task], labels[begin:end, task], weights[begin:end], groups[begin:end])
            assert same(found, part.compute())
    with pytest.raises(ValueError, match="at least 1"):
        ProgressiveMetrics(["a"], window=0)
