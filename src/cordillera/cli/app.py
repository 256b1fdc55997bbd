"""The table of commands."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from cordillera.cli import (
    answers,
    augment,
    bench,
    chaos,
    compare,
    coordinate,
    data,
    delta,
    doctor,
    drafting,
    evaluate,
    generate,
    guard,
    inject,
    isoflop,
    plan,
    predict,
    probe,
    quantize,
    recipe,
    report,
    search,
    serve,
    simulate_faults,
    sweep,
    towers,
    train,
    watch,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train, evaluate and use ranking models; generate and serve text; plan large jobs. "
    "Start with: cordillera train movielens-wukong",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"cordillera {metadata.version('cordillera')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("probe")(probe.probe)
app.command("quantize")(quantize.quantize)
app.command("watch")(watch.watch)
app.command("report")(report.report)
app.command("compare")(compare.compare)
app.command("search")(search.search)
app.command("sweep")(sweep.sweep)
app.command("isoflop")(isoflop.isoflop)
app.command("augment")(augment.augment)
app.command("inject")(inject.inject)
app.command("generate")(generate.generate)
app.command("serve")(serve.serve)
app.command("best-of")(answers.best_of)
app.command("judge")(answers.judge)
app.command("guard")(guard.guard)
app.command("average")(answers.average)
app.command("write-chats")(drafting.write_chats)
app.command("export-drafter")(drafting.export_drafter)
app.command("plan")(plan.plan)
app.command("simulate-faults")(simulate_faults.simulate_faults)
app.command("coordinate")(coordinate.coordinate)
app.command("chaos")(chaos.chaos)
app.command("towers")(towers.towers)
app.command("bench", context_settings=bench.CONTEXT)(bench.bench)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data", help="Data sets: list, get, describe.")
app.add_typer(delta.app, name="delta", help="Changes of a run's dynamic tables: make, apply.")
app.add_typer(recipe.app, name="recipe", help="Recipes: list, show.")
