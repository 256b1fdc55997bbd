"""Quality of models that read histories in order beside models that sum them: the part ``quality``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from _results import FinishedPieces
from rich.console import Console
from rich.table import Table

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.data.ranking.datasets import DataConfig
from cordillera.recipe import RankingRecipe
from cordillera.reports.ranking.comparison import mean_interval

SEEDS = 5
READERS, PEERS = ("hstu", "target-attention"), ("dnn", "dlrm")
ROWS, ITEMS, KINDS, LENGTH = 80_000, 64, 4, 20
LIKED, OTHER = 0.8, 0.25  # probability of a click if the candidate is of the kind of the latest entry, and if not
PLANTED = (  # of all models: with the recipe's steps target attention learns nothing in its epochs
    "training.learning_rate=0.005", "training.patience=60", "tables.learning_rate=0.01", "tables.weight_decay=0.0",
    "model.embedding_init=0.2",
)  # fmt: skip
LOGS = {"movielens-100k": "MovieLens-100K", "planted": "planted order"}


def planted_log(folder: Path, rows: int) -> DataConfig:
    """Write a log whose clicks depend on the latest entry of a history alone: a sum of entries cannot tell which it is.

    Half of the candidates are of the kind of the latest entry; the kinds of items are not among the features.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"planted-{rows}.parquet"
    draw = np.random.default_rng(0)
    kind = np.arange(ITEMS) % KINDS
    lengths = draw.integers(1, LENGTH + 1, rows)
    histories = [draw.integers(0, ITEMS, length) for length in lengths]
    latest = np.array([kind[history[-1]] for history in histories])
    wanted = np.where(draw.random(rows) < 0.5, latest, draw.integers(0, KINDS, rows))
    candidate = wanted + KINDS * draw.integers(0, ITEMS // KINDS, rows)
    click = draw.random(rows) < np.where(wanted == latest, LIKED, OTHER)
    frame = pl.DataFrame(
        {
            "item_id": candidate,
            "history": [[str(item) for item in history] for history in histories],
            "click": click.astype(np.int64),
            "time": np.arange(rows),
        }
    )
    frame.write_parquet(path)
    schema = {
        "categorical": [{"name": "item_id", "table": "item_id"}],
        "lists": [{"name": "history", "table": "item_id", "max_length": LENGTH}],
        "labels": ["click"],
        "timestamp": "time",
    }
    return DataConfig.model_validate({"path": str(path), "schema": schema, "batch_size": 1024})


def _recipe(name: str, seed: int, data: DataConfig | None, quick: bool) -> RankingRecipe:
    changes = [f"seed={seed}"]
    if data is not None:
        changes += [*PLANTED, *(['model.sequences=["history"]'] if name in READERS else [])]
    if quick:
        changes += ["training.max_steps=3", "training.evaluate_every=3"]
    found = recipes.load(f"movielens-{name}", changes)
    assert isinstance(found, RankingRecipe)
    return found if data is None else found.model_copy(update={"data": data})


def _trained(key: dict[str, Any], data: DataConfig | None, folder: Path, quick: bool, pieces: FinishedPieces) -> Any:
    """Return the measures of the test split of one run."""
    done = pieces.get(key)
    if done is not None:
        return done
    recipe = _recipe(key["model"], key["seed"], data, quick)
    evaluation = workflows.train(recipe, folder / f"{key['log']}-{key['model']}-{key['seed']}").evaluation
    assert evaluation is not None
    (task,) = evaluation.tasks.values()
    found = {name: float(task.metrics[name]) for name in ("ne", "auc")}
    pieces.add(key, found)
    return found


def measure_quality(console: Console, quick: bool, folder: Path, pieces: FinishedPieces) -> dict[str, Any]:
    """Train the shipped recipes over several seeds and compare normalised entropies of the test split in pairs.

    On the planted log all models take other steps (``PLANTED``).
    """
    seeds, rows = (1, 3000) if quick else (SEEDS, ROWS)
    logs: dict[str, DataConfig | None] = {"planted": planted_log(folder, rows)}
    if not quick:
        logs = {"movielens-100k": None, **logs}
    found = []
    for log, data in logs.items():
        runs: dict[str, list[dict[str, float]]] = {}
        for name in (*PEERS, *READERS):
            for seed in range(1, seeds + 1):
                key = {"log": log, "rows": rows, "model": name, "seed": seed}
                key |= {"items": ITEMS, "kinds": KINDS, "settings": list(PLANTED)} if data is not None else {}
                runs.setdefault(name, []).append(_trained(key, data, folder, quick, pieces))
        for name in READERS:
            row: dict[str, Any] = {"log": log, "model": name, "runs": runs[name], "change": {}}
            for peer in PEERS:
                differences = [100 * (a["ne"] / b["ne"] - 1) for a, b in zip(runs[name], runs[peer], strict=True)]
                change = mean_interval(differences)
                row["change"][peer] = {"percent": change.value, "low": change.low, "high": change.high}
            found.append(row)
        found += [{"log": log, "model": name, "runs": runs[name], "change": {}} for name in PEERS]
    table = Table(title="test NE, and changes in % of it (measured)", title_justify="left")
    for heading in ("log", "model", "NE", "AUC", *(f"beside {peer}" for peer in PEERS)):
        table.add_column(heading, justify="left" if heading in ("log", "model") else "right")
    for row in found:
        mean = (f"{np.mean([run[key] for run in row['runs']]):.4f}" for key in ("ne", "auc"))
        table.add_row(LOGS[row["log"]], row["model"], *mean, *(f"{c['percent']:+.2f}" for c in row["change"].values()))
    console.print(table)
    conditions = {"seeds": seeds, "rows": rows, "items": ITEMS, "kinds": KINDS, "length": LENGTH, "settings": PLANTED}
    return {"evidence": "measured", "conditions": conditions, "rows": found}
