"""Mesh of processes: which of them share a layer's matrices, a sequence, the layers, the weights, the data.

A job's processes are numbered along an order of the dimensions, innermost first, as the planner numbers a cluster's
devices (:mod:`cordillera.planning.network.mesh`). Llama 3's order is tensor, context, pipeline, data: the dimensions
that communicate most are closest together. Copies of the model are sharded in groups of ``shard`` and replicated over
``replicate`` such groups (Zhao et al. 2023, section 3.2.2); ranks that share a sequence also hold different parts of
the weights.

Source: Grattafiori et al. 2024 (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch.distributed.device_mesh import DeviceMesh

from cordillera.distributed.collectives import all_gather_single, reason_of
from cordillera.distributed.job.environment import JobBackend, checked_deadline
from cordillera.errors import PeerError, PlanError
from cordillera.planning.pipeline.schedules import (
    Schedule,
    breadth_first,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
    zero_bubble_v,
)

ParallelDegree = Annotated[int, Field(ge=1, le=2**20)]
Dimension = Literal["tensor", "context", "pipeline", "data"]
DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")

# Functions of ranks, microbatches and chunks, and the number of chunks if the family prescribes it.
_FAMILIES: dict[str, tuple[Callable[[int, int, int], Schedule], int | None]] = {
    "1f1b": (lambda ranks, count, chunks: one_forward_one_backward(ranks, count), 1),
    "gpipe": (lambda ranks, count, chunks: gpipe(ranks, count), 1),
    "interleaved": (interleaved, None),
    "breadth_first": (breadth_first, None),
    "zero_bubble": (lambda ranks, count, chunks: zero_bubble(ranks, count), 1),
    "zero_bubble_ahead": (lambda ranks, count, chunks: zero_bubble(ranks, count, 2), 1),
    "zero_bubble_v": (lambda ranks, count, chunks: zero_bubble_v(ranks, count), 2),
    "dual_pipe_v": (lambda ranks, count, chunks: dual_pipe_v(ranks, count), 2),
}
Family = Literal[
    "1f1b",
    "gpipe",
    "interleaved",
    "breadth_first",
    "zero_bubble",
    "zero_bubble_ahead",
    "zero_bubble_v",
    "dual_pipe_v",
]


class ParallelConfig(BaseModel):
    """Distribution of a job over processes, whose number is the product of the first five attributes.

    Attributes:
        replicate: Number of groups of copies over which sharded weights are replicated.
        shard: Number of copies of the model over which weights, gradients and optimizer state are sharded (FSDP).
        context: Number of ranks over which every sequence is split; they also hold different parts of the weights.
        tensor: Number of ranks over which every layer's matrices are split; it divides the model's key-value heads, or
            is a multiple of them.
        pipeline: Number of ranks over which the layers are split.
        order: Order of the dimensions on the ranks, innermost first; ``data`` stands for shard and, around it,
            replicate.
        schedule: Family of the pipeline's schedules (:mod:`cordillera.planning.pipeline.schedules`).
        chunks: Number of stages on one pipeline rank. For ``interleaved`` and ``breadth_first``, None means 2; the
            V-shaped families always have 2.
        reshard_after_forward: Whether a block's gathered weights are freed between forward and backward. None means yes
            without a pipeline and no with one, as the weights would be gathered again for every microbatch.
        sharding: Strategy that divides sequences among the context ranks
            (:mod:`cordillera.distributed.context.shard_plan`).
        transport: Transport of keys and values between the context ranks
            (:mod:`cordillera.distributed.context.attention`).
        sequence: Whether activations between split matrices are split along their tokens over the tensor ranks
            (sequence parallelism); otherwise each of these ranks holds all of them.
        experts: What moves if a model has experts: ``gather`` brings the weights of all experts to each rank, as with
            other layers; ``exchange`` sends tokens to the ranks that hold their experts, and each of the ranks of shard
            and context holds equally many.
        recompute: Parts that a backward recomputes instead of storing: none, feed-forward nets (``selective``) or whole
            blocks (``full``).
        backend: What carries what ranks exchange: ``auto`` for gloo on CPUs and NCCL on GPUs, or ``cordillera`` for
            Cordillera's own on CPUs (:mod:`cordillera.distributed.transport`), which is faster for large tensors.
        deadline_s: Longest time of one wait for other ranks, in seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicate: ParallelDegree = 1
    shard: ParallelDegree = 1
    context: ParallelDegree = 1
    tensor: ParallelDegree = 1
    pipeline: ParallelDegree = 1
    order: tuple[Dimension, ...] = ("tensor", "context", "pipeline", "data")
    schedule: Family = "1f1b"
    chunks: ParallelDegree | None = None
    reshard_after_forward: bool | None = None
    sharding: Literal["per_sequence", "per_document", "adaptive"] = "per_document"
    transport: Literal["all_gather", "ring"] = "all_gather"
    sequence: bool = False
    experts: Literal["gather", "exchange"] = "gather"
    recompute: Literal["none", "selective", "full"] = "none"
    backend: JobBackend = "auto"
    deadline_s: float = Field(300.0, gt=0, allow_inf_nan=False)

    _is_deadline = field_validator("deadline_s")(checked_deadline)

    @model_validator(mode="after")
    def _fits_together(self) -> ParallelConfig:
        if sorted(self.order) != ["context", "data", "pipeline", "tensor"]:
            raise ValueError(f"order ({', '.join(self.order)}) must name tensor, context, pipeline and data once each")
        fixed = _FAMILIES[self.schedule][1]
        if fixed is not None and self.chunks not in (None, fixed):
            raise ValueError(f"chunks ({self.chunks}) must be {fixed} for the schedule {self.schedule}")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence cuts tokens over the tensor ranks: tensor must be above 1")
        return self

    @property
    def world(self) -> int:
        """Number of processes of the job."""
        return self.replicate * self.shard * self.context * self.tensor * self.pipeline

    @property
    def copies(self) -> int:
        """Number of copies of the model, each of which processes different microbatches."""
        return self.replicate * self.shard

    @property
    def stages(self) -> int:
        """Number of parts into which the layers are split."""
        if self.pipeline == 1:
            return 1
        return self.pipeline * (self.chunks or _FAMILIES[self.schedule][1] or 2)

    @property
    def reshards(self) -> bool:
        """Effective value of ``reshard_after_forward``."""
        return self.pipeline == 1 if self.reshard_after_forward is None else self.reshard_after_forward

    def make_schedule(self, microbatches: int) -> Schedule:
        """Return the pipeline's schedule for a number of microbatches of each copy of the model.

        Raises:
            PlanError: If the family has no schedule for so few microbatches.
        """
        if self.pipeline == 1:
            return one_forward_one_backward(1, microbatches)
        return _FAMILIES[self.schedule][0](self.pipeline, microbatches, self.stages // self.pipeline)

    @classmethod
    def from_plan(cls, plan: Mapping[str, Any], **others: Any) -> ParallelConfig:
        """Return the mesh of a plan that the planner wrote.

        Args:
            plan: One of the plans in ``plan.json``, with its ``layout`` and ``mesh``.
            **others: Attributes that the mesh does not determine.

        Raises:
            PlanError: If ``plan`` is malformed, or distributes something that is not supported here.
        """
        try:
            layout, names = plan["layout"], plan["mesh"]["names"]
            sizes = dict(zip(names, plan["mesh"]["sizes"], strict=True))
            experts, shards = layout["expert"], layout["shards"]
            if experts > 1:
                raise PlanError(
                    f"experts over {experts} ranks cannot be taken from a plan",
                    where="plan",
                    remedy="plan with --layout ...,expert=1; parallel.experts = 'exchange' divides them over shard x "
                    "context",
                )
            if layout.get("fp8", "none") != "none":
                raise PlanError(
                    "multiplies matrices in FP8, training does not", where="plan", remedy="plan with --fp8 none"
                )
            if sizes["data"] % shards:
                raise PlanError(f"{shards} shards do not divide {sizes['data']} copies", where="plan")
            mesh = {name: sizes[name] for name in ("tensor", "context", "pipeline")}
            mesh |= {"shard": shards, "replicate": sizes["data"] // shards}
            mesh["sequence"] = layout.get("sequence_parallel", False)
            return cls(**{**mesh, "order": tuple(reversed(names)), **others})
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"holds no mesh: {error}", where="plan") from error


class ProcessMesh:
    """Place of this process among all processes of a job, and the groups in which it communicates.

    A job of one process needs no launcher: if there is no process group yet, one is created.

    Attributes:
        place: Index of this process in each of :data:`DIMENSIONS`.
        context_group: Group of the ranks that share its sequences.
        ends_group: Group of the first and the last rank of its pipeline; None if this process is neither, and without a
            pipeline.

    Raises:
        PlanError: If the number of processes is not that of the mesh.
    """

    Config = ParallelConfig

    def __init__(self, config: ParallelConfig, device_type: str = "cpu") -> None:
        if not dist.is_available():
            raise PlanError("this build of torch has no torch.distributed", where="mesh")
        if not dist.is_initialized() and config.world == 1:
            backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        found = dist.get_world_size() if dist.is_initialized() else 1
        sizes = {name: getattr(config, name) for name in DIMENSIONS}
        if found != config.world:
            raise PlanError(
                f"{' x '.join(f'{name} {size}' for name, size in sizes.items())} take {config.world} processes, "
                f"there {'is' if found == 1 else 'are'} {found}",
                where="mesh",
                remedy=f"start {config.world} processes, or make the product of the sizes {found}",
            )
        self.config, self.rank, self.device_type = config, dist.get_rank(), device_type
        ranks, names = ranks_of(config)
        self.place = dict(zip(names, (ranks == self.rank).nonzero()[0].tolist(), strict=True))
        self._mesh = DeviceMesh(
            device_type, ranks.flatten(2, 3), mesh_dim_names=("pipeline", "replicate", "fsdp", "tensor")
        )
        deadline = timedelta(seconds=config.deadline_s)
        for name in self._mesh.mesh_dim_names or ():  # DeviceMesh has no timeout argument for its groups
            group = self._mesh.get_group(name)
            if type(group) is dist.ProcessGroup:
                dist.distributed_c10d._set_pg_timeout(deadline, group)
            else:
                group.set_timeout(deadline)
        self._ranks, self._deadline = ranks, deadline
        self._neighbours: dict[int, dist.ProcessGroup] = {}
        context = ranks.movedim(names.index("context"), -1).reshape(-1, config.context)
        self.context_group = _enumerated(context, deadline)
        self.ends_group = _enumerated(ranks[[0, -1]].reshape(2, -1).T, deadline) if config.pipeline > 1 else None

    @property
    def weights(self) -> DeviceMesh:
        """Mesh over which weights are sharded and, around it, replicated, as ``fully_shard`` takes it."""
        return self._mesh["fsdp"] if self.config.replicate == 1 else self._mesh["replicate", "fsdp"]

    @property
    def tensor(self) -> DeviceMesh:
        """Mesh over which matrices are split."""
        return self._mesh["tensor"]

    def tensor_neighbours(self, count: int) -> dist.ProcessGroup:
        """Return this process's group of ``count`` neighbouring tensor ranks.

        ``count`` must divide the number of tensor ranks. All processes of the job must make the same call.
        """
        if count not in self._neighbours:
            group = _enumerated(self._ranks.reshape(-1, count), self._deadline)
            assert group is not None
            self._neighbours[count] = group
        return self._neighbours[count]

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """Group of the ranks of one pipeline, in its order."""
        return self._mesh.get_group("pipeline")

    @property
    def copy(self) -> int:
        """Number of the copy of the model to which this process belongs, from 0."""
        return self.place["replicate"] * self.config.shard + self.place["shard"]

    def exchange(self, numbers: Sequence[float]) -> torch.Tensor:
        """Collect equally many numbers of every process on all of them, ``float64 [world, n]``.

        Raises:
            PeerError: If a process does not respond in time.
        """
        part = torch.tensor(numbers, dtype=torch.float64, device=self.device_type)
        whole = part.new_empty(self.config.world * len(part))
        started = time.perf_counter()
        try:
            work = all_gather_single(whole, part, async_op=True)
            if self.device_type == "cpu":
                work.wait(timedelta(seconds=self.config.deadline_s))
            else:
                work.wait()  # the process group's own timeout applies
        except RuntimeError as error:
            late = time.perf_counter() - started >= self.config.deadline_s
            raise PeerError(
                f"another process did not come within {self.config.deadline_s:g} s"
                if late
                else f"{reason_of(error, 'another process')}, while numbers were exchanged",
                peer=None,
                where=f"rank {self.rank}",
                remedy="see what the other ranks say",
            ) from error
        return whole.reshape(self.config.world, -1)


def ranks_of(config: ParallelConfig) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return the rank at each place of the mesh.

    Returns:
        Ranks by place, and the names of the five dimensions: those of :data:`DIMENSIONS`, with shard and context
        ordered so that the one whose neighbours lie further apart comes first. The ranks of both together are then in
        ascending order, which is needed because torch sorts the ranks of a group.
    """
    inner = [part for name in config.order for part in (("shard", "replicate") if name == "data" else (name,))]
    outer = inner[::-1]
    ranks = torch.arange(config.world).reshape([getattr(config, name) for name in outer])
    names = ("pipeline", "replicate", *sorted(("shard", "context"), key=outer.index), "tensor")
    return ranks.permute([outer.index(name) for name in names]).contiguous(), names


def _enumerated(groups: torch.Tensor, deadline: timedelta) -> dist.ProcessGroup | None:
    """Return the group of this process among several, each a row of ranks; None if it is in none."""
    own: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(groups.tolist(), timeout=deadline)[0]
    return own
