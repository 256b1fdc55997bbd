"""Ranks find each other: around a ring, through the store where the ring is broken, and by what another group knows."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.distributed.transport import bootstrap, meeting
from cordillera.distributed.transport.bootstrap import AddressBook, AddressRing
from cordillera.distributed.transport.frames import BrokenConnection, Connection, FrameKind, TransportFrame
from cordillera.distributed.transport.meeting import PeerListener, _receive
from cordillera.distributed.transport.process_group import BACKEND, TransportProcessGroup, register
from cordillera.distributed.transport.progress import TransportError
from cordillera.distributed.transport.signatures import Signature
from tests.distributed.processes import needs_gloo, run_processes

TIMEOUT = timedelta(seconds=20)


@settings(max_examples=40)
@given(n=st.integers(2, 70), seed=st.integers(0, 2**31))
def test_every_rank_knows_all_addresses_after_n_minus_1_frames_however_they_are_delivered(n: int, seed: int) -> None:
    queues: list[deque[tuple[TransportFrame, bytes]]] = [deque() for _ in range(n)]  # by the rank that receives
    sent = [0] * n

    def sender(rank: int) -> Callable[[TransportFrame, memoryview], None]:
        def send(frame: TransportFrame, data: memoryview) -> None:
            sent[rank] += 1
            queues[(rank + 1) % n].append((frame, bytes(data)))

        return send

    rings = [AddressRing(rank, n, f"address of {rank}", sender(rank)) for rank in range(n)]
    choice = random.Random(seed)
    unborn = choice.sample(range(n), n)
    while unborn or any(queues):
        if unborn and choice.random() < 0.3:
            rings[unborn.pop()].begin()
            continue
        born = [rank for rank in range(n) if queues[rank] and rank not in unborn]
        if not born:
            if unborn:
                rings[unborn.pop()].begin()
            continue
        rank = choice.choice(born)
        frame, data = queues[rank].popleft()
        place = rings[rank].place(rings[rank].previous, frame)
        place[:] = data
        rings[rank].arrived(rings[rank].previous, frame, place)
    assert sent == [n - 1] * n
    for ring in rings:
        assert ring.is_complete
        assert ring.addresses == {rank: f"address of {rank}" for rank in range(n)}


@pytest.mark.parametrize(
    ("kind", "number", "length"),
    [(FrameKind.ABORT, 1, 4), (FrameKind.ADDRESS, 1, 0), (FrameKind.ADDRESS, 1, 2000), (FrameKind.ADDRESS, 0, 4),
     (FrameKind.ADDRESS, 3, 4), (FrameKind.ADDRESS, 2**63, 4)],
)  # fmt: skip
def test_a_frame_that_is_no_new_address_is_refused(kind: FrameKind, number: int, length: int) -> None:
    ring = AddressRing(0, 3, "mine", lambda *what: None)
    frame = TransportFrame(kind, Signature(0, 0, 0), 0, number, 0, length)
    with pytest.raises(BrokenConnection):
        ring.arrived(2, frame, ring.place(2, frame))
    assert ring.addresses == {0: "mine"}


class Questions(dist.HashStore):
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.lock = threading.Lock()

    def get(self, key: str) -> bytes:
        with self.lock:
            self.asked.append(key)
        return bytes(super().get(key))

    def wait(self, *arguments: Any) -> None:
        with self.lock:
            self.asked.append("wait")
        super().wait(*arguments)


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rings of three ranks and more."""
    monkeypatch.setattr(bootstrap, "RING_RANKS", 3)
    yield
    deadline = time.monotonic() + 5
    while any(one.name == "cordillera addresses" for one in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread of the ring goes on"
        time.sleep(0.01)


def books(store: dist.Store, size: int, absent: tuple[int, ...] = ()) -> dict[int, AddressBook]:
    return {rank: AddressBook(store, rank, size, b"secret") for rank in range(size) if rank not in absent}


@pytest.mark.usefixtures("ring")
@pytest.mark.parametrize("size", [3, 4, 17, 40])
def test_the_store_is_asked_for_neighbours_alone(size: int) -> None:
    store = Questions()
    found = books(store, size)
    for book in found.values():
        assert book._is_over.wait(10)
        for peer in range(size):
            assert book.find(peer, 1.0) is not None
    assert len(store.asked) == size  # the last rank connects to both of its neighbours, the first to none


@pytest.mark.usefixtures("ring")
def test_a_ring_is_complete_with_more_open_files_than_select_takes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this system lets a process open too few files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while stack.enter_context(Path(os.devnull).open("rb")).fileno() < 1024:
            pass
        for book in books(dist.HashStore(), 3).values():
            assert book._is_over.wait(10)
            assert book._ring.is_complete


@pytest.mark.usefixtures("ring")
def test_where_a_rank_has_not_come_the_store_is_asked() -> None:
    store = dist.HashStore()
    found = books(store, 5, absent=(3,))
    assert found[4].find(1, 1.0) is not None
    assert found[1].find(3, 0.2) is None
    late = AddressBook(store, 3, 5, b"secret")
    for book in (*found.values(), late):
        assert book._is_over.wait(10)
        assert book.find(3, 1.0) is not None


@pytest.mark.parametrize(
    ("master", "way_out", "own"),
    [
        ("node", "10.0.0.7", "10.0.0.7"), ("node", None, "127.0.1.1"), ("other", "10.0.0.7", "10.0.0.8"),
        ("localhost", "10.0.0.7", "127.0.0.1"), ("127.0.0.2", "10.0.0.7", "127.0.0.2"), ("::1", "10.0.0.7", "::1"),
        ("nowhere", "10.0.0.7", "127.0.0.1"),
    ],
)  # fmt: skip
def test_a_machine_whose_name_is_of_the_loopback_shows_others_an_address_that_they_reach(
    master: str, way_out: str | None, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"node": "127.0.1.1", "other": "10.0.0.9", "localhost": "127.0.0.1"}
    ways = {"10.0.0.9": "10.0.0.8", "192.0.2.1": way_out}

    class Datagrams(contextlib.ExitStack):
        def __init__(self, *kind: int) -> None:
            super().__init__()

        def connect(self, where: tuple[str, int]) -> None:
            self.own = ways.get(where[0], where[0])
            if self.own is None:
                raise OSError(errno.ENETUNREACH, "Network is unreachable")

        def getsockname(self) -> tuple[str | None, int]:
            return self.own, 1

    def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        if host == "nowhere":
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (names.get(host, host), port))]

    kinds = {name: getattr(socket, name) for name in ("AF_INET", "SOCK_DGRAM")}
    monkeypatch.setattr(meeting, "socket", SimpleNamespace(socket=Datagrams, getaddrinfo=getaddrinfo, **kinds))
    monkeypatch.setenv("MASTER_ADDR", master)
    assert meeting._own_host() == own


