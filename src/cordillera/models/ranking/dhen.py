"""DHEN: layers that are ensembles of different interaction modules.

Source: Zhang et al. 2022, section 3.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError
from cordillera.models.ranking.base import DeepConfig, DeepModel, EmbeddingLayer, Size, Sizes
from cordillera.models.ranking.interactions import (
    MLP,
    Convolution,
    DotInteraction,
    EmbeddingAttention,
    EmbeddingCross,
    FactorizationMachineBlock,
    LinearCompression,
    RowsMLP,
)

ModuleName = Literal["linear", "dot", "attention", "cross", "convolution", "mlp", "fm"]


class DHENConfig(DeepConfig):
    """Settings of DHEN's layers.

    Attributes:
        layers: Number of stacked ensembles; with 0 only the embedding layer and the top MLP remain.
        modules: Members of every layer's ensemble: ``linear`` (combinations of embeddings), ``dot`` (pairwise dot
            products, then an MLP: the paper's AdvancedDLRM), ``attention`` (a transformer encoder layer), ``cross``
            (DCN), ``convolution`` (over the plane of embeddings), ``mlp`` (over the flattened embeddings), ``fm``
            (Wukong's factorisation machine block). A repeated name gives modules with separate weights.
        embeddings: Number ``l`` of embeddings that each module computes.
        ensemble: Combination of the modules: ``concat`` (``l`` embeddings from each), ``sum``, or ``weighted_sum``
            (learned weights).
        module_mlp: Hidden widths of the MLPs of ``dot``, ``mlp`` and ``fm``.
        attention_heads: Number of heads of ``attention``; must divide ``embedding_dim``.
        attention_feed_forward: Hidden width of the feed-forward net of ``attention``.
        convolution_channels: Number of channels of ``convolution``.
        rank: Rank ``k`` of ``fm``.
        top_mlp: Widths of the MLP over the last layer's embeddings.
        dense_mlp: Hidden widths of the MLP that maps the dense inputs to embeddings.
        dense_embeddings: Number of embeddings that this MLP computes.
    """

    name: Literal["dhen"] = "dhen"
    layers: int = Field(2, ge=0, le=1024)
    modules: tuple[ModuleName, ...] = Field(("attention", "linear"), min_length=1)
    embeddings: Size = 16
    ensemble: Literal["concat", "sum", "weighted_sum"] = "concat"
    module_mlp: Sizes = (256,)
    attention_heads: Size = 2
    attention_feed_forward: Size = 64
    convolution_channels: Size = 4
    rank: Size = 8
    top_mlp: Sizes = Field((256,), min_length=1)
    dense_mlp: Sizes = (64,)
    dense_embeddings: Size = 1

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> DHENConfig:
        if "attention" in self.modules and self.embedding_dim % self.attention_heads:
            raise ValueError(
                f"attention_heads ({self.attention_heads}) must divide embedding_dim ({self.embedding_dim})"
            )
        return self


def _make_module(name: ModuleName, config: DHENConfig, rows: int) -> nn.Module:
    """Create a module ``[B, rows, d] -> [B, l, d]``."""
    d, outputs = config.embedding_dim, config.embeddings
    if name == "linear":
        return LinearCompression(rows, outputs)
    if name == "dot":
        if rows == 1:
            raise DataError(
                "a single embedding has no pairs to take dot products of",
                where="features",
                remedy="add a feature, enlarge model.dense_embeddings or leave 'dot' out of model.modules",
            )
        dots = DotInteraction(rows)
        return nn.Sequential(dots, RowsMLP(dots.outputs, config.module_mlp, outputs, d, dropout=config.dropout))
    if name == "attention":
        attention = EmbeddingAttention(d, config.attention_heads, config.attention_feed_forward, config.dropout)
        return nn.Sequential(attention, LinearCompression(rows, outputs))
    if name == "cross":
        return EmbeddingCross(outputs, d)
    if name == "convolution":
        channels = config.convolution_channels
        return nn.Sequential(Convolution(channels), LinearCompression(channels * rows, outputs))
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), RowsMLP(rows * d, config.module_mlp, outputs, d, dropout=config.dropout))
    return FactorizationMachineBlock(
        rows, outputs, d, rank=config.rank, hidden=config.module_mlp, dropout=config.dropout
    )


class DHENLayer(nn.Module):
    """``LN(ensemble of module_i(X) + shortcut(X))``: ``[B, rows, d] -> [B, outputs, d]``.

    The shortcut is the identity if the counts agree, else a linear map over the embeddings; the norm is over ``d``.
    ``outputs`` is ``l``, or with ``concat`` ``l`` for each module. Source: Zhang et al. 2022, equations 2 and 3.
    """

    def __init__(self, config: DHENConfig, rows: int) -> None:
        super().__init__()
        self.ensemble = config.ensemble
        count = len(config.modules)
        self.outputs = config.embeddings * (count if config.ensemble == "concat" else 1)
        self.interactions = nn.ModuleList(_make_module(name, config, rows) for name in config.modules)
        self.weights = nn.Parameter(torch.full((count,), 1 / count)) if config.ensemble == "weighted_sum" else None
        self.shortcut: nn.Module = nn.Identity() if rows == self.outputs else LinearCompression(rows, self.outputs)
        self.norm = nn.LayerNorm(config.embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = [interaction(x) for interaction in self.interactions]  # each [B, l, d]
        if self.ensemble == "concat":
            joined = torch.cat(parts, dim=1)  # [B, l * modules, d]
        else:
            if self.weights is not None:
                parts = [weight * part for weight, part in zip(self.weights.unbind(), parts, strict=True)]
            joined = torch.stack(parts).sum(0)  # [B, l, d]
        return self.norm(joined + self.shortcut(x))


class DHEN(DeepModel):
    """DHEN: embedding layer, DHEN layers, MLP over the flattened last embeddings."""

    Config = DHENConfig

    def __init__(self, config: DHENConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        self.embed = EmbeddingLayer(
            len(features.dense),
            len(features.sparse),
            config.embedding_dim,
            hidden=config.dense_mlp,
            dense_embeddings=config.dense_embeddings,
            dropout=config.dropout,
        )
        rows, layers = self.embed.outputs, []
        for _ in range(config.layers):
            layers.append(DHENLayer(config, rows))
            rows = layers[-1].outputs
        self.layers = nn.Sequential(*layers)
        self.top = MLP(rows * config.embedding_dim, config.top_mlp, dropout=config.dropout)
        self.heads = self.make_heads(self.top.outputs)

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        x = self.embed(dense, embeddings)  # [B, m, d]
        x = self.layers(x)  # [B, outputs, d]
        return self.top(x.flatten(1))  # [B, r]
