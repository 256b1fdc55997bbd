"""``cordillera evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordillera.errors import Interrupted, printable


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    split: Annotated[
        str | None,
        typer.Option(help="train, validation or test. Default: test; of a language model, what was held out."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2, help="Most tokens of a language model's held-out text. Default: the recipe's evaluation_tokens."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole evaluation as JSON.")] = False,
) -> None:
    """Evaluate a run on one split of its data."""
    try:
        from cordillera import workflows
        from cordillera.cli._show import console, echo, evaluation_table, language_line
        from cordillera.run import Run
        from cordillera.training.ranking.evaluation import Evaluation

        evaluation = workflows.evaluate(run, split, tokens=tokens)
        status = Run(run).status()
    except KeyboardInterrupt:
        raise Interrupted("nothing was written", where=str(run), remedy="give the same command again") from None
    if status is not None and status.warning:
        typer.echo(printable(status.warning), err=True)
    if not isinstance(evaluation, Evaluation):
        if json:
            import json as encoder

            echo(encoder.dumps(evaluation._asdict()), json=True)
        else:
            echo(f"held-out text: {language_line(evaluation)}")
    elif json:
        echo(evaluation.to_json(), json=True)
    else:
        console().print(evaluation_table(evaluation))
