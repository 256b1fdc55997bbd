"""Documents out of plain text, JSON lines and Parquet, one after another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.parquet

from cordillera.errors import DataError

_PACKED = (".gz", ".bz2", ".zst")
_TEXT = (".txt", ".text", ".md", ".py")
_JSON_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")


@dataclass(frozen=True)
class Document:
    """A text and where it came from.

    Attributes:
        text: All of it.
        file: Its file.
        row: Line or row in the file, from 1.
    """

    text: str
    file: str
    row: int = 1


def read_documents(
    paths: Sequence[Path], *, text_field: str = "text", unit: Literal["file", "line"] = "file"
) -> Iterator[Document]:
    """Documents of files, in order; memory holds one document, or one batch of a Parquet file.

    Args:
        paths: ``.txt``, ``.text``, ``.md``, ``.py``, ``.jsonl``, ``.ndjson`` (each also with ``.gz``, ``.bz2`` or
            ``.zst``), ``.parquet``, ``.pq``.
        text_field: Key or column that holds the text.
        unit: What a document is in a plain text file: the ``file``, or every ``line``.

    Raises:
        DataError: a file is missing, empty, of another kind, or not UTF-8; a row is not an object or lacks the text.
            It names file and row.
    """
    for path in paths:
        kind = _kind(path)
        if not path.is_file():
            raise DataError("there is no such file", where=str(path))
        if path.stat().st_size == 0:
            raise DataError("the file is empty", where=str(path), remedy="delete it, or write it again")
        try:
            if kind == "parquet":
                yield from _parquet(path, text_field)
            elif kind == "text" and unit == "file":
                with _stream(path) as file:
                    yield Document(_utf8(file.read(), path, None), str(path))
            else:
                for row, line in _lines(path):
                    text = _utf8(line, path, row)
                    yield Document(
                        text if kind == "text" else _field(text, text_field, f"{path}:{row}"), str(path), row
                    )
        except (OSError, pa.ArrowInvalid) as error:
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
    raise DataError(
        "the name does not tell what the file holds",
        where=str(path),
        remedy=f"end it in one of {', '.join((*_TEXT, *_JSON_LINES, *_PARQUET))}",
    )


def _stream(path: Path) -> Any:
    return pa.input_stream(str(path), compression="detect")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines without their ends, from 1; the byte-order mark is left out."""
    with _stream(path) as file:
        rest, row = b"", 0
        while block := _read(file):
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            for line in lines:
                row += 1
                yield row, line.removesuffix(b"\r")
        if rest:
            yield row + 1, rest


def _read(file: BinaryIO) -> bytes:
    return file.read(1 << 20)


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


def _field(line: str, name: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the line is not JSON ({error})", where=where) from None
    if not isinstance(row, dict):
        raise DataError("the line is not a JSON object", where=where)
    if name not in row:
        raise DataError(
            f"there is no field '{name}'; there are {sorted(row)[:8]}", where=where, remedy="set text_field"
        )
    if not isinstance(row[name], str):
        raise DataError(f"field '{name}' is not text but {type(row[name]).__name__}", where=where)
    try:
        row[name].encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of field '{name}' is a lone surrogate, half a character", where=where
        ) from None
    return row[name]


def _parquet(path: Path, name: str) -> Iterator[Document]:
    with pa.parquet.ParquetFile(path) as file:
        if name not in file.schema_arrow.names:
            names = file.schema_arrow.names[:8]
            raise DataError(f"there is no column '{name}'; there are {names}", where=str(path), remedy="set text_field")
        kind = file.schema_arrow.field(name).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"column '{name}' is not text but {kind}", where=str(path), remedy="set text_field")
        if file.metadata.num_rows == 0:
            raise DataError("the file holds no rows", where=str(path), remedy="delete it, or write it again")
        row = 0
        for batch in file.iter_batches(batch_size=256, columns=[name]):
            for value in batch.column(0):
                row += 1
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:
                    raise DataError(f"byte {error.start} is not UTF-8", where=f"{path}:{row}") from None
                if text is None:
                    raise DataError(f"column '{name}' is blank", where=f"{path}:{row}", remedy="drop such rows")
                yield Document(text, str(path), row)
