"""Output that several commands share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from cordillera.cli._terminal import PlainConsole, ProgressLines, Terminal
from cordillera.distributed.job.environment import is_silent
from cordillera.errors import DataError, Interrupted, PlanError, RunError, printable
from cordillera.files import check_writable
from cordillera.numbers import fixed

if TYPE_CHECKING:
    from cordillera.training.language.trainer import LanguageEvaluation, LanguageProgress
    from cordillera.training.ranking.config import Progress as TrainingProgress
    from cordillera.training.ranking.evaluation import Evaluation


AsJson = Annotated[bool, typer.Option("--json", help="Print everything as one JSON document.")]
"""The option of every command that prints a table."""

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]
"""The option of commands that print progress and notes."""

Samples = Annotated[
    str,
    typer.Argument(
        help="Samples: a file (CSV, TSV or Parquet) with the columns of the training data, a folder or a pattern."
    ),
]
"""The argument of commands that read other samples than those of the recipe."""

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a recipe key: section.key=value, or key=value at the top level. Repeatable."),
]
"""The option of commands that take a recipe."""


def console(*, stderr: bool = False) -> Console:
    """Return the console of all commands: no markup, no automatic colouring, no lines cut when piped.

    In a job of several ranks, only rank 0 prints.

    Args:
        stderr: Whether to print to standard error, in every rank.
    """
    file = Terminal.of(sys.stderr if stderr else sys.stdout)
    silent = not stderr and is_silent()
    return PlainConsole(file, silent)


def echo(text: object, *, json: bool = False) -> None:
    """Print plain text, or with ``json`` JSON or TOML, to standard output with control characters escaped."""
    typer.echo(printable(text, lines=True, quoted=json))


def is_utf8() -> bool:
    """Return whether standard output is in UTF-8; escapes for what others lack are none that JSON and TOML know."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"


def print_file(text: str) -> None:
    """Print the ``text`` of a file; it is UTF-8 in any locale, unless it is shown in a terminal."""
    text = printable(text, lines=True)
    typer.echo(text if is_utf8() or sys.stdout.isatty() else text.encode())


def print_json(value: object) -> None:
    """Print a value as one JSON document; NaN and infinities, which JSON lacks, are null.

    In a job of several ranks, only rank 0 prints.
    """
    if not is_silent():
        echo(json.dumps(_plain(value), indent=1, ensure_ascii=not is_utf8(), allow_nan=False), json=True)


def _plain(value: object) -> object:
    """Return a value with its parts as JSON knows them."""
    if isinstance(value, Sheet):
        return _plain(value.records)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


class Field(NamedTuple):
    """A column of a :class:`Sheet`.

    Attributes:
        key: Key of its values in JSON.
        heading: Heading in the terminal. Default: the key, with spaces.
        form: Format of a value in the terminal, for ``str.format``, or a function that returns its text.
        within: Key of an object in JSON that holds the value beside those of other columns.
        right: Whether the column is aligned to the right. Default: if its values have a format.
        shown: Whether the terminal has the column too.
    """

    key: str
    heading: str | None = None
    form: str | Callable[[Any], str] = "{}"
    within: str | None = None
    right: bool | None = None
    shown: bool = True

    def text(self, value: object) -> str:
        """Return a value for the terminal; None is left blank."""
        if value is None:
            return ""
        if callable(self.form):
            return printable(self.form(value))
        text = self.form.format(value)
        return printable(text.replace("%", " %") if self.form.endswith("%}") else text)


class Sheet(Table):
    """A table for the terminal that keeps its values for JSON.

    Args:
        title: Text above the table.
        *fields: Its columns.

    Attributes:
        records: Its rows, as objects of the values by their columns' keys.
    """

    def __init__(self, title: str | None, *fields: Field) -> None:
        super().__init__(title=title, title_justify="left", box=None, pad_edge=False)
        self.fields = fields
        self.records: list[dict[str, Any]] = []
        for field in (one for one in fields if one.shown):
            heading = field.key.replace("_", " ") if field.heading is None else field.heading
            is_right = field.form != "{}" if field.right is None else field.right
            self.add_column(printable(heading), justify="right" if is_right else "left", overflow="fold")

    def add(self, *values: object) -> None:
        """Add a row of one value a column; None and NaN are null in JSON."""
        record: dict[str, Any] = {}
        for field, value in zip(self.fields, values, strict=True):
            place = record if field.within is None else record.setdefault(field.within, {})
            place[field.key] = value
        self.records.append(record)
        self.add_row(*(field.text(value) for field, value in zip(self.fields, values, strict=True) if field.shown))


