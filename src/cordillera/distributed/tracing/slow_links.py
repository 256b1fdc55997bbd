"""Connections on which data takes far longer than on others that do the same.

The time of an operation after its last member came is the shortest wait of its members, of each on its own clock. It is
compared with that of the same operation in other communicators of the description, and the time to send a message with
that of the other messages of the operation.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from cordillera.distributed.tracing.rank_trace import Collective
from cordillera.distributed.tracing.snapshot import CommunicatorView, Snapshot

FACTOR = 3.0
"""Least time on a slow connection, as a multiple of the time on the others."""

FEWEST = 4
"""Least number of compared operations of a connection."""

_SIBLINGS = 3  # least number of communicators, or connections, to compare
_LEAST_NS = 1_000.0


@dataclass(frozen=True)
class SlowLink:
    """Connection, or all connections of a communicator, on which data takes long.

    Attributes:
        communicator: Number of the communicator.
        ranks: Sender and receiver; empty if the traces do not show which members.
        factor: Median time in that of the others.
        operations: Number of operations that were compared.
    """

    communicator: int
    ranks: tuple[int, ...]
    factor: float
    operations: int


def find_slow_links(snapshot: Snapshot) -> list[SlowLink]:
    """Return the slow connections, slowest first.

    Args:
        snapshot: The traces.
    """
    times: dict[tuple[object, ...], dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, view in enumerate(snapshot.views):
        for key, place, time in _transfers(number, view):
            times[key][place].append(max(time, _LEAST_NS))
    ratios: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for places in times.values():
        if len(places) >= _SIBLINGS:
            usual = statistics.median(map(statistics.median, places.values()))
            for place, own in places.items():
                ratios[place] += [time / usual for time in own]
    located = [link for number, view in enumerate(snapshot.views) if (link := _located(number, view)) is not None]
    known = {link.communicator for link in located}
    for place, own in ratios.items():
        factor = statistics.median(own)
        if len(own) >= FEWEST and factor >= FACTOR and (place[1:] or place[0] not in known):
            located.append(SlowLink(place[0], place[1:], factor, len(own)))
    return sorted(located, key=lambda one: (-one.factor, one.communicator))


def _transfers(number: int, view: CommunicatorView) -> Iterator[tuple[tuple[object, ...], tuple[int, ...], float]]:
    """Yield the key of comparable transfers, the place (communicator, or with sender and receiver), and the time."""
    description, count = view.communicator.description, len(view.members)
    for records in view.collectives.values():
        waits = [one.ended_ns - one.enqueued_ns for one in records.values() if one.ended_ns is not None]
        if len(waits) == count > 1:
            one = next(iter(records.values()))
            size = one.input_sizes if not one.input_splits else ()
            yield (description, count, one.op, size), (number,), float(min(waits))
    for (sender, receiver, receives), sends in view.messages.items():
        if receives:
            continue
        arrivals = {one.channel: one for one in view.messages.get((sender, receiver, True), [])}
        for one in sends:
            other = arrivals.get(one.channel) if one.channel is not None else None
            if other is not None and one.ended_ns is not None and other.ended_ns is not None:
                time = min(one.ended_ns - one.enqueued_ns, other.ended_ns - other.enqueued_ns)
                yield (description, "message", one.input_sizes), (number, sender, receiver), float(time)


def _located(number: int, view: CommunicatorView) -> SlowLink | None:
    """Return the pair of members whose messages take far longer than those of all other pairs, or None."""
    ratios: dict[tuple[int, int], list[float]] = defaultdict(list)
    for records in view.collectives.values():
        times = dict(_messages(records))
        if len(times) > 1:
            usual = max(statistics.median_low(times.values()), _LEAST_NS)
            for pair, time in times.items():
                ratios[pair].append(time / usual)
    factors = {pair: statistics.median(own) for pair, own in ratios.items() if len(own) >= FEWEST}
    slow = [pair for pair, factor in factors.items() if factor >= FACTOR]
    return SlowLink(number, slow[0], factors[slow[0]], len(ratios[slow[0]])) if len(slow) == 1 else None


def _messages(records: dict[int, Collective]) -> Iterator[tuple[tuple[int, int], float]]:
    for rank, record in records.items():
        for peer in record.peers:
            if peer.put_ns and peer.finished:
                yield (rank, peer.peer), peer.put_ns / peer.finished
