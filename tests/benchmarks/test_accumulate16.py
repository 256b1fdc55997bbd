"""Sums in int16: exact as long as nothing is clipped, every clip counted, none on the data of the choice."""

from __future__ import annotations

import pytest
import torch
from _accumulate16 import (
    LARGEST_DENSITY,
    Accumulation,
    accumulate16,
    choose_accumulation,
    integer_product16,
    never_saturates,
    split_outliers,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.quantization.integer_linear import LinearWeight, integer_product, make_weight, quantize_weight

seeds = st.integers(0, 2**31)


def _codes(seed: int, rows: int, inner: int) -> Tensor:
    return torch.randint(0, 256, (rows, inner), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def _weight(seed: int, outputs: int, inner: int, spread: float, zero_points: bool = False) -> LinearWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(outputs, inner, generator=generator) * spread).round().clamp(-128, 127).to(torch.int8)
    zero_point = torch.randint(-20, 20, (outputs,), generator=generator) if zero_points else None
    return make_weight(codes, torch.ones(outputs), zero_point, None)


def _one_by_one(a: list[int], b: list[int], spill: int) -> tuple[int, int]:
    """FBGEMM's reference, for one output."""
    total = accumulator = clips = 0
    a, b = a + [0] * (len(a) % 2), b + [0] * (len(b) % 2)

    def clip(value: int) -> int:
        nonlocal clips
        clips += not -32768 <= value <= 32767
        return max(-32768, min(32767, value))

    for k in range(0, len(a), 2):
        if k and k % spill == 0:
            total, accumulator = total + accumulator, 0
        accumulator = clip(accumulator + clip(a[k] * b[k] + a[k + 1] * b[k + 1]))
    return total + accumulator, clips


@settings(max_examples=40)
@given(seed=seeds, rows=st.integers(0, 4), outputs=st.integers(1, 4), inner=st.integers(0, 40),
       spread=st.sampled_from([5.0, 30.0, 90.0]), spill=st.sampled_from([2, 4, 8, 16, 256]))  # fmt: skip
def test_sums_and_clips_are_those_made_one_by_one(
    seed: int, rows: int, outputs: int, inner: int, spread: float, spill: int
) -> None:
    codes, weight = _codes(seed, rows, inner), _weight(seed, outputs, inner, spread)
    sums, clips = accumulate16(codes, weight.codes, spill)
    slow = [[_one_by_one(a, b, spill) for b in weight.codes.tolist()] for a in codes.tolist()]
    assert sums.tolist() == [[total for total, _ in row] for row in slow]
    assert clips == sum(count for row in slow for _, count in row)


@settings(max_examples=40)
@given(seed=seeds, bits=st.integers(1, 8), spread=st.sampled_from([10.0, 40.0]), spill=st.sampled_from([2, 8, 64]),
       zero_points=st.booleans())  # fmt: skip
def test_without_a_clip_the_product_is_exact(
    seed: int, bits: int, spread: float, spill: int, zero_points: bool
) -> None:
    codes, weight = _codes(seed, 5, 33), _weight(seed, 7, 33, spread, zero_points)
    found, clips = integer_product16(codes, 113, weight, Accumulation(bits, spill, 0.0))
    exact = integer_product(codes, 113, weight)
    assert clips or torch.equal(found, exact)
    if never_saturates(bits, spill):
        assert clips == 0
    if not torch.equal(found, exact):
        assert clips > 0


@settings(max_examples=40)
@given(seed=seeds, bits=st.integers(0, 8))
def test_outliers_and_the_rest_are_the_weight(seed: int, bits: int) -> None:
    codes = _weight(seed, 9, 31, 40).codes
    main, outliers = split_outliers(codes, bits)
    assert torch.equal(main + outliers, codes)
    assert not bool(((main != 0) & (outliers != 0)).any())
    if bits:
        assert int(main.min()) >= -(2 ** (bits - 1))
        assert int(main.max()) < 2 ** (bits - 1)
    else:
        assert not bool(main.any())
    if bits == 7:  # the published example: below -64 or at least 64
        assert torch.equal(outliers != 0, (codes.int() < -64) | (codes.int() >= 64))


def test_the_bound_is_tight_at_seven_bits_and_pairs() -> None:
    assert never_saturates(7, 2)
    assert not never_saturates(7, 4)
    assert not never_saturates(8, 2)
    _, clips = accumulate16(torch.full((1, 2), 255, dtype=torch.uint8), torch.full((1, 2), 127, dtype=torch.int8), 2)
    assert clips == 1  # the pair of pytorch issue 44939's kind


def test_the_choice_saturates_nowhere_on_its_data_and_dense_activations_do_without_it() -> None:
    weight, data = _weight(0, 64, 256, 18), _codes(1, 32, 256)
    assert accumulate16(data, split_outliers(weight.codes, 7)[0], 64)[1] > 0
    chosen = choose_accumulation(weight, [data])
    assert chosen is not None
    product, clips = integer_product16(data, 100, weight, chosen)
    assert clips == 0
    assert torch.equal(product, integer_product(data, 100, weight))
    assert chosen.density <= LARGEST_DENSITY
    # Sparse activations, as after ReLU, leave room for more.
    sparse = choose_accumulation(weight, [data * (data > 200)])
    assert sparse is not None
    assert sparse.cost <= chosen.cost


def test_weights_that_are_all_large_are_left_to_int32() -> None:
    codes = torch.full((4, 64), 127, dtype=torch.int8)
    weight = make_weight(codes, torch.ones(4), None, None)
    assert choose_accumulation(weight, [torch.full((2, 64), 255, dtype=torch.uint8)]) is None
    assert choose_accumulation(weight, [torch.full((2, 64), 1, dtype=torch.uint8)]) is not None


def test_nothing_to_sum_and_odd_spills() -> None:
    empty = make_weight(torch.zeros(3, 0, dtype=torch.int8), torch.ones(3), None, None)
    assert choose_accumulation(empty, [torch.zeros(2, 0, dtype=torch.uint8)]) is not None
    for spill in (0, 3, -2):
        with pytest.raises(NumericsError, match="pairs"):
            accumulate16(torch.zeros(1, 4, dtype=torch.uint8), torch.zeros(1, 4, dtype=torch.int8), spill)


@pytest.mark.parametrize("batches", [[], [torch.zeros(0, 512, dtype=torch.uint8)]])
def test_nothing_saturates_on_nothing_and_that_is_no_evidence(batches: list[torch.Tensor]) -> None:
    with pytest.raises(NumericsError, match="nothing to look for saturations in"):
        choose_accumulation(quantize_weight(torch.randn(4, 512), None), batches)
