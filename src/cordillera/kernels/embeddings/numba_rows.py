"""Rows of embedding tables in few bits: encoded and decoded one at a time, compiled by Numba.

A row of ``D`` numbers is kept as

    ``fp32``  D float32
    ``fp16``  D float16
    ``int8``  D codes of 8 bits, float32 scale, float32 bias: D + 8 bytes
    ``int4``  D codes of 4 bits, the lower half of a byte first, float16 scale, float16 bias: D / 2 + 4 bytes
    ``int2``  D codes of 2 bits, the lowest of a byte first, float16 scale, float16 bias: D / 4 + 4 bytes; decoded only

and a code means ``code * scale + bias``. With nearest rounding the bytes are those of FBGEMM and of
``torch.ops.quantized.embedding_bag_byte_prepack`` and ``_4bit_prepack``. Stochastic rounding takes ``floor(x + u)``
with ``u`` uniform in [0, 1), so the mean of a row that is encoded and decoded is the row (Zhang et al. 2018,
"Training with low-precision embedding tables"). It rounds the float16 bias down and the float16 scale up, so that no
code needs clamping, which would not be unbiased.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from cordillera.kernels.compiling import compiled
from cordillera.kernels.embeddings.cached_rows import FINE, FORMATS, NOT_FINITE, TOO_LARGE
from cordillera.kernels.embeddings.numba_random import absorb, fraction, seeded
from cordillera.kernels.numba_support import extent, reinterpret

_FP32, _FP16, _INT8, _INT4 = FORMATS["fp32"], FORMATS["fp16"], FORMATS["int8"], FORMATS["int4"]
_NEAREST, _STOCHASTIC, _DOWN, _UP = 0, 1, 2, 3
_INFINITY = np.int32(0x7F800000)
_LARGEST_HALF = np.float32(65504.0)
_WORD, _SINGLE, _DOUBLE = np.int32(0), np.float32(0), np.float64(0)
_ONE, _ZERO = np.float32(1), np.float32(0)
# FBGEMM adds 1e-8 to a row's range. From this range on that costs at most 0.3 % of a step; below, it does harm.
_SMALLEST_GUARDED = np.float32(2.0**-10)
_GUARD = np.float32(1e-8)


@compiled()
def _half_bits(value: Any, direction: int, u: Any) -> Any:
    """Bits of a float16 next to ``value``, a float32 of at most 65504; ``u`` is for stochastic rounding."""
    word = reinterpret(value, _WORD)
    exponent = max(((word >> 23) & 255) - 127, -14)
    # float64 holds the size in units of float16's last place, exactly
    steps = np.float64(abs(value)) * reinterpret(np.int64(1033 - exponent) << 52, _DOUBLE)
    if direction == _NEAREST:
        whole = np.rint(steps)
    elif direction == _STOCHASTIC:
        whole = np.floor(steps + np.float64(u))
    elif (direction == _DOWN) == (value >= 0):
        whole = np.floor(steps)
    else:
        whole = np.ceil(steps)
    bits = ((exponent + 15) << 10) + np.int64(whole) - 1024  # a carry into the exponent is right as it is
    return np.uint16(bits | ((word >> 16) & 0x8000))


@compiled()
def half(bits: Any) -> Any:
    """Float32 of a float16's bits: its fields, shifted, are that number times 2 ** -112."""
    word = np.int32(bits)
    size = reinterpret(np.int32((word & 0x7FFF) << 13), _SINGLE) * np.float32(2.0**112)
    # So far infinity and NaN are finite numbers of 65536 or more; the largest exponent restores them.
    beyond = _INFINITY if (word & 0x7C00) == 0x7C00 else _WORD
    size = reinterpret(np.int32(reinterpret(size, _WORD) | beyond), _SINGLE)
    return -size if word & 0x8000 else size


