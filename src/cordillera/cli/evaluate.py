"""``cordillera evaluate``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cordillera.cli._show import AsJson
from cordillera.errors import Interrupted, printable

if TYPE_CHECKING:
    from cordillera.workflows.evaluation.importance import FeatureImportance


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
    importance: Annotated[
        bool, typer.Option("--importance", help="Also permute each feature, and add the rise of NE to the report.")
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2, help="Most tokens of a language model's held-out text. Default: the recipe's evaluation_tokens."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run on a split of its data or on a file."""
    try:
        from cordillera import workflows
        from cordillera.cli._show import (
            console,
            echo,
            evaluation_table,
            group_tables,
            language_line,
            print_json,
            titled_table,
        )
        from cordillera.run import Run
        from cordillera.training.ranking.evaluation import Evaluation

        evaluation = workflows.evaluate(run, split, file=file, tokens=tokens)
        status = Run(run).status()
        rises = _importance(run, split, file) if importance else []
    except KeyboardInterrupt:
        raise Interrupted("nothing was written", where=str(run), remedy="give the same command again") from None
    if status is not None and status.warning:
        typer.echo(printable(status.warning), err=True)
    if as_json:
        content = asdict(evaluation) if isinstance(evaluation, Evaluation) else evaluation._asdict()
        print_json({**content, "importance": rises} if importance else content)
    elif isinstance(evaluation, Evaluation):
        console().print(evaluation_table(evaluation), *group_tables(evaluation))
        if importance:
            table = titled_table(
                "rise of NE when a feature is permuted", "feature", "task", right=("rise", "95 % interval")
            )
            for one in rises:
                rise, low, high = (round(value, 4) + 0.0 for value in (one.ne, one.low, one.high))  # no -0.0
                table.add_row(one.feature, one.task, f"{rise:+.4f}", f"{low:+.4f} to {high:+.4f}")
            console().print(table)
    else:
        echo(f"held-out text: {language_line(evaluation)}")


def _importance(run: Path, split: str | None, file: str | None) -> list[FeatureImportance]:
    """Measure the importance of a run's features, with a progress bar."""
    from cordillera import workflows
    from cordillera.cli._show import answering_progress, console
    from cordillera.errors import RunError

    if file is not None:
        raise RunError("does not go with --file", where="--importance", remedy="leave one of them out")
    with answering_progress(console(stderr=True), what="permuting features") as on_feature:
        return workflows.importance(run, split or "test", on_feature=on_feature)
