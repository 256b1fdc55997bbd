"""Experts over routed tokens: ``cordillera bench moe``.

``memory`` counts the bytes that a layer keeps for the backward pass, by storage and without weights, at the paper's
seven shapes with a width of an eighth and a 64th of the tokens, and the bytes that are alive at once. ``speed`` times
forward and backward, in a process that returns the memory it frees and in one that keeps it. ``finer`` makes experts
finer at constant active work. ``loss`` trains with products in 8 bits. ``quality`` trains a small Llama with experts
and a dense one of equal active arithmetic on the same text.

The peers are the two ways to write such a layer in torch: tokens brought into the order of experts and grouped products
(``torch.nn.functional.grouped_mm``), and a loop over experts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import typer
from _experts_quality import measure_quality
from _memory_meter import PeakBytes, SavedBytes
from _program import Program
from _tables import print_notes
from _timing import interleave, times_faster
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from cordillera.kernels.host_memory import keep_freed_memory
from cordillera.kernels.moe import POLICIES, expert_index, expert_mlp

ROUNDS = 9
ASKED = {"AB, one choice": 2.1, "AB": 2.25, "X": 18.0, "AB8": 3.7, "peak, X": 3.5, "time": 1.15, "time, loop": 1.2}
STEPS, SEEDS, LAST = 500, 3, 50


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    memory = "memory"
    speed = "speed"
    finer = "finer"
    loss = "loss"
    quality = "quality"


@dataclass(frozen=True)
class Shape:
    """A layer.

    Attributes:
        tokens: Number of tokens.
        width: Width of a token.
        hidden: Width of an expert.
        experts: Number of experts.
        choices: Number of experts of each token.
    """

    tokens: int
    width: int
    hidden: int
    experts: int
    choices: int


PAPER = {  # the paper's table 1
    "1": Shape(1024, 64, 256, 4, 1),
    "2": Shape(1024, 128, 512, 8, 2),
    "3": Shape(1024, 128, 512, 16, 4),
    "4": Shape(512, 256, 1024, 16, 4),
    "5": Shape(512, 64, 256, 16, 4),
    "6": Shape(256, 128, 512, 16, 4),
    "7": Shape(128, 256, 1024, 8, 4),
}
TIMED = (Shape(4096, 64, 256, 4, 1), Shape(4096, 128, 512, 16, 4), Shape(2048, 256, 1024, 16, 4))
FINER = tuple(Shape(1024, 128, 1024 // fine, 8 * fine, fine) for fine in (1, 2, 4, 8, 16))
QUICK = Shape(32, 16, 32, 4, 2)


class Layer:
    """Weights, tokens and choices of one shape; ``gated`` experts have two products with a token, others one."""

    def __init__(self, shape: Shape, gated: bool, skew: float = 0.0) -> None:
        draw = torch.Generator().manual_seed(1)
        experts, width, hidden = shape.experts, shape.width, shape.hidden

        def weight(*size: int) -> Tensor:
            return (torch.randn(*size, generator=draw) / math.sqrt(size[1])).requires_grad_()

        self.shape = shape
        self.x = torch.randn(shape.tokens, width, generator=draw).requires_grad_()
        likes = torch.rand(shape.tokens, experts, generator=draw) - skew * torch.arange(experts) / experts
        top = likes.topk(shape.choices)
        self.experts = top.indices
        self.gates = top.values.softmax(-1).requires_grad_()
        self.w1, self.w3 = weight(experts, width, hidden), weight(experts, hidden, width)
        self.w2 = weight(experts, width, hidden) if gated else None
        self.gradient = torch.randn(shape.tokens, width, generator=draw)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors with gradients."""
        return [self.x, self.gates, self.w1, self.w3, *([] if self.w2 is None else [self.w2])]

    def ours(self, policy: Any) -> Tensor:
        """Compute with our layer."""
        return expert_mlp(self.x, self.experts, self.gates, self.w1, self.w3, self.w2, policy=policy)

    def grouped(self) -> Tensor:
        """Bring tokens into the order of experts and multiply in groups."""
        choices = self.experts.shape[1]
        order = self.experts.flatten().argsort(stable=True)
        tokens = order // choices
        ends = torch.bincount(self.experts.flatten(), minlength=len(self.w1)).cumsum(0).int()
        rows = self.x[tokens]
        y = functional.silu(functional.grouped_mm(rows, self.w1, offs=ends))
        if self.w2 is not None:
            y = y * functional.grouped_mm(rows, self.w2, offs=ends)
        out = functional.grouped_mm(y, self.w3, offs=ends) * self.gates.flatten()[order, None]
        return torch.zeros_like(self.x).index_add(0, tokens, out)

    def loop(self) -> Tensor:
        """Compute expert after expert."""
        out = torch.zeros_like(self.x)
        for expert in range(len(self.w1)):
            tokens, choice = torch.where(self.experts == expert)
            rows = self.x[tokens]
            y = functional.silu(rows @ self.w1[expert])
            if self.w2 is not None:
                y = y * (rows @ self.w2[expert])
            out = out.index_add(0, tokens, (y @ self.w3[expert]) * self.gates[tokens, choice, None])
        return out

    def both(self, way: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """Compute the output and all gradients."""
        return torch.autograd.grad(way(), self.tensors, self.gradient)

    def ways(self) -> dict[str, Callable[[], Tensor]]:
        """Return our policies and the peers, by name."""
        return {
            **{policy: partial(self.ours, policy) for policy in POLICIES},
            "grouped": self.grouped,
            "loop": self.loop,
        }

    def check(self) -> None:
        """Check that all ways compute the same, and the same gradients (``AB8`` within its error)."""
        expected = self.both(self.grouped)
        for name, way in self.ways().items():
            for ours, theirs in zip(self.both(way), expected, strict=True):
                allowed = 0.05 if name == "AB8" else 1e-4
                assert float((ours - theirs).norm()) <= allowed * float(theirs.norm()), name

    def kept(self, way: Callable[[], Tensor]) -> int:
        """Count the bytes that the backward pass needs, without weights."""
        weights = [self.w1, self.w3, *([] if self.w2 is None else [self.w2])]
        with SavedBytes(without=weights) as saved:
            way()
        return saved.total

    def peak(self, way: Callable[[], Tensor]) -> int:
        """Count the most bytes alive at once in a forward and backward pass."""
        with PeakBytes() as meter:
            self.both(way)
        return meter.peak


def _memory(console: Console, quick: bool) -> dict[str, Any]:
    rows = []
    table = Table(title="bytes of grouped products relative to ours (measured)", title_justify="left")
    for heading in ("shape", "expert", *(f"kept, {policy}" for policy in POLICIES), "peak, AB", "peak, X"):
        table.add_column(heading, justify="left" if heading in ("shape", "expert") else "right")
    shapes = {"quick": QUICK} if quick else {**PAPER, "peak": TIMED[1]}
    for name, shape in shapes.items():
        for gated in (True, False):
            layer = Layer(shape, gated)
            layer.check()
            kept = {key: layer.kept(way) for key, way in layer.ways().items()}
            peaks = {key: layer.peak(way) for key, way in layer.ways().items()}
            rows.append({"name": name, **asdict(shape), "gated": gated, "kept": kept, "peak": peaks})
            kinds = [f"{kept['grouped'] / kept[policy]:.2f}" for policy in POLICIES]
            alive = [f"{peaks['grouped'] / peaks[policy]:.2f}" for policy in ("AB", "X")]
            table.add_row(name, "SwiGLU" if gated else "SiLU", *kinds, *alive)
    console.print(table)
    return {"evidence": "measured", "dtype": "float32", "rows": rows, "asked": ASKED}


def _speed(console: Console, quick: bool) -> dict[str, Any]:
    rows = _speed_rows(console, quick, "forward and backward, times as fast as (measured)")
    content = {"evidence": "measured", "dtype": "float32", "rows": rows, "mean": _means(rows), "asked": ASKED}
    if keep_freed_memory() is None:
        kept = _speed_rows(console, quick, "the same in a process that keeps the memory it frees, as trainings do")
        content |= {"kept_memory": {"rows": kept, "mean": _means(kept)}}
    notes = [
        f"{policy}: {value:.2f} times as fast as grouped products in geometric mean{where}"
        for where, means in ((", memory kept", content.get("kept_memory", {}).get("mean", {})), ("", content["mean"]))
        for policy, value in means.items()
    ]
    print_notes(console, notes)
    return content | {"notes": notes}


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the geometric mean of the speed beside grouped products, by policy."""
    return {
        policy: math.exp(sum(math.log(row["times_faster"]["grouped"][policy]["median"]) for row in rows) / len(rows))
        for policy in POLICIES
    }


def _speed_rows(console: Console, quick: bool, title: str) -> list[dict[str, Any]]:
    rows = []
    table = Table(title=title, title_justify="left")
    for heading in ("tokens, d, h, E, k", "routing", *(f"grouped, {p}" for p in POLICIES), "loop, AB", "index, share"):
        table.add_column(heading, justify="left" if heading in ("tokens, d, h, E, k", "routing") else "right")
    for shape in (QUICK,) if quick else TIMED:
        for routing, skew in (("even", 0.0), ("skewed", 1.5)):
            layer = Layer(shape, True, skew)
            calls: dict[str, Callable[[], Any]] = {name: partial(layer.both, way) for name, way in layer.ways().items()}
            calls["index"] = partial(expert_index, layer.experts, shape.experts)
            timings = interleave(calls, rounds=2 if quick else ROUNDS)
            ratios = {
                peer: {p: times_faster(timings[p], timings[peer]).to_json() for p in POLICIES}
                for peer in ("grouped", "loop")
            }
            share = timings["index"].spread.median / timings["AB"].spread.median
            counts = torch.bincount(layer.experts.flatten(), minlength=shape.experts)
            rows.append(
                asdict(shape) | {
                    "routing": routing, "fullest": float(counts.max() / counts.float().mean()), "index_share": share,
                    "seconds": {name: timing.to_json() for name, timing in timings.items()}, "times_faster": ratios,
                }
            )  # fmt: skip
            cells = [f"{ratios['grouped'][p]['median']:.2f}" for p in POLICIES]
            sizes = f"{shape.tokens}, {shape.width}, {shape.hidden}, {shape.experts}, {shape.choices}"
            table.add_row(sizes, routing, *cells, f"{ratios['loop']['AB']['median']:.2f}", f"{share:.1%}")
    console.print(table)
    return rows


def _finer(console: Console, quick: bool) -> dict[str, Any]:
    rows = []
    table = Table(title="bytes kept as experts become finer at constant active work (measured)", title_justify="left")
    for heading in ("experts", "choices", "width", *POLICIES, "grouped"):
        table.add_column(heading, justify="right")
    for shape in (QUICK,) if quick else FINER:
        layer = Layer(shape, True)
        kept = {name: layer.kept(way) for name, way in layer.ways().items() if name != "loop"}
        rows.append(asdict(shape) | {"kept": kept})
        sizes = (str(shape.experts), str(shape.choices), str(shape.hidden))
        table.add_row(*sizes, *(f"{kept[name] / 2**20:.2f} MiB" for name in (*POLICIES, "grouped")))
    console.print(table)
    return {"evidence": "measured", "dtype": "float32", "rows": rows}


def _trained(policy: Any, seed: int, steps: int) -> list[float]:
    """Train a layer with a learned router towards a dense MLP; return the losses."""
    draw = torch.Generator().manual_seed(seed)
    width, hidden, experts, choices = 32, 64, 8, 2

    def weight(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw) / math.sqrt(size[-2])

    teacher = [weight(width, 256), weight(256, width)]
    router, w1, w2, w3 = (
        one.requires_grad_()
        for one in (
            weight(width, experts), weight(experts, width, hidden), weight(experts, width, hidden),
            weight(experts, hidden, width),
        )
    )  # fmt: skip
    optimizer = torch.optim.Adam([router, w1, w2, w3], lr=3e-3)
    losses = []
    for _ in range(steps):
        x = torch.randn(256, width, generator=draw)
        gates, chosen = (x @ router).softmax(-1).topk(choices)
        wanted = functional.gelu(x @ teacher[0]) @ teacher[1]
        loss = (expert_mlp(x, chosen, gates, w1, w3, w2, policy=policy) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _loss(console: Console, quick: bool) -> dict[str, Any]:
    steps, seeds = (5, 1) if quick else (STEPS, SEEDS)
    rows = []
    for seed in range(seeds):
        losses = {policy: _trained(policy, seed, steps) for policy in ("AB", "AB8")}
        last = {policy: sum(found[-LAST:]) / len(found[-LAST:]) for policy, found in losses.items()}
        rows.append({"seed": seed, "last": last, "change": last["AB8"] / last["AB"] - 1})
    notes = [
        f"seed {row['seed']}: loss of the last {LAST} of {steps} steps {row['last']['AB']:.5f}, with 8 bits "
        f"{row['change']:+.3%}"
        for row in rows
    ]
    print_notes(console, notes)
    return {"evidence": "measured", "steps": steps, "rows": rows, "notes": notes}


main = Program(
    "moe",
    {
        Part.memory: _memory,
        Part.speed: _speed,
        Part.finer: _finer,
        Part.loss: _loss,
        Part.quality: measure_quality,
    },
    "Compare experts over routed tokens with grouped products and with a loop over experts.",
    threads=2,
).command()


if __name__ == "__main__":
    typer.run(main)
