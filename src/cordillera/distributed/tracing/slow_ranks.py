"""Ranks that come late to collectives again and again because they compute longer than the other members.

A rank's own time is the time between the end of its previous operation and the call of the next. Both are read from one
clock, so that clocks of ranks may differ, and a rank that is late because it waited for another has no more of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FACTOR = 1.3
"""Least own time of a slow rank, as a multiple of the other members' own time."""

FEWEST = 5
"""Least number of operations of a slow rank."""

_LEAST_SHARE = 0.1  # least extra time of a slow rank, as a share of the time between two operations
_SPREADS = 3.0  # least logarithm of the factor, in standard deviations of those of the rank's ratios
_TO_DEVIATION = 1.4826  # ratio of standard deviation to median absolute deviation of a normal distribution
_LEAST_NS = 20_000.0  # shorter times are those of the program between two calls


class OwnTime(NamedTuple):
    """Time and work of a rank before it called an operation.

    Attributes:
        own_ns: Nanoseconds since the end of its previous operation.
        work: Amount of work that it did since; None if unknown.
        interval_ns: Nanoseconds since its previous call in the same communicator; None before the first.
    """

    own_ns: float
    work: float | None = None
    interval_ns: float | None = None


@dataclass(frozen=True)
class SlowRank:
    """Rank that computes longer than the other members of a communicator.

    Attributes:
        rank: Global rank.
        communicator: Number of the communicator in which this is seen best.
        factor: Median of its own time over that of the other members, for equal work where work is known.
        last: Share of the operations to which it came last.
        operations: Number of operations that were compared.
        normalised: Whether times are divided by recorded work.
    """

    rank: int
    communicator: int
    factor: float
    last: float
    operations: int
    normalised: bool


def find_slow_ranks(
    own_times: Mapping[int, Mapping[int, Mapping[int, OwnTime]]],
    members: Mapping[int, Iterable[int]],
) -> list[SlowRank]:
    """Return the slow ranks, slowest first.

    Args:
        own_times: Times before operations, by communicator, number of the operation and rank.
        members: Members of each communicator.
    """
    found: dict[int, SlowRank] = {}
    by_shape: dict[tuple[int, int], list[_Compared]] = defaultdict(list)
    for number, operations in own_times.items():
        ranks = sorted(members[number])
        rows = [operations[at] for at in sorted(operations) if len(operations[at]) == len(ranks)]
        if len(ranks) < 2 or len(rows) < FEWEST:
            continue
        normalised = all(row[rank].work for row in rows for rank in ranks)
        times = np.array([[row[rank].own_ns for rank in ranks] for row in rows])
        work = np.array([[(row[rank].work or 1.0) if normalised else 1.0 for rank in ranks] for row in rows])
        intervals = np.array([[row[rank].interval_ns or np.nan for rank in ranks] for row in rows])
        long = np.median(times, axis=1) >= _LEAST_NS
        if long.sum() >= FEWEST and not np.isnan(intervals).all(axis=0).any():
            share = np.median(times[long], axis=0) / np.nanmedian(intervals, axis=0)
            values = (times / work)[long]
            by_shape[values.shape].append(_Compared(number, ranks, values, share, normalised))
    for group in by_shape.values():
        _compare(group, found)
    return sorted(found.values(), key=lambda one: (-one.factor, one.rank))


class _Compared(NamedTuple):
    """Own times to compare in a communicator.

    Attributes:
        number: Number of the communicator.
        ranks: Its members.
        values: Own times ``[N, R]`` of its operations and members, for equal work where work is known.
        share: Own time ``[R]`` of each member, as a share of the time between operations.
        normalised: Whether times are divided by work.
    """

    number: int
    ranks: list[int]
    values: np.ndarray
    share: np.ndarray
    normalised: bool


def _compare(group: list[_Compared], found: dict[int, SlowRank]) -> None:
    """Add the slow ranks of communicators with equally many members and operations."""
    values = np.stack([one.values for one in group])  # [C, N, R]
    middle = np.median(values, axis=2, keepdims=True)
    if values.shape[2] == 2:  # each is compared with the other one
        middle = values[..., ::-1]
    ratios = np.log(np.maximum(values, 1e-12) / np.maximum(middle, 1e-12))  # twice and half are equally far from 0
    center = np.median(ratios, axis=1)
    spread = _TO_DEVIATION * np.median(np.abs(ratios - center[:, None]), axis=1)
    factor = np.exp(center)
    last = (values == values.max(axis=2, keepdims=True)).mean(axis=1)
    slow = (factor > FACTOR) & (center > _SPREADS * spread) & (last >= 0.5)
    # What a rank takes longer must count: in a program that computes next to nothing, each is the slowest somewhere.
    slow &= np.stack([one.share for one in group]) * (1 - 1 / np.maximum(factor, 1.0)) >= _LEAST_SHARE
    for which, at in zip(*np.nonzero(slow), strict=True):
        of = group[which]
        one = SlowRank(
            of.ranks[at], of.number, float(factor[which, at]), float(last[which, at]), values.shape[1], of.normalised
        )
        if one.rank not in found or found[one.rank].operations < one.operations:
            found[one.rank] = one
