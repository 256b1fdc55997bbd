"""Linear layers whose weights are codes of four or eight bits in groups of 32 inputs, with a scale each.

A weight is ``code * scale + least``, rounded to bfloat16 as it is read; products are those of
:mod:`~cordillera.kernels.dense.few_rows` with these weights, to the bit, where the processor multiplies bfloat16
numbers. Codes are those of GGUF's formats Q4_0, Q4_1 and Q8_0, so that such a file's weights are neither rounded again
nor unpacked in memory. A pass over few rows then reads a third or a half of the bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
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
from cordillera.kernels.dense.bf16_amx import available as amx_available
from cordillera.kernels.dense.bf16_tiles import SIDE, available, tile_of_four
from cordillera.kernels.dense.few_rows import MOST_ROWS, few_rows_linear, many_rows_linear
from cordillera.kernels.numba_support import array, pool, threads_for

GROUP = 32
"""Inputs that share a scale."""


class PackedRows(NamedTuple):
    """Codes of a weight ``[outputs, inner]``.

    Attributes:
        codes: Codes, ``uint8 [outputs, inner / 32, 16]`` of four bits from 0 to 15, the first 16 inputs of a group in
            the lower halves of the bytes; or ``int8 [outputs, inner / 32, 32]``.
        scales: Scale of each group, and what is added to its weights, ``float16 [outputs, inner / 32, 2]``.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        return self.codes.shape[0], GROUP * self.codes.shape[1]


def is_fast() -> bool:
    """Return whether products take no longer than those of bfloat16 weights here."""
    return available()


