"""``cordillera sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import AsJson, CommandOutput
from cordillera.files import at_home


def sweep(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name or a TOML file.")],
    size: Annotated[
        list[str],
        typer.Option(
            "--size", help="One size: 'model.layers=2 model.hidden=[64]'. Give one --size for each, smallest first."
        ),
    ],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override one key for all sizes.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each size.")] = 1,
    folder: Annotated[Path | None, typer.Option("--run", help="Folder of the sweep. Default: runs/NAME-sweep.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a recipe in several sizes and fit NE to FLOPs.

    A sweep that was stopped goes on where it was. sweep.html in its folder shows the runs and the law.
    """
    from cordillera import workflows
    from cordillera.cli._show import interruptions_told, training_progress
    from cordillera.distributed.job.slurm import adopt_slurm

    adopt_slurm()
    with CommandOutput(as_json) as answer:
        with interruptions_told(), training_progress(answer.notes) as (on_step, say):
            result = workflows.sweep(
                recipe,
                size,
                seeds=seeds,
                overrides=set_ or [],
                folder=folder and at_home(folder),
                on_step=on_step,
                say=say,
            )
        answer.say(result.study.to_table(), **vars(result.study))
        answer.say(result.study.summary, summary=result.study.summary)
        answer.say(f"plot: {result.plot}", plot=result.plot)
        answer.say(f"report: {result.report}", report=result.report)
