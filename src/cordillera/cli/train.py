"""``cordillera train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from cordillera.workflows import LanguageOutcome, Outcome


def train(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, a TOML file, or a run folder with --resume.")],
    run: Annotated[Path | None, typer.Option("--run", help="The run's folder. Default: runs/NAME.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override one key: section.key=value.")] = None,
    seed: Annotated[int | None, typer.Option(help="Override the recipe's seed.")] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", min=1, help="Processes on this machine; in a language model, parallel.shard takes what is left."
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", min=1, help="Copies of a language model, each of --nproc processes, of which some may fail."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the newest checkpoint; --nproc or --set parallel.KEY changes the mesh."
        ),
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Train a language model by a plan.json of `cordillera plan`: mesh and schedule."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
) -> None:
    """Train a recipe, evaluate it and write the report."""
    from cordillera import workflows
    from cordillera.cli._show import console, training_progress
    from cordillera.errors import RunError
    from cordillera.recipe import load
    from cordillera.run import Run

    overrides = list(set_ or []) + ([f"seed={seed}"] if seed is not None else [])
    overrides += [f"fault_tolerance.replicas={replicas}"] if replicas is not None else []
    what: Any
    if resume:
        if any(not override.strip().startswith(("parallel.", "fault_tolerance.")) for override in overrides):
            remedy = "start a new run to change it; only parallel and fault_tolerance (--set SECTION.KEY=VALUE) may"
            raise RunError("a resumed run keeps its recipe", where="--set", remedy=remedy)
        if plan is not None:
            raise RunError("a resumed run keeps its plan", where="--plan", remedy="leave it out")
        what = Run(run or recipe)
    else:
        if (Path(recipe) / "recipe.toml").is_file() and run is None:
            raise RunError(
                "is a run folder", where=recipe, remedy=f"continue it with `cordillera train {recipe} --resume`"
            )
        what = load(recipe, overrides)
        if plan is not None:
            from cordillera.workflows.language_recipes import follow_plan

            what = follow_plan(what, plan, nproc)
    out = console()
    with training_progress(out, quiet=quiet) as (on_step, say):
        outcome = workflows.train(
            what, run, processes=nproc, parallel=overrides if resume else (), on_step=on_step, say=say
        )
    folder = outcome.run.folder
    if outcome.report.ended == "interrupted":
        out.print(f"interrupted at step {outcome.report.progress.step}; everything is saved")
        out.print(f"  -> continue with: cordillera train {folder} --resume", markup=False)
        raise typer.Exit(130)
    _print(out, outcome)
    out.print(f"report: {folder / 'report.html'}", markup=False)


def _print(out: Console, outcome: Outcome | LanguageOutcome) -> None:
    from cordillera.cli._show import evaluation_table, language_line
    from cordillera.workflows import LanguageOutcome

    report = outcome.report
    how = {"finished": "finished", "early": "stopped early", "exhausted": "the text ended"}[report.ended]
    ended = f"{how} after {report.progress.step:,} steps in {report.seconds:.1f} s"
    if isinstance(outcome, LanguageOutcome):
        tokens = outcome.report.progress.tokens
        if outcome.report.evaluation is not None:
            out.print(f"held-out text: {language_line(outcome.report.evaluation)}")
        out.print(f"{ended}, {tokens:,} tokens")
        return
    if outcome.evaluation is not None:
        out.print(evaluation_table(outcome.evaluation))
    out.print(ended)
    if outcome.report.probing_seconds:
        share = outcome.report.probing_seconds / outcome.report.seconds
        out.print(f"probing its layers took {outcome.report.probing_seconds:.2f} s of that, {100 * share:.1f} %")
