"""Collectives as plans: which rank sends which chunks to which rank in each step.

A plan is data. The functions below build plans, :func:`verify` proves them, :func:`execute` runs them on arrays and
:mod:`cordillera.planning.network.collective_cost` prices them. Only gathers and trees are written out: a reduce-scatter
is an all-gather run backwards, and an all-reduce is a reduce-scatter followed by an all-gather.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cordillera.errors import PlanError
from cordillera.planning.network.flows import FlowLink


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

    @property
    def buffer_size(self) -> int:
        """Size of the largest buffer of any rank at the start or the end, in units of the chunk sizes."""
        start, end = [0] * self.ranks, [0] * self.ranks
        everywhere = [0, 0]
        for chunk in self.chunks:
            for sizes, place, side in ((start, chunk.origin, 0), (end, chunk.destination, 1)):
                if place is None:
                    everywhere[side] += chunk.size
                else:
                    sizes[place] += chunk.size
        return max(everywhere[0] + max(start), everywhere[1] + max(end))


def reverse(plan: CollectivePlan, collective: str) -> CollectivePlan:
    """Run a plan backwards: an all-gather becomes a reduce-scatter, a broadcast a reduction.

    Args:
        plan: Plan in which every chunk has an origin or a destination.
        collective: Name of the resulting collective.

    Raises:
        PlanError: If a chunk has neither, as in an all-reduce.
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
    """Append one plan to another: a reduce-scatter and an all-gather make an all-reduce.

    Args:
        first: Plan that runs first.
        second: Plan whose chunks start where those of the first end.
        collective: Name of the resulting collective.

    Raises:
        PlanError: If the plans differ in ranks or chunks, or a chunk starts elsewhere than the first plan leaves it.
    """
    if first.ranks != second.ranks or len(first.chunks) != len(second.chunks):
        raise PlanError(
            f"it cannot follow a plan over {first.ranks} ranks and {len(first.chunks)} chunks: it is over "
            f"{second.ranks} and {len(second.chunks)}",
            where=second.name,
        )
    for i, (before, after) in enumerate(zip(first.chunks, second.chunks, strict=True)):
        if before.size != after.size or before.destination != after.origin:
            raise PlanError(f"chunk {i} starts elsewhere than the {first.name} leaves it", where=second.name)
    chunks = tuple(
        Chunk(before.size, before.origin, after.destination)
        for before, after in zip(first.chunks, second.chunks, strict=True)
    )
    return CollectivePlan(collective, second.algorithm, first.ranks, chunks, first.steps + second.steps)


def _scattered(gather: CollectivePlan) -> CollectivePlan:
    return reverse(gather, "reduce-scatter")


def _all_reduced(gather: CollectivePlan) -> CollectivePlan:
    return compose(_scattered(gather), gather, "all-reduce")


def _check_ranks(n: int) -> None:
    if n < 1:
        raise ValueError(f"n is {n}; a collective needs at least 1 rank")


def _steps(steps: Iterable[Iterable[Transfer]]) -> tuple[PlanStep, ...]:
    return tuple(step for step in map(tuple, steps) if step)


def _ring_order(n: int, order: Sequence[int] | None) -> list[int]:
    _check_ranks(n)
    ring = list(range(n)) if order is None else list(order)
    if sorted(ring) != list(range(n)):
        raise ValueError(f"order must name each of the {n} ranks once, got {ring}")
    return ring


