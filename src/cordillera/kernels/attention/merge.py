"""Merging of attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cordillera.errors import PlanError


def merge(pieces: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into attention over all of them. Differentiable.

    Args:
        pieces: Outputs ``[T, H, D]`` with log-sum-exps ``[T, H]``; a log-sum-exp of -inf marks a query that has no keys
            in this piece. NaN stays NaN.

    Returns:
        Merged output and log-sum-exps, in the dtype of the log-sum-exps.

    Raises:
        PlanError: There is no piece.
    """
    if not pieces:
        raise PlanError("there is no piece to merge", where="pieces")
    lses = torch.stack([lse for _, lse in pieces])
    # the result does not depend on the largest, so it needs no gradient
    largest = lses.detach().amax(0)
    without = largest == -torch.inf
    largest = largest.masked_fill(without, 0.0)
    weights = (lses - largest).exp()
    total = weights.sum(0).masked_fill(without, 1.0)
    shares = (weights / total)[..., None]
    out = pieces[0][0].to(lses.dtype) * shares[0]
    for (part, _), share in zip(pieces[1:], shares[1:], strict=True):
        out = torch.addcmul(out, part.to(lses.dtype), share)
    return out, (largest + total.log()).masked_fill(without, -torch.inf)
