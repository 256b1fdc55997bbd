"""Change of quality between two models on the same samples, with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy
from numpy.typing import NDArray

from cordillera.errors import DataError
from cordillera.numerics.inference.selection import Change
from cordillera.training.ranking.metric_intervals import interval_unit, metric_influences
from cordillera.training.ranking.metrics import of_task

SampleUnit = Literal["sample", "group"]


@dataclass(frozen=True)
class ScoredSamples:
    """Samples with a model's scores, to compare it with other models on the same samples.

    Attributes:
        tasks: Names of the columns of ``logits`` and ``labels``.
        logits: ``float32 [B, tasks]``, finite.
        labels: ``float32 [B, tasks]``, 0 or 1, or NaN where a label is missing.
        weights: ``float64 [B]``; None for ones.
        groups: ``int64 [B]``, such as users; None for independent samples.
    """

    tasks: tuple[str, ...]
    logits: NDArray[Any]
    labels: NDArray[Any]
    weights: NDArray[Any] | None = None
    groups: NDArray[Any] | None = None

    def of_task(self, task: str) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float64], NDArray[Any] | None]:
        """Return logits, labels, weights and groups of the samples that have a label of ``task``."""
        place = self.tasks.index(task)
        logits, labels, weights, groups = of_task(place, self.logits, self.labels, self.weights, self.groups)
        return logits, labels, np.ones(len(labels)) if weights is None else weights.astype(np.float64), groups


@dataclass(frozen=True)
class PairedDifference:
    """Difference of a metric between models on the same samples, with its interval over these samples.

    Attributes:
        value: The difference.
        low: Lower bound of the interval.
        high: Upper bound.
    """

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether zero is outside of the interval."""
        return self.low > 0 or self.high < 0


def paired_differences(
    pairs: Sequence[tuple[ScoredSamples, ScoredSamples]], task: str, level: float = 0.95
) -> tuple[dict[str, PairedDifference], SampleUnit]:
    """Compute differences of metrics between models that scored the same samples, with intervals over the samples.

    The variance of a difference is that of the samples' influences on it (delta method; for the AUC the paired
    estimator of DeLong et al. 1988), as in a bootstrap that draws the same samples for both models. Influences are
    summed within groups before they are squared if there are at least 20 groups.

    Args:
        pairs: Pairs of a model and the one that it is compared with; of several, as with several seeds, the difference
            is the mean. Labels, weights and groups are those of the first pair's second.
        task: Name of the task.
        level: Confidence level.

    Returns:
        ``relative_ne`` (percent; that of the log loss is equal), ``auc``, ``log_loss`` and ``calibration`` by name, and
        the unit that is treated as independent. There is nothing with fewer than two samples of either class, and
        differences that are not finite are left out.

    Raises:
        DataError: If the models scored other samples.
    """
    _, labels, weights, groups = pairs[0][1].of_task(task)
    for one in (one for pair in pairs for one in pair):
        _, own_labels, own_weights, _ = one.of_task(task)
        if not (np.array_equal(labels, own_labels) and np.array_equal(weights, own_weights)):
            raise DataError(
                f"the runs read other labels or weights of '{task}' from the same samples",
                where="compare",
                remedy="compare runs whose data.schema and data.positive agree",
            )
    kept, positive = weights > 0, labels == 1
    count = [int((kept & positive).sum()), int((kept & ~positive).sum())]
    unit: SampleUnit = "group" if groups is not None and interval_unit(groups[kept]) == "group" else "sample"
    if min(count) < 2:
        return {}, unit
    codes = np.unique(groups[kept], return_inverse=True)[1] if unit == "group" and groups is not None else None
    found: dict[str, tuple[float, NDArray[np.float64]]] = {}
    for pair in pairs:
        mine, theirs = (one.of_task(task)[0][kept].astype(np.float64) for one in pair)
        for name, (value, parts) in _differences(mine, theirs, positive[kept], weights[kept]).items():
            before = found.get(name, (0.0, 0.0))
            found[name] = before[0] + value / len(pairs), before[1] + parts / len(pairs)
    result = {name: _paired(name, *one, positive[kept], codes, level) for name, one in found.items()}
    return {name: one for name, one in result.items() if math.isfinite(one.low) and math.isfinite(one.high)}, unit


def _differences(
    logits: NDArray[np.float64],
    others: NDArray[np.float64],
    positive: NDArray[np.bool_],
    weights: NDArray[np.float64],
) -> dict[str, tuple[float, NDArray[np.float64]]]:
    """Return the differences from the ``others`` to ``logits``, with the influences of the samples on them."""
    mine, theirs = (metric_influences(one, positive, weights) for one in (logits, others))
    found = {name: (mine[name][0] - theirs[name][0], mine[name][1] - theirs[name][1]) for name in mine}
    (ne, of_ne), (base, of_base) = mine["ne"], theirs["ne"]
    del found["ne"]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.float64(ne) / base
        return {"relative_ne": (float(100 * (ratio - 1)), 100 * (of_ne - ratio * of_base) / base), **found}


def _paired(
    name: str,
    value: float,
    parts: NDArray[np.float64],
    positive: NDArray[np.bool_],
    codes: NDArray[np.int64] | None,
    level: float,
) -> PairedDifference:
    units = [parts] if codes is None else [np.bincount(codes, weights=parts)]
    if codes is None and name == "auc":
        units = [parts[positive], parts[~positive]]
    variance = sum(one.size / (one.size - 1) * float((one**2).sum()) for one in units)
    freedom = sum(one.size for one in units) - 1
    half = float(scipy.stats.t.ppf((1 + level) / 2, freedom)) * math.sqrt(variance)
    return PairedDifference(value, value - half, value + half)


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
