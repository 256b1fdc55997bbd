"""Schedules executed on processes of this machine, with stages that sleep and a slow boundary in the middle.

Shared by ``cordillera bench scaleacross --part executed`` and the tests of
:mod:`cordillera.distributed.pipeline.runner`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cordillera.distributed.pipeline.mail import Throttle
from cordillera.distributed.pipeline.runner import PipelineRunner, Recording
from cordillera.errors import PlanError
from cordillera.planning.pipeline.greedy import greedy
from cordillera.planning.pipeline.schedules import (
    Kind,
    Schedule,
    breadth_first,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    warmup_for_latency,
    zero_bubble,
    zero_bubble_v,
)
from cordillera.planning.pipeline.simulator import StageSeconds, Timeline, Way, simulate

MICROBATCHES = {2: 6, 4: 8}

FORWARD, BACKWARD = 0.040, 0.080  # seconds of all stages of a rank
BATCH, WIDTH = 16, 64
SLOW = Throttle(latency_s=0.030, bytes_per_s=BATCH * WIDTH * 8 / 0.020)


def families(ranks: int) -> list[Schedule]:
    """Return ten families of schedules for 2 or 4 ranks."""
    m = MICROBATCHES[ranks]
    latencies = [SLOW.latency_s if i == ranks // 2 - 1 else 0.0 for i in range(ranks - 1)]
    costs = {Kind.FORWARD: FORWARD, Kind.INPUT: BACKWARD / 2, Kind.WEIGHT: BACKWARD / 2}
    return [
        gpipe(ranks, m),
        one_forward_one_backward(ranks, m),
        one_forward_one_backward(ranks, m, warmup_for_latency(latencies, FORWARD, BACKWARD)),
        interleaved(ranks, m, 2),
        breadth_first(ranks, m, 2),
        zero_bubble(ranks, m, 1),
        zero_bubble(ranks, m, 2),
        zero_bubble_v(ranks, m),
        dual_pipe_v(ranks, m),
        greedy(range(ranks), m, costs, latencies=latencies),
    ]


def without_marks(schedule: Schedule) -> Schedule:
    """Return a schedule with joined pairs one after the other, as they are executed."""
    actions = tuple(tuple(action._replace(joined=False) for action in own) for own in schedule.actions)
    return replace(schedule, actions=actions)


class Pause(torch.autograd.Function):
    """The identity, which sleeps in forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Sleeper(nn.Module):
    """A stage that sleeps in its forward, its input gradient and its weight gradient."""

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seconds = forward_s, input_s, weight_s

    def forward(self, x: Tensor) -> Tensor:
        forward_s, input_s, weight_s = self.seconds
        return Pause.apply(x, forward_s, input_s) + Pause.apply(self.weight, 0.0, weight_s)


def across_the_middle(ranks: int, source: int, target: int) -> Throttle | None:
    """Return the throttle between two ranks if one is in each half of them; else None."""
    return SLOW if (source < ranks // 2) != (target < ranks // 2) else None


def simulated_seconds(schedule: Schedule) -> float:
    """Return the simulated seconds of a step."""
    chunks = schedule.stages // schedule.ranks

    def way(source: int, target: int) -> Way:
        throttle = across_the_middle(schedule.ranks, source, target)
        return throttle.way(BATCH * WIDTH * 8) if throttle else Way()

    seconds = StageSeconds.equal(schedule.stages, FORWARD / chunks, BACKWARD / chunks)
    return simulate(without_marks(schedule), seconds, way).seconds


class SleepingPipeline:
    """One rank of a schedule whose stages sleep; the group has as many processes as the schedule has ranks."""

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup | None) -> None:
        chunks = schedule.stages // schedule.ranks
        seconds = FORWARD / chunks, BACKWARD / 2 / chunks, BACKWARD / 2 / chunks
        self._runner = PipelineRunner(
            schedule,
            {stage: Sleeper(*seconds) for stage in schedule.stages_of(dist.get_rank(group))},
            lambda output, target: output.mean() - target,
            group,
            link=partial(across_the_middle, schedule.ranks),
            deadline_s=30,
        )
        one = torch.zeros((BATCH, WIDTH), dtype=torch.float64)
        self._inputs = [one.clone().requires_grad_() for _ in range(schedule.microbatches)]
        self._targets = [torch.zeros((), dtype=torch.float64)] * schedule.microbatches

    def step(self) -> dict[str, Tensor]:
        """Take a step; return when this rank's actions started and ended."""
        recording = self._runner.step(self._inputs, self._targets).recording
        return {"starts": torch.tensor(recording.starts), "ends": torch.tensor(recording.ends)}


def recorded_timeline(schedule: Schedule, recordings: Sequence[Recording]) -> Timeline:
    """Combine all ranks' recordings of a step into a timeline like the simulator's.

    Messages are not recorded, so the timeline has none, and ``waiting``, which is derived from them, is NaN.

    Args:
        schedule: Schedule that was executed.
        recordings: One recording for each rank, in any order.

    Raises:
        PlanError: If the recordings do not match the schedule's ranks and actions.
    """
    by_rank = {recording.rank: recording for recording in recordings}
    for rank, actions in enumerate(schedule.actions):
        if rank not in by_rank or len(by_rank[rank].starts) != len(actions):
            raise PlanError(f"no recording of the {len(actions)} actions of rank {rank}", where="recordings")
    ordered = [by_rank[rank] for rank in range(schedule.ranks)]
    unknown = np.full(schedule.ranks, math.nan)
    return Timeline(schedule, [one.starts for one in ordered], [one.ends for one in ordered], waiting=unknown)


def timelines(schedule: Schedule, found: Sequence[Sequence[dict[str, Tensor]]]) -> list[Timeline]:
    """Return the steps of each rank from :meth:`SleepingPipeline.step` in the form of the simulator."""
    return [
        recorded_timeline(
            schedule, [Recording(r, one["starts"].numpy(), one["ends"].numpy()) for r, one in enumerate(step)]
        )
        for step in zip(*found, strict=True)
    ]


def take_turns(rank: int, folder: str, schedules: Sequence[Schedule], rounds: int) -> dict[str, Any]:
    """Take a step of every schedule in turn in one process; return ``rounds`` steps by name after one of warm-up."""
    pipelines = {schedule.name: SleepingPipeline(schedule, None) for schedule in schedules}
    for pipeline in pipelines.values():
        pipeline.step()
    found: dict[str, Any] = {name: [] for name in pipelines}
    for _ in range(rounds):
        for name, pipeline in pipelines.items():
            found[name].append(pipeline.step())
    return found
