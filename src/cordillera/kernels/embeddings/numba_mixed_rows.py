"""Lookup of tables that each keep their rows in a format of their own, of 2 to 32 bits, for scoring.

Scales and numbers that are NaN or infinite give NaN or infinite results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from cordillera.kernels.compiling import compiled
from cordillera.kernels.embeddings.cached_rows import FORMATS
from cordillera.kernels.embeddings.lookup import Lookup
from cordillera.kernels.embeddings.numba_backend import LINE, SOON, factors, whole
from cordillera.kernels.embeddings.numba_rows import decode_row, read_half, read_single
from cordillera.kernels.numba_support import array, has_instructions, narrow, pool, prefetch, spread, threads_for, widen

_FP32, _FP16, _INT8, _INT4 = FORMATS["fp32"], FORMATS["fp16"], FORMATS["int8"], FORMATS["int4"]
_ALL_PLACED = np.iinfo(np.int64).max


class MixedRows(NamedTuple):
    """Location and format of each feature's rows.

    Attributes:
        payload: Memory of all tables, ``uint8 [bytes]``.
        kinds: Formats, ``int64 [F]``, values of :data:`cordillera.kernels.embeddings.cached_rows.FORMATS`.
        first_byte: Start of each feature's table, ``int64 [F]``.
        row_bytes: Bytes of a row, ``int64 [F]``.
    """

    payload: Tensor
    kinds: Tensor
    first_byte: Tensor
    row_bytes: Tensor
    num_rows: Tensor
    dim: int


def _adder(load: Callable[[Any, Any], Any]) -> Any:
    """Make a function that adds ``factor * (value * scale + bias)`` of eight values to eight float64.

    Args:
        load: Emits what makes eight float32 of the bytes at a pointer.
    """

    @intrinsic
    def add(typing_context: Any, at: Any, scale: Any, bias: Any, factor: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            at, scale, bias, factor, sums = arguments
            value = load(builder, builder.inttoptr(at, ir.IntType(8).as_pointer()))
            if load not in (_load_fp32, _load_fp16):
                value = builder.fadd(builder.fmul(value, spread(builder, scale, 8)), spread(builder, bias, 8))
            wide = builder.fmul(spread(builder, factor, 8), builder.fpext(value, _DOUBLES))
            place = builder.inttoptr(sums, _DOUBLES.as_pointer())
            builder.store(builder.fadd(builder.load(place, align=8), wide), place, align=8)
            return context.get_dummy_value()

        single, double, address = types.float32, types.float64, types.int64
        return types.none(address, single, single, double, address), generate

    return add


def _vector(kind: Any) -> Any:
    return ir.VectorType(kind, 8)


def _read(builder: Any, pointer: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1)


def _load_fp32(builder: Any, pointer: Any) -> Any:
    return _read(builder, pointer, _SINGLES)


def _load_fp16(builder: Any, pointer: Any) -> Any:
    return builder.fpext(_read(builder, pointer, _vector(ir.HalfType())), _SINGLES)


def _load_int8(builder: Any, pointer: Any) -> Any:
    return builder.uitofp(_read(builder, pointer, _BYTES), _SINGLES)


def _codes(bits: int) -> Callable[[Any, Any], Any]:
    """Return what reads eight codes of some bits, the lowest of a byte first."""
    word = ir.IntType(8 * bits)

    def load(builder: Any, pointer: Any) -> Any:
        copies = spread(builder, builder.zext(_read(builder, pointer, word), ir.IntType(32)), 8)
        shifts = ir.Constant(_WORDS, [bits * place for place in range(8)])
        codes = builder.and_(builder.lshr(copies, shifts), ir.Constant(_WORDS, [2**bits - 1] * 8))
        return builder.sitofp(codes, _SINGLES)

    return load


_SINGLES, _DOUBLES = _vector(ir.FloatType()), _vector(ir.DoubleType())
_WORDS, _BYTES = _vector(ir.IntType(32)), _vector(ir.IntType(8))
_add_fp32, _add_fp16, _add_int8 = _adder(_load_fp32), _adder(_load_fp16), _adder(_load_int8)
_add_int4, _add_int2 = _adder(_codes(4)), _adder(_codes(2))
_HAS_HALVES = has_instructions("f16c")  # otherwise LLVM would call a function that may not be there
_ONE, _NOTHING = np.float32(1), np.float32(0)


@intrinsic
def _load_half(typing_context: Any, at: Any) -> Any:
    """Return the float16 at an address as a float32, by the processor."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        return builder.fpext(_read(builder, pointer, ir.HalfType()), ir.FloatType())

    return types.float32(types.int64), generate


@compiled()
def _half_at(payload: Any, payload_at: int, at: int) -> Any:
    if _HAS_HALVES:
        return _load_half(payload_at + at)
    return read_half(payload, at)


