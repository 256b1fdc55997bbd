"""Shares of links beside a brute-force count of what crosses them."""

from __future__ import annotations

from collections import Counter

import pytest

from cordillera import topology
from cordillera.errors import PlanError
from cordillera.planning.mesh import Mesh
from cordillera.planning.workload import Layout
from cordillera.topology import Topology


def toy() -> Topology:
    device = {
        "name": "toy",
        "matrix_flops_per_s": 1e12,
        "vector_flops_per_s": 1e11,
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
    routes = [cluster.route(a, b) for a, b in pairs]
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


def test_tiers_multiply_to_the_group_and_are_left_out_where_domains_cut_unevenly() -> None:
    cluster = topology.load("two-buildings")
    tiers = Mesh.of(cluster, Layout(tensor=8, data=3072)).tiers("data")
    product = 1
    for tier in tiers:
        product *= tier.parts
    assert product == 3072
    assert Mesh.of(toy(), Layout(data=16)).tiers("data") == ()  # buildings of three hosts and of one


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="takes 32 devices, the cluster has 16"):
        Mesh.of(toy(), Layout(data=32))
    with pytest.raises(PlanError, match="is not an order"):
        Mesh.of(toy(), Layout(), ("tensor", "data"))
