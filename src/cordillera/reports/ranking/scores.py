"""Sections of a ranking report on scores: calibration, distribution, segments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from cordillera.reports.charts import Chart, interval_strip, nice_ticks, padded
from cordillera.reports.page import (
    figure,
)
from cordillera.reports.ranking.material import SHOWN_SEGMENTS, Material, interval_text
from cordillera.training.ranking.evaluation import Evaluation, Segment, TaskEvaluation


def scores_section(material: Material, evaluation: Evaluation) -> str:
    """HTML of calibration and distribution of scores; empty without any."""
    blocks = []
    for task, result in evaluation.tasks.items():
        charts = [chart for chart in (_calibration(material, result), _histogram(material, result)) if chart]
        if charts:
            heading = f"<h3>{escape(task)}</h3>" if len(evaluation.tasks) > 1 else ""
            blocks.append(f'{heading}<div class="charts">{"".join(charts)}</div>')
    return f"<section><h2>Calibration and scores</h2>{''.join(blocks)}</section>" if blocks else ""


def _calibration(material: Material, result: TaskEvaluation) -> str:
    bins = result.calibration
    if not bins:
        return ""
    top = min(1.0, 1.08 * max(max(entry.high, entry.prediction) for entry in bins))
    outside = sum(1 for entry in bins if not entry.low <= entry.prediction <= entry.high)
    text = f"{outside} of {len(bins)} bins have a mean prediction outside the interval of their rate."
    chart = Chart(
        "Calibration", text, (0.0, top), (0.0, top), x_label="mean prediction", y_label="observed rate",
        x_ticks=[(tick, f"{tick:g}") for tick in nice_ticks(0.0, top)],
    )  # fmt: skip
    chart.diagonal()
    xs = [entry.prediction for entry in bins]
    chart.whiskers(xs, [entry.low for entry in bins], [entry.high for entry in bins])
    chart.dots(xs, [entry.rate for entry in bins])
    caption = f"{len(bins)} bins of equal weight, 95 % Wilson intervals; dashed: perfect calibration. {text}"
    return material.pictures.draw("Calibration", chart, caption)


def _histogram(material: Material, result: TaskEvaluation) -> str:
    histogram = result.histogram
    if histogram is None:
        return ""
    densities = []
    for side in (histogram.negative, histogram.positive):
        total = sum(side)
        densities.append([100 * weight / total for weight in side] if total else [0.0] * len(side))
    low, high = histogram.edges[0], histogram.edges[-1]
    ticks = _probability_ticks(low, high)
    chart = Chart(
        "Scores by class",
        "Distribution of predicted probabilities for negative and positive examples, on a logit scale.",
        (low, high),
        (0.0, 1.08 * max(max(densities[0]), max(densities[1]), 1e-9)),
        x_label="predicted probability (logit scale)",
        y_label="% of class",
        x_ticks=ticks,
    )
    chart.steps(histogram.edges, densities[0], "s0")
    chart.steps(histogram.edges, densities[1], "s1")
    return material.pictures.draw(
        "Scores by class",
        chart,
        "Share of each class.",
        '<span class="key s0"></span>negative<span class="key s1"></span>positive',
    )


def _probability_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return a few round probabilities at their logits, far enough apart for their texts."""
    candidates = [
        0.5,
        0.1,
        0.9,
        0.01,
        0.99,
        0.001,
        0.999,
        1e-4,
        0.9999,
        1e-5,
        1e-6,
        0.3,
        0.7,
        0.2,
        0.8,
        0.03,
        0.05,
        0.97,
    ]
    candidates += [0.4, 0.6, 0.45, 0.55, 0.15, 0.25, 0.35, 0.65, 0.75, 0.85]
    chosen: list[tuple[float, str]] = []
    for probability in candidates:
        at = math.log(probability / (1 - probability))
        if low <= at <= high and all(abs(at - other) > (high - low) / 9 for other, _ in chosen):
            chosen.append((at, f"{probability:g}"))
    return sorted(chosen)


