"""``cordillera quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import AsJson, CommandOutput, Quiet, quantized_summary, quantized_tables
from cordillera.errors import Interrupted


def quantize(
    run: Annotated[Path, typer.Argument(help="A trained ranking run's folder.")],
    budget: Annotated[
        float, typer.Option(min=0.0, help="Largest relative rise of NE, in per cent, on the validation split.")
    ] = 0.02,
    smallest: Annotated[
        bool, typer.Option("--smallest", help="Weigh bytes alone: 2-bit rows, layers slower than in fp32.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make a smaller copy of a run's model.

    Every table and layer gets the fewest bits that a budget of quality allows. The copy is written into the run.
    """
    from cordillera.workflows.quantization import quantize as work

    with CommandOutput(as_json) as answer:

        def say(text: str) -> None:
            if not quiet:
                answer.notes.print(text)

        try:
            outcome = work(run, budget / 100, smallest=smallest, say=say)
        except KeyboardInterrupt:
            raise Interrupted(
                "no model was written; an earlier one is as it was",
                where=str(run),
                remedy="give the same command again",
            ) from None
        tables = quantized_tables(outcome)
        answer.tables(parts=tables["parts"])
        if outcome.layers:
            answer.tables(layers=tables["layers"])
        else:
            answer.keep(layers=[])
        answer.say(
            quantized_summary(outcome, budget / 100),
            **{name: getattr(outcome, name) for name in ("bytes", "ne", "seconds", "searched", "confirmed", "sweep")},
            evaluations=len(outcome.selection.evaluated),
            budget=budget / 100,
        )
        if all(option == "fp32" for option in outcome.selection.options.values()):
            answer.say("nothing was worth quantising within the budget and the time of a batch: serve the run as it is")
        answer.say(f"report: {outcome.page}", report=outcome.page)
