"""Tables in memory as Polars frames: pandas, Polars and Arrow tables, columns in a dict, and rows as dicts."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from polars.exceptions import PolarsError

from cordillera.data.files import write_bytes
from cordillera.errors import DataError

FrameLike = Any
"""Input of :func:`frame_of`; its types belong to libraries that need not be installed."""

_WHERE = "rows"
_UNREADABLE = (PolarsError, pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError, ImportError)


def frame_of(rows: FrameLike, columns: Sequence[str], optional: Sequence[str] = ()) -> pl.DataFrame:
    """Return a table in memory as a frame; values are converted at encoding, like values of a file.

    Args:
        rows: ``pandas.DataFrame``, ``polars.DataFrame`` or ``LazyFrame``, ``pyarrow.Table`` or ``RecordBatch``, any
            other object with the Arrow C stream interface, a dict from names to columns, or a list of dicts, one for
            each row. The index of pandas is ignored, and its NaN is a blank; elsewhere NaN is NaN.
        columns: Names of the columns that are read; others are left out.
        optional: Names of columns that are read if they are there.

    Raises:
        DataError: If it is no table, lacks a column, or a column holds what no frame can.
    """
    if isinstance(rows, pl.LazyFrame):
        rows = rows.collect()
    if isinstance(rows, Mapping):
        return _of_columns({name: rows[name] for name in _chosen(list(rows), columns, optional)})
    if isinstance(rows, Sequence) and not isinstance(rows, str | bytes):
        return _of_columns(_columns_of(rows, columns, optional))
    if type(rows).__module__.partition(".")[0] == "pandas" and hasattr(rows, "columns"):
        return _of_pandas(rows, columns, optional)
    if type(rows).__name__ == "Series":
        raise DataError(
            "must be a table, got one row or column of one", where=_WHERE, remedy="give table[i : i + 1], or [row]"
        )
    if not isinstance(rows, pl.DataFrame):
        if not (isinstance(rows, pa.Table | pa.RecordBatch) or hasattr(rows, "__arrow_c_stream__")):
            raise DataError(
                "must be a pandas, Polars or Arrow table, a dict of columns or a list of dicts, got "
                f"{type(rows).__name__}",
                where=_WHERE,
            )
        try:
            rows = pl.DataFrame(rows)
        except _UNREADABLE as error:
            raise DataError(f"cannot be read ({error})", where=_WHERE) from error
    found: pl.DataFrame = rows.select(_chosen(rows.columns, columns, optional))
    return found


def parquet_bytes(frame: pl.DataFrame) -> bytes:
    """Return the Parquet file of a frame, to be written here: Polars has errors of several kinds for a full disk."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def save_frame(frame: pl.DataFrame, folder: Path) -> Path:
    """Write a frame to a Parquet file of a folder, named by a hash of its content; return the file.

    A frame that was written before is not written again, so that data that was prepared from it is found.

    Raises:
        DataError: If a column cannot be written, or the disk is full.
    """
    try:
        content = parquet_bytes(frame)
    except _UNREADABLE as error:
        raise DataError(f"cannot be written as Parquet ({error})", where=_WHERE) from error
    path = folder / f"{hashlib.sha256(content).hexdigest()[:16]}.parquet"
    if not path.exists():
        write_bytes(path, content)
    return path


def _chosen(there: Sequence[str], columns: Sequence[str], optional: Sequence[str]) -> list[str]:
    """Return the names of the columns to read, of those that are there."""
    absent = [name for name in columns if name not in there]
    if absent:
        raise DataError(
            f"column '{absent[0]}' is missing; there are {list(there)}",
            where=_WHERE,
            remedy="correct the name here or in data.schema; an input that is not known is a column of None, and a "
            "label is needed for training and evaluation, not for predict",
        )
    return list(dict.fromkeys((*columns, *(name for name in optional if name in there))))


def _columns_of(rows: Sequence[Any], columns: Sequence[str], optional: Sequence[str]) -> dict[str, list[Any]]:
    if not rows:
        return {name: [] for name in columns}
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"must be a dict of columns, got {type(row).__name__}", where=f"{_WHERE}, row {index}",
                remedy='give each row as {"column": value, ...}',
            )  # fmt: skip
    found: dict[str, list[Any]] = {}
    for name in _chosen(list(rows[0]), columns, optional):
        try:
            found[name] = [row[name] for row in rows]
        except KeyError:
            index = next(index for index, row in enumerate(rows) if name not in row)
            raise DataError(
                f"column '{name}' is missing", where=f"{_WHERE}, row {index}",
                remedy="give every row every column; None stands for a blank",
            ) from None  # fmt: skip
    return found


def _of_columns(columns: Mapping[str, Any]) -> pl.DataFrame:
    series = []
    for name, values in columns.items():
        if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
            raise DataError(
                f"column '{name}' must be a sequence of values, got {type(values).__name__}",
                where=_WHERE,
                remedy="give a single row as [row], a list of one dict",
            )
        try:
            series.append(_of_values(name, values))
        except _UNREADABLE as error:
            raise DataError(f"column '{name}' cannot be read ({error})", where=_WHERE) from error
    lengths = {len(one) for one in series}
    if len(lengths) > 1:
        raise DataError(
            f"columns differ in their numbers of rows: {', '.join(f'{one.name} {len(one):,}' for one in series[:8])}",
            where=_WHERE,
        )
    return pl.DataFrame(series)


def _of_values(name: str, values: Any) -> pl.Series:
    if type(values).__module__.partition(".")[0] == "pandas":
        try:
            found: pl.Series = pl.from_pandas(values, nan_to_null=True)  # type: ignore[assignment]
            return found.rename(name)
        except (pa.ArrowException, TypeError):
            if values.dtype != object:
                raise
            values = values.where(values.notna(), None).tolist()
    if isinstance(values, list | tuple) or (isinstance(values, np.ndarray) and values.dtype == object):
        # Polars would cut NumPy's numbers to the type of the first
        values = [one.item() if isinstance(one, np.generic) else one for one in values]
    if isinstance(values, pl.Series):
        return values.rename(name)
    # numbers and text in one column become text, as in a file
    return pl.Series(name, values, strict=not isinstance(values, list | tuple))


def _of_pandas(frame: Any, columns: Sequence[str], optional: Sequence[str]) -> pl.DataFrame:
    names = _chosen(list(frame.columns), columns, optional)
    twice = [name for name in names if frame[name].ndim != 1]
    if twice:
        raise DataError(f"columns must differ, these stand twice: {twice[:8]}", where=_WHERE)
    return _of_columns({name: frame[name] for name in names})
