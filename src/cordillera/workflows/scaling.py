"""Studies of scale: IsoFLOP studies of language models (Grattafiori et al. 2024, 3.2.1), sweeps of ranking models."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cordillera import recipe as recipes
from cordillera.data.language.corpora import prepare_corpora
from cordillera.distributed.job.environment import place_in_job
from cordillera.errors import DataError, Interrupted, PlanError, RecipeError, RunError
from cordillera.models.language.flops import training_flops
from cordillera.recipe import LanguageRecipe, RankingRecipe
from cordillera.run import Run, write_atomically
from cordillera.training.language.trainer import LanguageStepCallback
from cordillera.training.ranking.trainer import StepCallback
from cordillera.training.scaling import power_law as scaling_laws
from cordillera.training.scaling.isoflop_plan import IsoFlopOutcome, plan_runs, sizes_for, train_plan
from cordillera.training.scaling.power_law import ScalingStudy
from cordillera.workflows import language
from cordillera.workflows._say import Say, silent
from cordillera.workflows.ranking import train
from cordillera.workflows.trained import card_of

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
    return train_plan(plan, parent, train, agrees=agrees, target=target, title=recipe.name, say=say)


def _language_recipe(source: str | Path, overrides: Sequence[str]) -> LanguageRecipe:
    recipe = recipes.load(source, overrides)
    if not isinstance(recipe, LanguageRecipe):
        message = f"must be that of a language model here, got {recipe.model.name!r}; `cordillera sweep` is for others"
        raise RecipeError(str(source), [("model.name", message)])
    return recipe


@dataclass
class Sweep:
    """Folder (with the runs, ``sweep.json`` and the plots), fitted law and path of the drawing of :func:`sweep`."""

    folder: Path
    study: ScalingStudy
    plot: Path


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
    """
    if len(sizes) < 3:
        raise DataError(f"a law needs at least three sizes, got {len(sizes)}", where="--size")
    first = _ranking_recipe(source, [*overrides, *shlex.split(sizes[0])])
    planned = []
    for number, size in enumerate(sizes):
        for seed in range(first.seed, first.seed + seeds):
            recipe = _ranking_recipe(source, [*overrides, *shlex.split(size), f"seed={seed}"])
            planned.append((f"size-{number + 1}-seed-{seed}", recipe))
    parent = Path(folder) if folder is not None else Path("runs") / f"{first.name}-sweep"
    runs = []
    for number, (name, recipe) in enumerate(planned, 1):
        place = parent / name
        exists = (place / "recipe.toml").is_file()
        if exists and recipes.load(place / "recipe.toml") != recipe:
            raise RunError(
                "holds a run of another recipe", where=str(place), remedy="choose another --run folder for this sweep"
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
    study = scaling_laws.study(scaling_laws.measure(runs), floor=bayes or 0.0)
    plot = parent / "sweep.png"
    scaling_laws.plot(study, [plot, parent / "sweep.svg"], bayes=bayes, title=f"{first.name}: test NE against FLOPs")
    write_atomically(parent / "sweep.json", study.to_json() + "\n")
    return Sweep(parent, study, plot)


def _ranking_recipe(source: str | Path, overrides: Sequence[str]) -> RankingRecipe:
    recipe = recipes.load(source, overrides)
    if not isinstance(recipe, RankingRecipe):
        remedy = "for language models, `cordillera isoflop` fits losses against compute"
        raise DataError("is a recipe of a language model; a sweep fits test NE", where=str(source), remedy=remedy)
    return recipe
