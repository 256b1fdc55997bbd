"""Operations on runs of any model: train, evaluate, compare, report.

Data comes from ``cordillera.data``, a model from ``cordillera.models``, the loop from ``cordillera.training``, a folder
from ``cordillera.run``. The recipe's model decides which: :mod:`cordillera.workflows.ranking` or
:mod:`cordillera.workflows.language`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cordillera import recipe as recipes
from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.frames import FrameLike
from cordillera.distributed.fault_tolerance.events import FOLDER
from cordillera.embeddings.dynamic_tables import DynamicTables
from cordillera.embeddings.table_deltas import TableDelta
from cordillera.errors import CheckpointError, RunError
from cordillera.files import at_home, is_there
from cordillera.recipe import LanguageRecipe, RankingRecipe
from cordillera.reports.language.comparison import LanguageComparison, compare_language
from cordillera.reports.language.replicas import write_replicas_page
from cordillera.reports.language.run import write_language_report
from cordillera.reports.ranking.comparison import Comparison
from cordillera.reports.ranking.comparison import compare as compare_ranking
from cordillera.reports.ranking.run import write_report
from cordillera.run import SEARCH_FILE, Run, check_recipe, kept_changes
from cordillera.training import checkpoints
from cordillera.training.language.trainer import LanguageEvaluation
from cordillera.training.ranking.evaluation import Evaluation
from cordillera.training.ranking.run_deltas import RunDelta, write_run_delta
from cordillera.training.ranking.scoring import best_checkpoint, load_weights
from cordillera.workflows import language, ranking
from cordillera.workflows.architectures.search import report_search
from cordillera.workflows.evaluation.language_files import (
    ChoiceEvaluation,
    OnTokens,
    TextEvaluation,
    evaluate_chat_file,
    evaluate_language_file,
    holds_chats,
)
from cordillera.workflows.evaluation.other_files import evaluate_file, score_file
from cordillera.workflows.language import LanguageOutcome
from cordillera.workflows.processes import Say, silent
from cordillera.workflows.ranking import Outcome
from cordillera.workflows.trained import features_of, model_of, recipe_of, start_of


def train(
    recipe: RankingRecipe | LanguageRecipe | Run,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    processes: int | None = None,
    changes: Sequence[str] = (),
    on_step: Callable[[dict[str, Any], Any, int], None] | None = None,
    say: Say = silent,
) -> Outcome | LanguageOutcome:
    """Train a recipe into a run folder, evaluate it and write its report.

    Args:
        recipe: Recipe to train. With ``resume`` it may be the run; a recipe is not read then, as the run has its own.
        folder: Folder of the run. Default: ``runs/NAME``, or ``runs/NAME-2`` and so on if that exists.
        resume: Whether to continue the run in ``folder`` from its newest checkpoint, with its own recipe.
        processes: Number of processes on this machine; see :func:`cordillera.workflows.language.train` for language
            models. Default: ``parallel.processes`` of the recipe of a ranking model.
        changes: Strings ``section.key=value`` with which a run continues: of its mesh, of how often something is
            recorded or saved, or of its length (``training.epochs``), if no learning rate depends on it.
        on_step: Function called after every step with the newest log record (empty at steps that log nothing), the
            progress and the total number of steps.
        say: Function called with one line of text at each stage, such as ``print``. Default: nothing is said.

    Returns:
        The run with its report and evaluation. Ctrl-C and SIGTERM end training after the step at hand: everything is
        saved, and ``report.ended`` is ``interrupted``. A program that goes on to something else looks at it.

    Raises:
        RunError: If the folder exists (without ``resume``) or does not (with it), a change is of a key that a
            resumed run keeps, or there are changes without ``resume``.
        CheckpointError: If the newest checkpoint is corrupt.
        DataError: If the data is not available or not acceptable.
        PlanError: If the mesh does not fit the model or the processes.
        RecipeError: If several processes cannot train what the recipe asks for.
        TrainingError: If the loss is not finite.
    """
    if not isinstance(recipe, (RankingRecipe, LanguageRecipe, Run)):
        raise RunError(
            f"a recipe is needed, got {recipe!r:.80}",
            where="train",
            remedy="give load_recipe(NAME or PATH), or with resume = True a folder, as train(Run(FOLDER))",
        )
    if processes is not None and processes < 1:
        raise RunError(f"must be at least 1, got {processes}", where="processes")
    if isinstance(recipe, Run):
        folder, resume = recipe.folder, True
    if changes and not resume:
        raise RunError(
            "are for a run that goes on", where="changes", remedy="give them to load_recipe as overrides, or resume"
        )
    if resume:
        if folder is None:
            raise RunError("name the run folder that is to be resumed", where="resume")
        file = Run(folder).recipe_file
        recipe = recipes.load(file, changes)
        if kept := kept_changes(recipes.load(file), recipe):
            why = f"a resumed run keeps its recipe, but for few keys: {'; '.join(kept)}"
            raise RunError(
                why,
                where="changes",
                remedy="start a new run to change it, from this one's weights if training.start names it",
            )
    if isinstance(recipe, LanguageRecipe):
        return language.train(recipe, folder, resume=resume, processes=processes, on_step=on_step, say=say)
    assert isinstance(recipe, RankingRecipe)
    if recipe.training.start is not None and not resume:  # fails before the data is read
        start_of(recipe)
    return ranking.train(recipe, folder, resume=resume, processes=processes, on_step=on_step, say=say)


def evaluate(
    run: Run | Path | str,
    split: str | None = None,
    *,
    file: Path | str | None = None,
    rows: FrameLike | None = None,
    tokens: int | None = None,
    dtype: str | None = None,
    on_tokens: OnTokens | None = None,
) -> Evaluation | LanguageEvaluation | TextEvaluation | ChoiceEvaluation:
    """Evaluate a ``run`` on one split of its data and write ``evaluation.json`` (or ``evaluation-SPLIT.json``) into it.

    Args:
        run: Run; with ``file``, also a name, checkpoint or GGUF file of a language model.
        file: Files of other samples with labels, or of text, chats or questions for a language model, in place of a
            split; nothing is written then. See
            :func:`~cordillera.workflows.evaluation.other_files.evaluate_file`,
            :func:`~cordillera.workflows.evaluation.language_files.evaluate_language_file` and
            :func:`~cordillera.workflows.evaluation.language_files.evaluate_chat_file`.
        rows: Labelled samples in memory in place of a split, as :func:`cordillera.load_recipe` takes them, for a run of
            a ranking model; nothing is written.
        split: ``train``, ``validation`` or ``test``; None for ``test``. A language model has ``validation`` only.
        tokens: Approximate largest number of tokens of held-out text, for a language model. Default:
            ``training.evaluation_tokens`` of its recipe; with ``file``, all.
        dtype: Data type of a language model's weights, with ``file``. Default: ``float32``.
        on_tokens: Function that is called with the number of tokens read and of all, with ``file``.

    Raises:
        RunError: If it is not a run, has no such split, or ``tokens`` is given for a ranking model or a run of
            ``grpo``.
        CheckpointError: If there is no checkpoint, or it is corrupt.
        Interrupted: If Ctrl-C or SIGTERM ended the evaluation of a language model.
    """
    _check_one_of({"split": split, "file": file, "rows": rows})
    if rows is not None:
        _check_one_of({"rows": rows, "tokens": tokens, "dtype": dtype})
        return evaluate_file(run, rows=rows)
    if file is not None and not _is_ranking(run):
        model = run.folder if isinstance(run, Run) else run
        work = evaluate_chat_file if holds_chats(file) else evaluate_language_file
        return work(model, file, dtype=dtype or "float32", tokens=tokens, on_tokens=on_tokens)
    if dtype is not None:
        raise RunError("is for a language model and a file", where="dtype", remedy="leave it out")
    if not isinstance(run, Run) and not Path(run, "recipe.toml").is_file():
        remedy = "name a folder that `cordillera train` made, or give --file to evaluate a language model on text"
        raise RunError("is not a run folder (it holds no recipe.toml)", where=str(run), remedy=remedy)
    run = run if isinstance(run, Run) else Run(run)
    recipe = recipes.load(run.recipe_file)
    if isinstance(recipe, LanguageRecipe):
        return language.evaluate(run, recipe, split or "validation", tokens)
    if tokens is not None:
        raise RunError(
            "bounds the held-out text of a language model, this run has none", where="tokens", remedy="leave it out"
        )
    return ranking.evaluate(run, split or "test") if file is None else evaluate_file(run, file)


def _is_ranking(run: Run | Path | str) -> bool:
    """Whether something is the run of a ranking model."""
    file = run.recipe_file if isinstance(run, Run) else Path(run).expanduser() / "recipe.toml"
    return file.is_file() and not isinstance(recipes.load(file), LanguageRecipe)


def compare(
    runs: Sequence[Run | Path | str], file: Path | str | None = None, *, rows: FrameLike | None = None
) -> Comparison | LanguageComparison:
    """Compare finished runs with the first; seeds of one ranking recipe become one row with intervals.

    Runs that are evaluated on the same ``rows`` or ``file`` have paired intervals over these samples.

    Args:
        runs: Runs, or their folders; folders of searches, and those that hold runs, are left out, with a note.
        rows: Labelled samples in memory in place of a file, as :func:`cordillera.load_recipe` takes them.
        file: File, folder or pattern of labelled samples on which ranking runs are evaluated for the comparison; None
            for the evaluations that they hold.

    Raises:
        RunError: If one of them is not a run, some are of ranking and some of language models, or a ``file`` is given
            for language models.
        DataError: If one has no evaluation, their splits differ, or the file cannot be read.
    """
    if isinstance(runs, str | Path | Run):
        raise RunError(f"must be a list of runs, got {runs!r}", where="runs", remedy="give [FIRST, SECOND]")
    _check_one_of({"file": file, "rows": rows})
    if rows is not None and hasattr(rows, "read_all"):  # a stream of Arrow, which is read once
        rows = rows.read_all()
    left_out = {str(one): what for one in runs if not isinstance(one, Run) and (what := _no_run(at_home(one)))}
    kept = [one for one in runs if isinstance(one, Run) or str(one) not in left_out]
    found = _compare([one if isinstance(one, Run) else Run(one) for one in kept or runs], file, rows)
    found.notes.extend(f"{one} is {what}, and is left out." for one, what in left_out.items())
    return found


def _no_run(folder: Path) -> str:
    """Return what a folder is that holds candidates or runs and no model of its own; empty for any other."""
    if is_there(folder / SEARCH_FILE):
        return "the folder of a search, which holds no model"
    holds_runs = not is_there(folder / "recipe.toml") and any(folder.glob("*/recipe.toml"))
    return "a folder of runs, which can be named one by one" if holds_runs else ""


def _compare(opened: Sequence[Run], file: Path | str | None, rows: FrameLike | None) -> Comparison | LanguageComparison:
    kinds = [isinstance(recipes.load(run.recipe_file), LanguageRecipe) for run in opened]
    if all(kinds) and (file is not None or rows is not None):
        raise RunError(
            "is for runs of ranking models",
            where="file" if rows is None else "rows",
            remedy="`cordillera evaluate RUN --file` one by one",
        )
    if all(kinds):
        return compare_language(opened)
    if any(kinds):
        others = [str(run.folder) for run, kind in zip(opened, kinds, strict=True) if kind != kinds[0]]
        raise RunError(
            "is a run of another kind of model than the first",
            where=others[0],
            remedy=f"compare runs of ranking models and of language models apart: leave out {', '.join(others)}",
        )
    if file is None and rows is None:
        return compare_ranking(opened)
    scored = [score_file(run, file, rows=rows) for run in opened]
    return compare_ranking(opened, [one for one, _ in scored], samples=[kept for _, kept in scored])


def _check_one_of(given: dict[str, Any]) -> None:
    """Check that at most one of some arguments is given, and that those for text are text."""
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        first = named[0] if named[0] == "rows" else f"a {named[0]}"
        raise RunError(f"does not go with {first}", where=named[1], remedy="leave one of them out")
    for name in {"split", "file"} & set(named):
        if not isinstance(given[name], str | Path):
            what = "; tables are given as rows=" if hasattr(given[name], "columns") else ""
            raise RunError(f"must be text, got {type(given[name]).__name__}{what}", where=name)


def report(run: Run | Path | str) -> Path:
    """Write a run's ``report.html`` again and return its path; with replicas, ``replicas.html`` as well.

    The folder of a search is taken in place of that of a ``run``. ``report.html`` is written also where the events of
    replicas are damaged.

    Raises:
        DataError: If a file of the run does not have the expected content.
        RunError: If it is not a run, a file is damaged, such as the events of replicas, or nothing can be written.
    """
    if not isinstance(run, Run) and is_there(Path(run) / SEARCH_FILE):
        return report_search(run)
    run = run if isinstance(run, Run) else Run(run)
    recipe = recipes.load(run.recipe_file)
    if not isinstance(recipe, LanguageRecipe):
        return write_report(run)
    try:
        if any((run.folder / FOLDER).glob("*.jsonl")) and recipe.fault_tolerance.replicas > 1:
            write_replicas_page(run)
    finally:  # the report does without events that are damaged, or of more replicas than the run goes on with
        path = write_language_report(run)
    return path


def make_delta(run: Run | Path | str, out: Path | str, *, since: int, to: int | None = None) -> TableDelta:
    """Write what changed in a ``run`` with dynamic tables after step ``since`` to the file ``out``.

    Args:
        since: Step of an earlier checkpoint of the run, which a copy of it has.
        to: Step of a checkpoint. Default: the step of the weights with which the run predicts.

    Returns:
        The changes of the tables.

    Raises:
        RunError: If it is not a run with dynamic tables, or the disk is full.
        CheckpointError: If there is no checkpoint of step ``to``, it is corrupt, or ``since`` is too long ago.
    """
    run = run if isinstance(run, Run) else Run(run)
    recipe = recipe_of(run)
    if to is None:
        checkpoint = best_checkpoint(run, use_best=recipe.training.patience is not None)
    else:
        checkpoint = _checkpoint(run, to)
    tables = _dynamic_tables(run, recipe, checkpoint)
    return write_run_delta(out, tables, checkpoint, since)


def apply_delta(run: Run | Path | str, file: Path | str) -> Path:
    """Make the later checkpoint of a ``file`` of :func:`make_delta` in a copy of its run; return its folder.

    Raises:
        RunError: If it is not a copy of that run, another process writes it, or the disk is full.
        CheckpointError: If the file is damaged, or leads from a checkpoint that the copy has not; nothing is changed.
    """
    run = run if isinstance(run, Run) else Run(run)
    recipe, delta = recipe_of(run), RunDelta(file)
    check_recipe(delta.state.get("recipe"), recipe, run.recipe_file)
    with run.lock():
        tables = _dynamic_tables(run, recipe, _checkpoint(run, delta.tables.base))
        return delta.apply(tables, run.checkpoints)


def _checkpoint(run: Run, step: int) -> checkpoints.Checkpoint:
    known = checkpoints.steps(run.checkpoints)
    if step not in known:
        raise CheckpointError(
            f"holds no checkpoint of step {step:,}",
            where=str(run.checkpoints),
            remedy=f"it has those of {', '.join(f'{one:,}' for one in known) or 'no step'}",
        )
    return checkpoints.load(checkpoints.folder_of(run.checkpoints, step))


def _dynamic_tables(run: Run, recipe: RankingRecipe, checkpoint: checkpoints.Checkpoint) -> DynamicTables:
    """Return the tables of a run, as of a checkpoint."""
    if recipe.tables.dynamic is None:
        raise RunError("has no dynamic tables", where=str(run.folder), remedy="copy its newest checkpoint whole")
    features = features_of(run, Encoder.load(run.folder / "encoder"))
    model = model_of(recipe, features)
    load_weights(model, checkpoint)
    assert isinstance(model.tables, DynamicTables)
    return model.tables
