"""A trained model in memory scores tables of every kind as the command scores a file, and says what is wrong."""

from __future__ import annotations

import math
import shutil
import threading
import warnings
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch

import cordillera
from cordillera import workflows
from cordillera.errors import CordilleraError, DataError, RunError
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.workflows.prediction import TrainedModel, predict
from cordillera.workflows.quantization import quantize
from cordillera.workflows.trained import start_of
from tests.cli.conftest import RECIPE, write_log

pd = pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run with a quantised model."""
    folder = tmp_path_factory.mktemp("run")
    path = folder / "small.toml"
    path.write_text(RECIPE.format(path=write_log(folder / "log.csv", rows=600)))
    recipe = load(path, ["training.epochs=1", f"data.cache_dir={folder / 'cache'}"])
    made = workflows.train(recipe, folder / "run").run.folder
    quantize(Run(made), 1e-2, smallest=True)
    return made


def tables(path: Path) -> dict[str, object]:
    """The rows of a CSV file of the small log as tables of every kind, with values of their own types."""
    frame = pl.read_csv(path).with_columns(pl.col("seen").fill_null("").str.split("|").list.filter(pl.element() != ""))
    pandas = pd.read_csv(path)
    pandas["seen"] = [[] if isinstance(one, float) else one.split("|") for one in pandas["seen"]]
    return {
        "polars": frame,
        "lazy": frame.lazy(),
        "text": pl.read_csv(path, infer_schema=False),
        "pandas": pandas,
        "pandas text": pd.read_csv(path, dtype=str),
        "pandas categories": pandas.astype({"user": "category", "device": "category"}),
        "pandas index": pandas.set_index(pandas.index[::-1]),
        "pandas nullable": pd.read_csv(path).convert_dtypes(),
        "arrow": frame.to_arrow(),
        "batch": frame.to_arrow().combine_chunks().to_batches()[0],
        "columns": frame.to_dict(as_series=False),
        "series": {name: pandas[name] for name in pandas.columns},
        "rows": frame.to_dicts(),
    }


@pytest.mark.parametrize("quantized", [False, True])
def test_tables_score_as_their_file(run: Path, tmp_path: Path, quantized: bool) -> None:
    path = write_log(tmp_path / "samples.csv", rows=300, seed=5)
    written, _ = predict(run, path, tmp_path / "scores.parquet", quantized=quantized)
    expected = pl.read_parquet(written)["score"].to_numpy()
    model = cordillera.load_model(run, quantized=quantized)
    for name, rows in tables(path).items():
        found = model.predict(rows)
        assert found.dtype == np.float64
        assert found.shape == (300,)
        assert np.array_equal(found, expected), name
    assert np.array_equal(model.predict(tables(path)["pandas"], batch_size=7), expected)


def test_files_whose_ids_differ_are_refused_by_name(run: Path, tmp_path: Path) -> None:
    frame = pl.read_csv(write_log(tmp_path / "log.csv", rows=40))
    (tmp_path / "days").mkdir()
    frame.write_parquet(tmp_path / "days" / "a.parquet")
    frame.with_columns(id=pl.int_range(40)).write_parquet(tmp_path / "days" / "b.parquet")
    written, count = predict(run, tmp_path / "days", tmp_path / "scores.csv")
    assert (count, pl.read_csv(written, infer_schema=False)["id"].to_list()[39:42]) == (80, ["r39", "0", "1"])
    with pytest.raises(DataError, match=r"b\.parquet.*the id 'id' is Int64, and String in the files before"):
        predict(run, tmp_path / "days", tmp_path / "scores.parquet")
    frame.drop("id").write_parquet(tmp_path / "days" / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet.*the id 'id' is missing"):
        predict(run, tmp_path / "days", tmp_path / "other.csv")
    with pytest.raises(DataError, match="would overwrite the samples"):
        predict(run, tmp_path / "days" / "*.parquet", tmp_path / "days" / "b.parquet")
    assert sorted(path.name for path in tmp_path.iterdir() if "o" in path.name) == ["log.csv", "scores.csv"]


def test_a_row_alone_and_threads_give_the_same_scores(run: Path, tmp_path: Path) -> None:
    frame = pl.read_csv(write_log(tmp_path / "samples.csv", rows=40, seed=6))
    model = cordillera.load_model(str(run))
    expected = model.predict(frame)
    assert [model.predict([row])[0] for row in frame.to_dicts()] == list(expected)
    found: dict[int, list[np.ndarray]] = {}

    def score(name: int) -> None:
        found[name] = [model.predict(frame) for _ in range(10)]

    threads = [threading.Thread(target=score, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert all(np.array_equal(one, expected) for many in found.values() for one in many)


def test_several_tasks_have_a_column_each(tmp_path: Path) -> None:
    log = pl.read_csv(write_log(tmp_path / "log.csv", rows=300)).with_columns(second=pl.col("click") ^ 1)
    log.write_csv(tmp_path / "log.csv")
    path = tmp_path / "two.toml"
    path.write_text(RECIPE.format(path=tmp_path / "log.csv").replace('["click"]', '["click", "second"]'))
    recipe = load(path, ["training.epochs=1", f"data.cache_dir={tmp_path / 'cache'}"])
    model = cordillera.load_model(workflows.train(recipe, tmp_path / "run").run)
    assert model.tasks == ("click", "second")
    written, _ = predict(tmp_path / "run", tmp_path / "log.csv", tmp_path / "scores.parquet")
    expected = pl.read_parquet(written).select("score_click", "score_second").to_numpy()
    assert np.array_equal(model.predict(log), expected)
    assert model.predict([]).shape == (0, 2)


def rows_of(frame: pl.DataFrame) -> dict[str, list[object]]:
    return {name: frame[name].to_list() for name in frame.columns}


def test_what_is_no_table_is_refused(run: Path, tmp_path: Path) -> None:
    model = cordillera.load_model(run)
    frame = pl.read_csv(write_log(tmp_path / "samples.csv", rows=3))
    rows = frame.to_dicts()
    cases: list[tuple[object, str]] = [
        ("samples.csv", "must be a pandas, Polars or Arrow table.*got str"),
        (None, "got NoneType"),
        (7, "got int"),
        ([1, 2], r"rows, row 0: must be a dict of columns, got int"),
        (rows[1], "column 'price' must be a sequence of values, got float"),
        ({"price": [1.0, 2.0], "user": ["a"], "device": ["b"], "seen": [[]]}, "columns differ in their numbers"),
        (frame.drop("device"), "column 'device' is missing; there are .*'user'"),
        ([{**rows[0]}, {key: rows[1][key] for key in rows[1] if key != "user"}], "row 1: column 'user' is missing"),
        (pd.DataFrame([rows[0]]).drop(columns=["seen"]), "column 'seen' is missing"),
        (pd.concat([frame.to_pandas(), frame.to_pandas()[["user"]]], axis=1), "stand twice.*user"),
        (frame.with_columns(price=pl.lit("dear")), "row 0, column 'price'.*'dear' is not a number"),
        (frame.to_pandas().assign(price=[1.0, None, "dear"]), "row 2, column 'price'.*'dear' is not a number"),
        ({**rows_of(frame), "price": np.array([1.0, "dear", 2], object)}, "row 1, column 'price'.*is not a number"),
        (frame.with_columns(price=pl.Series([1.0, math.inf, 2.0])), "row 1, column 'price'.*infinite"),
        (frame.with_columns(price=pl.Series([1.0, 2.0, math.nan])), "row 2, column 'price'.*NaN"),
        (frame.with_columns(user=pl.Series([1.5, 2.0, 3.0])), "row 0, column 'user'.*not an id"),
        ({**{name: frame[name] for name in frame.columns}, "user": [object()] * 3}, "column 'user'"),
        (pa.table({"price": [1.0]}), "is missing"),
    ]  # fmt: skip
    for wrong, why in cases:
        with pytest.raises(DataError, match=why):
            model.predict(wrong)
    mixed = [np.int64(1), np.float64(90.7), 2]
    expected = model.predict({**rows_of(frame), "price": [1.0, 90.7, 2.0]})
    for given in (mixed, np.array(mixed, object), pd.Series(mixed, dtype=object)):
        assert np.array_equal(model.predict({**rows_of(frame), "price": given}), expected)
    with pytest.raises(DataError, match="batch_size: must be at least 1"):
        model.predict(frame, batch_size=0)
    with pytest.raises(RunError):
        cordillera.load_model(tmp_path)
    assert len(model.predict(frame)) == 3


def test_nan_of_pandas_is_a_blank(run: Path, tmp_path: Path) -> None:
    frame = pl.read_csv(write_log(tmp_path / "samples.csv", rows=40))
    assert frame["price"].null_count() > 0
    pandas = frame.to_pandas()
    assert pandas["price"].isna().any()
    model = cordillera.load_model(run)
    assert np.array_equal(model.predict(pandas), model.predict(frame))


def test_a_recipe_reads_rows_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    log = write_log(tmp_path / "log.csv", rows=600)
    path.write_text(RECIPE.format(path=log))
    common = ["training.epochs=1", "threads=1", f"data.cache_dir={tmp_path / 'cache'}"]
    from_file = workflows.train(load(path, common), tmp_path / "file")
    path.write_text(RECIPE.format(path=log).replace(f'path = "{log}"', ""))
    pandas = pd.read_csv(log)
    recipe = cordillera.load_recipe(path, common, rows=pandas)
    in_memory = workflows.train(recipe, tmp_path / "memory")
    assert in_memory.evaluation is not None
    assert from_file.evaluation is not None
    assert in_memory.evaluation.metrics() == from_file.evaluation.metrics()
    again = cordillera.load_recipe(path, common, rows=pandas)
    assert again == recipe  # the same rows are not written twice
    assert len(list((tmp_path / "cache" / "rows").iterdir())) == 1
    assert workflows.evaluate(tmp_path / "memory").metrics() == in_memory.evaluation.metrics()
    with pytest.raises(DataError, match="column 'click' is missing"):
        cordillera.load_recipe(path, common, rows=pandas.drop(columns=["click"]))
    with pytest.raises(CordilleraError, match="of a language model"):
        cordillera.load_recipe("llama-debug", rows=pandas)


def test_batches_are_those_of_training(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE.format(path=write_log(tmp_path / "log.csv", rows=600)))
    recipe = load(path, [f"data.cache_dir={tmp_path / 'cache'}"])
    first, again = (list(workflows.batches(recipe)) for _ in range(2))
    assert [len(one) for one in first] == [100, 100, 100, 100, 80]
    assert all(torch.equal(a.dense, b.dense) for a, b in zip(first, again, strict=True))
    assert not torch.equal(next(workflows.batches(recipe, epoch=1)).dense, first[0].dense)
    (test,) = workflows.batches(recipe, "test")
    assert test.labels is not None
    assert test.labels.shape == (60, 1)
    with pytest.raises(DataError, match="split: must be one of train"):
        workflows.batches(recipe, "tset")


def test_the_package_shows_what_it_holds() -> None:
    assert {"load_model", "train", "batches", "__version__"} <= set(dir(cordillera))
    assert "annotations" not in dir(cordillera)
    assert cordillera.__version__.count(".") == 2
    for name in cordillera.__all__:
        assert getattr(cordillera, name) is not None


def test_a_model_says_what_it_is(run: Path) -> None:
    model = cordillera.load_model(run)
    assert isinstance(model, TrainedModel)
    assert model.columns == ("price", "user", "device", "seen")
    assert repr(model) == f"<wukong of {run}: 4 columns, tasks click>"


def test_rows_in_memory_are_evaluated_and_compared_as_their_file(run: Path, tmp_path: Path) -> None:
    path = write_log(tmp_path / "samples.csv", rows=300, seed=5)
    of_file = cordillera.evaluate(run, file=path)
    for name in ("polars", "pandas", "rows"):
        found = cordillera.evaluate(run, rows=tables(path)[name])
        assert found.metrics() == of_file.metrics(), name
        assert found.segments == of_file.segments
        assert found.split == "rows"
    by_file = cordillera.compare([run], path)
    by_rows = cordillera.compare([run], rows=tables(path)["pandas"])
    assert by_rows.to_markdown().replace("on rows,", "on samples.csv,") == by_file.to_markdown()
    for wrong in (
        {"split": "test", "rows": [{}]},
        {"file": path, "rows": [{}]},
        {"split": "test", "file": path},
        {"rows": [{}], "tokens": 5},
        {"rows": [{}], "dtype": "int8"},
    ):
        with pytest.raises(RunError, match="does not go with"):
            cordillera.evaluate(run, **wrong)
    with pytest.raises(RunError, match=r"file: must be text, got DataFrame; tables are given as rows="):
        cordillera.evaluate(run, file=tables(path)["polars"])
    with pytest.raises(RunError, match=r"runs: must be a list of runs, got"):
        cordillera.compare(str(run))
    with pytest.raises(DataError, match=r"column 'click' is missing"):
        cordillera.evaluate(run, rows=pl.read_csv(path).drop("click"))


def test_many_rows_with_ids_that_the_model_does_not_know_are_told(run: Path, tmp_path: Path) -> None:
    frame = pl.read_csv(write_log(tmp_path / "samples.csv", rows=300, seed=5))
    model = cordillera.load_model(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(frame)
        model.predict(frame.head(99).with_columns(user=pl.lit("nobody")))  # too few to tell
    with pytest.warns(UserWarning, match=r"rows: 100 % of the ids of 'user' are blank or unknown to the model"):
        model.predict(frame.with_columns(user=pl.lit("nobody")))


def test_embeddings_are_the_rows_of_the_tables_by_their_ids(run: Path) -> None:
    model = cordillera.load_model(run)
    found = model.embeddings("user")
    encoder = model._scorer.encoder
    assert found["id"].to_list() == encoder.names("user")
    assert found["id"][0] == "<other>"
    assert found["id"].n_unique() == len(found)
    rows = torch.tensor(found["embedding"].to_list())
    assert rows.equal(model.module.tables.table("user"))
    with pytest.raises(DataError, match="'price' is not an embedded feature"):
        model.embeddings("price")


def test_rows_of_dynamic_tables_have_no_ids_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE.format(path=write_log(tmp_path / "log.csv", rows=600)))
    recipe = load(path, ["training.epochs=1", f"data.cache_dir={tmp_path / 'cache'}", "tables.dynamic={}"])
    model = cordillera.load_model(workflows.train(recipe, tmp_path / "run").run)
    with pytest.raises(DataError, match="feature 'device': has a dynamic table"):
        model.embeddings("device")


def test_streams_of_arrow_are_read_once_and_empty_tables_refused(run: Path, tmp_path: Path) -> None:
    log = tables(write_log(tmp_path / "samples.csv", rows=300, seed=5))["arrow"]
    reader = pa.RecordBatchReader.from_batches(log.schema, log.to_batches())
    assert cordillera.compare([run], rows=reader).to_markdown() == cordillera.compare([run], rows=log).to_markdown()
    with pytest.raises(DataError, match="rows: there are none"):
        cordillera.evaluate(run, rows=log.slice(0, 0))


def test_a_status_of_an_older_version_does_not_stop_scoring(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "status.json").write_text('{"ended": "finished", "step": 3, "steps": 3, "why": ""}')
    log = write_log(tmp_path / "samples.csv", rows=30)
    with pytest.warns(UserWarning, match="does not say how far training came|status.json"):
        assert cordillera.predict(copy, log, tmp_path / "scores.csv")[1] == 30


def test_a_model_whose_training_was_not_finished_is_not_used_in_silence(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    Run(copy).write_status("interrupted", 3, 10)
    log = write_log(tmp_path / "samples.csv", rows=30)
    for use in (
        lambda: cordillera.load_model(copy),
        lambda: cordillera.predict(copy, log, tmp_path / "scores.csv"),
        lambda: start_of(load(copy, {"training.start": str(copy)})),
    ):
        with pytest.warns(UserWarning, match=r"copy: This run is not finished: .* interrupted at step 3 of 10"):
            use()


def test_one_row_of_pandas_is_refused_with_what_to_give(run: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(write_log(tmp_path / "samples.csv", rows=3))
    with pytest.raises(DataError, match=r"must be a table, got one row or column of one\n.*table\[i : i \+ 1\]"):
        cordillera.load_model(run).predict(frame.iloc[0])
    with pytest.raises(DataError, match=r"an input that is not known is a column of None"):
        cordillera.load_model(run).predict(frame.drop(columns=["user"]))
