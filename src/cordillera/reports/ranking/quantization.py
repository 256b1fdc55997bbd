"""Report of a quantised model: size, quality, speed, the search, tables and layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cordillera.numbers import counted, known
from cordillera.reports import page
from cordillera.reports.charts import Axis, Chart, Figure, interval_strip, padded
from cordillera.training.ranking.evaluation import number

_SHOWN_PARTS = 3  # parts that are named in an evaluation of some parts


def quantization_page(content: dict[str, Any]) -> str:
    """Return the HTML page of a quantised model from the content of its ``report.json``."""
    return page.fill(
        "quantization",
        name=f"{content['run']}: quantised model",
        content=content,
        budget=f"{100 * content['budget']:g}",
        change=_change(content["confirmed"] or content["searched"]),
        searched=_change(content["searched"]),
        ne={key: number(value) for key, value in content["ne"].items()},
        share=f"{100 * content['bytes']['quantized'] / max(content['bytes']['fp32'], 1):.1f} %",
        notes=_notes(content),
        search=_search(content),
        tables=_tables(content["tables"]),
        layers=_layers(content["layers"]),
    )


def _change(change: dict[str, Any]) -> dict[str, str]:
    return {key: known(100 * number(change[key]), "{:+.4f} %") or "undefined" for key in ("mean", "low", "high")}


def _notes(content: dict[str, Any]) -> list[str]:
    change, budget = content["confirmed"], content["budget"]
    if change is None:
        return ["There is no test split: what is said of quality is of the samples that the search looked at."]
    if not number(change["mean"]) <= budget:
        return ["On the test split the model costs more than the budget: the search did not see these samples."]
    if not number(change["high"]) <= budget:
        return [
            "The estimate keeps the budget, its interval does not: more test samples would tell which of them is right."
        ]
    return []


def _search(content: dict[str, Any]) -> dict[str, Any]:
    """Return the evaluations of the search as a chart of cost and rise of NE, and as rows of a table."""
    steps, full, budget = content["evaluations"], content["full_cost"], 100 * content["budget"]
    points = [
        (100 * step["cost"] / full, *(100 * number(step["change"][key]) for key in ("mean", "low", "high")))
        for step in steps
        if full
    ]
    values = [value for point in points for value in point[1:] if math.isfinite(value)]
    if not values:
        return {}
    xs, means, lows, highs = zip(*points, strict=True)
    caption = (
        "Each point is one evaluation: the cost of all parts (bytes, and time where it counts) against the rise of NE, "
        "with 95 % intervals. What lies below the line keeps the budget."
    )
    x, y = Axis(padded([0.0, 100.0, *xs])), Axis(padded([0.0, budget, *values]))
    chart = Chart("Rise of NE against cost", caption, x, y, ("cost, % of fp32", "rise of NE, %"))
    chart.rule(y=budget, text="budget")
    chart.whiskers(xs, lows, highs)
    chart.dots(xs, means)
    cheapest = max((step["options"] for step in steps), key=len)  # the first of those of all parts
    rows = [
        (_parts(step["options"], cheapest), f"{cost:.1f}", f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}")
        for step, (cost, mean, low, high) in zip(steps, points, strict=True)
    ]
    return {"chart": Figure("", chart, caption) if len(points) > 1 else None, "rows": rows}


def _parts(options: dict[str, str], cheapest: dict[str, str]) -> str:
    if len(options) == len(cheapest):
        above = sum(option != cheapest[name] for name, option in options.items())
        return f"everything, {counted(above, 'part')} above the cheapest" if above else "everything at its cheapest"
    names = list(options)
    more = f" and {len(names) - _SHOWN_PARTS} more" if len(names) > _SHOWN_PARTS else ""
    return ", ".join(names[:_SHOWN_PARTS]) + more


def _tables(tables: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return rows of names, formats, bytes and strips, the largest table first."""
    largest = max((one["bytes"]["fp32"] for one in tables.values()), default=0) or 1
    rows: list[tuple[str, ...]] = []
    for name, one in sorted(tables.items(), key=lambda entry: -entry[1]["bytes"]["fp32"]):
        before, now = one["bytes"]["fp32"], one["bytes"]["quantized"]
        strip = interval_strip(now, (now, before), before, (0.0, largest))
        rows.append((name, one["rows"], f"{before:,}", f"{now:,}", strip))
    return rows


def _layers(layers: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return rows of names, kernels, decibels and strips."""
    pairs = [(number(one["alone_db"]), number(one["in_place_db"])) for one in layers]
    limits = (0.0, max([60.0, *(value for pair in pairs for value in pair if math.isfinite(value))]))
    return [
        (
            one["name"],
            one["kernel"],
            *(known(value, "{:.1f}") for value in pair),
            interval_strip(pair[1], (min(pair), max(pair)), 30.0, limits),
        )
        for one, pair in zip(layers, pairs, strict=True)
    ]
