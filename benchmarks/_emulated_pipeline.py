"""A pipeline of two stages and two context ranks that sleeps instead of computing, with real messages.

On two cores, four processes cannot show what waiting for another rank costs, because a waiting rank leaves its core to
the others. So every rank sleeps for the predicted time of its share of a layer, and passes keys and values to its
context rank and activations to the next stage as in a real pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _processes import slowest_seconds
from torch import Tensor, nn

from cordillera.distributed.pipeline.runner import PipelineRunner
from cordillera.planning.pipeline.schedules import one_forward_one_backward
from cordillera.planning.pipeline.simulator import StageSeconds, simulate

STAGES, CONTEXT_RANKS, LAYERS = 2, 2, 2  # LAYERS per stage
BACKWARD = 2.0  # multiple of the forward
_WIDTH = 16
_DEADLINE_S = 560.0

Seconds = list[list[float]]
"""Seconds of a stage's forward, by microbatch and context rank."""


class _Layer(torch.autograd.Function):
    """Gathers the parts of the context ranks and sleeps; its backward scatters gradients and sleeps."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, seconds: float) -> Tensor:
        ctx.group, ctx.seconds = group, seconds
        _gather(tensor, group)
        time.sleep(seconds)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(BACKWARD * ctx.seconds)
        _gather(gradient, ctx.group)
        return gradient, None, None


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> None:
    tensor = tensor.detach().contiguous()
    dist.all_gather([torch.empty_like(tensor) for _ in range(dist.get_world_size(group))], tensor, group)


class _Stage(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.group = group

    def forward(self, x: Tensor, seconds: float) -> Tensor:
        x = x + self.weight
        for _ in range(LAYERS):
            x = _Layer.apply(x, self.group, seconds / LAYERS)
        return x


def _run(rank: int, folder: str, plans: dict[str, list[Seconds]], rounds: int) -> dict[str, Any]:
    """Run iterations of all plans in turn in one of the processes; return the seconds of each."""
    stage, context = divmod(rank, CONTEXT_RANKS)
    contexts = [dist.new_group([s * CONTEXT_RANKS + c for c in range(CONTEXT_RANKS)]) for s in range(STAGES)]
    pipelines = [dist.new_group([s * CONTEXT_RANKS + c for s in range(STAGES)]) for c in range(CONTEXT_RANKS)]
    module = _Stage(contexts[stage])
    runners: dict[int, PipelineRunner] = {}
    targets = [torch.zeros(())] * max(len(one) for plan in plans.values() for one in plan)

    def step(seconds: Seconds) -> float:
        count = len(seconds)
        if count not in runners:
            schedule = one_forward_one_backward(STAGES, count)
            runners[count] = PipelineRunner(
                schedule, {stage: module}, lambda output, target: output.mean() - target, pipelines[context],
                deadline_s=60,
            )  # fmt: skip
        inputs = [torch.zeros(8, _WIDTH) for _ in range(count)]
        dist.barrier()
        began = time.perf_counter()
        runners[count].step(inputs, targets[:count], [(own[context],) for own in seconds])
        return time.perf_counter() - began

    step(next(iter(plans.values()))[0])
    found: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds):
        spent = dict.fromkeys(plans, 0.0)
        for number in range(max(map(len, plans.values()))):
            for name, iterations in plans.items():
                if number < len(iterations):
                    spent[name] += step(iterations[number])
        for name, seconds in spent.items():
            found[name].append(seconds)
    return found


def executed_seconds(plans: dict[str, list[Seconds]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each plan in each round, of the slowest process."""
    return slowest_seconds(STAGES * CONTEXT_RANKS, partial(_run, plans=plans, rounds=rounds), _DEADLINE_S)


def simulated_seconds(iterations: Sequence[Seconds]) -> float:
    """Return the simulated seconds of the same pipeline, whose layers wait for the slowest context rank."""
    one = StageSeconds.equal(STAGES, 1.0, BACKWARD)
    total = 0.0
    for seconds in iterations:
        slowest = [max(own) for own in seconds]
        stage = StageSeconds(one.forward, one.input_gradient, one.weight_gradient, microbatches=slowest)
        total += simulate(one_forward_one_backward(STAGES, len(seconds)), stage).seconds
    return total
