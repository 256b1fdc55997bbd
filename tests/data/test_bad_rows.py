"""Rows that used to be lost, changed or to end in a traceback."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from cordillera.data.ranking.cache import SPLITS, open_splits
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, ListFeature, Schema
from cordillera.data.ranking.logs.click_logs import CRITEO_COLUMNS, FileLog
from cordillera.data.ranking.rows import raw_rows, read_rows
from cordillera.errors import DataError
from cordillera.files import parse_toml, read_sealed, read_text, sealed_json
from tests.fuzzing import damaged, flips, survives

from .conftest import config, write
from .test_click_logs import _avazu_frame, _criteo_lines
from .test_delimited import WORDS, reference

SMALL = Schema(
    dense=(DenseFeature(name="x", transform="standardise"),),
    categorical=(CategoricalFeature(name="user"),),
    lists=(ListFeature(name="tags"),),
    labels=("click",),
)


def _small(rows: int = 60) -> pl.DataFrame:
    random = np.random.default_rng(1)
    return pl.DataFrame(
        {
            "x": random.standard_normal(rows),
            "user": random.integers(0, 9, rows),
            "tags": [["a", "b"][: 1 + row % 2] for row in range(rows)],
            "click": np.arange(rows) % 2,
            "time": 1_700_000_000_000_000_000 + np.arange(rows),
            "weight": np.ones(rows),
        }
    )


def _with(**bookkeeping: str) -> Schema:
    return SMALL.model_copy(update=bookkeeping)


def _refused(frame: pl.DataFrame | pa.Table, schema: Schema, tmp_path: Path, message: str, **rest: object) -> str:
    path = tmp_path / "log.parquet"
    pq.write_table(frame.to_arrow() if isinstance(frame, pl.DataFrame) else frame, path)
    with pytest.raises(DataError, match=message) as caught:
        prepare(config(path, schema, tmp_path, split="random", **rest), progress=False)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_an_unclosed_quotation_mark_is_named_and_swallows_no_row(tmp_path: Path, kind: str) -> None:
    path = write(_small().select("x", "user", "click"), tmp_path / f"log.{kind}")
    lines = path.read_text().splitlines()
    lines[40] = lines[40].rsplit("\t" if kind == "tsv" else ",", 1)[0] + ("\t" if kind == "tsv" else ",") + '"1'
    path.write_text("\n".join(lines) + "\n")
    schema = Schema(dense=SMALL.dense, categorical=SMALL.categorical, labels=("click",))
    with pytest.raises(DataError, match="opens a field that does not end in its line") as caught:
        prepare(config(path, schema, tmp_path), progress=False)
    assert f"log.{kind}, line 41, character" in str(caught.value)
    with pytest.raises(DataError, match="line 41"):
        list(read_rows(str(path), config(path, schema, tmp_path)))


def test_blank_lines_do_not_move_the_line_that_an_error_names(tmp_path: Path) -> None:
    schema = Schema(dense=SMALL.dense, categorical=SMALL.categorical, labels=("click",))
    lines = write(_small().select("x", "user", "click"), tmp_path / "log.csv").read_text().splitlines()
    lines[1:1] = ["", ""]
    lines[30] = lines[30].rsplit(",", 1)[0] + ",7"
    (tmp_path / "log.csv").write_text("\r\n".join(lines) + "\r\n\r\n")
    for split in ("random", "order"):
        with pytest.raises(DataError, match="a label is 7") as caught:
            prepare(config(tmp_path / "log.csv", schema, tmp_path, split=split), progress=False)
        assert "line 31, column 'click'" in str(caught.value)
    lines[30] = lines[30].replace(",7", ",1")
    lines[20] = "1e39" + lines[20][lines[20].index(",") :]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="1e\\+39 does not fit into 32 bits") as caught:
        prepare(config(tmp_path / "log.csv", schema, tmp_path, fractions=(1.0, 0.0, 0.0)), progress=False)
    assert "line 21, column 'x'" in str(caught.value)


def test_groups_beyond_63_bits_stay_different_and_blank_ones_are_one(tmp_path: Path) -> None:
    ids = [2**64 - 1, 2**63, 5, None, None, 2**63] * 10
    frame = _small().with_columns(pl.Series("group", ids, dtype=pl.UInt64))
    frame.write_parquet(tmp_path / "log.parquet")
    setting = config(tmp_path / "log.parquet", _with(group="group"), tmp_path, split="order")
    groups = prepare(setting, progress=False).train.batch(slice(0, 6)).groups
    assert groups is not None
    assert len(set(groups.tolist())) == 4
    assert groups[1] == groups[5]
    assert groups[3] == groups[4]
    # A chunk without blanks numbers its groups as one with blanks does.
    encoder = Encoder.fit(_with(group="group"), [frame])
    whole, part = encoder.encode(frame).groups, encoder.encode(frame[:3]).groups
    assert whole is not None
    assert part is not None
    assert whole[:3].tolist() == part.tolist()


@pytest.mark.parametrize("value", [1e30, 2.0**53, float("inf"), float("nan"), 1.5])
@pytest.mark.parametrize("column", ["user", "tags"])
def test_a_number_that_is_no_id_is_refused(tmp_path: Path, value: float, column: str) -> None:
    values = [value if row == 7 else 1.0 for row in range(60)]
    series = pl.Series(column, values if column == "user" else [[v] for v in values])
    text = _refused(_small().with_columns(series), SMALL, tmp_path, "is not an id")
    assert f"row 8, column '{column}'" in text


def test_columns_of_one_name_and_unreadable_types_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = _small().to_arrow()
    twice = pa.Table.from_arrays([*table.columns, table["x"]], names=[*table.column_names, "x"])
    _refused(twice, SMALL, tmp_path, "stand twice: \\['x'\\]")
    wide = pa.array([Decimal(row) for row in range(60)], pa.decimal256(60, 2))
    text = _refused(table.set_column(0, "x", wide), SMALL, tmp_path, "column 'x' holds decimal256")
    assert "at most 64 bits" in text
    pq.write_table(table.append_column("wide", wide), tmp_path / "log.parquet")
    [(frame, _)] = read_rows(str(tmp_path / "log.parquet"), config(tmp_path / "log.parquet", SMALL, tmp_path))
    assert "wide" not in frame.columns
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize("weight", [1e300, 1e39, 1e-40, -1.0, float("inf"), float("nan")])
def test_a_weight_beyond_float32_is_refused(tmp_path: Path, weight: float) -> None:
    frame = _small().with_columns(weight=pl.when(pl.int_range(60) == 30).then(weight).otherwise(1.0))
    text = _refused(frame, _with(weight="weight"), tmp_path, "weights must be 0 or from 1e-30 to 1e\\+30")
    assert "row 31, column 'weight'" in text


def test_weights_that_are_all_zero_are_refused(tmp_path: Path) -> None:
    _refused(_small().with_columns(weight=0.0), _with(weight="weight"), tmp_path, "training weights of 'weight' are 0")


def test_a_large_value_is_blamed_on_its_own_row(tmp_path: Path) -> None:
    frame = _small().with_columns(x=pl.when(pl.int_range(60) == 44).then(1e300).otherwise(pl.col("x")))
    assert "row 45, column 'x'" in _refused(frame, SMALL, tmp_path, "1e\\+300 does not fit into 32 bits")


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_large_numbers_keep_their_order(tmp_path: Path, kind: str) -> None:
    path, schema = write(_small(), tmp_path / f"log.{kind}"), _with(timestamp="time", timestamp_unit="s")
    splits = prepare(config(path, schema, tmp_path), progress=False)
    times = np.concatenate([getattr(splits, name).timestamps for name in SPLITS])
    assert times.tolist() == _small()["time"].to_list()
    assert [len(getattr(splits, name)) for name in SPLITS] == [48, 6, 6]
    late = _small().with_columns(pl.col("time").reverse())
    with pytest.raises(DataError, match="earlier than that of the row before") as caught:
        prepare(
            config(write(late, tmp_path / f"late.{kind}"), _with(timestamp="time", timestamp_unit="s"), tmp_path),
            progress=False,
        )
    assert ("row 2" if kind == "parquet" else "line 3") in str(caught.value)


@pytest.mark.parametrize("value", [1e19, 2.0**63, -1e19, float("inf")])
@pytest.mark.parametrize("unordered", ["sort", "refuse"])
def test_a_timestamp_beyond_64_bits_is_refused(tmp_path: Path, value: float, unordered: str) -> None:
    frame = _small().with_columns(time=pl.when(pl.int_range(60) == 59).then(value).otherwise(pl.col("time") * 1.0))
    schema = _with(timestamp="time")
    for kind in ("parquet", "csv"):
        path = write(frame, tmp_path / f"log.{kind}")
        with pytest.raises(DataError, match="is not a timestamp") as caught:
            prepare(config(path, schema, tmp_path, unordered=unordered), progress=False)
        assert "column 'time'" in str(caught.value)


def test_a_list_that_is_always_empty_is_warned_of(tmp_path: Path) -> None:
    frame = _small().with_columns(tags=pl.lit([], dtype=pl.List(pl.String)))
    frame.write_parquet(tmp_path / "log.parquet")
    with pytest.warns(UserWarning, match="list feature 'tags' is empty in all training rows"):
        prepare(config(tmp_path / "log.parquet", SMALL, tmp_path, split="random"), progress=False)


@pytest.mark.parametrize("encoding", ["vocabulary", "hash", "identity"])
@pytest.mark.parametrize("trained", ["42", "42.0"])
def test_ids_mean_the_same_with_and_without_a_point(tmp_path: Path, encoding: str, trained: str) -> None:
    """Pandas writes whole numbers of a column with gaps as 42.0."""
    size = None if encoding == "vocabulary" else 100
    schema = Schema(
        categorical=(CategoricalFeature(name="user", encoding=encoding, num_embeddings=size),),  # type: ignore[arg-type]
        lists=(ListFeature(name="seen", table="user", encoding=encoding, num_embeddings=size),),  # type: ignore[arg-type]
        labels=("click",),
    )
    ids = ["0", "7", "42", "40", "99"]
    other = [f"{one}.0" for one in ids]
    both = [pl.DataFrame({"user": one, "seen": ["|".join(one)] * 5, "click": [0, 1, 0, 1, 0]}) for one in (ids, other)]
    numbers = both[0].with_columns(
        pl.col("user").cast(pl.Float64), pl.Series("seen", [[0.0, 7.0, 42.0, 40.0, 99.0]] * 5)
    )
    Encoder.fit(schema, [both[trained == "42.0"]]).save(tmp_path)
    encoder = Encoder.load(tmp_path)
    rows = [encoder.encode(frame, labels=False) for frame in (*both, numbers)]
    for one in rows[1:]:
        assert one.ids.tolist() == rows[0].ids.tolist()
        assert one.lists[0][0].tolist() == rows[0].lists[0][0].tolist()
    assert encoding == "identity" or rows[0].ids.min() > 0


def test_names_that_only_look_like_numbers_stay_as_they_are() -> None:
    schema = Schema(categorical=(CategoricalFeature(name="version"),), labels=("y",))
    frame = pl.DataFrame({"version": ["10.0", "10", "9.1", "007", "7"], "y": [0, 1, 0, 1, 0]})
    encoder = Encoder.fit(schema, [frame])
    assert len(set(encoder.encode(frame).ids[:, 0].tolist())) == 5


def test_an_encoder_of_the_first_format_still_loads(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": [3, 4, 3], "click": [0, 1, 0]})
    Encoder.fit(Schema(categorical=(CategoricalFeature(name="user"),), labels=("click",)), [frame]).save(tmp_path)
    content = read_sealed(tmp_path / "encoder.json")
    del content["whole"]
    (tmp_path / "encoder.json").write_text(sealed_json({**content, "format": 1}))
    encoder = Encoder.load(tmp_path)
    assert encoder.encode(frame.with_columns(user=pl.lit("4.0"))).ids.tolist() == [[2]] * 3


@pytest.mark.slow
def test_every_flipped_byte_of_a_large_cache_is_refused(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    """What counts is the whole, not the first 64 MiB: nothing is left out because a set is large."""
    rows = 100_000
    frame = pl.DataFrame({f"x{i}": np.arange(rows) % (7 + i) for i in range(200)}).with_columns(
        click=(pl.int_range(rows) % 2)
    )
    schema = Schema(dense=tuple(DenseFeature(name=f"x{i}", transform="none") for i in range(200)), labels=("click",))
    frame.write_parquet(tmp_path / "log.parquet")
    splits = prepare(config(tmp_path / "log.parquet", schema, tmp_path, split="order"), progress=False)
    assert sum(file.stat().st_size for file in splits.folder.iterdir()) > 64 << 20
    rng = random.Random(3)
    for _ in range(fuzz_inputs(3)):
        path = splits.folder / rng.choice(["train-labels.bin", "train-dense.bin", "test-labels.bin"])
        place = rng.randrange(path.stat().st_size)
        with open(path, "r+b") as file:
            file.seek(place)
            old = file.read(1)
            file.seek(place)
            file.write(bytes([old[0] ^ 1 << rng.randrange(8)]))
        with pytest.raises(DataError, match=path.name):
            open_splits(splits.folder)
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(old)
    open_splits(splits.folder)


@pytest.mark.slow
def test_a_killed_preparation_leaves_a_folder_that_the_next_one_removes(tmp_path: Path) -> None:
    path = write(_small(), tmp_path / "log.parquet")
    setting = config(path, SMALL, tmp_path, split="random")
    script = (
        "import sys, time\n"
        "from cordillera.data.ranking import cache, datasets\n"
        "cache.CacheWriter.finish = lambda *_: (print('filling', flush=True), time.sleep(60))\n"
        "datasets.prepare(datasets.DataConfig.model_validate_json(sys.argv[1]), progress=False)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, setting.model_dump_json(by_alias=True)], stdout=-1)
    assert process.stdout is not None
    assert process.stdout.readline() == b"filling\n"
    prepared = tmp_path / "cache" / "prepared"
    with process.stdout:
        # A folder that is still being filled stays.
        prepare(setting.model_copy(update={"split_seed": 1}), progress=False)
        assert len(list(prepared.glob(".*"))) == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list(prepared.glob(".*"))) == 1
    prepare(setting, progress=False)
    assert list(prepared.glob(".*")) == []


def test_a_log_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(_small().select("x", "user", "click"), tmp_path / "log.csv")
    schema = Schema(dense=SMALL.dense, categorical=SMALL.categorical, labels=("click",))
    chunks = FileLog.chunks

    def growing(log: FileLog, columns: object = None) -> object:
        yield from chunks(log, columns)  # type: ignore[arg-type]
        with open(path, "a") as file:
            file.write("1.0,3,1\n")

    monkeypatch.setattr(FileLog, "chunks", growing)
    with pytest.raises(DataError, match="changed while they were read"):
        prepare(config(path, schema, tmp_path), progress=False)


def test_data_prepared_by_an_earlier_version_is_prepared_anew_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cordillera.data.ranking import datasets

    setting = config(write(_small(), tmp_path / "log.parquet"), SMALL, tmp_path, split="random")
    log = datasets.open_log(setting)
    earlier = tmp_path / "cache" / "prepared" / f"own-{datasets._key(setting, log, datasets.FORMAT - 1)}"
    earlier.mkdir(parents=True)
    with pytest.warns(UserWarning, match="is prepared anew, as an earlier version read rows less strictly"):
        prepare(setting, progress=False)


def test_files_of_one_log_may_differ_in_types(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    frame = _small()
    frame[:30].write_parquet(tmp_path / "parts" / "a.parquet")
    frame[30:].with_columns(pl.col("user").cast(pl.Float64), pl.col("time").cast(pl.Int64)).write_parquet(
        tmp_path / "parts" / "b.parquet"
    )
    setting = config(
        tmp_path / "parts", _with(timestamp="time", timestamp_unit="s"), tmp_path, format="parquet", unordered="sort"
    )
    splits = prepare(setting, progress=False)
    assert splits.facts["unseen"]["test"]["user"] == 0
    assert sum(len(rows) for rows in raw_rows(setting, "train")) == len(splits.train)


def test_parquet_files_that_are_damaged_give_their_rows_or_one_error(
    tmp_path: Path, fuzz_inputs: Callable[[int], int]
) -> None:
    """Pages carry checksums, so that damage to rows cannot pass."""
    pq.write_table(_small(200).to_arrow(), tmp_path / "good.parquet", write_page_checksum=True, row_group_size=50)
    good = (tmp_path / "good.parquet").read_bytes()
    path, rng = tmp_path / "log.parquet", random.Random(1)
    expected = _small(200)
    for number in range(fuzz_inputs(120)):
        content = flips(good, rng, rng.randint(1, 3)) if number % 2 else damaged(good, rng, [b"PAR1", b"\0\0\0\0"])
        path.write_bytes(content)
        log = FileLog(_with(timestamp="time"), (path,), "parquet")
        found = survives(lambda: pl.concat([frame for frame, _ in log.chunks()]), f"input {number}")  # noqa: B023
        if isinstance(found, pl.DataFrame):
            assert len(found) == len(expected), number


def _any_column(rng: random.Random, rows: int) -> pa.Array:
    """A column of a random type with random values, extreme ones among them."""
    floats = [0.0, 1.0, 42.0, 1.5, -0.0, 1e30, 1e300, float("inf"), float("nan"), 2.0**53, 5e-324]
    integers = [0, 1, 2, 5, 127]
    texts = ["", "a", "0", "1", "42.0", "nan", "inf", "1e39", " 7 ", "\0", "é|ü", "-1", "9" * 30, "True"]
    few = rng.random() < 0.5
    draw: dict[pa.DataType, Callable[[], object]] = {
        pa.int8(): lambda: rng.choice(integers),
        pa.uint64(): lambda: rng.choice([*integers, 2**64 - 1, 2**63]),
        pa.int64(): lambda: rng.choice([*integers, -(2**63), 2**63 - 1]),
        pa.float16(): lambda: np.float16(rng.choice([0.0, 1.0, 2048.0, float("nan")])),
        pa.float32(): lambda: rng.choice([0.0, 1.0, 3e38, float("inf")]),
        pa.float64(): lambda: rng.choice(floats[:2] if few else floats),
        pa.string(): lambda: rng.choice(texts[2:4] if few else texts),
        pa.large_string(): lambda: rng.choice(texts),
        pa.binary(): lambda: rng.randbytes(3),
        pa.bool_(): lambda: rng.random() < 0.5,
        pa.date32(): lambda: rng.randrange(20_000),
        pa.timestamp("ns", "Europe/Paris"): lambda: rng.randrange(10**18),
        pa.timestamp("us", "Nowhere/Land"): lambda: rng.randrange(10**15),
        pa.timestamp("ms"): lambda: rng.randrange(-(10**15), 10**15),
        pa.time64("us"): lambda: rng.randrange(10**9),
        pa.duration("s"): lambda: rng.randrange(10**9),
        pa.decimal128(38, 10): lambda: Decimal(rng.choice([0, 1, 10**27])),
        pa.decimal256(60, 2): lambda: Decimal(1),
        pa.null(): lambda: None,
        pa.list_(pa.int32()): lambda: [1] * rng.randrange(3),
        pa.list_(pa.float64()): lambda: [rng.choice(floats)] * rng.randrange(3),
        pa.list_(pa.list_(pa.string())): lambda: [["a"]],
        pa.list_(pa.string(), 2): lambda: ["a", None],
        pa.large_list(pa.string()): lambda: [rng.choice(texts), None],
        pa.list_(pa.null()): list,
        pa.struct([("a", pa.int8())]): lambda: {"a": 1},
        pa.map_(pa.string(), pa.int8()): lambda: [("a", 1)],
        pa.dictionary(pa.int8(), pa.string()): lambda: rng.choice(["0", "1", "x"]),
    }
    kind = rng.choice(list(draw))
    blanks = rng.choice([0.0, 0.0, 0.1, 1.0])
    return pa.array([None if rng.random() < blanks else draw[kind]() for _ in range(rows)], kind)


@pytest.mark.filterwarnings("ignore:.*tells nothing")
def test_columns_of_any_type_are_read_whole_or_refused(
    tmp_path: Path, fuzz_inputs: Callable[[int], int], capfd: pytest.CaptureFixture[str]
) -> None:
    schema = Schema(
        dense=(DenseFeature(name="x", transform="standardise"), DenseFeature(name="z", transform="quantile")),
        categorical=(
            CategoricalFeature(name="user"),
            CategoricalFeature(name="shop", encoding="hash", num_embeddings=9),
            CategoricalFeature(name="place", encoding="identity", num_embeddings=9),
        ),
        lists=(ListFeature(name="tags"), ListFeature(name="seen", table="user")),
        labels=("click",),
        weight="weight",
        timestamp="time",
        group="group",
    )
    rng, rows, kept = random.Random(2), 40, 0
    good = {
        **{name: pa.array(np.arange(rows) % 5) for name in ("x", "z", "user", "shop", "place", "group")},
        **{name: pa.array([["a"], ["b", "c"]] * (rows // 2)) for name in ("tags", "seen")},
        "click": pa.array(np.arange(rows) % 2),
        "time": pa.array(np.arange(rows)),
        "weight": pa.array(np.ones(rows)),
    }
    for number in range(fuzz_inputs(20)):
        names = rng.sample(list(good), rng.randint(1, 2))
        columns = {**good, **{name: _any_column(rng, rows) for name in names}}
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table(columns), path)
        setting = config(path, schema, tmp_path, split=rng.choice(["time", "random"]), unordered="sort")
        what = f"input {number}: {[(name, columns[name].type) for name in names]}"
        found = survives(lambda: sum(prepare(setting, progress=False).facts["rows"].values()), what)  # noqa: B023
        kept += found == rows
        assert found == rows or isinstance(found, DataError), what
    assert kept > number // 10
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:.*tells nothing")
@pytest.mark.parametrize("layout", ["own", "criteo", "avazu"])
def test_a_damaged_log_is_prepared_whole_or_refused(
    tmp_path: Path, fuzz_inputs: Callable[[int], int], layout: str
) -> None:
    own = Schema(dense=SMALL.dense, categorical=SMALL.categorical, lists=SMALL.lists, labels=("click",))
    if layout == "own":
        path, names = write(_small().select("x", "user", "tags", "click"), tmp_path / "log.csv"), None
        setting = config(path, own, tmp_path, split="random")
    elif layout == "criteo":
        path, names = tmp_path / "train.txt", list(CRITEO_COLUMNS)
        path.write_text("\n".join(_criteo_lines(60)))
        setting = DataConfig(dataset="criteo", path=str(path), cache_dir=str(tmp_path / "cache"))
    else:
        path, names = tmp_path / "train.csv", None
        _avazu_frame(60).write_csv(path)
        setting = DataConfig(dataset="avazu", path=str(path), cache_dir=str(tmp_path / "cache"), unordered="sort")
    good, rng, kept = path.read_bytes(), random.Random(layout), 0
    for number in range(fuzz_inputs(6)):
        content = damaged(good, rng, WORDS) if number % 4 else good
        path.write_bytes(content)
        expected = reference(content, "\t" if layout == "criteo" else ",", layout != "criteo", names)
        what = f"input {number}: {content!r}"
        found = survives(lambda: sum(prepare(setting, progress=False).facts["rows"].values()), what)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        assert isinstance(found, DataError) or (expected is not None and found == len(expected) - 1), what
        kept += not isinstance(found, DataError)
        found = survives(lambda: sum(len(frame) for frame, _ in read_rows(str(path), setting)), what)
        assert isinstance(found, DataError) or (expected is not None and found == len(expected) - 1), (what, found)
    assert kept


def test_a_damaged_schema_is_refused_or_reads_every_row(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    """Schemas as recipes hold them; those that are valid are used."""
    text = """
    labels = ["click"]
    weight = "weight"
    timestamp = "time"
    group = "user"
    ids = ["user"]
    segments = ["user"]
    dense = [{ name = "x", transform = "standardise", missing = "mean" }]
    categorical = [{ name = "user", encoding = "hash", num_embeddings = 9, table = "t" }]
    lists = [{ name = "tags", separator = "|", max_length = 3, pooling = "sum", min_count = 2 }]
    """
    words = [b'"', b"[", b"]", b"{}", b"=", b"1e999", b"-1", b"4611686018427387904", b"nan", b"true", b'""', b"\\u0000"]
    words += [
        b'"x"',
        b'"click"',
        b'"tags"',
        b'"identity"',
        b'"quantile"',
        b'"log"',
        b'"zero"',
        b'"user"',
        b"1",
        b"\xff",
    ]
    path = write(_small(), tmp_path / "log.parquet")
    rng, used = random.Random(4), 0

    def read(content: bytes) -> Schema:
        (tmp_path / "schema.toml").write_bytes(content)
        found = parse_toml(read_text(tmp_path / "schema.toml"), "schema.toml")
        try:
            return Schema.model_validate(found)
        except ValidationError as error:
            raise DataError(str(error)) from error

    for number in range(fuzz_inputs(400)):
        content = damaged(text.encode(), rng, words)
        what = f"input {number}: {content!r}"
        schema = survives(lambda: read(content), what)  # noqa: B023
        if not isinstance(schema, Schema) or number % 10:
            continue
        setting = config(path, schema, tmp_path, split="random")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = survives(lambda: prepare(setting, progress=False).facts["rows"], what)  # noqa: B023
        assert isinstance(found, DataError) or sum(found.values()) == 60, what
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        used += 1
    assert used
