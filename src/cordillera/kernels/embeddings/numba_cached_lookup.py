"""Lookup of rows in few bits through a cache of float32 rows, which stays unchanged.

A first pass finds the location of every value's row, a second one reads and sums; both prefetch memory. Scales and
numbers that are NaN or infinite give NaN or infinite results.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from cordillera.kernels.compiling import compiled
from cordillera.kernels.embeddings.cached_rows import FORMATS, WAYS, CachedRows
from cordillera.kernels.embeddings.lookup import Lookup
from cordillera.kernels.embeddings.numba_backend import LINE, SOON, factors, whole
from cordillera.kernels.embeddings.numba_random import mix
from cordillera.kernels.embeddings.numba_rows import decode_row
from cordillera.kernels.numba_support import array, narrow, pool, prefetch, threads_for, widen


@compiled()
def set_of(row: int, sets: int) -> Any:
    """Return the set of a row: a hash, so that neighbours and rows with a common divisor do not crowd into few sets."""
    return np.int64(((mix(np.uint64(row)) >> np.uint64(33)) * np.uint64(sets)) >> np.uint64(31))


@compiled()
def find(tags: Any, home: int, row: int) -> Any:
    """Return the slot that holds a row, or -1, by ``tags``, ``int32 [sets, WAYS]``, and the row's set ``home``."""
    ways, wanted, found = tags[home], np.int32(row), np.int32(-1)
    for way in range(WAYS):  # no early exit, so that the loop vectorises
        found = max(found, np.int32(way) if ways[way] == wanted else np.int32(-1))
    return home * WAYS + found if found >= 0 else -1


@compiled(parallel=True)
def _locate(
    tags: Any, values: Any, offsets: Any, one_hot: bool, batch: int, first_row: Any, num_rows: Any, rows: Any,
    slots: Any, threads: int,
) -> int:  # fmt: skip
    """Store every value's row, and its slot if the cache holds it, else -1; return the first misplaced position."""
    total, sets = values.size, tags.shape[0]
    tags_at = tags.ctypes.data
    misplaced = np.full(threads, np.iinfo(np.int64).max, np.int64)
    for chunk in numba.prange(threads):
        low, high = total * chunk // threads, total * (chunk + 1) // threads
        for f in range(first_row.size):
            begin, end = f * batch, (f + 1) * batch
            if not one_hot:
                begin, end = offsets[begin], offsets[end]
            for p in range(max(begin, low), min(end, high)):
                value = values[p]
                if value < 0 or value >= num_rows[f]:
                    misplaced[chunk] = min(misplaced[chunk], p)
                    continue
                rows[p] = first_row[f] + value
                if sets > 0:
                    if p + SOON < end:  # prefetching is harmless for misplaced ids too
                        home = tags_at + set_of(first_row[f] + values[p + SOON], sets) * WAYS * 4
                        prefetch(home)
                        prefetch(home + LINE)
                    slots[p] = find(tags, set_of(rows[p], sets), rows[p])
    return int(misplaced.min())


@compiled()
def ask_for(payload_at: int, row_bytes: int, lines_at: int, line_bytes: int, row: int, slot: int) -> None:
    """Prefetch a row from the cache line of its ``slot``, or from the encoded rows if that is -1.

    Addresses and sizes are in bytes.
    """
    begin, size = payload_at + row * row_bytes, row_bytes
    if slot >= 0:
        begin, size = lines_at + slot * line_bytes, line_bytes
    for line in range(0, size, LINE):
        prefetch(begin + line)


@compiled(parallel=True)
def _pool(
    kind: int, payload: Any, lines: Any, rows: Any, slots: Any, offsets: Any, one_hot: bool, value_weights: Any,
    weighted: bool, output: Any, threads: int,
) -> None:  # fmt: skip
    batch, features, dim = output.shape
    row_bytes, line_bytes = payload.shape[1], 4 * dim
    zero = output[0, 0, 0]
    payload_at, lines_at = payload.ctypes.data, lines.ctypes.data
    for chunk in numba.prange(threads):
        sums, decoded = np.empty(dim, np.float64), np.empty(dim, np.float32)
        for b in range(batch * chunk // threads, batch * (chunk + 1) // threads):
            for f in range(features):
                bag = f * batch + b
                first, last = bag, bag + 1
                if not one_hot:
                    first, last = offsets[bag], offsets[bag + 1]
                if b + 1 < batch:
                    for soon in range(last, bag + 2 if one_hot else offsets[bag + 2]):
                        ask_for(payload_at, row_bytes, lines_at, line_bytes, rows[soon], slots[soon])
                target = output[b, f]
                single = last - first == 1 and not weighted
                if not single:
                    for d in range(dim):
                        sums[d] = 0.0
                for p in range(first, last):
                    read = decoded
                    if slots[p] >= 0:
                        read = lines[slots[p]]
                    else:
                        decode_row(kind, payload[rows[p]], decoded)
                    if single:
                        for d in range(dim):
                            target[d] = narrow(read[d], zero)
                    else:
                        factor = widen(value_weights[p]) if weighted else 1.0
                        for d in range(dim):
                            sums[d] += factor * widen(read[d])
                if not single:
                    for d in range(dim):
                        target[d] = narrow(sums[d], zero)


@compiled(parallel=True)
def read_rows(kind: int, payload: Any, lines: Any, tags: Any, first: int, target: Any, threads: int) -> None:
    """Read neighbouring rows from ``first`` on, through the cache, into ``target``, ``float32 [N, D]``."""
    count, sets = target.shape[0], tags.shape[0]
    for chunk in numba.prange(threads):
        for i in range(count * chunk // threads, count * (chunk + 1) // threads):
            slot = find(tags, set_of(first + i, sets), first + i) if sets > 0 else -1
            if slot < 0:
                decode_row(kind, payload[first + i], target[i])
            else:
                target[i, :] = lines[slot]


def lookup(
    store: CachedRows,
    values: Tensor,
    offsets: Tensor | None,
    value_weights: Tensor | None,
    first_row: Tensor,
    num_rows: Tensor,
    dtype: torch.dtype,
) -> Lookup:
    """Look up and sum bags (as :func:`cordillera.kernels.embeddings.lookup.embedding_bag`)."""
    features = first_row.numel()
    bags = values.numel() if offsets is None else offsets.numel() - 1
    native = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
    output = torch.empty((bags // features, features, store.dim), dtype=native)
    values = values.to(torch.int64).contiguous()
    rows, slots = torch.empty_like(values), torch.full_like(values, -1)
    if not values.numel():
        return Lookup(output.zero_().to(dtype), rows, -1)
    threads, bounds = threads_for(values.numel()), whole(offsets)
    with pool(threads):
        misplaced = _locate(
            store.tags.view(-1, WAYS).numpy(), values.numpy(), bounds, offsets is None, bags // features,
            first_row.numpy(), num_rows.numpy(), rows.numpy(), slots.numpy(), threads,
        )  # fmt: skip
        if misplaced < values.numel():
            return Lookup(output, rows, misplaced)
        _pool(
            FORMATS[store.kind], store.payload.numpy(), store.lines.numpy(), rows.numpy(), slots.numpy(), bounds,
            offsets is None, factors(value_weights, torch.float32), value_weights is not None, array(output), threads,
        )  # fmt: skip
    return Lookup(output.to(dtype), rows, -1)
