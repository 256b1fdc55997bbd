"""Simulation of a whole training step: a pipeline schedule on its cluster, then gradients, then the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from cordillera.errors import PlanError
from cordillera.planning.language.job import PlannedJob, exposed
from cordillera.planning.language.layers import LayerSeconds
from cordillera.planning.network.contention import Contention
from cordillera.planning.network.mesh import Group
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

_SHORT = 0.02  # share of a microbatch's slot; shorter messages are not hidden by running further ahead


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step.

    Attributes:
        timeline: Timeline of the pipeline.
        parts: Seconds by cause on the rank that ends last; their sum is the time of the step.
        memory: Bytes on a device of each pipeline rank, by cause.
    """

    timeline: Timeline
    parts: dict[str, float]
    memory: tuple[dict[str, float], ...]

    @property
    def seconds(self) -> float:
        """Time of the step in seconds."""
        return sum(self.parts.values())

    @property
    def memory_bytes(self) -> float:
        """Bytes on the fullest device."""
        return max(sum(rank.values()) for rank in self.memory)


def stage_seconds(job: PlannedJob, schedule: Schedule, slow: Mapping[int, float] | None = None) -> StageSeconds:
    """Return a job's stages in the form of the simulator; recomputation comes before the input gradient.

    Messages that kernels copy take processors: an action that receives or sends one takes longer by the computation
    that those processors miss while it is in transit.

    Args:
        job: Job with as many stages as the schedule.
        schedule: Schedule, which assigns stages to ranks.
        slow: Factors by which pipeline ranks compute longer; None for none. Collectives keep their time, and are part
            of all actions of a stage alike.

    Raises:
        PlanError: If the numbers of stages differ.
    """
    if len(job.stages) != schedule.stages:
        raise PlanError(f"{len(job.stages)} stages", where=f"schedule {schedule.name}", remedy=f"{schedule.stages}")
    p = job.layout.pipeline
    lost = [0.0] * schedule.stages
    for stage, (a, b) in enumerate(pairwise(schedule.rank_of)):
        if a != b:
            boundary = a if b == (a + 1) % p else b
            copying = job.copied(job.mesh.boundary(boundary)) * job.message_seconds(boundary)
            lost[stage] += copying
            lost[stage + 1] += copying
    ranks = [job.on(rank) for rank in range(p)]
    held = [ranks[rank][stage] for stage, rank in enumerate(schedule.rank_of)]
    by = [1.0] * schedule.stages
    for number, one in enumerate(held if slow else ()):
        factor = (slow or {}).get(schedule.rank_of[number], 1.0)
        if factor != 1.0 and one.total > 0:
            by[number] = factor + (1.0 - factor) * one.communication / one.total
    stages = list(zip(held, by, lost, strict=True))
    seconds = StageSeconds(
        [stage.forward * times + extra for stage, times, extra in stages],
        [(stage.again + stage.input_gradient) * times + extra for stage, times, extra in stages],
        [stage.weight_gradient * times for stage, times, _ in stages],
    )
    return replace(seconds, contention=_contention(job, seconds))


def _contention(job: PlannedJob, seconds: StageSeconds) -> dict[tuple[Kind, int], Contention]:
    """Return how the collectives inside a job's actions and its reduction of gradients slow each other."""
    found: dict[tuple[Kind, int], Contention] = {}
    if not job.layout.overlap_gradients or job.layout.data == 1:
        return found
    rings = Group(job.layout.data, job.mesh.stride("data"))
    for stage, layers in enumerate(job.stage_layers):
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.BACKWARD):
            one = job.contention(seconds.of_kind(kind, stage), layers, kind is not Kind.FORWARD, rings)
            if any(one):
                found[kind, stage] = one
    return found


