"""``cordillera inject``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cordillera.cli._show import AsJson, CommandOutput, Quiet, answering_progress, check_result, titled_table


def inject(
    run: Annotated[Path, typer.Argument(help="The folder of a ranking model's run.")],
    injections: Annotated[
        int | None,
        typer.Option(
            "--injections",
            "-n",
            min=1,
            help="Faults a component of float32, at least two a bit; narrower numbers get fewer. Default: 8192, or "
            "what --half-width asks.",
        ),
    ] = None,
    half_width: Annotated[
        float | None, typer.Option(help="End once every PVF is known to plus or minus this, for instance 0.001.")
    ] = None,
    bits: Annotated[int, typer.Option(min=1, help="Bits that one fault flips, all in one stored number.")] = 1,
    burst: Annotated[bool, typer.Option("--burst", help="These bits are neighbours.")] = False,
    component: Annotated[
        list[str] | None, typer.Option("--component", help="Only this part of the model; repeat it for several.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Rows of the test split that every fault is tried on.")] = 256,
    threshold: Annotated[float, typer.Option(help="The probability at which a score becomes a yes.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of the faults and the choice of samples.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Flip bits in a run's weights and report the damage.

    The report says which parts and bits are worth protecting.
    """
    from cordillera.numerics.faults.fault_model import FaultModel
    from cordillera.workflows.injection import InjectionConfig, inject
    from cordillera.workflows.processes import silent

    check_result(run, "injection.json")
    config = InjectionConfig(
        injections, half_width, FaultModel(bits, burst), tuple(component or ()), seed, samples, threshold
    )
    with CommandOutput(as_json) as answer:
        with answering_progress(answer.notes, quiet=quiet, what="faults a bit position") as on_round:
            outcome = inject(run, config, on_round=on_round, say=silent if quiet else answer.notes.print)
        answer.say(_table(outcome.content), **outcome.content)
        for line in outcome.content["advice"]:
            answer.say(f"- {line}")
        if outcome.interrupted:
            answer.notes.print("interrupted: this is what was found so far, with wider intervals", style="bold")
        answer.say(f"report: {outcome.files[1]}", report=outcome.files[1])
        if outcome.interrupted:
            raise typer.Exit(130)


def _table(content: dict[str, Any]) -> Table:
    """Return the PVF of every component, from the content of ``injection.json``."""
    title = f"{content['fault']['name']} faults on {content['samples']:,} samples of the {content['split']} split"
    table = titled_table(title, "component", right=("faults", "PVF", "95 % interval", "silent / NaN, inf"))
    for one in content["components"]:
        pvf, silent, detected = (one[kind]["value"] for kind in ("pvf", "silent", "detected"))
        low, high = one["pvf"]["low"], one["pvf"]["high"]
        table.add_row(
            one["name"],
            f"{one['injections']:,}",
            "undefined" if math.isnan(pvf) else f"{100 * pvf:.3g} %",
            "" if math.isnan(low) else f"{100 * low:.3g} to {100 * high:.3g} %",
            f"{100 * silent / pvf:.0f} % / {100 * detected / pvf:.0f} %" if pvf > 0 else "",
        )
    return table
