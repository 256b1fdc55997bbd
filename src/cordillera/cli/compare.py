"""``cordillera compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import AsJson


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the first is what the others are compared with.")],
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            help="Evaluate ranking runs on this file, folder or pattern and compare that, such as the next day.",
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write an HTML page, too.")] = None,
) -> None:
    """Compare runs; seeds of one recipe become one row.

    Such a row has confidence intervals.
    """
    from cordillera import workflows
    from cordillera.cli._show import console, echo, print_json, refuse
    from cordillera.files import check_writable, write

    refuse({"--markdown": markdown and as_json}, "--json")
    if out is not None:
        check_writable(out)
    comparison = workflows.compare(runs, file)
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
