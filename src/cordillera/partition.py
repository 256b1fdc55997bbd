"""Partition of weighted items into bins, with the heaviest bin as light as possible.

Every function returns the bin of each item, ``[n]`` of int64, and is a pure function of its arguments: ties go to the
item, and to the bin, with the lower index, so that all ranks with the same numbers find the same partition.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cordillera.errors import DataError

Bins = NDArray[np.int64]
Weights = NDArray[np.float64]

NOWHERE = -1
"""Bin of an item for which no bin has room."""


def _numbers(values: ArrayLike, name: str) -> Weights:
    """Return values as float64 after checking that they are finite, not negative, and have a finite sum."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"are not numbers: {error}", where=name) from error
    if found.ndim != 1:
        raise DataError(f"have {found.ndim} dimensions, not one", where=name)
    bad = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if bad.size:
        raise DataError(f"{found[bad[0]]} is not a {name[:-1]}", where=f"{name}, item {bad[0]}",
                        remedy="finite and at least 0")  # fmt: skip
    with np.errstate(over="ignore"):
        if not np.isfinite(found.sum()):
            raise DataError("their sum is too large for a float64", where=name, remedy="use a larger unit")
    return found


def _checked(weights: ArrayLike, bins: int) -> Weights:
    if bins < 1:
        raise DataError(f"{bins} bins can hold nothing", where="bins", remedy="at least 1")
    return _numbers(weights, "weights")


def _sized(sizes: ArrayLike | None, room: float | None, items: int) -> tuple[Weights, float]:
    """Return sizes and room; without them every item has size 0."""
    if (sizes is None) != (room is None):
        raise DataError("sizes and room belong together", where="room" if room is None else "sizes")
    if sizes is None or room is None:
        return np.zeros(items), 0.0
    found = _numbers(sizes, "sizes")
    if len(found) != items:
        raise DataError(f"{len(found)} sizes for {items} weights", where="sizes")
    if not room >= 0:
        raise DataError(f"{room} is no room", where="room", remedy="at least 0")
    return found, float(room)


def heaviest_first(weights: ArrayLike) -> Bins:
    """Return the indices of the items from the heaviest to the lightest; equal ones keep their order."""
    return np.argsort(-_numbers(weights, "weights"), kind="stable")


def list_scheduling(weights: ArrayLike, bins: int, sizes: ArrayLike | None = None, room: float | None = None) -> Bins:
    """Put every item, in the order given, into the lightest bin that has room for it.

    Source: Graham 1966. Without sizes, no bin is heavier than ``2 - 1/m`` times the optimum.

    Args:
        weights: ``[n]``, finite and at least 0.
        bins: ``m``, number of bins.
        sizes: ``[n]``, room that each item takes; None if bins hold anything.
        room: Room of every bin; None if bins hold anything.

    Returns:
        The bin of each item, :data:`NOWHERE` if no bin has room.

    Raises:
        DataError: If weights or sizes are negative or not finite, or there is less than one bin.
    """
    work = _checked(weights, bins)
    needed, space = _sized(sizes, room, len(work))
    heap = [(0.0, one) for one in range(bins)]
    free, places = [space] * bins, np.full(len(work), NOWHERE, dtype=np.int64)
    refused = np.inf  # smallest size that fitted nowhere; rooms only shrink, so that no such size fits later
    for item, (weight, size) in enumerate(zip(work.tolist(), needed.tolist(), strict=True)):
        if size >= refused:
            continue
        full = []
        while heap and free[heap[0][1]] < size:
            full.append(heapq.heappop(heap))
        if heap:
            load, place = heap[0]
            heapq.heapreplace(heap, (load + weight, place))
            free[place] -= size
            places[item] = place
        else:
            refused = size
        for one in full:
            heapq.heappush(heap, one)
    return places


def longest_processing_time(
    weights: ArrayLike, bins: int, sizes: ArrayLike | None = None, room: float | None = None
) -> Bins:
    """Run :func:`list_scheduling`, with the same arguments and errors, from the heaviest item to the lightest.

    Source: Graham 1969. Without ``sizes`` and ``room``, no bin of ``bins`` is heavier than ``4/3 - 1/(3m)`` times the
    optimum for these ``weights``.
    """
    work, order = _checked(weights, bins), heaviest_first(weights)
    needed, _ = _sized(sizes, room, len(work))
    places = np.empty(len(work), dtype=np.int64)
    places[order] = list_scheduling(work[order], bins, None if sizes is None else needed[order], room)
    return places


