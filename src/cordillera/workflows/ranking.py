"""What a person does with the recipe of a ranking model, as functions."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet
import torch

from cordillera import recipe as recipes
from cordillera.data.ranking.cache import ClickDataset, Splits
from cordillera.data.ranking.datasets import prepare, read_rows
from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import FeatureSpec
from cordillera.data.ranking.loader import Loader
from cordillera.data.ranking.unseen import UnseenCount, warn_of_split
from cordillera.embeddings.cached_tables import require_cpu
from cordillera.errors import DataError, Interrupted, NumericsError
from cordillera.models import flops
from cordillera.models.ranking import build
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.dispatch.plan import PrecisionPlan
from cordillera.numerics.dispatch.training_linear import Applied, apply_for_training
from cordillera.recipe import Recipe
from cordillera.reports.ranking.run import write_report
from cordillera.run import Run, RunError, check_recipe, disk_errors, next_folder, write_atomically
from cordillera.serving.ranking import quantized_model
from cordillera.training import checkpoints
from cordillera.training.ranking.evaluation import Evaluation
from cordillera.training.ranking.evaluation import evaluate as evaluate_split
from cordillera.training.ranking.trainer import (
    Report,
    Trainer,
    Watcher,
    best_checkpoint,
    load_weights,
    scorer,
    select_device,
)
from cordillera.training.scaling import power_law as scaling_laws
from cordillera.training.scaling.power_law import ScalingStudy
from cordillera.workflows.threads import keep as keep_threads
from cordillera.workflows.threads import threads_of

USED_PLAN_FILE = "used-training-plan.json"
"""In a run's folder: the plan by which it is trained."""


def _silent(text: str) -> None:
    """Say nothing."""


@dataclass
class Outcome:
    """What :func:`train` did.

    Attributes:
        run: The run's folder.
        report: Report of training.
        evaluation: The test split's evaluation; None if training was interrupted or there is no test split.
    """

    run: Run
    report: Report
    evaluation: Evaluation | None


def model_of(recipe: Recipe, features: FeatureSpec) -> RankingModel:
    """Build the model of a recipe with weights that depend on the recipe's seed alone.

    Args:
        recipe: The recipe.
        features: Names and sizes of the data's features.
    """
    torch.manual_seed(recipe.seed)
    return build(recipe.model, features, recipe.tables)


@contextlib.contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """A region in which CPU kernels take so many threads.

    Args:
        count: How many; None for as many as before.
    """
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _loader(recipe: Recipe, dataset: ClickDataset, *, training: bool) -> Loader:
    data = recipe.data
    if training:
        # A stream is trained on in its own order: shuffling would let the past learn from the future.
        shuffle = "none" if recipe.training.progressive else data.shuffle
        return Loader(dataset, data.batch_size, shuffle=shuffle, seed=recipe.seed)
    return Loader(dataset, data.evaluation_batch_size)


