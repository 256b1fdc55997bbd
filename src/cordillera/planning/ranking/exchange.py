"""Layouts of embedding tables over devices, and the exchange of their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cordillera.cost import CostModel
from cordillera.errors import PlanError
from cordillera.numbers import counted
from cordillera.planning.network.settings import NetworkSettings, fullest, possible
from cordillera.planning.ranking.workload import Array
from cordillera.topology import Topology

TableDimension = Literal["tables", "copies"]
Reduction = Literal["split", "whole", "last"]
_BATCHES, _SETTLED = 12, 8  # simulated batches; last batches whose mean is the step
INSIDE: tuple[tuple[TableDimension, TableDimension], ...] = (("tables", "copies"), ("copies", "tables"))
STREAMS = ("compute", "exchange", "reduce")
CAUSES = {
    "lookup": "Lookups",
    "layers": "Dense layers, forward and backward",
    "input exchange": "Exchange of ids",
    "pooled exchange": "Exchange of embeddings and gradients",
    "dense reduction": "Reduction of dense gradients",
    "table synchronisation": "Synchronisation of tables",
    "update": "Update of tables",
    "optimizer": "Optimizer of dense layers",
}
_ENOUGH_FLOWS = 64  # flows of a device beyond which hashing spreads them evenly enough


@dataclass(frozen=True)
class TableLayout:
    """How the training of a recommendation model is cut over devices.

    Attributes:
        group: Number of devices over which the tables are cut.
        copies: Number of groups, each of which holds all tables.
        order: Dimensions from the innermost outwards: the devices of a group, and the copies of a part.
        grain: Largest cost of a part of a table, in equal shares of a device; infinite to cut for memory alone.
        copied_rows: Tables with at most this many rows are copied to every device, like dense layers.
    """

    group: int
    copies: int = 1
    order: tuple[TableDimension, TableDimension] = INSIDE[0]
    grain: float = 1.0
    copied_rows: int = 0

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.group * self.copies

    @property
    def sizes(self) -> dict[str, int]:
        """Number of devices along every dimension, from the innermost outwards."""
        by_name = {"tables": self.group, "copies": self.copies}
        return {name: by_name[name] for name in self.order}

    @property
    def across(self) -> str:
        """Name of the dimension that crosses the outermost links; ``none`` with one device."""
        return next((name for name, size in reversed(self.sizes.items()) if size > 1), "none")

    def __str__(self) -> str:
        words = [f"tables over {counted(self.group, 'device')}"]
        if self.copies > 1:
            words.append(f"{self.copies:,} copies" + ("" if self.order == INSIDE[0] else " side by side"))
        if self.copied_rows:
            words.append(f"up to {self.copied_rows:,} rows on each")
        if self.grain != 1:
            share = f"parts of at most {self.grain:g} of a device's mean work"
            words.append("cut only to fit the memory" if math.isinf(self.grain) else share)
        return ", ".join(words)


@dataclass(frozen=True)
class TableSchedule:
    """Order of the operations of a step.

    Attributes:
        prefetch: Whether the ids of the next batch are exchanged during the computation of this one.
        late: Whether the prefetch follows the exchange of embedding gradients instead of that of embeddings.
        reduction: When dense gradients are reduced: ``split`` reduces those of the top net during the backward of the
            bottom net, ``whole`` reduces all of them after it, ``last`` after the synchronisation of the table copies.
        chunks: Number of parts of a device's batch; one part is exchanged while another is computed.
    """

    prefetch: bool = True
    late: bool = False
    reduction: Reduction = "whole"
    chunks: int = 1

    def __str__(self) -> str:
        ids = "no prefetch" if not self.prefetch else "late prefetch" if self.late else "prefetch"
        words = [ids, {"split": "split reduction", "whole": "one reduction", "last": "reduction last"}[self.reduction]]
        return ", ".join(words + ([f"{self.chunks} chunks"] if self.chunks > 1 else []))


def shares(topology: Topology, devices: int) -> list[float]:
    """Return each device's share, in bytes/s, of the links of ``topology`` up to each level if all ``devices`` send."""
    found, share = [topology.member_bytes_per_s(0, 0)], topology.device.nic_bytes_per_s
    for level in range(1, len(topology.levels)):
        ends = np.minimum(np.cumsum(topology.sizes[level - 1]), devices)
        counts = np.diff(ends, prepend=0)
        counts = counts[counts > 0]  # domains are filled in order
        first = topology.resource(level, 0, False)
        share = min(share, float((topology.capacities[first : first + 2 * len(counts) : 2] / counts).min()))
        found.append(share)
    return found


