"""Workloads: published sizes, layouts that cannot be, layers spread over stages."""

from __future__ import annotations

import pytest
import torch
from _memory_meter import SavedBytes
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cordillera import topology
from cordillera.cost import Calibration, CostModel
from cordillera.errors import PlanError
from cordillera.kernels.moe import expert_mlp
from cordillera.planning import workloads
from cordillera.planning.language.layers import activation_bytes, held_weights, layer_seconds
from cordillera.planning.language.workload import Experts, Layout, Transformer, Workload, layers_of_stages


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-22b", 22), ("gpt-175b", 175), ("gpt-530b", 530), ("gpt-1t", 1008),
        ("llama3-8b", 8.03), ("llama3-70b", 70.6), ("llama3-405b", 405.8), ("moe-400b", 400.7),
    ],
)  # fmt: skip
def test_published_sizes(name: str, billions: float) -> None:
    model = workloads.load(name).model
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_mixture_computes_with_what_is_active() -> None:
    model = workloads.load("moe-400b").model
    assert model.active_parameters / 1e9 == pytest.approx(17, rel=0.06)
    dense = workloads.load("llama3-8b")
    assert dense.model.flops_per_token(1) == pytest.approx(6 * dense.model.active_parameters, rel=1e-3)


class CountedBytes(CostModel):
    """A device that takes a second for a byte and none for arithmetic."""

    def stream(self, size: float) -> float:
        return size

    def product(self, *sizes: float) -> float:
        return 0.0

    def attention(self, flops: float) -> float:
        return 0.0


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_activations_of_a_layer_pass_memory_as_often_as_in_megatron(tensor: int, sequence: bool) -> None:
    """Of gpt-22b, whose feed-forward net is four times as wide as the rest: multiples of a layer's input in bytes."""
    if sequence and tensor == 1:
        return
    workload = workloads.load("gpt-22b")
    model = workload.model.model_copy(update={"fused_attention": True})
    workload = workload.model_copy(update={"model": model})
    cost = CountedBytes(topology.load("a100-node").device, Calibration(layer_s=0.0))
    layout = Layout(tensor=tensor, sequence_parallel=sequence)
    found = layer_seconds(workload, layout, cost, 0.0)
    x = 2 * workload.sequence * model.hidden
    norms = 1 / tensor if sequence else 1
    assert found.forward == pytest.approx(x * (11 * norms + 6 / tensor + 2 * 4 / tensor))
    assert found.input_gradient == pytest.approx(x * (17 * norms + 3 / tensor + 3 * 4 / tensor))


@given(layers=st.integers(1, 200), stages=st.integers(1, 64))
def test_layers_are_spread_evenly_with_the_fewest_at_the_ends(layers: int, stages: int) -> None:
    counts = layers_of_stages(layers, stages)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    assert counts[0] == min(counts) or max(counts) == min(counts) or counts.count(min(counts)) < 2
    assert layers_of_stages(126, 16) == [7] + [8] * 14 + [7]  # Llama 3


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor=3), "tensor 3 does not divide heads 32: 2 would"),
        (Layout(tensor=12), "tensor 12 does not divide ffn 14336: 14 would"),
        (Layout(tensor=16, data=3), "data 3 x microbatch 1 does not divide batch 2048: 2 would"),
        (Layout(data=3000), "does not divide batch 2048: 2048 would"),
        (Layout(context=3), "context 3 does not cut 8192 tokens into two equal parts each: 2 would"),
        (Layout(pipeline=64), "64 stages are more than 32 layers and a stage for each embedding: 32"),
        (Layout(pipeline=8, chunks=8), "64 stages are more than 32 layers"),
        (Layout(expert=2, data=2), "expert above 1 needs a model with experts"),
        (Layout(data=4, shards=3), "shards 3 does not divide data 4: 2 would"),
        (Layout(sequence_parallel=True), "sequence_parallel needs tensor above 1"),
        (Layout(microbatch=0), "microbatch is 0, at least 1 is needed"),
    ],
)
def test_layouts_that_cannot_be_are_refused_with_the_nearest_that_can(layout: Layout, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        layout.check(workloads.load("llama3-8b"))


def test_degrees_of_keys_and_experts_say_the_nearest_too() -> None:
    mixture = workloads.load("moe-400b")
    experts = mixture.model.experts
    assert experts is not None
    problems = Layout(expert=3, data=4).problems(mixture)
    assert f"expert 3 does not divide {experts.count} experts: 2 would" in problems
    assert "expert 3 does not divide data 4: 2 would" in problems
    grouped = workloads.load("llama3-8b")
    odd = grouped.model.model_copy(update={"kv_heads": 6, "heads": 24, "ffn": 96, "head_dim": 64})
    problems = Layout(tensor=4).problems(grouped.model_copy(update={"model": odd}))
    assert problems == ["tensor 4 and kv_heads 6: neither divides the other: 3 would"]
    narrow = grouped.model.model_copy(update={"kv_heads": 2, "heads": 24, "ffn": 96, "head_dim": 6})
    problems = Layout(tensor=8).problems(grouped.model_copy(update={"model": narrow}))
    assert problems == ["tensor 8: 4 ranks that share a head do not divide its width 6"]


@given(kv_heads=st.sampled_from([1, 2, 4]), sharers=st.sampled_from([1, 2, 4]))
def test_ranks_that_share_a_head_keep_all_of_it_and_hold_a_part_of_its_weights(kv_heads: int, sharers: int) -> None:
    """As much as ranks that have a head each, whose model has more weights."""
    layout = Layout(tensor=kv_heads * sharers, sequence_parallel=kv_heads * sharers > 1)
    shared = Workload(
        model=Transformer(layers=2, hidden=512, heads=16, kv_heads=kv_heads, ffn=1024), sequence=128, batch=1
    )
    own = shared.model_copy(update={"model": shared.model.model_copy(update={"kv_heads": layout.tensor})})
    assert not layout.problems(shared)
    assert activation_bytes(shared, layout) == activation_bytes(own, layout)
    fewer = 2 * (sharers - 1) * kv_heads * 32 * 512 / layout.tensor
    assert held_weights(own.model, layout)[0] - held_weights(shared.model, layout)[0] == fewer


def test_products_take_at_least_their_arithmetic_and_their_traffic() -> None:
    device = topology.load("selene").device
    cost = CostModel(device, Calibration(matrix=1.0, memory=1.0))
    for shape in ((8192, 8192, 8192), (128, 128, 4096), (1, 4096, 4096), (8192, 8192, 64)):
        rows, columns, inner = shape
        seconds = cost.product(*shape)
        assert seconds >= 2 * rows * columns * inner / device.matrix_flops_per_s
        assert seconds >= 2 * (rows * columns + rows * inner + columns * inner) / device.memory_bytes_per_s
    assert cost.product(8192, 8192, 8192) == pytest.approx(2 * 8192**3 / 312e12, rel=0.05)


def test_all_experts_may_be_active_and_no_more() -> None:
    assert Experts(count=4, active=4, ffn=8).active == 4
    with pytest.raises(ValidationError, match="5 active of 4 experts"):
        Experts(count=4, active=5, ffn=8)


def with_experts(**changes: int) -> Workload:
    """The workload moe-400b with small experts in every layer, changed."""
    job = workloads.load("moe-400b")
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 160, "vocabulary": 256, "layers": 6}
    experts = Experts(**{"count": 8, "active": 2, "ffn": 96, "shared_ffn": 0, "every": 1, **changes})
    return job.model_copy(update={"sequence": 128, "model": job.model.model_copy(update={**sizes, "experts": experts})})


