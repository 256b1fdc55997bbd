"""Bit-exact rounding to a format on any device, by integer arithmetic on the bits of float32 or float64.

Stochastic rounding takes its random bits from a counter. They are a function of a seed and of a number's position
(table, row, column, number of the update), so a result does not depend on threads, the order of a batch or shards.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.formats.cast_checks import cast_facts
from cordillera.numerics.formats.formats import FORMATS, Format


class Rounding(str, enum.Enum):
    """Rule that selects a neighbour for a number between two values of a format."""

    nearest_even = "nearest_even"
    """The nearer neighbour; of two equally near ones, the one with the even code. This is IEEE 754's default."""
    nearest_away = "nearest_away"
    """The nearer neighbour; of two equally near ones, the one farther from zero."""
    toward_zero = "toward_zero"
    """The neighbour nearer to zero: bits that do not fit are cut off."""
    stochastic = "stochastic"
    """A random neighbour, drawn with such probabilities that the expected value is the number itself."""


_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_LOW = (1 << 64) - 1


def random_bits(seed: int, *keys: Tensor | int) -> Tensor:
    """Return random bits that are a function of a seed and keys, by the mixer of SplitMix64 (Steele et al. 2014).

    All arithmetic is modulo 2**64. The state starts as ``mix(seed + gamma)`` and becomes ``mix((state ^ key) + gamma)``
    for each key; the bits are the upper half of the last state.

    Args:
        seed: Seed, any integer.
        keys: Integers, or int64 tensors that broadcast with each other.

    Returns:
        int64 tensor of numbers from 0 to 2**32 - 1, in the broadcast shape of the keys.
    """
    state: Tensor | int = _mix(seed + _GAMMA)
    for key in keys:
        if isinstance(state, int) and isinstance(key, int):
            state = _mix((state ^ (key & _LOW)) + _GAMMA)
        else:
            state = _mix_tensor(torch.bitwise_xor(_operand(state), _operand(key)) + _signed(_GAMMA))
    if isinstance(state, int):
        return torch.tensor(state >> 32, dtype=torch.int64)
    return (state >> 32) & 0xFFFFFFFF


def _operand(value: Tensor | int) -> Tensor:
    return torch.tensor(_signed(value & _LOW)) if isinstance(value, int) else value.to(torch.int64)


def _mix(state: int) -> int:
    state &= _LOW
    state = ((state ^ (state >> 30)) * _FIRST) & _LOW
    state = ((state ^ (state >> 27)) * _SECOND) & _LOW
    return state ^ (state >> 31)


def _mix_tensor(state: Tensor) -> Tensor:
    # Torch's shift of int64 repeats the sign bit, so the bits shifted in are masked. Later steps are in place.
    state = state ^ ((state >> 30) & ((1 << 34) - 1))
    state *= _signed(_FIRST)
    state ^= (state >> 27) & ((1 << 37) - 1)
    state *= _signed(_SECOND)
    state ^= (state >> 31) & ((1 << 33) - 1)
    return state


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@dataclass(frozen=True)
class _Source:
    """Format of the input of a rounding, and the integers as which its bits are read."""

    format: Format
    integer: torch.dtype
    sign: int
    infinity: int

    @property
    def mantissa_bits(self) -> int:
        return self.format.mantissa_bits

    @property
    def quiet(self) -> int:
        return self.infinity + (1 << (self.mantissa_bits - 1))

    def bits_of(self, value: float) -> int:
        """Return the bits of a positive number that is exact in this format, including subnormal numbers."""
        return int(torch.tensor(value, dtype=self.format.dtype).view(self.integer))


_SINGLE = _Source(FORMATS["fp32"], torch.int32, -(1 << 31), 0x7F800000)
_DOUBLE = _Source(
    Format("fp64", 11, 52, 1023, has_infinity=True, dtype=torch.float64), torch.int64, -(1 << 63), 0x7FF << 52
)
_SOURCES = {torch.float32: _SINGLE, torch.float64: _DOUBLE}


