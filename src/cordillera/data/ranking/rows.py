"""Rows of files outside of a run's data, for prediction and description."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from polars.exceptions import PolarsError

from cordillera.data.assets import ASSETS
from cordillera.data.paths import expand_paths
from cordillera.data.ranking.cache import SPLITS
from cordillera.data.ranking.datasets import DATASETS, DataConfig, Splitter, open_log, with_unit
from cordillera.data.ranking.features import Schema
from cordillera.data.ranking.logs.click_logs import FileFormat, RowChunk, format_of
from cordillera.data.ranking.logs.columns import RowPlace
from cordillera.data.ranking.logs.own import OwnLog, form_of
from cordillera.errors import DataError
from cordillera.mistakes import meant


def raw_rows(config: DataConfig, split: str = "test", rows: int | None = None) -> Iterator[pl.DataFrame]:
    """Iterate over frames of a split of ``config``, rows in order before encoding, with the columns of the schema.

    Args:
        split: ``train``, ``validation`` or ``test``.
        rows: Number of rows to read, from the first. Default: all.
    """
    if split not in SPLITS:
        raise DataError(f"unknown split '{split}'", remedy=f"choose one of {', '.join(SPLITS)}")
    log = with_unit(open_log(config))
    splitter, number = Splitter(config, log), SPLITS.index(split)
    columns = list(dict.fromkeys((*log.schema.ids, *log.schema.columns)))
    sort = splitter.kind == "time" and config.unordered == "sort"
    left, held = rows, []
    for frame, place in log.chunks(columns):
        chosen = frame.select(columns).filter(pl.Series(splitter.of(frame, place) == number))
        if sort:
            held.append(chosen)
            continue
        chosen = chosen if left is None else chosen.head(left)
        if len(chosen):
            yield chosen
        if left is not None:
            left -= len(chosen)
            if left == 0:
                return
    if held:
        try:
            joined = pl.concat(held, how="vertical_relaxed")
        except PolarsError as error:
            raise DataError(
                f"the files of the log hold a column in several types ({error})",
                where=config.label,
                remedy="write the column in one type",
            ) from error
        times = splitter.times(joined, RowPlace(config.label))
        joined = joined[np.argsort(times, kind="stable")]
        yield joined if rows is None else joined.head(rows)


def configure(name: str, path: Sequence[str] | None = None) -> DataConfig:
    """Return the default configuration of the data set ``name`` with the files at ``path``, None if they are fetched.

    Raises:
        DataError: the name is unknown, a path is given that the data set does not take, or a required path is missing.
    """
    entry, where = DATASETS.get(name), f"data set '{name}'"
    if entry is None:
        names = [*DATASETS, *ASSETS]
        raise DataError(
            f"is not known{meant(name, names)}", where=f"'{name}'", remedy=f"choose one of {', '.join(names)}"
        )
    if entry.needs_files and not path:
        remedy = f"then: cordillera data get {name} --path FILE, or data.path = 'FILE' in a recipe"
        raise DataError(f"cannot be fetched; {entry.source} ({entry.terms})", where=where, remedy=remedy)
    if path and not entry.needs_files:
        remedy = "leave --path out; `cordillera recipe new FILES` is for logs of your own"
        raise DataError("is fetched, and takes no files", where=where, remedy=remedy)
    return DataConfig(dataset=name, path=tuple(path) if path else None)


def open_schema(config: DataConfig) -> Schema:
    """Return the schema of a configuration's rows, without reading the rows."""
    if config.schema_ is not None:
        return config.schema_
    assert config.dataset is not None
    return DATASETS[config.dataset].schema(config)


def read_rows(
    path: str | Sequence[str],
    config: DataConfig,
    schema: Schema | None = None,
    *,
    format: FileFormat | None = None,
    labels: bool = True,
) -> Iterator[RowChunk]:
    """Iterate over the rows of files at ``path`` to predict on, with their places, as ``Encoder.encode`` takes them.

    The ``schema`` of the trained model is by default that of ``config``, the ``format`` that of the file names.

    Args:
        config: Data that the model was trained on. Criteo and Avazu files are read as published, with or without the
            label; other files by their column names.
        labels: Whether labels are read; if not, they may hold anything. Timestamps may in any case.

    Raises:
        DataError: a file does not exist or is empty, a column is missing, or a row has too many or too few fields.
    """
    paths = expand_paths(path)
    kind = format or format_of(paths)
    schema = schema or open_schema(config)
    entry = DATASETS.get(config.dataset or "")
    header = entry.header if entry is not None and kind == entry.format else None
    if header is not None and _fields(paths[0]) != len(header):
        header = header[1:]
    prepare = None if entry is None else entry.prepare
    read = schema if labels else schema.model_copy(update={"labels": ()})
    form = form_of(config) | {"timestamp_format": None}
    log = OwnLog(read, paths, kind, header, prepare, separator=config.separator, **form)
    for frame, place in log.chunks():
        needed = [feature.name for feature in (*schema.dense, *schema.categorical, *schema.lists)]
        absent = [name for name in needed if name not in frame.columns]
        if absent:
            raise DataError(
                f"column '{absent[0]}' is missing; there are {frame.columns}",
                where=place.source,
                remedy="the file must have every feature that the model was trained on",
            )
        yield frame, place


def _fields(path: Path) -> int:
    with pa.input_stream(str(path), compression="detect") as stream:
        return stream.read(1 << 16).split(b"\n", 1)[0].count(b"\t") + 1
