"""Quality after training over two processes whose rows travel raw, within the published bounds, and beyond them."""

from __future__ import annotations

import json
import tempfile
import types
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
from _processes import run_processes
from _zionex_cases import placement

from cordillera import recipe as recipes
from cordillera.data.ranking.cache import Splits
from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.loader import Loader
from cordillera.distributed.codecs.coders import named_coders
from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.recipe import RankingRecipe
from cordillera.run import Run
from cordillera.training.ranking.metrics import RankingMetrics
from cordillera.training.ranking.ranks import ManyRanks
from cordillera.training.ranking.scoring import scorer
from cordillera.training.ranking.trainer import Trainer
from cordillera.workflows.trained import model_of

RANKS = 2
SEEDS = tuple(range(1, 13))
SCALES = {"raw": 0.0, "bounded": 1.0, "bounded, 10 times": 10.0}
DECAY = 65_536 / 306_969  # part of training over which bounds fall from twice their values, the paper's on Kaggle
WITHIN = 0.0002  # asked: change of NE at the published bounds
RECIPES: dict[str, dict[str, Any]] = {
    "movielens-dlrm": {"training.epochs": 8, "training.decay": "linear"},
    "synthetic-dlrm": {
        "training.decay": "linear",
        "data.synthetic.rows": 300_000,
        "data.synthetic.largest_vocabulary": 20_000,
        "data.batch_size": 1024,
    },
}
_FIXED = {"training.patience": None, "training.evaluate_every": 10**9, "training.precision": "fp32", "threads": 1}
_QUICK = {"training.max_steps": 6, "data.synthetic.rows": 20_000}


def _recipe(name: str, quick: bool, folder: str) -> RankingRecipe:
    given = {**_FIXED, **RECIPES[name], **(_QUICK if quick else {})}
    if not name.startswith("synthetic"):
        given = {key: value for key, value in given.items() if not key.startswith("data.synthetic")}
    else:
        given["data.cache_dir"] = folder
    words = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    found = recipes.load(name, words)
    assert isinstance(found, RankingRecipe)
    return found


def _trained(recipe: RankingRecipe, splits: Splits, scale: float, seed: int, folder: Path) -> dict[str, float]:
    """Train on one rank with bounds of a scale, 0 for raw rows; return the NE of the test split and of training."""
    links = Collectives(None, Ledger(), 600.0)
    if links.rank == 0:
        Run.create(folder, "")
    dist.barrier()
    torch.manual_seed(seed)
    model = model_of(recipe.model_copy(update={"seed": seed}), splits.features)
    cut = placement("rows", splits.features.tables, model.tables.embedding_dim, RANKS)
    model.tables = tables = ShardedEmbeddingTables.of(model.tables, cut, links)
    loader = Loader(splits.train, recipe.data.batch_size, shuffle=recipe.data.shuffle, seed=seed)
    watchdog: Any = types.SimpleNamespace(at=lambda where: None, should_stop=False)
    trainer = Trainer(
        recipe.training,
        model,
        loader,
        None,
        Run(folder),
        tasks=splits.features.tasks,
        device=torch.device("cpu"),
        ranks=ManyRanks(tables, watchdog),
    )
    if scale:
        tables.coders = named_coders("bounded", cut, scale=scale, iterations=round(DECAY * trainer.total_steps))
    torch.manual_seed(seed)
    trainer.fit()
    sent = float(links.ledger.traffic["rows"].bytes)
    score = trainer.ranks.scorer(scorer(model, torch.device("cpu"), recipe.training.precision))
    found = {}
    for name, dataset in (("test", splits.test), ("train", splits.train)):
        metrics = RankingMetrics()
        for batch in Loader(dataset, 8192).epoch():
            assert batch.labels is not None
            metrics.update(score(batch)[:, 0], batch.labels[:, 0])
        found[name] = float(metrics.compute()["ne"])
    return {**found, "steps": trainer.progress.step, "bytes": sent}


def _on_rank(rank: int, folder: str) -> dict[str, Any]:
    settings = json.loads(Path(folder, "settings.json").read_text())
    found: dict[str, Any] = {}
    for name in RECIPES:
        recipe = _recipe(name, settings["quick"], settings["cache"])
        splits = prepare(recipe.data)
        for seed in settings["seeds"]:
            for label, scale in SCALES.items():
                at = Path(folder, f"{name}-{seed}-{scale}")
                found[f"{name}|{label}|{seed}"] = _trained(recipe, splits, scale, seed, at)
    return found


def _row(name: str, label: str, seeds: list[int], found: dict[str, Any]) -> dict[str, Any]:
    """Return NE over seeds, and its change from raw rows with the same seeds."""
    own = [found[f"{name}|{label}|{seed}"] for seed in seeds]
    raw = [found[f"{name}|raw|{seed}"] for seed in seeds]
    row: dict[str, Any] = {"recipe": name, "codec": label, "steps": own[0]["steps"]}
    for split in ("test", "train"):
        changes = [one[split] / other[split] - 1 for one, other in zip(own, raw, strict=True)]
        row[split] = {
            "ne": [one[split] for one in own],
            "mean": mean(one[split] for one in own),
            "changes": changes,
            "change": mean(changes),
            "standard_error": stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else None,
        }
    row["ratio"] = sum(one["bytes"] for one in raw) / sum(one["bytes"] for one in own)
    return row


def measure_training(quick: bool) -> dict[str, Any]:
    """Return NE with raw rows, at the published bounds and at ten times them, with the same seeds."""
    seeds = list(SEEDS[:2] if quick else SEEDS)
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        for name in RECIPES:
            prepare(_recipe(name, quick, str(cache)).data)
        settings = {"quick": quick, "seeds": seeds, "cache": str(cache)}
        Path(folder, "settings.json").write_text(json.dumps(settings))
        ended = run_processes(RANKS, Path(folder), _on_rank, 7200)
    if ended.codes != [0] * RANKS:
        raise RuntimeError(ended.said)
    found = ended.found[0]
    return {
        "evidence": "measured",
        "seeds": seeds,
        "rows": [_row(name, label, seeds, found) for name in RECIPES for label in SCALES],
        "asked": {"change": WITHIN},
        "notes": [
            "two processes, every table cut in two halves of its rows, so that half of the distinct rows of a batch "
            "are exchanged; own rows are exact, as in every training",
            "bounds of 1, 3 or 5 % of the range, from twice these over the first 21 % of the steps, as published",
            "change: NE over that with raw rows and the same seed, less one; mean over seeds with its standard error",
            "lookups of the evaluation are exact",
        ],
    }
