"""Clusters of several generations of devices: links by hand, and steps against clusters of one kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera import topology
from cordillera.cost import calibration_for
from cordillera.errors import PlanError
from cordillera.planning import workloads
from cordillera.planning.changes import with_changes
from cordillera.planning.language.explorer import Explorer
from cordillera.planning.language.own_layout import OwnLayout, read_layout
from cordillera.planning.language.plans import Plan
from cordillera.planning.language.step import stage_seconds, ways
from cordillera.planning.language.what_if import again
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.mesh import Mesh
from cordillera.planning.pipeline.simulator import simulate
from cordillera.planning.ranking.exchange import TableLayout
from cordillera.planning.ranking.explorer import RecommenderExplorer
from cordillera.planning.sensitivity import sensitivity
from cordillera.topology import Device, DeviceGroup, Topology
from cordillera.workflows import planning as commands
from tests.planning.flows import route

FAST = topology.load("two-buildings").changed(
    {"pod.members": 2, "building.members": 1, "rack.members": 2}
)  # 64 devices
NEW = FAST.device
OLD = NEW.model_copy(update={"matrix_flops_per_s": NEW.matrix_flops_per_s / 2})  # same name, so same constants
A100 = topology.load("selene").device
WORK = workloads.load("llama3-8b").model_copy(update={"batch": 64})
OUTERMOST = {"data": ("tensor", "context", "pipeline", "data"), "pipeline": ("tensor", "context", "data", "pipeline")}


def mixed(*groups: tuple[str, int, Device], base: Topology = FAST, port: float | None = None) -> Topology:
    entries = [
        {"level": level, "domain": domain, "device": device.model_dump(), "port_bytes_per_s": port}
        for level, domain, device in groups
    ]
    return topology.validate(Topology, {**base.model_dump(), "groups": entries}, "mixed")


SLOW = mixed(("region", 0, OLD))
HALF = mixed(("building", 1, OLD))


def test_a_factor_changes_the_link_of_every_kind() -> None:
    for cluster in (SLOW, HALF, mixed(("host", 1, A100), ("rack", 2, A100))):
        for level in range(1, len(cluster.levels)):
            members = range(len(cluster.sizes[level - 1]))
            for change, factor in (("*=2", 2.0), ("/=4", 0.25)):
                changed = cluster.changed({f"{cluster.levels[level].name}.bytes_per_s": change})
                before, after = ([one.member_bytes_per_s(level, i) for i in members] for one in (cluster, changed))
                assert after == pytest.approx([factor * rate for rate in before])


def test_a_factor_changes_links_and_ports_that_differ_too() -> None:
    link = {"level": "region", "member": 1, "bytes_per_s": 1e9}
    content = {**mixed(("building", 1, A100), port=300e9).model_dump(), "links": [link]}
    cluster = topology.validate(Topology, content, "mixed")
    changed = with_changes(cluster, {"region.bytes_per_s": "*=2", "host.bytes_per_s": "/=2"})
    for level, factor, members in ((0, 0.5, 64), (1, 1.0, 8), (3, 1.0, 2), (4, 2.0, 2)):
        before, after = ([one.member_bytes_per_s(level, i) for i in range(members)] for one in (cluster, changed))
        assert after == pytest.approx([factor * rate for rate in before])
    number = with_changes(cluster, {"region.bytes_per_s": 5e9, "region.oversubscription": 1.0, "host.bytes_per_s": 1e9})
    assert [number.member_bytes_per_s(4, i) for i in (0, 1)] == [5e9, 1e9]
    assert [number.member_bytes_per_s(0, i) for i in (0, 63)] == [1e9, 300e9]
    # so do the upgrades that the page of a plan shows
    asked: list[Topology] = []

    def simulated(plan: str, other: Topology) -> SimpleNamespace:
        asked.append(other)
        return SimpleNamespace(seconds=1.0)

    explorer: Any = SimpleNamespace(topology=cluster, devices=cluster.devices, again=simulated)
    found = sensitivity(explorer, {"best": "plan"})
    assert found is not None
    words = [words for words, _ in found.upgrades]
    assert words[1] == "twice the rate of network cards of H100 SXM5 80GB and of links that follow from it"
    upgraded = dict(zip(words, asked[-len(words) :], strict=True))
    assert upgraded["twice the capacity of links into each region"].member_bytes_per_s(4, 1) == 2e9
    assert upgraded["twice the bandwidth within each host"].member_bytes_per_s(0, 63) == 600e9


def planned(cluster: Topology, layout: Layout, outermost: str = "data") -> Plan:
    return Explorer(WORK, cluster).evaluate(OwnLayout("one", layout, order=OUTERMOST[outermost]))


def test_links_and_ports_are_those_of_each_kind() -> None:
    cluster = mixed(("host", 1, A100), ("building", 1, A100), port=300e9)
    assert cluster.kinds == (NEW, A100)
    kinds = cluster.kind_of
    assert np.flatnonzero(kinds).tolist() == [*range(8, 16), *range(32, 64)]
    a, b = route(cluster, 0, 8)[0], route(cluster, 8, 40)[0]
    assert cluster.capacities[list(a)].tolist() == [50e9, 8 * 50e9, 8 * 25e9, 25e9]  # cards, and what hosts hold
    assert cluster.capacities[b[0]] == cluster.capacities[b[-1]] == 25e9
    # building 0: one of its four hosts is old; building 1: all are; and 1:2.8 twice
    outer = [cluster.member_bytes_per_s(4, member) for member in (0, 1)]
    assert outer == pytest.approx([(24 * 50e9 + 8 * 25e9) / 2.8, 32 * 25e9 / 2.8])
    assert cluster.capacities[list(route(cluster, 0, 1)[0])].tolist() == [450e9] * 2
    assert cluster.capacities[list(route(cluster, 8, 9)[0])].tolist() == [300e9] * 2
    # a member's link that differs, or has a rate of its own, keeps it
    narrow = cluster.changed({"region.bytes_per_s": 1e9, "region.oversubscription": 1.0})
    assert narrow.member_bytes_per_s(4, 0) == 1e9
    # one kind everywhere, written as a group, is that kind
    same = mixed(("region", 0, NEW))
    assert (same.capacities == FAST.capacities).all()


def test_a_group_goes_with_its_domain() -> None:
    cluster = mixed(("host", 1, A100), ("building", 1, OLD))
    for level, domain in (("host", 0), ("host", 1), ("building", 0), ("building", 1), ("rack", 3), ("device", 63)):
        rest = cluster.without(level, domain)
        at = cluster.index(level) if level != "device" else -1
        kept = [cluster.domain(device, at) != domain for device in range(64)]
        expected = [cluster.kinds[kind] for kind in cluster.kind_of[kept]]
        assert [rest.kinds[kind] for kind in rest.kind_of] == expected


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("hall", 0, OLD)], "'hall' is not one of the levels"),
        ([("building", 2, OLD)], "there is no building 2"),
        ([("building", 1, OLD), ("host", 4, A100)], r"groups\[0\] and groups\[1\] have devices in common"),
        ([("host", 4, OLD), ("host", 4, OLD)], r"groups\[0\] and groups\[1\] have devices in common"),
    ],
)
def test_groups_that_are_wrong_are_refused(groups: list[tuple[str, int, Device]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        mixed(*groups)


@settings(max_examples=40)
@given(
    tensor=st.sampled_from([1, 2, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
    outermost=st.sampled_from(sorted(OUTERMOST)),
    hosts=st.sets(st.integers(0, 7)),
)
def test_kinds_of_pipeline_ranks_are_those_of_their_devices(
    tensor: int, pipeline: int, outermost: str, hosts: set[int]
) -> None:
    cluster = mixed(*(("host", host, A100) for host in sorted(hosts)))
    layout = Layout(tensor=tensor, pipeline=pipeline, data=64 // tensor // pipeline)
    order = OUTERMOST[outermost]
    mesh = Mesh.of(cluster, layout, order)
    found: list[set[int]] = [set() for _ in range(pipeline)]
    for device in range(64):
        rank = device // mesh.stride("pipeline") % pipeline
        found[rank].add(int(cluster.kind_of[device]))
    assert [set(kinds) for kinds in mesh.kinds] == found
    assert mesh.memory == [80e9] * pipeline
    old = 8 * len(hosts)
    assert mesh.peak == pytest.approx((64 - old) * 989e12 + old * 312e12)


@pytest.mark.parametrize("chunks", [1, 2])
def test_copies_on_other_devices_make_all_wait(chunks: int) -> None:
    """Data parallelism across the buildings: every pipeline rank has old devices, so the step is that of old ones."""
    layout = Layout(tensor=8, pipeline=2, data=4, shards=4, chunks=chunks, overlap_gradients=True)
    half, slow = planned(HALF, layout), planned(SLOW, layout)
    assert half.step.parts == slow.step.parts
    assert half.peak == pytest.approx(48 * 989e12)
    assert half.utilisation == pytest.approx(slow.utilisation * 32 / 48)


@pytest.mark.parametrize(("chunks", "schedule"), [(1, "1f1b"), (2, "interleaved"), (2, "zbv")])
def test_stages_are_as_fast_as_the_devices_that_hold_them(chunks: int, schedule: str) -> None:
    """The pipeline across the buildings: its first half is new, its second half old."""
    layout = Layout(tensor=4, pipeline=4, data=4, shards=4, chunks=chunks)
    own = OwnLayout("one", layout, schedule=schedule, order=OUTERMOST["pipeline"])
    half, fast, slow = (Explorer(WORK, cluster).evaluate(own) for cluster in (HALF, FAST, SLOW))
    jobs = [Explorer(WORK, cluster).job(layout, OUTERMOST["pipeline"], half.network) for cluster in (FAST, SLOW)]
    times = [stage_seconds(job, half.schedule) for job in jobs]
    joined = {
        name: [getattr(times[rank >= 2], name)[stage] for stage, rank in enumerate(half.schedule.rank_of)]
        for name in ("forward", "input_gradient", "weight_gradient")
    }
    expected = simulate(half.schedule, replace(times[0], **joined), ways(jobs[0]))
    assert half.step.timeline.seconds == pytest.approx(expected.seconds, rel=1e-12)
    assert fast.seconds < half.seconds < slow.seconds


@settings(max_examples=25)
@given(
    hosts=st.lists(st.integers(0, 7), max_size=4, unique=True),
    more=st.integers(0, 7),
    tensor=st.sampled_from([4, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
    outermost=st.sampled_from(sorted(OUTERMOST)),
    shard_weights=st.booleans(),
)
def test_more_old_hosts_are_never_faster(
    hosts: list[int], more: int, tensor: int, pipeline: int, outermost: str, shard_weights: bool
) -> None:
    data = 64 // tensor // pipeline
    layout = Layout(
        tensor=tensor, pipeline=pipeline, data=data, shards=data, shard_weights=shard_weights, overlap_gradients=True
    )
    few, many = (
        planned(mixed(*(("host", host, OLD) for host in sorted(each))), layout, outermost).seconds
        for each in (set(hosts), {*hosts, more})
    )
    assert planned(FAST, layout, outermost).seconds <= few * (1 + 1e-12)
    assert few <= many * (1 + 1e-12) <= planned(SLOW, layout, outermost).seconds * (1 + 1e-9)


def test_each_device_has_its_own_memory() -> None:
    """Early ranks of 1F1B keep more activations, so that small devices suffice only at the end of a pipeline."""
    layout = Layout(tensor=2, pipeline=4, data=8, shards=8, overlap_gradients=True)
    own = OwnLayout("one", layout, order=OUTERMOST["pipeline"])
    plan = Explorer(WORK, FAST).evaluate(own)
    needed = [sum(rank.values()) for rank in plan.step.memory]
    assert max(needed[2:]) < 0.9 * needed[0]
    small = NEW.model_copy(update={"memory_bytes": (max(needed[2:]) + needed[0]) / 2 / 0.94})
    last, first = (Explorer(WORK, mixed(("building", building, small))) for building in (1, 0))
    assert last.fits(last.evaluate(own))
    assert not first.fits(first.evaluate(own))
    assert last.usable_memory == pytest.approx(0.94 * small.memory_bytes)
    assert first.limits(Mesh.of(first.topology, layout, own.order)) == pytest.approx(
        [0.94 * small.memory_bytes] * 2 + [0.94 * 80e9] * 2
    )
    found = last.explore(["placement"])
    assert all(last.fits(one) for one in found.plans)
    # without a fault the case says nothing; with small devices everywhere it names what is needed
    tiny = mixed(("building", 1, NEW.model_copy(update={"memory_bytes": needed[3] / 2})))
    assert "but it needs" in again(last, last.evaluate(own), "tiny", tiny).note
    assert again(last, last.evaluate(own), "same", last.topology).note == ""
    # what is needed may take a part of the memory only, and it is the same part as in a search
    full = mixed(("building", 1, NEW.model_copy(update={"memory_bytes": max(needed[2:]) / 0.95})))
    note = f"but it needs {max(needed[2:]) / 1e9:.3g} GB on a device of {max(needed[2:]) / 0.95e9:.3g} GB"
    assert again(last, last.evaluate(own), "full", full).note == f"{note}, of which 94 % may be taken"
    assert not Explorer(WORK, full).fits(Explorer(WORK, full).evaluate(own))


@pytest.mark.parametrize("groups", [[("building", 1, OLD)], [("host", 1, OLD), ("building", 1, A100)]])
def test_a_generation_that_a_change_brings_into_use_computes_as_itself(groups: list[tuple[str, int, Device]]) -> None:
    """Half as many hosts in each building, so that a plan for the first takes half of its devices from the second."""
    cluster, own = mixed(*groups), read_layout("tensor=8", 32, WORK)
    narrow = cluster.changed({"pod.members": 1})
    before, after = (Explorer(WORK, one, devices=32) for one in (cluster, narrow))
    assert len(after.costs) == len(before.costs) + 1
    assert before.again(before.evaluate(own), narrow).parts == after.evaluate(own).step.parts
    assert after.again(after.evaluate(own), cluster).parts == before.evaluate(own).step.parts
    assert after.evaluate(own).seconds > before.evaluate(own).seconds


def test_a_change_under_which_the_plan_cannot_run_is_warned_of_and_the_plan_is_written(tmp_path: Path) -> None:
    text = Path(str(topology.resources.files("cordillera.clusters") / "two-buildings.toml")).read_text()
    (tmp_path / "mine.toml").write_text(
        text + '\n[[groups]]\nlevel = "building"\ndomain = 1\ndevice = { name = "old", matrix_flops_per_s = 312e12, '
        "memory_bytes = 40e9, memory_bytes_per_s = 1555e9, nic_bytes_per_s = 25e9 }\n"
    )
    (tmp_path / "small.toml").write_text(
        "batch = 8\nsequence = 64\n[model]\nlayers = 2\nhidden = 32\nheads = 4\nvocabulary = 64\n"
    )
    changes = ["host.members=2", "rack.members=1", "pod.members=2", "building.members=1"]
    with pytest.warns(UserWarning, match=r"^with pod\.members=1: has no FP8"):
        made = commands.plan(
            tmp_path / "small.toml", tmp_path / "mine.toml", tmp_path / "p", devices=4, changes=changes,
            layouts=["tensor=2,fp8=linear"], what_if=["pod.members=1", "host.latency_s*=2"],
        )  # fmt: skip
    assert [case.what for case in made.what_if] == ["host.latency_s*=2"]
    assert made.files["plan.json"].exists()


def test_devices_of_one_kind_in_use_are_a_cluster_of_one_kind() -> None:
    cluster, layout = mixed(("building", 1, A100)), read_layout("tensor=8,pipeline=2", 32, WORK)
    part, whole = (Explorer(WORK, one, devices=32) for one in (cluster, FAST))
    assert part.evaluate(layout).to_json() == whole.evaluate(layout).to_json()
    assert part.evaluate(layout).error == calibration_for(NEW).error
    both = Explorer(WORK, cluster)
    assert both.evaluate(read_layout("tensor=8", 64, WORK)).error is None
    assert [one.device for one in both.costs.values()] == [NEW, A100]
    assert all(one.calibration.one_ring for one in both.costs.values())  # seen on A100
    assert [one.calibration.matrix for one in both.costs.values()] == [0.65, 0.81]
    assert "H100" in both.constants
    assert "A100" in both.constants
    # the first building is old: the cluster's own kind is not in use
    first = Explorer(WORK, mixed(("building", 0, A100)), devices=32)
    assert [one.device for one in first.costs.values()] == [A100]
    assert first.evaluate(layout).peak == 32 * 312e12
    with pytest.raises(PlanError, match="has no FP8"):
        both.evaluate(read_layout("tensor=8,fp8=ffn", 64, WORK))


def test_a_cluster_file_has_groups_and_its_mistakes_are_named(tmp_path: Path) -> None:
    text = Path(str(topology.resources.files("cordillera.clusters") / "two-buildings.toml")).read_text()
    group = '\n[[groups]]\nlevel = "building"\ndomain = 1\ndevice = { name = "old", matrix_flops_per_s = 312e12, %s }\n'
    rest = "memory_bytes = 40e9, memory_bytes_per_s = 1555e9, nic_bytes_per_s = 25e9"
    file = tmp_path / "mine.toml"
    file.write_text(text + group % rest)
    assert topology.load(file).groups == (DeviceGroup(level="building", domain=1, device=topology.load(file).kinds[1]),)
    file.write_text(text + group % rest.replace("40e9", '"40 GB"'))
    with pytest.raises(PlanError, match=r"groups\[0\]\.device\.memory_bytes: must be a number"):
        topology.load(file)


def test_what_is_for_one_kind_of_devices_is_refused(tmp_path: Path) -> None:
    cluster = mixed(("building", 1, A100))
    tables = workloads.load("dlrm-dcnv2")
    with pytest.raises(PlanError, match="one kind of devices"):
        RecommenderExplorer(tables, cluster)  # type: ignore[arg-type]
    first = RecommenderExplorer(tables, cluster, devices=32)  # type: ignore[arg-type]
    assert first.devices == 32
    plan: Any = SimpleNamespace(layout=TableLayout(32))
    with pytest.raises(PlanError, match="one kind of devices"):
        first.again(plan, cluster.changed({"pod.members": 1}))  # 16 of the 32 would be in the second building
    file = tmp_path / "mine.toml"
    file.write_text(
        Path(str(topology.resources.files("cordillera.clusters") / "two-buildings.toml")).read_text()
        + '\n[[groups]]\nlevel = "building"\ndomain = 1\ndevice = { name = "old", matrix_flops_per_s = 312e12, '
        "memory_bytes = 40e9, memory_bytes_per_s = 1555e9, nic_bytes_per_s = 25e9 }\n"
    )
    steps = tmp_path / "steps.csv"
    steps.write_text(
        "layers,hidden,heads,sequence,batch,microbatch,tensor,data,pipeline,milliseconds\n"
        "24,1024,16,1024,64,1,1,8,1,951\n"
    )
    with pytest.raises(PlanError, match="one kind of devices"):
        commands.calibrate(steps, file, tmp_path / "out")
