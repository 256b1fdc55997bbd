"""A ranking model that is a graph of operations, as an architecture search gives them."""

from __future__ import annotations

from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError
from cordillera.models.ranking.base import DeepModel
from cordillera.models.ranking.graphs.config import DENSE, EMBEDDINGS, GraphConfig
from cordillera.models.ranking.graphs.nodes import OPS, Axis, GraphNode, Value, flat_axis, join_flat


class Graph(DeepModel):
    """Model whose dense part is the graph of its configuration.

    Nodes that read nothing for lack of features of a kind, such as embeddings without categorical features, are left
    out, and so are those that read these only. A gate needs both of its inputs.

    Attributes:
        output_axis: What the representation is made up of.

    Raises:
        DataError: If nothing of the output is left.
    """

    Config = GraphConfig

    def __init__(self, config: GraphConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        d = config.embedding_dim
        values: dict[str, Value] = {}
        if features.dense:
            values[DENSE] = Value(DENSE, None, len(features.dense))
        if features.sparse:
            values[EMBEDDINGS] = Value(EMBEDDINGS, len(features.sparse), d)
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
            kind = "dense" if not features.dense else "categorical or list"
            raise DataError(
                f"the output of the graph reads nothing: there are no {kind} features",
                where="model.output",
                remedy="name nodes that read the features there are",
            )
        self.output_axis: Axis = flat_axis([values[name] for name in self.output])
        self.heads = self.make_heads(sum(size for _, size in self.output_axis))

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        values = {DENSE: dense.to(embeddings.dtype), EMBEDDINGS: embeddings}
        for name, node in zip(self.reads, self.nodes.values(), strict=True):
            assert isinstance(node, GraphNode)
            values[name] = node([values[one] for one in self.reads[name]])
        return join_flat([values[name] for name in self.output])  # [B, r]
