"""Plans for readers and programs: a self-contained HTML page, JSON, and a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from cordillera.planning.language.explorer import Explorer
from cordillera.planning.language.operators import measured_share
from cordillera.planning.language.plans import Exploration, Plan
from cordillera.planning.language.what_if import Case
from cordillera.planning.pipeline.schedules import Kind
from cordillera.planning.pipeline.simulator import Timeline
from cordillera.planning.sensitivity import DISTANCES_KM, OVERSUBSCRIPTIONS, Sensitivity
from cordillera.reports.plan_charts import CHART_WIDTH, bars_svg, lines_svg, seconds_text, time_ticks

_KINDS = {
    Kind.FORWARD: ("forward", "Forward"),
    Kind.BACKWARD: ("backward", "Backward"),
    Kind.INPUT: ("backward", "Backward"),
    Kind.WEIGHT: ("weight", "Weight gradient"),
}
_PARTS = {
    "compute": "Computation",
    "tensor parallel": "Tensor-parallel collectives",
    "sharded weights": "Waiting for sharded weights",
    "pipeline messages": "Waiting for pipeline messages",
    "pipeline bubble": "Pipeline bubble",
    "gradient reduction": "Gradient reduction that is not hidden",
    "optimizer": "Optimizer",
}
_MEMORY = ("weights", "gradients", "optimizer", "activations")


def chrome_trace(timeline: Timeline) -> str:
    """Return a timeline for ``chrome://tracing`` and Perfetto, with ranks as processes.

    Computation and messages are threads.

    Args:
        timeline: Simulated timeline; times of the trace are in microseconds.
    """
    events: list[dict[str, Any]] = []
    for rank, actions in enumerate(timeline.schedule.actions):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pipeline rank {rank}"}})
        for i, action in enumerate(actions):
            start, end = float(timeline.starts[rank][i]), float(timeline.ends[rank][i])
            events.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": _KINDS[action.kind][0],
                    "pid": rank,
                    "tid": 0,
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                }
            )
    for message in timeline.messages:
        events.append(
            {
                "ph": "X",
                "name": f"{message.action} to rank {message.target}",
                "cat": "message",
                "pid": message.source,
                "tid": 1 + message.target,
                "ts": message.start * 1e6,
                "dur": (message.arrival - message.start) * 1e6,
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def timeline_svg(timeline: Timeline, until: float | None = None) -> str:
    """Draw a pipeline to scale: a row for each rank with its actions by kind, and the messages below it.

    Args:
        timeline: Simulated timeline.
        until: Time in seconds up to which to draw, with the numbers of microbatches; None for the whole timeline.
    """
    ranks, total = timeline.schedule.ranks, until or timeline.seconds or 1.0
    left, height = 56.0, max(12.0, min(30.0, 420.0 / ranks))
    scale = (CHART_WIDTH - left - 24) / total
    paths: dict[str, list[str]] = {"forward": [], "backward": [], "weight": [], "message": []}
    labels = []

    def box(start: float, end: float, y: float, tall: float, gap: float) -> tuple[str, float]:
        width = max((min(end, total) - start) * scale - gap, 0.15)
        return f"M{left + start * scale:.2f} {y:.1f}h{width:.2f}v{tall:.1f}h{-width:.2f}z", width

    for rank, actions in enumerate(timeline.schedule.actions):
        y = 8 + rank * height
        labels.append(f'<text x="{left - 8:.0f}" y="{y + height * 0.36 + 4:.1f}" class="end">rank {rank}</text>')
        for i, action in enumerate(actions):
            start, end = float(timeline.starts[rank][i]), float(timeline.ends[rank][i])
            if start >= total:
                break
            drawn, width = box(start, end, y, height * 0.72, 0.3)
            paths[_KINDS[action.kind][0]].append(drawn)
            number = str(action.microbatch)
            if until and height >= 14 and width > 8 * len(number):
                labels.append(
                    f'<text x="{left + start * scale + width / 2:.1f}" y="{y + height * 0.36 + 3.5:.1f}" '
                    f'class="number">{number}</text>'
                )
    for message in timeline.messages:
        if message.start < total:
            y = 8 + message.source * height + height * 0.76
            paths["message"].append(box(message.start, message.arrival, y, height * 0.12, 0.0)[0])
    bottom = 8 + ranks * height
    ticks = time_ticks(left, bottom, total, scale)
    filled = "".join(f'<path class="{name}" d="{"".join(path)}"/>' for name, path in paths.items() if path)
    name = "The beginning of a step, enlarged" if until else "What every pipeline rank does in a step"
    return (
        f'<svg viewBox="0 0 {CHART_WIDTH:.0f} {bottom + 24:.0f}" role="img" aria-label="{name}">{ticks}{filled}'
        f"{''.join(labels)}</svg>"
    )


def _beginning(timeline: Timeline) -> float | None:
    """Return the seconds up to which actions are wide enough to tell apart; None if all are."""
    readable = 48
    ends = [float(ends[readable - 1]) for ends in timeline.ends if len(ends) > readable]
    return min(ends, default=None)


def reasons(best: Plan, base: Plan) -> list[str]:
    """Explain why a plan is faster than another, with the largest difference first.

    Args:
        best: Faster plan.
        base: Slower plan.
    """
    if best is base:
        return ["It is the production-like plan itself: nothing that was searched is faster."]
    found = []
    changes = {
        name: (base.step.parts[name], best.step.parts[name])
        for name in sorted(_PARTS, key=lambda n: best.step.parts[n] - base.step.parts[n])
    }
    for name, (before, after) in changes.items():
        if abs(after - before) > 0.005 * base.seconds:
            word = "less" if after < before else "more"
            difference = seconds_text(abs(after - before))
            found.append(f"{_PARTS[name]}: {seconds_text(before)} to {seconds_text(after)}, {difference} {word}.")
    if best.across != base.across:
        found.append(f"What crosses the outermost links: {best.across} instead of {base.across}.")
    return found


def measured(explorer: Explorer, plan: Plan) -> str:
    """Describe in a sentence how much of a plan rests on measured matrix products; empty if none were measured.

    Args:
        explorer: Explorer with the cost model.
        plan: Plan of its search.
    """
    products = explorer.cost.products
    if products is None:
        return ""
    share = measured_share(explorer.workload, plan.layout, explorer.cost)
    rest = "" if share == 1 else "; the rest on the formula"
    return f"{100 * share:.1f} % of the time of matrix products rests on {products}{rest}"


def _products(explorer: Explorer, plans: Mapping[str, Plan]) -> dict[str, Any] | None:
    """Return the measured products and each plan's share that rests on them, for ``plan.json``."""
    products = explorer.cost.products
    if products is None:
        return None
    return {
        "source": products.source,
        "device": products.device,
        "dtype": products.dtype,
        "rows": len(products.seconds),
        "measured_share": {
            name: measured_share(explorer.workload, plan.layout, explorer.cost) for name, plan in plans.items()
        },
    }


