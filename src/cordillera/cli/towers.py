"""``cordillera towers``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class Aim(str, enum.Enum):
    """Choices of ``--aim``."""

    coherent = "coherent"
    diverse = "diverse"


def towers(
    run: Annotated[Path, typer.Argument(help="The folder of a trained ranking model, the probe.")],
    count: Annotated[int, typer.Option("--towers", min=1, help="Number of towers, as many as there will be hosts.")],
    aim: Annotated[
        Aim, typer.Option(help="Features that interact share a tower (coherent) or are spread over towers (diverse).")
    ] = Aim.coherent,
    balance: Annotated[float, typer.Option(help="Largest load of a tower relative to the mean.")] = 1.2,
    dimensions: Annotated[int, typer.Option(min=1, max=64, help="Coordinates of a feature on the map.")] = 2,
    samples: Annotated[
        int, typer.Option(min=1, help="Rows of the training split whose embeddings are compared.")
    ] = 8192,
    seed: Annotated[int, typer.Option(min=0, help="Of the map and the clustering.")] = 0,
) -> None:
    """Divide a model's features among towers.

    Features whose embeddings are alike come together; the load of a tower is bounded.

    Writes towers.json (for model.towers.file of a recipe) and towers.html, with a map of the features, into RUN.
    """
    from cordillera.cli._show import console, titled_table
    from cordillera.errors import printable
    from cordillera.reports.ranking.towers import summary, tower_rows
    from cordillera.workflows import planning as commands

    plan, files = commands.towers(
        run, count, aim=aim.value, balance=balance, dimensions=dimensions, samples=samples, seed=seed
    )
    out = console()
    table = titled_table(f"{aim.value} towers", "tower", right=[*plan.loads, "features in it"])
    table.columns[-1].justify = "left"
    for row in tower_rows(plan):
        table.add_row(*(printable(cell) for cell in row))
    out.print(table)
    for line in summary(plan):
        out.print(line)
    out.print(f"towers: {files[0]}")
    out.print(f"map: {files[1]}")
