"""Training of small Llamas compared with transformers' Trainer and torchtitan's, each in its own process, in turn."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _peers import PeerUnavailable
from _results import RESULTS
from _tables import print_notes
from _timing import Spread, Timing, times_faster
from _training_peers import LOG_EVERY, Case
from rich.console import Console
from rich.table import Table

WORKER = Path(__file__).resolve().parent / "_training_peers.py"
# torchtitan and transformers need different versions of libraries, so torchtitan has its own environment.
TORCHTITAN = Path(os.environ.get("CORDILLERA_TORCHTITAN") or RESULTS.parents[1] / ".peers/torchtitan/bin/python")
TARGETS = {"transformers": 1.0, "torchtitan": 0.9}
ROUNDS, ROUND_S = 5, 1.0
DEADLINE_S = 240.0

# torchtitan's debug model of Llama 3 (models/llama3, `debugmodel`) and this project's. Batches are small, to show
# the cost of a step besides its arithmetic.
TITAN = Case(layers=6, hidden=256, heads=16, kv_heads=16, ffn=768, vocabulary=2048, tied=False, rows=1, length=1024)
DEBUG = Case(layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, vocabulary=2048, tied=True, rows=2, length=2048)
DOCUMENTS = (512, 256, 128, 64, 32, 32)
WHOLE = {"transformers": ("",), "torchtitan": ("", "whole")}
PACKED = {"transformers": ("packed", "padded")}


def cases(quick: bool) -> dict[str, tuple[Case, dict[str, tuple[str, ...]]]]:
    """Return the cases by name, each with the peers' own variants, of which the fastest counts."""
    if quick:
        case = replace(DEBUG, layers=1, rows=2, length=128)
        return {
            "quick": (case, {"transformers": ("",), "torchtitan": ("",)}),
            "quick, packed": (replace(case, documents=(64, 40, 24)), PACKED),
        }
    found: dict[str, tuple[Case, dict[str, tuple[str, ...]]]] = {}
    for dtype in ("float32", "bfloat16"):
        for threads in (2, 1):
            case = replace(TITAN, dtype=dtype, threads=threads)
            found[f"torchtitan's debug model, {dtype}, {threads} threads"] = case, WHOLE
        found[f"llama-debug, {dtype}, 2 threads"] = replace(DEBUG, dtype=dtype, threads=2), {"transformers": ("",)}
    packed = replace(TITAN, rows=4, dtype="bfloat16", threads=2, documents=DOCUMENTS)
    found["torchtitan's debug model, packed documents, bfloat16, 2 threads"] = packed, PACKED
    return found


def missing() -> dict[str, str]:
    """Return why peers cannot be run."""
    found = {}
    for module in ("transformers", "accelerate"):  # the Trainer needs both
        if find_spec(module) is None:
            found["transformers"] = f"{module} is not installed"
    if not TORCHTITAN.exists():
        found["torchtitan"] = f"{TORCHTITAN} is not there"
    return found


class _Trainer:
    """A process that takes steps on request."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self._process, self._log = name, process, log

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], DEADLINE_S)[0]
        line = self._process.stdout.readline() if ready else ""
        if not line:
            what = "ended" if ready else f"said nothing for {DEADLINE_S:g} s"
            raise RuntimeError(f"{self.name} {what}: {self._log.read_text()[-3000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def seconds(self, steps: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return float(self.answer()["seconds"]) / steps


@contextmanager
def _started(name: str, case: Case, folder: Path) -> Iterator[_Trainer]:
    trainer = name.split(",")[0]
    environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads), "TOKENIZERS_PARALLELISM": "false"}
    python = str(TORCHTITAN) if trainer == "torchtitan" else sys.executable
    if trainer == "torchtitan":
        environment.pop("PYTHONPATH", None)
    log = folder / f"{name}.txt"
    with log.open("w") as said:
        process = subprocess.Popen(
            [python, str(WORKER), trainer, json.dumps(asdict(case))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=environment, cwd=folder,
        )  # fmt: skip
    try:
        yield _Trainer(name, process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # ends the process
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _trainers(case: Case, beside: dict[str, tuple[str, ...]], loop: bool) -> dict[str, Case]:
    """Return the cases of ours, which comes first, and of all variants of the peers, by name."""
    named = {"ours": ""} | {
        f"{peer}, {variant}" if variant else peer: variant for peer, tried in beside.items() for variant in tried
    }
    return {
        f"{name}, loop" if loop else name: replace(case, variant=variant, loop=loop) for name, variant in named.items()
    }


def _ratios(timings: dict[str, Timing], case: Case, beside: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the ratio of the first trainer, ours, to the fastest variant of each peer."""
    ours = next(iter(timings.values()))
    found = {}
    for peer in beside:
        own = [timing for name, timing in timings.items() if name.split(",")[0] == peer]
        fastest = min(own, key=lambda timing: timing.spread.median)
        found[peer] = {
            "fastest": fastest.name,
            "times": times_faster(ours, fastest).to_json(),
            "target": None if case.documents else TARGETS[peer],
        }
    return found


