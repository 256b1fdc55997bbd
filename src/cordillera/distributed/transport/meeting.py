"""How two ranks of a communicator connect: one listener a process, two proofs.

A rank connects to another one when it first needs it; of two ranks the one with the higher number does. Both prove that
they know the communicator's secret, and find out whether they can read each other's memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cordillera.distributed.transport.exchanges import OperationFailed
from cordillera.distributed.transport.frames import BrokenConnection
from cordillera.distributed.transport.peer_memory import MemoryProof, PeerMemory, seen_by_proof

_HANDSHAKE_S = 10.0
_EARLY_S = 1.0  # seconds that an early greeting is kept, until this process makes its communicator
_PAUSE_S = 0.1  # seconds until a connection that could not be accepted, maybe for want of descriptors, is tried again
_MOST_DISMISSED = 4096  # most dismissed communicators that are remembered
_MOST_CHARACTERS = 300  # longest reason
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 4096


class NotHereYet(Exception):
    """A rank has not made the communicator yet."""


@dataclass
class Meeting:
    """A rank that this one is connected with.

    Attributes:
        peer: The rank.
        socket: Connected socket.
        memory: Its memory, if both can read each other's.
    """

    peer: int
    socket: socket.socket
    memory: PeerMemory | None


@dataclass(frozen=True)
class Admission:
    """Data that a listener needs to accept the ranks of a communicator.

    Attributes:
        token: Secret of the communicator.
        rank: Rank of this process.
        size: Number of ranks.
        reads_memory: Whether ranks may read each other's memory.
        welcome: Called with each rank that has come, from a thread of the listener.
        proof: By what other ranks see whether what they read from this one's memory holds.
    """

    token: bytes
    rank: int
    size: int
    reads_memory: bool
    welcome: Callable[[Meeting], None]
    proof: MemoryProof = field(default_factory=MemoryProof)

    @property
    def name(self) -> str:
        """Name of the communicator, which does not give its secret away."""
        return hashlib.sha256(b"name" + self.token).hexdigest()


@dataclass(frozen=True)
class _Dismissed:
    """A communicator that is not here any more.

    Attributes:
        token: Its secret.
        size: Number of its ranks.
        reason: Why.
        origin: Rank that gave up first.
    """

    token: bytes
    size: int
    reason: str
    origin: int


def _answer(token: bytes, challenge: str, rank: int) -> str:
    """Return the response to a challenge, which requires the secret."""
    return hmac.new(token, f"{rank}:{challenge}".encode(), hashlib.sha256).hexdigest()


class PeerListener:
    """Where other processes connect to this one: all communicators of a process share it.

    Args:
        host: Address of the interface to listen on.

    Attributes:
        address: Where it is reached, as text for the store.
    """

    def __init__(self, host: str) -> None:
        self._admissions: dict[tuple[str, int], Admission] = {}  # by name and rank: tests run several ranks as threads
        self._dismissed: dict[tuple[str, int], _Dismissed] = {}
        self._changed = threading.Condition()
        self._sockets = [socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)]
        address: dict[str, Any] = {"boot": _boot(), "host": host, "port": self._sockets[0].getsockname()[1]}
        if sys.platform == "linux":  # an abstract name: it is no file, and goes with the process
            name = f"cordillera-{secrets.token_hex(16)}"
            local = socket.socket(socket.AF_UNIX)
            local.bind("\0" + name)
            local.listen(128)
            self._sockets.append(local)
            address["local"] = name
        self.address = json.dumps(address)
        threading.Thread(target=self._accept, name="cordillera listener", daemon=True).start()

    def admit(self, admission: Admission) -> None:
        """Accept connections from the ranks of a communicator."""
        key = admission.name, admission.rank
        with self._changed:
            self._dismissed.pop(key, None)
            self._admissions[key] = admission
            self._changed.notify_all()

    def dismiss(self, admission: Admission, reason: str = "is not connected any more", origin: int = -1) -> None:
        """Refuse further connections for a communicator.

        Args:
            admission: Admission of the communicator.
            reason: Reason sent to ranks that still connect.
            origin: Rank that gave up for this reason; the rank of the admission by default.
        """
        key = admission.name, admission.rank
        with self._changed:
            if self._admissions.pop(key, None) is not None:
                first = origin if origin >= 0 else admission.rank
                self._dismissed[key] = _Dismissed(admission.token, admission.size, reason[:_MOST_CHARACTERS], first)
                if len(self._dismissed) > _MOST_DISMISSED:
                    del self._dismissed[next(iter(self._dismissed))]
            self._changed.notify_all()

    def close_copies(self) -> None:
        """Close the sockets of a forked process."""
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        selector = selectors.DefaultSelector()
        for listening in self._sockets:
            selector.register(listening, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                one: socket.socket = key.fileobj  # type: ignore[assignment]
                try:
                    came, _ = one.accept()
                except OSError:
                    if one.fileno() < 0:
                        return
                    time.sleep(_PAUSE_S)
                    continue
                threading.Thread(target=self._greet, args=(came,), name="cordillera greeting", daemon=True).start()

    def _greet(self, came: socket.socket) -> None:
        try:
            came.settimeout(_HANDSHAKE_S)
            challenge = secrets.token_hex(16)
            _send(came, {"challenge": challenge})
            hello = _receive(came)
            rank, own = hello.get("rank"), hello.get("to")
            if not isinstance(rank, int) or not isinstance(own, int):
                raise BrokenConnection("sent a greeting of another protocol")
            key = str(hello.get("name")), own
            with self._changed:
                self._changed.wait_for(lambda: key in self._admissions or key in self._dismissed, _EARLY_S)
                asked = self._admissions.get(key) or self._dismissed.get(key)
            if asked is None:
                _send(came, {"early": True})
            if asked is None or not own < rank < asked.size:
                raise BrokenConnection("asked for a communicator that is not here")
            if not hmac.compare_digest(_answer(asked.token, challenge, rank), str(hello.get("answer"))):
                raise BrokenConnection("does not know the secret")
            answer = _answer(asked.token, str(hello.get("challenge")), own)
            if isinstance(asked, _Dismissed):
                _send(came, {"answer": answer, "reason": asked.reason, "origin": asked.origin})
                raise BrokenConnection("came too late")
            admission = asked
            _send(came, {"answer": answer, "proof": admission.proof.shown})
            theirs = _receive(came).get("sees")
            memory = seen_by_proof(hello.get("proof")) if admission.reads_memory else None
            _send(came, {"sees": memory is not None})
            came.settimeout(None)
            admission.welcome(Meeting(rank, came, memory if theirs is True else None))
        except (OSError, ValueError, BrokenConnection):
            came.close()


def dial(address: str, admission: Admission, peer: int) -> Meeting:
    """Connect to a rank.

    Args:
        address: :attr:`PeerListener.address` of its process.
        admission: The communicator.
        peer: The rank.

    Raises:
        NotHereYet: If it has not made the communicator yet.
        OperationFailed: If it has given up.
        BrokenConnection: If it does not listen there, or does not know the secret.
    """
    try:
        connected = _connect(json.loads(address))
        connected.settimeout(_HANDSHAKE_S)
        challenge = secrets.token_hex(16)
        answer = _answer(admission.token, str(_receive(connected).get("challenge")), admission.rank)
        hello = {"name": admission.name, "rank": admission.rank, "to": peer, "answer": answer, "challenge": challenge}
        _send(connected, {**hello, "proof": admission.proof.shown})
        reply = _receive(connected)
        if reply.get("early") is True:
            connected.close()
            raise NotHereYet
        if not hmac.compare_digest(_answer(admission.token, challenge, peer), str(reply.get("answer"))):
            raise BrokenConnection("does not know the secret of the communicator")
        if "reason" in reply:
            connected.close()
            origin = reply.get("origin")
            is_rank = isinstance(origin, int) and 0 <= origin < admission.size
            raise OperationFailed(str(reply["reason"]), origin if is_rank else peer)
        memory = seen_by_proof(reply.get("proof")) if admission.reads_memory else None
        _send(connected, {"sees": memory is not None})
        theirs = _receive(connected).get("sees")
        connected.settimeout(None)
    except (OSError, ValueError, KeyError) as error:
        raise BrokenConnection(f"could not be reached ({error})") from error
    return Meeting(peer, connected, memory if theirs is True else None)


def secret_of(store: dist.Store) -> bytes:
    """Return the secret of a communicator, which all its ranks share; the first rank that asks makes it."""
    return bytes(store.compare_set("token", "", secrets.token_hex(32)))


def listener() -> PeerListener:
    """Return the listener of this process."""
    global _listener
    with _lock:
        if _listener is None:
            _listener = PeerListener(_own_host())
        return _listener


_listener: PeerListener | None = None
_lock = threading.Lock()


def _forget() -> None:
    global _listener, _lock
    if _listener is not None:
        _listener.close_copies()
    _listener, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _own_host() -> str:
    """Return the address of this machine on the way to the job's store."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, _, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        found = _address_on_the_way(family, where)
    except OSError:
        return "127.0.0.1"
    if _is_loopback(found) and not _is_loopback(master):  # some systems map their own name to 127.0.1.1
        with contextlib.suppress(OSError):
            return _address_on_the_way(socket.AF_INET, ("192.0.2.1", 9))  # of no machine: the way out
    return found


def _address_on_the_way(family: int, where: tuple[Any, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        one.connect(where)  # sends nothing
        return str(one.getsockname()[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _boot() -> str:
    """Return a name of this start of this machine."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _connect(address: dict[str, Any]) -> socket.socket:
    if "local" in address and address["boot"] == _boot():
        local = socket.socket(socket.AF_UNIX)
        local.settimeout(_HANDSHAKE_S)
        try:
            local.connect("\0" + address["local"])
        except OSError:  # another namespace of the same machine
            local.close()
        else:
            return local
    connected = socket.create_connection((address["host"], address["port"]), _HANDSHAKE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def _send(connected: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connected.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connected: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_exactly(connected, _LENGTH.size))
    if length > _MOST_BYTES:
        raise BrokenConnection("sent too long a greeting")
    message = json.loads(_exactly(connected, length))
    if not isinstance(message, dict):
        raise BrokenConnection("sent a greeting of another protocol")
    return message


def _exactly(connected: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connected.recv(length - len(data))
        if not part:
            raise BrokenConnection("ended its connection")
        data += part
    return bytes(data)
