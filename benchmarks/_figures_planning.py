"""Figures of the planner in the documentation."""

from __future__ import annotations

from functools import partial
from typing import Any

from _figures import Figures, judged, percent, results, table


def _accuracy(name: str) -> dict[str, Any]:
    found: dict[str, Any] = results("scaleacross-accuracy")["figures"][name]
    return found


def accuracy() -> str:
    """Return predictions beside measured steps."""
    rows = []
    for name in ("ours", "Calculon", "one rate for all"):
        one = _accuracy(name)
        errors = [percent(one[key], ".2f") for key in ("error", "error_tensor_to_8")]
        tau = "undefined" if one["tau"] is None else f"{one['tau']:.3f}"
        rows.append([name, *errors, tau, f"{one['regret']:.3f}"])
    return table(["", "mean error", "error, TP up to 8", "rank correlation", "time of the pick over the best"], rows)


def by_model(key: str) -> str:
    """Return a figure of each of the three models."""
    return "{:.3f}, {:.3f} and {:.3f}".format(*_accuracy("ours")[key].values())


def grid() -> str:
    """Return the joint search over the grid."""
    rows = []
    for point in results("scaleacross-grid")["points"]:
        changes = point["changes"]
        change = f"1:{changes['region.oversubscription']:g}"
        change += f", {changes['region.distance_km']:,.0f} km" if changes["region.distance_km"] else ""
        change += ", lossy" if "region.loss_rate" in changes else ""
        seconds = [f"{point[name]['seconds']:.2f} s" for name in ("production", "joint")]
        gains = [f"{point[name]:.2f}" for name in ("times_production", "times_best_single")]
        rows.append([point["workload"], f"{point['cluster']}, {point['devices']:,}", change, *seconds, *gains])
    headings = ["workload", "cluster", "change", "production-like", "joint", "over production", "over the best single"]
    return table(headings, rows)


def published_recommenders() -> str:
    """Return steps of a DLRM beside published ones."""
    rows = []
    for row in results("scaleacross-recommenders")["published"]:
        seconds = [f"{1e3 * row[key]:.2f} ms" for key in ("published_s", "simulated_s")]
        rows.append([str(row["devices"]), f"{row['batch']:,}", *seconds, f"{100 * row['off']:+.0f} %"])
    return table(["devices", "batch", "published step", "simulated step", "off by"], rows)


def gains_of_recommenders() -> str:
    """Return gains of the 12T model, with and without a cost of messages."""
    gains = results("scaleacross-recommenders")["gains"]
    devices = list(dict.fromkeys(row["devices"] for row in gains))
    cells = {
        (row["change"], row["devices"]): f"{row['with_messages']:.2f}, {row['without_messages']:.2f}" for row in gains
    }
    changes = dict.fromkeys(row["change"] for row in gains)
    rows = [[change, *(cells[change, count] for count in devices)] for change in changes]
    return table(["change", *(f"{count:,} devices" for count in devices)], rows)


def _mean(name: str) -> str:
    return f"{results('scaleacross-grid')['geometric_means'][name]:.2f}"


def _speed(*path: str) -> float:
    found = results("scaleacross-speed")["values"]
    for key in path:
        found = found[key]
    return float(found)


def executed() -> str:
    """Return how far executed schedules are off simulated ones."""
    found = results("scaleacross-executed")
    counts = sorted({row["executed"]["count"] for row in found["rows"]})
    off = [100 * (row["ratio"] - 1) for row in found["rows"]]
    return f"{min(off):+.1f} to {max(off):+.1f} % off simulated (medians of {' or '.join(map(str, counts))} steps"


def _schedules(name: str = "all") -> dict[str, Any]:
    found: dict[str, Any] = results("scaleacross-solver")["summaries"][name]
    return found


def above_bound(placement: str) -> str:
    """Return how far schedules by rules of large cases are above the solver's bound."""
    return percent(_schedules(f"8 ranks, 16 microbatches, {placement}")["worst_above_bound"], ".2f")


ON_39B = "ours, fitted on 3.6B and 18.4B, on 39.1B"
FIGURES: Figures = {
    "plan-accuracy": accuracy,
    "plan-rows": lambda: str(_accuracy("ours")["rows"]),
    "plan-correlations": partial(by_model, "tau_by_model"),
    "plan-regrets": partial(by_model, "regret_by_model"),
    "plan-unseen-error": lambda: percent(_accuracy(ON_39B)["error"], ".2f"),
    "plan-unseen-correlation": lambda: f"{_accuracy(ON_39B)['tau']:.3f}",
    "plan-calculon-error": lambda: percent(_accuracy("Calculon, on 39.1B")["error"], ".2f"),
    "plan-calculon-correlation": lambda: f"{_accuracy('Calculon, on 39.1B')['tau']:.3f}",
    "plan-executed": executed,
    "plan-cases": lambda: f"{_schedules()['cases']:,}",
    "plan-of-cases": lambda: f"{results('scaleacross-solver')['of']:,}",
    "plan-proven": lambda: f"{_schedules()['proven']:,}",
    "plan-equal": lambda: f"{_schedules()['equal']:,}",
    "plan-above-solver": lambda: percent(_schedules()["worst_above_solver"], ".2f"),
    "plan-slowest": lambda: f"{_schedules()['slowest_seconds']:.1f} s",
    "plan-above-bound": partial(above_bound, "one"),
    "plan-above-bound-loop": partial(above_bound, "loop"),
    "plan-grid": grid,
    "plan-recommenders": published_recommenders,
    "plan-recommender-gains": gains_of_recommenders,
    "plan-neo": lambda: f"{results('scaleacross-recommenders')['times_neo']:.1f}",
    "plan-over-production": partial(_mean, "times_production"),
    "plan-over-single": partial(_mean, "times_best_single"),
    "plan-search": lambda: f"{_speed('joint_search', 'seconds'):.0f} s",
    "plan-step": lambda: f"{_speed('step_of_131072', 'seconds'):.1f} s",
    "plan-step-memory": lambda: f"{_speed('step_of_131072', 'peak_bytes') / 2**30:.2f} GiB",
    "plan-calculon-times": lambda: f"{_speed('times_calculon', 'median'):.0f}",
    "plan-calculon-target": lambda: judged([_speed("times_calculon", "median")], 20.0),
    "plan-growth-devices": lambda: f"{_speed('growth', 'exponent_devices'):.2f}",
    "plan-growth-ranks": lambda: f"{_speed('growth', 'exponent_ranks'):.2f}",
}
