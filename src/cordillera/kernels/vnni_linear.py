"""A linear layer in eight bits as one call: quantise, multiply by VNNI instructions, requantise. For few rows.

Around a product torch's fused layers spend more than ten microseconds, and separate passes several. Here the whole of
FBGEMM's pipeline (Khudia et al. 2021) is one compiled function: codes are made in a buffer that stays in the nearest
cache, tiles of sums in registers, and each tile becomes outputs before the next one begins. One thread does it.

A register holds sixteen sums. ``vpdpbusd`` adds to each four products of uint8 with int8, without saturation. Weights
lie in the order in which they are read: blocks of sixteen outputs, in a block four inputs after another of each output.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from cordillera.kernels.compiling import compiled

_LANES = 16  # sums in a register
_BLOCKS = 4  # registers of weights that are read in turn
_WIDTH = _LANES * _BLOCKS  # outputs of a tile
_ROWS = 6  # of a tile: 24 of 32 registers hold sums
_INFINITY = 0x7F800000  # the bits of infinity; those of NaN are larger


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether this processor has the instructions; elsewhere nothing of this file may be compiled."""
    try:
        features = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:
        return False
    return bool(features.get("avx512vnni")) and torch.cpu._is_vnni_supported()


@intrinsic
def _fused_multiply_add(typing_context: Any, x: Any, factor: Any, term: Any) -> Any:
    """``x * factor + term``, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def _magnitude_bits(typing_context: Any, x: Any) -> Any:
    """The bits of the absolute value of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        return builder.and_(builder.bitcast(arguments[0], word), word(0x7FFFFFFF))

    return types.int32(types.float32), generate


