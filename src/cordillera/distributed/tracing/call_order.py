"""The order in which ranks call operations of different communicators."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from cordillera.distributed.tracing.snapshot import Snapshot

_MAJORITY = 2  # how many times as many ranks have the usual order


class OperationKind(NamedTuple):
    """Operations of one place in the program, in all communicators of a description.

    Attributes:
        description: Description of the communicators.
        sequence: Number of the operation.
    """

    description: str
    sequence: int


def call_orders(snapshot: Snapshot, first: OperationKind, second: OperationKind) -> dict[int, bool]:
    """Return for each rank that called one of two operations whether it called ``first`` before ``second``.

    Args:
        snapshot: The traces.
        first: An operation.
        second: Another one.
    """
    calls: tuple[dict[int, int], dict[int, int]] = {}, {}
    for view in snapshot.views:
        for kind, times in zip((first, second), calls, strict=True):
            if view.communicator.description == kind.description:
                for rank, one in view.collectives.get(kind.sequence, {}).items():
                    times.setdefault(rank, one.enqueued_ns)
    never = float("inf")
    return {rank: calls[0].get(rank, never) < calls[1].get(rank, never) for rank in calls[0].keys() | calls[1].keys()}


def usual_order(orders: dict[int, bool]) -> bool | None:
    """Return the order that far more ranks have than the other one, or None.

    Args:
        orders: Orders of ranks, from :func:`call_orders`.
    """
    count = Counter(orders.values())
    usual = count[True] > count[False]
    return usual if count[usual] > _MAJORITY * count[not usual] else None
