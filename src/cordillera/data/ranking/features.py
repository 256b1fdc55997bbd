"""What a data set's columns mean, and the batch that every ranking model reads.

``Schema`` is what a person writes: which columns are dense, categorical, lists, labels. ``FeatureSpec`` is what a model
sees once vocabularies are fitted: the names and sizes, in order. ``RankingBatch`` is one batch of samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from cordillera.jagged import JaggedBatch


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _ColumnFeature(_Frozen):
    name: str


class DenseFeature(_ColumnFeature):
    """A number a sample.

    Attributes:
        name: The column.
        transform: ``none``; ``log`` (``sign(x) * log(1 + |x|)``, then standardised); ``standardise`` (mean 0, variance
            1 over the training rows); ``quantile`` (rank among the training rows in [0, 1], from 1,024 quantiles).
        missing: Value of a blank: ``mean`` (of the training rows, after the transform), ``zero`` (after the
            transform), or ``refuse`` (an error that names row and column).
        nan: Treatment of NaN: ``refuse`` (an error that names row and column) or ``missing`` (the same as a blank).
            Infinity is always an error.
    """

    transform: Literal["none", "log", "standardise", "quantile"] = "log"
    missing: Literal["mean", "zero", "refuse"] = "mean"
    nan: Literal["refuse", "missing"] = "refuse"


class CategoricalFeature(_ColumnFeature):
    """An id, or with ``ListFeature`` a list of ids, a sample.

    Attributes:
        name: The column.
        encoding: ``vocabulary`` (row 0 for blanks and unseen values, rows from 1 by falling count over the training
            rows); ``hash`` (row 0 for blanks, the other ``num_embeddings - 1`` rows by a hash of value and table name
            that is stable over processes and versions);
            ``identity`` (the column already holds row numbers in ``[0, num_embeddings)``; anything else is an error).
        min_count: With ``vocabulary``, values seen less often in the training rows share row 0.
        num_embeddings: Buckets of ``hash``, rows of ``identity``, upper limit on rows of ``vocabulary``.
        table: Name of the embedding table; features that name the same table share rows and one vocabulary, which is
            counted over the single ids among them, and over lists only if there is no single id.
            Default: a table of its own, called like the feature.
    """

    encoding: Literal["vocabulary", "hash", "identity"] = "vocabulary"
    min_count: int = Field(1, ge=1)
    num_embeddings: int | None = Field(None, ge=1, le=2**40)
    table: str | None = None

    @model_validator(mode="after")
    def _size_is_known(self) -> CategoricalFeature:
        if self.encoding != "vocabulary" and self.num_embeddings is None:
            raise ValueError(f"num_embeddings is needed with encoding '{self.encoding}'")
        return self


class ListFeature(CategoricalFeature):
    """A list of ids a sample: a Parquet list column, or text with a separator.

    Attributes:
        separator: Between entries, in text columns.
        max_length: Only the last so many entries are kept (histories are in time order).
        pooling: Reduction of a list's embeddings to one: ``sum``, ``mean`` (an empty list gives zeros in both).
    """

    separator: str = "|"
    max_length: int = Field(100, ge=1, le=2**20)
    pooling: Literal["sum", "mean"] = "mean"


class Schema(_Frozen):
    """Which column of a log is what.

    Attributes:
        dense: Numbers.
        categorical: Single ids.
        lists: Lists of ids.
        labels: One 0/1 column a task.
        weight: Column of sample weights, at least 0. Default: all ones.
        timestamp: Integer column (seconds) that orders samples for time-ordered splits and progressive evaluation.
        group: Column by which GAUC groups samples (the user, as a rule).
        ids: Columns that ``predict`` writes beside the scores.
        segments: Categorical features by which reports break metrics down.
    """

    dense: tuple[DenseFeature, ...] = ()
    categorical: tuple[CategoricalFeature, ...] = ()
    lists: tuple[ListFeature, ...] = ()
    labels: tuple[str, ...] = Field(min_length=1)
    weight: str | None = None
    timestamp: str | None = None
    group: str | None = None
    ids: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _names_fit(self) -> Schema:
        names = [feature.name for feature in (*self.dense, *self.categorical, *self.lists)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"features must differ, these stand twice: {twice}")
        if not names:
            raise ValueError("a schema needs at least one feature")
        leaks = sorted(set(names) & set(self.labels))
        if leaks:
            raise ValueError(f"a label cannot be a feature as well: {leaks}")
        unknown = sorted(set(self.segments) - {feature.name for feature in self.categorical})
        if unknown:
            raise ValueError(f"segments must be categorical features, these are not: {unknown}")
        twice = sorted({name for name in self.labels if self.labels.count(name) > 1})
        if twice:
            raise ValueError(f"labels must differ, these stand twice: {twice}")
        tables: dict[str, CategoricalFeature] = {}
        for feature in (*self.categorical, *self.lists):
            first = tables.setdefault(feature.table or feature.name, feature)
            for key in ("encoding", "min_count", "num_embeddings"):
                if getattr(first, key) != getattr(feature, key):
                    raise ValueError(
                        f"'{first.name}' and '{feature.name}' share the table '{feature.table or feature.name}', "
                        f"so their {key} must be equal: {getattr(first, key)} and {getattr(feature, key)}"
                    )
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that training reads, each once."""
        bookkeeping = (name for name in (self.weight, self.timestamp, self.group) if name is not None)
        features = (feature.name for feature in (*self.dense, *self.categorical, *self.lists))
        return tuple(dict.fromkeys((*features, *self.labels, *bookkeeping)))


