"""Sum of a tensor over processes, any of which may fail at any time.

The members of an epoch are connected with each other. A tensor passes in chunks, and each member owns a part of every
chunk: it receives that part from the contributors, adds the parts in the order of names, and sends the sum to all.
A link thus carries as many bytes as in a ring, ``2 (n - 1) / n`` times the tensor, but every element is added in the
same order, by one member; the way in which the bytes pass cannot change the result. At most ``window`` chunks are on
their way.

On one host the parts lie in memory that all members map, and only the headers of frames pass through sockets.

Sources: the window of fixed chunks is that of FTAR in FT-HSDP (arXiv 2602.00277); that waits end by themselves after an
abort is the contract of torchcomms. The exchange is ours.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cordillera.distributed.fault_tolerance._chunks import (
    DTYPES,
    LINE,
    BrokenLink,
    MemberLink,
    RingState,
    SharedSegment,
    SumInProgress,
)
from cordillera.distributed.fault_tolerance._lobby import Lobby, Parley, dial, job_key
from cordillera.errors import PeerError, PlanError

CHUNK_BYTES, WINDOW = 4 << 20, 2
"""Default bytes of a tensor that pass at a time, and number of such chunks on their way."""

_MOST_SECONDS = 1_000_000


@dataclass(frozen=True)
class RingMember:
    """A member of an epoch.

    Attributes:
        name: Name of the replica.
        address: :attr:`AllReduce.address` in the member's process.
    """

    name: str
    address: str


class ReduceAborted(PeerError):
    """A sum was given up: a member ended, a deadline passed, or it was aborted. The tensor's content is then undefined.

    Args:
        what: One sentence with the first reason.
        where: Replica and epoch.
        missed: Members that could not be reached, or from which nothing came in time.
    """

    def __init__(self, what: str, *, where: str | None = None, missed: Sequence[str] = ()) -> None:
        super().__init__(what, peer=None, where=where, remedy="connect again in a new epoch, and repeat the step")
        self.missed = tuple(missed)


class AllReduce:
    """Sums tensors of processes, whose set may change from epoch to epoch.

    One thread at a time may connect and reduce; any thread may abort. After an error nothing of the epoch goes on:
    the other members get an error too, and all connect again in a later epoch.

    Args:
        job: Name of the job.
        token: Secret of the job, which is never sent.
        host: Address of the interface to listen on, at which other members reach this process.
        transport: How parts pass: ``memory`` for members on one host, ``sockets``, or ``auto`` to use memory if all
            members see each other's.
        chunk_bytes: Bytes of a tensor that pass at a time, a multiple of 64.
        window: Number of chunks on their way.

    Attributes:
        peak_in_flight_bytes: Most bytes of contributions and sums that were on their way to one member, which had not
            yet shown that it took them. They never exceed ``window * chunk_bytes``.
        transport_used: ``memory`` or ``sockets`` of the newest epoch; ``none`` before the first and with one member.

    Raises:
        PlanError: If an argument is not acceptable.
    """

    def __init__(
        self,
        job: str,
        token: bytes,
        *,
        host: str = "127.0.0.1",
        transport: Literal["auto", "memory", "sockets"] = "auto",
        chunk_bytes: int = CHUNK_BYTES,
        window: int = WINDOW,
    ) -> None:
        if transport not in ("auto", "memory", "sockets"):
            raise PlanError(f"transport is {transport}", remedy="auto, memory or sockets")
        if chunk_bytes < LINE or chunk_bytes % LINE:
            raise PlanError(f"chunk_bytes is {chunk_bytes}", remedy=f"a multiple of {LINE}")
        if window < 1:
            raise PlanError(f"window is {window}", remedy="at least one chunk")
        self.peak_in_flight_bytes, self.transport_used = 0, "none"
        self._key, self._transport = job_key(job, token), transport
        self._chunk_bytes, self._window = chunk_bytes, window
        self._epoch, self._own = -1, ""
        self._ring: RingState | None = None
        self._reason: str | None = "it was not connected"
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._lobby = Lobby(self._key, host)
        self._closed = False
        _LIVE.add(self)

    @property
    def address(self) -> str:
        """Where other members reach this process, as text that only they understand."""
        return self._lobby.address

    @property
    def turned_away(self) -> list[str]:
        """Last 64 refused connections: the origin and the reason of each."""
        return list(self._lobby.turned_away)

    def connect(
        self, epoch: int, ring: Sequence[RingMember], own: str, contributing: Collection[str], deadline_s: float
    ) -> None:
        """Connect to the members of an epoch, which replaces the previous one.

        All members call this with the same ``epoch``, names and contributors. A ring of one member is legal.

        Args:
            epoch: Number of the epoch, larger than any before.
            ring: Members, in any order.
            own: Name of this member.
            contributing: Names of the members whose tensors are added, at least one; the others receive the sum.
            deadline_s: Seconds after which to give up.

        Raises:
            ReduceAborted: If a member ended, does not come in time, or does not agree.
            PlanError: If an argument is not acceptable.
        """
        names = sorted(member.name for member in ring)
        self._check_membership(epoch, names, own, contributing, deadline_s)
        until = time.monotonic() + deadline_s
        self._leave(f"epoch {epoch} begins")
        with self._lock, contextlib.suppress(BlockingIOError):
            self._reason, self._epoch, self._own = None, epoch, own
            while os.read(self._wake_read, 4096):
                pass
        self._lobby.end_epochs(epoch - 1)
        addresses = {member.name: member.address for member in ring}
        places = [place for place, name in enumerate(names) if name in contributing]
        formed = RingState(epoch, names, names.index(own), places, self._chunk_bytes, self._window)
        with self._failing_together():
            self._meet(formed, addresses, until)
            self._ring = formed

    def reduce(self, tensor: Tensor, *, step: int, bucket: int, deadline_s: float) -> None:
        """Replace a tensor by the sum of the contributing members' tensors; callers divide it themselves.

        Every element is added in the order of the sorted names of the contributors, so all members get the same bits,
        whatever the transport. bfloat16 is added in float32 and rounded once. NaN and infinity of contributors
        propagate. The tensors of other members have no influence.

        Args:
            tensor: Contiguous tensor on the CPU, of one dimension and one of :data:`DTYPES`; of the same type and
                length at all members.
            step: Step of the training, at least 0.
            bucket: Number of the tensor within the step, at least 0.
            deadline_s: Seconds after which to give up.

        Raises:
            ReduceAborted: If a member ended, the deadline passed, :meth:`abort` was called, or what came from a member
                was not what was due. The content of ``tensor`` is then undefined.
            PlanError: If an argument is not acceptable.
        """
        _check_tensor(tensor, step, bucket)
        _check_deadline(deadline_s)
        until = time.monotonic() + deadline_s
        with self._failing_together():
            self._check()
            ring = self._ring
            if ring is None or not ring.links:
                return
            one = SumInProgress(ring, tensor, step, bucket)
            try:
                self._run(ring, one, until)
            finally:
                self.peak_in_flight_bytes = max(self.peak_in_flight_bytes, one.peak)

    def abort(self, reason: str) -> None:
        """Abort the current epoch: end every wait of this object and of the other members. Any thread may call this.

        Args:
            reason: Reason for the errors that follow; the reason of the first call counts.
        """
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"x")
        self._lobby.wake()

    def close(self) -> None:
        """Leave the ring and stop listening. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._leave("it was closed")
        self._lobby.close()
        _LIVE.discard(self)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _check_membership(
        self, epoch: int, names: list[str], own: str, contributing: Collection[str], deadline_s: float
    ) -> None:
        _check_deadline(deadline_s)
        if self._closed:
            raise PlanError("the all-reduce was closed")
        if epoch <= self._epoch:
            raise PlanError(f"epoch {epoch} does not follow epoch {self._epoch}", remedy="a larger number")
        if len(set(names)) < len(names) or own not in names:
            raise PlanError(f"the members {names} are not distinct, or {own} is not among them")
        if not contributing or set(contributing) - set(names):
            raise PlanError(f"contributors are {sorted(contributing)} of {names}", remedy="one member or more")

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Turn a broken link into an error of this epoch, and send any error to the other members."""
        try:
            yield
        except BrokenLink as error:
            self._leave(str(error))
            where = f"replica {self._own}, epoch {self._epoch}"
            raise ReduceAborted(str(self._reason), where=where, missed=error.missed) from error
        except BaseException as error:
            self._leave(f"{type(error).__name__} at replica {self._own}")
            raise

    def _leave(self, reason: str) -> None:
        """Abort, and close the connections."""
        self.abort(reason)
        self._ring = None
        self._lobby.end_epochs(self._epoch)
        with self._lock:
            for one in self._sockets:
                one.close()
            self._sockets = []

    def _close_copies(self) -> None:
        for one in [*self._sockets, *self._lobby.sockets()]:
            one.close()

    def _check(self) -> None:
        if self._reason is not None:
            raise BrokenLink(self._reason)

    def _keep(self, parley: Parley) -> None:
        """Let :meth:`abort` find a connection."""
        with self._lock:
            self._sockets.append(parley.socket)

    def _meet(self, ring: RingState, addresses: Mapping[str, str], until: float) -> None:
        """Connect with all members, agree on the ring and on the way in which parts pass."""
        others = [name for name in ring.names if name != ring.names[ring.own]]
        size = ring.window * (ring.chunk_bytes + ring.part_bytes)
        segment = SharedSegment.create(size) if others and self._transport != "sockets" else None
        try:
            parleys, theirs = self._introduce(ring, addresses, others, segment, until)
            seen = {
                name: SharedSegment.attach(theirs[name].get("segment"), size) if segment else None for name in others
            }
            proofs = self._exchange(
                parleys, {name: {"nonce": one.nonce.hex() if one else ""} for name, one in seen.items()}, until
            )
            sees = segment is not None and all(
                seen[name] is not None and proofs[name].get("nonce") == segment.nonce.hex() for name in others
            )
            answers = self._exchange(parleys, {name: {"memory": sees} for name in others}, until)
        finally:
            if segment is not None:
                segment.forget()
        in_memory = sees and all(answer.get("memory") is True for answer in answers.values())
        if others and self._transport == "memory" and not in_memory:
            raise BrokenLink("the members do not see each other's memory")
        self.transport_used = "none" if not others else "memory" if in_memory else "sockets"
        ring.links = {
            place: MemberLink(name, place, parleys[name].socket)
            for place, name in enumerate(ring.names)
            if name in parleys
        }
        ring.sent = {place: [0, 0] for place in ring.links}
        if in_memory:
            ring.segments = [one for name in ring.names if (one := seen.get(name, segment)) is not None]
        else:
            incoming = [place for place in ring.contributing if place != ring.own]
            ring.received = {place: torch.empty(ring.window * ring.part_bytes, dtype=torch.uint8) for place in incoming}

    def _introduce(
        self,
        ring: RingState,
        addresses: Mapping[str, str],
        others: list[str],
        segment: SharedSegment | None,
        until: float,
    ) -> tuple[dict[str, Parley], dict[str, dict[str, Any]]]:
        """Connect to the members before this one, and wait for connections from those after it."""
        own = ring.names[ring.own]
        agreed = {
            "epoch": ring.epoch,
            "members": ring.names,
            "contributors": [ring.names[place] for place in ring.contributing],
            "transport": self._transport,
            "chunk_bytes": ring.chunk_bytes,
            "window": ring.window,
        }
        terms = {**agreed, "name": own, "segment": segment.place if segment else None}
        parleys: dict[str, Parley] = {}
        for name in others:
            if name < own:
                with _naming(name):
                    parleys[name] = dial(addresses[name], self._key, {**terms, "to": name})
                self._keep(parleys[name])
        theirs = self._gather(parleys, until, lambda name, found: name in found or parleys[name].has_met)
        later = [name for name in others if name > own]
        guests = self._lobby.call(ring.epoch, later, until, lambda: self._reason is not None)
        for name, (parley, message) in guests.items():
            self._keep(parley)
            parleys[name], theirs[name] = parley, message
            with _naming(name):
                parley.send({**terms, "to": name})
        self._check()
        if missing := [name for name in later if name not in guests]:
            raise BrokenLink(f"replica {', '.join(missing)} did not come in time", missing)
        theirs.update(self._gather({name: one for name, one in parleys.items() if name not in theirs}, until))
        for name, message in theirs.items():
            for key, value in {**agreed, "name": name, "to": own}.items():
                if (came := message.get(key)) != value:
                    raise BrokenLink(f"replica {name} has {key} {came} instead of {value}")
        return parleys, theirs

    def _exchange(
        self, parleys: Mapping[str, Parley], messages: Mapping[str, dict[str, Any]], until: float
    ) -> dict[str, dict[str, Any]]:
        for name, message in messages.items():
            with _naming(name):
                parleys[name].send(message)
        return self._gather(parleys, until)

    def _gather(
        self,
        parleys: Mapping[str, Parley],
        until: float,
        is_enough: Callable[[str, Mapping[str, Any]], bool] = lambda name, found: name in found,
    ) -> dict[str, dict[str, Any]]:
        """Wait for a message of each member, or until it is enough."""
        found: dict[str, dict[str, Any]] = {}
        while True:
            for name in [name for name in parleys if name not in found]:
                with _naming(name):
                    message = parleys[name].receive()
                if message is not None:
                    found[name] = message
            waiting = [name for name in parleys if not is_enough(name, found)]
            if not waiting:
                return found
            events = {parleys[name].socket.fileno(): parleys[name].events for name in waiting}
            if self._wait(events, until) is None:
                raise BrokenLink(f"replica {', '.join(waiting)} did not agree in time", waiting)

    def _run(self, ring: RingState, one: SumInProgress, until: float) -> None:
        links = {link.socket.fileno(): link for link in ring.links.values()}
        while True:
            one.advance()
            self._check()
            if one.is_done:
                return
            events = {
                number: select.POLLIN * one.awaits(link) | select.POLLOUT * link.has_outgoing
                for number, link in links.items()
            }
            if (ready := self._wait(events, until)) is None:
                missed = one.missed()
                raise BrokenLink(f"the deadline passed; awaited: replica {', '.join(missed)}", missed)
            for number in ready:
                links[number].flush()
                links[number].receive(one)

    def _wait(self, events: Mapping[int, int], until: float) -> list[int] | None:
        """Wait for one of the events; return the sockets where there is one, or None once the deadline has passed."""
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        for number, mask in events.items():
            if mask:
                poller.register(number, mask)
        left = until - time.monotonic()
        ready = poller.poll(math.ceil(left * 1000)) if left > 0 else []
        self._check()
        return [number for number, _ in ready if number != self._wake_read] if ready else None


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the name of a replica to an error of its connection."""
    try:
        yield
    except BrokenLink as error:
        raise BrokenLink(f"replica {name} {error}", error.missed) from error


def _check_tensor(tensor: Tensor, step: int, bucket: int) -> None:
    if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype not in DTYPES:
        raise PlanError(
            f"a tensor {list(tensor.shape)} of {tensor.dtype} on {tensor.device} cannot be reduced",
            remedy=f"a contiguous one of one dimension on the CPU, of {', '.join(map(str, DTYPES))}",
        )
    if not (0 <= step < 1 << 63 and 0 <= bucket < 1 << 32):
        raise PlanError(f"step is {step}, bucket is {bucket}", remedy="numbers that are not negative")


def _check_deadline(seconds: float) -> None:
    if not 0 < seconds <= _MOST_SECONDS:
        raise PlanError(f"deadline_s is {seconds}", remedy=f"a number of seconds above 0, up to {_MOST_SECONDS}")


_LIVE: weakref.WeakSet[AllReduce] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the sockets in a forked process, which would otherwise hide the end of its parent from the others."""
    for one in list(_LIVE):
        one._close_copies()


os.register_at_fork(after_in_child=_close_in_child)
