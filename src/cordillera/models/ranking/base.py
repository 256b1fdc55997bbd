"""Common parts of all ranking models: embedding tables, a representation, heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec, RankingBatch
from cordillera.embeddings.cached_tables import make_tables
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.errors import DataError
from cordillera.models.ranking.heads import Heads
from cordillera.models.ranking.interactions import RowsMLP

ModName = Literal["no-bias", "block-norm", "hard-swish"]
Size = Annotated[int, Field(ge=1, le=2**20)]
Sizes = tuple[Size, ...]
Probability = Annotated[float, Field(ge=0, lt=1)]
EmbeddingInit = Annotated[float, Field(gt=0)] | Literal["uniform_by_rows"]


def check_finite(value: Any) -> Any:
    """Return the ``value`` of a setting if it is not an infinite number or NaN.

    Raises:
        ValueError: If it is one of them.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


class RankingConfig(BaseModel):
    """Base class of every model's configuration: immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    _finite_init = field_validator("embedding_init", check_fields=False)(check_finite)


class DeepConfig(RankingConfig):
    """Settings that all models with a trunk and heads share.

    Attributes:
        embedding_dim: Width ``d`` of every embedding.
        embedding_init: Standard deviation of normally distributed initial embeddings, or ``uniform_by_rows``: uniform
            within ``sqrt(1 / rows of the table)`` of zero.
        head_mlp: Hidden widths of each task's tower on the shared representation; empty for one linear layer for each
            task.
        dropout: Probability of zeroing an activation of a hidden layer in training.
        mods: LoKA's changes for low precision: ``no-bias`` (no biases except the prediction layers'), ``block-norm``
            (root-mean-square norms over blocks, without weights, in place of layer norms), ``hard-swish`` (in place of
            ReLU).
        norm_block: Number of features of a block of ``block-norm``; the last block is smaller if the width is not a
            multiple.
    """

    embedding_dim: int = Field(16, ge=1, le=2**16)
    embedding_init: EmbeddingInit = 0.05
    head_mlp: Sizes = ()
    dropout: Probability = 0.0
    mods: tuple[ModName, ...] = ()
    norm_block: int = Field(256, ge=1, le=2**20)


class RankingModel(nn.Module):
    """Model that scores samples: embedding tables, a dense part that represents a sample, and heads.

    Subclasses set ``tables`` and ``heads`` and define :meth:`represent`. The dense part (:meth:`score`) is a pure
    function of tensors, which is compiled and run under autocast, while tables stay outside.

    Args:
        features: Names and sizes of the features, and the tasks.

    Attributes:
        built: :func:`~cordillera.models.ranking.mods.weights_sum` of the model as ``build`` created it; None if it was
            created otherwise.
        pools_all: Whether embeddings are the sums of bags that the tables give, and nothing else.

    Raises:
        DataError: If there is no feature, or no task.
    """

    tables: EmbeddingTables
    heads: nn.Module
    built: float | None = None
    pools_all: ClassVar[bool] = True

    def __init__(self, features: FeatureSpec) -> None:
        super().__init__()
        if not features.dense and not features.sparse:
            raise DataError(
                "a model needs at least one feature", where="features", remedy="name dense or sparse columns"
            )
        if not features.tasks:
            raise DataError("a model needs at least one task", where="features", remedy="name a label column")
        self.features = features

    def forward(self, batch: RankingBatch) -> Tensor:
        """Compute logits ``[B, tasks]`` of a batch, with columns in the order of ``FeatureSpec.tasks``."""
        return self.score(batch.dense, self.look_up(batch))

    def look_up(self, batch: RankingBatch) -> Tensor:
        """Look up the embeddings ``[B, F, d]`` of a batch, in the order of ``FeatureSpec.sparse``.

        Models that read histories in order summarise them here, so that what follows sees one embedding of each.
        """
        if self.features.sparse:
            return self.tables(batch.sparse)
        # an empty sparse batch does not contain the number of samples
        return batch.dense.new_zeros(len(batch), 0, self.tables.embedding_dim)

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Compute the representation ``[B, r]`` that all heads read.

        Inputs are ``dense [B, num_dense]`` and ``embeddings [B, F, d]``, in the order of ``FeatureSpec.sparse``.
        """
        raise NotImplementedError

    def score(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Compute logits ``[B, tasks]`` from ``dense`` inputs ``[B, num_dense]`` and ``embeddings`` ``[B, F, d]``."""
        return self.heads(self.represent(dense, embeddings))


class DeepModel(RankingModel):
    """Ranking model whose tables have the width ``embedding_dim`` of its configuration.

    Args:
        config: Settings of the model, the recipe's ``[model]``.
        features: Names and sizes of the features, and the tasks.
        tables: Settings of the embedding tables, the recipe's ``[tables]``.
    """

    def __init__(self, config: DeepConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(features)
        self.config = config
        self.tables = make_tables(features, config.embedding_dim, tables, init=config.embedding_init)

    def make_heads(self, inputs: int) -> Heads:
        """Create the configured heads for a representation of width ``inputs``."""
        return Heads(self.features.tasks, inputs, self.config.head_mlp, self.config.dropout)


class EmbeddingLayer(nn.Module):
    """First embeddings ``X_0`` of DHEN and Wukong: embeddings of dense inputs, then of sparse inputs.

    Args:
        num_dense: Number of dense inputs; with 0 there are no dense embeddings.
        num_sparse: Number ``F`` of embedded features.
        hidden: Hidden widths of the MLP over all dense inputs (Zhang et al. 2024, section 3.2).
        dense_embeddings: Number of embeddings that this MLP computes.
        separate: Whether each dense input ``x_j`` has an embedding of its own, ``x_j v_j`` with a learned vector
            ``v_j``, instead of the MLP.
    """

    def __init__(
        self,
        num_dense: int,
        num_sparse: int,
        embedding_dim: int,
        *,
        hidden: Sequence[int] = (),
        dense_embeddings: int = 1,
        separate: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.mlp: RowsMLP | None = None
        self.vectors: nn.Parameter | None = None
        self.outputs = num_sparse
        if num_dense and separate:
            self.vectors = nn.Parameter(torch.empty(num_dense, embedding_dim))
            nn.init.xavier_normal_(self.vectors)
            self.outputs += num_dense
        elif num_dense:
            self.mlp = RowsMLP(num_dense, hidden, dense_embeddings, embedding_dim, dropout=dropout)
            self.outputs += dense_embeddings

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        if self.vectors is not None:
            first = dense.unsqueeze(-1) * self.vectors  # [B, num_dense, d]
        elif self.mlp is not None:
            first = self.mlp(dense)  # [B, dense_embeddings, d]
        else:
            return embeddings
        return torch.cat([first.to(embeddings.dtype), embeddings], dim=1)  # [B, n, d]
