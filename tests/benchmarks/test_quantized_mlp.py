"""Chains of quantised layers: the reference layer by layer, close to float32, safe with bad values."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from _quantized_mlp import QuantizedMLP, quantize_mlp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cordillera.errors import NumericsError
from cordillera.numerics.quantization.integer_linear import UINT8, integer_product, requantize
from cordillera.numerics.quantization.quantized_linear import LinearConfig, QuantizedLinear
from cordillera.numerics.quantization.quantizers import AffineParameters, choose_affine

IN_EIGHT_BITS = LinearConfig(float_below=0)
PLAIN = LinearConfig(float_below=0, estimator="minmax")


def _decibels(found: Tensor, exact: Tensor) -> float:
    """Signal to quantisation noise."""
    return float(20 * (exact.double().norm() / (found.double() - exact.double()).norm()).log10())


def _range(x: Tensor) -> AffineParameters:
    return choose_affine(x.min(), x.max(), UINT8)


def _mlp(seed: int, *sizes: int) -> nn.Sequential:
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for inner, outputs in pairwise(sizes):
        modules += [nn.Linear(inner, outputs), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def _linear(seed: int, inner: int, outputs: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inner, outputs)


@settings(max_examples=6)
@given(seed=st.integers(0, 2**31), output=st.booleans())
@pytest.mark.slow
def test_three_layers_in_eight_bits_throughout_keep_thirty_decibels(seed: int, output: bool) -> None:
    model = _mlp(seed, 96, 128, 64, 32)
    x = torch.randn(256, 96)
    quantized = quantize_mlp(model, [torch.randn(256, 96) for _ in range(4)], quantize_output=output)
    with torch.no_grad():
        assert _decibels(quantized(x), model(x)) >= 30


def test_a_chain_is_the_reference_layer_by_layer() -> None:
    model, x = _mlp(3, 40, 50, 31, 18), torch.randn(200, 40)
    chain = quantize_mlp(model, [x], config=PLAIN, quantize_output=True)
    (scale, zero_point), *following = [layer._input for layer in chain._chain] + [chain._output]  # type: ignore[misc]
    codes = chain._chain[0]._engine.plain(chain._chain[0]._engine.codes(x, scale, zero_point))
    for layer, (next_scale, next_zero_point) in zip(chain._chain, following, strict=True):  # type: ignore[misc]
        product = integer_product(codes, zero_point, layer.weight)
        wanted = AffineParameters(torch.tensor(next_scale), torch.tensor(next_zero_point))
        codes = requantize(product, layer.weight, scale, wanted, relu=layer.relu)
        scale, zero_point = next_scale, next_zero_point
    assert torch.equal(chain.codes(x), codes)
    torch.testing.assert_close(chain(x), (codes.float() - zero_point) * scale)
    slow = quantize_mlp(
        model, [x], config=LinearConfig(float_below=0, estimator="minmax", backend="reference"), quantize_output=True
    )
    assert torch.equal(slow.codes(x), codes)
    # Without a scale for the last output only its rounding is spared.
    assert torch.equal(chain.codes(x.repeat(40, 1))[-200:], codes)  # torch's kernels
    wide = quantize_mlp(model, [x], config=PLAIN)
    assert torch.equal(wide(x.repeat(40, 1))[-200:], wide(x))
    apart = (wide(x) - chain(x)).abs()
    assert float((apart <= scale * 0.501).float().mean()) > 0.99
    assert float(apart.max()) <= scale * 2  # clipped at the ends
    assert torch.equal(wide(x.view(4, 50, 40)).flatten(0, 1), wide(x))
    assert wide(x.bfloat16()).dtype == torch.bfloat16


def test_calibration_takes_only_what_it_can() -> None:
    model = _mlp(0, 8, 16, 4)
    with pytest.raises(NumericsError, match="calibrate"):
        quantize_mlp(model, [])
    with pytest.raises(NumericsError, match=r"ranker: batch: element \(0, 2\) is nan"):
        quantize_mlp(model, [torch.tensor([[0, 1, float("nan"), 0, 0, 0, 0, 0]])], name="ranker")
    with pytest.raises(NumericsError, match="module 1 is Sigmoid"):
        quantize_mlp(nn.Sequential(nn.Linear(2, 2), nn.Sigmoid()), [torch.ones(1, 2)])
    with pytest.raises(NumericsError, match="no linear"):
        quantize_mlp(nn.Sequential(nn.Identity()), [torch.ones(1, 2)])
    kept = quantize_mlp(nn.Sequential(nn.Identity(), *model, nn.Dropout()), [torch.randn(9, 8)])
    assert [layer.relu for layer in kept._chain] == [True, False]
    model[2].weight.data[1, 3] = float("inf")
    with pytest.raises(NumericsError, match=r"layer 1.*inf"):
        quantize_mlp(model, [torch.zeros(2, 8)])


def test_chains_of_layers_that_do_not_fit_are_refused() -> None:
    scale = _range(torch.randn(5))
    first = QuantizedLinear.from_linear(_linear(0, 4, 6), scale)
    with pytest.raises(NumericsError, match="6 outputs for 5 inputs"):
        QuantizedMLP([first, QuantizedLinear.from_linear(_linear(0, 5, 2), scale)])
    with pytest.raises(NumericsError, match="scales"):
        QuantizedMLP([QuantizedLinear.from_linear(_linear(0, 4, 6))])
    for wrong in (0.0, float("nan"), -1.0, float("inf")):
        with pytest.raises(NumericsError, match="scale"):
            QuantizedMLP([first], AffineParameters(torch.tensor(wrong), torch.tensor(0)))
    with pytest.raises(NumericsError, match="no scale"):
        QuantizedMLP([first]).codes(torch.zeros(1, 4))


def test_rows_that_are_not_finite_pass_a_chain_alone() -> None:
    model, x = _mlp(0, 16, 24, 8), torch.randn(6, 16)
    chain = quantize_mlp(model, [x], config=PLAIN, quantize_output=True)
    clean = chain(x)
    x[2, 3] = float("nan")
    y = chain(x)
    assert y.isnan().all(1).tolist() == [False, False, True, False, False, False]
    assert torch.equal(y[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])
    assert chain.nonfinite_rows == 1
    with pytest.raises(NumericsError, match=r"\(2, 3\)"):
        chain.codes(x)


def test_chains_take_empty_batches() -> None:
    for rows, inner, outputs in ((0, 8, 5), (4, 0, 5), (4, 8, 0)):
        linear = nn.utils.skip_init(nn.Linear, 1, 1)
        linear.weight, linear.bias = nn.Parameter(torch.ones(outputs, inner)), nn.Parameter(torch.ones(outputs))
        mlp = QuantizedMLP([QuantizedLinear.from_linear(linear, _range(torch.ones(1)), config=PLAIN)])
        assert mlp(torch.zeros(rows, inner)).shape == (rows, outputs)


def test_state_goes_through_a_dictionary() -> None:
    x = torch.randn(30, 16)
    first, second = (quantize_mlp(_mlp(seed, 16, 24, 8), [x], quantize_output=True) for seed in (0, 1))
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))
    assert torch.equal(copy.deepcopy(first)(x), first(x))


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
