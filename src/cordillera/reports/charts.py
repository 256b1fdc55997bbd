"""Charts as inline SVG with the colours and type of the pages' style sheet, so that they follow light and dark.

``s0`` to ``s3`` are the colours of lines and points, ``f0`` to ``f7`` those of areas. Every text is escaped here;
callers pass plain strings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from markupsafe import Markup

from cordillera.numbers import compact

POINTS = 400  # points of a line; more would only make the file larger
_MANY = 30  # least number of losses for the first ones to be clipped
_WIDE = 100.0  # least ratio of largest to smallest value for a logarithmic axis
_MOST_DOTS = 60  # largest number of dots on a line
WIDTH = 960.0
"""Width of drawings as wide as the page."""

# Elements


def _tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return an element; ``class_`` stands for ``class``, ``text_anchor`` for ``text-anchor``."""
    told = Markup().join(
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"), f"{round(value, 2):g}" if isinstance(value, float) else value
        )
        for key, value in attributes.items()
    )
    if not children:
        return Markup("<{}{}/>").format(name, told)
    return Markup("<{0}{1}>{2}</{0}>").format(name, told, Markup().join(children))


def write_text(x: float, y: float, text: str, anchor: str = "middle", style: str = "tick") -> Markup:
    """Return a ``text`` at a place of a drawing."""
    return _tag("text", text, class_=style, x=x, y=y, text_anchor=anchor)


def stroke(x: tuple[float, float], y: tuple[float, float], style: str) -> Markup:
    """Return a straight line between two places of a drawing."""
    return _tag("line", class_=style, x1=x[0], x2=x[1], y1=y[0], y2=y[1])


def box(x: float, y: float, width: float, height: float, style: str, title: str = "", /, **more: object) -> Markup:
    """Return a rectangle, with a ``title`` to hover over."""
    shape = {"class_": style, "x": x, "y": y, "width": width, "height": height}
    return _tag("rect", *([_tag("title", title)] if title else []), **shape, **more)


def drawing(width: float, height: float, label: str, parts: Iterable[str], **more: object) -> Markup:
    """Return a drawing of ``parts``, with a ``label`` for readers who cannot see it."""
    frame = f"0 0 {width:g} {height:g}"
    return _tag("svg", *parts, viewBox=frame, role="img", aria_label=label, style=f"--width:{width:g}px", **more)


# Axes


def nice_ticks(low: float, high: float) -> list[float]:
    """Return at least four round numbers in ``[low, high]``: multiples of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or high - low < 1e-300:  # smaller steps would be 0
        return [low] if math.isfinite(low) else []
    power = 10.0 ** math.ceil(math.log10(high - low))
    for step in (power / divisor for divisor in (1, 2, 5, 10, 20, 50)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 >= 4:
            break
    return [float(f"{index * step:.12g}") + 0.0 for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return positions (in powers of ten) and texts of round numbers between ``low`` and ``high`` on a log axis."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    step = max(1, -(-(last - first) // 6))
    if last - first >= 2:
        return [(float(power), compact(10.0**power)) for power in range(first, last + 1, step)]
    found = [
        (math.log10(digit) + power, digit * 10.0**power) for power in range(first - 1, last + 1) for digit in (1, 2, 5)
    ]
    inside = [(place, compact(value)) for place, value in found if low - 1e-9 <= place <= high + 1e-9]
    if len(inside) > 2:
        return inside
    above_zero = [value for value in nice_ticks(10.0**low, 10.0**high) if value > 0]
    return [(math.log10(value), compact(value)) for value in above_zero[:: 1 + len(above_zero) // 9]]  # at most 8


def _tick_text(ticks: Sequence[float]) -> Callable[[float], str]:
    """Return a format with as many decimals as are needed to tell neighbouring ticks apart."""
    step = min((b - a for a, b in itertools.pairwise(ticks)), default=1.0)
    decimals = next((d for d in range(7) if abs(round(step, d) - step) < step * 1e-6), 6)
    return lambda value: f"{value:.{decimals}f}"


def padded(values: Sequence[float], share: float = 0.06) -> tuple[float, float]:
    """Return a range of all finite ``values`` with a ``share`` of margin; ``(0, 1)`` if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    air = (high - low) * share or abs(high) * share or 0.5
    return low - air, high + air


