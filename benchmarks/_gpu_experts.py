"""Experts over routed tokens on a GPU, beside a loop over experts and experts of a fixed capacity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from _gpu_timing import interleave_on_gpu, peak_bytes
from _memory_meter import SavedBytes
from _timing import times_faster
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from cordillera.kernels.moe import POLICIES, SavingPolicy, expert_mlp

ROUNDS = 9
ALLOWED = 3e-2  # relative to the loop over experts, in bfloat16
PEERS = ("grouped", "loop", "capacity")


@dataclass(frozen=True)
class ExpertShape:
    """A layer of SwiGLU experts.

    Attributes:
        tokens: Number of tokens.
        width: Width of a token.
        hidden: Width of an expert.
        experts: Number of experts.
        choices: Number of experts of each token.
        routing: ``even``, or ``skewed`` towards the first experts.
    """

    tokens: int
    width: int
    hidden: int
    experts: int
    choices: int
    routing: str


SHAPES = (
    ExpertShape(16384, 1024, 2048, 8, 2, "even"),
    ExpertShape(16384, 1024, 2048, 8, 2, "skewed"),
    ExpertShape(16384, 1024, 512, 64, 8, "even"),
    ExpertShape(16384, 1024, 512, 64, 8, "skewed"),
    ExpertShape(8192, 2048, 1024, 32, 4, "even"),
)
QUICK = (ExpertShape(256, 64, 64, 4, 2, "skewed"),)


class ExpertCase:
    """Weights, tokens and choices of one shape in bfloat16, and the ways to compute a layer."""

    def __init__(self, shape: ExpertShape, device: str = "cuda") -> None:
        draw = torch.Generator(device).manual_seed(1)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=draw, device=device)

        def weight(*size: int) -> Tensor:
            return (normal(*size) / math.sqrt(size[1])).bfloat16().requires_grad_()

        self.x = normal(shape.tokens, shape.width).bfloat16().requires_grad_()
        lean = torch.arange(shape.experts, device=device) / shape.experts
        likes = torch.rand(shape.tokens, shape.experts, generator=draw, device=device)
        top = (likes - (1.5 if shape.routing == "skewed" else 0.0) * lean).topk(shape.choices)
        self.experts, self.gates = top.indices, top.values.softmax(-1).requires_grad_()
        self.w1, self.w2 = (weight(shape.experts, shape.width, shape.hidden) for _ in range(2))
        self.w3 = weight(shape.experts, shape.hidden, shape.width)
        self.gradient = normal(shape.tokens, shape.width).bfloat16()
        counts = torch.bincount(self.experts.flatten(), minlength=shape.experts)
        self.capacity, self.fullest = int(counts.max()), float(counts.max() / counts.float().mean())

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors with gradients."""
        return [self.x, self.gates, self.w1, self.w2, self.w3]

    def ours(self, policy: SavingPolicy) -> Tensor:
        """Compute with our layer."""
        return expert_mlp(self.x, self.experts, self.gates, self.w1, self.w3, self.w2, policy=policy)

    def grouped(self) -> Tensor:
        """Bring tokens into the order of experts and multiply in groups."""
        order = self.experts.flatten().argsort(stable=True)
        tokens = order // self.experts.shape[1]
        ends = torch.bincount(self.experts.flatten(), minlength=len(self.w1)).cumsum(0).int()
        rows = self.x[tokens]
        y = functional.silu(functional.grouped_mm(rows, self.w1, offs=ends))
        y = y * functional.grouped_mm(rows, self.w2, offs=ends)
        out = functional.grouped_mm(y, self.w3, offs=ends) * self.gates.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(self.x).index_add(0, tokens, out)

    def loop(self) -> Tensor:
        """Compute expert after expert."""
        out = torch.zeros_like(self.x)
        for expert in range(len(self.w1)):
            tokens, choice = torch.where(self.experts == expert)
            rows = self.x[tokens]
            y = functional.silu(rows @ self.w1[expert]) * (rows @ self.w2[expert])
            gate = self.gates[tokens, choice, None].to(y.dtype)
            out = out.index_add(0, tokens, (y @ self.w3[expert]) * gate)
        return out

    def capacity_padded(self) -> Tensor:
        """Give every expert as many places as the fullest needs, so that none is dropped, and multiply in batches."""
        count, choices = len(self.w1), self.experts.shape[1]
        flat = self.experts.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=count).cumsum(0)
        expert = flat[order]
        rank = torch.arange(len(flat), device=flat.device) - torch.cat([ends.new_zeros(1), ends[:-1]])[expert]
        places, tokens = expert * self.capacity + rank, order // choices
        rows = self.x.new_zeros(count * self.capacity, self.x.shape[1]).index_copy(0, places, self.x[tokens])
        rows = rows.view(count, self.capacity, -1)
        y = functional.silu(torch.bmm(rows, self.w1)) * torch.bmm(rows, self.w2)
        out = torch.bmm(y, self.w3).flatten(0, 1)[places] * self.gates.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(self.x).index_add(0, tokens, out)

    def ways(self) -> dict[str, Callable[[], Tensor]]:
        """Return our policies and the peers, by name."""
        ours: dict[str, Callable[[], Tensor]] = {policy: partial(self.ours, policy) for policy in POLICIES}
        return ours | {"grouped": self.grouped, "loop": self.loop, "capacity": self.capacity_padded}

    def both(self, way: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """Compute the output and all gradients."""
        return torch.autograd.grad(way(), self.tensors, self.gradient)

    def check(self) -> None:
        """Check that all ways compute the same gradients (``AB8`` within its error)."""
        expected = self.both(self.loop)
        for name, way in self.ways().items():
            for ours, theirs in zip(self.both(way), expected, strict=True):
                allowed = 0.05 if name == "AB8" else ALLOWED
                error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
                assert error <= allowed, (name, error)

    def kept(self, way: Callable[[], Tensor]) -> int:
        """Count the bytes that the backward pass needs, without weights."""
        with SavedBytes(without=[self.w1, self.w2, self.w3]) as saved:
            way()
        return saved.total


def _row(shape: ExpertShape, rounds: int) -> dict[str, Any]:
    case = ExpertCase(shape)
    case.check()
    ways = case.ways()
    calls = {name: partial(case.both, way) for name, way in ways.items()}
    timings = interleave_on_gpu(calls, rounds=rounds)
    seconds = timings["AB"].spread.median
    return asdict(shape) | {
        "fullest": case.fullest,
        "seconds": {name: timing.to_json() for name, timing in timings.items()},
        "times_faster": {
            peer: {policy: times_faster(timings[policy], timings[peer]).to_json() for policy in POLICIES}
            for peer in PEERS
        },
        "kept": {name: case.kept(way) for name, way in ways.items()},
        "peak": {name: peak_bytes(call) for name, call in calls.items()},
        "flops_per_s": 18 * shape.tokens * shape.choices * shape.width * shape.hidden / seconds,
    }


def measure_experts(console: Console, quick: bool) -> dict[str, Any]:
    """Measure forward and backward of layers of experts in bfloat16, and print the ratios."""
    rows = []
    table = Table(title="forward and backward, times as fast as (measured); peak of ours: 1", title_justify="left")
    for heading in (
        "tokens, d, h, E, k", "routing", *(f"grouped, {one}" for one in POLICIES), "loop, AB", "capacity, AB",
        *(f"peak, {one}" for one in PEERS), "AB ms", "TFLOP/s",
    ):  # fmt: skip
        table.add_column(heading)
    for shape in QUICK if quick else SHAPES:
        row = _row(shape, 2 if quick else ROUNDS)
        rows.append(row)
        ratios = row["times_faster"]
        table.add_row(
            f"{shape.tokens}, {shape.width}, {shape.hidden}, {shape.experts}, {shape.choices}",
            f"{shape.routing}, {row['fullest']:.1f}",
            *(f"{ratios['grouped'][policy]['median']:.2f}" for policy in POLICIES),
            f"{ratios['loop']['AB']['median']:.2f}", f"{ratios['capacity']['AB']['median']:.2f}",
            *(f"{row['peak'][peer] / row['peak']['AB']:.2f}" for peer in PEERS),
            f"{1e3 * row['seconds']['AB']['seconds']['median']:.2f}", f"{row['flops_per_s'] / 1e12:.0f}",
        )  # fmt: skip
        torch.cuda.empty_cache()
    console.print(table)
    return {"evidence": "measured", "dtype": "bfloat16", "rounds": 2 if quick else ROUNDS, "rows": rows}
