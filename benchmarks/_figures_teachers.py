"""Figures of students and teachers in the documentation."""

from __future__ import annotations

import statistics
from typing import Any

from _figures import Figures, results, table


def _bias(**wanted: Any) -> list[dict[str, Any]]:
    found = results("exfm-bias")["results"]
    return [one for one in found if all(one[key] == value for key, value in wanted.items())]


def bias() -> str:
    """Return test metrics of students of a teacher that is off."""
    rows = []
    for one in _bias():
        if one["method"] == "no teacher" and one["offset"]:
            continue  # the same student
        cells = []
        for key in ("ne", "auc", "calibration"):
            values = one[key]
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.4f}{spread}")
        offset = "" if one["method"] == "no teacher" else f"{one['offset']:+g}"
        rows.append([one["data"], offset, one["method"], *cells])
    return table(["data", "logits off by", "method", "test NE", "AUC", "calibration"], rows)


def _off(method: str, data: str) -> float:
    """Return by how much the mean calibration of students differs from 1 with a teacher that is off by 1."""
    (one,) = _bias(method=method, offset=1.0, data=data)
    return abs(statistics.fmean(one["calibration"]) - 1)


def drift() -> str:
    """Return NE on streams that drift, and changes beside auxiliary heads."""
    rows = []
    for one in results("exfm-drift")["results"]:
        change = f"{statistics.fmean(one['changes']):+.4f}" if "p" in one else ""
        p = f"{one['p']:.1g}" if "p" in one else ""
        rows.append([f"{one['lag']:g}", one["method"], f"{statistics.fmean(one['ne']):.4f}", change, p])
    return table(["lag", "method", "NE", "beside auxiliary heads", "p"], rows)


def transfer() -> str:
    """Return the NE of students by what they are given."""
    found = results("exfm-transfer")
    rows = []
    for one in found["results"]:
        shown = f"{100 * one['transfer']:.0f} %" if one["kind"].startswith("...") else ""
        cells = [f"{statistics.fmean(one[key]):.4f}" for key in ("ne", "test_ne")]
        rows.append([one["kind"], *cells, shown])
    rows.append(["the teacher itself", *(f"{found['teacher'][key]:.4f}" for key in ("ne", "test_ne")), ""])
    return table(["student", "NE before training on a sample", "test NE", "share of the teacher's gain"], rows)


def speed() -> str:
    """Return times of a step over those without a teacher."""
    found = results("exfm-speed")["results"]
    models, kinds = (list(dict.fromkeys(one[key] for one in found)) for key in ("model", "kind"))
    ratios = {(one["model"], one["kind"]): one["over plain"]["median"] for one in found}
    rows = [[kind, *(f"{ratios[model, kind]:.2f}" for model in models)] for kind in kinds if kind != "no teacher"]
    return table(["teacher", *models], rows)


def _streams(key: str) -> float:
    found: float = results("exfm-streams")[key]
    return found


FIGURES: Figures = {
    "exfm-bias": bias,
    "exfm-off-adult": lambda: f"{100 * _off('auxiliary heads', 'Adult'):.1f} %",
    "exfm-off-movielens": lambda: f"{100 * _off('auxiliary heads', 'MovieLens-100K'):.1f} %",
    "exfm-serving-off-adult": lambda: f"{100 * _off('serving heads', 'Adult'):.0f} %",
    "exfm-serving-off-movielens": lambda: f"{100 * _off('serving heads', 'MovieLens-100K'):.0f} %",
    "exfm-drift": drift,
    "exfm-transfer": transfer,
    "exfm-speed": speed,
    "exfm-unique": lambda: f"{_streams('unique'):,.0f}",
    "exfm-calls": lambda: f"{_streams('calls'):,.0f}",
    "exfm-events-per-second": lambda: f"{_streams('events_per_second'):,.0f}",
}
