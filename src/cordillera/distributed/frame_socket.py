"""A non-blocking socket that queues outgoing buffers and fills an incoming one as bytes arrive."""

from __future__ import annotations

import socket
from collections import deque

_MOST_PARTS = 16  # buffers per call, far below the system's limit


class FrameSocket:
    """A connected socket on which frames come and go; classes of frames build upon it.

    Args:
        connected: Connected socket.
        ahead: Memory for what comes after what is awaited; without it, nothing is received ahead.
    """

    def __init__(self, connected: socket.socket, ahead: memoryview | None = None) -> None:
        self.socket = connected
        self._ahead, self._begin, self._end = ahead, 0, 0  # buffer of bytes received ahead, and the range not yet read
        self._is_empty = False  # whether the last call read all available bytes
        self._outgoing: deque[memoryview] = deque()
        self._target, self._filled = memoryview(b""), 0
        connected.setblocking(False)

    @property
    def has_outgoing(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outgoing)

    def ended(self) -> Exception:
        """Return the error for a connection that has ended."""
        return ConnectionError("ended its connection")

    def flush(self) -> None:
        """Send what waits, as far as it fits now; raise :meth:`ended` if the connection has ended."""
        while self._outgoing:
            try:
                count = self.socket.sendmsg(list(self._outgoing)[:_MOST_PARTS])
            except BlockingIOError:
                return
            except OSError as error:
                raise self.ended() from error
            while self._outgoing and count >= self._outgoing[0].nbytes:
                count -= self._outgoing.popleft().nbytes
            if count:
                self._outgoing[0] = self._outgoing[0][count:]

    def _aim(self, target: memoryview) -> None:
        """Receive into a buffer from now on."""
        self._target, self._filled = target, 0

    def _fill(self) -> bool:
        """Receive into the buffer; return whether it is full. Raise :meth:`ended` if the connection has ended.

        Nothing that has come ahead is left when it is not full.
        """
        while (missing := self._target.nbytes - self._filled) > 0:
            if self._begin < self._end and self._ahead is not None:
                count = min(missing, self._end - self._begin)
                self._target[self._filled : self._filled + count] = self._ahead[self._begin : self._begin + count]
                self._begin += count
                self._filled += count
                continue
            if self._is_empty:
                self._is_empty = False
                return False
            is_ahead = self._ahead is not None and missing < self._ahead.nbytes
            into = self._ahead if is_ahead and self._ahead is not None else self._target[self._filled :]
            try:
                count = self.socket.recv_into(into)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self.ended() from error
            if not count:
                raise self.ended()
            self._is_empty = count < into.nbytes
            if is_ahead:
                self._begin, self._end = 0, count
            else:
                self._filled += count
        return True
