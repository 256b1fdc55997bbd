"""The shortest pipeline schedule that fits in memory: proven by a solver, or found in seconds by rules.

:func:`optimal` puts the question to OR-tools' CP-SAT and returns a schedule with a bound that no schedule can beat.
:func:`tuned` needs no solver. It lets ranks choose by rules, alike on all ranks and then mixed, adds the known families
that fit in memory, improves the best by moving single actions along the critical path, and returns what takes the
shortest step in the simulator. The former measures the latter.

Both keep the microbatches of every stage in order: forwards, backwards and weight gradients alike. Nothing is lost by
that: microbatches are equal, so the ``k``-th action of a kind in a stage can be given to microbatch ``k``, and what it
needs is then there no later than before. Joined pairs of actions are not considered.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any

from cordillera.errors import DependencyError, PlanError
from cordillera.planning.schedules import (
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
from cordillera.planning.simulator import StageSeconds, Timeline, Way, simulate

Ways = Mapping[tuple[int, int], Way] | Callable[[int, int], Way]

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741 (the field's letters)


@dataclass(frozen=True)
class _Problem:
    """One step that is to be scheduled, checked once.

    Attributes:
        rank_of: The rank that holds each stage.
        microbatches: ``m``.
        seconds: Of the stages' actions.
        ways: Those that messages take.
        limits: Live forwards of each rank, never more than there are.
        split: Whether backwards are done in two parts.
    """

    rank_of: tuple[int, ...]
    microbatches: int
    seconds: StageSeconds
    ways: dict[tuple[int, int], Way]
    limits: tuple[int, ...]
    split: bool

    @classmethod
    def of(
        cls,
        rank_of: Sequence[int],
        microbatches: int,
        seconds: StageSeconds,
        ways: Ways | None,
        limits: Sequence[int] | None,
        split: bool,
    ) -> _Problem:
        if microbatches < 1:
            raise PlanError(f"{microbatches} is too few", where="microbatches", remedy="at least 1")
        ranks = max(rank_of, default=-1) + 1
        if not rank_of or set(rank_of) != set(range(ranks)):
            raise PlanError(
                f"{list(rank_of)} leaves ranks without a stage",
                where="rank_of",
                remedy="ranks count from 0 without gaps",
            )
        seconds.check(len(rank_of))
        pairs = {(a, b) for a, b in pairwise(rank_of) if a != b}
        found = {}
        for pair in sorted(pairs | {(b, a) for a, b in pairs}):
            found[pair] = ways(*pair) if callable(ways) else (ways or {}).get(pair, Way())
            found[pair].check(f"way from rank {pair[0]} to rank {pair[1]}")
        chunks = [list(rank_of).count(rank) for rank in range(ranks)]
        most = [microbatches * count for count in chunks]
        room = most if limits is None else list(limits)
        if len(room) != ranks:
            raise PlanError(f"{len(room)} values for {ranks} ranks", where="limits")
        for rank, (limit, count) in enumerate(zip(room, chunks, strict=True)):
            if limit < count:
                raise PlanError(
                    f"rank {rank} has room for {limit} live forwards and holds {count} stages",
                    where="limits",
                    remedy=f"a microbatch passes only where there is room for one of each stage: at least {count}",
                )
        return cls(tuple(rank_of), microbatches, seconds, found, tuple(map(min, room, most)), split)

    @property
    def ranks(self) -> int:
        return len(self.limits)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def own(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in order."""
        return tuple(tuple(s for s, holder in enumerate(self.rank_of) if holder == r) for r in range(self.ranks))

    @property
    def chunked(self) -> bool:
        return self.stages > self.ranks

    @property
    def back(self) -> Kind:
        """The kind that passes gradients on."""
        return I if self.split else B

    @property
    def free(self) -> Kind:
        """The kind that frees activations."""
        return W if self.split else B

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (F, I, W) if self.split else (F, B)

    @property
    def actions(self) -> int:
        return self.microbatches * self.stages * len(self.kinds)

    @cached_property
    def cost(self) -> dict[tuple[Kind, int], float]:
        return {(kind, s): self.seconds.of(Action(kind, s, 0)) for s in range(self.stages) for kind in self.kinds}

    def target(self, kind: Kind, stage: int) -> tuple[Kind, int] | None:
        """What can begin elsewhere, or in the last stage itself, when an action has ended."""
        if kind is F:
            return (F, stage + 1) if stage + 1 < self.stages else (self.back, stage)
        return (kind, stage - 1) if kind is self.back and stage else None

    def crosses(self, kind: Kind, stage: int) -> tuple[int, int] | None:
        """The way that the message of an action takes; None where there is no message."""
        target = self.target(kind, stage)
        if target is None or self.rank_of[target[1]] == self.rank_of[stage]:
            return None
        return self.rank_of[stage], self.rank_of[target[1]]

    def travel(self, kind: Kind, stage: int) -> float:
        """Seconds from the end of an action to its result's arrival, where the way is free."""
        pair = self.crosses(kind, stage)
        return 0.0 if pair is None else self.ways[pair].occupied(kind) + self.ways[pair].latency

    @cached_property
    def reach(self) -> tuple[list[float], list[float]]:
        """For each stage the seconds before its first forward can start, and those that follow its last backward."""
        before, after = [0.0], [0.0]
        for stage in range(self.stages - 1):
            before.append(before[-1] + self.cost[F, stage] + self.travel(F, stage))
            after.append(after[-1] + self.travel(self.back, stage + 1) + self.cost[self.back, stage])
        return before, after

    @cached_property
    def bound(self) -> float:
        """Seconds that no schedule can beat: a rank's work with what must come before and follow, or one microbatch."""
        before, after = self.reach
        last = self.stages - 1
        best = before[last] + self.cost[F, last] + self.cost[self.back, last] + after[last]
        for own in self.own:
            work = self.microbatches * sum(self.cost[kind, stage] for kind in self.kinds for stage in own)
            best = max(best, before[own[0]] + work + (0.0 if self.split else after[own[0]]))
        return best

    def under_way(self, stage: int) -> int:
        """Live forwards of a stage that keep its rank busy if nothing waits: time there and back over the period."""
        before, after = self.reach
        last = self.stages - 1
        there = before[last] - before[stage] + self.cost[F, last]
        back = after[last] - after[stage] + self.cost[self.back, last]
        period = sum(self.cost[kind, other] for kind in self.kinds for other in self.own[self.rank_of[stage]])
        return min(self.microbatches, math.ceil((there + back) / period - 1e-9)) if period else self.microbatches

    def timeline(self, schedule: Schedule) -> Timeline:
        return simulate(schedule, self.seconds, self.ways)

    def fits(self, rank: int, actions: Sequence[Action]) -> bool:
        """Whether a rank's list keeps to its limit."""
        held = 0
        for action in actions:
            if action.kind is F:
                held += 1
                if held > self.limits[rank]:
                    return False
            elif action.kind is self.free:
                held -= 1
        return True

    def normal(self, schedule: Schedule) -> Schedule:
        """The same schedule with microbatches in order, backwards as they are wanted, and no joined pairs."""
        lists = []
        for actions in schedule.actions:
            number: dict[tuple[Kind, int], int] = {}
            own = []
            for action in actions:
                parts = [I, W] if self.split and action.kind is B else [action.kind]
                for kind in parts:
                    place = number.setdefault((kind, action.stage), 0)
                    number[kind, action.stage] += 1
                    own.append(Action(kind, action.stage, place))
            lists.append(tuple(own))
        return replace(schedule, actions=tuple(lists))