def test_a_listener_goes_on_after_a_connection_that_it_could_not_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    original, failures = socket.socket.accept, iter([OSError(errno.EMFILE, "Too many open files")] * 2)

    def accept(one: socket.socket) -> Any:
        if (error := next(failures, None)) is not None:
            raise error
        return original(one)

    monkeypatch.setattr(socket.socket, "accept", accept)
    listening = PeerListener("127.0.0.1")
    with socket.create_connection(("127.0.0.1", json.loads(listening.address)["port"]), timeout=10) as connected:
        assert "challenge" in _receive(connected)
    listening.close_copies()


@pytest.mark.usefixtures("ring")
def test_another_secret_is_not_let_in_and_closing_ends_the_ring() -> None:
    store = dist.HashStore()
    found = books(store, 4, absent=(2,))
    stranger = AddressBook(store, 2, 4, b"another secret")
    assert stranger._is_over.wait(10)  # its neighbour sends it away
    assert stranger.find(1, 1.0) is not None  # from the store, which it can read
    for book in found.values():
        book.close()


@pytest.mark.usefixtures("ring")
def test_twelve_ranks_of_a_ring_add() -> None:
    store = dist.HashStore()
    groups = [TransportProcessGroup(store, rank, 12, TIMEOUT) for rank in range(12)]

    def add(rank: int) -> float:
        tensor = torch.full((10,), float(rank))
        groups[rank].allreduce([tensor]).wait()
        return float(tensor[0])

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(add, range(12))) == [66.0] * 12
    for one in groups:
        one.shutdown()


def test_a_group_of_some_ranks_asks_no_store() -> None:
    store = dist.HashStore()
    parents = [TransportProcessGroup(store, rank, 4, TIMEOUT) for rank in range(4)]
    silent = Questions()
    members = (3, 1)
    groups = [
        TransportProcessGroup(silent, number, 2, TIMEOUT, name="part", ranks=members, parent=parents[rank])
        for number, rank in enumerate(members)
    ]

    def add(number: int) -> float:
        tensor = torch.full((3,), float(members[number]))
        groups[number].allreduce([tensor]).wait()
        return float(tensor[0])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(add, range(2))) == [4.0, 4.0]
    assert not silent.asked
    assert silent.num_keys() == 0
    for one in (*groups, *parents):
        one.shutdown()


