"""Recipes: each is one TOML file that describes one run completely.

The sections of a recipe are the ``Config`` classes of the packages, defined beside the classes that they configure.
Shipped recipes are used by name, others by path; all mistakes of a file are reported at once, each with its dotted
path.
"""

from __future__ import annotations

import copy
import difflib
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, get_args

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from tomlkit.items import Array, InlineTable, Table

from cordillera.data.assets import ASSETS
from cordillera.data.files import cache_folder
from cordillera.data.language.batches import BatchConfig
from cordillera.data.language.chats.rows import ChatDataConfig
from cordillera.data.language.corpora import TextDataConfig
from cordillera.data.language.row_kinds import check_is_log
from cordillera.data.paths import expand_paths
from cordillera.data.ranking.datasets import DataConfig
from cordillera.data.ranking.features import DenseFeature, Schema
from cordillera.data.ranking.frames import FrameLike, frame_of, save_frame
from cordillera.data.ranking.guessing import ColumnGuess, data_of, guess_roles, guess_separator, schema_of
from cordillera.data.ranking.logs.click_logs import FileLog, format_of
from cordillera.distributed.fault_tolerance.coordination import FaultToleranceConfig
from cordillera.distributed.planned_mesh import PlannedParallelConfig
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import CordilleraError, DataError, RecipeError, printable
from cordillera.files import TOML_BYTES, TOML_DEPTH, at_home, parse_toml, read_text, write
from cordillera.kernels.threads import MOST_THREADS
from cordillera.mistakes import explain, field_descriptions, known_keys, meant, models_of, text_of
from cordillera.models.imported import SHIPPED, import_model, is_imported
from cordillera.models.language.checkpoints import open_checkpoint
from cordillera.models.language.llama import PRESETS, LlamaConfig
from cordillera.models.ranking import MODELS, ModelConfig
from cordillera.models.ranking.base import RankingConfig
from cordillera.serving.language.language_model import find_model, tokenizer_of
from cordillera.training.language.objectives import ObjectiveConfig
from cordillera.training.language.trainer import LanguageTrainingConfig
from cordillera.training.ranking.config import RankingParallelConfig, TrainingConfig
from cordillera.training.trackers import TrackerName

ROWS = "rows in memory"
"""Value of ``data.path`` until rows in memory are written to a file."""

LANGUAGE_MODELS = ("llama",)
"""Values of ``model.name`` in the recipe of a language model."""


OBJECTIVES: tuple[str, ...] = tuple(kind.model_fields["name"].default for kind in models_of(ObjectiveConfig))
"""Values of ``objective.name`` in the recipe of post-training."""


