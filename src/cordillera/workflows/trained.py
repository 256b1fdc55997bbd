"""Data of ranking recipes as batches, and the models and data of finished runs."""

from __future__ import annotations

import contextlib
import shlex
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cordillera import recipe as recipes
from cordillera.data.ranking.cache import SPLITS, ClickDataset, Splits
from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import FeatureSpec, RankingBatch
from cordillera.data.ranking.loader import Loader
from cordillera.embeddings.file_tables import FileTables
from cordillera.embeddings.tables import EmbeddingTables, MadeTablesConfig
from cordillera.errors import CheckpointError, DataError, RunError, TrainingError
from cordillera.mistakes import flat_values
from cordillera.models.ranking import build
from cordillera.models.ranking.base import RankingModel
from cordillera.recipe import RankingRecipe
from cordillera.run import Run, RunStatus, check_recipe, recipe_state
from cordillera.training import checkpoints
from cordillera.training.optimizers import embedding_tables
from cordillera.training.ranking.config import NEED_GROUPS
from cordillera.training.ranking.scoring import ROWS, best_checkpoint, load_weights


def model_of(
    recipe: RankingRecipe, features: FeatureSpec, make: Callable[..., EmbeddingTables] | None = None
) -> RankingModel:
    """Build the model of a ``recipe`` for the data's ``features``, with weights that depend on the seed alone.

    ``make`` is that of :class:`~cordillera.embeddings.tables.MadeTablesConfig`; None for the tables of one process.
    """
    torch.manual_seed(recipe.seed)
    tables = recipe.tables if make is None else MadeTablesConfig.of(recipe.tables, make)
    return build(recipe.model, features, tables)


def in_file(recipe: RankingRecipe, folder: Path, *, read_only: bool = False) -> Callable[..., EmbeddingTables] | None:
    """Return the function that makes a recipe's tables in a file in ``folder``, or None for tables in memory.

    ``read_only`` is that of :class:`~cordillera.embeddings.file_tables.FileTables`.
    """
    return partial(FileTables, folder=folder, read_only=read_only) if recipe.tables.storage == "file" else None


def loader_of(recipe: RankingRecipe, dataset: ClickDataset, *, training: bool) -> Loader:
    """Return the loader of a split, ``dataset``, by the ``recipe``, for ``training`` or for evaluation."""
    data = recipe.data
    if training:
        # A stream keeps its order, because shuffling would reveal the future to the past.
        shuffle = "none" if recipe.training.progressive else data.shuffle
        return Loader(dataset, data.batch_size, shuffle=shuffle, seed=recipe.seed)
    return Loader(dataset, data.evaluation_batch_size)


def validation_of(recipe: RankingRecipe, splits: Splits) -> Loader | None:
    """Return the loader of the validation split of a recipe's ``splits``; None if it is empty.

    Args:
        recipe: Recipe whose ``training.stop_on`` is computed on the split.
        splits: Data of the recipe.

    Raises:
        TrainingError: If that metric needs groups, and the data has none; or if training is to react to it, and the
            split is empty.
    """
    metric = recipe.training.stop_on
    if metric in NEED_GROUPS and splits.encoder.schema.group is None:
        raise TrainingError(
            f"{metric} is of groups, and the data has none",
            where="training.stop_on",
            remedy="name the column of groups in data.schema.group, or choose 'ne', 'log_loss' or 'auc'",
        )
    if not len(splits.validation) and (recipe.training.patience is not None or recipe.training.decay == "plateau"):
        raise TrainingError(
            "waits for the validation split to get better, and that is empty",
            where="training.patience" if recipe.training.patience is not None else "training.decay",
            remedy="keep rows for it (data.fractions, or data.validation_path), or leave the key out",
        )
    return loader_of(recipe, splits.validation, training=False) if len(splits.validation) else None


def batches(recipe: RankingRecipe, split: str = "train", *, epoch: int = 0) -> Iterator[RankingBatch]:
    """Iterate over the batches of one epoch as training reads them, for a training loop of your own.

    The data is fetched and prepared if it has not been. Batches of ``train`` have ``data.batch_size`` rows and are
    shuffled by ``data.shuffle``, the recipe's seed and ``epoch``; those of other splits have
    ``data.evaluation_batch_size`` rows in order.

    Args:
        recipe: Recipe whose ``[data]`` section says what is read.
        split: ``train``, ``validation`` or ``test``.
        epoch: Number of the epoch, from 0.

    Raises:
        DataError: If the data is not available or not acceptable, or the split is not one of the three.
    """
    if split not in SPLITS:
        raise DataError(f"must be one of {', '.join(SPLITS)}, got {split!r}", where="split")
    splits = prepare(recipe.data)
    return loader_of(recipe, getattr(splits, split), training=split == "train").epoch(epoch)


