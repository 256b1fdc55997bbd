"""Templates escape what they are given, and nobody but the charts may say otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import pytest

from cordillera.reports import page
from cordillera.reports.charts import Axis, Series, bars, figure, gantt
from cordillera.reports.heat_maps import heat_map

ROOM = Path(page.__file__).parent
EVIL = "</title><script>[/x]{{ 1 }}"


def test_only_the_chart_module_makes_markup() -> None:
    for path in (*ROOM.rglob("*.py"), *ROOM.rglob("*.jinja")):
        text = path.read_text()
        assert path.name == "charts.py" or "Markup(" not in text, path
        assert "| safe" not in text, path


def test_drawings_escape_texts() -> None:
    series = [Series(EVIL, style, [0, 1], [1, 2], "both", [EVIL, EVIL]) for style in ("s0", "s1")]
    chart = figure(EVIL, series, (EVIL, EVIL), EVIL, x=Axis((0, 1), [(0, EVIL)]), levels=[(1.5, EVIL)])
    assert chart is not None
    drawings = [
        chart.chart.svg(1),
        bars(EVIL, [(EVIL, {EVIL: 1.0})], {EVIL: EVIL}, lambda value: EVIL, (EVIL, 1.0)),
        gantt(EVIL, [(EVIL, [])], 1.0),
        heat_map(EVIL, {EVIL: {0: 0.5}}, {0: EVIL}),
    ]
    for drawing in drawings:
        assert "&lt;script&gt;" in drawing
        assert "<script" not in drawing


def test_lines_and_their_keys_differ_without_colours() -> None:
    style = (ROOM / "templates" / "style.css").read_text()
    lines = dict(re.findall(r"\.line\.(s\d) \{ stroke-dasharray: ([^;]+);", style))
    keys = dict(re.findall(r"\.key\.(s\d) \{ --dash: ([^;]+);", style))
    assert sorted(lines) == sorted(keys) == ["s1", "s2", "s3", "s4", "s5"]  # that of s0 has no gaps
    assert len(set(lines.values())) == len(set(keys.values())) == 5


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="is undefined"):
        page.fill("quantization", name="a run")
