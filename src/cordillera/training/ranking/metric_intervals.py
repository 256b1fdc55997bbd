"""Confidence intervals of ranking metrics on one test set, without resampling.

Every metric is a smooth function of weighted means over samples (the AUC, over pairs), so its sampling variance is the
sum of squared influences of the samples. For the unweighted AUC this is DeLong's estimator; for all metrics it agrees
with a bootstrap over the same units to first order, and costs one sort. Samples of one group (a user) are not
independent: with groups, the influences are summed within a group before they are squared, like a bootstrap over
groups.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from cordillera.training.ranking.groups.top_k import TOP_K, rank_groups
from cordillera.training.ranking.metrics import RANKING_K, binary_entropy, cross_entropy, grouped_auc, sigmoid

_Floats = NDArray[np.float64]
_FEWEST_GROUPS = 20


def auc_influence(scores: _Floats, positive: NDArray[np.bool_], weights: _Floats) -> tuple[float, _Floats]:
    """Compute the weighted AUC of samples and every sample's influence on it, ``float64 [B]``.

    Of the ``scores``, ``positive`` and ``weights``, all ``[B]``, both classes must be present and weights positive. The
    influences' sum is zero within either class, and their sum of squares is the variance of the AUC up to the factors
    ``m / (m - 1)`` of DeLong et al. 1988 (structural components ``V10`` and ``V01``).
    """
    _, place = np.unique(scores, return_inverse=True)
    positives = np.bincount(place, weights=weights * positive)
    negatives = np.bincount(place, weights=weights * ~positive)
    p, n = positives.sum(), negatives.sum()
    below = (np.cumsum(negatives) - negatives / 2) / n
    above = 1 - (np.cumsum(positives) - positives / 2) / p
    auc = float((positives * below).sum() / p)
    wins = np.where(positive, below[place], above[place])
    return auc, weights / np.where(positive, p, n) * (wins - auc)


def metric_intervals(
    logits: _Floats,
    positive: NDArray[np.bool_],
    weights: _Floats,
    groups: NDArray[np.int64] | None = None,
    level: float = 0.95,
    ranking_k: int = RANKING_K,
) -> dict[str, tuple[float, float]]:
    """Compute confidence intervals of ``ne``, ``auc``, ``log_loss``, ``calibration`` and the metrics of groups.

    The metrics of groups are ``gauc``, ``ndcg``, ``recall`` and ``mrr``. Intervals are normal on a scale where the
    metric is unbounded (the logarithm of ``ne``, ``log_loss`` and ``calibration``, the logit of the others), with
    Student's quantile for the number of groups. A metric is left out if its variance cannot be estimated: fewer than
    two samples of either class, fewer than 20 groups that have one of groups, or no variation (a perfect ranking).

    Args:
        logits: ``float64 [B]``, finite.
        positive: ``bool [B]``.
        weights: ``float64 [B]``, at least 0.
        groups: ``int64 [B]``, units that were sampled independently; used if there are at least 20 of them.
        level: Confidence level.
        ranking_k: Number of samples of a group that count for ``ndcg``, ``recall`` and ``mrr``.

    Returns:
        Lower and upper bound by name of the metric.
    """
    if not weights.all():
        keep = weights > 0
        logits, positive, weights = logits[keep], positive[keep], weights[keep]
        groups = None if groups is None else groups[keep]
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if ones < 2 or zeros < 2:
        return {}
    codes = np.zeros(0, np.int64) if groups is None else np.unique(groups, return_inverse=True)[1]
    count = 0 if groups is None else int(codes.max()) + 1
    clustered = count >= _FEWEST_GROUPS
    errors: dict[str, tuple[float, float]] = {}
    for name, (value, parts) in _estimates(logits, positive, weights).items():
        if clustered:
            variance = count / (count - 1) * float((np.bincount(codes, weights=parts) ** 2).sum())
        elif name == "auc":
            variance = ones / (ones - 1) * float((parts[positive] ** 2).sum())
            variance += zeros / (zeros - 1) * float((parts[~positive] ** 2).sum())
        else:
            variance = positive.size / (positive.size - 1) * float((parts**2).sum())
        errors[name] = value, math.sqrt(variance)
    if clustered:
        errors |= _grouped_estimates(logits, positive, weights, codes, ranking_k)
    place = (1 + level) / 2
    quantile = float(stdtrit(count - 1, place) if clustered else ndtri(place))  # t.ppf, norm.ppf of scipy.stats
    bounds = {name: _bounds(name, value, error, quantile) for name, (value, error) in errors.items()}
    return {name: ends for name, ends in bounds.items() if ends is not None}


def _estimates(logits: _Floats, positive: NDArray[np.bool_], weights: _Floats) -> dict[str, tuple[float, _Floats]]:
    """Return every metric except the metrics of groups, with the influences of the samples on it."""
    losses, predictions = cross_entropy(logits, positive), sigmoid(logits)
    total, mass = weights.sum(), weights[positive].sum()
    rate, share = mass / total, weights / total
    loss = float(share @ losses)
    entropy = binary_entropy(mass, total - mass)
    ne, slope = loss / entropy, math.log((1 - rate) / rate)
    calibration = float(weights @ predictions / mass)
    return {
        "ne": (ne, share * ((losses - loss) - ne * slope * (positive - rate)) / entropy),
        "auc": auc_influence(logits, positive, weights),
        "log_loss": (loss, share * (losses - loss)),
        "calibration": (calibration, weights / mass * (predictions - calibration * positive)),
    }


def metric_influences(
    logits: _Floats, positive: NDArray[np.bool_], weights: _Floats
) -> dict[str, tuple[float, _Floats]]:
    """Return ``ne``, ``auc``, ``log_loss`` and ``calibration``, each with the influences of the samples on it, ``[B]``.

    The difference of two models' influences on the same samples is the influence on the difference of the metric.
    ``logits`` (finite), ``positive`` and ``weights`` (above 0) are ``[B]``, and both classes must be present.
    """
    return _estimates(logits, positive, weights)


def _grouped_estimates(
    logits: _Floats, positive: NDArray[np.bool_], weights: _Floats, codes: NDArray[np.int64], ranking_k: int
) -> dict[str, tuple[float, float]]:
    """Return the metrics of groups that at least 20 groups have, with their standard errors."""
    order = np.lexsort((logits, codes))
    codes, logits, weights, positive = codes[order], logits[order], weights[order], positive[order]
    _, aucs, p, n = grouped_auc(codes, logits, weights * positive, weights * ~positive)
    defined = ~np.isnan(aucs)
    ranked = rank_groups(codes, logits, positive.astype(np.int64), (~positive).astype(np.int64), ranking_k)
    found = {"gauc": (aucs[defined], (p + n)[defined])}
    found |= {name: (getattr(ranked, name), np.ones(ranked.ndcg.size)) for name in TOP_K}
    errors = {}
    for name, (values, masses) in found.items():
        if values.size >= _FEWEST_GROUPS:
            part = masses / masses.sum()
            mean = float(part @ values)
            spread = float(((part * (values - mean)) ** 2).sum())
            errors[name] = mean, math.sqrt(values.size / (values.size - 1) * spread)
    return errors


def _bounds(name: str, value: float, error: float, quantile: float) -> tuple[float, float] | None:
    if not (math.isfinite(value) and value > 0 and error > 0):
        return None
    if name not in ("auc", "gauc", *TOP_K):
        low, high = (value * math.exp(sign * quantile * error / value) for sign in (-1, 1))
        return float(low), float(high)
    if value >= 1:
        return None
    centre, half = math.log(value / (1 - value)), quantile * error / (value * (1 - value))
    low, high = (1 / (1 + math.exp(-end)) for end in (centre - half, centre + half))
    return float(low), float(high)


def interval_unit(groups: NDArray[np.int64] | None) -> str:
    """Return the independent unit of :func:`metric_intervals`: ``group`` with at least 20 groups, else ``sample``."""
    return "group" if groups is not None and np.unique(groups).size >= _FEWEST_GROUPS else "sample"