def two_key_greedy(weights: ArrayLike, sizes: ArrayLike, bins: int, room: float) -> Bins:
    """Put every item, in the order given, into the lightest bin by weight, or else the emptiest by size.

    Source: Wang et al. 2025 (WLB-LLM), algorithm 1. The second bin is tried if the first has no room; an item that
    fills a bin exactly fits, and one that fits in neither is at :data:`NOWHERE`. The arguments ``weights``, ``sizes``,
    ``bins`` and ``room``, and errors, are those of :func:`list_scheduling`.
    """
    work = _checked(weights, bins)
    needed, space = _sized(sizes, room, len(work))
    load, used = [0.0] * bins, [0.0] * bins
    places = np.full(len(work), NOWHERE, dtype=np.int64)
    for item, (weight, size) in enumerate(zip(work.tolist(), needed.tolist(), strict=True)):
        for key in (load, used):
            place = key.index(min(key))
            if used[place] + size <= space:
                load[place] += weight
                used[place] += size
                places[item] = place
                break
    return places


def karmarkar_karp(weights: ArrayLike, bins: int, sizes: ArrayLike | None = None, room: float | None = None) -> Bins:
    """Join the two partial partitions that differ most until one is left: the largest differencing method.

    Every item begins as a partition of its own. The heaviest bin of one partition joins the lightest of the other, the
    second heaviest the second lightest, and so on. If a joined bin has no room, the bins of the other partition are
    shifted by one, two and so on until all have.

    Source: Karmarkar and Karp 1982. With two bins it is mostly far better than :func:`longest_processing_time`, with
    the same arguments and errors otherwise.

    Args:
        weights: ``[n]``, finite and at least 0.
        bins: ``m``, number of bins.
        sizes: ``[n]``, room that each item takes; None if bins hold anything.
        room: Room of every bin; None if bins hold anything.

    Returns:
        The bin of each item; :data:`NOWHERE` for all items if two partitions cannot be joined within the room.

    Raises:
        DataError: If weights or sizes are negative or not finite, or there is less than one bin.
    """
    work = _checked(weights, bins)
    needed, space = _sized(sizes, room, len(work))
    places = np.full(len(work), NOWHERE, dtype=np.int64)
    if (needed > space).any():
        return places
    # weights of the bins from the heaviest, their sizes and items; the heap has the largest difference first
    parts: list[tuple[Weights, Weights, list[list[int]]]] = []
    heap: list[tuple[float, int]] = []
    for item in range(len(work)):
        load, used = np.zeros(bins), np.zeros(bins)
        load[0], used[0] = work[item], needed[item]
        parts.append((load, used, [[item], *([] for _ in range(bins - 1))]))
        heap.append((-float(work[item]) if bins > 1 else 0.0, item))
    heapq.heapify(heap)
    while len(heap) > 1:
        load, used, members = parts[heapq.heappop(heap)[1]]
        other_load, other_used, other_members = parts[heapq.heappop(heap)[1]]
        for shift in range(bins):
            order = np.roll(np.arange(bins)[::-1], shift)
            if (used + other_used[order] <= space).all():
                break
        else:
            return places
        load, used = load + other_load[order], used + other_used[order]
        members = [own + other_members[at] for own, at in zip(members, order.tolist(), strict=True)]
        down = np.argsort(-load, kind="stable")
        heapq.heappush(heap, (-float(load[down[0]] - load[down[-1]]), len(parts)))
        parts.append((load[down], used[down], [members[at] for at in down.tolist()]))
    for place, items in enumerate(parts[-1][2] if parts else []):
        places[items] = place
    return places


def loads(weights: ArrayLike, places: Bins, bins: int) -> Weights:
    """Return the weight of every bin: ``[m]``; items at :data:`NOWHERE` do not count.

    The items have ``weights`` and ``places`` among the ``bins``, ``[n]`` each.
    """
    inside, found = places != NOWHERE, np.zeros(bins)
    np.add.at(found, places[inside], np.asarray(weights, dtype=np.float64)[inside])
    return found


def imbalance(loads: ArrayLike) -> float:
    """Return the weight of the heaviest bin divided by the mean; 1 if all are empty."""
    values = np.asarray(loads, dtype=np.float64)
    mean = values.mean()
    return float(values.max() / mean) if mean else 1.0


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in ascending order."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})
