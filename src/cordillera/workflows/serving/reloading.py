"""Ranking models of a server that are opened again while it answers."""

from __future__ import annotations

import contextlib
import gc
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cordillera import recipe as recipes
from cordillera.errors import CheckpointError, CordilleraError, RunError
from cordillera.files import read_json_object
from cordillera.recipe import RankingRecipe
from cordillera.run import Run
from cordillera.serving.http.app import Services
from cordillera.serving.ranking.row_reader import RequestPlace, RowReader
from cordillera.serving.ranking.run_metrics import RunMetrics
from cordillera.serving.ranking.run_service import RunService
from cordillera.serving.ranking.score_service import ScoreService
from cordillera.serving.ranking.scorer import RowScorer
from cordillera.training import checkpoints
from cordillera.workflows.prediction import open_scorer
from cordillera.workflows.processes import Say, silent
from cordillera.workflows.serving.opening import ServerConfig, _named, _ranking_run, open_services
from cordillera.workflows.trained import warn_of_status

_ATTEMPTS = 3  # at a run whose training writes a checkpoint meanwhile
_END_SECONDS = 60.0  # for the last batch of a model that has been replaced


@dataclass(frozen=True)
class ReloadableServices(Services):
    """Services whose ranking models can be opened again.

    Attributes:
        reload: Asks for that, and returns at once.
        on_close: Called before the services are closed.
    """

    reload: Callable[[], object] = bool
    on_close: Callable[[], object] = bool

    def close(self, seconds: float) -> None:
        """Reload no more, and close the services as others are, at most ``seconds`` later."""
        self.on_close()
        super().close(seconds)


def open_reloadable_services(models: Sequence[str], config: ServerConfig, say: Say = silent) -> ReloadableServices:
    """Load models to be served, of which SIGUSR1 opens the ranking models again.

    A reload reads what the arguments name, such as a link that now leads to another run, or a newer checkpoint of a
    run. The new model must take the rows of the present one, have its tasks, and score two rows. Then it takes the
    place of the present one: requests that were read before are answered by the earlier model, later ones by the new
    one. The earlier model is released after its last request. If anything fails, the present model answers as before.
    Signals are heard if this is called in the main thread.

    Args:
        models: Models, as in :func:`~cordillera.workflows.serving.opening.open_services`.
        config: Settings of the server.
        say: Called with what is done.

    Raises:
        DataError: If a model is not found, or two have one name.
        CheckpointError: If one is damaged.
    """
    named = _named(models)
    runs = {name: model for name, model in named.items() if _ranking_run(model) is not None}
    # A link may change while its run is read.
    pinned = [
        _pinned(name, _folder(model)) if name in runs else given
        for given, (name, model) in zip(models, named.items(), strict=True)
    ]
    reloader = _Reloader(runs, config.quantized, say)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_heard(reloader.request))
        opened = open_services(pinned, config, say)
        for name in opened.texts:
            reloader.facts[name] = _text_facts(named[name], opened.facts[name])
        stack.callback(reloader.stop)
        reloader.start(opened)
        stop = stack.pop_all()
    return ReloadableServices(
        opened.texts, reloader.scores, opened.registry, reloader.facts, opened.leaving, reloader.request, stop.close
    )


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