def to_json(explorer: Explorer, found: Exploration, base: Plan, cases: Sequence[Case] = ()) -> dict[str, Any]:
    """Return the content of ``plan.json``: the best plans, each with all that a run needs.

    Args:
        explorer: Explorer with workload and cluster.
        found: Result of the search.
        base: The production-like plan.
        cases: Changes and faults under which the best plan was simulated.
    """
    return {
        "workload": explorer.workload.model_dump(mode="json"),
        "cluster": explorer.topology.model_dump(mode="json"),
        "calibration": explorer.cost.calibration.model_dump(mode="json"),
        "products": _products(explorer, {"best": found.best, "production": base}),
        "devices": explorer.devices,
        "searched": list(found.searched),
        "estimated": found.estimated,
        "simulated": found.simulated,
        "interrupted": found.interrupted,
        "search_seconds": found.seconds,
        "dropped": dict(found.dropped.most_common()),
        "production": base.to_json(),
        "plans": [plan.to_json() for plan in found.plans[:10]],
        "what_if": [case.to_json() for case in cases],
    }


def page(
    explorer: Explorer,
    found: Exploration,
    base: Plan,
    compared: Mapping[str, Plan],
    changes: Sensitivity | None,
    cases: Sequence[Case] = (),
) -> str:
    """Return ``plan.html``: a self-contained page for the screen (light and dark) and for paper.

    Args:
        explorer: Explorer with workload and cluster.
        found: Result of the search.
        base: The production-like plan.
        compared: Best plans of smaller searches, by name, for comparison.
        changes: Effects of other networks; None for none.
        cases: Changes and faults under which the best plan was simulated.
    """
    best, work, topology = found.best, explorer.workload, explorer.topology
    tokens = work.batch * work.sequence / best.seconds
    cards = {
        "Step": seconds_text(best.seconds),
        "Tokens a second": f"{tokens / 1e6:.2f} M" if tokens >= 1e6 else f"{tokens:,.0f}",
        "Of the devices' peak (MFU)": f"{100 * best.utilisation:.1f} %",
        "Memory of the fullest device": f"{best.step.memory_bytes / 1e9:.1f} GB",
        "Against production-like": f"{base.seconds / best.seconds:.2f} times",
        "Crosses the outermost links": best.across,
    }
    rows = [("production-like", base.step.parts)]
    rows += [(name, plan.step.parts) for name, plan in compared.items()]
    rows += [("this plan", best.step.parts)]
    memory = [(f"rank {rank}", parts) for rank, parts in enumerate(best.step.memory)]
    legend = "".join(f'<span><i class="part{i}"></i>{escape(title)}</span>' for i, title in enumerate(_PARTS.values()))
    kinds = "".join(
        f'<span><i class="{name}"></i>{title}</span>'
        for name, title in dict([*_KINDS.values(), ("message", "Message on its way")]).items()
    )
    held = "".join(f'<span><i class="held{i}"></i>{name.capitalize()}</span>' for i, name in enumerate(_MEMORY))
    table = "".join(
        f"<tr><td>{i}</td><td>{escape(str(plan.layout))}</td><td>{escape(plan.layout.recompute)}</td>"
        f"<td>{escape(plan.across)}</td><td>{escape(plan.schedule.name)}</td><td>{seconds_text(plan.seconds)}</td>"
        f"<td>{100 * plan.utilisation:.1f} %</td><td>{plan.step.memory_bytes / 1e9:.0f} GB</td></tr>"
        for i, plan in enumerate(found.plans[:10], 1)
    )
    more = ""
    if changes is not None:
        outer = topology.levels[-1].name
        upgrades = "".join(
            f"<tr><td>{escape(words)}</td><td>{seconds_text(seconds)}</td>"
            f"<td>{100 * (best.seconds / seconds - 1):+.2f} %</td></tr>"
            for words, seconds in changes.upgrades
        )
        names = "".join(
            f'<span><i class="dot{i}"></i>{escape(name)}</span>' for i, name in enumerate(changes.distances)
        )
        more = (
            f"<h2>If the network were another</h2><p>The same plans, simulated again; a new search may find better "
            f'ones.</p><p class="legend">{names}</p><div class="pair">'
            + lines_svg(DISTANCES_KM, changes.distances, f"km of fibre within each {outer}")
            + lines_svg(OVERSUBSCRIPTIONS, changes.oversubscriptions, f"oversubscription of links into each {outer}")
            + "</div><table><thead><tr><th>With</th><th>Step</th><th>Speed</th></tr></thead><tbody>"
            + f"{upgrades}</tbody></table>"
        )
    if cases:
        asked = "".join(
            f"<tr><td>{escape(case.what)}</td><td>{seconds_text(case.seconds)}</td>"
            f"<td>{100 * case.speed(best.seconds):+.2f} %</td><td>{case.devices:,}</td>"
            f'<td class="note">{escape(case.note)}</td></tr>'
            for case in cases
        )
        more += (
            "<h2>What if</h2><table><thead><tr><th>With</th><th>Step</th><th>Speed</th><th>Devices</th><th></th></tr>"
            f"</thead><tbody>{asked}</tbody></table>"
        )
    settings = "".join(
        f"<tr><td>{escape(name)}</td><td>{one.queue_pairs} x {one.messages} x {one.message_bytes / 2**20:g} MiB</td>"
        f"<td>{one.balance}</td><td>{one.recovery}</td><td>{'yes' if one.zero_copy else 'no'}</td></tr>"
        for name, one in best.network.items()
    )
    network = ""
    if settings:
        network = (
            "<h2>Network settings</h2><table><thead><tr><th>Level</th><th>Connections x messages x size</th>"
            "<th>Balance</th><th>Recovery</th><th>Zero copy</th></tr></thead><tbody>" + settings + "</tbody></table>"
        )
    dropped = "".join(
        f"<tr><td>{escape(reason)}</td><td>{count:,}</td></tr>" for reason, count in found.dropped.most_common(8)
    )
    timeline, enlarged = best.step.timeline, ""
    if (beginning := _beginning(timeline)) is not None:
        enlarged = f"<h3>Its beginning, enlarged (numbers are microbatches)</h3>{timeline_svg(timeline, beginning)}"
    capacity = topology.device.memory_bytes
    limit = (f"{capacity / 1e9:g} GB, the device's memory", capacity)
    style = (resources.files("cordillera.reports") / "plan_style.css").read_text(encoding="utf-8")
    why = "".join(f"<li>{escape(reason)}</li>" for reason in reasons(best, base))
    boxes = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in cards.items()
    )
    note = "<p><b>The search was interrupted: this is the best plan until then.</b></p>" if found.interrupted else ""
    table_used = measured(explorer, best)
    products = f"<p>{escape(table_used)}.</p>" if table_used else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(work.name)} on {escape(topology.name)}</title><style>{style}</style></head><body><main>
