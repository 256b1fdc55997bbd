"""The published layouts of Criteo and Avazu."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from cordillera.data.paths import expand_paths
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.logs.click_logs import AVAZU_CATEGORICAL, CRITEO_COLUMNS, guess_format
from cordillera.data.ranking.rows import raw_rows, read_rows
from cordillera.errors import DataError

from .test_datasets import same


def _criteo_lines(rows: int) -> list[str]:
    random = np.random.default_rng(5)
    lines = []
    for _ in range(rows):
        dense = ["" if random.random() < 0.2 else str(int(random.integers(-2, 500))) for _ in range(13)]
        ids = ["" if random.random() < 0.1 else f"{int(random.integers(0, 40)):08x}" for _ in range(26)]
        lines.append("\t".join([str(int(random.integers(0, 2))), *dense, *ids]))
    # A quotation mark in a raw log means itself.
    lines[7] = lines[7].rsplit("\t", 1)[0] + '\t"68fd1e64'
    return lines


def test_a_criteo_log_is_read_as_published(tmp_path: Path) -> None:
    lines = _criteo_lines(1_000)
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    setting = DataConfig(dataset="criteo", path=str(tmp_path / "train.txt"), cache_dir=str(tmp_path / "cache"))
    splits = prepare(setting, progress=False)
    assert splits.facts["split"] == "order"
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (800, 100, 100)
    labels = [int(line.split("\t")[0]) for line in lines]
    assert splits.train.labels[:, 0].tolist() == labels[:800]
    assert splits.test.labels[:, 0].tolist() == labels[900:]
    assert len(splits.features.dense) == 13
    assert len(splits.features.sparse) == 26
    first = lines[0].split("\t")
    raw = next(raw_rows(setting, "train"))
    assert [raw[0, name] for name in CRITEO_COLUMNS] == [value or None for value in first]
    blank = np.mean([line.split("\t")[1] == "" for line in lines])
    assert splits.facts["blanks"]["I1"] == pytest.approx(blank)


@pytest.mark.filterwarnings("ignore:.*has one value")
def test_a_criteo_test_file_without_labels_can_be_predicted_on(tmp_path: Path) -> None:
    lines = _criteo_lines(200)
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "test.txt").write_text("\n".join(line.split("\t", 1)[1] for line in lines) + "\n")
    setting = DataConfig(dataset="criteo", path=str(tmp_path / "train.txt"), cache_dir=str(tmp_path / "cache"))
    encoder = prepare(setting, progress=False).encoder
    [(labelled, _)] = list(read_rows(str(tmp_path / "train.txt"), setting))
    [(plain, place)] = list(read_rows(str(tmp_path / "test.txt"), setting))
    batches = [encoder.encode(rows, where=place.source, labels=False).batch() for rows in (labelled, plain)]
    same(*batches)


def test_a_criteo_row_with_a_field_too_few_is_named(tmp_path: Path) -> None:
    lines = _criteo_lines(300)
    lines[122] = lines[122].rsplit("\t", 1)[0]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    setting = DataConfig(dataset="criteo", path=str(tmp_path / "train.txt"), cache_dir=str(tmp_path / "c"))
    with pytest.raises(DataError, match="the row has 39 fields, 40 are expected") as caught:
        prepare(setting, progress=False)
    assert "line 123" in str(caught.value)


def _avazu_frame(rows: int) -> pl.DataFrame:
    random = np.random.default_rng(6)
    hours = np.sort(random.integers(0, 48, rows))
    columns: dict[str, object] = {
        "id": [f"{int(value)}" for value in random.integers(0, 10**18, rows)],
        "click": random.integers(0, 2, rows),
        "hour": [f"1410{21 + hour // 24:02d}{hour % 24:02d}" for hour in hours],
    }
    columns |= {name: [f"{int(v):x}" for v in random.integers(0, 30, rows)] for name in AVAZU_CATEGORICAL}
    return pl.DataFrame(columns).select("id", "click", "hour", *AVAZU_CATEGORICAL)


@pytest.mark.parametrize("compressed", [False, True])
def test_an_avazu_log_is_read_as_published(tmp_path: Path, compressed: bool) -> None:
    frame = _avazu_frame(2_000)
    path = tmp_path / ("train.csv.gz" if compressed else "train.csv")
    text = frame.write_csv().encode()
    path.write_bytes(gzip.compress(text) if compressed else text)
    setting = DataConfig(dataset="avazu", path=str(path), cache_dir=str(tmp_path / "cache"))
    splits = prepare(setting, progress=False)
    assert splits.facts["split"] == "time"
    expected = [int(datetime.strptime(hour, "%y%m%d%H").replace(tzinfo=UTC).timestamp()) for hour in frame["hour"]]
    times = np.concatenate([getattr(splits, name).timestamps for name in ("train", "validation", "test")])
    assert times.tolist() == expected
    hours, names = splits.test.segments("hour_of_day")
    assert [int(names[row]) for row in hours if row] == [
        int(hour[-2:]) for hour, row in zip(frame["hour"].to_list()[-len(splits.test) :], hours, strict=True) if row
    ]


def test_an_hour_that_is_none_is_named(tmp_path: Path) -> None:
    frame = _avazu_frame(100).with_columns(
        hour=pl.when(pl.int_range(pl.len()) == 40).then(pl.lit("14102199")).otherwise(pl.col("hour"))
    )
    frame.write_csv(tmp_path / "train.csv")
    with pytest.raises(DataError, match="'14102199' does not read YYMMDDHH") as caught:
        prepare(DataConfig(dataset="avazu", path=str(tmp_path / "train.csv"), cache_dir=str(tmp_path)), progress=False)
    assert "line 42, column 'hour'" in str(caught.value)


def test_names_tell_formats() -> None:
    names = {"a.csv": "csv", "a.CSV.gz": "csv", "a.tsv": "tsv", "a.txt": "tsv", "a.parquet": "parquet"}
    assert {name: guess_format(Path(name)) for name in names} == names


def test_folders_and_patterns_are_files_in_order(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", ".hidden", "_done"):
        (tmp_path / name).touch()
    assert [path.name for path in expand_paths(str(tmp_path))] == ["a.csv", "b.csv"]
    assert [path.name for path in expand_paths(str(tmp_path / "*.csv"))] == ["a.csv", "b.csv"]
    with pytest.raises(DataError, match="no file fits the pattern"):
        expand_paths(str(tmp_path / "*.tsv"))