def _tile(rows: int) -> Any:
    """``tile(codes, stride, weights, inner, sums)``: sums of ``rows`` x 64 products, all arguments but two addresses.

    ``codes`` is the address of the first row's codes, ``stride`` the bytes from row to row, ``weights`` the address of
    the first block, ``inner`` the groups of four inputs, ``sums`` the address of ``int32 [rows, 64]``.
    """

    @intrinsic
    def tile(typing_context: Any, codes: Any, stride: Any, weights: Any, inner: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            first, stride, weights, inner, sums = arguments
            word, wide = ir.IntType(32), ir.IntType(64)
            vector = ir.VectorType(word, _LANES)
            multiply = builder.module.declare_intrinsic(
                "llvm.x86.avx512.vpdpbusd.512", (), ir.FunctionType(vector, [vector, vector, vector])
            )
            bytes_of_block = builder.mul(inner, wide(64))
            before = builder.block
            loop, done = builder.append_basic_block("sum"), builder.append_basic_block("store")
            builder.cbranch(builder.icmp_signed(">", inner, wide(0)), loop, done)
            zero = ir.Constant(vector, [0] * _LANES)

            builder.position_at_end(loop)
            step = builder.phi(wide)
            step.add_incoming(wide(0), before)
            totals = [[builder.phi(vector) for _ in range(_BLOCKS)] for _ in range(rows)]
            blocks = []
            for block in range(_BLOCKS):
                offset = builder.add(builder.mul(bytes_of_block, wide(block)), builder.mul(step, wide(64)))
                pointer = builder.inttoptr(builder.add(weights, offset), vector.as_pointer())
                blocks.append(builder.load(pointer, align=1))
            added = []
            for row in range(rows):
                offset = builder.add(builder.mul(stride, wide(row)), builder.mul(step, wide(4)))
                four = builder.load(builder.inttoptr(builder.add(first, offset), word.as_pointer()), align=1)
                lane = builder.insert_element(ir.Constant(vector, ir.Undefined), four, word(0))
                spread = builder.shuffle_vector(lane, lane, ir.Constant(ir.VectorType(word, _LANES), [0] * _LANES))
                added.append([builder.call(multiply, [totals[row][b], spread, blocks[b]]) for b in range(_BLOCKS)])
            following = builder.add(step, wide(1))
            end = builder.block
            step.add_incoming(following, end)
            for row in range(rows):
                for block in range(_BLOCKS):
                    totals[row][block].add_incoming(zero, before)
                    totals[row][block].add_incoming(added[row][block], end)
            builder.cbranch(builder.icmp_signed("<", following, inner), loop, done)

            builder.position_at_end(done)
            for row in range(rows):
                for block in range(_BLOCKS):
                    total = builder.phi(vector)
                    total.add_incoming(zero, before)
                    total.add_incoming(added[row][block], end)
                    added[row][block] = total
            for row in range(rows):
                for block in range(_BLOCKS):
                    address = builder.add(sums, wide((row * _BLOCKS + block) * 64))
                    builder.store(added[row][block], builder.inttoptr(address, vector.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64, types.int64, types.int64, types.int64), generate

    return tile


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (_tile(rows) for rows in range(1, _ROWS + 1))


@compiled()
def _sums(rows: Any, codes: Any, stride: Any, weights: Any, inner: Any, sums: Any) -> None:
    if rows == 6:
        _tile_6(codes, stride, weights, inner, sums)
    elif rows == 5:
        _tile_5(codes, stride, weights, inner, sums)
    elif rows == 4:
        _tile_4(codes, stride, weights, inner, sums)
    elif rows == 3:
        _tile_3(codes, stride, weights, inner, sums)
    elif rows == 2:
        _tile_2(codes, stride, weights, inner, sums)
    else:
        _tile_1(codes, stride, weights, inner, sums)


@compiled()
def _quantized(x: Any, reciprocal: Any, zero_point: Any, codes: Any) -> Any:
    """Codes of rows, filled up with zeros; whether all is finite."""
    largest = np.int32(0)
    zero, most = np.float32(0.0), np.float32(255.0)
    inner = x.shape[1]
    for i in range(x.shape[0]):
        for k in range(inner):
            largest = max(largest, _magnitude_bits(x[i, k]))
            value = np.rint(_fused_multiply_add(x[i, k], reciprocal, zero_point))
            codes[i, k] = np.uint8(min(max(value, zero), most))
        for k in range(inner, codes.shape[1]):
            codes[i, k] = 0
    return largest < _INFINITY


@compiled()
def _row_of_values(sums: Any, offset: Any, unit: Any, bias: Any, lowest: Any, values: Any) -> None:
    for j in range(values.size):
        values[j] = max(_fused_multiply_add(np.float32(sums[j] - offset[j]), unit[j], bias[j]), lowest)


@compiled()
def _row_of_codes(
    sums: Any, offset: Any, shift: Any, multiplier: Any, zero_point: Any, lowest: Any, codes: Any
) -> None:
    most = np.float32(255.0)
    for j in range(codes.size):
        value = np.rint((np.float32(sums[j] - offset[j]) + shift[j]) * multiplier[j]) + zero_point
        codes[j] = np.uint8(min(max(value, lowest), most))


@compiled()
def _to_values(codes: Any, weights: Any, offset: Any, unit: Any, bias: Any, lowest: Any, values: Any) -> None:
    rows, outputs = values.shape
    groups = codes.shape[1] // 4
    tile = np.empty((_ROWS, _WIDTH), np.int32)
    for column in range(0, outputs, _WIDTH):
        end = min(column + _WIDTH, outputs)
        for row in range(0, rows, _ROWS):
            height = min(_ROWS, rows - row)
            _sums(height, codes[row:].ctypes.data, codes.shape[1], weights.ctypes.data + column * groups * 4, groups,
                  tile.ctypes.data)  # fmt: skip
            for i in range(height):
                _row_of_values(tile[i], offset[column:end], unit[column:end], bias[column:end], lowest,
                               values[row + i, column:end])  # fmt: skip


@compiled()
def _to_codes(
    codes: Any, weights: Any, offset: Any, shift: Any, multiplier: Any, zero_point: Any, lowest: Any, out: Any
) -> None:
    rows, outputs = out.shape[0], offset.shape[0]
    groups = codes.shape[1] // 4
    tile = np.empty((_ROWS, _WIDTH), np.int32)
    for column in range(0, outputs, _WIDTH):
        end = min(column + _WIDTH, outputs)
        for row in range(0, rows, _ROWS):
            height = min(_ROWS, rows - row)
            _sums(height, codes[row:].ctypes.data, codes.shape[1], weights.ctypes.data + column * groups * 4, groups,
                  tile.ctypes.data)  # fmt: skip
            for i in range(height):
                _row_of_codes(tile[i], offset[column:end], shift[column:end], multiplier[column:end], zero_point,
                              lowest, out[row + i, column:end])  # fmt: skip


@compiled()
def _linear(
    x: Any, reciprocal: Any, zero_point: Any, weights: Any, offset: Any, unit: Any, bias: Any, lowest: Any, values: Any
) -> Any:
    codes = np.empty((x.shape[0], (x.shape[1] + 3) // 4 * 4), np.uint8)
    if not _quantized(x, reciprocal, zero_point, codes):
        return False
    _to_values(codes, weights, offset, unit, bias, lowest, values)
    return True


@compiled()
def _choose(low: Any, high: Any) -> Any:
    """Scale and zero point of a range, as :func:`cordillera.numerics.quantizers.choose_affine` for uint8."""
    low, high = min(low, np.float32(0.0)), max(high, np.float32(0.0))
    scale = (np.float64(high) - np.float64(low)) / 255.0
    if np.isinf(np.float32(1.0) / np.float32(scale)):
        scale = np.float64(0.1)
    floor = np.float32(6.1e-5)
    if scale < np.float64(floor):
        amplifier = floor / np.float32(scale)
        if low == 0:
            high = floor * np.float32(255.0)
        elif high == 0:
            low = -floor * np.float32(255.0)
        else:
            low, high = low * amplifier, high * amplifier
        scale = np.float64(floor)
    steps_low, steps_high = np.float64(low) / scale, np.float64(high) / scale
    zero_point = -steps_low if -abs(steps_low) < 255.0 - abs(steps_high) else 255.0 - steps_high
    return np.float32(scale), np.float32(min(max(np.rint(zero_point), 0.0), 255.0))


@compiled()
def _ends(x: Any) -> Any:
    """The smallest and largest value, and the bits of the largest magnitude."""
    low, high, largest = x[0, 0], x[0, 0], np.int32(0)
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            value = x[i, k]
            largest = max(largest, _magnitude_bits(value))
            low = value if value < low else low
            high = value if value > high else high
    return low, high, largest


@compiled()
def _dynamic(x: Any, weights: Any, column_offset: Any, weight_scale: Any, bias: Any, lowest: Any, values: Any) -> Any:
    low, high, largest = _ends(x)
    if largest >= _INFINITY or np.isinf(high - low):
        return False
    scale, zero_point = _choose(low, high)
    offset, unit = np.empty_like(column_offset), np.empty_like(weight_scale)
    for j in range(unit.size):
        offset[j] = np.int32(zero_point) * column_offset[j]
        unit[j] = weight_scale[j] * scale
    return _linear(x, np.float32(1.0) / scale, zero_point, weights, offset, unit, bias, lowest, values)


def pack(codes: Tensor) -> Any:
    """Weights in the order in which the kernel reads them.

    Args:
        codes: ``int8 [N, K]``.

    Returns:
        ``int8 [ceil(N / 64) 4, ceil(K / 4), 16, 4]`` array, filled up with zeros.
    """
    outputs, inner = codes.shape
    groups, blocks = -(-inner // 4), -(-outputs // _WIDTH) * _BLOCKS
    padded = torch.zeros(blocks * _LANES, groups * 4, dtype=torch.int8)
    padded[:outputs, :inner] = codes
    return padded.view(blocks, _LANES, groups, 4).transpose(1, 2).contiguous().numpy()


def quantize(x: Tensor, reciprocal: float, zero_point: int) -> Any | None:
    """Codes ``clamp(round(x * reciprocal + zero_point))``, the sum rounded once to float32, then ties to even.

    Args:
        x: ``float32 [M, K]``, contiguous.
        reciprocal: Of the scale.
        zero_point: From 0 to 255.

    Returns:
        ``uint8 [M, ceil(K / 4) 4]`` array, filled up with zeros; None if ``x`` is not finite.
    """
    values = x.numpy()
    codes = np.empty((values.shape[0], (values.shape[1] + 3) // 4 * 4), np.uint8)
    return codes if _quantized(values, np.float32(reciprocal), np.float32(zero_point), codes) else None


def linear(
    x: Tensor, reciprocal: float, zero_point: int, weights: Any, offset: Any, unit: Any, bias: Any, *, relu: bool
) -> Tensor | None:
    """The whole layer, from values to values ``(sum - offset) * unit + bias``, each rounded once.

    Args:
        x: ``float32 [M, K]``, contiguous.
        reciprocal: Of the input's scale.
        zero_point: Of the input.
        weights: Of :func:`pack`.
        offset: ``int32 [N]`` array: the zero point times the weight's column offsets.
        unit: ``float32 [N]`` array: what a sum of one is worth.
        bias: ``float32 [N]`` array.
        relu: Whether nothing is below zero.

    Returns:
        ``float32 [M, N]``; None if ``x`` is not finite.
    """
    source = x.numpy()
    values = np.empty((source.shape[0], offset.shape[0]), np.float32)
    lowest = np.float32(0.0 if relu else -np.inf)
    finite = _linear(
        source, np.float32(reciprocal), np.float32(zero_point), weights, offset, unit, bias, lowest, values
    )
    return torch.from_numpy(values) if finite else None


def dynamic_linear(
    x: Tensor, weights: Any, column_offset: Any, weight_scale: Any, bias: Any, *, relu: bool
) -> Tensor | None:
    """The whole layer with scale and zero point of the batch's own smallest and largest value.

    Args:
        x: ``float32 [M, K]``, contiguous, not empty.
        weights: Of :func:`pack`.
        column_offset: ``int32 [N]`` array: sums of the weight's codes.
        weight_scale: ``float32 [N]`` array.
        bias: ``float32 [N]`` array.
        relu: Whether nothing is below zero.

    Returns:
        ``float32 [M, N]``; None if ``x`` is not finite or its range overflows float32.
    """
    source = x.numpy()
    values = np.empty((source.shape[0], bias.shape[0]), np.float32)
    lowest = np.float32(0.0 if relu else -np.inf)
    finite = _dynamic(source, weights, column_offset, weight_scale, bias, lowest, values)
    return torch.from_numpy(values) if finite else None


def to_codes(codes: Any, weights: Any, offset: Any, shift: Any, multiplier: Any, zero_point: int, *, relu: bool) -> Any:
    """From codes to codes ``clamp(round((sum - offset + shift) * multiplier) + zero_point)``, as within a chain.

    Args:
        codes: Of :func:`quantize` or of this function.
        weights: As in :func:`linear`.
        offset: As there.
        shift: ``float32 [N]`` array: the bias in units of a sum.
        multiplier: ``float32 [N]`` array: a unit of a sum in units of the output.
        zero_point: Of the output.
        relu: Whether nothing is below ``zero_point``.

    Returns:
        ``uint8 [M, ceil(N / 4) 4]`` array. What fills it up meets weights of zero: it may be anything.
    """
    out = np.empty((codes.shape[0], (offset.shape[0] + 3) // 4 * 4), np.uint8)
    lowest = np.float32(zero_point if relu else 0)
    _to_codes(codes, weights, offset, shift, multiplier, np.float32(zero_point), lowest, out)
    return out


def to_values(codes: Any, weights: Any, offset: Any, unit: Any, bias: Any, *, relu: bool) -> Tensor:
    """From codes to values, as at the end of a chain.

    Args:
        codes: As in :func:`to_codes`.
        weights: As in :func:`linear`, as all others.
        offset: As there.
        unit: As there.
        bias: As there.
        relu: Whether nothing is below zero.

    Returns:
        ``float32 [M, N]``.
    """
    values = np.empty((codes.shape[0], offset.shape[0]), np.float32)
    _to_values(codes, weights, offset, unit, bias, np.float32(0.0 if relu else -np.inf), values)
    return torch.from_numpy(values)
