"""Roles of columns that are guessed from a log, and recipes that are written for it."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.features import DenseFeature, Schema
from cordillera.data.ranking.guessing import ColumnGuess, guess_roles, schema_of
from cordillera.data.ranking.guessing_outcomes import told_alone
from cordillera.data.ranking.logs.click_logs import FileLog
from cordillera.data.ranking.logs.columns import MISSING
from cordillera.data.ranking.rows import read_rows
from cordillera.errors import DataError, RecipeError
from cordillera.recipe import RankingRecipe, load, write_recipe

NEW_YEAR = datetime.datetime(2026, 1, 1)
ANY = Schema(labels=("label",), dense=(DenseFeature(name="value"),))


def frame_of(rows: int = 1000) -> pl.DataFrame:
    draw = np.random.default_rng(0)
    lists = [draw.integers(0, 40, draw.integers(0, 4)).tolist() for _ in range(rows)]
    return pl.DataFrame(
        {
            "request_id": [f"r{row}" for row in range(rows)],
            "event_time": 1_760_000_000_000 + np.arange(rows) * 1000,
            "updated_at": ["2026-01-31 12:00:00"] * (rows - 1) + ["2026-02-01 12:00:00"],
            "user_id": draw.integers(0, 300, rows),
            "position": draw.integers(0, 5, rows),
            "score_count": draw.integers(0, 1000, rows) ** 4,
            "ctr": draw.random(rows),
            "country": draw.choice(["de", "at", "ch", ""], rows),
            "code": [f"{one:03}" for one in draw.integers(0, 90, rows)],
            "tags": ["|".join(map(str, one)) for one in lists],
            "kinds": [";".join("ab"[i % 2] for i in one) for one in lists],
            "query": [f"running shoes {one}" for one in draw.integers(0, 400, rows)],
            "same": ["x"] * rows,
            "blank": [None] * rows,
            "paid": draw.choice(["true", "false"], rows),
            "clicked": draw.integers(0, 2, rows),
        }
    )


def roles(path: Path, labels: tuple[str, ...] = ()) -> dict[str, ColumnGuess]:
    kind = "parquet" if path.suffix == ".parquet" else "csv"
    return {one.name: one for one in guess_roles(FileLog(ANY, (path,), kind), labels)}


EXPECTED = {
    "request_id": "id",
    "event_time": "timestamp",
    "updated_at": "left out",
    "user_id": "categorical",
    "position": "categorical",
    "score_count": "dense",
    "ctr": "dense",
    "country": "categorical",
    "code": "categorical",
    "tags": "list",
    "kinds": "list",
    "query": "categorical",
    "same": "left out",
    "blank": "left out",
    "paid": "categorical",
    "clicked": "label",
}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_roles_are_guessed_from_names_and_values(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"log.{ending}"
    frame = frame_of()
    frame.write_csv(path) if ending == "csv" else frame.write_parquet(path)
    found = roles(path)
    assert {name: one.role for name, one in found.items()} == EXPECTED
    assert found["score_count"].settings == {"transform": "log"}
    assert found["ctr"].settings == {"transform": "standardise"}
    assert found["kinds"].settings == {"separator": ";"}
    assert found["user_id"].settings == {"min_count": 2}
    schema = schema_of(list(found.values()))
    assert (schema.timestamp, schema.group, schema.ids, schema.labels) == (
        "event_time", "user_id", ("request_id",), ("clicked",)
    )  # fmt: skip
    assert roles(path, ("paid",))["paid"].role == "label"
    assert roles(path, ("paid",))["clicked"].role == "left out"
    assert "--label NAME learns it too" in roles(path, ("paid",))["clicked"].why


def test_types_of_parquet_tell_roles(tmp_path: Path) -> None:
    frame = frame_of().with_columns(
        pl.col("tags").str.split("|"),
        pl.from_epoch(pl.col("event_time"), time_unit="ms"),
        pl.col("paid") == "true",
        pl.col("clicked") == 1,
        pl.col("country").cast(pl.Categorical),
    )
    frame.write_parquet(tmp_path / "log.parquet")
    found = {name: one.role for name, one in roles(tmp_path / "log.parquet").items()}
    assert found == EXPECTED


def guess_of(folder: Path, name: str, values: list[Any]) -> ColumnGuess:
    """Guess a column's role from a CSV file with it and a label."""
    frame = pl.DataFrame({name: values, "clicked": [row % 2 for row in range(len(values))]})
    return roles_of_frame(folder, frame)[name]


