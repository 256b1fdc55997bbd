"""Quantised tensors: choice of scales, encoding of values and decoding of codes.

The stored scale is the factor of decoding: ``value = (code - zero_point) * scale``. A scale applies to a whole tensor,
a row, a column, a group of consecutive elements of a row, or a block; all of these are blocks of some size.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.formats.formats import Format, IntegerFormat
from cordillera.numerics.formats.rounding import decode

SMALL_SCALE = 6.1e-5
"""Smallest scale that FBGEMM chooses: float16's smallest number of full precision."""
_DEFAULT_SCALE = 0.1  # FBGEMM's scale of a range that contains only zero
_LEAST_SCALE = 2.0**-126  # its reciprocal is finite


class Granularity(str, enum.Enum):
    """Part of a tensor that shares a scale."""

    tensor = "tensor"
    row = "row"
    column = "column"
    group = "group"
    block = "block"


class AffineParameters(NamedTuple):
    """Scales and zero points of codes: ``value = (code - zero_point) * scale``.

    Attributes:
        scale: Scales, ``float32``, positive and finite, with a finite reciprocal.
        zero_point: Zero points, ``int32`` codes of the same shape; None for zero.
    """

    scale: Tensor
    zero_point: Tensor | None


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes with their scales.

    Attributes:
        payload: Codes, one in a byte: ``int8`` or ``uint8`` of ``shape``; ``uint8`` for floating-point formats.
        scale: Scales, ``float32``, one for each block: ``[ceil(R / block rows), ceil(C / block columns)]``, where C is
            the last size and R the product of all others.
        zero_point: Zero points, ``int32`` of the scale's shape, or None for zero.
        shape: Shape of the values.
        block: Rows and columns of a block, which follow from ``granularity``.
    """

    payload: Tensor
    scale: Tensor
    zero_point: Tensor | None
    format: IntegerFormat | Format
    granularity: Granularity
    shape: torch.Size
    block: tuple[int, int]

    def dequantize(self) -> Tensor:
        """Return the values, ``float32`` of ``shape``."""
        codes = self.payload.float() if isinstance(self.format, IntegerFormat) else decode(self.payload, self.format)
        codes = _matrix(codes)
        if self.zero_point is not None:
            codes = codes - _expand(self.zero_point.float(), self.block, codes.shape)
        return (codes * _expand(self.scale, self.block, codes.shape)).view(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of codes, scales and zero points as stored, with one byte for each code."""
        parts = (self.payload, self.scale, self.zero_point)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def choose_affine(
    low: Tensor, high: Tensor, format: IntegerFormat, *, power_of_two: bool = False, where: str = "low, high"
) -> AffineParameters:
    """Return scale and zero point of ranges as FBGEMM's ``ChooseQuantizationParams`` does (Khudia et al. 2021).

    The range is widened to contain zero, which then has an exact code. Arithmetic is in float64. A range that contains
    only zero, or one whose scale has no finite reciprocal, gets the scale 0.1; a scale below 6.1e-5 is raised to that.

    Args:
        low: Smallest values, of any shape.
        high: Largest values, of the same shape.
        format: Format of the codes.
        power_of_two: Whether to round scales up to powers of two.
        where: Name for the error message.

    Raises:
        NumericsError: If a range is not finite, its ends are exchanged or its width overflows float32.
    """
    low, high = low.float(), high.float()
    width = high.clamp(min=0).double() - low.clamp(max=0).double()
    bad = ~((low <= high) & torch.isfinite(width.float()))
    if bool(bad.any()):
        index = tuple(int(i) for i in bad.nonzero()[0])
        raise NumericsError(
            f"no range{f' at {index}' if index else ''} that float32 has a width for: from {float(low[index]):g} to "
            f"{float(high[index]):g} ({int(bad.sum())} such of {bad.numel()})",
            where=where,
            remedy="look for values that should not be so large, or for ends that were exchanged",
        )
    lowest, highest = format.lowest, format.highest
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = width / (highest - lowest)
    scale = torch.where(torch.isinf(1.0 / scale.float()), _DEFAULT_SCALE, scale)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    floor = torch.tensor(SMALL_SCALE)  # rounded to float32, as in FBGEMM
    small = scale < floor.double()
    amplifier = floor / scale.float()
    full = floor * (highest - lowest)
    # The widened range is needed only for the zero point, so its ends keep their ratio.
    wide_low = torch.where(low == 0, low, torch.where(high == 0, -full, low * amplifier))
    wide_high = torch.where(low == 0, full, torch.where(high == 0, high, high * amplifier))
    low, high = torch.where(small, wide_low, low), torch.where(small, wide_high, high)
    scale = torch.where(small, floor.double(), scale)
    steps_low, steps_high = low.double() / scale, high.double() / scale
    from_low = abs(lowest) - steps_low.abs() < abs(highest) - steps_high.abs()
    zero_point = torch.where(from_low, lowest - steps_low, highest - steps_high)
    return AffineParameters(scale.float(), zero_point.round().clamp(lowest, highest).int())


