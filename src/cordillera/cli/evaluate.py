"""``cordillera evaluate``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cordillera.cli._show import AsJson, check_result
from cordillera.errors import Interrupted, printable

if TYPE_CHECKING:
    from rich.table import Table

    from cordillera.training.language.trainer import LanguageEvaluation
    from cordillera.training.ranking.evaluation import Evaluation
    from cordillera.workflows.evaluation.importance import FeatureImportance
    from cordillera.workflows.evaluation.language_files import ChoiceEvaluation, TextEvaluation


def evaluate(
    run: Annotated[
        str, typer.Argument(help="A run's folder; with --file, also a name or checkpoint of a language model.")
    ],
    split: Annotated[
        str | None,
        typer.Option(help="train, validation or test. Default: test. A language model has validation only."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="In place of a split: other samples with labels, or for a language model text, chats, or questions "
            "with choices: a file, folder or pattern.",
        ),
    ] = None,
    importance: Annotated[
        bool,
        typer.Option("--importance", help="Also compute permutation importance, for the report."),
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Most tokens of text. Default: the recipe's evaluation_tokens, or all of --file."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of a language model's weights, with --file: bfloat16, float16, int8 or int4. Default: float32."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run on a split of its data or on a file, or any language model on a file."""
    try:
        from cordillera import workflows
        from cordillera.cli._show import answering_progress, console, print_json, refuse
        from cordillera.run import Run
        from cordillera.training.language.trainer import LanguageEvaluation
        from cordillera.workflows.trained import recipe_of

        if importance:
            refuse({"--file": file}, "--importance, which is measured on a split of the run")
            recipe_of(Run(run))
        if file is None:
            remedy = "evaluate a copy of the run, or with --file, which writes nothing"
            check_result(Path(run), "evaluation.json", remedy)
        with answering_progress(console(stderr=True), what="reading") as on_tokens:
            evaluation = workflows.evaluate(
                run, split, file=file, tokens=tokens, dtype=dtype, on_tokens=None if file is None else on_tokens
            )
        status = Run(run).status() if (Path(run) / "recipe.toml").is_file() else None
        rises = _importance(Path(run), split) if importance else []
    except KeyboardInterrupt:
        raise Interrupted("the result was not printed", where=str(run), remedy="give the same command again") from None
    if status is not None and status.warning:
        typer.echo(printable(status.warning), err=True)
    if as_json:
        content = evaluation._asdict() if isinstance(evaluation, LanguageEvaluation) else asdict(evaluation)
        print_json({**content, "importance": rises} if importance else content)
    else:
        _show(evaluation, rises, file or "")


def _show(
    evaluation: Evaluation | LanguageEvaluation | TextEvaluation | ChoiceEvaluation,
    rises: Sequence[FeatureImportance],
    file: str,
) -> None:
    """Print an evaluation, and how much worse it gets without each feature."""
    from cordillera.cli._show import console, echo, evaluation_table, group_tables, language_line, titled_table
    from cordillera.training.language.trainer import LanguageEvaluation
    from cordillera.training.ranking.evaluation import Evaluation

    if isinstance(evaluation, LanguageEvaluation):
        echo(f"held-out text: {language_line(evaluation)}")
    elif not isinstance(evaluation, Evaluation):
        console().print(_file_table(evaluation, file))
    else:
        console().print(evaluation_table(evaluation), *group_tables(evaluation))
        if rises:
            title, last = "rise of NE when a feature is permuted", ("rise", "95 % interval")
            table = titled_table(title, "feature", "task", right=last)
            for one in rises:
                rise, low, high = (round(value, 4) + 0.0 for value in (one.ne, one.low, one.high))  # no -0.0
                table.add_row(one.feature, one.task, f"{rise:+.4f}", f"{low:+.4f} to {high:+.4f}")
            console().print(table)


def _file_table(evaluation: TextEvaluation | ChoiceEvaluation, file: str) -> Table:
    """Return the evaluation of a language model on a file as a table."""
    from cordillera.cli._show import titled_table
    from cordillera.numbers import counted
    from cordillera.workflows.evaluation.language_files import ChatEvaluation, TextEvaluation

    interval = "95 % interval"
    if isinstance(evaluation, TextEvaluation):
        of_chats = isinstance(evaluation, ChatEvaluation)
        texts = counted(evaluation.documents, "chat" if of_chats else "text")
        what = f"{evaluation.tokens:,} tokens{' of answers' if of_chats else ''}, {evaluation.bytes:,} bytes"
        title = f"{file}: {texts}, {what}"
        table = titled_table(title, "", right=("value", interval))
        for name, value, (low, high) in (
            ("nats a token", evaluation.loss, evaluation.loss_interval),
            ("perplexity", evaluation.perplexity, evaluation.perplexity_interval),
            ("bits a byte", evaluation.bits_per_byte, evaluation.bits_per_byte_interval),
        ):
            table.add_row(name, f"{value:.4f}", "one sample" if math.isnan(low) else f"{low:.4f} to {high:.4f}")
        return table
    asked = "1 question" if evaluation.questions == 1 else f"{evaluation.questions:,} questions"
    table = titled_table(f"{file}: {asked}", "right choice", right=("share", interval))
    for name, value, (low, high) in (
        ("by probability", evaluation.accuracy, evaluation.accuracy_interval),
        ("by probability per byte", evaluation.accuracy_per_byte, evaluation.accuracy_per_byte_interval),
    ):
        table.add_row(name, f"{100 * value:.1f} %", f"{100 * low:.1f} to {100 * high:.1f} %")
    table.add_row("by chance", f"{100 * evaluation.by_chance:.1f} %", "")
    return table


def _importance(run: Path, split: str | None) -> list[FeatureImportance]:
    """Measure the importance of a run's features, with a progress bar."""
    from cordillera import workflows
    from cordillera.cli._show import answering_progress, console

    with answering_progress(console(stderr=True), what="permuting features") as on_feature:
        return workflows.importance(run, split or "test", on_feature=on_feature)
