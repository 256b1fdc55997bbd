"""``cordillera quantize``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cordillera.cli._show import AsJson, CommandOutput, Field, Quiet, Sheet, check_result, titled_table
from cordillera.errors import Interrupted
from cordillera.numbers import fixed

if TYPE_CHECKING:
    from cordillera.workflows.quantization import Quantized


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
    from cordillera.workflows.processes import silent
    from cordillera.workflows.quantization import quantize as work

    check_result(run, "quantized/report.json")
    with CommandOutput(as_json) as answer:
        try:
            outcome = work(run, budget / 100, smallest=smallest, say=silent if quiet else answer.notes.print)
        except KeyboardInterrupt:
            raise Interrupted(
                "no model was written; an earlier one is as it was",
                where=str(run),
                remedy="give the same command again",
            ) from None
        tables = _tables(outcome)
        answer.tables(parts=tables["parts"])
        if outcome.layers:
            answer.tables(layers=tables["layers"])
        else:
            answer.keep(layers=[])
        answer.say(
            _summary(outcome, budget / 100),
            **{name: getattr(outcome, name) for name in ("bytes", "ne", "seconds", "searched", "confirmed", "sweep")},
            evaluations=len(outcome.selection.evaluated),
            budget=budget / 100,
        )
        if all(option == "fp32" for option in outcome.selection.options.values()):
            answer.say("nothing was worth quantising within the budget and the time of a batch: serve the run as it is")
        answer.say(f"report: {outcome.page}", report=outcome.page)


def _tables(outcome: Quantized) -> dict[str, Sheet]:
    """Return tables of the precision of each part and of the accuracy of each layer."""
    selection = outcome.selection
    alone = Field("alone", "alone, at its cheapest", lambda change: f"NE {100 * change.mean:+.4f} %", right=False)
    parts = Sheet("precision of each part", Field("part"), Field("kept_as"), alone)
    for name, option in selection.options.items():
        parts.add(name, option, selection.alone.get(name))
    if not selection.alone:  # all parts keep the budget together, so none was tried alone
        parts.columns.pop()
    layers = Sheet(
        "layers beside fp32: ratio of signal to error in dB, more is better",
        Field("layer"),
        Field("kernel"),
        Field("alone_db", "on the same inputs", _decibels, right=False),
        Field("in_place_db", "after the layers before", _decibels, right=False),
    )
    for layer in outcome.layers:
        layers.add(layer.name, layer.kernel, layer.alone_db, layer.in_place_db)
    return {"parts": parts, "layers": layers}


def _summary(outcome: Quantized, budget: float) -> Table:
    """Return a table of bytes, quality and speed beside the fp32 model, for a ``budget`` of relative rise of NE."""
    summary = titled_table("the model", "", "fp32", "quantised", "ratio")
    before, after = outcome.bytes
    summary.add_row("bytes", f"{before:,}", f"{after:,}", f"{100 * after / before:.1f} %")
    summary.add_row("NE", fixed(outcome.ne[0], 6), fixed(outcome.ne[1], 6), f"{outcome.ne[1] / outcome.ne[0]:.6f}")
    slow, fast = (1e3 * seconds for seconds in outcome.seconds)
    speed = f"{slow / fast:.2f} times as fast" if fast <= slow else f"{fast / slow:.2f} times as slow"
    summary.add_row("a batch of 256", f"{slow:.2f} ms", f"{fast:.2f} ms", speed)
    for name, change in (("searched", outcome.searched), ("test split", outcome.confirmed)):
        if change is not None:
            interval = f"{100 * change.low:+.4f} to {100 * change.high:+.4f}"
            verdict = "within the budget" if change.high <= budget else "not shown to be within the budget"
            if change.low > budget:
                verdict = "above the budget"
            summary.add_row(f"NE, {name}", "", f"{100 * change.mean:+.4f} %", f"{interval}; {verdict}")
    evaluated = len(outcome.selection.evaluated)
    summary.add_row("evaluations", "", str(evaluated), f"a sweep of all options: {outcome.sweep}")
    return summary


def _decibels(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1f}"
