"""Embedding rows with fused scale and bias: FBGEMM's layouts of 8, 4 and 2 bits, byte for byte.

A row of 8 bits is D payload bytes, then scale and bias in float32. A row of 4 or 2 bits is ``ceil(D * bits / 8)``
payload bytes, the first element in the lowest bits, then scale and bias in float16. A value is ``q * scale + bias``
(Khudia et al. 2021, FBGEMM; Guan et al. 2019 for 4 bits).

FBGEMM's kernels turn NaN into 0, and a row with an infinity or a range beyond float16 into NaN; here such rows raise an
error. FBGEMM's kernels compute what they support; odd widths, clipping and stochastic rounding are computed here.
Torch's search for a clipping never ends on a row whose range is too small to be divided; the search here does.

The error of a rounded value is at most ``s / 2 + 1e-8`` with 8 bits (FBGEMM adds 1e-8 to the range) and at most
``s (1/2 + (2^bits - 1) 2^-11) + |min| 2^-11 + 2^bits 2^-25`` with 4 and 2 bits, where the last term is float16's flush
of numbers below its smallest one. Codes computed from a decoded row may differ from the original codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cordillera.errors import NumericsError

BITS = (8, 4, 2)
_KERNELS = {8: "embedding_bag_byte_prepack", 4: "embedding_bag_4bit_prepack", 2: "embedding_bag_2bit_prepack"}
_RANGE_EPSILON = 1e-8  # added to a range before its reciprocal is taken, as in FBGEMM
_CHUNK = 1 << 20  # number of elements for which a clipping is searched at a time
_STEPS = 200  # number of steps into which the search divides a row's range
_SHRUNK = 0.16  # largest share of a row's range by which the search narrows it
_REFITS = 3


def row_bytes(dim: int, bits: int) -> int:
    """Return the number of bytes of a row of ``dim`` elements in 8, 4 or 2 ``bits``, with its scale and bias.

    Raises:
        NumericsError: If ``bits`` is another number.
    """
    if bits not in BITS:
        raise NumericsError(f"rows have 8, 4 or 2 bits, not {bits}", where="bits")
    return dim + 8 if bits == 8 else math.ceil(dim * bits / 8) + 4


def quantize_rows(
    x: Tensor, bits: int, *, method: str = "minmax", random: Tensor | None = None, name: str = "rows"
) -> Tensor:
    """Encode rows in FBGEMM's fused layout.

    With ``minmax``, the bytes equal those of ``torch.ops.quantized.embedding_bag_*_prepack``, except for the sign of a
    zero bias in a row that holds zeros of both signs.

    Args:
        x: Rows, ``float32`` (or ``float16``, ``bfloat16``) ``[R, D]``, of any strides. With 4 or 2 bits D may be odd,
            which FBGEMM does not support: the last byte is padded with zeros.
        bits: 8, 4 or 2.
        method: ``minmax``, or ``greedy`` (4 and 2 bits): the ends are moved inwards while the squared error falls, then
            scale and bias are refitted to the codes. The squared error is never larger than with ``minmax``.
        random: Random numbers, ``int64 [R, D]`` with 32 random bits each, for stochastic rounding: a value is rounded
            up with the probability of its distance from the code below. None to round to nearest, ties to even.
        name: Name of the rows for error messages.

    Returns:
        Encoded rows, ``uint8 [R, row_bytes(D, bits)]``.

    Raises:
        NumericsError: If a value is NaN or infinite, or a range overflows float32. With 4 and 2 bits also if a value is
            beyond float16, or the offset of a row that is not constant is so large compared with its range that float16
            may misplace the bias by more than half a step (``|min| 2^-11 > s / 2``). The message names row and column.
    """
    row_bytes(0, bits)
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        remedy = "cast float64 with .float() if its precision is not needed"
        raise NumericsError(f"expected float32 [R, D], not {x.dtype} {list(x.shape)}", where=name, remedy=remedy)
    if method not in ("minmax", "greedy") or (method == "greedy" and bits == 8):
        raise NumericsError(
            f"no method {method!r} for {bits} bits", where="method", remedy="minmax; greedy for 4 and 2"
        )
    if random is not None and random.shape != x.shape:
        raise NumericsError(f"{list(random.shape)} random numbers for {list(x.shape)} values", where="random")
    x = x.detach().float()
    low, high = _ends(x, name)
    levels = (1 << bits) - 1
    if bits == 8:
        if x.numel():
            _refuse(~torch.isfinite(high - low), x.argmax, "the row's range overflows float32", name)
    else:
        _check_half(x, low, high, *_half_parameters(low, high, levels), levels, name)
    if method == "minmax" and random is None and x.numel() and x.shape[1] % (8 // bits) == 0 and x.device.type == "cpu":
        rows: Tensor = getattr(torch.ops.quantized, _KERNELS[bits])(x.contiguous())
        return rows
    if bits == 8:
        return _encode_single(x, low, high, random)
    parameters = _greedy(x, low, high, levels) if method == "greedy" else _half_parameters(low, high, levels)
    return _encode_half(x, *parameters, bits, random)


def _encode_single(x: Tensor, low: Tensor, high: Tensor, random: Tensor | None) -> Tensor:
    """Encode rows in 8 bits."""
    span = high - low
    codes = _round((x - low) * (255.0 / (span + _RANGE_EPSILON)), 255, random)
    return torch.cat([codes, _bytes_of(span / 255.0, low)], dim=1)


def _encode_half(x: Tensor, scale: Tensor, bias: Tensor, bits: int, random: Tensor | None) -> Tensor:
    """Encode rows in 4 or 2 bits."""
    codes = _round((x - bias) * (1.0 / scale), (1 << bits) - 1, random)
    return torch.cat([pack_codes(codes, bits), _bytes_of(scale.half(), bias.half())], dim=1)


def dequantize_rows(rows: Tensor, bits: int, dim: int, *, name: str = "rows") -> Tensor:
    """Return the values of rows in the fused layout, each rounded once to float32.

    Args:
        rows: Encoded rows, ``uint8 [R, row_bytes(dim, bits)]``.
        bits: 8, 4 or 2.
        dim: Number of elements of a row.
        name: Name of the rows for error messages.

    Returns:
        Values, ``float32 [R, dim]``.

    Raises:
        NumericsError: If the bytes are not such rows, or a scale or bias is not finite.
    """
    size = row_bytes(dim, bits)
    if rows.dim() != 2 or rows.dtype != torch.uint8 or rows.shape[1] != size:
        raise NumericsError(
            f"rows of {dim} elements in {bits} bits are uint8 [R, {size}], not {rows.dtype} {list(rows.shape)}",
            where=name,
        )
    kind = torch.float32 if bits == 8 else torch.float16
    width = size - 2 * kind.itemsize
    parameters = rows[:, width:].clone(memory_format=torch.contiguous_format).view(kind).double()
    _refuse(~torch.isfinite(parameters).all(1, keepdim=True), None, "scale or bias is not finite", name)
    codes = rows[:, :width] if bits == 8 else unpack_codes(rows[:, :width], bits)[:, :dim]
    return (codes.double() * parameters[:, :1] + parameters[:, 1:]).float()


def _ends(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest value of each row ``[R, 1]``; raise an error if one is not finite."""
    if not x.numel():
        zeros = x.new_zeros(x.shape[0], 1)
        return zeros, zeros
    low, high = torch.aminmax(x, dim=1, keepdim=True)  # both are NaN if the row holds one
    bad = ~(torch.isfinite(low) & torch.isfinite(high))
    if bool(bad.any()):
        row = int(bad.flatten().nonzero()[0])
        column = int((~torch.isfinite(x[row])).nonzero()[0])
        value, count = float(x[row, column]), int((~torch.isfinite(x)).sum())
        message = f"row {row}, column {column} is {value} ({count} such values in {int(bad.sum())} rows)"
        raise NumericsError(
            message, where=name, remedy="repair the values that are not finite; no code stands for them"
        )
    return low, high


