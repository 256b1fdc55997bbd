"""Causal attention and its gradients on the cores of a CPU, compiled by Numba at first use.

A few queries at a time meet a block of keys that fits the first-level cache, so that scores and their gradients never
leave it (Dao 2024, FlashAttention-2, algorithms 1 and 2). All products use one tile of multiplications and sums that is
kept in registers; torch's own attention hands matrices as narrow as a head to a library made for wide ones, and
takes up to twice as long. Arithmetic is in float32. One thread computes each head of each document, so results do not
depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import pool, threads_for

# The tile's sums take half of the vector registers: of 32 wide ones with AVX-512, of 16 narrow ones without.
_IS_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
_LANES = 16 if _IS_WIDE else 8
ROWS = 8 if _IS_WIDE else 4  # queries at a time
COLUMNS = 2 * _LANES  # keys at a time
_BLOCK = 256  # keys whose scores stay in the cache
WIDTH = 16  # divisor of the widths of heads

_BYTES = 4
_FAST = {"contract"}  # a product and a sum may be one instruction; nothing is reordered


def _tile(columns: int) -> Callable[..., Any]:
    """Make ``c [ROWS, columns] += sum over k of a[:, k] b[k]``, for a multiple of the lanes as ``columns``."""

    @intrinsic
    def tile(
        typing_context: Any, a: Any, a_row: Any, a_step: Any, b: Any, b_step: Any, c: Any, c_row: Any, count: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_row, a_step, b, b_step, c, c_row, count = arguments
            word, single = ir.IntType(64), ir.FloatType()
            vector = ir.VectorType(single, _LANES)
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
            undefined = ir.Constant(vector, ir.Undefined)

            def at(base: Any, step: Any, times: int, kind: Any) -> Any:
                offset = builder.mul(step, ir.Constant(word, times))
                return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

            lane = ir.Constant(word, _LANES * _BYTES)
            vectors = range(columns // _LANES)
            places, sums = {}, {}
            for row in range(ROWS):
                start = builder.add(c, builder.mul(c_row, ir.Constant(word, row)))
                for v in vectors:
                    places[row, v] = at(start, lane, v, vector)
                    sums[row, v] = cgutils.alloca_once(builder, vector)
                    builder.store(builder.load(places[row, v], align=_BYTES), sums[row, v])
            with cgutils.for_range(builder, count, intp=word) as loop:
                right = builder.add(b, builder.mul(b_step, loop.index))
                left = builder.add(a, builder.mul(a_step, loop.index))
                others = [builder.load(at(right, lane, v, vector), align=_BYTES) for v in vectors]
                for row in range(ROWS):
                    value = builder.load(at(left, a_row, row, single), align=_BYTES)
                    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
                    spread = builder.shuffle_vector(first, undefined, zeros)
                    for v in vectors:
                        product = builder.fmul(spread, others[v], flags=["contract"])
                        total = builder.fadd(builder.load(sums[row, v]), product, flags=["contract"])
                        builder.store(total, sums[row, v])
            for key, place in places.items():
                builder.store(builder.load(sums[key]), place, align=_BYTES)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 8), generate

    return tile


_wide_tile, _narrow_tile = _tile(COLUMNS), _tile(WIDTH)


@intrinsic
def _scale_by(typing_context: Any, value: Any) -> Any:
    """Power of two whose exponent is in the lowest bits of a float32's mantissa."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        exponent = builder.add(builder.bitcast(arguments[0], word), word(127))
        return builder.bitcast(builder.shl(exponent, word(23)), ir.FloatType())

    return types.float32(types.float32), generate


