"""Losses of a model's scores on a split, to compare two models on the same samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cordillera.data.ranking.cache import ClickDataset
from cordillera.data.ranking.features import RankingBatch
from cordillera.data.ranking.loader import Loader
from cordillera.errors import DataError, NumericsError
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.formats.precision import Precision
from cordillera.numerics.inference.selection import Change
from cordillera.numerics.quantization.quantizers import check_finite
from cordillera.recipe import RankingRecipe
from cordillera.training.ranking.metrics import cross_entropy
from cordillera.training.ranking.paired_change import relative_change
from cordillera.training.ranking.scoring import scorer


@dataclass(frozen=True)
class Losses:
    """Losses of the samples of a split.

    Attributes:
        losses: ``float64 [B]``, summed over the tasks whose label is known.
        task_losses: ``float64 [B]``, of the first task.
        labels: ``float64 [B]``, of the first task; NaN where it is blank.
        weights: ``float64 [B]``, or None for ones.
        first: Number of samples of the split that were left out before these.
    """

    losses: NDArray[np.float64]
    task_losses: NDArray[np.float64]
    labels: NDArray[np.float64]
    weights: NDArray[np.float64] | None
    groups: NDArray[np.int64] | None
    first: int = 0

    def tail(self, parts: int) -> Losses:
        """Return the last of ``parts`` equal parts of the samples."""
        first = len(self.losses) * (parts - 1) // parts
        weights = None if self.weights is None else self.weights[first:]
        groups = None if self.groups is None else self.groups[first:]
        return Losses(self.losses[first:], self.task_losses[first:], self.labels[first:], weights, groups, first)

    def beside(self, other: Losses) -> Change:
        """Return the relative change of NE from these losses to ``other`` losses of the same samples."""
        return relative_change(other.losses, self.losses, self.weights, self.groups)

    def ne_beside(self, other: Losses) -> tuple[float, float]:
        """Return the NE of the first task by these losses and by ``other`` losses."""
        known = ~np.isnan(self.labels)
        weights = known * (1.0 if self.weights is None else self.weights)
        share = float((weights * np.nan_to_num(self.labels)).sum() / weights.sum())
        entropy = -(share * math.log(share) + (1 - share) * math.log1p(-share)) if 0 < share < 1 else math.nan
        own, others = (float((weights * one.task_losses).sum() / weights.sum()) for one in (self, other))
        return own / entropy, others / entropy


def scored(
    model: RankingModel,
    dataset: ClickDataset,
    tail: int = 0,
    batch_size: int = 8192,
    precision: Precision = "fp32",
) -> Losses:
    """Score a split (``dataset``) with ``model``, ``batch_size`` samples at a time.

    The first ``tail`` samples are left out. A ``precision`` of ``bf16`` is for everything without one of its own.

    Raises:
        NumericsError: If a score is not finite; the message names the sample.
        DataError: If the split is empty, or all labels of its samples are blank.
    """
    score = scorer(model, torch.device("cpu"), precision)
    parts: dict[str, list[Any]] = {"losses": [], "task_losses": [], "labels": [], "weights": [], "groups": []}
    are_labelled = False
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
        labels = batch.labels.double().numpy()
        losses = cross_entropy(logits.double().numpy().reshape(-1), labels.reshape(-1) > 0.5).reshape(labels.shape)
        losses[np.isnan(labels)] = 0.0  # as in training
        parts["losses"].append(losses.sum(1))
        parts["task_losses"].append(losses[:, 0])
        parts["labels"].append(labels[:, 0])
        are_labelled |= not np.isnan(labels).all()
        if batch.weights is not None:
            parts["weights"].append(batch.weights.double().numpy())
        if batch.groups is not None:
            parts["groups"].append(batch.groups.numpy())
    arrays = {name: np.concatenate(found)[tail:] if found else None for name, found in parts.items()}
    if arrays["losses"] is None:
        raise DataError("the split holds no samples", where="quantised model")
    if not are_labelled:
        raise DataError("all labels are blank, so that no loss can be compared", where="data")
    return Losses(**arrays, first=tail)  # type: ignore[arg-type]


def check_weights(model: RankingModel) -> None:
    """Check that the weights of a trained model are finite.

    Raises:
        NumericsError: If one is NaN or infinite; the message names weight and element.
    """
    for name, parameter in model.named_parameters():
        check_finite(parameter.detach(), name)


def some_batches(dataset: ClickDataset, recipe: RankingRecipe, rows: int) -> list[RankingBatch]:
    """Return the first batches of a split shuffled by the recipe's seed: at least ``rows`` samples if there are."""
    found, count = [], 0
    for batch in Loader(dataset, 1024, shuffle="global", seed=recipe.seed).epoch():
        found.append(batch)
        count += len(batch)
        if count >= rows:
            break
    return found
