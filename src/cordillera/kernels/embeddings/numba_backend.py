"""Lookup and exact sparse update on the cores of a CPU, compiled by Numba at first use.

Both kernels read and write tensors in place: ids as the batch holds them, gradients through their strides,
``bfloat16`` as its bits. Sums are kept in float64 and rounded at the end. Threads share the work by ranges of samples
(lookup) and of sorted rows (update), and the result for a sample or a row never depends on where these ranges begin,
so results are the same, bit for bit, for any number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from cordillera.kernels.compiling import compiled
from cordillera.kernels.embeddings.lookup import Lookup
from cordillera.kernels.embeddings.numba_rules import RULES, state_arrays, step_row
from cordillera.kernels.numba_support import array, pool, prefetch, sum_rows, threads_for

if TYPE_CHECKING:
    from cordillera.kernels.embeddings.update import Update

_DIGIT_BITS = 13  # two passes sort the rows of 26 tables of a million; histograms of 8,192 counts stay near a core
SOON, LINE = 8, 64  # rows to prefetch ahead, bytes of a cache line


def unavailable() -> str | None:
    """Return None: this module imports only where Numba is installed."""
    return None


def unsupported(optimizer: str, dtype: torch.dtype, device: str) -> str | None:
    """Return why a table cannot be updated by this back end, or None if it can."""
    return None if device == "cpu" else f"the numba back end runs on CPUs, the tables are on {device!r}"


@compiled(parallel=True)
def _lookup(
    weight: Any, values: Any, offsets: Any, value_weights: Any, first_row: Any, num_rows: Any, rows: Any, output: Any,
    threads: int,
) -> int:  # fmt: skip
    batch, features, dim = output.shape
    misplaced = np.full(threads, np.iinfo(np.int64).max, np.int64)
    for chunk in numba.prange(threads):
        begin, end = batch * chunk // threads, batch * (chunk + 1) // threads
        for f in range(features):
            if offsets is None:
                last, stop = f * batch + begin, f * batch + end
            else:
                last, stop = offsets[f * batch + begin], offsets[f * batch + end]
            start, limit, placed = first_row[f], num_rows[f], True
            for p in range(last, stop):
                placed &= (values[p] >= 0) & (values[p] < limit)
                rows[p] = start + values[p]
            if not placed:
                for p in range(last, stop):
                    if values[p] < 0 or values[p] >= limit:
                        misplaced[chunk] = min(misplaced[chunk], p)
                continue
            for b in range(begin, end):
                first = last
                last = first + 1 if offsets is None else offsets[f * batch + b + 1]
                # what is alone keeps its sign
                initial = -0.0 if value_weights is None and last - first == 1 else 0.0
                sum_rows(
                    weight, rows, dim, first, last, stop, value_weights, initial, dim, output, (b * features + f) * dim
                )
    return int(misplaced.min())


@compiled(parallel=True)
def _sort(
    rows: Any, offsets: Any, one_hot: bool, by_bag: bool, batch: int, stride_b: int, stride_f: int, row_bits: int,
    origin_bits: int, threads: int,
) -> Any:  # fmt: skip
    """Sort positions by row, stably, by counting digits from the lowest; return sorted keys, and starts of origins."""
    total = rows.size
    keys, spare = np.empty(total, np.int64), np.empty(total, np.int64)
    bags = total if one_hot else offsets.size - 1
    starts = np.empty(bags if by_bag else total, np.int64)
    for chunk in numba.prange(threads):
        bag = bags * chunk // threads
        b, f = bag % batch, bag // batch
        for bag in range(bags * chunk // threads, bags * (chunk + 1) // threads):
            start = b * stride_b + f * stride_f
            if one_hot:
                starts[bag] = start
                keys[bag] = rows[bag] << origin_bits | bag
            elif by_bag:
                starts[bag] = start
                for p in range(offsets[bag], offsets[bag + 1]):
                    keys[p] = rows[p] << origin_bits | bag
            else:
                for p in range(offsets[bag], offsets[bag + 1]):
                    starts[p] = start
                    keys[p] = rows[p] << origin_bits | p
            b += 1
            if b == batch:
                b, f = 0, f + 1
    ascending = 1
    while ascending < total and rows[ascending - 1] <= rows[ascending]:
        ascending += 1
    if ascending >= total:
        return keys, starts
    passes = (row_bits + _DIGIT_BITS - 1) // _DIGIT_BITS
    digit_bits = (row_bits + passes - 1) // passes
    mask = (1 << digit_bits) - 1
    counts = np.empty((threads, 1 << digit_bits), np.int64)
    for digit in range(passes):
        shift = origin_bits + digit * digit_bits
        for chunk in numba.prange(threads):
            own = counts[chunk]
            own[:] = 0
            for i in range(total * chunk // threads, total * (chunk + 1) // threads):
                own[(keys[i] >> shift) & mask] += 1
        before = 0
        for value in range(mask + 1):
            for chunk in range(threads):
                count = counts[chunk, value]
                counts[chunk, value] = before
                before += count
        for chunk in numba.prange(threads):
            own = counts[chunk]
            for i in range(total * chunk // threads, total * (chunk + 1) // threads):
                key = keys[i]
                value = (key >> shift) & mask
                spare[own[value]] = key
                own[value] += 1
        keys, spare = spare, keys
    return keys, starts


@compiled(parallel=True)
def _in_order(values: Any, keys: Any, origin_bits: int, threads: int) -> Any:
    """Return a value of each origin in the order of the keys (:class:`Sorted`)."""
    mask, ordered = (1 << origin_bits) - 1, np.empty(keys.size, values.dtype)
    for chunk in numba.prange(threads):
        for p in range(keys.size * chunk // threads, keys.size * (chunk + 1) // threads):
            ordered[p] = values[keys[p] & mask]
    return ordered


@compiled()
def _distinct(keys: Any, origin_bits: int) -> Any:
    """Return the distinct rows of sorted keys, and the start of each one's keys, with their end."""
    rows, begins = np.empty(keys.size, np.int64), np.empty(keys.size + 1, np.int64)
    count, before = 0, np.int64(-1)
    for p in range(keys.size):  # branchless, as branches would be mispredicted
        row = keys[p] >> origin_bits
        rows[count], begins[count] = row, p
        count += row != before
        before = row
    begins[count] = keys.size
    return rows[:count].copy(), begins[: count + 1].copy()


