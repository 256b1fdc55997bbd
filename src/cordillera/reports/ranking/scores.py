"""Calibration, distribution and segments of a ranking model's scores, for its report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cordillera.numbers import fixed
from cordillera.reports.charts import Axis, Chart, Figure, interval_strip, nice_ticks, padded
from cordillera.reports.ranking.material import interval_text
from cordillera.training.ranking.evaluation import Evaluation, Segment, TaskEvaluation

_PROBABILITIES = (  # the first ones are preferred as ticks
    0.5, 0.1, 0.9, 0.01, 0.99, 0.001, 0.999, 1e-4, 0.9999, 1e-5, 1e-6, 0.3, 0.7, 0.2, 0.8, 0.03, 0.05, 0.97,
    0.4, 0.6, 0.45, 0.55, 0.15, 0.25, 0.35, 0.65, 0.75, 0.85,
)  # fmt: skip


def scores(evaluation: Evaluation | None) -> dict[str, list[Figure]]:
    """Return charts of calibration and distribution of scores by task; tasks without any are left out."""
    tasks = evaluation.tasks if evaluation is not None else {}
    drawn = {task: [one for one in (_calibration(result), _histogram(result)) if one] for task, result in tasks.items()}
    return {task: charts for task, charts in drawn.items() if charts}


def _calibration(result: TaskEvaluation) -> Figure | None:
    bins = result.calibration
    if not bins:
        return None
    top = min(1.0, 1.08 * max(max(entry.high, entry.prediction) for entry in bins))
    outside = sum(1 for entry in bins if not entry.low <= entry.prediction <= entry.high)
    text = f"{outside} of {len(bins)} bins have a mean prediction outside the interval of their rate."
    if len(bins) == 1:
        said = f"mean prediction {fixed(bins[0].prediction)}, observed rate {fixed(bins[0].rate)}"
        return Figure("Calibration", None, text, told=said)
    x = Axis((0.0, top), [(tick, f"{tick:g}") for tick in nice_ticks(0.0, top)])
    chart = Chart("Calibration", text, x, Axis((0.0, top)), ("mean prediction", "observed rate"))
    chart.diagonal()
    xs = [entry.prediction for entry in bins]
    chart.whiskers(xs, [entry.low for entry in bins], [entry.high for entry in bins])
    chart.dots(xs, [entry.rate for entry in bins])
    caption = f"{len(bins)} quantile bins, 95 % Wilson intervals; dashed: perfect calibration. {text}"
    return Figure("Calibration", chart, caption)


def _histogram(result: TaskEvaluation) -> Figure | None:
    histogram = result.histogram
    if histogram is None:
        return None
    low, high = histogram.edges[0], histogram.edges[-1]
    sides = [[100 * weight / (sum(side) or 1) for weight in side] for side in (histogram.negative, histogram.positive)]
    chart = Chart(
        "Scores by class",
        "Distribution of predicted probabilities for negative and positive examples, on a logit scale.",
        Axis((low, high), _probability_ticks(low, high)),
        Axis((0.0, 1.08 * max(*sides[0], *sides[1], 1e-9))),
        ("predicted probability (logit scale)", "% of class"),
    )
    chart.steps(histogram.edges, sides[0], "s0")
    chart.steps(histogram.edges, sides[1], "s1")
    return Figure("Scores by class", chart, "Share of each class.", [("s0", "negative"), ("s1", "positive")])


def _probability_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return a few round probabilities at their logits, far enough apart for their texts."""
    chosen: list[tuple[float, str]] = []
    for probability in _PROBABILITIES:
        at = math.log(probability / (1 - probability))
        if low <= at <= high and all(abs(at - other) > (high - low) / 9 for other, _ in chosen):
            chosen.append((at, f"{probability:g}"))
    if len(chosen) < 2:
        ends = [1 / (1 + math.exp(-end)) for end in (max(low, -700.0), min(high, 700.0))]
        chosen = [(math.log(one / (1 - one)), f"{one:g}") for one in nice_ticks(*ends) if 0 < one < 1]
    return sorted(chosen)


def segments(evaluation: Evaluation | None) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return rows of the table of segments by feature and task, the largest segments first."""
    if evaluation is None:
        return {}
    return {
        feature: {task: _rows(evaluation, task, values) for task in evaluation.tasks}
        for feature, values in evaluation.segments.items()
    }


def _rows(evaluation: Evaluation, task: str, values: Mapping[str, Segment]) -> list[dict[str, Any]]:
    overall = evaluation.tasks[task].metrics
    limits = {}
    for name in ("ne", "auc"):
        ends = [overall.get(name, math.nan)]
        for segment in values.values():
            if not segment.small:
                ends += [segment.tasks[task].get(name, math.nan), *segment.intervals.get(task, {}).get(name, ())]
        limits[name] = padded(ends, 0.08)
    rows = []
    for value, segment in values.items():
        metrics, intervals = segment.tasks[task], segment.intervals.get(task, {})
        cells = []
        for name in ("ne", "auc"):
            at, pair, reference = metrics.get(name, math.nan), intervals.get(name), overall.get(name, math.nan)
            strip = interval_strip(at, pair, reference, limits[name]) if math.isfinite(reference) else ""
            cells.append((fixed(at), interval_text(pair), strip))
        rows.append(
            {
                "value": value,
                "is_small": segment.small,
                "examples": segment.examples,
                "share": segment.examples / evaluation.examples if evaluation.examples else 0.0,
                "base_rate": fixed(metrics.get("base_rate", math.nan), 3),
                "metrics": cells,
                "calibration": fixed(metrics.get("calibration", math.nan), 3),
            }
        )
    return rows
