"""Readers of documents and rows from plain text, JSON lines and Parquet."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet

from cordillera.data.tokenizers.tokenizer import check_text
from cordillera.errors import DataError

_PACKED = (".gz", ".bz2", ".zst")
_TEXT = (".txt", ".text", ".md", ".py")
_JSON_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")


Date = float | str


class _Fields(NamedTuple):
    """Keys or columns of a row."""

    text: str
    url: str | None
    date: str | None


@dataclass(frozen=True)
class Document:
    """A text, and the path of its file.

    Attributes:
        row: Line or row in the file, from 1.
        url: URL of the page that the document is a version of; empty without one.
        date: Date of this version as stored in the file: a number, or text that sorts by time. None if not requested.
    """

    text: str
    file: str
    row: int = 1
    url: str = ""
    date: Date | None = None


class FileRow(NamedTuple):
    """Row of a file by names of keys or columns.

    Attributes:
        where: File and row, for errors.
    """

    where: str
    values: dict[str, Any]


def read_documents(
    paths: Sequence[Path],
    *,
    text_field: str = "text",
    unit: Literal["file", "line"] = "file",
    url_field: str | None = None,
    date_field: str | None = None,
) -> Iterator[Document]:
    """Iterate over the documents in ``text_field`` (a key or column) of files, in order.

    Memory holds one document, or one batch of a Parquet file.

    Args:
        paths: ``.txt``, ``.text``, ``.md``, ``.py``, ``.jsonl``, ``.ndjson`` (each also with ``.gz``, ``.bz2`` or
            ``.zst``), ``.parquet``, ``.pq``.
        unit: Unit that is a document in a plain text file: the ``file``, or every ``line``.
        url_field: Key or column that holds the page's address; a row may lack it.
        date_field: Key or column that orders the versions of a page; a number, or text that sorts by time, as ISO 8601
            does.

    Raises:
        DataError: a file is missing, empty, of another kind, or not UTF-8; a row is not an object, lacks the text, or
            has an address without a date. The error names file and row.
    """
    fields = _Fields(text_field, url_field, date_field)
    for path in paths:
        kind = _kind(path)
        with _errors_of(path):
            if kind == "parquet":
                yield from _parquet(path, fields)
            elif kind == "text" and unit == "file":
                with _stream(path) as file:
                    yield Document(_utf8(file.read(), path, None), str(path))
            else:
                for row, line in _lines(path):
                    text = _utf8(line, path, row)
                    yield Document(text, str(path), row) if kind == "text" else _json(text, fields, path, row)


def read_rows(paths: Sequence[Path]) -> Iterator[FileRow]:
    """Iterate over the rows of files, each with all its keys or columns, in order.

    Memory holds one line, or one batch of a Parquet file.

    Args:
        paths: ``.jsonl``, ``.ndjson`` (each also with ``.gz``, ``.bz2`` or ``.zst``), ``.parquet``, ``.pq``.

    Raises:
        DataError: a file is missing, empty, of another kind, or not UTF-8; a row is not an object. The error names file
            and row.
    """
    for path in paths:
        kind = _kind(path)
        if kind == "text":
            raise DataError(
                "plain text has no rows",
                where=str(path),
                remedy=f"give a file that ends in one of {', '.join((*_JSON_LINES, *_PARQUET))}",
            )
        with _errors_of(path):
            if kind == "json":
                for row, line in _lines(path):
                    yield FileRow(f"{path}:{row}", _object(_utf8(line, path, row), path, row))
                continue
            with _open_parquet(path) as file:
                names = file.schema_arrow.names
                for row, values in _parquet_rows(file, path, names):
                    yield FileRow(f"{path}:{row}", dict(zip(names, values, strict=True)))


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Refuse a file that is missing or empty, and name a file that cannot be read."""
    if not path.is_file():
        raise DataError("there is no such file", where=str(path))
    if path.stat().st_size == 0:
        raise DataError("the file is empty", where=str(path), remedy="delete it, or write it again")
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, KeyError, IndexError, MemoryError) as error:
        raise DataError(f"the file cannot be read ({error})", where=str(path)) from error


def _kind(path: Path) -> Literal["text", "json", "parquet"]:
    name = path.name.lower()
    for suffix in _PACKED:
        name = name.removesuffix(suffix)
    if name.endswith(_TEXT):
        return "text"
    if name.endswith(_JSON_LINES):
        return "json"
    if name.endswith(_PARQUET):
        return "parquet"
    if not path.exists():
        raise DataError("there is no such file", where=str(path))
    raise DataError(
        "the name does not tell what the file holds",
        where=str(path),
        remedy=f"end it in one of {', '.join((*_TEXT, *_JSON_LINES, *_PARQUET))}",
    )


