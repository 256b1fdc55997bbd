"""Attention over ragged sequences and its gradients on the cores of a CPU, compiled by Numba at first use.

A few queries at a time meet a block of the keys that some of them see, as in :mod:`numba_kernels`; blocks that nobody
sees are skipped. The keys and values of a sequence are brought into the order of the products once for all queries that
read them, in memory of the size of one sequence for each thread. One thread computes all that reads one sequence and
head of keys, in one order, so results depend neither on the number of threads nor on other sequences.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from torch import Tensor

from cordillera.kernels.attention.jagged_call import RANGES, SCORES
from cordillera.kernels.attention.numba_tiles import (
    BLOCK,
    BYTES,
    COLUMNS,
    FAST,
    ONE,
    ROWS,
    WIDTH,
    ZERO,
    add_columns,
    add_rows,
    add_scores,
    exp2,
    largest_of,
    powers_of,
)
from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import array, pool, threads_for, widen_to_single

if TYPE_CHECKING:
    from cordillera.kernels.attention.jagged_call import JaggedCall

LOG2E = float(np.log2(np.e))
_PACKING = 16  # number of queries that take as long as packing keys
_TOGETHER = 16  # rows that are transposed at a time, a divisor of the columns of a tile
_SOFTMAX, _IDENTITY, _SILU, _GELU, _FAST_GELU, _RELU, _RELU2, _LEAKY_RELU, _HARDSWISH, _TANH = range(len(SCORES))
_TO_BASE_2 = np.float32(LOG2E)
_NOWHERE = np.int64(2**62)
_LARGEST_POWER = np.float32(126.0)
_TWO, _HALF, _THREE, _SIXTH = np.float32(2.0), np.float32(0.5), np.float32(3.0), np.float32(1 / 6)
_LEAK = np.float32(0.01)
_HIDDEN = np.float32(-np.inf)
_ROOT_2, _OF_DENSITY = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)
_TANH_1, _TANH_3 = np.float32(math.sqrt(2 / math.pi)), np.float32(math.sqrt(2 / math.pi) * 0.044715)


@compiled(inline="always", fastmath=FAST)
def _sigmoid(x: Any) -> Any:
    power = -x * _TO_BASE_2
    return ONE / (ONE + exp2(_LARGEST_POWER if power > _LARGEST_POWER else power))


@compiled(inline="always", fastmath=FAST)
def _tanh(x: Any) -> Any:
    return _TWO * _sigmoid(_TWO * x) - ONE


@compiled(fastmath=FAST)
def _activate(kind: int, own: Any, factor: Any) -> None:
    """Scores of a row to shares, times ``factor``, in place."""
    if kind == _SILU:
        for j in range(own.size):
            own[j] = own[j] * _sigmoid(own[j]) * factor
    elif kind == _IDENTITY:
        for j in range(own.size):
            own[j] *= factor
    elif kind == _GELU:
        for j in range(own.size):
            own[j] = own[j] * np.float32(0.5 + 0.5 * math.erf(own[j] * _ROOT_2)) * factor
    elif kind == _FAST_GELU:
        for j in range(own.size):
            x = own[j]
            own[j] = _HALF * x * (ONE + _tanh(_TANH_1 * x + _TANH_3 * x * x * x)) * factor
    elif kind == _RELU:
        for j in range(own.size):
            own[j] = ZERO if own[j] < ZERO else own[j] * factor
    elif kind == _RELU2:
        for j in range(own.size):
            own[j] = ZERO if own[j] < ZERO else own[j] * own[j] * factor
    elif kind == _LEAKY_RELU:
        for j in range(own.size):
            own[j] = own[j] * (_LEAK if own[j] < ZERO else ONE) * factor
    elif kind == _HARDSWISH:
        for j in range(own.size):
            x = own[j]
            own[j] = x * (ZERO if x <= -_THREE else ONE if x >= _THREE else (x + _THREE) * _SIXTH) * factor
    else:
        for j in range(own.size):
            own[j] = _tanh(own[j]) * factor


@compiled(fastmath=FAST)
def _activate_with_slope(kind: int, own: Any, slopes: Any, factor: Any) -> None:
    """Convert scores of a row to attention weights, and gradients of weights to gradients of scores, in place."""
    if kind == _SILU:
        for j in range(own.size):
            x, s = own[j], _sigmoid(own[j])
            own[j] = x * s * factor
            slopes[j] *= s * (ONE + x * (ONE - s)) * factor
        return
    for j in range(own.size):
        x = own[j]
        if kind == _IDENTITY:
            value, slope = x, ONE
        elif kind == _GELU:
            below = np.float32(0.5 + 0.5 * math.erf(x * _ROOT_2))
            value, slope = x * below, below + x * np.float32(math.exp(-0.5 * x * x) * _OF_DENSITY)
        elif kind == _FAST_GELU:
            t = _tanh(_TANH_1 * x + _TANH_3 * x * x * x)
            value = _HALF * x * (ONE + t)
            slope = _HALF * (ONE + t) + _HALF * x * (ONE - t * t) * (_TANH_1 + _THREE * _TANH_3 * x * x)
        elif kind == _RELU:
            value, slope = (x, ONE) if not x <= ZERO else (ZERO, ZERO)
        elif kind == _RELU2:
            value, slope = (x * x, _TWO * x) if not x <= ZERO else (ZERO, ZERO)
        elif kind == _LEAKY_RELU:
            slope = ONE if not x <= ZERO else _LEAK
            value = x * slope
        elif kind == _HARDSWISH:
            if x <= -_THREE:
                value, slope = ZERO, ZERO
            elif x >= _THREE:
                value, slope = x, ONE
            else:
                value, slope = x * (x + _THREE) * _SIXTH, (_TWO * x + _THREE) * _SIXTH
        else:
            value = _tanh(x)
            slope = ONE - value * value
        own[j] = value * factor
        slopes[j] *= slope * factor


@compiled()
def _pack_rows(x: Any, start: int, count: int, head: int, factor: Any, rows: Any) -> None:
    """``rows [n, width] = factor * x[start : start + count, head]``, with zeros where ``x`` ends."""
    dim = x.shape[2]
    for r in range(rows.shape[0]):
        if r < count:
            for d in range(dim):
                rows[r, d] = widen_to_single(x[start + r, head, d]) * factor
            rows[r, dim:] = ZERO
        else:
            rows[r, :] = ZERO


@compiled()
def _transpose(rows: Any, columns: Any) -> None:
    """``rows [blocks m, width]`` to ``columns [blocks, width, m]``, a few at a time that stay in the cache."""
    blocks, width, block = columns.shape
    for b in range(blocks):
        for first in range(0, block, _TOGETHER):
            for d in range(width):
                own = columns[b, d, first : first + _TOGETHER]
                for j in range(_TOGETHER):
                    own[j] = rows[b * block + first + j, d]


@compiled()
def _put_columns(columns: Any, factor: Any, x: Any, start: int, count: int, head: int) -> None:
    """``x[start : start + count, head] = factor * columns``, transposed; ``columns [blocks, width, m]``."""
    blocks, _, block = columns.shape
    for b in range(blocks):
        for first in range(0, min(block, count - b * block), _TOGETHER):
            own = x[start + b * block + first : start + min(b * block + first + _TOGETHER, count), head]
            for d in range(own.shape[1]):
                for j in range(own.shape[0]):
                    own[j, d] = columns[b, d, first + j] * factor


@compiled()
def _reach(ranges: Any, masked: bool, first: int, count: int, keys: int, found: Any) -> None:
    """Keys from the first to the last of each kind of range that ``count`` queries see, ``found [3, 2]``."""
    for n in range(found.shape[0]):
        low, high = _NOWHERE, np.int64(0)
        if masked:
            for row in range(first, first + count):
                if ranges[row, n, 0] < ranges[row, n, 1]:
                    low, high = min(low, np.int64(ranges[row, n, 0])), max(high, np.int64(ranges[row, n, 1]))
        elif n == 0:
            low, high = np.int64(0), np.int64(keys)
        found[n, 0], found[n, 1] = low, high


@compiled()
def _columns_of(found: Any, first: int, block: int) -> Any:
    """Columns of the block of keys from ``first`` on that some query sees, in whole tiles."""
    low, high = np.int64(block), np.int64(0)
    for n in range(found.shape[0]):
        a, b = max(found[n, 0] - first, 0), min(found[n, 1] - first, block)
        if a < b:
            low, high = min(low, a), max(high, b)
    return low // COLUMNS * COLUMNS, -(-high // COLUMNS) * COLUMNS


@compiled()
def _hide(own: Any, ranges: Any, masked: bool, row: int, keys: int, first: int, value: Any) -> None:
    """Put ``value`` where a query does not see the key, in columns of the keys from ``first`` on."""
    at, count = 0, own.size
    if masked:
        for n in range(ranges.shape[1]):
            a = min(max(np.int64(ranges[row, n, 0]) - first, at), count)
            b = min(max(np.int64(ranges[row, n, 1]) - first, at), count)
            if a < b:
                own[at:a] = value
                at = b
    else:
        at = min(max(keys - first, 0), count)
    own[at:] = value


@compiled(fastmath=FAST)
def _softmax_row(own: Any, highest: Any, total: Any, r: int, out: Any) -> bool:
    """Scores of a row, -inf where hidden, to powers relative to the highest so far, by which earlier ones are scaled.

    Returns:
        Whether a key is seen.
    """
    most = largest_of(np.int64(own.ctypes.data), own.size)
    if most == -np.inf:
        return False
    if most > highest[r] or most != most:
        scale = exp2(highest[r] - most) if highest[r] != -np.inf else ZERO
        total[r] *= scale
        for d in range(out.size):
            out[d] *= scale
        highest[r] = most
    total[r] += powers_of(np.int64(own.ctypes.data), own.size, highest[r])
    return True


@compiled(fastmath=FAST)
def _forward_rows(
    queries: Any, keys: Any, values: Any, out: Any, ends: Any, count: int, length: int, kind: int, ranges: Any,
    masked: bool, first_row: int, factors: Any, bias: Any, steps: Any, biased: bool, first_query: int, scores: Any,
    found: Any, highest: Any, total: Any,
) -> None:  # fmt: skip
    """Forward of a tile: ``queries``, ``out [ROWS, width]``; the first ``count`` rows are valid.

    The first ``length`` of ``keys [blocks, width, m]`` and ``values [blocks, m, width]`` are valid; ``ends [ROWS]``
    receives log-sum-exps in base 2.
    """
    blocks, width, block = keys.shape
    score = np.int64(scores.ctypes.data)
    highest[:] = -np.inf
    total[:] = ZERO
    out[:] = ZERO
    _reach(ranges, masked, first_row, count, length, found)
    for b in range(blocks):
        first = b * block
        low, high = _columns_of(found, first, block)
        if low >= high:
            continue
        scores[:, low:high] = ZERO
        add_scores(
            np.int64(queries.ctypes.data), width, np.int64(keys[b].ctypes.data) + BYTES * low, block, high - low,
            score + BYTES * low,
        )  # fmt: skip
        for r in range(ROWS):
            own = scores[r, low:high]
            if r >= count:
                own[:] = ZERO
                continue
            if biased:
                scale = _TO_BASE_2 if kind == _SOFTMAX else ONE
                for j in range(min(own.size, length - first - low)):
                    own[j] += bias[(first_query + r) * steps[2] + (first + low + j) * steps[3]] * scale
            if kind == _SOFTMAX:
                _hide(own, ranges, masked, first_row + r, length, first + low, _HIDDEN)
                if not _softmax_row(own, highest, total, r, out[r]):
                    own[:] = ZERO
                    continue
            else:
                _activate(kind, own, factors[first_row + r])
                _hide(own, ranges, masked, first_row + r, length, first + low, ZERO)
        add_rows(
            score + BYTES * low, block, high - low, np.int64(values[b].ctypes.data) + BYTES * low * width, width,
            np.int64(out.ctypes.data),
        )  # fmt: skip
    if kind == _SOFTMAX:
        for r in range(count):
            ends[r] = -np.inf
            if highest[r] != -np.inf:
                for d in range(width):
                    out[r, d] /= total[r]
                ends[r] = highest[r] + np.log2(total[r])


@compiled()
def padded(count: int, multiple: int) -> int:
    """The next multiple of a number."""
    return -(-count // multiple) * multiple


def _memory_of(longest: int, longest_q: int, width: int, is_backward: bool) -> int:
    """Return the number of float32 values that each thread of a kernel needs for itself.

    Args:
        longest: Length of the longest sequence of keys.
        longest_q: Length of the longest sequence of queries.
        width: Padded width of the heads.
        is_backward: Whether it is for :func:`backward`.
    """
    keys, queries = -(-longest // BLOCK) * BLOCK * width, -(-longest_q // ROWS) * ROWS * width
    return 5 * keys + 3 * queries if is_backward else 2 * keys


@compiled()
def _block_of(length: int) -> int:
    """Keys of a block for a sequence of ``length``."""
    return min(BLOCK, padded(length, COLUMNS))


@compiled(parallel=True, fastmath=FAST)
def _all_forward(
    q: Any, k: Any, v: Any, out: Any, ends: Any, k_starts: Any, k_lengths: Any, begins: Any, readers: Any,
    q_starts: Any, q_lengths: Any, rows: Any, ranges: Any, masked: bool, factors: Any, bias: Any, steps: Any,
    biased: bool, kind: int, scale: float, width: int, longest: int, longest_q: int, cuts: Any, memory: Any,
) -> None:  # fmt: skip
    """Outputs ``[rows, H, D]`` and log-sum-exps ``[rows, H]`` in base 2.

    Work is divided into pairs of a sequence and a head of keys; thread ``t`` takes those from ``cuts[t]`` to
    ``cuts[t + 1]``. Sequence ``s`` of keys is read by the sequences of queries ``readers[begins[s] : begins[s + 1]]``.
    ``memory`` is that of :func:`_memory_of`.
    """
    heads, groups, dim = q.shape[1], k.shape[1], q.shape[2]
    group = heads // groups
    most = padded(longest, BLOCK) * width
    for chunk in numba.prange(len(cuts) - 1):
        key_memory, value_memory = memory[chunk, :most], memory[chunk, most : 2 * most]
        queries, found_rows = np.empty((ROWS, width), np.float32), np.empty((ROWS, width), np.float32)
        score_memory, reach = np.empty(ROWS * BLOCK, np.float32), np.empty((3, 2), np.int64)
        highest, total, own_ends = (
            np.empty(ROWS, np.float32), np.empty(ROWS, np.float32), np.empty(ROWS, np.float32),
        )  # fmt: skip
        for pair in range(cuts[chunk], cuts[chunk + 1]):
            s, g = pair // groups, pair % groups
            length, start = k_lengths[s], k_starts[s]
            if not length or begins[s] == begins[s + 1]:
                continue
            block = _block_of(length)
            blocks = -(-length // block)
            size = blocks * block * width
            keys = key_memory[:size].reshape(blocks, width, block)
            values = value_memory[:size].reshape(blocks * block, width)
            scores = score_memory[: ROWS * block].reshape(ROWS, block)
            _pack_rows(k, start, length, g, ONE, values)
            _transpose(values, keys)
            _pack_rows(v, start, length, g, ONE, values)
            by_block = values.reshape(blocks, block, width)
            for reader in range(begins[s], begins[s + 1]):
                b = readers[reader]
                for h in range(g * group, (g + 1) * group):
                    for i in range(0, q_lengths[b], ROWS):
                        count = min(ROWS, q_lengths[b] - i)
                        _pack_rows(q, q_starts[b] + i, count, h, np.float32(scale), queries)
                        _forward_rows(
                            queries, keys, by_block, found_rows, own_ends, count, length, kind, ranges, masked,
                            rows[b] + i, factors, bias[b * steps[0] + h * steps[1] :], steps, biased, i, scores,
                            reach, highest, total,
                        )  # fmt: skip
                        for r in range(count):
                            for d in range(dim):
                                out[rows[b] + i + r, h, d] = found_rows[r, d]
                            if kind == _SOFTMAX:
                                ends[rows[b] + i + r, h] = own_ends[r]


@compiled(fastmath=FAST)
def _backward_block(
    b: int, queries: Any, incoming: Any, along: Any, ends: Any, keys: Any, values: Any, key_rows: Any, dq: Any,
    dk: Any, dv: Any, count: int, length: int, kind: int, ranges: Any, masked: bool, first_row: int, factors: Any,
    bias: Any, steps: Any, biased: bool, scores: Any, slopes: Any, reaches: Any,
) -> None:  # fmt: skip
    """Backward of one block of keys and all queries of a sequence and head; arguments as in :func:`_all_backward`."""
    _, width, block = keys.shape
    first = b * block
    score, slope = np.int64(scores.ctypes.data), np.int64(slopes.ctypes.data)
    of_q, of_dout, of_dq = np.int64(queries.ctypes.data), np.int64(incoming.ctypes.data), np.int64(dq.ctypes.data)
    key, value = np.int64(keys[b].ctypes.data), np.int64(values[b].ctypes.data)
    row, of_dk, of_dv = np.int64(key_rows[b].ctypes.data), np.int64(dk[b].ctypes.data), np.int64(dv[b].ctypes.data)
    for i in range(0, count, ROWS):
        low, high = _columns_of(reaches[i // ROWS], first, block)
        if low >= high:
            continue
        at, start = BYTES * low, BYTES * width * i
        for r in range(ROWS):
            scores[r, low:high] = -ends[i + r]
            slopes[r, low:high] = -along[i + r]
        add_scores(of_q + start, width, key + at, block, high - low, score + at)
        add_scores(of_dout + start, width, value + at, block, high - low, slope + at)
        for r in range(ROWS):
            own, own_slopes = scores[r, low:high], slopes[r, low:high]
            if i + r >= count:
                own[:] = ZERO
                own_slopes[:] = ZERO
                continue
            if biased:
                scale = _TO_BASE_2 if kind == _SOFTMAX else ONE
                for j in range(min(own.size, length - first - low)):
                    own[j] += bias[(i + r) * steps[2] + (first + low + j) * steps[3]] * scale
            if kind == _SOFTMAX:
                for j in range(own.size):
                    share = exp2(own[j])
                    own[j] = share
                    own_slopes[j] *= share
            else:
                _activate_with_slope(kind, own, own_slopes, factors[first_row + i + r])
            _hide(own, ranges, masked, first_row + i + r, length, first + low, ZERO)
            _hide(own_slopes, ranges, masked, first_row + i + r, length, first + low, ZERO)
        add_rows(slope + at, block, high - low, row + at * width, width, of_dq + start)
        add_columns(of_dout + start, width, score + at, block, high - low, of_dv + at)
        add_columns(of_q + start, width, slope + at, block, high - low, of_dk + at)


# One piece: memory of a thread, then pairs, then readers and their heads, whose arrays all loops share.
@compiled(parallel=True, fastmath=FAST)
def _all_backward(
    q: Any, k: Any, v: Any, out: Any, ends: Any, gradient: Any, end_gradient: Any, dq: Any, dk: Any, dv: Any,
    k_starts: Any, k_lengths: Any, begins: Any, readers: Any, q_starts: Any, q_lengths: Any, rows: Any, ranges: Any,
    masked: bool, factors: Any, bias: Any, steps: Any, biased: bool, kind: int, scale: float, width: int,
    longest: int, longest_q: int, cuts: Any, memory: Any,
) -> None:  # fmt: skip
    """Compute ``dq [rows, H, D]``, ``dk`` and ``dv`` from the output and the gradients of outputs and log-sum-exps.

    ``scale`` is that of :func:`_all_forward`, which for softmax includes the change to base 2. ``memory`` is that of
    :func:`_memory_of`.
    """
    heads, groups, dim = q.shape[1], k.shape[1], q.shape[2]
    group = heads // groups
    unscale = np.float32(1 / _TO_BASE_2 if kind == _SOFTMAX else ONE)
    padded_q = padded(longest_q, ROWS)
    most, most_q = padded(longest, BLOCK) * width, padded_q * width
    for chunk in numba.prange(len(cuts) - 1):
        key_memory = memory[chunk, : 5 * most].reshape(5, most)
        query_memory = memory[chunk, 5 * most : 5 * most + 3 * most_q].reshape(3, most_q)
        own_ends, along = np.empty(padded_q, np.float32), np.empty(padded_q, np.float32)
        score_memory, slope_memory = np.empty(ROWS * BLOCK, np.float32), np.empty(ROWS * BLOCK, np.float32)
        reaches = np.empty((padded_q // ROWS, 3, 2), np.int64)
        for pair in range(cuts[chunk], cuts[chunk + 1]):
            s, g = pair // groups, pair % groups
            length, start = k_lengths[s], k_starts[s]
            if not length or begins[s] == begins[s + 1]:
                continue
            block = _block_of(length)
            blocks = -(-length // block)
            size = blocks * block * width
            shape, by_rows = (blocks, width, block), (blocks * block, width)
            keys, values = key_memory[0, :size].reshape(shape), key_memory[1, :size].reshape(shape)
            key_rows, own_dk = key_memory[2, :size].reshape(by_rows), key_memory[3, :size].reshape(shape)
            own_dv = key_memory[4, :size].reshape(shape)
            scores = score_memory[: ROWS * block].reshape(ROWS, block)
            slopes = slope_memory[: ROWS * block].reshape(ROWS, block)
            _pack_rows(v, start, length, g, ONE, key_rows)
            _transpose(key_rows, values)
            _pack_rows(k, start, length, g, ONE, key_rows)
            _transpose(key_rows, keys)
            own_dk[:] = ZERO
            own_dv[:] = ZERO
            for reader in range(begins[s], begins[s + 1]):
                b = readers[reader]
                count, row = q_lengths[b], rows[b]
                size_q = padded(count, ROWS)
                queries = query_memory[0, : size_q * width].reshape(size_q, width)
                incoming = query_memory[1, : size_q * width].reshape(size_q, width)
                own_dq = query_memory[2, : size_q * width].reshape(size_q, width)
                for i in range(0, count, ROWS):
                    _reach(ranges, masked, row + i, min(ROWS, count - i), length, reaches[i // ROWS])
                for h in range(g * group, (g + 1) * group):
                    _pack_rows(q, q_starts[b], count, h, np.float32(scale), queries)
                    _pack_rows(gradient, row, count, h, ONE, incoming)
                    own_dq[:] = ZERO
                    for r in range(size_q):
                        own_ends[r], along[r] = ZERO, ZERO
                        if r < count and kind == _SOFTMAX:
                            if ends[row + r, h] != -np.inf:
                                own_ends[r] = ends[row + r, h]
                            total = -end_gradient[row + r, h]
                            for d in range(dim):
                                total += incoming[r, d] * widen_to_single(out[row + r, h, d])
                            along[r] = total
                    for c in range(blocks):
                        _backward_block(
                            c, queries, incoming, along, own_ends, keys, values,
                            key_rows.reshape(blocks, block, width), own_dq, own_dk, own_dv, count, length, kind,
                            ranges, masked, row, factors, bias[b * steps[0] + h * steps[1] :], steps, biased, scores,
                            slopes, reaches,
                        )  # fmt: skip
                    for r in range(count):
                        for d in range(dim):
                            dq[row + r, h, d] = own_dq[r, d] * (np.float32(scale) * unscale)
            _put_columns(own_dk, unscale, dk, start, length, g)
            _put_columns(own_dv, ONE, dv, start, length, g)


def forward(q: Tensor, k: Tensor, v: Tensor, call: JaggedCall, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the output in the dtype of the queries, and log-sum-exps in base 2, ``float32 [T, H]``."""
    out = torch.zeros(call.out_rows, *q.shape[1:])
    ends = torch.full((call.out_rows if call.score == "softmax" else 0, q.shape[1]), -torch.inf)
    if out.numel() and k.numel():
        arguments, threads = _arguments(q, k, call, scale, is_backward=False)
        with pool(threads):
            _all_forward(*(array(x.contiguous()) for x in (q, k, v)), out.numpy(), ends.numpy(), *arguments)
    return out.to(q.dtype), ends


