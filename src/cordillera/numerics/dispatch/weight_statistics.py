"""Statistics of a layer's weights during training: a matrix-normal distribution, updated step by step.

As in LoKA's Probe (arXiv 2605.10886), ``W ~ MN(M, U, V)`` has a mean and two small covariances, of rows and of columns,
which are estimated by one flip-flop step for each sample and averaged exponentially.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch.row_statistics import square_root

_RIDGE = 1e-6  # ridge, relative to the mean of a covariance's diagonal
LARGEST = 4096  # largest number of rows or columns whose full covariance is kept, rather than its diagonal


class WeightStatistics:
    """Exponential averages of a weight and of the covariances of its rows and columns.

    ``vec(W - M)`` has the covariance ``V kron U``; their common scale is stored in ``V``, so that the mean of ``U``'s
    diagonal is one. Of a covariance of more than 4096 rows or columns, only the diagonal is kept. ``V`` is zero until a
    weight deviates. Then both start as multiples of the identity that count as one sample, so that the singular
    covariances of few samples do not make each other diverge.

    Args:
        momentum: Momentum of the covariances' averages, at least 0 and below 1; the first samples count evenly.
        mean_momentum: Momentum of the average of the mean ``M``, ``float32 [rows, columns]``.
        centred: Whether deviations are taken from the mean; otherwise the weight itself is a draw with mean zero.
    """

    def __init__(
        self, rows: int, columns: int, momentum: float = 0.99, mean_momentum: float = 0.99, centred: bool = True
    ) -> None:
        if min(rows, columns) < 1:
            raise NumericsError(f"a weight of {rows} x {columns}", where="WeightStatistics")
        for name, value in (("momentum", momentum), ("mean_momentum", mean_momentum)):
            if not 0 <= value < 1:
                raise NumericsError(f"{value}", where=f"WeightStatistics.{name}", remedy="from 0 to below 1")
        self.rows, self.columns, self.momentum, self.mean_momentum = rows, columns, momentum, mean_momentum
        self.centred = centred
        self.count = self.skipped = 0
        self.mean = torch.zeros(rows, columns)
        self.of_rows, self.of_columns = _unit(rows), torch.zeros_like(_unit(columns))  # U, V

    @torch.no_grad()
    def update(self, weight: Tensor) -> bool:
        """Add a weight ``[rows, columns]``; return whether it was added. One with NaN or infinity is not."""
        if tuple(weight.shape) != (self.rows, self.columns):
            raise NumericsError(
                f"a weight of {tuple(weight.shape)}, not {(self.rows, self.columns)}", where="WeightStatistics.update"
            )
        weight = weight.detach().to("cpu", torch.float32)
        if not bool(torch.isfinite(weight).all()):
            self.skipped += 1
            return False
        # the first weight only starts the mean, as it has no deviation
        if self.centred and self.count == 0:
            self.mean.copy_(weight)
            self.count = 1
            return True
        deviation = weight.double() - self.mean.double()  # in float32 it might overflow
        samples = self.count - 1 if self.centred else self.count  # number of samples in the covariances
        if bool((deviation != 0).any()):
            if not bool(self.of_columns.any()):
                self.of_columns = _unit(self.columns) * deviation.square().mean()
            spread = _times_root_of_inverse(self.of_columns, deviation)
            rows = _gram(spread, self.of_rows) / self.columns
            weighed = _times_root_of_inverse(self.of_rows, deviation.T)
            columns = _gram(weighed, self.of_columns) / self.rows
            kept = min(self.momentum, (samples + 1) / (samples + 2))
            self.of_rows = kept * self.of_rows + (1 - kept) * rows
            self.of_columns = kept * self.of_columns + (1 - kept) * columns
            scale = _diagonal(self.of_rows).mean()
            self.of_rows, self.of_columns = self.of_rows / scale, self.of_columns * scale
        if self.centred:
            kept = min(self.mean_momentum, self.count / (self.count + 1))
            self.mean.mul_(kept).add_(weight, alpha=1 - kept)
        self.count += 1
        return True

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw weights ``float32 [count, rows, columns]``, by a generator on the CPU; None for the global one."""
        if self.count < (2 if self.centred else 1):
            raise NumericsError(
                f"statistics of {self.count} weights say nothing of a distribution", where="WeightStatistics.sample",
                remedy="probe at more than one step",
            )  # fmt: skip
        drawn = torch.randn(count, self.rows, self.columns, generator=generator, dtype=torch.float64)
        left, right = _root(self.of_rows), _root(self.of_columns)
        drawn = left.unsqueeze(-1) * drawn if left.ndim == 1 else left @ drawn
        drawn = drawn * right if right.ndim == 1 else drawn @ right.T
        return (drawn + self.mean).float()

    def memory_bytes(self) -> int:
        """Return the number of bytes of the mean and both covariances."""
        return sum(t.numel() * t.element_size() for t in (self.mean, self.of_rows, self.of_columns))

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state as tensors and plain numbers."""
        return {
            "rows": self.rows,
            "columns": self.columns,
            "momentum": self.momentum,
            "mean_momentum": self.mean_momentum,
            "centred": self.centred,
            "count": self.count,
            "skipped": self.skipped,
            "mean": self.mean.clone(),
            "of_rows": self.of_rows.clone(),
            "of_columns": self.of_columns.clone(),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> WeightStatistics:
        """Restore the result of :meth:`state_dict`; raise an error for other shapes, NaN or infinity."""
        found = cls(
            int(state["rows"]), int(state["columns"]), float(state["momentum"]), float(state["mean_momentum"]),
            bool(state["centred"]),
        )  # fmt: skip
        found.count, found.skipped = int(state["count"]), int(state["skipped"])
        for name in ("mean", "of_rows", "of_columns"):
            own, part = getattr(found, name), state[name]
            if part.shape != own.shape or not bool(torch.isfinite(part).all()):
                raise NumericsError(
                    f"expected {list(own.shape)} finite numbers, got {list(part.shape)}, or some are not finite",
                    where=f"WeightStatistics: {name}",
                )
            own.copy_(part)
        return found


def _unit(size: int) -> Tensor:
    """Return the identity, or only its diagonal if the matrix would be large."""
    return torch.ones(size, dtype=torch.float64) if size > LARGEST else torch.eye(size, dtype=torch.float64)


def _diagonal(covariance: Tensor) -> Tensor:
    return covariance if covariance.ndim == 1 else covariance.diagonal()


def _root(covariance: Tensor) -> Tensor:
    return covariance.clamp(min=0).sqrt() if covariance.ndim == 1 else square_root(covariance)


def _times_root_of_inverse(covariance: Tensor, deviation: Tensor) -> Tensor:
    """Return ``deviation @ inverse(root).T`` for ``covariance = root @ root.T``."""
    ridge = _RIDGE * float(_diagonal(covariance).mean())
    if covariance.ndim == 1:
        return deviation / (covariance + ridge).sqrt()
    root = square_root(covariance + ridge * torch.eye(len(covariance), dtype=covariance.dtype))
    return torch.linalg.solve_triangular(root, deviation.T, upper=False).T


def _gram(spread: Tensor, like: Tensor) -> Tensor:
    """Return ``spread @ spread.T``, or its diagonal if ``like`` is a diagonal."""
    return spread.square().sum(1) if like.ndim == 1 else spread @ spread.T