def ring_all_gather(n: int, *, order: Sequence[int] | None = None, bidirectional: bool = False) -> CollectivePlan:
    """Make an all-gather around a ring; rank ``r`` starts with chunk ``r``.

    Args:
        n: Number of ranks.
        order: Ranks in the order of the ring. Default: 0 to n - 1.
        bidirectional: Whether half of the chunks travel in the other direction at the same time, which takes ``ceil((n
            - 1) / 2)`` steps instead of ``n - 1``.

    Raises:
        ValueError: If ``n`` is below 1 or ``order`` is not an order of the ranks.
    """
    ring = _ring_order(n, order)
    forward = n // 2 if bidirectional else n - 1
    backward = (n - 1) // 2 if bidirectional else 0

    def step(s: int) -> Iterator[Transfer]:
        for p, rank in enumerate(ring):
            yield Transfer(rank, ring[(p + 1) % n], (ring[(p - s) % n],), False)
        if s < backward:
            for p, rank in enumerate(ring):
                yield Transfer(rank, ring[(p - 1) % n], (ring[(p + s) % n],), False)

    algorithm = "bidirectional-ring" if bidirectional else "ring"
    return CollectivePlan("all-gather", algorithm, n, _one_each(n), _steps(step(s) for s in range(forward)))


def _one_each(n: int) -> tuple[Chunk, ...]:
    return tuple(Chunk(1, rank, None) for rank in range(n))


def ring_reduce_scatter(n: int, *, order: Sequence[int] | None = None, bidirectional: bool = False) -> CollectivePlan:
    """Make a reduce-scatter around a ring, in the same direction as :func:`ring_all_gather`.

    Rank ``r`` ends with chunk ``r``.

    Args:
        n: Number of ranks.
        order: Ranks in the order of the ring. Default: 0 to n - 1.
        bidirectional: Whether half of the chunks travel in the other direction at the same time.

    Raises:
        ValueError: If ``n`` is below 1 or ``order`` is not an order of the ranks.
    """
    ring = _ring_order(n, order)
    return _scattered(ring_all_gather(n, order=ring[::-1], bidirectional=bidirectional))


def ring_all_reduce(n: int, *, order: Sequence[int] | None = None, bidirectional: bool = False) -> CollectivePlan:
    """Make an all-reduce around a ring: reduce-scatter, then all-gather (Patarasuk and Yuan 2009).

    Args:
        n: Number of ranks.
        order: Ranks in the order of the ring. Default: 0 to n - 1.
        bidirectional: Whether half of the chunks travel in the other direction at the same time.

    Raises:
        ValueError: If ``n`` is below 1 or ``order`` is not an order of the ranks.
    """
    scatter = ring_reduce_scatter(n, order=order, bidirectional=bidirectional)
    return compose(scatter, ring_all_gather(n, order=order, bidirectional=bidirectional), "all-reduce")


def doubling_all_gather(n: int) -> CollectivePlan:
    """Make an all-gather in ``ceil(log2 n)`` steps, each of which doubles the chunks that a rank has.

    Rank ``r`` starts with chunk ``r``. If ``n`` is a power of two, ranks exchange with the rank whose number differs in
    one bit, distant ranks first, while messages are small (Thakur et al. 2005). Otherwise each rank sends around the
    circle over distances 1, 2, 4, ..., and in the last step only the missing chunks (Bruck et al. 1997), which moves as
    few bytes for any ``n``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    _check_ranks(n)
    steps: list[PlanStep] = []
    if n & (n - 1) == 0:
        held: list[tuple[int, ...]] = [(rank,) for rank in range(n)]
        distance = n // 2
        while distance:
            steps.append(tuple(Transfer(rank, rank ^ distance, held[rank], False) for rank in range(n)))
            held = [held[rank] + held[rank ^ distance] for rank in range(n)]
            distance //= 2
    else:
        distance = 1
        while distance < n:
            steps.append(
                tuple(
                    Transfer(
                        rank,
                        (rank - distance) % n,
                        tuple((rank + i) % n for i in range(min(distance, n - distance))),
                        False,
                    )
                    for rank in range(n)
                )
            )
            distance *= 2
    return CollectivePlan("all-gather", "halving-doubling", n, _one_each(n), tuple(steps))


def halving_reduce_scatter(n: int) -> CollectivePlan:
    """Make a reduce-scatter as :func:`doubling_all_gather` run backwards; rank ``r`` ends with chunk ``r``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    return _scattered(doubling_all_gather(n))


