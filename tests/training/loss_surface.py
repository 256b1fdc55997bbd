"""Runs whose losses lie on a surface with a known optimum for every budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cordillera.training.scaling.isoflop import IsoFlopRun

# Hoffmann et al. 2022, section 3.3.
CHINCHILLA = {"floor": 1.69, "scale_n": 406.4, "scale_d": 410.7, "a": 0.34, "b": 0.28}


def loss_of(
    parameters: float, tokens: float, *, floor: float, scale_n: float, scale_d: float, a: float, b: float
) -> float:
    """``E + A / N^a + B / D^b``."""
    return floor + scale_n / parameters**a + scale_d / tokens**b


def best_parameters(budget: float, *, scale_n: float, scale_d: float, a: float, b: float, **_: float) -> float:
    """Where that is least among all with ``6 N D = C``."""
    return (a * scale_n / (b * scale_d)) ** (1 / (a + b)) * (budget / 6) ** (b / (a + b))


def surface_runs(
    budgets: Sequence[float],
    sizes: int = 6,
    *,
    span: float = 4.0,
    noise: float = 0.0,
    seed: int = 0,
    shift: float = 1.0,
    **surface: float,
) -> list[IsoFlopRun]:
    """Sizes from ``best / span`` to ``best * span``, all times ``shift``; noise is added to losses."""
    surface = CHINCHILLA | surface
    random = np.random.default_rng(seed)
    runs = []
    for budget in budgets:
        best = shift * best_parameters(budget, **surface)
        for index, parameters in enumerate(best * np.geomspace(1 / span, span, sizes)):
            tokens = budget / 6 / parameters
            loss = loss_of(parameters, tokens, **surface) + noise * random.normal()
            count = round(parameters)
            runs.append(IsoFlopRun(f"{budget:g} {index}", budget, count, count, round(tokens), float(loss)))
    return runs
