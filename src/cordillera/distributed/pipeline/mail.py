"""Messages between the stages of a pipeline: their content, order and links."""

from __future__ import annotations

import math
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cordillera.distributed.collectives import reason_of
from cordillera.distributed.ledger import Ledger, Traffic
from cordillera.errors import PeerError, PlanError
from cordillera.planning.pipeline.schedules import Kind, Schedule
from cordillera.planning.pipeline.simulator import Way

# Number of receives posted beyond the awaited one, so that messages are copied while others are computed.
_AHEAD = 8

# First tag of a pair's messages; the tags below it are those of the layouts, by stage, and of the start of a step.
_FIRST = 1 << 20
_START = _FIRST - 1
_LAYOUT = _FIRST - 2
PASSED_ON = "activations and gradients between stages"
MAIL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class Throttle:
    """Emulated slow link from one rank to another, applied on the sender's side.

    A message occupies the link for its number of bytes divided by ``bytes_per_s``, after the messages before it, and is
    delivered ``latency_s`` later.

    Attributes:
        latency_s: One-way latency in seconds.
        bytes_per_s: Capacity in bytes per second; infinity to emulate latency only.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise PlanError(f"a latency of {self.latency_s} s", where="throttle", remedy="a finite one, 0 or more")
        if not self.bytes_per_s > 0:
            raise PlanError(f"a capacity of {self.bytes_per_s} bytes/s", where="throttle", remedy="one above 0")

    def way(self, forward_bytes: float, backward_bytes: float | None = None) -> Way:
        """Return the simulator's link for messages of ``forward_bytes`` and ``backward_bytes`` (None: as many)."""
        backward = None if backward_bytes is None else backward_bytes / self.bytes_per_s
        return Way(self.latency_s, forward_bytes / self.bytes_per_s, backward)


StageLinks = Mapping[tuple[int, int], Throttle] | Callable[[int, int], Throttle | None]


class MailMessage(NamedTuple):
    """Activations (``F``) or a gradient (``B``), identified by the stage that produces them."""

    kind: Kind
    stage: int
    microbatch: int

    @property
    def to_stage(self) -> int:
        """Stage that receives the message."""
        return self.stage + 1 if self.kind is Kind.FORWARD else self.stage - 1

    @property
    def boundary(self) -> int:
        """Stage before the boundary that the message crosses."""
        return min(self.stage, self.to_stage)

    def __str__(self) -> str:
        what = "activations" if self.kind is Kind.FORWARD else "the gradient"
        return f"{what} of stage {self.stage}, microbatch {self.microbatch}"


def _messages(schedule: Schedule) -> dict[tuple[int, int], list[MailMessage]]:
    """Return the messages between each ordered pair of ranks, in the order in which they are produced."""
    found: dict[tuple[int, int], list[MailMessage]] = {}
    for rank, actions in enumerate(schedule.actions):
        for kind, stage, microbatch, _ in actions:
            if kind is Kind.WEIGHT:
                continue
            message = MailMessage(kind if kind is Kind.FORWARD else Kind.BACKWARD, stage, microbatch)
            if 0 <= message.to_stage < schedule.stages and schedule.rank_of[message.to_stage] != rank:
                found.setdefault((rank, schedule.rank_of[message.to_stage]), []).append(message)
    return found


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Layout:
        return cls(tuple(tensor.shape), tensor.dtype)

    def to_tensor(self) -> Tensor:
        padded = (*self.shape, *[0] * (MOST_DIMENSIONS - len(self.shape)))
        return torch.tensor([MAIL_DTYPES.index(self.dtype), len(self.shape), *padded])

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> _Layout:
        dtype, dimensions, *sizes = tensor.tolist()
        return cls(tuple(sizes[:dimensions]), MAIL_DTYPES[dtype])


class _Letter(NamedTuple):
    """A tensor on its way to a rank."""

    target: int
    tag: int
    tensor: Tensor
    queued: float  # seconds of time.perf_counter
    message: MailMessage


