"""All-gathers as plans: around a ring, by doubling, and direct.

:func:`~cordillera.planning.network.collective_plans.scattered` and
:func:`~cordillera.planning.network.collective_plans.all_reduced` make reduce-scatters and all-reduces of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cordillera.planning.network.collective_plans import Chunk, CollectivePlan, PlanStep, Transfer


def plan_steps(steps: Iterable[Iterable[Transfer]]) -> tuple[PlanStep, ...]:
    """Return the steps that have transfers."""
    return tuple(step for step in map(tuple, steps) if step)


def one_chunk_each(n: int) -> tuple[Chunk, ...]:
    """Return one chunk that originates at each of ``n`` ranks; raise ValueError for fewer than 1."""
    if n < 1:
        raise ValueError(f"n is {n}; a collective needs at least 1 rank")
    return tuple(Chunk(1, rank, None) for rank in range(n))


def ring_all_gather(n: int, *, order: Sequence[int] | None = None, bidirectional: bool = False) -> CollectivePlan:
    """Make an all-gather around a ring; rank ``r`` starts with chunk ``r``.

    Args:
        n: Number of ranks.
        order: Ranks in the order of the ring. Default: 0 to n - 1.
        bidirectional: Whether half of the chunks travel in the other direction at the same time, which takes
            ``ceil((n - 1) / 2)`` steps instead of ``n - 1``.

    Raises:
        ValueError: If ``n`` is below 1 or ``order`` is not an order of the ranks.
    """
    chunks = one_chunk_each(n)
    ring = list(range(n)) if order is None else list(order)
    if sorted(ring) != list(range(n)):
        raise ValueError(f"order must name each of the {n} ranks once, got {ring}")
    forward = n // 2 if bidirectional else n - 1
    backward = (n - 1) // 2 if bidirectional else 0

    def step(s: int) -> Iterator[Transfer]:
        for p, rank in enumerate(ring):
            yield Transfer(rank, ring[(p + 1) % n], (ring[(p - s) % n],), False)
        if s < backward:
            for p, rank in enumerate(ring):
                yield Transfer(rank, ring[(p - 1) % n], (ring[(p + s) % n],), False)

    algorithm = "bidirectional-ring" if bidirectional else "ring"
    return CollectivePlan("all-gather", algorithm, n, chunks, plan_steps(step(s) for s in range(forward)))


def doubling_all_gather(n: int) -> CollectivePlan:
    """Make an all-gather in ``ceil(log2 n)`` steps; each step doubles the chunks of a rank.

    Rank ``r`` starts with chunk ``r``. If ``n`` is a power of two, ranks exchange with the rank whose number differs in
    one bit, distant ranks first, while messages are small (Thakur et al. 2005). Otherwise each rank sends around the
    circle over distances 1, 2, 4, ..., and in the last step only the missing chunks (Bruck et al. 1997), which moves as
    few bytes for any ``n``.

    Raises:
        ValueError: If ``n``, the number of ranks, is below 1.
    """
    chunks = one_chunk_each(n)
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
            sent = range(min(distance, n - distance))
            steps.append(
                tuple(
                    Transfer(rank, (rank - distance) % n, tuple((rank + i) % n for i in sent), False)
                    for rank in range(n)
                )
            )
            distance *= 2
    return CollectivePlan("all-gather", "halving-doubling", n, chunks, tuple(steps))


def direct_all_gather(n: int) -> CollectivePlan:
    """Make an all-gather in one step, from every rank to every other; rank ``r`` starts with chunk ``r``.

    Raises:
        ValueError: If ``n``, the number of ranks, is below 1.
    """
    step = (Transfer(a, (a + s) % n, (a,), False) for s in range(1, n) for a in range(n))
    return CollectivePlan("all-gather", "direct", n, one_chunk_each(n), plan_steps([step]))


def hierarchical_all_gather(n: int, group: int) -> CollectivePlan:
    """Make an all-gather in two steps: between groups of consecutive ranks, such as hosts, then within groups.

    In the first step a rank sends its chunk to the rank at the same place in each other group, in the second it sends
    all received chunks to the others of its group. Each chunk passes between two groups only once. Rank ``r`` starts
    with chunk ``r``.

    Args:
        n: Number of ranks.
        group: Ranks of a group.

    Raises:
        ValueError: If ``n`` is below 1 or cannot be divided into groups.
    """
    chunks = one_chunk_each(n)
    if group < 1 or n % group:
        raise ValueError(f"{n} ranks cannot be divided into groups of {group}")
    across = (Transfer(a, (a + s) % n, (a,), False) for s in range(group, n, group) for a in range(n))
    within = (
        Transfer(a, a - a % group + (a + s) % group, tuple(range(a % group, n, group)), False)
        for s in range(1, group)
        for a in range(n)
    )
    return CollectivePlan("all-gather", f"hierarchical-{group}", n, chunks, plan_steps([across, within]))
