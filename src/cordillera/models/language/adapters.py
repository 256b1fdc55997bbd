"""Low-rank adapters of linear layers: a frozen weight plus a trained product of two thin matrices.

Source: Hu et al. 2021 (LoRA), section 4.1.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

AdaptedLayer = Literal["query", "key", "value", "output", "gate", "up", "down"]
ADAPTED: tuple[AdaptedLayer, ...] = ("query", "key", "value", "output", "gate", "up", "down")

ADAPTER_WEIGHTS = (".narrow", ".wide")
"""Ends of the names of the weights of adapters."""


class AdapterConfig(BaseModel):
    """Settings of the low-rank adapters of a model's blocks.

    Attributes:
        rank: Number of columns of the first thin matrix.
        alpha: Factor of the product of the thin matrices, times ``1 / rank``.
        layers: Linear layers of a block that have an adapter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(8, ge=1, le=2**16)
    alpha: float = Field(16.0, gt=0, allow_inf_nan=False)
    layers: tuple[AdaptedLayer, ...] = Field(ADAPTED, min_length=1)

    @property
    def scale(self) -> float:
        """Factor of the product of the thin matrices."""
        return self.alpha / self.rank


class AdaptedLinear(nn.Module):
    """``x W^T + scale (x A^T) B^T`` with a frozen ``W [out, in]``, ``A [rank, in]`` and ``B [out, rank]``.

    ``B`` begins at zero, so that training begins with the function of ``W``.
    """

    def __init__(self, linear: nn.Linear, config: AdapterConfig) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.scale = config.scale
        self.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        self.narrow = nn.Parameter(linear.weight.new_empty(config.rank, inputs))
        self.wide = nn.Parameter(linear.weight.new_zeros(outputs, config.rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.scale * F.linear(F.linear(x, self.narrow), self.wide)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return a layer whose weight is ``W + scale B A``, added up in 32 bits or more."""
        outputs, inputs = self.weight.shape
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        weight = self.weight.to(wide) + self.scale * (self.wide.to(wide) @ self.narrow.to(wide))
        linear = nn.Linear(inputs, outputs, bias=False, device="meta")
        linear.weight = nn.Parameter(weight.to(self.weight.dtype))
        return linear


def add_adapters(block: nn.Module, config: AdapterConfig) -> None:
    """Give the linear layers of a Llama's block the adapters of ``config``, in place, and freeze its other weights."""
    for parameter in block.parameters():
        parameter.requires_grad_(False)
    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if name in config.layers and isinstance(child, nn.Linear):
                setattr(module, name, AdaptedLinear(child, config))


def merge_adapters(model: nn.Module) -> None:
    """Replace the adapted layers of a model by plain ones that compute the same function, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, AdaptedLinear):
                setattr(module, name, child.merged())
