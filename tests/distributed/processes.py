"""Gloo processes that tests start."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _processes
import pytest
import torch.distributed as dist
from _processes import Ended

__all__ = ["Ended", "asked_for", "found_by", "free_port", "needs_gloo", "run_processes"]

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without Gloo"
)

# What most of them would load.
_LOADED = (
    "torch._dynamo",
    "pytest",
    "hypothesis",
    "cordillera.training.language.engine",
    "cordillera.training.ranking.trainer",
)
run_processes = partial(_processes.run_processes, preload=_LOADED)


def found_by(size: int, folder: Path, work: Callable[[int, str], Any], seconds: float) -> dict[int, Any]:
    """What ``work`` returned in each of ``size`` processes, by rank; all end well within ``seconds``."""
    ended = run_processes(size, folder, work, seconds)
    assert ended.codes == [0] * size, ended.said
    return ended.found


def free_port() -> int:
    """A free port for a process that listens there once it has started, seconds later.

    It is none that the system gives to whoever connects, or asks for any port, as it may give those away until then.
    """
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, file.read_text().split()) if file.exists() else (32_768, 65_535)
    ports = [port for port in range(10_000, 65_536) if not first <= port <= last] or range(10_000, 65_536)
    while True:
        port = random.SystemRandom().choice(ports)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def asked_for(request: pytest.FixtureRequest, *names: str) -> set[tuple[Any, ...]]:
    """Values of parameters with which tests of the file will run: others need not be computed."""
    of_file: list[Any] = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in of_file if hasattr(item, "callspec")]
    return {tuple(given[name] for name in names) for given in params if given.keys() >= set(names)}
