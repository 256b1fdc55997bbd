"""Parts of dense layers that are slow in torch's own operators on CPUs, each with its gradient.

The kernels here run on CPUs, in float32 and bfloat16; elsewhere, inside ``torch.compile`` and under ``torch.vmap``
torch's operators compute the same. Second derivatives use torch's operators everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cordillera.kernels.repeatable import is_in_order

_SINGLE = (torch.float32, torch.bfloat16)

# Whether this CPU has instructions for products of bfloat16. A constant, so that compiled graphs can read it.
MULTIPLIES_BFLOAT16 = bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _transformed() -> bool:
    """Whether only torch's operators work: the code is being compiled or runs under ``torch.vmap``."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _own(x: Tensor) -> bool:
    return x.device.type == "cpu" and not _transformed()


def _computed_in(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _differentiable_gradients(
    forward: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor], ctx: Any
) -> tuple[Tensor | None, ...]:
    """Gradients of a forward made of torch's operators, for a backward pass that is itself differentiated."""
    wanted = [i for i in range(len(inputs)) if ctx.needs_input_grad[i]]
    found = iter(torch.autograd.grad(forward(*inputs), [inputs[i] for i in wanted], grads, create_graph=True))
    return tuple(next(found) if i in wanted else None for i in range(len(ctx.needs_input_grad)))


def for_batched_matmul(x: Tensor) -> Tensor:
    """Return ``x`` in the precision in which products of many small matrices are fastest.

    A CPU without instructions for bfloat16 takes several times as long for such a product as in float32; with them
    bfloat16 takes a third of the time.
    """
    return x.float() if x.device.type == "cpu" and x.dtype.itemsize < 4 and not MULTIPLIES_BFLOAT16 else x