def _refuse(
    bad: Tensor, column_of: Callable[..., Tensor] | None, what: str, name: str, remedy: str | None = None
) -> None:
    """Raise an error for the first bad row ``[R, 1]``; ``column_of``, an argmin or argmax, finds its column."""
    if bool(bad.any()):
        row = int(bad.flatten().nonzero()[0])
        column = f", column {int(column_of(dim=1)[row])}" if column_of is not None else ""
        raise NumericsError(f"row {row}{column}: {what} ({int(bad.sum())} such rows)", where=name, remedy=remedy)


def _half_parameters(low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return scale and bias rounded to float16, in float32.

    The scale of a constant row may be negative, as its bias may be rounded to above the constant.
    """
    bias = low.half().float()
    span = high - bias
    scale = torch.where(span == 0, torch.ones_like(span), span / levels).half().float()
    # if float16 flushed the scale to zero, the row is constant to its precision
    return torch.where((scale == 0) | torch.isinf(1.0 / scale), torch.ones_like(scale), scale), bias


def _check_half(x: Tensor, low: Tensor, high: Tensor, scale: Tensor, bias: Tensor, levels: int, name: str) -> None:
    beyond = torch.finfo(torch.float16).max
    remedy = "use 8 bits, whose scale and bias are float32"
    if x.numel():
        _refuse(~torch.isfinite(bias), x.argmin, f"the smallest value lies beyond float16 ({beyond:g})", name, remedy)
        _refuse(~torch.isfinite(scale), x.argmax, f"the scale lies beyond float16 ({beyond:g})", name, remedy)
        coarse = (low.abs() * 2.0**-11 > (high - low) / levels / 2) & (high != low)
        what = "the offset is so large that float16 may misplace the row by more than half a step"
        _refuse(
            coarse, x.argmin, what, name, "use 8 bits, or take the mean out of the rows and add it after the lookup"
        )


def _round(scaled: Tensor, levels: int, random: Tensor | None) -> Tensor:
    if random is None:
        return scaled.round().clamp_(0, levels).to(torch.uint8)
    # In float64, neither the random number nor its sum with a code is rounded up to the next code.
    return (scaled.double() + random.double() * 2.0**-32).floor().clamp_(0, levels).to(torch.uint8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack several codes into each byte, the first in the lowest bits; the last byte of a row is padded with zeros.

    Args:
        codes: Codes, ``uint8 [R, C]``, each below ``2 ** bits``.
        bits: 8, 4 or 2.
    """
    per_byte = 8 // bits
    rows, columns = codes.shape
    width = math.ceil(columns / per_byte)
    grouped = torch.nn.functional.pad(codes, (0, width * per_byte - columns)).view(rows, width, per_byte)
    packed = grouped[..., 0].clone()
    for i in range(1, per_byte):
        packed |= grouped[..., i] << (i * bits)
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Return the codes ``uint8 [R, bytes * 8 / bits]`` that :func:`pack_codes` packed into ``packed [R, bytes]``."""
    shifts = range(0, 8, bits)
    return torch.stack([(packed >> shift) & ((1 << bits) - 1) for shift in shifts], dim=2).flatten(1)


def _bytes_of(scale: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([scale, bias], dim=1).view(torch.uint8)


def _loss(x: Tensor, scale: Tensor, bias: Tensor, levels: int) -> Tensor:
    """Return the squared error of each row, ``float64 [R, 1]``."""
    codes = ((x - bias) * (1.0 / scale)).round_().clamp_(0, levels)
    return (x - (codes * scale + bias)).double().square_().sum(1, keepdim=True)


def _greedy(x: Tensor, low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return _half_parameters(low, high, levels)
    rows = max(1, _CHUNK // x.shape[1])
    found = [
        _greedy_chunk(x[i : i + rows], low[i : i + rows], high[i : i + rows], levels) for i in range(0, len(x), rows)
    ]
    return torch.cat([scale for scale, _ in found]), torch.cat([bias for _, bias in found])


def _greedy_chunk(x: Tensor, low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Follow the search of ``torch.choose_qparams_optimized``, but keep and refit the best range on its path."""
    scale, bias = _half_parameters(low, high, levels)
    best = _loss(x, scale, bias, levels)

    def keep(candidate: tuple[Tensor, Tensor], loss: Tensor) -> None:
        nonlocal scale, bias, best
        better = loss < best  # false for NaN, which an invalid scale causes
        scale, bias = torch.where(better, candidate[0], scale), torch.where(better, candidate[1], bias)
        best = torch.where(better, loss, best)

    step = (high - low) / _STEPS
    narrowest = _STEPS * (1.0 - _SHRUNK) * step
    while bool((active := low + narrowest < high).any()):
        left, right = _half_parameters(low + step, high, levels), _half_parameters(low, high - step, levels)
        left_loss, right_loss = _loss(x, *left, levels), _loss(x, *right, levels)
        go_left = left_loss < right_loss
        keep(left, torch.where(active & go_left, left_loss, torch.inf))
        keep(right, torch.where(active & ~go_left, right_loss, torch.inf))
        moved_low = torch.where(active & go_left, low + step, low)
        moved_high = torch.where(active & ~go_left, high - step, high)
        # a step may be too small to move the ends of a row
        narrowest = torch.where((moved_low == low) & (moved_high == high), torch.inf, narrowest)
        low, high = moved_low, moved_high
    for _ in range(_REFITS):
        candidate = _refit(x, scale, bias, levels)
        keep(candidate, _loss(x, *candidate, levels))
    return scale, bias


def _refit(x: Tensor, scale: Tensor, bias: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return the float16 scale and bias of least squares for the rows' current codes."""
    codes = ((x - bias) * (1.0 / scale)).round_().clamp_(0, levels).double()
    values = x.double()
    code_mean, value_mean = codes.mean(1, keepdim=True), values.mean(1, keepdim=True)
    spread = (codes - code_mean).square().sum(1, keepdim=True)
    slope = ((codes - code_mean) * (values - value_mean)).sum(1, keepdim=True) / spread
    fitted = torch.where(spread > 0, slope, scale.double()).half().float()
    fitted = torch.where((fitted == 0) | ~torch.isfinite(fitted), scale, fitted)
    return fitted, (value_mean - fitted.double() * code_mean).half().float()
