"""Small feature sets and batches for the models' tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cordillera.data.ranking.features import FeatureSpec, RankingBatch, SparseFeature
from cordillera.jagged import JaggedBatch, offsets_from_lengths

MakeFeatures = Callable[..., FeatureSpec]
MakeBatch = Callable[..., RankingBatch]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Tensors here are tiny: a second thread only waits, and for long on a busy machine."""


@pytest.fixture
def make_features() -> MakeFeatures:
    """Builds a FeatureSpec of so many dense, single-id and list features."""

    def make(
        dense: int = 3, sparse: int = 4, lists: int = 0, tasks: tuple[str, ...] = ("click",), rows: int = 11
    ) -> FeatureSpec:
        names = [*(f"id{i}" for i in range(sparse)), *(f"list{i}" for i in range(lists))]
        return FeatureSpec(
            dense=tuple(f"number{i}" for i in range(dense)),
            sparse=tuple(SparseFeature(name, name, is_list=name.startswith("list")) for name in names),
            tables={name: rows + i for i, name in enumerate(names)},
            tasks=tasks,
        )

    return make


@pytest.fixture
def make_batch() -> MakeBatch:
    """Draws a batch that fits a FeatureSpec; bags of list features hold 0 to 4 ids."""

    def make(features: FeatureSpec, size: int = 7) -> RankingBatch:
        lengths = torch.cat(
            [
                torch.randint(0, 5, (size,)) if f.is_list else torch.ones(size, dtype=torch.int64)
                for f in features.sparse
            ]
            or [torch.zeros(0, dtype=torch.int64)]
        )
        per_feature = lengths.view(len(features.sparse), size).sum(1).tolist() if features.sparse else []
        values = torch.cat(
            [
                torch.randint(0, features.tables[f.table], (count,))
                for f, count in zip(features.sparse, per_feature, strict=True)
            ]
            or [torch.zeros(0, dtype=torch.int64)]
        )
        one_hot = not any(f.is_list for f in features.sparse)
        sparse = JaggedBatch(
            tuple(f.name for f in features.sparse), values, offsets_from_lengths(lengths), one_hot=one_hot
        )
        labels = torch.randint(0, 2, (size, len(features.tasks))).float()
        return RankingBatch(torch.randn(size, len(features.dense)), sparse, labels)

    return make
