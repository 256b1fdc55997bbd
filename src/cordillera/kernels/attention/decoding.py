"""Attention of a few new tokens to the keys and values of their sequences, on a CPU.

New tokens are stored in the cache and attended to in one call, in float32. Sums go over keys from the first to the
last, and a key that a token does not see adds nothing to them. A token's result is therefore the same, bit for bit,
whether it is computed alone or beside drafted tokens, of which it sees its ancestors only, and for any number of
threads.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from cordillera.kernels.attention.numba_tiles import FAST, ZERO, exp2
from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import array, has_instructions, narrow, pool, threads_for, widen_to_single

MOST_TOKENS = 16
"""Largest number of new tokens of a sequence for which this kernel is made."""

_LANES = 16  # queries at a time
# Keys at a time, and queries whose outputs are kept in registers, of which AVX-512 has 32 and AVX2 has 16.
_KEYS, _ROWS = (8, 4) if has_instructions("avx512f") else (4, 2)
_COLUMNS = 32  # numbers of them; divides the width of a head
_LEAST = np.float32(-126.0)
_LOG2_E = 1.4426950408889634

_WORD, _WIDE, _SINGLE = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _WORDS = ir.VectorType(_SINGLE, _LANES), ir.VectorType(_WORD, _LANES)


def _spread(builder: Any, value: Any) -> Any:
    """A vector of one number."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, value, _WORD(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_WORDS, [0] * _LANES))


def _address(builder: Any, base: Any, stride: Any, number: Any, kind: Any) -> Any:
    return builder.inttoptr(builder.add(base, builder.mul(stride, number)), kind.as_pointer())


def _add_product(builder: Any, slot: Any, a: Any, b: Any) -> None:
    product = builder.fmul(a, b, flags=["contract"])
    builder.store(builder.fadd(builder.load(slot), product, flags=["contract"]), slot)


def _score_tile(keys: int) -> Any:
    """Make a function that stores the products of ``keys`` keys with sixteen queries, ``float32 [keys, 16]``.

    Queries are ``float32 [width, 16]``, keys rows of ``width`` numbers, ``stride`` bytes apart.
    """

    @intrinsic
    def tile(typing_context: Any, q: Any, width: Any, key: Any, stride: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            q, width, key, stride, out = arguments
            sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(keys)]
            for slot in sums:
                builder.store(ir.Constant(_VECTOR, [0.0] * _LANES), slot)
            with cgutils.for_range(builder, width, intp=_WIDE) as loop:
                own = builder.load(_address(builder, q, _WIDE(4 * _LANES), loop.index, _VECTOR), align=4)
                for n, slot in enumerate(sums):
                    start = builder.add(key, builder.mul(stride, _WIDE(n)))
                    value = builder.load(_address(builder, start, _WIDE(4), loop.index, _SINGLE), align=4)
                    _add_product(builder, slot, own, _spread(builder, value))
            for n, slot in enumerate(sums):
                place = _address(builder, out, _WIDE(4 * _LANES), _WIDE(n), _VECTOR)
                builder.store(builder.load(slot), place, align=4)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 5), generate

    return tile


