"""Transfers that share resources: max-min fair rates, arrival times of flows, and first-in first-out links.

A resource is anything with a capacity in bytes/s that transfers share: the egress of a network card, an uplink, a
fibre. A flow is limited by the resources on its path and by a limit of its own. Flows share a capacity; none has a
fixed part of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cordillera.errors import PlanError

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


class RateInterval(NamedTuple):
    """A span of time in which no rate changes; empty if shorter than the resolution of the clock.

    Attributes:
        begin: Start, seconds.
        end: End, seconds.
        flows: Indices of the flows that transmit: ``[A]``.
        rates: Rate of one flow of each, bytes/s: ``[A]``.
    """

    begin: float
    end: float
    flows: _Integers
    rates: _Floats


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


def is_max_min(
    rates: ArrayLike,
    paths: Sequence[Sequence[int]],
    capacities: ArrayLike,
    limits: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    counts: ArrayLike | None = None,
    *,
    tolerance: float = 1e-9,
) -> bool:
    """Check by a certificate, without solving again, whether rates are max-min fair.

    No resource carries more than its capacity, and every flow is at its limit or uses a saturated resource on which no
    flow has a higher rate for its weight (Bertsekas and Gallager, Data Networks, section 6.5.2).

    Args:
        rates: Rate of each flow, bytes/s: ``[F]``.
        paths: Resources that each flow uses.
        capacities: Capacity of each resource, bytes/s: ``[R]``.
        limits: Highest rate that each flow can use, bytes/s: ``[F]``. Default: no limit.
        weights: Weights of the shares: ``[F]``. Default: 1.
        counts: Number of identical flows that each entry stands for: ``[F]``. Default: 1.
        tolerance: Relative tolerance.

    Raises:
        ValueError: If an argument is out of range, as in :func:`max_min_rates`.
    """
    flow, resource, capacity, limit, weight, count = _read(paths, capacities, limits, weights, counts)
    rate = _vector(rates, "rates", 0.0, len(paths))
    if not (rate >= 0).all() or (rate > limit * (1 + tolerance)).any():
        return False
    usage = np.bincount(resource, (rate * count)[flow], capacity.size)
    if (usage > capacity * (1 + tolerance)).any():
        return False
    normalised = rate / weight
    highest = np.zeros(capacity.size)
    np.maximum.at(highest, resource, normalised[flow])
    saturated = np.isfinite(capacity) & (usage >= capacity * (1 - tolerance))
    held = saturated[resource] & (normalised[flow] >= highest[resource] * (1 - tolerance))
    bottlenecked = np.bincount(flow[held], minlength=rate.size) > 0
    return bool((bottlenecked | (rate >= limit * (1 - tolerance))).all())


def finish_times(flows: Sequence[Flow], capacities: ArrayLike) -> _Floats:
    """Compute when each flow has arrived.

    The rates are max-min fair at every moment and change when a flow starts or ends.

    Args:
        flows: ``F`` flows.
        capacities: Capacity of each resource, bytes/s: ``[R]``.

    Returns:
        End of transmission plus latency, seconds: ``[F]``.

    Raises:
        PlanError: If a flow can never finish, because its limit or the capacity of one of its resources is 0.
        ValueError: If a value of a flow is negative or not finite.
    """
    return _simulate(flows, capacities)[0]


def rate_history(flows: Sequence[Flow], capacities: ArrayLike) -> list[RateInterval]:
    """Return the rates that :func:`finish_times` computes, in order of time.

    Flows without any limit take no time and appear in no interval.

    Args:
        flows: ``F`` flows.
        capacities: Capacity of each resource, bytes/s: ``[R]``.

    Raises:
        PlanError: If a flow can never finish, as in :func:`finish_times`.
        ValueError: If a value of a flow is negative or not finite.
    """
    return _simulate(flows, capacities)[1]


def _simulate(flows: Sequence[Flow], capacities: ArrayLike) -> tuple[_Floats, list[RateInterval]]:
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
    starts = np.array([flow.start for flow in flows], dtype=np.float64)
    left = np.array([flow.bytes for flow in flows], dtype=np.float64)
    ends = starts.copy()
    waiting = [int(i) for i in np.argsort(-starts, kind="stable")]
    active = np.zeros(len(flows), dtype=bool)
    history = []
    now = 0.0
    while waiting or active.any():
        if not active.any():
            now = float(starts[waiting[-1]])
        while waiting and starts[waiting[-1]] <= now:
            i = waiting.pop()
            active[i] = left[i] > 0
        indices = np.flatnonzero(active)
        if not indices.size:
            continue
        rates = _active_rates(problem, active)[indices]
        stuck = indices[rates <= 0]
        if stuck.size:
            _refuse_stuck(int(stuck[0]), flows, problem)
        with np.errstate(over="ignore"):
            needed = left[indices] / rates
        soonest = float(needed.min())
        pause = float(starts[waiting[-1]]) - now if waiting else math.inf
        if soonest <= pause:
            done = needed <= soonest * (1 + _ROUNDING)
            span, then = soonest, now + soonest
            ends[indices[done]] = then
            active[indices[done]] = False
        else:
            done = np.zeros(indices.size, dtype=bool)
            span, then = pause, float(starts[waiting[-1]])
        if span > 0:
            history.append(RateInterval(now, then, indices, rates))
            left[indices[~done]] = np.maximum(left[indices] - rates * span, 0.0)[~done]
        now = then
    return ends + np.array([flow.latency for flow in flows], dtype=np.float64), history


def _active_rates(problem: _Problem, active: NDArray[np.bool_]) -> _Floats:
    crossing = active[problem.flow]
    return _fill(problem._replace(flow=problem.flow[crossing], resource=problem.resource[crossing]))


def _refuse_stuck(i: int, flows: Sequence[Flow], problem: _Problem) -> None:
    if flows[i].limit == 0:
        reason, remedy = "its limit is 0 bytes/s", "give it a limit above 0"
    else:
        dead = [r for r in flows[i].path if problem.capacities[r] == 0]
        reason = f"it crosses resource {dead[0]}, whose capacity is 0" if dead else "its rate is 0"
        remedy = "route it another way, or give that resource a capacity"
    raise PlanError(f"{flows[i].bytes:g} bytes can never finish: {reason}", where=f"flow {i}", remedy=remedy)


@dataclass(frozen=True)
class FifoLinks:
    """Links that carry one message at a time, in order of arrival.

    A link is busy only for the serialisation; the message reaches the next hop after latency plus serialisation. These
    are the two analytical networks of ASTRA-sim 2.0 (Won et al. 2023): :meth:`store_and_forward` is the
    congestion-aware one, :meth:`cut_through` the congestion-unaware one.

    Attributes:
        links: Latency and rate of each link.
        truncate_ns: Whether to round every serialisation and every hop down to whole nanoseconds, as ASTRA-sim does.
    """

    links: Sequence[FlowLink]
    truncate_ns: bool = False

    def __post_init__(self) -> None:
        for i, link in enumerate(self.links):
            if not (math.isfinite(link.latency) and link.latency >= 0):
                raise ValueError(f"link {i}: latency is {link.latency}; it must be finite and at least 0")
            if not link.rate >= 0:
                raise ValueError(f"link {i}: rate is {link.rate}; it must be at least 0")

    def cut_through(self, size: float, path: Sequence[int], start: float = 0.0) -> float:
        """Return the arrival of one message that meets no other and streams through its hops.

        Args:
            size: Size of the message, bytes.
            path: Indices of the links, in order.
            start: Time at which the message is sent, seconds.

        Returns:
            ``start`` plus all latencies plus the serialisation on the slowest link, seconds.

        Raises:
            PlanError: If a link on the path has no capacity.
            ValueError: If a value is negative or not finite, or a link is unknown.
        """
        self._check(0, size, path, start)
        latency = sum(self.links[hop].latency for hop in path)
        return start + self._cut(latency + max((size / self.links[hop].rate for hop in path), default=0.0))

    def store_and_forward(
        self, sizes: Sequence[float], paths: Sequence[Sequence[int]], starts: Sequence[float] | None = None
    ) -> _Floats:
        """Return the arrivals of messages that queue at every link and are received whole before they are sent on.

        Messages that reach a link at the same time are served in the order given.

        Args:
            sizes: Size of each of ``M`` messages, bytes.
            paths: Indices of the links of each message, in order.
            starts: Time at which each message is ready at its first link, seconds. Default: 0.

        Returns:
            Arrival of each message, seconds: ``[M]``.

        Raises:
            PlanError: If a link on a path has no capacity.
            ValueError: If a value is negative or not finite, a link is unknown, or the lists differ in length.
        """
        begins = [0.0] * len(sizes) if starts is None else list(starts)
        if not len(sizes) == len(paths) == len(begins):
            raise ValueError(f"{len(sizes)} sizes, {len(paths)} paths and {len(begins)} starts; they must be as many")
        for i, (size, path, start) in enumerate(zip(sizes, paths, begins, strict=True)):
            self._check(i, size, path, start)
        arrivals = np.array(begins, dtype=np.float64)
        free = [0.0] * len(self.links)
        ready = [(start, i, 0) for i, start in enumerate(begins)]
        heapq.heapify(ready)
        while ready:
            time, i, hop = heapq.heappop(ready)
            if hop == len(paths[i]):
                arrivals[i] = time
                continue
            link = self.links[paths[i][hop]]
            serialisation = sizes[i] / link.rate
            begin = max(time, free[paths[i][hop]])
            free[paths[i][hop]] = begin + self._cut(serialisation)
            heapq.heappush(ready, (begin + self._cut(link.latency + serialisation), i, hop + 1))
        return arrivals

    def _check(self, i: int, size: float, path: Sequence[int], start: float) -> None:
        for name, value in (("size", size), ("start", start)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"message {i}: {name} is {value}; it must be finite and at least 0")
        for hop in path:
            if not 0 <= hop < len(self.links):
                raise ValueError(f"message {i} crosses link {hop}, but there are {len(self.links)} links")
            if self.links[hop].rate == 0:
                raise PlanError(f"it can never cross link {hop}, whose rate is 0", where=f"message {i}")

    def _cut(self, seconds: float) -> float:
        if not self.truncate_ns:
            return seconds
        # A millionth of a nanosecond is added because whole decimal numbers may be slightly smaller in binary.
        return math.floor(seconds * 1e9 + 1e-6) / 1e9
