"""Who waits for whom: ranks wait in operations, and operations wait for ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

from cordillera.distributed.tracing.call_order import OperationKind, call_orders, usual_order
from cordillera.distributed.tracing.causes import CauseKind, RootCause, label, named
from cordillera.distributed.tracing.held import held_inside, message_mismatch, mismatch_cause
from cordillera.distributed.tracing.metadata import alike, find_mismatch
from cordillera.distributed.tracing.rank_trace import ANY_RANK, Collective
from cordillera.distributed.tracing.snapshot import RankWait, Snapshot


@dataclass
class WaitPoint:
    """Operation in which ranks wait, a node of the graph.

    Attributes:
        view: Number of the communicator.
        wait: The longest wait in it.
        behind: Ranks that it waits for.
        cause: Cause of the hang if no rank is behind, without the number of waiting ranks.
    """

    view: int
    wait: RankWait
    behind: set[int]
    cause: RootCause | None = None


class WaitGraph:
    """Who waits for whom: ranks wait in operations, and operations wait for ranks.

    Args:
        snapshot: The traces.
        waits: Waits that are too long.
    """

    def __init__(self, snapshot: Snapshot, waits: Sequence[RankWait]) -> None:
        self.snapshot, self.waits = snapshot, waits
        self.mismatched: set[int] = set()
        self.ranks = sorted(snapshot.members)
        self.place = {rank: number for number, rank in enumerate(self.ranks)}
        self.broken = {rank for rank, trace in snapshot.traces.items() if trace.status != "running" or trace.error}
        self.unnumbered = False
        self.points: dict[tuple[int, ...], WaitPoint] = {}
        waiting: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        new: Iterable[RankWait] = waits
        while new := list(new):
            behind = self._add(new, waiting)
            # Whom others wait for too long may have begun to wait only now.
            new = [wait for rank in sorted(behind - waiting.keys()) for wait in snapshot.waits_of(rank)]
        for rank in self._secondary_errors(waiting):
            self.broken.discard(rank)
        self.waiting = {rank: keys for rank, keys in waiting.items() if rank not in self.broken}
        self._connect()

    def _add(self, waits: Iterable[RankWait], waiting: dict[int, set[tuple[int, ...]]]) -> set[int]:
        """Add waits to the points of the graph, and return the ranks that new points wait for."""
        fresh = set()
        for wait in waits:
            key = _key(wait)
            point = self.points.get(key)
            if point is None:
                fresh.add(key)
                self.points[key] = WaitPoint(wait.view, wait, set())
            elif wait.seconds > point.wait.seconds:
                point.wait = wait
            waiting[wait.rank].add(key)
        for key in fresh:
            self._examine(self.points[key])
        return {rank for key in fresh for rank in self.points[key].behind}

    def _secondary_errors(self, waiting: dict[int, set[tuple[int, ...]]]) -> set[int]:
        """Return ranks with an error that wait for a dead rank, whose death their error may come from."""
        dead = {rank for rank in self.broken if self.snapshot.traces[rank].status == "died"}
        return {
            rank
            for rank in self.broken - dead
            if any(self.points[key].behind & dead for key in waiting.get(rank, ()))
            and self.snapshot.traces[rank].status == "running"
        }

    def _examine(self, point: WaitPoint) -> None:
        """Find the ranks that an operation waits for, or else the cause of its hang."""
        view, one = self.snapshot.views[point.view], point.wait.record
        if one.peer is not None:
            self._examine_message(point)
            return
        records = view.collectives[one.sequence]
        point.behind = {rank for rank in view.members if view.heads.get(rank, -1) < one.sequence}
        if not alike(records.values()):
            siblings = self.snapshot.siblings(point.view, one.sequence)
            mismatch = find_mismatch(records, view.communicator, siblings)
            if mismatch is not None:
                self.mismatched.add(point.view)
                point.cause = mismatch_cause(mismatch, view.communicator, one, point.wait.seconds)
                return
        point.behind |= self.broken & view.members
        if not point.behind:
            point.cause = held_inside(records, view.communicator, one, point.wait.seconds)

    def _examine_message(self, point: WaitPoint) -> None:
        view, one, rank = self.snapshot.views[point.view], point.wait.record, point.wait.rank
        peer = one.peer
        assert peer is not None
        if peer == ANY_RANK:
            point.behind = view.members - {rank}
            return
        receives = one.op == "recv"
        others = view.messages.get((peer, rank, False) if receives else (rank, peer, True), [])
        other = _counterpart(one, view.messages[(peer, rank, True) if receives else (rank, peer, False)], others)
        if other is None or peer in self.broken:
            point.behind = {peer}
            self.unnumbered |= one.channel is None
            return
        sending, receiving = (other, one) if receives else (one, other)
        seconds = point.wait.seconds
        point.cause = message_mismatch(sending, receiving, self.snapshot, point.view, seconds)
        if point.cause is None:
            point.cause = held_inside({rank: one, peer: other}, view.communicator, one, seconds)

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
        reached = _reached(self.backward, own if starts is None else starts)
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
            partners = {other for pair in view.messages for other in pair[:2] if rank in pair[:2]} - {rank, ANY_RANK}
            waiting = {point.wait.rank for point in points if point.wait.record.peer == rank}
            starts |= {self.place[other] for other in partners - waiting}
        own = self.place[rank]
        ends = {node for nodes in leaves.values() for node in nodes} - {own}
        return not ends.isdisjoint(_reached(self.matrix, starts))

    def _is_after(self, point: WaitPoint, rank: int) -> bool:
        """Return whether other ranks call the operation only after another one that waits for ``rank`` alone."""
        later = self._kind(point)
        for other in self.points.values():
            earlier = self._kind(other)
            alone = other.behind == {rank} and other.wait.record.peer is None
            if not alone or earlier.description == later.description:
                continue
            if usual_order(call_orders(self.snapshot, earlier, later)):
                return True
        return False

    def _kind(self, point: WaitPoint) -> OperationKind:
        return OperationKind(self.snapshot.views[point.view].communicator.description, point.wait.record.sequence)

    def _deadlock(self, nodes: list[int]) -> RootCause:
        """Return a circle of ranks and who of them has another order of operations than most ranks."""
        count, keys = len(self.ranks), list(self.points)
        inside = [node for node in nodes if node < count]
        points = [keys[node - count] for node in nodes if node >= count]
        deviants, facts = self._deviants([self.ranks[node] for node in inside], points)
        start = self.place[deviants[0]] if deviants else min(inside)
        circle = self._circle(start, set(nodes))
        ranks = tuple(deviants) or tuple(sorted(circle))
        own = [self.points[key].wait for rank in ranks for key in self.waiting[rank] if key in points]
        wait = max(own, key=lambda one: one.seconds)
        view = self.snapshot.views[wait.view].communicator
        return RootCause(
            "COLLECTIVE_DEADLOCK",
            ranks,
            bool(deviants),
            view,
            wait.record.op,
            wait.record.sequence,
            wait.seconds,
            waiting=self._waiting_for(nodes) + len(inside) - len(ranks),
            facts=tuple(facts) or tuple(self._stands(rank) for rank in circle[:4]),
            circle=tuple(circle),
        )

    def _stands(self, rank: int) -> str:
        own = [self.points[key].wait.record for key in sorted(self.waiting[rank])]
        return f"rank {rank} waits in " + ", ".join(f"{one.op} {one.sequence} of {one.communicator}" for one in own)

    def _deviants(self, ranks: list[int], points: list[tuple[int, ...]]) -> tuple[list[int], list[str]]:
        """Return the ranks of a circle that called two operations in another order than most ranks of the job."""
        kinds: dict[OperationKind, str] = {}
        for key in points:
            point = self.points[key]
            if point.wait.record.peer is None:
                kinds.setdefault(self._kind(point), point.wait.record.op)
        found: set[int] = set()
        facts = []
        for first, second in combinations(sorted(kinds), 2):
            if first.description == second.description:
                continue
            orders = call_orders(self.snapshot, first, second)
            usual = usual_order(orders)
            rare = [rank for rank in ranks if rank in orders and orders[rank] != usual]
            if usual is None or not rare:
                continue
            found.update(rare)
            before, after = (first, second) if usual else (second, first)
            facts.append(
                f"{named(rare)} called {kinds[after]} {after.sequence} of {after.description} before "
                f"{kinds[before]} {before.sequence} of {before.description}; "
                f"{sum(order == usual for order in orders.values()):,} ranks call them in the other order"
            )
        return sorted(found), facts

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


def _reached(matrix: csr_array, starts: Iterable[int]) -> set[int]:
    """Return the nodes of a graph that can be reached from some of its nodes, with these."""
    found = set(starts)
    front = list(found)
    while front:
        node = front.pop()
        for target in matrix.indices[matrix.indptr[node] : matrix.indptr[node + 1]].tolist():
            if target not in found:
                found.add(target)
                front.append(target)
    return found


def _key(wait: RankWait) -> tuple[int, ...]:
    """Return a key that all waits in one operation share."""
    one = wait.record
    if one.peer is None:
        return wait.view, one.sequence
    pair = (one.peer, wait.rank) if one.op == "recv" else (wait.rank, one.peer)
    return (wait.view, *pair, one.sequence if one.channel is None else one.channel)


def _counterpart(one: Collective, own: Sequence[Collective], others: Sequence[Collective]) -> Collective | None:
    """Return the matching send or receive, by channel number, or by queue position without one."""
    if one.channel is not None:
        return next((other for other in others if other.channel == one.channel), None)
    queue = [record for record in own if record.state in ("scheduled", "started")]
    waiting = [record for record in others if record.state in ("scheduled", "started")]
    place = queue.index(one)
    return waiting[place] if place < len(waiting) else None


def _merged(causes: list[RootCause]) -> list[RootCause]:
    """Merge causes that blame the same ranks of the same communicator; keep the longest wait."""
    seen = set()
    kept = []
    for cause in sorted(causes, key=lambda one: -(one.waited_s or 0.0)):
        key = cause.kind, cause.ranks, cause.communicator and cause.communicator.name
        if key not in seen:
            seen.add(key)
            kept.append(cause)
    return kept