def _stream(path: Path) -> Any:
    return pa.input_stream(str(path), compression="detect")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers, from 1, and contents of lines, without their ends."""
    with _stream(path) as file:
        rest, row = b"", 0
        while block := file.read(1 << 20):
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            for line in lines:
                row += 1
                yield row, line.removesuffix(b"\r")
        if rest:
            yield row + 1, rest


def _utf8(content: bytes, path: Path, row: int | None) -> str:
    try:
        return content.decode("utf-8").removeprefix("\ufeff" if row in (None, 1) else "")
    except UnicodeDecodeError as error:
        line = row if row is not None else content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"byte {error.start} ({content[error.start]:#04x}) is not UTF-8",
            where=f"{path}:{line}",
            remedy="convert the file to UTF-8, for example with iconv",
        ) from None


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    where = f"{path}:{number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the line is not JSON ({error})", where=where) from None
    if not isinstance(row, dict):
        raise DataError("the line is not a JSON object", where=where)
    return row


def _json(line: str, fields: _Fields, path: Path, number: int) -> Document:
    row = _object(line, path, number)
    if fields.text not in row:
        raise DataError(
            f"there is no field '{fields.text}'; there are {sorted(row)[:8]}",
            where=f"{path}:{number}",
            remedy="set text_field",
        )
    return _document([None if name is None else row.get(name) for name in fields], fields, path, number)


def _document(values: Sequence[Any], fields: _Fields, path: Path, row: int) -> Document:
    """Make a document from the text, address and date of a row."""
    text, url, date = values
    where = f"{path}:{row}"
    for value, name in ((text, fields.text), (url or "", fields.url)):
        if not isinstance(value, str):
            raise DataError(f"field '{name}' is not text but {type(value).__name__}", where=where)
        check_text(value, f"{where}, field '{name}'")
    if not url or fields.date is None:
        return Document(text, str(path), row, url or "")
    if isinstance(date, datetime.date):  # of a Parquet column
        date = date.isoformat()
    if isinstance(date, bool) or not isinstance(date, int | float | str) or date != date:
        raise DataError(
            f"field '{fields.date}' is no date but {date!r}",
            where=where,
            remedy="a number, or text that sorts by time, as ISO 8601 does",
        )
    return Document(text, str(path), row, url, date)


def _open_parquet(path: Path) -> pa.parquet.ParquetFile:
    return pa.parquet.ParquetFile(path, page_checksum_verification=True)


def _parquet(path: Path, fields: _Fields) -> Iterator[Document]:
    with _open_parquet(path) as file:
        names = file.schema_arrow.names
        for name, key in zip(fields, ("text_field", "url_field", "date_field"), strict=True):
            if name is not None and name not in names:
                raise DataError(
                    f"there is no column '{name}'; there are {names[:8]}", where=str(path), remedy=f"set {key}"
                )
        kind = file.schema_arrow.field(fields.text).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"column '{fields.text}' is not text but {kind}", where=str(path), remedy="set text_field")
        for row, values in _parquet_rows(file, path, fields):
            if values[0] is None:
                raise DataError(f"column '{fields.text}' is blank", where=f"{path}:{row}", remedy="drop such rows")
            yield _document(values, fields, path, row)


def _parquet_rows(
    file: pa.parquet.ParquetFile, path: Path, names: Sequence[str | None]
) -> Iterator[tuple[int, list[Any]]]:
    """Numbers of rows, from 1, and their values of columns; None for a column without a name."""
    if file.metadata.num_rows == 0:
        raise DataError("the file holds no rows", where=str(path), remedy="delete it, or write it again")
    row = 0
    for batch in file.iter_batches(batch_size=256, columns=[name for name in names if name is not None]):
        columns = [None if name is None else batch.column(name) for name in names]
        for place in range(len(batch)):
            row += 1
            try:
                yield row, [None if column is None else column[place].as_py() for column in columns]
            except UnicodeDecodeError as error:
                raise DataError(f"byte {error.start} is not UTF-8", where=f"{path}:{row}") from None
    if row != file.metadata.num_rows:
        raise DataError(
            f"the file holds {row} rows, its own count is {file.metadata.num_rows}",
            where=str(path),
            remedy="write it again",
        )
