"""``cordillera train`` in slices: the same bits on any number of processes, also after kills and changes of it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cordillera import workflows
from cordillera.data.ranking.datasets import prepare
from cordillera.errors import RecipeError
from cordillera.planning.ranking.placement import Placement
from cordillera.recipe import RankingRecipe, load
from cordillera.run import Run
from cordillera.training import checkpoints
from cordillera.workflows import ranking
from cordillera.workflows.trained import recipe_of, restore_model
from tests.cli.conftest import write_log
from tests.cli.test_kills import CLOCKED
from tests.cli.test_ranking_processes import RECIPE, ends, needs_processes, signalled, trained
from tests.distributed.processes import needs_gloo


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log and a recipe of a training in slices."""
    folder = tmp_path_factory.mktemp("sliced")
    write_log(folder / "log.csv")
    text = RECIPE.format(folder=folder).replace("threads = 1\n", "").replace("checkpoint_every = 2", "slices = 12\n")
    (folder / "sliced.toml").write_text(text + "checkpoint_every = 2\n")
    return folder


@pytest.fixture(scope="module")
def alone(made: Path) -> Path:
    """An uninterrupted run in one process."""
    trained(made, "sliced.toml", "--run", "alone")
    return made / "alone"


def kept(run: Path) -> tuple[Any, ...]:
    """Return records, evaluation, weights, and moments of dense weights of a run, without what clocks said."""
    logged = [{k: v for k, v in one.items() if k not in CLOCKED} for one in Run(run).metrics()]
    logged = [one for one in logged if one["kind"] != "resumed"]
    evaluation = {k: v for k, v in Run(run).read_json("evaluation.json").items() if k not in CLOCKED}
    _, model = restore_model(Run(run), prepare(recipe_of(Run(run)).data).features, torch.device("cpu"))
    tensors = checkpoints.load(checkpoints.folder_of(run / "checkpoints", 122)).tensors
    moments = {key: one for key, one in tensors.items() if key.startswith(("optimizer.", "random"))}
    return logged, evaluation, model.state_dict() | moments


def same(run: Path, other: Path) -> None:
    """Assert that runs hold the same records, evaluation, weights and moments, to the bit."""
    ours, theirs = kept(run), kept(other)
    assert ours[:2] == theirs[:2]
    assert ours[2].keys() == theirs[2].keys()
    assert [key for key, tensor in theirs[2].items() if not torch.equal(ours[2][key], tensor)] == []


@pytest.mark.parametrize(
    ("processes", "changes", "keys"),
    [
        (5, [], ["training.slices"]),
        (2, ["parallel.dense='full'", "parallel.pool='bags'"], ["parallel.dense", "parallel.pool"]),
        (2, ["parallel.codec='fp16'"], ["parallel.codec"]),
        (1, ["training.compile=true", "tables.rows='int8'"], ["tables", "training.compile"]),
    ],
)
def test_what_slices_cannot_do_is_refused_before_anything_starts(
    made: Path, tmp_path: Path, processes: int, changes: list[str], keys: list[str]
) -> None:
    recipe = load(made / "sliced.toml", changes)
    with pytest.raises(RecipeError) as caught:
        workflows.train(recipe, tmp_path / "refused", processes=processes)
    assert [key for key, _ in caught.value.problems] == keys
    assert not (tmp_path / "refused").exists()


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_processes
@pytest.mark.parametrize(("processes", "codec"), [(2, "distinct"), (4, "raw")])
def test_many_processes_end_at_the_bits_of_one(made: Path, alone: Path, processes: int, codec: str) -> None:
    name = f"over {processes}"
    trained(made, "sliced.toml", "--run", name, "--nproc", processes, "--set", f"parallel.codec='{codec}'")
    same(made / name, alone)
    placement = Placement.read(made / name / ranking.PLACEMENT_FILE)
    assert (placement.size, placement.pooled) == (processes, ())
    recipe = recipe_of(Run(made / name))
    assert isinstance(recipe, RankingRecipe)
    assert recipe.threads == 1


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_processes
def test_a_killed_run_goes_on_over_other_numbers_of_processes_to_the_bits_of_one(made: Path, alone: Path) -> None:
    process = signalled(made, signal.SIGKILL, 8, "sliced.toml", "--run", "killed", "--nproc", 2)
    assert "rank 1" in ends(process, 2)
    reached = checkpoints.steps(made / "killed/checkpoints")[-1]
    assert 0 < reached < 122
    shutil.copytree(made / "killed", made / "killed, alone")
    assert f"resumed at step {reached}" in trained(made, "killed, alone", "--resume", "--nproc", 1)
    same(made / "killed, alone", alone)

    by_rows = ("--set", "parallel.cuts=['rows']", "--set", "parallel.copied_rows=0")
    process = signalled(made, signal.SIGINT, reached + 4, "killed", "--resume", "--nproc", 3, *by_rows)
    assert f"resumed at step {reached}" in ends(process, 130)
    (step,) = checkpoints.steps(made / "killed/checkpoints")[-1:]
    prioritised = ("--set", "parallel.exchange='prioritised'")
    assert f"resumed at step {step}" in trained(made, "killed", "--resume", "--nproc", 2, *prioritised)
    same(made / "killed", alone)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_evaluate_computes_in_slices_as_well(made: Path, alone: Path) -> None:
    written = Run(alone).read_json("evaluation.json")["tasks"]
    (alone / "evaluation.json").rename(alone / "written.json")
    try:
        workflows.evaluate(alone)
        assert Run(alone).read_json("evaluation.json")["tasks"] == written
    finally:
        (alone / "written.json").rename(alone / "evaluation.json")
