"""``cordillera coordinate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import Changes

_FREE_PORT = "127.0.0.1:0"


def coordinate(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, a TOML file, or a run folder with --resume.")],
    run: Annotated[
        Path | None, typer.Option("--run", help="Folder that every replica reaches. Default: runs/NAME.")
    ] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", min=2, help="Number of replicas.")] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", min=1, help="Processes of each replica.")] = None,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT at which replicas find it; port 0 takes a free one.")
    ] = _FREE_PORT,
    set_: Changes = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
) -> None:
    """Coordinate replicas that are started on other machines."""
    from cordillera.cli._replicas import replicas_told
    from cordillera.cli._show import CommandOutput
    from cordillera.cli.train import resumed, tell_outcome
    from cordillera.errors import RecipeError
    from cordillera.files import at_home, check_writable
    from cordillera.recipe import LanguageRecipe, load
    from cordillera.run import check_no_run, next_path
    from cordillera.workflows.language import coordinate as coordinate_replicas

    run = run and at_home(run)
    if not resume and run is None:
        check_no_run(recipe, "coordinate")
    answer = CommandOutput(as_json=False)
    overrides = list(set_ or []) + ([f"fault_tolerance.replicas={replicas}"] if replicas is not None else [])
    old = resumed(recipe, run, overrides, command="coordinate") if resume else None
    found = load(recipe if old is None else old.recipe_file, overrides)
    if not isinstance(found, LanguageRecipe):
        raise RecipeError(recipe, [("model", "only language models are trained by replicas")])
    folder = old.folder if old else run or next_path(Path("runs"), found.name)
    if old is None:
        check_writable(folder / "recipe.toml")  # before the data is read
    with replicas_told(folder, answer.say):
        outcome = coordinate_replicas(found, folder, resume=resume, processes=nproc, listen=listen, say=answer.say)
    again = ("--listen", listen) if listen != _FREE_PORT else ()  # where replicas look for it
    tell_outcome(answer, outcome, "coordinate", again, is_resumed=resume)
