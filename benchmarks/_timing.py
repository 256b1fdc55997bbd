"""Times of several contenders, taken in turn, so that drift of the machine affects all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """A median with the quartiles around it.

    Attributes:
        median: Median.
        low: First quartile.
        high: Third quartile.
        count: Number of values.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def to_json(self) -> dict[str, float]:
        """Return a dictionary for JSON."""
        return {"median": self.median, "low": self.low, "high": self.high, "count": self.count}


@dataclass(frozen=True)
class Timing:
    """Seconds of a contender for one call, one value per round; rounds of two contenders are paired by position."""

    name: str
    seconds: list[float]

    @property
    def spread(self) -> Spread:
        """Median and quartiles of the seconds."""
        return Spread.of(self.seconds)

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {"name": self.name, "seconds": self.spread.to_json(), "rounds": self.seconds}


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    warmup: int = 1,
    settle_s: float = 0.0,
) -> dict[str, Timing]:
    """Time contenders in rounds: each round runs every one of them, and starts with the next one in turn.

    Args:
        contenders: Functions to call, by name.
        rounds: Number of values per contender.
        calls: Number of calls whose mean is one value.
        warmup: Number of calls of every contender that are not counted.
        settle_s: Seconds of uncounted calls before every value. The threads of the previous contender may keep looking
            for work for some milliseconds, which would slow a short call that comes next.

    Returns:
        One timing per contender, in the order given.
    """
    for contender in contenders.values():
        for _ in range(warmup):
            contender()
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    enabled = gc.isenabled()
    try:
        for i in range(rounds):
            gc.collect()
            gc.disable()
            for name in names[i % len(names) :] + names[: i % len(names)]:
                contender = contenders[name]
                begin = time.perf_counter()
                while settle_s and time.perf_counter() - begin < settle_s:
                    contender()
                begin = time.perf_counter()
                for _ in range(calls):
                    contender()
                seconds[name].append((time.perf_counter() - begin) / calls)
            gc.enable()
    finally:
        if enabled:
            gc.enable()
        else:
            gc.disable()
    return {name: Timing(name, values) for name, values in seconds.items()}


def times_faster(ours: Timing, peer: Timing) -> Spread:
    """Return median and quartiles of the ratio of the peer's time to ours; above one, ours is faster."""
    return Spread.of([theirs / mine for mine, theirs in zip(ours.seconds, peer.seconds, strict=True)])
