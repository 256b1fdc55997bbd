"""Groups of thousands of ranks in one thread: the state machines of the transport on a switch with a clock of its own.

Bytes really pass, and what ranks compute is real; time is emulated. Every rank has a link to one switch and one from
it. A rank sends to the others in turn, a packet at a time, and the switch forwards what comes in the order in which it
comes, so that packets queue where several ranks send to one. Ranks end, stop and lose frames when they are told to.

Source: NCCLX (arXiv 2510.20171) exercises the control logic of 96,000 ranks without their GPUs, and judges its
transport by the queues in switches.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

from torch import Tensor

from cordillera.distributed.transport.exchanges import FragmentLimits, OperationFailed
from cordillera.distributed.transport.frames import HEADER_BYTES, BrokenConnection, TransportFrame
from cordillera.distributed.transport.operations import (
    ReduceFunction,
    TransportOperation,
    as_bytes,
    programs,
    tasks_of,
)
from cordillera.distributed.transport.progress import ENDED, GroupProgress
from cordillera.distributed.transport.signatures import signed
from cordillera.errors import PlanError
from cordillera.planning.network.collective_plans import CollectivePlan

Fate: TypeAlias = Literal["ends", "stops", "loses"]


@dataclass(frozen=True)
class EmulatedSwitch:
    """Links between ranks and their switch.

    Attributes:
        latency_s: Seconds from one rank to another, without what waits or is sent before.
        bytes_per_s: Rate of each link in each direction.
        packet_bytes: Most bytes that are sent to one rank before it is another one's turn.
        frame_s: Seconds that a rank needs for a frame that has come.

    Raises:
        PlanError: If a value is not acceptable.
    """

    latency_s: float = 5e-6
    bytes_per_s: float = 50e9
    packet_bytes: int = 16 << 10
    frame_s: float = 1e-6

    def __post_init__(self) -> None:
        for name, least in (("latency_s", 0), ("bytes_per_s", 1), ("packet_bytes", 1), ("frame_s", 0)):
            if not least <= (value := getattr(self, name)) < math.inf:
                raise PlanError(f"{name} is {value:g}", where="switch", remedy=f"a finite number, at least {least}")


@dataclass(frozen=True)
class EmulatedFault:
    """What happens to a rank.

    Attributes:
        rank: The rank.
        at_s: When, in seconds.
        fate: ``ends``: its process is gone, which those that it is connected with see; ``stops``: it does nothing any
            more, which nobody sees; ``loses``: the next frame that is sent to it is lost.
    """

    rank: int
    at_s: float
    fate: Fate


@dataclass(eq=False)
class _Sent:
    """A frame on its way.

    Attributes:
        frame: Its header.
        payload: Its bytes.
        left: Bytes that have not been sent, with the header.
    """

    frame: TransportFrame
    payload: tuple[memoryview, ...]
    left: int


@dataclass(eq=False)
class _Endpoint:
    """State of a rank in the switch and the clock.

    Attributes:
        queues: Frames to send, by rank.
        turns: Ranks to which something waits to be sent.
        is_sending: Whether a packet is being sent.
        port_free_s: When the switch has sent all that waits for it.
        free_s: When it has looked at all frames that have come.
        known: Ranks with which it has exchanged something.
        is_silent: Whether it does nothing any more.
        is_gone: Whether its process is gone.
        losses: Frames that are to be lost.
    """

    queues: defaultdict[int, deque[_Sent]] = field(default_factory=lambda: defaultdict(deque))
    turns: deque[int] = field(default_factory=deque)
    is_sending: bool = False
    port_free_s: float = 0.0
    free_s: float = 0.0
    known: set[int] = field(default_factory=set)
    is_silent: bool = False
    is_gone: bool = False
    losses: int = 0


class EmulatedGroup:
    """A group of ranks on an emulated switch.

    Args:
        ranks: Number of ranks.
        switch: The switch and its links.
        limits: How many fragments may be on their way to a rank.
        faults: Faults of ranks.

    Attributes:
        now_s: The clock, in seconds.
        progress: State machine of each rank.
        ended_s: When each rank was done with its last operation, or gave it up; NaN before.
        peak_queue_bytes: Most bytes that waited in the switch for one rank.

    Raises:
        PlanError: If there is no rank, or a fault is of none.
    """

    def __init__(
        self,
        ranks: int,
        switch: EmulatedSwitch | None = None,
        *,
        limits: FragmentLimits | None = None,
        faults: Sequence[EmulatedFault] = (),
    ) -> None:
        if ranks < 1:
            raise PlanError(f"{ranks} ranks", where="emulated group", remedy="one or more")
        self.now_s, self.peak_queue_bytes, self.ended_s = 0.0, 0.0, [math.nan] * ranks
        self._switch = switch or EmulatedSwitch()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self._sequences = itertools.count(), [itertools.count() for _ in range(ranks)]
        self._ranks = [_Endpoint() for _ in range(ranks)]
        self._running = 0  # operations of ranks that are not silent
        self.progress = [
            GroupProgress(rank, _EmulatedWire(self, rank), partial(self._done, rank), range(ranks), limits=limits)
            for rank in range(ranks)
        ]
        for fault in faults:
            if not 0 <= fault.rank < ranks or not 0 <= fault.at_s < math.inf:
                raise PlanError(f"{fault} is of no rank, or at no time", where="emulated group")
            self._after(fault.at_s, partial(self._strike, fault))

    def post(self, rank: int, operation: TransportOperation) -> None:
        """Begin an operation at a rank.

        Args:
            rank: The rank.
            operation: The operation; its timeout is on the clock of the group.
        """
        operation.posted_s = self.now_s
        if not operation.is_message:
            operation.sequence = next(self._sequences[rank])
        self._running += not self._ranks[rank].is_silent
        self.progress[rank].post(operation)
        self._after(operation.timeout_s, partial(self._look, rank))
        self._settle(rank)

    def start(
        self,
        plan: CollectivePlan,
        memory: Sequence[Sequence[Tensor]],
        reduce: ReduceFunction | None = None,
        *,
        timeout_s: float = 300.0,
    ) -> None:
        """Begin a plan at all ranks.

        Args:
            plan: A verified plan for as many ranks.
            memory: By rank and chunk, where the chunk lies: tensors of one type, of which those of one chunk have one
                size. What a rank does not hold at the start may have any value.
            reduce: Function that reduces two values to one, if the plan reduces.
            timeout_s: Seconds, on the clock of the group, after which it is given up.

        Raises:
            PlanError: If the plan is for another number of ranks.
        """
        if plan.ranks != len(self._ranks):
            raise PlanError(f"it is not over {len(self._ranks)} ranks", where=plan.name)
        name, steps = plan.collective.replace("-", "_"), programs(plan)
        for rank, chunks in enumerate(memory):
            dtype = chunks[0].dtype
            tasks = tasks_of(steps[rank], [as_bytes(one) for one in chunks], dtype, reduce)
            operation = TransportOperation(name, signed(name, dtype), tasks, timeout_s=timeout_s)
            self.post(rank, operation)

    def run(self) -> None:
        """Run events until every rank that can finish has finished or aborted."""
        while self._running and self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()

    def _done(self, rank: int, operation: TransportOperation) -> None:
        self._running -= not self._ranks[rank].is_silent
        self.ended_s[rank] = self.now_s

    def _look(self, rank: int) -> None:
        if not self._ranks[rank].is_silent:
            self.progress[rank].look(self.now_s)
            self._settle(rank)

    def _settle(self, rank: int) -> None:
        """Abort a rank: send its reason to the others, and end its operations."""
        progress, known = self.progress[rank], self._ranks[rank]
        if progress.reason is not None and not known.is_gone:
            known.is_gone = True
            for peer in known.known:
                self.send(rank, peer, *progress.farewell())
            progress.end()

    def _strike(self, fault: EmulatedFault) -> None:
        struck = self._ranks[fault.rank]
        if fault.fate == "loses":
            struck.losses += 1
        elif not struck.is_silent:
            self._running -= len(self.progress[fault.rank].running)
            struck.is_silent = True
            if fault.fate == "ends":
                struck.is_gone = True
                struck.turns.clear()
                for peer in struck.known:
                    self._after(self._switch.latency_s, partial(self._lose, peer, fault.rank))

    def _lose(self, rank: int, peer: int) -> None:
        if not self._ranks[rank].is_silent:
            self.progress[rank].lost(peer, ENDED)
            self._settle(rank)

    def _arrive(self, rank: int, source: int, sent: _Sent) -> None:
        """Deliver a frame to a rank."""
        known, progress = self._ranks[rank], self.progress[rank]
        if known.losses:
            known.losses -= 1
            return
        if known.is_silent or known.is_gone:
            return
        try:
            place, begin = progress.place(source, sent.frame), 0
            for part in sent.payload:
                place[begin : begin + part.nbytes] = part.cast("B")
                begin += part.nbytes
            progress.arrived(source, sent.frame, place)
        except BrokenConnection as error:
            progress.lost(source, str(error))
        except Exception as error:
            progress.failed(error)
        self._settle(rank)

    def reach(self, rank: int, peer: int) -> None:
        """Connect a rank with another one.

        Args:
            rank: The rank.
            peer: The other one.

        Raises:
            OperationFailed: If the other one is gone.
        """
        other = self.progress[peer]
        if other.reason is not None:
            raise OperationFailed(other.reason, other.origin)
        if self._ranks[peer].is_gone:
            raise OperationFailed(f"rank {peer} could not be reached")
        self._ranks[rank].known.add(peer)
        self._ranks[peer].known.add(rank)

    def send(self, rank: int, peer: int, frame: TransportFrame, *payload: memoryview) -> None:
        """Queue a frame from a rank to another one.

        Args:
            rank: Who sends.
            peer: To whom.
            frame: The frame.
            payload: Its bytes.
        """
        known = self._ranks[rank]
        queue = known.queues[peer]
        if not queue:
            known.turns.append(peer)
        queue.append(_Sent(frame, payload, HEADER_BYTES + frame.length))
        if not known.is_sending:
            self._send_packet(rank)

    def _send_packet(self, rank: int) -> None:
        """Send a packet to the next rank whose turn it is."""
        known, switch = self._ranks[rank], self._switch
        known.is_sending = bool(known.turns)
        if not known.turns:
            return
        peer = known.turns.popleft()
        queue = known.queues[peer]
        sent, size = queue[0], min(queue[0].left, switch.packet_bytes)
        sent.left -= size
        if not sent.left:
            queue.popleft()
        if queue:
            known.turns.append(peer)
        seconds = size / switch.bytes_per_s
        self._after(seconds, partial(self._send_packet, rank))
        self._after(
            seconds + switch.latency_s / 2, partial(self._forward, rank, peer, size, None if sent.left else sent)
        )

    def _forward(self, source: int, rank: int, size: int, ended: _Sent | None) -> None:
        """Put a packet that has come to the switch behind what waits there for a rank."""
        known, switch = self._ranks[rank], self._switch
        waits_s = max(known.port_free_s - self.now_s, 0.0) + size / switch.bytes_per_s
        self.peak_queue_bytes = max(self.peak_queue_bytes, waits_s * switch.bytes_per_s)
        known.port_free_s = self.now_s + waits_s
        if ended is not None:
            known.free_s = max(known.free_s, known.port_free_s + switch.latency_s / 2) + switch.frame_s
            self._after(known.free_s - self.now_s, partial(self._arrive, rank, source, ended))

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), event))


class _EmulatedWire:
    """What carries the frames of a rank (:class:`~cordillera.distributed.transport.exchanges.Wire`)."""

    def __init__(self, group: EmulatedGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def open(self, peer: int, operation: TransportOperation) -> bool:
        self._group.reach(self._rank, peer)
        return True

    def send(self, peer: int, frame: TransportFrame, *payload: memoryview) -> bool:
        self._group.send(self._rank, peer, frame, *payload)
        return True

    def memory(self, peer: int) -> None:
        return None
