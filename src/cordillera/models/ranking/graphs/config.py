"""Graphs of operations: their settings, and what makes one valid."""

from __future__ import annotations

import difflib
import graphlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cordillera.mistakes import text_of
from cordillera.models.ranking.base import DeepConfig, RankingConfig, Size

Op = Literal[
    "linear",
    "gate",
    "sum",
    "cross",
    "dot",
    "fm",
    "mix",
    "embed",
    "add",
    "fmb",
    "attention",
    "embedding_cross",
    "token_mixing",
]
NodeName = Annotated[
    str, text_of("[a-z][a-z0-9_]{0,63}", "up to 64 small letters, digits and underscores that begin with a letter")
]

DENSE, EMBEDDINGS = "dense", "embeddings"
"""Names of the inputs of every graph: the dense features, and the embeddings of the others."""

VECTOR_OPS = ("linear", "gate", "sum", "cross", "dot", "fm")
"""Operations that give a vector of ``width`` numbers; the others give ``rows`` embeddings."""

_READS_VECTORS = ("gate", "sum", "embed")
_READS_BOTH = ("linear", "cross", "dot")
_ACTIVATED = ("linear", "mix", "embed")


class NodeConfig(RankingConfig):
    """Settings of a node, which has one operation.

    Attributes:
        name: Name by which other nodes read it: lower-case letters, digits and underscores.
        op: Operation; see the page *Architecture search* of the documentation.
        inputs: Names of the nodes that it reads, or of the inputs ``dense`` and ``embeddings``.
        width: Length of the vector that an operation of vectors gives.
        rows: Number of embeddings that an operation of embeddings gives.
        norm: Whether the result is normalised (layer norm over a vector, or over each embedding).
        activation: Activation after the norm, of ``linear``, ``mix`` and ``embed``.
        heads: Number of heads of ``attention``, a divisor of ``embedding_dim``.
    """

    name: NodeName
    op: Op
    inputs: tuple[str, ...] = Field(min_length=1)
    width: Size | None = None
    rows: Size | None = None
    norm: bool = True
    activation: Literal["none", "relu"] = "none"
    heads: Size = 1

    @property
    def gives_vector(self) -> bool:
        """Whether the node gives a vector; otherwise it gives embeddings."""
        return self.op in VECTOR_OPS

    @model_validator(mode="after")
    def _has_its_size(self) -> NodeConfig:
        wanted, other = ("width", "rows") if self.gives_vector else ("rows", "width")
        if getattr(self, wanted) is None:
            raise ValueError(f"{self.name}: {self.op} needs {wanted}")
        if getattr(self, other) is not None:
            raise ValueError(f"{self.name}: {self.op} has no {other}; give {wanted}")
        if self.activation != "none" and self.op not in _ACTIVATED:
            raise ValueError(f"{self.name}: {self.op} has no activation; {', '.join(_ACTIVATED)} have one")
        if self.heads != 1 and self.op != "attention":
            raise ValueError(f"{self.name}: {self.op} has no heads")
        if self.op == "gate" and len(self.inputs) != 2:
            raise ValueError(f"{self.name}: gate reads two vectors, the gating one and the gated one")
        return self


_DEFAULT = (NodeConfig(name="deep", op="linear", inputs=(DENSE, EMBEDDINGS), width=256, activation="relu"),)


