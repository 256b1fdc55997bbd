"""Queues of an emulated switch where many ranks send to one: whole messages, and fragments with windows."""

from __future__ import annotations

from typing import Any

import torch
from _tables import print_rows
from rich.console import Console

from cordillera.distributed.transport.emulation import EmulatedGroup, EmulatedSwitch
from cordillera.distributed.transport.exchanges import FragmentLimits
from cordillera.distributed.transport.operations import Offer, Take, TransportOperation
from cordillera.distributed.transport.signatures import signed

SENDERS, MEBIBYTES, LATENCIES_S = (7, 31), (16, 64), (5e-6, 5e-5, 5e-4)
WHOLE = FragmentLimits(fragment_bytes=1 << 40, of_transfer=1)
ASKED = {"queue": 10.0, "throughput": 0.97}


def _sent(senders: int, size: int, limits: FragmentLimits, latency_s: float) -> dict[str, float]:
    """Send a tensor of some bytes from each sender to rank 0."""
    switch = EmulatedSwitch(latency_s=latency_s, packet_bytes=64 << 10)
    group = EmulatedGroup(senders + 1, switch, limits=limits)
    got = [torch.zeros(size, dtype=torch.uint8) for _ in range(senders)]
    given = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    for rank in range(1, senders + 1):
        group.post(rank, TransportOperation("gather", signed("gather"), [Offer(peer=0, views=[given])]))
    takes = [Take(peer=rank + 1, views=[one]) for rank, one in enumerate(got)]
    group.post(0, TransportOperation("gather", signed("gather"), takes))  # type: ignore[arg-type]
    group.run()
    if not all(torch.equal(one, given) for one in got):
        raise AssertionError("other bytes came than were sent")
    return {
        "seconds": group.now_s,
        "throughput": senders * size / group.now_s / switch.bytes_per_s,
        "queue": group.peak_queue_bytes,
        "in_flight": group.progress[0].exchanges.counters.peak_in_flight_bytes,
    }


def queues(console: Console, quick: bool) -> dict[str, Any]:
    """Count the bytes that wait in a switch."""
    rows = []
    for senders in (3,) if quick else SENDERS:
        for mebibytes in (4,) if quick else MEBIBYTES:
            for latency_s in LATENCIES_S[:1] if quick else LATENCIES_S:
                whole = _sent(senders, mebibytes << 20, WHOLE, latency_s)
                ours = _sent(senders, mebibytes << 20, FragmentLimits(), latency_s)
                row: dict[str, Any] = {"senders": senders, "mebibytes": mebibytes, "latency_s": latency_s}
                row |= {"whole": whole, "fragments": ours, "shorter": whole["queue"] / ours["queue"]}
                row["throughput"] = ours["throughput"] / whole["throughput"]
                rows.append(row)
    print_rows(
        console,
        "several ranks send to one",
        ["senders", "message", "latency", "longest queue: whole", "fragments", "times shorter", "throughput"],
        [
            [
                str(row["senders"]),
                f"{row['mebibytes']} MiB",
                f"{row['latency_s'] * 1e6:g} us",
                *(f"{row[name]['queue'] / 2**20:.1f} MiB" for name in ("whole", "fragments")),
                f"{row['shorter']:.1f}",
                f"{row['throughput']:.3f}",
            ]
            for row in rows
        ],
        "emulated",
    )
    limits, switch = FragmentLimits(), EmulatedSwitch()
    return {
        "evidence": "emulated switch, real state machines and bytes",
        "rows": rows,
        "limits": vars(limits),
        "bytes_per_s": switch.bytes_per_s,
        "targets": ASKED,
        "notes": ["every rank has one link; throughput is that of fragments divided by that of whole messages"],
    }
