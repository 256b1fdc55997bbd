"""DNN: an MLP over all inputs, the baseline for interaction models."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking.base import DeepConfig, DeepModel, EmbeddingLayer, Sizes
from cordillera.models.ranking.interactions import MLP, Norm


class TrunkConfig(DeepConfig):
    """Settings of an MLP over all inputs.

    Attributes:
        mlp: Widths of the hidden layers.
        norm: Norm of the hidden layers; ``batch`` mixes samples in training.
        dense_vectors: Whether to replace each dense input ``x_j`` by ``x_j v_j`` with a learned vector ``v_j``, as in
            FuxiCTR.
    """

    mlp: Sizes = Field((512, 256), min_length=1)
    norm: Norm = "none"
    dense_vectors: bool = False


class DNNConfig(TrunkConfig):
    """Settings of the DNN."""

    name: Literal["dnn"] = "dnn"


class FlatModel(DeepModel):
    """Model whose trunk reads the dense inputs and the flattened embeddings as one vector.

    Attributes:
        inputs: Length of that vector.
    """

    def __init__(self, config: TrunkConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        self.embed = EmbeddingLayer(
            len(features.dense) if config.dense_vectors else 0,
            len(features.sparse),
            config.embedding_dim,
            separate=True,
        )
        self.dense_vectors = config.dense_vectors
        num_raw = 0 if config.dense_vectors else len(features.dense)
        self.inputs = self.embed.outputs * config.embedding_dim + num_raw

    def flatten(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Join the inputs ``dense [B, num_dense]`` and ``embeddings [B, F, d]`` to ``[B, inputs]``."""
        if self.dense_vectors:
            return self.embed(dense, embeddings).flatten(1)
        return torch.cat([dense.to(embeddings.dtype), embeddings.flatten(1)], dim=1)


class DNN(FlatModel):
    """MLP over the dense inputs and the flattened embeddings."""

    Config: type[TrunkConfig] = DNNConfig

    def __init__(self, config: TrunkConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        self.mlp = MLP(self.inputs, config.mlp, norm=config.norm, dropout=config.dropout)
        self.heads = self.make_heads(self.mlp.outputs)

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        return self.mlp(self.flatten(dense, embeddings))  # [B, r]
