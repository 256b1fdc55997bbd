"""Causes of a hang or of slowness in words: the event, the waiting ranks, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from cordillera.distributed.tracing.causes import Blame, CauseKind, RootCause, label, named

_REMEDIES: dict[CauseKind, str] = {
    "RANK_PROCESS_DEAD": "Read the end of its log and the kernel's log of its host, then replace the process.",
    "RANK_UNRESPONSIVE": "See whether its process and its host still run; a stack of the process (py-spy) shows where "
    "it is.",
    "RANK_ERROR": "Repair what its error names; the errors of ranks that wait follow from it.",
    "STUCK_IN_INIT": "See where it is before it makes the communicator: a stack of the process (py-spy) shows it.",
    "RANK_NOT_JOINED": "Look at what it does outside of collectives (data loading, a checkpoint, a kernel): a stack of "
    "the process (py-spy) shows it.",
    "METADATA_MISMATCH": "Compare what these ranks compute before this operation: they took another branch or another "
    "shape.",
    "COLLECTIVE_DEADLOCK": "Call operations of different communicators in the same order on all ranks.",
    "NETWORK_STUCK": "Check the connection between the two: counters of both network ports, cable, switch.",
    "SENDER_STUCK": "Check the sender's network adapter, its memory registration and its progress thread.",
    "STUCK_INSIDE": "Record the progress of messages in the traces, or compare stacks and network counters of the "
    "members.",
    "NETWORK_SLOW": "Compare counters of retransmissions and congestion of its network ports with those of the others.",
    "SLOW_RANK": "Compare its clock rate, temperature, neighbours on the host and input data with those of the others.",
}


def describe(found: Blame) -> list[str]:
    """Return paragraphs: one for each cause, then the victims and the open questions.

    Args:
        found: The causes.
    """
    paragraphs = [describe_cause(cause) for cause in found.causes]
    if not paragraphs:
        paragraphs = [f"no rank is to blame: none of {found.ranks:,} ranks waits longer than a working job does"]
    if found.victims:
        count = len(found.victims)
        verb = "waits for others and is" if count == 1 else "wait for others and are"
        paragraphs.append(f"{count:,} of {found.ranks:,} ranks {verb} not to blame")
    return [*paragraphs, *(f"note: {note}" for note in found.notes)]


def describe_cause(cause: RootCause) -> str:
    """Return a paragraph on one cause.

    Args:
        cause: The cause.
    """
    return " ".join([f"{cause.kind}: {_happened(cause)}.", *_details(cause), _REMEDIES[cause.kind]])


def _details(cause: RootCause) -> Iterator[str]:
    if cause.facts:
        facts = "; ".join(cause.facts)
        yield f"{facts[0].upper()}{facts[1:]}."
    if cause.circle:
        yield f"The circle: {' -> '.join(str(rank) for rank in (*cause.circle, cause.circle[0]))}."
    if cause.waiting and cause.waited_s is not None:
        who = "1 rank waits" if cause.waiting == 1 else f"{cause.waiting:,} ranks wait"
        yield f"{who} for this, the longest for {cause.waited_s:,.1f} s."


def _happened(cause: RootCause) -> str:
    """Return a sentence on the cause, without its full stop."""
    who = named(cause.ranks) if cause.ranks else "a rank that cannot be told from these traces"
    if not cause.certain and cause.ranks:
        who = f"one or more of {who}"
    one = len(cause.ranks) == 1
    has, waits = ("has", "waits") if one else ("have", "wait")
    operation = "" if cause.communicator is None else f"{cause.op} {cause.sequence} of {label(cause.communicator)}"
    awaited = f", and others wait for {'it' if one else 'them'} in {operation}" if operation else ""
    return {
        "RANK_PROCESS_DEAD": f"{who} died{awaited}",
        "RANK_UNRESPONSIVE": f"{who} did not answer{awaited}",
        "RANK_ERROR": f"{who} met an error{awaited}",
        "STUCK_IN_INIT": f"{who} {has} not made the communicator that {operation} needs",
        "RANK_NOT_JOINED": f"{who} {has} not joined {operation}, and {waits} for no other rank",
        "METADATA_MISMATCH": f"{who} called {operation} differently from the other members",
        "COLLECTIVE_DEADLOCK": f"{who} called operations in another order, so that ranks wait for each other, "
        f"in {operation}",
        "NETWORK_STUCK": f"a message between {who} is lost in {operation}",
        "SENDER_STUCK": f"{who} cannot send in {operation}",
        "STUCK_INSIDE": f"{who} holds {operation}, which all members have called",
        "NETWORK_SLOW": (f"the connection between {who} is slow" if cause.ranks else "the network is slow")
        + f" in {'a communicator' if cause.communicator is None else label(cause.communicator)}",
        "SLOW_RANK": f"{who} is slow: it takes {cause.factor or 1.0:.2f} times as long as the other members of "
        + ("its communicator" if cause.communicator is None else label(cause.communicator)),
    }[cause.kind]
