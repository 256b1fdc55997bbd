"""Wukong: a stack of factorisation machines, in which each layer doubles the order of the interactions.

Source: Zhang et al. 2024, section 3. Layer ``i`` holds interactions of orders 1 to ``2^i``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking.base import DeepConfig, DeepModel, EmbeddingLayer, Sizes
from cordillera.models.ranking.interactions import (
    MLP,
    FactorizationMachineBlock,
    LinearCompression,
    Norm,
    OptimisedFM,
    StackedLayerNorm,
)
from cordillera.models.ranking.towers import TowerModules, TowersConfig


class WukongConfig(DeepConfig):
    """Settings of Wukong.

    Attributes:
        embedding_init: Standard deviation of the initial embeddings. Products of two embeddings must be well above the
            layer norm's epsilon, otherwise the first layer has no effect at first: keep it near 0.05, not 1e-4.
        layers: Number ``l`` of layers.
        fmb_embeddings: Number ``n_F`` of embeddings that a layer's factorisation machine block computes.
        lcb_embeddings: Number ``n_L`` of embeddings that a layer's linear compression block computes.
        fm: Factorisation machine: ``optimised``, ``attentive`` (a ``Y`` for each sample) or ``basic`` (all of ``X
            X^T``).
        rank: Number ``k`` of columns of ``Y``.
        fmb_mlp: Hidden widths of the factorisation machine block's MLP.
        top_mlp: Widths of the MLP over the last layer's embeddings.
        top_norm: Norm of the top MLP's hidden layers; ``batch`` mixes samples in training.
        dense_mlp: Hidden widths of the MLP that maps the dense inputs to embeddings.
        dense_embeddings: Number of embeddings that this MLP computes.
        compatibility: ``fuxictr`` for the network of FuxiCTR's WuKong, for comparisons and its checkpoints: residual
            maps have a bias, the block's MLP ends in ReLU, and each dense input has a vector of its own in place of
            ``dense_mlp``; linear weights start as Xavier normal, biases at zero, ``Y`` as N(0, 1).
        towers: Towers that compress the embeddings before they interact; without the section there are none.
    """

    name: Literal["wukong"] = "wukong"
    layers: int = Field(2, ge=1, le=1024)
    fmb_embeddings: int = Field(16, ge=1, le=2**16)
    lcb_embeddings: int = Field(16, ge=1, le=2**16)
    fm: Literal["optimised", "attentive", "basic"] = "optimised"
    rank: int = Field(8, ge=1, le=2**16)
    fmb_mlp: Sizes = (256,)
    top_mlp: Sizes = Field((256,), min_length=1)
    top_norm: Norm = "none"
    dense_mlp: Sizes = (64,)
    dense_embeddings: int = Field(1, ge=1, le=2**16)
    compatibility: Literal["none", "fuxictr"] = "none"
    towers: TowersConfig | None = None


class WukongLayer(nn.Module):
    """``X_{i+1} = LN(concat(FMB(X_i), LCB(X_i)) + residual(X_i))``: ``[B, rows, d] -> [B, n_F + n_L, d]``.

    The residual is the identity if the counts agree, else a linear map over the embeddings. Source: Zhang et al. 2024,
    equation 1.

    The width ``d`` is ``embedding_dim``, or that of the configuration.
    """

    def __init__(self, config: WukongConfig, rows: int, embedding_dim: int | None = None) -> None:
        super().__init__()
        d, outputs = embedding_dim or config.embedding_dim, config.fmb_embeddings + config.lcb_embeddings
        as_fuxictr = config.compatibility == "fuxictr"
        self.fmb = FactorizationMachineBlock(
            rows,
            config.fmb_embeddings,
            d,
            fm=config.fm,
            rank=config.rank,
            hidden=config.fmb_mlp,
            dropout=config.dropout,
            output_activation="relu" if as_fuxictr else "none",
        )
        self.lcb = LinearCompression(rows, config.lcb_embeddings)
        self.residual: nn.Module = nn.Identity()
        if rows != outputs:
            self.residual = LinearCompression(rows, outputs, bias=as_fuxictr)
        self.norm = StackedLayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        if isinstance(self.residual, LinearCompression):
            new, of_lcb, residual = self.fmb.with_combinations(x, self.lcb.weight, self.residual.weight)
            if self.residual.bias is not None:
                residual = residual + self.residual.bias.to(residual.dtype).unsqueeze(-1)
        else:
            new, of_lcb = self.fmb.with_combinations(x, self.lcb.weight)  # [B, n_F, d], [B, n_L, d]
        return self.norm(new, of_lcb, residual)


def _initialise_as_fuxictr(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | LinearCompression):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, OptimisedFM) and module.attention is None:
        nn.init.normal_(module.y)


class Wukong(DeepModel):
    """Wukong: embedding layer, Wukong layers, MLP over the flattened last embeddings."""

    Config = WukongConfig

    def __init__(self, config: WukongConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        as_fuxictr = config.compatibility == "fuxictr"
        self.towers = TowerModules(config.towers, features.sparse, config.embedding_dim)
        d = self.towers.dim
        self.embed = EmbeddingLayer(
            len(features.dense),
            self.towers.outputs,
            d,
            hidden=config.dense_mlp,
            dense_embeddings=config.dense_embeddings,
            separate=as_fuxictr,
            dropout=config.dropout,
        )
        outputs = config.fmb_embeddings + config.lcb_embeddings
        self.layers = nn.Sequential(
            *(WukongLayer(config, self.embed.outputs if i == 0 else outputs, d) for i in range(config.layers))
        )
        self.top = MLP(
            outputs * d,
            config.top_mlp,
            norm=config.top_norm,
            dropout=0.0 if as_fuxictr else config.dropout,
        )
        self.heads = self.make_heads(self.top.outputs)
        if as_fuxictr:
            self.apply(_initialise_as_fuxictr)

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        x = self.embed(dense, self.towers(embeddings))  # [B, n, d]
        x = self.layers(x)  # [B, n_F + n_L, d]
        return self.top(x.flatten(1))  # [B, r]
