"""Click logs as chunks of rows: CSV, TSV and Parquet files of any size, and the layouts of Criteo and Avazu."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import unquote

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet
from polars.exceptions import PolarsError

from cordillera.data.ahead import map_ahead, reading_threads
from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, Schema, TimeUnit
from cordillera.data.ranking.logs.columns import RowPlace, column_names, ids_of, timestamps_of, unit_of
from cordillera.data.ranking.logs.delimited import DelimitedFile, other_separator
from cordillera.errors import DataError

CHUNK_ROWS = 262_144
"""Number of rows in a chunk of Parquet or of a frame in memory."""

_DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, MemoryError, PolarsError)

FileFormat = Literal["csv", "tsv", "parquet"]
RowChunk = tuple[pl.DataFrame, RowPlace]


class ClickLog(Protocol):
    """Rows that can be read repeatedly, chunk by chunk.

    Attributes:
        schema: Roles of the columns.
        facts: Facts known in advance, such as source and terms.
        probability: Column of the true probability of the first label, in synthetic data; not part of the schema.
    """

    schema: Schema
    facts: dict[str, Any]
    probability: str | None

    def fingerprint(self) -> str:
        """Return text that changes when the rows change."""
        ...

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[RowChunk]:
        """Iterate over frames in order, with their places; columns beyond those asked for may be in them."""
        ...


@dataclass
class FrameLog:
    """Rows in memory.

    Attributes:
        name: Name of the log, for errors and the fingerprint.
        version: Version of the rows, for the fingerprint.
        probability: Column of the true probability of the first label, if known.
    """

    schema: Schema
    frame: pl.DataFrame
    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    probability: str | None = None

    def fingerprint(self) -> str:
        """Return the name and version."""
        return f"{self.name} {self.version}"

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[RowChunk]:
        """Iterate over slices of the frame, with the given columns; None for all."""
        frame = self.frame if columns is None else self.frame.select(columns)
        for start in range(0, len(frame), CHUNK_ROWS):
            yield frame.slice(start, CHUNK_ROWS), RowPlace(self.name, start + 1)


@dataclass
class FileLog:
    """Rows in files, read as a stream.

    Text files are read as text; columns that the schema declares as numbers are converted later, so that errors name
    the line.

    Folders called ``name=value`` above a file give all of its rows a column ``name`` with that text, unless the file
    has one.

    Attributes:
        header: Column names of files without a header; None if the first line names them.
        prepare: Function applied to every frame before anything else reads it.
        facts: Facts known in advance, such as source and terms.
        probability: Column of the true probability of the first label, if known.
        separator: Character between fields of text files; None for that of the format.
    """

    schema: Schema
    paths: tuple[Path, ...]
    format: FileFormat
    header: tuple[str, ...] | None = None
    prepare: Callable[[pl.DataFrame, RowPlace], pl.DataFrame] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    probability: str | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        if not self.paths:
            raise DataError("no file was given", where="data.path")
        for path in self.paths:
            try:
                size = None
                if path.is_file():
                    with open(path, "rb") as file:
                        size = file.seek(0, os.SEEK_END)
            except (OSError, ValueError) as error:  # ValueError: a null byte in the name
                reason = getattr(error, "strerror", None) or error
                raise DataError(f"cannot be read ({reason})", where=str(path), remedy="check the path") from error
            if size is None:
                raise DataError("there is no such file", where=str(path), remedy="check the path")
            if size == 0:
                raise DataError("the file is empty", where=str(path), remedy="give a file that holds rows")

    def fingerprint(self) -> str:
        """Return a hash of the files' names, sizes, modification times, and first and last megabytes."""
        digest = hashlib.sha256()
        for path in self.paths:
            state = path.stat()
            digest.update(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}\n".encode())
            with open(path, "rb") as file:
                digest.update(file.read(1 << 20))
                file.seek(max(0, state.st_size - (1 << 20)))
                digest.update(file.read())
        return digest.hexdigest()

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[RowChunk]:
        """Iterate over frames in the order of the files; with ``prepare`` every column is read.

        Raises:
            DataError: a file is not of the format, a row has too many or too few fields, a quotation mark is not closed
                in its line, or a column is missing or of a type that cannot be read.
        """
        # prepare may compute a column from others, so with it every column is read.
        wanted = None if self.prepare is not None or columns is None else list(columns)
        read = self._parquet if self.format == "parquet" else self._text

        def parts() -> Iterator[tuple[Path, Callable[[], RowChunk] | None]]:
            for path in self.paths:
                for parse in read(path, wanted):
                    yield path, parse
                yield path, None

        def parsed(part: tuple[Path, Callable[[], RowChunk] | None]) -> tuple[Path, RowChunk | None]:
            path, parse = part
            if parse is None:
                return path, None
            frame, place = parse()
            frame = _with_folders(frame, path, wanted)
            return path, (frame if self.prepare is None else self.prepare(frame, place), place)

        any_rows = False
        for path, chunk in map_ahead(parsed, parts(), threads=reading_threads()):
            if chunk is not None and len(chunk[0]):
                any_rows = True
                yield chunk
            elif chunk is None and not any_rows:
                raise DataError("the file holds no rows", where=str(path), remedy="give a file that holds rows")
            elif chunk is None:
                any_rows = False

    def _in_file(self, path: Path, wanted: list[str] | None, there: Sequence[str]) -> list[str] | None:
        """Return the wanted columns that a file holds itself; refuse it if others are missing."""
        if wanted is None:
            return None
        absent = [name for name in wanted if name not in there]
        lost = [name for name in absent if name not in _folder_values(path)]
        if lost:
            remedy = "give the file this column; the recipe of a new run may leave it out of data.schema"
            if self.format != "parquet" and (mark := other_separator(there)):
                remedy = f"the file has a single column: its separator may be {mark}; set data.separator"
            raise DataError(f"column '{lost[0]}' is missing; there are {list(there)}", where=str(path), remedy=remedy)
        return [name for name in wanted if name not in absent]

    def _parquet(self, path: Path, wanted: list[str] | None) -> Iterator[Callable[[], RowChunk]]:
        row = 1
        try:
            with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
                columns = self._parquet_columns(path, file.schema_arrow, wanted)
                for batch in file.iter_batches(batch_size=CHUNK_ROWS, columns=list(columns.values())):
                    yield partial(_rows_of_batch, batch, columns, RowPlace(str(path), row))
                    row += batch.num_rows
                rows = file.metadata.num_rows
        except _DAMAGE as error:
            raise _parquet_damage(error, path, row) from error
        if row - 1 != rows:
            raise DataError(
                f"the Parquet file holds {row - 1} rows, its own count is {rows}",
                where=str(path),
                remedy="write it again",
            )

    def _parquet_columns(self, path: Path, schema: pa.Schema, wanted: list[str] | None) -> dict[str, str]:
        """Return the columns to read, with their names in the file."""
        if schema.names.count("") > 1:  # columns without names are indistinguishable
            raise DataError("several columns have no name", where=str(path), remedy="name them in the file")
        names = column_names(schema.names, str(path))
        in_file = dict(zip(names, schema.names, strict=True))
        own = self._in_file(path, wanted, names)
        kinds = {name: schema.field(in_file[name]).type for name in names}
        # Raises UnicodeDecodeError for names within types that are not UTF-8.
        str(kinds)
        needed = own if own is not None else [*self.schema.columns, *self.schema.ids]
        for name in needed:
            if name in kinds and not _is_readable(kinds[name]):
                raise DataError(
                    f"column '{name}' holds {kinds[name]}, which cannot be read",
                    where=str(path),
                    remedy="convert it to numbers of at most 64 bits, text, dates, or lists of these",
                )
        if not own:
            readable = [name for name in names if _is_readable(kinds[name])]
            own = readable if own is None else readable[:1]  # one column suffices to count rows
        return {name: in_file[name] for name in own}

    def delimited(self, path: Path) -> DelimitedFile:
        """Open a text file of the log."""
        mark = self.separator or ("\t" if self.format == "tsv" else ",")
        # Published logs without a header hold raw text, in which a quotation mark is an ordinary character.
        return DelimitedFile(path, mark, quoted=self.header is None, names=self.header)

    def lacking(self, names: Sequence[str]) -> dict[str, Path]:
        """Return those of some ``names`` of columns that a file lacks, each with the first such file."""
        found: dict[str, Path] = {}
        for path in self.paths:
            if self.format == "parquet":
                try:
                    own = column_names(pyarrow.parquet.read_schema(path).names, str(path))
                except _DAMAGE as error:
                    raise _parquet_damage(error, path, 1) from error
            else:
                own = self.delimited(path).names
            there = {*own, *_folder_values(path)}
            found |= {name: path for name in names if name not in there and name not in found}
        return found

    def _text(self, path: Path, wanted: list[str] | None) -> Iterator[Callable[[], RowChunk]]:
        file = self.delimited(path)
        own = self._in_file(path, wanted, file.names)
        for block in file.blocks():
            yield partial(file.parse, block, own)


