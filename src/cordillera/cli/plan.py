"""``cordillera plan``."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from cordillera.cli._show import AsJson, CommandOutput, Field, Sheet, console, refuse, work_shown
from cordillera.cli._terminal import ProgressLines
from cordillera.errors import PlanError
from cordillera.numbers import compact, counted, fixed, millions, shown

if TYPE_CHECKING:
    from cordillera.cost import ProductShape
    from cordillera.planning.language.plans import Plan
    from cordillera.reports.plan_comparison import ComparedPlan, TrainingBudget
    from cordillera.workflows.planning import Calibrated, PlanComparison, Planned, PlannedRecommender


# Half of its lines are the command's options, which Typer reads from one signature.
def plan(
    workload: Annotated[str | None, typer.Argument(help="A shipped workload's name or a TOML file.")] = None,
    cluster: Annotated[
        list[str] | None, typer.Argument(help="Names of shipped clusters or TOML files; several are compared.")
    ] = None,
    devices: Annotated[
        list[int] | None,
        typer.Option(min=1, help="How many of the cluster's devices; repeat to compare several. Default: all."),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(help="Tokens of the training, such as 15e12: days and device hours of each plan. Default: 1e12."),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of a device hour, in any currency: the cost of --tokens by each plan.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Search placement, scheduling or network alone; repeat for two.")
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            help="Evaluate a plan of your own instead of a search: tensor=8,pipeline=16,chunks=8; repeat for several.",
        ),
    ] = None,
    fp8: Annotated[
        str | None,
        typer.Option(
            "--fp8", help="Products in FP8: none, ffn (feed-forward nets) or linear. Default: what WORKLOAD says."
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Show the best of each dimension alone beside; with --layout, that of a search."
        ),
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change the cluster first: region.distance_km=100.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help="Simulate the best plan again with a change: region.bytes_per_s*=2."),
    ] = None,
    slow: Annotated[
        float | None,
        typer.Option("--slow", help="Simulate the best plan with one device that takes so many times as long."),
    ] = None,
    jitter: Annotated[
        float | None,
        typer.Option(
            "--jitter", help="Let latencies vary, on average longer by this part: median and p99 of the step."
        ),
    ] = None,
    lose: Annotated[
        list[str] | None,
        typer.Option("--lose", help="Plan again without a domain: building, or building:1 for the second."),
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="Constants that --calibrate wrote.")] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option("--calibrate", help="Fit constants to a CSV file of step times measured on CLUSTER instead."),
    ] = None,
    measure: Annotated[
        Path | None,
        typer.Option(
            "--measure",
            help="Measure matrix products that WORKLOAD needs on CLUSTER into a CSV file, on this machine, instead.",
        ),
    ] = None,
    products: Annotated[
        Path | None, typer.Option(help="Matrix products that --measure wrote on one of CLUSTER's devices.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder of the files, with one in it for each of several clusters. Default: plans/..."
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List shipped workloads and clusters.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict a training step on a cluster and plan it.

    The best plan is searched for: placement, schedule, network settings.

    Writes plan.json (mesh, schedule and settings; `cordillera train --plan` takes it), plan.html and trace.json.
    """
    from cordillera.files import check_writable
    from cordillera.workflows import planning as commands

    if list_:
        with CommandOutput(as_json) as answer:
            _list(answer, commands.shipped())
        return
    options = {
        "--devices": devices, "--only": only, "--compare": compare or None, "--what-if": what_if, "--slow": slow,
        "--jitter": jitter, "--lose": lose, "--calibration": calibration, "--products": products, "--layout": layout,
        "--fp8": fp8, "--tokens": tokens, "--price": price,
    }  # fmt: skip
    if calibrate is not None:
        if cluster or workload is None:
            raise PlanError("needs the cluster alone", where="plan --calibrate", remedy="plan --calibrate FILE CLUSTER")
        refuse({**options, "--set": set_, "--measure": measure}, "--calibrate")
        with CommandOutput(as_json) as answer:
            place = folder or Path("plans") / Path(workload).stem
            _calibrate(answer, commands.calibrate(calibrate, workload, place))
        return
    if workload is None or not cluster:
        raise PlanError("needs a workload and a cluster", where="plan", remedy="plan --list names those that ship")
    if layout and not compare:
        refuse({"--only": only}, "--layout alone")
    if measure is not None:
        refuse({**options, "--out": folder}, "--measure")
        check_writable(measure)
        if len(cluster) > 1:
            raise PlanError("is for one cluster", where="plan --measure", remedy="name the one with this device")
        with CommandOutput(as_json) as answer:
            _measure(answer, commands.products_needed(workload, cluster[0], set_ or ()), measure)
        return
    asked: dict[str, Any] = {
        "only": only or ("placement", "scheduling", "network"),
        "changes": set_ or (),
        "what_if": what_if or (),
        "slow": slow,
        "jitter": jitter,
        "lose": lose or (),
        "calibration": calibration,
        "products": products,
        "layouts": layout or (),
        "fp8": fp8,
        "compare": compare,
    }
    budget = _budget_of(workload, tokens, price)
    with CommandOutput(as_json) as answer:
        if len(cluster) > 1 or len(devices or ()) > 1:
            place = folder or Path("plans") / Path(workload).stem
            cases = [*product(cluster, [*devices] if devices else [None])]
            with work_shown("searching") as show:
                found = commands.compare(workload, cases, place, budget, progress=show, **asked)
            _show_several(answer, workload, found, budget, place, tokens is not None or price is not None)
            is_whole, fits = not found.interrupted, any(one.files for one in found.plans.values())
        else:
            place = folder or Path("plans") / f"{Path(workload).stem}-{Path(cluster[0]).stem}"
            with work_shown("searching") as show:
                planned = commands.plan(
                    workload, cluster[0], place, devices=devices[0] if devices else None, progress=show, **asked
                )
            _show(answer, planned, budget)
            is_whole, fits = not planned.found.interrupted, bool(planned.files)
        if not is_whole:
            raise typer.Exit(130)
        if not fits:
            raise typer.Exit(1)


