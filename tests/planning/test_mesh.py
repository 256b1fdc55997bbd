"""Shares of links beside a brute-force count of what crosses them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cordillera import topology
from cordillera.cost import Calibration, CostModel
from cordillera.errors import PlanError
from cordillera.planning.language.job import PlannedJob
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.collective_cost import ring_seconds
from cordillera.planning.network.mesh import Mesh
from cordillera.planning.network.settings import NetworkSettings
from cordillera.planning.workloads import load
from cordillera.topology import Topology
from tests.planning.domain_plans import DomainNetwork, hierarchical_all_reduce
from tests.planning.flows import FlowLink, plan_seconds, route


def toy() -> Topology:
    device = {
        "name": "toy",
        "matrix_flops_per_s": 1e12,
        "memory_bytes": 1e9,
        "memory_bytes_per_s": 1e11,
        "nic_bytes_per_s": 10.0,
    }
    levels = [
        {"name": "host", "members": 4, "latency_s": 1, "bytes_per_s": 100.0},
        {"name": "building", "members": [3, 1], "latency_s": 10, "oversubscription": 2.0},
        {"name": "region", "members": 2, "latency_s": 100, "oversubscription": 4.0},
    ]
    return Topology.model_validate({"device": device, "levels": levels})


def share(cluster: Topology, pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """The least share of a link and the longest latency, pair by pair over routes."""
    routes = [route(cluster, a, b) for a, b in pairs]
    load = Counter(resource for resources, _ in routes for resource in resources)
    least = min((cluster.capacities[r] / load[r] for resources, _ in routes for r in resources), default=float("inf"))
    return least, max((latency for _, latency in routes), default=0.0)


@pytest.mark.parametrize("degrees", [(1, 1, 16), (2, 2, 4), (4, 4, 1), (2, 8, 1), (1, 4, 4), (4, 1, 4), (8, 2, 1)])
@pytest.mark.parametrize(
    "order", [("tensor", "context", "data", "pipeline"), ("pipeline", "tensor", "context", "data")]
)
def test_shares_are_those_of_a_count_over_routes(degrees: tuple[int, int, int], order: tuple[str, ...]) -> None:
    cluster = toy()
    tensor, pipeline, data = degrees
    mesh = Mesh.of(cluster, Layout(tensor=tensor, pipeline=pipeline, data=data), order)
    for dimension in ("tensor", "pipeline", "data"):
        size, stride = mesh.size(dimension), mesh.stride(dimension)
        groups = [
            [first + inner + i * stride for i in range(size)]
            for first in range(0, mesh.devices, size * stride)
            for inner in range(stride)
        ]
        pairs = [(g[i], g[(i + 1) % size]) for g in groups for i in range(size) if size > 1]
        found = mesh.ring(dimension)
        assert (found.bytes_per_s, found.latency) == pytest.approx(share(cluster, pairs))
        if dimension == "pipeline" and size > 1:
            for index in range(size):
                edges = mesh.boundary(index)
                expected = share(cluster, [(g[index], g[(index + 1) % size]) for g in groups])
                assert (edges.bytes_per_s, edges.latency) == pytest.approx(expected)


def test_few_that_send_keep_their_rate_and_many_share() -> None:
    cluster = topology.load("two-buildings")
    layout = Layout(tensor=8, pipeline=16, data=192)
    across = Mesh.of(cluster, layout, ("tensor", "context", "data", "pipeline")).boundary(7)
    assert across.level == cluster.index("region")
    assert across.bytes_per_s > 2 * 50e9 / 2.8 - 1  # a sixteenth of the devices sends
    everyone = Mesh.of(cluster, layout, ("tensor", "context", "pipeline", "data")).tiers("data")[-1].edges
    assert everyone.bytes_per_s == pytest.approx(50e9 / 2.8)


def test_tiers_multiply_to_the_group_where_domains_cut_evenly() -> None:
    cluster = topology.load("two-buildings")
    tiers = Mesh.of(cluster, Layout(tensor=8, data=3072)).tiers("data")
    for inner, outer in pairwise(tiers):
        assert outer.ranks == inner.ranks * inner.parts
    assert tiers[0].ranks == 1
    assert tiers[-1].ranks * tiers[-1].parts == 3072


def test_a_tier_of_uneven_domains_has_a_lane_for_each_rank_of_the_fullest() -> None:
    cluster = toy()  # buildings of three hosts and of one
    host, building, region = Mesh.of(cluster, Layout(data=16)).tiers("data")
    assert (host.parts, host.ranks, building.parts, building.ranks) == (4, 1, 3, 4)
    assert (region.parts, region.ranks) == (2, 12)
    lanes = [(i, 12 + i * 4 // 12) for i in range(12)]
    back = [(b, a) for a, b in lanes]
    assert (region.edges.bytes_per_s, region.edges.latency) == pytest.approx(share(cluster, lanes + back))
    # groups that are cut unlike: ranks 0, 6 and 12 in three hosts, 2, 8 and 14 as well, of two buildings
    apart = Mesh.of(cluster, Layout(tensor=2, pipeline=3, data=2), ("tensor", "data", "pipeline", "context"))
    assert [(tier.parts, tier.ranks) for tier in apart.tiers("pipeline")] == [(3, 1)]


@given(st.lists(st.integers(1, 7), min_size=2, max_size=4), st.sampled_from([1.0, 2.8, 7.0]))
@settings(max_examples=40)
def test_collectives_level_by_level_cost_what_their_verified_plan_does(sizes: list[int], narrower: float) -> None:
    device = {**toy().device.model_dump(), "nic_bytes_per_s": 50e9}
    levels = [
        {"name": "host", "members": 1, "latency_s": 1e-6, "bytes_per_s": 450e9},
        {"name": "building", "members": sizes, "latency_s": 5e-6},
        {"name": "region", "members": len(sizes), "latency_s": 1e-4, "oversubscription": narrower},
    ]
    cluster = Topology.model_validate({"device": device, "levels": levels})
    layout = Layout(data=sum(sizes))
    constants = Calibration(network=1.0)
    job = PlannedJob(load("llama3-8b"), Mesh.of(cluster, layout), layout, CostModel(cluster.device, constants))
    size = 1e6
    by_level = job.all_reduce("data", size)
    edges = job.mesh.ring("data")
    assume(by_level < 2 * ring_seconds(layout.data, size, edges.latency, edges.bytes_per_s) * (1 - 1e-9))
    network = DomainNetwork(tuple(sizes), FlowLink(5e-6, 50e9), FlowLink(1e-4, 50e9 / narrower))
    plan = plan_seconds(hierarchical_all_reduce(sizes), size, network)
    if len(set(sizes)) == 1:
        assert by_level == pytest.approx(plan, rel=1e-9)
    else:  # parts that need not wait for the fullest building finish earlier than the sum over levels says
        assert 0.65 * by_level <= plan <= 1.05 * by_level


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="takes 32 devices, the cluster has 16"):
        Mesh.of(toy(), Layout(data=32))
    with pytest.raises(PlanError, match="is not an order"):
        Mesh.of(toy(), Layout(), ("tensor", "data"))


@pytest.mark.parametrize("degrees", [(1, 4, 4), (2, 2, 4), (2, 4, 2), (4, 2, 2), (4, 4, 1), (1, 1, 16), (1, 8, 2)])
@pytest.mark.parametrize(
    "order", [("tensor", "context", "data", "pipeline"), ("tensor", "context", "pipeline", "data")]
)
def test_links_that_messages_and_rings_share_are_those_of_a_count_over_routes(
    degrees: tuple[int, int, int], order: tuple[str, ...]
) -> None:
    cluster = toy()
    tensor, pipeline, data = degrees
    mesh = Mesh.of(cluster, Layout(tensor=tensor, pipeline=pipeline, data=data), order)

    def groups(dimension: str) -> list[list[int]]:
        size, stride = mesh.size(dimension), mesh.stride(dimension)
        starts = [first + inner for first in range(0, mesh.devices, size * stride) for inner in range(stride)]
        return [[start + i * stride for i in range(size)] for start in starts]

    def load(pairs: list[tuple[int, int]]) -> Counter[int]:
        found: Counter[int] = Counter()
        for a, b in pairs:
            if cluster.shared_level(a, b) > 0:
                found.update(route(cluster, a, b)[0])
        return found

    rings = load([(group[i - 1], group[i]) for group in groups("data") for i in range(len(group)) if len(group) > 1])
    for index in range(pipeline):
        messages = load([(group[(index + 1) % pipeline], group[index]) for group in groups("pipeline")])
        both = {(float(cluster.capacities[r]), messages[r], rings[r]) for r in messages if rings[r]}
        assert {tuple(link)[:3] for link in mesh.shared_links(index)} == (both if pipeline > 1 else set())


def test_messages_that_go_first_take_from_the_reduction_and_equals_share() -> None:
    cluster = toy()
    layout = Layout(pipeline=2, data=8, overlap_gradients=True)  # both cross hosts: eight messages, sixteen ring pairs
    work = load("gpt-22b").model_copy(update={"batch": 64})

    def meeting(classes: str) -> tuple[float, float]:
        settings = {level.name: NetworkSettings(classes=classes, zero_copy=True) for level in cluster.levels[1:]}  # type: ignore[arg-type]
        mesh = Mesh.of(cluster, layout, ("tensor", "context", "data", "pipeline"))
        return PlannedJob(work, mesh, layout, CostModel(cluster.device, Calibration()), settings).meeting(0)

    (slowed, some), (not_slowed, more) = meeting("equals"), meeting("messages")
    assert not_slowed == 1.0 < slowed
    assert 0 < some < more <= 1.0