def _rows_of_batch(batch: pa.RecordBatch, columns: dict[str, str], place: RowPlace) -> RowChunk:
    try:
        # Metadata or text that is not UTF-8, and offsets out of range, would end the process.
        batch = pa.RecordBatch.from_arrays(batch.select(list(columns.values())).columns, names=list(columns))
        batch.validate(full=True)
        frame = pl.from_arrow(batch)
    except _DAMAGE as error:
        raise _parquet_damage(error, Path(place.source), place.first_row) from error
    assert isinstance(frame, pl.DataFrame)
    return frame, place


def _parquet_damage(error: Exception, path: Path, row: int) -> DataError:
    """Return the error of a file that is damaged from its ``row`` on, counted from 1."""
    what = "this is not a whole Parquet file" if row == 1 else f"the Parquet file is damaged after row {row - 1}"
    return DataError(f"{what} ({error})", where=str(path), remedy="write it again")


def _folder_values(path: Path) -> dict[str, str | None]:
    """Return the columns of folders called ``name=value`` (Hive partitions)."""
    found: dict[str, str | None] = {}
    for part in path.parent.parts:
        name, mark, value = part.partition("=")
        if mark and name:
            found[unquote(name)] = None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
    return found


def _with_folders(frame: pl.DataFrame, path: Path, wanted: list[str] | None) -> pl.DataFrame:
    """Return a frame with the columns of the folders above its file."""
    values = {name: value for name, value in _folder_values(path).items() if name not in frame.columns}
    added = [pl.lit(value, pl.String).alias(name) for name, value in values.items() if wanted is None or name in wanted]
    return frame.with_columns(added) if added else frame


