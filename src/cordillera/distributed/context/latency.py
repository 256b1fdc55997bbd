"""Latency of a rank's causal attention by the lengths of its calls: analytic, or from a table of measured rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cordillera.errors import DataError
from cordillera.files import read_sealed
from cordillera.toml_files import explain, known_keys

# Function from the lengths of queries and keys of all calls of a rank, int64 [calls] each, to seconds.
Latency = Callable[[NDArray[np.int64], NDArray[np.int64]], float]

Length = Annotated[int, Field(ge=1, le=1 << 40)]


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


class MeasuredLatency(BaseModel):
    """Latency from rates measured on a grid of lengths, with bilinear interpolation in logarithms, constant outside.

    Source: Wang et al. 2025 (arXiv 2503.17924), section 5.3; the interpolation is not from the paper.

    Attributes:
        queries: Lengths of queries, ascending.
        keys: Lengths of keys, ascending.
        pairs_per_s: Rates of causal attention aligned at the bottom right, in whole tiles, ``[queries][keys]``.
        tile: Number of queries that a kernel computes at once.
        provenance: Device, dtype, heads, head dimension, version of torch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    queries: tuple[Length, ...] = Field(min_length=1)
    keys: tuple[Length, ...] = Field(min_length=1)
    pairs_per_s: tuple[tuple[float, ...], ...]
    tile: Length = 128
    provenance: str

    @model_validator(mode="after")
    def _fits(self) -> MeasuredLatency:
        for name, lengths in (("queries", self.queries), ("keys", self.keys)):
            if lengths[0] < 1 or any(a >= b for a, b in pairwise(lengths)):
                raise ValueError(f"{name} must be 1 or more and rise, got {list(lengths)}")
        shape = (len(self.queries), len(self.keys))
        if len(self.pairs_per_s) != shape[0] or any(len(row) != shape[1] for row in self.pairs_per_s):
            raise ValueError(f"pairs_per_s must have {shape[0]} rows of {shape[1]}")
        if not all(np.isfinite(rate) and rate > 0 for row in self.pairs_per_s for rate in row):
            raise ValueError("pairs_per_s must be finite and above 0")
        return self

    def __call__(self, queries: NDArray[np.int64], keys: NDArray[np.int64]) -> float:
        """Return the seconds of a rank's calls by their lengths of ``queries`` and ``keys``, ``[calls]`` each."""
        if not len(queries):
            return 0.0
        rates = np.log(np.array(self.pairs_per_s))
        i, a = _between(np.log(np.array(self.queries)), np.log(queries))
        j, b = _between(np.log(np.array(self.keys)), np.log(keys))
        after_i, after_j = np.minimum(i + 1, len(self.queries) - 1), np.minimum(j + 1, len(self.keys) - 1)
        low = rates[i, j] * (1 - b) + rates[i, after_j] * b
        high = rates[after_i, j] * (1 - b) + rates[after_i, after_j] * b
        return float((_padded_pairs(queries, keys, self.tile) / np.exp(low * (1 - a) + high * a)).sum())

    @classmethod
    def from_seconds(
        cls,
        queries: Sequence[int],
        keys: Sequence[int],
        seconds: Sequence[Sequence[float]],
        provenance: str,
        tile: int = 128,
    ) -> MeasuredLatency:
        """Create a table of calls timed by :func:`cordillera.kernels.attention_rates.measure`.

        The calls' lengths are ``queries`` and ``keys``, their times ``seconds [queries][keys]``; ``tile`` and
        ``provenance`` are those of the attributes.
        """
        k_lengths = np.array(keys)
        rates = [
            _padded_pairs(np.minimum(q_length, k_lengths), k_lengths, tile) / np.array(row)
            for q_length, row in zip(queries, seconds, strict=True)
        ]
        table = tuple(tuple(map(float, row)) for row in rates)
        return cls(queries=tuple(queries), keys=tuple(keys), pairs_per_s=table, tile=tile, provenance=provenance)

    @classmethod
    def read(cls, path: str | Path) -> MeasuredLatency:
        """Read a table from a JSON file.

        Raises:
            DataError: If the file is missing or not such a table.
        """
        content = read_sealed(path)
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            problems = explain(error.errors(), lambda at: known_keys(cls, at))
            text = "; ".join(f"{key}: {message}" for key, message in problems[:20])
            raise DataError(f"is no table of attention rates: {text}", where=str(path)) from error


def _padded_pairs(queries: NDArray[np.int64], keys: NDArray[np.int64], tile: int) -> NDArray[np.float64]:
    """Return the pairs of each call, with queries padded to whole tiles that see the average number of keys."""
    return -(-queries // tile) * tile * (keys - (queries - 1) / 2)


def _between(grid: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the grid point before each value and the fraction to the next, limited to the grid's ends."""
    values = np.clip(values, grid[0], grid[-1])
    before = np.clip(np.searchsorted(grid, values, side="right") - 1, 0, max(len(grid) - 2, 0))
    after = np.minimum(before + 1, len(grid) - 1)
    width = np.where(after > before, grid[after] - grid[before], 1.0)
    return before, (values - grid[before]) / width
