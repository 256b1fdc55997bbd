"""Models whose tables no process holds whole: how they are made, saved, and read by any other number of processes.

Ranks are threads, each with its own model, that collect numbers from one another.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import MadeTablesConfig, TablesConfig
from cordillera.errors import CheckpointError, RunError, TrainingError
from cordillera.models.ranking import MODELS, build
from cordillera.models.ranking.base import RankingModel
from cordillera.planning.ranking.placement import Placement, TablePart
from cordillera.training import checkpoints, sharded_checkpoints
from cordillera.training.ranking.rank_checkpoints import TableCheckpoints, state_without_rows
from cordillera.training.ranking.scoring import load_weights
from tests.training.conftest import POOLING

ROWS = {"items": 16_387, "users": 7, "tags": 3}  # the first ends with a few rows after torch's blocks of 16 numbers


def spec(rows: dict[str, int] = ROWS) -> FeatureSpec:
    return FeatureSpec(("a", "b"), tuple(SparseFeature(name, name) for name in rows), rows, ("click",))


class Links:
    """The part of ``Collectives`` that checkpoints use, among threads."""

    deadline_s = 30.0

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.board, self.barrier = rank, size, board, barrier

    def all_gather(self, name: str, part: Tensor) -> Tensor:
        self.board[self.rank] = part
        self.barrier.wait(30)
        whole = torch.cat(self.board)
        self.barrier.wait(30)
        return whole


def placement(size: int, shapes: dict[str, tuple[int, int]]) -> Placement:
    """One table in rows and columns, with two parts on the last rank; one in columns; one copied."""
    parts, last = [], size - 1
    for table, (rows, width) in shapes.items():
        half = 4 if width > 4 else width
        columns = [(0, half), (half, width - half)] if width > half else [(0, width)]
        cuts = sorted({0, *(rows * (i + 1) // (size + 1) for i in range(size)), rows})
        if table == "tags":
            parts.append(TablePart(table, 0, rows, 0, width, tuple(range(size))))
        elif table == "users":
            parts += [TablePart(table, 0, rows, *box, (i % size,)) for i, box in enumerate(columns)]
        else:
            for i, (first, end) in enumerate(itertools.pairwise(cuts)):
                for j, box in enumerate(columns):
                    parts.append(TablePart(table, first, end - first, *box, (min(last, (i + j) % (size + 1)),)))
    return Placement(size, shapes, tuple(parts))


def plain(model: str = "dlrm", rule: str = "rowwise_adagrad", seed: int = 1, init: Any = 0.05) -> RankingModel:
    return made(TablesConfig(name=rule), model, seed, init)  # type: ignore[arg-type]


def made(tables: TablesConfig, model: str, seed: int, init: Any, rows: dict[str, int] = ROWS) -> RankingModel:
    torch.manual_seed(seed)
    sizes = {"embedding_dim": 8, "embedding_init": init, "bottom_mlp": (8,), "top_mlp": (8,)}
    kind = MODELS[model].Config
    return build(kind(**{key: value for key, value in sizes.items() if key in kind.model_fields}), spec(rows), tables)


class Ranks:
    """Models of several ranks, built one after another because they draw from one generator."""

    def __init__(
        self, size: int, model: str = "dlrm", rule: str = "rowwise_adagrad", seed: int = 1, init: Any = 0.05
    ) -> None:
        board, barrier = [None] * size, threading.Barrier(size)
        self.links: list[Any] = [Links(rank, size, board, barrier) for rank in range(size)]
        width = plain(model, rule, seed, init).tables.embedding_dim
        where = placement(size, {name: (rows, width) for name, rows in ROWS.items()})
        self.models = []
        for links in self.links:
            make = partial(ShardedEmbeddingTables, placement=where, links=links)
            config = MadeTablesConfig.of(TablesConfig(name=rule), make)  # type: ignore[arg-type]
            self.models.append(made(config, model, seed, init))

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.links)) as pool:
            return [future.result() for future in [pool.submit(work, rank) for rank in range(len(self.links))]]

    def save(self, folder: Path, step: int) -> None:
        def work(rank: int) -> None:
            model = self.models[rank]
            tensors = {f"model.{name}": tensor for name, tensor in state_without_rows(model).items()}
            TableCheckpoints(folder, self.links[rank]).save(model, tensors, {"step": step}, TrainingError)

        self.run(work)

    def load(self, folder: Path) -> int:
        def work(rank: int) -> int:
            found = TableCheckpoints(folder, self.links[rank]).load()
            assert found is not None
            load_weights(self.models[rank], found)
            return found.step

        (step,) = set(self.run(work))
        return int(step)


def assert_parts_of(whole: RankingModel, models: list[RankingModel]) -> None:
    """Assert that models of ranks have the weights, moments and steps of a whole one, to the bit."""
    boxes = {box.name: box.values for box in whole.tables.boxes()}
    for model in models:
        for name, parameter in whole.named_parameters():
            if not name.startswith("tables."):
                assert torch.equal(dict(model.named_parameters())[name], parameter), name
        assert model.tables.step == whole.tables.step
        assert model.tables.shapes() == {name: tuple(values.shape) for name, values in boxes.items()}
        for box in model.tables.boxes():
            ends = [first + size for first, size in zip(box.offsets, box.values.shape, strict=True)]
            of_whole = boxes[box.name][tuple(map(slice, box.offsets, ends))]
            assert torch.equal(box.values, of_whole), box.name
    assert {box.name for model in models for box in model.tables.boxes()} == set(boxes)


@pytest.mark.parametrize("init", [0.05, "uniform_by_rows"])
@pytest.mark.parametrize("name", POOLING)
def test_ranks_make_the_model_of_one_process_to_the_bit(name: str, init: Any) -> None:
    whole = plain(name, init=init)
    after = torch.get_rng_state()
    ranks = Ranks(3, name, init=init)
    assert torch.equal(torch.get_rng_state(), after)
    assert_parts_of(whole, ranks.models)


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adam", "sgd"])
def test_any_number_of_processes_reads_what_any_other_wrote_to_the_bit(tmp_path: Path, rule: str) -> None:
    whole = plain(rule=rule, seed=2)
    for box in whole.tables.boxes():
        box.values.normal_()
    whole.tables.step = 5
    tensors = {f"model.{name}": tensor for name, tensor in whole.state_dict().items()}
    checkpoints.save(tmp_path, tensors, {"step": 1})
    for step, size in enumerate((4, 3, 2, 4), 1):
        ranks = Ranks(size, rule=rule)
        assert ranks.load(tmp_path) == step
        assert_parts_of(whole, ranks.models)
        ranks.save(tmp_path, step + 1)
        alone = plain(rule=rule)
        load_weights(alone, checkpoints.load(checkpoints.folder_of(tmp_path, step + 1)))
        assert all(torch.equal(tensor, alone.state_dict()[name]) for name, tensor in whole.state_dict().items())
    files = {path.name.partition(".")[0] for path in checkpoints.folder_of(tmp_path, 3).glob("tables-*")}
    assert {file[:12] for file in files} == {f"tables-{rank:05d}" for rank in range(3)}
    assert "tables-00002-2" in files  # its second part of a table


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2 of three ranks; the folder of the second."""
    ranks = Ranks(3)
    ranks.save(tmp_path, 1)
    ranks.save(tmp_path, 2)
    return checkpoints.folder_of(tmp_path, 2)


