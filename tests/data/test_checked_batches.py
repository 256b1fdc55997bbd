"""Batches of one's own are checked before a model reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cordillera.data.ranking.features import FeatureSpec, RankingBatch, SparseFeature
from cordillera.data.ranking.loader import CheckedBatches, check_batch
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError
from cordillera.jagged import JaggedBatch, JaggedTensor
from cordillera.models.ranking import MODELS, build
from cordillera.run import Run
from cordillera.training.ranking.config import TrainingConfig
from cordillera.training.ranking.trainer import Trainer

FEATURES = FeatureSpec(
    dense=("age", "price"),
    sparse=(SparseFeature("user", "user"), SparseFeature("seen", "item", "mean", is_list=True)),
    tables={"user": 10, "item": 5},
    tasks=("click", "buy"),
)


def batch_of(rows: int = 4, seed: int = 0) -> RankingBatch:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda size: torch.randint(size, (rows,), generator=generator)  # noqa: E731
    user = JaggedTensor(draw(10), torch.arange(rows + 1))
    seen = JaggedTensor.from_lists([[1, 2], [], [4], [0]][:rows] + [[3]] * (rows - 4))
    labels = torch.stack([draw(2), draw(2)], 1).float()
    sparse = JaggedBatch.from_features({"user": user, "seen": seen})
    return RankingBatch(torch.rand(rows, 2, generator=generator), sparse, labels, torch.ones(rows))


def sparse(**changes: object) -> Callable[[RankingBatch], RankingBatch]:
    return lambda batch: replace(batch, sparse=replace(batch.sparse, **changes))


def changed(name: str, at: tuple[int, ...], value: float) -> Callable[[RankingBatch], RankingBatch]:
    def change(batch: RankingBatch) -> RankingBatch:
        values = getattr(batch, name).clone()
        values[at] = value
        return replace(batch, **{name: values})

    return change


def test_a_right_batch_passes_and_labels_may_be_missing() -> None:
    check_batch(batch_of(), FEATURES)
    check_batch(changed("labels", (0, 1), math.nan)(batch_of()), FEATURES)
    check_batch(replace(batch_of(), labels=None, weights=None), FEATURES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda batch: replace(batch, dense=batch.dense[:0]), "has no samples"),
        (
            lambda batch: replace(batch, dense=batch.dense[:, :1]),
            r"dense must be float32 \[4, 2\], got float32 \[4, 1\]",
        ),
        (lambda batch: replace(batch, dense=batch.dense.double()), r"dense must be float32 .*got float64"),
        (
            lambda batch: replace(batch, labels=batch.labels[:, 0]),
            r"labels must be float32 \[4, 2\], got float32 \[4\]",
        ),
        (lambda batch: replace(batch, labels=batch.labels.long()), "labels must be float32 .*got int64"),
        (lambda batch: replace(batch, weights=batch.weights[:, None]), r"weights must be float32 \[4\]"),
        (changed("dense", (2, 1), math.nan), "dense, 'price' of sample 2 is nan, must be finite"),
        (changed("dense", (2, 0), math.inf), "dense, 'age' of sample 2 is inf, must be finite"),
        (changed("labels", (3, 1), 2.0), "labels, 'buy' of sample 3 is 2, must be 0, 1 or NaN"),
        (changed("labels", (1, 0), -1.0), "labels, 'click' of sample 1 is -1"),
        (changed("weights", (1,), -0.5), "weights of sample 1 is -0.5, must be finite and at least 0"),
        (sparse(keys=("seen", "user")), r"sparse features must be \['user', 'seen'\]"),
        (lambda batch: sparse(values=batch.sparse.values.float())(batch), r"ids must be int64 \[T\], got float32"),
        (lambda batch: sparse(offsets=batch.sparse.offsets[:-1])(batch), "do not describe whole batches"),
        (lambda batch: sparse(offsets=batch.sparse.offsets * 2)(batch), "offsets must start at 0 and end at"),
        (sparse(offsets=torch.tensor([0, 1, 2, 3, 4, 9, 3, 7, 8])), "offsets must not decrease"),
        (
            sparse(offsets=torch.tensor([0, 2, 2, 3, 4, 6, 6, 7, 8])),
            "'user' must hold one id a sample, sample 0 holds 2",
        ),
        (
            sparse(offsets=torch.tensor([0, 1, 2, 3, 5, 6, 6, 7, 8])),
            "'user' must hold one id a sample, sample 3 holds 2",
        ),
        (sparse(weights=torch.full((8,), math.nan)), "weights of ids must be float32 and finite"),
        (lambda batch: replace(batch, groups=torch.zeros(4)), r"groups must be int64 \[4\], got float32 \[4\]"),
        (
            lambda batch: replace(batch, timestamps=torch.zeros(9).long()),
            r"timestamps must be int64 \[4\], got int64 \[9\]",
        ),
        (lambda batch: replace(batch, teacher=torch.full((4, 2), math.inf)), "teacher, 'click' of sample 0 is inf"),
        (lambda batch: replace(batch, dense=torch.tensor(1.0)), "has no samples"),
        (lambda batch: sparse(values=batch.sparse.values + 20)(batch), "of 'user' is not in its table of 10 rows"),
        (lambda batch: sparse(values=-1 - batch.sparse.values)(batch), "id -.* of 'user' is not in its table"),
    ],
)
def test_a_wrong_batch_is_refused_by_name(change: Callable[[RankingBatch], RankingBatch], said: str) -> None:
    wrong = change(batch_of())
    source = CheckedBatches(lambda epoch, start: iter([batch_of(), wrong]), 2, FEATURES)
    with pytest.raises(DataError, match=said) as error:
        list(source.epoch(3))
    assert str(error.value).startswith("epoch 3, batch 1")


def test_training_on_them_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def batches(epoch: int, start: int) -> Iterator[RankingBatch]:
        for number in range(start, 6):
            yield batch_of(8, seed=10 * epoch + number)

    def trained(folder: Path, steps: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model = build(MODELS["dnn"].Config(embedding_dim=4, mlp=(8,)), FEATURES, TablesConfig())
        run = Run(folder) if folder.exists() else Run.create(folder, "")
        config = TrainingConfig(epochs=2, max_steps=steps, precision="fp32", decay="none", warmup_fraction=0.0)
        source = CheckedBatches(batches, 6, FEATURES)
        trainer = Trainer(config, model, source, source, run, tasks=FEATURES.tasks, device=torch.device("cpu"))
        trainer.resume()
        trainer.fit()
        return model.state_dict()

    whole = trained(tmp_path / "whole", 9)
    trained(tmp_path / "parts", 4)
    parts = trained(tmp_path / "parts", 9)
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name


@pytest.mark.parametrize(("given", "said"), [(1, "gives 1, not 2 batches"), (3, "gives more, not 2 batches")])
def test_an_epoch_of_another_length_is_refused(given: int, said: str) -> None:
    source = CheckedBatches(lambda epoch, start: (batch_of() for _ in range(start, given)), 2, FEATURES)
    with pytest.raises(DataError, match=said):
        list(source.epoch())
    assert len(source) == 2
    with pytest.raises(DataError, match="an epoch has at least one batch, got 0"):
        CheckedBatches(lambda epoch, start: [], 0, FEATURES)
