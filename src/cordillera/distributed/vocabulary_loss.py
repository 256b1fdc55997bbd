"""The loss of a language model's last layer, without all of its logits at once, over a vocabulary cut over ranks.

Rows are taken a chunk at a time, and a chunk's part of the gradients is computed with its logits, so that only one
chunk of them exists. Where each rank of a group has the logits of some tokens alone, ranks exchange three numbers a
row (its maximum, its sum of exponentials, its target's logit) instead of logits (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cordillera.distributed.collectives import Collectives
from cordillera.numerics.emulation.emulation import computing_gradients

IGNORED = -100  # the label of a row without a target, as in torch
EXCHANGED = "sums of logits"


def summed_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, links: Collectives | None = None, rows: int = 1024
) -> Tensor:
    """Sum over rows of the cross entropy of their logits ``hidden @ weight.T``.

    Between forward and backward it holds the weight's gradient, in 32 bits. Where gradients are switched off, none is
    computed.

    Args:
        hidden: ``[m, H]``, the same on every rank; where ranks share the vocabulary, each gives it one term of a
            gradient that is their sum.
        weight: ``[V, H]``; of a shared vocabulary each rank has as many consecutive rows, in the order of the ranks.
        labels: ``int64 [n]``, below the whole vocabulary; :data:`IGNORED` where there is no target. Rows of ``hidden``
            beyond the first ``n`` have none.
        links: To the ranks that share the vocabulary; None where it is whole.
        rows: Of a chunk.

    Returns:
        A scalar in 32 bits, of 64-bit inputs in 64: the same on every rank.
    """
    total: Tensor = _SummedCrossEntropy.apply(hidden, weight, labels, links, rows, torch.is_grad_enabled())
    return total


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
