"""Matrices that are cut over ranks: two of them in a row, the first by columns, the second by rows, need one sum.

Weights are DTensors, so that they can be sharded and saved as parts of a whole; what is computed with them are plain
tensors, as the dispatch of a DTensor operation takes longer than a small product.

Between such pairs activations are the same on every rank. Or each rank has some tokens of them: they are gathered
before a pair, and what is summed after it is scattered, which sends as much and keeps less. Every rank has as many
rows, the last ones zeros where tokens do not divide: what lies between pairs must take a row of zeros to zeros.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from cordillera.distributed.collectives import Collectives

SUMMED, GATHERED, SCATTERED = "activations summed", "activations gathered", "activations scattered"


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, with its gradient; a plain one is whole.

    Args:
        tensor: Of any shape.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TensorRanks:
    """Ranks that share matrices, and how activations lie on them between these.

    Args:
        mesh: The ranks, in one dimension.
        links: Between them.
        cuts_sequence: Whether each rank has some tokens there; else each has all.

    Attributes:
        mesh: Likewise.
        links: Likewise.
        cuts_sequence: Likewise.
    """

    def __init__(self, mesh: DeviceMesh, links: Collectives, cuts_sequence: bool = False) -> None:
        self.mesh, self.links, self.cuts_sequence = mesh, links, cuts_sequence

    def enter(self, x: Tensor, tokens: int | None = None) -> Tensor:
        """What cut matrices read: all tokens. The ranks' gradients are summed.

        Args:
            x: From between them, ``[rows, ...]``.
            tokens: Of the sequence; None to keep rows that fill it up.
        """
        entered: Tensor = _Gathered.apply(x, self.links, tokens) if self.cuts_sequence else _Shared.apply(x, self.links)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """What they give to what is between them: the sum of the ranks' terms, ``[rows, ...]``.

        Args:
            x: This rank's term, ``[T, ...]``.
        """
        left: Tensor = (_Scattered if self.cuts_sequence else _Summed).apply(x, self.links)
        return left


def cut_linear(linear: nn.Linear, ranks: TensorRanks, dimension: int) -> None:
    """Cut a linear layer without a bias.

    Args:
        linear: Changed: cut along its outputs, it gives this rank's of them; along its inputs, it takes this rank's of
            them and gives terms of a sum over the ranks.
        ranks: Their number divides it.
        dimension: 0 for outputs, 1 for inputs.
    """
    _cut(linear, ranks, dimension)
    _compute_by(linear, lambda x: F.linear(x, local(linear.weight)))


def cut_embedding(embedding: nn.Embedding, ranks: TensorRanks) -> None:
    """Cut an embedding along its tokens; it gives what it gave before, summed over the ranks.

    Args:
        embedding: Changed.
        ranks: Their number divides its tokens.
    """
    _cut(embedding, ranks, 0)

    def forward(tokens: Tensor) -> Tensor:
        weight = local(embedding.weight)
        rows = tokens - ranks.links.rank * len(weight)
        here = (rows >= 0) & (rows < len(weight))
        return ranks.leave(F.embedding(rows.clamp(0, len(weight) - 1), weight).masked_fill(~here[:, None], 0.0))

    _compute_by(embedding, forward)


def cut_head(head: nn.Linear, ranks: TensorRanks) -> None:
    """Cut the weight of a layer that is not called, along its outputs.

    Args:
        head: Changed.
        ranks: Their number divides its outputs.
    """
    _cut(head, ranks, 0)


def sum_over_ranks(module: nn.Module, ranks: TensorRanks, tokens: Callable[..., int] | None = None) -> None:
    """Put a module of cut matrices between activations: what it gives is summed over the ranks.

    Args:
        module: Changed; its first argument are activations.
        ranks: Over which its matrices are cut.
        tokens: From its other arguments to the tokens that it must be given, where it takes no more.
    """
    inner = module.forward

    def forward(x: Tensor, *others: Any) -> Tensor:
        return ranks.leave(inner(ranks.enter(x, tokens and tokens(*others)), *others))

    _compute_by(module, forward)


def enter_after(module: nn.Module, ranks: TensorRanks) -> None:
    """Make a module give what cut matrices read.

    Args:
        module: Changed; it reads and gives activations.
        ranks: Over which the matrices are cut.
    """
    inner = module.forward
    _compute_by(module, lambda x: ranks.enter(inner(x)))


def _cut(module: nn.Linear | nn.Embedding, ranks: TensorRanks, dimension: int) -> None:
    # every rank cuts its own: nothing is sent
    weight = distribute_tensor(module.weight, ranks.mesh, [Shard(dimension)], src_data_rank=None)
    module.weight = nn.Parameter(weight)


def _compute_by(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    module.forward = forward


class _Shared(torch.autograd.Function):
    """The identity; ranks' gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives) -> Tensor:
        ctx.links = links
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.links.all_reduce(SUMMED, gradient.clone(memory_format=torch.contiguous_format)), None


class _Summed(torch.autograd.Function):
    """Ranks' values are summed; the gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives) -> Tensor:
        return links.all_reduce(SUMMED, x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    """Ranks' rows one after another; ranks' gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives, tokens: int | None) -> Tensor:
        ctx.links = links
        return links.all_gather(GATHERED, x)[:tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.links.reduce_scatter(SCATTERED, _filled_up(gradient, ctx.links.size)), None, None


class _Scattered(torch.autograd.Function):
    """This rank's rows of the sum of ranks' values; gradients one after another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives) -> Tensor:
        ctx.links, ctx.tokens = links, len(x)
        return links.reduce_scatter(SCATTERED, _filled_up(x, links.size))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.links.all_gather(GATHERED, gradient)[: ctx.tokens], None


def _filled_up(x: Tensor, ranks: int) -> Tensor:
    """With rows of zeros, so that every rank gets as many."""
    missing = -len(x) % ranks
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
