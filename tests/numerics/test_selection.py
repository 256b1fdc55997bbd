"""A search keeps its budget, with few evaluations, and gives what is left to save."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.errors import NumericsError
from cordillera.numerics.inference.selection import Change, Part, Selection, select, sweep_evaluations

OPTIONS = ("int4", "int8", "fp32")
HARM = {"int4": 1.0, "int8": 0.1, "fp32": 0.0}


def parts_of(sizes: list[float]) -> list[Part]:
    return [Part(f"t{i}", OPTIONS, (size / 8, size / 4, size)) for i, size in enumerate(sizes)]


def search(sizes: list[float], harms: list[float], budget: float) -> tuple[Selection, int]:
    """On a model whose parts add up."""
    calls = 0

    def evaluate(options: Mapping[str, str]) -> Change:
        nonlocal calls
        calls += 1
        mean = sum(harms[int(name[1:])] * HARM[option] for name, option in options.items())
        return Change(mean, mean, mean)

    return select(parts_of(sizes), evaluate, budget), calls


models = st.integers(1, 20).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(1, 1000), min_size=n, max_size=n), st.lists(st.floats(0, 1), min_size=n, max_size=n)
    )
)


@given(model=models, budget=st.floats(0, 2))
@settings(max_examples=200)
def test_the_budget_is_kept_in_few_evaluations(model: tuple[list[float], list[float]], budget: float) -> None:
    sizes, harms = model
    found, calls = search(sizes, harms, budget)
    harm = sum(harms[int(name[1:])] * HARM[option] for name, option in found.options.items())
    assert harm <= budget
    assert found.cost <= found.full_cost
    n = len(sizes)
    assert calls == len(found.evaluated) <= n + len(OPTIONS) + math.log2(n) + 1
    if n >= 4:
        assert calls <= 2 * sweep_evaluations(parts_of(sizes))
    if budget >= sum(harms):
        assert set(found.options.values()) == {"int4"}
        assert calls == 1


def test_one_sensitive_part_goes_back_alone() -> None:
    found, _ = search([100.0, 10.0, 100.0, 50.0], [0.0, 5.0, 0.0, 0.0], 0.6)
    assert found.options == {"t0": "int4", "t1": "int8", "t2": "int4", "t3": "int4"}
    assert found.alone["t1"].mean == 5.0


def test_what_is_worse_for_what_it_saves_goes_back_first() -> None:
    found, _ = search([1000.0, 1.0], [1.0, 1.0], 1.2)
    assert found.options == {"t0": "int4", "t1": "int8"}


def test_a_budget_that_nothing_keeps_ends_at_full_precision() -> None:
    found, _ = search([5.0, 5.0], [1.0, 1.0], 0.0)
    assert set(found.options.values()) == {"fp32"}
    assert found.cost == found.full_cost


def test_a_larger_budget_never_costs_more() -> None:
    sizes, harms = [float(3 * i % 7 + 1) for i in range(12)], [float(i % 5) / 10 for i in range(12)]
    costs = [search(sizes, harms, budget)[0].cost for budget in (0.0, 0.1, 0.3, 1.0, 3.0)]
    assert costs == sorted(costs, reverse=True)


def test_parts_without_a_choice_and_mistakes() -> None:
    found = select([Part("head", ("fp32",), (4.0,))], lambda options: Change(1, 1, 1), 0.0)
    assert found.options == {"head": "fp32"}
    with pytest.raises(NumericsError, match="budget"):
        select([], lambda options: Change(0, 0, 0), -1.0)
    with pytest.raises(NumericsError, match="2 options, 1 costs"):
        select([Part("x", ("a", "b"), (1.0,))], lambda options: Change(0, 0, 0), 0.0)


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (3.0, ["int4", "int4"]),  # a change that equals the budget keeps it
        (2.125, ["int4", "int8"]),
        (2.0, ["int8", "int4"]),
        (1.5, ["int8", "int4"]),
        (0.375, ["int8", "int8"]),
        (0.25, ["fp32", "int8"]),
        (0.1, ["fp32", "fp32"]),
    ],
)
def test_each_step_back_is_the_least_that_keeps_the_budget(budget: float, options: list[str]) -> None:
    """Two parts of one size, the first twice as harmful: 2 + 1 at int4, an eighth of each at int8."""
    harm = {"t0": 2.0, "t1": 1.0}
    share = {"int4": 1.0, "int8": 0.125, "fp32": 0.0}

    def evaluate(chosen: Mapping[str, str]) -> Change:
        mean = sum(harm[name] * share[option] for name, option in chosen.items())
        return Change(mean, mean, mean)

    found = select(parts_of([8.0, 8.0]), evaluate, budget)
    expected = {(a, b): 2 * share[a] + share[b] for a in OPTIONS for b in OPTIONS}
    chosen = tuple(found.options.values())
    assert expected[chosen] <= budget
    assert list(chosen) == options or (options == ["int4", "int8"] and chosen == ("int8", "int4"))
    assert found.cost == sum({"int4": 1, "int8": 2, "fp32": 8}[option] for option in chosen)
    assert found.full_cost == 16
