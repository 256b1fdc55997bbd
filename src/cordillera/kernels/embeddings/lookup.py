"""Lookup of embedding tables: bags of rows, checked, gathered and summed into ``[B, F, D]`` for all tables at once."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Lookup(NamedTuple):
    """Result of :func:`embedding_bag`.

    Attributes:
        output: Sums, ``[B, F, D]``; undefined unless ``misplaced`` is -1.
        rows: The values as rows of the flat weight, ``int64 [T]``.
        misplaced: First position of ``values`` whose id does not lie in its table, or -1 if all do.
    """

    output: Tensor
    rows: Tensor
    misplaced: int


def embedding_bag(
    weight: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    value_weights: Tensor | None,
    first_row: Tensor,
    num_rows: Tensor,
    *,
    dtype: torch.dtype,
    backend: str = "torch",
) -> Lookup:
    """Look up and sum bags of rows of many tables that lie in one flat weight; ids outside their table are never read.

    Args:
        weight: ``float32`` or ``float64 [R, D]``, contiguous: the tables one after another.
        values: ``int64 [T]``, ids counted from the start of their table, feature-major.
        offsets: ``int32`` or ``int64 [F * B + 1]``; bag ``f * B + b`` is sample ``b`` of feature ``f``. None promises
            one value a bag.
        value_weights: ``[T]`` factors, or None for ones.
        first_row: Start of each feature's table in ``weight``, ``int64 [F]``, as ``num_rows`` is its number of rows.
        dtype: Dtype of the output; sums are made at least in the precision of ``weight``, then rounded to nearest even.
        backend: ``torch``, ``numba`` or ``fbgemm``; others look up with ``torch``.
    """
    if backend in ("numba", "fbgemm") and values.numel():
        lookup: Lookup = import_module(f"cordillera.kernels.embeddings.{backend}_backend").lookup(
            weight, values, offsets, value_weights, first_row, num_rows, dtype
        )
        return lookup
    return _lookup_torch(weight, values, offsets, value_weights, first_row, num_rows, dtype)


def linearise(values: Tensor, offsets: Tensor | None, first_row: Tensor, num_rows: Tensor) -> tuple[Tensor, int]:
    """Convert ids to rows of the flat weight ``int64 [T]``; also return the position of the first misplaced id, or -1.

    On a GPU this waits for the device.
    """
    features = first_row.numel()
    if offsets is None:
        ids = values.view(features, -1)
        rows, outside = ids + first_row.unsqueeze(1), (ids < 0) | (ids >= num_rows.unsqueeze(1))
        rows, outside = rows.view(-1), outside.view(-1)
    else:
        per_feature = offsets[:: (offsets.numel() - 1) // features].diff().to(torch.int64)
        rows = values + torch.repeat_interleave(first_row, per_feature, output_size=values.numel())
        limits = torch.repeat_interleave(num_rows, per_feature, output_size=values.numel())
        outside = (values < 0) | (values >= limits)
    return rows, int(outside.nonzero()[0]) if bool(outside.any()) else -1


def _lookup_torch(
    weight: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    value_weights: Tensor | None,
    first_row: Tensor,
    num_rows: Tensor,
    dtype: torch.dtype,
) -> Lookup:
    features, dim = first_row.numel(), weight.shape[1]
    bags = values.numel() if offsets is None else offsets.numel() - 1
    batch = bags // features
    if not values.numel():
        return Lookup(weight.new_zeros((batch, features, dim), dtype=dtype), values, -1)
    rows, misplaced = linearise(values, offsets, first_row, num_rows)
    if misplaced >= 0:
        return Lookup(weight.new_empty((0, features, dim)), rows, misplaced)
    if offsets is None and value_weights is None:
        output = F.embedding(rows.view(features, batch).t(), weight)
    elif offsets is None:
        output = F.embedding(rows.view(features, batch).t(), weight)
        output = output * value_weights.to(weight.dtype).view(features, batch).t().unsqueeze(2)  # type: ignore[union-attr]
    else:
        scale = None if value_weights is None else value_weights.to(weight.dtype)
        sums = F.embedding_bag(
            rows, weight, offsets.to(torch.int64), mode="sum", per_sample_weights=scale, include_last_offset=True
        )
        output = sums.view(features, batch, dim).transpose(0, 1).contiguous()
    return Lookup(output.to(dtype), rows, misplaced)
