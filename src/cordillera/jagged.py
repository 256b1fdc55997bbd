"""Ragged data in two flat tensors: values and offsets.

Data whose length differs between samples (multi-hot features, user histories, documents) is a ``JaggedTensor``, and
several of them over the same samples are a ``JaggedBatch``. Both are validated once, where data enters (``validate``);
kernels take ``values`` and ``offsets`` without further checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cordillera.errors import DataError

if TYPE_CHECKING:  # an optional adapter, never a dependency
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Return ``int64 [B + 1]``: zero, followed by the running sum of ``lengths``, integers ``[B]``."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _check(values: Tensor, offsets: Tensor, weights: Tensor | None, where: str) -> None:
    if offsets.dim() != 1 or offsets.numel() < 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise DataError(
            f"offsets must be a one-dimensional int32 or int64 tensor with at least one entry, "
            f"got {offsets.dtype} of shape {tuple(offsets.shape)}",
            where=where,
        )
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != values.shape[0]:
        raise DataError(
            f"offsets must start at 0 and end at the number of values ({values.shape[0]}), got {first} and {last}",
            where=where,
        )
    steps = offsets[1:] - offsets[:-1]
    if steps.numel() and int(steps.min()) < 0:
        raise DataError(
            f"offsets must not decrease, but do after entry {int((steps < 0).nonzero()[0])}",
            where=where,
            remedy="build offsets with offsets_from_lengths(lengths)",
        )
    if weights is not None and weights.shape != values.shape[:1]:
        raise DataError(
            f"weights must hold one number a value: shape {(values.shape[0],)}, got {tuple(weights.shape)}", where=where
        )


@dataclass(frozen=True)
class JaggedTensor:
    """One ragged feature of ``B`` samples.

    Args:
        values: ``[T, ...]``, the entries of the samples one after another.
        offsets: ``int32`` or ``int64 [B + 1]``; sample ``b`` owns ``values[offsets[b]:offsets[b + 1]]``.
        weights: ``float32 [T]``, one weight per entry, or None for ones.
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[Any]], dtype: torch.dtype = torch.int64) -> JaggedTensor:
        """Build a tensor from ``rows``, one Python list per sample, with values of ``dtype``."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        values = torch.tensor([value for row in rows for value in row], dtype=dtype)
        return cls(values, offsets_from_lengths(lengths))

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """Number of entries of every sample, shape ``[B]``."""
        return self.offsets[1:] - self.offsets[:-1]

    def validate(self, where: str = "JaggedTensor") -> JaggedTensor:
        """Return self, or raise :class:`~cordillera.errors.DataError` that names ``where`` and the problem."""
        _check(self.values, self.offsets, self.weights, where)
        return self

    def to_lists(self) -> list[list[Any]]:
        """Return the samples as Python lists."""
        bounds = self.offsets.tolist()
        flat = self.values.tolist()
        return [flat[a:b] for a, b in pairwise(bounds)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        """Move to a device; with ``non_blocking``, without waiting for copies out of page-locked memory."""
        moved = None if self.weights is None else self.weights.to(device, non_blocking=non_blocking)
        return JaggedTensor(
            self.values.to(device, non_blocking=non_blocking), self.offsets.to(device, non_blocking=non_blocking), moved
        )


@dataclass(frozen=True)
class JaggedBatch:
    """Several ragged features of the same ``B`` samples, in one pair of tensors.

    The layout is feature-major, as in TorchRec's ``KeyedJaggedTensor``: all samples of the first feature, then all
    samples of the second. Entry ``f * B + b`` of ``offsets`` is the start of feature ``f`` of sample ``b``.

    Args:
        keys: Names of the ``F`` features, all different.
        values: ``[T, ...]``.
        offsets: ``int32`` or ``int64 [F * B + 1]``.
        weights: ``float32 [T]``, one weight per entry, or None for ones.
        one_hot: Whether every bag is known to hold exactly one value (``T == F * B``), so that offsets need not be
            used.
    """

    keys: tuple[str, ...]
    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    one_hot: bool = False

    @classmethod
    def from_features(cls, features: dict[str, JaggedTensor]) -> JaggedBatch:
        """Join features over the same samples. If one of them has weights, the others get ones.

        Raises:
            DataError: If no feature was given, or two features hold different numbers of samples.
        """
        sizes = {name: len(feature) for name, feature in features.items()}
        if len(set(sizes.values())) != 1:
            raise DataError(f"features must hold the same number of samples, got {sizes}", where="JaggedBatch")
        weights = None
        if any(feature.weights is not None for feature in features.values()):
            weights = torch.cat(
                [
                    torch.ones(f.values.shape[0], device=f.values.device) if f.weights is None else f.weights
                    for f in features.values()
                ]
            )
        lengths = torch.cat([feature.lengths for feature in features.values()])
        values = torch.cat([feature.values for feature in features.values()])
        return cls(tuple(features), values, offsets_from_lengths(lengths), weights)

    @property
    def batch_size(self) -> int:
        """``B``, the number of samples."""
        return (self.offsets.numel() - 1) // len(self.keys) if self.keys else 0

    def __len__(self) -> int:
        return self.batch_size

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return one feature as a view of ``values``; its offsets are new and begin at zero."""
        size, f = self.batch_size, self.keys.index(key)
        offsets = self.offsets[f * size : (f + 1) * size + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        weights = None if self.weights is None else self.weights[first:last]
        return JaggedTensor(self.values[first:last], offsets - first, weights)

    @property
    def lengths(self) -> Tensor:
        """Number of entries of every bag, shape ``[F * B]``."""
        return self.offsets[1:] - self.offsets[:-1]

    def validate(self, where: str = "JaggedBatch") -> JaggedBatch:
        """Return self, or raise :class:`~cordillera.errors.DataError` that names ``where`` and the problem."""
        if len(set(self.keys)) != len(self.keys):
            raise DataError(f"feature names must differ, got {list(self.keys)}", where=where)
        if self.keys and (self.offsets.numel() - 1) % len(self.keys):
            raise DataError(
                f"{self.offsets.numel()} offsets do not describe whole batches of {len(self.keys)} features",
                where=where,
            )
        _check(self.values, self.offsets, self.weights, where)
        if self.one_hot and not bool((self.lengths == 1).all()):
            raise DataError("marked one_hot, but some bag does not hold exactly one value", where=where)
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedBatch:
        """Move to a device; with ``non_blocking``, without waiting for copies out of page-locked memory."""
        weights = None if self.weights is None else self.weights.to(device, non_blocking=non_blocking)
        return replace(
            self,
            values=self.values.to(device, non_blocking=non_blocking),
            offsets=self.offsets.to(device, non_blocking=non_blocking),
            weights=weights,
        )

    def pin_memory(self) -> JaggedBatch:
        """Copy into page-locked memory, from which copies to a GPU overlap with its work."""
        weights = None if self.weights is None else self.weights.pin_memory()
        return replace(self, values=self.values.pin_memory(), offsets=self.offsets.pin_memory(), weights=weights)

    def to_torchrec(self) -> KeyedJaggedTensor:
        """Return the same tensors as a TorchRec ``KeyedJaggedTensor``, without a copy. Needs ``torchrec``."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        return KeyedJaggedTensor(
            keys=list(self.keys), values=self.values, offsets=self.offsets, weights=self.weights, stride=self.batch_size
        )

    @classmethod
    def from_torchrec(cls, kjt: KeyedJaggedTensor) -> JaggedBatch:
        """Return the tensors of a TorchRec ``KeyedJaggedTensor``, without a copy."""
        return cls(tuple(kjt.keys()), kjt.values(), kjt.offsets(), kjt.weights_or_none())


def slice_samples(batch: JaggedBatch, first: int, end: int) -> JaggedBatch:
    """Return the samples from ``first`` up to ``end`` of a batch, ``0 <= first <= end <= B``; values are copied."""
    features, size = len(batch.keys), end - first
    if batch.one_hot:
        values = batch.values.view(features, -1)[:, first:end].reshape(-1)
        weights = None if batch.weights is None else batch.weights.view(features, -1)[:, first:end].reshape(-1)
        offsets = torch.arange(features * size + 1, dtype=batch.offsets.dtype, device=values.device)
        return replace(batch, values=values, offsets=offsets, weights=weights)
    starts = range(0, features * batch.batch_size, max(1, batch.batch_size)) if batch.batch_size else [0] * features
    edges = [(int(batch.offsets[start + first]), int(batch.offsets[start + end])) for start in starts]
    lengths = torch.cat([batch.lengths[start + first : start + end] for start in starts]) if features else batch.lengths
    joined = None
    if batch.weights is not None:
        joined = torch.cat([batch.weights[low:high] for low, high in edges])
    values = torch.cat([batch.values[low:high] for low, high in edges]) if features else batch.values
    return replace(batch, values=values, offsets=offsets_from_lengths(lengths).to(batch.offsets.dtype), weights=joined)


def take_samples(batch: JaggedBatch, samples: np.ndarray) -> JaggedBatch:
    """Return the samples of a batch at the positions ``samples``, in their order; values are copied.

    The batch is on the CPU.
    """
    size = batch.batch_size
    bags = (np.arange(len(batch.keys))[:, None] * size + samples).reshape(-1)
    lengths = batch.lengths.numpy()[bags]
    places = torch.from_numpy(ragged_positions(batch.offsets.numpy()[bags], lengths))
    return replace(
        batch,
        values=batch.values.index_select(0, places),
        offsets=torch.from_numpy(offsets_of(lengths)).to(batch.offsets.dtype),
        weights=None if batch.weights is None else batch.weights.index_select(0, places),
    )


def choose_features(batch: JaggedBatch, places: Sequence[int]) -> JaggedBatch:
    """Return the features of a batch at the positions ``places``, in their order; values are copied."""
    size = batch.batch_size
    edges = batch.offsets[::size].tolist() if size else [0] * (len(batch.keys) + 1)

    def cut(values: Tensor) -> Tensor:
        return torch.cat([values[:0], *(values[edges[f] : edges[f + 1]] for f in places)])

    lengths = torch.cat([batch.lengths[:0], *(batch.lengths[f * size : (f + 1) * size] for f in places)])
    return replace(
        batch,
        keys=tuple(batch.keys[f] for f in places),
        values=cut(batch.values),
        offsets=offsets_from_lengths(lengths).to(batch.offsets.dtype),
        weights=None if batch.weights is None else cut(batch.weights),
    )


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return ``int64 [N + 1]``: zero, followed by the running sum of ``lengths``."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ragged_positions(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the positions of the entries of bags with given ``starts`` and ``lengths``, bag after bag."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
