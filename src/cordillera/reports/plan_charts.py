"""Charts of plans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

CHART_WIDTH = 960.0


def seconds_text(value: float) -> str:
    """Return seconds as text in the unit that suits them."""
    if value == 0:
        return "0"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def _axis(value: float, most: float) -> str:
    if value == 0:
        return "0"
    unit, factor = ("s", 1.0) if most >= 1 else ("ms", 1e3) if most >= 1e-3 else ("µs", 1e6)
    return f"{value * factor:.3g} {unit}"


def _round(value: float) -> float:
    """Return the next larger round number: 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten."""
    ten = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(ten * one for one in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if ten * one >= value * (1 - 1e-9))


def time_ticks(left: float, bottom: float, total: float, scale: float) -> str:
    """SVG grid lines and labels at quarters of ``total`` seconds, ``left`` to ``bottom``; ``scale``: pixels/s."""
    return "".join(
        f'<line x1="{left + part * total * scale:.1f}" x2="{left + part * total * scale:.1f}" y1="4" '
        f'y2="{bottom:.1f}" class="grid"/><text x="{left + part * total * scale:.1f}" y="{bottom + 16:.1f}" '
        f'class="middle">{_axis(part * total, total)}</text>'
        for part in (0, 0.25, 0.5, 0.75, 1)
    )


def bars_svg(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    names: Mapping[str, str],
    unit: str = "s",
    limit: tuple[str, float] | None = None,
) -> str:
    """Draw stacked bars, one below the other, on one scale.

    Args:
        rows: Labels and values by part.
        names: Parts in the order in which they are stacked.
        unit: ``s``, or ``B`` for bytes.
        limit: Name and value of a line across the bars; None for none.
    """
    most = max((sum(values.get(name, 0.0) for name in names) for _, values in rows), default=0.0) or 1.0
    most = max(most, limit[1] if limit else 0.0)
    kind = "part" if unit == "s" else "held"
    left, height = 210.0 if unit == "s" else 70.0, 26.0 if len(rows) <= 12 else 16.0
    scale = (CHART_WIDTH - left - 90) / most
    drawn = []
    for i, (label, values) in enumerate(rows):
        x, y = left, 4 + i * height
        drawn.append(f'<text x="{left - 8:.0f}" y="{y + height * 0.37 + 4:.1f}" class="end">{escape(label)}</text>')
        for number, (name, title) in enumerate(names.items()):
            value = max(values.get(name, 0.0), 0.0)
            shown = seconds_text(value) if unit == "s" else f"{value / 1e9:.1f} GB"
            drawn.append(
                f'<rect class="{kind}{number}" x="{x:.2f}" y="{y:.1f}" width="{value * scale:.2f}" '
                f'height="{height * 0.74:.1f}"><title>{escape(title)}: {shown}</title></rect>'
            )
            x += value * scale
        total = sum(values.get(name, 0.0) for name in names)
        text = seconds_text(total) if unit == "s" else f"{total / 1e9:.1f} GB"
        beside = max(x, left + limit[1] * scale) if limit is not None else x
        drawn.append(f'<text x="{beside + 6:.1f}" y="{y + height * 0.37 + 4:.1f}">{text}</text>')
    bottom = 8 + len(rows) * height
    if limit is not None:
        x = left + limit[1] * scale
        drawn.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{bottom:.1f}"/>')
        drawn.append(f'<text x="{x:.1f}" y="{bottom + 12:.1f}" class="middle">{escape(limit[0])}</text>')
        bottom += 16
    return f'<svg viewBox="0 0 {CHART_WIDTH:.0f} {bottom:.0f}" role="img">{"".join(drawn)}</svg>'


def lines_svg(x: Sequence[float], series: Mapping[str, Sequence[float]], title: str) -> str:
    """Draw step time over a property of the network, one line for each plan, at equally spaced points.

    Args:
        x: Values of the property.
        series: Seconds at each value, by name of the plan.
        title: Title of the chart.
    """
    width, height, left, bottom = CHART_WIDTH / 2 - 10, 220.0, 52.0, 180.0
    tick = _round(max(max(values) for values in series.values()) / 3)
    most = 3 * tick
    step = (width - left - 20) / max(len(x) - 1, 1)
    place = [left + i * step for i in range(len(x))]
    drawn = [
        f'<text x="{at:.1f}" y="{bottom + 16:.0f}" class="middle">{value:g}</text>'
        for at, value in zip(place, x, strict=True)
    ]
    for part in (0.0, 1 / 3, 2 / 3, 1.0):
        y = bottom - part * (bottom - 12)
        drawn.append(f'<line x1="{left}" x2="{width - 12:.0f}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        drawn.append(f'<text x="{left - 6}" y="{y + 4:.1f}" class="end">{_axis(part * most, most)}</text>')
    for number, (name, values) in enumerate(series.items()):
        points = " ".join(
            f"{at:.1f},{bottom - value / most * (bottom - 12):.1f}" for at, value in zip(place, values, strict=True)
        )
        drawn.append(f'<polyline class="line{number}" points="{points}"><title>{escape(name)}</title></polyline>')
        drawn += [
            f'<circle class="dot{number}" cx="{point.split(",")[0]}" cy="{point.split(",")[1]}" r="3">'
            f"<title>{escape(name)}, {value:g}: {seconds_text(seconds)}</title></circle>"
            for point, value, seconds in zip(points.split(), x, values, strict=True)
        ]
    drawn.append(f'<text x="{(left + width) / 2:.0f}" y="{height - 4:.0f}" class="middle">{escape(title)}</text>')
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">{"".join(drawn)}</svg>'
