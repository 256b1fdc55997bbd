"""Simulated incidents, and whom the analysis of traces blames: shares by kind of fault, its time, torch's analysis."""

from __future__ import annotations

import gc
import logging
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from _blame_incidents import FAULTS, KEPT, SHAPES, FaultName, Incident, healthy, incident
from _timing import Spread
from rich.console import Console
from rich.table import Table
from torch.distributed.flight_recorder.components import builder, config_manager, loader

from cordillera.distributed.tracing.blame import blame
from cordillera.distributed.tracing.flight_recorder import read_traces, write_trace
from cordillera.distributed.tracing.rank_trace import RankTrace

TARGET_EXACT, TARGET_SECONDS = 0.95, 2.0
SIZES = (512, 1024, 2048, 4096)


def study(console: Console, quick: bool) -> dict[str, Any]:
    """Return the figures of ``cordillera bench ncclx --part blame``."""
    size, count = (64, 1) if quick else (512, 25)
    alone = {name: [_made(size, (name,), seed) for seed in range(count)] for name in FAULTS}
    kinds = {name: _counted(incidents) for name, incidents in alone.items()}
    both = [_made(64 if quick else 512, pair, 100 + seed) for seed, pair in enumerate(_pairs(3 if quick else 60))]
    kinds["two at a time"] = _counted([one for one in both if len(one.faults) == 2])
    false = sum(bool(blame(healthy(_shape(size, seed), seed).traces).causes) for seed in range(3 if quick else 200))
    seconds = {str(ranks): _seconds(ranks, 1 if quick else 5) for ranks in ((64,) if quick else SIZES)}
    peers = {
        name: _beside_torch([_made(64, (name,), seed, 1000) for seed in range(1 if quick else 15)]) for name in FAULTS
    }
    table = Table(title="exact sets of culprits (simulated incidents)", title_justify="left")
    for heading in ("fault", "incidents", "exact", "torch names them", "without messages", "ranks that torch names"):
        table.add_column(heading)
    for name, row in kinds.items():
        peer = peers.get(name, {})  # type: ignore[arg-type]
        shown = ["", "", ""]
        if peer:
            shown = [f"{100 * peer[key]:.0f} %" for key in ("named", "named_without_messages")] + [
                f"{peer['ranks']:.1f}"
            ]
        table.add_row(name, str(row["incidents"]), f"{100 * row['exact']:.1f} %", *shown)
    console.print(table)
    single = sum(kinds[name]["exact"] * kinds[name]["incidents"] for name in FAULTS) / (len(FAULTS) * count)
    console.print(
        f"one fault: {100 * single:.1f} % exact ({100 * TARGET_EXACT:.0f} asked); healthy jobs blamed: {false}"
    )
    for ranks, one in seconds.items():
        console.print(
            f"{ranks} ranks, {one['records']:,} operations: {one['seconds']['median']:.2f} s "
            f"({one['processor_seconds']['median']:.2f} of a processor), files {one['read']:.1f} s"
        )
    return {
        "evidence": "simulated incidents, analysed by real code; seconds measured",
        "kinds": kinds,
        "exact": single,
        "healthy": {"jobs": 3 if quick else 200, "blamed": false},
        "analysis": seconds,
        "torch": peers,
        "targets": {"exact": TARGET_EXACT, "seconds": TARGET_SECONDS},
        "reached": {
            "exact": single >= TARGET_EXACT,
            "healthy": false == 0,
            "seconds": all(one["processor_seconds"]["high"] < TARGET_SECONDS for one in seconds.values()),
        },
        "notes": [
            "the incidents are ours: the same assumptions are in the simulation and in the rules",
            "torch's analysis counts as naming the culprits if one of its messages names exactly them",
        ],
    }


def _shape(size: int, seed: int) -> Any:
    return SHAPES[size][seed % len(SHAPES[size])]


def _made(size: int, names: Sequence[FaultName], seed: int, kept: int = KEPT) -> Incident:
    return incident(_shape(size, seed), tuple(names), seed, kept=kept)


def _pairs(count: int) -> Iterator[tuple[FaultName, FaultName]]:
    pairs = list(combinations([name for name in FAULTS if not name.startswith("slow")], 2))
    chance = random.Random(0)
    for _ in range(count):
        yield chance.choice(pairs)


def _counted(incidents: Sequence[Incident]) -> dict[str, Any]:
    found = [blame(one.traces) for one in incidents]
    exact = [one.culprits == got.culprits for one, got in zip(incidents, found, strict=True)]
    kinds: dict[str, int] = defaultdict(int)
    for got in found:
        for cause in got.causes:
            kinds[cause.kind] += 1
    return {
        "incidents": len(incidents),
        "exact": sum(exact) / max(1, len(exact)),
        "kinds": dict(kinds),
        "not_exact": [
            {"faults": [vars(fault) for fault in one.faults], "blamed": sorted(got.culprits)[:20]}
            for one, got, is_exact in zip(incidents, found, exact, strict=True)
            if not is_exact
        ],
    }


def _seconds(ranks: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of the analysis over incidents of each kind, and those of reading one's files."""
    times, processor, records, read = [], [], 0, 0.0
    for number in range(rounds):
        made = incident(SHAPES[ranks][0], (FAULTS[number % len(FAULTS)],), number)
        records = max(records, sum(len(trace.collectives) for trace in made.traces))
        began, used = time.perf_counter(), time.process_time()
        blame(made.traces)
        times.append(time.perf_counter() - began)
        processor.append(time.process_time() - used)
        if number == 0:
            with tempfile.TemporaryDirectory() as folder:
                for trace in made.traces:
                    write_trace(trace, Path(folder))
                began = time.perf_counter()
                read_traces(Path(folder))
                read = time.perf_counter() - began
    spent = {"seconds": Spread.of(times).to_json(), "processor_seconds": Spread.of(processor).to_json()}
    return {**spent, "records": records, "read": read}


def _beside_torch(incidents: Sequence[Incident]) -> dict[str, Any]:
    """Return how often torch's analysis names exactly the culprits, with and without point-to-point messages."""
    named, bare, ranks = 0, 0, []
    for one in incidents:
        groups = torch_names(one.traces)
        named += one.culprits in groups
        ranks.append(len(frozenset().union(*groups)))
        quiet = [
            replace(trace, collectives=tuple(record for record in trace.collectives if record.peer is None))
            for trace in one.traces
        ]
        bare += one.culprits in torch_names(quiet)
    count = len(incidents)
    return {
        "incidents": count,
        "named": named / count,
        "named_without_messages": bare / count,
        "ranks": sum(ranks) / count,
        "ours": sum(blame(one.traces).culprits == one.culprits for one in incidents) / count,
    }


def torch_names(traces: Sequence[RankTrace]) -> list[frozenset[int]]:
    """Return the ranks that each message of torch's analysis names as missing or as the culprit of an error."""
    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for trace in traces:
                write_trace(trace, Path(folder))
            arguments = config_manager.JobConfig().parse_args([folder, "--allow-incomplete-ranks"])
            details, version = loader.read_dir(arguments)
            database = builder.build_db(details, arguments, version)
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()  # torch's reader turns it off
    return [
        frozenset(one.missing_ranks or ()) | frozenset(one.mismatch_collectives or ())
        for one in database.collectives
        if one.missing_ranks or one.mismatch_collectives
    ]
