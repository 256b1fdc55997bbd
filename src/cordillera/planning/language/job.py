"""Analytic costs of a step: time and memory from formulas, fast enough for thousands of layouts a second.

The simulation of a schedule adds what the formulas leave out: latencies that a schedule may hide, and links shared over
time. Both use the same costs of layers, stages and collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

from cordillera.cost import CostModel
from cordillera.planning.language.layers import (
    LayerSeconds,
    activation_bytes,
    embedding_seconds,
    head_activation_bytes,
    head_seconds,
    held_weights,
    layer_seconds,
    recomputes_ffn,
)
from cordillera.planning.language.workload import BYTES, Layout, Workload, layers_of_stages
from cordillera.planning.network.collective_cost import direct_seconds, doubling_seconds, ring_seconds
from cordillera.planning.network.contention import Contention, Slowdown
from cordillera.planning.network.fabric import Fabric
from cordillera.planning.network.mesh import Edges, Group, Mesh
from cordillera.planning.network.settings import NetworkSettings

_ISSUE_S = 2e-6  # seconds that a device takes to send one more message at the same time; an assumption


@dataclass(frozen=True)
class Estimate:
    """Predicted time and memory of a layout.

    Attributes:
        layout: Sizes of the dimensions of parallelism.
        order: Order of the dimensions on the cluster, innermost first.
        parts: Seconds of a step by cause; their sum is the time of the step.
        memory: Bytes on a device of each pipeline rank: weights, gradients, optimizer state, activations.
        flops: FLOPs of the model's own arithmetic in a step, over all devices.
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
        """Time of a step in seconds."""
        return sum(self.parts.values())

    @property
    def utilisation(self) -> float:
        """Model FLOPs as a fraction of the peak of all devices (MFU)."""
        return self.flops / (self.seconds * self.peak)

    @property
    def memory_bytes(self) -> float:
        """Bytes on the fullest device."""
        return max(sum(rank.values()) for rank in self.memory)


_Line = tuple[float, float]  # seconds, and seconds per byte
_Ways = tuple[_Line, tuple[tuple[_Line, ...], ...]]


def _with_collective(one: LayerSeconds, name: str, seconds: float, again: bool) -> LayerSeconds:
    """Return a layer with a collective in its forward and backward, and in the recomputation if ``again``."""
    redone = seconds if again else 0.0
    return one._replace(
        forward=one.forward + seconds,
        again=one.again + redone,
        input_gradient=one.input_gradient + seconds,
        **{name: 2 * seconds + redone},
    )


_direct_seconds = partial(direct_seconds, overhead=_ISSUE_S)


@lru_cache(maxsize=4096)
def _by_bytes(
    seconds: Callable[[int, float, float, float], float], n: int, ranks: int, edges: Edges, rate: float
) -> _Line:
    """Return the fixed seconds of a collective and its seconds per byte; every rank of a part has a share of it."""
    many = 1e18  # large, so that the difference is as exact as the formula
    of_bytes = seconds(n, many / ranks, 0.0, rate) - seconds(n, 0.0, 0.0, rate)
    return seconds(n, 0.0, edges.latency, rate), of_bytes / many


def exposed(stages: LayerSeconds, times: float = 1.0) -> dict[str, float]:
    """Return the seconds, times ``times``, of collectives inside ``stages`` that computation waits for, by cause."""
    return {
        "tensor parallel": times * stages.tensor,
        "context parallel": times * stages.context,
        "expert exchange": times * stages.exchange,
        "sharded weights": times * stages.gather,
    }


