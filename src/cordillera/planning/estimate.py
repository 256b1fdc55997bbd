"""The analytic stage: a step's time and memory from formulas, fast enough to try thousands of layouts a second.

What it leaves out (latencies that a schedule hides or not, shared links over time) is what the simulation of a schedule
adds; what both share is the cost of layers, stages and collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cordillera.cost import CostModel
from cordillera.planning.collective_cost import ring_seconds
from cordillera.planning.mesh import Edges, Mesh
from cordillera.planning.network import NetworkSettings
from cordillera.planning.workload import (
    BYTES,
    Layout,
    Seconds,
    Workload,
    activation_bytes,
    embedding_seconds,
    head_seconds,
    layer_seconds,
    layers_of_stages,
)


@dataclass(frozen=True)
class Estimate:
    """What a layout is predicted to take.

    Attributes:
        layout: How the job is cut.
        order: Of the dimensions on the cluster, innermost first.
        parts: Seconds of a step by cause; their sum is the step.
        memory: Bytes on a device of each pipeline rank: weights, gradients, optimizer state, activations.
        flops: Of the model's own arithmetic in a step, over all devices.
        peak: FLOPs per second of all devices' matrix engines.
    """

    layout: Layout
    order: tuple[str, ...]
    parts: dict[str, float]
    memory: tuple[dict[str, float], ...]
    flops: float
    peak: float

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.parts.values())

    @property
    def utilisation(self) -> float:
        """Model FLOPs over what the devices could have done (MFU)."""
        return self.flops / (self.seconds * self.peak)

    @property
    def memory_bytes(self) -> float:
        """On the device that needs most."""
        return max(sum(rank.values()) for rank in self.memory)


class Fabric:
    """What pairs of devices of a mesh really get of their links.

    Args:
        mesh: Where a job's ranks lie.
        cost: Of the devices.
        network: Settings of each level above hosts, by name; None for links that lose nothing and are never waited for.
    """

    def __init__(self, mesh: Mesh, cost: CostModel, network: Mapping[str, NetworkSettings] | None = None) -> None:
        self.mesh, self.cost, self.network = mesh, cost, network

    def rate(self, edges: Edges) -> float:
        """Bytes per second that pairs of devices really get."""
        if edges.level == 0:
            return edges.bytes_per_s * self.cost.calibration.port
        rate = edges.bytes_per_s * self.cost.calibration.network
        if self.network is None or edges.level < 0:
            return rate
        level = self.mesh.topology.levels[edges.level]
        return self.network[level.name].rate(rate, edges.latency, level.loss_rate, level.planes)


class Job(Fabric):
    """A workload cut over a cluster: stages, messages and collectives with their costs, for estimate and simulation.

    Args:
        workload: What is trained.
        mesh: Where its ranks lie.
        layout: How it is cut.
        cost: Of the devices.
        network: Settings of each level above hosts, by name; None for links that lose nothing and are never waited for.
    """

    def __init__(
        self,
        workload: Workload,
        mesh: Mesh,
        layout: Layout,
        cost: CostModel,
        network: Mapping[str, NetworkSettings] | None = None,
    ) -> None:
        super().__init__(mesh, cost, network)
        self.workload, self.layout = workload, layout
        self.tokens = layout.microbatch * workload.sequence / layout.context  # of a microbatch on a device
        self.microbatches = layout.microbatches(workload)

    def all_reduce(self, dimension: str, size: float) -> float:
        """Seconds of an all-reduce over a dimension, as one ring or level by level, whichever is faster.

        Args:
            dimension: Of the mesh.
            size: Bytes that each device has and receives.
        """
        n = self.mesh.size(dimension)
        if n == 1:
            return 0.0
        edges = self.mesh.ring(dimension)
        ring = 2 * ring_seconds(n, size, edges.latency, self.rate(edges))
        tiers = self.mesh.tiers(dimension)
        if not tiers:
            return ring
        within, share = 0.0, size  # hierarchical: each tier reduces what the tier inside left it
        for parts, edges in tiers:
            within += 2 * ring_seconds(parts, share, edges.latency, self.rate(edges))
            share /= parts
        return min(ring, within)

    @cached_property
    def tensor_reduce(self) -> float:
        """Seconds of one all-reduce of a microbatch's activations over the tensor-parallel devices."""
        if self.layout.tensor == 1:
            return 0.0
        size = BYTES * self.tokens * self.workload.model.hidden
        return self.all_reduce("tensor", size) + self.cost.calibration.collective_s

    @cached_property
    def exchange(self) -> float:
        """Seconds of one exchange of tokens between the devices that share a layer's experts, balanced routing."""
        experts, n = self.workload.model.experts, self.layout.expert
        if experts is None or n == 1:
            return 0.0
        size = BYTES * self.tokens * experts.active * self.workload.model.hidden / self.layout.tensor
        slowest, latency, inside = 0.0, 0.0, 1
        for tier in self.mesh.expert_tiers(n):
            slowest = max(slowest, size * (1 - inside / n) / self.rate(tier.edges))  # what leaves a part of the tier
            latency = max(latency, tier.edges.latency)
            inside *= tier.parts
        return slowest + latency + self.cost.calibration.collective_s

    @cached_property
    def layer(self) -> Seconds:
        """One layer and one microbatch, a mean over layers where some have experts."""
        one = layer_seconds(self.workload, self.layout, self.cost, self.tensor_reduce)
        experts = self.workload.model.experts
        if experts is not None and self.layout.expert > 1:
            twice = 2 * self.exchange / experts.every  # to the experts and back
            again = twice if self.layout.recompute == "full" else 0.0
            one = Seconds(
                one.forward + twice,
                one.again + again,
                one.input_gradient + twice,
                one.weight_gradient,
                one.tensor,
            )
        if self.layout.context == 1:
            return one
        # keys and values are gathered in the forward, and again where it is; their gradients are scattered back
        size = 2 * BYTES * self.tokens * self.layout.context * self.workload.model.keys / self.layout.tensor
        edges, n = self.mesh.ring("context"), self.layout.context
        gather = ring_seconds(n, size, edges.latency, self.rate(edges))
        return Seconds(
            one.forward + gather,
            one.again + (gather if self.layout.recompute == "full" else 0.0),
            one.input_gradient + gather,
            one.weight_gradient,
            one.tensor,
        )

    @cached_property
    def stage_layers(self) -> list[int]:
        """Layers of every stage."""
        return layers_of_stages(self.workload.model.layers, self.layout.stages)

    @cached_property
    def stages(self) -> list[Seconds]:
        """Every stage and one microbatch."""
        one, last = self.layer, self.layout.stages - 1
        first_part = embedding_seconds(self.workload, self.layout, self.cost, self.tensor_reduce)
        last_part = head_seconds(self.workload, self.layout, self.cost, self.tensor_reduce)
        inside = {count: one.times(count) for count in set(self.stage_layers)}
        found = [inside[count] for count in self.stage_layers]
        found[0] = found[0].plus(first_part)
        found[last] = found[last].plus(last_part)
        return found

    @property
    def busiest(self) -> float:
        """Seconds that the busiest rank computes at least, under any schedule, chunks dealt out in turn or like a V."""
        p, stages = self.layout.pipeline, self.stages
        most = max(sum(stage.total for stage in stages[rank::p]) for rank in range(p))
        if self.layout.chunks == 2:
            most = min(most, max(stages[rank].total + stages[-1 - rank].total for rank in range(p)))
        return self.microbatches * most

    @cached_property
    def message_bytes(self) -> float:
        """Of one microbatch between two stages, from one device: tensor-parallel devices send a part each."""
        return BYTES * self.tokens * self.workload.model.hidden / self.layout.tensor

    def message_seconds(self, boundary: int) -> float:
        """That a message occupies the way after a pipeline rank, latency left out."""
        edges = self.mesh.boundary(boundary)
        return self.message_bytes / self.rate(edges) if edges.level >= 0 else 0.0

    @cached_property
    def layer_weights(self) -> float:
        """Parameters of one layer on one device, a mean over layers."""
        model, experts = self.workload.model, self.workload.model.experts
        plain = float(model.matrices * model.hidden * (model.ffn or 4 * model.hidden))
        mixed, share = 0.0, 0.0
        if experts is not None:
            mixed = model.feed_forward_weights(experts.every - 1) / self.layout.expert
            share = model.layers // experts.every / model.layers
        return (model.attention_weights + share * mixed + (1 - share) * plain) / self.layout.tensor

    def weights(self, stages: Sequence[int]) -> float:
        """Parameters on one device of a rank that holds these stages."""
        first, last = 0 in stages, self.layout.stages - 1 in stages
        tables = max(first, last) if self.workload.model.tied else first + last
        return sum(map(self.stage_layers.__getitem__, stages)) * self.layer_weights + tables * self.table

    @cached_property
    def table(self) -> float:
        """Parameters of an embedding matrix on one device."""
        return self.workload.model.vocabulary * self.workload.model.hidden / self.layout.tensor

    @cached_property
    def dealt_out(self) -> list[range]:
        """The stages of every pipeline rank, dealt out in turn."""
        p = self.layout.pipeline
        return [range(rank, self.layout.stages, p) for rank in range(p)]

    @cached_property
    def rank_weights(self) -> list[float]:
        """Parameters on one device of each pipeline rank, stages dealt out in turn."""
        return [self.weights(stages) for stages in self.dealt_out]

    def held(self, stages: Sequence[int], weights: float, live: int) -> dict[str, float]:
        """Bytes on a device, by cause.

        Args:
            stages: That its rank holds.
            weights: Their parameters.
            live: Microbatches of a stage whose activations it holds at a time.
        """
        work, layout = self.workload, self.layout
        cut = layout.shards if layout.shard_weights else 1
        return {
            "weights": weights * work.weight_bytes / cut,
            "gradients": weights * work.gradient_bytes / cut,
            "optimizer": weights * work.optimizer_bytes / layout.shards,
            "activations": live * max(map(self.stage_layers.__getitem__, stages)) * self.layer_activations,
        }

    @cached_property
    def layer_activations(self) -> float:
        """Bytes of one layer for one microbatch."""
        return activation_bytes(self.workload, self.layout)

    @cached_property
    def tied_seconds(self) -> float:
        """To add up the gradients of input and output embeddings that are one matrix on two ranks."""
        if not self.workload.model.tied or self.layout.pipeline == 1:
            return 0.0
        return BYTES * self.table / self.rate(self.mesh.boundary(self.layout.pipeline - 1))

    def live_chunks(self, rank: int) -> int:
        """Microbatches of a chunk whose activations a rank of (interleaved) 1F1B holds."""
        p, v, m = self.layout.pipeline, self.layout.chunks, self.microbatches
        if v == 1:
            return min(m, p - rank)
        return min(m * v, (v - 1) * min(m, p) + 2 * (p - 1 - rank) + 1)

    def memory(self) -> tuple[dict[str, float], ...]:
        """Bytes on a device of each pipeline rank under (interleaved) 1F1B, by cause."""
        ranks = enumerate(zip(self.dealt_out, self.rank_weights, strict=True))
        return tuple(self.held(stages, weights, self.live_chunks(rank)) for rank, (stages, weights) in ranks)

    @cached_property
    def gradient_reduce(self) -> float:
        """Seconds to reduce a device's gradients over all copies of the model."""
        return self.all_reduce("data", max(self.rank_weights) * BYTES)

    def estimate(self) -> Estimate:
        """The step of (interleaved) 1F1B.

        The slowest rank's slot for every microbatch, the other ranks' slots once to fill and drain the pipeline, then
        what is not hidden of gradient reduction, and the optimizer.
        """
        layout = self.layout
        p, v, m = layout.pipeline, layout.chunks, self.microbatches
        send = [0.0] * p
        if p > 1:
            ways = [self.message_seconds(i) for i in range(p - 1)]
            # a slot sends and receives once each way, for every chunk
            send = [2 * v * ways[min(rank, p - 2)] for rank in range(p)]
        slots = [sum(stage.total for stage in self.stages[rank::p]) + send[rank] for rank in range(p)]
        slow = max(slots)
        at = slots.index(slow)
        tensor = sum(stage.tensor for stage in self.stages[at::p])
        reduce = self.gradient_reduce
        if layout.overlap_gradients:
            backward = sum(s.again + s.input_gradient + s.weight_gradient for s in self.stages[at::p])
            reduce = max(0.0, reduce - backward)
        parts = {
            "compute": m * (slow - tensor - send[at]),
            "tensor parallel": m * tensor,
            "pipeline messages": m * send[at],
            # chunks come round once a pass of all ranks, however few microbatches there are
            "pipeline bubble": (sum(slots) - slow) / v + max(0, p - m) * slow * (1 - 1 / v),
            "gradient reduction": reduce + self.tied_seconds,
            "optimizer": self.cost.optimizer(max(self.rank_weights) / layout.shards),
        }
        peak = layout.devices * self.cost.device.matrix_flops_per_s
        return Estimate(layout, self.mesh.order, parts, self.memory(), self.workload.flops, peak)
