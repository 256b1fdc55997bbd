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
_SMALL = 4096  # values below which waking other threads costs more than it saves

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
    """Round a float32 or float64 to the type of ``like``, halves to even; uint16 stands for the bits of a bfloat16."""

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


@intrinsic
def borrowed(typing_context: Any, array: Any) -> Any:
    """The same array without its owner, which must outlive it: that it is in use is not counted, at each call."""

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
    for d in range(words.size):  # as integers in the order of the numbers: only these comparisons vectorise
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
