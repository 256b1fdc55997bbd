"""What describes rows in few bits behind a cache, for those who keep them and for the kernels that work on them."""

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
    """Where rows lie, and how they are kept.

    Attributes:
        kind: A key of ``FORMATS``.
        rounding: A key of ``ROUNDINGS``.
        policy: A key of ``POLICIES``.
        dim: ``D``.
        payload: ``uint8 [R, row bytes]``, all rows as they were last encoded.
        lines: ``float32 [slots, D]``, rows in the cache. Slots ``set * WAYS`` to ``set * WAYS + WAYS - 1`` are a set.
        tags: ``int32 [slots]``, which row a line holds, or ``EMPTY``.
        ranks: ``int32 [slots]``: the update that used a line last (``lru``), or how many have used its row (``lfu``).
        states: ``uint8 [slots]``, 1 where a line differs from what is encoded.
        counts: ``uint8 [R]``, updates that used a row outside the cache, 255 standing for more (``lfu``; else empty).
        events: ``int64 [5]``, running sums of ``EVENTS`` over distinct rows of updates.
        first_rows: ``int64 [tables]``, where each table begins, ascending.
        seed: Of stochastic rounding.
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
    """The first row that an update could not be applied to.

    Attributes:
        row: Of all tables together.
        gradient: Whether its gradient is not finite; else its new numbers are not, or do not fit the format.
    """

    row: int
    gradient: bool
