"""Streaming metrics of binary predictions that merge exactly over shards.

:class:`RankingMetrics` reads logits batch by batch and computes normalised entropy (NE), AUC, log loss, calibration,
and of groups GAUC, NDCG, recall and MRR. Sums are exact integers and every distinct score is kept, so for any division
of the data into batches and shards, in any order, ``merge`` gives the same bits as one pass over the union.

A metric that the data does not define (one class only, no examples) is NaN, never a number;
:meth:`RankingMetrics.undefined` names it with the reason. NaN logits are refused. Infinite logits are accepted: correct
ones cost nothing, and an incorrect one costs an infinite log loss. Nothing is clamped, so over-confidence stays
visible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cordillera.errors import CheckpointError, DataError, TrainingError
from cordillera.training.ranking.exact_sum import ExactSum
from cordillera.training.ranking.groups.top_k import TOP_K, RankedGroups, rank_groups

TensorOrArray: TypeAlias = Tensor | np.ndarray
_Floats: TypeAlias = NDArray[np.float64]

_SUMS = ("cross_entropy", "prediction", "weight", "positive_weight", "negative_weight")
_BIN_RANGE = 16.0  # logits; sigmoid(-16) is 1e-7
_COMPACT_AT = 1 << 16

RANKING_K = 10
"""Number of samples of a group that count for NDCG, recall and MRR, by default."""


def _numpy(values: TensorOrArray, dtype: Any = np.float64) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.to(torch.float64) if values.is_floating_point() else values).numpy()
    return np.ascontiguousarray(values, dtype=dtype)


def cross_entropy(logits: _Floats, positive: NDArray[np.bool_]) -> _Floats:
    """Compute the binary cross-entropy of every sample in nats, ``float64 [B]``, without loss of precision.

    It is ``-log(sigmoid(x))`` for samples that are ``positive``, ``-log(1 - sigmoid(x))`` for others. ``logits [B]``
    may be infinite.
    """
    return np.maximum(np.where(positive, -logits, logits), 0.0) + np.log1p(np.exp(-np.abs(logits)))


def sigmoid(logits: _Floats) -> _Floats:
    """Compute probabilities of logits in float64, with full relative precision for very negative logits."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)


def binary_entropy(positive: float, negative: float) -> float:
    """Compute the entropy in nats of a binary variable with weights ``positive`` and ``negative``."""
    p, q = positive / (positive + negative), negative / (positive + negative)
    small, large = min(p, q), max(p, q)
    return -(small * math.log(small) + large * math.log1p(-small)) if small > 0 else 0.0


def grouped_auc(
    groups: NDArray[np.int64], scores: _Floats, positive: NDArray[Any], negative: NDArray[Any]
) -> tuple[NDArray[np.int64], _Floats, NDArray[Any], NDArray[Any]]:
    """Compute the AUC of every group; rows are sorted by ``groups``, then ``scores``.

    Integer masses ``positive`` and ``negative`` of rows are counted exactly.

    Returns:
        ``groups [G]``, ``auc [G]`` (NaN with one class), positive mass ``[G]``, negative mass ``[G]``.
    """
    new_group = np.r_[True, groups[1:] != groups[:-1]]
    starts = np.flatnonzero(new_group | np.r_[True, scores[1:] != scores[:-1]])
    positive, negative = np.add.reduceat(positive, starts), np.add.reduceat(negative, starts)
    group_starts = np.flatnonzero(new_group[starts])
    sizes = np.diff(np.r_[group_starts, starts.size])
    before = np.cumsum(negative) - negative
    below = before - np.repeat(before[group_starts], sizes)
    wins = np.add.reduceat(positive * (2 * below + negative), group_starts)
    positives, negatives = np.add.reduceat(positive, group_starts), np.add.reduceat(negative, group_starts)
    auc = np.full(positives.size, math.nan)
    both = (positives > 0) & (negatives > 0)
    auc[both] = wins[both] / 2.0 / positives[both] / negatives[both]
    return groups[starts][group_starts], np.clip(auc, 0.0, 1.0), positives, negatives


