"""Evaluation of a split in one pass: metrics with intervals, calibration, score histogram and segments."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cordillera.data.ranking.features import RankingBatch
from cordillera.errors import DataError, TrainingError
from cordillera.files import parse_json
from cordillera.intervals import wilson_interval
from cordillera.numbers import fixed
from cordillera.run import RunStatus
from cordillera.training.ranking.metric_intervals import interval_unit, metric_intervals
from cordillera.training.ranking.metrics import RANKING_K, RankingMetrics, of_task, sigmoid

SegmentColumns: TypeAlias = Mapping[str, tuple[Any, Sequence[str]]]
SegmentFunction: TypeAlias = Callable[[RankingBatch], Mapping[str, Sequence[Any]]]

_Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class CalibrationBin:
    """Bin of samples with neighbouring scores.

    Attributes:
        weight: Sum of the samples' weights.
        prediction: Weighted mean probability.
        rate: Weighted mean label, with its Wilson 95 % interval from ``low`` to ``high``.
    """

    count: int
    weight: float
    prediction: float
    rate: float
    low: float
    high: float


@dataclass(frozen=True)
class ScoreHistogram:
    """Weights of the samples of either class (label 0 or 1) in bins of equal width in logits, between ``edges``."""

    edges: list[float]
    negative: list[float]
    positive: list[float]


@dataclass(frozen=True)
class TaskEvaluation:
    """Evaluation of one task.

    Attributes:
        metrics: Result of :meth:`RankingMetrics.compute`; NaN means undefined.
        undefined: Reason for each metric without a value.
        calibration: Bins of equal weight in ascending order of score; equal scores share a bin.
        histogram: Histogram of scores; None without samples.
    """

    metrics: dict[str, float]
    undefined: dict[str, str] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    calibration: list[CalibrationBin] = field(default_factory=list)
    histogram: ScoreHistogram | None = None


@dataclass(frozen=True)
class Segment:
    """Metrics and intervals, by task, of the samples that share a value of a feature.

    Attributes:
        small: Whether some task has too few samples of either class for meaningful metrics.
    """

    examples: int
    small: bool
    tasks: dict[str, dict[str, float]]
    intervals: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Result of :func:`evaluate`.

    Attributes:
        seconds: Wall time of the pass, including loading.
        examples_per_second: Samples evaluated per second after the first batch, which waits for what starts with it;
            NaN if there is one batch only.
        segments: Metrics by feature and value, largest segments first.
        level: Confidence level of the intervals.
        unit: Unit that the intervals treat as independent: ``sample`` or ``group``.
        step: Number of training steps behind the evaluated weights; None if unknown.
        steps: Number of steps of the whole training; None if unknown.
        teacher: Metrics by task of a teacher's scores, on the samples that have one; empty without a teacher.
    """

    split: str
    examples: int
    seconds: float
    examples_per_second: float
    tasks: dict[str, TaskEvaluation]
    segments: dict[str, dict[str, Segment]] = field(default_factory=dict)
    level: float = 0.95
    unit: str = "sample"
    step: int | None = None
    steps: int | None = None
    teacher: dict[str, dict[str, float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        numbers = {
            task: [fixed(one.get(name, math.nan)) for name in ("ne", "auc")] for task, one in self.metrics().items()
        }
        tasks = (f"{task} NE {ne}, AUC {auc}" for task, (ne, auc) in numbers.items())
        return f"<{type(self).__name__} of {self.split}, {self.examples:,} examples: {'; '.join(tasks)}>"

    def age(self, status: RunStatus | None, *, keeps_best: bool) -> str:
        """Return a warning that a run of this ``status`` was trained on after this evaluation, else an empty text.

        With ``keeps_best``, the run's weights may be older than the last ones, and there is no warning.
        """
        if self.step is None or status is None or keeps_best or self.step == status.step:
            return ""
        return (
            f"The evaluation is of the weights after step {self.step:,}, and training came to step {status.step:,} "
            "since: `cordillera evaluate` makes a new one."
        )

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics by task name."""
        return {task: dict(result.metrics) for task, result in self.tasks.items()}

    def to_json(self) -> str:
        """Return strict JSON; NaN becomes null, infinities the strings ``Infinity`` and ``-Infinity``."""
        return json.dumps(jsonable(asdict(self)), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Evaluation:
        """Read the output of :meth:`to_json`.

        Raises:
            DataError: If the text is not an evaluation.
        """
        return cls.from_object(parse_json(text, "evaluation"), "evaluation")

    @classmethod
    def from_object(cls, raw: Any, where: str) -> Evaluation:
        """Create an evaluation from ``raw``, the parsed output of :meth:`to_json`; ``where`` is its place for errors.

        Raises:
            DataError: If the value is not an evaluation.
        """
        try:
            return cls(
                split=_text(raw["split"]),
                examples=_count(raw["examples"]),
                seconds=number(raw["seconds"]),
                examples_per_second=number(raw["examples_per_second"]),
                tasks={name: _task(task) for name, task in raw["tasks"].items()},
                segments={
                    feature: {value: _segment(segment, raw["tasks"]) for value, segment in values.items()}
                    for feature, values in raw["segments"].items()
                },
                level=number(raw["level"]),
                unit=_text(raw["unit"]),
                step=None if raw.get("step") is None else _count(raw["step"]),
                steps=None if raw.get("steps") is None else _count(raw["steps"]),
                teacher={_text(task): _numbers(values) for task, values in raw.get("teacher", {}).items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError, DataError) as error:
            what = error.what if isinstance(error, DataError) else repr(error)
            raise DataError(
                f"is not an evaluation: {what}", where=where, remedy="write it again with `cordillera evaluate`"
            ) from error


def jsonable(value: Any) -> Any:
    """Replace values that strict JSON lacks: NaN by null, infinities by ``Infinity`` and ``-Infinity``."""
    if isinstance(value, dict):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def number(value: Any) -> float:
    """Read a number that :func:`jsonable` wrote.

    Raises:
        DataError: If the value is not such a number, or its magnitude exceeds 1e300.
    """
    if value is None:
        return math.nan
    if value in ("Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or 1e300 < abs(value) < math.inf:
        raise DataError(f"{str(value)[:40]!r} is no number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{str(value)[:40]!r} is no text")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise DataError(f"{str(value)[:40]!r} is no count")
    return value


def _task(task: Mapping[str, Any]) -> TaskEvaluation:
    bins = [{**_numbers(entry), "count": _count(entry["count"])} for entry in task["calibration"]]
    histogram = None
    if task["histogram"] is not None:
        lists = {name: [number(one) for one in task["histogram"][name]] for name in ("edges", "negative", "positive")}
        histogram = ScoreHistogram(**lists)
        size = len(histogram.edges) - 1
        if size < 1 or len(histogram.negative) != size or len(histogram.positive) != size:
            raise DataError("a histogram needs one edge more than bins")
    return TaskEvaluation(
        metrics=_numbers(task["metrics"]),
        undefined={_text(name): _text(why) for name, why in task["undefined"].items()},
        intervals=_pairs(task["intervals"]),
        calibration=[CalibrationBin(**entry) for entry in bins],  # type: ignore[arg-type]
        histogram=histogram,
    )


def _segment(segment: Mapping[str, Any], tasks: Iterable[str]) -> Segment:
    return Segment(
        examples=_count(segment["examples"]),
        small=bool(segment["small"]),
        tasks={task: _numbers(segment["tasks"][task]) for task in tasks},
        intervals={task: _pairs(pairs) for task, pairs in segment["intervals"].items()},
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value if isinstance(value, int) and number(value) == value else number(value)
        for name, value in values.items()
    }


def _pairs(values: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    return {name: (number(low), number(high)) for name, (low, high) in values.items()}


def evaluate(
    score: Callable[[RankingBatch], Tensor],
    loader: Iterable[RankingBatch],
    tasks: Sequence[str],
    *,
    split: str = "test",
    segments: SegmentColumns | SegmentFunction | None = None,
    level: float = 0.95,
    calibration_bins: int = 20,
    histogram_bins: int = 40,
    small_segment: int = 50,
    most_segments: int = 50,
    ranking_k: int = RANKING_K,
) -> Evaluation:
    """Score every batch of a ``loader`` with labels, and compute metrics of the scores.

    All logits are held in memory: 4 bytes per sample and task, and about 17 bytes per sample of bookkeeping.

    Args:
        score: Function that returns logits ``[B, tasks]`` of a batch. It runs without autograd; the caller sets
            evaluation mode and the device.
        tasks: Names of the columns of the logits.
        split: Name of the split, for the record.
        segments: Either ``(codes, names)`` by feature, where ``codes`` holds a position in ``names`` for every row of
            the data set (read at ``batch.rows``, or in order if batches have none); or a function of a batch that
            returns one value per sample by feature.
        level: Confidence level of the intervals.
        calibration_bins: Number of bins of equal weight.
        histogram_bins: Number of bins of equal width in logits.
        small_segment: Number of samples of either class in some task below which a segment is marked small.
        most_segments: Number of a feature's most frequent values that are listed; the rest is one segment, ``(N
            others)``.
        ranking_k: Number of samples of a group that count for NDCG, recall and MRR.

    Returns:
        The evaluation. An empty loader gives undefined metrics, not an error.

    Raises:
        TrainingError: If logits are not finite; the message names the task, their number and the first rows.
        DataError: If a batch has no labels, or shapes do not fit.
    """
    samples, named, seconds, speed = _score_all(score, loader, tasks, split, segments if callable(segments) else None)
    size = len(samples.rows)
    results = {
        task: _evaluate_task(*samples.of_task(t), level, calibration_bins, histogram_bins, ranking_k)
        for t, task in enumerate(tasks)
    }
    broken_down = {
        feature: _evaluate_segments(codes, names, samples, tasks, level, small_segment, most_segments, ranking_k)
        for feature, (codes, names) in _segment_codes(segments, named, samples.rows, split).items()
    }
    return Evaluation(
        split=split,
        examples=size,
        seconds=seconds,
        examples_per_second=speed,
        tasks=results,
        segments=broken_down,
        level=level,
        unit=interval_unit(samples.groups),
        teacher=_metrics_of_teacher(samples, tasks, ranking_k),
    )


def _metrics_of_teacher(samples: _Samples, tasks: Sequence[str], ranking_k: int) -> dict[str, dict[str, float]]:
    """Return the metrics of a teacher's scores by task; tasks without any are left out."""
    found = {}
    for place, task in enumerate(tasks if samples.teacher is not None else ()):
        assert samples.teacher is not None
        known = samples.take(np.flatnonzero(~np.isnan(samples.teacher[:, place])))
        if len(known.rows) and known.teacher is not None:
            metrics = RankingMetrics(ranking_k=ranking_k)
            metrics.update(*known._replace(logits=known.teacher).of_task(place))
            found[task] = metrics.compute()
    return found


class _Samples(NamedTuple):
    """Scored samples: logits and labels ``[B, tasks]``, weights and groups ``[B]`` or None, rows of the data set.

    The logits of a teacher are ``[B, tasks]``, NaN where it has none, or None.
    """

    logits: NDArray[Any]
    labels: NDArray[Any]
    weights: _Floats | None
    groups: NDArray[Any] | None
    rows: NDArray[np.int64]
    teacher: NDArray[Any] | None = None

    def of_task(self, task: int) -> tuple[_Floats, NDArray[Any], _Floats | None, NDArray[Any] | None]:
        """Return the samples that have a label of a task."""
        logits, labels, weights, groups = of_task(task, self.logits, self.labels, self.weights, self.groups)
        return logits.astype(np.float64), labels, weights, groups

    def take(self, chosen: NDArray[np.int64]) -> _Samples:
        return _Samples(*(None if column is None else column[chosen] for column in self))  # type: ignore[arg-type]


def _score_all(
    score: Callable[[RankingBatch], Tensor],
    loader: Iterable[RankingBatch],
    tasks: Sequence[str],
    split: str,
    segments: SegmentFunction | None,
) -> tuple[_Samples, dict[str, list[Any]], float, float]:
    """Score every batch; return the samples, the values of ``segments`` by feature, the seconds of the pass and the
    samples a second.
    """
    began = time.perf_counter()
    warm, unmeasured = began, 0
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in _Samples._fields}
    named: dict[str, list[Any]] = {}
    seen = 0
    with torch.no_grad():
        for batch in loader:
            size = len(batch)
            logits = score(batch)
            if batch.labels is None:
                raise DataError("the batches have no labels to compare with", where=f"evaluation on {split}")
            if tuple(logits.shape) != (size, len(tasks)) or tuple(batch.labels.shape) != (size, len(tasks)):
                raise DataError(
                    f"logits and labels must be [{size}, {len(tasks)}] for tasks {list(tasks)}, "
                    f"got {tuple(logits.shape)} and {tuple(batch.labels.shape)}",
                    where=f"evaluation on {split}",
                )
            parts["logits"].append(logits.detach().cpu().to(_keep(logits.dtype)).numpy())
            parts["labels"].append(batch.labels.cpu().numpy())
            if batch.weights is not None:
                parts["weights"].append(batch.weights.cpu().to(torch.float64).numpy())
            if batch.groups is not None:
                parts["groups"].append(batch.groups.cpu().numpy())
            if batch.teacher is not None:
                parts["teacher"].append(batch.teacher.cpu().numpy())
            rows = np.arange(seen, seen + size) if batch.rows is None else batch.rows.cpu().numpy()
            parts["rows"].append(rows)
            if segments is not None:
                for feature, values in segments(batch).items():
                    named.setdefault(feature, []).extend(values)
            seen += size
            if seen == size:
                warm, unmeasured = time.perf_counter(), size
    ended = time.perf_counter()
    seconds, speed = ended - began, (seen - unmeasured) / (ended - warm) if seen > unmeasured else math.nan
    samples = _Samples(
        np.concatenate([np.empty((0, len(tasks)), np.float32), *parts["logits"]]),
        np.concatenate([np.empty((0, len(tasks)), np.float32), *parts["labels"]]),
        None,
        None,
        np.concatenate([np.empty(0, np.int64), *parts["rows"]]),
    )
    _refuse_non_finite(samples.logits, samples.rows, tasks, split)
    weights, groups, teacher = (_optional(parts[name], seen, name, split) for name in ("weights", "groups", "teacher"))
    return samples._replace(weights=weights, groups=groups, teacher=teacher), named, seconds, speed


