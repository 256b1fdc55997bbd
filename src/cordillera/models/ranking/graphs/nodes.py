"""Operations of a graph as modules.

Shapes: a vector is ``[B, width]``, embeddings are ``[B, rows, d]``. Every module tells how the dimensions of its
parameters are made up of its inputs (:attr:`GraphNode.axes`), so that weights of a smaller graph can be cut out of
those of a larger one.

Source of ``linear``, ``gate``, ``sum``, ``dot``, ``fm``, ``mix``, ``embed`` and ``attention`` as operations of a search
space: Zhang et al. 2023 (NASRec, arXiv 2207.07187), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from cordillera.models.ranking.graphs.config import NodeConfig
from cordillera.models.ranking.interactions import (
    BiInteraction,
    DotInteraction,
    EmbeddingAttention,
    EmbeddingCross,
    FactorizationMachineBlock,
    LinearCompression,
)
from cordillera.models.ranking.rankmixer import RankMixerBlock, RankMixerConfig

AxisParts = tuple[tuple[str, int], ...]
"""Dimension of a parameter: names of what it is made up of, with the length of each; the node's own part is ``""``."""

_RANK = 8
_EXPANSION = 2


@dataclass(frozen=True)
class Value:
    """Name and shape of what a node gives: a vector of ``width`` (``rows`` is None), or ``rows`` of width ``width``."""

    name: str
    rows: int | None
    width: int

    @property
    def size(self) -> int:
        """Numbers for each sample."""
        return self.width if self.rows is None else self.rows * self.width


def _own(size: int) -> AxisParts:
    return (("", size),)


def _length(axis: AxisParts) -> int:
    return sum(size for _, size in axis)


def flat_axis(values: Sequence[Value]) -> AxisParts:
    """Return the dimension of values that are flattened and joined."""
    return tuple((value.name, value.size) for value in values)


def _rows_axis(values: Sequence[Value], times: int = 1) -> AxisParts:
    return tuple((value.name, (value.rows or 0) * times) for value in values)


def join_flat(values: Sequence[Tensor]) -> Tensor:
    """Join vectors and flattened embeddings: ``[B, the sum of their sizes]``."""
    flat = [value.flatten(1) for value in values]
    return flat[0] if len(flat) == 1 else torch.cat([one.to(flat[0].dtype) for one in flat], 1)


