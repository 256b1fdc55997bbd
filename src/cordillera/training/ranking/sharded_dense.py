"""Dense weights of a ranking model that are sharded over the processes that train it.

Every layer is a unit: its matrices are gathered before it computes, forward and backward, and freed after. ``full``
shards over all processes. ``hybrid`` shards over the processes of a host and keeps equal copies on all hosts, so that
weights are gathered within hosts, and only each process's part of the gradients travels between them. Vectors (biases
and weights of norms) are whole on every process.

Source: Zhang et al. 2022 (DHEN, arXiv 2203.11014), section 3.3; Zhao et al. 2023 (FSDP, arXiv 2304.11277), section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cordillera.distributed.dtensors import is_dtensor, is_sharded
from cordillera.distributed.fsdp.traffic import record_weight_traffic
from cordillera.distributed.ledger import Ledger
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.embeddings.tables import EmbeddingTables
from cordillera.errors import PlanError
from cordillera.models.ranking.base import RankingModel
from cordillera.training.optimizers import dense_parameters


def shard_dense(
    model: RankingModel,
    sharding: Literal["replicated", "full", "hybrid"],
    size: int,
    hosts: int,
    deadline_s: float,
    ledger: Ledger | None = None,
) -> DeviceMesh | None:
    """Shard the dense matrices of a model in place, and return the mesh; None for ``replicated``.

    They are then ``DTensor`` objects, whose gradients are summed over all processes in the backward pass; those of
    vectors are not. All processes call it, with equal weights.

    Args:
        model: Model whose tables are not touched.
        sharding: ``replicated``, ``full`` (over all processes) or ``hybrid`` (over those of a host).
        size: Number of processes, those of the default process group.
        hosts: Number of hosts, each with equally many consecutive ranks.
        deadline_s: Longest time of one collective, in seconds.
        ledger: Ledger that counts the traffic of weights; None to count nothing.

    Raises:
        PlanError: If ``hosts`` does not divide ``size``.
    """
    if size % hosts:
        raise PlanError(f"{hosts} hosts do not divide {size} processes", where="parallel.hosts")
    if sharding == "replicated":
        return None
    from torch.distributed.fsdp import fully_shard

    shards, replicas = (size, 1) if sharding == "full" else (size // hosts, hosts)
    mesh = ProcessMesh(ParallelConfig(shard=shards, replicate=replicas, deadline_s=deadline_s)).weights
    matrices = {parameter for parameter in dense_parameters(model).values() if parameter.dim() > 1}
    whole = set(model.parameters()) - matrices
    for unit in dense_units(model):
        fully_shard(unit, mesh=mesh, ignored_params=whole)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=whole)
    for module in model.modules():
        if is_sharded(module):
            # losses are already divided by the weight of the whole batch
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if ledger is not None:
        record_weight_traffic(model, mesh, ledger)
    return mesh


def dense_units(model: RankingModel) -> Iterator[nn.Module]:
    """Iterate over the modules that are gathered one after another: a model's parts, and each of its stacked layers."""
    for part in model.children():
        if isinstance(part, EmbeddingTables):
            continue
        layers = list(part.children()) if isinstance(part, (nn.Sequential, nn.ModuleList)) else [part]
        yield from (layer for layer in layers if any(weight.dim() > 1 for weight in layer.parameters()))


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered from all processes, which call it together; others as they are."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def cut_like(other: Tensor, tensor: Tensor) -> Tensor:
    """Return a whole tensor, equal on all processes, sharded as ``other`` if that is sharded and has its shape."""
    if not is_dtensor(other) or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def clip_gradients(parameters: Iterable[Tensor], largest: float | None = None) -> float:
    """Return the norm of all gradients of ``parameters``; if it exceeds ``largest``, scale them down to that."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    kinds = [[one for one in given if is_dtensor(one.grad) == sharded] for sharded in (False, True)]
    kinds = [of_kind for of_kind in kinds if of_kind]
    norms = [whole(torch.nn.utils.get_total_norm([one.grad for one in of_kind])) for of_kind in kinds]  # type: ignore[misc]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms or [torch.zeros(())]))
    if largest is not None:
        for of_kind in kinds:
            torch.nn.utils.clip_grads_with_norm_(of_kind, largest, norm)
    return float(norm)
