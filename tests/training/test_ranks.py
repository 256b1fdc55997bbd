"""Training over two processes against training in one: the same losses, weights, records and ends."""

from __future__ import annotations

import errno
import json
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cordillera.data.ranking.balance import SampleBalance
from cordillera.data.ranking.features import FeatureSpec, RankingBatch
from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import CordilleraError, TrainingError
from cordillera.jagged import slice_samples
from cordillera.models.ranking import MODELS, build
from cordillera.planning.ranking.placement import Placement, TablePart
from cordillera.run import Run
from cordillera.training import checkpoints, sharded_checkpoints
from cordillera.training.ranking.config import TrainingConfig
from cordillera.training.ranking.ranks import ManyRanks, _DropoutOfBatch
from cordillera.training.ranking.scoring import load_weights
from cordillera.training.ranking.trainer import Trainer
from tests.distributed.processes import asked_for, found_by, needs_gloo
from tests.training.conftest import FEATURES, POOLING, MemoryLoader

DENSE = FeatureSpec(dense=("a", "b"), sparse=(), tables={}, tasks=FEATURES.tasks)


def trainer_of(
    folder: str,
    name: str,
    links: Collectives | None,
    *,
    model: str = "dlrm",
    features: FeatureSpec = FEATURES,
    loader: MemoryLoader | None = None,
    validation: MemoryLoader | None = None,
    sizes: dict[str, Any] | None = None,
    division: SampleBalance = "none",
    **config: Any,
) -> Trainer:
    """A trainer in one process, or with ``links`` as one of several, on the run of a name."""
    torch.manual_seed(1)
    kind = MODELS[model].Config
    given = {"embedding_dim": 8, "bottom_mlp": (8, 4), "top_mlp": (8,), **(sizes or {})}
    rule = TablesConfig(name="rowwise_adagrad", learning_rate=0.05)
    network = build(kind(**{key: value for key, value in given.items() if key in kind.model_fields}), features, rule)
    ranks = None
    if links is not None:
        width = network.tables.embedding_dim
        shapes = {table: (rows, width) for table, rows in features.tables.items()}
        if width >= 8:  # in columns
            boxes = [(0, 50, 0, 4), (0, 50, 4, width - 4)]
        else:
            boxes = [(0, 20, 0, width), (20, 30, 0, width)]
        parts = [TablePart(table, *box, (rank,)) for table in shapes for rank, box in enumerate(boxes)]
        network.tables = ShardedEmbeddingTables.of(network.tables, Placement(2, shapes, tuple(parts)), links)
        watchdog: Any = types.SimpleNamespace(at=lambda where: None, should_stop=False)
        ranks = ManyRanks(network.tables, watchdog, division, of_sample=3.0)
    return Trainer(
        TrainingConfig(**{"precision": "fp32", "epochs": 2, "log_every": 3, **config}),
        network,
        loader or MemoryLoader(5, 33, weights=True),
        validation or MemoryLoader(2, 41, seed=5),
        Run(Path(folder) / name),
        tasks=features.tasks,
        device=torch.device("cpu"),
        ranks=ranks,
    )


def ending_with_one_sample() -> MemoryLoader:
    """A loader whose last batch holds one sample."""
    loader = MemoryLoader(3, 8)

    def cut(number: int, batch: RankingBatch) -> RankingBatch:
        if number < 2:
            return batch
        assert batch.labels is not None
        groups = None if batch.groups is None else batch.groups[:1]
        sparse = slice_samples(batch.sparse, 0, 1)
        return replace(batch, dense=batch.dense[:1], sparse=sparse, labels=batch.labels[:1], groups=groups)

    loader.spoil = cut
    return loader


def with_missing_labels() -> MemoryLoader:
    """A loader of batches some of whose labels are missing, on the second rank all of one task."""
    loader = MemoryLoader(5, 33, weights=True)

    def spoil(number: int, batch: RankingBatch) -> RankingBatch:
        assert batch.labels is not None
        batch.labels[15:, number % 2] = torch.nan
        return batch

    loader.spoil = spoil
    return loader


