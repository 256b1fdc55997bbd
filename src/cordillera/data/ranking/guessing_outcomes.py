"""Guesses at columns that are known only after the predicted outcome, by name and by how well they predict it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import polars as pl

TELLS = 0.98
"""AUC from which one column alone is taken for something that is known only afterwards."""

LABELS = ("click", "clicked", "label", "target", "is_click", "conversion", "converted", "purchase", "like", "liked")
"""Names of labels."""

OUTCOMES = re.compile(
    r"^(is_)?(click|label|target|conversion|purchase|like|order|install|booking|churn)s?$|"
    r"(^|_)(clicked|converted|purchased|liked|bought|ordered|installed|booked|subscribed|churned|in_cart|to_cart)$"
)
"""Names of binary columns that are, or could be, labels."""

FOLLOWING = re.compile(
    r"^(revenue|gmv|dwell|watch_?time|watched|time_spent|refund(ed)?)"
    r"(_(time|amount|value|ms|s|sec|secs|seconds|min|minutes|eur|usd|gbp|chf))*$"
)
"""Names of consequences of an outcome, such as revenue or time; not of sums over the past, such as ``watched_7d``."""

_LEAST = 50  # least rows of each class for a conclusion
_ROWS_OF_VALUE = 20  # least mean number of rows per value of a categorical column


def told_alone(values: pl.Series, label: pl.Series) -> float:
    """Return the AUC of a label by one column: by its numbers, or by how often the label is 1 with each of its texts.

    Args:
        values: Numbers, or texts; blanks are a value of their own.
        label: Zeros and ones, or blanks, which do not count.

    Returns:
        At least 0.5; exactly 0.5 if there are too few rows to decide.
    """
    ones = label.cast(pl.Float64, strict=False)
    values, ones = values.filter(ones.is_not_null()), ones.drop_nulls()
    positives = int(ones.sum())
    if min(positives, len(ones) - positives) < _LEAST:
        return 0.5
    if values.dtype.is_numeric():
        values = values.cast(pl.Float64).fill_nan(None)
        values = values.fill_null(float(np.min(values.drop_nulls().to_numpy(), initial=0.0)) - 1.0)
    else:
        frame = pl.DataFrame({"value": values.cast(pl.String).fill_null(""), "one": ones})
        if frame["value"].n_unique() * _ROWS_OF_VALUE > len(frame):
            return 0.5  # rare values would identify their rows
        values = frame.select(pl.col("one").mean().over("value")).to_series()
    ranks = values.rank("average").to_numpy()
    above = ranks[ones.to_numpy() > 0].sum() - positives * (positives + 1) / 2
    auc = float(above / (positives * (len(ones) - positives)))
    return max(auc, 1 - auc)


def most_told(values: pl.Series, labels: Sequence[pl.Series]) -> tuple[str, float]:
    """Return the label that a column predicts best, and the AUC; see :func:`told_alone`."""
    found = [(label.name, told_alone(values, label)) for label in labels]
    return max(found, key=lambda one: one[1])