def _keep(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _optional(chunks: list[NDArray[Any]], size: int, name: str, split: str) -> NDArray[Any] | None:
    if not chunks:
        return None
    whole = np.concatenate(chunks)
    if len(whole) != size:
        raise DataError(f"{name} must come with every batch or with none", where=f"evaluation on {split}")
    return whole


def _refuse_non_finite(logits: NDArray[Any], rows: NDArray[Any], tasks: Sequence[str], split: str) -> None:
    bad = ~np.isfinite(logits)
    if not bad.any():
        return
    details = []
    for t, task in enumerate(tasks):
        if count := int(bad[:, t].sum()):
            first = rows[bad[:, t]][:5].tolist()
            listing = ", ".join(map(str, first)) + (", ..." if count > 5 else "")
            details.append(f"{count} of task '{task}' (rows {listing})")
    raise TrainingError(
        f"{int(bad.sum())} of {logits.size} logits are NaN or infinite: " + "; ".join(details),
        where=f"evaluation on {split}",
        remedy="look for the first step whose loss or gradient norm is not finite in metrics.jsonl; lower the learning "
        "rate, clip gradients, or resume from an earlier checkpoint",
    )


def _evaluate_task(
    logits: _Floats,
    labels: NDArray[Any],
    weights: _Floats | None,
    groups: NDArray[Any] | None,
    level: float,
    calibration_bins: int,
    histogram_bins: int,
    ranking_k: int,
) -> TaskEvaluation:
    metrics = RankingMetrics(ranking_k=ranking_k)
    metrics.update(logits, labels, weights, groups)
    positive = labels == 1
    w = np.ones(logits.size) if weights is None else weights
    return TaskEvaluation(
        metrics=metrics.compute(),
        undefined=metrics.undefined(),
        intervals=metric_intervals(logits, positive, w, groups, level, ranking_k),
        calibration=calibration_table(logits, positive, w, calibration_bins),
        histogram=score_histogram(logits, positive, w, histogram_bins),
    )


def calibration_table(
    logits: _Floats, positive: NDArray[np.bool_], weights: _Floats, bins: int = 20
) -> list[CalibrationBin]:
    """Compare predicted probabilities with observed rates in bins of equal weight, in ascending order of score.

    ``logits`` (finite), ``positive`` and ``weights`` (at least 0) are ``[B]``. There are fewer than ``bins`` bins if
    equal scores, which share a bin, fill one.
    """
    keep = weights > 0
    logits, positive, weights = logits[keep], positive[keep], weights[keep]
    if not logits.size:
        return []
    _, place = np.unique(logits, return_inverse=True)
    mass = np.bincount(place, weights=weights)
    middle = (np.cumsum(mass) - mass / 2) / mass.sum()
    bin_of_score = np.minimum((middle * bins).astype(np.int64), bins - 1)
    chosen = bin_of_score[place]
    sums = [
        np.bincount(chosen, weights=values, minlength=bins)
        for values in (np.ones_like(weights), weights, weights * sigmoid(logits), weights * positive, weights**2)
    ]
    table = []
    for count, weight, predicted, ones, squares in zip(*(column.tolist() for column in sums), strict=True):
        if count:
            low, high = wilson_interval(ones / weight, weight * weight / squares)
            table.append(CalibrationBin(int(count), weight, predicted / weight, ones / weight, low, high))
    return table


def score_histogram(
    logits: _Floats, positive: NDArray[np.bool_], weights: _Floats, bins: int = 40
) -> ScoreHistogram | None:
    """Compute the histogram of finite ``logits [B]`` by class (``positive [B]``) in ``bins`` bins of equal width.

    Samples count by their ``weights [B]``. Without samples, the result is None.
    """
    if not logits.size:
        return None
    low, high = float(logits.min()), float(logits.max())
    if high - low < 1e-6:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, bins + 1)
    counts = [np.histogram(logits[side], edges, weights=weights[side])[0] for side in (~positive, positive)]
    return ScoreHistogram(edges.tolist(), counts[0].tolist(), counts[1].tolist())