def framed(values: Sequence[float]) -> tuple[tuple[float, float], bool]:
    """Return the range of a vertical axis for finite ``values``, and whether some leave it.

    Of many losses, the first ones of an untrained model can dwarf the rest; the range then follows the bulk.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    bulk = finite[: max(1, int(len(finite) * 0.97))]
    cut = len(finite) >= _MANY and finite[-1] - bulk[0] > 3 * (bulk[-1] - bulk[0]) > 0
    return padded(bulk if cut else finite), cut


def seconds_text(value: float) -> str:
    """Return seconds as text in the unit that suits them."""
    if value == 0:
        return "0"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def _time_text(value: float, most: float) -> str:
    """Return seconds as the text of a tick, in the unit that suits the largest."""
    unit, factor = ("s", 1.0) if most >= 1 else ("ms", 1e3) if most >= 1e-3 else ("µs", 1e6)
    return f"{value * factor:.3g} {unit}" if value else "0"


@dataclass(frozen=True)
class Axis:
    """An axis of a chart, linear or logarithmic."""

    limits: tuple[float, float]  # positions of its ends
    ticks: Sequence[tuple[float, str]] | None = None  # positions and texts; None for round numbers
    is_log: bool = False  # whether positions are decimal logarithms of values

    @classmethod
    def log(cls, low: float, high: float) -> Axis:
        """Return a logarithmic axis from ``low`` to ``high``, both above zero."""
        limits = math.log10(low), math.log10(high)
        return cls(limits, log_ticks(*limits), is_log=True)

    @classmethod
    def to(cls, values: Iterable[float]) -> Axis:
        """Return a linear axis from zero to the largest of ``values``."""
        return cls((0.0, max((value for value in values if 0 < value < math.inf), default=1.0)))

    @classmethod
    def of_progress(cls, values: Iterable[float]) -> Axis:
        """Return an axis for all ``values``: like :meth:`to`, or logarithmic if their range is wide."""
        known = [value for value in values if 0 < value < math.inf]
        is_wide = bool(known) and max(known) > _WIDE * min(known)
        return cls.log(min(known), max(known)) if is_wide else cls.to(known)

    @classmethod
    def from_zero(cls, values: Iterable[float]) -> Axis:
        """Return a linear axis from zero to slightly above the largest of ``values``."""
        top = 1.1 * max((value for value in values if value < math.inf), default=0.0)
        limits = (0.0, top if top > 0 else 1.0)
        small = [(tick, compact(tick)) for tick in nice_ticks(*limits)]
        return cls(limits, small if top < 1e-2 else None)

    @classmethod
    def of_seconds(cls, values: Iterable[float]) -> Axis:
        """Return a linear axis of seconds from zero, with three round steps."""
        third = max(values) / 3
        ten = 10.0 ** math.floor(math.log10(third)) if third > 0 else 1.0
        step = next(ten * one for one in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if ten * one >= third * (1 - 1e-9))
        return cls((0.0, 3 * step), [(step * number, _time_text(step * number, 3 * step)) for number in range(4)])

    @property
    def top(self) -> float:
        """Largest value on the axis."""
        return 10 ** self.limits[1] if self.is_log else self.limits[1]

    def place(self, value: float) -> float:
        """Return the position of a ``value``; NaN if the axis cannot show it."""
        if not math.isfinite(value) or (self.is_log and value <= 0):
            return math.nan
        return math.log10(value) if self.is_log else value


LINEAR = Axis((0.0, 1.0))

# Charts with two axes


class Chart:
    """A chart with two axes; coordinates are positions on them.

    Title and description are for readers who cannot see it, labels are names and units of the axes.
    """

    left, right, top, bottom = 56.0, 14.0, 30.0, 42.0

    def __init__(
        self,
        title: str,
        description: str,
        x: Axis,
        y: Axis,
        labels: tuple[str, str],
        height: float = 280.0,
        width: float = 480.0,
    ) -> None:
        self._label, self._x, self._y = f"{title}. {description}", x.limits, y.limits
        self.width, self._height = width, height
        self._parts: list[Markup] = []
        self._notes: list[Markup] = []  # over the lines
        base, end = height - self.bottom, self.width - self.right
        marks = nice_ticks(*y.limits)
        text = compact if y.limits[1] >= 1e4 else _tick_text(marks)
        frame = []
        for value, name in [(mark, text(mark)) for mark in marks] if y.ticks is None else y.ticks:
            at = self.y(value)
            frame += [stroke((self.left, end), (at, at), "grid"), write_text(self.left - 7, at + 4, name, "end")]
        for value, name in [(one, compact(one)) for one in nice_ticks(*x.limits)] if x.ticks is None else x.ticks:
            at = self.x(value)
            frame += [stroke((at, at), (base, base + 4), "axis"), write_text(at, base + 17, name)]
        frame += [
            stroke((self.left, end), (base, base), "axis"),
            write_text((self.left + end) / 2, height - 6, labels[0], style="label"),
            write_text(self.left - 48, 11, labels[1], "start", "label"),
        ]
        self._frame = frame

    def x(self, value: float) -> float:
        """Return the horizontal place of a position in the drawing."""
        low, high = self._x
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Return the vertical place of a position in the drawing."""
        low, high = self._y
        return self._height - self.bottom - (value - low) / (high - low) * (self._height - self.top - self.bottom)

    def line(self, xs: Sequence[float], ys: Sequence[float], style: str = "s0") -> None:
        """Draw a line through the points ``(xs, ys)`` in a ``style``; values that are not finite interrupt it."""
        path, pen = [], "M"
        for a, b in zip(xs, ys, strict=True):
            if not (math.isfinite(a) and math.isfinite(b)):
                pen = "M"
                continue
            path.append(f"{pen}{self.x(a):.1f} {self.y(b):.1f}")
            pen = "L"
        self._parts.append(_tag("path", class_=f"line {style}", d="".join(path)))

    def dots(
        self, xs: Sequence[float], ys: Sequence[float], style: str = "s0", titles: Sequence[str] | None = None
    ) -> None:
        """Draw points at ``(xs, ys)`` in a ``style``, with ``titles`` to hover over; points not finite are left out."""
        for a, b, title in zip(xs, ys, titles or itertools.repeat(""), strict=False):
            if math.isfinite(a) and math.isfinite(b):
                told = [_tag("title", title)] if title else []
                self._parts.append(_tag("circle", *told, class_=f"dot {style}", cx=self.x(a), cy=self.y(b), r=3))

    def whiskers(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> None:
        """Draw vertical intervals at ``xs`` from ``lows`` to ``highs``."""
        for a, low, high in zip(xs, lows, highs, strict=True):
            if math.isfinite(low) and math.isfinite(high):
                self._parts.append(stroke((self.x(a), self.x(a)), (self.y(low), self.y(high)), "whisker s0"))

    def steps(self, edges: Sequence[float], heights: Sequence[float], style: str = "s0") -> None:
        """Draw the filled outline of a histogram of ``heights`` between neighbouring ``edges`` in a ``style``."""
        base = f"{self.y(0.0):.1f}"
        path = [f"M{self.x(edges[0]):.1f} {base}"]
        for (a, b), height in zip(itertools.pairwise(edges), heights, strict=True):
            at = f"{self.y(height):.1f}"
            path.append(f"L{self.x(a):.1f} {at}L{self.x(b):.1f} {at}")
        path.append(f"L{self.x(edges[-1]):.1f} {base}")
        self._parts.append(_tag("path", class_=f"area {style}", d="".join(path)))

    def rule(self, *, y: float | None = None, x: float | None = None, text: str = "") -> None:
        """Draw a straight reference line across the chart at ``y`` or ``x``, with an optional ``text``."""
        base, end = self._height - self.bottom, self.width - self.right
        if y is not None and self._y[0] <= y <= self._y[1]:
            at = self.y(y)
            self._parts.append(stroke((self.left, end), (at, at), "rule"))
            self._notes += [write_text(end - 2, at - 5, text, "end", "note")] if text else []
        if x is not None and self._x[0] <= x <= self._x[1]:
            at = self.x(x)
            anchor, beside = ("end", -5) if at > self.width * 0.6 else ("start", 5)
            self._parts.append(stroke((at, at), (self.top, base), "rule"))
            self._notes += [write_text(at + beside, self.top + 10, text, anchor, "note")] if text else []

    def diagonal(self) -> None:
        """Draw the line of equal values on both axes."""
        low, high = max(self._x[0], self._y[0]), min(self._x[1], self._y[1])
        self._parts.append(stroke((self.x(low), self.x(high)), (self.y(low), self.y(high)), "rule"))

    def mark(self, x: float, y: float, text: str) -> None:
        """Mark the point ``(x, y)`` with a ring and a ``text``."""
        a, b, base = self.x(x), self.y(y), self._height - self.bottom
        is_above = self.top + 12 < b < (self.top + base) / 2 or b + 26 >= base  # avoids the curve
        at = b - 11 if is_above else b + 21
        anchor = "end" if a > self.width * 0.72 else "start" if a < self.width * 0.28 else "middle"
        self._parts += [_tag("circle", class_="mark", cx=a, cy=b, r=5.5), write_text(a, at, text, anchor, "callout")]

    def name(self, x: float, y: float, text: str) -> None:
        """Write a ``text`` beside the point ``(x, y)``."""
        a, b = self.x(x), self.y(y)
        is_right = a > self.width * 0.72
        self._parts.append(write_text(a + (-6 if is_right else 6), b - 4, text, "end" if is_right else "start"))

    def svg(self, number: int) -> Markup:
        """Return the drawing, clipped to its frame; ``number`` is unique on the page."""
        inner = self.width - self.left - self.right + 8, self._height - self.top - self.bottom + 8
        clip = _tag("clipPath", box(self.left - 1, self.top - 7, *inner, "clip"), id=f"c{number}")
        parts = [*self._parts, *self._notes]
        drawn = _tag("g", *parts, clip_path=f"url(#c{number})") if parts else ""
        return drawing(self.width, self._height, self._label, [clip, *self._frame, drawn])


@dataclass(frozen=True)
class Series:
    """Points of one series, in the units of the data, in a colour from ``s0`` to ``s3``."""

    name: str
    style: str
    xs: Sequence[float]
    ys: Sequence[float]
    drawn: Literal["line", "dots", "both"] = "line"
    titles: Sequence[str] | None = None  # texts to hover over, for each point

    @classmethod
    def of(
        cls,
        name: str,
        style: str,
        records: Sequence[Mapping[str, float]],
        x: str,
        y: str | Callable[[Mapping[str, float]], float],
        drawn: Literal["line", "dots", "both"] = "line",
    ) -> Series:
        """Return the series of records at key ``x`` and at key or function ``y``."""
        ys = [record[y] if isinstance(y, str) else y(record) for record in records]
        return cls(name, style, [record[x] for record in records], ys, drawn)

    def points(self) -> list[tuple[float, float]]:
        """Return the points that are finite."""
        pairs = zip(self.xs, self.ys, strict=True)
        return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]

    @property
    def is_drawable(self) -> bool:
        """Whether there is any point."""
        return bool(self.points())

    def told(self) -> str:
        """Return a description for readers who cannot see the chart."""
        known = [y for y in self.ys if math.isfinite(y)]
        if self.drawn == "dots":
            return f"{self.name}: {len(known):,}."
        return (
            f"{self.name}: first {known[0]:.4g}, last {known[-1]:.4g}, lowest {min(known):.4g}, "
            f"highest {max(known):.4g}, {len(known):,} values."
        )

    def places(self, x: Axis, y: Axis, *, thinned: bool = True) -> tuple[list[float], list[float]]:
        """Return the positions of the points; if ``thinned``, a line has at most :data:`POINTS` means of neighbours.

        Points that ``x`` cannot show are left out; values that ``y`` cannot show are NaN, and so are their means.
        """
        pairs = [(x.place(a), y.place(b)) for a, b in zip(self.xs, self.ys, strict=True)]
        pairs = [pair for pair in pairs if math.isfinite(pair[0])]
        if thinned and len(pairs) > POINTS:
            low, high = min(a for a, _ in pairs), max(a for a, _ in pairs)
            bins: dict[int, list[tuple[float, float]]] = {}
            for pair in pairs:
                bins.setdefault(int((pair[0] - low) / (high - low or 1.0) * POINTS), []).append(pair)
            pairs = [(sum(a for a, _ in one) / len(one), sum(b for _, b in one) / len(one)) for one in bins.values()]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def draw(self, chart: Chart, x: Axis, y: Axis) -> None:
        """Draw the series on a chart with axes ``x`` and ``y``."""
        xs, ys = self.places(x, y)
        if self.drawn != "dots":
            chart.line(xs, ys, self.style)
        if self.drawn == "dots" or (self.drawn == "both" and len(xs) <= _MOST_DOTS):
            chart.dots(xs, ys, self.style, self.titles)
        else:  # points without neighbours: a line needs two
            known = [False, *(math.isfinite(value) for value in ys), False]
            alone = [at for at in range(len(ys)) if known[at + 1] and not (known[at] or known[at + 2])]
            chart.dots([xs[at] for at in alone], [ys[at] for at in alone], self.style)


