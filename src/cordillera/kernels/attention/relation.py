"""Relations between queries and the keys that they attend to: blocks of consecutive rows, or positions where needed.

A causal block is aligned at its bottom right, as in FlashAttention: its last query sees all of its keys, the query
before all but the last. Positions describe anything else (keys that were written one by one while decoding, padding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cordillera.errors import PlanError


class RowBlock(NamedTuple):
    """Queries ``q_start:q_stop`` attend to keys ``k_start:k_stop``; the ends are exclusive.

    Attributes:
        causal: Whether query ``i`` of ``n`` sees all keys but the last ``n - 1 - i``; False for all keys.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool


@dataclass(frozen=True)
class Positions:
    """A query attends to the keys of its own document up to its own position.

    Attributes:
        q_documents: Document of each query, ``int64 [Tq]``; a negative number for a query that attends to nothing.
        q_positions: Position of each query in its document, from 0, ``int64 [Tq]``.
        k_documents: Document of each key, ``int64 [Tk]``; a negative number for padding.
        k_positions: Position of each key in its document, from 0, ``int64 [Tk]``.
    """

    q_documents: Tensor
    q_positions: Tensor
    k_documents: Tensor
    k_positions: Tensor

    def mask(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return the keys that queries ``first`` to ``last`` (exclusive; None for all) see, ``bool [queries, Tk]``."""
        documents, positions = self.q_documents[first:last, None], self.q_positions[first:last, None]
        return (documents == self.k_documents) & (documents >= 0) & (positions >= self.k_positions)


Relation = Literal["full", "causal", "empty"] | Sequence[RowBlock] | Positions


def blocks_between(queries: Sequence[tuple[int, int, int]], keys: Sequence[tuple[int, int, int]]) -> list[RowBlock]:
    """Make the blocks in which pieces of documents attend to pieces of documents, causally within each document.

    Args:
        queries: ``(document, start, stop)`` of each piece, in the order of their rows.
        keys: ``(document, start, stop)`` of each piece of keys, in the order of their rows. No token is in two pieces.

    Returns:
        Blocks over those rows; no pair of query and key is in two of them.
    """
    of_document: dict[int, list[tuple[int, int, int]]] = {}
    row = 0
    for document, start, stop in keys:
        of_document.setdefault(document, []).append((start, stop, row))
        row += stop - start
    blocks = []
    row = 0
    for document, start, stop in queries:
        for first, last, k_row in of_document.get(document, ()):
            # queries within the keys' range of positions see keys up to their own position, queries after it all keys
            low, high = max(start, first), min(stop, last)
            if low < high:
                blocks.append(RowBlock(row + low - start, row + high - start, k_row, k_row + high - first, True))
            behind = max(start, last)
            if behind < stop and first < last:
                blocks.append(RowBlock(row + behind - start, row + stop - start, k_row, k_row + last - first, False))
        row += stop - start
    return blocks


def as_blocks(relation: Relation, queries: int, keys: int) -> list[RowBlock]:
    """Return the blocks of a relation other than :class:`Positions`, in which every query sees a key.

    Args:
        relation: Any relation but :class:`Positions`.
        queries: Number of queries.
        keys: Number of keys.

    Raises:
        PlanError: A block is not within the queries and keys, or the relation is unknown.
    """
    if isinstance(relation, str):
        if relation not in ("full", "causal", "empty"):
            raise PlanError(f"{relation!r} is not known", where="relation", remedy="full, causal, empty, or blocks")
        relation = [] if relation == "empty" else [RowBlock(0, queries, 0, keys, relation == "causal")]
    assert not isinstance(relation, Positions)
    blocks = []
    for block in relation:
        if not (0 <= block.q_start <= block.q_stop <= queries and 0 <= block.k_start <= block.k_stop <= keys):
            raise PlanError(f"{block} does not fit {queries} queries and {keys} keys", where="relation")
        if block.causal:  # with more queries than keys, the first queries see no key
            size = min(block.q_stop - block.q_start, block.k_stop - block.k_start)
            block = block._replace(q_start=block.q_stop - size)
        if block.q_start < block.q_stop and block.k_start < block.k_stop:
            blocks.append(block)
    return blocks


def dense_mask(relation: Relation, queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a relation as ``bool [queries, keys]``, True where a query sees a key.

    Args:
        relation: Any relation.
        queries: Number of queries.
        keys: Number of keys.
        device: Device of the mask.
    """
    if isinstance(relation, Positions):
        return relation.mask().to(device)
    mask = torch.zeros(queries, keys, dtype=torch.bool, device=device)
    for q_start, q_stop, k_start, k_stop, causal in as_blocks(relation, queries, keys):
        seen = torch.ones(q_stop - q_start, k_stop - k_start, dtype=torch.bool, device=device)
        mask[q_start:q_stop, k_start:k_stop] |= seen.tril(seen.shape[1] - seen.shape[0]) if causal else seen
    return mask
