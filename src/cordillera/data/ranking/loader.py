"""Loader of batches in a fixed order, read ahead by a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cordillera.data.ahead import map_ahead
from cordillera.data.ranking.cache import ClickDataset
from cordillera.data.ranking.features import ANY_ID, FeatureSpec, RankingBatch
from cordillera.errors import DataError
from cordillera.jagged import JaggedBatch


class BatchSource(Protocol):
    """Batches that a trainer reads: epochs of equal length, which can be started at any batch."""

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        ...

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[RankingBatch]:
        """Iterate over an ``epoch`` from batch ``start``, by a generator or another iterator with ``close``."""
        ...


class CheckedBatches(BatchSource):
    """Batches of your own for a trainer, checked before a model reads them.

    Args:
        batches: Function of the numbers of an epoch and of its first batch, which returns the batches from there on.
        count: Number of batches in an epoch.
        features: Names and sizes of the features.

    Raises:
        DataError: ``count`` is below 1.
    """

    def __init__(
        self, batches: Callable[[int, int], Iterable[RankingBatch]], count: int, features: FeatureSpec
    ) -> None:
        if count < 1:
            raise DataError(f"an epoch has at least one batch, got {count}", where="count")
        self._batches, self._count, self._features = batches, count, features

    def __len__(self) -> int:
        return self._count

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[RankingBatch]:
        """Iterate over an ``epoch`` from batch ``start``.

        Raises:
            DataError: A batch has no sample; a tensor is not of the shape and dtype that :class:`RankingBatch`
                describes; a dense value is not finite, a label is not 0, 1 or NaN, a weight is negative or not finite,
                or an id does not lie in its table; or there are more or fewer batches than the epoch has.
        """
        number = start
        for batch in self._batches(epoch, start):
            check_batch(batch, self._features, where=f"epoch {epoch}, batch {number}")
            number += 1
            if number > self._count:
                break
            yield batch
        if number != self._count:
            given = "more" if number > self._count else str(number)
            raise DataError(f"gives {given}, not {self._count} batches", where=f"epoch {epoch}")


_NUMBERS = ("dense", "labels", "weights", "teacher")  # float32 tensors; the others are int64


def check_batch(batch: RankingBatch, features: FeatureSpec, where: str = "batch") -> None:
    """Check a batch of ``features``; see :meth:`CheckedBatches.epoch`. Errors name its place, ``where``."""
    rows = len(batch) if batch.dense.ndim else 0
    if not rows:
        raise DataError("has no samples", where=where)
    tasks = [rows, len(features.tasks)]
    shapes = {"dense": [rows, len(features.dense)], "labels": tasks, "teacher": tasks}
    for name in ("dense", "labels", "weights", "teacher", "groups", "timestamps", "rows"):
        values: Tensor | None = getattr(batch, name)
        if values is None:
            continue
        shape, dtype = shapes.get(name, [rows]), torch.float32 if name in _NUMBERS else torch.int64
        if list(values.shape) != shape or values.dtype != dtype:
            what = f"{name} must be {dtype} {shape}, got {values.dtype} {list(values.shape)}"
            raise DataError(what.replace("torch.", ""), where=where)
        if name in _NUMBERS:
            _check_numbers(name, values, features, where)
    _check_ids(batch.sparse, rows, features, where)


def _check_numbers(name: str, values: Tensor, features: FeatureSpec, where: str) -> None:
    allowed, rule = {
        "dense": (values.isfinite(), "must be finite"),
        "labels": (values.isnan() | (values == 0) | (values == 1), "must be 0, 1 or NaN"),
        "weights": (values.isfinite() & (values >= 0), "must be finite and at least 0"),
        "teacher": (~values.isinf(), "must be finite or NaN"),
    }[name]
    if not allowed.all():
        at = [int(place) for place in (~allowed).nonzero()[0]]
        columns = features.dense if name == "dense" else features.tasks
        column = name if len(at) == 1 else f"{name}, {columns[at[1]]!r}"
        raise DataError(f"{column} of sample {at[0]} is {float(values[tuple(at)]):g}, {rule}", where=where)


def _check_ids(sparse: JaggedBatch, rows: int, features: FeatureSpec, where: str) -> None:
    names = [feature.name for feature in features.sparse]
    if list(sparse.keys) != names:
        raise DataError(f"the sparse features must be {names}, got {list(sparse.keys)}", where=where)
    if not names:
        return
    if sparse.values.dtype != torch.int64 or sparse.values.ndim != 1:
        what = f"ids must be int64 [T], got {sparse.values.dtype} {list(sparse.values.shape)}"
        raise DataError(what.replace("torch.", ""), where=where)
    sparse.validate(where)
    if sparse.batch_size != rows:
        raise DataError(f"holds {rows} samples, but ids of {sparse.batch_size}", where=where)
    if sparse.weights is not None and not (sparse.weights.dtype == torch.float32 and sparse.weights.isfinite().all()):
        raise DataError("weights of ids must be float32 and finite", where=where)
    for feature in features.sparse:
        one, size = sparse[feature.name], features.tables[feature.table]
        if not feature.is_list and not bool((one.lengths == 1).all()):
            bad = int((one.lengths != 1).nonzero()[0])
            what = f"'{feature.name}' must hold one id a sample, sample {bad} holds {int(one.lengths[bad])}"
            raise DataError(what, where=where)
        wrong = (one.values < 0) | (one.values >= size)
        if size != ANY_ID and wrong.any():
            bad = int(one.values[wrong][0])
            raise DataError(f"id {bad} of '{feature.name}' is not in its table of {size} rows", where=where)


BLOCK = 1024
"""Number of neighbouring rows that shuffle ``blocks`` reads together."""

WINDOW = 256
"""Number of blocks whose rows shuffle ``blocks`` mixes with each other."""


class Loader:
    """Cuts a split into batches.

    The order of an epoch depends only on ``seed`` and the epoch's number, so any epoch can be entered at any batch.

    Args:
        dataset: Split whose rows are cut.
        batch_size: Number of rows in a batch.
        shuffle: ``none`` (as on disk, that is in time order after a time split), ``global`` (a permutation of all rows;
            8 bytes of memory a row), or ``blocks`` (for data larger than memory: blocks of 1,024 neighbours in random
            order, rows mixed within windows of 256 blocks; reads stay largely sequential).
        seed: Seed of the shuffles.
        drop_last: Whether to leave out a last batch of fewer rows.
        prefetch: Number of batches that a thread reads ahead; 0 reads in the caller's thread.

    Raises:
        DataError: a batch size below 1, a negative prefetch or an unknown shuffle.
    """

    def __init__(
        self,
        dataset: ClickDataset,
        batch_size: int,
        *,
        shuffle: str = "none",
        seed: int = 0,
        drop_last: bool = False,
        prefetch: int = 1,
    ) -> None:
        if batch_size < 1 or prefetch < 0:
            raise DataError(f"batch_size must be at least 1 and prefetch at least 0, got {batch_size} and {prefetch}")
        if shuffle not in ("none", "blocks", "global"):
            raise DataError(f"unknown shuffle '{shuffle}'", remedy="choose none, blocks or global")
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.drop_last, self.prefetch = drop_last, prefetch

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        rows = len(self.dataset)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def order(self, epoch: int = 0) -> Iterator[np.ndarray | slice]:
        """Iterate over the rows of every batch of an epoch."""
        return self._order(epoch, 0)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[RankingBatch]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: Number of the epoch.
            start: Number of the first batch to give; ``epoch(e, k)`` gives what ``epoch(e)`` gives after ``k`` batches.

        Raises:
            DataError: ``start`` is negative or beyond the epoch's end.
        """
        if not 0 <= start <= len(self):
            raise DataError(f"an epoch has {len(self)} batches, cannot start at {start}", where="Loader.epoch")
        order = self._order(epoch, start)
        if not self.prefetch:
            return map(self.dataset.batch, order)
        return map_ahead(self.dataset.batch, order, threads=1, ahead=self.prefetch)

    def _order(self, epoch: int, start: int) -> Iterator[np.ndarray | slice]:
        rows, size = len(self.dataset), self.batch_size
        if self.shuffle == "blocks":
            yield from self._blocks(epoch, start)
            return
        permutation = None
        if self.shuffle == "global":
            permutation = np.random.default_rng([self.seed, epoch]).permutation(rows)
        for index in range(start, len(self)):
            chosen = slice(index * size, min((index + 1) * size, rows))
            yield chosen if permutation is None else permutation[chosen]

    def _blocks(self, epoch: int, start: int) -> Iterator[np.ndarray]:
        rows, size = len(self.dataset), self.batch_size
        count = -(-rows // BLOCK)
        order = np.random.default_rng([self.seed, epoch]).permutation(count)
        lengths = np.where(order == count - 1, rows - (count - 1) * BLOCK, BLOCK) if count else order
        skip, waiting, index = start * size, np.empty(0, dtype=np.int64), start
        for window in range(0, count, WINDOW):
            blocks = order[window : window + WINDOW]
            inside = int(lengths[window : window + WINDOW].sum())
            if skip >= inside:
                skip -= inside
                continue
            mixed = np.concatenate([np.arange(b * BLOCK, min((b + 1) * BLOCK, rows), dtype=np.int64) for b in blocks])
            np.random.default_rng([self.seed, epoch, window]).shuffle(mixed)
            waiting = np.concatenate([waiting, mixed[skip:]])
            skip = 0
            while len(waiting) >= size and index < len(self):
                yield waiting[:size]
                waiting, index = waiting[size:], index + 1
        if len(waiting) and index < len(self):
            yield waiting