@compiled()
def read_single(source: Any, at: int) -> Any:
    """Return the float32 at byte ``at``."""
    word = np.int64(source[at]) | np.int64(source[at + 1]) << 8
    word |= np.int64(source[at + 2]) << 16 | np.int64(source[at + 3]) << 24
    return reinterpret(np.int32(word), _SINGLE)


@compiled()
def _write_single(target: Any, at: int, value: Any) -> None:
    word = np.int64(reinterpret(value, _WORD))
    for byte in range(4):
        target[at + byte] = np.uint8((word >> (8 * byte)) & 255)


@compiled()
def read_half(source: Any, at: int) -> Any:
    """Return the float16 at byte ``at`` as a float32."""
    return half(np.uint16(np.int64(source[at]) | np.int64(source[at + 1]) << 8))


@compiled()
def _write_half(target: Any, at: int, bits: Any) -> None:
    target[at] = np.uint8(np.int64(bits) & 255)
    target[at + 1] = np.uint8(np.int64(bits) >> 8)


@compiled()
def decode_row(kind: int, source: Any, target: Any) -> None:
    """Decode one row of format ``kind`` from ``source``, ``uint8 [row bytes]``, to ``target``, ``float32 [D]``."""
    dim = target.size
    if kind == _FP32:
        values = source.view(np.float32)
        for d in range(dim):
            target[d] = values[d]
    elif kind == _FP16:
        halves = source.view(np.uint16)
        for d in range(dim):
            target[d] = half(halves[d])
    elif kind == _INT8:
        scale, bias = read_single(source, dim), read_single(source, dim + 4)
        for d in range(dim):
            target[d] = np.float32(source[d]) * scale + bias
    elif kind == _INT4:
        pairs = dim // 2
        scale, bias = read_half(source, pairs), read_half(source, pairs + 2)
        for d in range(pairs):
            target[2 * d] = np.float32(np.int32(source[d] & np.uint8(15))) * scale + bias
            target[2 * d + 1] = np.float32(np.int32(source[d] >> np.uint8(4))) * scale + bias
    else:
        fours = dim // 4
        scale, bias = read_half(source, fours), read_half(source, fours + 2)
        for d in range(fours):
            codes = np.int32(source[d])
            for place in range(4):
                target[4 * d + place] = np.float32((codes >> np.int32(2 * place)) & np.int32(3)) * scale + bias


@compiled()
def fits(kind: int, low: Any, high: Any, finite: bool) -> int:
    """Return ``FINE``, ``NOT_FINITE`` or ``TOO_LARGE`` for a row in the format ``kind``."""
    if not finite:
        return NOT_FINITE
    if kind == _FP32:
        return FINE
    if kind == _INT8:
        return FINE if high - low < np.inf else TOO_LARGE
    if kind == _FP16:
        return FINE if max(-low, high) <= _LARGEST_HALF else TOO_LARGE
    # float16 may hold a bias that lies up to 32 below the smallest number
    room = (np.float64(high) - np.float64(low) + 32) / 15
    return FINE if abs(low) <= _LARGEST_HALF and room <= _LARGEST_HALF else TOO_LARGE


@compiled()
def _codes(
    source: Any, target: Any, bias: Any, inverse: Any, most: Any, rounding: int, state: Any, update: int
) -> None:
    """Round ``(source - bias) * inverse`` to whole numbers from 0 to ``most``."""
    if rounding == _NEAREST:
        for d in range(source.size):
            target[d] = np.uint8(np.int32(min(max(np.rint((source[d] - bias) * inverse), _ZERO), most)))
        return
    for d in range(source.size):
        steps = (source[d] - bias) * inverse
        below = np.floor(steps)
        u = fraction(absorb(absorb(state, d), update))
        if (steps - below) + u >= _ONE:  # floor(steps + u); the sum itself would lose bits of the fraction
            below += _ONE
        target[d] = np.uint8(np.int32(min(max(below, _ZERO), most)))


