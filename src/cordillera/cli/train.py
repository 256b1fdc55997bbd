"""``cordillera train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cordillera.training.trainer import Progress as TrainingProgress


def train(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, a TOML file, or a run folder with --resume.")],
    run: Annotated[Path | None, typer.Option("--run", help="The run's folder. Default: runs/NAME.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override one key: section.key=value.")] = None,
    seed: Annotated[int | None, typer.Option(help="Override the recipe's seed.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
) -> None:
    """Train a recipe, evaluate it on its test split and write the report."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from cordillera import workflows
    from cordillera.cli._show import console, evaluation_table
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
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    out = console()
    with Progress(*columns, console=out, disable=quiet, transient=True) as bar:
        task = bar.add_task("training", total=None, note="", start=False)

        def watch(record: dict[str, Any], progress: TrainingProgress, total: int) -> None:
            if record:
                note = f"epoch {progress.epoch + 1}  loss {record['loss']:.4f}  {record['examples_per_second']:,.0f} examples/s"
                bar.update(task, note=note)
            if not bar.tasks[task].started:
                bar.start_task(task)
            best = "" if progress.best_step is None else f"  best NE {progress.best:.4f}"
            bar.update(task, completed=progress.step, total=total, description=f"training{best}")

        outcome = workflows.train(what, run, watch=watch, say=(lambda text: None) if quiet else bar.print)
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
