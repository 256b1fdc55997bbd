"""Products of up to 32 bfloat16 rows with several weights at once, by tiles: whole weights, or codes that are unpacked.

Codes have four or eight bits, in groups of 32 inputs; see :class:`~cordillera.kernels.dense.packed_rows.PackedRows`. A
result has the same bits whatever rows and weights are beside it, and those of the unpacked weights.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from cordillera.kernels.compiling import compiled
from cordillera.kernels.dense.bf16_amx import (
    COLUMNS,
    OUTPUTS,
    products_of_one,
    products_of_two,
    release_tiles,
    shape_tiles,
    store_rounded,
    tile_shapes,
)
from cordillera.kernels.dense.bf16_tiles import SIDE, tile_of_four
from cordillera.kernels.numba_support import array, pool, threads_for

GROUP = 32
"""Inputs that share a scale."""
WHOLE = 16
"""Bits of weights that are not packed."""


def takes(outputs: int, inner: int) -> bool:
    """Return whether weights of this shape are multiplied here: whole groups of inputs, whole tiles of outputs."""
    return outputs > 0 and inner > 0 and outputs % OUTPUTS == 0 and inner % GROUP == 0


_BYTE, _SHORT, _WORD, _WIDE = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_LANES = 16
_SINGLES, _WORDS, _SHORTS, _BYTES = (ir.VectorType(kind, _LANES) for kind in (ir.FloatType(), _WORD, _SHORT, _BYTE))
_ALL = ir.VectorType(_SHORT, GROUP)


def _at(builder: Any, base: Any, step: Any, size: int, offset: int, kind: Any) -> Any:
    """Pointer to what is ``size`` bytes a step after a base, and ``offset`` further."""
    place = builder.add(builder.add(base, builder.mul(step, _WIDE(size))), _WIDE(offset))
    return builder.inttoptr(place, kind.as_pointer())


@intrinsic
def _widen_scales(typing_context: Any, scales: Any, groups: Any, out: Any) -> Any:
    """Convert the float16 pairs of groups at an address, a multiple of eight, to float32 at another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scales, groups, out = arguments
        halves = ir.VectorType(ir.HalfType(), _LANES)
        with cgutils.for_range(builder, builder.lshr(groups, _WIDE(3)), intp=_WIDE) as loop:
            found = builder.load(_at(builder, scales, loop.index, 32, 0, halves), align=2)
            builder.store(builder.fpext(found, _SINGLES), _at(builder, out, loop.index, 64, 0, _SINGLES), align=4)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3), generate


def _unpack(bits: int) -> Any:
    """Make the function that unpacks groups of codes of so many bits; see :data:`_unpack_four`."""

    @intrinsic
    def generated(typing_context: Any, codes: Any, scales: Any, groups: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, scales, groups, out = arguments

            def declared(name: str, result: Any, given: list[Any]) -> Any:
                return builder.module.declare_intrinsic(name, (), ir.FunctionType(result, given))

            narrowed = declared("llvm.x86.avx512bf16.cvtneps2bf16.512", _SHORTS, [_SINGLES])
            chosen = declared("llvm.x86.avx512.permvar.hi.512", _ALL, [_ALL, _ALL])

            def load(step: Any, size: int, offset: int) -> Any:
                return builder.load(_at(builder, codes, step, size, offset, _BYTES), align=1)

            def every(step: Any, offset: int) -> Any:
                """The scale or the least weight of a group, in each lane."""
                value = builder.load(_at(builder, scales, step, 8, offset, ir.FloatType()), align=4)
                one = builder.insert_element(ir.Constant(_SINGLES, ir.Undefined), value, _WORD(0))
                return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * _LANES))

            def weights(numbers: Any, step: Any) -> Any:
                """Products and sums are rounded apart, as in float32 arithmetic of other libraries."""
                return builder.call(narrowed, [builder.fadd(builder.fmul(numbers, every(step, 0)), every(step, 4))])

            def beside(first: Any, second: Any) -> Any:
                return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_WORD, GROUP), [*range(GROUP)]))

            byte = _BYTE.as_pointer()
            fetch = declared("llvm.prefetch", ir.VoidType(), [byte, _WORD, _WORD, _WORD])
            with cgutils.for_range(builder, groups, intp=_WIDE) as loop:
                step = loop.index
                # what is unpacked next: while products are computed, nothing asks for it
                ahead = _at(builder, codes, builder.add(step, groups), 4 * bits, 0, _BYTE)
                builder.call(fetch, [ahead, _WORD(0), _WORD(3), _WORD(1)])
                if bits == 4:  # the weights of all sixteen codes, of which the codes choose
                    table = weights(ir.Constant(_SINGLES, [float(code) for code in range(_LANES)]), step)
                    both = builder.zext(load(step, 16, 0), _SHORTS)
                    mask, shift = (ir.Constant(_SHORTS, [number] * _LANES) for number in (15, 4))
                    places = beside(builder.and_(both, mask), builder.lshr(both, shift))
                    found = builder.call(chosen, [beside(table, table), places])
                else:
                    numbers = [
                        builder.sitofp(builder.sext(load(step, 32, place), _WORDS), _SINGLES) for place in (0, 16)
                    ]
                    found = beside(*(weights(part, step) for part in numbers))
                builder.store(found, _at(builder, out, step, 64, 0, _ALL), align=2)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 4), generate

    return generated


_unpack_four, _unpack_eight = _unpack(4), _unpack(8)
"""Unpack a number of groups of codes at an address, with their scales, to ``bfloat16`` at another."""


