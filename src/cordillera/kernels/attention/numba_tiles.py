"""Products of small float32 matrices, reductions and powers of two that attention kernels on CPUs are made of.

All products use one tile of multiplications and sums that is kept in registers. Matrices are given by their addresses,
in bytes, as integers; reductions add in an order that depends on the count alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import has_instructions

# The tile's sums take half of the vector registers: of 32 wide ones with AVX-512, of 16 narrow ones without.
_IS_WIDE = has_instructions("avx512f")
_LANES = 16 if _IS_WIDE else 8
ROWS = 8 if _IS_WIDE else 4  # queries at a time
COLUMNS = 2 * _LANES  # keys at a time
BLOCK = 256  # keys whose scores stay in the cache
WIDTH = 16  # divisor of the widths of heads

BYTES = 4
FAST = {"contract"}  # allows fused multiply-add, no reordering


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

            lane = ir.Constant(word, _LANES * BYTES)
            vectors = range(columns // _LANES)
            places, sums = {}, {}
            for row in range(ROWS):
                start = builder.add(c, builder.mul(c_row, ir.Constant(word, row)))
                for v in vectors:
                    places[row, v] = at(start, lane, v, vector)
                    sums[row, v] = cgutils.alloca_once(builder, vector)
                    builder.store(builder.load(places[row, v], align=BYTES), sums[row, v])
            with cgutils.for_range(builder, count, intp=word) as loop:
                right = builder.add(b, builder.mul(b_step, loop.index))
                left = builder.add(a, builder.mul(a_step, loop.index))
                others = [builder.load(at(right, lane, v, vector), align=BYTES) for v in vectors]
                for row in range(ROWS):
                    value = builder.load(at(left, a_row, row, single), align=BYTES)
                    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
                    spread = builder.shuffle_vector(first, undefined, zeros)
                    for v in vectors:
                        product = builder.fmul(spread, others[v], flags=["contract"])
                        total = builder.fadd(builder.load(sums[row, v]), product, flags=["contract"])
                        builder.store(total, sums[row, v])
            for key, place in places.items():
                builder.store(builder.load(sums[key]), place, align=BYTES)
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


_SHIFT = np.float32(1.5 * 2**23)  # added to a small number, it leaves its nearest integer in the lowest bits
_LEAST = np.float32(-126.0)
# Coefficients of 2**x for x in [-1/2, 1/2], from the sixth power down; from the Cephes library's exp2f.
_COEFFICIENTS = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
_C6, _C5, _C4, _C3, _C2, _C1, _ = (np.float32(c) for c in _COEFFICIENTS)
ONE, ZERO = np.float32(1.0), np.float32(0.0)


@compiled(inline="always", fastmath=FAST)
def exp2(x: Any) -> Any:
    """``2**x`` for ``x`` up to 127; NaN stays NaN."""
    x = _LEAST if x < _LEAST else x
    shifted = x + _SHIFT
    r = x - (shifted - _SHIFT)
    return ((((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + ONE) * _scale_by(shifted)


_SINGLE, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_SINGLE, _LANES), ir.VectorType(_INT, _LANES)


def _all_lanes(value: Any) -> Any:
    """A vector of one constant."""
    return ir.Constant(_VECTOR, [float(np.float32(value))] * _LANES)


def _place(builder: Any, row: Any, number: Any) -> Any:
    """Pointer to a row's vector of that number."""
    step = ir.Constant(ir.IntType(64), _LANES * BYTES)
    return builder.inttoptr(builder.add(row, builder.mul(number, step)), _VECTOR.as_pointer())


