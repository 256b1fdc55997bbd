"""RankMixer: tokens made of the inputs exchange parts of themselves, then each has a feed-forward net of its own.

Source: Zhu et al. 2025, arXiv 2507.15551, section 3. Its nets are dense here; the sparse mixture of experts of section
3.4 is not built. Inputs are cut into tokens in their order, where the paper groups them by meaning.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking.base import DeepConfig, DeepModel


class RankMixerConfig(DeepConfig):
    """Settings of RankMixer.

    Attributes:
        layers: Number ``L`` of blocks.
        tokens: Number ``T`` of tokens, and of the parts that a token is cut into to be mixed.
        width: Width ``D`` of a token, a multiple of ``tokens``.
        expansion: Hidden width of a token's feed-forward net in multiples of ``width``.
    """

    name: Literal["rankmixer"] = "rankmixer"
    layers: int = Field(2, ge=1, le=1024)
    tokens: int = Field(8, ge=1, le=1024)
    width: int = Field(64, ge=1, le=2**16)
    expansion: int = Field(4, ge=1, le=64)

    @model_validator(mode="after")
    def _parts_are_equal(self) -> RankMixerConfig:
        if self.width % self.tokens:
            raise ValueError(f"tokens ({self.tokens}) must divide width ({self.width})")
        return self


class TokenMLP(nn.Module):
    """A net of its own for each token, of one hidden layer or none: ``[B, T, inputs] -> [B, T, outputs]``.

    Args:
        hidden: Width of the hidden layer, with GELU; None for one linear layer.
        dropout: Probability of zeroing a hidden activation in training.
    """

    def __init__(self, tokens: int, inputs: int, outputs: int, hidden: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(inputs, hidden or outputs) for _ in range(tokens))
        self.out = nn.ModuleList(nn.Linear(hidden, outputs) for _ in range(tokens) if hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        found = [layer(token) for layer, token in zip(self.into, x.unbind(1), strict=True)]
        if self.out:
            hidden = (self.dropout(functional.gelu(token)) for token in found)
            found = [layer(token) for layer, token in zip(self.out, hidden, strict=True)]
        return torch.stack(found, 1)


def mix_tokens(x: Tensor) -> Tensor:
    """Exchange parts of tokens: part ``h`` of all tokens makes token ``h``, ``[B, T, D] -> [B, T, D]``.

    Source: Zhu et al. 2025, section 3.3.1, with as many parts as tokens.
    """
    return x.unflatten(-1, (x.shape[1], -1)).transpose(1, 2).flatten(2)


class RankMixerBlock(nn.Module):
    """``S = LN(mix(X) + X)``, then ``LN(MLP_t(S) + S)`` for each token ``t``: ``[B, T, D] -> [B, T, D]``."""

    def __init__(self, config: RankMixerConfig) -> None:
        super().__init__()
        width = config.width
        self.mixed_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = TokenMLP(config.tokens, width, width, config.expansion * width, config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed_norm(mix_tokens(x) + x)
        return self.norm(self.mlp(x) + x)


class RankMixer(DeepModel):
    """RankMixer: tokens of the dense inputs and the flattened embeddings, blocks, and the mean over tokens."""

    Config = RankMixerConfig

    def __init__(self, config: RankMixerConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        inputs = len(features.dense) + len(features.sparse) * config.embedding_dim
        self.token_inputs = -(-inputs // config.tokens)  # the last ones are filled up with zeros
        self.filling = self.token_inputs * config.tokens - inputs
        self.embed = TokenMLP(config.tokens, self.token_inputs, config.width)
        self.blocks = nn.Sequential(*(RankMixerBlock(config) for _ in range(config.layers)))
        self.heads = self.make_heads(config.width)

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        x = torch.cat([dense.to(embeddings.dtype), embeddings.flatten(1)], 1)  # [B, num_dense + F * d]
        x = functional.pad(x, (0, self.filling)).unflatten(1, (-1, self.token_inputs))  # [B, T, inputs of a token]
        return self.blocks(self.embed(x)).mean(1)  # [B, D]
