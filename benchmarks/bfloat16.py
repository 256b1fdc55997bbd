"""Training in bfloat16 compared with float32: ``cordillera bench bfloat16`` or ``python benchmarks/bfloat16.py``.

Parts: ``accuracy`` (test NE of a DLRM on MovieLens-100K and on the synthetic teacher, trained in float32, in native
bfloat16 and in emulated bfloat16 with and without a float32 master, paired by seed) and ``split`` (weights stored as
two halves compared bit by bit with weights with a float32 master). Each writes ``results/bfloat16-PART.json``.
"""

from __future__ import annotations

import enum
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from _program import Program
from _results import FinishedPieces, train_to_the_end
from _tables import print_notes, print_rows
from rich.console import Console

from cordillera import recipe as recipes
from cordillera.data.ranking.cache import ClickDataset, Splits
from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.loader import Loader
from cordillera.recipe import RankingRecipe
from cordillera.reports.ranking.comparison import SeedMean, mean_interval
from cordillera.run import Run
from cordillera.training.ranking.metrics import RankingMetrics
from cordillera.training.ranking.scoring import scorer
from cordillera.training.ranking.trainer import Trainer
from cordillera.workflows.trained import model_of

SEEDS = 5
WITHIN_PERCENT = 0.05
# Rates fall to zero, so that most of the last updates are smaller than half a step of bfloat16; the last weights count.
SAME = {
    "training.patience": None,
    "training.evaluate_every": None,
    "training.decay": "linear",
    "training.precision": "fp32",
}
DATA: dict[str, tuple[str, dict[str, Any]]] = {
    # rate and epochs of the lowest validation NE in float32, among rates of 2.5e-4 to 2e-3 and 2 to 8 epochs
    "MovieLens-100K": (
        "movielens-dlrm",
        {"training.epochs": 4, "training.learning_rate": 5e-4, "tables.learning_rate": 5e-4},
    ),
    "synthetic teacher": (
        "synthetic-dlrm",
        {"data.synthetic.rows": 200_000, "data.batch_size": 2048, "data.fractions": [0.7, 0.05, 0.25]},
    ),
}
QUICK: dict[str, dict[str, Any]] = {
    "MovieLens-100K": {"training.max_steps": 2},
    "synthetic teacher": {"data.synthetic.rows": 20_000, "training.max_steps": 2},
}


def _emulate(**keys: str) -> dict[str, Any]:
    return {f"training.emulate.{key}": value for key, value in {"format": "bf16", **keys}.items()}


VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, native (autocast)": {"training.precision": "bf16"},
    "master, nearest even": _emulate(),
    "master, toward zero": _emulate(rounding="toward_zero"),
    "no master, stochastic": _emulate(weights="none", weight_rounding="stochastic"),
    "no master, nearest even": _emulate(weights="none"),
    "no master, toward zero": _emulate(weights="none", weight_rounding="toward_zero"),
}
PARITY = ("bfloat16, native (autocast)", "master, nearest even", "master, toward zero")
# Small updates are lost. Stochastic rounding is right on average; truncation shrinks weights, which may help a model
# that overfits; these two are only shown.
WORSE = ("no master, nearest even",)


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    accuracy = "accuracy"
    split = "split"


def _recipe(data: str, variant: dict[str, Any], seed: int, quick: bool) -> RankingRecipe:
    name, sizes = DATA[data]
    changes = {**SAME, **sizes, **(QUICK[data] if quick else {}), **variant, "seed": seed}
    found = recipes.load(name, changes)
    assert isinstance(found, RankingRecipe)
    return found


def _trained(recipe: RankingRecipe, splits: Splits) -> Trainer:
    model = model_of(recipe, splits.features)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            recipe.training,
            model,
            Loader(splits.train, recipe.data.batch_size, shuffle="global", seed=recipe.seed),
            None,
            Run.create(Path(folder) / "run", recipes.dump(recipe)),
            tasks=splits.features.tasks,
            device=torch.device("cpu"),
        )
        train_to_the_end(trainer)
    return trainer


def _ne(trainer: Trainer, dataset: ClickDataset) -> float:
    score = scorer(trainer.model, trainer.device, trainer.config.precision, trainer.config.emulate)
    metrics = RankingMetrics()
    for batch in Loader(dataset, 8192).epoch():
        assert batch.labels is not None
        metrics.update(score(batch)[:, 0], batch.labels[:, 0], batch.weights)
    return metrics.compute()["ne"]


def _interval(estimate: SeedMean) -> str:
    ends = "" if estimate.count < 2 else f" ({estimate.low:+.3f} to {estimate.high:+.3f})"
    return f"{estimate.value:+.3f} %{ends}"


