"""``cordillera evaluate``."""

from __future__ import annotations

import json
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
    file: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Other samples with labels, in place of a split: a file, folder or pattern."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2, help="Most tokens of a language model's held-out text. Default: the recipe's evaluation_tokens."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole evaluation as JSON.")] = False,
) -> None:
    """Evaluate a run on a split of its data or on a file."""
    try:
        from cordillera import workflows
        from cordillera.cli._show import console, echo, evaluation_table, language_line
        from cordillera.run import Run
        from cordillera.training.ranking.evaluation import Evaluation

        evaluation = workflows.evaluate(run, split, file=file, tokens=tokens)
        status = Run(run).status()
    except KeyboardInterrupt:
        raise Interrupted("nothing was written", where=str(run), remedy="give the same command again") from None
    if status is not None and status.warning:
        typer.echo(printable(status.warning), err=True)
    if as_json:
        text = evaluation.to_json() if isinstance(evaluation, Evaluation) else json.dumps(evaluation._asdict())
        echo(text, json=True)
    elif isinstance(evaluation, Evaluation):
        console().print(evaluation_table(evaluation))
    else:
        echo(f"held-out text: {language_line(evaluation)}")
