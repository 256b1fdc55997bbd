"""Tests of work that threads do ahead: order, errors, early ends; and of logs that threads read."""

from __future__ import annotations

import gzip
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from cordillera.data import ahead
from cordillera.data.ahead import map_ahead
from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, Schema
from cordillera.data.ranking.logs import click_logs, delimited
from cordillera.data.ranking.logs.click_logs import FileLog
from cordillera.errors import DataError

SCHEMA = Schema(dense=(DenseFeature(name="x"),), categorical=(CategoricalFeature(name="a"),), labels=("y",))


def of_threads(threads: int, monkeypatch: pytest.MonkeyPatch, block: int = 200) -> None:
    monkeypatch.setattr(click_logs, "reading_threads", lambda: threads)
    monkeypatch.setattr(delimited, "BLOCK_BYTES", block)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("before", [None, 1, 3])
def test_results_are_in_order_and_as_many_are_computed_ahead_as_asked(threads: int, before: int | None) -> None:
    begun: list[int] = []

    def slow(item: int) -> int:
        begun.append(item)
        time.sleep(0.002 * (item % 3))
        return item * item

    found = []
    for result in map_ahead(slow, range(40), threads=threads, ahead=before):
        found.append(result)
        assert len(begun) <= len(found) + (before or threads)
    assert found == [item * item for item in range(40)]
    assert list(map_ahead(slow, [], threads=threads)) == []


def test_an_error_comes_after_the_results_before_it() -> None:
    def refuses(item: int) -> int:
        if item >= 5:
            raise DataError(f"item {item}")
        return item

    def items() -> Iterator[int]:
        yield from range(3)
        raise DataError("no more items")

    for results, message in (
        (map_ahead(refuses, range(20), threads=4), "item 5"),
        (map_ahead(refuses, items(), threads=4), "no more"),
    ):
        found: list[int] = []
        with pytest.raises(DataError, match=message):
            found.extend(results)
        assert found == list(range(5 if message == "item 5" else 3))


def test_threads_end_with_the_iteration() -> None:
    before = threading.active_count()
    results = map_ahead(lambda item: item, range(10**9), threads=3)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert threading.active_count() > before
    results.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_a_quota_of_the_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "usable_cores", lambda: 64)
    for share, expected in ((None, ahead.MOST_WORKERS), (2.5, 2), (0.3, 1)):
        monkeypatch.setattr(ahead, "quota", lambda share=share: share)
        assert ahead.reading_threads() == expected


def logs(folder: Path, rng: random.Random, kind: str) -> list[Path]:
    paths = []
    for number in range(rng.randint(1, 6)):
        rows = rng.randint(1, 60)
        frame = pl.DataFrame(
            {
                "y": [rng.randint(0, 1) for _ in range(rows)],
                "a": [f"a{rng.randint(0, 9)}" for _ in range(rows)],
                "x": [rng.random() for _ in range(rows)],
            }
        )
        day = folder / f"day={number}"
        day.mkdir(exist_ok=True)
        path = day / f"part.{kind}"
        if kind == "parquet":
            frame.write_parquet(path, row_group_size=16)
        elif kind == "csv.gz":
            path.write_bytes(gzip.compress(frame.write_csv().encode()))
        else:
            path.write_text(frame.write_csv())
        paths.append(path)
    return paths


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_threads_read_the_same_rows_at_the_same_places(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    for _ in range(5):
        log = FileLog(SCHEMA, tuple(logs(tmp_path, rng, kind)), "parquet" if kind == "parquet" else "csv")
        found = []
        for threads in (1, 4):
            of_threads(threads, monkeypatch)
            chunks = list(log.chunks())
            rows = [(row, place.at(at, "x")) for frame, place in chunks for at, row in enumerate(frame.rows())]
            found.append((chunks[0][0].columns, rows))
        assert found[0] == found[1]
        assert {"day", "x"} <= set(found[0][0])


def test_the_first_wrong_line_is_named_however_many_threads_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    for _ in range(10):
        paths = logs(tmp_path, rng, "csv")
        wrong = rng.randrange(len(paths))
        lines = paths[wrong].read_text().splitlines()
        at = rng.randrange(1, len(lines))
        for later in {at, len(lines) - 1}:
            lines[later] += ",1"
        paths[wrong].write_text("\n".join(lines))
        (tmp_path / "empty.csv").write_text("y,a,x\n")
        for threads in (1, 4):
            of_threads(threads, monkeypatch)
            with pytest.raises(DataError, match="the row has 4 fields") as error:
                list(FileLog(SCHEMA, (*paths, tmp_path / "empty.csv"), "csv").chunks())
            assert str(error.value).startswith(f"{paths[wrong]}, line {at + 1}:")
        paths[wrong].write_text("y,a,x\n")
        with pytest.raises(DataError, match="the file holds no rows"):
            list(FileLog(SCHEMA, tuple(paths), "csv").chunks())


def test_lines_longer_than_a_block_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.csv"
    path.write_text("y,a,x\n1,a,1\n0," + "b" * 1000 + ",2\n1,c,3\n")
    of_threads(2, monkeypatch, 64)
    assert pl.concat([frame for frame, _ in FileLog(SCHEMA, (path,), "csv").chunks()])["x"].to_list() == ["1", "2", "3"]
    monkeypatch.setattr(delimited, "LINE_BYTES", 512)
    with pytest.raises(DataError, match="a line is longer than 512 bytes"):
        list(FileLog(SCHEMA, (path,), "csv").chunks())
