"""Trace of the past and pending operations of a communicator, for ``cordillera blame``.

If the environment variable :data:`TRACES` names a folder, every rank writes its trace there when an operation is given
up. Source: NCCLX (arXiv 2510.20171), which records current and past collectives of each communicator and the progress
of each peer.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from cordillera.distributed.tracing.rank_trace import ANY_RANK, Collective, PeerProgress, RankTrace, TracedCommunicator
from cordillera.distributed.transport.operations import Offer, PeerTask, Take, TransportOperation
from cordillera.distributed.transport.signatures import PUT, Signature, dtype_of
from cordillera.errors import CordilleraError

TRACES = "CORDILLERA_TRACES"
"""Environment variable with the folder of traces. Use one folder per job: older traces would be mixed in."""

_KEPT = 256  # finished operations that are kept per communicator
_SAME_SIZE = ("all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter")  # bytes are equal on all ranks


class _Past(NamedTuple):
    """Record of a finished operation, without its tensors."""

    name: str
    signature: Signature
    bytes: int
    timeout_s: float
    sequence: int
    posted_s: float
    message: tuple[int, int, bool] | None  # the other rank, the number among those of the tag, whether it is sent
    ended_s: float | None


class OperationTracer:
    """Operations of a communicator.

    Args:
        name: Name of the communicator.
        ranks: Its members as ranks of the job.

    Attributes:
        description: What communicators of the same kind share, such as ``data``; the name by default.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name, self.ranks, self.description = name, ranks, name
        self._past: deque[_Past] = deque(maxlen=_KEPT)
        self._count = 0

    def ended(self, operation: TransportOperation) -> None:
        """Remember an operation that is done, unless no other rank called for it."""
        if operation.signature.collective == PUT:
            return
        self._past.append(_past(operation, time.monotonic()))
        self._count += 1

    def trace(
        self, running: Iterable[TransportOperation], offset_ns: int
    ) -> tuple[TracedCommunicator, list[Collective], bool]:
        """Return the communicator, its operations, and whether older ones are missing.

        Args:
            running: Operations that are not done.
            offset_ns: What is added to the monotonic clock; one for all communicators of a trace, as a rank's own
                time is from the end of an operation of one to the call of the next, maybe of another.
        """
        records = [self._record(one, offset_ns, ()) for one in list(self._past)]
        records += [
            self._record(_past(one, None), offset_ns, self._progress(one))
            for one in running
            if one.signature.collective != PUT
        ]
        return TracedCommunicator(self.name, self.description, self.ranks), records, self._count > _KEPT

    def _record(self, one: _Past, offset_ns: int, peers: tuple[PeerProgress, ...]) -> Collective:
        dtypes = (dtype_of(one.signature),)
        sizes = ((one.bytes // getattr(torch, dtypes[0]).itemsize,),) if one.name in _SAME_SIZE else ()
        sequence = abs(one.sequence)  # tags of signals are negative, numbers in traces may not be
        peer, channel, op = None, None, one.name
        if one.message is not None:
            other, number, gives = one.message
            peer, channel, op = self.ranks[other], (sequence << 32) + number, "send" if gives else "recv"
            if other == ANY_RANK:
                peer, channel = ANY_RANK, None
        begun = offset_ns + int(one.posted_s * 1e9)
        return Collective(
            self.name,
            sequence + 1,
            op,
            input_sizes=sizes,
            output_sizes=sizes,
            input_dtypes=dtypes,
            output_dtypes=dtypes,
            state="started" if one.ended_s is None else "completed",
            enqueued_ns=begun,
            started_ns=begun,
            ended_ns=None if one.ended_s is None else offset_ns + int(one.ended_s * 1e9),
            peer=peer,
            channel=channel,
            timeout_ms=int(one.timeout_s * 1e3),
            peers=peers,
            backend="cordillera",
        )

    def _progress(self, operation: TransportOperation) -> tuple[PeerProgress, ...]:
        counts: dict[int, list[int]] = {}
        for task in operation.tasks:
            if isinstance(task, PeerTask):
                count = counts.setdefault(task.peer, [0, 0, 0])
                is_given = isinstance(task, Offer) and task.is_done  # a transfer begins when its receiver takes it
                count[0] += is_given
                count[1] += is_given
                count[2] += isinstance(task, Take) and task.is_done
        return tuple(PeerProgress(self.ranks[peer], *count) for peer, count in counts.items())


def _past(operation: TransportOperation, ended_s: float | None) -> _Past:
    message = None
    if operation.is_message:
        task = operation.tasks[0]
        assert isinstance(task, PeerTask)
        message = task.peer, task.index, isinstance(task, Offer)
    return _Past(
        operation.name, operation.signature, operation.bytes, operation.timeout_s, operation.sequence,
        operation.posted_s, message, ended_s,
    )  # fmt: skip


def rank_trace(traced: Iterable[tuple[OperationTracer, Iterable[TransportOperation]]], rank: int) -> RankTrace:
    """Return the trace of this process.

    Args:
        traced: Communicators with the operations that are not done.
        rank: Rank of this process in the job.
    """
    offset_ns = time.time_ns() - time.monotonic_ns()  # a pause between the two calls shifts all times equally
    found = [tracer.trace(running, offset_ns) for tracer, running in traced]
    records = sorted((one for _, ones, _ in found for one in ones), key=lambda one: one.enqueued_ns)
    communicators = tuple(communicator for communicator, _, _ in found)
    dropped = any(is_dropped for _, _, is_dropped in found)
    return RankTrace(rank, offset_ns + time.monotonic_ns(), communicators, tuple(records), dropped=dropped)


def write_rank_trace(
    traced: Iterable[tuple[OperationTracer, Iterable[TransportOperation]]], rank: int, died: Iterable[int] = ()
) -> Path | None:
    """Write the trace of this process into the folder that :data:`TRACES` names.

    Args:
        traced: Communicators with the operations that are not done.
        rank: Rank of this process in the job.
        died: Ranks whose processes ended; each gets a trace that says so, unless it has written one.

    Returns:
        The file; None if there is no such variable, or the file could not be written, which is said on stderr.
    """
    from cordillera.distributed.tracing.flight_recorder import write_trace  # loaded only to write a trace

    folder = os.environ.get(TRACES)
    if not folder:
        return None
    try:
        for other in died:
            if not Path(folder, f"trace_{other}").exists():
                write_trace(RankTrace(other, time.time_ns(), status="died"), Path(folder))
        return write_trace(rank_trace(traced, rank), Path(folder))
    except CordilleraError as error:
        print(f"warning: {error}", file=sys.stderr)
        return None
