"""Charts are drawn to scale: coordinates in the SVG are those of the data."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from typing import Any

import pytest

from cordillera.reports.charts import (
    LINEAR,
    POINTS,
    Axis,
    Chart,
    Series,
    Span,
    bars,
    figure,
    framed,
    gantt,
    interval_strip,
    log_ticks,
    nice_ticks,
    padded,
    seconds_text,
    stacked_bar,
)
from cordillera.reports.heat_maps import heat_map

NAN = math.nan


def drawn(svg: str) -> list[dict[str, str]]:
    """Return the elements of a drawing in their order, each with its attributes, ``tag`` and ``text``."""
    root = ElementTree.fromstring(svg)
    return [{**one.attrib, "tag": one.tag, "text": "".join(one.itertext())} for one in root.iter()]


def styled(svg: str, style: str) -> list[dict[str, str]]:
    return [one for one in drawn(svg) if one.get("class") == style]


def numbers(found: list[dict[str, str]], *keys: str) -> list[tuple[float, ...]]:
    return [tuple(float(one[key]) for key in keys) for one in found]


def chart() -> Chart:
    """Return a chart whose positions from 0 to 10 and 0 to 100 lie at easily known places."""
    return Chart("title", "description", Axis((0.0, 10.0)), Axis((0.0, 100.0)), ("a", "b"), height=280)


# A chart is 480 wide with margins of 56 and 14, and 280 high with margins of 30 and 42.
X, Y = [56.0, 261.0, 466.0], [238.0, 134.0, 30.0]  # of 0, 5 and 10, and of 0, 50 and 100


def test_positions_are_mapped_to_the_frame() -> None:
    one = chart()
    assert [one.x(value) for value in (0, 5, 10)] == X
    assert [one.y(value) for value in (0, 50, 100)] == Y


def test_lines_are_interrupted_by_values_that_are_not_finite() -> None:
    one = chart()
    one.line([0, 5, 10, 5, 0], [0, 50, NAN, 100, math.inf], "s2")
    assert [path["d"] for path in styled(one.svg(1), "line s2")] == ["M56.0 238.0L261.0 134.0M261.0 30.0"]


def test_dots_whiskers_and_marks_are_where_their_values_are() -> None:
    one = chart()
    one.dots([0, 5, NAN, 10], [0, 50, 50, math.inf], "s1", ["first", "second", "third", "fourth"])
    one.whiskers([5, 10], [0, 0], [100, NAN])
    one.mark(5, 50, "here")
    one.mark(10, 0, "right")
    one.mark(0, 100, "left")
    svg = one.svg(1)
    dots = styled(svg, "dot s1")
    assert numbers(dots, "cx", "cy") == [(56, 238), (261, 134)]
    assert [dot["text"] for dot in dots] == ["first", "second"]
    assert numbers(styled(svg, "whisker s0"), "x1", "x2", "y1", "y2") == [(261, 261, 238, 30)]
    assert numbers(styled(svg, "mark"), "cx", "cy") == [(261, 134), (466, 238), (56, 30)]
    callouts = styled(svg, "callout")
    assert [(one["text"], one["text-anchor"]) for one in callouts] == [
        ("here", "middle"), ("right", "end"), ("left", "start")
    ]  # fmt: skip
    assert numbers(callouts, "x", "y") == [(261, 155), (466, 227), (56, 51)]  # below, unless there is no room


def test_histograms_and_reference_lines_are_to_scale() -> None:
    one = chart()
    one.steps([0, 5, 10], [50, 100], "s0")
    one.rule(y=50, text="half")
    one.rule(x=5, text="middle")
    one.rule(x=10)
    one.rule(y=101, text="outside")
    one.diagonal()
    svg = one.svg(1)
    assert styled(svg, "area s0")[0]["d"] == "M56.0 238.0L56.0 134.0L261.0 134.0L261.0 30.0L466.0 30.0L466.0 238.0"
    assert numbers(styled(svg, "rule"), "x1", "x2", "y1", "y2") == [
        (56, 466, 134, 134), (261, 261, 30, 238), (466, 466, 30, 238), (56, 466, 238, 217.2)
    ]  # fmt: skip
    notes = styled(svg, "note")
    assert [(note["text"], note["text-anchor"]) for note in notes] == [("half", "end"), ("middle", "start")]
    assert numbers(notes, "x", "y") == [(464, 129), (266, 40)]


def test_ticks_stand_at_their_values() -> None:
    one = Chart("t", "d", Axis((0.0, 10.0)), Axis((0.0, 1.0), [(0.25, "a quarter")]), ("a", "b"))
    svg = one.svg(1)
    assert numbers(styled(svg, "grid"), "x1", "x2", "y1", "y2") == [(56, 466, 186, 186)]
    ticks = styled(svg, "tick")
    assert [tick["text"] for tick in ticks] == ["a quarter", "0", "2", "4", "6", "8", "10"]
    assert numbers(ticks, "x", "y") == [(49, 190), *((56 + 41 * place, 255) for place in (0, 2, 4, 6, 8, 10))]
    assert [one["text"] for one in styled(svg, "label")] == ["a", "b"]
    assert [element["viewBox"] for element in drawn(svg) if element["tag"].endswith("svg")] == ["0 0 480 280"]
    assert numbers(styled(Chart("t", "d", LINEAR, Axis((0.0, 1.0)), ("", "")).svg(1), "clip"), "width", "height") == [
        (418, 216)
    ]


@pytest.mark.parametrize(
    ("style", "points", "lines", "dots"),
    [("line", 3, 1, 0), ("dots", 3, 0, 3), ("both", 3, 1, 3), ("both", 60, 1, 60), ("both", 61, 1, 0)],
)
def test_series_are_lines_dots_or_both(style: Any, points: int, lines: int, dots: int) -> None:
    one, values = chart(), [10 * i / points for i in range(points)]
    Series("name", "s0", values, values, style).draw(one, Axis((0.0, 10.0)), Axis((0.0, 100.0)))
    assert len(styled(one.svg(1), "line s0")) == lines
    assert len(styled(one.svg(1), "dot s0")) == dots


def test_points_without_neighbours_are_dots() -> None:
    one = chart()
    Series("name", "s0", [1, 2, 3, 4, 5, 6], [1, NAN, 3, 4, NAN, 6]).draw(one, Axis((0.0, 10.0)), Axis((0.0, 100.0)))
    assert numbers(styled(one.svg(1), "dot s0"), "cx") == [(97,), (302,)]


def test_long_series_are_means_of_neighbours() -> None:
    count = 10 * POINTS
    series = Series("name", "s0", list(range(count)), [float(i % 10) for i in range(count)])
    xs, ys = series.places(Axis((0.0, 1.0)), Axis((0.0, 1.0)))
    assert POINTS <= len(xs) <= POINTS + 1
    assert all(a < b for a, b in pairwise(xs))
    assert sum(ys) / len(ys) == pytest.approx(4.5, abs=0.1)
    assert series.places(LINEAR, LINEAR, thinned=False) == (list(range(count)), list(series.ys))
    assert len(Series("name", "s0", list(range(POINTS)), [0.0] * POINTS).places(LINEAR, LINEAR)[0]) == POINTS


def test_series_are_told() -> None:
    assert Series("loss", "s0", [1, 2, 3, 4], [2.0, 0.5, NAN, 1.0]).told() == (
        "loss: first 2, last 1, lowest 0.5, highest 2, 3 values."
    )
    assert Series("points", "s0", [1, 2], [1.0, NAN], "dots").told() == "points: 1."
    assert not Series("none", "s0", [1, NAN], [NAN, 1.0]).is_drawable


def test_figures_have_a_key_for_several_series_and_are_none_for_dots_alone() -> None:
    one, other = Series("a", "s0", [1, 2], [1, 2]), Series("b", "s1", [1, 2], [2, 4], "dots")
    assert figure("heading", [other], ("x", "y")) is None
    assert figure("heading", [], ("x", "y"), alone=True) is None
    dots = figure("heading", [other], ("x", "y"), alone=True)
    assert dots is not None
    assert len(styled(dots.chart.svg(1), "dot s1")) == 2
    alone, both = figure("heading", [one], ("x", "y")), figure("heading", [one, other], ("x", "y"), mark=(2, 4, "top"))
    assert alone is not None
    assert both is not None
    assert list(alone.key) == []
    assert list(both.key) == [("s0", "a"), ("s1 dots", "b")]
    assert numbers(styled(both.chart.svg(1), "mark"), "cx", "cy") == [
        (466, pytest.approx(280 - 42 - 208 / 1.1, abs=0.01))
    ]


def test_a_single_point_is_told_and_not_drawn() -> None:
    one, other = Series("loss", "s0", [1, 2], [NAN, 2.5]), Series("held out", "s1", [2, 3], [3.5, NAN], "both")
    told = figure("heading", [one, other], ("step", "nats"), "caption")
    assert told is not None
    assert told.chart is None
    assert told.told == "step 2: loss 2.5 (nats), held out 3.5 (nats)"
    apart = figure("heading", [one, Series("b", "s1", [1234.5], [12_345.0], "both")], ("step", ""))
    assert apart is not None
    assert apart.told == "step 2: loss 2.5; step 1,234.5: b 12.3k"
    two = figure("heading", [one, Series("b", "s1", [1, 2], [1, 2])], ("step", "nats"))
    assert two is not None
    assert two.chart is not None
    assert two.told == ""


@pytest.mark.parametrize("limit", [5.0, 2.05, 1.0, 4.0])
def test_the_sum_of_a_bar_is_nearest_to_its_end(limit: float) -> None:
    """Not at the line of the limit, which has a text of its own."""
    rows = [("first", {"a": 1.0, "b": 1.0}), ("second", {"b": 4.0})]
    svg = bars("label", rows, {"a": "a", "b": "b"}, lambda value: f"sum {value:g}", limit=("most", limit))
    ends = [float(one["x"]) + float(one["width"]) for one in styled(svg, "f1")]
    sums = [one for one in styled(svg, "tick") if one["text"].startswith("sum")]
    assert [one["text"] for one in sums] == ["sum 2", "sum 4"]
    assert [float(one["x"]) - end for one, end in zip(sums, ends, strict=True)] == pytest.approx([6, 6], abs=0.02)
    (at,) = {float(one["x1"]) for one in styled(svg, "limit")}
    (named,) = [float(one["x"]) for one in styled(svg, "tick") if one["text"] == "most"]
    assert named == at


@pytest.mark.parametrize(("low", "high"), [(144_000, 360_000), (19_000, 84_000), (3e10, 1.3e11), (0.012, 0.013)])
def test_axes_of_less_than_a_decade_have_ticks_at_their_values(low: float, high: float) -> None:
    ticks = log_ticks(math.log10(low), math.log10(high))
    assert len(ticks) >= 3
    for place, text in ticks:
        value = float(text.rstrip("kMG")) * {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)
        assert place == pytest.approx(math.log10(value), abs=1e-9)
        assert math.log10(low) - 1e-9 <= place <= math.log10(high) + 1e-9


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 7, [0, 2, 4, 6]),
        (-3, 3, [-3, -2, -1, 0, 1, 2, 3]), (0.11, 0.19, [0.12, 0.14, 0.16, 0.18]), (5, 5, [5]), (0, math.inf, [0]),
        (NAN, 1, []),
    ],
)  # fmt: skip
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_logarithmic_ticks_are_powers_of_ten_or_round_digits() -> None:
    assert log_ticks(0, 3) == [(0, "1"), (1, "10"), (2, "100"), (3, "1k")]
    assert [place for place, _ in log_ticks(-6, 6)] == [-6, -4, -2, 0, 2, 4, 6]
    assert [place for place, _ in log_ticks(0, 1)] == pytest.approx([0, math.log10(2), math.log10(5), 1])


def test_ranges_of_axes() -> None:
    assert padded([1, 2, NAN]) == pytest.approx((0.94, 2.06))
    assert padded([2, 2]) == pytest.approx((1.88, 2.12))
    assert padded([0]) == (-0.5, 0.5)
    assert padded([NAN]) == (0.0, 1.0)
    bulk = [1.0 + i / 100 for i in range(97)]
    limits, is_cut = framed([*bulk, 50.0, 50.0, 50.0])
    assert is_cut
    assert limits == pytest.approx(padded(bulk))
    assert framed(bulk) == (padded(bulk), False)
    assert Axis.to([NAN, 3, -1, math.inf]).limits == (0, 3)
    assert Axis.of_progress([1, 100]) == Axis.to([1, 100])
    assert Axis.of_progress([1, 101]).limits == pytest.approx((0, math.log10(101)))
    assert Axis.from_zero([2, 10]).limits == pytest.approx((0, 11))
    assert Axis.from_zero([0]).limits == (0, 1)
    assert Axis.from_zero([0.001]).ticks is not None
    assert Axis.log(1, 1000).top == pytest.approx(1000)
    assert Axis.log(1, 1000).place(100) == pytest.approx(2)
    assert math.isnan(Axis.log(1, 1000).place(0))
    assert LINEAR.place(0.3) == 0.3
    assert LINEAR.top == 1
    seconds = Axis.of_seconds([0.0025, 0.0055])
    assert seconds.limits == pytest.approx((0, 0.006))
    assert seconds.ticks is not None
    assert [text for _, text in seconds.ticks] == ["0", "2 ms", "4 ms", "6 ms"]
    assert [place for place, _ in seconds.ticks] == pytest.approx([0, 0.002, 0.004, 0.006])
    assert Axis.of_seconds([4.0]).limits == pytest.approx((0, 4.5))
    assert Axis.of_seconds([0.0]).limits == (0, 3)


def test_seconds_have_the_unit_that_suits_them() -> None:
    assert [seconds_text(value) for value in (0, 1, 59.999, 0.999, 0.001, 0.0009994)] == [
        "0", "1.00 s", "60.00 s", "999.0 ms", "1.0 ms", "999 µs"
    ]  # fmt: skip


def test_intervals_are_clipped_to_the_scale_of_their_table() -> None:
    svg = interval_strip(0.5, (0.25, 2.0), 0.0, (0.0, 1.0))
    assert numbers(styled(svg, "rule"), "x1", "x2", "y1", "y2") == [(4, 4, 1, 17)]
    assert numbers(styled(svg, "whisker s0"), "x1", "x2") == [(32, 116), (116, 112), (116, 112)]  # with an arrow
    assert numbers(styled(svg, "dot s0"), "cx", "cy") == [(60, 9)]
    assert not styled(interval_strip(NAN, (NAN, 1.0), 0.0, (0.0, 1.0)), "dot s0")
    assert not styled(interval_strip(NAN, (NAN, 1.0), 0.0, (0.0, 1.0)), "whisker s0")


def test_parts_of_a_bar_fill_it() -> None:
    svg = stacked_bar("label", [("f0", 1.0), ("f1", 0.0), ("f2", 3.0), ("f3", NAN)])
    boxes = [one for one in drawn(svg) if one["tag"].endswith("rect")]
    assert [one["class"] for one in boxes] == ["f0", "f2"]
    assert numbers(boxes, "x", "width", "height") == [(0, 250, 10), (250, 750, 10)]


def test_stacked_bars_have_one_scale() -> None:
    rows = [("first", {"a": 1.0, "b": 1.0}), ("second", {"b": 4.0}), ("third", {"a": -1.0})]
    svg = bars("label", rows, {"a": "part a", "b": "part b"}, str, limit=("most", 8.0))
    left = 40.0 + 8 * len("second")
    scale = (960 - left - 90) / 8
    places = [numbers(styled(svg, style), "x", "y", "width") for style in ("f0", "f1")]
    assert places[0] == [(left, 4, pytest.approx(scale, abs=0.01)), (left, 30, 0), (left, 56, 0)]
    assert places[1][0][0] == pytest.approx(left + scale, abs=0.01)
    assert [one[2] for one in places[1]] == [pytest.approx(scale * size, abs=0.01) for size in (1, 4, 0)]
    assert numbers(styled(svg, "limit"), "x1", "x2", "y1", "y2") == [
        (pytest.approx(left + 8 * scale, abs=0.01),) * 2 + (2, 86)
    ]
    assert [one["text"] for one in styled(svg, "f1")] == ["part b: 1.0", "part b: 4.0", "part b: 0.0"]
    texts = styled(svg, "tick")
    assert [one["text"] for one in texts] == ["first", "2.0", "second", "4.0", "third", "-1.0", "most"]
    heights = [4 + 26 * row + 26 * 0.37 + 4 for row in (0, 0, 1, 1, 2, 2)]  # beside the middle of the bars
    assert numbers(texts, "y") == [(pytest.approx(height, abs=0.01),) for height in (*heights, 8 + 3 * 26 + 12)]
    tall = bars("label", [(str(i), {"a": 1.0}) for i in range(13)], {"a": "a"})
    assert numbers(styled(tall, "f0"), "y")[1] == (20,)  # many bars are thinner


def test_spans_are_drawn_to_scale_and_cut_at_the_end() -> None:
    rows = [
        (
            "row",
            [
                Span(0, 1, "f0", "title", "7"),
                Span(1, 4, "f1"),
                Span(5, 6, "f2", "late"),
                Span(2, 3, "f3", "t", is_thin=True),
            ],
        )
    ]
    svg = gantt("label", rows, 2.0, numbered=True)
    scale = (960 - 80 - 24) / 2.0
    (one,) = styled(svg, "f0")
    assert (one["text"], float(one["x"])) == ("title", 80)
    assert float(one["width"]) == pytest.approx(scale - 0.3, abs=0.01)
    path = re.fullmatch(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z", styled(svg, "f1")[0]["d"])
    assert path is not None
    assert [float(value) for value in path.groups()] == [
        pytest.approx(80 + scale, abs=0.01), 8, pytest.approx(scale - 0.3, abs=0.01), pytest.approx(34 * 0.72, abs=0.1)
    ]  # fmt: skip
    assert not styled(svg, "f2")
    assert [one["text"] for one in styled(svg, "number") if one["text"]] == ["7"]
    ticks = [one for one in styled(svg, "tick") if one["text"] != "row"]
    assert [one["text"] for one in ticks] == ["0", "0.5 s", "1 s", "1.5 s", "2 s"]
    assert numbers(ticks, "x") == [(pytest.approx(80 + 856 * part, abs=0.01),) for part in (0, 0.25, 0.5, 0.75, 1)]
    thin = styled(gantt("label", rows, 4.0), "f3")
    assert numbers(thin, "y", "height") == [(pytest.approx(8 + 34 * 0.76), pytest.approx(34 * 0.12))]


def test_shades_of_a_map_are_logarithms_of_rates() -> None:
    svg = heat_map("label", {"weight": {0: 1.0, 1: 1e-3, 2: 0.0}}, {0: "low", 1: "low", 2: "highest"})
    cells = styled(svg, "cell")[:3]
    assert numbers(cells, "x", "y", "width") == [(93, 35, 24), (119, 35, 24), (145, 35, 24)]  # from the highest column
    shades = [float(one["style"].removeprefix("fill-opacity:")) for one in cells]
    assert shades == pytest.approx([0, 0.08 + 0.92 * 0.4, 1], abs=1e-3)
    assert [one["text"] for one in cells] == ["weight, 2: 0", "weight, 1: 0.001", "weight, 0: 1"]
    assert [one["text"] for one in styled(svg, "label")] == ["h", "low"]  # one cell has room for one letter
    assert len(styled(heat_map("label", {"weight": {0: NAN}}, {0: "low"}), "cell")) == 6  # the scale alone


@pytest.mark.parametrize(("count", "height"), [(1, 26), (12, 26), (13, 16), (40, 16)])
def test_bars_are_narrower_where_there_are_many(count: int, height: int) -> None:
    drawn = ElementTree.fromstring(str(bars("times", [(f"r{i}", {"a": 1.0 + i}) for i in range(count)], {"a": "A"})))
    labels = [one for one in drawn.iter() if (one.text or "").startswith("r")]
    places = [float(one.attrib["y"]) for one in labels]
    assert len(places) == count
    assert all(b - a == pytest.approx(height, abs=0.1) for a, b in pairwise(places))