class _AnyRecipe(BaseModel):
    """Keys that every recipe has.

    Attributes:
        name: Name of the run's folder.
        description: Description of the run in one sentence.
        seed: Seed of weights, shuffling and dropout. Two runs of one recipe and seed are bitwise equal on one machine
            with the same number of threads.
        device: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
        threads: Number of threads of the CPU kernels in each process. Null for all processors, divided among the
            processes of the run, or fewer if other programs keep processors busy when the run begins; a resumed run
            keeps its number.
        track: Tracker that follows the run, whose library must be installed: ``mlflow`` or ``wandb`` (Weights &
            Biases). Null for none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[
        str, text_of(r"[A-Za-z0-9][A-Za-z0-9._-]*", "letters, digits, dots, hyphens and underscores, without spaces")
    ] = "run"
    description: str = ""
    seed: int = Field(1, ge=0, lt=2**63)
    device: Annotated[str, text_of(r"auto|cpu|cuda(:[0-9]+)?", "auto, cpu, cuda, or cuda with a number (cuda:1)")] = (
        "auto"
    )
    threads: int | None = Field(None, ge=1, le=MOST_THREADS)
    track: TrackerName | None = None

    def __str__(self) -> str:
        """Return the recipe as TOML with every default written out."""
        return dump(self)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}; print() shows its keys>"


class RankingRecipe(_AnyRecipe):
    """Description of one run of a ranking model.

    Attributes:
        data: Source of the samples.
        model: Settings of the model; ``model.name`` chooses it, ``module:Class`` for one of your own.
        tables: Settings of the embedding tables.
        parallel: Division of the run among processes.
        training: Settings of training.
    """

    data: DataConfig
    model: ModelConfig
    tables: TablesConfig = TablesConfig()
    parallel: RankingParallelConfig = RankingParallelConfig()
    training: TrainingConfig = TrainingConfig()

    @model_validator(mode="before")
    @classmethod
    def _keeps_ids_of_its_start(cls, content: Any) -> Any:
        """Keep the ids and transforms of the run that training starts from."""
        start, data = _section(content, "training").get("start"), _section(content, "data")
        if isinstance(start, str) and "encoder" not in data:
            content = {**content, "data": {**data, "encoder": start}}
        return content


class LanguageRecipe(_AnyRecipe):
    """Description of one run of a language model.

    In a file, ``model.preset`` names known sizes; without a preset or sizes, those of the checkpoint ``training.start``
    are used.

    Attributes:
        data: Source of the text.
        packing: Packing of documents into microbatches.
        model: Sizes of the model.
        parallel: Division of the run, or of each replica, among processes.
        fault_tolerance: Replicas of the model, of which some may fail while the others go on.
        training: Settings of training.
    """

    data: TextDataConfig
    packing: BatchConfig = BatchConfig()
    model: LlamaConfig
    parallel: PlannedParallelConfig = PlannedParallelConfig()
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    training: LanguageTrainingConfig = LanguageTrainingConfig()


class PostTrainingRecipe(LanguageRecipe):
    """Description of one run of a language model after its pre-training; a file with ``[objective]`` is one.

    Attributes:
        data: Source of the chats, preferences or problems.
        objective: What the model learns; ``objective.name`` chooses it.
    """

    data: ChatDataConfig  # type: ignore[assignment]
    objective: ObjectiveConfig

    @model_validator(mode="before")
    @classmethod
    def _takes_what_it_starts_from(cls, content: Any) -> Any:
        """Take the tokenizer of the checkpoint that training starts from, unless the data names one; name scores."""
        if _section(content, "objective").get("name") == "reward":
            content = {**content, "model": {**_section(content, "model"), "scores": True}}
        data, start = _section(content, "data"), _section(content, "training").get("start")
        if isinstance(start, str) and "tokenizer" not in data:
            tokenizer = start if start in ASSETS else str(tokenizer_of(start, find_model(start)))
            content = {**content, "data": {**data, "tokenizer": tokenizer}}
        return content


def _read(source: str | Path | RankingRecipe | LanguageRecipe) -> tuple[str, str]:
    if isinstance(source, _AnyRecipe):
        return dump(source), source.name
    if not isinstance(source, str | Path):
        what = (
            "tables are given as rows=" if hasattr(source, "columns") else "must be a name, a path, a recipe or a dict"
        )
        raise RecipeError("load_recipe", [("source", f"{what}, got {type(source).__name__}")])
    path = at_home(source)
    folder = resources.files("cordillera.recipes")
    files = {one.name[:-5]: one for one in folder.iterdir() if one.name.endswith(".toml")}
    if str(source) in files:
        return files[str(source)].read_text(encoding="utf-8"), str(source)
    if _is_file(path / "recipe.toml"):
        path = path / "recipe.toml"
    if _is_file(path) and path.suffix.lower() in (".csv", ".tsv", ".txt", ".parquet", ".pq", ".gz", ".zst"):
        why = f"is a log, not a recipe: `cordillera recipe new {shlex.quote(str(path))}` writes one"
        raise RecipeError(str(source), [("file", why)])
    if _is_file(path):
        return read_text(path, limit=TOML_BYTES), str(path)
    why = "is neither a shipped recipe (`cordillera recipe list` shows them) nor a file" + meant(str(source), files)
    raise RecipeError(str(source), [("recipe", why)])


def _forget(content: dict[str, Any], key: str, source: object) -> None:
    """Remove values that a recipe ``source`` derived from the old value of the ``key`` to change."""
    if not isinstance(source, _AnyRecipe) or key not in ("training.start", "model.preset"):
        return
    if isinstance(source, LanguageRecipe):
        what = "has decided on sizes that this recipe holds; load its file again with this change"
        raise RecipeError(source.name, [(key, what)])
    if content["data"].get("encoder") == content["training"].get("start"):
        content["data"].pop("encoder", None)


def _is_file(path: Path) -> bool:
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):  # not a possible file name
        return False


def parse_override(text: str) -> tuple[str, Any]:
    """Parse ``a.b=value``; the value is TOML if possible, a string otherwise.

    Raises:
        RecipeError: If there is no ``=`` or no key.
    """
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not key:
        raise RecipeError("--set", [(text, "must look like section.key=value")])
    if value.strip() in ("null", "none", "None"):
        return key, None
    try:
        found = parse_toml(f"value = {value}", "--set")["value"]
        return key, value.strip() if isinstance(found, date | time) else found  # no key is a date
    except DataError as error:
        is_text, ends = isinstance(error.__cause__, tomllib.TOMLDecodeError), value.strip()[:1] + value.strip()[-1:]
        if is_text and ends not in ("[]", "{}"):
            return key, value
        hint = '; text within it stands in quotation marks, as in --set \'key=["a", "b"]\'' if is_text else ""
        raise RecipeError("--set", [(key, error.what + hint)]) from error


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set a key in the content of a file by an ``override`` such as ``a.b=value``.

    Raises:
        RecipeError: If it is no such text, or a part of the key is a value.
    """
    set_key(content, *parse_override(override))


