"""Spaces of graphs: blocks with choices, and the graph that a choice of all makes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordillera.models.ranking.base import Size
from cordillera.models.ranking.graphs.config import DENSE, EMBEDDINGS, NodeConfig, without_unread


class BlocksConfig(BaseModel):
    """Settings of a space of graphs: a sequence of blocks, each of one operation of vectors and one of embeddings.

    Both operations of a block read earlier blocks, or the inputs.

    Attributes:
        count: Number of blocks.
        vector: Operations that a block's vector may come from; ``gate`` is of two linear layers; ``none`` gives none.
        widths: Lengths of vectors.
        embeddings: Operations that a block's embeddings may come from; ``none`` gives none.
        rows: Numbers of embeddings.
        connections: ``any``: a block reads any of the earlier blocks and of the inputs; ``chain``: it reads the block
            before, alone or with the inputs.
        embed: Whether a block's vector may be added to its embeddings, as two more embeddings.
        fm: Whether a factorisation machine over a block's embeddings may be added to its vector.
        norms: Whether what operations give is normalised: one decision about all blocks.
        dense_rows: Numbers of embeddings that a linear layer makes of the dense features, beside those of the
            categorical ones.
        heads: What the heads read: the last block that gives anything (``last``), all blocks (``all``), or all blocks
            and the inputs (``inputs``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(3, ge=1, le=16)
    vector: tuple[Literal["linear", "gate", "cross", "dot", "fm", "none"], ...] = ("linear", "gate", "cross", "dot")
    widths: tuple[Size, ...] = (32, 64, 128)
    embeddings: tuple[
        Literal["mix", "fmb", "attention", "embedding_cross", "token_mixing", "none"], ...
    ] = ("mix", "fmb", "attention", "token_mixing", "none")  # fmt: skip
    rows: tuple[Size, ...] = (4, 8, 16)
    connections: Literal["any", "chain"] = "any"
    embed: bool = False
    fm: bool = False
    norms: tuple[bool, ...] = (True,)
    dense_rows: tuple[Annotated[int, Field(ge=0, le=2**20)], ...] = (0,)
    heads: tuple[Literal["last", "all", "inputs"], ...] = ("last",)

    @model_validator(mode="after")
    def _is_not_empty(self) -> BlocksConfig:
        for key in ("vector", "widths", "embeddings", "rows", "norms", "dense_rows", "heads"):
            values = getattr(self, key)
            if not values:
                raise ValueError(f"{key}: name at least one")
            if len(set(values)) < len(values):
                raise ValueError(f"{key}: names a value twice")
        if self.vector == ("none",) and self.embeddings == ("none",):
            raise ValueError("vector and embeddings: both are none")
        return self


@dataclass(frozen=True)
class Gene:
    """One decision: its name and the values to choose from, and whether these are ordered numbers."""

    name: str
    values: tuple[Any, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether the values are numbers, of which near ones are alike."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


def block_genes(config: BlocksConfig) -> list[Gene]:
    """Return the decisions about all blocks and about each, those with one value included."""
    genes = [Gene("norm", config.norms), Gene("dense_rows", config.dense_rows), Gene("heads", config.heads)]
    for block in range(1, config.count + 1):
        earlier = range(block)
        if config.connections == "chain":
            sources: list[tuple[int, ...]] = [(block - 1,)] if block == 1 else [(block - 1,), (0, block - 1)]
        else:
            sources = [one for size in range(1, block + 1) for one in itertools.combinations(earlier, size)]
        genes += [
            Gene(f"{block}.vector", config.vector),
            Gene(f"{block}.width", config.widths),
            Gene(f"{block}.vector_reads", tuple(sources)),
            Gene(f"{block}.embeddings", config.embeddings),
            Gene(f"{block}.rows", config.rows),
            Gene(f"{block}.embeddings_read", tuple(sources)),
        ]
        genes += [Gene(f"{block}.embed", (False, True))] if config.embed else []
        genes += [Gene(f"{block}.fm", (False, True))] if config.fm else []
    return genes


class _GraphBuilder:
    """Nodes of blocks, and what each block gives."""

    def __init__(self, norm: bool, dense_rows: int) -> None:
        self.norm = norm
        self.nodes: list[NodeConfig] = []
        self.vectors: list[list[str]] = [[DENSE]]
        self.embeddings: list[list[str]] = [[EMBEDDINGS]]
        if dense_rows:
            self.embeddings[0].append(self.add("dense_rows", "embed", [DENSE], rows=dense_rows))

    def add(self, name: str, op: str, inputs: list[str], **settings: Any) -> str:
        content = {"name": name, "op": op, "inputs": inputs, "norm": self.norm, **settings}
        self.nodes.append(NodeConfig.model_validate(content))
        return name

    def gathered(self, given: list[list[str]], blocks: tuple[int, ...]) -> list[str]:
        """Return what the blocks give, or the inputs if they give nothing."""
        return [name for block in blocks for name in given[block]] or list(given[0])

    def output(self, heads: str) -> tuple[str, ...]:
        """Return the names of what the heads read; the inputs if no block gives anything."""
        given = [(*vectors, *rows) for vectors, rows in zip(self.vectors, self.embeddings, strict=True)]
        inputs, *blocks = given
        if heads == "last":
            return next((names for names in reversed(given) if names), ())
        names = tuple(name for block in blocks for name in block)
        return (*names, *inputs) if heads == "inputs" or not names else names

    def add_vector(self, block: int, op: str, width: int, reads: tuple[int, ...]) -> None:
        vectors, rows = self.gathered(self.vectors, reads), self.gathered(self.embeddings, reads)
        name, both = f"b{block}_{op}", vectors + rows
        if op == "none":
            self.vectors.append([])
            return
        if op == "gate":
            sides = [
                self.add(f"b{block}_{side}", "linear", both, width=width, norm=False) for side in ("left", "right")
            ]
            self.add(name, "gate", sides, width=width)
        elif op == "linear":
            self.add(name, "linear", both, width=width, activation="relu")
        else:
            self.add(name, op, rows if op == "fm" else both, width=width)
        self.vectors.append([name])

    def add_embeddings(self, block: int, op: str, rows: int, reads: tuple[int, ...]) -> None:
        if op == "none":
            self.embeddings.append([])
            return
        inputs = self.gathered(self.embeddings, reads)
        self.embeddings.append([self.add(f"b{block}_{op}", op, inputs, rows=rows)])


def graph_of(config: BlocksConfig, values: Mapping[str, Any]) -> tuple[tuple[NodeConfig, ...], tuple[str, ...]]:
    """Make the nodes and the output of the graph of a genome's values; what nothing reads is left out."""
    made = _GraphBuilder(values["norm"], values["dense_rows"])
    for block in range(1, config.count + 1):
        of = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{block}.")}
        made.add_vector(block, of["vector"], of["width"], of["vector_reads"])
        made.add_embeddings(block, of["embeddings"], of["rows"], of["embeddings_read"])
        vector, rows = made.vectors[block], made.embeddings[block]
        if of.get("fm") and rows:
            added = made.add(f"b{block}_added_fm", "fm", rows, width=of["width"])
            total = [made.add(f"b{block}_sum", "sum", [*vector, added], width=of["width"])] if vector else [added]
            made.vectors[block] = total
        if of.get("embed") and vector:
            rows.append(made.add(f"b{block}_embed", "embed", vector, rows=2))
    output = made.output(values["heads"])
    return without_unread(made.nodes, output), output
