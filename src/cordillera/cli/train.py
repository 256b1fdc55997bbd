"""``cordillera train``."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cordillera.cli._show import AsJson, Changes, CommandOutput, Quiet, refuse, to_type
from cordillera.errors import Interrupted, RankError
from cordillera.files import at_home, check_writable

if TYPE_CHECKING:
    from cordillera.run import Run
    from cordillera.workflows import LanguageOutcome, Outcome

_Outcome = TypeVar("_Outcome", bound="Outcome | LanguageOutcome")

_TOO_GOOD = 0.99  # AUC
_OF_MACHINE = ("name: ", "description: ", "device: ", "threads: ", "data.cache_dir: ", "parallel.", "fault_tolerance.")


def train(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, a TOML file, or a run folder with --resume.")],
    run: Annotated[
        Path | None, typer.Option("--run", help="The run's folder. Default: runs/NAME, numbered if it exists.")
    ] = None,
    set_: Changes = None,
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
        typer.Option("--resume", help="Continue from the newest checkpoint, or begin if --run is empty."),
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Train a language model by a plan.json of `cordillera plan`: mesh and schedule."),
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option("--hours", help="Save and end after so many hours, as at Ctrl-C, whatever the step.", min=1e-4),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe, evaluate it and write the report."""
    from cordillera.distributed.job.slurm import adopt_slurm

    adopt_slurm()
    run = run and at_home(run)
    if replica is not None or coordinator is not None:
        options = {"--run": run, "--set": set_, "--seed": seed, "--nproc": nproc, "--plan": plan, "--resume": resume}
        refuse({**options, "--replicas": replicas}, "--replica, which trains the run that stands in place of RECIPE")
        with _limited(hours):
            return _join(Path(recipe), replica, coordinator, CommandOutput(as_json), quiet)
    overrides = list(set_ or []) + ([f"seed={seed}"] if seed is not None else [])
    overrides += [f"fault_tolerance.replicas={replicas}"] if replicas is not None else []
    answer = CommandOutput(as_json)
    resume = resume and not _begins(recipe, run, answer)
    what = resumed(recipe, run, overrides, plan, nproc) if resume else _begun(recipe, run, overrides, plan, nproc)
    run = what.folder if resume else run or _new_folder(what.name)
    with answer, _limited(hours):
        _train(answer, what, run, nproc, overrides, quiet)


def _train(
    answer: CommandOutput, what: Any, folder: Path | None, nproc: int | None, overrides: Sequence[str], quiet: bool
) -> None:
    """Train a recipe, or the rest of a run with ``overrides``, and print how that ended."""
    from cordillera import workflows
    from cordillera.cli._replicas import replicas_told
    from cordillera.cli._show import training_progress
    from cordillera.run import Run

    run = what if isinstance(what, Run) else None
    before = None if run is None else run.status()
    changes = () if run is None else (*overrides, *_shards(run, nproc, overrides))
    with (
        training_progress(answer.notes, quiet=quiet) as (draw, say),
        _recipe_kept(run),
        _ended_before(draw, folder, run is not None) as on_step,
        replicas_told(folder, say) if folder is not None else contextlib.nullcontext(),
    ):
        outcome, lost = _past_corrupt_checkpoints(
            run, lambda: workflows.train(what, folder, processes=nproc, changes=changes, on_step=on_step, say=say)
        )
    is_old = before is not None and before.is_complete and before.step == outcome.report.progress.step and not lost
    tell_outcome(answer, outcome, "train", is_resumed=run is not None, is_old=is_old)


@contextlib.contextmanager
def _recipe_kept(run: Run | None) -> Iterator[None]:
    """Give a run that goes on its recipe back if it is refused, as it is, before a step: ``--set`` may be a mistake."""
    from cordillera.errors import DataError, PlanError, RecipeError, RunError
    from cordillera.run import write_atomically

    if run is None:
        yield
        return
    recipe, before = run.recipe_file.read_text(encoding="utf-8"), run.status()
    try:
        yield
    except (DataError, PlanError, RecipeError, RunError):
        after, now = run.status(), run.recipe_file.read_text(encoding="utf-8")
        if now != recipe and (after and after.step) == (before and before.step):
            write_atomically(run.recipe_file, recipe)
        raise


