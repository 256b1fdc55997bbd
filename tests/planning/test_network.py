"""Network settings: formulas at known points, and that more never means less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera import topology
from cordillera.cost import Calibration, CostModel
from cordillera.errors import PlanError
from cordillera.planning import workloads
from cordillera.planning.language.explorer import Explorer
from cordillera.planning.language.own_layout import OwnLayout
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.settings import (
    NetworkSettings,
    fullest,
    possible,
    production_network,
    recovered,
    tuned,
    tuned_network,
)
from cordillera.planning.ranking.exchange import Exchange

CLEAN = NetworkSettings(balance="spray", recovery="selective")


def test_a_window_limits_the_rate_by_the_round_trip() -> None:
    assert CLEAN.rate(1e12, 0.15e-3) == pytest.approx(83.9e9, rel=1e-3)
    assert CLEAN.rate(1e12, 10e-3) == pytest.approx(1.26e9, rel=2e-3)
    assert NetworkSettings(16, 128, balance="spray").rate(1e12, 10e-3) == pytest.approx(107.4e9, rel=1e-3)
    assert CLEAN.rate(5e9, 0.0) == 5e9


def test_losses_cost_go_back_n_the_window() -> None:
    window = 0.3e-3 * 50e9 / 4096  # 400 Gb/s, packets of 4 KiB
    assert recovered(1e-5, window, "go-back-n") == pytest.approx(0.9647, abs=1e-4)
    assert recovered(1e-4, window, "go-back-n") == pytest.approx(0.7319, abs=1e-4)
    assert recovered(1e-5, 20e-3 * 50e9 / 4096, "go-back-n") == pytest.approx(0.2906, abs=1e-4)
    assert recovered(1e-4, window, "selective") == 1 - 1e-4


def test_more_flows_fill_parallel_networks_more_evenly() -> None:
    assert fullest(1, 1) == 1.0
    assert 1.0 < fullest(16, 76) < fullest(1, 76) < 2.0
    assert fullest(4, 8) == fullest(4, 8)  # seeded


@given(
    rate=st.floats(1e9, 1e11),
    latency=st.floats(1e-6, 2e-2),
    loss=st.sampled_from([0.0, 1e-6, 1e-4]),
    planes=st.sampled_from([1, 4, 76]),
)
def test_tuned_settings_are_never_worse_than_a_librarys_own(
    rate: float, latency: float, loss: float, planes: int
) -> None:
    best = tuned(rate, latency, loss, planes)
    assert best.rate(rate, latency, loss, planes) >= NetworkSettings().rate(rate, latency, loss, planes) * (1 - 1e-12)
    assert best.rate(rate, latency, loss, planes) <= rate
    assert best.queued(rate, latency) <= 64e6


def _go_back_n(loss: float, window: int, packets: int, seed: int) -> float:
    """Efficiency of go-back-N, packet by packet: a loss discards itself and the rest of the window in flight."""
    generator, slots, delivered = np.random.default_rng(seed), 0, 0
    while delivered < packets:
        slots += 1
        if generator.random() < loss:
            slots += window - 1  # packets behind the lost one, which the receiver discards
        else:
            delivered += 1
    return delivered / slots


@pytest.mark.parametrize(("loss", "window"), [(1e-2, 10), (1e-2, 100), (1e-3, 1000), (0.3, 4)])
def test_go_back_n_is_as_slow_as_packets_that_are_sent_one_by_one(loss: float, window: int) -> None:
    sent = np.mean([_go_back_n(loss, window, 40_000, seed) for seed in range(3)])
    # a lost packet costs a whole window: the formula's `1 - p + p W` slots for `1 - p` packets
    assert recovered(loss, window, "go-back-n") == pytest.approx(sent, rel=0.06)


HAVE = {"spraying": True, "selective_repeat": True, "zero_copy": True}
CLUSTER = topology.load("two-buildings").changed(
    {"pod.members": 16, "building.members": 1, "region.planes": 8, "region.distance_km": 200, "region.loss_rate": 1e-5}
)
WORK = workloads.load("llama3-8b").model_copy(update={"batch": 128})


def lacking(*names: str, **changes: float) -> topology.Topology:
    """The cluster with links between buildings that lack something."""
    changed = dict.fromkeys((f"region.{name}" for name in names), 0.0) | {
        f"region.{key}": by for key, by in changes.items()
    }
    return CLUSTER.changed(changed)


def test_settings_are_what_the_links_of_a_level_have() -> None:
    level = CLUSTER.levels[-1]
    ideal = tuned_network(CLUSTER)["region"]
    assert possible(ideal, level) is ideal
    assert (ideal.balance, ideal.recovery, ideal.zero_copy) == ("spray", "selective", True)
    poor = possible(ideal, lacking(*HAVE).levels[-1])
    assert (poor.balance, poor.recovery, poor.zero_copy) == ("enhanced", "go-back-n", False)
    assert poor.window == ideal.window
    library = production_network(CLUSTER)["region"]
    assert possible(library, lacking(*HAVE).levels[-1]) == library  # a library's default asks for none of them


def test_lacking_links_have_the_rate_of_the_formula() -> None:
    """By hand: connections that collide on planes, and a window that is sent again for each loss."""
    layout = Layout(tensor=8, pipeline=2, data=32, shards=32, sequence_parallel=True)
    order = ("tensor", "context", "data", "pipeline")  # the pipeline crosses the buildings
    for names in ((), ("spraying",), ("selective_repeat",), ("spraying", "selective_repeat")):
        explorer = Explorer(WORK, lacking(*names))
        network = tuned_network(explorer.topology)
        job = explorer.job(layout, order, network)
        edges = job.mesh.boundary(0)
        assert edges.level == 4
        wire = min(edges.bytes_per_s * explorer.cost.calibration.network, network["region"].window / 2 / edges.latency)
        in_flight = wire * 2 * edges.latency / 4096
        expected = wire * (1 - 1e-5)
        if "selective_repeat" in names:
            expected /= 1 - 1e-5 + 1e-5 * in_flight
        if "spraying" in names:
            balls = np.random.default_rng(7).integers(8, size=(50, network["region"].queue_pairs * 2048))
            expected /= np.mean([np.bincount(row, minlength=8).max() * 8 / row.size for row in balls])
        assert job.rate(edges) == pytest.approx(expected, rel=2e-3)


def test_a_search_offers_nothing_that_the_links_lack() -> None:
    found = Explorer(WORK, lacking("spraying", "zero_copy"), devices=64).explore(["network"])
    assert found.plans
    for plan in found.plans:
        assert plan.network["region"].balance != "spray"
        assert not plan.network["region"].zero_copy
    assert found.best.network["region"].recovery == "selective"
    assert found.best.network["pod"].balance == "spray"  # another level lacks nothing


@settings(max_examples=25)
@given(
    names=st.sets(st.sampled_from(sorted(HAVE))),
    more=st.sampled_from(sorted(HAVE)),
    losses=st.tuples(st.floats(0, 0.2), st.floats(0, 0.2)).map(sorted),
    pipeline_crosses=st.booleans(),
    shard_weights=st.booleans(),
)
def test_lacking_more_or_losing_more_is_never_faster(
    names: set[str], more: str, losses: list[float], pipeline_crosses: bool, shard_weights: bool
) -> None:
    layout = Layout(
        tensor=4, pipeline=4, data=32, shards=32, shard_weights=shard_weights, shard_gradients=not shard_weights,
        overlap_gradients=True,
    )  # fmt: skip
    order = ("tensor", "context", *(("data", "pipeline") if pipeline_crosses else ("pipeline", "data")))
    plan = Explorer(WORK, CLUSTER).evaluate(OwnLayout("one", layout, network="tuned", order=order))

    def seconds(cluster: topology.Topology) -> float:
        return Explorer(WORK, CLUSTER).again(plan, cluster).seconds

    few, many = losses
    base = seconds(lacking(*names, loss_rate=few))
    assert seconds(lacking(*names, loss_rate=many)) >= base * (1 - 1e-9)
    assert seconds(lacking(*names, more, loss_rate=few)) >= base * (1 - 1e-9)
    # made for the cluster, settings are no worse than others that fall back
    own = Explorer(WORK, lacking(*names, loss_rate=few)).evaluate(
        OwnLayout("one", layout, network="tuned", order=order)
    )
    assert own.seconds <= base * (1 + 1e-9)


def test_exchanges_of_tables_lack_the_same() -> None:
    cost, network = CostModel(CLUSTER.device, Calibration()), tuned_network(CLUSTER)
    best = Exchange(CLUSTER, 512, 1).efficiencies(cost, network)
    for name in ("spraying", "selective_repeat"):
        poor = Exchange(lacking(name), 512, 1).efficiencies(cost, network)
        assert poor[-1] < best[-1]
        assert poor[:-1] == best[:-1]


@pytest.mark.parametrize("value", ["maybe", 2, 0.5, []])
def test_what_is_neither_true_nor_false_is_refused(value: object) -> None:
    with pytest.raises(PlanError, match=r"region\.spraying|spraying"):
        CLUSTER.changed({"region.spraying": value})  # type: ignore[dict-item]