def measure_case(case: Case, beside: dict[str, tuple[str, ...]], rounds: int) -> dict[str, Any]:
    """Measure tokens per second of all trainers in turn, and the ratio of ours to the fastest variant of each peer.

    ``ratios`` are of our bare step to the peers' loops that record nothing, ``loops`` of our loop to theirs with
    records and progress.
    """
    steps_of, loops_of = (_trainers(case, beside, loop) for loop in (False, True))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trainers = {
            name: stack.enter_context(_started(name, one, Path(folder))) for name, one in (steps_of | loops_of).items()
        }
        facts = {name: trainer.answer() for name, trainer in trainers.items()}
        counts = {one["parameters"] for one in facts.values()}
        if len(counts) > 1:
            raise RuntimeError(f"models differ: {facts}")
        steps = max(1, round(ROUND_S * facts["ours"]["steps"] / facts["ours"]["seconds"]))
        steps = LOG_EVERY * max(1, round(steps / LOG_EVERY))  # every round of a loop holds as many records
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        names = list(trainers)
        for i in range(rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                seconds[name].append(trainers[name].seconds(steps))
    timings = {name: Timing(name, values) for name, values in seconds.items()}
    tokens = case.rows * (sum(case.documents) or case.length)
    return {
        "case": asdict(case),
        "parameters": counts.pop(),
        "versions": {name: one["version"] for name, one in facts.items() if one["version"]},
        "steps_a_round": steps,
        "ratios": _ratios({name: timings[name] for name in steps_of}, case, beside),
        "loops": _ratios({name: timings[name] for name in loops_of}, case, beside),
        "tokens_per_s": {
            name: Spread.of([tokens / value for value in values]).to_json() for name, values in seconds.items()
        },
    }


def of_both(case: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield what is timed of ours, ``step`` or ``loop``, the name of our trainer, and a ratio, of one result."""
    for ratio in case["ratios"].values():
        yield "step", "ours", ratio
    for ratio in case["loops"].values():
        yield "loop", "ours, loop", ratio


def training(console: Console, quick: bool) -> dict[str, Any]:
    """Measure all cases and print them; ``quick`` cases are small, and their figures mean nothing.

    Raises:
        PeerUnavailable: If there is no peer at all.
    """
    absent = missing()
    if set(absent) == set(TARGETS):
        raise PeerUnavailable("; ".join(f"{name}: {why}" for name, why in absent.items()))
    for name, why in absent.items():
        console.print(f"training: {name} is left out, {why} (make peers)", markup=False)
    results = {}
    table = Table(title="tokens trained on a second (measured)", title_justify="left")
    for heading in ("case", "of ours", "than", "times as fast", "quartiles", "asked", "ours", "peer"):
        table.add_column(heading)
    for name, (case, peers) in cases(quick).items():
        beside = {peer: tried for peer, tried in peers.items() if peer not in absent}
        if not beside:
            continue
        one = results[name] = measure_case(case, beside, 2 if quick else ROUNDS)
        rates = one["tokens_per_s"]
        for part, ours, ratio in of_both(one):
            times = ratio["times"]
            table.add_row(
                name, part, ratio["fastest"], f"{times['median']:.2f}", f"{times['low']:.2f} to {times['high']:.2f}",
                str(ratio["target"] or ""), f"{rates[ours]['median']:,.0f}",
                f"{rates[ratio['fastest']]['median']:,.0f}",
            )  # fmt: skip
    console.print(table)
    notes = [
        "one document a row, unless packed; AdamW fused, gradients clipped, weights and moments in float32",
        "step: LanguageEngine.step in a mesh of one process, beside loops that record nothing",
        "loop: the function behind `cordillera train`, with text from disk, records and progress, beside loops with "
        f"records and progress, of rows in memory; records every {LOG_EVERY} steps; no checkpoints in any",
        "transformers: Trainer, sdpa; bfloat16 by its bf16=True (autocast)",
        "transformers, packed: DataCollatorWithFlattening; padded: rows as long as the longest document",
        "torchtitan: its Trainer's train_step, in the loop its train; FSDP on one process over Gloo, no activation "
        "checkpoints; its module around torch's fused attention in place of flex attention, which does not train on "
        "CPUs; the faster of its loss in eight parts and of its loss at once (whole)",
    ]
    print_notes(console, notes)
    return {"evidence": "measured", "rounds": 2 if quick else ROUNDS, "results": results, "notes": notes}
