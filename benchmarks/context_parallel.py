"""Documents and conversations over ranks, in real processes: ``cordillera bench context-parallel``."""

from __future__ import annotations

import enum
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from _context_sessions import sessions
from _document_blocks import document_blocks
from _program import Program
from _timing import Spread, Timing, times_faster
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cordillera.distributed.context.attention import ContextParallelAttention, ContextParallelConfig
from cordillera.distributed.context.latency import AnalyticLatency
from cordillera.distributed.context.shard_plan import ShardPlan, adaptive, contiguous, per_document, per_sequence
from cordillera.kernels.attention.partial import partial_attention

RANKS, HEADS, DIM = 2, 4, 64
MIXES = {
    "2 x 1024, 4096, 2 x 1024": [1024, 1024, 4096, 1024, 1024],
    "1 x 8192": [8192],
    "32 x 256": [256] * 32,
}
# A CPU kernel takes equal time per query for few and many; a call costs about as much as 500 pairs of 4 heads.
LATENCY = AnalyticLatency(tile=1, seconds_per_call=500)
SHARDINGS: dict[str, Callable[[list[int]], ShardPlan]] = {
    "contiguous": lambda lengths: contiguous(lengths, RANKS),
    "per sequence": lambda lengths: per_sequence(lengths, RANKS),
    "per document": lambda lengths: per_document(lengths, RANKS),
    "adaptive": lambda lengths: adaptive(lengths, RANKS, LATENCY),
}
ALONE = "one process"
TRANSPORTS = ("all_gather", "ring")
DEADLINE_S = 600.0


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    sharding = "sharding"
    sessions = "sessions"


def _tensors(lengths: list[int]) -> list[Tensor]:
    """Return q, k, v and the gradient of the output, of all tokens."""
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randn(sum(lengths), HEADS, DIM, generator=generator) for _ in range(4)]


def _step(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _contenders(rank: int, lengths: list[int]) -> tuple[dict[str, Callable[[], list[Tensor]]], dict[str, Any]]:
    """Return steps by name, and the attention of each with its plan."""
    steps: dict[str, Callable[[], list[Tensor]]] = {}
    attentions: dict[str, ContextParallelAttention] = {}
    whole = _tensors(lengths)
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def alone() -> list[Tensor]:
        if rank:
            return []
        return _step(lambda q, k, v: partial_attention(q, k, v, document_blocks(offsets))[0], *whole)

    steps[ALONE] = alone
    for transport in TRANSPORTS:
        for name in SHARDINGS if transport == "all_gather" else ("per sequence", "per document"):
            attention = ContextParallelAttention(ContextParallelConfig(transport=transport, deadline_s=DEADLINE_S))
            attention.use(SHARDINGS[name](lengths))
            own = [attention.shard(x) for x in whole]
            steps[f"{name}, {transport}"] = lambda attention=attention, own=own: _step(attention, *own)
            attentions[f"{name}, {transport}"] = attention
    return steps, attentions


def _run(rank: int, folder: str, rounds: int, shrink: int) -> None:
    """Run every contender in turn on one rank; all ranks begin and end each together."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=DEADLINE_S)
    )
    found: dict[str, Any] = {}
    for mix, full in MIXES.items():
        lengths = [length // shrink for length in full]
        steps, attentions = _contenders(rank, lengths)
        error = _largest_error(rank, steps, attentions)
        for attention in attentions.values():
            attention.ledger.clear()
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        own: dict[str, list[float]] = {name: [] for name in steps}  # seconds of this rank's processor
        names = list(steps)
        for i in range(rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                dist.barrier()
                began, processor = time.perf_counter(), time.process_time()
                steps[name]()
                own[name].append(time.process_time() - processor)
                dist.barrier()
                seconds[name].append(time.perf_counter() - began)
        found[mix] = {
            "lengths": lengths,
            "seconds": seconds,
            "processor_seconds": own,
            "error": error,
            "plans": {name: attention.plan.mode for name, attention in attentions.items()},
            "imbalance": {name: attention.plan.imbalance for name, attention in attentions.items()},
            "traffic": {name: asdict(attention.ledger.total()) for name, attention in attentions.items()},
        }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _largest_error(
    rank: int, steps: dict[str, Callable[[], list[Tensor]]], attentions: dict[str, ContextParallelAttention]
) -> float:
    """Return the largest relative error of outputs and gradients on this rank against one process; also warms up."""
    expected = steps[ALONE]()
    if rank:
        expected = [torch.empty_like(x) for x in _tensors(list(next(iter(attentions.values())).plan.lengths))]
    for x in expected:
        dist.broadcast(x, 0)
    error = 0.0
    for name, attention in attentions.items():
        for one, whole in zip(steps[name](), expected, strict=True):
            difference = (one - attention.shard(whole)).abs().amax() / whole.abs().amax()
            error = max(error, float(difference))
    return error


def _sharding(console: Console, quick: bool) -> dict[str, Any]:
    rounds, shrink = (2, 16) if quick else (9, 1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, args=(folder, rounds, shrink), nprocs=RANKS)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    mixes = {}
    for mix, first in ranks[0].items():
        timings = {name: Timing(name, values) for name, values in first["seconds"].items()}
        # time of the ranks with a processor each, whatever else runs on this machine
        slowest = {
            name: Timing(
                name,
                [max(values) for values in zip(*(rank[mix]["processor_seconds"][name] for rank in ranks), strict=True)],
            )
            for name in timings
        }
        table = Table(title=f"{mix}: forward and backward on {RANKS} processes", title_justify="left")
        for heading in ("", "plan", "imbalance", "ms", "processor of the slowest, ms", "times as fast as per sequence"):
            table.add_column(heading)
        ratios: dict[str, Any] = {}
        for name, timing in timings.items():
            transport = name.rpartition(", ")[2]
            base = f"per sequence, {transport}" if transport in TRANSPORTS else "per sequence, all_gather"
            ratio, by_processor = times_faster(timing, timings[base]), times_faster(slowest[name], slowest[base])
            ratios[name] = {"wall": ratio.to_json(), "processor": by_processor.to_json()}
            imbalance = first["imbalance"].get(name, 1)
            table.add_row(
                name, first["plans"].get(name, ""), f"{imbalance:.2f}", _milliseconds(timing.spread),
                _milliseconds(slowest[name].spread), f"{ratio.median:.2f} ({by_processor.median:.2f} by processor)",
            )  # fmt: skip
        console.print(table)
        mixes[mix] = {
            **{key: first[key] for key in ("lengths", "plans", "imbalance")},
            "error": max(rank[mix]["error"] for rank in ranks),
            "traffic": [rank[mix]["traffic"] for rank in ranks],
            "timings": {name: timing.to_json() for name, timing in timings.items()},
            "slowest_processor": {name: timing.to_json() for name, timing in slowest.items()},
            "times_per_sequence": ratios,
        }
    return {
        "evidence": "measured",
        "heads": HEADS,
        "head_dim": DIM,
        "dtype": "float32",
        "ranks": RANKS,
        "threads_per_rank": 1,
        "mixes": mixes,
    }


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1e3:.0f} ({spread.low * 1e3:.0f} to {spread.high * 1e3:.0f})"


PARTS: dict[Part, Callable[[Console, bool], dict[str, Any]]] = {Part.sharding: _sharding, Part.sessions: sessions}


main = Program(
    "context_parallel",
    PARTS,
    "Measure attention over ranks: ways to cut documents, and conversations against one process.",
    quick_help="Few and small: shows that it works, its figures mean nothing.",
).command()


if __name__ == "__main__":
    typer.run(main)