class Mail:
    """Messages that one rank sends and receives in a step.

    A Gloo send ends only when the other side has posted its receive, so each target has a thread that waits for its
    sends and keeps their tensors until then. Receives are posted in the order of the sender's messages, at the latest
    when one is awaited. As a send waits for no other send, no order of them can deadlock.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        group: dist.ProcessGroup | None,
        link: StageLinks | None,
        deadline_s: float,
        ledger: Ledger,
    ) -> None:
        self._ledger = ledger
        self._rank, self._ranks, self._group, self._deadline = rank, schedule.ranks, group, deadline_s
        self._name = schedule.name
        plan = (schedule.microbatches, schedule.rank_of, schedule.to_csv())
        self._checksum = zlib.crc32(repr(plan).encode())
        pairs = _messages(schedule)
        self._incoming = {source: messages for (source, target), messages in pairs.items() if target == rank}
        outgoing = {target: messages for (source, target), messages in pairs.items() if source == rank}
        self._number = {m: (a, i) for a, messages in self._incoming.items() for i, m in enumerate(messages)}
        self._target = {m: (b, i) for b, messages in outgoing.items() for i, m in enumerate(messages)}
        self._layouts: dict[int, _Layout] = {}
        self._throttles = {}
        for target in outgoing:
            throttle = link(rank, target) if callable(link) else (link or {}).get((rank, target))
            if throttle is not None:
                self._throttles[target] = throttle
        self._posted: dict[int, int] = {}
        self._arriving: dict[MailMessage, tuple[dist.Work | None, Tensor]] = {}
        self._rows: Sequence[int] | None = None
        self._senders: dict[int, _Sender] = {}
        self._reapers: dict[int, _Reaper] = {}

    def begin(self, rows: Sequence[int] | None) -> float:
        """Wait until every rank has arrived with the same schedule and rows, and return the time."""
        self._posted, self._rows = dict.fromkeys(self._incoming, 0), rows
        others = [other for other in range(self._ranks) if other != self._rank]
        checksum = self._checksum if rows is None else zlib.crc32(repr(tuple(rows)).encode(), self._checksum)
        mine = torch.tensor([checksum])
        theirs = {other: torch.zeros(1, dtype=torch.int64) for other in others}
        received = {other: self._receive(tensor, other, _START) for other, tensor in theirs.items()}
        sent = {other: self._send(mine, other, _START) for other in others}
        for source in self._incoming:
            self._post(source, _AHEAD)
        began = time.perf_counter()
        until = began + self._deadline
        for works, verb in ((sent, "take"), (received, "give")):
            for other, work in works.items():
                self._wait(work, other, verb, None, until)
        origin = time.perf_counter()
        self._record_wait(began)
        for other, tensor in theirs.items():
            if int(tensor) != checksum:
                what = "has another" if rows is None else "has another, or other rows of microbatches"
                raise PlanError(f"rank {other} {what}", where=f"schedule {self._name}, rank {self._rank}")
        for target in {target for target, _ in self._target.values()}:
            reaper = self._reapers[target] = _Reaper(self)
            if target in self._throttles:
                self._senders[target] = _Sender(self, self._throttles[target], reaper)
        return origin

    def send(self, message: MailMessage, tensor: Tensor, queued: float) -> None:
        """Send ``tensor`` as a message without waiting; ``queued`` is the time at which it was made, in seconds."""
        target, index = self._target[message]
        layout, agreed = _Layout.of(tensor), self._layout(message)
        self._check_rows(message, layout)
        if agreed is None:
            self._layouts[message.boundary] = layout
            header = _Letter(target, _LAYOUT - message.boundary, layout.to_tensor(), queued, message)
            self._reapers[target].put((header, self.dispatch(header)))
        elif agreed != layout:
            raise PlanError(
                f"microbatch {message.microbatch} gives {list(layout.shape)} of {layout.dtype}, "
                f"before it was {list(agreed.shape)} of {agreed.dtype}",
                where=f"stage {message.stage}",
                remedy="the same shape for every microbatch and step, or another runner",
            )
        if not tensor.numel():  # the receiver also knows that the message is empty
            return
        self._ledger.record(PASSED_ON, Traffic(1, tensor.nbytes, 1))
        letter = _Letter(target, _FIRST + index, tensor, queued, message)
        if target in self._senders:
            self._senders[target].put(letter)
        else:
            self._reapers[target].put((letter, self.dispatch(letter)))
        self._raise_failures()

    def receive(self, message: MailMessage) -> Tensor:
        """Wait for a message and return its tensor."""
        self._raise_failures()
        began = time.perf_counter()
        source, index = self._number[message]
        self._post(source, index + _AHEAD, index)
        work, tensor = self._arriving.pop(message)
        if work is not None:
            self._wait(work, source, "give", message)
        self._record_wait(began)
        return tensor

    def finish(self) -> None:
        """Wait until the other ranks have received all messages."""
        began = time.perf_counter()
        for target, sender in self._senders.items():
            self._join(sender, target, self._deadline + sender.seconds_left())
        for target, reaper in self._reapers.items():
            self._join(reaper, target, self._deadline)
        self._record_wait(began)

    def abandon(self) -> None:
        """Stop all workers and drop unfinished messages."""
        for worker in self._workers():
            worker.stop()
        self._senders, self._reapers, self._arriving = {}, {}, {}

    def _record_wait(self, began: float) -> None:
        if self._ranks > 1:
            seconds = time.perf_counter() - began
            self._ledger.record(PASSED_ON, Traffic(seconds=seconds, exposed_seconds=seconds))

    def dispatch(self, letter: _Letter) -> dist.Work:
        """Start to send a letter."""
        return self._send(letter.tensor, letter.target, letter.tag, letter.message)

    def reap(self, letter: _Letter, work: dist.Work) -> None:
        """Wait until ``work`` has sent the letter."""
        self._wait(work, letter.target, "take", letter.message)

    def _post(self, source: int, end: int, needed: int = -1) -> None:
        """Post receives up to message ``end``; past message ``needed``, only those whose layouts are known."""
        messages = self._incoming[source]
        for index in range(self._posted[source], min(end + 1, len(messages))):
            message = messages[index]
            layout = self._layout(message)
            if layout is None and index <= needed:
                layout = self._ask_for_layout(message, source)
            if layout is None:
                return
            tensor = torch.empty(layout.shape, dtype=layout.dtype)
            work = self._receive(tensor, source, _FIRST + index, message) if tensor.numel() else None
            self._arriving[message] = work, tensor
            self._posted[source] = index + 1

    def _layout(self, message: MailMessage) -> _Layout | None:
        """Return the layout agreed for a message's boundary, with its microbatch's rows; None before the agreement."""
        agreed = self._layouts.get(message.boundary)
        if agreed is None or self._rows is None:
            return agreed
        return agreed._replace(shape=(self._rows[message.microbatch], *agreed.shape[1:]))

    def _check_rows(self, message: MailMessage, layout: _Layout) -> None:
        if self._rows is not None and layout.shape[:1] != (self._rows[message.microbatch],):
            raise PlanError(
                f"microbatch {message.microbatch} gives {list(layout.shape)}, "
                f"its rows were to be {self._rows[message.microbatch]}",
                where=f"stage {message.stage}",
                remedy="as many rows as step() is told",
            )

    def _ask_for_layout(self, message: MailMessage, source: int) -> _Layout | None:
        header = torch.zeros(2 + MOST_DIMENSIONS, dtype=torch.int64)
        work = self._receive(header, source, _LAYOUT - message.boundary, message)
        self._wait(work, source, "give", message)
        self._layouts[message.boundary] = _Layout.from_tensor(header)
        return self._layout(message)

    def _send(self, tensor: Tensor, target: int, tag: int, message: MailMessage | None = None) -> dist.Work:
        try:
            work = dist.isend(tensor, group=self._group, tag=tag, group_dst=target)
        except RuntimeError as error:
            raise self._broken(target, "take", message) from error
        assert work is not None
        return work

    def _receive(self, tensor: Tensor, source: int, tag: int, message: MailMessage | None = None) -> dist.Work:
        try:
            work = dist.irecv(tensor, group=self._group, tag=tag, group_src=source)
        except RuntimeError as error:
            raise self._broken(source, "give", message) from error
        assert work is not None
        return work

    def _wait(
        self, work: dist.Work, peer: int, verb: str, message: MailMessage | None, until: float | None = None
    ) -> None:
        start = time.perf_counter()
        seconds = self._deadline if until is None else max(until - start, 0.001)
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if time.perf_counter() - start >= seconds:
                raise self._late(peer, verb, message) from error
            raise self._broken(peer, verb, message) from error

    def _join(self, worker: _Worker, target: int, seconds: float) -> None:
        unfinished = worker.close(seconds)
        self._raise_failures()
        if unfinished is not None:
            raise self._late(target, "take", unfinished)

    def _workers(self) -> list[_Worker]:
        return [*self._senders.values(), *self._reapers.values()]

    def _raise_failures(self) -> None:
        for worker in self._workers():
            if worker.failure is not None:
                raise worker.failure

    def _late(self, peer: int, verb: str, message: MailMessage | None) -> PeerError:
        what = f"did not {verb} {message}" if message else "did not come to the start of the step"
        return self._error(
            f"rank {peer} {what} within {self._deadline:g} s",
            peer,
            message,
            f"see what rank {peer} does; a larger deadline_s if it is only slow",
        )

    def _broken(self, peer: int, verb: str, message: MailMessage | None) -> PeerError:
        """Return the error for the exception that is being handled."""
        what = f"{reason_of(sys.exception(), f'rank {peer}')}, when rank {peer} was to "
        what += f"{verb} {message}" if message else "come to the start of the step"
        return self._error(what, peer, message, f"see what rank {peer} says")

    def _error(self, what: str, peer: int, message: MailMessage | None, remedy: str) -> PeerError:
        where = f"pipeline rank {self._rank}, schedule {self._name}"
        stage, microbatch = (message.stage, message.microbatch) if message else (None, None)
        return PeerError(what, peer=peer, stage=stage, microbatch=microbatch, where=where, remedy=remedy)


_Item = TypeVar("_Item")


class _Worker(Generic[_Item]):
    """Thread that handles items in order; it ends at the first error and keeps it."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._stopped = threading.Event()
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        self._current: _Item | None = None
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        self._items.put(item)

    def close(self, seconds: float) -> MailMessage | None:
        """Wait until all items are handled; return the message of the current item if that exceeds ``seconds``."""
        self._items.put(None)
        self._thread.join(seconds)
        item = self._current if self._thread.is_alive() else None
        return None if item is None else self._message(item)

    def stop(self) -> None:
        """Handle no more items. The current one may still be in progress, but nothing waits for it."""
        self._stopped.set()
        self._items.put(None)

    def _run(self) -> None:
        while not self._stopped.is_set():
            item = self._current = self._items.get()
            if item is None:
                return
            try:
                self._do(item)
            except Exception as error:
                self.failure = error
                return
            self._current = item = None  # otherwise the tensor lives until the next item

    def _do(self, item: _Item) -> None:
        raise NotImplementedError

    def _message(self, item: _Item) -> MailMessage:
        raise NotImplementedError


