"""How ranks find each other, around a ring or at one rank that hears from all and tells all, and what a group holds."""

from __future__ import annotations

import gc
import json
import os
import selectors
import socket
import statistics
import time
from collections import defaultdict, deque
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _processes import slowest_seconds
from _tables import print_rows
from rich.console import Console

from cordillera.distributed.transport.bootstrap import AddressRing
from cordillera.distributed.transport.frames import Connection, FrameKind, TransportFrame
from cordillera.distributed.transport.process_group import BACKEND, register
from cordillera.distributed.transport.signatures import Signature

RANKS, ROUNDS = (64, 128, 256, 512, 1024, 2048), 2
ASKED = {"ring": 1.1, "star": 1.6, "held": 0.42}  # exponents at most and at least; share of memory at most
GROUPS, USED, PROCESSES = 12, 4, 4
REPEATED = 20  # as many groups are made, as the memory of one is small beside what else changes
_ADDRESS = json.dumps({"boot": "0" * 36, "host": "127.0.0.1", "port": 65535, "local": "cordillera-" + "0" * 32})


class _Member:
    """A rank as a coroutine of this process, over loopback, and when it would do what on a processor of its own.

    Attributes:
        clock_s: That time: what a rank sends comes to another one at the time at which it is sent.
        busy_s: Time that it has computed.
        sent_bytes: Bytes that it has sent.
        connections: Connections that it has.
    """

    def __init__(self) -> None:
        self.clock_s = self.busy_s = self._since_s = 0.0
        self.sent_bytes = self.connections = 0

    def wake(self, not_before_s: float = 0.0) -> None:
        """Begin to count."""
        self.clock_s, self._since_s = max(self.clock_s, not_before_s), time.perf_counter()

    def tick(self) -> float:
        """Count what was done; return the time."""
        now = time.perf_counter()
        self.clock_s += now - self._since_s
        self.busy_s += now - self._since_s
        self._since_s = now
        return self.clock_s


class _Loopback:
    """Ranks and their connections; ``run`` lets them receive what has come until all are done."""

    def __init__(self, size: int, stack: ExitStack) -> None:
        self.members = [_Member() for _ in range(size)]
        self.sent_s: defaultdict[tuple[int, int], deque[float]] = defaultdict(deque)  # when frames had left
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self._stack, self._full = stack, set[Connection]()

    def call(self, caller: int, listener: socket.socket, called: int) -> Connection:
        """Let a rank connect to another one."""
        self.members[caller].wake()
        connected = self._stack.enter_context(socket.create_connection(listener.getsockname()))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.members[caller].connections += 1
        self.members[caller].tick()
        return Connection(called, connected)

    def accept(self, caller: int, listener: socket.socket, called: int) -> Connection:
        """Let a rank accept who has called."""
        self.members[called].wake(self.members[caller].clock_s)
        came = self._stack.enter_context(listener.accept()[0])
        self.members[called].connections += 1
        self.members[called].tick()
        return Connection(caller, came)

    def listener(self) -> socket.socket:
        return self._stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=8))

    def send(self, rank: int, connection: Connection, frame: TransportFrame, data: memoryview) -> None:
        """Send a frame; the rest of it leaves when the socket takes more."""
        connection.send(frame, data)
        self.members[rank].sent_bytes += data.nbytes
        self._left(rank, connection)

    def _left(self, rank: int, connection: Connection) -> None:
        now_s = self.members[rank].tick()
        if not connection.has_outgoing:
            self.sent_s[rank, connection.peer].append(now_s)
            if connection in self._full:
                self._full.remove(connection)
                self.selector.unregister(connection.socket)
        elif connection not in self._full:
            self._full.add(connection)
            self.selector.register(connection.socket, selectors.EVENT_WRITE, (rank, connection, None))

    def run(self, handlers: dict[int, Any]) -> float:
        """Return the time at which the last rank has all addresses."""
        while not all(handler.is_complete for handler in handlers.values()):
            for key, _ in self.selector.select(10):
                rank, connection, handler = key.data
                self.members[rank].wake()
                if handler is None:
                    connection.flush()
                    self._left(rank, connection)
                else:
                    connection.receive(handler)
                    self.members[rank].tick()
        return max(member.clock_s for member in self.members)


