"""Files to splits: what is in the cache is what was in the files, in the split that it belongs to."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from cordillera.data.ranking.cache import SPLITS, ClickDataset, open_splits
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.exports import export
from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, ListFeature, RankingBatch, Schema
from cordillera.data.ranking.loader import Loader
from cordillera.data.ranking.logs import click_logs
from cordillera.data.ranking.rows import configure, raw_rows, read_rows
from cordillera.errors import DataError

from .conftest import config, make_frame, write

pytestmark = pytest.mark.filterwarnings("error")


def same(left: RankingBatch, right: RankingBatch, *, rows: bool = True) -> None:
    """All tensors are equal, bit for bit."""
    for name in ("dense", "labels", "weights", "groups", "timestamps", *(("rows",) if rows else ())):
        a, b = getattr(left, name), getattr(right, name)
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name
    assert left.sparse.keys == right.sparse.keys
    assert torch.equal(left.sparse.values, right.sparse.values)
    assert torch.equal(left.sparse.offsets, right.sparse.offsets)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("split", ["time", "order", "random"])
def test_encoding_the_raw_rows_of_a_split_gives_the_cached_split(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema, kind: str, split: str
) -> None:
    setting = config(write(frame, tmp_path / f"log.{kind}"), schema, tmp_path, split=split)
    splits = prepare(setting, progress=False)
    total = 0
    for name in SPLITS:
        dataset: ClickDataset = getattr(splits, name)
        raw = pl.concat(raw_rows(setting, name))
        batch = dataset.batch(slice(None))
        batch.sparse.validate()
        same(splits.encoder.encode(raw).batch(), batch, rows=False)
        total += len(dataset)
    assert total == len(frame)
    assert splits.facts["rows"] == {name: len(getattr(splits, name)) for name in SPLITS}


def test_all_formats_give_the_same_splits(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    batches = []
    for kind in ("csv", "tsv", "parquet"):
        splits = prepare(config(write(frame, tmp_path / f"log.{kind}"), schema, tmp_path), progress=False)
        batches.append(splits.test.batch(slice(None)))
    same(batches[0], batches[1])
    same(batches[0], batches[2])


@pytest.mark.cases(1)
@pytest.mark.parametrize("rows", [50, 777])
def test_splits_do_not_depend_on_the_size_of_chunks(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(frame, tmp_path / "log.parquet")
    for split in ("time", "random"):
        whole = prepare(config(path, schema, tmp_path / "a", split=split), progress=False)
        monkeypatch.setattr(click_logs, "CHUNK_ROWS", rows)
        parts = prepare(config(path, schema, tmp_path / "b", split=split), progress=False)
        monkeypatch.undo()
        for name in SPLITS:
            left, right = getattr(whole, name).batch(slice(None)), getattr(parts, name).batch(slice(None))
            torch.testing.assert_close(left.dense, right.dense)
            assert torch.equal(left.sparse.values, right.sparse.values)
            assert torch.equal(left.labels, right.labels)


def test_several_files_are_one_log(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    parts = [write(frame[:700], tmp_path / "parts" / "a.csv") if (tmp_path / "parts").mkdir() is None else None]
    parts.append(write(frame[700:], tmp_path / "parts" / "b.csv"))
    whole = prepare(config(write(frame, tmp_path / "log.csv"), schema, tmp_path), progress=False)
    for path in (str(tmp_path / "parts"), str(tmp_path / "parts" / "*.csv")):
        joined = prepare(config(Path(path), schema, tmp_path, format="csv"), progress=False)
        same(whole.test.batch(slice(None)), joined.test.batch(slice(None)))


def test_a_split_by_time_has_no_overlap_and_is_in_time_order(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema
) -> None:
    splits = prepare(config(write(frame, tmp_path / "log.parquet"), schema, tmp_path), progress=False)
    times = [getattr(splits, name).timestamps for name in SPLITS]
    assert all((np.diff(one) >= 0).all() for one in times)
    assert times[0].max() < times[1].min()
    assert times[1].max() < times[2].min()
    assert abs(len(splits.train) / len(frame) - 0.8) < 0.01


def test_rows_of_one_second_stay_together(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    coarse = frame.with_columns(pl.col("time") // 10_000 * 10_000)
    splits = prepare(config(write(coarse, tmp_path / "log.parquet"), schema, tmp_path), progress=False)
    seen = [set(getattr(splits, name).timestamps.tolist()) for name in SPLITS]
    assert not seen[0] & seen[1]
    assert not seen[1] & seen[2]


def test_rows_out_of_time_order_are_refused_with_their_line(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema
) -> None:
    times = frame["time"].to_list()
    times[500] = times[0] - 5
    path = write(frame.with_columns(pl.Series("time", times)), tmp_path / "log.csv")
    with pytest.raises(DataError, match="earlier than that of the row before") as caught:
        prepare(config(path, schema, tmp_path), progress=False)
    assert "log.csv, line 502, column 'time'" in str(caught.value)
    assert 'unordered = "sort"' in str(caught.value)
    _nothing_is_left(tmp_path)


def test_rows_out_of_time_order_are_sorted_when_asked(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    ordered = prepare(config(write(frame, tmp_path / "a.parquet"), schema, tmp_path), progress=False)
    mixed = frame.sample(fraction=1, shuffle=True, seed=1)
    setting = config(write(mixed, tmp_path / "b.parquet"), schema, tmp_path, unordered="sort")
    splits = prepare(setting, progress=False)
    for name in SPLITS:
        dataset = getattr(splits, name)
        assert (np.diff(dataset.timestamps) >= 0).all()
        assert len(dataset) == len(getattr(ordered, name))
        same(splits.encoder.encode(pl.concat(raw_rows(setting, name))).batch(), dataset.batch(slice(None)), rows=False)


def test_the_encoder_sees_training_rows_only(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    late = frame.with_columns(
        user=pl.when(pl.col("row") >= 1_900).then(pl.lit("newcomer")).otherwise(pl.col("user")),
        price=pl.when(pl.col("row") >= 1_900).then(1e9).otherwise(pl.col("price")),
    )
    splits = prepare(config(write(late, tmp_path / "log.parquet"), schema, tmp_path), progress=False)
    assert "newcomer" not in splits.encoder.names("user")
    assert splits.encoder.dense_state["price"]["mean"] < 5
    assert splits.facts["unseen"]["test"]["user"] > 0.4


def test_the_second_call_reads_no_file(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = config(write(frame, tmp_path / "log.csv"), schema, tmp_path)
    first = prepare(setting, progress=False)
    monkeypatch.setattr(click_logs.FileLog, "chunks", lambda *_: pytest.fail("the log was read again"))
    second = prepare(setting, progress=False)
    assert first.folder == second.folder
    assert prepare(setting.model_copy(update={"batch_size": 7}), progress=False).folder == first.folder


def test_other_settings_or_files_are_prepared_anew(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    path = write(frame, tmp_path / "log.csv")
    folders = {
        prepare(config(path, schema, tmp_path, split=split), progress=False).folder for split in ("time", "random")
    }
    write(frame.with_columns(click=1 - pl.col("click")), path)
    folders.add(prepare(config(path, schema, tmp_path), progress=False).folder)
    assert len(folders) == 3


def test_tasks_are_a_choice_of_the_labels(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    path = write(frame, tmp_path / "log.csv")
    both = prepare(config(path, schema, tmp_path), progress=False)
    one = prepare(config(path, schema, tmp_path, tasks=("buy",)), progress=False)
    assert one.folder == both.folder
    assert one.features.tasks == ("buy",)
    assert torch.equal(one.test.batch(slice(0, 9)).labels[:, 0], both.test.batch(slice(0, 9)).labels[:, 1])
    with pytest.raises(DataError, match="tasks must be a choice of"):
        prepare(config(path, schema, tmp_path, tasks=("bye",)), progress=False)


def test_segments_name_the_values_of_every_row(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    setting = config(write(frame, tmp_path / "log.parquet"), schema, tmp_path)
    splits = prepare(setting, progress=False)
    numbers, names = splits.test.segments("user")
    raw = pl.concat(raw_rows(setting, "test"))["user"].to_list()
    known = set(names)
    assert [names[number] for number in numbers] == [user if user in known else "<other>" for user in raw]
    with pytest.raises(DataError, match="not a categorical feature"):
        splits.test.segments("tags")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_exported_rows_encode_to_the_cached_rows(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema, suffix: str
) -> None:
    setting = config(write(frame, tmp_path / "log.parquet"), schema, tmp_path)
    splits = prepare(setting, progress=False)
    out = tmp_path / f"out{suffix}"
    assert export(setting, out, rows=50) == 50
    [(rows, place)] = list(read_rows(str(out), setting))
    assert rows["row"].cast(pl.Int64).to_list() == frame["row"].to_list()[-len(splits.test) :][:50]
    encoded = splits.encoder.encode(rows, where=place.source)
    same(encoded.batch(), splits.test.batch(slice(0, 50)), rows=False)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_lists_of_numbers_are_not_exported_as_text(tmp_path: Path) -> None:
    log = pl.DataFrame({"v": [[1.0, 2.0]] * 30, "click": [0, 1] * 15})
    wide = Schema(dense=(DenseFeature(name="v", width=2),), labels=("click",))
    setting = config(write(log, tmp_path / "log.parquet"), wide, tmp_path)
    with pytest.raises(DataError, match="'v' holds lists of numbers") as raised:
        export(setting, tmp_path / "out.csv")
    assert "parquet" in str(raised.value.remedy)
    assert export(setting, tmp_path / "out.parquet")


@pytest.mark.parametrize(
    ("suffix", "values"),
    [
        (".csv", {"v": "1.5", "shop": "a", "tags": "x|y", "click": "1"}),
        (".parquet", {"v": 1.5, "shop": "a", "tags": ["x", "y"], "click": 1}),
    ],
)
def test_columns_without_values_in_the_first_file_are_exported(
    tmp_path: Path, suffix: str, values: dict[str, object]
) -> None:
    clicks, empty = [0, 1] * 15, pa.nulls(30)
    first = {"v": empty, "shop": empty, "tags": empty, "click": clicks}
    second = {"v": [1.5] * 30, "shop": ["a"] * 30, "tags": [["x", "y"]] * 30, "click": clicks}
    paths = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    for path, columns in zip(paths, (first, second), strict=True):
        pyarrow.parquet.write_table(pa.table(columns), path)
    roles = Schema(
        dense=(DenseFeature(name="v"),),
        categorical=(CategoricalFeature(name="shop"),),
        lists=(ListFeature(name="tags"),),
        labels=("click",),
    )
    setting = config(paths, roles, tmp_path, split="order")
    out = tmp_path / f"out{suffix}"
    assert export(setting, out, split="train") == 48
    rows = pl.concat(frame.select(list(values)) for frame, _ in read_rows(str(out), setting))
    assert not any(rows.row(0)[:3])
    assert rows.row(47, named=True) == values


def test_a_column_of_text_and_of_lists_is_not_exported(tmp_path: Path) -> None:
    paths = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    for path, tags in zip(paths, (["x|y"] * 30, [["x", "y"]] * 30), strict=True):
        pl.DataFrame({"tags": tags, "click": [0, 1] * 15}).write_parquet(path)
    setting = config(paths, Schema(lists=(ListFeature(name="tags"),), labels=("click",)), tmp_path, split="order")
    with pytest.raises(DataError, match="a column in several types"):
        export(setting, tmp_path / "out.parquet", split="train")


def test_lists_of_a_fixed_size_are_joined_as_others(tmp_path: Path) -> None:
    log = pl.DataFrame(
        {"tags": [["x", "y"]] * 30, "click": [0, 1] * 15}, schema_overrides={"tags": pl.Array(pl.String, 2)}
    )
    log.write_parquet(tmp_path / "log.parquet")
    setting = config(
        tmp_path / "log.parquet", Schema(lists=(ListFeature(name="tags"),), labels=("click",)), tmp_path, split="order"
    )
    assert export(setting, tmp_path / "out.csv", split="train") == 24
    [(rows, _)] = list(read_rows(str(tmp_path / "out.csv"), setting))
    assert rows["tags"].to_list() == ["x|y"] * 24


def test_exports_of_unknown_kinds_are_refused(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    setting = config(write(frame, tmp_path / "log.parquet"), schema, tmp_path)
    with pytest.raises(DataError, match=r"end the name in \.csv or \.parquet"):
        export(setting, tmp_path / "out.xlsx")


def _nothing_is_left(tmp_path: Path) -> None:
    prepared = tmp_path / "cache" / "prepared"
    assert not prepared.exists() or list(prepared.iterdir()) == []


def _refused(path: Path, schema: Schema, tmp_path: Path, message: str, **rest: object) -> str:
    with pytest.raises(DataError, match=message) as caught:
        prepare(config(path, schema, tmp_path, **rest), progress=False)
    _nothing_is_left(tmp_path)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["csv", "tsv"])
@pytest.mark.parametrize("fields", [-1, 1])
def test_a_row_with_too_many_or_too_few_fields_is_named(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema, kind: str, fields: int
) -> None:
    path = write(frame, tmp_path / f"log.{kind}")
    separator = "\t" if kind == "tsv" else ","
    lines = path.read_text().splitlines()
    width = len(lines[0].split(separator))
    lines[99] = lines[99] + separator + "x" if fields > 0 else lines[99].rsplit(separator, 1)[0]
    path.write_text("\n".join(lines) + "\n")
    text = _refused(path, schema, tmp_path, f"the row has {width + fields} fields, {width} are expected")
    assert f"log.{kind}, line 100" in text


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_bad_value_is_named_and_nothing_is_left(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema, kind: str
) -> None:
    broken = frame.with_columns(click=pl.when(pl.col("row") == 1_500).then(3).otherwise(pl.col("click")))
    text = _refused(write(broken, tmp_path / f"log.{kind}"), schema, tmp_path, "a label is 3, labels must be 0 or 1")
    assert ("line 1502" if kind == "csv" else "row 1501") in text


def test_a_bad_value_in_a_random_split_is_named_too(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    for row in (3, 1_234):
        broken = frame.with_columns(price=pl.when(pl.col("row") == row).then(float("inf")).otherwise(pl.col("price")))
        text = _refused(write(broken, tmp_path / "log.csv"), schema, tmp_path, "infinite", split="random")
        assert f"line {row + 2}, column 'price'" in text


def test_labels_that_are_not_known_are_left_blank_if_the_schema_says_so(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema
) -> None:
    some = frame.with_columns(buy=pl.when(pl.col("row") % 3 > 0).then(pl.col("buy")))
    path = write(some, tmp_path / "log.csv")
    text = _refused(path, schema, tmp_path, "a label is blank, labels must be 0 or 1")
    assert "data.schema.missing_labels = true" in text
    splits = prepare(config(path, schema.model_copy(update={"missing_labels": True}), tmp_path), progress=False)
    facts, labels = splits.facts, torch.cat([batch.labels for batch in Loader(splits.train, 100).epoch()])
    known = ~labels.isnan()
    assert known[:, 0].all()
    assert int(known[:, 1].sum()) == pytest.approx(2 * len(labels) / 3, abs=1)
    assert facts["positives"]["train"]["buy"] == pytest.approx(float(labels[known[:, 1], 1].mean()))
    assert facts["positives"]["train"]["click"] == pytest.approx(float(labels[:, 0].mean()))


def test_empty_files_are_refused(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    _refused(empty, schema, tmp_path, "the file is empty")
    for kind in ("csv", "parquet"):
        _refused(write(frame.head(0), tmp_path / f"head.{kind}"), schema, tmp_path, "the file holds no rows")


def test_what_is_no_parquet_file_is_refused(tmp_path: Path, schema: Schema, frame: pl.DataFrame) -> None:
    path = write(frame, tmp_path / "log.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    _refused(path, schema, tmp_path, "not a whole Parquet file")


def test_a_missing_file_column_or_format_is_named(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    _refused(tmp_path / "none.csv", schema, tmp_path, "there is no such file")
    for kind in ("csv", "parquet"):
        path = write(frame.drop("place"), tmp_path / f"log.{kind}")
        _refused(path, schema, tmp_path, "column 'place' is missing")
    other = write(frame, tmp_path / "log.csv").rename(tmp_path / "log.dat")
    _refused(other, schema, tmp_path, "the name does not tell the format")


def test_text_that_is_not_utf8_is_refused(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    path = write(frame, tmp_path / "log.csv")
    path.write_bytes(path.read_bytes().replace(b"u1", b"\xff1"))
    _refused(path, schema, tmp_path, "not UTF-8")


def test_one_class_in_training_is_refused(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    for value in (0, 1):
        path = write(frame.with_columns(buy=pl.lit(value)), tmp_path / "log.parquet")
        _refused(path, schema, tmp_path, f"training labels of 'buy' are {value}: one class only")


def test_an_empty_split_is_refused(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    path = write(frame.with_columns(time=pl.lit(5)), tmp_path / "log.parquet")
    _refused(path, schema, tmp_path, "split is empty")


def test_a_feature_with_one_value_is_warned_of_by_name(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    path = write(frame.with_columns(price=pl.lit(2.0), place=pl.lit(3)), tmp_path / "log.parquet")
    with pytest.warns(UserWarning, match="has one value") as caught:
        splits = prepare(config(path, schema, tmp_path), progress=False)
    assert sorted(str(w.message).split("'")[1] for w in caught) == ["place", "price"]
    assert len(splits.facts["warnings"]) == 2
    assert np.isfinite(splits.train.batch(slice(None)).dense.numpy()).all()


def test_a_full_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from cordillera.data.ranking import cache

    written = 0

    def full(file: object, array: np.ndarray) -> None:
        nonlocal written
        written += 1
        if written > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(np.ascontiguousarray(array).data)  # type: ignore[attr-defined]

    monkeypatch.setattr(cache, "_write", full)
    text = _refused(write(frame, tmp_path / "log.parquet"), schema, tmp_path, "the disk is full")
    assert "free some space" in text
    assert "cache" in text


def test_an_interrupted_preparation_leaves_nothing(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cordillera.data.ranking import cache

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.CacheWriter, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(config(write(frame, tmp_path / "log.parquet"), schema, tmp_path), progress=False)
    _nothing_is_left(tmp_path)


def test_every_damaged_file_of_the_cache_is_refused_by_name(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema
) -> None:
    splits = prepare(config(write(frame, tmp_path / "log.parquet"), schema, tmp_path), progress=False)
    for path in sorted(splits.folder.iterdir()):
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 4
        for damaged in (bytes(flipped), whole[:-1]):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=path.name) as caught:
                open_splits(splits.folder)
            assert "prepare the data again" in str(caught.value)
        path.write_bytes(whole)
    open_splits(splits.folder)


def test_batches_by_slice_and_by_position_agree(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    train = prepare(config(write(frame, tmp_path / "log.parquet"), schema, tmp_path), progress=False).train
    same(train.batch(slice(10, 60)), train.batch(np.arange(10, 60)))
    same(train.batch(slice(60, 10, -2)), train.batch(np.arange(60, 10, -2)))
    assert len(train.batch(slice(5, 5))) == 0
    assert len(train.batch(slice(len(train) - 3, len(train) + 100))) == 3
    with pytest.raises(DataError, match="rows must lie in"):
        train.batch(np.array([len(train)]))


def test_a_batch_shares_no_memory_with_the_file(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    train = prepare(config(write(frame, tmp_path / "log.parquet"), schema, tmp_path), progress=False).train
    batch = train.batch(slice(0, 10))
    before = train.batch(slice(0, 10))
    batch.dense.zero_()
    batch.sparse.values.zero_()
    same(before, train.batch(slice(0, 10)))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dataset": "movielens"}, "unknown dataset 'movielens'"),
        ({"dataset": None}, "path and schema of your own"),
        ({"dataset": "criteo"}, "download train.txt from .*, and name it by data.path"),
        ({"dataset": "adult", "path": "x.csv"}, "brings its own rows"),
        ({"fractions": (0.5, 0.1, 0.1)}, "add up to 1"),
        ({"batch_sise": 3}, "Extra inputs"),
    ],
)
def test_wrong_settings_say_what_is_wrong(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**setting)  # type: ignore[arg-type]


def test_an_unknown_name_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(DataError, match=r"'movielens-100k'\?\n  -> choose one of .*smollm2"):
        configure("movielens-100")
    with pytest.raises(DataError, match=r"is fetched, and takes no files\n  -> leave --path out"):
        configure("movielens-100k", ["ads.csv"])


def test_preparing_twice_at_once_is_harmless(tmp_path: Path, schema: Schema) -> None:
    from concurrent.futures import ThreadPoolExecutor

    setting = config(write(make_frame(500, 1), tmp_path / "log.parquet"), schema, tmp_path)
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: prepare(setting, progress=False), range(2))
    same(first.test.batch(slice(None)), second.test.batch(slice(None)))
    assert len(list((tmp_path / "cache" / "prepared").iterdir())) == 1
