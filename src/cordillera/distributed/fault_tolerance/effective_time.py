"""Closed forms of the share of time in which a job does useful work.

Source: Kokolis et al. 2024 (arXiv 2410.21680), for the effective training time with checkpoints.
"""

from __future__ import annotations

import math

from cordillera.errors import PlanError


def effective_with_checkpoints(between_s: float, recovery_s: float, interval_s: float, save_s: float) -> float:
    """Return the expected share of useful time of a job that restarts from its last checkpoint after each failure.

    Args:
        between_s: Mean seconds between failures.
        recovery_s: Seconds from a failure to the first new step.
        interval_s: Seconds of training between checkpoints.
        save_s: Seconds for which a checkpoint stops training.
    """
    lost = (recovery_s + interval_s / 2) / between_s
    return max(0.0, 1 - lost) / (1 + save_s / interval_s)


def best_checkpoint_interval(between_s: float, save_s: float) -> float:
    """Return the seconds of training between checkpoints that lose least time, to first order."""
    if save_s <= 0:
        raise PlanError(f"a checkpoint stops training for {save_s} s", remedy="choose a number above 0")
    return math.sqrt(2 * save_s * between_s)


def effective_with_replicas(between_s: float, stall_s: float, absent_s: float, replicas: int) -> float:
    """Return the share of useful time if a failure stops all for ``stall_s``, and one replica until ``absent_s``.

    Failures are taken one at a time: of the seconds between two, all are idle for ``stall_s``, and one of the
    replicas for what is left of ``absent_s``. If failures come faster than that, the share is 0.
    """
    return max(0.0, 1 - stall_s / between_s - (absent_s - stall_s) / between_s / replicas)
