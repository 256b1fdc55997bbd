"""``cordillera watch``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from cordillera.cli._show import console, titled_table
from cordillera.errors import printable

if TYPE_CHECKING:
    from cordillera.numerics.inference.drift import Alarm


def watch(
    run: Annotated[Path, typer.Argument(help="A run with a quantised model.")],
    file: Annotated[Path, typer.Argument(help="Live samples: CSV, TSV or Parquet with the training data's columns.")],
    false_alarms: Annotated[
        float, typer.Option(min=1e-12, max=0.5, help="Probability of an alarm where nothing has changed.")
    ] = 1e-3,
) -> None:
    """Check whether a quantised model's inputs have drifted.

    The exit status is 1 if they differ from those of its calibration.
    """
    from cordillera.workflows.drift import watch as work

    found = work(run, file, false_alarms=false_alarms)
    out = console()
    if found.alarms:
        out.print(_table(found.alarms))
    if found.lacks is not None:
        out.print(f"the file has no column {found.lacks!r}: samples of one group count as independent")
    out.print(
        f"{found.samples:,} samples, {found.watched} numbers and shares watched by {found.checks:,} checks: "
        + (f"{len(found.alarms)} moved; quantise the run anew on recent data" if found.alarms else "no alarm"),
    )
    if found.alarms:
        raise typer.Exit(1)


def _table(alarms: list[Alarm]) -> Table:
    """Return a table of the numbers and shares that have moved since calibration."""
    table = titled_table("alarm: moved since calibration", "", "check", "calibration", "now", "p")
    for one in alarms:
        chance = f"{one.probability:.1g}" if one.probability > 1e-99 else "< 1e-99"
        table.add_row(Text(printable(one.name)), one.check, f"{one.before:.4g}", f"{one.now:.4g}", chance)
    return table
