"""Matrices that are cut over ranks: two of them in a row, the first by columns, the second by rows, need one sum.

Weights are DTensors, so that they can be sharded and saved as parts of a whole; what is computed with them are plain
tensors, as the dispatch of a DTensor operation takes longer than a small product. Activations between such pairs are
the same on every rank.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, with its gradient; a plain one is whole.

    Args:
        tensor: Of any shape.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_linear(linear: nn.Linear, mesh: DeviceMesh, dimension: int) -> None:
    """Cut a linear layer without a bias.

    Args:
        linear: Changed: cut along its outputs, it gives this rank's of them; along its inputs, it takes this rank's of
            them and gives terms of a sum over the ranks.
        mesh: The ranks, in one dimension.
        dimension: 0 for outputs, 1 for inputs; the mesh's size divides it.
    """
    _cut(linear, mesh, dimension)
    _compute_by(linear, lambda x: F.linear(x, local(linear.weight)))


def cut_embedding(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Cut an embedding along its tokens; it gives what it gave before, summed over the ranks.

    Args:
        embedding: Changed.
        mesh: The ranks, in one dimension; its size divides the tokens.
    """
    _cut(embedding, mesh, 0)
    group = mesh.get_group()

    def forward(tokens: Tensor) -> Tensor:
        weight = local(embedding.weight)
        rows = tokens - dist.get_rank(group) * len(weight)
        here = (rows >= 0) & (rows < len(weight))
        found = F.embedding(rows.clamp(0, len(weight) - 1), weight).masked_fill(~here[:, None], 0.0)
        summed: Tensor = _Summed.apply(found, group)
        return summed

    _compute_by(embedding, forward)


def cut_head(head: nn.Linear, mesh: DeviceMesh) -> None:
    """Cut the weight of a layer that is not called, along its outputs.

    Args:
        head: Changed.
        mesh: The ranks, in one dimension; its size divides the outputs.
    """
    _cut(head, mesh, 0)


def sum_over_ranks(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module of cut matrices give the sum over the ranks, and its input's gradient likewise.

    Args:
        module: Changed; its first argument and its result are the same on every rank.
        mesh: The ranks, in one dimension.
    """
    group, inner = mesh.get_group(), module.forward

    def forward(x: Tensor, *others: Any) -> Tensor:
        summed: Tensor = _Summed.apply(inner(_Shared.apply(x, group), *others), group)
        return summed

    _compute_by(module, forward)


def _cut(module: nn.Linear | nn.Embedding, mesh: DeviceMesh, dimension: int) -> None:
    # every rank cuts its own: nothing is sent
    weight = distribute_tensor(module.weight, mesh, [Shard(dimension)], src_data_rank=None)
    module.weight = nn.Parameter(weight)


def _compute_by(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    module.forward = forward


class _Shared(torch.autograd.Function):
    """The identity; ranks' gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    """Ranks' values are summed; the gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, None
