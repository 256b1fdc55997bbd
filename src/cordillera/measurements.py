"""Reader of CSV files of measurements, some written by hand; all mistakes are reported together."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cordillera.errors import PlanError, printable
from cordillera.files import read_text

MOST_BYTES = 16 << 20
_MOST_LISTED = 20  # mistakes that an error lists
_LINE_END = re.compile(r"\r\n|\n|\r")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:nan|inf|infinity)", re.IGNORECASE)

Cells = dict[str, str]


class Measurements:
    """Rows of a CSV file of measurements; mistakes are collected until :meth:`check` raises them.

    No cell spans several lines, so that an unclosed quotation mark affects one line only.

    Args:
        columns: Names of the columns, each with its permitted spellings in the file, in lower case.
        optional: Names of columns that may be absent.
        first_line: Number of the text's first line in the file.

    Attributes:
        source: Printable path of the file.
        names: Names of the columns that the file has.

    Raises:
        PlanError: If the header is wrong, or the file holds no rows.
    """

    def __init__(
        self,
        path: str | Path,
        text: str,
        columns: Mapping[str, Sequence[str]],
        optional: Sequence[str] = (),
        first_line: int = 1,
    ) -> None:
        self.source = printable(path)
        self._columns, self._problems = columns, list[tuple[int, str, str]]()
        lines = [(i, line) for i, line in enumerate(_LINE_END.split(text), first_line) if line.strip(" \t,")]
        self._lines = lines[1:]
        number, header = (lines[0][0], self._parsed(*lines[0])) if lines else (first_line, [])
        header = [name.lower() for name in header]
        self._width = len(header)
        self._places: dict[str, int] = {}
        for name, spellings in columns.items():
            places = [i for i, one in enumerate(header) if one in spellings]
            if places:
                self._places[name] = places[0]
            elif name not in optional and (header or lines):
                also = f", or call it {spellings[-1]!r}" if len(spellings) > 1 else ""
                self.wrong(number, f"is missing{also}", name)
            if len(places) > 1:
                self.wrong(number, f"stands there {len(places)} times", name)
        known = {spelling: name for name, spellings in columns.items() for spelling in spellings}
        for one in header:
            close = difflib.get_close_matches(one[:200], known, n=1, cutoff=0.8)
            if close and one not in known and known[close[0]] not in self._places:
                self.wrong(number, f"is not a column; did you mean {close[0]!r}?", one)
        self.names = frozenset(self._places)
        self.check()
        if not self._lines:
            listing = ", ".join(columns)
            raise PlanError("holds no measurements", where=self.source, remedy=f"columns are {listing}")

    @classmethod
    def read(cls, path: str | Path, columns: Mapping[str, Sequence[str]], optional: Sequence[str] = ()) -> Measurements:
        """Read a file.

        Raises:
            PlanError: If the file cannot be read or its header is wrong.
        """
        return cls(path, read_text(path, error=PlanError, limit=MOST_BYTES), columns, optional)

    def _parsed(self, line: int, text: str) -> list[str]:
        try:
            return [cell.strip() for cell in next(csv.reader([text], strict=True))]
        except (csv.Error, StopIteration) as error:
            self.wrong(line, f"is not a row of CSV: {error}")
            return []

    def rows(self) -> Iterator[tuple[int, Cells]]:
        """Iterate over line number and cells, by column, of every row with as many cells as the header."""
        for line, text in self._lines:
            before = self.mistakes
            cells = self._parsed(line, text)
            if self.mistakes > before:
                continue
            if len(cells) != self._width:
                self.wrong(line, f"has {len(cells)} cells, the header has {self._width}")
                continue
            yield line, {name: cells[place] for name, place in self._places.items()}

    def wrong(self, line: int, message: str, column: str = "") -> None:
        """Record a mistake in a line; an empty ``column`` stands for the whole line."""
        self._problems.append((line, column, message))

    @property
    def mistakes(self) -> int:
        """Number of recorded mistakes."""
        return len(self._problems)

    def number(self, line: int, cells: Cells, column: str, most: float, least: float = 1e-12) -> float | None:
        """Read a cell as a number from ``least`` (above 0) to ``most``; or record a mistake and return None."""
        cell = cells[column]
        value = float(cell) if _NUMBER.fullmatch(cell) else float("nan")
        if least <= value <= most:
            return value
        if not 0 < value < float("inf"):
            self.wrong(line, f"{cell[:40]!r} is not a positive number" if cell else "is empty", column)
        else:
            self.wrong(line, f"{cell[:40]} is not from {least:g} to {most:g}", column)
        return None

    def count(self, line: int, cells: Cells, column: str) -> int | None:
        """Read a cell as a whole number of at least 1; or record a mistake and return None."""
        value = self.number(line, cells, column, most=2.0**53)
        if value is not None and value != int(value):
            self.wrong(line, f"{cells[column][:40]} is not a whole number", column)
            return None
        return None if value is None else int(value)

    def choice(self, line: int, cells: Cells, column: str, choices: Mapping[str, object]) -> object:
        """Return the value of a cell that is a key of ``choices``, in any case; or record a mistake and return None."""
        cell = cells[column]
        if cell.lower() not in choices:
            self.wrong(line, f"{cell[:40]!r} is none of {', '.join(filter(None, choices))}", column)
        return choices.get(cell.lower())

    def text(self, line: int, cells: Cells, column: str) -> str:
        """Read a cell as a printable name; or record a mistake and return an empty string."""
        cell = cells[column]
        if not cell or len(cell) > 200 or printable(cell) != cell:
            self.wrong(line, f"{cell[:40]!r} is not a name of at most 200 visible characters", column)
            return ""
        return cell

    def check(self) -> None:
        """Raise an error that lists all recorded mistakes, if there are any.

        Raises:
            PlanError: If there are mistakes.
        """
        if not self._problems:
            return
        shown = self._problems[:_MOST_LISTED]
        count = "1 mistake" if len(self._problems) == 1 else f"{len(self._problems):,} mistakes"
        listing = "".join(
            f"\n  line {line}{f', column {printable(column)[:100]}' if column else ''}: {printable(message)}"
            for line, column, message in shown
        )
        more = len(self._problems) - len(shown)
        listing += f"\n  and {more:,} more" if more else ""
        raise PlanError(f"{count}{listing}", where=self.source, remedy=f"columns are {', '.join(self._columns)}")
