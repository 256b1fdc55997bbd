"""A server of models that have been trained, or published."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector

from cordillera import recipe as recipes
from cordillera.errors import DataError, RunError
from cordillera.numbers import counted
from cordillera.recipe import RankingRecipe
from cordillera.run import Run
from cordillera.serving.http.app import BODY_BYTES, Services, create_app
from cordillera.serving.http.connections import (
    UNFINISHED_SECONDS,
    SlowConnections,
    end_unfinished,
    explain_full_loop,
)
from cordillera.serving.language.engine import TOGETHER
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.text_metrics import TextMetrics
from cordillera.serving.language.text_service import CACHE_BYTES, TextService
from cordillera.serving.ranking.score_metrics import ScoreMetrics
from cordillera.serving.ranking.score_service import ScoreService, ScoreServiceConfig
from cordillera.workflows.prediction import open_scorer
from cordillera.workflows.processes import Say, silent
from cordillera.workflows.trained import warn_of_status

if TYPE_CHECKING:
    import uvicorn

SWITCH_SECONDS = 0.0005
"""Time after which Python lets another thread run: models and connections take turns more often than by default."""


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
    for name, model in _named(models).items():
        say(f"reads {name} ...")
        facts[name] = _facts(Path(model).expanduser())
        if (run := _ranking_run(model)) is not None:
            limits = ScoreServiceConfig(timeout=min(config.seconds, ScoreServiceConfig().timeout))
            scores[name] = ScoreService(name, open_scorer(run, quantized=config.quantized), limits, score_metrics)
            continue
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


def _facts(folder: Path) -> dict[str, object]:
    """Return the facts on a model for clients; for a run, the name of its folder and the training progress."""
    status = warn_of_status(Run(folder)) if (folder / "recipe.toml").is_file() else None
    if status is None:
        return {}
    return {"run": folder.resolve().name, "step": status.step, "is_complete": status.is_complete}


def _ranking_run(model: str) -> Run | None:
    """Return the run of a folder that holds one of a ranking model, or None."""
    folder = Path(model).expanduser()
    if not (folder / "recipe.toml").is_file():
        return None
    run = Run(folder)
    return run if isinstance(recipes.load(run.recipe_file), RankingRecipe) else None


def _named(models: Sequence[str]) -> dict[str, str]:
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


def serve(
    models: Sequence[str],
    config: ServerConfig | None = None,
    say: Say = silent,
    ready: Callable[[str], None] | None = None,
    on_answer: Callable[[str], object] | None = None,
) -> None:
    """Answer requests over HTTP until SIGTERM, SIGHUP or Ctrl-C; requests that were accepted are then finished.

    In a thread that is not the main one, as in a notebook, signals are left to the program, and it answers until the
    program ends::

        Thread(target=cordillera.serve, args=(["runs/first"],), daemon=True).start()

    Args:
        models: Models, as in :func:`open_services`.
        config: Settings; None for the defaults.
        say: Called with what is done.
        ready: Called with the server's address once it accepts requests.
        on_answer: Called with a line about each request once it is answered.

    Raises:
        RunError: If the address is not free, or is none of this machine.
        DataError: If a model is not found, or a setting is not possible.
        CheckpointError: If a model is damaged.
    """
    import uvicorn

    config = config or ServerConfig()
    sys.setswitchinterval(SWITCH_SECONDS)
    with bind(config) as listening:  # fails before models are read, which takes long
        services = open_services(models, config, say)
        app = create_app(services, api_key=config.api_key, body_bytes=config.body_bytes, on_answer=on_answer)
        address = _address(listening)
        settings = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
        )
        server = _make_server(settings, services, config.leave_seconds, say, lambda: ready and ready(address))
        # What was loaded stays: without this, each full collection looks through it, and all stands still for 0.2 s.
        gc.collect()
        gc.freeze()
        try:
            with _calm_signals():
                server.run(sockets=[listening])
        finally:
            logging.getLogger("uvicorn.error").removeFilter(_is_error)
            gc.unfreeze()
            services.close(1.0)


def _make_server(
    settings: uvicorn.Config, services: Services, leave_seconds: float, say: Say, ready: Callable[[], object]
) -> uvicorn.Server:
    """Return a server that, on shutdown, reports what it waits for, and is marked as leaving before it closes."""
    import uvicorn

    slow = SlowConnections()

    class Server(uvicorn.Server):
        leaves = math.inf
        is_said = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if services.leaving.is_set() or not leave_seconds:
                super().handle_exit(sig, frame)
            else:
                self.leaves = time.monotonic() + leave_seconds
            services.leaving.set()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            explain_full_loop(asyncio.get_running_loop(), say)
            await super().startup(sockets)
            ready()

        async def on_tick(self, counter: int) -> bool:
            if counter % 10 == 0:  # about once a second
                slow.end(self.server_state.connections)
            if self.leaves < math.inf and not self.is_said:
                say(f"answers for {leave_seconds:g} s more, and /health says that it leaves")
                self.is_said = True
            self.should_exit |= time.monotonic() >= self.leaves
            return await super().on_tick(counter)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            services.leaving.set()
            asyncio.get_running_loop().call_later(UNFINISHED_SECONDS, self.end_unfinished)
            if left := len(self.server_state.tasks):
                most = f"at most {settings.timeout_graceful_shutdown} s"
                say(f"stops after {counted(left, 'request')} that it has accepted ({most}); Ctrl-C ends it at once")
            logging.getLogger("uvicorn.error").addFilter(_is_error)
            await super().shutdown(sockets)
            if cut := len(self.server_state.tasks):
                say(f"{counted(cut, 'request')} had not ended in time")

        def end_unfinished(self) -> None:
            if ended := end_unfinished(self.server_state.connections):
                say(f"{counted(ended, 'request')} did not arrive whole")

    return Server(settings)


def _is_error(record: logging.LogRecord) -> bool:
    """Return whether a log record reports more than an interrupted request."""
    if record.msg.startswith("Cancel "):
        return False
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


@contextlib.contextmanager
def _calm_signals() -> Iterator[None]:
    """Leave SIGTERM and Ctrl-C to the server, which raises them again at its end; treat SIGHUP as SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    calm = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        calm[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        for number, handler in calm.items():
            signal.signal(number, handler)


def is_loopback(host: str) -> bool:
    """Return whether a server at this address is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket at the address of a server, which does not listen yet.

    Raises:
        RunError: If the address is not free, or is none of this machine.
    """
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        # With the protocol, asyncio lets connections send at once (TCP_NODELAY), which else wait 40 ms for each answer.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((config.host, config.port))
        except BaseException:
            made.close()
            raise
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise RunError(
            f"cannot be listened at: {said}",
            where=f"{config.host}:{config.port}",
            remedy="choose another --port or --host",
        ) from error
    return made


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
