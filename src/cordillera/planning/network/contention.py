"""How transfers that run at the same time slow each other on the links that both use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cordillera.planning.network.mesh import SharedLink


def fair_rates(capacity: float, counts: tuple[int, int], limits: tuple[float, float]) -> tuple[float, float]:
    """Return the max-min fair rates of one transfer of each of two kinds on a link, bytes/s.

    Args:
        capacity: Capacity of the link, bytes/s.
        counts: Number of transfers of each kind.
        limits: Highest rate of a transfer of each kind, bytes/s.
    """
    (many, others), (one, other) = counts, limits
    fair = capacity / (many + others)
    if one <= fair:
        return one, min(other, (capacity - many * one) / others)
    if other <= fair:
        return min(one, (capacity - others * other) / many), other
    return fair, fair


class Slowdown(NamedTuple):
    """Effect of two kinds of transfers on each other while both run.

    Attributes:
        slowed: Factor by which the transfer takes longer.
        lost: Part of its rate that the other one loses meanwhile.
    """

    slowed: float = 1.0
    lost: float = 0.0

    @classmethod
    def on(
        cls, links: Iterable[tuple[SharedLink, float]], rate: float, other: float, goes_first: bool = False
    ) -> Slowdown:
        """Return the effect on the links that both use; max-min fair, or with ``goes_first`` the other gets the rest.

        Args:
            links: Links with the attainable part of the capacity of each.
            rate: Rate of a pair of the transfer alone, bytes/s.
            other: Rate of a pair of the other one alone, bytes/s.
        """
        together, others = rate, other
        for link, part in links:
            capacity = link.bytes_per_s * part
            if goes_first:
                others = min(others, max(0.0, capacity - rate * link.messages) / link.rings)
            else:
                fair = fair_rates(capacity, (link.messages, link.rings), (rate, other))
                together, others = min(together, fair[0]), min(others, fair[1])
        return cls(rate / together, 1.0 - others / other) if others < other or together < rate else cls()


class Contention(NamedTuple):
    """An action whose own collectives share links with a transfer that runs beside it, such as a reduction.

    Attributes:
        longer: Part by which the action takes longer while the transfer runs.
        lost: Seconds by which the transfer is late, for each second of the action alone.
    """

    longer: float = 0.0
    lost: float = 0.0

    @classmethod
    def of(cls, seconds: float, collectives: Iterable[tuple[float, Slowdown]]) -> Contention:
        """Return the contention of an action that takes ``seconds`` alone.

        Args:
            seconds: Time of the action.
            collectives: Seconds of each of its collectives, which are spread evenly over the action, and how it and the
                transfer slow each other.
        """
        longer = lost = 0.0
        for part, (slowed, away) in collectives if seconds > 0 else ():
            longer += part / seconds * (slowed - 1.0)
            lost += part / seconds * slowed * away
        return cls(longer, lost)

    def beside(self, seconds: float, transfer: float) -> tuple[float, float]:
        """Return by how many seconds an action and the transfer beside it are later than alone.

        Both begin together. If the transfer ends first, the rest of the action is as fast as alone.

        Args:
            seconds: Time of the action alone.
            transfer: Time that is left of the transfer alone.
        """
        moved = 1.0 + self.longer - self.lost  # seconds of the transfer during one second of the action
        both = min(seconds, transfer / moved) if moved > 0.0 else seconds
        return both * self.longer, both * self.lost
