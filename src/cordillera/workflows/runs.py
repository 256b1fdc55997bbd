"""What is done with a run, whatever its model is: train, evaluate, compare, report.

Data comes from ``cordillera.data``, a model from ``cordillera.models``, the loop from ``cordillera.training``, a folder
from ``cordillera.run``. The recipe's model decides which: :mod:`cordillera.workflows.ranking` or
:mod:`cordillera.workflows.language`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cordillera import recipe as recipes
from cordillera.errors import RunError
from cordillera.recipe import LanguageRecipe, RankingRecipe
from cordillera.reports.language.comparison import LanguageComparison, compare_language
from cordillera.reports.language.run import write_language_report
from cordillera.reports.ranking.comparison import Comparison
from cordillera.reports.ranking.comparison import compare as compare_ranking
from cordillera.reports.ranking.run import write_report
from cordillera.run import Run
from cordillera.training.language.trainer import LanguageEvaluation
from cordillera.training.ranking.evaluation import Evaluation
from cordillera.workflows import language, ranking
from cordillera.workflows._say import Say, silent
from cordillera.workflows.language import LanguageOutcome
from cordillera.workflows.ranking import Outcome


def train(
    recipe: RankingRecipe | LanguageRecipe | Run,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    processes: int | None = None,
    parallel: Sequence[str] = (),
    on_step: Callable[[dict[str, Any], Any, int], None] | None = None,
    say: Say = silent,
) -> Outcome | LanguageOutcome:
    """Train a recipe into a run folder, evaluate it and write its report.

    Args:
        recipe: Recipe to train; with ``resume`` it may be the run.
        folder: Folder of the run. Default: ``runs/NAME``, or ``runs/NAME-2`` and so on if that exists.
        resume: Whether to continue the run in ``folder`` from its newest checkpoint, with its own recipe.
        processes: Number of processes on this machine; see :func:`cordillera.workflows.language.train` for language
            models. Default: ``parallel.processes`` of the recipe of a ranking model.
        parallel: Strings ``parallel.key=value`` with which a run continues on another mesh.
        on_step: Function called after every step with the newest log record (empty at steps that log nothing), the
            progress and the total number of steps.
        say: Function called with one line of text at each stage.

    Raises:
        RunError: If the folder exists (without ``resume``) or does not (with it).
        CheckpointError: If the newest checkpoint is corrupt.
        DataError: If the data is not available or not acceptable.
        PlanError: If the mesh does not fit the model or the processes.
        RecipeError: If several processes cannot train what the recipe asks for.
        TrainingError: If the loss is not finite.
    """
    if isinstance(recipe, Run):
        folder, resume = recipe.folder, True
    if resume:
        if folder is None:
            raise RunError("name the run folder that is to be resumed", where="--resume")
        recipe = recipes.load(Run(folder).recipe_file, parallel)
    if isinstance(recipe, LanguageRecipe):
        return language.train(recipe, folder, resume=resume, processes=processes, on_step=on_step, say=say)
    assert isinstance(recipe, RankingRecipe)
    return ranking.train(recipe, folder, resume=resume, processes=processes, on_step=on_step, say=say)


def evaluate(
    run: Run | Path | str, split: str | None = None, *, tokens: int | None = None
) -> Evaluation | LanguageEvaluation:
    """Evaluate a ``run`` on one split of its data and write ``evaluation.json`` (or ``evaluation-SPLIT.json``) into it.

    Args:
        split: ``train``, ``validation`` or ``test``; None for ``test``. A language model has ``validation`` only.
        tokens: Approximate largest number of tokens of held-out text, for a language model. Default:
            ``training.evaluation_tokens`` of its recipe.

    Raises:
        RunError: If it is not a run, has no such split, or ``tokens`` is given for a ranking model.
        CheckpointError: If there is no checkpoint, or it is corrupt.
        Interrupted: If Ctrl-C or SIGTERM ended the evaluation of a language model.
    """
    run = run if isinstance(run, Run) else Run(run)
    recipe = recipes.load(run.recipe_file)
    if isinstance(recipe, LanguageRecipe):
        return language.evaluate(run, recipe, split or "validation", tokens)
    if tokens is not None:
        raise RunError(
            "bounds the held-out text of a language model, this run has none", where="--tokens", remedy="leave it out"
        )
    return ranking.evaluate(run, split or "test")


def compare(runs: Sequence[Run | Path | str]) -> Comparison | LanguageComparison:
    """Compare finished runs with the first; seeds of one ranking recipe become one row with intervals.

    Raises:
        RunError: If one of them is not a run, or some are of ranking and some of language models.
        DataError: If one has no evaluation, or their splits differ.
    """
    opened = [run if isinstance(run, Run) else Run(run) for run in runs]
    kinds = [isinstance(recipes.load(run.recipe_file), LanguageRecipe) for run in opened]
    if all(kinds):
        return compare_language(opened)
    if any(kinds):
        other = opened[kinds.index(not kinds[0])]
        raise RunError("is a run of another kind of model than the first", where=str(other.folder))
    return compare_ranking(opened)


def report(run: Run | Path | str) -> Path:
    """Write a run's ``report.html`` again and return its path."""
    run = run if isinstance(run, Run) else Run(run)
    is_language = isinstance(recipes.load(run.recipe_file), LanguageRecipe)
    return write_language_report(run) if is_language else write_report(run)
