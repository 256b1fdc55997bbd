"""Service that decides who takes part in which step, and its log on disk.

Every replica keeps one connection, over which it gives signs of life and asks before each step. All decisions are made
by :func:`~cordillera.distributed.fault_tolerance.coordination.decide` in one thread; each is on disk before anybody
hears of it. A coordinator that is started again on the same log goes on from there; replicas connect again by
themselves, and a step that is being trained meanwhile is committed without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from cordillera.distributed.fault_tolerance.coordination import (
    Alive,
    Ask,
    Commit,
    CoordinationRules,
    CoordinatorState,
    Join,
    Leave,
    Refusal,
    ReplicaMessage,
    ReplicaStatus,
    Reply,
    Rollback,
    decide,
)
from cordillera.distributed.fault_tolerance.messages import Channel, MessageError
from cordillera.errors import CheckpointError, PlanError, RunError
from cordillera.files import parse_sealed, sealed_json
from cordillera.run import disk_errors, write_atomically

_HANDSHAKE_S, _SEND_S = 5.0, 1.0
_MOST_STRANGERS = 64  # most connections at a time that have not joined
_LEASES = 20  # number of leases without a message after which a connection is closed
_RETRY_S = 1.0
_MOST_LOG = 4 << 20  # bytes after which the log is rewritten

Hear: TypeAlias = Callable[[dict[str, Any]], object]


class CoordinatorLog:
    """Log of a coordinator's states on disk, one line with a checksum each; the last line counts.

    Args:
        path: File, which is created; one process at a time may hold it.

    Raises:
        RunError: If another process holds it, or the disk refuses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = open(path.with_name(f".{path.name}.lock"), "a")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise RunError(
                "another coordinator holds it", where=str(path), remedy="stop it, or let replicas ask that one"
            ) from error

    def read(self, rules: CoordinationRules) -> CoordinatorState | None:
        """Return the last state; None if the log is empty. A line that was cut off in writing is dropped.

        Raises:
            CheckpointError: If the log is damaged.
        """
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        whole = [line for line in lines[:-1] if line]
        if lines[-1]:
            with disk_errors(self.path):
                os.truncate(self.path, sum(len(line) + 1 for line in lines[:-1]))
        if not whole:
            return None
        remedy = "start the job anew from its newest checkpoint with --resume"
        content: dict[str, Any] = {}
        for number, line in enumerate(whole, 1):  # a damaged line makes the whole file untrustworthy
            where = f"{self.path}, line {number}"
            text = line.decode(errors="replace") + "\n"
            content = parse_sealed(text, where, line=True, required=True, error=CheckpointError, remedy=remedy)
        try:
            return CoordinatorState(
                rules,
                str(content["configuration"]),
                epoch=int(content["epoch"]),
                head=Commit(**content["head"]),
                previous=None if content["previous"] is None else Commit(**content["previous"]),
                members=tuple(map(str, content["members"])),
                silent=tuple(map(str, content["silent"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"is damaged ({error})", where=where, remedy=remedy) from error

    def write(self, state: CoordinatorState, *, is_durable: bool) -> None:
        """Append a state; if it must be ``is_durable``, wait until it is on the disk.

        Raises:
            RunError: If the disk is full or refuses it.
        """
        content = {
            "configuration": state.configuration,
            "epoch": state.epoch,
            "head": asdict(state.head),
            "previous": None if state.previous is None else asdict(state.previous),
            "members": list(state.members),
            "silent": list(state.silent),
        }
        line = sealed_json(content, line=True)
        if self.path.exists() and self.path.stat().st_size > _MOST_LOG:
            write_atomically(self.path, line)
            return
        with disk_errors(self.path), open(self.path, "ab", buffering=0) as file:
            size, rest = file.tell(), line.encode()
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                if is_durable:
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise

    def close(self) -> None:
        """Release the log, so that another coordinator may open it."""
        self._lock.close()


@dataclass(eq=False)
class _Connection:
    """Connection of a replica, with the addresses of its ranks."""

    channel: Channel
    replica: str
    addresses: list[str]


_Event: TypeAlias = tuple[_Connection, ReplicaMessage]


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine.

    Args:
        host: Address.
        port: Port; 0 for one that is free.

    Raises:
        PlanError: If it cannot listen there.
    """
    try:
        return socket.create_server((host, port), backlog=256)
    except OSError as error:
        where = f"{host}:{port}"
        raise PlanError(
            f"cannot listen ({error.strerror})", where=where, remedy="choose another host or port"
        ) from error


class Coordinator:
    """A coordinator that listens at a port; :meth:`serve` runs it.

    Args:
        rules: Rules of the job.
        configuration: Digest that all replicas must have.
        token: Secret that replicas must know.
        log: Log to go on from and to write; None for one in memory, with which a restart forgets everything.
        host: Address to listen at.
        port: Port; 0 for one that is free.
        hear: Function that is called with every decision that changes the members, and every refusal and rollback.

    Attributes:
        address: ``HOST:PORT`` at which it listens.

    Raises:
        PlanError: If it cannot listen there.
        CheckpointError: If the log is damaged, or belongs to another configuration.
    """

    def __init__(
        self,
        rules: CoordinationRules,
        configuration: str,
        token: bytes,
        *,
        log: CoordinatorLog | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        hear: Hear = lambda event: None,
    ) -> None:
        self._rules, self._token, self._log, self._hear = rules, token, log, hear
        before = None if log is None else log.read(rules)
        if before is not None and before.configuration != configuration:
            raise CheckpointError(
                "belongs to a job of another configuration",
                where=str(log.path if log else ""),
                remedy="start the job anew from its newest checkpoint with --resume",
            )
        self._state = before or CoordinatorState.begin(rules, configuration)
        if before is not None:  # members are awaited for a lease, so that the first to come back does not go on alone
            now = time.monotonic()
            known = {name: ReplicaStatus(now) for name in before.members}
            self._state = replace(before, began=now, connected=known)
        self._listener = listen_at(host, port)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._connections: dict[str, _Connection] = {}
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        self._is_closed = self._is_stopping = False

    def serve(self) -> None:
        """Answer replicas until :meth:`close` is called."""
        threading.Thread(target=self._accept, name="cordillera coordinator", daemon=True).start()
        held: list[_Event] = []
        while not self._is_closed:
            now = time.monotonic()
            wait = max(0.0, min(self._state.next_deadline(now) - now, 60.0))
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=_RETRY_S if held else wait + 0.001)
                if event is not None:
                    held.append(event)
                while not self._events.empty():
                    event = self._events.get_nowait()
                    if event is not None:
                        held.append(event)
            try:
                self._decide(held)
                held = []
            except RunError as error:  # the disk is full: a decision that is not stored must not be announced
                self._hear({"kind": "waiting", "why": str(error)})

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas that are connected."""
        return sorted(self._connections)

    def stop(self) -> None:
        """Ask all replicas to stop after their next step, which is the same for all; from any thread."""
        self._is_stopping = True

    def close(self) -> None:
        """End the service and all connections; from any thread."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._events.put(None)
        for connection in list(self._connections.values()):
            connection.channel.close()
        if self._log is not None:
            self._log.close()

    def _decide(self, events: list[_Event]) -> None:
        messages: list[ReplicaMessage] = []
        connections = dict(self._connections)
        for connection, message in events:
            if isinstance(message, Join):
                if message.configuration != self._state.configuration:
                    self._refuse(connection)
                    continue
                connections[message.replica] = connection
            elif connections.get(message.replica) is not connection:
                continue  # another process has taken its place
            elif isinstance(message, Leave):
                del connections[message.replica]
            messages.append(message)
        state, replies = decide(self._state, messages, time.monotonic())
        was = self._state
        if self._log is not None and (state.epoch, state.head, state.members) != (was.epoch, was.head, was.members):
            self._log.write(state, is_durable=state.epoch != was.epoch)
        for name, connection in self._connections.items():
            if connections.get(name) is not connection:
                with contextlib.suppress(MessageError):
                    if name in connections:
                        connection.channel.send({"kind": "replaced"})
                connection.channel.close()
        self._state, self._connections = state, connections
        for name, one in state.isolated.items():
            if name not in was.isolated or one.times > was.isolated[name].times:
                why = f"others did not reach it; steps are taken without it for {one.until - time.monotonic():.0f} s"
                self._hear({"kind": "isolated", "replica": name, "why": why})
        if state.epoch != was.epoch:
            self._hear({"kind": "epoch", "epoch": state.epoch, "step": state.head.step, "members": list(state.members)})
        for reply in replies:
            self._answer(reply)

    def _refuse(self, connection: _Connection) -> None:
        why = "its configuration differs from that of the job"
        self._hear({"kind": "refused", "replica": connection.replica, "why": why})
        with contextlib.suppress(MessageError):
            connection.channel.send({"kind": "refused", "why": why, "again": False})

    def _answer(self, reply: Reply) -> None:
        if isinstance(reply, Rollback):
            self._hear({"kind": "rollback", "lost": asdict(reply.lost), "kept": asdict(reply.kept)})
            return
        if isinstance(reply, Refusal):
            self._hear({"kind": "refused", "replica": reply.replica, "why": reply.reason})
            self._send(reply.replica, {"kind": "refused", "why": reply.reason, "again": reply.again})
            return
        content = {
            "kind": "membership",
            "epoch": reply.epoch,
            "head": asdict(reply.head),
            "members": list(reply.members),
            "donors": dict(reply.donors),
            "addresses": {name: self._connections[name].addresses for name in reply.members},
            "stop": self._is_stopping,
        }
        for name in reply.members:
            self._send(name, content)

    def _send(self, name: str, content: dict[str, Any]) -> None:
        connection = self._connections.get(name)
        if connection is not None:
            try:
                connection.channel.send(content)
            except MessageError:
                self._events.put((connection, Leave(name)))

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._attend, args=(connection,), name="cordillera replica", daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        """Receive messages of one replica until its connection ends."""
        channel = Channel(connection, "replica", _HANDSHAKE_S)
        known: _Connection | None = None
        try:
            try:
                channel.prove(self._token, "server")
                known, join = _joined(channel, channel.receive())
            finally:
                self._strangers.release()
            self._events.put((known, join))
            channel.deadline_s = _LEASES * self._rules.lease_s
            while True:
                self._events.put((known, _message(known.replica, channel.receive())))
        except (MessageError, OSError):
            if known is not None:
                self._events.put((known, Leave(known.replica)))
            channel.close()


def _joined(channel: Channel, content: Any) -> tuple[_Connection, Join]:
    try:
        replica, configuration = content["replica"], content["configuration"]
        addresses = list(content["addresses"])
        if not all(isinstance(one, str) and len(one) <= 1000 for one in (replica, configuration, *addresses)):
            raise TypeError("no text")
    except (KeyError, TypeError) as error:
        raise MessageError("a replica joined without saying who it is") from error
    return _Connection(channel, replica, addresses), Join(replica, configuration)


def _message(replica: str, content: Any) -> ReplicaMessage:
    """Parse a message of a replica."""
    try:
        kind = content["kind"]
        if kind == "alive":
            return Alive(replica)
        if kind == "leave":
            return Leave(replica)
        if kind == "ask":
            return Ask(
                replica,
                read_commit(content["state"]),
                discarded=content["discarded"] is True,
                durable=_whole(content["durable"]),
                restored=content["restored"] is True,
                missed=tuple(map(str, content["missed"])),
            )
    except (KeyError, TypeError) as error:
        raise MessageError(f"a message of {replica} is incomplete") from error
    raise MessageError(f"a message of {replica} is of an unknown kind")


def read_commit(content: Any) -> Commit:
    """Return the commit of a message.

    Raises:
        KeyError, TypeError: If it is none.
    """
    lineage = content["lineage"]
    if not isinstance(lineage, str) or len(lineage) > 64:
        raise TypeError("no lineage")
    return Commit(_whole(content["epoch"]), _whole(content["step"]), lineage)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise TypeError("no whole number")
    return value
