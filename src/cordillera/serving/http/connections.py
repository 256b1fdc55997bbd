"""Connections whose clients send or take nothing: they are ended, so that they keep no place from others."""

from __future__ import annotations

import asyncio
import errno
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

HEADER_SECONDS = 20.0
"""Time in which a client has to send a request after it has connected, or after the answer to its last request."""

BODY_SECONDS = 60.0
"""Time in which a client has to send the body of a request."""

ANSWER_SECONDS = 60.0
"""Time in which a client has to take some of an answer."""

UNFINISHED_SECONDS = 5.0
"""Seconds that a client has to send the rest of a request once shutdown begins."""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass
class _Wait:
    """State of a connection.

    Attributes:
        what: ``header``, ``body`` or ``answer``.
        request: Request that was last begun; None before the first.
        since: Time at which the wait began.
        unsent: Bytes that the client has not taken yet.
        took: Time at which it last took some.
    """

    what: str
    request: object
    since: float
    unsent: int
    took: float


class SlowConnections:
    """Ends connections of uvicorn whose clients take too long.

    Args:
        clock: Function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits: weakref.WeakKeyDictionary[Any, _Wait] = weakref.WeakKeyDictionary()

    def end(self, connections: Iterable[Any]) -> None:
        """Look at all connections; to be called about once a second."""
        now = self._clock()
        for connection in list(connections):
            request, transport = connection.cycle, connection.transport
            if request is None or request.response_complete:
                what = "header"
            else:
                what = "body" if request.more_body else "answer"
            unsent = transport.get_write_buffer_size()
            wait = self._waits.get(connection)
            if wait is None or wait.what != what or wait.request is not request:
                wait = _Wait(what, request, now, unsent, now if wait is None else wait.took)
                self._waits[connection] = wait
            if unsent == 0 or unsent < wait.unsent:
                wait.took = now
            wait.unsent = unsent
            if now - wait.took > ANSWER_SECONDS:
                transport.abort()  # close() would wait for the client to read the rest
            elif now - wait.since > {"header": HEADER_SECONDS, "body": BODY_SECONDS}.get(what, float("inf")):
                transport.close()


def end_unfinished(connections: Iterable[Any]) -> int:
    """End connections of uvicorn whose clients have sent a part of a request only, for which a server would wait.

    Returns:
        The number of them.
    """
    waiting = [one for one in connections if one.cycle is not None and one.cycle.more_body]
    unfinished = [one for one in waiting if not one.cycle.response_complete]
    for connection in unfinished:
        connection.transport.close()
    return len(unfinished)


def explain_full_loop(loop: asyncio.AbstractEventLoop, say: Callable[[str], object]) -> None:
    """Make a loop log in one line that it cannot accept connections for now; other errors are logged as before."""

    def told(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            say(f"too many connections ({error.strerror}): no other is accepted for a second")
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(told)
