"""Placement of a job's ranks on a cluster, and the rates that every parallel dimension gets on shared links.

Ranks are numbered along an order of the dimensions, innermost first, and rank ``i`` is device ``i``. The order
determines which dimension crosses which level of the tree, so a placement is a permutation. All groups of a dimension
communicate at the same time, so a link's capacity is divided by the number of their edges that cross it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cordillera.errors import PlanError
from cordillera.topology import Topology

DIMENSIONS = ("tensor", "context", "data", "pipeline")


class Edges(NamedTuple):
    """Rate and latency of pairs of devices that send at the same time.

    Attributes:
        bytes_per_s: Rate of the slowest pair, bytes/s.
        latency: One-way latency of the most distant pair, seconds.
        level: Outermost level that a pair crosses; -1 if nothing is sent.
        link: Display name of the bottleneck: the name of its level, or ``network card``; empty if nothing is sent.
    """

    bytes_per_s: float
    latency: float
    level: int
    link: str


class NetworkTier(NamedTuple):
    """The groups of a dimension within one level of the tree.

    Attributes:
        parts: Largest number of domains of the level below over which a group's part in one domain is spread.
        ranks: Number of ranks of a group in one of these domains, each of which carries an equal part of the data to
            the next domain. If domains differ, the number of the fullest; if groups differ, the fewest.
        edges: Edges of rings over these parts.
    """

    parts: int
    ranks: int
    edges: Edges


class SharedLink(NamedTuple):
    """A link that messages, or a collective, and rings of copies cross at the same time.

    Attributes:
        bytes_per_s: Capacity, bytes/s.
        messages: Number of pairs that send messages over it, or of the collective.
        rings: Number of ring pairs over it.
        level: Level that the pairs cross by it; 0 for devices' ports.
    """

    bytes_per_s: float
    messages: int
    rings: int
    level: int


class Group(NamedTuple):
    """Groups of devices in which each sends to another one of its group, all at the same time.

    Attributes:
        size: Number of devices of a group.
        stride: Distance of neighbours in a group, in devices.
        shift: Number of places in the group from a sender to its receiver: 1 in a ring.
    """

    size: int
    stride: int
    shift: int = 1


NOWHERE = Edges(float("inf"), 0.0, -1, "")


class _Degrees(Protocol):
    """A layout with a degree for each of :data:`DIMENSIONS`: :class:`~cordillera.planning.language.workload.Layout`."""

    @property
    def devices(self) -> int: ...


@dataclass(frozen=True)
class Mesh:
    """A layout placed on a cluster.

    Attributes:
        topology: The cluster.
        order: Dimensions, innermost first.
        sizes: Sizes of the dimensions, in this order.
    """

    topology: Topology
    order: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, topology: Topology, layout: _Degrees, order: Sequence[str] = DIMENSIONS) -> Mesh:
        """Place a ``layout`` on the cluster ``topology``, whose unused devices stay idle.

        The ``order`` lists the dimensions, innermost first.

        Raises:
            PlanError: If the cluster is too small or ``order`` is not an order of the dimensions.
        """
        if sorted(order) != sorted(DIMENSIONS):
            raise PlanError(
                f"{', '.join(order)} is not an order of {', '.join(DIMENSIONS)}", where="order of the dimensions"
            )
        if layout.devices > topology.devices:
            raise PlanError(
                f"{layout} takes {layout.devices:,} devices, the cluster has {topology.devices:,}", where=topology.name
            )
        return cls(topology, tuple(order), tuple(getattr(layout, name) for name in order))

    def size(self, dimension: str) -> int:
        """Return the size of a dimension."""
        return self.sizes[self.order.index(dimension)]

    def stride(self, dimension: str) -> int:
        """Return the distance in devices between neighbours in a dimension."""
        return prod(self.sizes[: self.order.index(dimension)])

    @property
    def devices(self) -> int:
        """Number of devices of the job."""
        return prod(self.sizes)

    def ring(self, dimension: str) -> Edges:
        """Return the edges of rings over a dimension, with all of its groups at the same time."""
        return _ring(_Key(self.topology), self.devices, self.stride(dimension), self.size(dimension))

    def tiers(self, dimension: str) -> tuple[NetworkTier, ...]:
        """Return a dimension's groups level by level, for hierarchical collectives.

        Levels that do not divide the groups are left out. If domains divide a group unevenly, a rank of a domain with
        few ranks carries more than one of a domain with many.
        """
        return _tiers(_Key(self.topology), self.devices, self.stride(dimension), self.size(dimension))

    def group(self, count: int, stride: int) -> tuple[Edges, tuple[NetworkTier, ...]]:
        """Return the edges of a ring, and the tiers, of groups of ``count`` devices at a distance of ``stride``.

        The product ``count * stride`` divides the devices of the job.
        """
        key = _Key(self.topology)
        return _ring(key, self.devices, stride, count), _tiers(key, self.devices, stride, count)

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Kinds of devices of every pipeline rank, all copies together, as positions in the cluster's ``kinds``."""
        return _kinds(_Key(self.topology), self.devices, self.stride("pipeline"), self.size("pipeline"))

    @property
    def peak(self) -> float:
        """FLOPs per second of all devices' matrix engines in 16 bits."""
        rates = [kind.matrix_flops_per_s for kind in self.topology.kinds]
        if len(rates) == 1:
            return self.devices * rates[0]
        return float(np.array(rates)[self.topology.kind_of[: self.devices]].sum())

    @property
    def memory(self) -> list[float]:
        """Bytes of memory of the smallest device of every pipeline rank."""
        return [min(self.topology.kinds[kind].memory_bytes for kind in rank) for rank in self.kinds]

    def edges(self, group: Group) -> Edges:
        """Return the edges of the pairs of ``group``."""
        return _ring(_Key(self.topology), self.devices, group.stride, group.size, group.shift)

    def shared_by(self, group: Group, rings: Group) -> tuple[SharedLink, ...]:
        """Return the links shared by pairs of ``group`` and ``rings``, also ports; equal ones are listed once."""
        return _shared_by(_Key(self.topology), self.devices, group, rings)

    def boundary(self, index: int) -> Edges:
        """Return the edges of messages from pipeline rank ``index`` to the next, all copies together.

        The last rank sends to the first.
        """
        return self.boundaries[index % len(self.boundaries)]

    def shared_links(self, index: int) -> tuple[SharedLink, ...]:
        """Return the links shared by messages of pipeline rank ``index + 1`` to ``index`` and rings over copies.

        Equal links are listed once.
        """
        p = self.size("pipeline")
        lengths = (p, self.stride("pipeline"), self.size("data"), self.stride("data"))
        return _shared_links(_Key(self.topology), self.devices, index % p, *lengths)

    @cached_property
    def boundaries(self) -> tuple[Edges, ...]:
        """Edges of the messages after every pipeline rank."""
        return _boundaries(_Key(self.topology), self.devices, self.stride("pipeline"), self.size("pipeline"))


