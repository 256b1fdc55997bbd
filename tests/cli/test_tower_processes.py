"""``cordillera train`` over hosts that each compute a tower: results, resumptions and mistakes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cordillera import workflows
from cordillera.data.ranking.datasets import prepare
from cordillera.errors import PlanError, RecipeError
from cordillera.planning.ranking.placement import Placement, TablePart
from cordillera.recipe import RankingRecipe, load
from cordillera.workflows import ranking
from tests.cli.conftest import write_log
from tests.cli.test_ranking_processes import (
    RECIPE,
    ends,
    learnt,
    ne,
    needs_processes,
    none_starts,
    same_bits,
    signalled,
    trained,
)
from tests.distributed.processes import needs_gloo

__all__ = ["none_starts"]

STEPS = 50
TOWERS = """
[model.towers]
groups = [["seen", "user"], ["device"]]
compression = 2.0
"""
SETTINGS = """
gradient_clip = 0.05
eps = 1e-5

[parallel]
hosts = 2
exchange = "towers"
deadline_s = 120
"""
FOUR = ("--nproc", 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe that has towers, and its log."""
    folder = tmp_path_factory.mktemp("towers")
    write_log(folder / "log.csv")
    text = RECIPE.format(folder=folder).replace("max_steps = 122", f"max_steps = {STEPS}")
    text = text.replace("evaluate_every = 60", "evaluate_every = 25").replace("\n[training]", f"{TOWERS}\n[training]")
    (folder / "small.toml").write_text(text + SETTINGS)
    return folder


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_processes
def test_two_hosts_of_two_processes_end_where_one_process_does_and_resume_to_the_same_bits(made: Path) -> None:
    said = trained(made, "small.toml", "--run", "whole", *FOUR)
    assert "tables: over 4 processes, 3 whole, bags of 3 summed by their holders" in said
    placement = Placement.read(made / "whole" / ranking.PLACEMENT_FILE)
    ranks = {part.table: part.ranks[0] for part in placement.parts}
    assert sorted([ranks["seen"], ranks["user"]]) == [0, 1]
    assert ranks["device"] in (2, 3)
    assert "tower 1, which host 1 computes" in (made / "whole" / "placement.txt").read_text()
    trained(made, "small.toml", "--run", "alone")
    assert ne(made / "whole") == pytest.approx(ne(made / "alone"), abs=1e-6)
    ours, theirs = learnt(made / "whole", STEPS), learnt(made / "alone", STEPS)
    assert ours.keys() == theirs.keys()
    assert any(key.startswith("optimizer.towers.towers.1.") for key in ours)
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-5, atol=1e-5, msg=f"{key} differs")
    shutil.copytree(made / "whole", made / "evaluated")  # one process writes other last bits into its evaluation
    evaluated = workflows.evaluate(made / "evaluated", "test")
    assert evaluated.tasks["click"].metrics["ne"] == pytest.approx(ne(made / "whole"), abs=1e-6)

    process = signalled(made, signal.SIGINT, 8, "small.toml", "--run", "stopped", *FOUR)
    assert "everything is saved" in ends(process, 130)
    for name in ("other", "one"):
        shutil.copytree(made / "stopped", made / name)
    assert "resumed at step" in trained(made, "stopped", "--resume")
    same_bits(made / "stopped", made / "whole")
    trained(made, "other", "--resume", "--nproc", 3, "--set", "parallel.exchange='plain'", "--set", "parallel.hosts=1")
    trained(made, "one", "--resume", "--nproc", 1)
    for name in ("other", "one"):
        assert ne(made / name) == pytest.approx(ne(made / "alone"), abs=1e-6)


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_towers_without_modules_have_the_bits_of_the_plain_exchange_of_their_placement(made: Path) -> None:
    identity = ("--set", "model.towers.kind='identity'", *FOUR)
    trained(made, "small.toml", "--run", "identity", *identity)
    plain = ("--set", "parallel.exchange='plain'", "--set", "parallel.pool='bags'")
    placed = ("--set", "parallel.placement='identity/placement.json'")
    trained(made, "small.toml", "--run", "plain", *identity, *plain, *placed)
    ours, theirs = learnt(made / "identity", STEPS), learnt(made / "plain", STEPS)
    assert ours.keys() == theirs.keys()
    assert [key for key, tensor in ours.items() if not torch.equal(tensor, theirs[key])] == []
    assert ne(made / "identity") == ne(made / "plain")


# Mistakes, before any process starts


@pytest.mark.parametrize(
    ("changes", "processes", "keys"),
    [
        (["parallel.hosts=4"], 4, ["parallel.hosts"]),
        ([], 3, ["parallel.hosts"]),
        (["parallel.codec='int8'", "parallel.dense='full'"], 4, ["parallel.codec", "parallel.dense"]),
        (["parallel.copies=2", "parallel.pool='rows'"], 4, ["parallel.copies", "parallel.pool"]),
    ],
)
def test_settings_that_do_not_go_with_towers_are_refused(
    made: Path, tmp_path: Path, none_starts: None, changes: list[str], processes: int, keys: list[str]
) -> None:
    with pytest.raises(RecipeError) as caught:
        workflows.train(load(made / "small.toml", changes), tmp_path / "a", processes=processes)
    assert [key for key, _ in caught.value.problems] == keys
    assert not (tmp_path / "a").exists()


def test_a_recipe_without_towers_is_refused(made: Path, tmp_path: Path, none_starts: None) -> None:
    (tmp_path / "none.toml").write_text((made / "small.toml").read_text().replace(TOWERS, ""))
    with pytest.raises(RecipeError, match=r"model\.towers: exchange = 'towers' needs this section"):
        workflows.train(load(tmp_path / "none.toml"), tmp_path / "b", processes=4)


def test_a_placement_of_towers_on_other_hosts_is_refused(made: Path, tmp_path: Path, none_starts: None) -> None:
    recipe: Any = load(made / "small.toml", [f"parallel.placement='{tmp_path / 'p.json'}'"])
    assert isinstance(recipe, RankingRecipe)
    shapes = {name: (rows, 8) for name, rows in prepare(recipe.data).features.tables.items()}
    parts = tuple(TablePart(name, 0, rows, 0, 8, (0,)) for name, (rows, _) in shapes.items())
    (tmp_path / "p.json").write_text(Placement(4, shapes, parts).to_text())
    with pytest.raises(PlanError, match="table 'device' is on rank 0 of host 0, its tower on host 1"):
        workflows.train(recipe, tmp_path / "c", processes=4)
