"""Connection of all-reduce members: each listens, and proves to every client that it knows the token of the job."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from cordillera.distributed.fault_tolerance._chunks import BrokenLink

_GREETING, _NONCE_BYTES, _MAC_BYTES, _LENGTH_BYTES = b"CAR1meet", 32, 32, 4
_MOST_BYTES = 1 << 16  # largest message
_MOST_VISITORS, _MOST_GUESTS = 64, 64
_VISIT_S = 5.0  # time after which a connection that has not authenticated is closed


class Parley:
    """A connection on which two processes prove that they know the same key, and exchange their terms.

    Both send a nonce, then messages of JSON. The code that ends a message authenticates it, both nonces, the direction
    and the number of the message. Nothing blocks, and nothing is read beyond a message.

    Args:
        connection: Connected or connecting socket.
        key: Key that both know.
        opening: First message of the process that dialled; None on the other side.
    """

    def __init__(self, connection: socket.socket, key: bytes, opening: dict[str, Any] | None) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._key, self._opening, self._dialled = connection, key, opening, opening is not None
        self._nonce = _GREETING + secrets.token_bytes(_NONCE_BYTES)
        self._other: bytes | None = None
        self._sent = self._received = 0
        self._need, self._length = len(self._nonce), 0
        self._came, self._outgoing = bytearray(), bytearray()
        if self._dialled:
            self._outgoing += self._nonce

    @property
    def has_met(self) -> bool:
        """Whether the other side's nonce has arrived, and all outgoing bytes are sent."""
        return self._other is not None and not self._outgoing

    @property
    def events(self) -> int:
        """Mask of ``select.poll`` for the events to wait for."""
        return select.POLLIN | (select.POLLOUT if self._outgoing else 0)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or what of it fits now.

        Raises:
            BrokenLink: If the connection has ended.
        """
        body = json.dumps(message).encode()
        self._outgoing += len(body).to_bytes(_LENGTH_BYTES, "big") + body + self._code(self._dialled, self._sent, body)
        self._sent += 1
        self._flush()

    def receive(self) -> dict[str, Any] | None:
        """Send what waits, and return the next message if all of it has come.

        Raises:
            BrokenLink: If the connection has ended, or what came was not written by a holder of the key.
        """
        self._flush()
        while self._fill():
            came, self._came = bytes(self._came), bytearray()
            if self._other is None:
                self._meet(came)
            elif not self._length:
                self._length = int.from_bytes(came, "big")
                if not 0 < self._length <= _MOST_BYTES:
                    raise BrokenLink("sent a message of a forbidden length")
                self._need = self._length + _MAC_BYTES
            else:
                body, code = came[: self._length], came[self._length :]
                self._need, self._length = _LENGTH_BYTES, 0
                return self._open(body, code)
        return None

    def _meet(self, came: bytes) -> None:
        if not came.startswith(_GREETING):
            raise BrokenLink("speaks another protocol")
        self._other, self._need = came, _LENGTH_BYTES
        if self._opening is not None:
            self.send(self._opening)
        else:
            self._outgoing += self._nonce
            self._flush()

    def _open(self, body: bytes, code: bytes) -> dict[str, Any]:
        if not hmac.compare_digest(code, self._code(not self._dialled, self._received, body)):
            raise BrokenLink("has another token or job")
        self._received += 1
        try:
            message = json.loads(body)
        except ValueError as error:
            raise BrokenLink("sent a message that is not JSON") from error
        if not isinstance(message, dict):
            raise BrokenLink("sent a message that is not an object")
        return message

    def _code(self, dialled: bool, number: int, body: bytes) -> bytes:
        nonces = [self._nonce, self._other or b""]
        text = b"".join([bytes([dialled]), number.to_bytes(8, "big"), *nonces[:: 1 if self._dialled else -1], body])
        return hmac.digest(self._key, text, "sha256")

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError as error:
            raise BrokenLink("ended its connection") from error

    def _fill(self) -> bool:
        """Receive the missing bytes; return whether all have arrived."""
        while len(self._came) < self._need:
            try:
                part = self.socket.recv(self._need - len(self._came))
            except BlockingIOError:
                return False
            except OSError as error:
                raise BrokenLink("ended its connection") from error
            if not part:
                raise BrokenLink("ended its connection")
            self._came += part
        return True


def job_key(job: str, token: bytes) -> bytes:
    """Return the key of a job, which only those derive who know its name and token."""
    return hmac.digest(hashlib.sha256(token).digest(), job.encode(), "sha256")


def dial(address: str, key: bytes, opening: dict[str, Any]) -> Parley:
    """Begin to connect to an address of a :class:`Lobby`.

    Raises:
        BrokenLink: If this is impossible.
    """
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, kind, protocol)
    except (OSError, ValueError, OverflowError) as error:
        raise BrokenLink(f"has an address that cannot be reached: {address}") from error
    connection.setblocking(False)
    try:
        connection.connect(place)
    except BlockingIOError:
        pass
    except OSError as error:
        connection.close()
        raise BrokenLink("refused the connection") from error
    return Parley(connection, key, opening)


class Lobby:
    """A thread that accepts connections, and keeps those of members until they are requested.

    Connections that do not authenticate are closed after five seconds. At most 64 unauthenticated and 64 authenticated
    connections are kept; newer ones replace older ones.

    Args:
        key: Key that members know.
        host: Interface to listen on.

    Attributes:
        address: Host and port.
        turned_away: Why the last 64 connections were ended.
    """

    def __init__(self, key: bytes, host: str) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._key = key
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.turned_away: deque[str] = deque(maxlen=64)
        self._over = -1  # newest epoch that is closed to new connections
        self._guests: dict[tuple[int, str], tuple[Parley, dict[str, Any]]] = {}
        self._visitors: dict[int, tuple[Parley, str, float]] = {}
        self._changed = threading.Condition()
        self._wake_read, self._wake_write = os.pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="all-reduce lobby", daemon=True)
        self._thread.start()

    def end_epochs(self, epoch: int) -> None:
        """Refuse connections for ``epoch`` and earlier epochs, including those that wait already."""
        with self._changed:
            self._over = max(self._over, epoch)
            for key in [key for key in self._guests if key[0] <= epoch]:
                self._turn_away(self._guests.pop(key)[0], key[1], f"came for epoch {key[0]}, which is over")

    def call(
        self, epoch: int, names: list[str], until: float, is_over: Callable[[], bool]
    ) -> dict[str, tuple[Parley, dict[str, Any]]]:
        """Wait until all ``names`` have come for ``epoch``; return who has, with the first messages.

        Args:
            epoch: Epoch of the ring.
            names: Members that dial.
            until: Time of ``time.monotonic`` at which to return what there is.
            is_over: Function that returns whether to stop waiting; call :meth:`wake` when its answer changes.
        """
        with self._changed:
            while not (is_over() or all((epoch, name) in self._guests for name in names)):
                if (left := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            return {name: self._guests.pop((epoch, name)) for name in names if (epoch, name) in self._guests}

    def wake(self) -> None:
        """Let :meth:`call` look whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stop to listen, and end all connections that were not called for."""
        self._closed = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        self.end_epochs(max((epoch for epoch, _ in self._guests), default=self._over))
        for file in (self._wake_read, self._wake_write):
            os.close(file)

    def sockets(self) -> list[socket.socket]:
        """Return all open sockets, which a forked process must close."""
        guests = [parley.socket for parley, _ in list(self._guests.values())]
        return [self._listener, *(visitor[0].socket for visitor in list(self._visitors.values())), *guests]

    def _listen(self) -> None:
        with self._listener:
            while not self._closed:
                self._wait_once()
            for number in list(self._visitors):
                self._visitors.pop(number)[0].socket.close()

    def _wait_once(self) -> None:
        poller = select.poll()
        for number, (parley, _, _) in self._visitors.items():
            poller.register(number, parley.events)
        poller.register(self._listener, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        ends = [end for _, _, end in self._visitors.values()]
        left = max(0.0, min(ends) - time.monotonic()) if ends else None
        for number, _ in poller.poll(None if left is None else left * 1000 + 1):
            if number == self._listener.fileno():
                self._accept()
            elif number in self._visitors:
                self._hear(number)
        for number, (parley, who, end) in list(self._visitors.items()):
            if end <= time.monotonic():
                del self._visitors[number]
                self._turn_away(parley, who, f"did not say who it is within {_VISIT_S:g} s")

    def _accept(self) -> None:
        try:
            connection, place = self._listener.accept()
        except OSError:  # the client has disconnected, or too many files are open
            time.sleep(0.01)
            return
        who = f"{place[0]}:{place[1]}"
        if len(self._visitors) >= _MOST_VISITORS:
            oldest = min(self._visitors, key=lambda number: self._visitors[number][2])
            parley, name, _ = self._visitors.pop(oldest)
            self._turn_away(parley, name, "did not say who it is, as too many others")
        parley = Parley(connection, self._key, None)
        self._visitors[connection.fileno()] = parley, who, time.monotonic() + _VISIT_S

    def _hear(self, number: int) -> None:
        parley, who, _ = self._visitors[number]
        try:
            message = parley.receive()
        except BrokenLink as error:
            del self._visitors[number]
            self._turn_away(parley, who, str(error))
            return
        if message is None:
            return
        del self._visitors[number]
        epoch, name = message.get("epoch"), message.get("name")
        with self._changed:
            if not isinstance(epoch, int) or not isinstance(name, str):
                self._turn_away(parley, who, "sent no epoch and name")
            elif epoch <= self._over:
                self._turn_away(parley, name, f"came for epoch {epoch}, which is over")
            else:
                self._keep(epoch, name, parley, message)

    def _keep(self, epoch: int, name: str, parley: Parley, message: dict[str, Any]) -> None:
        if (earlier := self._guests.pop((epoch, name), None)) is not None:
            self._turn_away(earlier[0], name, "came again")
        elif len(self._guests) >= _MOST_GUESTS:
            first = min(self._guests)
            self._turn_away(self._guests.pop(first)[0], first[1], "waited beside too many others")
        self._guests[epoch, name] = parley, message
        self._changed.notify_all()

    def _turn_away(self, parley: Parley, who: str, reason: str) -> None:
        parley.socket.close()
        self.turned_away.append(f"{who} {reason}")
