"""Training and evaluation of the recipe of a ranking model, as functions."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cordillera import recipe as recipes
from cordillera.data.ranking.cache import ClickDataset, Splits
from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.loader import Loader
from cordillera.data.ranking.unseen import warn_of_split
from cordillera.embeddings.cached_tables import require_cpu
from cordillera.errors import DataError, NumericsError, RunError
from cordillera.models import flops
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.dispatch.plan import PrecisionPlan
from cordillera.numerics.dispatch.training_linear import Applied, apply_for_training
from cordillera.recipe import RankingRecipe
from cordillera.reports.ranking.run import write_report
from cordillera.run import Run, disk_errors, next_folder
from cordillera.training import checkpoints
from cordillera.training.ranking.config import TrainingOutcome
from cordillera.training.ranking.evaluation import Evaluation
from cordillera.training.ranking.evaluation import evaluate as evaluate_split
from cordillera.training.ranking.scoring import scorer, select_device
from cordillera.training.ranking.trainer import StepCallback, Trainer
from cordillera.workflows._say import Say, silent
from cordillera.workflows.threads import keep as keep_threads
from cordillera.workflows.threads import threads_of
from cordillera.workflows.trained import (
    card_of,
    load_model_with_checkpoint,
    model_of,
    recipe_of,
    splits_of,
    with_threads,
)

USED_PLAN_FILE = "used-training-plan.json"
"""File in a run's folder with the plan of its training."""


@dataclass
class Outcome:
    """Run and report of :func:`train`, and the evaluation of the test split.

    The evaluation is None if training was interrupted or there is no test split.
    """

    run: Run
    report: TrainingOutcome
    evaluation: Evaluation | None


def _loader(recipe: RankingRecipe, dataset: ClickDataset, *, training: bool) -> Loader:
    data = recipe.data
    if training:
        # A stream keeps its order, because shuffling would reveal the future to the past.
        shuffle = "none" if recipe.training.progressive else data.shuffle
        return Loader(dataset, data.batch_size, shuffle=shuffle, seed=recipe.seed)
    return Loader(dataset, data.evaluation_batch_size)


def _describe(recipe: RankingRecipe, model: RankingModel, splits: Splits) -> dict[str, Any]:
    sample = next(iter(Loader(splits.train, min(64, len(splits.train))).epoch()))
    return {
        "name": recipe.model.name,
        "config": recipe.model.model_dump(mode="json"),
        **asdict(flops.count(model, sample)),
        "tables": dict(splits.features.tables),
        "tasks": list(splits.features.tasks),
        "dense_features": list(splits.features.dense),
        "sparse_features": [feature.name for feature in splits.features.sparse],
        "data": {
            "fingerprint": splits.folder.name,
            "examples": {"train": len(splits.train), "validation": len(splits.validation), "test": len(splits.test)},
            "facts": splits.facts,
        },
    }


def train(
    recipe: RankingRecipe,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    on_step: StepCallback | None = None,
    say: Say = silent,
) -> Outcome:
    """Train a ranking model into a run folder, evaluate it on the test split and write its report.

    ``recipe``, ``folder``, ``resume``, ``on_step``, ``say`` and errors are those of :func:`cordillera.workflows.train`.

    Raises:
        NumericsError: If the recipe's plan is not a plan of training for this machine and this model.
    """
    device = select_device(recipe.device)
    require_cpu(recipe.tables, device)
    with contextlib.ExitStack() as stack:
        if resume:
            run = Run(folder or "")
            stack.enter_context(run.lock())
        threads = recipe.threads
        if recipe.training.plan is None:  # a plan is valid for the number of threads that it was measured with
            threads = threads_of(recipe.threads, say, folder=folder if resume else None)
        stack.enter_context(with_threads(threads))
        say(f"data: {recipe.data.label}")
        splits = prepare(recipe.data)
        model = model_of(recipe, splits.features)
        plan = None
        begins = not (resume and checkpoints.steps(run.checkpoints))
        if recipe.training.plan is not None:
            # a run keeps the plan that it began with, because another one would give other bits
            source = Path(recipe.training.plan) if begins else run.folder / USED_PLAN_FILE
            plan, applied = _with_plan(model, source, recipe)
            say(
                f"plan: {len(applied.planned)} linear layers by kernels of {source}, {len(applied.left)} in fp32, "
                f"{len(applied.unknown)} of them unknown to the plan"
            )
        if not resume:
            run = Run.create(folder or next_folder(Path("runs"), recipe.name), recipes.dump(recipe))
            stack.enter_context(run.lock())
        described = _begin(run, recipe, model, splits, plan) if begins else _check_same_data(run, recipe, splits)
        if recipe.threads is None and threads is not None:
            keep_threads(run, threads)
        say(
            f"model: {described['name']}, {described['parameters']:,} parameters "
            f"({described['embedding_parameters']:,} in tables), {described['training_flops']:,} training FLOPs "
            "an example"
        )
        trainer = _trainer(recipe, model, splits, run, device, on_step)
        if resume:
            found = trainer.resume()
            how = f"resumed at step {trainer.progress.step}"
            say(how if found else "no checkpoint yet: starting from the beginning")
        report = trainer.fit()
        if plan is not None and applied.unplanned:
            say(f"plan: {applied.unplanned:,} products had no kernel and were computed in fp32")
        if report.ended == "interrupted":
            return Outcome(run, report, None)
        evaluation = None
        if len(splits.test):
            best = report.progress.best_step if recipe.training.patience is not None else None
            place = (report.progress.step if best is None else best, trainer.total_steps)
            evaluation = _evaluate(run, recipe, model, splits, "test", device, place)
        write_report(run)
        return Outcome(run, report, evaluation)


