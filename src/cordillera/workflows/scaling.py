"""Studies: IsoFLOP of language models (Grattafiori et al. 2024, 3.2.1), sweeps of ranking models, failures of jobs."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from cordillera import recipe as recipes
from cordillera.data.language.corpora import prepare_corpora
from cordillera.distributed.fault_tolerance.effective_time import (
    best_checkpoint_interval,
    effective_with_checkpoints,
    effective_with_replicas,
)
from cordillera.distributed.fault_tolerance.simulator import FaultyJob, TimeUse, simulate_faults
from cordillera.distributed.job.environment import check_unlaunched, place_in_job
from cordillera.errors import DataError, Interrupted, PlanError, RecipeError, RunError
from cordillera.mistakes import differences, few
from cordillera.models.language.flops import training_flops
from cordillera.planning.language.plan_file import read_plan
from cordillera.recipe import LanguageRecipe, PostTrainingRecipe, RankingRecipe
from cordillera.reports.faults import FaultStudyRow
from cordillera.reports.ranking.comparison import SeedMean, mean_interval
from cordillera.reports.studies import isoflop_page, sweep_page
from cordillera.run import Run, write_atomically
from cordillera.training.language.trainer import LanguageStepCallback
from cordillera.training.ranking.trainer import StepCallback
from cordillera.training.scaling import power_law as scaling_laws
from cordillera.training.scaling.isoflop_plan import IsoFlopOutcome, plan_runs, sizes_for, train_plan
from cordillera.training.scaling.power_law import ScalingStudy
from cordillera.workflows import language
from cordillera.workflows.processes import Say, silent
from cordillera.workflows.ranking import train
from cordillera.workflows.trained import card_of

REFERENCE_DEVICES = 98_304
"""Size of a cluster in which something fails every 18 minutes (FT-HSDP, published)."""

ISOFLOP_PAGE = "isoflop.html"
"""File in the folder of an IsoFLOP study: its page."""

_USES = tuple(one.name for one in fields(TimeUse) if one.name not in ("elapsed", "failures", "steps"))
_DAY = 86_400.0
_SAMPLE = 50  # iterations whose documents show the cost of attention


def isoflop(
    source: str | Path,
    budgets: Sequence[float],
    *,
    sizes: int = 6,
    tokens_per_parameter: float = 20.0,
    target: float | None = None,
    overrides: Sequence[str] = (),
    folder: Path | str | None = None,
    on_step: LanguageStepCallback | None = None,
    say: Say = silent,
) -> IsoFlopOutcome:
    """Train a language model in several sizes for each budget, and fit the best split into parameters and tokens.

    Finished runs are not trained again and interrupted ones are resumed, so a stopped study can be continued. No run
    sees more than ``data.epochs`` passes over the text.

    Args:
        source: Name of a shipped recipe or a path.
        budgets: Training FLOPs of each run of one curve.
        sizes: Number of models for each budget.
        tokens_per_parameter: Tokens per parameter at the expected optimum.
        target: FLOPs for which to predict the best split; None for none.
        overrides: Overrides ``section.key=value`` for all runs.
        folder: Folder of the study. Default: ``runs/NAME-isoflop``.
        on_step: Function called after every step; see :func:`cordillera.workflows.train`.
        say: Function called with one line of text at each stage.

    Raises:
        RecipeError: If it is not the recipe of a language model.
        PlanError: If budgets or sizes do not make a study, or a launcher has started this process.
        RunError: If a folder of the study holds another run.
        Interrupted: If training was interrupted; finished work is saved.
        DataError: If the text is not available, or nothing could be trained.
    """
    if target is not None and not (isinstance(target, int | float) and 0 < target < math.inf):
        raise DataError(f"must be a number of FLOPs above 0, got {target}", where="target")
    if not 0 < tokens_per_parameter < math.inf:
        raise DataError(f"must be a number above 0, got {tokens_per_parameter}", where="tokens_per_parameter")
    if place_in_job() is not None:
        remedy = "run it on one machine; --set parallel.KEY gives each run its processes"
        raise PlanError("a study starts its own processes; a launcher has started this one", remedy=remedy)
    recipe = _language_recipe(source, overrides)
    say(f"text: {recipe.data.label}")
    corpora = prepare_corpora(recipe.data)
    sample = list(itertools.islice(language.batches_of(recipe, corpora), _SAMPLE))
    lengths = [length for iteration in sample for one in iteration.lengths for length in one]
    held = sum(part["tokens"] for part in corpora.facts["sources"])
    plan = plan_runs(
        budgets,
        sizes_for(recipe.model, budgets, per_budget=sizes, tokens_per_parameter=tokens_per_parameter),
        training_flops=training_flops,
        lengths=lengths,
        tokens_per_step=recipe.packing.tokens,
        most_tokens=held * (recipe.data.epochs or 1),
        tokens_per_parameter=tokens_per_parameter,
    )

    def train(changes: list[str], place: Path) -> Run:
        one = _language_recipe(source, [*overrides, *changes])
        return language.train(one, place, resume=(place / "recipe.toml").is_file(), on_step=on_step).run

    def agrees(changes: list[str], place: Path) -> bool:
        found, wanted = recipes.load(place), _language_recipe(source, [*overrides, *changes])
        return isinstance(found, LanguageRecipe) and found.model_copy(update={"parallel": wanted.parallel}) == wanted

    parent = Path(folder) if folder is not None else Path("runs") / f"{recipe.name}-isoflop"
    outcome = train_plan(plan, parent, train, agrees=agrees, target=target, title=recipe.name, say=say)
    write_atomically(parent / ISOFLOP_PAGE, isoflop_page(recipe.name, outcome.study))
    return outcome


def _language_recipe(source: str | Path, overrides: Sequence[str]) -> LanguageRecipe:
    recipe = recipes.load(source, overrides)
    if not isinstance(recipe, LanguageRecipe):
        message = f"must be that of a language model here, got {recipe.model.name!r}; `cordillera sweep` is for others"
        raise RecipeError(str(source), [("model.name", message)])
    if isinstance(recipe, PostTrainingRecipe):
        raise RecipeError(str(source), [("objective", "a study is of pre-training: name a recipe without [objective]")])
    return recipe


@dataclass
class Sweep:
    """Folder (with the runs, ``sweep.json`` and the plots), fitted law, drawing and page of :func:`sweep`."""

    folder: Path
    study: ScalingStudy
    plot: Path
    report: Path


def _parts_of(size: str) -> list[str]:
    try:
        return shlex.split(size)
    except ValueError as error:
        raise DataError(f"{size!r} cannot be divided into parts: {error}", where="size") from error


def sweep(
    source: str | Path,
    sizes: Sequence[str],
    *,
    seeds: int = 1,
    overrides: Sequence[str] = (),
    folder: Path | str | None = None,
    on_step: StepCallback | None = None,
    say: Say = silent,
) -> Sweep:
    """Train a recipe in several sizes and fit test NE against training FLOPs per example.

    Finished runs are not trained again and interrupted ones are resumed, so a stopped sweep can be continued. The law
    is ``NE = floor + a * FLOPs ** b``; the floor is the Bayes-optimal NE if it is known for the data, else zero.

    Args:
        source: Name of a shipped recipe or a path.
        sizes: Sizes, smallest first; each is a string of ``section.key=value`` parts separated by blanks.
        seeds: Number of repetitions of every size, with the recipe's seed and those after it.
        overrides: Overrides ``section.key=value`` for all sizes.
        folder: Folder of the sweep. Default: ``runs/NAME-sweep``.
        on_step: Function called after every step; see :func:`cordillera.workflows.train`.
        say: Function called with one line of text at each stage.

    Raises:
        RecipeError: If a size is not a valid recipe; then nothing is trained.
        RunError: If a folder of the sweep holds a run of another recipe.
        Interrupted: If training was interrupted; finished work is saved.
        DataError: If there are fewer than three sizes.
        PlanError: If a launcher has started this process.
    """
    if len(sizes) < 3:
        raise DataError(f"a law needs at least three sizes, got {len(sizes)}", where="size")
    check_unlaunched()
    changes = [_parts_of(size) for size in sizes]
    first = _ranking_recipe(source, [*overrides, *changes[0]])
    planned = []
    for number, size in enumerate(changes):
        for seed in range(first.seed, first.seed + seeds):
            recipe = _ranking_recipe(source, [*overrides, *size, f"seed={seed}"])
            planned.append((f"size-{number + 1}-seed-{seed}", recipe))
    parent = Path(folder) if folder is not None else Path("runs") / f"{first.name}-sweep"
    runs = []
    for number, (name, recipe) in enumerate(planned, 1):
        place = parent / name
        exists = (place / "recipe.toml").is_file()
        # a training in slices keeps its number of threads
        before = (
            recipes.load(place / "recipe.toml").model_copy(update={"threads": recipe.threads}) if exists else recipe
        )
        if before != recipe:
            what = few(differences(*(one.model_dump(mode="json", by_alias=True) for one in (before, recipe))))
            raise RunError(
                f"holds a run of another recipe ({what})",
                where=str(place),
                remedy="choose another --run folder for this sweep",
            )
        status = Run(place).status() if exists else None
        if exists and (place / "evaluation.json").is_file() and (status is None or status.is_complete):
            say(f"[{number}/{len(planned)}] {name}: done before")
        else:
            say(f"[{number}/{len(planned)}] {name}: {sizes[(number - 1) // seeds]}")
            outcome = train(recipe, place, resume=exists, on_step=on_step)
            if outcome.report.ended == "interrupted":
                raise Interrupted(
                    "this run is not finished; everything is saved",
                    where=str(place),
                    remedy="give the same command again to go on",
                )
        runs.append(Run(place))
    bayes = card_of(runs[0])["data"]["facts"].get("bayes_ne")
    study = scaling_laws.study(_measured(runs, parent), floor=bayes or 0.0)
    plot = parent / "sweep.png"
    scaling_laws.plot(study, [plot, parent / "sweep.svg"], bayes=bayes, title=f"{first.name}: test NE against FLOPs")
    write_atomically(parent / "sweep.json", study.to_json() + "\n")
    report = parent / "sweep.html"
    write_atomically(report, sweep_page(first.name, study, bayes))
    return Sweep(parent, study, plot, report)


def _measured(runs: Sequence[Run], folder: Path) -> list[scaling_laws.MeasuredRun]:
    found = scaling_laws.measure(runs)
    if not any(math.isfinite(run.value) for run in found):
        raise DataError(
            "no run has a finite NE on the test split, whose labels are of one class",
            where=str(folder),
            remedy="give the test split more rows (data.fractions), and the sweep another folder",
        )
    return found


def _ranking_recipe(source: str | Path, overrides: Sequence[str]) -> RankingRecipe:
    recipe = recipes.load(source, overrides)
    if not isinstance(recipe, RankingRecipe):
        remedy = "for language models, `cordillera isoflop` fits losses against compute"
        raise DataError("is a recipe of a language model; a sweep fits test NE", where=str(source), remedy=remedy)
    return recipe


def study_faults(
    job: FaultyJob,
    *,
    devices: Sequence[int] = (REFERENCE_DEVICES,),
    replicas: Sequence[int] = (12,),
    days: float = 30.0,
    runs: int = 8,
    seed: int = 0,
    on_row: Callable[[FaultStudyRow], object] | None = None,
) -> list[FaultStudyRow]:
    """Simulate the policies ``restart``, ``replicas`` and ``decoupled`` on clusters of several sizes.

    Args:
        job: Settings of all jobs. Its ``between_s`` is that of 98,304 devices; others fail in proportion to
            their number. With ``save_s``, checkpoints have the interval that loses least.
        devices: Sizes of clusters.
        replicas: Numbers of replicas that the cluster is divided into.
        days: Simulated duration of a run.
        runs: Number of runs, each with other failures.
        seed: Seed of the first run.
        on_row: Function called with each finished row.

    Raises:
        PlanError: If a number is not positive, there are fewer than two runs, or more replicas than devices.
    """
    _check_study(devices, replicas, days, runs)
    rows = []
    for size in devices:
        between = job.between_s * REFERENCE_DEVICES / size
        interval = best_checkpoint_interval(between, job.save_s) if job.save_s else job.interval_s
        of_size = replace(job, between_s=between, interval_s=interval)
        jobs = [replace(of_size, policy="restart", replicas=1)]
        jobs += [replace(of_size, policy="replicas", replicas=count) for count in replicas]
        jobs += [replace(of_size, policy="decoupled", replicas=count) for count in replicas]
        for one in jobs:
            found = [simulate_faults(one, days * _DAY, seed + number) for number in range(runs)]
            shares = {use: math.fsum(getattr(run, use) / run.elapsed for run in found) / runs for use in _USES}
            rows.append(
                FaultStudyRow(
                    size,
                    one,
                    _share_interval([run.effective for run in found]),
                    shares,
                    sum(run.failures for run in found) / runs,
                    _formula(one),
                )
            )
            if on_row is not None:
                on_row(rows[-1])
    return rows


def _check_study(devices: Sequence[int], replicas: Sequence[int], days: float, runs: int) -> None:
    for name, values in (("devices", devices), ("replicas", replicas)):
        if min(values, default=0) < 1:
            what = f"{min(values):,} is not above 0" if values else "is empty"
            raise PlanError(what, where=name, remedy="give numbers of 1 or more")
    if not 0 < days < math.inf:
        raise PlanError(f"is {days:g}", where="days", remedy="give a number above 0")
    if runs < 2:
        raise PlanError(f"is {runs}", where="runs", remedy="give at least 2, which an interval needs")
    if max(replicas) > min(devices):
        what = f"{min(devices):,} devices cannot be divided into {max(replicas):,} replicas"
        raise PlanError(what, where="replicas", remedy="give fewer replicas, or more devices")


def _share_interval(shares: Sequence[float]) -> SeedMean:
    """Return the mean of shares with its interval, which ends at 0 and 1."""
    found = mean_interval(shares)
    return replace(found, low=max(0.0, found.low), high=min(1.0, found.high))


@dataclass(frozen=True)
class PlanSize:
    """Properties of a planned job that determine the effect of failures.

    Attributes:
        devices: Number of devices.
        replicas: Number of whole copies of the model, each on devices of its own.
        step_s: Predicted seconds of a step without failures.
    """

    devices: int
    replicas: int
    step_s: float


def planned_job(path: str | Path) -> PlanSize:
    """Return the job of the best plan of a ``plan.json``, for :func:`study_faults`.

    Args:
        path: Path of the file, of a language or a recommendation model; the latter has one copy of its tables.

    Raises:
        PlanError: If the file cannot be read, or is damaged.
    """
    content = read_plan(path)
    try:
        best = content["plans"][0]
        layout = best.get("layout", {})
        replicas = int(layout.get("data", 1)) // int(layout.get("shards", layout.get("data", 1)))
        return PlanSize(int(content["devices"]), max(1, replicas), float(best["seconds"]))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"holds no plan with a step time ({error!r})", where=str(path), remedy="plan again") from error


def _formula(job: FaultyJob) -> float:
    if job.policy == "restart":
        if job.save_s:
            return effective_with_checkpoints(job.between_s, job.repair_s, job.interval_s, job.save_s)
        return max(0.0, 1 - job.repair_s / job.between_s)
    if job.policy == "decoupled":
        lost = job.repair_s + job.merge_steps * job.step_s / 2
        return max(0.0, 1 - lost / job.between_s / job.replicas)
    stall = job.detect_s + job.resume_s + job.step_s / 2
    effective = effective_with_replicas(job.between_s, stall, max(stall, job.repair_s), job.replicas)
    return max(0.0, effective) * job.step_s / (job.step_s + job.consensus_s)