def _begins(recipe: str, folder: Path | None, answer: CommandOutput) -> bool:
    """Return whether a run to be resumed starts from scratch, as its folder is absent or empty; print a note if so."""
    from cordillera.errors import RunError
    from cordillera.run import check_new_folder

    if folder is None or (Path(recipe) / "recipe.toml").is_file():  # a run, not a recipe
        return False
    try:
        check_new_folder(folder)
    except RunError:
        return False
    answer.notes.print(f"{folder}: holds no run yet, training begins")
    return True


def _new_folder(name: str) -> Path | None:
    """Make the folder of a new run, so that no other takes it; where a launcher started processes, the first one does.

    It is removed in the end if nothing was written into it.
    """
    from cordillera.distributed.job.environment import place_in_job
    from cordillera.run import disk_errors, next_path

    if place_in_job() is None:
        with disk_errors(Path("runs")):
            Path("runs").mkdir(exist_ok=True)
    while place_in_job() is None:
        folder = next_path(Path("runs"), name)
        with disk_errors(folder), contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    return None


@contextlib.contextmanager
def _limited(hours: float | None) -> Iterator[None]:
    """End what the region does after so many hours as SIGTERM does."""
    if hours is None:
        yield
        return
    timer = threading.Timer(min(3600 * hours, threading.TIMEOUT_MAX), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shards(run: Run, nproc: int | None, overrides: Sequence[str]) -> list[str]:
    """Return the change of ``parallel.shard`` with which a language model's run goes on in ``nproc`` processes."""
    from cordillera.recipe import LanguageRecipe, load

    recipe = load(run.recipe_file, overrides) if nproc is not None else None
    if nproc is None or not isinstance(recipe, LanguageRecipe):
        return []
    others = recipe.parallel.world // recipe.parallel.shard
    is_set = any(one.partition("=")[0].strip() == "parallel.shard" for one in overrides)
    fits = is_set or nproc % others or nproc == recipe.parallel.world
    return [] if fits else [f"parallel.shard={nproc // others}"]


def _past_corrupt_checkpoints(run: Run | None, train: Callable[[], _Outcome]) -> tuple[_Outcome, int]:
    """Call ``train``, again with the checkpoint before where the newest of the ``run`` that it resumes is corrupt.

    Return its result, and the number of checkpoints that were set aside.
    """
    from cordillera.distributed.job.environment import place_in_job
    from cordillera.errors import CheckpointError
    from cordillera.training.checkpoints import set_aside_if_corrupt

    lost = 0
    while True:
        try:
            return train(), lost
        except CheckpointError as error:
            if run is None or place_in_job() is not None:
                raise
            with run.lock():
                found = set_aside_if_corrupt(run.checkpoints)
            if found is None:
                raise
            aside, before = found
            what = (
                f"{error.where}: {error.what}; the checkpoint is now {aside}, and training goes on from step {before:,}"
            )
            warnings.warn(what, stacklevel=2)
            lost += 1


@contextlib.contextmanager
def _ended_before(draw: Callable[..., None], folder: Path | None, is_resumed: bool) -> Iterator[Callable[..., None]]:
    """Yield ``draw`` for every step; report the state if a signal ends the command before or after all steps."""
    is_begun = False

    def on_step(*progress: Any) -> None:
        nonlocal is_begun
        is_begun = True
        draw(*progress)

    try:
        yield on_step
    except KeyboardInterrupt:
        if folder is None and is_begun:
            raise
        if folder is None or not (folder / "recipe.toml").is_file():
            raise Interrupted("nothing was trained yet", remedy="give the same command again") from None
        from cordillera.run import Run

        status, found = Run(folder).status(), "the newest checkpoint is kept"
        if status is not None and status.is_complete and (is_begun or not is_resumed):
            found = "training is complete, and not all of evaluation and report is written"
        elif not is_begun:
            found = f"nothing was trained yet{'; weights are as they were' if is_resumed else ''}"
        remedy = f"continue with: {to_type('train', folder, '--resume')}"
        raise Interrupted(found, where=str(folder), remedy=remedy) from None
    except RankError as error:  # rank 0, which writes the status, may be the one that ended
        if folder is not None and (folder / "recipe.toml").is_file():
            from cordillera.run import Run

            Run(folder).write_failure(error.what)
        raise
    finally:
        if folder is not None:
            with contextlib.suppress(OSError):  # a folder that is not empty stays
                folder.rmdir()


def _join(folder: Path, replica: str | None, coordinator: str | None, answer: CommandOutput, quiet: bool) -> None:
    """Train one replica of a run."""
    from cordillera.cli._show import training_progress
    from cordillera.errors import RunError
    from cordillera.run import Run
    from cordillera.workflows.language import join

    if replica is None or coordinator is None:
        raise RunError("go together", where="--replica and --coordinator", remedy="see `cordillera coordinate --help`")
    with answer:
        with training_progress(answer.notes, quiet=quiet) as (on_step, say):
            report = join(Run(folder), replica, coordinator, on_step=on_step, say=say)
        ended, step = report.ended, report.progress.step
        answer.say(f"{replica}: {ended} at step {step:,}", replica=replica, ended=ended, steps=step)


def resumed(
    recipe: str,
    folder: Path | None,
    overrides: Sequence[str],
    plan: Path | None = None,
    nproc: int | None = None,
    command: str = "train",
) -> Any:
    """Return the run that a command resumes, in ``folder`` or ``recipe``; warn of differences from a recipe beside it.

    That recipe is compared as it is with the ``plan`` that began the run in ``nproc`` processes.

    Raises:
        RunError: If it is no run, there is a plan and no recipe, or the recipe is of another model or other data.
    """
    from cordillera.errors import RunError
    from cordillera.mistakes import differences, few
    from cordillera.recipe import load
    from cordillera.run import Run

    is_alone = folder is None or at_home(recipe) == folder
    if plan is not None and is_alone:
        raise RunError("a resumed run keeps its plan", where="--plan", remedy="leave it out")
    run = Run(folder or recipe)
    if is_alone:
        return run
    both = load(run.recipe_file, overrides), _planned(load(recipe, overrides), plan, nproc)
    changes = differences(*(one.model_dump(mode="json", by_alias=True) for one in both))
    free = _OF_MACHINE if plan is None else tuple(key for key in _OF_MACHINE if key != "parallel.")
    others = [one for one in changes if not one.startswith(free)]
    if of_another := [one for one in others if one.startswith(("model.name: ", "data.dataset: ", "objective.name: "))]:
        raise RunError(
            f"is a run of another recipe than {recipe}: {'; '.join(of_another)}",
            where=str(folder),
            remedy=f"go on with `{to_type(command, folder, '--resume')}`, or choose another --run folder",
        )
    if others:
        what = f"{folder} goes on with its own recipe, from which {recipe} differs: {few(others)}"
        warnings.warn(f"{what}; --set changes what a resumed run may change", stacklevel=2)
    return run


def _begun(recipe: str, run: Path | None, overrides: Sequence[str], plan: Path | None, nproc: int | None) -> Any:
    """Return the recipe to train."""
    from cordillera.distributed.job.environment import place_in_job
    from cordillera.recipe import load
    from cordillera.run import check_new_folder, check_no_run

    if run is None:
        check_no_run(recipe, "train")
    elif place_in_job() is None:  # check before the data is read
        check_new_folder(run)
        check_writable(run / "recipe.toml")
    return _planned(load(recipe, overrides), plan, nproc)


def _planned(recipe: Any, plan: Path | None, nproc: int | None) -> Any:
    """Return a recipe with the mesh of a plan, if there is one."""
    if plan is None:
        return recipe
    from cordillera.workflows.language_recipes import follow_plan

    return follow_plan(recipe, plan, nproc)


def tell_outcome(
    answer: CommandOutput,
    outcome: Outcome | LanguageOutcome,
    command: str,
    again: Sequence[str] = (),
    *,
    is_resumed: bool = False,
    is_old: bool = False,
) -> None:
    """Print how training ended, its result and the report's path, or the ``command`` that resumes it.

    Options that the latter needs are ``again``. With ``is_resumed``, the command trained the last part; with
    ``is_old``, it had ended before the command.

    Raises:
        typer.Exit: If it was interrupted.
    """
    folder, step = outcome.run.folder, outcome.report.progress.step
    if outcome.report.ended == "interrupted":
        answer.say(f"interrupted at step {step:,}; everything is saved", ended="interrupted", steps=step, run=folder)
        answer.say(f"  -> continue with: {to_type(command, folder, '--resume', *again)}")
        raise typer.Exit(130)
    _print(answer, outcome, is_resumed, is_old)
    answer.say(f"report: {folder / 'report.html'}", run=folder, report=folder / "report.html")


def _print(answer: CommandOutput, outcome: Outcome | LanguageOutcome, is_resumed: bool, is_old: bool) -> None:
    from cordillera.cli._show import evaluation_table, group_tables, language_line
    from cordillera.numbers import counted
    from cordillera.recipe import PostTrainingRecipe, load
    from cordillera.workflows import LanguageOutcome

    report = outcome.report
    how = {"finished": "finished", "early": "stopped early", "exhausted": "the text ended"}[report.ended]
    step, seconds = report.progress.step, report.seconds
    took = f"({seconds:.1f} s since it was resumed)" if is_resumed else f"in {seconds:.1f} s"
    ended = f"{how} after {counted(step, 'step')} {took}"
    if is_old:
        ended = f"nothing was left to train: {how} before, after {counted(step, 'step')}"
    facts = {"ended": report.ended, "steps": step, "seconds": seconds}
    if isinstance(outcome, LanguageOutcome):
        tokens = outcome.report.progress.tokens
        if outcome.report.evaluation is not None:
            held_out = f"held-out text: {language_line(outcome.report.evaluation)}"
            answer.say(held_out, evaluation=outcome.report.evaluation)
        elif logged := [one for one in outcome.run.metrics() if one["kind"] == "train"]:
            names = ("loss", "accuracy", "margin", "reward")
            measures = {name: logged[-1][name] for name in names if logged[-1].get(name) is not None}
            said = ", ".join(f"{name} {value:.4f}" for name, value in measures.items())
            answer.say(f"step {logged[-1]['step']:,}, in training: {said}", training=measures)
            recipe: Any = load(outcome.run.recipe_file)
            if not isinstance(recipe, PostTrainingRecipe) and recipe.data.held_out != 0:
                answer.say("nothing is held out: documents stay whole (data.unit = 'line', or data.validation)")
        answer.say(f"{ended}, {tokens:,} tokens", **facts, tokens=tokens)
        _warn(answer, _language_doubts(outcome))
        return
    if outcome.evaluation is not None:
        answer.say(evaluation_table(outcome.evaluation), evaluation=outcome.evaluation)
        for table in group_tables(outcome.evaluation):
            answer.say(table)
    answer.say(ended, **facts)
    _warn(answer, _doubts(outcome))
    probing = outcome.report.probing_seconds
    if probing:
        share = f"{100 * probing / seconds:.1f} %"
        answer.say(f"probing its layers took {probing:.2f} s of that, {share}", probing_seconds=probing)


def _warn(answer: CommandOutput, doubts: Iterator[str]) -> None:
    found = list(doubts)
    for doubt in found:
        answer.say(doubt)
    answer.keep(warnings=[" ".join(doubt.split()) for doubt in found])


def _language_doubts(outcome: LanguageOutcome) -> Iterator[str]:
    """Yield warnings to check before a language model is trusted."""
    from cordillera.numbers import counted
    from cordillera.recipe import PostTrainingRecipe, load

    recipe: Any = load(outcome.run.recipe_file)
    steps, training = outcome.report.progress.step, recipe.training
    if skipped := sum(one["kind"] == "skipped" for one in outcome.run.metrics()):
        yield f"warning: {skipped:,} of {counted(steps, 'step')} were skipped, as loss or gradients were not finite"
    if training.warmup_steps >= training.steps:
        rises = f"the learning rate rises for {training.warmup_steps:,} steps, and there are {training.steps:,}"
        yield f"warning: {rises}: set training.warmup_steps"
    found, guess = outcome.report.evaluation, math.log(recipe.model.vocabulary)
    if found is not None and not isinstance(recipe, PostTrainingRecipe) and not found.loss <= 1.1 * guess:
        yield f"warning: {found.loss:.4g} nats a token is above a guess, {guess:.4g}: see training.learning_rate"


def _doubts(outcome: Outcome) -> Iterator[str]:
    """Yield warnings to check before the model of a ranking run is trusted."""
    from cordillera.recipe import load

    folder, progress = outcome.run.folder, outcome.report.progress
    metrics = {} if outcome.evaluation is None else outcome.evaluation.metrics()
    for task, values in metrics.items():
        if values.get("auc", 0.0) > _TOO_GOOD:
            rare = f"{task}: such an AUC is rare; a feature may be known only after the label"
            yield f"{rare}\n  -> see which tells most: {to_type('evaluate', folder, '--importance')}"
        if values.get("ne", 0.0) > 1:
            worse = f"{task}: NE {values['ne']:.4f}; NE above 1 is worse than always predicting the base rate"
            yield f"{worse}\n  -> see its curve in {folder / 'report.html'}: too few steps, or too high a learning rate"
    training: Any = load(outcome.run.recipe_file).training
    if progress.best_step not in (None, progress.step) and training.patience is None:
        yield f"the last weights are kept; {progress.best_text} was at step {progress.best_step:,} (training.patience)"
