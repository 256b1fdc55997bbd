"""Quantised layers: exact against whole numbers, close to float32, safe with bad values and flipped bits."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.quantization.integer_linear import UINT8
from cordillera.numerics.quantization.quantized_linear import LinearConfig, QuantizedLinear
from cordillera.numerics.quantization.quantizers import AffineParameters, choose_affine

PLAIN = LinearConfig(float_below=0, estimator="minmax")


def _range(x: Tensor) -> AffineParameters:
    return choose_affine(x.min(), x.max(), UINT8)


def _linear(seed: int, inner: int, outputs: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inner, outputs)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 20), inner=st.integers(1, 70), outputs=st.integers(1, 50),
       relu=st.booleans(), static=st.booleans(), symmetric=st.booleans())  # fmt: skip
def test_a_layer_is_the_reference_and_close_to_float(
    seed: int, rows: int, inner: int, outputs: int, relu: bool, static: bool, symmetric: bool
) -> None:
    linear, x = _linear(seed, inner, outputs), torch.randn(rows, inner) * 3 + 1
    scales = _range(x) if static else None
    config = LinearConfig(float_below=0, symmetric=symmetric)
    fast = QuantizedLinear.from_linear(linear, scales, relu=relu, config=config)
    slow = QuantizedLinear.from_linear(
        linear, scales, relu=relu, config=LinearConfig(float_below=0, symmetric=symmetric, backend="reference")
    )
    y = fast(x)
    assert torch.equal(y, slow(x))
    many = x.repeat(1000, 1)  # goes to torch's kernels
    assert torch.equal(fast(many)[-rows:], y)
    exact = F.linear(x, linear.weight, linear.bias).detach()
    exact = exact.relu() if relu else exact
    bound = (_range(x).scale * linear.weight.abs().sum(1) + x.abs().sum(1, keepdim=True) * fast.scale) * 1.01
    assert bool(((y - exact).abs() <= bound + 1e-5).all())


def test_layout_shape_and_dtype_of_the_input_do_not_matter() -> None:
    linear, x = _linear(0, 24, 10), torch.randn(6, 24)
    layer = QuantizedLinear.from_linear(linear, _range(x), config=PLAIN)
    y = layer(x)
    assert torch.equal(layer(x.t().contiguous().t()), y)
    assert torch.equal(layer(x.view(2, 3, 24)), y.view(2, 3, 10))
    assert torch.equal(layer(x[0]), y[0])
    assert torch.equal(layer(x[:1].expand(4, 24)), y[:1].expand(4, 10))
    assert torch.equal(layer(x.bfloat16()), layer(x.bfloat16().float()).bfloat16())
    assert layer(x.requires_grad_()).requires_grad is False
    transposed = nn.Linear(24, 10)
    transposed.weight.data, transposed.bias.data = linear.weight.data.t().contiguous().t(), linear.bias.data
    assert torch.equal(QuantizedLinear.from_linear(transposed, _range(x.detach()), config=PLAIN)(x), y)
    with pytest.raises(NumericsError, match="float64"):
        layer(x.double())
    with pytest.raises(NumericsError, match="23"):
        layer(torch.randn(2, 23))


def test_the_number_of_threads_changes_nothing() -> None:
    linear, x = _linear(0, 200, 300), torch.randn(50, 200)
    layer, before = QuantizedLinear.from_linear(linear, config=PLAIN), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_tiny_batches_are_multiplied_in_float_and_large_layers_keep_no_float() -> None:
    linear, x = _linear(0, 64, 64), torch.randn(2, 64)
    static = QuantizedLinear.from_linear(linear, _range(x), relu=True)
    assert torch.equal(static(x), F.linear(x, linear.weight, linear.bias).relu())
    layer = QuantizedLinear.from_linear(linear, relu=True)
    assert torch.equal(layer(x), F.linear(x, linear.weight, linear.bias).relu())
    assert not torch.equal(layer(x.repeat(50, 1))[:2], layer(x))
    assert QuantizedLinear.from_linear(_linear(0, 512, 512)).float_weight is None


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 1), (31, 64), (20_000, 15), (1, 5000)])
def test_layers_with_few_inputs_or_outputs_are_multiplied_in_float_whatever_the_rows(inputs: int, outputs: int) -> None:
    """Codes, or a single column of weights, are no less work than the product."""
    linear = _linear(0, inputs, outputs)
    for rows in (1, 64, 3000):
        x = torch.randn(rows, inputs)
        layer = QuantizedLinear.from_linear(linear, _range(x))
        assert torch.equal(layer(x), F.linear(x, linear.weight, linear.bias))
        loaded = QuantizedLinear.from_linear(_linear(1, inputs, outputs), _range(x + 1))
        loaded.load_state_dict(layer.state_dict())
        assert torch.equal(loaded(x), layer(x))
    assert QuantizedLinear.from_linear(_linear(0, 32, 16), config=LinearConfig(float_below=1)).float_weight is None
    wide = QuantizedLinear.from_linear(linear, config=LinearConfig(float_below=0))
    assert wide.float_weight is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("float_below", [0, 1 << 20])
def test_rows_that_are_not_finite_come_out_so_and_harm_no_other_row(
    value: float, static: bool, float_below: int
) -> None:
    linear, x = _linear(0, 16, 8), torch.randn(5, 16)
    scales = _range(x) if static else None
    layer = QuantizedLinear.from_linear(linear, scales, relu=True, config=LinearConfig(float_below=float_below))
    zeroed = x.clone()
    zeroed[3] = 0
    x[3, 7] = value
    y, expected = layer(x), layer(zeroed)
    others = [0, 1, 2, 4]
    assert torch.equal(y[others], expected[others])
    if not float_below:
        assert bool(y[3].isnan().all())
        assert layer.nonfinite_rows == 1
    else:
        assert torch.equal(y[3].isnan(), F.linear(x, linear.weight, linear.bias).relu()[3].isnan())
    strict = QuantizedLinear.from_linear(
        linear, scales, config=LinearConfig(float_below=float_below, nonfinite="raise")
    )
    with pytest.raises(NumericsError, match=r"element \(3, 7\)"):
        strict(x)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_constant_and_denormal_weights_and_inputs(static: bool, symmetric: bool) -> None:
    linear = _linear(0, 12, 5)
    with torch.no_grad():
        linear.weight[0], linear.weight[1], linear.weight[2] = 0.0, 0.25, 1e-41
    config = LinearConfig(float_below=0, symmetric=symmetric)
    for x in (torch.zeros(3, 12), torch.full((3, 12), -7.0), torch.full((3, 12), 1e-42), torch.randn(3, 12)):
        layer = QuantizedLinear.from_linear(linear, _range(x) if static else None, config=config)
        exact = F.linear(x, linear.weight, linear.bias).detach()
        y = layer(x)
        torch.testing.assert_close(y, exact, rtol=0.02, atol=0.1 if float(x.abs().max()) > 1 else 0.05)
        assert torch.equal(y[:, 0], linear.bias[0].detach().expand(3))


def test_a_sum_that_overflows_is_no_infinity() -> None:
    layer = QuantizedLinear.from_linear(_linear(0, 4, 3), config=PLAIN)
    y = layer(torch.full((2, 4), 3e38))
    assert layer.nonfinite_rows == 0
    assert not bool(y.isnan().any())


@pytest.mark.parametrize("shape", [(0, 8, 5), (4, 0, 5), (4, 8, 0)])
@pytest.mark.parametrize("float_below", [0, 1 << 17])
def test_empty_batches_and_layers(shape: tuple[int, int, int], float_below: int) -> None:
    rows, inner, outputs = shape
    linear = nn.utils.skip_init(nn.Linear, 1, 1)
    linear.weight, linear.bias = nn.Parameter(torch.ones(outputs, inner)), nn.Parameter(torch.ones(outputs))
    x = torch.zeros(rows, inner)
    layer = QuantizedLinear.from_linear(linear, config=LinearConfig(float_below=float_below))
    torch.testing.assert_close(layer(x), F.linear(x, linear.weight, linear.bias).detach())


def test_a_flipped_bit_is_found() -> None:
    layer = QuantizedLinear.from_linear(_linear(0, 16, 5), _range(torch.randn(9)))
    layer.verify()
    state = copy.deepcopy(layer.state_dict())
    for name in ("codes", "scale", "bias", "input_scale", "float_weight"):
        flipped = copy.deepcopy(state)
        raw = flipped[name].view(-1).view(torch.uint8)
        raw[raw.numel() // 2] ^= 4
        with pytest.raises(NumericsError, match="SHA-256"):
            copy.deepcopy(layer).load_state_dict(flipped)
    layer.codes[2, 3] ^= 1
    with pytest.raises(NumericsError, match="SHA-256"):
        layer.verify()


def test_scales_and_choices_that_cannot_be_are_refused() -> None:
    for wrong in (0.0, float("nan"), -1.0, float("inf")):
        with pytest.raises(NumericsError, match="scale"):
            QuantizedLinear.from_linear(_linear(0, 4, 6), AffineParameters(torch.tensor(wrong), torch.tensor(0)))
    with pytest.raises(NumericsError, match="no choice"):
        LinearConfig(nonfinite="ignore")


@pytest.mark.parametrize("config", [LinearConfig(symmetric=False), LinearConfig(float_below=0, nonfinite="raise")])
def test_state_goes_through_a_dictionary(config: LinearConfig) -> None:
    x = torch.randn(30, 16)
    first, second = (QuantizedLinear.from_linear(_linear(seed, 16, 5), relu=True, config=config) for seed in (0, 1))
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))
    assert torch.equal(copy.deepcopy(first)(x), first(x))
