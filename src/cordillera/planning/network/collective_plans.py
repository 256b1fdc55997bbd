"""Collectives as plans: which rank sends which chunks to which rank in each step.

A plan is data: :func:`verify` proves it, and :mod:`cordillera.planning.network.collective_cost` prices it. Only
all-gathers are written out: a reduce-scatter is an all-gather run backwards, and an all-reduce is a reduce-scatter
followed by an all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from cordillera.errors import PlanError


class Chunk(NamedTuple):
    """A part of the data that is always sent as a whole.

    Attributes:
        size: Size relative to the other chunks.
        origin: Rank that has the chunk at the start; None if every rank has its own contribution to it.
        destination: Rank that has the chunk at the end; None if every rank has it.
    """

    size: int = 1
    origin: int | None = None
    destination: int | None = None


class Transfer(NamedTuple):
    """The chunks that one rank sends to another in one step.

    Attributes:
        source: Rank that sends.
        target: Rank that receives.
        chunks: Indices of the chunks.
        reduces: Whether the target adds the data to its own; otherwise the data replaces it.
    """

    source: int
    target: int
    chunks: tuple[int, ...]
    reduces: bool


PlanStep: TypeAlias = tuple[Transfer, ...]


@dataclass(frozen=True)
class CollectivePlan:
    """A collective operation as a sequence of steps.

    All transfers of a step read the data that their sources held before the step.

    Attributes:
        collective: ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``all-to-all``, ``broadcast`` or ``reduce``.
        algorithm: Name of the algorithm.
        ranks: Number of ranks, which are numbered from 0.
        chunks: Chunks in the order in which they lie in a buffer.
        steps: Steps in the order in which they run.
    """

    collective: str
    algorithm: str
    ranks: int
    chunks: tuple[Chunk, ...]
    steps: tuple[PlanStep, ...]

    @property
    def name(self) -> str:
        """Name of the plan for messages."""
        return f"{self.algorithm} {self.collective} over {self.ranks} ranks"

    def held_at_start(self, rank: int) -> list[int]:
        """Return the indices of the chunks in a rank's buffer before the first step."""
        return [i for i, chunk in enumerate(self.chunks) if chunk.origin in (None, rank)]

    def held_at_end(self, rank: int) -> list[int]:
        """Return the indices of the chunks in a rank's buffer after the last step."""
        return [i for i, chunk in enumerate(self.chunks) if chunk.destination in (None, rank)]


def reverse(plan: CollectivePlan, collective: str) -> CollectivePlan:
    """Run a ``plan`` backwards under a new name, ``collective``: an all-gather is then a reduce-scatter.

    Raises:
        PlanError: If a chunk has neither an origin nor a destination, as in an all-reduce.
    """
    if any(chunk.origin is None and chunk.destination is None for chunk in plan.chunks):
        raise PlanError("an all-reduce cannot be run backwards", where=plan.name)
    chunks = tuple(Chunk(chunk.size, chunk.destination, chunk.origin) for chunk in plan.chunks)
    steps = tuple(
        tuple(
            Transfer(sent.target, sent.source, sent.chunks, plan.chunks[sent.chunks[0]].destination is None)
            for sent in step
        )
        for step in reversed(plan.steps)
    )
    return CollectivePlan(collective, plan.algorithm, plan.ranks, chunks, steps)


def compose(first: CollectivePlan, second: CollectivePlan, collective: str) -> CollectivePlan:
    """Append a plan to another; a reduce-scatter and an all-gather make an all-reduce, the resulting ``collective``.

    Raises:
        PlanError: If ``first`` and ``second`` differ in ranks or chunks, or a chunk of the second starts elsewhere than
            the first leaves it.
    """
    if first.ranks != second.ranks or len(first.chunks) != len(second.chunks):
        raise PlanError(
            f"it cannot follow a plan over {first.ranks} ranks and {len(first.chunks)} chunks: it is over "
            f"{second.ranks} and {len(second.chunks)}",
            where=second.name,
        )
    chunks = []
    for i, (before, after) in enumerate(zip(first.chunks, second.chunks, strict=True)):
        if before.size != after.size or before.destination != after.origin:
            raise PlanError(f"chunk {i} starts elsewhere than the {first.name} leaves it", where=second.name)
        chunks.append(Chunk(before.size, before.origin, after.destination))
    return CollectivePlan(collective, second.algorithm, first.ranks, tuple(chunks), first.steps + second.steps)


