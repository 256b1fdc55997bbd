"""Cost of collectives in seconds.

The closed forms follow the alpha-beta model (Hockney 1994; Thakur et al. 2005): a step costs a latency plus its bytes
divided by a rate. They need no list of transfers, so they price a ring over a hundred thousand ranks immediately.
"""

from __future__ import annotations

import math


def _check_amounts(**amounts: float) -> None:
    for name, value in amounts.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}; it must be finite and at least 0")


def _check(n: int, num_bytes: float, latency: float, rate: float) -> None:
    if n < 1:
        raise ValueError(f"n is {n}; a collective needs at least 1 rank")
    _check_amounts(num_bytes=num_bytes, latency=latency)
    if not rate > 0:
        raise ValueError(f"rate is {rate}; it must be positive")


def ring_seconds(n: int, num_bytes: float, latency: float, rate: float) -> float:
    """Return the seconds of an all-gather or reduce-scatter around a ring, or a pairwise all-to-all.

    The cost is ``(n - 1) (a + S / (n B))``.

    Args:
        n: Number of ranks.
        num_bytes: ``S``, bytes: the gathered result, the vector to be scattered, or all blocks of one rank.
        latency: ``a``, seconds, of the slowest edge of the ring, because every step waits for it.
        rate: ``B``, bytes/s that a rank sends and receives at the same time.

    Raises:
        ValueError: If an argument is negative or NaN, ``n`` is below 1 or ``rate`` is 0.
    """
    _check(n, num_bytes, latency, rate)
    return (n - 1) * (latency + num_bytes / n / rate)


def doubling_seconds(n: int, num_bytes: float, latency: float, rate: float) -> float:
    """Return the seconds of an all-gather by doubling or a reduce-scatter by halving.

    The cost is ``ceil(log2 n) a + (n - 1) / n S / B`` for any ``n``. The arguments ``n``, ``num_bytes`` (``S``),
    ``latency`` (``a``) and ``rate`` (``B``), and errors, are those of :func:`ring_seconds`.
    """
    _check(n, num_bytes, latency, rate)
    return (n - 1).bit_length() * latency + (n - 1) / n * num_bytes / rate


def direct_seconds(n: int, num_bytes: float, latency: float, rate: float, overhead: float = 0.0) -> float:
    """Return the seconds of an all-gather, reduce-scatter or all-to-all in one step.

    The cost is ``a + (n - 2) o + (n - 1) / n S / B``. The arguments ``n``, ``num_bytes`` (``S``) and ``latency``
    (``a``), and errors, are those of :func:`ring_seconds`.

    Args:
        rate: ``B``, bytes/s that a rank sends, and receives, to and from all others together.
        overhead: ``o``, seconds to issue each message after the first. With 0, no other algorithm is cheaper on a
            uniform network; real network cards and their software are slower.
    """
    _check(n, num_bytes, latency, rate)
    _check_amounts(overhead=overhead)
    return 0.0 if n == 1 else latency + (n - 2) * overhead + (n - 1) / n * num_bytes / rate
