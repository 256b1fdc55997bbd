"""Operations of a group at one rank: which of them run, and why they were given up, without sockets, clocks or threads.

Source: NCCLX (arXiv 2510.20171) and the contract of torchcomms: every wait ends after an abort or a deadline, and the
first reason wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cordillera.distributed.tracing.rank_trace import ANY_RANK
from cordillera.distributed.transport.exchanges import Exchanges, FragmentLimits, OperationFailed, Wire
from cordillera.distributed.transport.frames import FrameKind, TransportFrame
from cordillera.distributed.transport.operations import PeerTask, TransportOperation
from cordillera.distributed.transport.signatures import Signature
from cordillera.errors import PeerError

ENDED = "ended its connection"
"""Why a rank is gone that has left, or whose process has ended."""

_MOST_BYTES = 2000  # longest reason


class TransportError(PeerError, RuntimeError):
    """An operation was given up: a rank ended or disagreed, a deadline passed, or someone aborted.

    Its outputs are then undefined. torch.distributed expects a RuntimeError.

    Args:
        what: One sentence with the first reason.
        where: Rank and communicator.
    """

    def __init__(self, what: str, *, where: str | None = None) -> None:
        super().__init__(what, peer=None, where=where, remedy="see what that rank says, and begin a new process group")


class GroupProgress:
    """Operations of a group at one rank.

    Args:
        rank: This rank.
        wire: What carries frames to the others.
        ended: Called with each operation that is done or was given up.
        ranks: Ranks of the members in the job.
        name: Name of the group for messages.
        limits: How many fragments may be on their way.

    Attributes:
        exchanges: What passes for the operations.
        running: Operations that have begun and are not done.
        reason: Why all operations are given up, once they are; the first reason counts.
        origin: Rank that gave up first.
    """

    def __init__(
        self,
        rank: int,
        wire: Wire,
        ended: Callable[[TransportOperation], None],
        ranks: Sequence[int],
        *,
        name: str = "",
        limits: FragmentLimits | None = None,
    ) -> None:
        self.rank, self.ranks, self.name = rank, ranks, name
        self.exchanges = Exchanges(rank, wire, self._done, ranks, limits)
        self.running: dict[TransportOperation, None] = {}
        self.reason: str | None = None
        self.origin = rank
        self._ended = ended

    def post(self, operation: TransportOperation) -> None:
        """Begin an operation."""
        self.running[operation] = None
        try:
            self.exchanges.post(operation)
        except Exception as error:
            self.failed(error)

    def place(self, peer: int, frame: TransportFrame) -> memoryview:
        """Return where the bytes that follow a ``frame`` of ``peer`` belong.

        Raises:
            BrokenConnection: If the frame is not acceptable.
        """
        return self.exchanges.place(peer, frame)

    def arrived(self, peer: int, frame: TransportFrame, data: memoryview) -> None:
        """Take a frame of ``peer`` whose bytes, ``data``, have come.

        Raises:
            BrokenConnection: If the frame is not acceptable.
            OperationFailed: If the ranks do not agree.
        """
        if frame.kind != FrameKind.ABORT:
            self.exchanges.arrived(peer, frame, data)
        else:
            origin = frame.sequence if 0 <= frame.sequence < len(self.ranks) else peer
            self.give_up(bytes(data).decode(errors="replace"), origin)

    def lost(self, peer: int, reason: str) -> None:
        """Record the loss of the connection to ``peer``; ``reason`` is :data:`ENDED` or a fault of the connection."""
        if self.exchanges.lost(peer) or reason != ENDED:
            self.give_up(f"rank {self.ranks[peer]} {reason}")

    def look(self, now_s: float) -> None:
        """Abort if an operation has timed out; ``now_s`` is on the clock of ``posted_s``."""
        for one in self.running:
            if now_s >= one.deadline_s:
                self.give_up(self.late(one))
                return

    def late(self, operation: TransportOperation) -> str:
        """Return a message on an operation that timed out, with the ranks that it waits for."""
        peers = {task.peer for task in operation.tasks if isinstance(task, PeerTask) and not task.is_done}
        whom = "rank " + ", ".join(str(self.ranks[peer]) for peer in sorted(peers)) if peers else "nobody"
        if peers == {ANY_RANK}:
            whom = "any rank"
        return f"{operation.title} took longer than its timeout of {operation.timeout_s:g} s; awaited: {whom}"

    def failed(self, error: Exception) -> None:
        """Abort the group with an error, and report the error if it is local to this rank."""
        if isinstance(error, OperationFailed):
            self.give_up(str(error), error.origin)
        else:
            self.give_up(f"{type(error).__name__}: {error}")

    def give_up(self, reason: str, origin: int | None = None) -> None:
        """Abort all operations for a ``reason`` of the rank ``origin``, unless a reason is already set."""
        if self.reason is None:
            self.reason, self.exchanges.stops = reason, True
            self.origin = self.rank if origin is None else origin

    def farewell(self) -> tuple[TransportFrame, memoryview]:
        """Return the frame that tells other ranks the reason, and its bytes."""
        text = (self.reason or "").encode()[:_MOST_BYTES]
        return TransportFrame(FrameKind.ABORT, Signature(0, 0, 0), self.origin, 0, 0, len(text)), memoryview(text)

    def end(self, posted: Iterable[TransportOperation] = ()) -> None:
        """End all operations with the reason, among them those that were ``posted`` and have not begun."""
        said = self.reason or ""
        if self.origin != self.rank:
            said = f"rank {self.ranks[self.origin]} gave up: {said}"
        where = f"rank {self.ranks[self.rank]}" + (f", group {self.name}" if self.name else "")
        for operation in [*self.running, *posted]:
            operation.error = TransportError(said, where=where)
            self._done(operation)
        self.exchanges.clear()

    def _done(self, operation: TransportOperation) -> None:
        self.running.pop(operation, None)
        self._ended(operation)
