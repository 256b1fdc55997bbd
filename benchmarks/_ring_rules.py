"""Rules by which the paper chooses between passing keys and values or queries around the ring, as a baseline.

Source: Yang et al. 2024, Context Parallelism for Scalable Million-Token Inference (arXiv 2411.01783), section 3.5,
algorithms 1 and 5, and appendix D.
"""

from __future__ import annotations

import math

from cordillera.distributed.context.ring_cost import AttentionShape, Transport
from cordillera.errors import PlanError


def algorithm_1(
    new: int, cached: int, *, shape: AttentionShape, ranks: int, flops_per_s: float, bytes_per_s: float
) -> Transport:
    """Apply the paper's rule: ``pass_kv`` if it hides behind attention (equation 2) or has the smaller message.

    Args:
        new: Number of tokens of the turn, 1 or more.
        cached: Number of tokens before it.
        shape: Heads of the layer on one device.
        ranks: Number of ranks of context parallelism.
        flops_per_s: Operations per second of a device in attention.
        bytes_per_s: Bytes per second of a device between ranks.

    Raises:
        PlanError: If there is no new token, or a rate is not above 0.
    """
    _check(new, cached, flops_per_s, bytes_per_s)
    smaller = 2 * shape.kv_heads / shape.heads
    hidden = new >= _hidden_from(shape, ranks, flops_per_s, bytes_per_s)
    return "pass_kv" if hidden or new / (new + cached) >= smaller else "pass_q"


def algorithm_5(
    new: int, cached: int, *, shape: AttentionShape, ranks: int, flops_per_s: float, bytes_per_s: float
) -> Transport:
    """Apply :func:`algorithm_1` with the return of partial outputs added to the cost of ``pass_q``.

    Arguments and errors are the same.
    """
    _check(new, cached, flops_per_s, bytes_per_s)
    way_home = 4 * new * bytes_per_s / (ranks * flops_per_s * shape.element_bytes)
    hidden = new >= _hidden_from(shape, ranks, flops_per_s, bytes_per_s)
    rest = 2 * shape.kv_heads / shape.heads - way_home
    return "pass_kv" if hidden or new / (new + cached) >= rest else "pass_q"


def empirical(new: int, cached: int, *, alpha: float = -1.059, beta: float = 1.145, gamma: float = 12.112) -> Transport:
    """Apply appendix D: ``pass_kv`` if ``alpha ln T + beta ln(T / (T + P)) + gamma > 0``, or nothing is cached.

    The published constants hold only for the lengths that they were fitted to: for turns in 128,000 tokens they always
    choose queries, in contradiction to the paper's own times.

    Args:
        new: Number ``T`` of tokens of the turn, 1 or more.
        cached: Number ``P`` of tokens before it.
        alpha: Coefficient of the logarithm of new tokens.
        beta: Coefficient of the logarithm of their share.
        gamma: Constant term.

    Raises:
        PlanError: If there is no new token.
    """
    _check(new, cached, 1.0, 1.0)
    score = alpha * math.log(new) + beta * math.log(new / (new + cached)) + gamma
    return "pass_kv" if score > 0 or not cached else "pass_q"


def _hidden_from(shape: AttentionShape, ranks: int, flops_per_s: float, bytes_per_s: float) -> float:
    """Return the number of new tokens from which a step's attention takes longer than its message (equation 2)."""
    return ranks * flops_per_s * shape.kv_heads * shape.element_bytes / (2 * shape.heads * bytes_per_s)


def _check(new: int, cached: int, flops_per_s: float, bytes_per_s: float) -> None:
    if new < 1 or cached < 0:
        raise PlanError(f"{new} new tokens after {cached}", where="turn", remedy="one or more, after 0 or more")
    for name, rate in (("flops_per_s", flops_per_s), ("bytes_per_s", bytes_per_s)):
        if not (math.isfinite(rate) and rate > 0):
            raise PlanError(f"is {rate}", where=name, remedy="a finite number above 0")
