"""Rows of requests as frames: JSON objects or Arrow, checked value by value.

Numbers become ``Float64``, ids text and lists of ids lists of text, as the encoder would read them from a file; frames
of several requests can thus be joined. A mistake is a :class:`RowError` that names row and field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.ipc
from polars.exceptions import PolarsError

from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, ListFeature
from cordillera.data.ranking.logs.columns import RowPlace, column_of, flatten, ids_of, numbers_of
from cordillera.errors import DataError

MOST_CHARACTERS = 1024
"""Largest number of characters of an id in a request."""

_EXACT = 2**53  # largest magnitude up to which float64 holds all integers
_MOST_INFLATED = 64 << 20  # bytes of a request's compressed columns
_DAMAGE = (pa.ArrowException, PolarsError, OSError, ValueError, TypeError, KeyError, IndexError, NotImplementedError)


class RowError(DataError):
    """A request holds rows that cannot be scored.

    Attributes:
        code: Kind of the mistake, for programs.
        status: Status of HTTP.
    """

    def __init__(
        self, what: str, *, code: str, where: str | None = None, remedy: str | None = None, status: int = 422
    ) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.code, self.status = code, status


Columns = dict[str, list[Any]]
"""Values of each feature, as the encoder reads them from a file."""


@dataclass(frozen=True)
class RequestPlace(RowPlace):
    """Place of the rows of a request, for errors: ``rows[3].price``."""

    source: str = "rows"

    def at(self, row: int | np.integer[Any], column: str) -> str:
        """Return the place of the value in ``row``, from 0, and ``column`` as a path in the request."""
        position = int(row) if self.kept is None else int(self.kept[row])
        return f"{self.source}[{position}].{column}"


def parse_json(body: bytes) -> Any:
    """Return the content of a JSON document; NaN and Infinity, which JSON lacks, are refused.

    Raises:
        RowError: If the document is not valid.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number; leave a missing number out with null")

    try:
        return json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RowError(
            f"the body is not valid JSON ({reason})", code="invalid_json", where="body", status=400
        ) from error


