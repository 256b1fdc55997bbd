"""Scales, zero points and codes: FBGEMM's own where it has them, errors of half a step, and zero exact."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cordillera.errors import NumericsError
from cordillera.numerics.formats.formats import FORMATS, INTEGERS
from cordillera.numerics.formats.rounding import encode
from cordillera.numerics.quantization.quantizers import (
    SMALL_SCALE,
    AffineParameters,
    Granularity,
    QuantizedTensor,
    check_parameters,
    choose_affine,
    choose_symmetric,
    quantize,
)

UINT8, INT8 = INTEGERS["uint8"], INTEGERS["int8"]
floats = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-(2.0**-10), 2.0**-10, width=32)
floats |= st.floats(-8, 8, width=32)
shapes = st.tuples(st.integers(0, 9), st.integers(0, 11))


@settings(max_examples=300)
@given(ends=st.tuples(floats, floats))
def test_scale_and_zero_point_are_those_of_fbgemm(ends: tuple[float, float]) -> None:
    low, high = torch.tensor(sorted(ends)).unbind()
    scale, zero_point = choose_affine(low, high, UINT8)
    theirs = torch._choose_qparams_per_tensor(torch.stack([low, high]), False)
    assert zero_point is not None
    assert (float(scale), int(zero_point)) == (float(torch.tensor(theirs[0])), theirs[1])


@settings(max_examples=100)
@given(ends=st.tuples(floats, floats), name=st.sampled_from(list(INTEGERS)), power=st.booleans())
def test_zero_is_exact_and_ends_are_within_a_step(ends: tuple[float, float], name: str, power: bool) -> None:
    format = INTEGERS[name]
    low, high = torch.tensor(sorted(ends)).unbind()
    scale, zero_point = choose_affine(low, high, format, power_of_two=power)
    assert zero_point is not None
    assert format.lowest <= int(zero_point) <= format.highest
    if power:
        assert float(scale) <= SMALL_SCALE * 1.001 or math.frexp(float(scale))[0] == 0.5
    step = float(scale)
    assert (format.lowest - int(zero_point)) * step <= min(float(low), 0) + step * 0.51
    assert (format.highest - int(zero_point)) * step >= max(float(high), 0) - step * 0.51


@settings(max_examples=60)
@given(
    shape=shapes, seed=st.integers(0, 2**31), name=st.sampled_from(["int8", "uint8", "int4", "uint4", "uint2"]),
    granularity=st.sampled_from(list(Granularity)), symmetric=st.booleans(),
)  # fmt: skip
def test_values_come_back_within_half_a_step(
    shape: tuple[int, int], seed: int, name: str, granularity: Granularity, symmetric: bool
) -> None:
    format = INTEGERS[name]
    symmetric = symmetric and format.signed
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    block = {Granularity.group: 4, Granularity.block: (2, 3)}.get(granularity)
    quantized = quantize(x, format, granularity, symmetric=symmetric, block=block)
    back = quantized.dequantize()
    assert back.shape == x.shape
    # The affine zero point is rounded: an end may be off by half a step more.
    steps = quantized.scale.max() if quantized.scale.numel() else torch.tensor(0.0)
    assert bool(((back - x).abs() <= steps * (0.5001 if symmetric else 1.001)).all())
    transposed = quantize(x.t().contiguous().t(), format, granularity, symmetric=symmetric, block=block)
    assert torch.equal(transposed.payload, quantized.payload)
    zeros = quantize(torch.zeros(shape), format, granularity, symmetric=symmetric, block=block)
    assert not bool(zeros.dequantize().any())


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 7), columns=st.integers(1, 9))
def test_each_block_is_quantised_as_if_it_were_alone(seed: int, rows: int, columns: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    quantized = quantize(x, UINT8, Granularity.block, block=(2, 3))
    for i in range(0, rows, 2):
        for j in range(0, columns, 3):
            alone = quantize(x[i : i + 2, j : j + 3], UINT8)
            assert torch.equal(quantized.payload[i : i + 2, j : j + 3], alone.payload)
            assert float(quantized.scale[i // 2, j // 3]) == float(alone.scale)
    by_row = quantize(x, UINT8, Granularity.row)
    assert torch.equal(by_row.payload, quantize(x.t(), UINT8, Granularity.column).payload.t())


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-4, 10), zero_point=st.integers(0, 255))
def test_codes_are_those_of_torch(seed: int, scale: float, zero_point: int) -> None:
    x = torch.randn(500, 37, generator=torch.Generator().manual_seed(seed)) * 20
    given_ = AffineParameters(torch.tensor([scale]), torch.tensor([zero_point]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch deprecates its tensors of this dtype
        theirs = torch.quantize_per_tensor(x, scale, zero_point, torch.quint8)
    assert torch.equal(quantize(x, UINT8, parameters=given_).payload, theirs.int_repr())


def test_codes_beyond_the_range_of_integers_are_clamped_to_the_right_end() -> None:
    parameters = AffineParameters(torch.tensor([1e-4]), torch.tensor([3]))
    x = torch.tensor([3e38, -3e38, 1e6, -1e6])
    assert quantize(x, UINT8, parameters=parameters).payload.tolist() == [255, 0, 255, 0]


def test_denormals_have_finite_scales() -> None:
    x = torch.tensor([1e-41, -1e-42, 0.0])
    affine, symmetric = quantize(x, UINT8), quantize(x, INT8, symmetric=True)
    for quantized in (affine, symmetric):
        assert bool(torch.isfinite(1 / quantized.scale).all())
        assert float((quantized.dequantize() - x).abs().max()) < 1e-37


def test_constants_come_back() -> None:
    for value in (0.0, 1.5, -1000.3, 3e38, 1e-3):
        x = torch.full((3, 4), value)
        back = quantize(x, UINT8).dequantize()
        torch.testing.assert_close(back, x, rtol=1e-5, atol=SMALL_SCALE / 2)
        torch.testing.assert_close(quantize(x, INT8, symmetric=True).dequantize(), x, rtol=1e-6, atol=0)


def test_a_floating_point_payload_is_decoded() -> None:
    format = FORMATS["e4m3fn"]
    x = torch.tensor([[1.0, -2.5, 448.0]])
    quantized = QuantizedTensor(
        encode(x, format), torch.tensor([[0.5]]), None, format, Granularity.tensor, x.shape, (1, 3)
    )
    assert torch.equal(quantized.dequantize(), x * 0.5)
    assert quantized.nbytes == 3 + 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_by_name_and_index(value: float) -> None:
    x = torch.randn(2, 3, 4)
    x[1, 2, 0] = value
    with pytest.raises(NumericsError, match=r"weight: element \(1, 2, 0\) is"):
        quantize(x, INT8, name="weight")
    with pytest.raises(NumericsError, match="no range"):
        choose_affine(torch.tensor(-1.0), torch.tensor(value), UINT8)
    with pytest.raises(NumericsError, match="no range"):
        choose_symmetric(torch.tensor(value), INT8)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_scales_that_cannot_be_are_refused(scale: float) -> None:
    with pytest.raises(NumericsError, match="scale"):
        quantize(torch.randn(3), UINT8, parameters=AffineParameters(torch.tensor([scale]), torch.tensor([0])))


def test_what_does_not_fit_together_is_refused() -> None:
    for zero_point in (torch.tensor([256]), torch.tensor([-1]), torch.tensor([0.5])):
        with pytest.raises(NumericsError, match="zero points"):
            check_parameters(torch.tensor([1.0]), zero_point, UINT8)
    with pytest.raises(NumericsError, match="float64"):
        quantize(torch.zeros(3, dtype=torch.float64), INT8)
    with pytest.raises(NumericsError, match="negative"):
        quantize(torch.zeros(3), UINT8, symmetric=True)
    for granularity, block in ((Granularity.group, None), (Granularity.group, (1, 4)), (Granularity.row, 4)):
        with pytest.raises(NumericsError, match="block"):
            quantize(torch.zeros(3, 4), INT8, granularity, block=block)
    with pytest.raises(NumericsError, match="no range"):
        choose_affine(torch.tensor(2.0), torch.tensor(1.0), UINT8)
    with pytest.raises(NumericsError, match="no range"):
        choose_affine(torch.tensor(-3e38), torch.tensor(3e38), UINT8)


@settings(max_examples=60)
@given(peak=st.floats(2.0**-100, 2.0**100, width=32), name=st.sampled_from(["int8", "int4", "int2"]))
def test_symmetric_scales_are_the_least_powers_of_two_that_hold_the_peak(peak: float, name: str) -> None:
    format = INTEGERS[name]
    plain = choose_symmetric(torch.tensor(peak), format)
    power = choose_symmetric(torch.tensor(peak), format, power_of_two=True)
    assert plain.zero_point is None
    assert power.zero_point is None
    assert float(plain.scale) == pytest.approx(peak / format.highest, rel=1e-6)
    assert math.frexp(float(power.scale))[0] == 0.5
    assert float(power.scale) / 2 < float(plain.scale) <= float(power.scale)


def test_numbers_without_a_shape_and_empty_tensors_are_quantised() -> None:
    one = quantize(torch.tensor(-2.5), INT8, symmetric=True)
    assert one.payload.shape == one.dequantize().shape == ()
    assert float(one.dequantize()) == pytest.approx(-2.5)
    assert (one.block, one.nbytes) == ((1, 1), 1 + 4)
    for granularity, block in ((Granularity.row, None), (Granularity.column, None), (Granularity.group, 2)):
        empty = quantize(torch.zeros(0, 3), UINT8, granularity, block=block)
        assert empty.dequantize().shape == (0, 3)
        assert min(empty.block) >= 1


def test_blocks_have_the_sizes_that_their_granularity_says() -> None:
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    for granularity, block, size, scales in (
        (Granularity.tensor, None, (6, 5), (1, 1)),
        (Granularity.row, None, (1, 5), (6, 1)),
        (Granularity.column, None, (6, 1), (1, 5)),
        (Granularity.group, 2, (1, 2), (6, 3)),
        (Granularity.block, (4, 3), (4, 3), (2, 2)),
    ):
        found = quantize(x, UINT8, granularity, block=block)
        assert (found.block, tuple(found.scale.shape)) == (size, scales)
        assert found.nbytes == 30 + (4 + 4) * scales[0] * scales[1]
    for block in ((0, 3), (4, 0), 3, None):
        with pytest.raises(NumericsError, match="rows and columns of a block"):
            quantize(x, UINT8, Granularity.block, block=block)
    with pytest.raises(NumericsError, match="elements of a group"):
        quantize(x, UINT8, Granularity.group, block=0)
    ones = AffineParameters(torch.ones(6, 1), torch.zeros(6, 1, dtype=torch.int32))
    assert torch.equal(quantize(x.round(), INT8, Granularity.row, parameters=ones).dequantize(), x.round())
    with pytest.raises(NumericsError, match=r"scales or zero points for \[1, 5\] blocks"):
        quantize(x, INT8, Granularity.column, parameters=ones)


@settings(max_examples=100)
@given(ends=st.tuples(st.floats(-8, 8), st.floats(-8, 8)), bits=st.sampled_from([4, 8]))
def test_signed_codes_are_unsigned_ones_moved_by_half_of_all_codes(ends: tuple[float, float], bits: int) -> None:
    assume(max(ends) - min(ends) > 0.1)
    low, high = torch.tensor(sorted(ends)).unbind()
    signed, unsigned = (choose_affine(low, high, INTEGERS[f"{kind}{bits}"]) for kind in ("int", "uint"))
    assert float(signed.scale) == float(unsigned.scale)
    assert signed.zero_point is not None
    assert unsigned.zero_point is not None
    assert abs(int(signed.zero_point) + 2 ** (bits - 1) - int(unsigned.zero_point)) <= 1  # halves are rounded to even
