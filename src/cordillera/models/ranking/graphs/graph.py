"""A ranking model that is a graph of operations, as an architecture search gives them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.cached_tables import make_tables
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError
from cordillera.models.ranking.base import DeepModel
from cordillera.models.ranking.graphs.config import DENSE, EMBEDDINGS, GraphConfig
from cordillera.models.ranking.graphs.nodes import OPS, AxisParts, Value, flat_axis, join_flat
from cordillera.models.ranking.heads import Heads


class GraphBody(nn.Module):
    """Nodes of a graph: ``[B, num_dense]`` and ``[B, F, d]`` into ``[B, r]``, what the heads read.

    Nodes that read nothing for lack of features of a kind, such as embeddings without categorical features, are left
    out, and so are those that read these only. A gate needs both of its inputs.

    Args:
        config: Settings of the graph.
        num_dense: Number of dense features.
        num_sparse: Number ``F`` of embedded features.

    Attributes:
        output_axis: Parts of the representation.

    Raises:
        DataError: If nothing of the output is left.
    """

    def __init__(self, config: GraphConfig, num_dense: int, num_sparse: int) -> None:
        super().__init__()
        d = config.embedding_dim
        values: dict[str, Value] = {}
        if num_dense:
            values[DENSE] = Value(DENSE, None, num_dense)
        if num_sparse:
            values[EMBEDDINGS] = Value(EMBEDDINGS, num_sparse, d)
        self.nodes = nn.ModuleDict()
        self.reads: dict[str, list[str]] = {}
        for node in config.ordered():
            reads = [name for name in node.inputs if name in values]
            lacks = len(reads) < len(node.inputs) if node.op == "gate" else not reads
            if lacks or (node.op == "dot" and all(values[name].rows is None for name in reads)):
                continue
            made = OPS[node.op](node, [values[name] for name in reads], d, config.dropout)
            self.nodes[f"node_{node.name}"] = made
            self.reads[node.name], values[node.name] = reads, made.value
        self.output = [name for name in config.output if name in values]
        if not self.output:
            kind = "dense" if not num_dense else "categorical or list"
            raise DataError(
                f"the output of the graph reads nothing: there are no {kind} features",
                where="model.output",
                remedy="name nodes that read the features there are",
            )
        self.output_axis: AxisParts = flat_axis([values[name] for name in self.output])

    def forward(self, dense: Tensor, embeddings: Tensor, gates: Mapping[str, Tensor] | None = None) -> Tensor:
        """Compute the representation.

        ``gates`` holds numbers by which values of nodes are multiplied, by name, and ``""`` the whole representation.
        """
        values = {DENSE: dense.to(embeddings.dtype), EMBEDDINGS: embeddings}
        for name, node in zip(self.reads, self.nodes.values(), strict=True):
            values[name] = node([values[one] for one in self.reads[name]])
            if gates is not None and name in gates:
                values[name] = values[name] * gates[name]
        joined = join_flat([values[name] for name in self.output])  # [B, r]
        return joined * gates[""] if gates is not None and "" in gates else joined


class _HeadsBesideLinear(Heads):
    """Heads whose logits are added to those in the last columns of the representation, one for each task."""

    def forward(self, representation: Tensor) -> Tensor:
        rest, logits = representation.tensor_split([-len(self.tasks)], dim=1)
        return super().forward(rest) + logits


class Graph(DeepModel):
    """Model whose dense part is the graph of its configuration; see :class:`GraphBody`.

    Source: Cheng et al. 2016, section 3, and Guo et al. 2017, section 2.1, for ``linear_terms``.
    """

    Config = GraphConfig
    config: GraphConfig

    def __init__(self, config: GraphConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        self.body = GraphBody(config, len(features.dense), len(features.sparse))
        inputs = sum(size for _, size in self.body.output_axis)
        if not config.linear_terms:
            self.heads = self.make_heads(inputs)
            return
        d, tasks = config.embedding_dim, len(features.tasks)
        self.tables = make_tables(features, d + tasks, tables, init=config.embedding_init)
        self.tables.clear_columns(d)
        self.weight = nn.Parameter(torch.zeros(len(features.dense), tasks))
        self.heads = _HeadsBesideLinear(features.tasks, inputs, config.head_mlp, config.dropout)

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        if not self.config.linear_terms:
            return self.body(dense, embeddings)  # [B, r]
        embeddings, weights = embeddings.tensor_split([self.config.embedding_dim], dim=2)
        body = self.body(dense, embeddings)
        with torch.autocast(dense.device.type, enabled=False):
            linear = dense @ self.weight + weights.to(self.weight.dtype).sum(1)
        return torch.cat([body.to(linear.dtype), linear], dim=1)  # [B, r + tasks]
