"""Collective plans synthesised for a given network."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from cordillera.errors import PlanError
from cordillera.planning.network.collective_algorithms import one_chunk_each, plan_steps
from cordillera.planning.network.collective_plans import CollectivePlan, Transfer, scattered
from cordillera.planning.network.flows import FlowLink


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
    _check_links(links, n, chunk_bytes)
    plan, arrivals = _match(links, n, chunk_bytes)
    for target, arrived in enumerate(arrivals):
        for origin in sorted(set(range(n)) - set(arrived)):
            raise PlanError(
                f"rank {target} can never receive the chunk of rank {origin}: no way leads there",
                where="links",
                remedy="add a link, or plan for fewer ranks",
            )
    return plan, max(max(arrived.values()) for arrived in arrivals)


def synthesise_reduce_scatter(
    links: Mapping[tuple[int, int], FlowLink], n: int, chunk_bytes: float
) -> tuple[CollectivePlan, float]:
    """Make a reduce-scatter for a given network: the all-gather of the network with all links reversed, run backwards.

    Arguments ``links``, ``n`` and ``chunk_bytes``, result and errors are those of :func:`synthesise_all_gather`; errors
    name ranks of the reversed network.
    """
    turned = {(target, source): link for (source, target), link in links.items()}
    plan, seconds = synthesise_all_gather(turned, n, chunk_bytes)
    return scattered(plan), seconds


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


def _match(
    links: Mapping[tuple[int, int], FlowLink], n: int, chunk_bytes: float
) -> tuple[CollectivePlan, list[dict[int, float]]]:
    """Return the plan, and for each rank the seconds at which each chunk is there; chunks without a way are missing."""
    chunks = one_chunk_each(n)
    outgoing: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for pair in sorted(links):
        outgoing[pair[0]].append(pair)
    busy = {pair: chunk_bytes / link.rate for pair, link in links.items()}
    took = {pair: link.latency + busy[pair] for pair, link in links.items()}
    here = [{rank: 0.0} for rank in range(n)]
    level = [{rank: 0} for rank in range(n)]  # the first step in which a rank can send a chunk on
    copies = [1] * n
    next_step = dict.fromkeys(links, 0)
    free = dict.fromkeys(links, 0.0)
    idle: set[tuple[int, int]] = set()
    steps: list[dict[tuple[int, int], int]] = []
    # Ordered by arrival, so that earlier matches arrive earlier.
    queue = [(took[pair], pair, 0.0) for pair in sorted(links)]
    heapq.heapify(queue)
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
        chunks,
        plan_steps((Transfer(*pair, (chunk,), False) for pair, chunk in sorted(step.items())) for step in steps),
    )
    return plan, here
