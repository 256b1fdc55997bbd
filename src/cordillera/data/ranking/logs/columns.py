"""Conversion of a log's columns to numbers and text.

Every function raises a DataError that names the file, the row and the column of the first value that it refuses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl
from scipy.special import logit

from cordillera.data.ranking.features import DenseFeature, ListFeature, Schema, TeacherColumns, TimeUnit
from cordillera.errors import DataError

WEIGHTS = (1e-30, 1e30)
"""Smallest and largest sample weight other than 0; sums of such weights fit into float32."""

MOST_LOGIT = 1e4
"""Largest magnitude of a teacher's logit."""

MISSING = 255
"""Stored label of a sample whose label is not known."""

WHOLE = r"^(?:0|-?[1-9]\d*)$"
"""Regular expression of whole numbers without leading zeros."""

_WHOLE_OR_POINT = r"^(0|-?[1-9]\d*)\.0+$"
_BLANK_GROUP = np.uint64(0x9E3779B97F4A7C15)
_SHOWN = 20  # columns that an error lists
_FEW = 256  # most entries for which a loop is faster than Polars
_UNITS: dict[TimeUnit, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DATE = r"\d{4}[-/]\d\d[-/]\d\d"
_DATE_PATTERNS = (
    *("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%d", "%+", "%Y-%m-%d %H:%M:%S%.f%#z"),
    *("%Y-%m-%dT%H:%M:%S%.f%#z", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y/%m/%d %H:%M:%S%.f", "%Y/%m/%d"),
)  # patterns with a time zone end with z or +
_LABEL_REMEDY = "make the column 0/1 (1 for a click, a purchase, a like) or take the row out"
_OTHER_TIMES = 'data.timestamp_format names other forms, such as "%d/%m/%Y %H:%M"'
_TIME_REMEDY = "write 2026-01-31, 2026-01-31 12:00:00 or 2026-01-31T12:00:00Z, all rows alike or as numbers"
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RowPlace:
    """Place of a chunk of rows, for errors.

    Attributes:
        first_row: Number of the chunk's first row: 1 for the first row of a Parquet file, 2 for the line after a CSV
            header.
        kept: Positions of the rows in the chunk, ``int64 [N]``; None if the rows are the whole chunk.
    """

    source: str
    first_row: int = 1
    unit: str = "row"
    kept: np.ndarray | None = field(default=None, compare=False)

    def at(self, row: int | np.integer[Any], column: str) -> str:
        """Return the place of the value in ``row``, from 0, and ``column`` in words: file, line or row, and column."""
        position = int(row) if self.kept is None else int(self.kept[row])
        return f"{self.source}, {self.unit} {self.first_row + position}, column '{column}'"

    def of_rows(self, rows: np.ndarray) -> RowPlace:
        """Return the place of a selection of the rows by their positions, ``int64 [M]``."""
        return replace(self, kept=rows if self.kept is None else self.kept[rows])


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Mix ``uint64`` so that every input bit moves every output bit (Steele et al. 2014, SplitMix64's finaliser)."""
    with np.errstate(over="ignore"):
        z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def hash_strings(values: pl.Series, salt: str = "") -> np.ndarray:
    """Hash text without blanks to ``uint64 [N]``: FNV-1a over the UTF-8 bytes, then SplitMix64.

    The result depends on ``values`` and ``salt`` only, not on the process, the platform or a library's version. Hash
    functions of different salts are independent.
    """
    prime = np.uint64(0x100000001B3)
    seed = 0xCBF29CE484222325
    for byte in salt.encode():
        seed = ((seed ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    distinct = values.unique()
    encoded = distinct.to_arrow().cast("large_binary")
    offsets = np.frombuffer(encoded.buffers()[1], dtype=np.int64)[encoded.offset : encoded.offset + len(encoded) + 1]
    data = np.frombuffer(encoded.buffers()[2] or b"", dtype=np.uint8)
    starts, lengths = offsets[:-1], np.diff(offsets)
    order = np.argsort(lengths, kind="stable")
    state = np.full(len(encoded), seed, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for position in range(int(lengths.max(initial=0))):
            # Rows are visited in order of length, so those that still have bytes left are a suffix.
            active = order[np.searchsorted(lengths[order], position, side="right") :]
            state[active] = (state[active] ^ data[starts[active] + position]) * prime
    hashes = pl.DataFrame({"value": distinct, "hash": splitmix64(state)})
    return values.to_frame("value").join(hashes, on="value", how="left", maintain_order="left")["hash"].to_numpy()


def column_names(given: Sequence[str], where: str) -> list[str]:
    """Return the names of a file's columns; a column without a name is called ``unnamed_0``, by its position.

    Raises:
        DataError: two columns have the same name; the error names the place ``where`` they are.
    """
    names = [name or f"unnamed_{place}" for place, name in enumerate(given)]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise DataError(
            f"columns must differ, these stand twice: {twice[:8]}; rename them, or write the names into a first line",
            where=where,
        )
    return names


def column_of(frame: pl.DataFrame, name: str, place: RowPlace) -> pl.Series:
    """Return a column of a frame; a missing one is an error."""
    if name not in frame.columns:
        more = f" and {len(frame.columns) - _SHOWN:,} more" if len(frame.columns) > _SHOWN else ""
        raise DataError(
            f"column '{name}' is missing; there are {frame.columns[:_SHOWN]}{more}",
            where=place.source,
            remedy="give the file this column; the recipe of a new run may name another one in data.schema, or none",
        )
    return frame[name]


def first_of(mask: np.ndarray) -> int:
    """Return the position of the first true entry; there must be one."""
    return int(np.argmax(mask))


def numbers_of(
    series: pl.Series, name: str, place: RowPlace, remedy: str = "correct the value", noun: str = "number"
) -> tuple[np.ndarray, np.ndarray]:
    """Convert a column to ``float64 [N]`` and its blanks to ``bool [N]``; NaN is kept.

    The ``remedy`` is that of values that are no numbers, which messages call by ``noun``.
    """
    if series.dtype == pl.Float64 and not series.null_count():
        return series.to_numpy(), np.zeros(len(series), dtype=bool)  # each step below takes 0.2 ms, also for few rows
    if series.dtype in (pl.Categorical, pl.Enum):
        series = series.cast(pl.String)
    if series.dtype == pl.String:
        trimmed = series.str.strip_chars()
        blank = trimmed.is_null() | (trimmed == "").fill_null(True)
        parsed = trimmed.cast(pl.Float64, strict=False)
    elif series.dtype == pl.Boolean or series.dtype.is_numeric() or series.dtype == pl.Null:
        blank = series.is_null()
        parsed = series.cast(pl.Float64)
    else:
        raise DataError(
            f"column '{name}' holds {series.dtype}, not numbers",
            where=place.source,
            remedy=remedy,
        )
    wrong = (parsed.is_null() & ~blank).to_numpy()
    if wrong.any():
        row = first_of(wrong)
        if noun == "number":
            raise DataError(
                f"{series[row]!r} is not a number",
                where=place.at(row, name),
                remedy=_number_remedy(str(series[row]), remedy),
            )
        raise DataError(
            f"{series[row]!r} is not a {noun} ({_OTHER_TIMES})",
            where=place.at(row, name),
            remedy=remedy,
        )
    return parsed.fill_null(0.0).to_numpy(), blank.to_numpy()


def _number_remedy(text: str, remedy: str) -> str:
    """Return what to do about text that is no number: the ``remedy``, unless it is a number with a sign or a unit."""
    found = re.search(r"[$€£¥₹%]", text)
    if found is None or not any(mark.isdigit() for mark in text):
        return remedy
    return f"write the column without {found[0]}: 1234.5 (with data.decimal_comma = true, 1234,5), or leave it blank"


def dense_of(series: pl.Series, feature: DenseFeature, place: RowPlace) -> tuple[np.ndarray, np.ndarray]:
    """Convert a dense feature to ``float64 [N]``, with 0 for blanks, and its blanks to ``bool [N]``.

    Values must be finite and fit into float32; the feature says whether NaN and blanks are allowed.
    """
    remedy = "correct the value, leave it blank, or declare the column as categorical or list feature"
    values, blank = numbers_of(series, feature.name, place, remedy)
    infinite = np.isinf(values)
    if infinite.any():
        row = first_of(infinite)
        raise DataError(
            f"a dense value is infinite ({values[row]})",
            where=place.at(row, feature.name),
            remedy="correct the value or leave it blank",
        )
    nan = np.isnan(values)
    if nan.any():
        if feature.nan == "refuse":
            raise DataError(
                "a dense value is NaN",
                where=place.at(first_of(nan), feature.name),
                remedy='leave it blank (None in Python), or set nan = "missing" for dense feature '
                f"'{feature.name}' in the schema",
            )
        blank = blank | nan
        values = np.where(nan, 0.0, values)
    if feature.missing == "refuse" and blank.any():
        raise DataError(
            "a dense value is blank",
            where=place.at(first_of(blank), feature.name),
            remedy=f"fill it, or set missing = \"mean\" for dense feature '{feature.name}' in the schema",
        )
    if feature.transform in ("none", "standardise"):
        refuse_large(values, values, feature.name, place)
    return values, blank


def with_numbers(frame: pl.DataFrame, schema: Schema, place: RowPlace) -> pl.DataFrame:
    """Return a frame with a separate column for every number of multi-valued dense features.

    Raises:
        DataError: a list is not of the feature's width, or a row of 8-bit numbers is damaged.
    """
    for feature in schema.dense:
        if feature.width > 1 and f"{feature.name}[0]" not in frame.columns:
            values, blank = _vectors_of(column_of(frame, feature.name, place), feature, place)
            columns = [pl.Series(f"{feature.name}[{i}]", values[:, i]) for i in range(feature.width)]
            if blank.any():
                columns = [column.set(pl.Series(blank), None) for column in columns]
            frame = frame.with_columns(columns)
    return frame


def _vectors_of(series: pl.Series, feature: DenseFeature, place: RowPlace) -> tuple[np.ndarray, np.ndarray]:
    """Read ``float64 [N, width]``, zeros where there is none, and the blanks ``bool [N]``."""
    width, name, blank = feature.width, feature.name, series.is_null().to_numpy()
    values = np.zeros((len(series), width))
    given = series.drop_nulls()
    if series.dtype == pl.Binary:
        size = width + 8  # codes, scale and bias
        wrong = (given.bin.size() != size).to_numpy()
        _refuse_width(wrong, blank, f"{size} bytes, a row of {width} numbers of 8 bits", name, place)
        if len(given):
            rows = np.frombuffer(b"".join(given.to_list()), dtype=np.uint8).reshape(-1, size)
            scales = rows[:, width:].copy().view(np.float32).astype(np.float64)
            values[~blank] = (rows[:, :width] * scales[:, :1] + scales[:, 1:]).astype(np.float32)
        return values, blank
    if isinstance(series.dtype, pl.Array):
        given = given.arr.to_list()
    if given.dtype != pl.List and len(given):
        raise DataError(
            f"column '{name}' holds {series.dtype}, not lists of {width} numbers",
            where=place.source,
            remedy="give a list column, or width = 1",
        )
    if len(given):
        _refuse_width((given.list.len() != width).to_numpy(), blank, f"{width} numbers", name, place)
        at = np.repeat(np.flatnonzero(~blank), width)
        entries, missing = numbers_of(given.explode(), name, place.of_rows(at))
        if missing.any():
            raise DataError(
                "a list has a blank among its numbers", where=place.at(at[first_of(missing)], name),
                remedy="leave the whole list blank, or give all numbers",
            )  # fmt: skip
        values[~blank] = entries.reshape(-1, width)
    return values, blank


def _refuse_width(wrong: np.ndarray, blank: np.ndarray, wanted: str, name: str, place: RowPlace) -> None:
    if wrong.any():
        row = np.flatnonzero(~blank)[first_of(wrong)]
        raise DataError(
            f"the value is not of {wanted}", where=place.at(row, name), remedy="correct the value, or the width"
        )


def refuse_large(results: np.ndarray, values: np.ndarray, name: str, place: RowPlace) -> None:
    """Refuse results of a transform of ``values``, both ``float64 [N]``, that do not fit into float32."""
    large = np.abs(results) > _LARGEST
    if large.any():
        row = first_of(large)
        raise DataError(
            f"{values[row]:g} does not fit into 32 bits",
            where=place.at(row, name),
            remedy='correct the value, or use transform = "log" or "quantile"',
        )


def ids_of(
    series: pl.Series, name: str, place: RowPlace, rows: np.ndarray | None = None, *, whole: bool = False
) -> pl.Series:
    """Convert a column of ids to text, with blanks (null and empty) as null.

    Args:
        series: Whole numbers, as large as their type holds exactly, text, dates or truth values, ``N`` entries.
        rows: Row of each entry, ``int64 [N]``, for entries of lists; None if each entry is its own row.
        whole: Whether to write text such as ``42.0`` as ``42``; columns of numbers are always written so.
    """
    dtype = series.dtype
    if dtype.is_float():
        values = series.fill_null(0.0).to_numpy()
        exact = 2.0 ** (np.finfo(values.dtype).nmant + 1)  # the first number that an odd neighbour rounds to
        wrong = ~np.isfinite(values) | (values != np.floor(values)) | (np.abs(values) >= exact)
        if wrong.any():
            entry = first_of(wrong)
            large = np.isfinite(values[entry]) and abs(values[entry]) >= exact
            raise DataError(
                f"{float(values[entry])!r} is not an id"
                + (f": {dtype} does not hold its last digits" if large else ""),
                where=place.at(entry if rows is None else rows[entry], name),
                remedy="write ids as integers or text"
                if large
                else "ids are whole numbers or text; declare the column as dense, or leave blanks blank",
            )
        return series.cast(pl.Int64).cast(pl.String)
    simple = (pl.String, pl.Boolean, pl.Null, pl.Categorical, pl.Enum, pl.Date, pl.Datetime, pl.Time)
    if not (dtype.is_integer() or dtype.is_decimal() or dtype in simple):
        raise DataError(
            f"column '{name}' holds {dtype}, not one id a row",
            where=place.source,
            remedy="declare it as a list feature" if dtype == pl.List else "convert it to text or whole numbers",
        )
    text = series.cast(pl.String)
    if dtype.is_decimal() or (whole and not dtype.is_integer()):
        text = without_point(text)
    if len(text) <= _FEW and "" not in text.to_list():
        return text.rename(series.name)
    return text.to_frame("x").select(pl.when(pl.col("x") != "").then(pl.col("x")).alias(series.name)).to_series()


def without_point(text: pl.Series) -> pl.Series:
    """Return text in which whole numbers such as ``42.0`` are written as ``42``."""
    if len(text) <= _FEW and not any(value is not None and value.endswith("0") for value in text):
        return text
    # Most columns hold no such text, and a literal search finds that out quickly.
    if not text.str.contains(".0", literal=True).any():
        return text
    return text.str.replace(_WHOLE_OR_POINT, "$1")


def flatten(
    series: pl.Series, feature: ListFeature, place: RowPlace, whole: bool = False
) -> tuple[pl.Series, np.ndarray]:
    """Flatten a list column to the kept entries of all rows, by :func:`ids_of`, and their number per row."""
    if series.dtype == pl.String:
        series = series.str.split(feature.separator)
    elif isinstance(series.dtype, pl.Array):
        series = series.arr.to_list()
    elif series.dtype == pl.Null:
        return pl.Series(feature.name, [], dtype=pl.String), np.zeros(len(series), dtype=np.int64)
    if series.dtype != pl.List:
        raise DataError(
            f"column '{feature.name}' holds {series.dtype}, not lists",
            where=place.source,
            remedy="give a list column, or text with a separator; or declare it as categorical",
        )
    lengths = series.list.len().fill_null(0).to_numpy().astype(np.int64)
    row = np.repeat(np.arange(len(series)), lengths)
    entries = series.filter(pl.Series(lengths > 0)).explode()
    # The place of an entry is that of its row.
    text = ids_of(entries, feature.name, place, row, whole=whole)
    keep = text.is_not_null().to_numpy()
    counts = np.bincount(row[keep], minlength=len(series)).astype(np.int64)
    ends = np.cumsum(counts)
    from_end = ends[row[keep]] - np.arange(int(keep.sum()))
    recent = from_end <= feature.max_length
    return text.filter(pl.Series(keep)).filter(pl.Series(recent)), np.minimum(counts, feature.max_length)


def labels_of(series: pl.Series, name: str, place: RowPlace, *, may_miss: bool = False) -> np.ndarray:
    """Convert labels (0 and 1, or false and true) to ``uint8 [N]``; blanks are :data:`MISSING` if they ``may_miss``."""
    if series.dtype == pl.String:
        series = _label_numbers(series, name, place)
    values, blank = numbers_of(series, name, place)
    wrong = ~blank & (values != 0) & (values != 1)
    if not may_miss:
        wrong |= blank
    if wrong.any():
        row = first_of(wrong)
        shown = "blank" if blank[row] else f"{values[row]:g}"
        raise DataError(
            f"a label is {shown}, labels must be 0 or 1",
            where=place.at(row, name),
            remedy=(
                "set data.schema.missing_labels = true if some are not known, or take the row out"
                if blank[row]
                else _LABEL_REMEDY
            ),
        )
    return np.where(blank, MISSING, values).astype(np.uint8)


def _label_numbers(series: pl.Series, name: str, place: RowPlace) -> pl.Series:
    """Convert labels in text, which may be ``true`` and ``false``, to numbers, blanks to null."""
    text = series.str.strip_chars().str.to_lowercase().replace({"true": "1", "false": "0", "": None})
    found = text.cast(pl.Float64, strict=False)
    wrong = (found.is_null() & text.is_not_null()).to_numpy()
    if wrong.any():
        row = first_of(wrong)
        raise DataError(
            f"a label is {series[row]!r}, labels must be 0 or 1, or false and true; for other words, data.positive "
            f"says which is 1, as in positive = {{{name} = '= yes'}}",
            where=place.at(row, name),
            remedy=_LABEL_REMEDY,
        )
    return found


def weights_of(series: pl.Series, name: str, place: RowPlace) -> np.ndarray:
    """Convert a column of sample weights, 0 or within :data:`WEIGHTS`, to ``float32 [N]``."""
    values, blank = numbers_of(series, name, place)
    low, high = WEIGHTS
    wrong = blank | ~((values == 0) | ((values >= low) & (values <= high)))
    if wrong.any():
        row = first_of(wrong)
        shown = "blank" if blank[row] else f"{values[row]:g}"
        raise DataError(
            f"a sample weight is {shown}, weights must be 0 or from {low:g} to {high:g}",
            where=place.at(row, name),
            remedy="give every row a weight, 1 for an ordinary one",
        )
    return values.astype(np.float32)


def teacher_of(
    frame: pl.DataFrame,
    columns: TeacherColumns,
    labels: Sequence[str],
    timestamps: np.ndarray | None,
    place: RowPlace,
) -> np.ndarray:
    """Read a teacher's logits ``float32 [N, tasks]``, NaN where it has none.

    Args:
        labels: Names of the tasks.
        timestamps: Seconds of the samples, to compare with ``learnt_until``.

    Raises:
        DataError: a score is not finite, a probability lies outside of [0, 1], or the teacher had learnt from labels
            that are later than the sample.
    """
    found = np.full((len(frame), len(labels)), np.nan, dtype=np.float32)
    for task, label in enumerate(labels):
        name = columns.scores.get(label)
        if name is None:
            continue
        values, blank = numbers_of(column_of(frame, name, place), name, place)
        low, high = (0.0, 1.0) if columns.kind == "probability" else (-MOST_LOGIT, MOST_LOGIT)
        wrong = ~blank & ~((values >= low) & (values <= high))
        if wrong.any():
            row = first_of(wrong)
            raise DataError(
                f"a teacher's score is {values[row]:g}, {columns.kind} values lie from {low:g} to {high:g}",
                where=place.at(row, name),
                remedy="leave it blank where the teacher has no score, or correct data.schema.teacher.kind",
            )
        if columns.kind == "probability":
            values = np.clip(logit(values), -20.0, 20.0)
        found[:, task] = np.where(blank, np.nan, values)
    if columns.learnt_until is not None and timestamps is not None:
        name = columns.learnt_until
        series = column_of(frame, name, place)
        known = np.flatnonzero(~np.isnan(found).all(axis=1))
        times = timestamps_of(series[known], name, place.of_rows(known))
        late = times > timestamps[known]
        if late.any():
            row = first_of(late)
            raise DataError(
                f"the teacher had learnt from labels until {times[row]}, the sample is of {timestamps[known][row]}",
                where=place.at(known[row], name),
                remedy="score samples with a teacher that knew no later labels; such scores hold what is to be learnt",
            )
    return found


def timestamps_of(series: pl.Series, name: str, place: RowPlace, unit: TimeUnit | None = None) -> np.ndarray:
    """Convert timestamps to ``int64 [N]`` whole seconds since 1970.

    Fractions of a second are cut off. Dates and times without a time zone are taken as UTC.

    Args:
        series: Numbers, dates, times, or text with numbers or with dates and times such as ``2026-01-31 12:00:00``.
        unit: Unit of numbers; None for seconds.
    """
    if series.dtype in (pl.Date, pl.Datetime) and not series.null_count():
        return series.dt.epoch("us").to_numpy() // _UNITS["us"]
    if series.dtype in (pl.Date, pl.Datetime):
        series = series.dt.epoch("s")
        unit = None
    if series.dtype in (pl.String, pl.Categorical, pl.Enum):
        series = series.cast(pl.String).str.strip_chars()
        if _holds_dates(series):
            return _times_of_text(series, name, place)
    # Float64 would lose the last digits of times in nanoseconds.
    whole = series.cast(pl.Int64, strict=False) if series.dtype == pl.String or series.dtype.is_integer() else None
    if whole is not None and whole.null_count() == 0:
        return whole.to_numpy() // _UNITS[unit or "s"]
    values, blank = numbers_of(series, name, place, _TIME_REMEDY, "time")
    wrong = blank | ~np.isfinite(values) | (np.abs(values) >= 2.0**63)
    if wrong.any():
        row = first_of(wrong)
        raise DataError(
            "a timestamp is blank" if blank[row] else f"{float(values[row])!r} is not a timestamp",
            where=place.at(row, name),
            remedy="give every row its time, or split by order or at random",
        )
    times = np.floor(values).astype(np.int64)
    if whole is not None:
        times = np.where(whole.is_null().to_numpy(), times, whole.fill_null(0).to_numpy())
    return times // _UNITS[unit or "s"]


def _holds_dates(series: pl.Series) -> bool:
    first = series.drop_nulls().head(1)
    return len(first) > 0 and re.match(_DATE, first[0]) is not None


def _times_of_text(series: pl.Series, name: str, place: RowPlace) -> np.ndarray:
    found: pl.Series | None = None
    for pattern in _DATE_PATTERNS:
        zoned = pattern.endswith(("z", "+"))
        parsed = series.str.to_datetime(pattern, strict=False, time_unit="us", exact=True)
        parsed = parsed.dt.replace_time_zone(None) if zoned else parsed
        found = parsed if found is None else found.fill_null(parsed)
        if not found.null_count():
            break
    assert found is not None
    wrong = found.is_null().to_numpy()
    if wrong.any():
        row = first_of(wrong)
        blank = series[row] in (None, "")
        raise DataError(
            "a timestamp is blank" if blank else f"{series[row]!r} is not a date or time ({_OTHER_TIMES})",
            where=place.at(row, name),
            remedy="give every row its time, or split by order or at random" if blank else _TIME_REMEDY,
        )
    times: np.ndarray = found.dt.epoch("us").to_numpy() // _UNITS["us"]
    return times


def unit_of(times: np.ndarray) -> TimeUnit:
    """Return the unit in which numbers since 1970 are times from 1973 to 5138; seconds if there is none.

    ``times`` are ``int64 [N]``, of which the median counts.
    """
    size = abs(float(np.median(times))) if len(times) else 0.0
    of_sizes: tuple[tuple[float, TimeUnit], ...] = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"))
    return next((unit for least, unit in of_sizes if size >= least), "s")


def groups_of(series: pl.Series, name: str, place: RowPlace) -> np.ndarray:
    """Convert groups to ``int64 [N]``: whole numbers unchanged, text hashed, blanks as one group."""
    blank = np.array(_BLANK_GROUP).astype(np.int64)
    if series.dtype.is_integer():
        # Numbers beyond 63 bits wrap, so that different groups stay different.
        values = series.fill_null(0).to_numpy().astype(np.int64)
        return np.where(series.is_null().to_numpy(), blank, values) if series.null_count() else values
    text = ids_of(series, name, place, whole=True)
    if series.dtype.is_float():
        return np.where(text.is_null().to_numpy(), blank, text.cast(pl.Int64).fill_null(0).to_numpy())
    return hash_strings(text.fill_null(""), "group").astype(np.int64)
