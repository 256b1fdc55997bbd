"""Change of quality between two models on the same samples, with a confidence interval."""

from __future__ import annotations

import math

import numpy as np
import scipy
from numpy.typing import NDArray

from cordillera.errors import DataError
from cordillera.numerics.inference.selection import Change


def relative_change(
    losses: NDArray[np.float64],
    reference: NDArray[np.float64],
    weights: NDArray[np.float64] | None = None,
    groups: NDArray[np.int64] | None = None,
    level: float = 0.95,
) -> Change:
    """Compute the relative change of NE, which equals the relative change of log loss, with its interval.

    It is a ratio of two means over the same samples; its variance is the variance of its influences (delta method),
    which are summed within groups before they are squared if samples of a group are dependent.

    Args:
        losses: ``float64 [B]``, cross-entropy of each sample.
        reference: ``float64 [B]``, cross-entropy of the unchanged model.
        weights: ``float64 [B]``; None for ones.
        groups: ``int64 [B]``, such as users; None for independent samples.
        level: Confidence level.

    Raises:
        DataError: If there are no samples, losses are not finite, or those of the reference sum to zero.
    """
    if losses.shape != reference.shape or not losses.size:
        raise DataError(f"{losses.size} losses beside {reference.size}", where="relative_change")
    if not (np.isfinite(losses).all() and np.isfinite(reference).all()):
        raise DataError("a loss is not finite", where="relative_change")
    weights = np.ones_like(losses) if weights is None else weights
    total = float((weights * reference).sum())
    if not total > 0:
        raise DataError("the reference makes no error: there is nothing to compare with", where="relative_change")
    mean = float((weights * (losses - reference)).sum()) / total
    influence = weights * (losses - reference - mean * reference) / total
    if groups is not None:
        influence = np.asarray(np.bincount(np.unique(groups, return_inverse=True)[1], weights=influence), np.float64)
    count = influence.size
    if count < 2:
        return Change(mean, -math.inf, math.inf)
    error = math.sqrt(float(np.square(influence).sum()) * count / (count - 1))
    half = float(scipy.stats.t.ppf((1 + level) / 2, count - 1)) * error
    return Change(mean, mean - half, mean + half)
