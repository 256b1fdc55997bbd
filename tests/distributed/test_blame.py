"""Who is to blame for a hang or slowness: simulated incidents, healthy jobs, and what must not change a verdict."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from _blame_incidents import FAULTS, SHAPES, FaultName, JobShape, healthy, incident
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.distributed.tracing.blame import blame
from cordillera.distributed.tracing.cause_text import describe
from cordillera.distributed.tracing.causes import Blame, named
from cordillera.distributed.tracing.rank_trace import Collective, PeerProgress, RankTrace, TracedCommunicator
from cordillera.errors import DataError

KIND = {
    "dead": {"RANK_PROCESS_DEAD", "RANK_UNRESPONSIVE"},
    "outside": {"RANK_NOT_JOINED"},
    "mismatch": {"METADATA_MISMATCH"},
    "swap": {"COLLECTIVE_DEADLOCK"},
    "link": {"NETWORK_STUCK"},
    "sender": {"SENDER_STUCK"},
    "slow": {"SLOW_RANK"},
    "slow-link": {"NETWORK_SLOW"},
}
SECOND = 1_000_000_000
TINY = JobShape(2, 2, 4)

names = st.sampled_from(FAULTS)
seeds = st.integers(0, 10_000)


def shape_of(size: int, seed: int) -> JobShape:
    return SHAPES[size][seed % len(SHAPES[size])]


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", FAULTS)
def test_the_culprit_of_one_fault_is_found(name: FaultName) -> None:
    for seed in range(3):
        made = incident(shape_of(64, seed), (name,), seed)
        found = blame(made.traces)
        assert made.culprits
        assert found.culprits == made.culprits
        assert {cause.kind for cause in found.causes} <= KIND[name]
        assert all(cause.certain for cause in found.causes)
        assert len(describe(found)) >= len(found.causes)


@pytest.mark.slow
def test_the_culprits_of_200_incidents_are_exact_in_19_of_20() -> None:
    exact = dict.fromkeys(FAULTS, 0)
    runs = [(name, seed) for seed in range(29) for name in FAULTS][:200]
    for name, seed in runs:
        made = incident(shape_of(512 if seed % 10 == 0 else 64, seed), (name,), seed)
        exact[name] += blame(made.traces).culprits == made.culprits
    assert sum(exact.values()) >= 0.95 * len(runs), exact


@pytest.mark.slow
def test_200_healthy_jobs_have_no_verdict() -> None:
    for seed in range(200):
        found = blame(healthy(shape_of(512 if seed % 10 == 0 else 64, seed), seed).traces)
        assert found.causes == ()
        assert found.victims == ()


def test_a_healthy_job_has_no_verdict() -> None:
    for seed in range(6):
        found = blame(healthy(shape_of(64, seed), seed).traces)
        assert (found.causes, found.victims, found.notes) == ((), (), ())
        assert describe(found) == ["no rank is to blame: none of 64 ranks waits longer than a working job does"]


def test_two_faults_are_both_found() -> None:
    pairs = list(itertools.combinations([name for name in FAULTS if name not in ("swap", "slow", "slow-link")], 2))
    made = [incident(shape_of(64, seed), pair, 50 + seed) for seed, pair in enumerate(pairs)]
    both = [one for one in made if len(one.faults) == 2]
    assert len(both) >= 4
    assert sum(blame(one.traces).culprits == one.culprits for one in both) >= len(both) - 1


@given(name=names, seed=seeds)
@settings(max_examples=15)
def test_without_the_fault_there_is_no_verdict(name: FaultName, seed: int) -> None:
    assert blame(incident(TINY, (name,), seed, remove=True).traces).causes == ()


@given(name=names, seed=seeds, order=st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_other_numbers_of_ranks_change_only_the_numbers(name: FaultName, seed: int, order: random.Random) -> None:
    made = incident(TINY, (name,), seed)
    numbers = list(range(TINY.ranks))
    order.shuffle(numbers)
    new = [_renumbered(trace, numbers) for trace in made.traces]
    order.shuffle(new)
    before, after = blame(made.traces), blame(new)
    assert after.culprits == {numbers[rank] for rank in before.culprits}
    assert [cause.kind for cause in before.causes] == [cause.kind for cause in after.causes]
    assert sorted(numbers[rank] for rank in before.victims) == list(after.victims)


@given(name=names, seed=seeds, size=st.sampled_from((2, 4, 8)))
@settings(max_examples=15)
def test_communicators_that_work_change_nothing(name: FaultName, seed: int, size: int) -> None:
    made = incident(TINY, (name,), seed)
    assert blame([_with_others(trace, size) for trace in made.traces]).culprits == blame(made.traces).culprits


@given(name=names, seed=seeds, skews=st.lists(st.integers(-(10**15), 10**15), min_size=TINY.ranks, max_size=TINY.ranks))
@settings(max_examples=10)
def test_clocks_of_ranks_may_differ_by_days(name: FaultName, seed: int, skews: list[int]) -> None:
    made = incident(TINY, (name,), seed)
    assert _said(blame([_shifted(trace, skews[trace.rank]) for trace in made.traces])) == _said(blame(made.traces))


def _said(found: Blame) -> Any:
    return found.culprits, [cause.kind for cause in found.causes], found.victims


def _changed(trace: RankTrace, change: Callable[[Collective], Collective], **others: Any) -> RankTrace:
    return replace(trace, collectives=tuple(map(change, trace.collectives)), **others)


def _renumbered(trace: RankTrace, numbers: list[int]) -> RankTrace:
    return _changed(
        trace,
        lambda one: replace(
            one,
            peer=None if one.peer is None else numbers[one.peer],
            root=None if one.root is None else numbers[one.root],
            peers=tuple(replace(peer, peer=numbers[peer.peer]) for peer in one.peers),
        ),
        rank=numbers[trace.rank],
        communicators=tuple(
            replace(one, ranks=tuple(numbers[rank] for rank in one.ranks)) for one in trace.communicators
        ),
    )


def _with_others(trace: RankTrace, size: int) -> RankTrace:
    first = trace.rank // size * size
    group = TracedCommunicator(f"ep-{first}", "ep", tuple(range(first, first + size)))
    begin = min((one.enqueued_ns for one in trace.collectives), default=10 * SECOND) - SECOND
    extra = [
        Collective(
            group.name, number, "all_gather", state="completed", enqueued_ns=begin + number, ended_ns=begin + number
        )
        for number in range(1, 4)
    ]
    return replace(trace, communicators=(*trace.communicators, group), collectives=(*extra, *trace.collectives))


def _shifted(trace: RankTrace, skew: int) -> RankTrace:
    skew += 2 * 10**15

    def later(time: int | None) -> int | None:
        return None if time is None else time + skew

    return _changed(
        trace,
        lambda one: replace(
            one, enqueued_ns=one.enqueued_ns + skew, started_ns=later(one.started_ns), ended_ns=later(one.ended_ns)
        ),
        written_ns=later(trace.written_ns),
    )


# Small jobs, by hand.

PAIR = TracedCommunicator("0", "default_pg", (0, 1))
THREE = TracedCommunicator("1", "tp", (0, 1, 2))


def waits(group: TracedCommunicator, sequence: int = 1, op: str = "all_reduce", **others: Any) -> Collective:
    sizes = {"input_sizes": ((4,),), "output_sizes": ((4,),), "input_dtypes": ("Float",), "output_dtypes": ("Float",)}
    return Collective(group.name, sequence, op, **{**sizes, "enqueued_ns": SECOND, **others})


def trace(
    rank: int, *records: Collective, groups: tuple[TracedCommunicator, ...] = (PAIR,), **others: Any
) -> RankTrace:
    return RankTrace(rank, **{"written_ns": 500 * SECOND, "communicators": groups, "collectives": records, **others})


def only(found: Blame) -> Any:
    assert len(found.causes) == 1, found.causes
    return found.causes[0]


def test_who_has_not_joined_is_blamed_and_not_who_waits() -> None:
    cause = only(blame([trace(0, waits(PAIR)), trace(1)]))
    assert (cause.kind, cause.ranks, cause.waiting, cause.waited_s) == ("RANK_NOT_JOINED", (1,), 1, 499.0)


def test_a_rank_that_never_made_the_communicator_is_stuck_in_init() -> None:
    assert only(blame([trace(0, waits(PAIR)), trace(1, groups=())])).kind == "STUCK_IN_INIT"


def test_a_short_wait_is_none() -> None:
    assert blame([trace(0, waits(PAIR), written_ns=30 * SECOND), trace(1)]).causes == ()
    found = blame([trace(0, waits(PAIR), written_ns=30 * SECOND), trace(1)], stalled_after_s=10)
    assert found.culprits == {1}


def test_half_of_the_timeout_is_a_stall() -> None:
    assert blame([trace(0, waits(PAIR, timeout_ms=40_000), written_ns=30 * SECOND), trace(1)]).culprits == {1}


def test_the_dead_and_the_failed_are_blamed_although_nobody_waits() -> None:
    found = blame([trace(0, status="died"), trace(1, error="CUDA error: out of memory")])
    assert {cause.kind for cause in found.causes} == {"RANK_PROCESS_DEAD", "RANK_ERROR"}
    assert "out of memory" in " ".join(describe(found))


def test_an_error_of_a_rank_that_waits_for_a_dead_one_follows_from_it() -> None:
    found = blame([trace(0, waits(PAIR), error="connection reset by peer"), trace(1, status="died")])
    assert found.culprits == {1}


def test_of_two_forms_the_rarer_is_wrong_and_of_two_ranks_none_is_known() -> None:
    groups = (THREE,)
    right = [trace(rank, waits(THREE), groups=groups) for rank in (0, 1)]
    cause = only(blame([*right, trace(2, waits(THREE, input_sizes=((5,),)), groups=groups)]))
    assert (cause.kind, cause.ranks, cause.certain) == ("METADATA_MISMATCH", (2,), True)
    cause = only(blame([trace(0, waits(PAIR)), trace(1, waits(PAIR, op="broadcast"))]))
    assert (cause.ranks, cause.certain) == ((0, 1), False)
    assert "one or more of ranks 0 and 1" in describe(blame([trace(0, waits(PAIR)), trace(1, waits(PAIR, op="x"))]))[0]


def test_other_shapes_of_as_many_elements_agree() -> None:
    shapes = [waits(PAIR), waits(PAIR, input_sizes=((2, 2),), output_sizes=((2, 2),))]
    assert only(blame([trace(0, shapes[0]), trace(1, shapes[1])])).kind == "STUCK_INSIDE"


def test_uneven_exchanges_agree_if_what_is_sent_is_expected() -> None:
    def exchange(sends: tuple[int, int], gets: tuple[int, int], **others: Any) -> Collective:
        return waits(PAIR, op="all_to_all", input_splits=sends, output_splits=gets, **others)

    right = [trace(0, exchange((1, 2), (1, 3))), trace(1, exchange((3, 4), (2, 4)))]
    assert only(blame(right)).kind == "STUCK_INSIDE"
    wrong = only(blame([right[0], trace(1, exchange((3, 4), (9, 4)))]))
    assert (wrong.kind, wrong.certain) == ("METADATA_MISMATCH", False)
    assert "0 sends 2 elements to 1, which expects 9" in wrong.facts[0]
    sizes = [trace(0, waits(PAIR, op="all_to_all", input_sizes=((7,),))), trace(1, waits(PAIR, op="all_to_all"))]
    unknown = only(blame(sizes))
    assert (unknown.kind, unknown.ranks) == ("METADATA_MISMATCH", ())


def test_another_root_is_a_mismatch() -> None:
    groups = (THREE,)
    traces = [trace(rank, waits(THREE, op="broadcast", root=int(rank == 1)), groups=groups) for rank in range(3)]
    assert only(blame(traces)).ranks == (1,)


def test_a_mismatch_that_did_not_hang_is_told() -> None:
    done = {"state": "completed", "ended_ns": 2 * SECOND}
    found = only(blame([trace(0, waits(PAIR, **done)), trace(1, waits(PAIR, input_dtypes=("Half",), **done))]))
    assert (found.kind, found.waiting) == ("METADATA_MISMATCH", 0)


def test_two_orders_of_two_communicators_are_a_deadlock() -> None:
    other = TracedCommunicator("2", "dp", (0, 1))
    groups = (PAIR, other)
    cause = only(blame([trace(0, waits(PAIR), groups=groups), trace(1, waits(other), groups=groups)]))
    assert (cause.kind, cause.ranks, cause.certain, sorted(cause.circle)) == (
        "COLLECTIVE_DEADLOCK",
        (0, 1),
        False,
        [0, 1],
    )
    assert "waits in all_reduce 1 of" in cause.facts[0]


def test_two_that_send_first_are_a_deadlock() -> None:
    def message(op: str, peer: int) -> Collective:
        return waits(PAIR, op=op, peer=peer, channel=0)

    assert only(blame([trace(0, message("send", 1)), trace(1, message("send", 0))])).kind == "COLLECTIVE_DEADLOCK"
    # One of them has called both operations, as a batch: then nothing is missing but the message itself.
    assert only(blame([trace(0, message("send", 1)), trace(1, message("recv", 0))])).kind == "STUCK_INSIDE"


def test_a_message_of_another_size_is_a_mismatch() -> None:
    send = waits(PAIR, op="send", peer=1, channel=3, input_sizes=((9,),))
    cause = only(blame([trace(0, send), trace(1, waits(PAIR, op="recv", peer=0, channel=3))]))
    assert (cause.kind, cause.certain) == ("METADATA_MISMATCH", False)


@pytest.mark.parametrize(
    ("sender", "receiver", "kind", "ranks"),
    [
        (PeerProgress(1, 3, 3, 0), PeerProgress(0, 0, 0, 2), "NETWORK_STUCK", (0, 1)),
        (PeerProgress(1, 3, 2, 0), PeerProgress(0, 0, 0, 2), "SENDER_STUCK", (0,)),
        (PeerProgress(1, 3, 3, 0), PeerProgress(0, 0, 0, 3), "STUCK_INSIDE", ()),
    ],
)
def test_where_a_message_stopped_tells_who_holds_it(
    sender: PeerProgress, receiver: PeerProgress, kind: str, ranks: tuple[int, ...]
) -> None:
    cause = only(blame([trace(0, waits(PAIR, peers=(sender,))), trace(1, waits(PAIR, peers=(receiver,)))]))
    assert (cause.kind, cause.ranks) == (kind, ranks)


def test_a_rank_outside_of_operations_waits_for_none() -> None:
    other = TracedCommunicator("2", "dp", (0, 1))
    groups = (PAIR, other)
    traces = [trace(0, waits(PAIR), groups=groups), trace(1, waits(other), groups=groups, inside=False)]
    assert only(blame(traces)).ranks == (1,)


def test_a_missing_trace_is_blamed_only_if_nothing_else_explains_its_silence() -> None:
    assert only(blame([trace(0, waits(PAIR))])).kind == "RANK_UNRESPONSIVE"
    other = TracedCommunicator("2", "dp", (1, 2))
    found = blame([trace(0, waits(THREE), groups=(THREE,)), trace(2, groups=(THREE, other))])
    assert found.culprits == {2}
    assert "rank 1 left no trace: whether to blame, cannot be told from these traces" in found.notes


def test_what_traces_lack_is_said() -> None:
    found = blame([trace(0, waits(PAIR), written_ns=None), trace(1)])
    assert found.causes == ()
    assert any("how long these ranks have waited cannot be told" in note for note in found.notes)
    assert any("slow ranks cannot be told" in note for note in found.notes)


def test_unequal_work_that_is_recorded_is_not_slowness() -> None:
    def traces(works: tuple[float | None, ...]) -> list[RankTrace]:
        found = []
        for rank, work in enumerate(works):
            step = 600_000_000 if rank == 2 else 300_000_000
            records = [
                waits(THREE, number, state="completed", enqueued_ns=number * SECOND + step, work=work)
                for number in range(1, 9)
            ]
            records = [replace(one, ended_ns=(one.sequence + 1) * SECOND) for one in records]
            found.append(trace(rank, *records, groups=(THREE,), written_ns=10 * SECOND))
        return found

    assert blame(traces((1.0, 1.0, 2.0))).causes == ()
    slow = only(blame(traces((1.0, 1.0, 1.0))))
    assert (slow.kind, slow.ranks) == ("SLOW_RANK", (2,))
    assert 1.9 < slow.factor < 2.1
    assert "work was not recorded" in only(blame(traces((None, None, None)))).facts[0]


def test_a_slow_network_is_told_without_the_connection_if_messages_have_no_times() -> None:
    made = incident(SHAPES[64][0], ("slow-link",), 3)
    (fault,) = made.faults
    assert fault.how != "pp"
    bare = [_changed(trace, lambda one: replace(one, peers=())) for trace in made.traces]
    cause = only(blame(bare))
    assert (cause.kind, cause.ranks, cause.certain) == ("NETWORK_SLOW", (), False)
    assert {fault.rank, fault.other} <= set(cause.communicator.ranks)


def test_traces_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(DataError, match="there are no traces"):
        blame([])
    with pytest.raises(DataError, match="rank 1 has two traces"):
        blame([trace(1), trace(1)])
    with pytest.raises(DataError, match="which it does not list"):
        blame([trace(0, waits(THREE))])
    with pytest.raises(DataError, match="is not a time"):
        blame([trace(0)], stalled_after_s=float("nan"))


def test_ranks_are_named_in_ranges() -> None:
    assert named([3]) == "rank 3"
    assert named([3, 2]) == "ranks 2 and 3"
    assert named([0, 1, 2, 3, 9, 5]) == "ranks 0-3, 5, 9"
    assert named(range(0, 100, 2), most=2) == "ranks 0, 2 and 48 others"


def test_who_is_waited_for_and_has_just_begun_to_wait_passes_the_blame_on() -> None:
    other = TracedCommunicator("2", "dp", (1, 2))
    late = waits(other, enqueued_ns=499 * SECOND)
    traces = [trace(0, waits(PAIR)), trace(1, late, groups=(PAIR, other)), trace(2, groups=(other,))]
    assert only(blame(traces)).ranks == (2,)


def test_messages_without_numbers_are_compared_in_the_order_of_their_queue() -> None:
    def message(op: str, peer: int, size: int, **others: Any) -> Collective:
        return waits(PAIR, op=op, peer=peer, input_sizes=((size,),), output_sizes=((size,),), **others)

    sends = [message("send", 1, 4, sequence=1), message("send", 1, 5, sequence=2)]
    gets = [message("recv", 0, 4, sequence=4), message("recv", 0, 5, sequence=5)]
    assert {cause.kind for cause in blame([trace(0, *sends), trace(1, *gets)]).causes} == {"STUCK_INSIDE"}
    found = blame([trace(0, sends[0]), trace(1)])
    assert only(found).ranks == (1,)
    assert "messages are not numbered: one that was lost cannot be told from one that was not sent" in found.notes
