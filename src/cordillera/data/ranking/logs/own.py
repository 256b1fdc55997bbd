"""Logs of your own, whose numbers and times may be written in another way than the library's."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

import numpy as np
import polars as pl
from polars.exceptions import PolarsError
from pydantic import AfterValidator, BaseModel

from cordillera.data.ranking.features import Schema
from cordillera.data.ranking.logs.click_logs import FileLog, RowChunk
from cordillera.data.ranking.logs.columns import RowPlace, first_of, numbers_of
from cordillera.errors import DataError

_COMPARE = {">=": np.greater_equal, ">": np.greater, "<=": np.less_equal, "<": np.less}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
_DECIMAL = r"^([+-]?\d*),(\d+([eE][+-]?\d+)?)$"  # 1,5
_GROUPED = r"^[+-]?\d{1,3}(\.\d{3})+,\d+$"  # 1.234,5
_YEARS = (1900, 2200)  # plausible years: four-digit codes also accept two digits, as in 26 AD


@dataclass
class OwnLog(FileLog):
    """Rows in files whose numbers and times are brought into the form that :class:`FileLog` is read in.

    Attributes:
        null_values: Words that stand for no value in dense features and labels, such as ``NA``; spaces around them
            do not count.
        decimal_comma: Whether text in dense features has a comma before the decimals, such as ``12,5``.
        timestamp_format: Form of the timestamps in the codes of ``strftime``; None for the forms that are read anyway.
        positive: Conditions by the names of labels, such as ``>= 4`` or ``= yes``: the label is 1 where its column
            meets its condition, 0 where it does not, and blank where the column is.
    """

    null_values: tuple[str, ...] = ()
    decimal_comma: bool = False
    timestamp_format: str | None = None
    positive: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        form = self.timestamp_format or ""
        if "%Z" in form or ".%f" in form:
            raise DataError(
                f"{form!r} has codes that are not read",
                where="data.timestamp_format",
                remedy="write %z for time zones such as +02:00, and %.f for fractions of a second",
            )
        features = (*self.schema.dense, *self.schema.categorical, *self.schema.lists)
        if form and self.schema.timestamp in [feature.name for feature in features]:
            raise DataError(
                f"the timestamp '{self.schema.timestamp}' is a feature too, and its form is another one",
                where="data.timestamp_format",
                remedy="leave it out of the features, or give the log a second column",
            )

    def fingerprint(self) -> str:
        """Return the fingerprint of the files together with these settings."""
        text = super().fingerprint()
        if not (self.null_values or self.decimal_comma or self.timestamp_format or self.positive):
            return text
        settings = [sorted(self.null_values), self.decimal_comma, self.timestamp_format, sorted(self.positive.items())]
        return hashlib.sha256(f"{text} {json.dumps(settings)}".encode()).hexdigest()

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[RowChunk]:
        """Iterate over frames as :meth:`FileLog.chunks`.

        Raises:
            DataError: as there, or a timestamp is not of ``timestamp_format``.
        """
        for frame, place in super().chunks(columns):
            yield self._as_read(frame, place), place

    def _as_read(self, frame: pl.DataFrame, place: RowPlace) -> pl.DataFrame:
        schema, dense = self.schema, {feature.name for feature in self.schema.dense}
        learnt_until = None if schema.teacher is None else schema.teacher.learnt_until
        columns = []
        for series in frame.get_columns():
            name = series.name
            if name in dense or name in schema.labels:
                series = self._values(series, name in dense, place)
            elif name in (schema.timestamp, learnt_until) and self.timestamp_format is not None:
                series = times_of(series, self.timestamp_format, place, may_miss=name == learnt_until)
            columns.append(series)
        return frame.with_columns(columns)

    def _values(self, series: pl.Series, is_dense: bool, place: RowPlace) -> pl.Series:
        sign, bound = parts_of(self.positive.get(series.name, ">= 0"))
        if series.dtype in (pl.Categorical, pl.Enum):
            series = series.cast(pl.String)
        if series.dtype == pl.String:
            series = without_words(series, [word for word in self.null_values if sign != "=" or word.strip() != bound])
            if self.decimal_comma and (is_dense or sign != "="):
                series = with_points(series, place)
        return meeting(series, self.positive[series.name], place) if series.name in self.positive else series


class _HeldRows(OwnLog):
    def __post_init__(self) -> None:
        """Check nothing: there are no files."""


def as_read(frame: pl.DataFrame, place: RowPlace, schema: Schema, form: Mapping[str, Any]) -> pl.DataFrame:
    """Return rows in memory as those of files are read, with the settings that :func:`form_of` returns.

    Args:
        place: Where the first row is, for errors.
        schema: Columns of the rows.

    Raises:
        DataError: If a value is not of its form.
    """
    return _HeldRows(schema, (), "parquet", **form)._as_read(frame, place)


def without_words(series: pl.Series, words: Sequence[str]) -> pl.Series:
    """Return text in which these ``words`` are null."""
    if not words:
        return series
    return series.set(series.str.strip_chars().is_in([word.strip() for word in words]), None)


def with_points(series: pl.Series, place: RowPlace) -> pl.Series:
    """Return text in which numbers with a comma before the decimals, such as 12,5 and 1.234,5, have a point.

    Raises:
        DataError: If a value has a point and no comma, such as 1.234.
    """
    text = series.str.strip_chars()
    wrong = (text.str.contains(".", literal=True) & ~text.str.contains(",", literal=True)).fill_null(False).to_numpy()
    if wrong.any():
        row = first_of(wrong)
        raise DataError(
            f"{text[row]!r} has a point, and decimals follow a comma here",
            where=place.at(row, series.name),
            remedy="write the numbers of all dense features with a comma, or leave data.decimal_comma out",
        )
    plain = pl.when(text.str.contains(_GROUPED)).then(text.str.replace_all(".", "", literal=True)).otherwise(text)
    return pl.select(plain.str.replace(_DECIMAL, "$1.$2").alias(series.name)).to_series()


def meeting(series: pl.Series, condition: str, place: RowPlace) -> pl.Series:
    """Return whether each value of a column meets a condition, null for blanks.

    Numbers are equal by their values, truth values to 1 and 0, and words without regard to case. A column of truth
    values meets any condition where it is true, but ``= false`` and ``= 0``.

    Args:
        condition: ``>=``, ``>``, ``<=`` or ``<`` with a number, or ``=`` with the word to be equal to.

    Raises:
        DataError: If the column holds lists, or a value to be compared with a number is no number.
    """
    sign, bound = parts_of(condition)
    if series.dtype.is_nested():
        raise DataError(
            f"column '{series.name}' holds {series.dtype}, which is no label",
            where=place.source,
            remedy="name a column of one value a row",
        )
    if series.dtype == pl.Boolean:
        return ~series if sign == "=" and bound.lower() in ("false", "0") else series
    if sign == "=":
        return _equal(series, bound.lower())
    values, blank = numbers_of(series, series.name, place, "correct the value, or name it in data.null_values")
    met = pl.Series(series.name, _COMPARE[sign](values, float(bound)))
    return met.set(pl.Series(blank | np.isnan(values)), None)


def _equal(series: pl.Series, word: str) -> pl.Series:
    text = (series.fill_nan(None) if series.dtype.is_float() else series).cast(pl.String)
    text = text.str.strip_chars().str.to_lowercase()
    if _NUMBER.fullmatch(word):
        met = text.replace({"true": "1", "false": "0"}).cast(pl.Float64, strict=False) == float(word)
    elif word in ("true", "false"):
        met = text.replace({"1": "true", "1.0": "true", "0": "false", "0.0": "false"}) == word
    else:
        met = text == word
    met = met.fill_null(False).set(text.is_null() | (text == "").fill_null(True), None)
    return met.alias(series.name)


def parts_of(condition: str) -> tuple[str, str]:
    """Return the sign and the value of a condition.

    Raises:
        ValueError: If it is none.
    """
    match = re.fullmatch(r"\s*(>=|<=|>|<|=)\s*([^\s<>=].*?)\s*", condition)
    if match is None or not (match[1] == "=" or _NUMBER.fullmatch(match[2])):
        raise ValueError(f"{condition!r} is no condition such as '>= 4' or '= yes'")
    return match[1], match[2]


def check_condition(condition: str) -> str:
    """Check and return a condition.

    Raises:
        ValueError: If it is none.
    """
    return " ".join(parts_of(condition))


def times_of(series: pl.Series, form: str, place: RowPlace, *, may_miss: bool = False) -> pl.Series:
    """Return a column of text or of whole numbers such as 20260131 as times; dates and times stay as they are.

    Args:
        form: Codes of ``strftime``; a date without a time is midnight.
        may_miss: Whether values may be blank.

    Raises:
        DataError: If a value is not of this form.
    """
    if series.dtype in (pl.Date, pl.Datetime):
        return series
    text = series.cast(pl.String).str.strip_chars()
    found, blank = parsed(text, form), text.is_null() | (text == "").fill_null(True)
    in_years = found.dt.year().is_between(*_YEARS).fill_null(False)
    wrong = (~in_years & ~(blank & may_miss)).to_numpy()
    if wrong.any():
        row = first_of(wrong)
        raise DataError(
            "a timestamp is blank" if blank[row] else f"{text[row]!r} is not of the form {form!r}",
            where=place.at(row, series.name),
            remedy="correct the value, or data.timestamp_format",
        )
    return found


def check_form(form: str) -> str:
    """Return the format of times if it determines whole dates.

    Raises:
        ValueError: If it does not.
    """
    day = pl.Series([datetime(2026, 1, 31, tzinfo=UTC)])
    try:
        told = parsed(day.dt.strftime(form), form).dt.date()[0]
    except PolarsError:
        told = None
    if told != day.dt.date()[0]:
        raise ValueError(
            f"{form!r} does not tell year, month and day (and hours not without minutes) in codes of strftime, such "
            "as '%d/%m/%Y %H:%M'"
        )
    return form


def parsed(text: pl.Series, form: str) -> pl.Series:
    """Return the times in ``text`` in this format, in UTC without a zone; null for text in another format."""
    found = text.str.to_datetime(form, strict=False, time_unit="us", exact=True)
    return found.dt.replace_time_zone(None)


TimeForm = Annotated[str, AfterValidator(check_form)]
"""Format of times that determines whole dates, in ``strftime`` codes."""

Condition = Annotated[str, AfterValidator(check_condition)]
"""Condition of :func:`meeting`."""

_KEYS = ("null_values", "decimal_comma", "timestamp_format", "positive")


def form_of(config: BaseModel) -> dict[str, Any]:
    """Return the arguments of :class:`OwnLog` that a ``config`` gives by their names."""
    return {key: getattr(config, key) for key in _KEYS}


def check_form_keys(config: BaseModel, dataset: str | None, schema: Schema | None) -> None:
    """Refuse settings that do not go with a published ``dataset``, or with the ``schema`` of an own one.

    Raises:
        ValueError: If a setting of ``config`` does not.
    """
    form = form_of(config)
    given = [key for key, value in form.items() if value]
    if given and dataset is not None:
        raise ValueError(f"dataset '{dataset}' is read as published; leave {given[0]} out")
    if schema is not None and form["timestamp_format"] is not None and schema.timestamp is None:
        raise ValueError("timestamp_format needs schema.timestamp, the column of the times")
    lost = [] if schema is None else [name for name in form["positive"] if name not in schema.labels]
    if lost:
        raise ValueError(f"positive names '{lost[0]}', which is no label of the schema")