def test_groups_of_the_same_ranks_with_other_names_do_not_meet() -> None:
    store = dist.HashStore()
    parents = [TransportProcessGroup(store, rank, 2, TIMEOUT) for rank in range(2)]
    short = timedelta(seconds=0.3)
    groups = [
        TransportProcessGroup(store, rank, 2, short, name=f"group {rank}", ranks=(0, 1), parent=parents[rank])
        for rank in range(2)
    ]

    def add(rank: int) -> None:
        with pytest.raises(TransportError, match=r"longer than|could not be reached|ended its connection"):
            groups[rank].allreduce([torch.ones(1)]).wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(add, range(2)))
    for one in (*groups, *parents):
        one.shutdown()


def many_groups(rank: int, folder: str) -> list[float]:
    dist.barrier()  # until Gloo has connected all
    dist.destroy_process_group()
    register()
    store = dist.FileStore(f"{folder}/addresses", 4)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=4, timeout=TIMEOUT)
    found = []
    for members in ([0, 1], [1, 2, 3], [3, 0], [0, 1, 2, 3]):
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.full((100,), float(rank))
            dist.all_reduce(tensor, group=group)
            found.append(float(tensor[0]))
            dist.destroy_process_group(group)
    again = dist.new_group([0, 1, 2, 3])
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=again)
    dist.destroy_process_group()
    dist.init_process_group(BACKEND, init_method=f"file://{folder}/last", rank=rank, world_size=4)  # the caller ends it
    return [*found, float(tensor[0])]


@pytest.mark.slow
@needs_gloo
def test_groups_of_groups_in_processes(tmp_path: Path) -> None:
    ended = run_processes(4, tmp_path, many_groups, 120)
    assert [ended.found[rank] for rank in range(4)] == [
        [1.0, 3.0, 6.0, 4.0], [1.0, 6.0, 6.0, 4.0], [6.0, 6.0, 4.0], [6.0, 3.0, 6.0, 4.0]
    ], ended.said  # fmt: skip


def test_who_comes_late_learns_why_the_others_gave_up() -> None:
    store = dist.HashStore()
    groups = [TransportProcessGroup(store, rank, 3, TIMEOUT) for rank in range(3)]
    groups[0].communicator.abort("a disk is full")

    def fail(rank: int) -> str:
        with pytest.raises(TransportError) as caught:
            groups[rank].allreduce([torch.ones(1)]).wait()
        return str(caught.value)

    assert "rank 0 gave up: a disk is full" in fail(1)  # which reaches rank 0
    groups[2].communicator.timeout_s = 5.0
    assert "rank 0 gave up: a disk is full" in fail(2)  # from whichever of the two it reaches first
    for one in groups:
        one.shutdown()


@settings(max_examples=60)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 5, 47, 48, 49, 100, 3000]), max_size=12),
    ahead=st.sampled_from([0, 1, 49, 200, 100_000]),
    pieces=st.integers(1, 4000),
)
def test_frames_come_as_they_were_sent_however_they_are_cut(lengths: list[int], ahead: int, pieces: int) -> None:
    payloads = [bytes([number]) * length for number, length in enumerate(lengths)]
    found: list[tuple[int, bytes]] = []

    class Handler:
        def place(self, peer: int, frame: TransportFrame) -> memoryview:
            return memoryview(bytearray(frame.length))

        def arrived(self, peer: int, frame: TransportFrame, data: memoryview) -> None:
            found.append((frame.number, bytes(data)))

    here, there = socket.socketpair()
    connection = Connection(7, there, memoryview(bytearray(ahead)) if ahead else None)
    text = b"".join(
        TransportFrame(FrameKind.INLINE, Signature(1, 2, 3), 4, number, len(data), len(data)).encode() + data
        for number, data in enumerate(payloads)
    )
    for begin in range(0, len(text), pieces):
        here.sendall(text[begin : begin + pieces])
        connection.receive(Handler())
    connection.receive(Handler())
    assert found == list(enumerate(payloads))
    here.close()
    with pytest.raises(BrokenConnection, match="ended its connection"):
        connection.receive(Handler())
    there.close()
