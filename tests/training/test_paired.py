"""Relative changes on the same samples: the estimate is the ratio, the interval covers it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cordillera.errors import DataError
from cordillera.training.ranking.paired_change import relative_change


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
