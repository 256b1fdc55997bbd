"""Simulation of a training step of a recommendation model: what every operation costs, and when it runs.

Tables are cut over the devices of a group, and groups repeat (2D parallelism, arXiv 2508.03854, but with copies that
stay equal); dense layers are on all devices. The device with the most work stands for all, because every exchange makes
the others wait for it. Three streams run in parallel, as in TorchRec's pipeline: computation, exchanges within a group,
and reductions. Each stream runs its operations in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cordillera.cost import CostModel
from cordillera.errors import PlanError
from cordillera.planning.language.job import Fabric
from cordillera.planning.language.workload import BYTES
from cordillera.planning.network.collective_cost import doubling_seconds, ring_seconds
from cordillera.planning.network.mesh import Mesh
from cordillera.planning.network.settings import NetworkSettings, fullest
from cordillera.planning.ranking.workload import Array, Placement, Recommender, Tables, copied, update_traffic
from cordillera.topology import Topology

TableDimension = Literal["tables", "copies"]
Reduction = Literal["split", "whole", "last"]
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
_LINEAR_OF_A_LAYER = 4  # linear layers in a transformer layer, for which layer_s was measured
_FORWARD_TRAFFIC, _BACKWARD_TRAFFIC = 4, 6  # bytes per output value: read and written; read twice and written
_ENOUGH_FLOWS = 64  # flows of a device beyond which hashing spreads them evenly enough
_BATCHES, _SETTLED = 12, 8  # simulated batches; last batches whose mean is the step


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
    def across(self) -> str:
        """Name of the dimension that crosses the outermost links; ``none`` with one device."""
        sizes = {"tables": self.group, "copies": self.copies}
        return next((name for name in reversed(self.order) if sizes[name] > 1), "none")

    def __str__(self) -> str:
        words = [f"tables over {self.group:,}"]
        if self.copies > 1:
            words.append(f"{self.copies:,} copies" + ("" if self.order == INSIDE[0] else " side by side"))
        if self.copied_rows:
            words.append(f"up to {self.copied_rows:,} rows everywhere")
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
    """Return what a device gets of the links up to each level while all devices send there, bytes/s.

    Args:
        topology: The cluster.
        devices: Number of devices in use.
    """
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
        self._parts: list[NDArray[np.int64]] = []  # by level: for each device, the part of its group in its domain
        for sizes in topology.sizes:
            domain = np.searchsorted(np.cumsum(sizes), ranks, side="right")
            self._domains.append(domain)
            self._parts.append(np.unique(of * len(sizes) + domain, return_inverse=True)[1])
            if len(np.unique(domain)) == 1:
                break  # nothing crosses higher levels
        within = [np.ones(self.devices)]
        within += [np.bincount(part)[part].astype(np.float64) for part in self._parts]
        # by level: members of a device's group that it meets at this level and at no inner one
        self._partners = np.diff(np.stack(within), axis=0)

    def crossing(self, weights: Array) -> tuple[Array, Array]:
        """Return the bytes that leave and enter every device, by the level at which the ranks meet: ``[L, N]``.

        Args:
            weights: Bytes that each member of a group sends to all members together, itself included, with an equal
                part for each: ``[group]``.
        """
        own = weights[self._member]
        leaving = own * self._partners / self.group
        sums = [own] + [np.bincount(part, own)[part] for part in self._parts]
        entering = np.stack(sums)
        return leaving, np.asarray((entering[1:] - entering[:-1]) / self.group, dtype=np.float64)

    def efficiencies(self, cost: CostModel, network: Mapping[str, NetworkSettings] | None) -> list[float]:
        """Return the fraction of the links up to each level that an exchange attains.

        Args:
            cost: Cost model with the calibration of ports and network cards.
            network: Settings by level name; None for links without losses or waiting.
        """
        found = [cost.calibration.port]
        for i, share in enumerate(shares(self.topology, self.devices)[1 : len(self._partners)], 1):
            level, partners = self.topology.levels[i], self._partners[i]
            rate = share * cost.calibration.network
            if network is not None and partners.any():
                few = float(partners[partners > 0].min())
                settings = network[level.name]
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
            backwards: Whether each member receives these bytes, in equal parts from all members, instead of sending
                them.
            efficiencies: Fraction of the links attained, by level.
        """
        top = self.topology
        parts = np.array(efficiencies)[:, None]
        found = 0.0
        for inwards, way in enumerate(self.crossing(weights)):
            way = way / parts  # scaled to bytes at the full rate of the link
            beyond = way[::-1].cumsum(0)[::-1]  # by level: bytes that meet there or further out
            found = max(found, float(way[0].max()) / top.member_bytes_per_s(0, 0))
            if len(beyond) > 1:
                found = max(found, float(beyond[1].max()) / top.device.nic_bytes_per_s)
            for level in range(1, len(beyond)):
                loads = np.bincount(self._domains[level - 1], beyond[level])
                first = top.resource(level, 0, bool(inwards) != backwards)
                found = max(found, float((loads / top.capacities[first : first + 2 * len(loads) : 2]).max()))
        return found

    def overhead(self, cost: CostModel) -> float:
        """Return the fixed seconds of an exchange: latency to the furthest member, and a message for each.

        Args:
            cost: Cost model of the devices.
        """
        if self.group == 1:
            return 0.0
        furthest = int(np.flatnonzero(self._partners.any(axis=1))[-1])
        constants, latency = cost.calibration, self.topology.levels[furthest].latency
        return latency + (self.group - 1) * constants.message_s + constants.collective_s

    def volumes(self, weights: Array) -> list[float]:
        """Return the bytes of one exchange in all groups, by the level at which sender and receiver meet.

        Args:
            weights: Bytes of each member of a group, as in :meth:`crossing`.
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
    """Run the operations of a step for several batches and return them with their times, batch by batch.

    An operation begins when the previous one on its stream and all that it needs are done. Times are longest paths
    through the operations, so that a faster operation never makes a step longer.

    Args:
        program: Operations of one batch, with each stream in order; an operation needs earlier ones, or ones of the
            previous batch.
        batches: Number of batches.
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
    """Return the seconds of a step by cause: the operations of the computing stream, and what it waits for while idle.

    A wait is attributed to the operations on the path that ends it.

    Args:
        batches: Consecutive batches as :func:`run` returns them; the mean over the last ones is taken.
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


@dataclass(frozen=True)
class TableStep:
    """A simulated step.

    Attributes:
        parts: Seconds by cause on the computing stream; their sum is the time of the step.
        memory: Bytes on the fullest device, by cause.
        timeline: Operations of one of the batches with their times; the first begins at 0.
        crossed: Bytes of all exchanges of a step, by level of the cluster.
        volumes: Largest number of bytes that one device sends or receives, by kind of communication.
    """

    parts: dict[str, float]
    memory: dict[str, float]
    timeline: tuple[Operation, ...]
    crossed: dict[str, float]
    volumes: dict[str, float]

    @property
    def seconds(self) -> float:
        """Time of the step in seconds."""
        return sum(self.parts.values())

    @property
    def memory_bytes(self) -> float:
        """Bytes on the fullest device."""
        return sum(self.memory.values())


class TableJob:
    """A recommendation model cut over a cluster, with the operations of a step and their costs.

    Args:
        workload: Model and batch to train.
        topology: The cluster.
        layout: How the model is cut.
        dealt: Placement of the tables of a group.
        cost: Cost model of the devices.
        network: Settings of each level above hosts, by name; None for links without losses or waiting.
        exchange: Existing exchange with the same group, copies and order; None to make one.
    """

    def __init__(
        self,
        workload: Recommender,
        topology: Topology,
        layout: TableLayout,
        dealt: Placement,
        cost: CostModel,
        network: Mapping[str, NetworkSettings] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.workload, self.topology, self.layout, self.dealt = workload, topology, layout, dealt
        self.cost, self.network = cost, network
        self._exchange = exchange
        sizes = {"tables": layout.group, "copies": layout.copies}
        self._mesh = Mesh(topology, layout.order, tuple(sizes[name] for name in layout.order))
        self._all = Mesh(topology, ("devices",), (layout.devices,))
        self.samples = float(local_samples(workload, layout.devices))
        self.group_samples = self.samples * layout.group
        self._reductions: dict[float, float] = {}
        self._layers: dict[int, dict[str, float]] = {}

    @cached_property
    def exchange(self) -> Exchange:
        """All-to-alls within the groups."""
        return self._exchange or Exchange(self.topology, self.layout.group, self.layout.copies, self.layout.order)

    @cached_property
    def everywhere(self) -> tuple[Tables, ...]:
        """Tables that every device holds."""
        return copied(self.workload, self.layout.copied_rows)

    def all_reduce(self, mesh: Mesh, dimension: str, size: float) -> float:
        """Return the seconds of the fastest all-reduce: rings or halving and doubling, at once or level by level.

        Args:
            mesh: Placement of the ranks.
            dimension: Dimension of the mesh.
            size: Bytes that each device contributes and receives.
        """
        if mesh.size(dimension) == 1 or size == 0:
            return 0.0
        fabric = Fabric(mesh, self.cost, self.network)
        ranks, edges = mesh.size(dimension), mesh.ring(dimension)
        ways = [2 * ring_seconds(ranks, size, edges.latency, fabric.rate(edges))]
        # distant pairs first: each rank gets at least its share while all send that far
        rate = fabric.rate(edges._replace(bytes_per_s=min(edges.bytes_per_s, self._shares[edges.level])))
        ways.append(2 * doubling_seconds(ranks, size, edges.latency, rate))
        tiers, levels = mesh.tiers(dimension), 0.0
        for parts, ranks, edges in tiers:
            rate = fabric.rate(edges)
            levels += 2 * min(
                form(parts, size / ranks, edges.latency, rate) for form in (ring_seconds, doubling_seconds)
            )
        return min(ways + ([levels] if tiers else [])) + self.cost.calibration.collective_s

    @cached_property
    def _shares(self) -> list[float]:
        return shares(self.topology, self.layout.devices)

    def layers(self, chunks: int) -> dict[str, float]:
        """Return the seconds of forward and backward: bottom net for the whole batch, top net for one chunk.

        A host that launches kernels may be slower than the device: a linear layer takes at least a quarter of the
        calibrated time of a transformer layer, which has four.

        Args:
            chunks: Number of chunks of a device's batch.
        """
        if chunks in self._layers:
            return self._layers[chunks]
        work, cost, rows = self.workload, self.cost, self.samples / chunks
        times = {"bottom": [0.0, 0.0], "top": [0.0, 0.0]}
        for name, layers in (("bottom", work.bottom_layers), ("top", work.top_layers)):
            count = self.samples if name == "bottom" else rows
            for i, (inputs, outputs) in enumerate(layers):
                forward, of_input, of_weight = cost.linear(count, outputs, inputs)
                first = name == "bottom" and i == 0  # the gradient of the features is not needed
                times[name][0] += forward + cost.stream(_FORWARD_TRAFFIC * count * outputs)
                times[name][1] += of_weight + (0.0 if first else of_input)
                times[name][1] += cost.stream(_BACKWARD_TRAFFIC * count * outputs)
        if work.interaction == "dot":
            dim, n = work.tables[0].dim, work.vectors
            times["top"][0] += cost.product(n, n, dim, rows)
            times["top"][1] += 2 * cost.product(n, dim, n, rows)
        # exchanged columns are read, parts of rows summed, and all of it written side by side; then the reverse
        arrived = rows * float(self.dealt.sent_columns.sum())
        times["top"][0] += cost.stream(arrived * work.forward_bytes + BYTES * rows * work.width)
        times["top"][1] += cost.stream(arrived * work.backward_bytes + BYTES * rows * work.width)
        total = sum(times["bottom"]) + chunks * sum(times["top"])
        count = len(work.bottom_layers) + chunks * len(work.top_layers)
        floor = count * cost.calibration.layer_s / _LINEAR_OF_A_LAYER
        by = max(1.0, floor / total)
        self._layers[chunks] = {
            "bottom forward": by * times["bottom"][0],
            "bottom backward": by * times["bottom"][1],
            "top forward": by * times["top"][0],
            "top backward": by * times["top"][1],
        }
        return self._layers[chunks]

    @cached_property
    def reduced(self) -> tuple[float, float]:
        """Bytes of dense gradients: first the top net and the tables that every device holds, then the bottom net."""
        work = self.workload
        bottom = sum(inputs * outputs for inputs, outputs in work.bottom_layers)
        tables = sum(one.count * one.rows * one.dim for one in self.everywhere)
        return work.gradient_bytes * (work.dense_parameters - bottom + tables), work.gradient_bytes * bottom

    @cached_property
    def _local(self) -> tuple[float, float]:
        """Bytes that lookups and updates of the tables on every device move for the device's own samples."""
        work, read, update = self.workload, 0.0, 0.0
        for one in self.everywhere:
            moved = one.lookups * (one.dim * one.weight_bytes + work.id_bytes) + one.dim * BYTES
            read += one.count * self.samples * moved
            gradient = self.samples * update_traffic(one.lookups, float(one.dim), one.weight_bytes, 0.0)
            whole = one.rows * (one.dim * (2 * one.weight_bytes + work.gradient_bytes) + 2 * work.optimizer_bytes)
            update += one.count * (gradient + whole)
        return read, update

    @cached_property
    def weights(self) -> dict[str, Array]:
        """Bytes that every member of a group sends to, or receives from, all members in each exchange: ``[group]``."""
        work, dealt = self.workload, self.dealt
        return {
            "ids": self.group_samples * dealt.received,
            "forward": self.group_samples * work.forward_bytes * dealt.sent_columns,
            "backward": self.group_samples * work.backward_bytes * dealt.sent_columns,
        }

    @cached_property
    def busy(self) -> dict[str, float]:
        """Seconds that the busiest link sends in each exchange of a device's whole batch."""
        if self.layout.group == 1:
            return dict.fromkeys(self.weights, 0.0)
        parts = self.exchange.efficiencies(self.cost, self.network)
        return {kind: self.exchange.busy(one, kind != "forward", parts) for kind, one in self.weights.items()}

    @cached_property
    def synchronisation(self) -> tuple[float, float]:
        """Seconds to synchronise the copies of the tables, and bytes of memory that the following update moves."""
        copies = self.layout.copies
        reduced, gathered, moved = self.dealt.synchronised(self.group_samples, copies)
        seconds = self.all_reduce(self._mesh, "copies", float(reduced.max()))
        # an all-gather is the second half of an all-reduce of what is gathered
        seconds += self.all_reduce(self._mesh, "copies", copies * float(gathered.max())) / 2
        return seconds, float(moved.max())

    def program(self, schedule: TableSchedule) -> list[Operation]:
        """Return the operations of one batch, with each stream in order.

        Args:
            schedule: Order of the operations.
        """
        cost, chunks = self.cost, schedule.chunks
        fixed = self.exchange.overhead(cost)
        forward, backward = (self.busy[kind] / chunks + fixed for kind in ("forward", "backward"))
        lookup = cost.stream((self.group_samples * float(self.dealt.read.max()) + self._local[0]) / chunks)
        synchronise, moved = self.synchronisation
        layers = self.layers(chunks)
        # the number of ids is exchanged first
        ids = Operation("ids", "input exchange", "exchange", self.busy["ids"] + 2 * fixed)
        if not schedule.prefetch:
            ids.after = ("-optimizer",)
        found = [] if schedule.prefetch else [ids]
        known = "-ids" if schedule.prefetch else "ids"
        for i in range(chunks):
            found.append(Operation(f"lookup {i}", "lookup", "compute", lookup, (known,)))
            found.append(Operation(f"embeddings {i}", "pooled exchange", "exchange", forward, (f"lookup {i}",)))
        found.append(Operation("bottom forward", "layers", "compute", layers["bottom forward"]))
        if schedule.prefetch and not schedule.late:
            found.append(ids)
        for i in range(chunks):
            found.append(
                Operation(f"top forward {i}", "layers", "compute", layers["top forward"], (f"embeddings {i}",))
            )
            found.append(Operation(f"top backward {i}", "layers", "compute", layers["top backward"]))
            found.append(Operation(f"gradients {i}", "pooled exchange", "exchange", backward, (f"top backward {i}",)))
        if schedule.prefetch and schedule.late:
            found.append(ids)
        found.append(Operation("bottom backward", "layers", "compute", layers["bottom backward"]))
        top, bottom = self.reduced
        if schedule.reduction == "split":
            found.append(self._reduction("reduce top", top, f"top backward {chunks - 1}"))
            found.append(self._reduction("reduce", bottom, "bottom backward"))
        elif schedule.reduction == "whole":
            found.append(self._reduction("reduce", top + bottom, "bottom backward"))
        need = (f"gradients {chunks - 1}",)
        found.append(Operation("synchronisation", "table synchronisation", "reduce", synchronise, need))
        if schedule.reduction == "last":
            found.append(self._reduction("reduce", top + bottom, "bottom backward", "synchronisation"))
        update = cost.stream(moved + self._local[1])
        found.append(Operation("update", "update", "compute", update, ("synchronisation",)))
        optimizer = cost.optimizer(float(self.workload.dense_parameters))
        return [*found, Operation("optimizer", "optimizer", "compute", optimizer, ("reduce",))]

    def _reduction(self, name: str, size: float, *after: str) -> Operation:
        if size not in self._reductions:
            self._reductions[size] = self.all_reduce(self._all, "devices", size)
        return Operation(name, "dense reduction", "reduce", self._reductions[size], after)

    def fixed_memory(self) -> dict[str, float]:
        """Return the bytes on every device that do not depend on its parts of tables, by cause.

        They are those of dense layers, tables that every device holds, and activations.
        """
        work = self.workload
        widths = work.dense + work.width + sum(outputs for _, outputs in work.bottom_layers + work.top_layers)
        own = sum(one.count * one.rows * one.dim * (one.weight_bytes + work.gradient_bytes) for one in self.everywhere)
        own += sum(one.count * one.rows * work.optimizer_bytes for one in self.everywhere)
        return {
            "dense layers": work.dense_parameters * work.dense_bytes + own,
            "activations": 2.0 * BYTES * self.samples * widths,  # and their gradients
        }

    def memory(self, schedule: TableSchedule) -> dict[str, float]:
        """Return the bytes on the fullest device, by cause.

        Args:
            schedule: Order of the operations.
        """
        work, dealt = self.workload, self.dealt
        batches = 2 if schedule.prefetch else 1  # batches whose ids are held
        buffers = batches * self.weights["ids"] + self.weights["forward"] + self.weights["backward"]
        arrived = self.samples * float(dealt.sent_columns.sum()) * (work.forward_bytes + work.backward_bytes)
        at = int(np.argmax(dealt.memory + dealt.optimizer + buffers))
        fixed = self.fixed_memory()
        return {
            "tables": float(dealt.memory[at]),
            "optimizer": float(dealt.optimizer[at]),
            "buffers": float(buffers[at]) + arrived,
            **fixed,
        }

    def step(self, schedule: TableSchedule) -> TableStep:
        """Simulate several batches and return the mean of the last ones.

        Args:
            schedule: Order of the operations.
        """
        batches = run(self.program(schedule))
        shown = batches[-2]
        begin = min(one.start for one in shown)
        timeline = tuple(
            Operation(one.name, one.cause, one.stream, one.seconds, one.after, one.start - begin, one.end - begin)
            for one in shown
        )
        return TableStep(exposed(batches), self.memory(schedule), timeline, self.crossed, self.volumes)

    def bound(self, schedule: TableSchedule) -> float:
        """Return a lower bound on the seconds of a step: the busiest stream without any waiting.

        Args:
            schedule: Order of the operations.
        """
        totals = dict.fromkeys(STREAMS, 0.0)
        for one in self.program(schedule):
            totals[one.stream] += one.seconds
        return max(totals.values())

    @cached_property
    def crossed(self) -> dict[str, float]:
        """Bytes of all exchanges of a step, by the level at which sender and receiver meet."""
        levels = [level.name for level in self.topology.levels]
        found = dict.fromkeys(levels, 0.0)
        for weights in self.weights.values():
            for name, size in zip(levels, self.exchange.volumes(weights), strict=False):
                found[name] += size
        return found

    @cached_property
    def volumes(self) -> dict[str, float]:
        """Largest number of bytes that one device sends or receives, by kind of communication."""
        reduced, gathered, _ = self.dealt.synchronised(self.group_samples, self.layout.copies)
        return {kind: float(weights.max()) for kind, weights in self.weights.items()} | {
            "dense gradients": sum(self.reduced),
            "table gradients reduced": float(reduced.max()),
            "table gradients gathered": float(gathered.max()),
        }


def local_samples(workload: Recommender, devices: int) -> int:
    """Return the number of samples on the device that has most, with samples dealt as equally as possible.

    Args:
        workload: Workload with its batch.
        devices: Number of devices.

    Raises:
        PlanError: If a device would have no sample.
    """
    if workload.batch < devices:
        raise PlanError(
            f"a batch of {workload.batch:,} samples leaves some of {devices:,} devices without any",
            where=workload.name,
            remedy=f"--devices {workload.batch} or fewer, or a larger batch",
        )
    return -(-workload.batch // devices)
