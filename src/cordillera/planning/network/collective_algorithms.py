"""The usual algorithms of collectives as plans: rings, halving and doubling, trees, direct and hierarchical ones."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from cordillera.planning.network.collective_plans import (
    Chunk,
    CollectivePlan,
    PlanStep,
    Transfer,
    all_reduced,
    compose,
    reverse,
    scattered,
)


def check_ranks(n: int) -> None:
    """Refuse a collective of no rank."""
    if n < 1:
        raise ValueError(f"n is {n}; a collective needs at least 1 rank")


def plan_steps(steps: Iterable[Iterable[Transfer]]) -> tuple[PlanStep, ...]:
    """Return the steps that have transfers."""
    return tuple(step for step in map(tuple, steps) if step)


def _ring_order(n: int, order: Sequence[int] | None) -> list[int]:
    check_ranks(n)
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
    return CollectivePlan("all-gather", algorithm, n, one_chunk_each(n), plan_steps(step(s) for s in range(forward)))


def one_chunk_each(n: int) -> tuple[Chunk, ...]:
    """Return one chunk that originates at each of ``n`` ranks."""
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
    return scattered(ring_all_gather(n, order=ring[::-1], bidirectional=bidirectional))


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
    check_ranks(n)
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
    return CollectivePlan("all-gather", "halving-doubling", n, one_chunk_each(n), tuple(steps))


def halving_reduce_scatter(n: int) -> CollectivePlan:
    """Make a reduce-scatter as :func:`doubling_all_gather` run backwards; rank ``r`` ends with chunk ``r``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    return scattered(doubling_all_gather(n))


def halving_doubling_all_reduce(n: int) -> CollectivePlan:
    """Make an all-reduce in ``2 ceil(log2 n)`` steps that moves no more bytes than a ring, for any ``n``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    return all_reduced(doubling_all_gather(n))


def _check_root(n: int, root: int, chunks: int) -> None:
    check_ranks(n)
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
    return CollectivePlan("broadcast", "tree", n, (Chunk(1, root, None),), plan_steps(map(step, distances)))


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
    return CollectivePlan("broadcast", "chain", n, parts, plan_steps(step(s) for s in range(n - 2 + chunks)))


def direct_all_gather(n: int) -> CollectivePlan:
    """Make an all-gather in one step, from every rank to every other; rank ``r`` starts with chunk ``r``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    check_ranks(n)
    step = (Transfer(a, (a + s) % n, (a,), False) for s in range(1, n) for a in range(n))
    return CollectivePlan("all-gather", "direct", n, one_chunk_each(n), plan_steps([step]))


def direct_reduce_scatter(n: int) -> CollectivePlan:
    """Make a reduce-scatter in one step, from every rank to every other; rank ``r`` ends with chunk ``r``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    return scattered(direct_all_gather(n))


def direct_all_reduce(n: int) -> CollectivePlan:
    """Make an all-reduce in two steps in which every rank sends to every other.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    return all_reduced(direct_all_gather(n))


def _all_to_all(n: int, algorithm: str, steps: Iterable[Iterable[Transfer]]) -> CollectivePlan:
    chunks = tuple(Chunk(1, source, target) for source in range(n) for target in range(n))
    return CollectivePlan("all-to-all", algorithm, n, chunks, plan_steps(steps))


def direct_all_to_all(n: int) -> CollectivePlan:
    """Make an all-to-all in one step; chunk ``a * n + b`` goes from rank ``a`` to rank ``b``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    check_ranks(n)
    step = (_block(n, a, (a + s) % n) for s in range(1, n) for a in range(n))
    return _all_to_all(n, "direct", [step])


def pairwise_all_to_all(n: int) -> CollectivePlan:
    """Make an all-to-all in ``n - 1`` steps: in step ``s`` rank ``r`` sends to rank ``(r + s) % n``.

    Args:
        n: Number of ranks.

    Raises:
        ValueError: If ``n`` is below 1.
    """
    check_ranks(n)
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
    return all_reduced(_hierarchical(sizes, gather))


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
    return scattered(_hierarchical(sizes, gather))


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
    steps = plan_steps([*map(across, cross.steps), *(within(s) for s in range(max(map(len, inside))))])
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
    return CollectivePlan("broadcast", "hierarchical", sum(sizes), (Chunk(1, 0, None),), plan_steps([*across, *inside]))
