"""Distinct rows of a matrix in order of first occurrence, compared bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from cordillera.kernels.compiling import compiled

_EMPTY = -1
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@compiled()
def _find(words: Any) -> Any:
    """Return the first row of each distinct row and the number of the distinct row of each row."""
    rows, width = words.shape
    slots = 16
    while slots < 2 * rows:
        slots *= 2
    table = np.full(slots, _EMPTY, np.int64)  # open addressing
    hashes = np.empty(rows, np.uint64)  # hashes of the distinct rows
    first, inverse = np.empty(rows, np.int64), np.empty(rows, np.int64)
    count = 0
    for r in range(rows):
        own = np.uint64(width)
        for w in range(width):
            own = (own ^ np.uint64(words[r, w])) * _FACTOR
            own ^= own >> _SHIFT
        at = np.int64(own >> np.uint64(8)) & (slots - 1)
        while True:
            number = table[at]
            if number == _EMPTY:
                table[at], first[count], hashes[count], inverse[r] = count, r, own, count
                count += 1
                break
            if hashes[number] == own:
                w = 0
                while w < width and words[first[number], w] == words[r, w]:
                    w += 1
                if w == width:
                    inverse[r] = number
                    break
            at = (at + 1) & (slots - 1)
    return first[:count].copy(), inverse


def distinct_rows(values: Any) -> tuple[Any, Any]:
    """Find the distinct rows of an array.

    Rows are equal if their bytes are, so zeros of both signs differ and a NaN equals itself.

    Args:
        values: Array ``[N, D]`` of any type, contiguous.

    Returns:
        Number of the row where each distinct row occurs first, ``int64 [U]``, ascending, and the number of the distinct
        row of each row, ``int64 [N]``: ``values[first][inverse]`` is ``values``.
    """
    rows = values.shape[0]
    size = values.shape[1] * values.itemsize
    if not size:
        return np.zeros(min(rows, 1), np.int64), np.zeros(rows, np.int64)
    width = next(width for width in (8, 4, 2, 1) if size % width == 0)
    return _find(values.reshape(-1).view(f"u{width}").reshape(rows, size // width))
