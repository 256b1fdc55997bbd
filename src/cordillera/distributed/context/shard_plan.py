"""Distribution of documents over the ranks of context parallelism.

In causal attention a token costs as many pairs as there are tokens before it, so equal shares of tokens are not equal
shares of work. If a sequence is cut into ``2 * ranks`` chunks and rank ``i`` gets the ``i``-th chunk from either end
(head and tail), the work is equal provided that the sequence is one document. Cutting every document this way always
makes the work equal, but yields shorter chunks, on which kernels are less efficient. :func:`adaptive` decides by
predicted time. Every strategy raises a PlanError if a length is negative or there are no ranks.

Source: Wang et al. 2025, WLB-LLM (arXiv 2503.17924), sections 4.3 and 5; Grattafiori et al. 2024 (arXiv 2407.21783),
section 3.3.2. Unlike in the paper's figure, chunks stay contiguous: leftover tokens lengthen chunks by one, at a cursor
that continues from document to document, so nothing is padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cordillera.distributed.context.latency import AnalyticLatency, Latency
from cordillera.errors import PlanError, printable
from cordillera.files import parse_json

Integers = NDArray[np.int64]

MOST_TOKENS = 1 << 31
"""Largest number of tokens of a plan, so that the number of their pairs fits into 64 bits."""


class DocumentChunk(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) of a document, which is numbered from 0."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class ShardPlan:
    """Tokens of packed documents that each rank holds, in order.

    Packed documents lie one after another (document order, see ``offsets``). The chunks of a rank also lie one after
    another.

    Attributes:
        mode: Name of the strategy that made the plan, for display.
        lengths: Number of tokens of each document; a document may be empty.
        ranks: Chunks of each rank; a rank may have none.

    Raises:
        PlanError: If there are no ranks, or not every token is in exactly one chunk.
    """

    mode: str
    lengths: tuple[int, ...]
    ranks: tuple[tuple[DocumentChunk, ...], ...]

    def __post_init__(self) -> None:
        _check_lengths(self.lengths, len(self.ranks))
        reached = [0] * len(self.lengths)
        for chunk in sorted(chunk for chunks in self.ranks for chunk in chunks):
            if not 0 <= chunk.document < len(self.lengths):
                raise PlanError(f"{chunk}: there are {len(self.lengths)} documents", where="shard plan")
            if chunk.start != reached[chunk.document] or chunk.stop <= chunk.start:
                raise PlanError(
                    f"{chunk} does not begin at token {reached[chunk.document]}, or is empty", where="shard plan"
                )
            reached[chunk.document] = chunk.stop
        for document, (stop, length) in enumerate(zip(reached, self.lengths, strict=True)):
            if stop != length:
                raise PlanError(f"document {document} has {length} tokens, chunks hold {stop}", where="shard plan")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def offsets(self) -> Integers:
        """Offset at which each document begins in document order, followed by the total, ``[documents + 1]``."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(sum(chunk.stop - chunk.start for chunk in chunks) for chunks in self.ranks)

    @cached_property
    def work(self) -> Integers:
        """Exact number of pairs of a query and a visible key for each rank, ``[ranks]``."""
        pairs = [sum(_triangle(chunk.stop) - _triangle(chunk.start) for chunk in chunks) for chunks in self.ranks]
        return np.array(pairs, np.int64)

    @property
    def imbalance(self) -> float:
        """Ratio of the largest work of a rank to the mean; 1 if there is no work."""
        return float(self.work.max() / self.work.mean()) if self.work.any() else 1.0

    def indices(self, rank: int) -> Integers:
        """Return the indices of a rank's tokens in document order, ``[tokens[rank]]``."""
        return self.positions(rank) + self.offsets[self.documents(rank)]

    def positions(self, rank: int) -> Integers:
        """Return the positions of a rank's tokens, which restart at 0 in every document, ``[tokens[rank]]``."""
        ranges = [np.arange(chunk.start, chunk.stop) for chunk in self.ranks[rank]]
        return np.concatenate([np.zeros(0, np.int64), *ranges])

    def documents(self, rank: int) -> Integers:
        """Return the document of each of a rank's tokens, ``[tokens[rank]]``."""
        chunks = self.ranks[rank]
        own = np.array([chunk.document for chunk in chunks], np.int64)
        return np.repeat(own, [chunk.stop - chunk.start for chunk in chunks])

    @cached_property
    def order(self) -> Integers:
        """Concatenation of all ranks' :meth:`indices`, ``[T]``."""
        return np.concatenate([self.indices(rank) for rank in range(self.size)])

    @cached_property
    def restore(self) -> Integers:
        """Place of each token of the document order in the concatenation of all ranks' tokens, ``[T]``."""
        return np.argsort(self.order)

    def calls(self, rank: int) -> tuple[Integers, Integers]:
        """Return the lengths of queries and keys in a rank's attention: a chunk sees its document up to its own end."""
        chunks = self.ranks[rank]
        queries = np.array([chunk.stop - chunk.start for chunk in chunks], np.int64)
        return queries, np.array([chunk.stop for chunk in chunks], np.int64)

    def predicted(self, latency: Latency) -> float:
        """Return the predicted seconds of attention on the slowest rank."""
        return max(latency(*self.calls(rank)) for rank in range(self.size))

    def to_json(self) -> str:
        """Return the plan as one line of JSON."""
        return json.dumps({"mode": self.mode, "lengths": self.lengths, "ranks": self.ranks})

    @classmethod
    def from_json(cls, text: str) -> ShardPlan:
        """Read the result of :meth:`to_json`.

        Raises:
            PlanError: If the text is not a valid plan.
        """
        try:
            found: dict[str, Any] = parse_json(text, "shard plan", error=PlanError)
            ranks = tuple(tuple(DocumentChunk(*map(_integer, chunk)) for chunk in chunks) for chunks in found["ranks"])
            return cls(printable(found["mode"]), tuple(map(_integer, found["lengths"])), ranks)
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(f"is not one: {error}", where="shard plan") from error

    def __str__(self) -> str:
        lines = [f"{self.mode}: {len(self.lengths)} documents over {self.size} ranks, imbalance {self.imbalance:.3f}"]
        for rank, chunks in enumerate(self.ranks):
            listing = " ".join(f"{chunk.document}[{chunk.start}:{chunk.stop}]" for chunk in chunks)
            lines.append(f"  rank {rank}: {self.tokens[rank]} tokens, {self.work[rank]} pairs  {listing}".rstrip())
        return "\n".join(lines)


