"""Series of a run's records on linear or logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import ClassVar, Literal

from cordillera.numbers import compact
from cordillera.reports.charts import Chart, log_ticks, nice_ticks
from cordillera.reports.page import POINTS, Pictures

_WIDE = 100.0  # ratio of largest to smallest from which an axis may be logarithmic
_MOST_DOTS = 60  # largest number of dots on a line


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        limits: Positions of its ends.
        ticks: Positions and texts of the ticks; None for round numbers.
        is_log: Whether positions are decimal logarithms of values.
    """

    LINEAR: ClassVar[Axis]

    limits: tuple[float, float]
    ticks: list[tuple[float, str]] | None = None
    is_log: bool = False

    @classmethod
    def log(cls, low: float, high: float) -> Axis:
        """Return a logarithmic axis from ``low`` to ``high``, both above zero."""
        limits = math.log10(low), math.log10(high)
        return cls(limits, log_ticks(*limits), is_log=True)

    @classmethod
    def to(cls, values: Iterable[float]) -> Axis:
        """Return a linear axis from zero to the largest of ``values``."""
        top = max((value for value in values if 0 < value < math.inf), default=1.0)
        return cls((0.0, top))

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
        ticks = nice_ticks(*limits)
        return cls(limits, [(tick, compact(tick)) for tick in ticks] if top >= 1e4 or top < 1e-2 else None)

    @property
    def top(self) -> float:
        """Largest value on the axis."""
        return 10 ** self.limits[1] if self.is_log else self.limits[1]

    def place(self, value: float) -> float:
        """Return the position of a ``value``; NaN if the axis cannot show it."""
        if not math.isfinite(value) or (self.is_log and value <= 0):
            return math.nan
        return math.log10(value) if self.is_log else value


Axis.LINEAR = Axis((0.0, 1.0))


@dataclass(frozen=True)
class Series:
    """Points of one series.

    Attributes:
        name: Name of the series.
        style: Style of the charts (``s0`` to ``s3``).
        xs: Horizontal coordinates, in the units of the data.
        ys: Vertical coordinates, in the units of the data.
        drawn: Whether points are drawn as a line, as dots, or both.
    """

    name: str
    style: str
    xs: Sequence[float]
    ys: Sequence[float]
    drawn: Literal["line", "dots", "both"] = "line"

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

    @property
    def is_drawable(self) -> bool:
        """Whether there is any point."""
        return any(math.isfinite(x) and math.isfinite(y) for x, y in zip(self.xs, self.ys, strict=True))

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
        """Return the positions of the points; if ``thinned``, a line has at most a few hundred means of neighbours.

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


def draw(
    pictures: Pictures,
    heading: str,
    series: Sequence[Series],
    labels: tuple[str, str],
    caption: str,
    *,
    x: Axis | None = None,
    y: Axis | None = None,
    level: tuple[float, str] | None = None,
    places: Sequence[tuple[float, str]] = (),
) -> str:
    """Return a chart of several series as HTML; empty if there is nothing to draw except dots.

    Args:
        pictures: Charts of the page.
        heading: Text above the chart.
        series: Series to draw; those without a point are left out.
        labels: Names and units of the two axes.
        caption: Text below the chart.
        x: Horizontal axis; None for a linear one from zero.
        y: Vertical axis; None for one from zero.
        level: Value and text of a horizontal reference line; None for none.
        places: Values and texts of vertical reference lines.
    """
    series = [one for one in series if one.is_drawable]
    if all(one.drawn == "dots" for one in series):
        return ""
    x = x or Axis.to(value for one in series for value in one.xs)
    y = y or Axis.from_zero(value for one in series for value in one.ys)
    told = " ".join(one.told() for one in series)
    x_label, y_label = labels
    chart = Chart(heading, told, x.limits, y.limits, x_label=x_label, y_label=y_label, x_ticks=x.ticks, y_ticks=y.ticks)
    if level is not None:
        chart.rule(y=y.place(level[0]), text=level[1])
    for place, text in places:
        chart.rule(x=x.place(place), text=text)
    for one in series:
        xs, ys = one.places(x, y)
        if one.drawn != "dots":
            chart.line(xs, ys, one.style)
        has_all = one.drawn == "dots" or (one.drawn == "both" and len(xs) <= _MOST_DOTS)
        points = range(len(ys)) if has_all else _alone(ys)  # a line needs two points
        chart.dots([xs[index] for index in points], [ys[index] for index in points], one.style)
    key = "".join(
        f' <span class="entry"><span class="key {one.style}"></span>{escape(one.name)}</span>' for one in series
    )
    return pictures.draw(heading, chart, caption, key if len(series) > 1 else "")


def _alone(ys: Sequence[float]) -> list[int]:
    """Return the indices of points without neighbours."""
    known = [False, *(math.isfinite(y) for y in ys), False]
    return [at for at in range(len(ys)) if known[at + 1] and not (known[at] or known[at + 2])]