def refused(ranks: Ranks, folder: Path, rank: int) -> str:
    with pytest.raises(CheckpointError) as error:
        TableCheckpoints(folder, ranks.links[rank]).load()
    return str(error.value)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["tables-00001.safetensors", "tensors.safetensors", "state.json"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_damaged_or_missing_file_is_refused_by_name_on_every_rank(saved: Path, name: str, size: int) -> None:
    path, ranks = saved / name, Ranks(size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    for said in ("is corrupt", "is missing"):
        with pytest.raises(CheckpointError, match=f"{name}: {said}"):
            checkpoints.load(saved)
        assert all(f"{name}: {said}" in text for text in ranks.run(partial(refused, ranks, saved.parent)))
        path.unlink(missing_ok=True)


def test_a_checkpoint_of_other_tables_is_refused(saved: Path) -> None:
    found = checkpoints.load(saved)
    with pytest.raises(CheckpointError, match=r"model.tables.sum.users has the shape \(7,\), in the model \(9,\)"):
        load_weights(made(TablesConfig(name="rowwise_adagrad"), "dlrm", 1, 0.05, {**ROWS, "users": 9}), found)
    with pytest.raises(CheckpointError, match=r"model\.tables\.exp_avg\.items has the shape None"):
        load_weights(plain(rule="adam"), found)


def test_an_unfinished_checkpoint_does_not_count(saved: Path) -> None:
    saved.rename(saved.with_name(f".{saved.name}.0123456789ab.tmp"))
    assert Ranks(2).load(saved.parent) == 1
    checkpoints.prune(saved.parent, {1})
    assert [path.name for path in saved.parent.iterdir()] == ["step-000000001"]


def test_a_full_disk_of_one_rank_gives_the_same_error_on_all_and_leaves_nothing(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, ranks = sharded_checkpoints.write_tensors, Ranks(3)

    def full(path: Path, *given: Any) -> None:
        if path.name == "tables-00001.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *given)

    monkeypatch.setattr(sharded_checkpoints, "write_tensors", full)
    with pytest.raises(RunError, match="step-000000003: the disk is full"):
        ranks.save(saved.parent, 3)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["step-000000001", "step-000000002"]


def test_what_is_not_finite_on_one_rank_is_saved_by_none(saved: Path) -> None:
    ranks = Ranks(3)
    *_, box = ranks.models[2].tables.boxes()
    box.values.reshape(-1)[0] = torch.nan
    with pytest.raises(TrainingError, match=r"element 0 of model\.tables\.sum.* is nan"):
        ranks.save(saved.parent, 3)
    assert checkpoints.steps(saved.parent) == [1, 2]


def memory(key: str) -> int:
    """Resident memory of this process in bytes: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux resets a process's peak of memory")
def test_a_rank_makes_saves_and_reads_its_parts_without_the_memory_of_whole_tables(tmp_path: Path) -> None:
    rows, width, size = 1 << 21, 32, 4
    whole = rows * width * 4  # 256 MiB
    parts = tuple(TablePart("items", rank * rows // size, rows // size, 0, width, (rank,)) for rank in range(size))
    where = Placement(size, {"items": (rows, width)}, parts)
    links: Any = Links(1, size, [], threading.Barrier(1))
    made_of = partial(ShardedEmbeddingTables, placement=where, links=links)

    def peak(work: Callable[[], Any]) -> tuple[Any, float]:
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        return work(), (memory("VmHWM") - before) / whole

    config = MadeTablesConfig.of(TablesConfig(), made_of)
    kind = MODELS["dlrm"].Config(embedding_dim=width, bottom_mlp=(8,), top_mlp=(8,), embedding_init="uniform_by_rows")
    model, used = peak(lambda: build(kind, spec({"items": rows}), config))
    own = model.tables.memory_bytes()
    assert used < (own["rows"] + own["optimizer"]) / whole + 0.1
    (box, *_) = model.tables.boxes()
    file = tmp_path / "part.safetensors"
    _, used = peak(lambda: checkpoints.write_tensors(file, {"a": box.values}, {"b": "c"}))
    assert used < 0.1
