"""The simulator against closed forms, a grid of a second simulator, and a brute-force replay."""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.errors import PlanError
from cordillera.planning.pipeline.schedules import (
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
from tests.planning.flows import Flow, finish_times, max_min_rates

P, M = 4, 16

TOY: list[Schedule] = [
    gpipe(P, M),
    one_forward_one_backward(P, M),
    interleaved(P, M, 2),
    interleaved(P, M, 4),
    breadth_first(P, M, 2),
    breadth_first(P, M, 4),
    zero_bubble_v(P, M),
    dual_pipe_v(P, M),
]

# Four ranks, sixteen microbatches, a slow boundary in the middle, in units of one forward of a whole rank; made by
# another simulator from torch's lists: (latency, transmission of one message) -> step time of each schedule above.
GRID = {
    (0, 0): [57.0, 57.0, 52.5, 50.25, 52.5, 50.25, 49.5, 51.0],
    (0.5, 0): [58.0, 65.0, 55.5, 60.75, 53.5, 51.25, 52.0, 58.5],
    (2, 0): [61.0, 89.0, 83.5, 129.75, 56.5, 57.25, 73.0, 85.0],
    (0.05, 0.25): [57.6, 61.8, 54.3, 54.45, 53.1, 50.85, 51.0, 55.3],
    (0.05, 1.0): [59.1, 73.8, 63.1, 91.25, 70.1, 131.1, 56.9, 68.9],
    (0.05, 2.0): [76.1, 89.8, 91.5, 160.35, 134.1, 259.1, 90.4, 102.4],
    (1.0, 0.25): [59.5, 77.0, 67.0, 95.25, 55.0, 52.75, 59.5, 71.5],
}


def equal_stages(schedule: Schedule, forward: float = 1.0, backward: float = 2.0) -> StageSeconds:
    chunks = schedule.stages // schedule.ranks
    return StageSeconds.equal(schedule.stages, forward / chunks, backward / chunks)


def boundary(after: int, latency: float, occupied: float = 0.0) -> Callable[[int, int], Way]:
    """Messages between ranks up to ``after`` and later ones are slow."""
    return lambda a, b: Way(latency, occupied) if (a <= after) != (b <= after) else Way()


@pytest.mark.parametrize("case", GRID)
def test_the_toy_grid_comes_out_exactly(case: tuple[float, float]) -> None:
    found = [simulate(one, equal_stages(one), boundary(1, *case)).seconds for one in TOY]
    assert found == pytest.approx(GRID[case], abs=1e-9)


@given(
    ranks=st.integers(1, 12),
    microbatches=st.integers(1, 40),
    forward=st.floats(0.1, 3),
    backward=st.floats(0.1, 5),
)
@settings(max_examples=80)
def test_closed_forms_without_latency(ranks: int, microbatches: int, forward: float, backward: float) -> None:
    expected = (microbatches + ranks - 1) * (forward + backward)
    for schedule in (gpipe(ranks, microbatches), one_forward_one_backward(ranks, microbatches)):
        timeline = simulate(schedule, equal_stages(schedule, forward, backward))
        assert timeline.seconds == pytest.approx(expected)
        assert timeline.busy.sum() / ranks == pytest.approx(microbatches * (forward + backward))


@given(ranks=st.integers(1, 6), rounds=st.integers(1, 5), chunks=st.integers(1, 4))
@settings(max_examples=40)
def test_interleaving_divides_the_bubble_by_the_chunks(ranks: int, rounds: int, chunks: int) -> None:
    schedule = interleaved(ranks, ranks * rounds, chunks)
    found = simulate(schedule, equal_stages(schedule)).seconds
    assert found == pytest.approx(3 * (ranks * rounds + (ranks - 1) / chunks))


@given(ranks=st.integers(1, 8), more=st.integers(0, 12))
@settings(max_examples=40)
def test_zero_bubble_schedules_keep_their_promise(ranks: int, more: int) -> None:
    microbatches = 2 * ranks + more
    for ahead in (1, 2):
        schedule = zero_bubble(ranks, microbatches, ahead)
        timeline = simulate(schedule, equal_stages(schedule))
        assert timeline.seconds == pytest.approx(3 * microbatches + ranks - 1)
        idle = [e[-1] - s[0] - b for s, e, b in zip(timeline.starts, timeline.ends, timeline.busy, strict=True)]
        assert idle == pytest.approx([(ranks - 1 - rank) if ahead == 1 else 0 for rank in range(ranks)])


@given(
    ranks=st.integers(2, 12),
    microbatches=st.integers(7, 48),
    where=st.integers(0, 10),
    latency=st.floats(0.5, 3.1),
)
@settings(max_examples=120)
def test_extra_warmup_hides_all_but_two_latencies(ranks: int, microbatches: int, where: int, latency: float) -> None:
    after = where % (ranks - 1)
    latencies = [latency if i == after else 0.0 for i in range(ranks - 1)]
    extra = warmup_for_latency(latencies, 1, 2)
    schedule = one_forward_one_backward(ranks, microbatches, extra)
    found = simulate(schedule, equal_stages(schedule), boundary(after, latency)).seconds
    assert found == pytest.approx((microbatches + ranks - 1) * 3 + 2 * latency)
    fewer = one_forward_one_backward(ranks, microbatches, [max(0, w - 1) for w in extra])
    if microbatches > ranks + extra[0]:
        assert simulate(fewer, equal_stages(fewer), boundary(after, latency)).seconds > found + 1e-9


@given(
    latencies=st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.7, 2.0]), min_size=1, max_size=6),
    microbatches=st.integers(20, 40),
)
@settings(max_examples=80)
def test_several_slow_boundaries_add_up(latencies: list[float], microbatches: int) -> None:
    ranks = len(latencies) + 1
    schedule = one_forward_one_backward(ranks, microbatches, warmup_for_latency(latencies, 1, 2))
    ways = {}
    for i, latency in enumerate(latencies):
        ways[i, i + 1] = ways[i + 1, i] = Way(latency)
    found = simulate(schedule, equal_stages(schedule), ways).seconds
    assert found == pytest.approx((microbatches + ranks - 1) * 3 + 2 * sum(latencies))