def _accuracy(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    seeds = range(1, (1 if quick else SEEDS) + 1)
    results, rows, notes = [], [], []
    for data in DATA:
        splits = prepare(_recipe(data, {}, 1, quick).data)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
        for seed in seeds:  # all variants of a seed in sequence, so that an interruption leaves pairs
            for name, variant in VARIANTS.items():
                recipe = _recipe(data, variant, seed, quick)
                key = {"data": splits.folder.name, "recipe": recipe.model_dump(mode="json")}
                piece = pieces.get(key)
                if piece is None:
                    began = time.perf_counter()
                    trainer = _trained(recipe, splits)
                    piece = {
                        "ne": _ne(trainer, splits.test),
                        "steps": trainer.progress.step,
                        "seconds": time.perf_counter() - began,
                    }
                    pieces.add(key, piece)
                    console.print(f"  {data}, {name}, seed {seed}: test NE {piece['ne']:.5f}, {piece['seconds']:.1f} s")
                found[name].append(piece)
        base = [piece["ne"] for piece in found["float32"]]
        for name, measured in found.items():
            values = [piece["ne"] for piece in measured]
            relative = [100 * (value / of_float32 - 1) for value, of_float32 in zip(values, base, strict=True)]
            estimate = mean_interval(relative)
            verdict = _verdict(name, estimate)
            results.append(
                {
                    "data": data,
                    "variant": name,
                    "ne": values,
                    "relative_ne_percent": relative,
                    "mean_percent": estimate.value,
                    "interval_percent": [estimate.low, estimate.high],
                    "verdict": verdict,
                    "seconds": statistics.median(piece["seconds"] for piece in measured),
                    "steps": measured[0]["steps"],
                }
            )
            mean = f"{statistics.fmean(values):.5f}"
            rows.append([data, name, mean, "" if name == "float32" else _interval(estimate), verdict])
    headings = ["data", "variant", "test NE", "relative to float32, paired (95 %)", "asked for"]
    print_rows(console, f"DLRM in bfloat16, means over {len(seeds)} seeds", headings, rows, "emulated")
    notes.append("one rate for all variants, chosen in float32, falling linearly to zero; the last weights are scored")
    notes.append("formats are emulated by rounding float32, except native bfloat16; optimizer states are float32")
    print_notes(console, notes)
    return {
        "evidence": "emulated",
        "conditions": {
            "seeds": list(seeds),
            "recipes": {
                data: _recipe(data, {}, 1, quick).model_dump(mode="json", exclude={"name", "description", "seed"})
                for data in DATA
            },
            "variants": VARIANTS,
            "within_percent": WITHIN_PERCENT,
        },
        "results": results,
        "notes": notes,
    }


def _verdict(name: str, estimate: SeedMean) -> str:
    if name in PARITY:
        word = "yes" if abs(estimate.value) <= WITHIN_PERCENT else "no"
        return f"within {WITHIN_PERCENT} %: {word}"
    if name in WORSE:
        return f"measurably worse: {'yes' if estimate.low > 0 else 'no'}"
    if name != "float32":
        return f"measurably different: {'yes' if estimate.excludes_zero else 'no'}"
    return ""


def _split(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    policies = {
        "master": _emulate(weights="master", weight_rounding="toward_zero"),
        "split": _emulate(weights="split"),
    }
    rows, results = [], []
    for data in DATA:
        splits = prepare(_recipe(data, {}, 1, quick).data)
        full: dict[str, dict[str, torch.Tensor]] = {}
        steps = 0
        for name, variant in policies.items():
            trainer = _trained(_recipe(data, variant, 1, quick), splits)
            assert trainer.storage is not None
            full[name] = {weight: trainer.storage.full(weight) for weight in trainer.storage.weights}
            steps = trainer.progress.step
        different = sum(
            int((full["split"][name].view(torch.int32) != weight.view(torch.int32)).sum())
            for name, weight in full["master"].items()
        )
        numbers = sum(weight.numel() for weight in full["master"].values())
        results.append({"data": data, "steps": steps, "numbers": numbers, "different": different})
        rows.append([data, f"{steps:,} steps", f"{numbers:,}", f"{different:,}"])
    headings = ["data", "training", "numbers in matrices and tables", "bits differ from the float32 master's"]
    print_rows(console, "weights as two halves of 16 bits", headings, rows, "emulated")
    return {"evidence": "emulated", "results": results, "reached": all(not row["different"] for row in results)}


PARTS: dict[Part, Callable[[Console, bool, FinishedPieces], dict[str, Any]]] = {
    Part.accuracy: _accuracy,
    Part.split: _split,
}


main = Program(
    "bfloat16",
    PARTS,
    "Train a DLRM in float32, native bfloat16 and emulated bfloat16, with and without float32 master weights.",
    part_help="What to measure. Default: both.",
    quick_help="Tiny sizes: shows that it works, its figures mean nothing.",
    threads=2,
    fresh=True,
).command()


if __name__ == "__main__":
    typer.run(main)
