"""Mixture-of-experts layers of a Llama: every token goes to a few of many feed-forward nets.

A router chooses for each token the experts with the largest shares of a softmax, and weighs their outputs by these
shares, divided by their sum (Jiang et al. 2024, Mixtral, section 2.1), and a factor. No expert has a capacity, so no
token is dropped. Experts are kept equally busy by a bias that counts in the choice alone and follows how much each
expert had to do (after Wang et al. 2024, arXiv 2408.15664, who add it to shares and change it by a fixed amount), by a
loss over each document (DeepSeek-V3, section 2.1.2), or both.

What keeps the balance counts tokens that have a target, in backward passes, so that neither packing, processes,
recomputation nor evaluation changes it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.kernels.moe import SavingPolicy, expert_mlp

UNTRAINED = "router.bias"
"""End of the names of parameters that no optimizer changes."""

ExpertCount = Annotated[int, Field(ge=1, le=2**16)]
BalanceRate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ExpertsConfig(BaseModel):
    """Experts of every block; their width is the model's ``ffn``.

    Attributes:
        count: Number of experts ``E``.
        chosen: Number of experts ``k`` that each token goes to.
        shared: Width of a feed-forward net that every token goes through too; 0 for none.
        scale: Sum of the weights of a token's experts: 1 in a Mixtral. Where it is ``chosen``, experts of a part of a
            dense net's width learn in steps as large as the dense net's (``routed_scaling_factor`` in DeepSeek-V3).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: ExpertCount
    chosen: ExpertCount = 2
    shared: int = Field(0, ge=0, le=2**30)
    scale: float = Field(1.0, gt=0, le=1e4)

    @model_validator(mode="after")
    def _enough(self) -> ExpertsConfig:
        if self.chosen > self.count:
            raise ValueError(f"chosen ({self.chosen}) must be at most count ({self.count})")
        return self


class ExpertTraining(BaseModel):
    """Settings of training a model with experts.

    Attributes:
        bias_rate: Change of the bias of an expert in a step, in units of logits, for one that had nothing to do; for
            others in proportion to what they lack of the mean, or have beyond it. 0 leaves biases as they are.
        balance_loss: Factor of the balance loss: over each document, ``E / k`` times the sum over experts of the
            fraction of choices and the mean share, which is 1 if both are even.
        z_loss: Factor of the mean square of the log-sum-exp of a token's router logits (Zoph et al. 2022, equation 5).
        keeps: Policy of expert tensors to keep for the backward pass; see :func:`~cordillera.kernels.moe.expert_mlp`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bias_rate: BalanceRate = 0.01
    balance_loss: BalanceRate = 0.0
    z_loss: BalanceRate = 0.0
    keeps: SavingPolicy = "AB"


class Router(nn.Module):
    """Choice of experts, in 32 bits.

    Attributes:
        settings: Losses that training adds.
        divisor: Number of targets by which losses are divided.
        counts: Number of tokens with a target that went to each expert since it was last cleared, ``int64 [E]``.
    """

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config, self.settings, self.divisor = config, ExpertTraining(), 1
        bound = 1 / math.sqrt(hidden)
        self.weight = nn.Parameter(torch.empty(config.count, hidden))
        if not self.weight.is_meta:
            nn.init.uniform_(self.weight, -bound, bound)
        self.bias = nn.Parameter(torch.zeros(config.count), requires_grad=False)
        self.counts = torch.zeros(config.count, dtype=torch.int64, device="cpu")

    def forward(self, x: Tensor, offsets: Tensor, has_target: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, ``int64 [T, k]``, and their weights, ``float32 [T, k]``.

        ``x [T, hidden]`` are tokens, ``offsets [B + 1]`` where documents begin; ``has_target``, ``bool [T]``, is given
        in training alone.
        """
        logits = F.linear(x.float(), self.weight.float())
        shares = logits.softmax(-1)
        chosen = (logits.detach() + self.bias).topk(self.config.chosen, -1).indices
        gates = shares.gather(1, chosen)
        gates = self.config.scale * gates / gates.sum(-1, keepdim=True)
        if has_target is None or not torch.is_grad_enabled():
            return chosen, gates
        loss, counts = self._losses(logits, shares, chosen, offsets, has_target)
        balanced: Tensor = _Balanced.apply(gates, loss, counts, self)
        return chosen, balanced

    def _losses(
        self, logits: Tensor, shares: Tensor, chosen: Tensor, offsets: Tensor, has_target: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the sum of the losses over the targets, and the choices of each expert, ``int64 [E]``."""
        settings, config = self.settings, self.config
        document = torch.bucketize(torch.arange(len(chosen)), offsets[1:].cpu(), right=True).to(chosen.device)
        document, kept = document[has_target], chosen[has_target]
        choices = torch.zeros(len(offsets) - 1, config.count, device=chosen.device)
        choices.index_put_((document[:, None], kept), torch.ones(()).to(chosen.device), accumulate=True)
        loss = logits.new_zeros(())
        if settings.z_loss:
            loss = loss + settings.z_loss * logits[has_target].logsumexp(-1).square().sum()
        if settings.balance_loss:
            of_document = torch.zeros_like(choices).index_add(0, document, shares[has_target])
            targets = choices.sum(1, keepdim=True).clamp_min(1)  # times k
            loss = loss + settings.balance_loss * config.count * (choices * of_document / targets).sum()
        return loss / self.divisor, choices.sum(0).long()


class _Balanced(torch.autograd.Function):
    """Weights of experts as they are; a backward pass adds the gradient of a loss, and counts."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, loss: Tensor, counts: Tensor, router: Router) -> Tensor:
        ctx.counts, ctx.router = counts, router
        return gates.clone()  # a view would lose the hooks of sharded weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        ctx.router.counts += ctx.counts.to(ctx.router.counts.device)
        return gradient, gradient.new_ones(()), None, None


class ExpertProducts(Protocol):
    """Outputs of chosen experts, as :func:`~cordillera.kernels.moe.expert_mlp` computes them."""

    def __call__(
        self, x: Tensor, experts: Tensor, gates: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, *, policy: SavingPolicy
    ) -> Tensor:
        """Return the outputs ``[T, hidden]``."""


class ExpertLayer(nn.Module):
    """A router and its experts, in place of a feed-forward net.

    Args:
        hidden: Width of a token.
        ffn: Width of an expert.
        shared: Net that every token goes through, or None.

    Attributes:
        keeps: Policy of tensors to keep for the backward pass.
        products: Function that computes the experts; ranks that hold a part of them each replace it.
    """

    def __init__(self, hidden: int, ffn: int, config: ExpertsConfig, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = Router(hidden, config)
        self.gate, self.up, self.down = (
            nn.Parameter(torch.empty(config.count, *size)) for size in ((hidden, ffn), (hidden, ffn), (ffn, hidden))
        )
        for weight in (self.gate, self.up, self.down):
            if not weight.is_meta:
                nn.init.uniform_(weight, -1 / math.sqrt(weight.shape[1]), 1 / math.sqrt(weight.shape[1]))
        self.shared = shared
        self.keeps: SavingPolicy = "AB"
        self.products: ExpertProducts = expert_mlp

    def forward(self, x: Tensor, offsets: Tensor, has_target: Tensor | None = None) -> Tensor:
        chosen, gates = self.router(x, offsets, has_target)
        out = self.products(x, chosen, gates, self.gate, self.down, self.up, policy=self.keeps)
        return out if self.shared is None else out + self.shared(x)
