"""The loop's records and checkpoints: once for each step, of training alone, and nothing lost where the text ends."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cordillera import workflows
from cordillera.data.language.batches import TextBatches
from cordillera.errors import (
    CheckpointError,
    CordilleraError,
    DataError,
    Interrupted,
    PlanError,
    RecipeError,
    RunError,
    TrainingError,
)
from cordillera.recipe import LanguageRecipe, dump, load, validate
from cordillera.run import Run
from cordillera.training.checkpoints import steps
from cordillera.training.language.engine import LanguageEngine
from cordillera.training.language.trainer import LanguageProgress, LanguageTrainer, peak_memory
from cordillera.training.scaling.isoflop_plan import PlannedRun
from cordillera.workflows import scaling
from tests.distributed.processes import needs_gloo


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with sentences of very different lengths."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CORDILLERA_CACHE", str(folder / "cache"))
    generator = random.Random(5)
    lines = ("far sea " * (1 + int(generator.paretovariate(0.8)) % 20) for _ in range(60))
    Path("text.jsonl").write_text("".join(json.dumps({"text": f"{n} {line}"}) + "\n" for n, line in enumerate(lines)))


def changed(**changes: dict[str, Any]) -> LanguageRecipe:
    """A small recipe on these sentences, with changes."""
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 32, "vocabulary": 258, "context": 64}
    content: dict[str, dict[str, Any]] = {
        "data": {"path": "text.jsonl", "tokenizer": "bytes", "held_out": 0.1},
        "packing": {"tokens": 256, "context": 64},
        "model": {"name": "llama", **sizes},
        "training": {"steps": 4, "log_every": 2},
    }
    for section, values in changes.items():
        content[section] = content.get(section, {}) | values
    found = validate({"device": "cpu", "threads": 1, **content})
    assert isinstance(found, LanguageRecipe)
    return found


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a small recipe with changes, in a folder with its text."""
    enter(tmp_path, monkeypatch)
    return changed


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the recipe without changes."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as monkeypatch:
        enter(folder, monkeypatch)
        workflows.train(changed(), "a")
    return folder / "a"


@pytest.fixture
def trained(trained_once: Path, recipe: Any) -> Run:
    """That run, of one's own, in a folder with the same text."""
    return Run(shutil.copytree(trained_once, "a"))


def places(run: Run, kind: str) -> list[int]:
    return [record["step"] for record in run.metrics() if record["kind"] == kind]


def test_a_mixture_with_weights_goes_on_after_its_cache_was_moved(recipe: Any, tmp_path: Path) -> None:
    sources = [{"path": ["text.jsonl"], "weight": 1}, {"path": "text.jsonl", "weight": 2}]
    data = {"path": None, "sources": sources, "cache_dir": str(tmp_path / "first")}
    run = workflows.train(recipe(data=data, training={"decay": "none"}), "a").run
    (tmp_path / "first").rename(tmp_path / "second")
    run.recipe_file.write_text(run.recipe_file.read_text().replace("first", "second").replace("steps = 4", "steps = 6"))
    assert workflows.train(run).report.progress.step == 6
    assert places(run, "train") == [2, 4, 6]
    Path("text.jsonl").write_text('{"text": "another"}\n{"text": "one"}\n')
    with pytest.raises(RunError, match="the text has changed"):
        workflows.train(run)


def test_a_text_that_ends_is_evaluated_and_saved_once_and_stays_ended(recipe: Any) -> None:
    ending = recipe(data={"epochs": 1}, training={"steps": 1000, "evaluate_every": 1, "checkpoint_every": 1})
    first = workflows.train(ending, "a")
    last = first.report.progress.step
    assert first.report.ended == "exhausted"
    assert 1 < last < 1000
    assert places(first.run, "train")[-1] == last
    assert places(first.run, "evaluation") == places(first.run, "checkpoint") == list(range(1, last + 1))
    again = workflows.train(first.run)
    assert again.report.ended == "exhausted"
    assert again.report.progress == first.report.progress
    assert again.report.evaluation[:4] == first.report.evaluation[:4]