@compiled()
def share_of(begins: Any, chunk: int, threads: int) -> Any:
    """Return a thread's first row and the one after its last: a row is of the thread in whose positions it begins."""
    distinct = begins.size - 1
    total = begins[distinct]
    first = np.searchsorted(begins[:distinct], total * chunk // threads)
    return first, np.searchsorted(begins[:distinct], total * (chunk + 1) // threads)


@compiled(parallel=True)
def _apply(
    rule: int, rows: Any, begins: Any, places: Any, grad: Any, weights: Any, weight: Any, first_state: Any,
    second_state: Any, learning_rate: float, eps: float, weight_decay: float, beta1: float, beta2: float,
    correction1: float, correction2: float, threads: int,
) -> None:  # fmt: skip
    total, dim = places.size, weight.shape[1]
    row_bytes, state_bytes = dim * weight.itemsize, first_state.itemsize
    state_bytes *= 1 if rule == 2 else dim
    weight_at = weight.ctypes.data
    first_at, second_at = first_state.ctypes.data, second_state.ctypes.data
    for chunk in numba.prange(threads):
        reduced = np.empty(dim, np.float64)
        first, last = share_of(begins, chunk, threads)
        for i in range(first, last):
            soon = rows[min(i + SOON, last - 1)]
            for line in range(0, row_bytes, LINE):
                prefetch(weight_at + soon * row_bytes + line)
            if rule > 0:
                for line in range(0, state_bytes, LINE):
                    prefetch(first_at + soon * state_bytes + line)
            if rule == 3:
                for line in range(0, state_bytes, LINE):
                    prefetch(second_at + soon * state_bytes + line)
            sum_rows(grad, places, 1, begins[i], begins[i + 1], total, weights, 0.0, dim, reduced, 0)
            step_row(
                rule, rows[i], weight[rows[i]], reduced, first_state, second_state, learning_rate, eps, weight_decay,
                beta1, beta2, correction1, correction2,
            )  # fmt: skip


@compiled(parallel=True)
def _sum(begins: Any, places: Any, grad: Any, weights: Any, sums: Any, threads: int) -> None:
    dim = sums.shape[1]
    for chunk in numba.prange(threads):
        first, last = share_of(begins, chunk, threads)
        for i in range(first, last):
            sum_rows(grad, places, 1, begins[i], begins[i + 1], places.size, weights, 0.0, dim, sums, i * dim)


def whole(offsets: Tensor | None) -> Any:
    """Convert offsets to an int64 array; None to an empty one."""
    return np.empty(0, np.int64) if offsets is None else offsets.to(torch.int64).contiguous().numpy()


def factors(value_weights: Tensor | None, dtype: torch.dtype) -> Any:
    """Convert weights of values to an array of ``dtype``; None to an empty one."""
    weights = torch.empty(0, dtype=dtype) if value_weights is None else value_weights.detach().to(dtype).contiguous()
    return weights.numpy()


def lookup(
    weight: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    value_weights: Tensor | None,
    first_row: Tensor,
    num_rows: Tensor,
    dtype: torch.dtype,
) -> Lookup:
    """Look up and sum bags (:func:`cordillera.kernels.embeddings.lookup.embedding_bag`)."""
    features = first_row.numel()
    bags = values.numel() if offsets is None else offsets.numel() - 1
    native = dtype if dtype in (torch.float32, torch.bfloat16, torch.float64) else weight.dtype
    if native == torch.float64 and weight.dtype == torch.float32:
        native = torch.float32
    output = torch.empty((bags // features, features, weight.shape[1]), dtype=native)
    values = values.to(torch.int64).contiguous()
    rows = torch.empty_like(values)
    threads = threads_for(values.numel())
    with pool(threads):
        misplaced = _lookup(
            weight.detach().numpy(), values.numpy(), None if offsets is None else whole(offsets),
            None if value_weights is None else factors(value_weights, weight.dtype), first_row.numpy(),
            num_rows.numpy(), rows.numpy(), array(output), threads,
        )  # fmt: skip
    return Lookup(output.to(dtype), rows, -1 if misplaced == np.iinfo(np.int64).max else misplaced)


class Sorted(NamedTuple):
    """A batch's positions, by the row that they looked up and then as they were.

    Attributes:
        rows: The distinct rows, ``int64 [U]``, ascending.
        begins: First position of each row, and the end of all, ``int64 [U + 1]``.
        places: Start in ``grad`` of the gradient of each position, ``int64 [T]``.
        grad: Memory of the gradients, flat.
        weights: Weight of the value of each position, ``[T]``, or None.
    """

    rows: Any
    begins: Any
    places: Any
    grad: Any
    weights: Any


def sort_positions(
    rows: Tensor, offsets: Tensor | None, grad: Tensor, value_weights: Tensor | None, dtype: torch.dtype, num_rows: int,
    threads: int,
) -> Sorted:  # fmt: skip
    """Sort a batch's positions by row, stably; call within :func:`pool`.

    A slice ``grad [B, F, D]`` of a wider gradient is read in place, unless it is neither ``dtype`` nor bfloat16.
    """
    batch, features, dim = grad.shape
    if grad.dtype not in (dtype, torch.bfloat16):
        grad = grad.to(dtype)
    if dim > 1 and grad.stride(2) != 1:
        grad = grad.contiguous()
    stride_b, stride_f = grad.stride(0), grad.stride(1)
    reach = (batch - 1) * stride_b + (features - 1) * stride_f + dim
    flat = grad.detach().as_strided((reach,), (1,))
    by_bag = value_weights is None  # there are fewer bags than positions, so that their starts stay in the cache
    row_bits = max(1, (num_rows - 1).bit_length())
    origin_bits = max(1, ((batch * features if by_bag else rows.numel()) - 1).bit_length())
    keys, starts = _sort(
        rows.contiguous().numpy(), whole(offsets), offsets is None, by_bag, batch, stride_b, stride_f, row_bits,
        origin_bits, threads,
    )  # fmt: skip
    places = _in_order(starts, keys, origin_bits, threads)
    weights = None if by_bag else _in_order(factors(value_weights, dtype), keys, origin_bits, threads)
    distinct, begins = _distinct(keys, origin_bits)
    return Sorted(distinct, begins, places, array(flat), weights)


def update(call: Update) -> None:
    """Run one update, already checked (:func:`cordillera.kernels.embeddings.update.sparse_update`)."""
    weight, optimizer = call.weight, call.optimizer
    threads = threads_for(call.rows.numel())
    with pool(threads):
        batch = sort_positions(
            call.rows, call.offsets, call.grad, call.value_weights, weight.dtype, weight.shape[0], threads
        )
        _apply(
            RULES[optimizer.name], *batch, weight.detach().numpy(), *state_arrays(call.state, weight.dtype),
            call.learning_rate, optimizer.eps, optimizer.weight_decay, optimizer.beta1, optimizer.beta2,
            *call.corrections, threads,
        )  # fmt: skip


def sum_by_row(
    rows: Tensor, offsets: Tensor | None, grad: Tensor, value_weights: Tensor | None, num_rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Sum gradients by row (:func:`cordillera.kernels.embeddings.update.sum_by_row`); ``grad`` is ``[B, F, D]``."""
    threads = threads_for(rows.numel())
    with pool(threads):
        batch = sort_positions(rows, offsets, grad, value_weights, dtype, num_rows, threads)
        sums = torch.empty(batch.rows.size, grad.shape[2], dtype=dtype)
        _sum(batch.begins, batch.places, batch.grad, batch.weights, sums.numpy(), threads)
    return torch.from_numpy(batch.rows), sums