def _budget_of(workload: str, tokens: float | None, price: float | None) -> TrainingBudget | None:
    """Return the training that plans of a ``workload`` are asked about; None for a recommendation model."""
    from cordillera.planning import workloads
    from cordillera.planning.ranking.workload import Recommender
    from cordillera.reports.plan_comparison import TrainingBudget

    asked = {"--tokens": tokens, "--price": price}
    for option, value in asked.items():
        if value is not None and not 0 < value < math.inf:
            raise PlanError(f"must be a number above 0, got {value:g}", where=option, remedy="write 15e12, or 2.5")
    if isinstance(workloads.load(workload), Recommender):
        refuse(asked, "a recommendation model")
        return None
    return TrainingBudget(1e12 if tokens is None else tokens, price)


def _show_several(
    answer: CommandOutput,
    workload: str,
    found: PlanComparison,
    budget: TrainingBudget | None,
    place: Path,
    with_days: bool,
) -> None:
    """Print the best plan for each cluster and number of devices, or why there is none, and write their page."""
    from cordillera.files import write
    from cordillera.reports.plan_comparison import plan_comparison_page
    from cordillera.workflows.planning import Planned

    table = _list_cases(Path(workload).stem, found.rows, budget, with_days)
    answer.tables(clusters=table)
    said = ["interrupted: what had not been searched by then is missing"] if found.interrupted else []
    if budget is not None and with_days:
        price = "" if budget.price is None else f", at a price of {budget.price:g} a device hour"
        said.append(f"days and device hours are those of {compact(budget.tokens)} tokens, without failures{price}")
    said += [str(found.problem(name)) for name in found.problems]
    for line in said:
        answer.say(line)
    for name, one in found.plans.items():
        if one.what_if or one.compared or (isinstance(one, Planned) and one.found.own):
            answer.say("" if name == one.explorer.topology.name else f"\n{name}:")
            with answer.within("plans", name):
                _show(answer, one, budget)
        elif one.files:
            answer.say(f"report: {one.files['plan.html']}")
    page = place / "comparison.html"
    cells = [str(one.header) for one in table.columns], [*zip(*(one.cells for one in table.columns), strict=True)]
    unit = "tokens" if budget else "samples"
    write({page: plan_comparison_page(Path(workload).stem, found.rows, unit, cells, said)})
    answer.say(f"comparison: {page}")
    answer.keep(
        interrupted=found.interrupted,
        budget=budget,
        problems={
            name: {"what": problem.what, "where": problem.where, "remedy": problem.remedy}
            for name, problem in found.problems.items()
        },
        reports=[one.files["plan.html"] for one in found.plans.values() if one.files],
        comparison=page,
    )


