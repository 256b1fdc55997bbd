"""Documents over the ranks of context parallelism: who holds which tokens, as data that everything else reads.

Causal attention costs a token as many pairs as it has tokens before it, so equal shares of tokens are not equal shares
of work. Cutting a sequence into ``2 * ranks`` chunks and giving rank ``i`` the ``i``-th from either end (head and tail)
makes them equal where the sequence is one document; cutting every document so makes them equal always, but in shorter
chunks, which kernels like less. :func:`adaptive` decides by predicted time.

Source: Wang et al. 2025, WLB-LLM (arXiv 2503.17924), sections 4.3 and 5; Grattafiori et al. 2024 (arXiv 2407.21783),
section 3.3.2. Unlike the paper's figure, chunks stay contiguous: leftover tokens lengthen chunks by one, by a cursor
that goes on from document to document, so nothing is padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
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
    """Consecutive tokens of a document.

    Attributes:
        document: Which, counted from 0.
        start: Position of the first in the document.
        stop: One past the last.
    """

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class ShardPlan:
    """Which tokens of packed documents each rank holds, in which order.

    Documents lie one after another in document order (``offsets``); ranks hold their chunks one after another.

    Attributes:
        mode: Name of the strategy that made the plan, for people.
        lengths: Tokens of each document; a document may be empty.
        ranks: Chunks of each rank; a rank may have none.

    Raises:
        PlanError: If there are no ranks, or not every token is in one chunk.
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
        """How many ranks there are."""
        return len(self.ranks)

    @cached_property
    def offsets(self) -> Integers:
        """``[documents + 1]``: where each document begins in document order."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """How many each rank holds."""
        return tuple(sum(chunk.stop - chunk.start for chunk in chunks) for chunks in self.ranks)

    @cached_property
    def work(self) -> Integers:
        """``[ranks]``: pairs of a query and a key that it sees, exactly."""
        pairs = [sum(_triangle(chunk.stop) - _triangle(chunk.start) for chunk in chunks) for chunks in self.ranks]
        return np.array(pairs, np.int64)

    @property
    def imbalance(self) -> float:
        """The most work of a rank over the mean; 1 where there is none."""
        return float(self.work.max() / self.work.mean()) if self.work.any() else 1.0

    def indices(self, rank: int) -> Integers:
        """``[tokens[rank]]``: where a rank's tokens are in document order.

        Args:
            rank: Whose.
        """
        return self.positions(rank) + self.offsets[self.documents(rank)]

    def positions(self, rank: int) -> Integers:
        """``[tokens[rank]]``: positions of a rank's tokens, which restart at 0 in every document.

        Args:
            rank: Whose.
        """
        ranges = [np.arange(chunk.start, chunk.stop) for chunk in self.ranks[rank]]
        return np.concatenate([np.zeros(0, np.int64), *ranges])

    def documents(self, rank: int) -> Integers:
        """``[tokens[rank]]``: the documents of a rank's tokens.

        Args:
            rank: Whose.
        """
        chunks = self.ranks[rank]
        own = np.array([chunk.document for chunk in chunks], np.int64)
        return np.repeat(own, [chunk.stop - chunk.start for chunk in chunks])

    def cu_seqlens(self, rank: int) -> Integers:
        """``[chunks + 1]``: where each chunk begins among a rank's tokens.

        Args:
            rank: Whose.
        """
        return np.array([0, *accumulate(chunk.stop - chunk.start for chunk in self.ranks[rank])], np.int64)

    @cached_property
    def order(self) -> Integers:
        """``[T]``: all ranks' :meth:`indices`, one rank after another."""
        return np.concatenate([self.indices(rank) for rank in range(self.size)])

    @cached_property
    def restore(self) -> Integers:
        """``[T]``: where each token of the document order is when ranks' tokens lie one rank after another."""
        return np.argsort(self.order)

    def calls(self, rank: int) -> tuple[Integers, Integers]:
        """Lengths of the queries and keys of a rank's attention: a chunk sees its document up to its own end.

        Args:
            rank: Whose.
        """
        chunks = self.ranks[rank]
        queries = np.array([chunk.stop - chunk.start for chunk in chunks], np.int64)
        return queries, np.array([chunk.stop for chunk in chunks], np.int64)

    def predicted(self, latency: Latency) -> float:
        """Seconds of the slowest rank's attention.

        Args:
            latency: Latency of attention calls by their lengths.
        """
        return max(latency(*self.calls(rank)) for rank in range(self.size))

    def to_json(self) -> str:
        """The plan as one line that :meth:`from_json` reads."""
        return json.dumps({"mode": self.mode, "lengths": self.lengths, "ranks": self.ranks})

    @classmethod
    def from_json(cls, text: str) -> ShardPlan:
        """Read what :meth:`to_json` wrote.

        Args:
            text: One JSON object.

        Raises:
            PlanError: If it is not a possible plan.
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
    """Each rank one run of the packed documents, of equal numbers of tokens: the simplest, and not balanced.

    Args:
        lengths: Tokens of each document.
        ranks: Number of ranks.

    Raises:
        PlanError: If a length is negative or there are no ranks.
    """
    _check_lengths(lengths, ranks)
    total = sum(lengths)
    sizes = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    return _plan("contiguous", lengths, [(rank, piece) for rank, piece in enumerate(_pieces(lengths, sizes))], ranks)


def per_sequence(lengths: Sequence[int], ranks: int) -> ShardPlan:
    """The packed documents as one sequence, cut into head and tail chunks.

    Args:
        lengths: Tokens of each document.
        ranks: Number of ranks.

    Raises:
        PlanError: If a length is negative or there are no ranks.
    """
    return _head_tail("per_sequence", lengths, [list(range(len(lengths)))], ranks)


def per_document(lengths: Sequence[int], ranks: int, whole_below: int = 0) -> ShardPlan:
    """Every document cut into head and tail chunks.

    Ranks' numbers of tokens differ by one at most, and not at all if ``2 * ranks`` divides their sum; their work
    differs by at most ``2 * (tokens + documents)`` pairs.

    Args:
        lengths: Tokens of each document.
        ranks: Number of ranks.
        whole_below: Shorter documents are cut together, as one sequence.

    Raises:
        PlanError: If a length is negative or there are no ranks.
    """
    short = [document for document, length in enumerate(lengths) if length < whole_below]
    long = [[document] for document, length in enumerate(lengths) if length >= whole_below]
    mode = f"per_document, below {whole_below} together" if whole_below else "per_document"
    return _head_tail(mode, lengths, [*long, *([short] if short else [])], ranks)


def adaptive(lengths: Sequence[int], ranks: int, latency: Latency = AnalyticLatency()) -> ShardPlan:
    """The fastest by prediction of: per sequence, per document, and per document but for short ones.

    The same on every rank that calls it with the same arguments.

    Args:
        lengths: Tokens of each document.
        ranks: Number of ranks.
        latency: Latency of a rank's attention.

    Raises:
        PlanError: If a length is negative or there are no ranks.
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
    """Pairs of a document's first tokens."""
    return tokens * (tokens + 1) // 2


def _pieces(
    lengths: Sequence[int], sizes: Iterable[int], documents: Sequence[int] | None = None
) -> list[list[DocumentChunk]]:
    """Documents one after another, cut into runs of given sizes."""
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
    """Each group of documents as one sequence of ``2 * ranks`` chunks; leftover tokens are dealt around them."""
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
    """Ranks' chunks in document order; neighbours become one."""
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