class PlannedJob(Fabric):
    """A workload cut over a cluster: stages, messages and collectives with their costs.

    A pipeline rank computes as fast as its slowest kind of devices, because all copies wait for one another.

    The arguments ``mesh``, ``network`` and ``late`` are those of :class:`Fabric`.

    Args:
        workload: Workload to train.
        layout: Sizes of the dimensions of parallelism.
        cost: Cost model of the devices, or of each kind by position in the cluster's ``kinds``.
        shared: Cache for jobs with the same number of devices, cluster, cost and network; it is filled.
    """

    def __init__(
        self,
        workload: Workload,
        mesh: Mesh,
        layout: Layout,
        cost: CostModel | Mapping[int, CostModel],
        network: Mapping[str, NetworkSettings] | None = None,
        shared: dict[tuple[int, int], _Ways] | None = None,
        late: float = 0.0,
    ) -> None:
        costs = {0: cost} if isinstance(cost, CostModel) else cost
        super().__init__(mesh, next(iter(costs.values())), network, late)
        self._shared = {} if shared is None else shared
        # the job as it would be on one kind of devices, for each of several
        self._by_kind = {
            kind: PlannedJob(workload, mesh, layout, one, network, self._shared, late)
            for kind, one in (costs.items() if len(costs) > 1 else ())
        }
        self.workload, self.layout = workload, layout
        self.tokens = layout.microbatch * workload.sequence / layout.context  # tokens of a microbatch on a device
        self.microbatches = layout.microbatches(workload)
        self._states: dict[tuple[int, int], dict[str, float]] = {}
        self._meetings: dict[Edges, Slowdown] = {}
        self._crowding: dict[tuple[Group, Group], Slowdown] = {}

    def gather(self, size: float, count: int, stride: int) -> float:
        """Return the seconds of an all-gather or a reduce-scatter, as one ring or level by level, whichever is faster.

        The whole has ``size`` bytes; a group has ``count`` devices at a distance of ``stride``. With
        :attr:`cordillera.cost.Calibration.one_ring`, only the ring is considered for groups with several devices of a
        host that are not neighbours, as in data parallelism around tensor parallelism over less than a host.
        """
        if count == 1:
            return 0.0
        found = self._shared.get((count, stride))
        if found is None:
            found = self._shared[count, stride] = self._ways_to_gather(count, stride)
        (fixed, by_byte), tiers = found
        by_level = 0.0
        for options in tiers:
            by_level += min([a + b * size for a, b in options])
        return min(fixed + by_byte * size, by_level) if tiers else fixed + by_byte * size

    def _ways_to_gather(self, count: int, stride: int) -> _Ways:
        """Return the seconds of a gather by its bytes: around one ring, and in each tier by the network settings."""
        edges, tiers = self.mesh.group(count, stride)
        ring = _by_bytes(ring_seconds, count, 1, self._late(edges), self.rate(edges))
        if self.cost.calibration.one_ring and tiers[0].edges.level == 0 and stride > 1:
            return ring, ()
        found = []
        for parts, ranks, edges in tiers:
            settings, rate, edges = self.settings(edges), self.rate(edges), self._late(edges)
            options = [_by_bytes(ring_seconds, parts, ranks, edges, rate)]
            if settings is not None and settings.collectives == "cheapest":
                options.append(_by_bytes(doubling_seconds, parts, ranks, edges, rate))
                options.append(_by_bytes(_direct_seconds, parts, ranks, edges, rate))
            found.append(tuple(options))
        return ring, tuple(found) if tuple(found) != ((ring,),) else ()

    def all_reduce(self, dimension: str, size: float) -> float:
        """Return the seconds to all-reduce ``size`` bytes, the whole vector of a device, over a ``dimension``."""
        return 2 * self.gather(size, self.mesh.size(dimension), self.mesh.stride(dimension))

    def among_copies(self, size: float, count: int, apart: int = 1) -> float:
        """Return the seconds to all-gather or reduce-scatter ``size`` bytes of weights or their gradients.

        A group has ``count`` copies at a distance of ``apart`` copies. The context-parallel devices hold copies as
        well: the share of each is gathered over the other copies first, then over the context-parallel devices.
        """
        context, seconds = self.layout.context, 0.0
        if context > 1:
            seconds = self.gather(size, context, self.mesh.stride("context"))
        return seconds + self.gather(size / context, count, apart * self.mesh.stride("data"))

    @cached_property
    def tensor_reduce(self) -> float:
        """Seconds of one all-reduce of a microbatch's activations over the tensor-parallel devices."""
        if self.layout.tensor == 1:
            return 0.0
        size = BYTES * self.tokens * self.workload.model.hidden
        return self.all_reduce("tensor", size) + self.cost.calibration.collective_s

    @cached_property
    def exchange(self) -> float:
        """Seconds of one exchange of tokens between the devices that share a layer's experts, to the busiest one."""
        experts, n = self.workload.model.experts, self.layout.expert
        if experts is None or n == 1:
            return 0.0
        size = BYTES * self.tokens * experts.active * self.workload.model.hidden / self.layout.tensor
        size *= experts.imbalance
        slowest, latency = 0.0, 0.0
        for tier in self.mesh.group(n, self.mesh.stride("data"))[1]:
            slowest = max(slowest, size * (1 - tier.ranks / n) / self.rate(tier.edges))  # bytes that leave a part
            latency = max(latency, self._late(tier.edges).latency)
        return slowest + latency + self.cost.calibration.collective_s

    @cached_property
    def inside(self) -> list[tuple[Group, float, float]]:
        """Collectives that computation waits for in a layer: groups, and seconds in the forward and in the backward."""
        layout, one, mesh = self.layout, self._computed, self.mesh
        found = []
        if layout.tensor > 1:
            forward = 2.0 * self.tensor_reduce
            found.append((Group(layout.tensor, mesh.stride("tensor")), forward, one.tensor - forward))
        if layout.context > 1:
            forward = one.context / (3.0 if layout.recompute == "full" else 2.0)
            found.append((Group(layout.context, mesh.stride("context")), forward, one.context - forward))
        if one.exchange:
            forward = 2.0 * self.exchange * self.workload.model.mixed_share
            tiers = mesh.group(layout.expert, mesh.stride("data"))[1]
            # one step of a pairwise exchange, in which all devices send to the next part of their group
            pairs = Group(layout.expert, mesh.stride("data"), tiers[-1].ranks)
            found.append((pairs, forward, one.exchange - forward))
        return found

    @cached_property
    def layer(self) -> LayerSeconds:
        """Seconds of one layer for one microbatch, as a mean over layers if some have experts."""
        return self._with_gathered(self._computed, 1, *self.layer_parameters)

    @cached_property
    def _computed(self) -> LayerSeconds:
        """Seconds of a layer whose weights are there."""
        one = layer_seconds(self.workload, self.layout, self.cost, self.tensor_reduce)
        model, layout = self.workload.model, self.layout
        full = layout.recompute == "full"
        if model.experts is not None and layout.expert > 1:
            twice = 2 * self.exchange * model.mixed_share  # dispatch to the experts and combine
            one = _with_collective(one, "exchange", twice, full or recomputes_ffn(model, layout))
        if layout.context > 1:
            # keys and values are gathered in every forward, recomputed ones too; their gradients are scattered back
            size = 2 * BYTES * self.tokens * layout.context * model.held_keys(layout.tensor)
            gather = self.gather(size, layout.context, self.mesh.stride("context"))
            one = _with_collective(one, "context", gather, full)
        return one

    def _with_gathered(self, one: LayerSeconds, layers: int, plain: float, mixed: float = 0.0) -> LayerSeconds:
        """Return a part of the model with sharded weights gathered during the computation of the part before it.

        Weights are gathered once in the forward and once in the backward, which also scatters the gradients (Zhao et
        al. 2023, section 3.3); time beyond the computation is waited for, and collectives of its ``layers`` share
        links. A device holds ``plain`` parameters and ``mixed`` ones of experts.
        """
        layout = self.layout
        if not layout.shard_weights:
            return one
        gather, scatter = (
            self._over_shards(each, plain, mixed) + self.cost.calibration.collective_s
            for each in (BYTES, self.workload.reduction_bytes)
        )
        rings = Group(layout.shards, self.mesh.stride("data"))
        share, waits = self.copied(self.mesh.edges(rings)), []
        back = one.again + one.input_gradient + one.weight_gradient
        for is_back, seconds, moved in ((False, one.forward, gather), (True, back, gather + scatter)):
            longer, later = self.contention(seconds, layers, is_back, rings).beside(seconds, moved)
            seconds, moved = seconds + longer, moved + later
            waits.append(longer + max(share * min(moved, seconds), moved - seconds))
        forward, backward = waits
        return one._replace(
            forward=one.forward + forward,
            input_gradient=one.input_gradient + backward,
            gather=forward + backward,
        )

    def _over_shards(self, each: float, plain: float, mixed: float) -> float:
        """Return the seconds to gather or scatter parameters of ``each`` bytes over the copies of a group.

        The group has as many copies as there are shards. A device holds ``plain`` parameters and ``mixed`` ones of
        experts, which have fewer copies.
        """
        layout = self.layout
        seconds = self.among_copies(each * plain, layout.shards)
        if mixed:
            seconds += self.among_copies(each * mixed, max(1, layout.shards // layout.expert), layout.expert)
        return seconds

    @cached_property
    def stage_layers(self) -> list[int]:
        """Number of layers of every stage."""
        return layers_of_stages(self.workload.model.layers, self.layout.stages)

    def on(self, rank: int) -> list[LayerSeconds]:
        """Return the seconds of every stage for one microbatch if a pipeline ``rank`` held it."""
        if not self._by_kind:
            return self.stages
        kinds = [self._by_kind[kind].stages for kind in self.mesh.kinds[rank]]
        return [max(stages, key=lambda one: one.total) for stages in zip(*kinds, strict=True)]

    @cached_property
    def stages(self) -> list[LayerSeconds]:
        """Seconds of every stage for one microbatch, dealt out in turn."""
        if self._by_kind:
            ranks = [self.on(rank) for rank in range(self.layout.pipeline)]
            return [ranks[stage % len(ranks)][stage] for stage in range(self.layout.stages)]
        one, last = self.layer, self.layout.stages - 1
        first_part = embedding_seconds(self.workload, self.layout, self.cost, self.tensor_reduce)
        last_part = head_seconds(self.workload, self.layout, self.cost, self.tensor_reduce)
        inside = {count: one.times(count) for count in set(self.stage_layers)}
        found = [inside[count] for count in self.stage_layers]
        found[0] = found[0].plus(self._with_gathered(first_part, 0, self.table))
        found[last] = found[last].plus(self._with_gathered(last_part, 0, self.table))
        return found

    @property
    def busiest(self) -> float:
        """Lower bound on the seconds that the busiest rank computes under any schedule.

        Chunks may be dealt out in turn or like a V.
        """
        p, stages = self.layout.pipeline, self.stages
        most = max(sum(stage.total for stage in stages[rank::p]) for rank in range(p))
        if self.layout.chunks == 2:
            most = min(most, max(stages[rank].total + self.on(rank)[-1 - rank].total for rank in range(p)))
        return self.microbatches * most

    @cached_property
    def message_bytes(self) -> float:
        """Bytes that one device sends between two stages for a microbatch; tensor-parallel devices send a part each."""
        return BYTES * self.tokens * self.workload.model.hidden / self.layout.tensor

    def message_seconds(self, boundary: int) -> float:
        """Return the seconds that a message occupies the link after a pipeline rank, without latency."""
        return self._messages[boundary % len(self._messages)]

    @cached_property
    def _messages(self) -> list[float]:
        boundaries = self.mesh.boundaries
        seconds = {edges: self.message_bytes / self.rate(edges) for edges in set(boundaries)}
        return [seconds[edges] for edges in boundaries]

    def meeting(self, boundary: int) -> Slowdown:
        """Return how messages after a pipeline ``boundary`` and the concurrent reduction of gradients slow each other.

        On every link that both use, pairs that send as equals have max-min fair shares; if messages have priority, the
        reduction gets the rest.
        """
        edges, ring = self.mesh.boundary(boundary), self.mesh.ring("data")
        if edges.level < 1 or ring.level < 1:
            return Slowdown()
        if edges not in self._meetings:
            self._meetings[edges] = self.slowdown(self.mesh.shared_links(boundary), edges, ring)
        return self._meetings[edges]

    def contention(self, seconds: float, layers: float, backward: bool, rings: Group) -> Contention:
        """Return how the collectives inside an action and ``rings`` that run beside it slow each other.

        The links are shared as in :meth:`meeting`. What computation waits for has the priority of messages.

        Args:
            seconds: Time of the action alone.
            layers: Number of layers of the action.
            backward: Whether it is the gradient of the input, with what is computed again; otherwise the forward.
            rings: Groups that transfer beside it, such as the copies that reduce gradients.
        """
        parts = []
        for group, *times in self.inside:
            if (group, rings) not in self._crowding:
                both = self.mesh.edges(group), self.mesh.edges(rings)
                self._crowding[group, rings] = self.slowdown(self.mesh.shared_by(group, rings), *both)
            parts.append((layers * times[backward], self._crowding[group, rings]))
        return Contention.of(seconds, parts)

    @cached_property
    def layer_parameters(self) -> tuple[float, float]:
        """Mean numbers of shared parameters and of experts' parameters of a layer on one device."""
        return held_weights(self.workload.model, self.layout)

    def parameters(self, stages: Sequence[int]) -> tuple[float, float]:
        """Return the numbers of shared and of experts' parameters on a device of a rank with these stages."""
        return self._parameters(*self._counted(stages))

    def _counted(self, stages: Sequence[int]) -> tuple[int, int]:
        """Return the number of layers and of embedding tables of a rank with these stages."""
        first, last = 0 in stages, self.layout.stages - 1 in stages
        tables = max(first, last) if self.workload.model.tied else first + last
        return sum(map(self.stage_layers.__getitem__, stages)), tables

    def _parameters(self, layers: int, tables: int) -> tuple[float, float]:
        plain, mixed = self.layer_parameters
        return layers * plain + tables * self.table, layers * mixed

    @cached_property
    def table(self) -> float:
        """Number of parameters of an embedding matrix on one device."""
        return self.workload.model.vocabulary * self.workload.model.hidden / self.layout.tensor

    def updated(self, stages: Sequence[int]) -> float:
        """Return the number of parameters of a rank's stages whose optimizer state one device holds.

        The state is shared by copies and by the context-parallel devices.
        """
        return self._updated(*self.parameters(stages))

    def _updated(self, plain: float, mixed: float) -> float:
        layout = self.layout
        return (plain / layout.shards + mixed / max(1, layout.shards // layout.expert)) / layout.context

    def optimizer(self, rank: int, stages: Sequence[int]) -> float:
        """Return the seconds of the optimizer for ``stages`` on the slowest devices of a pipeline ``rank``."""
        costs = [self._by_kind[kind].cost for kind in self.mesh.kinds[rank]] if self._by_kind else [self.cost]
        return max(cost.optimizer(self.updated(stages)) for cost in costs)

    def reduce(self, stages: Sequence[int]) -> float:
        """Return the seconds to reduce a rank's gradients of these stages over all copies of the model.

        Gradients are scattered and updated weights are gathered. If weights are sharded, every backward scatters the
        gradients, and only the parts remain to be reduced over groups of copies. Experts have fewer copies.
        """
        return self._reduced(*self.parameters(stages))

    def scatter(self, stages: Sequence[int]) -> float:
        """Return the seconds to scatter a rank's gradients of these stages over the copies that update them."""
        plain, mixed = self.parameters(stages)
        return self._over_shards(self.workload.reduction_bytes, plain, mixed) + self.cost.calibration.collective_s

    def _reduced(self, plain: float, mixed: float) -> float:
        layout, each = self.layout, self.workload.reduction_bytes
        if not layout.shard_weights and not layout.shard_gradients:
            seconds = 0.0
            gathered = each if layout.shards == 1 else BYTES  # gradients, or weights of a sharded optimizer
            for size in (each, gathered):
                seconds += self.among_copies(size * plain, layout.data)
                if mixed:
                    seconds += self.among_copies(size * mixed, layout.data // layout.expert, layout.expert)
            return seconds
        shares, groups = max(1, layout.shards // layout.expert), layout.data // layout.shards
        parts, stride = (plain / layout.shards + mixed / shares) / layout.context, layout.shards
        among_groups = 2 * self.gather(each * parts, groups, stride * self.mesh.stride("data"))
        if layout.shard_weights:
            return among_groups
        return among_groups + sum(self._over_shards(size, plain, mixed) for size in (each, BYTES))

    @cached_property
    def dealt_out(self) -> list[range]:
        """Stages of every pipeline rank, dealt out in turn."""
        p = self.layout.pipeline
        return [range(rank, self.layout.stages, p) for rank in range(p)]

    def held(self, stages: Sequence[int], activations: float) -> dict[str, float]:
        """Return the bytes on a device, by cause, of a rank with these ``stages`` that keeps ``activations`` bytes."""
        return {**self._state(*self._counted(stages)), "activations": activations}

    @cached_property
    def kept(self) -> list[float]:
        """Bytes of activations of every stage for one microbatch; the last stage includes head and loss."""
        found = [layers * self.layer_activations for layers in self.stage_layers]
        found[-1] += head_activation_bytes(self.workload, self.layout)
        return found

    def most_kept(self, rank: int) -> float:
        """Return the bytes of activations that a rank of (interleaved) 1F1B keeps after its warm-up."""
        live, group = self.live_chunks(rank), min(self.microbatches, self.layout.pipeline)
        kept = self.kept[rank :: self.layout.pipeline]  # activations of the rank's stages
        rounds, rest = divmod(live, group * len(kept))
        full, part = divmod(rest, group)
        return rounds * group * sum(kept) + group * sum(kept[:full]) + (part * kept[full] if part else 0.0)

    def _state(self, layers: int, tables: int) -> dict[str, float]:
        """Return the bytes of a rank's weights, gradients and optimizer state on a device."""
        found = self._states.get((layers, tables))
        if found is None:
            work, layout, parameters = self.workload, self.layout, self._parameters(layers, tables)
            weights, updated, one = sum(parameters), self._updated(*parameters), sum(self.layer_parameters)
            gradients = weights
            if layout.shard_weights:
                weights = gradients = updated + 2.0 * one  # plus the current layer and the next
            elif layout.shard_gradients:
                # plus the present stage and the one that is scattered, or with one stage per rank layers of it
                whole = one if layout.chunks == 1 else max(self.stage_layers) * one
                gradients = min(weights, updated + 2.0 * whole + tables * self.table)
            found = self._states[layers, tables] = {
                "weights": weights * work.weight_bytes,
                "gradients": gradients * work.gradient_bytes,
                "optimizer": updated * work.optimizer_bytes,
            }
        return found

    @cached_property
    def layer_activations(self) -> float:
        """Bytes of activations of one layer for one microbatch."""
        return activation_bytes(self.workload, self.layout)

    @cached_property
    def tied_seconds(self) -> float:
        """Seconds to sum the gradients of tied input and output embeddings on two ranks."""
        if not self.workload.model.tied or self.layout.pipeline == 1:
            return 0.0
        return BYTES * self.table / self.rate(self.mesh.boundary(self.layout.pipeline - 1))

    def live_chunks(self, rank: int) -> int:
        """Return the number of microbatches of a chunk whose activations a rank of (interleaved) 1F1B holds."""
        p, v, m = self.layout.pipeline, self.layout.chunks, self.microbatches
        if v == 1:
            return min(m, p - rank)
        return min(m * v, (v - 1) * min(m, p) + 2 * (p - 1 - rank) + 1)

    @cached_property
    def memory(self) -> tuple[dict[str, float], ...]:
        """Bytes on a device of each pipeline rank under (interleaved) 1F1B, by cause."""
        return tuple(self.held(stages, self.most_kept(rank)) for rank, stages in enumerate(self.dealt_out))

    def estimate(self) -> Estimate:
        """Estimate the step of (interleaved) 1F1B.

        The step is the sum of the slowest rank's slot for every microbatch, the other ranks' slots once to fill and
        drain the pipeline, the exposed part of gradient reduction, and the optimizer.
        """
        layout = self.layout
        p, v, m = layout.pipeline, layout.chunks, self.microbatches
        send = [0.0] * p
        if p > 1:
            ways = [self.message_seconds(i) for i in range(p - 1)]
            # a slot sends and receives once in each direction for every chunk
            send = [2 * v * ways[min(rank, p - 2)] for rank in range(p)]
        totals = [stage.total for stage in self.stages]
        slots = [sum(totals[rank::p]) + send[rank] for rank in range(p)]
        slow = max(slots)
        at = slots.index(slow)
        own = LayerSeconds()
        for stage in self.stages[at::p]:
            own = own.plus(stage)
        weights = [rank["weights"] for rank in self.memory]
        full = weights.index(max(weights))
        heaviest = self.dealt_out[full]
        reduce = self.reduce(heaviest)
        if layout.overlap_gradients:
            backward = sum(s.again + s.input_gradient + s.weight_gradient for s in self.stages[at::p])
            if layout.shard_gradients:  # scattered whenever a rank leaves a stage
                times = m if v == 1 else -(-m // p)
                reduce = max(reduce - backward, reduce + (times - 1) * self.scatter(heaviest) - m * slow)
            else:
                reduce -= backward
            reduce = max(0.0, reduce)
        parts = {
            "compute": m * max(0.0, slow - own.communication - send[at]),  # can be slightly below 0 by rounding
            **exposed(own, m),
            "pipeline messages": m * send[at],
            # chunks recur once per pass over all ranks, even with few microbatches
            "pipeline bubble": (sum(slots) - slow) / v + max(0, p - m) * slow * (1 - 1 / v),
            "gradient reduction": reduce + self.tied_seconds,
            "optimizer": self.optimizer(full, heaviest),
        }
        return Estimate(layout, self.mesh.order, parts, self.memory, self.workload.flops, self.mesh.peak)
