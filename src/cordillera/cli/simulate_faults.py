"""``cordillera simulate-faults``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cordillera.cli._show import AsJson, titled_table

if TYPE_CHECKING:
    from rich.table import Table

    from cordillera.reports.faults import FaultStudyRow


_SHORTEST_S = 1.0  # shortest simulated step, as the run time grows with the number of steps


def _above_zero(value: float | None) -> float | None:
    """Refuse a value that is not a number above 0."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g} is no number above 0.")
    return value


# Half of its lines are the command's options, which Typer reads from one signature.
def simulate_faults(
    devices: Annotated[
        list[int] | None, typer.Option("--devices", min=1, help="Size of the cluster; repeat it. Default: 98304.")
    ] = None,
    replicas: Annotated[
        list[int] | None,
        typer.Option("--replicas", min=1, help="Replicas that it is divided into; repeat it. Default: 12."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Take devices, replicas and the step from a plan.json of `cordillera plan`."),
    ] = None,
    between: Annotated[
        float, typer.Option(callback=_above_zero, help="Minutes between failures of 98,304 devices.")
    ] = 18.0,
    step: Annotated[float | None, typer.Option(callback=_above_zero, help="Seconds of a step. Default: 20.")] = None,
    detect: Annotated[float, typer.Option(min=0, help="Seconds until the others notice a failure.")] = 0.5,
    resume: Annotated[float, typer.Option(min=0, help="Seconds from there to their next step.")] = 0.5,
    repair: Annotated[
        float, typer.Option(min=0, help="Seconds until a failed replica, or a stopped job, is back.")
    ] = 600.0,
    rejoin: Annotated[float, typer.Option(min=0, help="Seconds for which all wait when a replica is back.")] = 0.0,
    consensus: Annotated[
        float, typer.Option(min=0, help="Seconds of agreement before each step, not overlapped.")
    ] = 0.0,
    save: Annotated[
        float, typer.Option(min=0, help="Seconds for which a checkpoint stops a job that restarts; 0: nothing is lost.")
    ] = 0.0,
    together: Annotated[
        float, typer.Option(min=0, max=1, help="Probability that a failure takes a second replica.")
    ] = 0.0,
    queue: Annotated[
        bool, typer.Option("--queue", help="Recoveries that overlap follow each other, as published formulas assume.")
    ] = False,
    days: Annotated[float, typer.Option(callback=_above_zero, help="Simulated days of a run.")] = 30.0,
    runs: Annotated[int, typer.Option(min=2, help="Runs, each with other failures.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the failures.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the rates over cluster sizes into this .png or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate what failures cost a large job.

    The job restarts, has replicas that go on, or decoupled learners.

    Replicas agree on their steps by the coordinator's rules, on a virtual clock. Everything printed is simulated.
    """
    from cordillera.cli._show import check_plot, console, print_json, work_shown
    from cordillera.distributed.fault_tolerance.simulator import FaultyJob
    from cordillera.errors import PlanError
    from cordillera.reports.faults import plot_fault_study
    from cordillera.workflows.scaling import planned_job, study_faults

    planned = None if plan is None else planned_job(plan)
    if planned is not None:
        for total, parts in itertools.product(devices or [planned.devices], replicas or ()):
            if total % parts:
                what = f"{total:,} devices cannot be divided into {parts:,} replicas"
                raise PlanError(what, where="--replicas", remedy="give numbers that divide the devices")
    if step is None:
        step = 20.0 if planned is None else planned.step_s
    grouped = max(1, math.ceil(_SHORTEST_S / step))  # steps that are simulated as one
    job = FaultyJob(
        between_s=60 * between, step_s=grouped * step, detect_s=detect, resume_s=resume, repair_s=repair,
        rejoin_s=rejoin, consensus_s=grouped * consensus, save_s=save, together=together, queue=queue,
        merge_steps=max(1, round(FaultyJob.merge_steps / grouped)),
    )  # fmt: skip
    check_plot(plot)
    out = console()
    with work_shown("simulating") as show:
        rows = study_faults(
            job,
            devices=devices or [98_304 if planned is None else planned.devices],
            replicas=replicas or [12 if planned is None else planned.replicas],
            days=days,
            runs=runs,
            seed=seed,
            on_row=lambda row: show(f"simulated: {row.devices:,} devices, {row.job.policy}"),
        )
    if as_json:
        print_json(rows)
    else:
        out.print(_table(rows, runs, days, None if planned is None else step))
        if grouped > 1:
            out.print(f"{grouped} steps of {step:.3g} s are simulated as one, which a failure loses as a whole")
        for line in _chosen(rows):
            out.print(line)
        if not any(row.failures for row in rows):
            out.print("no failure happened in these runs: give more --days or --runs")
        if not save and any(row.job.policy == "restart" for row in rows):
            out.print("restart: it loses no step, as checkpoints take no time (--save 0)")
        out.print("formula: each failure costs a whole recovery; --queue simulates that, except for decoupled")
        if planned is not None:
            out.print(f"s a step: with its share of what failures cost; {step:.4g} without")
            if planned.replicas == 1 and not replicas:
                out.print("one replica: all copies of the plan hold shards of one another (--replicas divides them)")
    if plot is not None:
        plot_fault_study(rows, plot)
        if not as_json:
            out.print(f"plot: {plot}")


def _chosen(rows: Sequence[FaultStudyRow]) -> Iterator[str]:
    """Yield the number of replicas and the interval of checkpoints that lose least, by the size of the cluster."""
    for devices in dict.fromkeys(row.devices for row in rows):
        of_size = [row for row in rows if row.devices == devices]
        counts = [row for row in of_size if row.job.policy == "replicas"]
        best = max(counts, key=lambda row: row.effective.value)
        alike = [str(row.job.replicas) for row in counts if row.effective.high >= best.effective.low and row != best]
        if len(counts) > 1:
            others = f"; the difference to {', '.join(alike)} is within the noise" if alike else ""
            yield f"{devices:,} devices: {best.job.replicas} replicas lose least{others}"
        restart = next((row.job for row in of_size if row.job.policy == "restart" and row.job.save_s), None)
        if restart is not None:
            yield f"{devices:,} devices: a restart loses least with checkpoints every {restart.interval_s / 60:.1f} min"


def _table(rows: Sequence[FaultStudyRow], runs: int, days: float, step_s: float | None) -> Table:
    from rich.table import Column

    each = "1 day" if days == 1 else f"{days:g} days"
    title = f"% of the time (simulated, {runs} runs of {each}; 95 % intervals)"
    uses = [name for name in ("redone", "stalled", "absent", "saving") if any(row.shares[name] >= 5e-5 for row in rows)]
    charged = () if step_s is None else ("s a step",)
    shown = ("effective", "formula", *uses, *charged)
    table = titled_table(title, Column("devices", justify="right"), "policy", right=shown)
    for row in rows:
        interval = f"[{100 * row.effective.low:.1f}, {100 * row.effective.high:.1f}]"
        table.add_row(
            f"{row.devices:,}",
            row.job.policy if row.job.policy == "restart" else f"{row.job.policy}, {row.job.replicas}",
            f"{100 * row.effective.value:.1f} {interval}",
            f"{100 * row.formula:.1f}",
            *(f"{100 * row.shares[name]:.2f}" for name in uses),
            *(() if step_s is None else (f"{step_s / row.effective.value:.4g}",)),
        )
    return table
