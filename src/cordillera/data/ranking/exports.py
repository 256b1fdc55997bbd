"""Export of a split's raw rows to a file."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from cordillera.data.files import disk_errors
from cordillera.data.ranking.cache import SPLITS
from cordillera.data.ranking.datasets import DataConfig
from cordillera.data.ranking.features import Schema
from cordillera.data.ranking.rows import open_schema, raw_rows
from cordillera.errors import DataError
from cordillera.files import check_writable


def check_export(path: Path, split: str) -> None:
    """Check before the work what :func:`export` is asked for.

    Raises:
        DataError: If the file is neither ``.csv`` nor ``.parquet``, or there is no such split.
        PlanError: If the file cannot be written.
    """
    if path.suffix.lower() not in (".csv", ".parquet"):
        what = f"cannot write '{path.suffix.lower()}' files"
        raise DataError(what, where=str(path), remedy="end the name in .csv or .parquet")
    if split not in SPLITS:
        raise DataError(f"must be train, validation or test, got {split!r}", where="split")
    check_writable(path)


def export(config: DataConfig, path: Path, *, split: str = "test", rows: int | None = None) -> int:
    """Write the first ``rows`` raw rows of a split, or all, for ``cordillera predict``, and return their number.

    The path ends in ``.csv``, where list entries are joined by the feature's separator, or in ``.parquet``.
    """
    check_export(path, split)
    kind = path.suffix.lower()
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    writer: Any = None
    table: pa.Table | None = None
    count = 0
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        for frame in raw_rows(config, split, rows):
            if kind == ".csv":
                frame = _with_joined_lists(frame, open_schema(config), config)
            try:
                # Files of one log may differ in the type of a column; the first file decides.
                if table is None:
                    table = _with_types(frame, open_schema(config), joined=kind == ".csv").to_arrow()
                else:
                    table = frame.to_arrow().cast(table.schema)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise DataError(
                    f"the files of the log hold a column in several types ({error})",
                    where=config.label,
                    remedy="write the column in one type",
                ) from error
            with disk_errors(path):
                if writer is None:
                    make = pa.csv.CSVWriter if kind == ".csv" else pa.parquet.ParquetWriter
                    writer = make(str(beside), table.schema)
                writer.write_table(table)
            count += len(frame)
        if writer is None:
            raise DataError(f"the {split} split holds no rows", where=str(path))
        with disk_errors(path):
            writer.close()
            os.replace(beside, path)
    finally:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
        beside.unlink(missing_ok=True)
    return count


def _with_types(frame: pl.DataFrame, schema: Schema, *, joined: bool) -> pl.DataFrame:
    """Give columns without a value and a type the type of their role, as later files may hold values."""
    types: dict[str, pl.DataType] = {name: pl.Float64() for name in (*schema.labels, schema.weight or "")}
    types |= {one.name: pl.Float64() if joined or one.width == 1 else pl.List(pl.Float64()) for one in schema.dense}
    types |= {one.name: pl.String() if joined else pl.List(pl.String()) for one in schema.lists}
    empty = [name for name, kind in frame.schema.items() if kind == pl.Null()]
    return frame.with_columns(pl.col(name).cast(types.get(name, pl.String())) for name in empty)


def _with_joined_lists(frame: pl.DataFrame, schema: Schema, config: DataConfig) -> pl.DataFrame:
    for dense in schema.dense:
        if frame.schema[dense.name].is_nested():
            raise DataError(
                f"'{dense.name}' holds lists of numbers, which a .csv file cannot",
                where=config.label,
                remedy="export to a .parquet file",
            )
    sized = [f.name for f in schema.lists if isinstance(frame.schema[f.name], pl.Array)]
    frame = frame.with_columns(pl.col(name).arr.to_list() for name in sized)
    lists = [f for f in schema.lists if isinstance(frame.schema[f.name], pl.List)]
    for feature in lists:
        entries = frame[feature.name].explode().drop_nulls().cast(pl.String)
        held = entries.filter(entries.str.contains(feature.separator, literal=True))
        if len(held):
            raise DataError(
                f"an entry of list '{feature.name}' holds the separator: {held[0]!r}",
                where=config.label,
                remedy="export to a .parquet file, or choose another separator in the schema",
            )
    return frame.with_columns(pl.col(f.name).cast(pl.List(pl.String)).list.join(f.separator) for f in lists)
