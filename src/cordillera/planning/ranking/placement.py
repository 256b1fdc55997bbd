"""Where the parts of embedding tables are: rectangles of tables over ranks and tiers of memory.

A :class:`Placement` is data: the planner makes it, sharded tables follow it and checkpoints keep it. A table is whole
on a rank, cut in columns, in rows or in both, or copied to all ranks or to one rank of every group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from cordillera.errors import PlanError
from cordillera.files import read_sealed, sealed_json

MemoryTier = Literal["memory", "file"]
"""Where a part's rows are: in memory, or in a memory-mapped file behind a cache in memory."""

COLUMN_MULTIPLE = 4
"""Columns of a part that does not reach a table's last column are a multiple of this number."""

_SCHEMA = "cordillera placement 1"


class TablePart(NamedTuple):
    """A rectangle of a table on one rank, or with equal copies on several.

    Attributes:
        table: Name of the table.
        first_row: First row.
        rows: Number of rows.
        first_column: First column.
        columns: Number of columns.
        ranks: Rank of each copy. With ``n`` copies on ``size`` ranks, copy ``i`` is on one of the ranks
            ``i * size / n`` to ``(i + 1) * size / n - 1``, which look up in it.
        tier: Where the rows are.
    """

    table: str
    first_row: int
    rows: int
    first_column: int
    columns: int
    ranks: tuple[int, ...]
    tier: MemoryTier = "memory"

    def rank_for(self, rank: int, size: int) -> int:
        """Return the rank with the copy that ``rank`` of ``size`` ranks looks up in."""
        return self.ranks[rank * len(self.ranks) // size]


@dataclass(frozen=True)
class Placement:
    """Embedding tables placed over the ranks of a job.

    Attributes:
        size: Number of ranks.
        tables: Rows and columns of every table, by name.
        parts: Parts of the tables; they cover each table once.
        pooled: Tables whose bags are summed by the ranks that hold the rows; the rows of others are sent.

    Raises:
        PlanError: If a part is of no table or lies outside of it, parts overlap or leave a gap, a rank does not exist,
            or there is no table of a name in ``pooled``.
    """

    size: int
    tables: Mapping[str, tuple[int, int]]
    parts: tuple[TablePart, ...]
    pooled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PlanError(f"{self.size} ranks can hold no table", where="placement", remedy="at least 1")
        of_table: dict[str, list[TablePart]] = defaultdict(list)
        for part in self.parts:
            if part.table not in self.tables:
                raise PlanError(f"there is no table {part.table!r}", where="placement")
            of_table[part.table].append(part)
            self._check_part(part)
        for name, (rows, columns) in self.tables.items():
            _check_cover(name, rows, columns, of_table[name])
        for name in self.pooled:
            if name not in self.tables:
                raise PlanError(f"there is no table {name!r}, whose bags are to be summed", where="placement")

    def _check_part(self, part: TablePart) -> None:
        rows, columns = self.tables[part.table]
        where = f"placement of table {part.table!r}"
        end_row, end_column = part.first_row + part.rows, part.first_column + part.columns
        if min(part.first_row, part.first_column) < 0 or min(part.rows, part.columns) < 1:
            raise PlanError(f"{_words(part)} is no part of a table", where=where)
        if end_row > rows or end_column > columns:
            raise PlanError(f"{_words(part)} lies outside of {rows:,} rows and {columns:,} columns", where=where)
        if part.first_column % COLUMN_MULTIPLE or (end_column < columns and end_column % COLUMN_MULTIPLE):
            raise PlanError(f"{_words(part)} is not cut at a multiple of {COLUMN_MULTIPLE} columns", where=where)
        if part.tier not in get_args(MemoryTier):
            raise PlanError(
                f"{part.tier!r} is no tier", where=where, remedy=f"one of {', '.join(get_args(MemoryTier))}"
            )
        copies = len(part.ranks)
        if not copies or self.size % copies:
            raise PlanError(f"{copies} copies do not divide {self.size} ranks", where=where)
        for copy, rank in enumerate(part.ranks):
            first, last = copy * self.size // copies, (copy + 1) * self.size // copies - 1
            if not first <= rank <= last:
                raise PlanError(f"copy {copy} is on rank {rank}, not on one of {first} to {last}", where=where)

    @cached_property
    def parts_by_table(self) -> dict[str, tuple[TablePart, ...]]:
        """Parts of every table, by first row and first column."""
        found: dict[str, list[TablePart]] = {name: [] for name in self.tables}
        for part in self.parts:
            found[part.table].append(part)
        return {name: tuple(sorted(parts, key=lambda one: (one[1], one[3]))) for name, parts in found.items()}

    def parts_on(self, rank: int) -> tuple[TablePart, ...]:
        """Return the parts that ``rank`` holds a copy of."""
        return tuple(part for part in self.parts if rank in part.ranks)

    def way(self, table: str) -> str:
        """Return in words how a table is cut: whole, in columns, in rows, in rows and columns, or copied."""
        parts = self.parts_by_table[table]
        cuts = [words for words, at in (("rows", 1), ("columns", 3)) if len({part[at] for part in parts}) > 1]
        copies = max(len(part.ranks) for part in parts)
        copied = "" if copies == 1 else ", on every rank" if copies == self.size else f", {copies} copies"
        return (f"in {' and '.join(cuts)}" if cuts else "whole") + copied

    def check(self, tables: Mapping[str, tuple[int, int]], size: int, where: str = "placement") -> None:
        """Check that this is a placement, in memory, of ``tables`` (rows and columns by name) over ``size`` ranks.

        Raises:
            PlanError: If it is not; the error names ``where``, and the tables that differ.
        """
        other = [
            f"{name} is {_shape(self.tables.get(name))}, in the model {_shape(tables.get(name))}"
            for name in sorted({*self.tables, *tables})
            if self.tables.get(name) != tables.get(name)
        ]
        if other:
            raise PlanError(
                f"is of other tables: {'; '.join(other)}", where=where, remedy="plan it again for this model and data"
            )
        if self.size != size:
            raise PlanError(
                f"is for {self.size} ranks, there are {size}",
                where=where,
                remedy=f"plan it again for {size} ranks, or set parallel.placement = 'auto'",
            )
        in_files = sorted({part.table for part in self.parts if part.tier != "memory"})
        if in_files:
            raise PlanError(
                f"puts parts of tables into files: {', '.join(in_files)}",
                where=where,
                remedy="plan it again with all parts in memory",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the placement as plain data, for :meth:`from_json`."""
        return {
            "schema": _SCHEMA,
            "size": self.size,
            "tables": {name: list(shape) for name, shape in self.tables.items()},
            "parts": [part._asdict() | {"ranks": list(part.ranks)} for part in self.parts],
            "pooled": list(self.pooled),
        }

    @classmethod
    def from_json(cls, content: Any, where: str = "placement") -> Placement:
        """Create a placement from ``content``, the result of :meth:`to_json`; errors name its origin, ``where``.

        Raises:
            PlanError: If the content is of another kind or version, malformed, or no valid placement.
        """
        if not isinstance(content, dict) or content.get("schema") != _SCHEMA:
            raise PlanError(f"is no placement of tables that this library reads ({_SCHEMA})", where=where)
        try:
            tables = {str(name): (_whole(rows), _whole(columns)) for name, (rows, columns) in content["tables"].items()}
            parts = tuple(
                TablePart(
                    table=str(one["table"]),
                    first_row=_whole(one["first_row"]),
                    rows=_whole(one["rows"]),
                    first_column=_whole(one["first_column"]),
                    columns=_whole(one["columns"]),
                    ranks=tuple(_whole(rank) for rank in one["ranks"]),
                    tier=one["tier"],
                )
                for one in content["parts"]
            )
            size = _whole(content["size"])
            pooled = tuple(str(name) for name in content.get("pooled", ()))  # absent in earlier files
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"is malformed: {error}", where=where) from error
        return cls(size, tables, parts, pooled)

    def to_text(self) -> str:
        """Return the placement as text with a seal, for a file."""
        return sealed_json(self.to_json())

    @classmethod
    def read(cls, path: Path | str) -> Placement:
        """Read a placement from a file that holds :meth:`to_text`.

        Raises:
            PlanError: If the file is corrupt, or holds no valid placement.
        """
        return cls.from_json(read_sealed(Path(path), error=PlanError), str(path))


def _words(part: TablePart) -> str:
    end_row, end_column = part.first_row + part.rows - 1, part.first_column + part.columns - 1
    return f"rows {part.first_row:,} to {end_row:,}, columns {part.first_column:,} to {end_column:,}"


def _shape(shape: tuple[int, int] | None) -> str:
    return "absent" if shape is None else f"{shape[0]:,} x {shape[1]}"


def _whole(value: Any) -> int:
    if type(value) is not int or value.bit_length() > 63:
        raise ValueError(f"{value!r:.40} is not a whole number of 64 bits")
    return value


def _check_cover(name: str, rows: int, columns: int, parts: list[TablePart]) -> None:
    """Check that parts inside a table neither overlap nor leave a gap."""
    where = f"placement of table {name!r}"
    if sum(part.rows * part.columns for part in parts) != rows * columns:
        raise PlanError(f"its parts do not cover {rows:,} rows and {columns:,} columns once", where=where)
    # sweep over rows: the parts that are open at any row have disjoint columns; with equal areas there is no gap
    events = sorted(
        [(part.first_row + part.rows, 0, part) for part in parts] + [(part.first_row, 1, part) for part in parts],
        key=lambda event: event[:2],
    )
    opened: list[TablePart] = []
    for _, begins, part in events:
        if not begins:
            opened.remove(part)
            continue
        end = part.first_column + part.columns
        for other in opened:
            if part.first_column < other.first_column + other.columns and other.first_column < end:
                raise PlanError(f"{_words(part)} and {_words(other)} overlap", where=where)
        opened.append(part)
