"""Products of up to 32 bfloat16 rows with several weights at once, by tiles: whole weights, or codes that are unpacked.

Codes have four or eight bits, in groups of 32 inputs; see :class:`~cordillera.kernels.dense.packed_rows.PackedRows`. A
result has the same bits whatever rows and weights are beside it, and those of the unpacked weights.
"""

from __future__ import annotations

import math
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
    Tiles,
    fetch,
    in_pairs,
    products_of_one,
    products_of_two,
    release_tiles,
    shape_tiles,
    store_rounded,
    tile_shapes,
)
from cordillera.kernels.dense.bf16_tiles import (
    SIDE,
    compute_rows,
    fetched,
    lay_out,
    multiplies_pairs,
    rounded_words,
    tile_of_four,
)
from cordillera.kernels.numba_support import array, borrowed, pool, threads_for

GROUP = 32
"""Inputs that share a scale."""
WHOLE = 16
"""Bits of weights that are not packed."""


def takes(outputs: int, inner: int) -> bool:
    """Return whether weights of this shape are multiplied here: whole groups of inputs, whole tiles of outputs."""
    return outputs > 0 and inner > 0 and outputs % OUTPUTS == 0 and inner % GROUP == 0


_BYTE, _SHORT, _WORD, _WIDE = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_LANES = 16
_TILES, _TILE_BYTES = 4, 1024  # unpacked tiles in memory; a power of two
_SINGLES, _WORDS, _SHORTS, _BYTES = (ir.VectorType(kind, _LANES) for kind in (ir.FloatType(), _WORD, _SHORT, _BYTE))
_ALL = ir.VectorType(_SHORT, GROUP)


def _at(builder: Any, base: Any, step: Any, size: int, offset: int, kind: Any) -> Any:
    """Pointer to ``base + step * size + offset``, in bytes."""
    place = builder.add(builder.add(base, builder.mul(step, _WIDE(size))), _WIDE(offset))
    return builder.inttoptr(place, kind.as_pointer())


@compiled()
def scale_bytes(bits: Any) -> Any:
    """Return the bytes of a group's scale, and of its least weight, for codes of ``bits`` bits."""
    return 4 if bits == 4 else 2


@intrinsic
def _widen_halves(typing_context: Any, scales: Any, count: Any, out: Any) -> Any:
    """Convert float16 at an address, a multiple of sixteen, to float32 at another.

    NaN get the bits of which :func:`_rounded` makes NaN.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scales, count, out = arguments
        halves = ir.VectorType(ir.HalfType(), _LANES)
        with cgutils.for_range(builder, builder.lshr(count, _WIDE(4)), intp=_WIDE) as loop:
            found = builder.load(_at(builder, scales, loop.index, 32, 0, halves), align=2)
            wide = builder.fpext(found, _SINGLES)
            is_nan = builder.fcmp_unordered("uno", wide, wide)
            wide = builder.select(is_nan, ir.Constant(_SINGLES, [math.nan] * _LANES), wide)
            builder.store(wide, _at(builder, out, loop.index, 64, 0, _SINGLES), align=4)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3), generate


def _declared(builder: Any, name: str, result: Any, given: list[Any]) -> Any:
    return builder.module.declare_intrinsic(name, (), ir.FunctionType(result, given))


def _mixed(builder: Any, first: Any, second: Any, places: list[int]) -> Any:
    """Select elements of two concatenated vectors by index."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_WORD, len(places)), places))


def _beside(builder: Any, first: Any, second: Any) -> Any:
    return _mixed(builder, first, second, [*range(2 * first.type.count)])


def _rounded(builder: Any, values: Any) -> Any:
    """The bfloat16 numbers nearest to sixteen float32."""
    if multiplies_pairs():
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        return builder.call(_declared(builder, name, _SHORTS, [_SINGLES]), [values])
    shift = ir.Constant(_WORDS, [16] * _LANES)
    return builder.trunc(builder.lshr(rounded_words(builder, values), shift), _SHORTS)