def _list_cases(title: str, rows: Sequence[ComparedPlan], budget: TrainingBudget | None, with_days: bool) -> Sheet:
    clusters, several = {row.cluster for row in rows}, len({row.cluster for row in rows}) < len(rows)
    table = Sheet(
        f"{title} on {len(clusters)} clusters" if len(clusters) > 1 else f"{title} on {rows[0].cluster}",
        Field("cluster", shown=len(clusters) > 1),
        Field("layout"),
        Field("devices", form="{:,}"),
        Field("seconds", "step", _seconds),
        _ERROR._replace(shown=any(row.error_s is not None for row in rows)),
        Field("tokens_per_s" if budget else "samples_per_s", "tokens/s" if budget else "samples/s", millions),
        Field("scaling", form="{:.0%}", shown=several),
        Field("days", form="{:,.1f}", shown=with_days),
        Field("device_hours", form="{:,.0f}", shown=with_days),
        Field("cost", form="{:,.0f}", shown=bool(budget and budget.price)),
        _MEMORY._replace(heading="GB a device"),
    )
    for row in rows:
        table.add(
            row.cluster, row.layout, row.devices, row.seconds, row.error_s, row.rate, row.scaling, row.days,
            row.device_hours, row.cost, row.memory_bytes,
        )  # fmt: skip
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{fixed(seconds * 1e3, 2)} ms"  # also differences; avoids -0.00


def _error(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2g} s" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"


_POOR = 0.15  # mean error of fitted constants
_MEMORY = Field("memory_bytes", "GB", lambda count: shown(count / 1e9, 0))
_ERROR = Field("error_s", "±", _error)


def _layout_fields(plans: Iterable[tuple[str, Plan]]) -> tuple[Field, ...]:
    """Return the fields of :func:`_row` after the name of each plan; errors are shown if one is known."""
    return (
        Field("place", "", right=True),
        *(Field(key) for key in ("layout", "recompute", "across", "schedule")),
        Field("seconds", "step", _seconds),
        _ERROR._replace(shown=any(plan.error is not None for _, plan in plans)),
        Field("mfu", "MFU", lambda part: f"{shown(100 * part, 1)} %"),
    )


def _list(answer: CommandOutput, shipped: Mapping[str, Mapping[str, str]]) -> None:
    for kind, names in shipped.items():
        table = Sheet(kind, Field("name"), Field("what"))
        for entry in names.items():
            table.add(*entry)
        answer.tables(**{kind: table})


