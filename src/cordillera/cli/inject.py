"""``cordillera inject``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import AsJson, Quiet


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
    from cordillera.cli._show import console, injection_progress, injection_table, print_json
    from cordillera.numerics.faults.fault_model import FaultModel
    from cordillera.workflows.injection import InjectionConfig, inject

    config = InjectionConfig(
        injections, half_width, FaultModel(bits, burst), tuple(component or ()), seed, samples, threshold
    )
    out = console()
    notes = console(stderr=True) if as_json else out
    with injection_progress(notes, quiet=quiet) as (on_round, say):
        outcome = inject(run, config, on_round=on_round, say=say)
    if as_json:
        print_json({**outcome.content, "report": outcome.files[1]})
    else:
        out.print(injection_table(outcome.content))
        for line in outcome.content["advice"]:
            out.print(f"- {line}")
    if outcome.interrupted:
        # the exit code is for scripts, the text for readers
        notes.print("interrupted: this is what was found so far, with wider intervals", style="bold")
    if not as_json:
        out.print(f"report: {outcome.files[1]}")
    if outcome.interrupted:
        raise typer.Exit(130)
