"""Assignment of parts to ranks by several costs: the sum, over phases, of the slowest rank's time is made small.

Everything here is a pure function of its arguments; ties go to the lower index.
"""

from __future__ import annotations

import numpy as np

from cordillera.partition import NOWHERE, Bins, Weights, karmarkar_karp, longest_processing_time

_SLACK = 1 + 1e-9  # rounding of sums of bytes
_LEAST_GAIN = 1e-9  # least change that counts
_MEMORY_WEIGHT = 1e-3  # bytes decide where seconds are equal
_MOST_DIFFERENCING = 40_000  # parts times ranks; above, largest differencing takes too long
_MOST_PAIRS = 1 << 16  # largest number of exchanges weighed at once
_MOST_TARGETS = 16  # number of least loaded ranks considered as targets


def loads_by_rank(costs: Weights, places: Bins, ranks: int) -> Weights:
    """Return the sum of ``costs``, ``[P, K]``, over every rank: ``[ranks, K]``."""
    found = np.zeros((ranks, costs.shape[1]))
    np.add.at(found, places, costs)
    return found


def slowest_sum(loads: Weights) -> float:
    """Return the sum over phases of the largest load: of ``[ranks, K]``."""
    return float(loads.max(0).sum())


def assign(costs: Weights, sizes: Weights, ranks: int, room: float) -> Bins | None:
    """Assign parts by four orders, without search; see :func:`assign_well` for the arguments.

    Parts go one after another to the rank where they raise the sum of squared loads least: the costliest first, or the
    largest first. Longest processing time and largest differencing work on the sum of a part's costs.
    """
    weights, total = square_weights(costs, sizes), costs.sum(1)
    starts = [_greedy(costs, sizes, order, ranks, room, weights) for order in (np.argsort(-total, kind="stable"),)]
    starts.append(longest_processing_time(total, ranks, sizes, room * _SLACK))
    if len(costs) * ranks <= _MOST_DIFFERENCING:
        starts.append(karmarkar_karp(total, ranks, sizes, room * _SLACK))
    if all(NOWHERE in one for one in starts):
        starts.append(_greedy(costs, sizes, np.argsort(-sizes, kind="stable"), ranks, room, weights))
    feasible = [one for one in starts if NOWHERE not in one]
    return min(feasible, key=lambda one: slowest_sum(loads_by_rank(costs, one, ranks)), default=None)


def assign_well(costs: Weights, sizes: Weights, ranks: int, room: float) -> Bins | None:
    """Assign parts to ranks, then search for better places.

    Args:
        costs: Seconds of every part in every phase: ``[P, K]``.
        sizes: Bytes of every part: ``[P]``.
        ranks: Number of ranks.
        room: Bytes that a rank holds.

    Returns:
        The rank of each part: ``[P]``; None if a part found no room.
    """
    start = assign(costs, sizes, ranks, room)
    return None if start is None else improve(costs, sizes, start, ranks, room)


