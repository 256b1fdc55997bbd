"""PLE: experts of each task beside shared ones, in levels.

Source: Tang et al. 2020, Progressive layered extraction (PLE): a novel multi-task learning model for personalized
recommendations, sections 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking.dnn import FlatModel, TrunkConfig
from cordillera.models.ranking.interactions import MLP
from cordillera.models.ranking.multitask.mmoe import GatedHeads, mixed


class PLEConfig(TrunkConfig):
    """Settings of PLE; ``mlp`` and ``norm`` are those of every expert.

    Attributes:
        shared_experts: Number of experts in a level that all tasks read.
        task_experts: Number of experts in a level that one task reads.
        levels: Number of levels; with 1 the model is the paper's CGC.
    """

    name: Literal["ple"] = "ple"
    shared_experts: int = Field(2, ge=1, le=1024)
    task_experts: int = Field(1, ge=1, le=1024)
    levels: int = Field(2, ge=1, le=64)


class ExtractionLevel(nn.Module):
    """Experts of one level, and the gates to the next one.

    Args:
        tasks: Number of tasks.
        inputs: Width of what experts and gates read.
        is_last: Whether heads follow, which have their own gates.
    """

    def __init__(self, config: PLEConfig, tasks: int, inputs: int, is_last: bool) -> None:
        super().__init__()

        def experts(count: int) -> nn.ModuleList:
            return nn.ModuleList(
                MLP(inputs, config.mlp, norm=config.norm, dropout=config.dropout) for _ in range(count)
            )

        self.of_tasks = nn.ModuleList(experts(config.task_experts) for _ in range(tasks))
        self.shared = experts(config.shared_experts)
        own, all_experts = config.task_experts + config.shared_experts, config.task_experts * tasks
        self.gates = nn.ModuleList()
        if not is_last:
            widths = [own] * tasks + [all_experts + config.shared_experts]
            self.gates.extend(nn.Linear(inputs, width, bias=False) for width in widths)

    def outputs(self, of_tasks: Sequence[Tensor], shared: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return outputs ``[B, n, w]`` of each task and shared; inputs ``[B, i]`` are ``of_tasks`` and ``shared``."""
        found = [
            torch.stack([expert(x) for expert in experts.children()], dim=1)
            for experts, x in zip(self.of_tasks, of_tasks, strict=True)
        ]
        return found, torch.stack([expert(shared) for expert in self.shared], dim=1)

    def forward(self, of_tasks: Sequence[Tensor], shared: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the next level's inputs ``[B, w]``; those of this one are ``of_tasks`` and ``shared``."""
        own, common = self.outputs(of_tasks, shared)
        following = [
            mixed(torch.cat([outputs, common], dim=1), gate, x)
            for outputs, gate, x in zip(own, self.gates, of_tasks, strict=False)
        ]
        return following, mixed(torch.cat([*own, common], dim=1), self.gates[-1], shared)


class ExtractionHeads(GatedHeads):
    """Heads on the last level: the representation holds shared experts, and of each task its experts and gate input.

    Args:
        width: Width of an expert's output.
        inputs: Width of a gate's input.
    """

    def __init__(self, config: PLEConfig, tasks: Sequence[str], width: int, inputs: int) -> None:
        experts = config.shared_experts + config.task_experts
        super().__init__(tasks, experts, width, inputs, config.head_mlp, config.dropout)
        self.shared, self.own = config.shared_experts * width, config.task_experts * width
        self.block = self.own + inputs

    def select(self, task: int, representation: Tensor) -> Tensor:
        block = representation[:, self.shared + task * self.block :][:, : self.block]
        experts = [block[:, : self.own], representation[:, : self.shared], block[:, self.own :]]
        return super().select(task, torch.cat(experts, dim=1))


class PLE(FlatModel):
    """Levels of experts over the dense inputs and the flattened embeddings."""

    Config = PLEConfig

    def __init__(self, config: PLEConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        count, width = len(features.tasks), config.mlp[-1]
        widths = [self.inputs] + [width] * (config.levels - 1)
        self.levels = nn.ModuleList(
            ExtractionLevel(config, count, inputs, is_last=number == config.levels)
            for number, inputs in enumerate(widths, 1)
        )
        self.heads = ExtractionHeads(config, features.tasks, width, widths[-1])

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        x = self.flatten(dense, embeddings)
        of_tasks, shared = [x] * len(self.features.tasks), x
        for level in self.levels[:-1]:
            of_tasks, shared = level(of_tasks, shared)
        last = self.levels[-1]
        assert isinstance(last, ExtractionLevel)
        own, common = last.outputs(of_tasks, shared)
        parts = [part for outputs, x in zip(own, of_tasks, strict=True) for part in (outputs.flatten(1), x)]
        return torch.cat([common.flatten(1), *(part.to(common.dtype) for part in parts)], dim=1)
