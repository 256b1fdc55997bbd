"""Attention over ragged sequences on a GPU, beside padded and packed attention of torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from _gpu_timing import interleave_on_gpu, peak_bytes
from _timing import times_faster
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cordillera.jagged import offsets_from_lengths
from cordillera.kernels.attention.jagged import jagged_attention
from cordillera.kernels.attention.jagged_call import JaggedMask

ROUNDS = 7
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ALLOWED = {"bfloat16": 2e-2, "float32": 1e-4}  # error relative to torch's products in float64


@dataclass(frozen=True)
class Batch:
    """Histories of a batch.

    Attributes:
        kind: Distribution of lengths from 1 to ``longest``: ``uniform``, ``short`` (uniform, to half of it), ``pareto``
            (of exponent 1.1, from 4) or ``full`` (all of the longest).
        is_causal: Whether an entry sees those up to itself only.
        flex: Whether flex attention, which is compiled anew for each shape, is measured too.
    """

    kind: str
    batch: int
    heads: int
    width: int
    longest: int
    is_causal: bool
    flex: bool = False

    def lengths(self) -> Tensor:
        """Return the lengths ``[B]``, one of them the longest but for ``short``."""
        u = torch.rand(self.batch, generator=torch.Generator().manual_seed(1))
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


BATCHES = (
    Batch("uniform", 128, 4, 64, 512, False),
    Batch("uniform", 64, 4, 64, 2048, True, flex=True),
    Batch("short", 128, 4, 64, 1024, True),
    Batch("pareto", 2048, 4, 64, 1024, True, flex=True),
    Batch("full", 64, 4, 64, 1024, True),
    Batch("full", 32, 4, 128, 1024, False),
)
QUICK = (Batch("uniform", 4, 2, 64, 100, True),)


class RaggedBatch:
    """Queries, keys and values ``[T, H, D]`` of a batch, packed, and attention of them in several ways."""

    def __init__(self, batch: Batch, dtype: torch.dtype, device: str = "cuda") -> None:
        lengths = batch.lengths()
        self.batch, self.longest = batch, int(lengths.max())
        self.on_cpu = offsets_from_lengths(lengths)
        self.offsets, self.starts = self.on_cpu.to(device), self.on_cpu.to(device, torch.int32)
        self.mask = JaggedMask(causal=batch.is_causal)
        shape = (int(lengths.sum()), batch.heads, batch.width)
        draw = torch.Generator(device).manual_seed(2)
        self.tensors = [
            torch.randn(shape, generator=draw, device=device, dtype=dtype).requires_grad_() for _ in range(3)
        ]
        self.gradient = torch.randn(shape, generator=draw, device=device, dtype=dtype)
        at = torch.cat([b * self.longest + torch.arange(n) for b, n in enumerate(lengths.tolist())])
        self.places = at.to(device)
        self.seen = (torch.arange(self.longest) < lengths[:, None]).to(device)  # [B, N]
        self.documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)

    def ours(self) -> Tensor:
        """Our kernels in Triton."""
        return jagged_attention(*self.tensors, self.offsets, mask=self.mask, longest=self.longest)[0]

    def padded(self) -> Tensor:
        """torch's fused attention of padded sequences.

        Padding stands behind a sequence, so a causal mask hides it; without one, a mask of the keys is needed.
        """
        rows = [x.new_zeros(len(self.seen) * self.longest, *x.shape[1:]) for x in self.tensors]
        rows = [row.index_copy(0, self.places, x) for row, x in zip(rows, self.tensors, strict=True)]
        padded = [x.unflatten(0, (-1, self.longest)).transpose(1, 2) for x in rows]
        hidden = None if self.batch.is_causal or self.batch.kind == "full" else self.seen[:, None, None]
        out = scaled_dot_product_attention(*padded, attn_mask=hidden, is_causal=self.batch.is_causal)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.places)

    def varlen(self) -> Tensor:
        """torch's FlashAttention of packed sequences, in 16 bits only."""
        from torch.nn.attention.varlen import varlen_attn

        window = {"window_size": (-1, 0) if self.batch.is_causal else (-1, -1)}
        if "window_size" not in inspect.signature(varlen_attn).parameters:
            window = {"is_causal": self.batch.is_causal}  # type: ignore[dict-item]
        out = varlen_attn(*self.tensors, self.starts, self.starts, self.longest, self.longest, **window)
        assert isinstance(out, Tensor)
        return out

    def nested(self) -> Tensor:
        """torch's fused attention of nested tensors."""
        views = [
            torch.nested.nested_tensor_from_jagged(x, self.offsets, min_seqlen=1, max_seqlen=self.longest)
            for x in self.tensors
        ]
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in views), is_causal=self.batch.is_causal)
        return out.transpose(1, 2).values()

    def make_flex(self) -> Callable[[], Tensor]:
        """Return flex attention over all sequences in one, whose mask is made beforehand and whose code is compiled."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        documents, is_causal, total = self.documents, self.batch.is_causal, len(self.documents)

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            same = documents[q] == documents[k]
            return same & (q >= k) if is_causal else same

        mask = torch.compile(create_block_mask)(sees, None, None, total, total, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)

        def flex() -> Tensor:
            views = [x.transpose(0, 1)[None] for x in self.tensors]
            found: Tensor = compiled(*views, block_mask=mask)[0].transpose(0, 1)
            return found

        return flex

    def ways(self, dtype: str) -> dict[str, Callable[[], Tensor]]:
        """Return our kernels and the peers, by name."""
        found: dict[str, Callable[[], Tensor]] = {"ours": self.ours, "padded": self.padded, "nested": self.nested}
        if dtype != "float32":
            found["varlen"] = self.varlen
            if self.batch.flex:
                found["flex"] = self.make_flex()
        return found

    def reference(self) -> Tensor:
        """torch's products in float64 of the first sequences."""
        few = self.on_cpu[:9]
        q, k, v = (x.detach()[: int(few[-1])].double() for x in self.tensors)
        return jagged_attention(q, k, v, few, mask=self.mask, backend="math")[0]

    def forward(self, way: Callable[[], Tensor]) -> Tensor:
        """Compute the output alone."""
        with torch.no_grad():
            return way()

    def both(self, way: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """Compute the output and the gradients."""
        return torch.autograd.grad(way(), self.tensors, self.gradient)


def _errors(ragged: RaggedBatch, ways: dict[str, Callable[[], Tensor]], allowed: float) -> dict[str, dict[str, float]]:
    """Return the relative errors of each way's output and gradients; ways that cannot run leave ``ways``.

    Outputs are compared with products in float64, gradients with those of our kernels.
    """
    wanted, errors = ragged.reference(), {}
    gradients = torch.cat([one.flatten() for one in ragged.both(ragged.ours)]).float()
    for name, way in list(ways.items()):
        try:
            found = ragged.forward(way)[: len(wanted)].double()
            others = torch.cat([one.flatten() for one in ragged.both(way)]).float()
        except Exception as error:
            if name == "ours":
                raise
            print(f"{name}: left out, {str(error)[:300]}")
            del ways[name]
            continue
        errors[name] = {
            "output": float((found - wanted).norm() / wanted.norm()),
            "gradients": float((others - gradients).norm() / gradients.norm()),
        }
    assert errors["ours"]["output"] < allowed, errors
    return errors


def _row(batch: Batch, dtype: str, rounds: int) -> dict[str, Any]:
    ragged = RaggedBatch(batch, DTYPES[dtype])
    lengths = batch.lengths().double()
    ways = ragged.ways(dtype)
    share = lengths / ragged.longest
    row: dict[str, Any] = asdict(batch) | {
        "dtype": dtype, "tokens": int(lengths.sum()), "fill": float(share.mean()),
        "fill_squared": float(share.square().mean()), "errors": _errors(ragged, ways, ALLOWED[dtype]),
    }  # fmt: skip
    pairs = float((lengths * (lengths + 1) / 2 if batch.is_causal else lengths.square()).sum())
    products = {"forward": 2, "both": 7}  # with the two of the forward that the backward makes again, or one of them
    for kind, call in (("forward", ragged.forward), ("both", ragged.both)):
        calls = {name: partial(call, way) for name, way in ways.items()}
        timings = interleave_on_gpu(calls, rounds=rounds)
        others = {name: timing for name, timing in timings.items() if name != "ours"}
        row[kind] = {
            "seconds": {name: timing.to_json() for name, timing in timings.items()},
            "times_faster": {name: times_faster(timings["ours"], one).to_json() for name, one in others.items()},
            "peak_bytes": {name: peak_bytes(one) for name, one in calls.items()},
            "flops_per_s": products[kind] * 2 * pairs * batch.heads * batch.width / timings["ours"].spread.median,
        }
    return row


def measure_attention(console: Console, quick: bool) -> dict[str, Any]:
    """Measure attention of ragged batches in bfloat16 and float32, and print the ratios."""
    rows = []
    table = Table(title="times faster than (measured; forward / forward and backward)", title_justify="left")
    for heading in ("dtype", "lengths", "B, H, D, N", "mask", "padded", "nested", "varlen", "flex", "ours ms", "peak"):
        table.add_column(heading)
    for dtype in DTYPES:
        for batch in QUICK if quick else BATCHES:
            row = _row(batch, dtype, 2 if quick else ROUNDS)
            rows.append(row)
            ratios = [
                " / ".join(
                    f"{row[kind]['times_faster'].get(name, {}).get('median', math.nan):.2f}"
                    for kind in ("forward", "both")
                )
                for name in ("padded", "nested", "varlen", "flex")
            ]
            own = [row[kind]["seconds"]["ours"]["seconds"]["median"] for kind in ("forward", "both")]
            peaks = row["both"]["peak_bytes"]
            table.add_row(
                dtype, batch.kind, f"{batch.batch}, {batch.heads}, {batch.width}, {batch.longest}",
                "causal" if batch.is_causal else "none", *ratios, " / ".join(f"{1e3 * one:.2f}" for one in own),
                f"{peaks['padded'] / peaks['ours']:.2f}",
            )  # fmt: skip
            torch.cuda.empty_cache()
    console.print(table)
    return {"evidence": "measured", "rounds": 2 if quick else ROUNDS, "rows": rows, "float32": "TF32 not allowed"}
