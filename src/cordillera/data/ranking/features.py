"""Meaning of a data set's columns, and the batch that every ranking model reads.

A person writes a ``Schema``: which columns are dense, categorical, lists, labels. A model sees a ``FeatureSpec`` once
vocabularies are fitted: the names and sizes, in order. A ``RankingBatch`` is one batch of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from cordillera.jagged import JaggedBatch

TimeUnit = Literal["s", "ms", "us", "ns"]

ANY_ID = 2**63 - 1
"""Number of rows of a table without ``num_embeddings``: ids are any numbers below it."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _ColumnFeature(_Frozen):
    name: str


class DenseFeature(_ColumnFeature):
    """Column of one number per sample.

    Attributes:
        name: Name of the column.
        transform: ``none``; ``log`` (``sign(x) * log(1 + |x|)``, then standardised); ``standardise`` (mean 0, variance
            1 over the training rows); ``quantile`` (rank among the training rows in [0, 1], from 1,024 quantiles).
        missing: Value of a blank: ``mean`` (of the training rows, after the transform), ``zero`` (after the
            transform), or ``refuse`` (an error that names row and column).
        nan: Treatment of NaN: ``refuse`` (an error that names row and column) or ``missing`` (the same as a blank).
            Infinity is always an error.
        width: Number of values per sample. If it is above 1, the column holds lists of ``width`` numbers, or rows of
            8-bit numbers (``cordillera augment``), and each of the numbers is transformed as a column of its own.
    """

    transform: Literal["none", "log", "standardise", "quantile"] = "log"
    missing: Literal["mean", "zero", "refuse"] = "mean"
    nan: Literal["refuse", "missing"] = "refuse"
    width: int = Field(1, ge=1, le=2**12)


class CategoricalFeature(_ColumnFeature):
    """Column of one id per sample.

    Attributes:
        name: Name of the column.
        encoding: ``vocabulary`` (row 0 for blanks and unseen values, rows from 1 by falling count over the training
            rows); ``hash`` (row 0 for blanks, the other ``num_embeddings - 1`` rows by a hash of value and table name
            that is stable over processes and versions);
            ``identity`` (the column already holds row numbers in ``[0, num_embeddings)``; anything else is an error).
        min_count: Number of training rows below which a value shares row 0, with ``vocabulary``.
        num_embeddings: Buckets of ``hash``, rows of ``identity``, upper limit on rows of ``vocabulary``. Default: no
            limit, so that ids of ``hash`` and ``identity`` have 63 bits, which only dynamic tables take.
        table: Name of the embedding table; features that name the same table share rows and one vocabulary, which is
            counted over the single ids among them, and over lists only if there is no single id.
            Default: a table of its own, with the name of the feature.
    """

    encoding: Literal["vocabulary", "hash", "identity"] = "vocabulary"
    min_count: int = Field(1, ge=1)
    num_embeddings: int | None = Field(None, ge=1, le=2**40)
    table: str | None = None

    @property
    def has_any_id(self) -> bool:
        """Whether ids are any numbers of 63 bits."""
        return self.encoding != "vocabulary" and self.num_embeddings is None


class ListFeature(CategoricalFeature):
    """Column of a list of ids per sample: a Parquet list column, or text with a separator.

    Attributes:
        separator: Text between entries, in text columns.
        max_length: Number of entries that are kept, the last of each list (histories are in time order).
        pooling: Reduction of a list's embeddings to one: ``sum``, ``mean`` (an empty list gives zeros in both).
    """

    separator: str = "|"
    max_length: int = Field(100, ge=1, le=2**20)
    pooling: Literal["sum", "mean"] = "mean"


class TeacherColumns(_Frozen):
    """Columns with a teacher's scores of the samples; blank for samples without a score.

    Attributes:
        scores: Column of the teacher's score by label; labels that are not named have none.
        kind: ``logit``, or ``probability``, whose logits are limited to -20 and 20.
        learnt_until: Integer column (seconds) with the time of the newest label that the teacher had learnt from. A
            score whose teacher knew labels later than the sample's timestamp is an error. Default: not checked.
    """

    scores: dict[str, str] = Field(min_length=1)
    kind: Literal["logit", "probability"] = "logit"
    learnt_until: str | None = None


