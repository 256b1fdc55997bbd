"""Simulation of a training step of a recommendation model: the cost and the schedule of every operation.

Tables are cut over the devices of a group, and groups repeat (2D parallelism, arXiv 2508.03854, but with copies that
stay equal); dense layers are on all devices. The device with the most work stands for all, because every exchange makes
the others wait for it. Three streams run in parallel, as in TorchRec's pipeline: computation, exchanges within a group,
and reductions. Each stream runs its operations in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cordillera.cost import CostModel
from cordillera.errors import PlanError
from cordillera.planning.language.workload import BYTES
from cordillera.planning.network.collective_cost import doubling_seconds, ring_seconds
from cordillera.planning.network.fabric import Fabric
from cordillera.planning.network.mesh import Mesh
from cordillera.planning.network.settings import NetworkSettings
from cordillera.planning.ranking.exchange import (
    STREAMS,
    Exchange,
    Operation,
    TableLayout,
    TableSchedule,
    exposed,
    run,
    shares,
)
from cordillera.planning.ranking.workload import Array, PlacedTables, Recommender, Tables, copied, update_traffic
from cordillera.topology import Topology

_LINEAR_OF_A_LAYER = 4  # linear layers in a transformer layer, for which layer_s was measured
_FORWARD_TRAFFIC, _BACKWARD_TRAFFIC = 4, 6  # bytes per output value: read and written; read twice and written


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
        dealt: PlacedTables,
        cost: CostModel,
        network: Mapping[str, NetworkSettings] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.workload, self.topology, self.layout, self.dealt = workload, topology, layout, dealt
        self.cost, self.network = cost, network
        self._exchange = exchange
        self._mesh = Mesh(topology, layout.order, tuple(layout.sizes.values()))
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

        Each device of ``mesh`` contributes and receives ``size`` bytes along a ``dimension``.
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
        """Return the seconds of forward and backward: bottom net for the whole batch, top net for one of ``chunks``.

        A host that launches kernels may be slower than the device: a linear layer takes at least a quarter of the
        calibrated time of a transformer layer, which has four.
        """
        if chunks in self._layers:
            return self._layers[chunks]
        work, cost, rows = self.workload, self.cost, self.samples / chunks
        times = dict.fromkeys(("bottom forward", "bottom backward", "top forward", "top backward"), 0.0)
        for name, layers in (("bottom", work.bottom_layers), ("top", work.top_layers)):
            count = self.samples if name == "bottom" else rows
            for i, (inputs, outputs) in enumerate(layers):
                forward, of_input, of_weight = cost.linear(count, outputs, inputs)
                first = name == "bottom" and i == 0  # the gradient of the features is not needed
                times[f"{name} forward"] += forward + cost.stream(_FORWARD_TRAFFIC * count * outputs)
                times[f"{name} backward"] += of_weight + (0.0 if first else of_input)
                times[f"{name} backward"] += cost.stream(_BACKWARD_TRAFFIC * count * outputs)
        if work.interaction == "dot":
            dim, n = work.tables[0].dim, work.vectors
            times["top forward"] += cost.product(n, n, dim, rows)
            times["top backward"] += 2 * cost.product(n, dim, n, rows)
        # exchanged columns are read, parts of rows summed, and all of it written side by side; then the reverse
        arrived = rows * float(self.dealt.sent_columns.sum())
        times["top forward"] += cost.stream(arrived * work.forward_bytes + BYTES * rows * work.width)
        times["top backward"] += cost.stream(arrived * work.backward_bytes + BYTES * rows * work.width)
        total = sum(chunks * seconds if part.startswith("top") else seconds for part, seconds in times.items())
        count = len(work.bottom_layers) + chunks * len(work.top_layers)
        floor = count * cost.calibration.layer_s / _LINEAR_OF_A_LAYER
        by = max(1.0, floor / total)
        self._layers[chunks] = {part: by * seconds for part, seconds in times.items()}
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
        """Return the operations of one batch under a schedule, with each stream in order."""
        cost, chunks = self.cost, schedule.chunks
        fixed = self.exchange.overhead(cost)
        forward, backward = (self.busy[kind] / chunks + fixed for kind in ("forward", "backward"))
        lookup = cost.stream((self.group_samples * float(self.dealt.read.max()) + self._local[0]) / chunks)
        synchronise, moved = self.synchronisation
        layers = self.layers(chunks)
        # the number of ids is exchanged first
        need = () if schedule.prefetch else ("-optimizer",)
        ids = Operation("ids", "input exchange", "exchange", self.busy["ids"] + 2 * fixed, need)
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

    def memory(self, schedule: TableSchedule) -> dict[str, float]:
        """Return the bytes on the fullest device, by cause; a schedule with prefetch holds the ids of two batches."""
        work, dealt = self.workload, self.dealt
        batches = 2 if schedule.prefetch else 1  # batches whose ids are held
        buffers = batches * self.weights["ids"] + self.weights["forward"] + self.weights["backward"]
        arrived = self.samples * float(dealt.sent_columns.sum()) * (work.forward_bytes + work.backward_bytes)
        at = int(np.argmax(dealt.memory + dealt.optimizer + buffers))
        return {
            "tables": float(dealt.memory[at]),
            "optimizer": float(dealt.optimizer[at]),
            "buffers": float(buffers[at]) + arrived,
            **fixed_memory(work, self.samples, self.everywhere),
        }

    def step(self, schedule: TableSchedule) -> TableStep:
        """Simulate several batches under a schedule and return the mean of the last ones."""
        batches = run(self.program(schedule))
        shown = batches[-2]
        begin = min(one.start for one in shown)
        timeline = tuple(
            Operation(one.name, one.cause, one.stream, one.seconds, one.after, one.start - begin, one.end - begin)
            for one in shown
        )
        return TableStep(exposed(batches), self.memory(schedule), timeline, self.crossed, self.volumes)

    def bound(self, schedule: TableSchedule) -> float:
        """Return a lower bound on the seconds of a step: the busiest stream without any waiting."""
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


def fixed_memory(workload: Recommender, samples: float, everywhere: Sequence[Tables]) -> dict[str, float]:
    """Return the bytes on every device that do not depend on its parts of tables, by cause.

    They are those of the dense layers of ``workload``, of the tables ``everywhere``, which every device holds, and of
    the activations of a device's ``samples``.
    """
    layers = workload.bottom_layers + workload.top_layers
    widths = workload.dense + workload.width + sum(outputs for _, outputs in layers)
    dense = workload.dense_parameters * workload.dense_bytes
    for one in everywhere:
        row = one.dim * (one.weight_bytes + workload.gradient_bytes) + workload.optimizer_bytes
        dense += one.count * one.rows * row
    return {"dense layers": dense, "activations": 2.0 * BYTES * samples * widths}  # activations and their gradients


def local_samples(workload: Recommender, devices: int) -> int:
    """Return the number of samples on the device that has most, with the batch of ``workload`` cut over ``devices``.

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
