"""Addresses of the ranks of a group: a store that all can ask, and a ring that spares it most questions.

Every rank writes where it listens into the store. In large groups each one reads the address of its neighbour alone,
connects to it, and passes on the addresses that come from its other neighbour until it has all: no process is asked by
all the others. Where the ring is broken, as a rank has not come, the store is asked instead. Groups that are made of
the ranks of another one, as those of torch.distributed's ``new_group``, take over what that one knows.

Source: NCCLX (arXiv 2510.20171), whose ranks gather their addresses around a ring that begins at a store.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import select
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from cordillera.distributed.transport.exchanges import OperationFailed
from cordillera.distributed.transport.frames import BrokenConnection, Connection, FrameKind, TransportFrame
from cordillera.distributed.transport.meeting import Admission, Meeting, NotHereYet, dial, listener
from cordillera.distributed.transport.signatures import Signature

RING_RANKS = 32
"""Ranks from which on addresses pass around a ring."""

_MOST_BYTES = 1024  # largest address
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.005, 0.5  # intervals of polls of the store
_RING_S = 300.0  # time after which an incomplete ring is given up


class AddressRing:
    """State of one rank in a ring: it forwards what it receives until it knows all addresses.

    A state machine without sockets, clocks or threads; it handles the frames of a
    :class:`~cordillera.distributed.transport.frames.Connection`.

    Args:
        rank: This rank.
        size: Number of ranks.
        address: Address of this rank.
        forward: Sends a frame with its bytes to the next rank.

    Attributes:
        addresses: Known addresses, by rank.
    """

    def __init__(
        self, rank: int, size: int, address: str, forward: Callable[[TransportFrame, memoryview], object]
    ) -> None:
        self.addresses = {rank: address}
        self._rank, self._size, self._forward = rank, size, forward

    @property
    def previous(self) -> int:
        """Rank from which addresses come."""
        return (self._rank - 1) % self._size

    @property
    def next(self) -> int:
        """Rank to which they are passed on."""
        return (self._rank + 1) % self._size

    @property
    def is_complete(self) -> bool:
        """Whether all addresses are known; then all that others need of this rank has been sent, too."""
        return len(self.addresses) == self._size

    def begin(self) -> None:
        """Send the address of this rank on its way."""
        self._pass(self._rank, self.addresses[self._rank].encode())

    def place(self, peer: int, frame: TransportFrame) -> memoryview:
        """Return where the bytes that follow a ``frame`` of ``peer`` belong.

        Raises:
            BrokenConnection: If the frame is not acceptable.
        """
        if frame.kind != FrameKind.ADDRESS or not 0 < frame.length <= _MOST_BYTES:
            raise BrokenConnection("sent something else than an address")
        return memoryview(bytearray(frame.length))

    def arrived(self, peer: int, frame: TransportFrame, data: memoryview) -> None:
        """Take an address, ``data``, that has come from ``peer``.

        Raises:
            BrokenConnection: If it is of no rank, or came before.
        """
        if not 0 <= frame.number < self._size or frame.number in self.addresses:
            raise BrokenConnection(f"sent an address of rank {frame.number}, which is known or does not exist")
        self.addresses[frame.number] = bytes(data).decode(errors="replace")
        if frame.number != self.next:
            self._pass(frame.number, data)

    def _pass(self, rank: int, address: bytes | memoryview) -> None:
        data = memoryview(address)
        self._forward(TransportFrame(FrameKind.ADDRESS, Signature(0, 0, 0), 0, rank, 0, data.nbytes), data)


class AddressBook:
    """Where the ranks of a group listen.

    Args:
        store: Store of the group.
        rank: Rank of this process.
        size: Number of ranks.
        token: Secret of the group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, token: bytes) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._connections: dict[int, Connection] = {}
        self._ring = AddressRing(rank, size, listener().address, self._send)
        self._met: queue.SimpleQueue[Meeting] = queue.SimpleQueue()
        secret = hashlib.sha256(b"ring" + token).digest()
        self._admission = Admission(secret, rank, size, reads_memory=False, welcome=self._met.put)
        self._is_over = threading.Event()
        if size < RING_RANKS:
            self._is_over.set()
        else:
            listener().admit(self._admission)
        store.set(_key(rank), listener().address)
        if not self._is_over.is_set():
            threading.Thread(target=self._gather, name="cordillera addresses", daemon=True).start()

    def find(self, peer: int, patience_s: float) -> str | None:
        """Return the address of a rank; None if it is not known in time.

        Args:
            peer: The rank.
            patience_s: Seconds to wait for it.

        Raises:
            BrokenConnection: If the store is gone.
        """
        begin = time.monotonic()
        while peer not in self._ring.addresses and time.monotonic() - begin < patience_s / 2:
            if self._is_over.wait(_SHORTEST_LOOK_S):
                break
        if (known := self._ring.addresses.get(peer)) is not None:
            return known
        try:
            self._store.wait([_key(peer)], timedelta(seconds=patience_s - (time.monotonic() - begin)))
            return self._store.get(_key(peer)).decode()
        except RuntimeError as error:
            if "timeout" in str(error).lower():
                return None
            raise BrokenConnection(f"cannot be found, as the store is gone ({error})") from error

    def close(self) -> None:
        """Leave the ring, if it is not complete."""
        self._is_over.set()

    def _send(self, frame: TransportFrame, data: memoryview) -> None:
        self._connections[self._ring.next].send(frame, data)

    def _gather(self) -> None:
        """Take part in the ring; without it, the store is asked."""
        try:
            with contextlib.suppress(BrokenConnection, NotHereYet, OperationFailed, RuntimeError, OSError):
                if self._meet():
                    self._pass_on()
        finally:
            self._is_over.set()
            listener().dismiss(self._admission)
            for connection in self._connections.values():
                connection.socket.close()
            while not self._met.empty():
                self._met.get().socket.close()

    def _meet(self) -> bool:
        """Connect to both neighbours; return whether both are there."""
        for peer in (self._ring.previous, self._ring.next):
            if peer < self._rank:  # the higher of two ranks connects
                look_s = _SHORTEST_LOOK_S
                while not self._store.check([_key(peer)]):  # a blocking wait would block other users of the store
                    if self._is_over.wait(look_s):
                        return False
                    look_s = min(2 * look_s, _LONGEST_LOOK_S)
                self._met.put(dial(self._store.get(_key(peer)).decode(), self._admission, peer))
        deadline = time.monotonic() + _RING_S
        while len(self._connections) < 2:
            try:
                met = self._met.get(timeout=_LONGEST_LOOK_S)
            except queue.Empty:
                if self._is_over.is_set() or time.monotonic() > deadline:
                    return False
                continue
            if met.peer in self._connections or met.peer not in (self._ring.previous, self._ring.next):
                met.socket.close()
            else:
                self._connections[met.peer] = Connection(met.peer, met.socket)
        return True

    def _pass_on(self) -> None:
        """Pass addresses on until all are known and nothing waits to be sent."""
        previous, following = self._connections[self._ring.previous], self._connections[self._ring.next]
        deadline = time.monotonic() + _RING_S
        self._ring.begin()
        while not self._ring.is_complete or following.has_outgoing:
            waiting = select.poll()  # select.select takes no descriptor above 1,023
            if not self._ring.is_complete:
                waiting.register(previous.socket, select.POLLIN)
            if following.has_outgoing:
                waiting.register(following.socket, select.POLLOUT)
            ready = {number for number, _ in waiting.poll(_LONGEST_LOOK_S * 1000)}
            if following.socket.fileno() in ready:
                following.flush()
            if previous.socket.fileno() in ready:
                try:
                    previous.receive(self._ring)
                except BrokenConnection:
                    if not self._ring.is_complete:  # otherwise it has sent everything
                        raise
            if self._is_over.is_set() or time.monotonic() > deadline:
                return


def _key(rank: int) -> str:
    return f"address {rank}"
