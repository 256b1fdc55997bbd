"""Packed documents as blocks of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from cordillera.kernels.attention.relation import RowBlock


def document_blocks(q_offsets: Sequence[int], k_offsets: Sequence[int] | None = None) -> list[RowBlock]:
    """Make the blocks of packed documents, each causal in itself and blind to the others.

    Args:
        q_offsets: ``B + 1`` numbers; document ``b`` owns the queries from ``q_offsets[b]`` to ``q_offsets[b + 1]``.
        k_offsets: Offsets of the keys; a document's queries are the last of its keys. None for the offsets of the
            queries.
    """
    k_offsets = q_offsets if k_offsets is None else k_offsets
    pairs = zip(pairwise(q_offsets), pairwise(k_offsets), strict=True)
    return [RowBlock(*queries, *keys, causal=True) for queries, keys in pairs]