def _segment_codes(
    segments: SegmentColumns | SegmentFunction | None, named: dict[str, list[Any]], rows: NDArray[Any], split: str
) -> dict[str, tuple[NDArray[np.int64], list[str]]]:
    result: dict[str, tuple[NDArray[np.int64], list[str]]] = {}
    if segments is None:
        return result
    if callable(segments):
        for feature, values in named.items():
            if len(values) != rows.size:
                raise DataError(
                    f"segment '{feature}' has {len(values)} values for {rows.size} samples",
                    where=f"evaluation on {split}",
                )
            found, places = np.unique(np.array([str(value) for value in values], dtype=object), return_inverse=True)
            result[feature] = places.astype(np.int64), [str(value) for value in found]
        return result
    for feature, (column, names) in segments.items():
        codes = np.asarray(column)
        if rows.size and (int(rows.max()) >= codes.size or int(rows.min()) < 0):
            raise DataError(
                f"segment '{feature}' describes {codes.size} rows, but row {int(rows.max())} was evaluated",
                where=f"evaluation on {split}",
            )
        chosen = codes[rows].astype(np.int64)
        if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(names):
            raise DataError(
                f"segment '{feature}' has {len(names)} names, but codes {int(chosen.min())} to {int(chosen.max())}",
                where=f"evaluation on {split}",
            )
        result[feature] = chosen, [str(name) for name in names]
    return result


