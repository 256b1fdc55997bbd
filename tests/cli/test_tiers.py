"""Runs with dynamic tables and with tables in a file: stopped, killed, damaged and continued, and their changes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cordillera import workflows
from cordillera.embeddings import row_file
from cordillera.embeddings.dynamic_tables import DynamicTables
from cordillera.embeddings.file_tables import FileTables
from cordillera.errors import CheckpointError, DataError, RecipeError, RunError, TrainingError
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.training import checkpoints
from cordillera.training.ranking.trainer import Trainer
from cordillera.workflows import injection, planning, quantization
from cordillera.workflows.trained import restore_model

from .conftest import RECIPE, write_log

pytest.importorskip("numba")

IDS = RECIPE.replace('{{ name = "user" }}', '{{ name = "user", encoding = "hash" }}').replace(
    '{{ name = "seen" }}', '{{ name = "seen", encoding = "identity" }}'
)
FILE = ["tables.storage=file", "tables.cache=0.1"]
DYNAMIC = ["tables.dynamic.min_count=2", "tables.dynamic.max_age=3", "tables.dynamic.evict_every=2"]
OPTIONS = ["training.precision=fp32", "training.epochs=2", "threads=1"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log, and recipes of ids with and without a number of rows."""
    folder = tmp_path_factory.mktemp("logs")
    log = write_log(folder / "log.csv", rows=1000)
    random, lines = np.random.default_rng(0), log.read_text().splitlines()
    for number, line in enumerate(lines[1:], 1):
        cells = line.split(",")
        cells[2] = f"u{int(random.zipf(1.3)) % 500}"  # many users are rare
        lines[number] = ",".join(cells)
    log.write_text("\n".join(lines) + "\n")
    (folder / "rows.toml").write_text(RECIPE.format(path=log))
    (folder / "ids.toml").write_text(IDS.format(path=log))
    return folder


def recipe_of(logs: Path, *options: str, name: str = "rows") -> Any:
    return load(logs / f"{name}.toml", [f"data.cache_dir={logs / 'cache'}", *OPTIONS, *options])


def final(run: Path) -> checkpoints.Checkpoint:
    folder = run / "checkpoints"
    return checkpoints.load(checkpoints.folder_of(folder, checkpoints.steps(folder)[-1]))


def same_state(first: Path, second: Path) -> None:
    """The newest checkpoints hold the same bits."""
    one, other = final(first), final(second)
    assert one.step == other.step
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    assert {path.name for path in one.folder.rglob("*")} == {path.name for path in other.folder.rglob("*")}
    if (one.folder / "rows").is_dir():
        names = [folder / "rows" / "rows.bin" for folder in (one.folder, other.folder)]
        assert names[0].read_bytes() == names[1].read_bytes()


