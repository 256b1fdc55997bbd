"""Table rows in few bits with a cache: ``cordillera bench mixed-precision-embeddings``.

Parts: ``memory`` (bytes relative to float32 rows), ``speed`` (updates and training steps compared with FBGEMM),
``quality`` (NE relative to float32 rows over seeds). Each writes ``results/mixed_precision_embeddings-PART.json``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import _mixed_precision_quality
import _mixed_precision_speed
import typer
from _program import Program
from _results import FinishedPieces
from _tables import print_notes, print_ratios, print_rows
from rich.console import Console

from cordillera.kernels.host_memory import keep_freed_memory


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    memory = "memory"
    speed = "speed"
    quality = "quality"


def _memory(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    figures = _mixed_precision_speed.measure_memory(1_000 if quick else 10_000)
    rows = []
    for entry in figures["results"]:
        target = entry["target_at_most"]
        verdict = "" if target is None else "reached" if entry["share"] <= target else "[bold red]missed[/]"
        rows.append(
            [
                entry["optimizer"],
                entry["rows"],
                f"{entry['share']:.4f}",
                f"{entry['times_smaller']:.2f} x",
                f"{entry['bytes'] / 2**20:,.1f} of {entry['fp32_bytes'] / 2**20:,.1f} MiB",
                "" if target is None else f"at most {target} {verdict}",
            ]
        )
    headings = ["optimizer", "rows", "share of fp32", "smaller", "bytes", "target"]
    print_rows(
        console, f"26 tables of {figures['conditions']['rows']:,} x 64, optimizer's state included", headings, rows
    )
    print_notes(console, figures["notes"])
    return figures


def _speed(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    rows, rounds, calls = ([1_000], 3, 1) if quick else ([20_000, 100_000], 11, 4)
    figures = _mixed_precision_speed.measure_updates(rows, rounds, calls)
    _mixed_precision_speed.measure_training(rows[-1], rounds, calls, figures)
    content = figures.to_json()
    print_ratios(console, "updates and training steps", content)
    return content


def _quality(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    return _mixed_precision_quality.measure_quality(console, pieces, quick=quick)


PARTS: dict[Part, Callable[[Console, bool, FinishedPieces], dict[str, Any]]] = {
    Part.memory: _memory,
    Part.speed: _speed,
    Part.quality: _quality,
}


def _prepare() -> dict[str, str]:
    keep_freed_memory()  # as training does
    return {}


main = Program(
    "mixed_precision_embeddings",
    PARTS,
    "Measure embedding rows in 8 and 4 bits with a cache beside float32 rows and FBGEMM on this machine.",
    part_help="What to measure; repeat it for several. Default: all.",
    quick_help="Tiny sizes: shows that it works, its figures mean nothing.",
    threads=2,
    fresh=True,
    prepare=_prepare,
).command()


if __name__ == "__main__":
    typer.run(main)
