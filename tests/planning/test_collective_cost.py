"""Closed forms equal the cost of the plans that they stand for, on uniform networks and on others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera import topology
from cordillera.planning.network.collective_algorithms import direct_all_gather, doubling_all_gather, ring_all_gather
from cordillera.planning.network.collective_cost import direct_seconds, doubling_seconds, ring_seconds
from cordillera.planning.network.collective_plans import CollectivePlan, all_reduced, scattered
from tests.planning.domain_plans import DomainNetwork, hierarchical_all_reduce
from tests.planning.flows import FlowLink, plan_seconds

INNER, CROSS = FlowLink(5e-6, 50e9), FlowLink(150e-6, 17.86e9)
GIBIBYTE = 2.0**30
FORMS: dict[Callable[..., float], Callable[[int], CollectivePlan]] = {
    ring_seconds: ring_all_gather,
    doubling_seconds: doubling_all_gather,
    direct_seconds: direct_all_gather,
}


@pytest.mark.parametrize("form", FORMS)
def test_closed_forms_equal_plans_on_a_uniform_network(form: Callable[..., float]) -> None:
    for n in (*range(1, 10), 13, 16, 32):
        gather, network = FORMS[form](n), DomainNetwork((n,), INNER)
        for plan, passes in ((gather, 1), (scattered(gather), 1), (all_reduced(gather), 2)):
            assert plan_seconds(plan, 1e8, network) == pytest.approx(passes * form(n, 1e8, *INNER), rel=1e-12)


def test_messages_after_the_first_cost_an_overhead() -> None:
    for n in (1, 2, 5, 16):
        found = plan_seconds(direct_all_gather(n), 1e8, DomainNetwork((n,), INNER), message_overhead=1e-6)
        assert found == pytest.approx(direct_seconds(n, 1e8, *INNER, overhead=1e-6), rel=1e-12)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.sampled_from([ring_seconds, doubling_seconds]))
@settings(max_examples=25)
def test_the_hierarchical_form_is_near_the_plan_for_any_sizes(sizes: list[int], form: Callable[..., float]) -> None:
    for cross in (CROSS, FlowLink(5e-6, 45e9)):
        network = DomainNetwork(tuple(sizes), INNER, cross)
        found = plan_seconds(hierarchical_all_reduce(sizes, FORMS[form]), 1e8, network)
        across = form(len(sizes), 1e8 / min(sizes), cross.latency, min(INNER.rate, cross.rate))
        closed = 2 * (max(form(size, 1e8, *INNER) for size in sizes) + across)
        if len(set(sizes)) == 1:
            assert found == pytest.approx(closed, rel=1e-9)
        else:  # domains with few ranks need not wait for the fullest, as the closed form does
            assert 0.65 <= found / closed <= 1.015


def test_forms_by_hand() -> None:
    # 4 ranks, 8 bytes, 1 s a message, 2 bytes/s: a quarter takes 1 s, the whole 4 s.
    assert ring_seconds(4, 8, 1.0, 2.0) == 3 * (1 + 1)
    assert doubling_seconds(4, 8, 1.0, 2.0) == 2 * 1 + 3
    assert direct_seconds(4, 8, 1.0, 2.0, overhead=0.5) == 1 + 2 * 0.5 + 3
    assert plan_seconds(all_reduced(ring_all_gather(1)), 8, DomainNetwork((1,), INNER)) == 0


def test_a_hierarchical_all_reduce_loses_to_a_flat_ring_over_two_small_domains() -> None:
    network = DomainNetwork((8, 8), INNER, CROSS)
    assert plan_seconds(all_reduced(ring_all_gather(16)), GIBIBYTE, network) * 1e3 == pytest.approx(44.77, abs=0.005)
    assert plan_seconds(hierarchical_all_reduce([8, 8]), GIBIBYTE, network) * 1e3 == pytest.approx(45.47, abs=0.005)


def test_a_plan_is_priced_on_a_cluster() -> None:
    cluster = topology.load("two-buildings")
    ring = all_reduced(ring_all_gather(8))  # within a host
    host = cluster.levels[0]
    assert host.bytes_per_s is not None
    assert plan_seconds(ring, GIBIBYTE, cluster) == pytest.approx(
        2 * ring_seconds(8, GIBIBYTE, host.latency, host.bytes_per_s)
    )


@given(st.permutations([4, 2, 3]))
@settings(max_examples=12)
def test_the_order_of_domains_does_not_matter(sizes: list[int]) -> None:
    assert plan_seconds(
        hierarchical_all_reduce(sizes), 1e9, DomainNetwork(tuple(sizes), INNER, CROSS)
    ) == pytest.approx(plan_seconds(hierarchical_all_reduce([4, 2, 3]), 1e9, DomainNetwork((4, 2, 3), INNER, CROSS)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1.0, 1.0, 1.0), "n is 0"),
        ((2, -1.0, 1.0, 1.0), "num_bytes is -1.0"),
        ((2, math.nan, 1.0, 1.0), "num_bytes is nan"),
        ((2, 1.0, math.nan, 1.0), "latency is nan"),
        ((2, 1.0, -1.0, 1.0), "latency is -1.0"),
        ((2, 1.0, 1.0, 0.0), "rate is 0.0"),
        ((2, 1.0, 1.0, math.nan), "rate is nan"),
    ],
)
def test_impossible_numbers_are_refused_by_name(form: Callable, arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        form(*arguments)


def test_impossible_amounts_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="overhead is -1"):
        direct_seconds(2, 1.0, 1.0, 1.0, overhead=-1)
