"""Number formats of few bits: the values that each can represent, and their codes.

The magnitude part of a code increases with its value. So the largest value, the codes of infinity and NaN and the
smallest numbers all follow from the widths, the bias and the use of the highest codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Format:
    """Binary floating-point format.

    Attributes:
        name: Name of the format, a key of :data:`FORMATS`.
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the fraction field.
        bias: Number that is subtracted from the exponent field to get the exponent.
        has_infinity: Whether the highest exponent is reserved for infinity and NaN, as in IEEE 754.
        has_nan: Whether some code is NaN.
        has_negative_zero: Whether zero of a signed format has two codes; otherwise the second one is NaN.
        is_scale: Whether the format is unsigned, without zero and subnormal numbers: powers of two that scale blocks
            (OCP MX 1.0).
        dtype: Torch's dtype of the format, or None.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_infinity: bool = False
    has_nan: bool = True
    has_negative_zero: bool = True
    is_scale: bool = False
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.exponent_bits + self.mantissa_bits + (0 if self.is_scale else 1)

    @property
    def sign_code(self) -> int:
        """Code with only the sign bit set; 0 if there is none."""
        return 0 if self.is_scale else 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def infinity_code(self) -> int | None:
        """Code of plus infinity, or None."""
        return (2**self.exponent_bits - 1) << self.mantissa_bits if self.has_infinity else None

    @property
    def nan_code(self) -> int | None:
        """Code of a quiet NaN, or None."""
        if not self.has_nan:
            return None
        if self.has_infinity:
            return ((2**self.exponent_bits - 1) << self.mantissa_bits) | (1 << (self.mantissa_bits - 1))
        return 2 ** (self.exponent_bits + self.mantissa_bits) - 1 if self.has_negative_zero else self.sign_code

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        if self.infinity_code is not None:
            return self.infinity_code - 1
        nan_at_the_end = self.has_nan and self.has_negative_zero
        return 2 ** (self.exponent_bits + self.mantissa_bits) - (2 if nan_at_the_end else 1)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return -self.bias if self.is_scale else 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest value."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        return self.value(self.max_code)

    @property
    def min_normal(self) -> float:
        """Smallest positive value of full precision."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value."""
        return self.min_normal if self.is_scale else 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def saturates(self) -> bool:
        """Whether values that are too large become the largest value by default, as there is no infinity."""
        return not self.has_infinity

    def value(self, code: int) -> float:
        """Return the number that a ``code`` of a finite, positive value, from 0 to ``max_code``, represents."""
        exponent, fraction = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        if exponent or self.is_scale:
            fraction |= 1 << self.mantissa_bits
        return fraction * 2.0 ** (max(exponent - self.bias, self.min_exponent) - self.mantissa_bits)


@dataclass(frozen=True)
class IntegerFormat:
    """Whole numbers of few ``bits``, in two's complement if signed; ``name`` is a key of :data:`INTEGERS`."""

    name: str
    bits: int
    signed: bool

    @property
    def lowest(self) -> int:
        """Smallest number."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def highest(self) -> int:
        """Largest number."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1


FORMATS: dict[str, Format] = {
    item.name: item
    for item in (
        Format("fp32", 8, 23, 127, has_infinity=True, dtype=torch.float32),
        Format("bf16", 8, 7, 127, has_infinity=True, dtype=torch.bfloat16),
        Format("fp16", 5, 10, 15, has_infinity=True, dtype=torch.float16),
        Format("e4m3fn", 4, 3, 7, dtype=torch.float8_e4m3fn),
        Format("e4m3fnuz", 4, 3, 8, has_negative_zero=False, dtype=torch.float8_e4m3fnuz),
        Format("e5m2", 5, 2, 15, has_infinity=True, dtype=torch.float8_e5m2),
        Format("e3m2", 3, 2, 3, has_nan=False),
        Format("e2m3", 2, 3, 1, has_nan=False),
        Format("e2m1", 2, 1, 1, has_nan=False),
        Format("e8m0", 8, 0, 127, is_scale=True, dtype=torch.float8_e8m0fnu),
    )
}
"""Floating-point formats by name: IEEE 754, bfloat16, OCP FP8 (and AMD's ``fnuz`` of it) and OCP MX 1.0."""

INTEGERS: dict[str, IntegerFormat] = {
    f"{prefix}{bits}": IntegerFormat(f"{prefix}{bits}", bits, signed)
    for bits in range(8, 1, -1)
    for prefix, signed in (("int", True), ("uint", False))
}
"""Integer formats by name, ``int8`` to ``uint2``."""
