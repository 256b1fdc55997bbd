"""The norm over blocks is its formula in float64, forwards and backwards; blocks know nothing of one another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cordillera.kernels.dense.layers import block_norm

from .test_dense import DTYPES, beside_float64, random

WIDTHS = [(1, 256), (16, 256), (256, 256), (257, 256), (600, 256), (96, 32), (7, 3), (130, 65), (33, 1)]


def formula(x: Tensor, size: int, eps: float, hard_swish: bool) -> Tensor:
    """Block by block, as it is written."""
    blocks = [block / (block.square().mean(-1, keepdim=True) + eps).sqrt() for block in x.split(size, -1)]
    y = torch.cat(blocks, -1)
    return y * (y + 3).clamp(0, 6) / 6 if hard_swish else y


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hard_swish", [False, True])
@pytest.mark.parametrize(("width", "size"), WIDTHS)
def test_outputs_and_gradients_are_the_formulas(width: int, size: int, hard_swish: bool, dtype: torch.dtype) -> None:
    x = 3 * random(9, width, dtype=dtype, seed=width)
    beside_float64(
        lambda x: block_norm(x, size, 1e-3, hard_swish=hard_swish),
        lambda x: formula(x, size, 1e-3, hard_swish),
        [x],
        dtype,
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize(("width", "size"), WIDTHS)
def test_in_float64_too_and_for_second_derivatives(width: int, size: int) -> None:
    x = random(3, width, dtype=torch.float64).requires_grad_()
    torch.testing.assert_close(block_norm(x, size), formula(x, size, 1e-5, False), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: block_norm(x, size, hard_swish=True), x)
    single = x.detach().float().requires_grad_()
    of_single, of_double = (
        torch.autograd.grad(block_norm(y, size).pow(3).sum(), y, create_graph=True)[0] for y in (single, x)
    )
    second, exact = torch.autograd.grad(of_single.sum(), single)[0], torch.autograd.grad(of_double.sum(), x)[0]
    torch.testing.assert_close(second.double(), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max() + 1))


@settings(max_examples=30)
@given(
    width=st.integers(1, 100), size=st.integers(1, 40), block=st.integers(0, 99), power=st.integers(-8, 8),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_scaling_a_block_changes_no_other_one_and_not_its_own_result(
    width: int, size: int, block: int, power: int, seed: int
) -> None:
    """A power of two scales without rounding; with ``eps`` scaled away the result has the same bits."""
    x = random(4, width, seed=seed) + 0.1
    begin = block % -(-width // size) * size
    scaled = x.clone()
    scaled[2, begin : begin + size] *= 2.0**power
    before, after = block_norm(x, size, 1e-30), block_norm(scaled, size, 1e-30)
    assert torch.equal(before, after)
    doubled = x.clone()
    doubled[2, begin : begin + size] += 1
    other = torch.ones_like(x, dtype=torch.bool)
    other[2, begin : begin + size] = False
    assert torch.equal(block_norm(doubled, size)[other], block_norm(x, size)[other])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("hard_swish", [False, True])
def test_what_is_no_number_makes_nan_of_its_block_alone(bad: float, dtype: torch.dtype, hard_swish: bool) -> None:
    x = random(5, 70, dtype=dtype)
    exact = block_norm(x, 32, hard_swish=hard_swish)
    x[3, 40] = bad
    leaf = x.clone().requires_grad_()
    found = block_norm(leaf, 32, hard_swish=hard_swish)
    lost = torch.zeros(5, 70, dtype=torch.bool)
    lost[3, 32:64] = True
    assert torch.equal(found.isnan(), lost)
    assert torch.equal(found[~lost], exact[~lost])
    found.backward(torch.ones_like(found))
    assert torch.equal(leaf.grad.isnan(), lost)


@pytest.mark.parametrize("compute", [block_norm, lambda x: torch.vmap(block_norm)(x[None])[0]])
def test_squares_that_overflow_are_nan_and_not_zeros(compute: object) -> None:
    x = torch.ones(2, 16)
    x[1] = 1e25
    found = compute(x)  # type: ignore[operator]
    assert found[1].isnan().all()
    torch.testing.assert_close(found[0], torch.ones(16))


def test_rows_of_zeros_stay_zero_with_finite_gradients() -> None:
    x = torch.zeros(2, 300, requires_grad=True)
    found = block_norm(x, hard_swish=True)
    assert torch.equal(found, torch.zeros(2, 300))
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_layouts_empty_batches_and_threads_make_no_difference() -> None:
    x = random(40, 3, 520)
    expected = block_norm(x)
    assert torch.equal(block_norm(x.transpose(0, 1).contiguous().transpose(0, 1)), expected)
    assert block_norm(x[:0]).shape == (0, 3, 520)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(block_norm(x), expected)
    finally:
        torch.set_num_threads(before)


def test_the_activation_is_torchs() -> None:
    x = 4 * random(8, 64)
    torch.testing.assert_close(block_norm(x, hard_swish=True), F.hardswish(block_norm(x)))