def contiguous(lengths: Sequence[int], ranks: int) -> ShardPlan:
    """Give each of ``ranks`` one run of documents of ``lengths`` tokens, with equal numbers of tokens, not of pairs."""
    _check_lengths(lengths, ranks)
    total = sum(lengths)
    sizes = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    return _plan("contiguous", lengths, [(rank, piece) for rank, piece in enumerate(_pieces(lengths, sizes))], ranks)


def per_sequence(lengths: Sequence[int], ranks: int) -> ShardPlan:
    """Cut documents of ``lengths`` tokens as one sequence into head and tail chunks for ``ranks``."""
    return _head_tail("per_sequence", lengths, [list(range(len(lengths)))], ranks)


def per_document(lengths: Sequence[int], ranks: int, whole_below: int = 0) -> ShardPlan:
    """Cut every document of ``lengths`` tokens into head and tail chunks for ``ranks``.

    The ranks' numbers of tokens differ by at most one, and are equal if ``2 * ranks`` divides their sum; their work
    differs by at most ``2 * (tokens + documents)`` pairs. Documents of fewer than ``whole_below`` tokens are cut
    together, as one sequence.
    """
    short = [document for document, length in enumerate(lengths) if length < whole_below]
    long = [[document] for document, length in enumerate(lengths) if length >= whole_below]
    mode = f"per_document, below {whole_below} together" if whole_below else "per_document"
    return _head_tail(mode, lengths, [*long, *([short] if short else [])], ranks)


