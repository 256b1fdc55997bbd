"""``cordillera watch``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cordillera.cli._show import AsJson, CommandOutput, Field, Samples, Sheet

if TYPE_CHECKING:
    from cordillera.numerics.inference.drift import Alarm


def watch(
    run: Annotated[Path, typer.Argument(help="A run of a ranking model.")],
    file: Samples,
    false_alarms: Annotated[
        float, typer.Option(min=1e-12, max=0.5, help="Probability of an alarm where nothing has changed.")
    ] = 1e-3,
    as_json: AsJson = False,
) -> None:
    """Check whether samples have drifted away from a run's validation samples.

    The exit status is 1 if they have.
    """
    from cordillera.workflows.drift import watch as work

    with CommandOutput(as_json) as answer:
        found = work(run, file, false_alarms=false_alarms)
        if found.alarms or as_json:
            answer.tables(alarms=_table(found.alarms))
        if found.lacks is not None:
            answer.say(f"the file has no column {found.lacks!r}: samples of one group count as independent")
        again = ", and quantise that run" if (run / "quantized").is_dir() else ""
        answer.say(
            f"{found.samples:,} samples, {found.watched} numbers and shares watched by {found.checks:,} checks: "
            + (
                f"{len(found.alarms)} moved\n  -> first check that the file has the columns and units of the training "
                f"data; if it has, train on recent data, with training.start = '{run}'{again}"
                if found.alarms
                else "no alarm"
            ),
            samples=found.samples,
            watched=found.watched,
            checks=found.checks,
            lacks=found.lacks,
        )
        if found.alarms:
            raise typer.Exit(1)


def _table(alarms: list[Alarm]) -> Sheet:
    """Return a table of the numbers and shares that have moved."""
    table = Sheet(
        "alarm: moved",
        Field("name", ""),
        Field("check"),
        Field("calibration", "before", form="{:.4g}", right=False),
        Field("now", form="{:.4g}", right=False),
        Field("p", form=lambda p: f"{p:.1g}" if p > 1e-99 else "< 1e-99", right=False),
    )
    for one in alarms:
        table.add(one.name, one.check, one.before, one.now, one.probability)
    return table
