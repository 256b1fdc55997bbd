"""Runs of ranking models on bad days: full disks, numbers that are not finite, edited and damaged files."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cordillera import workflows
from cordillera.cli import main
from cordillera.cli.train import resumed
from cordillera.errors import CordilleraError, NumericsError, RunError, TrainingError
from cordillera.recipe import load
from cordillera.reports.ranking.run import render
from cordillera.run import Run, check_recipe
from cordillera.training import checkpoints
from cordillera.training.ranking.config import Progress
from cordillera.training.ranking.trainer import Trainer
from cordillera.workflows import prediction
from cordillera.workflows.trained import card_of, recipe_of
from tests.fuzzing import damaged, flips, survives

from .conftest import RECIPE, write_log

FLAWS = pytest.mark.parametrize("suffix", ["csv", "parquet"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and its log; copied by those who change it."""
    folder = tmp_path_factory.mktemp("made")
    log = write_log(folder / "log.csv", rows=300)
    (folder / "small.toml").write_text(RECIPE.format(path=log))
    cache = f"data.cache_dir={folder / 'cache'}"
    recipe = load(folder / "small.toml", [cache, "training.epochs=1", "training.precision=fp32"])
    workflows.train(recipe, folder / "run")
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Run:
    """A finished run of one's own."""
    return Run(shutil.copytree(made / "run", tmp_path / "run"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def edit_checkpoint(run: Run, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> None:
    """Write the newest checkpoint anew with other content."""
    found = checkpoints.load(checkpoints.folder_of(run.checkpoints, checkpoints.steps(run.checkpoints)[-1]))
    tensors = {name: tensor.clone() for name, tensor in found.tensors.items()}
    state = dict(found.state)
    change(tensors, state)
    checkpoints.save(run.checkpoints, tensors, state)


# Predicting


@FLAWS
@pytest.mark.parametrize("after", [0, 1, 3000])
def test_a_disk_that_fills_while_predicting_leaves_nothing_and_is_named(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, after: int
) -> None:
    class Full(io.FileIO):
        count = 0

        def write(self, content: Any) -> int:
            self.count += len(memoryview(content))
            if self.count > after:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

    real = open
    monkeypatch.setattr(
        prediction, "open", lambda path, mode: (Full if "x" in mode else real)(path, mode), raising=False
    )
    target = tmp_path / f"scores.{suffix}"
    with pytest.raises(RunError, match="the disk is full") as caught:
        workflows.predict(made / "run", made / "log.csv", target)
    assert "--out" in str(caught.value)
    assert "--resume" not in str(caught.value)
    assert names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@FLAWS
def test_predicting_to_a_small_file_system_leaves_nothing(
    made: Path, small_disk: Path, capfd: pytest.CaptureFixture[str], suffix: str
) -> None:
    log = write_log(small_disk.parent / "long.csv", rows=8000)
    with pytest.raises(RunError, match="the disk is full"):
        workflows.predict(made / "run", log, small_disk / f"scores.{suffix}")
    assert names(small_disk) == []
    assert "Exception ignored" not in capfd.readouterr().err


@FLAWS
def test_what_a_killed_predict_left_goes_with_the_next(made: Path, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"scores.{suffix}"
    left, written = (tmp_path / f".{target.name}.{name}.tmp" for name in ("0123abcd", "4567abcd"))
    left.write_text("id,sc")
    with open(written, "w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # another predict is at work
        workflows.predict(made / "run", made / "log.csv", target)
    assert names(tmp_path) == sorted([target.name, written.name])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_logit_that_is_not_finite_is_no_score(run: Run, made: Path, tmp_path: Path, value: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        last = [name for name in tensors if name.startswith("model.") and tensors[name].shape == (1,)][-1]
        tensors[last].fill_(value)

    edit_checkpoint(run, spoil)
    target = tmp_path / "scores.csv"
    with pytest.raises(NumericsError, match=rf"log\.csv, line 2.*logit is {value}"):
        workflows.predict(run, made / "log.csv", target)
    assert names(tmp_path) == ["run"]


# Recipes


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("learning_rate = 0.005", "learning_rate = 0.5", "training.learning_rate: 0.005 -> 0.5"),
        ("batch_size = 100", "batch_size = 50", "data.batch_size: 100 -> 50"),
        ("seed = 1", "seed = 2", "seed: 1 -> 2"),
        ("epochs = 1", "epochs = 3", None),
        ("log_every = 5", "log_every = 7", None),
    ],
)
def test_an_edited_recipe_does_not_resume_silently(run: Run, before: str, after: str, said: str | None) -> None:
    text = run.recipe_file.read_text()
    assert text.count(f"\n{before}\n") == 1 or text.startswith(before)
    run.recipe_file.write_text(text.replace(before, after, 1))
    records = run.metrics()
    if said is None:
        assert workflows.train(run).report.ended == "finished"
        return
    for act in (lambda: workflows.train(run), lambda: workflows.evaluate(run)):
        with pytest.raises(RunError, match=re.escape(said)):
            act()
    assert run.metrics() == records


# Locks


def test_resuming_a_run_that_is_still_trained_leaves_its_records(run: Run) -> None:
    records = run.metrics()
    edit_checkpoint(run, lambda tensors, state: state.update(step=1))  # a resumed run would go back to it
    shutil.rmtree(checkpoints.folder_of(run.checkpoints, checkpoints.steps(run.checkpoints)[-1]))
    with run.lock(), pytest.raises(RunError, match="another process"):
        workflows.train(Run(run.folder))
    assert run.metrics() == records
    assert checkpoints.steps(run.checkpoints) == [1]


# Runs that did not end well


def interrupted(made: Path, folder: Path, *changes: str, act: Callable[[Progress], object]) -> Run:
    """A run that something happens to after a step."""
    options = [f"data.cache_dir={made / 'cache'}", "training.epochs=5", "training.precision=fp32", *changes]
    recipe = load(made / "small.toml", options)
    return workflows.train(recipe, folder, on_step=lambda record, progress, total: act(progress)).run


@pytest.fixture(scope="module")
def stopped_once(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that Ctrl-C stopped after 4 of 15 steps, and that was evaluated then."""

    def stop(progress: Progress) -> None:
        if progress.step == 4:
            os.kill(os.getpid(), 2)

    run = interrupted(made, tmp_path_factory.mktemp("once") / "stopped", act=stop)
    workflows.evaluate(run)
    return run.folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Run:
    """That run, of one's own."""
    return Run(shutil.copytree(stopped_once, tmp_path / "stopped"))


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["cordillera", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_run_that_is_not_finished_says_so_wherever_its_figures_stand(
    stopped: Run, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says = "not finished: training was interrupted at step 4 of 15"
    code, text = call(capsys, monkeypatch, "evaluate", stopped.folder)
    assert (code, says in text) == (0, True)
    evaluation = stopped.read_json("evaluation.json")
    assert (evaluation["step"], evaluation["steps"]) == (4, 15)
    page = workflows.report(stopped).read_text()
    assert says in page
    assert "<dt>Steps</dt><dd>4 of 15</dd>" in page
    code, text = call(capsys, monkeypatch, "compare", run.folder, stopped.folder, "--markdown")
    assert "stopped (not finished)" in text
    assert f"stopped: This run is {says}" in text
    for command in (["evaluate", run.folder], ["compare", run.folder]):
        assert "not finished" not in call(capsys, monkeypatch, *command)[1]
    assert "not finished" not in workflows.report(run).read_text()
    assert "<dt>Steps</dt><dd>3</dd>" in workflows.report(run).read_text()


def test_an_evaluation_that_is_older_than_the_weights_is_named(stopped: Run) -> None:
    earlier = stopped.read_json("evaluation.json")
    workflows.train(stopped)
    assert "and training came to" not in workflows.report(stopped).read_text()
    stopped.write_json("evaluation.json", earlier)  # as if a kill had come before the last evaluation
    says = "The evaluation is of the weights after step 4, and training came to step 15 since"
    assert says in workflows.report(stopped).read_text()
    assert says in workflows.compare([stopped]).to_markdown()


def test_a_killed_run_says_that_it_is_not_finished(stopped: Run) -> None:
    status = stopped.status()
    assert status is not None
    stopped.write_status(None, status.step, status.steps)  # as a checkpoint does, and nothing after it
    page = workflows.report(stopped).read_text()
    assert "not finished: training runs, or was killed; its newest checkpoint is of step 4 of 15" in page


def test_the_reason_of_a_lost_rank_is_kept_unless_the_run_is_complete_or_in_use(stopped: Run) -> None:
    before = stopped.status()
    assert before is not None
    with stopped.lock():
        Run(stopped.folder).write_failure("rank 1 was ended by SIGKILL")
    assert stopped.status() == before
    stopped.write_failure("rank 1 was ended by SIGKILL")
    found = stopped.status()
    assert found is not None
    assert (found.ended, found.why, found.step, found.steps) == (
        "failed",
        "rank 1 was ended by SIGKILL",
        before.step,
        before.steps,
    )
    stopped.write_status("finished", 5, 5)
    stopped.write_failure("rank 1 was ended by SIGKILL")
    assert stopped.status().ended == "finished"  # type: ignore[union-attr]


def test_a_failed_run_says_why_and_which_checkpoint_there_is(made: Path, tmp_path: Path) -> None:
    hot = ["training.learning_rate=1e30", "training.decay=none"]
    with pytest.raises(TrainingError, match="there is no checkpoint yet"):
        interrupted(made, tmp_path / "hot", *hot, act=lambda progress: None)
    run = Run(tmp_path / "hot")
    assert checkpoints.steps(run.checkpoints) == []
    status = run.status()
    assert status is not None
    assert status.ended == "failed"
    page = workflows.report(run).read_text()
    assert "This run is not finished: training failed at step" in page
    assert re.search(r"the loss became (nan|inf)|is (nan|inf) after step", page)


@pytest.mark.cases(2)
@pytest.mark.parametrize("what", ["weight", "moment"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_checkpoint_with_numbers_that_are_not_finite_is_not_saved(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, value: float
) -> None:
    trainers = []
    begin = Trainer.fit
    monkeypatch.setattr(Trainer, "fit", lambda self: (trainers.append(self), begin(self))[1])

    def spoil(progress: Progress) -> None:
        if progress.step == 5:
            weight = max(trainers[0].dense.values(), key=torch.Tensor.numel)
            tensor = weight if what == "weight" else trainers[0].optimizer.state[weight]["exp_avg_sq"]
            tensor.data.view(-1)[-1] = value
            os.kill(os.getpid(), 2)  # the next checkpoint is written now

    with pytest.raises(TrainingError, match="the checkpoint of step 4 is intact") as caught:
        interrupted(made, tmp_path / "r", "training.checkpoint_every=2", act=spoil)
    assert re.search(rf"(model|optimizer)\..* is {value} after step 5", str(caught.value))
    run = Run(tmp_path / "r")
    assert max(checkpoints.steps(run.checkpoints)) == 4
    kept = checkpoints.load(checkpoints.folder_of(run.checkpoints, 4))
    assert checkpoints.not_finite(kept.tensors) is None
    monkeypatch.undo()
    assert workflows.train(run).report.ended == "finished"


# Damaged files


def test_a_flip_or_a_cut_of_any_file_of_a_run_is_refused_by_name(
    run: Run, made: Path, tmp_path: Path, fuzz_inputs: Callable[[int], int]
) -> None:
    rng = random.Random(5)
    step = checkpoints.folder_of(run.checkpoints, checkpoints.steps(run.checkpoints)[-1])
    score = lambda: workflows.predict(run, made / "log.csv", tmp_path / "scores.csv")  # noqa: E731
    readers: dict[Path, Callable[[], object]] = {
        **{path: lambda: checkpoints.load(step) for path in step.iterdir()},
        run.folder / "model.json": score,
        **dict.fromkeys((run.folder / "encoder").iterdir(), score),
        run.folder / "evaluation.json": lambda: workflows.compare([run]),
        run.folder / "metrics.jsonl": lambda: workflows.compare([run]),
        run.folder / "status.json": lambda: workflows.compare([run]),
        run.folder / "environment.json": lambda: workflows.report(run),
    }
    for path, read in readers.items():
        whole = path.read_bytes()
        read()
        for number in range(fuzz_inputs(10)):
            path.write_bytes(whole[: rng.randrange(len(whole))] if number % 5 == 0 else flips(whole, rng))
            with pytest.raises(CordilleraError, match=re.escape(path.name)):
                read()
        path.write_bytes(whole)
        read()


WORDS = [
    *(
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\n",
        b"null",
        b"true",
        b"NaN",
        b"Infinity",
        b"-1",
        b"1e999",
        b"1e300",
    ),
    *(
        b"9" * 400,
        b'"[/x]"',
        b'"\\u001b[2J"',
        b"\x00",
        b"\xff",
        b"[[[[[[",
        b'{"a":',
        b"= 3",
        b"[model]",
        b"none",
        b"''",
    ),
    *(
        b'"step"',
        b'"tasks"',
        b'"kind"',
        b'"evaluation"',
        b'"progressive"',
        b'"train"',
        b'"loss"',
        b"1e5",
        b'"Infinity"',
    ),
]
FILES = ("metrics.jsonl", "model.json", "evaluation.json", "recipe.toml", "status.json", "environment.json")


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_of_a_run_give_pages_and_tables_or_one_error(
    run: Run, name: str, fuzz_inputs: Callable[[int], int]
) -> None:
    rng = random.Random(f"{name} {fuzz_inputs(0)}")
    path = run.folder / name
    whole = path.read_bytes()
    if name.endswith(("json", "jsonl")):  # damage that the checksum would show is of no use here
        lines = [json.loads(line) for line in (whole.splitlines() if name == "metrics.jsonl" else [whole])]
        for line in lines:
            line.pop("seal", None)
        whole = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    if name == "metrics.jsonl":
        (run.folder / "status.json").unlink()

    def tables() -> None:
        found = workflows.compare([run])
        found.to_markdown(), found.to_json(), found.to_table()

    for number in range(fuzz_inputs(200) // len(FILES)):
        path.write_bytes(damaged(whole, rng, WORDS))
        what = f"{name}, input {number}"
        survives(lambda: render(run), what)
        survives(tables, what)
        if name in ("model.json", "recipe.toml"):
            survives(lambda: (recipe_of(run), card_of(run)), what)


def test_the_recipe_of_a_run_shows_any_change_that_matters(run: Run, fuzz_inputs: Callable[[int], int]) -> None:
    rng = random.Random(9)
    whole, resolved = run.recipe_file.read_bytes(), load(run.folder).model_dump()
    saved = checkpoints.load(checkpoints.folder_of(run.checkpoints, checkpoints.steps(run.checkpoints)[-1])).state[
        "recipe"
    ]
    for _ in range(fuzz_inputs(60)):
        run.recipe_file.write_bytes(flips(whole, rng))
        found = survives(lambda: load(run.folder), "recipe")
        if isinstance(found, CordilleraError):
            continue
        refused = survives(lambda: check_recipe(saved, recipe_of(run), run.recipe_file), "recipe")
        if refused is None:
            changed = {key for key, value in resolved.items() if found.model_dump()[key] != value}
            assert changed <= {"name", "description", "device", "threads", "parallel", "data", "training"}


@pytest.mark.parametrize("decay", ["none", "plateau"])
def test_a_finished_run_goes_on_for_longer(made: Path, tmp_path: Path, decay: str) -> None:
    keys = [f"data.cache_dir={made / 'cache'}", "training.precision=fp32", "training.warmup_fraction=0.0"]
    keys.append(f"training.decay={decay}")
    short, long = (load(made / "small.toml", [*keys, f"training.epochs={epochs}"]) for epochs in (1, 2))
    expected, found = workflows.train(long, tmp_path / "long").run, workflows.train(short, tmp_path / "short").run
    went_on = workflows.train(found, changes=["training.epochs=2", "training.log_every=1"])
    assert went_on.report.progress.step == 6
    weights = [
        checkpoints.load(checkpoints.folder_of(one.checkpoints, checkpoints.steps(one.checkpoints)[-1])).tensors
        for one in (expected, found)
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())
    kept = recipe_of(found)
    assert (kept.training.epochs, kept.training.log_every) == (2, 1)


def test_a_resumed_run_keeps_what_its_weights_depend_on(run: Run) -> None:
    text = run.recipe_file.read_bytes()
    with pytest.raises(RunError, match=r"keeps its recipe, but for few keys: training.learning_rate: 0.005 -> 0.1\n"):
        workflows.train(run, changes=["training.learning_rate=0.1"])
    with pytest.raises(RunError, match=r"training.epochs: 1 -> 2 \(learning rates depend on it, as training.decay is"):
        workflows.train(run, changes=["training.epochs=2", "training.decay=linear"])
    assert run.recipe_file.read_bytes() == text


def test_a_recipe_beside_a_resumed_run_is_not_ignored_in_silence(made: Path, run: Run) -> None:
    given = made / "small.toml"
    kept = ["training.epochs=1", "training.precision=fp32"]
    edited = run.folder / "edited.toml"
    edited.write_text(given.read_text().replace("rank = 2", "rank = 3"))
    with pytest.warns(
        UserWarning, match=r"its own recipe, from which .*edited.toml differs: model.rank: 2 -> 3; --set"
    ):
        resumed(str(edited), run.folder, kept, None)
    with pytest.warns(UserWarning, match=r"differs: training.epochs: 1 -> 6; --set changes what"):
        resumed(str(given), run.folder, kept[1:], None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resumed(str(given), run.folder, [*kept, "training.epochs=2"], None).folder == run.folder
        assert resumed(str(given), run.folder, kept, None).folder == run.folder
    with pytest.raises(RunError, match="is a run of another recipe than"):
        resumed("movielens-dlrm", run.folder, [], None)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_ctrl_c_before_the_first_step_says_that_nothing_was_trained(
    made: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_resumed: bool
) -> None:
    def ended(*_: object, on_step: Callable[..., None], **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workflows, "train", ended)
    given = (
        [str(run.folder), "--resume"] if is_resumed else [str(made / "small.toml"), "--run", str(run.folder / "new")]
    )
    monkeypatch.setattr("sys.argv", ["cordillera", "train", *given])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 130
    said = capsys.readouterr().err
    assert f"nothing was trained yet{'; weights are as they were' if is_resumed else ''}\n" in said
    assert ("--resume" if is_resumed else "give the same command again") in said


def test_what_is_no_recipe_is_refused_with_what_to_give(made: Path, tmp_path: Path) -> None:
    given = made / "small.toml"
    for wrong in (str(given), given, {"model": {}}):
        with pytest.raises(RunError, match=r"a recipe is needed, got .*\n.*give load_recipe"):
            workflows.train(wrong, tmp_path / "new")  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"changes: are for a run that goes on\n.*give them to load_recipe"):
        workflows.train(load(given), tmp_path / "new", changes=["training.max_steps=2"])


def test_a_run_that_is_to_be_resumed_and_is_not_there_begins(cli, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "runs/a").mkdir(parents=True)
    quick = ["--set", "training.epochs=1", "-q"]
    for folder in ("runs/a", "runs/b"):
        begun = cli("train", recipe, "--run", folder, "--resume", *quick)
        assert begun.code == 0, begun.err
        assert f"{folder}: holds no run yet, training begins" in begun.out
        again = cli("train", recipe, "--run", folder, "--resume", "-q")
        assert again.code == 0, again.err
        assert "nothing was left to train" in again.out
    left = tmp_path / "runs/left"
    left.mkdir()
    (left / f".recipe.toml.{2**22 + 7}.tmp").touch()  # of a process that was killed
    assert cli("train", recipe, "--run", "runs/left", "--resume", *quick).code == 0
    absent = cli("train", "runs/c", "--resume")
    assert (absent.code, "is not a run folder" in absent.err) == (2, True)
    other = cli("train", "runs/a", "--run", "runs/c", "--resume")
    assert (other.code, "is not a run folder" in other.err) == (2, True)


def test_ctrl_c_after_the_last_step_says_what_is_missing(
    cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("cordillera.workflows.ranking._evaluate", stopped)
        found = cli("train", recipe, "--run", "runs/a", "--set", "training.epochs=1", "-q")
    assert found.code == 130
    assert "interrupted: runs/a: training is complete, and not all of evaluation and report is written" in found.err
    assert "continue with: cordillera train runs/a --resume" in found.err
    assert cli("train", "runs/a", "--resume", "-q").code == 0
    assert (tmp_path / "runs/a/report.html").is_file()


def test_the_folder_of_an_unnamed_run_is_taken_at_once_and_given_back(
    cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = ["--set", "training.epochs=1", "-q"]
    refused = cli("train", recipe, *quick, "--set", "data.path=absent.csv")
    assert refused.code == 2
    assert not any((tmp_path / "runs").iterdir())
    train, seen = workflows.train, []

    def beside(what: object, folder: Path, **more: object) -> object:
        seen.append(folder)
        if len(seen) == 1:  # another command begins meanwhile
            assert cli("train", recipe, *quick).code == 0
        return train(what, folder, **more)

    monkeypatch.setattr(workflows, "train", beside)
    assert cli("train", recipe, *quick).code == 0
    assert [folder.name for folder in seen] == ["small", "small-2"]
    assert all((tmp_path / folder / "report.html").is_file() for folder in seen)


@pytest.mark.parametrize(("change", "key"), [("patience=1", "patience"), ('decay="plateau"', "decay")])
def test_training_that_waits_for_a_validation_split_needs_one(
    made: Path, tmp_path: Path, change: str, key: str
) -> None:
    changes = [f"data.cache_dir={made / 'cache'}", "data.fractions=[0.9, 0.0, 0.1]", f"training.{change}"]
    with pytest.raises(TrainingError, match=rf"training\.{key}: waits for the validation split"):
        workflows.train(load(made / "small.toml", changes), tmp_path / "run")


def test_a_number_of_processes_is_at_least_one(made: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="processes: must be at least 1, got 0"):
        workflows.train(load(made / "small.toml"), tmp_path / "run", processes=0)
    assert not (tmp_path / "run").exists()


def test_a_refused_change_of_a_resumed_run_is_not_kept(cli, run: Run) -> None:
    before = run.recipe_file.read_bytes()
    for change in ("data.path=typo.csv", "data.path=[]"):
        assert cli("train", run.folder, "--resume", "--set", change).code == 2
        assert run.recipe_file.read_bytes() == before
