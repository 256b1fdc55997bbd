"""Transfers that share resources, as a reference: max-min fair rates, arrival times of flows, seconds of a plan.

A resource is anything with a capacity in bytes/s that transfers share: the egress of a network card, an uplink, a
fibre. A flow is limited by the resources on its path and by a limit of its own. Flows share a capacity; none has a
fixed part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cordillera.errors import PlanError
from cordillera.planning.network.collective_plans import CollectivePlan, PlanStep
from cordillera.topology import Topology
from tests.planning.executed_plans import buffer_size

_Floats: TypeAlias = NDArray[np.float64]
_Integers: TypeAlias = NDArray[np.int64]

_ROUNDING = 1e-12  # relative difference below which two values are equal


class FlowLink(NamedTuple):
    """Latency and rate of one link, or one kind of link.

    Attributes:
        latency: One-way latency, seconds.
        rate: Rate, bytes/s.
    """

    latency: float
    rate: float


@dataclass(frozen=True)
class Flow:
    """Bytes that are sent together.

    Attributes:
        bytes: Number of bytes, at least 0.
        path: Resources that the flow uses, all at the same time.
        start: Time at which transmission may begin, seconds.
        latency: Time from the end of transmission to the arrival, seconds.
        limit: Highest rate that the flow can use, bytes/s.
        weight: Weight of its share: flows of weight 2 get twice the rate of flows of weight 1.
        count: Number of identical flows that this one stands for; all of them load the resources.
    """

    bytes: float
    path: tuple[int, ...] = ()
    start: float = 0.0
    latency: float = 0.0
    limit: float = math.inf
    weight: float = 1.0
    count: int = 1


class _Problem(NamedTuple):
    """Flows over resources; ``flow`` and ``resource`` list every crossing, sorted by flow."""

    flow: _Integers
    resource: _Integers
    capacities: _Floats
    limits: _Floats
    weights: _Floats
    counts: _Floats


def _vector(values: ArrayLike | None, name: str, default: float, size: int | None) -> _Floats:
    if values is None:
        return np.full(size or 0, default)
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or (size is not None and vector.size != size):
        wanted = "one dimension" if size is None else f"one value for each of the {size} flows"
        raise ValueError(f"{name} must have {wanted}, got shape {vector.shape}")
    return vector


def _refuse(wrong: NDArray[np.bool_], values: _Floats, name: str, must: str) -> None:
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"{name}[{first}] is {values[first]}; it must be {must}")


def _read(
    paths: Sequence[Sequence[int]],
    capacities: ArrayLike,
    limits: ArrayLike | None,
    weights: ArrayLike | None,
    counts: ArrayLike | None,
) -> _Problem:
    flows = len(paths)
    capacity = _vector(capacities, "capacities", 0.0, None)
    limit = _vector(limits, "limits", math.inf, flows)
    weight = _vector(weights, "weights", 1.0, flows)
    count = _vector(counts, "counts", 1.0, flows)
    _refuse(~(capacity >= 0), capacity, "capacities", "at least 0 bytes/s (inf for one that never holds back)")
    _refuse(~(limit >= 0), limit, "limits", "at least 0 bytes/s (inf for none)")
    _refuse(~((weight > 0) & np.isfinite(weight)), weight, "weights", "positive and finite")
    _refuse(~((count >= 1) & np.isfinite(count) & (count == np.floor(count))), count, "counts", "a whole number from 1")
    crossings = np.asarray(list(chain.from_iterable(paths)))
    if crossings.size and crossings.dtype.kind not in "iu":
        raise ValueError(f"paths must hold indices of resources, got {crossings.dtype}")
    flow = np.repeat(np.arange(flows), np.fromiter(map(len, paths), np.int64, flows))
    outside = (crossings < 0) | (crossings >= capacity.size)
    if outside.any():
        first = int(np.flatnonzero(outside)[0])
        raise ValueError(
            f"paths[{flow[first]}] crosses resource {crossings[first]}, but there are {capacity.size} capacities"
        )
    return _Problem(flow, crossings.astype(np.int64), capacity, limit, weight, count)


def max_min_rates(
    paths: Sequence[Sequence[int]],
    capacities: ArrayLike,
    limits: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    counts: ArrayLike | None = None,
) -> _Floats:
    """Compute max-min fair rates: no rate can rise without lowering one that is not higher.

    Progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2). All resources whose flows have no
    tighter bottleneck elsewhere are filled in one round, so the number of rounds is the length of the longest chain of
    dependent bottlenecks.

    Args:
        paths: Resources that each of ``F`` flows uses; a resource that occurs twice in a path is loaded twice.
        capacities: Capacity of each resource, bytes/s: ``[R]``. 0 stops its flows; infinity limits none.
        limits: Highest rate that each flow can use, bytes/s: ``[F]``. Default: no limit.
        weights: Weights of the shares: ``[F]``. Default: 1.
        counts: Number of identical flows that each entry stands for: ``[F]``. Default: 1. Folding equal flows in this
            way changes no rate; a hundred thousand symmetric flows cost as much as one.

    Returns:
        Rate of one flow of each entry, bytes/s: ``[F]``; infinity for a flow without any limit.

    Raises:
        ValueError: If a value is negative or NaN, a weight is 0, a count is not whole, or a resource is unknown.
    """
    return _fill(_read(paths, capacities, limits, weights, counts))


def _fill(problem: _Problem) -> _Floats:
    flow, resource, capacities, limits, weights, counts = problem
    size = capacities.size
    rates = limits.copy()
    finite = np.isfinite(capacities[resource])
    flow, resource = flow[finite], resource[finite]
    residual = capacities.copy()
    levels = np.zeros(size)
    with np.errstate(over="ignore"):
        ceilings = limits / weights
    while flow.size:
        load = np.bincount(resource, (weights * counts)[flow], size)
        degree = np.bincount(resource, minlength=size)
        # A fair share never falls while other flows freeze; an apparent fall is rounding.
        levels = np.maximum(levels, np.divide(residual, load, out=np.zeros(size), where=degree > 0))
        first = np.flatnonzero(np.r_[True, flow[1:] != flow[:-1]])
        lengths = np.diff(np.r_[first, flow.size])
        here = flow[first]
        shares = np.minimum.reduceat(levels[resource], first)
        at_limit = ceilings[here] <= shares
        reach = np.repeat(np.minimum(shares, ceilings[here]), lengths)
        content = levels[resource] <= reach * (1 + _ROUNDING)
        full = (degree > 0) & (np.bincount(resource[content], minlength=size) == degree)
        frozen = at_limit | np.logical_or.reduceat(full[resource], first)
        rates[here[frozen]] = np.where(at_limit, limits[here], weights[here] * shares)[frozen]
        gone = np.repeat(frozen, lengths)
        residual -= np.bincount(resource[gone], (rates * counts)[flow[gone]], size)
        np.maximum(residual, 0.0, out=residual)
        flow, resource = flow[~gone], resource[~gone]
    return rates


def finish_times(flows: Sequence[Flow], capacities: ArrayLike) -> _Floats:
    """Return when each of ``F`` flows has arrived, its end of transmission plus its latency, seconds: ``[F]``.

    The rates are max-min fair at every moment and change when a flow starts or ends. The resources have ``capacities``
    in bytes/s: ``[R]``.

    Raises:
        PlanError: If one of ``flows`` can never finish, because its limit or the capacity of one of its resources is 0.
        ValueError: If a value of a flow is negative or not finite.
    """
    problem = _read(
        [flow.path for flow in flows],
        capacities,
        [flow.limit for flow in flows],
        [flow.weight for flow in flows],
        [flow.count for flow in flows],
    )
    for i, flow in enumerate(flows):
        for name in ("bytes", "start", "latency"):
            value = getattr(flow, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"flow {i}: {name} is {value}; it must be finite and at least 0")
    starts, left, latencies = np.array([(f.start, f.bytes, f.latency) for f in flows], np.float64).reshape(-1, 3).T
    ends, left, now = starts.copy(), left.copy(), 0.0
    while (unfinished := left > 0).any():
        now = max(now, float(starts[unfinished].min()))
        sending = unfinished & (starts <= now)
        crossing = sending[problem.flow]
        rates = _fill(problem._replace(flow=problem.flow[crossing], resource=problem.resource[crossing]))[sending]
        active = np.flatnonzero(sending)
        stuck = active[rates <= 0]
        if stuck.size:
            _refuse_stuck(int(stuck[0]), flows, problem)
        with np.errstate(over="ignore"):
            needed = left[active] / rates
        next_start = float(starts[unfinished & ~sending].min(initial=math.inf))
        span = min(float(needed.min()), next_start - now)
        now = min(now + span, next_start)
        done = needed <= span * (1 + _ROUNDING)
        ends[active[done]], left[active[done]] = now, 0.0
        left[active[~done]] -= rates[~done] * span
    return ends + latencies


def _refuse_stuck(i: int, flows: Sequence[Flow], problem: _Problem) -> None:
    if flows[i].limit == 0:
        reason, remedy = "its limit is 0 bytes/s", "give it a limit above 0"
    else:
        dead = [r for r in flows[i].path if problem.capacities[r] == 0]
        reason = f"it crosses resource {dead[0]}, whose capacity is 0" if dead else "its rate is 0"
        remedy = "route it another way, or give that resource a capacity"
    raise PlanError(f"{flows[i].bytes:g} bytes can never finish: {reason}", where=f"flow {i}", remedy=remedy)


def route(cluster: Topology, a: int, b: int) -> tuple[tuple[int, ...], float]:
    """Return the resources on the way from device ``a`` to device ``b``, and the one-way latency in seconds."""
    top = cluster.shared_level(a, b)
    if top < 0:
        return (), 0.0
    if top == 0:
        return (cluster.resource(0, a, False), cluster.resource(0, b, True)), cluster.levels[0].latency
    cards = len(cluster.levels)
    out = [cluster.resource(cards, a, False)]
    back = [cluster.resource(cards, b, True)]
    for level in range(1, top + 1):
        out.append(cluster.resource(level, cluster.domain(a, level - 1), False))
        back.append(cluster.resource(level, cluster.domain(b, level - 1), True))
    return (*out, *reversed(back)), cluster.levels[top].latency


class _Routed(Protocol):
    """A network that finds its own routes."""

    @property
    def capacities(self) -> NDArray[np.float64]:
        """Capacity of each resource, bytes/s: ``[R]``."""

    def route(self, source: int, target: int, /) -> tuple[tuple[int, ...], float]:
        """Return the resources from the rank ``source`` to the rank ``target``, and the one-way latency in seconds."""


Network: TypeAlias = Topology | _Routed


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
    """
    unit = num_bytes / buffer_size(plan)
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
        ends = sent.source, sent.target
        path, latency = route(network, *ends) if isinstance(network, Topology) else network.route(*ends)
        flows.append(Flow(size, path, latency=latency))
    try:
        return finish_times(flows, network.capacities)
    except PlanError as error:
        sent = step[int(str(error.where).removeprefix("flow "))]
        where += f", rank {sent.source} to rank {sent.target}"
        raise PlanError(error.what, where=where, remedy=error.remedy) from error