# Codes in vectors of a table: in one, or in the order in which halves of registers of AVX2 can be put together.
_TABLE = ([*range(16)],) if multiplies_pairs() else ([*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)])


def _chosen(builder: Any, table: list[Any], codes: Any) -> Any:
    """Look up sixteen table entries by the low, then by the high four bits of sixteen bytes.

    Args:
        table: Vectors with the float32 of :data:`_TABLE`.
    """
    if multiplies_pairs():
        both, weights = builder.zext(codes, _SHORTS), _rounded(builder, table[0])
        mask, shift = (ir.Constant(_SHORTS, [number] * _LANES) for number in (15, 4))
        places = _beside(builder, builder.and_(both, mask), builder.lshr(both, shift))
        choose = _declared(builder, "llvm.x86.avx512.permvar.hi.512", _ALL, [_ALL, _ALL])
        table = _mixed(builder, weights, weights, [*range(_LANES), *[0] * _LANES])  # no code is above 15
        return builder.call(choose, [table, places])
    lines, longs = ir.VectorType(_BYTE, GROUP), ir.VectorType(_WIDE, 4)
    shuffle = _declared(builder, "llvm.x86.avx2.pshuf.b", lines, [lines, lines])
    # bytes 2 of four words, then their bytes 3, in each half of a register
    upper = ir.Constant(lines, [*(4 * n + 2 for n in range(4)), *(4 * n + 3 for n in range(4)), *[128] * 8] * 2)
    first, second = (
        builder.call(shuffle, [builder.bitcast(rounded_words(builder, values), lines), upper]) for values in table
    )
    words = ir.VectorType(_WORD, 8)
    order = [0, 8, 1, 9, 4, 12, 5, 13]
    mixed = _mixed(builder, builder.bitcast(first, words), builder.bitcast(second, words), order)
    bytes_of_table = builder.bitcast(mixed, longs)
    # eight codes in each of four parts, of which the second and the fourth choose by their upper halves
    twice = builder.bitcast(codes, ir.VectorType(_WIDE, 2))
    places = builder.lshr(_mixed(builder, twice, twice, [0, 0, 1, 1]), ir.Constant(longs, [0, 4, 0, 4]))
    places = builder.and_(builder.bitcast(places, lines), ir.Constant(lines, [15] * GROUP))
    low, high = (
        builder.call(shuffle, [builder.bitcast(_mixed(builder, bytes_of_table, bytes_of_table, of), lines), places])
        for of in ([0, 2, 0, 2], [1, 3, 1, 3])
    )
    in_turn = [place + n for start in (0, 16, 8, 24) for n in range(start, start + 8) for place in (0, GROUP)]
    return builder.bitcast(_mixed(builder, low, high, in_turn), _ALL)


def _unpacked(builder: Any, bits: int, codes: Any, scales: Any, group: Any) -> Any:
    """Unpack a group of ``bits``-bit codes with its float32 scale and least weight; both are given by address."""

    def load(offset: int) -> Any:
        return builder.load(_at(builder, codes, group, 4 * bits, offset, _BYTES), align=1)

    def weights(numbers: Any) -> Any:
        """Products and sums are rounded apart, as in float32 arithmetic of other libraries."""
        count = numbers.type.count
        found = numbers
        steps = [(0, builder.fmul), (4, builder.fadd)][: 2 if bits == 4 else 1]  # the scale, the least weight
        for offset, compute in steps:
            value = builder.load(_at(builder, scales, group, 4 * len(steps), offset, ir.FloatType()), align=4)
            one = builder.insert_element(ir.Constant(numbers.type, ir.Undefined), value, _WORD(0))
            found = compute(found, _mixed(builder, one, one, [0] * count))
        return found

    if bits == 4:  # the weights of all sixteen codes, of which the codes choose
        table = [
            ir.Constant(ir.VectorType(ir.FloatType(), len(some)), [float(code) for code in some]) for some in _TABLE
        ]
        return _chosen(builder, [weights(numbers) for numbers in table], load(0))
    found = [weights(builder.sitofp(builder.sext(load(place), _WORDS), _SINGLES)) for place in (0, 16)]
    if multiplies_pairs():
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        return builder.call(_declared(builder, name, _ALL, [_SINGLES, _SINGLES]), found[::-1])
    return _beside(builder, *(_rounded(builder, one) for one in found))


