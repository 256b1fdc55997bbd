"""Local search over the order of every rank's actions in a pipeline step, compiled by Numba at first use.

Actions are numbers: kind and stage form a row, and ``row * microbatches + microbatch`` is the action. A schedule is one
array of them, rank after rank. Times are those of :func:`cordillera.planning.pipeline.simulator.simulate`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cordillera.kernels.compiling import compiled

SHIFTS = 0.3  # share of changes that move several actions; found by experiment
MEMORY = 100  # a change is kept if the step is no longer than it was this many changes ago


class Table(NamedTuple):
    """A step to schedule. Arrays are by action unless stated otherwise.

    Attributes:
        microbatches: ``m``, number of microbatches.
        begin: Position of each rank's first action in a schedule, and the end of the last: ``[P + 1]``.
        limits: Largest number of live forwards of each rank: ``[P]``.
        stage: Stage of the action.
        chunk: Position of that stage among its rank's stages, from 0.
        kind: Number of the kind, from 0.
        rank: Rank of the action.
        needs: Action whose result it starts with; -1 for none.
        holds: 1 if activations are held from then on, -1 if they are freed.
        seconds: Seconds of the action.
        way: Number of the way that its result takes; -1 for none.
        target: Rank at the end of that way.
        occupied: Seconds that the message occupies the way.
        latency: Latency of the message, seconds.
    """

    microbatches: int
    begin: Any
    limits: Any
    stage: Any
    chunk: Any
    kind: Any
    rank: Any
    needs: Any
    holds: Any
    seconds: Any
    way: Any
    target: Any
    occupied: Any
    latency: Any


@compiled()
def _simulate(table: Any, order: Any, start: Any, end: Any) -> float:
    """Fill in starts and ends by action; return the seconds of the step, or infinity if ranks wait for one another."""
    begin = table.begin
    ranks = len(begin) - 1
    ready = np.full(len(order), -1.0)  # time at which a result arrives
    way_free = np.zeros(table.way.max() + 2)
    place = begin[:-1].copy()
    runnable, listed = np.arange(ranks), np.ones(ranks, np.bool_)
    count, done, longest = ranks, 0, 0.0
    while count:
        count -= 1
        rank = runnable[count]
        listed[rank] = False
        i = place[rank]
        free = end[order[i - 1]] if i > begin[rank] else 0.0
        while i < begin[rank + 1]:
            action = order[i]
            need = table.needs[action]
            if need >= 0:
                if ready[need] < 0:
                    break
                # weight gradients start from the result on their own rank, even if it is also sent elsewhere
                free = max(free, end[need] if table.rank[need] == rank else ready[need])
            start[action] = free
            free += table.seconds[action]
            end[action] = ready[action] = free
            way = table.way[action]
            if way >= 0:
                way_free[way] = max(way_free[way], free) + table.occupied[action]
                ready[action] = way_free[way] + table.latency[action]
                target = table.target[action]
                if not listed[target]:
                    listed[target] = True
                    runnable[count] = target
                    count += 1
            i += 1
        done += i - place[rank]
        place[rank] = i
        longest = max(longest, free)
    return longest if done == len(order) else np.inf


@compiled()
def _critical(table: Any, order: Any, start: Any, end: Any, runs: Any) -> int:
    """Find runs of actions without a pause along a longest path; return how many there are.

    Each run is written as rank, first and last position.
    """
    begin = table.begin
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    rank = 0
    for other in range(1, len(begin) - 1):
        if end[order[begin[other + 1] - 1]] > end[order[begin[rank + 1] - 1]]:
            rank = other
    first = last = begin[rank + 1] - 1
    count = 0
    while True:
        while first > begin[rank] and end[order[first - 1]] >= start[order[first]] * (1 - 1e-12):
            first -= 1
        if first < last:
            runs[count] = rank, first, last
            count += 1
        need = table.needs[order[first]]
        if need < 0:
            return count
        rank, first = table.rank[need], place[need]
        last = first


@compiled()
def _move(table: Any, order: Any, run: Any, chance: Any) -> bool:
    """Move one action within a run of the critical path or slightly beyond; return whether that is possible."""
    rank, first, last = run
    source, target = chance.integers(first, last + 1), first
    way = chance.integers(0, 5)
    if way == 1:
        target = last
    elif way == 2:
        source, target = last, chance.integers(first, last)
    elif way == 3:
        source, target = first, chance.integers(first + 1, last + 1)
    elif way == 4:
        low, high = max(table.begin[rank], first - 4), min(table.begin[rank + 1], last + 5)
        target = chance.integers(low, high)
    if source == target:
        return False
    action, count = order[source], table.microbatches
    step = 1 if target > source else -1
    for i in range(source, target, step):
        other = order[i + step]
        # an action cannot pass one of its stage with the same kind or microbatch
        if table.stage[other] == table.stage[action] and (
            table.kind[other] == table.kind[action] or other % count == action % count
        ):
            return False
        order[i] = other
    order[target] = action
    held = 0
    for i in range(table.begin[rank], table.begin[rank + 1]):
        held += table.holds[order[i]]
        if held > table.limits[rank]:
            return False
    return True


@compiled()
def _shift(table: Any, order: Any, start: Any, chance: Any) -> bool:
    """Shift actions of some kinds, chunks, microbatches and ranks in time, and order all by the new times.

    Microbatches stay in order, and actions that free activations are moved forward if memory would not suffice.
    """
    count, ranks = table.microbatches, len(table.begin) - 1
    chunk = chance.integers(-1, table.chunk.max() + 1)  # -1 for all
    kinds = chance.integers(1, 1 << (table.kind.max() + 1))
    low = chance.integers(0, count)
    high = low + 1 if chance.random() < 0.3 else min(count, low + 1 + chance.integers(0, count))
    first, last = 0, ranks
    if chance.random() < 0.5:
        first = chance.integers(0, ranks)
        last = chance.integers(first, ranks) + 1
    mean = table.seconds.mean()
    reach = max(start.max(), mean)
    by = 0.5 * mean * (reach / mean) ** chance.random() if mean > 0 else 0.0
    if chance.random() < 0.5:
        by = -by
    old = order.copy()
    when = np.empty(len(order))
    for rank in range(first, last):
        begin, end = table.begin[rank], table.begin[rank + 1]
        for i in range(begin, end):
            action = old[i]
            at = start[action]
            if (
                chunk in (-1, table.chunk[action])
                and (kinds >> table.kind[action]) & 1
                and low <= action % count < high
            ):
                at += by
            j = i
            while j > begin and when[j - 1] > at:
                when[j], order[j] = when[j - 1], order[j - 1]
                j -= 1
            when[j], order[j] = at, action
        taken = np.zeros(len(order) // count, np.int64)  # actions placed so far, by row
        held = 0
        for i in range(begin, end):
            if held + table.holds[order[i]] > table.limits[rank]:
                j = i
                while j < end and table.holds[order[j]] >= 0:
                    j += 1
                if j == end:
                    return False
                freeing = order[j]
                order[i + 1 : j + 1] = order[i:j].copy()
                order[i] = freeing
            row = order[i] // count
            order[i] = row * count + taken[row]
            taken[row] += 1
            held += table.holds[order[i]]
    return bool((order != old).any())


@compiled()
def improve(table: Any, order: Any, steps: int, bound: float, chance: Any) -> Any:
    """Return the best of a sequence of ``steps`` changes to a schedule, ``order``, and its seconds.

    A change is kept if the step is not longer than it was :data:`MEMORY` changes ago (late acceptance, Burke and Bykov
    2017). Changes move one action along the critical path, or many actions of a kind by the same time. No ranks of
    ``order`` wait for one another. The search ends early at a step of ``bound`` seconds.
    """
    current, best, trial = order.copy(), order.copy(), order.copy()
    start, end = np.empty(len(order)), np.empty(len(order))
    runs = np.empty((len(order), 3), np.int64)
    now = least = _simulate(table, current, start, end)
    count = _critical(table, current, start, end, runs)
    begun, late = start.copy(), np.full(MEMORY, now)
    done = 0
    for _ in range(20 * steps):
        if done == steps or least <= bound:
            break
        if chance.random() < SHIFTS:
            possible = _shift(table, trial, begun, chance)
        else:
            possible = count > 0 and _move(table, trial, runs[chance.integers(0, count)], chance)
        if possible:
            done += 1
            seconds = _simulate(table, trial, start, end)
            possible = seconds <= max(now, late[done % MEMORY])
            if possible:
                current[:], begun[:], now = trial, start, seconds
                count = _critical(table, current, start, end, runs)
                if now < least:
                    best[:], least = current, now
            late[done % MEMORY] = now
        if not possible:
            trial[:] = current
    return least, best
