"""Formats of numbers on pages, and the texts and charts that plans of both kinds share."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from cordillera import numbers
from cordillera.planning.sensitivity import DISTANCES_KM, OVERSUBSCRIPTIONS, Sensitivity
from cordillera.reports import page, plans
from cordillera.reports.charts import Axis, Series


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"), (59.4, "59.4 s"), (60.0, "1 min 0 s"), (61.0, "1 min 1 s"), (3599.0, "59 min 59 s"),
        (3600.0, "1 h 0 min"), (3660.0, "1 h 1 min"), (90_000.0, "25 h 0 min"), (math.inf, "unknown time"),
    ],
)  # fmt: skip
def test_times_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert numbers.duration(seconds) == text


def test_numbers_that_are_not_finite_are_words() -> None:
    assert [numbers.fixed(value, 2) for value in (1.005, -0.5, math.nan, math.inf, -math.inf)] == [
        *("1.00", "-0.50", "undefined", "infinite", "-infinite"),
    ]
    assert numbers.fixed(0.123456) == "0.1235"
    assert [numbers.known(value, "{:.1f} x") for value in (1.25, math.nan, math.inf)] == ["1.2 x", "", ""]
    assert [numbers.whole(value) for value in (1234.6, math.nan)] == ["1,235", "unknown"]
    assert numbers.whole(math.nan, "") == ""


def test_values_of_files_are_text_on_one_line() -> None:
    assert [page.count(value) for value in (12345, 1.5, None, "a")] == ["12,345", "1.5", "", "a"]
    assert page.plain({"a": 1200, "b": 0.25}) == "a 1,200, b 0.25"
    assert page.plain({"a": {"x": 1}, "b": 2}) == "a x 1; b 2"
    assert page.plain([1, "b"]) == "1, b"
    assert page.plain(1e-5) == "1e-05"


def test_nested_objects_of_files_are_found_by_their_keys() -> None:
    content: Any = {"a": {"b": {"c": 1}, "d": 2}}
    assert page.part(content, "a", "b") == {"c": 1}
    for keys in (("a", "d"), ("x", "b"), ("a", "d", "e")):
        assert page.part(content, *keys) == {}


def test_events_of_traces_are_in_microseconds() -> None:
    one = plans.event("a", "b", 1, 2, 0.5, 0.25)
    assert one == {"ph": "X", "name": "a", "cat": "b", "pid": 1, "tid": 2, "ts": 5e5, "dur": 2.5e5}
    assert json.loads(plans.trace([one]))["traceEvents"] == [one]


def plan(**parts: float) -> SimpleNamespace:
    return SimpleNamespace(step=SimpleNamespace(parts=parts), seconds=sum(parts.values()))


def test_differences_are_told_from_the_largest_gain_on_and_small_ones_are_not() -> None:
    before = plan(a=1.0, b=4.0, c=2.0, d=3.0)
    after = plan(a=1.5, b=1.0, c=1.0, d=3.04)  # 0.04 s of 10 s are too little
    titles = {"a": "A", "b": "B", "c": "C", "d": "D"}
    assert plans.differences(titles, after, before) == [
        "B: 4 s to 1 s, 3 s less.".replace("4 s", plans.seconds_text(4.0)).replace("1 s", plans.seconds_text(1.0))
        .replace("3 s", plans.seconds_text(3.0)),
        f"C: {plans.seconds_text(2.0)} to {plans.seconds_text(1.0)}, {plans.seconds_text(1.0)} less.",
        f"A: {plans.seconds_text(1.0)} to {plans.seconds_text(1.5)}, {plans.seconds_text(0.5)} more.",
    ]  # fmt: skip


def test_other_networks_are_drawn_for_every_plan_at_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[list[Series], tuple[str, str], Axis]] = []
    monkeypatch.setattr(
        plans, "figure", lambda title, series, labels, *, x, y, height: drawn.append((series, labels, x))
    )
    distances = {name: [base + n for n in range(len(DISTANCES_KM))] for name, base in (("best", 1.0), ("base", 2.0))}
    narrow = {name: [base * n for n in OVERSUBSCRIPTIONS] for name, base in (("best", 1.0), ("base", 2.0))}
    changes = Sensitivity(distances, narrow, [("twice the capacity", 0.5), ("half the latency", 4.0)])
    found = plans._sensitivity(changes, 2.0, "region")
    assert [labels[0] for _, labels, _ in drawn] == [
        "km of fibre within each region",
        "oversubscription of links into each region",
    ]
    for (series, _, x), values, times in zip(
        drawn, (DISTANCES_KM, OVERSUBSCRIPTIONS), (distances, narrow), strict=True
    ):
        assert [(one.name, one.style) for one in series] == [("best", "s0"), ("base", "s1")]
        for one in series:
            assert list(one.xs) == list(values)
            assert list(one.ys) == times[one.name]
            assert x.place(one.xs[0]) > x.limits[0]
            assert x.place(one.xs[-1]) < x.limits[1]
    assert found["key"] == [("s0", "best"), ("s1", "base")]
    assert [(words, gain) for words, _, gain in found["upgrades"]] == [
        ("twice the capacity", "+300.00 %"),
        ("half the latency", "-50.00 %"),
    ]
