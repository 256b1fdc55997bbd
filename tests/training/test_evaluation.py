"""Evaluations say what the data supports: intervals that cover, refusals that name rows, JSON that comes back equal."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from cordillera.data.ranking.features import RankingBatch
from cordillera.errors import DataError, TrainingError
from cordillera.intervals import wilson_interval
from cordillera.training.ranking.evaluation import Evaluation, calibration_table, evaluate, score_histogram
from cordillera.training.ranking.metric_intervals import auc_influence, metric_intervals
from cordillera.training.ranking.metrics import RankingMetrics, sigmoid
from tests.training.sample_runs import batches, click_data, make_evaluation, no_sparse


def identity(batch: RankingBatch) -> torch.Tensor:
    return batch.dense


def compute(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float]:
    metrics = RankingMetrics()
    metrics.update(logits, labels, weights)
    return metrics.compute()


def test_metrics_are_those_of_the_whole_split_however_it_is_batched() -> None:
    logits, labels = click_data(0, 900, 2)
    a = evaluate(identity, batches(logits, labels, 100), ["x", "y"])
    b = evaluate(identity, batches(logits, labels, 333), ["x", "y"])
    assert a.tasks == b.tasks
    assert a.metrics()["y"]["auc"] == compute(logits[:, 1], labels[:, 1])["auc"]
    assert a.examples == 900
    assert a.examples_per_second == pytest.approx(900 / a.seconds)


def test_an_evaluation_survives_json_with_what_is_undefined() -> None:
    logits, labels = click_data(0, 60, 2)
    labels[:, 1] = 0
    result = evaluate(
        identity,
        batches(logits, labels, groups=np.arange(60) // 3),
        ["x", "dead"],
        segments={"colour": (np.arange(60) % 2, ["red", "blue"])},
    )
    text = result.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = Evaluation.from_json(text)
    assert back.to_json() == text
    assert math.isnan(back.tasks["dead"].metrics["auc"])
    assert back.tasks["dead"].undefined["ne"] == "no positive labels"
    assert back.tasks["x"] == result.tasks["x"]
    with pytest.raises(DataError, match="not an evaluation"):
        Evaluation.from_json("{}")
    with pytest.raises(DataError, match="not JSON"):
        Evaluation.from_json("nonsense")


def test_logits_that_are_not_finite_are_refused_with_count_task_and_rows() -> None:
    logits, labels = click_data(0, 100, 2)
    logits[[7, 50], 1] = np.nan
    logits[60, 1] = np.inf
    with pytest.raises(TrainingError, match=r"3 of 200 logits .*3 of task 'y' \(rows 7, 50, 60\)"):
        evaluate(identity, batches(logits, labels, 32), ["x", "y"])


def test_unlabelled_batches_and_wrong_shapes_are_refused() -> None:
    logits, labels = click_data(0, 10, 1)
    bare = [RankingBatch(dense=torch.from_numpy(logits), sparse=no_sparse())]
    with pytest.raises(DataError, match="no labels"):
        evaluate(identity, bare, ["x"])
    with pytest.raises(DataError, match=r"\[10, 2\]"):
        evaluate(identity, batches(logits, labels), ["x", "y"])


def test_an_empty_loader_gives_undefined_metrics() -> None:
    result = evaluate(identity, [], ["x"])
    assert result.examples == 0
    assert math.isnan(result.metrics()["x"]["ne"])
    assert math.isnan(result.examples_per_second)
    assert result.tasks["x"].undefined["auc"] == "no examples"
    assert Evaluation.from_json(result.to_json()).to_json() == result.to_json()


def test_segments_partition_the_split_and_follow_rows() -> None:
    logits, labels = click_data(1, 500, 1)
    codes = np.random.default_rng(0).integers(0, 3, 500)
    shuffled = np.random.default_rng(1).permutation(500)
    data = [
        RankingBatch(
            dense=torch.from_numpy(logits[part]),
            sparse=no_sparse(),
            labels=torch.from_numpy(labels[part]),
            rows=torch.from_numpy(part),
        )
        for part in np.split(shuffled, 5)
    ]
    result = evaluate(identity, data, ["x"], segments={"f": (codes, ["a", "b", "c"])}, small_segment=20)
    assert sum(segment.examples for segment in result.segments["f"].values()) == 500
    inside = codes == 1
    assert result.segments["f"]["b"].tasks["x"]["ne"] == compute(logits[inside, 0], labels[inside, 0])["ne"]
    by_function = evaluate(
        identity, data, ["x"], segments=lambda b: {"f": ["abc"[c] for c in codes[b.rows]]}, small_segment=20
    )
    assert by_function.segments["f"] == result.segments["f"]


def test_small_segments_are_marked_and_rare_ones_joined() -> None:
    logits, labels = click_data(1, 400, 1)
    codes = np.r_[np.zeros(300, int), np.arange(1, 101)]
    result = evaluate(
        identity,
        batches(logits, labels),
        ["x"],
        segments={"f": (codes, [f"v{i}" for i in range(101)])},
        most_segments=5,
    )
    values = result.segments["f"]
    assert next(iter(values)) == "v0"
    assert values["(96 others)"].examples == 96
    assert not values["v0"].small
    assert values["v1"].small


@pytest.mark.parametrize(
    ("column", "names", "message"),
    [(np.zeros(3, int), ["a"], "describes 3 rows"), (np.full(10, 4), ["a"], "codes 4 to 4")],
)
def test_segments_that_do_not_fit_are_refused(column: Any, names: list[str], message: str) -> None:
    logits, labels = click_data(0, 10, 1)
    with pytest.raises(DataError, match=message):
        evaluate(identity, batches(logits, labels), ["x"], segments={"f": (column, names)})


def test_calibration_bins_share_the_weight_and_keep_equal_scores_together() -> None:
    random = np.random.default_rng(0)
    logits, weights = random.normal(size=2000), random.random(2000) + 0.5
    positive = random.random(2000) < sigmoid(logits)
    table = calibration_table(logits, positive, weights, 10)
    assert len(table) == 10
    assert sum(entry.weight for entry in table) == pytest.approx(weights.sum())
    assert max(entry.weight for entry in table) < 1.1 * weights.sum() / 10
    assert [entry.prediction for entry in table] == sorted(entry.prediction for entry in table)
    assert sum(entry.low <= entry.prediction <= entry.high for entry in table) >= 8
    tied = calibration_table(np.repeat([0.0, 1.0], 500), np.tile([True, False], 500), np.ones(1000), 10)
    assert [entry.count for entry in tied] == [500, 500]


def test_histograms_hold_every_sample_once() -> None:
    logits = np.array([-2.0, 0.0, 3.0, 3.0])
    histogram = score_histogram(logits, np.array([False, True, True, False]), np.array([1.0, 2.0, 3.0, 4.0]), 5)
    assert histogram is not None
    assert sum(histogram.negative) == 5
    assert sum(histogram.positive) == 5
    assert len(histogram.edges) == 6
    constant = score_histogram(np.zeros(4), np.array([True, False] * 2), np.ones(4), 4)
    assert constant is not None
    assert sum(constant.negative) + sum(constant.positive) == 4


def test_wilson_interval_agrees_with_scipy() -> None:
    for positives, count in ((0, 10), (3, 10), (10, 10), (50, 1000)):
        expected = stats.binomtest(positives, count).proportion_ci(method="wilson")
        assert wilson_interval(positives / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert all(math.isnan(end) for end in wilson_interval(math.nan, 0))


def test_auc_influence_is_delongs_components() -> None:
    random = np.random.default_rng(0)
    scores, positive = np.round(random.normal(size=60), 1), random.random(60) < 0.4
    auc, influence = auc_influence(scores, positive, np.ones(60))
    wins = (scores[positive][:, None] > scores[~positive]) + 0.5 * (scores[positive][:, None] == scores[~positive])
    m, n = wins.shape
    assert auc == pytest.approx(wins.mean())
    variance = wins.mean(1).var(ddof=1) / m + wins.mean(0).var(ddof=1) / n
    mine = m / (m - 1) * (influence[positive] ** 2).sum() + n / (n - 1) * (influence[~positive] ** 2).sum()
    assert mine == pytest.approx(variance, rel=1e-12)


@pytest.mark.parametrize("clustered", [False, True])
def test_intervals_agree_with_a_bootstrap_over_the_same_units(clustered: bool) -> None:
    random = np.random.default_rng(5)
    size, users = 1200, 120
    groups = random.integers(0, users, size)
    taste = random.normal(size=users)[groups]
    logits = random.normal(-0.5, 1.2, size)
    positive = random.random(size) < sigmoid(logits + 0.8 * taste)
    weights = random.random(size) + 0.5
    found = metric_intervals(logits, positive, weights, groups if clustered else None)
    draws: dict[str, list[float]] = {name: [] for name in ("ne", "auc", "log_loss", "calibration")}
    for _ in range(300):
        times = random.multinomial(users, np.full(users, 1 / users))[groups] if clustered else None
        times = random.multinomial(size, np.full(size, 1 / size)) if times is None else times
        values = compute(logits, positive, weights * times)
        for name, sample in draws.items():
            sample.append(values[name])
    for name, sample in draws.items():
        low, high = found[name]
        assert (high - low) / 2 / 1.96 == pytest.approx(np.std(sample), rel=0.16), name


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(6)
    truth = stats.norm.cdf(1 / math.sqrt(2))
    hits = 0
    for _ in range(300):
        positive = random.random(200) < 0.3
        low, high = metric_intervals(random.normal(size=200) + positive, positive, np.ones(200))["auc"]
        hits += low <= truth <= high
    assert 0.91 <= hits / 300 <= 0.99


def test_no_interval_where_the_variance_cannot_be_known() -> None:
    logits = np.array([-1.0, 0.0, 1.0, 2.0])
    assert metric_intervals(logits, np.array([False, False, False, True]), np.ones(4)) == {}
    assert "auc" not in metric_intervals(logits, np.array([False, False, True, True]), np.ones(4))


def test_gauc_has_an_interval_over_groups() -> None:
    result = make_evaluation(users=200)
    low, high = result.tasks["click"].intervals["gauc"]
    assert low < result.tasks["click"].metrics["gauc"] < high
    assert result.unit == "group"
    assert make_evaluation(users=5, examples=500).unit == "sample"
