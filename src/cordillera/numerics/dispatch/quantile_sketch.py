"""Quantiles of each feature of a stream in bounded memory, and draws from them.

A normal distribution has hardly any tails and is negative where a ReLU gives zero. A Gaussian copula preserves the
features' distributions and covariances: it draws normal numbers with such correlations that, mapped through the
quantiles, they have the correlations of the data (Cario and Nelson 1997, NORTA).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordillera.errors import NumericsError

POINTS, REACH = 129, 4.0
"""Number of quantiles of a feature, and standard deviations of a normal number at the outermost ones."""
CAPACITY = 512  # largest number of values of a feature on a level
_KEPT = CAPACITY // 4  # number of the smallest and of the largest values that stay on their level
_STRATA, _DEGREE, _HALVINGS = 2048, 10, 30


class QuantileSketch:
    """Quantiles of many features of a stream, by levels of compactors whose ends are kept.

    A level holds up to 512 numbers of each feature, each of which represents ``2**level`` of the stream. When it is
    full, its numbers are sorted, and every second one between the 128 smallest and largest moves to the next level
    (Karnin et al. 2016, with deterministic choice; ends as in Cormode et al. 2021). Each feature is compacted in its
    own order, so no row of the data remains. Each feature takes 2 KiB for each level; there is a level for each
    doubling of 512 rows.

    Attributes:
        negatives: Number of rows below zero, ``int64 [K]``.
        zeros: Number of rows equal to zero, ``int64 [K]``.
    """

    def __init__(self, features: int) -> None:
        self.features, self.count = features, 0
        self.negatives, self.zeros = torch.zeros(2, features, dtype=torch.int64)
        self._low, self._high = torch.full((features,), torch.inf), torch.full((features,), -torch.inf)
        self._levels: list[Tensor] = []
        self._compactions: list[int] = []

    def update(self, rows: Tensor) -> None:
        """Add finite rows ``[B, K]``."""
        if not len(rows):
            return
        rows = rows.detach().float().cpu() + 0.0  # zeros of one sign, so that the order is unique
        self.count += len(rows)
        self.negatives += (rows < 0).sum(0)
        self.zeros += (rows == 0).sum(0)
        self._low, self._high = torch.minimum(self._low, rows.amin(0)), torch.maximum(self._high, rows.amax(0))
        self._add(0, rows)
        self._compact()

    def merge(self, other: QuantileSketch) -> None:
        """Add the content of another sketch of as many features."""
        self.count += other.count
        self.negatives, self.zeros = self.negatives + other.negatives, self.zeros + other.zeros
        self._low, self._high = torch.minimum(self._low, other._low), torch.maximum(self._high, other._high)
        for level, (numbers, compactions) in enumerate(zip(other._levels, other._compactions, strict=True)):
            self._add(level, numbers)
            self._compactions[level] += compactions
        self._compact()

    def _add(self, level: int, numbers: Tensor) -> None:
        if level == len(self._levels):
            self._levels.append(torch.empty(0, self.features))
            self._compactions.append(0)
        self._levels[level] = torch.cat([self._levels[level], numbers])

    def _compact(self) -> None:
        level = 0
        while level < len(self._levels):
            if len(self._levels[level]) > CAPACITY:
                ordered = _sorted(self._levels[level])
                end = _KEPT + (len(ordered) - 2 * _KEPT) // 2 * 2  # an even number is compacted
                # the first and the second of each pair are kept alternately, so that errors cancel
                chosen = ordered[_KEPT + self._compactions[level] % 2 : end : 2]
                self._levels[level] = torch.cat([ordered[:_KEPT], ordered[end:]])
                self._compactions[level] += 1
                self._add(level + 1, chosen)
            level += 1

    def quantiles(self, probabilities: Tensor) -> Tensor:
        """Return quantiles ``float32 [p, K]`` at ascending ``probabilities [p]``; 0 is the smallest value."""
        numbers = torch.cat(self._levels).T.contiguous()  # [K, n]
        weights = torch.cat([torch.full((len(one),), 2.0**n) for n, one in enumerate(self._levels)]).double()
        ordered, order = numbers.sort(1)
        below = weights[order].cumsum(1)
        targets = (probabilities.double() * self.count).expand(self.features, -1).contiguous()
        places = torch.searchsorted(below, targets).clamp(max=ordered.shape[1] - 1)
        found = ordered.gather(1, places).T
        found = torch.where(probabilities[:, None] <= 0, self._low, found)
        return torch.where(probabilities[:, None] >= 1, self._high, found)

    def points(self) -> Tensor:
        """Return quantiles ``float32 [129, K]`` at equal steps of a normal number from -4 to 4; the ends are exact."""
        steps = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
        probabilities = torch.special.ndtr(steps)
        probabilities[0], probabilities[-1] = 0, 1
        return self.quantiles(probabilities)

    def memory_bytes(self) -> int:
        """Return the number of bytes of the content."""
        held = [*self._levels, self._low, self._high, self.negatives, self.zeros]
        return sum(tensor.nbytes for tensor in held)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state as tensors and plain numbers."""
        return {
            "count": self.count,
            "counts": torch.stack([self.negatives, self.zeros]),
            "ends": torch.stack([self._low, self._high]),
            "levels": [level.clone() for level in self._levels],
            "compactions": list(self._compactions),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> QuantileSketch:
        """Restore the result of :meth:`state_dict`; raise an error if its parts do not fit together."""
        found = cls(state["counts"].shape[1])
        found.count, found._compactions = int(state["count"]), [int(one) for one in state["compactions"]]
        found.negatives, found.zeros = state["counts"].clone().unbind()
        found._low, found._high = state["ends"].clone().unbind()
        found._levels = [level.clone() for level in state["levels"]]
        held = sum(len(level) * 2**number for number, level in enumerate(found._levels))
        if held != found.count or len(found._levels) != len(found._compactions):
            raise NumericsError(f"holds {held} rows of {found.count}", where="QuantileSketch.from_state_dict")
        return found


def _sorted(numbers: Tensor) -> Tensor:
    """Sort each column of ``[m, K]``; NumPy's sort of rows is many times as fast as torch's."""
    return torch.from_numpy(np.sort(numbers.T.contiguous().numpy(), axis=1)).T


class Marginals:
    """Quantiles of features as functions of normal numbers, from a sketch of at least one row."""

    def __init__(self, sketch: QuantileSketch) -> None:
        self._points = sketch.points()
        total = sketch.count
        self._below, self._to = sketch.negatives / total, (sketch.negatives + sketch.zeros) / total

    def __call__(self, normal: Tensor) -> Tensor:
        """Map normal numbers ``[n, K]`` to values ``float32 [n, K]``, linear between quantiles, with zeros kept."""
        place = (normal.double().clamp(-REACH, REACH) + REACH) * ((POINTS - 1) / (2 * REACH))
        first = place.floor().clamp(max=POINTS - 2).long()
        low, high = self._points.gather(0, first), self._points.gather(0, first + 1)
        value = torch.lerp(low.double(), high.double(), place - first).float()
        share = torch.special.ndtr(normal.double())
        # near a point mass at zero, linear interpolation would replace it and change the sign too early or too late
        value = torch.where(share < self._below, value.clamp(max=0), value)
        value = torch.where(share >= self._to, value.clamp(min=0), value)
        return torch.where((share >= self._below) & (share < self._to), 0.0, value)

    def correlations_of_normals(self, covariance: Tensor) -> Tensor:
        """Return correlations ``float64 [K, K]`` of normal numbers whose values have nearly the given ``covariance``.

        If ``a`` are the Hermite coefficients of the map from normal numbers to values, values have the covariance
        ``sum_k a_i[k] a_j[k] r**k`` for normal numbers of correlation ``r``, which is found by bisection as it
        increases.
        """
        share = (torch.arange(_STRATA, dtype=torch.float64) + 0.5) / _STRATA
        z = torch.special.ndtri(share)
        basis = [torch.ones_like(z), z]
        for k in range(1, _DEGREE):
            basis.append((z * basis[k] - math.sqrt(k) * basis[k - 1]) / math.sqrt(k + 1))
        values = self(z[:, None].expand(-1, self._points.shape[1])).double()  # [strata, K]
        coefficients = torch.stack(basis[1:]) @ values / _STRATA  # [degree, K]
        coefficients /= coefficients.square().sum(0).sqrt().clamp(min=1e-300)
        spread = covariance.diagonal().clamp(min=0).sqrt()
        wanted = covariance / (spread[:, None] * spread).clamp(min=1e-300)
        low, high = torch.full_like(wanted, -1), torch.ones_like(wanted)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            reached = torch.zeros_like(wanted)
            for row in coefficients.flip(0):  # Horner's rule
                reached = (reached + row[:, None] * row) * middle
            low, high = torch.where(reached < wanted, middle, low), torch.where(reached < wanted, high, middle)
        found = (low + high) / 2
        found.fill_diagonal_(1)
        return found
