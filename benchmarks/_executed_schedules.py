"""Schedules executed on processes of this machine, with stages that sleep and a slow boundary in the middle.

Shared by ``cordillera bench scaleacross --part executed`` and the tests of :mod:`cordillera.distributed.pipeline`.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from cordillera.distributed.pipeline import PipelineRunner, Recording, Throttle, recorded_timeline
from cordillera.planning.schedules import (
    Kind,
    Schedule,
    breadth_first,
    dual_pipe_v,
    gpipe,
    greedy,
    interleaved,
    one_forward_one_backward,
    warmup_for_latency,
    zero_bubble,
    zero_bubble_v,
)
from cordillera.planning.simulator import StageSeconds, Timeline, Way, simulate

MICROBATCHES = {2: 6, 4: 8}

FORWARD, BACKWARD = 0.040, 0.080  # seconds of a whole rank
BATCH, WIDTH = 16, 64
SLOW = Throttle(latency_s=0.030, bytes_per_s=BATCH * WIDTH * 8 / 0.020)


def families(ranks: int) -> list[Schedule]:
    """Ten families of schedules.

    Args:
        ranks: 2 or 4.
    """
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
    """Joined pairs one after the other, as they are executed."""
    actions = tuple(tuple(action._replace(joined=False) for action in own) for own in schedule.actions)
    return replace(schedule, actions=actions)


class Pause(torch.autograd.Function):
    """The identity, which takes its time."""

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
    """A stage that sleeps for its forward, for its input's gradient and for its weight's."""

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seconds = forward_s, input_s, weight_s

    def forward(self, x: Tensor) -> Tensor:
        forward_s, input_s, weight_s = self.seconds
        return Pause.apply(x, forward_s, input_s) + Pause.apply(self.weight, 0.0, weight_s)


def across_the_middle(ranks: int, source: int, target: int) -> Throttle | None:
    """The way between two ranks: slow if it leads from one half of them to the other."""
    return SLOW if (source < ranks // 2) != (target < ranks // 2) else None


def simulated_seconds(schedule: Schedule) -> float:
    """Of a step."""
    chunks = schedule.stages // schedule.ranks

    def way(source: int, target: int) -> Way:
        throttle = across_the_middle(schedule.ranks, source, target)
        return throttle.way(BATCH * WIDTH * 8) if throttle else Way()

    seconds = StageSeconds.equal(schedule.stages, FORWARD / chunks, BACKWARD / chunks)
    return simulate(without_marks(schedule), seconds, way).seconds


class SleepingPipeline:
    """One rank of a schedule whose stages sleep.

    Args:
        schedule: Of a family.
        group: Of as many processes.
    """

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
        """Take a step; when this rank's actions started and ended."""
        recording = self._runner.step(self._inputs, self._targets).recording
        return {"starts": torch.tensor(recording.starts), "ends": torch.tensor(recording.ends)}


def timelines(schedule: Schedule, found: Sequence[Sequence[dict[str, Tensor]]]) -> list[Timeline]:
    """The steps of :meth:`SleepingPipeline.step` as the simulator gives its own.

    Args:
        schedule: What was executed.
        found: Of each rank, its steps.
    """
    return [
        recorded_timeline(
            schedule, [Recording(r, one["starts"].numpy(), one["ends"].numpy()) for r, one in enumerate(step)]
        )
        for step in zip(*found, strict=True)
    ]


def take_turns(rank: int, folder: str, schedules: Sequence[Schedule], rounds: int) -> dict[str, Any]:
    """One process of all: a step of every schedule in turn, several rounds after one that does not count.

    Args:
        rank: Of the process.
        folder: Not used.
        schedules: Names are distinct.
        rounds: Steps of each that count.

    Returns:
        Steps by schedule.
    """
    pipelines = {schedule.name: SleepingPipeline(schedule, None) for schedule in schedules}
    for pipeline in pipelines.values():
        pipeline.step()
    found: dict[str, Any] = {name: [] for name in pipelines}
    for _ in range(rounds):
        for name, pipeline in pipelines.items():
            found[name].append(pipeline.step())
    return found


def _end_with_parent() -> None:
    """A parent that is killed cannot end its processes: they end themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _process(rank: int, size: int, folder: str, work: Callable[[int, str], dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        torch.save(work(rank, folder), f"{folder}/{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.txt").write_text(traceback.format_exc())
        raise


@dataclass
class Ended:
    """What processes left.

    Attributes:
        found: By rank, of those that ended well.
        codes: Their exit codes.
        said: What went wrong in each.
    """

    found: dict[int, dict[str, Any]]
    codes: list[int | None]
    said: str


def run_processes(size: int, folder: Path, work: Callable[[int, str], dict[str, Any]], deadline: float) -> Ended:
    """Processes that end by the deadline or are ended."""
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_process, args=(rank, size, str(folder), work), daemon=True) for rank in range(size)
    ]
    until = time.monotonic() + deadline
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
    finally:
        codes = [process.exitcode for process in processes]
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(10)
    found = {
        rank: torch.load(folder / f"{rank}.pt", weights_only=True)
        for rank in range(size)
        if (folder / f"{rank}.pt").exists()
    }
    return Ended(found, codes, "\n".join(path.read_text() for path in sorted(folder.glob("*.txt"))))