def unit_of_log(log: FileLog) -> TimeUnit:
    """Return the unit of a log's timestamps, judged by its first rows."""
    assert log.schema.timestamp is not None
    seconds = replace(log, schema=log.schema.model_copy(update={"timestamp_unit": "s"}))
    return next((unit_of(times.to_numpy()) for times, _ in log_times(seconds)), "s")


def _is_readable(kind: pa.DataType) -> bool:
    """Whether an Arrow type can be read as numbers, text, dates or lists of these."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _is_readable(kind.value_type)
    if pa.types.is_dictionary(kind):
        return _is_readable(kind.value_type) and not pa.types.is_nested(kind.value_type)
    if pa.types.is_decimal(kind):
        return bool(kind.bit_width <= 128)
    simple = (
        pa.types.is_boolean,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_fixed_size_binary,
        pa.types.is_date,
        pa.types.is_timestamp,
        pa.types.is_time,
        pa.types.is_null,
    )
    return any(fits(kind) for fits in simple)


def guess_format(path: Path) -> FileFormat:
    """Return the format that a file's name implies.

    Raises:
        DataError: the name implies no format.
    """
    name = path.name.lower()
    for suffix in (".gz", ".zst"):
        name = name.removesuffix(suffix)
    endings: dict[str, FileFormat] = {
        ".csv": "csv",
        ".tsv": "tsv",
        ".txt": "tsv",
        ".parquet": "parquet",
        ".pq": "parquet",
    }
    for ending, kind in endings.items():
        if name.endswith(ending):
            return kind
    remedy = (
        "name files of samples that end in .csv, .tsv, .txt, .parquet or .pq, or set data.format in a recipe to train"
    )
    raise DataError(
        f"{'the name does not tell the format' if path.exists() else 'there is no such file or folder'}",
        where=str(path),
        remedy=remedy,
    )


def format_of(paths: Sequence[Path]) -> FileFormat:
    """Return the format that the names of a log's files imply.

    Raises:
        DataError: there is no file, a name implies no format, or two names imply different ones.
    """
    if not paths:
        raise DataError("no file was given", where="data.path", remedy="name one")
    found = guess_format(paths[0])
    for path in paths[1:]:
        if (other := guess_format(path)) != found:
            raise DataError(
                f"the name says {other}, that of {paths[0]} says {found}",
                where=str(path),
                remedy="files of one log have one format: convert those of the other",
            )
    return found


CRITEO_DENSE = tuple(f"I{index}" for index in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{index}" for index in range(1, 27))
CRITEO_COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)
"""Columns of the Criteo display advertising challenge: tab-separated, no header, blanks for missing values."""


def criteo_schema() -> Schema:
    """Return the schema of the Criteo log: 13 counts, 26 hashed ids and a click label, in order but without times.

    Values of fewer than 10 training rows share the row for unseen ones.
    """
    return Schema(
        dense=tuple(DenseFeature(name=name, transform="log") for name in CRITEO_DENSE),
        categorical=tuple(CategoricalFeature(name=name, min_count=10) for name in CRITEO_CATEGORICAL),
        labels=("label",),
    )


AVAZU_CATEGORICAL = (
    "C1",
    "banner_pos",
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
    "device_type",
    "device_conn_type",
    *(f"C{index}" for index in range(14, 22)),
)
"""Columns of the Avazu click-through challenge: comma-separated, with a header."""


def avazu_schema() -> Schema:
    """Return the schema of the Avazu log: 21 ids, hour of day and weekday, a click label, hours as timestamps.

    Values of fewer than 5 training rows share the row for unseen ones.
    """
    return Schema(
        categorical=(
            *(CategoricalFeature(name=name, min_count=5) for name in AVAZU_CATEGORICAL),
            CategoricalFeature(name="hour_of_day"),
            CategoricalFeature(name="weekday"),
        ),
        labels=("click",),
        timestamp="timestamp",
        ids=("id",),
    )


def avazu_times(frame: pl.DataFrame, place: RowPlace) -> pl.DataFrame:
    """Add ``timestamp`` (seconds), ``hour_of_day`` and ``weekday`` to a ``frame`` whose ``hour`` reads YYMMDDHH.

    A frame that has a ``timestamp`` is returned unchanged.

    Raises:
        DataError: ``hour`` is missing or does not read YYMMDDHH; the ``place`` is named.
    """
    if "timestamp" in frame.columns:
        return frame
    if "hour" not in frame.columns:
        raise DataError(f"column 'hour' is missing; there are {frame.columns}", where=place.source)
    hour = ids_of(frame["hour"], "hour", place)
    time = (hour + "00").str.to_datetime("%y%m%d%H%M", strict=False, time_unit="us")
    wrong = time.is_null().to_numpy()
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(f"{hour[row]!r} does not read YYMMDDHH", where=place.at(row, "hour"), remedy="correct the hour")
    return frame.with_columns(
        timestamp=time.dt.epoch("s"),
        hour_of_day=time.dt.hour().cast(pl.String),
        weekday=time.dt.weekday().cast(pl.String),
    )


def list_series(values: np.ndarray, offsets: np.ndarray) -> pl.Series:
    """Make a column of lists; list ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""
    series = pl.from_arrow(pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values)))
    assert isinstance(series, pl.Series)
    return series


def log_times(log: ClickLog) -> Iterator[tuple[pl.Series, RowPlace]]:
    """Iterate over the timestamps of a log, chunk by chunk, as ``int64`` seconds."""
    name = log.schema.timestamp
    assert name is not None

    def times(chunk: RowChunk) -> tuple[pl.Series, RowPlace]:
        frame, place = chunk
        if name not in frame.columns:
            raise DataError(f"column '{name}' is missing; there are {frame.columns}", where=place.source)
        return pl.Series("time", timestamps_of(frame[name], name, place, log.schema.timestamp_unit)), place

    return map_ahead(times, log.chunks([name]), threads=reading_threads())