def _show(answer: CommandOutput, planned: Planned | PlannedRecommender, budget: TrainingBudget | None) -> None:
    from cordillera.planning.language.plan_file import is_llama
    from cordillera.reports.language import plan as export
    from cordillera.reports.ranking import plan as recommender_export
    from cordillera.workflows.planning import Planned, PlannedRecommender

    title = f"{planned.explorer.workload.name} on {planned.explorer.topology.name}"
    if isinstance(planned, Planned) and planned.found.own:
        _show_own(answer, title, planned, budget)
        return
    if isinstance(planned, PlannedRecommender):
        reasons = recommender_export.reasons(planned.found.best, planned.production)
        layouts, searched = planned.found.layouts, counted(planned.found.layouts, "layout")
        table = _list_tables(title, planned)
        answer.keep(tables_of_best=planned.found.best.cut)
    else:
        reasons = export.reasons(planned.found.best, planned.production)
        layouts, searched = planned.found.estimated, f"{counted(planned.found.estimated, 'layout')} estimated"
        table = _list_layouts(title, planned)
    found, base, best = planned.found, planned.production, planned.found.best
    answer.tables(plans=table)
    if found.interrupted:
        answer.say("interrupted: this is the best until then")
    faster = base.seconds / best.seconds
    text = f"{faster:.2f} times as fast as the production-like plan (base), both simulated"
    answer.say(text + ":" * bool(reasons), times_base=faster)
    for reason in reasons:
        answer.say(f"  {reason}")
    if isinstance(planned, Planned):
        _say_error(answer, planned, planned.found.best, faster)
    _say_cases(answer, planned)
    answer.say(f"{searched}, {counted(found.simulated, 'step')} simulated in {found.seconds:.1f} s")
    if isinstance(planned, Planned):
        answer.say(f"base: {planned.explorer.base_source}", base_source=planned.explorer.base_source)
        answer.say(f"constants: {planned.explorer.constants}")
        _say_size(answer, planned, budget)
    else:
        fitted = planned.explorer.cost.calibration.provenance
        answer.say(f"constants: {fitted}; of language models, their error here is not known")
    if isinstance(planned, Planned) and (used := export.measured(planned.explorer, planned.found.best)):
        answer.say(used, measured=used)
    answer.say(f"report: {planned.files['plan.html']}")
    if (
        isinstance(planned, Planned)
        and is_llama(planned.explorer.workload.model)
        and planned.found.best.layout.fp8 == "none"
    ):
        answer.say(f"train by it: cordillera train RECIPE --plan {shlex.quote(str(planned.files['plan.json']))}")
    answer.keep(
        interrupted=found.interrupted,
        reasons=reasons,
        what_if=planned.what_if,
        layouts=layouts,
        simulated=found.simulated,
        search_seconds=found.seconds,
        constants=planned.explorer.cost.calibration.provenance,
        files=list(planned.files.values()),
    )


def _say_cases(answer: CommandOutput, planned: Planned | PlannedRecommender, which: str = "") -> None:
    for case in planned.what_if:
        speed = 100 * case.speed(planned.found.best.seconds)
        answer.say(f"{which}with {case.what}: {_seconds(case.seconds)} ({speed:+.2f} %) {case.note}".rstrip())


def _say_size(answer: CommandOutput, planned: Planned, budget: TrainingBudget | None) -> None:
    """Print the size of the model and its step, so that a user can check the workload."""
    work = planned.explorer.workload
    parameters, tokens, flops = work.model.parameters, work.batch * work.sequence, planned.production.flops
    answer.say(
        f"workload: {parameters / 1e9:,.2f} billion parameters, {tokens:,} tokens and {flops:.3g} FLOPs a step",
        parameters=parameters, tokens=tokens, flops=flops,
    )  # fmt: skip
    if planned.found.plans and budget is not None:
        rate = tokens / planned.found.best.seconds
        days, hours, cost = budget.spent(planned.explorer.devices, rate)
        price = "" if cost is None else f", which cost {cost:,.0f}"
        answer.say(
            f"{rate:,.0f} tokens/s; {compact(budget.tokens)} tokens take {days:,.1f} days without failures, "
            f"{hours:,.0f} device hours{price}",
            tokens_per_s=rate, budget=budget, days=days, device_hours=hours, cost=cost,
        )  # fmt: skip


def _say_error(answer: CommandOutput, planned: Planned, plan: Plan, faster: float) -> None:
    """Print the mean error of a plan's time, and whether its gain over the base is smaller than the error."""
    if plan.error is None:
        kinds = {
            "was in FP8": plan.layout.fp8 != "none",
            "had sharded weights": plan.layout.shard_weights,
            "had experts": planned.explorer.workload.model.experts is not None,
        }
        why = "".join([f": no measured step {kind}" for kind, is_so in kinds.items() if is_so][:1])
        answer.say(f"the error of {_seconds(plan.seconds)} is not known{why}", error=None)
        return
    text = f"{_seconds(plan.seconds)} is off by {_error(plan.error * plan.seconds)} on average, by the constants' error"
    if 0 < faster - 1 < plan.error:
        text += "; the gain is smaller, and real as far as both plans share their errors"
    answer.say(text, error=plan.error)