def _describe(recipe: Recipe, model: RankingModel, splits: Splits) -> dict[str, Any]:
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
    recipe: Recipe,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    watch: Watcher | None = None,
    say: Callable[[str], object] = _silent,
) -> Outcome:
    """Train a recipe into a run folder, evaluate it on the test split and write its report.

    Args:
        recipe: Recipe to train.
        folder: The run's folder. Default: ``runs/NAME``, or ``runs/NAME-2`` and so on if that exists.
        resume: Continue the run in ``folder`` from its newest checkpoint; the recipe is the one that stands in it.
        watch: Called after every step; see :class:`~cordillera.training.ranking.trainer.Trainer`.
        say: Called with one line of text at each stage.

    Raises:
        RunError: the folder exists (without ``resume``) or does not (with it).
        CheckpointError: the newest checkpoint is corrupt.
        DataError: the data cannot be had or is not acceptable.
        TrainingError: the loss is not finite.
        NumericsError: the plan that the recipe names is not one of training, of this machine and of this model.
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
            # a run keeps the plan that it began with: another one would end in other bits
            source = Path(recipe.training.plan) if begins else run.folder / USED_PLAN_FILE
            plan, applied = _with_plan(model, source, recipe)
            say(
                f"plan: {len(applied.planned)} linear layers by kernels of {source}, {len(applied.left)} in fp32, "
                f"{len(applied.unknown)} of them unknown to the plan"
            )
        if not resume:
            run = Run.create(folder or next_folder(Path("runs"), recipe.name), recipes.dump(recipe))
            stack.enter_context(run.lock())
        if begins:
            if plan is not None:
                plan.save(run.folder / USED_PLAN_FILE)
            described = _describe(recipe, model, splits)
            with disk_errors(run.folder):
                (run.folder / "encoder").mkdir(exist_ok=True)
            splits.encoder.save(run.folder / "encoder")
            run.write_json("model.json", described)
        else:
            described = card_of(run)
            if described["data"]["fingerprint"] != splits.folder.name:
                raise DataError(
                    "has changed since the run began, or an earlier version read it otherwise; a resumed run must see "
                    "the same samples",
                    where=recipe.data.label,
                    remedy="restore the files, or start a new run",
                )
        if recipe.threads is None and threads is not None:
            keep_threads(run, threads)
        say(
            f"model: {described['name']}, {described['parameters']:,} parameters "
            f"({described['embedding_parameters']:,} in tables), {described['training_flops']:,} training FLOPs "
            "an example"
        )
        validation = _loader(recipe, splits.validation, training=False) if len(splits.validation) else None
        trainer = Trainer(
            recipe.training,
            model,
            _loader(recipe, splits.train, training=True),
            validation,
            run,
            tasks=splits.features.tasks,
            device=device,
            watch=watch,
            recipe=recipe,
        )
        if resume:
            found = trainer.resume()
            say(
                f"resumed at step {trainer.progress.step}"
                if found
                else "no checkpoint yet: starting from the beginning"
            )
        report = trainer.fit()
        if plan is not None and applied.unplanned:
            say(f"plan: {applied.unplanned:,} products had no kernel and were computed in fp32")
        if report.ended == "interrupted":
            return Outcome(run, report, None)
        evaluation = None
        if len(splits.test):
            early = recipe.training.patience is not None and report.progress.best_step is not None
            step = report.progress.best_step if early else report.progress.step
            place = (step, trainer.total_steps)
            evaluation = _evaluate(run, recipe, model, splits, "test", device, place)
        write_report(run)
        return Outcome(run, report, evaluation)


def _with_plan(model: RankingModel, file: Path, recipe: Recipe) -> tuple[PrecisionPlan, Applied]:
    """A model that is trained by a plan, with it."""
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
    recipe: Recipe,
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


def card_of(run: Run) -> dict[str, Any]:
    """Content of ``model.json`` of a ranking run.

    Args:
        run: The run.

    Raises:
        RunError: the file is missing or damaged, or belongs to another kind of run.
    """
    card = run.read_json("model.json")
    tasks, data = card.get("tasks"), card.get("data")
    sizes = [card.get(key) for key in ("parameters", "embedding_parameters", "training_flops")]
    if (
        not isinstance(tasks, list)
        or not tasks
        or not all(isinstance(one, str) for one in [*tasks, card.get("name")])
        or not all(isinstance(size, int) for size in sizes)
        or not isinstance(data, dict)
        or not {"fingerprint", "facts"} <= set(data)
        or not isinstance(data["facts"], dict)
    ):
        raise RunError(
            "does not describe a ranking model", where=str(run.folder / "model.json"), remedy="restore the file"
        )
    return card


def recipe_of(run: Run) -> Recipe:
    """The recipe that stands in a run's folder.

    Args:
        run: Run of a ranking model.

    Raises:
        RunError: it is one of a language model.
    """
    recipe = recipes.load(run.recipe_file)
    if not isinstance(recipe, Recipe):
        raise RunError(
            "is a run of a language model, which scores no samples",
            where=str(run.folder),
            remedy=f"let it write with `cordillera generate {run.folder}`",
        )
    return recipe


def splits_of(run: Run, recipe: Recipe) -> Splits:
    """The prepared data of a run, encoded as its model was trained.

    Args:
        run: The run.
        recipe: That stands in its folder.

    Raises:
        DataError: the data has changed, so that its ids or numbers are encoded otherwise than the model knows them.
    """
    splits = prepare(recipe.data)
    if card_of(run)["data"]["fingerprint"] == splits.folder.name:
        return splits
    if not Encoder.load(run.folder / "encoder").gives_same_rows(splits.encoder):
        raise DataError(
            "has changed since the run was trained: the model does not know its ids and scales",
            where=recipe.data.label,
            remedy="restore the files, or train a new run; `cordillera predict` scores other samples",
        )
    return splits


def load_model(run: Run, features: FeatureSpec, device: torch.device) -> tuple[Recipe, RankingModel]:
    """Load the recipe of a run and its model, ready to score.

    Args:
        run: The run.
        features: Names and sizes of the features of the run's data.
        device: Device of the model.

    Raises:
        CheckpointError: there is no checkpoint, or it is corrupt.
        RunError: the recipe has changed since the checkpoint was written.
    """
    recipe, model, _ = _load(run, features, device)
    return recipe, model


def _load(run: Run, features: FeatureSpec, device: torch.device) -> tuple[Recipe, RankingModel, checkpoints.Checkpoint]:
    recipe = recipe_of(run)
    model = model_of(recipe, features)
    checkpoint = best_checkpoint(run, use_best=recipe.training.patience is not None)
    check_recipe(checkpoint.state.get("recipe"), recipe, run.recipe_file)
    load_weights(model, checkpoint)
    return recipe, model.to(device).eval(), checkpoint


def evaluate(run: Run | Path | str, split: str = "test") -> Evaluation:
    """Evaluate a run on one split of its data and write ``evaluation.json`` (or ``evaluation-SPLIT.json``) into it.

    Args:
        run: The run or its folder.
        split: ``train``, ``validation`` or ``test``.

    Raises:
        RunError: it is not a run, or the split is not one of the three.
        DataError: the data has changed since the run was trained.
    """
    run = run if isinstance(run, Run) else Run(run)
    if split not in ("train", "validation", "test"):
        raise RunError(f"must be train, validation or test, got {split!r}", where="--split")
    recipe = recipe_of(run)
    device = select_device(recipe.device)
    with with_threads(recipe.threads):
        splits = splits_of(run, recipe)
        _, model, checkpoint = _load(run, splits.features, device)
        place = (checkpoint.step, checkpoint.state.get("total_steps"))
        return _evaluate(run, recipe, model, splits, split, device, place)


def predict(
    run: Run | Path | str,
    file: Path | str,
    out: Path | str | None = None,
    *,
    batch_size: int = 8192,
    quantized: bool = False,
    planned: bool = False,
) -> tuple[Path, int]:
    """Score a file of samples and write the scores beside the samples' ids.

    Args:
        run: The run or its folder.
        file: CSV, TSV or Parquet file with the columns of the training data; labels are not needed.
        out: Path of the scores, ending in ``.csv`` or ``.parquet``. Default: ``FILE-scores.csv`` beside ``file``. The
            columns are the schema's ``ids``, then ``score`` (or ``score_TASK`` for several tasks), probabilities in
            float64. The file appears only when it is complete.
        batch_size: Number of samples scored at a time.
        quantized: Whether to score with the model that ``cordillera quantize`` made from the run.
        planned: Whether to score with the kernels that ``cordillera probe`` chose for the run.

    Returns:
        Path of the scores and the number of rows.

    Raises:
        DataError: the file cannot be read, lacks a column, or holds a value that training would have refused.
        NumericsError: a logit is NaN or infinite; the sample is named.
        RunError: the scores cannot be written; no part of them remains.
    """
    run = run if isinstance(run, Run) else Run(run)
    file = Path(file)
    target = Path(out) if out is not None else file.with_name(f"{file.name.split('.')[0]}-scores.csv")
    if target.suffix not in (".csv", ".parquet"):
        raise DataError(f"must end in .csv or .parquet, got {target.suffix!r}", where=str(target))
    if target.resolve() == file.resolve():
        raise DataError("would overwrite the samples", where=str(target), remedy="name another file with --out")
    if not target.parent.is_dir():
        raise DataError("the folder does not exist", where=str(target.parent), remedy="make it first")
    recipe = recipe_of(run)
    device = select_device(recipe.device)
    encoder = Encoder.load(run.folder / "encoder")
    card = card_of(run)
    tasks, unseen = tuple(card["tasks"]), UnseenCount(encoder, card["data"]["facts"])
    # A plan is valid for the number of threads that it was measured with.
    with with_threads(recipe.threads if planned else threads_of(recipe.threads, _silent)):
        features = replace(encoder.features, tasks=tasks)
        if quantized:
            device = torch.device("cpu")
            made_of = quantized_model.origin(run, use_best=recipe.training.patience is not None)
            model, _ = quantized_model.load(run.folder / quantized_model.FOLDER, model_of(recipe, features), made_of)
            score = scorer(model, device, quantized_model.precision_of(run.folder / quantized_model.FOLDER))
        elif planned:
            from cordillera.workflows.probing import load_planned

            _, model = load_model(run, features, torch.device("cpu"))
            model, most = load_planned(run, model)
            score, batch_size = scorer(model, torch.device("cpu"), "fp32"), min(batch_size, most)
        else:
            _, model = load_model(run, features, device)
            score = scorer(model, device, recipe.training.precision, recipe.training.emulate)
        names = ["score"] if len(tasks) == 1 else [f"score_{task}" for task in tasks]
        rows = 0
        with _Writer(target) as writer:
            for frame, place in read_rows(str(file), recipe.data, encoder.schema):
                encoded = encoder.encode(frame, where=place, labels=False)
                unseen.update(encoded)
                logits = []
                for begin in range(0, len(encoded), batch_size):
                    part = np.arange(begin, min(begin + batch_size, len(encoded)))
                    logits.append(score(encoded.take(part).batch()))
                whole = torch.cat(logits).double()
                wrong = (~torch.isfinite(whole)).nonzero()
                if len(wrong):
                    row, column = wrong[0].tolist()
                    raise NumericsError(
                        f"the model's logit is {float(whole[row, column])}; no scores were written",
                        where=place.at(row, names[column]),
                        remedy="look for weights that are not finite, or for values far beyond those of training",
                    )
                scores = whole.sigmoid().numpy()
                columns = [frame[name] for name in encoder.schema.ids if name in frame.columns]
                columns += [pl.Series(name, scores[:, i]) for i, name in enumerate(names)]
                writer.write(pl.DataFrame(columns))
                rows += len(frame)
            writer.finish()
    unseen.warn(str(file))
    return target, rows


class _Writer:
    """Writes frames one after another to a file that appears only when it is complete.

    Args:
        target: Path of the file, ending in ``.csv`` or ``.parquet``.

    Raises:
        RunError: the file cannot be written.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        self.parquet: pyarrow.parquet.ParquetWriter | None = None
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
            _remove_abandoned(left)
        with self._errors():
            self.file = open(self.temporary, "xb")  # noqa: SIM115 (closed in __exit__)
            fcntl.flock(self.file, fcntl.LOCK_SH)

    def __enter__(self) -> _Writer:
        return self

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return disk_errors(self.target, "free some space, or name a file on another disk with --out")

    def write(self, frame: pl.DataFrame) -> None:
        with self._errors():
            if self.target.suffix == ".csv":
                self.file.write(frame.write_csv(include_header=self.file.tell() == 0).encode())
                return
            table = frame.to_arrow()
            if self.parquet is None:
                self.parquet = pyarrow.parquet.ParquetWriter(self.file, table.schema)
            self.parquet.write_table(table)

    def finish(self) -> None:
        with self._errors():
            if self.parquet is not None:
                self.parquet.close()
            self.file.flush()
            os.fsync(self.file.fileno())
            os.replace(self.temporary, self.target)

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self.temporary.unlink()
        if self.parquet is not None:
            with contextlib.suppress(OSError):
                self.parquet.close()  # the file has been removed
        with contextlib.suppress(OSError):
            self.file.close()


