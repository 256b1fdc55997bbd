"""Charts as inline SVG with the colours and type of the page's style sheet, so that they follow light and dark.

Classes: ``axis``, ``grid``, ``tick``, ``rule`` for the frame; ``s0`` to ``s3`` for series; ``mark`` for highlighted
points. Every text is escaped here; callers pass plain strings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from cordillera.numbers import compact


def nice_ticks(low: float, high: float, fewest: int = 4) -> list[float]:
    """Return at least ``fewest`` round numbers in ``[low, high]``: multiples of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or high - low < 1e-300:  # smaller steps would be 0
        return [low] if math.isfinite(low) else []
    power = 10.0 ** math.ceil(math.log10(high - low))
    for step in (power / divisor for divisor in (1, 2, 5, 10, 20, 50)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 >= fewest:
            break
    return [float(f"{index * step:.12g}") + 0.0 for index in range(first, last + 1)]


def tick_text(ticks: Sequence[float]) -> Callable[[float], str]:
    """Return a format with as many decimals as are needed to tell neighbouring ticks apart."""
    step = min((b - a for a, b in itertools.pairwise(ticks)), default=1.0)
    decimals = next((d for d in range(7) if abs(round(step, d) - step) < step * 1e-6), 6)
    return lambda value: f"{value:.{decimals}f}"


def padded(values: Sequence[float], share: float = 0.06) -> tuple[float, float]:
    """Return a range of all finite values with a ``share`` of margin; ``(0, 1)`` if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    air = (high - low) * share or abs(high) * share or 0.5
    return low - air, high + air


class Chart:
    """A chart with linear axes.

    Args:
        title: Title; becomes the SVG's accessible name.
        description: Description for readers who cannot see the chart.
        x: Range of the horizontal axis.
        y: Range of the vertical axis.
        x_label: Name and unit of the horizontal axis.
        y_label: Name and unit of the vertical axis.
        x_ticks: Positions and texts of horizontal ticks; None for round numbers.
        y_ticks: Positions and texts of vertical ticks; None for round numbers.
        height: Height of the drawing, which is 480 wide.
    """

    width, left, right, top, bottom = 480.0, 56.0, 14.0, 30.0, 42.0

    def __init__(
        self,
        title: str,
        description: str,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        x_label: str,
        y_label: str,
        x_ticks: Sequence[tuple[float, str]] | None = None,
        y_ticks: Sequence[tuple[float, str]] | None = None,
        height: float = 280.0,
    ) -> None:
        self.title, self.description, self.height = title, description, height
        self._x, self._y = x, y
        self._parts: list[str] = []
        x_ticks = [(tick, compact(tick)) for tick in nice_ticks(*x)] if x_ticks is None else x_ticks
        if y_ticks is None:
            marks = nice_ticks(*y)
            text = compact if y[1] >= 1e4 else tick_text(marks)
            y_ticks = [(tick, text(tick)) for tick in marks]
        base, end = height - self.bottom, self.width - self.right
        frame = []
        for value, text_ in y_ticks:
            at = self.y(value)
            frame.append(f'<line class="grid" x1="{self.left}" x2="{end}" y1="{at:.1f}" y2="{at:.1f}"/>')
            frame.append(
                f'<text class="tick" x="{self.left - 7}" y="{at + 4:.1f}" text-anchor="end">{escape(text_)}</text>'
            )
        for value, text_ in x_ticks:
            at = self.x(value)
            frame.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>')
            frame.append(f'<text class="tick" x="{at:.1f}" y="{base + 17}" text-anchor="middle">{escape(text_)}</text>')
        frame.append(f'<line class="axis" x1="{self.left}" x2="{end}" y1="{base}" y2="{base}"/>')
        middle = (self.left + end) / 2
        frame.append(f'<text class="label" x="{middle}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>')
        frame.append(f'<text class="label" x="{self.left - 48}" y="11">{escape(y_label)}</text>')
        self._frame = frame

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        low, high = self._x
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        low, high = self._y
        return self.height - self.bottom - (value - low) / (high - low) * (self.height - self.top - self.bottom)

    def line(self, xs: Sequence[float], ys: Sequence[float], style: str = "s0") -> None:
        """Draw a line through the points ``(xs, ys)`` in a ``style``; values that are not finite interrupt it."""
        path, pen = [], "M"
        for a, b in zip(xs, ys, strict=True):
            if not (math.isfinite(a) and math.isfinite(b)):
                pen = "M"
                continue
            path.append(f"{pen}{self.x(a):.1f} {self.y(b):.1f}")
            pen = "L"
        self._parts.append(f'<path class="line {style}" d="{"".join(path)}"/>')

    def dots(self, xs: Sequence[float], ys: Sequence[float], style: str = "s0", radius: float = 3.0) -> None:
        """Draw points at ``(xs, ys)`` in a ``style`` and a ``radius``; those that are not finite are left out."""
        for a, b in zip(xs, ys, strict=True):
            if math.isfinite(a) and math.isfinite(b):
                self._parts.append(
                    f'<circle class="dot {style}" cx="{self.x(a):.1f}" cy="{self.y(b):.1f}" r="{radius:g}"/>'
                )

    def whiskers(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], style: str = "s0") -> None:
        """Draw vertical intervals at ``xs`` from ``lows`` to ``highs`` in a ``style``."""
        for a, low, high in zip(xs, lows, highs, strict=True):
            if math.isfinite(low) and math.isfinite(high):
                ends = f'x1="{self.x(a):.1f}" x2="{self.x(a):.1f}" y1="{self.y(low):.1f}" y2="{self.y(high):.1f}"'
                self._parts.append(f'<line class="whisker {style}" {ends}/>')

    def steps(self, edges: Sequence[float], heights: Sequence[float], style: str = "s0") -> None:
        """Draw the filled outline of a histogram of ``heights`` between neighbouring ``edges`` in a ``style``."""
        base = self.y(0.0)
        path = [f"M{self.x(edges[0]):.1f} {base:.1f}"]
        for index, height in enumerate(heights):
            at = f"{self.y(height):.1f}"
            path.append(f"L{self.x(edges[index]):.1f} {at}L{self.x(edges[index + 1]):.1f} {at}")
        path.append(f"L{self.x(edges[-1]):.1f} {base:.1f}")
        self._parts.append(f'<path class="area {style}" d="{"".join(path)}"/>')

    def rule(self, *, y: float | None = None, x: float | None = None, text: str = "") -> None:
        """Draw a straight reference line across the chart at ``y`` or ``x``, with an optional ``text``."""
        if y is not None and self._y[0] <= y <= self._y[1]:
            at, end = self.y(y), self.width - self.right
            self._parts.append(f'<line class="rule" x1="{self.left}" x2="{end}" y1="{at:.1f}" y2="{at:.1f}"/>')
            if text:
                self._text(end - 2, at - 5, text, "end", "note")
        if x is not None and self._x[0] <= x <= self._x[1]:
            at, base = self.x(x), self.height - self.bottom
            self._parts.append(f'<line class="rule" x1="{at:.1f}" x2="{at:.1f}" y1="{self.top}" y2="{base}"/>')
            if text:
                anchor = "end" if at > self.width * 0.6 else "start"
                self._text(at + (-5 if anchor == "end" else 5), self.top + 10, text, anchor, "note")

    def diagonal(self) -> None:
        """Draw the line of equal values on both axes."""
        low, high = max(self._x[0], self._y[0]), min(self._x[1], self._y[1])
        ends = f'x1="{self.x(low):.1f}" y1="{self.y(low):.1f}" x2="{self.x(high):.1f}" y2="{self.y(high):.1f}"'
        self._parts.append(f'<line class="rule" {ends}/>')

    def mark(self, x: float, y: float, text: str) -> None:
        """Mark the point ``(x, y)`` with a ring and a ``text``."""
        a, b = self.x(x), self.y(y)
        self._parts.append(f'<circle class="mark" cx="{a:.1f}" cy="{b:.1f}" r="5.5"/>')
        at = b + 21 if b + 26 < self.height - self.bottom else b - 11
        anchor = "end" if a > self.width * 0.72 else "start" if a < self.width * 0.28 else "middle"
        self._text(a, at, text, anchor, "callout")

    def _text(self, x: float, y: float, text: str, anchor: str, style: str) -> None:
        self._parts.append(
            f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self, number: int) -> str:
        """Return the drawing, clipped to its frame, with ids that end in ``number``, which is unique on the page."""
        n, inner = number, self.height - self.top - self.bottom
        clip = (
            f'<clipPath id="c{n}"><rect x="{self.left - 1}" y="{self.top - 7}" '
            f'width="{self.width - self.left - self.right + 8}" height="{inner + 8}"/></clipPath>'
        )
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-labelledby="t{n} d{n}">'
            f'<title id="t{n}">{escape(self.title)}</title><desc id="d{n}">{escape(self.description)}</desc>{clip}'
            f'{"".join(self._frame)}<g clip-path="url(#c{n})">{"".join(self._parts)}</g></svg>'
        )


def interval_strip(
    value: float, interval: tuple[float, float] | None, reference: float, limits: tuple[float, float]
) -> str:
    """Draw a value, its interval and a reference on a short horizontal scale, for a cell of a table.

    All rows of a table share ``limits``; values outside are drawn at the edge. Assistive technology skips the strip,
    because the value is in the next cell.
    """
    width, middle = 120.0, 9.0

    def at(number: float) -> float:
        low, high = limits
        return 4 + (min(max(number, low), high) - low) / (high - low) * (width - 8)

    parts = [f'<line class="rule" x1="{at(reference):.1f}" x2="{at(reference):.1f}" y1="1" y2="17"/>']
    if interval and all(math.isfinite(end) for end in interval):
        a, b = (at(end) for end in interval)
        parts.append(f'<line class="whisker s0" x1="{a:.1f}" x2="{b:.1f}" y1="{middle}" y2="{middle}"/>')
    if math.isfinite(value):
        parts.append(f'<circle class="dot s0" cx="{at(value):.1f}" cy="{middle}" r="3.5"/>')
    return f'<svg class="strip" viewBox="0 0 {width:g} 18" aria-hidden="true">{"".join(parts)}</svg>'


def stacked_bar(title: str, description: str, parts: Sequence[tuple[str, float]]) -> str:
    """Draw parts of a whole on a bar as wide as its container; a style sheet gives its height.

    ``parts`` are pairs of style and size; sizes that are not above zero are left out.
    """
    shown = [(style, size) for style, size in parts if size > 0 and math.isfinite(size)]
    whole, at, boxes = math.fsum(size for _, size in shown), 0.0, []
    for style, size in shown:
        width = 1000 * size / whole
        boxes.append(f'<rect class="{style}" x="{at:.2f}" y="0" width="{width:.2f}" height="10"/>')
        at += width
    return (
        '<svg class="bar" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"{title}. {description}")}">{"".join(boxes)}</svg>'
    )


def heat_map(
    number: int,
    title: str,
    description: str,
    rows: Mapping[str, Mapping[int, float]],
    groups: Mapping[int, str],
    lowest: float = 1e-5,
) -> str:
    """Draw rates by row and column as shades of one colour, on a logarithmic scale up to 1.

    Args:
        number: Number of the drawing, unique on the page.
        title: Title of the drawing.
        description: Description for readers who cannot see it.
        rows: Rates in [0, 1] by name of the row and column; the highest column is on the left. A rate of 0 is an empty
            cell.
        groups: Group of each column; neighbours of one group share a heading.
        lowest: Rate of the lightest shade, which smaller rates share.
    """
    outline = "stroke:var(--faint);stroke-dasharray:none"
    columns, left, size, top = sorted(groups, reverse=True), 92.0, 26.0, 34.0
    width = left + size * max(32, len(columns)) + 2  # so that maps of narrow formats have the same scale
    height = top + size * len(rows) + 44
    parts = []
    for group, members in itertools.groupby(range(len(columns)), key=lambda i: groups[columns[i]]):
        places = list(members)
        middle = left + size * (places[0] + len(places) / 2)
        name = group if len(group) * 6 < size * len(places) else group[0]
        parts.append(f'<text class="label" x="{middle:.1f}" y="12" text-anchor="middle">{escape(name)}</text>')
        if places[0]:
            at = left + size * places[0]
            parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="2" y2="{top + size * len(rows)}"/>')
    for i, column in enumerate(columns):
        parts.append(
            f'<text class="tick" x="{left + size * (i + 0.5)}" y="{top - 6}" text-anchor="middle">{column}</text>'
        )

    def shade(rate: float) -> float:
        return 0.0 if rate <= 0 else 0.08 + 0.92 * max(0.0, 1 - math.log(rate) / math.log(lowest))

    for j, (name, rates) in enumerate(rows.items()):
        y = top + size * j
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 17}" text-anchor="end">{escape(name)}</text>')
        for i, column in enumerate(columns):
            rate = rates.get(column, math.nan)
            if math.isnan(rate):
                continue
            parts.append(
                f'<rect class="area s1" x="{left + size * i + 1}" y="{y + 1}" width="{size - 2}" '
                f'height="{size - 2}" style="{outline};fill-opacity:{shade(rate):.3f}">'
                f"<title>{escape(name)}, {column}: {rate:.3g}</title></rect>"
            )
    y = top + size * len(rows) + 14
    for i, power in enumerate(range(round(math.log10(lowest)), 1)):
        x = left + 92 * i
        parts.append(
            f'<rect class="area s1" x="{x}" y="{y}" width="18" height="18" '
            f'style="{outline};fill-opacity:{shade(10.0**power):.3f}"/>'
            f'<text class="tick" x="{x + 24}" y="{y + 14}">{_percents(power)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="ht{number} hd{number}">'
        f'<title id="ht{number}">{escape(title)}</title><desc id="hd{number}">{escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _percents(power: int) -> str:
    return f"{100 * 10.0**power:g} %"


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return positions (in powers of ten) and texts of round numbers between ``low`` and ``high`` on a log axis."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    step = max(1, -(-(last - first) // 6))
    if last - first >= 2:
        return [(float(power), compact(10.0**power)) for power in range(first, last + 1, step)]
    found = [
        (math.log10(digit) + power, digit * 10.0**power) for power in range(first - 1, last + 1) for digit in (1, 2, 5)
    ]
    return [(place, compact(value)) for place, value in found if low - 1e-9 <= place <= high + 1e-9]
