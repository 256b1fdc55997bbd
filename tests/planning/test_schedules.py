"""Schedules: valid for any size, equal to torch's where torch has them, and with the memory that theory gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.errors import PlanError
from cordillera.planning.pipeline.greedy import greedy
from cordillera.planning.pipeline.schedules import (
    Action,
    Kind,
    Schedule,
    breadth_first,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    warmup_for_latency,
    zero_bubble,
    zero_bubble_v,
)
from cordillera.planning.pipeline.simulator import StageSeconds, Way, simulate

Make = Callable[[int, int], Schedule]

FAMILIES: dict[str, Make] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "1f1b ahead": lambda p, m: one_forward_one_backward(p, m, [p - 1 - r for r in range(p)]),
    "interleaved": lambda p, m: interleaved(p, m, 3),
    "interleaved by larger groups": lambda p, m: interleaved(p, m, 2, p + 1),
    "breadth first": lambda p, m: breadth_first(p, m, 2),
    "zero bubble H1": zero_bubble,
    "zero bubble H2": lambda p, m: zero_bubble(p, m, 2),
    "zero bubble ahead": lambda p, m: zero_bubble(p, m, 1, [2 * (p - 1 - rank) for rank in range(p)]),
    "ZBV": zero_bubble_v,
    "DualPipeV": lambda p, m: dual_pipe_v(p, m + 2 * p),
    "greedy": lambda p, m: greedy(range(p), m, {Kind.FORWARD: 1.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}),
}


@pytest.mark.parametrize("family", FAMILIES)
@given(ranks=st.integers(1, 9), microbatches=st.integers(1, 24))
@settings(max_examples=40)
def test_every_size_is_valid(family: str, ranks: int, microbatches: int) -> None:
    schedule = FAMILIES[family](ranks, microbatches)
    schedule.check()
    assert schedule.ranks == ranks
    assert len(schedule.linear_order()) == sum(map(len, schedule.actions))
    assert all(schedule.live(rank)[-1] == 0 for rank in range(ranks))


@pytest.mark.parametrize("family", FAMILIES)
@given(ranks=st.integers(1, 9), microbatches=st.integers(1, 24))
@settings(max_examples=20)
def test_forwards_alone_can_be_done_for_any_number_of_microbatches(family: str, ranks: int, microbatches: int) -> None:
    schedule = FAMILIES[family](ranks, 2 * ranks)
    forwards = schedule.forwards(microbatches)
    forwards.check()
    assert forwards.only_forward
    assert not schedule.only_forward
    assert forwards.rank_of == schedule.rank_of
    assert len(list(forwards)) == microbatches * schedule.stages


@pytest.mark.parametrize("family", FAMILIES)
def test_a_schedule_survives_its_own_notation(family: str) -> None:
    schedule = FAMILIES[family](3, 7)
    again = Schedule.from_csv(schedule.to_csv(), schedule.name)
    assert (again.actions, again.rank_of, again.microbatches) == (
        schedule.actions,
        schedule.rank_of,
        schedule.microbatches,
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("ZBVZeroBubble", zero_bubble_v),
        ("DualPipeV", dual_pipe_v),
        ("Interleaved1F1B", lambda p, m: interleaved(p, m, 2)),
        ("LoopedBFS", lambda p, m: breadth_first(p, m, 2)),
    ],
)
def test_schedules_are_those_of_torch(name: str, make: Make) -> None:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    for ranks in (1, 2, 3, 4, 6):
        for microbatches in (2 * ranks, 3 * ranks, 4 * ranks + (ranks if name != "Interleaved1F1B" else 0)):
            lists = visualizer.get_schedule_ops(name, ranks, microbatches, 2)
            theirs = [",".join(str(action) for action in actions if action is not None) for actions in lists]
            assert make(ranks, microbatches).to_csv().splitlines() == theirs


@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 20))
@settings(max_examples=60)
def test_memory_is_what_theory_gives(ranks: int, microbatches: int) -> None:
    for rank in range(ranks):
        assert gpipe(ranks, microbatches).peak(rank) == microbatches
        assert one_forward_one_backward(ranks, microbatches).peak(rank) == min(microbatches, ranks - rank)
        assert zero_bubble(ranks, microbatches).peak(rank) <= ranks
        assert zero_bubble(ranks, microbatches, 2).peak(rank) <= 2 * ranks - 1
        assert zero_bubble_v(ranks, microbatches).peak(rank) <= 2 * ranks  # halves of a stage: the memory of 1F1B


def test_interleaving_one_chunk_is_1f1b() -> None:
    assert interleaved(4, 10, 1).actions == one_forward_one_backward(4, 10).actions


def test_groups_make_every_order_between_depth_and_breadth_first() -> None:
    by_group = {group: interleaved(4, 16, 2, group).peak(0) for group in (4, 8, 16)}
    assert by_group == {4: 11, 8: 15, 16: 23}
    with pytest.raises(PlanError, match="smaller than the pipeline"):
        interleaved(4, 16, 2, 3)


def test_warmup_is_rounded_up_at_each_boundary() -> None:
    assert warmup_for_latency([0.0, 0.0, 0.0], 1, 2) == [0, 0, 0, 0]
    assert warmup_for_latency([0.0, 2.0, 0.0], 1, 2) == [2, 2, 0, 0]  # ceil(4 / 3)
    assert warmup_for_latency([1.7, 1.7], 1, 2) == [4, 2, 0]
    assert warmup_for_latency([1.5], 1, 2) == [1, 0]  # exactly one period


@pytest.mark.parametrize("backward", [2, 4])
@pytest.mark.parametrize("latencies", [[1.7] * 5, [1.7, 0, 1.7, 0, 1.7], [0.4] * 5])
def test_one_forward_fewer_costs_time_if_microbatches_are_many(backward: int, latencies: list[float]) -> None:
    def seconds(microbatches: int, extra: list[int]) -> float:
        schedule = one_forward_one_backward(6, microbatches, extra)
        work = StageSeconds.equal(6, 1, backward)
        return simulate(schedule, work, lambda a, b: Way(latencies[min(a, b)])).seconds

    extra = warmup_for_latency(latencies, 1, backward)
    fewer = [[*extra[:at], extra[at] - 1, *extra[at + 1 :]] for at in range(5) if extra[at] > extra[at + 1]]
    assert fewer
    assert all(seconds(400, one) > seconds(400, extra) + 1 for one in fewer)
    assert seconds(400, extra) == pytest.approx((400 + 5) * (1 + backward) + 2 * sum(latencies))


def test_few_microbatches_may_do_with_fewer_forwards() -> None:
    schedules = [one_forward_one_backward(6, 24, extra) for extra in ([10, 8, 6, 4, 2, 0], [9, 8, 6, 4, 2, 0])]
    assert warmup_for_latency([1.7] * 5, 1, 2) == [10, 8, 6, 4, 2, 0]
    most, fewer = (simulate(one, StageSeconds.equal(6, 1, 2), lambda a, b: Way(1.7)).seconds for one in schedules)
    assert fewer == most


def test_a_warmup_that_would_block_is_refused() -> None:
    with pytest.raises(PlanError, match="never grows"):
        one_forward_one_backward(3, 8, [0, 1, 0])


@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward, zero_bubble, zero_bubble_v])
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 2)])
def test_no_ranks_and_no_microbatches_are_refused(make: Make, sizes: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="too few"):
        make(*sizes)


def broken(*ranks: str) -> Schedule:
    actions = tuple(tuple(Action(Kind(word[1]), int(word[0]), int(word[2])) for word in rank.split()) for rank in ranks)
    return Schedule("broken", 1, tuple(range(len(ranks))), actions)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (broken("0F0 0B0", "1F0"), "microbatch 0 of stage 1 has F"),
        (broken("0F0 0F0 0B0", "1F0 1B0"), "rank 0, action 0F0: it is done twice"),
        (broken("0F0 0B0", "1B0 1F0"), "ranks wait for one another: rank 0 for 0B0, rank 1 for 1B0"),
        (broken("0F0 0I0", "1F0 1B0"), "has F and I"),
        (broken("0F0", ""), "microbatch 0 of stage 1 has nothing"),
        (broken("0F0 0B0 1F0", "1B0"), "rank 0, action 1F0: the stage is on rank 1"),
        (broken("0F1 0B1"), "no such stage or microbatch"),
    ],
)
def test_a_broken_schedule_is_refused_by_name(schedule: Schedule, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        schedule.check()


@pytest.mark.parametrize(
    ("text", "message"),
    [("0F0,0X0\n", "line 1: '0X0' is not an action"), ("0F0,0B0\n2F0,2B0\n", "stages are missing"), ("", "missing")],
)
def test_a_broken_file_is_refused_by_place(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Schedule.from_csv(text)


@given(
    ranks=st.integers(1, 5),
    chunks=st.integers(1, 3),
    microbatches=st.integers(1, 9),
    room=st.integers(0, 6),
    latency=st.sampled_from([0.0, 0.4, 2.5]),
)
@settings(max_examples=60)
def test_greedy_keeps_its_limits(ranks: int, chunks: int, microbatches: int, room: int, latency: float) -> None:
    rank_of = [stage % ranks for stage in range(ranks * chunks)]
    limits = [microbatches * chunks - room] * ranks
    seconds = {Kind.FORWARD: 1.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}
    try:
        schedule = greedy(rank_of, microbatches, seconds, latencies=[latency] * (len(rank_of) - 1), limits=limits)
    except PlanError:
        assert room > 0  # forwards of an early chunk may take what later ones would need
        return
    schedule.check()
    assert all(schedule.peak(rank) <= limits[rank] for rank in range(ranks))
