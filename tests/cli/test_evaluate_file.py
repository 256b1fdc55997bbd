"""``cordillera evaluate RUN --file``: other samples with labels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fsspec
import polars as pl
import pytest

import cordillera
from cordillera import workflows
from cordillera.recipe import load

from .conftest import RECIPE, write_log


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and its log, which is that of the fixture ``recipe``; each test takes a copy."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.toml").write_text(RECIPE.format(path=write_log(folder / "log.csv")))
    changes = [f"data.cache_dir={folder / 'cache'}", "training.epochs=1", "threads=1"]
    workflows.train(load(folder / "small.toml", changes), folder / "run")
    return folder


@pytest.fixture
def run(trained: Path, cli, tmp_path: Path) -> Path:
    """A finished run of one's own, beside its log."""
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.copy(trained / "log.csv", tmp_path)
    return Path("run")


def test_the_test_split_as_a_file_has_the_metrics_of_the_split(cli, run: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in run.iterdir())
    frame = pl.read_csv(tmp_path / "log.csv")
    (tmp_path / "days" / "dt=1").mkdir(parents=True)
    frame[900:950].write_csv(tmp_path / "days" / "dt=1" / "a.csv")
    frame[950:].write_csv(tmp_path / "days" / "dt=1" / "b.csv")
    of_split = json.loads(cli("evaluate", run, "--split", "test", "--json").out)
    of_files = json.loads(cli("evaluate", run, "--file", tmp_path / "days", "--json").out)
    assert of_files["examples"] == of_split["examples"] == 100
    assert of_files["split"] == "days"
    assert of_files["step"] == of_split["step"]
    for name, value in of_split["tasks"]["click"]["metrics"].items():
        assert of_files["tasks"]["click"]["metrics"][name] == pytest.approx(value, rel=1e-5), name
    assert of_files["segments"]["device"].keys() == of_split["segments"]["device"].keys()
    assert sorted(path.name for path in run.iterdir()) == before
    frame[900:].drop("time").write_csv(tmp_path / "timeless.csv")
    timeless = json.loads(cli("evaluate", run, "--file", tmp_path / "timeless.csv", "--json").out)
    assert timeless["tasks"] == of_files["tasks"]
    shown = cli("evaluate", run, "--file", tmp_path / "days")
    assert "days" in shown.out
    assert "click" in shown.out


def test_rows_without_a_label_are_left_out_and_counted(cli, run: Path, tmp_path: Path) -> None:
    frame = pl.read_csv(tmp_path / "log.csv")[900:]
    frame.filter(pl.int_range(100) >= 7).write_csv(tmp_path / "known.csv")
    unknown = pl.when(pl.int_range(100) >= 7).then("click").alias("click")
    frame.with_columns(unknown).write_csv(tmp_path / "all.csv")
    known = json.loads(cli("evaluate", run, "--file", tmp_path / "known.csv", "--json").out)
    with pytest.warns(UserWarning, match="'click' is blank in 7 rows, left out of its metrics"):
        found = cli("evaluate", run, "--file", tmp_path / "all.csv", "--json")
    assert json.loads(found.out)["tasks"] == known["tasks"]


def test_runs_are_compared_on_a_file_that_neither_has_seen(cli, run: Path, recipe: Path, tmp_path: Path) -> None:
    pl.read_csv(tmp_path / "log.csv")[900:].write_csv(tmp_path / "next.csv")
    other = ("--run", "other", "-q", "--set", "training.epochs=1", "--set", "threads=1", "--set", "data.split=random")
    assert cli("train", recipe, *other).code == 0
    found = json.loads(cli("compare", run, "other", "--file", "next.csv", "--json").out)
    for name, row in zip((run, "other"), found["rows"], strict=True):
        alone = json.loads(cli("evaluate", name, "--file", "next.csv", "--json").out)
        assert row["metrics"]["click"]["ne"]["value"] == pytest.approx(alone["tasks"]["click"]["metrics"]["ne"])