def test_a_slow_boundary_costs_1f1b_every_microbatch_and_gpipe_once() -> None:
    for microbatches in (8, 16, 32):
        g, o = gpipe(P, microbatches), one_forward_one_backward(P, microbatches)
        base = simulate(g, equal_stages(g)).seconds
        assert simulate(g, equal_stages(g), boundary(1, 2.0)).seconds == pytest.approx(base + 4)
        assert simulate(o, equal_stages(o), boundary(1, 2.0)).seconds == pytest.approx(base + 2 * microbatches)


def replay(schedule: Schedule, seconds: StageSeconds, way: Callable[[int, int], Way], step: float) -> float:
    """The same model by small steps of a clock: nothing is computed ahead of its time."""
    done: dict[tuple[Kind, int, int], float] = {}
    arrived: dict[tuple[tuple[Kind, int, int], int], float] = {}
    queues: dict[tuple[int, int], list[tuple[tuple[Kind, int, int], float]]] = {}
    busy_until: dict[tuple[int, int], float] = {}
    position, until = [0] * schedule.ranks, [0.0] * schedule.ranks
    running: list[tuple[Kind, int, int] | None] = [None] * schedule.ranks
    now = 0.0
    while len(done) < len(list(schedule)):
        for _ in range(2 * schedule.stages):  # what ends now may let others begin now
            for rank in range(schedule.ranks):
                item = running[rank]
                if item is not None and until[rank] <= now + 1e-9:
                    done[item] = now
                    running[rank] = None
                    kind, stage, _i = item
                    target = stage + 1 if kind is Kind.FORWARD else stage - 1
                    if kind is not Kind.WEIGHT and 0 <= target < schedule.stages:
                        other = schedule.rank_of[target]
                        if other == rank:
                            arrived[item, rank] = now
                        else:
                            queues.setdefault((rank, other), []).append((item, now))
            for pair, queue in queues.items():
                while queue and busy_until.get(pair, 0.0) <= now + 1e-9:
                    sent, _ = queue.pop(0)
                    one = way(*pair)
                    busy_until[pair] = now + one.occupied(sent[0])
                    arrived[sent, pair[1]] = busy_until[pair] + one.latency
            for rank, actions in enumerate(schedule.actions):
                if running[rank] is None and position[rank] < len(actions):
                    action = actions[position[rank]]
                    needs = schedule.needs(action)
                    if all(
                        done.get(need, math.inf) <= now + 1e-9
                        and (need[1] == action.stage or arrived.get((need, rank), math.inf) <= now + 1e-9)
                        for need in needs
                    ):
                        running[rank] = action[:3]
                        until[rank] = now + seconds.of(action)
                        position[rank] += 1
        now += step
    return now - step


