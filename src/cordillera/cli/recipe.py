"""``cordillera recipe``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import AsJson, Changes, CommandOutput, Field, Sheet, to_type

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Print the shipped recipes."""
    from cordillera.topology import shipped  # the module of recipes loads PyTorch

    table = Sheet(None, Field("name", "recipe"), Field("description", "what it trains"))
    for entry in shipped("cordillera.recipes").items():
        table.add(*entry)
    with CommandOutput(as_json) as answer:
        answer.tables(recipes=table)


@app.command("show")
def show(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, a TOML file, or a run folder.")],
    set_: Changes = None,
    comments: Annotated[bool, typer.Option(help="Explain every key.")] = True,
) -> None:
    """Print a recipe with every default written out; the output is a recipe again."""
    from cordillera.cli._show import print_file
    from cordillera.recipe import dump, load

    print_file(dump(load(recipe, set_ or []), comments=comments))


@app.command("new")
def new(
    path: Annotated[list[str], typer.Argument(help="Files, folders or patterns of your log: CSV, TSV or Parquet.")],
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            help="Column to predict, of 0 and 1, or 'rating>=4' or 'answer=yes'; repeat it for several tasks.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The recipe's file.")] = Path("recipe.toml"),
    separator: Annotated[
        str | None, typer.Option(help=r"Character between fields; \t for a tab. Default: by the first rows.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model of the recipe.")] = "dcn",
    as_json: AsJson = False,
) -> None:
    """Write a recipe for your own log.

    The roles of the columns are guessed from the first rows; look them over before you train.
    """
    from cordillera.recipe import write_recipe

    separator = "\t" if separator == r"\t" else separator  # a shell passes the two characters \t that errors advise
    guesses = write_recipe(path, out, labels=label or (), separator=separator, model=model)
    table = Sheet(None, Field("column"), Field("role"), Field("because"))
    for guess in guesses:
        table.add(guess.name, guess.role, guess.why)
    with CommandOutput(as_json) as answer:
        answer.tables(columns=table)
        if not any(guess.role == "timestamp" for guess in guesses):
            answer.say("no column of times: training, validation and test are drawn at random")
        answer.say(f"recipe: {out}\n  -> look it over, then: {to_type('train', out)}", recipe=out)
