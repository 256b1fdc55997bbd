"""Times of several contenders, taken in turn, so that a machine that drifts is unjust to none of them."""

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
        median: The middle value.
        low: The first quartile.
        high: The third quartile.
        count: Values that it is made of.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def to_json(self) -> dict[str, float]:
        """As a dictionary."""
        return {"median": self.median, "low": self.low, "high": self.high, "count": self.count}


@dataclass(frozen=True)
class Timing:
    """Seconds that a contender took for one call, one value a round.

    Attributes:
        name: The contender.
        seconds: Its rounds, in order; round ``i`` of two contenders ran one after the other.
    """

    name: str
    seconds: list[float]

    @property
    def spread(self) -> Spread:
        """Median and quartiles of the seconds."""
        return Spread.of(self.seconds)

    def to_json(self) -> dict[str, Any]:
        """As a dictionary."""
        return {"name": self.name, "seconds": self.spread.to_json(), "rounds": self.seconds}


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    warmup: int = 1,
    settle_s: float = 0.0,
) -> dict[str, Timing]:
    """Time contenders in rounds: each round runs every one of them, and begins with the next one in turn.

    Args:
        contenders: What to call, by name.
        rounds: Values a contender.
        calls: Calls that one value is the mean of. The first contender's share of a round is thus ``calls`` calls.
        warmup: Calls of every contender that are not counted.
        settle_s: Seconds of calls, not counted, before every value: the threads of the contender before may go on
            looking for work for some milliseconds, which a short call that comes next would pay for.

    Returns:
        A timing a contender, in the order given.
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
    """How many times as fast ``ours`` is as ``peer``: the ratio of their times, round by round.

    Returns:
        Median and quartiles over the rounds; above one, ours is faster.
    """
    return Spread.of([theirs / mine for mine, theirs in zip(ours.seconds, peer.seconds, strict=True)])
