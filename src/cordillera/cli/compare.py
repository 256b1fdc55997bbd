"""``cordillera compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import AsJson


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the first is what the others are compared with.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs; seeds of one recipe become one row.

    Such a row has confidence intervals.
    """
    from cordillera import workflows
    from cordillera.cli._show import console, echo, print_json

    comparison = workflows.compare(runs)
    if as_json:
        print_json(comparison)
    elif markdown:
        echo(comparison.to_markdown())
    else:
        out = console()
        out.print(comparison.to_table(out.width), soft_wrap=False)
