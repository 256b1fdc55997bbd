"""Ways to cut tables and batches of samples, for tables over several processes and for TorchRec's beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from _ranking_batches import NUM_SPARSE, zipf_ids
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.jagged import JaggedBatch, JaggedTensor, offsets_from_lengths, slice_samples
from cordillera.planning.ranking.placement import Placement, TablePart

WAYS = ("whole", "columns", "rows", "grid", "copied", "two groups")
LONGEST = 20  # ids of a bag in the multi-hot case

SMALL_DIM, SMALL_BATCH = 16, 48
# A table's features have one pooling, as TorchRec's tables have.
SMALL = FeatureSpec(
    dense=(),
    sparse=(
        SparseFeature("item", "item_rows", pooling="mean"),
        SparseFeature("user", "user_rows"),
        SparseFeature("history", "item_rows", pooling="mean", is_list=True),
        SparseFeature("tags", "tag_rows", pooling="sum", is_list=True),
    ),
    tables={"item_rows": 401, "user_rows": 57, "tag_rows": 13},
    tasks=("click",),
)


def placement(way: str, tables: Mapping[str, int], dim: int, size: int) -> Placement:
    """Place all tables in one way over ``size`` ranks, an even number; tables that are whole go to ranks in turn."""
    parts: list[TablePart] = []
    for i, (name, rows) in enumerate(tables.items()):
        row, column = [-(-rows // size) * rank for rank in range(size)], [dim // size * rank for rank in range(size)]
        if way == "whole":
            parts.append(TablePart(name, 0, rows, 0, dim, (i % size,)))
        elif way == "columns":
            parts += [TablePart(name, 0, rows, column[rank], dim // size, (rank,)) for rank in range(size)]
        elif way == "rows":
            ends = [*row[1:], rows]
            parts += [TablePart(name, row[r], ends[r] - row[r], 0, dim, (r,)) for r in range(size)]
        elif way == "grid":
            half = rows // 2
            for across, (first, count) in enumerate(((0, half), (half, rows - half))):
                for down in range(2):
                    rank = (across * (size // 2) + down) % size
                    parts.append(TablePart(name, first, count, down * (dim // 2), dim // 2, (rank,)))
        elif way == "copied":
            parts.append(TablePart(name, 0, rows, 0, dim, tuple(range(size))))
        else:
            firsts, lasts = (0, size // 2), (size // 2 - 1, size - 1)
            parts += [
                TablePart(name, 0, rows, first, dim // 2, ranks) for first, ranks in ((0, firsts), (dim // 2, lasts))
            ]
    return Placement(size, {name: (rows, dim) for name, rows in tables.items()}, tuple(parts))


def small_batch(step: int) -> tuple[JaggedBatch, Tensor, Tensor]:
    """Draw a batch of ``SMALL`` with empty, short and long bags.

    Returns:
        The batch, the gradient of its pooled rows ``[B, F, D]``, and the gradient of the rows of its values ``[T, D]``.
    """
    draw = torch.Generator().manual_seed(step)

    def bags(rows: int, longest: int) -> JaggedTensor:
        offsets = offsets_from_lengths(torch.randint(0, longest + 1, (SMALL_BATCH,), generator=draw))
        return JaggedTensor(torch.randint(rows, (int(offsets[-1]),), generator=draw), offsets)

    def single(rows: int) -> JaggedTensor:
        return JaggedTensor(torch.randint(rows, (SMALL_BATCH,), generator=draw), torch.arange(SMALL_BATCH + 1))

    batch = JaggedBatch.from_features(
        {"item": single(401), "user": single(57), "history": bags(401, 5), "tags": bags(13, 2)}
    )
    pooled = torch.randn(SMALL_BATCH, len(SMALL.sparse), SMALL_DIM, generator=draw)
    return batch, pooled, torch.randn(len(batch.values), SMALL_DIM, generator=draw)


def click_features(rows: int) -> FeatureSpec:
    """Return 26 summed features, each with its own table of ``rows`` rows."""
    names = [f"c{i}" for i in range(NUM_SPARSE)]
    return FeatureSpec(
        dense=(),
        sparse=tuple(SparseFeature(name, f"{name}_rows", pooling="sum", is_list=True) for name in names),
        tables={f"{name}_rows": rows for name in names},
        tasks=("click",),
    )


def click_batches(features: FeatureSpec, count: int, size: int, longest: int) -> list[JaggedBatch]:
    """Draw batches of ``size`` samples; bags have 1 to ``longest`` ids, all lengths equally often."""
    draw = torch.Generator().manual_seed(longest)
    lengths = torch.randint(1, longest + 1, (count, len(features.sparse), size), generator=draw)
    columns = []
    for i, feature in enumerate(features.sparse):
        counts = lengths[:, i].sum(1).tolist()
        columns.append(zipf_ids(features.tables[feature.table], sum(counts), draw).split(counts))
    keys = tuple(feature.name for feature in features.sparse)
    return [
        JaggedBatch(
            keys,
            torch.cat([column[i] for column in columns]),
            offsets_from_lengths(lengths[i].reshape(-1)),
            one_hot=longest == 1,
        )
        for i in range(count)
    ]


def share(batch: JaggedBatch, rank: int, size: int) -> JaggedBatch:
    """Return the samples of one rank, an equal number on each."""
    samples = len(batch)
    return slice_samples(batch, samples * rank // size, samples * (rank + 1) // size)


def share_of_values(batch: JaggedBatch, values: Tensor, rank: int, size: int) -> Tensor:
    """Return what belongs to one rank's values of ``values [T, D]``."""
    return share(replace(batch, values=values), rank, size).values
