"""Description of rows in few bits behind a cache, for the tables that own them and the kernels that work on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

FORMATS = {"fp32": 0, "fp16": 1, "int8": 2, "int4": 3, "int2": 4}
ROUNDINGS = {"nearest": 0, "stochastic": 1}
POLICIES = {"lru": 0, "lfu": 1}
EVENTS = ("hits", "admissions", "evictions", "write_backs", "spills")
WAYS = 32
EMPTY = -1
FINE, NOT_FINITE, TOO_LARGE = 0, 1, 2


@dataclass(frozen=True)
class CachedRows:
    """Memory and format of rows behind a cache; ``kind``, ``rounding`` and ``policy`` are keys of the tables above.

    Attributes:
        payload: All rows as they were last encoded, ``uint8 [R, row bytes]``.
        lines: Rows in the cache, ``float32 [slots, D]``. Slots ``set * WAYS`` to ``set * WAYS + WAYS - 1`` are a set.
        tags: Row that a line holds, or ``EMPTY``, ``int32 [slots]``.
        ranks: Last update that used a line (``lru``), or number of updates that used its row, at most 255 (``lfu``),
            ``int32 [slots]``.
        states: 1 where a line differs from its encoded row, ``uint8 [slots]``.
        counts: Number of updates that used a row outside the cache, at most 255, ``uint8 [R]`` (``lfu``; else empty).
        events: Running sums of ``EVENTS`` over distinct rows of updates, ``int64 [5]``.
        first_rows: Start of each table, ascending, ``int64 [tables]``.
    """

    kind: str
    rounding: str
    policy: str
    dim: int
    payload: Tensor
    lines: Tensor
    tags: Tensor
    ranks: Tensor
    states: Tensor
    counts: Tensor
    events: Tensor
    first_rows: Tensor
    seed: int


class BadRow(NamedTuple):
    """First row of all tables to which an update could not be applied.

    Attributes:
        gradient: Whether its gradient is not finite; otherwise its new numbers are not finite or do not fit the format.
    """

    row: int
    gradient: bool
