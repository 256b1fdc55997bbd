"""Assignments of parts to ranks against the optimum: by enumeration, and by HiGHS for up to forty parts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from cordillera.planning.ranking.assignment import assign_well, loads_by_rank, slowest_sum

Problem = tuple[np.ndarray, np.ndarray, int, float]


def time_of(problem: Problem) -> float:
    costs, sizes, ranks, room = problem
    places = assign_well(costs, sizes, ranks, room)
    assert places is not None
    assert np.bincount(places, sizes, ranks).max() <= room * (1 + 1e-6)
    return slowest_sum(loads_by_rank(costs, places, ranks))


def optimum(problem: Problem, gap: float, seconds: float) -> float:
    """Least sum of the phases' largest loads, by HiGHS: proven up to a share ``gap``."""
    costs, sizes, ranks, room = problem
    parts, phases = costs.shape
    cells = parts * ranks
    limits = []
    once = np.zeros((parts, cells + phases))
    for part in range(parts):
        once[part, part * ranks : (part + 1) * ranks] = 1
    limits.append(LinearConstraint(once, 1, 1))
    for rank in range(ranks):
        loads, held = np.zeros((phases, cells + phases)), np.zeros((1, cells + phases))
        loads[:, rank:cells:ranks] = costs.T
        loads[:, cells:] = -np.eye(phases)
        held[0, rank:cells:ranks] = sizes
        limits += [LinearConstraint(loads, -np.inf, 0), LinearConstraint(held, -np.inf, room)]
    found = milp(
        np.append(np.zeros(cells), np.ones(phases)),
        integrality=np.append(np.ones(cells), np.zeros(phases)),
        bounds=Bounds(0, np.append(np.ones(cells), np.full(phases, np.inf))),
        constraints=limits,
        options={"mip_rel_gap": gap, "time_limit": seconds},
    )
    assert found.x is not None
    return float(found.mip_dual_bound)


def problem_of(seed: int, parts: int, ranks: int, slack: float) -> Problem:
    random = np.random.default_rng(seed)
    columns = random.choice([16, 32, 64, 128], parts)
    lookups = np.round(10 ** random.uniform(0, 1.3, parts))
    sizes = columns * 10 ** random.uniform(0, 4, parts)
    sizes = np.minimum(sizes, sizes.sum() / ranks)
    costs = np.stack([lookups * columns, 4.0 * columns + lookups, 3 * lookups * columns + 80 * lookups], axis=1)
    return costs / costs.sum(), sizes, ranks, slack * sizes.sum() / ranks


@given(seed=st.integers(0, 10_000), parts=st.integers(1, 6), ranks=st.integers(1, 3))
@settings(max_examples=25)
def test_few_parts_are_assigned_nearly_as_well_as_possible(seed: int, parts: int, ranks: int) -> None:
    costs, sizes, ranks, room = problem_of(seed, parts, ranks, 1e9)
    least = min(
        slowest_sum(loads_by_rank(costs, np.array(places), ranks))
        for places in itertools.product(range(ranks), repeat=parts)
    )
    assert time_of((costs, sizes, ranks, room)) <= 1.06 * least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "parts", "ranks", "slack"),
    [
        (seed, parts, ranks, slack)
        for seed in range(2)
        for parts, ranks in ((40, 2), (40, 4), (24, 3))
        for slack in (1.3, 9)
    ],
)
def test_forty_parts_are_within_two_percent_of_the_optimum(seed: int, parts: int, ranks: int, slack: float) -> None:
    problem = problem_of(seed, parts, ranks, slack)
    assert time_of(problem) <= 1.02 * optimum(problem, 2e-3, 8)


def test_one_problem_of_forty_parts_is_within_two_percent_of_the_optimum() -> None:
    problem = problem_of(0, 40, 2, 1.3)
    assert time_of(problem) <= 1.02 * optimum(problem, 5e-3, 120)


def test_parts_without_room_are_not_assigned() -> None:
    assert assign_well(np.ones((3, 2)), np.array([2.0, 2.0, 2.0]), 2, 3.0) is None
    places = assign_well(np.ones((3, 2)), np.array([2.0, 1.0, 1.0]), 2, 2.0)
    assert places is not None
    assert places.tolist() in ([0, 1, 1], [1, 0, 0])


def test_equal_problems_have_equal_assignments() -> None:
    costs, sizes, ranks, room = problem_of(5, 60, 4, 1.2)
    first, second = (assign_well(costs.copy(), sizes.copy(), ranks, room) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.tolist() == second.tolist()
