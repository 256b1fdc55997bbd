"""Features of items, users and histories, and batches in which some ids are popular, so that caches have work."""

from __future__ import annotations

import torch
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.jagged import JaggedBatch, JaggedTensor

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
DIM = 6


def spec(items: int, users: int) -> FeatureSpec:
    sparse = (
        SparseFeature("item", "items"),
        SparseFeature("user", "users"),
        SparseFeature("history", "items", pooling="mean", is_list=True),
    )
    return FeatureSpec((), sparse, {"items": items, "users": users}, ("click",))


def popular(seed: int, size: int, items: int, users: int, power: int, scale: int = 1) -> JaggedBatch:
    """Samples whose ids are ``scale`` times small numbers more often than large ones, by ``power``."""
    generator = torch.Generator().manual_seed(seed)

    def ids(rows: int, count: int) -> Tensor:
        return (torch.rand(count, generator=generator) ** power * rows).long() * scale

    lengths = torch.randint(0, 4, (size,), generator=generator).tolist()
    return JaggedBatch.from_features(
        {
            "item": JaggedTensor(ids(items, size), torch.arange(size + 1)),
            "user": JaggedTensor(ids(users, size), torch.arange(size + 1)),
            "history": JaggedTensor.from_lists([ids(items, n).tolist() for n in lengths]),
        }
    )
