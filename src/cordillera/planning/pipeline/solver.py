"""The shortest pipeline schedule within memory limits, proven by a solver: OR-tools' CP-SAT.

The search starts from :func:`cordillera.planning.pipeline.tuning.tuned`, which it judges. Schedules are of the same
kind: microbatches of every stage in order, no joined pairs of actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from typing import Any

from cordillera.errors import DependencyError
from cordillera.planning.pipeline.problem import B, F, I, Problem, W
from cordillera.planning.pipeline.schedules import Action, Kind, Schedule
from cordillera.planning.pipeline.simulator import StageSeconds, Timeline, Way, Ways
from cordillera.planning.pipeline.tuning import shortest


@dataclass(frozen=True)
class Solved:
    """A schedule and its distance from the optimum.

    Attributes:
        schedule: Best schedule found.
        seconds: Simulated seconds of the schedule.
        bound: Lower bound on the seconds of every schedule of this problem.
        optimal: Whether no schedule is shorter. The proof is exact if times are multiples of one unit (see
            :func:`optimal`); otherwise it holds up to the rounding, which is the difference between ``seconds`` and
            ``bound``.
    """

    schedule: Schedule
    seconds: float
    bound: float
    optimal: bool


def _unit(values: Sequence[float], longest: float) -> tuple[Fraction, bool]:
    """Return a unit of time for a solver of whole numbers, and whether all values are multiples of it."""
    parts = [Fraction(value).limit_denominator(1_000_000) for value in values if value]
    exact = all(
        abs(float(part) - value) <= 1e-12 * value for part, value in zip(parts, filter(None, values), strict=True)
    )
    if parts and exact:
        whole = reduce(math.lcm, (part.denominator for part in parts))
        unit = Fraction(reduce(math.gcd, (int(part * whole) for part in parts)), whole)
        if longest / unit < 1 << 24:
            return unit, True
    return Fraction(longest) / (1 << 24) or Fraction(1), not parts


def _in_units(problem: Problem, unit: Fraction, exact: bool) -> Problem:
    """Return the problem with whole numbers for times: exact, or rounded down so that its bound is a bound."""

    def whole(value: float) -> float:
        return float(round(Fraction(value) / unit) if exact else Fraction(value) // unit)

    times = problem.seconds
    forward, inputs, weights = (
        [whole(v) for v in part] for part in (times.forward, times.input_gradient, times.weight_gradient)
    )
    ways = {
        pair: Way(whole(way.latency), whole(way.forward), None if way.backward is None else whole(way.backward))
        for pair, way in problem.ways.items()
    }
    return replace(problem, seconds=StageSeconds(forward, inputs, weights), ways=ways)


def optimal(
    rank_of: Sequence[int],
    microbatches: int,
    seconds: StageSeconds,
    ways: Ways | None = None,
    limits: Sequence[int] | None = None,
    split_backward: bool = False,
    time_limit_s: float = 60.0,
) -> Solved:
    """Find the schedule with the shortest step by OR-tools' CP-SAT, or the best within a time limit and a bound.

    Actions are intervals that do not overlap on their rank. Messages are intervals that do not overlap on their way and
    leave in the order of their producers. Activations are held from the start of a forward to the end of the whole
    backward or of the weights' part. The search starts from :func:`~cordillera.planning.pipeline.tuning.tuned`. Times
    are whole multiples of one unit if there is one (denominators up to 1,000,000, to 12 digits, and a step of less than
    ``2**24`` units). Otherwise they are rounded down to ``2**-24`` of the step that rules find, so that the bound
    remains a bound. Which of several schedules of equal length is returned may differ from call to call.

    The arguments ``rank_of``, ``microbatches``, ``seconds``, ``ways``, ``limits`` and ``split_backward`` are those of
    :func:`~cordillera.planning.pipeline.tuning.tuned`. The solver runs on two threads for at most ``time_limit_s``
    seconds.

    Raises:
        DependencyError: If OR-tools is not installed.
        PlanError: If times are invalid, or limits let no microbatch pass.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise DependencyError(
            "optimal schedules need OR-tools",
            where="cordillera.planning",
            remedy="pip install -e '.[plan]' in the repository",
        ) from error

    problem = Problem.of(rank_of, microbatches, seconds, ways, limits, split_backward)
    first = shortest(problem)
    reached = problem.timeline(first).seconds
    if reached <= problem.bound * (1 + 1e-12):
        return Solved(first, reached, min(reached, problem.bound), True)

    times = (*problem.seconds.forward, *problem.seconds.input_gradient, *problem.seconds.weight_gradient)
    messages = [t for way in problem.ways.values() for t in (way.latency, way.occupied(F), way.occupied(B))]
    unit, exact = _unit([*times, *messages], reached)
    scaled = _in_units(problem, unit, exact)
    begin = scaled.timeline(first)
    model = cp_model.CpModel()
    start = _stated(scaled, model, int(begin.seconds), begin)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(model)

    best = first
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        # actions of no duration precede those that start at the same time, in the order of their dependencies
        def place(item: tuple[Kind, int, int]) -> tuple[int, float, int, int]:
            kind, stage, microbatch = item
            depth = {F: stage, W: 2 * scaled.stages}.get(kind, 2 * scaled.stages - 1 - stage)
            return solver.value(start[item]), scaled.cost[kind, stage], depth, microbatch

        lists = (
            sorted((item for item in start if scaled.rank_of[item[1]] == r), key=place) for r in range(scaled.ranks)
        )
        made = Schedule(
            "optimal", microbatches, problem.rank_of, tuple(tuple(Action(*i) for i in one) for one in lists)
        )
        taken = problem.timeline(made).seconds
        if taken < reached:
            best, reached = made, taken
    proven = status == cp_model.OPTIMAL
    least = problem.bound
    if status != cp_model.UNKNOWN:
        least = max(least, float(Fraction(solver.best_objective_bound) * unit))
    return Solved(best, reached, reached if proven and exact else min(least, reached), proven)


