"""Rows of Parquet and Arrow files, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from cordillera.errors import DataError

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather")

_BATCH_ROWS = 256
_BUFFER = 1 << 20  # bytes of a column that are read at a time
_END_MARK = b"\xff\xff\xff\xff\0\0\0\0"
_AGAIN = "write the file again, or copy it whole"


def is_table(path: Path) -> bool:
    """Return whether a file is Parquet or Arrow, by its name."""
    return path.name.lower().endswith((*PARQUET, *ARROW))


def table_schema(path: Path) -> pa.Schema:
    """Return the columns of a table with their types."""
    if _is_parquet(path):
        with _open_parquet(path) as file:
            return file.schema_arrow
    with pa.memory_map(str(path)) as file:
        return _open_arrow(file, path).schema


def table_rows(path: Path, names: Sequence[str | None]) -> Iterator[tuple[int, list[Any]]]:
    """Iterate over the numbers of a table's rows, from 1, and their values.

    Memory holds one batch of a file; what Parquet and uncompressed Arrow files hold beside it is not read before.

    Args:
        path: Parquet, or Arrow as a stream or as a file.
        names: Names of the columns whose values are given; None for a column of None.

    Raises:
        DataError: the file holds no rows, ends too early, or has a row that is damaged or not UTF-8.
    """
    read = list(dict.fromkeys(name for name in names if name is not None))
    row = 0
    for batch in _parquet_batches(path, read) if _is_parquet(path) else _arrow_batches(path, read):
        _check(batch, path, row)
        columns = [None if name is None else batch.column(name) for name in names]
        for place in range(len(batch)):
            row += 1
            yield row, [None if column is None else column[place].as_py() for column in columns]
    if row == 0:
        raise DataError("the file holds no rows", where=str(path), remedy="delete it, or write it again")


def _is_parquet(path: Path) -> bool:
    return path.name.lower().endswith(PARQUET)


def _open_parquet(path: Path) -> pa.parquet.ParquetFile:
    # With pre_buffer, columns of all row groups would be read at once.
    return pa.parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False, buffer_size=_BUFFER)


def _parquet_batches(path: Path, names: list[str]) -> Iterator[pa.RecordBatch]:
    with _open_parquet(path) as file:
        found = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=names):
            found += len(batch)
            yield batch
        if found != file.metadata.num_rows:
            raise DataError(
                f"the file holds {found} rows, its own count is {file.metadata.num_rows}",
                where=str(path),
                remedy=_AGAIN,
            )


def _arrow_batches(path: Path, names: list[str]) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as file:
        places = _open_arrow(file, path).schema.get_field_index
        file.seek(0)
        reader = _open_arrow(file, path, pa.ipc.IpcReadOptions(included_fields=[places(name) for name in names]))
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            yield from reader


def _open_arrow(file: Any, path: Path, options: pa.ipc.IpcReadOptions | None = None) -> Any:
    """Open an Arrow file of either layout; a stream, which could end after any batch, must have its end mark."""
    if file.read(6) == b"ARROW1":
        return pa.ipc.open_file(file, options=options)
    file.seek(max(0, file.size() - len(_END_MARK)))
    if file.read(len(_END_MARK)) != _END_MARK:
        raise DataError(
            "the file is no Arrow file, or was cut off: its end mark is missing", where=str(path), remedy=_AGAIN
        )
    file.seek(0)
    return pa.ipc.open_stream(file, options=options)


def _check(batch: pa.RecordBatch, path: Path, before: int) -> None:
    """Check a batch for signs of corruption; ``before`` is the number of rows before it."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        for place in range(len(batch)):
            try:
                batch.slice(place, 1).validate(full=True)
            except pa.ArrowInvalid as error:
                what = "text that is not UTF-8" if "UTF8" in str(error) else f"damaged values ({error})"
                where = f"{path}:{before + place + 1}"
                raise DataError(f"the row holds {what}", where=where, remedy=_AGAIN) from None
        raise