def ways(job: PlannedJob) -> dict[tuple[int, int], Way]:
    """Return the ways between neighbouring pipeline ranks, and the last and the first, in both directions."""
    p, found = job.layout.pipeline, {}
    for rank in range(p if p > 1 else 0):
        other = (rank + 1) % p
        meeting = job.meeting(rank) if job.layout.overlap_gradients else (1.0, 0.0)
        one = Way(job.mesh.boundary(rank).latency, job.message_seconds(rank), None, *meeting)
        found[rank, other] = one
        found.setdefault((other, rank), one)
    return found


def held(job: PlannedJob, schedule: Schedule) -> tuple[dict[str, float], ...]:
    """Return the bytes on a device of each rank of ``job``, by cause; ``schedule`` sets the live microbatches."""
    return tuple(
        job.held(schedule.stages_of(rank), schedule.most_kept(rank, job.kept)) for rank in range(schedule.ranks)
    )


def last_backwards(schedule: Schedule, rank: int) -> dict[int, int]:
    """Return the position of the last backward of each stage of a ``rank`` of ``schedule``, in ascending order."""
    lasts = {a.stage: i for i, a in enumerate(schedule.actions[rank]) if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}
    return dict(sorted(lasts.items(), key=lambda item: item[1]))


def reductions(job: PlannedJob, schedule: Schedule, rank: int) -> dict[int, float]:
    """Return the seconds of the reductions of gradients of a ``rank``, by the position of the backward before each.

    There is one for each stage, after its last backward under ``schedule``. If the layout of ``job`` shards gradients,
    they are also scattered whenever the rank's next backward is of another stage, or after each with one stage.
    """
    lasts = last_backwards(schedule, rank)
    found = {i: job.reduce([stage]) for stage, i in lasts.items()}
    if job.layout.shard_gradients:
        backwards = [
            (i, a.stage) for i, a in enumerate(schedule.actions[rank]) if a.kind in (Kind.BACKWARD, Kind.WEIGHT)
        ]
        scatter = {stage: job.scatter([stage]) for stage in lasts}
        for (i, stage), (_, following) in pairwise(backwards):
            if i not in found and (stage != following or len(lasts) == 1):
                found[i] = scatter[stage]
    return dict(sorted(found.items()))


def reduced(
    job: PlannedJob,
    schedule: Schedule,
    rank: int,
    times: Callable[[int], tuple[Any, Any]],
    delayed: Mapping[tuple[int, int], float] | None = None,
) -> Any:
    """Return when a ``rank`` of ``job`` has reduced its gradients under ``schedule``; an array if times are arrays.

    Reduction begins when the last backward is done. If the layout overlaps gradients, it runs layer by layer during the
    backward, one layer after the other and beside the remaining computation.

    Args:
        job: Workload and its layout.
        schedule: Schedule of the pipeline.
        rank: Rank in the pipeline.
        times: Function that returns start and end of the rank's action at a position, seconds.
        delayed: Seconds by which messages delay that, by rank and position of the action; None for none.
    """
    delayed = delayed or {}
    last, clock, begun = times(len(schedule.actions[rank]) - 1)[1], 0.0, math.inf
    for i, seconds in reductions(job, schedule, rank).items():
        layers = job.stage_layers[schedule.actions[rank][i].stage]
        if job.layout.overlap_gradients:  # layer by layer as they finish; the last layer cannot be hidden
            start, end = times(i)
            begun = np.minimum(begun, start)
            clock = np.maximum(clock, start) + seconds + delayed.get((rank, i), 0.0)
            clock = np.maximum(clock, end + seconds / max(layers, 1))
        else:
            clock = np.maximum(clock, last) + seconds
    # copying slows the last backward
    last = last + job.copied(job.mesh.ring("data")) * np.maximum(0.0, np.minimum(last, clock) - begun)
    first, end_rank = schedule.rank_of[0], schedule.rank_of[-1]
    tied = job.tied_seconds if first != end_rank and rank in (first, end_rank) else 0.0
    return np.maximum(last, clock) + tied


def optimizer_seconds(job: PlannedJob, schedule: Schedule, rank: int) -> float:
    """Return the seconds of the optimizer of ``job`` for the stages that ``schedule`` assigns to a ``rank``."""
    return job.optimizer(rank, schedule.stages_of(rank))