def _reduction(combine: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Make a reduction of a float32 row, of a multiple of the lanes, in an order that depends on the count alone."""

    @intrinsic
    def reduce(typing_context: Any, row: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            row, count = arguments
            word = ir.IntType(64)
            vector = ir.VectorType(ir.FloatType(), _LANES)

            def load(number: Any) -> Any:
                address = builder.add(row, builder.mul(number, ir.Constant(word, _LANES * _BYTES)))
                return builder.load(builder.inttoptr(address, vector.as_pointer()), align=_BYTES)

            slot = cgutils.alloca_once(builder, vector)
            builder.store(load(ir.Constant(word, 0)), slot)
            others = builder.sub(builder.udiv(count, ir.Constant(word, _LANES)), ir.Constant(word, 1))
            with cgutils.for_range(builder, others, intp=word) as loop:
                following = load(builder.add(loop.index, ir.Constant(word, 1)))
                builder.store(combine(builder, builder.load(slot), following), slot)
            whole = builder.load(slot)
            found = builder.extract_element(whole, ir.Constant(ir.IntType(32), 0))
            for lane in range(1, _LANES):
                found = combine(builder, found, builder.extract_element(whole, ir.Constant(ir.IntType(32), lane)))
            return found

        return types.float32(types.int64, types.int64), generate

    return reduce


_sum = _reduction(lambda builder, a, b: builder.fadd(a, b))
_largest = _reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a))


_SHIFT = np.float32(1.5 * 2**23)  # added to a small number, it leaves its nearest integer in the lowest bits
_LEAST = np.float32(-126.0)
# Coefficients of 2**x for x in [-1/2, 1/2], from the sixth power down; from the Cephes library's exp2f.
_C6, _C5, _C4, _C3, _C2, _C1 = (
    np.float32(c)
    for c in (
        1.535336188319500e-4,
        1.339887440266574e-3,
        9.618437357674640e-3,
        5.550332471162809e-2,
        2.402264791363012e-1,
        6.931472028550421e-1,
    )
)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@compiled(inline="always", fastmath=_FAST)
def _exp2(x: Any) -> Any:
    """``2**x`` for ``x`` up to 127; NaN stays NaN."""
    x = _LEAST if x < _LEAST else x
    shifted = x + _SHIFT
    r = x - (shifted - _SHIFT)
    return ((((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _ONE) * _scale_by(shifted)


@compiled(fastmath=_FAST)
def _add_scores(queries: Any, width: Any, keys: Any, block: Any, count: Any, scores: Any) -> None:
    """``scores [ROWS, block] += queries [ROWS, width] @ keys [width, block]``, in the first ``count`` columns."""
    one, row = np.int64(_BYTES), _BYTES * block
    for j in range(0, _BYTES * count, _BYTES * COLUMNS):
        _wide_tile(queries, _BYTES * width, one, keys + j, row, scores + j, row, width)


@compiled(fastmath=_FAST)
def _add_rows(scores: Any, block: Any, count: Any, keys: Any, width: Any, out: Any) -> None:
    """``out [ROWS, width] += scores [ROWS, block] @ keys [block, width]``, by the first ``count`` keys."""
    one, row = np.int64(_BYTES), _BYTES * width
    if width % COLUMNS == 0:
        for d in range(0, row, _BYTES * COLUMNS):
            _wide_tile(scores, _BYTES * block, one, keys + d, row, out + d, row, count)
    else:
        for d in range(0, row, _BYTES * WIDTH):
            _narrow_tile(scores, _BYTES * block, one, keys + d, row, out + d, row, count)


@compiled(fastmath=_FAST)
def _add_columns(queries: Any, width: Any, scores: Any, block: Any, count: Any, out: Any) -> None:
    """``out [width, block] += queries [ROWS, width].T @ scores [ROWS, block]``, in the first ``count`` columns."""
    one, row = np.int64(_BYTES), _BYTES * block
    for d in range(0, width, ROWS):
        for j in range(0, _BYTES * count, _BYTES * COLUMNS):
            _wide_tile(
                queries + _BYTES * d, one, _BYTES * width, scores + j, row, out + d * row + j, row, np.int64(ROWS)
            )


@compiled(fastmath=_FAST)
def _one_head_forward(q: Any, keys: Any, values: Any, out: Any, logsumexp: Any) -> None:
    """Forward of one head: ``q``, ``out [n, D]``, ``keys [blocks, D, m]``, ``values [blocks, m, D]``; base 2."""
    queries, width = q.shape
    blocks, _, block = keys.shape
    scores = np.empty((ROWS, block), np.float32)
    score, of_q, of_out = np.int64(scores.ctypes.data), np.int64(q.ctypes.data), np.int64(out.ctypes.data)
    highest, total = np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    for i in range(0, queries, ROWS):
        highest[:] = -np.inf
        total[:] = _ZERO
        start = _BYTES * width * i
        for b in range(min(blocks, (i + ROWS - 1) // block + 1)):
            first = b * block
            count = min(block, (i + ROWS - first + COLUMNS - 1) // COLUMNS * COLUMNS)
            scores[:, :count] = _ZERO
            _add_scores(of_q + start, width, np.int64(keys[b].ctypes.data), block, count, score)
            for r in range(ROWS):
                own, seen = scores[r], i + r + 1 - first
                for j in range(seen, count):
                    own[j] = -np.inf
                most = _largest(score + _BYTES * block * r, count)
                if most > highest[r]:
                    scale = _exp2(highest[r] - most) if b else _ZERO
                    total[r] *= scale
                    for d in range(width):
                        out[i + r, d] *= scale
                    highest[r] = most
                most = highest[r]
                for j in range(count):
                    own[j] = _exp2(own[j] - most)
                for j in range(seen, count):
                    own[j] = _ZERO
                total[r] += _sum(score + _BYTES * block * r, count)
            _add_rows(score, block, count, np.int64(values[b].ctypes.data), width, of_out + start)
        for r in range(ROWS):
            for d in range(width):
                out[i + r, d] /= total[r]
            logsumexp[i + r] = highest[r] + np.log2(total[r])


@compiled(parallel=True, fastmath=_FAST)
def _all_heads_forward(q: Any, keys: Any, values: Any, out: Any, logsumexp: Any, threads: int) -> None:
    heads, group = len(q), len(q) // len(keys)
    for chunk in numba.prange(threads):
        for h in range(heads * chunk // threads, heads * (chunk + 1) // threads):
            g = h // group
            _one_head_forward(q[h], keys[g], values[g], out[h], logsumexp[h])


@compiled(fastmath=_FAST)
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
            start = _BYTES * width * i
            for r in range(ROWS):
                for j in range(count):
                    scores[r, j] = -logsumexp[i + r]
                    slopes[r, j] = -along[i + r]
            _add_scores(of_q + start, width, key, block, count, score)
            _add_scores(of_gradient + start, width, value, block, count, slope)
            for r in range(ROWS):
                own_scores, own_slopes = scores[r], slopes[r]
                for j in range(count):
                    share = _exp2(own_scores[j])
                    own_scores[j] = share
                    own_slopes[j] *= share
                for j in range(i + r + 1 - first, count):
                    own_scores[j] = _ZERO
                    own_slopes[j] = _ZERO
            _add_rows(slope, block, count, row, width, of_dq + start)
            _add_columns(of_gradient + start, width, score, block, count, of_dv)
            _add_columns(of_q + start, width, slope, block, count, of_dk)


@compiled(parallel=True, fastmath=_FAST)
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
    block = min(_BLOCK, -(-n // COLUMNS) * COLUMNS)
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
    block = min(_BLOCK, -(-n // COLUMNS) * COLUMNS)
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
