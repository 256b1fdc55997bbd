"""Ranking models that benchmarks train once, on the synthetic teacher, with tables large relative to the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.data.ranking.datasets import DataConfig
from cordillera.data.ranking.logs.synthetic import SyntheticLog
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


def as_own_log(data: DataConfig, folder: Path) -> DataConfig:
    """Write the synthetic log as a user's file in ``folder``, with ids from a vocabulary, so that some are unseen."""
    log, path = SyntheticLog(data.synthetic), folder / "log.parquet"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        pl.concat([frame.drop("probability") for frame, _ in log.chunks()]).write_parquet(path)
    looked_up = {"encoding": "vocabulary", "num_embeddings": None}
    schema = log.schema.model_copy(
        update={
            "categorical": tuple(one.model_copy(update=looked_up) for one in log.schema.categorical),
            "lists": tuple(one.model_copy(update=looked_up) for one in log.schema.lists),
        }
    )
    return data.model_copy(update={"dataset": None, "path": str(path), "schema_": schema})


def trained(console: Console, name: str, folder: Path, quick: bool, *, own_log: bool = False) -> Run:
    """Return a run of a model of ``MODELS``, trained for one epoch; ``quick`` uses few samples and steps.

    With ``own_log``, ids are looked up in a vocabulary (:func:`as_own_log`).
    """
    keys = {**DATA, **MODELS[name], **(QUICK if quick else {})}
    recipe = recipes.load(f"synthetic-{name}", [f"{key}={value!r}".replace("'", '"') for key, value in keys.items()])
    if own_log:
        recipe = recipe.model_copy(update={"data": as_own_log(recipe.data, folder)})
    console.print(f"training {name} on {keys['data.synthetic.rows']:,} samples")
    outcome = workflows.train(recipe, folder / name)
    evaluation = outcome.evaluation
    assert evaluation is not None
    console.print(f"{name}: test NE {next(iter(evaluation.tasks.values())).metrics['ne']:.4f}")
    return outcome.run