def takes(outputs: int, inner: int) -> bool:
    """Return whether weights of this shape can be packed: whole groups, and whole tiles of outputs."""
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
def _products_by_amx(
    x: Any, more: Any, codes: Any, scales: Any, bits: Any, shapes: Any, out: Any, threads: int
) -> None:
    """As in :mod:`~cordillera.kernels.dense.few_rows`; the weights of sixteen outputs at a time are unpacked."""
    outputs, groups = scales.shape[0], scales.shape[1]
    first, second, of_row, steps = x.shape[1], more.shape[1], np.int64(2 * GROUP * groups), np.int64(groups)
    of_x, of_more = np.int64(x.ctypes.data), np.int64(more.ctypes.data)
    of_codes, of_scales = np.int64(codes.ctypes.data), np.int64(scales.ctypes.data)
    blocks, flat = outputs // OUTPUTS, out.ravel()
    for chunk in numba.prange(threads):
        weight = np.empty((OUTPUTS, GROUP * groups), np.uint16)
        wide = np.empty((OUTPUTS, groups, 2), np.float32)
        sums = np.empty((OUTPUTS, first), np.float32)
        others = np.empty((OUTPUTS, max(second, 1)), np.float32)
        halves = np.empty(OUTPUTS * COLUMNS, np.uint16)
        of_sums, of_others = np.int64(sums.ctypes.data), np.int64(others.ctypes.data)
        shape_tiles(np.int64(shapes.ctypes.data))
        for block in range(blocks * chunk // threads, blocks * (chunk + 1) // threads):
            start = OUTPUTS * block
            place = start * groups
            own, of_wide = (
                np.int64(weight.ctypes.data),
                np.int64(wide.ctypes.data),
            )  # here: memory ends with its last use
            unpack_groups(bits, of_codes + 4 * bits * place, of_scales + 4 * place, OUTPUTS * groups, of_wide, own)
            if second:
                products_of_two(own, of_row, of_x, 4 * first, of_more, 4 * second, steps, of_sums, of_others)
            else:
                products_of_one(own, of_row, of_x, 4 * first, of_more, 4 * second, steps, of_sums, of_others)
            store_rounded(sums, halves, flat, start, outputs)
            if second:
                store_rounded(others, halves, flat, first * outputs + start, outputs)
        release_tiles()


@compiled(parallel=True)
def _products_by_tiles(x: Any, codes: Any, scales: Any, bits: Any, out: Any, threads: int) -> None:
    """The same by :mod:`~cordillera.kernels.dense.bf16_tiles`, four of the unpacked outputs at a time."""
    rows, outputs, groups = x.shape[0], scales.shape[0], scales.shape[1]
    of_row, steps = np.int64(2 * GROUP * groups), np.int64(groups)
    of_x, of_out = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    of_codes, of_scales = np.int64(codes.ctypes.data), np.int64(scales.ctypes.data)
    blocks = outputs // OUTPUTS
    for chunk in numba.prange(threads):
        weight = np.empty((OUTPUTS, GROUP * groups), np.uint16)
        wide = np.empty((OUTPUTS, groups, 2), np.float32)
        for block in range(blocks * chunk // threads, blocks * (chunk + 1) // threads):
            place = OUTPUTS * block * groups
            own, of_wide = np.int64(weight.ctypes.data), np.int64(wide.ctypes.data)
            unpack_groups(bits, of_codes + 4 * bits * place, of_scales + 4 * place, OUTPUTS * groups, of_wide, own)
            for row in range(0, rows, SIDE):
                some, of_rows = min(SIDE, rows - row), of_x + row * of_row
                for first in range(0, OUTPUTS, SIDE):
                    to = of_out + 2 * (row * outputs + OUTPUTS * block + first)
                    tile_of_four(some, of_rows, of_row, own + first * of_row, of_row, steps, to, 2 * outputs)


@compiled(parallel=True)
def _unpack_all(codes: Any, scales: Any, bits: Any, out: Any, threads: int) -> None:
    outputs, groups = scales.shape[0], scales.shape[1]
    of_out, of_codes, of_scales = np.int64(out.ctypes.data), np.int64(codes.ctypes.data), np.int64(scales.ctypes.data)
    blocks = outputs // OUTPUTS
    for chunk in numba.prange(threads):
        wide = np.empty((OUTPUTS, groups, 2), np.float32)
        for block in range(blocks * chunk // threads, blocks * (chunk + 1) // threads):
            place, of_wide = OUTPUTS * block * groups, np.int64(wide.ctypes.data)
            own, to = of_codes + 4 * bits * place, of_out + 2 * GROUP * place
            unpack_groups(bits, own, of_scales + 4 * place, OUTPUTS * groups, of_wide, to)


def unpacked(packed: PackedRows) -> Tensor:
    """Return the weights, ``bfloat16 [outputs, inner]``."""
    codes, scales = packed
    if available():
        out = torch.empty(packed.shape, dtype=torch.bfloat16)
        threads = threads_for(out.numel())
        with pool(threads):
            _unpack_all(array(codes), array(scales.view(torch.uint16)), _bits(codes), array(out), threads)
        return out
    if _bits(codes) == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1)
    scale, least = scales.float()[..., None].unbind(2)
    return (codes.float() * scale + least).view(packed.shape).bfloat16()


def packed_linear(x: Tensor, packed: PackedRows) -> Tensor:
    """Compute ``x weight^T`` on a CPU, without gradients.

    Args:
        x: Input, ``bfloat16 [n, inner]``.
        packed: Weight.

    Returns:
        ``bfloat16 [n, outputs]``.
    """
    if len(x) > MOST_ROWS or not available():
        weight = unpacked(packed)
        return few_rows_linear(x, weight) if len(x) <= MOST_ROWS else many_rows_linear(x, weight)
    out = torch.empty(len(x), packed.shape[0], dtype=x.dtype)
    if out.numel():
        codes, scales, bits = array(packed.codes), array(packed.scales.view(torch.uint16)), _bits(packed.codes)
        threads, x = threads_for(packed.shape[0] * packed.shape[1]), x.contiguous()
        if amx_available():
            pairs = x.view(torch.int32).T  # [inner / 2, rows]
            first, more = (array(part.contiguous()) for part in (pairs[:, :COLUMNS], pairs[:, COLUMNS:]))
            with pool(threads):
                _products_by_amx(first, more, codes, scales, bits, tile_shapes(len(x)), array(out), threads)
        else:
            with pool(threads):
                _products_by_tiles(array(x), codes, scales, bits, array(out), threads)
    return out


def _bits(codes: Tensor) -> int:
    return 4 if codes.dtype == torch.uint8 else 8
