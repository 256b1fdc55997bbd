"""A pipeline of two processes that trains a small Llama on documents packed in several ways.

Lengths are those of the published stream, divided so that a CPU can attend to them. The model is narrow, so that
attention costs as much as everything else at about the same divided length as in a large model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from _processes import slowest_seconds
from _timing import Spread

from cordillera.data.language.batches import PackedTokens
from cordillera.data.packing.work import DocumentWork, Sample
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.models.language.llama import LlamaConfig
from cordillera.planning.pipeline.schedules import one_forward_one_backward
from cordillera.planning.pipeline.simulator import StageSeconds, simulate
from cordillera.training.language.engine import LanguageConfig, LanguageEngine

MODEL = LlamaConfig(layers=8, hidden=64, heads=4, kv_heads=2, ffn=128, vocabulary=512, context=8192, tied=False)
STAGES = 2
_DEADLINE_S = 500.0

Plan = list[list[list[int]]]
"""Lengths of the documents of each microbatch of each iteration."""


def _packed(lengths: Sequence[int]) -> PackedTokens:
    tokens = torch.arange(sum(lengths)) * 7919 % MODEL.vocabulary
    return PackedTokens(tokens, torch.tensor([0, *lengths]).cumsum(0))


def measured_work(tokens: int, rounds: int = 3) -> DocumentWork:
    """Fit the seconds of a document in one process with one thread to microbatches of about ``tokens`` tokens."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        mesh = ProcessMesh(ParallelConfig())
        engine = LanguageEngine(LanguageConfig(), MODEL, mesh)
        cases = [[tokens // parts] * parts for parts in (1, 2, 4, 16, 64)] + [[tokens // 2], [tokens // 8] * 4]
        samples = []
        for lengths in cases:
            seconds = []
            for _ in range(rounds + 1):
                began = time.perf_counter()
                engine.backward([_packed(lengths)])
                seconds.append(time.perf_counter() - began)
            samples.append(Sample.of(lengths, min(seconds[1:])))
        return DocumentWork.fit(samples, "the benchmark's Llama, one thread", ridge=1e-4)
    finally:
        torch.set_num_threads(threads)
        torch.distributed.destroy_process_group()


def _train(rank: int, folder: str, plans: dict[str, Plan], rounds: int) -> dict[str, Any]:
    """Run one of the processes: a round is every iteration of every plan, plans in turn."""
    engine = LanguageEngine(LanguageConfig(), MODEL, ProcessMesh(ParallelConfig(pipeline=STAGES)))
    ready = {name: [[_packed(one) for one in iteration if one] for iteration in plan] for name, plan in plans.items()}
    found: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(rounds + 1):
        spent = dict.fromkeys(plans, 0.0)
        for number in range(max(map(len, ready.values()))):
            for name, iterations in ready.items():
                if number < len(iterations):
                    began = time.perf_counter()
                    engine.step(iterations[number], rate=0.0)
                    spent[name] += time.perf_counter() - began
        for name, seconds in spent.items() if turn else ():  # the first round compiles and warms up
            found[name].append(seconds)
    return found


def executed_seconds(plans: dict[str, Plan], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each plan in each round after the warm-up, of the slower process."""
    return slowest_seconds(STAGES, partial(_train, plans=plans, rounds=rounds), _DEADLINE_S)


def simulated_seconds(plan: Plan, work: DocumentWork) -> float:
    """Return the seconds of a plan on the same pipeline, by predicted work in seconds of the whole model."""
    total = 0.0
    one = StageSeconds.equal(STAGES, 1 / 3 / STAGES, 2 / 3 / STAGES)
    for iteration in plan:
        microbatches = [work.of(lengths) for lengths in iteration if lengths]
        seconds = StageSeconds(one.forward, one.input_gradient, one.weight_gradient, microbatches=microbatches)
        total += simulate(one_forward_one_backward(STAGES, len(microbatches)), seconds).seconds
    return total


def times_faster(
    ours: Plan, theirs: Plan, seconds: list[float], their_seconds: list[float], work: DocumentWork
) -> Spread:
    """Return the ratio of two plans in work per second, by round, because their iterations hold different documents."""
    own, other = work_of(ours, work), work_of(theirs, work)
    return Spread.of([own / a / (other / b) for a, b in zip(seconds, their_seconds, strict=True)])


def work_of(plan: Plan, work: DocumentWork) -> float:
    """Return the work of all documents of a plan."""
    return sum(work.of(lengths) for iteration in plan for lengths in iteration)
