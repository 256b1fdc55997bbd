"""Short pipeline schedules within memory limits, found in seconds by rules and local search, without a solver.

All ranks choose by one rule, and rules are tried one after the other; the known families that fit are added. Then the
orders of the ranks' actions are changed, at single places along the critical path and in whole groups, for longest in
the best schedules.

Microbatches of every stage are in order: forwards, backwards and weight gradients alike. This loses nothing:
microbatches are equal, so the ``k``-th action of a kind in a stage can be given to microbatch ``k``, and its inputs are
then available no later than before. Joined pairs of actions are not considered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from cordillera.errors import PlanError
from cordillera.planning.pipeline.problem import F, I, Problem, W
from cordillera.planning.pipeline.schedules import (
    Action,
    Kind,
    Schedule,
    breadth_first,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    warmup_for_latency,
    zero_bubble,
    zero_bubble_v,
)
from cordillera.planning.pipeline.simulator import StageSeconds, Way, Ways


@dataclass(frozen=True)
class _Rule:
    """How a free rank chooses its next action.

    Attributes:
        order: Kinds of work, the most urgent first; ``B`` also stands for the input's gradient.
        turns: Whether forward and backward take turns.
        spare: Number of live forwards that a rank allows itself beyond those that keep it busy; None for all that fit.
        chunks: Preferred chunk: ``deep`` the one closest to its end, ``wide`` the one furthest from it, ``arrival`` the
            first to arrive.
        patience: Work is delayed if more urgent work arrives within this part of its time.
        window: Number of microbatches that may be begun on a rank beyond those for which the limit has full room; None
            for no limit.
        groups: Sizes of the first group and of each following group of microbatches, if forwards pass the chunks
            strictly in groups; None for any order.
    """

    order: str = "BFW"
    turns: bool = False
    spare: int | None = None
    chunks: str = "deep"
    patience: float = 0.0
    window: int | None = None
    groups: tuple[int, int] | None = None


# One simulation: its inner functions share a dozen lists of state, which separate functions would pass around.
def _listed(problem: Problem, rule: _Rule) -> Schedule:
    """Return the schedule of a rule by which ranks, in order of time, choose among actions whose inputs have arrived.

    Raises:
        PlanError: If groups do not fit in the limits.
    """
    ranks, count, own, back, free = problem.ranks, problem.microbatches, problem.own, problem.back, problem.free
    orders = {{"F": F, "B": back, "W": W}[letter]: i for i, letter in enumerate(rule.order)}
    turned = {**orders, F: orders[back], back: orders[F]} if rule.turns else orders
    before = F if orders[F] < orders[back] else back
    room, windows, sequences = [], [], []
    for limit, stages in zip(problem.limits, own, strict=True):
        allowed = limit if rule.spare is None else rule.spare + sum(map(problem.under_way, stages))
        room.append(max(len(stages), min(limit, allowed)))
        windows.append(count if rule.window is None else max(1, limit // len(stages) + rule.window))
        sequence: list[tuple[int, int]] = []
        if rule.groups:
            edges = [0, *range(rule.groups[0], count, rule.groups[1]), count]
            sequence = [(stage, i) for a, b in pairwise(edges) for stage in stages for i in range(a, b)]
        sequences.append(sequence)

    arrived: dict[tuple[Kind, int], list[float]] = {key: [] for key in problem.cost}  # times by microbatch
    arrived[F, 0] = [0.0] * count
    taken = dict.fromkeys(problem.cost, 0)
    mine = [[key for key in problem.cost if problem.rank_of[key[1]] == rank] for rank in range(ranks)]
    until = [0.0] * ranks
    held, begun = [0] * ranks, [0] * ranks
    last = [back] * ranks
    way_free: dict[tuple[int, int], float] = {}
    plans: list[list[Action]] = [[] for _ in range(ranks)]

    def open_forward(rank: int, stage: int) -> bool:
        """Return whether there is room for a forward and for all that is needed to finish, the oldest first."""
        left = room[rank] - held[rank] - 1
        if left < 0:
            return False
        if len(own[rank]) == 1:
            return True
        microbatch = taken[F, stage]
        if sequences[rank]:
            return sequences[rank][begun[rank]] == (stage, microbatch)
        is_first = stage == own[rank][0]
        begun_of, freed_of = ([taken[kind, s] for s in own[rank]] for kind in (F, free))
        oldest = min(freed_of)
        if is_first and microbatch - oldest >= windows[rank]:
            return False
        for i in range(oldest, begun_of[0] + is_first):
            passed = sum([one > i for one in begun_of]) + (i == microbatch)
            if len(own[rank]) - passed > left:
                return False
            left += passed - sum([one > i for one in freed_of])
        return True

    def choose(rank: int) -> tuple[float, tuple[Kind, int]] | None:
        waiting = {key: arrived[key][taken[key]] for key in mine[rank] if taken[key] < len(arrived[key])}
        waiting = {key: at for key, at in waiting.items() if key[0] is not F or open_forward(rank, key[1])}
        if not waiting:
            return None
        start = max(until[rank], min(waiting.values()))
        order = turned if last[rank] is before else orders

        def urgency(key: tuple[Kind, int]) -> tuple[float, ...]:
            kind, stage = key
            depth = -stage if kind is F else stage
            chunk = {"deep": depth, "wide": -depth, "arrival": waiting[key]}[rule.chunks]
            return order[kind], chunk, depth

        best = min((key for key, at in waiting.items() if at <= start), key=urgency)
        if rule.patience:
            limit = start + rule.patience * problem.cost[best]
            sooner = [key for key, at in waiting.items() if start < at < limit and order[key[0]] < order[best[0]]]
            if sooner:
                best = min(sooner, key=lambda key: (waiting[key], urgency(key)))
                start = waiting[best]
        return start, best

    choices = [choose(rank) for rank in range(ranks)]
    for _ in range(problem.actions):
        start, rank = min(((choice[0], rank) for rank, choice in enumerate(choices) if choice), default=(0.0, -1))
        choice = choices[rank] if rank >= 0 else None
        if choice is None:
            raise PlanError("nothing is left that a rank can do", where="schedule by rules")
        kind, stage = key = choice[1]
        end = until[rank] = start + problem.cost[key]
        plans[rank].append(Action(kind, stage, taken[key]))
        taken[key] += 1
        if kind is F:
            held[rank] += 1
            begun[rank] += 1
        if kind is free:
            held[rank] -= 1
        if kind is I:
            arrived[W, stage].append(end)
        if kind is not W:
            last[rank] = kind
        target, pair = problem.target(kind, stage), problem.crosses(kind, stage)
        if target is not None:
            if pair is not None:
                way = problem.ways[pair]
                way_free[pair] = max(end, way_free.get(pair, 0.0)) + way.occupied(kind)
                end = way_free[pair] + way.latency
            arrived[target].append(end)
            choices[problem.rank_of[target[1]]] = choose(problem.rank_of[target[1]])
        choices[rank] = choose(rank)
    return Schedule("tuned", problem.microbatches, problem.rank_of, tuple(map(tuple, plans)))


def _families(problem: Problem) -> Iterator[Schedule]:
    """Iterate over the known schedules for this placement of the stages, whether or not they fit in memory."""
    ranks, count, stages = problem.ranks, problem.microbatches, problem.stages
    if problem.rank_of == tuple(range(ranks)):
        yield one_forward_one_backward(ranks, count)
        period = max(sum(problem.cost[kind, stage] for kind in problem.kinds) for stage in range(stages))
        if period > 0:
            latencies = [(problem.travel(F, s) + problem.travel(problem.back, s + 1)) / 2 for s in range(stages - 1)]
            hidden = warmup_for_latency(latencies, period, 0.0)
            spare = [max(0, limit - ranks + rank) for rank, limit in enumerate(problem.limits)]
            clamped = [min(hidden[rank], *spare[: rank + 1]) for rank in range(ranks)]
            yield one_forward_one_backward(ranks, count, hidden)
            yield one_forward_one_backward(ranks, count, clamped)
        if problem.split:
            yield zero_bubble(ranks, count, 1)
            yield zero_bubble(ranks, count, 2)
        yield gpipe(ranks, count)
    elif stages % ranks == 0 and problem.rank_of == tuple(stage % ranks for stage in range(stages)):
        chunks = stages // ranks
        for group in sorted({min(ranks, count), min(2 * ranks, count), count}):
            if group >= min(ranks, count):
                yield interleaved(ranks, count, chunks, group)
        yield breadth_first(ranks, count, chunks)
    elif problem.rank_of == (*range(ranks), *reversed(range(ranks))) and problem.split:
        yield zero_bubble_v(ranks, count)
        if count >= 2 * ranks:
            yield dual_pipe_v(ranks, count)


def _rules(problem: Problem) -> Iterator[_Rule]:
    """Iterate over rules for all ranks alike, in order of how often each was the best."""
    yield _Rule()
    yield _Rule(turns=True)
    if problem.chunked:
        yield _Rule(chunks="arrival")
        for window in (1, 0, 2):
            yield _Rule(window=window)
            yield _Rule(turns=True, window=window)
        yield _Rule(turns=True, chunks="wide")
        yield _Rule(turns=True, chunks="wide", window=2)
    yield _Rule("FBW")
    for spare in (0, 1, 2):
        yield _Rule(spare=spare)
        yield _Rule(turns=True, spare=spare)
    yield _Rule(patience=1.0)
    yield _Rule("FBW", spare=0)
    if problem.split:
        yield _Rule("FWB")
        yield _Rule("BWF")
    if problem.chunked:
        most = min(problem.microbatches, *problem.limits)
        pairs = [
            (a, b) for a in range(1, most + 1) for b in range(1, most + 1) if a == b or a + b <= problem.microbatches
        ]
        for groups in sorted(pairs, key=lambda pair: (abs(pair[0] - pair[1]), pair)):
            for chunks in ("deep", "wide"):
                yield _Rule(chunks=chunks, groups=groups)
                yield _Rule(turns=True, chunks=chunks, groups=groups)
                yield _Rule("FBW", chunks=chunks, groups=groups)
                if problem.split:
                    yield _Rule("FWB", chunks=chunks, groups=groups)


class Numbered:
    """A problem and its schedules in the form of the compiled search."""

    def __init__(self, problem: Problem) -> None:
        from cordillera.planning.pipeline.local_search import Table

        self._problem, self._keys = problem, list(problem.cost)
        self._row = {key: i for i, key in enumerate(self._keys)}
        numbers = {pair: i for i, pair in enumerate(problem.ways)}
        needs = [-1] * len(self._keys)
        rows: list[tuple[float, ...]] = []
        for kind, stage in self._keys:
            target, pair = problem.target(kind, stage), problem.crosses(kind, stage)
            if target is not None:
                needs[self._row[target]] = self._row[kind, stage]
            if kind is W:
                needs[self._row[W, stage]] = self._row[I, stage]
            rank = problem.rank_of[stage]
            holds = {F: 1, problem.free: -1}.get(kind, 0)
            row = (stage, problem.own[rank].index(stage), problem.kinds.index(kind), rank, holds)
            way = Way() if pair is None else problem.ways[pair]
            sends = (-1, rank) if pair is None else (numbers[pair], pair[1])
            rows.append((*row, problem.cost[kind, stage], *sends, way.occupied(kind), way.latency))
        count = problem.microbatches
        stages, chunks, kinds, ranks, held, seconds, ways, targets, occupied, latencies = (
            np.repeat(np.array(column), count) for column in zip(*rows, strict=True)
        )
        needed = np.repeat(np.array(needs), count)
        self.table = Table(
            microbatches=count,
            begin=np.cumsum([0] + [len(own) * len(problem.kinds) * count for own in problem.own]),
            limits=np.array(problem.limits),
            stage=stages,
            chunk=chunks,
            kind=kinds,
            rank=ranks,
            needs=np.where(needed < 0, -1, needed * count + np.tile(np.arange(count), len(needs))),
            holds=held,
            seconds=seconds.astype(float),
            way=ways,
            target=targets,
            occupied=occupied.astype(float),
            latency=latencies.astype(float),
        )

    def order(self, schedule: Schedule) -> NDArray[np.int64]:
        """Return a schedule in the form of :meth:`Problem.normal` as numbers of actions, rank after rank."""
        count = self._problem.microbatches
        return np.array([self._row[a.kind, a.stage] * count + a.microbatch for a in schedule])

    def schedule(self, order: NDArray[np.int64]) -> Schedule:
        """Return the schedule of an array of numbers from :meth:`order`."""
        count = self._problem.microbatches
        rows = ((*self._keys[number // count], number % count) for number in order.tolist())
        actions = [Action(kind, stage, i) for kind, stage, i in rows]
        lists = (tuple(actions[a:b]) for a, b in pairwise(self.table.begin.tolist()))
        return Schedule("tuned", count, self._problem.rank_of, tuple(lists))


# Limits of the search, which make it take about as long for a large pipeline as for a small one.
_RULED = 120_000  # actions in all schedules made by rules
_CHANGES, _CHANGED = 60_000, 12_000_000  # changes in a round, and actions in all schedules that they make
_LEAST = 300  # changes of one schedule in a round


def shortest(problem: Problem, effort: float = 1.0) -> Schedule:
    """Run :func:`tuned` on a checked ``problem`` with an ``effort`` relative to that of :func:`tuned`."""
    from cordillera.planning.pipeline.local_search import improve

    enough = problem.bound * (1 + 1e-12)
    starts: dict[tuple[tuple[Action, ...], ...], tuple[float, Schedule]] = {}

    def consider(schedule: Schedule) -> bool:
        """Add a schedule; return whether it is provably the shortest."""
        if schedule.actions not in starts:
            starts[schedule.actions] = problem.timeline(schedule).seconds, schedule
        return starts[schedule.actions][0] <= enough

    for family in map(problem.normal, _families(problem)):
        if all(problem.fits(rank, actions) for rank, actions in enumerate(family.actions)) and consider(family):
            return family
    for rule in islice(_rules(problem), max(3, int(effort * _RULED) // problem.actions)):
        try:
            ruled = _listed(problem, rule)
        except PlanError:  # groups that do not fit
            continue
        if consider(ruled):
            return ruled

    # all starts are improved a little; the better half continues for twice as long, until one is left
    ranked = sorted(starts.values(), key=lambda item: item[0])
    best, table = ranked[0], Numbered(problem)
    changes = int(effort * min(_CHANGES, _CHANGED // problem.actions))
    pool = [(seconds, table.order(schedule)) for seconds, schedule in ranked[: max(1, changes // _LEAST)]]
    chance = np.random.default_rng(0)
    while True:
        for i, (_, order) in enumerate(pool):
            pool[i] = improve(table.table, order, changes // len(pool), enough, chance)
            if pool[i][0] <= enough:
                return table.schedule(pool[i][1])
        pool.sort(key=lambda item: item[0])
        if len(pool) == 1:
            break
        del pool[(len(pool) + 1) // 2 :]
    return table.schedule(pool[0][1]) if pool[0][0] < best[0] else best[1]


def tuned(
    rank_of: Sequence[int],
    microbatches: int,
    seconds: StageSeconds,
    ways: Ways | None = None,
    limits: Sequence[int] | None = None,
    split_backward: bool = False,
) -> Schedule:
    """Find a short schedule within memory limits by rules and local search, the same on every call.

    :func:`~cordillera.planning.pipeline.solver.optimal` shows how far it is from the optimum: ``cordillera bench
    scaleacross --part solver`` compares them.

    Args:
        rank_of: Rank that holds each stage.
        microbatches: ``m``, number of microbatches.
        seconds: Seconds of the actions of the stages; joined pairs are not made.
        ways: Ways from rank to rank: a function of both, or a mapping in which a missing pair costs nothing.
        limits: Largest number of forwards whose activations each rank may hold at a time; None for no limit.
        split_backward: Whether weight gradients may be computed separately from input gradients.

    Raises:
        PlanError: If times are invalid, or limits let no microbatch pass.
    """
    return shortest(Problem.of(rank_of, microbatches, seconds, ways, limits, split_backward))
