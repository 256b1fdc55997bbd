"""The error-bounded quantiser: multiples of twice the bound, and the elements that they cannot represent.

The code of ``x`` is ``round(x / 2e)`` and stands for ``2e * code``, computed in float64 and rounded once to float32
(Feng et al. 2024, "Accelerating communication in deep learning recommendation model training with dual-level adaptive
lossy compression", arXiv 2407.04272). There is no prediction from neighbours: neighbouring rows are unrelated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import extent

_MOST_LEVELS = 1 << 16
SLACK = 2.0**-20
"""Share of the bound by which float rounding may exceed it, besides the last place of the element."""

_LEAST_BOUND, _MOST_BOUND = 2.0**-100, 2.0**120
_BLOCK = 2048
_HALF_PLACE = 2.0**-24  # half a unit in the last place of float32, relative to the number
_INFINITE = np.uint32(0x7F800000)


class Codes(NamedTuple):
    """Quantised elements.

    Attributes:
        values: Codes less ``lowest``, ``uint8`` or ``uint16``, of the shape of the elements.
        lowest: Code of the smallest element.
        outliers: Ascending positions of the elements that the codes do not represent, ``int64``.
        bound: Absolute bound, a float32.
    """

    values: Any
    lowest: int
    outliers: Any
    bound: float


@compiled()
def _finite_range(values: Any) -> Any:
    """Return the smallest and the largest finite number of ``float32 [n]``; zeros if none is finite."""
    low, high, finite = extent(values)
    if finite:
        return low, high
    low, high = np.float32(np.inf), np.float32(-np.inf)
    for value in values:
        if abs(value) < np.inf:
            low, high = min(low, value), max(high, value)
    return (low, high) if low <= high else (np.float32(0), np.float32(0))


@compiled()
def _quantize_block(values: Any, words: Any, step: float, most_error: float, lowest: int, codes: Any) -> bool:
    """Write the codes of a block; return whether they represent all of its elements."""
    inverse, bad = 1.0 / step, 0
    for i in range(values.size):
        # Zero is plain; a negative zero, a number below the smallest normal one, infinity and NaN are not.
        exponent = words[i] & _INFINITE
        plain = (words[i] == 0) | ((exponent != 0) & (exponent != _INFINITE))
        value = np.float64(values[i]) if plain else lowest * step
        code = np.rint(value * inverse)
        error = abs(np.float64(np.float32(code * step)) - value)
        bad += 1 if (not plain) | (error > most_error + abs(value) * _HALF_PLACE) else 0
        codes[i] = np.int32(code) - lowest
    return bad == 0


@compiled()
def _outliers_of(values: Any, words: Any, step: float, most_error: float, lowest: int, codes: Any) -> Any:
    """Return the positions in a block that its codes do not represent."""
    found, count = np.empty(values.size, np.int64), 0
    for i in range(values.size):
        exponent = words[i] & _INFINITE
        plain = (words[i] == 0) | ((exponent != 0) & (exponent != _INFINITE))
        value = np.float64(values[i])
        decoded = np.float64(np.float32((np.int64(codes[i]) + lowest) * step))
        if not plain or not abs(decoded - value) <= most_error + abs(value) * _HALF_PLACE:
            found[count] = i
            count += 1
    return found[:count].copy()


@compiled()
def _quantize(values: Any, words: Any, step: float, most_error: float, lowest: int, codes: Any) -> Any:
    """Write the codes of all blocks; return the positions that they do not represent."""
    outliers, count = np.empty(0, np.int64), 0
    for begin in range(0, values.size, _BLOCK):
        part = slice(begin, min(begin + _BLOCK, values.size))
        if not _quantize_block(values[part], words[part], step, most_error, lowest, codes[part]):
            found = _outliers_of(values[part], words[part], step, most_error, lowest, codes[part])
            if count + found.size > outliers.size:
                grown = np.empty(2 * outliers.size + found.size, np.int64)
                grown[:count] = outliers[:count]
                outliers = grown
            outliers[count : count + found.size] = found + begin
            count += found.size
    return outliers[:count].copy()


@compiled()
def _dequantize(codes: Any, step: float, lowest: int, values: Any) -> None:
    for i in range(codes.size):
        values[i] = np.float32(np.float64(np.int32(codes[i]) + lowest) * step)


def _rounded_down(bound: float) -> float:
    """Return the largest float32 that is not above a bound."""
    single = np.float32(min(bound, _MOST_BOUND))
    return float(single if float(single) <= bound else np.nextafter(single, np.float32(0)))


def quantize(values: Any, bound: float, *, relative: bool) -> Codes | None:
    """Quantise numbers within an absolute error.

    Args:
        values: Numbers, ``float32 [N, D]``, contiguous, at least one.
        bound: Largest error, absolute or as a share of the range of the finite numbers.
        relative: Whether the bound is a share of the range.

    Returns:
        Codes; None if the bound is too small or too large for float32, or the numbers need more than 65,536 codes. All
        elements that are not outliers are within ``bound * (1 + 2 ** -20)`` and half a unit in the last place. Outliers
        are NaN, infinities, negative zeros, numbers below the smallest normal float32, and what rounding moves further.
    """
    flat = values.reshape(-1)
    low, high = (float(end) for end in _finite_range(flat))
    bound = _rounded_down(bound * (high - low) if relative else bound)
    if not _LEAST_BOUND <= bound < _MOST_BOUND:
        return None
    step = 2.0 * bound
    first, last = np.rint(low * (1.0 / step)), np.rint(high * (1.0 / step))
    if last - first >= _MOST_LEVELS or max(abs(first), abs(last)) >= 2**30:
        return None
    codes = np.empty(flat.size, np.uint8 if last - first < 256 else np.uint16)
    outliers = _quantize(flat, flat.view(np.uint32), step, bound * (1.0 + SLACK), int(first), codes)
    return Codes(codes.reshape(values.shape), int(first), outliers, bound)


def dequantize(codes: Any, lowest: int, bound: float) -> Any:
    """Return the numbers ``float32 [N, D]`` of codes less ``lowest``, ``uint8`` or ``uint16`` ``[N, D]``."""
    values = np.empty(codes.shape, np.float32)
    _dequantize(codes.reshape(-1), 2.0 * bound, lowest, values.reshape(-1))
    return values
