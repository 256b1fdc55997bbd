"""Schedules made one action at a time, with memory limits."""

from __future__ import annotations

from collections.abc import Sequence

from cordillera.errors import PlanError
from cordillera.planning.pipeline.schedules import Action, B, F, I, Kind, Schedule, W


# One loop over one state (what is ready, free and held): its parts would pass nearly all of it to each other.
def greedy(
    rank_of: Sequence[int],
    microbatches: int,
    seconds: dict[Kind, float],
    *,
    latencies: Sequence[float] | None = None,
    limits: Sequence[int] | None = None,
    name: str = "greedy",
) -> Schedule:
    """Build a schedule greedily: a free rank takes the most urgent action that is ready.

    Gradients of inputs come first, because other ranks wait for them; then forwards, as long as there is room for their
    activations and the furthest chunk first; then gradients of weights.

    Args:
        rank_of: Rank that holds each stage.
        microbatches: ``m``, number of microbatches.
        seconds: Seconds of the forward (``F``) and the backward of a stage: ``B`` alone, or ``I`` and ``W`` to split
            it.
        latencies: One-way latency between each stage and the next, seconds; None for none.
        limits: Largest number of forwards whose activations each rank may hold at a time; None for no limit.
        name: Name of the schedule.

    Raises:
        PlanError: If the limits block all actions.
    """
    stages, ranks = len(rank_of), max(rank_of) + 1
    split = I in seconds
    back = I if split else B
    delay = list(latencies) if latencies is not None else [0.0] * (stages - 1)
    room = list(limits) if limits is not None else [microbatches * stages] * ranks
    # time at which an action's inputs arrive
    ready: dict[tuple[Kind, int, int], float] = {(F, 0, i): 0.0 for i in range(microbatches)}
    free = [0.0] * ranks
    held = [0] * ranks
    plans: list[list[Action]] = [[] for _ in range(ranks)]
    waiting: list[set[tuple[Kind, int, int]]] = [set() for _ in range(ranks)]
    waiting[rank_of[0]].update(ready)
    order = {back: 0, F: 1, W: 2}
    left = microbatches * stages * (3 if split else 2)

    def urgency(item: tuple[Kind, int, int]) -> tuple[int, int, int]:
        kind, stage, microbatch = item
        return order[kind], -stage if kind is F else stage, microbatch

    while left:
        best: tuple[float, int, tuple[Kind, int, int]] | None = None
        for rank in range(ranks):
            open_ = [item for item in waiting[rank] if item[0] is not F or held[rank] < room[rank]]
            if not open_:
                continue
            soonest = max(free[rank], min(ready[item] for item in open_))
            item = min((item for item in open_ if ready[item] <= soonest), key=urgency)
            if best is None or (soonest, rank) < best[:2]:
                best = soonest, rank, item
        if best is None:
            raise PlanError(
                f"room for {room} microbatches leaves nothing that can be done",
                where=f"schedule {name}",
                remedy="rank r needs room for at least one microbatch of each of its chunks",
            )
        start, rank, item = best
        kind, stage, microbatch = item
        end = free[rank] = start + seconds[kind]
        waiting[rank].discard(item)
        plans[rank].append(Action(*item))
        left -= 1
        made: list[tuple[tuple[Kind, int, int], float]] = []
        if kind is F:
            held[rank] += 1
            if stage + 1 < stages:
                made.append(((F, stage + 1, microbatch), end + delay[stage]))
            else:
                made.append(((back, stage, microbatch), end))
        elif kind is W:
            held[rank] -= 1
        else:
            if stage:
                made.append(((back, stage - 1, microbatch), end + delay[stage - 1]))
            if split:
                made.append(((W, stage, microbatch), end))
            else:
                held[rank] -= 1
        for key, arrival in made:
            ready[key] = arrival
            waiting[rank_of[key[1]]].add(key)
    return Schedule(name, microbatches, tuple(rank_of), tuple(map(tuple, plans)))
