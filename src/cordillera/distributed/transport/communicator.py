"""A communicator: the ranks of a group, their connections, and the conditions for an abort.

Operations advance in a thread that waits for one, or in a thread of the communicator while no thread waits. No wait
spins.

Source: every wait ends after an abort or a deadline, and the first reason wins, as in the contract of torchcomms.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import itertools
import math
import os
import select
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch.distributed as dist
from torch import Tensor

from cordillera.distributed.tracing.rank_trace import RankTrace
from cordillera.distributed.transport.bootstrap import AddressBook
from cordillera.distributed.transport.exchanges import OperationFailed, TransportCounters
from cordillera.distributed.transport.frames import BrokenConnection, Connection, TransportFrame
from cordillera.distributed.transport.meeting import Admission, Meeting, NotHereYet, dial, listener, secret_of
from cordillera.distributed.transport.operations import TransportOperation
from cordillera.distributed.transport.peer_memory import PeerMemory
from cordillera.distributed.transport.progress import ENDED, GroupProgress, TransportError
from cordillera.distributed.transport.signatures import Signature
from cordillera.distributed.transport.tracer import OperationTracer, rank_trace, write_rank_trace
from cordillera.errors import PlanError

Path: TypeAlias = Literal["auto", "sockets"]
_LOOK_S = 1.0  # interval of checks for an abort while waiting for the store
_MOMENT_S = 0.02  # delay after which an operation that nobody waits for advances in the background
_MOST_PATIENCE_MS = 3_600_000  # longest wait for sockets at a time; `poll` refuses 2^31 ms and more
_AHEAD_BYTES = 32 << 10  # bytes received ahead at a time, where frames are small
_FAREWELL_S = 0.02  # longest wait for a rank to receive the reason of an abort


@dataclass
class _Peer:
    """State that a communicator keeps of another rank.

    Attributes:
        connection: Connection, once there is one.
        memory: Its memory, if it can be read.
        watched: Events that are waited for.
        gone: Why it is gone.
    """

    connection: Connection | None = None
    memory: PeerMemory | None = None
    watched: int = 0
    gone: str | None = None


class Communicator:
    """The ranks of a group, and what passes between them.

    Any thread may start and wait for operations; all ranks start collectives in the same order.

    Args:
        store: Store of the group, by which the ranks find each other.
        rank: Rank of this process.
        size: Number of ranks.
        timeout_s: Seconds after which an operation is given up, unless it has a limit of its own.
        name: Name for messages.
        ranks: Ranks of the members in the job; by default those of the group.
        path: How bytes pass: ``auto`` reads the memory of ranks on the same host, ``sockets`` never does.
        parent: Communicator of all ranks of the job, which knows their addresses and has a secret: the store is then
            not asked. Names of communicators must then differ.

    Raises:
        PlanError: If an argument is not acceptable.
        TransportError: If the store is gone.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        name: str = "",
        ranks: Sequence[int] = (),
        path: Path = "auto",
        parent: Communicator | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise PlanError(f"rank is {rank} of {size}", where="communicator")
        if path not in ("auto", "sockets"):
            raise PlanError(f"path is {path}", where="communicator", remedy="auto or sockets")
        self.rank, self.size, self.timeout_s, self.name = rank, size, checked_timeout(timeout_s), name
        self._sequence = itertools.count()
        # Numbers of sent messages, by rank and tag.
        self._numbers: defaultdict[tuple[int, int], itertools.count[int]] = defaultdict(itertools.count)
        self._window_numbers = itertools.count()
        self.ranks = tuple(ranks or range(size))
        self._progress = GroupProgress(rank, self, self._end, self.ranks, name=name)
        self._tracer = OperationTracer(name, self.ranks)
        self._peers: defaultdict[int, _Peer] = defaultdict(_Peer)
        self._by_file: dict[int, int] = {}  # ranks by their sockets
        self._posted: deque[TransportOperation] = deque()
        self._met: deque[Meeting] = deque()
        self._told: deque[Callable[[], None]] = deque()  # callbacks to run once no thread advances operations
        self._is_traced = False
        self._ended: list[Connection] = []  # closed connections that others may still read from
        self._dead: list[int] = []  # ranks of the job whose processes ended
        self._driver, self._lock = threading.Lock(), threading.Lock()
        self._changed, self._waiting = threading.Condition(self._lock), 0  # threads that wait for a change
        self._ahead: memoryview | None = None  # once there is a connection
        self._unattended = threading.Event()  # set when operations without a waiting thread must advance
        self._is_hurried = False  # whether a running operation must advance in the background
        self._threads: set[threading.Thread] = set()  # threads that advance operations in the background
        self._free = 0  # threads that are not running a callback
        self._poll = select.poll()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        weakref.finalize(self, _close, self._wake_read, self._wake_write).atexit = False
        self._poll.register(self._wake_read, select.POLLIN)
        self._admission: Admission | None = None
        self._book: AddressBook
        if size > 1:
            try:
                self._token = secret_of(store) if parent is None else parent._token_of(name)
                self._admission = Admission(self._token, rank, size, path == "auto", self._welcome)
                listener().admit(self._admission)  # first, as others connect once they find the address
                self._book = AddressBook(store, rank, size, self._token) if parent is None else parent._book
                self._has_own_book = parent is None
                self._places = range(size) if parent is None else [parent.ranks.index(one) for one in self.ranks]
            except (RuntimeError, OSError) as error:
                raise TransportError(f"the store of the group is gone ({error})", where=self._where) from error
        _LIVE.add(self)

    def _token_of(self, name: str) -> bytes:
        """Return the secret of a group of this one's ranks."""
        return hmac.new(self._token, name.encode(), hashlib.sha256).digest()

    def describe(self, description: str) -> None:
        """Take over the description of the group, which groups of the same kind share, for its traces."""
        self._tracer.description = description

    @property
    def _where(self) -> str:
        return f"rank {self.ranks[self.rank]}" + (f", group {self.name}" if self.name else "")

    @property
    def counters(self) -> TransportCounters:
        """Counters of the traffic so far."""
        return self._progress.exchanges.counters

    @property
    def windows(self) -> dict[int, tuple[Tensor, Signature]]:
        """Windows that the other ranks may write to, by number: the bytes, and the signature of a put.

        Only tasks of operations change it. While there is one, a thread takes what comes whenever no other does.
        """
        return self._progress.exchanges.windows

    def start(self, operation: TransportOperation, *, in_background: bool = False) -> None:
        """Begin an operation.

        Args:
            operation: The operation, which is given its place among the collectives.
            in_background: Whether it is to advance at once while nobody waits for it; otherwise it does so after a
                moment, as waking a thread takes longer than most messages.
        """
        is_driver = self._driver.acquire(blocking=False)
        try:
            if is_driver:
                self._serve_all(0)  # an operation that begins after the end of the group has not waited for anyone
            operation.posted_s = time.monotonic()
            if not operation.is_message:
                operation.sequence = next(self._sequence)
            self._posted.append(operation)
            if in_background:
                self._advance_in_background()
            elif not self._threads:
                self._start_thread()
            if is_driver:
                self._admit()
            else:
                self._wake()
        finally:
            if is_driver:
                self._release()

    def wait(self, operation: TransportOperation, timeout_s: float | None = None) -> None:
        """Wait for an operation.

        Args:
            operation: The operation.
            timeout_s: Seconds after which it is given up, if that is earlier than its own limit.

        Raises:
            TransportError: If it was given up.
        """
        limit = math.inf if timeout_s is None else time.monotonic() - operation.posted_s + timeout_s
        if limit < operation.timeout_s:
            operation.timeout_s = limit
            self._wake()
        while not operation.is_done:
            if self._driver.acquire(blocking=False):
                try:
                    self._drive(operation)
                finally:
                    self._release()
            else:
                with self._changed:
                    self._waiting += 1
                    if self.windows:  # then a thread listens even if nothing runs, and lets go for whoever waits
                        self._wake()
                    self._changed.wait_for(lambda: operation.is_done or not self._driver.locked())
                    self._waiting -= 1
        if operation.error is not None:
            raise operation.error

    def notify(self, operation: TransportOperation, told: Callable[[], None]) -> None:
        """Call ``told`` from any thread once an operation is done or aborted."""
        with self._lock:
            is_done = operation.is_done
            if not is_done:
                operation.told.append(told)
        if is_done:
            told()
        else:
            self._advance_in_background()

    def message_number(self, peer: int, tag: int) -> int:
        """Return the number of the next message of a tag to the rank ``peer``."""
        return next(self._numbers[peer, tag])

    def window_number(self) -> int:
        """Return the number of the next window, which all ranks make in the same order."""
        return next(self._window_numbers)

    def abort(self, reason: str) -> None:
        """Abort: end every wait of this rank and of the others; the first reason counts.

        Any thread may call this.
        """
        self._progress.give_up(reason)
        self._wake()
        if self._driver.acquire(blocking=False):
            try:
                self._fail()
            finally:
                self._release()

    def close_copies(self) -> None:
        """Close the sockets of a forked process, in which the group cannot be used."""
        self._progress.give_up("the process was forked")
        self._driver, self._lock = threading.Lock(), threading.Lock()
        self._changed = threading.Condition(self._lock)
        for peer in self._peers.values():
            if peer.connection is not None:
                peer.connection.socket.close()

    def _release(self) -> None:
        self._driver.release()
        if self._waiting:  # threads that start to wait later find that no thread advances operations
            with self._changed:
                self._changed.notify_all()
        if (self._is_hurried and (self._progress.running or self._posted)) or (self.windows and not self._waiting):
            self._unattended.set()
        else:
            self._is_hurried = False
        while self._told:  # run callbacks now, as they may wait for another operation
            with contextlib.suppress(IndexError):
                self._call_back(self._told.popleft())

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def _advance_in_background(self) -> None:
        self._is_hurried = True
        if not self._threads:
            self._start_thread()
        self._unattended.set()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._advance_alone, name="cordillera transport", daemon=True)
        self._threads.add(thread)
        self._free += 1
        thread.start()

    def _call_back(self, told: Callable[[], None]) -> None:
        """Call who waits for the end of an operation, and leave a thread that advances those it may wait for then."""
        if threading.current_thread() not in self._threads:
            return told()
        with self._changed:
            self._free -= 1
            if not self._free:
                self._start_thread()
        try:
            told()
        finally:
            with self._changed:
                self._free += 1

    def _advance_alone(self) -> None:
        """Advance operations while no other thread does."""
        while self._progress.reason is None:
            self._unattended.wait(_MOMENT_S)
            self._unattended.clear()
            if self._has_work() and self._driver.acquire(blocking=False):
                try:
                    self._drive(None)
                finally:
                    self._release()

    def _has_work(self) -> bool:
        return bool(self._progress.running or self._posted or self.windows)

    def _drive(self, until: TransportOperation | None) -> None:
        """Advance until an operation is done, or all are; with windows, until somebody else waits."""
        while True:
            self._admit()
            if self._told or (until.is_done if until is not None else not self._has_work()):
                return
            if until is None and self.windows and self._waiting:
                return
            self._serve_all(self._patience_ms())
            self._progress.look(time.monotonic())

    def _serve_all(self, patience_ms: int) -> None:
        """Handle what arrives within some milliseconds."""
        for number, _ in self._poll.poll(patience_ms):
            if number == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            elif (peer := self._by_file.get(number)) is not None:
                self._serve(peer)

    def _patience_ms(self) -> int:
        nearest = min((one.deadline_s for one in self._progress.running), default=time.monotonic() + 1)
        return min(_MOST_PATIENCE_MS, max(0, math.ceil((nearest - time.monotonic()) * 1000)))

    def _admit(self) -> None:
        """Take over the work that other threads queued: new connections, operations, and a reason to abort."""
        try:
            while self._met:
                self._connect(self._met.popleft())
        except Exception as error:
            self._progress.failed(error)
        while self._posted and self._progress.reason is None:
            self._progress.post(self._posted.popleft())
        if self._progress.reason is not None:
            self._fail()

    def _end(self, operation: TransportOperation) -> None:
        """Notify the caller of an operation that it is done or aborted."""
        if operation.error is None:
            self._tracer.ended(operation)
        with self._lock:
            operation.is_done = True
            self._told.extend(operation.told)
            if self._waiting:
                self._changed.notify_all()

    def _fail(self) -> None:
        """Abort all operations, and send the reason to the other ranks."""
        if self._admission is not None:
            listener().dismiss(self._admission, self._progress.reason or "", self._progress.origin)
            self._admission.proof.withdraw()  # before callers are notified, and may change memory that other ranks read
            if self._has_own_book:
                self._book.close()
            self._admission = None
        failed = [*self._progress.running, *self._posted]
        self._trace(bool(failed))
        frame, text = self._progress.farewell()
        known = [peer for peer in self._peers.values() if peer.connection is not None]
        connections = [peer.connection for peer in known if peer.connection is not None]
        while self._met:  # ranks that have just connected also receive the reason
            meeting = self._met.popleft()
            connections.append(Connection(meeting.peer, meeting.socket))
        for connection in connections:
            if failed:
                connection.end(frame, text, _FAREWELL_S)
                self._ended.append(connection)
            else:
                connection.socket.close()
        for peer in known:
            peer.connection, peer.gone = None, "is not connected any more"
        posted = list(self._posted)
        self._posted.clear()
        self._progress.end(posted)

    def _trace(self, failed: bool) -> None:
        """Write the trace of this process if operations have ``failed``, or when its last group is left."""
        with _TRACING:  # notify callers of a failure only once a trace is written
            live = [one for one in list(_LIVE) if not one._is_traced]
            if self._is_traced:
                return
            for one in live if failed else [self]:  # later failures are consequences, and would overwrite the trace
                one._is_traced = True
            if not failed:
                _LEFT.append(self._tracer)
                if len(live) > 1 or _GAVE_UP.is_set():
                    return
            traced: list[tuple[OperationTracer, list[TransportOperation]]] = [(tracer, []) for tracer in _LEFT]
            if failed:
                _GAVE_UP.set()
                traced += [(one._tracer, list(one._progress.running)) for one in live]
            write_rank_trace(traced, self.ranks[self.rank], [rank for one in live for rank in one._dead])
            if not failed:
                _LEFT.clear()  # groups that this process makes from now on are of another job

    def open(self, peer: int, operation: TransportOperation) -> bool:
        """Whether ``peer`` can be sent frames now, for an ``operation``; of two ranks, the higher one connects."""
        known = self._peers[peer]
        if known.gone is not None:
            raise OperationFailed(f"{operation.title} needs rank {self.ranks[peer]}, which {known.gone}")
        if known.connection is None and peer < self.rank:
            assert self._admission is not None
            try:
                while known.connection is None:
                    if (address := self._book.find(self._places[peer], _LOOK_S)) is not None:
                        with contextlib.suppress(NotHereYet):
                            self._connect(dial(address, self._admission, peer))
                            break
                    if self._progress.reason is not None:
                        raise OperationFailed(self._progress.reason)
                    if time.monotonic() >= operation.deadline_s:
                        raise OperationFailed(self._progress.late(operation))
            except BrokenConnection as error:
                raise OperationFailed(f"rank {self.ranks[peer]} {error}") from error
        return known.connection is not None

    def send(self, peer: int, frame: TransportFrame, *payload: memoryview) -> bool:
        """Send ``peer`` a frame with its ``payload``; return whether all that was sent has left this process."""
        known = self._peers[peer]
        if (connection := known.connection) is None:
            return False  # the connection was just lost; all operations are being ended
        try:
            connection.send(frame, *payload)
        except BrokenConnection as error:
            self._lose(known, connection, str(error))
            return False
        if connection.has_outgoing:  # otherwise `_serve` stops watching, once earlier offers know that they have left
            self._watch(known, connection)
        return not connection.has_outgoing

    def memory(self, peer: int) -> PeerMemory | None:
        """Return the memory of a rank, if both can read each other's."""
        return self._peers[peer].memory

    def _welcome(self, meeting: Meeting) -> None:
        """Take in a rank that has connected; a thread of the listener calls this."""
        self._met.append(meeting)
        self._wake()

    def _connect(self, meeting: Meeting) -> None:
        known = self._peers[meeting.peer]
        if known.connection is not None or known.gone is not None:
            meeting.socket.close()
            return
        if self._ahead is None:
            self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        known.connection, known.memory = Connection(meeting.peer, meeting.socket, self._ahead), meeting.memory
        known.watched = select.POLLIN
        self._by_file[meeting.socket.fileno()] = meeting.peer
        self._poll.register(meeting.socket, select.POLLIN)
        self._progress.exchanges.opened(meeting.peer)

    def _serve(self, peer: int) -> None:
        """Send the frames that wait for a rank, and handle those that have arrived from it."""
        known = self._peers[peer]
        if (connection := known.connection) is None:
            return
        try:
            connection.flush()
            connection.receive(self._progress)
            if known.connection is not None:
                self._watch(known, connection)
                if not connection.has_outgoing:
                    self._progress.exchanges.drained(peer)
        except BrokenConnection as error:
            self._lose(known, connection, str(error))
        except Exception as error:
            self._progress.failed(error)

    def _watch(self, known: _Peer, connection: Connection) -> None:
        """Wait for a connection to take more if something waits to be sent."""
        events = select.POLLIN | select.POLLOUT * connection.has_outgoing
        if events != known.watched:
            known.watched = events
            self._poll.modify(connection.socket, events)

    def _lose(self, known: _Peer, connection: Connection, reason: str) -> None:
        if known.connection is None:
            return
        self._poll.unregister(connection.socket)
        del self._by_file[connection.socket.fileno()]
        connection.socket.close()
        known.connection, known.gone = None, reason
        if reason == ENDED and _is_dead(known.memory):
            self._dead.append(self.ranks[connection.peer])
        self._progress.lost(connection.peer, reason)


