"""What all ranking models have in common: tables, a representation, heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
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


class RankingConfig(BaseModel):
    """Base of every model's Config: fixed once made, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DeepConfig(RankingConfig):
    """What the Configs of all models with a trunk and heads share.

    Attributes:
        embedding_dim: Width ``d`` of every embedding.
        embedding_init: Standard deviation of normally distributed initial embeddings, or ``uniform_by_rows``: uniform
            within ``sqrt(1 / rows of the table)`` of zero.
        head_mlp: Hidden widths of each task's tower on the shared representation; empty for one linear layer a task.
        dropout: Probability with which activations of hidden layers are zeroed while training.
        mods: LoKA's changes for low precision: ``no-bias`` (no biases but the prediction layers'), ``block-norm``
            (root-mean-square norms over blocks, without weights, in place of layer norms), ``hard-swish`` (in place of
            ReLU).
        norm_block: Features of a block of ``block-norm``; where a width is no multiple the last block is smaller.
    """

    embedding_dim: int = Field(16, ge=1, le=2**16)
    embedding_init: EmbeddingInit = 0.05
    head_mlp: Sizes = ()
    dropout: Probability = 0.0
    mods: tuple[ModName, ...] = ()
    norm_block: int = Field(256, ge=1, le=2**20)


class RankingModel(nn.Module):
    """A model that scores samples: embedding tables, a dense part that represents a sample, and heads.

    Subclasses set ``tables`` and ``heads`` and define :meth:`represent`. The dense part (:meth:`score`) is a pure
    function of tensors: this is what is compiled and run under autocast, while tables stay outside.

    Args:
        features: Names and sizes of the inputs.

    Attributes:
        built: :func:`~cordillera.models.ranking.mods.weights_sum` as ``build`` left it; None if another made the model.

    Raises:
        DataError: there is no feature, or no task.
    """

    tables: EmbeddingTables
    heads: nn.Module
    built: float | None = None

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
        """Logits ``[B, tasks]`` of a batch, columns in the order of ``FeatureSpec.tasks``."""
        if self.features.sparse:
            embeddings = self.tables(batch.sparse)
        else:  # an empty sparse batch does not know how many samples it has
            embeddings = batch.dense.new_zeros(len(batch), 0, self.tables.embedding_dim)
        return self.score(batch.dense, embeddings)

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """The shared representation that all heads read.

        Args:
            dense: ``[B, num_dense]``.
            embeddings: ``[B, F, d]``, in the order of ``FeatureSpec.sparse``.

        Returns:
            ``[B, r]``.
        """
        raise NotImplementedError

    def score(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits ``[B, tasks]`` of dense inputs ``[B, num_dense]`` and embeddings ``[B, F, d]``."""
        return self.heads(self.represent(dense, embeddings))


class DeepModel(RankingModel):
    """A ranking model whose tables have the width ``embedding_dim`` of its Config.

    Args:
        config: The model's Config.
        features: Names and sizes of the inputs.
        tables: Settings of the embedding tables.
    """

    def __init__(self, config: DeepConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(features)
        self.config = config
        self.tables = make_tables(features, config.embedding_dim, tables, init=config.embedding_init)

    def make_heads(self, inputs: int) -> Heads:
        """The heads that the Config describes, on a representation of width ``inputs``."""
        return Heads(self.features.tasks, inputs, self.config.head_mlp, self.config.dropout)


class EmbeddingLayer(nn.Module):
    """The first embeddings ``X_0`` of DHEN and Wukong: those of the dense inputs, then those of the sparse ones.

    Args:
        num_dense: Dense inputs; 0 for none, and then there are no dense embeddings.
        num_sparse: Embedded features ``F``.
        embedding_dim: ``d``.
        hidden: Hidden widths of the MLP over all dense inputs (Zhang et al. 2024, section 3.2).
        dense_embeddings: Embeddings that this MLP makes.
        separate: Instead of the MLP give each dense input ``x_j`` an embedding of its own, ``x_j v_j`` with a learned
            vector ``v_j``.
        dropout: Dropout of the MLP's hidden layers.

    Attributes:
        outputs: Number of embeddings.
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
