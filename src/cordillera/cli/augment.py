"""``cordillera augment``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cordillera.cli._show import AsJson, Changes, CommandOutput, Field, Quiet, Sheet, progress_bar, to_type
from cordillera.errors import Interrupted

if TYPE_CHECKING:
    from rich.console import Console

    from cordillera.recipe import RankingRecipe
    from cordillera.training.ranking.teachers.augmentation import AugmentationProgress
    from cordillera.workflows import AugmentationOutcome


def augment(
    file: Annotated[Path, typer.Argument(help="TOML file with streams, their schema and their teacher.")],
    set_: Changes = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="No more files will come: close the windows that are open.")
    ] = False,
    students: Annotated[
        bool, typer.Option("--students", help="Afterwards, train the recipes that the streams name.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Join late labels with events and add a teacher's scores.

    Each event is scored once. Students read the Parquet files that are written.
    """
    from cordillera import workflows
    from cordillera.workflows.streams.augmentation import load_streams, student_recipes

    config = load_streams(file, set_ or ())
    recipes = student_recipes(config) if students else {}  # mistakes in them are found before the work
    with CommandOutput(as_json) as answer:
        try:
            with _progress(answer.notes, quiet=quiet) as (on_step, say):
                outcome = workflows.augment(config, finish=finish, on_step=on_step, say=say)
        except KeyboardInterrupt:
            raise Interrupted(
                "all but the newest rows is saved", where=config.out, remedy="give the same command again"
            ) from None
        _print(answer, outcome)
        _train_students(answer, recipes, Path(config.out), quiet)


@contextlib.contextmanager
def _progress(out: Console, *, quiet: bool) -> Iterator[tuple[Any, Callable[[str], object]]]:
    """Show the numbers of rows read and written; yield ``on_step`` and ``say``."""
    with progress_bar(out, quiet) as (bar, task, say):

        def on_step(progress: AugmentationProgress) -> None:
            read, written = progress.counts.get("events", 0), progress.counts.get("examples", 0)
            bar.update(task, description=f"augmenting  {read:,} events read  {written:,} examples written")

        yield on_step, say


def _train_students(answer: CommandOutput, recipes: Mapping[str, RankingRecipe], out: Path, quiet: bool) -> None:
    """Train the recipes of streams, by their names."""
    from cordillera import workflows
    from cordillera.cli._show import evaluation_table, group_tables, training_progress
    from cordillera.run import next_path

    students: list[dict[str, Any]] = []
    for stream, recipe in recipes.items():
        with training_progress(answer.notes, quiet=quiet) as (on_student, say):
            say(f"student of {stream}")
            folder = next_path(out / stream, "run")
            try:
                student = workflows.train(recipe, folder, on_step=on_student, say=say)
            except KeyboardInterrupt:  # before its first step, or after its last one
                again = "give the same command again"
                if (folder / "recipe.toml").is_file():
                    again = f"continue with: {to_type('train', folder, '--resume')}"
                raise Interrupted(f"the student of {stream} is not finished", remedy=again) from None
        ended, folder = student.report.ended, student.run.folder
        students.append({"stream": stream, "ended": ended, "run": folder})
        if ended == "interrupted":
            answer.say("interrupted; everything is saved", students=students)
            answer.say(f"  -> continue with: {to_type('train', folder, '--resume')}")
            raise typer.Exit(130)
        assert isinstance(student, workflows.Outcome)
        students[-1]["evaluation"] = student.evaluation
        if student.evaluation is not None:
            for table in (evaluation_table(student.evaluation), *group_tables(student.evaluation)):
                answer.say(table)
        answer.say(f"report: {folder / 'report.html'}", students=students)


def _print(answer: CommandOutput, outcome: AugmentationOutcome) -> None:
    from datetime import datetime

    progress = outcome.progress
    counts = Counter(progress.counts)
    events, twice, labels = counts["events"], counts["duplicates"], counts["labels"]
    answer.say(
        f"{events - twice:,} events{f' in {events:,} rows' if twice else ''}; {labels:,} labels",
        **{name: counts[name] for name in ("events", "duplicates", "labels", *_DROPPED)},
    )
    for name, meaning in _DROPPED.items():
        if counts[name]:
            answer.say(f"{counts[name]:,} {meaning}")
    written = Sheet("examples", Field("stream"), Field("written", form="{:,}"))
    for one in progress.examples.items():
        written.add(*one)
    scored = Sheet("events that the teacher has scored", Field("version"), Field("events", form="{:,}"))
    for one in progress.calls.items():
        scored.add(*one)
    answer.tables(examples=written, scored=scored)
    if progress.waiting:
        until = ""
        if progress.watermark is not None:
            time = datetime.fromtimestamp(progress.watermark, UTC)
            until = f"; all rows are there until {time:%Y-%m-%d %H:%M:%S} UTC"
        answer.say(f"{progress.waiting:,} events wait for their labels{until}")
        if progress.awaited:
            answer.say(f"  -> the next rows must be of {progress.awaited}; if no more files come, give --finish")
    waits = {name: getattr(progress, name) for name in ("waiting", "watermark", "awaited")}
    answer.say(f"written: {outcome.folder}", **waits, folder=outcome.folder)


_DROPPED = {
    "late_events": "events came after rows of their time were complete, and were left out (join.lateness_s)",
    "late_labels": "labels came after their events were complete, and were left out (join.lateness_s)",
    "labels_after_window": "labels are of after their window, and do not count (join.window_s)",
    "labels_without_event": "labels had no event",
}
