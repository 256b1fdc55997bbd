"""Trainings of several processes whose exchanges the backend ``cordillera`` carries, beside Gloo."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _timing import Spread
from rich.console import Console
from rich.table import Table

from cordillera import recipe as recipes
from cordillera import workflows

ROUNDS, BACKENDS = 5, ("auto", "cordillera")
TRAININGS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "a Llama of 0.8 M parameters, shard 2 x tensor 2": (
        "llama-debug",
        ("parallel.shard=2", "parallel.tensor=2", "training.steps=30", "training.log_every=10",
         "training.evaluation_tokens=4096"),
        ("training.steps=4", "training.log_every=2"),
    ),
    "a DLRM, tables over 2 processes": (
        "synthetic-dlrm",
        ("parallel.processes=2", "training.epochs=1", "training.log_every=20", "data.synthetic.rows=600000"),
        ("data.synthetic.rows=60000", "training.log_every=4"),
    ),
}  # fmt: skip


def _seconds(name: str, backend: str, folder: Path, quick: bool) -> dict[str, float]:
    """Train once; return the seconds of a step after the first record, and the share that ranks waited for others."""
    shipped, changes, short = TRAININGS[name]
    recipe = recipes.load(shipped, [*changes, *(short if quick else ()), f"parallel.backend={backend}", "threads=1"])
    run = workflows.train(recipe, folder).run
    records = [one for one in run.metrics() if one["kind"] == "train"]
    steps = [one["step"] - before["step"] for before, one in itertools.pairwise(records)]
    seconds = [one["seconds"] / count for one, count in zip(records[1:], steps, strict=True)]
    exposed = [one.get("exposed_fraction", one.get("exposed_seconds", 0.0) / one["seconds"]) for one in records[1:]]
    losses = [one["loss"] for one in records]
    return {"step_s": statistics.median(seconds), "exposed": statistics.median(exposed), "loss": losses[-1]}


def training(console: Console, quick: bool) -> dict[str, Any]:
    """Train with both backends in turn."""
    rows = []
    for name in TRAININGS:
        found: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
        for turn in range(1 if quick else ROUNDS):
            for backend in BACKENDS if turn % 2 else BACKENDS[::-1]:
                with tempfile.TemporaryDirectory() as folder:
                    found[backend].append(_seconds(name, backend, Path(folder) / "run", quick))
        ratios = [
            gloo["step_s"] / ours["step_s"] for gloo, ours in zip(found["auto"], found["cordillera"], strict=True)
        ]
        row: dict[str, Any] = {"training": name, "ratio": Spread.of(ratios).to_json()}
        for backend, ones in found.items():
            row[backend] = {key: statistics.median(one[key] for one in ones) for key in ("step_s", "exposed", "loss")}
        row["same"] = len({one["loss"] for ones in found.values() for one in ones}) == 1
        rows.append(row)
    table = Table(title="steps of trainings (measured)", title_justify="left")
    for heading in ("training", "gloo ms", "ours ms", "ours is", "waiting, gloo", "waiting, ours", "same loss"):
        table.add_column(heading)
    for row in rows:
        gloo, ours, ratio = row["auto"], row["cordillera"], row["ratio"]
        table.add_row(
            row["training"], f"{gloo['step_s'] * 1e3:.1f}", f"{ours['step_s'] * 1e3:.1f}",
            f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
            f"{gloo['exposed']:.1%}", f"{ours['exposed']:.1%}", "yes" if row["same"] else "no",
        )  # fmt: skip
    console.print(table)
    return {"evidence": "measured", "rounds": ROUNDS, "rows": rows, "notes": ["one thread a process"]}
