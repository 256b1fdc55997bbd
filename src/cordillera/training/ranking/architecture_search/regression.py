"""Gaussian process regression of a few hundred results, for searchers."""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy import linalg, special
from scipy.spatial.distance import cdist

_LENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0)
_NOISES = (1e-4, 1e-2, 1e-1)


class GaussianProcess:
    """Gaussian process with a squared exponential kernel; length and noise maximise the marginal likelihood.

    Source: Rasmussen and Williams 2006, algorithm 2.1.

    Args:
        x: Inputs ``[n, features]``.
        y: Values ``[n]``; they are standardised inside.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.mean = x, float(y.mean())
        self.scale = float(y.std()) or 1.0
        standard = (y - self.mean) / self.scale
        distances = cdist(x, x)
        best = -math.inf
        for length, noise in itertools.product(_LENGTHS, _NOISES):
            factor = linalg.cholesky(_kernel(distances, length) + noise * np.eye(len(x)), lower=True)
            weights = linalg.cho_solve((factor, True), standard)
            evidence = -0.5 * float(standard @ weights) - float(np.log(np.diag(factor)).sum())
            if evidence > best:
                best, self.length, self._factor, self._weights = evidence, length, factor, weights

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return means and standard deviations ``[m]`` of the noiseless values at inputs ``[m, features]``."""
        kernel = _kernel(cdist(x, self.x), self.length)
        half = linalg.solve_triangular(self._factor, kernel.T, lower=True)
        variance = np.maximum(1.0 - np.square(half).sum(0), 1e-12)
        return self.mean + self.scale * (kernel @ self._weights), self.scale * np.sqrt(variance)


def _kernel(distances: np.ndarray, length: float) -> np.ndarray:
    return np.exp(-0.5 * np.square(distances / length))


def expected_improvement(mean: np.ndarray, deviation: np.ndarray, best: float) -> np.ndarray:
    """Return by how much values of these means and standard deviations are expected to be below ``best``.

    An infinite ``best`` gives the negative means, for which no result is known to compare with.
    """
    if math.isinf(best):
        return -mean
    z = (best - mean) / deviation
    density = np.exp(-0.5 * np.square(z)) / math.sqrt(2 * math.pi)
    return (best - mean) * special.ndtr(z) + deviation * density
