"""Gradients of lookups that wait for an update, and the term that L2 regularisation by occurrences adds to them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cordillera.errors import TrainingError
from cordillera.kernels.embeddings.update import distinct_rows


@dataclass(frozen=True)
class PendingGradient:
    """Lookup and output gradient of one backward pass, kept for the next update.

    Attributes:
        rows: Rows that were looked up, ``int64 [T]``.
        offsets: First position of each bag in ``rows``, ``[F * B + 1]``; None for one row in every bag.
        value_weights: Factor of each row, ``[T]``, or None for ones.
        grad: Gradient of the sums, ``[B, F, D]``, in the dtype of the output.
        samples: Number of samples of the batch; 0 of rows that were looked up one by one, beside the batch.
    """

    rows: Tensor
    offsets: Tensor | None
    value_weights: Tensor | None
    grad: Tensor
    samples: int = 0


def merge_pending(pending: list[PendingGradient]) -> PendingGradient:
    """Join several backward passes: their bags one after another, each pass feature-major as it was."""
    if len(pending) == 1:
        return pending[0]
    rows = torch.cat([item.rows for item in pending])
    grad = torch.cat([item.grad.transpose(0, 1).reshape(-1, item.grad.shape[2]) for item in pending])
    value_weights = offsets = None
    if any(item.value_weights is not None for item in pending):
        value_weights = torch.cat(
            [
                torch.ones(item.rows.numel(), dtype=grad.dtype, device=grad.device)
                if item.value_weights is None
                else item.value_weights
                for item in pending
            ]
        )
    if any(item.offsets is not None for item in pending):
        pieces, total = [], 0
        for item in pending:
            count = item.rows.numel()
            bounds = (
                torch.arange(count + 1, device=grad.device) if item.offsets is None else item.offsets.to(torch.int64)
            )
            pieces.append(bounds[:-1] + total)
            total += count
        pieces.append(torch.tensor([total], device=grad.device))
        offsets = torch.cat(pieces)
    return PendingGradient(rows, offsets, value_weights, grad, sum(item.samples for item in pending))


def with_l2(pending: PendingGradient, weight: Tensor, factor: float) -> PendingGradient:
    """Add the gradient of ``factor / (2 * B) * sum(w[r] ** 2)``, where ``r`` runs over all rows that were looked up.

    A row that was looked up ``n`` times gains ``factor * n / B * w[r]``, as one more lookup of it.

    Args:
        pending: Gradient of all lookups since the last update; ``B`` is its number of samples.
        weight: Rows of all tables before the update, ``[R, D]``.
        factor: Factor of the term.

    Raises:
        TrainingError: Rows were looked up, but no batch of samples.
    """
    if not pending.rows.numel():
        return pending
    if not pending.samples:
        raise TrainingError(
            "is a mean over samples, and no batch of samples was looked up", where="tables.l2", remedy="set it to 0"
        )
    distinct, inverse = distinct_rows(pending.rows, weight.shape[0])
    counts = torch.bincount(inverse, minlength=distinct.numel()).to(weight.dtype)
    term = weight.index_select(0, distinct) * (counts * (factor / pending.samples)).unsqueeze(1)
    grad = pending.grad if pending.grad.dim() == 3 else pending.grad.unsqueeze(1)
    return merge_pending([replace(pending, grad=grad), PendingGradient(distinct, None, None, term.unsqueeze(1))])