class _Counted:
    """Gives the frames of a connection to a handler, and counts the time from when they came."""

    def __init__(self, net: _Loopback, rank: int, handler: Any) -> None:
        self._net, self._rank, self._handler = net, rank, handler

    def place(self, peer: int, frame: TransportFrame) -> memoryview:
        return self._handler.place(peer, frame)  # type: ignore[no-any-return]

    def arrived(self, peer: int, frame: TransportFrame, data: memoryview) -> None:
        member = self._net.members[self._rank]
        member.clock_s = max(member.clock_s, self._net.sent_s[peer, self._rank].popleft())
        member.tick()
        self._handler.arrived(peer, frame, data)
        member.tick()


class _StarMember:
    """A rank that knows all addresses once the root has told them; the root is rank 0."""

    def __init__(self, net: _Loopback, rank: int, links: dict[int, Connection]) -> None:
        self._net, self._rank, self._links = net, rank, links
        self.addresses = {rank: _ADDRESS}

    @property
    def is_complete(self) -> bool:
        return len(self.addresses) == len(self._net.members)

    def place(self, peer: int, frame: TransportFrame) -> memoryview:
        return memoryview(bytearray(frame.length))

    def arrived(self, peer: int, frame: TransportFrame, data: memoryview) -> None:
        if self._rank:
            self.addresses = dict(enumerate(json.loads(bytes(data))))
            return
        self.addresses[peer] = bytes(data).decode()
        if self.is_complete:
            told = memoryview(json.dumps([self.addresses[rank] for rank in range(len(self.addresses))]).encode())
            for link in self._links.values():
                self._net.send(0, link, _frame(0, told.nbytes), told)


def _frame(rank: int, length: int) -> TransportFrame:
    return TransportFrame(FrameKind.ADDRESS, Signature(0, 0, 0), 0, rank, 0, length)


def _ring(size: int) -> dict[str, float]:
    with ExitStack() as stack:
        net = _Loopback(size, stack)
        listeners = [net.listener() for _ in range(size)]
        following = [net.call(rank, listeners[(rank + 1) % size], (rank + 1) % size) for rank in range(size)]
        rings = {
            rank: AddressRing(rank, size, _ADDRESS, partial(net.send, rank, following[rank])) for rank in range(size)
        }
        for rank, ring in rings.items():
            came = net.accept(ring.previous, listeners[rank], rank)
            net.selector.register(came.socket, selectors.EVENT_READ, (rank, came, _Counted(net, rank, ring)))
        for rank, ring in rings.items():
            net.members[rank].wake()
            ring.begin()
        return _found(net, net.run(rings))


def _star(size: int) -> dict[str, float]:
    with ExitStack() as stack:
        net, links = _Loopback(size, stack), {}
        listener, data = net.listener(), memoryview(_ADDRESS.encode())
        stars = {rank: _StarMember(net, rank, links) for rank in range(size)}
        for rank in range(1, size):
            out = net.call(rank, listener, 0)
            net.selector.register(out.socket, selectors.EVENT_READ, (rank, out, _Counted(net, rank, stars[rank])))
            net.send(rank, out, _frame(rank, data.nbytes), data)
            links[rank] = net.accept(rank, listener, 0)
        for link in links.values():
            net.members[0].wake()
            link.receive(_Counted(net, 0, stars[0]))
        return _found(net, net.run(stars))


def _found(net: _Loopback, seconds: float) -> dict[str, float]:
    return {
        "seconds": seconds,
        "busiest_s": max(member.busy_s for member in net.members),
        "busiest_bytes": max(member.sent_bytes for member in net.members),
        "connections": max(member.connections for member in net.members),
    }


