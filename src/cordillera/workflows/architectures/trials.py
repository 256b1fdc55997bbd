"""Trial of one candidate of an architecture search: a cascade of checks, each dearer than the one before."""

from __future__ import annotations

import copy
import math
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from cordillera import recipe as recipes
from cordillera.data.ranking.cache import Splits
from cordillera.data.ranking.features import RankingBatch
from cordillera.data.ranking.loader import Loader
from cordillera.errors import CordilleraError, Interrupted, RecipeError, RunError
from cordillera.models import flops
from cordillera.models.ranking.base import RankingModel
from cordillera.models.ranking.graphs.config import GraphConfig
from cordillera.models.ranking.graphs.supernet import Supernet
from cordillera.recipe import RankingRecipe
from cordillera.run import Run
from cordillera.training.ranking.evaluation import evaluate as evaluate_split
from cordillera.training.ranking.scoring import scorer
from cordillera.training.ranking.trainer import Trainer
from cordillera.workflows.trained import loader_of, model_of, recipe_of, restore_model, splits_of

_ROWS = 32  # samples that cheap stages compute
_TOLERANCE = 1e-4
_SHORT, _SMALLEST = 20, 32  # least steps and batch size of a training on a small share


class TrialConfig(BaseModel):
    """Settings of the trials of a search.

    Attributes:
        most_flops: Largest number of forward FLOPs an example; None for no limit.
        most_parameters: Largest number of parameters outside of the tables; None for no limit.
        sample: Share of the training split that a candidate is first trained on; 0 to leave this stage out.
        sample_ne: Largest NE of the validation split after that, unless it is below that of the untrained model; 1 is
            the NE of the constant base rate.
        supernet: Run of a supernet, whose weights stand for training from the beginning; None to train.
        fine_tune: Number of steps of training from the supernet's weights.
        seeds: Number of trainings, with the recipe's seed and those after it; the NE is their mean.
        test: Whether to score the test split as well, which a search does only after all choices are made.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    most_flops: int | None = Field(None, ge=1)
    most_parameters: int | None = Field(None, ge=1)
    sample: float = Field(0.01, ge=0, le=1)
    sample_ne: float = Field(1.2, gt=0)
    supernet: str | None = None
    fine_tune: int = Field(0, ge=0, le=10**9)
    seeds: int = Field(1, ge=1, le=100)
    test: bool = False


@dataclass(frozen=True)
class SearchTrial:
    """Result of a trial.

    Attributes:
        stage: Stage at which the candidate died, or ``finished``.
        why: Reason for its death; empty if it finished.
        ne: Normalised entropy of the validation split, mean over tasks and seeds; infinite if it did not finish.
        low: Lower bound of the 95 % interval of ``ne``, of the first seed.
        high: Upper bound of that interval.
        ne_of_seeds: NE of every seed.
        test_ne_of_seeds: NE of the test split of every seed; empty if it was not scored.
        flops: Forward FLOPs an example; 0 if not known.
        parameters: Parameters outside of the tables; 0 if not known.
        seconds: Time of the trial.
    """

    stage: str
    why: str = ""
    ne: float = math.inf
    low: float = math.nan
    high: float = math.nan
    ne_of_seeds: tuple[float, ...] = ()
    test_ne_of_seeds: tuple[float, ...] = ()
    flops: int = 0
    parameters: int = 0
    seconds: float = 0.0

    @property
    def test_ne(self) -> float:
        """Mean NE of the test split; NaN if it was not scored."""
        return math.fsum(self.test_ne_of_seeds) / len(self.test_ne_of_seeds) if self.test_ne_of_seeds else math.nan

    @property
    def is_finished(self) -> bool:
        """Whether the candidate was trained and evaluated."""
        return self.stage == "finished"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, for JSON; infinity, NaN and empty tuples are left out."""
        values = {key: one for key, one in asdict(self).items() if one != ()}
        return {key: one for key, one in values.items() if not (isinstance(one, float) and not math.isfinite(one))}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SearchTrial:
        """Read the output of :meth:`to_dict`; other keys are ignored."""
        known: dict[str, Any] = {}
        for key, value in values.items():
            if key in cls.__dataclass_fields__ and value is not None:
                known[key] = tuple(value) if isinstance(value, list) else value
        return cls(**known)


class _Died(Exception):
    """A candidate did not pass a stage."""

    def __init__(self, stage: str, why: str) -> None:
        super().__init__(why)
        self.stage, self.why = stage, why


def try_candidate(
    content: dict[str, Any], overrides: dict[str, Any], splits: Splits, config: TrialConfig
) -> SearchTrial:
    """Try a candidate; errors of it are a result, not an exception.

    Args:
        content: Recipe as plain values.
        overrides: The candidate's keys ``section.key`` with their values.
        splits: Data; the test split is not read.
        config: Settings of the trial.
    """
    began = time.perf_counter()
    sizes: dict[str, int] = {}
    try:
        result = _stages(content, overrides, splits, config, sizes)
    except _Died as died:
        result = SearchTrial(died.stage, died.why, flops=sizes.get("flops", 0), parameters=sizes.get("parameters", 0))
    return replace(result, seconds=time.perf_counter() - began)


