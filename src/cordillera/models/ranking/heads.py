"""Heads that map a shared representation to one logit for each task.

Logits are computed in float32 within autocast too: rounded to the eight significant bits of bfloat16, the scores of
neighbouring samples would be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from cordillera.models.ranking.interactions import MLP, in_turn


class TaskTower(MLP):
    """MLP whose output layer, the last, gives logits, in float32 within autocast too."""

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        x = in_turn(hidden, x)
        with torch.autocast(x.device.type, enabled=False):
            return last(x.to(torch.promote_types(x.dtype, torch.float32)))


class Heads(nn.Module):
    """One tower for each task on a shared representation, linear without ``hidden``: ``[B, r] -> [B, tasks]``.

    Args:
        inputs: Width of what a tower reads.

    Attributes:
        share: Function that returns the representation once for each task, whose gradients it joins; None for the
            representation itself.
    """

    share: Callable[[Tensor], Sequence[Tensor]] | None = None

    def __init__(self, tasks: Sequence[str], inputs: int, hidden: Sequence[int] = (), dropout: float = 0.0) -> None:
        super().__init__()
        self.tasks = tuple(tasks)
        self.towers = nn.ModuleList(TaskTower(inputs, hidden, 1, dropout=dropout) for _ in self.tasks)

    def forward(self, representation: Tensor) -> Tensor:
        parts: Sequence[Tensor] = [representation] * len(self.tasks)
        if self.share is not None and torch.is_grad_enabled():
            parts = self.share(representation)
        return torch.cat([self.towers[task](self.select(task, part)) for task, part in enumerate(parts)], dim=1)

    def select(self, task: int, representation: Tensor) -> Tensor:
        """Return what the tower of a task reads of the representation ``[B, r]``: all of it, or the ``[B, inputs]``."""
        return representation

    def of_task(self, task: int) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of which only one task's logit depends."""
        return self.towers[task].parameters()