def test_a_time_that_is_not_read_is_named_as_one(tmp_path: Path) -> None:
    found = guess_of(tmp_path, "event_time", [f"{row}th day" for row in range(300)])
    assert found.role == "left out"
    assert found.why == "a time by its name, such as '0th day'; data.timestamp_format can tell its form"
    assert guess_of(tmp_path, "day", ["Mon", "Tue", "Wed"]).role == "categorical"
    found = guess_of(tmp_path, "event_time", [f"20260131{hour:02}" for hour in range(24)])
    assert (found.role, found.why) == ("left out", "times such as 2026013112, which cannot be read without minutes")


@pytest.mark.parametrize(
    "form",
    [
        "%d/%m/%y %H:%M",
        "%d-%b-%Y %H:%M",
        "%b %d, %Y",
        "%d/%m/%Y, %H:%M:%S",
        "%Y.%m.%d",
        "%d/%m/%Y %H:%M",
        "%m/%d/%Y %I:%M %p",
        "%d.%m.%Y",
        "%m-%d-%Y %H:%M:%S",
        "%Y%m%d",
        "%Y%m%d%H%M",
        "%Y%m%d%H%M%S",
    ],
)
def test_the_form_of_times_is_guessed(tmp_path: Path, form: str) -> None:
    days = [NEW_YEAR + datetime.timedelta(hours=7 * row) for row in range(300)]
    found = guess_of(tmp_path, "event_time", [f"{day:{form}}" for day in days])
    assert (found.role, found.data) == ("timestamp", {"timestamp_format": form.replace(":%S", ":%S%.f")})
    assert found.why == f"times, of the form {found.data['timestamp_format']}"


def test_whole_names_of_months_are_read(tmp_path: Path) -> None:
    days = [NEW_YEAR + datetime.timedelta(days=7 * row) for row in range(300)]
    found = guess_of(tmp_path, "event_time", [f"{day:%B %d, %Y}" for day in days])
    assert (found.role, found.data) == ("timestamp", {"timestamp_format": "%B %d, %Y"})


def test_days_and_months_that_look_alike_are_told_by_the_order_or_asked_for(tmp_path: Path) -> None:
    in_order = ["03/01/2026", "05/01/2026", "02/02/2026", "04/02/2026"]
    assert guess_of(tmp_path, "time", in_order).data == {"timestamp_format": "%d/%m/%Y"}
    found = guess_of(tmp_path, "time", [in_order[3], *in_order])
    assert (found.role, found.data) == ("left out", {})
    assert 'set data.timestamp_format to "%d/%m/%Y" or "%m/%d/%Y"' in found.why
    newest_first = ["01/02/2026", "02/01/2026"]  # or the oldest, with the month first
    assert guess_of(tmp_path, "time", newest_first).role == "left out"
    assert guess_of(tmp_path, "amount", [20260101, 20260102, 20260103]).role == "categorical"
    assert guess_of(tmp_path, "time", [20261301, 20260102]).role == "categorical"


