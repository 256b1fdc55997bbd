"""Output for terminals, pipes and files: tables that fit, progress, and work that outlives a closed terminal."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from typing import IO, Any, cast

from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID
from rich.table import Table
from rich.text import Text

from cordillera.errors import printable

_GAP = 2  # spaces between the columns of a table
_UNBOUNDED = 100_000  # width of output to a file
_FIRST_S, _LONGEST_S = 10.0, 60.0  # intervals of progress lines


class Terminal:
    """A file that drops output after its terminal or reader is closed, so that work continues and can be saved."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    @classmethod
    def of(cls, file: IO[str]) -> IO[str]:
        """Wrap standard output or standard error."""
        return cast("IO[str]", cls(file))

    def write(self, text: str) -> int:
        """Write text and return the number of characters."""
        try:
            return self._file.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        """Flush the file's buffer."""
        try:
            self._file.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _drop(self, error: OSError) -> None:
        if error.errno not in (errno.EIO, errno.EPIPE):
            name = {"<stdout>": "standard output", "<stderr>": "standard error"}.get(getattr(self._file, "name", ""))
            raise error if name is None else OSError(error.errno, error.strerror, name)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if error.errno == errno.EPIPE:
            os.dup2(nowhere, self._file.fileno())
        for number in (1, 2):
            try:
                os.write(number, b"")
            except OSError:
                os.dup2(nowhere, number)
        os.close(nowhere)


class PlainConsole(Console):
    """A console that prints strings literally: square brackets are not markup, and control characters are escaped.

    Numbers and words of a table are never broken. A table that is too wide for a terminal is printed row by row, a line
    for each column; in a pipe or a file, lines are as long as they need to be, unless ``COLUMNS`` says otherwise.

    Args:
        file: Standard output or standard error.
        quiet: Whether to print nothing.
    """

    def __init__(self, file: IO[str], quiet: bool = False) -> None:
        super().__init__(file=file, markup=False, emoji=False, highlight=False, soft_wrap=True, quiet=quiet)
        if not self.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
            self.width = _UNBOUNDED

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text for printing, with control characters escaped."""
        return super().render_str(printable(text, lines=True), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print text and tables, with the tables' columns as wide as fits."""
        super().print(*(self._laid_out(one) if isinstance(one, Table) else one for one in objects), **options)

    def _laid_out(self, table: Table) -> Table | Text:
        """Return a table with widths; in a pipe or a file its text, without blanks at the ends of lines."""
        fitted = _fitted(table, self.width)
        if self.is_terminal:
            return fitted
        lines = self.render_lines(fitted, pad=False)
        return Text("\n".join("".join(part.text for part in line).rstrip() for line in lines))


def _fitted(table: Table, width: int) -> Table:
    """Give the columns of a table their widths, or return its rows as blocks of lines if no widths would do."""
    natural = [max(map(cell_len, _lines(column.header, *column.cells))) for column in table.columns]
    least = []
    for column in table.columns:
        words = " ".join(_lines(column.header, *(() if column.justify == "right" else column.cells))).split()
        whole = _lines(*column.cells) if column.justify == "right" else []
        least.append(max(map(cell_len, [*words, *whole, ""])))
    spare = width - sum(least) - _GAP * (len(least) - 1)
    if spare < 0:
        return _row_by_row(table)
    by_need = sorted(range(len(least)), key=lambda place: natural[place] - least[place])
    for turn, place in enumerate(by_need):
        more = min(natural[place] - least[place], spare // (len(by_need) - turn))
        table.columns[place].width = max(1, least[place] + more)
        spare -= more
    return table


def _lines(*cells: Any) -> list[str]:
    return [line for cell in cells for line in [*printable(str(cell), lines=True).split("\n"), ""]]


def _row_by_row(table: Table) -> Table:
    blocks = Table(title=table.title, title_justify="left", box=None, pad_edge=False, show_header=False)
    blocks.caption, blocks.caption_justify = table.caption, table.caption_justify
    blocks.add_column()
    blocks.add_column(overflow="fold")
    headings = [str(column.header) for column in table.columns]
    for heading in headings if not table.row_count else ():
        blocks.add_row(heading, "")
    for number, row in enumerate(zip(*(column.cells for column in table.columns), strict=True)):
        if number:
            blocks.add_row("", "")
        for heading, cell in zip(headings, row, strict=True):
            blocks.add_row(heading, cell)
    return blocks


class ProgressLines(Progress):
    """A progress bar; where there is no terminal, a line after ten seconds and then less and less often.

    A line begins with the local time, the first one of a day with the date too. What is printed to standard output and
    error meanwhile stands above the bar, unless it goes to a file or a pipe.
    """

    def __init__(self, *columns: Any, **options: Any) -> None:
        drawn_out, drawn_err = sys.stdout.isatty(), sys.stderr.isatty()
        super().__init__(*columns, redirect_stdout=drawn_out, redirect_stderr=drawn_err, **options)
        self._ended, self._teller = threading.Event(), threading.Thread(target=self._tell, daemon=True)
        can_draw = self.console.is_terminal and not self.console.is_dumb_terminal
        self._is_drawn = can_draw or self.console.is_jupyter  # stays true after the terminal closes

    def start(self) -> None:
        """Draw the bar, or begin to print lines."""
        if self._is_drawn:
            super().start()
        elif not self.disable:
            self._teller.start()

    def reset(self, task_id: TaskID, **options: Any) -> None:
        """Count a task anew, and keep the time since it began; ``before`` in its fields is the time until now."""
        (task,) = (one for one in self.tasks if one.id == task_id)
        began, before = task.start_time, task.elapsed
        super().reset(task_id, **options)
        task.start_time, task.fields["before"] = began, before or 0.0

    def stop(self) -> None:
        """End drawing; elsewhere than on a terminal, the base class would print an empty line."""
        if self._is_drawn:
            super().stop()
        elif self._teller.is_alive():
            self._ended.set()
            self._teller.join()

    def _tell(self) -> None:
        """Print the state of all tasks with the local time, also while the work does not report, until it ends."""
        pause, told = _FIRST_S, ""
        while not self._ended.wait(pause):
            pause = min(2 * pause, _LONGEST_S)
            for task in self.tasks:
                shown = [column(task) for column in self.columns if isinstance(column, ProgressColumn)]
                texts = [one.plain.strip() for one in shown if isinstance(one, Text)]  # a bar is none
                day, now = time.strftime("%Y-%m-%d %H:%M:%S").split()
                at, told = (now if day == told else f"{day} {now}"), day
                try:
                    self.console.print("  ".join(filter(None, [at, *texts])))
                except (OSError, ValueError):  # full disk or closed file: progress output must not stop the work
                    return
