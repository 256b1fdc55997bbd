"""Relative changes on the same samples: the estimate is the ratio, the interval covers it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cordillera.errors import DataError
from cordillera.training.ranking.metrics import RankingMetrics
from cordillera.training.ranking.paired_change import ScoredSamples, paired_differences, relative_change


def test_the_estimate_is_the_ratio_of_sums() -> None:
    generator = np.random.default_rng(0)
    reference, weights = generator.exponential(size=500), generator.uniform(0.5, 2, 500)
    losses = reference * generator.normal(1.01, 0.02, 500)
    found = relative_change(losses, reference, weights)
    assert found.mean == pytest.approx((weights * losses).sum() / (weights * reference).sum() - 1)
    assert found.low < found.mean < found.high


@pytest.mark.parametrize("grouped", [False, True])
def test_intervals_cover_the_truth_as_often_as_they_say(grouped: bool) -> None:
    generator, covered = np.random.default_rng(1), 0
    groups = np.repeat(np.arange(100), 5)
    for _ in range(400):
        reference = generator.exponential(size=500)
        shared = generator.normal(0, 0.05, 100)[groups] if grouped else 0.0
        losses = reference + 0.002 + shared + generator.normal(0, 0.02, 500)
        found = relative_change(losses, reference, groups=groups if grouped else None)
        covered += found.low <= 0.002 <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def test_pairs_say_more_than_two_means() -> None:
    generator = np.random.default_rng(2)
    reference = generator.exponential(size=5000)
    found = relative_change(reference + generator.normal(0, 1e-3, 5000), reference)
    assert found.high - found.low < 1e-4 < 2 * reference.std() / math.sqrt(5000)


def test_the_same_losses_change_nothing() -> None:
    losses = np.array([0.1, 0.5, 0.3])
    assert relative_change(losses, losses) == (0.0, 0.0, 0.0)
    assert relative_change(losses[:1], losses[:1]).high == math.inf


def test_what_cannot_be_compared_is_refused() -> None:
    one = np.array([1.0, 2.0])
    with pytest.raises(DataError, match="not finite"):
        relative_change(np.array([1.0, math.nan]), one)
    with pytest.raises(DataError, match="makes no error"):
        relative_change(one, np.zeros(2))
    with pytest.raises(DataError, match="0 losses"):
        relative_change(np.empty(0), np.empty(0))


# Differences of metrics between models on the same samples

Arrays = dict[str, np.ndarray]


def scored(one: Arrays, scores: str) -> ScoredSamples:
    columns = (one[scores][:, None].astype(np.float32), one["labels"][:, None].astype(np.float32))
    return ScoredSamples(("click",), *columns, one.get("weights"), one.get("groups"))


def measured(one: Arrays, scores: str) -> dict[str, float]:
    metrics = RankingMetrics()
    metrics.update(one[scores].astype(np.float32), one["labels"], one.get("weights"))
    return metrics.compute()


def difference(one: Arrays) -> dict[str, float]:
    new, old = (measured(one, scores) for scores in ("new", "old"))
    found = {name: new[name] - old[name] for name in ("auc", "log_loss", "calibration")}
    return {"relative_ne": 100 * (new["ne"] / old["ne"] - 1), **found}


def two_models(generator: np.random.Generator, size: int, *, grouped: bool, weighted: bool) -> Arrays:
    """Samples with scores of two models, of which the new one is better and predicts too much."""
    groups = np.repeat(np.arange(size // 10), 10)
    shared = 1.5 * generator.normal(size=size // 10)[groups] if grouped else 0.0
    truth = generator.normal(-1, 1, size) + shared
    columns = {
        "labels": (generator.random(size) < 1 / (1 + np.exp(-truth))).astype(np.float64),
        "old": truth + generator.normal(0, 1, size) + 0.3 * shared,
        "new": truth + generator.normal(0, 0.7, size) + 0.2,
    }
    columns |= {"weights": generator.choice([0.0, 0.5, 1.0, 4.0], size)} if weighted else {}
    return columns | ({"groups": groups} if grouped else {})


@pytest.mark.parametrize(("grouped", "weighted"), [(False, False), (False, True), (True, True)])
def test_intervals_over_samples_are_those_of_a_bootstrap(grouped: bool, weighted: bool) -> None:
    generator = np.random.default_rng(3)
    one = two_models(generator, 2000, grouped=grouped, weighted=weighted)
    found, unit = paired_differences([(scored(one, "new"), scored(one, "old"))], "click")
    assert unit == ("group" if grouped else "sample")
    drawn: dict[str, list[float]] = {}
    for _ in range(400):
        if grouped:
            rows = (10 * generator.integers(0, 200, 200)[:, None] + np.arange(10)).ravel()
        else:
            rows = generator.integers(0, 2000, 2000)
        for name, value in difference({key: column[rows] for key, column in one.items()}).items():
            drawn.setdefault(name, []).append(value)
    exact = difference(one)
    assert found.keys() == exact.keys()
    for name, interval in found.items():
        assert interval.value == pytest.approx(exact[name], abs=1e-9), name
        low, high = np.quantile(drawn[name], [0.025, 0.975])
        assert interval.high - interval.low == pytest.approx(high - low, rel=0.15), name
        assert (interval.low + interval.high) / 2 == pytest.approx((low + high) / 2, abs=0.15 * (high - low)), name


@pytest.mark.parametrize("grouped", [False, True])
def test_intervals_over_samples_cover_the_truth_as_often_as_they_say(grouped: bool) -> None:
    generator = np.random.default_rng(11)
    truth = difference(two_models(generator, 1_000_000, grouped=grouped, weighted=True))
    covered = dict.fromkeys(truth, 0)
    for _ in range(500):
        one = two_models(generator, 1000, grouped=grouped, weighted=True)
        found, _ = paired_differences([(scored(one, "new"), scored(one, "old"))], "click")
        for name, interval in found.items():
            covered[name] += interval.low <= truth[name] <= interval.high
    for name, count in covered.items():
        assert 0.92 <= count / 500 <= 0.98, name


def test_differences_of_several_seeds_are_their_mean() -> None:
    generator = np.random.default_rng(5)
    one = two_models(generator, 900, grouped=False, weighted=True)
    again = {
        **one,
        "new": one["new"] + generator.normal(0, 0.5, 900),
        "old": one["old"] + generator.normal(0, 0.5, 900),
    }
    found, _ = paired_differences([(scored(two, "new"), scored(two, "old")) for two in (one, again)], "click")
    alone = [paired_differences([(scored(two, "new"), scored(two, "old"))], "click")[0] for two in (one, again)]
    for name, interval in found.items():
        assert interval.value == pytest.approx((alone[0][name].value + alone[1][name].value) / 2)
        widths = [single[name].high - single[name].low for single in alone]
        assert interval.high - interval.low < sum(widths) / 2


def test_samples_without_a_label_of_the_task_do_not_count() -> None:
    one = two_models(np.random.default_rng(6), 600, grouped=False, weighted=False)
    some = {**one, "labels": np.where(np.arange(600) < 100, np.nan, one["labels"])}
    rest = {name: column[100:] for name, column in one.items()}
    found, expected = (
        paired_differences([(scored(two, "new"), scored(two, "old"))], "click")[0] for two in (some, rest)
    )
    assert found == expected


def test_a_model_does_not_differ_from_itself_and_one_class_says_nothing() -> None:
    one = two_models(np.random.default_rng(7), 600, grouped=False, weighted=False)
    found, _ = paired_differences([(scored(one, "old"), scored(one, "old"))], "click")
    assert all((two.value, two.low, two.high) == (0.0, 0.0, 0.0) and not two.excludes_zero for two in found.values())
    none = {**one, "labels": np.zeros(600)}
    assert paired_differences([(scored(none, "new"), scored(none, "old"))], "click") == ({}, "sample")
    with pytest.raises(DataError, match="other labels or weights of 'click'"):
        paired_differences([(scored(one, "new"), scored(none, "old"))], "click")