def test_words_for_no_value_are_told_from_categories(tmp_path: Path) -> None:
    found = guess_of(tmp_path, "age", ["NA", *map(str, range(100)), " ? "])
    assert (found.role, found.data) == ("dense", {"null_values": ["?", "NA"]})
    assert found.why == "numbers; ? and NA for no value"
    assert guess_of(tmp_path, "country", ["NA", "DE", "FR"]).data == {}
    assert guess_of(tmp_path, "user_id", ["NA", *map(str, range(100))]).data == {}
    assert guess_of(tmp_path, "age", ["NA", "n/a"]).data == {}
    assert guess_of(tmp_path, "age", ["NAN", *map(str, range(100)), "many"]).role == "categorical"
    label = roles_of_frame(tmp_path, frame_of().with_columns(pl.Series("clicked", ["null", "0", "1", "1"] * 250)))
    assert label["clicked"].data == {"null_values": ["null"]}
    assert schema_of(list(label.values())).missing_labels


def test_the_column_in_order_is_the_time(tmp_path: Path) -> None:
    days = [NEW_YEAR + datetime.timedelta(days=row) for row in range(300)]
    columns = {"signup_date": days[::-1], "event_time": days, "clicked": [0, 1] * 150}
    pl.DataFrame(columns).write_parquet(tmp_path / "log.parquet")
    found = roles(tmp_path / "log.parquet")
    assert {name: found[name].role for name in columns} == {
        "signup_date": "left out", "event_time": "timestamp", "clicked": "label"
    }  # fmt: skip


def test_numbers_that_are_not_read_are_said_to_be_none(tmp_path: Path) -> None:
    for values in (["1,234.50", "12.00"], ["1 234,5", "12,5"], ["1,234,567", "12"], ["$12.50", "$3"], ["12 %", "3 %"]):
        found = guess_of(tmp_path, "amount", values * 100)
        assert (found.role, "which are not read: write 1234.5" in found.why) == ("left out", True), values
    mixed = pl.DataFrame({"price": ["1,5", "20"], "visits": ["1.234", "999"], "clicked": [0, 1]})
    found = {one.name: one for one in roles_of_frame(tmp_path, mixed).values()}
    assert (found["price"].role, found["visits"].role) == ("dense", "left out")
    assert guess_of(tmp_path, "visits", ["1000", "1,001", "999"]).role == "left out"
    assert guess_of(tmp_path, "item_price", ["12,5", "3,25"]).role == "dense"
    assert guess_of(tmp_path, "ip", ["10.0.0.1", "10.0.0.2"]).role == "categorical"


def test_decimal_commas_are_told_from_those_after_thousands(tmp_path: Path) -> None:
    found = guess_of(tmp_path, "price", [f"{row},5" for row in range(100)])
    assert (found.role, found.data) == ("dense", {"decimal_comma": True})
    found = guess_of(tmp_path, "price", ["1,234", "999", "12,000"])
    assert (found.role, found.data) == ("left out", {})
    assert "data.decimal_comma if decimals follow" in found.why


def test_conditions_make_labels_of_other_columns(tmp_path: Path) -> None:
    ratings, words = [1, 2, 3, 4, 5, None] * 50, ["yes", "no", " yes", "no", "", "yes"] * 50
    path, out = tmp_path / "log.csv", tmp_path / "made.toml"
    pl.DataFrame({"item": [row % 7 for row in range(300)], "rating": ratings, "again": words}).write_csv(path)
    guesses = {one.name: one for one in write_recipe([str(path)], out, labels=["rating>=4", "again = yes"])}
    assert guesses["rating"].why == "1 where rating >= 4; blank in 50 rows, which then do not count for it"
    recipe = load(out, [f"data.cache_dir={tmp_path / 'cache'}", "data.fractions=[1.0, 0.0, 0.0]"])
    assert isinstance(recipe, RankingRecipe)
    assert recipe.data.positive == {"rating": ">= 4", "again": "= yes"}
    found = prepare(recipe.data, progress=False).train.labels
    assert found[:6].tolist() == [[0, 1], [0, 0], [0, 1], [1, 0], [1, MISSING], [MISSING, 1]]
    with pytest.raises(DataError, match="'=> 4' is no condition such as '>= 4' or '= yes'"):
        roles(path, ("rating=> 4",))
    with pytest.raises(DataError, match="there is no column 'stars'"):
        roles(path, ("stars>3",))
    with pytest.raises(DataError, match=r"--label 'rating>=3'"):
        roles(path, ("rating",))
    with pytest.raises(DataError, match="'rating' is named twice"):
        roles(path, ("rating>=4", "rating>=2"))
    with pytest.raises(DataError, match="no row of column 'again' is = perhaps; it holds  yes, no, yes"):
        roles(path, ("again=perhaps",))