def _begin(
    run: Run, recipe: RankingRecipe, model: RankingModel, splits: Splits, plan: PrecisionPlan | None
) -> dict[str, Any]:
    """Write the files of a run that training starts with; return the content of ``model.json``."""
    if plan is not None:
        plan.save(run.folder / USED_PLAN_FILE)
    described = _describe(recipe, model, splits)
    with disk_errors(run.folder):
        (run.folder / "encoder").mkdir(exist_ok=True)
    splits.encoder.save(run.folder / "encoder")
    run.write_json("model.json", described)
    return described


def _check_same_data(run: Run, recipe: RankingRecipe, splits: Splits) -> dict[str, Any]:
    """Check that a resumed run sees the samples that it began with; return the content of ``model.json``."""
    described = card_of(run)
    if described["data"]["fingerprint"] != splits.folder.name:
        raise DataError(
            "has changed since the run began, or an earlier version read it otherwise; a resumed run must see the same "
            "samples",
            where=recipe.data.label,
            remedy="restore the files, or start a new run",
        )
    return described


def _trainer(
    recipe: RankingRecipe,
    model: RankingModel,
    splits: Splits,
    run: Run,
    device: torch.device,
    on_step: StepCallback | None,
) -> Trainer:
    validation = _loader(recipe, splits.validation, training=False) if len(splits.validation) else None
    return Trainer(
        recipe.training,
        model,
        _loader(recipe, splits.train, training=True),
        validation,
        run,
        tasks=splits.features.tasks,
        device=device,
        on_step=on_step,
        recipe=recipe,
    )


def _with_plan(model: RankingModel, file: Path, recipe: RankingRecipe) -> tuple[PrecisionPlan, Applied]:
    """Apply a plan of training to a model; return both."""
    plan = PrecisionPlan.load(file, select_device(recipe.device))
    most = max((choice.rows for choice in plan.choices), default=0)
    if most < recipe.data.batch_size:
        raise NumericsError(
            f"knows of {most} rows, batches have {recipe.data.batch_size}",
            where=str(file),
            remedy=f"cordillera probe RUN --training --rows {recipe.data.batch_size}",
        )
    return plan, apply_for_training(model, plan)


def _evaluate(
    run: Run,
    recipe: RankingRecipe,
    model: RankingModel,
    splits: Splits,
    split: str,
    device: torch.device,
    place: tuple[int | None, int | None],
) -> Evaluation:
    """Evaluate weights; ``place`` holds the number of their training steps and the total number of steps."""
    dataset: ClickDataset = getattr(splits, split)
    evaluation = evaluate_split(
        scorer(model, device, recipe.training.precision, recipe.training.emulate),
        _loader(recipe, dataset, training=False).epoch(),
        splits.features.tasks,
        split=split,
        segments={name: dataset.segments(name) for name in splits.encoder.schema.segments},
    )
    warn_of_split(splits.facts, split)
    evaluation = replace(evaluation, step=place[0], steps=place[1])
    name = "evaluation.json" if split == "test" else f"evaluation-{split}.json"
    run.write_json(name, json.loads(evaluation.to_json()))
    return evaluation


def evaluate(run: Run | Path | str, split: str = "test") -> Evaluation:
    """Evaluate a ``run`` on one ``split``; see :func:`cordillera.workflows.evaluate`.

    Raises:
        RunError: If it is not a run, or the split is not one of the three.
        DataError: If the data has changed since the run was trained.
    """
    run = run if isinstance(run, Run) else Run(run)
    if split not in ("train", "validation", "test"):
        raise RunError(f"must be train, validation or test, got {split!r}", where="--split")
    recipe = recipe_of(run)
    device = select_device(recipe.device)
    with with_threads(recipe.threads):
        splits = splits_of(run, recipe)
        _, model, checkpoint = load_model_with_checkpoint(run, splits.features, device)
        place = (checkpoint.step, checkpoint.state.get("total_steps"))
        return _evaluate(run, recipe, model, splits, split, device, place)
