"""Attention over ragged sequences: ``cordillera bench jagged-attention``.

``speed`` compares with dense attention of padded sequences, torch's fused attention of padded sequences, nested tensors
and FBGEMM's kernels, on several distributions of lengths. ``memory`` compares the bytes that are alive at once and that
are kept for the backward pass. ``window`` compares windows with causal attention of long sequences. ``histories`` times
training steps on long histories, ragged and padded. ``quality`` trains models that read histories and models that sum
them, on MovieLens-100K and on a log with planted order. Fill is the mean length relative to the longest, fill squared
the mean of its square, the share of the dense products that is of use.
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
from _history_quality import measure_quality
from _history_steps import measure_histories
from _memory_meter import PeakBytes, SavedBytes
from _program import Program
from _tables import print_notes
from _timing import interleave, times_faster
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cordillera.jagged import offsets_from_lengths
from cordillera.kernels.attention.jagged import jagged_attention
from cordillera.kernels.attention.jagged_call import JaggedMask

ROUNDS = 7
ASKED = {"dense": (10.0, 6.0), "padded": (2.5, 2.5)}  # forward, and forward with backward
WINDOW, WINDOW_ASKED, SLOPE_WITHIN = 256, 3.0, 0.1


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    speed = "speed"
    memory = "memory"
    window = "window"
    histories = "histories"
    quality = "quality"


@dataclass(frozen=True)
class Workload:
    """A batch of sequences.

    Attributes:
        kind: Distribution of lengths from 1 to ``longest``: ``uniform``, ``short`` (uniform, to half of it), ``pareto``
            (of exponent 1.1, from 4) or ``full`` (all of the longest).
    """

    kind: str
    batch: int
    heads: int
    width: int
    longest: int

    def lengths(self) -> Tensor:
        """Return the lengths ``[B]``, one of them the longest but for ``short``."""
        draw = torch.Generator().manual_seed(1)
        u = torch.rand(self.batch, generator=draw)
        if self.kind == "pareto":
            found = (4 * (1 - u) ** (-1 / 1.1)).clamp(max=self.longest)
        elif self.kind == "full":
            found = torch.full_like(u, self.longest)
        else:
            found = 1 + u * (self.longest / (2 if self.kind == "short" else 1) - 1)
        found = found.long().clamp(1, self.longest)
        if self.kind in ("uniform", "pareto"):
            found[0] = self.longest
        return found

    def fills(self) -> tuple[float, float]:
        """Return the mean of lengths relative to the longest, and the mean of their squares."""
        share = self.lengths().double() / self.longest
        return float(share.mean()), float(share.square().mean())


SPEED = (
    Workload("uniform", 32, 4, 64, 512),
    Workload("short", 32, 4, 64, 512),
    Workload("uniform", 16, 4, 64, 1024),
    Workload("pareto", 256, 2, 32, 512),
    Workload("full", 8, 4, 64, 512),
)
MEMORY = (
    Workload("uniform", 16, 2, 64, 512), Workload("uniform", 16, 2, 64, 1024), Workload("uniform", 8, 2, 64, 2048)
)  # fmt: skip
MEMORY_ASKED = {1024: 15.0, 2048: 22.0}
LENGTHS = (512, 1024, 2048, 4096)


class Contender:
    """Attention of packed queries, keys and values ``[T, H, D]`` of one workload, in several ways."""

    def __init__(self, workload: Workload) -> None:
        self.lengths = workload.lengths()
        self.offsets, self.longest = offsets_from_lengths(self.lengths), workload.longest
        shape = (int(self.lengths.sum()), workload.heads, workload.width)
        draw = torch.Generator().manual_seed(2)
        self.tensors = tuple(torch.randn(shape, generator=draw).requires_grad_() for _ in range(3))
        self.gradient = torch.randn(shape, generator=draw)
        self.places = torch.cat([b * self.longest + torch.arange(n) for b, n in enumerate(self.lengths.tolist())])
        self.seen = torch.arange(self.longest) < self.lengths[:, None]  # [B, N]

    def ours(self) -> Tensor:
        """Our kernels."""
        return jagged_attention(*self.tensors, self.offsets)[0]

    def dense(self) -> Tensor:
        """Products and a softmax of padded sequences."""
        q, k, v = self._padded()
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~self.seen[:, None, None], -torch.inf)
        return self._packed(scores.softmax(-1) @ v)

    def padded(self) -> Tensor:
        """torch's fused attention of padded sequences, with a mask of the keys."""
        return self._packed(scaled_dot_product_attention(*self._padded(), attn_mask=self.seen[:, None, None]))

    def nested(self) -> Tensor:
        """torch's fused attention of nested tensors."""
        views = (torch.nested.nested_tensor_from_jagged(x, self.offsets).transpose(1, 2) for x in self.tensors)
        return scaled_dot_product_attention(*views).transpose(1, 2).values()

    def fbgemm(self) -> Tensor:
        """FBGEMM's kernel of one head for CPUs, head by head; it divides by the longest length after the softmax."""
        q, k, v = self.tensors
        scaled, offsets = q * q.shape[-1] ** -0.5, self.offsets.int()
        heads = [
            torch.ops.fbgemm.sll_jagged_flash_attention_basic(
                *(x[:, h].contiguous() for x in (scaled, k, v)), offsets, self.longest, False, True
            )
            for h in range(q.shape[1])
        ]  # fmt: skip
        return torch.stack(heads, 1) * self.longest

    def _padded(self) -> list[Tensor]:
        """Padded sequences, ``[B, H, N, D]``."""
        count = len(self.lengths) * self.longest
        rows = [x.new_zeros(count, *x.shape[1:]).index_copy(0, self.places, x) for x in self.tensors]
        return [x.unflatten(0, (-1, self.longest)).transpose(1, 2) for x in rows]

    def _packed(self, out: Tensor) -> Tensor:
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.places)

    def forward(self, way: Callable[[Contender], Tensor]) -> Tensor:
        """Compute the output alone."""
        with torch.no_grad():
            return way(self)

    def both(self, way: Callable[[Contender], Tensor]) -> tuple[Tensor, ...]:
        """Compute the output and the gradients."""
        return torch.autograd.grad(way(self), self.tensors, self.gradient)


