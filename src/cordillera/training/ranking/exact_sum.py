"""A sum of floating-point numbers that does not depend on their order.

Streaming metrics are sums. Adding the float64 sums of shards gives a result that depends on the shards. Here the
running sum is one integer, a multiple of the smallest step of float64, so cutting, ordering and merging change no bit.
Rounding happens once, when the value is read.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_UNIT_EXPONENT = 1126  # frexp of the smallest subnormal is 0.5 * 2**-1073; its 53-bit integer mantissa weighs 2**-1126
_LOW_BITS = 26
_CHUNK = 1 << 25  # keeps partial sums of 27-bit integers below 2**53, where float64 is exact


def _quotient(dividend: int, divisor: int) -> float:
    """Return the correctly rounded quotient; infinity beyond the largest float."""
    try:
        return dividend / divisor
    except OverflowError:
        return math.inf if (dividend > 0) == (divisor > 0) else -math.inf


class ExactSum:
    """Exact sum of float64 numbers: ``units``, an integer number of ``2**-1126``, and counts of infinite terms."""

    def __init__(self) -> None:
        self.units = 0
        self.positive_infinities = 0
        self.negative_infinities = 0

    def add(self, values: NDArray[np.float64]) -> None:
        """Add every element of ``values`` (any shape).

        Raises:
            ValueError: If an element is NaN.
        """
        values = np.asarray(values, dtype=np.float64).ravel()
        for start in range(0, values.size, _CHUNK):
            self._add_chunk(values[start : start + _CHUNK])

    def _add_chunk(self, values: NDArray[np.float64]) -> None:
        finite = np.isfinite(values)
        if not finite.all():
            if np.isnan(values).any():
                raise ValueError("cannot add NaN to a sum")
            self.positive_infinities += int((values == np.inf).sum())
            self.negative_infinities += int((values == -np.inf).sum())
            values = values[finite]
        if not values.size:
            return
        mantissa, exponent = np.frexp(values)
        whole = np.ldexp(mantissa, 53).astype(np.int64)
        first = int(exponent.min())
        place = exponent - first
        high = np.bincount(place, weights=(whole >> _LOW_BITS).astype(np.float64))
        low = np.bincount(place, weights=(whole & ((1 << _LOW_BITS) - 1)).astype(np.float64))
        base = first - 53 + _UNIT_EXPONENT
        for shift in np.flatnonzero((high != 0) | (low != 0)).tolist():
            self.units += ((int(high[shift]) << _LOW_BITS) + int(low[shift])) << (base + shift)

    def merge(self, other: ExactSum) -> None:
        """Add another sum to this one."""
        self.units += other.units
        self.positive_infinities += other.positive_infinities
        self.negative_infinities += other.negative_infinities

    def value(self) -> float:
        """Return the sum, correctly rounded to float64: ``inf`` or ``-inf`` with such terms, NaN with both."""
        if self.positive_infinities and self.negative_infinities:
            return math.nan
        if self.positive_infinities or self.negative_infinities:
            return math.inf if self.positive_infinities else -math.inf
        return _quotient(self.units, 1 << _UNIT_EXPONENT)

    def ratio(self, other: ExactSum) -> float:
        """Return this sum divided by another, correctly rounded if both are finite; NaN if the other is zero."""
        if self.positive_infinities or self.negative_infinities or other.positive_infinities:
            return math.nan if other.positive_infinities else self.value()
        return _quotient(self.units, other.units) if other.units else math.nan

    def state(self) -> str:
        """Return the sum as text, for :meth:`from_state`."""
        return f"{self.units:x},{self.positive_infinities},{self.negative_infinities}"

    @classmethod
    def from_state(cls, state: str) -> ExactSum:
        """Restore a sum from :meth:`state`."""
        result = cls()
        units, positive, negative = state.split(",")
        result.units = int(units, 16)
        result.positive_infinities, result.negative_infinities = int(positive), int(negative)
        return result