def simulate_step(job: PlannedJob, schedule: Schedule, slow: Mapping[int, float] | None = None) -> SimulatedStep:
    """Simulate a step of ``job``: the pipeline by ``schedule``, then :func:`reduced`, then the optimizer.

    The step ends with the last rank. ``slow`` gives factors by which pipeline ranks compute longer because of a slow
    device; None for none. The copy with the slow device is simulated, because all others wait for it to reduce their
    gradients.
    """
    slow = slow or {}
    ranks = range(schedule.ranks)
    beside = None
    if job.layout.overlap_gradients and job.layout.data > 1:
        beside = [reductions(job, schedule, rank) for rank in ranks]
    timeline = simulate(schedule, stage_seconds(job, schedule, slow), ways(job), beside)
    memory = held(job, schedule)

    def of(rank: int) -> Callable[[int], tuple[float, float]]:
        return lambda i: (float(timeline.starts[rank][i]), float(timeline.ends[rank][i]))

    finish = [float(reduced(job, schedule, rank, of(rank), delayed=timeline.delayed)) for rank in ranks]
    optimizer = [slow.get(rank, 1.0) * optimizer_seconds(job, schedule, rank) for rank in ranks]
    at = int(np.argmax([a + b for a, b in zip(finish, optimizer, strict=True)]))
    own = LayerSeconds()
    for stage in schedule.stages_of(at):
        own = own.plus(job.on(at)[stage])
    end, waiting, busy = float(timeline.ends[at][-1]), float(timeline.waiting[at]), float(timeline.busy[at])
    parts = {
        "compute": max(0.0, busy - job.microbatches * own.communication - float(timeline.slowed[at])),
        **exposed(own, job.microbatches),
        "shared links": float(timeline.slowed[at]),
        "pipeline messages": waiting,
        "pipeline bubble": end - busy - waiting,
        "gradient reduction": finish[at] - end,
        "optimizer": optimizer[at],
    }
    return SimulatedStep(timeline, parts, memory)


def families(job: PlannedJob) -> dict[str, Callable[[], Schedule]]:
    """Return the schedules that a job's layout can run, by name; they depend on its number of chunks."""
    p, m, v = job.layout.pipeline, job.microbatches, job.layout.chunks
    if p == 1:
        return {"1f1b": lambda: one_forward_one_backward(1, m)} if v == 1 else {}
    found: dict[str, Callable[[], Schedule]] = {}
    if v == 1:
        found["gpipe"] = lambda: gpipe(p, m)
        found["1f1b"] = lambda: one_forward_one_backward(p, m)
        found["zero bubble H1"] = lambda: zero_bubble(p, m)
        found["zero bubble H2"] = lambda: zero_bubble(p, m, 2)
        slots = [stage.total for stage in job.stages]
        forward = max(stage.forward for stage in job.stages)
        lag = [job.mesh.boundary(i).latency + job.message_seconds(i) for i in range(p - 1)]
        slow = [one if one > _SHORT * max(slots) else 0.0 for one in lag]  # little to hide otherwise
        extra = warmup_for_latency(slow, forward, max(slots) - forward)
        for part in (1, 2, 4) if any(extra) else ():  # fewer if memory is too small for all
            more = [min(-(-w // part), m) for w in extra]
            found[f"1f1b ahead by {more[0]}"] = partial(one_forward_one_backward, p, m, more)
            found[f"zero bubble ahead by {more[0]}"] = partial(zero_bubble, p, m, 1, more)
        return found
    found["interleaved"] = lambda: interleaved(p, m, v)
    group = 2 * p
    while group < m:
        found[f"interleaved by {group}"] = partial(interleaved, p, m, v, group)
        group *= 2
    found["breadth first"] = lambda: breadth_first(p, m, v)
    if v == 2:
        found["ZBV"] = lambda: zero_bubble_v(p, m)
        if m >= 2 * p:
            found["DualPipeV"] = lambda: dual_pipe_v(p, m)
    return found
