"""``cordillera search``."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cordillera.cli._show import (
    AsJson,
    Changes,
    CommandOutput,
    Field,
    Quiet,
    Sheet,
    progress_bar,
    read_input,
    refuse,
    to_type,
)
from cordillera.errors import CordilleraError, Interrupted, RunError

if TYPE_CHECKING:
    from rich.console import Console

    from cordillera.workflows import SearchOutcome
    from cordillera.workflows.architectures.search import SearchCandidate

_AT_ONCE_S = 0.1  # less than the time of any trial


# One piece: an argument for each option.
def search(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name or a TOML file.")],
    space: Annotated[str, typer.Option("--space", help="blocks and small (architectures), settings, or a TOML file.")],
    searcher: Annotated[
        str, typer.Option(help="evolution, predictor, random, grid (all), learnt, or optuna's tpe or nsga2.")
    ] = "evolution",
    goal: Annotated[str, typer.Option(help="ne: the lowest NE; front: the front of NE and FLOPs.")] = "front",
    trials: Annotated[int, typer.Option(min=0, max=10**6, help="Number of candidates to try.")] = 64,
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Proposals made before their results are known.")] = 4,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes, of one thread each. Default: one for each core, at most --batch."),
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(min=0, help="Hours after which the search ends: nothing begins that would end later."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Trainings of each architecture.")] = 1,
    sample: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the data that an architecture is first trained on.")
    ] = 0.01,
    most_flops: Annotated[
        int | None, typer.Option("--most-flops", min=1, help="Most forward FLOPs an example.")
    ] = None,
    most_parameters: Annotated[
        int | None, typer.Option("--most-parameters", min=1, help="Most parameters outside of the tables.")
    ] = None,
    supernet: Annotated[
        Path | None, typer.Option("--supernet", help="Run of a supernet, whose weights replace training.")
    ] = None,
    fine_tune: Annotated[
        int, typer.Option("--fine-tune", min=0, max=10**9, help="Steps of training from the supernet's weights.")
    ] = 0,
    judge: Annotated[
        int, typer.Option(min=0, max=100, help="New seeds to train the front with in the end, for the test split.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the searcher.")] = 0,
    proposals: Annotated[
        Path | None, typer.Option("--proposals", help="Architectures to try first, JSON lines; '-' reads stdin.")
    ] = None,
    set_: Changes = None,
    folder: Annotated[
        Path | None, typer.Option("--run", help="Folder of the search. Default: runs/NAME-search.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Search for the architecture or the settings of a ranking model.

    Of a space of settings, the recipe's own are tried first. A search that was stopped goes on where it was.
    """
    from cordillera import workflows
    from cordillera.distributed.job.environment import check_unlaunched
    from cordillera.distributed.job.slurm import adopt_slurm
    from cordillera.errors import PlanError
    from cordillera.files import at_home, read_text
    from cordillera.kernels.threads import usable_cores
    from cordillera.workflows.architectures.search import read_proposals
    from cordillera.workflows.architectures.trials import TrialConfig

    adopt_slurm()
    check_unlaunched()
    folder = folder and at_home(folder)
    if goal not in ("ne", "front"):
        raise PlanError(f"must be ne or front, got {goal!r}", where="--goal")
    if supernet is None or searcher == "learnt":
        why = "no --supernet" if supernet is None else "--searcher learnt"
        refuse({"--fine-tune": fine_tune or None}, f"candidates that are trained anew ({why})")
    answer = CommandOutput(as_json)
    own = _own_settings(recipe, space, set_ or ())
    given = [own] if own else []
    if proposals is not None:
        text = read_input() if str(proposals) == "-" else read_text(proposals)
        given += read_proposals(text, "stdin" if str(proposals) == "-" else str(proposals))
    run = None if supernet is None else str(at_home(supernet).resolve())
    trial = TrialConfig(
        most_flops=most_flops,
        most_parameters=most_parameters,
        sample=sample,
        seeds=seeds,
        supernet=None if searcher == "learnt" else run,
        fine_tune=fine_tune,
    )
    chances = run if searcher == "learnt" else None
    config = workflows.SearchConfig.model_validate(
        {
            "searcher": searcher,
            "chances": chances,
            "goal": goal,
            "trials": trials,
            "batch": batch,
            "seed": seed,
            "trial": trial,
            "judge": judge,
        }
    )

    best: list[float] = []
    tried: set[int] = set()
    with _progress(answer.notes, quiet=quiet) as (on_candidate, say):
        on_candidate(0, len(given) + trials)

        def show(candidate: SearchCandidate, planned: int) -> None:
            tried.add(candidate.number)
            if candidate.trial.is_finished:
                best.append(min([candidate.trial.ne, *best[-1:]]))
            say(_line(candidate, planned, best[-1] if best else None))
            on_candidate(candidate.number + 1, planned)

        try:
            outcome = workflows.search(
                recipe,
                space,
                config,
                overrides=set_ or (),
                proposals=given,
                folder=folder,
                workers=workers or min(usable_cores(), batch),
                hours=hours,
                on_candidate=show,
                say=say,
            )
        except Interrupted as interrupted:
            _write_interrupted(Path(interrupted.where or ""), len(tried))
            raise
        except KeyboardInterrupt:
            raise _interrupted(folder, recipe, set_ or ()) from None
    with answer:
        _print(answer, outcome, goal, own)


