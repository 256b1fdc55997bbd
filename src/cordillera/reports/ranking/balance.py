"""What balancing did to the tasks of a ranking run: magnitudes, factors and cosines of their gradients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cordillera.reports.charts import Axis, Figure, Series, figure
from cordillera.reports.page import part
from cordillera.reports.ranking.material import Material
from cordillera.training.ranking.evaluation import number

_COLOURS = 4
_OPPOSED = -0.05  # mean cosine below which tasks are said to conflict


def balance(material: Material) -> dict[str, Any]:
    """Return the text and the charts of the balance of tasks; empty if tasks were not balanced."""
    records = [record for record in material.train if isinstance(record.get("balance"), dict)]
    if not records:
        return {}
    magnitudes, factors = _series(records, "magnitudes"), _series(records, "factors")
    cosines = {pair: values for pair, values in _series(records, "cosines").items() if _mean(values) is not None}
    opposed = sorted(cosines, key=lambda pair: _mean(cosines[pair]) or 0.0)
    xs, x = [record["examples"] for record in records], ("training examples",)
    charts: list[Figure | None] = []
    for title, found, label, caption in (
        ("Magnitudes of gradients", magnitudes, "norm", "Moving averages, on the representation that tasks share."),
        ("Factors of gradients", factors, "factor", "What each task's gradient is multiplied with; 1 is a plain sum."),
    ):
        for start in range(0, len(found), _COLOURS):
            some = list(found.items())[start : start + _COLOURS]
            lines = [Series(task, f"s{place}", xs, values) for place, (task, values) in enumerate(some)]
            axis = Axis.of_progress(value for _, values in some for value in values)
            charts.append(figure(title, lines, (*x, label), caption, y=axis))
    lines = [Series(pair, f"s{place}", xs, cosines[pair]) for place, pair in enumerate(opposed[:_COLOURS])]
    caption = "Below 0, a step for one task alone makes the other worse."
    if len(opposed) > _COLOURS:
        caption += f" The {_COLOURS} most opposed of {len(opposed)} pairs."
    most = max([0.1, *(1.2 * abs(value) for line in lines for value in line.ys if math.isfinite(value))])
    axis, levels = Axis((-most, most)), [(0.0, "")]
    charts.append(figure("Cosines between tasks", lines, (*x, "cosine"), caption, y=axis, levels=levels))
    return {"text": _text(records, cosines, opposed), "charts": charts}


def _series(records: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[float]]:
    """Return the values of every task or pair at each record; NaN where there is none."""
    names = dict.fromkeys(name for record in records for name in part(record, "balance", key))
    return {name: [number(part(record, "balance", key).get(name)) for record in records] for name in names}


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return statistics.fmean(known) if known else None


def _text(records: Sequence[Mapping[str, Any]], cosines: Mapping[str, list[float]], opposed: Sequence[str]) -> str:
    """Return which tasks conflict, and which were left out of steps."""
    said = []
    for pair in opposed:
        mean = _mean(cosines[pair])
        if mean is not None and mean < _OPPOSED:
            one, _, other = pair.partition(", ")
            said.append(f"{one} and {other} (mean cosine {mean:.2f})")
    text = f"Conflicting tasks: {'; '.join(said)}." if said else "No two tasks conflict in the mean."
    left_out: dict[str, int] = {}
    for record in records:
        for task, count in part(record, "balance", "left_out").items():
            left_out[task] = left_out.get(task, 0) + int(number(count))
    for task, count in left_out.items():
        text += f" {task} was left out of {count:,} steps, as its loss or gradient was not finite."
    return text