def _evaluate_segments(
    codes: NDArray[np.int64],
    names: list[str],
    samples: _Samples,
    tasks: Sequence[str],
    level: float,
    small: int,
    most: int,
    ranking_k: int,
) -> dict[str, Segment]:
    counts = np.bincount(codes, minlength=len(names))
    ranking = [int(code) for code in np.argsort(-counts, kind="stable") if counts[code]]
    listed, rest = ranking[:most], ranking[most:]
    if len(rest) == 1:
        listed, rest = ranking, []
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(counts)
    members: dict[str, NDArray[np.int64]] = {}
    for code in listed:
        name = names[code] if names[code] not in members else f"{names[code]} [{code}]"
        members[name] = order[ends[code] - counts[code] : ends[code]]
    if rest:
        members[f"({len(rest)} others)"] = np.flatnonzero(np.isin(codes, rest))
    result = {}
    for name, chosen in members.items():
        metrics, intervals, few = {}, {}, False
        own = samples.take(chosen)
        for t, task in enumerate(tasks):
            x, y, w, g = own.of_task(t)
            streaming = RankingMetrics(ranking_k=ranking_k)
            streaming.update(x, y, w, g)
            metrics[task] = streaming.compute()
            weights = np.ones(x.size) if w is None else w
            intervals[task] = metric_intervals(x, y == 1, weights, g, level, ranking_k)
            few |= bool(min((y == 1).sum(), (y == 0).sum()) < small)
        result[name] = Segment(int(chosen.size), few, metrics, intervals)
    return result
