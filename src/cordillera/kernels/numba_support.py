"""Tools of kernels compiled by Numba: instructions, numbers of 16 and 32 bits, threads, tensors as arrays.

Kernels divide their work over ``threads`` such that no result depends on their number.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from cordillera.kernels.compiling import compiled

_INFINITY, _MAGNITUDE = np.int32(0x7F800000), np.int32(0x7FFFFFFF)
_AHEAD, _LINE = 16, 64  # positions to prefetch ahead, bytes of a cache line
_SMALL = 4096  # least number of values for which other threads are worth waking

# Numba's own thread pool (where neither TBB nor OpenMP is found) may be entered by only one thread at a time.
_lock = threading.Lock()


@lru_cache(maxsize=1)
def _instructions() -> frozenset[str]:
    if numba.config.CPU_FEATURES is not None:
        return frozenset(one[1:] for one in numba.config.CPU_FEATURES.split(",") if one.startswith("+"))
    try:
        found = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:
        return frozenset()
    return frozenset(name for name, is_there in found.items() if is_there)


def has_instructions(*names: str) -> bool:
    """Return whether Numba compiles for a processor with all of these, by LLVM's names of them.

    It is this processor, or the one that the variables ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` describe.
    """
    return _instructions().issuperset(names)


def _from_bits(builder: Any, bits: Any) -> Any:
    """Float32 whose upper half are the 16 bits of a bfloat16."""
    word = ir.IntType(32)
    return builder.bitcast(builder.shl(builder.zext(bits, word), word(16)), ir.FloatType())


def _to_bits(builder: Any, value: Any) -> Any:
    """The 16 bits of the bfloat16 nearest to a float32, halves to even."""
    word = ir.IntType(32)
    bits = builder.bitcast(value, word)
    upper = builder.lshr(bits, word(16))
    odd = builder.and_(upper, word(1))
    rounded = builder.lshr(builder.add(builder.add(bits, word(0x7FFF)), odd), word(16))
    quiet = builder.or_(upper, word(0x40))  # rounding up must not turn a NaN into an infinity
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded), ir.IntType(16))


@intrinsic
def widen(typing_context: Any, value: Any) -> Any:
    """Convert a float32, a float64, or the bits of a bfloat16 (uint16) to float64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        if signature.args[0] == types.uint16:
            value = _from_bits(builder, value)
        return value if signature.args[0] == types.float64 else builder.fpext(value, ir.DoubleType())

    return types.float64(value), generate


@intrinsic
def widen_to_single(typing_context: Any, value: Any) -> Any:
    """Convert a float32, or the bits of a bfloat16 (uint16), to float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        return _from_bits(builder, value) if signature.args[0] == types.uint16 else value

    return types.float32(value), generate


@intrinsic
def narrow(typing_context: Any, value: Any, like: Any) -> Any:
    """Round a float32 or float64 to nearest even in the type of ``like``; uint16 represents bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, wide = arguments[0], signature.args[0] == types.float64
        if signature.args[1] == types.float64:
            return value if wide else builder.fpext(value, ir.DoubleType())
        if wide:
            value = builder.fptrunc(value, ir.FloatType())
        return value if signature.args[1] == types.float32 else _to_bits(builder, value)

    return like(value if value == types.float32 else types.float64, like), generate


@intrinsic
def reinterpret(typing_context: Any, value: Any, like: Any) -> Any:
    """Return the bits of ``value`` as the type of ``like``, which has as many bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return like(value, like), generate


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line of an address, which may be unmapped; rows lie far apart, so each would be waited for."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        )
        builder.call(prefetch, [builder.inttoptr(arguments[0], pointer), word(1), word(3), word(1)])
        return context.get_dummy_value()

    return types.none(types.int64), generate


def spread(builder: Any, value: Any, width: int) -> Any:
    """Return a vector of ``width`` times a number, in the code of an intrinsic."""
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, width), ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width))


def _read_wide(builder: Any, pointer: Any, element: Any, width: int) -> Any:
    """Read numbers of an element type of Numba's, of ``uint16`` the bits of a bfloat16, as a vector of float64."""
    raw = {types.uint16: ir.IntType(16), types.float32: ir.FloatType(), types.float64: ir.DoubleType()}[element]
    place = builder.bitcast(pointer, ir.VectorType(raw, width).as_pointer())
    values = builder.load(place, align=element.bitwidth // 8)
    if element == types.uint16:
        upper = builder.shl(
            builder.zext(values, ir.VectorType(ir.IntType(32), width)), spread(builder, ir.IntType(32)(16), width)
        )
        values = builder.bitcast(upper, ir.VectorType(ir.FloatType(), width))
    return values if element == types.float64 else builder.fpext(values, ir.VectorType(ir.DoubleType(), width))


def _write_narrow(builder: Any, values: Any, pointer: Any, element: Any) -> None:
    """Write a vector of float64 as numbers of an element type, rounded as by :func:`narrow`."""
    width = values.type.count
    if element != types.float64:
        values = builder.fptrunc(values, ir.VectorType(ir.FloatType(), width))
    if element == types.uint16:

        def word(number: int) -> Any:
            return spread(builder, ir.IntType(32)(number), width)

        bits = builder.bitcast(values, ir.VectorType(ir.IntType(32), width))
        upper = builder.lshr(bits, word(16))
        half = builder.add(builder.and_(upper, word(1)), word(0x7FFF))
        nearest = builder.lshr(builder.add(bits, half), word(16))
        is_nan, quiet = builder.fcmp_unordered("uno", values, values), builder.or_(upper, word(0x40))
        values = builder.trunc(builder.select(is_nan, quiet, nearest), ir.VectorType(ir.IntType(16), width))
    builder.store(values, builder.bitcast(pointer, values.type.as_pointer()), align=element.bitwidth // 8)


@intrinsic(prefer_literal=True)
def _sum_columns(
    typing_context: Any, width: Any, source: Any, places: Any, stride: Any, first: Any, last: Any, end: Any,
    factors: Any, initial: Any, column: Any, target: Any, start: Any,
) -> Any:  # fmt: skip
    """The columns from ``column`` of :func:`sum_rows`, ``width`` of them, as one vector that stays in registers."""
    if not isinstance(width, types.IntegerLiteral):
        return None
    lanes, whole = width.literal_value, types.int64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def data(i: int) -> Any:
            return context.make_array(signature.args[i])(context, builder, arguments[i]).data

        stride, first, last, end, initial, column, start = (arguments[i] for i in (3, 4, 5, 6, 8, 9, 11))
        element, place_of, begin = source.dtype, data(2), builder.gep(data(1), [column])
        word, long, byte_pointer = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
        kinds = [byte_pointer, word, word, word]
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte_pointer], ir.FunctionType(ir.VoidType(), kinds)
        )

        def row(p: Any) -> Any:
            return builder.gep(begin, [builder.mul(builder.load(builder.gep(place_of, [p])), stride)])

        before, sums, final = builder.block, spread(builder, initial, lanes), builder.sub(end, long(1))
        loop, body, done = (builder.append_basic_block(name) for name in ("rows", "row", "rows.done"))
        builder.branch(loop)
        builder.position_at_end(loop)
        p, total = builder.phi(long), builder.phi(sums.type)
        builder.cbranch(builder.icmp_signed("<", p, last), body, done)
        builder.position_at_end(body)
        ahead = builder.add(p, long(_AHEAD))
        soon = builder.bitcast(row(builder.select(builder.icmp_signed("<", ahead, final), ahead, final)), byte_pointer)
        for line in range(0, lanes * element.bitwidth // 8, _LINE):
            builder.call(prefetch, [builder.gep(soon, [long(line)]), word(0), word(3), word(1)])
        values = _read_wide(builder, row(p), element, lanes)
        if factors != types.none:
            factor = _read_wide(builder, builder.gep(data(7), [p]), factors.dtype, 1)
            values = builder.fmul(spread(builder, builder.extract_element(factor, word(0)), lanes), values)
        for phi, initially, then in ((p, first, builder.add(p, long(1))), (total, sums, builder.fadd(total, values))):
            phi.add_incoming(initially, before)
            phi.add_incoming(then, builder.block)
        builder.branch(loop)
        builder.position_at_end(done)
        _write_narrow(builder, total, builder.gep(data(10), [builder.add(start, column)]), target.dtype)
        return context.get_dummy_value()

    arguments = (width, source, places, whole, whole, whole, whole, factors, types.float64, whole, target, whole)
    return types.none(*arguments), generate


@compiled(forceinline=True)
def sum_rows(
    source: Any, places: Any, stride: int, first: int, last: int, end: int, factors: Any, initial: float, columns: int,
    target: Any, start: int,
) -> None:  # fmt: skip
    """Write the sum of rows, made in float64 from the first to the last and rounded at the end.

    Rows far apart in memory would each be waited for, so those of the next positions are prefetched; the sums stay in
    registers, up to 64 columns at a time.

    Args:
        source: Memory of the rows, contiguous; float32, float64 or the bits of bfloat16 (uint16), as ``target``.
        places: Rows by position, ``int64``: row ``p`` begins at element ``places[p] * stride``.
        first: First position to sum; ``last`` is the first one after them.
        end: First position that must not be read, nor prefetched.
        factors: Factor of each position, or None for ones.
        initial: Number to begin with; -0.0 keeps the sign of a single row's zeros.
        columns: Number of columns.
        target: Memory of the result, contiguous, which begins at element ``start``.
    """
    column = 0
    while column + 64 <= columns:
        _sum_columns(64, source, places, stride, first, last, end, factors, initial, column, target, start)
        column += 64
    while column + 16 <= columns:
        _sum_columns(16, source, places, stride, first, last, end, factors, initial, column, target, start)
        column += 16
    while column + 4 <= columns:
        _sum_columns(4, source, places, stride, first, last, end, factors, initial, column, target, start)
        column += 4
    while column < columns:
        _sum_columns(1, source, places, stride, first, last, end, factors, initial, column, target, start)
        column += 1


@intrinsic(prefer_literal=True)
def _sum_squares(typing_context: Any, width: Any, values: Any, first: Any, last: Any) -> Any:
    """Sum of the squares of float64 from ``first`` to ``last``, ``width`` at a time; the rest is left out."""
    if not isinstance(width, types.IntegerLiteral):
        return None
    lanes = width.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[1])(context, builder, arguments[1]).data
        _, _, first, last = arguments
        long, before = ir.IntType(64), builder.block
        zeros = spread(builder, ir.DoubleType()(0.0), lanes)
        loop, body, done = (builder.append_basic_block(name) for name in ("squares", "square", "squares.done"))
        builder.branch(loop)
        builder.position_at_end(loop)
        d, total = builder.phi(long), builder.phi(zeros.type)
        after = builder.add(d, long(lanes))
        builder.cbranch(builder.icmp_signed("<=", after, last), body, done)
        builder.position_at_end(body)
        read = _read_wide(builder, builder.gep(data, [d]), types.float64, lanes)
        for phi, initially, then in ((d, first, after), (total, zeros, builder.fadd(total, builder.fmul(read, read)))):
            phi.add_incoming(initially, before)
            phi.add_incoming(then, body)
        builder.branch(loop)
        builder.position_at_end(done)
        sums: Any = total
        while sums.type.count > 1:  # the halves of the lanes, added
            half = sums.type.count // 2
            masks = [ir.Constant(ir.VectorType(ir.IntType(32), half), [i + k for i in range(half)]) for k in (0, half)]
            sums = builder.fadd(*(builder.shuffle_vector(sums, sums, mask) for mask in masks))
        return builder.extract_element(sums, ir.IntType(32)(0))

    return types.float64(width, values, types.int64, types.int64), generate


@compiled(forceinline=True)
def sum_of_squares(values: Any) -> float:
    """Return the sum of the squares of an array of float64, added in an order that depends on its size alone."""
    size = values.size
    sixteens = size - size % 16
    fours = size - size % 4
    total = _sum_squares(16, values, 0, sixteens) + _sum_squares(4, values, sixteens, fours)
    for d in range(fours, size):
        total += values[d] * values[d]
    return total


@intrinsic
def borrowed(typing_context: Any, array: Any) -> Any:
    """Return the array without reference counting; the caller must keep its owner alive."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = context.make_array(signature.return_type)(context, builder, value=arguments[0])
        for name in ("meminfo", "parent"):
            setattr(found, name, ir.Constant(getattr(found, name).type, None))
        return found._getvalue()

    return array(array), generate


@compiled()
def extent(row: Any) -> Any:
    """Return the smallest and the largest number of a row, and whether all numbers are finite, as they must be."""
    words = row.view(np.int32)
    lowest, highest = _MAGNITUDE, np.int32(-_MAGNITUDE - 1)
    for d in range(words.size):  # compare order-preserving integers, as comparisons of floats do not vectorise
        word = words[d]
        key = np.int32(word ^ ((word >> np.int32(31)) & _MAGNITUDE))
        lowest, highest = min(lowest, key), max(highest, key)
    low = reinterpret(np.int32(lowest ^ ((lowest >> np.int32(31)) & _MAGNITUDE)), np.float32(0))
    high = reinterpret(np.int32(highest ^ ((highest >> np.int32(31)) & _MAGNITUDE)), np.float32(0))
    return low, high, lowest > -_INFINITY - 1 and highest < _INFINITY


def threads_for(values: int) -> int:
    """Return the number of threads for a number of values: torch's setting, or 1 where one thread is faster."""
    return 1 if values < _SMALL else max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


class pool:  # used as a function; a generator as a context manager takes longer than the shortest kernels
    """Hold Numba's threads; torch's number of threads, which starting them changes, is restored."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        _lock.acquire()
        try:
            numba.set_num_threads(self._threads)
        except BaseException:
            _lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        _lock.release()
        if torch.get_num_threads() != self._before:
            torch.set_num_threads(self._before)


@compiled(parallel=True)
def _touch(values: Any) -> None:
    for i in numba.prange(values.size):
        values[i] += 1


@lru_cache(maxsize=1)
def started() -> threading.Lock:
    """Start Numba's threads, once, and return the lock that a kernel holds while it sets their number itself."""
    with pool(1):
        _touch(np.zeros(2, np.int64))
    return _lock


def array(tensor: Tensor) -> Any:
    """Return the tensor's memory as an array; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