def _stages(
    content: dict[str, Any], overrides: dict[str, Any], splits: Splits, config: TrialConfig, sizes: dict[str, int]
) -> SearchTrial:
    try:
        recipe = with_overrides(content, overrides)
    except CordilleraError as error:
        raise _Died("settings", _first_line(error)) from error
    batch = next(iter(Loader(splits.train, min(_ROWS, len(splits.train))).epoch()))
    model = _build(recipe, splits, "shape")  # used by all checks without training
    sizes.update(_count(model, splits, batch))
    for name, most in (("flops", config.most_flops), ("parameters", config.most_parameters)):
        if most is not None and sizes[name] > most:
            raise _Died("budget", f"{sizes[name]:,} {name}, of at most {most:,}")
    _check_reach(model, splits, batch)
    _check_future(model, batch)
    if config.sample and config.supernet is None:
        _check_sample(recipe, splits, config)
    bounds: list[tuple[float, float]] = []
    found: dict[str, list[float]] = {"validation": [], "test": []}
    for number in range(config.seeds):
        of_seed = recipe.model_copy(update={"seed": recipe.seed + number})
        if config.supernet is None:
            trained = _train(of_seed, splits, "training")
        else:
            trained = _inherit(of_seed, splits, config)
        for split in ("validation", "test")[: 1 + config.test]:
            ne, interval = _evaluate(trained, of_seed, splits, split)
            if not math.isfinite(ne):
                raise _Died("training", f"the NE of the {split} split is not a number")
            found[split].append(ne)
            bounds.append(interval)
    all_ne = found["validation"]
    low, high = bounds[0]
    return SearchTrial(
        "finished",
        ne=math.fsum(all_ne) / len(all_ne),
        low=low,
        high=high,
        ne_of_seeds=tuple(all_ne),
        test_ne_of_seeds=tuple(found["test"]),
        flops=sizes["flops"],
        parameters=sizes["parameters"],
    )


