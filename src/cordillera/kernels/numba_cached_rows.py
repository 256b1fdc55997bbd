"""Lookup and update of tables whose rows are kept in few bits behind a set-associative cache of float32 rows.

A lookup reads a row from the cache where it is there and decodes it where it is not; it changes nothing. An update
takes a batch's distinct rows, once each:

    1. placement, by set: rows in the cache are marked as in use; every other row asks its set for a line and gets an
       empty one, or that of the least valuable row which this batch does not use, or none.
    2. by row: a changed row that lost its line is encoded, the row that gets the line is decoded into it, and the
       optimizer runs on the line. A row without a line is decoded, updated and encoded on the spot.

A row is encoded only when its numbers have changed since it was last encoded. Sets are dealt out to threads whole, and
so are rows; with random numbers keyed by row and update, results are the same, bit for bit, for any number of threads.

Source: Yang et al. 2020 (arXiv 2010.11305).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from cordillera.kernels.cached_rows import EMPTY, FINE, FORMATS, POLICIES, ROUNDINGS, WAYS, BadRow, CachedRows
from cordillera.kernels.compiling import compiled
from cordillera.kernels.embedding_bag import Lookup
from cordillera.kernels.numba_embeddings import AHEAD, LINE, factors, sort_positions, whole
from cordillera.kernels.numba_random import absorb, mix, seeded
from cordillera.kernels.numba_rows import decode_row, encode_row, extent, fits
from cordillera.kernels.numba_rules import RULES, state_arrays, step_row
from cordillera.kernels.numba_support import array, narrow, pool, prefetch, threads_for, widen
from cordillera.kernels.sparse_update import Update

_LRU = POLICIES["lru"]
_DIRTY, _IN_USE = np.uint8(1), np.uint8(2)
_MOST = 255  # what a row's counter outside the cache holds at most
_GRADIENT, _ROW = 1, 2
_SOON = 8  # positions that a lookup looks ahead


@compiled()
def _set_of(row: int, sets: int) -> Any:
    """A hash, so that neither neighbours nor rows with a common divisor crowd into few sets."""
    return np.int64(((mix(np.uint64(row)) >> np.uint64(33)) * np.uint64(sets)) >> np.uint64(31))


@compiled()
def _find(tags: Any, home: int, row: int) -> Any:
    """The slot that holds a row, or -1."""
    wanted, found = np.int32(row), np.int32(-1)
    first = home * WAYS
    for way in range(WAYS):  # to the end, so that it is done several ways at a time
        found = max(found, np.int32(way) if tags[first + way] == wanted else np.int32(-1))
    return first + found if found >= 0 else -1


@compiled()
def _read(kind: int, payload: Any, lines: Any, tags: Any, sets: int, row: int, target: Any) -> None:
    slot = _find(tags, _set_of(row, sets), row) if sets > 0 else -1
    if slot < 0:
        decode_row(kind, payload[row], target)
        return
    line = lines[slot]
    for d in range(target.size):
        target[d] = line[d]


@compiled(parallel=True)
def _lookup(
    kind: int,
    payload: Any,
    lines: Any,
    tags: Any,
    values: Any,
    offsets: Any,
    one_hot: bool,
    value_weights: Any,
    weighted: bool,
    first_row: Any,
    num_rows: Any,
    rows: Any,
    output: Any,
    threads: int,
) -> int:
    batch, features, dim = output.shape
    sets, row_bytes = tags.size // WAYS, payload.shape[1]
    misplaced = np.full(threads, np.iinfo(np.int64).max, np.int64)
    zero = output[0, 0, 0]
    payload_at, tags_at = payload.ctypes.data, tags.ctypes.data
    for chunk in numba.prange(threads):
        sums, read = np.empty(dim, np.float64), np.empty(dim, np.float32)
        for b in range(batch * chunk // threads, batch * (chunk + 1) // threads):
            for f in range(features):
                bag = f * batch + b
                first, last = bag, bag + 1
                if not one_hot:
                    first, last = offsets[bag], offsets[bag + 1]
                elif b + _SOON < batch:
                    value = values[bag + _SOON]
                    if 0 <= value < num_rows[f]:
                        soon = first_row[f] + value
                        for line in range(0, row_bytes, LINE):
                            prefetch(payload_at + soon * row_bytes + line)
                        if sets > 0:
                            home = tags_at + _set_of(soon, sets) * WAYS * 4
                            prefetch(home)
                            prefetch(home + LINE)
                target = output[b, f]
                if last - first != 1 or weighted:
                    for d in range(dim):
                        sums[d] = 0.0
                for p in range(first, last):
                    value = values[p]
                    if value < 0 or value >= num_rows[f]:
                        misplaced[chunk] = min(misplaced[chunk], p)
                        continue
                    row = first_row[f] + value
                    rows[p] = row
                    _read(kind, payload, lines, tags, sets, row, read)
                    if last - first == 1 and not weighted:
                        for d in range(dim):
                            target[d] = narrow(widen(read[d]), zero)
                    else:
                        factor = widen(value_weights[p]) if weighted else 1.0
                        for d in range(dim):
                            sums[d] += factor * widen(read[d])
                if last - first != 1 or weighted:
                    for d in range(dim):
                        target[d] = narrow(sums[d], zero)
    return int(misplaced.min())


@compiled(parallel=True)
def read_rows(kind: int, payload: Any, lines: Any, tags: Any, first: int, target: Any, threads: int) -> None:
    """Read rows that lie one after another, through the cache.

    Args:
        kind: A value of ``FORMATS``.
        payload: As in :class:`CachedRows`, like the two that follow.
        lines: As there.
        tags: As there.
        first: The first row.
        target: ``float32 [N, D]``.
        threads: To share the work.
    """
    count, sets = target.shape[0], tags.size // WAYS
    for chunk in numba.prange(threads):
        for i in range(count * chunk // threads, count * (chunk + 1) // threads):
            _read(kind, payload, lines, tags, sets, first + i, target[i])


@compiled()
def _begins(keys: Any, position_bits: int) -> Any:
    """Where each distinct row's keys begin, and their end."""
    begins = np.empty(keys.size + 1, np.int64)
    count, before = 0, np.int64(-1)
    for p in range(keys.size):
        row = keys[p] >> position_bits
        if row != before:
            begins[count] = p
            count, before = count + 1, row
    begins[count] = keys.size
    return begins[: count + 1].copy()


