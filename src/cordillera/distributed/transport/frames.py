"""Frames between two ranks of a communicator, and the connection that carries them."""

from __future__ import annotations

import contextlib
import socket
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from cordillera.distributed.frame_socket import FrameSocket
from cordillera.distributed.transport.signatures import Signature

_MAGIC = b"CTR1"
_HEADER = struct.Struct("<4sBBBBqQQI")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size


class BrokenConnection(Exception):
    """A connection ended, or an unexpected frame arrived."""


class FrameKind(IntEnum):
    """Kind of a frame.

    Attributes:
        OFFER: The sender's data lies at the addresses that follow.
        INLINE: The sender's data follows.
        GET: The receiver asks for a fragment of an offer; its place follows.
        DATA: A fragment follows.
        TAKEN: The receiver has the whole of an offer.
        ABORT: The sender has given up all operations; the reason follows.
        ADDRESS: An address of a rank follows, on its way around a ring.
    """

    OFFER = 1
    INLINE = 2
    GET = 3
    DATA = 4
    TAKEN = 5
    ABORT = 6
    ADDRESS = 7


class TransportFrame(NamedTuple):
    """Header of a frame.

    Attributes:
        kind: Kind of the frame.
        signature: Signature of the operation at the sender.
        sequence: Number of the collective within the communicator, or tag of a message.
        number: Number of the transfer within the collective, or of the message among those of its tag.
        size: Bytes of the whole transfer; of a fragment, the byte at which it begins.
        length: Bytes that follow the header.
    """

    kind: int
    signature: Signature
    sequence: int
    number: int
    size: int
    length: int

    def encode(self) -> bytes:
        """Return the bytes of the header, which end with a checksum."""
        text = _HEADER.pack(_MAGIC, self.kind, *self.signature, self.sequence, self.number, self.size, self.length)
        return text + _CHECK.pack(zlib.crc32(text))

    @classmethod
    def decode(cls, text: bytes | bytearray | memoryview) -> TransportFrame:
        """Parse a header.

        Raises:
            BrokenConnection: If ``text`` is not a valid header.
        """
        magic, kind, collective, dtype, reduction, *numbers = _HEADER.unpack_from(text)
        if zlib.crc32(text[: _HEADER.size]) != _CHECK.unpack_from(text, _HEADER.size)[0]:
            raise BrokenConnection("sent a frame whose header is corrupt")
        if magic != _MAGIC or kind not in _KINDS:
            raise BrokenConnection("sent a frame of another protocol")
        return cls(kind, Signature(collective, dtype, reduction), *numbers)


_KINDS = frozenset(FrameKind)


class FrameHandler(Protocol):
    """Receiver of the frames of a :class:`Connection`."""

    def place(self, peer: int, frame: TransportFrame) -> memoryview:
        """Return where the bytes that follow the header belong, ``frame.length`` of them."""
        ...

    def arrived(self, peer: int, frame: TransportFrame, data: memoryview) -> None:
        """Take a frame, whose bytes are in ``data``."""
        ...


class Connection(FrameSocket):
    """Connection to another rank.

    Args:
        peer: The other rank.
        connected: Connected socket.
        ahead: Memory for what comes after what is awaited, which other connections may use between calls.
    """

    def __init__(self, peer: int, connected: socket.socket, ahead: memoryview | None = None) -> None:
        super().__init__(connected, ahead)
        self.peer = peer
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._frame: TransportFrame | None = None
        self._aim(self._head)

    def ended(self) -> BrokenConnection:
        """Return the error for a connection that has ended."""
        return BrokenConnection("ended its connection")

    def send(self, frame: TransportFrame, *payload: memoryview) -> None:
        """Send a frame, or what of it fits now; ``payload`` must not change before it is sent.

        Raises:
            BrokenConnection: If the connection has ended.
        """
        self._outgoing.append(memoryview(frame.encode()))
        self._outgoing.extend(part for part in payload if part.nbytes)
        self.flush()

    def end(self, frame: TransportFrame, payload: memoryview, patience_s: float) -> None:
        """Send a last frame behind what waits, if the other side takes it within ``patience_s``, and nothing more.

        The socket stays open, as closing it would take away from the other side what it has not read yet.
        """
        with contextlib.suppress(OSError):
            self.socket.settimeout(patience_s)
            self.socket.sendall(b"".join([*self._outgoing, frame.encode(), payload]))
            self.socket.shutdown(socket.SHUT_WR)
        self._outgoing.clear()

    def receive(self, handler: FrameHandler) -> None:
        """Give ``handler`` the frames that have come.

        Raises:
            BrokenConnection: If the connection has ended, or a frame is not acceptable.
        """
        while self._fill():
            if self._frame is None:
                self._frame = TransportFrame.decode(self._head)
                self._aim(handler.place(self.peer, self._frame))
                if self._target.nbytes:
                    continue
            frame, data = self._frame, self._target
            self._frame = None
            self._aim(self._head)
            handler.arrived(self.peer, frame, data)


_SPAN = struct.Struct("<QQ")
SPAN_BYTES = _SPAN.size
"""Bytes of a pair of numbers."""


def encode_spans(spans: Sequence[tuple[int, int]]) -> bytes:
    """Return the bytes of pairs of numbers: addresses and lengths, or a begin and a length."""
    return b"".join(_SPAN.pack(*span) for span in spans)


def decode_spans(data: memoryview) -> list[tuple[int, int]]:
    """Parse pairs of numbers.

    Raises:
        BrokenConnection: If the bytes are not whole pairs.
    """
    if data.nbytes % _SPAN.size:
        raise BrokenConnection("sent pairs of numbers that are not whole")
    return [(first, second) for first, second in _SPAN.iter_unpack(data)]