def _show_own(answer: CommandOutput, title: str, planned: Planned, budget: TrainingBudget | None) -> None:
    """Print a person's own layouts side by side, where their time goes, and what follows from the best of them."""
    from cordillera.planning.network.mesh import Mesh
    from cordillera.reports.language import plan as export
    from cordillera.workflows.planning import SEARCHED

    explorer, found, base = planned.explorer, planned.found, planned.production
    others = [(SEARCHED, planned.compared[SEARCHED])] if SEARCHED in planned.compared else []
    shown_plans = [*zip(map(str, range(1, len(found.own) + 1)), found.own, strict=True), *others, ("base", base)]
    fits = {place: explorer.fits(plan) for place, plan in shown_plans}
    word = Field("fits", "", lambda small: "" if small else "does not fit", right=False, shown=not all(fits.values()))
    more = Field("teraflops", shown=False), _MEMORY, word  # the text shows the MFU instead
    table = Sheet(title, *_layout_fields(shown_plans), *more)
    for place, plan in shown_plans:
        teraflops = plan.flops / plan.seconds / plan.layout.devices / 1e12
        table.add(place, *_row(plan), teraflops, plan.step.memory_bytes, fits[place])
    ends = "seconds of a step, on the pipeline rank that ends last"
    parts = Sheet(ends, Field("part"), *(Field(place, form=_seconds) for place, _ in shown_plans))
    for key, name in export.PARTS.items():
        if any(plan.step.parts.get(key) for _, plan in shown_plans):
            parts.add(name, *(plan.step.parts.get(key, 0.0) for _, plan in shown_plans))
    answer.tables(plans=table, parts=parts)
    for place, plan in shown_plans[: len(found.own)]:
        if not fits[place]:
            limits = explorer.limits(Mesh.of(explorer.topology, plan.layout, plan.order))
            answer.say(f"layout {place} does not fit: {_too_large(plan, limits)}")
        elif plan is found.best:
            faster = base.seconds / plan.seconds
            answer.say(f"layout {place}: {faster:.2f} times as fast as the base, both simulated", times_base=faster)
            _say_error(answer, planned, plan, faster)
    if found.interrupted:
        answer.say("interrupted: what had not been computed by then is missing")
    if planned.what_if and len(found.own) > 1:  # cases of the fastest layout that fits
        best = next(place for place, plan in shown_plans if plan is found.best)
        _say_cases(answer, planned, f"layout {best} ")
    else:
        _say_cases(answer, planned)
    answer.say(f"base: {explorer.base_source}")
    answer.say(f"constants: {explorer.constants}")
    _say_size(answer, planned, budget)
    if planned.files:
        answer.say(f"report: {planned.files['plan.html']}")
    answer.keep(
        interrupted=found.interrupted,
        what_if=planned.what_if,
        usable_memory_bytes=explorer.usable_memory,
        constants=explorer.cost.calibration.provenance,
        files=list(planned.files.values()),
    )


def _too_large(plan: Plan, limits: Sequence[float]) -> str:
    """Describe the memory use of the device that exceeds its limit most; ``limits`` are bytes by pipeline rank."""
    needed = [sum(rank.values()) for rank in plan.step.memory]
    rank = max(range(len(needed)), key=lambda one: needed[one] - limits[one])
    causes = sorted(plan.step.memory[rank].items(), key=lambda item: -item[1])
    words = ", ".join(f"{name} {shown(size / 1e9, 1)} GB" for name, size in causes)
    return (
        f"{needed[rank] / 1e9:,.1f} GB on a device of pipeline rank {rank}, "
        f"{limits[rank] / 1e9:,.1f} GB are usable ({words})"
    )


