"""Fused embedding rows: FBGEMM's bytes, errors within their bounds, and no value laundered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.quantization.rows import BITS, _refit, dequantize_rows, quantize_rows, row_bytes

QUANTIZED = torch.ops.quantized
PEERS = {8: QUANTIZED.embedding_bag_byte_prepack, 4: QUANTIZED.embedding_bag_4bit_prepack}
PEERS |= {2: QUANTIZED.embedding_bag_2bit_prepack}
UNPACK = {8: QUANTIZED.embedding_bag_byte_unpack, 4: QUANTIZED.embedding_bag_4bit_unpack}
UNPACK |= {2: QUANTIZED.embedding_bag_2bit_unpack}

seeds = st.integers(0, 2**31)
dims = st.sampled_from([4, 8, 12, 20, 64])


def _table(seed: int, dim: int, rows: int = 60) -> Tensor:
    """Rows of many sizes, some constant, some zero, some of denormals, some far from zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=generator) * torch.logspace(-14, 3, rows)[:, None]
    x[::7] = x[::7, :1]
    x[3::11] = 0
    x[4::11] = x[4::11] * 1e-38
    x[5::13] += 2 * x[5::13].abs().amax(1, keepdim=True)
    return x + 0.0  # of zeros of both signs FBGEMM takes either as the smallest


def _divisible(x: Tensor) -> Tensor:
    """Rows whose range can be walked in 200 steps; on the others torch's own search never ends."""
    low, high = x.aminmax(dim=1)
    step = (high - low) / 200
    return (high > low) & (low + step > low) & (high - step < high) & (step > 1e-30) & (step > x.abs().amax(1) * 1e-6)


def _error(x: Tensor, rows: Tensor, bits: int) -> Tensor:
    return (dequantize_rows(rows, bits, x.shape[1]).double() - x.double()).square().sum(1)


@settings(max_examples=40)
@given(seed=seeds, dim=dims, bits=st.sampled_from(BITS))
def test_bytes_and_values_are_those_of_fbgemm(seed: int, dim: int, bits: int) -> None:
    x = _table(seed, dim)
    rows = quantize_rows(x, bits)
    assert rows.shape == (len(x), row_bytes(dim, bits))
    assert torch.equal(rows, PEERS[bits](x))
    # Without torch's kernel, as odd widths go: columns that change no range take it away.
    wider = torch.cat([x, x[:, :1]], dim=1)
    odd = quantize_rows(wider, bits) if bits != 8 else quantize_rows(x, bits, random=torch.full(x.shape, 1 << 31))
    if bits != 8:
        payload = dim * bits // 8
        assert torch.equal(odd[:, :payload], rows[:, :payload])
        assert torch.equal(odd[:, -4:], rows[:, -4:])
    else:  # adding one half and cutting off is rounding to nearest, but for ties
        assert torch.equal(odd[:, dim:], rows[:, dim:])
        assert float((odd != rows).float().mean()) < 0.01
    assert torch.equal(dequantize_rows(rows, bits, dim), UNPACK[bits](rows))


@settings(max_examples=40)
@given(seed=seeds, dim=st.integers(1, 40), bits=st.sampled_from(BITS))
def test_errors_stay_within_the_stated_bounds_for_any_number_of_columns(seed: int, dim: int, bits: int) -> None:
    x = _table(seed, dim)
    levels = 2**bits - 1
    low, high = x.double().aminmax(dim=1)
    # narrow rows far from zero are refused in few bits, and have a test of their own
    x = x[(high == low) | (low.abs() * 2.0**-11 <= (high - low) / levels / 2.1)]
    low, high = x.double().aminmax(dim=1, keepdim=True)
    step = (high - low) / levels
    if bits == 8:
        # float32 rounds the reciprocal, the product and the value that comes back
        bound = step / 2 + 1e-8 + 255 * step * 2.0**-21 + x.abs() * 2.0**-23
    else:
        # scale and bias round to float16, the range is counted from the rounded bias
        step = step + low.abs() * 2.0**-11 / levels
        bound = step * (0.5 + levels * 2.0**-11) + low.abs() * 2.0**-11 + 2**bits * 2.0**-25
        bound = bound + x.abs() * 2.0**-20
    error = (dequantize_rows(quantize_rows(x, bits), bits, dim).double() - x.double()).abs()
    assert bool((error <= bound).all())


@settings(max_examples=25)
@given(seed=seeds, dim=dims, bits=st.sampled_from([4, 2]))
def test_the_greedy_clipping_is_never_worse_than_minmax_nor_than_torch(seed: int, dim: int, bits: int) -> None:
    x = _table(seed, dim)
    ours = _error(x, quantize_rows(x, bits, method="greedy"), bits)
    assert bool((ours <= _error(x, quantize_rows(x, bits), bits)).all())
    divisible = _divisible(x)
    theirs = _error(x[divisible], PEERS[bits](x[divisible], optimized_qparams=True), bits)
    assert bool((ours[divisible] <= theirs * (1 + 1e-6)).all())


def test_a_refitted_row_has_the_least_squares_of_its_codes() -> None:
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(2)) + 3.0
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    scale, bias = (high - low) / 15, low
    codes = ((x - bias) / scale).round().clamp(0, 15).double()
    found = _refit(x, scale, bias, 15)
    for row in range(len(x)):
        design = torch.stack([codes[row], torch.ones(64, dtype=torch.float64)], 1)
        best = torch.linalg.lstsq(design, x[row].double()[:, None]).solution[:, 0]
        assert [float(part[row]) for part in found] == pytest.approx(best.tolist(), abs=5e-3)


