"""Products of up to 32 bfloat16 rows by the tiles of AMX: weights are read once for all rows, at the speed of memory.

A tile of sixteen outputs by 32 inputs is multiplied with the inputs of up to sixteen rows at once. Each sum adds the
products of its pairs of inputs in their order, whatever rows are computed beside it.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import has_instructions, narrow

OUTPUTS = 16  # rows of a tile of weights
COLUMNS = 16  # rows of the input that one tile takes
_REQUEST, _TILES, _SYSTEM_CALL = 0x1023, 18, 158  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
_ZERO = np.uint16(0)  # has the type of bfloat16's bits
_FIRST, _SECOND, _WEIGHT, _X, _MORE = (
    (0, 1),
    (2, 3),
    4,
    5,
    6,
)  # tiles: two sums of the first and of further rows, weights, inputs


@lru_cache(maxsize=1)
def available() -> bool:
    """Return whether the processor has the instructions and the system lets this process use them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if not has_instructions("amx-tile", "amx-bf16", "avx512bf16"):
        return False
    return int(ctypes.CDLL(None).syscall(_SYSTEM_CALL, _REQUEST, _TILES)) == 0


@lru_cache(maxsize=32)
def tile_shapes(rows: int) -> np.ndarray:
    """Return the tile configuration for ``rows`` rows, ``uint8 [64]``; callers must not modify it."""
    found = np.zeros(64, np.uint8)
    found[0] = 1  # palette
    columns = found[16:48].view(np.uint16)
    first, more = min(rows, COLUMNS), max(0, rows - COLUMNS)
    widths = {_WEIGHT: COLUMNS, _X: first, _MORE: more, **dict.fromkeys(_FIRST, first), **dict.fromkeys(_SECOND, more)}
    for tile, width in widths.items():
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
    """Release the tiles of this thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(_declared(builder, "llvm.x86.tilerelease", []), [])
        return context.get_dummy_value()

    return types.none(), generate


def fetch(builder: Any, address: Any, lines: int) -> None:
    """Fetch cache lines from an address on, which may be unmapped."""
    word = ir.IntType(32)
    kind = ir.FunctionType(_NONE, [_POINTER, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_POINTER], kind)
    for line in range(lines):
        place = builder.inttoptr(builder.add(address, _WIDE(64 * line)), _POINTER)
        builder.call(function, [place, word(0), word(3), word(1)])


class Tiles:
    """Instructions that multiply tiles of weights with up to sixteen rows, or with more.

    Products of even and of odd steps are summed apart: each sum waits for the one before it.

    Args:
        builder: Where instructions are added.
        is_double: Whether there are more than sixteen rows.
        inputs: Addresses of the pairs of inputs, and bytes between them, of the first sixteen rows and of further ones.
    """

    def __init__(self, builder: Any, is_double: bool, inputs: Sequence[tuple[Any, Any]]) -> None:
        self._builder = builder
        self._sides = [*zip((_FIRST, _SECOND), (_X, _MORE), inputs, strict=True)][: 1 + is_double]

    def _call(self, name: str, kinds: list[Any], arguments: list[Any]) -> None:
        self._builder.call(_declared(self._builder, f"llvm.x86.{name}", kinds), arguments)

    def _move(self, name: str, tile: int, place: Any, row: Any) -> None:
        self._call(name, [_BYTE, _POINTER, _WIDE], [_BYTE(tile), self._builder.inttoptr(place, _POINTER), row])

    def clear(self) -> None:
        """Begin with sums of zero."""
        for sums, _, _ in self._sides:
            for tile in sums:
                self._call("tilezero", [_BYTE], [_BYTE(tile)])

    def multiply(self, half: int, weight: Any, weight_row: Any, step: Any) -> None:
        """Add the products of a tile of weights with the inputs of a step to one of the two sums."""
        builder, sixteen = self._builder, self._builder.mul(step, _WIDE(16))
        self._move("tileloadd64", _WEIGHT, weight, weight_row)
        for sums, tile, (base, row) in self._sides:
            self._move("tileloadd64", tile, builder.add(base, builder.mul(row, sixteen)), row)
            self._call("tdpbf16ps", [_BYTE, _BYTE, _BYTE], [_BYTE(number) for number in (sums[half], _WEIGHT, tile)])

    def store(self, places: Sequence[Any]) -> None:
        """Store both sums of the first rows and of further ones, ``float32 [2, 16, rows]``."""
        builder = self._builder
        for (sums, _, (_, row)), place in zip(self._sides, places, strict=False):
            for half, tile in enumerate(sums):
                self._move("tilestored64", tile, builder.add(place, builder.mul(row, _WIDE(half * OUTPUTS))), row)


def in_pairs(builder: Any, steps: Any, take: Callable[[int, Any], None]) -> None:
    """Call ``take`` with 0 and each even step, with 1 and each odd one, in turn."""
    one = _WIDE(1)
    with cgutils.for_range(builder, builder.lshr(steps, one), intp=_WIDE) as loop:
        even = builder.shl(loop.index, one)
        take(0, even)
        take(1, builder.add(even, one))
    with builder.if_then(builder.trunc(steps, ir.IntType(1))):
        take(0, builder.sub(steps, one))


def _products(is_double: bool) -> Any:
    """Make the function for up to sixteen rows, or for more; see :data:`products_of_one`."""

    @intrinsic
    def generated(
        typing_context: Any, weight: Any, weight_row: Any, x: Any, x_row: Any, more: Any, more_row: Any, steps: Any,
        out: Any, out_more: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weight, weight_row, x, x_row, more, more_row, steps, out, out_more = arguments
            tiles = Tiles(builder, is_double, ((x, x_row), (more, more_row)))
            following = builder.add(weight, builder.mul(weight_row, _WIDE(OUTPUTS)))

            def take(half: int, step: Any) -> None:
                # a tile's rows lie too far apart for the processor to see what comes next
                fetch(builder, builder.add(following, builder.mul(step, _WIDE(64 * OUTPUTS))), OUTPUTS)
                tiles.multiply(half, builder.add(weight, builder.mul(step, _WIDE(64))), weight_row, step)

            tiles.clear()
            in_pairs(builder, steps, take)
            tiles.store((out, out_more))
            return context.get_dummy_value()

        return types.none(*[types.int64] * 9), generate

    return generated


@compiled()
def store_rounded(sums: Any, halves: Any, out: Any, start: Any, stride: Any) -> None:
    """Add and round both sums ``float32 [2, 16, rows]``; store rows from ``start`` on, ``stride`` apart.

    Args:
        halves: Memory of 256 bfloat16 numbers.
    """
    even, odd, rows = sums[0].ravel(), sums[1].ravel(), sums.shape[2]
    for n in range(len(even)):
        halves[n] = narrow(even[n] + odd[n], _ZERO)
    for row in range(rows):
        for i in range(OUTPUTS):
            out[start + row * stride + i] = halves[i * rows + row]


products_of_one, products_of_two = _products(False), _products(True)
"""Compute sums of sixteen outputs, for up to sixteen rows, or for more.

Arguments are addresses and distances in bytes: of ``bfloat16`` weights ``[16, 32 steps]`` and their rows; of pairs of
inputs of the first sixteen rows, ``[16 steps, rows]``, and of further ones; the number of steps; and of the sums of
even and of odd steps, ``float32 [2, 16, rows]``, of both.
"""
