"""Connections whose clients are too slow are ended, and no others."""

from __future__ import annotations

import asyncio
import errno
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from cordillera.serving.http.app import Services
from cordillera.serving.http.connections import ANSWER_SECONDS, BODY_SECONDS, HEADER_SECONDS, SlowConnections
from cordillera.serving.http.connections import explain_full_loop as explain
from cordillera.workflows.serving import server
from cordillera.workflows.serving.opening import ServerConfig


@dataclass(eq=False)
class Transport:
    """A transport that counts what its client has not taken."""

    unsent: int = 0
    ended: str = ""

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


@dataclass(eq=False)
class Connection:
    """A connection as uvicorn's protocols describe it."""

    cycle: Any = None
    transport: Transport = field(default_factory=Transport)


def request(*, has_body: bool = False, is_answered: bool = False) -> SimpleNamespace:
    return SimpleNamespace(more_body=has_body, response_complete=is_answered)


def seconds_until_end(change: Any, connection: Connection, most: int = 400) -> int | None:
    """Seconds after which a connection is ended, to which something happens each second."""
    now = [1000.0]
    slow = SlowConnections(lambda: now[0])
    for second in range(most):
        change(second, connection)
        slow.end([connection])
        if connection.transport.ended:
            return second
        now[0] += 1
    return None


def nothing(second: int, connection: Connection) -> None: ...


@pytest.mark.parametrize(
    ("cycle", "seconds"),
    [
        (None, HEADER_SECONDS),
        (request(is_answered=True), HEADER_SECONDS),
        (request(is_answered=True, has_body=True), HEADER_SECONDS),
        (request(has_body=True), BODY_SECONDS),
    ],
)
def test_a_client_that_sends_too_little_is_left(cycle: Any, seconds: float) -> None:
    connection = Connection(cycle)
    assert seconds_until_end(nothing, connection) == seconds + 1
    assert connection.transport.ended == "closed"


def test_uvicorn_does_not_end_idle_connections_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make_server(settings: Any, *rest: Any) -> SimpleNamespace:
        made.append(settings)
        return SimpleNamespace(run=lambda sockets: None)

    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(server, "open_reloadable_services", lambda *_: Services({}, {}, CollectorRegistry()))
    monkeypatch.setattr(server, "_make_server", make_server)
    server.serve([], ServerConfig(port=0))
    assert [settings.timeout_keep_alive for settings in made] == [HEADER_SECONDS]


def test_a_request_that_is_computed_has_all_time() -> None:
    assert seconds_until_end(nothing, Connection(request())) is None


def test_each_request_has_its_own_time() -> None:
    def another(second: int, connection: Connection) -> None:
        if second % (HEADER_SECONDS - 1) == 0:
            connection.cycle = request(is_answered=True)

    assert seconds_until_end(another, Connection()) is None


def test_a_client_that_takes_no_answer_is_left() -> None:
    connection = Connection(request(), Transport(unsent=1000))
    assert seconds_until_end(nothing, connection) == ANSWER_SECONDS + 1
    assert connection.transport.ended == "aborted"


def test_a_client_that_takes_an_answer_slowly_may_stay() -> None:
    def takes(second: int, connection: Connection) -> None:
        connection.transport.unsent += -1 if second % 30 == 29 else 0

    assert seconds_until_end(takes, Connection(request(), Transport(unsent=1000))) is None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_full_process_says_so_in_a_line(number: int, caplog: pytest.LogCaptureFixture) -> None:
    loop, said = asyncio.new_event_loop(), list[str]()
    try:
        explain(loop, said.append)
        loop.call_exception_handler({"message": "accept", "exception": OSError(number, "too many")})
        assert said == ["too many connections (too many): no other is accepted for a second"]
        assert not caplog.records
        loop.call_exception_handler({"message": "another", "exception": ValueError("x")})
        assert "another" in caplog.text
    finally:
        loop.close()
    assert len(said) == 1
