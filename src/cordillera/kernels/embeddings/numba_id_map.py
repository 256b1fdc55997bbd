"""Hash map from pairs of a table and a 64-bit id to rows, and initial values of rows, compiled by Numba.

The map is an array ``words``, ``int64 [2 * entries]``: each entry is an id and a payload, and four entries are a
bucket, which fills a cache line. The number of entries is a power of two. A payload is 0 for an empty entry, else
``(table + 1) << 47 | content``, where the content is the number of the id's row, or, for an id without a row,
``2**46 | count << 38 | stamp``. The search for an id begins at an entry given by a hash, goes round its bucket, and
then through the next buckets, up to an empty entry. Entries are never removed; eviction builds a new map.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from cordillera.kernels.compiling import compiled
from cordillera.kernels.embeddings.numba_random import absorb, fraction, mix, seeded
from cordillera.kernels.numba_support import prefetch

TABLE_SHIFT, COUNT_SHIFT = 47, 38
CANDIDATE = 1 << 46
ROW_MASK = (1 << 32) - 1
STAMP_MASK = (1 << COUNT_SHIFT) - 1
COUNT_MASK = 0xFF
USED, FREE, FILLED, NEW = 0, 1, 2, 3  # counters of `admit`
_SOON = 16  # ids to look ahead, a power of two
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_1, _2, _IN_BUCKET, _BUCKET = np.uint64(1), np.uint64(2), np.uint64(7), np.uint64(8)  # in units of words
_16, _24_BITS = np.uint64(16), np.uint64(0xFFFFFF)
_STEP, _TURN = 2.0**-24, 2.0 * np.pi


@compiled()
def _home(words: Any, table: int, key: int) -> Any:
    """Return the position in ``words`` of the entry at which the search for an id begins, a uint64."""
    hashed = mix(np.uint64(key) ^ (np.uint64(table + 1) * _INCREMENT))
    return (hashed << _1) & np.uint64(words.size - 1)


@compiled()
def _search(words: Any, home: Any, table: int, key: int) -> Any:
    """Return the position in ``words`` of an id, or ``-1 - position`` of the empty entry where it belongs.

    ``home`` is the result of :func:`_home`.
    """
    # Positions are unsigned, because negative ones would be tested for at every access, and no views are made, because
    # counting references to them costs more than the search.
    wanted, place, bucket = np.int64(table + 1), home, home & ~_IN_BUCKET
    while True:
        for _ in range(4):
            payload = words[place + _1]
            if words[place] == key and payload >> TABLE_SHIFT == wanted:
                return np.int64(place)
            if payload == 0:
                return -1 - np.int64(place)
            place = bucket | ((place + _2) & _IN_BUCKET)
        place = bucket = (bucket + _BUCKET) & np.uint64(words.size - 1)


@compiled()
def _entry(words: Any, table: int, key: int) -> Any:
    """Search an id from its home."""
    return _search(words, _home(words, table, key), table, key)


@compiled()
def _row_at(words: Any, place: int) -> Any:
    """Return the row at the result of a search, or -1 if the id has none."""
    if place < 0:
        return np.int64(-1)
    payload = words[np.uint64(place) + _1]
    return np.int64(-1) if payload & CANDIDATE else payload & ROW_MASK


@compiled()
def find_between(words: Any, ids: Any, bounds: Any, tables: Any, shared: bool, rows: Any, low: int, high: int) -> None:
    """Store the rows of ``ids[low:high]``; ids without one get -1, or with ``shared`` the number of their table."""
    words_at, homes = words.ctypes.data, np.empty(_SOON, np.uint64)
    for part in range(tables.size):
        table, begin, end = tables[part], max(bounds[part], low), min(bounds[part + 1], high)
        for p in range(begin - _SOON, end):
            home = homes[p & (_SOON - 1)]
            if p + _SOON < end:
                soon = _home(words, table, ids[p + _SOON])
                homes[p & (_SOON - 1)] = soon
                prefetch(words_at + np.int64(soon) * 8)
            if p >= begin:
                row = _row_at(words, _search(words, home, table, ids[p]))
                rows[p] = table if row < 0 and shared else row


@compiled()
def _mark(row: int, marks: Any, stamp: int) -> None:
    """Stamp a row as used and add one use, unless it has this stamp."""
    if marks[row, 0] != stamp:
        marks[row, 0] = stamp
        if marks[row, 1] < 0x7FFFFFFF:
            marks[row, 1] += 1


@compiled()
def mark_used(rows: Any, marks: Any, stamp: int) -> None:
    """Stamp rows as used, and add one use to each that did not have this stamp."""
    begin = marks.ctypes.data
    for i in range(rows.size):
        if i + _SOON < rows.size:
            prefetch(begin + rows[i + _SOON] * 8)
        _mark(rows[i], marks, stamp)


@compiled()
def mark_changed(rows: Any, marks: Any, stamp: int) -> None:
    """Stamp rows as changed."""
    for row in rows:
        marks[row, 0] = stamp


@compiled()
def find_and_mark(words: Any, ids: Any, bounds: Any, tables: Any, rows: Any, marks: Any, stamp: int) -> None:
    """Store the row of every id, or -1, and mark the rows as used, in one pass."""
    words_at, marks_at, homes = words.ctypes.data, marks.ctypes.data, np.empty(_SOON, np.uint64)
    for part in range(tables.size):
        table, begin, end = tables[part], bounds[part], bounds[part + 1]
        for p in range(begin - _SOON, end):
            home = homes[p & (_SOON - 1)]
            if p + _SOON < end:
                soon = _home(words, table, ids[p + _SOON])
                homes[p & (_SOON - 1)] = soon
                prefetch(words_at + np.int64(soon) * 8)
            if p >= begin:
                rows[p] = row = _row_at(words, _search(words, home, table, ids[p]))
                prefetch(marks_at + row * 8)
            if p - _SOON >= begin and rows[p - _SOON] >= 0:
                _mark(rows[p - _SOON], marks, stamp)
        for p in range(max(begin, end - _SOON), end):
            if rows[p] >= 0:
                _mark(rows[p], marks, stamp)


@compiled(parallel=True)
def find_rows(words: Any, ids: Any, bounds: Any, tables: Any, shared: bool, rows: Any, threads: int) -> None:
    """Store the row of every id, as :func:`find_between`."""
    for chunk in numba.prange(threads):
        low, high = ids.size * chunk // threads, ids.size * (chunk + 1) // threads
        find_between(words, ids, bounds, tables, shared, rows, low, high)


@compiled()
def admit(
    words: Any, ids: Any, bounds: Any, tables: Any, missing: Any, begin: int, min_count: int, stamp: int, limit: int,
    rows: Any, row_ids: Any, row_tables: Any, marks: Any, free: Any, counters: Any, new: Any,
) -> int:  # fmt: skip
    """Count the ids at positions ``missing[begin:]`` and give those that were seen often enough a row of their own.

    Stores the rows of the ids that have one by then. Returns the index in ``missing`` at which rows or entries (at most
    ``limit``) ran out, or ``missing.size``; a call with this index and larger arrays goes on. Rows are taken from the
    end of ``free``, then from the first unused one.
    """
    part = 0
    for i in range(begin, missing.size):
        p = missing[i]
        while p >= bounds[part + 1]:
            part += 1
        if i + _SOON < missing.size:
            soon = missing[i + _SOON]
            prefetch(words.ctypes.data + np.int64(_home(words, tables[part], ids[soon])) * 8)  # perhaps of another part
        key, table = ids[p], tables[part]
        place, count = _entry(words, table, key), 0
        if place >= 0:
            payload = words[place + 1]
            if not payload & CANDIDATE:
                rows[p] = payload & ROW_MASK
                continue
            count = (payload >> COUNT_SHIFT) & COUNT_MASK
        elif counters[FILLED] >= limit:
            return i
        count += 1
        content = CANDIDATE | count << COUNT_SHIFT | stamp
        if count >= min_count:
            if counters[FREE] == 0 and counters[USED] == row_ids.size:
                return i
            if counters[FREE] > 0:
                counters[FREE] -= 1
                row = free[counters[FREE]]
            else:
                row = counters[USED]
                counters[USED] += 1
            row_ids[row], row_tables[row] = key, table
            marks[row, 0] = marks[row, 1] = 0
            new[counters[NEW]] = row
            counters[NEW] += 1
            content = rows[p] = row
        if place < 0:
            counters[FILLED] += 1
            place = -1 - place
            words[place] = key
        words[place + 1] = np.int64(table + 1) << TABLE_SHIFT | content
    return missing.size


@compiled()
def resolve(words: Any, ids: Any, bounds: Any, tables: Any, missing: Any, rows: Any) -> None:
    """Store the rows of the ids at positions ``missing``; ids without a row get the number of their table."""
    part = 0
    for p in missing:
        while p >= bounds[part + 1]:
            part += 1
        row = _row_at(words, _entry(words, tables[part], ids[p]))
        rows[p] = tables[part] if row < 0 else row


@compiled()
def enter(words: Any, ids: Any, payloads: Any) -> int:
    """Enter ids with their payloads where the payload is not 0; return how many were present and left as they were."""
    present, begin = 0, words.ctypes.data
    for i in range(ids.size):
        if i + _SOON < ids.size:
            soon = begin + np.int64(_home(words, (payloads[i + _SOON] >> TABLE_SHIFT) - 1, ids[i + _SOON])) * 8
            prefetch(soon)
        if payloads[i] == 0:
            continue
        place = _entry(words, (payloads[i] >> TABLE_SHIFT) - 1, ids[i])
        if place >= 0:
            present += 1
            continue
        words[-1 - place] = ids[i]
        words[-1 - place + 1] = payloads[i]
    return present


@compiled()
def contains(words: Any, ids: Any, tables: Any, found: Any) -> None:
    """Store for every pair of a table and an id whether the map holds it, with or without a row."""
    for i in range(ids.size):
        found[i] = _entry(words, tables[i], ids[i]) >= 0


@compiled()
def draw_new_rows(
    weight: Any, rows: Any, row_ids: Any, row_tables: Any, seed: int, scales: Any, normal: bool, columns: int
) -> None:
    """Draw initial values of rows by seed, table, id and column alone.

    Args:
        weight: ``float32 [R, D]``, written at ``rows``.
        rows: ``int64 [N]``.
        row_ids: Id of every row, ``int64 [R]``, as ``row_tables`` is its table, ``int32 [R]``.
        seed: Seed, at least 0.
        scales: Half width of each table's uniform distribution, or standard deviation of the normal one (Box and Muller
            1958), ``float64 [tables]``.
        normal: Whether the distribution is normal.
        columns: Number of columns to draw; the others get zeros.
    """
    start = seeded(seed)
    for row in rows:
        table = row_tables[row]
        of_row = absorb(absorb(start, table), np.uint64(row_ids[row]))
        for d in range(weight.shape[1]):
            value = 0.0
            if d < columns:
                bits = absorb(of_row, d)
                value = np.float64(fraction(bits))
                if normal:
                    angle = _TURN * _STEP * np.float64(np.int64((bits >> _16) & _24_BITS))
                    value = np.sqrt(-2.0 * np.log(1.0 - value)) * np.cos(angle)
                else:
                    value = 2.0 * value - 1.0
            weight[row, d] = np.float32(value * scales[table])
