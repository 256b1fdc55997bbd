"""Synthetic batches with the shape of the Criteo logs: 13 numbers, 26 ids, one label."""

from __future__ import annotations

import torch
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec, RankingBatch, SparseFeature
from cordillera.jagged import JaggedBatch

NUM_DENSE, NUM_SPARSE = 13, 26
ZIPF_EXPONENT = 1.05
POSITIVE_RATE = 0.256  # rate of the Criteo Kaggle log


def criteo_features(rows: int) -> FeatureSpec:
    """Return 13 dense and 26 one-hot features, each with its own table of ``rows`` rows."""
    names = [f"c{i}" for i in range(NUM_SPARSE)]
    return FeatureSpec(
        dense=tuple(f"i{i}" for i in range(NUM_DENSE)),
        sparse=tuple(SparseFeature(name, name) for name in names),
        tables=dict.fromkeys(names, rows),
        tasks=("click",),
    )


def zipf_ids(rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Return ``int64 [count]`` ids in ``[0, rows)``, drawn by Zipf's law and scattered over the table as by hashing."""
    shares = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-ZIPF_EXPONENT).cumsum(0)
    ranks = torch.searchsorted(shares, torch.rand(count, dtype=torch.float64, generator=generator) * shares[-1])
    return torch.randperm(rows, generator=generator)[ranks.clamp_(max=rows - 1)]


def criteo_batches(features: FeatureSpec, count: int, batch_size: int, seed: int = 0) -> list[RankingBatch]:
    """Draw ``count`` batches of features from :func:`criteo_features`."""
    generator = torch.Generator().manual_seed(seed)
    keys = tuple(feature.name for feature in features.sparse)
    columns = [zipf_ids(features.tables[key], count * batch_size, generator).view(count, batch_size) for key in keys]
    offsets = torch.arange(len(keys) * batch_size + 1)
    batches = []
    for i in range(count):
        batches.append(
            RankingBatch(
                dense=torch.randn(batch_size, len(features.dense), generator=generator),
                sparse=JaggedBatch(keys, torch.cat([column[i] for column in columns]), offsets, one_hot=True),
                labels=(torch.rand(batch_size, 1, generator=generator) < POSITIVE_RATE).float(),
            )
        )
    return batches
