"""Scorers of finished ranking runs, for files (``cordillera predict``) and for requests (``cordillera serve``)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import FeatureSpec
from cordillera.errors import RunError
from cordillera.kernels.repeatable import products_repeat
from cordillera.recipe import RankingRecipe
from cordillera.run import Run
from cordillera.serving.ranking import quantized_model
from cordillera.serving.ranking.scorer import RowScorer
from cordillera.training.ranking.scoring import select_device
from cordillera.workflows._say import silent
from cordillera.workflows.threads import threads_of
from cordillera.workflows.trained import card_of, load_model, model_of, recipe_of, with_threads


def open_scorer(run: Run | Path | str, *, quantized: bool = False, planned: bool = False) -> RowScorer:
    """Load the scorer of a finished ``run``, whose scores are those of :func:`~cordillera.predict` to the bit.

    Args:
        quantized: Whether to score with the model that ``cordillera quantize`` made from the run.
        planned: Whether to score with the kernels that ``cordillera probe`` chose for the run; torch must then have the
            number of threads that the plan was measured with.

    Raises:
        CheckpointError: If there is no checkpoint or no quantised model, or it is corrupt.
        NumericsError: If there is no plan, or it does not fit.
        RunError: If the run is of a language model or unfinished, or both ``quantized`` and ``planned`` are given.
    """
    run = run if isinstance(run, Run) else Run(run)
    return _load(run, recipe_of(run), quantized, planned)


@contextlib.contextmanager
def opened_scorer(run: Run, *, quantized: bool, planned: bool) -> Iterator[tuple[RankingRecipe, RowScorer]]:
    """Load the recipe and the scorer of a run, and set the run's number of threads within the region.

    ``quantized`` and ``planned`` are those of :func:`open_scorer`.
    """
    recipe = recipe_of(run)
    # A plan is valid for the number of threads that it was measured with.
    with with_threads(recipe.threads if planned else threads_of(recipe.threads, silent)):
        yield recipe, _load(run, recipe, quantized, planned)


def _load(run: Run, recipe: RankingRecipe, quantized: bool, planned: bool) -> RowScorer:
    if quantized and planned:
        raise RunError(
            "a quantised model has no plan of kernels", where=str(run.folder), remedy="choose one of the two"
        )
    device = select_device(recipe.device)
    encoder = Encoder.load(run.folder / "encoder")
    tasks = tuple(card_of(run)["tasks"])
    features = replace(encoder.features, tasks=tasks)
    if device.type == "cpu" and not products_repeat():
        warnings.warn(
            "torch multiplied before cordillera was imported, or MKL_CBWR is set: the last bits of scores may depend "
            "on the rows beside them; import cordillera first",
            stacklevel=3,
        )
    return _scorer_of(run, recipe, encoder, features, device, quantized=quantized, planned=planned)


def _scorer_of(
    run: Run,
    recipe: RankingRecipe,
    encoder: Encoder,
    features: FeatureSpec,
    device: torch.device,
    *,
    quantized: bool,
    planned: bool,
) -> RowScorer:
    cpu, training = torch.device("cpu"), recipe.training
    if quantized:
        made_of = quantized_model.origin(run, use_best=training.patience is not None)
        folder = run.folder / quantized_model.FOLDER
        model, _ = quantized_model.load(folder, model_of(recipe, features), made_of)
        return RowScorer(encoder, model, features.tasks, cpu, quantized_model.precision_of(folder))
    if planned:
        from cordillera.workflows.probing import load_planned

        _, model = load_model(run, features, cpu)
        model, most = load_planned(run, model)
        return RowScorer(encoder, model, features.tasks, cpu, "fp32", fixed=most)
    _, model = load_model(run, features, device)
    return RowScorer(encoder, model, features.tasks, device, training.precision, emulate=training.emulate)
