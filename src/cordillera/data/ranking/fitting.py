"""What an encoder learns from training rows: scales of dense features and counts of ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from cordillera.data.ranking.features import DenseFeature
from cordillera.data.ranking.logs.columns import WHOLE, splitmix64, without_point

QUANTILES = 1024
"""Number of quantiles that a ``quantile`` transform keeps."""

SAMPLE = 200_000
"""Number of rows from which quantiles are computed; all rows if there are fewer."""


def transformed(values: np.ndarray, transform: str) -> np.ndarray:
    """Return values of a dense feature after its ``transform``, before they are standardised."""
    return np.sign(values) * np.log1p(np.abs(values)) if transform == "log" else values


class DenseFit:
    """Streaming mean and variance (Chan et al. 1983); for quantiles, a sample of the rows with the smallest hash."""

    def __init__(self, feature: DenseFeature) -> None:
        self.feature, self.seen, self.rows = feature, 0, 0
        self.mean, self.squares = 0.0, 0.0
        self.sample = np.empty(0)
        self.keys = np.empty(0, dtype=np.uint64)

    def update(self, values: np.ndarray, blank: np.ndarray) -> None:
        """Take note of some rows: their ``values``, and which are ``blank``."""
        keys = splitmix64(np.arange(self.rows, self.rows + len(values), dtype=np.uint64))
        self.rows += len(values)
        present = transformed(values[~blank], self.feature.transform)
        if len(present):
            count, mean = len(present), float(present.mean())
            squares = float(((present - mean) ** 2).sum())
            delta, total = mean - self.mean, self.seen + count
            self.squares += squares + delta * delta * self.seen * count / total
            self.mean += delta * count / total
            self.seen = total
        if self.feature.transform == "quantile":
            self.sample = np.concatenate([self.sample, values[~blank]])
            self.keys = np.concatenate([self.keys, keys[~blank]])
            if len(self.keys) > SAMPLE:
                kept = np.argpartition(self.keys, SAMPLE)[:SAMPLE]
                self.sample, self.keys = self.sample[kept], self.keys[kept]

    def result(self) -> dict[str, Any]:
        """Return the fitted numbers, and ``fill``, the value that replaces a blank."""
        transform, state = self.feature.transform, {}
        if transform in ("log", "standardise"):
            deviation = (self.squares / self.seen) ** 0.5 if self.seen else 0.0
            # A column with a single value has no scale: 1 turns it into zeros.
            state = {"mean": self.mean, "scale": deviation if deviation > 1e-12 * max(1.0, abs(self.mean)) else 1.0}
            mean = 0.0
        elif transform == "quantile":
            points = np.linspace(0, 1, QUANTILES)
            quantiles = np.quantile(np.sort(self.sample), points) if len(self.sample) else np.zeros(1)
            state, mean = {"quantiles": quantiles.tolist()}, 0.5
        else:
            mean = self.mean
        return {**state, "fill": mean if self.feature.missing == "mean" else 0.0}


def counted(values: pl.Series) -> pl.DataFrame:
    """Return the values of a series, each once and without nulls, and how often each occurs (``value``, ``count``)."""
    counts = pl.DataFrame({"value": values}).drop_nulls().group_by("value").len(name="count")
    return counts.with_columns(pl.col("count").cast(pl.Int64))


class ValueCounts:
    """Number of times that each value of a table was seen; counts of chunks are merged sixteen at a time."""

    def __init__(self) -> None:
        self.parts: list[pl.DataFrame] = []

    def add(self, counts: pl.DataFrame) -> None:
        """Add the counts of a chunk."""
        self.parts.append(counts)
        if len(self.parts) >= 16:
            self.parts = [self.total()]

    def total(self) -> pl.DataFrame:
        """Return the counts by value."""
        return pl.concat(self.parts).group_by("value").agg(pl.col("count").sum())

    def vocabulary(
        self, min_count: int, limit: int | None, known: pl.Series, may_be_whole: bool
    ) -> tuple[pl.Series, bool]:
        """Return values in the order of their rows, and whether all values seen are whole numbers.

        Args:
            min_count: Number of occurrences of a value that is kept.
            limit: Largest number of rows of the table, with that of other values; None for no limit.
            known: Values that were kept before; they come first. Others follow by falling count.
            may_be_whole: Whether all known values are whole numbers.
        """
        if not self.parts:
            return known, may_be_whole and len(known) > 0
        total = self.total()
        plain = without_point(total["value"])
        whole = may_be_whole and (len(known) > 0 or bool(plain.str.contains(WHOLE).all()))
        if whole:
            total = total.with_columns(plain).group_by("value").agg(pl.col("count").sum())
        often = total.filter(pl.col("count") >= min_count).join(known.to_frame("value"), on="value", how="anti")
        values = often.sort(["count", "value"], descending=[True, False])["value"]
        if limit is not None:
            values = values.head(max(limit - 1 - len(known), 0))
        return pl.concat([known.rename("value"), values]), whole
