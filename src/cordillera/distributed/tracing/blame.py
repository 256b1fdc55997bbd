"""The ranks that a hang or slowness comes from, out of the traces of all ranks.

Of all ranks that wait, only those are blamed for whom others wait and who wait for none: a rank that is dead or has not
joined, ranks that called an operation differently, ranks that wait for each other in a circle, a connection that lost a
message, a sender that could not send. All others are victims.

Source: the rules follow the description of the analyser of NCCLX (arXiv 2510.20171), whose own rules are not published.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

from cordillera.distributed.tracing.metadata import Mismatch, alike, find_mismatch
from cordillera.distributed.tracing.rank_trace import Collective, Communicator, PeerProgress, RankTrace
from cordillera.distributed.tracing.slow_ranks import find_slow_ranks
from cordillera.distributed.tracing.snapshot import Snapshot, StalledWait

CauseKind: TypeAlias = Literal[
    "RANK_PROCESS_DEAD",
    "RANK_UNRESPONSIVE",
    "RANK_ERROR",
    "STUCK_IN_INIT",
    "RANK_NOT_JOINED",
    "METADATA_MISMATCH",
    "COLLECTIVE_DEADLOCK",
    "NETWORK_STUCK",
    "SENDER_STUCK",
    "STUCK_INSIDE",
    "SLOW_RANK",
]


@dataclass(frozen=True)
class RootCause:
    """One cause of a hang or of slowness.

    Attributes:
        kind: What happened.
        ranks: Ranks to blame, ascending; empty if the traces do not tell which.
        certain: Whether the traces tell these ranks from others; if not, one or more of them are at fault.
        communicator: Communicator in which others wait; None if nobody waits.
        op: Operation in which they wait.
        sequence: Its number.
        waited_s: Longest wait for it, in seconds; None if nobody waits.
        waiting: Number of ranks that wait for it, themselves or through others; 0 for slowness.
        facts: What the traces show of it, a sentence each.
        circle: Ranks of a deadlock, each of which waits for the next one.
        factor: Slowness of a rank, in the time of the other members.
    """

    kind: CauseKind
    ranks: tuple[int, ...]
    certain: bool = True
    communicator: Communicator | None = None
    op: str = ""
    sequence: int | None = None
    waited_s: float | None = None
    waiting: int = 0
    facts: tuple[str, ...] = ()
    circle: tuple[int, ...] = ()
    factor: float | None = None


@dataclass(frozen=True)
class Blame:
    """Causes of a hang or of slowness, and how many ranks suffer from them.

    Attributes:
        causes: Root causes; none for a healthy job.
        victims: Number of ranks that wait for others and are not to blame.
        ranks: Number of ranks of the job.
        absent: Ranks without a trace.
        notes: What cannot be told from these traces, a sentence each.
    """

    causes: tuple[RootCause, ...]
    victims: int
    ranks: int
    absent: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def culprits(self) -> frozenset[int]:
        """Ranks that a cause blames."""
        return frozenset(rank for cause in self.causes for rank in cause.ranks)


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
        The causes, and the number of ranks that only wait.

    Raises:
        DataError: If there are no traces, or two of one rank.
    """
    snapshot = Snapshot(traces, stalled_after_s)
    waits = list(snapshot.stalled())
    graph = _WaitGraph(snapshot, waits)
    causes = graph.causes()
    blamed = {rank for cause in causes for rank in cause.ranks}
    causes += _past_mismatches(snapshot, graph.mismatched)
    slow = find_slow_ranks(snapshot.own_times(), {n: view.members for n, view in enumerate(snapshot.views)})
    for one in slow:
        if one.rank in blamed:
            continue
        measure = "for equal work" if one.normalised else "and its work was not recorded"
        fact = f"its own time before {one.operations} operations is {one.factor:.2f} times that of the others, {measure}"
        late = f"it came last to {100 * one.last:.0f} % of them"
        view = snapshot.views[one.communicator].communicator
        causes.append(RootCause("SLOW_RANK", (one.rank,), communicator=view, facts=(fact, late), factor=one.factor))
    blamed = {rank for cause in causes for rank in cause.ranks}
    victims = {wait.rank for wait in waits} - blamed
    return Blame(
        tuple(causes), len(victims), len(snapshot.members), tuple(sorted(snapshot.absent)), _notes(snapshot, graph, blamed)
    )