def test_words_in_columns_with_conditions_stand_for_no_value(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "price": ["none", "1,5", "2,5", "3,75"] * 50,
            "stars": ["not rated", "0,5", "4,5", "3"] * 50,
            "answer": ["NA", "none", "yes", "no"] * 50,
            "größe > 1": ["1", "2", "3", "4"] * 50,
        }
    )
    frame.write_csv(tmp_path / "log.csv", separator=";")
    out, labels = tmp_path / "made.toml", ["stars>=3", "answer=none", "größe > 1>=2"]
    guesses = {one.name: one for one in write_recipe([str(tmp_path / "log.csv")], out, labels=labels)}
    assert guesses["answer"].why.startswith("1 where answer = none; NA for no value; blank in 50 rows")
    assert guesses["stars"].data["decimal_comma"]
    recipe = load(out, [f"data.cache_dir={tmp_path / 'cache'}", "data.fractions=[1.0, 0.0, 0.0]"])
    assert isinstance(recipe, RankingRecipe)
    assert set(recipe.data.null_values) == {"NA", "none", "not rated"}
    found = prepare(recipe.data, progress=False).train.labels[:4]
    assert found.tolist() == [[MISSING, MISSING, 0], [0, 1, 1], [1, 0, 1], [1, 0, 1]]


def test_lists_are_no_labels(tmp_path: Path) -> None:
    pl.DataFrame({"tags": [[1], [2]], "clicked": [0, 1]}).write_parquet(tmp_path / "log.parquet")
    for label in ("tags", "tags=1"):
        with pytest.raises(DataError, match=r"column 'tags' holds (lists|List\(Int64\))") as caught:
            roles(tmp_path / "log.parquet", (label,))
        assert "shape" not in str(caught.value)


def test_labels_with_blanks_are_kept_and_counted(tmp_path: Path) -> None:
    blank = pl.when(pl.int_range(pl.len()) >= 7).then(pl.col("clicked").cast(pl.Float64)).alias("clicked")
    frame_of().with_columns(blank).write_csv(tmp_path / "log.csv")
    frame_of().with_columns(blank).write_parquet(tmp_path / "log.parquet")
    for name in ("log.csv", "log.parquet"):
        found = roles(tmp_path / name)
        assert "blank in 7 rows" in found["clicked"].why
        assert schema_of(list(found.values())).missing_labels
    assert not schema_of(list(roles_of_frame(tmp_path, frame_of()).values())).missing_labels


def roles_of_frame(folder: Path, frame: pl.DataFrame) -> dict[str, Any]:
    frame.write_csv(folder / "one.csv")
    return roles(folder / "one.csv")


def test_what_training_would_refuse_is_said_before(tmp_path: Path) -> None:
    frame = frame_of()
    with pytest.raises(DataError, match="column 'clicked' is 0 in all rows, so that nothing can be learnt"):
        roles_of_frame(tmp_path, frame.with_columns(pl.lit(0).alias("clicked")))
    words = pl.when(pl.col("clicked") == 1).then(pl.lit("yes")).otherwise(pl.lit("no")).alias("clicked")
    with pytest.raises(DataError, match="column 'clicked' holds no, yes; labels are 0 and 1, or false and true"):
        roles_of_frame(tmp_path, frame.with_columns(words, pl.col("clicked").alias("purchased")))
    assert roles_of_frame(tmp_path, frame)["event_time"].why == "times"
    backwards = roles_of_frame(tmp_path, frame.reverse())["event_time"]
    assert (backwards.why, backwards.data["unordered"]) == (
        "times, not in order; data.unordered has the rows sorted",
        "sort",
    )


