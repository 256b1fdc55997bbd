"""DLRM: dot products between the embeddings of sparse features and one embedding of all dense ones.

Source: Naumov et al. 2019, and its reference code for what the paper leaves open (activations, initialisation).
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError
from cordillera.models.ranking.base import DeepConfig, DeepModel, EmbeddingInit, Sizes
from cordillera.models.ranking.interactions import MLP, DotInteraction
from cordillera.models.ranking.towers import TowerModules, TowersConfig


class DLRMConfig(DeepConfig):
    """Settings of DLRM; the defaults are those published for the Criteo Kaggle set.

    Attributes:
        embedding_dim: Width ``d`` of every embedding and of the bottom MLP's output.
        embedding_init: Initialisation of the embeddings; by default as in the reference code.
        bottom_mlp: Hidden widths of the MLP over the dense inputs; its last layer, of width ``d``, is added.
        top_mlp: Widths of the MLP over the interactions; the heads' layers are added.
        interaction: ``dot`` (pairwise dot products beside the bottom output) or ``cat`` (all embeddings concatenated).
        include_diagonal: Whether ``dot`` includes each embedding's product with itself.
        towers: Towers that compress the embeddings before they interact; without the section there are none.
            The bottom MLP's output has their width.
    """

    name: Literal["dlrm"] = "dlrm"
    embedding_init: EmbeddingInit = "uniform_by_rows"
    bottom_mlp: Sizes = (512, 256, 64)
    top_mlp: Sizes = Field((512, 256), min_length=1)
    interaction: Literal["dot", "cat"] = "dot"
    include_diagonal: bool = False
    towers: TowersConfig | None = None


def _initialise(module: nn.Module) -> None:
    """Draw weights with variance 2 / (in + out) and biases with variance 1 / out, as in the reference code."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=(2 / (module.in_features + module.out_features)) ** 0.5)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=(1 / module.out_features) ** 0.5)


class DLRM(DeepModel):
    """DLRM: bottom MLP (if there are dense features), pairwise dot products, top MLP."""

    Config = DLRMConfig

    def __init__(self, config: DLRMConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        self.towers = TowerModules(config.towers, features.sparse, config.embedding_dim)
        d, rows = self.towers.dim, self.towers.outputs
        top_inputs = 0
        self.bottom: MLP | None = None
        if features.dense:
            self.bottom = MLP(len(features.dense), (*config.bottom_mlp, d), dropout=config.dropout)
            rows += 1
            top_inputs = d
        self.interaction: DotInteraction | None = None
        if config.interaction == "dot":
            self.interaction = DotInteraction(rows, config.include_diagonal)
            top_inputs += self.interaction.outputs
        else:
            top_inputs = rows * d
        if not top_inputs:
            raise DataError(
                "a single feature has no pairs to take dot products of",
                where="features",
                remedy="add a feature, or choose model.interaction = 'cat'",
            )
        self.top = MLP(top_inputs, config.top_mlp, dropout=config.dropout)
        self.heads = self.make_heads(self.top.outputs)
        self.apply(_initialise)

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        x = None if self.bottom is None else self.bottom(dense)  # [B, d]
        embeddings = self.towers(embeddings)
        # [B, n, d], the dense embedding first
        rows = embeddings if x is None else torch.cat([x.unsqueeze(1), embeddings.to(x.dtype)], dim=1)
        if self.interaction is None:
            return self.top(rows.flatten(1))  # [B, n * d] -> [B, r]
        products = self.interaction(rows)  # [B, n (n - 1) / 2]
        joined = products if x is None else torch.cat([x, products], dim=1)  # [B, d + n (n - 1) / 2]
        return self.top(joined)  # [B, r]
