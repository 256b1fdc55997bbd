"""Formats and roundings against ml_dtypes and gfloat: every code, every number near which rounding can go wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.formats.formats import FORMATS, INTEGERS, Format
from cordillera.numerics.formats.rounding import Rounding, decode, encode, random_bits, round_to

ml_dtypes = pytest.importorskip("ml_dtypes")
gfloat = pytest.importorskip("gfloat")
gfloat_formats = pytest.importorskip("gfloat.formats")

SHORT = [name for name, format in FORMATS.items() if format.bits <= 16]
DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
INFOS = {
    "bf16": gfloat_formats.format_info_bfloat16,
    "fp16": gfloat_formats.format_info_binary16,
    "e4m3fn": gfloat_formats.format_info_ocp_e4m3,
    "e4m3fnuz": gfloat.FormatInfo(
        "e4m3fnuz",
        8,
        4,
        bias=8,
        has_nz=False,
        domain=gfloat.Domain.Finite,
        num_high_nans=0,
        has_subnormals=True,
        is_signed=True,
        is_twos_complement=False,
    ),
    "e5m2": gfloat_formats.format_info_ocp_e5m2,
    "e3m2": gfloat_formats.format_info_ocp_e3m2,
    "e2m3": gfloat_formats.format_info_ocp_e2m3,
    "e2m1": gfloat_formats.format_info_ocp_e2m1,
    "e8m0": gfloat_formats.format_info_ocp_e8m0,
}
MODES = {
    Rounding.nearest_even: gfloat.RoundMode.TiesToEven,
    Rounding.nearest_away: gfloat.RoundMode.TiesToAway,
    Rounding.toward_zero: gfloat.RoundMode.TowardZero,
}


def all_codes(format: Format) -> Tensor:
    return torch.arange(1 << format.bits)


def telling(format: Format, dtype: torch.dtype) -> Tensor:
    """Values of all codes, midpoints and what lies next to both, upper halves of float32, random patterns."""
    values = decode(all_codes(format), format).double()
    finite = values[values.isfinite()].unique()
    beyond = 2 * finite[-1] - finite[-2]  # the value that would follow the largest
    grid = (
        torch.cat([-beyond[None], finite, beyond[None]]) if not format.is_scale else torch.cat([finite, beyond[None]])
    )
    middle = (grid[1:] + grid[:-1]) / 2
    points = torch.cat([grid, middle, grid / 2, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e30, -1e-40])])
    points = points.to(dtype)
    up, down = torch.tensor(math.inf, dtype=dtype), torch.tensor(-math.inf, dtype=dtype)
    halves = (torch.arange(1 << 16) << 16).to(torch.int32).view(torch.float32).to(dtype)
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.float32:
        patterns = torch.randint(-(1 << 31), 1 << 31, (1 << 17,), generator=generator).to(torch.int32).view(dtype)
    else:
        patterns = torch.randn(1 << 16, dtype=dtype, generator=generator) * 2.0 ** torch.randint(
            -160, 140, (1 << 16,), generator=generator
        )
    near = torch.randn(1 << 16, dtype=dtype, generator=generator) * format.min_normal
    return torch.cat([points, points.nextafter(up), points.nextafter(down), halves, patterns, near])


def same(found: Tensor | np.ndarray, expected: Tensor | np.ndarray) -> None:
    """Equal as numbers, signs of zeros included, and NaN where NaN is."""
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    wrong = ~((np.isnan(a) & np.isnan(b)) | ((a == b) & (np.signbit(a) == np.signbit(b))))
    assert not wrong.any(), (a[wrong][:5], b[wrong][:5])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", SHORT)
def test_every_code_decodes_to_the_value_that_both_libraries_give(name: str) -> None:
    format = FORMATS[name]
    codes = all_codes(format).numpy()
    values = decode(all_codes(format), format)
    raw = codes.astype(np.uint16 if format.bits == 16 else np.uint8)
    same(values, raw.view(DTYPES[name]).astype(np.float64))
    same(values, gfloat.decode_ndarray(INFOS[name], codes))
    if format.dtype is not None:
        integer = torch.int16 if format.bits == 16 else torch.uint8
        same(values, torch.from_numpy(codes).to(integer).view(format.dtype).float())


@pytest.mark.parametrize("name", SHORT)
def test_every_code_is_found_again(name: str) -> None:
    format = FORMATS[name]
    codes = all_codes(format)
    values = decode(codes, format)
    numbers = ~values.isnan()
    found = encode(values[numbers], format).to(torch.int64) & ((1 << format.bits) - 1)
    assert torch.equal(found, codes[numbers])
    if format.has_nan:
        assert bool(decode(encode(values[~numbers], format), format).isnan().all())


@pytest.mark.parametrize("name", SHORT)
def test_limits_are_those_of_the_codes(name: str) -> None:
    format = FORMATS[name]
    values = decode(all_codes(format), format).double()
    positive = values[values.isfinite() & (values > 0)]
    assert (format.max, format.min_subnormal) == (float(positive.max()), float(positive.min()))
    assert format.min_normal == float(ml_dtypes.finfo(DTYPES[name]).smallest_normal)
    assert format.max_exponent == math.frexp(format.max)[1] - 1
    assert bool(values.isinf().any()) == format.has_infinity
    assert bool(values.isnan().any()) == format.has_nan


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", SHORT)
def test_nearest_even_is_that_of_ml_dtypes(name: str) -> None:
    format = FORMATS[name]
    x = telling(format, torch.float32)  # from float64 it rounds twice
    if format.is_scale:  # it rounds up whatever is subnormal in float32, above the smallest scale
        x = x[~((x > 2.0**-127) & (x < 2.0**-126))]
    if format.has_nan:
        expected = x.numpy().astype(DTYPES[name])
        same(round_to(x, format, saturate=False), expected.astype(np.float32))
        numbers = ~np.isnan(expected.astype(np.float32))
        codes = expected.view(np.uint16 if format.bits == 16 else np.uint8)
        found = encode(x, format, saturate=False).numpy().astype(np.int64) & ((1 << format.bits) - 1)
        assert np.array_equal(found[numbers], codes[numbers])
    else:  # it makes numbers of what is none: these are looked at elsewhere
        x = x[x.isfinite()]
        same(round_to(x, format), x.numpy().astype(DTYPES[name]).astype(np.float32))


@pytest.mark.cases(2)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rounding", list(MODES))
@pytest.mark.parametrize("name", SHORT)
def test_roundings_are_those_of_gfloat(name: str, rounding: Rounding, dtype: torch.dtype) -> None:
    format = FORMATS[name]
    x = telling(format, dtype)
    if format.is_scale:
        # It knows neither a smallest scale nor that nothing is scaled by a negative number, and it breaks ties by the
        # exponent's parity, where ml_dtypes and torch round up.
        x = x[(x >= format.min_normal) & x.isfinite()]
        if rounding is Rounding.nearest_even:
            x = x[torch.frexp(x).mantissa != 0.75]
    if not format.has_nan:
        x = x[~x.isnan()]
    finite = x[x.isfinite()]
    same(
        round_to(finite, format, rounding, saturate=True),
        gfloat.round_ndarray(INFOS[name], finite.double().numpy(), MODES[rounding], sat=True),
    )
    if format.has_nan:
        found = round_to(x, format, rounding, saturate=False)
        same(found, gfloat.round_ndarray(INFOS[name], x.double().numpy(), MODES[rounding], sat=False))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("name", SHORT)
def test_stochastic_rounding_is_that_of_gfloat_for_the_same_bits(name: str) -> None:
    format = FORMATS[name]
    x = telling(format, torch.float32)
    x = x[x.isfinite() & (x.abs() >= format.min_subnormal * (1 if format.is_scale else 2.0**-8))]
    if format.is_scale:
        x = x[x > 0]
    bits = random_bits(3, torch.arange(x.numel()))
    found = round_to(x, format, Rounding.stochastic, saturate=True, random=bits)
    mode = gfloat.RoundMode.Stochastic
    same(found, gfloat.round_ndarray(INFOS[name], x.double().numpy(), mode, True, bits.numpy(), 32))


@pytest.mark.parametrize("name", SHORT)
def test_what_is_no_number_never_becomes_one(name: str) -> None:
    format = FORMATS[name]
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf], dtype=dtype)
        for rounding in Rounding:
            for saturate in (None, False, True):
                found = round_to(x, format, rounding, saturate=saturate, random=torch.zeros(4, dtype=torch.int64))
                assert bool(found[:2].isnan().all())
                assert torch.equal(found[2:], x[2:]) if format.has_infinity else bool(found[2:].isnan().all())
                if format.has_nan:
                    coded = encode(x, format, rounding, saturate=saturate, random=torch.zeros(4, dtype=torch.int64))
                    same(decode(coded, format), found)
    if not format.has_nan:
        for bad in (math.nan, math.inf):
            with pytest.raises(NumericsError, match=r"has no code for \S+, element \(1, 0\) of \(2, 2\)"):
                encode(torch.tensor([[1.0, 2.0], [bad, 1.0]]), format)


def test_scales_are_positive() -> None:
    x = torch.tensor([0.0, -0.0, -3.0, 1e-45, 2.0**-128, 2.0**-127, 3.0, 2.0**127 * 1.9])
    expected = torch.tensor([math.nan] * 3 + [2.0**-127] * 3 + [4.0, 2.0**127])
    same(round_to(x, FORMATS["e8m0"]), expected)
    assert encode(x, FORMATS["e8m0"]).tolist() == [255, 255, 255, 0, 0, 0, 129, 254]


def test_float64_is_rounded_once() -> None:
    # through float32 this would become the midpoint, and then the even neighbour 1.0
    x = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert float(round_to(x, FORMATS["bf16"])) == 1 + 2.0**-7
    assert float(x.bfloat16()) == 1.0
    assert float(round_to(torch.tensor([1 + 2.0**-24 + 2.0**-50], dtype=torch.float64), FORMATS["fp32"])) == 1 + 2**-23


def test_integers_have_the_bounds_of_their_width() -> None:
    assert {name: (item.lowest, item.highest) for name, item in INTEGERS.items() if item.bits in (2, 4, 8)} == {
        "int8": (-128, 127),
        "uint8": (0, 255),
        "int4": (-8, 7),
        "uint4": (0, 15),
        "int2": (-2, 1),
        "uint2": (0, 3),
    }
