"""Guesses at the roles of a log's columns, from their names and some of their rows, for a person to look over."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from cordillera.data.ranking.features import Schema
from cordillera.data.ranking.logs.click_logs import FileFormat, FileLog
from cordillera.data.ranking.logs.columns import RowPlace, timestamps_of
from cordillera.data.ranking.logs.delimited import DelimitedFile, other_separator
from cordillera.data.ranking.logs.own import check_condition, meeting, parsed, with_points, without_words
from cordillera.errors import DataError
from cordillera.numbers import counted

ColumnRole = Literal["label", "timestamp", "id", "dense", "categorical", "list", "left out"]

ROWS = 200_000
"""Number of rows that guesses are made from; the first ones of a log."""

_LABELS = ("click", "clicked", "label", "target", "is_click", "conversion", "converted", "purchase", "like", "liked")
_OUTCOMES = re.compile(
    r"^(is_)?(click|label|target|conversion|purchase|like|order|install|booking|churn)s?$|"
    r"(^|_)(clicked|converted|purchased|liked|bought|ordered|installed|booked|subscribed|churned|in_cart|to_cart)$"
)
_TIMES = re.compile(r"(^|_)(time|timestamp|ts|date|datetime|dt|day|created_at|event_time|hour_ts)($|_)")
_ROW_IDS = re.compile(r"(^|_)(row|request|event|impression|log|sample|record|uuid|guid)(_?id)?$|^id$")
_IDS = re.compile(
    r"(^|_)(id|ids|uid|user|visitor|member|customer|item|product|sku|article|film|movie|song|ad|advertiser|campaign|"
    r"creative|publisher|site|app|device|category|cat|genre|brand|shop|store|seller|merchant|query|session|country|"
    r"city|region|zip|language|lang|os|browser|page|url|domain|ip|slot|position|hour|weekday|type|kind|code|status)"
    r"(_?ids?)?s?($|_)"
)
_PEOPLE = re.compile(r"(^|_)(uid|user|visitor|member|customer|account|reader|viewer)(_?id)?($|_)")
_INDEX = re.compile(r"^(unnamed_0|unnamed: 0|__index_level_0__|index)$")  # by this library, pandas and Arrow
_SHOWN = 5  # values of a column that is no label
_FEW = 32  # different whole numbers that are taken for codes
_SEPARATORS = "|;, "
_NULL_WORDS = (
    "na",
    "n/a",
    "#n/a",
    "<na>",
    "nan",
    "null",
    "none",
    "nil",
    "missing",
    "unknown",
    "?",
    "-",
    "--",
    ".",
    r"\n",
)
_DAY_AND_MONTH = r"^\d{1,2}[./-]\d{1,2}[./-]\d{4}( |$)"
_THOUSANDS = r"^-?\d{1,3}(,\d{3})?$"
_CLOCKS = ("", " %H:%M", " %H:%M:%S%.f", " %I:%M %p", " %I:%M:%S %p")
_DIGITS = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}  # numbers since 1970 have 9, 10, 13, 16 or 19


@dataclass(frozen=True)
class ColumnGuess:
    """Role of a column and the reason for it.

    Attributes:
        name: Name of the column.
        role: What the column is taken for.
        why: Reason in a few words.
        settings: Keys of the feature beside its name.
        data: Keys of ``data`` without which the column is not read so.
    """

    name: str
    role: ColumnRole
    why: str
    settings: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


def guess_roles(log: FileLog, labels: Sequence[str] = ()) -> list[ColumnGuess]:
    """Guess the role of every column of a ``log``, by its first rows.

    Args:
        labels: Names of the labels, or conditions for them such as ``rating>=4`` and ``answer=yes``. Default: the
            column of zeros and ones that is called like a label.

    Raises:
        DataError: If a label is no column of zeros and ones, or no column or several look like the label.
    """
    _check_separator(log)
    parts, rows = [], 0
    for frame, _ in log.chunks():
        parts.append(frame.head(ROWS - rows))
        rows += len(parts[-1])
        if rows >= ROWS:
            break
    frame = pl.concat(parts, how="diagonal_relaxed")
    words = {series.name: _null_words(series) for series in frame.get_columns()}
    frame = frame.with_columns(without_words(frame[name], of_column) for name, of_column in words.items())
    place = str(log.paths[0])
    conditions = dict(_condition_of(label, frame) for label in labels)
    for name, condition in conditions.items():
        if condition is not None and name in frame.columns:
            frame = frame.with_columns(meeting(frame[name], condition, RowPlace(place)))
    _check_labels(frame, list(conditions), place)
    chosen = list(conditions) or _label_of(frame, place)
    found: list[ColumnGuess] = []
    for name in frame.columns:
        if name in chosen:
            found.append(_label(frame[name], bool(labels), conditions.get(name)))
        elif _OUTCOMES.search(name.lower()) and _is_binary(frame[name]):
            why = "zeros and ones, called like an outcome, which is not known beforehand; --label NAME learns it too"
            found.append(ColumnGuess(name, "left out", why))
        else:
            has_time = any(one.role == "timestamp" for one in found)
            found.append(_guess(frame[name], has_time))
    if rows < ROWS:
        _check_classes(frame, chosen, place)
    return [_with_words(guess, words[guess.name]) for guess in found]


def data_of(guesses: Sequence[ColumnGuess]) -> dict[str, Any]:
    """Return the keys of ``data`` without which the columns are not read as guessed."""
    found: dict[str, Any] = {}
    for guess in guesses:
        for key, value in guess.data.items():
            if key == "null_values":
                value = list(dict.fromkeys([*found.get(key, ()), *value]))
            elif key == "positive":
                value = found.get(key, {}) | value
            found[key] = value
    return found


def guess_separator(path: Path, format: FileFormat) -> str | None:
    """Return the character between the fields of the text file at ``path``; None for that of its ``format``."""
    usual = "\t" if format == "tsv" else ","
    if format == "parquet" or _columns(path, usual) > 1:
        return None
    mark = max(";\t|,", key=lambda mark: _columns(path, mark))
    return mark if _columns(path, mark) > 1 else None


def schema_of(guesses: Sequence[ColumnGuess]) -> Schema:
    """Return the schema of guessed roles.

    Raises:
        DataError: If no column is a feature.
    """
    of_role: dict[str, list[ColumnGuess]] = {}
    for guess in guesses:
        of_role.setdefault(guess.role, []).append(guess)
    if not any(role in of_role for role in ("dense", "categorical", "list")):
        raise DataError("no column looks like a feature", where="schema", remedy="write data.schema by hand")
    features = {
        key: [{"name": one.name, **one.settings} for one in of_role.get(role, ())]
        for key, role in (("dense", "dense"), ("categorical", "categorical"), ("lists", "list"))
    }
    names = {role: [one.name for one in of_role.get(role, ())] for role in ("label", "timestamp", "id", "categorical")}
    people = [name for name in names["categorical"] if _PEOPLE.search(name.lower())]
    content = {
        "labels": names["label"],
        "timestamp": next(iter(names["timestamp"]), None),
        "group": next(iter(people), None),
        "ids": names["id"],
        "missing_labels": any(one.settings.get("missing_labels") for one in of_role.get("label", ())),
        **features,
    }
    return Schema.model_validate({key: value for key, value in content.items() if value})


def _columns(path: Path, separator: str) -> int:
    try:
        return len(DelimitedFile(path, separator).names)
    except DataError:
        return 0


def _check_separator(log: FileLog) -> None:
    """Refuse text files whose fields seem to be divided by another character."""
    if log.format == "parquet":
        return
    names = log.delimited(log.paths[0]).names
    if mark := other_separator(names):
        raise DataError(
            f"the file has a single column, {names[0]!r}: another character seems to divide its fields",
            where=str(log.paths[0]),
            remedy=f"add --separator {mark}",
        )


def _condition_of(label: str, frame: pl.DataFrame) -> tuple[str, str | None]:
    """Return the column of a label and its condition, if it has one."""
    match = None if label in frame.columns else re.search(r"[<>=]", label)
    if match is None:
        return label, None
    try:
        return label[: match.start()].strip(), check_condition(label[match.start() :])
    except ValueError as error:
        raise DataError(str(error), where=f"label {label}", remedy="write 'rating>=4' or 'answer=yes'") from error


def _null_words(series: pl.Series) -> list[str]:
    """Return the words in a column that is otherwise of numbers, or of truth values, which stand for no value."""
    if series.dtype != pl.String:
        return []
    text = series.str.strip_chars()
    given = text.filter(text != "")
    words = given.unique().to_list() if given.str.to_lowercase().is_in(_NULL_WORDS).any() else []
    words = sorted(word for word in words if word.lower() in _NULL_WORDS)
    rest = without_words(given, words).drop_nulls() if words else given.clear()
    return words if len(rest) and (_numbers(rest)[1] or _is_binary(rest) or _have_commas(rest)) else []


def _with_words(guess: ColumnGuess, words: Sequence[str]) -> ColumnGuess:
    if not words or guess.role not in ("dense", "label"):
        return guess
    why = f"{guess.why}; {' and '.join(words)} for no value"
    return replace(guess, why=why, data=guess.data | {"null_values": list(words)})


def _check_labels(frame: pl.DataFrame, labels: Sequence[str], place: str) -> None:
    for name in labels:
        if name not in frame.columns:
            raise DataError(f"there is no column '{name}'; there are {frame.columns}", where=place)
        if not _is_binary(frame[name]):
            values = frame[name].drop_nulls().unique().sort()
            shown = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values.head(_SHOWN))
            more = f", ... ({len(values):,} different)" if len(values) > _SHOWN else ""
            raise DataError(
                f"column '{name}' holds {shown or 'no value'}{more}; labels are 0 and 1, or false and true",
                where=place,
                remedy=f"say when it is 1: --label '{name}{_example(values)}'",
            )


def _example(values: pl.Series) -> str:
    """Return a condition that some of the values meet."""
    numbers, are_numbers = _numbers(values)
    if not len(values):
        return "=1"
    return f">={np.sort(numbers)[len(numbers) // 2]:g}" if are_numbers else f"={values[-1]}"


def _label(series: pl.Series, is_asked: bool, condition: str | None) -> ColumnGuess:
    why = "as asked" if is_asked else "zeros and ones, called like a label"
    data = {}
    if condition is not None:
        why, data = f"1 where {series.name} {condition}", {"positive": {series.name: condition}}
    blank = series.is_null()
    if series.dtype == pl.String:
        blank = series.str.strip_chars().fill_null("") == ""
    if not blank.any():
        return ColumnGuess(series.name, "label", why, data=data)
    why += f"; blank in {counted(int(blank.sum()), 'row')}, which then do not count for it"
    return ColumnGuess(series.name, "label", why, {"missing_labels": True}, data)


def _check_classes(frame: pl.DataFrame, labels: Sequence[str], place: str) -> None:
    for name in labels:
        series = frame[name].drop_nulls()
        if series.dtype == pl.String:
            series = series.str.strip_chars().str.to_lowercase().replace({"true": "1", "false": "0"})
            series = series.filter(series != "").cast(pl.Float64)
        if series.n_unique() < 2:
            all_rows = f"{float(series[0]):g}" if len(series) else "blank"
            raise DataError(f"column '{name}' is {all_rows} in all rows, so that nothing can be learnt", where=place)


def _label_of(frame: pl.DataFrame, place: str) -> list[str]:
    binary = [name for name in frame.columns if _is_binary(frame[name])]
    called = [name for name in binary if name.lower() in _LABELS]
    if not called and (others := [name for name in frame.columns if name.lower() in _LABELS]):
        _check_labels(frame, others[:1], place)
    called = called or [name for name in binary if _OUTCOMES.search(name.lower())]
    if len(called) != 1:
        which = "several columns look like the label" if called else "no column looks like the label"
        kind = "; columns of zeros and ones" if binary and not called else "; columns"
        raise DataError(
            f"{which}{kind} are {', '.join(called or binary or frame.columns)}",
            where=place,
            remedy="name it with --label",
        )
    return called


def _is_binary(series: pl.Series) -> bool:
    values = series.drop_nulls()
    if values.dtype == pl.Boolean:
        return True
    if values.dtype == pl.String:
        values = values.str.strip_chars().str.to_lowercase()
        return bool(len(values)) and bool(values.is_in(["0", "1", "0.0", "1.0", "true", "false", ""]).all())
    return bool(len(values)) and values.dtype.is_numeric() and bool(((values == 0) | (values == 1)).all())


def _guess(series: pl.Series, has_time: bool) -> ColumnGuess:
    name, called = series.name, series.name.lower()
    if isinstance(series.dtype, pl.List | pl.Array):
        return ColumnGuess(name, "list", "lists")
    given = series.drop_nulls()
    if given.dtype == pl.String:
        given = given.str.strip_chars()
        given = given.filter(given != "")
    different = given.n_unique() if len(given) else 0
    if different <= 1:
        return ColumnGuess(name, "left out", "one value in all rows" if different else "blank")
    if _INDEX.search(called) and _counts_rows(given):
        return ColumnGuess(name, "id", "counts the rows: the index of a table")
    if (time := _time_of(series, given)) is not None:
        return ColumnGuess(name, "left out", "another time") if has_time else time
    data: dict[str, Any] = {}
    if given.dtype == pl.String and not _IDS.search(called) and _have_commas(given):
        if given.str.contains(_THOUSANDS).all():
            why = "numbers such as 1,234: write 1234, or set data.decimal_comma if decimals follow the comma"
            return ColumnGuess(name, "left out", why)
        given, data = with_points(given), {"decimal_comma": True}
    if different > 0.95 * len(given) > 100 and (_ROW_IDS.search(called) or not _numbers(given)[1]):
        return ColumnGuess(name, "id", "a value of its own in almost every row")
    if given.dtype == pl.String and (mark := _separator_of(given)):
        return ColumnGuess(name, "list", f"text with {mark!r} between entries", {"separator": mark})
    numbers, are_numbers = _numbers(given)
    if not are_numbers:
        unread = "; a time by its name, whose form data.timestamp_format can tell"
        guess = _categorical(name, different, "text")
        return replace(guess, why=guess.why + unread) if _TIMES.search(called) else guess
    whole = bool((numbers == np.floor(numbers)).all())
    if whole and (_IDS.search(called) or different <= _FEW):
        why = "whole numbers; the name suggests codes, not amounts" if _IDS.search(called) else "few numbers"
        return _categorical(name, different, why)
    comma = ", with a comma before decimals" if data else ""
    if numbers.min() >= 0 and numbers.max() > 10 * max(1e-12, float(np.median(numbers))):
        return ColumnGuess(name, "dense", f"numbers with a long tail{comma}", {"transform": "log"}, data)
    return ColumnGuess(name, "dense", f"numbers{comma}", {"transform": "standardise"}, data)


def _counts_rows(given: pl.Series) -> bool:
    """Return whether a column counts from 0, in each file anew or on from file to file."""
    numbers, are_numbers = _numbers(given)
    return are_numbers and bool(numbers[0] == 0) and bool(((np.diff(numbers) == 1) | (numbers[1:] == 0)).all())


def _categorical(name: str, different: int, why: str) -> ColumnGuess:
    many = different > _FEW
    settings = {"min_count": 2} if many else {}
    return ColumnGuess(name, "categorical", f"{why}, {different:,} different", settings)


def _numbers(given: pl.Series) -> tuple[np.ndarray, bool]:
    """Return the values as numbers, and whether they all are finite numbers."""
    if given.dtype in (pl.Boolean, pl.Date, pl.Datetime, pl.Time, pl.Categorical, pl.Enum):
        return np.empty(0), False
    if given.dtype == pl.String and given.str.contains(r"^0\d").any():
        return np.empty(0), False  # codes such as 007
    try:
        found = given.cast(pl.Float64, strict=False)
    except pl.exceptions.PolarsError:
        return np.empty(0), False
    return found.fill_null(0).to_numpy(), not found.null_count() and bool(found.is_finite().all())


def _is_time(given: pl.Series, called: str) -> bool:
    if given.dtype in (pl.Date, pl.Datetime):
        return True
    if given.dtype == pl.String and given.head(100).str.contains(r"^\d{4}[-/]\d\d[-/]\d\d").all():
        try:
            timestamps_of(given, given.name, RowPlace("rows"))
        except DataError:
            return False
        return True
    numbers, are_numbers = _numbers(given)
    return are_numbers and bool(_TIMES.search(called)) and float(np.median(numbers)) > 1e8


def _time_of(series: pl.Series, given: pl.Series) -> ColumnGuess | None:
    """Return the guess of a column whose values ``given`` are times, else None."""
    name, called = series.name, series.name.lower()
    forms = _forms_of(given, called)
    if not forms:
        return _timestamp(series) if _is_time(given, called) else None
    text = series.cast(pl.String).str.strip_chars()
    of_forms = {form: parsed(text, form).alias(name) for form in forms}
    if len(forms) > 1:
        of_forms = {form: times for form, times in of_forms.items() if _is_ascending(times)}
    if len(of_forms) != 1:
        which = " or ".join(f'"{form}"' for form in forms)
        why = f"times, of which day or month comes first: set data.timestamp_format to {which}, and schema.timestamp"
        return ColumnGuess(name, "left out", why)
    ((form, times),) = of_forms.items()
    guess = _timestamp(times)
    return replace(guess, why=f"{guess.why}, of the form {form}", data={"timestamp_format": form})


def _timestamp(series: pl.Series) -> ColumnGuess:
    order = "" if _is_ascending(series) else ", not in order: sort the rows, or set data.split = 'random'"
    return ColumnGuess(series.name, "timestamp", f"times{order}")


def _forms_of(given: pl.Series, called: str) -> list[str]:
    """Return the forms in ``strftime``'s codes that all of these values may be times of, if any."""
    if given.dtype == pl.String and given.head(100).str.contains(_DAY_AND_MONTH).all():
        mark = next(mark for mark in "./-" if mark in given[0])
        dates = (mark.join(parts) for parts in (("%d", "%m", "%Y"), ("%m", "%d", "%Y")))
        forms = [date + clock for date in dates for clock in _CLOCKS]
    elif _TIMES.search(called) and (given.dtype == pl.String or given.dtype.is_integer()):
        lengths = given.cast(pl.String).str.len_chars()
        forms = [_DIGITS[lengths[0]]] if lengths.n_unique() == 1 and lengths[0] in _DIGITS else []
    else:
        forms = []
    text = given.cast(pl.String) if forms else given
    return [form for form in forms if not parsed(text.head(100), form).null_count() and _tells(text, form)]


