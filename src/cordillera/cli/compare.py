"""``cordillera compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cordillera.cli._show import AsJson
from cordillera.errors import RunError, printable

if TYPE_CHECKING:
    from cordillera.reports.language.comparison import LanguageComparison
    from cordillera.reports.ranking.comparison import Comparison


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the first is what the others are compared with.")],
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            help="Evaluate ranking runs on this file, folder or pattern and compare that, such as the next day.",
        ),
    ] = None,
    fail_if_worse: Annotated[
        bool,
        typer.Option(
            "--fail-if-worse",
            help="End with the status 1 if a run's NE of the first task is higher than the first run's, and the "
            "interval of the difference excludes zero.",
        ),
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write an HTML page, too.")] = None,
) -> None:
    """Compare runs; seeds of one recipe become one row.

    Such a row has confidence intervals over seeds. With --file, differences have confidence intervals over samples.
    """
    from cordillera import workflows
    from cordillera.cli._show import console, echo, print_json, refuse
    from cordillera.files import check_writable, write

    refuse({"--markdown": markdown and as_json}, "--json")
    if out is not None:
        check_writable(out)
    comparison = workflows.compare(runs, file)
    worse = _worse(comparison) if fail_if_worse else []
    if out is not None:
        from cordillera.reports.studies import comparison_page

        write({out: comparison_page(comparison)})
    if as_json:
        print_json(comparison)
    elif markdown:
        echo(comparison.to_markdown())
    else:
        terminal = console()
        terminal.print(comparison.to_table(terminal.width), soft_wrap=False)
        if out is not None:
            terminal.print(f"report: {out}")
    if worse:
        typer.echo(printable(f"status 1, as --fail-if-worse is given: {', '.join(worse)} is worse"), err=True)
        raise typer.Exit(1)


def _worse(comparison: Comparison | LanguageComparison) -> list[str]:
    """Return the names of the rows whose NE of the first task is worse than the first row's, beyond its interval.

    Raises:
        RunError: If there is a row without an interval, or nothing to compare with.
    """
    from cordillera.reports.ranking.comparison import Comparison

    if not isinstance(comparison, Comparison):
        raise RunError("is for runs of ranking models", where="--fail-if-worse", remedy="leave it out")
    task, others = comparison.tasks[0], comparison.rows[1:]
    if not others:
        raise RunError("there is one row, and nothing to compare with", where="--fail-if-worse", remedy="name two runs")
    found = [(row.name, row.ne_difference(task)) for row in others]
    if lacks := [name for name, one in found if one is None]:
        raise RunError(
            f"the NE difference of {task} has no interval: {', '.join(lacks)}",
            where="--fail-if-worse",
            remedy="give --file FILE with labels of both classes, for intervals over its samples",
        )
    return [name for name, one in found if one is not None and one.low > 0]
