"""Deviation of a result from its reference, in measures that do and do not grow with the number of values.

LoKA judges a kernel by the mean of ``|(out - ref) / ref|`` (MERE), which has no limit for references around zero: it
grows with the logarithm of the number of values, and one zero makes it infinite. It is kept for comparison, with a
floor; decisions use the signal-to-noise ratio and the median relative error.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

FLOOR = 1e-3  # smallest denominator of a relative error, relative to the reference's root mean square


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a result compared with its reference.

    Attributes:
        sqnr_db: Signal to quantisation noise in dB, ``20 log10(|ref| / |out - ref|)`` over all values; infinite if
            equal.
        median_relative: Median of ``|out - ref| / max(|ref|, floor)``.
        mean_relative: Mean of the same: MERE with a floor of a thousandth of the reference's root mean square.
        largest_relative: Largest difference relative to the reference's root mean square.
        underflow: Share of values that are zero although the reference is not.
        nonfinite: Number of NaN and infinities where the reference is finite; they count as infinite errors.
        count: Number of values.
    """

    sqnr_db: float
    median_relative: float
    mean_relative: float
    largest_relative: float
    underflow: float
    nonfinite: int
    count: int

    @classmethod
    def of(cls, out: Tensor, reference: Tensor) -> Accuracy:
        """Compare a result with its reference; values whose reference is not finite are left out."""
        out, reference = out.detach().double().reshape(-1), reference.detach().double().reshape(-1)
        known = torch.isfinite(reference)
        out, reference = out[known], reference[known]
        count = reference.numel()
        if count == 0:
            return cls(math.inf, 0.0, 0.0, 0.0, 0.0, 0, 0)
        lost = int((~torch.isfinite(out)).sum())
        size = float(reference.square().mean().sqrt())
        underflow = float(((out == 0) & (reference != 0)).double().mean())
        if lost:
            return cls(-math.inf, math.inf, math.inf, math.inf, underflow, lost, count)
        error = (out - reference).abs()
        noise = float(error.square().mean().sqrt())
        if noise == 0:
            return cls(math.inf, 0.0, 0.0, 0.0, underflow, 0, count)
        if size == 0:
            return cls(-math.inf, math.inf, math.inf, math.inf, underflow, 0, count)
        relative = error / reference.abs().clamp(min=FLOOR * size)
        return cls(
            20 * math.log10(size / noise),
            float(relative.median()),
            float(relative.mean()),
            float(error.max()) / size,
            underflow,
            0,
            count,
        )

    def worse(self, other: Accuracy) -> Accuracy:
        """Return the accuracy with the lower signal-to-noise ratio, with the larger of both median errors."""
        lower = min(self, other, key=lambda one: one.sqnr_db)
        return replace(lower, median_relative=max(self.median_relative, other.median_relative))

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, with infinite ones as text."""
        return {name: value if math.isfinite(value) else str(value) for name, value in asdict(self).items()}