class Figure(NamedTuple):
    """A chart with heading, caption, and styles and names of the series where a key explains them.

    A single point is no chart: ``told`` says its value instead.
    """

    heading: str
    chart: Chart | None
    caption: str
    key: Sequence[tuple[str, str]] = ()
    told: str = ""


def figure(
    heading: str,
    series: Sequence[Series],
    labels: tuple[str, str],
    caption: str = "",
    *,
    x: Axis | None = None,
    y: Axis | None = None,
    levels: Sequence[tuple[float, str]] = (),
    places: Sequence[tuple[float, str]] = (),
    mark: tuple[float, float, str] | None = None,
    height: float = 280.0,
    alone: bool = False,
) -> Figure | None:
    """Return a chart of several series, or the value in words if they are one point; None if there are only dots.

    Without ``x`` or ``y``, axes are linear from zero. ``levels`` are values and texts of horizontal reference lines,
    ``places`` those of vertical ones, ``mark`` is a point to mark with a ring, and its text. If ``alone``, dots need no
    line to be a chart.
    """
    series = [one for one in series if one.is_drawable]
    if all(one.drawn == "dots" for one in series) and not (alone and series):
        return None
    if all(len(one.points()) == 1 for one in series):
        return Figure(heading, None, caption, told=_said(series, labels))
    x = x or Axis.to(value for one in series for value in one.xs)
    y = y or Axis.from_zero(value for one in series for value in one.ys)
    chart = Chart(heading, " ".join(one.told() for one in series), x, y, labels, height)
    for value, text in levels:
        chart.rule(y=y.place(value), text=text)
    for value, text in places:
        chart.rule(x=x.place(value), text=text)
    for one in series:
        one.draw(chart, x, y)
    if mark is not None:
        chart.mark(x.place(mark[0]), y.place(mark[1]), mark[2])
    key = [(one.style + " dots" * (one.drawn == "dots"), one.name) for one in series]
    return Figure(heading, chart, caption, key if len(series) > 1 else ())


