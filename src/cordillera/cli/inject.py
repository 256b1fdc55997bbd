"""``cordillera inject``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def inject(
    run: Annotated[Path, typer.Argument(help="The folder of a ranking model's run.")],
    injections: Annotated[
        int | None,
        typer.Option(
            "--injections",
            "-n",
            min=1,
            help="Faults a component of float32; narrower numbers get fewer. Default: 8192, or what --half-width asks.",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that was found as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
) -> None:
    """Flip bits in a run's weights and report the damage.

    The report says which parts and bits are worth protecting.
    """
    from cordillera.cli._show import console, echo, injection_progress, injection_table
    from cordillera.files import read_json_object
    from cordillera.numerics.faults.fault_model import FaultModel
    from cordillera.workflows.injection import InjectionConfig, inject

    config = InjectionConfig(
        injections, half_width, FaultModel(bits, burst), tuple(component or ()), seed, samples, threshold
    )
    out = console()
    with injection_progress(out, quiet=quiet or as_json) as (on_round, say):
        outcome = inject(run, config, on_round=on_round, say=say)
    if as_json:
        echo(json.dumps(read_json_object(outcome.files[0])), json=True)
    else:
        out.print(injection_table(outcome.content))
        for line in outcome.content["advice"]:
            out.print(f"- {line}")
    if outcome.interrupted:
        # the exit code is for scripts, the text for readers
        out.print("interrupted: this is what was found so far, with wider intervals", style="bold")
    if not as_json:
        out.print(f"report: {outcome.files[1]}")
    if outcome.interrupted:
        raise typer.Exit(130)
