"""Loss of a language model's last layer over a vocabulary that may be split over ranks, without storing all logits.

Rows are processed in chunks, and a chunk's part of the gradients is computed together with its logits, so that only one
chunk of logits exists. If each rank of a group has the logits of some tokens only, ranks exchange three numbers for
each row (its maximum, its sum of exponentials, its target's logit) instead of logits (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from cordillera.data.language.batches import IGNORED as IGNORED
from cordillera.distributed.collectives import Collectives
from cordillera.numerics.emulation.emulation import computing_gradients

EXCHANGED = "sums of logits"


def summed_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, links: Collectives | None = None, rows: int = 1024
) -> Tensor:
    """Sum the cross entropy of the logits ``hidden @ weight.T`` over rows.

    Between forward and backward, the weight's gradient is held in 32 bits. If gradients are disabled, none is computed.

    Args:
        hidden: Inputs of the layer, ``[m, H]``, the same on every rank. If ranks share the vocabulary, each computes
            one term of the gradient, which is the sum over ranks.
        weight: Weight ``[V, H]``; of a shared vocabulary, each rank has the same number of consecutive rows, in order
            of ranks.
        labels: Targets, ``int64 [n]``, below the size of the whole vocabulary, or :data:`IGNORED`. Rows of ``hidden``
            beyond the first ``n`` have no target.
        links: Collectives between the ranks that share the vocabulary; None if it is whole.
        rows: Number of rows of a chunk.

    Returns:
        Scalar in 32 bits, or in 64 for 64-bit inputs; the same on every rank.
    """
    total: Tensor = _SummedCrossEntropy.apply(hidden, weight, labels, links, rows, torch.is_grad_enabled())
    return total


def label_log_probabilities(hidden: Tensor, weight: Tensor, labels: Tensor, rows: int = 1024) -> Tensor:
    """Compute the log-probability of each row's label, whose vocabulary is whole on this rank.

    A chunk's logits are computed again in the backward, so that one chunk of them exists at a time. ``hidden``,
    ``weight``, ``labels`` and ``rows`` are those of :func:`summed_cross_entropy`.

    Returns:
        ``[n]`` in 32 bits, or in 64 for 64-bit inputs; 0 for rows without a target.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    places = (labels != IGNORED).nonzero().squeeze(1)
    given, targets = hidden[places], labels[places]
    chunks = [
        checkpoint(_log_probabilities, own, weight, targets[first : first + rows], wide, use_reentrant=False)
        for first, own in zip(range(0, len(given), rows), given.split(rows), strict=False)
    ]
    found = torch.zeros(len(labels), dtype=wide, device=hidden.device)
    return found.index_put((places,), torch.cat(chunks)) if chunks else found + 0.0 * given.sum()


def _log_probabilities(hidden: Tensor, weight: Tensor, targets: Tensor, wide: torch.dtype) -> Tensor:
    logits = (hidden @ weight.T).to(wide)
    return logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        links: Collectives | None,
        rows: int,
        differentiates: bool,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        places = (labels != IGNORED).nonzero().squeeze(1)
        given, targets = hidden[places], labels[places]
        first = 0 if links is None else links.rank * len(weight)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        if differentiates:
            dhidden = torch.zeros_like(given)
            dweight = torch.zeros_like(weight, dtype=wide)
        for chunk in range(0, len(given), rows):
            own = given[chunk : chunk + rows]
            logits = (own @ weight.T).to(wide)  # [n, V]
            most = logits.amax(1)
            if links is not None:
                links.all_reduce(EXCHANGED, most, dist.ReduceOp.MAX)
            logits -= most[:, None]
            column = targets[chunk : chunk + rows] - first
            here = (column >= 0) & (column < len(weight))
            column = column.clamp(0, len(weight) - 1)[:, None]
            target = logits.gather(1, column).squeeze(1).masked_fill(~here, 0.0)
            exponentials = logits.exp_()
            sums = torch.stack([exponentials.sum(1), target])
            if links is not None:
                links.all_reduce(EXCHANGED, sums)
            total += (sums[0].log() - sums[1]).sum()
            if not differentiates:
                continue
            gradient = exponentials.div_(sums[0][:, None]).scatter_add_(1, column, -here[:, None].to(wide))
            narrow = gradient.to(weight.dtype)
            with computing_gradients():
                dhidden[chunk : chunk + rows] = narrow @ weight
                dweight += narrow.T @ own
        if not differentiates:
            return total
        ctx.save_for_backward(places, dhidden, dweight)
        ctx.shape, ctx.dtype = hidden.shape, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        places, dhidden, dweight = ctx.saved_tensors
        scattered = dhidden.new_zeros(ctx.shape)
        scattered[places] = (dhidden * gradient).to(dhidden.dtype)
        return scattered, (dweight * gradient).to(ctx.dtype), None, None, None, None