def halving_doubling_all_reduce(n: int) -> CollectivePlan:
    """Make an all-reduce in ``2 ceil(log2 n)`` steps that moves no more bytes than a ring, for any ``n``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    return _all_reduced(doubling_all_gather(n))


def _check_root(n: int, root: int, chunks: int) -> None:
    _check_ranks(n)
    if not 0 <= root < n:
        raise ValueError(f"root is {root}; it must be one of the {n} ranks")
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}; it must be at least 1")


def tree_broadcast(n: int, root: int = 0) -> CollectivePlan:
    """Make a broadcast over a binomial tree in ``ceil(log2 n)`` steps, distant ranks first.

    Args:
        n: Number of ranks.
        root: Rank that has the data.

    Raises:
        ValueError: If ``n`` is below 1 or ``root`` is not one of the ranks.
    """
    _check_root(n, root, 1)

    def step(distance: int) -> Iterator[Transfer]:
        for rank in range(0, n - distance, 2 * distance):
            yield Transfer((rank + root) % n, (rank + distance + root) % n, (0,), False)

    distances = [1 << bit for bit in reversed(range((n - 1).bit_length()))]
    return CollectivePlan("broadcast", "tree", n, (Chunk(1, root, None),), _steps(map(step, distances)))


def tree_all_reduce(n: int) -> CollectivePlan:
    """Make an all-reduce up and down a binomial tree, in which every message is the whole vector.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    down = tree_broadcast(n)
    return compose(reverse(down, "reduce"), down, "all-reduce")


def chain_broadcast(n: int, root: int = 0, *, chunks: int = 1) -> CollectivePlan:
    """Make a pipelined broadcast along a chain: each rank passes on a chunk while it receives the next.

    Args:
        n: Number of ranks.
        root: Rank that has the data.
        chunks: Number of equal parts into which the data is cut.

    Raises:
        ValueError: If ``n`` or ``chunks`` is below 1, or ``root`` is not one of the ranks.
    """
    _check_root(n, root, chunks)

    def step(s: int) -> Iterator[Transfer]:
        for rank in range(max(0, s - chunks + 1), min(n - 1, s + 1)):
            yield Transfer((rank + root) % n, (rank + 1 + root) % n, (s - rank,), False)

    parts = tuple(Chunk(1, root, None) for _ in range(chunks))
    return CollectivePlan("broadcast", "chain", n, parts, _steps(step(s) for s in range(n - 2 + chunks)))


def direct_all_gather(n: int) -> CollectivePlan:
    """Make an all-gather in one step, from every rank to every other; rank ``r`` starts with chunk ``r``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    _check_ranks(n)
    step = (Transfer(a, (a + s) % n, (a,), False) for s in range(1, n) for a in range(n))
    return CollectivePlan("all-gather", "direct", n, _one_each(n), _steps([step]))


def direct_reduce_scatter(n: int) -> CollectivePlan:
    """Make a reduce-scatter in one step, from every rank to every other; rank ``r`` ends with chunk ``r``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    return _scattered(direct_all_gather(n))


def direct_all_reduce(n: int) -> CollectivePlan:
    """Make an all-reduce in two steps in which every rank sends to every other.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    return _all_reduced(direct_all_gather(n))


def _all_to_all(n: int, algorithm: str, steps: Iterable[Iterable[Transfer]]) -> CollectivePlan:
    chunks = tuple(Chunk(1, source, target) for source in range(n) for target in range(n))
    return CollectivePlan("all-to-all", algorithm, n, chunks, _steps(steps))


def direct_all_to_all(n: int) -> CollectivePlan:
    """Make an all-to-all in one step; chunk ``a * n + b`` goes from rank ``a`` to rank ``b``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    _check_ranks(n)
    step = (_block(n, a, (a + s) % n) for s in range(1, n) for a in range(n))
    return _all_to_all(n, "direct", [step])