def _said(series: Sequence[Series], labels: tuple[str, str]) -> str:
    """Return the values of series of one point each in words, by their places."""
    said: dict[float, list[str]] = {}
    for one in series:
        ((at, value),) = one.points()
        text = compact(value) if abs(value) >= 1e4 else f"{value:.4g}"
        said.setdefault(at, []).append(f"{one.name} {text}" + ("" if labels[1] in one.name else f" ({labels[1]})"))
    places = {at: f"{at:,.0f}" if at.is_integer() else f"{at:,.6g}" for at in map(float, said)}
    return "; ".join(f"{labels[0]} {places[at]}: {', '.join(values)}" for at, values in said.items())


def interval_strip(
    value: float, interval: tuple[float, float] | None, reference: float, limits: tuple[float, float]
) -> Markup:
    """Draw a value, its interval and a reference on a short horizontal scale, for a cell of a table.

    All rows of a table share ``limits``; what lies outside is drawn at the edge, an interval with an arrow. Assistive
    technology skips the strip, because the value is in the next cell.
    """

    def at(number: float) -> float:
        low, high = limits
        return 4 + (min(max(number, low), high) - low) / (high - low) * 112

    parts = [stroke((at(reference), at(reference)), (1, 17), "rule")]
    if interval and all(math.isfinite(end) for end in interval):
        parts.append(stroke((at(interval[0]), at(interval[1])), (9, 9), "whisker s0"))
        for x, tip, is_cut in ((4, 4, interval[0] < limits[0]), (116, -4, interval[1] > limits[1])):
            parts += [stroke((x, x + tip), (9, 9 + way), "whisker s0") for way in (-4, 4) if is_cut]
    if math.isfinite(value):
        parts.append(_tag("circle", class_="dot s0", cx=at(value), cy=9, r=3.5))
    return _tag("svg", *parts, class_="strip", viewBox="0 0 120 18", aria_hidden="true")