@dataclass(frozen=True)
class _Rule:
    """How a rank that is free chooses.

    Attributes:
        order: Kinds of work, the most urgent first; ``B`` stands for the input's gradient too.
        turns: Whether forward and backward take turns.
        spare: How many live forwards a rank allows itself beyond those that keep it busy; None for all that fit.
        chunks: Which of several chunks comes first: ``deep`` what is closest to its end, ``wide`` what is furthest from
            it, ``arrival`` what came first.
        patience: Work is put off if more urgent work arrives within this part of its time.
        window: How many microbatches more than the limit has whole room for may be begun on a rank; None for any
            number.
        group: Forwards pass the chunks in groups of so many microbatches, strictly; None for any order.
    """

    order: str = "BFW"
    turns: bool = False
    spare: int | None = None
    chunks: str = "deep"
    patience: float = 0.0
    window: int | None = None
    group: int | None = None


_VALUES: dict[str, tuple[Any, ...]] = {
    "order": ("BFW", "FBW", "BWF", "FWB", "WBF"),
    "turns": (False, True),
    "spare": (None, 0, 1, 2),
    "patience": (0.0, 0.5, 1.0),
    "chunks": ("deep", "wide", "arrival"),
    "window": (None, 0, 1, 2),
}


def _listed(problem: _Problem, rules: Sequence[_Rule]) -> Schedule:
    """The schedule that one rule for each rank makes: in the order of time, ranks choose among what has arrived.

    Raises:
        PlanError: Where groups do not fit in the limits.
    """
    ranks, count, own, back, free = problem.ranks, problem.microbatches, problem.own, problem.back, problem.free
    room, windows, orders, turned, sequences = [], [], [], [], []
    for rank, rule in enumerate(rules):
        limit, chunks = problem.limits[rank], len(own[rank])
        if rule.spare is not None:
            limit = max(chunks, min(limit, rule.spare + sum(map(problem.under_way, own[rank]))))
        room.append(limit)
        windows.append(count if rule.window is None else max(1, problem.limits[rank] // chunks + rule.window))
        place = {{"F": F, "B": back, "W": W}[letter]: i for i, letter in enumerate(rule.order)}
        orders.append(place)
        turned.append({**place, F: place[back], back: place[F]} if rule.turns else place)
        group = rule.group
        forwards = [(stage, i) for stage in own[rank] for i in range(count)] if group else []
        sequences.append(sorted(forwards, key=lambda item: (item[1] // (group or 1), item)))

    arrived: dict[tuple[Kind, int], list[float]] = {key: [] for key in problem.cost}  # by microbatch, in order
    arrived[F, 0] = [0.0] * count
    taken = dict.fromkeys(problem.cost, 0)
    mine = [[key for key in problem.cost if problem.rank_of[key[1]] == rank] for rank in range(ranks)]
    until = [0.0] * ranks
    held, begun = [0] * ranks, [0] * ranks
    last = [back] * ranks
    way_free: dict[tuple[int, int], float] = {}
    plans: list[list[Action]] = [[] for _ in range(ranks)]

    def open_forward(rank: int, stage: int) -> bool:
        """Whether there is room for a forward, and then still for all that is needed to finish, the oldest first."""
        left = room[rank] - held[rank] - 1
        if left < 0:
            return False
        if len(own[rank]) == 1:
            return True
        microbatch = taken[F, stage]
        if sequences[rank]:
            return sequences[rank][begun[rank]] == (stage, microbatch)
        first, oldest = own[rank][0], min(taken[free, s] for s in own[rank])
        if stage == first and microbatch - oldest >= windows[rank]:
            return False
        for i in range(oldest, taken[F, first] + (stage == first)):
            passed = sum(taken[F, s] > i for s in own[rank]) + (i == microbatch)
            if len(own[rank]) - passed > left:
                return False
            left += passed - sum(taken[free, s] > i for s in own[rank])
        return True

    def choose(rank: int) -> tuple[float, tuple[Kind, int]] | None:
        rule = rules[rank]
        waiting = {key: arrived[key][taken[key]] for key in mine[rank] if taken[key] < len(arrived[key])}
        waiting = {key: at for key, at in waiting.items() if key[0] is not F or open_forward(rank, key[1])}
        if not waiting:
            return None
        start = max(until[rank], min(waiting.values()))
        before = F if orders[rank][F] < orders[rank][back] else back
        order = turned[rank] if last[rank] is before else orders[rank]

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


def _families(problem: _Problem) -> Iterator[Schedule]:
    """The known schedules for this placement of the stages, whether or not they fit in memory."""
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


def _rules(problem: _Problem) -> Iterator[_Rule]:
    """Rules for all ranks alike, those first that were most often the best."""
    yield _Rule()
    yield _Rule(turns=True)
    if problem.chunked:
        whole = [limit // len(own) for limit, own in zip(problem.limits, problem.own, strict=True)]
        for window in (1, 0, 2):
            yield _Rule(window=window)
            yield _Rule(turns=True, window=window)
        for group in dict.fromkeys((min(whole), problem.ranks, (min(whole) + 1) // 2, max(whole), min(whole) + 1)):
            yield _Rule(group=group)
            yield _Rule(turns=True, group=group)
            yield _Rule("FBW", group=group)
        yield _Rule(turns=True, chunks="wide")
        yield _Rule(turns=True, chunks="wide", window=2)
        yield _Rule(chunks="arrival")
    yield _Rule("FBW")
    for spare in (0, 1, 2):
        yield _Rule(spare=spare)
        yield _Rule(turns=True, spare=spare)
    yield _Rule(patience=1.0)
    yield _Rule("FBW", spare=0)
    if problem.split:
        yield _Rule("FWB")
        yield _Rule("BWF")


def _critical(problem: _Problem, timeline: Timeline) -> list[tuple[int, int, int]]:
    """Runs of actions without a pause along a longest path, as rank, first and last place; none of a single action."""
    schedule = timeline.schedule
    at = {action[:3]: (r, j) for r, actions in enumerate(schedule.actions) for j, action in enumerate(actions)}
    starts, ends = [s.tolist() for s in timeline.starts], [e.tolist() for e in timeline.ends]
    rank = max(range(schedule.ranks), key=lambda r: ends[r][-1])
    place = last = len(ends[rank]) - 1
    runs = []
    while True:
        if place and ends[rank][place - 1] >= starts[rank][place] * (1 - 1e-12):
            place -= 1
            continue
        if last > place:
            runs.append((rank, place, last))
        needs = schedule.needs(schedule.actions[rank][place])
        if not needs:
            return runs

        def arrival(need: tuple[Kind, int, int], rank: int = rank) -> float:
            source, i = at[need]
            return ends[source][i] + (problem.travel(need[0], need[1]) if source != rank else 0.0)

        rank, place = at[max(needs, key=arrival)]
        last = place


def _improved(problem: _Problem, schedule: Schedule, steps: int, seed: int) -> Schedule:
    """A schedule after so many simulations of itself with one action moved within a run of its critical path.

    A move is kept if the step is not longer than it was 20 moves ago (late acceptance, Burke and Bykov 2017); the best
    that was met is returned.
    """
    chance = random.Random(seed)

    def value(timeline: Timeline) -> tuple[float, float]:
        return timeline.seconds, sum(float(ends[-1]) for ends in timeline.ends)

    timeline = problem.timeline(schedule)
    now = best = value(timeline)
    runs, found, current = _critical(problem, timeline), schedule, schedule
    late = [now] * 20
    simulated = 0
    for _ in range(20 * steps):
        if simulated == steps or not runs or best[0] <= problem.bound * (1 + 1e-12):
            break
        rank, first, last = runs[chance.randrange(len(runs))]
        source, target = [
            (chance.randrange(first, last + 1), first),
            (chance.randrange(first, last + 1), last),
            (last, chance.randrange(first, last)),
            (first, chance.randrange(first + 1, last + 1)),
        ][chance.randrange(4)]
        actions = list(current.actions[rank])
        moved = actions[source]
        passed = actions[target:source] if target < source else actions[source + 1 : target + 1]
        # an action passes none of its own stage that is of its kind or its microbatch
        if any(a.stage == moved.stage and (a.kind is moved.kind or a[2] == moved[2]) for a in passed):
            continue
        actions.insert(target, actions.pop(source))
        if source == target or not problem.fits(rank, actions):
            continue
        lists = (tuple(actions) if r == rank else old for r, old in enumerate(current.actions))
        changed = Schedule("tuned", problem.microbatches, problem.rank_of, tuple(lists))
        simulated += 1
        try:
            timeline = problem.timeline(changed)
        except PlanError:  # ranks would wait for one another
            continue
        new = value(timeline)
        if new <= now or new <= late[simulated % len(late)]:
            current, now, runs = changed, new, _critical(problem, timeline)
            if now < best:
                best, found = now, changed
        late[simulated % len(late)] = now
    return found


def _tuned(problem: _Problem) -> Schedule:
    """:func:`tuned` for a checked problem."""
    # what may be tried falls with the size, so that a large pipeline takes about as long as a small one
    few, mixes, steps = (min(most, work // problem.actions) for most, work in _EFFORT)
    candidates: dict[tuple[tuple[Action, ...], ...], tuple[float, Schedule]] = {}
    best: tuple[float, Schedule] | None = None

    def consider(schedule: Schedule) -> float:
        nonlocal best
        if schedule.actions not in candidates:
            candidates[schedule.actions] = found = problem.timeline(schedule).seconds, schedule
            if best is None or found[0] < best[0]:
                best = found
        return candidates[schedule.actions][0]

    def done() -> bool:
        return best is not None and best[0] <= problem.bound * (1 + 1e-12)

    for family in map(problem.normal, _families(problem)):
        if all(problem.fits(rank, actions) for rank, actions in enumerate(family.actions)):
            consider(family)
    tried: list[tuple[float, _Rule]] = []
    for rule in _rules(problem):
        if done() or len(tried) >= max(4, few):
            break
        try:
            tried.append((consider(_listed(problem, [rule] * problem.ranks)), rule))
        except PlanError:  # groups that do not fit
            continue

    # one rule for each rank, changed on a rank or two at a time
    names = list(_VALUES) if problem.chunked else ["order", "turns", "spare", "patience"]
    for seed, (seconds, rule) in enumerate(sorted(tried, key=lambda item: item[0])[:2]):
        chance = random.Random(seed)
        rules = [rule] * problem.ranks
        for _ in range(mixes // 2):
            if done():
                break
            name = chance.choice(names)
            if chance.random() < 0.3:
                mixed = [replace(chance.choice(rules), **{name: chance.choice(_VALUES[name])})] * problem.ranks
            else:
                mixed = list(rules)
                for _ in range(chance.randrange(1, 3)):
                    rank = chance.randrange(problem.ranks)
                    mixed[rank] = replace(mixed[rank], **{name: chance.choice(_VALUES[name])})
                    name = chance.choice(names)
            try:
                taken = consider(_listed(problem, mixed))
            except PlanError:
                continue
            if taken <= seconds:
                rules, seconds = mixed, taken

    ranked = sorted(candidates.values(), key=lambda item: item[0])
    starts = min(len(ranked), 16)
    for seed, (_, schedule) in enumerate(ranked[:starts]):
        if done():
            break
        consider(_improved(problem, schedule, steps // starts, seed))
    assert best is not None
    return best[1]


# rules, mixes of rules and moved actions: the most of each, and the most actions that all of them together may have
_EFFORT = ((60, 120_000), (300, 60_000), (3200, 600_000))


def tuned(
    rank_of: Sequence[int],
    microbatches: int,
    seconds: StageSeconds,
    ways: Ways | None = None,
    limits: Sequence[int] | None = None,
    split_backward: bool = False,
) -> Schedule:
    """A short schedule within memory limits, found by rules and a little search; the same on every call.

    :func:`optimal` tells how far it is from the best. Measured on equal stages with latencies up to four forwards: one
    stage a rank, up to four ranks and eight microbatches, none was longer than the best; with two stages a rank nine in
    ten were not, the others by 1 to 7 %.

    Args:
        rank_of: The rank that holds each stage.
        microbatches: ``m``.
        seconds: Of the stages' actions; joined pairs are not made.
        ways: From rank to rank: a function of both, or a mapping in which a missing pair is a way that costs nothing.
        limits: Forwards whose activations a rank may hold at a time; None for any number.
        split_backward: Whether the weights' gradients may be done apart from the inputs'.

    Raises:
        PlanError: For times that are not times, and for limits that let no microbatch pass.
    """
    return _tuned(_Problem.of(rank_of, microbatches, seconds, ways, limits, split_backward))


@dataclass(frozen=True)
class Solved:
    """A schedule, and how good it can be.

    Attributes:
        schedule: The best that was found.
        seconds: What the simulator says that it takes.
        bound: No schedule of this problem takes less.
        optimal: Whether it is proven that none is shorter. Exact where times are multiples of one unit (see
            :func:`optimal`); else up to the rounding, which is what remains between ``seconds`` and ``bound``.
    """

    schedule: Schedule
    seconds: float
    bound: float
    optimal: bool


def _unit(values: Sequence[float], longest: float) -> tuple[Fraction, bool]:
    """The unit of time for a solver that knows whole numbers, and whether all values are multiples of it."""
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


def _in_units(problem: _Problem, unit: Fraction, exact: bool) -> _Problem:
    """The problem with whole numbers for times: exact, or rounded down so that a bound of it is a bound."""

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
    """The schedule with the shortest step, by OR-tools' CP-SAT, or the best within a time with a bound.

    Actions are intervals that do not overlap on their rank, messages intervals that do not overlap on their way and
    leave in the order of their producers; activations are held from the start of a forward to the end of the whole
    backward or of the weights' part. The search starts from :func:`tuned`. Times are whole multiples of one unit where
    there is one (denominators up to 1,000,000, to 12 digits, and a step of less than ``2**24`` units); else they are
    rounded down to ``2**-24`` of the step that :func:`tuned` finds, so that the bound stays a bound. Of several
    schedules of equal length, which is returned may differ from call to call.

    Args:
        rank_of: The rank that holds each stage.
        microbatches: ``m``.
        seconds: Of the stages' actions; joined pairs are not made.
        ways: From rank to rank: a function of both, or a mapping in which a missing pair is a way that costs nothing.
        limits: Forwards whose activations a rank may hold at a time; None for any number.
        split_backward: Whether the weights' gradients may be done apart from the inputs'.
        time_limit_s: After how many seconds the solver stops, on two threads.

    Raises:
        DependencyError: If OR-tools is not installed.
        PlanError: For times that are not times, and for limits that let no microbatch pass.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise DependencyError(
            "optimal schedules need OR-tools", where="cordillera.planning", remedy="pip install 'cordillera[plan]'"
        ) from error

    problem = _Problem.of(rank_of, microbatches, seconds, ways, limits, split_backward)
    first = _tuned(problem)
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
        # actions that take no time come before those that start with them, in the order of their dependencies
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


def _stated(problem: _Problem, model: Any, horizon: int, hint: Timeline) -> dict[tuple[Kind, int, int], Any]:
    """Write a problem in whole numbers into a model; the variables of the actions' starts."""
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
        # messages that take no time wait only for such as do
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
