"""LR: logistic regression, with one weight for each id and each dense input."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.cached_tables import make_tables
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking.base import EmbeddingInit, RankingConfig, RankingModel


class LRConfig(RankingConfig):
    """Settings of logistic regression, which has no sizes.

    Attributes:
        embedding_init: Initialisation of the ids' weights: a standard deviation, or ``uniform_by_rows``.
    """

    name: Literal["lr"] = "lr"
    embedding_init: EmbeddingInit = 1e-4


class LR(RankingModel):
    """Linear model: each id's table row holds its weight for every task.

    The tasks share nothing, so the representation consists of the logits, and the heads are the identity.
    """

    Config = LRConfig

    def __init__(self, config: LRConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(features)
        self.config = config
        self.tables = make_tables(features, len(features.tasks), tables, init=config.embedding_init)
        self.weight = nn.Parameter(torch.zeros(len(features.dense), len(features.tasks)))
        self.bias = nn.Parameter(torch.zeros(len(features.tasks)))
        self.heads = nn.Identity()

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        with torch.autocast(dense.device.type, enabled=False):
            return (
                dense @ self.weight + embeddings.to(self.weight.dtype).sum(1) + self.bias
            )  # [B, F, tasks] -> [B, tasks]