def _notes(snapshot: Snapshot, graph: _WaitGraph, blamed: set[int]) -> tuple[str, ...]:
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
    if any(not view.communicator.ranks for view in snapshot.views):
        notes.append("communicators do not name their members: a rank that never used one cannot be told")
    return tuple(notes)


def named(ranks: Iterable[int], most: int = 12) -> str:
    """Return ranks as words: ``rank 3``, ``ranks 0-6, 9``.

    Args:
        ranks: The ranks.
        most: Number of ranges, after which the others are counted.
    """
    ordered = sorted(ranks)
    ranges: list[list[int]] = []
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    words = [str(low) if low == high else f"{low}{', ' if high == low + 1 else '-'}{high}" for low, high in ranges[:most]]
    left = sum(high - low + 1 for low, high in ranges[most:])
    shown = ", ".join(words) if len(ordered) != 2 else f"{ordered[0]} and {ordered[1]}"
    return f"rank{'s' if len(ordered) != 1 else ''} {shown}" + (f" and {left:,} others" if left else "")


def _past_mismatches(snapshot: Snapshot, known: set[int]) -> list[RootCause]:
    """Return the first mismatch of each communicator in operations that nobody waits in any more."""
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
                found.append(_mismatch_cause(mismatch, view.communicator, next(iter(records.values())), None, 0))
                break
    return found


def _mismatch_cause(
    mismatch: Mismatch, communicator: Communicator, one: Collective, waited_s: float | None, waiting: int
) -> RootCause:
    facts = tuple(f"{named(ranks)}: {form}" for form, ranks in mismatch.groups)
    return RootCause(
        "METADATA_MISMATCH", mismatch.ranks, mismatch.certain, communicator, one.op, one.sequence, waited_s, waiting, facts
    )


@dataclass
class _Point:
    """Operation in which ranks wait, a node of the graph.

    Attributes:
        view: Number of the communicator.
        wait: The longest wait in it.
        behind: Ranks that it waits for.
        cause: What holds it although nobody is behind; without the number of ranks that wait.
    """

    view: int
    wait: StalledWait
    behind: set[int]
    cause: RootCause | None = None


