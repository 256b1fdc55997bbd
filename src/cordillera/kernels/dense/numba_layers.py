"""Memory-bound parts of dense layers on the cores of a CPU, compiled by Numba at first use.

Each kernel reads its inputs once and writes its results once. Arithmetic is in float32; ``bfloat16`` tensors are read
and written as their bits and rounded once. Sums over samples are made in blocks of fixed size, whose sums are added in
order in float64, so results do not depend on the number of threads. Arithmetic is strict: a compiler that may reorder
it takes other paths for other addresses, and the same training would end in other bits.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import array, narrow, pool, threads_for, widen_to_single

_BLOCK_VALUES = 2**16  # values whose column sums one thread makes, in float32

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@compiled()
def _join(first: Any, second: Any, residual: Any, joined: Any) -> None:
    """``residual [w, c]`` plus ``first [f, w]`` in its first columns and ``second [w, s]`` in those after them."""
    width, columns = residual.shape
    given, more = first.shape[0], second.shape[1]
    for k in range(width):
        row = joined[k]
        after = row[given:]
        for j in range(columns):
            row[j] = widen_to_single(residual[k, j])
        for j in range(more):
            after[j] += widen_to_single(second[k, j])
        for j in range(given):
            row[j] += widen_to_single(first[j, k])


@compiled(parallel=True)
def _normalise(
    first: Any, second: Any, residual: Any, weight: Any, bias: Any, eps: Any, output: Any, means: Any, scales: Any,
    threads: int,
) -> None:  # fmt: skip
    samples, width, columns = residual.shape
    zero, one = output[0, 0, 0], np.float32(1.0)
    share = one / np.float32(width)
    for chunk in numba.prange(threads):
        joined = np.empty((width, columns), np.float32)
        for b in range(samples * chunk // threads, samples * (chunk + 1) // threads):
            _join(first[b], second[b], residual[b], joined)
            target, mean, scale = output[b], means[b], scales[b]
            mean[:] = 0.0
            scale[:] = 0.0
            for k in range(width):
                for j in range(columns):
                    mean[j] += joined[k, j]
            for j in range(columns):
                mean[j] *= share
            for k in range(width):
                for j in range(columns):
                    difference = joined[k, j] - mean[j]
                    scale[j] += difference * difference
            for j in range(columns):
                scale[j] = one / np.sqrt(scale[j] * share + eps)
            for k in range(width):
                for j in range(columns):
                    hat = (joined[k, j] - mean[j]) * scale[j]
                    target[k, j] = narrow(hat * weight[k] + bias[k], zero)


@compiled(parallel=True)
def _normalise_backward(
    grad: Any, first: Any, second: Any, residual: Any, weight: Any, means: Any, scales: Any, grad_first: Any,
    grad_second: Any, grad_residual: Any, weight_sums: Any, bias_sums: Any, block: int, threads: int,
) -> None:  # fmt: skip
    samples, width, columns = residual.shape
    blocks, given, more = weight_sums.shape[0], first.shape[1], second.shape[2]
    zero, share = grad_residual[0, 0, 0], np.float32(1.0) / np.float32(width)
    for chunk in numba.prange(threads):
        hats = np.empty((width, columns), np.float32)
        along, total = np.empty(columns, np.float32), np.empty(columns, np.float32)
        for i in range(blocks * chunk // threads, blocks * (chunk + 1) // threads):
            of_weight, of_bias = weight_sums[i], bias_sums[i]
            of_weight[:] = 0.0
            of_bias[:] = 0.0
            for b in range(i * block, min(samples, (i + 1) * block)):
                _join(first[b], second[b], residual[b], hats)
                incoming, target, mean, scale = grad[b], grad_residual[b], means[b], scales[b]
                along[:] = 0.0
                total[:] = 0.0
                for k in range(width):
                    for j in range(columns):
                        g = widen_to_single(incoming[k, j])
                        hat = (hats[k, j] - mean[j]) * scale[j]
                        hats[k, j] = hat
                        of_weight[k, j] += g * hat
                        of_bias[k, j] += g
                        along[j] += g * weight[k] * hat
                        total[j] += g * weight[k]
                for j in range(columns):
                    along[j] *= share
                    total[j] *= share
                for k in range(width):
                    for j in range(columns):
                        scaled = widen_to_single(incoming[k, j]) * weight[k]
                        target[k, j] = narrow((scaled - total[j] - hats[k, j] * along[j]) * scale[j], zero)
                of_first, of_second = grad_first[b], grad_second[b]
                for k in range(width):
                    after = target[k, given:]
                    for j in range(more):
                        of_second[k, j] = after[j]
                    for j in range(given):
                        of_first[j, k] = target[k, j]


@compiled(parallel=True)
def _relu_backward(grad: Any, output: Any, grad_x: Any, sums: Any, block: int, threads: int) -> None:
    rows, width = output.shape
    blocks = sums.shape[0]
    zero, none = grad_x[0, 0], np.float32(0.0)
    for chunk in numba.prange(threads):
        for i in range(blocks * chunk // threads, blocks * (chunk + 1) // threads):
            own = sums[i]
            own[:] = 0.0
            for r in range(i * block, min(rows, (i + 1) * block)):
                incoming, result, target = grad[r], output[r], grad_x[r]
                for k in range(width):
                    g = none if widen_to_single(result[k]) <= none else widen_to_single(incoming[k])
                    own[k] += g
                    target[k] = narrow(g, zero)


@compiled(parallel=True)
def _select(source: Any, columns: Any, output: Any, threads: int) -> None:
    rows, width = output.shape
    for chunk in numba.prange(threads):
        for r in range(rows * chunk // threads, rows * (chunk + 1) // threads):
            have, want = source[r], output[r]
            for k in range(width):
                want[k] = have[columns[k]]


def _rows_per_block(rows: int, width: int) -> tuple[int, int]:
    """Number of rows in a block, and number of blocks."""
    block = max(1, _BLOCK_VALUES // max(1, width))
    return block, -(-rows // block)


def _sum_blocks(sums: Tensor) -> Tensor:
    """Sum ``[blocks, w]`` or ``[blocks, w, c]`` to ``[w]``."""
    return sums.sum([0, *range(2, sums.ndim)], dtype=torch.float64).float()


def stacked_layer_norm(
    first: Tensor, second: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise ``residual + [first^T, second, 0]`` over the middle dimension; all tensors are contiguous.

    Args:
        first: ``float32`` or ``bfloat16 [B, f, w]``; ``f`` may be 0.
        second: ``[B, w, s]`` of the same dtype; ``s`` may be 0, ``f + s <= c``.
        residual: ``[B, w, c]`` of the same dtype.
        weight: ``float32 [w]``, like ``bias``.

    Returns:
        Output with shape and dtype of ``residual``, and ``float32 [B, c]`` means and reciprocal standard deviations.
    """
    output = torch.empty_like(residual)
    means, scales = (torch.empty(residual.shape[0], residual.shape[2]) for _ in range(2))
    if residual.numel():
        threads = threads_for(residual.numel())
        with pool(threads):
            _normalise(
                array(first), array(second), array(residual), weight.numpy(), bias.numpy(), np.float32(eps),
                array(output), means.numpy(), scales.numpy(), threads,
            )  # fmt: skip
    return output, means, scales