class _Reaper(_Worker[tuple[_Letter, "dist.Work"]]):
    """Worker that keeps tensors sent to a rank until they have arrived."""

    def __init__(self, mail: Mail) -> None:
        self._mail = mail
        super().__init__()

    def _do(self, item: tuple[_Letter, dist.Work]) -> None:
        self._mail.reap(*item)

    def _message(self, item: tuple[_Letter, dist.Work]) -> MailMessage:
        return item[0].message


class _Sender(_Worker[_Letter]):
    """Worker that delivers messages to a rank with the delay of a slow link."""

    def __init__(self, mail: Mail, throttle: Throttle, reaper: _Reaper) -> None:
        self._mail, self._throttle, self._reaper = mail, throttle, reaper
        self._free = -math.inf  # time.perf_counter() at which the link is free
        self._occupied = 0.0  # seconds that the messages put so far occupy the link
        super().__init__()

    def put(self, item: _Letter) -> None:
        self._occupied += item.tensor.nbytes / self._throttle.bytes_per_s
        super().put(item)

    def seconds_left(self) -> float:
        """Return an upper bound of the remaining delay in seconds."""
        return self._occupied + self._throttle.latency_s

    def _do(self, item: _Letter) -> None:
        begin = max(item.queued, self._free)
        self._free = begin + item.tensor.nbytes / self._throttle.bytes_per_s
        if self._stopped.wait(max(0.0, self._free + self._throttle.latency_s - time.perf_counter())):
            return
        self._reaper.put((item, self._mail.dispatch(item)))

    def _message(self, item: _Letter) -> MailMessage:
        return item.message