class _ScoreTable:
    """Counts of every distinct (group, score, weight) by label: the exact state of ranks."""

    columns = ("groups", "scores", "weights", "positive", "negative")

    def __init__(self) -> None:
        self._table: tuple[NDArray[Any], ...] = (
            np.empty(0, np.int64),
            np.empty(0),
            np.empty(0),
            np.empty(0, np.int64),
            np.empty(0, np.int64),
        )
        self._pending: list[tuple[NDArray[Any], ...]] = []
        self._pending_rows = 0

    def add(self, *columns: NDArray[Any]) -> None:
        self._pending.append(columns)
        self._pending_rows += columns[0].size
        # Waiting until the new rows outnumber the old keeps the total work at n log n.
        if self._pending_rows > max(_COMPACT_AT, self._table[0].size):
            self.compact()

    def compact(self) -> tuple[NDArray[Any], ...]:
        if self._pending:
            rows = [np.concatenate(parts) for parts in zip(self._table, *self._pending, strict=True)]
            keys = [key for key in (rows[2], rows[1], rows[0]) if key.size and (key != key[0]).any()]
            if keys:
                order = np.argsort(keys[0]) if len(keys) == 1 else np.lexsort(keys)
                rows = [row[order] for row in rows]
                differs = np.zeros(order.size, dtype=bool)
                differs[0] = True
                for key in rows[:3]:
                    differs[1:] |= key[1:] != key[:-1]
                starts = np.flatnonzero(differs)
            else:
                starts = np.zeros(min(1, rows[0].size), dtype=np.int64)
            counts = [np.add.reduceat(row, starts) if starts.size else row for row in rows[3:]]
            self._table = (*(row[starts] for row in rows[:3]), *counts)
            self._pending, self._pending_rows = [], 0
        return self._table

    def masses(self) -> tuple[NDArray[np.int64], _Floats, NDArray[Any], NDArray[Any]]:
        """Return groups, scores, positive and negative mass; masses are counts while all weights are equal."""
        groups, scores, weights, positive, negative = self.compact()
        if weights.size and (weights != weights[0]).any():
            return groups, scores, positive * weights, negative * weights
        return groups, scores, positive, negative