class RowReader:
    """Reader of the rows of requests for the features of an encoder.

    Args:
        most: Largest number of rows of a request.
    """

    def __init__(self, encoder: Encoder, most: int = 4096) -> None:
        self.encoder, self.schema, self.most = encoder, encoder.schema, most
        self._values: list[tuple[str, Callable[[Any], Any], pl.DataType]] = []
        for feature in self._features():
            if isinstance(feature, DenseFeature):
                self._values.append((feature.name, _numbers(feature), pl.Float64()))
            elif isinstance(feature, ListFeature):
                self._values.append((feature.name, _lists(feature), pl.List(pl.String)))
            else:
                self._values.append((feature.name, _ids(feature), pl.String()))

    def read_objects(self, rows: object) -> Columns:
        """Return the columns of rows that are JSON objects; names that are no features are ignored.

        Raises:
            RowError: If ``rows`` is no list, empty or too long, or a row lacks a feature or holds a value that the
                feature does not take; the place is a path such as ``rows[3].price``.
        """
        if not isinstance(rows, list):
            raise RowError(
                f"must be a list of objects, got {_kind(rows)}", code="invalid_type", where="rows",
                remedy='write {"rows": [{"column": value, ...}, ...]}',
            )  # fmt: skip
        self._check_count(len(rows))
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise RowError(
                    f"must be an object of columns, got {_kind(row)}", code="invalid_type", where=f"rows[{index}]"
                )
        columns: Columns = {}
        for name, value_of, _ in self._values:
            column = columns[name] = []
            for index, row in enumerate(rows):
                if name not in row:
                    raise RowError(
                        f"the column '{name}' is missing", code="missing_column", where=f"rows[{index}].{name}",
                        remedy="give every row every feature of the model; null stands for a blank",
                    )  # fmt: skip
                try:
                    column.append(value_of(row[name]))
                except RowError as error:
                    raise RowError(
                        error.what, code=error.code, where=f"rows[{index}].{name}{error.where or ''}",
                        remedy=error.remedy,
                    ) from None  # fmt: skip
        return columns

    def frame(self, parts: Sequence[Columns | pl.DataFrame]) -> pl.DataFrame:
        """Return the rows of several requests, as they were read, in one frame."""
        if any(isinstance(part, pl.DataFrame) for part in parts):
            return pl.concat([part if isinstance(part, pl.DataFrame) else self.frame([part]) for part in parts])
        return pl.DataFrame(
            [
                pl.Series(name, list(chain.from_iterable(part[name] for part in parts)), dtype=dtype)
                for name, _, dtype in self._values
            ]
        )

    def read_arrow(self, body: bytes) -> pl.DataFrame:
        """Return the frame of rows in Arrow's IPC format, a stream or a file; columns beyond the features are ignored.

        Raises:
            RowError: If the body is damaged or too long, also where compressed columns are, or as in
                :meth:`read_objects`.
        """
        try:
            # Metadata or text that is not valid would end the process.
            source = pa.BufferReader(body)
            opened = pa.ipc.open_file(source) if body[:6] == b"ARROW1" else pa.ipc.open_stream(source)
            _check_inflated(body)
            table = opened.read_all()
            self._check_count(table.num_rows)
            names = [name for name, _, _ in self._values]
            given: list[str] = table.column_names
            twice = sorted({name for name in names if given.count(name) > 1})
            if twice:
                raise RowError(f"the column '{twice[0]}' stands twice", code="invalid_arrow", where=twice[0])
            absent = [name for name in names if name not in given]
            if absent:
                raise RowError(
                    f"the column '{absent[0]}' is missing", code="missing_column", where=f"rows.{absent[0]}",
                    remedy="give every feature of the model",
                )  # fmt: skip
            table = table.select(names)
            table.validate(full=True)
            frame = pl.from_arrow(table)
            assert isinstance(frame, pl.DataFrame)
        except DataError:
            raise
        except _DAMAGE as error:
            raise RowError(
                f"the body is not a whole Arrow stream ({error})", code="invalid_arrow", where="body", status=400
            ) from error
        place = RequestPlace()
        try:
            return pl.DataFrame([self._converted(frame, feature, place) for feature in self._features()])
        except RowError:
            raise
        except DataError as error:
            raise row_error(error) from error

    def example(self) -> dict[str, Any]:
        """Return a row that the model scores, as a JSON object."""
        found: dict[str, Any] = {}
        for number in self.schema.numbers:
            state = self.encoder.dense_state[number.name]
            value = state.get("mean", state.get("fill", 0.0))
            if number.transform == "quantile":
                value = state["quantiles"][len(state["quantiles"]) // 2]
            elif number.transform == "log":
                value = math.copysign(math.expm1(abs(value)), value)
            found[number.name] = round(float(value), 3) if abs(value) < 1e30 else 0.0
        for single in self.schema.categorical:
            found[single.name] = self._some_id(single)
        for entries in self.schema.lists:
            found[entries.name] = [self._some_id(entries)]
        return found

    def describe(self) -> list[dict[str, Any]]:
        """Return name, type and treatment of blanks of each column that rows need, for people and forms."""
        found: list[dict[str, Any]] = []
        for name, _, _ in self._values:
            feature = next(one for one in self._features() if one.name == name)
            if isinstance(feature, DenseFeature):
                found.append({"name": name, "type": "number", "nullable": feature.missing != "refuse"})
                continue
            entry: dict[str, Any] = {"name": name, "type": "id", "nullable": feature.encoding != "identity"}
            if isinstance(feature, ListFeature):
                entry |= {"type": "ids", "nullable": True, "max_length": feature.max_length}
            entry["encoding"] = feature.encoding
            table = feature.table or feature.name
            entry["known"] = len(self.encoder.vocabularies[table]) if table in self.encoder.vocabularies else None
            found.append(entry)
        return found

    def _some_id(self, feature: CategoricalFeature) -> str | int:
        table = feature.table or feature.name
        values = self.encoder.vocabularies.get(table)
        if values is None or not len(values):
            return 0 if feature.encoding == "identity" else "1"
        first = str(values[0])
        return int(first) if table in self.encoder.whole and len(first) < 16 else first

    def _features(self) -> list[DenseFeature | CategoricalFeature]:
        return [*self.schema.numbers, *self.schema.categorical, *self.schema.lists]

    def _check_count(self, count: int) -> None:
        if not count:
            raise RowError("the request holds no rows", code="empty_rows", where="rows", remedy="give at least one row")
        if count > self.most:
            raise RowError(
                f"a request takes at most {self.most} rows, got {count}", code="too_many_rows", where="rows",
                remedy="send several requests, or score a file with `cordillera predict`", status=413,
            )  # fmt: skip

    def _converted(
        self, frame: pl.DataFrame, feature: DenseFeature | CategoricalFeature, place: RequestPlace
    ) -> pl.Series:
        """Return a column of Arrow in the type that all requests share."""
        series = column_of(frame, feature.name, place)
        if isinstance(feature, DenseFeature):
            values, blank = numbers_of(series, feature.name, place)
            return pl.Series(feature.name, values).set(pl.Series(blank), None)
        if isinstance(feature, ListFeature):
            whole = (feature.table or feature.name) in self.encoder.whole
            flat, lengths = flatten(series, feature, place, whole)
            _check_lengths(flat, np.repeat(np.arange(len(series)), lengths), feature.name, place)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            texts = flat.cast(pl.String).to_arrow().cast("large_string")
            whole_lists = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), texts)
            converted = pl.from_arrow(whole_lists)
            assert isinstance(converted, pl.Series)
            return converted.alias(feature.name)
        text = ids_of(series, feature.name, place)
        _check_lengths(text, np.arange(len(text)), feature.name, place)
        return text.cast(pl.String)