def test_commas_are_not_taken_for_lists_where_they_are_of_numbers_or_words(tmp_path: Path) -> None:
    rows = pl.int_range(pl.len())
    frame = frame_of().with_columns(
        (rows.cast(pl.String) + ",5").alias("euros"),
        pl.when(rows % 5 == 0).then(pl.lit("cafe, bar")).otherwise(pl.lit("shop")).alias("place_type"),
        pl.concat_str([(rows % many).cast(pl.String) for many in (7, 11, 3)], separator=",")
        .alias("seen_items"),
    )  # fmt: skip
    frame.write_csv(tmp_path / "log.csv")
    found = roles(tmp_path / "log.csv")
    assert (found["euros"].role, found["place_type"].role, found["seen_items"].role) == (
        "dense",
        "categorical",
        "list",
    )


@pytest.mark.parametrize("mark", ["|", ";", ",", ", ", " "])
@pytest.mark.parametrize("items", [40, 5000])
def test_histories_are_lists_although_hardly_two_are_equal(tmp_path: Path, mark: str, items: int) -> None:
    draw = np.random.default_rng(0)
    text = [mark.join(map(str, draw.integers(0, items, 9))) for _ in range(1000)]
    found = guess_of(tmp_path, "seen", text)
    assert (found.role, found.settings) == ("list", {"separator": mark})
    assert guess_of(tmp_path, "request_id", text).role == "id"


def test_lists_in_brackets_are_left_out_and_named(tmp_path: Path) -> None:
    found = guess_of(tmp_path, "seen", ["[1, 2, 3]", "[]", "[2]"] * 100)
    assert (found.role, found.why) == ("left out", "lists such as '[1, 2, 3]': write 1|2|3, or lists in Parquet")


def test_a_label_that_is_not_clear_is_asked_for(tmp_path: Path) -> None:
    frame_of().with_columns(pl.col("clicked").alias("liked")).write_csv(tmp_path / "two.csv")
    frame_of().drop("clicked").write_csv(tmp_path / "none.csv")
    with pytest.raises(DataError, match="several columns look like the label; columns are clicked, liked"):
        roles(tmp_path / "two.csv")
    with pytest.raises(DataError, match="no column looks like the label; columns of zeros and ones are paid"):
        roles(tmp_path / "none.csv")
    with pytest.raises(DataError, match="there is no column 'buy'"):
        roles(tmp_path / "two.csv", ("buy",))
    pl.DataFrame({"clicked": [0, 1], "same": [1, 1]}).write_csv(tmp_path / "bare.csv")
    with pytest.raises(DataError, match="no column looks like a feature"):
        schema_of(list(roles(tmp_path / "bare.csv").values()))


def test_all_columns_are_listed_where_none_looks_like_the_label(tmp_path: Path) -> None:
    pl.DataFrame({f"number_{place}": [1.5, 2.5] for place in range(30)}).write_csv(tmp_path / "log.csv")
    with pytest.raises(DataError, match=r"no column looks like the label; columns are number_0, .*number_29"):
        roles(tmp_path / "log.csv")


@pytest.mark.parametrize(
    ("values", "shown"),
    [([1, 2, 3, 4, 5] * 2, "1, 2, 3, 4, 5;"), ([0.5 * i for i in range(10)], r"\(10 different\);"), (["a"] * 10, "a;")],
)
def test_a_label_of_other_values_is_refused(tmp_path: Path, values: list[object], shown: str) -> None:
    pl.DataFrame({"x": range(10), "rating": values}).write_parquet(tmp_path / "log.parquet")
    with pytest.raises(DataError, match=f"column 'rating' holds .*{shown} labels are 0 and 1"):
        roles(tmp_path / "log.parquet", ("rating",))


