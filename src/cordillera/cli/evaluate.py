"""``cordillera evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    split: Annotated[
        str | None,
        typer.Option(help="train, validation or test. Default: test; of a language model, what was held out."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole evaluation as JSON.")] = False,
) -> None:
    """Evaluate a run on one split of its data."""
    from cordillera import workflows
    from cordillera.cli._show import console, evaluation_table, language_line
    from cordillera.training.evaluation import Evaluation

    evaluation = workflows.evaluate(run, split)
    if not isinstance(evaluation, Evaluation):
        if json:
            import json as encoder

            typer.echo(encoder.dumps(evaluation._asdict()))
        else:
            typer.echo(f"held-out text: {language_line(evaluation)}")
    elif json:
        typer.echo(evaluation.to_json())
    else:
        console().print(evaluation_table(evaluation))