@dataclass(frozen=True)
class SparseFeature:
    """One embedded feature of a :class:`FeatureSpec`.

    Attributes:
        name: The column it came from.
        table: Which table its ids are rows of.
        pooling: Reduction of a bag to one vector: ``sum`` or ``mean``.
        is_list: False if every sample holds exactly one id.
    """

    name: str
    table: str
    pooling: Literal["sum", "mean"] = "sum"
    is_list: bool = False


@dataclass(frozen=True)
class FeatureSpec:
    """What a model needs to know about the data: names and sizes, in the order in which batches hold them.

    Attributes:
        dense: Names of the dense columns; ``RankingBatch.dense`` holds them in this order.
        sparse: Embedded features; ``RankingBatch.sparse.keys`` are their names in this order.
        tables: Rows of every embedding table, by name.
        tasks: Label names, in the order of ``RankingBatch.labels``' columns.
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]
    tables: dict[str, int]
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class RankingBatch:
    """One batch of ``B`` samples.

    Attributes:
        dense: ``float32 [B, num_dense]``; ``[B, 0]`` if there are none.
        sparse: Ids, ``int64`` table-local row numbers, keys in the order of ``FeatureSpec.sparse``.
        labels: ``float32 [B, tasks]`` of zeros and ones; None when predicting.
        weights: ``float32 [B]`` sample weights, or None for ones.
        groups: ``int64 [B]`` group numbers for GAUC, or None.
        timestamps: ``int64 [B]`` seconds, or None.
        rows: ``int64 [B]``, the samples' positions in their data set, or None.
    """

    dense: Tensor
    sparse: JaggedBatch
    labels: Tensor | None = None
    weights: Tensor | None = None
    groups: Tensor | None = None
    timestamps: Tensor | None = None
    rows: Tensor | None = None

    def __len__(self) -> int:
        return self.dense.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RankingBatch:
        """Move what models and losses read to a device; bookkeeping (groups, timestamps, rows) stays where it is.

        Args:
            device: Device to move to.
            non_blocking: Do not wait for copies out of page-locked memory.
        """
        return replace(
            self,
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            labels=None if self.labels is None else self.labels.to(device, non_blocking=non_blocking),
            weights=None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
        )