class _WaitGraph:
    """Who waits for whom: ranks wait in operations, and operations wait for ranks.

    Args:
        snapshot: The traces.
        waits: Waits that are too long.
    """

    def __init__(self, snapshot: Snapshot, waits: Sequence[StalledWait]) -> None:
        self.snapshot, self.waits = snapshot, waits
        self.mismatched: set[int] = set()
        self.ranks = sorted(snapshot.members)
        self.place = {rank: number for number, rank in enumerate(self.ranks)}
        self.broken = {rank for rank, trace in snapshot.traces.items() if trace.status != "running" or trace.error}
        self.points: dict[tuple[int, ...], _Point] = {}
        waiting: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        for wait in waits:
            key = _key(wait)
            point = self.points.get(key)
            if point is None:
                self.points[key] = _Point(wait.view, wait, set())
            elif wait.seconds > point.wait.seconds:
                point.wait = wait
            waiting[wait.rank].add(key)
        for key, point in self.points.items():
            self._examine(key, point)
        for rank in self._secondary_errors(waiting):
            self.broken.discard(rank)
        self.waiting = {rank: keys for rank, keys in waiting.items() if rank not in self.broken}
        self._connect()

    def _secondary_errors(self, waiting: dict[int, set[tuple[int, ...]]]) -> set[int]:
        """Return ranks with an error that wait for a dead rank, whose death their error may come from."""
        dead = {rank for rank in self.broken if self.snapshot.traces[rank].status == "died"}
        return {
            rank
            for rank in self.broken - dead
            if any(self.points[key].behind & dead for key in waiting.get(rank, ()))
            and self.snapshot.traces[rank].status == "running"
        }

    def _examine(self, key: tuple[int, ...], point: _Point) -> None:
        """Find whom an operation waits for, or else what holds it."""
        view, one = self.snapshot.views[point.view], point.wait.record
        if one.peer is not None:
            self._examine_message(key, point)
            return
        records = view.collectives[one.sequence]
        point.behind = {rank for rank in view.members if view.heads.get(rank, -1) < one.sequence}
        if not alike(records.values()):
            siblings = self.snapshot.siblings(point.view, one.sequence)
            mismatch = find_mismatch(records, view.communicator, siblings)
            if mismatch is not None:
                self.mismatched.add(point.view)
                point.cause = _mismatch_cause(mismatch, view.communicator, one, point.wait.seconds, 0)
                return
        point.behind |= self.broken & view.members
        if not point.behind:
            point.cause = self._inside(point, records)

    def _examine_message(self, key: tuple[int, ...], point: _Point) -> None:
        view, one, rank = self.snapshot.views[point.view], point.wait.record, point.wait.rank
        peer = one.peer
        assert peer is not None
        receives = one.op == "recv"
        others = view.messages.get((peer, rank, False) if receives else (rank, peer, True), [])
        other = _counterpart(one, view.messages[(peer, rank, True) if receives else (rank, peer, False)], others)
        if other is None or peer in self.broken:
            point.behind = {peer}
            return
        sending, receiving = (other, one) if receives else (one, other)
        sent, expected = _elements(sending, "input"), _elements(receiving, "output")
        if sent != expected or sending.input_dtypes[:1] != receiving.output_dtypes[:1]:
            self.mismatched.add(point.view)
            point.cause = self._message_mismatch(point, sending, receiving)
            return
        point.cause = self._inside(point, {rank: one, peer: other})

    def _message_mismatch(self, point: _Point, sending: Collective, receiving: Collective) -> RootCause:
        """Compare both sides of a message with messages of other pairs in the same direction."""
        sender, receiver = receiving.peer, sending.peer
        assert sender is not None and receiver is not None
        forms = {
            sender: (_elements(sending, "input"), sending.input_dtypes[:1]),
            receiver: (_elements(receiving, "output"), receiving.output_dtypes[:1]),
        }
        view = self.snapshot.views[point.view].communicator
        seen: Counter[object] = Counter()
        for other in self.snapshot.views:
            if other.communicator.description == view.description:
                for (_, _, receives), records in other.messages.items():
                    for one in records:
                        shape = _elements(one, "output" if receives else "input")
                        seen[shape, (one.output_dtypes if receives else one.input_dtypes)[:1]] += 1
        rare = sorted(forms, key=lambda rank: seen[forms[rank]])
        certain = seen[forms[rare[1]]] > 2 * seen[forms[rare[0]]]
        facts = tuple(
            f"rank {rank} {verb} {forms[rank][0]:,} elements of {'/'.join(forms[rank][1])}"
            for rank, verb in ((sender, "sends"), (receiver, "expects"))
        )
        blamed = (rare[0],) if certain else tuple(sorted(forms))
        one = point.wait.record
        return RootCause(
            "METADATA_MISMATCH", blamed, certain, view, one.op, one.sequence, point.wait.seconds, 0, facts
        )

    def _inside(self, point: _Point, records: dict[int, Collective]) -> RootCause:
        """Return what holds an operation that all members have called alike."""
        view, one = self.snapshot.views[point.view].communicator, point.wait.record
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
        common = {
            "communicator": view, "op": one.op, "sequence": one.sequence, "waited_s": point.wait.seconds,
        }  # fmt: skip
        if unsent:
            facts = [f"rank {rank} posted messages to {named(peers)} that its side did not finish" for rank, peers in unsent.items()]
            return RootCause("SENDER_STUCK", tuple(sorted(unsent)), facts=tuple(facts), **common)  # type: ignore[arg-type]
        if lost:
            facts = [f"rank {sender} finished its message to rank {receiver}, which was not notified" for sender, receiver in lost]
            ranks = tuple(sorted({rank for pair in lost for rank in pair}))
            return RootCause("NETWORK_STUCK", ranks, facts=tuple(facts[:8]), **common)  # type: ignore[arg-type]
        fact = "all members have called it alike, and which of them holds it cannot be told from these traces"
        return RootCause("STUCK_INSIDE", (), certain=False, facts=(fact,), **common)  # type: ignore[arg-type]

    def _connect(self) -> None:
        """Build the graph: ranks come first, then operations."""
        count, keys = len(self.ranks), list(self.points)
        self.node = {key: count + number for number, key in enumerate(keys)}
        pairs = [(self.place[rank], self.node[key]) for rank, keys in self.waiting.items() for key in keys]
        for key, point in self.points.items():
            if point.cause is None:
                pairs += [(self.node[key], self.place[rank]) for rank in point.behind]
        self.edges = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        size = count + len(keys)
        entries = np.ones(len(self.edges), dtype=np.int8), (self.edges[:, 0], self.edges[:, 1])
        self.matrix = coo_array(entries, shape=(size, size)).tocsr()
        self.backward = self.matrix.T.tocsr()

    def causes(self) -> list[RootCause]:
        """Return the causes that no other cause explains."""
        count, keys = len(self.ranks), list(self.points)
        number, component = connected_components(self.matrix, directed=True, connection="strong")
        leaves = np.ones(number, dtype=bool)
        crossing = component[self.edges[:, 0]] != component[self.edges[:, 1]]
        leaves[component[self.edges[crossing, 0]]] = False
        members: dict[int, list[int]] = defaultdict(list)
        for node in np.flatnonzero(leaves[component]):
            members[int(component[node])].append(int(node))
        found: list[RootCause] = []
        outside: dict[tuple[CauseKind, tuple[int, ...]], list[int]] = defaultdict(list)
        for nodes in members.values():
            if len(nodes) > 1:
                found.append(self._deadlock(nodes))
            elif nodes[0] >= count:
                cause = self.points[keys[nodes[0] - count]].cause
                assert cause is not None
                own = {self.place[rank] for rank in cause.ranks}
                found.append(replace(cause, waiting=self._waiting_for({*nodes, *own}, nodes)))
            else:
                rank = self.ranks[nodes[0]]
                first = self._first_wait_for(nodes[0])
                if first is not None or rank in self.broken:
                    outside[self._kind_outside(rank, first), first or ()].append(rank)
        for (kind, first), ranks in outside.items():
            known = [rank for rank in ranks if rank not in self.snapshot.absent or not self._may_wait(rank, members)]
            if known:
                found.append(self._outside(kind, first, known))
        return sorted(_merged(found), key=lambda cause: (-cause.waiting, cause.ranks))

    def _waiting_for(self, nodes: Iterable[int], starts: Iterable[int] | None = None) -> int:
        """Return the number of other ranks that wait for nodes of the graph, or for ``starts``, or through others."""
        own = set(nodes)
        reached: set[int] = set()
        for start in own if starts is None else starts:
            if start not in reached:
                reached.update(breadth_first_order(self.backward, start, return_predecessors=False).tolist())
        return sum(node < len(self.ranks) for node in reached - own)

    def _first_wait_for(self, node: int) -> tuple[int, ...] | None:
        """Return the operation that has waited longest for a rank itself."""
        keys = list(self.points)
        sources = self.backward.indices[self.backward.indptr[node] : self.backward.indptr[node + 1]]
        own = [keys[source - len(self.ranks)] for source in sources]
        return max(own, key=lambda key: (self.points[key].wait.seconds, key), default=None)

    def _kind_outside(self, rank: int, first: tuple[int, ...] | None) -> CauseKind:
        trace = self.snapshot.traces.get(rank)
        if trace is None:
            return "RANK_UNRESPONSIVE"
        if trace.status == "died":
            return "RANK_PROCESS_DEAD"
        if trace.status == "unresponsive":
            return "RANK_UNRESPONSIVE"
        if trace.error:
            return "RANK_ERROR"
        view = None if first is None else self.snapshot.views[self.points[first].view]
        return "STUCK_IN_INIT" if view is not None and rank not in view.makers else "RANK_NOT_JOINED"

    def _outside(self, kind: CauseKind, first: tuple[int, ...], ranks: list[int]) -> RootCause:
        facts = []
        for rank in ranks[:4]:
            trace, last = self.snapshot.traces.get(rank), self.snapshot.last_ended(rank)
            if trace is None:
                facts.append(f"rank {rank} left no trace")
            elif trace.error:
                facts.append(f"rank {rank} said: {trace.error[:200]}")
            elif last is not None and kind == "RANK_NOT_JOINED":
                facts.append(f"the last operation of rank {rank} was {self._described(rank, last)}")
        if not first:
            return RootCause(kind, tuple(sorted(ranks)), facts=tuple(facts))
        point = self.points[first]
        one, view = point.wait.record, self.snapshot.views[point.view].communicator
        waiting = self._waiting_for(self.place[rank] for rank in ranks)
        return RootCause(
            kind, tuple(sorted(ranks)), True, view, one.op, one.sequence, point.wait.seconds, waiting, tuple(facts)
        )

    def _described(self, rank: int, one: Collective) -> str:
        trace = self.snapshot.traces[rank]
        view = self.snapshot.views[self.snapshot.of_rank[rank][one.communicator]].communicator
        ago = ""
        if one.ended_ns is not None and trace.written_ns is not None:
            ago = f", which ended {(trace.written_ns - one.ended_ns) / 1e9:,.1f} s before the trace was written"
        return f"{one.op} {one.sequence} of {label(view)}{ago}"

    def _may_wait(self, rank: int, leaves: dict[int, list[int]]) -> bool:
        """Return whether a rank without a trace may itself wait for another cause."""
        starts: set[int] = set()
        for number, view in enumerate(self.snapshot.views):
            if rank not in view.members:
                continue
            points = [point for point in self.points.values() if point.view == number and point.cause is None]
            for point in points:
                if point.wait.record.peer is None and not self._is_after(point, rank):
                    starts |= {self.place[other] for other in point.behind if other != rank}
            partners = {other for pair in view.messages for other in pair[:2] if rank in pair[:2]} - {rank}
            waiting = {point.wait.rank for point in points if point.wait.record.peer == rank}
            starts |= {self.place[other] for other in partners - waiting}
        own = self.place[rank]
        ends = {node for nodes in leaves.values() for node in nodes} - {own}
        for start in starts:
            reached = breadth_first_order(self.matrix, start, return_predecessors=False)
            if not ends.isdisjoint(reached.tolist()):
                return True
        return False

    def _is_after(self, point: _Point, rank: int) -> bool:
        """Return whether other ranks call an operation after one that waits for a single rank only."""
        later = self._kind(point)
        for other in self.points.values():
            if other.behind == {rank} and other.wait.record.peer is None and self._kind(other)[0] != later[0]:
                orders = Counter(self._orders(self._kind(other), later).values())
                if orders[True] > 2 * orders[False]:
                    return True
        return False

    def _kind(self, point: _Point) -> tuple[str, int]:
        """Return what operations of one place in the program have in common in all communicators of a description."""
        return self.snapshot.views[point.view].communicator.description, point.wait.record.sequence

    def _deadlock(self, nodes: list[int]) -> RootCause:
        """Return a circle of ranks and who of them has another order of operations than most ranks."""
        count, keys = len(self.ranks), list(self.points)
        inside = [node for node in nodes if node < count]
        points = [keys[node - count] for node in nodes if node >= count]
        deviants, facts = self._deviants([self.ranks[node] for node in inside], points)
        start = self.place[deviants[0]] if deviants else min(inside)
        circle = self._circle(start, set(nodes))
        wait = max((self.points[key].wait for key in points), key=lambda one: one.seconds)
        view = self.snapshot.views[wait.view].communicator
        ranks = tuple(deviants) or tuple(sorted(circle))
        others = self._waiting_for(nodes) + len(inside) - len(ranks)
        return RootCause(
            "COLLECTIVE_DEADLOCK", ranks, bool(deviants), view, wait.record.op, wait.record.sequence, wait.seconds, others,
            tuple(facts) or tuple(self._stands(rank) for rank in circle[:4]), tuple(circle),
        )  # fmt: skip

    def _stands(self, rank: int) -> str:
        own = [self.points[key].wait.record for key in sorted(self.waiting[rank])]
        return f"rank {rank} waits in " + ", ".join(f"{one.op} {one.sequence} of {one.communicator}" for one in own)

    def _circle(self, start: int, inside: set[int]) -> list[int]:
        """Return the ranks of a shortest circle through a rank."""
        before, front = {start: start}, [start]
        while front:
            following = []
            for node in front:
                for target in self.matrix.indices[self.matrix.indptr[node] : self.matrix.indptr[node + 1]].tolist():
                    if target == start:
                        path = [node]
                        while path[-1] != start:
                            path.append(before[path[-1]])
                        return [self.ranks[one] for one in reversed(path) if one < len(self.ranks)]
                    if target in inside and target not in before:
                        before[target] = node
                        following.append(target)
            front = following
        return [self.ranks[start]]

    def _deviants(self, ranks: list[int], points: list[tuple[int, ...]]) -> tuple[list[int], list[str]]:
        """Return the ranks of a circle that called two operations in another order than most ranks of the job."""
        kinds: dict[tuple[str, int], Collective] = {}
        for key in points:
            point = self.points[key]
            if point.wait.record.peer is None:
                kinds.setdefault(self._kind(point), point.wait.record)
        found: set[int] = set()
        facts = []
        ordered = sorted(kinds)
        for number, first in enumerate(ordered):
            for second in ordered[number + 1 :]:
                if first[0] == second[0]:
                    continue
                orders = self._orders(first, second)
                ahead = Counter(orders.values())
                usual = ahead[True] > ahead[False]
                rare = [rank for rank in ranks if rank in orders and orders[rank] != usual]
                if not rare or ahead[usual] <= 2 * ahead[not usual]:
                    continue
                found.update(rare)
                before, after = (first, second) if usual else (second, first)
                facts.append(
                    f"{named(rare)} called {kinds[after].op} {after[1]} of {after[0]} before "
                    f"{kinds[before].op} {before[1]} of {before[0]}; {ahead[usual]:,} ranks call them in the other order"
                )
        return sorted(found), facts

    def _orders(self, first: tuple[str, int], second: tuple[str, int]) -> dict[int, bool]:
        """Return for each rank that called one of two operations whether the first one came first."""
        calls: list[dict[int, int]] = [{}, {}]
        for view in self.snapshot.views:
            for which, (description, sequence) in enumerate((first, second)):
                if view.communicator.description == description:
                    for rank, one in view.collectives.get(sequence, {}).items():
                        calls[which].setdefault(rank, one.enqueued_ns)
        never = float("inf")
        return {rank: calls[0].get(rank, never) < calls[1].get(rank, never) for rank in calls[0].keys() | calls[1].keys()}