def with_teacher() -> MemoryLoader:
    """A loader of batches with a teacher's logits, some of which are missing."""
    loader = MemoryLoader(5, 33, weights=True)

    def spoil(number: int, batch: RankingBatch) -> RankingBatch:
        logits = torch.randn(33, 2, generator=torch.Generator().manual_seed(number))
        logits[20:, number % 2] = torch.nan
        return replace(batch, teacher=logits)

    loader.spoil = spoil
    return loader


def getting_worse() -> MemoryLoader:
    """Samples of validation with labels that contradict those of training."""
    loader = MemoryLoader(2, 41, seed=5)
    loader.spoil = lambda number, batch: replace(batch, labels=None if batch.labels is None else 1 - batch.labels)
    return loader


def not_a_number() -> MemoryLoader:
    """A loader with NaN in the first sample of the second batch, which the first rank has."""
    loader = MemoryLoader(5, 33)

    def spoil(number: int, batch: RankingBatch) -> RankingBatch:
        if number == 1:
            batch.dense[0, 0] = torch.nan
        return batch

    loader.spoil = spoil
    return loader


ALIKE: dict[str, Callable[[], dict[str, Any]]] = {
    "dropout": lambda: {"sizes": {"dropout": 0.3}, "gradient_clip": 0.5},
    "attention with dropout": lambda: {"model": "dhen", "sizes": {"dropout": 0.3, "layers": 1}, "epochs": 1},
    "one sample": lambda: {"loader": ending_with_one_sample()},
    "patience": lambda: {"validation": getting_worse(), "patience": 2, "evaluate_every": 2, "epochs": 3},
    "progressive": lambda: {"progressive": True, "epochs": 1, "progressive_window": 50},
    "bfloat16": lambda: {"precision": "bf16", "epochs": 1},
    "equal numbers of ids": lambda: {"sizes": {"dropout": 0.3}, "gradient_clip": 0.5, "division": "fixed"},
    "any numbers of samples": lambda: {"sizes": {"dropout": 0.3}, "division": "variable", "progressive": True},
    "balanced tasks": lambda: {"balance": {"mode": "min-norm"}, "task_weights": {"buy": 100.0}, "epochs": 1},
    "balanced tasks of experts": lambda: {"model": "ple", "sizes": {"mlp": (8,)}, "balance": {"mode": "equal"}},
    "a teacher": lambda: {
        "loader": with_teacher(),
        "teacher": {"head": "auxiliary", "adapter": True, "weight": 3.0},
        "sizes": {"dropout": 0.3},
        "gradient_clip": 0.5,
        "epochs": 1,
    },
    "missing labels": lambda: {"loader": with_missing_labels(), "balance": {"mode": "equal"}, "epochs": 1},
    "no tables": lambda: {"features": DENSE, "sizes": {"interaction": "cat"}, "epochs": 1},
}
"""Trainings that end alike on one and on two processes."""

REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "one sample with dropout": lambda: {"loader": ending_with_one_sample(), "sizes": {"dropout": 0.3}},
    "not a number": lambda: {"loader": not_a_number()},
    "full disk": lambda: {"epochs": 1},
}
"""Trainings that end with an error."""


def ended(trainer: Trainer) -> dict[str, Any]:
    report = trainer.fit()
    assert all(not parameter.isnan().any() for parameter in trainer.dense.values())
    return {
        "ended": report.ended,
        "step": report.progress.step,
        "best": [report.progress.best, report.progress.best_step],
        "state": trainer.model.state_dict(),
        "random": torch.get_rng_state(),
    }