@pytest.mark.parametrize("schedule", [*TOY[:7], zero_bubble(P, M, 2)], ids=lambda s: s.name)
def test_a_replay_by_small_steps_ends_at_the_same_time(schedule: Schedule) -> None:
    seconds, way = equal_stages(schedule), boundary(1, 0.5, 0.25)
    assert replay(schedule, seconds, way, 0.125) == pytest.approx(simulate(schedule, seconds, way).seconds)


@given(schedule=st.sampled_from([*TOY[:5], zero_bubble(P, M, 2)]), data=st.data())
@settings(max_examples=8)
def test_microbatches_that_differ_end_when_the_replay_does(schedule: Schedule, data: st.DataObject) -> None:
    times = data.draw(st.lists(st.integers(0, 6).map(lambda n: n / 2), min_size=M, max_size=M))
    alike, way = equal_stages(schedule), boundary(1, 0.5, 0.25)
    seconds = StageSeconds(alike.forward, alike.input_gradient, alike.weight_gradient, microbatches=times)
    assert replay(schedule, seconds, way, 0.125) == pytest.approx(simulate(schedule, seconds, way).seconds)
    timeline = simulate(schedule, seconds, way)
    assert timeline.busy.sum() == pytest.approx(sum(times) * 3 * P)


def test_multiples_of_one_change_nothing() -> None:
    for schedule in TOY:
        alike = equal_stages(schedule)
        ones = StageSeconds(alike.forward, alike.input_gradient, alike.weight_gradient, microbatches=[1.0] * M)
        assert simulate(schedule, ones).seconds == simulate(schedule, alike).seconds


def test_one_long_microbatch_delays_every_stage() -> None:
    """Without overlap of its own: the pipeline waits for it on each rank in turn."""
    seconds = StageSeconds([1.0] * 2, [1.0] * 2, [1.0] * 2, microbatches=[1.0, 5.0])
    # Forwards end at 1, 6 on rank 0 and 2, 11 on rank 1, whose first backward runs in between, from 2 to 4.
    assert simulate(one_forward_one_backward(2, 2), seconds).seconds == 6 + 5 + 10 + 10


@given(st.floats(0.1, 10), st.sampled_from(TOY), st.floats(0, 2), st.floats(0, 1))
@settings(max_examples=40)
def test_scaling_all_times_scales_the_step(factor: float, schedule: Schedule, latency: float, occupied: float) -> None:
    base = simulate(schedule, equal_stages(schedule), boundary(1, latency, occupied)).seconds
    scaled = simulate(
        schedule,
        equal_stages(schedule, factor, 2 * factor),
        boundary(1, factor * latency, factor * occupied),
    ).seconds
    assert scaled == pytest.approx(factor * base)


@given(st.sampled_from(TOY), st.floats(0, 2), st.floats(0, 1))
@settings(max_examples=40)
def test_no_step_is_shorter_than_its_bounds(schedule: Schedule, latency: float, occupied: float) -> None:
    timeline = simulate(schedule, equal_stages(schedule), boundary(1, latency, occupied))
    assert timeline.seconds >= max(timeline.busy) - 1e-9
    by_way: dict[tuple[int, int], float] = {}
    for message in timeline.messages:
        pair = message.source, message.target
        by_way[pair] = by_way.get(pair, 0.0) + message.end - message.start
        assert message.queued <= message.start <= message.end <= message.arrival
    assert timeline.seconds >= max(by_way.values()) - 1e-9
    assert (timeline.waiting <= timeline.seconds - timeline.busy + 1e-9).all()


def test_joined_pairs_can_take_less_than_their_parts() -> None:
    schedule = dual_pipe_v(P, M)
    whole = simulate(schedule, equal_stages(schedule)).seconds
    hidden = simulate(schedule, StageSeconds.equal(8, 0.5, 1.0, joined=0.8)).seconds
    assert 0.8 * whole < hidden < whole