def _interrupted(folder: Path | None, recipe: str, changes: Sequence[str]) -> Interrupted:
    """Return the error for Ctrl-C between trials, such as while the data is prepared, once the status has it."""
    from cordillera.recipe import load

    with contextlib.suppress(CordilleraError):
        _write_interrupted(folder or Path("runs") / f"{load(recipe, changes).name}-search")
    return Interrupted("finished trials are saved", remedy="give the same command again to go on")


def _write_interrupted(folder: Path, candidates: int | None = None) -> None:
    """Write into the status of a search that it was interrupted after so many ``candidates``; None: those on record."""
    from cordillera.run import Run

    with contextlib.suppress(CordilleraError, OSError):
        run = Run(folder, of_search=True)
        with run.lock():  # no other process goes on with it
            status = run.status()
            if status is not None and status.ended is None:
                on_record = sum(record.get("kind") == "candidate" for record in run.metrics())
                run.write_status("interrupted", on_record if candidates is None else candidates, status.steps)


def _own_settings(recipe: str, space: str, changes: Sequence[str]) -> dict[str, Any]:
    """Return the recipe's own values of the keys of a space of settings; nothing for a space of graphs."""
    from cordillera import recipe as recipes
    from cordillera.mistakes import flat_values
    from cordillera.training.ranking.architecture_search.space import load_space

    settings = load_space(space)
    if settings.blocks is not None:
        return {}
    values = flat_values(recipes.load(recipe, changes).model_dump(mode="json", exclude_none=True))
    return {key: values[key] for key in settings.choices if key in values}


@contextlib.contextmanager
def _progress(out: Console, *, quiet: bool) -> Iterator[tuple[Callable[[int, int], object], Callable[[str], object]]]:
    """Show a progress bar of a search; yield a function of the numbers of candidates done and planned, and ``say``."""
    with progress_bar(out, quiet) as (bar, task, say):
        came = time.monotonic()

        def on_candidate(done: int, planned: int) -> None:
            nonlocal came
            if time.monotonic() - came < _AT_ONCE_S:  # a recorded result, which does not help to estimate the time left
                bar.reset(task, description="searching", completed=done, total=planned)
            came = time.monotonic()
            bar.update(task, description="searching", completed=done, total=planned)

        yield on_candidate, say


def _line(candidate: SearchCandidate, planned: int, best: float | None) -> str:
    trial = candidate.trial
    head = f"[{candidate.number + 1}/{planned}] {candidate.name}"
    if not trial.is_finished:
        return f"{head}  died: {trial.stage}: {trial.why}"
    record = "  best so far" if best == trial.ne else ""
    return f"{head}  NE {trial.ne:.4f}  {trial.flops:,} FLOPs  {trial.seconds:.1f} s{record}"