def _unpack(bits: int) -> Any:
    """Make the function that unpacks groups of ``bits``-bit codes; see :data:`_unpack_four`."""

    @intrinsic
    def generated(typing_context: Any, codes: Any, scales: Any, groups: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, scales, groups, out = arguments
            with cgutils.for_range(builder, groups, intp=_WIDE) as loop:
                ahead = builder.mul(builder.add(loop.index, groups), _WIDE(4 * bits))
                fetch(builder, builder.add(codes, ahead), 1)
                weights = _unpacked(builder, bits, codes, scales, loop.index)
                builder.store(weights, _at(builder, out, loop.index, 64, 0, _ALL), align=2)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 4), generate

    return generated


_unpack_four, _unpack_eight = _unpack(4), _unpack(8)
"""Unpack groups of codes to bfloat16. Arguments: addresses of the codes, and of scales and least weights in float32,
``[groups, 2]``, or of scales of eight bits, ``[groups]``; the number of groups; and the address of the weights."""


def _packed_products(bits: int, is_double: bool) -> Any:
    """Make the function for ``bits``-bit codes and up to sixteen rows, or more; see :data:`_PRODUCTS`."""

    @intrinsic
    def generated(
        typing_context: Any, codes: Any, scales: Any, memory: Any, x: Any, x_row: Any, more: Any, more_row: Any,
        steps: Any, out: Any, out_more: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, scales, memory, x, x_row, more, more_row, steps, out, out_more = arguments
            tiles = Tiles(builder, is_double, ((x, x_row), (more, more_row)))

            def tile_at(step: Any) -> Any:
                return builder.add(memory, builder.mul(builder.and_(step, _WIDE(_TILES - 1)), _WIDE(_TILE_BYTES)))

            def unpack(step: Any) -> None:
                to = tile_at(step)
                for row in range(OUTPUTS):
                    group = builder.add(builder.mul(steps, _WIDE(row)), step)
                    weights = _unpacked(builder, bits, codes, scales, group)
                    builder.store(weights, _at(builder, to, _WIDE(0), 0, 64 * row, _ALL), align=2)

            def take(half: int, step: Any) -> None:
                following = builder.add(step, _WIDE(1))
                with builder.if_then(builder.icmp_signed("<", following, steps), likely=True):
                    unpack(following)  # while the last tile is multiplied
                ahead = builder.mul(builder.add(step, steps), _WIDE(OUTPUTS * 4 * bits))
                fetch(builder, builder.add(codes, ahead), bits)
                tiles.multiply(half, tile_at(step), _WIDE(64), step)

            tiles.clear()
            unpack(_WIDE(0))
            in_pairs(builder, steps, take)
            tiles.store((out, out_more))
            return context.get_dummy_value()

        return types.none(*[types.int64] * 10), generate

    return generated


@compiled()
def unpack_groups(bits: Any, codes: Any, scales: Any, groups: Any, wide: Any, out: Any) -> None:
    """Unpack groups, a multiple of sixteen, by way of their scales in float32 at ``wide``."""
    _widen_halves(scales, groups * scale_bytes(bits) // 2, wide)
    if bits == 4:
        _unpack_four(codes, wide, groups, out)
    else:
        _unpack_eight(codes, wide, groups, out)


_four_of_one, _four_of_two = _packed_products(4, False), _packed_products(4, True)
_eight_of_one, _eight_of_two = _packed_products(8, False), _packed_products(8, True)
"""Products of sixteen outputs of packed weights, by AMX; a tile is unpacked while the one before is multiplied.

Arguments are the addresses of codes, of scales as in :data:`_unpack_four`, and of memory for :data:`_TILES` tiles; then
those of :data:`~cordillera.kernels.dense.bf16_amx.products_of_one` that follow the weights.
"""


@compiled()
def _tiled(
    bits: Any, own: Any, scales: Any, memory: Any, x: Any, x_row: Any, more: Any, more_row: Any, steps: Any, out: Any,
    out_more: Any,
) -> None:  # fmt: skip
    """Compute sums of sixteen outputs by AMX."""
    if bits == WHOLE:
        row = GROUP * 2 * steps
        if more_row:
            products_of_two(own, row, x, x_row, more, more_row, steps, out, out_more)
        else:
            products_of_one(own, row, x, x_row, more, more_row, steps, out, out_more)
    elif bits == 4:
        if more_row:
            _four_of_two(own, scales, memory, x, x_row, more, more_row, steps, out, out_more)
        else:
            _four_of_one(own, scales, memory, x, x_row, more, more_row, steps, out, out_more)
    elif more_row:
        _eight_of_two(own, scales, memory, x, x_row, more, more_row, steps, out, out_more)
    else:
        _eight_of_one(own, scales, memory, x, x_row, more, more_row, steps, out, out_more)


_BY_PAIRS = multiplies_pairs()


def _packed_tile(bits: int) -> Any:
    """Make the function that unpacks codes of four outputs in registers and multiplies them by one to four rows.

    Sums are those of :func:`~cordillera.kernels.dense.bf16_tiles.tile_of_four` with the unpacked weights, to the bit.
    """
    if not multiplies_pairs():
        return compiled()(lambda rows, codes, scales, groups, x, x_row, out, out_row, ahead: None)

    @intrinsic
    def generated(
        typing_context: Any, rows: Any, codes: Any, scales: Any, groups: Any, x: Any, x_row: Any, out: Any,
        out_row: Any, ahead: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows, codes, scales, groups, x, x_row, out, out_row, ahead = arguments

            def weights_of(o: int, step: Any) -> list[Any]:
                group = builder.add(builder.mul(groups, _WIDE(o)), step)
                fetch(builder, builder.add(ahead, builder.mul(group, _WIDE(4 * bits))), 1)
                return [builder.bitcast(_unpacked(builder, bits, codes, scales, group), _WORDS)]

            for count in range(1, SIDE + 1):
                with builder.if_then(builder.icmp_signed("==", rows, _WIDE(count))):
                    compute_rows(builder, range(count), SIDE, groups, (x, x_row, out, out_row), weights_of)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 9), generate

    return generated


_tile_of_four_bits, _tile_of_eight_bits = _packed_tile(4), _packed_tile(8)
"""Products of one to four rows with four outputs of codes. Arguments: the number of rows; the addresses of codes, and
of scales as in :data:`_unpack_four`; the number of groups; address and stride of rows and of results; and the address
of codes that are fetched meanwhile."""


@compiled()
def _laid_out(rows: int) -> int:
    """Number of rows that are laid out for tiles without AMX."""
    return 0 if _BY_PAIRS else rows


@compiled()
def _parts(rows: int, inner: int) -> tuple[int, ...]:
    """Bytes before parts of a thread's memory, and of all; tiles load slowly across the cache lines they begin with."""
    first, second = min(rows, COLUMNS), max(1, rows - COLUMNS)
    weights, scales = 2 * OUTPUTS * max(inner, _TILES * GROUP), 8 * OUTPUTS * inner // GROUP
    sums, others = scales + weights, scales + weights + 128 * first
    halves = others + 128 * second
    pairs = halves + 2 * OUTPUTS * COLUMNS
    more = pairs + (2 * inner * first + 63) // 64 * 64
    rows_laid_out = more + (2 * inner * second + 63) // 64 * 64
    return weights, sums, others, halves, pairs, more, rows_laid_out, rows_laid_out + 4 * inner * _laid_out(rows)


def scratch_memory(threads: int, rows: int, inner: int) -> Any:
    """Return scratch memory for :func:`outputs_of` with up to ``inner`` inputs, ``uint8 [threads, n]``."""
    size = _parts(rows, inner)[-1]
    memory = np.empty(threads * size + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + threads * size].reshape(threads, size)


@compiled()
def scratch_of(memory: Any, rows: int, inner: int) -> Any:
    """Return the arrays of a thread's memory."""
    weights, sums, others, halves, pairs, more, wide, end = _parts(rows, inner)
    first, second = min(rows, COLUMNS), max(1, rows - COLUMNS)
    return (
        memory[:weights],  # unpacked weights
        memory[weights:sums],  # their scales
        memory[sums:others].view(np.float32).reshape((2, OUTPUTS, first)),  # sums: first rows, further rows
        memory[others:halves].view(np.float32).reshape((2, OUTPUTS, second)),
        memory[halves:pairs].view(np.uint16),
        memory[pairs : pairs + 2 * inner * first].view(np.int32).reshape((inner // 2, first)),  # input pairs: likewise
        memory[more : more + 2 * inner * second].view(np.int32).reshape((inner // 2, second)),
        memory[wide:end].view(np.float32).reshape((_laid_out(rows), inner)),
    )


@compiled()
def pair_rows(x: Any, scratch: Any, shapes: Any) -> None:
    """Lay rows ``bfloat16 [rows, inner]`` as tiles take them, before :func:`outputs_of`."""
    if shapes is None:
        if not _BY_PAIRS:
            lay_out(x, scratch[7])
    else:
        pairs, more = scratch[5], scratch[6]
        rows, words = len(x), x.view(np.int32)
        first = min(rows, COLUMNS)
        for p in range(words.shape[1]):
            for row in range(first):
                pairs[p, row] = words[row, p]
            for row in range(first, rows):
                more[p, row - first] = words[row, p]


@compiled()
def outputs_of(layer: Any, block: Any, x: Any, scratch: Any, out: Any, start: Any, stride: Any, shapes: Any) -> None:
    """Multiply rows by sixteen outputs of a weight, and store them from ``start`` on, rows ``stride`` apart.

    Args:
        layer: Description of the weight, as in :func:`products`.
        block: Number of the outputs, in sixteens.
        x: ``bfloat16 [rows, inner]``, as :func:`pair_rows` took them.
        scratch: Arrays of :func:`scratch_of`.
        out: One row of ``bfloat16``.
    """
    weight, wide, sums, others, halves, pairs, more, laid_out = scratch
    (rows, inner), bits = x.shape, layer[2]
    groups = inner // GROUP
    place, of_row = OUTPUTS * block * groups, np.int64(2 * inner)
    own, scales = layer[0] + 4 * bits * place, layer[1] + scale_bytes(bits) * place
    of_unpacked, of_wide, steps = np.int64(weight.ctypes.data), np.int64(wide.ctypes.data), np.int64(groups)
    if shapes is None and _BY_PAIRS and bits != WHOLE and rows <= SIDE:
        _widen_halves(scales, OUTPUTS * groups * scale_bytes(bits) // 2, of_wide)
        count, of_x, to_row = np.int64(rows), np.int64(x.ctypes.data), np.int64(2 * stride)
        for i in range(0, OUTPUTS, SIDE):
            codes, to = own + 4 * bits * i * groups, np.int64(out.ctypes.data) + 2 * (start + i)
            own_scales = of_wide + 2 * scale_bytes(bits) * i * groups
            ahead = codes + 8 * bits * OUTPUTS * groups  # two blocks on
            if bits == 4:
                _tile_of_four_bits(count, codes, own_scales, steps, of_x, of_row, to, to_row, ahead)
            else:
                _tile_of_eight_bits(count, codes, own_scales, steps, of_x, of_row, to, to_row, ahead)
    elif shapes is None:
        if bits != WHOLE:
            unpack_groups(bits, own, scales, OUTPUTS * groups, of_wide, of_unpacked)
            own = of_unpacked
        of_x, x_row, of_out = np.int64(x.ctypes.data), of_row, np.int64(out.ctypes.data)
        if not _BY_PAIRS:
            of_x, x_row = np.int64(laid_out.ctypes.data), np.int64(4 * laid_out.shape[1])
        for row in range(0, rows, SIDE):
            for i in range(0, OUTPUTS, SIDE):
                to, of_rows = of_out + 2 * (start + row * stride + i), of_x + row * x_row
                some, weights = min(SIDE, rows - row), own + i * of_row
                ahead, step = weights, np.int64(0)  # unpacked tiles need no prefetch
                if bits == WHOLE:
                    ahead, step = fetched(weights, of_row, OUTPUTS, row, rows)
                tile_of_four(some, of_rows, x_row, weights, of_row, steps, to, np.int64(2 * stride), ahead, step)
    else:
        first, of_sums, of_others = min(rows, COLUMNS), np.int64(sums.ctypes.data), np.int64(others.ctypes.data)
        second, of_x, of_more = rows - first, np.int64(pairs.ctypes.data), np.int64(more.ctypes.data)
        if bits != WHOLE:
            _widen_halves(scales, OUTPUTS * groups * scale_bytes(bits) // 2, of_wide)
        _tiled(bits, own, of_wide, of_unpacked, of_x, 4 * first, of_more, 4 * second, steps, of_sums, of_others)
        store_rounded(sums, halves, out, start, stride)
        if second:
            store_rounded(others, halves, out, start + first * stride, stride)


@compiled(parallel=True)
def products(x: Any, layers: Any, out: Any, shapes: Any, memory: Any, threads: int) -> None:
    """Multiply rows by several weights.

    Args:
        x: ``bfloat16 [rows, inner]``.
        layers: Address of each weight, of its scales, its bits and its number of outputs, ``int64 [n, 4]``.
        out: ``bfloat16 [rows x outputs]`` of the first weight, then of the second, and so on.
        shapes: Configuration of AMX's tiles; None without AMX.
        memory: Memory of :func:`scratch_memory`.
    """
    rows, inner = x.shape
    total = layers[:, 3].sum() // OUTPUTS
    for chunk in numba.prange(threads):
        scratch = scratch_of(borrowed(memory)[chunk], rows, inner)
        pair_rows(x, scratch, shapes)
        if shapes is not None:
            shape_tiles(np.int64(shapes.ctypes.data))
        before = 0  # blocks of sixteen outputs of earlier layers
        for n in range(len(layers)):
            outputs = layers[n, 3]
            begin = max(0, total * chunk // threads - before)
            end = min(outputs // OUTPUTS, total * (chunk + 1) // threads - before)
            for block in range(begin, end):
                start = OUTPUTS * (rows * before + block)
                outputs_of(borrowed(layers)[n], block, borrowed(x), scratch, borrowed(out), start, outputs, shapes)
            before += outputs // OUTPUTS
        if shapes is not None:
            release_tiles()


def multiply(x: Tensor, layers: Any, out: Tensor, *, by_amx: bool) -> None:
    """Call :func:`products` with as many threads as are worth it.

    Args:
        x: ``bfloat16 [rows, inner]``, contiguous.
        layers: Descriptions of weights, as in :func:`products`.
        out: Contiguous memory of the results.
        by_amx: Whether AMX is used, else :mod:`~cordillera.kernels.dense.bf16_tiles`.
    """
    threads = threads_for(int(layers[:, 3].sum()) * x.shape[1])
    shapes = tile_shapes(len(x)) if by_amx else None
    with pool(threads):
        products(array(x), layers, array(out).reshape(-1), shapes, scratch_memory(threads, *x.shape), threads)
