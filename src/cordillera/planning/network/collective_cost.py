"""Cost of collectives in seconds: closed forms, the cost of any plan on any network, and the cheapest algorithm.

The closed forms follow the alpha-beta model (Hockney 1994; Thakur et al. 2005): a step costs a latency plus its bytes
divided by a rate. They need no list of transfers, so they price a ring over a hundred thousand ranks immediately. For
few ranks, :func:`plan_seconds` computes the same numbers from the transfers themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cordillera.errors import PlanError
from cordillera.planning.network.collective_algorithms import check_domains, tree_broadcast
from cordillera.planning.network.collective_plans import CollectivePlan, PlanStep
from cordillera.planning.network.flows import Flow, FlowLink, finish_times

_ROUNDING = 1e-12  # relative difference below which two costs are equal


class Network(Protocol):
    """The network on which a plan is priced."""

    @property
    def capacities(self) -> NDArray[np.float64]:
        """Capacity of each resource, bytes/s: ``[R]``."""

    def route(self, source: int, target: int) -> tuple[tuple[int, ...], float]:
        """Return the indices of the resources that a transfer uses, and its one-way latency in seconds.

        Args:
            source: Rank that sends.
            target: Rank that receives.
        """


@dataclass(frozen=True)
class DomainNetwork:
    """Ranks grouped in domains, such as buildings, whose ranks share an uplink and a downlink.

    Every rank sends at ``inner.rate`` in total and receives as much at the same time. The uplink and the downlink of a
    domain each carry ``cross.rate`` for each of its ranks: a rank gets that rate when all of them send across, and up
    to ``inner.rate`` when few do.

    Attributes:
        sizes: Number of ranks of each domain; ranks are numbered domain after domain.
        inner: Link between ranks of one domain.
        cross: Link between ranks of different domains; None is allowed with one domain only.
    """

    sizes: tuple[int, ...]
    inner: FlowLink
    cross: FlowLink | None = None

    def __post_init__(self) -> None:
        _check_network(self.sizes, self.inner, self.cross)

    @cached_property
    def capacities(self) -> NDArray[np.float64]:
        """Egress and ingress of each rank, then uplink and downlink of each domain, bytes/s: ``[R]``."""
        cards = [self.inner.rate] * (2 * sum(self.sizes))
        uplinks = [size * (self.cross or self.inner).rate for size in self.sizes]
        return np.array([*cards, *uplinks, *uplinks], dtype=np.float64)

    @cached_property
    def _domain(self) -> list[int]:
        return [k for k, size in enumerate(self.sizes) for _ in range(size)]

    def route(self, source: int, target: int) -> tuple[tuple[int, ...], float]:
        """Return the resources on the way from one rank to another, and the one-way latency in seconds.

        The resources are two network cards and, between domains, an uplink and a downlink.

        Args:
            source: Rank that sends.
            target: Rank that receives.
        """
        ranks, domains = len(self._domain), len(self.sizes)
        cards = source, ranks + target
        home, away = self._domain[source], self._domain[target]
        if home == away:
            return cards, self.inner.latency
        assert self.cross is not None  # checked at construction
        return (*cards, 2 * ranks + home, 2 * ranks + domains + away), self.cross.latency


class AlgorithmChoice(NamedTuple):
    """The cheapest algorithm and its cost.

    Attributes:
        algorithm: Name of the algorithm.
        seconds: Cost in seconds.
    """

    algorithm: str
    seconds: float


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


def _check_network(sizes: Sequence[int], inner: FlowLink, cross: FlowLink | None) -> None:
    check_domains(sizes)
    for name, link in (("inner", inner), ("cross", cross)):
        if link is not None:
            if not (math.isfinite(link.latency) and link.latency >= 0):
                raise ValueError(f"the {name} latency is {link.latency}; it must be finite and at least 0")
            if not link.rate > 0:
                raise ValueError(f"the {name} rate is {link.rate}; it must be positive")
    if len(sizes) > 1 and cross is None:
        raise ValueError(f"{len(sizes)} domains need a cross link between them")


def ring_seconds(n: int, num_bytes: float, latency: float, rate: float) -> float:
    """Price an all-gather or reduce-scatter around a ring, or a pairwise all-to-all.

    The cost is ``(n - 1) (a + S / (n B))``.

    Args:
        n: Number of ranks.
        num_bytes: ``S``, bytes: the gathered result, the vector to be scattered, or all blocks of one rank.
        latency: ``a``, seconds, of the slowest edge of the ring, because every step waits for it.
        rate: ``B``, bytes/s that a rank sends and receives at the same time.

    Returns:
        Seconds.

    Raises:
        ValueError: If an argument is negative or NaN, ``n`` is below 1 or ``rate`` is 0.
    """
    _check(n, num_bytes, latency, rate)
    return (n - 1) * (latency + num_bytes / n / rate)


def bidirectional_ring_seconds(n: int, num_bytes: float, latency: float, rate: float, overhead: float = 0.0) -> float:
    """Price an all-gather or reduce-scatter in both directions of a ring.

    The cost is ``ceil((n - 1) / 2) a + (n - 1) / n S / B``: half of the steps of a ring, each with twice the bytes.

    Args:
        n: Number of ranks.
        num_bytes: ``S``, bytes, as in :func:`ring_seconds`.
        latency: ``a``, seconds, as in :func:`ring_seconds`.
        rate: ``B``, bytes/s that a rank sends in both directions together.
        overhead: Seconds to issue the second message of a step.

    Returns:
        Seconds.

    Raises:
        ValueError: If an argument is out of range, as in :func:`ring_seconds`.
    """
    _check(n, num_bytes, latency, rate)
    _check_amounts(overhead=overhead)
    return n // 2 * latency + (n - 1) // 2 * overhead + (n - 1) / n * num_bytes / rate


def doubling_seconds(n: int, num_bytes: float, latency: float, rate: float) -> float:
    """Price an all-gather by doubling or a reduce-scatter by halving.

    The cost is ``ceil(log2 n) a + (n - 1) / n S / B``.

    Args:
        n: Number of ranks, which need not be a power of two.
        num_bytes: ``S``, bytes, as in :func:`ring_seconds`.
        latency: ``a``, seconds.
        rate: ``B``, bytes/s that a rank sends and receives.

    Returns:
        Seconds.

    Raises:
        ValueError: If an argument is out of range, as in :func:`ring_seconds`.
    """
    _check(n, num_bytes, latency, rate)
    return (n - 1).bit_length() * latency + (n - 1) / n * num_bytes / rate


def direct_seconds(n: int, num_bytes: float, latency: float, rate: float, overhead: float = 0.0) -> float:
    """Price an all-gather, reduce-scatter or all-to-all in one step.

    The cost is ``a + (n - 2) o + (n - 1) / n S / B``.

    Args:
        n: Number of ranks.
        num_bytes: ``S``, bytes, as in :func:`ring_seconds`.
        latency: ``a``, seconds.
        rate: ``B``, bytes/s that a rank sends, and receives, to and from all others together.
        overhead: ``o``, seconds to issue each message after the first. With 0, no other algorithm is cheaper on a
            uniform network; real network cards and their software are slower.

    Returns:
        Seconds.

    Raises:
        ValueError: If an argument is out of range, as in :func:`ring_seconds`.
    """
    _check(n, num_bytes, latency, rate)
    _check_amounts(overhead=overhead)
    return 0.0 if n == 1 else latency + (n - 2) * overhead + (n - 1) / n * num_bytes / rate


def tree_seconds(n: int, num_bytes: float, latency: float, rate: float) -> float:
    """Price a broadcast or reduction over a binomial tree: ``ceil(log2 n) (a + S / B)``.

    Args:
        n: Number of ranks.
        num_bytes: ``S``, bytes of the message.
        latency: ``a``, seconds.
        rate: ``B``, bytes/s.

    Returns:
        Seconds.

    Raises:
        ValueError: If an argument is out of range, as in :func:`ring_seconds`.
    """
    _check(n, num_bytes, latency, rate)
    return (n - 1).bit_length() * (latency + num_bytes / rate)


def chain_seconds(n: int, num_bytes: float, latency: float, rate: float, chunks: int | None = None) -> float:
    """Price a broadcast along a chain in ``m`` pipelined chunks: ``(n - 2 + m) (a + S / (m B))``.

    Args:
        n: Number of ranks.
        num_bytes: ``S``, bytes of the message.
        latency: ``a``, seconds, of the slowest edge.
        rate: ``B``, bytes/s.
        chunks: ``m``, number of chunks. Default: the best number, near ``sqrt((n - 2) S / (a B))``, with chunks of at
            least one byte.

    Returns:
        Seconds.

    Raises:
        ValueError: If an argument is out of range, as in :func:`ring_seconds`, or ``chunks`` is below 1.
    """
    _check(n, num_bytes, latency, rate)
    if n == 1:
        return 0.0
    if chunks is not None:
        if chunks < 1:
            raise ValueError(f"chunks is {chunks}; it must be at least 1")
        return (n - 2 + chunks) * (latency + num_bytes / (chunks * rate))
    # Convex in m, so the best whole number is next to the best number.
    most = max(1, int(num_bytes))
    ideal = min(math.sqrt((n - 2) * num_bytes / rate / latency), most) if latency else most
    near = {min(max(1, m), most) for m in (math.floor(ideal), math.ceil(ideal))}
    return min(chain_seconds(n, num_bytes, latency, rate, m) for m in near)


_Pass = Callable[[int, float, float, float], float]
_HALVES: dict[str, _Pass] = {"ring": ring_seconds, "halving-doubling": doubling_seconds, "direct": direct_seconds}


def hierarchical_all_reduce_seconds(
    sizes: Sequence[int], num_bytes: float, inner: FlowLink, cross: FlowLink, algorithm: str = "ring"
) -> float:
    """Price an all-reduce over ``K`` domains.

    It is a reduce-scatter inside, an all-reduce of each rank's share across, and an all-gather inside. With rings, the
    cost is ``2 (n - 1) (a + S / (n B)) + 2 (K - 1) (a' + S / (n K B'))``. Domains of unequal sizes run their inner
    parts at the same time; across domains, the ranks of the smallest domain carry the most. With equal sizes the result
    equals :func:`plan_seconds`. With unequal sizes it may be 1 % lower, where messages of unequal length meet in a
    network card, and with many different sizes up to a fifth higher, where ranks need not wait for the slowest domain.

    Args:
        sizes: Number of ranks of each domain.
        num_bytes: ``S``, bytes of the vector on every rank.
        inner: Latency ``a`` and rate ``B`` inside a domain.
        cross: Latency ``a'`` and rate ``B'`` of each rank while all ranks send across at once.
        algorithm: Algorithm of all parts: ``ring``, ``halving-doubling`` or ``direct``.

    Returns:
        Seconds.

    Raises:
        ValueError: If a domain has no rank, a link is out of range, or the algorithm is unknown.
    """
    _check_network(sizes, inner, cross)
    if algorithm not in _HALVES:
        raise ValueError(f"unknown algorithm '{algorithm}', choose one of {list(_HALVES)}")
    half = _HALVES[algorithm]
    inside = max(half(size, num_bytes, inner.latency, inner.rate) for size in sizes)
    rate = min(inner.rate, cross.rate)
    return 2 * (inside + half(len(sizes), num_bytes / min(sizes), cross.latency, rate))


def plan_seconds(plan: CollectivePlan, num_bytes: float, network: Network, *, message_overhead: float = 0.0) -> float:
    """Price a plan on a network.

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

    Returns:
        Seconds until the last rank is done.

    Raises:
        PlanError: If a transfer crosses a resource without capacity.
        ValueError: If ``num_bytes`` or ``message_overhead`` is negative or not finite.
    """
    _check_amounts(num_bytes=num_bytes, message_overhead=message_overhead)
    unit = num_bytes / plan.buffer_size
    capacities = network.capacities
    ready = np.zeros(plan.ranks)
    known: dict[tuple[tuple[int, int, int], ...], NDArray[np.float64]] = {}
    for s, step in enumerate(plan.steps):
        sources = np.array([sent.source for sent in step])
        targets = np.array([sent.target for sent in step])
        # Most algorithms repeat a step with other chunks of the same size.
        key = tuple((sent.source, sent.target, sum(plan.chunks[c].size for c in sent.chunks)) for sent in step)
        if key not in known:
            known[key] = _durations(plan, s, step, [size * unit for _, _, size in key], network, capacities)
            known[key] += message_overhead * np.maximum(np.bincount(sources) - 1, 0)[sources]
        done = np.maximum(ready[sources], ready[targets]) + known[key]
        np.maximum.at(ready, sources, done)
        np.maximum.at(ready, targets, done)
    return float(ready.max())


def _durations(
    plan: CollectivePlan,
    s: int,
    step: PlanStep,
    sizes: Sequence[float],
    network: Network,
    capacities: NDArray[np.float64],
) -> NDArray[np.float64]:
    flows = []
    for sent, size in zip(step, sizes, strict=True):
        path, latency = network.route(sent.source, sent.target)
        flows.append(Flow(size, path, latency=latency))
    try:
        return finish_times(flows, capacities)
    except PlanError as error:
        where = f"{plan.name}, step {s}"
        if error.where and error.where.startswith("flow "):
            sent = step[int(error.where.removeprefix("flow "))]
            where += f", rank {sent.source} to rank {sent.target}"
        raise PlanError(error.what, where=where, remedy=error.remedy) from error


_GATHERS = ("ring", "bidirectional-ring", "halving-doubling", "direct", "hierarchical", "hierarchical-halving-doubling")

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all-reduce": (*_GATHERS, "tree"),
    "all-gather": _GATHERS,
    "reduce-scatter": _GATHERS,
    "all-to-all": ("direct", "pairwise"),
    "broadcast": ("tree", "chain", "hierarchical"),
}
"""Algorithms that :func:`cheapest` knows for each collective."""


def cheapest(
    collective: str,
    groups: int | Sequence[int],
    num_bytes: float,
    inner: FlowLink,
    cross: FlowLink | None = None,
    *,
    algorithms: Collection[str] | None = None,
    message_overhead: float = 0.0,
) -> AlgorithmChoice:
    """Return the algorithm with the lowest cost on a :class:`DomainNetwork`, by closed forms.

    One domain has no hierarchical algorithms. Over several domains, halving-doubling and trees are considered only in
    their hierarchical form, in which each byte crosses as seldom as possible; hierarchical all-gathers and
    reduce-scatters need domains of one size.

    Args:
        collective: A key of :data:`ALGORITHMS`.
        groups: Number of ranks, or the number of ranks of each domain.
        num_bytes: Bytes of the largest buffer of a rank, as in :func:`plan_seconds`.
        inner: Latency and rate of a rank inside a domain.
        cross: Latency and rate that each rank gets while all ranks of its domain send across at once. A ring, which
            crosses on one rank of each domain, gets more: up to ``inner.rate``.
        algorithms: Algorithms to consider. Default: all of :data:`ALGORITHMS`.
        message_overhead: Seconds to issue each message after the first; with 0, ``direct`` is hard to beat on one
            domain.

    Returns:
        The cheapest algorithm and its seconds; among equals, the first in :data:`ALGORITHMS`.

    Raises:
        ValueError: If a name is unknown, an argument is out of range, or no allowed algorithm fits the domains.
    """
    sizes = (int(groups),) if isinstance(groups, int | np.integer) else tuple(groups)
    _check_network(sizes, inner, cross)
    _check_amounts(num_bytes=num_bytes, message_overhead=message_overhead)
    if collective not in ALGORITHMS:
        raise ValueError(f"unknown collective '{collective}', choose one of {list(ALGORITHMS)}")
    known = ALGORITHMS[collective]
    for name in algorithms or ():
        if name not in known:
            raise ValueError(f"unknown algorithm '{name}' for {collective}, choose of {list(known)}")
    costs = {}
    for name in known:
        if algorithms is None or name in algorithms:
            seconds = _seconds(collective, name, sizes, num_bytes, inner, cross, message_overhead)
            if seconds is not None:
                costs[name] = seconds
    if not costs:
        raise ValueError(f"{collective} over domains of {list(sizes)} ranks: none of {list(algorithms or ())} fits")
    least = min(costs.values())
    best = next(name for name, seconds in costs.items() if seconds <= least * (1 + _ROUNDING))
    return AlgorithmChoice(best, costs[best])


def _seconds(
    collective: str,
    algorithm: str,
    sizes: Sequence[int],
    num_bytes: float,
    inner: FlowLink,
    cross: FlowLink | None,
    overhead: float,
) -> float | None:
    """Return the cost of an algorithm, or None if it does not fit the domains."""
    n = sum(sizes)
    flat = len(sizes) == 1
    passes = 2 if collective == "all-reduce" else 1
    outer = inner if flat or cross is None else cross
    latency = inner.latency if flat else max(inner.latency, outer.latency)
    # One rank of each domain crosses in each direction.
    edge = inner.rate if flat else min(inner.rate, min(sizes) * outer.rate)
    if algorithm == "ring":
        return passes * ring_seconds(n, num_bytes, latency, edge)
    if algorithm == "bidirectional-ring":
        return passes * bidirectional_ring_seconds(n, num_bytes, latency, edge, overhead)
    if algorithm == "chain":
        return chain_seconds(n, num_bytes, latency, edge)
    if algorithm == "direct":
        return passes * _direct(sizes, num_bytes, latency, inner.rate, outer.rate, overhead)
    if algorithm == "pairwise":
        return _pairwise(sizes, num_bytes, latency, inner.rate, outer.rate)
    if algorithm in ("tree", "halving-doubling"):
        form = tree_seconds if algorithm == "tree" else doubling_seconds
        return passes * form(n, num_bytes, latency, edge) if flat else None
    if flat:
        return None
    if collective == "broadcast":
        return _hierarchical_broadcast(sizes, num_bytes, inner, outer)
    if collective != "all-reduce" and len(set(sizes)) > 1:
        return None
    form_name = "halving-doubling" if algorithm.endswith("halving-doubling") else "ring"
    return passes / 2 * hierarchical_all_reduce_seconds(sizes, num_bytes, inner, outer, form_name)


def _hierarchical_broadcast(sizes: Sequence[int], num_bytes: float, inner: FlowLink, outer: FlowLink) -> float:
    """Return the cost of a tree across domains, each of which starts its own tree once its first rank is done."""
    ready = [0.0] * len(sizes)
    for step in tree_broadcast(len(sizes)).steps:
        for home, away, *_ in step:
            rate = min(inner.rate, min(sizes[home], sizes[away]) * outer.rate)
            ready[home] = ready[away] = ready[home] + outer.latency + num_bytes / rate
    inside = (tree_seconds(size, num_bytes, inner.latency, inner.rate) for size in sizes)
    return max(begin + seconds for begin, seconds in zip(ready, inside, strict=True))


def _direct(
    sizes: Sequence[int], num_bytes: float, latency: float, inner: float, outer: float, overhead: float
) -> float:
    """Return the cost of one step of all to all, which the busier of a network card and an uplink determines."""
    n = sum(sizes)
    if len(sizes) == 1:
        return direct_seconds(n, num_bytes, latency, inner, overhead)
    block = num_bytes / n
    return latency + (n - 2) * overhead + block * max((n - 1) / inner, (n - min(sizes)) / outer)


def _pairwise(sizes: Sequence[int], num_bytes: float, latency: float, inner: float, outer: float) -> float:
    """Return the cost of one shift a step: as many ranks leave a domain as the shift carries over its border."""
    n = sum(sizes)
    if len(sizes) == 1:
        return ring_seconds(n, num_bytes, latency, inner)
    shifts = np.arange(1, n)
    slowest = np.full(n - 1, inner)
    for size in set(sizes):
        leaving = np.minimum(np.minimum(shifts, n - shifts), min(size, n - size))
        np.minimum(slowest, size * outer / leaving, out=slowest)
    return float((n - 1) * latency + (num_bytes / n / slowest).sum())
