"""Ranking compared with its peers: ``cordillera bench ranking`` or ``python benchmarks/ranking.py``.

Parts: ``update`` (the fused table update), ``speed`` (whole training steps, with FuxiCTR and TorchRec), ``memory``,
``loading``, ``quality`` (MovieLens-100K and Adult, with FuxiCTR), ``dhen`` (ensembles of modules), ``scaling`` (NE
against FLOPs on a log with known best NE). Each writes ``results/ranking-PART.json``.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import _ranking_quality
import _ranking_scaling
import _ranking_speed
import torch
import typer
from _machine import busy
from _results import RESULTS, FinishedPieces, make_console, write_part
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


def main(
    part: Annotated[
        list[Part] | None,
        typer.Option("--part", help="What to measure; repeat it for several. Default: update, speed, memory, loading."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every part: about an hour on two cores.")] = False,
    quick: Annotated[bool, typer.Option(help="Tiny sizes: shows that it works, its figures mean nothing.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the CPU's kernels.")] = 2,
    fresh: Annotated[bool, typer.Option(help="Forget finished pieces of an earlier, interrupted run.")] = False,
    results: Annotated[Path | None, typer.Option(help="Folder of the result files.")] = None,
) -> None:
    """Measure ranking models beside FuxiCTR, TorchRec, FBGEMM and plain PyTorch on this machine."""
    console = make_console()
    # PyTorch's own sparse Adagrad triggers this warning of PyTorch.
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    torch.set_num_threads(threads)
    not_kept = keep_freed_memory()  # as in training; also applies to the peers
    kept = f"given back: {not_kept}" if not_kept else "kept by the process, for all contenders"
    load = busy()
    if load is not None and load > 1:
        # Threads wait for each other many times per step, so other work on the cores distorts even interleaved ratios.
        console.print(f"warning: {load:g} processes were busy here in the last minute; measure on a quiet machine")
    folder = results or (RESULTS / "quick" if quick else RESULTS)
    for chosen in Part if everything else part or SHORT:
        pieces = FinishedPieces(folder / f"ranking-{chosen.value}.jsonl")
        if fresh:
            pieces.clear()
        elif len(pieces):
            console.print(f"{chosen.value}: continuing from {len(pieces)} finished pieces ({pieces.path})")
        measure = partial(PARTS[chosen], console, quick, pieces)
        write_part(console, folder, "ranking", chosen.value, quick, measure, freed_memory=kept)


if __name__ == "__main__":
    typer.run(main)
