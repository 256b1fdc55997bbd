"""``cordillera recipe``."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def list_() -> None:
    """Print the shipped recipes."""
    from rich.table import Table

    from cordillera.cli._show import console
    from cordillera.recipe import shipped

    table = Table("recipe", "what it trains", box=None, pad_edge=False)
    for name, description in shipped().items():
        table.add_row(name, description)
    console().print(table)


@app.command("show")
def show(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, a TOML file, or a run folder.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override one key: section.key=value.")] = None,
    comments: Annotated[bool, typer.Option(help="Explain every key.")] = True,
) -> None:
    """Print a recipe with every default written out; the output is a recipe again."""
    from cordillera.cli._show import echo
    from cordillera.recipe import dump, load

    echo(dump(load(recipe, set_ or []), comments=comments))