def set_key(content: dict[str, Any], key: str, value: Any) -> None:
    """Set the key ``a.b`` in the content of a file.

    Raises:
        RecipeError: If a part of the key is a value.
    """
    *parents, last = key.split(".")
    if len(parents) >= TOML_DEPTH:
        raise RecipeError("--set", [(key[:80], f"has more than {TOML_DEPTH} parts")])
    place = content
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise RecipeError("--set", [(key, f"{parent!r} is a value, not a section")])
    place[last] = value


def _as_written(entry: Any) -> dict[str, Any]:
    """Return a mistake with its place in the file, from which the model's name as a union tag is removed."""
    location = [part for part in entry["loc"] if part not in ("function-wrap", "function-after")]
    names = OBJECTIVES if location[:1] == ["objective"] else (*SHIPPED, *LANGUAGE_MODELS)
    if entry["type"] in ("union_tag_invalid", "union_tag_not_found"):
        message = f"must be one of {', '.join(names)}, got {entry.get('ctx', {}).get('tag')!r}"
        if entry["type"] == "union_tag_not_found":
            message = f"is missing; choose one of {', '.join(names)}"
        return {"type": "name", "loc": (location[0], "name"), "msg": message, "input": {}}
    if len(location) > 1 and location[0] in ("model", "objective") and location[1] in names:
        del location[1]  # the tag of the union, which is not in the file
    return {**entry, "loc": location}


def _explain(kind: type[BaseModel], error: ValidationError, content: dict[str, Any]) -> list[tuple[str, str]]:
    def keys(path: Sequence[Any]) -> list[str]:
        name = str(_section(content, str(path[0])).get("name")) if path else ""
        if path and path[0] == "model" and issubclass(kind, RankingRecipe):
            return known_keys(MODELS[name].Config, path[1:]) if name in MODELS else []
        if path and path[0] == "objective":
            chosen = next((one for one in models_of(ObjectiveConfig) if _is_called(one, name)), None)
            return known_keys(chosen, path[1:]) if chosen else []
        return known_keys(kind, path)

    return explain([_as_written(entry) for entry in error.errors(include_url=False)], keys, "recipe")