def improve(costs: Weights, sizes: Weights, places: Bins, ranks: int, room: float, steps: int | None = None) -> Bins:
    """Move parts away from the slowest ranks, or exchange them, as long as that helps.

    Args:
        costs: Seconds of every part in every phase: ``[P, K]``.
        sizes: Bytes of every part: ``[P]``.
        places: Rank of each part: ``[P]``.
        ranks: Number of ranks.
        room: Bytes that a rank holds.
        steps: Largest number of changes; None for one that bounds the time.

    Returns:
        The new rank of each part: ``[P]``.
    """
    places = places.copy()
    steps = max(20, 60_000 // max(len(costs), 1)) if steps is None else steps
    everything = np.concatenate([costs, sizes[:, None]], axis=1)
    weights = square_weights(costs, sizes)
    for _ in range(steps if ranks > 1 else 0):
        loads = loads_by_rank(everything, places, ranks)
        best: tuple[float, float, int, int, int] | None = None
        for rank in dict.fromkeys(loads[:, :-1].argmax(0).tolist()):
            found = _best_exchange(everything, places, loads, rank, room * _SLACK, weights)
            if found is not None and (best is None or found[:2] < best[:2]):
                best = found
        if best is None:
            break
        _, _, part, other, target = best
        if other >= 0:
            places[other] = places[part]
        places[part] = target
    return places


def square_weights(costs: Weights, sizes: Weights) -> Weights:
    """Return the weights of the squared loads of each phase and of bytes, ``[K + 1]``, for balancing."""
    totals = np.append(costs.sum(0), sizes.sum())
    inverse = np.divide(1.0, totals, out=np.zeros_like(totals), where=totals > 0)
    inverse[-1] *= _MEMORY_WEIGHT * totals[:-1].sum() * inverse[-1]
    return inverse


def _greedy(costs: Weights, sizes: Weights, order: Bins, ranks: int, room: float, weights: Weights) -> Bins:
    """Put parts, in an order, on the rank where the weighted sum of squared loads grows least."""
    everything = np.concatenate([costs, sizes[:, None]], axis=1)
    scaled = everything * weights
    loads, places = np.zeros((ranks, everything.shape[1])), np.full(len(costs), NOWHERE, dtype=np.int64)
    for part in order.tolist():
        growth = loads @ scaled[part]
        growth[loads[:, -1] + sizes[part] > room * _SLACK] = np.inf
        place = int(growth.argmin())
        if np.isfinite(growth[place]):
            places[part] = place
            loads[place] += everything[part]
    return places


def _best_exchange(
    everything: Weights, places: Bins, loads: Weights, rank: int, room: float, weights: Weights
) -> tuple[float, float, int, int, int] | None:
    """Return the best exchange of a part on ``rank`` for a part elsewhere, or for none; None if none helps.

    ``everything`` and ``loads`` hold the bytes in their last column.

    Returns:
        New time plus squares, change of the squares, the part, the other part or -1, and the other rank.
    """
    own = np.flatnonzero(places == rank)
    most = max(1, _MOST_PAIRS // (len(places) + len(loads)))
    if len(own) > most:  # the costliest parts of the slowest rank
        own = np.sort(own[np.argsort(-everything[own, :-1].sum(1), kind="stable")[:most]])
    leaving = everything[own]
    others, there, times, squares = weigh_exchanges(everything, places, loads, rank, leaving, leaving, room, weights)
    now = slowest_sum(loads[:, :-1])
    level = (times <= now * (1 + 1e-12)) & (squares < -_LEAST_GAIN * now / len(loads))
    score = np.where((times < now * (1 - _LEAST_GAIN)) | level, times + squares, np.inf)
    if not score.size or not np.isfinite(score.min()):
        return None
    i, j = divmod(int(score.argmin()), len(others))
    return float(score[i, j]), float(squares[i, j]), int(own[i]), int(others[j]), int(there[j])


def weigh_exchanges(
    everything: Weights, places: Bins, loads: Weights, rank: int, leaving: Weights, arriving: Weights, room: float,
    weights: Weights,
) -> tuple[Bins, Bins, Weights, Weights]:  # fmt: skip
    """Weigh what happens if something leaves a rank for a lightly loaded one, for a part of that or for nothing.

    Args:
        everything: Seconds and bytes of every part: ``[P, K + 1]``.
        places: Rank of each part: ``[P]``.
        loads: Sum of these over every rank: ``[ranks, K + 1]``.
        rank: Rank that something leaves.
        leaving: Loads that leave the rank in each case: ``[O, K + 1]``.
        arriving: Loads that arrive at the other rank in each case: ``[O, K + 1]``.
        room: Bytes that a rank holds.
        weights: Weights of squares (:func:`square_weights`): ``[K + 1]``.

    Returns:
        What may come back, a part or -1 for nothing, ``[Q]``; its rank, ``[Q]``; the time afterwards, infinite if one
        of the two ranks has no room, ``[O, Q]``; and the change of the weighted squares, ``[O, Q]``.
    """
    light = np.argsort((loads * np.sqrt(weights)).sum(1), kind="stable")
    targets = np.sort(light[light != rank][:_MOST_TARGETS])
    near = np.zeros(len(loads), dtype=bool)
    near[targets] = True
    elsewhere = np.flatnonzero(near[places])
    others = np.concatenate([np.full(len(targets), -1, dtype=np.int64), elsewhere])
    there = np.concatenate([targets, places[elsewhere]])
    back = np.concatenate([np.zeros((len(targets), everything.shape[1])), everything[elsewhere]])
    here = (loads[rank] - leaving)[:, None] + back[None]  # [O, Q, K + 1]
    gone = (loads[there] - back)[None] + arriving[:, None]
    without = loads[:, :-1].copy()
    without[rank] = 0.0
    first, top = without.argmax(0), without.max(0)
    without[first, np.arange(len(first))] = 0.0
    rest = np.where(np.arange(len(loads))[:, None] == first, without.max(0), top)  # [ranks, K], without both ranks
    times = np.maximum(np.maximum(here, gone)[..., :-1], rest[there]).sum(-1)
    times[(here[..., -1] > room) | (gone[..., -1] > room)] = np.inf
    before = (loads[rank] ** 2 + loads[there] ** 2) @ weights  # [Q]
    return others, there, times, (here**2 + gone**2) @ weights - before
