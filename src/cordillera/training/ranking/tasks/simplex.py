"""Weights of tasks from the products of their gradients: small convex problems on the simplex."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_CLOSE = 1e-13  # relative difference below which products are equal
_NEWTON_STEPS = 200


def min_norm_weights(products: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the convex combination of vectors that has the smallest norm.

    Wolfe's algorithm (Finding the nearest point in a polytope, 1976), on inner products: it ends after finitely many
    steps, with two vectors in closed form.

    Args:
        products: Inner products ``[n, n]`` of the vectors, symmetric and positive semidefinite.

    Returns:
        Weights ``[n]``, at least 0, with the sum 1.
    """
    count = len(products)
    size = float(products.diagonal().max())
    if size <= 0.0:
        return np.full(count, 1 / count)
    first = int(products.diagonal().argmin())
    weights: NDArray[np.float64] = np.zeros(count)
    chosen = [first]
    weights[first] = 1.0
    for _ in range(10 * count * count):
        slopes = products @ weights
        entering = int(slopes.argmin())
        if entering in chosen or slopes[entering] >= weights @ slopes - _CLOSE * size:
            break
        chosen.append(entering)
        while True:
            found = _affine_weights(products[np.ix_(chosen, chosen)])
            if found.min() > _CLOSE:
                weights[:] = 0.0
                weights[chosen] = found
                break
            held = weights[chosen]
            falling = found <= _CLOSE
            reach = float((held[falling] / np.maximum(held[falling] - found[falling], 1e-300)).min())
            held += min(reach, 1.0) * (found - held)
            weights[:] = 0.0
            chosen = [one for one, weight in zip(chosen, held, strict=True) if weight > _CLOSE]
            weights[chosen] = held[held > _CLOSE]
    return weights / weights.sum()


def _affine_weights(products: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the combination of smallest norm whose weights have the sum 1, of any sign."""
    count = len(products)
    scale = float(products.diagonal().max()) or 1.0
    system = np.ones((count + 1, count + 1))
    system[:count, :count], system[count, count] = products / scale, 0.0
    right = np.zeros(count + 1)
    right[count] = 1.0
    return np.asarray(np.linalg.lstsq(system, right, rcond=1e-14)[0][:count], dtype=np.float64)


def preferred_weights(
    products: NDArray[np.float64], preference: NDArray[np.float64], strength: float
) -> NDArray[np.float64]:
    """Compute the convex combination that is short, and whose weights are near a ``preference``.

    It minimises half the squared norm plus ``strength`` times the Kullback-Leibler divergence of the weights from the
    preference, by Newton's method.

    Args:
        products: Inner products ``[n, n]`` of the vectors, symmetric and positive semidefinite.
        preference: Weights ``[n]`` above 0 with the sum 1.
        strength: Weight of the divergence, above 0.

    Returns:
        Weights ``[n]`` above 0 with the sum 1.
    """
    count = len(products)

    def value(weights: NDArray[np.float64]) -> float:
        return float(0.5 * weights @ products @ weights + strength * (weights * np.log(weights / preference)).sum())

    weights = preference.copy()
    system = np.ones((count + 1, count + 1))
    system[count, count] = 0.0
    for _ in range(_NEWTON_STEPS):
        slopes = products @ weights + strength * np.log(weights / preference)
        system[:count, :count] = products + np.diag(strength / weights)
        step = np.linalg.solve(system, np.append(-slopes, 0.0))[:count]
        falling = step < 0
        length = min(1.0, 0.99 * float((-weights[falling] / step[falling]).min())) if falling.any() else 1.0
        present = value(weights)
        while length > 1e-12 and value(weights + length * step) > present:
            length /= 2
        weights = weights + length * step
        if length <= 1e-12 or float(np.abs(step).max()) < 1e-14:
            break
    return weights / weights.sum()
