"""What one rank recorded of its collectives: the trace that a tracer fills and that :func:`blame` compares.

Times are nanoseconds of the rank's own clock. Clocks of different ranks need not agree.

Source: NCCLX (arXiv 2510.20171), which records collectives of each communicator and the progress of each peer; the
fields follow torch's Flight Recorder where it has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

CollectiveState: TypeAlias = Literal["scheduled", "started", "completed", "ended"]
"""``ended``: it is over, and whether it completed or failed was not recorded (Gloo in torch 2.13)."""

RankStatus: TypeAlias = Literal["running", "unresponsive", "died"]

ANY_RANK = -1
"""The other side of a message that any rank may send, until one has come."""


@dataclass(frozen=True, slots=True)
class TracedCommunicator:
    """Group of ranks that communicate with each other.

    Attributes:
        name: Name that is unique among the communicators of a rank.
        description: Purpose, such as ``tp``; communicators of one description are expected to do the same operations.
        ranks: Members as global ranks, in the order of their ranks in the group; empty if the trace does not name them.
    """

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """Messages of one collective that a rank exchanged with one peer.

    A message that waits for another one, as in a ring, is not posted yet. A tracer that knows only whether a message
    was put and whether one arrived writes ones and zeros.

    Attributes:
        peer: Global rank of the peer.
        posted: Number of messages to the peer that the rank handed to the network.
        finished: Number of these that the network took completely.
        notified: Number of messages from the peer whose arrival was notified.
        put_ns: Nanoseconds that the finished messages to the peer took, together; 0 if unknown.
    """

    peer: int
    posted: int
    finished: int
    notified: int
    put_ns: int = 0


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective or point-to-point operation as one rank saw it.

    Attributes:
        communicator: Name of the communicator.
        sequence: Number of the operation in its communicator; those of point-to-point operations are counted apart.
        op: Operation, such as ``all_reduce``, ``broadcast``, ``send``.
        input_sizes: Shapes of the input tensors.
        output_sizes: Shapes of the output tensors.
        input_dtypes: Number formats of the input tensors.
        output_dtypes: Number formats of the output tensors.
        state: Progress of the operation.
        enqueued_ns: Time of the call.
        started_ns: Time of the beginning; None if it was not recorded.
        ended_ns: Time of the end; None before it, or if it was not recorded.
        peer: Global rank of the other side of a point-to-point operation, :data:`ANY_RANK` if any rank may send it;
            None for a collective.
        channel: Number of the message among all of its sender to its receiver, from 0 on; None if unknown.
        root: Global rank of the root of a broadcast, reduce, gather or scatter; None if there is none, or if unknown.
        input_splits: Numbers of elements that an all-to-all sends to each member; empty if equal or unknown.
        output_splits: Numbers of elements that an all-to-all receives from each member; empty if equal or unknown.
        work: Amount of work that the rank did since its previous operation, such as FLOPs; None if unknown.
        timeout_ms: Milliseconds after which the operation counts as failed; None if unknown.
        peers: Progress of the messages of the operation; empty if it was not recorded.
        backend: Library that communicates, such as ``gloo`` or ``nccl``.
    """

    communicator: str
    sequence: int
    op: str
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    state: CollectiveState = "scheduled"
    enqueued_ns: int = 0
    started_ns: int | None = None
    ended_ns: int | None = None
    peer: int | None = None
    channel: int | None = None
    root: int | None = None
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    work: float | None = None
    timeout_ms: int | None = None
    peers: tuple[PeerProgress, ...] = ()
    backend: str = "gloo"


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Trace of one rank at one moment.

    Attributes:
        rank: Global rank.
        written_ns: Time at which the trace was written; None if unknown.
        communicators: Communicators that the rank has made.
        collectives: Its newest operations in the order of their calls.
        status: ``died`` if its process ended, ``unresponsive`` if it did not answer when asked for its trace. The
            lists of such a rank may be empty.
        error: Error that the rank met by itself, such as one of CUDA; empty for none. A wait that timed out is none.
        inside: Whether the program waited in an operation when the trace was written; None if unknown.
        dropped: Whether older operations are missing, because the buffer was full.
        estimated: Whether ``written_ns`` is the time of a file and not one that the rank recorded.
    """

    rank: int
    written_ns: int | None = None
    communicators: tuple[TracedCommunicator, ...] = ()
    collectives: tuple[Collective, ...] = ()
    status: RankStatus = "running"
    error: str = ""
    inside: bool | None = None
    dropped: bool = False
    estimated: bool = False
