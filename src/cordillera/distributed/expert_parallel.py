"""Experts of a layer over the ranks that hold different data: tokens go to the ranks of their experts and back.

Each rank holds equally many neighbouring experts. A token is sent once to every rank that holds some of its experts,
with the weights of those; the rank returns the weighted sum of their outputs. Messages have the sizes that the choices
have: nothing is padded or dropped. On our own backend, sizes are read where the numbers of the experts arrive.

Source: Lepikhin et al. 2021 (GShard), section 2.2, for the division; Dai et al. 2024 (DeepSeekMoE) for sending a token
once to a rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cordillera.distributed.collectives import Collectives, exchange_parts, exchange_unknown_parts
from cordillera.distributed.dtensors import local
from cordillera.kernels.moe import SavingPolicy, expert_mlp

ROUTED, CHOSEN = "tokens for experts", "numbers of experts"
_TAG = 41


class ExpertRanks:
    """Ranks among which experts are divided; called in place of :func:`~cordillera.kernels.moe.expert_mlp`.

    All ranks call it the same number of times, in the same order, with any number of tokens. Gradients of a rank's
    experts are the sums over the tokens of all ranks.

    Args:
        links: Collectives between the ranks.
        count: Number of all experts, which the number of ranks divides.
    """

    def __init__(self, links: Collectives, count: int) -> None:
        self.links, self.held = links, count // links.size

    def __call__(
        self, x: Tensor, experts: Tensor, gates: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, *, policy: SavingPolicy
    ) -> Tensor:
        """Compute ``expert_mlp`` for this rank's tokens; each rank holds only the weights of its own experts.

        Raises:
            PeerError: If another rank does not answer in time; so does the backward pass.
        """
        ranks, owner = range(self.links.size), experts // self.held
        tokens = [(owner == rank).any(1).nonzero()[:, 0] for rank in ranks]
        chosen = [
            torch.where(owner[own] == rank, experts[own] - rank * self.held, -1) for rank, own in enumerate(tokens)
        ]
        sizes = [len(own) for own in tokens]
        found = exchange_unknown_parts(self.links, CHOSEN, chosen, _TAG)
        come, theirs = [len(part) for part in found], torch.cat(found)
        order = torch.cat(tokens)
        rows: Tensor = _Exchanged.apply(x[order], self.links, sizes, come)
        weights: Tensor = _Exchanged.apply(gates[order], self.links, sizes, come)
        own_w1, own_w3, own_w2 = (local(weight).to(x.dtype) for weight in (w1, w3, w2))
        out = expert_mlp(rows, theirs, weights, own_w1, own_w3, own_w2, policy=policy)
        back: Tensor = _Exchanged.apply(out, self.links, come, sizes)
        return torch.zeros_like(x).index_add(0, order, back)


class _Exchanged(torch.autograd.Function):
    """Parts of ``sizes`` rows for the ranks become parts of ``come`` rows from them; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives, sizes: list[int], come: list[int]) -> Tensor:
        ctx.links, ctx.sizes, ctx.come = links, sizes, come
        return torch.cat(exchange_parts(links, ROUTED, x.split(sizes), come, _TAG).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        parts = gradient.contiguous().split(ctx.come)
        return torch.cat(exchange_parts(ctx.links, ROUTED, parts, ctx.sizes, _TAG).wait()), None, None, None
