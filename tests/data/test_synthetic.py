"""A made log: the same rows however they are cut, and labels that follow the stated probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.logs.synthetic import SyntheticConfig, SyntheticLog

ROWS = 70_000


@pytest.fixture(scope="module")
def made() -> pl.DataFrame:
    return pl.concat(frame for frame, _ in SyntheticLog(SyntheticConfig(rows=ROWS, seed=7)).chunks())


@pytest.mark.parametrize("chunk", [10_007, 65_536, 1_000_000])
def test_rows_do_not_depend_on_chunks(made: pl.DataFrame, chunk: int) -> None:
    log = SyntheticLog(SyntheticConfig(rows=ROWS, seed=7))
    parts = [(frame, place.first_row) for frame, place in log.chunks(chunk_rows=chunk)]
    assert pl.concat(frame for frame, _ in parts).equals(made)
    firsts = np.cumsum([1, *(len(frame) for frame, _ in parts[:-1])]).tolist()
    assert [first for _, first in parts] == firsts


def test_times_alone_are_those_of_the_whole_rows(made: pl.DataFrame) -> None:
    parts = [frame for frame, _ in SyntheticLog(SyntheticConfig(rows=ROWS, seed=7)).chunks(["timestamp"])]
    assert all(frame.columns == ["timestamp"] for frame in parts)
    assert pl.concat(parts)["timestamp"].to_list() == made["timestamp"].to_list()


def test_a_shorter_log_is_the_beginning_of_a_longer_one(made: pl.DataFrame) -> None:
    short = pl.concat(frame for frame, _ in SyntheticLog(SyntheticConfig(rows=66_000, seed=7)).chunks())
    assert short.equals(made.head(66_000))


def test_seeds_give_different_logs(made: pl.DataFrame) -> None:
    other = pl.concat(frame for frame, _ in SyntheticLog(SyntheticConfig(rows=1_000, seed=8)).chunks())
    assert not other.equals(made.head(1_000))


def test_labels_follow_the_probabilities(made: pl.DataFrame) -> None:
    probability, click = made["probability"].to_numpy(), made["click"].to_numpy()
    edges = np.quantile(probability, np.linspace(0, 1, 11)[1:-1])
    bins = np.digitize(probability, edges)
    for number in range(10):
        inside = bins == number
        expected = probability[inside].mean()
        error = (probability[inside] * (1 - probability[inside])).sum() ** 0.5 / inside.sum()
        assert abs(click[inside].mean() - expected) < 4.5 * error


def test_popularity_follows_zipf(made: pl.DataFrame) -> None:
    config = SyntheticConfig(rows=ROWS, seed=7)
    counts = np.bincount(made["C26"].to_numpy(), minlength=config.largest_vocabulary)
    shares = np.arange(1, 1 + config.largest_vocabulary) ** -config.zipf
    shares /= shares.sum()
    np.testing.assert_allclose(counts[:20] / ROWS, shares[:20], rtol=0.15)
    assert made["C26"].max() < config.largest_vocabulary
    assert made["C1"].n_unique() == config.smallest_vocabulary


def test_the_best_possible_entropy_is_written_beside_the_data(tmp_path: Path) -> None:
    config = SyntheticConfig(rows=ROWS, seed=7)
    splits = prepare(DataConfig(dataset="synthetic", synthetic=config, cache_dir=str(tmp_path)), progress=False)
    test = pl.concat(frame for frame, _ in SyntheticLog(config).chunks())[-len(splits.test) :]
    probability, click = test["probability"].to_numpy(), test["click"].to_numpy()
    loss = -np.mean(np.where(click == 1, np.log(probability), np.log1p(-probability)))
    rate = click.mean()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert splits.facts["bayes_ne"] == pytest.approx(loss / entropy, rel=1e-9)
    assert splits.facts["bayes_ne_expected"] == pytest.approx(splits.facts["bayes_ne"], abs=0.03)
    assert splits.test.labels[:, 0].tolist() == click.tolist()


def test_lists_have_every_length_up_to_the_longest() -> None:
    config = SyntheticConfig(rows=3_000, seed=7, lists=2, list_length=4)
    (frame,) = (frame for frame, _ in SyntheticLog(config).chunks())
    lists = [name for name, dtype in frame.schema.items() if isinstance(dtype, pl.List)]
    assert len(lists) == 2
    for name in lists:
        assert sorted(frame[name].list.len().unique()) == [0, 1, 2, 3, 4]


def test_any_shape_can_be_made(tmp_path: Path) -> None:
    shapes = [
        {"dense": 0, "lists": 0, "categorical": 2},
        {"dense": 3, "lists": 3, "categorical": 1, "list_length": 1},
        {"rank": 1, "slots": 2, "largest_vocabulary": 300_000, "categorical": 4},
    ]
    for number, shape in enumerate(shapes):
        config = SyntheticConfig(rows=3_000, **shape)
        setting = DataConfig(dataset="synthetic", synthetic=config, cache_dir=str(tmp_path / str(number)))
        splits = prepare(setting, progress=False)
        batch = splits.train.batch(slice(0, 100))
        batch.sparse.validate()
        assert batch.sparse.one_hot == (config.lists == 0)
        assert len(splits.train) == 2_400
