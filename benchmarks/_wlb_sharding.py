"""Work of a context rank, counted: causal pairs of queries and keys under a document mask, by two ways of sharding.

A document of ``d`` tokens has ``d (d + 1) / 2`` pairs. Both ways deal out ``2 CP`` chunks, rank ``i`` taking chunks
``i`` and ``2 CP - 1 - i``: of the whole sequence (Llama 3), or of every document (WLB-LLM, section 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Share(NamedTuple):
    """What a context rank computes of a microbatch.

    Attributes:
        tokens: Queries.
        pairs: Of a query and a key that it attends to, itself included.
    """

    tokens: int
    pairs: int


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def per_sequence(lengths: Sequence[int], ranks: int) -> list[Share]:
    """Chunks of the sequence, the first ones a token longer where ``2 CP`` does not divide it.

    Args:
        lengths: Of its documents, in order.
        ranks: ``CP``.
    """
    whole, rest = divmod(sum(lengths), 2 * ranks)
    edges = list(accumulate((whole + (chunk < rest) for chunk in range(2 * ranks)), initial=0))
    before, document, start = 0, 0, 0  # pairs of whole documents, the document in which an edge lies and its start
    pairs = []
    for edge in edges:
        while document < len(lengths) and start + lengths[document] <= edge:
            before, start, document = before + _triangle(lengths[document]), start + lengths[document], document + 1
        pairs.append(before + _triangle(edge - start))
    return _of_both([Share(edges[i + 1] - edges[i], pairs[i + 1] - pairs[i]) for i in range(2 * ranks)])


def per_document(lengths: Sequence[int], ranks: int) -> list[Share]:
    """Chunks of every document; what does not divide goes to chunks in turn, on from document to document.

    Args:
        lengths: Of the documents, in order.
        ranks: ``CP``.
    """
    chunks, cursor = 2 * ranks, 0
    tokens, pairs = [0] * chunks, [0] * chunks
    for length in lengths:
        whole, rest = divmod(length, chunks)
        end = 0
        for chunk in range(chunks):
            begin, end = end, end + whole + ((chunk - cursor) % chunks < rest)
            tokens[chunk] += end - begin
            pairs[chunk] += _triangle(end) - _triangle(begin)
        cursor = (cursor + rest) % chunks
    return _of_both(list(map(Share, tokens, pairs)))


def _of_both(chunks: list[Share]) -> list[Share]:
    """A rank has a chunk from the front and its mirror from the back."""
    half = len(chunks) // 2
    return [
        Share(*map(sum, zip(one, two, strict=True)))
        for one, two in zip(chunks[:half], chunks[: half - 1 : -1], strict=True)
    ]
