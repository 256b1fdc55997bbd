"""Architectures as NASRec publishes them, read as graphs.

Source: Zhang et al. 2023 (NASRec, arXiv 2207.07187) and its repository: seven blocks, each with one operation of
vectors and one of embeddings over any of the blocks before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from cordillera.errors import DataError
from cordillera.mistakes import explain
from cordillera.models.ranking.graphs.config import DENSE, EMBEDDINGS, GraphConfig, NodeConfig, without_unread

_OPS = {
    "autoctr": ("linear", "dot", "mix"),
    "xlarge": ("linear", "dot", "gate", "sum", "attention", "mix"),
    "xlarge-zeros": ("linear", "dot", "gate", "sum", "no vector", "attention", "no embeddings", "mix"),
}
_EMBEDDED = 8  # embeddings that a block's vector is mapped to
_HEADS = 8


def is_nasrec(content: Mapping[str, Any]) -> bool:
    """Whether an object is an architecture as NASRec writes it."""
    return {"micro", "macro"} <= content.keys()


def from_nasrec(content: Mapping[str, Any], where: str = "architecture") -> GraphConfig:
    """Return the graph of an architecture of NASRec: its operations, sizes and connections.

    Two things differ from NASRec's own code: norms of embeddings are over the width of an embedding, and not over their
    number; the norms in ``attention`` begin with weights of 1, and not of 0.17.

    Args:
        content: Object with ``micro``, ``macro`` and ``config``, as in the repository's ``configs``.
        where: Place in errors.

    Raises:
        DataError: If it is no such architecture.
    """
    try:
        ops, made = _OPS[content["config"]], _Blocks()
        for micro, macro in zip(content["micro"], content["macro"], strict=True):
            for index in micro["active_nodes"]:
                made.add(ops[index], micro, macro)
            made.close(micro)
        output = (*made.vectors[-1], *made.embeddings[-1])
        nodes = without_unread(made.nodes, output)
        return GraphConfig(nodes=nodes, output=output)
    except ValidationError as error:
        place, message = explain(error.errors(), lambda path: (), "graph")[0]
        raise DataError(f"{place}: {message}", where=where) from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        remedy = f"config is one of {', '.join(_OPS)}"
        raise DataError(f"is no architecture of NASRec ({error!r})", where=where, remedy=remedy) from error


class _Blocks:
    """Nodes made so far, and the names of what every block gives; block 0 is the inputs."""

    def __init__(self) -> None:
        self.nodes: list[NodeConfig] = []
        self.vectors: list[list[str]] = [[DENSE]]
        self.embeddings: list[list[str]] = [[EMBEDDINGS]]
        self._vectors: list[str] = []
        self._embeddings: list[str] = []

    def _node(self, name: str, op: str, inputs: list[str], **settings: Any) -> str:
        name = f"b{len(self.vectors)}_{name}"
        self.nodes.append(NodeConfig.model_validate({"name": name, "op": op, "inputs": inputs, **settings}))
        return name

    def add(self, op: str, micro: Mapping[str, Any], macro: Mapping[str, Any]) -> None:
        """Add an operation of the block that is open."""

        def read(given: list[list[str]], key: str) -> list[str]:
            return [name for block in sorted(macro[key]) for name in given[block]]

        activation = {"activation": "relu"} if op in ("linear", "mix") else {}
        if op in ("gate", "sum"):
            inputs = read(self.vectors, "dense_left_idx") + read(self.vectors, "dense_right_idx")
        else:
            inputs = read(self.vectors, "dense_idx") if op in ("linear", "dot") else []
            inputs += read(self.embeddings, "sparse_idx") if op in ("dot", "attention", "mix") else []
        if op in ("attention", "mix"):
            heads = {"heads": _HEADS} if op == "attention" else {}
            rows = micro["sparse_in_dims"]
            self._embeddings.append(self._node(op, op, inputs, rows=rows, **heads, **activation))
        elif not op.startswith("no "):
            self._vectors.append(self._node(op, op, inputs, width=micro["dense_in_dims"], **activation))

    def close(self, micro: Mapping[str, Any]) -> None:
        """Join the vector and the embeddings of the open block as its choices say."""
        vectors, embeddings = self._vectors, self._embeddings
        if len(vectors) > 1 or len(embeddings) > 1:
            raise ValueError("a block has one operation of vectors and one of embeddings")
        given = list(embeddings)
        if micro["dense_sparse_interact"] and vectors:
            given.append(self._node("embed", "embed", vectors, rows=_EMBEDDED))
        if micro["deep_fm"] and embeddings:
            width = micro["dense_in_dims"]
            of_fm = self._node("fm", "fm", embeddings, width=width)
            vectors = [self._node("sum_fm", "sum", [*vectors, of_fm], width=width, norm=False)] if vectors else [of_fm]
        self.vectors.append(vectors)
        self.embeddings.append(given)
        self._vectors, self._embeddings = [], []
