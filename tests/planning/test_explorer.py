"""The search: never worse with more freedom, honest about what it dropped, stoppable; and what it writes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cordillera import topology
from cordillera.errors import PlanError
from cordillera.planning import workloads
from cordillera.planning.changes import parse_change
from cordillera.planning.language.explorer import Explorer, divisible
from cordillera.planning.language.job import PlannedJob
from cordillera.planning.language.step import families, held, simulate_step
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.mesh import Mesh
from cordillera.planning.pipeline.schedules import Schedule, one_forward_one_backward
from cordillera.planning.search import ALL
from cordillera.workflows import planning as commands

MANY = {"region.distance_km": 1500.0}


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    """512 devices of two buildings of which the first is full: a model of 70B."""
    cluster = topology.load("two-buildings").changed({"pod.members": 16, "building.members": 1})
    return Explorer(workloads.load("llama3-70b"), cluster.changed(MANY))


@pytest.mark.slow
def test_more_freedom_is_never_worse(explorer: Explorer) -> None:
    base = explorer.production()
    alone = {one: explorer.explore([one], keep=4).best.seconds for one in ALL}
    assert all(seconds <= base.seconds for seconds in alone.values())
    joint = explorer.explore(keep=4)
    assert joint.best.seconds <= min(alone.values())
    assert [plan.seconds for plan in joint.plans] == sorted(plan.seconds for plan in joint.plans)
    for plan in joint.plans:
        plan.layout.check(explorer.workload)
        plan.schedule.check()
        assert plan.step.memory_bytes <= 80e9
        assert plan.seconds == pytest.approx(sum(plan.step.parts.values()))
        assert min(plan.step.parts.values()) >= -1e-9
    assert not joint.interrupted
    assert joint.estimated > 100


@pytest.mark.slow
def test_the_same_search_finds_the_same(explorer: Explorer) -> None:
    first, second = (explorer.explore(["scheduling"], keep=4) for _ in range(2))
    assert first.best.to_json() == second.best.to_json()
    assert first.dropped == second.dropped


def test_an_interrupt_keeps_what_was_found() -> None:
    def stop(text: str) -> None:
        if "simulated" in text:
            raise KeyboardInterrupt

    cluster = topology.load("two-buildings").changed({"pod.members": 1, "building.members": 1, **MANY})
    work = workloads.load("gpt-22b").model_copy(update={"batch": 32})
    stopped = Explorer(work, cluster, progress=stop).explore(keep=4)
    assert stopped.interrupted
    assert stopped.best.seconds > 0


@pytest.mark.slow
def test_a_schedule_made_for_the_best_plan_is_faster_and_fits() -> None:
    cluster = topology.load("two-buildings").changed({"pod.members": 4, "building.members": 1, **MANY})
    far = Explorer(workloads.load("gpt-22b").model_copy(update={"batch": 32}), cluster)
    plain, improved = (far.explore(["scheduling"], keep=4, improve=count) for count in (0, 1))
    assert improved.best.schedule.name == "tuned"
    assert improved.best.seconds < 0.98 * plain.best.seconds
    improved.best.schedule.check()
    assert improved.best.step.memory_bytes <= 0.94 * 80e9
    assert improved.simulated == plain.simulated + 1


def test_the_step_is_the_schedule_and_what_follows(explorer: Explorer) -> None:
    layout = Layout(tensor=8, pipeline=8, data=8, shards=8, recompute="full", sequence_parallel=True)
    job = PlannedJob(explorer.workload, Mesh.of(explorer.topology, layout), layout, explorer.cost)
    schedule = one_forward_one_backward(8, job.microbatches)
    step = simulate_step(job, schedule)
    assert step.seconds >= step.timeline.seconds
    assert step.seconds == pytest.approx(job.estimate().seconds, rel=0.1)  # microbatches are many: both agree
    slowest = max(stage.total for stage in job.stages)
    assert step.seconds >= job.microbatches * slowest
    assert [sum(rank.values()) for rank in held(job, schedule)] == pytest.approx(
        [sum(rank.values()) for rank in job.memory], rel=0.02
    )
    for make in families(job).values():
        make().check()


@pytest.mark.slow
def test_nothing_that_fits_ends_with_reasons() -> None:
    small = topology.load("a100-node").changed({"device.memory_bytes": 1e9})
    with pytest.raises(PlanError, match=r"no plan is possible \(.*memory[\s\S]*devices with [\d,]+ GB"):
        Explorer(workloads.load("gpt-175b"), small).explore()
    odd = workloads.load("gpt-22b").model_copy(update={"batch": 1})
    assert (
        Explorer(odd, topology.load("a100-node").changed({"host.members": 7})).explore(keep=2).best.layout.pipeline == 7
    )
    with pytest.raises(PlanError, match=r"a batch that the number of devices divides, or another .*: 52 would do"):
        Explorer(odd, topology.load("a100-node").changed({"host.members": 53})).explore()
    with pytest.raises(PlanError, match="9 devices are asked for, the cluster has 8"):
        Explorer(workloads.load("gpt-22b"), small, devices=9)


@pytest.mark.parametrize(
    ("free", "changes", "allowed"),
    [
        ((), {}, True),
        ((), {"microbatch": 2}, False),
        (("scheduling",), {"microbatch": 2}, True),
        (("scheduling",), {"tensor": 4}, False),
        (("placement", "scheduling"), {"tensor": 4, "microbatch": 2}, True),
    ],
)
def test_layouts_differ_only_in_what_is_searched(free: tuple, changes: dict, allowed: bool) -> None:
    explorer = Explorer(workloads.load("gpt-22b"), topology.load("a100-node"))
    base = Layout(tensor=2, data=4)
    assert explorer._allowed(replace(base, **changes), base, free) is allowed


@pytest.mark.slow
def test_one_host_needs_no_network() -> None:
    best = Explorer(workloads.load("gpt-22b"), topology.load("a100-node")).explore(keep=2).best
    assert best.layout.devices == 8
    assert best.step.memory_bytes <= 80e9


def test_files_hold_what_they_should(tmp_path: Path) -> None:
    planned = commands.plan(
        "llama3-8b",
        "two-buildings",
        tmp_path,
        devices=64,
        only=["scheduling"],
        changes=["region.distance_km=10"],
        what_if=["rack.latency_s*=100"],
    )
    content = json.loads((tmp_path / "plan.json").read_text())
    best = content["plans"][0]
    assert best["seconds"] == planned.found.best.seconds
    assert best["evidence"] == "simulated"
    assert content["cluster"]["levels"][-1]["distance_km"] == 10
    schedule = Schedule.from_csv(best["schedule"]["csv"])
    assert schedule.actions == planned.found.best.schedule.actions
    sizes = 1
    for size in best["mesh"]["sizes"]:
        sizes *= size
    assert sizes == 64
    assert planned.what_if[0].seconds >= planned.found.best.seconds
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 4  # none over links that nothing crosses
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert not re.search(r"\b(nan|inf)\b", page, re.IGNORECASE)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert sum(event["ph"] == "X" and event["cat"] != "message" for event in trace["traceEvents"]) == len(
        list(schedule)
    )


@pytest.mark.parametrize(
    "text", ["region.distance_km", "distance=3", "region.distance_km=far", "a.b+=2", "=", "a.b=nan"]
)
def test_changes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is not a change"):
        parse_change(text)


def test_where_no_layout_follows_the_rules_the_baseline_gives_them_up() -> None:
    cluster = topology.load("two-buildings").changed({"pod.members": 1, "building.members": 1})
    large = workloads.load("llama3-70b")
    model = large.model.model_copy(update={"layers": 20})
    longest = large.model_copy(update={"sequence": 2**20, "batch": 8, "model": model, "published": ()})
    explorer = Explorer(longest, cluster)
    assert not explorer._baselines().plans
    base = explorer.production()
    assert base.layout.context > 1  # sequences have to be cut
    others = "the fastest that fits; none does by the rules of large jobs in one building"
    assert explorer.base_source == f"{base.layout}, {others}"
    assert explorer.explore(keep=2, improve=0).best.seconds <= base.seconds


def test_numbers_of_devices_divide_batch_and_layers() -> None:
    one = topology.load("a100-node")  # a host of eight
    work = workloads.load("gpt-22b")
    shortest = work.model_copy(update={"batch": 3, "sequence": 1024})
    single = shortest.model_copy(update={"model": shortest.model.model_copy(update={"layers": 1})})
    assert divisible(single, one) == {1, 2, 4, 8, 3, 6}  # tensor parallelism in powers of two, copies that divide three
    double = shortest.model_copy(update={"model": shortest.model.model_copy(update={"layers": 2})})
    assert divisible(double, one) == {1, 2, 4, 8, 3, 6}
    assert divisible(single.model_copy(update={"batch": 5}), one) == {1, 2, 4, 8, 5}
