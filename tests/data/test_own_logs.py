"""Logs as they lie about: folders of folders, Hive's partitions, times in any unit, separators, one file a split."""

from __future__ import annotations

import datetime
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from cordillera.data.paths import expand_paths
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.features import DenseFeature, Schema
from cordillera.data.ranking.logs.click_logs import FileLog
from cordillera.data.ranking.logs.columns import MISSING, RowPlace, dense_of, labels_of, timestamps_of
from cordillera.data.ranking.logs.delimited import DelimitedFile
from cordillera.data.ranking.logs.own import meeting, with_points
from cordillera.data.ranking.rows import raw_rows, read_rows
from cordillera.errors import DataError

PLACE = RowPlace("log")
NOON = 1_769_860_800  # 2026-01-31 12:00:00 UTC


def frame_of(days: int = 4, rows: int = 50) -> pl.DataFrame:
    """A log of some days, in time order."""
    draw = np.random.default_rng(1)
    count = days * rows
    return pl.DataFrame(
        {
            "dt": [f"2026-01-{day + 1:02}" for day in range(days) for _ in range(rows)],
            "time": NOON + np.arange(count) * 60,
            "user": draw.integers(0, 9, count),
            "price": draw.random(count),
            "click": draw.integers(0, 2, count),
        }
    )


def schema(**changes: Any) -> dict[str, Any]:
    return {"labels": ["click"], "categorical": [{"name": "user"}], "dense": [{"name": "price"}], **changes}


def write_days(folder: Path, frame: pl.DataFrame, ending: str = "parquet", column: str = "dt") -> Path:
    """Write a log in folders ``dt=DAY``."""
    for (day,), part in frame.group_by(column, maintain_order=True):
        place = folder / f"{column}={day}" / f"part-0.{ending}"
        place.parent.mkdir(parents=True)
        part = part.drop(column)
        part.write_parquet(place) if ending == "parquet" else part.write_csv(place)
    return folder


def prepared(tmp_path: Path, path: Any, **changes: Any) -> Any:
    content = {"schema": schema(), "cache_dir": str(tmp_path / "cache"), **changes}
    return prepare(DataConfig.model_validate({"path": path, **content}), progress=False)


def labels_of_split(dataset: Any) -> list[int]:
    batch = dataset.batch(slice(0, len(dataset)))
    return [int(one) for one in batch.labels[:, 0]]


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_folders_of_hive_give_columns(tmp_path: Path, ending: str) -> None:
    frame = frame_of()
    folder = write_days(tmp_path / "log", frame, ending)
    (folder / "_SUCCESS").touch()
    (folder / "dt=2026-01-01" / ".part-0.crc").write_text("x")
    with_days = schema(timestamp="dt", categorical=[{"name": "user"}, {"name": "dt"}])
    splits = prepared(tmp_path, str(folder), schema=with_days, fractions=(0.5, 0.25, 0.25))
    assert [len(one) for one in (splits.train, splits.validation, splits.test)] == [100, 50, 50]
    assert splits.encoder.vocabularies["dt"].to_list() == ["2026-01-01", "2026-01-02"]
    assert labels_of_split(splits.test) == frame["click"].to_list()[150:]
    by_pattern = prepared(tmp_path, str(folder / "dt=2026-01-0[12]"), split="order")
    assert len(by_pattern.train) + len(by_pattern.validation) + len(by_pattern.test) == 100
    config = DataConfig.model_validate({"path": str(folder), "schema": with_days})
    read = pl.concat([one for one, _ in read_rows(str(folder / "dt=2026-01-03"), config)])
    assert read["dt"].to_list() == ["2026-01-03"] * 50


def test_files_of_two_formats_are_no_log(tmp_path: Path) -> None:
    frame = frame_of()
    frame.write_csv(tmp_path / "a.csv")
    frame.write_parquet(tmp_path / "b.parquet")
    files = [str(tmp_path / "a.csv"), str(tmp_path / "b.parquet")]
    config = DataConfig.model_validate({"path": files, "schema": schema()})
    assert config.label == ", ".join(files)
    with pytest.raises(DataError, match=r"b\.parquet: the name says parquet, that of .*a\.csv says csv"):
        prepare(config)
    with pytest.raises(DataError, match="says csv"):
        next(iter(read_rows(files, config)))


