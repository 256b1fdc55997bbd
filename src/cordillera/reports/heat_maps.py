"""Maps of rates by row and column, as inline SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from markupsafe import Markup

from cordillera.reports.charts import box, drawing, stroke, write_text


def heat_map(label: str, rows: Mapping[str, Mapping[int, float]], groups: Mapping[int, str]) -> Markup:
    """Draw rates by row and column as shades of one colour, on a logarithmic scale from 0.00001 up to 1.

    The highest column is on the left; neighbours of one of the ``groups`` share a heading. Rates of 0 are empty cells.
    """
    columns, left, size, top, powers = sorted(groups, reverse=True), 92.0, 26.0, 34.0, range(-5, 1)
    bottom = top + size * len(rows)
    drawn: list[Markup] = []

    def cell(x: float, y: float, side: float, rate: float, title: str = "") -> None:
        shade = 0.0 if rate <= 0 else 0.08 + 0.92 * max(0.0, 1 - math.log10(rate) / powers[0])
        drawn.append(box(x, y, side, side, "cell", title, style=f"fill-opacity:{shade:.3f}"))

    for group, members in itertools.groupby(range(len(columns)), key=lambda i: groups[columns[i]]):
        places = list(members)
        start, wide = left + size * places[0], size * len(places)
        drawn.append(write_text(start + wide / 2, 12, group if len(group) * 6 < wide else group[0], style="label"))
        drawn += [stroke((start, start), (2, bottom), "axis")] if places[0] else []
    drawn += [write_text(left + size * (i + 0.5), top - 6, str(column)) for i, column in enumerate(columns)]
    for row, (name, rates) in enumerate(rows.items()):
        y = top + size * row
        drawn.append(write_text(left - 8, y + 17, name, "end"))
        for i, column in enumerate(columns):
            if not math.isnan(rate := rates.get(column, math.nan)):
                cell(left + size * i + 1, y + 1, size - 2, rate, f"{name}, {column}: {rate:.3g}")
    for i, power in enumerate(powers):
        cell(left + 92 * i, bottom + 14, 18, 10.0**power)
        drawn.append(write_text(left + 92 * i + 24, bottom + 28, f"{100 * 10.0**power:g} %", "start"))
    width = left + size * max(32, len(columns)) + 2  # keeps the scale of maps of narrow formats
    return drawing(width, bottom + 44, label, drawn)
