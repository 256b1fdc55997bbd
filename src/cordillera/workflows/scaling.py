"""Which model, on how many tokens: an IsoFLOP study of a recipe, as a function (Grattafiori et al. 2024, 3.2.1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from cordillera import recipe as recipes
from cordillera.data.language.corpora import prepare_corpora
from cordillera.distributed.job.environment import place_in_job
from cordillera.errors import PlanError, RecipeError
from cordillera.models.language.flops import training_flops
from cordillera.recipe import LanguageRecipe
from cordillera.run import Run
from cordillera.training.language.trainer import LanguageWatcher
from cordillera.training.scaling.isoflop_plan import IsoFlopOutcome, plan_runs, sizes_for, train_plan
from cordillera.workflows import language

_SAMPLE = 50  # iterations whose documents tell what attention costs


def isoflop(
    source: str | Path,
    budgets: Sequence[float],
    *,
    sizes: int = 6,
    tokens_per_parameter: float = 20.0,
    target: float | None = None,
    overrides: Sequence[str] = (),
    folder: Path | str | None = None,
    watch: LanguageWatcher | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> IsoFlopOutcome:
    """Train a language model in several sizes for each budget and fit the best split into parameters and tokens.

    Runs that are finished are not trained again and interrupted ones are resumed, so a study that was stopped goes on
    where it was. No run sees more than the text holds, ``data.epochs`` times over.

    Args:
        source: A shipped recipe's name or a path.
        budgets: Training FLOPs of each run of one curve.
        sizes: Models for each budget.
        tokens_per_parameter: Where the optimum is expected.
        target: FLOPs to foretell the best split of.
        overrides: Applied to all runs.
        folder: Where everything goes. Default: ``runs/NAME-isoflop``.
        watch: See :func:`cordillera.workflows.train`.
        say: Called with one line of text at each stage.

    Raises:
        RecipeError: it is not the recipe of a language model.
        PlanError: budgets or sizes do not make a study, or a launcher has started this process.
        RunError: a folder of the study holds another run.
        Interrupted: training was; what was trained is saved.
        DataError: the text cannot be had, or nothing could be trained.
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
        return language.train(one, place, resume=(place / "recipe.toml").is_file(), watch=watch).run

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
