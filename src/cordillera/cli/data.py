"""``cordillera data``: list, fetch and describe data sets, models and tokenizers."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cordillera.cli._show import console, titled_table
from cordillera.errors import DataError, printable

if TYPE_CHECKING:
    from cordillera.data.ranking.cache import Splits

app = typer.Typer(no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help="A name of 'cordillera data list'.")]
_Path = Annotated[list[str] | None, typer.Option("--path", help="A file of a data set that you downloaded yourself.")]


@app.command("list")
def list_() -> None:
    """The data sets, models and tokenizers that have names."""
    from cordillera.data.assets import ASSETS
    from cordillera.data.ranking.datasets import DATASETS

    table = Table("name", "kind", "what it is", "source", "terms", box=None, pad_edge=False)
    for name, entry in DATASETS.items():
        table.add_row(name, "click log", entry.summary, entry.source, entry.terms)
    for name, asset in ASSETS.items():
        table.add_row(name, asset.kind, asset.summary, asset.source, asset.terms)
    console().print(table)


@app.command()
def get(
    name: _Name,
    path: _Path = None,
    export_to: Annotated[
        Path | None, typer.Option("--export", help="Write raw rows to this .csv or .parquet file, to predict on.")
    ] = None,
    split: Annotated[str, typer.Option(help="Rows to export: train, validation or test.")] = "test",
    rows: Annotated[int | None, typer.Option(min=1, help="Export the first so many rows.")] = None,
) -> None:
    """Fetch a data set and prepare it for training, or fetch a model or a tokenizer."""
    from cordillera.data.assets import ASSETS, fetch_asset
    from cordillera.data.ranking.cache import SPLITS
    from cordillera.data.ranking.datasets import configure, prepare
    from cordillera.data.ranking.exports import export

    out = console()
    if name in ASSETS:
        if path or export_to or rows:
            raise DataError(f"'{name}' is a {ASSETS[name].kind}: it has no rows", where="--path, --export, --rows")
        file = fetch_asset(name)
        asset = ASSETS[name]
        _print_terms(asset.summary, asset.source, asset.terms)
        out.print(f"fetched {file}")
        return
    config = configure(name, path)
    splits = prepare(config)
    facts = splits.facts
    _print_terms(facts["name"], facts["source"], facts["terms"])
    counts = facts["rows"]
    out.print(f"rows: {', '.join(f'{counts[part]:,} {part}' for part in SPLITS)}")
    out.print(f"prepared in {printable(splits.folder)}", markup=False)
    if export_to is not None:
        written = export(config, export_to, split=split, rows=rows)
        out.print(f"wrote {written:,} rows of the {split} split to {printable(export_to)}", markup=False)


@app.command()
def describe(name: _Name, path: _Path = None) -> None:
    """Rows, labels, features and their gaps; of a model or a tokenizer, its sizes and special tokens."""
    from cordillera.data.assets import ASSETS, fetch_asset
    from cordillera.data.ranking.datasets import configure, prepare

    if name in ASSETS:
        file = fetch_asset(name)
        asset = ASSETS[name]
        _print_terms(asset.summary, asset.source, asset.terms)
        console().print(_asset_table(file))
        return
    config = configure(name, path)
    splits = prepare(config)
    facts = splits.facts
    out = console()
    _print_terms(facts["name"], facts["source"], facts["terms"])
    out.print(_split_table(splits))
    out.print(_feature_table(splits))
    if facts.get("bayes_ne") is not None:
        out.print(f"best possible NE on the test split (that of the true probabilities): {facts['bayes_ne']:.4f}")
    for warning in facts["warnings"]:
        out.print(f"warning: {printable(warning)}", markup=False)


def _print_terms(what: str, source: str, terms: str) -> None:
    console().print(f"{what}\nsource: {source}\nterms: {terms}")


def _asset_table(file: Path) -> Table:
    from cordillera.data.tokenizers.load import asset_facts

    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in asset_facts(file).items():
        table.add_row(
            name, f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else value
        )
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _time(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # outside the calendar, such as nanoseconds
        return str(seconds)


def _split_table(splits: Splits) -> Table:
    from cordillera.data.ranking.cache import SPLITS

    facts: dict[str, Any] = splits.facts
    tasks = list(facts["positives"]["train"])
    headings = ("rows", *(f"{task} = 1" for task in tasks), "first", "last")
    table = titled_table(f"split by {facts['split']}", "split", right=headings)
    for split in SPLITS:
        times = [_time(second) for second in facts["times"].get(split, ())] or ["", ""]
        shares = [_share(facts["positives"][split][task]) for task in tasks]
        table.add_row(split, f"{facts['rows'][split]:,}", *shares, *times)
    return table


def _feature_table(splits: Splits) -> Table:
    facts, schema, features = splits.facts, splits.encoder.schema, splits.features
    table = Table(
        title="features (unseen: share of test rows whose value training did not keep)",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for heading in ("feature", "kind", "encoding", "table", "rows", "blank", "unseen"):
        table.add_column(
            heading, justify="right" if heading in ("rows", "blank", "unseen") else "left", overflow="fold"
        )
    for dense in schema.numbers:
        blank = _share(facts["blanks"].get(dense.name))
        table.add_row(printable(dense.name), "dense", dense.transform, "", "", blank, "")
    encodings = {feature.name: feature.encoding for feature in (*schema.categorical, *schema.lists)}
    for feature in features.sparse:
        table.add_row(
            printable(feature.name),
            f"list, {feature.pooling}" if feature.is_list else "id",
            encodings[feature.name],
            feature.table,
            f"{features.tables[feature.table]:,}",
            _share(facts["blanks"].get(feature.name)),
            _share(facts["unseen"]["test"].get(feature.name)),
        )
    return table
