"""Page of the best plans for several clusters or numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cordillera.planning.ranking.workload import Recommender
from cordillera.reports import page
from cordillera.reports.charts import Axis, Figure, Series, figure

_COLOURS = 6  # s0 to s5


class TrainingBudget(NamedTuple):
    """A whole training, of which a plan gives the time and the cost.

    Attributes:
        tokens: Number of tokens to train on.
        price: Price of a device hour, in any currency; None if it is not known.
    """

    tokens: float
    price: float | None = None

    def spent(self, devices: int, rate: float) -> tuple[float, float, float | None]:
        """Return days, device hours and cost without failures, at ``rate`` tokens a second; None for no price."""
        hours = devices * self.tokens / rate / 3600
        return self.tokens / rate / 86_400, hours, None if self.price is None else hours * self.price


@dataclass(frozen=True)
class ComparedPlan:
    """Best plan for a cluster and a number of devices; what is not known, or cannot be, is None.

    Attributes:
        cluster: Name of the cluster.
        layout: Its layout, or why there is none.
        devices: Number of devices.
        seconds: Time of a step.
        error_s: Mean error of that time in seconds.
        rate: Tokens or samples a second.
        memory_bytes: Memory of the device that needs most.
        days: Days of the whole training, without failures.
        device_hours: Device hours of the whole training.
        cost: Its cost in the currency of the budget's price.
        scaling: Rate of each device, relative to that with the fewest devices of the cluster.
    """

    cluster: str
    layout: str
    devices: int | None
    seconds: float | None = None
    error_s: float | None = None
    rate: float | None = None
    memory_bytes: float | None = None
    days: float | None = None
    device_hours: float | None = None
    cost: float | None = None
    scaling: float | None = None

    @classmethod
    def of(cls, cluster: str, explorer: Any, best: Any, budget: TrainingBudget | None) -> ComparedPlan:
        """Return the row of the ``best`` plan of an ``explorer``; a recommendation model has no ``budget``."""
        devices, work = explorer.devices, explorer.workload
        row = cls(cluster, str(best.layout), devices, best.seconds, memory_bytes=best.step.memory_bytes)
        if isinstance(work, Recommender):
            return replace(row, rate=best.samples_per_s)
        rate = work.batch * work.sequence / best.seconds
        days, hours, cost = (None, None, None) if budget is None else budget.spent(devices, rate)
        return replace(row, error_s=best.error_s, rate=rate, days=days, device_hours=hours, cost=cost)


def with_scaling(rows: Sequence[ComparedPlan]) -> list[ComparedPlan]:
    """Return ``rows`` with the rate of each device relative to that of the fewest devices of the cluster."""
    found = []
    for row in rows:
        same = [(one.devices, one.rate) for one in rows if one.cluster == row.cluster and one.rate and one.devices]
        if row.rate and row.devices:
            devices, rate = min(same)
            row = replace(row, scaling=row.rate / row.devices * devices / rate)
        found.append(row)
    return found


def plan_comparison_page(
    title: str,
    rows: Sequence[ComparedPlan],
    unit: str,
    table: tuple[list[str], Sequence[Sequence[Any]]],
    said: Sequence[str],
) -> str:
    """Return the HTML page of several plans.

    Args:
        title: What is planned.
        rows: The plans.
        unit: What is counted a second: ``tokens`` or ``samples``.
        table: Headings and rows as the terminal shows them.
        said: Sentences below.
    """
    return page.fill(
        "study", name=f"{title}: plans", lede="The best plan for each cluster and number of devices; all are simulated",
        seen="Simulated", charts=[_rates(rows, unit)], tables=[("Plans", *table)], said=said,
    )  # fmt: skip


def _rates(rows: Sequence[ComparedPlan], unit: str) -> Figure | None:
    """Draw the rate over the number of devices; None if no cluster has plans for two numbers."""
    plans, ideals = list[Series](), list[Series]()
    for cluster in dict.fromkeys(row.cluster for row in rows):
        points = sorted((row.devices, row.rate) for row in rows if row.cluster == cluster and row.devices and row.rate)
        if len(points) < 2:
            continue
        xs, ys = [float(x) for x, _ in points], [y for _, y in points]
        titles = [f"{cluster}, {x:,.0f} devices: {y:,.0f} {unit}/s" for x, y in zip(xs, ys, strict=True)]
        plans.append(Series(cluster, f"s{len(plans) % _COLOURS}", xs, ys, "both", titles))
        ideals.append(Series(f"{cluster}, perfect scaling", "rule", [xs[0], xs[-1]], [ys[0], ys[0] * xs[-1] / xs[0]]))
    if not plans:
        return None
    drawn = [*ideals, *plans]
    places, rates = [x for one in drawn for x in one.xs], [y for one in drawn for y in one.ys]
    numbers = Axis.log(min(places) / 1.1, max(places) * 1.1)
    least = (numbers.limits[1] - numbers.limits[0]) / 9  # between ticks, for their texts
    kept = list[float]()
    for x in sorted(set(places)):
        if not kept or numbers.place(x) - numbers.place(kept[-1]) > least:
            kept.append(x)
    chart = figure(
        f"{unit.capitalize()} a second by number of devices",
        drawn,
        ("devices", f"{unit}/s"),
        "Dashed: as many times the rate as devices, from the fewest on.",
        x=replace(numbers, ticks=[(numbers.place(x), f"{x:,.0f}") for x in kept]),
        y=Axis.log(min(rates) / 1.1, max(rates) * 1.1),
    )
    return chart._replace(key=[(one.style, one.name) for one in plans] if len(plans) > 1 else ()) if chart else None
