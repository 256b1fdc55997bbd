"""Report of a quantised model: size, quality, speed, the search, tables and layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from cordillera.reports import page as report_page
from cordillera.reports.charts import Chart, interval_strip, padded

_SHOWN_PARTS = 3  # parts that are named in an evaluation of some parts


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _percent(value: Any) -> str:
    value = _number(value)
    return f"{100 * value:+.4f} %" if math.isfinite(value) else "undefined"


def _decibels(value: Any) -> str:
    value = _number(value)
    return f"{value:.1f}" if math.isfinite(value) else ""


def quantization_page(content: dict[str, Any]) -> str:
    """Return the HTML page of a quantised model from the content of its ``report.json``."""
    budget = content["budget"]
    change = content["confirmed"] or content["searched"]
    sections = [
        report_page.notes(_notes(content, budget)),
        _tiles(content, change),
        _search(content, budget),
        _tables(content["tables"]),
        _layers(content["layers"]),
        _how(content, budget),
    ]
    share = content["bytes"]["quantized"] / max(content["bytes"]["fp32"], 1)
    lede = (
        f"{100 * share:.1f} % of the size of fp32, NE {_percent(change['mean'])} beside a budget of {100 * budget:g} %"
    )
    return report_page.page(f"{content['run']}: fewer bits", lede, sections)


def _notes(content: dict[str, Any], budget: float) -> list[str]:
    change, notes = content["confirmed"], []
    if change is None:
        notes.append("There is no test split: what is said of quality is of the samples that the search looked at.")
    elif not _number(change["mean"]) <= budget:
        notes.append("On the test split the model costs more than the budget: the search did not see these samples.")
    elif not _number(change["high"]) <= budget:
        notes.append(
            "The estimate keeps the budget, its interval does not: more test samples would tell which of them is right."
        )
    return notes


def _tiles(content: dict[str, Any], change: dict[str, Any]) -> str:
    sizes, seconds = content["bytes"], content["seconds"]
    where = "on the test split" if content["confirmed"] else "on the samples searched on"
    tiles = [
        report_page.tile(
            "size",
            f"{100 * sizes['quantized'] / max(sizes['fp32'], 1):.1f} %",
            f"{sizes['quantized']:,} of {sizes['fp32']:,} bytes",
            "weights, tables, scales",
        ),
        report_page.tile(
            "rise of NE, %",
            f"{100 * _number(change['mean']):+.4f}",
            f"{_percent(change['low'])} to {_percent(change['high'])}",
            f"{where}, 95 % interval of paired differences",
        ),
        report_page.tile(
            "times as fast",
            f"{seconds['fp32'] / seconds['quantized']:.2f}",
            f"{1e3 * seconds['quantized']:.2f} ms, fp32 {1e3 * seconds['fp32']:.2f} ms",
            "a batch of 256 on this machine, medians",
        ),
        report_page.tile(
            "evaluations",
            f"{len(content['evaluations']):,}",
            f"a sweep of all options: {content['sweep_evaluations']:,}",
            "of the model on the samples searched on",
        ),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _parts(options: Sequence[str], most: int) -> str:
    if len(options) == most:
        return "everything at its cheapest"
    more = f" and {len(options) - _SHOWN_PARTS} more" if len(options) > _SHOWN_PARTS else ""
    return ", ".join(options[:_SHOWN_PARTS]) + more


def _search(content: dict[str, Any], budget: float) -> str:
    steps = content["evaluations"]
    full = content["full_cost"]
    points = [
        (100 * step["cost"] / full, *(100 * _number(step["change"][key]) for key in ("mean", "low", "high")))
        for step in steps
    ]
    values = [value for point in points for value in point[1:] if math.isfinite(value)]
    if not values or not full:
        return ""
    xs, means, lows, highs = zip(*points, strict=True)
    caption = (
        "Each point is one evaluation: the cost of all parts (bytes, and time where it counts) against the rise of NE, "
        "with 95 % intervals. What lies below the line keeps the budget."
    )
    chart = Chart(
        "Rise of NE against cost", caption, padded([0.0, 100.0, *xs]), padded([0.0, 100 * budget, *values]),
        x_label="cost, % of fp32", y_label="rise of NE, %",
    )  # fmt: skip
    chart.rule(y=100 * budget, text="budget")
    chart.whiskers(xs, lows, highs)
    chart.dots(xs, means)
    most = max(len(step["options"]) for step in steps)
    rows = "".join(
        f"<tr><th>{escape(_parts(list(step['options']), most))}</th><td>{point[0]:.1f}</td>"
        f"<td>{point[1]:+.4f}</td><td>{point[2]:+.4f} to {point[3]:+.4f}</td></tr>"
        for step, point in zip(steps, points, strict=True)
    )
    head = "".join(f"<th>{text}</th>" for text in ("in fewer bits", "cost, %", "rise of NE, %", "95 % interval"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    figure = f"<figure>{chart.svg(0)}<figcaption>{escape(caption)}</figcaption></figure>"
    scroll = report_page.scroll("Evaluations in order", table)
    return f'<section><h2>The search</h2><div class="charts">{figure}<div>{scroll}</div></div></section>'


def _tables(tables: dict[str, dict[str, Any]]) -> str:
    if not tables:
        return ""
    largest = max(one["bytes"]["fp32"] for one in tables.values()) or 1
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(one['rows'])}</td><td>{one['bytes']['fp32']:,}</td>"
        f"<td>{one['bytes']['quantized']:,}</td>"
        f"<td>{_strip(one['bytes']['quantized'], one['bytes']['fp32'], largest)}</td></tr>"
        for name, one in sorted(tables.items(), key=lambda entry: -entry[1]["bytes"]["fp32"])
    )
    heads = ("table", "rows in", "bytes in fp32", "bytes now", "from fp32 (line) to now (dot)")
    head = "".join(f"<th>{text}</th>" for text in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<section><h2>Tables</h2>{report_page.scroll('Bytes by table', table)}</section>"


def _strip(now: float, before: float, largest: float) -> str:
    return interval_strip(now, (now, before), before, (0.0, largest))


def _layers(layers: Sequence[dict[str, Any]]) -> str:
    if not layers:
        return ""
    found = [_number(one[key]) for one in layers for key in ("alone_db", "in_place_db")]
    limits = (0.0, max([60.0, *(value for value in found if math.isfinite(value))]))
    rows = []
    for one in layers:
        alone, place = _number(one["alone_db"]), _number(one["in_place_db"])
        strip = interval_strip(place, (min(alone, place), max(alone, place)), 30.0, limits)
        rows.append(
            f"<tr><th>{escape(one['name'])}</th><td>{escape(one['kernel'])}</td><td>{_decibels(one['alone_db'])}</td>"
            f"<td>{_decibels(one['in_place_db'])}</td><td>{strip}</td></tr>"
        )
    heads = ("layer", "kernel", "alone, dB", "in place, dB", "in place (dot), 30 dB (line)")
    head = "".join(f"<th>{text}</th>" for text in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    legend = "Signal to noise beside fp32: alone on the same inputs, and in place, where inputs are off as well."
    scroll = report_page.scroll("Signal to noise by layer", table)
    return f"<section><h2>Layers</h2><p>{escape(legend)}</p>{scroll}</section>"


def _how(content: dict[str, Any], budget: float) -> str:
    ne, searched = content["ne"], content["searched"]
    facts = report_page.definitions(
        [
            ("Budget", f"{100 * budget:g} % of NE, on the samples that the search looks at"),
            ("Rise of NE on them", f"{_percent(searched['mean'])} ({_percent(searched['low'])} to "
             f"{_percent(searched['high'])})"),
            ("NE", f"{_number(ne['fp32']):.5f} in fp32, {_number(ne['quantized']):.5f} quantised"),
            ("Written", "the model was loaded from its files and scored again"),
            ("Again", f"cordillera quantize {content['run']} --budget {100 * budget:g}"),
        ]
    )  # fmt: skip
    return f'<section><h2>How it was measured</h2><div class="card">{facts}</div></section>'
