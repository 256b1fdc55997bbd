"""What communication cost: bytes, messages, time, and the part of the time in which computation stood still."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Sums over calls.

    Attributes:
        calls: How many.
        bytes: That this rank had to send: of an all-gather its part to each of the others, of a reduce-scatter each
            other's part to it.
        messages: That it had to send.
        seconds: From the start of each call to the end of the wait for it, on the host.
        exposed_seconds: That the host waited. On CUDA the host does not wait, and this is nearly nothing.
        bytes_across_hosts: Of ``bytes``, those to a rank on another host, where hosts are known.
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
    """Traffic of one rank by the name of what was communicated."""

    def __init__(self) -> None:
        self.traffic: dict[str, Traffic] = {}

    def record(self, name: str, traffic: Traffic) -> None:
        """Add calls.

        Args:
            name: Of what was communicated.
            traffic: What it cost.
        """
        self.traffic[name] = self.traffic.get(name, Traffic()) + traffic

    def total(self) -> Traffic:
        """Of everything."""
        return sum(self.traffic.values(), Traffic())

    def clear(self) -> None:
        """Begin anew."""
        self.traffic.clear()

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {one.calls} calls, {one.messages} messages, {one.bytes} bytes, "
            f"{one.seconds:.3f} s of which {one.exposed_seconds:.3f} s exposed"
            for name, one in self.traffic.items()
        )
