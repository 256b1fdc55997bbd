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
from cordillera.numerics.row_statistics import RowStatistics, Tier


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
    """Statistics of several numbers a sample.

    Attributes:
        names: Of the numbers.
        lost: Samples with a number that is NaN or infinite; they are in no mean.
        seen: Statistics of the others.

    Args:
        names: Of the numbers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.lost = list(names), 0
        self.seen = RowStatistics(len(self.names), Tier.diagonal)

    @property
    def count(self) -> int:
        """Samples that are in the means."""
        return self.seen.count

    def update(self, values: Tensor) -> None:
        """Take samples in.

        Args:
            values: ``[B, numbers]``.
        """
        finite = torch.isfinite(values).all(1)
        self.lost += int((~finite).sum())
        self.seen.update(values[finite].double())

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        state = self.seen.state_dict()
        mean, scatter = state["mean"].tolist(), [part.tolist() for part in state["scatter"]]
        return {"names": self.names, "lost": self.lost, "seen": {**state, "mean": mean, "scatter": scatter}}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Moments:
        """What :meth:`to_json` gave.

        Args:
            content: As it was given.

        Raises:
            NumericsError: it was not given like this.
        """
        try:
            found, state = cls(content["names"]), dict(content["seen"])
            state["mean"] = torch.tensor(state["mean"], dtype=torch.float64)
            state["scatter"] = [torch.tensor(part, dtype=torch.float64) for part in state["scatter"]]
            found.lost, found.seen = int(content["lost"]), RowStatistics.from_state_dict(state)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise NumericsError(f"these are no statistics: {error!r}", where="Moments") from error
        if found.seen.features != len(found.names):
            raise NumericsError(f"{len(found.names)} names for {found.seen.features} numbers", where="Moments")
        return found


def check_false_alarms(false_alarms: float) -> None:
    """Refuse what is no probability.

    Args:
        false_alarms: Above 0 and below 1.

    Raises:
        NumericsError: it is not.
    """
    if not 0 < false_alarms < 1:
        raise NumericsError(f"is {false_alarms}", where="false_alarms", remedy="a probability, such as 0.001")


def alarms(before: Moments, now: Moments, false_alarms: float = 1e-3) -> list[Alarm]:
    """Numbers whose mean is not that of calibration.

    Args:
        before: At calibration.
        now: In a window of live samples; from some hundred samples on means are about normal.
        false_alarms: Probability of any alarm in a window, where nothing has changed.

    Returns:
        The farthest first; ``share of lost samples`` is one if samples with NaN or infinity have become more.

    Raises:
        NumericsError: the numbers are others, there are fewer than two samples on either side, or the probability is
            none.
    """
    check_false_alarms(false_alarms)
    if before.names != now.names:
        raise NumericsError("the numbers that are watched are not those of calibration", where="watch")
    if min(before.count, now.count) < 2:
        raise NumericsError(f"{now.count} samples beside {before.count} of calibration", where="watch")
    bound = float(scipy.stats.norm.isf(false_alarms / 2 / max(1, len(before.names) + 1)))
    variance, mean = before.seen.variance(), before.seen.mean
    error = (variance / before.count + torch.maximum(variance, now.seen.variance()) / now.count).sqrt()
    difference = now.seen.mean - mean
    # A number that never varied and now differs is infinitely far off.
    deviations = torch.where(error > 0, difference / error, torch.where(difference == 0, 0.0, difference * math.inf))
    found = [
        Alarm(name, float(mean[i]), float(now.seen.mean[i]), float(deviations[i]))
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