@contextlib.contextmanager
def stopped_at(monkeypatch: pytest.MonkeyPatch, step: int) -> Iterator[None]:
    """Training in the region ends at a step without a checkpoint, as if it was killed."""
    take = Trainer._step

    def fail(self: Trainer, *arguments: Any) -> None:
        if self.progress.step == step:
            raise KeyboardInterrupt
        take(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", fail)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_a_run_in_a_file_is_that_in_memory(logs: Path, tmp_path: Path) -> None:
    runs = {"memory": tmp_path / "memory", "file": tmp_path / "file"}
    workflows.train(recipe_of(logs), runs["memory"])
    said: list[str] = []
    workflows.train(recipe_of(logs, *FILE), runs["file"], say=said.append)
    assert any("rows read from the file" in line for line in said)
    assert not (runs["file"] / "rows").exists()
    memory, file = final(runs["memory"]), final(runs["file"])
    for name, tensor in memory.tensors.items():
        if not name.startswith("model.tables."):
            assert torch.equal(tensor, file.tensors[name]), name
    _, model = restore_model(Run(runs["file"]), *_spec(runs["file"]))
    assert isinstance(model.tables, FileTables)
    rows = torch.cat([model.tables.table(name) for name in model.tables.features.tables])
    assert torch.equal(rows, memory.tensors["model.tables.weight"])
    for name, run in runs.items():
        workflows.predict(run, logs / "log.csv", tmp_path / f"{name}.csv")
    assert (tmp_path / "file.csv").read_bytes() == (tmp_path / "memory.csv").read_bytes()
    metrics = [workflows.evaluate(run, "validation").metrics() for run in runs.values()]
    assert metrics[0] == metrics[1]


def _spec(run: Path) -> tuple[Any, torch.device]:
    from cordillera.data.ranking.encoding import Encoder

    return Encoder.load(run / "encoder").features, torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "options", "step"),
    [
        ("rows", FILE, 3),
        pytest.param("ids", DYNAMIC, 12, marks=pytest.mark.slow),
        pytest.param("rows", [*FILE, "training.patience=1"], 12, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_with_the_same_bits(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: list[str], step: int
) -> None:
    recipe = recipe_of(logs, *options, "training.checkpoint_every=5", "training.learning_rate=0.05", name=name)
    workflows.train(recipe, tmp_path / "straight")
    with stopped_at(monkeypatch, step):
        workflows.train(recipe, tmp_path / "killed")
    outcome = workflows.train(Run(tmp_path / "killed"))
    assert outcome.report.ended in ("finished", "early")
    same_state(tmp_path / "straight", tmp_path / "killed")
    for run in ("straight", "killed"):
        workflows.predict(tmp_path / run, logs / "log.csv", tmp_path / f"{run}.csv")
    assert (tmp_path / "straight.csv").read_bytes() == (tmp_path / "killed.csv").read_bytes()


def copy_of(run: Path, target: Path, steps: list[int]) -> Path:
    """A copy of a run with the checkpoints of some steps."""
    shutil.copytree(run, target)
    checkpoints.prune(target / "checkpoints", set(steps))
    return target


@pytest.fixture(scope="module")
def followed(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of steps 8, 16, 24 and 32, and evicted ids between them."""
    folder = tmp_path_factory.mktemp("followed")
    recipe = recipe_of(logs, *DYNAMIC, "training.checkpoint_every=8", "training.epochs=4", name="ids")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "prune", lambda parent, keep: None)
        workflows.train(recipe, folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_a_copy_follows_a_run_bit_for_bit(cli: Any, logs: Path, followed: Path, tmp_path: Path) -> None:
    assert checkpoints.steps(followed / "checkpoints") == [8, 16, 24, 32]
    copy = copy_of(followed, tmp_path / "copy", [8])
    evicted = 0
    for since, to in ((8, 16), (16, 24), (24, 32)):
        made = cli("delta", "make", followed, "--from", since, "--to", to, "--out", "changes")
        assert made.code == 0, made.err
        assert f"steps {since} to {to}" in made.out
        evicted += int(made.out.split(" rows, ")[1].split(" ids removed")[0])
        assert cli("delta", "apply", copy, "changes").code == 0
    assert evicted > 0
    ends = [checkpoints.folder_of(run / "checkpoints", 32) for run in (followed, copy)]
    assert (ends[0] / "tensors.safetensors").read_bytes() == (ends[1] / "tensors.safetensors").read_bytes()
    far = copy_of(followed, tmp_path / "far", [8])
    assert cli("delta", "make", followed, "--from", 8, "-o", "all").code == 0
    assert cli("delta", "apply", far, "all").code == 0
    same_state(followed, far)
    for run, name in ((followed, "a.csv"), (far, "b.csv")):
        assert cli("predict", run, logs / "log.csv", "--out", name).code == 0
    assert Path("a.csv").read_bytes() == Path("b.csv").read_bytes()


def test_wrong_changes_are_refused_and_change_nothing(cli: Any, followed: Path, logs: Path, tmp_path: Path) -> None:
    assert cli("delta", "make", followed, "--from", 8, "--to", 16, "--out", "changes").code == 0
    whole = Path("changes").read_bytes()
    Path("cut").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    flipped[-9] ^= 4
    Path("flipped").write_bytes(flipped)
    Path("empty").write_bytes(b"")
    copy = copy_of(followed, tmp_path / "copy", [8])
    for name in ("cut", "flipped", "empty"):
        refused = cli("delta", "apply", copy, name)
        assert refused.code == 2
        assert "is damaged" in refused.err, name
    assert "no such file" in cli("delta", "apply", copy, "none").err
    other = copy_of(followed, tmp_path / "other", [24])
    assert "holds no checkpoint of step 8" in cli("delta", "apply", other, "changes").err
    folder = checkpoints.folder_of(copy / "checkpoints", 8)
    found = checkpoints.load(folder)
    changed = {name: tensor.clone() for name, tensor in found.tensors.items()}
    changed["model.tables.weight"][:, 0] += 1  # rows that the changes do not replace are others than in the run
    checkpoints.save(copy / "checkpoints", changed, dict(found.state))
    refused = cli("delta", "apply", copy, "changes")
    assert "leads from another checkpoint of step 8" in refused.err
    assert [path.name for path in (copy / "checkpoints").iterdir()] == [folder.name]
    assert "not from step 16" in cli("delta", "make", followed, "--from", 16, "--to", 16, "--out", "x").err
    assert "no checkpoint of step 9" in cli("delta", "make", followed, "--from", 8, "--to", 9, "--out", "x").err
    text = (copy / "recipe.toml").read_text()
    (copy / "recipe.toml").write_text(text.replace("learning_rate = 0.005", "learning_rate = 0.006"))
    assert "has changed since" in cli("delta", "apply", copy, "changes").err


def test_changes_are_of_dynamic_tables_and_reach_back_so_far(cli: Any, logs: Path, tmp_path: Path) -> None:
    workflows.train(recipe_of(logs, "training.max_steps=3"), tmp_path / "fixed")
    assert "no dynamic tables" in cli("delta", "make", tmp_path / "fixed", "--from", 1, "-o", "x").err
    short = recipe_of(logs, *DYNAMIC, "tables.dynamic.keep_removed=3", "training.max_steps=6", name="ids")
    workflows.train(short, tmp_path / "short")
    assert "kept for 3 updates" in cli("delta", "make", tmp_path / "short", "--from", 1, "-o", "x").err


def test_a_full_disk_is_named_and_training_goes_on_later(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(logs, *FILE, "tables.cache_policy=lru", "tables.cache=0.01", "training.checkpoint_every=5")
    workflows.train(recipe, tmp_path / "straight")
    calls, write = iter(range(1000)), os.pwrite

    def fill(file: int, block: bytes, offset: int) -> int:
        if next(calls) < 3:
            return write(file, block, offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(row_file.os, "pwrite", fill)
        with pytest.raises(RunError, match=r"rows: the disk is full[\s\S]*--resume"):
            workflows.train(recipe, tmp_path / "full")
    status = Run(tmp_path / "full").status()
    assert status is not None
    assert status.ended == "failed"
    assert "the disk is full" in status.why
    workflows.train(Run(tmp_path / "full"))
    same_state(tmp_path / "straight", tmp_path / "full")


def test_a_full_disk_during_a_checkpoint_leaves_the_earlier_one(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(logs, *FILE, "training.checkpoint_every=5")
    copy, count = row_file.RowFile.copy, iter(range(10))

    def fail(self: row_file.RowFile, folder: Path) -> None:
        copy(self, folder)
        if next(count) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(row_file.RowFile, "copy", fail)
        with pytest.raises(RunError, match=r"step-\d+: the disk is full"):
            workflows.train(recipe, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full" / "checkpoints").iterdir()] == ["step-000000005"]
    workflows.train(recipe, tmp_path / "straight")
    workflows.train(Run(tmp_path / "full"))
    same_state(tmp_path / "straight", tmp_path / "full")


def test_a_damaged_file_is_refused_by_name(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(logs, *FILE, "training.checkpoint_every=5")
    with stopped_at(monkeypatch, 7):
        workflows.train(recipe, tmp_path / "run")
    run, beside = Run(tmp_path / "run"), tmp_path / "run" / "rows"
    (beside / "rows.bin").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"rows\.bin: must have[\s\S]*once it is deleted"):
        workflows.train(run)
    shutil.rmtree(beside)
    saved = checkpoints.folder_of(run.checkpoints, 5) / "rows" / "rows.bin"
    content = bytearray(saved.read_bytes())
    content[100] ^= 1
    saved.write_bytes(content)
    for act in (workflows.train, workflows.evaluate):
        with pytest.raises(CheckpointError, match=r"rows\.bin: is corrupt"):
            act(run)
    content[100] ^= 1
    saved.write_bytes(content)
    workflows.train(recipe_of(logs, *FILE, "tables.name=adam", "training.max_steps=5"), tmp_path / "adam")
    shutil.rmtree(beside)
    shutil.copytree(checkpoints.folder_of(tmp_path / "adam" / "checkpoints", 5) / "rows", beside)
    with pytest.raises(CheckpointError, match="expected"):
        workflows.train(run)
    shutil.rmtree(beside)
    workflows.train(run)
    workflows.train(recipe, tmp_path / "straight")
    same_state(tmp_path / "straight", run.folder)


def test_weights_that_are_not_finite_are_not_saved(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = FileTables.flush

    def spoil(self: FileTables) -> None:
        save(self)
        self.file.records[3, 1] = np.nan

    monkeypatch.setattr(FileTables, "flush", spoil)
    with pytest.raises(TrainingError, match="row 3 of table 'user' holds nan after step 5"):
        workflows.train(recipe_of(logs, *FILE, "training.checkpoint_every=5"), tmp_path / "run")
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == []


@pytest.mark.parametrize(("value", "says"), [("-3", "id -3 is outside"), (str(2**63), "not a whole number")])
def test_ids_that_no_table_takes_are_refused_with_their_line(logs: Path, tmp_path: Path, value: str, says: str) -> None:
    text = (logs / "log.csv").read_text().splitlines()
    cells = text[5].split(",")
    cells[5] = value
    text[5] = ",".join(cells)
    (tmp_path / "log.csv").write_text("\n".join(text) + "\n")
    (tmp_path / "ids.toml").write_text(IDS.format(path=tmp_path / "log.csv"))
    recipe = load(tmp_path / "ids.toml", [f"data.cache_dir={tmp_path / 'cache'}", *DYNAMIC])
    with pytest.raises(DataError, match=rf"log\.csv[\s\S]*6[\s\S]*{says}"):
        workflows.train(recipe, tmp_path / "run")


def test_other_places_refuse_such_tables_in_words(logs: Path, tmp_path: Path) -> None:
    for key, options, name in (("tables.storage", FILE, "rows"), ("tables.dynamic", DYNAMIC, "ids")):
        recipe = recipe_of(logs, *options, "training.max_steps=2", name=name)
        workflows.train(recipe, tmp_path / name)
        for act in (quantization.quantize, injection.inject, lambda run: planning.towers(run, 2)):
            with pytest.raises(RunError, match=f"{key}.*tables of fixed size"):
                act(tmp_path / name)
        with pytest.raises(RecipeError, match=r"tables.*one process"):
            workflows.train(recipe, tmp_path / "many", processes=2)
    emulating = recipe_of(logs, *DYNAMIC, 'training.emulate.format="bf16"', name="ids")
    with pytest.raises(RecipeError, match=r"training\.emulate"):
        workflows.train(emulating, tmp_path / "emulating")
    with pytest.raises(RecipeError, match=r"data\.schema: user, seen: ids of 63 bits need tables\.dynamic"):
        workflows.train(recipe_of(logs, name="ids"), tmp_path / "fixed")
    uniform = recipe_of(logs, *DYNAMIC, "model.embedding_init=uniform_by_rows", name="ids")
    with pytest.raises(RecipeError, match=r"model\.embedding_init: 'uniform_by_rows' needs num_embeddings of user"):
        workflows.train(uniform, tmp_path / "uniform")
    with pytest.raises(RecipeError, match=r"segments have a vocabulary or num_embeddings"):
        recipe_of(logs, 'data.schema.segments=["user"]', name="ids")
    for wrong in (["tables.storage=file"], [*FILE, "tables.dynamic={}"], [*FILE, "tables.rows=int8"]):
        with pytest.raises(RecipeError, match="tables"):
            recipe_of(logs, *wrong)


def test_ids_are_admitted_and_evicted_in_a_run(logs: Path, tmp_path: Path) -> None:
    said: list[str] = []
    workflows.train(recipe_of(logs, *DYNAMIC, name="ids"), tmp_path / "run", say=said.append)
    _, model = restore_model(Run(tmp_path / "run"), *_spec(tmp_path / "run"))
    assert isinstance(model.tables, DynamicTables)
    users = model.tables.ids_of("user")
    assert 0 < len(users) < 200
    assert int(users.max()) > 2**40  # hashes of 63 bits
    assert f"{len(users):,} ids of user" in next(line for line in said if line.startswith("tables:"))
    assert model.tables.delta(0).tensors["removed_ids"].numel() > 0
