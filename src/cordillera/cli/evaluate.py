"""``cordillera evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    json: Annotated[bool, typer.Option("--json", help="Print the whole evaluation as JSON.")] = False,
) -> None:
    """Evaluate a run on one split of its data."""
    from cordillera import workflows
    from cordillera.cli._show import console, evaluation_table

    evaluation = workflows.evaluate(run, split)
    if json:
        typer.echo(evaluation.to_json())
    else:
        console().print(evaluation_table(evaluation))
