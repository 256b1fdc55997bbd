"""DCN-V2: a cross network beside, or below, an MLP.

Source: Wang et al. 2021.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking.base import DeepConfig, DeepModel, EmbeddingLayer, Sizes
from cordillera.models.ranking.interactions import MLP, CrossNetwork, Norm
from cordillera.models.ranking.towers import TowerModules, TowersConfig


class DCNConfig(DeepConfig):
    """Settings of the cross network and the MLP.

    Attributes:
        structure: ``parallel`` (both read the inputs, heads read both) or ``stacked`` (the MLP reads the crosses).
        cross_layers: Number of crosses; the polynomial degree is one more.
        low_rank: Rank of the crosses' weights; None for full rank.
        mlp: Widths of the MLP's hidden layers.
        norm: Norm of the MLP's hidden layers; ``batch`` mixes samples in training.
        dense_vectors: Whether to replace each dense input ``x_j`` by ``x_j v_j`` with a learned vector ``v_j``, as in
            FuxiCTR.
        towers: Towers that compress the embeddings before they interact; without the section there are none.
    """

    name: Literal["dcn"] = "dcn"
    structure: Literal["parallel", "stacked"] = "parallel"
    cross_layers: int = Field(3, ge=1, le=1024)
    low_rank: int | None = Field(None, ge=1, le=2**16)
    mlp: Sizes = Field((512, 256), min_length=1)
    norm: Norm = "none"
    dense_vectors: bool = False
    towers: TowersConfig | None = None


class DCN(DeepModel):
    """DCN-V2: cross network and MLP over the dense inputs and the flattened embeddings."""

    Config = DCNConfig

    def __init__(self, config: DCNConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        self.towers = TowerModules(config.towers, features.sparse, config.embedding_dim)
        self.embed = EmbeddingLayer(
            len(features.dense) if config.dense_vectors else 0,
            self.towers.outputs,
            self.towers.dim,
            separate=True,
        )
        self.dense_vectors = config.dense_vectors
        num_raw = 0 if config.dense_vectors else len(features.dense)
        inputs = self.embed.outputs * self.towers.dim + num_raw
        self.cross = CrossNetwork(inputs, config.cross_layers, config.low_rank)
        self.mlp = MLP(inputs, config.mlp, norm=config.norm, dropout=config.dropout)
        self.stacked = config.structure == "stacked"
        self.heads = self.make_heads(self.mlp.outputs if self.stacked else inputs + self.mlp.outputs)

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        embeddings = self.towers(embeddings)
        if self.dense_vectors:
            x = self.embed(dense, embeddings).flatten(1)  # [B, w], w = (num_dense + n) * d
        else:
            x = torch.cat([embeddings.flatten(1), dense.to(embeddings.dtype)], dim=1)  # [B, w], w = n * d + num_dense
        crossed = self.cross(x)  # [B, w]
        if self.stacked:
            return self.mlp(crossed)  # [B, r]
        deep = self.mlp(x)
        return torch.cat([crossed.to(deep.dtype), deep], dim=1)  # [B, w + r]