@torch.no_grad()
def round_to(
    x: Tensor,
    format: Format,
    rounding: Rounding = Rounding.nearest_even,
    *,
    saturate: bool | None = None,
    flush_subnormals: bool = False,
    random: Tensor | None = None,
) -> Tensor:
    """Round every element once to a value of a format.

    NaN stays NaN. Infinity stays infinity if the format has it and becomes NaN otherwise; it never becomes a finite
    number, with or without saturation (torch 2.12 and newer convert it to 448). With ``e8m0``, which holds positive
    numbers only, zero and negative numbers become NaN, and numbers below its smallest value become that value.

    Args:
        x: float32 or float64 tensor of any shape and strides.
        format: Target format.
        rounding: Rule that selects a neighbour.
        saturate: Whether finite numbers that are too large become the largest value, with their sign. Otherwise they
            become infinity, or NaN if the format has none; rounding toward zero always saturates. None to saturate if
            the format has no infinity.
        flush_subnormals: Whether results below the smallest normal value become zero, with their sign, as on processors
            that do not compute with subnormal numbers (VDPBF16PS).
        random: Random bits for stochastic rounding: int64 of ``x``'s shape with 32 random bits each
            (:func:`random_bits`). Let ``d`` be the distance of an element from its neighbour toward zero, in units of
            2**-32 of the distance between neighbours, rounded down. The element is rounded away from zero if ``d +
            random >= 2**32``.

    Returns:
        New tensor of ``x``'s dtype and shape.

    Raises:
        NumericsError: If the dtype is another one, or random bits are missing or have another shape.
    """
    source = _source(x)
    rounding = Rounding(rounding)
    if rounding is Rounding.stochastic and (random is None or random.shape != x.shape):
        found = "none" if random is None else f"bits of shape {tuple(random.shape)}"
        raise NumericsError(
            f"stochastic rounding of {tuple(x.shape)} needs random bits of that shape, got {found}",
            where="random",
            remedy="make them by random_bits(seed, ...), with keys that broadcast to the shape",
        )
    saturate = format.saturates if saturate is None else saturate
    if format.dtype == x.dtype:
        return torch.where(x.abs() < format.min_normal, x * 0, x) if flush_subnormals else x.clone()
    if not saturate and not flush_subnormals and rounding is Rounding.nearest_even and _is_native(x, format):
        return x.to(format.dtype).to(x.dtype)
    if format.is_scale and source is _SINGLE:  # the smallest value of e8m0 is subnormal in float32
        return round_to(x.double(), format, rounding, saturate=saturate, random=random).float()
    bits = x.contiguous().view(source.integer)
    drop = _constant_drop(source, format)
    if rounding is Rounding.toward_zero and drop is not None and not flush_subnormals:
        cut = (bits >> drop) << drop  # preserves infinity
        return cut.bitwise_or_(x.isnan().to(source.integer).mul_(source.quiet)).view(x.dtype)
    magnitude = bits & ~source.sign
    rounded = _round_magnitude(magnitude, source, format, rounding, random)
    rounded = _limit(rounded, magnitude, source, format, saturate or rounding is Rounding.toward_zero)
    if flush_subnormals:
        rounded = rounded.masked_fill_(rounded < source.bits_of(format.min_normal), 0)
    if format.is_scale:
        rounded.clamp_(min=source.bits_of(format.min_normal))
        return rounded.masked_fill_(bits <= 0, source.quiet).view(x.dtype)
    sign = bits & source.sign
    if not format.has_negative_zero:
        sign.masked_fill_(rounded == 0, 0)
    return (rounded | sign).view(x.dtype)


def _source(x: Tensor) -> _Source:
    if x.dtype not in _SOURCES:
        raise NumericsError(
            f"rounding starts from float32 or float64, got {x.dtype}", where="x", remedy="convert it: x.float()"
        )
    return _SOURCES[x.dtype]


