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
    """Make a function of addresses that stores sums of products, ``float32 [rows, outputs]``; see :func:`tile`."""

    @intrinsic
    def generated(
        typing_context: Any, x: Any, x_row: Any, weight: Any, weight_row: Any, steps: Any, out: Any, out_row: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_row, weight, weight_row, steps, out, out_row = arguments
            word, wide, single = ir.IntType(32), ir.IntType(64), ir.FloatType()
            vector, pairs = ir.VectorType(single, _LANES), ir.VectorType(word, _LANES)
            multiply = builder.module.declare_intrinsic(
                "llvm.x86.avx512bf16.dpbf16ps.512", (), ir.FunctionType(vector, [vector, pairs, pairs])
            )

            def load(base: Any, stride: Any, number: int, step: Any) -> Any:
                start = builder.add(base, builder.mul(stride, wide(number)))
                place = builder.add(start, builder.mul(step, wide(64)))
                return builder.load(builder.inttoptr(place, pairs.as_pointer()), align=1)

            sums = {(r, o): cgutils.alloca_once(builder, vector) for r in range(rows) for o in range(outputs)}
            for slot in sums.values():
                builder.store(ir.Constant(vector, [0.0] * _LANES), slot)
            with cgutils.for_range(builder, steps, intp=wide) as loop:
                weights = [load(weight, weight_row, o, loop.index) for o in range(outputs)]
                for r in range(rows):
                    own = load(x, x_row, r, loop.index)
                    for o in range(outputs):
                        builder.store(builder.call(multiply, [builder.load(sums[r, o]), own, weights[o]]), sums[r, o])
            for (r, o), slot in sums.items():
                total = builder.load(slot)
                lanes = _LANES
                while lanes > 1:  # add halves, halves of halves and so on
                    lanes //= 2
                    other = ir.Constant(pairs, [lanes + lane % lanes for lane in range(_LANES)])
                    total = builder.fadd(total, builder.shuffle_vector(total, total, other))
                place = builder.add(builder.add(out, builder.mul(out_row, wide(r))), wide(4 * o))
                value = builder.extract_element(total, word(0))
                builder.store(value, builder.inttoptr(place, single.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 7), generate

    return generated


_tiles = {(rows, outputs): _tile(rows, outputs) for rows in range(1, SIDE + 1) for outputs in (1, SIDE)}
_tile_1_1, _tile_2_1, _tile_3_1, _tile_4_1 = (_tiles[rows, 1] for rows in range(1, SIDE + 1))
_tile_1_4, _tile_2_4, _tile_3_4, _tile_4_4 = (_tiles[rows, SIDE] for rows in range(1, SIDE + 1))


@compiled()
def tile_of_one(
    rows: Any, x: Any, x_row: Any, weight: Any, weight_row: Any, steps: Any, out: Any, out_row: Any
) -> None:
    """Compute the sums of 1 to 4 rows with one output, as :func:`tile_of_four`."""
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
    """Compute the sums of 1 to 4 rows with four outputs; ``x``, ``weight`` and ``out`` are addresses.

    Args:
        x: Address of ``bfloat16 [rows, 32 steps]``, rows ``x_row`` bytes apart.
        weight: Address of ``bfloat16 [4, 32 steps]``, rows ``weight_row`` bytes apart.
        out: Address of ``float32 [rows, 4]``, rows ``out_row`` bytes apart.
    """
    if rows == 4:
        _tile_4_4(x, x_row, weight, weight_row, steps, out, out_row)
    elif rows == 3:
        _tile_3_4(x, x_row, weight, weight_row, steps, out, out_row)
    elif rows == 2:
        _tile_2_4(x, x_row, weight, weight_row, steps, out, out_row)
    else:
        _tile_1_4(x, x_row, weight, weight_row, steps, out, out_row)
