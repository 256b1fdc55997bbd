"""Quantiles of a stream within their stated error, and draws that have the data's own shapes and covariances."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch.quantile_sketch import CAPACITY, Marginals, QuantileSketch
from cordillera.numerics.dispatch.row_statistics import RowStatistics
from cordillera.numerics.emulation.scaling import round_scaled, scale_of
from cordillera.numerics.formats.formats import FORMATS, INTEGERS
from cordillera.numerics.quantization.quantizers import choose_symmetric, encode_integers

PROBABILITIES = torch.linspace(0, 1, 41, dtype=torch.float64)


def correlated(count: int, features: int = 24, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(8, features, generator=torch.Generator().manual_seed(99))
    common = torch.randn(count, 8, generator=generator) @ mix / 8**0.5
    return common + 0.5 * torch.randn(count, features, generator=generator)


def relu(count: int, seed: int = 0) -> Tensor:
    return (correlated(count, seed=seed) - 0.5).relu()


def heavy(count: int, seed: int = 0) -> Tensor:
    return correlated(count, seed=seed).mul(1.2).sinh().mul(correlated(count, seed=seed + 1).abs())


def rank_error(sketch: QuantileSketch) -> float:
    """Bound of the error of a quantile's rank, as a share of all rows; usually far less, as errors cancel."""
    return sum(count * 2.0**level for level, count in enumerate(sketch._compactions)) / max(1, sketch.count)


