"""Architecture search: ``cordillera bench rankitect`` or ``python benchmarks/rankitect.py``.

Parts: ``table`` (all architectures of a small space, trained twice on a synthetic log; half an hour) and ``searchers``
(how soon each searcher meets the best percent of that table, over 50 seeds). Each writes
``results/rankitect-PART.json``.
"""

from __future__ import annotations

import enum

import typer
from _program import Program
from _rankitect_table import judged, table


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    table = "table"
    searchers = "searchers"


main = Program(
    "rankitect",
    {Part.table: table, Part.searchers: judged},
    "Search for architectures: a table of a small space, and how soon searchers find its best.",
    short=(Part.searchers,),
    all_help="Also measure the table, which takes half an hour.",
).command()


if __name__ == "__main__":
    typer.run(main)
