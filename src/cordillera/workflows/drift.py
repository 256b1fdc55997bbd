"""Drift of live samples away from the samples on which a quantised model was calibrated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.rows import read_rows
from cordillera.errors import CheckpointError, DataError
from cordillera.numerics.inference.drift import Alarm, DriftCheck, check_false_alarms
from cordillera.run import Run
from cordillera.serving.ranking import quantized_model
from cordillera.serving.ranking.observation import Observer
from cordillera.workflows.trained import card_of, model_of, recipe_of, with_threads


@dataclass(frozen=True)
class Drift:
    """Result of :func:`watch`.

    Attributes:
        alarms: Numbers and shares that moved, in ascending order of probability.
        watched: Number of numbers and shares that were watched.
        checks: Number of comparisons among which the probability of a false alarm is divided.
        lacks: Name of the group column if the file does not have it, so that all samples count as independent.
    """

    samples: int
    alarms: list[Alarm]
    watched: int
    checks: int
    lacks: str | None


def watch(run: Run | Path | str, file: Path | str, *, false_alarms: float = 1e-3) -> Drift:
    """Compare a file of samples with the samples on which a quantised model was calibrated.

    Args:
        run: Run with a quantised model.
        file: CSV, TSV or Parquet file with the columns of the training data; labels are not needed.
        false_alarms: Probability of an alarm if nothing has changed.

    Raises:
        CheckpointError: If there is no quantised model, or it is damaged or belongs to another run.
        DataError: If the file cannot be read, or holds fewer than two samples whose numbers are finite.
        NumericsError: If ``false_alarms`` is not a probability.
    """
    check_false_alarms(false_alarms)
    run = run if isinstance(run, Run) else Run(run)
    recipe = recipe_of(run)
    with with_threads(recipe.threads):
        encoder = Encoder.load(run.folder / "encoder")
        features = replace(encoder.features, tasks=tuple(card_of(run)["tasks"]))
        made_of = quantized_model.origin(run, use_best=recipe.training.patience is not None)
        folder = run.folder / quantized_model.FOLDER
        model, reference = quantized_model.load(folder, model_of(recipe, features), made_of)
        observer, check, grouped = Observer(model, encoder), DriftCheck(reference), True
        if (observer.numbers, observer.shares) != (list(reference.names), list(reference.shares)):
            raise CheckpointError(
                "watches other numbers than this library", where=str(folder), remedy="cordillera quantize RUN"
            )
        for frame, place in read_rows(str(file), recipe.data, encoder.schema, labels=False):
            rows = encoder.encode(frame, where=place, labels=False)
            grouped &= rows.groups is not None
            for begin in range(0, len(rows), 1024):
                part = rows.take(np.arange(begin, min(begin + 1024, len(rows)))).batch()
                observer.update(check, part)
    if check.samples < 2:
        lost = f", and {check.lost} on which a number of the model is not finite" if check.lost else ""
        raise DataError(f"holds fewer than two samples that can be looked at ({check.samples}){lost}", where=str(file))
    lacks = None if grouped else encoder.schema.group
    watched = len(reference.names) + len(reference.shares) + 1
    return Drift(check.samples + check.lost, check.alarms(false_alarms), watched, check.checks, lacks)
