"""The two drawings of an IsoFLOP study: parabolas with their minima, and the growth of the minima with compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cordillera.training.scaling.isoflop import QUANTITIES, IsoFlopCurve, amount, power
from cordillera.training.scaling.isoflop_laws import IsoFlopStudy
from cordillera.training.scaling.power_law import label_axis, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LAWS = {"tokens": ("#1f5fa8", "o"), "parameters": ("#b8520f", "s")}
_QUIET = "#5a6672"


def plot(result: IsoFlopStudy, paths: Sequence[Path], *, title: str | None = None) -> None:
    """Draw the curves of all budgets, and the optimal tokens and parameters over compute with their intervals.

    The ``result`` is drawn under a ``title`` into all ``paths``, whose suffixes choose the format (``.png``, ``.svg``).
    """
    save_figure(lambda: _draw(result, title), paths)


def _draw(result: IsoFlopStudy, title: str | None) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_curves(left, result.curves)
    _draw_laws(right, result)
    flops = "training FLOPs" if result.counts_attention else "training FLOPs without attention"
    left.set_xlabel("training tokens")
    left.set_ylabel("held-out loss, nats a token")
    right.set_xlabel(flops)
    right.set_ylabel("optimal tokens and parameters")
    for axes in (left, right):
        axes.grid(color="#dde2e8", linewidth=0.8)
        axes.set_axisbelow(True)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
    return figure


def _draw_curves(axes: Axes, curves: Sequence[IsoFlopCurve]) -> None:
    import matplotlib

    axes.set_xscale("log")
    # The lightest end of the map is too pale for lines on white.
    shades = matplotlib.colormaps["viridis_r"](np.linspace(0.18, 0.95, len(curves)))
    for curve, colour in zip(curves, shades, strict=True):
        tokens, losses = [run.tokens for run in curve.runs], [run.loss for run in curve.runs]
        style: dict[str, Any] = {"color": colour, "linestyle": "none", "marker": "o", "markersize": 5}
        label = f"{power(curve.budget)} FLOPs"
        if curve.optimum is None:
            style["markerfacecolor"] = "white"
            label += ", no optimum"
        axes.plot(tokens, losses, label=label, zorder=3, **style)
        if curve.coefficients:
            grid = np.geomspace(*curve.range, 100)
            line = "-" if curve.optimum else (0, (2, 2))
            axes.plot(grid, curve.predict(grid), color=colour, linewidth=1.5, linestyle=line, zorder=2)
    optima = [curve.optimum for curve in curves if curve.optimum]
    if optima:
        axes.plot([optimum.tokens for optimum in optima], [optimum.loss for optimum in optima], color=_QUIET,
                  linewidth=1, linestyle=(0, (4, 3)), marker="D", markersize=7.5, markerfacecolor="#d9482b",
                  markeredgecolor="white", label="optimum", zorder=4)  # fmt: skip
    axes.margins(y=0.12)  # room for the legend
    label_axis(axes.xaxis, amount)
    axes.legend(fontsize=9, loc="best", facecolor="white", edgecolor="none", framealpha=0.9)


def _draw_laws(axes: Axes, result: IsoFlopStudy) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    shown = [curve for curve in result.curves if curve.optimum]
    for name, (colour, marker) in _LAWS.items():
        law = result.laws.get(name)
        label = QUANTITIES[name]
        errors = None
        if law:
            errors = np.abs(np.array([law.optima_low, law.optima_high]) - law.line.y)
            label += f": C^{law.exponent:.3f}"
            if not math.isnan(law.exponent_low):
                label += f" [{law.exponent_low:.3f}, {law.exponent_high:.3f}]"
            ends = [law.line.x[0], law.line.x[-1]] + ([result.forecast.compute] if result.forecast else [])
            grid = np.geomspace(min(ends), max(ends), 100)
            value, low, high = law.predict(grid)
            is_trained = (grid >= law.line.x[0]) & (grid <= law.line.x[-1])
            axes.plot(grid, value, color=colour, linewidth=1.1, linestyle=(0, (4, 3)), zorder=2)
            axes.plot(grid[is_trained], value[is_trained], color=colour, linewidth=1.8, zorder=2)
            axes.fill_between(grid, low, high, color=colour, alpha=0.13, linewidth=0, zorder=1)
        optima = [getattr(curve.optimum, name) for curve in shown]
        axes.errorbar([curve.budget for curve in shown], optima, yerr=errors, color=colour, fmt=marker, markersize=6,
                      elinewidth=1, capsize=2.5, label=label, zorder=3)  # fmt: skip
        if result.forecast:
            at = result.forecast.compute, result.forecast.values[name][0]
            axes.plot(*at, marker="*", markersize=12, color=colour, markeredgecolor="white", zorder=4)
            axes.annotate(amount(at[1]), at, xytext=(-6, 8), textcoords="offset points", ha="right", fontsize=9.5)
    label_axis(axes.xaxis, power)
    label_axis(axes.yaxis, amount)
    axes.legend(fontsize=9, loc="best", facecolor="white", edgecolor="none", framealpha=0.9)
