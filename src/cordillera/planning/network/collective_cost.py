"""Cost of collectives in seconds: closed forms, and the cost of any plan on any network.

The closed forms follow the alpha-beta model (Hockney 1994; Thakur et al. 2005): a step costs a latency plus its bytes
divided by a rate. They need no list of transfers, so they price a ring over a hundred thousand ranks immediately. For
few ranks, :func:`plan_seconds` computes the same numbers from the transfers themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cordillera.errors import PlanError
from cordillera.planning.network.collective_plans import CollectivePlan, PlanStep
from cordillera.planning.network.flows import Flow, finish_times


class Network(Protocol):
    """The network on which a plan is priced, such as a :class:`~cordillera.topology.Topology`."""

    @property
    def capacities(self) -> NDArray[np.float64]:
        """Capacity of each resource, bytes/s: ``[R]``."""

    def route(self, source: int, target: int, /) -> tuple[tuple[int, ...], float]:
        """Return the resources from the rank ``source`` to the rank ``target``, and the one-way latency in seconds."""


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


def plan_seconds(plan: CollectivePlan, num_bytes: float, network: Network, *, message_overhead: float = 0.0) -> float:
    """Return the seconds until the last rank is done with a plan on a network.

    All transfers of a step share the resources of the network max-min fairly; a transfer takes its latency plus the
    time for its bytes. A rank begins a step when all transfers of earlier steps that it sends or receives are done.
    Ranks that exchange nothing do not wait for one another, and a plan in which every rank takes part in every step
    costs the sum of the slowest transfers of its steps.

    Args:
        plan: A verified plan.
        num_bytes: Bytes of the largest buffer of a rank: the vector of an all-reduce, the result of an all-gather, or
            all blocks of one rank in an all-to-all.
        network: Network with the ranks of the plan.
        message_overhead: Seconds to issue each message that a rank sends in a step after the first.

    Raises:
        PlanError: If a transfer crosses a resource without capacity.
        ValueError: If ``num_bytes`` or ``message_overhead`` is negative or not finite.
    """
    _check_amounts(num_bytes=num_bytes, message_overhead=message_overhead)
    unit = num_bytes / plan.buffer_size
    ready = np.zeros(plan.ranks)
    known: dict[tuple[tuple[int, int, int], ...], NDArray[np.float64]] = {}
    for s, step in enumerate(plan.steps):
        sources = np.array([sent.source for sent in step])
        targets = np.array([sent.target for sent in step])
        # Most algorithms repeat a step with other chunks of the same size.
        key = tuple((sent.source, sent.target, sum(plan.chunks[c].size for c in sent.chunks)) for sent in step)
        if key not in known:
            sizes = [size * unit for _, _, size in key]
            known[key] = _durations(step, sizes, network, f"{plan.name}, step {s}")
            known[key] += message_overhead * np.maximum(np.bincount(sources) - 1, 0)[sources]
        done = np.maximum(ready[sources], ready[targets]) + known[key]
        np.maximum.at(ready, sources, done)
        np.maximum.at(ready, targets, done)
    return float(ready.max())


def _durations(step: PlanStep, sizes: Sequence[float], network: Network, where: str) -> NDArray[np.float64]:
    flows = []
    for sent, size in zip(step, sizes, strict=True):
        path, latency = network.route(sent.source, sent.target)
        flows.append(Flow(size, path, latency=latency))
    try:
        return finish_times(flows, network.capacities)
    except PlanError as error:
        sent = step[int(str(error.where).removeprefix("flow "))]
        where += f", rank {sent.source} to rank {sent.target}"
        raise PlanError(error.what, where=where, remedy=error.remedy) from error
