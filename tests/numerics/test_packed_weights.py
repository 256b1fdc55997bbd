"""Layers whose weights alone are packed: products by the values of the codes, and shapes that kernels do not take."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.quantization.integer_linear import quantize_weight
from cordillera.numerics.quantization.weight_only import HalfWeights, Int4Weights, Int8Weights

needs_kernels = pytest.mark.skipif(
    not {"x86", "fbgemm"} & set(torch.backends.quantized.supported_engines), reason="torch has no x86 kernels here"
)


@needs_kernels
def test_weights_of_half_precision_are_multiplied_in_single() -> None:
    generator = torch.Generator().manual_seed(0)
    values, bias = torch.randn(33, 65, generator=generator), torch.randn(33, generator=generator)
    x = torch.randn(7, 65, generator=generator)
    expected = F.linear(x, values.half().float(), bias).relu()
    torch.testing.assert_close(HalfWeights(values, bias)(x, relu=True), expected, rtol=1e-4, atol=1e-4)
    x[3, 2] = float("nan")
    assert HalfWeights(values, bias)(x).isnan().all(1).tolist() == [i == 3 for i in range(7)]
    values[4, 1] = 70_000.0
    with pytest.raises(NumericsError, match=r"element \(4, 1\) .* float16"):
        HalfWeights(values, bias)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_alone_multiply_by_the_values_of_their_codes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values, bias = torch.randn(48, 128, generator=generator), torch.randn(48, generator=generator)
    x = torch.randn(5, 128, generator=generator).to(dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 0.15
    eight = Int8Weights(quantize_weight(values, bias))
    four = Int4Weights(*Int4Weights.quantize(values, group=32), bias)
    for packed, codes in ((eight, eight.weight.dequantize()), (four, four.dequantize())):
        expected = F.linear(x.float(), codes, bias)
        torch.testing.assert_close(packed(x).float(), expected, rtol=1e-2 if tolerance > 1e-2 else 0, atol=tolerance)
    spread = values.view(48, 4, 32).amax(2) - values.view(48, 4, 32).amin(2)
    assert bool(((four.dequantize() - values).abs().view(48, 4, 32).amax(2) <= spread / 30 * 1.001).all())
    with pytest.raises(NumericsError, match="groups"):
        Int4Weights.quantize(values[:, :100])
    with pytest.raises(NumericsError, match="symmetric"):
        Int8Weights(quantize_weight(values, bias, symmetric=False))


@needs_kernels
def test_groups_of_four_bits_whose_steps_have_no_inverse_have_a_step_of_one() -> None:
    values = torch.full((16, 64), 3.0)
    values[0, :32] = torch.linspace(0, 1e-40, 32)
    codes, parameters = Int4Weights.quantize(values, group=32)
    assert bool((parameters[:, :, 0] == 1.0).all())
    assert torch.equal(Int4Weights(codes, parameters, None).dequantize()[1:], values[1:])
    torch.testing.assert_close(Int4Weights(codes, parameters, None).dequantize(), values, rtol=1e-2, atol=0.01)
    values = torch.full((16, 64), 0.02)
    codes, parameters = Int4Weights.quantize(values, group=32)
    held = Int4Weights(codes, parameters.bfloat16().float(), None).dequantize()  # as plans store it
    torch.testing.assert_close(held, values, rtol=2**-8, atol=0)


@needs_kernels
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("shape", [(5, 64, 32), (3, 33, 17), (1, 1, 1), (0, 32, 16), (4, 0, 16), (4, 32, 0)])
def test_any_shape_is_close_to_float(bits: int, shape: tuple[int, int, int]) -> None:
    rows, inner, outputs = shape
    torch.manual_seed(0)
    values, bias, x = torch.randn(outputs, inner), torch.randn(outputs), torch.randn(rows, inner)
    if bits == 16:
        weights = HalfWeights(values, bias)
    elif bits == 4 and Int4Weights.takes(values, 32):
        weights = Int4Weights(*Int4Weights.quantize(values), bias)
    else:
        weights = Int8Weights(quantize_weight(values, bias))
    exact, found = F.linear(x, values, bias).relu(), weights(x, relu=True)
    step = {16: 2**-11, 8: 1 / 127, 4: 1 / 15}[bits] * 4
    assert found.shape == exact.shape
    torch.testing.assert_close(found, exact, rtol=0, atol=step * max(inner, 1) ** 0.5 * 4)
    torch.testing.assert_close(weights(x.t().contiguous().t(), relu=True), found, rtol=1e-4, atol=1e-4)


@needs_kernels
def test_values_that_no_code_stands_for_are_refused_with_their_place() -> None:
    values = torch.zeros(16, 32)
    values[1, 2] = float("nan")
    for pack in (
        lambda: HalfWeights(values, None),
        lambda: Int8Weights(quantize_weight(values, None)),
        lambda: Int4Weights.quantize(values),
    ):
        with pytest.raises(NumericsError, match=r"\(1, 2\)"):
            pack()


def test_weights_of_odd_shapes_multiply_inputs_of_either_width() -> None:
    generator = torch.Generator().manual_seed(3)
    for outputs, inner in ((1, 1), (5, 33), (48, 31), (17, 64)):
        weight = Int8Weights(quantize_weight(torch.randn(outputs, inner, generator=generator), None))
        x = torch.randn(7, inner, generator=generator).bfloat16()
        expected = F.linear(x.double(), weight.weight.dequantize().double())
        torch.testing.assert_close(weight(x.float()).double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weight(x).double(), expected, rtol=2e-2, atol=2e-2)
        assert weight(x).dtype == torch.bfloat16