def load(
    source: str | Path | Mapping[str, Any] | RankingRecipe | LanguageRecipe,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    *,
    rows: FrameLike | None = None,
) -> RankingRecipe | LanguageRecipe:
    """Read the recipe of a ranking or a language model.

    ::

        recipe = cordillera.load_recipe("shop.toml", {"training.epochs": 1})
        smaller = cordillera.load_recipe(recipe, {"model.embedding_dim": 8})  # recipes themselves never change

    Args:
        source: Name of a shipped recipe, a path, the folder of a run, the sections of a recipe in a dict, or another
            recipe; a language model's keeps the sizes of its preset, and of what it starts from.
        overrides: Strings ``section.key=value``, or a mapping from dotted keys to values. A section is replaced whole
            only by one that has a ``name``, such as another model.
        rows: Rows to train and evaluate a ranking model on, in place of ``data.path``:
            ``pandas.DataFrame``, ``polars.DataFrame``, Arrow table, dict of columns, or list of dicts. The columns that
            ``data.schema`` names are written to a Parquet file in the folder of prepared data, and ``data.path`` is set
            to it.

    Raises:
        RecipeError: If the recipe is not valid; the message lists every mistake.
        DataError: If ``rows`` is no table, or lacks a column of the schema.
    """
    if isinstance(source, Mapping):
        content, name = copy.deepcopy(dict(source)), "recipe"
    else:
        try:
            text, name = _read(source)
            content = parse_toml(text, name)
        except DataError as error:
            raise RecipeError(error.where or str(source), [("file", error.what)]) from error
    content.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", Path(name).stem).lstrip("._-") or "run")
    overrides = [overrides] if isinstance(overrides, str) else overrides
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(parse_override, overrides)
    for key, value in pairs:
        _forget(content, key, source)
        if isinstance(value, Mapping) and isinstance(content.get(key), Mapping) and "name" not in value:
            why = f"is a section, whose other keys would be lost; set one of them: {key}.{next(iter(value), 'KEY')}"
            raise RecipeError("overrides", [(key, why)])
        set_key(content, key, value)
    if rows is not None:
        set_key(content, "data.path", ROWS)
    found = validate(content, name)
    if rows is None:
        return found
    if not isinstance(found, RankingRecipe):
        raise RecipeError(name, [("model.name", "of a language model: rows train ranking models")])
    data = found.data
    assert data.schema_ is not None  # set, as the recipe has a path
    frame = frame_of(rows, data.schema_.columns, data.schema_.ids)
    path = save_frame(frame, cache_folder(data.cache_dir) / "rows")
    return found.model_copy(update={"data": data.model_copy(update={"path": str(path), "format": "parquet"})})


def validate(content: dict[str, Any], source: str = "recipe") -> RankingRecipe | LanguageRecipe:
    """Make a recipe from plain values.

    Args:
        content: Sections and keys, as in a TOML file.
        source: Name of the recipe in errors.

    Raises:
        RecipeError: If the recipe is not valid; the message lists every mistake.
    """
    kind: type[RankingRecipe] | type[LanguageRecipe] | type[PostTrainingRecipe] = RankingRecipe
    model, known = _section(content, "model"), [*SHIPPED, *LANGUAGE_MODELS]
    name = model.get("name")
    if is_imported(name):
        if language := sorted({"packing", "objective"} & set(content)):
            what = f"is a ranking model, for which there is no [{language[0]}]; the name of a language model is llama"
            raise RecipeError(source, [("model.name", what)])
        kind = _with_imported(name, source)
    elif isinstance(name, str) and name not in known:
        problems = [("model.name", f"must be one of {', '.join(known)}{meant(name, known)}, got {name!r}")]
        try:  # other sections are checked against the closest known name, or not at all
            for close in difflib.get_close_matches(name, known, n=1):
                validate({**content, "model": {**model, "name": close}}, source)
        except RecipeError as error:
            problems += error.problems
        except CordilleraError:
            pass  # the run starts from a checkpoint
        raise RecipeError(source, problems)
    if name in LANGUAGE_MODELS:
        kind = PostTrainingRecipe if "objective" in content else LanguageRecipe
        content = _with_sizes(content, source)
    try:
        return kind.model_validate(_with_nulls(kind, content))
    except ValidationError as error:
        raise RecipeError(source, _explain(kind, error, content)) from error