def _ways() -> dict[str, Callable[[Contender], Tensor]]:
    ways = {"ours": Contender.ours, "dense": Contender.dense, "padded": Contender.padded, "nested": Contender.nested}
    try:
        import fbgemm_gpu.sll  # noqa: F401
    except (ImportError, OSError):
        return ways
    return ways | {"fbgemm": Contender.fbgemm}


def _checked(contender: Contender, ways: dict[str, Callable[[Contender], Tensor]]) -> dict[str, float]:
    """Return the largest difference of each way's output from ours; all compute the same."""
    ours = contender.forward(ways["ours"])
    found = {name: float((contender.forward(way) - ours).abs().max()) for name, way in ways.items() if name != "ours"}
    assert max(found.values()) < 1e-4, found
    return found


def _speed(console: Console, quick: bool) -> dict[str, Any]:
    ways, rows = _ways(), []
    table = Table(title="times faster than (measured; forward, forward and backward)", title_justify="left")
    for heading in ("lengths", "B, H, D, N", "fill", "squared", *(name for name in ways if name != "ours"), "ours ms"):
        table.add_column(heading, justify="left" if heading in ("lengths", "B, H, D, N") else "right")
    for workload in SPEED[:1] if quick else SPEED:
        if quick:
            workload = Workload("uniform", 3, 1, 16, 40)
        contender = Contender(workload)
        row: dict[str, Any] = asdict(workload) | dict(zip(("fill", "fill_squared"), workload.fills(), strict=True))
        row["differences"] = _checked(contender, ways)
        for kind, call in (("forward", contender.forward), ("both", contender.both)):
            timings = interleave(
                {name: partial(call, way) for name, way in ways.items()}, rounds=2 if quick else ROUNDS
            )
            row[kind] = {
                "seconds": {name: timing.to_json() for name, timing in timings.items()},
                "times_faster": {
                    name: times_faster(timings["ours"], timing).to_json()
                    for name, timing in timings.items()
                    if name != "ours"
                },
            }
        rows.append(row)
        ratios = (
            " / ".join(f"{row[kind]['times_faster'][name]['median']:.2f}" for kind in ("forward", "both"))
            for name in ways
            if name != "ours"
        )
        ms = " / ".join(
            f"{1e3 * row[kind]['seconds']['ours']['seconds']['median']:.1f}" for kind in ("forward", "both")
        )
        sizes = f"{workload.batch}, {workload.heads}, {workload.width}, {workload.longest}"
        table.add_row(workload.kind, sizes, f"{row['fill']:.2f}", f"{row['fill_squared']:.2f}", *ratios, ms)
    console.print(table)
    return {"evidence": "measured", "dtype": "float32", "rows": rows, "asked": ASKED}


