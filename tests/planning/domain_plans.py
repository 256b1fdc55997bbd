"""Plans and networks of domains whose ranks share an uplink: an oracle for costs that are summed level by level."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cordillera.planning.network.collective_algorithms import plan_steps, ring_all_gather
from cordillera.planning.network.collective_plans import Chunk, CollectivePlan, PlanStep, Transfer, all_reduced
from tests.planning.flows import FlowLink


@dataclass(frozen=True)
class DomainNetwork:
    """Domains, such as buildings: each rank sends at ``inner.rate``, uplinks carry ``cross.rate`` for each rank."""

    sizes: tuple[int, ...]
    inner: FlowLink
    cross: FlowLink | None = None

    @cached_property
    def capacities(self) -> NDArray[np.float64]:
        cards = [self.inner.rate] * (2 * sum(self.sizes))
        uplinks = [size * (self.cross or self.inner).rate for size in self.sizes]
        return np.array([*cards, *uplinks, *uplinks], dtype=np.float64)

    @cached_property
    def _domain(self) -> list[int]:
        return [k for k, size in enumerate(self.sizes) for _ in range(size)]

    def route(self, source: int, target: int) -> tuple[tuple[int, ...], float]:
        ranks, domains = len(self._domain), len(self.sizes)
        cards = source, ranks + target
        home, away = self._domain[source], self._domain[target]
        if home == away:
            return cards, self.inner.latency
        assert self.cross is not None
        return (*cards, 2 * ranks + home, 2 * ranks + domains + away), self.cross.latency


def hierarchical_all_reduce(
    sizes: Sequence[int], gather: Callable[[int], CollectivePlan] = ring_all_gather
) -> CollectivePlan:
    """A reduce-scatter inside every domain, an all-reduce across, an all-gather inside.

    The data is cut wherever the shares of any domain meet, so that each piece has one owner in each domain.
    """
    return all_reduced(hierarchical_all_gather(sizes, gather))


def hierarchical_all_gather(sizes: Sequence[int], gather: Callable[[int], CollectivePlan]) -> CollectivePlan:
    """An all-gather across, then inside domains, in which each domain owns an equal part of every piece."""
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
