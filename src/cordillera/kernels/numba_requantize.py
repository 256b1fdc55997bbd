"""One pass from float32 to uint8 codes, and one from int32 sums to outputs: what stands before and after a product.

Torch's fused linear layers spend more than ten microseconds around a product, whatever its size. For few rows these two
passes and torch's plain integer product are the faster pipeline, with the same codes. One thread does them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from cordillera.kernels.compiling import compiled

_INFINITY = 0x7F800000  # the bits of infinity; those of NaN are larger


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


@compiled()
def _quantize(x: Any, reciprocal: Any, zero_point: Any, codes: Any) -> Any:
    largest = np.int32(0)
    zero, most = np.float32(0.0), np.float32(255.0)
    for i in range(x.size):
        largest = max(largest, _magnitude_bits(x[i]))
        value = np.rint(_fused_multiply_add(x[i], reciprocal, zero_point))
        codes[i] = np.uint8(min(max(value, zero), most))
    return largest < _INFINITY


@compiled()
def _requantize(sums: Any, offset: Any, shift: Any, multiplier: Any, zero_point: Any, lowest: Any, codes: Any) -> None:
    most = np.float32(255.0)
    for i in range(sums.shape[0]):
        for j in range(sums.shape[1]):
            value = np.float32(sums[i, j] - offset[j]) + shift[j]
            value = np.rint(value * multiplier[j]) + zero_point
            codes[i, j] = np.uint8(min(max(value, lowest), most))


@compiled()
def _dequantize(sums: Any, offset: Any, unit: Any, bias: Any, lowest: Any, values: Any) -> None:
    for i in range(sums.shape[0]):
        for j in range(sums.shape[1]):
            values[i, j] = max(np.float32(sums[i, j] - offset[j]) * unit[j] + bias[j], lowest)


def quantize_pass(x: Tensor, reciprocal: float, zero_point: int) -> tuple[Tensor, bool]:
    """Codes ``clamp(round(x * reciprocal + zero_point))``, the sum rounded once to float32, then ties to even.

    Args:
        x: ``float32 [M, K]``, contiguous.
        reciprocal: Of the scale, a float32.
        zero_point: From 0 to 255.

    Returns:
        ``uint8 [M, K]``, and whether all of ``x`` is finite; if not, codes mean nothing.
    """
    values = x.numpy()
    codes = np.empty(values.shape, np.uint8)  # a third of the time that torch takes for it
    finite = _quantize(values.reshape(-1), np.float32(reciprocal), np.float32(zero_point), codes.reshape(-1))
    return torch.from_numpy(codes), finite


def requantize_pass(sums: Tensor, offset: Any, shift: Any, multiplier: Any, zero_point: int, *, relu: bool) -> Tensor:
    """Codes ``clamp(round((sums - offset + shift) * multiplier) + zero_point)`` of sums of products.

    Args:
        sums: ``int32 [M, N]``.
        offset: ``int32 [N]`` array: the input's zero point times the weight's column offsets.
        shift: ``float32 [N]`` array: the bias in units of a sum.
        multiplier: ``float32 [N]`` array: a unit of a sum in units of the output.
        zero_point: Of the output.
        relu: Whether nothing is below ``zero_point``.

    Returns:
        ``uint8 [M, N]``.
    """
    array = sums.numpy()
    codes = np.empty(array.shape, np.uint8)
    lowest = np.float32(zero_point if relu else 0)
    _requantize(array, offset, shift, multiplier, np.float32(zero_point), lowest, codes)
    return torch.from_numpy(codes)


def dequantize_pass(sums: Tensor, offset: Any, unit: Any, bias: Any, *, relu: bool) -> Tensor:
    """Values ``(sums - offset) * unit + bias`` of sums of products.

    Args:
        sums: ``int32 [M, N]``.
        offset: As in :func:`requantize_pass`.
        unit: ``float32 [N]`` array: what a sum of one is worth.
        bias: ``float32 [N]`` array.
        relu: Whether nothing is below zero.

    Returns:
        ``float32 [M, N]``.
    """
    array = sums.numpy()
    values = np.empty(array.shape, np.float32)
    _dequantize(array, offset, unit, bias, np.float32(0.0 if relu else -np.inf), values)
    return torch.from_numpy(values)