def pairwise_all_to_all(n: int) -> CollectivePlan:
    """Make an all-to-all in ``n - 1`` steps: in step ``s`` rank ``r`` sends to rank ``(r + s) % n``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    _check_ranks(n)
    return _all_to_all(n, "pairwise", ((_block(n, a, (a + s) % n) for a in range(n)) for s in range(1, n)))


def _block(n: int, source: int, target: int) -> Transfer:
    return Transfer(source, target, (source * n + target,), False)


def check_domains(sizes: Sequence[int]) -> None:
    """Check that there is at least one domain and that every domain has ranks.

    Args:
        sizes: Number of ranks of each domain.

    Raises:
        ValueError: If ``sizes`` is empty or a domain has fewer than 1 rank; the message names the domain.
    """
    if not sizes:
        raise ValueError("sizes is empty; there must be at least one domain")
    for k, size in enumerate(sizes):
        if size < 1:
            raise ValueError(f"domain {k} has {size} ranks; leave it out or give it at least 1")


def hierarchical_all_reduce(
    sizes: Sequence[int], gather: Callable[[int], CollectivePlan] = ring_all_gather
) -> CollectivePlan:
    """Make an all-reduce over domains: reduce-scatter inside, all-reduce across, all-gather inside.

    The domains may differ in size. The data is cut wherever the shares of any domain meet, so that each piece has one
    owner in each domain. A transfer carries all pieces that two ranks exchange in a step.

    Args:
        sizes: Number of ranks of each domain; ranks are numbered domain after domain.
        gather: Function that makes the all-gather used inside and across domains, which is run backwards for the
            reduction: :func:`ring_all_gather`, :func:`doubling_all_gather` or :func:`direct_all_gather`.

    Raises:
        ValueError: If there is no domain or a domain has no rank.
    """
    return _all_reduced(_hierarchical(sizes, gather))


def hierarchical_all_gather(
    sizes: Sequence[int], gather: Callable[[int], CollectivePlan] = ring_all_gather
) -> CollectivePlan:
    """Make an all-gather across domains, then inside each; rank ``r`` starts with chunk ``r``.

    Args:
        sizes: Number of ranks of each domain, equal for all: with unequal sizes, ranks would own unequal shares.
        gather: Function that makes the all-gathers, as in :func:`hierarchical_all_reduce`.

    Raises:
        ValueError: If a domain has no rank, or the domains differ in size.
    """
    _check_equal(sizes)
    return _hierarchical(sizes, gather)


def hierarchical_reduce_scatter(
    sizes: Sequence[int], gather: Callable[[int], CollectivePlan] = ring_all_gather
) -> CollectivePlan:
    """Make a reduce-scatter inside each domain, then across; rank ``r`` ends with chunk ``r``.

    Args:
        sizes: Number of ranks of each domain, equal for all.
        gather: Function that makes the all-gathers, as in :func:`hierarchical_all_reduce`.

    Raises:
        ValueError: If a domain has no rank, or the domains differ in size.
    """
    _check_equal(sizes)
    return _scattered(_hierarchical(sizes, gather))


def _check_equal(sizes: Sequence[int]) -> None:
    check_domains(sizes)
    if len(set(sizes)) > 1:
        raise ValueError(f"domains of {list(sizes)} ranks differ in size; every rank must own an equal share")


def _hierarchical(sizes: Sequence[int], gather: Callable[[int], CollectivePlan]) -> CollectivePlan:
    """Return an all-gather across, then inside domains, in which each domain owns an equal part of every piece."""
    check_domains(sizes)
    domains, ranks = len(sizes), sum(sizes)
    base = [sum(sizes[:k]) for k in range(domains)]
    total = math.lcm(*sizes)
    cuts = sorted({share * (total // size) for size in sizes for share in range(size + 1)})
    pieces = list(pairwise(cuts))
    # Piece p of the data has an equal sub-piece for each domain k: chunk k * len(pieces) + p.
    owner = [[base[k] + low // (total // sizes[k]) for low, _ in pieces] for k in range(domains)]
    chunks = tuple(Chunk(high - low, owner[k][p], None) for k in range(domains) for p, (low, high) in enumerate(pieces))

    def across(step: PlanStep) -> Iterator[Transfer]:
        sent: dict[tuple[int, int], list[int]] = defaultdict(list)
        for transfer in step:
            for p in range(len(pieces)):
                pair = owner[transfer.source][p], owner[transfer.target][p]
                sent[pair].extend(k * len(pieces) + p for k in transfer.chunks)
        return (Transfer(*pair, tuple(moved), False) for pair, moved in sent.items())

    owned: dict[int, list[int]] = defaultdict(list)
    for k in range(domains):
        for p in range(len(pieces)):
            owned[owner[k][p]].extend(other * len(pieces) + p for other in range(domains))

    inside = [gather(size).steps for size in sizes]

    def within(s: int) -> Iterator[Transfer]:
        for k in range(domains):
            for source, target, shares, _ in inside[k][s] if s < len(inside[k]) else ():
                moved = tuple(chunk for share in shares for chunk in owned[base[k] + share])
                yield Transfer(base[k] + source, base[k] + target, moved, False)

    cross = gather(domains)
    steps = _steps([*map(across, cross.steps), *(within(s) for s in range(max(map(len, inside))))])
    return CollectivePlan("all-gather", f"hierarchical {cross.algorithm}", ranks, chunks, steps)


def hierarchical_broadcast(sizes: Sequence[int]) -> CollectivePlan:
    """Make a broadcast from rank 0 over a tree of the domains' first ranks, then a tree inside each domain.

    Args:
        sizes: Number of ranks of each domain; ranks are numbered domain after domain.

    Raises:
        ValueError: If there is no domain or a domain has no rank.
    """
    check_domains(sizes)
    base = [sum(sizes[:k]) for k in range(len(sizes))]
    across = [
        [Transfer(base[sent.source], base[sent.target], (0,), False) for sent in step]
        for step in tree_broadcast(len(sizes)).steps
    ]
    inside: list[list[Transfer]] = [[] for _ in range((max(sizes) - 1).bit_length())]
    for first, size in zip(base, sizes, strict=True):
        for s, step in enumerate(tree_broadcast(size).steps):
            inside[s] += [Transfer(first + sent.source, first + sent.target, (0,), False) for sent in step]
    return CollectivePlan("broadcast", "hierarchical", sum(sizes), (Chunk(1, 0, None),), _steps([*across, *inside]))


def synthesise_all_gather(
    links: Mapping[tuple[int, int], FlowLink], n: int, chunk_bytes: float
) -> tuple[CollectivePlan, float]:
    """Make an all-gather for a given network by matching links over time with chunks that their targets lack.

    The method is greedy and time-expanded, after TACOS (Won et al. 2024). Matches are made in order of arrival, so that
    a slow link never carries a chunk that a fast link would deliver earlier. Among the chunks that a link could carry,
    it takes the one that the fewest ranks have. Every rank receives every chunk once. The plan is not optimal in
    general.

    Args:
        links: Latency and rate of each directed link ``(source, target)``; a link is busy only during the transmission.
        n: Number of ranks.
        chunk_bytes: Size of each rank's chunk, bytes.

    Returns:
        The plan and the seconds that it takes when no rank waits for a step to end. The steps of the plan keep the
        order of the matches on each link and put receiving a chunk before sending it on.

    Raises:
        PlanError: If no path leads from one rank to another.
        ValueError: If ``n`` is below 1, a link does not join two ranks, or a latency, rate or size is out of range.
    """
    _check_ranks(n)
    _check_links(links, n, chunk_bytes)
    for origin in range(n):
        for target in sorted(set(range(n)) - _reachable(links, n, origin)):
            raise PlanError(
                f"rank {target} can never receive the chunk of rank {origin}: no way leads there",
                where="links",
                remedy="add a link, or plan for fewer ranks",
            )
    return _match(links, n, chunk_bytes)


def synthesise_reduce_scatter(
    links: Mapping[tuple[int, int], FlowLink], n: int, chunk_bytes: float
) -> tuple[CollectivePlan, float]:
    """Make a reduce-scatter for a given network: the all-gather of the network with all links reversed, run backwards.

    Args:
        links: Latency and rate of each directed link ``(source, target)``, as in :func:`synthesise_all_gather`.
        n: Number of ranks.
        chunk_bytes: Size of each rank's chunk, bytes.

    Returns:
        The plan and its seconds, as :func:`synthesise_all_gather` returns them.

    Raises:
        PlanError: If no path leads from one rank to another; the message names the ranks of the reversed network.
        ValueError: If ``n`` is below 1, a link does not join two ranks, or a latency, rate or size is out of range.
    """
    turned = {(target, source): link for (source, target), link in links.items()}
    plan, seconds = synthesise_all_gather(turned, n, chunk_bytes)
    return _scattered(plan), seconds


def _check_links(links: Mapping[tuple[int, int], FlowLink], n: int, chunk_bytes: float) -> None:
    if not (math.isfinite(chunk_bytes) and chunk_bytes >= 0):
        raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be finite and at least 0")
    for (source, target), (latency, rate) in links.items():
        where = f"link {source} -> {target}"
        if not (0 <= source < n and 0 <= target < n) or source == target:
            raise ValueError(f"{where} does not join two of the {n} ranks")
        if not (math.isfinite(latency) and latency >= 0):
            raise ValueError(f"{where}: latency is {latency}; it must be finite and at least 0")
        if not rate > 0:
            raise ValueError(f"{where}: rate is {rate}; it must be positive (leave out a link that is down)")


def _reachable(links: Iterable[tuple[int, int]], n: int, origin: int) -> set[int]:
    onward: list[list[int]] = [[] for _ in range(n)]
    for source, target in links:
        onward[source].append(target)
    seen, border = {origin}, [origin]
    while border:
        found = set(onward[border.pop()]) - seen
        seen |= found
        border += found
    return seen


def _match(links: Mapping[tuple[int, int], FlowLink], n: int, chunk_bytes: float) -> tuple[CollectivePlan, float]:
    outgoing: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for pair in sorted(links):
        outgoing[pair[0]].append(pair)
    busy = {pair: chunk_bytes / link.rate for pair, link in links.items()}
    took = {pair: link.latency + busy[pair] for pair, link in links.items()}
    here = [{rank: 0.0} for rank in range(n)]  # time at which each chunk is at a rank
    level = [{rank: 0} for rank in range(n)]  # the first step in which a rank can send a chunk on
    copies = [1] * n
    next_step = dict.fromkeys(links, 0)
    free = dict.fromkeys(links, 0.0)
    idle: set[tuple[int, int]] = set()
    steps: list[dict[tuple[int, int], int]] = []
    # Ordered by arrival, so that earlier matches arrive earlier.
    queue = [(took[pair], pair, 0.0) for pair in sorted(links)]
    heapq.heapify(queue)
    makespan = 0.0
    while queue:
        arrival, pair, start = heapq.heappop(queue)
        source, target = pair
        lacking = [(copies[chunk], chunk) for chunk in here[source] if chunk not in here[target]]
        ready = [(rarity, chunk) for rarity, chunk in lacking if here[source][chunk] <= start]
        if not ready:
            if lacking:
                later = min(here[source][chunk] for _, chunk in lacking)
                heapq.heappush(queue, (later + took[pair], pair, later))
            else:
                idle.add(pair)
            continue
        chunk = min(ready)[1]
        step = max(next_step[pair], level[source][chunk])
        while len(steps) <= step:
            steps.append({})
        steps[step][pair] = chunk
        next_step[pair] = step + 1
        here[target][chunk], level[target][chunk] = arrival, step + 1
        copies[chunk] += 1
        makespan = max(makespan, arrival)
        free[pair] = start + busy[pair]
        heapq.heappush(queue, (free[pair] + took[pair], pair, free[pair]))
        for woken in outgoing[target]:
            if woken in idle:
                idle.remove(woken)
                begin = max(arrival, free[woken])
                heapq.heappush(queue, (begin + took[woken], woken, begin))
    plan = CollectivePlan(
        "all-gather",
        "synthesised",
        n,
        _one_each(n),
        _steps((Transfer(*pair, (chunk,), False) for pair, chunk in sorted(step.items())) for step in steps),
    )
    return plan, makespan


def _named(ranks: int) -> list[int]:
    return [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]


def verify(plan: CollectivePlan, n: int | None = None) -> None:
    """Prove that a plan leaves every rank with every contribution that it must have, each exactly once.

    Args:
        plan: Plan to check; nothing about it is trusted.
        n: Number of ranks that the plan must have. Default: ``plan.ranks``.

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
        copied: set[tuple[int, int]] = set()
        reduced: set[tuple[int, int]] = set()
        for sent in step:
            where = f"{plan.name}, step {s}, rank {sent.source} to rank {sent.target}"
            _check_transfer(plan, sent, where)
            for chunk in sent.chunks:
                if not once[sent.source][chunk]:
                    raise PlanError(f"rank {sent.source} does not have chunk {chunk} yet", where=where)
                place = sent.target, chunk
                if place in copied or (place in reduced and not sent.reduces):
                    raise PlanError(f"chunk {chunk} of rank {sent.target} is written twice in this step", where=where)
                (reduced if sent.reduces else copied).add(place)
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


