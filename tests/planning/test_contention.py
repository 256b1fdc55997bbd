"""Transfers at the same time share links: against max-min fair flows, and against a simulation in small steps."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera import topology
from cordillera.cost import Calibration, CostModel
from cordillera.planning import workloads
from cordillera.planning.language.explorer import Explorer
from cordillera.planning.language.job import PlannedJob
from cordillera.planning.language.own_layout import OwnLayout
from cordillera.planning.language.plans import Plan
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.contention import Contention, Slowdown, fair_rates
from cordillera.planning.network.mesh import Group, Mesh
from cordillera.planning.network.settings import production_network
from cordillera.planning.pipeline.schedules import Action, Kind, Schedule
from cordillera.planning.pipeline.simulator import StageSeconds, simulate
from cordillera.topology import Topology
from tests.planning.flows import max_min_rates, route

CLUSTER = topology.load("two-buildings").changed({"pod.members": 4, "building.members": 1, "rack.members": 2})
RATES = st.floats(0.01, 100.0)


@given(RATES, st.integers(1, 50), st.integers(1, 50), RATES, RATES)
def test_two_kinds_on_a_link_have_the_rates_of_progressive_filling(
    capacity: float, many: int, others: int, one: float, other: float
) -> None:
    expected = max_min_rates([[0], [0]], [capacity], [one, other], counts=[many, others])
    assert fair_rates(capacity, (many, others), (one, other)) == pytest.approx(tuple(expected))


def stepwise(
    work: list[tuple[float, bool]], transfer: float, slowed: float, lost: float, begin: float = 0.0
) -> tuple[float, float]:
    """When pieces of computation or communication end, one after the other, and when a transfer beside them does.

    Each piece advances at its own rate until it or the transfer ends, as a simulation of events does. The transfer
    begins after ``begin`` seconds of work.
    """
    now, left, end = 0.0, transfer, None
    for seconds, communicates in work:
        rest = seconds
        while rest > 1e-12:
            runs = end is None and now >= begin - 1e-12
            pace = 1.0 / slowed if communicates and runs else 1.0
            moves = (1.0 - lost if communicates else 1.0) if runs else 0.0
            step = rest / pace
            if moves > 0:
                step = min(step, left / moves)
            rest, left, now = rest - step * pace, left - step * moves, now + step
            if runs and left <= 1e-12:
                end = now
    return now, now + left if end is None else end


@settings(max_examples=150)
@given(
    seconds=st.floats(0.1, 10.0),
    part=st.floats(0.0, 1.0),
    slowed=st.floats(1.0, 4.0),
    lost=st.floats(0.0, 1.0),
    transfer=st.floats(0.0, 20.0),
)
def test_an_action_and_a_transfer_delay_each_other_as_in_small_steps(
    seconds: float, part: float, slowed: float, lost: float, transfer: float
) -> None:
    """Collectives are spread evenly over the action: here in 400 pieces."""
    pieces = 400
    work = [
        piece
        for _ in range(pieces)
        for piece in ((seconds * (1 - part) / pieces, False), (seconds * part / pieces, True))
    ]
    longer, later = Contention.of(seconds, [(seconds * part, Slowdown(slowed, lost))]).beside(seconds, transfer)
    ended, moved = stepwise(work, transfer, slowed, lost)
    near = 4 * seconds * slowed / pieces
    assert seconds + longer == pytest.approx(ended, abs=near)
    if transfer + later < seconds + longer:  # after the action only its rest is left, at full rate
        assert transfer + later == pytest.approx(moved, abs=near)
    else:
        assert transfer + later == pytest.approx(max(moved, ended), abs=near)
    assert longer >= 0.0
    assert later >= 0.0


def test_a_schedule_with_collectives_beside_a_reduction_ends_as_in_small_steps() -> None:
    """One rank, two stages: the reduction of the second stage runs beside the actions that follow it."""
    F, B = Kind.FORWARD, Kind.BACKWARD
    order = [(F, 0, 0), (F, 1, 0), (B, 1, 0), (F, 0, 1), (F, 1, 1), (B, 1, 1), (B, 0, 0), (B, 0, 1)]
    schedule = Schedule("one", 2, (0, 0), (tuple(Action(*one) for one in order),))
    slowdown, parts = Slowdown(1.8, 0.4), {F: 0.3, B: 0.5}
    seconds = StageSeconds([1.0, 2.0], [1.5, 2.5], [1.5, 2.5])
    contention = {
        (kind, stage): Contention.of(seconds.of_kind(kind, stage), [(part * seconds.of_kind(kind, stage), slowdown)])
        for kind, part in parts.items()
        for stage in (0, 1)
    }
    reduction = {5: 9.0, 7: 1.0}  # positions of the last backwards of both stages
    timeline = simulate(schedule, replace(seconds, contention=contention), None, [reduction])
    work: list[tuple[float, bool]] = []
    pieces = 500
    before = 0.0
    for i, (kind, stage, _) in enumerate(order):
        whole, part = seconds.of_kind(kind, stage), parts[kind]
        before += whole if i < 5 else 0.0
        work += [
            piece
            for _ in range(pieces)
            for piece in ((whole * (1 - part) / pieces, False), (whole * part / pieces, True))
        ]
    # the first reduction, and the second behind it, are one transfer, which ends within the last action
    ended, _ = stepwise(work, 10.0, *slowdown, begin=before)
    assert timeline.seconds == pytest.approx(ended, abs=0.05)
    assert timeline.slowed[0] == pytest.approx(ended - sum(seconds.of_kind(k, s) for k, s, _ in order), abs=0.05)
    assert timeline.seconds > simulate(schedule, seconds, None, [reduction]).seconds
    alone = simulate(schedule, replace(seconds, contention=contention), None, None)
    assert alone.seconds == simulate(schedule, seconds).seconds


def job_of(layout: Layout, name: str = "llama3-8b", cluster: Topology = CLUSTER) -> PlannedJob:
    work = workloads.load(name).model_copy(update={"batch": 64})
    cost = CostModel(cluster.device, Calibration())
    return PlannedJob(work, Mesh.of(cluster, layout), layout, cost, production_network(cluster))


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(tensor=2, data=64), "llama3-8b"),
        (Layout(tensor=8, context=4, data=4), "llama3-8b"),
        (Layout(context=16, data=8), "llama3-8b"),
        (Layout(tensor=4, expert=16, data=32), "moe-400b"),
        (Layout(expert=4, data=32, tensor=4), "moe-400b"),
    ],
)
def test_collectives_slow_each_other_as_max_min_fair_flows_do(layout: Layout, name: str) -> None:
    """All pairs of both collectives as flows through the whole cluster at the same time."""
    job = job_of(layout, name)
    rings = Group(layout.data, job.mesh.stride("data"))
    constants, top = job.cost.calibration, job.mesh.topology
    capacities = top.capacities.copy()
    ports = 2 * top.devices
    capacities[:ports] *= constants.port
    capacities[ports:] *= constants.network

    def pairs(group: Group) -> list[tuple[int, ...]]:
        found = []
        for device in range(layout.devices):
            place = device // group.stride % group.size
            to = device + ((place + group.shift) % group.size - place) * group.stride
            found.append(route(top, device, to)[0])
        return found

    inside = job.inside
    assert inside
    for group, forward, backward in inside:
        assert 0.0 < forward <= backward * (1 + 1e-9)
        one, other = (pairs(each) for each in (group, rings))
        limits = [job.rate(job.mesh.edges(each)) for each in (group, rings) for _ in range(layout.devices)]
        rates = max_min_rates(one + other, capacities, limits)
        slowed = job.slowdown(job.mesh.shared_by(group, rings), job.mesh.edges(group), job.mesh.edges(rings))
        assert slowed.slowed == pytest.approx(limits[0] / rates[: layout.devices].min(), rel=1e-6)
        assert slowed.lost == pytest.approx(1 - rates[layout.devices :].min() / limits[-1], abs=1e-6)


def planned(layout: Layout, name: str = "llama3-8b", cluster: Topology = CLUSTER, network: str = "library") -> Plan:
    work = workloads.load(name).model_copy(update={"batch": 64})
    return Explorer(work, cluster).evaluate(OwnLayout("one", layout, network=network))  # type: ignore[arg-type]


ACROSS = Layout(tensor=4, context=4, pipeline=2, data=4, shards=4, shard_gradients=True, overlap_gradients=True)
SHARDED = Layout(tensor=4, context=4, data=8, shards=8, shard_weights=True, overlap_gradients=True)
EXPERTS = Layout(tensor=4, expert=8, pipeline=2, data=16, shards=16, shard_gradients=True, overlap_gradients=True)


def without_contention(layout: Layout, name: str, **others: object) -> Plan:
    with patch.object(PlannedJob, "contention", lambda *_: Contention()):
        return planned(layout, name, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(("layout", "name"), [(ACROSS, "llama3-8b"), (SHARDED, "llama3-8b"), (EXPERTS, "moe-400b")])
def test_a_step_takes_longer_where_links_are_shared_but_no_longer_than_one_after_the_other(
    layout: Layout, name: str
) -> None:
    cluster = CLUSTER.changed({"device.nic_bytes_per_s": 10e9})
    shared, alone = planned(layout, name, cluster), without_contention(layout, name, cluster=cluster)
    assert shared.seconds > alone.seconds * 1.0005
    assert shared.step.seconds == pytest.approx(sum(shared.step.parts.values()))
    if not layout.shard_weights:
        assert shared.step.parts["shared links"] > 0.0 == alone.step.parts["shared links"]
        apart = planned(replace(layout, overlap_gradients=False), name, cluster)
        assert shared.seconds <= apart.seconds


def test_collectives_on_other_links_are_not_slowed() -> None:
    layout = Layout(tensor=8, pipeline=2, data=8, shards=8, shard_gradients=True, overlap_gradients=True)
    shared, alone = planned(layout), without_contention(layout, "llama3-8b")
    assert shared.seconds == alone.seconds  # tensor parallelism within hosts, gradients between them
    assert shared.step.parts["shared links"] == 0.0


def test_what_computation_waits_for_goes_first_with_priorities() -> None:
    assert planned(ACROSS).step.parts["shared links"] > 0.0
    assert planned(ACROSS, network="tuned").step.parts["shared links"] == 0.0


def test_faster_cards_are_never_slower_though_links_are_shared() -> None:
    for layout, name in ((ACROSS, "llama3-8b"), (SHARDED, "llama3-8b"), (EXPERTS, "moe-400b")):
        seconds = [
            planned(layout, name, CLUSTER.changed({"device.nic_bytes_per_s": rate})).seconds
            for rate in np.geomspace(5e9, 100e9, 6)
        ]
        assert seconds == sorted(seconds, reverse=True)


def test_nothing_is_shared_without_a_second_transfer() -> None:
    assert job_of(Layout(tensor=8, data=1)).inside
    job = job_of(Layout(tensor=8, context=2, data=1))
    assert job.contention(1.0, 1, False, Group(1, 16)) == Contention()
    assert job_of(Layout(data=8)).inside == []
    assert Contention.of(0.0, [(1.0, Slowdown(2.0, 0.5))]) == Contention()