class CommandOutput:
    """Output of a command: tables and lines, or with ``as_json`` one JSON document of their values at its end.

    It is a context; the document is printed where the command ends, unless by an error.

    Attributes:
        notes: Console of progress and notes: standard error if standard output is for JSON.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._out = console()
        self.notes = console(stderr=True) if as_json else self._out
        self.notes.quiet = is_silent()
        self._values: dict[str, object] = {}

    def __enter__(self) -> CommandOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.as_json and (kind is None or kind is typer.Exit):
            print_json(self._values)

    def keep(self, **values: object) -> None:
        """Keep values for the document."""
        self._values |= values

    @contextlib.contextmanager
    def within(self, group: str, name: str) -> Iterator[None]:
        """Put values printed in the block under ``group.name`` of the JSON document."""
        outer = self._values
        self._values = {}
        try:
            yield
        finally:
            entries: Any = outer.setdefault(group, {})
            entries[name], self._values = self._values, outer

    def say(self, what: str | Table, **values: object) -> None:
        """Print a line or a table, or keep the ``values`` that it shows for the document."""
        self.keep(**values)
        if not self.as_json:
            self._out.print(what)

    def tables(self, **sheets: Sheet) -> None:
        """Print tables, or keep their rows for the document under the tables' names."""
        for name, sheet in sheets.items():
            self.say(sheet, **{name: sheet})


def refuse(options: Mapping[str, object], task: str) -> None:
    """Refuse ``options`` that were given and have no effect on a ``task``; None and False are options that were not.

    Raises:
        RunError: If there is one.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise RunError(f"has no effect with {task}", where=name, remedy="leave it out")


def check_result(run: Path, name: str, remedy: str = "work on a copy of the run") -> None:
    """Check before the work that a result can be written into a run's folder, if it is one.

    Raises:
        RunError: If it cannot, with the ``remedy``.
    """
    if (run / "recipe.toml").is_file():
        try:
            check_writable(run / name)
        except PlanError as error:
            raise RunError(error.what, where=error.where, remedy=remedy) from error


@contextlib.contextmanager
def interruptions_told() -> Iterator[None]:
    """Say how to go on after Ctrl-C in work whose finished parts are kept, wherever the work itself does not say it.

    Raises:
        Interrupted: After Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("what is finished is saved", remedy="give the same command again to go on") from None


def to_type(*words: object) -> str:
    """Return a command of ``cordillera`` as a shell takes it, whatever is in its ``words``."""
    return shlex.join(["cordillera", *map(str, words)])


def check_plot(path: Path | None) -> None:
    """Check before the work whether a drawing could be written to ``path``, if there is one.

    Raises:
        PlanError: If it is no .png or .svg, or cannot be written.
    """
    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        raise PlanError(f"cannot draw into {path.name}", where="--plot", remedy="name a .png or an .svg")
    check_writable(path)


def read_input() -> str:
    """Return what standard input holds.

    Raises:
        DataError: If that is no text in UTF-8.
    """
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(f"byte {error.start} (0x{byte:02x}) is not UTF-8", where="standard input") from error


def titled_table(title: str, *left: str | Column, right: Sequence[str] = ()) -> Table:
    """Return an empty table with columns aligned to the left, then those aligned to the right."""
    columns = (Column(heading, justify="right") for heading in right)
    return Table(*left, *columns, title=title, title_justify="left", box=None, pad_edge=False)


def evaluation_table(evaluation: Evaluation) -> Table:
    """Return the metrics of an evaluation as a table with a row for each task."""
    is_split = evaluation.split in ("train", "validation", "test")
    title = f"{evaluation.split}{' split' if is_split else ''}, {evaluation.examples:,} examples"
    if evaluation.step is not None and evaluation.step != evaluation.steps:
        title += f", weights of step {evaluation.step:,}"
    metrics = evaluation.metrics()
    shown = {"ne": "NE", "auc": "AUC", "gauc": "GAUC", "log_loss": "log loss", "calibration": "calibration"}
    if not any("ranking_k" in values or math.isfinite(values.get("gauc", math.nan)) for values in metrics.values()):
        del shown["gauc"]  # there are no groups
    weighted = any(
        one["examples"] and abs(one.get("base_rate", 0.0) - one["positives"] / one["examples"]) > 1e-9
        for one in metrics.values()
        if math.isfinite(one.get("base_rate", math.nan))
    )
    table = titled_table(title, "task", right=(*shown.values(), "positives (weighted)" if weighted else "positives"))
    for task, values in metrics.items():
        share = values["positives"] / values["examples"] if values["examples"] else math.nan
        share = values["base_rate"] if weighted else share
        cells = [fixed(values.get(key, math.nan)) for key in shown]
        table.add_row(printable(task), *cells, "undefined" if math.isnan(share) else f"{100 * share:.1f} %")
    return table


