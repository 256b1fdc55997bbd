"""8-bit linear layer in one call: quantise, multiply by VNNI instructions, requantise.

torch's fused layers spend more than ten microseconds around a product, and separate passes write all sums to memory.
Here FBGEMM's whole pipeline (Khudia et al. 2021) is one compiled function: the codes of a few rows stay in a buffer in
the nearest caches, tiles of sums in registers, and each tile becomes outputs before the next one begins. Threads divide
the rows, or the outputs where rows are few; sums are whole numbers, so results do not depend on the number of threads.

Arrays come as addresses, and those of a layer together: for layers of a few microseconds, passing ten arrays costs as
much as the work.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from cordillera.kernels.compiling import compiled
from cordillera.kernels.dense.vnni_tiles import ROWS, WIDTH, pack, sums_of_tile
from cordillera.kernels.numba_support import extent, started, threads_for

_INFINITY = 0x7F800000  # the bits of infinity; those of NaN are larger
_PANEL_BYTES = 1 << 17  # bytes of codes made at a time: with a block of weights they half fill the second-level cache
_PANEL_ROWS = 16 * ROWS
_PARALLEL_PRODUCTS = 1 << 21  # least number of products for which other threads are worth waking
_PARALLEL_VALUES = 1 << 17  # the same limit for the minimum and maximum, in values
_ROWS_TO_DIVIDE = 8 * ROWS  # least number of rows to divide among threads; fewer rows divide the outputs


@intrinsic
def _fused_multiply_add(typing_context: Any, x: Any, factor: Any, term: Any) -> Any:
    """``x * factor + term``, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def _magnitude_bits(typing_context: Any, x: Any) -> Any:
    """Bits of the absolute value of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        return builder.and_(builder.bitcast(arguments[0], word), word(0x7FFFFFFF))

    return types.int32(types.float32), generate


@intrinsic
def _pointer(typing_context: Any, address: Any, like: Any) -> Any:
    """Pointer to numbers of the type of ``like`` at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), generate


@compiled()
def _singles(address: Any, size: Any) -> Any:
    return numba.carray(_pointer(address, np.float32(0)), size)


@compiled()
def _words(address: Any, size: Any) -> Any:
    return numba.carray(_pointer(address, np.int32(0)), size)


@compiled()
def _bytes(address: Any, size: Any) -> Any:
    return numba.carray(_pointer(address, np.uint8(0)), size)


@compiled()
def _layer(address: Any) -> Any:
    """Inputs and outputs of a layer, and the addresses of its weights, offsets, factors and terms."""
    facts = numba.carray(_pointer(address, np.int64(0)), 6)
    return facts[0], facts[1], facts[2], facts[3], facts[4], facts[5]


@compiled()
def _quantize(x: Any, reciprocal: Any, zero_point: Any, codes: Any) -> Any:
    """Write the codes of a row, padded with zeros, and return the bits of its largest magnitude."""
    largest = np.int32(0)
    zero, most = np.float32(0.0), np.float32(255.0)
    for k in range(x.size):
        largest = max(largest, _magnitude_bits(x[k]))
        codes[k] = np.uint8(min(max(np.rint(_fused_multiply_add(x[k], reciprocal, zero_point)), zero), most))
    for k in range(x.size, codes.size):
        codes[k] = 0
    return largest


@compiled()
def _to_values(sums: Any, shift: Any, factor: Any, term: Any, lowest: Any, out: Any) -> None:
    for j in range(out.size):
        out[j] = max(_fused_multiply_add(np.float32(sums[j] - shift[j]), factor[j], term[j]), lowest)


@compiled()
def _to_codes(sums: Any, shift: Any, factor: Any, term: Any, lowest: Any, zero_point: Any, out: Any) -> None:
    most = np.float32(255.0)
    for j in range(out.size):
        value = np.rint((np.float32(sums[j] - shift[j]) + term[j]) * factor[j]) + zero_point
        out[j] = np.uint8(min(max(value, lowest), most))