@compiled()
def _victim(tags: Any, ranks: Any, states: Any, home: int) -> int:
    """The slot of a set to give away: an empty one, else that of the lowest rank which is not in use, else -1."""
    chosen = -1
    for slot in range(home * WAYS, (home + 1) * WAYS):
        if tags[slot] == EMPTY:
            return slot
        if not states[slot] & _IN_USE and (chosen < 0 or ranks[slot] < ranks[chosen]):
            chosen = slot
    return chosen


@compiled(parallel=True)
def _place(
    keys: Any, position_bits: int, begins: Any, policy: int, step: int, tags: Any, ranks: Any, states: Any, counts: Any,
    threads: int,
) -> Any:  # fmt: skip
    """Give the distinct rows of a batch their slots.

    Returns:
        Each row's slot or -1; whether it is new there; the row that it drove out or ``EMPTY``.
    """
    distinct, sets = begins.size - 1, tags.size // WAYS
    slots, homes = np.empty(distinct, np.int64), np.empty(distinct, np.int64)
    new, driven_out = np.zeros(distinct, np.bool_), np.full(distinct, EMPTY, np.int64)
    for chunk in numba.prange(threads):
        for i in range(distinct * chunk // threads, distinct * (chunk + 1) // threads):
            homes[i] = _set_of(keys[begins[i]] >> position_bits, sets)
    for chunk in numba.prange(threads):
        low, high = sets * chunk // threads, sets * (chunk + 1) // threads
        for i in range(distinct):
            if not low <= homes[i] < high:
                continue
            row = keys[begins[i]] >> position_bits
            slot = _find(tags, homes[i], row)
            slots[i] = slot
            if slot >= 0:
                states[slot] |= _IN_USE
                ranks[slot] = step if policy == _LRU else ranks[slot] + 1
            elif policy != _LRU and counts[row] < _MOST:
                counts[row] += np.uint8(1)
        for i in range(distinct):
            if not low <= homes[i] < high or slots[i] >= 0:
                continue
            row = keys[begins[i]] >> position_bits
            slot = _victim(tags, ranks, states, homes[i])
            if slot < 0:
                continue
            if tags[slot] != EMPTY:
                if policy != _LRU:
                    if counts[row] <= ranks[slot]:
                        continue
                    counts[tags[slot]] = np.uint8(min(ranks[slot], _MOST))
                driven_out[i] = tags[slot]
            slots[i], new[i] = slot, True
            tags[slot] = np.int32(row)
            ranks[slot] = step if policy == _LRU else np.int32(counts[row])
            states[slot] |= _IN_USE
    return slots, new, driven_out


@compiled()
def _random_state(seed_state: Any, first_rows: Any, row: int) -> Any:
    table = np.searchsorted(first_rows, row, side="right") - 1
    return absorb(absorb(seed_state, table), row - first_rows[table])


@compiled(parallel=True)
def _apply(
    kind: int,
    rounding: int,
    seed: int,
    step: int,
    first_rows: Any,
    payload: Any,
    lines: Any,
    states: Any,
    slots: Any,
    new: Any,
    driven_out: Any,
    events: Any,
    rule: int,
    keys: Any,
    position_bits: int,
    begins: Any,
    starts: Any,
    grad: Any,
    value_weights: Any,
    weighted: bool,
    first_state: Any,
    second_state: Any,
    learning_rate: float,
    eps: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    correction1: float,
    correction2: float,
    threads: int,
) -> Any:
    total, dim, distinct = keys.size, lines.shape[1], begins.size - 1
    mask = (1 << position_bits) - 1
    row_bytes, payload_at = payload.shape[1], payload.ctypes.data
    grad_at, grad_bytes = grad.ctypes.data, grad.itemsize
    bad, why = np.full(threads, -1, np.int64), np.zeros(threads, np.int64)
    happened = np.zeros((threads, events.size), np.int64)
    for chunk in numba.prange(threads):
        reduced, row_before = np.empty(dim, np.float64), np.empty(dim, np.float32)
        row_after, codes = np.empty(dim, np.float32), np.empty(dim, np.uint8)
        before_words, after_words = row_before.view(np.int32), row_after.view(np.int32)
        seed_state, own = seeded(seed), happened[chunk]
        # threads share the positions evenly; a row belongs to the one in whose range it begins
        first = np.searchsorted(begins[:distinct], total * chunk // threads)
        last = np.searchsorted(begins[:distinct], total * (chunk + 1) // threads)
        for i in range(first, last):
            row = keys[begins[i]] >> position_bits
            if i + _SOON < distinct:
                soon = payload_at + (keys[begins[i + _SOON]] >> position_bits) * row_bytes
                for line in range(0, row_bytes, LINE):
                    prefetch(soon + line)
            for d in range(dim):
                reduced[d] = 0.0
            for p in range(begins[i], begins[i + 1]):
                position = keys[p] & mask
                if p + AHEAD < total:
                    begin = grad_at + starts[keys[p + AHEAD] & mask] * grad_bytes
                    for line in range(0, dim * grad_bytes, LINE):
                        prefetch(begin + line)
                source = grad[starts[position] : starts[position] + dim]
                factor = widen(value_weights[position]) if weighted else 1.0
                for d in range(dim):
                    reduced[d] += factor * widen(source[d])
            size = 0.0
            for d in range(dim):
                size += abs(reduced[d])
            slot = slots[i]
            if slot >= 0:
                own[0 if not new[i] else 1] += 1
                if driven_out[i] != EMPTY:
                    own[2] += 1
                    if states[slot] & _DIRTY:
                        own[3] += 1
                        old = lines[slot]
                        low, high, _ = extent(old)
                        state = _random_state(seed_state, first_rows, driven_out[i])
                        encode_row(kind, rounding, old, low, high, payload[driven_out[i]], codes, state, step)
                if new[i]:
                    decode_row(kind, payload[row], lines[slot])
                    states[slot] = 0
                states[slot] &= _DIRTY
                for d in range(dim):
                    row_before[d] = lines[slot, d]
            else:
                own[4] += 1
                decode_row(kind, payload[row], row_before)
            if not size < np.inf:
                if bad[chunk] < 0:
                    bad[chunk], why[chunk] = row, _GRADIENT
                continue
            for d in range(dim):
                row_after[d] = row_before[d]
            step_row(
                rule,
                row,
                row_after,
                reduced,
                first_state,
                second_state,
                learning_rate,
                eps,
                weight_decay,
                beta1,
                beta2,
                correction1,
                correction2,
            )
            low, high, finite = extent(row_after)
            if fits(kind, low, high, finite) != FINE:
                if bad[chunk] < 0:
                    bad[chunk], why[chunk] = row, _ROW
                continue
            differences = 0
            for d in range(dim):
                differences |= before_words[d] ^ after_words[d]
            if differences == 0:
                continue
            if slot >= 0:
                states[slot] = _DIRTY
                for d in range(dim):
                    lines[slot, d] = row_after[d]
            else:
                state = _random_state(seed_state, first_rows, row)
                encode_row(kind, rounding, row_after, low, high, payload[row], codes, state, step)
    for chunk in range(threads):
        for event in range(events.size):
            events[event] += happened[chunk, event]
    for chunk in range(threads):  # in the order of rows
        if bad[chunk] >= 0:
            return bad[chunk], why[chunk]
    return np.int64(-1), np.int64(0)


def lookup(
    store: CachedRows,
    values: Tensor,
    offsets: Tensor | None,
    value_weights: Tensor | None,
    first_row: Tensor,
    num_rows: Tensor,
    dtype: torch.dtype,
) -> Lookup:
    """Look up and sum bags (as :func:`cordillera.kernels.embedding_bag.embedding_bag`).

    Args:
        store: The rows.
        values: ``int64 [T]``, ids within their table.
        offsets: ``[F * B + 1]``, or None for one value a bag.
        value_weights: ``[T]`` factors, or None.
        first_row: ``int64 [F]``.
        num_rows: ``int64 [F]``.
        dtype: Of the output.

    Returns:
        Output, rows, and the first misplaced position.
    """
    features = first_row.numel()
    bags = values.numel() if offsets is None else offsets.numel() - 1
    native = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
    output = torch.empty((bags // features, features, store.dim), dtype=native)
    values = values.to(torch.int64).contiguous()
    rows = torch.empty_like(values)
    if not values.numel():
        return Lookup(output.zero_().to(dtype), rows, -1)
    threads = threads_for(values.numel())
    with pool(threads):
        misplaced = _lookup(
            FORMATS[store.kind],
            store.payload.numpy(),
            store.lines.numpy(),
            store.tags.numpy(),
            values.numpy(),
            whole(offsets),
            offsets is None,
            factors(value_weights, torch.float32),
            value_weights is not None,
            first_row.numpy(),
            num_rows.numpy(),
            rows.numpy(),
            array(output),
            threads,
        )
    return Lookup(output.to(dtype), rows, -1 if misplaced == np.iinfo(np.int64).max else misplaced)


def update(store: CachedRows, call: Update) -> BadRow | None:
    """Update, in place, the rows that a batch looked up: exactly once each, with their whole gradient.

    Args:
        store: The rows.
        call: As :func:`cordillera.kernels.sparse_update.sparse_update` makes it; its ``weight`` is not read.

    Returns:
        None, or the first row that was left as it was, because its gradient or its new numbers are not finite or do
        not fit the format; all others are updated then.
    """
    if not call.rows.numel():
        return None
    optimizer, value_weights = call.optimizer, call.value_weights
    threads = threads_for(call.rows.numel())
    tags, states = store.tags.numpy(), store.states.numpy()
    with pool(threads):
        batch = sort_positions(call.rows, call.offsets, call.grad, torch.float32, store.payload.shape[0], threads)
        begins = _begins(batch.keys, batch.position_bits)
        if tags.size:
            slots, new, driven_out = _place(
                batch.keys,
                batch.position_bits,
                begins,
                POLICIES[store.policy],
                call.step,
                tags,
                store.ranks.numpy(),
                states,
                store.counts.numpy(),
                threads,
            )
        else:
            slots, new = np.full(begins.size - 1, -1, np.int64), np.zeros(begins.size - 1, np.bool_)
            driven_out = slots
        row, why = _apply(
            FORMATS[store.kind],
            ROUNDINGS[store.rounding],
            store.seed,
            call.step,
            store.first_rows.numpy(),
            store.payload.numpy(),
            store.lines.numpy(),
            states,
            slots,
            new,
            driven_out,
            store.events.numpy(),
            RULES[optimizer.name],
            batch.keys,
            batch.position_bits,
            begins,
            batch.starts,
            batch.grad,
            factors(value_weights, torch.float32),
            value_weights is not None,
            *state_arrays(call.state, torch.float32),
            call.learning_rate,
            optimizer.eps,
            optimizer.weight_decay,
            optimizer.beta1,
            optimizer.beta2,
            *call.corrections,
            threads,
        )
    return None if row < 0 else BadRow(int(row), int(why) == _GRADIENT)