def adaptive(lengths: Sequence[int], ranks: int, latency: Latency = AnalyticLatency()) -> ShardPlan:
    """Choose the plan for documents of ``lengths`` tokens over ``ranks`` with the shortest time by ``latency``.

    The candidates are: per sequence, per document, and per document except short ones. Equal arguments give the same
    plan on every rank.
    """
    plans = [per_sequence(lengths, ranks), per_document(lengths, ranks)]
    steps = range(min(lengths, default=0).bit_length() + 1, max(lengths, default=0).bit_length())
    plans += [per_document(lengths, ranks, whole_below=1 << step) for step in steps]
    return min(plans, key=lambda plan: plan.predicted(latency))


SHARDINGS: dict[str, Callable[[Sequence[int], int], ShardPlan]] = {
    "contiguous": contiguous,
    "per_sequence": per_sequence,
    "per_document": per_document,
    "adaptive": adaptive,
}


def _check_lengths(lengths: Sequence[int], ranks: int) -> None:
    if ranks < 1:
        raise PlanError(f"{ranks} ranks", where="shard plan", remedy="one or more")
    for document, length in enumerate(lengths):
        if length < 0:
            raise PlanError(f"document {document} has {length} tokens", where="shard plan", remedy="0 or more")
    if sum(lengths) > MOST_TOKENS:
        raise PlanError(
            f"documents hold {sum(lengths):,} tokens", where="shard plan", remedy=f"at most {MOST_TOKENS:,}"
        )


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value


def _triangle(tokens: int) -> int:
    """Return the number of pairs among a document's first tokens."""
    return tokens * (tokens + 1) // 2


def _pieces(
    lengths: Sequence[int], sizes: Iterable[int], documents: Sequence[int] | None = None
) -> list[list[DocumentChunk]]:
    """Cut the sequence of documents into runs of given sizes."""
    left = iter(range(len(lengths)) if documents is None else documents)
    document, start = -1, 0
    runs = []
    for size in sizes:
        run = []
        while size:
            if document < 0 or start == lengths[document]:
                document, start = next(left), 0
                continue
            stop = min(lengths[document], start + size)
            run.append(DocumentChunk(document, start, stop))
            size -= stop - start
            start = stop
        runs.append(run)
    return runs


def _head_tail(mode: str, lengths: Sequence[int], groups: Sequence[Sequence[int]], ranks: int) -> ShardPlan:
    """Cut each group of documents as one sequence into ``2 * ranks`` chunks; leftover tokens are dealt in turn."""
    _check_lengths(lengths, ranks)
    slots = 2 * ranks
    dealt: list[tuple[int, list[DocumentChunk]]] = []
    cursor = 0
    for group in groups:
        even, left = divmod(sum(lengths[document] for document in group), slots)
        sizes = [even + ((slot - cursor) % slots < left) for slot in range(slots)]
        cursor = (cursor + left) % slots
        runs = _pieces(lengths, sizes, group)
        dealt += [(min(slot, slots - 1 - slot), run) for slot, run in enumerate(runs)]
    return _plan(mode, lengths, dealt, ranks)


def _plan(mode: str, lengths: Sequence[int], dealt: Iterable[tuple[int, list[DocumentChunk]]], ranks: int) -> ShardPlan:
    """Put each rank's chunks in document order, and join neighbouring chunks."""
    held: list[list[DocumentChunk]] = [[] for _ in range(ranks)]
    for rank, run in dealt:
        held[rank] += run
    joined = []
    for chunks in held:
        own: list[DocumentChunk] = []
        for chunk in sorted(chunks):
            if own and own[-1].document == chunk.document and own[-1].stop == chunk.start:
                own[-1] = own[-1]._replace(stop=chunk.stop)
            else:
                own.append(chunk)
        joined.append(tuple(own))
    return ShardPlan(mode, tuple(lengths), tuple(joined))