def _over_lanes(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine a vector's two halves, their halves and so on."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    lanes = _LANES
    while lanes > 1:
        lanes //= 2
        other = [lanes + lane % lanes for lane in range(_LANES)]
        vector = combine(vector, builder.shuffle_vector(vector, undefined, ir.Constant(_INTS, other)))
    return builder.extract_element(vector, ir.Constant(_INT, 0))


@intrinsic
def largest_of(typing_context: Any, row: Any, count: Any) -> Any:
    """Largest of ``count`` float32 values, a multiple of :data:`COLUMNS`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, count = arguments
        word = ir.IntType(64)

        def combine(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", b, a), b, a)

        slots = [cgutils.alloca_once(builder, _VECTOR) for _ in range(2)]
        for n, slot in enumerate(slots):
            builder.store(builder.load(_place(builder, row, ir.Constant(word, n)), align=BYTES), slot)
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(word, COLUMNS)), intp=word) as loop:
            for n, slot in enumerate(slots):
                number = builder.add(builder.mul(loop.index, ir.Constant(word, 2)), ir.Constant(word, n))
                following = builder.load(_place(builder, row, number), align=BYTES)
                builder.store(combine(builder.load(slot), following), slot)
        return _over_lanes(builder, combine(*(builder.load(slot) for slot in slots)), combine)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def powers_of(typing_context: Any, row: Any, count: Any, most: Any) -> Any:
    """``row = 2 ** (row - most)`` in place for ``count`` values, a multiple of the lanes; returns their sum.

    Powers below ``2**-126`` are zero; NaN stays NaN. The sum is in an order that depends on the count alone.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, count, most = arguments
        word = ir.IntType(64)
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        start = builder.insert_element(undefined, most, ir.Constant(_INT, 0))
        spread = builder.shuffle_vector(start, undefined, ir.Constant(_INTS, [0] * _LANES))
        slot = cgutils.alloca_once(builder, _VECTOR)
        builder.store(_all_lanes(0.0), slot)
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(word, _LANES)), intp=word) as loop:
            place = _place(builder, row, loop.index)
            x = builder.fsub(builder.load(place, align=BYTES), spread)
            vanishes = builder.fcmp_ordered("<", x, _all_lanes(_LEAST))
            shifted = builder.fadd(x, _all_lanes(_SHIFT))
            rest = builder.fsub(x, builder.fsub(shifted, _all_lanes(_SHIFT)))
            power = _all_lanes(_COEFFICIENTS[0])
            for coefficient in _COEFFICIENTS[1:]:
                product = builder.fmul(power, rest, flags=["contract"])
                power = builder.fadd(product, _all_lanes(coefficient), flags=["contract"])
            exponent = builder.add(builder.bitcast(shifted, _INTS), ir.Constant(_INTS, [127] * _LANES))
            scale = builder.bitcast(builder.shl(exponent, ir.Constant(_INTS, [23] * _LANES)), _VECTOR)
            power = builder.select(vanishes, _all_lanes(0.0), builder.fmul(power, scale))
            builder.store(power, place, align=BYTES)
            builder.store(builder.fadd(builder.load(slot), power), slot)
        return _over_lanes(builder, builder.load(slot), lambda a, b: builder.fadd(a, b))

    return types.float32(types.int64, types.int64, types.float32), generate


@compiled(fastmath=FAST)
def add_scores(queries: Any, width: Any, keys: Any, block: Any, count: Any, scores: Any) -> None:
    """``scores [ROWS, block] += queries [ROWS, width] @ keys [width, block]``, in the first ``count`` columns."""
    one, row = np.int64(BYTES), BYTES * block
    for j in range(0, BYTES * count, BYTES * COLUMNS):
        _wide_tile(queries, BYTES * width, one, keys + j, row, scores + j, row, width)


@compiled(fastmath=FAST)
def add_rows(scores: Any, block: Any, count: Any, keys: Any, width: Any, out: Any) -> None:
    """``out [ROWS, width] += scores [ROWS, block] @ keys [block, width]``, by the first ``count`` keys."""
    one, row = np.int64(BYTES), BYTES * width
    if width % COLUMNS == 0:
        for d in range(0, row, BYTES * COLUMNS):
            _wide_tile(scores, BYTES * block, one, keys + d, row, out + d, row, count)
    else:
        for d in range(0, row, BYTES * WIDTH):
            _narrow_tile(scores, BYTES * block, one, keys + d, row, out + d, row, count)


@compiled(fastmath=FAST)
def add_columns(queries: Any, width: Any, scores: Any, block: Any, count: Any, out: Any) -> None:
    """``out [width, block] += queries [ROWS, width].T @ scores [ROWS, block]``, in the first ``count`` columns."""
    one, row = np.int64(BYTES), BYTES * block
    for d in range(0, width, ROWS):
        for j in range(0, BYTES * count, BYTES * COLUMNS):
            _wide_tile(queries + BYTES * d, one, BYTES * width, scores + j, row, out + d * row + j, row, np.int64(ROWS))