def stacked_bar(label: str, parts: Sequence[tuple[str, float]]) -> Markup:
    """Draw parts of a whole on a bar as wide as its container; the style sheet gives its height.

    ``label`` is for readers who cannot see it; ``parts`` are pairs of style and size; sizes that are not above zero are
    left out.
    """
    shown = [(style, size) for style, size in parts if size > 0 and math.isfinite(size)]
    whole, at, boxes = math.fsum(size for _, size in shown), 0.0, []
    for style, size in shown:
        width = 1000 * size / whole
        boxes.append(box(at, 0, width, 10, style))
        at += width
    frame = {"class_": "bar", "viewBox": "0 0 1000 10", "preserveAspectRatio": "none"}
    return _tag("svg", *boxes, **frame, role="img", aria_label=label)


def bars(
    label: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    names: Mapping[str, str],
    text: Callable[[float], str] = seconds_text,
    limit: tuple[str, float] | None = None,
) -> Markup:
    """Draw stacked bars with their sums, one below the other, on one scale.

    ``rows`` are labels and values by part; ``names`` are parts with their titles, stacked in the colours ``f0``, ``f1``
    and so on; ``limit`` is the name and value of a line across the bars.
    """
    totals = [sum(values.get(name, 0.0) for name in names) for _, values in rows]
    most = max(max(totals, default=0.0) or 1.0, limit[1] if limit else 0.0)
    left, height = 40.0 + 8 * max((len(name) for name, _ in rows), default=0), 26.0 if len(rows) <= 12 else 16.0
    scale = (WIDTH - left - 90) / most
    edge, bottom = left + (limit[1] * scale if limit else 0.0), 8 + len(rows) * height
    drawn, texts = list[Markup](), list[Markup]()
    for row, ((name, values), total) in enumerate(zip(rows, totals, strict=True)):
        x, y = left, 4 + row * height
        texts.append(write_text(left - 8, y + height * 0.37 + 4, name, "end"))
        for number, (part, title) in enumerate(names.items()):
            value = max(values.get(part, 0.0), 0.0)
            drawn.append(box(x, y, value * scale, height * 0.74, f"f{number}", f"{title}: {text(value)}"))
            x += value * scale
        texts.append(write_text(x + 6, y + height * 0.37 + 4, text(total), "start"))
    if limit is not None:
        drawn.append(stroke((edge, edge), (2, bottom), "limit"))
        texts.append(write_text(edge, bottom + 12, limit[0]))
        bottom += 16
    return drawing(WIDTH, bottom, label, [*drawn, *texts])  # sums lie over the line of the limit


