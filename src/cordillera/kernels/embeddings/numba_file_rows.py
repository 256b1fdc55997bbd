"""Placement of rows of a file in the lines of a set-associative cache, and copies of rows, compiled by Numba.

A row's set is that of :mod:`cordillera.kernels.embeddings.numba_cached_lookup`. A line is in use as long as
its pin, the number of the last update that needs it, is not smaller than ``oldest``; lines in use are never given away.
The kernels run in one thread and without the interpreter's lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cordillera.kernels.compiling import compiled
from cordillera.kernels.embeddings.cached_rows import EMPTY, WAYS
from cordillera.kernels.embeddings.numba_backend import SOON
from cordillera.kernels.embeddings.numba_cached_lookup import set_of
from cordillera.kernels.numba_support import prefetch

_MOST = 255  # largest count of a row outside the cache
_PAGE_LINES = 4  # rows to look ahead in copies


@compiled()
def _slot_of(lines: Any, first: int, row: int) -> Any:
    """Return the slot from ``first`` to the end of its set that holds a row, or -1, by ``lines``, the tags, flat."""
    # positions are unsigned and no view is made, which would cost more than the search
    wanted, found, begin = np.int32(row), np.int32(-1), np.uint64(first)
    for way in range(WAYS):  # no early exit, so that the loop vectorises
        found = max(found, np.int32(way) if lines[begin + np.uint64(way)] == wanted else np.int32(-1))
    return first + found if found >= 0 else np.int64(-1)


@compiled()
def hold(tags: Any, rows: Any, stamp: int, pins: Any, uses: Any, slots: Any, missing: Any) -> int:
    """Store the slot of every row, or -1, and pin the lines found; return the number of rows stored in ``missing``.

    Args:
        tags: Row that each line holds, or ``EMPTY``, ``int32 [sets, WAYS]``.
        rows: ``int64 [T]``.
        stamp: Number of the update that needs the rows; 0 to pin and count nothing.
        pins: Last update that needs a line, ``int32 [slots]``.
        uses: Number of updates that used the row of a line, ``int32 [slots]``.
        slots: Result, ``int64 [T]``.
        missing: Positions of rows in no line, ``int64 [T]``.
    """
    count, sets, begin, lines = 0, tags.shape[0], tags.ctypes.data, tags.reshape(-1)
    for p in range(rows.size):
        if p + SOON < rows.size:
            home = begin + set_of(rows[p + SOON], sets) * WAYS * 4
            prefetch(home)
            prefetch(home + 64)
        slot = _slot_of(lines, set_of(rows[p], sets) * WAYS, rows[p])
        slots[p] = slot
        if slot < 0:
            missing[count] = p
            count += 1
        elif pins[slot] < stamp:
            pins[slot] = stamp
            uses[slot] = min(uses[slot] + 1, _MOST)
    return count


@compiled()
def place(
    tags: Any, rows: Any, stamp: int, oldest: int, by_use: bool, pins: Any, uses: Any, counts: Any, slots: Any,
    driven_out: Any,
) -> None:  # fmt: skip
    """Give distinct rows that are in no line a line, where their set has one to give away.

    Args:
        by_use: Whether the row that fewest updates used gives way, and only to one with more uses; otherwise the row
            that was not used for the longest time.
        counts: Number of updates that used a row outside the cache, ``uint8 [R]``; empty unless ``by_use``.
        slots: Result, the slot of each row or -1, ``int64 [N]``.
        driven_out: Result, the row that lost its line, or ``EMPTY``, ``int64 [N]``.
    """
    lines, sets = tags.reshape(-1), tags.shape[0]
    for i in range(rows.size):
        row, chosen = rows[i], np.int64(-1)
        first = set_of(row, sets) * WAYS
        driven_out[i] = EMPTY
        if by_use and counts[row] < _MOST:
            counts[row] += np.uint8(1)
        for way in range(WAYS):
            slot = np.int64(first + way)
            if lines[slot] == EMPTY:
                chosen = slot
                break
            if pins[slot] >= oldest:
                continue
            if chosen < 0 or (uses[slot] < uses[chosen] if by_use else pins[slot] < pins[chosen]):
                chosen = slot
        if chosen >= 0 and lines[chosen] != EMPTY:
            if by_use and counts[row] <= uses[chosen]:
                chosen = np.int64(-1)
            else:
                driven_out[i] = lines[chosen]
                if by_use:
                    counts[lines[chosen]] = np.uint8(min(uses[chosen], _MOST))
        slots[i] = chosen
        if chosen >= 0:
            lines[chosen], pins[chosen] = np.int32(row), stamp
            uses[chosen] = counts[row] if by_use else 1


@compiled()
def copy_rows(
    source: Any, source_rows: Any, first: int, target: Any, target_rows: Any, second: int, width: int
) -> None:
    """Copy ``width`` columns from ``first`` on of rows of ``source`` to the columns from ``second`` on of ``target``.

    Source and target are ``float32 [N, columns]``.
    """
    begin, row_bytes = source.ctypes.data, source.shape[1] * 4
    for i in range(source_rows.size):
        if i + _PAGE_LINES < source_rows.size:
            soon = begin + source_rows[i + _PAGE_LINES] * row_bytes + first * 4
            for line in range(0, width * 4, 64):
                prefetch(soon + line)
        # unsigned positions are not tested for being negative, so that the loop vectorises
        row, other = np.uint64(source_rows[i]), np.uint64(target_rows[i])
        for d in range(width):
            target[other, np.uint64(second + d)] = source[row, np.uint64(first + d)]
