"""Intervals of rates."""

from __future__ import annotations

import math

from scipy.special import ndtri  # loading scipy.stats takes a third of a second


def wilson_interval(rate: float, count: float, level: float = 0.95) -> tuple[float, float]:
    """Compute Wilson's interval of a binomial rate (Wilson 1927).

    Args:
        rate: Observed rate in [0, 1].
        count: Number of trials; for weighted or clustered samples, the effective number.
        level: Confidence level.

    Returns:
        Lower and upper bound; NaN if ``count`` is 0.
    """
    if count <= 0:
        return math.nan, math.nan
    z = float(ndtri((1 + level) / 2))
    centre = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)
