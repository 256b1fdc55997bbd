"""Ranges: one histogram whatever the order, and estimates that are never worse than the plain range."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch.candidates import CANDIDATES
from cordillera.numerics.formats.formats import INTEGERS
from cordillera.numerics.quantization.quantizers import quantize
from cordillera.numerics.quantization.range_estimators import (
    ESTIMATORS,
    RunningHistogram,
    _Moments,
    estimate,
    minmax,
)

seeds = st.integers(0, 2**31)


def _values(seed: int, count: int = 600) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) ** 3 * 10.0 ** float(torch.randint(-6, 4, (1,), generator=generator))
    return x + x.abs().max() * float(torch.randint(-2, 3, (1,), generator=generator))


def _histogram(*parts: Tensor, bins: int = 2048) -> RunningHistogram:
    histogram = RunningHistogram(bins)
    for part in parts:
        histogram.update(part)
    return histogram


def _state(histogram: RunningHistogram) -> tuple[object, ...]:
    state = histogram.state_dict()
    return (*(value for key, value in state.items() if key != "counts"), state["counts"].tolist())


@settings(max_examples=60)
@given(seed=seeds, cuts=st.lists(st.integers(0, 600), max_size=6), bins=st.sampled_from([2, 7, 64, 2048]))
def test_the_histogram_does_not_depend_on_how_values_are_split_and_merged(
    seed: int, cuts: list[int], bins: int
) -> None:
    x = _values(seed)
    whole = _histogram(x, bins=bins)
    assert whole.total == len(x)
    assert len(whole.counts) <= bins
    parts = [_histogram(part, bins=bins) for part in torch.tensor_split(x, sorted(cuts))]
    generator = torch.Generator().manual_seed(seed)
    while len(parts) > 1:  # a random tree of merges
        i, j = torch.randperm(len(parts), generator=generator)[:2].tolist()
        parts[i].merge(parts[j])
        del parts[j]
    assert _state(parts[0]) == _state(whole)
    edges = whole.edges()
    for i in range(0, len(whole.counts), max(1, len(whole.counts) // 5)):
        last = i == len(whole.counts) - 1
        inside = (x >= edges[i]) & ((x <= edges[i + 1]) if last else (x < edges[i + 1]))
        assert int(inside.sum()) == int(whole.counts[i])


@settings(max_examples=15)
@given(seed=seeds, name=st.sampled_from(["uint8", "int8", "uint4", "int4"]), norm=st.sampled_from([1, 2]))
def test_the_least_error_is_no_larger_than_that_of_the_plain_range(seed: int, name: str, norm: int) -> None:
    format = INTEGERS[name]
    histogram, levels = _histogram(_values(seed)), format.highest - format.lowest
    ranges = [minmax(histogram, levels), ESTIMATORS[f"l{norm}"](histogram, levels, False)]
    low, high = torch.tensor(ranges, dtype=torch.float64).unbind(1)
    plain, least = _Moments(histogram).error(low, high, levels, norm).tolist()
    assert least <= plain * (1 + 1e-9)


@settings(max_examples=20)
@given(seed=seeds, levels=st.sampled_from([3, 15, 255]), clip=st.floats(0.2, 1))
def test_the_error_in_closed_form_is_that_of_a_sample(seed: int, levels: int, clip: float) -> None:
    histogram = _histogram(_values(seed, 50), bins=32)
    edges, counts = histogram.edges(), histogram.counts
    within = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    points = edges[:-1, None] + within * edges.diff()[:, None]
    low, high = (clip * end for end in minmax(histogram, levels))
    step = (high - low) / levels
    rounded = ((points - low) / step).round().clamp(0, levels) * step + low
    ends = torch.tensor([low], dtype=torch.float64), torch.tensor([high], dtype=torch.float64)
    for norm in (1, 2):
        sampled = float(((points - rounded).abs() ** norm).mean(1) @ counts.double())
        found = float(_Moments(histogram).error(*ends, levels, norm))
        assert found == pytest.approx(sampled, rel=1e-2)


def test_clipping_pays_for_few_bits_and_long_tails() -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) ** 3
    histogram = _histogram(x)
    errors = {}
    for name in ESTIMATORS:
        found = quantize(x, INTEGERS["uint4"], parameters=estimate(histogram, INTEGERS["uint4"], name)).dequantize()
        errors[name] = (float((found - x).square().mean()), float((found - x).abs().mean()))
    assert min(errors, key=lambda name: errors[name][0]) == "l2"
    assert errors["l2"][0] < 0.5 * errors["minmax"][0]
    assert min(errors, key=lambda name: errors[name][1]) == "l1"
    assert errors["kl"][1] < 0.6 * errors["minmax"][1]
    assert errors["percentile"][1] < 0.6 * errors["minmax"][1]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_every_estimator_answers_for_degenerate_values(estimator: str, symmetric: bool) -> None:
    format = INTEGERS["int8" if symmetric else "uint8"]
    for x in ([], [0.0, 0.0], [3.7] * 9, [-5.0], [-6.0, -5.5, -5.0], [1e-40, 2e-40], [0.0, 3e38], [1.0, 1.0 + 2**-20]):
        values = torch.tensor(x)
        scale, zero_point = estimate(_histogram(values), format, estimator, symmetric=symmetric)
        assert float(scale) > 0
        assert (zero_point is None) == symmetric
        if x and min(x) == max(x) and abs(x[0]) > 1:
            back = quantize(values, format, parameters=type(estimate(_histogram(values), format))(scale, zero_point))
            torch.testing.assert_close(back.dequantize(), values, rtol=1e-4, atol=0)


def test_the_percentile_leaves_one_value_in_a_hundred_outside() -> None:
    x = torch.rand(50_000, generator=torch.Generator().manual_seed(0)) - 0.5
    low, high = ESTIMATORS["percentile"](_histogram(x), 255, False)
    assert float(((x < low) | (x > high)).float().mean()) == pytest.approx(0.01, abs=1e-3)
    low, high = ESTIMATORS["percentile"](_histogram(x), 254, True)
    assert low == -high
    assert float((x.abs() > high).float().mean()) == pytest.approx(0.01, abs=1e-3)


def test_a_histogram_goes_on_from_its_state() -> None:
    first, second = _values(1), _values(2)
    histogram = RunningHistogram()
    histogram.load_state_dict(_histogram(first).state_dict())
    histogram.update(second)
    assert _state(histogram) == _state(_histogram(first, second))


def test_what_cannot_be_counted_is_refused_and_leaves_the_counts_alone() -> None:
    histogram = _histogram(torch.ones(3))
    with pytest.raises(NumericsError, match=r"logits: element \(1,\) is nan"):
        histogram.update(torch.tensor([1.0, float("nan")]), "logits")
    assert histogram.total == 3
    with pytest.raises(NumericsError, match="bins"):
        histogram.merge(RunningHistogram(4))
    with pytest.raises(NumericsError, match="bins"):
        RunningHistogram(1)
    with pytest.raises(NumericsError, match="no estimator"):
        estimate(histogram, INTEGERS["uint8"], "mean")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.5, 0.77, 0.999])
def test_quantiles_of_a_histogram_are_between_the_values_of_its_bin(share: float) -> None:
    x = _values(3)
    histogram = _histogram(x)
    width = float(histogram.edges().diff().max())
    wanted = float(x.double().quantile(share))
    gap = float(x.double().sort().values.diff().max()) if share in (0.0, 0.001, 0.999) else 0.0
    assert _Moments(histogram).quantile(share) == pytest.approx(wanted, abs=2 * width + gap)
    even = _histogram(torch.arange(1000, dtype=torch.float32), bins=8)
    assert _Moments(even).quantile(share) == pytest.approx(1000 * share, abs=4)  # linear within a wide bin


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_ranges_follow_values_that_are_scaled_or_mirrored(estimator: str) -> None:
    x = _values(5, 4000)
    for levels in (15, 255):
        low, high = ESTIMATORS[estimator](_histogram(x), levels, False)
        assert ESTIMATORS[estimator](_histogram(x * 8), levels, False) == pytest.approx((8 * low, 8 * high), rel=1e-9)
        # bins are closed below, so mirrored bins differ by a value at their edges
        step = (high - low) / 64
        assert ESTIMATORS[estimator](_histogram(-x), levels, False) == pytest.approx((-high, -low), abs=step)
        low, high = ESTIMATORS[estimator](_histogram(x), levels - 1, True)
        assert low == -high
        assert ESTIMATORS[estimator](_histogram(-x), levels - 1, True) == pytest.approx((low, high), rel=2e-2)


def test_least_divergence_keeps_an_even_range_and_gives_up_a_far_value() -> None:
    even = torch.linspace(-1, 1, 20_001)
    assert ESTIMATORS["kl"](_histogram(even), 15, False) == (-1.0, 1.0)
    for far in (50.0, -50.0):
        low, high = ESTIMATORS["kl"](_histogram(even, torch.tensor([far])), 15, False)
        assert high - low < 51
    one_sided = torch.rand(5000, generator=torch.Generator().manual_seed(1)) + 1
    low, high = ESTIMATORS["kl"](_histogram(one_sided), 255, False)
    assert low == 0.0
    assert 1.5 < high <= 2.0


@pytest.mark.parametrize("damage", ["missing", "more", "dtype", "negative"])
def test_a_state_that_is_none_is_refused(damage: str) -> None:
    state = _histogram(torch.arange(5.0)).state_dict()
    if damage == "missing":
        del state["low"]
    elif damage == "more":
        state["width"] = 1
    else:
        state["counts"] = state["counts"].double() if damage == "dtype" else state["counts"] - 1
    with pytest.raises(NumericsError, match="is no state"):
        RunningHistogram().load_state_dict(state)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("tail", "gain"), [(2.5, -1.0), (4.0, 0.0), (8.0, 0.5), (30.0, 0.5)])
def test_static_layers_lose_less_on_other_rows_than_by_least_and_largest_values(tail: float, gain: float) -> None:
    """In the mean of seeds; with the longest tails, other rows hold values several times as large as those seen."""
    static, gains = CANDIDATES["int8 static"], []
    for seed in range(3):
        weight, bias = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)), torch.zeros(64)
        draws = torch.tensor(np.random.default_rng(seed).standard_t(tail, (8192, 64))).float()
        rows, x = draws.chunk(2)
        exact = x.double() @ weight.double().T

        def decibels(
            stored: Mapping[str, torch.Tensor], x: Tensor = x, exact: Tensor = exact, bias: Tensor = bias
        ) -> float:
            error = static.load(stored, bias, False)(x).double() - exact
            return float(10 * torch.log10(exact.square().sum() / error.square().sum()))

        stored = static.store(weight, rows)
        gains.append(decibels(stored) - decibels({**stored, "range": torch.stack([rows.min(), rows.max()])}))
    assert sum(gains) / len(gains) >= gain