def batched_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Compute ``left @ right`` for many small matrices, ``[B, n, d] @ [B, d, m]``, in the wider of their dtypes."""
    if left.device.type != "cpu":
        return torch.bmm(left, right)
    dtype = torch.promote_types(left.dtype, right.dtype)
    with torch.autocast("cpu", enabled=False):
        return torch.bmm(for_batched_matmul(left.to(dtype)), for_batched_matmul(right.to(dtype))).to(dtype)


def left_product(weight: Tensor, x: Tensor) -> Tensor:
    """Compute ``W X`` of ``weight [m, n]`` and ``x [B, n, d]``, in the autocast dtype where there is one.

    The result ``[B, m, d]`` is stored as ``[B, d, m]``.
    """
    dtype = _computed_in(x)
    with torch.autocast(x.device.type, enabled=False):
        x = for_batched_matmul(x.to(dtype))
        # each sample's X^T as rows of one matrix: one large product, where a batched one copies W for every sample
        return F.linear(x.mT.contiguous(), weight.to(x.dtype)).mT.to(dtype)


def _products_and_combinations(x: Tensor, y: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    columns = x.mT.contiguous()  # [B, d, n]
    products = torch.bmm(columns.mT, F.linear(columns, y.mT))
    return products, *(F.linear(columns, weight).mT for weight in weights)


class _FactorizationMachine(torch.autograd.Function):
    """Products and combinations of the embeddings that share one transposed copy and one gradient of ``X``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        columns = x.mT.contiguous()  # [B, d, n]
        projected = F.linear(columns, y.mT)  # [B, d, k]
        ctx.save_for_backward(x, columns, projected, y, *weights)
        products = torch.bmm(columns.mT, projected)
        return products, *(F.linear(columns, weight).mT for weight in weights)

    @staticmethod
    def backward(ctx: Any, grad_products: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, columns, projected, y, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable_gradients(_products_and_combinations, (x, y, *weights), (grad_products, *grads), ctx)
        rows = columns.flatten(0, 1)  # [B * d, n]
        of_columns = torch.bmm(projected, grad_products.mT)  # [B, d, n], by X on the left
        of_weights = []
        of_combined = [torch.bmm(columns, grad_products), *(grad.mT for grad in grads)]  # each [B, d, k or m]
        for weight, grad in zip([y.mT, *weights], of_combined, strict=True):
            flat = grad.flatten(0, 1)  # [B * d, k or m]
            of_columns.view(-1, rows.shape[1]).addmm_(flat, weight)
            of_weights.append(torch.mm(flat.mT, rows))
        return of_columns.mT, of_weights[0].mT, *of_weights[1:]


def factorization_machine(x: Tensor, y: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Multiply embeddings with learned combinations of them, ``X (X^T Y)``, and compute further combinations ``W X``.

    Of ``x [B, n, d]``, ``y [n, k]`` and any number of weights ``[m, n]``, return ``[B, n, k]``, and for each weight
    ``[B, m, d]``, stored as ``[B, d, m]``; all in the autocast dtype where there is one.
    """
    dtype = _computed_in(x)
    with torch.autocast(x.device.type, enabled=False):
        x = for_batched_matmul(x.to(dtype))
        compute = _products_and_combinations if _transformed() else _FactorizationMachine.apply
        return tuple(result.to(dtype) for result in compute(x, *(weight.to(x.dtype) for weight in (y, *weights))))


class _SiLU(torch.autograd.Function):
    """``x / (1 + exp(-x))`` by operators that compute a number alike wherever it stands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / x.neg().exp_().add_(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad, x)


def silu(x: Tensor) -> Tensor:
    """Compute ``x sigmoid(x)``; in float32 on a CPU, :func:`~cordillera.kernels.repeatable.in_order` if that holds.

    Torch's own operator computes the last few numbers of each thread by other code than the rest.
    """
    if _own(x) and x.dtype == torch.float32 and is_in_order():
        out: Tensor = _SiLU.apply(x)
        return out
    return F.silu(x)


def _linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias).relu()


class _LinearReLU(torch.autograd.Function):
    """Linear layer and ReLU, with the gradients of the ReLU and of the bias in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = F.linear(x, weight, bias).relu_()
        ctx.save_for_backward(x, weight, bias, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from cordillera.kernels.dense.numba_layers import relu_backward

        x, weight, bias, output = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable_gradients(_linear_relu, (x, weight, bias), (grad,), ctx)
        grad, grad_bias = relu_backward(grad.contiguous(), output)
        grad_x = torch.mm(grad, weight) if ctx.needs_input_grad[0] else None
        return grad_x, torch.mm(grad.mT, x), None if bias is None else grad_bias.to(grad.dtype)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``relu(x W^T + b)``, for any number of leading dimensions, in the autocast dtype where there is one."""
    dtype = _computed_in(x)
    if not _own(x) or dtype not in _SINGLE or x.ndim != 2:
        return _linear_relu(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        return _LinearReLU.apply(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _stacked_layer_norm(
    first: Tensor, second: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    return F.layer_norm(torch.cat([first, second], dim=1) + residual, weight.shape, weight, bias, eps)


class _StackedLayerNorm(torch.autograd.Function):
    """Stack, sum and norm in one pass over embeddings that are stored transposed."""

    @staticmethod
    def forward(
        ctx: Any, first: Tensor, second: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        from cordillera.kernels.dense.numba_layers import stacked_layer_norm as normalise

        output, means, scales = normalise(first, second.mT, residual.mT, weight, bias, eps)
        ctx.save_for_backward(first, second, residual, weight, bias, means, scales)
        ctx.eps = eps
        return output.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from cordillera.kernels.dense.numba_layers import stacked_layer_norm_backward

        first, second, residual, weight, bias, means, scales = ctx.saved_tensors
        if torch.is_grad_enabled():
            forward = partial(_stacked_layer_norm, eps=ctx.eps)
            return _differentiable_gradients(forward, (first, second, residual, weight, bias), (grad,), ctx)
        of_first, of_second, of_residual, of_weight, of_bias = stacked_layer_norm_backward(
            grad.mT.contiguous(), first, second.mT, residual.mT, weight, means, scales
        )
        return of_first, of_second.mT, of_residual.mT, of_weight, of_bias, None


def stacked_layer_norm(
    first: Tensor, second: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> Tensor:
    """Apply layer norm over the last dimension of ``concat(first, second) + residual``, in float32 inside.

    Of ``[B, f, d]``, ``[B, s, d]`` and ``[B, f + s, d]``, the last two fastest if stored transposed, return
    ``[B, f + s, d]`` in the widest dtype of the three; on CPUs it is stored as ``[B, d, f + s]``.
    """
    dtype = torch.promote_types(torch.promote_types(first.dtype, second.dtype), residual.dtype)
    first, second, residual = (x.to(dtype) for x in (first, second, residual))
    if _own(residual) and dtype in _SINGLE and weight.dtype == bias.dtype == torch.float32:
        second, residual = (x.mT.contiguous().mT for x in (second, residual))
        return _StackedLayerNorm.apply(first.contiguous(), second, residual, weight, bias, eps)
    return _stacked_layer_norm(first, second, residual, weight, bias, eps)


def _block_norm(x: Tensor, block_size: int, eps: float, hard_swish: bool) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    whole = wide.shape[-1] // block_size * block_size
    parts = [wide[..., :whole].unflatten(-1, (-1, block_size))] if whole else []
    if whole < wide.shape[-1]:
        parts.append(wide[..., whole:].unsqueeze(-2))
    normed = []
    for part in parts:  # [..., blocks, width of a block]
        mean = part.square().mean(-1, keepdim=True)
        # squares that overflow would turn all other values into zeros
        scale = torch.where(mean.isinf(), torch.nan, (mean + eps).rsqrt())
        normed.append((part * scale).flatten(-2))
    output = torch.cat(normed, -1) if len(normed) > 1 else normed[0]
    return (F.hardswish(output) if hard_swish else output).to(x.dtype)


class _BlockNorm(torch.autograd.Function):
    """Squares, scale and activation in one pass over a row; only the input and the scales are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block_size: int, eps: float, hard_swish: bool) -> Tensor:
        from cordillera.kernels.dense.numba_block_norm import block_norm as normalise

        output, scales = normalise(x, block_size, eps, hard_swish)
        ctx.save_for_backward(x, scales)
        ctx.options = block_size, eps, hard_swish
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from cordillera.kernels.dense.numba_block_norm import block_norm_backward

        x, scales = ctx.saved_tensors
        block_size, eps, hard_swish = ctx.options
        if torch.is_grad_enabled():
            forward = partial(_block_norm, block_size=block_size, eps=eps, hard_swish=hard_swish)
            return _differentiable_gradients(forward, (x,), (grad,), ctx)
        return block_norm_backward(grad.contiguous(), x, scales, block_size, hard_swish), None, None, None


def block_norm(x: Tensor, block_size: int = 256, eps: float = 1e-5, *, hard_swish: bool = False) -> Tensor:
    """Divide each block of features by its root mean square, in float32 inside, and optionally apply the hard Swish.

    ``y / sqrt(mean(y^2) + eps)``, without weights, over fixed blocks (LoKA, arXiv 2605.10886, BlockNorm): no block
    waits for another, so a matrix product can do it on the part of a row that it holds. A block that holds NaN or
    infinity, or numbers whose squares overflow, becomes NaN; the other blocks of its row do not.

    Args:
        block_size: Number of features in a block; the last block is smaller if the width is not a multiple.
        eps: Value added to the mean square; above zero, so that a block of zeros stays zero.
        hard_swish: Whether to apply ``z min(max(z + 3, 0), 6) / 6`` to the result ``z``.
    """
    if _own(x) and x.dtype in _SINGLE:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return _BlockNorm.apply(rows, block_size, eps, hard_swish).view(x.shape)
    return _block_norm(x, block_size, eps, hard_swish)


class _PairwiseDots(torch.autograd.Function):
    """Selected entries of ``X X^T``, with a backward pass that gathers instead of scattering.

    Autograd's own backward pass of a column selection adds into zeros entry by entry, which on CPUs costs several times
    the rest of the interaction. Both ``(i, j)`` and ``(j, i)`` of the symmetric gradient come from one known column.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Tensor, column_of: Tensor, include_diagonal: bool) -> Tensor:
        ctx.save_for_backward(rows, column_of)
        ctx.include_diagonal = include_diagonal
        return _select_columns(torch.bmm(rows, rows.mT).flatten(1), pairs)  # [B, n * n] -> [B, pairs]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows, column_of = ctx.saved_tensors
        n = rows.shape[1]
        symmetric = _select_columns(grad, column_of).unflatten(1, (n, n))  # [B, n, n]
        diagonal = symmetric.diagonal(dim1=1, dim2=2)
        # x_i . x_i depends on x_i twice; without the diagonal, the gathered entries there belong to other pairs
        if ctx.include_diagonal:
            diagonal.mul_(2)
        else:
            diagonal.zero_()
        return torch.bmm(symmetric, rows), None, None, None


def _select_columns(source: Tensor, columns: Tensor) -> Tensor:
    if source.device.type != "cpu" or torch.is_grad_enabled():  # grad in a backward pass: second derivatives
        return source.gather(1, columns.expand(source.shape[0], -1))
    from cordillera.kernels.dense.numba_layers import select_columns

    return select_columns(source.contiguous(), columns)


def pairwise_dots(x: Tensor, pairs: Tensor, column_of: Tensor, include_diagonal: bool) -> Tensor:
    """Compute selected dot products of each sample's embeddings ``[B, n, d]``, ``[B, p]`` in the dtype of ``x``.

    Args:
        pairs: ``int64 [p]``, positions in the flattened ``X X^T``.
        column_of: Column of the result that holds each position of the flattened ``X X^T`` or its mirror image,
            ``int64 [n * n]``.
        include_diagonal: Whether ``pairs`` holds the diagonal.
    """
    if _transformed():
        return batched_matmul(x, x.mT).flatten(1)[:, pairs]
    with torch.autocast(x.device.type, enabled=False):
        products: Tensor = _PairwiseDots.apply(for_batched_matmul(x), pairs, column_of, include_diagonal)
    return products.to(x.dtype)