def choose_symmetric(peak: Tensor, format: IntegerFormat, *, power_of_two: bool = False) -> AffineParameters:
    """Return scales with zero points of zero: the largest absolute value gets the largest code.

    Args:
        peak: Largest absolute values, of any shape.
        format: Signed format of the codes. The lowest code, which has no opposite, is not used.
        power_of_two: Whether to round scales up to powers of two.

    Raises:
        NumericsError: If the format is unsigned, or a value is negative or not finite.
    """
    if not format.signed:
        raise NumericsError(f"{format.name} has no negative codes", where="format", remedy="choose_affine")
    bad = ~(torch.isfinite(peak) & (peak >= 0))
    if bool(bad.any()):
        index = tuple(int(i) for i in bad.nonzero()[0])
        at = f" at {index}" if index else ""
        raise NumericsError(f"no range{at}: {float(peak[index]):g} is no largest absolute value", where="peak")
    scale = peak.float() / format.highest
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return AffineParameters(torch.where(peak == 0, _DEFAULT_SCALE, scale.clamp(min=_LEAST_SCALE)), None)


def check_parameters(scale: Tensor, zero_point: Tensor | None, format: IntegerFormat, *, where: str = "scale") -> None:
    """Check scales and zero points that a caller supplies, as torch accepts impossible ones silently.

    Args:
        scale: Scales; they and their reciprocals in float32 must be positive and finite.
        zero_point: Zero points, which must be codes of the format; None for zero.
        format: Format of the codes.
        where: Name for the error message.

    Raises:
        NumericsError: If a scale or a zero point is invalid.
    """
    single = scale.float()
    bad = ~(single > 0) | torch.isinf(single) | torch.isinf(1.0 / single)
    if bool(bad.any()):
        index = tuple(int(i) for i in bad.nonzero()[0])
        raise NumericsError(
            f"scale {float(scale[index])} at {index} is not positive and finite with a finite reciprocal", where=where
        )
    if zero_point is not None:
        outside = (zero_point < format.lowest) | (zero_point > format.highest)
        if zero_point.is_floating_point() or bool(outside.any()):
            raise NumericsError(f"zero points must be codes of {format.name}, not {zero_point.tolist()}", where=where)


def check_finite(x: Tensor, where: str) -> None:
    """Check that a floating-point tensor holds neither NaN nor infinity.

    Args:
        x: Floating-point tensor.
        where: Name of the tensor for the error message, which also gives the index of the first such element.

    Raises:
        NumericsError: If an element is NaN or infinite.
    """
    bad = ~torch.isfinite(x)
    if bool(bad.any()):
        index = tuple(int(i) for i in bad.nonzero()[0])
        message = f"element {index} is {float(x[index])} ({int(bad.sum())} such of {x.numel()})"
        raise NumericsError(
            message, where=where, remedy="repair the values that are not finite; no code stands for them"
        )


def encode_integers(x: Tensor, scale: Tensor, zero_point: Tensor | None, format: IntegerFormat) -> Tensor:
    """Return the codes of finite values as FBGEMM's ``Quantize`` does, clamped to the format.

    A value is multiplied by the float32 reciprocal of the scale. The zero point is added in the same operation, with
    one rounding to float32 (a fused multiply-add); the sum is then rounded to a whole number, ties to even.

    Args:
        x: Values, ``float32``.
        scale: Scales, ``float32``, which broadcast to ``x``.
        zero_point: Zero points, ``int32``, which broadcast to ``x``; None for zero.
        format: Format of the codes.

    Returns:
        Codes, ``int8`` or ``uint8`` in the shape of ``x``.
    """
    reciprocal = 1.0 / scale
    if zero_point is None:
        codes = x * reciprocal
    else:  # float64 holds the product exactly
        codes = (x.double() * reciprocal.double() + zero_point.double()).float()
    return codes.round_().clamp_(format.lowest, format.highest).to(torch.int8 if format.signed else torch.uint8)


