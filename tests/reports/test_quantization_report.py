"""The page of a model in fewer bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cordillera.reports.ranking.quantization import quantization_page


def _change(mean: float | None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"mean": mean, "low": mean if low is None else low, "high": mean if high is None else high}


CONTENT: dict[str, Any] = {
    "run": "wukong",
    "budget": 5e-4,
    "full_cost": 1000.0,
    "tables": {
        "small & new": {"rows": "int8", "bytes": {"fp32": 3200, "quantized": 1000}},
        "user": {"rows": "int4", "bytes": {"fp32": 64_000, "quantized": 9000}},
    },
    "evaluations": [
        {
            "options": {"table user": "int4", "layer top": "int8 static"},
            "change": _change(9e-4, 5e-4, 13e-4),
            "cost": 200.0,
        },
        {"options": {"table user": "int4"}, "change": _change(1e-4, -1e-4, 3e-4), "cost": 400.0},
    ],
    "sweep_evaluations": 12,
    "searched": _change(1e-4, -1e-4, 3e-4),
    "confirmed": _change(2e-4, -1e-4, 6e-4),
    "ne": {"fp32": 0.81, "quantized": 0.81016},
    "bytes": {"fp32": 100_000, "quantized": 17_400},
    "layers": [
        {"name": "top", "kernel": "int8 static", "alone_db": 33.24, "in_place_db": 29.5},
        {"name": "head", "kernel": "fp32", "alone_db": None, "in_place_db": None},
    ],
    "seconds": {"fp32": 4e-3, "quantized": 2e-3},
}


def test_the_page_says_size_quality_speed_and_what_was_chosen() -> None:
    page = quantization_page(CONTENT)
    for text in (
        "17.4 %", "+0.0200", "-0.0100 % to +0.0600 %", ">2.00<", "a sweep of all options: 12",
        "everything at its cheapest", "small &amp; new", "33.2", "29.5", "9,000",
        "its interval does not",
    ):  # fmt: skip
        assert text in page
    assert page.index(">user</th>") < page.index(">small &amp; new</th>"), "the largest table comes first"
    assert "<script" not in page
    assert "nan" not in page.lower().replace("nano", "")


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"confirmed": None}, "There is no test split"),
        ({"confirmed": _change(6e-4)}, "costs more than the budget"),
        ({"confirmed": {"mean": None, "low": None, "high": None}}, "costs more than the budget"),
    ],
)
def test_the_page_warns_of_what_was_not_shown(changes: dict[str, Any], note: str) -> None:
    assert note in quantization_page({**CONTENT, **changes})


def test_a_model_without_tables_layers_or_evaluations_has_a_page() -> None:
    content = copy.deepcopy(CONTENT)
    content.update(tables={}, layers=[], evaluations=[], full_cost=0.0, bytes={"fp32": 0, "quantized": 0})
    page = quantization_page(content)
    for heading in ("Tables", "Layers", "The search"):
        assert f"<h2>{heading}</h2>" not in page