@compiled()
def encode_row(
    kind: int, rounding: int, source: Any, low: Any, high: Any, target: Any, codes: Any, state: Any, update: int
) -> None:
    """Encode one row that fits its format, from ``source``, ``float32 [D]``, to ``target``, ``uint8 [row bytes]``.

    Args:
        kind: A value of ``FORMATS``, as ``rounding`` is one of ``ROUNDINGS``.
        low: Smallest number of the row, as ``high`` is the largest.
        codes: Scratch memory, ``uint8 [D]``.
        state: State of the random numbers, after seed, table and row; ``update`` is their last key.
    """
    dim = source.size
    if kind == _FP32:
        values = target.view(np.float32)
        for d in range(dim):
            values[d] = source[d]
    elif kind == _FP16:
        halves = target.view(np.uint16)
        for d in range(dim):
            u = fraction(absorb(absorb(state, d), update)) if rounding == _STOCHASTIC else _ZERO
            halves[d] = _half_bits(source[d], rounding, u)
    elif kind == _INT8:
        span = high - low
        guard = _GUARD if rounding == _NEAREST and span >= _SMALLEST_GUARDED else _ZERO
        scale, inverse = span / np.float32(255), np.float32(255) / (span + guard)
        if not inverse < np.inf:  # all numbers equal, or different by less than 1e-36
            scale = inverse = _ZERO
        _codes(source, target[:dim], low, inverse, np.float32(255), rounding, state, update)
        _write_single(target, dim, scale)
        _write_single(target, dim + 4, low)
    else:
        pairs = dim // 2
        bias_bits = _half_bits(low, _DOWN if rounding == _STOCHASTIC else _NEAREST, _ZERO)
        bias = half(bias_bits)
        span = high - bias
        scale = _ONE if span == 0 else span / np.float32(15)
        scale_bits = _half_bits(scale, _UP if rounding == _STOCHASTIC else _NEAREST, _ZERO)
        if scale_bits & np.uint16(0x7FFF) == 0:
            scale_bits = np.uint16(0x3C00)  # 1
        inverse = _ONE / half(scale_bits)
        _codes(source, codes, bias, inverse, np.float32(15), rounding, state, update)
        for d in range(pairs):
            target[d] = np.uint8(codes[2 * d] | codes[2 * d + 1] << np.uint8(4))
        _write_half(target, pairs, scale_bits)
        _write_half(target, pairs + 2, bias_bits)


@compiled(parallel=True)
def encode_block(
    kind: int, rounding: int, source: Any, target: Any, seed: int, table: int, first_row: int, update: int, threads: int
) -> Any:
    """Encode neighbouring rows of a table, ``float32 [N, D]``, to ``uint8 [N, row bytes]``.

    Rows that do not fit are skipped. Returns the first row that does not fit, or -1, and the verdict of :func:`fits`.
    """
    count, dim = source.shape
    bad, why = np.full(threads, -1, np.int64), np.zeros(threads, np.int64)
    of_table = absorb(seeded(seed), table)
    for chunk in numba.prange(threads):
        codes = np.empty(dim, np.uint8)
        for i in range(count * chunk // threads, count * (chunk + 1) // threads):
            low, high, finite = extent(source[i])
            verdict = fits(kind, low, high, finite)
            if verdict == FINE:
                state = absorb(of_table, first_row + i)
                encode_row(kind, rounding, source[i], low, high, target[i], codes, state, update)
            elif bad[chunk] < 0:
                bad[chunk], why[chunk] = i, verdict
    for chunk in range(threads):
        if bad[chunk] >= 0:
            return bad[chunk], why[chunk]
    return np.int64(-1), np.int64(FINE)


@compiled(parallel=True)
def decode_block(kind: int, source: Any, target: Any, threads: int) -> None:
    """Decode rows of format ``kind`` from ``source``, ``uint8 [N, row bytes]``, to ``target``, ``float32 [N, D]``."""
    count = source.shape[0]
    for chunk in numba.prange(threads):
        for i in range(count * chunk // threads, count * (chunk + 1) // threads):
            decode_row(kind, source[i], target[i])
