"""Where a job's ranks lie on a cluster, and what every parallel dimension gets of the links that it shares.

Ranks are numbered along an order of the dimensions, innermost first, and rank ``i`` is device ``i``. Which dimension
crosses which level of the tree follows from that order: placement is a permutation. All groups of a dimension
communicate at the same time, so that a link's capacity is divided by the number of their edges that cross it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cordillera.errors import PlanError
from cordillera.topology import Topology

DIMENSIONS = ("tensor", "context", "data", "pipeline")
ORDERS = {
    "TP, CP, DP, PP": ("tensor", "context", "data", "pipeline"),
    "TP, CP, PP, DP": ("tensor", "context", "pipeline", "data"),
}


class Edges(NamedTuple):
    """What some pairs of devices get that send at the same time.

    Attributes:
        bytes_per_s: Of the pair that gets least.
        latency: Of the pair that is furthest apart, one-way, seconds.
        level: The outermost level that a pair crosses; -1 where nothing is sent.
        link: The member of that level whose link is the bottleneck, or of the level that is; for people.
    """

    bytes_per_s: float
    latency: float
    level: int
    link: str


class NetworkTier(NamedTuple):
    """A dimension's groups within one level of the tree.

    Attributes:
        parts: Domains of the level below over which a group's part in one domain is spread; the most of any group.
        ranks: Of a group in one of these domains; each carries as small a part of the data to the next domain. Where
            domains differ, those of the fullest; of groups that differ, the fewest.
        edges: Of rings over these parts.
    """

    parts: int
    ranks: int
    edges: Edges


class SharedLink(NamedTuple):
    """A link between hosts that messages of a pipeline and rings of copies cross at the same time.

    Attributes:
        bytes_per_s: Its capacity.
        messages: Pairs that send messages over it.
        rings: Pairs of the rings over it.
    """

    bytes_per_s: float
    messages: int
    rings: int


NOWHERE = Edges(float("inf"), 0.0, -1, "")


class _Degrees(Protocol):
    """Degrees of parallelism of a job, as of :class:`~cordillera.planning.language.workload.Layout`.

    Attributes:
        tensor: Degree of tensor parallelism.
        context: Degree of context parallelism.
        pipeline: Number of pipeline ranks.
        data: Number of copies of the model.
        devices: Number of devices that the job takes.
    """

    @property
    def tensor(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def pipeline(self) -> int: ...

    @property
    def data(self) -> int: ...

    @property
    def devices(self) -> int: ...


@dataclass(frozen=True)
class Mesh:
    """A layout on a cluster.

    Attributes:
        topology: The cluster.
        order: Dimensions, innermost first.
        sizes: Of the dimensions, in this order.
    """

    topology: Topology
    order: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, topology: Topology, layout: _Degrees, order: Sequence[str] = DIMENSIONS) -> Mesh:
        """Put a layout on a cluster.

        Args:
            topology: The cluster; what the job does not need stays idle.
            layout: Its degrees.
            order: Dimensions, innermost first.

        Raises:
            PlanError: For a cluster that is too small and for an order that is none.
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
        """Of a dimension."""
        return self.sizes[self.order.index(dimension)]

    def stride(self, dimension: str) -> int:
        """Devices between neighbours in a dimension."""
        return prod(self.sizes[: self.order.index(dimension)])

    @property
    def devices(self) -> int:
        """That the job takes."""
        return prod(self.sizes)

    def ring(self, dimension: str) -> Edges:
        """What rings over a dimension get, all of its groups at the same time."""
        return _ring(_Key(self.topology), self.devices, self.stride(dimension), self.size(dimension))

    def tiers(self, dimension: str) -> tuple[NetworkTier, ...]:
        """A dimension's groups level by level, for hierarchical collectives; levels that do not part them left out.

        Where domains cut a group unevenly, a rank of a domain with few carries more than one of a domain with many.
        """
        return _tiers(_Key(self.topology), self.devices, self.stride(dimension), self.size(dimension))

    def group(self, count: int, stride: int) -> tuple[Edges, tuple[NetworkTier, ...]]:
        """Groups of devices as far apart as those of a dimension or a part of it: a ring, and level by level.

        Args:
            count: Devices of a group.
            stride: Devices from one of a group to the next; ``count * stride`` divides the devices of the job.
        """
        key = _Key(self.topology)
        return _ring(key, self.devices, stride, count), _tiers(key, self.devices, stride, count)

    def boundary(self, index: int) -> Edges:
        """What messages of pipeline rank ``index`` to the next (of the last to the first) get, all copies together."""
        return self.boundaries[index % len(self.boundaries)]

    def shared_links(self, index: int) -> tuple[SharedLink, ...]:
        """Links on which messages of pipeline rank ``index + 1`` to ``index`` meet the rings over copies of the model.

        Links alike are named once.
        """
        p = self.size("pipeline")
        lengths = (p, self.stride("pipeline"), self.size("data"), self.stride("data"))
        return _shared_links(_Key(self.topology), self.devices, index % p, *lengths)

    @cached_property
    def boundaries(self) -> tuple[Edges, ...]:
        """Of every pipeline rank."""
        return _boundaries(_Key(self.topology), self.devices, self.stride("pipeline"), self.size("pipeline"))


