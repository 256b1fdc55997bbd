"""A server of models that have been trained, or published."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from cordillera.errors import RunError
from cordillera.numbers import counted
from cordillera.serving.http.app import Services, create_app
from cordillera.serving.http.connections import (
    HEADER_SECONDS,
    UNFINISHED_SECONDS,
    SlowConnections,
    end_unfinished,
    explain_full_loop,
)
from cordillera.workflows.processes import Say, silent
from cordillera.workflows.serving.opening import ServerConfig
from cordillera.workflows.serving.reloading import open_reloadable_services

if TYPE_CHECKING:
    import uvicorn

SWITCH_SECONDS = 0.0005
"""Time after which Python lets another thread run: models and connections take turns more often than by default."""


def serve(
    models: Sequence[str],
    config: ServerConfig | None = None,
    say: Say = silent,
    ready: Callable[[str], None] | None = None,
    on_answer: Callable[[str], object] | None = None,
) -> None:
    """Answer requests over HTTP until SIGTERM, SIGHUP or Ctrl-C; requests that were accepted are then finished.

    SIGUSR1 opens the ranking models again, as
    :func:`~cordillera.workflows.serving.reloading.open_reloadable_services` says. In a thread that is not the main one,
    as in a notebook, signals are left to the program, and it answers until the program ends::

        Thread(target=cordillera.serve, args=(["runs/first"],), daemon=True).start()

    Args:
        models: Models, as in :func:`~cordillera.workflows.serving.opening.open_services`.
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
        services = open_reloadable_services(models, config, say)
        app = create_app(services, api_key=config.api_key, body_bytes=config.body_bytes, on_answer=on_answer)
        address = _address(listening)
        settings = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            ws="none",
            lifespan="off",
            timeout_keep_alive=round(HEADER_SECONDS),
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
