"""Sharded weights: memory against the published law, bytes between hosts by formula, and DHEN's hybrid sharding."""

from __future__ import annotations

import enum
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from _dhen_sharding import INSIDE_BYTES_PER_S, WAYS, measure_sharding
from _fsdp_models import Tracker, fake_processes, make_stage, step, track, units_of
from _processes import run_processes
from _program import Program
from rich.console import Console
from rich.table import Table

from cordillera.distributed.fsdp.sharding_law import (
    CollectiveCounts,
    ParameterMemory,
    Unit,
    bytes_across_hosts,
    collectives,
    parameter_memory,
    sent_bytes,
)
from cordillera.distributed.fsdp.traffic import GATHERED, REDUCED, SCATTERED, record_weight_traffic
from cordillera.distributed.ledger import Ledger, Traffic
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.models.language.llama import PRESETS, LlamaConfig
from cordillera.models.language.parallelize import parallelize

MIB = 2**20
WORLDS = (8, 64, 512)
# 8 of the 32 blocks without embedding and head, and all with both
MODELS = {"8 blocks of 8B": ("llama3-8b", 1, 4), "8B": ("llama3-8b", 0, 1)}
WRAPPINGS = {"every block": 1, "pairs of blocks": 2, "all blocks": 10_000}
QUICK_MODEL = ("llama-debug", 0, 1)
QUICK = ((8, "every block"), (512, "all blocks"))
TOLERANCE = 0.01
DEADLINE_S = 300.0

HOSTS, RANKS_PER_HOST = 2, 2
TRAFFIC_MODEL = LlamaConfig(layers=8, hidden=256, heads=4, kv_heads=2, ffn=768, vocabulary=2048)
# shards and replicas by name
SHARINGS = {"replicated": (1, 4), "fully sharded": (4, 1), "hybrid": (2, 2)}
KINDS = {GATHERED: "all_gathers", SCATTERED: "reduce_scatters", REDUCED: "all_reduces"}


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    memory = "memory"
    traffic = "traffic"
    dhen = "dhen"


def _published(units: list[Unit], shards: int) -> float:
    """Return the bytes of parameters by the paper's formula: no padding, and the root is a unit like the others."""
    sizes = [4 * unit.elements for unit in units]
    return sum(sizes) / shards + max(sizes)


def _tracked(name: str, config: tuple[str, int, int], world: int, wrapping: str) -> dict[str, Any]:
    """Return a row of what torch's tracker recorded for one rank."""
    model, number, stages = config
    with fake_processes(world):
        stage = make_stage(PRESETS[model], number, stages, WRAPPINGS[wrapping])
        units, root = units_of(stage)
        tracked: Tracker = track(stage, ParallelConfig(shard=world))
    law: ParameterMemory = parameter_memory(units, world, root)
    has_root = bool(root.shapes)
    expected: CollectiveCounts = collectives(len(units), world, has_root=has_root)
    published = _published([*units, root] if has_root else units, world)
    return {
        "model": name,
        "world": world,
        "wrapping": wrapping,
        "units": len(units),
        "parameter_bytes": tracked.parameters,
        "law_bytes": law.total,
        "published_bytes": published,
        "off_law": tracked.parameters / law.total - 1,
        "off_published": tracked.parameters / published - 1,
        "gather_buffer_bytes": tracked.gathers,
        "collectives": asdict(tracked.collectives),
        "collectives_by_formula": asdict(expected),
    }