@compiled()
def _part(
    layer: Any, x: Any, from_values: Any, begin: Any, end: Any, first: Any, last: Any,
    scale: Any, reciprocal: Any, zero_point: Any, out: Any, given: Any, lowest: Any,
) -> Any:  # fmt: skip
    """Compute rows ``begin`` to ``end`` and outputs ``first`` to ``last``; return whether all values read are finite.

    The outputs are codes with the zero point ``given``, or values if ``given`` is negative.
    """
    inner, outputs, weights, offset, factor, term = _layer(layer)
    single, inverse, zero = np.float32(scale), np.float32(reciprocal), np.float32(zero_point)
    least, new_zero = np.float32(lowest), np.float32(given)
    stride, to_codes = (inner + 3) // 4 * 4, given >= 0
    tile, shift = np.empty((ROWS, WIDTH), np.int32), np.empty(WIDTH, np.int32)
    scaled = np.empty(WIDTH, np.float32)
    panel = max(ROWS, min(_PANEL_ROWS, _PANEL_BYTES // stride // ROWS * ROWS))
    made = np.empty((min(panel, end - begin) if from_values else 0, stride), np.uint8)
    for top in range(begin, end, panel):
        height = min(panel, end - top)
        codes = x + top * stride
        if from_values:
            codes = made.ctypes.data
            for i in range(height):
                row = _singles(x + (top + i) * inner * 4, inner)
                if _quantize(row, inverse, zero, made[i]) >= _INFINITY:
                    return False
        for column in range(first, last, WIDTH):
            width = min(WIDTH, last - column)
            offsets, factors = _words(offset + 4 * column, width), _singles(factor + 4 * column, width)
            terms = _singles(term + 4 * column, width)
            for j in range(width):
                shift[j] = np.int32(zero) * offsets[j]
                scaled[j] = factors[j] * single
            for i in range(0, height, ROWS):
                rows = min(ROWS, height - i)
                sums_of_tile(rows, codes + i * stride, stride, weights + column * stride, stride // 4, tile.ctypes.data)
                for j in range(rows):
                    row = top + i + j
                    if to_codes:
                        to = _bytes(out + row * ((outputs + 3) // 4 * 4) + column, width)
                        _to_codes(tile[j], shift, scaled, terms, least, new_zero, to)
                    else:
                        to = _singles(out + (row * outputs + column) * 4, width)
                        _to_values(tile[j], shift, scaled, terms, least, to)
    return True


@compiled(parallel=True)
def _parts(
    threads: Any, layer: Any, x: Any, from_values: Any, rows: Any, scale: Any, reciprocal: Any, zero_point: Any,
    out: Any, given: Any, lowest: Any,
) -> Any:  # fmt: skip
    finite, outputs = np.empty(threads, np.uint8), _layer(layer)[1]
    by_rows = rows >= _ROWS_TO_DIVIDE
    whole = (rows + ROWS - 1) // ROWS if by_rows else (outputs + WIDTH - 1) // WIDTH
    for chunk in numba.prange(threads):
        start, stop = whole * chunk // threads, whole * (chunk + 1) // threads
        begin, end = (start * ROWS, min(stop * ROWS, rows)) if by_rows else (0, rows)
        first, last = (0, outputs) if by_rows else (start * WIDTH, min(stop * WIDTH, outputs))
        finite[chunk] = _part(
            layer, x, from_values, begin, end, first, last, scale, reciprocal, zero_point, out, given, lowest
        )
    fine = True
    for chunk in range(threads):
        fine &= finite[chunk] == 1
    return fine


@compiled()
def _choose(low: Any, high: Any) -> Any:
    """Scale and zero point of a range for uint8, as ``choose_affine`` in ``numerics/quantization/quantizers.py``."""
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
def _scale(low: Any, high: Any, is_finite: Any) -> Any:
    """Scale and zero point of a batch; a scale of zero if a value or the range is not finite."""
    if not is_finite or np.isinf(high - low):
        return np.float32(0.0), np.float32(0.0)
    return _choose(low, high)


@compiled()
def _range(x: Any, count: Any) -> Any:
    low, high, is_finite = extent(_singles(x, count))
    return _scale(low, high, is_finite)


@compiled(parallel=True)
def _parallel_range(threads: Any, x: Any, count: Any) -> Any:
    lows, highs = np.empty(threads, np.float32), np.empty(threads, np.float32)
    finite = np.empty(threads, np.uint8)
    for chunk in numba.prange(threads):
        start, stop = count * chunk // threads, count * (chunk + 1) // threads
        lows[chunk], highs[chunk], finite[chunk] = extent(_singles(x + 4 * start, stop - start))
    return _scale(lows.min(), highs.max(), finite.min() == 1)


class Layer:
    """Constants of a layer, in the order in which the kernel reads them.

    Args:
        codes: Codes of the weight, ``int8 [N, K]``, neither side zero.
        factor: ``float32 [N]``. From codes to values, the weight's scales; from codes to codes, the value of a sum of
            one in units of the output.
        term: ``float32 [N]``. To values, the bias; to codes, the bias in units of a sum.
        weights: Packed weights of another layer of the same codes, to share.
    """

    def __init__(self, codes: Tensor, factor: Tensor, term: Tensor, weights: Tensor | None = None) -> None:
        self.outputs, self.inner = codes.shape
        self.weights = pack(codes) if weights is None else weights
        self._kept = (
            self.weights, codes.sum(1, dtype=torch.int32), factor.float().contiguous(), term.float().contiguous()
        )  # fmt: skip
        self._read()

    def _read(self) -> None:
        # Looking up attributes and arrays is slow where the work takes microseconds.
        self._facts = np.array([self.inner, self.outputs, *(one.data_ptr() for one in self._kept)], np.int64)
        self._address = self._facts.ctypes.data
        self._products, self._padded = self.outputs * self.inner, (self.inner + 3) // 4 * 4

    def __getstate__(self) -> Any:
        return self.outputs, self.inner, self._kept

    def __setstate__(self, state: Any) -> None:  # a copy has addresses of its own
        self.outputs, self.inner, self._kept = state
        self.weights = self._kept[0]
        self._read()

    def _check(self, x: Tensor, columns: int) -> None:
        if x.shape[1] != columns or not (x.is_cpu and x.is_contiguous()):
            raise ValueError(f"{x.device} {list(x.shape)}, strides {x.stride()}, for {self.inner} inputs")

    def _run(
        self, x: Tensor, from_values: bool, scale: float, reciprocal: float, zero_point: int,
        out: Tensor, given: float, lowest: float,
    ) -> bool:  # fmt: skip
        self._check(x, self.inner if from_values else self._padded)
        rows = x.shape[0]
        products = rows * self._products
        threads = threads_for(products) if products >= _PARALLEL_PRODUCTS else 1
        if threads == 1:
            return bool(_part(
                self._address, x.data_ptr(), from_values, 0, rows, 0, self.outputs, scale, reciprocal, zero_point,
                out.data_ptr(), given, lowest,
            ))  # fmt: skip
        with started():
            numba.set_num_threads(threads)
            return bool(_parts(
                threads, self._address, x.data_ptr(), from_values, rows, scale, reciprocal, zero_point,
                out.data_ptr(), given, lowest,
            ))  # fmt: skip

    def values(self, x: Tensor, scale: float, reciprocal: float, zero_point: int, *, relu: bool) -> Tensor | None:
        """Compute the layer from values to values, ``(sum - zero point * column offset) * (factor * scale) + term``.

        Takes a contiguous ``float32 [M, K]`` and the float32 reciprocal of ``scale``; returns None if ``x`` is not
        finite.
        """
        out = torch.empty(x.shape[0], self.outputs)
        return out if self._run(x, True, scale, reciprocal, zero_point, out, -1.0, 0.0 if relu else -np.inf) else None

    def dynamic(self, x: Tensor, *, relu: bool) -> Tensor | None:
        """Compute :meth:`values` with scale and zero point of the range of ``x``, which must not be empty.

        Returns None if ``x`` is not finite or its range overflows float32.
        """
        self._check(x, self.inner)
        count = x.numel()
        if count < _PARALLEL_VALUES or (threads := threads_for(count)) == 1:
            scale, zero_point = _range(x.data_ptr(), count)
        else:
            with started():
                numba.set_num_threads(threads)
                scale, zero_point = _parallel_range(threads, x.data_ptr(), count)
        if not scale:
            return None
        return self.values(x, scale, float(np.float32(1.0) / np.float32(scale)), int(zero_point), relu=relu)

    def codes(self, x: Tensor, reciprocal: float, zero_point: int, given: int, *, relu: bool) -> Tensor | None:
        """Compute the layer to codes, ``clamp(round((sum - zero point * column offset + term) * factor) + given)``.

        Args:
            x: ``float32 [M, K]``, contiguous, or ``uint8 [M, ceil(K / 4) 4]`` of this method or :func:`quantize`.
            reciprocal: Reciprocal of the input's scale, in float32.
            given: Zero point of the output, at which outputs are clamped with ``relu``.

        Returns:
            ``uint8 [M, ceil(N / 4) 4]``, with undefined padding, which meets weights of zero; None if ``x`` is not
            finite.
        """
        out = torch.empty(x.shape[0], (self.outputs + 3) // 4 * 4, dtype=torch.uint8)
        lowest = float(given) if relu else 0.0
        fine = self._run(x, x.dtype == torch.float32, 1.0, reciprocal, zero_point, out, float(given), lowest)
        return out if fine else None

    def values_of_codes(self, codes: Tensor, scale: float, zero_point: int, *, relu: bool) -> Tensor:
        """Compute the layer from codes ``uint8 [M, ceil(K / 4) 4]`` to values ``float32 [M, N]``."""
        out = torch.empty(codes.shape[0], self.outputs)
        self._run(codes, False, scale, 1.0, zero_point, out, -1.0, 0.0 if relu else -np.inf)
        return out


@compiled()
def _quantize_rows(x: Any, rows: Any, inner: Any, reciprocal: Any, zero_point: Any, out: Any) -> Any:
    stride, finite = (inner + 3) // 4 * 4, True
    for i in range(rows):
        row = _singles(x + i * inner * 4, inner)
        finite &= _quantize(row, reciprocal, zero_point, _bytes(out + i * stride, stride)) < _INFINITY
    return finite


def quantize(x: Tensor, reciprocal: float, zero_point: int) -> Tensor | None:
    """Compute codes ``clamp(round(x * reciprocal + zero_point))``, the sum rounded once to float32, then ties to even.

    Converts contiguous ``float32 [M, K]`` to ``uint8 [M, ceil(K / 4) 4]``, padded with zeros; None if ``x`` is not
    finite.
    """
    rows, inner = x.shape
    out = torch.empty(rows, (inner + 3) // 4 * 4, dtype=torch.uint8)
    finite = _quantize_rows(x.data_ptr(), rows, inner, np.float32(reciprocal), np.float32(zero_point), out.data_ptr())
    return out if finite else None
