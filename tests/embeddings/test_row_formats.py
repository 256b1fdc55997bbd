"""Rows in few bits: bytes, bounds, averages, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.embeddings.row_formats import ROW_FORMATS, decode_rows, encode_rows
from cordillera.errors import NumericsError

from .reference_cached_rows import decode, encode, random_bits

INT8, INT4, FP16, FP32 = (ROW_FORMATS[name] for name in ("int8", "int4", "fp16", "fp32"))
ALL = list(ROW_FORMATS.values())
PREPACK = {
    "int8": (torch.ops.quantized.embedding_bag_byte_prepack, torch.ops.quantized.embedding_bag_byte_unpack),
    "int4": (torch.ops.quantized.embedding_bag_4bit_prepack, torch.ops.quantized.embedding_bag_4bit_unpack),
}


def some_rows(count: int = 2000, dim: int = 64, seed: int = 0) -> Tensor:
    """Rows of many sizes and offsets, some constant, some with zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2.5, 3, count).unsqueeze(1)
    rows = (torch.randn(count, dim, generator=generator) + torch.randn(count, 1, generator=generator)) * sizes
    rows[::50] = rows[::50, :1]
    rows[7::50] = 0
    return rows


def steps_of(payload: Tensor, name: str) -> Tensor:
    """The scales of rows, ``float64 [N, 1]``."""
    tail = payload[:, -8:-4] if name == "int8" else payload[:, -4:-2]
    return tail.contiguous().view(torch.float32 if name == "int8" else torch.float16).double()


@pytest.mark.parametrize("form", [INT8, INT4], ids=lambda form: form.name)
def test_bytes_are_those_of_torch(form) -> None:
    prepack, unpack = PREPACK[form.name]
    rows = some_rows()
    expected = prepack(rows)
    payload = encode_rows(rows, form)
    assert torch.equal(payload, expected)
    # torch may fuse the product and the sum
    difference = (decode_rows(payload, form, 64) - unpack(expected)).abs()
    assert bool((difference <= rows.abs().amax(1, keepdim=True) * 2.0**-21).all())


def test_fp16_and_fp32_rows_are_torchs_numbers() -> None:
    rows = some_rows() * torch.logspace(-6, 1, 64)
    assert torch.equal(encode_rows(rows, FP16).view(torch.float16), rows.half())
    assert torch.equal(decode_rows(encode_rows(rows, FP16), FP16, 64), rows.half().float())
    assert torch.equal(decode_rows(encode_rows(rows, FP32, rounding="stochastic"), FP32, 64), rows)


def test_every_float16_is_decoded_and_encoded_to_itself() -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    halves = bits[bits.isfinite()].view(1, -1)
    for rounding in ("nearest", "stochastic"):
        payload = encode_rows(halves.float(), FP16, rounding=rounding)
        assert torch.equal(payload.view(torch.int16), halves.view(torch.int16))
        assert torch.equal(
            decode_rows(payload, FP16, halves.shape[1]).view(torch.int32), halves.float().view(torch.int32)
        )


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), dim=st.sampled_from([2, 4, 6, 10]), magnitude=st.integers(-6, 3))
def test_bytes_and_numbers_equal_the_definition(form, rounding, seed, dim, magnitude) -> None:
    rows = some_rows(12, dim, seed) * 10.0**magnitude / 500
    options = {"seed": seed, "table": seed % 5, "first_row": seed % 7, "update": seed % 11}
    payload = encode_rows(rows, form, rounding=rounding, **options)
    numbers = decode_rows(payload, form, dim)
    for i, row in enumerate(rows.numpy()):
        expected = encode(row, form.name, rounding, seed, (seed % 5, seed % 7 + i), seed % 11)
        assert np.array_equal(payload[i].numpy(), expected)
        assert np.array_equal(numbers[i].numpy(), decode(expected, form.name, dim))


@pytest.mark.parametrize("form", [INT8, INT4], ids=lambda form: form.name)
def test_errors_stay_within_their_bounds(form) -> None:
    rows = some_rows(20_000, 8)
    for rounding in ("nearest", "stochastic"):
        payload = encode_rows(rows, form, rounding=rounding, seed=3)
        numbers, scale = decode_rows(payload, form, 8).double(), steps_of(payload, form.name)
        error, size = (numbers - rows).abs(), rows.abs().amax(1, keepdim=True).double()
        slack = size * 2.0**-22 + scale * 3e-3  # of float32, and of FBGEMM's 1e-8
        if rounding == "stochastic":
            assert bool(((error < scale + slack) | (error == 0)).all())
        elif form is INT8:
            assert bool((error <= scale / 2 + slack).all())
        else:
            assert bool((error <= scale * (0.5 + 15 / 2048) + rows.amin(1, keepdim=True).abs() / 2048 + slack).all())


@pytest.mark.parametrize("range_", [1e-3, 1e-5, 1e-8, 1e-30])
def test_small_rows_keep_their_precision(range_) -> None:
    rows = torch.rand(200, 16, generator=torch.Generator().manual_seed(0)) * range_
    for rounding, most in (("nearest", 0.51), ("stochastic", 1.01)):
        payload = encode_rows(rows, INT8, rounding=rounding)
        error = (decode_rows(payload, INT8, 16).double() - rows).abs() / steps_of(payload, "int8")
        assert float(error.max()) <= most