def current_trace() -> RankTrace | None:
    """Return the current trace of this process; None if it has no working communicator."""
    live = [one for one in list(_LIVE) if one._progress.reason is None]
    if not live:
        return None
    traced = [(one._tracer, [*one._progress.running, *one._posted]) for one in live]
    return rank_trace(traced, live[0].ranks[live[0].rank])


def _is_dead(memory: PeerMemory | None) -> bool:
    """Whether a rank whose connection ended has no memory any more; taken for granted where it cannot be read."""
    if memory is None:
        return True
    try:
        memory.check()
    except OSError as error:
        return error.errno != errno.ECANCELED
    return False


def checked_timeout(seconds: float) -> float:
    """Return a timeout in ``seconds``.

    Raises:
        PlanError: If it is not above 0.
    """
    if not seconds > 0:
        raise PlanError(f"timeout is {seconds:g} s", where="communicator", remedy="a time above 0")
    return seconds


def _close(*files: int) -> None:
    for one in files:
        os.close(one)


_LIVE: weakref.WeakSet[Communicator] = weakref.WeakSet()
_LEFT: deque[OperationTracer] = deque(maxlen=16)  # tracers of groups that were closed without an error
_GAVE_UP = threading.Event()  # set once the trace of a failure is written, which later traces must not replace
_TRACING = threading.Lock()


def _leave_to_parent() -> None:
    """Close the sockets in a forked process, which would otherwise hide the end of its parent from the other ranks."""
    global _TRACING
    _TRACING = threading.Lock()
    for one in list(_LIVE):
        one.close_copies()


os.register_at_fork(after_in_child=_leave_to_parent)
