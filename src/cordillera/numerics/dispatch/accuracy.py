"""How far a result is from what it should be, in measures that do and do not grow with the number of values.

LoKA judges a kernel by the mean of ``|(out - ref) / ref|`` (MERE). For references around zero that mean has no limit:
it grows with the logarithm of how many values there are, and one zero makes it infinite. It is kept for comparison,
with a floor and beside its count; decisions use the signal-to-noise ratio and the median relative error.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

FLOOR = 1e-3  # of the reference's root mean square, below which a relative error is taken of the floor


@dataclass(frozen=True)
class Accuracy:
    """A result beside its reference.

    Attributes:
        sqnr_db: Signal to quantisation noise, ``20 log10(|ref| / |out - ref|)`` of all values; infinite where equal.
        median_relative: Median of ``|out - ref| / max(|ref|, floor)``.
        mean_relative: Mean of the same: MERE with a floor of a thousandth of the reference's root mean square.
        largest_relative: Largest difference over the reference's root mean square.
        underflow: Share of values that are zero where the reference is not.
        nonfinite: Values that are NaN or infinite where the reference is finite; they count as errors without bound.
        count: Values.
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
        """Compare.

        Args:
            out: Any shape and floating-point dtype.
            reference: The same shape; values that are not finite are left out, with ``out``'s at their places.
        """
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

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; what is infinite as text, which JSON's numbers cannot hold."""
        return {name: value if math.isfinite(value) else str(value) for name, value in asdict(self).items()}