class Span(NamedTuple):
    """A part of a row of :func:`gantt`, in seconds; one with a title shows it under the pointer.

    ``low`` and ``high`` are where it begins and ends as shares of the row's height, from above.
    """

    start: float
    end: float
    style: str
    title: str = ""
    number: str = ""
    is_thin: bool = False
    low: float = 0.0
    high: float = 1.0


class Mark(NamedTuple):
    """A moment across rows of :func:`gantt`, from the first row to that before the last, with a title."""

    first: int
    last: int
    at: float
    style: str
    title: str


def gantt(
    label: str,
    rows: Sequence[tuple[str, Iterable[Span]]],
    until: float,
    height: float = 34.0,
    *,
    numbered: bool = False,
    marks: Iterable[Mark] = (),
    ticks: Sequence[tuple[float, str]] | None = None,
) -> Markup:
    """Draw what happens in each row to scale, up to ``until`` seconds; thin spans lie below the others.

    ``ticks`` are times in seconds and their texts; None for four equal parts.
    """
    left, bottom = 80.0, 8 + len(rows) * height
    scale = (WIDTH - left - 24) / until
    drawn, over, paths = [], [], dict[str, list[str]]()
    quarters = [(part * until, _time_text(part * until, until)) for part in (0.0, 0.25, 0.5, 0.75, 1.0)]
    for at, text in quarters if ticks is None else ticks:
        x = left + at * scale
        drawn += [stroke((x, x), (4, bottom), "grid"), write_text(x, bottom + 16, text)]
    for row, (name, spans) in enumerate(rows):
        top = 8 + row * height
        over.append(write_text(left - 8, top + height * 0.36 + 4, name, "end"))
        for one in spans:
            if one.start >= until:
                continue
            gap = 0.3 if one.high - one.low == 1 else 0.0
            x, width = left + one.start * scale, max((min(one.end, until) - one.start) * scale - gap, 0.15)
            y, tall = (top + height * 0.76, height * 0.12) if one.is_thin else (top, height * 0.72)
            y, tall = y + tall * one.low, tall * (one.high - one.low)
            if one.title:
                over.append(box(x, y, width, tall, one.style, one.title))
            else:  # thousands of spans without titles are one path a style
                paths.setdefault(one.style, []).append(f"M{x:.2f} {y:.1f}h{width:.2f}v{tall:.1f}h{-width:.2f}z")
            if numbered and one.number and height >= 14 and width > 8 * len(one.number):
                over.append(write_text(x + width / 2, top + height * 0.36 + 3.5, one.number, style="number"))
    drawn += [_tag("path", class_=style, d="".join(path)) for style, path in paths.items()]
    for mark in marks:
        x, top, tall = left + mark.at * scale, 8 + mark.first * height - 2, (mark.last - mark.first) * height * 0.9
        shape = f"M{x - 4:.1f} {top:.1f}h8l-4 6zM{x:.1f} {top:.1f}v{tall:.1f}"
        over.append(_tag("path", _tag("title", mark.title), class_=f"moment {mark.style}", d=shape))
    return drawing(WIDTH, bottom + 24, label, [*drawn, *over])
