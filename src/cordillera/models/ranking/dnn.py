"""DNN: all inputs side by side, one MLP. The baseline that interaction models have to beat."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from cordillera.data.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking.base import DeepConfig, DeepModel, Sizes
from cordillera.models.ranking.interactions import MLP, Norm


class DNNConfig(DeepConfig):
    """The MLP's sizes.

    Attributes:
        mlp: Widths of the hidden layers.
        norm: Of the hidden layers; ``batch`` mixes samples while training.
    """

    name: Literal["dnn"] = "dnn"
    mlp: Sizes = Field((512, 256), min_length=1)
    norm: Norm = "none"


class DNN(DeepModel):
    """An MLP over the dense inputs and the flattened embeddings.

    Args:
        config: Sizes.
        features: Names and sizes of the inputs.
        tables: How the tables are stored and updated.
    """

    Config = DNNConfig

    def __init__(self, config: DNNConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        inputs = len(features.dense) + len(features.sparse) * config.embedding_dim
        self.mlp = MLP(inputs, config.mlp, norm=config.norm, dropout=config.dropout)
        self.heads = self.make_heads(self.mlp.outputs)

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        x = torch.cat([dense.to(embeddings.dtype), embeddings.flatten(1)], dim=1)  # [B, num_dense + F * d]
        return self.mlp(x)  # [B, r]
