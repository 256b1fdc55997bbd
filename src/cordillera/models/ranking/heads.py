"""Heads that map a shared representation to one logit for each task."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cordillera.models.ranking.interactions import MLP


class Heads(nn.Module):
    """One tower for each task on a shared representation: ``[B, r] -> [B, tasks]``.

    Args:
        tasks: Names of the tasks, in the order of the output's columns.
        inputs: Width ``r`` of the representation.
        hidden: Widths of each tower's hidden layers; empty for a linear layer for each task.
        dropout: Dropout probability of the hidden layers.
    """

    def __init__(self, tasks: Sequence[str], inputs: int, hidden: Sequence[int] = (), dropout: float = 0.0) -> None:
        super().__init__()
        self.tasks = tuple(tasks)
        self.towers = nn.ModuleList(MLP(inputs, hidden, 1, dropout=dropout) for _ in self.tasks)

    def forward(self, representation: Tensor) -> Tensor:
        return torch.cat([tower(representation) for tower in self.towers], dim=1)
