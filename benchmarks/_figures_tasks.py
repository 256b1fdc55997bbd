"""Figures of trainings of several tasks in the documentation."""

from __future__ import annotations

import statistics
from typing import Any

from _figures import Figures, results, table


def _worst(method: str, of_largest: bool) -> float:
    """Return the mean change of AUC of a task in the method's table that is largest, or lowest."""
    found = [one for one in results("multibalance-scales")["results"] if one["method"] == method]
    means = [statistics.fmean(values) for one in found for values in one["auc_changes"].values()]
    return max(map(abs, means)) if of_largest else min(means)


def scales() -> str:
    """Return changes of AUC where one loss is multiplied."""
    found = results("multibalance-scales")
    tasks = list(found["results"][0]["auc_changes"])
    rows = []
    for one in found["results"]:
        means = [statistics.fmean(one["auc_changes"][task]) for task in tasks]
        rows.append([one["method"], f"{one['factor']:,.0f}", *(f"{mean:+.4f}" for mean in means)])
    return table(["method", f"factor of {found['scaled']}", *tasks], rows)


def methods() -> str:
    """Return test NE of every task by method, and the worst task beside each task trained alone."""
    rows = []
    for one in results("multibalance-methods")["results"]:
        cells = [f"{statistics.fmean(v):.4f} ± {statistics.stdev(v):.4f}" for v in one["ne"].values()]
        rows.append([one["data"], one["method"], *cells, f"{one['worst_percent']:+.2f} %"])
    return table(["data", "method", "first task", "second", "third", "worst beside each alone"], rows)


def _speed() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = results("multibalance-speed")["results"]
    return found


def speed() -> str:
    """Return times of a step over those of a plain sum."""
    names = list(dict.fromkeys(one["method"] for one in _speed()))
    tasks = sorted({one["tasks"] for one in _speed()})
    ratios = {(one["method"], one["tasks"]): one["over plain"]["median"] for one in _speed()}
    rows = [[name, *(f"{ratios[name, count]:.2f}" for count in tasks)] for name in names if name != "plain sum"]
    return table(["method", *(f"{count} tasks" for count in tasks)], rows)


FIGURES: Figures = {
    "multibalance-scales": scales,
    "multibalance-largest-change": lambda: f"{_worst('balanced, equal', True):.4f}",
    "multibalance-plain-loses": lambda: f"{-_worst('plain sum', False):.3f}",
    "multibalance-methods": methods,
    "multibalance-speed": speed,
}