class GraphConfig(DeepConfig):
    """Settings of a model that is a graph of operations.

    Attributes:
        nodes: Nodes, in any order; without any, the heads read inputs only.
        output: Names of the nodes that the heads read: vectors and flattened embeddings, joined in this order.
        linear_terms: Whether a logistic regression over all features is added to the logits; the weights of an id lie
            in its table row, after its embedding, and start at 0.
    """

    name: Literal["graph"] = "graph"
    nodes: tuple[NodeConfig, ...] = Field(_DEFAULT, max_length=1024)
    output: tuple[str, ...] = Field(("deep",), min_length=1)
    linear_terms: bool = False

    @model_validator(mode="after")
    def _is_a_graph(self) -> GraphConfig:
        by_name = {node.name: node for node in self.nodes}
        if len(by_name) < len(self.nodes):
            names = [node.name for node in self.nodes]
            raise ValueError(f"two nodes are called {next(name for name in names if names.count(name) > 1)!r}")
        for name in (DENSE, EMBEDDINGS):
            if name in by_name:
                raise ValueError(f"{name!r} is the name of an input; call the node otherwise")
        known = [*by_name, DENSE, EMBEDDINGS]
        for node in self.nodes:
            _check_names(node.name, node.inputs, known, may_repeat=node.op in ("gate", "sum"))
        _check_names("output", self.output, known)
        order = self.ordered()
        read = set(self.output).union(*(node.inputs for node in order))
        if unread := [name for name in by_name if name not in read]:
            raise ValueError(f"nothing reads {', '.join(unread)}; name them in output or in the inputs of a node")
        for node in order:
            _check_kinds(node, {name: name == DENSE or (name in by_name and by_name[name].gives_vector)
                                for name in node.inputs})  # fmt: skip
            if node.op == "attention" and self.embedding_dim % node.heads:
                raise ValueError(f"{node.name}: heads ({node.heads}) must divide embedding_dim ({self.embedding_dim})")
            if node.op == "token_mixing" and self.embedding_dim % (node.rows or 1):
                raise ValueError(f"{node.name}: rows ({node.rows}) must divide embedding_dim ({self.embedding_dim})")
        return self

    def ordered(self) -> list[NodeConfig]:
        """Return the nodes, each after those that it reads.

        Raises:
            ValueError: If nodes read each other in a cycle.
        """
        by_name = {node.name: node for node in self.nodes}
        graph = {node.name: [name for name in node.inputs if name in by_name] for node in self.nodes}
        try:
            return [by_name[name] for name in graphlib.TopologicalSorter(graph).static_order()]
        except graphlib.CycleError as error:
            raise ValueError(f"nodes read each other in a cycle: {' -> '.join(error.args[1])}") from None


def _check_names(reader: str, inputs: tuple[str, ...], known: list[str], *, may_repeat: bool = False) -> None:
    for name in inputs:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{reader}: there is no node {name!r}{hint}")
    if len(set(inputs)) < len(inputs) and not may_repeat:
        raise ValueError(f"{reader}: reads {next(name for name in inputs if inputs.count(name) > 1)!r} twice")


def _check_kinds(node: NodeConfig, vectors: dict[str, bool]) -> None:
    """Refuse inputs of the wrong kind; ``vectors`` says of each input whether it is a vector."""
    if node.op in _READS_BOTH:
        if node.op == "dot" and all(vectors.values()):
            raise ValueError(f"{node.name}: dot needs embeddings among its inputs")
        return
    wants_vector = node.op in _READS_VECTORS
    for name, is_vector in vectors.items():
        if is_vector != wants_vector:
            kind, remedy = ("embeddings", "linear") if wants_vector else ("a vector", "embed")
            raise ValueError(f"{node.name}: {node.op} cannot read {name}, which is {kind}; put {remedy} between")


def short_digest(content: Mapping[str, Any]) -> str:
    """Return a name of 16 hexadecimal digits for plain values; equal ones have equal names."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def digest(settings: DeepConfig | RankingConfig) -> str:
    """Return a name of 16 hexadecimal digits for a ``[model]`` section; equal settings have equal names.

    Nodes of a graph are taken in an order that depends on names only, so the order in a file does not matter.
    """
    content = settings.model_dump(mode="json")
    if isinstance(settings, GraphConfig):
        content["nodes"].sort(key=lambda node: node["name"])
        if not content["linear_terms"]:
            del content["linear_terms"]  # keeps the names of graphs older than this setting
    return short_digest(content)


def without_unread(nodes: Iterable[NodeConfig], output: Iterable[str]) -> tuple[NodeConfig, ...]:
    """Return the nodes that ``output`` depends on."""
    by_name = {node.name: node for node in nodes}
    needed: set[str] = set()
    waiting = list(output)
    while waiting:
        name = waiting.pop()
        if name in by_name and name not in needed:
            needed.add(name)
            waiting += by_name[name].inputs
    return tuple(node for name, node in by_name.items() if name in needed)
