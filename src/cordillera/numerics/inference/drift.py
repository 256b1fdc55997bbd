"""Detection of drift: whether the numbers that a model sees are distributed as at calibration.

Ranges of quantised layers and rows are chosen from data of one day, and a feature that changes its scale afterwards
saturates them silently. A reference stores, for every number, how many of its samples lie above some of its quantiles,
and a window of live samples is compared with these counts. If nothing has changed, all orders of the samples of both
sides are equally probable, so the counts have a hypergeometric distribution: exactly so for every distribution,
including heavy tails, ties and constants, and for references of any size. The probability of any alarm is bounded over
all comparisons together (Bonferroni), however the numbers depend on one another.

Samples of one group (a user's session) are alike. If groups are given, the counts of both sides are reduced by the
design effect of each number (Kish 1965): the ratio of the variance of its mean over groups to the variance with
independent samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import gammaln
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch.row_statistics import RowStatistics, Tier

QUANTILES = (0.0, 0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 0.995, 0.999, 1.0)
"""Quantiles of the reference at which samples are counted."""

_CENTRAL = 0.05  # share of samples below which a boundary belongs to a tail
_BUCKETS = 4096  # largest number of sums over groups
_LOST = "samples that are not finite"
_LARGEST = 1 << 53


@dataclass(frozen=True)
class Alarm:
    """Number or share that has changed since calibration.

    Attributes:
        check: Statistic that differs: ``mean``, ``scale`` (standard deviation), ``share above X`` or ``share from X``
            (a tail), or ``share``.
        probability: Upper bound of the probability of such a difference in any check if nothing has changed.
    """

    name: str
    check: str
    before: float
    now: float
    probability: float

    def __str__(self) -> str:
        return f"{self.name}: {self.check} {self.before:.4g} at calibration, {self.now:.4g} now"


@dataclass(frozen=True)
class Boundary:
    """Boundary in a number's distribution, with the reference's samples above it, equal ones too if ``inclusive``."""

    value: float
    inclusive: bool
    above: int


@dataclass(frozen=True)
class DriftReference:
    """Distributions of a model's numbers at calibration.

    Attributes:
        shares: Names of the shares, which are true or false for a sample.
        samples: Number of samples whose numbers are all finite.
        lost: Number of samples with a number that is NaN or infinite.
        effects: Design effect of each number, followed by that of each share; at least 1.
        true: Number of samples for which each share is true, including lost samples.
    """

    names: tuple[str, ...]
    shares: tuple[str, ...]
    samples: int
    lost: int
    boundaries: tuple[tuple[Boundary, ...], ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    effects: tuple[float, ...]
    true: tuple[int, ...]

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        numbers: Tensor,
        shares: Sequence[str] = (),
        true: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> DriftReference:
        """Compute the reference of calibration samples.

        Args:
            numbers: Numbers of the samples, ``[N, numbers]``; rows with NaN or infinity are counted and left out.
            true: Whether each share is true for each sample, ``bool [N, shares]``; None without shares.
            groups: Group of each sample, ``int64 [N]``; None if all samples are drawn independently.

        Raises:
            NumericsError: If fewer than two samples are finite, or names and columns differ in number.
        """
        true = torch.zeros(len(numbers), 0, dtype=torch.bool) if true is None else true
        if numbers.shape[1] != len(names) or true.shape != (len(numbers), len(shares)):
            raise NumericsError("names, numbers and shares do not go together", where="DriftReference")
        finite = torch.isfinite(numbers).all(1)
        kept = numbers[finite].double()
        if len(kept) < 2:
            raise NumericsError(f"{len(kept)} finite samples, at least two are needed", where="DriftReference")
        ordered = np.sort(kept.numpy(), axis=0)
        boundaries = tuple(_boundaries(ordered[:, i]) for i in range(len(names)))
        window = _Window(len(names), len(shares), boundaries)
        window.update(numbers, true, groups)
        return cls(
            tuple(names), tuple(shares), len(kept), len(numbers) - len(kept), boundaries,
            tuple(window.seen.mean.tolist()), tuple(window.seen.variance().sqrt().tolist()),
            tuple(window.effects().tolist()), tuple(window.true.tolist()),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the reference as plain values."""
        return {
            "samples": self.samples,
            "lost": self.lost,
            "numbers": [
                {
                    "name": name,
                    "mean": self.mean[i],
                    "deviation": self.deviation[i],
                    "effect": self.effects[i],
                    "boundaries": [[one.value, one.inclusive, one.above] for one in self.boundaries[i]],
                }
                for i, name in enumerate(self.names)
            ],
            "shares": [
                {"name": name, "true": self.true[i], "effect": self.effects[len(self.names) + i]}
                for i, name in enumerate(self.shares)
            ],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DriftReference:
        """Restore a reference from the result of :meth:`to_json`; raise an error if the content is malformed."""
        try:
            samples, lost = _count(content["samples"]), _count(content["lost"])
            numbers, shares = list(content["numbers"]), list(content["shares"])
            if samples < 2 or not numbers:
                raise ValueError(f"{samples} samples of {len(numbers)} numbers")
            return cls(
                tuple(_text(one["name"]) for one in numbers),
                tuple(_text(one["name"]) for one in shares),
                samples,
                lost,
                tuple(
                    tuple(Boundary(_number(v), _flag(i), _count(a, samples)) for v, i, a in one["boundaries"])
                    for one in numbers
                ),
                tuple(_number(one["mean"]) for one in numbers),
                tuple(_number(one["deviation"], 0.0) for one in numbers),
                tuple(_number(one["effect"], 1.0) for one in (*numbers, *shares)),
                tuple(_count(one["true"], samples + lost) for one in shares),
            )
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise NumericsError(f"this is no reference: {error!r}", where="DriftReference") from error


class DriftCheck:
    """Comparison of a window of live samples with the reference of calibration."""

    def __init__(self, reference: DriftReference) -> None:
        self.reference = reference
        self._window = _Window(len(reference.names), len(reference.shares), reference.boundaries)

    @property
    def samples(self) -> int:
        """Number of samples whose numbers are all finite."""
        return self._window.seen.count

    @property
    def lost(self) -> int:
        """Number of samples with a number that is NaN or infinite."""
        return self._window.lost

    @property
    def checks(self) -> int:
        """Number of comparisons over which the probability of an alarm is divided."""
        reference = self.reference
        return 2 * sum(map(len, reference.boundaries)) + 2 * len(reference.shares) + 1

    def update(self, numbers: Tensor, true: Tensor | None = None, groups: Tensor | None = None) -> None:
        """Add samples to the window; see :meth:`DriftReference.of` for the arguments."""
        true = torch.zeros(len(numbers), 0, dtype=torch.bool) if true is None else true
        self._window.update(numbers, true, groups)

    def alarms(self, false_alarms: float = 1e-3) -> list[Alarm]:
        """Return the numbers and shares that differ from calibration, the least probable first, one check each.

        Args:
            false_alarms: Probability of any alarm in a window if nothing has changed.

        Raises:
            NumericsError: If there are fewer than two samples, or ``false_alarms`` is not a probability.
        """
        check_false_alarms(false_alarms)
        reference, window = self.reference, self._window
        if self.samples < 2:
            raise NumericsError(f"{self.samples} finite samples, at least two are needed", where="DriftCheck")
        effects, numbers = np.array(reference.effects), len(reference.names)
        of_boundary = np.repeat(np.arange(numbers), [len(own) for own in reference.boundaries])
        own = np.array([one.above for all_of in reference.boundaries for one in all_of], dtype=np.float64)
        live_effects = window.effects()

        def each(of_number: float, of_share: float) -> np.ndarray:
            """Return values for all boundaries, followed by those for all shares and for the lost samples."""
            return np.repeat([of_number, of_share], [len(own), len(reference.shares) + 1])

        def spread(values: np.ndarray) -> np.ndarray:
            return np.concatenate([values[of_boundary], values[numbers:], [1.0]])

        before, now = reference.samples + reference.lost, self.samples + self.lost
        more, fewer = _probabilities(
            np.concatenate([own, reference.true, [reference.lost]]), each(reference.samples, before),
            np.concatenate([window.above, window.true, [window.lost]]), each(self.samples, now),
            spread(effects), spread(live_effects),
        )  # fmt: skip
        fewer[-1] = 1.0  # fewer lost samples raise no alarm
        bound = false_alarms / self.checks
        found = []
        for i, name in enumerate(reference.names):
            places = np.flatnonzero(of_boundary == i)
            least = np.minimum(more[places], fewer[places])
            if len(places) and least.min() <= bound:
                found.append(self._alarm(i, name, more[places] <= bound, fewer[places] <= bound, places, least))
        for j, name in enumerate((*reference.shares, _LOST)):
            least_of_share = float(min(more[len(own) + j], fewer[len(own) + j]))
            if least_of_share <= bound:
                counts = (*reference.true, reference.lost)[j] / before, (*window.true, self.lost)[j] / now
                found.append(Alarm(name, "share", *counts, min(1.0, least_of_share * self.checks)))
        return sorted(found, key=lambda one: one.probability)

    def _alarm(
        self, i: int, name: str, more: np.ndarray, fewer: np.ndarray, places: np.ndarray, least: np.ndarray
    ) -> Alarm:
        reference, seen = self.reference, self._window.seen
        probability = min(1.0, float(least.min()) * self.checks)
        shares = np.array([one.above for one in reference.boundaries[i]]) / reference.samples
        central = (shares > _CENTRAL) & (shares < 1 - _CENTRAL)
        if (more & central).any() and (fewer & central).any():
            deviation = float(seen.variance()[i].sqrt())
            return Alarm(name, "scale", reference.deviation[i], deviation, probability)
        if ((more | fewer) & central).any() or not reference.deviation[i]:
            return Alarm(name, "mean", reference.mean[i], float(seen.mean[i]), probability)
        place = int(least.argmin())
        one = reference.boundaries[i][place]
        now = float(self._window.above[places[place]]) / self.samples
        check = f"share {'from' if one.inclusive else 'above'} {one.value:.4g}"
        return Alarm(name, check, float(shares[place]), now, probability)


class _Window:
    """Counts of samples above boundaries, with the sums over groups for the design effects."""

    def __init__(self, numbers: int, shares: int, boundaries: Sequence[Sequence[Boundary]]) -> None:
        self._numbers, self._boundaries = numbers, boundaries
        self.seen, self.lost = RowStatistics(numbers, Tier.diagonal), 0
        self.above = np.zeros(sum(map(len, boundaries)), dtype=np.int64)
        self.true = np.zeros(shares, dtype=np.int64)
        self._square = np.zeros(numbers + shares)
        self._sums = np.zeros((_BUCKETS, numbers + shares))
        self._sizes = np.zeros(_BUCKETS)

    def update(self, numbers: Tensor, true: Tensor, groups: Tensor | None) -> None:
        finite = torch.isfinite(numbers).all(1)
        self.lost += int((~finite).sum())
        self.true += true.sum(0).numpy()
        kept = numbers[finite].double()
        self.seen.update(kept)
        rows, ranks = kept.numpy(), np.zeros((len(kept), self._numbers))
        first = 0
        for i, own in enumerate(self._boundaries):
            for one in own:
                above = rows[:, i] >= one.value if one.inclusive else rows[:, i] > one.value
                self.above[first] += int(above.sum())
                ranks[:, i] += above
                first += 1
        if groups is None or not len(kept):
            return
        # Groups are compared by ranks among the boundaries, so that no tail dominates.
        values = np.concatenate([ranks, true[finite].numpy().astype(np.float64)], 1)
        self._square += np.square(values).sum(0)
        # Groups that share a bucket count as one larger group.
        hashed = groups[finite].numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        places = (hashed >> np.uint64(52)).astype(np.int64)
        np.add.at(self._sums, places, values)
        self._sizes += np.bincount(places, minlength=_BUCKETS)

    def effects(self) -> np.ndarray:
        """Ratio of the variance of each mean over groups to the variance with independent samples, at least 1."""
        known = self._sizes > 0
        sums, sizes, count = self._sums[known], self._sizes[known], float(self._sizes.sum())
        if len(sizes) < 2:  # one group gives no estimate of the variance; it counts as one sample
            return np.full(len(self._square), max(1.0, count))
        mean = sums.sum(0) / count
        between = np.square(sums - sizes[:, None] * mean).sum(0) * len(sizes) / (len(sizes) - 1)
        within = self._square - count * np.square(mean)
        return np.maximum(1.0, np.where(within > 1e-9 * count, between / np.maximum(within, 1e-300), 1.0))


def _boundaries(ordered: np.ndarray) -> tuple[Boundary, ...]:
    """Return the boundaries of one number: above and from each quantile, if the counts differ by at least two."""
    total = len(ordered)
    values = np.unique(ordered[[round(q * (total - 1)) for q in QUANTILES]])
    found: dict[int, Boundary] = {}
    for value in values.tolist():
        for inclusive in (True, False):
            above = total - int(np.searchsorted(ordered, value, side="left" if inclusive else "right"))
            if above + 1 not in found or above == 0:
                found.setdefault(above, Boundary(value, inclusive, above))
    return tuple(found.values())


def _probabilities(
    before: np.ndarray,
    samples: np.ndarray,
    now: np.ndarray,
    live: np.ndarray,
    effect: np.ndarray,
    live_effect: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of at least, and of at most, the observed number of live samples above a boundary.

    Both are computed as if nothing had changed. The counts of each side are divided by its design effect.
    """
    reduced, reduced_live = np.maximum(1, np.floor(samples / effect)), np.maximum(1, np.floor(live / live_effect))
    share, live_share = before / samples, now / live
    # Both shares are rounded towards each other, so that rounding never enlarges a difference.
    up = live_share > share
    a = np.where(up, np.ceil(share * reduced - 1e-9), np.floor(share * reduced + 1e-9))
    b = np.where(up, np.floor(live_share * reduced_live + 1e-9), np.ceil(live_share * reduced_live - 1e-9))
    found = _tail(reduced, reduced_live, a, b, up)
    return np.where(up, found, 1.0), np.where(up, 1.0, found)


def _tail(n: np.ndarray, m: np.ndarray, a: np.ndarray, b: np.ndarray, up: np.ndarray) -> np.ndarray:
    """One-sided probability of at least (or at most) ``b`` of the ``m`` among ``a + b`` samples drawn from ``n + m``.

    This is Fisher's exact test, computed as a sum from the observed count outwards by ratios of successive terms.
    """
    # By symmetry, the side with more than its share is summed upwards.
    n, m, a, b = np.where(up, n, m), np.where(up, m, n), np.where(up, a, b), np.where(up, b, a)
    drawn = a + b

    def log_choose(whole: np.ndarray, part: np.ndarray) -> np.ndarray:
        return np.asarray(gammaln(whole + 1) - gammaln(part + 1) - gammaln(whole - part + 1))

    started = np.exp(np.minimum(0.0, log_choose(m, b) + log_choose(n, a) - log_choose(n + m, drawn)))
    total, term = started.copy(), started.copy()
    while True:
        grown = (m - b) * a / ((b + 1) * (n - a + 1))
        term = np.where((b < m) & (a > 0), term * grown, 0.0)
        a, b = np.maximum(a - 1, 0), b + 1
        total += term
        if not (term > 1e-12 * total).any():
            return np.minimum(total, 1.0)


def check_false_alarms(false_alarms: float) -> None:
    """Check that ``false_alarms`` is a probability above 0 and below 1."""
    if not 0 < false_alarms < 1:
        raise NumericsError(f"is {false_alarms}", where="false_alarms", remedy="a probability, such as 0.001")


def _count(value: Any, most: int = _LARGEST) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no count")
    return value


def _number(value: Any, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value
