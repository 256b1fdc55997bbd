"""Effects of network settings on a link: windows, losses, hashing, copies.

Each setting is a factor on the rate that a pair of devices gets, by a formula with its source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal

import numpy as np

from cordillera.topology import Level, Topology

MTU = 4096  # bytes per packet
SWITCH_BUFFER = 64e6  # bytes that a deep-buffered switch holds for one port
Balance = Literal["ecmp", "enhanced", "spray"]
Recovery = Literal["go-back-n", "selective"]


@dataclass(frozen=True)
class NetworkSettings:
    """How devices send over one level of the cluster.

    Attributes:
        queue_pairs: Number of connections of a pair of devices.
        messages: Number of messages in flight on each connection.
        message_bytes: Size of a message, bytes.
        balance: ``ecmp`` hashes a pair of devices onto one of the parallel networks, ``enhanced`` each of its
            connections, ``spray`` each packet.
        recovery: Packets retransmitted after a loss: the lost one and all that followed (``go-back-n``), or the lost
            one alone (``selective``).
        collectives: Algorithm over the domains of the level: a ``ring``, or the ``cheapest`` of a ring, halving and
            doubling (Thakur et al. 2005) and direct sending, which move as many bytes in fewer steps.
        classes: Sharing of a link between pipeline messages and gradient reduction: as ``equals``, or ``messages``
            first.
        zero_copy: Whether network cards read and write the tensors directly; otherwise kernels copy, and take
            processors from the computation.
    """

    queue_pairs: int = 4
    messages: int = 6
    message_bytes: float = 2.0**20
    balance: Balance = "ecmp"
    recovery: Recovery = "go-back-n"
    collectives: Literal["ring", "cheapest"] = "ring"
    classes: Literal["equals", "messages"] = "equals"
    zero_copy: bool = False

    @property
    def processors(self) -> float:
        """Part of a device's processors that copies take from the computation during communication.

        Source: Calculon's description of A100 systems, ``processor_usage`` of the network.
        """
        return 0.0 if self.zero_copy else 0.02

    @property
    def window(self) -> float:
        """Bytes in flight between a pair of devices."""
        return self.queue_pairs * self.messages * self.message_bytes

    def rate(self, bytes_per_s: float, latency: float, loss: float = 0.0, planes: int = 1) -> float:
        """Return the rate that a pair of devices attains of its share of a link, bytes/s.

        Limits are the window over the round trip, the recovery from losses, and the fullest of the parallel networks.

        Args:
            bytes_per_s: Share of the link, bytes/s.
            latency: One-way latency, seconds.
            loss: Fraction of the packets that is lost.
            planes: Number of parallel networks.
        """
        round_trip = 2.0 * latency
        rate = min(bytes_per_s, self.window / round_trip) if round_trip > 0 else bytes_per_s
        rate *= recovered(loss, rate * round_trip / MTU, self.recovery)
        if self.balance != "spray":
            rate /= fullest(self.queue_pairs if self.balance == "enhanced" else 1, planes)
        return rate

    def queued(self, bytes_per_s: float, latency: float) -> float:
        """Return the bytes of a pair's window that wait in a switch: those beyond bandwidth times round trip.

        The pair's share of the link is ``bytes_per_s``; the one-way ``latency`` is in seconds.
        """
        return max(0.0, self.window - 2.0 * latency * bytes_per_s)


_BEST = NetworkSettings(
    balance="spray", recovery="selective", collectives="cheapest", classes="messages", zero_copy=True
)


def possible(settings: NetworkSettings, level: Level) -> NetworkSettings:
    """Return ``settings`` with features that the links of a ``level`` lack replaced by supported ones.

    Without spraying each connection is hashed, without selective repeat recovery is by go-back-N, and without zero-copy
    kernels copy.
    """
    if level.spraying and level.selective_repeat and level.zero_copy:
        return settings
    return replace(
        settings,
        balance="enhanced" if settings.balance == "spray" and not level.spraying else settings.balance,
        recovery=settings.recovery if level.selective_repeat else "go-back-n",
        zero_copy=settings.zero_copy and level.zero_copy,
    )


def recovered(loss: float, window_packets: float, recovery: Recovery) -> float:
    """Return the fraction of the rate that remains under packet loss.

    With ``p = loss`` and ``W = window_packets`` in flight, it is ``(1 - p) / (1 - p + p W)`` for a ``recovery`` by
    go-back-N and ``1 - p`` for selective repeat, the classical efficiencies (Bertsekas and Gallager 1992, section 2.4).
    """
    if recovery == "selective":
        return 1.0 - loss
    return (1.0 - loss) / (1.0 - loss + loss * max(window_packets, 1.0))


@lru_cache(maxsize=256)
def fullest(flows: int, bins: int, pairs: int = 2048, draws: int = 20) -> float:
    """Return the load of the fullest bin divided by the mean, when hashed flows of many pairs fall into bins.

    Each of the ``pairs`` sends ``flows`` flows at the same time; the ``bins`` are parallel networks. The result is the
    mean over the ``draws`` of a seeded simulation.
    """
    if bins == 1:
        return 1.0
    chosen = np.random.default_rng(0).integers(bins, size=(draws, flows * pairs))
    loads = np.stack([np.bincount(row, minlength=bins) for row in chosen])
    return float((loads.max(1) * bins / (flows * pairs)).mean())


def tuned(
    bytes_per_s: float, latency: float, loss: float = 0.0, planes: int = 1, best: NetworkSettings = _BEST
) -> NetworkSettings:
    """Return the settings with the highest rate and, among equal ones, the smallest window.

    The arguments ``bytes_per_s``, ``latency``, ``loss`` and ``planes`` are those of :meth:`NetworkSettings.rate`;
    ``best`` is what the links can do, whose window is replaced. Windows whose excess over bandwidth times round trip
    exceeds a switch buffer are left out.
    """
    options = [
        replace(best, queue_pairs=pairs, messages=messages)
        for pairs, messages in product((1, 2, 4, 8, 16, 32), (4, 6, 16, 64, 128, 256))
    ]
    fit = [one for one in options if one.queued(bytes_per_s, latency) <= SWITCH_BUFFER] or [best]
    return max(fit, key=lambda one: (one.rate(bytes_per_s, latency, loss, planes), -one.window))


def production_network(topology: Topology) -> dict[str, NetworkSettings]:
    """Return the default settings of a communication library for every level: few connections, hashing, copies."""
    return {level.name: NetworkSettings() for level in topology.levels[1:]}


def tuned_network(topology: Topology) -> dict[str, NetworkSettings]:
    """Return the best settings of every level for its latency, losses, missing features and a device's bandwidth."""
    share = max(kind.nic_bytes_per_s for kind in topology.kinds)
    return {
        level.name: tuned(share, level.latency, level.loss_rate, level.planes, possible(_BEST, level))
        for level in topology.levels[1:]
    }