class _Key:
    """A topology as the key of a cache: by identity, as its hash takes as long as what is cached."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def __hash__(self) -> int:
        return id(self.topology)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.topology is other.topology


def _edges(topology: Topology, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> Edges:
    """Equal shares of every link for pairs that all send as much."""
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
    """How many pairs send over the links of one kind, in one direction."""

    level: int  # that they cross by these links
    name: str
    first: int  # place of the first link among the cluster's resources
    capacities: NDArray[np.float64]  # bytes per second of each link
    pairs: NDArray[np.int64]  # over each


def _loads(topology: Topology, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> Iterator[_Load]:
    """Of ports within hosts, network cards, and the links of every level above; kinds that none cross are left out."""
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
def _ring(key: _Key, devices: int, stride: int, size: int) -> Edges:
    if size == 1:
        return NOWHERE
    groups = _groups(devices, stride, size)
    return _edges(key.topology, groups.ravel(), np.roll(groups, -1, axis=1).ravel())


@lru_cache(maxsize=4096)
def _boundaries(key: _Key, devices: int, stride: int, size: int) -> tuple[Edges, ...]:
    if size == 1:
        return (NOWHERE,)
    groups = _groups(devices, stride, size)
    return tuple(_edges(key.topology, groups[:, i], groups[:, (i + 1) % size]) for i in range(size))


@lru_cache(maxsize=1024)
def _ring_loads(key: _Key, devices: int, stride: int, size: int) -> tuple[_Load, ...]:
    groups = _groups(devices, stride, size)
    return tuple(_loads(key.topology, groups.ravel(), np.roll(groups, -1, axis=1).ravel()))


@lru_cache(maxsize=4096)
def _shared_links(
    key: _Key, devices: int, index: int, pipeline: int, pipeline_stride: int, data: int, data_stride: int
) -> tuple[SharedLink, ...]:
    if pipeline == 1 or data == 1:
        return ()
    groups = _groups(devices, pipeline_stride, pipeline)
    messages = _loads(key.topology, groups[:, (index + 1) % pipeline], groups[:, index])
    rings = _ring_loads(key, devices, data_stride, data)
    found: set[SharedLink] = set()
    for one in messages:
        for other in rings:
            if one.level == 0 or one.first != other.first:
                continue
            ends = min(len(one.pairs), len(other.pairs))
            both = np.flatnonzero((one.pairs[:ends] > 0) & (other.pairs[:ends] > 0))
            links = np.stack([one.capacities[both], one.pairs[both], other.pairs[both]], axis=1)
            found.update(SharedLink(rate, int(a), int(b)) for rate, a, b in np.unique(links, axis=0).tolist())
    return tuple(sorted(found))


@lru_cache(maxsize=4096)
def _tiers(key: _Key, devices: int, stride: int, size: int) -> tuple[NetworkTier, ...]:
    if size == 1:
        return ()
    topology, found = key.topology, []
    ranks = _groups(devices, stride, size).ravel()  # group after group, and in a group from domain to domain
    group = np.repeat(np.arange(len(ranks) // size), size)
    below = ranks  # the domain of the level below that holds each rank; at first the rank itself
    for sizes in topology.sizes:
        above = np.searchsorted(np.cumsum(sizes), ranks, side="right")
        starts = np.flatnonzero(np.r_[True, (group[1:] != group[:-1]) | (below[1:] != below[:-1])])
        counts = np.diff(np.r_[starts, len(ranks)])  # ranks of a group in each domain below: a part
        whole = np.flatnonzero(
            np.r_[True, (group[starts[1:]] != group[starts[:-1]]) | (above[starts[1:]] != above[starts[:-1]])]
        )  # the first part of a group's in each domain of this level
        parts = np.diff(np.r_[whole, len(starts)])
        most = int(parts.max())
        if most > 1:
            fullest = np.maximum.reduceat(counts, whole)
            following = np.arange(1, len(starts) + 1)
            following[np.r_[whole[1:], len(starts)] - 1] = whole  # rings close within a domain
            flows = np.repeat(fullest, parts)  # from a part to the next: as many as the fullest part has ranks
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