def with_index(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    return frame.drop("request_id").with_row_index("index").rename({"index": name})


@pytest.mark.cases(3)
@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("header", "name"), [("", "unnamed_0"), ("Unnamed: 0", "Unnamed: 0"), ("__index_level_0__", "__index_level_0__")]
)
def test_the_index_of_pandas_is_an_id(tmp_path: Path, ending: str, header: str, name: str) -> None:
    path, frame = tmp_path / f"log.{ending}", with_index(frame_of(), header)
    frame.write_csv(path) if ending == "csv" else pq.write_table(frame.to_arrow(), path)
    guesses = write_recipe([str(path)], tmp_path / "recipe.toml")
    assert (guesses[0].name, guesses[0].role) == (name, "id")
    recipe = load(tmp_path / "recipe.toml", [f"data.cache_dir={tmp_path / 'cache'}"])
    assert isinstance(recipe, RankingRecipe)
    assert len(prepare(recipe.data, progress=False).train) == 800
    assert next(iter(read_rows(str(path), recipe.data)))[0].columns[0] == name


def test_a_first_column_without_a_name_that_counts_no_rows_is_a_feature(tmp_path: Path) -> None:
    frame = frame_of().select("ctr", "clicked").rename({"ctr": ""})
    frame.write_csv(tmp_path / "log.csv")
    assert roles(tmp_path / "log.csv")["unnamed_0"].role == "dense"
    (tmp_path / "log.csv").write_text(",unnamed_0,clicked\n1,2,0\n")
    with pytest.raises(DataError, match="stand twice"):
        roles(tmp_path / "log.csv")


def test_a_recipe_is_written_that_trains(tmp_path: Path) -> None:
    frame_of().write_csv(tmp_path / "log.csv", separator=";")
    out = tmp_path / "mine.toml"
    with pytest.raises(DataError, match=r'single column.*\n.*--separator ";"'):
        write_recipe([str(tmp_path / "log.csv")], out, separator="|")
    (tmp_path / "sheet.csv").write_text(f"sep=;\n{(tmp_path / 'log.csv').read_text()}")
    for mark in (None, ";"):
        with pytest.raises(DataError, match=r"the first line, 'sep=.*', is for spreadsheets.*\n.*delete this line"):
            write_recipe([str(tmp_path / "sheet.csv")], out, separator=mark)
    frame_of().write_csv(tmp_path / "quoted.csv", separator=";", quote_style="always")
    with pytest.raises(DataError, match=r'if ";" divides the fields, .*--separator'):
        write_recipe([str(tmp_path / "quoted.csv")], out, separator=",")
    (tmp_path / "named.csv").write_text('"user;price (net, EUR);clicked"\n'.replace('"', "") + "1;2;0\n2;3;1\n" * 9)
    write_recipe([str(tmp_path / "named.csv")], tmp_path / "named.toml")
    assert 'separator = ";"' in (tmp_path / "named.toml").read_text()
    quoted = write_recipe([str(tmp_path / "quoted.csv")], tmp_path / "quoted.toml")
    guesses = write_recipe([str(tmp_path / "log.csv")], out)
    assert quoted == guesses
    assert {one.name: one.role for one in guesses} == EXPECTED
    recipe = load(out, [f"data.cache_dir={tmp_path / 'cache'}"])
    assert isinstance(recipe, RankingRecipe)
    assert recipe.model.name == "dcn"
    assert len(prepare(recipe.data, progress=False).train) == 800
    assert recipe.data.separator == ";"
    with pytest.raises(DataError, match="exists"):
        write_recipe([str(tmp_path / "log.csv")], out)
    with pytest.raises(RecipeError, match="did you mean 'wukong'"):
        write_recipe([str(tmp_path / "log.csv")], tmp_path / "other.toml", model="wukon")
    assert not (tmp_path / "other.toml").exists()
    assert write_recipe([str(tmp_path / "log.csv")], tmp_path / "lr.toml", model="lr")


