"""``cordillera isoflop``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import AsJson, CommandOutput
from cordillera.files import at_home


def isoflop(
    recipe: Annotated[str, typer.Argument(help="A shipped language recipe's name or a TOML file.")],
    budget: Annotated[
        list[float],
        typer.Option("--budget", help="Training FLOPs of each run of one curve, like 1e13. Give three or more."),
    ],
    sizes: Annotated[int, typer.Option(min=4, help="Model sizes for each budget.")] = 6,
    tokens_per_parameter: Annotated[
        float, typer.Option(help="Where the optimum is expected; a first study says better.")
    ] = 20.0,
    target: Annotated[
        float | None, typer.Option(help="FLOPs of a budget to foretell the best split of, like 3.8e25.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override one key for all runs.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--run", help="Folder of the study. Default: runs/NAME-isoflop.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best size of a language model for a budget.

    It is trained in several sizes for each budget of FLOPs; the best split into parameters and tokens is fitted.

    A study that was stopped goes on where it was; budgets may be added later. isoflop.html in its folder shows it.
    """
    from cordillera import workflows
    from cordillera.cli._show import interruptions_told, training_progress
    from cordillera.distributed.job.slurm import adopt_slurm
    from cordillera.workflows.scaling import ISOFLOP_PAGE

    adopt_slurm()
    with CommandOutput(as_json) as answer:
        with interruptions_told(), training_progress(answer.notes) as (on_step, say):
            result = workflows.isoflop(
                recipe,
                budget,
                sizes=sizes,
                tokens_per_parameter=tokens_per_parameter,
                target=target,
                overrides=set_ or [],
                folder=folder and at_home(folder),
                on_step=on_step,
                say=say,
            )
        answer.say(result.study.to_table(), **json.loads(result.study.to_json()))
        answer.say(result.study.summary)
        answer.say(f"plot: {result.plot}", plot=result.plot)
        report = result.folder / ISOFLOP_PAGE
        answer.say(f"report: {report}", report=report)
