"""Readers of documents and rows from plain text, JSON lines, Parquet and Arrow."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from cordillera.data.language.tables import ARROW, PARQUET, is_table, table_rows, table_schema
from cordillera.data.tokenizers.tokenizer import check_text
from cordillera.errors import DataError

_PACKED = (".gz", ".bz2", ".zst")
_TEXT = (".txt", ".text", ".md", ".py")
_JSON_LINES = (".jsonl", ".ndjson")
_OF_ROWS = (*_JSON_LINES, *PARQUET, *ARROW)

FileKind = Literal["text", "json", "table"]

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

    Memory holds one document, or one batch of a Parquet or Arrow file.

    Args:
        paths: ``.txt``, ``.text``, ``.md``, ``.py``, ``.jsonl``, ``.ndjson`` (each also with ``.gz``, ``.bz2`` or
            ``.zst``), ``.parquet``, ``.pq``, ``.arrow``, ``.feather``.
        unit: Unit that is a document in a plain text file: the ``file``, or every ``line``.
        url_field: Key or column that holds the page's address; a row may lack it.
        date_field: Key or column that orders the versions of a page; a number, or text that sorts by time, as ISO 8601
            does.

    Raises:
        DataError: a file is missing, empty, damaged, of another kind, or not UTF-8; a row is not an object, lacks the
            text, or has an address without a date. The error names file and row.
    """
    fields = _Fields(text_field, url_field, date_field)
    for path in paths:
        kind = file_kind(path)
        with _errors_of(path):
            if kind == "table":
                yield from _table(path, fields)
            elif kind == "text" and unit == "file":
                with _stream(path) as file:
                    yield Document(_utf8(file.read(), path, None), str(path))
            else:
                for row, line in _lines(path):
                    text = _utf8(line, path, row)
                    yield Document(text, str(path), row) if kind == "text" else _json(text, fields, path, row)


def read_rows(paths: Sequence[Path]) -> Iterator[FileRow]:
    """Iterate over the rows of files, each with all its keys or columns, in order.

    Memory holds one line, or one batch of a Parquet or Arrow file.

    Args:
        paths: ``.jsonl``, ``.ndjson`` (each also with ``.gz``, ``.bz2`` or ``.zst``), ``.parquet``, ``.pq``,
            ``.arrow``, ``.feather``.

    Raises:
        DataError: a file is missing, empty, damaged, of another kind, or not UTF-8; a row is not an object. The error
            names file and row.
    """
    for path in paths:
        kind = file_kind(path)
        if kind == "text":
            raise DataError(
                "plain text has no rows",
                where=str(path),
                remedy=f"give a file that ends in one of {', '.join(_OF_ROWS)}",
            )
        with _errors_of(path):
            if kind == "json":
                for row, line in _lines(path):
                    yield FileRow(f"{path}:{row}", _object(_utf8(line, path, row), path, row))
                continue
            names = table_schema(path).names
            for row, values in table_rows(path, names):
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


def file_kind(path: Path) -> FileKind:
    """Return the kind of a file by its name: plain text, lines of JSON, or a table (Parquet or Arrow).

    Raises:
        DataError: the name does not determine the kind, or there is no such file.
    """
    name = _unpacked(path)
    if name.endswith(_TEXT):
        return "text"
    if name.endswith(_JSON_LINES):
        return "json"
    if is_table(path):
        return "table"
    if not path.exists():
        raise DataError("there is no such file", where=str(path))
    raise DataError(
        "the name does not tell what the file holds",
        where=str(path),
        remedy=f"end it in one of {', '.join((*_TEXT, *_OF_ROWS))}; where others are beside it, name a pattern",
    )


def is_of_rows(path: Path) -> bool:
    """Return whether a file holds rows with keys or columns, by its name."""
    return is_table(path) or _unpacked(path).endswith(_JSON_LINES)


def _unpacked(path: Path) -> str:
    name = path.name.lower()
    for suffix in _PACKED:
        name = name.removesuffix(suffix)
    return name


def _stream(path: Path) -> Any:
    return pa.input_stream(str(path), compression="detect")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers, from 1, and contents of lines, without their ends."""
    with _stream(path) as file:
        pieces: list[bytes] = []  # pieces of the current line
        row = 0
        while block := file.read(1 << 20):
            first, *others = block.split(b"\n")
            pieces.append(first)
            for other in others:
                row += 1
                yield row, b"".join(pieces).removesuffix(b"\r")
                pieces = [other]
        if rest := b"".join(pieces):
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
    if not line:
        raise DataError("the line is empty", where=where, remedy="delete it")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the line is not JSON ({_flaw(error)})", where=where) from None
    if not isinstance(row, dict):
        raise DataError("the line is not a JSON object", where=where)
    return row


def _flaw(error: Exception) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    return f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"


def _json(line: str, fields: _Fields, path: Path, number: int) -> Document:
    row = _object(line, path, number)
    if fields.text not in row:
        raise _absent("field", fields.text, sorted(row), f"{path}:{number}", "text_field")
    return _document([None if name is None else row.get(name) for name in fields], fields, path, number)


def _absent(what: str, name: str, names: Sequence[str], where: str, key: str) -> DataError:
    inside = name.partition(".")[0] in names
    remedy = f"set data.{key} in a recipe, or call the {what} '{name}'"
    if inside:
        remedy = f"{what}s inside of others are not read: write the text into a {what} of its own"
    elif "messages" in names:
        remedy = (
            "chats are learnt by recipes with an objective, such as smollm2-sft, and evaluated as its data.validation"
        )
    return DataError(f"there is no {what} '{name}'; there are {names[:8]}", where=where, remedy=remedy)


def _document(values: Sequence[Any], fields: _Fields, path: Path, row: int) -> Document:
    """Make a document from the text, address and date of a row."""
    text, url, date = values
    where = f"{path}:{row}"
    if text is None:
        raise DataError(f"field '{fields.text}' is null", where=where, remedy="drop such rows")
    for value, name in ((text, fields.text), (url or "", fields.url)):
        if not isinstance(value, str):
            raise DataError(f"field '{name}' is not text but {type(value).__name__}", where=where)
        check_text(value, f"{where}, field '{name}'")
    if not url or fields.date is None:
        return Document(text, str(path), row, url or "")
    if isinstance(date, datetime.date):  # a value of a date column
        date = date.isoformat()
    if isinstance(date, bool) or not isinstance(date, int | float | str) or date != date:
        raise DataError(
            f"field '{fields.date}' is no date but {date!r}",
            where=where,
            remedy="a number, or text that sorts by time, as ISO 8601 does",
        )
    return Document(text, str(path), row, url, date)


def _table(path: Path, fields: _Fields) -> Iterator[Document]:
    schema = table_schema(path)
    for name, key in zip(fields, ("text_field", "cleaning.url_field", "cleaning.date_field"), strict=True):
        if name is not None and name not in schema.names:
            raise _absent("column", name, schema.names, str(path), key)
    kind = schema.field(fields.text).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(f"column '{fields.text}' is not text but {kind}", where=str(path), remedy="set text_field")
    for row, values in table_rows(path, fields):
        yield _document(values, fields, path, row)
