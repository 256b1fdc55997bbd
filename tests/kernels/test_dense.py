"""CPU kernels of dense layers: equal to their definitions in float64, whatever the layout, size and threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cordillera.kernels.dense import numba_layers as numba_dense
from cordillera.kernels.dense.layers import factorization_machine, left_product, linear_relu, silu, stacked_layer_norm
from cordillera.kernels.repeatable import in_order

# Of the largest entry: float32 sums of hundreds of terms; a few roundings to 8 bits in the forward or the backward.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


def close(found: Tensor | None, expected: Tensor, dtype: torch.dtype) -> None:
    assert found is not None
    assert found.shape == expected.shape
    if expected.numel():
        difference = (found.double() - expected.double()).abs().max()
        assert difference <= TOLERANCE[dtype] * max(1.0, expected.double().abs().max().item())


def beside_float64(
    function: Callable[..., Any], reference: Callable[..., Any], inputs: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Outputs and all gradients equal the reference's in float64 on the same (rounded) numbers."""
    mine = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, expected = function(*mine), reference(*exact)
    found, expected = (out if isinstance(out, tuple) else (out,) for out in (found, expected))
    generator = torch.Generator().manual_seed(7)
    grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in found]
    torch.autograd.backward(found, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    for out, true in zip(found, expected, strict=True):
        assert out.dtype == dtype
        close(out, true, dtype)
    for one, other in zip(mine, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == one.dtype
        close(one.grad, other.grad, dtype)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def columns_last(x: Tensor) -> Tensor:
    """The same tensor with its last two dimensions transposed in memory."""
    return x.mT.contiguous().mT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 3, 2, 5), (1, 1, 0, 1), (3, 0, 4, 7), (513, 20, 12, 16), (20, 3, 7, 312)])
