"""Collective plans run on arrays: what the executions of plans are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cordillera.planning.network.collective_plans import CollectivePlan


def buffer_size(plan: CollectivePlan) -> int:
    """Size of the largest buffer of any rank at the start or the end, in units of the chunk sizes."""
    buffers = (held(rank) for rank in range(plan.ranks) for held in (plan.held_at_start, plan.held_at_end))
    return max(sum(plan.chunks[chunk].size for chunk in buffer) for buffer in buffers)


def execute(plan: CollectivePlan, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Run a verified plan on arrays, as its ranks would; return the chunks of each rank at the end, concatenated.

    The inputs are the chunks of each rank at the start, concatenated: the whole vector for an all-reduce or a
    reduce-scatter, the rank's share for an all-gather, its blocks in order of targets for an all-to-all, and the root's
    message for a broadcast. A vector is cut in proportion to the sizes of the chunks.
    """
    state: list[dict[int, NDArray[Any]]] = []
    for rank, values in enumerate(inputs):
        held = plan.held_at_start(rank)
        ends = np.cumsum([plan.chunks[chunk].size for chunk in held], dtype=object)
        cuts = [int(end * len(values) // ends[-1]) for end in ends[:-1]]
        state.append(dict(zip(held, np.split(values, cuts) if held else [], strict=True)))
    for step in plan.steps:
        arriving = [(sent, [state[sent.source][chunk] for chunk in sent.chunks]) for sent in step]
        for sent, carried in arriving:
            own = state[sent.target]
            for chunk, value in zip(sent.chunks, carried, strict=True):
                own[chunk] = own[chunk] + value if sent.reduces else value
    nothing = np.empty(0, np.asarray(inputs[0]).dtype)
    return [np.concatenate([nothing, *(state[r][c] for c in plan.held_at_end(r))]) for r in range(plan.ranks)]
