"""Permutation importance: how much worse a model scores when one feature's values change places among the samples.

Source: Fisher, Rudin and Dominici 2019 (model reliance), section 3; permutations are drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch

from cordillera.data.ranking.cache import SPLITS
from cordillera.data.ranking.features import DenseFeature, FeatureSpec, RankingBatch
from cordillera.errors import DataError, RunError
from cordillera.jagged import JaggedBatch, slice_samples, take_samples
from cordillera.reports.ranking.comparison import mean_interval
from cordillera.reports.ranking.importance import IMPORTANCE_FILE
from cordillera.reports.ranking.run import write_report
from cordillera.run import Run
from cordillera.training.ranking.metrics import RankingMetrics, of_task
from cordillera.training.ranking.scoring import scorer, select_device
from cordillera.workflows.trained import recipe_of, restore_model_with_checkpoint, splits_of, with_threads


@dataclass(frozen=True)
class FeatureImportance:
    """Importance of one feature for one task.

    Attributes:
        feature: Name of the column.
        task: Name of the task.
        ne: Rise of the NE when the feature is permuted, mean over permutations; above 0 if the model uses it well.
        low: Lower bound of Student's 95 % interval of the mean over permutations.
        high: Upper bound of that interval.
    """

    feature: str
    task: str
    ne: float
    low: float
    high: float


def importance(
    run: Run | Path | str,
    split: str = "test",
    *,
    repeats: int = 5,
    rows: int = 50_000,
    seed: int = 0,
    on_feature: Callable[[int, int], object] | None = None,
) -> list[FeatureImportance]:
    """Permute each feature of a ranking ``run`` and measure the rise of NE; write it into the run and its report.

    Args:
        split: ``train``, ``validation`` or ``test``.
        repeats: Number of permutations of each feature, at least 2.
        rows: Largest number of samples, drawn at random from the split.
        seed: Seed of samples and permutations.
        on_feature: Function called with the number of features that are done, and of all.

    Returns:
        Importance of every feature and task, the largest rise first.

    Raises:
        RunError: If it is not a run of a ranking model.
        DataError: If the data has changed, the split is empty or not one of the three, or a number is too small.
    """
    run = run if isinstance(run, Run) else Run(run)
    if split not in SPLITS:
        raise RunError(f"must be one of {', '.join(SPLITS)}, got {split!r}", where="split")
    if repeats < 2 or rows < 1:
        raise DataError("must be at least 2" if repeats < 2 else "must be at least 1", where="repeats, rows")
    recipe = recipe_of(run)
    device, draw = select_device(recipe.device), np.random.default_rng(seed)
    with with_threads(recipe.threads):
        splits = splits_of(run, recipe)
        dataset = getattr(splits, split)
        if not len(dataset):
            raise DataError(f"the {split} split is empty", where=recipe.data.label)
        _, model, checkpoint = restore_model_with_checkpoint(run, splits.features, device)
        score = scorer(model, device, recipe.training.precision, recipe.training.emulate)
        chosen = np.sort(draw.permutation(len(dataset))[:rows])
        batch: RankingBatch = dataset.batch(chosen)
        tasks, size = splits.features.tasks, recipe.data.evaluation_batch_size
        base = _ne(score, batch, tasks, size)
        names = _features(splits.encoder.schema.dense, splits.features)
        found = []
        for done, (name, columns) in enumerate(names.items()):
            rises = []
            for _ in range(repeats):
                permuted = _permuted(batch, name, columns, draw.permutation(len(batch)))
                rises.append([one - own for one, own in zip(_ne(score, permuted, tasks, size), base, strict=True)])
            for place, task in enumerate(tasks):
                mean = mean_interval([rise[place] for rise in rises])
                found.append(FeatureImportance(name, task, mean.value, mean.low, mean.high))
            if on_feature is not None:
                on_feature(done + 1, len(names))
    found.sort(key=lambda one: (-one.ne if math.isfinite(one.ne) else math.inf, one.feature))
    run.write_json(
        IMPORTANCE_FILE,
        {
            "step": checkpoint.step,
            "split": split,
            "rows": len(batch),
            "repeats": repeats,
            "seed": seed,
            "ne": dict(zip(tasks, base, strict=True)),
            "features": [asdict(one) for one in found],
        },
    )
    write_report(run)
    return found


def _features(dense: Sequence[DenseFeature], features: FeatureSpec) -> dict[str, list[int]]:
    """Return the features, with the columns of those that are numbers; all numbers of one feature move together."""
    found: dict[str, list[int]] = {}
    place = 0
    for feature in dense:
        found[feature.name] = list(range(place, place + feature.width))
        place += feature.width
    return found | {feature.name: [] for feature in features.sparse}


def _permuted(batch: RankingBatch, name: str, columns: list[int], order: np.ndarray) -> RankingBatch:
    """Return a batch in which one feature has the values of other samples."""
    if columns:
        dense = batch.dense.clone()
        dense[:, columns] = batch.dense[torch.from_numpy(order)][:, columns]
        return RankingBatch(dense, batch.sparse, batch.labels, batch.weights)
    moved = take_samples(batch.sparse, order)
    both = {key: (moved if key == name else batch.sparse)[key] for key in batch.sparse.keys}
    sparse = JaggedBatch.from_features(both)
    return RankingBatch(batch.dense, sparse, batch.labels, batch.weights)


def _ne(
    score: Callable[[RankingBatch], torch.Tensor], batch: RankingBatch, tasks: tuple[str, ...], size: int
) -> list[float]:
    """Return the NE of each task, computed from ``size`` samples at a time."""
    metrics = [RankingMetrics() for _ in tasks]
    assert batch.labels is not None
    for start in range(0, len(batch), size):
        end = min(start + size, len(batch))
        cut = batch.select(itemgetter(slice(start, end)), slice_samples(batch.sparse, start, end))
        logits = score(cut)
        assert cut.labels is not None
        for task, one in enumerate(metrics):
            own, labels, weights, _ = of_task(task, logits, cut.labels, cut.weights, None)
            one.update(own, labels, weights)
    return [one.compute()["ne"] for one in metrics]
