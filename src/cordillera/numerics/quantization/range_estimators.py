"""Estimators of the range that codes should cover, from a running histogram that does not depend on order.

The width of a histogram's bins is a power of two, and bins begin at multiples of it. When the range grows, bins are
merged in pairs. So the histogram of a set of values is bit-identical however the set was split over batches and ranks,
and in whatever order the parts were merged.

The estimators are those of Caffe2's DNNLOWP: smallest and largest value, the range of least L1 or L2 error
(``norm_minimization.cc``), a percentile, and the least Kullback-Leibler divergence. Each takes a histogram of at least
one value, ``levels`` (the number of codes less one) and whether the ends must be opposite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.formats.formats import IntegerFormat
from cordillera.numerics.quantization.quantizers import AffineParameters, check_finite, choose_affine, choose_symmetric

BINS = 2048
_FINEST = 40  # number of binary digits of the largest absolute value that bins resolve
_LEAST_EXPONENT = -200  # smallest exponent of the bins' width; below float32's smallest number
_GRID = 24  # number of ends tried on each side of the range in each round
_ROUNDS = 3  # number of rounds, each around the best result of the previous one
_NOISE = 1e-13  # rounding error of float64 differences in a closed-form error, relative to the range
_PERCENTILE = 0.99
_KL_STEPS = 128


class RunningHistogram:
    """Counts of values in at most ``bins`` bins, with the exact smallest and largest value.

    Attributes:
        low: Smallest value so far; initially infinity.
        high: Largest value so far; initially minus infinity.
        exponent: Exponent of the bins' width ``2^exponent``.
        first: Offset of the bins: bin ``i`` begins at ``(first + i) 2^exponent``.
        counts: Counts of the bins from the smallest to the largest value, ``int64 [bins]``.
    """

    def __init__(self, bins: int = BINS) -> None:
        if bins < 2:
            raise NumericsError(f"{bins} bins are too few", where="bins", remedy="at least 2")
        self.bins = bins
        self.low, self.high = math.inf, -math.inf
        self.exponent, self.first = 0, 0
        self.counts = torch.zeros(0, dtype=torch.int64)

    @property
    def total(self) -> int:
        """Number of counted values."""
        return int(self.counts.sum())

    def update(self, x: Tensor, name: str = "x") -> None:
        """Count the values of a tensor of any shape; if one is not finite, raise an error and count nothing."""
        if not x.numel():
            return
        check_finite(x, name)
        values = x.detach().flatten().double()
        part = RunningHistogram(self.bins)
        part.low, part.high = (float(end) for end in torch.aminmax(values))
        part.exponent = _exponent(part.low, part.high, self.bins)
        index = torch.floor(values * 2.0**-part.exponent).long()
        part.first = int(index.min())
        part.counts = torch.bincount(index - part.first)
        self.merge(part)

    def merge(self, other: RunningHistogram) -> None:
        """Add the counts of another histogram of as many ``bins``, for instance of another rank."""
        if other.bins != self.bins:
            raise NumericsError(f"{other.bins} bins do not merge with {self.bins}", where="bins")
        if not other.counts.numel():
            return
        low, high = min(self.low, other.low), max(self.high, other.high)
        exponent = _exponent(low, high, self.bins)
        parts = [part for part in (self, other) if part.counts.numel()]
        firsts = [part.first >> (exponent - part.exponent) for part in parts]
        lasts = [(part.first + part.counts.numel() - 1) >> (exponent - part.exponent) for part in parts]
        counts = torch.zeros(max(lasts) - min(firsts) + 1, dtype=torch.int64)
        for part in parts:
            bins = (torch.arange(part.counts.numel()) + part.first) >> min(exponent - part.exponent, 63)
            counts.index_add_(0, bins - min(firsts), part.counts)
        self.low, self.high, self.exponent, self.first, self.counts = low, high, exponent, min(firsts), counts

    def edges(self) -> Tensor:
        """Return the edges of the bins, ``float64 [bins + 1]``, from the smallest to the largest value."""
        edges = (torch.arange(self.counts.numel() + 1) + self.first).double() * 2.0**self.exponent
        return edges.clamp(self.low, self.high)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, for a checkpoint or another rank."""
        return {
            "bins": self.bins,
            "low": self.low,
            "high": self.high,
            "exponent": self.exponent,
            "first": self.first,
            "counts": self.counts.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; raise an error if ``state`` is malformed."""
        if (
            set(state) != set(self.state_dict())
            or state["counts"].dtype != torch.int64
            or bool((state["counts"] < 0).any())
        ):
            raise NumericsError("is no state of a histogram", where="RunningHistogram.load_state_dict")
        for key, value in state.items():
            setattr(self, key, value.clone() if isinstance(value, Tensor) else value)


def _exponent(low: float, high: float, bins: int) -> int:
    """Return the exponent of the narrowest bins for a range; it only grows with the range, in whatever order."""
    largest = max(abs(low), abs(high))
    finest = max(math.frexp(largest)[1] - _FINEST, _LEAST_EXPONENT) if largest else _LEAST_EXPONENT
    exponent = max(finest, math.frexp(high - low)[1] - bins.bit_length() - 1) if high > low else finest
    while math.floor(high * 2.0**-exponent) - math.floor(low * 2.0**-exponent) >= bins:
        exponent += 1
    return exponent


def minmax(histogram: RunningHistogram, levels: int, symmetric: bool = False) -> tuple[float, float]:
    """Return the smallest and the largest value, or the largest absolute value and its opposite."""
    peak = max(abs(histogram.low), abs(histogram.high))
    return (-peak, peak) if symmetric else (min(histogram.low, 0.0), max(histogram.high, 0.0))


def percentile(histogram: RunningHistogram, levels: int, symmetric: bool = False) -> tuple[float, float]:
    """Return the range that holds 99% of the values (of the absolute values if ``symmetric``), as DNNLOWP's P99."""
    moments = _Moments(histogram)
    if symmetric:
        _, high = minmax(histogram, levels, symmetric)
        ends = torch.linspace(0, high, 4 * BINS + 1, dtype=torch.float64)
        inside = moments.mass(ends) - moments.mass(-ends)
        short = int((inside < _PERCENTILE * moments.total).sum())
        peak = float(ends[min(short, len(ends) - 1)])
        return -peak, peak
    outside = (1 - _PERCENTILE) / 2
    return min(moments.quantile(outside), 0.0), max(moments.quantile(1 - outside), 0.0)


def least_l2(histogram: RunningHistogram, levels: int, symmetric: bool = False) -> tuple[float, float]:
    """Return the range of least squared error if values are uniform within bins; never worse than :func:`minmax`."""
    return _least(histogram, levels, symmetric, 2)


def least_l1(histogram: RunningHistogram, levels: int, symmetric: bool = False) -> tuple[float, float]:
    """Return the range of least absolute error; otherwise as :func:`least_l2`."""
    return _least(histogram, levels, symmetric, 1)


def least_divergence(histogram: RunningHistogram, levels: int, symmetric: bool = False) -> tuple[float, float]:
    """Return the range of least divergence between codes and values (Migacz 2017, TensorRT's calibration).

    Both ends are moved in by one factor. Clipped values count at the ends; the count of each code is spread evenly over
    its bins that hold any value.
    """
    low, high = minmax(histogram, levels, symmetric)
    if low == high:
        return low, high
    moments = _Moments(histogram)
    best, chosen = math.inf, (low, high)
    cells = 8 * (levels + 1)  # cells of the reference distribution, eight for each code
    for step in range(_KL_STEPS, _KL_STEPS // 8, -1):
        ends = (low * step / _KL_STEPS, high * step / _KL_STEPS)
        edges = torch.linspace(*ends, cells + 1, dtype=torch.float64)
        inside = moments.mass(edges).diff()
        clipped = inside.clone()
        clipped[0] += moments.mass(edges[:1])[0]
        clipped[-1] += moments.total - moments.mass(edges[-1:])[0]
        occupied = (inside > 0).double().view(levels + 1, 8)
        share = inside.view(levels + 1, 8).sum(1, keepdim=True) / occupied.sum(1, keepdim=True).clamp(min=1)
        coarse = (share * occupied).flatten()
        if float(coarse.sum()) == 0:
            continue
        p, q = clipped / clipped.sum(), coarse / coarse.sum()
        # A value in a cell without codes costs as much as one in the rarest occupied cell.
        q = torch.where((q == 0) & (p > 0), q[q > 0].min() / cells, q)
        seen = p > 0
        divergence = float((p[seen] * (p[seen] / q[seen]).log()).sum())
        if divergence < best:
            best, chosen = divergence, ends
    return chosen


ESTIMATORS: dict[str, Callable[[RunningHistogram, int, bool], tuple[float, float]]] = {
    "minmax": minmax,
    "l1": least_l1,
    "l2": least_l2,
    "percentile": percentile,
    "kl": least_divergence,
}
"""Estimators by name: functions from a histogram, ``levels`` and ``symmetric`` to both ends of the range."""


def estimate(
    histogram: RunningHistogram, format: IntegerFormat, estimator: str = "minmax", *, symmetric: bool = False
) -> AffineParameters:
    """Return scale and zero point for the values of a histogram; an empty one counts as all zeros.

    Raises:
        NumericsError: If there is no such estimator.
    """
    if estimator not in ESTIMATORS:
        raise NumericsError(f"no estimator {estimator!r}", where="estimator", remedy=", ".join(ESTIMATORS))
    levels = 2 * format.highest if symmetric else format.highest - format.lowest
    low, high = (0.0, 0.0) if not histogram.counts.numel() else ESTIMATORS[estimator](histogram, levels, symmetric)
    if symmetric:
        return choose_symmetric(torch.tensor(high), format)
    return choose_affine(torch.tensor(low), torch.tensor(high), format)


class _Moments:
    """Integrals of ``x^k`` over a histogram's density from minus infinity to any point, for ``k`` of 0, 1 and 2."""

    def __init__(self, histogram: RunningHistogram) -> None:
        edges = histogram.edges()
        self.total = float(histogram.total)
        # Bins of zero width (of a constant) get a positive one, so that division is possible.
        spacing = (edges[1:] - edges[:-1]).clamp(min=max(abs(histogram.low), abs(histogram.high), 1e-300) * 1e-12)
        self.begin, self.width = edges[:-1], spacing
        self.density = histogram.counts.double() / spacing
        end = self.begin + spacing
        pieces = [self.density * (end ** (k + 1) - self.begin ** (k + 1)) / (k + 1) for k in range(3)]
        self.before = [torch.cat([torch.zeros(1, dtype=torch.float64), piece.cumsum(0)]) for piece in pieces]

    def integral(self, k: int, points: Tensor) -> Tensor:
        bin_of = (torch.searchsorted(self.begin, points.contiguous(), right=True) - 1).clamp(min=0)
        begin = self.begin[bin_of]
        inside = torch.minimum((points - begin).clamp(min=0), self.width[bin_of]) + begin
        return self.before[k][bin_of] + self.density[bin_of] * (inside ** (k + 1) - begin ** (k + 1)) / (k + 1)

    def mass(self, points: Tensor) -> Tensor:
        return self.integral(0, points)

    def quantile(self, share: float) -> float:
        cumulated = self.before[0]
        bin_of = min(int(torch.searchsorted(cumulated, share * self.total, right=True)), len(self.begin)) - 1
        return float(self.begin[bin_of] + (share * self.total - cumulated[bin_of]) / self.density[bin_of])

    def error(self, low: Tensor, high: Tensor, levels: int, norm: int) -> Tensor:
        step = (high - low)[:, None] / levels
        centres = low[:, None] + step * torch.arange(levels + 1, dtype=torch.float64)
        if norm == 1:
            borders = torch.cat([centres, centres + step / 2], dim=1).sort(dim=1).values[:, :-1]
            owner = torch.arange(2 * levels + 2).div(2, rounding_mode="floor")
        else:
            borders, owner = centres[:, :-1] + step / 2, torch.arange(levels + 1)
        far = torch.full((len(low), 1), math.inf, dtype=torch.float64)
        parts = [self.integral(k, borders) for k in range(3)]
        ends = [(torch.zeros_like(far), torch.full_like(far, float(self.before[k][-1]))) for k in range(3)]
        zeroth, first, second = (torch.cat([ends[k][0], parts[k], ends[k][1]], dim=1).diff(dim=1) for k in range(3))
        centre = centres[:, owner]
        if norm == 1:
            # Between two borders, all values lie on one side of the centre: below and above it in turn.
            return (first - centre * zeroth).abs().sum(1)
        return (second - 2 * centre * first + centre**2 * zeroth).clamp(min=0).sum(1)


def _least(histogram: RunningHistogram, levels: int, symmetric: bool, norm: int) -> tuple[float, float]:
    moments = _Moments(histogram)
    low, high = minmax(histogram, levels, symmetric)
    if low == high:
        return low, high
    best = (low, high)
    noise = _NOISE * (high - low) ** norm * moments.total
    span_low, span_high = (0.0, 1.0), (0.0, 1.0)  # searched shares of both ends
    for _ in range(_ROUNDS):
        lows = torch.linspace(*span_low, _GRID, dtype=torch.float64) * low
        highs = torch.linspace(*span_high, _GRID, dtype=torch.float64) * high
        if symmetric:
            pairs = torch.stack([-highs, highs], dim=1)
        else:
            pairs = torch.cartesian_prod(lows.unique(), highs.unique())
        pairs = torch.cat([torch.tensor([best], dtype=torch.float64), pairs[pairs[:, 1] > pairs[:, 0]]])
        errors = torch.cat([moments.error(chunk[:, 0], chunk[:, 1], levels, norm) for chunk in pairs.split(256)])
        chosen = int(errors.clamp(min=noise).argmin())  # the first of equal ones, which is the previous best
        best = (float(pairs[chosen, 0]), float(pairs[chosen, 1]))
        span_low, span_high = _around(best[0], low, span_low), _around(best[1], high, span_high)
    return best


def _around(value: float, end: float, span: tuple[float, float]) -> tuple[float, float]:
    """Return the best share of an end, plus and minus one step of the grid."""
    if end == 0:
        return span
    step = (span[1] - span[0]) / (_GRID - 1)
    return max(value / end - step, 0.0), min(value / end + step, 1.0)
