"""``cordillera chaos``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cordillera.distributed.fault_tolerance.chaos.injector import InjectedFault
    from cordillera.distributed.fault_tolerance.chaos.plan import FaultPlan


def chaos(
    run: Annotated[Path, typer.Argument(help="The folder of a run that replicas train now, on this machine.")],
    plan: Annotated[
        Path | None, typer.Option("--plan", help="A TOML file that lists faults, or says how to draw them.")
    ] = None,
    kill: Annotated[
        list[str] | None, typer.Option("--kill", help="Kill a process of a replica (r1), or `coordinator`; repeat it.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Stop one for --seconds, then let it go on; repeat it.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="How long --stop lasts. Default: 5.")] = None,
    at_step: Annotated[
        int | None, typer.Option("--at-step", min=0, help="Step after which --kill and --stop come. Default: at once.")
    ] = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the job to begin.")] = 0.0,
    stay: Annotated[bool, typer.Option("--stay", help="After the last fault, wait until the job ends.")] = False,
) -> None:
    """Inject faults into a job of replicas while it trains.

    Each is printed as it happens.

    Processes are killed, stopped and slowed down, their connections cut and their disk full, and bits of checkpoints
    flipped. What was stopped goes on when the command ends. Everything is written to RUN/replicas/chaos.jsonl.
    """
    from cordillera.cli._show import console, refuse
    from cordillera.distributed.fault_tolerance.chaos.injector import FaultInjector
    from cordillera.distributed.fault_tolerance.chaos.plan import drawn, read_fault_plan
    from cordillera.distributed.fault_tolerance.chaos.running_job import find_job
    from cordillera.errors import Interrupted, PlanError

    if (plan is None) == (not kill and not stop):
        raise PlanError("needs either a plan, or --kill and --stop", where="--plan")
    if plan is not None:
        refuse({"--seconds": seconds, "--at-step": at_step}, "--plan: the plan says when, and for how long")
    elif not stop:
        refuse({"--seconds": seconds}, "--kill alone")
    what = (
        _short(kill or (), stop or (), 5.0 if seconds is None else seconds, at_step)
        if plan is None
        else read_fault_plan(plan)
    )
    out, done = console(), 0
    job = find_job(run, wait)
    faults = drawn(what, job.replicas, job.ranks)

    def tell(one: InjectedFault) -> None:
        nonlocal done
        done += 1
        out.print(_line(one))

    try:
        left = FaultInjector(job, faults, tell).inject(stay=stay)
    except KeyboardInterrupt:
        raise Interrupted(f"{done} of {len(faults)} faults were done; what was stopped goes on") from None
    if job.is_over:
        status = job.run.status()
        how = "ended" if status is None or status.ended is None else status.ended
        out.print(f"the job is over: {how} at step {job.step:,}")
    out.print(f"{done} of {len(faults)} faults were done")
    for fault in left:
        when = f"step {fault.at_step:,}" if fault.at_step is not None else f"{fault.after_s:.1f} s"
        out.print(f"not done: {fault.what} {fault.target}, due after {when}")


def _short(kill: Sequence[str], stop: Sequence[str], seconds: float, at_step: int | None) -> FaultPlan:
    """Return the plan of the options."""
    from pydantic import ValidationError

    from cordillera.distributed.fault_tolerance.chaos.plan import Fault, FaultPlan
    from cordillera.errors import PlanError

    try:
        found = [
            Fault(what="kill-coordinator", at_step=at_step)
            if name == "coordinator"
            else Fault(what="kill", replica=name, at_step=at_step)
            for name in kill
        ]
        found += [
            Fault(what="pause-coordinator", at_step=at_step, seconds=seconds)
            if name == "coordinator"
            else Fault(what="stop", replica=name, at_step=at_step, seconds=seconds)
            for name in stop
        ]
    except ValidationError as error:
        raise PlanError(f"{seconds:g} s is not a time between 0 and a day", where="--seconds") from error
    return FaultPlan(fault=tuple(found))


def _line(one: InjectedFault) -> str:
    """Return what happened, in one line."""
    fault = one.fault
    lasts = "" if fault.seconds is None else f" for {fault.seconds:.1f} s"
    if fault.factor is not None:
        lasts = f" {fault.factor:g} times{lasts}"
    where = f" (process {one.process})" if one.process is not None else ""
    if "connections" in one.details:
        where = f" (process {one.process}, {one.details['connections']} connections)"
    if "file" in one.details:
        where = f" ({one.details['file']}, byte {one.details['offset']:,}, bit {one.details['bit']})"
    return f"{one.at:7.1f} s  step {one.step:<6,} {fault.what} {fault.target}{lasts}{where}"
