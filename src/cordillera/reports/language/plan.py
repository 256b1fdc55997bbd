"""Plans of language models for readers and programs: a page, JSON, and a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from cordillera.planning.language.explorer import Explorer
from cordillera.planning.language.operators import measured_share
from cordillera.planning.language.plans import Exploration, Plan
from cordillera.planning.language.what_if import Case
from cordillera.planning.pipeline.schedules import Kind
from cordillera.planning.pipeline.simulator import Timeline
from cordillera.planning.sensitivity import Sensitivity
from cordillera.reports import plans
from cordillera.reports.charts import Span, bars, gantt

_KINDS = {
    Kind.FORWARD: ("forward", "Forward"),
    Kind.BACKWARD: ("backward", "Backward"),
    Kind.INPUT: ("backward", "Backward"),
    Kind.WEIGHT: ("weight", "Weight gradient"),
}
PARTS = {
    "compute": "Computation",
    "tensor parallel": "Tensor-parallel collectives",
    "sharded weights": "Waiting for sharded weights",
    "pipeline messages": "Waiting for pipeline messages",
    "pipeline bubble": "Pipeline bubble, with waiting for slower ranks",
    "gradient reduction": "Gradient reduction that is not hidden",
    "optimizer": "Optimizer",
    "context parallel": "Gathers of context parallelism",
    "expert exchange": "Exchange of experts' tokens",
    "shared links": "Collectives that share links with reductions of gradients",
}
_MEMORY = ("weights", "gradients", "optimizer", "activations")


def chrome_trace(timeline: Timeline) -> str:
    """Return a timeline for ``chrome://tracing`` and Perfetto, in microseconds, with ranks as processes.

    Computation and messages are threads.
    """
    events: list[dict[str, Any]] = []
    for rank, actions in enumerate(timeline.schedule.actions):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pipeline rank {rank}"}})
        for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True):
            events.append(plans.event(str(action), _KINDS[action.kind][0], rank, 0, float(start), float(end - start)))
    for one in timeline.messages:
        name = f"{one.action} to rank {one.target}"
        events.append(plans.event(name, "message", one.source, 1 + one.target, one.start, one.arrival - one.start))
    return plans.trace(events)


def timeline_svg(timeline: Timeline, until: float | None = None) -> Markup:
    """Draw a ``timeline`` to scale: a row for each rank with its actions by kind, and the messages below it.

    With ``until``, the drawing ends after ``until`` seconds and shows the numbers of microbatches.
    """
    ranks = timeline.schedule.ranks

    def spans(rank: int) -> Iterator[Span]:
        actions = timeline.schedule.actions[rank]
        for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True):
            yield Span(float(start), float(end), _KINDS[action.kind][0], number=str(action.microbatch))
        for one in timeline.messages:
            if one.source == rank:
                yield Span(one.start, one.arrival, "message", is_thin=True)

    label = "The beginning of a step, enlarged" if until else "What every pipeline rank does in a step"
    rows = [(f"rank {rank}", spans(rank)) for rank in range(ranks)]
    height = max(12.0, min(30.0, 420.0 / ranks))
    return gantt(label, rows, until or timeline.seconds or 1.0, height, numbered=until is not None)


def _kinds(timeline: Timeline) -> list[tuple[str, str]]:
    """Return the styles and names of what a timeline shows."""
    found = {_KINDS[action.kind][0] for actions in timeline.schedule.actions for action in actions}
    messages = [("message", "Message on its way")] if timeline.messages else []
    return [(style, name) for style, name in dict(_KINDS.values()).items() if style in found] + messages


def _beginning(timeline: Timeline) -> float | None:
    """Return the seconds up to which actions are wide enough to distinguish; None if all are."""
    readable = 48
    ends = [float(ends[readable - 1]) for ends in timeline.ends if len(ends) > readable]
    return min(ends, default=None)


def reasons(best: Plan, base: Plan) -> list[str]:
    """Explain why the plan ``best`` is faster than ``base``, with the largest difference first."""
    if best is base:
        return ["It is the production-like plan itself: nothing that was searched is faster."]
    found = plans.differences(PARTS, best, base)
    if best.across != base.across:
        found.append(f"What crosses the outermost links: {best.across} instead of {base.across}.")
    return found


def measured(explorer: Explorer, plan: Plan) -> str:
    """Describe in a sentence how much of a ``plan`` rests on products that its ``explorer`` measured; empty if none."""
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

    The arguments ``explorer``, ``found``, ``base`` and ``cases`` are those of :func:`page`.
    """
    return {
        **plans.content(explorer, found, base),
        "products": _products(explorer, {"best": found.best, "production": base}),
        "estimated": found.estimated,
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
    best, capacity = found.best, min(one.device.memory_bytes for one in explorer.costs.values())
    timeline, beginning = best.step.timeline, _beginning(best.step.timeline)
    enlarged = timeline_svg(timeline, beginning) if beginning is not None else ""
    memory = [(f"rank {rank}", parts) for rank, parts in enumerate(best.step.memory)]
    whose = "the smallest device's" if len(explorer.costs) > 1 else "the device's"
    limit = (f"{capacity / 1e9:g} GB, {whose} memory", capacity)
    return plans.fill(
        "language_plan",
        *(explorer, found, base, compared, PARTS, changes),
        tokens_per_s=explorer.workload.batch * explorer.workload.sequence / best.seconds,
        reasons=reasons(best, base),
        kinds=_kinds(timeline),
        timeline=timeline_svg(timeline),
        enlarged=enlarged,
        has_numbers='class="number"' in enlarged,
        memory=bars("Memory by rank", memory, {name: name for name in _MEMORY}, plans.gigabytes, limit),
        held=plans.colours({name: name.capitalize() for name in _MEMORY}, best.step.memory),
        cases=cases,
        measured=measured(explorer, best),
    )