def _memory(console: Console, quick: bool) -> dict[str, Any]:
    ways, rows = {name: way for name, way in _ways().items() if name in ("ours", "dense", "padded")}, []
    table = Table(title="bytes relative to ours (measured)", title_justify="left")
    for heading in ("B, H, D, N", "fill", "against", "kept", "peak, forward", "peak, both"):
        table.add_column(heading, justify="left" if heading in ("B, H, D, N", "against") else "right")
    for workload in (Workload("uniform", 3, 1, 16, 40),) if quick else MEMORY:
        contender = Contender(workload)
        row: dict[str, Any] = asdict(workload) | {"fill": workload.fills()[0], "bytes": {}}
        for name, way in ways.items():
            with SavedBytes(without=contender.tensors) as saved:
                way(contender)
            peaks = []
            for call in (contender.forward, contender.both):
                with PeakBytes() as meter:
                    call(way)
                peaks.append(meter.peak)
            row["bytes"][name] = {"kept": saved.total, "forward": peaks[0], "both": peaks[1]}
        rows.append(row)
        for name in ("dense", "padded"):
            ratios = (
                f"{row['bytes'][name][key] / row['bytes']['ours'][key]:.2f}" for key in ("kept", "forward", "both")
            )
            sizes = f"{workload.batch}, {workload.heads}, {workload.width}, {workload.longest}"
            table.add_row(sizes, f"{row['fill']:.2f}", name, *ratios)
    console.print(table)
    return {"evidence": "measured", "dtype": "float32", "rows": rows, "asked": MEMORY_ASKED}


def _window(console: Console, quick: bool) -> dict[str, Any]:
    window, lengths = (8, (32, 64)) if quick else (WINDOW, LENGTHS)
    masks = {
        "causal": JaggedMask(causal=True),
        "window": JaggedMask(causal=True, window=window),
        "semi-local": JaggedMask(causal=True, window=window, global_positions=window // 8),
    }
    rows = []
    for longest in lengths:
        contender = Contender(Workload("full", 2, 2, 64, longest))

        def attend(contender: Contender, mask: JaggedMask) -> Tensor:
            return jagged_attention(*contender.tensors, contender.offsets, mask=mask)[0]

        calls = {name: partial(contender.both, partial(attend, mask=mask)) for name, mask in masks.items()}
        timings = interleave(calls, rounds=2 if quick else ROUNDS)
        rows.append(
            {
                "longest": longest,
                "seconds": {name: timing.to_json() for name, timing in timings.items()},
                "times_faster": {
                    name: times_faster(timings[name], timings["causal"]).to_json() for name in ("window", "semi-local")
                },
            }
        )
    slopes = {
        name: _slope([(row["longest"], row["seconds"][name]["seconds"]["median"]) for row in rows]) for name in masks
    }
    table = Table(title=f"windows of {window} (measured; forward and backward)", title_justify="left")
    for heading in ("length", "window, times faster than causal", "semi-local"):
        table.add_column(heading, justify="right")
    for row in rows:
        ratios = (f"{row['times_faster'][name]['median']:.2f}" for name in ("window", "semi-local"))
        table.add_row(f"{row['longest']:,}", *ratios)
    console.print(table)
    notes = [f"time grows with the length to the power of {value:.2f}: {name}" for name, value in slopes.items()]
    print_notes(console, notes)
    return {
        "evidence": "measured", "window": window, "rows": rows, "slopes": slopes, "asked": WINDOW_ASKED, "notes": notes
    }  # fmt: skip


def _slope(points: list[tuple[int, float]]) -> float:
    """Return the slope of a line through the logarithms of points."""
    xs, ys = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    upper = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return upper / sum((x - mean_x) ** 2 for x in xs)


main = Program(
    "jagged_attention",
    {
        Part.speed: _speed,
        Part.memory: _memory,
        Part.window: _window,
        Part.histories: measure_histories,
        Part.quality: measure_quality,
    },
    "Compare attention over ragged sequences with padded ones, windows with all keys, and histories with sums.",
    threads=2,
).command()


if __name__ == "__main__":
    typer.run(main)