class _Key:
    """A topology as the key of a cache, by identity, because hashing it takes as long as the cached work."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def __hash__(self) -> int:
        return id(self.topology)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.topology is other.topology


def _edges(topology: Topology, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> Edges:
    """Return the edges of pairs that all send the same amount and share every link equally."""
    if not len(sources) or bool((sources == targets).all()):
        return NOWHERE
    rate, link, top = float("inf"), "", 0
    for load in _loads(topology, sources, targets):
        found = np.flatnonzero(load.pairs)
        shares = load.capacities[found] / load.pairs[found]
        worst = int(np.argmin(shares))
        top = max(top, load.level)
        if shares[worst] < rate:
            rate, link = float(shares[worst]), load.name
    return Edges(rate, topology.levels[top].latency, top, link)


class _Load(NamedTuple):
    """Number of pairs that send over the links of one kind, in one direction."""

    level: int  # level that they cross by these links
    name: str
    first: int  # position of the first link among the cluster's resources
    capacities: NDArray[np.float64]  # bytes per second of each link
    pairs: NDArray[np.int64]  # number of pairs over each link


def _loads(topology: Topology, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> Iterator[_Load]:
    """Iterate over the loads of ports, network cards, and links of every level above; unused kinds are left out."""
    cards = len(topology.levels)
    domains = [np.stack([sources, targets])]
    for level in range(cards):
        domains.append(np.searchsorted(np.cumsum(topology.sizes[level]), domains[0], side="right"))
    apart = [one[0] != one[1] for one in domains]  # apart[k]: in different domains of level k - 1
    kinds = [(0, 0, apart[0] & ~apart[1], 0), (cards, 0, apart[1], 1)]
    kinds += [(level, level, apart[level], level) for level in range(1, cards)]
    for resource, domain, some, level in kinds:
        if not some.any():
            continue
        name = "network card" if resource == cards else topology.levels[level].name
        for inwards in (False, True):
            pairs = np.bincount(domains[domain][int(inwards), some])
            first = topology.resource(resource, 0, inwards)
            yield _Load(level, name, first, topology.capacities[first : first + 2 * len(pairs) : 2], pairs)


def _groups(devices: int, stride: int, size: int) -> NDArray[np.int64]:
    """Members of every group: ``[groups, size]``."""
    ranks = np.arange(devices).reshape(-1, size, stride)
    return ranks.transpose(0, 2, 1).reshape(-1, size)


@lru_cache(maxsize=4096)
def _kinds(key: _Key, devices: int, stride: int, size: int) -> tuple[tuple[int, ...], ...]:
    if len(key.topology.kinds) == 1:
        return ((0,),) * size
    kinds = key.topology.kind_of[_groups(devices, stride, size)]
    return tuple(tuple(np.unique(rank).tolist()) for rank in kinds.T)


@lru_cache(maxsize=4096)
def _ring(key: _Key, devices: int, stride: int, size: int, shift: int = 1) -> Edges:
    if size == 1:
        return NOWHERE
    groups = _groups(devices, stride, size)
    return _edges(key.topology, groups.ravel(), np.roll(groups, -shift, axis=1).ravel())


@lru_cache(maxsize=4096)
def _boundaries(key: _Key, devices: int, stride: int, size: int) -> tuple[Edges, ...]:
    if size == 1:
        return (NOWHERE,)
    groups = _groups(devices, stride, size)
    return tuple(_edges(key.topology, groups[:, i], groups[:, (i + 1) % size]) for i in range(size))


@lru_cache(maxsize=1024)
def _ring_loads(key: _Key, devices: int, stride: int, size: int, shift: int = 1) -> tuple[_Load, ...]:
    groups = _groups(devices, stride, size)
    return tuple(_loads(key.topology, groups.ravel(), np.roll(groups, -shift, axis=1).ravel()))


@lru_cache(maxsize=4096)
def _shared_by(key: _Key, devices: int, group: Group, rings: Group) -> tuple[SharedLink, ...]:
    if group.size == 1 or rings.size == 1:
        return ()
    own = _ring_loads(key, devices, group.stride, group.size, group.shift)
    return _common(own, _ring_loads(key, devices, rings.stride, rings.size, rings.shift))


@lru_cache(maxsize=4096)
def _shared_links(
    key: _Key, devices: int, index: int, pipeline: int, pipeline_stride: int, data: int, data_stride: int
) -> tuple[SharedLink, ...]:
    if pipeline == 1 or data == 1:
        return ()
    groups = _groups(devices, pipeline_stride, pipeline)
    messages = _loads(key.topology, groups[:, (index + 1) % pipeline], groups[:, index])
    return _common((one for one in messages if one.level > 0), _ring_loads(key, devices, data_stride, data))


def _common(loads: Iterable[_Load], rings: Sequence[_Load]) -> tuple[SharedLink, ...]:
    """Return the links that occur in both, in ascending order; equal ones are listed once."""
    found: set[SharedLink] = set()
    for one in loads:
        for other in rings:
            if one.first != other.first:
                continue
            ends = min(len(one.pairs), len(other.pairs))
            both = np.flatnonzero((one.pairs[:ends] > 0) & (other.pairs[:ends] > 0))
            links = np.stack([one.capacities[both], one.pairs[both], other.pairs[both]], axis=1)
            # neighbours are mostly equal, and sorting rows takes long
            links = links[np.r_[True, (links[1:] != links[:-1]).any(axis=1)][: len(links)]]
            unique = np.unique(links, axis=0).tolist()
            found.update(SharedLink(rate, int(a), int(b), one.level) for rate, a, b in unique)
    return tuple(sorted(found))


@lru_cache(maxsize=4096)
def _tiers(key: _Key, devices: int, stride: int, size: int) -> tuple[NetworkTier, ...]:
    if size == 1:
        return ()
    topology, found = key.topology, []
    ranks = _groups(devices, stride, size).ravel()  # ordered by group, and within a group by domain
    group = np.repeat(np.arange(len(ranks) // size), size)
    below = ranks  # the domain of the level below that holds each rank; at first the rank itself
    for sizes in topology.sizes:
        above = np.searchsorted(np.cumsum(sizes), ranks, side="right")
        starts = np.flatnonzero(np.r_[True, (group[1:] != group[:-1]) | (below[1:] != below[:-1])])
        counts = np.diff(np.r_[starts, len(ranks)])  # size of each part: ranks of a group in one domain below
        whole = np.flatnonzero(
            np.r_[True, (group[starts[1:]] != group[starts[:-1]]) | (above[starts[1:]] != above[starts[:-1]])]
        )  # the first part of a group in each domain of this level
        parts = np.diff(np.r_[whole, len(starts)])
        most = int(parts.max())
        if most > 1:
            fullest = np.maximum.reduceat(counts, whole)
            following = np.arange(1, len(starts) + 1)
            following[np.r_[whole[1:], len(starts)] - 1] = whole  # rings close within a domain
            flows = np.repeat(fullest, parts)  # flows from a part to the next: the number of ranks of the fullest part
            sender = np.repeat(np.arange(len(starts)), flows)
            lane = np.arange(len(sender)) - np.repeat(np.cumsum(flows) - flows, flows)
            ends = []
            for part in (sender, following[sender]):
                ends.append(ranks[starts[part] + lane * counts[part] // flows[sender]])
            found.append(NetworkTier(most, int(fullest[parts > 1].min()), _edges(topology, *ends)))
        below = above
        if len(whole) == len(ranks) // size:
            break
    return tuple(found)