# One list of constraints, in the order in which `optimal` describes them, over the same starts and costs.
def _stated(problem: Problem, model: Any, horizon: int, hint: Timeline) -> dict[tuple[Kind, int, int], Any]:
    """Add a problem in whole numbers to a model; return the variables of the actions' starts."""
    count = problem.microbatches
    cost = {key: int(value) for key, value in problem.cost.items()}
    start = {
        (*key, i): model.new_int_var(0, horizon - cost[key], "{}{} {}".format(*key, i))
        for key in cost
        for i in range(count)
    }
    for own in problem.own:
        model.add_no_overlap(
            [
                model.new_fixed_size_interval_var(start[kind, stage, i], cost[kind, stage], "")
                for kind in problem.kinds
                for stage in own
                for i in range(count)
            ]
        )
    for (kind, stage), duration in cost.items():
        for i in range(count - 1):
            model.add(start[kind, stage, i + 1] >= start[kind, stage, i] + duration)
        if kind is I:
            for i in range(count):
                model.add(start[W, stage, i] >= start[I, stage, i] + duration)

    sent: dict[tuple[int, int], dict[tuple[Kind, int], list[Any]]] = {}
    for (kind, stage), duration in cost.items():
        target, pair = problem.target(kind, stage), problem.crosses(kind, stage)
        if target is None:
            continue
        latency = occupied = 0
        if pair is not None:
            latency, occupied = int(problem.ways[pair].latency), int(problem.ways[pair].occupied(kind))
        # messages that occupy a way for no time wait only for those that occupy it
        queued = pair is not None and max(problem.ways[pair].occupied(k) for k in (F, problem.back)) > 0
        for i in range(count):
            leaves = start[kind, stage, i] + duration
            if queued and pair is not None:
                begun = model.new_int_var(0, horizon, "")
                model.add(begun >= leaves)
                sent.setdefault(pair, {}).setdefault((kind, stage), []).append(begun)
                leaves = begun + occupied
            model.add(start[(*target, i)] >= leaves + latency)
    for pair, queues in sent.items():
        size = {key: int(problem.ways[pair].occupied(key[0])) for key in queues}
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(x, size[key], "") for key, queue in queues.items() for x in queue]
        )
        for key, queue in queues.items():
            for a, b in pairwise(queue):
                model.add(b >= a + size[key])
        keys = list(queues)
        for a, b in ((a, b) for n, a in enumerate(keys) for b in keys[n + 1 :]):
            for i in range(count):
                for j in range(count):
                    earlier = model.new_bool_var("")
                    for x, ix, y, iy, case in ((a, i, b, j, earlier), (b, j, a, i, ~earlier)):
                        model.add(start[(*y, iy)] >= start[(*x, ix)] + cost[x]).only_enforce_if(case)
                        model.add(queues[y][iy] >= queues[x][ix] + size[x]).only_enforce_if(case)

    for rank, own in enumerate(problem.own):
        limit = problem.limits[rank]
        if len(own) == 1:
            for i in range(count - limit):
                freed = start[problem.free, own[0], i] + cost[problem.free, own[0]]
                model.add(start[F, own[0], i + limit] >= freed)
        elif limit < count * len(own):
            spans = []
            for stage in own:
                for i in range(count):
                    freed = start[problem.free, stage, i] + cost[problem.free, stage]
                    held = model.new_int_var(0, horizon, "")
                    spans.append(model.new_interval_var(start[F, stage, i], held, freed, ""))
            model.add_cumulative(spans, [1] * len(spans), limit)

    end = model.new_int_var(int(problem.bound), horizon, "end")
    for stage in range(problem.stages):
        model.add(end >= start[problem.free, stage, count - 1] + cost[problem.free, stage])
    model.minimize(end)
    for actions, starts in zip(hint.schedule.actions, hint.starts, strict=True):
        for action, at in zip(actions, starts, strict=True):
            model.add_hint(start[action[:3]], int(at))
    return start
