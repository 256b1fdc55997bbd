"""Plans of recommendation models for readers and programs: a page, JSON, and a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from cordillera.planning.ranking.exchange import CAUSES, STREAMS, Operation
from cordillera.planning.ranking.explorer import RecommenderExplorer, TableExploration, TablePlan
from cordillera.planning.sensitivity import DISTANCES_KM, OVERSUBSCRIPTIONS, Sensitivity
from cordillera.reports.plan_charts import bars_svg, lines_svg, seconds_text, time_ticks

_MEMORY = ("tables", "optimizer", "buffers", "dense layers", "activations")
_ROWS = {"compute": "computes", "exchange": "exchanges", "reduce": "reduces"}
_WORTH_SAYING = 0.005  # part of a step below which a difference is not named


def chrome_trace(timeline: Sequence[Operation]) -> str:
    """Return a step for ``chrome://tracing`` and Perfetto, with streams as threads.

    Args:
        timeline: Simulated operations; times of the trace are in microseconds.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": name}} for i, name in enumerate(STREAMS)
    ]
    events += [
        {
            "ph": "X",
            "name": one.name,
            "cat": one.cause,
            "pid": 0,
            "tid": STREAMS.index(one.stream),
            "ts": one.start * 1e6,
            "dur": one.seconds * 1e6,
        }
        for one in timeline
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def streams_svg(timeline: Sequence[Operation]) -> str:
    """Draw a step to scale: a row for each stream, coloured by cause.

    Args:
        timeline: Simulated operations.
    """
    left, height, width = 80.0, 34.0, 960.0
    total = max(one.end for one in timeline)
    scale, numbers = (width - left - 8) / total, {cause: i for i, cause in enumerate(CAUSES)}
    drawn = []
    for row, stream in enumerate(STREAMS):
        y = 8 + row * height
        drawn.append(f'<text x="{left - 8:.0f}" y="{y + height * 0.5:.1f}" class="end">{_ROWS[stream]}</text>')
        drawn += [
            f'<rect class="part{numbers[one.cause]}" x="{left + one.start * scale:.2f}" y="{y:.1f}" '
            f'width="{max(one.seconds * scale - 0.4, 0.2):.2f}" height="{height * 0.7:.1f}">'
            f"<title>{escape(one.name)}: {seconds_text(one.seconds)}</title></rect>"
            for one in timeline
            if one.stream == stream and one.seconds > 0
        ]
    bottom = 8 + len(STREAMS) * height
    return (
        f'<svg viewBox="0 0 {width:.0f} {bottom + 24:.0f}" role="img" aria-label="What every stream does in a step">'
        f"{time_ticks(left, bottom, total, scale)}{''.join(drawn)}</svg>"
    )


def reasons(best: TablePlan, base: TablePlan) -> list[str]:
    """Explain why a plan is faster than another, with the largest difference first.

    Args:
        best: Faster plan.
        base: Slower plan.
    """
    if best.seconds >= base.seconds:
        return ["Nothing that was searched is faster than the production-like plan."]
    found = []
    before, after = base.step.parts, best.step.parts
    for cause in sorted(CAUSES, key=lambda one: after[one] - before[one]):
        change = after[cause] - before[cause]
        if abs(change) > _WORTH_SAYING * base.seconds:
            word = "less" if change < 0 else "more"
            times = f"{seconds_text(before[cause])} to {seconds_text(after[cause])}"
            found.append(f"{CAUSES[cause]}: {times}, {seconds_text(abs(change))} {word}.")
    outer = next((name for name in reversed(base.step.crossed) if base.step.crossed[name]), None)
    if outer is not None and best.step.crossed[outer] != base.step.crossed[outer]:
        sizes = [one.step.crossed[outer] / 1e9 for one in (base, best)]
        found.append(f"Exchanged between parts of a {outer}: {sizes[0]:,.1f} GB a step to {sizes[1]:,.1f} GB.")
    if best.layout.copies != base.layout.copies:
        found.append(f"Tables: {base.layout} to {best.layout}.")
    if best.schedule != base.schedule:
        found.append(f"Order of a step: {base.schedule} to {best.schedule}.")
    return found


def to_json(explorer: RecommenderExplorer, found: TableExploration, base: TablePlan) -> dict[str, Any]:
    """Return the content of ``plan.json``: the best plans, and the placement of every part of a table in the first.

    Args:
        explorer: Explorer with workload and cluster.
        found: Result of the search.
        base: The production-like plan.
    """
    return {
        "workload": explorer.workload.model_dump(mode="json"),
        "cluster": explorer.topology.model_dump(mode="json"),
        "calibration": explorer.cost.calibration.model_dump(mode="json"),
        "devices": explorer.devices,
        "searched": list(found.searched),
        "layouts": found.layouts,
        "simulated": found.simulated,
        "interrupted": found.interrupted,
        "search_seconds": found.seconds,
        "dropped": dict(found.dropped.most_common()),
        "production": base.to_json(),
        "plans": [plan.to_json() for plan in found.plans[:10]],
        "placement": found.best.placement(),
    }


def _rows(rows: Iterable[Sequence[str]], headings: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _legend(names: Iterable[str], kind: str = "part") -> str:
    marks = "".join(f'<span><i class="{kind}{i}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="legend">{marks}</p>'


def _changes(changes: Sensitivity, best: TablePlan, outer: str) -> str:
    upgrades = [(words, seconds_text(s), f"{100 * (best.seconds / s - 1):+.2f} %") for words, s in changes.upgrades]
    return (
        "<h2>If the network were another</h2><p>The same plans, simulated again; a new search may find better ones.</p>"
        + _legend(changes.distances, "dot")
        + '<div class="pair">'
        + lines_svg(DISTANCES_KM, changes.distances, f"km of fibre within each {outer}")
        + lines_svg(OVERSUBSCRIPTIONS, changes.oversubscriptions, f"oversubscription of links into each {outer}")
        + "</div>"
        + _rows(upgrades, ("With", "Step", "Speed"))
    )


def page(
    explorer: RecommenderExplorer,
    found: TableExploration,
    base: TablePlan,
    compared: Mapping[str, TablePlan],
    changes: Sensitivity | None,
) -> str:
    """Return ``plan.html``: a self-contained page for the screen (light and dark) and for paper.

    Args:
        explorer: Explorer with workload and cluster.
        found: Result of the search.
        base: The production-like plan.
        compared: Best plans of smaller searches, by name, for comparison.
        changes: Effects of other networks; None for none.
    """
    best, work, topology = found.best, explorer.workload, explorer.topology
    cards = {
        "Step": seconds_text(best.seconds),
        "Samples a second": f"{best.samples_per_s / 1e6:.2f} M",
        "Memory of the fullest device": f"{best.step.memory_bytes / 1e9:.1f} GB",
        "Against production-like": f"{base.seconds / best.seconds:.2f} times",
        "Crosses the outermost links": best.across,
    }
    plans = {"production-like": base, **compared, "this plan": best}
    times = [(name, plan.step.parts) for name, plan in plans.items()]
    memory = [("base", base.step.memory)]
    memory += [(name.removesuffix(" alone"), plan.step.memory) for name, plan in compared.items()]
    memory += [("this plan", best.step.memory)]
    settings = [
        (
            name,
            f"{one.queue_pairs} x {one.messages} x {one.message_bytes / 2**20:g} MiB",
            one.balance,
            one.recovery,
            "yes" if one.zero_copy else "no",
        )
        for name, one in best.network.items()
    ]
    next_best = [
        (
            str(i),
            str(plan.layout),
            plan.cut,
            plan.across,
            str(plan.schedule),
            seconds_text(plan.seconds),
            f"{plan.samples_per_s / 1e6:.2f} M",
            f"{plan.step.memory_bytes / 1e9:.0f} GB",
        )
        for i, plan in enumerate(found.plans[:10], 1)
    ]
    exchanged = [
        (name, f"{base.step.crossed[name] / 1e9:,.2f} GB", f"{best.step.crossed[name] / 1e9:,.2f} GB")
        for name in best.step.crossed
    ]
    dropped = [(reason, f"{count:,}") for reason, count in found.dropped.most_common(8)]
    style = (resources.files("cordillera.reports") / "plan_style.css").read_text(encoding="utf-8")
    why = "".join(f"<li>{escape(reason)}</li>" for reason in reasons(best, base))
    boxes = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in cards.items()
    )
    note = "<p><b>The search was interrupted: this is the best plan until then.</b></p>" if found.interrupted else ""
    more = "" if changes is None else _changes(changes, best, topology.levels[-1].name)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(work.name)} on {escape(topology.name)}</title><style>{style}</style></head><body><main>
<h1>{escape(work.name)} on {escape(topology.name)}</h1>
<p>{escape(work.description)}. {escape(topology.description)}; {explorer.devices:,} devices are used.
All times are <b>simulated</b>. Constants: {escape(explorer.cost.calibration.provenance)}.</p>{note}
<div class="cards">{boxes}</div>
<h2>The plan</h2><p><b>{escape(str(best.layout))}</b> ({escape(best.cut)}), {escape(str(best.schedule))}.</p>
<h2>Why it wins</h2><p>Against the production-like plan ({escape(str(base.layout))}, {escape(base.cut)},
{escape(str(base.schedule))}):</p><ul>{why}</ul>
<h2>Where a step goes</h2><p>What is hidden behind computation is left out.</p>{_legend(CAUSES.values())}
{bars_svg(times, CAUSES)}
<h2>A step in time</h2><p>The device with the most work; ids belong to the next batch where they are prefetched.</p>
{_legend(CAUSES.values())}{streams_svg(best.step.timeline)}
<h2>Memory of the fullest device</h2>{_legend(_MEMORY)}{bars_svg(memory, {name: name for name in _MEMORY}, "B")}
<h2>What is exchanged in a step, by the level at which sender and receiver meet</h2>
{_rows(exchanged, ("Level", "Production-like", "This plan"))}
{more}
<h2>Network settings</h2>
{_rows(settings, ("Level", "Connections x messages x size", "Balance", "Recovery", "Zero copy"))}
<h2>The next best</h2>
{_rows(next_best, ("", "Layout", "Tables", "Across", "Schedule", "Step", "Samples a second", "Memory"))}
<h2>What was left out</h2><p>{found.layouts:,} layouts were tried and {found.simulated:,} steps simulated in
{found.seconds:.1f} s.</p>{_rows(dropped, ("Reason", "Times"))}
</main></body></html>
"""
