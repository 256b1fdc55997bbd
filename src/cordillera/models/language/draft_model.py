"""Small models that draft the next tokens of a Llama from what it computed for the last ones.

The features of a token are the outputs of some of the model's blocks, side by side. A drafter pairs the features of
token ``i`` with token ``i + 1``, which the model has already generated, and predicts token ``i + 2`` and those after
it. Embedding and head are those of the model, and are not changed.

Sources: Li et al. 2025 (EAGLE-3), section 3, for heads that go on from their own features; Chen et al. 2026 (DFlash)
for blocks whose tokens are all drafted in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from cordillera.kernels.dense.decoder_rows import DecoderBlocks, PagedRows

DraftAttention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

DRAFT = "draft."
"""Beginning of the names of a drafter's weights in its model."""


class DraftConfig(BaseModel):
    """Settings of a drafter.

    Attributes:
        kind: ``head`` drafts one token after the other, each from the features that it computed for the one before;
            ``block`` drafts the tokens of a block in one pass, not knowing each other.
        layers: Number of blocks.
        length: Number of tokens that it is trained to draft in a row.
        vocabulary: Number of ids that can be drafted: the first ones, which byte-pair encodings give to frequent
            tokens.
        taps: Numbers of the model's blocks whose outputs are the features; None for the middle one, the third from the
            end and the last.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["head", "block"] = "head"
    layers: int = Field(1, ge=1, le=64)
    length: int = Field(4, ge=1, le=15)
    vocabulary: int = Field(16384, ge=1)
    taps: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, min_length=1)

    def tapped(self, layers: int) -> tuple[int, ...]:
        """Return the numbers of the blocks whose outputs are the features of a model with ``layers`` blocks."""
        return self.taps or tuple(sorted({layers // 2, max(0, layers - 3), layers - 1}))


class DraftModel(nn.Module):
    """Drafter of a model; :func:`~cordillera.models.language.llama.make_drafter` makes that of a Llama.

    Weights: ``tap_norms`` and ``fuse`` make features of the model's width of the outputs of several blocks, whose sizes
    differ much; ``join`` adds the embedding of the token to them; ``layers`` are blocks as those of the model; ``mask``
    stands for the tokens of a block that are not known.

    Args:
        config: Settings.
        width: Width of the model's residual stream.
        taps: Numbers of the blocks whose outputs are the features.
        block: Makes a block.
        norm: Makes a norm.
    """

    def __init__(
        self,
        config: DraftConfig,
        width: int,
        taps: Sequence[int],
        block: Callable[[], nn.Module],
        norm: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.config, self.taps = config, tuple(taps)
        self.tap_norms = nn.ModuleList(norm() for _ in self.taps)
        self.fuse = nn.Linear(len(self.taps) * width, width, bias=False)
        self.token_norm, self.feature_norm = norm(), norm()
        self.join = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(block() for _ in range(self.config.layers))
        self.norm = norm()
        self.mask = nn.Parameter(torch.empty(width)) if self.config.kind == "block" else None
        self.few: DecoderBlocks | None = None

    def fused(self, tapped: Tensor) -> Tensor:
        """Return features ``[T, hidden]`` of the outputs of the tapped blocks, side by side, ``[T, taps x hidden]``."""
        parts = tapped.chunk(len(self.taps), -1)
        fused: Tensor = self.fuse(torch.cat([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], -1))
        return fused

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        offsets: Tensor,
        table: tuple[Tensor, Tensor],
        cores: Sequence[DraftAttention],
        cached: PagedRows | None = None,
    ) -> Tensor:
        """Compute the features of drafted tokens.

        Args:
            embedded: Embeddings of the tokens, ``[T, hidden]``.
            features: Features of the tokens before them, ``[T, hidden]``: fused ones of the model, or a drafter's own.
            offsets: Offsets at which documents begin, followed by ``T``, ``int64 [B + 1]``.
            table: Table of :func:`~cordillera.models.language.rope.rope_table` of the positions of the features.
            cores: Attention of each layer.
            cached: What the tokens are added to where :attr:`few` takes them.

        Returns:
            Features ``[T, hidden]``. After ``norm``, the model's head gives the logits of the tokens that follow.
        """
        x = features + self.join(torch.cat([self.token_norm(embedded), self.feature_norm(features)], -1))
        layers = range(len(self.layers))
        if self.few is not None and cached is not None and self.few.takes(x, cached, layers):
            return self.few(x, table, cached, layers)
        for layer, core in zip(self.layers, cores, strict=True):
            x = layer(x, offsets, table, core)
        return x
