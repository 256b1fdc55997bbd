"""Ranking compared with its peers: ``cordillera bench ranking`` or ``python benchmarks/ranking.py``.

Parts: ``update`` (the fused table update), ``speed`` (whole training steps, with FuxiCTR and TorchRec), ``memory``,
``loading``, ``quality`` (MovieLens-100K and Adult, with FuxiCTR), ``dhen`` (ensembles of modules), ``scaling`` (NE
against FLOPs on a log with known best NE). Each writes ``results/ranking-PART.json``.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from typing import Any

import _ranking_quality
import _ranking_scaling
import _ranking_speed
import typer
from _program import Program
from _results import FinishedPieces
from _tables import print_notes, print_ratios, print_rows
from rich.console import Console

from cordillera.kernels.host_memory import keep_freed_memory


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    update = "update"
    speed = "speed"
    memory = "memory"
    loading = "loading"
    quality = "quality"
    dhen = "dhen"
    scaling = "scaling"


SHORT = (Part.update, Part.speed, Part.memory, Part.loading)


def _update(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    rows, rounds, calls = ([1_000], 3, 1) if quick else ([100_000, 1_000_000], 9, 6)
    figures = _ranking_speed.measure_updates(rows, rounds, calls).to_json()
    print_ratios(console, "forward, backward and update of 26 tables", figures)
    return figures


def _speed(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    rows, rounds, calls = ([1_000], 3, 1) if quick else ([100_000, 1_000_000], 15, 3)
    figures = _ranking_speed.measure_training(rows, rounds, calls).to_json()
    print_ratios(console, "training steps", figures)
    return figures


def _memory(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    figures = _ranking_speed.measure_memory(20_000 if quick else 1_000_000).to_json()
    found, rows = figures["values"], figures["conditions"]["rows"]
    mebi = {key: f"{found[key] / 2**20:,.0f} MiB" for key in ("weights", "state", "batch", "baseline", "peak")}
    print_rows(
        console,
        f"peak memory of training 26 tables of {rows:,} x 16",
        ["ratio to what is needed", "at most", *mebi],
        [[f"{found['ratio']:.2f}", f"{found['target_at_most']}", *mebi.values()]],
    )
    print_notes(console, figures["notes"])
    return figures


def _loading(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    figures = _ranking_speed.measure_loading(60_000 if quick else 1_000_000).to_json()
    rows = [
        [
            entry["model"],
            entry["shuffle"],
            f"{entry['waiting']['median']:.1%}",
            f"{entry['slower_than_memory']['median']:+.1%}",
            f"{figures['values']['target_at_most']:.0%}",
            f"{entry['examples_per_second']:,.0f}",
        ]
        for entry in figures["values"]["rows"]
    ]
    headings = ["model", "shuffle", "waiting for data", "slower than from memory", "at most", "examples/s"]
    print_rows(console, "data loading", headings, rows)
    print_notes(console, figures["notes"])
    return figures


def _quality(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    return _ranking_quality.measure_quality(console, pieces, quick=quick)


def _dhen(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    return _ranking_quality.measure_dhen(console, pieces, quick=quick)


def _scaling(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    return _ranking_scaling.measure_scaling(console, pieces, quick=quick)


PARTS: dict[Part, Callable[[Console, bool, FinishedPieces], dict[str, Any]]] = {
    Part.update: _update,
    Part.speed: _speed,
    Part.memory: _memory,
    Part.loading: _loading,
    Part.quality: _quality,
    Part.dhen: _dhen,
    Part.scaling: _scaling,
}


def _prepare() -> dict[str, str]:
    # PyTorch's own sparse Adagrad triggers this warning of PyTorch.
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    not_kept = keep_freed_memory()  # as in training; also applies to the peers
    return {"freed_memory": f"given back: {not_kept}" if not_kept else "kept by the process, for all contenders"}


main = Program(
    "ranking",
    PARTS,
    "Measure ranking models beside FuxiCTR, TorchRec, FBGEMM and plain PyTorch on this machine.",
    part_help="What to measure; repeat it for several. Default: update, speed, memory, loading.",
    quick_help="Tiny sizes: shows that it works, its figures mean nothing.",
    threads=2,
    fresh=True,
    short=SHORT,
    all_help="Every part: hours on two cores; --part measures one.",
    prepare=_prepare,
).command()


if __name__ == "__main__":
    typer.run(main)
