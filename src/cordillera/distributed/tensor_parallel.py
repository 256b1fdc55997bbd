"""Tensor parallelism: a pair of matrices, the first split by columns, the second by rows, needs one sum over ranks.

Weights are DTensors, so that they can be sharded and saved as parts of a whole. The computation uses plain tensors, as
dispatching a DTensor operation takes longer than a small product.

Between such pairs, activations are the same on every rank. With sequence parallelism, each rank instead has some of
their tokens: they are gathered before a pair, and the sum after it is scattered, which sends as much and stores less.
Every rank has the same number of rows, padded with zeros if the tokens do not divide evenly, so the modules between
pairs must map zero rows to zero rows.

Where there are more ranks than key-value heads, neighbours share one: each computes some columns of it, which are
gathered. No rank computes or stores a weight that another has.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.dtensors import local

SUMMED, GATHERED, SCATTERED = "activations summed", "activations gathered", "activations scattered"
JOINED, PARTED = "heads joined", "gradients of heads parted"


class TensorRanks:
    """Ranks that share matrices, and the distribution of activations between these.

    Args:
        mesh: One-dimensional mesh of the ranks.
        links: Collectives between the ranks.
        cuts_sequence: Whether each rank has some of the tokens between matrices; otherwise each has all of them.
        neighbours: Collectives between the neighbouring ranks that share a head; None if every rank has whole heads.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        links: Collectives,
        cuts_sequence: bool = False,
        neighbours: Collectives | None = None,
    ) -> None:
        self.mesh, self.links, self.cuts_sequence, self.neighbours = mesh, links, cuts_sequence, neighbours

    def enter(self, x: Tensor, tokens: int | None = None) -> Tensor:
        """Return the input of split matrices: all tokens of ``x [rows, ...]``; the gradients of the ranks are summed.

        ``tokens`` is the number of tokens of the sequence; None keeps rows of padding.
        """
        entered: Tensor = _Gathered.apply(x, self.links, tokens) if self.cuts_sequence else _Shared.apply(x, self.links)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' terms ``[T, ...]`` as activations between matrices, ``[rows, ...]``."""
        left: Tensor = (_Scattered if self.cuts_sequence else _Summed).apply(x, self.links)
        return left

    def join(self, x: Tensor) -> Tensor:
        """Return the columns of all neighbours, ``[T, neighbours * n]``, from this rank's ``[T, n]``.

        Each neighbour uses all of them, and their gradients are summed. There must be neighbours.
        """
        joined: Tensor = _Joined.apply(x, self.neighbours)
        return joined


def cut_linear(linear: nn.Linear, ranks: TensorRanks, dimension: int) -> None:
    """Split a linear layer without a bias over ``ranks``, in place, along a ``dimension`` that they divide.

    Split along its outputs (0), ``linear`` returns this rank's outputs; along its inputs (1), it takes this rank's
    inputs and returns terms of a sum over the ranks.
    """
    _cut(linear, ranks, dimension)
    _compute_by(linear, lambda x: F.linear(x, local(linear.weight)))


def cut_bias(bias: nn.Module, ranks: TensorRanks) -> None:
    """Split ``bias``, which adds its ``weight`` to outputs that are split over ``ranks``, in place."""
    _cut(bias, ranks, 0)
    _compute_by(bias, lambda x: x + local(bias.get_parameter("weight")))


def join_outputs(module: nn.Module, ranks: TensorRanks) -> None:
    """Make a ``module`` with split outputs return the outputs of all neighbours of this rank in ``ranks``, in place."""
    inner = module.forward
    _compute_by(module, lambda x: ranks.join(inner(x)))


def cut_embedding(embedding: nn.Embedding, ranks: TensorRanks) -> None:
    """Split an ``embedding`` over ``ranks`` along its tokens, whose number they divide, in place.

    Its results, summed over the ranks, do not change.
    """
    _cut(embedding, ranks, 0)

    def forward(tokens: Tensor) -> Tensor:
        weight = local(embedding.weight)
        rows = tokens - ranks.links.rank * len(weight)
        here = (rows >= 0) & (rows < len(weight))
        return ranks.leave(F.embedding(rows.clamp(0, len(weight) - 1), weight).masked_fill(~here[:, None], 0.0))

    _compute_by(embedding, forward)


def cut_head(head: nn.Linear, ranks: TensorRanks) -> None:
    """Split the weight of ``head``, which is never called, along its outputs over ``ranks``, which divide them."""
    _cut(head, ranks, 0)


def sum_over_ranks(module: nn.Module, ranks: TensorRanks, tokens: Callable[..., int] | None = None) -> None:
    """Make a ``module`` split over ``ranks`` take its input by ``enter`` and return its output by ``leave``, in place.

    Its first argument is the activations, and its results are summed. ``tokens`` maps its other arguments to the number
    of tokens without padding; None if padding does not matter.
    """
    inner = module.forward

    def forward(x: Tensor, *others: Any) -> Tensor:
        return ranks.leave(inner(ranks.enter(x, tokens and tokens(*others)), *others))

    _compute_by(module, forward)


def enter_after(module: nn.Module, ranks: TensorRanks) -> None:
    """Let ``module``, which maps activations between matrices, return the input of matrices split over ``ranks``."""
    inner = module.forward
    _compute_by(module, lambda x: ranks.enter(inner(x)))


def _cut(module: nn.Module, ranks: TensorRanks, dimension: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    # every rank takes its own part, so nothing is sent
    weight = distribute_tensor(module.get_parameter("weight"), ranks.mesh, [Shard(dimension)], src_data_rank=None)
    module.register_parameter("weight", nn.Parameter(weight))


def _compute_by(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    module.forward = forward


class _Shared(torch.autograd.Function):
    """Identity whose gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives) -> Tensor:
        ctx.links = links
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.links.all_reduce(SUMMED, gradient.clone(memory_format=torch.contiguous_format)), None


class _Summed(torch.autograd.Function):
    """Sum over the ranks; the gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives) -> Tensor:
        return links.all_reduce(SUMMED, x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    """Concatenation of the ranks' rows; the gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives, tokens: int | None) -> Tensor:
        ctx.links = links
        return links.all_gather(GATHERED, x)[:tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.links.reduce_scatter(SCATTERED, _filled_up(gradient, ctx.links.size)), None, None


class _Scattered(torch.autograd.Function):
    """This rank's rows of the sum over the ranks; the gradients are concatenated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives) -> Tensor:
        ctx.links, ctx.tokens = links, len(x)
        return links.reduce_scatter(SCATTERED, _filled_up(x, links.size))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.links.all_gather(GATHERED, gradient)[: ctx.tokens], None


class _Joined(torch.autograd.Function):
    """Concatenation of the columns of all ranks; each rank gets the summed gradients of its own columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives) -> Tensor:
        ctx.links = links
        parts = links.all_gather(JOINED, x).view(links.size, *x.shape)  # [ranks, T, n]
        return parts.transpose(0, 1).flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        parts = gradient.unflatten(1, (ctx.links.size, -1)).transpose(0, 1)  # [ranks, T, n]
        return ctx.links.reduce_scatter(PARTED, parts.flatten(0, 1)), None


def _filled_up(x: Tensor, ranks: int) -> Tensor:
    """Pad with zero rows, so that every rank gets the same number."""
    missing = -len(x) % ranks
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
