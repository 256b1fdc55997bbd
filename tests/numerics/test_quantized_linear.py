"""Quantised layers and chains: exact against whole numbers, close to float32, safe with bad values and bad files."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.quantization.integer_linear import UINT8, integer_product, requantize
from cordillera.numerics.quantization.quantized_files import load_quantized, save_quantized
from cordillera.numerics.quantization.quantized_linear import LinearConfig, QuantizedLinear
from cordillera.numerics.quantization.quantized_mlp import QuantizedMLP, quantize_mlp
from cordillera.numerics.quantization.quantizers import AffineParameters, choose_affine

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


@settings(max_examples=20, deadline=None)
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
    mlp = QuantizedMLP([QuantizedLinear.from_linear(linear, _range(torch.ones(1)), config=PLAIN)])
    assert mlp(x).shape == (rows, outputs)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**31), output=st.booleans())
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
            QuantizedLinear.from_linear(_linear(0, 4, 6), AffineParameters(torch.tensor(wrong), torch.tensor(0)))
        with pytest.raises(NumericsError, match="scale"):
            QuantizedMLP([first], AffineParameters(torch.tensor(wrong), torch.tensor(0)))
    with pytest.raises(NumericsError, match="no choice"):
        LinearConfig(nonfinite="ignore")
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


def test_state_goes_through_a_dictionary_and_a_file(tmp_path: Path) -> None:
    x = torch.randn(30, 16)
    first, second = (quantize_mlp(_mlp(seed, 16, 24, 8), [x], quantize_output=True) for seed in (0, 1))
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))
    assert torch.equal(copy.deepcopy(first)(x), first(x))
    save_quantized(first, tmp_path / "mlp.safetensors")
    assert torch.equal(load_quantized(tmp_path / "mlp.safetensors")(x), first(x))
    for config in (LinearConfig(symmetric=False), LinearConfig(float_below=0, nonfinite="raise")):
        layer = QuantizedLinear.from_linear(_linear(0, 16, 5), None, relu=True, config=config)
        save_quantized(layer, tmp_path / "layer.safetensors")
        loaded = load_quantized(tmp_path / "layer.safetensors")
        assert torch.equal(loaded(x), layer(x))
        assert isinstance(loaded, QuantizedLinear)
        assert loaded.config == config
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


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


@pytest.mark.parametrize("place", [4, 200, -700, -9])
def test_a_corrupt_file_is_refused(tmp_path: Path, place: int) -> None:
    path = tmp_path / "layer.safetensors"
    save_quantized(QuantizedLinear.from_linear(_linear(0, 64, 16)), path)
    content = bytearray(path.read_bytes())
    content[place] ^= 0x20
    path.write_bytes(content)
    with pytest.raises(NumericsError, match=r"layer\.safetensors"):
        load_quantized(path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(NumericsError, match=r"layer\.safetensors"):
        load_quantized(path)
    with pytest.raises(NumericsError, match="absent"):
        load_quantized(tmp_path / "absent.safetensors")
