"""Causal attention and its gradients on the cores of a CPU, compiled by Numba at first use.

A few queries at a time meet a block of keys that fits the first-level cache, so that scores and their gradients never
leave it (Dao 2024, FlashAttention-2, algorithms 1 and 2). All products use one tile of multiplications and sums that is
kept in registers; torch's own attention hands matrices as narrow as a head to a library made for wide ones, and
takes up to twice as long. Arithmetic is in float32. One thread computes each head of each document, so results do not
depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from cordillera.kernels.attention.numba_tiles import (
    BLOCK,
    BYTES,
    COLUMNS,
    FAST,
    ROWS,
    ZERO,
    add_columns,
    add_rows,
    add_scores,
    exp2,
    largest_of,
    powers_of,
)
from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import pool, threads_for


@compiled(fastmath=FAST)
def _one_head_forward(q: Any, keys: Any, values: Any, out: Any, logsumexp: Any) -> None:
    """Forward of one head: ``q``, ``out [n, D]``, ``keys [blocks, D, m]``, ``values [blocks, m, D]``; base 2."""
    queries, width = q.shape
    blocks, _, block = keys.shape
    scores = np.empty((ROWS, block), np.float32)
    score, of_q, of_out = np.int64(scores.ctypes.data), np.int64(q.ctypes.data), np.int64(out.ctypes.data)
    highest, total = np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    for i in range(0, queries, ROWS):
        highest[:] = -np.inf
        total[:] = ZERO
        start = BYTES * width * i
        for b in range(min(blocks, (i + ROWS - 1) // block + 1)):
            first = b * block
            count = min(block, (i + ROWS - first + COLUMNS - 1) // COLUMNS * COLUMNS)
            scores[:, :count] = ZERO
            add_scores(of_q + start, width, np.int64(keys[b].ctypes.data), block, count, score)
            for r in range(ROWS):
                own, seen = scores[r], i + r + 1 - first
                for j in range(seen, count):
                    own[j] = -np.inf
                most = largest_of(score + BYTES * block * r, count)
                if most > highest[r]:
                    scale = exp2(highest[r] - most) if b else ZERO
                    total[r] *= scale
                    for d in range(width):
                        out[i + r, d] *= scale
                    highest[r] = most
                total[r] += powers_of(score + BYTES * block * r, count, highest[r])
            add_rows(score, block, count, np.int64(values[b].ctypes.data), width, of_out + start)
        for r in range(ROWS):
            for d in range(width):
                out[i + r, d] /= total[r]
            logsumexp[i + r] = highest[r] + np.log2(total[r])


@compiled(parallel=True, fastmath=FAST)
def _all_heads_forward(q: Any, keys: Any, values: Any, out: Any, logsumexp: Any, threads: int) -> None:
    heads, group = len(q), len(q) // len(keys)
    for chunk in numba.prange(threads):
        for h in range(heads * chunk // threads, heads * (chunk + 1) // threads):
            g = h // group
            _one_head_forward(q[h], keys[g], values[g], out[h], logsumexp[h])


@compiled(fastmath=FAST)
def _one_head_in_order(q: Any, keys: Any, values: Any, before: Any, scores: Any, out: Any, logsumexp: Any) -> None:
    """The same for queries after ``before`` keys, in the order of :mod:`~cordillera.kernels.attention.decoding`.

    All scores of a query, in ``scores [blocks, ROWS, m]``, are known before the first power is taken.
    """
    queries, width = q.shape
    blocks, _, block = keys.shape
    of_q, of_out, row = np.int64(q.ctypes.data), np.int64(out.ctypes.data), BYTES * block
    highest, total = np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    for i in range(0, queries, ROWS):
        highest[:] = -np.inf
        total[:] = ZERO
        start = BYTES * width * i
        used = min(blocks, (before + i + ROWS - 1) // block + 1)
        for b in range(used):
            own, seen = scores[b], before + i + 1 - b * block
            count = min(block, (seen + ROWS + COLUMNS - 2) // COLUMNS * COLUMNS)
            own[:, :count] = ZERO
            score = np.int64(own.ctypes.data)
            add_scores(of_q + start, width, np.int64(keys[b].ctypes.data), block, count, score)
            for r in range(ROWS):
                for j in range(max(0, seen + r), count):
                    own[r, j] = -np.inf
                highest[r] = max(highest[r], largest_of(score + row * r, count))
        for b in range(used):
            own, seen = scores[b], before + i + 1 - b * block
            last = min(block, seen + ROWS - 1)
            count = (last + COLUMNS - 1) // COLUMNS * COLUMNS
            score = np.int64(own.ctypes.data)
            for r in range(ROWS):
                powers_of(score + row * r, count, highest[r])
            for j in range(last):
                for r in range(ROWS):
                    total[r] += own[r, j]
            add_rows(score, block, last, np.int64(values[b].ctypes.data), width, of_out + start)
        for r in range(ROWS):
            for d in range(width):
                out[i + r, d] /= total[r]
            logsumexp[i + r] = highest[r] + np.log2(total[r])


@compiled(parallel=True, fastmath=FAST)
def _all_heads_in_order(
    q: Any, keys: Any, values: Any, before: Any, scores: Any, out: Any, logsumexp: Any, threads: int
) -> None:
    heads, group = len(q), len(q) // len(keys)
    for chunk in numba.prange(threads):
        for h in range(heads * chunk // threads, heads * (chunk + 1) // threads):
            g = h // group
            _one_head_in_order(q[h], keys[g], values[g], before, scores[chunk], out[h], logsumexp[h])


@compiled(fastmath=FAST)
def _one_head(
    q: Any, gradient: Any, logsumexp: Any, along: Any, keys: Any, values: Any, rows: Any, dq: Any, dk: Any, dv: Any
) -> None:
    """Backward of one head: ``q``, ``gradient``, ``dq [n, D]``; ``keys``, ``values``, ``dk``, ``dv [blocks, D, m]``.

    ``rows [blocks, m, D]`` holds the keys, not transposed.
    """
    queries, width = q.shape
    blocks, _, block = keys.shape
    scores, slopes = np.empty((ROWS, block), np.float32), np.empty((ROWS, block), np.float32)
    score, slope = np.int64(scores.ctypes.data), np.int64(slopes.ctypes.data)
    of_q, of_gradient, of_dq = np.int64(q.ctypes.data), np.int64(gradient.ctypes.data), np.int64(dq.ctypes.data)
    for b in range(blocks):
        first = b * block
        key, value = np.int64(keys[b].ctypes.data), np.int64(values[b].ctypes.data)
        of_dk, of_dv = np.int64(dk[b].ctypes.data), np.int64(dv[b].ctypes.data)
        row = np.int64(rows[b].ctypes.data)
        for i in range(first, queries, ROWS):
            count = min(block, (i + ROWS - first + COLUMNS - 1) // COLUMNS * COLUMNS)
            start = BYTES * width * i
            for r in range(ROWS):
                for j in range(count):
                    scores[r, j] = -logsumexp[i + r]
                    slopes[r, j] = -along[i + r]
            add_scores(of_q + start, width, key, block, count, score)
            add_scores(of_gradient + start, width, value, block, count, slope)
            for r in range(ROWS):
                own_scores, own_slopes = scores[r], slopes[r]
                for j in range(count):
                    share = exp2(own_scores[j])
                    own_scores[j] = share
                    own_slopes[j] *= share
                for j in range(i + r + 1 - first, count):
                    own_scores[j] = ZERO
                    own_slopes[j] = ZERO
            add_rows(slope, block, count, row, width, of_dq + start)
            add_columns(of_gradient + start, width, score, block, count, of_dv)
            add_columns(of_q + start, width, slope, block, count, of_dk)


@compiled(parallel=True, fastmath=FAST)
def _all_heads(
    q: Any, gradient: Any, logsumexp: Any, along: Any, keys: Any, values: Any, rows: Any, dq: Any, dk: Any, dv: Any,
    threads: int,
) -> None:  # fmt: skip
    heads, group = len(q), len(q) // len(keys)
    for chunk in numba.prange(threads):
        for h in range(heads * chunk // threads, heads * (chunk + 1) // threads):
            g = h // group
            _one_head(
                q[h], gradient[h], logsumexp[h], along[h], keys[g], values[g], rows[g], dq[h], dk[h], dv[h]
            )  # fmt: skip


def _padded(x: Tensor, rows: int) -> Tensor:
    """``[B, H, n, D]`` as contiguous float32 ``[B H, m, D]``, where ``m`` is the next multiple of ``rows``."""
    batch, heads, n, width = x.shape
    m = -(-n // rows) * rows
    if m == n:
        return x.float().contiguous().view(batch * heads, m, width)
    whole = torch.zeros(batch, heads, m, width)
    whole[:, :, :n] = x
    return whole.flatten(0, 1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute causal attention with scores scaled by ``1 / sqrt(D)``.

    Args:
        q: Queries, ``[B, H, n, D]`` on the CPU, of any floating-point dtype; ``D`` is a multiple of 16.
        k: Keys, ``[B, G, n, D]``; ``G`` divides ``H``, and query head ``h`` reads key head ``h // (H / G)``.
        v: Values, in the shape of ``k``.

    Returns:
        Output ``[B, H, n, D]`` and log-sum-exp of the scaled scores ``[B, H, n]``, both in float32.
    """
    batch, heads, n, width = q.shape
    block = min(BLOCK, -(-n // COLUMNS) * COLUMNS)
    queries = _padded(q, ROWS) * (width**-0.5 * float(np.log2(np.e)))
    keys, values = (_padded(x, block).unflatten(1, (-1, block)) for x in (k, v))
    out, logsumexp = torch.zeros_like(queries), torch.empty(queries.shape[:2])
    if q.numel():
        threads = threads_for(q.numel())
        with pool(threads):
            _all_heads_forward(
                queries.numpy(), keys.mT.contiguous().numpy(), values.numpy(), out.numpy(), logsumexp.numpy(), threads
            )
    found, padded = out.view(batch, heads, -1, width), logsumexp.view(batch, heads, -1)
    return found[:, :, :n], padded[:, :, :n] * float(np.log(2))


def causal_attention_in_order(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute causal attention of the last ``n`` tokens to all ``m``, in sums over keys from the first to the last.

    A token's result has the same bits for any ``n``, and those that
    :func:`~cordillera.kernels.attention.decoding.decode_attention` gives.

    Args:
        q: Queries, ``[B, H, n, D]`` on the CPU, of any floating-point dtype; ``D`` is a multiple of 16.
        k: Keys, ``[B, G, m, D]`` with ``m >= n``; ``G`` divides ``H``.
        v: Values, in the shape of ``k``.

    Returns:
        Output ``[B, H, n, D]`` and log-sum-exp of the scaled scores ``[B, H, n]``, both in float32.
    """
    batch, heads, n, width = q.shape
    m = k.shape[2]
    block = min(BLOCK, -(-m // COLUMNS) * COLUMNS)
    queries = _padded(q, ROWS) * (float(np.log2(np.e)) / width**0.5)
    keys, values = (_padded(x, block).unflatten(1, (-1, block)) for x in (k, v))
    out, logsumexp = torch.zeros_like(queries), torch.empty(queries.shape[:2])
    if q.numel():
        threads = threads_for(batch * heads * n * m)
        scores = np.empty((threads, keys.shape[1], ROWS, block), np.float32)
        with pool(threads):
            _all_heads_in_order(
                queries.numpy(), keys.mT.contiguous().numpy(), values.numpy(), m - n, scores, out.numpy(),
                logsumexp.numpy(), threads,
            )  # fmt: skip
    found, padded = out.view(batch, heads, -1, width), logsumexp.view(batch, heads, -1)
    return found[:, :, :n], padded[:, :, :n] * float(np.log(2))


def causal_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of :func:`causal_attention` for its inputs ``q``, ``k`` and ``v``.

    Args:
        gradient: Gradient of ``out``, in its shape.
        out: Output of :func:`causal_attention`, in the shape of ``q``.
        logsumexp: Log-sum-exp of the scaled scores, ``[B, H, n]``.

    Returns:
        Gradients of ``q``, ``k`` and ``v``, in their shapes, float32.
    """
    batch, heads, n, width = q.shape
    block = min(BLOCK, -(-n // COLUMNS) * COLUMNS)
    scale, to_base_2 = width**-0.5, float(np.log2(np.e))
    queries, incoming = _padded(q, ROWS) * (scale * to_base_2), _padded(gradient, ROWS)
    rows, values = (_padded(x, block).unflatten(1, (-1, block)) for x in (k, v))  # [B G, blocks, m, D]
    along = (gradient.float() * out.float()).sum(-1)[..., None]
    padded = queries.shape[1]
    dq = torch.zeros_like(queries)
    dk, dv = (torch.zeros(batch * heads, rows.shape[1], width, block) for _ in range(2))
    if q.numel():
        threads = threads_for(q.numel())
        with pool(threads):
            _all_heads(
                queries.numpy(), incoming.numpy(),
                _padded(logsumexp[..., None] * to_base_2, ROWS).view(-1, padded).numpy(),
                _padded(along, ROWS).view(-1, padded).numpy(), rows.mT.contiguous().numpy(),
                values.mT.contiguous().numpy(), rows.numpy(), dq.numpy(), dk.numpy(), dv.numpy(), threads,
            )  # fmt: skip
    found = dq.view(batch, heads, padded, width)[:, :, :n].mul(scale)
    groups = k.shape[1]

    def whole(blocks: Tensor) -> Tensor:
        summed = blocks.view(batch, groups, heads // groups, *blocks.shape[1:]).sum(2)  # [B, G, blocks, D, m]
        return summed.mT.flatten(2, 3)[:, :, :n]

    return found, whole(dk).mul(1.0 / to_base_2), whole(dv)
