"""Losses of a model's scores on a split, to lay two models side by side on the same samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cordillera.data.ranking.cache import ClickDataset, Splits
from cordillera.data.ranking.features import RankingBatch
from cordillera.data.ranking.loader import Loader
from cordillera.errors import DataError, NumericsError
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.formats.precision import Precision
from cordillera.numerics.quantization.quantizers import check_finite
from cordillera.numerics.selection import Change
from cordillera.recipe import RankingRecipe
from cordillera.training.ranking.metrics import cross_entropy
from cordillera.training.ranking.paired_change import relative_change
from cordillera.training.ranking.trainer import scorer


@dataclass(frozen=True)
class Losses:
    """The losses of the samples of a split.

    Attributes:
        losses: ``float64 [B]``, summed over tasks.
        labels: ``float64 [B]``, of the first task.
        weights: Of samples, or None.
        groups: Of samples, or None.
        first: Samples of the split that were left out before these.
    """

    losses: NDArray[np.float64]
    labels: NDArray[np.float64]
    weights: NDArray[np.float64] | None
    groups: NDArray[np.int64] | None
    first: int = 0

    def tail(self, parts: int) -> Losses:
        """The last of so many parts of equal size.

        Args:
            parts: How many.
        """
        first = len(self.losses) * (parts - 1) // parts
        weights = None if self.weights is None else self.weights[first:]
        groups = None if self.groups is None else self.groups[first:]
        return Losses(self.losses[first:], self.labels[first:], weights, groups, first)

    def beside(self, other: Losses) -> Change:
        """The relative change of NE from these to others.

        Args:
            other: Of the same samples.
        """
        return relative_change(other.losses, self.losses, self.weights, self.groups)

    def ne_beside(self, other: Losses) -> tuple[float, float]:
        """Both NE, by the labels of the first task.

        Args:
            other: Of the same samples.
        """
        weights = np.ones_like(self.losses) if self.weights is None else self.weights
        share = float((weights * self.labels).sum() / weights.sum())
        entropy = -(share * math.log(share) + (1 - share) * math.log1p(-share)) if 0 < share < 1 else math.nan
        own, others = (float((weights * one.losses).sum() / weights.sum()) for one in (self, other))
        return own / entropy, others / entropy


def scored(
    model: RankingModel,
    dataset: ClickDataset,
    splits: Splits,
    tail: int = 0,
    batch_size: int = 8192,
    precision: Precision = "fp32",
) -> Losses:
    """Score a split.

    Args:
        model: What scores.
        dataset: The split.
        splits: All splits; they know the tasks.
        tail: Samples to leave out at the beginning.
        batch_size: Samples scored at a time.
        precision: ``fp32``, or ``bf16`` for what is not kept in a precision of its own.

    Raises:
        NumericsError: a score is not finite; the sample is named.
        DataError: the split is empty.
    """
    score = scorer(model, torch.device("cpu"), precision)
    parts: dict[str, list[Any]] = {"losses": [], "labels": [], "weights": [], "groups": []}
    for batch in Loader(dataset, batch_size).epoch():
        logits = score(batch)
        if not bool(torch.isfinite(logits).all()):
            seen = sum(len(part) for part in parts["losses"])
            row = int((~torch.isfinite(logits).all(1)).nonzero()[0])
            raise NumericsError(
                f"the score of sample {seen + row} is {float(logits[row].float().abs().max()):g}", where="model",
                remedy="look for weights or features that are not finite, or too large for a kernel",
            )  # fmt: skip
        assert batch.labels is not None
        positive = batch.labels.numpy() > 0.5
        losses = cross_entropy(logits.double().numpy().reshape(-1), positive.reshape(-1)).reshape(positive.shape)
        parts["losses"].append(losses.sum(1))
        parts["labels"].append(positive[:, 0].astype(np.float64))
        if batch.weights is not None:
            parts["weights"].append(batch.weights.double().numpy())
        if batch.groups is not None:
            parts["groups"].append(batch.groups.numpy())
    arrays = {name: np.concatenate(found)[tail:] if found else None for name, found in parts.items()}
    if arrays["losses"] is None:
        raise DataError("the split holds no samples", where="quantize")
    return Losses(arrays["losses"], arrays["labels"], arrays["weights"], arrays["groups"], tail)  # type: ignore[arg-type]


def check_weights(model: RankingModel) -> None:
    """Refuse a model whose weights hold NaN or infinity, before anything is made of it.

    Args:
        model: Trained.

    Raises:
        NumericsError: one does; weight and element are named.
    """
    for name, parameter in model.named_parameters():
        check_finite(parameter.detach(), name)


def some_batches(dataset: ClickDataset, recipe: RankingRecipe, rows: int) -> list[RankingBatch]:
    """The first batches of a shuffled split.

    Args:
        dataset: The split.
        recipe: Its seed is that of the order.
        rows: Samples to give at least, if there are so many.
    """
    found, count = [], 0
    for batch in Loader(dataset, 1024, shuffle="global", seed=recipe.seed).epoch():
        found.append(batch)
        count += len(batch)
        if count >= rows:
            break
    return found
