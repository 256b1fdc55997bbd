"""Measures of error: their definitions, and what they make of zeros, NaN and infinities."""

from __future__ import annotations

import json
import math

import pytest
import torch

from cordillera.numerics.dispatch.accuracy import Accuracy


def test_measures_are_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(1000, generator=generator, dtype=torch.float64)
    out = reference * (1 + 0.01 * torch.randn(1000, generator=generator, dtype=torch.float64))
    found = Accuracy.of(out, reference)
    difference = (out - reference).abs()
    floor = 1e-3 * reference.square().mean().sqrt()
    relative = difference / reference.abs().clamp(min=floor)
    assert found.sqnr_db == pytest.approx(10 * math.log10(reference.square().sum() / difference.square().sum()))
    assert found.median_relative == pytest.approx(float(relative.median()))
    assert found.mean_relative == pytest.approx(float(relative.mean()))
    assert found.largest_relative == pytest.approx(float(difference.max() / reference.square().mean().sqrt()))
    assert (found.nonfinite, found.underflow, found.count) == (0, 0.0, 1000)


def test_the_mean_relative_error_grows_with_the_count_where_the_others_do_not() -> None:
    """Without a floor: why it is not what decides."""
    means, medians = [], []
    for count in (1_000, 1_000_000):
        generator = torch.Generator().manual_seed(1)
        reference = torch.randn(count, generator=generator, dtype=torch.float64)
        noise = 0.03 * torch.randn(count, generator=generator, dtype=torch.float64)
        means.append(float((noise / reference).abs().mean()))
        medians.append(Accuracy.of(reference + noise, reference).median_relative)
    assert means[1] > 1.5 * means[0]
    assert medians[1] == pytest.approx(medians[0], rel=0.15)


def test_a_value_that_is_lost_is_an_error_without_bound() -> None:
    reference = torch.tensor([1.0, 2.0, 3.0])
    found = Accuracy.of(torch.tensor([1.0, float("nan"), 3.0]), reference)
    assert (found.sqnr_db, found.nonfinite) == (-math.inf, 1)
    assert found.median_relative == math.inf
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["sqnr_db"] == "-inf"


def test_places_where_the_reference_is_not_finite_are_left_out() -> None:
    found = Accuracy.of(torch.tensor([5.0, 2.0]), torch.tensor([float("inf"), 2.0]))
    assert (found.count, found.sqnr_db) == (1, math.inf)


def test_zeros_and_nothing() -> None:
    zeros = torch.zeros(3)
    assert Accuracy.of(zeros, zeros).sqnr_db == math.inf
    assert Accuracy.of(torch.ones(3), zeros).sqnr_db == -math.inf
    assert Accuracy.of(torch.empty(0), torch.empty(0)).count == 0
    assert Accuracy.of(torch.tensor([0.0, 1.0]), torch.tensor([1e-9, 1.0])).underflow == 0.5
