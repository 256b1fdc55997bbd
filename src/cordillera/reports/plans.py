"""What pages, JSON and traces of plans share, be they of language or of recommendation models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cordillera.numbers import shown
from cordillera.planning.sensitivity import DISTANCES_KM, OVERSUBSCRIPTIONS, Sensitivity
from cordillera.reports import page
from cordillera.reports.charts import Axis, Figure, Series, bars, figure, padded, seconds_text

_WORTH_SAYING = 0.005  # smallest difference worth naming, as a share of a step
_VISIBLE = 5e-4  # smallest visible share of the longest bar


def event(name: str, category: str, process: int, thread: int, start: float, seconds: float) -> dict[str, Any]:
    """Return an event of a Chrome trace that begins at ``start`` seconds and lasts ``seconds``."""
    times = {"ts": start * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, **times}


def trace(events: Sequence[dict[str, Any]]) -> str:
    """Return the text of a Chrome trace."""
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def differences(titles: Mapping[str, str], after: Any, before: Any) -> list[str]:
    """Return sentences on the parts of a step in which two plans differ, the largest gain first."""
    found = []
    new, old = after.step.parts, before.step.parts
    for name in sorted(titles, key=lambda one: new[one] - old[one]):
        change = new[name] - old[name]
        if abs(change) > _WORTH_SAYING * before.seconds:
            times = f"{seconds_text(old[name])} to {seconds_text(new[name])}"
            found.append(f"{titles[name]}: {times}, {seconds_text(abs(change))} {'less' if change < 0 else 'more'}.")
    return found


def content(explorer: Any, found: Any, base: Any) -> dict[str, Any]:
    """Return what ``plan.json`` says of every search."""
    return {
        "workload": explorer.workload.model_dump(mode="json"),
        "cluster": explorer.topology.model_dump(mode="json"),
        "calibration": explorer.cost.calibration.model_dump(mode="json"),
        "devices": explorer.devices,
        "searched": list(found.searched),
        "simulated": found.simulated,
        "interrupted": found.interrupted,
        "search_seconds": found.seconds,
        "dropped": dict(found.dropped.most_common()),
        "production": base.to_json(),
        "plans": [plan.to_json() for plan in found.plans[:10]],
    }


def gigabytes(size: float) -> str:
    """Return bytes as text in GB."""
    return f"{shown(size / 1e9, 1)} GB"


def colours(titles: Mapping[str, str], rows: Iterable[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return the parts that are visible in some of ``rows``, with their colours.

    ``titles`` are those of all parts by name; ``rows`` are sizes of parts, and the colours those of
    :func:`cordillera.reports.charts.bars`.
    """
    shown = [dict(row) for row in rows]
    least = _VISIBLE * max((sum(row.values()) for row in shown), default=0.0)
    return [
        (f"f{number}", title)
        for number, (part, title) in enumerate(titles.items())
        if any(row.get(part, 0.0) > least for row in shown)
    ]


def fill(
    template: str,
    explorer: Any,
    found: Any,
    base: Any,
    compared: Mapping[str, Any],
    titles: Mapping[str, str],
    changes: Sensitivity | None,
    **values: Any,
) -> str:
    """Return the page of a plan from a template that extends that of all plans, with further ``values`` for it.

    ``compared`` are plans to show beside the best and the production-like one; ``titles`` are those of the parts of a
    step.
    """
    best = found.best
    times = {"production-like": base, **compared, "this plan": best}
    levels = explorer.topology.levels
    spanned = levels[explorer.topology.shared_level(0, explorer.devices - 1)].name
    return page.fill(
        template,
        name=f"{explorer.workload.name} on {explorer.topology.name}",
        explorer=explorer,
        found=found,
        best=best,
        base=base,
        causes=colours(titles, [plan.step.parts for plan in times.values()]),
        times=bars("Parts of a step by plan", [(name, plan.step.parts) for name, plan in times.items()], titles),
        spanned=spanned,
        sensitivity=_sensitivity(changes, best.seconds, spanned) if changes else {},
        **values,
    )


def _sensitivity(changes: Sensitivity, seconds: float, outer: str) -> dict[str, Any]:
    """Return charts of step time over properties of the outermost network, and upgrades of any."""
    return {
        "charts": [
            _over(DISTANCES_KM, changes.distances, f"km of fibre within each {outer}"),
            _over(OVERSUBSCRIPTIONS, changes.oversubscriptions, f"oversubscription of links into each {outer}"),
        ],
        "key": [(f"s{number}", name) for number, name in enumerate(changes.distances)],
        "upgrades": [
            (words, seconds_text(one), f"{100 * (seconds / one - 1):+.2f} %") for words, one in changes.upgrades
        ],
    }


def _over(values: Sequence[float], plans: Mapping[str, Sequence[float]], label: str) -> Figure | None:
    """Draw step time over a property of the network, one line for each plan."""
    lines = [
        Series(
            name,
            f"s{number}",
            values,
            times,
            "both",
            [f"{name}, {value:g}: {seconds_text(one)}" for value, one in zip(values, times, strict=True)],
        )
        for number, (name, times) in enumerate(plans.items())
    ]
    y = Axis.of_seconds(one for times in plans.values() for one in times)
    return figure(f"Step over {label}", lines, (label, ""), x=Axis(padded(values, 0.03)), y=y, height=240)
