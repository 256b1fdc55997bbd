"""Ranking models that benchmarks train once, on the synthetic teacher with tables that are large beside the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.run import Run

DATA = {
    "data.synthetic.rows": 600_000,
    "data.synthetic.largest_vocabulary": 60_000,
    "data.fractions": [0.6, 0.2, 0.2],
    "data.batch_size": 2048,
    "model.embedding_dim": 32,
    "training.precision": "fp32",
    "threads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {"model.bottom_mlp": [512, 256], "model.top_mlp": [1024, 1024, 512]},
    "wukong": {"model.fmb_mlp": [512, 512], "model.top_mlp": [1024, 512]},
}
QUICK = {"data.synthetic.rows": 20_000, "data.synthetic.largest_vocabulary": 300, "training.max_steps": 4}


def trained(console: Console, name: str, folder: Path, quick: bool) -> Run:
    """A model of ours, trained for one epoch.

    Args:
        console: Told what is going on.
        name: A key of ``MODELS``.
        folder: Where runs are kept.
        quick: Few samples and steps.
    """
    keys = {**DATA, **MODELS[name], **(QUICK if quick else {})}
    recipe = recipes.load(f"synthetic-{name}", [f"{key}={value!r}".replace("'", '"') for key, value in keys.items()])
    console.print(f"training {name} on {keys['data.synthetic.rows']:,} samples")
    outcome = workflows.train(recipe, folder / name)
    evaluation = outcome.evaluation
    assert evaluation is not None
    console.print(f"{name}: test NE {next(iter(evaluation.tasks.values())).metrics['ne']:.4f}")
    return outcome.run