def _remove_abandoned(temporary: Path) -> None:
    """Delete a temporary file unless a process still writes it."""
    with contextlib.suppress(OSError), open(temporary, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink()


@dataclass
class Sweep:
    """What :func:`sweep` found.

    Attributes:
        folder: Where the runs, ``sweep.json`` and the plots are.
        study: Sizes, values and the fitted law.
        plot: The drawing of NE against FLOPs.
    """

    folder: Path
    study: ScalingStudy
    plot: Path


def sweep(
    source: str | Path,
    sizes: Sequence[str],
    *,
    seeds: int = 1,
    overrides: Sequence[str] = (),
    folder: Path | str | None = None,
    watch: Watcher | None = None,
    say: Callable[[str], object] = _silent,
) -> Sweep:
    """Train a recipe in several sizes and fit test NE against training FLOPs an example.

    Runs that are finished are not trained again and interrupted ones are resumed, so a sweep that was stopped goes on
    where it was. The law is ``NE = floor + a * FLOPs ** b``; the floor is the Bayes-optimal NE where the data's is
    known, else zero.

    Args:
        source: A shipped recipe's name or a path.
        sizes: Each a text of ``section.key=value`` parts between blanks, smallest size first.
        seeds: Repetitions of every size: the recipe's seed, and those after it.
        overrides: Applied to all sizes.
        folder: Where everything goes. Default: ``runs/NAME-sweep``.
        watch: See :func:`train`.
        say: Called with one line of text at each stage.

    Raises:
        RecipeError: some size is not a valid recipe; nothing is trained then.
        RunError: a folder of the sweep holds a run of another recipe.
        Interrupted: training was; what was trained is saved.
        DataError: there are fewer than three sizes.
    """
    if len(sizes) < 3:
        raise DataError(f"a law needs at least three sizes, got {len(sizes)}", where="--size")
    first = _ranking_recipe(source, [*overrides, *shlex.split(sizes[0])])
    planned = []
    for number, size in enumerate(sizes):
        for seed in range(first.seed, first.seed + seeds):
            recipe = _ranking_recipe(source, [*overrides, *shlex.split(size), f"seed={seed}"])
            planned.append((f"size-{number + 1}-seed-{seed}", recipe))
    parent = Path(folder) if folder is not None else Path("runs") / f"{first.name}-sweep"
    runs = []
    for number, (name, recipe) in enumerate(planned, 1):
        place = parent / name
        exists = (place / "recipe.toml").is_file()
        if exists and recipes.load(place / "recipe.toml") != recipe:
            raise RunError(
                "holds a run of another recipe", where=str(place), remedy="choose another --run folder for this sweep"
            )
        status = Run(place).status() if exists else None
        if exists and (place / "evaluation.json").is_file() and (status is None or status.is_complete):
            say(f"[{number}/{len(planned)}] {name}: done before")
        else:
            say(f"[{number}/{len(planned)}] {name}: {sizes[(number - 1) // seeds]}")
            outcome = train(recipe, place, resume=exists, watch=watch)
            if outcome.report.ended == "interrupted":
                raise Interrupted(
                    "this run is not finished; everything is saved",
                    where=str(place),
                    remedy="give the same command again to go on",
                )
        runs.append(Run(place))
    bayes = card_of(runs[0])["data"]["facts"].get("bayes_ne")
    study = scaling_laws.study(scaling_laws.measure(runs), floor=bayes or 0.0)
    plot = parent / "sweep.png"
    scaling_laws.plot(study, [plot, parent / "sweep.svg"], bayes=bayes, title=f"{first.name}: test NE against FLOPs")
    write_atomically(parent / "sweep.json", study.to_json() + "\n")
    return Sweep(parent, study, plot)


def _ranking_recipe(source: str | Path, overrides: Sequence[str]) -> Recipe:
    recipe = recipes.load(source, overrides)
    if not isinstance(recipe, Recipe):
        remedy = "for language models, `cordillera isoflop` fits losses against compute"
        raise DataError("is a recipe of a language model; a sweep fits test NE", where=str(source), remedy=remedy)
    return recipe