def _memory(console: Console, quick: bool) -> dict[str, Any]:
    if quick:
        rows = [_tracked("debug model", QUICK_MODEL, world, wrapping) for world, wrapping in QUICK]
    else:
        cases = itertools.product(MODELS.items(), WORLDS, WRAPPINGS)
        rows = [_tracked(name, config, world, wrapping) for (name, config), world, wrapping in cases]
    table = Table(title="parameters on a rank, MiB (emulated: torch's tracker on fake tensors)", title_justify="left")
    for heading in (
        "model",
        "units",
        "ranks",
        "tracked",
        "law",
        "off",
        "as published",
        "off",
        "buffers",
        "collectives",
    ):
        table.add_column(heading, justify="left" if heading in ("model", "units") else "right")
    for row in rows:
        counts = row["collectives"]
        table.add_row(
            row["model"], row["wrapping"], str(row["world"]),
            *(f"{row[key] / MIB:,.2f}" for key in ("parameter_bytes", "law_bytes")), f"{row['off_law']:+.2%}",
            f"{row['published_bytes'] / MIB:,.2f}", f"{row['off_published']:+.2%}",
            f"{row['gather_buffer_bytes'] / MIB:,.2f}", f"{counts['all_gathers']} + {counts['reduce_scatters']}",
        )  # fmt: skip
    console.print(table)
    worst = max(abs(row["off_law"]) for row in rows)
    counted = all(row["collectives"] == row["collectives_by_formula"] for row in rows)
    console.print(f"at most {worst:.2%} off the law with the root ({TOLERANCE:.0%} asked); ", end="")
    console.print(f"collectives are {'' if counted else 'NOT '}those of the formula")
    return {
        "evidence": "emulated",
        "rows": rows,
        "worst_off_law": worst,
        "tolerance": TOLERANCE,
        "reached": worst <= TOLERANCE and counted,
        "notes": [
            "one process of a fake group, fake tensors: shapes and lifetimes are torch's, nothing is computed or sent",
            "the root is gathered beside the largest unit; the published law has one of them",
            "buffers of all-gathers are not part of either law",
        ],
    }


def _share(rank: int, folder: str) -> dict[str, Any]:
    """Take a step on one rank for each way to share, after one of warm-up."""
    steps = int(Path(folder, "steps").read_text())
    found: dict[str, Any] = {}
    for name, (shards, replicas) in SHARINGS.items():
        mesh = ProcessMesh(ParallelConfig(shard=shards, replicate=replicas, deadline_s=60))
        stage = make_stage(TRAFFIC_MODEL, 0, 1, 1)
        parallelize(stage, mesh)
        stage.init_weights()
        ledger = Ledger()
        record_weight_traffic(stage, mesh.weights, ledger, RANKS_PER_HOST)
        step(stage)
        ledger.clear()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            step(stage)
        found[name] = {
            "seconds": (time.perf_counter() - began) / steps,
            "traffic": {kind: asdict(traffic) for kind, traffic in ledger.traffic.items()},
        }
    return found