def row_error(error: DataError) -> RowError:
    """Return a mistake that the encoder found in a request's rows as a mistake of the request."""
    return RowError(error.what, code="invalid_value", where=error.where, remedy=error.remedy)


def _check_inflated(body: bytes) -> None:
    """Check how many bytes the compressed columns of a stream or file of Arrow have before anything allocates them."""
    inflated = 0
    for message in _messages(body):
        inflated += _inflated(message)
        if inflated > _MOST_INFLATED:
            raise RowError(
                f"compressed columns have more than {_MOST_INFLATED >> 20} MiB", code="invalid_arrow", where="body",
                remedy="send fewer rows, or write Arrow without compression", status=400,
            )  # fmt: skip


def _messages(body: bytes) -> Iterator[pa.ipc.Message]:
    """Yield the messages that are decoded to read a stream, or a file whose footer is valid."""
    source = pa.py_buffer(body)
    if not body.startswith(b"ARROW1"):
        yield from pa.ipc.MessageReader.open_stream(source)
        return
    end = len(body) - 10  # before the length of the footer and the last letters
    footer = body[end - _whole(body, end) : end]
    for number in (2, 3):  # dictionaries and record batches
        at = _field(footer, _follow(footer, 0), number)
        blocks = _follow(footer, at) if at else 0
        for block in range(_whole(footer, blocks) if at else 0):
            yield pa.ipc.read_message(source.slice(_whole(footer, blocks + 4 + 24 * block, 8)))


def _inflated(message: pa.ipc.Message) -> int:
    """Return the number of bytes of a message's columns once they are decompressed; 0 if they are not compressed."""
    if message.type not in ("dictionary", "record batch") or message.body is None:
        return 0
    data, body = message.metadata.to_pybytes(), memoryview(message.body)
    batch = _follow(data, _field(data, _follow(data, 0), 2))
    if message.type == "dictionary":
        batch = _follow(data, _field(data, batch, 1))
    # Arrow 0.17 named the compression among the message's own metadata.
    if not _field(data, batch, 3) and b"ARROW:experimental_compression" not in data:
        return 0
    buffers = _follow(data, _field(data, batch, 2))
    places = range(buffers + 4, buffers + 4 + 16 * _whole(data, buffers), 16)
    offsets = [_whole(data, place, 8) for place in places if _whole(data, place + 8, 8)]
    return sum(max(0, _whole(body, offset, 8)) for offset in offsets)  # -1 where a column is not compressed