def segments_section(evaluation: Evaluation) -> str:
    """HTML of the metrics of segments; empty without any."""
    if not evaluation.segments:
        return ""
    parts = []
    for feature, values in evaluation.segments.items():
        parts.append(f"<h3>{escape(feature)}</h3>")
        for position, task in enumerate(evaluation.tasks):
            table = _segment_table(evaluation, task, values, named=len(evaluation.tasks) > 1)
            if position == 0:
                parts.append(table)
            else:
                parts.append(f"<details><summary>Task {escape(task)}</summary>{table}</details>")
    return (
        "<section><h2>Segments</h2><p>Where the model does better and worse than on the whole split. The strips show "
        "the interval; the dashed line is the whole split. Segments marked few have too few samples of one class to "
        "judge."
        f"</p>{''.join(parts)}</section>"
    )


def _segment_table(evaluation: Evaluation, task: str, values: Mapping[str, Segment], *, named: bool) -> str:
    overall = evaluation.tasks[task].metrics
    limits = {}
    for name in ("ne", "auc"):
        ends = [overall.get(name, math.nan)]
        for segment in values.values():
            if not segment.small:
                ends += [segment.tasks[task].get(name, math.nan), *segment.intervals.get(task, {}).get(name, ())]
        limits[name] = padded(ends, 0.08)
    rows = [_segment_row(evaluation, task, value, segment, overall, limits) for value, segment in values.items()]
    head = (
        '<thead><tr><th scope="col">Value</th><th scope="col">Examples</th><th scope="col">Base rate</th>'
        '<th scope="col">NE</th><th scope="col" class="strip"><span class="range">and interval</span></th>'
        '<th scope="col">AUC</th><th scope="col" class="strip"><span class="range">and interval</span></th>'
        '<th scope="col">Calibration</th></tr></thead>'
    )
    caption = f"<caption>Task {escape(task)}</caption>" if named else ""
    first, rest = rows[:SHOWN_SEGMENTS], rows[SHOWN_SEGMENTS:]
    table = f'<div class="scroll" tabindex="0"><table>{caption}{head}<tbody>{"".join(first)}</tbody></table></div>'
    if rest:
        more = f'<div class="scroll" tabindex="0"><table>{head}<tbody>{"".join(rest)}</tbody></table></div>'
        table += f"<details><summary>{len(rest)} smaller segments</summary>{more}</details>"
    return table


def _segment_row(
    evaluation: Evaluation,
    task: str,
    value: str,
    segment: Segment,
    overall: Mapping[str, float],
    limits: Mapping[str, tuple[float, float]],
) -> str:
    metrics, intervals = segment.tasks[task], segment.intervals.get(task, {})
    share = segment.examples / evaluation.examples if evaluation.examples else 0.0
    cells = [
        f'<td>{segment.examples:,}<span class="share" aria-hidden="true"><i style="width:{share:.1%}"></i></span></td>',
        f"<td>{figure(metrics.get('base_rate', math.nan), 3)}</td>",
    ]
    for name in ("ne", "auc"):
        value_ = metrics.get(name, math.nan)
        pair, reference = intervals.get(name), overall.get(name, math.nan)
        strip = interval_strip(value_, pair, reference, limits[name]) if math.isfinite(reference) else ""
        spoken = f' title="{interval_text(pair)}"' if pair else ""
        cells += [f"<td>{figure(value_)}</td>", f'<td class="strip"{spoken}>{strip}</td>']
    cells.append(f"<td>{figure(metrics.get('calibration', math.nan), 3)}</td>")
    tag = ' <span class="tag">few</span>' if segment.small else ""
    style = ' class="few"' if segment.small else ""
    shown = escape(value) if value else "(blank)"
    return f'<tr{style}><th scope="row" title="{escape(value)}">{shown}{tag}</th>{"".join(cells)}</tr>'