class _Reloader:
    """Opens ranking models again, in a thread of its own, and puts them in the place of those that answer.

    Args:
        runs: Path of the run of each ranking model, by name.
        quantized: Whether they are served as ``cordillera quantize`` made them.
        say: Called with what is done.

    Attributes:
        scores: Services that answer, by name.
        facts: Facts on the weights of each ranking model, by name.
    """

    def __init__(self, runs: Mapping[str, str], quantized: bool, say: Say) -> None:
        self._runs, self._quantized, self._say = runs, quantized, say
        self.scores: dict[str, ScoreService] = {}
        self.facts: dict[str, Mapping[str, Any]] = {}
        self._stopped = self._leaving = threading.Event()
        # Its put may interrupt another put, as the handler of a signal and the end of an object do.
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def request(self) -> None:
        """Ask for a reload."""
        self._tasks.put(self._reload)

    def start(self, opened: Services) -> None:
        """Take over the ranking models that were opened, and begin to work."""
        self._metrics, self._leaving, self._has_texts = RunMetrics(opened.registry), opened.leaving, bool(opened.texts)
        for name, service in opened.scores.items():
            service.close()  # another one takes its scorer
            self._put(name, service.scorer, service, _facts_of(Run(_folder(self._runs[name]))))
        threading.Thread(target=self._work, name="reloader", daemon=True).start()

    def stop(self) -> None:
        """End; a model that is being opened is not used."""
        self._stopped.set()
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # holds what was replaced
            if gc.get_freeze_count():  # what was replaced may be among the objects that are kept for good
                gc.unfreeze()
                gc.collect()
                gc.freeze()

    def _reload(self) -> None:
        if self._leaving.is_set():
            return
        if self._has_texts:
            self._say("language models are not read again: that takes a new server")
        for name in self._runs:
            try:
                done = self._reload_one(name)
            except Exception as error:  # whatever it is, the present model answers
                if not isinstance(error, CordilleraError):
                    traceback.print_exc()
                self.facts[name] = {**self.facts[name], "last_reload_failed": True}
                self._metrics.note_reload(name, is_done=False)
                done = f"was not read again and answers as before: {error}"
            self._say(f"{name} {done}")

    def _reload_one(self, name: str) -> str:
        present = self.scores[name]
        self._say(f"reads {name} ...")
        scorer, facts = self._open(_folder(self._runs[name]))
        _check_interface(scorer, present)
        _probe(scorer)
        if self._stopped.is_set():
            return "is not replaced, as the server stops"
        self._put(name, scorer, present, facts)
        self._metrics.note_reload(name, is_done=True)
        return f"answers with {facts['run']}, step {facts['step']:,}"

    def _open(self, folder: Path) -> tuple[RowScorer, dict[str, Any]]:
        run = Run(folder)
        for _ in range(_ATTEMPTS):
            facts, scorer = _facts_of(run), open_scorer(run, quantized=self._quantized)
            if _facts_of(run)["step"] == facts["step"]:
                return scorer, facts
        raise RunError(
            "gets checkpoints faster than they are read", where=str(folder), remedy="reload it when training has ended"
        )

    def _put(self, name: str, scorer: RowScorer, present: ScoreService, facts: Mapping[str, Any]) -> None:
        """Let a scorer answer later requests with the limits of the ``present`` service, which ends when it is idle."""
        service = RunService(name, scorer, present.config, present.metrics, self._metrics, facts)
        self.scores[name] = service.lent(lambda: self._tasks.put(lambda: service.close(_END_SECONDS)))
        self.facts[name] = facts
        self._metrics.show(name, facts, scorer.encoder)


def _folder(model: str) -> Path:
    return Path(model).expanduser().resolve()


def _pinned(name: str, folder: Path) -> str:
    """Return an argument that names a folder; names of folders may hold =."""
    return str(folder) if folder.name == name else f"{name}={folder}"


def _facts_of(run: Run) -> dict[str, Any]:
    """Return the facts on the weights of a run: name, step and, if known, whether training came to its end."""
    status = warn_of_status(run)
    found = {"run": run.folder.resolve().name, "step": step_of_weights(run)}
    return found if status is None else {**found, "is_complete": status.is_complete}


def _text_facts(model: str, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the facts on a language model with the step of its weights, if it is a run."""
    return {**facts, "step": step_of_weights(Run(_folder(model)))} if "step" in facts else facts


def _check_interface(scorer: RowScorer, present: ScoreService) -> None:
    """Check that a scorer takes all rows that the present service takes, and has its tasks."""
    remedy = "start a new server for a model with another interface"
    if scorer.tasks != present.tasks:
        raise RunError(f"scores {', '.join(scorer.tasks)} instead of {', '.join(present.tasks)}", remedy=remedy)
    known = {column["name"]: column for column in present.reader.describe()}
    for column in RowReader(scorer.encoder).describe():
        before = known.get(column["name"])
        if before is None:
            raise RunError(f"needs the column '{column['name']}', which rows do not have so far", remedy=remedy)
        if before["type"] != column["type"]:
            raise RunError(
                f"takes the column '{column['name']}' as {column['type']} instead of {before['type']}", remedy=remedy
            )
        if before["nullable"] and not column["nullable"]:
            raise RunError(
                f"takes no blanks in the column '{column['name']}', where rows may have them so far", remedy=remedy
            )


def _probe(scorer: RowScorer) -> None:
    """Score a row, and the same one with blanks, so that weights that are not finite are found before clients do."""
    reader = RowReader(scorer.encoder)
    whole = reader.example()
    blank = {**whole, **{column["name"]: None for column in reader.describe() if column["nullable"]}}
    scorer.score(reader.frame([reader.read_objects([whole, blank])]), RequestPlace("probe"))


@contextlib.contextmanager
def _heard(request: Callable[[], object]) -> Iterator[None]:
    """Call ``request`` at SIGUSR1 within the region, if it is entered by the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda *_: request())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before or signal.SIG_DFL)