<h1>{escape(work.name)} on {escape(topology.name)}</h1>
<p>{escape(work.description)}. {escape(topology.description)}; {explorer.devices:,} devices are used.
All times are <b>simulated</b>.</p>{note}
<div class="cards">{boxes}</div>
<h2>The plan</h2><p><b>{escape(str(best.layout))}</b>, recomputation {best.layout.recompute}, schedule
{escape(best.schedule.name)}, order on the cluster {escape(", ".join(best.order))} (innermost first).</p>
<h2>Why it wins</h2><p>Against the production-like plan ({escape(str(base.layout))}, recomputation
{base.layout.recompute}, {escape(base.schedule.name)}, {base.across} across):</p><ul>{why}</ul>
<h2>Where a step goes</h2><p class="legend">{legend}</p>{bars_svg(rows, _PARTS)}
<h2>The pipeline in time</h2><p class="legend">{kinds}</p>{timeline_svg(timeline)}{enlarged}
<h2>Memory of a device by pipeline rank</h2><p class="legend">{held}</p>
{bars_svg(memory, {name: name for name in _MEMORY}, "B", limit)}
{more}{network}
<h2>The next best</h2><table><thead><tr><th></th><th>Layout</th><th>Recomputes</th><th>Across</th><th>Schedule</th>
<th>Step</th><th>MFU</th><th>Memory</th></tr></thead><tbody>{table}</tbody></table>
<h2>What was left out</h2><p>{found.estimated:,} layouts were estimated and {found.simulated:,} steps simulated in
{found.seconds:.1f} s.</p><table><thead><tr><th>Reason</th><th>Times</th></tr></thead><tbody>{dropped}</tbody></table>
<h2>Constants of the cost model</h2><p>{escape(explorer.cost.calibration.provenance)}.</p>{products}
</main></body></html>
"""
