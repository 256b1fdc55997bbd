"""What each feature of a layer's inputs looks like alone: quantiles of a stream in bounded memory, and draws by them.

A normal distribution has no tails to speak of and goes below zero after a ReLU. With the quantiles of each feature a
Gaussian copula keeps the features' own distributions and their covariances: normal numbers are drawn with such
correlations that, put through the quantiles, they have those of the data (Cario and Nelson 1997, NORTA).
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
"""Quantiles of a feature, and how many standard deviations of a normal one the outermost stand for."""
CAPACITY = 512  # numbers of a feature and level
_KEPT = CAPACITY // 4  # of the smallest, and of the largest, that stay on their level
_STRATA, _DEGREE, _HALVINGS = 2048, 10, 30


class QuantileSketch:
    """Quantiles of many features, from a stream, by levels of compactors whose ends are kept.

    A level holds up to 512 numbers of each feature, each of which stands for ``2**level`` of the stream. When it is
    full, of its numbers in order, without the 128 smallest and largest, every second goes to the next level (Karnin et
    al. 2016, with deterministic choice; ends as in Cormode et al. 2021). All features go through it in step, and no
    row of the data remains. Memory: 2 KiB a feature and level, of which there are as many as doublings of 512 rows.

    Attributes:
        count: Rows so far.
        negatives: ``int64 [K]``, of them below zero.
        zeros: ``int64 [K]``, of them zero.

    Args:
        features: ``K``.
    """

    def __init__(self, features: int) -> None:
        self.features, self.count = features, 0
        self.negatives, self.zeros = torch.zeros(2, features, dtype=torch.int64)
        self._low, self._high = torch.full((features,), torch.inf), torch.full((features,), -torch.inf)
        self._levels: list[Tensor] = []
        self._compactions: list[int] = []

    def update(self, rows: Tensor) -> None:
        """Take rows in.

        Args:
            rows: ``[B, K]``, finite.
        """
        if not len(rows):
            return
        rows = rows.detach().float().cpu() + 0.0  # zeros of one sign, so that order says all
        self.count += len(rows)
        self.negatives += (rows < 0).sum(0)
        self.zeros += (rows == 0).sum(0)
        self._low, self._high = torch.minimum(self._low, rows.amin(0)), torch.maximum(self._high, rows.amax(0))
        self._add(0, rows)
        self._compact()

    def merge(self, other: QuantileSketch) -> None:
        """Take in what was gathered elsewhere.

        Args:
            other: Of as many features.
        """
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
                end = _KEPT + (len(ordered) - 2 * _KEPT) // 2 * 2  # an even number of them
                # the first of each pair and the second take turns, so that errors cancel
                chosen = ordered[_KEPT + self._compactions[level] % 2 : end : 2]
                self._levels[level] = torch.cat([ordered[:_KEPT], ordered[end:]])
                self._compactions[level] += 1
                self._add(level + 1, chosen)
            level += 1

    @property
    def rank_error(self) -> float:
        """The most that a quantile's rank can be off, as a share of all rows; errors that cancel make it far less."""
        return sum(count * 2.0**level for level, count in enumerate(self._compactions)) / max(1, self.count)

    def quantiles(self, probabilities: Tensor) -> Tensor:
        """The values below which shares of the rows lie.

        Args:
            probabilities: ``[p]``, ascending, from 0 for the smallest to 1 for the largest.

        Returns:
            ``float32 [p, K]``.
        """
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
        """``float32 [129, K]``: quantiles at equal steps of a normal number from -4 to 4, the ends the extremes."""
        steps = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
        probabilities = torch.special.ndtr(steps)
        probabilities[0], probabilities[-1] = 0, 1
        return self.quantiles(probabilities)

    def memory_bytes(self) -> int:
        """Of all that is kept."""
        held = [*self._levels, self._low, self._high, self.negatives, self.zeros]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def state_dict(self) -> dict[str, Any]:
        """All of it, as tensors and plain numbers."""
        return {
            "count": self.count,
            "counts": torch.stack([self.negatives, self.zeros]),
            "ends": torch.stack([self._low, self._high]),
            "levels": [level.clone() for level in self._levels],
            "compactions": list(self._compactions),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> QuantileSketch:
        """What :meth:`state_dict` gave.

        Args:
            state: As it was given.

        Raises:
            NumericsError: its parts do not fit together.
        """
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
    """``[m, K]`` with each column in order; by NumPy, whose sort of rows is many times as fast as torch's."""
    return torch.from_numpy(np.sort(numbers.T.contiguous().numpy(), axis=1)).T


class Marginals:
    """The quantiles of features, as functions of normal numbers.

    Args:
        sketch: Of at least one row.
    """

    def __init__(self, sketch: QuantileSketch) -> None:
        self._points = sketch.points()
        total = sketch.count
        self._below, self._to = sketch.negatives / total, (sketch.negatives + sketch.zeros) / total

    def __call__(self, normal: Tensor) -> Tensor:
        """Values in whose places normal numbers stand, straight between the points; zeros as often as in the data.

        Args:
            normal: ``[n, K]``.

        Returns:
            ``float32 [n, K]``.
        """
        place = (normal.double().clamp(-REACH, REACH) + REACH) * ((POINTS - 1) / (2 * REACH))
        first = place.floor().clamp(max=POINTS - 2).long()
        low, high = self._points.gather(0, first), self._points.gather(0, first + 1)
        value = torch.lerp(low.double(), high.double(), place - first).float()
        share = torch.special.ndtr(normal.double())
        # where signs change the straight line would fill the place of a point mass, and cross zero too early or late
        value = torch.where(share < self._below, value.clamp(max=0), value)
        value = torch.where(share >= self._to, value.clamp(min=0), value)
        return torch.where((share >= self._below) & (share < self._to), 0.0, value)

    def correlations_of_normals(self, covariance: Tensor) -> Tensor:
        """Correlations of normal numbers whose values have given covariances, as far as any have.

        Of a function's expansion in Hermite polynomials with coefficients ``a``, values have the covariance
        ``sum_k a_i[k] a_j[k] r**k`` for normal numbers of correlation ``r``: it rises with ``r``, which is bisected.

        Args:
            covariance: ``float64 [K, K]``, of the values.

        Returns:
            ``float64 [K, K]`` with ones on its diagonal.
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