@contextlib.contextmanager
def work_shown(what: str) -> Iterator[Callable[[str], None]]:
    """Show the progress of long work on standard error, with elapsed time; yield a function that sets the status."""
    columns = (TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with ProgressLines(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.update(task, description=text)


def group_tables(evaluation: Evaluation) -> list[Table]:
    """Return the metrics of the order within groups as a table with a row for each task; none without groups."""
    found = {task: values for task, values in evaluation.metrics().items() if "ranking_k" in values}
    if not found:
        return []
    k = f"{next(iter(found.values()))['ranking_k']:.0f}"
    right = (f"NDCG@{k}", f"recall@{k}", f"MRR@{k}", "groups", "without a positive")
    table = titled_table(f"the top {k} of each group by score", "task", right=right)
    for task, values in found.items():
        cells = [fixed(values.get(key, math.nan)) for key in ("ndcg", "recall", "mrr")]
        counts = [f"{values.get(f'ranking_{key}', math.nan):,.0f}" for key in ("groups", "excluded_groups")]
        table.add_row(printable(task), *cells, *counts)
    return [table]


def language_line(evaluation: LanguageEvaluation) -> str:
    """Return the evaluation of a language model in one line."""
    loss, perplexity, bits, targets, _, measures = evaluation
    if "solved" in measures:
        return f"{measures['solved'] * targets:,.0f} of {targets:,} problems solved"
    if measures:
        return f"loss {loss:.4f}, {_measures_line(measures)} ({targets:,} examples)"
    per_byte = "" if math.isnan(bits) else f", {bits:.3f} bits a byte"
    return f"loss {loss:.4f} nats a token, perplexity {perplexity:,.2f}{per_byte} ({targets:,} tokens)"


def _measures_line(measures: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in measures.items())


class _StepsDone(ProgressColumn):
    """Number of steps that are done, and of all; nothing while that is unknown."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:,.0f}/{task.total:,.0f}")


class _Doing(ProgressColumn):
    """What is done; long preparation has a frequent reason beside it."""

    def render(self, task: Task) -> Text:
        is_long = task.description == _PREPARING and (task.elapsed or 0.0) >= _LONG_S
        return Text(f"{_PREPARING} (kernels may be compiled)" if is_long else task.description)


_PREPARING, _LONG_S = "preparing", 5
_UNSURE_S = 5  # seconds from the first step for which the time left is not told


class _TimeLeft(ProgressColumn):
    """Time left; while that is not known well, the time since the beginning, unless it is ``beside`` that column."""

    def __init__(self, beside: bool, table_column: Column) -> None:
        super().__init__(table_column)
        self.is_beside = beside

    def render(self, task: Task) -> Text:
        seconds, left = task.elapsed or 0.0, task.time_remaining
        if left is None or seconds - task.fields.get("before", 0.0) < _UNSURE_S:
            return Text("" if self.is_beside else f"{timedelta(seconds=int(seconds))} elapsed")
        return Text(f"{timedelta(seconds=int(left))} left")


@contextlib.contextmanager
def progress_bar(out: Console, quiet: bool) -> Iterator[tuple[Progress, TaskID, Callable[[str], object]]]:
    """Draw a progress bar; yield it with its task, which has a note, and a function that prints a line above it."""
    unbroken = Column(no_wrap=True)
    columns = [
        _Doing(unbroken),
        BarColumn(40 if out.width >= 140 else 10),
        _StepsDone(table_column=unbroken),
        TextColumn("{task.fields[note]}", markup=False, table_column=unbroken),
    ]
    is_wide = out.width >= 110 and out.is_terminal  # else the number of steps and the time left stay readable
    columns += [TimeElapsedColumn(table_column=unbroken)] * is_wide + [_TimeLeft(is_wide, unbroken)]
    with ProgressLines(*columns, console=out, disable=quiet, transient=True) as bar:

        def say(text: str) -> None:
            if not quiet:
                bar.print(text)

        yield bar, bar.add_task(_PREPARING, total=None, note=""), say


@contextlib.contextmanager
def training_progress(out: Console, *, quiet: bool = False) -> Iterator[tuple[Any, Callable[[str], object]]]:
    """Show a progress bar of training with rate and remaining time; yield ``on_step`` and ``say``."""
    with progress_bar(out, quiet) as (bar, task, say):

        def on_step(record: dict[str, Any], progress: TrainingProgress | LanguageProgress, total: int) -> None:
            if progress.step == 1 or bar.tasks[task].total != total:
                bar.reset(task, total=total, completed=progress.step)
            if record:
                bar.update(task, note=_note(record, out.width))
            best = getattr(progress, "best_text", "")
            bar.update(task, completed=progress.step, description=f"training  {best}".rstrip())

        yield on_step, say


@contextlib.contextmanager
def answering_progress(
    out: Console, *, quiet: bool = False, what: str = "answering"
) -> Iterator[Callable[[int, int], object]]:
    """Draw a progress bar of ``what`` is done; yield a function of the number of pieces that are done and of all."""
    with progress_bar(out, quiet) as (bar, task, _):

        def on_answer(done: int, total: int) -> None:
            if bar.tasks[task].total != total:
                bar.reset(task, total=total)
            bar.update(task, completed=done, description=what)

        yield on_answer


def _note(record: dict[str, Any], width: int = 160) -> str:
    """Return the newest record in a few words, fewer for a terminal that is not wide."""
    loss = f"loss {fixed(record['loss'])}"
    if width < 110:
        return loss
    if "examples_per_second" in record:
        return f"epoch {record['epoch'] + 1}  {loss}  {record['examples_per_second']:,.0f} examples/s"
    mfu = "" if record["mfu"] is None else f"  MFU {100 * record['mfu']:.0f} %"
    skipped = f"  {record['skipped']} skipped" if record["skipped"] else ""
    return f"{loss}  {record['tokens_per_second']:,.0f} tokens/s{mfu}{skipped}"