class Schema(_Frozen):
    """Roles of a log's columns.

    Attributes:
        dense: Columns of numbers.
        categorical: Columns of single ids.
        lists: Columns of lists of ids.
        labels: Columns of 0 or 1, or of false and true, one per task.
        missing_labels: Whether labels may be blank: such a sample counts for its other tasks alone.
        weight: Column of sample weights, at least 0. Default: all ones.
        timestamp: Column of times that orders samples for time-ordered splits and progressive evaluation: numbers
            since 1970, dates, times, or text such as ``2026-01-31`` or ``2026-01-31 12:00:00``. They are read in whole
            seconds; times without a time zone are taken as UTC.
        timestamp_unit: Unit of a timestamp in numbers: ``s``, ``ms``, ``us`` or ``ns``. Default: the unit in which the
            first rows are times after 1973.
        group: Column by which GAUC groups samples (usually the user).
        ids: Columns that ``predict`` writes beside the scores.
        segments: Categorical features by which reports break metrics down.
        teacher: Columns with the scores of a teacher, for ``training.teacher``.
    """

    dense: tuple[DenseFeature, ...] = ()
    categorical: tuple[CategoricalFeature, ...] = ()
    lists: tuple[ListFeature, ...] = ()
    labels: tuple[str, ...] = Field(min_length=1)
    missing_labels: bool = False
    weight: str | None = None
    timestamp: str | None = None
    timestamp_unit: TimeUnit | None = None
    group: str | None = None
    ids: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    teacher: TeacherColumns | None = None

    @model_validator(mode="after")
    def _teaches_labels(self) -> Schema:
        if self.teacher is None:
            return self
        if unknown := sorted(set(self.teacher.scores) - set(self.labels)):
            raise ValueError(f"teacher.scores names what is no label: {unknown}")
        features = {feature.name for feature in (*self.dense, *self.categorical, *self.lists)}
        if both := sorted(set(self.teacher.scores.values()) & (features | set(self.labels))):
            raise ValueError(f"scores of the teacher cannot be features or labels as well: {both}")
        if self.teacher.learnt_until is not None and self.timestamp is None:
            raise ValueError("teacher.learnt_until is compared with timestamps: name the timestamp column")
        return self

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
        unnamed = sorted({feature.name for feature in self.categorical if feature.has_any_id} & set(self.segments))
        if unnamed:
            raise ValueError(f"segments have a vocabulary or num_embeddings, these have not: {unnamed}")
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
    def numbers(self) -> tuple[DenseFeature, ...]:
        """Dense features of one number each; a feature ``f`` of several numbers gives ``f[0]``, ``f[1]`` and so on."""
        found: list[DenseFeature] = []
        for feature in self.dense:
            names = [feature.name] if feature.width == 1 else [f"{feature.name}[{i}]" for i in range(feature.width)]
            found += [feature if name == feature.name else _one_of(feature, name) for name in names]
        return tuple(found)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that training reads, without duplicates."""
        bookkeeping = (name for name in (self.weight, self.timestamp, self.group) if name is not None)
        features = (feature.name for feature in (*self.dense, *self.categorical, *self.lists))
        taught: tuple[str, ...] = ()
        if self.teacher is not None:
            times = () if self.teacher.learnt_until is None else (self.teacher.learnt_until,)
            taught = (*self.teacher.scores.values(), *times)
        return tuple(dict.fromkeys((*features, *self.labels, *bookkeeping, *taught)))


def _one_of(feature: DenseFeature, name: str) -> DenseFeature:
    return feature.model_copy(update={"name": name, "width": 1})


@dataclass(frozen=True)
class SparseFeature:
    """One embedded feature of a :class:`FeatureSpec`.

    Attributes:
        name: Name of the column.
        table: Name of the table whose rows the ids are.
        pooling: Reduction of a bag to one vector: ``sum`` or ``mean``.
        is_list: Whether samples hold lists; if False, every sample holds exactly one id.
    """

    name: str
    table: str
    pooling: Literal["sum", "mean"] = "sum"
    is_list: bool = False


@dataclass(frozen=True)
class FeatureSpec:
    """Names and sizes of the features, in the order in which batches hold them.

    Attributes:
        dense: Names of the dense columns, in the order of ``RankingBatch.dense``.
        sparse: Embedded features, in the order of ``RankingBatch.sparse.keys``.
        tables: Number of rows of every embedding table, by name; :data:`ANY_ID` for ids of any value.
        tasks: Names of the labels, in the order of ``RankingBatch.labels``' columns.
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]
    tables: dict[str, int]
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class RankingBatch:
    """One batch of ``B`` samples.

    Attributes:
        dense: Dense values, ``float32 [B, num_dense]``; ``[B, 0]`` if there are none.
        sparse: Table-local row numbers, ``int64``, with keys in the order of ``FeatureSpec.sparse``.
        labels: Zeros and ones, ``float32 [B, tasks]``, NaN where one is missing; None when predicting.
        weights: Sample weights, ``float32 [B]``, or None for ones.
        groups: Group numbers for GAUC, ``int64 [B]``, or None.
        timestamps: Seconds, ``int64 [B]``, or None.
        rows: Positions of the samples in their data set, ``int64 [B]``, or None.
        teacher: Logits of a teacher, ``float32 [B, tasks]``, NaN where it has none; None without a teacher.
    """

    dense: Tensor
    sparse: JaggedBatch
    labels: Tensor | None = None
    weights: Tensor | None = None
    groups: Tensor | None = None
    timestamps: Tensor | None = None
    rows: Tensor | None = None
    teacher: Tensor | None = None

    def __len__(self) -> int:
        return self.dense.shape[0]

    def select(self, cut: Callable[[Tensor], Tensor], sparse: JaggedBatch) -> RankingBatch:
        """Return some of the samples: ``cut`` selects them from a tensor ``[B, ...]``, ``sparse`` holds their ids."""
        names = ("labels", "weights", "groups", "timestamps", "rows", "teacher")
        columns = {name: getattr(self, name) for name in names}
        cuts = {name: None if column is None else cut(column) for name, column in columns.items()}
        return RankingBatch(cut(self.dense), sparse, **cuts)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RankingBatch:
        """Move everything that models and losses read to a device; groups, timestamps and rows stay in place.

        Args:
            non_blocking: Whether to return without waiting for copies out of page-locked memory.
        """
        return replace(
            self,
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            labels=None if self.labels is None else self.labels.to(device, non_blocking=non_blocking),
            weights=None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
            teacher=None if self.teacher is None else self.teacher.to(device, non_blocking=non_blocking),
        )
