"""Figures of tables over processes in the documentation."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from _figures import Figures, judged, results, span, spread, table

KIB = 2**10
_NAMES = {"sgd": "SGD", "adagrad": "Adagrad", "rowwise_adagrad": "row-wise Adagrad", "adam": "Adam"}


def exactness() -> str:
    """Return the largest differences from one process, of our tables and of TorchRec's."""
    found = results("zionex-exactness")["rows"]
    rows = {(row["ranks"], row["way"], row["rule"]): row for row in found}
    lines = []
    for ranks, way in dict.fromkeys((row["ranks"], row["way"]) for row in found):
        of_rules = [rows[ranks, way, rule] for rule in _NAMES]
        sent = {"ours, rows": of_rules}
        if "bags" in of_rules[0]:  # absent in results of before sums of bags were exchanged
            sent["ours, bags"] = [row["bags"] for row in of_rules]
        for name, ours in sent.items():
            worst = [max(row["weight"], row["moments"] or 0.0) for row in ours]
            lines.append([way, str(ranks), name, *map(_off, worst)])
        for kind in of_rules[0]["peers"]:
            alike = [row["peers"][kind].get("weight") for row in of_rules]
            if any(one is not None for one in alike):
                lines.append([way, str(ranks), f"TorchRec, {kind}", *map(_off, alike)])
    return table(["tables", "ranks", "code", *_NAMES.values()], lines)


def _off(value: float | None) -> str:
    return "not offered" if value is None else "0" if value == 0 else f"{value:.1e}"


def exchange() -> str:
    """Return bytes and times of a step beside TorchRec's."""
    lines = []
    for row in results("zionex-exchange")["rows"]:
        sizes = [f"{row[key] / KIB:,.0f}" for key in ("bytes", "peer_bytes", "formula_bytes")]
        messages = [f"{row[key]:.0f}" for key in ("messages", "peer_messages")]
        times = [*spread(row["times_as_fast"]["wall"]), f"{row['times_as_fast']['processor']['median']:.2f}"]
        sent = row.get("sent", "rows") + (" (auto)" if row.get("chosen", 0) > 0.5 else "")
        lines.append([row["case"], row["way"], row["kind"], sent, *sizes, *messages, *times])
    headings = ["ids of a bag", "ours", "TorchRec's", "ours sends", "KiB, ours", "KiB, TorchRec", "KiB, formula"]
    more = ["messages, ours", "messages, TorchRec", "times as fast", "quartiles", "in processor time"]
    return table([*headings, *more], lines)


def _rows(case: str) -> list[dict[str, Any]]:
    """Return the rows of a case with what is chosen by `auto`."""
    return [row for row in results("zionex-exchange")["rows"] if row["case"] == case and row.get("chosen", 1.0) > 0.5]


def bytes_beside(case: str) -> str:
    """Return our bytes in multiples of TorchRec's, over all ways."""
    return span([row["bytes"] / row["peer_bytes"] for row in _rows(case)], ".2f")


def speed_beside(case: str) -> str:
    """Return how many times as fast as TorchRec a step is, over all ways."""
    return span([row["times_as_fast"]["wall"]["median"] for row in _rows(case)], ".2f")


def planner() -> str:
    """Return the largest loads of planned placements beside those of TorchRec's planner."""
    lines = []
    for row in results("zionex-planner")["rows"]:
        plans = [row["ours"], row["columns"], row["peers"].get("columns", {}), row["peers"].get("any", {})]
        for name in ("lookups", "memory"):
            cells = [f"{one[name]:.3f}" if name in one else "none" for one in plans]
            lines.append([row["case"], str(row["ranks"]), name, *cells])
    headings = [
        "ids of a sample",
        "ranks",
        "largest",
        "ours",
        "ours, columns alone",
        "TorchRec, columns",
        "TorchRec, any cut",
    ]
    return table(headings, lines)


def planner_seconds() -> str:
    """Return the time to place many tables."""
    return f"{statistics.median(results('zionex-planner')['many']['processor_seconds']):.2f}"


def file_tables() -> str:
    """Return the speed of tables in a file beside that of tables in memory."""
    rows = [
        [
            {"tables": "tables alone"}.get(row["case"], f"step of {row['case']}"),
            {"kept": "kept by the system", "limited": "limited to a quarter of the bytes"}[row["pages"]],
            "{} ({})".format(*spread(row["speed"])),
            "yes" if row["equal"] else "NO",
            row["evidence"],
        ]
        for row in results("zionex-tiers")["file"]
    ]
    return table(["", "pages of the file", "speed, of tables in memory", "equal bits", "evidence"], rows)


def dynamic_tables() -> str:
    """Return the time of dynamic tables beside that of fixed ones."""
    rows = [
        [str(row["dim"]), f"{kind} ids", "{} ({})".format(*spread(row[kind]["cost"]))]
        for row in results("zionex-tiers")["dynamic"]
        for kind in ("known", "new")
    ]
    return table(["columns", "ids", "time, of fixed tables"], rows)


FIGURES: Figures = {
    "zionex-files": file_tables,
    "zionex-files-target": lambda: judged([row["speed"]["median"] for row in results("zionex-tiers")["file"]], 0.3),
    "zionex-dynamic": dynamic_tables,
    "zionex-exactness": exactness,
    "zionex-worst": lambda: f"{results('zionex-exactness')['worst']:.1e}",
    "zionex-columns": lambda: f"{results('zionex-exactness')['peer_column_drift']:.1e}",
    "zionex-exchange": exchange,
    "zionex-bytes-single": partial(bytes_beside, "1 id"),
    "zionex-bytes-lists": partial(bytes_beside, "1 to 20 ids"),
    "zionex-speed-single": partial(speed_beside, "1 id"),
    "zionex-speed-lists": partial(speed_beside, "1 to 20 ids"),
    "zionex-planner": planner,
    "zionex-planner-seconds": planner_seconds,
}
