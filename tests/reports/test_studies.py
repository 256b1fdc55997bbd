"""Pages of comparisons, sweeps and IsoFLOP studies show the numbers of their tables, to scale."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path

import pytest

from cordillera.reports.language.comparison import compare_language
from cordillera.reports.ranking.comparison import compare
from cordillera.reports.studies import comparison_page, isoflop_page, sweep_page
from cordillera.training.scaling import isoflop_laws, power_law
from cordillera.training.scaling.power_law import MeasuredRun
from tests.training.loss_surface import surface_runs
from tests.training.sample_language_runs import make_language_run

from .test_comparison import family


def rows(page: str) -> list[list[str]]:
    """Return the texts of the cells of all rows."""
    found = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in found]
    return [[unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in row] for row in cells]


def chart(page: str, title: str) -> ElementTree.Element:
    (found,) = [svg for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if f'aria-label="{title}' in svg]
    return ElementTree.fromstring(found)


def test_a_comparison_of_ranking_runs_has_its_cells_and_strips_of_the_differences(tmp_path: Path) -> None:
    found = compare([*family(tmp_path, "dlrm", {1: 0.9, 2: 1.2}), *family(tmp_path, "wukong", {1: 0.4, 2: 0.6})])
    page = comparison_page(found)
    heads, lines = found.cells()
    assert [heads, *lines] == rows(page)[:3]
    name, value, _, interval = rows(page)[-1]
    one = found.rows[1].differences["click"]["relative_ne"]
    assert (name, value) == (found.rows[1].name, f"{one.value:.2f} %")
    assert interval == f"{one.low:+.2f} to {one.high:+.2f}"
    (strip,) = re.findall(r'<svg class="strip".*?</svg>', page)
    line, whisker, dot = list(ElementTree.fromstring(strip))
    at = [float(line.attrib["x1"]), float(dot.attrib["cx"])]
    ends = [float(whisker.attrib[key]) for key in ("x1", "x2")]
    scale = (at[1] - at[0]) / one.value
    assert [(end - at[0]) / scale for end in ends] == pytest.approx([one.low, one.high], rel=1e-2, abs=0.05)
    assert all(note.split(":")[0] in unescape(page) for note in found.notes)


def test_one_run_and_language_runs_have_no_differences_of_ne(tmp_path: Path) -> None:
    alone = comparison_page(compare(family(tmp_path, "dlrm", {1: 0.9})))
    assert "Differences of NE" not in alone
    found = compare_language([make_language_run(tmp_path / name) for name in ("a", "b & c")])
    page = comparison_page(found)
    assert rows(page) == [found.cells()[0], *found.cells()[1]]
    assert "b &amp; c" in page


def test_a_sweep_is_drawn_on_logarithms_of_flops_beside_its_law() -> None:
    points = [(1e6, 0.80), (1e6, 0.82), (4e6, 0.78), (16e6, 0.77), (64e6, 0.755)]
    study = power_law.study([MeasuredRun("a <b>", x, y, n) for n, (x, y) in enumerate(points)], floor=0.5)
    page = sweep_page("small", study, bayes=0.5)
    dots = list(chart(page, "NE against FLOPs").iter("circle"))
    places = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in dots]
    for values, xs in (([math.log(x) for x, _ in points], 0), ([y for _, y in points], 1)):
        got = [place[xs] for place in places]
        scale = (got[-1] - got[0]) / (values[-1] - values[0])
        assert got == pytest.approx([got[0] + scale * (value - values[0]) for value in values], abs=0.1)
    assert [row[1] for row in rows(page)[1:]] == ["1,000,000", "4,000,000", "16,000,000", "64,000,000"]
    assert "a &lt;b&gt;" in page
    assert "<b>" not in page.split("</header>")[1]
    assert f"exponent 95 % interval [{study.laws['a <b>'].exponent_low:.5g}" in page


def test_a_sweep_without_a_law_says_why() -> None:
    study = power_law.study([MeasuredRun("m", 1e6, 0.8), MeasuredRun("m", 2e6, 0.7)])
    page = sweep_page("small", study)
    assert f"m: no law ({study.failures['m']})" in unescape(page)
    assert len(list(chart(page, "NE against FLOPs").iter("circle"))) == 2, "its runs are drawn all the same"
    assert "the line is the law" not in page


def test_an_isoflop_study_marks_the_optimum_of_every_budget() -> None:
    study = isoflop_laws.study(surface_runs([6e18, 6e19, 6e20]), target=3.8e25)
    page = isoflop_page("llama", study)
    drawn = chart(page, "Loss against tokens")
    marks = [one for one in drawn.iter("circle") if one.attrib["class"] == "dot mark"]
    assert len(marks) == sum(curve.optimum is not None for curve in study.curves) == 3
    optima = [math.log(curve.optimum.tokens) for curve in study.curves if curve.optimum]
    at = [float(one.attrib["cx"]) for one in marks]
    assert (at[1] - at[0]) / (at[2] - at[0]) == pytest.approx(
        (optima[1] - optima[0]) / (optima[2] - optima[0]), abs=0.01
    )
    assert len(rows(page)) == 1 + len(study.curves)
    for line in study.summary.splitlines():
        assert line in unescape(page)
    for quantity in ("tokens", "parameters"):
        found, law = chart(page, f"Optimal {quantity}"), study.laws[quantity]
        assert len([one for one in found.iter("line") if "whisker" in one.attrib["class"]]) == len(law.optima_low) == 3


@pytest.mark.parametrize("end", ["optima_low", "optima_high"])
def test_an_interval_without_an_end_is_not_drawn(end: str) -> None:
    study = isoflop_laws.study(surface_runs([6e18, 6e19, 6e20]), target=3.8e25)
    law = study.laws["tokens"]
    endless = dataclasses.replace(law, **{end: [math.inf, *getattr(law, end)[1:]]})
    page = isoflop_page("llama", dataclasses.replace(study, laws={**study.laws, "tokens": endless}))
    found = chart(page, "Optimal tokens")
    assert len([one for one in found.iter("line") if "whisker" in one.attrib["class"]]) == 2


def test_an_isoflop_study_of_too_few_sizes_has_a_page() -> None:
    study = isoflop_laws.study(surface_runs([6e18], sizes=2))
    page = isoflop_page("llama", study)
    assert "Optimal tokens" not in page
    assert len(list(chart(page, "Loss against tokens").iter("circle"))) == len(study.curves[0].runs) == 2
    assert "points are runs." in page
    assert unescape(str(study.curves[0].refusal)) in unescape(page)
