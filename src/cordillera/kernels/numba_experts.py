"""Routed tokens in the order of experts, and what experts compute between products, compiled by Numba at first use."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cordillera.kernels.attention.numba_tiles import FAST, ONE, ZERO, exp2
from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import array, narrow, pool, threads_for, widen_to_single

_TO_BASE_2, _LARGEST_POWER = np.float32(-np.log2(np.e)), np.float32(126.0)


@compiled()
def count_experts(experts: Any, offsets: Any) -> None:
    """Fill ``int64 [E + 1]`` with the first position of each expert, for ``int64 [n]``; -1 is masked out."""
    offsets[:] = 0
    for s in range(experts.size):
        if experts[s] >= 0:
            offsets[experts[s] + 1] += 1
    for e in range(offsets.size - 1):
        offsets[e + 1] += offsets[e]


@compiled()
def place_choices(experts: Any, offsets: Any, slots: Any, positions: Any) -> None:
    """Fill the choice at each position, ``int32 [n]``, and the position of each choice, -1 if it is masked out."""
    following = offsets.copy()
    for s in range(experts.size):
        e = experts[s]
        if e < 0:
            positions[s] = -1
            continue
        p = following[e]
        slots[p], positions[s] = np.int32(s), np.int32(p)
        following[e] += 1


@compiled(inline="always", fastmath=FAST)
def _sigmoid(x: Any) -> Any:
    power = x * _TO_BASE_2
    return ONE / (ONE + exp2(_LARGEST_POWER if power > _LARGEST_POWER else power))


@compiled(parallel=True, fastmath=FAST)
def _activate(a: Any, b: Any, y: Any, threads: int) -> None:
    """Write ``silu(a) b``, or ``silu(a)`` for an empty ``b``."""
    for chunk in numba.prange(threads):
        for i in range(chunk * len(a) // threads, (chunk + 1) * len(a) // threads):
            if len(b):
                for j in range(a.shape[1]):
                    x = widen_to_single(a[i, j])
                    y[i, j] = narrow(x * _sigmoid(x) * widen_to_single(b[i, j]), y[i, j])
            else:
                for j in range(a.shape[1]):
                    x = widen_to_single(a[i, j])
                    y[i, j] = narrow(x * _sigmoid(x), y[i, j])


@compiled(fastmath={"reassoc", "contract"})
def _sum(values: Any) -> Any:
    total = ZERO
    for j in range(values.size):
        total += values[j]
    return total


@compiled(parallel=True, fastmath=FAST)
def _differentiate(a: Any, b: Any, u: Any, gates: Any, y: Any, da: Any, sums: Any, threads: int) -> None:
    """Write ``y``, gradients of ``a`` and, over ``u``, of ``b``, times the gates; and the sums of ``u y`` over rows."""
    for chunk in numba.prange(threads):
        products = np.empty(a.shape[1], np.float32)
        for i in range(chunk * len(a) // threads, (chunk + 1) * len(a) // threads):
            gate = gates[i]
            if len(b):
                for j in range(a.shape[1]):
                    x, given = widen_to_single(a[i, j]), widen_to_single(u[i, j])
                    other, s = widen_to_single(b[i, j]), _sigmoid(x)
                    silu = x * s
                    products[j] = given * silu * other
                    y[i, j] = narrow(silu * other, y[i, j])
                    given *= gate
                    da[i, j] = narrow(given * other * (s + silu * (ONE - s)), y[i, j])
                    u[i, j] = narrow(given * silu, y[i, j])
            else:
                for j in range(a.shape[1]):
                    x, given = widen_to_single(a[i, j]), widen_to_single(u[i, j])
                    s = _sigmoid(x)
                    silu = x * s
                    products[j] = given * silu
                    y[i, j] = narrow(silu, y[i, j])
                    da[i, j] = narrow(given * gate * (s + silu * (ONE - s)), y[i, j])
            sums[i] = _sum(products)


@compiled(parallel=True, fastmath=FAST)
def _add_rows(out: Any, tokens: Any, rows: Any, gates: Any, threads: int) -> None:
    """Add ``gates[i] rows[i]``, or ``rows[i]`` for empty ``gates``, to ``out[tokens[i]]``; tokens are different."""
    for chunk in numba.prange(threads):
        for i in range(chunk * len(rows) // threads, (chunk + 1) * len(rows) // threads):
            token, gate = tokens[i], gates[i] if len(gates) else ONE
            for j in range(rows.shape[1]):
                out[token, j] += gate * widen_to_single(rows[i, j])


def _is_compiled(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def activated(a: Tensor, b: Tensor | None) -> Tensor:
    """Compute ``silu(a) b``, or ``silu(a)`` without ``b``, of rows ``[n, h]``."""
    if not _is_compiled(a):
        return functional.silu(a) if b is None else functional.silu(a) * b
    y = torch.empty_like(a)
    threads = threads_for(a.numel())
    with pool(threads):
        _activate(array(a), array(a[:0] if b is None else b), array(y), threads)
    return y


def differentiated(
    a: Tensor, b: Tensor | None, u: Tensor, gates: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Recompute ``y = silu(a) b`` and compute gradients from the gradient of ``y``, ``u [n, h]``, which is overwritten.

    Returns:
        ``y``, the gradients of ``a`` and of ``b`` (meaningless without one), times the row's gate, ``gates [n]``, and
        the sums of ``u y`` over rows, ``[n]``, in float32 or float64.
    """
    if not _is_compiled(a):
        silu = functional.silu(a)
        y = silu if b is None else silu * b
        sums = (u * y).sum(1)
        u = u if gates is None else u.mul_(gates[:, None])
        da = torch.ops.aten.silu_backward(u if b is None else u * b, a)
        return y, da, u.mul_(silu), sums
    y, da, sums = torch.empty_like(a), torch.empty_like(a), torch.empty(len(a))
    weights = torch.ones(len(a)) if gates is None else gates.float()
    threads = threads_for(a.numel())
    with pool(threads):
        tensors = (array(x) for x in (a, a[:0] if b is None else b, u, weights, y, da, sums))
        _differentiate(*tensors, threads)
    return y, da, u, sums


def add_rows(out: Tensor, tokens: Tensor, rows: Tensor, gates: Tensor | None = None) -> None:
    """Add rows ``[n, d]``, times ``gates [n]``, to those of different ``tokens`` of ``out``, in float32 or float64."""
    if not _is_compiled(rows):
        rows = rows.to(out.dtype)
        out.index_add_(0, tokens, rows if gates is None else rows * gates[:, None])
        return
    threads = threads_for(rows.numel())
    with pool(threads):
        _add_rows(*map(array, (out, tokens, rows, out.new_empty(0) if gates is None else gates.float())), threads)