def _field(data: bytes, table: int, number: int) -> int:
    """Return where a field of a table of FlatBuffers stands; 0 if the table lacks it."""
    slots, slot = table - _whole(data, table), 4 + 2 * number
    offset = _whole(data, slots + slot, 2) if slot < _whole(data, slots, 2) else 0
    return table + offset if offset else 0


def _follow(data: bytes, place: int) -> int:
    """Return where the offset of FlatBuffers that stands at a place leads."""
    return place + _whole(data, place)


def _whole(data: bytes | memoryview, place: int, size: int = 4) -> int:
    return int.from_bytes(data[place : place + size], "little", signed=size > 2)


def _check_lengths(text: pl.Series, rows: np.ndarray, name: str, place: RequestPlace) -> None:
    long = (text.str.len_chars() > MOST_CHARACTERS).fill_null(False).to_numpy()
    if long.any():
        row = rows[int(np.argmax(long))]
        raise RowError(f"an id has more than {MOST_CHARACTERS} characters", code="too_long", where=place.at(row, name))


def _numbers(feature: DenseFeature) -> Callable[[Any], float | None]:
    blank = feature.missing != "refuse"

    def value_of(value: Any) -> float | None:
        if isinstance(value, float):
            if math.isfinite(value):
                return value
            # JSON writes numbers beyond float64 as numbers
            raise RowError("is infinite, beyond 1.8e308", code="out_of_range")
        if isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                raise RowError("does not fit into 64 bits", code="out_of_range") from None
        if value is None and blank:
            return None
        if value is None:
            raise RowError("is null, but the model takes no blanks here", code="null_value", remedy="give a number")
        raise RowError(
            f"must be a number{' or null' if blank else ''}, got {_kind(value)}", code="invalid_type",
            remedy="write 1 for true and 0 for false" if isinstance(value, bool)
            else "write numbers without quotation marks",
        )  # fmt: skip

    return value_of


def _ids(feature: CategoricalFeature) -> Callable[[Any], str | None]:
    blank = feature.encoding != "identity"

    def value_of(value: Any) -> str | None:
        if value is None and not blank:
            raise RowError("is null, but the model takes no blanks here", code="null_value", remedy="give an id")
        return _id(value)

    return value_of


def _id(value: Any) -> str | None:
    """Return an id as the text by which the encoder finds it; None for a blank."""
    if isinstance(value, str):
        if len(value) > MOST_CHARACTERS:
            raise RowError(f"has {len(value)} characters, at most {MOST_CHARACTERS} are taken", code="too_long")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise RowError("holds half of a surrogate pair, which is no character", code="invalid_text") from None
        return value
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise RowError("is a whole number beyond 64 bits", code="out_of_range", remedy="write the id as text")
        return str(value)
    if isinstance(value, float):
        if value.is_integer() and abs(value) < _EXACT:
            return str(int(value))
        raise RowError(
            f"must be an id, got the number {value!r}", code="invalid_type", remedy="ids are text or whole numbers"
        )
    raise RowError(
        f"must be an id, got {_kind(value)}", code="invalid_type", remedy="give one id: text or a whole number"
    )


def _lists(feature: ListFeature) -> Callable[[Any], list[str | None]]:
    def value_of(value: Any) -> list[str | None]:
        if value is None:
            return []
        if isinstance(value, str):
            value = value.split(feature.separator)
        if not isinstance(value, list):
            raise RowError(
                f"must be a list of ids, got {_kind(value)}", code="invalid_type",
                remedy=f"write [] for an empty list, or text with {feature.separator!r} between ids",
            )  # fmt: skip
        found = []
        for index, entry in enumerate(value):
            try:
                found.append(_id(entry))
            except RowError as error:
                raise RowError(error.what, code=error.code, where=f"[{index}]", remedy=error.remedy) from None
        return found

    return value_of


def _kind(value: object) -> str:
    """Return what a JSON value is, in words."""
    kinds = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)