def _shown(planned: Planned | PlannedRecommender) -> list[tuple[str, Any]]:
    """Return the plans for a table: the best, the plans of smaller searches, and the base."""
    return [*zip("12345", planned.found.plans, strict=False), *planned.compared.items(), ("base", planned.production)]


def _list_layouts(title: str, planned: Planned) -> Sheet:
    table = Sheet(title, *_layout_fields(_shown(planned)), _MEMORY)
    for place, one in _shown(planned):
        table.add(place, *_row(one), one.step.memory_bytes)
    return table


def _row(plan: Plan) -> tuple[object, ...]:
    """Return the values of a plan for the fields after the first of :func:`_layout_fields`."""
    layout = plan.layout
    return str(layout), layout.recompute, plan.across, plan.schedule.name, plan.seconds, plan.error_s, plan.utilisation


def _list_tables(title: str, planned: PlannedRecommender) -> Sheet:
    table = Sheet(
        title,
        Field("place", "", right=True),
        Field("layout"),
        Field("schedule"),
        Field("seconds", "step", _seconds),
        Field("samples_per_s", "samples/s", millions),
        _MEMORY,
    )
    table.caption, table.caption_justify = f"tables of the best plan: {planned.found.best.cut}", "left"
    for place, one in _shown(planned):
        table.add(place, str(one.layout), str(one.schedule), one.seconds, one.samples_per_s, one.step.memory_bytes)
    return table


def _calibrate(answer: CommandOutput, fitted: Calibrated) -> None:
    quality = fitted.accuracy
    table = Sheet(
        f"{quality.rows} measured steps",
        Field("model"),
        Field("mean_error", form="{:.2%}"),
        Field("rank_correlation", form=partial(fixed, digits=3)),
        Field("regret", "regret of the pick", "{:.3f}"),
    )
    for name, error in quality.error_by_model.items():
        table.add(name, error, quality.tau_by_model[name], quality.regret_by_model[name])
    table.add("all", quality.error, quality.tau, quality.regret)
    answer.tables(models=table)
    worst = sorted(fitted.rows, key=lambda row: -abs(row[1] / row[0].seconds - 1))[:5]
    answer.say("furthest off:")
    for row, seconds in worst:
        off = seconds / row.seconds - 1
        times = f"{row.seconds:.3f} s measured, {seconds:.3f} s predicted ({100 * off:+.1f} %)"
        answer.say(f"  {row.model} {row.layout}: {times}")
    names = ("matrix", "memory", "port", "network", "collective_s")
    constants = {name: getattr(fitted.constants, name) for name in names}
    answer.say("constants: " + ", ".join(f"{name} {value:.4g}" for name, value in constants.items()))
    if quality.error > _POOR:
        answer.say("that is a large mean error: the steps may wait for what is not modelled, such as the host")
    answer.say(f"written to {fitted.file}; use it with --calibration")
    answer.keep(
        measured_steps=quality.rows,
        furthest_off=[
            {"model": row.model, "layout": str(row.layout), "measured_s": row.seconds, "predicted_s": seconds}
            for row, seconds in worst
        ],
        constants=constants,
        file=fitted.file,
    )


def _measure(answer: CommandOutput, shapes: Sequence[ProductShape], path: Path) -> None:
    from cordillera.kernels.products import measure_table

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ProgressLines(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=len(shapes))

        def on_product(shape: ProductShape, done: int, total: int) -> None:
            rows, columns, inner, count = shape
            bar.update(
                task, completed=done, total=total, description=f"{count} x [{rows}, {inner}] x [{inner}, {columns}]"
            )

        measured = measure_table(shapes, path, on_product=on_product)
    answer.keep(new=measured.new, too_large=measured.too_large, left=measured.left, file=path)
    if measured.products is not None:
        answer.say(f"{measured.products}, {measured.new:,} of them now", products=str(measured.products))
    if measured.too_large:
        answer.say(f"{measured.too_large:,} more do not fit this device's memory and are left to the formula")
    if measured.left:
        answer.say(f"interrupted, {measured.left:,} more are to be measured: give the same command again to go on")
        raise typer.Exit(130)
    answer.say(f"use it with --products {path}")