def _traffic(console: Console, quick: bool) -> dict[str, Any]:
    steps = 1 if quick else 5
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "steps").write_text(str(steps))
        ended = run_processes(HOSTS * RANKS_PER_HOST, Path(folder), _share, DEADLINE_S)
    if any(ended.codes):
        raise RuntimeError(f"processes ended with {ended.codes}: {ended.said}")
    units, root = units_of(make_stage(TRAFFIC_MODEL, 0, 1, 1))
    size = 4 * sum(unit.elements for unit in (root, *units))
    table = Table(
        title=f"bytes of a step over those of the weights, {HOSTS} hosts of {RANKS_PER_HOST} ranks "
        "(calls and sizes measured; rings assumed)",
        title_justify="left",
    )
    for heading in ("weights", "sent by a rank", "busiest rank across", "formula", "all ranks across", "formula"):
        table.add_column(heading)
    rows = {}
    for name, (shards, replicas) in SHARINGS.items():
        sent = sent_bytes(units, shards, replicas, root)
        across = bytes_across_hosts(sent, shards, replicas, RANKS_PER_HOST)
        ledgers = [
            {kind: Traffic(**values) for kind, values in found[name]["traffic"].items()}
            for _, found in sorted(ended.found.items())
        ]
        read = [sum(traffic.bytes_across_hosts for traffic in ledger.values()) / steps for ledger in ledgers]
        kinds = [
            {field: ledger.get(kind, Traffic()).bytes / steps for kind, field in KINDS.items()} for ledger in ledgers
        ]
        rows[name] = {
            "shards": shards,
            "replicas": replicas,
            "sent_bytes": kinds,
            "sent_by_formula": asdict(sent),
            "across_hosts_bytes": read,
            "across_hosts_by_formula": across,
            "equal": read == across and all(one == asdict(sent) for one in kinds),
            "seconds": [found[name]["seconds"] for _, found in sorted(ended.found.items())],
            "collective_seconds": [sum(one.seconds for one in ledger.values()) / steps for ledger in ledgers],
        }
        table.add_row(
            name, f"{sum(kinds[0].values()) / size:.3f}", f"{max(read) / size:.3f}", f"{max(across) / size:.3f}",
            f"{sum(read) / size:.3f}", f"{sum(across) / size:.3f}",
        )  # fmt: skip
    console.print(table)
    spared = {
        name: {
            "busiest": max(rows[name]["across_hosts_bytes"]) / max(rows["hybrid"]["across_hosts_bytes"]),
            "all": sum(rows[name]["across_hosts_bytes"]) / sum(rows["hybrid"]["across_hosts_bytes"]),
        }
        for name in ("replicated", "fully sharded")
    }
    for name, times in spared.items():
        console.print(
            f"hybrid: 1/{times['busiest']:.2f} of {name}'s busiest rank, 1/{times['all']:.2f} of all its ranks"
        )
    return {
        "evidence": "measured",
        "model": TRAFFIC_MODEL.model_dump(),
        "weight_bytes": size,
        "hosts": HOSTS,
        "ranks_per_host": RANKS_PER_HOST,
        "steps": steps,
        "rows": rows,
        "times_hybrid": spared,
        "reached": all(row["equal"] for row in rows.values()),
        "notes": [
            "calls and the sizes of their tensors are measured; which rank sends what to which is that of rings over "
            "ranks in their order, not what Gloo puts on the wire; hosts are groups of ranks on one machine"
        ],
    }


def _dhen(console: Console, quick: bool) -> dict[str, Any]:
    figures = measure_sharding(quick)
    title = f"DHEN with {figures['weight_bytes'] / MIB:.1f} MiB of matrices on two hosts of two ranks (emulated links)"
    table = Table(title=title, title_justify="left")
    for heading in ("weights", "step", "held by a rank", "formula", "whole at once", "formula", "across", "formula"):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    for way in WAYS:
        row = figures["rows"][way]
        sizes = ("held_bytes", "held_by_formula", "whole_bytes", "whole_by_formula", "across_hosts_bytes",
                 "across_hosts_by_formula")  # fmt: skip
        cells = [max(row[key]) if isinstance(row[key], list) else row[key] for key in sizes]
        seconds = statistics.median(row["seconds"]["paced"])
        table.add_row(way, f"{1e3 * seconds:.0f} ms", *(f"{size / MIB:.2f}" for size in cells))
    console.print(table)
    for link, ratios in figures["times_as_fast"].items():
        name = f"links of {INSIDE_BYTES_PER_S / 1e9:g} GB/s and 24 times slower" if link == "paced" else "no emulation"
        console.print(f"{name}: hybrid {statistics.median(ratios):.2f} times as fast ({figures['target']} asked)")
    console.print(f"losses at most {figures['loss_difference']:.1e} apart")
    return figures


PARTS: dict[Part, Callable[[Console, bool], dict[str, Any]]] = {
    Part.memory: _memory,
    Part.traffic: _traffic,
    Part.dhen: _dhen,
}


def _prepare() -> dict[str, str]:
    torch.set_num_threads(1)
    return {}


main = Program(
    "fsdp",
    PARTS,
    "Hold sharded weights against their formulas: memory for 8 to 512 ranks, traffic and steps of four processes.",
    part_help="What to look at; repeat it. Default: all.",
    quick_help="Few and small: shows that it works.",
    prepare=_prepare,
).command()


if __name__ == "__main__":
    typer.run(main)