def _check_sample(recipe: RankingRecipe, splits: Splits, config: TrialConfig) -> None:
    """Refuse a model that is bad after training on a small share of the data, and worse than without training."""
    rows = min(len(splits.train), max(_SMALLEST * _SHORT, math.ceil(config.sample * len(splits.train))))
    batch_size = min(recipe.data.batch_size, max(_SMALLEST, rows // _SHORT))
    steps = -(-rows // batch_size)
    short = recipe.model_copy(
        update={
            "training": recipe.training.model_copy(update={"max_steps": steps, "epochs": 1, "evaluate_every": None}),
            "data": recipe.data.model_copy(update={"batch_size": batch_size}),
        }
    )
    ne = _evaluate(_train(short, splits, "sample"), short, splits)[0]
    if ne <= config.sample_ne:
        return
    before = _evaluate(_build(short, splits, "sample"), short, splits)[0]
    if not ne < before:
        raise _Died("sample", f"NE {ne:.4f} after {steps} steps on {rows:,} rows, {before:.4f} before")


def with_overrides(content: dict[str, Any], overrides: dict[str, Any]) -> RankingRecipe:
    """Return the recipe of plain values with a candidate's keys.

    Raises:
        RecipeError: If the candidate is not valid.
    """
    sections = copy.deepcopy(content)
    for key, value in overrides.items():
        recipes.set_key(sections, key, value)
    found = recipes.validate(sections, "candidate")
    assert isinstance(found, RankingRecipe)
    return found


def _first_line(error: Exception) -> str:
    if isinstance(error, RecipeError):
        return "; ".join(f"{key}: {why}" for key, why in error.problems)[:300]
    lines = str(error).strip().splitlines()
    return " ".join(line.strip() for line in lines[:3])[:300]


def _build(recipe: RankingRecipe, splits: Splits, stage: str) -> RankingModel:
    try:
        return model_of(recipe, splits.features)
    except (CordilleraError, ValueError, RuntimeError) as error:
        raise _Died(stage, _first_line(error)) from error


def _count(model: RankingModel, splits: Splits, batch: RankingBatch) -> dict[str, int]:
    """Return FLOPs and parameters of a model whose scores have the right shape and are finite."""
    try:
        counted = flops.count(model, batch)
        with torch.no_grad():
            scores = model.eval()(batch)
    except (CordilleraError, ValueError, RuntimeError) as error:
        raise _Died("shape", _first_line(error)) from error
    wanted = (len(batch), len(splits.features.tasks))
    if tuple(scores.shape) != wanted:
        raise _Died("shape", f"scores of shape {tuple(scores.shape)}, expected {wanted}")
    if not bool(scores.isfinite().all()):
        raise _Died("shape", "scores are not finite before training")
    return {"flops": counted.forward_flops, "parameters": counted.parameters}


def _check_reach(model: RankingModel, splits: Splits, batch: RankingBatch) -> None:
    """Refuse a model in which the gradient does not reach every feature; its weights are changed."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # weights that start at zero let no gradient through, but learn
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    embeddings = torch.randn(model.look_up(batch).shape, generator=generator).requires_grad_()
    dense = torch.randn(batch.dense.shape, generator=generator).requires_grad_()
    scores = model.score(dense, embeddings)
    (scores.float() * torch.randn(scores.shape, generator=generator)).sum().backward()
    features, lost = splits.features, []
    if dense.grad is None:
        lost += list(features.dense)
    else:
        lost += [name for name, one in zip(features.dense, dense.grad.abs().sum(0), strict=False) if not one > 0]
    if embeddings.grad is None:
        lost += [feature.name for feature in features.sparse]
    else:
        sums = embeddings.grad.abs().sum((0, 2))
        lost += [feature.name for feature, one in zip(features.sparse, sums, strict=False) if not one > 0]
    if lost:
        raise _Died("reach", f"no gradient reaches {', '.join(lost[:5])}" + (" and others" if len(lost) > 5 else ""))


def _check_future(model: RankingModel, batch: RankingBatch) -> None:
    """Refuse a model in which the score of a sample depends, in training, on those that come after it."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    half = len(batch) // 2
    if not half:
        return
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        embeddings, dense = model.look_up(batch), batch.dense.clone()
        before = model.score(dense, embeddings)[:half]
        later = embeddings.clone()
        for inputs in (later, dense):
            inputs[half:] = torch.randn(inputs[half:].shape, generator=generator)
        after = model.score(dense, later)[:half]
    if not torch.allclose(before, after, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise _Died("future", "the score of a sample depends on later samples in training, as with batch norm")


@cache
def load_supernet(folder: str) -> Supernet:
    """Return the supernet of a run.

    Raises:
        RunError: If it is a run of another model.
    """
    run = Run(folder)
    recipe = recipe_of(run)
    _, model = restore_model(run, splits_of(run, recipe).features, torch.device("cpu"))
    if not isinstance(model, Supernet):
        raise RunError(f"is a run of {recipe.model.name}, not of a supernet", where=folder)
    return model


def _inherit(recipe: RankingRecipe, splits: Splits, config: TrialConfig) -> RankingModel:
    """Return a candidate with the weights of a supernet, after fine-tuning if there is any."""
    assert config.supernet is not None
    if not isinstance(recipe.model, GraphConfig):
        raise _Died("training", f"the supernet has no weights of {recipe.model.name}")
    net, model = load_supernet(config.supernet), _build(recipe, splits, "training")
    try:
        weights = net.stand_alone(recipe.model)
        model.load_state_dict({**weights, **{f"tables.{name}": one for name, one in net.tables.state_dict().items()}})
    except (KeyError, RuntimeError) as error:
        raise _Died("training", f"the supernet has no weights of it: {_first_line(error)}") from error
    if not config.fine_tune:
        return model
    steps = recipe.training.model_copy(update={"max_steps": config.fine_tune})
    return _train(recipe.model_copy(update={"training": steps}), splits, "training", model)


def _train(recipe: RankingRecipe, splits: Splits, stage: str, model: RankingModel | None = None) -> RankingModel:
    """Train a candidate, or a ``model`` of it."""
    model = model or _build(recipe, splits, stage)
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        run = Run.create(Path(folder) / "run", "")
        validation = loader_of(recipe, splits.validation, training=False)
        keeps_best = recipe.training.patience is not None
        try:
            outcome = Trainer(
                recipe.training,
                model,
                loader_of(recipe, splits.train, training=True),
                validation if keeps_best else None,
                run,
                tasks=splits.features.tasks,
                device=torch.device("cpu"),
            ).fit()
        except CordilleraError as error:
            raise _Died(stage, _first_line(error)) from error
    if outcome.ended == "interrupted":
        raise Interrupted("a trial was interrupted", where="search")
    return model


def _evaluate(
    model: RankingModel, recipe: RankingRecipe, splits: Splits, split: str = "validation"
) -> tuple[float, tuple[float, float]]:
    """Return the NE of a split, with an interval; both are means over tasks."""
    evaluation = evaluate_split(
        scorer(model, torch.device("cpu"), recipe.training.precision, recipe.training.emulate),
        loader_of(recipe, getattr(splits, split), training=False).epoch(),
        splits.features.tasks,
        split=split,
    )
    tasks = list(evaluation.tasks.values())
    ne = math.fsum(task.metrics["ne"] for task in tasks) / len(tasks)
    bounds = [task.intervals.get("ne", (math.nan, math.nan)) for task in tasks]
    return ne, (sum(low for low, _ in bounds) / len(bounds), sum(high for _, high in bounds) / len(bounds))


__all__ = ["SearchTrial", "TrialConfig", "load_supernet", "try_candidate", "with_overrides"]