@compiled()
def _add_row(kind: int, payload: Any, payload_at: int, at: int, factor: Any, sums: Any, sums_at: int) -> bool:
    """Add ``factor`` times the row at byte ``at`` to ``sums``, float64; return whether it can, eight at a time."""
    dim = sums.size
    begin = payload_at + at
    if dim % 8:
        return False
    if kind == _INT8:
        scale, bias = read_single(payload, at + dim), read_single(payload, at + dim + 4)
        for d in range(0, dim, 8):
            _add_int8(begin + d, scale, bias, factor, sums_at + 8 * d)
    elif kind == _INT4:
        scale, bias = _half_at(payload, payload_at, at + dim // 2), _half_at(payload, payload_at, at + dim // 2 + 2)
        for d in range(0, dim, 8):
            _add_int4(begin + d // 2, scale, bias, factor, sums_at + 8 * d)
    elif kind == _FP32:
        for d in range(0, dim, 8):
            _add_fp32(begin + 4 * d, _ONE, _NOTHING, factor, sums_at + 8 * d)
    elif kind == _FP16:
        if not _HAS_HALVES:
            return False
        for d in range(0, dim, 8):
            _add_fp16(begin + 2 * d, _ONE, _NOTHING, factor, sums_at + 8 * d)
    else:
        scale, bias = _half_at(payload, payload_at, at + dim // 4), _half_at(payload, payload_at, at + dim // 4 + 2)
        for d in range(0, dim, 8):
            _add_int2(begin + d // 4, scale, bias, factor, sums_at + 8 * d)
    return True


@compiled(parallel=True)
def _lookup(
    payload: Any, kinds: Any, first_byte: Any, row_bytes: Any, num_rows: Any, values: Any, offsets: Any, one_hot: bool,
    value_weights: Any, weighted: bool, output: Any, threads: int,
) -> int:  # fmt: skip
    batch, features, dim = output.shape
    misplaced = np.full(threads, _ALL_PLACED, np.int64)
    zero = output[0, 0, 0]
    payload_at = payload.ctypes.data
    for chunk in numba.prange(threads):
        sums, read = np.empty(dim, np.float64), np.empty(dim, np.float32)
        sums_at = sums.ctypes.data
        for f in range(features):
            kind, start, size, count = kinds[f], first_byte[f], row_bytes[f], num_rows[f]
            stop = (f + 1) * batch if one_hot else offsets[(f + 1) * batch]
            for b in range(batch * chunk // threads, batch * (chunk + 1) // threads):
                bag = f * batch + b
                first, last = bag, bag + 1
                if not one_hot:
                    first, last = offsets[bag], offsets[bag + 1]
                for d in range(dim):
                    sums[d] = -0.0 if last - first == 1 and not weighted else 0.0  # what is alone keeps its sign
                for p in range(first, last):
                    soon = values[min(p + SOON, stop - 1)]
                    if 0 <= soon < count:
                        for line in range(0, size, LINE):
                            prefetch(payload_at + start + soon * size + line)
                    value = values[p]
                    if value < 0 or value >= count:
                        misplaced[chunk] = min(misplaced[chunk], p)
                        continue
                    factor = widen(value_weights[p]) if weighted else 1.0
                    at = start + value * size
                    if not _add_row(kind, payload, payload_at, at, factor, sums, sums_at):
                        decode_row(kind, payload[at : at + size], read)
                        for d in range(dim):
                            sums[d] += factor * widen(read[d])
                for d in range(dim):
                    output[b, f, d] = narrow(sums[d], zero)
    return int(misplaced.min())


def lookup(
    rows: MixedRows, values: Tensor, offsets: Tensor | None, value_weights: Tensor | None, dtype: torch.dtype
) -> Lookup:
    """Look up and sum bags as ``lookup.embedding_bag``; the result's ``rows`` are the values."""
    features = rows.kinds.numel()
    bags = values.numel() if offsets is None else offsets.numel() - 1
    native = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
    output = torch.empty((bags // features, features, rows.dim), dtype=native)
    values = values.to(torch.int64).contiguous()
    if not values.numel():
        return Lookup(output.zero_().to(dtype), values, -1)
    threads = threads_for(values.numel())
    with pool(threads):
        misplaced = _lookup(
            rows.payload.numpy(), rows.kinds.numpy(), rows.first_byte.numpy(), rows.row_bytes.numpy(),
            rows.num_rows.numpy(), values.numpy(), whole(offsets), offsets is None,
            factors(value_weights, torch.float32), value_weights is not None, array(output), threads,
        )  # fmt: skip
    return Lookup(output.to(dtype), values, -1 if misplaced == _ALL_PLACED else misplaced)