def _is_native(x: Tensor, format: Format) -> bool:
    """Whether torch's own cast rounds identically; only from float32, as torch casts float64 through float32."""
    if x.dtype != torch.float32 or format.name not in ("bf16", "fp16"):
        return False
    facts = cast_facts(x.device.type)
    return facts.bf16_exact if format.name == "bf16" else facts.fp16_exact


def _round_magnitude(
    magnitude: Tensor, source: _Source, format: Format, rounding: Rounding, random: Tensor | None
) -> Tensor:
    """Return the bits of the rounded absolute value, on a grid without a largest value; NaN is handled elsewhere.

    A number is ``significand * 2**(exponent - mantissa_bits)``. ``drop`` bits do not fit, and more below the smallest
    normal value of the format, where the distance between neighbours is constant.
    """
    drop = _constant_drop(source, format)
    if drop is not None:
        kept = (magnitude + _increment(magnitude, drop, rounding, random)) >> drop
        return (kept << drop).to(magnitude.dtype)
    width = source.mantissa_bits
    first = format.min_exponent + source.format.bias  # exponent field of the smallest normal value
    field = (magnitude >> width).clamp_(min=1)
    dropped = (first - field).clamp_(min=0).add_(width - format.mantissa_bits)
    below = (field - 1) << width
    significand = magnitude - below  # including the leading one
    if rounding is Rounding.stochastic:
        # Random bits have 32 places, so lower places are cut off first.
        excess = (dropped - 32).clamp_(min=0, max=63)
        shortened = significand.to(torch.int64) >> excess
        places = dropped.clamp(max=32)
        kept = ((shortened + _increment(shortened, places, rounding, random)) >> places).to(magnitude.dtype)
    else:
        # Below half of the smallest value, nearest and toward zero agree, so further places need not be distinguished.
        places = dropped.clamp(max=width + 2)
        kept = (significand + _increment(significand, places, rounding, random)) >> places
    result = below + (kept << dropped.clamp(max=width + 1))
    if rounding is Rounding.stochastic:
        tiny = (dropped > width + 1) & (kept > 0)
        result.masked_fill_(tiny, source.bits_of(2.0 ** (format.min_exponent - format.mantissa_bits)))
    return result.masked_fill_(kept == 0, 0)


def _constant_drop(source: _Source, format: Format) -> int | None:
    """Return the number of bits that do not fit if it is the same for all numbers, else None.

    It is the same if the format's exponent range reaches as low as the source's.
    """
    return source.mantissa_bits - format.mantissa_bits if format.min_exponent <= source.format.min_exponent else None


def _increment(significand: Tensor, places: Tensor | int, rounding: Rounding, random: Tensor | None) -> Tensor | int:
    """Return the increment that is added before ``places`` bits are cut off."""
    if rounding is Rounding.toward_zero:
        return 0
    if rounding is Rounding.stochastic:
        assert random is not None
        return random >> (32 - places)
    half = 1 << (places - 1) if isinstance(places, int) else torch.ones_like(places) << (places - 1)
    if rounding is Rounding.nearest_away:
        return half
    return ((significand >> places) & 1).add_(half - 1)


def _limit(rounded: Tensor, magnitude: Tensor, source: _Source, format: Format, saturate: bool) -> Tensor:
    """Replace numbers above the largest value, infinity and NaN."""
    infinity = source.infinity if format.has_infinity else source.quiet
    largest = source.bits_of(format.max)
    rounded = rounded.masked_fill_((rounded > largest) | (rounded < 0), largest if saturate else infinity)
    rounded.masked_fill_(magnitude == source.infinity, infinity)
    return rounded.masked_fill_(magnitude > source.infinity, source.quiet)


