"""``cordillera train``."""

from __future__ import annotations

from collections.abc import Sequence
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
    replica: Annotated[
        str | None,
        typer.Option("--replica", help="Train one replica of the run, such as r0; needs --coordinator."),
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option("--coordinator", help="HOST:PORT of `cordillera coordinate`; needs --replica.")
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

    if replica is not None or coordinator is not None:
        return _join(recipe, replica, coordinator, quiet)
    overrides = list(set_ or []) + ([f"seed={seed}"] if seed is not None else [])
    overrides += [f"fault_tolerance.replicas={replicas}"] if replicas is not None else []
    what = _resumed(run or recipe, overrides, plan) if resume else _begun(recipe, run, overrides, plan, nproc)
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


def _join(folder: str, replica: str | None, coordinator: str | None, quiet: bool) -> None:
    """Train one replica of a run."""
    from cordillera.cli._show import console, training_progress
    from cordillera.errors import RunError
    from cordillera.run import Run
    from cordillera.workflows.language import join

    if replica is None or coordinator is None:
        raise RunError("go together", where="--replica and --coordinator", remedy="see `cordillera coordinate --help`")
    out = console()
    with training_progress(out, quiet=quiet) as (on_step, say):
        report = join(Run(folder), replica, coordinator, on_step=on_step, say=say)
    out.print(f"{replica}: {report.ended} at step {report.progress.step:,}")


def _resumed(folder: Path | str, overrides: Sequence[str], plan: Path | None) -> Any:
    """Return the run to go on with."""
    from cordillera.errors import RunError
    from cordillera.run import Run

    if any(not override.strip().startswith(("parallel.", "fault_tolerance.")) for override in overrides):
        remedy = "start a new run to change it; only parallel and fault_tolerance (--set SECTION.KEY=VALUE) may"
        raise RunError("a resumed run keeps its recipe", where="--set", remedy=remedy)
    if plan is not None:
        raise RunError("a resumed run keeps its plan", where="--plan", remedy="leave it out")
    return Run(folder)


def _begun(recipe: str, run: Path | None, overrides: Sequence[str], plan: Path | None, nproc: int | None) -> Any:
    """Return the recipe to train."""
    from cordillera.errors import RunError
    from cordillera.recipe import load

    if (Path(recipe) / "recipe.toml").is_file() and run is None:
        raise RunError("is a run folder", where=recipe, remedy=f"continue it with `cordillera train {recipe} --resume`")
    found = load(recipe, overrides)
    if plan is None:
        return found
    from cordillera.workflows.language_recipes import follow_plan

    return follow_plan(found, plan, nproc)


def _print(out: Console, outcome: Outcome | LanguageOutcome) -> None:
    from cordillera.cli._show import evaluation_table, group_tables, language_line
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
        out.print(evaluation_table(outcome.evaluation), *group_tables(outcome.evaluation))
    out.print(ended)
    if outcome.report.probing_seconds:
        share = outcome.report.probing_seconds / outcome.report.seconds
        out.print(f"probing its layers took {outcome.report.probing_seconds:.2f} s of that, {100 * share:.1f} %")
