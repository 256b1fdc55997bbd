"""Rates are max-min fair by certificate and by linear programming; flows arrive when the sums by hand say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from tests.planning.flows import Flow, finish_times, max_min_rates

Problem = tuple[list[list[int]], list[float], list[float], list[float]]


@st.composite
def problems(draw: st.DrawFn, most_flows: int = 5) -> Problem:
    """Paths, capacities, limits and weights."""
    resources = draw(st.integers(1, 4))
    flows = draw(st.integers(1, most_flows))
    path = st.lists(st.integers(0, resources - 1), min_size=1, max_size=resources, unique=True)
    paths = draw(st.lists(path, min_size=flows, max_size=flows))
    capacities = draw(st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0, 40.0]), min_size=resources, max_size=resources))
    limits = draw(st.lists(st.sampled_from([math.inf, math.inf, 0.5, 2.0, 0.0]), min_size=flows, max_size=flows))
    weights = draw(st.lists(st.sampled_from([1.0, 1.0, 0.5, 3.0]), min_size=flows, max_size=flows))
    return paths, capacities, limits, weights


def lexicographic(
    paths: list[list[int]], capacities: list[float], limits: list[float], weights: list[float]
) -> NDArray:
    """The largest smallest rate for its weight, then the next smallest, ... by one linear program after another."""
    flows = len(paths)
    crossing = np.zeros((len(capacities), flows + 1))
    for f, path in enumerate(paths):
        crossing[path, f] = 1
    above_level = np.hstack([-np.eye(flows), np.array(weights)[:, None]])  # weight * level - rate <= 0
    bounds = [(0.0, None if math.isinf(limit) else limit) for limit in limits]
    rates = np.full(flows, np.nan)

    def solve(objective: NDArray, free: NDArray, level: tuple[float, float | None]) -> float:
        fixed = [(r, r) if math.isfinite(r) else b for r, b in zip(rates, bounds, strict=True)]
        rows = np.vstack([crossing, above_level[free]])
        limit = np.r_[np.array(capacities) + 1e-9, np.zeros(int(free.sum())) + 1e-9]
        found = linprog(-objective, A_ub=rows, b_ub=limit, bounds=[*fixed, level], method="highs")
        assert found.status == 0, found.message
        return -found.fun

    while np.isnan(rates).any():
        free = np.isnan(rates)
        unit = np.eye(flows + 1)
        level = solve(unit[flows], free, (0.0, None))
        cannot_rise = [
            f for f in np.flatnonzero(free) if solve(unit[f], free, (level - 1e-9, level)) <= weights[f] * level + 1e-6
        ]
        assert cannot_rise
        rates[cannot_rise] = np.array(weights)[cannot_rise] * level
    return rates


def is_max_min(
    rates: Sequence[float] | NDArray,
    paths: list[list[int]],
    capacities: Sequence[float] | NDArray,
    limits: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    counts: Sequence[int] | None = None,
) -> bool:
    """Check a certificate, without solving again, of rates that are max-min fair.

    No resource carries more than its capacity, and every flow is at its limit or uses a saturated resource on which no
    flow has a higher rate for its weight (Bertsekas and Gallager, Data Networks, section 6.5.2).
    """
    flows, slack = range(len(paths)), 1e-9
    limits, weights, counts = (
        limits or [math.inf] * len(paths),
        weights or [1.0] * len(paths),
        counts or [1] * len(paths),
    )
    usage, highest = np.zeros(len(capacities)), np.zeros(len(capacities))
    for f in flows:
        for resource in paths[f]:
            usage[resource] += rates[f] * counts[f]
            highest[resource] = max(highest[resource], rates[f] / weights[f])
    if (
        not all(0 <= rates[f] <= limits[f] * (1 + slack) for f in flows)
        or (usage > np.array(capacities) * (1 + slack)).any()
    ):
        return False
    saturated = usage >= np.array(capacities) * (1 - slack)
    return all(
        rates[f] >= limits[f] * (1 - slack)
        or any(saturated[r] and rates[f] / weights[f] >= highest[r] * (1 - slack) for r in paths[f])
        for f in flows
    )


@given(problems())
@settings(max_examples=60)
def test_the_solver_equals_linear_programming(problem: Problem) -> None:
    np.testing.assert_allclose(max_min_rates(*problem), lexicographic(*problem), atol=1e-6)


@given(problems(most_flows=30), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_the_certificate_holds_and_notices_any_change(problem: Problem, seed: int) -> None:
    rates = max_min_rates(*problem)
    assert is_max_min(rates, *problem)
    random = np.random.default_rng(seed)
    f = int(random.integers(rates.size))
    for factor in (0.99, 1.01):
        other = rates.copy()
        other[f] *= factor
        assert (rates[f] == 0) or not is_max_min(other, *problem)


def test_rates_by_hand() -> None:
    # Three flows over two links: the long one shares the narrow link, the short one of the wide link takes the rest.
    np.testing.assert_allclose(max_min_rates([[0, 1], [0], [1]], [10.0, 4.0]), [2, 8, 2])
    np.testing.assert_allclose(max_min_rates([[0], [0]], [9.0], weights=[1, 2]), [3, 6])
    np.testing.assert_allclose(max_min_rates([[0], [0], [0]], [9.0], limits=[1, np.inf, 4]), [1, 4, 4])
    np.testing.assert_allclose(max_min_rates([[0, 0], [0]], [9.0]), [3, 3])  # one crosses the resource twice
    assert max_min_rates([[], [], [1], [0]], [0.0, np.inf], [np.inf, 5, np.inf, np.inf]).tolist() == [
        np.inf,
        5,
        np.inf,
        0,
    ]
    assert max_min_rates([], [1.0]).size == 0


def test_the_certificate_refuses_overload_waste_and_unfairness() -> None:
    paths, capacities = [[0], [0]], [10.0]
    assert is_max_min([5, 5], paths, capacities)
    assert not is_max_min([6, 6], paths, capacities)
    assert not is_max_min([4, 4], paths, capacities)
    assert not is_max_min([6, 4], paths, capacities)
    assert not is_max_min([np.nan, 5], paths, capacities)
    assert not is_max_min([5, 5], paths, capacities, limits=[1, np.inf])
    assert is_max_min([6, 4], paths, capacities, weights=[3, 2])


def test_finish_times_by_hand() -> None:
    # Alone at 10 until 1 s; then 5 each until the first has its 15 bytes at 2 s; the second ends its 15 at 3 s.
    flows = [Flow(15, (0,)), Flow(15, (0,), start=1.0, latency=0.5)]
    np.testing.assert_allclose(finish_times(flows, [10.0]), [2.0, 3.5])
    # Nothing to send, nothing in the way, and a late start after a pause.
    flows = [Flow(0, (0,), start=2.0, latency=1.0), Flow(8, (), latency=1.0), Flow(8, (0,), start=7.0)]
    np.testing.assert_allclose(finish_times(flows, [4.0]), [3.0, 1.0, 9.0])
    assert finish_times([], [1.0]).size == 0
    assert finish_times([Flow(8, (0,), limit=2.0, count=3)], [9.0]).tolist() == [4.0]


timed = st.builds(
    Flow,
    bytes=st.floats(0, 100),
    path=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple),
    start=st.floats(0, 20),
    latency=st.floats(0, 3),
    limit=st.sampled_from([math.inf, 4.0]),
    weight=st.sampled_from([1.0, 2.0]),
    count=st.integers(1, 3),
)


@given(st.lists(timed, min_size=1, max_size=8))
@settings(max_examples=80)
def test_every_byte_is_sent_once_and_rates_are_fair_at_every_moment(flows: list[Flow]) -> None:
    capacities = [5.0, 9.0, 2.0]
    finish = finish_times(flows, capacities)
    ends = [float(finish[f]) - flow.latency for f, flow in enumerate(flows)]
    sent = np.zeros(len(flows))
    for begin, end in pairwise(sorted({*ends, *(flow.start for flow in flows)})):
        active = [f for f, flow in enumerate(flows) if flow.start <= begin and ends[f] >= end]
        now = [flows[f] for f in active]
        rates = max_min_rates(
            [flow.path for flow in now],
            capacities,
            [flow.limit for flow in now],
            [flow.weight for flow in now],
            [flow.count for flow in now],
        )
        sent[active] += rates * (end - begin)
    np.testing.assert_allclose(sent, [flow.bytes for flow in flows], atol=1e-6)
    for f, flow in enumerate(flows):
        alone = min([flow.limit, *(capacities[r] / flow.count for r in flow.path)])
        assert finish[f] >= flow.start + flow.bytes / alone + flow.latency - 1e-9
    # A resource moves its bytes no faster than its capacity.
    for r, capacity in enumerate(capacities):
        crossing = [f for f, flow in enumerate(flows) if r in flow.path]
        if crossing:
            span = max(finish[f] - flows[f].latency for f in crossing) - min(flows[f].start for f in crossing)
            assert sum(flows[f].bytes * flows[f].count for f in crossing) <= capacity * span + 1e-6
