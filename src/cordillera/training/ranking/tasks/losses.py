"""Losses of ranking models."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from cordillera.errors import DataError


def task_losses(
    logits: Tensor, labels: Tensor, weights: Tensor | None, task_weights: Tensor | None
) -> tuple[Tensor, float]:
    """Compute each task's mean binary cross-entropy over samples.

    A sample without a label of a task counts with a loss of 0, so that losses of parts of a batch add up to its own.

    Args:
        logits: ``[B, tasks]``; converted to float32.
        labels: ``float32 [B, tasks]`` of zeros and ones; NaN where one is missing.
        weights: ``float32 [B]`` sample weights; None for ones.
        task_weights: ``float32 [tasks]``; None for ones.

    Returns:
        Losses ``float32 [tasks]`` and the total weight of the samples. With zero total weight losses are zero.

    Raises:
        DataError: Logits and labels, or labels and weights, are not of the same samples and tasks.
    """
    if logits.shape != labels.shape or labels.ndim != 2:
        raise DataError(
            f"logits {list(logits.shape)} and labels {list(labels.shape)} must both be [B, tasks]", where="the losses"
        )
    if weights is not None and weights.shape != (len(labels),):
        raise DataError(f"weights must be [{len(labels)}], got {list(weights.shape)}", where="the losses")
    is_missing = labels.isnan()
    labels = labels.masked_fill(is_missing, 0.0)
    losses = functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
    losses = losses.masked_fill(is_missing, 0.0)
    if task_weights is not None:
        losses = losses * task_weights
    if weights is None:
        return losses.mean(0), float(len(losses))
    total = float(weights.sum())
    return (losses * weights[:, None]).sum(0) / (total or 1.0), total


def weighted_loss(
    logits: Tensor, labels: Tensor, weights: Tensor | None, task_weights: Tensor | None
) -> tuple[Tensor, float]:
    """Compute the mean binary cross-entropy over samples, summed over tasks.

    Args:
        logits: ``[B, tasks]``; converted to float32.
        labels: ``float32 [B, tasks]`` of zeros and ones.
        weights: ``float32 [B]`` sample weights; None for ones.
        task_weights: ``float32 [tasks]``; None for ones.

    Returns:
        The scalar loss and the total weight of the samples. With zero total weight the loss is zero.
    """
    losses, total = task_losses(logits, labels, weights, task_weights)
    return losses.sum(), total
