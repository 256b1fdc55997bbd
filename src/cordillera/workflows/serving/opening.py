"""Models of a server, opened by their names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector

from cordillera import recipe as recipes
from cordillera.errors import CheckpointError, DataError, RunError
from cordillera.files import read_json_object
from cordillera.recipe import RankingRecipe
from cordillera.run import Run
from cordillera.serving.http.app import BODY_BYTES, Services
from cordillera.serving.language.engine import TOGETHER
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.text_metrics import TextMetrics
from cordillera.serving.language.text_service import CACHE_BYTES, TextService
from cordillera.serving.ranking.score_metrics import ScoreMetrics
from cordillera.serving.ranking.score_service import ScoreService, ScoreServiceConfig
from cordillera.serving.ranking.scorer import RowScorer
from cordillera.training import checkpoints
from cordillera.workflows.prediction import open_scorer
from cordillera.workflows.processes import Say, silent
from cordillera.workflows.trained import warn_of_status

_ATTEMPTS = 3  # at a run whose training writes a checkpoint meanwhile


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server.

    Attributes:
        host: Address that it listens at; others than loopback are reachable from outside.
        port: Port; 0 for one that is free.
        api_key: Key that requests need; None if they need none.
        dtype: Data type of language models' weights, as
            :class:`~cordillera.serving.language.language_model.LanguageModel` takes it.
        device: ``auto``, ``cpu`` or ``cuda``.
        drafter: What drafts tokens: ``auto``, ``ngram``, the file of a trained drafter, both joined by ``+``, or
            ``none``.
        quantized: Whether ranking runs are served as ``cordillera quantize`` made them.
        fp8: Whether feed-forward nets of language models are computed in FP8.
        context: Length of a language model's longest text with its prompt, in tokens; None for the model's context.
        texts: Texts that a model writes at a time, at most 32.
        queue: Texts of a model that are accepted at a time, those that wait included.
        cache_bytes: Memory for keys and values of a model.
        seconds: Time after which a request is ended.
        drain_seconds: Time that accepted requests have left when the server is stopped.
        leave_seconds: Time for which a server that is told to stop goes on to answer, while ``/health`` tells a proxy
            to send it no more.
        body_bytes: Largest body of a request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    drafter: str = "auto"
    quantized: bool = False
    fp8: bool = False
    context: int | None = None
    texts: int = TOGETHER
    queue: int = 256
    cache_bytes: int = CACHE_BYTES
    seconds: float = 600.0
    drain_seconds: float = 60.0
    leave_seconds: float = 0.0
    body_bytes: int = BODY_BYTES


def open_services(models: Sequence[str], config: ServerConfig, say: Say = silent) -> Services:
    """Load models to be served.

    Args:
        models: Each the folder of a ranking run, or a language model as
            :class:`~cordillera.serving.language.language_model.LanguageModel` names it; ``NAME=MODEL`` serves it by
            another name than that of its file or folder.
        config: Settings of the server.
        say: Called with what is done.

    Raises:
        DataError: If a model is not found, or two have one name.
        CheckpointError: If one is damaged.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    text_metrics, score_metrics = TextMetrics(registry), ScoreMetrics(registry)
    texts: dict[str, TextService] = {}
    scores: dict[str, ScoreService] = {}
    facts: dict[str, dict[str, object]] = {}
    for name, model in named_models(models).items():
        say(f"reads {name} ...")
        if (run := _ranking_run(model)) is not None:
            scorer, facts[name] = open_run(run, config.quantized)
            limits = ScoreServiceConfig(timeout=min(config.seconds, ScoreServiceConfig().timeout))
            scores[name] = ScoreService(name, scorer, limits, score_metrics, facts[name])
            continue
        facts[name] = _facts_of_text(Path(model).expanduser())
        opened = LanguageModel(
            model,
            dtype=config.dtype,
            device=config.device,
            drafter=config.drafter,
            fp8=config.fp8,
            context=config.context,
        )
        texts[name] = TextService(
            opened,
            texts=config.texts,
            queue=config.queue,
            cache_bytes=config.cache_bytes,
            seconds=config.seconds,
            name=name,
            metrics=text_metrics,
        )
    return Services(texts, scores, registry, facts)


def open_run(run: Run, quantized: bool) -> tuple[RowScorer, dict[str, Any]]:
    """Open the scorer of a ranking ``run``, with ``quantized`` that of its quantised model; return it with facts.

    The facts on the weights are the name of the run's folder, the step, and, if known, whether training came to its
    end.

    Raises:
        CheckpointError: If there is no checkpoint, or it is damaged.
        RunError: If training writes checkpoints faster than they are read.
    """
    for _ in range(_ATTEMPTS):
        facts, scorer = _facts(run), open_scorer(run, quantized=quantized)
        if step_of_weights(run) == facts["step"]:
            return scorer, facts
    remedy = "open it when training has ended"
    raise RunError("gets checkpoints faster than they are read", where=str(run.folder), remedy=remedy)


def step_of_weights(run: Run) -> int:
    """Return the step of the weights of a ``run`` that answer: the best in validation with patience, else the newest.

    Raises:
        CheckpointError: If there is no checkpoint, or the newest one is damaged.
    """
    steps = checkpoints.steps(run.checkpoints)
    if not steps:
        raise CheckpointError("holds no checkpoint", where=str(run.checkpoints), remedy="train first")
    recipe = recipes.load(run.recipe_file)
    if isinstance(recipe, RankingRecipe) and recipe.training.patience is not None:
        file = checkpoints.folder_of(run.checkpoints, steps[-1]) / checkpoints.STATE
        best = read_json_object(file, error=CheckpointError).get("best_step")
        return int(best) if best is not None else steps[-1]
    return steps[-1]


def _facts(run: Run) -> dict[str, Any]:
    status = warn_of_status(run)
    found = {"run": run.folder.name, "step": step_of_weights(run)}
    return found if status is None else {**found, "is_complete": status.is_complete}


def _facts_of_text(folder: Path) -> dict[str, Any]:
    """Return the facts on a language model: those of a run, or none."""
    run = Run(folder.resolve()) if (folder / "recipe.toml").is_file() else None
    return {} if run is None else _facts(run)


def _ranking_run(model: str) -> Run | None:
    """Return the run of a folder that holds one of a ranking model, by the path to which links lead, or None."""
    folder = Path(model).expanduser().resolve()
    if not (folder / "recipe.toml").is_file():
        return None
    run = Run(folder)
    return run if isinstance(recipes.load(run.recipe_file), RankingRecipe) else None


def named_models(models: Sequence[str]) -> dict[str, str]:
    """Return the models of arguments, by the names by which they are served.

    Raises:
        DataError: If there is none, or two have one name.
    """
    found: dict[str, str] = {}
    for given in models:
        name, equals, model = given.partition("=")
        if os.path.exists(path := os.path.expanduser(given)):  # runs of a sweep have = in their names
            name, model = Path(path).resolve().name, given
        elif not equals:
            name, model = given, given
        if not name or not model:
            raise DataError(f"{given!r} is not NAME=MODEL", where="serve")
        if name in found:
            raise DataError(f"two models have the name {name!r}", where="serve", remedy="write NAME=MODEL for one")
        found[name] = model
    if not found:
        raise DataError("there is no model", where="serve", remedy="name one, such as smollm2")
    return found