@pytest.mark.parametrize("form", [FP16, INT8, INT4], ids=lambda form: form.name)
def test_stochastic_rounding_is_right_on_average(form) -> None:
    row = torch.tensor([[-0.7312, 0.1234567, 0.0321, 0.9, -0.25, 3e-4, 0.5, -1.0]])
    rows = row.expand(100, 8)  # each with random numbers of its own, and others in each update
    draws = torch.cat(
        [decode_rows(encode_rows(rows, form, rounding="stochastic", update=i), form, 8) for i in range(100)]
    ).double()
    deviation = draws.std(0) / math.sqrt(len(draws))
    assert bool(((draws.mean(0) - row).abs() <= 4 * deviation + 1e-7).all())
    assert bool((draws.std(0) > 0).any())


def test_random_numbers_are_those_of_their_keys_alone() -> None:
    rows = some_rows(40, 8)
    whole = encode_rows(rows, INT4, rounding="stochastic", seed=5, table=2, update=9)
    pieces = [
        encode_rows(rows[i : i + 7], INT4, rounding="stochastic", seed=5, table=2, first_row=i, update=9)
        for i in range(0, 40, 7)
    ]
    assert torch.equal(whole, torch.cat(pieces))
    for other in ({"seed": 6}, {"table": 3}, {"first_row": 1}, {"update": 10}):
        options = {"seed": 5, "table": 2, "first_row": 0, "update": 9, **other}
        assert not torch.equal(whole, encode_rows(rows, INT4, rounding="stochastic", **options))


def test_random_bits_are_those_of_splitmix64() -> None:
    """The published first outputs of SplitMix64 with seed 1234567 are what its increment and finaliser give."""
    state, outputs = 1234567, []
    from .reference_cached_rows import mix

    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973]
    from cordillera.kernels.embeddings.numba_random import absorb, fraction, seeded

    state = seeded(77)
    for key in (1, 2, 3, 4):
        state = absorb(np.uint64(state), key)
    assert int(state) >> 32 == random_bits(77, 1, 2, 3, 4)
    assert float(fraction(np.uint64(state))) == (random_bits(77, 1, 2, 3, 4) >> 8) / 2**24


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -(2.0**-14), 1e-30])
@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
def test_rows_of_one_number_come_back_exactly(form, value, rounding) -> None:
    row = torch.full((1, 6), value)
    back = decode_rows(encode_rows(row, form, rounding=rounding), form, 6)
    if value == 1e-30 and form in (FP16, INT4):  # less than half of the smallest float16
        assert float(back.abs().max()) <= 2.0**-24
    else:
        assert torch.equal(back, row)


def test_an_encoded_row_encodes_to_itself_in_eight_bits() -> None:
    rows = decode_rows(encode_rows(some_rows(), INT8), INT8, 64)
    again = decode_rows(encode_rows(rows, INT8), INT8, 64)
    torch.testing.assert_close(again, rows, rtol=1e-6, atol=1e-6)


def test_rows_that_no_format_can_hold_are_refused_with_their_place() -> None:
    rows = some_rows(20, 4)
    for form in ALL:
        for bad in (math.nan, math.inf, -math.inf):
            spoilt = rows.clone()
            spoilt[13, 2] = bad
            with pytest.raises(NumericsError, match=r"row 113 of table 'items': column 2 is -?(nan|inf)"):
                encode_rows(spoilt, form, first_row=100, name="items")
    for form, large in ((INT4, 70_000.0), (INT4, -70_000.0), (INT4, 1.2e6), (FP16, 65_536.0), (INT8, 3e38)):
        spoilt = rows.clone()
        spoilt[5, 0], spoilt[5, 1] = large, -large
        with pytest.raises(NumericsError, match=r"row 5 of table 'items'.*float"):
            encode_rows(spoilt, form, name="items")
    assert decode_rows(encode_rows(torch.full((1, 2), 65_504.0), INT4), INT4, 2).tolist() == [[65_504.0, 65_504.0]]


def test_sizes_are_those_promised() -> None:
    sizes = {form.name: form.row_bytes(64) for form in ALL}
    assert sizes == {"fp32": 256, "fp16": 128, "int8": 72, "int4": 36}
    for form in ALL:
        assert encode_rows(torch.zeros(0, 6), form).shape == (0, form.row_bytes(6))
    with pytest.raises(NumericsError, match="even width, got 7"):
        encode_rows(torch.zeros(1, 7), INT4)
    with pytest.raises(NumericsError, match=r"uint8 \[N, 12\]"):
        decode_rows(torch.zeros(3, 11, dtype=torch.uint8), INT8, 4)


def test_any_layout_of_memory_gives_the_same_bytes() -> None:
    rows = some_rows(30, 8)
    for form in ALL:
        expected = encode_rows(rows, form)
        assert torch.equal(encode_rows(rows.t().contiguous().t(), form), expected)
        assert torch.equal(encode_rows(rows.double(), form), expected)
        assert torch.equal(decode_rows(expected.t().contiguous().t(), form, 8), decode_rows(expected, form, 8))
