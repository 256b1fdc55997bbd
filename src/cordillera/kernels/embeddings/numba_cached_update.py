"""Update of tables whose rows are kept in few bits behind a set-associative cache of float32 rows.

The distinct rows of a batch are processed once each:

    1. placement, by set: rows in the cache are marked as in use; every other row asks its set for a line and gets an
       empty one, or that of the least valuable row which this batch does not use, or none.
    2. by row: a changed row that lost its line is encoded, the row that gets the line is decoded into it, and the
       optimizer runs on the line. A row without a line is decoded, updated and encoded on the spot.

A row is encoded only if its numbers have changed since it was last encoded; a row whose scale is NaN or infinite is
refused. Each set and each row belongs to one thread, and random numbers are keyed by row and update, so results are
the same, bit for bit, for any number of threads.

Source: Yang et al. 2020 (arXiv 2010.11305).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from cordillera.kernels.compiling import compiled
from cordillera.kernels.embeddings.cached_rows import (
    EMPTY,
    FINE,
    FORMATS,
    POLICIES,
    ROUNDINGS,
    WAYS,
    BadRow,
    CachedRows,
)
from cordillera.kernels.embeddings.numba_backend import LINE, SOON, share_of, sort_positions
from cordillera.kernels.embeddings.numba_cached_lookup import ask_for, find, set_of
from cordillera.kernels.embeddings.numba_random import absorb, seeded
from cordillera.kernels.embeddings.numba_rows import decode_row, encode_row, fits
from cordillera.kernels.embeddings.numba_rules import RULES, state_arrays, step_row
from cordillera.kernels.embeddings.update import Update
from cordillera.kernels.numba_support import extent, pool, prefetch, sum_rows, threads_for

_LRU = POLICIES["lru"]
_DIRTY, _IN_USE = np.uint8(1), np.uint8(2)
_MOST = 255  # largest count of a row, in the cache or not: an older one with a larger count would never make room
_GRADIENT, _ROW = 1, 2
_MAGNITUDE, _INFINITY = np.int64(0x7FFFFFFFFFFFFFFF), np.int64(0x7FF0000000000000)  # bits of float64


@compiled()
def _victim(tags: Any, ranks: Any, states: Any, home: int) -> int:
    """Return the slot of a set to evict: an empty one, else the unused one of lowest rank, else -1."""
    ways, values, marks = tags[home], ranks[home], states[home]
    chosen = -1
    for way in range(WAYS):
        if ways[way] == EMPTY:
            return home * WAYS + way
        if not marks[way] & _IN_USE and (chosen < 0 or values[way] < values[chosen]):
            chosen = way
    return home * WAYS + chosen if chosen >= 0 else -1


@compiled(parallel=True)
def _place(rows: Any, policy: int, step: int, tags: Any, ranks: Any, states: Any, counts: Any, threads: int) -> Any:
    """Give the distinct rows of a batch their slots.

    Returns each row's slot or -1, whether the row is new there, and the row that it displaced or ``EMPTY``.
    """
    distinct, sets = rows.size, tags.shape[0]
    by_set, ranks_by_set, states_by_set = tags, ranks, states
    tags, ranks, states = tags.reshape(-1), ranks.reshape(-1), states.reshape(-1)
    slots, homes = np.empty(distinct, np.int64), np.empty(distinct, np.int64)
    new, driven_out = np.zeros(distinct, np.bool_), np.full(distinct, EMPTY, np.int64)
    for chunk in numba.prange(threads):
        for i in range(distinct * chunk // threads, distinct * (chunk + 1) // threads):
            homes[i] = set_of(rows[i], sets)
    for chunk in numba.prange(threads):
        low, high = sets * chunk // threads, sets * (chunk + 1) // threads
        for i in range(distinct):
            if not low <= homes[i] < high:
                continue
            row = rows[i]
            slot = find(by_set, homes[i], row)
            slots[i] = slot
            if slot >= 0:
                states[slot] |= _IN_USE
                ranks[slot] = step if policy == _LRU else min(ranks[slot] + 1, _MOST)
            elif policy != _LRU and counts[row] < _MOST:
                counts[row] += np.uint8(1)
        for i in range(distinct):
            if not low <= homes[i] < high or slots[i] >= 0:
                continue
            row = rows[i]
            slot = _victim(by_set, ranks_by_set, states_by_set, homes[i])
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


# One kernel: the passes over a row share some twenty buffers, which a part of it would take as arguments.
@compiled(parallel=True)
def _apply(
    kind: int, rounding: int, seed: int, step: int, first_rows: Any, payload: Any, lines: Any, states: Any, slots: Any,
    new: Any, driven_out: Any, events: Any, rule: int, rows: Any, begins: Any, places: Any,
    grad: Any, weights: Any, first_state: Any, second_state: Any, learning_rate: float,
    eps: float, weight_decay: float, beta1: float, beta2: float, correction1: float, correction2: float, threads: int,
) -> Any:  # fmt: skip
    total, dim, distinct = places.size, lines.shape[1], rows.size
    row_bytes, payload_at = payload.shape[1], payload.ctypes.data
    lines_at, first_at, second_at = lines.ctypes.data, first_state.ctypes.data, second_state.ctypes.data
    state_bytes = first_state.itemsize * (1 if rule == 2 else dim)
    bad, why = np.full(threads, -1, np.int64), np.zeros(threads, np.int64)
    happened = np.zeros((threads, events.size), np.int64)
    for chunk in numba.prange(threads):
        reduced, row_before = np.empty(dim, np.float64), np.empty(dim, np.float32)
        row_after, codes = np.empty(dim, np.float32), np.empty(dim, np.uint8)
        before_words, after_words = row_before.view(np.int32), row_after.view(np.int32)
        reduced_words = reduced.view(np.int64)
        seed_state, own = seeded(seed), happened[chunk]
        first, last = share_of(begins, chunk, threads)
        for i in range(first, last):
            row = rows[i]
            if i + SOON < distinct:
                soon = rows[i + SOON]
                ask_for(payload_at, row_bytes, lines_at, 4 * dim, soon, slots[i + SOON])
                if new[i + SOON]:
                    ask_for(payload_at, row_bytes, lines_at, 4 * dim, soon, -1)
                if rule > 0:
                    for line in range(0, state_bytes, LINE):
                        prefetch(first_at + soon * state_bytes + line)
                if rule == 3:
                    for line in range(0, state_bytes, LINE):
                        prefetch(second_at + soon * state_bytes + line)
            sum_rows(grad, places, 1, begins[i], begins[i + 1], total, weights, 0.0, dim, reduced, 0)
            largest = np.int64(0)
            for d in range(dim):
                largest = max(largest, reduced_words[d] & _MAGNITUDE)
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
                line_of_row = lines[slot]
                for d in range(dim):
                    row_before[d] = line_of_row[d]
            else:
                own[4] += 1
                decode_row(kind, payload[row], row_before)
            if largest >= _INFINITY:
                if bad[chunk] < 0:
                    bad[chunk], why[chunk] = row, _GRADIENT
                continue
            for d in range(dim):
                row_after[d] = row_before[d]
            step_row(
                rule, row, row_after, reduced, first_state, second_state, learning_rate, eps, weight_decay, beta1,
                beta2, correction1, correction2,
            )  # fmt: skip
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
                line_of_row = lines[slot]
                for d in range(dim):
                    line_of_row[d] = row_after[d]
            else:
                state = _random_state(seed_state, first_rows, row)
                encode_row(kind, rounding, row_after, low, high, payload[row], codes, state, step)
    for chunk in range(threads):
        for event in range(events.size):
            events[event] += happened[chunk, event]
    for chunk in range(threads):  # chunks are in the order of rows
        if bad[chunk] >= 0:
            return bad[chunk], why[chunk]
    return np.int64(-1), np.int64(0)


def update(store: CachedRows, call: Update) -> BadRow | None:
    """Update, in place, the rows that a batch looked up: exactly once each, with their whole gradient.

    Returns None, or the first row that was left unchanged because its gradient or its new numbers are not finite or do
    not fit the format; all other rows are updated in that case. The ``weight`` of ``call`` is not read.
    """
    if not call.rows.numel():
        return None
    optimizer = call.optimizer
    threads = threads_for(call.rows.numel())
    with pool(threads):
        batch = sort_positions(
            call.rows, call.offsets, call.grad, call.value_weights, torch.float32, store.payload.shape[0], threads
        )
        if store.tags.numel():
            slots, new, driven_out = _place(
                batch.rows, POLICIES[store.policy], call.step,
                store.tags.view(-1, WAYS).numpy(), store.ranks.view(-1, WAYS).numpy(),
                store.states.view(-1, WAYS).numpy(), store.counts.numpy(), threads,
            )  # fmt: skip
        else:
            slots, new = np.full(batch.rows.size, -1, np.int64), np.zeros(batch.rows.size, np.bool_)
            driven_out = slots
        row, why = _apply(
            FORMATS[store.kind], ROUNDINGS[store.rounding], store.seed, call.step, store.first_rows.numpy(),
            store.payload.numpy(), store.lines.numpy(), store.states.numpy(), slots, new, driven_out,
            store.events.numpy(), RULES[optimizer.name], *batch,
            *state_arrays(call.state, torch.float32), call.learning_rate, optimizer.eps, optimizer.weight_decay,
            optimizer.beta1, optimizer.beta2, *call.corrections, threads,
        )  # fmt: skip
    return None if row < 0 else BadRow(int(row), int(why) == _GRADIENT)
