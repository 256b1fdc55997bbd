"""MMoE: experts that all tasks share, mixed for each task by a gate of its own.

Source: Ma et al. 2018, Modeling task relationships in multi-task learning with multi-gate mixture-of-experts, section
4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking.dnn import FlatModel, TrunkConfig
from cordillera.models.ranking.heads import Heads
from cordillera.models.ranking.interactions import MLP


class MMoEConfig(TrunkConfig):
    """Settings of MMoE; ``mlp`` and ``norm`` are those of every expert.

    Attributes:
        experts: Number of experts.
    """

    name: Literal["mmoe"] = "mmoe"
    experts: int = Field(4, ge=1, le=1024)


def mixed(outputs: Tensor, gate: nn.Module, inputs: Tensor) -> Tensor:
    """Return the mean of expert ``outputs [B, n, w]`` by the softmax of a gate on ``inputs [B, i]``: ``[B, w]``."""
    return torch.einsum("bn,bnw->bw", torch.softmax(gate(inputs), dim=1).to(outputs.dtype), outputs)


class GatedHeads(Heads):
    """Heads that mix experts first; the representation holds the experts' outputs and then the gates' inputs.

    Args:
        experts: Number of experts.
        width: Width of an expert's output.
        inputs: Width of a gate's input.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        experts: int,
        width: int,
        inputs: int,
        hidden: Sequence[int] = (),
        dropout: float = 0.0,
    ) -> None:
        super().__init__(tasks, width, hidden, dropout)
        self.experts, self.width = experts, width
        self.gates = nn.ModuleList(nn.Linear(inputs, experts, bias=False) for _ in self.tasks)

    def select(self, task: int, representation: Tensor) -> Tensor:
        split = self.experts * self.width
        outputs = representation[:, :split].unflatten(1, (self.experts, self.width))
        return mixed(outputs, self.gates[task], representation[:, split:])

    def of_task(self, task: int) -> Iterator[nn.Parameter]:
        yield from super().of_task(task)
        yield from self.gates[task].parameters()


class MMoE(FlatModel):
    """Experts and gates over the dense inputs and the flattened embeddings."""

    Config = MMoEConfig

    def __init__(self, config: MMoEConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        self.experts = nn.ModuleList(
            MLP(self.inputs, config.mlp, norm=config.norm, dropout=config.dropout) for _ in range(config.experts)
        )
        self.heads = GatedHeads(
            features.tasks, config.experts, config.mlp[-1], self.inputs, config.head_mlp, config.dropout
        )

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        x = self.flatten(dense, embeddings)
        outputs = [expert(x) for expert in self.experts]  # [B, w] each
        return torch.cat([*outputs, x.to(outputs[0].dtype)], dim=1)  # [B, experts * w + inputs]