def _exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def _held(rank: int, folder: str, backend: str, repeated: int) -> dict[str, list[float]]:
    """Return what groups hold that nobody uses, some of which are used, and all, in bytes and open files."""
    register()
    tensor = torch.ones(1 << 20)

    def holds() -> tuple[float, float]:
        gc.collect()
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
        return private * 1024.0, float(len(os.listdir("/proc/self/fd")))

    def use(group: Any) -> None:
        dist.all_reduce(tensor, group=group)
        tensor.fill_(1.0)

    warm = [dist.new_group(backend=backend) for _ in range(2)]
    for group in warm:
        use(group)
    at = [holds()]
    groups = [dist.new_group(backend=backend) for _ in range(GROUPS * repeated)]
    at.append(holds())
    for number, group in enumerate(groups):
        if number % GROUPS < USED:
            use(group)
    dist.barrier()
    at.append(holds())
    for number, group in enumerate(groups):
        if number % GROUPS >= USED:
            use(group)
    dist.barrier()
    at.append(holds())
    for group in (*groups, *warm):
        dist.destroy_process_group(group)
    return {what: [(one[i] - at[0][i]) / repeated for one in at[1:]] for i, what in enumerate(("memory", "files"))}


def start(console: Console, quick: bool) -> dict[str, Any]:
    """Time how ranks find each other, and count what groups hold that are not all used."""
    sizes, rounds, repeated = ((16, 64), 1, 1) if quick else (RANKS, ROUNDS, REPEATED)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        found: dict[str, list[dict[str, float]]] = {"ring": [], "star": []}
        for _ in range(rounds):
            found["ring"].append(_ring(size))
            found["star"].append(_star(size))
        row: dict[str, Any] = {"ranks": size}
        for name, ones in found.items():
            row[name] = {key: statistics.median(one[key] for one in ones) for key in ones[0]}
        row["ratio"] = statistics.median(
            star["seconds"] / ring["seconds"] for ring, star in zip(found["ring"], found["star"], strict=True)
        )
        rows.append(row)
        console.print(f"{size:,} ranks: star {row['ratio']:.2f} times the ring")
    exponents = {name: _exponent(sizes, [row[name]["seconds"] for row in rows]) for name in ("ring", "star")}
    print_rows(
        console,
        "until the last rank knows all addresses",
        ["ranks", "", "ring", "star", "star / ring", "busiest rank sends: ring", "star", "connections: ring", "star"],
        [
            [f"{row['ranks']:,}", "", *(f"{row[name]['seconds'] * 1e3:.1f} ms" for name in ("ring", "star")),
             f"{row['ratio']:.2f}", *(f"{row[name]['busiest_bytes'] / 1e6:.2f} MB" for name in ("ring", "star")),
             *(f"{row[name]['connections']:,.0f}" for name in ("ring", "star"))]
            for row in rows
        ],
        "emulated",
    )  # fmt: skip
    console.print(f"exponents: ring {exponents['ring']:.2f}, star {exponents['star']:.2f}")
    held = {
        backend: slowest_seconds(PROCESSES, partial(_held, backend=backend, repeated=repeated), 300)
        for backend in (BACKEND, "gloo")
    }
    for backend, values in held.items():
        for name, ones in values.items():
            shown = ", ".join(f"{one:,.0f}" for one in ones)
            console.print(f"{backend}, {name} of {GROUPS} groups of which none, {USED}, all are used: {shown}")
    return {
        "evidence": "emulated: measured times of the code, as if each rank had a processor of its own; memory measured",
        "rows": rows,
        "exponents": exponents,
        "held": held,
        "share": held[BACKEND]["memory"][1] / held["gloo"]["memory"][1],
        "targets": ASKED,
        "notes": [f"memory: {GROUPS * repeated} groups of {PROCESSES} processes, by {GROUPS}; those used add 4 MiB"],
    }
