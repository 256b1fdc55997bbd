"""Cost of communication: bytes, messages, time, and the part of the time during which computation waited."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Sums over calls.

    Attributes:
        calls: Number of calls.
        bytes: Number of bytes that this rank sent: in an all-gather its part to each other rank, in a reduce-scatter
            the part of each other rank to that rank.
        messages: Number of messages that this rank sent.
        seconds: Time from the start of each call to the end of the wait for it, on the host.
        exposed_seconds: Time that the host waited. On CUDA the host does not wait, so this is almost zero.
        bytes_across_hosts: Part of ``bytes`` sent to ranks on other hosts, if hosts are known.
    """

    calls: int = 0
    bytes: int = 0
    messages: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    bytes_across_hosts: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.calls + other.calls,
            self.bytes + other.bytes,
            self.messages + other.messages,
            self.seconds + other.seconds,
            self.exposed_seconds + other.exposed_seconds,
            self.bytes_across_hosts + other.bytes_across_hosts,
        )


class Ledger:
    """Traffic of one rank, by the name of the exchanged data."""

    def __init__(self) -> None:
        self.traffic: dict[str, Traffic] = {}

    def record(self, name: str, traffic: Traffic) -> None:
        """Add the ``traffic`` of calls that exchanged the data ``name``."""
        self.traffic[name] = self.traffic.get(name, Traffic()) + traffic

    def total(self) -> Traffic:
        """Return the sum of all traffic."""
        return sum(self.traffic.values(), Traffic())

    def clear(self) -> None:
        """Remove all traffic."""
        self.traffic.clear()

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {one.calls} calls, {one.messages} messages, {one.bytes} bytes, "
            f"{one.seconds:.3f} s of which {one.exposed_seconds:.3f} s exposed"
            for name, one in self.traffic.items()
        )
