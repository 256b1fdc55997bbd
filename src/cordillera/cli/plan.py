"""``cordillera plan``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from cordillera.cli._show import console, titled_table
from cordillera.errors import PlanError, printable

if TYPE_CHECKING:
    from cordillera.cost import ProductShape
    from cordillera.workflows.planning import Calibrated, Planned, PlannedRecommender


# Half of its lines are the command's options, which Typer reads from one signature.
def plan(
    workload: Annotated[str | None, typer.Argument(help="A shipped workload's name or a TOML file.")] = None,
    cluster: Annotated[
        list[str] | None, typer.Argument(help="Names of shipped clusters or TOML files; several are compared.")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="How many of the cluster's devices. Default: all.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Search placement, scheduling or network alone; repeat for two.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show the best of each dimension alone beside.")] = False,
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
            "--out", help="Folder of the files, with one in it for each of several clusters. Default: plans/..."
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List shipped workloads and clusters.")] = False,
) -> None:
    """Predict a training step on a cluster and plan it.

    The best plan is searched for: placement, schedule, network settings.

    Writes plan.json (mesh, schedule and settings; `cordillera train --plan` takes it), plan.html and trace.json.
    """
    from cordillera.topology import check_writable
    from cordillera.workflows import planning as commands

    if list_:
        _list(commands.shipped())
        return
    options = {
        "--devices": devices, "--only": only, "--compare": compare or None, "--what-if": what_if, "--slow": slow,
        "--jitter": jitter, "--lose": lose, "--calibration": calibration, "--products": products,
    }  # fmt: skip
    if calibrate is not None:
        if cluster or workload is None:
            raise PlanError("needs the cluster alone", where="plan --calibrate", remedy="plan --calibrate FILE CLUSTER")
        _refuse({**options, "--set": set_, "--measure": measure}, "--calibrate")
        _calibrate(commands.calibrate(calibrate, workload, folder or Path("plans") / Path(workload).stem))
        return
    if workload is None or not cluster:
        raise PlanError("needs a workload and a cluster", where="plan", remedy="plan --list names those that ship")
    unknown = sorted(set(only or ()) - {"placement", "scheduling", "network"})
    if unknown:
        raise PlanError(f"{unknown[0]!r} is not searched", where="--only", remedy="placement, scheduling or network")
    if measure is not None:
        _refuse({**options, "--out": folder}, "--measure")
        check_writable(measure)
        if len(cluster) > 1:
            raise PlanError("is for one cluster", where="plan --measure", remedy="name the one with this device")
        _measure(commands.products_needed(workload, cluster[0], set_ or ()), measure)
        return
    search = partial(
        commands.plan,
        workload,
        devices=devices,
        only=only or ("placement", "scheduling", "network"),  # type: ignore[arg-type]
        changes=set_ or (),
        what_if=what_if or (),
        slow=slow,
        jitter=jitter,
        lose=lose or (),
        calibration=calibration,
        products=products,
        compare=compare,
    )
    if len(cluster) > 1:
        _compare(workload, cluster, folder, search)
        return
    place = folder or _default_folder(workload, cluster[0])
    with console(stderr=True).status("searching") as status:
        planned = search(cluster[0], place, progress=status.update)
    _show(planned)


def _default_folder(workload: str, cluster: str) -> Path:
    return Path("plans") / f"{Path(workload).stem}-{Path(cluster).stem}"


def _compare(workload: str, clusters: Sequence[str], folder: Path | None, search: Callable[..., Any]) -> None:
    """Plan for several clusters and print the best plan of each, or why there is none."""
    from cordillera import topology

    names = [Path(cluster).stem for cluster in clusters]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PlanError("is named twice", where=f"cluster {twice!r}", remedy="name each cluster once")
    for cluster in clusters:
        topology.load(cluster)  # an unknown one is refused before the first search
    headings = ("devices", "step", "a second", "GB")
    table = titled_table(f"{Path(workload).stem} on {len(clusters)} clusters", "cluster", "layout", right=headings)
    found: list[Planned | PlannedRecommender] = []
    problems: list[tuple[str, PlanError]] = []
    with console(stderr=True).status("searching") as status:
        for name, cluster in zip(names, clusters, strict=True):
            place = folder / name if folder else _default_folder(workload, cluster)
            try:
                found.append(search(cluster, place, progress=lambda text, name=name: status.update(f"{name}: {text}")))
            except PlanError as error:
                problems.append((name, error))
                table.add_row(name, "none", "", "", "", "")
                continue
            table.add_row(name, *_best(found[-1]))
            if found[-1].found.interrupted:
                break
    if not found:
        raise problems[0][1]
    out = console()
    out.print(table)
    if found[-1].found.interrupted:
        out.print("interrupted: the last plan is the best until then, and the clusters after it were left out")
    for name, problem in problems:
        out.print(f"{name}: {problem.what}", markup=False)
    for one in found:
        out.print(f"report: {printable(one.files['plan.html'])}", markup=False)


def _best(planned: Planned | PlannedRecommender) -> tuple[str, ...]:
    """Return layout, devices, step time, what is trained in a second, and memory of the best plan."""
    from cordillera.workflows.planning import PlannedRecommender

    best, work = planned.found.best, planned.explorer.workload
    if isinstance(planned, PlannedRecommender):
        speed = f"{planned.found.best.samples_per_s / 1e6:.2f} M samples"
    else:
        speed = f"{work.batch * planned.explorer.workload.sequence / best.seconds / 1e6:.2f} M tokens"
    seconds = f"{best.seconds:.3f} s" if best.seconds >= 1 else f"{best.seconds * 1e3:.2f} ms"
    return str(best.layout), f"{planned.explorer.devices:,}", seconds, speed, f"{best.step.memory_bytes / 1e9:.0f}"


def _refuse(options: Mapping[str, object], task: str) -> None:
    """Refuse options that have no effect on a task."""
    for name, value in options.items():
        if value is not None:
            raise PlanError(f"has no effect with {task}", where=name, remedy="leave it out")


def _list(shipped: Mapping[str, Mapping[str, str]]) -> None:
    for kind, names in shipped.items():
        table = titled_table(kind, "name", "what")
        for name, text in names.items():
            table.add_row(name, text)
        console().print(table)


def _show(planned: Planned | PlannedRecommender) -> None:
    from cordillera.planning.language.plan_file import is_llama
    from cordillera.reports.language import plan as export
    from cordillera.reports.ranking import plan as recommender_export
    from cordillera.workflows.planning import Planned, PlannedRecommender

    title = f"{planned.explorer.workload.name} on {planned.explorer.topology.name}"
    if isinstance(planned, PlannedRecommender):
        reasons = recommender_export.reasons(planned.found.best, planned.production)
        counted = f"{planned.found.layouts:,} layouts"
        table = _list_tables(title, planned)
    else:
        reasons = export.reasons(planned.found.best, planned.production)
        counted = f"{planned.found.estimated:,} layouts estimated"
        table = _list_layouts(title, planned)
    found, base, best = planned.found, planned.production, planned.found.best
    out = console()
    out.print(table)
    if found.interrupted:
        out.print("interrupted: this is the best until then")
    out.print(f"{base.seconds / best.seconds:.2f} times the production-like plan (base), both simulated, because of")
    for reason in reasons:
        out.print(f"  {reason}", markup=False)
    for case in planned.what_if:
        shown = f"{case.seconds:.3f} s" if case.seconds >= 1 else f"{case.seconds * 1e3:.2f} ms"
        speed = f"with {case.what}: {shown} ({case.speed(best.seconds):+.2%})"
        out.print(f"{speed} {case.note}".rstrip(), markup=False)
    out.print(f"{counted}, {found.simulated:,} steps simulated in {found.seconds:.1f} s")
    out.print(f"constants: {planned.explorer.cost.calibration.provenance}", markup=False)
    if isinstance(planned, Planned) and (used := export.measured(planned.explorer, planned.found.best)):
        out.print(used, markup=False)
    out.print(f"report: {printable(planned.files['plan.html'])}", markup=False)
    if isinstance(planned, Planned) and is_llama(planned.explorer.workload.model):
        out.print(f"train by it: cordillera train RECIPE --plan {printable(planned.files['plan.json'])}", markup=False)


def _list_layouts(title: str, planned: Planned) -> Table:
    columns = (Column(justify="right"), "layout", "recompute", "across", "schedule")
    table = titled_table(title, *columns, right=("step", "MFU", "GB"))
    for place, one in [*zip("12345", planned.found.plans, strict=False), ("base", planned.production)]:
        table.add_row(
            place,
            str(one.layout),
            one.layout.recompute,
            one.across,
            one.schedule.name,
            f"{one.seconds:.3f} s",
            f"{one.utilisation:.1%}",
            f"{one.step.memory_bytes / 1e9:.0f}",
        )
    return table


def _list_tables(title: str, planned: PlannedRecommender) -> Table:
    table = titled_table(title, Column(justify="right"), "layout", "schedule", right=("step", "samples/s", "GB"))
    table.caption, table.caption_justify = f"tables of the best plan: {planned.found.best.cut}", "left"
    for place, one in [*zip("12345", planned.found.plans, strict=False), ("base", planned.production)]:
        table.add_row(
            place,
            str(one.layout),
            str(one.schedule),
            f"{one.seconds * 1e3:.2f} ms",
            f"{one.samples_per_s / 1e6:.2f} M",
            f"{one.step.memory_bytes / 1e9:.0f}",
        )
    return table


def _calibrate(fitted: Calibrated) -> None:
    out, quality = console(), fitted.accuracy
    headings = ("mean error", "rank correlation", "regret of the pick")
    table = titled_table(f"{quality.rows} measured steps", "model", right=headings)
    for name in quality.error_by_model:
        table.add_row(
            name,
            f"{quality.error_by_model[name]:.2%}",
            f"{quality.tau_by_model[name]:.3f}",
            f"{quality.regret_by_model[name]:.3f}",
        )
    table.add_row("all", f"{quality.error:.2%}", f"{quality.tau:.3f}", f"{quality.regret:.3f}")
    out.print(table)
    worst = sorted(fitted.rows, key=lambda row: -abs(row[1] / row[0].seconds - 1))[:5]
    out.print("furthest off:")
    for row, seconds in worst:
        off = seconds / row.seconds - 1
        times = f"{row.seconds:.3f} s measured, {seconds:.3f} s predicted ({off:+.1%})"
        out.print(f"  {row.model} {row.layout}: {times}", markup=False)
    names = ("matrix", "memory", "port", "network", "collective_s")
    out.print("constants: " + ", ".join(f"{name} {getattr(fitted.constants, name):.4g}" for name in names))
    out.print(f"written to {printable(fitted.file)}; use it with --calibration", markup=False)


def _measure(shapes: Sequence[ProductShape], path: Path) -> None:
    from cordillera.kernels.products import measure_table

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=len(shapes))

        def on_product(shape: ProductShape, done: int, total: int) -> None:
            rows, columns, inner, count = shape
            bar.update(
                task, completed=done, total=total, description=f"{count} x [{rows}, {inner}] x [{inner}, {columns}]"
            )

        measured = measure_table(shapes, path, on_product=on_product)
    out = console()
    if measured.products is not None:
        out.print(f"{measured.products}, {measured.new:,} of them now", markup=False)
    if measured.too_large:
        out.print(f"{measured.too_large:,} more do not fit this device's memory and are left to the formula")
    if measured.left:
        out.print(f"interrupted, {measured.left:,} more are to be measured: give the same command again to go on")
        raise typer.Exit(130)
    out.print(f"use it with --products {printable(path)}", markup=False)