def test_a_new_model_is_told_to_be_better_or_worse_on_a_file(cli, run: Path, recipe: Path, tmp_path: Path) -> None:
    pl.read_csv(tmp_path / "log.csv").write_csv(tmp_path / "week.csv")
    other = ("--run", "better", "-q", "--set", "training.epochs=30", "--set", "threads=1")
    assert cli("train", recipe, *other).code == 0
    shown = cli("compare", run, "better", "--file", "week.csv", "--fail-if-worse")
    assert shown.code == 0, shown.err
    assert "better is better than run by the NE of click: -" in " ".join(shown.out.split())
    failed = cli("compare", "better", run, "--file", "week.csv", "--fail-if-worse", "--json")
    assert failed.code == 1
    assert "status 1, as --fail-if-worse is given: run is worse" in failed.err
    found = json.loads(failed.out)
    interval = found["rows"][1]["over_samples"]["click"]["relative_ne"]
    assert 0 < interval["low"] < interval["value"] < interval["high"]
    assert found["unit"] == "group"  # users, of the recipe's schema
    assert cli("compare", "better", run, "--file", "week.csv").code == 0
    shutil.copytree("better", "new/run")  # of the same name as another row
    alike = cli("compare", "better", run, "new/run", "--file", "week.csv", "--fail-if-worse")
    assert alike.code == 1
    assert f"given: {(tmp_path / 'run').resolve()} is worse" in " ".join(alike.err.split())
    for arguments, why in (
        (("better", run), "the NE difference of click has no interval: run"),
        (("better",), "there is one row"),
    ):
        refused = cli("compare", *arguments, "--fail-if-worse")
        assert refused.code == 2
        assert why in refused.err


def test_runs_on_a_file_are_not_said_to_lack_a_test_split(cli, run: Path, tmp_path: Path) -> None:
    pl.read_csv(tmp_path / "log.csv")[900:].write_csv(tmp_path / "next.csv")
    (run / "evaluation.json").unlink()  # as in a run that was interrupted
    shown = cli("compare", run, "--file", "next.csv")
    assert shown.code == 0, shown.err
    assert "Evaluated on next.csv" in shown.out
    assert "test split" not in shown.out


def test_folders_of_searches_are_left_out_of_a_comparison(cli, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "found")
    (tmp_path / "found" / "search.json").write_text("{}")
    shown = cli("compare", "found", run)
    assert shown.code == 0, shown.err
    assert "found is the folder of a search, which holds no model, and is left out" in " ".join(shown.out.split())
    alone = cli("compare", "found")
    assert alone.code == 2
    assert "is the folder of a search" in alone.err


def test_samples_in_a_store_are_evaluated_and_scored_as_those_on_the_disk(
    cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "copies"))
    store, address = fsspec.filesystem("memory"), f"memory://{tmp_path.name}/new.csv"
    lines = (tmp_path / "log.csv").read_text().splitlines(keepends=True)
    (tmp_path / "near.csv").write_text("".join(lines[:60]))
    store.makedirs(f"/{tmp_path.name}", exist_ok=True)
    store.pipe_file(f"/{tmp_path.name}/new.csv", (tmp_path / "near.csv").read_bytes())
    near, far = (json.loads(cli("evaluate", run, "--file", one, "--json").out) for one in ("near.csv", address))
    assert (near["tasks"], near["examples"]) == (far["tasks"], far["examples"])
    assert far["split"] == "new.csv"
    assert [cli("predict", run, one).code for one in ("near.csv", address)] == [0, 0]
    assert (run / "predictions/near.csv").read_text() == (run / "predictions/new.csv").read_text()


def test_what_cannot_be_evaluated_is_one_error(cli, run: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "other.csv", rows=30, seed=3)
    pl.read_csv(log).drop("click").write_csv(tmp_path / "unlabelled.csv")
    cases = [
        (("--file", tmp_path / "missing.csv"), "there is no such file"),
        (("--file", tmp_path / "unlabelled.csv"), "column 'click' is missing"),
        (("--file", log, "--split", "test"), "--file: does not go with a split"),
        (("--file", tmp_path), "does not tell the format|column"),
    ]
    for arguments, why in cases:
        found = cli("evaluate", run, *arguments)
        assert found.code == 2
        assert any(part in found.err for part in why.split("|")), found.err
        assert "Traceback" not in found.err


def test_rows_in_memory_are_read_as_those_of_the_file(cli, recipe: Path, tmp_path: Path) -> None:
    form = 'positive = { click = "= 0" }\nnull_values = ["NA"]\n\n[data.schema]'
    recipe.write_text(recipe.read_text().replace("[data.schema]", form))
    assert cli("train", recipe, "--run", "run", "-q", "--set", "training.epochs=1", "--set", "threads=1").code == 0
    frame = pl.read_csv(tmp_path / "log.csv", infer_schema=False)[900:].with_columns(pl.col("price").fill_null("NA"))
    frame.write_csv(tmp_path / "next.csv")
    of_file = cordillera.evaluate("run", file=tmp_path / "next.csv").metrics()
    assert cordillera.evaluate("run", rows=frame).metrics() == of_file
