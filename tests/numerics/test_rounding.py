"""Rounding by its own laws: nearness, order, expectation, and random bits that depend on nothing but their keys."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.formats.formats import FORMATS
from cordillera.numerics.formats.rounding import Rounding, decode, encode, random_bits, round_to

ALL = [name for name in FORMATS if name != "fp32"]
SIGNED = [name for name in ALL if name != "e8m0"]
DETERMINISTIC = [Rounding.nearest_even, Rounding.nearest_away, Rounding.toward_zero]


def patterns(dtype: torch.dtype, count: int = 1 << 14) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, dtype=dtype, generator=generator)
    return x * 2.0 ** torch.randint(-45, 20, (count,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SIGNED)
def test_results_are_the_neighbours_of_what_was_rounded(name: str, dtype: torch.dtype) -> None:
    format = FORMATS[name]
    x = patterns(dtype)
    x = x[x.abs() <= format.max]
    values = decode(torch.arange(1 << format.bits), format).double()
    values = values[values.isfinite()].unique()
    above = values[torch.searchsorted(values, x.double())]
    below = values[torch.searchsorted(values, x.double(), right=True) - 1]
    even, away, cut = (round_to(x, format, rounding).double() for rounding in DETERMINISTIC)
    distance = torch.minimum(above - x, x - below)
    assert torch.equal((even - x).abs(), distance)
    assert torch.equal((away - x).abs(), distance)
    assert bool((away.abs() >= even.abs()).all())
    assert torch.equal(cut, torch.where(x < 0, above, below))
    drawn = round_to(x, format, Rounding.stochastic, random=random_bits(0, torch.arange(x.numel()))).double()
    assert bool(((drawn == above) | (drawn == below)).all())


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", ALL)
def test_rounding_keeps_the_order_and_what_is_rounded_already(name: str, rounding: Rounding) -> None:
    format = FORMATS[name]
    x = patterns(torch.float32).sort().values
    if format.is_scale:
        x = x[x > 0]
    rounded = round_to(x, format, rounding)
    assert bool((rounded[1:] >= rounded[:-1]).all())
    assert torch.equal(round_to(rounded, format, rounding), rounded)


@pytest.mark.parametrize("name", ALL)
def test_stochastic_rounding_keeps_what_is_rounded_already(name: str) -> None:
    format = FORMATS[name]
    values = decode(torch.arange(1 << format.bits), format)
    values = values[values.isfinite()]
    bits = torch.full(values.shape, (1 << 32) - 1)
    assert torch.equal(round_to(values, format, Rounding.stochastic, random=bits), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALL)
def test_stochastic_rounding_is_unbiased(name: str, dtype: torch.dtype) -> None:
    format = FORMATS[name]
    draws = 20_000
    # full precision, between the two smallest values, far below the smallest, and the last step before the largest
    points = torch.tensor(
        [format.min_normal * 1.3, format.min_normal * 0.7, format.min_subnormal * 0.011, format.max * 0.99, 1.37],
        dtype=torch.float64,
    )
    points = points[points > format.min_subnormal] if format.is_scale else points
    points = points.to(dtype).double()  # not more exact than what is rounded
    points = torch.cat([points, -points]) if not format.is_scale else points
    x = points.to(dtype).expand(draws, -1)
    bits = random_bits(7, torch.arange(draws)[:, None], torch.arange(points.numel()))
    drawn = round_to(x, format, Rounding.stochastic, saturate=True, random=bits).double()
    low, high = drawn.min(0).values, drawn.max(0).values
    share = (points - low) / (high - low)
    sigma = (high - low) * (share * (1 - share) / draws).sqrt()
    assert bool((high > low).all())
    assert bool(((drawn.mean(0) - points).abs() <= 4 * sigma).all())


def update(weight: Tensor, rows: Tensor, number: int, seed: int = 11) -> Tensor:
    """One stochastic update of some rows of a table, keyed by where each weight stands in it."""
    gradient = ((rows[:, None] * 31 + torch.arange(weight.shape[1]) * 7 + number) % 17 - 8) * 1e-5
    bits = random_bits(seed, 2, rows[:, None], torch.arange(weight.shape[1]), number)
    return round_to(weight - gradient, FORMATS["fp16"], Rounding.stochastic, random=bits)


def test_stochastic_rounding_is_the_same_for_any_threads_order_and_shards() -> None:
    table = round_to(torch.randn(4096, 32, generator=torch.Generator().manual_seed(0)), FORMATS["fp16"])
    rows = torch.arange(4096)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = update(table, rows, 5)
        torch.set_num_threads(2)
        assert torch.equal(update(table, rows, 5), expected)
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(update(table, rows, 6), expected)
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(1))
    assert torch.equal(update(table[order], order, 5), expected[order])
    assert torch.equal(torch.cat([update(table[part], part, 5) for part in rows.chunk(4)]), expected)


def many_small_updates(rounding: Rounding, weights: int) -> Tensor:
    weight = torch.ones(weights)
    place = torch.arange(weights)
    for number in range(500):
        bits = random_bits(0, 0, place, 0, number) if rounding is Rounding.stochastic else None
        weight = round_to(weight - 1e-5, FORMATS["fp16"], rounding, random=bits)
    return weight


def test_five_hundred_small_updates_move_a_weight_of_fp16() -> None:
    weight = many_small_updates(Rounding.stochastic, 2000)
    # each of 500 updates takes one step of 2**-11 with probability 1e-5 / 2**-11
    step, chance = 2.0**-11, 1e-5 / 2.0**-11
    sigma = step * (500 * chance * (1 - chance)) ** 0.5
    assert float((1 - weight).mean()) == pytest.approx(0.005, abs=4 * sigma / 2000**0.5)
    assert bool(((1 - weight - 0.005).abs() < 6 * sigma).all())
    assert torch.equal(many_small_updates(Rounding.nearest_even, 1), torch.ones(1))


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_small_updates_do_not_move_it_in_fbgemm_on_a_cpu() -> None:
    pytest.importorskip("fbgemm_gpu")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(1, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        weights_precision=SparseType.FP16,
        stochastic_rounding=True,
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=1e-5,
        pooling_mode=PoolingMode.SUM,
    )
    weight = tables.split_embedding_weights()[0]
    weight.fill_(1.0)
    for _ in range(20):  # plain SGD remembers nothing: what does not move in one update never does
        tables(torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1])).backward(torch.ones(1, 4))
    assert torch.equal(weight.float(), torch.ones(1, 4))


def mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 % 2**64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@settings(max_examples=60)
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(-(2**63), 2**63 - 1), min_size=0, max_size=4))
def test_random_bits_follow_the_published_mixer(seed: int, keys: list[int]) -> None:
    state = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
    for key in keys:
        state = mix(((state ^ key % 2**64) + 0x9E3779B97F4A7C15) % 2**64)
    assert int(random_bits(seed, *keys)) == state >> 32
    assert int(random_bits(seed, *(torch.tensor(key) for key in keys))) == state >> 32


def test_random_bits_are_even_and_independent_of_each_other() -> None:
    bits = random_bits(0, torch.arange(512)[:, None], torch.arange(512))
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 2**32
    ones = torch.stack([(bits >> place) & 1 for place in range(32)]).double()
    assert float((ones.mean((1, 2)) - 0.5).abs().max()) < 5 * 0.5 / 512
    uniform = bits.double() / 2**32 - 0.5
    other_seed = random_bits(1, torch.arange(512)[:, None], torch.arange(512)).double() / 2**32 - 0.5
    for shifted in (uniform.roll(1, 0), uniform.roll(1, 1), other_seed):
        assert abs(float((uniform * shifted).mean() * 12)) < 5 / 512


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@settings(max_examples=200)
def test_truncation_and_the_rest_make_the_number_again(value: float) -> None:
    cut = round_to(torch.tensor([value]), FORMATS["bf16"], Rounding.toward_zero)
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    assert float(cut) == struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]


@pytest.mark.parametrize("name", SIGNED)
def test_subnormal_results_are_flushed_with_their_sign_when_asked(name: str) -> None:
    format = FORMATS[name]
    normal, below = format.min_normal, format.min_normal - format.min_subnormal
    x = torch.tensor([normal, -normal, below, -below])
    flushed = round_to(x, format, flush_subnormals=True)
    assert torch.equal(flushed, torch.tensor([normal, -normal, 0, 0]))
    assert torch.equal(torch.signbit(flushed), torch.tensor([False, True, False, format.has_negative_zero]))
    assert torch.equal(round_to(x, format), x)


def test_strides_and_empty_tensors_do_not_matter() -> None:
    x = torch.randn(6, 8)
    for format in FORMATS.values():
        assert torch.equal(round_to(x.t(), format).nan_to_num(), round_to(x, format).t().nan_to_num())
        expanded = x[:1].expand(3, 8)
        assert torch.equal(round_to(expanded, format)[2].nan_to_num(), round_to(x[0], format).nan_to_num())
        assert round_to(x[:0], format).shape == (0, 8)
        assert encode(x[:0].abs(), format).shape == (0, 8)


def test_missing_random_bits_and_other_dtypes_are_refused() -> None:
    with pytest.raises(NumericsError, match=r"random: stochastic rounding of \(3,\) needs random bits.*got none"):
        round_to(torch.ones(3), FORMATS["bf16"], Rounding.stochastic)
    with pytest.raises(NumericsError, match=r"got bits of shape \(2,\)"):
        round_to(torch.ones(3), FORMATS["bf16"], Rounding.stochastic, random=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(NumericsError, match=r"float32 or float64, got torch\.float16"):
        round_to(torch.ones(3).half(), FORMATS["bf16"])
