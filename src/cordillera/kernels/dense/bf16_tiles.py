"""Tiles of products of bfloat16 rows, by the vector instructions of x86 processors.

AVX-512's ``vdpbf16ps`` adds to each of sixteen float32 sums the products of two pairs of bfloat16. Where it is missing,
AVX2 and FMA add to each of eight sums one product at a time. Each sum is made of the same additions in the same order,
whatever tile it is part of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import has_instructions, widen_to_single

STEP = 32  # inputs that are taken at a time
SIDE = 4  # rows, and outputs, of a tile


@lru_cache(maxsize=1)
def multiplies_pairs() -> bool:
    """Return whether this processor multiplies bfloat16 numbers."""
    return has_instructions("avx512bf16") and torch.cpu._is_avx512_bf16_supported()


@lru_cache(maxsize=1)
def available() -> bool:
    """Return whether this processor has the instructions; without them, nothing in this file may be compiled."""
    return multiplies_pairs() or has_instructions("avx2", "fma", "f16c")


# Half of the registers, of which AVX-512 has 32 and AVX2 has 16, hold sums.
_BY_PAIRS = multiplies_pairs()
_LANES, _ROWS = (16, 4) if _BY_PAIRS else (8, 2)  # sums in a register; rows that are computed at once


def _tile(rows: int, outputs: int) -> Any:
    """Make a function of addresses that stores products, ``bfloat16 [rows, outputs]``; see :func:`tile_of_four`."""

    @intrinsic
    def generated(
        typing_context: Any, x: Any, x_row: Any, weight: Any, weight_row: Any, steps: Any, out: Any, out_row: Any,
        ahead: Any, ahead_step: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_row, weight, weight_row, steps, out, out_row, ahead, ahead_step = arguments
            vectors = builder.mul(steps, _WIDE(STEP // (2 * _LANES)))
            byte = ir.IntType(8).as_pointer()
            fetch = builder.module.declare_intrinsic(
                "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD])
            )

            def place(base: Any, stride: Any, number: int, step: Any, size: Any) -> Any:
                start = builder.add(base, builder.mul(stride, _WIDE(number)))
                return builder.add(start, builder.mul(step, size))

            for first in range(0, rows, _ROWS):

                def weights_of(o: int, step: Any, part: int = first // _ROWS) -> list[Any]:
                    done = builder.add(step, builder.mul(vectors, _WIDE(part)))
                    for following in range(outputs if outputs > 1 and o == 0 else 0):
                        then = builder.inttoptr(place(ahead, weight_row, following, done, ahead_step), byte)
                        builder.call(fetch, [then, _WORD(0), _WORD(3), _WORD(1)])
                    return _weights(builder, place(weight, weight_row, o, step, _WIDE(4 * _LANES)))

                own = x, x_row, out, out_row
                compute_rows(builder, range(first, min(first + _ROWS, rows)), outputs, vectors, own, weights_of)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 9), generate

    return generated


def compute_rows(
    builder: Any, rows: range, outputs: int, vectors: Any, own: tuple[Any, ...], weights_of: Callable[[int, Any], Any]
) -> None:
    """Add the instructions for products of a few rows.

    Args:
        rows: Numbers of the rows.
        outputs: Number of outputs.
        vectors: Number of vectors of weights of an output.
        own: Address of the first row, bytes from one to the next, and the same of the results.
        weights_of: Function of the number of an output and of a vector that returns the weights.
    """
    x, x_row, out, out_row = own

    def place(base: Any, stride: Any, number: int, offset: Any) -> Any:
        return builder.add(builder.add(base, builder.mul(stride, _WIDE(number))), offset)

    sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(len(rows) * outputs)]
    for slot in sums:
        builder.store(ir.Constant(_VECTOR, [0.0] * _LANES), slot)
    with cgutils.for_range(builder, vectors, intp=_WIDE) as loop:
        offset = builder.mul(loop.index, _WIDE(64))
        inputs = [_inputs(builder, place(x, x_row, row, offset)) for row in rows]
        for o in range(outputs):
            weights = weights_of(o, loop.index)
            for r in range(len(rows)):
                slot = sums[r * outputs + o]
                builder.store(_add_products(builder, builder.load(slot), inputs[r], weights), slot)
    found = _to_bfloat(builder, _over_lanes(builder, [builder.load(slot) for slot in sums]))
    kind = ir.IntType(16 * outputs)  # the outputs of a row, stored at once
    parts = builder.bitcast(found, ir.VectorType(kind, _LANES // outputs))
    for r, row in enumerate(rows):
        to = builder.inttoptr(place(out, out_row, row, _WIDE(0)), kind.as_pointer())
        builder.store(builder.extract_element(parts, _WORD(r)), to, align=2)


_WORD, _WIDE = ir.IntType(32), ir.IntType(64)
_VECTOR, _PAIRS = ir.VectorType(ir.FloatType(), _LANES), ir.VectorType(_WORD, _LANES)


def _load(builder: Any, place: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def _inputs(builder: Any, place: Any) -> list[Any]:
    """Vectors of the inputs at an address, bfloat16, or as :func:`lay_out` stores them."""
    if multiplies_pairs():
        return [_load(builder, place, _PAIRS)]
    return [_load(builder, builder.add(place, _WIDE(4 * _LANES * half)), _VECTOR) for half in range(2)]


def _weights(builder: Any, place: Any) -> list[Any]:
    """Vectors of as many weights."""
    words = _load(builder, place, _PAIRS)
    if multiplies_pairs():
        return [words]
    shift, mask = (ir.Constant(_PAIRS, [number] * _LANES) for number in (16, 0xFFFF0000))
    return [builder.bitcast(half, _VECTOR) for half in (builder.shl(words, shift), builder.and_(words, mask))]


def _add_products(builder: Any, total: Any, left: list[Any], right: list[Any]) -> Any:
    """Add to sums the products of inputs."""
    is_paired = multiplies_pairs()
    name = "llvm.x86.avx512bf16.dpbf16ps.512" if is_paired else "llvm.fma.v8f32"
    kinds = [_VECTOR, _PAIRS, _PAIRS] if is_paired else [_VECTOR] * 3
    multiply = builder.module.declare_intrinsic(name, (), ir.FunctionType(_VECTOR, kinds))
    for a, b in zip(left, right, strict=True):
        total = builder.call(multiply, [total, a, b] if is_paired else [a, b, total])
    return total


def _over_lanes(builder: Any, vectors: list[Any]) -> Any:
    """Return a vector of the sums over the lanes of each of ``vectors``, which are at most as many as lanes.

    Halves of each vector are added, then quarters, and so on, two vectors at a time.
    """
    while len(vectors) & (len(vectors) - 1):
        vectors = [*vectors, vectors[-1]]
    group = _LANES  # lanes that are still to be added
    while group > 1:
        half = group // 2
        first = [start + lane for start in range(0, 2 * _LANES, group) for lane in range(half)]
        masks = [ir.Constant(_PAIRS, [lane + shift for lane in first]) for shift in (0, half)]
        pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        vectors = [builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in masks)) for a, b in pairs]
        group = half
    return vectors[0]


def _to_bfloat(builder: Any, values: Any) -> Any:
    """Bits of the bfloat16 nearest to each float32, halves to even; NaN stays NaN."""
    shift, quiet = (ir.Constant(_PAIRS, [number] * _LANES) for number in (16, 0x40))
    rounded = builder.lshr(rounded_words(builder, values), shift)
    nan = builder.or_(builder.lshr(builder.bitcast(values, _PAIRS), shift), quiet)
    chosen = builder.select(builder.fcmp_unordered("uno", values, values), nan, rounded)
    return builder.trunc(chosen, ir.VectorType(ir.IntType(16), _LANES))


def rounded_words(builder: Any, values: Any) -> Any:
    """Words whose upper halves are the bfloat16 nearest to each float32; some NaN become other numbers."""
    words = ir.VectorType(_WORD, values.type.count)
    half, one, shift = (ir.Constant(words, [number] * words.count) for number in (0x7FFF, 1, 16))
    bits = builder.bitcast(values, words)
    return builder.add(builder.add(bits, half), builder.and_(builder.lshr(bits, shift), one))


@compiled()
def lay_out(x: Any, out: Any) -> None:
    """Store rows ``bfloat16 [rows, inner]`` as tiles take them where :func:`multiplies_pairs` is False.

    Args:
        out: ``float32 [rows, at least inner]``, of each sixteen inputs first the even, then the odd ones.
    """
    rows, inner = x.shape
    for row in range(rows):
        for start in range(0, inner, 16):
            for i in range(8):
                out[row, start + i] = widen_to_single(x[row, start + 2 * i])
                out[row, start + 8 + i] = widen_to_single(x[row, start + 2 * i + 1])


_tiles = {(rows, outputs): _tile(rows, outputs) for rows in range(1, SIDE + 1) for outputs in (1, SIDE)}
_tile_1_1, _tile_2_1, _tile_3_1, _tile_4_1 = (_tiles[rows, 1] for rows in range(1, SIDE + 1))
_tile_1_4, _tile_2_4, _tile_3_4, _tile_4_4 = (_tiles[rows, SIDE] for rows in range(1, SIDE + 1))


@compiled()
def fetched(weight: Any, weight_row: Any, outputs: Any, row: Any, rows: Any) -> tuple[Any, Any]:
    """Return the address that a tile prefetches from, and the step per register of weights.

    A tile prefetches weights of the next outputs. All tiles of rows that use the current weights share this work;
    prefetched by the first rows alone, the weights would arrive too late.

    Args:
        weight: Address of the tile's first weights.
        outputs: Number of outputs after which the next ones begin; tiles of all rows need the present ones in turn.
        row: First row of the tile.
        rows: Number of rows of all tiles.
    """
    if _BY_PAIRS:  # weights of the next tile, prefetched by all rows
        return weight + SIDE * weight_row, np.int64(64)
    shares = (rows + _ROWS - 1) // _ROWS
    return weight + outputs * weight_row + row // _ROWS * weight_row // shares, (32 + shares - 1) // shares


@compiled()
def tile_of_one(
    rows: Any, x: Any, x_row: Any, weight: Any, weight_row: Any, steps: Any, out: Any, out_row: Any
) -> None:
    """Compute the products of 1 to 4 rows with one output, as :func:`tile_of_four`."""
    none = np.int64(0)
    if rows == 4:
        _tile_4_1(x, x_row, weight, weight_row, steps, out, out_row, none, none)
    elif rows == 3:
        _tile_3_1(x, x_row, weight, weight_row, steps, out, out_row, none, none)
    elif rows == 2:
        _tile_2_1(x, x_row, weight, weight_row, steps, out, out_row, none, none)
    else:
        _tile_1_1(x, x_row, weight, weight_row, steps, out, out_row, none, none)


@compiled()
def tile_of_four(
    rows: Any, x: Any, x_row: Any, weight: Any, weight_row: Any, steps: Any, out: Any, out_row: Any, ahead: Any,
    ahead_step: Any,
) -> None:  # fmt: skip
    """Compute the products of 1 to 4 rows with four outputs; ``x``, ``weight`` and ``out`` are addresses.

    Args:
        x: Address of ``bfloat16 [rows, 32 steps]``, or of what :func:`lay_out` made of it, rows ``x_row`` bytes apart.
        weight: Address of ``bfloat16 [4, 32 steps]``, rows ``weight_row`` bytes apart.
        out: Address of ``bfloat16 [rows, 4]``, rows ``out_row`` bytes apart.
        ahead: First result of :func:`fetched`; the last argument is the second.
    """
    if rows == 4:
        _tile_4_4(x, x_row, weight, weight_row, steps, out, out_row, ahead, ahead_step)
    elif rows == 3:
        _tile_3_4(x, x_row, weight, weight_row, steps, out, out_row, ahead, ahead_step)
    elif rows == 2:
        _tile_2_4(x, x_row, weight, weight_row, steps, out, out_row, ahead, ahead_step)
    else:
        _tile_1_4(x, x_row, weight, weight_row, steps, out, out_row, ahead, ahead_step)