def label(communicator: Communicator) -> str:
    """Return the name and description of a communicator as words."""
    if not communicator.description or communicator.description in (communicator.name, "undefined"):
        return f"communicator {communicator.name}"
    return f"communicator {communicator.name} ({communicator.description})"


def _key(wait: StalledWait) -> tuple[int, ...]:
    """Return what waits in one operation have in common."""
    one = wait.record
    if one.peer is None:
        return wait.view, one.sequence
    pair = (one.peer, wait.rank) if one.op == "recv" else (wait.rank, one.peer)
    return (wait.view, *pair, one.sequence if one.channel is None else one.channel)


def _elements(one: Collective, side: Literal["input", "output"]) -> int:
    sizes = one.input_sizes if side == "input" else one.output_sizes
    return sum(int(np.prod(size, dtype=np.int64)) for size in sizes)


def _counterpart(one: Collective, own: Sequence[Collective], others: Sequence[Collective]) -> Collective | None:
    """Return the other side's operation of a message; without channel numbers, that of the same place in the queue."""
    if one.channel is not None:
        return next((other for other in others if other.channel == one.channel), None)
    queue = [record for record in own if record.state in ("scheduled", "started")]
    waiting = [record for record in others if record.state in ("scheduled", "started")]
    place = queue.index(one)
    return waiting[place] if place < len(waiting) else None


def _merged(causes: list[RootCause]) -> list[RootCause]:
    """Leave out causes that blame the same ranks of the same communicator once more."""
    seen = set()
    kept = []
    for cause in sorted(causes, key=lambda one: -(one.waited_s or 0.0)):
        key = cause.kind, cause.ranks, cause.communicator and cause.communicator.name
        if key not in seen:
            seen.add(key)
            kept.append(cause)
    return kept