def check_fixed_tables(recipe: RankingRecipe, what: str) -> None:
    """Refuse tables in a file and dynamic tables for ``what``, which reads whole tables of fixed size.

    Raises:
        RunError: If the recipe has such tables.
    """
    keys = {"tables.storage = 'file'": recipe.tables.storage == "file", "tables.dynamic": recipe.tables.dynamic}
    for key, has in keys.items():
        if has:
            raise RunError(f"{what} needs tables of fixed size in memory", where=key, remedy="train a run without it")


@contextlib.contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Set the number of threads of CPU kernels within the region; None keeps it."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def card_of(run: Run) -> dict[str, Any]:
    """Return the content of ``model.json`` of a ranking run.

    Raises:
        RunError: If the file is missing or damaged, or belongs to another kind of run.
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


def features_of(run: Run, encoder: Encoder) -> FeatureSpec:
    """Return the features that the model of a ranking ``run`` reads, from its ``encoder``, with the tasks it predicts.

    Raises:
        RunError: As :func:`card_of` does.
    """
    return replace(encoder.features, tasks=tuple(card_of(run)["tasks"]))


def warn_of_status(run: Run) -> RunStatus | None:
    """Return the status of a ``run`` whose weights are to be used, if known; warn if training was not completed."""
    try:
        status = run.status()
    except RunError as error:
        warnings.warn(str(error), stacklevel=2)
        return None
    if status is not None and status.warning:  # raised at one place, so that Python shows it once
        warnings.warn(f"{run.folder}: {status.warning}", stacklevel=2)
    return status


def recipe_of(run: Run) -> RankingRecipe:
    """Return the recipe in a run's folder.

    Raises:
        RunError: If it is the recipe of a language model.
    """
    recipe = recipes.load(run.recipe_file)
    if not isinstance(recipe, RankingRecipe):
        raise RunError(
            "is a run of a language model, which scores no samples",
            where=str(run.folder),
            remedy=f"`cordillera generate {shlex.quote(str(run.folder))}` writes with it, "
            "`cordillera convert` exports and quantises it",
        )
    return recipe


def splits_of(run: Run, recipe: RankingRecipe) -> Splits:
    """Return the prepared data of a ``run``, encoded as for training by its ``recipe``.

    Raises:
        DataError: If the data has changed, so that ids or numbers are encoded differently.
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


def start_of(recipe: RankingRecipe) -> tuple[Run, RankingRecipe]:
    """Return the run that ``training.start`` of a ``recipe`` names, and its recipe.

    Raises:
        RunError: If it does not exist, or is no run of a ranking model.
    """
    folder = Path(recipe.training.start or "").expanduser()
    if not folder.is_dir():
        remedy = "name the folder of a run that was trained"
        raise RunError(f"there is no folder '{folder}'", where="training.start", remedy=remedy)
    try:
        run = Run(folder)
        warn_of_status(run)
        return run, recipe_of(run)
    except RunError as error:
        raise RunError(f"{error.where} {error.what}", where="training.start", remedy=error.remedy) from None


