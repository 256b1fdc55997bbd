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

from cordillera.errors import CordilleraError, RunError
from cordillera.run import Run
from cordillera.serving.http.app import Services
from cordillera.serving.ranking.row_reader import RequestPlace, RowReader
from cordillera.serving.ranking.score_service import ScoreService
from cordillera.serving.ranking.scorer import RowScorer
from cordillera.workflows.processes import Say, silent
from cordillera.workflows.serving.opening import ServerConfig, named_models, open_run, open_services

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
    reloader = _Reloader(named_models(models), config.quantized, say)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_heard(reloader.request))
        opened = open_services(models, config, say)
        stack.callback(reloader.stop)
        reloader.start(opened)
        stop = stack.pop_all()
    return ReloadableServices(
        opened.texts, reloader.scores, opened.registry, reloader.facts, opened.leaving, reloader.request, stop.close
    )


class _Reloader:
    """Opens ranking models again, in a thread of its own, and puts them in the place of those that answer.

    Args:
        models: Path of each model, by name.
        quantized: Whether ranking runs are served as ``cordillera quantize`` made them.
        say: Called with what is done.

    Attributes:
        scores: Services that answer, by name.
        facts: Facts on the weights of each model, by name.
    """

    def __init__(self, models: Mapping[str, str], quantized: bool, say: Say) -> None:
        self._models, self._quantized, self._say = models, quantized, say
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
        self._leaving, self._has_texts = opened.leaving, bool(opened.texts)
        self.facts |= opened.facts
        for service in opened.scores.values():
            self._put(service)
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
        for name, present in list(self.scores.items()):
            try:
                done = self._reload_one(name, present)
            except Exception as error:  # whatever it is, the present model answers
                if not isinstance(error, CordilleraError):
                    traceback.print_exc()
                self.facts[name] = {**self.facts[name], "last_reload_failed": True}
                if present.metrics is not None:
                    present.metrics.note_reload(name, is_done=False)
                done = f"was not read again and answers as before: {error}"
            self._say(f"{name} {done}")

    def _reload_one(self, name: str, present: ScoreService) -> str:
        self._say(f"reads {name} ...")
        scorer, facts = open_run(Run(Path(self._models[name]).expanduser().resolve()), self._quantized)
        _check_interface(scorer, present)
        _probe(scorer)
        if self._stopped.is_set():
            return "is not replaced, as the server stops"
        self._put(ScoreService(name, scorer, present.config, present.metrics, facts))
        if present.metrics is not None:
            present.metrics.note_reload(name, is_done=True)
        return f"answers with {facts['run']}, step {facts['step']:,}"

    def _put(self, service: ScoreService) -> None:
        """Let a service answer later requests; it is closed when another one has its place and it is idle."""
        name = service.name
        self.scores[name] = service.lent(lambda: self._tasks.put(lambda: service.close(_END_SECONDS)))
        self.facts[name] = service.facts
        if service.metrics is not None:
            service.metrics.show(name, service.facts, service.scorer.encoder)


def _check_interface(scorer: RowScorer, present: ScoreService) -> None:
    """Check that a scorer takes all rows that the present service takes, and has its tasks."""
    remedy = "start a new server for a model with another interface"
    if scorer.tasks != present.tasks:
        raise RunError(f"scores {', '.join(scorer.tasks)} instead of {', '.join(present.tasks)}", remedy=remedy)
    known = {column["name"]: column for column in _columns(present.reader)}
    for column in _columns(RowReader(scorer.encoder)):
        before = known.get(column["name"])
        if before is None:
            raise RunError(f"needs the column '{column['name']}', which rows do not have so far", remedy=remedy)
        if before["type"] != column["type"]:
            raise RunError(
                f"takes the column '{column['name']}' as {column['type']} instead of {before['type']}", remedy=remedy
            )
        if column["rows"] is not None and (before["rows"] is None or column["rows"] < before["rows"]):
            so_far = "any" if before["rows"] is None else f"below {before['rows']:,}"
            raise RunError(
                f"takes ids of the column '{column['name']}' below {column['rows']:,}, so far {so_far}", remedy=remedy
            )
        if before["nullable"] and not column["nullable"]:
            raise RunError(
                f"takes no blanks in the column '{column['name']}', where rows may have them so far", remedy=remedy
            )


def _columns(reader: RowReader) -> list[dict[str, Any]]:
    """Return the columns that rows need, with the number of ``rows`` of a table whose ids are its rows."""
    tables, schema = reader.encoder.features.tables, reader.schema
    plain = {
        one.name: one.table or one.name for one in (*schema.categorical, *schema.lists) if one.encoding == "identity"
    }
    return [
        {**column, "rows": tables[plain[column["name"]]] if column["name"] in plain else None}
        for column in reader.describe()
    ]


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