def _join_rows(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat([one.to(values[0].dtype) for one in values], 1)


def _widen(values: Sequence[Tensor], width: int) -> list[Tensor]:
    """Fill vectors up with zeros to one width."""
    return [functional.pad(value, (0, width - value.shape[1])) for value in values]


class GraphNode(nn.Module):
    """A node: reads values of its inputs, gives one value.

    Args:
        config: Settings of the node.
        inputs: Names and shapes of what it reads; none is empty.
        embedding_dim: Width ``d`` of embeddings.
        dropout: Probability of zeroing a number of the result in training.

    Attributes:
        value: Name and shape of what the node gives.
        axes: Dimensions of parameters by name; those that are missing have no dimension that depends on inputs or size.
    """

    def __init__(self, config: NodeConfig, inputs: Sequence[Value], embedding_dim: int, dropout: float) -> None:
        super().__init__()
        self.axes: dict[str, tuple[AxisParts, ...]] = {}
        self.embedding_dim = embedding_dim
        if config.gives_vector:
            self.value = Value(config.name, None, config.width or 0)
            norm_axis = _own(self.value.width)
        else:
            self.value = Value(config.name, config.rows or 0, embedding_dim)
            norm_axis = ()  # over an embedding, whose width is the same everywhere
        self.make(config, list(inputs))
        self.norm = nn.LayerNorm(self.value.width) if config.norm else None
        if config.norm and norm_axis:
            self.axes |= {"norm.weight": (norm_axis,), "norm.bias": (norm_axis,)}
        self.activate = config.activation == "relu"
        self.dropout = nn.Dropout(dropout)

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        """Make the parameters of the operation."""
        raise NotImplementedError

    def work(self, inputs: list[Tensor]) -> Tensor:
        """Compute the operation, without norm and activation."""
        raise NotImplementedError

    def forward(self, inputs: list[Tensor]) -> Tensor:
        x = self.work(inputs)
        if self.norm is not None:
            x = self.norm(x)
        if self.activate:
            x = functional.relu(x)
        return self.dropout(x)

    def linear(self, name: str, inputs: AxisParts, outputs: AxisParts) -> nn.Linear:
        """Make a linear layer ``name``, and record its dimensions."""
        self.axes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
        return nn.Linear(_length(inputs), _length(outputs))

    def compress(self, name: str, inputs: AxisParts, outputs: AxisParts) -> LinearCompression:
        """Make linear combinations ``name`` of embeddings, and record their dimensions."""
        self.axes[f"{name}.weight"] = (outputs, inputs)
        return LinearCompression(_length(inputs), _length(outputs))


class LinearNode(GraphNode):
    """``W x + b`` of all inputs, flattened and joined."""

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        self.map = self.linear("map", flat_axis(inputs), _own(self.value.width))

    def work(self, inputs: list[Tensor]) -> Tensor:
        return self.map(join_flat(inputs))


class _PaddedNode(GraphNode):
    """Vectors that are filled up with zeros to one width, combined, and mapped to ``width`` unless they have it."""

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        self.padded = max(value.width for value in inputs)
        self.map: nn.Module = nn.Identity()
        if self.padded != self.value.width:
            self.map = self.linear("map", _own(self.padded), _own(self.value.width))


class SumNode(_PaddedNode):
    """Sum of vectors."""

    def work(self, inputs: list[Tensor]) -> Tensor:
        first, *others = _widen(inputs, self.padded)
        for other in others:
            first = first + other
        return self.map(first)


class GateNode(_PaddedNode):
    """``sigmoid(W l + b) * r`` of two vectors."""

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        super().make(config, inputs)
        self.gate = self.linear("gate", _own(self.padded), _own(self.padded))

    def work(self, inputs: list[Tensor]) -> Tensor:
        left, right = _widen(inputs, self.padded)
        return self.map(torch.sigmoid(self.gate(left)) * right)


class CrossNode(GraphNode):
    """``V (x * (W x + b) + x)`` of all inputs, joined to ``x``. Source: Wang et al. 2021 (DCN-V2), equation 1."""

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        joined = flat_axis(inputs)
        self.cross = self.linear("cross", joined, joined)
        self.map = self.linear("map", joined, _own(self.value.width))

    def work(self, inputs: list[Tensor]) -> Tensor:
        x = join_flat(inputs)
        return self.map(torch.addcmul(x, x, self.cross(x).to(x.dtype)))


class DotNode(GraphNode):
    """Dot products of all pairs of a few combinations of embeddings, and of the vectors mapped to one embedding.

    There are ``round(sqrt(2 width))`` combinations, so that there are about ``width`` products. Source: Zhang et al.
    2023, section 3.3.
    """

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        vectors = [value for value in inputs if value.rows is None]
        rows = [value for value in inputs if value.rows is not None]
        self.are_vectors = [value.rows is None for value in inputs]
        count = max(2, round((2 * self.value.width) ** 0.5))
        self.project: nn.Module | None = None
        if vectors:
            self.project = self.linear("project", flat_axis(vectors), _own(self.embedding_dim))
        self.combine = self.compress("combine", _rows_axis(rows), _own(count))
        self.dot = DotInteraction(count + bool(vectors))
        self.map = self.linear("map", _own(self.dot.outputs), _own(self.value.width))

    def work(self, inputs: list[Tensor]) -> Tensor:
        rows = _join_rows([x for x, vector in zip(inputs, self.are_vectors, strict=True) if not vector])
        x = self.combine(rows)
        if self.project is not None:
            vectors = join_flat([x for x, vector in zip(inputs, self.are_vectors, strict=True) if vector])
            x = torch.cat([self.project(vectors).to(x.dtype).unsqueeze(1), x], 1)
        return self.map(self.dot(x))


class FMNode(GraphNode):
    """Half of the square of the sum of embeddings less the sum of their squares, mapped to ``width``."""

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        self.pool = BiInteraction()
        self.map = self.linear("map", _own(self.embedding_dim), _own(self.value.width))

    def work(self, inputs: list[Tensor]) -> Tensor:
        return self.map(self.pool(_join_rows(inputs)))


class MixNode(GraphNode):
    """Linear combinations ``W X`` of embeddings."""

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        self.combine = self.compress("combine", _rows_axis(inputs), _own(self.value.rows or 0))

    def work(self, inputs: list[Tensor]) -> Tensor:
        return self.combine(_join_rows(inputs))


class EmbedNode(GraphNode):
    """Embeddings that a linear layer makes of joined vectors."""

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        self.map = self.linear("map", flat_axis(inputs), _own(self.value.size))

    def work(self, inputs: list[Tensor]) -> Tensor:
        return self.map(join_flat(inputs)).unflatten(1, (-1, self.embedding_dim))


class AddNode(GraphNode):
    """Sum of embeddings; inputs of another number of rows are linear combinations first (a learned shortcut)."""

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        self.maps = nn.ModuleList()
        for index, value in enumerate(inputs):
            same = value.rows == self.value.rows
            axes = (_rows_axis([value]), _own(self.value.rows or 0))
            self.maps.append(nn.Identity() if same else self.compress(f"maps.{index}", *axes))

    def work(self, inputs: list[Tensor]) -> Tensor:
        first, *others = (combine(x) for combine, x in zip(self.maps, inputs, strict=True))
        for other in others:
            first = first + other
        return first


class FMBNode(GraphNode):
    """Wukong's factorisation machine block of rank 8 without hidden layer. Source: Zhang et al. 2024, section 3.4."""

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        axis, products = _rows_axis(inputs), _rows_axis(inputs, _RANK)
        self.block = FactorizationMachineBlock(_length(axis), self.value.rows or 0, self.embedding_dim, rank=_RANK)
        outputs = _own(self.value.size)
        self.axes |= {
            "block.fm.y": (axis, _own(_RANK)),
            "block.norm.weight": (products,),
            "block.norm.bias": (products,),
            "block.mlp.mlp.layers.0.weight": (outputs, products),
            "block.mlp.mlp.layers.0.bias": (outputs,),
        }

    def work(self, inputs: list[Tensor]) -> Tensor:
        return self.block(_join_rows(inputs))


class AttentionNode(MixNode):
    """A transformer layer over linear combinations of embeddings."""

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        super().make(config, inputs)
        d = self.embedding_dim
        self.attention = EmbeddingAttention(d, config.heads, d)

    def work(self, inputs: list[Tensor]) -> Tensor:
        return self.attention(super().work(inputs))


class EmbeddingCrossNode(GraphNode):
    """DHEN's cross term of embeddings. Source: Zhang et al. 2022, section 3.2."""

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        self.cross = EmbeddingCross(self.value.rows or 0, self.embedding_dim)
        rows = (_own(self.value.rows or 0), _own(self.embedding_dim))
        self.axes |= {"cross.weight": rows, "cross.bias": rows}

    def work(self, inputs: list[Tensor]) -> Tensor:
        return self.cross(_join_rows(inputs))


class TokenMixingNode(MixNode):
    """A RankMixer block over linear combinations of embeddings. Source: Zhu et al. 2025, section 3.3."""

    def make(self, config: NodeConfig, inputs: list[Value]) -> None:
        super().make(config, inputs)
        rows = self.value.rows or 0
        self.block = RankMixerBlock(RankMixerConfig(tokens=rows, width=self.embedding_dim, expansion=_EXPANSION))

    def work(self, inputs: list[Tensor]) -> Tensor:
        return self.block(super().work(inputs))


OPS: dict[str, type[GraphNode]] = {
    "linear": LinearNode,
    "gate": GateNode,
    "sum": SumNode,
    "cross": CrossNode,
    "dot": DotNode,
    "fm": FMNode,
    "mix": MixNode,
    "embed": EmbedNode,
    "add": AddNode,
    "fmb": FMBNode,
    "attention": AttentionNode,
    "embedding_cross": EmbeddingCrossNode,
    "token_mixing": TokenMixingNode,
}
"""Modules by operation."""
