"""Whether a model still sees what it was calibrated on: means of a few numbers a sample, then and now.

Ranges of quantised layers and rows are chosen on data of one day. A feature that changes its scale afterwards
saturates them silently. For every number that is watched, the mean over a window of live samples is compared with that
of calibration, in units of its standard error; the probability of an alarm without any change is bounded over all of
them together (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import scipy
import torch
from torch import Tensor

from cordillera.errors import NumericsError


@dataclass(frozen=True)
class Alarm:
    """A number whose mean has moved.

    Attributes:
        name: Of the number.
        before: Its mean at calibration.
        now: In the window.
        deviations: The difference in standard errors.
    """

    name: str
    before: float
    now: float
    deviations: float

    def __str__(self) -> str:
        moved = f"{self.before:.4g} at calibration, {self.now:.4g} now"
        return f"{self.name}: {moved} ({self.deviations:+.1f} standard errors)"


class Moments:
    """Count, mean and variance of several numbers a sample, added up exactly enough in float64.

    Attributes:
        names: Of the numbers.
        count: Samples in which all numbers were finite.
        lost: Others.

    Args:
        names: Of the numbers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.count = self.lost = 0
        self._mean = torch.zeros(len(self.names), dtype=torch.float64)
        self._scatter = torch.zeros(len(self.names), dtype=torch.float64)

    def update(self, values: Tensor) -> None:
        """Take samples in.

        Args:
            values: ``[B, numbers]``.
        """
        values = values.detach().to("cpu", torch.float64)
        finite = torch.isfinite(values).all(1)
        self.lost += int((~finite).sum())
        values = values[finite]
        if not len(values):
            return
        total = self.count + len(values)
        mean = values.mean(0)
        delta = mean - self._mean
        self._scatter += (values - mean).square().sum(0) + delta.square() * (self.count * len(values) / total)
        self._mean += delta * (len(values) / total)
        self.count = total

    @property
    def mean(self) -> Tensor:
        """``float64 [numbers]``."""
        return self._mean

    @property
    def variance(self) -> Tensor:
        """``float64 [numbers]``."""
        return self._scatter / max(1, self.count - 1)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "names": self.names,
            "count": self.count,
            "lost": self.lost,
            "mean": self._mean.tolist(),
            "scatter": self._scatter.tolist(),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Moments:
        """What :meth:`to_json` gave.

        Args:
            content: As it was given.
        """
        found = cls(content["names"])
        found.count, found.lost = int(content["count"]), int(content["lost"])
        found._mean = torch.tensor(content["mean"], dtype=torch.float64)
        found._scatter = torch.tensor(content["scatter"], dtype=torch.float64)
        return found


def alarms(before: Moments, now: Moments, false_alarms: float = 1e-3) -> list[Alarm]:
    """Numbers whose mean is not that of calibration.

    Args:
        before: At calibration.
        now: In a window of live samples; from some hundred samples on means are about normal.
        false_alarms: Probability of any alarm in a window, where nothing has changed.

    Returns:
        The farthest first; ``share of lost samples`` is one if samples with NaN or infinity have become more.

    Raises:
        NumericsError: the numbers are others, or there are fewer than two samples on either side.
    """
    if before.names != now.names:
        raise NumericsError("the numbers that are watched are not those of calibration", where="watch")
    if min(before.count, now.count) < 2:
        raise NumericsError(f"{now.count} samples beside {before.count} of calibration", where="watch")
    bound = float(scipy.stats.norm.isf(false_alarms / 2 / max(1, len(before.names) + 1)))
    error = (before.variance / before.count + torch.maximum(before.variance, now.variance) / now.count).sqrt()
    difference = now.mean - before.mean
    # A number that never varied and now differs is infinitely far off.
    deviations = torch.where(error > 0, difference / error, torch.where(difference == 0, 0.0, difference * math.inf))
    found = [
        Alarm(name, float(before.mean[i]), float(now.mean[i]), float(deviations[i]))
        for i, name in enumerate(before.names)
        if abs(float(deviations[i])) > bound
    ]
    shares = [one.lost / (one.lost + one.count) for one in (before, now)]
    pooled = (before.lost + now.lost) / (before.lost + before.count + now.lost + now.count)
    spread = math.sqrt(
        max(pooled * (1 - pooled), 1e-300) * (1 / (before.lost + before.count) + 1 / (now.lost + now.count))
    )
    if shares[1] > shares[0] and (shares[1] - shares[0]) / spread > bound:
        found.append(Alarm("share of lost samples", shares[0], shares[1], (shares[1] - shares[0]) / spread))
    return sorted(found, key=lambda one: -abs(one.deviations))
