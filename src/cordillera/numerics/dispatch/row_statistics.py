"""Mean and covariance of a layer's input rows, gathered batch by batch in bounded memory.

As in LoKA's Probe (arXiv 2605.10886), the rows of a recommendation batch are independent, so ``N(mean, covariance)``
describes a layer's input. Statistics of parts merge to those of the whole, in any split and over ranks.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch.quantile_sketch import Marginals, QuantileSketch

FULL_UP_TO, BLOCK, BLOCKS_UP_TO = 2048, 512, 16_384
SKETCH = 64  # columns
_CHUNK = 4096  # number of rows that are centred at once
# Largest values for which sums of products over a chunk stay within float32 and within float64.
_SINGLE_UP_TO, _DOUBLE_UP_TO = 2.0**40, 2.0**450
_TRIES = 6


class Tier(str, enum.Enum):
    """Kept part of a covariance: all of it, blocks of 512 features, the diagonal and a sketch, or the diagonal alone.

    The sketch is the product with 64 random vectors.
    """

    full = "full"
    blocks = "blocks"
    sketch = "sketch"
    diagonal = "diagonal"

    @classmethod
    def of(cls, features: int) -> Tier:
        """Return the tier that bounds the memory for a number of features."""
        if features <= FULL_UP_TO:
            return cls.full
        return cls.blocks if features <= BLOCKS_UP_TO else cls.sketch


class RowStatistics:
    """Count, mean and scatter of rows, by Welford's update for batches.

    Sums are float64. Products of centred float32 rows are float32 within a chunk of 4096 rows, unless values beyond
    2^40 might make them overflow.

    Args:
        features: Number ``K`` of columns.
        tier: Kept part of the covariance; None for the one that ``features`` allows.
        marginals: Whether to keep quantiles too, so that rows are drawn by a Gaussian copula; ignored above 2048
            features or with less than a full covariance.

    Attributes:
        skipped: Number of batches left out because they held NaN, infinity, or values beyond 2^450.
        mean: Mean of the rows, ``float64 [K]``.
        seconds: Time that this process has spent in :meth:`update`.
    """

    def __init__(
        self, features: int, tier: Tier | None = None, device: torch.device | str = "cpu", marginals: bool = False
    ) -> None:
        if features < 1:
            raise NumericsError(f"rows of {features} features", where="RowStatistics")
        self.features, self.tier = features, Tier(tier) if tier else Tier.of(features)
        self.count = self.skipped = 0
        self.seconds = 0.0
        self.marginals: QuantileSketch | None = None
        self._copula: tuple[int, Marginals, Tensor] | None = None
        if marginals and self.tier is Tier.full and features <= FULL_UP_TO:
            self.marginals = QuantileSketch(features)
        self.mean = torch.zeros(features, dtype=torch.float64, device=device)
        self._scatter = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in self._shapes()]

    def _shapes(self) -> list[tuple[int, ...]]:
        k = self.features
        if self.tier is Tier.full:
            return [(k, k)]
        if self.tier is Tier.blocks:
            sizes = [min(BLOCK, k - start) for start in range(0, k, BLOCK)]
            return [(size, size) for size in sizes]
        # the diagonal, then the product with the sketch
        return [(k,)] if self.tier is Tier.diagonal else [(k,), (k, min(SKETCH, k))]

    def _sketch(self) -> Tensor:
        """Return random vectors ``[K, 64]``, the same in every process."""
        generator = torch.Generator().manual_seed(20_260_510)
        return torch.randn(self.features, min(SKETCH, self.features), generator=generator).to(self.mean.device)

    def _products(self, left: Tensor, right: Tensor) -> list[Tensor]:
        """Return the kept part of ``left.T @ right``, both ``[B, K]``."""
        if self.tier is Tier.full:
            return [left.T @ right]
        if self.tier is Tier.blocks:
            pairs = zip(left.split(BLOCK, 1), right.split(BLOCK, 1), strict=True)
            return [a.T @ b for a, b in pairs]
        diagonal = (left * right).sum(0)
        if self.tier is Tier.diagonal:
            return [diagonal]
        return [diagonal, left.T @ (right @ self._sketch().to(right.dtype))]

    @torch.no_grad()
    def update(self, rows: Tensor) -> bool:
        """Add a batch ``[..., K]``; return whether it was added.

        A batch with NaN, infinity, or numbers whose squares float64 cannot sum is left out whole and counted in
        ``skipped``. Autocast and emulated number formats do not apply to these sums.
        """
        began = time.perf_counter()
        with _disable_current_modes(), torch.autocast(rows.device.type, enabled=False):
            taken = self._update(rows)
        self.seconds += time.perf_counter() - began
        return taken

    def _update(self, rows: Tensor) -> bool:
        rows = rows.detach().reshape(-1, rows.shape[-1])
        if rows.shape[1] != self.features:
            raise NumericsError(f"rows of {rows.shape[1]} features, not {self.features}", where="RowStatistics.update")
        if not len(rows):
            return True
        largest = float(torch.stack(torch.aminmax(rows)).double().abs().max())
        if not largest <= _DOUBLE_UP_TO:
            self.skipped += 1
            return False
        for part in rows.to(self.mean.device).split(_CHUNK):
            wide = part.dtype == torch.float64 or largest > _SINGLE_UP_TO
            # Subtracting a row first keeps float32 precise if deviations are small compared with the mean.
            origin = part[0].double()
            centred = part.double() - origin if wide else (part.float() - origin.float())
            shift = centred.mean(0, dtype=torch.float64)
            centred = centred - shift.to(centred.dtype)
            self._absorb(len(part), origin + shift, [p.double() for p in self._products(centred, centred)])
        if self.marginals is not None:
            self.marginals.update(rows)
        return True

    def merge(self, other: RowStatistics) -> None:
        """Add other statistics of the same features and tier; empty ones adopt quantiles from ``other``."""
        if (self.marginals is None) != (other.marginals is None):
            if self.count or other.marginals is None:
                raise NumericsError("statistics with and without quantiles do not merge", where="RowStatistics.merge")
            self.marginals = QuantileSketch(self.features)
        if (other.features, other.tier) != (self.features, self.tier):
            raise NumericsError(
                f"statistics of {other.features} features ({other.tier.value}) do not merge with those of "
                f"{self.features} ({self.tier.value})",
                where="RowStatistics.merge",
            )
        self.skipped += other.skipped
        if self.marginals is not None and other.marginals is not None:
            self.marginals.merge(other.marginals)
        if other.count:
            device = self.mean.device
            self._absorb(other.count, other.mean.to(device), [part.to(device) for part in other._scatter])

    def _absorb(self, count: int, mean: Tensor, scatter: list[Tensor]) -> None:
        total = self.count + count
        delta = (mean - self.mean).unsqueeze(0)
        between = self._products(delta, delta)
        weight = self.count * count / total
        for own, new, gap in zip(self._scatter, scatter, between, strict=True):
            own.add_(new).add_(gap, alpha=weight)
        self.mean += delta[0] * (count / total)
        self.count = total

    def variance(self) -> Tensor:
        """Return the variance ``float64 [K]``; zeros before two rows were seen."""
        if self.tier in (Tier.sketch, Tier.diagonal):
            diagonal = self._scatter[0]
        else:
            diagonal = torch.cat([part.diagonal() for part in self._scatter])
        return diagonal / max(1, self.count - 1)

    def covariance(self) -> Tensor:
        """Return the kept covariance, ``float64 [K, K]``; of a sketch, Nystrom's with the true diagonal."""
        if self.tier is Tier.diagonal:
            return torch.diag(self.variance())
        if self.tier is Tier.sketch:
            factor, rest = self._nystrom()
            return factor @ factor.T + torch.diag(rest)
        found = torch.block_diag(*self._scatter) / max(1, self.count - 1)
        return (found + found.T) / 2

    def _nystrom(self) -> tuple[Tensor, Tensor]:
        """Return ``factor [K, r]`` and ``rest [K]``, with the covariance about ``factor @ factor.T + diag(rest)``."""
        degrees = max(1, self.count - 1)
        diagonal, product = self._scatter[0] / degrees, self._scatter[1] / degrees
        inner = self._sketch().double().T @ product
        values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
        kept = values > values.max().clamp(min=0) * 1e-10
        factor = product @ (vectors[:, kept] / values[kept].sqrt())
        rest = (diagonal - factor.square().sum(1)).clamp(min=0)
        return factor, rest

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw rows ``float32 [count, K]`` from a normal distribution, or a Gaussian copula if there are quantiles.

        Args:
            generator: Generator on the CPU; None for the global one.
        """
        if self.count < 2:
            raise NumericsError(
                f"statistics of {self.count} rows say nothing of a distribution", where="RowStatistics.sample",
                remedy="gather at least two rows",
            )  # fmt: skip
        device = self.mean.device

        def normal(columns: int) -> Tensor:
            return torch.randn(count, columns, generator=generator, dtype=torch.float64).to(device)

        if self.marginals is not None:
            return self._sample_copula(normal(self.features))
        if self.tier is Tier.diagonal:
            drawn = normal(self.features) * self.variance().sqrt()
        elif self.tier is Tier.sketch:
            factor, rest = self._nystrom()
            drawn = normal(factor.shape[1]) @ factor.T + normal(self.features) * rest.sqrt()
        else:
            roots = [square_root(part / (self.count - 1)) for part in self._scatter]
            drawn = torch.cat([normal(len(root)) @ root.T for root in roots], 1)
        return (drawn + self.mean).float()

    def _sample_copula(self, normal: Tensor) -> Tensor:
        assert self.marginals is not None
        values = Marginals(self.marginals)
        root = square_root(values.correlations_of_normals(self.covariance().cpu()))
        root = root / root.square().sum(1, keepdim=True).sqrt().clamp(
            min=1e-300
        )  # restores the diagonal after clipping
        return values(normal.cpu() @ root.T).to(self.mean.device)

    def memory_bytes(self) -> int:
        """Return the bytes of the mean, the kept covariance and the quantiles."""
        own = sum(tensor.nbytes for tensor in [self.mean, *self._scatter])
        return own + (0 if self.marginals is None else self.marginals.memory_bytes())

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state as tensors and plain numbers."""
        state: dict[str, Any] = {
            "features": self.features,
            "tier": self.tier.value,
            "count": self.count,
            "skipped": self.skipped,
            "mean": self.mean.clone(),
            "scatter": [part.clone() for part in self._scatter],
        }
        return state if self.marginals is None else {**state, "marginals": self.marginals.state_dict()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device | str = "cpu") -> RowStatistics:
        """Restore the result of :meth:`state_dict`; raise an error for other shapes, NaN or infinity."""
        found = cls(int(state["features"]), Tier(state["tier"]), device)
        found.count, found.skipped = int(state["count"]), int(state["skipped"])
        for own, part in zip([found.mean, *found._scatter], [state["mean"], *state["scatter"]], strict=True):
            if part.shape != own.shape or not bool(torch.isfinite(part).all()):
                raise NumericsError(
                    f"expected {list(own.shape)} finite numbers, got {list(part.shape)}, or some are not finite",
                    where="RowStatistics",
                )
            own.copy_(part)
        if "marginals" in state:
            found.marginals = QuantileSketch.from_state_dict(state["marginals"])
        return found


def square_root(covariance: Tensor) -> Tensor:
    """Return ``root`` with ``root @ root.T`` about the covariance, by Cholesky with a growing ridge if it is singular.

    If Cholesky fails six times, eigenvalues are used, with negative ones set to zero.
    """
    covariance = (covariance + covariance.T) / 2
    size = len(covariance)
    scale = float(covariance.diagonal().sum()) / size
    if not scale > 0:
        return torch.zeros_like(covariance)
    ridge = 1e-12 * scale
    unit = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    for _ in range(_TRIES):
        root, failed = torch.linalg.cholesky_ex(covariance + ridge * unit)
        if not int(failed):
            return root
        ridge *= 10
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt()