def _value_tile(is_half: bool) -> Any:
    """Make a function that adds ``weights[:, r] @ values`` of some queries to 32 columns, ``float32 [rows, 32]``.

    Weights are ``float32 [count, 16]``, values rows ``stride`` bytes apart.
    """
    vectors = range(_COLUMNS // _LANES)
    kind = ir.VectorType(ir.IntType(16), _LANES) if is_half else _VECTOR
    size = (2 if is_half else 4) * _LANES

    @intrinsic
    def tile(typing_context: Any, weight: Any, count: Any, value: Any, stride: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weight, count, value, stride, out = arguments
            places = {
                (r, v): _address(builder, out, _WIDE(4 * _LANES), _WIDE(r * len(vectors) + v), _VECTOR)
                for r in range(_ROWS)
                for v in vectors
            }
            sums = {key: cgutils.alloca_once(builder, _VECTOR) for key in places}
            for key, place in places.items():
                builder.store(builder.load(place, align=4), sums[key])
            with cgutils.for_range(builder, count, intp=_WIDE) as loop:
                row = builder.add(value, builder.mul(stride, loop.index))
                own = []
                for v in vectors:
                    part = builder.load(_address(builder, row, _WIDE(size), _WIDE(v), kind), align=size // _LANES)
                    if is_half:
                        upper = builder.shl(builder.zext(part, _WORDS), ir.Constant(_WORDS, [16] * _LANES))
                        part = builder.bitcast(upper, _VECTOR)
                    own.append(part)
                start = builder.add(weight, builder.mul(_WIDE(4 * _LANES), loop.index))
                for r in range(_ROWS):
                    share = builder.load(_address(builder, start, _WIDE(4), _WIDE(r), _SINGLE), align=4)
                    for v in vectors:
                        _add_product(builder, sums[r, v], _spread(builder, share), own[v])
            for key, place in places.items():
                builder.store(builder.load(sums[key]), place, align=4)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 5), generate

    return tile


_scores_of_some, _scores_of_one = _score_tile(_KEYS), _score_tile(1)
_half_values, _single_values = _value_tile(True), _value_tile(False)


@compiled(fastmath=FAST)
def _score(q: Any, keys: Any, group: Any, table: Any, wide: Any, scores: Any) -> None:
    """Fill ``scores [m, 16]`` with the products of the first ``m`` keys with the queries ``q [width, 16]``.

    Args:
        wide: Memory for some keys in float32, ``[keys, width]``: each of their numbers is multiplied with a vector.
    """
    width, total, page = len(q), len(scores), keys.shape[2]
    stride = 4 * width
    of_wide, of_q, of_scores = np.int64(wide.ctypes.data), np.int64(q.ctypes.data), np.int64(scores.ctypes.data)
    for start in range(0, total, page):
        own, count = keys[table[start // page], group], min(page, total - start)
        for m in range(0, count, _KEYS):
            some, score = min(_KEYS, count - m), of_scores + 4 * _LANES * (start + m)
            for n in range(some):
                row, copy = own[m + n], wide[n]
                for d in range(width):
                    copy[d] = widen_to_single(row[d])
            if some == _KEYS:
                _scores_of_some(of_q, width, of_wide, stride, score)
            else:
                for n in range(some):
                    _scores_of_one(of_q, width, of_wide + n * stride, stride, score + 4 * _LANES * n)


@compiled(fastmath=FAST)
def _attend(
    q: Any, keys: Any, values: Any, group: Any, table: Any, cached: Any, seen: Any, first: Any, heads: Any, wide: Any,
    scores: Any, out: Any,
) -> None:  # fmt: skip
    """Attention of up to sixteen queries that read one head of keys: queries are rows of (token, head) from ``first``.

    Args:
        q: ``float32 [width, 16]``.
        keys: ``[pages, G, page, width]``, as ``values``, with the new ones.
        table: Pages of the sequence, ``int64 [n]``.
        cached: Number of keys before the new ones.
        seen: Which new tokens each of them sees, ``bool [n, n]``.
        heads: Number of queries of a token.
        wide: ``float32 [keys, width]``, overwritten, as ``scores [cached + n, 16]``.
        out: ``float32 [16, width]``.
    """
    width, new = len(q), len(seen)
    total = cached + new
    groups, page, size = keys.shape[1], keys.shape[2], keys.itemsize
    stride, of_values, of_scores = width * size, np.int64(values.ctypes.data), np.int64(scores.ctypes.data)
    _score(q, keys, group, table, wide, scores)
    for j in range(new):
        for r in range(_LANES):
            token = (first + r) // heads
            if token < new and not seen[token, j]:
                scores[cached + j, r] = -np.inf
    highest, sums = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    highest[:] = -np.inf
    sums[:] = ZERO
    for m in range(total):
        for r in range(_LANES):
            highest[r] = max(highest[r], scores[m, r])
    for m in range(total):
        for r in range(_LANES):
            x = scores[m, r] - highest[r]
            power = ZERO if x < _LEAST else exp2(x)
            scores[m, r] = power
            sums[r] += power
    products = np.empty((_ROWS, _COLUMNS), np.float32)
    of_products = np.int64(products.ctypes.data)
    rows = min(_LANES, new * heads - first)
    for r in range(0, rows, _ROWS):
        for d in range(0, width, _COLUMNS):
            products[:] = ZERO
            for start in range(0, cached, page):
                value = of_values + (table[start // page] * groups + group) * page * stride + size * d
                score, count = of_scores + 4 * (_LANES * start + r), min(page, cached - start)
                if size == 2:
                    _half_values(score, count, value, stride, of_products)
                else:
                    _single_values(score, count, value, stride, of_products)
            for i in range(min(_ROWS, rows - r)):
                # New values one by one: those that are not seen may be infinite, and zero times infinity is no number.
                for j in range(new):
                    if seen[(first + r + i) // heads, j]:
                        place = cached + j
                        value_row = values[table[place // page], group, place % page]
                        for c in range(_COLUMNS):
                            products[i, c] += scores[place, r + i] * widen_to_single(value_row[d + c])
                for c in range(_COLUMNS):
                    out[r + i, d + c] = products[i, c] / sums[r + i]


@compiled()
def attention_scratch(width: int) -> Any:
    """Return the memory that a thread needs for :func:`attend_from`."""
    queries, found = np.zeros((width, _LANES), np.float32), np.empty((_LANES, width), np.float32)
    return queries, found, np.empty((_KEYS, width), np.float32)


@compiled(fastmath=FAST)
def attend_from(
    q: Any, keys: Any, values: Any, sequence: Any, table: Any, seen: Any, scale: Any, group: Any, first: Any,
    memory: Any, out: Any,
) -> None:  # fmt: skip
    """Attention of the queries of a sequence that read one head of keys, up to sixteen, from number ``first`` on.

    Args:
        q: Queries, ``[T, H, D]``.
        keys: ``[pages, G, page, D]``, as ``values``, with the new ones.
        sequence: Row of the first new token, number of new tokens and of cached ones.
        table: Pages of the sequence.
        seen: Which new tokens each new token sees, ``bool [T, n]``.
        scale: Factor of scores, of :func:`score_scale`.
        group: Number of the head of keys.
        memory: Memory from :func:`attention_scratch`.
        out: ``[T, H, D]``.
    """
    (queries, found, wide), start, new, cached = memory, sequence[0], sequence[1], sequence[2]
    share = q.shape[1] // keys.shape[1]
    rows, zero = min(_LANES, new * share - first), q[0, 0, 0]
    for r in range(rows):
        token, head = start + (first + r) // share, group * share + (first + r) % share
        for d in range(len(queries)):
            queries[d, r] = widen_to_single(q[token, head, d]) * scale
    scores = np.empty((cached + new, _LANES), np.float32)
    visible = seen[start : start + new, :new]
    _attend(queries, keys, values, group, table, cached, visible, first, share, wide, scores, found)
    for r in range(rows):
        token, head = start + (first + r) // share, group * share + (first + r) % share
        for d in range(len(queries)):
            out[token, head, d] = narrow(found[r, d], zero)


@compiled()
def store_group(k: Any, v: Any, keys: Any, values: Any, sequence: Any, table: Any, group: Any) -> None:
    """Store the new keys and values of one head of a sequence.

    Args:
        k: New keys, ``[T, G, D]``, as ``v``.
        keys: Where they are stored, ``[pages, G, page, D]``, as ``values``.
        sequence: Row of the first new token, number of new tokens and of cached ones.
        table: Pages of the sequence.
        group: Number of the head.
    """
    start, new, cached = sequence[0], sequence[1], sequence[2]
    page = keys.shape[2]
    for t in range(new):
        place, slot = table[(cached + t) // page], (cached + t) % page
        for d in range(keys.shape[3]):
            keys[place, group, slot, d] = k[start + t, group, d]
            values[place, group, slot, d] = v[start + t, group, d]


@compiled()
def attention_items(sequences: Any, groups: Any, share: Any) -> Any:
    """Return sequence, group and first query of each call of :func:`attend_from`, ``int64 [n, 3]``.

    Args:
        sequences: ``int64 [S, 3]``, as for :func:`decode_attention`.
        groups: Number of heads of keys.
        share: Number of queries of a token that read one of them.
    """
    count = 0
    for s in range(len(sequences)):
        count += groups * ((sequences[s, 1] * share + _LANES - 1) // _LANES)
    items = np.empty((count, 3), np.int64)
    count = 0
    for s in range(len(sequences)):
        for g in range(groups):
            for first in range(0, sequences[s, 1] * share, _LANES):
                items[count] = s, g, first
                count += 1
    return items


@compiled(parallel=True, fastmath=FAST)
def _all(
    q: Any, k: Any, v: Any, keys: Any, values: Any, sequences: Any, tables: Any, seen: Any, scale: Any, out: Any,
    threads: int,
) -> None:  # fmt: skip
    """Store the new keys and values, and attend; see :func:`decode_attention`."""
    groups = keys.shape[1]
    for s in range(len(sequences)):
        for g in range(groups):
            store_group(k, v, keys, values, sequences[s], tables[s], g)
    items = attention_items(sequences, groups, q.shape[1] // groups)
    count = len(items)
    for chunk in numba.prange(threads):
        memory = attention_scratch(q.shape[2])
        for item in range(count * chunk // threads, count * (chunk + 1) // threads):
            s, g, first = items[item]
            attend_from(q, keys, values, sequences[s], tables[s], seen, scale, g, first, memory, out)


def score_scale(width: int) -> Any:
    """Return the factor of the products of queries and keys of a ``width``, as powers of two are taken of them."""
    return np.float32(_LOG2_E / width**0.5)


def is_supported(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Return whether :func:`decode_attention` is made for this dtype, device and width of heads."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and width % _COLUMNS == 0


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, sequences: Tensor, tables: Tensor, seen: Tensor
) -> Tensor:
    """Store new keys and values in a cache, and compute the attention of the new tokens to the tokens that they see.

    Scores are scaled by ``1 / sqrt(D)``. There are no gradients.

    Args:
        q: Queries, ``bfloat16`` or ``float32 [T, H, D]``; ``D`` is a multiple of 32.
        k: New keys, ``[T, G, D]``, as ``v``; ``G`` divides ``H``.
        keys: Cached keys, contiguous ``[pages, G, page, D]``, as ``values``; changed in place.
        sequences: For each sequence with new tokens the row of the first of them, their number (at most
            :data:`MOST_TOKENS`) and that of the cached tokens, ``int64 [S, 3]``.
        tables: Pages of each of these sequences in their order, with room for the new tokens, ``int64 [S, n]``.
        seen: Which new tokens of its sequence each new token sees, itself included, ``bool [T, n]``.

    Returns:
        Same shape and dtype as ``q``; rows that belong to none of the sequences are undefined.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    work = int((sequences[:, 1] * sequences[:, 2]).sum()) * q.shape[1] * 8  # in values of other kernels
    threads = threads_for(work)
    scale = score_scale(q.shape[2])
    parts = [array(x.detach().contiguous()) for x in (q, k, v, keys, values)]
    with pool(threads):
        _all(*parts, sequences.numpy(), tables.numpy(), seen.numpy(), scale, array(out), threads)
    return out
