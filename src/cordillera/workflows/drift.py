"""Drift of live samples away from the validation samples of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import FeatureSpec
from cordillera.data.ranking.rows import read_rows
from cordillera.errors import CheckpointError, DataError
from cordillera.files import is_there
from cordillera.numerics.inference.drift import Alarm, DriftCheck, DriftReference, check_false_alarms
from cordillera.recipe import RankingRecipe
from cordillera.run import Run
from cordillera.serving.ranking import quantized_model
from cordillera.serving.ranking.observation import Observer
from cordillera.workflows.scores import some_batches
from cordillera.workflows.trained import features_of, model_of, recipe_of, restore_model, splits_of, with_threads

_ROWS = 16_384  # least number of validation samples that are compared, if there are as many


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
    """Compare a file of samples with the validation samples of a run's model.

    A quantised model holds statistics of these samples, and its numbers are compared. Without one, the statistics are
    computed from the data of the run, which must be there.

    Args:
        run: Run of a ranking model.
        file: CSV, TSV or Parquet file with the columns of the training data; labels are not needed.
        false_alarms: Probability of an alarm if nothing has changed.

    Raises:
        CheckpointError: If there is no checkpoint, or the quantised model is damaged or belongs to another run.
        DataError: If the file cannot be read, or holds fewer than two samples whose numbers are finite; or if the data
            of a run without a quantised model has changed.
        NumericsError: If ``false_alarms`` is not a probability.
    """
    check_false_alarms(false_alarms)
    run = run if isinstance(run, Run) else Run(run)
    recipe = recipe_of(run)
    with with_threads(recipe.threads):
        encoder = Encoder.load(run.folder / "encoder")
        features = features_of(run, encoder)
        find = _of_quantized if is_there(run.folder / quantized_model.FOLDER) else _of_run
        observer, reference = find(run, recipe, encoder, features)
        check, grouped = DriftCheck(reference), True
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


def _of_quantized(
    run: Run, recipe: RankingRecipe, encoder: Encoder, features: FeatureSpec
) -> tuple[Observer, DriftReference]:
    """Return the quantised model of a run, and the statistics that were stored when it was made."""
    made_of = quantized_model.origin(run, use_best=recipe.training.patience is not None)
    folder = run.folder / quantized_model.FOLDER
    model, reference = quantized_model.load(folder, model_of(recipe, features), made_of)
    observer = Observer(model, encoder)
    if (observer.numbers, observer.shares) != (list(reference.names), list(reference.shares)):
        raise CheckpointError(
            "watches other numbers than this library", where=str(folder), remedy="cordillera quantize RUN"
        )
    return observer, reference


def _of_run(
    run: Run, recipe: RankingRecipe, encoder: Encoder, features: FeatureSpec
) -> tuple[Observer, DriftReference]:
    """Return a run's model, and the statistics of its validation split, or of the training split without one."""
    splits = splits_of(run, recipe)
    _, model = restore_model(run, features, torch.device("cpu"))
    observer = Observer(model, encoder)
    held_out = splits.validation if len(splits.validation) else splits.train
    return observer, observer.reference(some_batches(held_out, recipe, _ROWS))
