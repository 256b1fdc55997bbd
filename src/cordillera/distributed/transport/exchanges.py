"""What passes between a rank and others, as a state machine without sockets, clocks or threads.

A rank offers bytes; small ones travel with the offer. The other rank takes them: it copies them from where they lie if
it can read that memory, and otherwise asks for fragments, a limited number at a time. It then says that it has them,
and the first rank may change its memory. Everything that arrives is checked against what the rank itself waits for.

Sources: one host-driven state machine over few verbs, fragments with a window and sizes that are checked on arrival
follow NCCLX (arXiv 2510.20171, section on the transport). Reading the other process's memory in place of a cache of
registrations is ours.
"""

from __future__ import annotations

import errno
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from cordillera.distributed.tracing.rank_trace import ANY_RANK
from cordillera.distributed.transport.frames import (
    SPAN_BYTES,
    BrokenConnection,
    FrameKind,
    TransportFrame,
    decode_spans,
    encode_spans,
)
from cordillera.distributed.transport.operations import Local, Offer, PeerTask, Take, Task, TransportOperation, as_bytes
from cordillera.distributed.transport.peer_memory import PeerMemory
from cordillera.distributed.transport.signatures import MESSAGE, PUT, Signature, describe, kind_of
from cordillera.errors import PlanError

INLINE_BYTES = 16 << 10
"""Most bytes of a transfer that travel with its offer."""

_BLOCK_BYTES = 512 << 10  # bytes added at a time, which fit in a core's cache
_COPY_BYTES = 32 << 20  # bytes copied between checks for an abort
_MOST_BYTES = {  # largest payload of a frame; for an offer, of its table of addresses
    FrameKind.INLINE: INLINE_BYTES + SPAN_BYTES, FrameKind.OFFER: 1 << 20, FrameKind.GET: SPAN_BYTES,
    FrameKind.ABORT: 4096,
}  # fmt: skip

_Key: TypeAlias = tuple[int, int, int, int]  # rank, kind, sequence or tag or window, index


class OperationFailed(Exception):
    """The ranks of an operation do not agree, or cannot reach each other; the text is one sentence.

    Args:
        reason: The sentence.
        origin: Rank that gave up for this reason, if it is another one.
    """

    def __init__(self, reason: str, origin: int | None = None) -> None:
        super().__init__(reason)
        self.origin = origin


class Wire(Protocol):
    """What carries frames to other ranks."""

    def open(self, peer: int, operation: TransportOperation) -> bool:
        """Whether frames can be sent to a rank now; if not, it is reached for the sake of an operation.

        Raises:
            OperationFailed: If the rank is gone or cannot be reached.
        """
        ...

    def send(self, peer: int, frame: TransportFrame, *payload: memoryview) -> bool:
        """Send a frame; return whether all that was sent to the rank has left this process."""
        ...

    def memory(self, peer: int) -> PeerMemory | None:
        """Return the memory of a rank, if it can be read from here and this rank's from there."""
        ...


@dataclass(frozen=True)
class FragmentLimits:
    """How much a rank asks for at a time where it cannot read memory.

    Every transfer has one fragment on its way; more than one only as far as both windows allow.

    Attributes:
        fragment_bytes: Bytes of a fragment, a multiple of 16.
        of_transfer: Most fragments of a transfer on their way.
        of_rank: Most fragments to a rank on their way, beyond the first one of each transfer.

    Raises:
        PlanError: If a number is not acceptable.
    """

    fragment_bytes: int = 1 << 20
    of_transfer: int = 4
    of_rank: int = 8

    def __post_init__(self) -> None:
        if self.fragment_bytes < 16 or self.fragment_bytes % 16 or self.of_transfer < 1 or self.of_rank < 1:
            raise PlanError(
                f"{self} cannot be kept",
                where="fragments",
                remedy="a multiple of 16 bytes, and windows of at least one",
            )


