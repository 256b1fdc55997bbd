"""Plans of recommendation models for readers and programs: a page, JSON, and a Chrome trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from cordillera.numbers import shown
from cordillera.planning.language.what_if import Case
from cordillera.planning.ranking.exchange import CAUSES, STREAMS, Operation
from cordillera.planning.ranking.explorer import RecommenderExplorer, TableExploration, TablePlan
from cordillera.planning.sensitivity import Sensitivity
from cordillera.reports import plans
from cordillera.reports.charts import Span, bars, gantt, seconds_text

_MEMORY = ("tables", "optimizer", "buffers", "dense layers", "activations")
_ROWS = {"compute": "computes", "exchange": "exchanges", "reduce": "reduces"}


def chrome_trace(timeline: Sequence[Operation]) -> str:
    """Return a step for ``chrome://tracing`` and Perfetto, in microseconds, with streams as threads."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": name}} for i, name in enumerate(STREAMS)
    ]
    events += [
        plans.event(one.name, one.cause, 0, STREAMS.index(one.stream), one.start, one.seconds) for one in timeline
    ]
    return plans.trace(events)


def streams_svg(timeline: Sequence[Operation]) -> Markup:
    """Draw a step to scale: a row for each stream, coloured by cause."""
    styles = {cause: f"f{number}" for number, cause in enumerate(CAUSES)}
    rows = [
        (
            _ROWS[stream],
            [
                Span(one.start, one.end, styles[one.cause], f"{one.name}: {seconds_text(one.seconds)}")
                for one in timeline
                if one.stream == stream and one.seconds > 0
            ],
        )
        for stream in STREAMS
    ]
    return gantt("What every stream does in a step", rows, max(one.end for one in timeline))


def _shown(timeline: Sequence[Operation]) -> list[tuple[str, str]]:
    """Return the styles and names of the causes that a timeline shows."""
    found = {one.cause for one in timeline if one.seconds > 0}
    return [(f"f{number}", name) for number, (cause, name) in enumerate(CAUSES.items()) if cause in found]


def reasons(best: TablePlan, base: TablePlan) -> list[str]:
    """Explain why the plan ``best`` is faster than ``base``, with the largest difference first."""
    if best.seconds >= base.seconds:
        return ["Nothing that was searched is faster than the production-like plan."]
    found = plans.differences(CAUSES, best, base)
    outer = next((name for name in reversed(base.step.crossed) if base.step.crossed[name]), None)
    if outer is not None and best.step.crossed[outer] != base.step.crossed[outer]:
        sizes = [one.step.crossed[outer] / 1e9 for one in (base, best)]
        found.append(
            f"Exchanged between parts of a {outer}: {shown(sizes[0], 1)} GB a step to {shown(sizes[1], 1)} GB."
        )
    if best.layout.copies != base.layout.copies:
        found.append(f"Tables: {best.layout}; production-like: {base.layout}.")
    if best.schedule != base.schedule:
        found.append(f"Order of a step: {best.schedule}; production-like: {base.schedule}.")
    return found


def to_json(
    explorer: RecommenderExplorer, found: TableExploration, base: TablePlan, cases: Sequence[Case] = ()
) -> dict[str, Any]:
    """Return the content of ``plan.json``: the best plans, and the placement of every part of a table in the first.

    The arguments ``explorer``, ``found``, ``base`` and ``cases`` are those of :func:`page`.
    """
    return {
        **plans.content(explorer, found, base),
        "layouts": found.layouts,
        "placement": found.best.placement(),
        "what_if": [case.to_json() for case in cases],
    }


def page(
    explorer: RecommenderExplorer,
    found: TableExploration,
    base: TablePlan,
    compared: Mapping[str, TablePlan],
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
        cases: Changes of the cluster under which the best plan was simulated.
    """
    memory = [("production-like", base.step.memory)]
    memory += [(name, plan.step.memory) for name, plan in compared.items()]
    memory += [("this plan", found.best.step.memory)]
    return plans.fill(
        "ranking_plan",
        *(explorer, found, base, compared, CAUSES, changes),
        reasons=reasons(found.best, base),
        timeline=streams_svg(found.best.step.timeline),
        memory=bars("Memory by plan", memory, {name: name for name in _MEMORY}, plans.gigabytes),
        held=plans.colours({name: name.capitalize() for name in _MEMORY}, [parts for _, parts in memory]),
        shown=_shown(found.best.step.timeline),
        cases=cases,
    )
