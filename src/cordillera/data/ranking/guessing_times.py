"""Guesses at the form of times in the columns of a log."""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from cordillera.data.ranking.logs.columns import RowPlace, timestamps_of
from cordillera.data.ranking.logs.own import parsed
from cordillera.errors import DataError

CALLED = re.compile(r"(^|_)(time|timestamp|ts|date|datetime|dt|day|created_at|event_time|hour_ts)($|_)")
"""Names that columns of times have."""

HOURS = r"^(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])([01]\d|2[0-3])$"
"""Times such as 2026013112, which ``strftime`` codes cannot parse without minutes; Unix times rarely match."""

_FIRST_PARSED = 100
_DATE = r"^[A-Za-z]{3,9} ?\d|^\d{1,4}[./ -]([A-Za-z]{3,9}|\d{1,2})[./ -]\d{2,4}"
_DIGITS = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}  # Unix times have 9, 10, 13, 16 or 19 digits
_ORDERS = ("%d{0}%m{0}%Y", "%m{0}%d{0}%Y", "%d{0}%m{0}%y", "%m{0}%d{0}%y", "%Y{0}%m{0}%d", "%d{0}%b{0}%Y")
_WORDED = ("%b %d, %Y", "%b %d %Y", "%B %d, %Y", "%d %B %Y")
_CLOCKS = ("%H:%M", "%H:%M:%S%.f", "%I:%M %p", "%I:%M:%S %p", "%H:%M %z", "%H:%M:%S%.f %z")


def forms_of(given: pl.Series, called: str) -> list[str]:
    """Return the forms in ``strftime``'s codes that all values of a column may be times of, if any.

    Args:
        given: Values without blanks, text or whole numbers.
        called: Name of the column in lower case, which counts where the values are digits only.
    """
    if given.dtype == pl.String and given.head(_FIRST_PARSED).str.contains(_DATE).all():
        dates = [order.format(mark) for order in _ORDERS for mark in "./- " if mark in given[0]] + list(_WORDED)
        clocks = [gap + clock for clock in _CLOCKS for gap in (" ", ", ")] if ":" in given[0] else [""]
        forms = [date + clock for date in dates for clock in clocks]
    elif CALLED.search(called) and (given.dtype == pl.String or given.dtype.is_integer()):
        lengths = given.cast(pl.String).str.len_chars()
        forms = [_DIGITS[lengths[0]]] if lengths.n_unique() == 1 and lengths[0] in _DIGITS else []
    else:
        return []
    text = given.cast(pl.String)
    found = [form for form in forms if _tells(text.head(_FIRST_PARSED), form)]
    return [form for form in found if _tells(text, form)]


def _tells(text: pl.Series, form: str) -> bool:
    """Return whether all of the text are times of a form, in the years from 1970 to 2100."""
    times = parsed(text, form)
    return not times.null_count() and bool(times.dt.year().is_between(1970, 2100).all())


def is_time(given: pl.Series, called: str) -> bool:
    """Return whether values without blanks are times that are read without a form."""
    if given.dtype in (pl.Date, pl.Datetime):
        return True
    if given.dtype == pl.String and given.head(_FIRST_PARSED).str.contains(r"^\d{4}[-/]\d\d[-/]\d\d").all():
        try:
            timestamps_of(given, given.name, RowPlace("rows"))
        except DataError:
            return False
        return True
    if not CALLED.search(called) or not (given.dtype == pl.String or given.dtype.is_numeric()):
        return False
    numbers = given.cast(pl.Float64, strict=False).drop_nulls()
    return len(numbers) == len(given) and float(np.median(numbers.to_numpy())) > 1e8


def have_zones_in_part(series: pl.Series) -> bool:
    """Return whether some of the times in text have a time zone and others have none."""
    if series.dtype != pl.String:
        return False
    zoned = series.drop_nulls().str.strip_chars().str.contains(r":\d\d(\.\d+)? ?(Z|[+-]\d\d:?\d\d)$")
    return bool(zoned.any()) and not bool(zoned.all())


def is_ascending(series: pl.Series) -> bool:
    """Return whether no time of a column is earlier than the one before; also if training will refuse them."""
    try:
        times = timestamps_of(series, series.name, RowPlace("rows"))
    except DataError:
        return True
    return bool((np.diff(times) >= 0).all())