def test_the_greedy_clipping_of_4_bits_takes_a_tenth_of_the_error_away() -> None:
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(1))
    greedy, plain = (_error(x, quantize_rows(x, 4, method=method), 4).sum().sqrt() for method in ("greedy", "minmax"))
    assert float(greedy / plain) < 0.92


@settings(max_examples=20)
@given(seed=seeds, bits=st.sampled_from(BITS))
def test_rows_do_not_know_of_each_other_nor_of_strides(seed: int, bits: int) -> None:
    x = _table(seed, 16)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    method = "minmax" if bits == 8 else "greedy"
    rows = quantize_rows(x, bits, method=method)
    assert torch.equal(quantize_rows(x[order], bits, method=method), rows[order])
    assert torch.equal(quantize_rows(x.t().contiguous().t(), bits, method=method), rows)
    assert torch.equal(quantize_rows(x[:1].expand(3, 16), bits, method=method), rows[:1].expand(3, -1))


def test_rounding_by_random_numbers_is_unbiased_and_goes_to_a_neighbour() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 16, generator=generator)
    for bits in BITS:
        many = x.repeat(4000, 1)
        bits_of = torch.randint(0, 2**32, many.shape, generator=generator)
        drawn = dequantize_rows(quantize_rows(many, bits, random=bits_of), bits, 16).double().view(4000, 4, 16)
        step = (x.amax(1, keepdim=True) - x.amin(1, keepdim=True)).double() / (2**bits - 1)
        # At the ends of a row float16 leaves no neighbour on the other side.
        inner = (x > x.amin(1, keepdim=True)) & (x < x.amax(1, keepdim=True))
        assert bool(((drawn - x).abs() <= step * 1.01)[:, inner].all())
        assert bool(((drawn.mean(0) - x).abs() / step * 2 < 5 / 4000**0.5 + 2e-2)[inner].all())


@pytest.mark.parametrize("bits", BITS)
def test_constant_rows_come_back(bits: int) -> None:
    values = torch.tensor([0.0, 1.0, -2.5, 1000.3, 1e-40, -7e4 if bits == 8 else 6.1e4])
    x = values[:, None].expand(-1, 6)
    back = dequantize_rows(quantize_rows(x, bits), bits, 6)
    exact = x if bits == 8 else x.half().float()
    assert bool(((back - x).abs() <= (exact - x).abs()).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_by_name(bits: int, value: float) -> None:
    x = torch.randn(5, 8)
    x[3, 6] = value
    with pytest.raises(NumericsError, match=r"users: row 3, column 6 is"):
        quantize_rows(x, bits, name="users")


def test_what_float16_cannot_hold_is_refused_in_4_bits_and_kept_in_8() -> None:
    x = torch.randn(3, 4)
    x[1, 2] = -70_000.0
    with pytest.raises(NumericsError, match=r"row 1, column 2.*float16"):
        quantize_rows(x, 4)
    assert bool(torch.isfinite(dequantize_rows(quantize_rows(x, 8), 8, 4)).all())
    x[1, 2] = 1e6
    with pytest.raises(NumericsError, match=r"row 1, column 2.*scale.*float16"):
        quantize_rows(x, 4)
    x[1, 1:3] = torch.tensor([-3e38, 3e38])
    with pytest.raises(NumericsError, match=r"row 1, column 2.*overflows float32"):
        quantize_rows(x, 8)


def test_a_small_range_far_from_zero_is_refused_in_4_bits() -> None:
    x = torch.rand(2, 16, generator=torch.Generator().manual_seed(0))
    x[1] += 1000.3
    with pytest.raises(NumericsError, match=r"row 1, column \d+: the offset"):
        quantize_rows(x, 4)
    assert float((dequantize_rows(quantize_rows(x, 8), 8, 16) - x).abs().max()) < 1 / 255


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(0, 8), (0, 0), (3, 0)])
def test_no_rows_and_no_columns_are_rows_too(bits: int, shape: tuple[int, int]) -> None:
    rows = quantize_rows(torch.zeros(shape), bits)
    assert rows.shape == (shape[0], row_bytes(shape[1], bits))
    assert dequantize_rows(rows, bits, shape[1]).shape == shape


def test_what_are_no_rows_is_refused() -> None:
    with pytest.raises(NumericsError, match="float64"):
        quantize_rows(torch.zeros(2, 2, dtype=torch.float64), 8)
    with pytest.raises(NumericsError, match="not 3"):
        quantize_rows(torch.zeros(2, 2), 3)
    with pytest.raises(NumericsError, match="no method"):
        quantize_rows(torch.zeros(2, 2), 8, method="greedy")
    with pytest.raises(NumericsError, match="random"):
        quantize_rows(torch.zeros(2, 2), 8, random=torch.zeros(2, 3, dtype=torch.int64))
    rows = quantize_rows(torch.randn(2, 4), 8)
    with pytest.raises(NumericsError, match=r"uint8 \[R, 13\]"):
        dequantize_rows(rows, 8, 5)
    rows[1, 4:8] = 255  # NaN
    with pytest.raises(NumericsError, match="row 1: scale or bias"):
        dequantize_rows(rows, 8, 4)
