"""``cordillera data``: list, fetch and describe data sets, models and tokenizers."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cordillera.cli._show import AsJson, CommandOutput, Field, Sheet, console, refuse, to_type, work_shown
from cordillera.errors import DataError, printable

if TYPE_CHECKING:
    from cordillera.data.ranking.cache import Splits
    from cordillera.data.ranking.datasets import DataConfig

app = typer.Typer(no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help="A name of 'cordillera data list'.")]
_Path = Annotated[list[str] | None, typer.Option("--path", help="A file of a data set that you downloaded yourself.")]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """The data sets, models and tokenizers that have names."""
    from cordillera.data.assets import ASSETS
    from cordillera.data.ranking.datasets import DATASETS

    table = Sheet(None, Field("name"), Field("kind"), Field("summary", "what it is"), Field("source"), Field("terms"))
    for name, entry in DATASETS.items():
        table.add(name, "click log", entry.summary, entry.source, entry.terms)
    for name, asset in ASSETS.items():
        table.add(name, asset.kind, asset.summary, asset.source, asset.terms)
    with CommandOutput(as_json) as answer:
        answer.tables(names=table)


@app.command()
def get(
    name: _Name,
    path: _Path = None,
    export_to: Annotated[
        Path | None, typer.Option("--export", help="Write raw rows to this .csv or .parquet file, to predict on.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Rows to export: train, validation or test. Default: test.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Export the first so many rows.")] = None,
) -> None:
    """Fetch a data set and prepare it for training, or fetch a model or a tokenizer."""
    from cordillera.data.assets import ASSETS, fetch_asset
    from cordillera.data.ranking.cache import SPLITS
    from cordillera.data.ranking.exports import check_export, export
    from cordillera.data.ranking.rows import configure

    answer = CommandOutput(as_json=False)
    if name in ASSETS:
        options = {"--path": path or None, "--export": export_to, "--split": split, "--rows": rows}
        refuse(options, f"'{name}', which is a {ASSETS[name].kind} and has no rows")
        file = fetch_asset(name)
        asset = ASSETS[name]
        _say_terms(answer, asset.summary, asset.source, asset.terms)
        answer.say(f"fetched {file}")
        return
    if export_to is None:
        refuse({"--split": split, "--rows": rows}, "a data set that is not written to a file (no --export)")
    else:
        check_export(export_to, split or "test")
    config = configure(name, path)
    splits = _prepared(config, name)
    facts = splits.facts
    _say_terms(answer, facts["name"], facts["source"], facts["terms"])
    counts = facts["rows"]
    answer.say(f"rows: {', '.join(f'{counts[part]:,} {part}' for part in SPLITS)}")
    answer.say(f"prepared in {printable(splits.folder)}")
    if export_to is not None:
        split = split or "test"
        written = export(config, export_to, split=split, rows=rows)
        answer.say(f"wrote {written:,} rows of the {split} split to {printable(export_to)}")


@app.command()
def describe(name: _Name, path: _Path = None, as_json: AsJson = False) -> None:
    """Rows, labels, features and their gaps; of a model or a tokenizer, its sizes and special tokens."""
    from cordillera.data.assets import ASSETS, fetch_asset
    from cordillera.data.language.row_kinds import check_is_log
    from cordillera.data.paths import expand_paths
    from cordillera.data.ranking.datasets import DATASETS
    from cordillera.data.ranking.rows import configure

    with CommandOutput(as_json) as answer:
        if name in ASSETS:
            refuse({"--path": path or None}, f"'{name}', which is a {ASSETS[name].kind} and has no rows")
            file, asset = fetch_asset(name), ASSETS[name]
            _say_terms(answer, asset.summary, asset.source, asset.terms)
            answer.tables(facts=_asset_table(file))
            return
        if name not in DATASETS and Path(name).exists():
            check_is_log(expand_paths(name))
            raise DataError(
                "is a file or folder, not a name of `cordillera data list`",
                where=name,
                remedy=f"`{to_type('recipe', 'new', name)}` prints what each of its columns is, and writes a recipe",
            )
        splits = _prepared(configure(name, path), name)
        facts = splits.facts
        _say_terms(answer, facts["name"], facts["source"], facts["terms"])
        answer.tables(splits=_split_table(splits), features=_feature_table(splits))
        best = facts.get("bayes_ne")
        if best is not None:
            answer.say(f"best possible NE on the test split (that of the true probabilities): {best:.4f}")
        for warning in facts["warnings"]:
            answer.say(f"warning: {printable(warning)}")
        answer.keep(bayes_ne=best, split_by=facts["split"], warnings=facts["warnings"])


def _prepared(config: DataConfig, name: str) -> Splits:
    """Prepare a data set; where the bar of that work cannot be drawn, lines tell of it."""
    from cordillera.data.ranking.datasets import prepare

    is_drawn = console(stderr=True).is_interactive
    with contextlib.nullcontext() if is_drawn else work_shown(f"preparing {name}"):
        return prepare(config)


def _say_terms(answer: CommandOutput, summary: str, source: str, terms: str) -> None:
    answer.say(f"{summary}\nsource: {source}\nterms: {terms}", summary=summary, source=source, terms=terms)


def _asset_table(file: Path) -> Sheet:
    from cordillera.data.tokenizers.load import asset_facts

    def form(value: object) -> str:
        return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)

    table = Sheet(None, Field("name"), Field("value", form=form, right=False))
    table.show_header = False
    for one in asset_facts(file).items():
        table.add(*one)
    return table


def _time(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # outside the calendar, such as nanoseconds
        return str(seconds)


def _split_table(splits: Splits) -> Sheet:
    from cordillera.data.ranking.cache import SPLITS

    facts: dict[str, Any] = splits.facts
    tasks = list(facts["positives"]["train"])
    table = Sheet(
        f"split by {facts['split']}",
        Field("split"),
        Field("rows", form="{:,}"),
        *(Field(task, f"{task} = 1", "{:.1%}", within="positives") for task in tasks),
        Field("first", form=_time),
        Field("last", form=_time),
    )
    for split in SPLITS:
        shares = [facts["positives"][split][task] for task in tasks]
        table.add(split, facts["rows"][split], *shares, *(facts["times"].get(split) or (None, None)))
    return table


def _feature_table(splits: Splits) -> Sheet:
    facts, schema, features = splits.facts, splits.encoder.schema, splits.features
    table = Sheet(
        "features (unseen: share of test rows whose value training did not keep)",
        *(Field(key) for key in ("feature", "kind", "encoding", "table")),
        Field("rows", form="{:,}"),
        Field("blank", form="{:.1%}"),
        Field("unseen", form="{:.1%}"),
    )
    for dense in schema.numbers:
        table.add(dense.name, "dense", dense.transform, None, None, facts["blanks"].get(dense.name), None)
    encodings = {feature.name: feature.encoding for feature in (*schema.categorical, *schema.lists)}
    for feature in features.sparse:
        table.add(
            feature.name,
            f"list, {feature.pooling}" if feature.is_list else "id",
            encodings[feature.name],
            feature.table,
            features.tables[feature.table],
            facts["blanks"].get(feature.name),
            facts["unseen"]["test"].get(feature.name),
        )
    return table
