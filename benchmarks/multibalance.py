"""Balancing of tasks beside other ways: ``cordillera bench multibalance`` or ``python benchmarks/multibalance.py``.

Parts: ``scales`` (Adult with the loss of one task multiplied by up to 1,000, by a plain sum and balanced), ``methods``
(Adult and MovieLens-100K, three tasks each: test NE of every task by method, and of each task trained alone) and
``speed`` (a step beside that of a plain sum, and beside gradients of the shared parameters for each task). Each writes
``results/multibalance-PART.json``. Peers are those of torchjd, which ``make peers`` installs.
"""

from __future__ import annotations

import enum
import statistics
import time
from typing import Any

import typer
from _multibalance_peers import METHODS, Recipe, is_torchjd_there, trained
from _multibalance_speed import speed
from _program import Program
from _results import FinishedPieces
from _tables import print_notes, print_rows
from rich.console import Console

from cordillera.data.ranking.datasets import prepare

SEEDS = 5
FACTORS = (1.0, 100.0, 1000.0)
SCALED = "income"
ALONE = "each alone"
WITHIN, LOSES = 0.002, 0.05


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    scales = "scales"
    methods = "methods"
    speed = "speed"


def _piece(
    console: Console, pieces: FinishedPieces, recipe: Recipe, method: str, seed: int, factors: dict[str, float] | None
) -> dict[str, Any]:
    """Return the test metrics of one training, by task."""
    splits = prepare(recipe.of(seed, method, factors).data)
    key = {
        "data": splits.folder.name,
        "method": method,
        "recipe": recipe.of(seed, method, factors).model_dump(mode="json"),
    }
    found = pieces.get(key)
    if found is None:
        began = time.perf_counter()
        found = {"tasks": trained(recipe, splits, method, seed, factors), "seconds": time.perf_counter() - began}
        pieces.add(key, found)
        nes = ", ".join(f"{task} {one['ne']:.4f}" for task, one in found["tasks"].items())
        console.print(f"  {recipe.name}, {method}, seed {seed}, {factors or 'as they are'}: NE {nes}")
    tasks: dict[str, Any] = found["tasks"]
    return tasks


def _scales(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    recipe, results, rows = Recipe("Adult", quick), [], []
    for method in ("plain sum", "balanced, equal", "balanced, min-norm"):
        of_factor = {
            factor: [
                _piece(console, pieces, recipe, method, seed, {SCALED: factor} if factor != 1 else None)
                for seed in range(1, (1 if quick else SEEDS) + 1)
            ]
            for factor in FACTORS
        }
        for factor in FACTORS[1:]:
            changes = {
                task: [
                    scaled[task]["auc"] - plain[task]["auc"]
                    for scaled, plain in zip(of_factor[factor], of_factor[1.0], strict=True)
                ]
                for task in of_factor[1.0][0]
            }
            results.append({"method": method, "factor": factor, "auc_changes": changes})
            means = {task: statistics.fmean(values) for task, values in changes.items()}
            rows.append([method, f"{factor:,.0f}", *(f"{mean:+.4f}" for mean in means.values())])
    tasks = list(results[0]["auc_changes"])
    title = f"Adult, the loss of {SCALED} multiplied: change of test AUC"
    print_rows(console, title, ["method", "factor", *tasks], rows, "measured")
    return {
        "evidence": "measured",
        "scaled": SCALED,
        "within": WITHIN,
        "loses": LOSES,
        "results": results,
        "notes": ["changes are paired: the same seed with losses as they are"],
    }


def _methods(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    results, rows = [], []
    seeds = range(1, (1 if quick else SEEDS) + 1)
    for name in ("Adult", "MovieLens-100K"):
        recipe = Recipe(name, quick)
        of_methods: dict[str, list[dict[str, Any]]] = {}
        for method in METHODS:
            if not METHODS[method].needs_torchjd or is_torchjd_there():
                of_methods[method] = [_piece(console, pieces, recipe, method, seed, None) for seed in seeds]
        of_methods = {ALONE: [_alone(console, pieces, recipe, seed) for seed in seeds], **of_methods}
        alone: dict[str, float] = {}
        for method, found in of_methods.items():
            nes = {task: [one[task]["ne"] for one in found] for task in found[0]}
            aucs = {task: [one[task]["auc"] for one in found] for task in found[0]}
            means = {task: statistics.fmean(values) for task, values in nes.items()}
            alone = alone or means
            worst = max(100 * (mean / alone[task] - 1) for task, mean in means.items())
            results.append({"data": name, "method": method, "ne": nes, "auc": aucs, "worst_percent": worst})
            rows.append([name, method, *(f"{mean:.4f}" for mean in means.values()), f"{worst:+.2f} %"])
    heads = ["data", "method", "first task", "second", "third", "worst beside each alone"]
    print_rows(console, "test NE of three tasks", heads, rows, "measured")
    notes = [
        "one learning rate for all methods, chosen for the plain sum; worst: the task whose NE rises most beside a "
        "model of its own",
        "methods of torchjd have its defaults",
    ]
    print_notes(console, notes)
    return {"evidence": "measured", "results": results, "notes": notes}


def _alone(console: Console, pieces: FinishedPieces, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Return the test metrics of each task, trained without the losses of the others."""
    tasks, found = prepare(recipe.of(seed, "plain sum", None).data).features.tasks, {}
    for task in tasks:
        others = {other: 0.0 for other in tasks if other != task}
        found[task] = _piece(console, pieces, recipe, "plain sum", seed, others)[task]
    return found


main = Program(
    "multibalance",
    {Part.scales: _scales, Part.methods: _methods, Part.speed: speed},
    "Train several tasks with their gradients added up, balanced, and weighted by other methods.",
    threads=2,
    fresh=True,
).command()


if __name__ == "__main__":
    typer.run(main)
