"""``cordillera train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def train(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, a TOML file, or a run folder with --resume.")],
    run: Annotated[Path | None, typer.Option("--run", help="The run's folder. Default: runs/NAME.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override one key: section.key=value.")] = None,
    seed: Annotated[int | None, typer.Option(help="Override the recipe's seed.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
) -> None:
    """Train a recipe, evaluate it on its test split and write the report."""
    from cordillera import workflows
    from cordillera.cli._show import console, evaluation_table, training_progress
    from cordillera.recipe import load
    from cordillera.run import Run, RunError

    overrides = list(set_ or []) + ([f"seed={seed}"] if seed is not None else [])
    what: Any
    if resume:
        if overrides:
            raise RunError("a resumed run keeps its recipe", where="--set", remedy="start a new run to change it")
        what = Run(run or recipe)
    else:
        if (Path(recipe) / "recipe.toml").is_file() and run is None:
            raise RunError(
                "is a run folder", where=recipe, remedy=f"continue it with `cordillera train {recipe} --resume`"
            )
        what = load(recipe, overrides)
    out = console()
    with training_progress(out, quiet=quiet) as (watch, say):
        outcome = workflows.train(what, run, watch=watch, say=say)
    folder = outcome.run.folder
    if outcome.report.ended == "interrupted":
        out.print(f"interrupted at step {outcome.report.progress.step}; everything is saved")
        out.print(f"  -> continue with: cordillera train {folder} --resume", markup=False)
        raise typer.Exit(130)
    if outcome.evaluation is not None:
        out.print(evaluation_table(outcome.evaluation))
    steps = outcome.report.progress.step
    how = "stopped early" if outcome.report.ended == "early" else "finished"
    out.print(f"{how} after {steps:,} steps in {outcome.report.seconds:.1f} s")
    out.print(f"report: {folder / 'report.html'}", markup=False)