def written(run: Run) -> list[tuple[str, int]]:
    """Kind and step of every record but those that say that a run went on."""
    return [(record["kind"], record["step"]) for record in run.metrics() if record["kind"] != "resumed"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("epochs", [None, 1])
def test_a_run_that_is_resumed_after_its_end_has_each_record_once(recipe: Any, epochs: int | None) -> None:
    ending = recipe(data={"epochs": epochs}, training={"steps": 7 if epochs is None else 1000, "log_every": 3})
    run = workflows.train(ending, "a").run
    before = written(run)
    for _ in range(2):
        (run.folder / "evaluation.json").unlink()
        workflows.train(run)
        assert written(run) == before
    assert [kind for kind, _ in before[-3:]] == ["train", "checkpoint", "evaluation"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("kept", ["train", "checkpoint", "evaluation"])
def test_a_run_that_was_killed_between_two_records_has_each_once(recipe: Any, kept: str) -> None:
    ending = recipe(data={"epochs": 1}, training={"steps": 1000, "log_every": 4, "checkpoint_every": 1})
    run = workflows.train(ending, "a").run
    before, metrics = written(run), run.folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    end = max(number for number, (kind, _) in enumerate(before) if kind == kept) + 1
    metrics.write_text("".join([*lines[:end], *(line[:20] for line in lines[end : end + 1])]))
    run.write_status(None, before[-1][1], 1000)
    workflows.train(run)
    assert sorted(written(run)) == sorted(before)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("key", "old", "new"),
    [("training.learning_rate", "0.0003", "0.0004"), ("seed", "1", "2"), ("packing.tokens", "256", "128")],
)
def test_a_recipe_that_was_edited_is_refused_with_both_values(trained: Run, key: str, old: str, new: str) -> None:
    name = key.rpartition(".")[2]
    text = trained.recipe_file.read_text()
    assert f"\n{name} = {old}\n" in text
    edited = text.replace(f"\n{name} = {old}\n", f"\n{name} = {new}\n")
    trained.recipe_file.write_text(edited)
    with pytest.raises(RunError, match=f"{key}: {old} -> {new}"):
        workflows.train(trained)
    assert trained.recipe_file.read_text() == edited
    trained.recipe_file.write_text(text)
    assert workflows.train(trained).report.ended == "finished"


def test_weights_that_are_not_finite_never_push_out_the_last_good_checkpoint(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = LanguageEngine.update

    def broken(engine: LanguageEngine, *given: Any) -> Any:
        found = update(engine, *given)
        if engine.steps == 3:
            with torch.no_grad():
                engine.stages[0].norm.weight.to_local()[0] = torch.nan
        return found

    monkeypatch.setattr(LanguageEngine, "update", broken)
    with pytest.raises(CheckpointError, match=r"weights of step 3 are not finite.*step 2 is kept"):
        workflows.train(recipe(training={"checkpoint_every": 1, "keep_checkpoints": 1}), "a")
    run = Run("a")
    assert max(path.name for path in run.checkpoints.iterdir()) == "step-000000002"
    status = run.status()
    assert status is not None
    assert (status.ended, status.step, status.steps) == ("failed", 3, 4)
    assert "not finite" in status.why
    monkeypatch.setattr(LanguageEngine, "update", update)
    assert workflows.train(run).report.progress.step == 4


@pytest.mark.parametrize(
    ("every", "said"), [(None, "no checkpoint was written"), (1, "the checkpoint of step 2 is kept")]
)
def test_an_error_of_losses_tells_only_of_checkpoints_that_are_there(recipe: Any, every: int | None, said: str) -> None:
    hot = recipe(training={"learning_rate": 1e12, "max_skipped": 2, "checkpoint_every": every, "keep_checkpoints": 1})
    with pytest.raises(TrainingError, match="in a row") as error:
        workflows.train(hot, "a")
    assert said in str(error.value)
    assert steps(Run("a").checkpoints) == ([] if every is None else [1, 2])  # the older may be the only good one


def test_the_last_steps_are_in_a_record_whatever_their_number(recipe: Any) -> None:
    run = workflows.train(recipe(training={"steps": 3, "log_every": 2}), "a").run
    records = [record for record in run.metrics() if record["kind"] == "train"]
    assert [(record["step"], record["steps"]) for record in records] == [(2, 2), (3, 1)]


def test_a_text_smaller_than_one_batch_gives_one_step(recipe: Any) -> None:
    large = recipe(data={"epochs": 1}, packing={"tokens": 60_000, "context": 2048}, model={"context": 2048})
    found = workflows.train(large, "a")
    assert found.report.ended == "exhausted"
    assert found.report.progress.step == 1


def test_evaluating_a_run_writes_what_it_found(trained: Run) -> None:
    before = trained.read_json("evaluation.json")
    (trained.folder / "evaluation.json").unlink()
    found = workflows.evaluate(trained)
    after = trained.read_json("evaluation.json")
    assert {**before, "seconds": 0} == {**after, "seconds": 0}
    assert after["loss"] == found.loss


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sends this process SIGINT in the evaluation of a microbatch, counted from the next one."""

    def in_evaluation(number: int) -> None:
        evaluate, calls = LanguageEngine.evaluate, [0]

        def interrupted(engine: LanguageEngine, microbatches: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                os.kill(os.getpid(), signal.SIGINT)
            return evaluate(engine, microbatches)

        monkeypatch.setattr(LanguageEngine, "evaluate", interrupted)

    return in_evaluation


def test_ctrl_c_ends_an_evaluation_and_leaves_the_last_one(recipe: Any, ctrl_c: Any) -> None:
    run = workflows.train(recipe(data={"held_out": 0.5}), "a").run
    before = (run.folder / "evaluation.json").read_text()
    ctrl_c(2)
    with pytest.raises(Interrupted, match=r"a: 2 of \d+ microbatches .* nothing was written"):
        workflows.evaluate(run)
    assert (run.folder / "evaluation.json").read_text() == before
    assert workflows.evaluate(run).targets == json.loads(before)["targets"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("at", [2, 4])
def test_an_evaluation_that_ctrl_c_ended_while_training_is_made_up_for(
    recipe: Any, ctrl_c: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    evaluated = recipe(data={"held_out": 0.5}, training={"evaluate_every": 2})
    made: list[int] = []
    evaluate = LanguageTrainer.evaluate
    monkeypatch.setattr(
        LanguageTrainer, "evaluate", lambda trainer: made.append(len(trainer.held_out)) or evaluate(trainer)
    )
    whole = workflows.train(evaluated, "whole").run
    ctrl_c(2 if at == 2 else made[-1] + 2)
    stopped = workflows.train(evaluated, "stopped")
    assert (stopped.report.ended, stopped.report.progress.step) == ("interrupted", at)
    assert not (stopped.run.folder / "report.html").exists()
    again = workflows.train(stopped.run)
    assert again.report.ended == "finished"
    kept = ("step", "loss", "targets", "tokens")
    told = [
        [(r["kind"], *(r[key] for key in kept)) for r in run.metrics() if r["kind"] in ("train", "evaluation")]
        for run in (whole, stopped.run)
    ]
    assert told[0] == told[1]


def test_an_evaluation_takes_no_more_tokens_than_asked(recipe: Any) -> None:
    run = workflows.train(recipe(data={"held_out": 0.5}, training={"evaluation_tokens": 300}), "a").run
    few = run.read_json("evaluation.json")["targets"]
    assert 200 < few < 400
    assert workflows.evaluate(run).targets == few
    assert 50 < workflows.evaluate(run, tokens=100).targets < 170
    every = workflows.evaluate(run, tokens=10**9).targets
    assert every > 2 * few
    assert run.read_json("evaluation.json")["targets"] == every


def test_records_tell_the_rate_of_their_step_and_no_time_before_the_first(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LanguageTrainer] = []
    fit = LanguageTrainer.fit

    def later(trainer: LanguageTrainer) -> Any:
        made.append(trainer)
        trainer._window.started -= 1000  # as if loading weights had taken long
        return fit(trainer)

    monkeypatch.setattr(LanguageTrainer, "fit", later)
    run = workflows.train(recipe(training={"learning_rate": 0.5, "decay": "linear", "final_rate": 0.0}), "a").run
    records = [record for record in run.metrics() if record["kind"] == "train"]
    assert [record["learning_rate"] for record in records] == pytest.approx([0.375, 0.125])
    assert all(record["seconds"] < 500 for record in records)
    assert made[0].progress.step == 4


def _tell_memory(pipe: Any) -> None:
    pipe.send(peak_memory("cpu"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="elsewhere the system counts the starter's in")
def test_memory_is_that_of_the_process_not_of_the_one_that_started_it() -> None:
    held = torch.ones(3 << 27)  # 1.5 GiB
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_tell_memory, args=(other,))
    process.start()
    told = pipe.recv()
    process.join()
    assert told < held.nbytes < peak_memory("cpu")


def test_what_training_began_with_is_not_needed_to_go_on(recipe: Any, tmp_path: Path) -> None:
    workflows.train(recipe(training={"steps": 1}), "a")
    run = workflows.train(recipe(training={"start": "a", "steps": 2, "decay": "none"}), "b").run
    (tmp_path / "a").rename(tmp_path / "moved")
    run.recipe_file.write_text(run.recipe_file.read_text().replace("steps = 2", "steps = 3"))
    assert workflows.train(run).report.progress.step == 3
    for checkpoint in run.checkpoints.iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    with pytest.raises(CordilleraError, match="no model's name"):
        workflows.train(run)


def test_a_run_that_was_ended_before_it_described_its_model_can_be_resumed(trained: Run) -> None:
    (trained.folder / "model.json").unlink()
    assert workflows.train(trained).report.ended == "finished"
    assert (trained.folder / "model.json").is_file()


def test_a_run_in_use_is_left_as_it_is(trained: Run) -> None:
    files = [path for path in trained.folder.rglob("*") if path.is_file() and path.name != ".lock"]
    before = [path.read_bytes() for path in files]
    with trained.lock(), pytest.raises(RunError, match="another process"):
        workflows.train(trained)
    assert before == [path.read_bytes() for path in files]


def test_documents_longer_than_the_context_of_the_model_are_refused(recipe: Any) -> None:
    with pytest.raises(RecipeError, match="the model's context is 64"):
        workflows.train(recipe(packing={"context": 65}), "a")
    with pytest.raises(RecipeError, match="the model's context is 64"):
        workflows.train(recipe(data={"max_length": 80}), "a")
    assert not Path("a").exists()


def test_a_device_by_number_is_refused_because_processes_choose_theirs(recipe: Any) -> None:
    with pytest.raises(PlanError, match="takes the next GPU"):
        workflows.train(recipe().model_copy(update={"device": "cuda:1"}), "a")
    assert not Path("a").exists()


def test_held_out_text_is_not_kept_in_memory(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LanguageTrainer] = []
    evaluate = LanguageTrainer.evaluate
    monkeypatch.setattr(LanguageTrainer, "evaluate", lambda trainer: made.append(trainer) or evaluate(trainer))
    workflows.train(recipe(data={"held_out": 0.5}), "a")
    assert len(made[0].held_out) > 3
    assert not made[0].held_out._read


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_a_study_refuses_a_target_before_it_trains(target: float, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a number of FLOPs above 0"):
        workflows.isoflop("llama-debug", [1e11], target=target, folder=tmp_path / "study")
    assert not (tmp_path / "study").exists()


def test_a_study_knows_runs_of_another_recipe(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = recipe()
    Path("small.toml").write_text(dump(one))
    planned = PlannedRun("run", 1e9, one.model, 4, 1, 1000, 1e9)

    agreed: list[bool] = []

    def asked(plan: list[PlannedRun], folder: Path, train: Any, *, agrees: Any, **options: Any) -> Any:
        agreed.append(agrees(planned.overrides, folder / planned.name))
        return SimpleNamespace(study=None)

    monkeypatch.setattr(scaling, "sizes_for", lambda *arguments, **options: [])
    monkeypatch.setattr(scaling, "plan_runs", lambda *arguments, **options: [planned])
    monkeypatch.setattr(scaling, "train_plan", asked)
    monkeypatch.setattr(scaling, "isoflop_page", lambda *arguments: "")
    Run.create("study/run", dump(load("small.toml", [*planned.overrides, "parallel.shard=2"])))
    workflows.isoflop("small.toml", [1e9], folder="study")
    workflows.isoflop("small.toml", [1e9], folder="study", overrides=["training.learning_rate=1e-2"])
    assert agreed == [True, False]


def test_a_full_disk_is_said_of_the_file_that_did_not_fit(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
    with pytest.raises(RunError, match="tensorboard: the disk is full"):
        workflows.train(recipe(), "a")


def test_an_error_does_not_wait_for_text_that_does_not_come(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(TextBatches, "__next__", lambda batches: released.wait(60))
    began = time.monotonic()
    with pytest.raises(DataError, match=r"no iteration was prepared within 0\.5 s"):
        workflows.train(recipe(parallel={"deadline_s": 0.5}), "a")
    assert time.monotonic() - began < 30
    released.set()


@needs_gloo
@pytest.mark.slow
def test_what_a_watcher_raises_ends_the_processes_and_is_raised(recipe: Any) -> None:
    def watch(record: dict[str, Any], progress: LanguageProgress, total: int) -> None:
        raise LookupError(f"at step {progress.step}")

    with pytest.raises(LookupError, match="at step 1"):
        workflows.train(recipe(training={"steps": 100_000}), "a", processes=2, on_step=watch)