class Listed(CostModel):
    """A device that lists its products and takes no time."""

    def __init__(self) -> None:
        super().__init__(topology.load("a100-node").device, Calibration(layer_s=0.0))
        self.asked: list[tuple[float, ...]] = []

    def product(self, rows: float, columns: float, inner: float, count: float = 1.0, fp8: bool = False) -> float:
        assert not fp8
        self.asked.append((rows, columns, inner, count))
        return 0.0


def test_experts_of_a_device_are_products_in_one_kernel() -> None:
    """Two choices of 8 experts for each of 128 tokens, over 4 devices: 2 experts a device with 128 tokens each."""
    cost = Listed()
    layer_seconds(with_experts(shared_ffn=48), Layout(tensor=2, expert=4, data=4), cost, 0.0)
    of_experts = [
        (128, 96, 64, 2), (128, 64, 96, 2), (64, 96, 128, 2),  # gate and up: forward, input gradient, weights
        (128, 64, 48, 2), (128, 48, 64, 2), (48, 64, 128, 2),  # down
    ]  # fmt: skip
    assert [shape for shape in cost.asked if shape[3] == 2] == of_experts
    assert (128, 8, 64, 1) in cost.asked  # router
    assert (128, 48, 64, 1) in cost.asked  # shared expert, gate and up


def test_a_layer_of_experts_takes_its_share_of_the_mean() -> None:
    cost = CostModel(topology.load("a100-node").device, Calibration(layer_s=0.0))
    every, third, without = (
        layer_seconds(with_experts(every=every), Layout(), cost, 0.0).forward for every in (1, 3, 7)
    )
    assert third == pytest.approx(every / 3 + without * 2 / 3)
    dense = with_experts()
    model = dense.model.model_copy(update={"experts": None})
    assert without == layer_seconds(dense.model_copy(update={"model": model}), Layout(), cost, 0.0).forward


def test_rows_of_experts_pass_memory_when_gathered_and_combined() -> None:
    cost = CountedBytes(topology.load("a100-node").device, Calibration(layer_s=0.0))
    found = {
        active: layer_seconds(with_experts(active=active, ffn=96 // active), Layout(), cost, 0.0) for active in (1, 2)
    }
    row = 2 * 128 * 64  # of each token, 16 bits
    assert found[2].forward - found[1].forward == pytest.approx(3 * row)
    assert found[2].input_gradient - found[1].input_gradient == pytest.approx(6 * row)


def test_experts_keep_what_the_kernels_keep() -> None:
    """Measured for the layer that the planner counts: beside its input, which counts as that of a norm."""
    job = with_experts()
    x, chosen = torch.randn(128, 64, dtype=torch.bfloat16), torch.stack([torch.randperm(8)[:2] for _ in range(128)])
    sizes = ((8, 64, 96), (8, 96, 64), (8, 64, 96))
    w1, w3, w2 = (torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes)
    gates = torch.rand(128, 2, requires_grad=True)
    with SavedBytes(without=[x, w1, w3, w2]) as saved:
        expert_mlp(x, chosen, gates, w1, w3, w2)
    nothing = job.model_copy(update={"model": job.model.model_copy(update={"experts": None, "ffn": 1})})
    of_net = 4 * 128  # two inputs of a fused gate of width 1
    of_experts = activation_bytes(job, Layout()) - activation_bytes(nothing, Layout()) + of_net
    assert saved.total == of_experts + 8 * 9  # and the offset of each expert