class Exchange:
    """All-to-alls within all groups at the same time, on the links that the groups share.

    Every member of a group sends to every other at once; the busiest port, network card or domain link determines the
    time.

    Args:
        topology: The cluster.
        group: Number of devices of a group.
        copies: Number of groups.
        order: Dimensions from the innermost outwards.
    """

    def __init__(
        self, topology: Topology, group: int, copies: int, order: Sequence[TableDimension] = INSIDE[0]
    ) -> None:
        self.topology, self.group, self.devices = topology, group, group * copies
        if self.devices > topology.devices:
            raise PlanError(
                f"{self.devices:,} devices are needed, the cluster has {topology.devices:,}", where=topology.name
            )
        ranks = np.arange(self.devices)
        inner = order[0] == "tables"
        self._member = ranks % group if inner else ranks // copies
        of = ranks // group if inner else ranks % copies
        self._domains: list[NDArray[np.int64]] = []
        self._parts: list[NDArray[np.int64]] = []  # each device's part of its group in its domain, by level
        for sizes in topology.sizes:
            domain = np.searchsorted(np.cumsum(sizes), ranks, side="right")
            self._domains.append(domain)
            self._parts.append(np.unique(of * len(sizes) + domain, return_inverse=True)[1])
            if len(np.unique(domain)) == 1:
                break  # nothing crosses higher levels
        within = [np.ones(self.devices)]
        within += [np.bincount(part)[part].astype(np.float64) for part in self._parts]
        # Members of a device's group that it first meets at this level, by level.
        self._partners = np.diff(np.stack(within), axis=0)

    def crossing(self, weights: Array) -> tuple[Array, Array]:
        """Return the bytes that leave and enter every device, by the level at which the ranks meet: ``[L, N]``.

        ``weights`` are the bytes that each member of a group sends to all members together, itself included, with an
        equal part for each: ``[group]``.
        """
        own = weights[self._member]
        leaving = own * self._partners / self.group
        sums = [own] + [np.bincount(part, own)[part] for part in self._parts]
        entering = np.stack(sums)
        return leaving, np.asarray((entering[1:] - entering[:-1]) / self.group, dtype=np.float64)

    def efficiencies(self, cost: CostModel, network: Mapping[str, NetworkSettings] | None) -> list[float]:
        """Return the fraction of the links up to each level that an exchange attains.

        ``cost`` holds the calibration of ports and network cards; ``network`` holds the settings by level name, or is
        None for links without losses or waiting.
        """
        found = [cost.calibration.port]
        for i, share in enumerate(shares(self.topology, self.devices)[1 : len(self._partners)], 1):
            level, partners = self.topology.levels[i], self._partners[i]
            rate = share * cost.calibration.network
            if network is not None and partners.any():
                few = float(partners[partners > 0].min())
                settings = possible(network[level.name], level)
                pair = settings.rate(rate / few, level.latency, level.loss_rate)
                flows = few * (settings.queue_pairs if settings.balance == "enhanced" else 1)
                spread = 1.0 if settings.balance == "spray" else fullest(min(int(flows), _ENOUGH_FLOWS), level.planes)
                rate = pair * few / spread
            found.append(rate / share)
        return found

    def busy(self, weights: Array, backwards: bool, efficiencies: Sequence[float]) -> float:
        """Return the seconds that the busiest port, network card or link sends in one exchange.

        Args:
            weights: Bytes of each member of a group, as in :meth:`crossing`.
            backwards: Whether members receive these bytes, in equal parts from all members, instead of sending them.
            efficiencies: Fraction of the links attained, by level.
        """
        top = self.topology
        parts = np.array(efficiencies)[:, None]
        found = 0.0
        for inwards, way in enumerate(self.crossing(weights)):
            way = way / parts  # scaled to bytes at the full rate of the link
            beyond = way[::-1].cumsum(0)[::-1]  # bytes that meet at each level or an outer one
            found = max(found, float(way[0].max()) / top.member_bytes_per_s(0, 0))
            if len(beyond) > 1:
                found = max(found, float(beyond[1].max()) / top.device.nic_bytes_per_s)
            for level in range(1, len(beyond)):
                loads = np.bincount(self._domains[level - 1], beyond[level])
                first = top.resource(level, 0, bool(inwards) != backwards)
                found = max(found, float((loads / top.capacities[first : first + 2 * len(loads) : 2]).max()))
        return found

    def overhead(self, cost: CostModel) -> float:
        """Return the fixed seconds of an exchange: latency to the furthest member, and a message for each."""
        if self.group == 1:
            return 0.0
        furthest = int(np.flatnonzero(self._partners.any(axis=1))[-1])
        constants, latency = cost.calibration, self.topology.levels[furthest].latency
        return latency + (self.group - 1) * constants.message_s + constants.collective_s

    def volumes(self, weights: Array) -> list[float]:
        """Return the bytes of one exchange in all groups, by the level at which sender and receiver meet.

        ``weights`` are those of :meth:`crossing`.
        """
        return [float(level.sum()) for level in self.crossing(weights)[0]]