def scattered(gather: CollectivePlan) -> CollectivePlan:
    """Return the reduce-scatter that reverses an all-gather."""
    return reverse(gather, "reduce-scatter")


def all_reduced(gather: CollectivePlan) -> CollectivePlan:
    """Return the all-reduce of an all-gather: its reversal, followed by itself."""
    return compose(scattered(gather), gather, "all-reduce")


def _named(ranks: int) -> list[int]:
    return [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]


def verify(plan: CollectivePlan, n: int | None = None) -> None:
    """Prove that a plan leaves every rank with every contribution that it must have, each exactly once.

    Nothing about ``plan`` is trusted. It must have ``n`` ranks, by default its own number.

    Raises:
        PlanError: If the plan is not over ``n`` ranks, a transfer names a rank or chunk that does not exist or sends a
            chunk that its source does not have yet, two transfers of a step write the same chunk of a rank, or a rank
            ends without a contribution or with one twice. The message names the step, rank, chunk and contributions.
    """
    if n is not None and plan.ranks != n:
        raise PlanError(f"it is not over {n} ranks", where=plan.name)
    # For every rank and chunk, two sets of ranks as bits: those that contribute to it, and those that do so twice.
    once, twice = _contributions(plan)
    for s, step in enumerate(plan.steps):
        arriving = []
        written: dict[tuple[int, int], bool] = {}  # whether the arriving data is added, by rank and chunk
        for sent in step:
            where = f"{plan.name}, step {s}, rank {sent.source} to rank {sent.target}"
            _check_transfer(plan, sent, where)
            for chunk in sent.chunks:
                if not once[sent.source][chunk]:
                    raise PlanError(f"rank {sent.source} does not have chunk {chunk} yet", where=where)
                place = sent.target, chunk
                if place in written and not (written[place] and sent.reduces):
                    raise PlanError(f"chunk {chunk} of rank {sent.target} is written twice in this step", where=where)
                written[place] = sent.reduces
                arriving.append((place, sent.reduces, once[sent.source][chunk], twice[sent.source][chunk]))
        for (rank, chunk), reduces, more, doubled in arriving:
            if reduces:
                twice[rank][chunk] |= doubled | once[rank][chunk] & more
                once[rank][chunk] |= more
            else:
                once[rank][chunk], twice[rank][chunk] = more, doubled
    for rank in range(plan.ranks):
        for chunk in plan.held_at_end(rank):
            origin = plan.chunks[chunk].origin
            wanted = (1 << plan.ranks) - 1 if origin is None else 1 << origin
            missing, doubled = wanted & ~once[rank][chunk], twice[rank][chunk]
            if missing or doubled:
                wrong = [f"lacks the contributions of ranks {_named(missing)}"] if missing else []
                wrong += [f"has those of ranks {_named(doubled)} more than once"] if doubled else []
                raise PlanError(f"rank {rank}, chunk {chunk}: {' and '.join(wrong)}", where=plan.name)


def _contributions(plan: CollectivePlan) -> tuple[list[list[int]], list[list[int]]]:
    for i, chunk in enumerate(plan.chunks):
        for place in (chunk.origin, chunk.destination):
            if place is not None and not 0 <= place < plan.ranks:
                raise PlanError(f"chunk {i} belongs to rank {place}, which does not exist", where=plan.name)
        if chunk.size < 1:
            raise PlanError(f"chunk {i} has size {chunk.size}", where=plan.name)
    once = [[1 << rank if chunk.origin in (None, rank) else 0 for chunk in plan.chunks] for rank in range(plan.ranks)]
    return once, [[0] * len(plan.chunks) for _ in range(plan.ranks)]


def _check_transfer(plan: CollectivePlan, sent: Transfer, where: str) -> None:
    if not (0 <= sent.source < plan.ranks and 0 <= sent.target < plan.ranks):
        raise PlanError(f"there are only ranks 0 to {plan.ranks - 1}", where=where)
    if sent.source == sent.target:
        raise PlanError("a rank sends to itself", where=where)
    if not sent.chunks:
        raise PlanError("nothing is sent", where=where)
    for chunk in sent.chunks:
        if not 0 <= chunk < len(plan.chunks):
            raise PlanError(f"there is no chunk {chunk}", where=where)
