"""Embedding rows as one rank sends them to another in the forward exchange: drawn, trained, and the paper's dumps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.loader import Loader
from cordillera.data.ranking.logs.synthetic import SyntheticConfig
from cordillera.distributed.codecs.bounds import classes_by_cardinality
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking import build
from cordillera.models.ranking.dlrm import DLRMConfig
from cordillera.training.optimizers import build_adamw
from cordillera.training.ranking.tasks.losses import weighted_loss

KAGGLE = [
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652),
    *(2173, 4, 7046547, 18, 15, 286181, 105, 142572),
]
TERABYTE = [
    *(9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10, 2208, 11156, 122, 4, 970),
    *(14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36),
]
BATCH = {"Kaggle": (128, 32), "Terabyte": (2048, 64)}  # rows of a destination and their width, of the paper's models
ZIPF, SAMPLES, LIFT, HALFWAY = 1.05, 300_000, 0.2, 3_000
DUMPS_VARIABLE = "CORDILLERA_DLRM_DUMPS"
# Dumps of the paper's artefact (folder paper_script): file, width of a row, bound.
DUMPS = [
    ("EMB_1_iter_20.bin", 64, 0.03),
    ("EMB_5_iter_20.bin", 64, 0.05),
    ("EMB_8_iter_20.bin.TB", 64, 0.05),
    ("EMB_5_iter_20.bin.Kaggle", 32, 0.03),
    ("EMB_8_iter_20.bin.Kaggle", 32, 0.05),
]


class SentRows(NamedTuple):
    """Rows of one table that one rank sends to another.

    Attributes:
        table: Name of the table.
        rows: Rows, ``float32 [N, D]``.
        bound: Bound relative to their range, by the table's class.
    """

    table: str
    rows: Tensor
    bound: float


def drawn_ids(cardinality: int, count: int, rng: Any) -> Any:
    """Draw ids whose popularity falls as ``rank ** -ZIPF``."""
    ends = 1.0 - ZIPF
    drawn = (1.0 + rng.random(count) * (float(cardinality + 1) ** ends - 1.0)) ** (1.0 / ends)
    return np.minimum(drawn.astype(np.int64) - 1, cardinality - 1)


def rows_of(ids: Any, cardinality: int, dim: int, rng: Any) -> Any:
    """Draw rows, ``float64 [n, dim]``, of the ``ids`` of a table that was trained for ``SAMPLES`` samples.

    A row begins uniform between plus and minus ``cardinality ** -0.5``, as in DLRM, and moves by a normal vector whose
    scale grows with the row's expected number of visits. Columns move by different scales.
    """
    total = (float(cardinality) ** (1.0 - ZIPF) - 1.0) / (1.0 - ZIPF) + 1.0
    visits = SAMPLES * (ids + 1.0) ** -ZIPF / total
    start = rng.uniform(-1.0, 1.0, (ids.size, dim)) / np.sqrt(cardinality)
    columns = rng.uniform(0.5, 1.5, dim)
    return start + LIFT * rng.standard_normal((ids.size, dim)) * columns * np.sqrt(visits / (visits + HALFWAY))[:, None]


def _drawn_rows(cardinality: int, count: int, dim: int, rng: Any) -> Tensor:
    ids, inverse = np.unique(drawn_ids(cardinality, count, rng), return_inverse=True)
    return torch.from_numpy(rows_of(ids, cardinality, dim, rng).astype(np.float32)[inverse.reshape(-1)])


def drawn(name: str, cardinalities: list[int], seed: int) -> Iterator[SentRows]:
    """Yield drawn rows of each table of a data set."""
    rng = np.random.default_rng(seed)
    rows, dim = BATCH[name]
    for table, kind in enumerate(classes_by_cardinality(cardinalities)):
        yield SentRows(f"{table}", _drawn_rows(cardinalities[table], rows, dim, rng), kind.bound)


def trained(folder: Path, samples: int, seed: int) -> Iterator[SentRows]:
    """Train a small DLRM with SGD on a made click log, and yield what its tables return for one batch."""
    log = SyntheticConfig(
        rows=samples * 10 // 8,
        dense=4,
        categorical=12,
        lists=0,
        smallest_vocabulary=4,
        largest_vocabulary=200_000,
        concentration=0.0,
        linear=1.0,
        zipf=ZIPF,
    )
    splits = prepare(DataConfig(dataset="synthetic", synthetic=log, cache_dir=str(folder)))
    torch.manual_seed(seed)
    sizes = DLRMConfig(embedding_dim=32, embedding_init="uniform_by_rows", bottom_mlp=(64,), top_mlp=(64,))
    model = build(sizes, splits.features, TablesConfig.model_validate({"name": "sgd", "learning_rate": 1.0}))
    optimizer = build_adamw(model, learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    for batch in Loader(splits.train, 512, shuffle="global", seed=seed).epoch(0):
        assert batch.labels is not None
        loss, _ = weighted_loss(model(batch), batch.labels, batch.weights, None)
        loss.backward()
        optimizer.step()
        model.tables.update()
        optimizer.zero_grad(set_to_none=True)
    batch = next(iter(Loader(splits.test, 2048).epoch()))
    with torch.no_grad():
        found = model.tables(batch.sparse)
    names = [feature.table for feature in splits.features.sparse]
    kinds = classes_by_cardinality([splits.features.tables[name] for name in names])
    for table, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        yield SentRows(name, found[:, table].clone(), kind.bound)


def published() -> Iterator[SentRows]:
    """Yield the dumps of the paper's artefact from the folder that ``CORDILLERA_DLRM_DUMPS`` names, if it is set."""
    folder = os.environ.get(DUMPS_VARIABLE)
    for file, dim, bound in DUMPS if folder else []:
        rows = np.fromfile(Path(str(folder)) / file, np.float32).reshape(-1, dim)
        yield SentRows(file, torch.from_numpy(rows), bound)
