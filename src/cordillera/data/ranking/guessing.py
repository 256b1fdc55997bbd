"""Guesses at the roles of a log's columns, from their names and some of their rows, for a person to look over."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import polars as pl

from cordillera.data.ranking import guessing_outcomes as outcomes
from cordillera.data.ranking import guessing_times as times
from cordillera.data.ranking.features import Schema
from cordillera.data.ranking.logs.click_logs import FileFormat, FileLog
from cordillera.data.ranking.logs.columns import WEIGHTS, RowPlace
from cordillera.data.ranking.logs.delimited import DelimitedFile, other_separator
from cordillera.data.ranking.logs.own import (
    check_condition,
    meeting,
    parsed,
    parts_of,
    with_points,
    without_words,
)
from cordillera.errors import DataError
from cordillera.mistakes import meant
from cordillera.numbers import counted

ColumnRole = Literal["label", "timestamp", "weight", "id", "dense", "categorical", "list", "left out"]

_FEATURES = ("dense", "categorical", "list")

ROWS = 200_000
"""Number of rows that guesses are made from; the first ones of a log."""

_ROW_IDS = re.compile(r"(^|_)(row|request|event|impression|log|sample|record|uuid|guid)(_?id)?$|^id$")
_IDS = re.compile(
    r"(^|_)(id|ids|uid|user|visitor|member|customer|item|product|sku|article|film|movie|song|ad|advertiser|campaign|"
    r"creative|publisher|site|app|device|category|cat|genre|brand|shop|store|seller|merchant|query|session|country|"
    r"city|region|zip|language|lang|os|browser|page|url|domain|ip|slot|position|hour|weekday|type|kind|code|status)"
    r"(_?ids?)?s?($|_)"
)
_PEOPLE = re.compile(r"(^|_)(uid|user|visitor|member|customer|account|reader|viewer)(_?id)?($|_)")
_WEIGHTS = re.compile(r"^(sample|row|example|instance|importance|loss)_?weights?$")
_INDEX = re.compile(r"^(unnamed_0|unnamed: 0|__index_level_0__|index)$")  # names by this library, pandas and Arrow
_SHOWN = 5  # values shown of a column that is not a label
_LONGEST = 40  # most characters of a value in a reason
_FEW = 32  # most distinct integers of a column of codes
_SEPARATORS = "|;, "
_NULL_WORDS: tuple[str, ...] = ("na", "n/a", "#n/a", "<na>", "nan", "null", "none", "nil", "missing", "unknown")
_NULL_WORDS += ("?", "-", "--", ".", r"\n")
_AMOUNTS = re.compile(
    r"(^|_)(price|cost|amount|spend|revenue|total|rate|ratio|score|weight|fee|value|budget|bid)s?($|_)"
)
_COMMA_NUMBER = r"^[+-]?(\d+(,\d+)?|\d{1,3}(\.\d{3})+,\d+)([eE][+-]?\d+)?$"
_THOUSANDS = r"^[+-]?\d{1,3},\d{3}$"
_OTHER_NUMBER = r"^[+-]?[$€£]? ?(\d+|\d{1,3}([ \u00a0',]\d{3})+)([.,]\d+)?( ?[%€$£])?$"


@dataclass(frozen=True)
class ColumnGuess:
    """Role of a column and the reason for it.

    Attributes:
        name: Name of the column.
        role: Guessed role of the column.
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
        DataError: If a label is no column of zeros and ones, a condition is none or is met by no row, or no column or
            several look like the label.
    """
    _check_separator(log)
    parts, rows = [], 0
    for frame, _ in log.chunks():
        parts.append(frame.head(ROWS - rows))
        rows += len(parts[-1])
        if rows >= ROWS:
            break
    frame, place = pl.concat(parts, how="diagonal_relaxed"), str(log.paths[0])
    frame, words = _without_null_words(frame)
    frame, asked = _with_labels(frame, labels, place)
    chosen = list(asked) or _label_of(frame, place)
    lacks = log.lacking(frame.columns)
    if lost := [name for name in chosen if name in lacks]:
        raise DataError(f"column '{lost[0]}' is missing, and is the label", where=str(lacks[lost[0]]))
    others = [name for name in frame.columns if name not in chosen]
    of_time = {name: time for name in others if name not in lacks and (time := _time_of(frame[name])) is not None}
    found, best = list[ColumnGuess](), _best_time(of_time)
    for name in frame.columns:
        if name in chosen:
            guess = _label(frame[name], asked.get(name))
        elif name in lacks:
            guess = ColumnGuess(name, "left out", f"{lacks[name].name} has no such column")
        elif outcomes.OUTCOMES.search(name.lower()) and _is_binary(frame[name]):
            why = "zeros and ones, called like an outcome, which is not known beforehand; --label NAME learns it too"
            guess = ColumnGuess(name, "left out", why)
        elif outcomes.FOLLOWING.search(name.lower()):
            why = "called like what follows an outcome; if it is known before, add it to data.schema"
            guess = ColumnGuess(name, "left out", why)
        elif name in of_time:
            guess = of_time[name]
            if guess.role == "timestamp" and name != best:
                guess = ColumnGuess(name, "left out", "another time")
        else:
            guess = _guess(frame[name])
            if guess.role == "weight" and any(one.role == "weight" for one in found):
                guess = ColumnGuess(name, "left out", "another weight")
        found.append(_with_words(guess, words[name]))
    if rows < ROWS:
        _check_classes(frame, chosen, place)
    return _without_telling(_without_points(found, frame), frame)


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
    """Return the field separator of the text file at ``path``; None for the default of its ``format``."""
    usual = "\t" if format == "tsv" else ","
    if format == "parquet" or _columns(path, usual) > 1:
        return None
    columns = {mark: _columns(path, mark) for mark in ";\t|,"}
    mark = max(columns, key=columns.__getitem__)
    return mark if columns[mark] > 1 else None


def schema_of(guesses: Sequence[ColumnGuess], place: str = "schema") -> Schema:
    """Return the schema of roles in ``guesses``.

    Args:
        place: Where the columns are, for errors.

    Raises:
        DataError: If no column is a feature.
    """
    of_role: dict[str, list[ColumnGuess]] = {}
    for guess in guesses:
        of_role.setdefault(guess.role, []).append(guess)
    if not any(role in of_role for role in _FEATURES):
        raise DataError("no column looks like a feature", where=place, remedy="write data.schema by hand")
    features = {
        key: [{"name": one.name, **one.settings} for one in of_role.get(role, ())]
        for key, role in (("dense", "dense"), ("categorical", "categorical"), ("lists", "list"))
    }
    names = {role: [one.name for one in of_role.get(role, ())] for role in get_args(ColumnRole)}
    people = [name for name in names["categorical"] if _PEOPLE.search(name.lower())]
    content = {
        "labels": names["label"],
        "weight": next(iter(names["weight"]), None),
        "timestamp": next(iter(names["timestamp"]), None),
        "group": next(iter(people), None),
        "ids": names["id"],
        "missing_labels": any(one.settings.get("missing_labels") for one in of_role.get("label", ())),
        **features,
    }
    return Schema.model_validate({key: value for key, value in content.items() if value})


def _columns(path: Path, separator: str) -> int:
    """Return the number of columns; 0 if the first rows have another number."""
    try:
        file = DelimitedFile(path, separator)
        next(file.frames(), None)
    except DataError:
        return 0
    return len(file.names)


def _check_separator(log: FileLog) -> None:
    """Refuse text files whose fields seem to be divided by another character."""
    if log.format == "parquet":
        return
    names = log.delimited(log.paths[0]).names
    if names[0].lower().startswith("sep="):
        raise DataError(
            f"the first line, {names[0]!r}, is for spreadsheets and names no columns",
            where=str(log.paths[0]),
            remedy="delete this line",
        )
    if mark := other_separator(names):
        words = "add --separator ' '; for a text that a language model learns, see `cordillera recipe show llama-debug`"
        raise DataError(
            f"the file has a single column, {names[0]!r}: another character seems to divide its fields",
            where=str(log.paths[0]),
            remedy=words if mark == " " else f"add --separator {mark}",
        )


def _with_labels(
    frame: pl.DataFrame, labels: Sequence[str], place: str
) -> tuple[pl.DataFrame, dict[str, dict[str, Any]]]:
    """Return a frame in which conditions are met or not, and the keys of ``data`` that each label needs."""
    asked: dict[str, dict[str, Any]] = {}
    for label in labels:
        name, condition = _condition_of(label, frame)
        if name in asked:
            raise DataError(f"column '{name}' is named twice, and is one label", where=place, remedy="name it once")
        asked[name] = {}
        if condition is not None and name in frame.columns:
            series, asked[name] = _as_label(frame[name], condition, place)
            frame = frame.with_columns(series)
    _check_labels(frame, list(asked), place)
    return frame, asked


def _as_label(series: pl.Series, condition: str, place: str) -> tuple[pl.Series, dict[str, Any]]:
    """Return where a column meets a condition, and the keys of ``data`` that define this label."""
    sign, bound = parts_of(condition)
    data: dict[str, Any] = {"positive": {series.name: condition}}
    if series.dtype in (pl.Categorical, pl.Enum):
        series = series.cast(pl.String)
    if series.dtype == pl.String:
        text = _given(series)
        text = text.filter(text != bound).unique().sort()
        words = text.filter(text.str.to_lowercase().is_in(_NULL_WORDS))
        if sign != "=":
            numbers = text.str.contains(_COMMA_NUMBER)
            data |= {"decimal_comma": True} if _have_commas(text.filter(numbers)) else {}
            text = text.filter(~numbers)
            words = text.filter(text.cast(pl.Float64, strict=False).is_null())
        if 0 < len(words) <= _FEW:
            data["null_values"] = words.to_list()
            series = without_words(series, data["null_values"])
        series = with_points(series, RowPlace(place)) if "decimal_comma" in data else series
    met = meeting(series, condition, RowPlace(place))
    if not met.any():
        raise DataError(f"no row of column '{series.name}' is {condition}; it holds {_values(series)}", where=place)
    return met, data


def _condition_of(label: str, frame: pl.DataFrame) -> tuple[str, str | None]:
    """Return the column of a label and its condition, if it has one."""
    known = [name for name in frame.columns if label.startswith(name)]
    begin = max(map(len, known), default=0) or len(re.split(r"[<>=]", label, maxsplit=1)[0])
    if begin == len(label) or not re.match(r"\s*[<>=]", label[begin:]):
        return label, None
    try:
        return label[:begin].strip(), check_condition(label[begin:])
    except ValueError as error:
        raise DataError(str(error), where=f"label {label}", remedy="write 'rating>=4' or 'answer=yes'") from error


def _without_null_words(frame: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, list[str]]]:
    """Return a frame without words that represent missing values among numbers, and these words by column."""
    words = {series.name: _null_words(series) for series in frame.get_columns()}
    return frame.with_columns(without_words(frame[name], found) for name, found in words.items()), words


def _null_words(series: pl.Series) -> list[str]:
    """Return the words that represent missing values in a column of numbers or truth values."""
    if series.dtype != pl.String:
        return []
    given = _given(series)
    words = given.unique().to_list() if given.str.to_lowercase().is_in(_NULL_WORDS).any() else []
    words = sorted(word for word in words if word.lower() in _NULL_WORDS)
    rest = without_words(given, words).drop_nulls() if words else given.clear()
    return words if len(rest) and (_numbers(rest)[1] or _is_binary(rest) or _have_commas(rest)) else []


def _told(words: Sequence[str]) -> str:
    return f"; {' and '.join(words)} for no value" if words else ""


def _with_words(guess: ColumnGuess, words: Sequence[str]) -> ColumnGuess:
    if not words or guess.role not in ("dense", "label"):
        return guess
    return replace(guess, why=guess.why + _told(words), data=guess.data | {"null_values": list(words)})


def _check_labels(frame: pl.DataFrame, labels: Sequence[str], place: str) -> None:
    for name in labels:
        if name not in frame.columns:
            several = "repeat --label for each of them" if "," in name else None
            raise DataError(
                f"there is no column '{name}'{meant(name, frame.columns)}; there are {', '.join(frame.columns)}",
                where=place,
                remedy=several,
            )
        if not _is_binary(frame[name]):
            lists = frame[name].dtype.is_nested()
            raise DataError(
                f"column '{name}' holds {'lists' if lists else _values(frame[name])}; labels are 0 and 1, or false and "
                "true",
                where=place,
                remedy="name another column" if lists else f"say when it is 1: --label '{name}{_example(frame[name])}'",
            )


def _values(series: pl.Series) -> str:
    values = series.drop_nulls().unique().sort()
    shown = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values.head(_SHOWN))
    return f"{shown or 'no value'}{f', ... ({len(values):,} different)' if len(values) > _SHOWN else ''}"


def _example(series: pl.Series) -> str:
    """Return an example of a condition that some values meet."""
    values = series.drop_nulls().unique().sort()
    if values.dtype == pl.String and _have_commas(values):
        values = with_points(values, RowPlace(""))
    numbers, are_numbers = _numbers(values)
    if not len(values):
        return "=1"
    return f">={np.sort(numbers)[len(numbers) // 2]:g}" if are_numbers else f"={values[-1]}"


def _label(series: pl.Series, data: dict[str, Any] | None) -> ColumnGuess:
    why = "zeros and ones, called like a label" if data is None else "as asked"
    if data:
        why = f"1 where {series.name} {data['positive'][series.name]}{_told(data.get('null_values', ()))}"
    data = data or {}
    blank = series.is_null()
    if series.dtype == pl.String:
        blank = series.str.strip_chars().fill_null("") == ""
    if not blank.any():
        return ColumnGuess(series.name, "label", why, data=data)
    why += f"; blank in {counted(int(blank.sum()), 'row')}, which then do not count for it"
    return ColumnGuess(series.name, "label", why, {"missing_labels": True}, data)


def _check_classes(frame: pl.DataFrame, labels: Sequence[str], place: str) -> None:
    for name in labels:
        series = _zeros_and_ones(frame[name]).drop_nulls()
        if series.n_unique() < 2:
            all_rows = f"{float(series[0]):g}" if len(series) else "blank"
            raise DataError(f"column '{name}' is {all_rows} in all rows, so that nothing can be learnt", where=place)


def _label_of(frame: pl.DataFrame, place: str) -> list[str]:
    binary = [name for name in frame.columns if _is_binary(frame[name])]
    called = [name for name in binary if name.lower() in outcomes.LABELS]
    if not called and (others := [name for name in frame.columns if name.lower() in outcomes.LABELS]):
        _check_labels(frame, others[:1], place)
    called = called or [name for name in binary if outcomes.OUTCOMES.search(name.lower())]
    if len(called) != 1:
        which = "several columns look like the label" if called else "no column looks like the label"
        kind = "; columns of zeros and ones" if binary and not called else "; columns"
        raise DataError(
            f"{which}{kind} are {', '.join(called or binary or frame.columns)}",
            where=place,
            remedy="name it with --label; repeat --label for several tasks" if called else "name it with --label",
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


def _given(series: pl.Series) -> pl.Series:
    """Return the values of a column that are not blank, without spaces around them."""
    given = series.drop_nulls()
    if given.dtype == pl.String:
        given = given.str.strip_chars()
        given = given.filter(given != "")
    return given


def _guess(series: pl.Series) -> ColumnGuess:
    name, called = series.name, series.name.lower()
    if series.dtype.is_nested():
        return ColumnGuess(name, "list", "lists")
    given = _given(series)
    different = given.n_unique() if len(given) else 0
    if different <= 1:
        return ColumnGuess(name, "left out", "one value in all rows" if different else "blank")
    if _INDEX.search(called) and _counts_rows(given):
        return ColumnGuess(name, "id", "counts the rows: the index of a table")
    if _WEIGHTS.search(called) and _numbers(given)[1]:
        return _weight(series, _numbers(given)[0])
    are_codes, data = bool(_IDS.search(called)) and not _AMOUNTS.search(called), dict[str, Any]()
    if given.dtype == pl.String and not are_codes:
        if unread := _unread(given):
            return ColumnGuess(name, "left out", unread)
        if _have_commas(given):
            given, data = with_points(given, RowPlace("")), {"decimal_comma": True}
    if times.CALLED.search(called) and given.dtype == pl.String and different > _FEW and not _numbers(given)[1]:
        why = f"a time by its name, such as {given[0][:_LONGEST]!r}; data.timestamp_format can tell its form"
        return ColumnGuess(name, "left out", why)
    if given.dtype == pl.String and given.str.contains(r"^\[.*\]$").all():
        return ColumnGuess(name, "left out", f"lists such as {given[0][:_LONGEST]!r}: write 1|2|3, or lists in Parquet")
    almost_all = different > 0.95 * len(given) > 100
    mark = _separator_of(given, almost_all) if given.dtype == pl.String else None
    if almost_all and (_ROW_IDS.search(called) or (mark is None and not _numbers(given)[1])):
        again = len(given) - different
        twice = f"; {counted(again, 'row')} with one of an earlier row: the same row twice?" if again else ""
        return ColumnGuess(name, "id", f"a value of its own in almost every row{twice}")
    if mark is not None:
        return ColumnGuess(name, "list", f"text with {mark!r} between entries", {"separator": mark})
    numbers, are_numbers = _numbers(given)
    if not are_numbers:
        return _categorical(name, different, "text")
    if bool((numbers == np.floor(numbers)).all()) and (are_codes or different <= _FEW):
        why = "whole numbers; the name suggests codes, not amounts" if are_codes else "few numbers"
        return _categorical(name, different, why)
    comma = ", with a comma before decimals" if data else ""
    if numbers.min() >= 0 and numbers.max() > 10 * max(1e-12, float(np.median(numbers))):
        return ColumnGuess(name, "dense", f"numbers with a long tail{comma}", {"transform": "log"}, data)
    return ColumnGuess(name, "dense", f"numbers{comma}", {"transform": "standardise"}, data)


def _weight(series: pl.Series, numbers: np.ndarray) -> ColumnGuess:
    least, most = WEIGHTS
    fits = len(numbers) == len(series) and ((numbers == 0) | ((numbers >= least) & (numbers <= most))).all()
    why = "called like the weight of a row, in training and in metrics"
    if fits:
        return ColumnGuess(series.name, "weight", why)
    return ColumnGuess(series.name, "left out", f"{why}, but blank in some rows, below 0 or too large")


def _unread(given: pl.Series) -> str | None:
    """Return why a column of numbers cannot be read, or None."""
    commas = given.filter(given.str.contains(",", literal=True))
    if len(commas) and given.str.contains(_COMMA_NUMBER).all():
        if commas.str.contains(_THOUSANDS).all():
            return "numbers such as 1,234: write 1234, or set data.decimal_comma if decimals follow the comma"
        return None
    if given.str.contains(_OTHER_NUMBER).all() and not _numbers(given)[1]:
        return f"numbers such as {given[0][:_LONGEST]!r}, which are not read: write 1234.5"
    return None


def _without_points(found: list[ColumnGuess], frame: pl.DataFrame) -> list[ColumnGuess]:
    """Return guesses that leave out numbers with points in logs in which decimals follow commas."""
    if not any(guess.data.get("decimal_comma") for guess in found):
        return found
    why = "numbers with points in a log with decimal commas: write 12,5 or 1234"

    def mixed(guess: ColumnGuess) -> bool:
        if guess.role != "dense" or frame[guess.name].dtype != pl.String:
            return False
        text = frame[guess.name].drop_nulls()
        points, commas = (text.str.contains(mark, literal=True) for mark in ".,")
        return bool((points & ~commas).any())

    return [ColumnGuess(guess.name, "left out", why) if mixed(guess) else guess for guess in found]


def _without_telling(found: list[ColumnGuess], frame: pl.DataFrame) -> list[ColumnGuess]:
    """Return guesses without features that reveal a label alone, unless no feature would remain."""
    labels = [_zeros_and_ones(frame[guess.name]) for guess in found if guess.role == "label"]

    def judged(guess: ColumnGuess) -> ColumnGuess:
        if guess.role not in ("dense", "categorical"):
            return guess
        values = frame[guess.name]
        if guess.role == "categorical":
            values = values.cast(pl.String)
        elif values.dtype == pl.String:
            values = with_points(values, RowPlace("")) if "decimal_comma" in guess.data else values
            values = values.str.strip_chars().cast(pl.Float64, strict=False)
        label, auc = outcomes.most_told(values, labels)
        if auc < outcomes.TELLS:
            return guess
        why = f"tells {label} alone (AUC {auc:.3f}), so it may be known only afterwards; else add it to data.schema"
        return ColumnGuess(guess.name, "left out", why)

    kept = [judged(guess) for guess in found]
    return kept if any(guess.role in _FEATURES for guess in kept) else found


def _zeros_and_ones(series: pl.Series) -> pl.Series:
    if series.dtype != pl.String:
        return series.cast(pl.Float64)
    words = series.str.strip_chars().str.to_lowercase().replace({"true": "1", "false": "0"})
    return words.cast(pl.Float64, strict=False)


def _time_of(series: pl.Series) -> ColumnGuess | None:
    """Return the guess of a column whose values are times, else None."""
    name, called = series.name, series.name.lower()
    given = series.head(0) if series.dtype.is_nested() else _given(series)
    if given.n_unique() <= 1:
        return None
    forms = times.forms_of(given, called)
    if not forms:
        if times.CALLED.search(called) and given.cast(pl.String, strict=False).str.contains(times.HOURS).all():
            why = "times such as 2026013112, which cannot be read without minutes"
            return ColumnGuess(name, "left out", why)
        return _timestamp(series) if times.is_time(given, called) else None
    text = series.cast(pl.String).str.strip_chars()
    of_forms = [(form, parsed(text, form).alias(name)) for form in forms]
    of_forms = [one for at, one in enumerate(of_forms) if not any(one[1].equals(other[1]) for other in of_forms[:at])]
    if len(of_forms) > 1:
        in_order = [one for one in of_forms if times.is_ascending(one[1]) or times.is_ascending(one[1].reverse())]
        if len(in_order) != 1:
            which = " or ".join(f'"{form}"' for form, _ in of_forms)
            why = f"times, of which day or month comes first: set data.timestamp_format to {which}, and "
            return ColumnGuess(name, "left out", f"{why}data.schema.timestamp")
        of_forms = in_order
    guess = _timestamp(of_forms[0][1])
    if guess.role != "timestamp":
        return guess
    why = f"{guess.why}, of the form {of_forms[0][0]}"
    return replace(guess, why=why, data={**guess.data, "timestamp_format": of_forms[0][0]})


def _timestamp(series: pl.Series) -> ColumnGuess:
    if blank := len(series) - len(_given(series)):
        why = f"times, blank in {counted(blank, 'row')}: leave these rows out of the log, and add data.schema.timestamp"
        return ColumnGuess(series.name, "left out", why)
    zones = "; those without a time zone are taken as UTC" if times.have_zones_in_part(series) else ""
    if times.is_ascending(series):
        return ColumnGuess(series.name, "timestamp", f"times{zones}")
    why = f"times, not in order; data.unordered has the rows sorted{zones}"
    return ColumnGuess(series.name, "timestamp", why, data={"unordered": "sort"})


def _best_time(guesses: Mapping[str, ColumnGuess]) -> str | None:
    """Return the column of times in order, or else of times; the first of several."""
    of_rows = [name for name, guess in guesses.items() if guess.role == "timestamp"]
    in_order = [name for name in of_rows if "unordered" not in guesses[name].data]
    return next(iter([*in_order, *of_rows]), None)


def _counts_rows(given: pl.Series) -> bool:
    """Return whether a column counts from 0 or 1, in each file anew or on from file to file."""
    numbers, are_numbers = _numbers(given)
    if not are_numbers or numbers[0] not in (0, 1):
        return False
    return bool(((np.diff(numbers) == 1) | (numbers[1:] == numbers[0])).all())


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


def _have_commas(given: pl.Series) -> bool:
    """Return whether these are numbers, some with one comma, before decimals or after thousands."""
    return bool(given.str.contains(_COMMA_NUMBER).all()) and bool(given.str.contains(",", literal=True).any())


def _separator_of(given: pl.Series, differ: bool) -> str | None:
    """Return what stands between entries of at least a tenth of the values, which almost all ``differ`` or not."""
    for mark in _SEPARATORS:
        inside = given.filter(given.str.contains(mark, literal=True))
        if len(inside) < 0.1 * len(given):
            continue
        if mark != " " and not inside.str.contains(f"[{mark}]([^ ]|$)").any():
            mark = f"{mark} "
        entries = inside.head(1000).str.split(mark).explode()
        again = entries.n_unique() < 0.5 * len(entries)
        again |= mark[0] in "|;" and bool(entries.str.contains(r"^\d+$").all())
        short = bool((entries.str.len_chars() <= 24).all()) and again
        if mark[0] == "," and entries.n_unique() >= max(2, inside.head(1000).n_unique()) and not differ:
            continue  # a comma inside of a few names
        if (mark[0] == "|" and not differ) or (short and (mark != " " or entries.str.contains(r"^\d+$").all())):
            return mark
    return None