def test_a_folder_gives_a_column_only_where_the_file_has_none(tmp_path: Path) -> None:
    place = tmp_path / "country=de%20at" / "kind=__HIVE_DEFAULT_PARTITION__" / "user=7"
    place.mkdir(parents=True)
    frame_of(1).drop("dt").write_csv(place / "log.csv")
    log = FileLog(Schema.model_validate(schema()), (place / "log.csv",), "csv")
    [(read, _)] = log.chunks()
    assert read["country"].to_list() == ["de at"] * 50
    assert read["kind"].null_count() == 50
    assert read["user"].n_unique() > 1  # of the file
    [(only, _)] = log.chunks(["country"])
    assert len(only) == 50
    pl.read_csv(place / "log.csv").write_parquet(place / "log.parquet")
    parquet = FileLog(Schema.model_validate(schema()), (place / "log.parquet",), "parquet")
    [(only, _)] = parquet.chunks(["country", "kind"])
    assert len(only) == 50
    with pytest.raises(DataError, match="column 'dt' is missing"):
        list(parquet.chunks(["country", "dt"]))


def test_folders_are_read_to_the_bottom(tmp_path: Path) -> None:
    for name in ("b/2/x.csv", "a/10.csv", "a/9.csv", "c.csv", "_tmp/x.csv", ".git/x.csv", "a/_x.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    os.symlink(tmp_path, tmp_path / "b" / "up")
    names = [str(path.relative_to(tmp_path)) for path in expand_paths(str(tmp_path))]
    assert names == ["a/10.csv", "a/9.csv", "b/2/x.csv", "c.csv"]
    os.unlink(tmp_path / "b" / "up")
    assert [path.parent.name for path in expand_paths(str(tmp_path / "**" / "x.csv"))] == ["_tmp", "2"]
    assert [path.name for path in expand_paths(str(tmp_path / "[ab]*"))] == ["10.csv", "9.csv", "x.csv"]
    (tmp_path / "empty").mkdir()
    for wrong, why in ((tmp_path / "empty", "holds no files"), (tmp_path / "*.json", "no file fits")):
        with pytest.raises(DataError, match=why):
            expand_paths(str(wrong))


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
    [
        (["2026-01-31 12:00:00", "2026-01-31T12:00:01"], None, [NOON, NOON + 1]),
        (["2026-01-31", "2026-02-01"], None, [NOON - 43_200, NOON + 43_200]),
        (["2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00", "2026-01-31 12:00:00.5+0000"], None, [NOON] * 3),
        (["2026-01-31 12:00", "2026/01/31 12:00:00"], None, [NOON] * 2),
        (["1969-12-31 23:59:59.5"], None, [-1]),
        ([str(NOON), f" {NOON}.9 "], None, [NOON, NOON]),
        ([float(NOON), NOON + 0.999], None, [NOON, NOON]),
        ([NOON * 1000 + 999], "ms", [NOON]),
        ([NOON * 1000.0], "ms", [NOON]),
        ([str(NOON * 10**9 + 1)], "ns", [NOON]),
        ([NOON * 10**6], "us", [NOON]),
        ([-1500], "ms", [-2]),
        ([datetime.date(2026, 1, 31)], "ms", [NOON - 43_200]),
        ([datetime.datetime(2026, 1, 31, 12, 0, 0, 999_999)], None, [NOON]),
    ],
)
def test_times_are_read_in_seconds(values: list[Any], unit: Any, expected: list[int]) -> None:
    assert timestamps_of(pl.Series(values), "time", PLACE, unit).tolist() == expected
    if isinstance(values[0], str):
        as_categories = pl.Series(values).cast(pl.Categorical)
        assert timestamps_of(as_categories, "time", PLACE, unit).tolist() == expected


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["2026-01-31", "soon"], r"row 2, column 'time': 'soon' is not a date or time \(data.timestamp_format"),
        (["2026-13-31"], "row 1.*'2026-13-31' is not a date or time"),
        (["2026-01-31", None], "row 2.*a timestamp is blank"),
        (["2026-01-31", ""], "row 2.*a timestamp is blank"),
        ([1.0, float("nan")], "row 2.*nan is not a timestamp"),
        ([1, None], "row 2.*a timestamp is blank"),
        (["31.01.2026"], r"is not a time \(data.timestamp_format names other forms, .*\n  -> write 2026-01-31, "),
        (["yesterday"], r"is not a time \(.*\n  -> write 2026-01-31, "),
        ([datetime.date(2026, 1, 31), None], "row 2.*a timestamp is blank"),
    ],
)
def test_what_is_no_time_is_refused(values: list[Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        timestamps_of(pl.Series(values), "time", PLACE)


@pytest.mark.parametrize(("unit", "factor"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_a_unit_is_inferred_and_said(tmp_path: Path, capfd: pytest.CaptureFixture[str], unit: str, factor: int) -> None:
    frame = frame_of().with_columns(pl.col("time") * factor)
    frame.write_csv(tmp_path / "log.csv")
    config = {"schema": schema(timestamp="time"), "cache_dir": str(tmp_path / "cache")}
    data = DataConfig.model_validate({"path": str(tmp_path / "log.csv"), **config})
    splits = prepare(data)
    said = capfd.readouterr().err
    assert (f"are in {unit} since 1970" in said) == (unit != "s")
    assert splits.encoder.schema.timestamp_unit == (None if unit == "s" else unit)
    times = splits.test.batch(slice(0, len(splits.test))).timestamps
    assert times is not None
    assert times[-1] == NOON + 199 * 60
    assert len(next(iter(raw_rows(data)))) == len(splits.test)
    # counters that are no times stay as they are
    frame.with_columns(time=pl.int_range(200)).write_csv(tmp_path / "log.csv")
    again = prepare(data, progress=False)
    last = again.test.batch(slice(0, len(again.test))).timestamps
    assert last is not None
    assert last[-1] == 199


def test_labels_may_be_truth_values(tmp_path: Path) -> None:
    assert labels_of(pl.Series([True, False]), "click", PLACE).tolist() == [1, 0]
    words = pl.Series([None, "True", "false ", "0", "1.0", "FALSE"])
    assert labels_of(words, "click", PLACE, may_miss=True).tolist() == [255, 1, 0, 0, 1, 0]
    other_words = "a label is 'yes', labels must be 0 or 1, .* data.positive says which is 1, .*{click = '= yes'}"
    for wrong, why in ((["yes"], other_words), (["true", "2"], "row 2.*a label is 2")):
        with pytest.raises(DataError, match=why):
            labels_of(pl.Series(wrong), "click", PLACE)
    frame = frame_of()
    frame.with_columns(pl.col("click") == 1).write_csv(tmp_path / "true.csv")
    frame.write_csv(tmp_path / "one.csv")
    of_words, of_numbers = (prepared(tmp_path, str(tmp_path / name)) for name in ("true.csv", "one.csv"))
    assert labels_of_split(of_words.train) == labels_of_split(of_numbers.train)


@pytest.mark.parametrize("mark", [";", "|", "\t", "~", " "])
def test_any_separator_is_read_and_a_wrong_one_is_guessed(tmp_path: Path, mark: str) -> None:
    frame = frame_of()
    frame.write_csv(tmp_path / "log.csv", separator=mark)
    frame.write_csv(tmp_path / "comma.csv")
    found = prepared(tmp_path, str(tmp_path / "log.csv"), separator=mark)
    assert labels_of_split(found.train) == labels_of_split(prepared(tmp_path, str(tmp_path / "comma.csv")).train)
    hint = "set data.separator" if mark != "~" else "give the file this column"
    with pytest.raises(DataError, match=hint) as caught:
        prepared(tmp_path, str(tmp_path / "log.csv"))
    if mark not in "~":
        assert ('"\\t"' if mark == "\t" else f'"{mark}"') in str(caught.value)


def test_bad_separators_are_refused() -> None:
    for wrong in ("", ",,", "a", "0", '"', "\n", "é"):
        with pytest.raises(ValueError, match="separator"):
            DataConfig.model_validate({"path": "x.csv", "schema": schema(), "separator": wrong})


def in_another_form(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a log as a spreadsheet may write it: day first, decimal commas, NA for no price, yes for a click."""
    price = frame["price"].cast(pl.String).str.replace(".", ",", literal=True)
    return frame.with_columns(
        pl.from_epoch("time").dt.strftime("%d/%m/%Y %H:%M"),
        price=pl.when(frame["price"].is_null()).then(pl.lit(" NA")).otherwise(price),
        click=pl.when(pl.col("click").is_null()).then(pl.lit("?")).when(pl.col("click") == 1).then(pl.lit("yes"))
        .otherwise(pl.lit("no")),
    )  # fmt: skip


FORM = {
    "null_values": ["NA", "?"],
    "decimal_comma": True,
    "timestamp_format": "%d/%m/%Y %H:%M",
    "positive": {"click": "= yes"},
}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_logs_in_another_form_are_read_as_those_in_ours(tmp_path: Path, kind: str) -> None:
    rows = pl.int_range(pl.len())
    frame = frame_of().with_columns(
        pl.when(rows % 9 != 4).then(pl.col("price")), pl.when(rows % 11 != 5).then(pl.col("click"))
    )
    frame.write_csv(tmp_path / "ours.csv")
    path = tmp_path / f"theirs.{kind}"
    in_another_form(frame).write_csv(path, separator=";") if kind == "csv" else in_another_form(frame).write_parquet(
        path
    )
    roles = schema(timestamp="time", missing_labels=True)
    separator = {"separator": ";"} if kind == "csv" else {}
    ours = prepared(tmp_path, str(tmp_path / "ours.csv"), schema=roles)
    theirs = prepared(tmp_path, str(path), schema=roles, **separator, **FORM)
    for ours_part, theirs_part in ((ours.train, theirs.train), (ours.test, theirs.test)):
        assert len(ours_part) == len(theirs_part) > 0
        np.testing.assert_array_equal(ours_part.labels, theirs_part.labels)
        np.testing.assert_array_equal(ours_part.batch(slice(None)).dense, theirs_part.batch(slice(None)).dense)
        np.testing.assert_array_equal(ours_part.timestamps, theirs_part.timestamps)
    config = DataConfig.model_validate({"path": str(path), "schema": roles, **separator, **FORM})
    read = pl.concat([one for one, _ in read_rows(str(path), config)])
    assert read["price"].null_count() == frame["price"].null_count()
    assert read["click"].to_list() == [None if one is None else one == 1 for one in frame["click"]]
    assert next(raw_rows(config))["time"].dtype == pl.Datetime


def test_values_that_are_not_of_the_given_form_are_named_with_their_line(tmp_path: Path) -> None:
    path, roles = tmp_path / "log.csv", schema(timestamp="time")

    def refused(row: str, *, match: str, **form: Any) -> None:
        path.write_text(f"time,user,price,click\n01/02/2026,1,1.5,1\n{row}\n")
        with pytest.raises(DataError, match=match):
            prepared(tmp_path, str(path), schema=roles, **{"timestamp_format": "%d/%m/%Y"} | form)

    refused("02/13/2026,1,1.5,0", match=r"log.csv, line 3, column 'time': '02/13/2026' is not of the form '%d/%m/%Y'")
    refused(",1,1.5,0", match=r"line 3, column 'time': a timestamp is blank")
    refused("02/02/2026,1,NA,0", match=r"line 3, column 'price': 'NA' is not a number")
    refused("02/02/2026,1,1.5,0", decimal_comma=True, match=r"line 2, column 'price': '1.5' has a point, and decimals")
    refused("02/02/2026,1,1.5,0", timestamp_format="%d/%m/%Y %H:%M %Z", match="write %z for time zones")
    refused("02/02/2026,1,1.5,0", timestamp_format="%d/%m/%Y %H:%M:%S.%f", match="and %.f for fractions")
    refused("02/02/26,1,1.5,0", match=r"line 3, column 'time': '02/02/26' is not of the form '%d/%m/%Y'")
    refused("02/02/2026,1,1.5,many", positive={"click": ">= 3"}, match=r"line 3, column 'click': 'many' is not a")
    refused("02/02/2026,1,1.5,", positive={"click": ">= 3"}, match=r"line 3, column 'click': a label is blank")


def test_other_settings_of_the_form_prepare_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user,price,click\n" + "1,1.5,5\n2,0,1\n1,0,3\n" * 20)
    low, high = (prepared(tmp_path, str(path), positive={"click": condition}) for condition in (">=2", ">=4"))
    assert low.train.labels.mean() > high.train.labels.mean()
    assert prepared(tmp_path, str(path), positive={"click": ">= 4"}).folder == high.folder


@pytest.mark.parametrize(
    ("values", "condition", "expected"),
    [
        ([4, 5, None], "= 5", [False, True, None]),
        ([4.0, 5.0, float("nan")], "= 5", [False, True, None]),
        (["4.0", "05", ""], "= 5", [False, True, None]),
        ([Decimal("4.00"), Decimal("5.00"), None], "= 5", [False, True, None]),
        ([False, True, None], "= 1", [False, True, None]),
        ([False, True, None], "= yes", [False, True, None]),
        ([False, True, None], "= false", [True, False, None]),
        ([False, True, None], ">= 4", [False, True, None]),
        (["False", "TRUE", "1"], "= true", [False, True, True]),
        (["No", " YES", None], "= yes", [False, True, None]),
        ([1.5, float("nan"), 3], "> 1.5", [False, None, True]),
    ],
)
def test_conditions_hold_for_values_in_any_type(values: list[Any], condition: str, expected: list[bool | None]) -> None:
    found = meeting(pl.Series("label", values, strict=False), condition, PLACE)
    assert found.to_list() == expected
    assert found.name == "label"


def test_decimal_commas_may_follow_points_between_thousands() -> None:
    text = pl.Series(["1,5", "1.234,5", "-12.345.678,25", "7", None, " 2,5E+02"])
    assert with_points(text, PLACE).to_list() == ["1.5", "1234.5", "-12345678.25", "7", None, "2.5E+02"]


def test_words_reach_categorical_columns_and_times_reach_those_of_teachers(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "day": [f"{20260101 + row // 20}" for row in range(200)],
            "user": [row % 9 for row in range(200)],
            "price": pl.Series(["NA", "1.5"] * 100, dtype=pl.Categorical),
            "click": pl.Series(["NA", "yes", "no", "no"] * 50, dtype=pl.Categorical),
            "score": [0.5] * 200,
            "upto": ["20260131"] * 200,
        }
    )
    frame.write_parquet(tmp_path / "log.parquet")
    form = {"null_values": ["NA"], "timestamp_format": "%Y%m%d", "positive": {"click": "= yes"}}
    roles = schema(timestamp="day", missing_labels=True)
    labels = prepared(tmp_path, str(tmp_path / "log.parquet"), schema=roles, **form).train.labels
    assert labels[:4, 0].tolist() == [MISSING, 1, 0, 0]
    taught = roles | {"teacher": {"scores": {"click": "score"}, "learnt_until": "upto"}}
    with pytest.raises(DataError, match="the teacher had learnt from labels until"):
        prepared(tmp_path, str(tmp_path / "log.parquet"), schema=taught, **form)
    features = {"categorical": [{"name": "day"}], "timestamp": "day"}
    with pytest.raises(DataError, match="timestamp 'day' is a feature too"):
        prepared(tmp_path, str(tmp_path / "log.parquet"), schema=schema(**features), timestamp_format="%Y%m%d")


def test_rows_to_predict_on_need_no_labels_and_no_times(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("time,user,price,click\n,1,1.5,pending\n")
    own = {"path": str(path), "schema": schema(timestamp="time"), "timestamp_format": "%d/%m/%Y"}
    config = DataConfig.model_validate(own | {"positive": {"click": ">= 4"}})
    assert next(read_rows(str(path), config, labels=False))[0]["click"].to_list() == ["pending"]
    path.write_text('time,user,price,click\n,1,"1,5",n.a.\n')
    comma = config.model_copy(update={"decimal_comma": True, "null_values": ("n.a.",)})
    frame, _ = next(read_rows(str(path), comma, labels=False))
    assert (frame["price"].to_list(), frame["click"].to_list()) == (["1.5"], ["n.a."])
    path.write_text("time,user,price,click\n,1,1.5,pending\n")
    with pytest.raises(DataError, match="'pending' is not a number"):
        next(read_rows(str(path), config))


def test_forms_that_cannot_be_are_refused() -> None:
    own = {"path": "x.csv", "schema": schema(timestamp="time")}
    for wrong, match in (
        ({"timestamp_format": "%H:%M"}, "does not tell year, month and day"),
        ({"timestamp_format": "%d/%m/%Y %H"}, "hours not without minutes"),
        ({"timestamp_format": "%Q"}, "does not tell"),
        ({"positive": {"click": "=> 4"}}, "no condition"),
        ({"positive": {"click": ">= four"}}, "no condition"),
        ({"positive": {"price": ">= 4"}}, "no label"),
        ({"schema": schema(), "timestamp_format": "%d/%m/%Y"}, "needs schema.timestamp"),
        ({"dataset": "adult", "path": None, "schema": None, "null_values": ["NA"]}, "read as published"),
    ):
        with pytest.raises(ValueError, match=match):
            DataConfig.model_validate(own | wrong)


def test_each_split_may_have_files_of_its_own(tmp_path: Path) -> None:
    frame = frame_of()
    for name, part in (
        ("train", frame[:100]),
        ("more", frame[100:120]),
        ("valid", frame[120:150]),
        ("test", frame[150:]),
    ):
        part.write_csv(tmp_path / f"{name}.csv")
    path = [str(tmp_path / "train.csv"), str(tmp_path / "more.csv")]
    others = {"validation_path": str(tmp_path / "valid.csv"), "test_path": str(tmp_path / "test.csv")}
    splits = prepared(tmp_path, path, **others)
    assert [labels_of_split(one) for one in (splits.train, splits.validation, splits.test)] == [
        frame["click"].to_list()[start:end] for start, end in ((0, 120), (120, 150), (150, 200))
    ]
    assert splits.facts["split"] == "files"
    config = DataConfig.model_validate({"path": path, "schema": schema(), **others})
    assert len(pl.concat(list(raw_rows(config, "test")))) == 50
    without = prepared(tmp_path, path, test_path=others["test_path"])
    assert [len(one) for one in (without.train, without.validation, without.test)] == [120, 0, 50]
    swapped = prepared(tmp_path, path, validation_path=others["test_path"], test_path=others["validation_path"])
    assert len(swapped.validation) == 50
    with pytest.raises(DataError, match="named twice"):
        prepared(tmp_path, path, test_path=path[0])
    for wrong, why in (
        ({"split": "random", **others}, "does not go with split = 'random'"),
        ({"split": "files"}, "needs validation_path or test_path"),
    ):
        with pytest.raises(ValueError, match=why):
            DataConfig.model_validate({"path": path, "schema": schema(), **wrong})


def test_a_price_with_a_currency_sign_is_not_to_become_a_category(tmp_path: Path) -> None:
    for value, remedy in (
        ("£3.97", "write the column without £: 1234.5"),
        ("12 %", "write the column without %: 1234.5"),
        ("cheap", "declare the column as categorical"),
        ("$ign", "declare the column as categorical"),
    ):
        with pytest.raises(DataError, match=f"is not a number\n  -> .*{remedy}"):
            dense_of(pl.Series(["1", value]), DenseFeature(name="price"), PLACE)


def test_a_header_of_one_column_says_that_the_separator_may_be_another(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("price;click\n3,97;1\n")
    with pytest.raises(DataError, match="the row has 2 fields, 1 are expected") as error:
        list(DelimitedFile(tmp_path / "log.csv", ",").frames())
    assert error.value.remedy == (
        "the first line is a single column, 'price;click'; if \";\" divides its fields: set data.separator, or "
        "--separator of `recipe new`"
    )
    (tmp_path / "log.csv").write_text("price,click\n3,97,1\n")
    with pytest.raises(DataError, match="the row has 3 fields, 2 are expected\n  -> correct the line"):
        list(DelimitedFile(tmp_path / "log.csv", ",").frames())


def test_a_pattern_that_no_file_fits_has_advice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file fits the pattern\n  -> correct the pattern"):
        expand_paths((str(tmp_path / "w9*.csv"),))
