"""Root-mean-square norm over blocks of features, on the cores of a CPU, by rules as in :mod:`.numba_layers`."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import array, narrow, pool, threads_for, widen_to_single

_LANES = 64  # partial sums, so that strict arithmetic still fills a vector


@compiled()
def _sum_of(lanes: Any) -> Any:
    """Sum of the lanes, by halves: a sum in order would lose small lanes beside a large one."""
    width = len(lanes)
    while width > 1:
        width //= 2
        for i in range(width):
            lanes[i] += lanes[width + i]
    return lanes[0]


@compiled()
def _scale_of(source: Any, lanes: Any, eps: Any) -> Any:
    """Reciprocal root of the mean square of a block."""
    count, whole = len(source), len(source) // _LANES * _LANES
    lanes[:] = np.float32(0.0)
    for begin in range(0, whole, _LANES):
        part = source[begin : begin + _LANES]
        for lane in range(_LANES):
            value = widen_to_single(part[lane])
            lanes[lane] += value * value
    for j in range(whole, count):
        value = widen_to_single(source[j])
        lanes[j - whole] += value * value
    mean = _sum_of(lanes) / np.float32(count)
    return np.float32(np.nan) if np.isinf(mean) else np.float32(1.0) / np.sqrt(mean + eps)


@compiled(parallel=True)
def _normalise(x: Any, output: Any, scales: Any, size: int, eps: Any, hard_swish: bool, threads: int) -> None:
    rows, zero, none = len(x), output[0, 0], np.float32(0.0)
    three, six, sixth = np.float32(3.0), np.float32(6.0), np.float32(1 / 6)
    for chunk in numba.prange(threads):
        lanes = np.empty(_LANES, np.float32)
        for r in range(rows * chunk // threads, rows * (chunk + 1) // threads):
            for b in range(scales.shape[1]):
                source, target = x[r, b * size : (b + 1) * size], output[r, b * size : (b + 1) * size]
                scale = _scale_of(source, lanes, eps)
                scales[r, b] = scale
                if hard_swish:
                    for j in range(len(source)):
                        z = widen_to_single(source[j]) * scale
                        target[j] = narrow(z * min(max(z + three, none), six) * sixth, zero)
                else:
                    for j in range(len(source)):
                        target[j] = narrow(widen_to_single(source[j]) * scale, zero)


@compiled(parallel=True)
def _normalise_backward(grad: Any, x: Any, scales: Any, grad_x: Any, size: int, hard_swish: bool, threads: int) -> None:
    rows, zero, one, none = len(x), grad_x[0, 0], np.float32(1.0), np.float32(0.0)
    three, half, third = np.float32(3.0), np.float32(0.5), np.float32(1 / 3)
    for chunk in numba.prange(threads):
        lanes, incoming = np.empty(_LANES, np.float32), np.empty(size, np.float32)
        for r in range(rows * chunk // threads, rows * (chunk + 1) // threads):
            for b in range(scales.shape[1]):
                source, given = x[r, b * size : (b + 1) * size], grad[r, b * size : (b + 1) * size]
                target, scale, count = grad_x[r, b * size : (b + 1) * size], scales[r, b], len(source)
                for j in range(count):
                    slope = one
                    if hard_swish:
                        z = widen_to_single(source[j]) * scale
                        slope = z * third + half
                        slope = none if z < -three else one if z > three else slope
                    incoming[j] = widen_to_single(given[j]) * slope
                lanes[:] = none
                whole = count // _LANES * _LANES
                for begin in range(0, whole, _LANES):
                    part, other = source[begin : begin + _LANES], incoming[begin : begin + _LANES]
                    for lane in range(_LANES):
                        lanes[lane] += widen_to_single(part[lane]) * other[lane]
                for j in range(whole, count):
                    lanes[j - whole] += widen_to_single(source[j]) * incoming[j]
                along = _sum_of(lanes) * scale / np.float32(count)
                for j in range(count):
                    target[j] = narrow(scale * (incoming[j] - widen_to_single(source[j]) * scale * along), zero)


def block_norm(x: Tensor, block_size: int, eps: float, hard_swish: bool) -> tuple[Tensor, Tensor]:
    """Divide each block of features in contiguous ``float32`` or ``bfloat16`` rows by its root mean square.

    Returns the output, and reciprocal roots ``float32 [rows, blocks]``; NaN where a mean square is infinite.
    """
    size = min(block_size, max(1, x.shape[1]))
    output, scales = torch.empty_like(x), torch.empty(x.shape[0], -(-x.shape[1] // size))
    if x.numel():
        threads = threads_for(x.numel())
        with pool(threads):
            _normalise(array(x), array(output), scales.numpy(), size, np.float32(eps), hard_swish, threads)
    return output, scales


def block_norm_backward(grad: Tensor, x: Tensor, scales: Tensor, block_size: int, hard_swish: bool) -> Tensor:
    """Compute the gradient of :func:`block_norm`'s input from a contiguous ``grad`` and the returned ``scales``."""
    grad_x, size = torch.empty_like(x), min(block_size, max(1, x.shape[1]))
    if x.numel():
        threads = threads_for(x.numel())
        with pool(threads):
            _normalise_backward(array(grad), array(x), scales.numpy(), array(grad_x), size, hard_swish, threads)
    return grad_x
