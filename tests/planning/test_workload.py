"""Workloads: published sizes, layouts that cannot be, layers spread over stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cordillera import topology
from cordillera.cost import Calibration, CostModel
from cordillera.errors import PlanError
from cordillera.planning import workloads
from cordillera.planning.language.workload import Experts, Layout, layer_seconds, layers_of_stages


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

    def linear(self, rows: float, outputs: float, inputs: float) -> tuple[float, float, float]:
        return 0.0, 0.0, 0.0

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
        (Layout(pipeline=64), "64 stages are more than 32 layers: 32 would do"),
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
