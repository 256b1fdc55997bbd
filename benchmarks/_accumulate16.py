"""Emulation of int16 sums of eight-bit products, as in fast kernels before VNNI, with a count of saturations.

Two neighbouring products are added and clipped to int16, the sum is added to an accumulator and clipped again; after
``spill`` products the accumulator is emptied into int32 (``vpmaddubsw``; FBGEMM's ``RefImplementations.cc``). Weights
of large magnitude are moved beforehand to a sparse matrix whose products are summed in int32 (Park et al. 2018, arXiv
1811.09886; Khudia et al. 2021). Such kernels do not report saturation. Here every clip is counted, and width and spill
are chosen so that there is none on calibration data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.quantization.integer_linear import LinearWeight, apply_offsets

LARGEST_DENSITY = 0.05
"""Largest density of outliers; with more of them FBGEMM sums everything in int32."""
BITS = (8, 7, 6, 5, 4)
SPILLS = (256, 128, 64, 32, 16, 8, 4, 2)
_LOWEST, _HIGHEST = -(2**15), 2**15 - 1
_ROWS = 64  # number of rows whose accumulators are held at a time


@dataclass(frozen=True)
class Accumulation:
    """Summation of a layer's products.

    Attributes:
        bits: Width of the codes that are summed in int16; wider codes are outliers. With 8 there are none.
        spill: Number of products between two emptyings of the int16 accumulator.
        density: Share of outliers.
        saturations: Number of clips on the calibration data.
    """

    bits: int
    spill: int
    density: float
    saturations: int = 0

    @property
    def cost(self) -> float:
        """Number of 32-bit operations for each 16-bit product: one to empty the accumulator, one for an outlier."""
        return 1 / self.spill + self.density


def never_saturates(bits: int, spill: int) -> bool:
    """Whether no codes can overflow int16: ``255 * 2^(bits - 1) * spill <= 32767``."""
    return 255 * 2 ** (bits - 1) * spill <= _HIGHEST


def split_outliers(codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Split codes into those that fit ``bits`` bits, and outliers; both are ``int8 [N, K]`` and add up to ``codes``.

    Outliers are below ``-2^(bits - 1)`` or at least ``2^(bits - 1)``.

    Args:
        codes: Codes, ``int8 [N, K]``.
        bits: Width from 0 (all are outliers) to 8 (none is).
    """
    limit = 2 ** (bits - 1) if bits else 0
    wide = codes.to(torch.int16)
    outlier = (wide < -limit) | (wide >= limit)
    return codes.masked_fill(outlier, 0), codes.masked_fill(~outlier, 0)


def accumulate16(codes: Tensor, weight_codes: Tensor, spill: int) -> tuple[Tensor, int]:
    """Return ``sum_k a[i, k] b[j, k]`` by saturating int16 arithmetic.

    Args:
        codes: Codes of activations, ``uint8 [M, K]``.
        weight_codes: Codes of weights, ``int8 [N, K]``.
        spill: Number of products between two emptyings; must be even.

    Returns:
        Sums ``int32 [M, N]``, and the number of clips. The sums are exact if it is zero.

    Raises:
        NumericsError: If ``spill`` is odd or not positive.
    """
    if spill < 2 or spill % 2:
        raise NumericsError(f"products are added in pairs, so they cannot spill every {spill}", where="spill")
    outputs, inner = weight_codes.shape
    total = torch.zeros(codes.shape[0], outputs, dtype=torch.int32)
    if inner % 2:
        codes, weight_codes = (torch.nn.functional.pad(part, (0, 1)) for part in (codes, weight_codes))
    weights = weight_codes.to(torch.int32).t().contiguous()
    saturations = 0
    for begin in range(0, codes.shape[0], _ROWS):
        rows = codes[begin : begin + _ROWS].to(torch.int32)
        sums = torch.zeros(rows.shape[0], outputs, dtype=torch.int32)
        for k in range(0, weights.shape[0], 2):
            pair = rows[:, k, None] * weights[k] + rows[:, k + 1, None] * weights[k + 1]
            clipped = pair.clamp(_LOWEST, _HIGHEST)
            saturations += int((clipped != pair).sum())
            sums += clipped
            clipped = sums.clamp(_LOWEST, _HIGHEST)
            saturations += int((clipped != sums).sum())
            sums = clipped
            if (k + 2) % spill == 0:
                total[begin : begin + _ROWS] += sums
                sums = torch.zeros_like(sums)
        total[begin : begin + _ROWS] += sums
    return total, saturations


def integer_product16(
    codes: Tensor, zero_point: int, weight: LinearWeight, accumulation: Accumulation
) -> tuple[Tensor, int]:
    """Compute :func:`~cordillera.numerics.quantization.integer_linear.integer_product` with int16 sums.

    Returns:
        Sums ``int64 [M, N]``, and the number of clips. The sums are exact if it is zero.
    """
    main, outliers = split_outliers(weight.codes, accumulation.bits)
    sums, saturations = accumulate16(codes, main, accumulation.spill)
    sums = sums.long() + (codes.double() @ outliers.double().t()).long()
    return apply_offsets(sums, codes, zero_point, weight), saturations


def choose_accumulation(
    weight: LinearWeight,
    batches: Iterable[Tensor],
    *,
    largest_density: float = LARGEST_DENSITY,
    spills: Sequence[int] = SPILLS,
) -> Accumulation | None:
    """Return the cheapest width and spill at which nothing saturates on ``batches`` of activations, ``uint8 [M, K]``.

    Returns:
        Choice; None if all of them saturate or leave too many outliers, so that int32 is needed.

    Raises:
        NumericsError: If there are no activations.
    """
    data = [codes for codes in batches if codes.numel()]
    if not data and weight.codes.numel():
        raise NumericsError("there is nothing to look for saturations in", where="batches", remedy="give activations")
    candidates = []
    for bits in BITS:
        _, outliers = split_outliers(weight.codes, bits)
        density = float((outliers != 0).float().mean()) if outliers.numel() else 0.0
        if density <= largest_density:
            candidates += [Accumulation(bits, spill, density) for spill in spills]
    for candidate in sorted(candidates, key=lambda each: (each.cost, -each.bits)):
        main, _ = split_outliers(weight.codes, candidate.bits)
        if never_saturates(candidate.bits, candidate.spill):
            return candidate
        if not any(accumulate16(codes, main, candidate.spill)[1] for codes in data):
            return candidate
    return None
