"""Figures of plans: accuracy of predictions, changes of speed, the remedy when nothing fits, other networks."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cordillera import topology
from cordillera.errors import PlanError
from cordillera.planning import calibration
from cordillera.planning.language import what_if
from cordillera.planning.language.plans import Exploration, Plan
from cordillera.planning.language.workload import Layout
from cordillera.planning.search import USABLE_MEMORY
from cordillera.planning.sensitivity import DISTANCES_KM, OVERSUBSCRIPTIONS, sensitivity


def measured(model: str, seconds: float, microbatch: int = 1) -> Any:
    return SimpleNamespace(model=model, seconds=seconds, layout=Layout(microbatch=microbatch))


def concordance(a: list[float], b: list[float]) -> float:
    """Kendall's tau of numbers without ties: pairs in the same order minus the others, over all pairs."""
    signs = [np.sign((a[i] - a[j]) * (b[i] - b[j])) for i in range(len(a)) for j in range(i)]
    return float(np.mean(signs))


def test_accuracy_is_of_each_model_and_of_the_plan_that_would_be_picked() -> None:
    times = {"a": [1.0, 2.0, 4.0, 3.0], "b": [5.0, 6.0, 7.0]}
    predicted = {"a": [1.5, 1.2, 4.4, 2.7], "b": [5.5, 5.2, 7.1]}
    rows = [measured(name, one) for name, some in times.items() for one in some]
    found = calibration.accuracy(rows, [one for some in predicted.values() for one in some])
    errors = {name: [abs(p / t - 1) for p, t in zip(predicted[name], times[name], strict=True)] for name in times}
    everything = errors["a"] + errors["b"]
    assert found.rows == 7
    assert (found.error, found.median) == pytest.approx((np.mean(everything), np.median(everything)))
    assert found.error_by_model == pytest.approx({name: np.mean(some) for name, some in errors.items()})
    taus = {name: concordance(times[name], predicted[name]) for name in times}
    assert found.tau_by_model == pytest.approx(taus)
    assert found.tau == pytest.approx(np.mean(list(taus.values())))
    assert found.regret_by_model == pytest.approx({"a": 2.0, "b": 6 / 5})
    assert found.regret == pytest.approx(2.0)


def test_models_whose_rank_correlation_is_not_known_leave_that_of_all_to_the_others() -> None:
    times = [("a", 1.0), ("a", 2.0), ("one", 3.0), ("tie", 4.0), ("tie", 5.0)]
    rows = [measured(name, seconds) for name, seconds in times]
    found = calibration.accuracy(rows, [1.5, 2.5, 3.0, 6.0, 6.0])
    assert found.tau == found.tau_by_model["a"] == 1.0
    assert [name for name, tau in found.tau_by_model.items() if math.isnan(tau)] == ["one", "tie"]
    assert math.isnan(calibration.accuracy(rows[2:3], [3.0]).tau)


@pytest.mark.parametrize(("second", "picked"), [(1.005, 2.0), (1.02, 1.0)])
def test_of_plans_within_one_per_cent_the_smallest_microbatch_is_picked(second: float, picked: float) -> None:
    rows = [measured("a", 1.0, microbatch=4), measured("a", 2.0, microbatch=1), measured("a", 3.0, microbatch=2)]
    assert calibration.accuracy(rows, [1.0, second, 9.0]).regret == picked


def test_speed_changes_by_the_ratio_of_step_times() -> None:
    for seconds, change in ((2.0, -0.5), (0.5, 1.0), (1.0, 0.0), (1.0 + 1e-9, 0.0)):
        found = what_if.Case("x", seconds, 8).speed(1.0)
        assert found == change
        assert math.copysign(1.0, found) == 1.0 or found < 0, "never -0"