@dataclass
class Operation:
    """One operation of a stream.

    Attributes:
        name: Name, unique within the batch.
        cause: A key of :data:`CAUSES`.
        stream: Name of its stream, from :data:`STREAMS`.
        seconds: Duration in seconds.
        after: Names of the operations that must be done first, besides the previous one on the stream; a leading ``-``
            names an operation of the previous batch.
        start: Time at which it begins, seconds.
        end: Time at which it is done, seconds.
        waited: Operation whose end started this one; None for the very first.
    """

    name: str
    cause: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()
    start: float = 0.0
    end: float = 0.0
    waited: Operation | None = field(default=None, repr=False)


def run(program: Sequence[Operation], batches: int = _BATCHES) -> list[list[Operation]]:
    """Run the operations of a step for several ``batches`` and return them with their times, batch by batch.

    An operation begins when the previous one on its stream and all that it needs are done. Times are longest paths
    through the operations, so that a faster operation never makes a step longer. ``program`` holds the operations of
    one batch, with each stream in order; an operation needs earlier ones, or ones of the previous batch.
    """
    size, places = len(program), {one.name: i for i, one in enumerate(program)}
    needs: list[list[int]] = []  # positions of what an operation needs; negative for those of the batch before
    last: dict[str, int] = {one.stream: i - size for i, one in enumerate(program)}
    for i, one in enumerate(program):
        own = [last[one.stream]]
        own += [places[name[1:]] - size if name.startswith("-") else places[name] for name in one.after]
        needs.append(own)
        last[one.stream] = i
    seconds = [one.seconds for one in program]
    ends, waited = [0.0] * size, [-1] * size  # a batch before the first, which takes no time
    for first in range(size, size * (batches + 1), size):
        for own, takes in zip(needs, seconds, strict=True):
            end, at = -1.0, -1
            for need in own:
                if ends[first + need] > end:
                    end, at = ends[first + need], first + need
            ends.append(end + takes)
            waited.append(at)
    found: list[Operation] = []
    for i in range(size, len(ends)):
        one, at = program[i % size], waited[i] - size
        start = ends[waited[i]]
        before = found[at] if at >= 0 else None
        found.append(Operation(one.name, one.cause, one.stream, one.seconds, one.after, start, ends[i], before))
    return [found[i : i + size] for i in range(0, len(found), size)]


def exposed(batches: Sequence[Sequence[Operation]]) -> dict[str, float]:
    """Return the seconds of a step by cause: operations of the compute stream, and the causes of its idle time.

    A wait is attributed to the operations on the path that ends it. The mean over the last of the batches from
    :func:`run` is taken.
    """
    parts = dict.fromkeys(CAUSES, 0.0)
    settled = len(batches[-_SETTLED:])
    before = [one for one in batches[-settled - 1] if one.stream == "compute"][-1] if settled < len(batches) else None
    free = before.end if before else 0.0
    for batch in batches[-settled:]:
        for one in batch:
            if one.stream != "compute":
                continue
            blamed, until = one.waited, one.start
            while until > free and blamed is not None:
                begin = max(blamed.start, free)
                parts[blamed.cause] += max(0.0, until - begin)
                until, blamed = min(until, begin), blamed.waited
            parts[one.cause] += one.seconds
            free = one.end
    return {cause: seconds / settled for cause, seconds in parts.items()}