def quantize(
    x: Tensor,
    format: IntegerFormat,
    granularity: Granularity = Granularity.tensor,
    *,
    symmetric: bool = False,
    power_of_two: bool = False,
    block: tuple[int, int] | int | None = None,
    parameters: AffineParameters | None = None,
    name: str = "x",
) -> QuantizedTensor:
    """Quantise a tensor by its smallest and largest values, or by given scales.

    Args:
        x: ``float32``, ``float16`` or ``bfloat16`` tensor of any strides. All sizes but the last form the rows.
        format: Format of the codes.
        granularity: Part of the tensor that shares a scale.
        symmetric: Whether the zero point is zero (:func:`choose_symmetric`); otherwise :func:`choose_affine` applies.
        power_of_two: Whether to round scales up to powers of two.
        block: Number of elements of a group, or rows and columns of a block; they need not divide the sizes of ``x``.
        parameters: Scales and zero points to use instead, ``[1]`` or as :class:`QuantizedTensor` holds them.
        name: Name of the tensor for error messages.

    Raises:
        NumericsError: If an element is NaN or infinite, the dtype is another one, or a scale is invalid.
    """
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        remedy = "cast float64 with .float() if its precision is not needed"
        raise NumericsError(f"expected float32, float16 or bfloat16, not {x.dtype}", where=name, remedy=remedy)
    check_finite(x, name)
    matrix = _matrix(x.detach().float())
    rows, columns = matrix.shape
    size = _block_size(Granularity(granularity), rows, columns, block)
    grid = (-(-rows // size[0]), -(-columns // size[1]))
    if parameters is None:
        low, high = _block_ends(matrix, size, grid)
        if symmetric:
            parameters = choose_symmetric(torch.maximum(-low, high), format, power_of_two=power_of_two)
        else:
            parameters = choose_affine(low, high, format, power_of_two=power_of_two, where=name)
    else:
        check_parameters(parameters.scale, parameters.zero_point, format)
        for part in parameters:
            if part is not None and part.shape not in (torch.Size([]), torch.Size([1]), torch.Size(grid)):
                raise NumericsError(f"{list(part.shape)} scales or zero points for {list(grid)} blocks", where=name)
        given = AffineParameters(*(None if part is None else part.broadcast_to(grid) for part in parameters))  # type: ignore[arg-type]
        parameters = AffineParameters(given.scale.float(), None if given.zero_point is None else given.zero_point.int())
    scale, zero_point = parameters
    codes = encode_integers(
        matrix,
        _expand(scale, size, matrix.shape),
        None if zero_point is None else _expand(zero_point, size, matrix.shape),
        format,
    )
    return QuantizedTensor(codes.view(x.shape), scale, zero_point, format, Granularity(granularity), x.shape, size)


def _matrix(x: Tensor) -> Tensor:
    """Return the tensor as a matrix, with all sizes but the last as rows."""
    if x.dim() == 0:
        return x.view(1, 1)
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _block_size(
    granularity: Granularity, rows: int, columns: int, block: tuple[int, int] | int | None
) -> tuple[int, int]:
    rows, columns = max(rows, 1), max(columns, 1)
    whole = {Granularity.tensor: (rows, columns), Granularity.row: (1, columns), Granularity.column: (rows, 1)}
    if granularity in whole:
        if block is not None:
            raise NumericsError(f"a {granularity.value} has no other size", where="block")
        return whole[granularity]
    size = (1, block) if isinstance(block, int) else block
    if size is None or min(size) < 1 or (granularity is Granularity.group) != isinstance(block, int):
        expected = "the elements of a group" if granularity is Granularity.group else "rows and columns of a block"
        raise NumericsError(f"{block} are not {expected}", where="block")
    return size


def _block_ends(x: Tensor, size: tuple[int, int], grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each block and zero."""
    if not x.numel():
        return x.new_zeros(grid), x.new_zeros(grid)
    # Ranges contain zero anyway, so the last blocks may be padded with zeros.
    short = (grid[0] * size[0] - x.shape[0], grid[1] * size[1] - x.shape[1])
    blocks = torch.nn.functional.pad(x, (0, short[1], 0, short[0])).view(grid[0], size[0], grid[1], size[1])
    return blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)


def _expand(values: Tensor, size: tuple[int, int], shape: torch.Size) -> Tensor:
    """Expand one value for each block to a tensor that broadcasts to a matrix."""
    for dim in (0, 1):
        if values.shape[dim] > 1 and size[dim] > 1:
            values = values.repeat_interleave(size[dim], dim).narrow(dim, 0, shape[dim])
    return values