class RankingMetrics:
    """NE, AUC, log loss, calibration, GAUC, NDCG, recall and MRR of one task, over a stream.

    NE is the weighted mean cross-entropy divided by the entropy of the weighted base rate of the same samples (He et
    al. 2014, section 2): a constant prediction of the base rate has NE 1, and lower is better. Calibration is the sum
    of predictions divided by the sum of labels. AUC counts ties as one half and weights a pair by the product of its
    weights. GAUC is the mean AUC of the groups, weighted by the weights of their samples (their impressions without
    weights); groups with one class have no AUC and are left out and counted.

    NDCG, recall and MRR are of the first ``ranking_k`` samples of every group by descending score; tied samples are
    taken in random order, of which the expected value is computed (:mod:`cordillera.training.ranking.groups.top_k`).
    They are plain means over the groups with a positive; groups without are left out and counted. Weights do not enter
    them: every sample of a weight above 0 counts once.

    The state takes 40 bytes for every distinct (group, score, weight). With ``auc_bins`` it is bounded.

    Args:
        auc_bins: None for the exact AUC. Otherwise the AUC is read from a histogram with this number of equal steps of
            logit over [-16, 16] and open ends: pairs that share a bin count one half, so the error is at most half
            their share of all pairs, which ``compute`` reports as ``auc_error``. GAUC is then undefined. With weights
            that are not whole numbers, merging binned AUCs is exact only up to rounding. NDCG, recall and MRR are then
            left out.
        ranking_k: Number of samples of a group that count for NDCG, recall and MRR.
    """

    def __init__(self, auc_bins: int | None = None, ranking_k: int = RANKING_K) -> None:
        if auc_bins is not None and auc_bins < 2:
            raise ValueError(f"auc_bins must be at least 2, got {auc_bins}")
        if ranking_k < 1:
            raise ValueError(f"ranking_k must be at least 1, got {ranking_k}")
        self.auc_bins, self.ranking_k = auc_bins, ranking_k
        self.examples = 0
        self.positives = 0
        self._sums = {name: ExactSum() for name in _SUMS}
        self._grouped: bool | None = None
        self._scores = _ScoreTable()
        self._bins = np.zeros((2, auc_bins or 0))

    def update(
        self,
        logits: TensorOrArray,
        labels: TensorOrArray,
        weights: TensorOrArray | None = None,
        groups: TensorOrArray | None = None,
    ) -> None:
        """Add one batch.

        Args:
            logits: ``[B]``, any floating dtype and device; metrics are computed in float64.
            labels: ``[B]`` of zeros and ones.
            weights: ``[B]``, finite and at least 0, or None for ones. Samples of weight 0 count only in ``examples``
                and ``positives``.
            groups: ``int64 [B]`` for the metrics of groups; given in all updates or in none.

        Raises:
            TrainingError: If a logit is NaN; then nothing of the batch is added.
            DataError: If shapes differ, a label is neither 0 nor 1, or a weight is negative or not finite.
        """
        x, y = _numpy(logits), _numpy(labels)
        w = np.ones_like(x) if weights is None else _numpy(weights)
        g = np.zeros(x.shape, np.int64) if groups is None else _numpy(groups, np.int64)
        shapes = {"logits": x.shape, "labels": y.shape, "weights": w.shape, "groups": g.shape}
        if x.ndim != 1 or len(set(shapes.values())) != 1:
            raise DataError(f"one-dimensional arrays of one length are needed, got shapes {shapes}", where="metrics")
        if missing := int(np.isnan(x).sum()):
            first = int(np.flatnonzero(np.isnan(x))[0])
            raise TrainingError(
                f"{missing} of {x.size} logits are NaN, the first at position {first} of the batch",
                where="metrics",
                remedy="lower the learning rate or clip gradients; look for the first step whose loss is not finite",
            )
        positive = y == 1
        if not (positive | (y == 0)).all():
            wrong = int(np.flatnonzero(~(positive | (y == 0)))[0])
            raise DataError(f"labels must be 0 or 1, position {wrong} holds {y[wrong]}", where="metrics")
        acceptable = np.isfinite(w) & (w >= 0)
        if not acceptable.all():
            wrong = int(np.flatnonzero(~acceptable)[0])
            raise DataError(
                f"weights must be finite and not negative, position {wrong} has {w[wrong]}", where="metrics"
            )
        if not x.size:
            return
        if self._grouped is not None and self._grouped != (groups is not None):
            raise DataError("groups must come with every batch or with none", where="metrics")
        self._grouped = groups is not None
        self.examples += x.size
        self.positives += int(positive.sum())
        if not w.all():
            keep = w > 0
            x, w, g, positive = x[keep], w[keep], g[keep], positive[keep]
        x = x + 0.0  # -0.0 and 0.0 are one score
        self._sums["cross_entropy"].add(w * cross_entropy(x, positive))
        self._sums["prediction"].add(w * sigmoid(x))
        self._sums["weight"].add(w)
        self._sums["positive_weight"].add(w[positive])
        self._sums["negative_weight"].add(w[~positive])
        if self.auc_bins is None:
            self._scores.add(g, x, w, positive.astype(np.int64), (~positive).astype(np.int64))
        else:
            step = 2 * _BIN_RANGE / self.auc_bins
            place = ((np.clip(x, -_BIN_RANGE, _BIN_RANGE) + _BIN_RANGE) / step).astype(np.int64)
            place = np.minimum(place, self.auc_bins - 1)
            self._bins[0] += np.bincount(place, weights=w * ~positive, minlength=self.auc_bins)
            self._bins[1] += np.bincount(place, weights=w * positive, minlength=self.auc_bins)

    def merge(self, other: RankingMetrics) -> RankingMetrics:
        """Add the samples of another shard; returns self.

        Raises:
            ValueError: If the two have different ``auc_bins`` or ``ranking_k``.
            DataError: If one has groups and the other has samples without.
        """
        if self.auc_bins != other.auc_bins:
            raise ValueError(f"cannot merge metrics with auc_bins {self.auc_bins} and {other.auc_bins}")
        if self.ranking_k != other.ranking_k:
            raise ValueError(f"cannot merge metrics with ranking_k {self.ranking_k} and {other.ranking_k}")
        if None not in (self._grouped, other._grouped) and self._grouped != other._grouped:
            raise DataError("cannot merge metrics with groups and metrics without", where="metrics")
        self._grouped = other._grouped if self._grouped is None else self._grouped
        self.examples += other.examples
        self.positives += other.positives
        for name in _SUMS:
            self._sums[name].merge(other._sums[name])
        self._scores.add(*other._scores.compact())
        self._bins = self._bins + other._bins
        return self

    def undefined(self) -> dict[str, str]:
        """Return the metrics without a value, with the reasons."""
        reasons: dict[str, str] = {}
        positive, negative = self._sums["positive_weight"].units, self._sums["negative_weight"].units
        if not positive and not negative:
            why = "no examples" if not self.examples else "all weights are 0"
            reasons = dict.fromkeys(("ne", "auc", "log_loss", "calibration", "base_rate"), why)
        elif not positive or not negative:
            why = "no positive labels" if not positive else "no negative labels"
            reasons = {"ne": why, "auc": why} | ({} if positive else {"calibration": why})
        if self.auc_bins is not None:
            reasons["gauc"] = "needs the exact AUC (auc_bins = None)"
        elif not self._grouped:
            reasons["gauc"] = "no groups"
        elif not self._group_aucs()[1].size:
            reasons["gauc"] = "no group with both classes"
        if self._ranks_groups and not self._ranked().ndcg.size:
            reasons |= dict.fromkeys(TOP_K, "no group with a positive label")
        return reasons

    def compute(self) -> dict[str, float]:
        """Compute the metrics so far.

        Returns:
            ``ne``, ``auc``, ``log_loss`` (nats), ``calibration``, ``gauc``, ``base_rate``, ``examples``, ``positives``
            (samples with label 1) and ``weight`` (sum of weights); with groups also ``gauc_groups`` and
            ``gauc_excluded_groups``, ``ndcg``, ``recall``, ``mrr``, the ``ranking_k`` of these, ``ranking_groups`` and
            ``ranking_excluded_groups``; with ``auc_bins`` also ``auc_error``. Undefined metrics are NaN.
        """
        sums = self._sums
        result = {
            "ne": math.nan,
            "auc": math.nan,
            "log_loss": sums["cross_entropy"].ratio(sums["weight"]),
            "calibration": sums["prediction"].ratio(sums["positive_weight"]),
            "gauc": math.nan,
            "base_rate": sums["positive_weight"].ratio(sums["weight"]),
            "examples": float(self.examples),
            "positives": float(self.positives),
            "weight": sums["weight"].value(),
        }
        positive, negative = sums["positive_weight"].value(), sums["negative_weight"].value()
        if positive > 0 and negative > 0:
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                # a class of almost no weight: the entropy is zero as a float, and the ratio overflows
                result["ne"] = float(np.float64(result["log_loss"]) / binary_entropy(positive, negative))
            if self.auc_bins is None:
                _, scores, positives, negatives = self._sorted_by_score()
                none = np.zeros(scores.size, np.int64)
                result["auc"] = float(grouped_auc(none, scores, positives, negatives)[1][0])
            else:
                below = np.cumsum(self._bins[0]) - self._bins[0]
                pairs = self._bins[0].sum() * self._bins[1].sum()
                result["auc"] = float((self._bins[1] * (below + self._bins[0] / 2)).sum() / pairs)
                result["auc_error"] = float((self._bins[0] * self._bins[1]).sum() / 2 / pairs)
        if self._ranks_groups:
            excluded, aucs, masses = self._group_aucs()
            result["gauc_groups"], result["gauc_excluded_groups"] = float(aucs.size), float(excluded)
            if aucs.size:
                result["gauc"] = math.fsum(aucs * masses) / math.fsum(masses)
        return result | self._top_k()

    @property
    def _ranks_groups(self) -> bool:
        return bool(self._grouped) and self.auc_bins is None

    def _ranked(self) -> RankedGroups:
        groups, scores, _, positive, negative = self._scores.compact()
        return rank_groups(groups, scores, positive, negative, self.ranking_k)

    def _top_k(self) -> dict[str, float]:
        """Return the metrics of the first samples of groups; nothing without groups."""
        if not self._ranks_groups:
            return {}
        found = self._ranked()
        count = found.ndcg.size
        result = {name: math.fsum(getattr(found, name)) / count if count else math.nan for name in TOP_K}
        numbers = {"ranking_k": self.ranking_k, "ranking_groups": count, "ranking_excluded_groups": found.excluded}
        return result | {name: float(one) for name, one in numbers.items()}

    def _sorted_by_score(self) -> tuple[NDArray[Any], ...]:
        groups, scores, positive, negative = self._scores.masses()
        if not self._grouped:
            return groups, scores, positive, negative
        order = np.argsort(scores, kind="stable")
        return groups[order], scores[order], positive[order], negative[order]

    def _group_aucs(self) -> tuple[int, _Floats, NDArray[Any]]:
        """Return the number of groups with one class, and AUC and mass of the others."""
        groups, scores, positive, negative = self._scores.masses()
        if not groups.size:
            return 0, np.empty(0), np.empty(0)
        _, aucs, positives, negatives = grouped_auc(groups, scores, positive, negative)
        defined = ~np.isnan(aucs)
        return int((~defined).sum()), aucs[defined], (positives + negatives)[defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as integers, strings and tensors, which load with ``weights_only=True``."""
        table = dict(zip(_ScoreTable.columns, self._scores.compact(), strict=True))
        return {
            "auc_bins": self.auc_bins or 0,
            "examples": self.examples,
            "positives": self.positives,
            "grouped": -1 if self._grouped is None else int(self._grouped),
            "sums": {name: total.state() for name, total in self._sums.items()},
            "bins": torch.from_numpy(self._bins.copy()),
            "scores": {name: torch.from_numpy(column.copy()) for name, column in table.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`.

        Raises:
            CheckpointError: If the state is incomplete, or was saved with other ``auc_bins``.
        """
        try:
            if state["auc_bins"] != (self.auc_bins or 0):
                raise CheckpointError(
                    f"saved with auc_bins {state['auc_bins'] or None}, to be loaded with {self.auc_bins}",
                    where="metrics",
                )
            sums = {name: ExactSum.from_state(state["sums"][name]) for name in _SUMS}
            table = tuple(state["scores"][name].numpy().copy() for name in _ScoreTable.columns)
            bins = state["bins"].numpy().copy()
            counts = state["examples"], state["positives"], state["grouped"]
        except (KeyError, AttributeError, ValueError) as error:
            raise CheckpointError(f"the metrics' state is not complete: {error!r}", where="metrics") from error
        self.examples, self.positives = counts[0], counts[1]
        self._grouped = None if counts[2] < 0 else bool(counts[2])
        self._sums, self._bins = sums, bins
        self._scores = _ScoreTable()
        self._scores.add(*table)


def of_task(
    task: int, logits: TensorOrArray, labels: TensorOrArray, weights: TensorOrArray | None, groups: TensorOrArray | None
) -> tuple[Any, Any, Any, Any]:
    """Return a task's logits and labels, of ``[B, tasks]`` each, with weights and groups, of samples that have a label.

    Missing labels are NaN.
    """
    column = labels[:, task]
    known = ~(column.isnan() if isinstance(column, Tensor) else np.isnan(column))
    if bool(known.all()):
        return logits[:, task], labels[:, task], weights, groups
    weights, groups = (None if one is None else one[known] for one in (weights, groups))
    return logits[known, task], labels[known, task], weights, groups


class ProgressiveMetrics:
    """Metrics of a stream on which a model predicts first and trains afterwards, so that every sample is unseen.

    Call :meth:`update` with the predictions of a batch before the step that trains on it. Windows of equally many
    samples show how quality changes with time; a window may begin and end inside a batch.

    Args:
        tasks: Names of the tasks, in the order of the logits' columns.
        window: Number of samples per window.
        auc_bins: Number of bins of the cumulative metrics (see :class:`RankingMetrics`), whose exact state would grow
            with the stream; windows are exact.
        ranking_k: Number of samples of a group that count for NDCG, recall and MRR of a window.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        window: int = 100_000,
        auc_bins: int | None = 1 << 16,
        ranking_k: int = RANKING_K,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.tasks, self.window, self.ranking_k = tuple(tasks), window, ranking_k
        self.cumulative = {task: RankingMetrics(auc_bins) for task in self.tasks}
        self.windows: list[dict[str, Any]] = []
        self._open = {task: RankingMetrics(ranking_k=ranking_k) for task in self.tasks}
        self._seen = 0

    def update(
        self,
        logits: TensorOrArray,
        labels: TensorOrArray,
        weights: TensorOrArray | None = None,
        groups: TensorOrArray | None = None,
    ) -> list[dict[str, Any]]:
        """Add one batch of predictions, made before training on it; ``logits`` and ``labels`` are ``[B, tasks]``.

        ``weights`` and ``groups`` are those of :meth:`RankingMetrics.update`.

        Returns:
            The windows that this batch completed: ``{"begin", "end", "tasks": {task: metrics}}``, counted in samples.
        """
        x, y = _numpy(logits), _numpy(labels)
        if x.ndim != 2 or x.shape != y.shape or x.shape[1] != len(self.tasks):
            raise DataError(
                f"logits and labels must be [B, {len(self.tasks)}], got {x.shape} and {y.shape}", where="metrics"
            )
        if missing := int(np.isnan(x).sum()):
            raise TrainingError(f"{missing} of {x.size} logits are NaN", where="progressive metrics")
        w = None if weights is None else _numpy(weights)
        g = None if groups is None else _numpy(groups, np.int64)
        done, start = [], 0
        while start < len(x):
            stop = min(len(x), start + self.window - self._seen % self.window)
            for column, task in enumerate(self.tasks):
                weights, groups = (None if one is None else one[start:stop] for one in (w, g))
                part = of_task(column, x[start:stop], y[start:stop], weights, groups)
                self._open[task].update(*part)
                self.cumulative[task].update(*part)
            self._seen += stop - start
            start = stop
            if self._seen % self.window == 0:
                values = {task: metrics.compute() for task, metrics in self._open.items()}
                done.append({"begin": self._seen - self.window, "end": self._seen, "tasks": values})
                self._open = {task: RankingMetrics(ranking_k=self.ranking_k) for task in self.tasks}
        self.windows += done
        return done

    def compute(self) -> dict[str, dict[str, float]]:
        """Compute the metrics of every task over the whole stream so far."""
        return {task: metrics.compute() for task, metrics in self.cumulative.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors."""
        return {
            "tasks": list(self.tasks),
            "window": self.window,
            "seen": self._seen,
            "windows": [dict(entry) for entry in self.windows],
            "cumulative": {task: metrics.state_dict() for task, metrics in self.cumulative.items()},
            "open": {task: metrics.state_dict() for task, metrics in self._open.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`.

        Raises:
            CheckpointError: If the state belongs to other tasks or another window.
        """
        if (tuple(state["tasks"]), state["window"]) != (self.tasks, self.window):
            raise CheckpointError(
                f"saved for tasks {state['tasks']} with window {state['window']}, to be loaded for tasks "
                f"{list(self.tasks)} with window {self.window}",
                where="metrics",
            )
        self._seen, self.windows = state["seen"], [dict(entry) for entry in state["windows"]]
        for task in self.tasks:
            self.cumulative[task].load_state_dict(state["cumulative"][task])
            self._open[task].load_state_dict(state["open"][task])
