"""FM: logistic regression plus a factorised weight for every pair of inputs.

Source: Rendle 2010.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.cached_tables import make_tables
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking.base import EmbeddingInit, RankingConfig, RankingModel
from cordillera.models.ranking.interactions import BiInteraction


class FMConfig(RankingConfig):
    """Settings of the factorisation machine.

    Attributes:
        embedding_dim: Width ``d`` of the factors.
        embedding_init: Initialisation of the factors: a standard deviation, or ``uniform_by_rows``. Linear weights
            start at 0.
    """

    name: Literal["fm"] = "fm"
    embedding_dim: int = Field(16, ge=1, le=2**16)
    embedding_init: EmbeddingInit = 0.01


class FM(RankingModel):
    """Linear term plus second-order term, with one factorisation machine for each task.

    An id's table row holds, for all tasks, first the factors and then the linear weights, so one lookup serves both.
    The tasks share nothing, so the representation consists of the logits, and the heads are the identity.
    """

    Config = FMConfig

    def __init__(self, config: FMConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(features)
        self.config = config
        d, tasks, num_dense = config.embedding_dim, len(features.tasks), len(features.dense)
        self.tables = make_tables(features, tasks * (d + 1), tables, init=config.embedding_init)
        self.tables.clear_columns(tasks * d)
        self.factors = nn.Parameter(torch.randn(num_dense, tasks, d) * 0.01)
        self.weight = nn.Parameter(torch.zeros(num_dense, tasks))
        self.bias = nn.Parameter(torch.zeros(tasks))
        self.pairs = BiInteraction()
        self.heads = nn.Identity()

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        tasks = self.bias.shape[0]
        factors, weights = embeddings.split([self.config.embedding_dim * tasks, tasks], dim=-1)
        with torch.autocast(dense.device.type, enabled=False):
            linear = dense @ self.weight + weights.to(self.weight.dtype).sum(1) + self.bias  # [B, tasks]
        rows = torch.cat(
            [
                dense[:, :, None, None] * self.factors,  # [B, num_dense, tasks, d]
                factors.unflatten(-1, (tasks, -1)),  # [B, F, tasks, d]
            ],
            dim=1,
        )
        # a difference of sums of squares cancels badly in bfloat16
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return linear + self.pairs(rows.transpose(1, 2)).sum(-1)  # [B, tasks, n, d] -> [B, tasks]
