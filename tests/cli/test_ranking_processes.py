"""``cordillera train`` of a ranking model over several processes: results, mistakes, kills and resumptions."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cordillera import workflows
from cordillera.cli.app import app
from cordillera.data.ranking.datasets import prepare
from cordillera.distributed.job.environment import place_in_job
from cordillera.errors import RecipeError
from cordillera.planning.ranking.placement import Placement, TablePart
from cordillera.recipe import RankingRecipe, load
from cordillera.run import Run
from cordillera.training import checkpoints
from cordillera.workflows import ranking
from cordillera.workflows.trained import recipe_of, restore_model
from tests.cli.conftest import write_log
from tests.cli.test_kills import content
from tests.cli.test_language_commands import gone, spawn
from tests.distributed.processes import needs_gloo

RECIPE = """
seed = 1
device = "cpu"
threads = 1

[data]
path = "{folder}/log.csv"
cache_dir = "{folder}/cache"
batch_size = 100
shuffle = "global"

[data.schema]
dense = [{{ name = "price" }}]
categorical = [{{ name = "user" }}, {{ name = "device" }}]
lists = [{{ name = "seen" }}]
labels = ["click"]
timestamp = "time"
group = "user"

[tables]
name = "rowwise_adagrad"

[model]
name = "dlrm"
embedding_dim = 8
bottom_mlp = [16]
top_mlp = [64, 64]
dropout = 0.1

[training]
epochs = 100
max_steps = 122
precision = "fp32"
log_every = 10
evaluate_every = 60
checkpoint_every = 2
"""


# The command with a signal for its rank 1 before a step, or for the launcher if it asks to stop: that rank then waits
# until it is asked, so that no run ends before the signal.
SIGNALLED = """
import os, signal, time
from pathlib import Path

if __name__ == "__main__":
    from cordillera.__main__ import main

    os.environ["LAUNCHER"] = str(os.getpid())
    main()
else:  # in a rank
    from cordillera.training.ranking.trainer import Trainer

    number, at, step = int(os.environ["SIGNAL"]), int(os.environ["SIGNAL_AT"]), Trainer._step

    def signalled(trainer, *given):
        if os.environ["RANK"] == "1" and trainer.progress.step == at:
            Path("signalled").write_text(str(time.monotonic()))
            if number == signal.SIGINT:
                os.kill(int(os.environ["LAUNCHER"]), number)
                while not trainer.ranks.watchdog.should_stop:
                    time.sleep(0.01)
            else:
                os.kill(os.getpid(), number)
        step(trainer, *given)

    Trainer._step = signalled
"""

needs_processes = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="only Linux tells a process's environment"
)


def signalled(folder: Path, number: signal.Signals, at: int, *arguments: object) -> Any:
    """Start the command in a process of its own; it gets a signal once ``at`` steps are done."""
    (folder / "signalled.py").write_text(SIGNALLED)
    command = [sys.executable, folder / "signalled.py", "train", *map(str, arguments)]
    return spawn(command, folder, {"SIGNAL": str(int(number)), "SIGNAL_AT": str(at)})


def trained(folder: Path, *arguments: object) -> str:
    """Run the command in this process, whose ranks are forked at once; return what it printed."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        done = CliRunner().invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)
    finally:
        os.chdir(before)
    assert done.exit_code == 0, done.output
    return done.output


