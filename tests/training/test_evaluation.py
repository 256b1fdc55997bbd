"""Evaluations say what the data supports: intervals that cover, refusals that name rows, JSON that comes back equal."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats
from sklearn.metrics import roc_auc_score

from cordillera.data.ranking.features import RankingBatch
from cordillera.errors import DataError, TrainingError
from cordillera.intervals import wilson_interval
from cordillera.training.ranking.evaluation import Evaluation, calibration_table, evaluate, number, score_histogram
from cordillera.training.ranking.metric_intervals import auc_influence, interval_unit, metric_intervals
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


def test_speed_is_measured_after_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = click_data(0, 900, 2)
    clock, delays = [0.0], iter([1.0, 0.25, 0.25])

    def late(batch: RankingBatch) -> torch.Tensor:
        clock[0] += next(delays)
        return identity(batch)

    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: clock[0])
        found = evaluate(late, batches(logits, labels, 300), ["x", "y"])
    assert found.seconds == 1.5
    assert found.examples_per_second == 1200
    assert math.isnan(evaluate(identity, batches(logits, labels, 900), ["x", "y"]).examples_per_second)


def test_samples_without_a_label_count_for_other_tasks_alone() -> None:
    logits, labels = click_data(0, 900, 2)
    some = labels.astype(np.float32)
    some[::3, 1] = np.nan
    found = evaluate(identity, batches(logits, some, 100), ["x", "y"], segments={"s": (np.arange(900) % 2, ["a", "b"])})
    whole = evaluate(identity, batches(logits, labels, 100), ["x", "y"])
    known = np.arange(900) % 3 > 0
    assert found.tasks["x"] == whole.tasks["x"]
    assert found.metrics()["y"] == compute(logits[known, 1], labels[known, 1])


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


def half_width(interval: tuple[float, float], value: float, *, share: bool) -> float:
    """Half the width of an interval on its own scale, in units of the metric."""
    low, high = interval
    if share:
        assert special.logit(low) + special.logit(high) == pytest.approx(2 * special.logit(value), abs=1e-9)
        return float(special.logit(high) - special.logit(low)) / 2 * value * (1 - value)
    assert low * high == pytest.approx(value**2, rel=1e-9)
    return math.log(high / low) / 2 * value


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_intervals_over_equal_groups_are_students_of_the_groups_own_values(level: float) -> None:
    """With groups of one size, log loss and GAUC are plain means over groups."""
    random = np.random.default_rng(7)
    users, each = 23, 30
    groups = np.repeat(np.arange(users), each)
    logits = random.normal(-0.5, 1.2, users * each)
    positive = random.random(users * each) < sigmoid(logits + np.repeat(random.normal(size=users), each))
    found = metric_intervals(logits, positive, np.full(users * each, 2.0), groups * 7 - 3, level)
    losses = np.where(positive, np.log1p(np.exp(-logits)), np.log1p(np.exp(logits))).reshape(users, each).mean(axis=1)
    aucs = np.array([roc_auc_score(positive[groups == user], logits[groups == user]) for user in range(users)])
    quantile = stats.t.ppf((1 + level) / 2, users - 1)
    for name, values, share in (("log_loss", losses, False), ("gauc", aucs, True)):
        error = values.std(ddof=1) / math.sqrt(users)
        assert half_width(found[name], values.mean(), share=share) == pytest.approx(quantile * error, rel=1e-9)


def test_intervals_over_samples_are_those_of_a_mean_of_a_ratio_and_of_delong() -> None:
    random = np.random.default_rng(8)
    size = 60
    logits = np.round(random.normal(size=size), 1)
    positive = random.random(size) < sigmoid(logits)
    found = metric_intervals(logits, positive, np.ones(size), level=0.9)
    quantile = stats.norm.ppf(0.95)
    losses = np.where(positive, np.log1p(np.exp(-logits)), np.log1p(np.exp(logits)))
    error = losses.std(ddof=1) / math.sqrt(size)
    assert half_width(found["log_loss"], losses.mean(), share=False) == pytest.approx(quantile * error, rel=1e-9)
    # The delta method of a ratio of means: the variance of p - ratio * y over the squared mean of y.
    ratio = sigmoid(logits).sum() / positive.sum()
    error = (sigmoid(logits) - ratio * positive).std(ddof=1) / math.sqrt(size) / positive.mean()
    assert half_width(found["calibration"], ratio, share=False) == pytest.approx(quantile * error, rel=1e-9)
    # NE is L / H(r) of two means; its gradient is taken numerically.
    rate = positive.mean()
    step = 1e-6
    slope = (stats.bernoulli.entropy(rate + step) - stats.bernoulli.entropy(rate - step)) / (2 * step)
    entropy = float(stats.bernoulli.entropy(rate))
    ne = losses.mean() / entropy
    error = (losses - ne * slope * positive).std(ddof=1) / math.sqrt(size) / entropy
    assert half_width(found["ne"], ne, share=False) == pytest.approx(quantile * error, rel=1e-6)
    wins = (logits[positive][:, None] > logits[~positive]) + 0.5 * (logits[positive][:, None] == logits[~positive])
    error = math.sqrt(wins.mean(1).var(ddof=1) / len(wins) + wins.mean(0).var(ddof=1) / wins.shape[1])
    assert half_width(found["auc"], wins.mean(), share=True) == pytest.approx(quantile * error, rel=1e-9)


def test_samples_without_weight_change_no_interval() -> None:
    random = np.random.default_rng(9)
    logits, positive, groups = random.normal(size=300), random.random(300) < 0.4, random.integers(0, 30, 300)
    weights = np.where(random.random(300) < 0.2, 0.0, random.random(300) + 0.5)
    keep = weights > 0
    assert metric_intervals(logits, positive, weights, groups) == metric_intervals(
        logits[keep], positive[keep], weights[keep], groups[keep]
    )


def test_twenty_groups_with_both_classes_are_needed_for_an_interval_over_groups() -> None:
    random = np.random.default_rng(10)
    for users, unit in ((19, "sample"), (20, "group")):
        groups = np.repeat(np.arange(users), 10)
        logits, positive = random.normal(size=groups.size), np.tile([True, False] * 5, users)
        found = metric_intervals(logits, positive, np.ones(groups.size), groups)
        assert interval_unit(groups) == unit
        assert ("gauc" in found) == (unit == "group")
        if unit == "sample":
            assert found == metric_intervals(logits, positive, np.ones(groups.size))
        else:
            positive[groups == 3] = True  # one group less that has an AUC
            assert "gauc" not in metric_intervals(logits, positive, np.ones(groups.size), groups)
    assert interval_unit(None) == "sample"


@pytest.mark.parametrize("ones", [2, 4])
def test_two_samples_of_either_class_have_intervals(ones: int) -> None:
    logits, positive = np.array([0.1, 0.5, 0.2, 0.4, 0.3, 0.6]), np.arange(6) < ones
    assert set(metric_intervals(logits, positive, np.ones(6))) == {"ne", "auc", "log_loss", "calibration"}


def test_a_level_is_that_of_the_intervals_and_segments() -> None:
    logits, labels = click_data(2, 200, 1)
    columns = {"f": (np.arange(200) % 2, ["a", "b"])}
    result = evaluate(identity, batches(logits, labels, 64), ["x"], segments=columns, level=0.5)
    assert result.level == 0.5
    x, y = logits[:, 0].astype(float), labels[:, 0] == 1
    assert result.tasks["x"].intervals == metric_intervals(x, y, np.ones(200), level=0.5)
    assert result.segments["f"]["b"].intervals["x"] == metric_intervals(x[1::2], y[1::2], np.ones(100), level=0.5)


def test_segments_of_weighted_samples_in_groups_are_those_of_their_samples_alone() -> None:
    random = np.random.default_rng(12)
    logits, labels = click_data(3, 240, 2)
    codes, groups = random.integers(0, 3, 240), random.integers(0, 40, 240)
    data = batches(logits, labels, 50, groups=groups)
    result = evaluate(identity, data, ["x", "y"], segments={"f": (codes, ["same", "same", "other"])}, small_segment=17)
    assert set(result.segments["f"]) <= {"same", "other", "same [0]", "same [1]"}
    for name, segment in result.segments["f"].items():
        (code,) = {
            code
            for code in range(3)
            if (codes == code).sum() == segment.examples and name[:4] == ["same", "same", "othe"][code]
        }
        inside = codes == code
        alone = evaluate(identity, batches(logits[inside], labels[inside], groups=groups[inside]), ["x", "y"])
        assert segment.tasks == alone.metrics()
        assert segment.intervals == {task: alone.tasks[task].intervals for task in ("x", "y")}
        fewest = min(min(labels[inside, t].sum(), (1 - labels[inside, t]).sum()) for t in range(2))
        assert segment.small == (fewest < 17)


def test_a_segment_is_small_below_the_number_and_a_single_rest_is_listed_by_name() -> None:
    logits = np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
    labels = (np.arange(20) % 2 == 0).astype(np.float32)[:, None]
    for small, expected in ((5, False), (6, True)):
        result = evaluate(
            identity,
            batches(logits, labels),
            ["x"],
            segments={"f": (np.arange(20) // 10, ["a", "b"])},
            small_segment=small,
            most_segments=1,
        )
        assert {name: segment.small for name, segment in result.segments["f"].items()} == {"a": expected, "b": expected}


def test_calibration_bins_are_those_of_a_loop_over_scores() -> None:
    random = np.random.default_rng(13)
    logits, weights = np.round(random.normal(size=300), 1), random.random(300) * (random.random(300) < 0.9)
    positive = random.random(300) < 0.4
    bins: dict[int, list[int]] = {}
    below, total = 0.0, weights.sum()
    for score in np.unique(logits[weights > 0]):
        members = np.flatnonzero((logits == score) & (weights > 0))
        mass = weights[members].sum()
        bins.setdefault(int((below + mass / 2) / total * 8), []).extend(members)
        below += mass
    table = calibration_table(logits, positive, weights, 8)
    assert len(table) == len(bins)
    for entry, (_, members) in zip(table, sorted(bins.items()), strict=True):
        w = weights[members]
        assert entry.count == len(members)
        assert entry.weight == pytest.approx(w.sum())
        assert entry.prediction == pytest.approx(np.average(special.expit(logits[members]), weights=w))
        assert entry.rate == pytest.approx(np.average(positive[members], weights=w))
        effective = w.sum() ** 2 / (w**2).sum()  # Kish 1965
        assert (entry.low, entry.high) == pytest.approx(wilson_interval(entry.rate, effective))
    assert calibration_table(logits, positive, np.zeros(300)) == []


def test_histograms_have_bins_of_equal_width_around_equal_scores_too() -> None:
    logits = np.array([-2.0, 0.0, 3.0, 2.9])
    histogram = score_histogram(logits, np.array([False, True, True, False]), np.array([1.0, 2.0, 3.0, 4.0]), 5)
    assert histogram is not None
    assert histogram.edges == pytest.approx([-2, -1, 0, 1, 2, 3])
    assert (histogram.negative, histogram.positive) == ([1, 0, 0, 0, 4], [0, 0, 2, 0, 3])
    equal = score_histogram(np.full(3, 7.0), np.array([True, False, True]), np.ones(3), 4)
    assert equal is not None
    assert equal.edges == pytest.approx([6.5, 6.75, 7, 7.25, 7.5])
    assert score_histogram(np.empty(0), np.empty(0, bool), np.empty(0)) is None


@pytest.mark.parametrize(
    ("value", "read"),
    [(None, math.nan), ("Infinity", math.inf), ("-Infinity", -math.inf), (3, 3.0), (-1e300, -1e300), (0.5, 0.5)],
)
def test_numbers_come_back_from_json(value: Any, read: float) -> None:
    assert number(value) == pytest.approx(read, nan_ok=True, rel=0)


@pytest.mark.parametrize("value", [True, "3", [1], 2e300, -2e300, 10**400])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match="is no number"):
        number(value)


def test_damaged_evaluations_are_refused() -> None:
    content = json.loads(make_evaluation(users=5, examples=60).to_json())
    assert content["tasks"]["click"]["histogram"]["edges"]
    for path, value in (
        (("examples",), -1),
        (("examples",), 2**63),
        (("examples",), True),
        (("split",), 3),
        (("tasks", "click", "histogram", "edges"), [0.0]),
        (("tasks", "click", "histogram", "negative"), [0.0]),
        (("tasks", "click", "histogram", "positive"), [0.0]),
    ):
        damaged = json.loads(json.dumps(content))
        place = damaged
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(DataError, match="is not an evaluation"):
            Evaluation.from_object(damaged, "here")
    one = content | {"examples": 2**63 - 1, "step": 0}
    one["tasks"]["click"]["histogram"] = {"edges": [0.0, 1.0], "negative": [3.0], "positive": [0.0]}
    back = Evaluation.from_object(one, "here")
    assert (back.examples, back.step) == (2**63 - 1, 0)
    assert back.tasks["click"].histogram is not None


def test_at_most_five_rows_of_logits_that_are_not_finite_are_listed() -> None:
    logits, labels = click_data(0, 40, 1)
    for count, rows in ((5, r"rows 0, 1, 2, 3, 4\)"), (6, r"rows 0, 1, 2, 3, 4, \.\.\.\)")):
        logits[:count] = np.nan
        with pytest.raises(TrainingError, match=rows):
            evaluate(identity, batches(logits, labels, 8), ["x"])


def test_a_clock_that_stands_still_gives_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cordillera.training.ranking.evaluation.time.perf_counter", lambda: 5.0)
    logits, labels = click_data(0, 40, 1)
    result = evaluate(identity, batches(logits, labels), ["x"])
    assert result.seconds == 0
    assert math.isnan(result.examples_per_second)


def test_rows_are_counted_through_where_batches_name_none() -> None:
    logits, labels = click_data(0, 40, 1)
    logits[17] = np.inf
    with pytest.raises(TrainingError, match=r"rows 17\)"):
        evaluate(identity, batches(logits, labels, 8), ["x"])
    logits[17] = 0
    codes = np.arange(40) // 10
    result = evaluate(identity, batches(logits, labels, 8), ["x"], segments={"f": (codes, list("abcd"))})
    inside = codes == 2
    assert result.segments["f"]["c"].tasks["x"] == compute(logits[inside, 0], labels[inside, 0])