def _with_imported(name: str, source: str) -> type[RankingRecipe]:
    """Return the class of recipes whose model is imported."""
    try:
        return _of_config(import_model(name))
    except DataError as error:
        raise RecipeError(source, [("model.name", error.what)]) from error


class _ImportedRecipe(RankingRecipe):
    """Recipe of an imported model, whose class other processes make by importing the model again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self.model.name,), self.__getstate__()


def _blank(name: str) -> RankingRecipe:
    kind = _of_config(import_model(name))
    return kind.__new__(kind)


@cache
def _of_config(config: type[RankingConfig]) -> type[RankingRecipe]:
    return create_model("RankingRecipe", __base__=_ImportedRecipe, __module__=__name__, model=(config, ...))


def _with_nulls(kind: type[BaseModel], content: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``"none"``, which represents null in TOML, unless it is a valid value of the key."""
    found = dict(content)
    for name, field in kind.model_fields.items():
        key = field.alias or name
        value = content.get(key)
        if isinstance(value, Mapping):
            of_its_name = [one for one in models_of(field.annotation) if _is_called(one, value.get("name"))]
            if len(of_its_name) == 1:
                found[key] = _with_nulls(of_its_name[0], value)
        elif key in content and (value is None or value == "none"):
            options = _options(field.annotation)
            if "none" in options:
                found[key] = "none"
            elif type(None) in options and str not in options:
                found[key] = None
    return found


def _is_called(kind: type[BaseModel], name: Any) -> bool:
    """Return whether a section with this name belongs to this class; most classes have no name."""
    return "name" not in kind.model_fields or name in _options(kind.model_fields["name"].annotation)


def _options(annotation: Any) -> list[Any]:
    """Return the types and literals of a union."""
    parts = get_args(annotation)
    return [option for part in parts for option in _options(part)] if parts else [annotation]


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = content.get(name)
    return section if isinstance(section, Mapping) else {}


_BYTES = 264  # tokens of the tokenizer `bytes`, 258, to the next multiple of 8