def test_thirty_thousand_actions_take_less_than_a_second() -> None:
    schedule = interleaved(16, 128, 8)
    stages, boundaries = equal_stages(schedule), boundary(7, 0.1, 0.01)
    # 0.2 s on an idle core. The best of three, of the processor's time: other work on the machine is not ours.
    runs = timeit.repeat(lambda: simulate(schedule, stages, boundaries), time.process_time, repeat=3, number=1)
    assert min(runs) < 1.0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused_by_place(value: float) -> None:
    schedule = gpipe(2, 2)
    with pytest.raises(PlanError, match="forward, stage 1"):
        simulate(schedule, StageSeconds([1, value], [1, 1], [1, 1]))
    with pytest.raises(PlanError, match="way from rank 0 to rank 1"):
        simulate(schedule, StageSeconds.equal(2, 1, 2), {(0, 1): Way(value)})
    with pytest.raises(PlanError, match="3 values for 2 stages"):
        simulate(schedule, StageSeconds.equal(3, 1, 2))
    with pytest.raises(PlanError, match="stage seconds, microbatch 1"):
        simulate(schedule, StageSeconds([1, 1], [1, 1], [1, 1], microbatches=[1, value]))
    with pytest.raises(PlanError, match="3 values for 2 microbatches"):
        simulate(schedule, StageSeconds([1, 1], [1, 1], [1, 1], microbatches=[1, 1, 1]))


def test_ranks_that_wait_for_one_another_are_refused() -> None:
    good = gpipe(2, 1)
    bad = Schedule("bad", 1, good.rank_of, (good.actions[0][::-1], good.actions[1]))
    with pytest.raises(PlanError, match="wait for one another"):
        simulate(bad, StageSeconds.equal(2, 1, 2))


@given(
    st.floats(0.01, 10), st.floats(0.01, 10), st.integers(1, 4), st.integers(1, 4), st.floats(0.1, 1), st.floats(0.1, 1)
)
def test_a_message_beside_a_reduction_ends_as_the_flow_solver_says(
    seconds: float, reduction: float, messages: int, rings: int, limit: float, other: float
) -> None:
    # on a link of 1 byte/s a pair of either kind alone gets as much as it can use
    alone = (min(limit, 1 / messages), min(other, 1 / rings))
    rates = max_min_rates([[0], [0]], [1.0], alone, counts=[messages, rings])
    way = Way(slowed=max(1.0, alone[0] / rates[0]), lost=max(0.0, 1 - rates[1] / alone[1]))
    flows = [
        Flow(seconds * alone[0], (0,), limit=alone[0], count=messages),
        Flow(reduction * alone[1], (0,), limit=alone[1], count=rings),
    ]
    ends = finish_times(flows, [1.0])
    passed, later = way.beside(seconds, reduction)
    assert passed == pytest.approx(ends[0], rel=1e-6)
    assert reduction + later == pytest.approx(ends[1], rel=1e-6)


def test_reductions_and_messages_hold_one_another_up() -> None:
    schedule, seconds = one_forward_one_backward(2, 1), StageSeconds.equal(2, 1, 2)
    # rank 1 computes from 2 to 5 and reduces from 3 on; rank 0 gets its gradients by a message of 1
    alone = simulate(schedule, seconds, lambda a, b: Way(0, 1))
    assert alone.seconds == 8
    assert not alone.delayed
    reductions = [{}, {1: 8.0}]
    for way, end, delay in ((Way(0, 1, slowed=2, lost=0.5), 9, 1.0), (Way(0, 1, lost=0.75), 8, 0.75)):
        found = simulate(schedule, seconds, {(0, 1): way, (1, 0): way}, reductions)
        assert found.seconds == end
        assert found.delayed == {(1, 1): pytest.approx(delay)}
    early = simulate(schedule, seconds, lambda a, b: Way(0, 1, slowed=2, lost=0.5), [{}, {1: 1.0}])
    assert early.seconds == 8  # it had ended before
    assert not early.delayed


@pytest.mark.parametrize("way", [Way(slowed=0.5), Way(slowed=math.nan), Way(lost=-0.1), Way(lost=1.1)])
def test_ways_that_speed_messages_up_are_refused(way: Way) -> None:
    with pytest.raises(PlanError):
        simulate(one_forward_one_backward(2, 1), StageSeconds.equal(2, 1, 2), {(0, 1): way})
