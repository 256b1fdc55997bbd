"""Embedding tables over processes, beside TorchRec: ``cordillera bench zionex``."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from _program import Program
from _tables import print_notes, print_rows
from _zionex_exactness import RULES, measure_exactness
from _zionex_exchange import PEER, measure_exchange
from _zionex_planner import PEER_CUTS, measure_planner
from _zionex_tiers import measure_tiers
from rich.console import Console

KIB = 2**10


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    exactness = "exactness"
    exchange = "exchange"
    planner = "planner"
    tiers = "tiers"


def _exactness(console: Console, quick: bool) -> dict[str, Any]:
    figures = measure_exactness(quick)
    drift = figures["peer_column_drift"]
    console.print(f"ours: at most {figures['worst']:.1e} off one process, {figures['target']:.0e} asked", end="")
    console.print("" if drift is None else f"; TorchRec's columns with row-wise Adagrad: {drift:.1e}")
    rows = {(row["ranks"], row["way"], row["rule"]): row for row in figures["rows"]}
    lines = []
    for ranks, way in dict.fromkeys((ranks, way) for ranks, way, _ in rows):
        of_rules = [rows[ranks, way, rule] for rule in RULES]
        for sent, found in (("rows", of_rules), ("bags", [row["bags"] for row in of_rules])):
            worst = [max(one["weight"], one["moments"] or 0.0) for one in found]
            lines.append([way, f"ours, {sent}", str(ranks), *(f"{value:.1e}" for value in worst)])
        for kind in of_rules[0]["peers"]:
            alike = [row["peers"][kind] for row in of_rules]
            cells = [f"{one['weight']:.1e}" if "weight" in one else "none" for one in alike]
            lines.append([way, f"TorchRec: {kind}", str(ranks), *cells])
    title = f"largest difference from one process after {figures['steps']} steps, relative to max(1, |x|)"
    print_rows(console, title, ["tables", "code", "ranks", *RULES], lines)
    peers = [peer for row in figures["rows"] for peer in row["peers"].values()]
    reasons = dict.fromkeys("none: " + peer["reason"] for peer in peers if "reason" in peer)
    print_notes(console, [*figures["notes"], *reasons])
    return figures


def _exchange(console: Console, quick: bool) -> dict[str, Any]:
    figures = measure_exchange(quick)
    lines = []
    for row in figures["rows"]:
        has_peer = "times_as_fast" in row
        times = row.get("times_as_fast", {})
        lines.append(
            [
                row["case"],
                f"{row['way']} / {row['kind']}",
                row["sent"] + (" (auto)" if row["chosen"] > 0.5 else ""),
                *(_spread(times[clock]) if has_peer else "" for clock in ("wall", "processor")),
                f"{row['times_fewer_bytes']:.2f}" if has_peer else "",
                f"{row['bytes'] / KIB:,.0f}",
                f"{row['peer_bytes'] / KIB:,.0f}" if has_peer else "",
                f"{row['formula_bytes'] / KIB:,.0f}",
                f"{row['messages']:.0f}" + (f" / {row['peer_messages']:.0f}" if has_peer else ""),
                *(f"{row['seconds'][name]['seconds']['median'] * 1e3:.1f}" if name in row["seconds"] else ""
                  for name in ("ours", PEER)),
            ]
        )  # fmt: skip
    headings = ["bags of", "ours / TorchRec's", "ours sends", "times as fast as TorchRec", "by processor",
                "times fewer bytes", "KiB", "TorchRec's", "by formula", "messages", "ms", "TorchRec's"]  # fmt: skip
    title = f"a step of {figures['batch']:,} samples over {figures['ranks']} ranks"
    print_rows(console, title, headings, lines)
    print_notes(console, [*figures["notes"], *([figures["missing"]] if figures["missing"] else [])])
    return figures


def _spread(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"


def _planner(console: Console, quick: bool) -> dict[str, Any]:
    figures = measure_planner(quick)
    lines = []
    for row in figures["rows"]:
        peers = [row["peers"].get(cut, {}) for cut in PEER_CUTS]
        for name in ("lookups", "memory"):
            cells = [f"{one[name]:.3f}" if name in one else "none" for one in (row["ours"], row["columns"], *peers)]
            lines.append([row["case"], str(row["ranks"]), name, *cells])
    headings = ["ids of a sample", "ranks", "of", "ours", "ours, columns", *(f"TorchRec, {cut}" for cut in PEER_CUTS)]
    print_rows(console, "largest load of a rank, in multiples of the mean: MLPerf's DLRM-v2", headings, lines)
    many = figures["many"]
    seconds = statistics.median(many["processor_seconds"])
    console.print(f"{many['tables']:,} tables on {many['ranks']} ranks: {seconds:.2f} s of a processor")
    reasons = dict.fromkeys(
        "none: " + peer["reason"] for row in figures["rows"] for peer in row["peers"].values() if "reason" in peer
    )
    print_notes(console, [*figures["notes"], *reasons, *([figures["missing"]] if figures["missing"] else [])])
    return figures


def _tiers(console: Console, quick: bool, folder: Path) -> dict[str, Any]:
    figures = measure_tiers(quick, folder)
    lines = []
    for row in figures["file"]:
        milliseconds = [row["seconds"][name]["seconds"]["median"] * 1e3 for name in ("file", "memory")]
        share = row["bytes_in_memory"] / row["bytes"]
        lines.append(
            [
                row["case"],
                f"{row['pages']} ({row['evidence']})",
                f"{share:.2f}",
                "yes" if row["equal"] else "NO",
                _spread(row["speed"]),
                *(f"{value:.1f}" for value in milliseconds),
                f"{row['rows_a_step']['reads']:,.0f}",
                f"{row['pages_a_second']:,.0f}" if row.get("pages_a_second") else "",
            ]
        )
    headings = ["step of", "pages of the file", "of the bytes in memory", "same bits", "speed, memory's as 1",
                "ms, file", "memory", "rows read", "pages the disk reads a second"]  # fmt: skip
    print_rows(console, f"tables in a file; asked: {figures['file_target']:g} times memory's speed", headings, lines)
    lines = [
        [
            str(row["dim"]),
            name,
            _spread(row[name]["cost"]),
            *(f"{row[name]['seconds'][kind]['seconds']['median'] * 1e3:.1f}" for kind in ("dynamic", "fixed")),
            f"{row[name]['admitted_a_step']:,.0f}",
        ]
        for row in figures["dynamic"]
        for name in ("known", "new")
    ]
    headings = ["columns", "ids", "time, fixed tables' as 1", "ms, dynamic", "fixed", "rows made a step"]
    print_rows(console, f"dynamic tables; asked: at most {figures['dynamic_target']:g} times", headings, lines)
    print_notes(console, [*figures["notes"], *([figures["missing"]] if figures["missing"] else [])])
    return figures


PARTS: dict[Part, Callable[..., dict[str, Any]]] = {
    Part.exactness: _exactness,
    Part.exchange: _exchange,
    Part.planner: _planner,
    Part.tiers: _tiers,
}


def _prepare() -> dict[str, str]:
    torch.set_num_threads(1)
    return {}


main = Program(
    "zionex",
    PARTS,
    "Compare embedding tables over processes, in files and for any ids with tables of one process and with TorchRec.",
    quick_help="Few and small: shows that it works, its figures mean nothing.",
    prepare=_prepare,
).command()


if __name__ == "__main__":
    typer.run(main)
