"""``cordillera quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordillera.errors import Interrupted


def quantize(
    run: Annotated[Path, typer.Argument(help="A trained ranking run's folder.")],
    budget: Annotated[
        float, typer.Option(min=0.0, help="Largest relative rise of NE, in per cent, on the validation split.")
    ] = 0.02,
    smallest: Annotated[
        bool, typer.Option("--smallest", help="Weigh bytes alone: 2-bit rows, layers slower than in fp32.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the outcome alone.")] = False,
) -> None:
    """Make a smaller, faster copy of a run's model.

    Every table and layer gets the fewest bits that a budget of quality allows. The copy is written into the run.
    """
    from cordillera.cli._show import console, quantized_tables
    from cordillera.workflows.quantization import quantize as work

    out = console()

    def say(text: str) -> None:
        if not quiet:
            out.print(text)

    try:
        outcome = work(run, budget / 100, smallest=smallest, say=say)
    except KeyboardInterrupt:
        raise Interrupted(
            "no model was written; an earlier one is as it was", where=str(run), remedy="give the same command again"
        ) from None
    for table in quantized_tables(outcome, budget / 100):
        out.print(table)
    out.print(f"report: {outcome.page}")