def ends(process: Any, code: int = 0) -> str:
    """Return what a command printed, once it has ended with an exit code."""
    said: str = process.communicate(timeout=400)[0]
    assert process.returncode == code, said
    assert "Traceback" not in said, said
    gone(process)
    return said


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its log."""
    folder = tmp_path_factory.mktemp("made")
    write_log(folder / "log.csv")
    (folder / "small.toml").write_text(RECIPE.format(folder=folder))
    return folder


@pytest.fixture(scope="module")
def whole(made: Path) -> Path:
    """An uninterrupted run over two processes."""
    said = trained(made, "small.toml", "--run", "whole", "--nproc", 2)
    assert "tables: over 2 processes, " in said
    assert said.count("finished after 122 steps") == 1
    return made / "whole"


def ne(run: Path) -> float:
    return float(Run(run).read_json("evaluation.json")["tasks"]["click"]["metrics"]["ne"])


def learnt(run: Path, step: int = 122) -> dict[str, torch.Tensor]:
    """Return all weights, and the moments of dense ones, after ``step`` steps."""
    _, model = restore_model(Run(run), prepare(recipe_of(Run(run)).data).features, torch.device("cpu"))
    kept = checkpoints.load(checkpoints.folder_of(run / "checkpoints", step)).tensors
    return model.state_dict() | {key: tensor for key, tensor in kept.items() if key.startswith("optimizer.")}


def same_bits(run: Path, other: Path) -> None:
    """Assert that runs hold the same weights, moments, records and evaluation."""
    ours, theirs = content(run, False), content(other, False)
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1]
    assert ours[2] == theirs[2]
    assert [key for key in ours[3] if ours[3][key] != theirs[3].get(key)] == []


# Mistakes, before any process starts


@pytest.fixture
def none_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*given: Any, **more: Any) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(ranking, "launch", launch)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        (
            ["tables.rows='int8'", "training.plan='plan.json'", "training.probe_every=5", "device='cuda'"],
            ["tables", "training.plan", "training.probe_every", "device"],
        ),
        (["tables.cache=0.5", "training.compile=true"], ["tables", "training.compile"]),
        (["training.emulate.format='bf16'"], ["training.emulate"]),
        (["model.name='dcn'", "model.norm='batch'"], ["model.norm"]),
        (["parallel.hosts=3"], ["parallel.hosts"]),
        (["parallel.exchange='prioritised'", "parallel.pool='bags'"], ["parallel.pool"]),
    ],
)
def test_what_one_process_alone_can_train_is_refused_with_all_reasons(
    made: Path, tmp_path: Path, none_starts: None, changes: list[str], keys: list[str]
) -> None:
    text = (made / "small.toml").read_text()
    if "model.name='dcn'" in changes:
        text = text.replace("bottom_mlp = [16]\ntop_mlp = [64, 64]\n", "")
    (tmp_path / "changed.toml").write_text(text)
    recipe = load(tmp_path / "changed.toml", changes)
    with pytest.raises(RecipeError) as caught:
        workflows.train(recipe, tmp_path / "a", processes=2)
    assert [key for key, _ in caught.value.problems] == keys
    assert not (tmp_path / "a").exists()


def _with(**changes: Any) -> Callable[[dict[str, tuple[int, int]]], Placement]:
    def make(shapes: dict[str, tuple[int, int]]) -> Placement:
        size = changes.get("size", 2)
        shapes = {name: changes.get(name, shape) for name, shape in shapes.items() if name != changes.get("without")}
        tier = changes.get("tier", "memory")
        parts = [TablePart(name, 0, rows, 0, columns, (0,), tier) for name, (rows, columns) in shapes.items()]
        return Placement(size, shapes, tuple(parts))

    return make


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            _with(user=(99, 8), seen=(20, 4)),
            "is of other tables: seen is 20 x 4, in the model 21 x 8; user is 99 x 8, in the model 31 x 8",
        ),
        (_with(without="device"), "is of other tables: device is absent, in the model"),
        (
            _with(size=3),
            "is for 3 ranks, there are 2\n  -> plan it again for 2 ranks, or set parallel.placement = 'auto'",
        ),
        (_with(tier="file"), "puts parts of tables into files: device, seen, user"),
    ],
)
def test_a_wrong_placement_is_refused_by_name(
    cli: Any, made: Path, tmp_path: Path, none_starts: None, make: Callable[[Any], Placement], said: str
) -> None:
    recipe = load(made / "small.toml")
    assert isinstance(recipe, RankingRecipe)
    tables = prepare(recipe.data).features.tables
    (tmp_path / "p.json").write_text(make({name: (rows, 8) for name, rows in tables.items()}).to_text())
    failed = cli("train", made / "small.toml", "--run", "a", "--nproc", 2, "--set", "parallel.placement='p.json'")
    assert failed.code == 2
    assert f"p.json: {said}" in failed.err
    (tmp_path / "p.json").write_text("{}")
    failed = cli("train", made / "small.toml", "--run", "a", "--nproc", 2, "--set", "parallel.placement='p.json'")
    assert "p.json: is no placement of tables" in failed.err
    failed = cli("train", made / "small.toml", "--run", "a", "--nproc", 2, "--set", "parallel.placement='q.json'")
    assert "q.json: does not exist" in failed.err
    assert not (tmp_path / "a").exists()


def test_copies_are_refused_for_prioritised_exchange(cli: Any, made: Path, tmp_path: Path, none_starts: None) -> None:
    recipe = load(made / "small.toml")
    assert isinstance(recipe, RankingRecipe)
    tables = {name: (rows, 8) for name, rows in prepare(recipe.data).features.tables.items()}
    parts = tuple(TablePart(name, 0, rows, 0, 8, (0, 1)) for name, (rows, _) in tables.items())
    (tmp_path / "p.json").write_text(Placement(2, tables, parts).to_text())
    changed = ("--set", "parallel.placement='p.json'", "--set", "parallel.exchange='prioritised'")
    failed = cli("train", made / "small.toml", "--run", "a", "--nproc", 2, *changed)
    assert failed.code == 2
    assert "p.json: prioritised exchange knows no copies of parts" in failed.err
    assert not (tmp_path / "a").exists()


def test_a_number_of_processes_other_than_the_launchers_is_refused(
    cli: Any, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert place_in_job() is not None
    failed = cli("train", made / "small.toml", "--run", "a", "--nproc", 3)
    assert failed.code == 2
    assert "--nproc: the launcher has started 2 processes, not 3" in failed.err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("size", ["1", "2"])
def test_a_restart_by_the_launcher_does_not_begin_another_run(
    cli: Any, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    job = {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**job, "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    failed = cli("train", made / "small.toml")
    assert failed.code == 2
    assert "--run: is needed for restarts by a launcher\n  -> give --run FOLDER --resume" in failed.err
    assert not (tmp_path / "runs").exists()


# Results


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_processes
def test_two_processes_end_where_one_does_and_so_they_do_with_any_placement(made: Path, whole: Path) -> None:
    trained(made, "small.toml", "--run", "alone")
    assert ne(whole) == pytest.approx(ne(made / "alone"), abs=1e-6)
    features = prepare(recipe_of(Run(whole)).data).features
    models = [restore_model(Run(run), features, torch.device("cpu"))[1] for run in (whole, made / "alone")]
    ours, theirs = (model.state_dict() for model in models)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-5, atol=1e-5, msg=f"{key} differs")
    page = (whole / "report.html").read_text()
    assert "not finished" not in page
    assert "Rows of tables by rank" in page

    auto = Placement.read(whole / ranking.PLACEMENT_FILE)
    parts = []
    for name, (rows, columns) in auto.tables.items():
        half = rows // 2
        parts.append(TablePart(name, 0, half, 0, columns, (1,)))
        parts += [TablePart(name, half, rows - half, first, 4, (first // 4,)) for first in range(0, columns, 4)]
    (made / "grid.json").write_text(Placement(2, auto.tables, tuple(parts)).to_text())
    placed = ("--set", "parallel.placement='grid.json'", "--nproc", 2)
    said = trained(made, "small.toml", "--run", "placed", *placed)
    assert "3 in rows and columns" in said
    assert ne(made / "placed") == pytest.approx(ne(whole), abs=1e-6)


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("dense", "hosts"), [("full", 1), ("hybrid", 2)])
def test_sharded_dense_weights_end_where_whole_ones_do(made: Path, whole: Path, dense: str, hosts: int) -> None:
    """With two hosts of one process, all weights are copies that FSDP keeps equal."""
    given = ("--set", f"parallel.dense='{dense}'", "--set", f"parallel.hosts={hosts}", "--nproc", 2)
    clipped = ("--set", "training.gradient_clip=0.05")
    trained(made, "small.toml", "--run", f"{dense}-parts", *given, *clipped)
    trained(made, "small.toml", "--run", f"{dense}-alone", *clipped)
    assert ne(made / f"{dense}-parts") == pytest.approx(ne(made / f"{dense}-alone"), abs=1e-6)
    runs = [made / f"{dense}-parts", made / f"{dense}-alone"]
    ours, theirs = map(learnt, runs)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-5, atol=1e-5, msg=f"{key} differs")
    for run in runs:  # the last checkpoint is of step 120 then
        shutil.rmtree(checkpoints.folder_of(run / "checkpoints", 122))
    trained(made, made / f"{dense}-parts", "--resume", *given)
    assert all(torch.equal(tensor, ours[key]) for key, tensor in learnt(made / f"{dense}-parts").items())
    trained(made, made / f"{dense}-alone", "--resume", *given)  # whole weights of one process go on in parts
    for key, tensor in learnt(made / f"{dense}-alone").items():
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-5, atol=1e-5, msg=f"{key} differs")


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_processes
def test_processes_of_torchrun_end_at_the_same_bits(made: Path, whole: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "--", "cordillera", "train", "small.toml", "--run", "launched"]
    said = ends(spawn(command, made))
    assert said.count("finished after 122 steps") == 1
    same_bits(made / "launched", whole)


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_processes
def test_sums_of_bags_end_where_rows_do_and_go_on_with_other_numbers_of_processes(made: Path, whole: Path) -> None:
    bags = ("--run", "bags", "--nproc", 2, "--set", "parallel.pool='bags'")
    process = signalled(made, signal.SIGINT, 8, "small.toml", *bags)
    assert "bags of 3 summed by their holders" in ends(process, 130)
    assert "resumed at step" in trained(made, "bags", "--resume", "--nproc", 3)
    assert ne(made / "bags") == pytest.approx(ne(whole), abs=1e-6)
    placement = Placement.read(made / "bags" / ranking.PLACEMENT_FILE)
    assert (placement.size, placement.pooled) == (3, tuple(placement.tables))


# Bad days


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_processes
def test_a_killed_rank_is_named_ctrl_c_saves_and_the_run_goes_on_to_the_same_bits(made: Path, whole: Path) -> None:
    folder = made / "killed"
    said = ends(signalled(made, signal.SIGKILL, 8, "small.toml", "--run", "killed", "--nproc", 2), 2)
    assert len(re.findall("^error: ", said, re.MULTILINE)) == 1
    for words in ("rank 1", "SIGKILL", "--resume"):
        assert words in said, said
    reached = checkpoints.steps(folder / "checkpoints")[-1]
    assert reached <= 8

    said = ends(signalled(made, signal.SIGINT, reached + 8, "killed", "--resume"), 130)
    step = int(re.search(r"interrupted at step ([\d,]+); everything is saved", said)[1].replace(",", ""))  # type: ignore[index]
    assert checkpoints.steps(folder / "checkpoints")[-1] == step
    assert "over 2 processes" in said
    assert f"resumed at step {reached}" in said
    assert "--resume" in said

    assert f"resumed at step {step}" in trained(made, "killed", "--resume")
    same_bits(folder, whole)


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_processes
def test_a_stopped_rank_is_named_in_time_and_other_numbers_of_processes_go_on(made: Path, whole: Path) -> None:
    still = ("--run", "still", "--nproc", 2, "--set", "parallel.deadline_s=8")
    said = ends(signalled(made, signal.SIGSTOP, 8, "small.toml", *still), 2)
    began = float((made / "signalled").read_text())
    assert time.monotonic() - began < 40  # the deadline, and what a busy machine needs to end the processes
    assert "rank 1" in said
    assert len(re.findall("^error: ", said, re.MULTILINE)) == 1

    trained(made, "still", "--resume", "--nproc", 1, "--set", "parallel.deadline_s=60")
    assert ne(made / "still") == pytest.approx(ne(whole), abs=1e-6)
    recipe = load(made / "still")
    assert isinstance(recipe, RankingRecipe)
    assert recipe.parallel.processes == 1


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_processes
def test_a_disk_that_is_full_at_a_checkpoint_gives_one_error(made: Path) -> None:
    size = ["bash", "-c", 'ulimit -f 16; exec "$@"', "bash"]  # blocks of 1,024 bytes; a checkpoint is larger
    command = [sys.executable, "-m", "cordillera", "train", "small.toml", "--run", "full", "--nproc", "2"]
    said = ends(spawn([*size, *command], made), 2)
    assert len(re.findall("^error: ", said, re.MULTILINE)) == 1
    assert "File too large" in said or "the file is larger than may be" in said
    assert "rank" not in said.partition("error: ")[2]
    assert checkpoints.steps(made / "full/checkpoints") == []
    status = json.loads((made / "full/status.json").read_text())
    assert status["ended"] == "failed"