def _tells(text: pl.Series, form: str) -> bool:
    """Return whether all of the text are times of a form, in the years from 1970 to 2100."""
    times = parsed(text, form)
    return not times.null_count() and bool(times.dt.year().is_between(1970, 2100).all())


def _have_commas(given: pl.Series) -> bool:
    """Return whether these are numbers with at most one comma each, before decimals or after thousands."""
    return bool(given.str.contains(r"^-?\d+(,\d+)?$").all()) and bool(given.str.contains(",", literal=True).any())


def _is_ascending(series: pl.Series) -> bool:
    try:
        times = timestamps_of(series, series.name, RowPlace("rows"))
    except DataError:
        return True  # training says what is wrong with them
    return bool((np.diff(times) >= 0).all())


def _separator_of(given: pl.Series) -> str | None:
    """Return the character that stands between entries of at least a tenth of the values, of the same kind."""
    for mark in _SEPARATORS:
        inside = given.filter(given.str.contains(mark, literal=True))
        if len(inside) < 0.1 * len(given):
            continue
        entries = inside.head(1000).str.split(mark).explode()
        short = bool((entries.str.len_chars() <= 24).all()) and entries.n_unique() < 0.5 * len(entries)
        if mark == "," and entries.n_unique() >= max(2, inside.head(1000).n_unique()):
            continue  # a comma inside of a few names
        if mark == "|" or (short and (mark != " " or entries.str.contains(r"^\d+$").all())):
            return mark
    return None