def outcome_log(path: Path, rows: int = 2000, **columns: Any) -> Path:
    draw = np.random.default_rng(3)
    click = draw.integers(0, 2, rows)
    given = {
        "at": [f"2026-03-{1 + row * 28 // rows:02}T10:00:00" for row in range(rows)],
        "user_id": draw.integers(0, 100, rows),
        "price": draw.random(rows),
        "seconds": click * draw.integers(1, 500, rows),
        "outcome_page": [["home", "thanks"][one] for one in click],
        "click": click,
    }
    pl.DataFrame({**given, **columns}).write_csv(path)
    return path


def test_columns_that_tell_the_label_alone_are_left_out(tmp_path: Path) -> None:
    found = roles(outcome_log(tmp_path / "log.csv"))
    assert {name: one.role for name, one in found.items()} == {
        **{"at": "timestamp", "user_id": "categorical", "price": "dense"},
        **{"seconds": "left out", "outcome_page": "left out", "click": "label"},
    }
    assert found["seconds"].why.startswith("tells click alone (AUC 1.000), so it may be known only afterwards")


def test_a_column_that_tells_the_label_stays_where_no_other_feature_is(tmp_path: Path) -> None:
    rows = pl.read_csv(outcome_log(tmp_path / "log.csv")).select("seconds", "click")
    rows.write_csv(tmp_path / "two.csv")
    assert roles(tmp_path / "two.csv")["seconds"].role == "dense"


@pytest.mark.parametrize("kind", ["numbers", "with blanks", "texts"])
def test_the_area_by_one_column_is_that_of_all_pairs(kind: str) -> None:
    draw = np.random.default_rng(5)
    ones = draw.integers(0, 2, 400)
    numbers = np.round(ones + draw.normal(0, 1, 400), 1)
    values = pl.Series("x", numbers)
    scores = numbers
    if kind == "with blanks":
        blank = draw.random(400) < 0.2
        values = pl.Series("x", [None if no else one for one, no in zip(numbers.tolist(), blank, strict=True)])
        scores = np.where(blank, -np.inf, numbers)
    elif kind == "texts":
        codes = draw.integers(0, 8, 400)
        values = pl.Series("x", [f"t{code}" for code in codes])
        scores = np.array([ones[codes == code].mean() for code in codes])
    label = pl.Series("y", [*ones.tolist(), None])  # a blank label does not count
    first, second = scores[ones == 1][:, None], scores[ones == 0][None, :]
    pairs = np.where(first == second, 0.5, first > second)
    expected = max(pairs.mean(), 1 - pairs.mean())
    assert told_alone(pl.concat([values, values.head(1)]), label) == pytest.approx(expected, abs=1e-12)


def test_few_rows_and_rare_values_tell_nothing() -> None:
    ones = [0, 1] * 49
    assert told_alone(pl.Series(ones), pl.Series(ones)) == 0.5
    ones = [0, 1] * 500
    assert told_alone(pl.Series([f"user {row}" for row in range(1000)]), pl.Series(ones)) == 0.5
    assert told_alone(pl.Series(ones), pl.Series(ones)) == 1.0
    assert told_alone(pl.Series([-one for one in ones]), pl.Series(ones)) == 1.0
    assert told_alone(pl.Series([None] * 1000, dtype=pl.Float64), pl.Series(ones)) == 0.5


def test_weights_and_what_follows_an_outcome_are_told_by_their_names(tmp_path: Path) -> None:
    weights = np.random.default_rng(4).choice([1.0, 2.5], 2000)
    path = outcome_log(tmp_path / "log.csv", sample_weight=weights, revenue_eur=weights, watch_time_s=weights)
    found = roles(path)
    assert [found[name].role for name in ("sample_weight", "revenue_eur", "watch_time_s")] == [
        *("weight", "left out", "left out"),
    ]
    assert schema_of(list(found.values())).weight == "sample_weight"
    named = outcome_log(tmp_path / "named.csv", sample_weight=["a"] * 1999 + ["b"])
    assert roles(named)["sample_weight"].role == "categorical"
    blank = outcome_log(tmp_path / "blank.csv", sample_weight=[1.5] * 1998 + [2.0, None])
    assert roles(blank)["sample_weight"].why.endswith("but blank in some rows, below 0 or too large")
    two = roles(outcome_log(tmp_path / "two.csv", sample_weight=weights, row_weight=weights + 1))
    assert (two["sample_weight"].role, two["row_weight"].why) == ("weight", "another weight")
    past = roles(outcome_log(tmp_path / "past.csv", watched_7d=weights, avg_dwell_time=weights, dwell_time_ms=weights))
    assert [past[name].role for name in ("watched_7d", "avg_dwell_time", "dwell_time_ms")] == [
        *("dense", "dense", "left out"),
    ]


