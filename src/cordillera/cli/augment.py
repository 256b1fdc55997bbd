"""``cordillera augment``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cordillera.errors import Interrupted

if TYPE_CHECKING:
    from rich.console import Console

    from cordillera.workflows import AugmentationOutcome


def augment(
    file: Annotated[Path, typer.Argument(help="TOML file with streams, their schema and their teacher.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override one key: section.key=value.")] = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="No more files will come: close the windows that are open.")
    ] = False,
    students: Annotated[
        bool, typer.Option("--students", help="Afterwards, train the recipes that the streams name.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
) -> None:
    """Join late labels with events and add a teacher's scores.

    Each event is scored once. Students read the Parquet files that are written.
    """
    from cordillera import workflows
    from cordillera.cli._show import augmentation_progress, console, evaluation_table, group_tables, training_progress
    from cordillera.run import next_folder
    from cordillera.workflows.streams.augmentation import load_streams, student_recipes

    out, config = console(), load_streams(file, set_ or ())
    recipes = student_recipes(config) if students else {}  # mistakes in them are found before the work
    try:
        with augmentation_progress(out, quiet=quiet) as (on_step, say):
            outcome = workflows.augment(config, finish=finish, on_step=on_step, say=say)
    except KeyboardInterrupt:
        raise Interrupted(
            "all but the newest rows is saved", where=config.out, remedy="give the same command again"
        ) from None
    _print(out, outcome)
    for stream, recipe in recipes.items():
        with training_progress(out, quiet=quiet) as (on_student, say):
            say(f"student of {stream}")
            folder = next_folder(Path(config.out) / stream, "run")
            student = workflows.train(recipe, folder, on_step=on_student, say=say)
        if student.report.ended == "interrupted":
            out.print("interrupted; everything is saved")
            out.print(f"  -> continue with: cordillera train {student.run.folder} --resume", markup=False)
            raise typer.Exit(130)
        assert isinstance(student, workflows.Outcome)
        if student.evaluation is not None:
            out.print(evaluation_table(student.evaluation), *group_tables(student.evaluation))
        out.print(f"report: {student.run.folder / 'report.html'}", markup=False)


def _print(out: Console, outcome: AugmentationOutcome) -> None:
    from datetime import datetime, timezone

    from cordillera.cli._show import titled_table

    progress = outcome.progress
    counts = Counter(progress.counts)
    events, twice, labels = counts["events"], counts["duplicates"], counts["labels"]
    out.print(f"{events:,} events, {twice:,} of them duplicates; {labels:,} labels")
    for name, meaning in _DROPPED.items():
        if counts[name]:
            out.print(f"{counts[name]:,} {meaning}")
    table = titled_table("examples", "stream", right=("written",))
    for stream, count in progress.examples.items():
        table.add_row(stream, f"{count:,}")
    out.print(table)
    table = titled_table("events that the teacher has scored", "version", right=("events",))
    for version, count in progress.calls.items():
        table.add_row(version, f"{count:,}")
    out.print(table)
    if progress.waiting:
        until = ""
        if progress.watermark is not None:
            time = datetime.fromtimestamp(progress.watermark, timezone.utc)
            until = f"; all rows are there until {time:%Y-%m-%d %H:%M:%S} UTC"
        out.print(f"{progress.waiting:,} events wait for their labels{until}")
        if progress.awaited:
            out.print(f"  -> the next rows must be of {progress.awaited}; if no more files come, give --finish")
    out.print(f"written: {outcome.folder}", markup=False)


_DROPPED = {
    "late_events": "events came after rows of their time were complete, and were left out (join.lateness_s)",
    "late_labels": "labels came after their events were complete, and were left out (join.lateness_s)",
    "labels_after_window": "labels are of after their window, and do not count (join.window_s)",
    "labels_without_event": "labels had no event",
}