def _print(answer: CommandOutput, outcome: SearchOutcome, goal: str, own: Mapping[str, Any]) -> None:
    from collections import Counter

    died = Counter(one.trial.stage for one in outcome.candidates if not one.trial.is_finished)
    tried, finished = len(outcome.candidates), len(outcome.candidates) - sum(died.values())
    lines = [f"{tried:,} candidates tried, {finished:,} trained"]
    lines += [f"{count:,} died at stage {stage}" for stage, count in died.items()]
    if outcome.is_exhausted:
        lines.append("the space has no further candidate")
    if outcome.is_out_of_time:
        lines.append("the time is over: the same command goes on")
    ended = {"is_exhausted": outcome.is_exhausted, "is_out_of_time": outcome.is_out_of_time}
    answer.say("\n".join(lines), tried=tried, trained=finished, died=died, **ended)
    if tried and not finished:
        reason = outcome.candidates[0].trial
        raise RunError(
            f"none of {tried:,} candidates was trained; the first died at stage {reason.stage}: {reason.why}",
            where=str(outcome.folder),
            remedy=f"{outcome.report} has a reason of each stage; change the recipe, the space or the limits, and "
            "search in another --run folder",
        )
    best = [] if outcome.best is None else [outcome.best]
    shown = best if goal == "ne" else outcome.front
    answer.tables(front=_table(outcome, shown, goal))
    for one in best:
        path = outcome.folder / "front" / f"{one.name}.toml"
        by = ", by its mean NE over new seeds" if outcome.judged else ""
        chosen = [f"{candidate.name}: {candidate.settings}" for candidate in shown if candidate.settings]
        if chosen:
            answer.say("\n".join(chosen), settings={candidate.name: candidate.overrides for candidate in shown})
        if own:
            first = next((given for given in outcome.candidates if given.overrides == own), None)
            if first is not None:
                answer.say(_beside_own(one, first), own_ne=first.trial.ne if first.trial.is_finished else None)
        folder = f"recipes: {path.parent}\n" if goal == "front" else ""
        answer.say(f"{folder}  -> train the best{by} with: {to_type('train', path)}", best=path)
    answer.say(f"report: {outcome.report}", report=outcome.report)


def _table(outcome: SearchOutcome, shown: Sequence[SearchCandidate], goal: str) -> Sheet:
    """Return a table of the front, or of the best candidate."""
    interval = Field("interval", "95 % interval", "{0[0]:.4f} to {0[1]:.4f}")
    form = lambda ne: "died" if math.isnan(ne) else f"{ne:.4f}"  # noqa: E731
    judged = [Field("judged_ne", "NE (new seeds)", form), Field("test_ne", "NE (test)", form)]
    graphs = any(isinstance(one.overrides.get("model"), Mapping) for one in shown)
    table = Sheet(
        f"{'lowest NE' if goal == 'ne' else 'front of NE and FLOPs'}, by the validation split",
        Field("architecture", "architecture" if graphs else "candidate"),
        Field("ne", "NE", "{:.4f}"),
        *(judged if outcome.judged else [interval]),
        Field("flops", "FLOPs", "{:,}"),
        Field("parameters", form="{:,}"),
    )
    for one in shown:
        trial = one.trial
        values: list[object] = [None if math.isnan(trial.low) else (trial.low, trial.high)]
        if outcome.judged:
            again = outcome.judged[one.name]
            values = [again.ne, again.test_ne] if again.is_finished else [math.nan, math.nan]
        table.add(one.name, trial.ne, *values, trial.flops, trial.parameters)
    return table


def _beside_own(best: SearchCandidate, own: SearchCandidate) -> str:
    """Return the sentence that compares the best candidate with the recipe's own settings."""
    from cordillera.mistakes import differences

    trial = own.trial
    if not trial.is_finished:
        return f"the recipe's own settings died at stage {trial.stage}: {trial.why}"
    changed = differences(own.overrides, best.overrides)
    if not changed:
        return f"no candidate is better than the recipe's own settings, NE {trial.ne:.4f}"
    return f"the recipe's own settings: NE {trial.ne:.4f}; the best differs in {'; '.join(changed)}"
