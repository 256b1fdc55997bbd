"""Traffic of sharded weights, recorded in a ledger: gathered weights, reduced gradients, and bytes that leave a host.

Bytes are those of a ring over a group's ranks in their order, computed from the tensors of every call; a rank sends all
its messages to the next rank. A backend may send other amounts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cordillera.distributed.collectives import all_gather_single, reduce_scatter_single
from cordillera.distributed.dtensors import is_sharded
from cordillera.distributed.ledger import Ledger, Traffic
from cordillera.errors import PlanError

GATHERED, SCATTERED, REDUCED = "weights gathered", "gradients scattered", "gradients reduced over replicas"


def record_weight_traffic(
    model: nn.Module, mesh: DeviceMesh, ledger: Ledger, ranks_per_host: int | None = None
) -> None:
    """Record every collective of sharded weights in a ledger, from the next step on.

    Results do not change. This replaces earlier hooks on the units' reductions (``set_all_reduce_hook``), and custom
    collectives.

    Args:
        model: Model whose modules were passed to ``fully_shard``, all with the same mesh.
        mesh: Mesh passed to ``fully_shard``: of shards, or of replicas and shards.
        ledger: Ledger that counts the traffic as :data:`GATHERED`, :data:`SCATTERED` and :data:`REDUCED`.
        ranks_per_host: Number of consecutive ranks of the job on one host; None if unknown.

    Raises:
        PlanError: If nothing of the model is sharded, or ``ranks_per_host`` is below 1.
    """
    units = [module for module in model.modules() if is_sharded(module)]
    if not units:
        raise PlanError("no module is sharded", where="model", remedy="give it to fully_shard first")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise PlanError(f"ranks_per_host ({ranks_per_host}) must be at least 1", where="ranks_per_host")
    gather = _Gather(ledger, ranks_per_host)
    for unit in units:
        scatter = _Scatter(ledger, ranks_per_host)
        unit.set_custom_all_gather(gather)  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        if mesh.ndim == 2:
            unit.set_all_reduce_hook(_Reduced(scatter, mesh.get_group(0)))


class _Collective:
    """Base of custom collectives of ``fully_shard``: allocates tensors and records traffic."""

    def __init__(self, ledger: Ledger, ranks_per_host: int | None) -> None:
        self.ledger, self.ranks_per_host = ledger, ranks_per_host

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def record(self, name: str, group: dist.ProcessGroup, sent: int, messages: int, seconds: float) -> None:
        """Record a call during which the host waited until it was complete, or on CUDA until it was queued."""
        leaves = self.ranks_per_host is not None and _leaves_host(group, self.ranks_per_host)
        self.ledger.record(name, Traffic(1, sent, messages, seconds, seconds, sent * leaves))


def _leaves_host(group: dist.ProcessGroup, ranks_per_host: int) -> bool:
    """Whether the next rank in the ring is on another host."""
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    return ranks[own] // ranks_per_host != ranks[(own + 1) % len(ranks)] // ranks_per_host


class _Gather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        began = time.perf_counter()
        work = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        others = group.size() - 1
        self.record(GATHERED, group, others * input_tensor.nbytes, others, time.perf_counter() - began)
        return work


class _Scatter(_Collective):
    """Reduce-scatter of one unit; the unit's reduction over replicas begins when it ends."""

    ended = math.nan

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = super().allocate(size, dtype=dtype, device=device)
        self.ended = time.perf_counter()  # if a rank has all of a unit, no call follows this one
        return made

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        began = time.perf_counter()
        work = reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        self.ended = time.perf_counter()
        others = group.size() - 1
        self.record(SCATTERED, group, others * output_tensor.nbytes, others, self.ended - began)
        return work


class _Reduced:
    """Hook that torch calls after a unit's reduction over replicas, which cannot be replaced by a custom collective."""

    def __init__(self, scatter: _Scatter, group: dist.ProcessGroup) -> None:
        self.scatter, self.group = scatter, group

    def __call__(self, reduced: Tensor) -> None:
        seconds = time.perf_counter() - self.scatter.ended
        size = self.group.size()
        sent = 2 * (size - 1) * reduced.nbytes // size
        self.scatter.record(REDUCED, self.group, sent, 2 * (size - 1), seconds)