def stacked_layer_norm_backward(
    grad: Tensor, first: Tensor, second: Tensor, residual: Tensor, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute gradients of the five inputs of :func:`stacked_layer_norm`; ``grad`` is laid out as ``residual``."""
    grad_first, grad_second, grad_residual = (torch.empty_like(x) for x in (first, second, residual))
    block, blocks = _rows_per_block(residual.shape[0], residual[:1].numel())
    weight_sums, bias_sums = (torch.empty(blocks, *residual.shape[1:]) for _ in range(2))
    if residual.numel():
        threads = threads_for(residual.numel())
        with pool(threads):
            _normalise_backward(
                array(grad), array(first), array(second), array(residual), weight.numpy(), means.numpy(),
                scales.numpy(), array(grad_first), array(grad_second), array(grad_residual), weight_sums.numpy(),
                bias_sums.numpy(), block, threads,
            )  # fmt: skip
    return grad_first, grad_second, grad_residual, _sum_blocks(weight_sums), _sum_blocks(bias_sums)


def relu_backward(grad: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradient of a ReLU, and its sum over samples ``float32 [w]`` (the gradient of a bias before it).

    ``grad`` and ``output`` are ``float32`` or ``bfloat16 [B, w]``, contiguous.
    """
    grad_x = torch.empty_like(grad)
    block, blocks = _rows_per_block(*grad.shape)
    sums = torch.empty(blocks, grad.shape[1])
    if grad.numel():
        threads = threads_for(grad.numel())
        with pool(threads):
            _relu_backward(array(grad), array(output), array(grad_x), sums.numpy(), block, threads)
    return grad_x, _sum_blocks(sums)


def select_columns(source: Tensor, columns: Tensor) -> Tensor:
    """Return ``source[:, columns]`` as contiguous memory, for a contiguous ``source``; ``columns`` are not checked."""
    output = source.new_empty(source.shape[0], columns.numel())
    if output.numel():
        bits = _BITS[source.dtype.itemsize]
        threads = threads_for(output.numel())
        with pool(threads):
            _select(source.view(bits).numpy(), columns.numpy(), output.view(bits).numpy(), threads)
    return output
