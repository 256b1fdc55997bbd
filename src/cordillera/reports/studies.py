"""Pages of several runs: comparisons, sweeps of ranking models and IsoFLOP studies of language models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.table import Table

from cordillera.reports import page
from cordillera.reports.charts import Axis, Figure, Series, figure, interval_strip, padded
from cordillera.reports.ranking.comparison import Comparison, ComparisonTable, SeedMean
from cordillera.training.ranking.paired_change import PairedDifference
from cordillera.training.scaling.isoflop import QUANTITIES, amount, power
from cordillera.training.scaling.isoflop_laws import IsoFlopStudy
from cordillera.training.scaling.power_law import ScalingStudy

_COLOURS = 6  # s0 to s5
_PLACES = 60  # points of a curve


def comparison_page(found: ComparisonTable) -> str:
    """Return the HTML page of a comparison of ranking or of language runs."""
    heads, lines = found.cells()
    tables = [("Runs", heads, [[line[0], *map(_with_bounds, line[1:])] for line in lines])]
    if isinstance(found, Comparison):
        tables += _differences(found)
    runs = list(dict.fromkeys(line[0] for line in lines))
    lede = f"{runs[0]} beside {page.plain(runs[1:])}" if len(runs) > 1 else runs[0]
    return page.fill("study", name="Comparison of runs", lede=lede, charts=[], tables=tables, said=found.notes)


def _with_bounds(text: str) -> str | tuple[str, str]:
    """Return a cell, of value and interval if there is an interval in brackets."""
    value, bracket, bounds = text.partition(" [")
    return (value, f"[{bounds}") if bracket else text


def _differences(found: Comparison) -> list[tuple[str, list[str], list[list[Any]]]]:
    """Return a table for each task: differences of NE to the first row with strips of their intervals."""
    tables = []
    for task in found.tasks:
        known: list[tuple[str, PairedDifference | SeedMean]] = []
        for row in found.rows:
            one = row.ne_difference(task) or row.differences.get(task, {}).get("relative_ne")
            known += [] if one is None else [(row.name, one)]
        limits = padded([0.0, *(value for _, one in known for value in (one.value, one.low, one.high))], 0.08)
        rows = [
            [
                name,
                f"{one.value:+.2f} %" if math.isfinite(one.value) else "undefined",
                interval_strip(one.value, (one.low, one.high), 0.0, limits),
                f"{one.low:+.2f} to {one.high:+.2f}" if math.isfinite(one.low) else "",
            ]
            for name, one in known
        ]
        title = "Differences of NE" + (" (samples)" if found.unit else "")
        title += f": {task}" if len(found.tasks) > 1 else ""
        heads = ["run", "NE diff", "0 (line), difference (dot)", f"{100 * found.level:g} % interval"]
        tables += [(title, heads, rows)] if rows else []
    return tables


def sweep_page(name: str, study: ScalingStudy, bayes: float | None = None) -> str:
    """Return the HTML page of a sweep.

    Args:
        name: Name of the recipe.
        study: The measurements and their laws.
        bayes: Value of the best possible model; None if unknown.
    """
    series = []
    for number, model in enumerate(dict.fromkeys(one.model for one in study.measurements)):
        members, style = [one for one in study.measurements if one.model == model], f"s{number % _COLOURS}"
        xs = [one.flops for one in members]
        if law := study.laws.get(model):
            grid = np.geomspace(min(xs), max(xs), _PLACES)
            series.append(Series(f"{model}, law", style, grid.tolist(), law.predict(grid).tolist()))
        titles = [f"{one.flops:,.0f} FLOPs, seed {one.seed}: {one.value:.5f}" for one in members]
        series.append(Series(f"{model}, run", style, xs, [one.value for one in members], "dots", titles))
    places = [x for one in series for x in one.xs if x > 0]
    values = [y for one in series for y in one.ys]
    heads, rows = _cells(study.to_table())
    chart = figure(
        f"{study.metric} against FLOPs",
        series,
        (study.unit, study.metric),
        ("Points are runs; the line is the law." if study.laws else "Points are runs.")
        + (f" Bayes-optimal: {bayes:.4g}." if bayes is not None else ""),
        x=Axis.log(min(places) / 1.05, max(places) * 1.05),
        y=Axis(padded(values, 0.1)),
        levels=[] if bayes is None else [(bayes, "Bayes-optimal")],
        alone=True,
    )
    models = [(one.style, one.name.removesuffix(", run")) for one in series if one.drawn == "dots"]
    chart = chart._replace(key=models if len(models) > 1 else ()) if chart else None
    said = study.summary.splitlines()
    sizes = len({(one.model, one.flops) for one in study.measurements})
    return page.fill(
        "study", name=f"{name}: sweep", lede=f"{study.metric} of {sizes} sizes against {study.unit}",
        charts=[chart], tables=[("Sizes", heads, rows)], said=said,
    )  # fmt: skip


def isoflop_page(name: str, study: IsoFlopStudy) -> str:
    """Return the HTML page of an IsoFLOP ``study`` of the recipe ``name``."""
    heads, rows = _cells(study.to_table())
    return page.fill(
        "study", name=f"{name}: IsoFLOP study", lede="The best split of training FLOPs into parameters and tokens",
        charts=[_curves(study), *_growth(study)], tables=[("Optimum of each budget", heads, rows)],
        said=study.summary.splitlines(),
    )  # fmt: skip


def _curves(study: IsoFlopStudy) -> Figure | None:
    """Draw the losses of every budget over tokens with their parabolas."""
    series = []
    for number, curve in enumerate(study.curves):
        style, budget = f"s{number % _COLOURS}", f"{power(curve.budget)} FLOPs"
        tokens, losses = [one.tokens for one in curve.runs], [one.loss for one in curve.runs]
        titles = [f"{budget}, {amount(one.parameters)} parameters: {one.loss:.4f}" for one in curve.runs]
        if curve.coefficients:
            grid = np.geomspace(*curve.range, _PLACES)
            series.append(Series(budget, style, grid.tolist(), curve.predict(grid).tolist()))
        series.append(Series(f"{budget}, run", style, tokens, losses, "dots", titles))
    xs, ys = [x for one in series for x in one.xs], [y for one in series for y in one.ys]
    best = [curve.optimum for curve in study.curves if curve.optimum]
    if best:
        optima = [(one.tokens, one.loss) for one in best]
        series.append(Series("optimum", "mark", [x for x, _ in optima], [y for _, y in optima], "dots"))
    if not xs:
        return None
    chart = figure(
        "Loss against tokens",
        series,
        ("training tokens", "nats a token"),
        "One colour a budget: points are runs"
        + (", the line is their parabola, rings are optima." if len(series) > len(study.curves) else "."),
        x=_of_counts(min(xs) / 1.05, max(xs) * 1.05),
        y=Axis(padded(ys, 0.1)),
        alone=True,
    )
    runs = [one for one in series if one.drawn == "dots" and one.style != "mark"]
    kept = [(one.style, one.name.removesuffix(", run")) for one in runs]
    return chart._replace(key=kept) if chart and chart.chart else chart


def _of_counts(low: float, high: float) -> Axis:
    """Return a logarithmic axis of tokens or parameters, of which the trade counts billions as B."""
    axis = Axis.log(low, high)
    return replace(axis, ticks=[(place, amount(10**place)) for place, _ in axis.ticks or ()])


def _growth(study: IsoFlopStudy) -> list[Figure | None]:
    """Draw the optimal tokens and parameters over budgets, each with its law."""
    shown = [curve for curve in study.curves if curve.optimum]
    charts = []
    for quantity in ("tokens", "parameters"):
        points = [(curve.budget, getattr(curve.optimum, quantity)) for curve in shown]
        law = study.laws.get(quantity)
        if len(points) < 2:
            continue
        xs, ys = [x for x, _ in points], [y for _, y in points]
        series = [Series("optimum", "s0", xs, ys, "both" if law is None else "dots")]
        if law is not None:
            grid = np.geomspace(min(xs), max(xs), _PLACES)
            series.insert(0, Series("law", "s1", grid.tolist(), law.predict(grid)[0].tolist()))
        told = QUANTITIES[quantity]
        reached = [*ys, *((one for one in (*law.optima_low, *law.optima_high) if 0 < one < math.inf) if law else ())]
        x, y = Axis.log(min(xs) / 1.1, max(xs) * 1.1), _of_counts(min(reached) / 1.3, max(reached) * 1.3)
        chart = figure(f"Optimal {told}", series, ("training FLOPs", told), "", x=x, y=y)
        if chart is not None and chart.chart is not None and law is not None:
            bounds = ([y.place(one) for one in ends] for ends in (law.optima_low, law.optima_high))
            chart.chart.whiskers([x.place(one) for one in xs], *bounds)
        charts.append(chart)
    return charts


def _cells(table: Table) -> tuple[list[str], list[Sequence[Any]]]:
    """Return the headings and the rows of a table for the terminal."""
    return [str(one.header) for one in table.columns], list(zip(*(one.cells for one in table.columns), strict=True))