def ranks(data: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest share of the data that lies below found values ``[p, K]``."""
    ordered = data.T.contiguous().sort(1).values
    wanted = found.T.contiguous()
    low, high = (torch.searchsorted(ordered, wanted, right=right).T / len(data) for right in (False, True))
    return low, high


@settings(max_examples=25)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=8), st.integers(0, 5), st.randoms(use_true_random=False))
def test_quantiles_are_within_the_stated_error_in_any_split_order_and_merge(sizes, seed, random) -> None:
    sizes = [*sizes, 1]
    data = (torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(seed)) * 3).round()  # with ties
    parts = list(data.split(sizes))
    random.shuffle(parts)
    one, others = QuantileSketch(3), [QuantileSketch(3) for _ in range(3)]
    for number, part in enumerate(parts):
        one.update(part)
        others[number % 3].update(part)
    others[2].merge(others[0])
    others[2].merge(others[1])
    for sketch in (one, others[2]):
        assert sketch.count == len(data)
        low, high = ranks(data, sketch.quantiles(PROBABILITIES))
        slack = rank_error(sketch) + 1 / len(data)
        assert bool((low <= PROBABILITIES[:, None] + slack).all())
        assert bool((high >= PROBABILITIES[:, None] - slack).all())
        assert torch.equal(sketch.quantiles(PROBABILITIES)[[0, -1]], torch.stack([data.amin(0), data.amax(0)]))
        assert torch.equal(sketch.zeros, (data == 0).sum(0))
        assert torch.equal(sketch.negatives, (data < 0).sum(0))


def test_memory_is_bounded_and_the_error_is_small_on_a_long_stream() -> None:
    sketch, data = QuantileSketch(2), torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0)).exp()
    for part in data.split(1000):
        sketch.update(part)
    assert sketch.memory_bytes() < 2 * 4 * CAPACITY * 12
    assert rank_error(sketch) < 0.05
    low, high = ranks(data, sketch.quantiles(PROBABILITIES))
    assert float((low - PROBABILITIES[:, None]).clamp(min=0).max()) < 0.005
    assert float((PROBABILITIES[:, None] - high).clamp(min=0).max()) < 0.005
    tail = torch.tensor([0.999, 0.9999], dtype=torch.float64)
    torch.testing.assert_close(sketch.quantiles(tail), data.quantile(tail.float(), 0), rtol=0.15, atol=0)


def test_sketches_are_saved_whole_and_refused_when_they_do_not_fit() -> None:
    sketch = QuantileSketch(3)
    for seed in range(5):
        sketch.update(torch.randn(700, 3, generator=torch.Generator().manual_seed(seed)))
    other = QuantileSketch.from_state_dict(sketch.state_dict())
    more = torch.randn(900, 3, generator=torch.Generator().manual_seed(9))
    sketch.update(more)
    other.update(more)
    assert torch.equal(sketch.points(), other.points())
    state = sketch.state_dict()
    with pytest.raises(NumericsError, match="rows of"):
        QuantileSketch.from_state_dict({**state, "levels": state["levels"][:-1]})


def gathered(data: Tensor, marginals: bool) -> RowStatistics:
    statistics = RowStatistics(data.shape[1], marginals=marginals)
    for part in data.split(1000):
        statistics.update(part)
    return statistics


def draw(statistics: RowStatistics, count: int = 8192) -> Tensor:
    return statistics.sample(count, torch.Generator().manual_seed(7))


def test_draws_after_a_relu_have_no_negative_numbers_and_as_many_zeros() -> None:
    data = relu(20_000)
    drawn = draw(gathered(data, True))
    assert float(drawn.min()) == 0
    torch.testing.assert_close((drawn == 0).double().mean(0), (data == 0).double().mean(0), atol=0.02, rtol=0)
    assert bool((draw(gathered(data, False)) < 0).any())


@pytest.mark.parametrize("make", [correlated, relu, heavy])
def test_draws_keep_the_datas_covariances_and_ends(make: Callable[[int], Tensor]) -> None:
    data = make(20_000)
    drawn = draw(gathered(data, True), 40_000)
    wanted, found = (torch.corrcoef(x.T.double()) for x in (data, drawn))
    assert float((found - wanted).abs().max()) < 0.12
    torch.testing.assert_close(drawn.std(0), data.std(0), rtol=0.12, atol=0)
    assert bool((drawn.amin(0) >= data.amin(0)).all() and (drawn.amax(0) <= data.amax(0)).all())


def int8(x: Tensor) -> Tensor:
    scale = choose_symmetric(x.abs().max(), INTEGERS["int8"]).scale
    return encode_integers(x, scale, None, INTEGERS["int8"]).float() * scale


def fp8(x: Tensor) -> Tensor:
    scale = scale_of(x, FORMATS["e4m3fn"])
    return round_scaled(x, scale, FORMATS["e4m3fn"]) * scale


@pytest.mark.parametrize("make", [relu, heavy])
@pytest.mark.parametrize("through", [int8, fp8])
def test_errors_of_kernels_are_nearer_to_those_on_the_data_than_with_normal_draws(make, through) -> None:
    data = make(20_000)
    weight = torch.randn(data.shape[1], 32, generator=torch.Generator().manual_seed(3))

    def decibels(x: Tensor) -> float:
        exact = x.double() @ weight.double()
        noise = through(x).double() @ weight.double() - exact
        return 10 * float((exact.square().mean() / noise.square().mean()).log10())

    replayed = decibels(make(8192, seed=50))
    by_copula, by_normal = (abs(decibels(draw(gathered(data, kind))) - replayed) for kind in (True, False))
    # relative errors of floating-point numbers hardly depend on what is drawn: after a ReLU both are as near as can be
    assert by_copula < max(by_normal, 0.1)
    assert by_copula < 1.5


def test_batches_with_what_is_no_number_are_skipped_and_counted_and_kinds_do_not_mix() -> None:
    statistics = gathered(relu(3000), True)
    before = statistics.state_dict()["marginals"]["levels"]
    bad = relu(10)
    bad[3, 4] = torch.nan
    assert not statistics.update(bad)
    assert statistics.skipped == 1
    assert statistics.marginals.count == statistics.count == 3000
    assert all(torch.equal(a, b) for a, b in zip(before, statistics.marginals.state_dict()["levels"], strict=True))
    empty = RowStatistics(24)
    empty.merge(statistics)
    assert torch.equal(draw(empty, 64), draw(statistics, 64))
    again = RowStatistics.from_state_dict(statistics.state_dict())
    assert torch.equal(draw(again, 64), draw(statistics, 64))
    with pytest.raises(NumericsError, match="with and without quantiles"):
        statistics.merge(gathered(relu(10), False))
    assert RowStatistics(4096, marginals=True).marginals is None
    constant = RowStatistics(2, marginals=True)
    constant.update(torch.tensor([[3.0, 0.0]]).expand(10, 2))
    assert torch.equal(draw(constant, 4), torch.tensor([[3.0, 0.0]]).expand(4, 2))


@pytest.mark.parametrize("count", [1, 2, 7, 512])
def test_quantiles_of_few_rows_are_exact(count: int) -> None:
    data = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
    sketch = QuantileSketch(3)
    sketch.update(data)
    assert rank_error(sketch) == 0
    shares = torch.tensor([0.0, 0.1, 1 / 3, 0.5, 0.75, 0.9, 1.0], dtype=torch.float64)
    expected = np.quantile(data.numpy(), shares.numpy(), axis=0, method="inverted_cdf")
    assert sketch.quantiles(shares).numpy() == pytest.approx(expected)
    points = sketch.points()
    assert points.shape == (129, 3)
    assert torch.equal(points[[0, -1]], torch.stack([data.amin(0), data.amax(0)]))
    assert torch.equal(points[64], data.median(0).values)
    steps = np.quantile(
        data.numpy(), scipy.stats.norm.cdf(np.linspace(-4, 4, 129)[1:-1]), axis=0, method="inverted_cdf"
    )
    assert points[1:-1].numpy() == pytest.approx(steps)


def even(count: int, width: float) -> Tensor:
    """Rows whose features are normal numbers times ``width``, at equal steps of probability."""
    share = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return (torch.special.ndtri(share) * width).float()[:, None].expand(-1, 3).contiguous()


def marginals_of(rows: Tensor) -> Marginals:
    sketch = QuantileSketch(rows.shape[1])
    sketch.update(rows)
    return Marginals(sketch)


def test_normal_numbers_are_mapped_through_the_datas_quantiles() -> None:
    normal = torch.linspace(-3, 3, 25, dtype=torch.float64)[:, None].expand(-1, 3)
    values = marginals_of(even(20_000, 2.0) + 5)(normal)
    torch.testing.assert_close(values.double(), 5 + 2 * normal, rtol=0, atol=0.1)
    assert torch.equal(values, values.sort(0).values)
    mixed = even(20_000, 1.0)
    mixed[mixed.abs() < 0.5] = 0  # a point mass of 38 %
    values = marginals_of(mixed)(normal)
    inside = normal.abs() < 0.49
    assert not bool(values[inside].any())
    outside = normal.abs() > 0.51
    assert torch.equal(values[outside].sign().double(), normal[outside].sign())
    torch.testing.assert_close(values[outside].double(), normal[outside], rtol=0, atol=0.06)


def test_correlations_of_normals_are_those_of_the_closed_formula() -> None:
    """Of normal values the correlation itself; of lognormal ones ln(1 + c (exp(s^2) - 1)) / s^2."""
    wanted = torch.tensor([[1.0, 0.6, -0.3], [0.6, 1.0, 0.2], [-0.3, 0.2, 1.0]], dtype=torch.float64)
    spread = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
    found = marginals_of(even(20_000, 1.0)).correlations_of_normals(wanted * spread[:, None] * spread)
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3)
    width = 0.5
    exact = torch.log(1 + wanted * (math.exp(width**2) - 1)) / width**2
    found = marginals_of(even(20_000, width).exp()).correlations_of_normals(wanted)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-2)
    assert torch.equal(found.diagonal(), torch.ones(3, dtype=torch.float64))