def test_a_code_that_tells_the_label_in_no_order_is_left_out(tmp_path: Path) -> None:
    click = np.random.default_rng(3).integers(0, 2, 2000)
    codes = np.where(click == 1, 2, np.where(np.arange(2000) % 2, 1, 3))
    assert roles(outcome_log(tmp_path / "log.csv", page_type=codes))["page_type"].role == "left out"


def test_times_that_training_would_refuse_or_take_otherwise_are_named(tmp_path: Path) -> None:
    times = [f"2026-03-01T10:{row // 60:02}:{row % 60:02}" for row in range(2000)]
    blank = roles(outcome_log(tmp_path / "a.csv", at=[*times[:-3], None, None, None]))["at"]
    assert (blank.role, blank.why[:24]) == ("left out", "times, blank in 3 rows: ")
    mixed = roles(
        outcome_log(tmp_path / "b.csv", at=[f"{one}+01:00" if row % 2 else one for row, one in enumerate(times)])
    )
    assert mixed["at"].role == "timestamp"
    assert mixed["at"].why.endswith("those without a time zone are taken as UTC")
    zoned = roles(outcome_log(tmp_path / "c.csv", at=[f"{one}Z" for one in times]))
    assert "zone" not in zoned["at"].why


def test_rows_that_stand_twice_are_counted(tmp_path: Path) -> None:
    ids = [f"e{row}" for row in range(1990)]
    found = roles(outcome_log(tmp_path / "log.csv", event_id=[*ids, *ids[:10]]))
    assert found["event_id"].why.endswith("; 10 rows with one of an earlier row: the same row twice?")


def test_a_label_that_is_not_there_is_answered_with_what_may_be_meant(tmp_path: Path) -> None:
    path = outcome_log(tmp_path / "log.csv")
    with pytest.raises(DataError, match=r"there is no column 'Click'; did you mean 'click'\?"):
        roles(path, ("Click",))
    with pytest.raises(DataError, match="repeat --label for each of them"):
        roles(path, ("click,price",))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_that_a_file_lacks_is_left_out_and_the_recipe_trains(tmp_path: Path, kind: str) -> None:
    frame = frame_of()
    write_log = (
        (lambda one, path: one.write_csv(path)) if kind == "csv" else (lambda one, path: one.write_parquet(path))
    )
    kept = frame.drop("tags", "kinds")
    names = [str(tmp_path / f"{name}.{kind}") for name in ("one", "two")]
    write_log(kept, names[0])
    later = kept.drop("ctr").with_columns(pl.col("event_time") + 10_000_000, added=pl.lit(1))
    write_log(later, names[1])
    found = {one.name: one for one in write_recipe(names, tmp_path / "log.toml", labels=["clicked"])}
    assert (found["ctr"].role, found["ctr"].why) == ("left out", f"two.{kind} has no such column")
    assert found["added"].role == "left out"
    assert found["score_count"].role == "dense"
    recipe = load(tmp_path / "log.toml", [f"data.cache_dir={tmp_path / 'cache'}"])
    assert isinstance(recipe, RankingRecipe)
    assert len(prepare(recipe.data, progress=False).train)
    write_log(later.drop("clicked"), names[1])
    with pytest.raises(DataError, match=f"two.{kind}: column 'clicked' is missing, and is the label"):
        write_recipe(names, tmp_path / "other.toml", labels=["clicked"])
