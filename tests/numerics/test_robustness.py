"""Bad days of every part of numerics: numbers that are too large, shapes that do not fit, states that were spoilt."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cordillera.errors import NumericsError
from cordillera.numerics.accumulate16 import choose_accumulation
from cordillera.numerics.formats import INTEGERS
from cordillera.numerics.integer_linear import quantize_weight
from cordillera.numerics.quantized_linear import LinearConfig
from cordillera.numerics.quantized_mlp import quantize_mlp
from cordillera.numerics.quantizers import AffineParameters, Granularity, choose_symmetric, quantize
from cordillera.numerics.row_statistics import RowStatistics, Tier
from cordillera.numerics.weight_statistics import WeightStatistics

INT8 = INTEGERS["int8"]
IN_EIGHT_BITS = LinearConfig(float_below=0)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("size", [1e20, 3e38])
@pytest.mark.parametrize("tier", list(Tier))
def test_finite_rows_of_any_size_leave_statistics_finite(tier: Tier, size: float) -> None:
    x = torch.randn(50, 4)
    x[::2, 0], x[1::2, 0] = size, -size
    found = RowStatistics(4, tier)
    assert found.update(x)
    torch.testing.assert_close(found.mean, x.double().mean(0), rtol=1e-6, atol=1e-6 * size)
    torch.testing.assert_close(found.variance(), x.double().var(0), rtol=1e-5, atol=0)
    if size < 1e30:  # a drawn row may lie beyond the largest number of float32 only where the data almost did
        assert torch.isfinite(found.sample(20)).all()


def test_rows_whose_squares_float64_cannot_sum_are_left_out_and_counted() -> None:
    found = RowStatistics(2)
    assert not found.update(torch.tensor([[1e200, 0.0], [0.0, 1.0]], dtype=torch.float64))
    assert (found.count, found.skipped) == (0, 1)
    assert found.update(torch.tensor([[1e120, 0.0], [0.0, 1.0]], dtype=torch.float64))
    assert float(found.variance()[0]) == pytest.approx(0.5e240)


@pytest.mark.parametrize("size", [1e-20, 1e-2, 1e2, 1e18])
@pytest.mark.parametrize("samples", [2, 3, 10])
def test_a_few_weights_are_drawn_again_with_their_spread(size: float, samples: int) -> None:
    weights = size * torch.randn(samples, 24, 16)
    found = WeightStatistics(24, 16)
    for weight in weights:
        found.update(weight)
    spread = float((found.sample(100) - found.mean).double().std())
    assert 0.7 * size < spread < 2 * size  # the mean lags behind, which widens it by up to the root of two


def test_a_weight_that_never_moves_is_drawn_without_noise_and_extremes_stay_finite() -> None:
    found, weight = WeightStatistics(3, 3), torch.randn(3, 3)
    for _ in range(3):
        found.update(weight)
    torch.testing.assert_close(found.sample(2), weight.expand(2, 3, 3))
    found = WeightStatistics(3, 3)
    for sign in (1, -1, 1, -1):
        assert found.update(torch.full((3, 3), sign * 3e38))
    for tensor in (found.mean, found.of_rows, found.of_columns):
        assert torch.isfinite(tensor).all()


def test_ranges_that_cannot_be_are_refused_with_the_tensor_and_the_place() -> None:
    with pytest.raises(NumericsError, match=r"^weight: no range at \(1, 0\).*-3e\+38 to 3e\+38"):
        quantize(torch.tensor([[0.0, 1.0], [3e38, -3e38]]), INT8, Granularity.row, name="weight")
    for peak in (-3.0, math.nan, math.inf):
        with pytest.raises(NumericsError, match=r"no range at \(1,\)"):
            choose_symmetric(torch.tensor([1.0, peak]), INT8)
    scales = AffineParameters(torch.ones(2, 1), None)
    with pytest.raises(NumericsError, match=r"weight: \[2, 1\] scales or zero points for \[3, 1\] blocks"):
        quantize(torch.randn(3, 4), INT8, Granularity.row, parameters=scales, name="weight")


@pytest.mark.parametrize("batches", [[], [torch.zeros(0, 512, dtype=torch.uint8)]])
def test_nothing_saturates_on_nothing_and_that_is_no_evidence(batches: list[torch.Tensor]) -> None:
    with pytest.raises(NumericsError, match="nothing to look for saturations in"):
        choose_accumulation(quantize_weight(torch.randn(4, 512), None), batches)


def test_a_bias_that_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(NumericsError, match=r"bias: element \(1,\) is inf"):
        quantize_weight(torch.randn(2, 2), torch.tensor([0.0, 1e300], dtype=torch.float64))


@pytest.mark.parametrize("shape", [(1, 40), (1, 80), (2, 3, 64), (64,)])
def test_codes_of_a_chain_take_its_own_width_only(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    chain = quantize_mlp(model, [torch.rand(50, 64)], config=IN_EIGHT_BITS, quantize_output=True)
    assert chain.codes(torch.rand(3, 64)).shape == (3, 8)
    with pytest.raises(NumericsError, match=r"expected float32 \[M, 64\]"):
        chain.codes(torch.rand(shape))
    with pytest.raises(NumericsError, match="float64"):
        chain.codes(torch.rand(1, 64, dtype=torch.float64))


def test_a_scale_of_a_chain_s_output_that_cannot_be_is_refused_when_it_is_loaded() -> None:
    model = nn.Sequential(nn.Linear(16, 8))
    chain = quantize_mlp(model, [torch.rand(50, 16)], config=IN_EIGHT_BITS, quantize_output=True)
    for scale in (math.nan, math.inf, 0.0, -1.0):
        state = {**chain.state_dict(), "output_scale": torch.tensor(scale)}
        with pytest.raises(NumericsError, match="output: scale"):
            chain.load_state_dict(state)
