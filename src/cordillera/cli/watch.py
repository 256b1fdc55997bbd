"""``cordillera watch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[Path, typer.Argument(help="A run with a quantised model.")],
    file: Annotated[Path, typer.Argument(help="Live samples: CSV, TSV or Parquet with the training data's columns.")],
    false_alarms: Annotated[
        float, typer.Option(min=1e-12, max=0.5, help="Probability of an alarm where nothing has changed.")
    ] = 1e-3,
) -> None:
    """Say whether a quantised model still sees what it was calibrated on; the exit status is 1 if it does not."""
    from rich.text import Text

    from cordillera.cli._show import console
    from cordillera.workflows.quantization import watch as work

    found = work(run, file, false_alarms=false_alarms)
    out = console()
    for alarm in found.alarms:
        out.print(Text("alarm", "bold red"), str(alarm))
    out.print(
        f"{found.samples:,} samples, {found.numbers} numbers watched: "
        + (f"{len(found.alarms)} moved; quantise the run anew on recent data" if found.alarms else "no alarm"),
    )
    if found.alarms:
        raise typer.Exit(1)