def start_from(model: RankingModel, recipe: RankingRecipe) -> str:
    """Give a new ``model`` of a ``recipe`` the weights of the run that ``training.start`` names.

    Rows of ids that the run does not know keep their initial values; its ids have the same rows in both.

    Returns:
        Description of what was loaded, in one line.

    Raises:
        CheckpointError: If the run has no checkpoint, it is corrupt, or it is of another model.
        RunError: If it is no run of a ranking model, or the tables of one of both have no rows of fixed size in memory.
    """
    run, started = start_of(recipe)
    for one in (started, recipe):
        kept = one.tables.storage == "memory" and not one.tables.are_encoded
        if not kept or (one.tables.dynamic is None) != (recipe.tables.dynamic is None):
            raise RunError(
                "takes over tables in float32 in memory, both dynamic or both not",
                where="training.start",
                remedy="set tables.storage = 'memory', tables.rows = 'fp32' and tables.cache = 0, or leave it out",
            )
    labels = tuple(card_of(run)["tasks"])
    if labels != model.features.tasks:
        raise CheckpointError(
            f"{run.folder} learnt {', '.join(labels)}, here the labels are {', '.join(model.features.tasks)}",
            where="training.start",
            remedy="give data.schema.labels of that run, in its order, or train from the beginning",
        )
    features = Encoder.load(run.folder / "encoder").features
    theirs, ours = ([*one.dense, *(each.name for each in one.sparse)] for one in (features, model.features))
    if theirs != ours:  # weights are taken by the places of features
        raise CheckpointError(
            f"{run.folder} reads the features {', '.join(theirs)}; here they are {', '.join(ours)}",
            where="training.start",
            remedy="give data.schema the features of that run, in its order, or train from the beginning",
        )
    checkpoint = best_checkpoint(run, use_best=started.training.patience is not None)
    if recipe.tables.dynamic is not None:
        load_weights(model, checkpoint)
        return f"start: weights of {run.folder} after {checkpoint.step:,} steps"
    own = model_of(started, replace(features, tasks=labels))
    load_weights(own, checkpoint)
    before, news = embedding_tables(own), 0
    state = {name: one for name, one in own.state_dict().items() if not name.startswith(tuple(f"{n}." for n in before))}
    try:
        found = model.load_state_dict(state, strict=False)
        lost = [name for name in found.missing_keys if not name.startswith(tuple(f"{n}." for n in before))]
        if lost or found.unexpected_keys:
            raise RuntimeError(f"differs in {', '.join([*lost, *found.unexpected_keys][:3])}")
        for name, tables in embedding_tables(model).items():
            news += _take_rows(before[name], tables)
    except (RuntimeError, KeyError) as error:
        old, new = (flat_values({"model": recipe_state(one.model)}) for one in (started, recipe))
        differs = [f"{key} is {old.get(key)} there, {new[key]} here" for key in new if old.get(key) != new[key]]
        raise CheckpointError(
            f"{run.folder} holds another model: {'; '.join(differs) or str(error).splitlines()[-1].strip()}",
            where="training.start",
            remedy="train the model of that run, with the same [model] section",
        ) from error
    return f"start: weights of {run.folder} after {checkpoint.step:,} steps; {news:,} rows of tables are new"


@torch.no_grad()
def _take_rows(before: EmbeddingTables, tables: EmbeddingTables) -> int:
    """Copy all rows of tables into larger ones, with the state of an optimizer of the same kind; count the others."""
    boxes = {box.name: box.values for box in before.boxes()}
    same = before.config.name == tables.config.name
    for box in tables.boxes():
        kind = box.name.partition(".")[0]
        if kind != "weight" and not same:
            continue
        rows = boxes[box.name]
        if rows.shape[1:] != box.values.shape[1:] or len(rows) > len(box.values):
            raise RuntimeError(f"{box.name} has the shape {tuple(rows.shape)}, here {tuple(box.values.shape)}")
        box.values[: len(rows)] = rows
    if same:
        tables.step = before.step
    return tables.num_rows - before.num_rows


def restore_model(run: Run, features: FeatureSpec, device: torch.device) -> tuple[RankingRecipe, RankingModel]:
    """Load the recipe of a ranking ``run`` and its model on ``device``, ready to score data with these ``features``.

    Raises:
        CheckpointError: If there is no checkpoint, or it is corrupt.
        RunError: If the recipe has changed since the checkpoint was written.
    """
    recipe, model, _ = restore_model_with_checkpoint(run, features, device)
    return recipe, model


def restore_model_with_checkpoint(
    run: Run, features: FeatureSpec, device: torch.device
) -> tuple[RankingRecipe, RankingModel, checkpoints.Checkpoint]:
    """Load a run's recipe, model and checkpoint; see :func:`restore_model` for ``run``, ``features`` and ``device``."""
    recipe = recipe_of(run)
    checkpoint = best_checkpoint(run, use_best=recipe.training.patience is not None)
    check_recipe(checkpoint.state.get("recipe"), recipe, run.recipe_file)
    model = model_of(recipe, features, in_file(recipe, checkpoint.folder / ROWS, read_only=True))
    load_weights(model, checkpoint)
    return recipe, model.to(device).eval(), checkpoint
