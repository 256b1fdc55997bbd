"""What a replica that is absent most of the time costs in loss, by what the others train on and at which rate.

The steps of replicas are trained by one process, which gives the same weights to the bit (``--part survival``). The
model is small and trained for minutes: with fewer tokens it is also behind by what they would have taught.
"""

from __future__ import annotations

import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
from _replica_history import Replay
from _results import FinishedPieces
from rich.console import Console
from rich.table import Table

from cordillera.data.language.held_out import held_out_batches
from cordillera.distributed.fault_tolerance.coordination import FaultToleranceConfig
from cordillera.kernels.threads import usable_cores
from cordillera.recipe import LanguageRecipe, validate
from cordillera.training.optimizers import schedule

REPLICAS, SEEDS = 4, (1, 2, 3)
STEPS, STEPS_QUICK, EVALUATIONS = 5000, 6, 20
PRESENT, ABSENT, BLOCKS = 90, 365, 2  # of a thousand steps: with all replicas and without one, in turn
TARGETS = {"shrink": 0.01, "shrink, sqrt": 0.01, "constant": 0.003}  # difference in final loss


@dataclass(frozen=True)
class Policy:
    """How a job meets the absence of a replica.

    Attributes:
        tolerance: What its steps are trained on.
        fails: Whether a replica is absent at all.
    """

    tolerance: FaultToleranceConfig
    fails: bool = True


POLICIES = {
    "fault-free": Policy(FaultToleranceConfig(replicas=REPLICAS), fails=False),
    "shrink": Policy(FaultToleranceConfig(replicas=REPLICAS)),
    "shrink, sqrt": Policy(FaultToleranceConfig(replicas=REPLICAS, rate="sqrt")),
    "constant": Policy(FaultToleranceConfig(replicas=REPLICAS, batch="constant")),
}


def recipe(seed: int, steps: int) -> LanguageRecipe:
    """Return the recipe: a model of bytes on the source files of Python's standard library."""
    sizes = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 96, "vocabulary": 264, "context": 256}
    content: dict[str, Any] = {
        "device": "cpu",
        "seed": seed,
        "data": {"path": "python-library", "tokenizer": "bytes"},
        "packing": {"tokens": 1024, "context": 256, "bound": 1024, "microbatches": 1},
        "model": {"name": "llama", **sizes},
        "training": {"steps": steps, "warmup_steps": steps // 10, "learning_rate": 1e-2, "evaluation_tokens": 131_072},
        "fault_tolerance": {"replicas": REPLICAS},
    }
    found = validate(content)
    assert isinstance(found, LanguageRecipe)
    return found


def is_absent(step: int, steps: int) -> bool:
    """Whether a replica is absent in a step."""
    place = 1000 * step // steps
    return place < BLOCKS * (PRESENT + ABSENT) and place % (PRESENT + ABSENT) >= PRESENT


def trained(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train by a policy; return the losses on held-out text while it goes on, and how many tokens it took."""
    made, policy = recipe(seed, steps), POLICIES[name]
    config, replay = made.training, Replay(made)
    held_out = held_out_batches(replay.corpora, made.packing, tokens=config.evaluation_tokens).microbatches
    losses, tokens, absent = [], 0, 0
    for step in range(steps):
        is_short = policy.fails and is_absent(step, steps)
        absent += is_short
        participants = REPLICAS - is_short
        iterations = policy.tolerance.iterations(participants)
        rate = policy.tolerance.rate_factor(iterations) * schedule(
            step, steps, warmup=config.warmup_steps, decay=config.decay, floor=config.final_rate
        )
        tokens += replay.step(iterations, participants, rate).targets
        if (step + 1) * EVALUATIONS // steps > step * EVALUATIONS // steps:
            losses.append(replay.evaluate(held_out))
    parameters = sum(one.numel() for one in replay.weights().values())
    return {"losses": losses, "tokens": tokens, "absent": absent / steps, "parameters": parameters}


def convergence(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    """Train by each policy and seed, and compare final losses with those of the same seed without faults."""
    steps, seeds = (STEPS_QUICK, SEEDS[:1]) if quick else (STEPS, SEEDS)
    keys: list[dict[str, Any]] = [{"policy": name, "seed": seed, "steps": steps} for seed in seeds for name in POLICIES]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(usable_cores(), spawn, torch.set_num_threads, (1,)) as pool:
        waiting = {pool.submit(trained, key["policy"], key["seed"], steps): key for key in keys if not pieces.get(key)}
        for one in as_completed(waiting):
            pieces.add(waiting[one], one.result())
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in POLICIES}
    for key in keys:
        value = pieces.get(key)
        assert value is not None
        found[key["policy"]].append({"seed": key["seed"], **value})
    table = Table(title=f"one of {REPLICAS} replicas absent (measured)", title_justify="left")
    for heading in ("policy", "steps absent", "tokens", "final loss", "difference", "asked", "largest excursion"):
        table.add_column(heading)
    for name, runs in found.items():
        for one, plain in zip(runs, found["fault-free"], strict=True):
            ratios = [a / b - 1 for a, b in zip(one["losses"], plain["losses"], strict=True)]
            one |= {"difference": ratios[-1], "excursion": max(ratios)}
        final = statistics.fmean(one["losses"][-1] for one in runs)
        differences = [one["difference"] for one in runs]
        asked = f"{TARGETS[name]:.1%}" if name in TARGETS else ""
        table.add_row(
            name, f"{runs[0]['absent']:.0%}", f"{runs[0]['tokens']:,}", f"{final:.4f}",
            f"{min(differences):+.2%} to {max(differences):+.2%}", asked, f"{max(o['excursion'] for o in runs):+.2%}",
        )  # fmt: skip
    console.print(table)
    return {
        "evidence": "measured",
        "replicas": REPLICAS,
        "steps": steps,
        "targets": TARGETS,
        "results": found,
        "notes": [
            "the steps that replicas would train, trained by one process with sums in their order",
            "differences are from the run of the same seed in which no replica is absent",
        ],
    }
