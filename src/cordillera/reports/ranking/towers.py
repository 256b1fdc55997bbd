"""Page of a division of features among towers: the map of features, and the towers' loads."""

from __future__ import annotations

from typing import Any

from cordillera.numbers import known
from cordillera.planning.ranking.towers import TowerPlan
from cordillera.reports import page
from cordillera.reports.charts import WIDTH, Axis, Chart, padded

_COLOURS = 4  # s0 to s3; the number beside a feature distinguishes towers of one colour
_MOST_NAMED = 60  # features whose names fit on the map


def towers_page(plan: TowerPlan) -> str:
    """Return the HTML page of a plan of towers."""
    return page.fill(
        "towers",
        name=f"{plan.source.get('run', 'features')}: towers of features",
        plan=plan,
        drawing=_map(plan).svg(1),
        similarity=[known(value, "{:.3f}") or "undefined" for value in plan.mean_similarity()],
        headings=["tower", *plan.loads, "features in it"],
        rows=tower_rows(plan),
        bounds=[(name, f"{bound:,.6g}") for name, bound in plan.bounds.items()],
    )


def tower_rows(plan: TowerPlan) -> list[tuple[str, ...]]:
    """Return a row for each tower: its number, its loads, its features."""
    loads = {name: plan.tower_loads(name) for name in plan.loads}
    return [
        (str(number), *(f"{values[number]:,.6g}" for values in loads.values()), ", ".join(group))
        for number, group in enumerate(plan.groups())
    ]


def summary(plan: TowerPlan) -> list[str]:
    """Return what a plan of towers amounts to, in sentences."""
    inside, across = (known(value, "{:.3f}") or "undefined" for value in plan.mean_similarity())
    fullest = []
    for name in plan.loads:
        values = plan.tower_loads(name)
        mean = sum(values) / len(values)
        fullest.append(f"{name} {max(values) / mean:.2f}" if mean else f"{name} 0")
    return [
        f"mean absolute cosine of two features: {inside} within a tower, {across} between towers",
        f"largest load of a tower, in means: {', '.join(fullest)}",
        f"distances on the map are off by {100 * plan.stress:.0f} % (root mean square, relative)",
    ]


def _map(plan: TowerPlan) -> Chart:
    """Draw the first two coordinates of every feature in the colour of its tower."""
    xs = plan.coordinates[:, 0].tolist()
    ys = plan.coordinates[:, 1].tolist() if plan.coordinates.shape[1] > 1 else [0.0] * len(xs)
    axes: list[Any] = [Axis(padded(values, 0.12)) for values in (xs, ys)]
    told = f"{len(xs)} features in {len(plan.groups())} towers"
    chart = Chart("Map of features", told, axes[0], axes[1], ("first coordinate", "second coordinate"), 560.0, WIDTH)
    for name, tower, x, y in zip(plan.features, plan.towers, xs, ys, strict=True):
        title = f"{name} · {tower}"
        chart.dots([x], [y], f"s{tower % _COLOURS}", [title])
        if len(xs) <= _MOST_NAMED:
            chart.name(x, y, title)
    return chart