def test_stacked_layer_norm_equals_its_definition(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    samples, ours, more, width = shape
    weight, bias = random(width, seed=1), random(width, seed=2)

    def reference(first: Tensor, second: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = torch.cat([first, second], dim=1) + residual
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    first, second = (random(samples, rows, width, dtype=dtype, seed=rows + 3) for rows in (ours, more))
    residual = random(samples, ours + more, width, dtype=dtype) * 3 + 1
    for lie in (columns_last, Tensor.contiguous):
        beside_float64(stacked_layer_norm, reference, (first, lie(second), lie(residual), weight, bias), dtype)


def test_stacked_layer_norm_takes_the_widest_dtype() -> None:
    first, second = random(5, 2, 4, dtype=torch.bfloat16), random(5, 1, 4, dtype=torch.bfloat16, seed=1)
    residual = random(5, 3, 4, seed=2).requires_grad_()
    leaf = first.requires_grad_()
    out = stacked_layer_norm(leaf, second, residual, torch.ones(4), torch.zeros(4))
    assert out.dtype == torch.float32
    out.square().sum().backward()
    assert leaf.grad is not None
    assert residual.grad is not None
    assert (leaf.grad.dtype, residual.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stacked_layer_norm_lies_transposed_as_the_next_layer_reads_it(dtype: torch.dtype) -> None:
    first, residual = random(300, 16, 16, dtype=dtype), columns_last(random(300, 32, 16, dtype=dtype))
    out = stacked_layer_norm(first, columns_last(first), residual, torch.ones(16), torch.zeros(16))
    assert out.stride() == residual.stride()


def test_stacked_layer_norm_of_constant_rows_is_its_bias() -> None:
    bias, fives = torch.arange(8.0), torch.full((3, 2, 8), 5.0)
    out = stacked_layer_norm(fives, fives, torch.ones(3, 4, 8), torch.ones(8), bias)
    assert torch.equal(out, bias.expand(3, 4, 8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_in_its_row_and_is_not_hidden(value: float, place: int, dtype: torch.dtype) -> None:
    parts = [random(2, rows, 16, dtype=dtype, seed=rows) for rows in (4, 5, 9)]
    parts[place][1, 3, 2] = value
    out = stacked_layer_norm(*parts, torch.ones(16), torch.zeros(16))
    hit = 3 if place != 1 else 7
    assert out[1, hit].isnan().all()
    assert out[0].isfinite().all()
    assert out[1, [row for row in range(9) if row != hit]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_relu_passes_nan_on_forwards_and_backwards(dtype: torch.dtype) -> None:
    x, weight, bias = random(6, 4, dtype=dtype), torch.eye(4, dtype=dtype), torch.zeros(4, dtype=dtype)
    x[2, 1] = float("nan")
    leaf = bias.requires_grad_()
    out = linear_relu(x, weight, leaf)
    assert torch.equal(out.isnan().any(1), torch.arange(6) == 2)
    grad = torch.ones_like(out)
    grad[5, 3] = float("nan")
    x[5, 3] = 1
    linear_relu(x, weight, leaf).backward(grad)
    assert leaf.grad is not None
    assert leaf.grad[3].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("samples", "inputs", "outputs"), [(0, 3, 2), (1, 1, 1), (700, 13, 65), (4096, 8, 33)])
def test_linear_relu_equals_its_definition(samples: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    # small integers: sums are exact in either precision, so both fall on the same side of zero
    x, weight, bias = (
        (random(*shape, seed=seed) * 1.5).round().to(dtype)
        for seed, shape in enumerate([(samples, inputs), (outputs, inputs), (outputs,)])
    )
    beside_float64(linear_relu, lambda *inputs: F.linear(*inputs).relu(), (x, weight, bias), dtype)


def test_linear_relu_casts_to_the_autocast_dtype_and_its_gradients_back() -> None:
    x, weight, bias = random(64, 8), random(5, 8, seed=1).requires_grad_(), random(5, seed=2).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_relu(x, weight, bias)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert weight.grad is not None
    assert bias.grad is not None
    assert weight.grad.dtype == bias.grad.dtype == torch.float32
    assert torch.equal(bias.grad, (out > 0).float().sum(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("samples", "rows", "made", "width"), [(1, 1, 1, 1), (5, 7, 3, 4), (300, 39, 48, 16)])
def test_left_product_equals_its_definition(samples: int, rows: int, made: int, width: int, dtype: torch.dtype) -> None:
    weight, x = random(made, rows, dtype=dtype), random(samples, rows, width, dtype=dtype, seed=1)
    for laid_out in (x, columns_last(x)):
        beside_float64(left_product, torch.matmul, (weight, laid_out), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("samples", "rows", "rank", "made", "width"),
    [(1, 1, 1, (1,), 1), (5, 7, 3, (), 4), (200, 39, 8, (16, 32), 16)],
)
def test_factorization_machine_equals_its_definition(
    samples: int, rows: int, rank: int, made: tuple[int, ...], width: int, dtype: torch.dtype
) -> None:
    x = random(samples, rows, width, dtype=dtype)
    y = random(rows, rank, dtype=dtype, seed=1) / rows**0.5
    weights = [random(outputs, rows, dtype=dtype, seed=2 + i) for i, outputs in enumerate(made)]

    def reference(x: Tensor, y: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return x @ (x.mT @ y), *(weight @ x for weight in weights)

    for laid_out in (x, columns_last(x)):
        beside_float64(factorization_machine, reference, (laid_out, y, *weights), dtype)


def test_second_derivatives_equal_those_of_torch() -> None:
    x, y, weight = random(4, 5, 3), random(5, 2, seed=1), random(6, 5, seed=2)
    scale, shift = random(3, seed=3), random(3, seed=4)
    cases: list[tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]] = [
        (left_product, torch.matmul, (weight, x)),
        (
            lambda *inputs: torch.cat([part.flatten() for part in factorization_machine(*inputs)]),
            lambda x, y, weight: torch.cat([(x @ (x.mT @ y)).flatten(), (weight @ x).flatten()]),
            (x, y, weight),
        ),
        (
            stacked_layer_norm,
            lambda first, second, residual, weight, bias: F.layer_norm(
                torch.cat([first, second], dim=1) + residual, (3,), weight, bias
            ),
            (x[:, :2], x[:, 2:], random(4, 5, 3, seed=5), scale, shift),
        ),
        (linear_relu, lambda *inputs: F.linear(*inputs).relu(), (x[:, 0], weight[:, :3], shift.repeat(2))),
    ]
    for function, reference, inputs in cases:
        found = []
        for candidate in (function, reference):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            first = torch.autograd.grad(candidate(*leaves).square().sum(), leaves, create_graph=True)
            penalty = sum(grad.square().sum() for grad in first)
            assert isinstance(penalty, Tensor)
            found.append(torch.autograd.grad(penalty, leaves))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    x, grad = random(5000, 24, dtype=dtype), random(5000, 24, dtype=dtype, seed=1)
    columns, incoming = random(700, 16, 9, dtype=dtype), random(700, 16, 9, dtype=dtype, seed=1)
    parts = random(700, 5, 16, dtype=dtype, seed=2), random(700, 16, 4, dtype=dtype, seed=3), columns
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results: list[Tensor] = []
            weight, bias = torch.ones(16), torch.zeros(16)
            out, means, scales = numba_dense.stacked_layer_norm(*parts, weight, bias, 1e-5)
            results += [out, *numba_dense.stacked_layer_norm_backward(incoming, *parts, weight, means, scales)]
            results += [*numba_dense.relu_backward(grad, x), numba_dense.select_columns(x, torch.tensor([3, 3, 0]))]
            found.append(results)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_selected_columns_are_copied_bit_for_bit(dtype: torch.dtype) -> None:
    source = random(333, 50, dtype=dtype)
    source[5, 7], source[6, 7] = float("nan"), -0.0
    columns = torch.randint(50, (71,), generator=torch.Generator().manual_seed(0))
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(numba_dense.select_columns(source, columns).view(bits), source[:, columns].view(bits))


def test_under_vmap_torchs_operators_do_the_same() -> None:
    """A batch of weights runs through layers whose own kernels know no such batch."""
    torch.manual_seed(0)
    x, weights, biases = torch.randn(5, 4), torch.randn(3, 6, 4), torch.randn(3, 6)
    batched = torch.vmap(lambda weight, bias: linear_relu(x, weight, bias))(weights, biases)
    one_by_one = torch.stack([linear_relu(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)])
    torch.testing.assert_close(batched, one_by_one)
    y, shift, scale = torch.randn(2, 5, 3, 4), torch.randn(5, 2, 4), torch.randn(4)
    norm = partial(stacked_layer_norm, second=shift, residual=torch.zeros(5, 5, 4), weight=scale, bias=scale)
    torch.testing.assert_close(torch.vmap(norm)(y), torch.stack([norm(part) for part in y]))


def test_a_number_has_the_same_silu_wherever_it_stands() -> None:
    with in_order():
        x = 4 * torch.randn(700, 100, generator=torch.Generator().manual_seed(0))
        whole, before = silu(x), torch.get_num_threads()
        torch.testing.assert_close(whole, F.silu(x.double()).float(), rtol=1e-6, atol=1e-6)
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                for rows in (slice(0, 1), slice(3, 8), slice(1, 555)):
                    assert torch.equal(silu(x[rows].clone()), whole[rows])
        finally:
            torch.set_num_threads(before)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for leaf, function in zip(leaves, (silu, F.silu), strict=True):
            function(leaf).square().sum().backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
