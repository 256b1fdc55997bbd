"""Architecture search: ``cordillera bench rankitect`` or ``python benchmarks/rankitect.py``.

Parts: ``table`` (all architectures of a small space, trained twice on a synthetic log; an hour), ``searchers`` (how
soon each searcher meets the best percent of that table, over 50 seeds), ``shared`` (how well a supernet's weights
rank the table's architectures) and ``fronts`` (what searches find beside models of engineers; more than an hour). Each
writes ``results/rankitect-PART.json``.
"""

from __future__ import annotations

import enum

import typer
from _program import Program
from _rankitect_fronts import fronts
from _rankitect_shared import shared
from _rankitect_table import judged, table


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    table = "table"
    searchers = "searchers"
    shared = "shared"
    fronts = "fronts"


main = Program(
    "rankitect",
    {Part.table: table, Part.searchers: judged, Part.shared: shared, Part.fronts: fronts},
    "Search for architectures: a table of a small space, how soon searchers find its best, shared weights, and fronts.",
    short=(Part.searchers, Part.shared),
    all_help="Also measure the table and the fronts, which takes two hours and more.",
).command()


if __name__ == "__main__":
    typer.run(main)
