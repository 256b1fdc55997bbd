"""Causes of a hang in an operation that all members have called: mismatched calls, a lost message, a stuck sender."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Literal

from cordillera.distributed.tracing.causes import RootCause, named
from cordillera.distributed.tracing.metadata import Mismatch
from cordillera.distributed.tracing.rank_trace import Collective, PeerProgress, TracedCommunicator
from cordillera.distributed.tracing.snapshot import Snapshot

_MOST_FACTS = 8


def mismatch_cause(
    mismatch: Mismatch, communicator: TracedCommunicator, one: Collective, waited_s: float | None
) -> RootCause:
    """Return the cause for a collective that ranks called with mismatched arguments.

    Args:
        mismatch: Ranks by the arguments of their calls.
        communicator: TracedCommunicator of the collective.
        one: The collective of any of its members.
        waited_s: Longest wait in it, in seconds; None if no rank waits.
    """
    facts = tuple(f"{named(ranks)}: {form}" for form, ranks in mismatch.groups)
    ranks, certain = mismatch.ranks, mismatch.certain
    return RootCause("METADATA_MISMATCH", ranks, certain, communicator, one.op, one.sequence, waited_s, facts=facts)


def message_mismatch(
    sending: Collective, receiving: Collective, snapshot: Snapshot, number: int, waited_s: float
) -> RootCause | None:
    """Return the cause that a message has two sizes or number formats, or None if both sides agree.

    If one form is far more frequent in other communicators of the same description, the other side is wrong.

    Args:
        sending: Operation of the sender.
        receiving: Operation of the receiver.
        snapshot: The traces.
        number: Number of the communicator.
        waited_s: Longest wait for the message, in seconds.
    """
    sender, receiver = receiving.peer, sending.peer
    assert sender is not None
    assert receiver is not None
    forms = {sender: _form(sending), receiver: _form(receiving)}
    if forms[sender] == forms[receiver]:
        return None
    communicator = snapshot.views[number].communicator
    seen = Counter(
        _form(one)
        for view in snapshot.views
        if view.communicator.description == communicator.description
        for records in view.messages.values()
        for one in records
    )
    rare, other = sorted(forms, key=lambda rank: seen[forms[rank]])
    certain = seen[forms[other]] > 2 * seen[forms[rare]]
    facts = tuple(
        f"rank {rank} {verb} {forms[rank][0]:,} elements in {'/'.join(forms[rank][1])}"
        for rank, verb in ((sender, "sends"), (receiver, "expects"))
    )
    blamed = (rare,) if certain else tuple(sorted(forms))
    op, sequence = sending.op, sending.sequence
    return RootCause("METADATA_MISMATCH", blamed, certain, communicator, op, sequence, waited_s, facts=facts)


def _form(one: Collective) -> tuple[int, tuple[str, ...]]:
    """Return the number of elements of a message, and their number format."""
    sizes, dtypes = (one.output_sizes, one.output_dtypes) if one.op == "recv" else (one.input_sizes, one.input_dtypes)
    return sum(map(math.prod, sizes)), dtypes[:1]


def held_inside(
    records: Mapping[int, Collective], communicator: TracedCommunicator, one: Collective, waited_s: float
) -> RootCause:
    """Return what holds an operation that all members have called alike.

    Args:
        records: The operation, by rank.
        communicator: Its communicator.
        one: The operation of the rank that waits longest.
        waited_s: Longest wait in it, in seconds.
    """
    progress: dict[tuple[int, int], PeerProgress] = {
        (rank, peer.peer): peer for rank, record in records.items() for peer in record.peers
    }
    unsent: dict[int, list[int]] = defaultdict(list)
    lost = []
    for (sender, receiver), peer in sorted(progress.items()):
        back = progress.get((receiver, sender))
        if peer.posted > peer.finished:
            unsent[sender].append(receiver)
        elif back is not None and peer.finished > back.notified:
            lost.append((sender, receiver))
    kind: Literal["SENDER_STUCK", "NETWORK_STUCK", "STUCK_INSIDE"]
    if unsent:
        kind, ranks = "SENDER_STUCK", set(unsent)
        facts = [
            f"rank {rank} posted messages to {named(to)} that its side did not finish" for rank, to in unsent.items()
        ]
    elif lost:
        kind, ranks = "NETWORK_STUCK", {rank for pair in lost for rank in pair}
        facts = [f"rank {sender} finished its message to rank {to}, which was not notified" for sender, to in lost]
    else:
        kind, ranks = "STUCK_INSIDE", set()
        facts = ["all members have called it alike, and which of them holds it cannot be told from these traces"]
    return RootCause(
        kind,
        tuple(sorted(ranks)),
        certain=bool(ranks),
        communicator=communicator,
        op=one.op,
        sequence=one.sequence,
        waited_s=waited_s,
        facts=tuple(facts[:_MOST_FACTS]),
    )
