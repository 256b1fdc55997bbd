"""Bad days: bounds that a slow device and late messages keep to, lost planes and domains, plans on what is left."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera import topology
from cordillera.errors import PlanError
from cordillera.planning import workloads
from cordillera.planning.language import what_if as faults
from cordillera.planning.language.explorer import Explorer
from cordillera.planning.language.job import PlannedJob
from cordillera.planning.language.own_layout import OwnLayout
from cordillera.planning.language.plans import Plan
from cordillera.planning.language.step import families, simulate_step
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.mesh import Mesh
from cordillera.planning.network.settings import tuned_network
from cordillera.planning.pipeline.schedules import (
    Schedule,
    breadth_first,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
    zero_bubble_v,
)
from cordillera.planning.pipeline.simulator import StageSeconds, Way, simulate, simulate_late
from cordillera.topology import Topology
from tests.planning.flows import route

SCHEDULES: list[Callable[[int, int], Schedule]] = [
    gpipe,
    one_forward_one_backward,
    zero_bubble,
    zero_bubble_v,
    dual_pipe_v,
    lambda p, m: interleaved(p, m, 2),
    lambda p, m: breadth_first(p, m, 3),
]


def buildings(count: int = 2, hosts: int = 2) -> Topology:
    """Some buildings, far apart, of two racks of so many hosts of eight."""
    changes = {"rack.members": hosts, "pod.members": 2, "building.members": 1, "region.distance_km": 300.0}
    return topology.load("two-buildings").changed({**changes, "region.members": count})


@lru_cache(maxsize=1)
def planned() -> tuple[Explorer, Plan]:
    """Llama 3 8B on 64 devices, its pipeline across the buildings."""
    explorer = Explorer(workloads.load("llama3-8b").model_copy(update={"batch": 128}), buildings())
    layout = Layout(tensor=4, pipeline=4, data=4, shards=4, sequence_parallel=True, overlap_gradients=True)
    job = explorer.job(layout, ("tensor", "context", "data", "pipeline"), explorer.production().network)
    schedule = one_forward_one_backward(4, job.microbatches)
    step = simulate_step(job, schedule)
    peak = 64 * explorer.topology.device.matrix_flops_per_s
    return explorer, Plan(layout, job.mesh.order, job.network or {}, schedule, step, explorer.workload.flops, peak)


@given(
    make=st.sampled_from(SCHEDULES),
    ranks=st.integers(1, 4),
    more=st.integers(0, 4),
    latency=st.floats(0, 3),
    occupied=st.floats(0, 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_every_draw_is_a_simulation_of_its_own(
    make: Callable[[int, int], Schedule], ranks: int, more: int, latency: float, occupied: float, seed: int
) -> None:
    """Lateness by rank of the sender, which :func:`simulate` can take as another way for each of them."""
    schedule = make(ranks, 2 * ranks + more)
    seconds = StageSeconds.equal(schedule.stages, 1.0, 2.0)
    extra = np.random.default_rng(seed).exponential(size=(ranks, 3))
    ways = {(a, b): Way(latency + a * 1e-9, occupied) for a in range(ranks) for b in range(ranks) if a != b}
    number = {way: a for (a, _), way in ways.items()}
    found = simulate_late(
        schedule, seconds, ways, lambda way: extra[number[way]], [range(len(one)) for one in schedule.actions]
    )
    for draw in range(3):
        late = {pair: Way(way.latency + extra[pair[0], draw], occupied) for pair, way in ways.items()}
        timeline = simulate(schedule, seconds, late)
        for rank, times in enumerate(found):
            ends = [np.broadcast_to(times[i][1], 3)[draw] for i in range(len(times))]
            starts = [np.broadcast_to(times[i][0], 3)[draw] for i in range(len(times))]
            assert ends == pytest.approx(timeline.ends[rank])
            assert starts == pytest.approx(timeline.starts[rank])


def test_draws_of_ranks_that_wait_for_one_another_are_refused() -> None:
    good = gpipe(2, 1)
    bad = Schedule("bad", 1, good.rank_of, (good.actions[0][::-1], good.actions[1]))
    with pytest.raises(PlanError, match="wait for one another"):
        simulate_late(bad, StageSeconds.equal(2, 1, 2), None, lambda way: np.zeros(1), [[], []])


@given(
    pipeline=st.sampled_from([1, 2, 4, 8]),
    chunks=st.sampled_from([1, 2, 4]),
    overlap=st.booleans(),
    rank=st.integers(0, 7),
    factor=st.floats(1, 8),
    choice=st.integers(0, 7),
)
@settings(max_examples=60)
def test_a_slow_device_costs_between_nothing_and_its_factor(
    pipeline: int, chunks: int, overlap: bool, rank: int, factor: float, choice: int
) -> None:
    """Starts and ends are sums and maxima of times in a fixed order: they grow with each time, and all by a factor."""
    explorer, _ = planned()
    data = 64 // (4 * pipeline)
    layout = Layout(tensor=4, pipeline=pipeline, data=data, shards=data, chunks=chunks, overlap_gradients=overlap)
    if pipeline == 1 and chunks > 1:
        return
    work = explorer.workload.model_copy(update={"batch": 16 * data})
    job = PlannedJob(work, Mesh.of(explorer.topology, layout), layout, explorer.cost, tuned_network(explorer.topology))
    made = list(families(job).values())
    schedule = made[choice % len(made)]()
    step = simulate_step(job, schedule)
    slow = simulate_step(job, schedule, {rank % pipeline: factor})
    assert step.seconds * (1 - 1e-12) <= slow.seconds <= factor * step.seconds * (1 + 1e-12)
    assert simulate_step(job, schedule, {rank % pipeline: 1.0}).seconds == step.seconds
    # the rank itself computes for the factor's time, and its tensor-parallel collectives take what they take
    own, after = (float((one.busy - one.slowed)[rank % pipeline]) for one in (step.timeline, slow.timeline))
    tensor = job.microbatches * sum(job.stages[stage].tensor for stage in schedule.stages_of(rank % pipeline))
    assert after == pytest.approx(factor * (own - tensor) + tensor)


def test_a_slow_device_is_told_where_it_costs_most() -> None:
    explorer, plan = planned()
    case = faults.slow_device(explorer, plan, 1.2)
    by_rank = case.figures["seconds_by_rank"]
    assert len(by_rank) == 4
    assert case.seconds == max(by_rank) == pytest.approx(sum(case.figures["parts"].values()))
    assert plan.seconds < case.seconds < 1.2 * plan.seconds
    assert f"pipeline rank {by_rank.index(max(by_rank))}" in case.note
    assert faults.slow_device(explorer, plan, 1.0).seconds == plan.seconds


@given(part=st.floats(0, 20), seed=st.integers(0, 9))
@settings(max_examples=20)
def test_late_messages_only_make_steps_longer(part: float, seed: int) -> None:
    explorer, plan = planned()
    case = faults.jitter(explorer, plan, part, draws=200, seed=seed)
    p50, p99 = case.figures["p50"], case.figures["p99"]
    assert plan.seconds <= p50 <= p99
    assert case == faults.jitter(explorer, plan, part, draws=200, seed=seed)
    twice = faults.jitter(explorer, plan, 2 * part, draws=200, seed=seed)  # the same draws, each twice as late
    assert twice.figures["p50"] >= p50
    assert twice.figures["p99"] >= p99


def test_no_jitter_is_the_plan_itself_to_the_bit() -> None:
    explorer, plan = planned()
    case = faults.jitter(explorer, plan, 0.0)
    assert case.figures["p50"] == case.figures["p99"] == plan.seconds
    steps = faults.jittered(explorer, plan, 0.0, draws=3)
    # here reductions do not slow the collectives inside a stage
    assert steps[0] == steps[-1]
    assert plan.seconds - plan.step.timeline.slowed.sum() <= steps[0] <= plan.seconds * (1 + 1e-12)


def test_other_seeds_draw_other_steps() -> None:
    explorer, plan = planned()
    first, second = (faults.jittered(explorer, plan, 5.0, draws=50, seed=seed) for seed in (0, 1))
    assert len(set(first)) == 50
    assert not set(first) & set(second)


def test_late_messages_are_late_by_the_jitter_on_average() -> None:
    """Two ranks, one microbatch, one device each: two latencies in a row, each with an exponential amount on top."""
    explorer = Explorer(workloads.load("llama3-8b").model_copy(update={"batch": 1}), buildings())
    layout = Layout(pipeline=2)
    job = PlannedJob(explorer.workload, Mesh.of(explorer.topology, layout), layout, explorer.cost)
    schedule = one_forward_one_backward(2, 1)
    plan = Plan(layout, job.mesh.order, {}, schedule, simulate_step(job, schedule), 1.0, 1.0)
    latency = job.mesh.boundary(0).latency
    explorer.job = lambda *_, **__: job  # type: ignore[method-assign, misc, assignment]
    extra = faults.jittered(explorer, plan, 3.0, draws=20_000) - plan.seconds
    assert extra.mean() == pytest.approx(2 * 3.0 * latency, rel=0.03)
    assert extra.var() == pytest.approx(2 * (3.0 * latency) ** 2, rel=0.06)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=8, data=64, shards=64, shard_weights=True, sequence_parallel=True),
        Layout(context=4, data=128, shards=128, shard_weights=True),
    ],
)
def test_late_hops_of_collectives_inside_a_stage_make_steps_longer(layout: Layout) -> None:
    """Sharded data parallelism sends no messages of a pipeline; the collectives that it waits for are late."""
    cluster = topology.load("two-buildings").changed({"pod.members": 16, "building.members": 1})
    explorer = Explorer(workloads.load("llama3-70b"), cluster.changed({"region.distance_km": 100.0}))
    plan = explorer.evaluate(OwnLayout("sharded", layout))
    case = faults.jitter(explorer, plan, 0.5, draws=10)
    on_time, late = (explorer.job(layout, plan.order, plan.network, late=part) for part in (0.0, 0.5))
    slower = plan.layout.pipeline * late.microbatches * (late.layer.total - on_time.layer.total) * 80
    assert slower > 0.001 * plan.seconds
    assert case.figures["p50"] - plan.seconds == pytest.approx(slower, rel=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 0.99])
def test_what_is_no_factor_is_refused(value: float) -> None:
    explorer, plan = planned()
    with pytest.raises(PlanError, match=r"--slow: .* is not from 1"):
        faults.slow_device(explorer, plan, value)
    if not value > 0 or math.isinf(value):
        with pytest.raises(PlanError, match=r"--jitter: .* is not from 0"):
            faults.jitter(explorer, plan, value)


def test_a_lost_plane_leaves_its_part_of_the_capacity() -> None:
    cluster = topology.load("llama4-region")
    less = cluster.changed({"region.planes_lost": 1})
    assert cluster.levels[-1].planes == 76
    links = slice(cluster.resource(4, 0, False), cluster.resource(5, 0, False))
    assert (less.capacities[links] / cluster.capacities[links]).tolist() == pytest.approx(
        [75 / 76] * (2 * len(cluster.sizes[3]))
    )
    others = np.r_[less.capacities[: links.start], less.capacities[links.stop :]]
    assert others.tolist() == np.r_[cluster.capacities[: links.start], cluster.capacities[links.stop :]].tolist()


def test_worse_links_never_make_a_gradient_reduction_faster() -> None:
    explorer, plan = planned()
    far = Plan(plan.layout, (*plan.order[:2], "pipeline", "data"), *list(vars(plan).values())[2:])
    for change in ("loss_rate", "planes"):
        cluster = explorer.topology.changed({"region.planes": 4})
        steps = []
        for value in (0.0, 1e-5, 1e-3) if change == "loss_rate" else (0, 1, 3):
            key = "region.loss_rate" if change == "loss_rate" else "region.planes_lost"
            steps.append(faults.again(explorer, far, key, cluster.changed({key: value})).seconds)
        assert steps == sorted(steps)
        assert steps[-1] > steps[0]


@given(
    members=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    level=st.integers(-1, 3),
    which=st.integers(0, 10**6),
    again=st.integers(0, 10**6),
)
@settings(max_examples=150)
def test_what_is_left_is_the_cluster_without_these_devices(
    members: list[int], level: int, which: int, again: int
) -> None:
    """Two losses in a row, the second of an uneven tree, against routes and capacities of the whole cluster."""
    device = topology.load("a100-node").device
    levels = [
        {"name": f"l{i}", "members": n, "latency_s": 10.0**i, "bytes_per_s": 5.0 + i} for i, n in enumerate(members)
    ]
    whole = Topology.model_validate({"device": device.model_dump(), "levels": levels})
    left, kept = whole, list(range(whole.devices))
    for choice in (which, again):
        at = min(level, len(members) - 2)
        domains = left.devices if at < 0 else len(left.sizes[at])
        gone = choice % domains
        inside = [d for d in range(left.devices) if left.domain(d, at) == gone]
        name = "device" if at < 0 else left.levels[at].name
        if len(inside) == left.devices:
            with pytest.raises(PlanError, match="nothing is left"):
                left.without(name, gone)
            return
        left = left.without(name, gone)
        kept = [one for d, one in enumerate(kept) if d not in inside]
        assert left.devices == len(kept)
        for a in range(0, len(kept), 3):
            for b in range(0, len(kept), 2):
                assert left.shared_level(a, b) == whole.shared_level(kept[a], kept[b])
                ours, theirs = route(left, a, b), route(whole, kept[a], kept[b])
                assert ours[1] == theirs[1]
                assert left.capacities[list(ours[0])].tolist() == whole.capacities[list(theirs[0])].tolist()


def test_links_that_differ_go_or_stay_with_their_members() -> None:
    links = [{"level": "region", "member": i, "bytes_per_s": 1e9 * (i + 1)} for i in range(3)]
    whole = topology.validate(Topology, {**buildings(3).model_dump(), "links": links}, "three")
    left = whole.without("building", 1)
    assert [(link.member, link.bytes_per_s) for link in left.links] == [(0, 1e9), (1, 3e9)]
    assert left.levels[-1].members == 2
    assert left.name == "two-buildings without building 1"


@pytest.mark.parametrize(
    ("domain", "message"),
    [
        ("building:2", "there is no building 2"),
        ("building:x", "is not a domain"),
        ("building:", "is not a domain"),
        ("village", "there is no level 'village'"),
        ("region", "nothing is left without region 0"),
    ],
)
def test_domains_that_cannot_be_lost_are_refused(domain: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        faults.survivors(buildings(), domain)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("count", "domain", "left"), [(2, "building", 32), (3, "building:2", 64), (2, "rack:3", 48)])
def test_a_plan_after_a_loss_uses_all_that_is_left_where_it_divides(count: int, domain: str, left: int) -> None:
    by_the_rules = workloads.load("llama3-8b").model_copy(update={"published": ()})
    explorer = Explorer(by_the_rules, buildings(count))
    plan = explorer.production()
    case = faults.lost(explorer, plan, domain, ["network"])
    assert case.devices == left == case.figures["devices_left"]
    assert "stay idle" not in case.note
    assert case.figures["plan"]["seconds"] == case.seconds
    if left < explorer.devices:
        assert case.seconds > plan.seconds


@pytest.mark.slow
def test_a_lost_device_costs_no_more_than_its_host_and_fewer_are_used_where_the_rest_does_not_divide() -> None:
    """31 of 32 devices: 31 divides neither the batch nor the 32 layers well."""
    explorer = Explorer(workloads.load("llama3-8b").model_copy(update={"batch": 64}), buildings(1))
    plan = explorer.production()
    after, found = faults.replan(explorer, plan, explorer.topology.without("host", 1), ["network"])
    assert after.devices == found.best.layout.devices <= 24
    case = faults.lost(explorer, plan, "device:3", ["network"])
    assert case.seconds <= found.best.seconds * (1 + 1e-9)
    assert "1 of 32 devices" in case.note
    assert ("the rest of its host is not used" in case.note) == (case.devices <= after.devices)
    assert case.devices < 31
    assert "not divided as well over all 31" in case.note
    # no number of devices that can be planned is estimated to be faster than the one that is used
    left, least = explorer.topology.without("device", 3), {}
    for devices in range(16, 32):
        other = Explorer(explorer.workload, left, devices=devices)
        with contextlib.suppress(PlanError):
            other.production()
            least[devices] = other.outlook({1, plan.layout.chunks})
    assert len(least) > 2
    assert case.devices == min(least, key=least.__getitem__)


@pytest.mark.parametrize(("memory", "fits"), [(60e9, True), (45e9, False)])
def test_a_lost_device_is_planned_for_if_only_one_of_both_ways_fits(memory: float, fits: bool) -> None:
    """Of two hosts of two devices: three devices without the lost one, or two without its host."""
    members = {"host.members": 2, "pod.members": 1, "building.members": 1, "device.memory_bytes": memory}
    work = workloads.load("llama3-8b").model_copy(update={"batch": 12, "published": ()})
    explorer = Explorer(
        work, topology.load("two-buildings").changed({"region.members": 1, "rack.members": 2, **members})
    )
    plan = explorer.production()
    with pytest.raises(PlanError, match="2 devices are left, no plan"):
        faults.replan(explorer, plan, explorer.topology.without("host", 0), ["network"])
    if fits:
        assert faults.lost(explorer, plan, "device:0", ["network"]).devices == 3
    else:
        with pytest.raises(PlanError, match="without device 0: 3 devices are left, no plan"):
            faults.lost(explorer, plan, "device:0", ["network"])


def test_a_job_with_spare_devices_moves_over() -> None:
    explorer = Explorer(workloads.load("llama3-8b"), buildings(), devices=32)
    plan = explorer.production()
    case = faults.lost(explorer, plan, "building:0", ["network"])
    assert case.devices == 32
    assert case.seconds == pytest.approx(plan.seconds)


def test_nothing_that_fits_on_the_rest_is_said() -> None:
    explorer = Explorer(workloads.load("llama3-8b"), buildings())
    plan = explorer.production()
    small = explorer.topology.changed({"device.memory_bytes": 1e9})
    with pytest.raises(PlanError, match="64 devices are left, no plan is possible"):
        faults.replan(explorer, plan, small)
