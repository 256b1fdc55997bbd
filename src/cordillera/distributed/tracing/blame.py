"""The ranks that a hang or slowness comes from, out of the traces of all ranks.

Of all ranks that wait, only those are blamed for whom others wait and who wait for none: a rank that is dead or has not
joined, ranks that called an operation differently, ranks that wait for each other in a circle, a connection that lost a
message, a sender that could not send. All others are victims.

Source: the rules follow the description of the analyser of NCCLX (arXiv 2510.20171), whose own rules are not published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cordillera.distributed.tracing.causes import Blame, RootCause, named
from cordillera.distributed.tracing.held import mismatch_cause
from cordillera.distributed.tracing.metadata import alike, find_mismatch
from cordillera.distributed.tracing.rank_trace import RankTrace
from cordillera.distributed.tracing.slow_links import find_slow_links
from cordillera.distributed.tracing.slow_ranks import find_slow_ranks
from cordillera.distributed.tracing.snapshot import Snapshot
from cordillera.distributed.tracing.wait_graph import WaitGraph


def blame(traces: Iterable[RankTrace], *, stalled_after_s: float | None = None) -> Blame:
    """Return the root causes of a hang or of slowness.

    Times of different ranks are never compared, so that their clocks may differ, and a wait counts only if it is far
    longer than those of a working job, so that traces need not be of one moment.

    Args:
        traces: One trace a rank; ranks that a communicator names may be missing.
        stalled_after_s: Seconds after which a wait is a stall; None takes ten times the longest time between two calls
            and the longest completed wait of any rank, at least 1 s, or 60 s if there is neither, and at most half of
            the operation's own timeout.

    Returns:
        The causes, and the ranks that only wait.

    Raises:
        DataError: If there are no traces, or two of one rank.
    """
    snapshot = Snapshot(traces, stalled_after_s)
    graph = WaitGraph(snapshot, list(snapshot.stalled()))
    causes = graph.causes()
    blamed = {rank for cause in causes for rank in cause.ranks}
    causes += _past_mismatches(snapshot, graph.mismatched)
    causes += [cause for cause in _slow_causes(snapshot) if not blamed.issuperset(cause.ranks)]
    causes += _slow_links(snapshot)
    blamed = {rank for cause in causes for rank in cause.ranks}
    victims = graph.waiting.keys() - blamed
    return Blame(
        tuple(causes),
        tuple(sorted(victims)),
        len(snapshot.members),
        tuple(sorted(snapshot.absent)),
        _notes(snapshot, graph, blamed),
    )


def _slow_causes(snapshot: Snapshot) -> Iterator[RootCause]:
    members = {number: view.members for number, view in enumerate(snapshot.views)}
    for one in find_slow_ranks(snapshot.own_times(), members):
        measure = "for equal work" if one.normalised else "and its work was not recorded"
        own = f"its own time before {one.operations} operations is {one.factor:.2f} times that of the others, {measure}"
        facts = (own, f"it came last to {100 * one.last:.0f} % of them")
        view = snapshot.views[one.communicator].communicator
        yield RootCause("SLOW_RANK", (one.rank,), communicator=view, facts=facts, factor=one.factor)


def _slow_links(snapshot: Snapshot) -> Iterator[RootCause]:
    for one in find_slow_links(snapshot):
        view = snapshot.views[one.communicator].communicator
        facts = [f"data takes {one.factor:.1f} times as long as elsewhere, in {one.operations} operations"]
        if not one.ranks:
            facts.append("between which members cannot be told from these traces")
        ranks = tuple(sorted(one.ranks))
        yield RootCause("NETWORK_SLOW", ranks, bool(ranks), view, facts=tuple(facts), factor=one.factor)


def _notes(snapshot: Snapshot, graph: WaitGraph, blamed: set[int]) -> tuple[str, ...]:
    notes = []
    left = sorted(snapshot.absent - blamed)
    if left:
        notes.append(f"{named(left)} left no trace: whether to blame, cannot be told from these traces")
    if snapshot.without_times:
        notes.append("the operations have no times of their ends: slow ranks cannot be told from these traces")
    if any(trace.written_ns is None for trace in snapshot.traces.values()):
        notes.append("some traces do not say when they were written: how long these ranks have waited cannot be told")
    elif any(trace.estimated for trace in snapshot.traces.values()) and graph.waits:
        notes.append("how long ranks have waited is taken from the times of the files")
    if graph.unnumbered:
        notes.append("messages are not numbered: one that was lost cannot be told from one that was not sent")
    if any(not view.communicator.ranks for view in snapshot.views):
        notes.append("communicators do not name their members: a rank that never used one cannot be told")
    return tuple(notes)


def _past_mismatches(snapshot: Snapshot, known: set[int]) -> list[RootCause]:
    """Return the first mismatch of each communicator in operations in which no rank waits any more."""
    found = []
    for number, view in enumerate(snapshot.views):
        if number in known:
            continue
        for sequence in sorted(view.collectives):
            records = view.collectives[sequence]
            if len(records) < 2 or alike(records.values()):
                continue
            mismatch = find_mismatch(records, view.communicator, snapshot.siblings(number, sequence))
            if mismatch is not None:
                found.append(mismatch_cause(mismatch, view.communicator, next(iter(records.values())), None))
                break
    return found
