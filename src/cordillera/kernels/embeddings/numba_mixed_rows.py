"""Lookup of tables that each keep their rows in a format of their own, of 2 to 32 bits, for scoring.

Scales and numbers that are NaN or infinite give NaN or infinite results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from cordillera.kernels.compiling import compiled
from cordillera.kernels.embeddings.lookup import Lookup
from cordillera.kernels.embeddings.numba_backend import LINE, factors, whole
from cordillera.kernels.embeddings.numba_rows import decode_row
from cordillera.kernels.numba_support import array, narrow, pool, prefetch, threads_for, widen

_SOON = 8  # positions to prefetch ahead


class MixedRows(NamedTuple):
    """Location and format of each feature's rows.

    Attributes:
        payload: Memory of all tables, ``uint8 [bytes]``.
        kinds: Formats, ``int64 [F]``, values of :data:`cordillera.kernels.embeddings.cached_rows.FORMATS`.
        first_byte: Start of each feature's table, ``int64 [F]``.
        row_bytes: Bytes of a row, ``int64 [F]``.
    """

    payload: Tensor
    kinds: Tensor
    first_byte: Tensor
    row_bytes: Tensor
    num_rows: Tensor
    dim: int


@compiled(parallel=True)
def _lookup(
    payload: Any, kinds: Any, first_byte: Any, row_bytes: Any, num_rows: Any, values: Any, offsets: Any, one_hot: bool,
    value_weights: Any, weighted: bool, output: Any, threads: int,
) -> int:  # fmt: skip
    batch, features, dim = output.shape
    misplaced = np.full(threads, np.iinfo(np.int64).max, np.int64)
    zero = output[0, 0, 0]
    payload_at = payload.ctypes.data
    for chunk in numba.prange(threads):
        sums, read = np.empty(dim, np.float64), np.empty(dim, np.float32)
        for f in range(features):
            kind, start, size, count = kinds[f], first_byte[f], row_bytes[f], num_rows[f]
            for b in range(batch * chunk // threads, batch * (chunk + 1) // threads):
                bag = f * batch + b
                first, last = bag, bag + 1
                if not one_hot:
                    first, last = offsets[bag], offsets[bag + 1]
                elif b + _SOON < batch:
                    value = values[bag + _SOON]
                    if 0 <= value < count:
                        for line in range(0, size, LINE):
                            prefetch(payload_at + start + value * size + line)
                target = output[b, f]
                alone = last - first == 1 and not weighted
                if not alone:
                    for d in range(dim):
                        sums[d] = 0.0
                for p in range(first, last):
                    value = values[p]
                    if value < 0 or value >= count:
                        misplaced[chunk] = min(misplaced[chunk], p)
                        continue
                    at = start + value * size
                    decode_row(kind, payload[at : at + size], read)
                    if alone:
                        for d in range(dim):
                            target[d] = narrow(widen(read[d]), zero)
                    else:
                        factor = widen(value_weights[p]) if weighted else 1.0
                        for d in range(dim):
                            sums[d] += factor * widen(read[d])
                if not alone:
                    for d in range(dim):
                        target[d] = narrow(sums[d], zero)
    return int(misplaced.min())


def lookup(
    rows: MixedRows, values: Tensor, offsets: Tensor | None, value_weights: Tensor | None, dtype: torch.dtype
) -> Lookup:
    """Look up and sum bags as ``lookup.embedding_bag``; the result's ``rows`` are the values."""
    features = rows.kinds.numel()
    bags = values.numel() if offsets is None else offsets.numel() - 1
    native = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
    output = torch.empty((bags // features, features, rows.dim), dtype=native)
    values = values.to(torch.int64).contiguous()
    if not values.numel():
        return Lookup(output.zero_().to(dtype), values, -1)
    threads = threads_for(values.numel())
    with pool(threads):
        misplaced = _lookup(
            rows.payload.numpy(), rows.kinds.numpy(), rows.first_byte.numpy(), rows.row_bytes.numpy(),
            rows.num_rows.numpy(), values.numpy(), whole(offsets), offsets is None,
            factors(value_weights, torch.float32), value_weights is not None, array(output), threads,
        )  # fmt: skip
    return Lookup(output.to(dtype), values, -1 if misplaced == np.iinfo(np.int64).max else misplaced)
