"""Where the embedding tables of a run lie, for its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cordillera.errors import PlanError
from cordillera.files import is_there, read_text
from cordillera.numbers import size_text
from cordillera.planning.ranking.placement import Placement
from cordillera.reports.charts import bars
from cordillera.reports.page import part
from cordillera.run import Run, read_recipe

PLACEMENT_FILE = "placement.json"
"""File in the folder of a ranking run of several processes that says where its tables are."""

REASONS_FILE = "placement.txt"
"""File beside it with the planner's reasons."""

_MOST_SHOWN = 7  # tables with a colour of their own


def placed_tables(run: Run) -> dict[str, Any]:
    """Return a picture of a run's tables over its ranks, with a line for each table; empty for one process.

    Raises:
        DataError: If ``recipe.toml`` is missing or not TOML.
        PlanError: If ``placement.json`` cannot be read.
    """
    path = run.folder / PLACEMENT_FILE
    if not is_there(path):
        return {}
    parallel = part(read_recipe(run)[1], "parallel")
    if parallel.get("processes") == 1:  # the file is of an earlier part of the run, in several processes
        return {}
    placement = Placement.read(path)
    sizes = {name: 4.0 * rows * columns for name, (rows, columns) in placement.tables.items()}
    if not sizes:
        return {}
    ordered = sorted(sizes, key=lambda name: -sizes[name])
    named = ordered if len(ordered) <= _MOST_SHOWN + 1 else ordered[:_MOST_SHOWN]
    names = {name: name for name in named} | ({"": f"{len(ordered) - len(named)} smaller"} if named != ordered else {})
    rows = [(f"rank {rank}", _held(placement, rank, named)) for rank in range(placement.size)]
    # of a placement that was given, these would be the planner's reasons for an earlier one
    reasons = _reasons(run) if parallel.get("placement", "auto") == "auto" else {}
    return {
        "chart": bars("Rows of tables by rank", rows, names, size_text),
        "key": [(f"f{number}", title) for number, title in enumerate(names.values())],
        "rows": [
            (name, "{:,} x {:,}".format(*placement.tables[name]), size_text(sizes[name]), _ranks(placement, name),
             reasons.get(name, placement.way(name)))
            for name in ordered
        ],
    }  # fmt: skip


def _held(placement: Placement, rank: int, named: list[str]) -> Mapping[str, float]:
    """Return the bytes of a rank's float32 rows by table; those of tables without a colour under an empty name."""
    held: dict[str, float] = {}
    for one in placement.parts_on(rank):
        name = one.table if one.table in named else ""
        held[name] = held.get(name, 0.0) + 4.0 * one.rows * one.columns
    return held


def _reasons(run: Run) -> dict[str, str]:
    """Return the reason for the place of each table, of a planned placement."""
    path = run.folder / REASONS_FILE
    if not is_there(path):
        return {}
    text = read_text(path, error=PlanError, remedy="delete the file: the report then gives no reasons")
    pairs = (line.partition(": ") for line in text.splitlines())
    return {name: reason for name, _, reason in pairs if reason}


def _ranks(placement: Placement, table: str) -> str:
    ranks = sorted({rank for one in placement.parts_by_table[table] for rank in one.ranks})
    return "all" if len(ranks) == placement.size else ", ".join(map(str, ranks))