@compiled()
def unpack_groups(bits: Any, codes: Any, scales: Any, groups: Any, wide: Any, out: Any) -> None:
    """Unpack groups, a multiple of eight, by way of their scales in float32 at ``wide``."""
    _widen_scales(scales, groups, wide)
    if bits == 4:
        _unpack_four(codes, wide, groups, out)
    else:
        _unpack_eight(codes, wide, groups, out)


@compiled(parallel=True)
def _by_amx(x: Any, layers: Any, out: Any, shapes: Any, threads: int) -> None:
    rows, inner = x.shape
    first, groups = min(rows, COLUMNS), inner // GROUP
    second, words = rows - first, x.view(np.int32)
    pairs, more = np.empty((inner // 2, first), np.int32), np.empty((inner // 2, max(1, second)), np.int32)
    for p in range(inner // 2):
        for row in range(first):
            pairs[p, row] = words[row, p]
        for row in range(second):
            more[p, row] = words[first + row, p]
    of_row, steps = np.int64(2 * inner), np.int64(groups)
    total = layers[:, 3].sum() // OUTPUTS
    for chunk in numba.prange(threads):
        weight, wide = np.empty((OUTPUTS, inner), np.uint16), np.empty((OUTPUTS, groups, 2), np.float32)
        sums, others = np.empty((OUTPUTS, first), np.float32), np.empty((OUTPUTS, max(1, second)), np.float32)
        halves = np.empty(OUTPUTS * COLUMNS, np.uint16)
        shape_tiles(np.int64(shapes.ctypes.data))
        before = 0  # blocks of sixteen outputs of earlier layers
        for n in range(len(layers)):
            codes, scales, bits, outputs = layers[n]
            begin = max(0, total * chunk // threads - before)
            end = min(outputs // OUTPUTS, total * (chunk + 1) // threads - before)
            base = rows * OUTPUTS * before
            for block in range(begin, end):
                place = OUTPUTS * block * groups
                own = codes + 4 * bits * place
                # addresses are taken here, as memory ends with its last use
                of_unpacked, of_wide = np.int64(weight.ctypes.data), np.int64(wide.ctypes.data)
                of_sums, of_others = np.int64(sums.ctypes.data), np.int64(others.ctypes.data)
                of_x, of_more = np.int64(pairs.ctypes.data), np.int64(more.ctypes.data)
                if bits != WHOLE:
                    unpack_groups(bits, own, scales + 4 * place, OUTPUTS * groups, of_wide, of_unpacked)
                    own = of_unpacked
                if second:
                    products_of_two(own, of_row, of_x, 4 * first, of_more, 4 * second, steps, of_sums, of_others)
                else:
                    products_of_one(own, of_row, of_x, 4 * first, of_more, 4 * second, steps, of_sums, of_others)
                start = base + OUTPUTS * block
                store_rounded(sums, halves, out, start, outputs)
                if second:
                    store_rounded(others, halves, out, start + first * outputs, outputs)
            before += outputs // OUTPUTS
        release_tiles()


@compiled(parallel=True)
def _by_tiles(x: Any, layers: Any, out: Any, threads: int) -> None:
    rows, inner = x.shape
    groups, of_row = inner // GROUP, np.int64(2 * inner)
    total = layers[:, 3].sum() // OUTPUTS
    for chunk in numba.prange(threads):
        weight, wide = np.empty((OUTPUTS, inner), np.uint16), np.empty((OUTPUTS, groups, 2), np.float32)
        before = 0
        for n in range(len(layers)):
            codes, scales, bits, outputs = layers[n]
            begin = max(0, total * chunk // threads - before)
            end = min(outputs // OUTPUTS, total * (chunk + 1) // threads - before)
            base = rows * OUTPUTS * before
            for block in range(begin, end):
                place = OUTPUTS * block * groups
                own = codes + 4 * bits * place
                of_unpacked, of_wide = np.int64(weight.ctypes.data), np.int64(wide.ctypes.data)
                of_x, of_out = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
                if bits != WHOLE:
                    unpack_groups(bits, own, scales + 4 * place, OUTPUTS * groups, of_wide, of_unpacked)
                    own = of_unpacked
                for row in range(0, rows, SIDE):
                    some, of_rows = min(SIDE, rows - row), of_x + row * of_row
                    for i in range(0, OUTPUTS, SIDE):
                        to = of_out + 2 * (base + row * outputs + OUTPUTS * block + i)
                        tile_of_four(some, of_rows, of_row, own + i * of_row, of_row, np.int64(groups), to, 2 * outputs)
            before += outputs // OUTPUTS


@compiled()
def products(x: Any, layers: Any, out: Any, shapes: Any, threads: int) -> None:
    """Multiply rows by several weights.

    Args:
        x: ``bfloat16 [rows, inner]``.
        layers: Address of each weight, of its scales, its bits and its number of outputs, ``int64 [n, 4]``.
        out: ``bfloat16 [rows x outputs]`` of the first weight, then of the second, and so on.
        shapes: Configuration of AMX's tiles; None without AMX.
    """
    if shapes is None:
        _by_tiles(x, layers, out, threads)
    else:
        _by_amx(x, layers, out, shapes, threads)


def multiply(x: Tensor, layers: Any, out: Tensor, *, by_amx: bool) -> None:
    """Call :func:`products` with as many threads as are worth it.

    Args:
        x: ``bfloat16 [rows, inner]``, contiguous.
        layers: Descriptions of weights, as in :func:`products`.
        out: Contiguous memory of the results.
        by_amx: Whether AMX is used, else AVX-512 for bfloat16.
    """
    threads = threads_for(int(layers[:, 3].sum()) * x.shape[1])
    shapes = tile_shapes(len(x)) if by_amx else None
    with pool(threads):
        products(array(x), layers, array(out).reshape(-1), shapes, threads)
