"""Latency of a rank's causal attention by the lengths of its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Function from the lengths of queries and keys of all calls of a rank, int64 [calls] each, to seconds.
Latency = Callable[[NDArray[np.int64], NDArray[np.int64]], float]


@dataclass(frozen=True)
class AnalyticLatency:
    """Latency at a constant rate of pairs, for a kernel that computes whole tiles of queries.

    Attributes:
        tile: Number of queries that a kernel computes at once; 128 in FlashAttention's forward, 1 to neglect the
            padding of short calls.
        seconds_per_pair: Seconds for a pair of a query and a key. In comparisons, only its ratio to
            ``seconds_per_call`` matters.
        seconds_per_call: Seconds for a call in addition to its pairs.
    """

    tile: int = 128
    seconds_per_pair: float = 1.0
    seconds_per_call: float = 0.0

    def __call__(self, queries: NDArray[np.int64], keys: NDArray[np.int64]) -> float:
        pairs = _padded_pairs(queries, keys, self.tile).sum()
        return float(pairs * self.seconds_per_pair + len(queries) * self.seconds_per_call)


def _padded_pairs(queries: NDArray[np.int64], keys: NDArray[np.int64], tile: int) -> NDArray[np.float64]:
    """Return the pairs of each call, with queries padded to whole tiles that see the average number of keys."""
    return -(-queries // tile) * tile * (keys - (queries - 1) / 2)
