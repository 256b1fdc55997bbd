"""Heads that map a shared representation to one logit for each task."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cordillera.models.ranking.interactions import MLP


class Heads(nn.Module):
    """One tower for each task on a shared representation, linear without ``hidden``: ``[B, inputs] -> [B, tasks]``."""

    def __init__(self, tasks: Sequence[str], inputs: int, hidden: Sequence[int] = (), dropout: float = 0.0) -> None:
        super().__init__()
        self.tasks = tuple(tasks)
        self.towers = nn.ModuleList(MLP(inputs, hidden, 1, dropout=dropout) for _ in self.tasks)

    def forward(self, representation: Tensor) -> Tensor:
        return torch.cat([tower(representation) for tower in self.towers], dim=1)