@torch.no_grad()
def encode(
    x: Tensor,
    format: Format,
    rounding: Rounding = Rounding.nearest_even,
    *,
    saturate: bool | None = None,
    flush_subnormals: bool = False,
    random: Tensor | None = None,
) -> Tensor:
    """Return the codes of a tensor's elements in a format.

    The arguments ``x``, ``format``, ``rounding``, ``saturate``, ``flush_subnormals`` and ``random`` are those of
    :func:`round_to`.

    Returns:
        Codes in ``x``'s shape: uint8 for formats of up to eight bits, int16 for sixteen, int32 for ``fp32``. NaN gets
        the code of a quiet NaN, with its sign if the format has NaN of both signs.

    Raises:
        NumericsError: If an element would be NaN and the format has none, or for the errors of :func:`round_to`.
    """
    rounded = round_to(
        x, format, rounding, saturate=saturate, flush_subnormals=flush_subnormals, random=random
    ).double()
    bits = rounded.view(torch.int64)
    width = _DOUBLE.mantissa_bits
    magnitude = bits & ~_DOUBLE.sign
    field = (magnitude >> width) - _DOUBLE.format.bias - format.min_exponent
    below = field.clamp(min=0)
    lost = (width - format.mantissa_bits + (-field).clamp(min=0)).clamp(max=62)
    significand = (magnitude & ((1 << width) - 1)) | (1 << width)
    codes = (below << format.mantissa_bits) + (significand >> lost)
    if format.is_scale:
        codes -= 1  # without subnormals, the first code is the smallest normal value
    codes.masked_fill_(magnitude == 0, 0)
    nan = rounded.isnan()
    if format.infinity_code is not None:
        codes.masked_fill_(rounded.isinf(), format.infinity_code)
    if format.nan_code is not None:
        codes.masked_fill_(nan, format.nan_code)
    elif bool(nan.any()):
        where = tuple(int(i) for i in nan.nonzero()[0])
        raise NumericsError(
            f"{format.name} has no code for {float(x[where])}, element {where} of {tuple(x.shape)}",
            where="x",
            remedy="find out where it comes from, or count and replace such elements before",
        )
    codes |= torch.where(bits < 0, format.sign_code, 0)
    return codes.to(torch.uint8 if format.bits <= 8 else torch.int16 if format.bits <= 16 else torch.int32)


@torch.no_grad()
def decode(codes: Tensor, format: Format) -> Tensor:
    """Return the values of codes.

    Args:
        codes: Integers of any dtype with the code in their lowest bits; higher bits are ignored.
        format: Format of the codes.

    Returns:
        float32 tensor of the same shape, exact.
    """
    if format.bits > 16:
        return codes.to(torch.int32).view(torch.float32)
    index = codes.to(torch.int32) & ((1 << format.bits) - 1)
    return torch.take(_values(format, codes.device), index.to(torch.int64))


@lru_cache(maxsize=64)
def _values(format: Format, device: torch.device) -> Tensor:
    """Return the value of every code of a format of up to sixteen bits."""
    codes = torch.arange(1 << format.bits, dtype=torch.int64)
    magnitude = codes & ~format.sign_code
    field = magnitude >> format.mantissa_bits
    fraction = magnitude & ((1 << format.mantissa_bits) - 1)
    implicit = torch.ones_like(field) if format.is_scale else (field > 0).to(torch.int64)
    significand = fraction + (implicit << format.mantissa_bits)
    exponent = (field - format.bias).clamp(min=format.min_exponent) - format.mantissa_bits
    power = ((exponent + _DOUBLE.format.bias) << _DOUBLE.mantissa_bits).view(torch.float64)
    values = significand.double() * power
    values[magnitude > format.max_code] = torch.nan
    if format.infinity_code is not None:
        values[magnitude == format.infinity_code] = torch.inf
    if format.sign_code:
        values = torch.where(codes >= format.sign_code, -values, values)
        if not format.has_negative_zero:
            values[format.sign_code] = torch.nan
    return values.float().to(device)
