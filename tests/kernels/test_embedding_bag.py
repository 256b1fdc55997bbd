"""The lookup against a dense one-hot product, over every back end."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cordillera.kernels.embeddings.lookup import embedding_bag, linearise
from cordillera.kernels.embeddings.update import available_backends

BACKENDS = tuple(name for name in ("torch", "numba", "fbgemm") if available_backends()[name] is None)
SIZES = (7, 30, 7)
FIRST, ROWS = torch.tensor([0, 7, 0]), torch.tensor(SIZES)  # the third feature shares the first one's table


def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(0, 5, (3 * size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    limits = torch.repeat_interleave(ROWS, lengths.view(3, size).sum(1))
    return (torch.rand(int(offsets[-1]), generator=generator) * limits).long(), offsets


def reference(weight: Tensor, values: Tensor, offsets: Tensor, factors: Tensor | None) -> Tensor:
    size = (offsets.numel() - 1) // 3
    output = torch.zeros(size, 3, weight.shape[1], dtype=torch.float64)
    for f in range(3):
        for b in range(size):
            for p in range(int(offsets[f * size + b]), int(offsets[f * size + b + 1])):
                row = weight[FIRST[f] + values[p]].double()
                output[b, f] += row if factors is None else row * factors[p].double()
    return output


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bags_equal_their_sums_and_empty_bags_are_zero(backend: str, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(37, 6, generator=generator)
    values, offsets = batch(generator, 11)
    factors = torch.rand(values.numel(), generator=generator) if weighted else None
    for bounds in (offsets, offsets.int()):
        found = embedding_bag(weight, values, bounds, factors, FIRST, ROWS, dtype=torch.float32, backend=backend)
        assert found.misplaced == -1
        torch.testing.assert_close(
            found.output.double(), reference(weight, values, offsets, factors), rtol=1e-6, atol=1e-6
        )
        assert torch.equal(found.rows, linearise(values, offsets, FIRST, ROWS)[0])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_value_a_bag_is_the_same_with_and_without_offsets(backend: str, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(37, 6, generator=generator)
    values = (torch.rand(3, 2000, generator=generator) * ROWS[:, None]).long().view(-1)
    factors = torch.rand(6000, generator=generator) if weighted else None
    found, expected = (
        embedding_bag(weight, values, bounds, factors, FIRST, ROWS, dtype=torch.float32, backend=backend)
        for bounds in (None, torch.arange(6001))
    )
    assert torch.equal(found.output, expected.output)
    assert torch.equal(found.rows, expected.rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_low_precision_output_is_rounded_to_nearest_even(backend: str, dtype: torch.dtype) -> None:
    """Every pattern of the upper half with every kind of lower half; infinities and NaNs stay what they are."""
    upper = torch.arange(0, 2**16, dtype=torch.int64)
    bits = torch.cat([upper << 16 | lower for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    weight = bits.to(torch.uint32).view(torch.float32).view(-1, 8).contiguous()
    values = torch.arange(weight.shape[0])
    one = torch.zeros(1, dtype=torch.int64), torch.tensor([weight.shape[0]])
    found = embedding_bag(weight, values, None, None, *one, dtype=dtype, backend=backend).output[:, 0]
    expected = weight.to(dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_of_every_width_are_those_of_float64_in_ascending_order(dtype: torch.dtype, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    values, offsets = batch(generator, 5)
    factors = torch.rand(values.numel(), generator=generator) if weighted else None
    for width in (*range(1, 100), 128, 195):
        weight = torch.randn(37, width, generator=generator).to(
            torch.float64 if dtype is torch.float64 else torch.float32
        )
        found = embedding_bag(weight, values, offsets, factors, FIRST, ROWS, dtype=dtype, backend="numba").output
        scale = None if factors is None else factors.to(weight.dtype)
        expected = reference(weight, values, offsets, scale)
        assert torch.equal(found, expected.to(weight.dtype).to(dtype)), width  # bfloat16 by way of float32


def test_a_single_row_keeps_the_sign_of_its_zeros() -> None:
    for width in (3, 5, 16, 64):
        weight = torch.full((37, width), -0.0)
        for offsets in (None, torch.arange(7)):
            found = embedding_bag(
                weight, torch.zeros(6).long(), offsets, None, FIRST, ROWS, dtype=torch.float32, backend="numba"
            )
            assert found.output.signbit().all()


def test_squares_are_summed_within_the_rounding_of_float64() -> None:
    from cordillera.kernels.numba_support import sum_of_squares

    generator = torch.Generator().manual_seed(2)
    for size in range(150):
        values = torch.randn(size, generator=generator, dtype=torch.float64).mul_(10.0 ** (size % 9)).numpy()
        assert sum_of_squares(values) == pytest.approx(math.fsum(values * values), rel=1e-14)
    assert math.isnan(sum_of_squares(torch.tensor([1.0] * 40 + [math.nan], dtype=torch.float64).numpy()))


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("bad", [-1, 7, 2**40, -(2**62)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_misplaced_id_is_reported_and_never_read(backend: str, bad: int, one_hot: bool) -> None:
    values = torch.zeros(3 * 5000, dtype=torch.int64)
    values[[10_003, 12_000]] = bad  # the third feature, whose table has 7 rows though the weight has more
    offsets = None if one_hot else torch.arange(15_001)
    found = embedding_bag(torch.zeros(37, 4), values, offsets, None, FIRST, ROWS, dtype=torch.float32, backend=backend)
    assert found.misplaced == 10_003


@pytest.mark.parametrize("backend", BACKENDS)
def test_lookup_is_bitwise_equal_over_thread_counts(backend: str) -> None:
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(37, 6, generator=generator)
    values, offsets = batch(generator, 3000)
    threads, outputs = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            outputs.append(
                embedding_bag(weight, values, offsets, None, FIRST, ROWS, dtype=torch.float32, backend=backend).output
            )
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_bags_empty_give_zeros(backend: str) -> None:
    empty, bounds = torch.empty(0, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
    found = embedding_bag(torch.ones(37, 4), empty, bounds, None, FIRST, ROWS, dtype=torch.float32, backend=backend)
    assert torch.equal(found.output, torch.zeros(2, 3, 4))