@pytest.mark.parametrize(
    ("values", "is_refused"),
    [
        ({"slow": 1.0}, False), ({"slow": 1e6}, False), ({"slow": 0.999}, True), ({"slow": 1.1e6}, True),
        ({"jitter": 0.0}, False), ({"jitter": 1e6}, False), ({"jitter": -0.1}, True), ({"jitter": math.nan}, True),
    ],
)  # fmt: skip
def test_factors_and_jitters_have_limits(values: dict[str, float], is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(PlanError, match="is not from"):
            what_if.check(**values)
    else:
        what_if.check(**values)


@pytest.mark.parametrize(("domain", "left"), [("building", 1), ("building:1", 0)])
def test_the_domain_that_is_lost_is_the_one_that_was_named(domain: str, left: int) -> None:
    whole = topology.load("two-buildings")
    rest = what_if.survivors(whole, domain)
    assert rest == whole.without("building", 1 - left)
    assert 2 * rest.devices == whole.devices
    for wrong in ("building:", "building:-1", "building:x"):
        with pytest.raises(PlanError, match="is not a domain"):
            what_if.survivors(whole, wrong)


def plan(seconds: float, **degrees: int) -> Plan:
    order = ("tensor", "context", "data", "pipeline")
    step: Any = SimpleNamespace(seconds=seconds)
    return Plan(Layout(**degrees), order, {}, None, step, 120.0, 20.0)  # type: ignore[arg-type]


def test_utilisation_is_of_the_peak_and_the_outermost_dimension_is_named() -> None:
    assert plan(12.0).utilisation == pytest.approx(0.5)
    assert plan(1.0).across == "none"
    assert plan(1.0, tensor=2, data=2).across == "data"
    assert plan(1.0, tensor=2, data=2, pipeline=2).across == "pipeline"
    assert plan(1.0, tensor=2).across == "tensor"


def test_smaller_searches_add_up() -> None:
    whole = Exploration(estimated=1, simulated=2, least_memory=9.0)
    smaller = Exploration([plan(3.0), plan(2.0)], estimated=10, simulated=20, least_memory=8.0)
    smaller.dropped["memory"] += 3
    whole.take("network", smaller)
    whole.take("placement", Exploration([plan(5.0)], estimated=100, simulated=200))
    assert (whole.estimated, whole.simulated, whole.least_memory) == (111, 222, 8.0)
    assert [one.seconds for one in whole.plans] == [3.0, 2.0, 5.0]
    assert {name: one.seconds for name, one in whole.alone.items()} == {"network": 2.0, "placement": 5.0}
    assert whole.dropped == {"memory": 3}


@pytest.mark.parametrize(
    ("least", "takes", "devices"),
    [
        (75.4e9, "75.4", "81"),
        (94e9, "94", "100"),
        (2269e9, "2,269", "2,414"),
        (3e8, "0.3", "0.32"),
        (46.0, "4.6e-08", "4.9e-08"),
    ],
)
def test_the_memory_that_would_do_is_rounded_up(least: float, takes: str, devices: str) -> None:
    with pytest.raises(PlanError, match=re.escape(f"takes {takes} GB on a device: devices with {devices} GB (6 %")):
        _ = Exploration(least_memory=least).best


@pytest.mark.parametrize("enough", [None, 1024])
def test_without_a_plan_the_memory_that_would_do_is_named(enough: int | None) -> None:
    found = Exploration(least_memory=94e9, enough=enough)
    found.dropped.update({f"reason {n}": 1000 * n for n in range(1, 6)})
    with pytest.raises(PlanError) as refused:
        _ = found.best
    text = str(refused.value)
    assert "takes 94 GB" in text
    assert f"devices with {94 / USABLE_MEMORY:,.0f} GB" in text
    assert ("1,024 would do" in text) == (enough is not None)
    assert "5,000 layouts: reason 5; 4,000 layouts: reason 4" in text
    assert "reason 1" not in text, "the four most frequent reasons are named"
    with pytest.raises(PlanError, match="nothing was tried"):
        _ = Exploration().best


def test_every_plan_is_simulated_on_every_other_network_and_the_best_after_upgrades() -> None:
    whole = topology.load("two-buildings").changed({"region.bytes_per_s": "*=1"})  # a rate that is stated
    outer = whole.levels[-1].name
    asked: list[tuple[str, Any]] = []

    def again(one: str, other: topology.Topology) -> SimpleNamespace:
        asked.append((one, other))
        return SimpleNamespace(seconds=float(len(asked)))

    explorer: Any = SimpleNamespace(topology=whole, devices=whole.devices, again=again)
    found = sensitivity(explorer, {"best": "first", "base": "second"})
    assert found is not None
    far, narrow = len(DISTANCES_KM), len(OVERSUBSCRIPTIONS)
    assert {name: len(times) for name, times in found.distances.items()} == {"best": far, "base": far}
    assert {name: len(times) for name, times in found.oversubscriptions.items()} == {"best": narrow, "base": narrow}
    for (one, other), km in zip(asked[: 2 * far], DISTANCES_KM * 2, strict=True):
        assert other == whole.changed({f"{outer}.distance_km": km})
        assert one == ("first" if asked.index((one, other)) < far else "second")
    upgraded = asked[2 * (far + narrow) :]
    assert {one for one, _ in upgraded} == {"first"}
    assert len(upgraded) == len(found.upgrades) == 2 + 2 * (len(whole.levels) - 1)
    assert [words for words, _ in found.upgrades[:2]] == [
        "twice the bandwidth within each host",
        "twice the rate of network cards and of links that follow from it",
    ]
    assert upgraded[1][1].device.nic_bytes_per_s == 2 * whole.device.nic_bytes_per_s
    for level, one in enumerate(whole.levels[1:], start=1):
        faster = upgraded[1][1].member_bytes_per_s(level, 0) / whole.member_bytes_per_s(level, 0)
        assert faster == (2.0 if one.bytes_per_s is None else 1.0)
    for (words, _), (_, other) in zip(found.upgrades[2:], upgraded[2:], strict=True):
        name = words.split()[-1]
        before, after = (next(x for x in of.levels if x.name == name) for of in (whole, other))
        gains = set((other.capacities / whole.capacities).round(9).tolist())
        assert gains == ({1.0, 2.0} if "capacity" in words else {1.0})
        assert after.latency_s == pytest.approx(before.latency_s / (2 if "latency" in words else 1))


@pytest.mark.parametrize("name", sorted(topology.shipped()))
def test_a_cluster_of_two_levels_has_a_network_to_change_and_one_of_one_has_none(name: str) -> None:
    whole = topology.load(name)
    explorer: Any = SimpleNamespace(
        topology=whole, devices=whole.devices, again=lambda plan, other: SimpleNamespace(seconds=1.0)
    )
    assert (sensitivity(explorer, {"best": "plan"}) is None) == (len(whole.levels) == 1)
    explorer.devices = whole.sizes[0][0]  # all in one domain: nothing crosses the outer links
    assert sensitivity(explorer, {"best": "plan"}) is None
