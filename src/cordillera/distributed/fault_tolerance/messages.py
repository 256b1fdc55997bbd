"""Messages over a socket: frames with a checksum, after both sides have shown that they know a secret.

A frame is a header of 16 bytes and a payload: the letters ``CDLR``, the kind of the payload, its length and the CRC-32
of kind, length and payload. A frame that differs from its checksum ends the connection, as nothing after it can be
trusted. Nothing is unpickled. The secret itself is never sent: each side proves that it knows it by an HMAC of a random
number of the other side. Frames are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
import zlib
from typing import Any, Literal

from cordillera.errors import PeerError, PlanError

_HEADER = struct.Struct("!4sIII")
_MAGIC = b"CDLR"
_JSON, _BYTES = 1, 2
MOST_JSON = 1 << 20
"""Largest size of a JSON message, bytes."""

MOST_BYTES = 1 << 24
"""Largest size of a piece of raw bytes."""

Side = Literal["client", "server"]


class MessageError(PeerError):
    """A message is late, damaged or unexpected; the connection is unusable after that."""

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        super().__init__(what, peer=None, where=where, remedy=remedy)


def parse_address(address: str, where: str) -> tuple[str, int]:
    """Return host and port of an ``address``, ``HOST:PORT``, that the argument ``where`` gives.

    Raises:
        PlanError: If it is none.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16):
        raise PlanError(f"{address!r} is no HOST:PORT", where=where, remedy="write it like 127.0.0.1:29400")
    return host, int(port)


def reached_at(address: str) -> str:
    """Return the ``HOST:PORT`` by which other machines reach what listens at an ``address`` of this one.

    It has the name of this machine in place of a host that stands for all of its addresses.
    """
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host.strip("[]") in ("", "0.0.0.0", "::") else address


def packed(message: Any) -> bytes:
    """Return the frame of a message of JSON values.

    Raises:
        MessageError: If it is longer than :data:`MOST_JSON`.
    """
    text = json.dumps(message, separators=(",", ":")).encode()
    if len(text) > MOST_JSON:
        raise MessageError(f"a message of {len(text)} bytes is longer than {MOST_JSON}")
    return _frame(_JSON, text)


def _frame(kind: int, payload: bytes | memoryview) -> bytes:
    return _header(kind, payload) + bytes(payload)


def _header(kind: int, payload: bytes | memoryview) -> bytes:
    checksum = zlib.crc32(payload, zlib.crc32(struct.pack("!II", kind, len(payload))))
    return _HEADER.pack(_MAGIC, kind, len(payload), checksum)


def _parsed(header: bytes) -> tuple[int, int, int]:
    magic, kind, length, checksum = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise MessageError("what came is no message of this program")
    if kind not in (_JSON, _BYTES) or length > (MOST_JSON if kind == _JSON else MOST_BYTES):
        raise MessageError(f"a frame of kind {kind} and {length} bytes is none of this program")
    return kind, length, checksum


def _check(kind: int, payload: bytes | bytearray | memoryview, checksum: int) -> None:
    if zlib.crc32(payload, zlib.crc32(struct.pack("!II", kind, len(payload)))) != checksum:
        raise MessageError(f"a frame of {len(payload)} bytes differs from its checksum")


def _read_json(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise MessageError("a message is not JSON") from error


class Channel:
    """A connection on which each side waits for the other, with a deadline for every wait.

    Args:
        connection: Connected socket, which the channel owns.
        who: Other side, for messages of errors.
        deadline_s: Longest time of one wait, in seconds.
    """

    def __init__(self, connection: socket.socket, who: str, deadline_s: float) -> None:
        self.connection, self.who, self.deadline_s = connection, who, deadline_s
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, address: str, token: bytes, who: str, deadline_s: float) -> Channel:
        """Connect to ``HOST:PORT`` and prove both sides.

        Raises:
            MessageError: If no answer arrives in time, or the other side does not know the secret.
        """
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=deadline_s)
        except (OSError, ValueError) as error:
            raise MessageError(f"does not answer at {address} ({error})", where=who) from error
        channel = cls(connection, who, deadline_s)
        try:
            channel.prove(token, "client")
        except BaseException:
            channel.close()
            raise
        return channel

    def give_up_silence(self, seconds: float) -> None:
        """Close the connection once the other machine has acknowledged no sent data for ``seconds``.

        A stalled process still acknowledges, as its system does so. This has no effect on systems other than Linux.
        """
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * seconds)))

    def prove(self, token: bytes, role: Side) -> None:
        """Authenticate both sides: prove knowledge of the secret, and verify that the other side knows it.

        Raises:
            MessageError: If it does not.
        """
        own = secrets.token_hex(16)
        self.send({"challenge": own})
        challenge = self._text(self.receive(), "challenge")
        self.send({"proof": _proof(token, role, challenge)})
        proof = self._text(self.receive(), "proof")
        other: Side = "server" if role == "client" else "client"
        if not hmac.compare_digest(proof, _proof(token, other, own)):
            raise MessageError("does not know the secret of this job", where=self.who)

    def _text(self, message: Any, key: str) -> str:
        value = message.get(key) if isinstance(message, dict) else None
        if not (isinstance(value, str) and len(value) <= 64 and value.isascii()):
            raise MessageError(f"sent no {key}", where=self.who)
        return value

    def send(self, message: Any) -> None:
        """Send a message of JSON values."""
        self._send(packed(message))

    def send_bytes(self, payload: bytes | memoryview) -> None:
        """Send raw bytes, at most :data:`MOST_BYTES`."""
        self._send(_header(_BYTES, payload))
        self._send(payload)

    def receive(self) -> Any:
        """Wait for a message of JSON values."""
        kind, length, checksum = _parsed(bytes(self._read(_HEADER.size)))
        if kind != _JSON:
            raise MessageError("sent raw bytes where a message was to come", where=self.who)
        payload = self._read(length)
        _check(kind, payload, checksum)
        return _read_json(bytes(payload))

    def receive_bytes(self, out: memoryview) -> None:
        """Wait for raw bytes, exactly as many as ``out`` takes."""
        kind, length, checksum = _parsed(bytes(self._read(_HEADER.size)))
        if kind != _BYTES or length != len(out):
            raise MessageError(f"sent a frame of {length} bytes where {len(out)} were to come", where=self.who)
        self._read_into(out)
        _check(kind, out, checksum)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self.connection.settimeout(self.deadline_s)
            self.connection.sendall(data)
        except OSError as error:
            raise MessageError(f"does not take a message ({error})", where=self.who) from error

    def _read(self, count: int) -> bytearray:
        found = bytearray(count)
        self._read_into(memoryview(found))
        return found

    def _read_into(self, out: memoryview) -> None:
        until, done = time.monotonic() + self.deadline_s, 0
        while done < len(out):
            left = until - time.monotonic()
            if left <= 0:
                raise MessageError(f"sent nothing for {self.deadline_s:g} s", where=self.who)
            try:
                self.connection.settimeout(left)
                count = self.connection.recv_into(out[done:])
            except TimeoutError:
                continue
            except OSError as error:
                raise MessageError(f"is gone ({error})", where=self.who) from error
            if not count:
                raise MessageError("has closed the connection", where=self.who)
            done += count


def _proof(token: bytes, role: Side, challenge: str) -> str:
    return hmac.new(token, f"{role} {challenge}".encode(), hashlib.sha256).hexdigest()