def execute(plan: CollectivePlan, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Run a plan on arrays, as its ranks would.

    Args:
        plan: A verified plan.
        inputs: Chunks of each rank at the start, concatenated: ``[L_r]``. This is the whole vector for an all-reduce or
            a reduce-scatter, the rank's share for an all-gather, its blocks in order of targets for an all-to-all, and
            the root's message for a broadcast (arrays of other ranks are not read). A vector is cut in proportion to
            the sizes of the chunks.

    Returns:
        Chunks of each rank at the end, concatenated. Reductions add in the order of the plan.

    Raises:
        ValueError: If there is not one flat array for each rank, or arrays that are to be added differ in length.
    """
    if len(inputs) != plan.ranks:
        raise ValueError(f"{len(inputs)} inputs for {plan.ranks} ranks")
    state: list[dict[int, NDArray[Any]]] = []
    for rank, values in enumerate(inputs):
        if np.ndim(values) != 1:
            raise ValueError(f"input of rank {rank} must be flat, got shape {np.shape(values)}")
        held = plan.held_at_start(rank)
        ends = np.cumsum([plan.chunks[chunk].size for chunk in held], dtype=object)
        cuts = [int(end * len(values) // ends[-1]) for end in ends[:-1]]
        state.append(dict(zip(held, np.split(values, cuts) if held else [], strict=True)))
    common = [i for i, chunk in enumerate(plan.chunks) if chunk.origin is None]
    for rank in range(plan.ranks):
        for chunk in common:
            if state[rank][chunk].shape != state[0][chunk].shape:
                raise ValueError(f"inputs of ranks 0 and {rank} differ in length; what is added must be of one length")
    for step in plan.steps:
        arriving = [(sent, [state[sent.source][chunk] for chunk in sent.chunks]) for sent in step]
        for sent, carried in arriving:
            own = state[sent.target]
            for chunk, value in zip(sent.chunks, carried, strict=True):
                own[chunk] = own[chunk] + value if sent.reduces else value
    nothing = np.empty(0, np.asarray(inputs[0]).dtype)
    return [np.concatenate([nothing, *(state[r][c] for c in plan.held_at_end(r))]) for r in range(plan.ranks)]
