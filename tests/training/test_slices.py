"""Training in slices: one, two, three and four processes end with the same bits, whatever the placement."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cordillera.data.ranking.features import RankingBatch
from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.prioritised_tables import FrozenWindowTables, PrioritisedEmbeddingTables
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.errors import PlanError, TrainingError
from cordillera.jagged import JaggedBatch, JaggedTensor
from cordillera.models.ranking import MODELS, build
from cordillera.planning.ranking.placement import Placement, TablePart
from cordillera.run import Run
from cordillera.training.ranking import slices
from cordillera.training.ranking.config import RankingParallelConfig, TrainingConfig
from cordillera.training.ranking.ranks import OneRank, cut_samples
from cordillera.training.ranking.trainer import Trainer
from tests.distributed.processes import found_by, needs_gloo
from tests.training.conftest import FEATURES, MemoryLoader

SLICES, ROWS = 12, 50

CASES: dict[str, dict[str, Any]] = {
    "dropout and copies": {"sizes": {"dropout": 0.3}, "gradient_clip": 0.5, "cut": "copies"},
    "rows": {"cut": "rows"},
    "columns with Adam": {"cut": "columns", "rule": "adam", "weight_decay": 0.01},
    "a grid with Adagrad": {"cut": "grid", "rule": "adagrad"},
    "SGD, on the last rank": {"cut": "last", "rule": "sgd"},
    "prioritised": {"cut": "rows", "rule": "adam", "kind": PrioritisedEmbeddingTables},
    "attention with dropout": {"model": "dhen", "sizes": {"dropout": 0.3, "layers": 1}, "cut": "rows"},
    "bfloat16": {"precision": "bf16", "cut": "copies", "rule": "adam"},
    "progressive": {"progressive": True, "progressive_window": 50, "cut": "rows"},
}
"""Trainings that end alike on any number of processes."""


def placement_of(cut: str, size: int, width: int) -> Placement:
    """A placement of the one table that depends on the number of ranks."""
    last, half = size - 1, width // 2
    edges = [ROWS * rank // size for rank in range(size + 1)]
    everywhere = tuple(range(size))
    two = (0, last) if size % 2 == 0 else everywhere  # with four ranks, each copy serves two of them
    boxes = {
        "copies": [(0, 20, 0, width, everywhere), (20, 30, 0, width, two)],
        "rows": [(edges[r], edges[r + 1] - edges[r], 0, width, (last - r,)) for r in range(size)],
        "columns": [(0, ROWS, 0, half, (0,)), (0, ROWS, half, width - half, (last,))],
        "grid": [(0, 20, 0, half, (last,)), (20, 30, 0, half, (0,)), (0, ROWS, half, width - half, two)],
        "last": [(0, ROWS, 0, width, (last,))],
    }[cut]
    return Placement(size, {"id": (ROWS, width)}, tuple(TablePart("id", *box) for box in boxes))


def loader(batches: int = 4, size: int = 33) -> MemoryLoader:
    """Batches of samples with weights; the last one has fewer samples than slices."""
    made = MemoryLoader(batches, size, weights=True)

    def spoil(number: int, batch: RankingBatch) -> RankingBatch:
        return batch if number < batches - 1 else cut_samples(batch, 0, 5)

    made.spoil = spoil
    return made


def trainer_of(
    folder: str,
    name: str,
    links: Collectives | None,
    *,
    cut: str = "rows",
    model: str = "dlrm",
    rule: Any = "rowwise_adagrad",
    weight_decay: float = 0.0,
    kind: type[ShardedEmbeddingTables] = FrozenWindowTables,
    sizes: dict[str, Any] | None = None,
    **config: Any,
) -> Trainer:
    torch.manual_seed(1)
    settings = MODELS[model].Config
    given = {"embedding_dim": 8, "bottom_mlp": (8, 8), "top_mlp": (8,), **(sizes or {})}
    tables = TablesConfig(name=rule, learning_rate=0.05, weight_decay=weight_decay)
    network = build(settings(**{k: v for k, v in given.items() if k in settings.model_fields}), FEATURES, tables)
    ranks: OneRank = slices.alone(network, SLICES)
    if links is not None:
        width, watchdog = network.tables.embedding_dim, types.SimpleNamespace(at=lambda where: None, should_stop=False)
        cut_tables = kind.of(network.tables, placement_of(cut, links.size, width), links)
        network.tables = cut_tables
        ranks = slices.ranks_of(cut_tables, SLICES, watchdog)  # type: ignore[arg-type]
    return Trainer(
        TrainingConfig(**{"precision": "fp32", "epochs": 1, "log_every": 2, "slices": SLICES, **config}),
        network,
        loader(),
        MemoryLoader(2, 41, seed=5),
        Run(Path(folder) / name),
        tasks=FEATURES.tasks,
        device=torch.device("cpu"),
        ranks=ranks,
    )


def ended(trainer: Trainer) -> dict[str, Any]:
    """Train, and return all that must not depend on the number of processes."""
    report = trainer.fit()
    moments = {
        f"{name} {key}": value
        for name, parameter in trainer.dense.items()
        for key, value in trainer.optimizer.state.get(parameter, {}).items()
    }
    return {
        "ended": report.ended,
        "progress": report.progress.to_state(),
        "tensors": trainer.model.state_dict() | moments | {"random": torch.get_rng_state()},
        "norm": trainer._window.gradient_norm,
    }


def stopped_at(trainer: Trainer, step: int) -> Trainer:
    """Return a trainer that is asked to stop after a step."""

    def ask(record: Any, progress: Any, total: int) -> None:
        if progress.step == step:
            trainer.stop()

    trainer.on_step = ask
    return trainer


MOVED = {"sizes": {"dropout": 0.3}, "rule": "adam", "gradient_clip": 0.5, "epochs": 2}


def links_of(rank: int, sizes: tuple[int, ...]) -> dict[int, Collectives]:
    """Links among the first processes, by their number, to which this one belongs."""
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    return {size: Collectives(group, Ledger(), 60.0) for size, group in groups.items() if rank < size}


def together(runs: str, rank: int, folder: str) -> dict[str, Any]:
    """Train cases over the first two, three and four processes."""
    return {
        f"{name} {size}": ended(trainer_of(runs, f"{name} {size}", among, **case))
        for size, among in links_of(rank, (2, 3, 4)).items()
        for name, case in CASES.items()
    }


def moving(runs: str, rank: int, folder: str) -> dict[str, Any]:
    """Train one run over two, then one, then three processes."""
    found, links = {}, links_of(rank, (2, 3))
    for size, cut, step in ((2, "columns", 2), (1, "", 5), (3, "rows", None)):
        if rank < size:
            trainer = trainer_of(runs, "moved", links.get(size), cut=cut, **MOVED)
            assert trainer.resume() == (size != 2)
            found[f"moved {size}"] = ended(trainer if step is None else stopped_at(trainer, step))
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with empty runs; this process computes with one thread, as the others do."""
    folder = tmp_path_factory.mktemp("slices")
    for name in CASES:
        for size in (1, 2, 3, 4):
            Run.create(folder / f"{name} {size}", "name = 'test'\n")
    for name in ("moved", "unmoved", "scored"):
        Run.create(folder / name, "name = 'test'\n")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def on_many(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Results of all cases on four processes, by rank."""
    return found_by(4, tmp_path_factory.mktemp("many"), partial(together, str(folder)), 280)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["ended"] == expected["ended"]
    assert found["progress"] == expected["progress"]
    assert found["norm"] == expected["norm"]
    assert found["tensors"].keys() == expected["tensors"].keys()
    for key, tensor in expected["tensors"].items():
        assert torch.equal(torch.as_tensor(found["tensors"][key]), torch.as_tensor(tensor)), key


def records(run: Path) -> list[dict[str, Any]]:
    """Return the log of a run without times."""
    timed = ("seconds", "examples_per_second", "data_fraction", "exposed_fraction", "sent_bytes", "time")
    return [{key: value for key, value in one.items() if key not in timed} for one in Run(run).metrics()]


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_processes_ends_with_the_same_bits(on_many: dict[int, Any], folder: Path, name: str) -> None:
    expected = ended(trainer_of(str(folder), f"{name} 1", None, **CASES[name]))
    assert expected["progress"]["step"] == 4
    logged = records(folder / f"{name} 1")
    assert {"train", "evaluation"} <= {record["kind"] for record in logged}
    for size in (2, 3, 4):
        for rank in range(size):
            same(on_many[rank][f"{name} {size}"], expected)
        assert records(folder / f"{name} {size}") == logged


@pytest.mark.slow
@needs_gloo
def test_a_run_goes_on_over_other_numbers_of_processes_to_the_same_bits(folder: Path, tmp_path: Path) -> None:
    expected = ended(trainer_of(str(folder), "unmoved", None, **MOVED))
    by_rank = found_by(3, tmp_path, partial(moving, str(folder)), 60)
    assert [by_rank[0][f"moved {size}"]["ended"] for size in (2, 1, 3)] == ["interrupted", "interrupted", "finished"]
    for found in by_rank.values():
        same(found["moved 3"], expected)


def test_slices_train_as_whole_batches_do_up_to_rounding(folder: Path, tmp_path: Path) -> None:
    Run.create(tmp_path / "whole", "name = 'test'\n")
    Run.create(tmp_path / "sliced", "name = 'test'\n")
    sliced, whole = (trainer_of(str(tmp_path), name, None, gradient_clip=0.5) for name in ("sliced", "whole"))
    whole.ranks = OneRank()
    ours, theirs = ended(sliced), ended(whole)
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-5)
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(sliced.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_every_slice_draws_numbers_of_its_own() -> None:
    drawn = {}
    for size in (1, 3):
        for rank in range(size):
            torch.manual_seed(3)
            own = slices._Slices(6, rank, size)
            for part, number in enumerate(own.own):
                with own.drawing(part):
                    drawn[size, number] = torch.rand(2)
            drawn[size, "after", rank] = torch.rand(2)
    assert all(torch.equal(drawn[1, number], drawn[3, number]) for number in range(6))
    assert all(torch.equal(drawn[1, "after", 0], drawn[3, "after", rank]) for rank in range(3))
    assert len({tuple(drawn[1, number].tolist()) for number in range(6)}) == 6


def test_a_batch_is_cut_into_all_of_its_samples() -> None:
    (batch,) = MemoryLoader(1, 33, weights=True).epoch()
    assert batch.labels is not None
    for size in (1, 2, 3, 4, 6, 12):
        parts = [part for rank in range(size) for part in slices._Slices(SLICES, rank, size).cut(batch)]
        assert len(parts) == SLICES
        assert torch.equal(torch.cat([part.dense for part in parts]), batch.dense)
        assert torch.equal(torch.cat([replace(part).labels for part in parts]), batch.labels)  # type: ignore[misc]
        history = [one for part in parts for one in part.sparse["history"].to_lists()]
        assert history == batch.sparse["history"].to_lists()


def test_a_gradient_of_each_row_and_slice_is_kept() -> None:
    """A table that is updated from reduced gradients, and one from all occurrences, differ by rounding alone."""
    (batch,) = MemoryLoader(1, 33).epoch()
    torch.manual_seed(2)
    made = [EmbeddingTables(FEATURES, 8, TablesConfig(name="sgd"), generator=torch.Generator().manual_seed(4))
            for _ in range(2)]  # fmt: skip
    gradient = torch.randn(33, 2, 8)
    for tables in made:
        tables(batch.sparse).backward(gradient)
    made[0].reduce_pending()
    (kept,) = made[0]._pending
    assert torch.equal(kept.rows, made[1].pending_rows())
    assert kept.grad.shape == (len(kept.rows), 1, 8)
    for tables in made:
        tables.update()
    torch.testing.assert_close(made[0].weight, made[1].weight, rtol=1e-6, atol=1e-7)
    made[0].reduce_pending()  # without gradients, nothing happens
    assert made[0].num_pending == 0


def test_what_slices_cannot_be_combined_with_is_named() -> None:
    given = RankingParallelConfig(processes=5, dense="full", pool="bags", codec="int8")
    found = dict(slices.why_not(TrainingConfig(slices=12), given))
    assert found["training.slices"] == "5 processes do not divide 12 slices"
    assert list(found) == ["training.slices", "parallel.dense", "parallel.pool", "parallel.codec"]
    assert slices.why_not(TrainingConfig(slices=12), RankingParallelConfig(processes=4, codec="distinct")) == []


ABSORBED = (1.0, 1e-16, -1.0, 0.0)
"""Gradients of one row by four slices: their sum in float64 is 0 in this order and 1e-16 if -1 follows 1."""


def first_row(tables: EmbeddingTables, own: range) -> float:
    """Update row 0, which is zero, with the gradients of slices, and return its first number."""
    ids = JaggedTensor(torch.zeros(1, dtype=torch.int64), torch.arange(2))
    batch = JaggedBatch.from_features({"id": ids, "history": JaggedTensor.from_lists([[]])})
    for number in own:
        tables(batch).backward(torch.full((1, 2, 8), ABSORBED[number]))
        if not isinstance(tables, ShardedEmbeddingTables):
            tables.reduce_pending()
    tables.update()
    return float(tables.table("id")[0, 0])


def test_gradients_of_a_row_are_added_in_the_order_of_slices() -> None:
    tables = EmbeddingTables(FEATURES, 8, TablesConfig(name="sgd", learning_rate=1.0), init=0.0)
    assert first_row(tables, range(4)) == 0.0


def on_two(rank: int, folder: str) -> dict[str, Any]:
    """Make tables that are refused, update while rows are on their way, and add gradients of a row in order."""
    links, said = Collectives(None, Ledger(), 60.0), {}
    sgd = TablesConfig(name="sgd", learning_rate=1.0)
    for cut in ("copies", "rows", "columns"):
        ordered = FrozenWindowTables(FEATURES, 8, sgd, placement_of(cut, 2, 8), links, init=0.0)
        said[cut] = first_row(ordered, range(2 * rank, 2 * rank + 2))
    columns = placement_of("columns", 2, 8)
    for name, rule, placement in (
        ("squares", "rowwise_adagrad", columns),
        ("pooled", "sgd", replace(columns, pooled=("id",))),
    ):
        try:
            FrozenWindowTables(FEATURES, 8, TablesConfig(name=rule), placement, links)  # type: ignore[arg-type]
        except PlanError as error:
            said[name] = str(error)
    tables = FrozenWindowTables(FEATURES, 8, TablesConfig(name="sgd"), columns, links)
    first, second = MemoryLoader(2, 6).epoch()
    for batch in (first, second):
        tables.prefetch(batch.sparse)
    tables(first.sparse).sum().backward()
    tables.fetch_ahead()
    try:
        tables.update()
    except TrainingError as error:
        said["early"] = str(error)
    tables.discard()
    tables.forget()
    assert torch.equal(tables(second.sparse), tables(second.sparse))
    return said


@needs_gloo
def test_tables_add_in_order_and_placements_that_change_results_are_refused(tmp_path: Path) -> None:
    found = found_by(2, tmp_path, on_two, 120)
    for said in found.values():
        assert [said[cut] for cut in ("copies", "rows", "columns")] == [0.0, 0.0, 0.0]
        assert "row-wise Adagrad sums squares in another order" in said["squares"]
        assert "set parallel.pool = 'rows'" in said["pooled"]
        assert "look up every batch of a step before its update" in said["early"]
