"""Turns of a conversation over ranks: who gets which new tokens, beside what ranks hold already, as data.

New tokens of a sequence are cut into ``2 * ranks`` chunks, head and tail to each rank, wherever its cached tokens lie.
Leftover tokens lengthen the chunks of ranks that hold the fewest, so that after any turns, long or of one token each,
ranks' numbers of tokens differ by one at most. Decoding is the same with one token a sequence, and comes to dealing
them around.

Source: Yang et al. 2024 (arXiv 2411.01783), sections 3.3 to 3.5 and algorithm 4. There sequences are padded to equal
chunks, and decoded tokens go to rank ``(sequence + step) mod ranks``, which balances only in the long run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cordillera.distributed.context.shard_plan import DocumentChunk, Integers, ShardPlan
from cordillera.errors import PlanError
from cordillera.kernels.attention.relation import RowBlock, blocks_between


@dataclass(frozen=True)
class Turn:
    """New tokens of sequences, and how many tokens of each the ranks held before.

    Attributes:
        plan: Of the new tokens alone, whose positions count from 0.
        held: ``[ranks][sequences]``.
    """

    plan: ShardPlan
    held: tuple[tuple[int, ...], ...]

    @cached_property
    def cached(self) -> tuple[int, ...]:
        """``[sequences]``: tokens on all ranks before."""
        return tuple(map(sum, zip(*self.held, strict=True)))

    @cached_property
    def added(self) -> tuple[tuple[int, ...], ...]:
        """``[ranks][sequences]``: how many new tokens go where."""
        count = len(self.plan.lengths)
        ranks = range(self.plan.size)
        return tuple(tuple(np.bincount(self.plan.documents(rank), minlength=count).tolist()) for rank in ranks)

    @property
    def active(self) -> list[int]:
        """Sequences with new tokens; others take no part."""
        return [sequence for sequence, length in enumerate(self.plan.lengths) if length]

    def positions(self, rank: int) -> Integers:
        """``[plan.tokens[rank]]``: of a rank's new tokens in their sequences.

        Args:
            rank: Whose.
        """
        return self.plan.positions(rank) + np.array(self.cached, np.int64)[self.plan.documents(rank)]

    def rows(self, rank: int) -> int:
        """Tokens of active sequences, cached and new, whose keys and values a rank holds.

        Args:
            rank: Which.
        """
        return sum(self.held[rank][sequence] + self.added[rank][sequence] for sequence in self.active)

    def packed(self, rank: int) -> list[int]:
        """``[sequences]``: where each one's rows begin if a rank's active sequences lie one after another.

        Args:
            rank: Whose.
        """
        counts = [self.held[rank][b] + self.added[rank][b] for b in range(len(self.plan.lengths))]
        sizes = [count if length else 0 for count, length in zip(counts, self.plan.lengths, strict=True)]
        return [0, *np.cumsum(sizes).tolist()][:-1]

    def blocks(self, queries: int, keys: int, starts: Sequence[int]) -> list[RowBlock]:
        """How one rank's new tokens see what another holds.

        All of a sequence's cached tokens lie before all of its new ones, so they are one block wherever they were
        written; only among new tokens positions matter.

        Args:
            queries: Rank of the new tokens, which lie in the order of the plan.
            keys: Rank of the keys, each sequence's cached ones before its new ones.
            starts: ``[sequences]``, the row where each sequence's keys begin.
        """
        blocks = []
        row = 0
        own, others = (_by_document(self.plan.ranks[rank]) for rank in (queries, keys))
        for sequence, chunks in own.items():
            stop = row + sum(chunk.stop - chunk.start for chunk in chunks)
            first = starts[sequence]
            last = first + self.held[keys][sequence]
            if first < last:
                blocks.append(RowBlock(row, stop, first, last, False))
            for block in blocks_between(chunks, others.get(sequence, [])):
                q_start, q_stop, k_start, k_stop, causal = block
                blocks.append(RowBlock(row + q_start, row + q_stop, last + k_start, last + k_stop, causal))
            row = stop
        return blocks

    def last(self, rank: int) -> dict[int, int]:
        """Rows, among a rank's new tokens, of the last tokens of active sequences, by sequence.

        Args:
            rank: Whose.
        """
        documents, positions = self.plan.documents(rank), self.plan.positions(rank)
        ends = np.array(self.plan.lengths, np.int64)[documents] - 1 == positions
        return {int(documents[row]): int(row) for row in np.flatnonzero(ends)}


def next_turn(lengths: Sequence[int], held: Sequence[Sequence[int]]) -> Turn:
    """Cut new tokens for ranks, by what they hold.

    Args:
        lengths: New tokens of each sequence.
        held: ``[ranks][sequences]``, tokens that ranks hold.

    Raises:
        PlanError: If a number is negative, there are no ranks, or sequences differ in number.
    """
    ranks = len(held)
    if any(len(counts) != len(lengths) or min(counts, default=0) < 0 for counts in held) or min(lengths, default=0) < 0:
        raise PlanError(f"{list(lengths)} new tokens beside {[list(counts) for counts in held]}", where="turn")
    if not ranks:
        raise PlanError("there are no ranks", where="turn")
    totals = [sum(counts) for counts in held]
    step = sum(totals) // max(1, sum(length > 0 for length in lengths))  # rises by one with each when decoding
    chunks: list[list[DocumentChunk]] = [[] for _ in range(ranks)]
    for document, length in enumerate(lengths):
        even, left = divmod(length, 2 * ranks)
        own = [counts[document] for counts in held]
        extra = [0] * ranks
        for _ in range(left):
            # of ranks that hold as much, the one with least of this sequence, so that no sequence settles on one rank;
            # of those, the one that the paper's rule names or the next
            fewest = min(range(ranks), key=lambda rank: (totals[rank], own[rank], (rank - document - step) % ranks))
            extra[fewest] += 1
            totals[fewest] += 1
            own[fewest] += 1
        start = 0
        for slot in range(2 * ranks):
            rank = min(slot, 2 * ranks - 1 - slot)
            stop = start + even + (extra[rank] + (slot < ranks)) // 2
            if start < stop:
                before = chunks[rank][-1] if chunks[rank] else None
                if before is not None and (before.document, before.stop) == (document, start):
                    chunks[rank][-1] = before._replace(stop=stop)
                else:
                    chunks[rank].append(DocumentChunk(document, start, stop))
            start = stop
    plan = ShardPlan("turn", tuple(lengths), tuple(map(tuple, chunks)))
    return Turn(plan, tuple(tuple(counts) for counts in held))


def _by_document(chunks: Sequence[DocumentChunk]) -> dict[int, list[DocumentChunk]]:
    found: dict[int, list[DocumentChunk]] = {}
    for chunk in chunks:
        found.setdefault(chunk.document, []).append(chunk)
    return found
