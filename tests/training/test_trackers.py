"""A tracker gets what a run records, goes on when the run does, and can fail without harm once training has begun."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cordillera import workflows
from cordillera.errors import DependencyError
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.training import trackers
from cordillera.training.recorder import RunRecorder
from cordillera.training.trackers import ID_FILE, Tracking
from tests.cli.conftest import RECIPE, write_log


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE.format(path=write_log(tmp_path / "log.csv", rows=300)))
    return path


def train(recipe_file: Path, folder: Path, *settings: str) -> Run:
    recipe = load(recipe_file, [f"data.cache_dir={recipe_file.parent / 'cache'}", *settings])
    return workflows.train(recipe, folder).run


@pytest.fixture
def mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "tracked").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return mlflow.MlflowClient((tmp_path / "tracked").as_uri())


def test_mlflow_has_settings_curves_and_results_of_a_resumed_run(
    recipe_file: Path, tmp_path: Path, mlflow_client: Any
) -> None:
    keys = ["track='mlflow'", "training.log_every=1", "training.decay='none'", "training.warmup_fraction=0.0"]
    run = train(recipe_file, tmp_path / "run", *keys, "training.max_steps=2")
    workflows.train(run, changes=["training.max_steps=4"])
    experiment = mlflow_client.get_experiment_by_name("tests").experiment_id
    (found,) = mlflow_client.search_runs([experiment])
    assert run.read_json(ID_FILE) == {"mlflow": found.info.run_id}
    assert found.info.run_name == "run"
    assert found.info.status == "FINISHED"
    assert found.data.params["training.decay"] == "none"
    history = mlflow_client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted(one.step for one in history) == [1, 2, 3, 4]
    assert {one.step: one.value for one in history} == {
        one["step"]: one["loss"] for one in run.metrics() if one["kind"] == "train"
    }
    evaluation = run.read_json("evaluation.json")["tasks"]
    assert {task: found.data.metrics[f"test/{task}/ne"] for task in evaluation} == {
        task: one["metrics"]["ne"] for task, one in evaluation.items()
    }


@pytest.mark.slow
def test_weights_and_biases_has_settings_and_curves(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = train(recipe_file, tmp_path / "run", "track='wandb'", "training.log_every=1", "training.max_steps=4")
    files = sorted((run.folder / "wandb").rglob("*.wandb"))
    assert files
    content = b"".join(file.read_bytes() for file in files)
    for word in (b"train/loss", b"test/", b"max_steps", run.read_json(ID_FILE)["wandb"].encode()):
        assert word in content, word


class FakeWandB(ModuleType):
    """Weights & Biases as a resumed run meets it: steps that are not above those that it has are dropped."""

    Settings = dict

    def __init__(self) -> None:
        super().__init__("wandb")
        self.id, self.starting_step = "1", 0
        self.points: list[tuple[int, dict[str, float]]] = [(0, {})]

    def init(self, **settings: Any) -> FakeWandB:
        self.starting_step = self.points[-1][0] + 1 if settings["id"] else 0
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if step >= max(self.starting_step, self.points[-1][0]):
            self.points.append((step, values))

    def finish(self, exit_code: int) -> None: ...


def test_weights_and_biases_takes_results_after_the_last_step_and_each_step_once(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    keys = ["track='wandb'", "training.log_every=1", "training.decay='none'", "training.warmup_fraction=0.0"]
    run = train(recipe_file, tmp_path / "run", *keys, "training.max_steps=2")
    workflows.train(run, changes=["training.max_steps=5"])
    expected = {one["step"]: one["loss"] for one in run.metrics() if one["kind"] == "train"}
    curve = [(step, values["train/loss"]) for step, values in fake.points if "train/loss" in values]
    assert [step for step, _ in curve] == sorted({step for step, _ in curve})
    assert dict(curve).items() <= expected.items()
    last, results = fake.points[-1]
    assert last == 6
    evaluation = run.read_json("evaluation.json")["tasks"]
    assert {task: results[f"test/{task}/ne"] for task in evaluation} == {
        task: one["metrics"]["ne"] for task, one in evaluation.items()
    }


def test_a_tracker_that_is_not_installed_is_named(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        DependencyError, match=r"track: Weights & Biases is not installed\n  -> pip install wandb, or go on"
    ):
        train(recipe_file, tmp_path / "run", "track='wandb'", "training.max_steps=2")
    status = Run(tmp_path / "run").status()
    assert status is not None
    assert (status.ended, status.step) == ("failed", 0)


class Fails:
    """A tracker that takes two points and the end of no run."""

    id = "1"

    def __init__(self, run: Run, known: str | None) -> None:
        if (run.folder / "refuses").exists():
            raise OSError("no route to host\nmore")
        self.left = 2

    def draw(self, values: Any, step: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("the connection was closed")

    def end(self, ended: str) -> None:
        raise OSError("the connection was closed")


def test_a_tracker_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers._KINDS, "mlflow", Fails)
    run = Run.create(tmp_path / "run", "name = 'test'\ntrack = 'mlflow'\n")
    recorder = RunRecorder(run)

    def train() -> None:
        with recorder.recording(lambda: (0, 5)):
            for step in range(1, 6):
                recorder.draw({"loss": 1.0}, step)
            recorder.tell("finished", (5, 5))

    with pytest.warns(UserWarning, match="MLflow is left out from here on: the connection was closed") as warned:
        train()
    assert len(warned) == 1
    status = run.status()
    assert status is not None
    assert status.ended == "finished"
    (run.folder / "refuses").touch()
    with pytest.raises(DependencyError, match="MLflow refuses the run: no route to host"):
        Tracking(run)
    with pytest.warns(UserWarning, match="no route to host; the results are in the run's folder"):
        trackers.track_results(run, "test", {"click": {"ne": 0.9}}, 5)


def test_a_run_without_a_tracker_tells_nobody(tmp_path: Path) -> None:
    for number, recipe in enumerate(("name = 'test'\n", "name = 'test'\ntrack = 'none'\n")):
        run = Run.create(tmp_path / f"run-{number}", recipe)
        tracking = Tracking(run)
        tracking.draw({"loss": 1.0}, 1)
        tracking.end("finished")
        assert not (run.folder / ID_FILE).exists()
