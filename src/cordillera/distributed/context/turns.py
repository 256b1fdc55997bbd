"""Turns of a conversation over ranks: which rank gets which new tokens.

New tokens of a sequence are split into ``2 * ranks`` chunks, head and tail to each rank, wherever its cached tokens
lie. Leftover tokens lengthen the chunks of the ranks that hold the fewest. So after any turns, long or of one token
each, the ranks' numbers of tokens differ by at most one. Decoding works the same way with one token for each sequence,
which deals the tokens to the ranks in turn.

Source: Yang et al. 2024 (arXiv 2411.01783), sections 3.3 to 3.5 and algorithm 4. There, sequences are padded to equal
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
    """New tokens of sequences by their plan, in which positions count from 0.

    Attributes:
        held: Number of tokens of each sequence that the ranks held before, ``[ranks][sequences]``.
    """

    plan: ShardPlan
    held: tuple[tuple[int, ...], ...]

    @cached_property
    def cached(self) -> tuple[int, ...]:
        """Number of tokens of each sequence on all ranks before the turn, ``[sequences]``."""
        return tuple(map(sum, zip(*self.held, strict=True)))

    @cached_property
    def added(self) -> tuple[tuple[int, ...], ...]:
        """Number of new tokens of each sequence on each rank, ``[ranks][sequences]``."""
        count = len(self.plan.lengths)
        ranks = range(self.plan.size)
        return tuple(tuple(np.bincount(self.plan.documents(rank), minlength=count).tolist()) for rank in ranks)

    @property
    def active(self) -> list[int]:
        """Sequences with new tokens; others take no part."""
        return [sequence for sequence, length in enumerate(self.plan.lengths) if length]

    def positions(self, rank: int) -> Integers:
        """Return the positions of a rank's new tokens in their sequences, ``[plan.tokens[rank]]``."""
        return self.plan.positions(rank) + np.array(self.cached, np.int64)[self.plan.documents(rank)]

    def rows(self, rank: int) -> int:
        """Return the number of tokens of active sequences, cached and new, whose keys and values a rank holds."""
        return sum(self.held[rank][sequence] + self.added[rank][sequence] for sequence in self.active)

    def packed(self, rank: int) -> list[int]:
        """Return the first row of each sequence if a rank's active sequences lie one after another, ``[sequences]``."""
        counts = [self.held[rank][b] + self.added[rank][b] for b in range(len(self.plan.lengths))]
        sizes = [count if length else 0 for count, length in zip(counts, self.plan.lengths, strict=True)]
        return [0, *np.cumsum(sizes).tolist()][:-1]

    def blocks(self, queries: int, keys: int, starts: Sequence[int]) -> list[RowBlock]:
        """Return the blocks in which one rank's new tokens see the keys of another.

        All of a sequence's cached tokens lie before all of its new ones, so they form one block in whatever order they
        were written; positions matter only among new tokens.

        Args:
            queries: Rank of the new tokens, which lie in the order of the plan.
            keys: Rank of the keys, with each sequence's cached keys before its new ones.
            starts: First row of each sequence's keys, ``[sequences]``.
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
        """Return the rows, among a rank's new tokens, of the last tokens of active sequences, by sequence."""
        documents, positions = self.plan.documents(rank), self.plan.positions(rank)
        ends = np.array(self.plan.lengths, np.int64)[documents] - 1 == positions
        return {int(documents[row]): int(row) for row in np.flatnonzero(ends)}


def next_turn(lengths: Sequence[int], held: Sequence[Sequence[int]]) -> Turn:
    """Distribute new tokens (``lengths`` by sequence) over ranks, so that their numbers of tokens become equal.

    They hold ``held [ranks][sequences]`` tokens before.

    Raises:
        PlanError: If a number is negative, there are no ranks, or the number of sequences differs.
    """
    ranks = len(held)
    if any(len(counts) != len(lengths) or min(counts, default=0) < 0 for counts in held) or min(lengths, default=0) < 0:
        raise PlanError(f"{list(lengths)} new tokens beside {[list(counts) for counts in held]}", where="turn")
    if not ranks:
        raise PlanError("there are no ranks", where="turn")
    totals = [sum(counts) for counts in held]
    step = sum(totals) // max(1, sum(length > 0 for length in lengths))  # increases by one with each turn of decoding
    chunks: list[list[DocumentChunk]] = [[] for _ in range(ranks)]
    for document, length in enumerate(lengths):
        even, left = divmod(length, 2 * ranks)
        own = [counts[document] for counts in held]
        extra = [0] * ranks
        for _ in range(left):
            # Choose the rank with the fewest tokens; break ties by the fewest tokens of this sequence, so that ranks
            # alternate, then by the paper's rule.
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
