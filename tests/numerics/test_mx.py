"""Blocks with a shared scale, against gfloat's and by their own laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cordillera.errors import NumericsError
from cordillera.numerics.formats.formats import FORMATS
from cordillera.numerics.formats.mx import block_scales, round_to_blocks
from cordillera.numerics.formats.rounding import Rounding, decode, encode, random_bits

ELEMENTS = ["e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1"]


def some(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 2.0 ** torch.randint(
        -20, 20, (*shape[:-1], 1), generator=generator
    )


@pytest.mark.parametrize("name", ELEMENTS)
def test_blocks_are_those_of_gfloat(name: str) -> None:
    gfloat = pytest.importorskip("gfloat")
    formats = pytest.importorskip("gfloat.formats")
    blocks = {item.etype.name: item for item in formats.all_block_formats}
    info = blocks[f"ocp_{name.removesuffix('fn')}"]
    x = some((40, 32)).double()
    x[3] = 0
    x[4, 7] = 2.0**-3  # a power of two as the largest of a block
    x[4] = x[4].clamp(-(2.0**-3), 2.0**-3)
    with np.errstate(over="ignore"):
        expected = [gfloat.block.quantize_block(info, row, gfloat.compute_scale_amax) for row in x.numpy()]
    assert np.array_equal(round_to_blocks(x, FORMATS[name]).numpy(), np.stack(expected))


@pytest.mark.parametrize("name", ELEMENTS)
def test_rounded_numbers_are_decoded_codes_times_scales(name: str) -> None:
    x = some((3, 5, 70))
    bits = random_bits(1, torch.arange(x.numel()).view(x.shape))
    for rounding in Rounding:
        scales = block_scales(x, FORMATS[name])
        assert scales.shape == (3, 5, 3)
        scales = decode(encode(scales, FORMATS["e8m0"]), FORMATS["e8m0"]).double().repeat_interleave(32, -1)[..., :70]
        codes = encode(x.double() / scales, FORMATS[name], rounding, saturate=True, random=bits)
        rounded = round_to_blocks(x, FORMATS[name], rounding, random=bits)
        assert torch.equal((decode(codes, FORMATS[name]).double() * scales).float(), rounded)


@pytest.mark.parametrize("name", ELEMENTS)
def test_the_largest_of_a_block_has_the_exponent_of_the_largest_of_the_format(name: str) -> None:
    format = FORMATS[name]
    x = some((200, 32))
    x[0, 0], x[1, 0] = 2 * format.max * 1.0000001, format.max  # just above and just at a power of two times the largest
    x[0, 1:] = x[1, 1:] = 0
    largest, scales = x.abs().amax(1), block_scales(x, format)[:, 0]
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    assert bool((largest < scales * 2.0 ** (format.max_exponent + 1)).all())
    assert bool((largest >= scales * 2.0**format.max_exponent).all())


def test_blocks_of_zeros_of_tiny_and_of_huge_numbers_stay_finite() -> None:
    format = FORMATS["e2m1"]
    x = torch.zeros(4, 32)
    x[1, 0], x[2, 0], x[3, 0] = 1e-45, 2.5e38, -1.0
    assert block_scales(x, format)[:2, 0].tolist() == [2.0**-127] * 2
    rounded = round_to_blocks(x, format)
    assert bool(rounded.isfinite().all())
    assert torch.equal(rounded[0], torch.zeros(32))
    assert float(rounded[2, 0]) == pytest.approx(2.5e38, rel=0.25)


def test_what_is_no_number_spoils_its_own_block_and_no_other() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        x = some((2, 64))
        x[1, 40] = bad
        rounded = round_to_blocks(x, FORMATS["e2m1"])
        assert bool(rounded[1, 32:].isnan().all())
        assert bool(rounded[0].isfinite().all())
        assert bool(rounded[1, :32].isfinite().all())


def test_shapes_that_do_not_fit_are_refused_and_empty_ones_are_not() -> None:
    assert round_to_blocks(torch.zeros(0, 64), FORMATS["e2m1"]).shape == (0, 64)
    assert round_to_blocks(torch.zeros(2, 0), FORMATS["e2m1"]).shape == (2, 0)
    with pytest.raises(NumericsError, match="last dimension"):
        block_scales(torch.tensor(1.0), FORMATS["e2m1"])
