"""The page of a model in fewer bits."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from cordillera.reports.charts import Chart
from cordillera.reports.ranking.quantization import quantization_page


def _change(mean: float | None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"mean": mean, "low": mean if low is None else low, "high": mean if high is None else high}


CONTENT: dict[str, Any] = {
    "run": "wukong",
    "budget": 5e-4,
    "smallest": False,
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


def test_sizes_of_tables_and_signal_to_noise_of_layers_stand_in_their_rows() -> None:
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", quantization_page(CONTENT))
    for row in (("user", "int4", "64,000", "9,000"), ("small &amp; new", "int8", "3,200", "1,000")):
        first = cells.index(row[0])
        assert tuple(cells[first : first + 4]) == row
    first = cells.index("top")
    assert cells[first : first + 4] == ["top", "int8 static", "33.2", "29.5"]
    assert cells[cells.index("head") + 1] == "fp32"


def test_every_evaluation_says_what_it_changes_and_what_it_costs_and_gains() -> None:
    content = copy.deepcopy(CONTENT)
    content["evaluations"] = [
        {"options": {f"table {n}": "int8" for n in range(count)}, "change": _change(*change), "cost": 90.0 * count}
        for count, change in ((6, (6e-4, 5e-4, 7e-4)), (5, (3e-4, 2e-4, 4e-4)), (3, (-1e-4, -2e-4, 0.0)))
    ]
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", quantization_page(content))
    first = cells.index("everything at its cheapest")
    assert cells[first : first + 12] == [
        *("everything at its cheapest", "54.0", "+0.0600", "+0.0500 to +0.0700"),
        *("table 0, table 1, table 2 and 2 more", "45.0", "+0.0300", "+0.0200 to +0.0400"),
        *("table 0, table 1, table 2", "27.0", "-0.0100", "-0.0200 to +0.0000"),
    ]
    content["evaluations"][1]["options"] = content["evaluations"][0]["options"] | {"table 3": "bf16"}
    assert "everything, 1 part above the cheapest" in quantization_page(content)


def test_the_line_of_the_chart_of_the_search_is_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    content, drawn = copy.deepcopy(CONTENT), []
    content["budget"] = 7e-4
    content["evaluations"] = [{"options": {"table a": "int8"}, "change": _change(6e-4, 5e-4, 7e-4), "cost": 90.0}]
    monkeypatch.setattr(Chart, "rule", lambda chart, *, y, text: drawn.append((y, text)))
    quantization_page(content)
    assert drawn == [(pytest.approx(0.07), "budget")]


def test_one_evaluation_is_a_row_and_no_chart() -> None:
    page = quantization_page({**CONTENT, "evaluations": CONTENT["evaluations"][:1]})
    assert "everything at its cheapest" in page
    assert "cost, % of fp32" not in page
    assert "cost, % of fp32" in quantization_page(CONTENT)


@pytest.mark.parametrize("smallest", [False, True])
def test_the_command_is_that_of_the_search(smallest: bool) -> None:
    """The folder is named as that in which the command is given, as the page does not know where the run lies."""
    page = quantization_page({**CONTENT, "smallest": smallest})
    (command,) = re.findall(r"<code>(cordillera quantize[^<]*)</code>", page)
    words = command.split()[2:]
    assert words == [".", "--budget", "0.05", *(["--smallest"] if smallest else [])]