@dataclass
class TransportCounters:
    """Counters of the traffic so far.

    Attributes:
        memory_bytes: Bytes read from the memory of other processes.
        socket_bytes: Bytes of fragments received.
        peak_in_flight_bytes: Most bytes of fragments that were on their way to this rank.
    """

    memory_bytes: int = 0
    socket_bytes: int = 0
    peak_in_flight_bytes: int = 0


@dataclass
class _Fetch:
    """A transfer that comes in fragments.

    Attributes:
        take: Task that receives it.
        asked: Bytes that were asked for.
        arrived: Bytes that have come.
        waiting: Begin and length of the fragments that were asked for and have not come.
    """

    take: Take
    asked: int = 0
    arrived: int = 0
    waiting: deque[tuple[int, int]] = field(default_factory=deque)


class Exchanges:
    """Operations that have begun, and what passes for them.

    Args:
        rank: This rank.
        wire: Transport of frames.
        complete: Called with each operation that is done.
        ranks: Ranks of the members in the job, for messages; by default those of the group.
        limits: How many fragments may be on their way.

    Attributes:
        counters: Counters of the traffic so far.
        stops: Whether long copies are to end early, as the operations were given up.
        windows: Memory that other ranks may write to, uint8, and the signature of a put, by window number.
    """

    def __init__(
        self,
        rank: int,
        wire: Wire,
        complete: Callable[[TransportOperation], None],
        ranks: Sequence[int] = (),
        limits: FragmentLimits | None = None,
    ) -> None:
        self._limits, self._in_flight, self._in_flight_bytes = limits or FragmentLimits(), 0, 0
        self.rank, self.counters, self.stops = rank, TransportCounters(), False
        self._wire, self._complete, self._ranks = wire, complete, ranks
        self._collectives: dict[int, TransportOperation] = {}  # collectives by sequence number
        self._pending: defaultdict[int, int] = defaultdict(int)  # unfinished exchanges by rank
        self._early: dict[_Key, tuple[TransportFrame, memoryview]] = {}  # offers ahead of their receives
        self._takes: dict[_Key, Take] = {}  # pending receives of collectives
        self._messages: defaultdict[int, list[Take]] = defaultdict(list)  # pending receives by tag, in order
        self._matched: defaultdict[tuple[int, int], int] = defaultdict(int)  # received messages by rank and tag
        self._offers: dict[_Key, Offer] = {}
        self._unsent: defaultdict[int, list[Offer]] = defaultdict(list)  # offers to ranks that are not connected yet
        self._leaving: defaultdict[int, list[Offer]] = defaultdict(list)  # offers whose bytes are still being sent
        self._fetches: dict[_Key, _Fetch] = {}
        self.windows: dict[int, tuple[Tensor, Signature]] = {}
        self._puts: defaultdict[tuple[int, int], int] = defaultdict(int)  # number of received puts by rank and window

    def post(self, operation: TransportOperation) -> None:
        """Begin an operation.

        Raises:
            OperationFailed: If it cannot be done.
        """
        if not operation.is_message:
            self._collectives[operation.sequence] = operation
        for task in operation.tasks:
            if isinstance(task, PeerTask) and task.peer != ANY_RANK:
                self._pending[task.peer] += 1
        before = [task for other in operation.follows for task in other.tasks if not task.is_done]
        for task in operation.tasks:
            task.after(*before)
        if operation.tasks:
            self._begin([task for task in operation.tasks if not task.needs])
        else:
            self._end(operation)

    def lost(self, peer: int) -> int:
        """Note that a rank is gone; return how many exchanges that are not done need it."""
        alone = 0
        for take in (take for takes in self._messages.values() for take in takes if peer in take.sources):
            take.sources.discard(peer)
            alone += not take.sources
        return self._pending[peer] + alone

    def opened(self, peer: int) -> None:
        """Note that a rank has been reached."""
        for offer in self._unsent.pop(peer, []):
            if self._offer(offer):
                self._finish(offer)

    def drained(self, peer: int) -> None:
        """Note that all that was sent to a rank has left this process."""
        for offer in self._leaving.pop(peer, []):
            self._finish(offer)

    def clear(self) -> None:
        """Forget everything."""
        for table in (self._collectives, self._pending, self._early, self._takes, self._messages, self._matched,
                      self._offers, self._unsent, self._leaving, self._fetches, self.windows, self._puts):  # fmt: skip
            table.clear()
        self._in_flight = self._in_flight_bytes = 0

    def place(self, peer: int, frame: TransportFrame) -> memoryview:
        """Return where the bytes that follow a frame belong.

        Raises:
            BrokenConnection: If the frame is not acceptable.
        """
        if frame.kind == FrameKind.DATA:
            fetch = self._fetches.get(_key(peer, frame))
            if fetch is None or not fetch.waiting or (frame.size, frame.length) != fetch.waiting[0]:
                raise BrokenConnection("sent a fragment that nobody asked for")
            if _is_direct(fetch.take):
                begin = fetch.waiting[0][0]
                return fetch.take.views[0].numpy().data[begin : begin + frame.length]
            return memoryview(bytearray(frame.length))
        if frame.length > _MOST_BYTES.get(FrameKind(frame.kind), 0):
            raise BrokenConnection(f"sent a frame of {frame.length} bytes")
        return memoryview(bytearray(frame.length))

    def arrived(self, peer: int, frame: TransportFrame, data: memoryview) -> None:
        """Take a frame whose bytes have come.

        Raises:
            BrokenConnection: If the frame is not acceptable.
            OperationFailed: If the ranks do not agree.
        """
        key = _key(peer, frame)
        if frame.kind in (FrameKind.OFFER, FrameKind.INLINE):
            self._offered(key, frame, data)
        elif frame.kind == FrameKind.GET:
            self._answer(key, data)
        elif frame.kind == FrameKind.DATA:
            self._fragment(key, data)
        elif (offer := self._offers.pop(key, None)) is None:
            raise BrokenConnection("took what nobody offered")
        else:
            self._finish(offer)

    def _begin(self, tasks: Sequence[Task]) -> None:
        """Begin tasks, and those that need only them."""
        ready = deque(tasks)
        while ready:
            task = ready.popleft()
            if self._started(task):
                ready.extend(self._done(task))

    def _started(self, task: Task) -> bool:
        """Begin a task; return whether it is done at once."""
        if isinstance(task, Local):
            task.run()
            return True
        if isinstance(task, Offer):
            if self._wire.open(task.peer, task.operation):
                return self._offer(task)
            self._unsent[task.peer].append(task)
            return False
        assert isinstance(task, Take)
        if task.operation.is_message:
            return self._expect(task)
        key = (task.peer, *task.key)
        if (found := self._early.pop(key, None)) is not None:  # who sent it may be gone since
            return self._take(task, *found)
        self._wire.open(task.peer, task.operation)
        self._takes[key] = task
        return False

    def _expect(self, take: Take) -> bool:
        """Wait for a message; return whether it is here already."""
        tag = take.operation.sequence
        ahead = self._messages[tag]
        take.index = self._matched[take.peer, tag] + sum(other.peer == take.peer for other in ahead)
        ahead.append(take)
        if (matched := self._match(tag)) is not None:  # who sent it may be gone since
            return self._take(*matched)
        refused: OperationFailed | None = None
        for peer in sorted(take.sources) or [take.peer]:
            try:
                self._wire.open(peer, take.operation)
            except OperationFailed as error:
                take.sources.discard(peer)
                refused = error
        if refused is not None and not take.sources:
            raise refused
        return False

    def _match(self, tag: int) -> tuple[Take, TransportFrame, memoryview] | None:
        """Return the first of the awaited messages of a tag that has come, with its offer.

        A message belongs to the first of those that were posted for its sender or for any rank, and messages of one
        sender keep their order.
        """
        takes = self._messages[tag]
        for at, take in enumerate(takes):
            peers = [take.peer]
            if take.peer == ANY_RANK:  # ranks in the order in which their messages came
                peers = [peer for peer, kind, other, _ in self._early if kind == MESSAGE and other == tag]
            for peer in peers:
                number = self._matched[peer, tag]
                if (found := self._early.pop((peer, MESSAGE, tag, number), None)) is None:
                    continue
                del takes[at]
                self._matched[peer, tag] += 1
                if take.peer == ANY_RANK:
                    take.peer = peer
                    self._pending[peer] += 1
                    for other in takes[at:]:
                        other.index += other.peer == peer
                take.index = number
                return take, *found
        return None

    def _done(self, task: Task) -> list[Task]:
        """Note that a task is done; return the tasks that may begin now."""
        task.is_done = True
        if isinstance(task, PeerTask):
            self._pending[task.peer] -= 1
        task.operation.left -= 1
        if not task.operation.left:
            self._end(task.operation)
        ready = []
        for other in task.then:
            other.needs -= 1
            if not other.needs:
                ready.append(other)
        return ready

    def _finish(self, task: Task) -> None:
        self._begin(self._done(task))

    def _end(self, operation: TransportOperation) -> None:
        if not operation.is_message:
            self._collectives.pop(operation.sequence, None)
        if operation.finish is not None:
            operation.finish()
        if not operation.is_passive:
            self._complete(operation)

    def _offer(self, offer: Offer) -> bool:
        """Offer bytes; return whether that is all that is to be done."""
        size = offer.size
        place = b"" if offer.place is None else encode_spans([(offer.place, size)])
        if size > INLINE_BYTES:
            self._offers[(offer.peer, *offer.key)] = offer
            table = place + (encode_spans(offer.spans()) if self._wire.memory(offer.peer) is not None else b"")
            self._wire.send(offer.peer, _frame(FrameKind.OFFER, offer, len(table)), memoryview(table))
            return False
        data = b"".join([place, *(view.numpy().data for view in offer.views)])
        has_left = self._wire.send(offer.peer, _frame(FrameKind.INLINE, offer, len(data)), memoryview(data))
        if not has_left:  # the process may end after the operation, so the bytes must have left
            self._leaving[offer.peer].append(offer)
        return has_left

    def _answer(self, key: _Key, data: memoryview) -> None:
        """Send a fragment that a rank asks for."""
        offer, spans = self._offers.get(key), decode_spans(data)
        if offer is None or len(spans) != 1 or not 0 < spans[0][1] <= offer.size - spans[0][0]:
            raise BrokenConnection("asked for bytes that nobody offered")
        ((begin, length),) = spans
        parts = [view.numpy().data for view in _cut(offer.views, begin, length)]
        self._wire.send(offer.peer, _frame(FrameKind.DATA, offer, length)._replace(size=begin), *parts)

    def _offered(self, key: _Key, frame: TransportFrame, data: memoryview) -> None:
        peer, kind, tag, number = key
        if kind == PUT:
            return self._put_in_window(peer, frame, data)
        if kind == MESSAGE:
            if key in self._early or number < self._matched[peer, tag]:
                raise BrokenConnection("sent an offer twice")
            self._early[key] = frame, data
            while (matched := self._match(tag)) is not None:
                if self._take(*matched):
                    self._finish(matched[0])
            return
        if (take := self._takes.pop(key, None)) is not None:
            if self._take(take, frame, data):
                self._finish(take)
            return
        if (operation := self._collectives.get(frame.sequence)) is not None:
            self._check(operation, peer, frame.signature)
            if not any(isinstance(one, Take) and (one.peer, one.index) == (peer, frame.number)
                       for one in operation.tasks):  # fmt: skip
                raise OperationFailed(
                    f"{self._name(peer)} offers to {operation.title} what {self._name(self.rank)} does not take"
                )
        if key in self._early:
            raise BrokenConnection("sent an offer twice")
        self._early[key] = frame, data

    def _put_in_window(self, peer: int, frame: TransportFrame, data: memoryview) -> None:
        """Receive a put into a window of this rank, for which no operation is posted."""
        number, at = frame.sequence, decode_spans(data[:SPAN_BYTES])
        if not at or frame.number != self._puts[peer, number]:
            raise BrokenConnection("sent a put twice, or not all of one")
        self._puts[peer, number] += 1
        if (window := self.windows.get(number)) is None:
            raise OperationFailed(f"{self._name(peer)} puts into a window that {self._name(self.rank)} has not opened")
        memory, signature = window
        ((begin, size),) = at
        if size != frame.size or begin + size > memory.numel():
            raise OperationFailed(
                f"{self._name(peer)} puts {frame.size:,} bytes at byte {begin:,} of a window of {memory.numel():,} of "
                f"{self._name(self.rank)}"
            )
        take = Take(peer=peer, index=frame.number, views=[memory[begin : begin + size]])
        TransportOperation("put", signature, [take], is_message=True, is_passive=True, sequence=number)
        self._pending[peer] += 1
        if self._take(take, frame, data[SPAN_BYTES:]):
            self._finish(take)

    def _take(self, take: Take, frame: TransportFrame, data: memoryview) -> bool:
        """Receive an offer of a rank; return whether it is complete."""
        self._check(take.operation, take.peer, frame.signature)
        if take.make is not None:
            if (made := take.make(frame.size)) is None:
                raise OperationFailed(
                    f"{self._name(take.peer)} offers {frame.size:,} bytes to {take.operation.title}, which are no rows "
                    f"of {self._name(self.rank)}, or too many"
                )
            take.views, take.make = [as_bytes(made)], None
        if frame.size != take.size or (frame.kind == FrameKind.INLINE and data.nbytes != take.size):
            raise OperationFailed(
                f"{self._name(take.peer)} offers {frame.size:,} bytes to {take.operation.title}, "
                f"{self._name(self.rank)} takes {take.size:,}"
            )
        if frame.kind == FrameKind.INLINE:
            self._put(take, 0, data)
            return True
        memory = self._wire.memory(take.peer)
        if memory is None or not data.nbytes:
            self._fetches[(take.peer, *take.key)] = fetch = _Fetch(take)
            self._ask(fetch)
            return False
        try:
            self._read(memory, take, decode_spans(data))
        except ProcessLookupError as error:
            raise OperationFailed(f"{self._name(take.peer)} ended") from error
        except OSError as error:
            if error.errno == errno.ECANCELED:  # its reason, or the end of its connection, will arrive
                return False
            raise OperationFailed(
                f"the memory of {self._name(take.peer)} could not be read ({error.strerror})"
            ) from error
        self._wire.send(take.peer, _frame(FrameKind.TAKEN, take))
        return True

    def _name(self, rank: int) -> str:
        return f"rank {self._ranks[rank] if self._ranks else rank}"

    def _check(self, operation: TransportOperation, peer: int, theirs: Signature) -> None:
        if theirs != operation.signature:
            raise OperationFailed(
                f"{self._name(peer)} is at {describe(theirs)}, {self._name(self.rank)} at "
                f"{describe(operation.signature)} ({operation.title})"
            )

    def _read(self, memory: PeerMemory, take: Take, there: list[tuple[int, int]]) -> None:
        """Copy, or add, an offer of another rank of this host."""
        if [length for _, length in there] != [view.numel() for view in take.views]:
            raise OperationFailed(f"{self._name(take.peer)} offers {take.operation.title} in other parts")
        self.counters.memory_bytes += take.size
        if take.reduce is None:
            if take.size <= _COPY_BYTES:
                memory.read_all(there, take.spans())
                return
            for (address, length), (into, _) in zip(there, take.spans(), strict=True):
                for begin in range(0, length, _COPY_BYTES):
                    if self.stops:
                        return
                    memory.read(address + begin, min(_COPY_BYTES, length - begin), into + begin)
            return
        own_scratch = _scratch()
        scratch, at, size = own_scratch.view(take.dtype), own_scratch.data_ptr(), take.dtype.itemsize
        for (address, length), view in zip(there, take.views, strict=True):
            values = view.view(take.dtype)
            for begin in range(0, length, _BLOCK_BYTES):
                if self.stops:
                    return
                count = min(_BLOCK_BYTES, length - begin)
                memory.read(address + begin, count, at)
                own = values[begin // size : (begin + count) // size]
                take.reduce(own, scratch[: count // size], out=own)

    def _put(self, take: Take, begin: int, data: memoryview) -> None:
        """Write bytes that have come to where they belong, or add them."""
        if not data.nbytes:
            return
        if _is_direct(take):
            take.views[0].numpy().data[begin : begin + data.nbytes] = data
            return
        came = torch.frombuffer(data, dtype=torch.uint8)
        for view in _cut(take.views, begin, data.nbytes):
            part, came = came[: view.numel()], came[view.numel() :]
            if take.reduce is None:
                view.copy_(part)
            else:
                own = view.view(take.dtype)
                take.reduce(own, part.view(take.dtype), out=own)

    def _ask(self, fetch: _Fetch) -> None:
        """Ask for the next fragments, as far as the windows allow."""
        take, limits = fetch.take, self._limits
        while fetch.asked < take.size:
            if fetch.waiting and (len(fetch.waiting) >= limits.of_transfer or self._in_flight >= limits.of_rank):
                return
            length = min(limits.fragment_bytes, take.size - fetch.asked)
            fetch.waiting.append((fetch.asked, length))
            data = encode_spans([(fetch.asked, length)])
            fetch.asked += length
            self._in_flight += 1
            self._in_flight_bytes += length
            self.counters.peak_in_flight_bytes = max(self.counters.peak_in_flight_bytes, self._in_flight_bytes)
            self._wire.send(take.peer, _frame(FrameKind.GET, take, len(data)), memoryview(data))

    def _fragment(self, key: _Key, data: memoryview) -> None:
        fetch = self._fetches[key]
        take, (begin, length) = fetch.take, fetch.waiting.popleft()
        fetch.arrived += length
        self._in_flight -= 1
        self._in_flight_bytes -= length
        self.counters.socket_bytes += length
        if not _is_direct(take):
            self._put(take, begin, data)
        self._ask(fetch)
        if self._in_flight < self._limits.of_rank and fetch.asked == take.size:
            for other in list(self._fetches.values()):  # other fetches may use the room that is free now
                self._ask(other)
        if fetch.arrived == take.size:
            del self._fetches[key]
            self._wire.send(take.peer, _frame(FrameKind.TAKEN, take))
            self._finish(take)


_OF_THREAD = threading.local()


def _scratch() -> Tensor:
    """Return memory for a block that is to be added, which all groups of a thread share."""
    if not hasattr(_OF_THREAD, "scratch"):
        _OF_THREAD.scratch = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
    found: Tensor = _OF_THREAD.scratch
    return found


def _key(peer: int, frame: TransportFrame) -> _Key:
    return peer, kind_of(frame.signature), frame.sequence, frame.number


def _frame(kind: FrameKind, one: PeerTask, length: int = 0) -> TransportFrame:
    return TransportFrame(kind, one.operation.signature, one.operation.sequence, one.index, one.size, length)


def _is_direct(take: Take) -> bool:
    """Whether fragments are received where they belong."""
    return take.reduce is None and len(take.views) == 1


def _cut(views: Sequence[Tensor], begin: int, length: int) -> Iterator[Tensor]:
    """Return the parts of views that hold some of their bytes."""
    for view in views:
        if begin < view.numel() and length:
            part = view[begin : begin + length]
            yield part
            length -= part.numel()
        begin = max(0, begin - view.numel())
