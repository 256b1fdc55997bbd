"""Packing by predicted work compared with packing by tokens: ``cordillera bench wlb``."""

from __future__ import annotations

import enum
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _emulated_pipeline
import numpy as np
import typer
from _executed_packing import MODEL, executed_seconds, measured_work, simulated_seconds, times_faster, work_of
from _packing_baselines import exactly, fixed_length, in_arrival_order
from _program import Program
from _timing import Spread
from rich.console import Console
from rich.table import Table

from cordillera.data.packing.packer import Iteration, Microbatch, Packer, PackingConfig, global_batches
from cordillera.data.packing.statistics import PackingStatistics, packed, tune
from cordillera.data.packing.work import DocumentWork
from cordillera.distributed.context.shard_plan import ShardPlan, per_document, per_sequence
from cordillera.errors import DataError
from cordillera.planning.pipeline.schedules import one_forward_one_backward
from cordillera.planning.pipeline.simulator import StageSeconds, simulate

LENGTHS = Path(
    os.environ.get("CORDILLERA_WLB_LENGTHS")
    or Path(__file__).resolve().parents[2] / "shared" / "data" / "wlb_document_lengths.json"
)
MICROBATCHES, CONTEXT = 4, 131_072
BOUNDS = {"1.5 contexts": CONTEXT * 3 // 2, "2 contexts": CONTEXT * 2}  # largest number of tokens of a microbatch
WORK = DocumentWork.of_break_even(32_768)
MOST_DELAY = 0.6  # iterations
TARGETS = {"imbalance": 1.03, "imbalance_p95": 1.15, "delay": MOST_DELAY, "seconds": 5e-3}
STAGES, CONTEXT_RANKS = 4, 2
Sharding = Callable[[Sequence[int], int], ShardPlan]
ARRIVAL = {"arrival order, documents cut": True, "arrival order": False}
# These compute the same as ours, so that gains over them do not come from attention that cuts leave out.
WHOLE = ("arrival order", "fixed length, window 1")
TARGET_GAIN = 1.25
DIVISOR = 32  # divisor of lengths in the executed pipeline
OURS = "2 queues, 2 contexts"
FORWARD_S = 0.04  # seconds of a mean microbatch in a stage whose layers sleep


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    packing = "packing"
    pipeline = "pipeline"
    executed = "executed"
    emulated = "emulated"


class Stream(NamedTuple):
    """Global batches of documents.

    Attributes:
        sample: Batches on which thresholds are tuned.
        held_out: All later batches, from which figures are taken.
    """

    sample: list[list[int]]
    held_out: list[list[int]]

    @classmethod
    def read(cls, quick: bool) -> Stream:
        lengths = json.loads(LENGTHS.read_text())
        batches = list(global_batches(lengths[: 12_000 if quick else None], MICROBATCHES * CONTEXT))
        first = len(batches) // 4
        return cls(batches[:first], batches[first:])

    @property
    def documents(self) -> list[int]:
        return [length for batch in self.held_out for length in batch]


def _tuned(stream: Stream, bound: int, queues: int, quick: bool) -> PackingConfig:
    config = PackingConfig(microbatches=MICROBATCHES, bound=bound)
    # In a short sample, documents wait for a large part of it.
    return tune(stream.sample, config, WORK, queues, 2.0 if quick else MOST_DELAY)


def _planned(batches: Sequence[Sequence[int]], config: PackingConfig) -> tuple[list[Iteration], Spread]:
    packer, found, seconds = Packer(config, WORK), [], []
    for batch in batches:
        began = time.perf_counter()
        found.append(packer.pack(batch))
        seconds.append(time.perf_counter() - began)
    return [*found, *packer.drain()], Spread.of(seconds)


def _listed(iterations: Iterable[Iteration]) -> tuple[list[Iteration], float]:
    began = time.perf_counter()
    found = list(iterations)
    return found, (time.perf_counter() - began) / len(found)


def _packing(console: Console, quick: bool) -> dict[str, Any]:
    stream = Stream.read(quick)
    documents = stream.documents
    rows: dict[str, dict[str, Any]] = {}

    def add(name: str, iterations: list[Iteration], **more: Any) -> None:
        used = sum(one.tokens for one in iterations)
        if used != sum(documents):
            raise RuntimeError(f"{name} used {used} tokens of {sum(documents)}")
        rows[name] = {**PackingStatistics.of(iterations, WORK).to_json(), **more}

    for name, cut in ARRIVAL.items():
        found, seconds = _listed(in_arrival_order(documents, MICROBATCHES, CONTEXT, cut))
        add(name, found, seconds=seconds)
    for window in (1, 2, 4, 8):
        found, seconds = _listed(fixed_length(documents, MICROBATCHES, CONTEXT, window, WORK))
        add(f"fixed length, window {window}", found, seconds=seconds)
    loosest = _tuned(stream, BOUNDS["1.5 contexts"], 2, quick)
    fixed = loosest.model_copy(update={"bound": CONTEXT})
    found, spread = _planned(stream.held_out, fixed)
    add("two queues, no variable length", found, config=fixed.model_dump(), seconds=spread.median)
    notes = []
    for bound, tokens in BOUNDS.items():
        for queues in (0, 1, 2, 3):
            if queues == 3 and quick:
                continue
            try:
                config = _tuned(stream, tokens, queues, quick)
            except DataError as error:
                notes.append(f"{queues} queues, {bound}: {error.what}")
                continue
            found, spread = _planned(stream.held_out, config)
            add(f"{queues} queues, {bound}", found, config=config.model_dump(), seconds=spread.median,
                seconds_spread=spread.to_json())  # fmt: skip
    table = Table(title="microbatches of an iteration: heaviest over mean work (held out)", title_justify="left")
    for heading in ("", "mean", "95 %", "delay", "longest", "a batch"):
        table.add_column(heading)
    for name, one in rows.items():
        table.add_row(
            name, f"{one['imbalance']:.3f}", f"{one['imbalance_p95']:.3f}", f"{one['delay']:.2f}",
            f"{one['longest']:,}", f"{one['seconds'] * 1e3:.2f} ms",
        )  # fmt: skip
    console.print(table)
    solver = _beside_the_solver(stream.held_out[: 3 if quick else 40])
    console.print(
        f"without delay, on {solver['batches']} batches: greedy {solver['greedy']:.4f}, exact {solver['exact']:.4f}"
    )
    reached = {
        bound: {key: rows[f"2 queues, {bound}"][key] <= target for key, target in TARGETS.items()} for bound in BOUNDS
    }
    console.print(f"targets of two queues: {reached}")
    return {
        "evidence": "simulated work (break-even length), plans and planning seconds measured",
        "stream": {"tuned_on": len(stream.sample), "held_out": len(stream.held_out), "documents": len(documents)},
        "workload": WORK.model_dump(),
        "targets": TARGETS,
        "reached": reached,
        "rows": rows,
        "solver": solver,
        "notes": notes,
    }


def _beside_the_solver(batches: list[list[int]]) -> dict[str, Any]:
    """Compare the greedy packing of every single batch with the best one, a loss that delay cannot reduce."""
    bound, gap = BOUNDS["2 contexts"], 1e-3
    config = PackingConfig(microbatches=MICROBATCHES, bound=bound)
    greedy, best, seconds, given_up = [], [], [], 0
    for batch in batches:
        began = time.perf_counter()
        try:
            found = list(exactly(batch, MICROBATCHES, sum(batch), bound, WORK, 10.0, gap))
        except DataError:
            given_up += 1
            continue
        seconds.append(time.perf_counter() - began)
        best += found
        greedy.append(Packer(config, WORK).pack(batch))
    return {
        "batches": len(best),
        "given_up": given_up,
        "gap": gap,
        "greedy": float(np.mean([PackingStatistics.of([one], WORK).imbalance for one in greedy])),
        "exact": float(np.mean([PackingStatistics.of([one], WORK).imbalance for one in best])),
        "exact_seconds": Spread.of(seconds).to_json(),
    }


def _work_of_ranks(microbatch: Microbatch, sharding: Sharding) -> list[float]:
    """Return the work of each context rank relative to that of a token; both halves of ``d**2`` are pairs."""
    plan = sharding(microbatch.lengths, CONTEXT_RANKS)
    pairs = plan.work.tolist()
    return [WORK.token * tokens + WORK.squared * 2 * own for tokens, own in zip(plan.tokens, pairs, strict=True)]


def _pipeline_seconds(iterations: list[Iteration], sharding: Sharding) -> float:
    """Return the sum of 1F1B steps over the iterations, in forwards of a stage for a token's linear work."""
    schedule = one_forward_one_backward(STAGES, MICROBATCHES)
    one = StageSeconds.equal(STAGES, 1.0, 2.0)
    total = 0.0
    for iteration in iterations:
        work = [max(_work_of_ranks(microbatch, sharding)) for microbatch in iteration.microbatches]
        seconds = StageSeconds(one.forward, one.input_gradient, one.weight_gradient, microbatches=work)
        total += simulate(schedule, seconds).seconds
    return total


def _pipeline(console: Console, quick: bool) -> dict[str, Any]:
    stream = Stream.read(quick)
    plans = {
        name: list(in_arrival_order(stream.documents, MICROBATCHES, CONTEXT, cut)) for name, cut in ARRIVAL.items()
    }
    plans["fixed length, window 1"] = list(fixed_length(stream.documents, MICROBATCHES, CONTEXT, 1, WORK))
    configs = {}
    for bound, tokens in BOUNDS.items():
        configs[bound] = _tuned(stream, tokens, 2, quick)
        plans[f"2 queues, {bound}"] = packed(stream.held_out, configs[bound], WORK)
    ways = {"per sequence": per_sequence, "per document": per_document}
    work = {name: sum(WORK.of(m.lengths) for one in plan for m in one.microbatches) for name, plan in plans.items()}
    seconds = {name: {way: _pipeline_seconds(plan, cut) for way, cut in ways.items()} for name, plan in plans.items()}
    # With equal work everywhere, ranks wait only while the pipeline fills and empties.
    ideal = 3 * (MICROBATCHES + STAGES - 1) / (CONTEXT_RANKS * MICROBATCHES)
    rows = {
        name: {
            "work": work[name],
            "seconds": row,
            "times_perfect_balance": {way: value / (ideal * work[name]) for way, value in row.items()},
        }
        for name, row in seconds.items()
    }
    ours = [f"2 queues, {bound}" for bound in BOUNDS]
    gains = {
        name: {
            base: {
                "packing": seconds[base]["per sequence"] / seconds[name]["per sequence"],
                "both": seconds[base]["per sequence"] / seconds[name]["per document"],
                "both_by_work": seconds[base]["per sequence"] / work[base] * work[name] / seconds[name]["per document"],
            }
            for base in seconds
            if base not in ours
        }
        for name in ours
    }
    table = Table(title="times as fast as a baseline sharded per sequence (simulated)", title_justify="left")
    for heading in ("", "than", "packing", "with sharding per document", "by work", "baseline's work"):
        table.add_column(heading)
    for name, bases in gains.items():
        for base, one in bases.items():
            table.add_row(
                name, base, f"{one['packing']:.3f}", f"{one['both']:.3f}", f"{one['both_by_work']:.3f}",
                f"{work[base] / work[name]:.3f}",
            )  # fmt: skip
    console.print(table)
    together = {name: min(bases[base]["both"] for base in WHOLE) for name, bases in gains.items()}
    for name, gain in together.items():
        console.print(f"{name}: {gain:.2f} times the best baseline of whole documents ({TARGET_GAIN} asked)")
    return {
        "evidence": "simulated",
        "stages": STAGES,
        "microbatches": MICROBATCHES,
        "context_ranks": CONTEXT_RANKS,
        "backward_over_forward": 2.0,
        "workload": WORK.model_dump(),
        "configs": {name: config.model_dump() for name, config in configs.items()},
        "rows": rows,
        "gains": gains,
        "together": together,
        "target": TARGET_GAIN,
        "reached": {name: gain >= TARGET_GAIN for name, gain in together.items()},
        "notes": ["where documents are cut, their parts do not see each other: less work is done for as many tokens"],
    }


def _executed(console: Console, quick: bool) -> dict[str, Any]:
    stream = Stream.read(quick)
    context, count = CONTEXT // DIVISOR, 2 if quick else 12
    work = measured_work(context // 8 if quick else context)
    sample, held_out = ([[max(2, d // DIVISOR) for d in one] for one in part] for part in stream)
    config = tune(
        sample, PackingConfig(microbatches=MICROBATCHES, bound=2 * context), work, 2, 2.0 if quick else MOST_DELAY
    )
    documents = [length for batch in held_out for length in batch]
    found = {
        OURS: packed(held_out, config, work),
        "fixed length, window 1": list(fixed_length(documents, MICROBATCHES, context, 1, work)),
        "arrival order": list(in_arrival_order(documents, MICROBATCHES, context, False)),
    }
    # The first iterations, in which queues fill, are left out.
    first = 1 if quick else 20
    plans = {
        name: [[one.lengths for one in iteration.microbatches] for iteration in plan[first : first + count]]
        for name, plan in found.items()
    }
    seconds = executed_seconds(plans, 1 if quick else 3)
    simulated = {name: simulated_seconds(plan, work) for name, plan in plans.items()}
    computed = {name: work_of(plan, work) for name, plan in plans.items()}
    table = Table(title="a pipeline of two processes, times as much work a second", title_justify="left")
    for heading in ("than", "executed", "quartiles", "simulated"):
        table.add_column(heading)
    gains = {}
    for name in plans:
        if name == OURS:
            continue
        gain = times_faster(plans[OURS], plans[name], seconds[OURS], seconds[name], work)
        predicted = computed[OURS] / simulated[OURS] / (computed[name] / simulated[name])
        gains[name] = {"executed": gain.to_json(), "simulated": predicted}
        table.add_row(name, f"{gain.median:.2f}", f"{gain.low:.2f} to {gain.high:.2f}", f"{predicted:.2f}")
    console.print(table)
    return {
        "evidence": "measured: a small Llama on Gloo processes of one thread; simulated: by the same fitted work",
        "model": MODEL.model_dump(mode="json"),
        "divisor": DIVISOR,
        "context": context,
        "workload": work.model_dump(),
        "break_even": work.token / work.squared if work.squared else None,
        "config": config.model_dump(),
        "iterations": count,
        "work_seconds": computed,
        "seconds": {name: Spread.of(values).to_json() for name, values in seconds.items()},
        "simulated_seconds": simulated,
        "gains": gains,
    }


def _emulated(console: Console, quick: bool) -> dict[str, Any]:
    stream = Stream.read(quick)
    count, rounds = (2, 1) if quick else (40, 3)
    config = _tuned(stream, BOUNDS["2 contexts"], 2, quick)
    found = {
        OURS: (packed(stream.held_out, config, WORK), per_document),
        **{
            name: (list(in_arrival_order(stream.documents, MICROBATCHES, CONTEXT, cut)), per_sequence)
            for name, cut in ARRIVAL.items()
        },
        WHOLE[1]: (list(fixed_length(stream.documents, MICROBATCHES, CONTEXT, 1, WORK)), per_sequence),
    }
    first = 1 if quick else 20  # queues fill in the previous iterations
    taken = {name: (plan[first : first + count], sharding) for name, (plan, sharding) in found.items()}
    work = {
        name: sum(WORK.of(m.lengths) for one in plan for m in one.microbatches) for name, (plan, _) in taken.items()
    }
    # A stage's forward of a mean microbatch on one of the context ranks.
    scale = FORWARD_S * CONTEXT_RANKS * count * MICROBATCHES / work[OURS]
    plans = {
        name: [[[scale * w for w in _work_of_ranks(m, sharding)] for m in one.microbatches] for one in plan]
        for name, (plan, sharding) in taken.items()
    }
    seconds = _emulated_pipeline.executed_seconds(plans, rounds)
    simulated = {name: _emulated_pipeline.simulated_seconds(plan) for name, plan in plans.items()}
    table = Table(title="two stages of two context ranks, times as much work a second", title_justify="left")
    for heading in ("than", "executed, emulated computation", "quartiles", "simulated"):
        table.add_column(heading)
    gains = {}
    for name in found:
        if name == OURS:
            continue
        less = work[OURS] / work[name]  # iterations of two plans hold different documents
        gain = Spread.of([less * b / a for a, b in zip(seconds[OURS], seconds[name], strict=True)])
        predicted = less * simulated[name] / simulated[OURS]
        gains[name] = {"executed": gain.to_json(), "simulated": predicted, "reached": gain.median >= TARGET_GAIN}
        table.add_row(name, f"{gain.median:.2f}", f"{gain.low:.2f} to {gain.high:.2f}", f"{predicted:.2f}")
    console.print(table)
    return {
        "evidence": "emulated: processes, messages and schedule are real, layers sleep for their predicted work",
        "stages": _emulated_pipeline.STAGES,
        "context_ranks": CONTEXT_RANKS,
        "microbatches": MICROBATCHES,
        "layers": _emulated_pipeline.LAYERS,
        "backward_over_forward": _emulated_pipeline.BACKWARD,
        "forward_seconds": FORWARD_S,
        "workload": WORK.model_dump(),
        "config": config.model_dump(),
        "iterations": count,
        "seconds": {name: Spread.of(values).to_json() for name, values in seconds.items()},
        "simulated_seconds": simulated,
        "gains": gains,
        "target": TARGET_GAIN,
        "notes": ["ours is sharded per document, the others per sequence"],
    }


PARTS: dict[Part, Callable[[Console, bool], dict[str, Any]]] = {
    Part.packing: _packing,
    Part.pipeline: _pipeline,
    Part.executed: _executed,
    Part.emulated: _emulated,
}


def _left_out(part: Part) -> str | None:
    return None if LENGTHS.exists() else f"{LENGTHS} (document lengths of hao-ai-lab/DistCA, Apache-2.0) is not here"


main = Program(
    "wlb",
    PARTS,
    "Pack WLB-LLM's document lengths, and simulate the pipeline that computes them.",
    left_out=_left_out,
).command()


if __name__ == "__main__":
    typer.run(main)
