"""Tiles of products of bfloat16 rows, by the instructions of AVX-512 that multiply and add pairs of bfloat16.

``vdpbf16ps`` adds to each of sixteen float32 sums the products of two pairs. Each sum is made of the same additions in
the same order, whatever tile it is part of.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import llvmlite.binding
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cordillera.kernels.compiling import compiled

_LANES = 16  # sums in a register
STEP = 2 * _LANES  # inputs that one instruction takes
SIDE = 4  # rows, and outputs, of a tile: 16 of 32 registers hold sums


@lru_cache(maxsize=1)
def available() -> bool:
    """Return whether this processor has the instructions; without them, nothing in this file may be compiled."""
    try:
        features = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:
        return False
    return bool(features.get("avx512bf16")) and torch.cpu._is_avx512_bf16_supported()


def _tile(rows: int, outputs: int) -> Any:
    """Make a function of addresses that stores products, ``bfloat16 [rows, outputs]``; see :func:`tile_of_four`."""

    @intrinsic
    def generated(
        typing_context: Any, x: Any, x_row: Any, weight: Any, weight_row: Any, steps: Any, out: Any, out_row: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_row, weight, weight_row, steps, out, out_row = arguments
            multiply = builder.module.declare_intrinsic(
                "llvm.x86.avx512bf16.dpbf16ps.512", (), ir.FunctionType(_VECTOR, [_VECTOR, _PAIRS, _PAIRS])
            )

            def load(base: Any, stride: Any, number: int, step: Any) -> Any:
                start = builder.add(base, builder.mul(stride, _WIDE(number)))
                place = builder.add(start, builder.mul(step, _WIDE(64)))
                return builder.load(builder.inttoptr(place, _PAIRS.as_pointer()), align=1)

            byte = ir.IntType(8).as_pointer()
            fetch = builder.module.declare_intrinsic(
                "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD])
            )

            def prefetch(base: Any, stride: Any, number: int, step: Any) -> None:
                start = builder.add(base, builder.mul(stride, _WIDE(number)))
                place = builder.add(start, builder.mul(step, _WIDE(64)))
                builder.call(fetch, [builder.inttoptr(place, byte), _WORD(0), _WORD(3), _WORD(1)])

            sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(rows * outputs)]
            for slot in sums:
                builder.store(ir.Constant(_VECTOR, [0.0] * _LANES), slot)
            with cgutils.for_range(builder, steps, intp=_WIDE) as loop:
                weights = [load(weight, weight_row, o, loop.index) for o in range(outputs)]
                if outputs > 1:  # the next weights: with many rows, too much is computed before they are asked for
                    for o in range(outputs):
                        prefetch(weight, weight_row, outputs + o, loop.index)
                for r in range(rows):
                    own = load(x, x_row, r, loop.index)
                    for o in range(outputs):
                        slot = sums[r * outputs + o]
                        builder.store(builder.call(multiply, [builder.load(slot), own, weights[o]]), slot)
            found = _to_bfloat(builder, _over_lanes(builder, [builder.load(slot) for slot in sums]))
            kind = ir.IntType(16 * outputs)  # the outputs of a row, stored at once
            parts = builder.bitcast(found, ir.VectorType(kind, _LANES // outputs))
            for r in range(rows):
                place = builder.inttoptr(builder.add(out, builder.mul(out_row, _WIDE(r))), kind.as_pointer())
                builder.store(builder.extract_element(parts, _WORD(r)), place, align=2)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 7), generate

    return generated


_WORD, _WIDE = ir.IntType(32), ir.IntType(64)
_VECTOR, _PAIRS = ir.VectorType(ir.FloatType(), _LANES), ir.VectorType(_WORD, _LANES)


def _over_lanes(builder: Any, vectors: list[Any]) -> Any:
    """Return a vector of the sums over the lanes of up to sixteen vectors.

    Of each, the second half is added to the first, its second quarter to the first, and so on, two vectors at a time.
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

    def every(number: int) -> Any:
        return ir.Constant(_PAIRS, [number] * _LANES)

    bits = builder.bitcast(values, _PAIRS)
    upper = builder.lshr(bits, every(16))
    odd = builder.and_(upper, every(1))
    rounded = builder.lshr(builder.add(builder.add(bits, every(0x7FFF)), odd), every(16))
    is_nan = builder.fcmp_unordered("uno", values, values)
    chosen = builder.select(is_nan, builder.or_(upper, every(0x40)), rounded)
    return builder.trunc(chosen, ir.VectorType(ir.IntType(16), _LANES))


_tiles = {(rows, outputs): _tile(rows, outputs) for rows in range(1, SIDE + 1) for outputs in (1, SIDE)}
_tile_1_1, _tile_2_1, _tile_3_1, _tile_4_1 = (_tiles[rows, 1] for rows in range(1, SIDE + 1))
_tile_1_4, _tile_2_4, _tile_3_4, _tile_4_4 = (_tiles[rows, SIDE] for rows in range(1, SIDE + 1))


@compiled()
def tile_of_one(
    rows: Any, x: Any, x_row: Any, weight: Any, weight_row: Any, steps: Any, out: Any, out_row: Any
) -> None:
    """Compute the products of 1 to 4 rows with one output, as :func:`tile_of_four`."""
    if rows == 4:
        _tile_4_1(x, x_row, weight, weight_row, steps, out, out_row)
    elif rows == 3:
        _tile_3_1(x, x_row, weight, weight_row, steps, out, out_row)
    elif rows == 2:
        _tile_2_1(x, x_row, weight, weight_row, steps, out, out_row)
    else:
        _tile_1_1(x, x_row, weight, weight_row, steps, out, out_row)


@compiled()
def tile_of_four(
    rows: Any, x: Any, x_row: Any, weight: Any, weight_row: Any, steps: Any, out: Any, out_row: Any
) -> None:
    """Compute the products of 1 to 4 rows with four outputs; ``x``, ``weight`` and ``out`` are addresses.

    Args:
        x: Address of ``bfloat16 [rows, 32 steps]``, rows ``x_row`` bytes apart.
        weight: Address of ``bfloat16 [4, 32 steps]``, rows ``weight_row`` bytes apart.
        out: Address of ``bfloat16 [rows, 4]``, rows ``out_row`` bytes apart.
    """
    if rows == 4:
        _tile_4_4(x, x_row, weight, weight_row, steps, out, out_row)
    elif rows == 3:
        _tile_3_4(x, x_row, weight, weight_row, steps, out, out_row)
    elif rows == 2:
        _tile_2_4(x, x_row, weight, weight_row, steps, out, out_row)
    else:
        _tile_1_4(x, x_row, weight, weight_row, steps, out, out_row)
