"""What several commands print alike."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from cordillera.training.evaluation import Evaluation


def console() -> Console:
    """The console of all commands: no automatic colouring of numbers and paths, no lines cut when piped."""
    return Console(highlight=False, soft_wrap=True)


def number(value: float, digits: int = 4) -> str:
    """A metric for people; NaN is a metric that the data does not define."""
    return "undefined" if math.isnan(value) else f"{value:.{digits}f}"


def evaluation_table(evaluation: Evaluation) -> Table:
    """The metrics of an evaluation, a row a task."""
    table = Table(title=f"{evaluation.split} split, {evaluation.examples:,} examples", title_justify="left")
    for heading in ("task", "NE", "AUC", "GAUC", "log loss", "calibration", "positives"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for task, values in evaluation.metrics().items():
        share = values["positives"] / values["examples"] if values["examples"] else math.nan
        cells = [number(values.get(key, math.nan)) for key in ("ne", "auc", "gauc", "log_loss", "calibration")]
        table.add_row(task, *cells, "undefined" if math.isnan(share) else f"{share:.1%}")
    return table
