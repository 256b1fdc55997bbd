"""The traces of all ranks, indexed by communicator and number of the operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cordillera.distributed.tracing.metadata import needs_all
from cordillera.distributed.tracing.rank_trace import Collective, RankTrace, TracedCommunicator
from cordillera.distributed.tracing.slow_ranks import OwnTime
from cordillera.errors import DataError

_STALL_FACTOR, _LEAST_STALL_NS, _STALL_WITHOUT_HISTORY_NS = 10, 1_000_000_000, 60_000_000_000
_IN_FLIGHT = ("scheduled", "started")


@dataclass
class CommunicatorView:
    """Records of all ranks on one communicator.

    Attributes:
        communicator: Its name, description and members.
        members: Its members; those that used it, if no trace names them.
        heads: Number of the newest collective that each rank has called.
        collectives: Collectives by their number and rank.
        messages: Point-to-point operations by sender, receiver and whether they receive, in the order of their calls,
            with the rank that called them.
        makers: Ranks whose traces list the communicator.
    """

    communicator: TracedCommunicator
    members: set[int]
    heads: dict[int, int] = field(default_factory=dict)
    collectives: dict[int, dict[int, Collective]] = field(default_factory=lambda: defaultdict(dict))
    messages: dict[tuple[int, int, bool], list[Collective]] = field(default_factory=lambda: defaultdict(list))
    makers: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class RankWait:
    """Operation that a rank waits in.

    Attributes:
        rank: Rank that waits.
        view: Number of the communicator.
        record: The operation.
        seconds: How long it waits.
    """

    rank: int
    view: int
    record: Collective
    seconds: float


class Snapshot:
    """Traces of the ranks of a job.

    Args:
        traces: One trace a rank.
        stalled_after_s: Seconds after which a wait is a stall; None takes ten times the longest time between two calls
            and the longest completed wait of any rank, at least 1 s, or 60 s if there is neither, and at most half of
            the operation's own timeout.

    Attributes:
        traces: Traces by rank.
        views: Communicators.
        of_rank: Numbers of the communicators of each rank, by their name.
        members: All ranks that a communicator or a trace names.
        absent: Members without a trace.
        without_times: Whether no operation has the time of its end.

    Raises:
        DataError: If there are no traces, or two of one rank.
    """

    def __init__(self, traces: Iterable[RankTrace], stalled_after_s: float | None = None) -> None:
        self.traces: dict[int, RankTrace] = {}
        for trace in traces:
            if trace.rank in self.traces:
                raise DataError(f"rank {trace.rank} has two traces", where="traces")
            self.traces[trace.rank] = trace
        if not self.traces:
            raise DataError("there are no traces", where="traces")
        if stalled_after_s is not None and not 0 <= stalled_after_s < float("inf"):
            raise DataError(f"{stalled_after_s} is not a time in seconds", where="stalled_after_s")
        self.stalled_after_s = stalled_after_s
        self.views: list[CommunicatorView] = []
        self.of_rank: dict[int, dict[str, int]] = {}
        self._index_communicators()
        longest, self.without_times = 0, True
        for trace in self.traces.values():
            longest = max(longest, self._index_collectives(trace))
        self.longest_ns = longest
        self.members = set(self.traces).union(*(view.members for view in self.views))
        self.absent = self.members - set(self.traces)

    def _index_communicators(self) -> None:
        by_key: dict[tuple[str, str, tuple[int, ...]], int] = {}
        by_object: dict[tuple[str, int], int] = {}  # equal members are mostly one object, and long to hash
        for rank, trace in self.traces.items():
            own = self.of_rank[rank] = {}
            for one in trace.communicators:
                quick = one.name, id(one.ranks)
                number = by_object.get(quick)
                if number is None:
                    described = "" if one.ranks else one.description
                    number = by_key.setdefault((one.name, described, one.ranks), len(self.views))
                    if number == len(self.views):
                        self.views.append(CommunicatorView(one, set(one.ranks)))
                    if one.ranks:
                        by_object[quick] = number
                view = self.views[number]
                if not one.ranks:
                    view.members.add(rank)
                view.makers.add(rank)
                own[one.name] = number

    def _index_collectives(self, trace: RankTrace) -> int:
        """Index a rank's operations and return its longest wait or time between calls, in nanoseconds."""
        longest, before, rank = 0, None, trace.rank
        own = self.of_rank[rank]
        for one in trace.collectives:
            number = own.get(one.communicator)
            if number is None:
                raise DataError(
                    f"has an operation of {one.communicator!r}, which it does not list", where=f"trace of rank {rank}"
                )
            view = self.views[number]
            if one.peer is None:
                view.collectives[one.sequence][rank] = one
                if one.sequence >= view.heads.get(rank, 0):
                    view.heads[rank] = one.sequence
            else:
                receives = one.op == "recv"
                view.messages[(one.peer, rank, True) if receives else (rank, one.peer, False)].append(one)
            if one.ended_ns is not None:
                self.without_times = False
                longest = max(longest, one.ended_ns - one.enqueued_ns)
            if before is not None:
                longest = max(longest, one.enqueued_ns - before)
            before = one.enqueued_ns
        return longest

    def _stall_ns(self, one: Collective) -> float:
        if self.stalled_after_s is not None:
            return 1e9 * self.stalled_after_s
        default: float = (
            max(_STALL_FACTOR * self.longest_ns, _LEAST_STALL_NS) if self.longest_ns else (_STALL_WITHOUT_HISTORY_NS)
        )
        return min(default, 5e5 * one.timeout_ms) if one.timeout_ms else default

    def stalled(self) -> Iterator[RankWait]:
        """Yield the operations in which ranks wait for too long.

        An operation that is over without saying how (``ended``) counts as one if it needs a member that has not called
        it, because then it failed.
        """
        for rank in self.traces:
            for wait in self.waits_of(rank):
                if 1e9 * wait.seconds > self._stall_ns(wait.record):
                    yield wait

    def waits_of(self, rank: int) -> Iterator[RankWait]:
        """Yield the operations in which a rank waits, for however short."""
        trace = self.traces.get(rank)
        if trace is None or trace.written_ns is None or trace.inside is False:
            return
        for one in trace.collectives:
            if one.state == "completed":
                continue
            number = self.of_rank[rank][one.communicator]
            if one.state != "ended" or self._failed(one, self.views[number]):
                yield RankWait(rank, number, one, (trace.written_ns - one.enqueued_ns) / 1e9)

    def _failed(self, one: Collective, view: CommunicatorView) -> bool:
        """Return whether an operation that is over needed a member that has not called it."""
        if one.peer is not None or not needs_all(one):
            return False
        return any(
            view.heads[rank] < one.sequence if rank in view.heads else self._is_whole(rank) for rank in view.members
        )

    def _is_whole(self, rank: int) -> bool:
        """Return whether a rank's trace has all of its operations."""
        trace = self.traces.get(rank)
        return trace is not None and not trace.dropped

    def last_ended(self, rank: int) -> Collective | None:
        """Return a rank's newest operation that is over, or None."""
        trace = self.traces.get(rank)
        over = [one for one in trace.collectives if one.state not in _IN_FLIGHT] if trace else []
        return over[-1] if over else None

    def siblings(self, number: int, sequence: int) -> Iterator[Collective]:
        """Yield the collectives of a number in other communicators of the same description and size."""
        view = self.views[number]
        for other, one in enumerate(self.views):
            same = one.communicator.description == view.communicator.description
            if other != number and same and len(one.members) == len(view.members):
                yield from one.collectives.get(sequence, {}).values()

    def own_times(self) -> dict[int, dict[int, dict[int, OwnTime]]]:
        """Return each rank's time from the end of its previous operation to the next call.

        The keys are communicator, number of the collective, and rank. Communicators whose members have different parts
        in the job, as the stages of a pipeline, are left out.
        """
        found: dict[int, dict[int, dict[int, OwnTime]]] = defaultdict(lambda: defaultdict(dict))
        places: dict[int, dict[int, int]] = {}
        roles = {rank: self._role(trace, places) for rank, trace in self.traces.items()}
        usable = [len({roles.get(rank) for rank in view.members}) == 1 for view in self.views]
        for rank, trace in self.traces.items():
            own, end = self.of_rank[rank], None
            called: dict[int, int] = {}
            for one in trace.collectives:
                number = own[one.communicator]
                if end is not None and one.peer is None and usable[number]:
                    interval = float(one.enqueued_ns - called[number]) if number in called else None
                    found[number][one.sequence][rank] = OwnTime(
                        max(0.0, float(one.enqueued_ns - end)), one.work, interval
                    )
                called[number] = one.enqueued_ns
                if one.ended_ns is None:
                    break
                end = one.ended_ns if end is None else max(end, one.ended_ns)
        return found

    def _role(self, trace: RankTrace, places: dict[int, dict[int, int]]) -> frozenset[tuple[str, str, bool]]:
        """Return the kinds of operations of a rank, and whether messages go to or come from later members."""
        own, found = self.of_rank[trace.rank], set()
        for one in trace.collectives:
            number = own[one.communicator]
            view, later = self.views[number], False
            if one.peer is not None:
                if number not in places:
                    places[number] = {rank: at for at, rank in enumerate(view.communicator.ranks)}
                place = places[number]
                later = place.get(one.peer, one.peer) > place.get(trace.rank, trace.rank)
            found.add((view.communicator.description, one.op, later))
        return frozenset(found)
