"""Tensors of few bits with their scales: how a scale is chosen, how values become codes and codes values again.

The scale that is stored is the one to multiply by: ``value = (code - zero_point) * scale``. Scales stand for a whole
tensor, a row, a column, a group of consecutive elements of a row, or a block; all are blocks of some size.
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
"""Scales that FBGEMM chooses are not smaller: float16's smallest number of full precision."""
_DEFAULT_SCALE = 0.1  # FBGEMM's, of a range of nothing but zero
_LEAST_SCALE = 2.0**-126  # its reciprocal is finite


class Granularity(str, enum.Enum):
    """What shares a scale."""

    tensor = "tensor"
    row = "row"
    column = "column"
    group = "group"
    block = "block"


class AffineParameters(NamedTuple):
    """How codes become values: ``value = (code - zero_point) * scale``.

    Attributes:
        scale: ``float32``, positive and finite, with a finite reciprocal.
        zero_point: ``int32`` of the same shape, a code; None stands for zero.
    """

    scale: Tensor
    zero_point: Tensor | None


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes with their scales.

    Attributes:
        payload: The codes, one a byte: ``int8`` or ``uint8`` of ``shape``; ``uint8`` of floating-point formats.
        scale: ``float32``, one a block: ``[ceil(R / block rows), ceil(C / block columns)]`` where R and C are the
            product of all sizes but the last, and the last.
        zero_point: ``int32`` of the scale's shape, or None for zero.
        format: What a code is.
        granularity: What shares a scale.
        shape: Of the values.
        block: Rows and columns of a block; it says what the granularity says, in numbers.
    """

    payload: Tensor
    scale: Tensor
    zero_point: Tensor | None
    format: IntegerFormat | Format
    granularity: Granularity
    shape: torch.Size
    block: tuple[int, int]

    def dequantize(self) -> Tensor:
        """The values, ``float32`` of ``shape``."""
        codes = self.payload.float() if isinstance(self.format, IntegerFormat) else decode(self.payload, self.format)
        codes = _matrix(codes)
        if self.zero_point is not None:
            codes = codes - _expand(self.zero_point.float(), self.block, codes.shape)
        return (codes * _expand(self.scale, self.block, codes.shape)).view(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points as they are held: one a code."""
        parts = (self.payload, self.scale, self.zero_point)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def choose_affine(
    low: Tensor, high: Tensor, format: IntegerFormat, *, power_of_two: bool = False, where: str = "low, high"
) -> AffineParameters:
    """Scale and zero point of ranges, as FBGEMM's ``ChooseQuantizationParams`` (Khudia et al. 2021) computes them.

    The range is widened to hold zero, which is then the value of a code exactly. Arithmetic is in float64. A range of
    zero, or one whose scale has no finite reciprocal, gets the scale 0.1; a scale below 6.1e-5 is raised to that.

    Args:
        low: Smallest values, any shape.
        high: Largest values, of the same shape.
        format: Of the codes.
        power_of_two: Round scales up to powers of two.
        where: What is named in the message.

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
    floor = torch.tensor(SMALL_SCALE)  # in float32, as FBGEMM has it
    small = scale < floor.double()
    amplifier = floor / scale.float()
    full = floor * (highest - lowest)
    # Of the widened range only the zero point is computed: its ends keep their ratio.
    wide_low = torch.where(low == 0, low, torch.where(high == 0, -full, low * amplifier))
    wide_high = torch.where(low == 0, full, torch.where(high == 0, high, high * amplifier))
    low, high = torch.where(small, wide_low, low), torch.where(small, wide_high, high)
    scale = torch.where(small, floor.double(), scale)
    steps_low, steps_high = low.double() / scale, high.double() / scale
    from_low = abs(lowest) - steps_low.abs() < abs(highest) - steps_high.abs()
    zero_point = torch.where(from_low, lowest - steps_low, highest - steps_high)
    return AffineParameters(scale.float(), zero_point.round().clamp(lowest, highest).int())


def choose_symmetric(peak: Tensor, format: IntegerFormat, *, power_of_two: bool = False) -> AffineParameters:
    """Scales with the zero point zero: the largest absolute value becomes the largest code.

    Args:
        peak: Largest absolute values, any shape.
        format: Of the codes, signed. The lowest code, which has no opposite, is not used.
        power_of_two: Round scales up to powers of two.

    Raises:
        NumericsError: For an unsigned format, or a value that is negative or not finite.
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
    """Refuse scales and zero points that someone gives and that no codes can have; torch accepts them silently.

    Args:
        scale: Must be positive and finite, and so must be its reciprocal in float32.
        zero_point: Must be codes of the format; None for zero.
        format: Of the codes.
        where: What is named in the message.

    Raises:
        NumericsError: If they are not.
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
    """Refuse NaN and infinity.

    Args:
        x: Any floating-point tensor.
        where: Its name, for the message, which says the first such element's index too.

    Raises:
        NumericsError: If there is one.
    """
    bad = ~torch.isfinite(x)
    if bool(bad.any()):
        index = tuple(int(i) for i in bad.nonzero()[0])
        message = f"element {index} is {float(x[index])} ({int(bad.sum())} such of {x.numel()})"
        raise NumericsError(
            message, where=where, remedy="repair the values that are not finite; no code stands for them"
        )


def encode_integers(x: Tensor, scale: Tensor, zero_point: Tensor | None, format: IntegerFormat) -> Tensor:
    """Codes of finite values as FBGEMM's ``Quantize`` makes them: times the float32 reciprocal of the scale, clamped.

    The zero point is added in the same operation, rounded once to float32 (a fused multiply-add); then the sum is
    rounded to a whole number, ties to even.

    Args:
        x: ``float32``.
        scale: ``float32``, broadcasts to ``x``.
        zero_point: ``int32``, broadcasts to ``x``. None for zero.
        format: Of the codes.

    Returns:
        ``int8`` or ``uint8`` of the shape of ``x``.
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
    """Quantise a tensor, by its smallest and largest values or by scales that are given.

    Args:
        x: ``float32``, ``float16`` or ``bfloat16``, any strides. All but its last size make the rows.
        format: Of the codes.
        granularity: What shares a scale.
        symmetric: The zero point is zero (:func:`choose_symmetric`), else :func:`choose_affine`.
        power_of_two: Round scales up to powers of two.
        block: Elements of a group, or rows and columns of a block. Sizes need not divide those of ``x``.
        parameters: Scales and zero points to use instead, ``[1]`` or as :class:`QuantizedTensor` holds them.
        name: What the tensor is called in messages.

    Raises:
        NumericsError: For NaN and infinity, another dtype, or scales that are not possible.
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
    """All but the last size as rows."""
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
    """The smallest and largest value of each block, or zero."""
    if not x.numel():
        return x.new_zeros(grid), x.new_zeros(grid)
    # Ranges hold zero anyway, so zeros may fill up the last blocks.
    short = (grid[0] * size[0] - x.shape[0], grid[1] * size[1] - x.shape[1])
    blocks = torch.nn.functional.pad(x, (0, short[1], 0, short[0])).view(grid[0], size[0], grid[1], size[1])
    return blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)


def _expand(values: Tensor, size: tuple[int, int], shape: torch.Size) -> Tensor:
    """One value a block, as something that broadcasts to a matrix."""
    for dim in (0, 1):
        if values.shape[dim] > 1 and size[dim] > 1:
            values = values.repeat_interleave(size[dim], dim).narrow(dim, 0, shape[dim])
    return values
