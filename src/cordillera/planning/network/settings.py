"""What settings of the network make of a link: windows, losses, hashing, copies.

Each setting is a factor on the rate that a pair of devices gets, by a formula with its source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal

import numpy as np

MTU = 4096  # bytes of a packet
SWITCH_BUFFER = 64e6  # bytes that a deep-buffered switch holds for one port

Balance = Literal["ecmp", "enhanced", "spray"]
Recovery = Literal["go-back-n", "selective"]


@dataclass(frozen=True)
class NetworkSettings:
    """How devices send over one level of the cluster.

    Attributes:
        queue_pairs: Connections of a pair of devices.
        messages: In flight on each connection.
        message_bytes: Of a message.
        balance: ``ecmp`` hashes a pair of devices onto one of the parallel networks, ``enhanced`` each of its
            connections, ``spray`` each packet.
        recovery: What is sent again after a loss: all that followed (``go-back-n``) or the packet (``selective``).
        collectives: Over the domains of the level: a ``ring``, or the ``cheapest`` of a ring, halving and doubling
            (Thakur et al. 2005) and sending to all at once: as many bytes in fewer steps.
        classes: Where messages of a pipeline meet the reduction of gradients on a link, which of them send: both, as
            ``equals``, or ``messages`` first.
        zero_copy: Whether network cards read and write the tensors themselves; otherwise kernels copy, and take
            processors from what is computed.
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
        """Part of a device's processors that copies while something is sent or received, and computes less for it.

        Source: Calculon's description of A100 systems, ``processor_usage`` of the network.
        """
        return 0.0 if self.zero_copy else 0.02

    @property
    def window(self) -> float:
        """Bytes in flight between a pair of devices."""
        return self.queue_pairs * self.messages * self.message_bytes

    def rate(self, bytes_per_s: float, latency: float, loss: float = 0.0, planes: int = 1) -> float:
        """What a pair of devices gets of its share of a link.

        The window over the round trip, the recovery from losses, and the fullest of the parallel networks.

        Args:
            bytes_per_s: The share.
            latency: One-way, seconds.
            loss: Part of the packets that is lost.
            planes: Parallel networks.
        """
        round_trip = 2.0 * latency
        rate = min(bytes_per_s, self.window / round_trip) if round_trip > 0 else bytes_per_s
        rate *= recovered(loss, rate * round_trip / MTU, self.recovery)
        if self.balance != "spray":
            rate /= fullest(self.queue_pairs if self.balance == "enhanced" else 1, planes)
        return rate

    def queued(self, bytes_per_s: float, latency: float) -> float:
        """Bytes of a pair's window that wait in a switch: what is beyond bandwidth times round trip.

        Args:
            bytes_per_s: The pair's share.
            latency: One-way, seconds.
        """
        return max(0.0, self.window - 2.0 * latency * bytes_per_s)


def recovered(loss: float, window_packets: float, recovery: Recovery) -> float:
    """Part of the rate that is left where packets are lost.

    ``(1 - p) / (1 - p + p W)`` for go-back-N, ``1 - p`` for selective repeat; the classical efficiencies (Bertsekas and
    Gallager 1992, section 2.4).

    Args:
        loss: ``p``.
        window_packets: ``W``, in flight.
        recovery: Which.
    """
    if recovery == "selective":
        return 1.0 - loss
    return (1.0 - loss) / (1.0 - loss + loss * max(window_packets, 1.0))


@lru_cache(maxsize=256)
def fullest(flows: int, bins: int, pairs: int = 2048, draws: int = 20) -> float:
    """Load of the fullest of some bins over their mean, when hashed flows of many pairs fall into them.

    Args:
        flows: Of a pair.
        bins: Parallel networks.
        pairs: That send at the same time.
        draws: Of a seeded simulation; the mean over them is returned.
    """
    if bins == 1:
        return 1.0
    chosen = np.random.default_rng(0).integers(bins, size=(draws, flows * pairs))
    loads = np.stack([np.bincount(row, minlength=bins) for row in chosen])
    return float((loads.max(1) * bins / (flows * pairs)).mean())


def tuned(bytes_per_s: float, latency: float, loss: float = 0.0, planes: int = 1) -> NetworkSettings:
    """The settings with the highest rate; of those alike, the ones with the smallest window.

    Windows whose excess over bandwidth times round trip no switch buffer could hold are left out.

    Args:
        bytes_per_s: A pair's share of the link.
        latency: One-way, seconds.
        loss: Part of the packets that is lost.
        planes: Parallel networks.
    """
    best = NetworkSettings(
        balance="spray", recovery="selective", collectives="cheapest", classes="messages", zero_copy=True
    )
    options = [
        replace(best, queue_pairs=pairs, messages=messages)
        for pairs, messages in product((1, 2, 4, 8, 16, 32), (4, 6, 16, 64, 128, 256))
    ]
    fit = [one for one in options if one.queued(bytes_per_s, latency) <= SWITCH_BUFFER] or [best]
    return max(fit, key=lambda one: (one.rate(bytes_per_s, latency, loss, planes), -one.window))
