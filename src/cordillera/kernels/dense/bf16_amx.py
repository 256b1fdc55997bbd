"""Products of up to 32 bfloat16 rows by the tiles of AMX: weights are read once for all rows, at the speed of memory.

A tile of sixteen outputs by 32 inputs is multiplied with the inputs of up to sixteen rows at once. Each sum adds the
products of its pairs of inputs in their order, whatever rows are computed beside it.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import lru_cache
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import narrow

OUTPUTS = 16  # rows of a tile of weights
COLUMNS = 16  # rows of the input that one tile takes
_REQUEST, _TILES, _SYSTEM_CALL = 0x1023, 18, 158  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
_ZERO = np.uint16(0)  # has the type of bfloat16's bits
_FIRST, _SECOND, _WEIGHT, _X, _MORE = range(5)  # tiles: sums of the first and of further rows, weights, and inputs


@lru_cache(maxsize=1)
def available() -> bool:
    """Return whether the processor has the instructions and the system lets this process use them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    try:
        features = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:
        return False
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    return int(ctypes.CDLL(None).syscall(_SYSTEM_CALL, _REQUEST, _TILES)) == 0


@lru_cache(maxsize=32)
def tile_shapes(rows: int) -> np.ndarray:
    """Return the configuration of the tiles for so many rows, ``uint8 [64]``, which is not to be changed."""
    found = np.zeros(64, np.uint8)
    found[0] = 1  # palette
    columns = found[16:48].view(np.uint16)
    first, more = min(rows, COLUMNS), max(0, rows - COLUMNS)
    for tile, width in ((_FIRST, first), (_SECOND, more), (_WEIGHT, COLUMNS), (_X, first), (_MORE, more)):
        columns[tile] = 4 * width
        found[48 + tile] = 16 if width else 0
    return found


_BYTE, _WIDE = ir.IntType(8), ir.IntType(64)
_POINTER, _NONE = _BYTE.as_pointer(), ir.VoidType()


def _declared(builder: Any, name: str, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(_NONE, arguments)
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


@intrinsic
def shape_tiles(typing_context: Any, shapes: Any) -> Any:
    """Configure the tiles of this thread by :func:`tile_shapes` at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _POINTER)
        builder.call(_declared(builder, "llvm.x86.ldtilecfg", [_POINTER]), [place])
        return context.get_dummy_value()

    return types.none(types.int64), generate


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    """Give up the tiles of this thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(_declared(builder, "llvm.x86.tilerelease", []), [])
        return context.get_dummy_value()

    return types.none(), generate


def _products(is_double: bool) -> Any:
    """Make the function for up to sixteen rows, or for more; see :data:`products_of_one`."""

    @intrinsic
    def generated(
        typing_context: Any, weight: Any, weight_row: Any, x: Any, x_row: Any, more: Any, more_row: Any, steps: Any,
        out: Any, out_more: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weight, weight_row, x, x_row, more, more_row, steps, out, out_more = arguments
            load = _declared(builder, "llvm.x86.tileloadd64", [_BYTE, _POINTER, _WIDE])
            store = _declared(builder, "llvm.x86.tilestored64", [_BYTE, _POINTER, _WIDE])
            zero = _declared(builder, "llvm.x86.tilezero", [_BYTE])
            multiply = _declared(builder, "llvm.x86.tdpbf16ps", [_BYTE, _BYTE, _BYTE])

            def at(base: Any, stride: Any, step: Any) -> Any:
                return builder.inttoptr(builder.add(base, builder.mul(stride, step)), _POINTER)

            sums = (_FIRST, _SECOND) if is_double else (_FIRST,)
            for tile in sums:
                builder.call(zero, [_BYTE(tile)])
            with cgutils.for_range(builder, steps, intp=_WIDE) as loop:
                builder.call(load, [_BYTE(_WEIGHT), at(weight, _WIDE(64), loop.index), weight_row])
                sixteen = builder.mul(loop.index, _WIDE(16))
                builder.call(load, [_BYTE(_X), at(x, x_row, sixteen), x_row])
                builder.call(multiply, [_BYTE(_FIRST), _BYTE(_WEIGHT), _BYTE(_X)])
                if is_double:
                    builder.call(load, [_BYTE(_MORE), at(more, more_row, sixteen), more_row])
                    builder.call(multiply, [_BYTE(_SECOND), _BYTE(_WEIGHT), _BYTE(_MORE)])
            for tile, place, row in zip(sums, (out, out_more), (x_row, more_row), strict=False):
                builder.call(store, [_BYTE(tile), builder.inttoptr(place, _POINTER), row])
            return context.get_dummy_value()

        return types.none(*[types.int64] * 9), generate

    return generated


@compiled()
def store_rounded(sums: Any, halves: Any, out: Any, start: Any, stride: Any) -> None:
    """Round sums ``float32 [16, rows]``, and store them by rows, ``stride`` apart in ``out`` from ``start`` on.

    Args:
        halves: Memory of 256 bfloat16 numbers.
    """
    flat, rows = sums.ravel(), sums.shape[1]
    for n in range(len(flat)):
        halves[n] = narrow(flat[n], _ZERO)
    for row in range(rows):
        for i in range(OUTPUTS):
            out[start + row * stride + i] = halves[i * rows + row]


products_of_one, products_of_two = _products(False), _products(True)
"""Compute sums of sixteen outputs, for up to sixteen rows, or for more.

Arguments are addresses and distances in bytes: of ``bfloat16`` weights ``[16, 32 steps]`` and their rows; of pairs of
inputs of the first sixteen rows, ``[16 steps, rows]``, and of further ones; the number of steps; and of the sums,
``float32 [16, rows]``, of both.
"""