def full(*given: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def refused(name: str, trainer: Trainer) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        if name == "full disk":
            patch.setattr(sharded_checkpoints, "write_tensors", full)
        try:
            trainer.fit()
        except CordilleraError as error:
            return [type(error).__name__, str(error)]
    return []


def together(names: tuple[str, ...], rank: int, folder: str) -> dict[str, Any]:
    """Train as one of two processes."""
    links = Collectives(None, Ledger(), 120.0)
    found: dict[str, Any] = {name: ended(trainer_of(folder, name, links, **ALIKE[name]())) for name in names}
    found |= {name: refused(name, trainer_of(folder, name, links, **make())) for name, make in REFUSED.items()}
    trainer = trainer_of(folder, "stopped", links, sizes={"dropout": 0.3}, gradient_clip=0.5)
    assert isinstance(trainer.ranks, ManyRanks)
    watchdog: Any = trainer.ranks.watchdog

    def ask(record: Any, progress: Any, total: int) -> None:
        if progress.step == 3 and rank == 1:
            watchdog.should_stop = True

    trainer.on_step = ask
    found["stopped"] = ended(trainer)
    trainer = trainer_of(folder, "stopped", links, sizes={"dropout": 0.3}, gradient_clip=0.5)
    assert trainer.resume()
    return found | {"resumed": ended(trainer)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("stopped", *ALIKE, *REFUSED, *(f"{name} alone" for name in ALIKE)):
        Run.create(folder / name, "name = 'test'\n")
    return folder


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest, folder: Path) -> dict[int, Any]:
    """Results of two processes, by rank: of the trainings that tests ask for."""
    names = tuple(name for name in ALIKE if (name,) in asked_for(request, "name") | {("dropout",)})
    return found_by(2, folder, partial(together, names), 240)


@pytest.mark.cases(2)
@needs_gloo
@pytest.mark.parametrize("name", list(ALIKE))
def test_two_processes_end_where_one_does(on_two: dict[int, Any], folder: Path, name: str) -> None:
    trainer = trainer_of(str(folder), f"{name} alone", None, **ALIKE[name]())
    expected = ended(trainer)
    near, close = (2e-3, 2e-2) if name == "bfloat16" else (1e-6, 1e-5)
    if "attention" in name:  # biases of keys have no effect, and Adam makes steps of their gradients' rounding errors
        close = 1e-3
    for found in (on_two[rank][name] for rank in range(2)):
        assert (found["ended"], found["step"]) == (expected["ended"], expected["step"])
        assert found["best"] == [pytest.approx(expected["best"][0], abs=near), expected["best"][1]]
        assert found["state"].keys() == expected["state"].keys()
        for key, tensor in expected["state"].items():
            torch.testing.assert_close(
                found["state"][key], tensor, rtol=close, atol=close, msg=lambda m, k=key: f"{k}: {m}"
            )
            assert torch.equal(found["state"][key], on_two[0][name]["state"][key]), key
        assert torch.equal(found["random"], expected["random"])
    records, alone = (Run(folder / one).metrics() for one in (name, f"{name} alone"))
    assert [(record["kind"], record["step"]) for record in records] == [(one["kind"], one["step"]) for one in alone]
    for record, other in zip(records, alone, strict=True):
        if record["kind"] == "train":
            assert record["loss"] == pytest.approx(other["loss"], rel=close)
            assert record["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=10 * close)
            assert record["examples"] == other["examples"]
            assert record["sent_bytes"] > 0
            assert 0 < record["exposed_fraction"] < 1
            assert not {"sent_bytes", "exposed_fraction"} & other.keys()
    if name == "patience":
        best = expected["best"][1]
        assert (expected["ended"], expected["step"]) == ("early", best + 4)
        load_weights(trainer.model, checkpoints.load(checkpoints.folder_of(folder / name / "checkpoints", best)))
        assert all(torch.equal(on_two[1][name]["state"][key], kept) for key, kept in trainer.model.state_dict().items())
    if name == "progressive":
        ours, theirs = (json.loads((folder / one / "progressive.json").read_text()) for one in (name, f"{name} alone"))
        assert ours.keys() == theirs.keys()


@needs_gloo
def test_an_error_is_the_same_on_all_ranks(on_two: dict[int, Any]) -> None:
    for name, said in {
        "one sample with dropout": "with dropout, no batch may have fewer samples than processes: 1 for 2",
        "not a number": "the loss became nan at step 2",
        "full disk": "the disk is full",
    }.items():
        (kind, text), (other, same) = on_two[0][name], on_two[1][name]
        assert said in text
        assert "\n  -> " in text
        assert same == text
        assert kind == other == ("RunError" if name == "full disk" else "TrainingError")


@needs_gloo
def test_a_request_that_reaches_one_rank_stops_all_and_the_run_goes_on_to_the_same_bits(on_two: dict[int, Any]) -> None:
    for found in on_two.values():
        assert (found["stopped"]["ended"], found["stopped"]["step"]) == ("interrupted", 4)
        assert found["resumed"]["ended"] == "finished"
        for key, tensor in found["dropout"]["state"].items():
            assert torch.equal(found["resumed"]["state"][key], tensor), key


def small_batches(rank: int, folder: str) -> dict[str, Any]:
    """Train every model on batches of a single sample, which leave the first rank without any."""
    links = Collectives(None, Ledger(), 120.0)
    return {name: ended(trainer_of(folder, name, links, **of_one_sample(name))) for name in POOLING}


def of_one_sample(name: str) -> dict[str, Any]:
    return {"model": name, "loader": MemoryLoader(3, 1), "validation": MemoryLoader(2, 3, seed=5), "epochs": 1}


@needs_gloo
@pytest.mark.slow
def test_a_rank_may_be_without_samples_with_every_model(tmp_path: Path) -> None:
    for name in POOLING:
        Run.create(tmp_path / name, "name = 'test'\n")
        Run.create(tmp_path / f"{name} alone", "name = 'test'\n")
    by_rank = found_by(2, tmp_path, small_batches, 240)
    for name in POOLING:
        expected = ended(trainer_of(str(tmp_path), f"{name} alone", None, **of_one_sample(name)))
        for found in by_rank.values():
            for key, tensor in expected["state"].items():
                # biases of keys have no effect, and Adam makes steps of their gradients' rounding errors
                close = 1e-3 if key.endswith("query_key_value.bias") else 1e-5
                torch.testing.assert_close(found[name]["state"][key], tensor, rtol=close, atol=close)


@pytest.mark.parametrize(("samples", "each"), [(5, 1), (8, 3), (2, 2)])
def test_ranks_draw_the_dropout_of_their_samples_as_one_process_would(samples: int, each: int) -> None:
    """A module may have several rows for each sample; all ranks draw for all samples and take their own."""
    given = torch.rand(samples * each, 6, generator=torch.Generator().manual_seed(0)) + 1

    def dropped(first: int, end: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        with _DropoutOfBatch(samples, torch.arange(first, end), size):
            part = given[first * each : end * each]
            found = torch.nn.functional.dropout(part, 0.25), torch.nn.functional.dropout(part, 0.25, inplace=False)
            assert torch.nn.functional.dropout(part, 0.25, training=False) is part
            assert torch.nn.functional.dropout(part, 0.0) is part
            assert torch.equal(torch.nn.functional.relu(part), part)  # other functions are left alone
        return found

    whole = dropped(0, samples, 1)
    middle = samples // 2
    parts = dropped(0, middle, 2), dropped(middle, samples, 2)
    for turn in range(2):
        assert torch.equal(torch.cat([part[turn] for part in parts]), whole[turn])
        kept = whole[turn] != 0
        torch.testing.assert_close(whole[turn][kept], given[kept] / 0.75)
        assert 0.5 < float(kept.float().mean()) < 0.95
    assert not torch.equal(*whole)
    with pytest.raises(TrainingError, match=f"{samples} for {samples + 1}"):
        dropped(0, 1, samples + 1)