def _with_sizes(content: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a language model's recipe with the sizes of its preset, or of the checkpoint that training starts from."""
    model = dict(_section(content, "model"))
    preset, start = model.pop("preset", None), _section(content, "training").get("start")
    sizes: LlamaConfig | None = None
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            message = f"must be one of {', '.join(PRESETS)}{meant(str(preset), PRESETS)}, got {preset!r}"
            raise RecipeError(source, [("model.preset", message)])
        sizes = PRESETS[preset]
    elif set(model) <= {"name", *ON_TOP}:
        if not isinstance(start, str):
            message = f"gives no sizes: name a preset ({', '.join(PRESETS)}), or what training.start begins with"
            raise RecipeError(source, [("model", message)])
        sizes = open_checkpoint(find_model(start)).config.model_copy(
            update={"adapter": None, "draft": None, "scores": False}
        )
    else:
        if _section(content, "data").get("tokenizer", "bytes") == "bytes":
            model.setdefault("vocabulary", _BYTES)
        if isinstance(heads := model.get("heads"), int) and heads % LlamaConfig.model_fields["kv_heads"].default:
            model.setdefault("kv_heads", heads)
    return content | {"model": (sizes.model_dump(mode="json") if sizes else {}) | model}


ON_TOP = ("adapter", "draft", "scores")
"""Keys of a model that are chosen beside the sizes of the checkpoint that it starts from."""


def _inline_rows(entries: Iterable[Mapping[str, Any]]) -> Array:
    """Return sections as an array with one line for each."""
    rows = tomlkit.array()
    for entry in entries:
        rows.append(_inline(entry))
    return rows.multiline(True)


def _inline(entry: Mapping[str, Any]) -> InlineTable:
    row = tomlkit.inline_table()
    row.update(entry)
    return row


def _fill(table: Table | tomlkit.TOMLDocument, model: BaseModel, comments: bool) -> None:
    texts = field_descriptions(type(model)) if comments else {}
    nested = []
    for name, field in type(model).model_fields.items():
        key, value = field.alias or name, getattr(model, name)
        if isinstance(value, BaseModel):
            nested.append((key, value))
            continue
        if comments and name in texts:
            for line in textwrap.wrap(texts[name].replace("``", "`"), 78, break_long_words=False):
                table.add(tomlkit.comment(line))
        if value is None:
            if field.default is not None and not field.is_required():
                table.add(key, "none")  # a missing key would mean the default
            elif comments:
                table.add(tomlkit.comment(f"{key} is not set"))
            continue
        if isinstance(value, tuple | list) and value and all(isinstance(entry, BaseModel) for entry in value):
            table.add(key, _inline_rows(entry.model_dump(exclude_defaults=True, by_alias=True) for entry in value))
        else:
            plain = model.model_dump(mode="json", by_alias=True, include={name}, exclude_none=True)
            table.add(key, _inline(plain[key]) if isinstance(value, dict) else plain[key])
    for key, value in nested:
        section = tomlkit.table()
        _fill(section, value, comments)
        table.add(key, section)


def dump(recipe: RankingRecipe | LanguageRecipe, *, comments: bool = False) -> str:
    """Return a recipe as TOML with every default written out.

    Args:
        recipe: Recipe to write.
        comments: Whether to put the meaning of each key above it.
    """
    document = tomlkit.document()
    _fill(document, recipe, comments)
    return printable(tomlkit.dumps(document), lines=True, quoted=True)


def write_recipe(
    path: str | Sequence[str],
    out: Path | str,
    *,
    labels: Sequence[str] = (),
    separator: str | None = None,
    model: str = "dcn",
) -> list[ColumnGuess]:
    """Write a recipe that trains a ranking model on logs of your own, with guessed roles of the columns.

    Args:
        path: Files, folders or patterns of the log.
        out: File of the recipe; it must not exist.
        labels: Columns to predict, or conditions such as ``rating>=4`` and ``answer=yes``. Default: the column of
            zeros and ones that is called like a label.
        separator: Character between fields of text files. Default: the one that the first rows show.
        model: Value of ``model.name``.

    Returns:
        Role of each column, with the reason.

    Raises:
        DataError: If the log cannot be read or is for a language model, no label is found, no column is a feature, or
            ``out`` exists.
        RecipeError: If there is no such model.
        PlanError: If ``out`` cannot be written.
    """
    out, path = Path(out), [path] if isinstance(path, str) else path
    if out.exists():
        raise DataError("already exists", where=str(out), remedy="name another file with --out")
    files = expand_paths(tuple(path))
    check_is_log(files)
    any_schema = Schema(labels=("label",), dense=(DenseFeature(name="value"),))
    kind = format_of(files)
    separator = separator or guess_separator(files[0], kind)
    guesses = guess_roles(FileLog(any_schema, files, kind, separator=separator), labels)
    schema = schema_of(guesses, str(files[0])).model_dump(mode="json", exclude_defaults=True)
    data = {"path": path[0] if len(path) == 1 else list(path), "separator": separator, **data_of(guesses)}
    data["batch_size"] = 1024
    content: dict[str, Any] = {
        "description": f"{model} on {Path(path[0]).name}",
        "data": {key: _inline(value) if isinstance(value, dict) else value for key, value in data.items() if value},
        "model": {"name": model, **({} if model == "lr" else {"embedding_dim": 16})},
        "tables": {"learning_rate": 0.02},
        "training": {"epochs": 3, "patience": 2},
    }
    validate({**content, "data": {**content["data"], "schema": schema}}, str(out))
    document = tomlkit.document()
    for key, value in content.items():
        document.add(key, value)
    section = tomlkit.table()
    for key, value in schema.items():
        if not isinstance(value, list) or not value or not isinstance(value[0], dict):
            section.add(key, value)
            continue
        section.add(key, _inline_rows(value))
    data_section: Any = document["data"]
    data_section.add("schema", section)
    write({out: printable(tomlkit.dumps(document), lines=True, quoted=True)})
    return guesses
