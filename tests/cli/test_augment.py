"""``cordillera augment``: streams in, examples and students out, and what it says when something is wrong."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import tomlkit

from cordillera import workflows
from cordillera.cli import augment as command
from cordillera.cli._show import CommandOutput
from cordillera.data.ranking.stream.parts import StreamFolder
from cordillera.errors import Interrupted
from cordillera.run import Run
from cordillera.workflows.streams.augmentation import load_streams, student_recipes

SCHEMA: dict[str, Any] = {
    "ids": ["event"],
    "timestamp": "time",
    "labels": ["buy"],
    "group": "user",
    "dense": [{"name": "price"}],
    "categorical": [{"name": name, "encoding": "hash", "num_embeddings": 200} for name in ("user", "item")],
}
TEACHER: dict[str, Any] = {
    "publish_every": 300,
    "batch_size": 64,
    "model": {"name": "dnn", "embedding_dim": 4, "mlp": [8, 6]},
}


def write_logs(folder: Path, rows: int = 2_000, first: int = 0, begin: int = 1_000_000) -> None:
    """Write events and labels of two streams that have about half of their events in common."""
    random = np.random.default_rng(first)
    users, items = random.integers(0, 40, rows), random.integers(0, 30, rows)
    events = pl.DataFrame(
        {
            "event": np.arange(first, first + rows),
            "time": begin + np.sort(random.integers(0, 50_000, rows)),
            "user": users,
            "item": items,
            "price": random.lognormal(3, 1, rows).round(2),
        }
    )
    chosen = pl.Series(random.random(rows) < 0.2 + 0.4 * (users % 3 == 0))
    labels = events.select("event", pl.col("time") + pl.Series(random.integers(0, 300, rows)), buy=pl.lit(1))
    labels = labels.filter(chosen).sort("time", maintain_order=True)
    for name, own in {"north": items < 20, "south": items >= 10}.items():
        part = events.filter(pl.Series(own))
        part.write_parquet(folder / f"{name}-events-{first:06d}.parquet")
        labels.join(part, on="event", how="semi").write_parquet(folder / f"{name}-labels-{first:06d}.parquet")


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    streams = {
        name: {kind: str(folder / f"{name}-{kind}-*.parquet") for kind in ("events", "labels")}
        for name in ("north", "south")
    }
    found = {
        "out": str(folder / "out"),
        "schema": SCHEMA,
        "join": {"window_s": 300},
        "streams": streams,
        "teacher": TEACHER,
        **changes,
    }
    return {key: value for key, value in found.items() if value is not None}


def write_settings(folder: Path, **changes: Any) -> str:
    path = folder / "streams.toml"
    path.write_text(tomlkit.dumps(settings(folder, **changes)))
    return str(path)


def student(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "data": {
            "path": str(folder / "out" / "north" / "*.parquet"),
            "schema": {
                "timestamp": "time",
                "labels": ["buy"],
                "dense": [{"name": "teacher_past", "width": 6, "transform": "standardise"}],
                "categorical": SCHEMA["categorical"],
                "teacher": {"scores": {"buy": "teacher_buy"}, "learnt_until": "teacher_learnt_until"},
            },
            "batch_size": 64,
            "cache_dir": str(folder / "cache"),
        },
        "model": {"name": "dnn", "embedding_dim": 2, "mlp": [4]},
        "training": {"progressive": True, "teacher": {"head": "auxiliary", "adapter": True}},
        **changes,
    }


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    write_logs(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_streams_become_examples_and_students(cli: Any, logs: Path) -> None:
    recipe = logs / "north.toml"
    recipe.write_text(tomlkit.dumps(student(logs)))
    file = write_settings(logs, past={"events": 5})
    result = cli("augment", file, "--finish", "--students", "--set", f"streams.north.student={recipe}")
    assert result.code == 0, result.out + result.err
    assert "events that the teacher has scored" in (result.out + result.err)
    assert "test split" in (result.out + result.err)
    run = logs / "out" / "north" / "run"
    assert (run / "report.html").is_file()
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["teacher"]["buy"]["examples"] == evaluation["examples"]
    assert "buy (teacher)" in json.loads((run / "progressive.json").read_text())
    page = (run / "report.html").read_text()
    assert "<h2>Teacher</h2>" in page
    assert "buy, teacher" in page
    again = cli("augment", file, "--finish", "--students", "--set", f"streams.north.student={recipe}")
    assert again.code == 0, again.out + again.err
    assert (logs / "out" / "north" / "run-2").is_dir()


def test_students_read_times_in_seconds_as_examples_have_them(logs: Path) -> None:
    content = student(logs)
    content["data"]["schema"]["timestamp_unit"] = "ms"  # as the log had them
    label = content["data"]["schema"]["labels"][0]
    content["data"] |= {"null_values": ["NA"], "decimal_comma": True, "positive": {label: "= yes"}}
    content["data"] |= {"timestamp_format": "%d/%m/%Y"}
    recipe = logs / "north.toml"
    recipe.write_text(tomlkit.dumps(content))
    config = load_streams(write_settings(logs), [f"streams.north.student={recipe}"])
    data = student_recipes(config)["north"].data
    assert data.schema_ is not None
    assert data.schema_.timestamp_unit == "s"
    assert (data.null_values, data.decimal_comma, data.positive, data.timestamp_format) == ((), False, {}, None)


def test_files_that_come_later_are_found(cli: Any, logs: Path) -> None:
    file = write_settings(logs)
    first = cli("augment", file, "--quiet")
    assert first.code == 0, first.out + first.err
    assert "events wait for their labels; all rows are there until 1970-01-13" in (first.out + first.err)
    assert "the next rows must be of streams." in (first.out + first.err)
    write_logs(logs, first=2_000, begin=1_060_000)
    second = cli("augment", file, "--finish")
    assert second.code == 0, second.out + second.err
    assert "going on after" in (second.out + second.err)
    parts = pl.read_parquet(str(logs / "out" / "north" / "*.parquet"))
    whole = pl.concat([pl.read_parquet(path) for path in sorted(logs.glob("north-events-*.parquet"))])
    assert parts["event"].to_list() == [str(event) for event in whole.sort("time", "event")["event"]] or set(
        parts["event"]
    ) == set(map(str, whole["event"].to_list()))
    assert len(parts) == len(whole)
    write_logs(logs, first=4_000, begin=1_120_000)
    third = cli("augment", file)
    assert third.code == 2
    assert "was finished, and cannot take new rows" in (third.out + third.err)


def trained_teacher(cli: Any, folder: Path, **schema: Any) -> Path:
    """Train a run on events before the streams."""
    write_logs(folder / "past", first=10_000, begin=900_000)
    events, labels = (pl.read_parquet(f"{folder}/past/north-{kind}-*.parquet") for kind in ("events", "labels"))
    frame = events.join(labels.select("event", "buy"), on="event", how="left").with_columns(pl.col("buy").fill_null(0))
    frame.with_columns(other=pl.lit(1.0)).sample(fraction=1.0, seed=1).sort("time").write_parquet(folder / "t.parquet")
    content = {
        "data": {
            "path": str(folder / "t.parquet"),
            "schema": {**SCHEMA, **schema},
            "cache_dir": str(folder / "cache"),
        },
        "model": {"name": "dnn", "embedding_dim": 4, "mlp": [8]},
    }
    (folder / "teacher.toml").write_text(tomlkit.dumps(content))
    result = cli("train", str(folder / "teacher.toml"), "--run", str(folder / "teacher"), "--quiet")
    assert result.code == 0, result.out + result.err
    return folder / "teacher"


def test_a_finished_run_scores_as_predict_does(cli: Any, logs: Path) -> None:
    (logs / "past").mkdir()
    run = trained_teacher(cli, logs)
    file = write_settings(logs, teacher=None, teacher_run=str(run), past={"events": 3})
    result = cli("augment", file, "--finish")
    assert result.code == 0, result.out + result.err
    found = pl.read_parquet(str(logs / "out" / "south" / "*.parquet"))
    (events,) = logs.glob("south-events-*.parquet")
    scores = cli("predict", str(run), str(events), "--out", str(logs / "scores.parquet"))
    assert scores.code == 0, scores.out + scores.err
    wanted = pl.read_parquet(logs / "scores.parquet").with_columns(pl.col("event").cast(pl.String))
    joined = found.join(wanted, on="event")
    assert len(joined) == len(found)
    probabilities = 1 / (1 + np.exp(-joined["teacher_buy"].cast(pl.Float64).to_numpy()))
    np.testing.assert_allclose(probabilities, joined["score"].to_numpy(), rtol=1e-2)  # bf16
    assert found["teacher_version"].n_unique() == 1
    assert found["teacher_learnt_until"].max() < found["time"].min()


def test_a_teacher_of_another_schema_or_of_later_samples_is_refused(cli: Any, logs: Path) -> None:
    (logs / "past").mkdir()
    run = trained_teacher(cli, logs, dense=[{"name": "price"}, {"name": "other"}])
    result = cli("augment", write_settings(logs, teacher=None, teacher_run=str(run)))
    assert result.code == 2
    assert "reads ['other'], which are no columns of the streams" in (result.out + result.err)
    card = json.loads((run / "model.json").read_text())
    assert card["data"]["facts"]["times"]["train"][1] < 1_000_000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"teacher": None}, "give either [teacher], which learns, or teacher_run"),
        ({"teacher_run": "x"}, "give either [teacher], which learns, or teacher_run"),
        ({"join": {"window": 3}}, "join.window_s: is missing"),
        ({"join": {"window_s": -1}}, "join.window_s: must be at least 0"),
        ({"join": {"window_s": 1, "unlabelled": "missing"}}, "needs schema.missing_labels = true"),
        ({"streams": {}}, "streams: "),
        ({"streams": {"state": {"events": "x"}}}, "a stream cannot be named 'state'"),
        ({"schema": {**SCHEMA, "timestamp": None}}, "streams are joined in time: name schema.timestamp"),
        ({"schema": {**SCHEMA, "ids": []}}, "labels find their event by its id"),
        ({"schema": {**SCHEMA, "group": None}, "past": {"events": 3}}, "past events are those of a group"),
        ({"past": {"label": "view"}}, "past.label 'view' is no label"),
        (
            {"teacher": {"model": {"name": "dnn", "mpl": [3]}}},
            "teacher.model.mpl: is not a key here; did you mean 'mlp'?",
        ),
        ({"teacher": {"model": {"name": "bert"}}}, "teacher.model.name: must be one of lr, fm"),
        ({"streams": {"north": {"event": "x"}}}, "streams.north.event: is not a key here; did you mean 'events'?"),
    ],
)
def test_settings_without_sense_are_refused_by_name(
    cli: Any, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    content = settings(tmp_path, **changes)
    content["schema"] = {key: value for key, value in content["schema"].items() if value is not None}
    path = tmp_path / "streams.toml"
    path.write_text(tomlkit.dumps(content))
    result = cli("augment", str(path))
    assert result.code == 2
    assert said in (result.out + result.err), result.out + result.err
    assert "in the file of streams" in (result.out + result.err)


def test_files_and_students_that_are_not_there_are_refused(cli: Any, tmp_path: Path) -> None:
    file = write_settings(tmp_path)
    for more, said in (
        ([], "no file fits the pattern"),
        (["--students"], "is named by no stream"),
        (["--students", "--set", "streams.north.student=nowhere.toml"], "is neither a shipped recipe"),
        (["--set", "join"], "must look like section.key=value"),
    ):
        result = cli("augment", file, *more)
        assert result.code == 2
        assert said in (result.out + result.err), result.out + result.err
    result = cli("augment", str(tmp_path / "no.toml"))
    assert result.code == 2
    assert "does not exist" in (result.out + result.err)


def test_a_folder_that_another_process_writes_is_refused(cli: Any, logs: Path) -> None:
    file = write_settings(logs)
    with StreamFolder(logs / "out", ("north", "south")).lock():
        result = cli("augment", file)
    assert result.code == 2
    assert "another process writes into it" in (result.out + result.err)


@pytest.mark.parametrize("is_begun", [False, True])
def test_ctrl_c_outside_of_a_student_s_steps_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    folder = tmp_path / "out" / "north" / "run"

    def stop(recipe: Any, folder: Path, **options: Any) -> None:
        if is_begun:
            Run.create(folder, "seed = 1\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(workflows, "train", stop)
    recipes: Any = {"north": "a recipe"}
    with pytest.raises(Interrupted, match="the student of north is not finished") as stopped:
        command._train_students(CommandOutput(False), recipes, tmp_path / "out", True)
    again = f"continue with: cordillera train {shlex.quote(str(folder))} --resume"
    assert stopped.value.remedy == (again if is_begun else "give the same command again")
