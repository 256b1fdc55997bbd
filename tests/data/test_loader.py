"""The order of batches is a pure function of seed and epoch, and threads end with their iteration."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from cordillera.data.ranking import loader as loader_module
from cordillera.data.ranking.cache import ClickDataset
from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.features import Schema
from cordillera.data.ranking.loader import Loader
from cordillera.errors import DataError

from .conftest import config, write
from .test_datasets import same

SHUFFLES = ["none", "blocks", "global"]


@pytest.fixture
def train(tmp_path: Path, frame: pl.DataFrame, schema: Schema, monkeypatch: pytest.MonkeyPatch) -> ClickDataset:
    monkeypatch.setattr(loader_module, "BLOCK", 64)
    monkeypatch.setattr(loader_module, "WINDOW", 5)
    return prepare(config(write(frame, tmp_path / "log.parquet"), schema, tmp_path), progress=False).train


def _rows(loader: Loader, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [batch.rows.tolist() for batch in loader.epoch(epoch, start)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("size", [1, 100, 333, 5_000])
def test_an_epoch_holds_every_row_once(train: ClickDataset, shuffle: str, size: int) -> None:
    loader = Loader(train, size, shuffle=shuffle, seed=1, prefetch=0)
    batches = _rows(loader)
    assert len(batches) == len(loader)
    assert all(len(batch) == size for batch in batches[:-1])
    assert sorted(row for batch in batches for row in batch) == list(range(len(train)))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_an_epoch_can_be_entered_at_any_batch(train: ClickDataset, shuffle: str) -> None:
    loader = Loader(train, 100, shuffle=shuffle, seed=4)
    whole = list(loader.epoch(2))
    for start in (0, 1, 3, 7, len(loader) - 1, len(loader)):
        rest = list(loader.epoch(2, start))
        assert len(rest) == len(whole) - start
        for left, right in zip(whole[start:], rest, strict=True):
            same(left, right)


def test_blocks_of_any_order_can_be_entered_at_any_batch(train: ClickDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short last block lies in another window in each epoch."""
    monkeypatch.setattr(loader_module, "WINDOW", 2)
    monkeypatch.setattr(loader_module, "BLOCK", 48)
    assert len(train) % 48
    loader = Loader(train, 7, shuffle="blocks", seed=4, prefetch=0)
    for epoch in range(4):
        whole = [rows.tolist() for rows in loader._order(epoch, 0)]  # type: ignore[union-attr]
        for start in range(len(whole)):
            assert [rows.tolist() for rows in loader._order(epoch, start)] == whole[start:]  # type: ignore[union-attr]


@pytest.mark.parametrize("shuffle", ["blocks", "global"])
def test_orders_repeat_with_the_seed_and_differ_between_seeds_and_epochs(train: ClickDataset, shuffle: str) -> None:
    make = lambda seed: Loader(train, 100, shuffle=shuffle, seed=seed)  # noqa: E731
    first = _rows(make(1), 0)
    assert first == _rows(make(1), 0)
    assert first != _rows(make(1), 1)
    for epoch in (0, 1, 3):
        assert [rows.tolist() for rows in make(1).order(epoch)] == _rows(make(1), epoch)  # type: ignore[union-attr]
    assert first != _rows(make(2), 0)


def test_without_shuffle_rows_come_as_on_disk(train: ClickDataset) -> None:
    rows = [row for batch in _rows(Loader(train, 77)) for row in batch]
    assert rows == list(range(len(train)))


def test_blocks_mix_neighbours_but_read_whole_blocks(train: ClickDataset) -> None:
    rows = np.array([row for batch in _rows(Loader(train, 64, shuffle="blocks")) for row in batch])
    window = rows[: 5 * 64]
    blocks = np.unique(window // 64)
    assert len(blocks) <= 6
    assert (np.diff(window) != 1).mean() > 0.9


def test_drop_last_leaves_out_what_is_not_full(train: ClickDataset) -> None:
    for shuffle in SHUFFLES:
        loader = Loader(train, 300, shuffle=shuffle, drop_last=True)
        batches = _rows(loader)
        assert len(batches) == len(loader) == len(train) // 300
        assert {len(batch) for batch in batches} == {300}


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_reading_ahead_changes_nothing(train: ClickDataset, shuffle: str) -> None:
    for left, right in zip(
        Loader(train, 100, shuffle=shuffle, prefetch=0).epoch(),
        Loader(train, 100, shuffle=shuffle, prefetch=3).epoch(),
        strict=True,
    ):
        same(left, right)


def _threads() -> int:
    return sum(thread.name == "cordillera-loader" for thread in threading.enumerate())


def test_threads_end_with_the_iteration(train: ClickDataset) -> None:
    list(Loader(train, 100).epoch())
    assert _threads() == 0
    batches = Loader(train, 100).epoch()
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert _threads() == 0
    batches = Loader(train, 100).epoch()
    next(batches)
    del batches
    deadline = time.monotonic() + 5
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _threads() == 0


def test_an_error_while_reading_ahead_reaches_the_caller(train: ClickDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train.batch
    calls = 0

    def failing(rows: slice) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise DataError("the disk went away")
        return whole(rows)

    monkeypatch.setattr(train, "batch", failing)
    batches = Loader(train, 100, prefetch=2).epoch()
    next(batches)
    next(batches)
    with pytest.raises(DataError, match="the disk went away"):
        next(batches)
    assert _threads() == 0


def test_wrong_arguments_are_refused(train: ClickDataset) -> None:
    with pytest.raises(DataError, match="batch_size must be at least 1"):
        Loader(train, 0)
    with pytest.raises(DataError, match="unknown shuffle 'some'"):
        Loader(train, 1, shuffle="some")
    with pytest.raises(DataError, match="cannot start at"):
        Loader(train, 100).epoch(0, 10_000)
