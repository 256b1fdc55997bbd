"""A socket that never blocks: what is to be sent waits, and a buffer is filled as bytes come."""

from __future__ import annotations

import socket
from collections import deque

_MOST_PARTS = 16  # of one call, far below the system's limit


class FrameSocket:
    """A connected socket on which frames come and go; classes of frames build upon it.

    Args:
        connected: Connected socket.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
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
        """Receive into the buffer; return whether it is full. Raise :meth:`ended` if the connection has ended."""
        while self._filled < self._target.nbytes:
            try:
                count = self.socket.recv_into(self._target[self._filled :])
            except BlockingIOError:
                return False
            except OSError as error:
                raise self.ended() from error
            if not count:
                raise self.ended()
            self._filled += count
        return True
