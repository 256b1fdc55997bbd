"""``cordillera towers``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import AsJson, CommandOutput, Field, Sheet, check_result


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
    as_json: AsJson = False,
) -> None:
    """Divide a model's features among towers.

    Features whose embeddings are alike come together; the load of a tower is bounded.

    Writes towers.json (for model.towers.file of a recipe) and towers.html, with a map of the features, into RUN.
    """
    from cordillera.reports.ranking.towers import summary
    from cordillera.workflows import planning as commands

    check_result(run, "towers.json")
    with CommandOutput(as_json) as answer:
        plan, files = commands.towers(
            run, count, aim=aim.value, balance=balance, dimensions=dimensions, samples=samples, seed=seed
        )
        table = Sheet(
            f"{aim.value} towers",
            Field("tower"),
            *(Field(name, form="{:,.6g}", within="loads") for name in plan.loads),
            Field("features", "features in it", ", ".join, right=False),
        )
        loads = [plan.tower_loads(name) for name in plan.loads]
        for number, group in enumerate(plan.groups()):
            table.add(number, *(values[number] for values in loads), group)
        answer.tables(towers=table)
        inside, across = plan.mean_similarity()
        answer.say(
            "\n".join(summary(plan)),
            similarity_within=inside,
            similarity_between=across,
            bounds=plan.bounds,
            stress=plan.stress,
        )
        answer.say(f"towers: {files[0]}\nmap: {files[1]}", file=files[0], map=files[1])
