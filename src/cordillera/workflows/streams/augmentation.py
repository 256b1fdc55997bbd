"""Augmentation of streams by a teacher, and training of the students that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from cordillera import recipe as recipes
from cordillera.data.ranking.datasets import DataConfig
from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.logs.own import form_of
from cordillera.data.ranking.stream.config import EventStreamConfig
from cordillera.data.ranking.stream.parts import StreamFolder
from cordillera.errors import DataError, RecipeError
from cordillera.files import TOML_BYTES, parse_toml, read_text
from cordillera.mistakes import explain, known_keys
from cordillera.models.imported import SHIPPED
from cordillera.models.ranking import MODELS
from cordillera.recipe import RankingRecipe
from cordillera.run import Run
from cordillera.training.ranking.teachers.augmentation import Augmentation, AugmentationConfig, AugmentationProgress
from cordillera.training.ranking.teachers.versions import FixedTeacher, LearningTeacher, ScoringModel, StreamTeacher
from cordillera.workflows.processes import Say, silent
from cordillera.workflows.trained import card_of, recipe_of, restore_model_with_checkpoint


@dataclass
class AugmentationOutcome:
    """What :func:`augment` did.

    Attributes:
        folder: Folder of the examples.
        progress: Rows read and examples written, by this call and those before it.
    """

    folder: Path
    progress: AugmentationProgress


def load_streams(source: Path | str, overrides: Iterable[str] = ()) -> AugmentationConfig:
    """Read a file of streams.

    Args:
        source: TOML file with the keys of :class:`AugmentationConfig`.
        overrides: Strings ``section.key=value``.

    Raises:
        RecipeError: If the file is not valid; the message lists every mistake.
    """
    try:
        content = parse_toml(read_text(Path(source), limit=TOML_BYTES), str(source))
    except DataError as error:
        raise RecipeError(error.where or str(source), [("file", error.what)], "file of streams") from error
    for override in overrides:
        recipes.apply_override(content, override)
    try:
        return AugmentationConfig.model_validate(content)
    except ValidationError as error:
        found: Any = [_as_written(entry) for entry in error.errors(include_url=False)]
        teacher = content.get("teacher")
        model = teacher.get("model") if isinstance(teacher, dict) else None
        name = model.get("name") if isinstance(model, dict) else None
        problems = explain(found, partial(_known_keys, name), "file")
        raise RecipeError(str(source), problems, "file of streams") from error


def _as_written(entry: Any) -> dict[str, Any]:
    """Return a mistake with its place in the file, without the model's name, by which its class was chosen."""
    location = list(entry["loc"])
    if location[:2] == ["teacher", "model"] and len(location) > 2 and location[2] in MODELS:
        del location[2]
    if entry["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return {"type": "name", "loc": (*location, "name"), "msg": f"must be one of {', '.join(SHIPPED)}", "input": {}}
    return {**entry, "loc": tuple(location)}


def _known_keys(model: Any, path: Sequence[Any]) -> list[str]:
    """Return the keys at a place, where ``model`` is the name of the teacher's."""
    if list(path[:2]) == ["teacher", "model"] and model in MODELS:
        return known_keys(MODELS[model].Config, path[2:])
    if len(path) > 1 and path[0] == "streams":
        return known_keys(EventStreamConfig, path[2:])
    return known_keys(AugmentationConfig, path)


def augment(
    source: AugmentationConfig | Path | str,
    *,
    finish: bool = False,
    on_step: Callable[[AugmentationProgress], None] | None = None,
    say: Say = silent,
) -> AugmentationOutcome:
    """Join streams with their labels, score them with a teacher, and write each stream's examples.

    A call resumes where the last one ended, even after a failure, and every example is written once.

    Args:
        source: Settings, or a TOML file with them.
        finish: Whether no more files will come, so that windows that are open are closed at the end.
        on_step: Function that is called after every commit.
        say: Function that takes one line of text.

    Raises:
        DataError: If a file is wrong, or the folder is of other settings or in use.
        RecipeError: If the file is not valid.
    """
    config = source if isinstance(source, AugmentationConfig) else load_streams(source)
    folder = StreamFolder(Path(config.out), tuple(config.streams))
    with folder.lock():
        work = Augmentation(config, _teacher(config, folder), folder)
        before = work.progress.counts.get("events", 0)
        if before:
            say(f"going on after {before:,} events")
        work.run(finish=finish, on_step=on_step)
    return AugmentationOutcome(folder.folder, work.progress)


def student_recipes(source: AugmentationConfig | Path | str) -> dict[str, RankingRecipe]:
    """Return the recipes of the students that streams name, which read the streams' examples.

    Args:
        source: Settings, or a TOML file with them.

    Raises:
        RecipeError: If a recipe is not valid, or no stream names one.
    """
    config, found = source if isinstance(source, AugmentationConfig) else load_streams(source), {}
    for name, stream in config.streams.items():
        if stream.student is None:
            continue
        recipe = recipes.load(stream.student)
        if not isinstance(recipe, RankingRecipe):
            raise RecipeError(stream.student, [("model", "is a language model, which no stream teaches")])
        pattern = str(Path(config.out) / name / "*.parquet")
        own: dict[str, Any] = {"path": pattern}
        own |= {key: DataConfig.model_fields[key].default for key in form_of(recipe.data)}  # drop the log's form
        if (schema := recipe.data.schema_) is not None and schema.timestamp_unit not in (None, "s"):
            own["schema_"] = schema.model_copy(update={"timestamp_unit": "s"})  # the unit of written examples
        found[name] = recipe.model_copy(update={"data": recipe.data.model_copy(update=own)})
    if not found:
        raise RecipeError("--students", [("streams.NAME.student", "is named by no stream")])
    return found


def _teacher(config: AugmentationConfig, folder: StreamFolder) -> StreamTeacher:
    embeds = config.past is not None
    if config.teacher is not None:
        return LearningTeacher(
            config.teacher, config.schema_, config.join.window_s, folder.folder / "versions", embeds=embeds
        )
    run = Run(config.teacher_run or "")
    recipe = recipe_of(run)
    encoder, card = Encoder.load(run.folder / "encoder"), card_of(run)
    tasks = tuple(card["tasks"])
    if unknown := sorted(set(tasks) - set(config.schema_.labels)):
        raise DataError(
            f"predicts {unknown}, which are no labels of the streams",
            where=str(run.folder),
            remedy=f"labels are {list(config.schema_.labels)}; train the teacher with data.tasks of these",
        )
    own = encoder.schema
    names = {feature.name for feature in (*own.dense, *own.categorical, *own.lists)}
    if absent := sorted(names - set(config.schema_.columns) - set(config.schema_.ids)):
        raise DataError(
            f"reads {absent}, which are no columns of the streams",
            where=str(run.folder),
            remedy="name them in the streams' schema, or train a teacher on columns that are there",
        )
    _, model, checkpoint = restore_model_with_checkpoint(
        run, replace(encoder.features, tasks=tasks), torch.device("cpu")
    )
    times = card["data"]["facts"].get("times", {}).get("train")
    scoring = ScoringModel(encoder, model, tasks, recipe.training.precision, embeds)
    trained_until = times[1] if times else None
    return FixedTeacher(scoring, checkpoint.step, trained_until, str(run.folder), config.join.window_s)
