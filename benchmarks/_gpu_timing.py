"""Times and peak memory of several contenders on a GPU, taken in turn."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping

import torch
from _timing import Timing

LEAST_S = 0.02  # a value is the mean of calls that take this long together
MOST_CALLS = 200


def without_gpu() -> str | None:
    """Return why nothing can be measured here, or None."""
    return None if torch.cuda.is_available() else "needs a CUDA device"


def seconds_of(contender: Callable[[], object], calls: int) -> float:
    """Return the seconds of one call between two events of the GPU, as the mean of ``calls``."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        contender()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def interleave_on_gpu(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2, least_s: float = LEAST_S
) -> dict[str, Timing]:
    """Time contenders in rounds: each round runs every one of them, and starts with the next one in turn.

    Time is what passes on the GPU, so work of the CPU counts where the GPU waits for it.

    Args:
        contenders: Functions to call, by name.
        rounds: Number of values for each contender.
        warmup: Number of calls of every contender that are not counted.
        least_s: Least seconds of the calls whose mean is one value.

    Returns:
        One timing for each contender, in the order given.
    """
    calls = {}
    for name, contender in contenders.items():
        seconds_of(contender, warmup)
        calls[name] = min(MOST_CALLS, max(1, math.ceil(least_s / max(seconds_of(contender, 2), 1e-9))))
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                seconds[name].append(seconds_of(contenders[name], calls[name]))
    finally:
        if enabled:
            gc.enable()
    return {name: Timing(name, values) for name, values in seconds.items()}


def peak_bytes(contender: Callable[[], object]) -> int:
    """Return the most bytes that a call has allocated at once, besides those that were allocated before."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = contender()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del found
    return peak - before
