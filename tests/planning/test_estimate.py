"""The analytic stage: what a device holds and sends, beside counts over all devices and hand-made sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from cordillera import topology
from cordillera.cost import CostModel, calibration_for
from cordillera.planning import workloads
from cordillera.planning.language.job import PlannedJob
from cordillera.planning.language.step import reductions, simulate_step
from cordillera.planning.language.workload import BYTES, Experts, Layout
from cordillera.planning.network.mesh import Mesh
from cordillera.planning.network.settings import production_network, tuned_network
from cordillera.planning.pipeline.schedules import breadth_first, interleaved, one_forward_one_backward

CLUSTER = topology.load("two-buildings").changed({"building.members": 1, "pod.members": 16})  # 512 devices
COST = CostModel(CLUSTER.device, calibration_for(CLUSTER.device))


def job(model: str, layout: Layout, network: str | None = None, **changes: float) -> PlannedJob:
    cluster = CLUSTER.changed({name.replace("__", "."): value for name, value in changes.items()})
    settings = {"library": production_network, "tuned": tuned_network}.get(network or "", lambda cluster: None)(cluster)
    return PlannedJob(workloads.load(model), Mesh.of(cluster, layout), layout, COST, settings)


@pytest.mark.parametrize("model", ["llama3-70b", "moe-400b", "gpt-22b"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=8, pipeline=4, data=16, shards=16),
        Layout(tensor=4, context=2, pipeline=2, data=32, shards=32, chunks=2),
        Layout(tensor=8, data=64, shards=64),
        Layout(tensor=8, data=64, shards=32, shard_weights=True),
        Layout(tensor=2, context=4, pipeline=4, data=16, shards=8, shard_weights=True, chunks=3),
    ],
)
def test_every_parameter_is_updated_once_in_each_group_of_copies(model: str, layout: Layout) -> None:
    one = job(model, layout)
    if one.workload.model.experts is not None:
        one = job(model, replace(layout, expert=8))
    per_rank = layout.tensor * layout.context * layout.shards  # devices of a rank that hold parts of one state
    updated = sum(one.updated(stages) * per_rank for stages in one.dealt_out)
    tables = 2 if layout.pipeline > 1 and one.workload.model.tied else 1  # both ends of a pipeline keep a tied table
    model_ = one.workload.model
    expected = model_.parameters + (tables - 1) * model_.vocabulary * model_.hidden
    assert updated == pytest.approx(expected, rel=1e-6)


def test_sharded_weights_are_gathered_by_hand_made_sums() -> None:
    layout = Layout(tensor=8, data=64, shards=64, shard_weights=True, sequence_parallel=True)
    slow = job("llama3-70b", layout, region__oversubscription=1e4)
    plain = job("llama3-70b", replace(layout, shard_weights=False), region__oversubscription=1e4)
    weights, rate = slow.layer_parameters[0], slow.rate(slow.mesh.tiers("data")[-1].edges)
    tiers = slow.mesh.tiers("data")
    gather, scatter = (
        COST.calibration.collective_s
        + sum(
            (tier.parts - 1) * (tier.edges.latency + each * weights / tier.ranks / tier.parts / slow.rate(tier.edges))
            for tier in tiers
        )
        for each in (BYTES, slow.workload.reduction_bytes)
    )
    assert rate < 5e7 * 2  # so slow that the gathers take longer than anything else
    assert scatter > 1.9 * gather  # gradients are reduced in 32 bits
    assert slow.layer.forward == pytest.approx(gather)
    assert slow.layer.total == pytest.approx(2 * gather + scatter)
    assert slow.layer.gather == pytest.approx(2 * gather + scatter - plain.layer.total)
    fast = job("llama3-70b", layout, host__bytes_per_s=1e15, device__nic_bytes_per_s=1e15)
    assert fast.layer.gather == 0
    assert fast.reduce([0]) == 0  # scattered in every backward, and there is one group only


def test_sharding_within_buildings_reduces_the_parts_across() -> None:
    layout = Layout(tensor=8, data=64, shards=32, shard_weights=True, sequence_parallel=True)
    one = job("llama3-70b", layout)
    ring, _ = one.mesh.group(32, one.mesh.stride("data"))
    assert CLUSTER.levels[ring.level].name == "pod"
    across = one.mesh.group(2, 32 * one.mesh.stride("data"))[0]
    assert CLUSTER.levels[across.level].name == "region"
    part = one.workload.reduction_bytes * sum(one.parameters([0])) / 32
    assert one.reduce([0]) == pytest.approx(2 * (across.latency + part / 2 / one.rate(across)))
    step = simulate_step(one, one_forward_one_backward(1, one.microbatches))
    assert step.seconds == pytest.approx(one.estimate().seconds, rel=0.02)
    unsharded = job("llama3-70b", replace(layout, shards=64, shard_weights=False))
    assert step.memory_bytes < simulate_step(unsharded, step.timeline.schedule).memory_bytes


def test_copies_of_a_sequence_share_the_reduction() -> None:
    whole = job("llama3-8b", Layout(data=128, shards=128))
    cut = job("llama3-8b", Layout(context=4, data=32, shards=32))
    assert cut.reduce([0]) == pytest.approx(whole.reduce([0]), rel=0.05)  # the same devices, two dimensions
    assert cut.updated([0]) == whole.updated([0])


def test_copying_takes_processors_and_zero_copy_does_not() -> None:
    layout = Layout(tensor=8, pipeline=8, data=8, shards=8, sequence_parallel=True, overlap_gradients=True)
    library, tuned = (job("llama3-70b", layout, name) for name in ("library", "tuned"))
    schedule = one_forward_one_backward(8, library.microbatches)
    copied, direct = simulate_step(library, schedule), simulate_step(tuned, schedule)
    lost = 2 * 0.02 * library.message_seconds(0)  # the first rank ends last: its forwards send, its backwards receive
    assert copied.parts["compute"] - direct.parts["compute"] == pytest.approx(library.microbatches * lost)
    assert copied.seconds > direct.seconds


def test_collectives_inside_a_stage_are_told_apart_from_computation() -> None:
    """The parts of a step without links are its computation; what links add is communication."""
    layout = Layout(tensor=2, context=2, expert=8, data=128, shards=128, sequence_parallel=True, recompute="full")
    fast = {"host__bytes_per_s": 1e18, "device__nic_bytes_per_s": 1e18}
    slow, plain = job("moe-400b", layout), job("moe-400b", layout, **fast)
    schedule = one_forward_one_backward(1, slow.microbatches)
    step = simulate_step(slow, schedule)
    assert step.parts["compute"] == pytest.approx(simulate_step(plain, schedule).parts["compute"], rel=1e-6)
    assert step.parts["compute"] == pytest.approx(slow.estimate().parts["compute"], rel=1e-6)
    passes = 48 * slow.microbatches
    assert step.parts["expert exchange"] == pytest.approx(passes * 6 * slow.exchange * 0.5)  # half of the layers
    assert step.parts["context parallel"] > 0
    assert step.parts["tensor parallel"] > 0
    assert step.seconds == pytest.approx(sum(step.parts.values()))


def test_experts_that_get_more_tokens_hold_all_others_up() -> None:
    layout = Layout(expert=8, data=512, shards=512)
    even = job("moe-400b", layout)
    experts = even.workload.model.experts
    assert experts is not None
    uneven = experts.model_copy(update={"imbalance": 2.0})
    model = even.workload.model.model_copy(update={"experts": uneven})
    work = even.workload.model_copy(update={"model": model})
    busy = PlannedJob(work, even.mesh, layout, COST)
    fixed = even.cost.calibration.collective_s + max(t.edges.latency for t in even.mesh.group(8, 1)[1])
    assert busy.exchange - fixed == pytest.approx(2 * (even.exchange - fixed))
    assert busy.layer.total > even.layer.total + 2 * (busy.exchange - even.exchange)
    assert busy.layer_activations > even.layer_activations
    with pytest.raises(ValidationError, match="an imbalance of 200 is more than all tokens on one of 128 experts"):
        Experts.model_validate({**experts.model_dump(), "imbalance": 200})


def test_gradients_are_scattered_whenever_a_rank_leaves_a_stage() -> None:
    layout = Layout(tensor=8, pipeline=4, data=16, shards=16, chunks=2, overlap_gradients=True)
    whole, cut = (job("llama3-70b", replace(layout, shard_gradients=cut)) for cut in (False, True))
    m = whole.microbatches
    for schedule, runs in ((interleaved(4, m, 2), m // 4), (breadth_first(4, m, 2), 1)):
        assert len(reductions(whole, schedule, 0)) == 2
        found = reductions(cut, schedule, 0)
        assert len(found) == 2 * runs
        scatters = sum(found.values()) - sum(reductions(whole, schedule, 0).values())
        assert scatters == pytest.approx((runs - 1) * (cut.scatter([0]) + cut.scatter([4])))
    # whole: 4 bytes for each parameter; cut: the part of each copy, two stages, and the embedding
    first = [0, 4]
    parameters, stage, table = sum(whole.parameters(first)), 10 * sum(whole.layer_parameters), whole.table
    assert whole.held(first, 0.0)["gradients"] == pytest.approx(4 * parameters)
    assert cut.held(first, 0.0)["gradients"] == pytest.approx(
        min(4 * parameters, 4 * (parameters / 16 + 2 * stage + table))
    )
    assert cut.held(first, 0.0)["weights"] == whole.held(first, 0.0)["weights"]


def test_what_is_recomputed_is_not_kept() -> None:
    kept = {}
    for recompute in ("none", "selective", "full"):
        layout = Layout(tensor=8, data=64, sequence_parallel=True, recompute=recompute)
        one = job("llama3-70b", layout)
        kept[recompute] = one.layer_activations
        again, reduce = one.layer.again, one.tensor_reduce
        if recompute == "none":
            assert again == 0
    model, tokens = one.workload.model, 8192
    width = 8 * model.hidden + 4 * (model.queries + model.keys)
    assert kept["selective"] == pytest.approx(tokens * width / 8)
    assert kept["none"] - kept["selective"] == pytest.approx(tokens * 4 * model.ffn / 8)  # two inputs of the gate
    assert kept["full"] == pytest.approx(tokens * 2 * model.hidden / 8)
    assert again > 2 * reduce


def test_doubling_takes_fewer_steps_where_latency_counts() -> None:
    layout = Layout(tensor=8, data=64, shards=64, sequence_parallel=True)
    ring, doubling = (job("llama3-8b", layout, name, pod__latency_s=1e-3) for name in ("library", "tuned"))
    size = 1e6
    assert doubling.all_reduce("data", size) < 0.5 * ring.all_reduce("data", size)