def backward(
    dout: Tensor, dends: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, ends: Tensor, call: JaggedCall,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute gradients in float32: of queries as the output, of keys, and of values."""
    dq, dk, dv = torch.zeros(out.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    if out.numel() and k.numel():
        arguments, threads = _arguments(q, k, call, scale, is_backward=True)
        with pool(threads):
            _all_backward(
                *(array(x.detach().contiguous()) for x in (q, k, v, out)), ends.numpy(),
                dout.float().contiguous().numpy(), dends.contiguous().numpy(), dq.numpy(), dk.numpy(), dv.numpy(),
                *arguments,
            )  # fmt: skip
    return dq, dk, dv


def _arguments(
    q: Tensor, k: Tensor, call: JaggedCall, scale: float, *, is_backward: bool
) -> tuple[tuple[Any, ...], int]:
    """Arguments that both kernels take after the tensors, and the number of threads."""
    q_starts, q_lengths, rows, of_keys, k_starts, k_lengths = (
        x.numpy()
        for x in (
            call.q_starts, call.q_lengths, call.rows, call.of_keys, call.k_starts, call.k_lengths
        )
    )  # fmt: skip
    if call.ranges is None and call.bias is None and not call.is_broadcast and len(of_keys):
        # neighbours that read the same keys are one sequence
        first = np.flatnonzero(np.append(True, np.diff(of_keys) != 0))
        q_starts, rows, of_keys = q_starts[first], rows[first], of_keys[first]
        q_lengths = np.add.reduceat(q_lengths, first)
    readers = np.argsort(of_keys, kind="stable")
    begins = np.searchsorted(of_keys[readers], np.arange(len(k_starts) + 1))
    queries = np.append(0, np.cumsum(q_lengths[readers]))
    work = (queries[begins[1:]] - queries[begins[:-1]] + _PACKING) * k_lengths
    until = np.cumsum(np.repeat(work, k.shape[1]))
    threads = threads_for(int(until[-1])) if len(until) else 1
    inner = np.searchsorted(until, np.arange(1, threads) * (until[-1] / threads if len(until) else 0.0))
    cuts = np.concatenate([[0], inner, [len(until)]]).astype(np.int64)
    width = -(-q.shape[2] // WIDTH) * WIDTH
    longest, longest_q = call.longest_k, int(q_lengths.max(initial=0))
    memory = torch.empty(threads, _memory_of(longest, longest_q, width, is_backward))
    ranges = torch.zeros(0, RANGES, 2, dtype=torch.int32) if call.ranges is None else call.ranges
    given = call.bias if call.bias is not None and call.bias.numel() else torch.zeros(()).expand(1, 1, 1, 1)
    bias = given.detach().float()  # memory and steps, so that there is one kernel for all layouts
    span = 1 + sum((size - 1) * step for size, step in zip(bias.shape, bias.stride(), strict=True))
    in_base_2 = LOG2E if call.score == "softmax" else 1.0
    return (
        k_starts, k_lengths, begins, readers, q_starts, q_lengths, rows, ranges.numpy(),
        call.ranges is not None, call.factors.float().numpy(), bias.as_strided((span,), (1,)).numpy(), bias.stride(),
        call.bias is not None, SCORES.index(call.score), scale * in_base_2, width, longest, longest_q, cuts,
        memory.numpy(),
    ), threads  # fmt: skip
