"""A Llama with experts beside a dense one of equal active arithmetic, on the same text: the part ``quality``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from _results import FinishedPieces
from _tables import print_notes
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.data.language.batches import PackedTokens
from cordillera.data.language.corpora import prepare_corpora
from cordillera.data.language.held_out import held_out_batches
from cordillera.models.language.flops import flops_per_token
from cordillera.models.language.llama import Llama, parameter_count
from cordillera.models.language.moe import ExpertLayer
from cordillera.recipe import LanguageRecipe
from cordillera.reports.ranking.comparison import mean_interval
from cordillera.run import Run
from cordillera.serving.language.language_model import load_language_model
from cordillera.workflows.language import batches_of

SEEDS, STEPS, WARM_UP, BALANCED = 3, 1200, 0.5, 1.2
TOGETHER, WINDOWS = 10, 6  # steps whose choices are counted together, and how often
SIZES = ("model.hidden=64", "model.layers=2", "model.heads=2", "model.kv_heads=1")
RECIPES = {  # the dense one makes up for the router
    "dense": ("llama-debug", ("model.ffn=195",)),
    "experts": ("llama-moe", ("model.ffn=96",)),
}


def _recipe(name: str, seed: int, quick: bool) -> LanguageRecipe:
    shipped, own = RECIPES[name]
    steps = 4 if quick else STEPS
    changes = [f"seed={seed}", f"training.steps={steps}", f"training.evaluate_every={steps}", "training.log_every=1"]
    if quick:
        changes += ["packing.tokens=512", "packing.context=256", "training.evaluation_tokens=512"]
    found = recipes.load(shipped, [*SIZES, *own, *changes, f"training.checkpoint_every={steps}"])
    assert isinstance(found, LanguageRecipe)
    return found


class _Choices:
    """Choices of every expert of a model, ``[layers, E]``, counted while it is open."""

    def __init__(self, model: Llama) -> None:
        self._layers = [one for one in model.modules() if isinstance(one, ExpertLayer)]
        self.counts = [torch.zeros(layer.router.config.count) for layer in self._layers]

    def __enter__(self) -> _Choices:
        self._hooks = [
            layer.router.register_forward_hook(lambda module, given, found, i=i: self._count(i, found[0]))
            for i, layer in enumerate(self._layers)
        ]
        return self

    def _count(self, layer: int, chosen: Tensor) -> None:
        self.counts[layer] += torch.bincount(chosen.flatten(), minlength=len(self.counts[layer]))

    def __exit__(self, *raised: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def imbalance(self) -> float:
        """Return the choices of the busiest expert in multiples of the mean, averaged over layers."""
        return sum(float(count.max() / count.mean()) for count in self.counts) / len(self.counts)


def _imbalances(recipe: LanguageRecipe, folder: Path) -> dict[str, float]:
    """Return the imbalance of the trained model over training text, ten steps at a time, and over held-out text."""
    model = load_language_model(folder, dtype="float32").model
    assert isinstance(model, Llama)

    def of(microbatches: Iterable[PackedTokens]) -> float:
        with torch.no_grad(), _Choices(model) as choices:
            for one in microbatches:
                model(one.tokens, one.offsets)
        return choices.imbalance()

    corpora = prepare_corpora(recipe.data)
    iterations, found = batches_of(recipe, corpora), []
    for _ in range(WINDOWS):
        together = itertools.islice(iterations, TOGETHER)
        found.append(of(one for iteration in together for one in iteration.microbatches))
    held_out = held_out_batches(corpora, recipe.packing, tokens=recipe.training.evaluation_tokens)
    return {"training text": sum(found) / WINDOWS, "held-out text": of(held_out.microbatches)}


def _trained(key: dict[str, Any], folder: Path, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    found: dict[str, Any] | None = pieces.get(key)
    if found is not None:
        return found
    recipe, place = _recipe(key["model"], key["seed"], quick), folder / f"{key['model']}-{key['seed']}"
    workflows.train(recipe, place)
    records = Run(place).metrics()
    steps = [record for record in records if record["kind"] == "train"]
    *_, evaluation = (record for record in records if record["kind"] == "evaluation")
    found = {"loss": evaluation["loss"], "tokens": evaluation["targets"], "training": [s["loss"] for s in steps][-50:]}
    if key["model"] == "experts":
        late = [step["expert_imbalance"] for step in steps[int(WARM_UP * len(steps)) :]]
        found["imbalance"] = {"steps": sum(late) / len(late), **_imbalances(recipe, place)}
    pieces.add(key, found)
    return found


def measure_quality(console: Console, quick: bool, folder: Path, pieces: FinishedPieces) -> dict[str, Any]:
    """Train both models over several seeds and compare their losses on held-out text in pairs."""
    seeds = range(1, 2 if quick else 1 + SEEDS)
    sizes = {name: _recipe(name, 1, quick).model for name in RECIPES}
    setting = {name: _recipe(name, 1, quick).model_dump_json() for name in RECIPES}
    rows = []
    for seed in seeds:
        runs = {
            name: _trained({"model": name, "seed": seed, "recipe": setting[name]}, folder, quick, pieces)
            for name in RECIPES
        }
        rows.append({"seed": seed, **runs, "difference": runs["experts"]["loss"] - runs["dense"]["loss"]})
    table = Table(title="loss on held-out text in nats a byte (measured)", title_justify="left")
    for heading in ("seed", "dense", "experts", "difference", "imbalance of steps", "of ten", "of held-out text"):
        table.add_column(heading, justify="right")
    for row in rows:
        losses, imbalance = (row[name]["loss"] for name in RECIPES), row["experts"]["imbalance"]
        cells = (*(f"{loss:.4f}" for loss in losses), f"{row['difference']:+.4f}")
        table.add_row(
            str(row["seed"]), *cells, *(f"{imbalance[key]:.2f}" for key in ("steps", "training text", "held-out text"))
        )
    console.print(table)
    change = mean_interval([row["difference"] for row in rows])
    models = {
        name: {"parameters": parameter_count(config), "flops_per_token": flops_per_token(config)}
        for name, config in sizes.items()
    }
    notes = [f"difference {change.value:+.4f} ({change.low:+.4f} to {change.high:+.4f})"]
    for name, of in models.items():
        notes.append(f"{name}: {of['parameters']:,} parameters, {of['flops_per_token']:,} FLOPs a token")
    print_notes(console, notes)
    return {
        "evidence": "measured", "steps": STEPS, "asked": {"imbalance": BALANCED}, "models": models, "rows": rows,
        "change": {"value": change.value, "low": change.low, "high": change.high}, "notes": notes,
    }  # fmt: skip
