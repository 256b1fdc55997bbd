"""Small made logs that the tests of this folder share."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from cordillera.data.ranking.datasets import DataConfig
from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, ListFeature, Schema


@pytest.fixture
def schema() -> Schema:
    """Every kind of column."""
    return Schema(
        dense=(
            DenseFeature(name="price", transform="log"),
            DenseFeature(name="age", transform="standardise", missing="zero"),
            DenseFeature(name="rank", transform="quantile"),
        ),
        categorical=(
            CategoricalFeature(name="user", min_count=2),
            CategoricalFeature(name="shop", encoding="hash", num_embeddings=50),
            CategoricalFeature(name="place", encoding="identity", num_embeddings=7),
        ),
        lists=(
            ListFeature(name="tags", max_length=3),
            ListFeature(name="seen", table="user", min_count=2, pooling="sum"),
        ),
        labels=("click", "buy"),
        weight="weight",
        timestamp="time",
        group="user",
        ids=("row",),
        segments=("user",),
    )


@pytest.fixture
def frame() -> pl.DataFrame:
    """2,000 rows in time order."""
    return make_frame(2_000, seed=3)


@functools.cache
def make_frame(rows: int, seed: int) -> pl.DataFrame:
    random = np.random.default_rng(seed)
    lists = [[f"t{tag}" for tag in random.integers(0, 9, random.integers(0, 6))] for _ in range(rows)]
    seen = [[f"u{user}" for user in random.integers(0, 60, random.integers(0, 4))] for _ in range(rows)]
    return pl.DataFrame(
        {
            "row": np.arange(rows),
            "price": pl.Series(np.round(random.lognormal(2, 1, rows), 3)),
            "age": pl.Series([None if random.random() < 0.1 else int(random.integers(18, 80)) for _ in range(rows)]),
            "rank": np.round(random.standard_normal(rows), 4),
            "user": [f"u{user}" for user in random.zipf(1.5, rows) % 97],
            "shop": pl.Series(
                [None if random.random() < 0.05 else f"s{int(random.integers(0, 300))}" for _ in range(rows)]
            ),
            "place": random.integers(0, 7, rows),
            "tags": pl.Series(lists, dtype=pl.List(pl.String)),
            "seen": pl.Series(seen, dtype=pl.List(pl.String)),
            "click": random.integers(0, 2, rows),
            "buy": random.integers(0, 2, rows),
            "weight": np.round(random.random(rows) + 0.5, 3),
            "time": 1_700_000_000 + np.sort(random.integers(0, 100_000, rows)),
        }
    )


def write(frame: pl.DataFrame, path: Path) -> Path:
    """A frame as CSV, TSV or Parquet; text lists are joined."""
    if path.suffix == ".parquet":
        frame.write_parquet(path)
        return path
    lists = [name for name, kind in frame.schema.items() if isinstance(kind, pl.List)]
    frame = frame.with_columns(pl.col(name).list.join("|") for name in lists)
    frame.write_csv(path, separator="\t" if path.suffix == ".tsv" else ",")
    return path


def config(path: Path | list[Path], schema: Schema, tmp_path: Path, **rest: object) -> DataConfig:
    """Own files, with the cache in the test's folder."""
    paths = tuple(str(one) for one in path) if isinstance(path, list) else str(path)
    return DataConfig(dataset=None, path=paths, schema=schema, cache_dir=str(tmp_path / "cache"), **rest)
