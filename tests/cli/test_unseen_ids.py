"""Ids that are written differently than in training, blanks and numbers in another unit are said aloud."""

import re
import warnings

import polars as pl
import pytest

from cordillera import workflows
from cordillera.errors import RunError
from cordillera.recipe import load

from .conftest import RECIPE, write_log


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose last rows, the test split, hold users of another kind, and one label only."""
    folder = tmp_path_factory.mktemp("run")
    log = pl.read_csv(write_log(folder / "log.csv", rows=600), infer_schema=False)
    late = pl.int_range(pl.len()) >= 540
    log = log.with_columns(
        user=pl.when(late).then(pl.lit("U-") + pl.col("user")).otherwise(pl.col("user")),
        click=pl.when(late).then(pl.lit("0")).otherwise(pl.col("click")),
    )
    log.write_csv(folder / "log.csv")
    (folder / "small.toml").write_text(RECIPE.format(path=folder / "log.csv"))
    recipe = load(folder / "small.toml", ["data.cache_dir=" + str(folder / "cache"), "training.epochs=1"])
    with pytest.warns(UserWarning, match="the test split: 100 % of the ids of 'user' are blank or unknown"):
        return workflows.train(recipe, folder / "run").run.folder


def test_evaluate_says_that_ids_of_a_split_are_unseen(run):
    with pytest.warns(
        UserWarning, match="the test split: 100 % of the ids of 'user' .*, 0 % of those of the validation"
    ):
        workflows.evaluate(run)


def test_one_class_in_the_test_split_is_undefined_not_refused(cli, run):
    with pytest.warns(UserWarning, match="unknown to the model"):
        result = cli("evaluate", run)
    assert result.code == 0, result.err
    assert "undefined" in result.out


def test_a_run_is_not_evaluated_with_the_vocabularies_of_changed_data(cli, run):
    path = run.parent / "log.csv"
    before, evaluated = path.read_bytes(), (run / "evaluation.json").read_bytes()
    log = pl.read_csv(path, infer_schema=False)
    try:
        log.with_columns(user=pl.col("user").sort()).write_csv(path)
        for command in ("evaluate", "quantize", "probe", "inject"):
            result = cli(command, run)
            assert result.code == 2, command
            assert "has changed since the run was trained" in result.err, command
        assert (run / "evaluation.json").read_bytes() == evaluated
    finally:
        path.write_bytes(before)
    with pytest.warns(UserWarning, match="unknown to the model"):
        assert cli("evaluate", run).code == 0


def test_predict_says_that_ids_are_unseen_and_only_then(cli, run, tmp_path, recwarn):
    log = pl.read_csv(run.parent / "log.csv", infer_schema=False).head(300)
    log.write_csv(tmp_path / "same.csv")
    assert cli("predict", run, "same.csv").code == 0
    assert not [one for one in recwarn if "unknown to the model" in str(one.message)]
    other = pl.col("seen").str.split("|").list.eval("x" + pl.element()).list.join("|")
    log.with_columns(user=pl.col("user").str.to_uppercase(), seen=other).write_csv(tmp_path / "other.csv")
    with pytest.warns(UserWarning, match="other.csv: 100 % of the ids of") as caught:
        assert cli("predict", run, "other.csv").code == 0
    told = [str(one.message) for one in caught]
    assert sorted(text.split("'")[1] for text in told) == ["seen", "user"]


def test_the_command_prints_warnings_for_people(cli, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    cli("data", "list")
    told = warnings.formatwarning("log.csv: is \x1b[31mold", UserWarning, "code.py", 7)
    assert told == "warning: log.csv: is \\x1b[31mold\n"
    assert "code.py:7" in warnings.formatwarning("x", DeprecationWarning, "code.py", 7)


@pytest.mark.parametrize("transform", ["standardise", "log", "quantile"])
def test_numbers_in_another_unit_and_empty_columns_are_told_and_only_they(tmp_path, transform):
    log = pl.read_csv(write_log(tmp_path / "log.csv", rows=600), infer_schema=False)
    text = RECIPE.format(path=tmp_path / "log.csv").replace(
        'name = "price"', f'name = "price", transform = "{transform}"'
    )
    (tmp_path / "small.toml").write_text(text)
    recipe = load(tmp_path / "small.toml", [f"data.cache_dir={tmp_path / 'cache'}", "training.epochs=1"])
    folder = workflows.train(recipe, tmp_path / "run").run.folder
    price = pl.col("price").cast(pl.Float64)
    texts = {
        "same": (log, None),
        "half": (log.with_columns(price=pl.when(pl.int_range(pl.len()) % 40 == 0).then(None).otherwise("price")), None),
        "cents": (log.with_columns(price=1000 * price), r"the mean.* of 'price' is \d+\.\d standard deviations above"),
        "below": (log.with_columns(price=price / 1000 - 1), r"'price' is \d+\.\d standard deviations below"),
        "blank": (log.with_columns(price=pl.lit("")), "'price' is blank in 100 % of the rows, in training in 6 %"),
    }
    for name, (frame, said) in texts.items():
        frame.write_csv(tmp_path / f"{name}.csv")
        for run in (
            lambda file: workflows.evaluate(folder, file=file),
            lambda file: workflows.predict(folder, file, tmp_path / "scores.csv"),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run(tmp_path / f"{name}.csv")
            told = [str(one.message) for one in caught if "'price'" in str(one.message)]
            assert len(told) == (said is not None), (name, told)
            assert said is None or re.search(said, told[0]), (name, told)


def test_an_id_that_is_called_like_a_score_is_refused_by_name(tmp_path):
    log = pl.read_csv(write_log(tmp_path / "log.csv"))
    log.with_columns(score=pl.lit(1)).write_csv(tmp_path / "log.csv")
    text = RECIPE.format(path=tmp_path / "log.csv").replace('ids = ["id"]', 'ids = ["id", "score"]')
    (tmp_path / "ids.toml").write_text(text)
    recipe = load(tmp_path / "ids.toml", [f"data.cache_dir={tmp_path / 'cache'}", "training.epochs=1"])
    trained = workflows.train(recipe, tmp_path / "run").run.folder
    with pytest.raises(RunError, match="would have two columns called 'score'"):
        workflows.predict(trained, tmp_path / "log.csv", tmp_path / "scores.csv")
    assert not (tmp_path / "scores.csv").exists()
