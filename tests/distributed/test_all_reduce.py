"""Sums over processes that may end at any moment: exact, the same everywhere, and never waited for in vain."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cordillera.distributed.fault_tolerance._chunks import (
    HEADER_BYTES,
    SUMMED,
    FrameHeader,
    MemberLink,
    SumInProgress,
    checksum,
)
from cordillera.distributed.fault_tolerance.all_reduce import AllReduce, ReduceAborted, RingMember
from cordillera.errors import PlanError

TRANSPORTS = ("memory", "sockets")
NAMES = ("a", "b", "c", "d")
CHUNK, WINDOW = 4096, 2
DEADLINE_S = 10.0
BLOCK = 1 << 16


class Ring:
    """Members in threads of this process, whose calls are made at the same time."""

    def __init__(self, size: int, transport: Any, *, chunk_bytes: int = CHUNK, window: int = WINDOW) -> None:
        self.members = {
            name: AllReduce("job", b"token", transport=transport, chunk_bytes=chunk_bytes, window=window)
            for name in NAMES[:size]
        }
        self.addresses = {name: member.address for name, member in self.members.items()}
        self.pool = ThreadPoolExecutor(size)

    def each(self, call: Callable[[str, AllReduce], Any], names: Sequence[str] = NAMES) -> dict[str, Any]:
        """What the call returned or raised at each member."""

        def attempt(name: str) -> Any:
            try:
                return call(name, self.members[name])
            except ReduceAborted as error:
                return error

        chosen = [name for name in self.members if name in names]
        return dict(zip(chosen, self.pool.map(attempt, chosen), strict=True))

    def connect(self, epoch: int, contributing: Sequence[str] = NAMES, names: Sequence[str] = NAMES) -> dict[str, Any]:
        chosen = [RingMember(name, self.addresses[name]) for name in self.members if name in names]
        given = [member.name for member in chosen if member.name in contributing]
        return self.each(lambda name, one: one.connect(epoch, chosen, name, given, DEADLINE_S), names)

    def reduce(
        self, tensors: dict[str, torch.Tensor], names: Sequence[str] = NAMES, deadline_s: float = DEADLINE_S
    ) -> dict[str, Any]:
        def call(name: str, one: AllReduce) -> torch.Tensor:
            tensor = tensors[name].clone()
            one.reduce(tensor, step=7, bucket=3, deadline_s=deadline_s)
            return tensor

        return self.each(call, names)


@contextmanager
def a_ring(size: int, transport: str, contributing: Sequence[str] = NAMES, **settings: int) -> Iterator[Ring]:
    ring = Ring(size, transport, **settings)
    try:
        assert set(ring.connect(1, contributing).values()) == {None}
        yield ring
    finally:
        for member in ring.members.values():
            member.close()
        ring.pool.shutdown()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def random_floats(size: int, length: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    scales = 10.0 ** torch.arange(-3, 3)
    return {
        name: (torch.randn(length, generator=generator, dtype=torch.float64) * scales[torch.arange(length) % 6]).to(
            dtype
        )
        for name in NAMES[:size]
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sums_of_integers_are_exact_at_any_length(size: int, transport: str, dtype: torch.dtype) -> None:
    with a_ring(size, transport) as ring:
        for length in (0, 1, 2, 15, 17, 1023, CHUNK // 4, CHUNK // 4 + 1, 5 * CHUNK // 4 + 13, 20_011):
            values = {name: torch.randint(-(2**30), 2**30, (length,), dtype=dtype) for name in ring.members}
            wanted = np.sum([one.numpy() for one in values.values()], axis=0, dtype=values["a"].numpy().dtype)
            for name, found in ring.reduce(values).items():
                assert np.array_equal(found.numpy(), wanted), (name, length)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("contributing", ["a", "ab", "abc", "acd", "bcd", "abcd"])
def test_floats_are_added_in_the_order_of_names(contributing: str, dtype: torch.dtype, transport: str) -> None:
    values = random_floats(4, 5 * CHUNK // 4 + 13, dtype)
    wanted = values[contributing[0]].numpy()
    for name in contributing[1:]:
        wanted = wanted + values[name].numpy()
    silent = {name: one if name in contributing else torch.full_like(one, float("nan")) for name, one in values.items()}
    with a_ring(4, transport, contributing) as ring:
        for found in ring.reduce(silent).values():
            assert bits(found) == wanted.tobytes()
    if len(contributing) > 2:  # the order matters: another one gives other bits
        assert bits(sum(values[name] for name in contributing[::-1])) != wanted.tobytes()  # type: ignore[arg-type]


def test_bfloat16_is_added_in_float32_and_rounded_once() -> None:
    values = random_floats(4, 3001, torch.bfloat16)
    total = values["a"].float().numpy()
    for name in "bcd":
        total = total + values[name].float().numpy()
    wanted = bits(torch.from_numpy(total).to(torch.bfloat16))
    rounded_often = values["a"] + values["b"] + values["c"] + values["d"]
    assert bits(rounded_often) != wanted
    for transport in TRANSPORTS:
        with a_ring(4, transport) as ring:
            assert {bits(found) for found in ring.reduce(values).values()} == {wanted}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nan_and_infinity_of_contributors_reach_all(transport: str) -> None:
    values = {name: torch.zeros(3000) for name in NAMES[:3]}
    values["a"][5], values["b"][2000], values["c"][2000], values["c"][2999] = (
        float("nan"), float("inf"), -float("inf"), float("inf"),
    )  # fmt: skip
    with a_ring(3, transport) as ring:
        for found in ring.reduce(values).values():
            assert found.isnan().nonzero().flatten().tolist() == [5, 2000]
            assert found.isinf().nonzero().flatten().tolist() == [2999]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("window", [1, 3])
def test_bytes_on_their_way_fill_the_window_and_never_exceed_it(transport: str, window: int) -> None:
    with a_ring(2, transport, window=window) as ring:
        for length in (100, 50_000, 3, 20_000):
            ring.reduce({name: torch.ones(length) for name in NAMES[:2]})
        peaks = {member.peak_in_flight_bytes for member in ring.members.values()}
    assert all(window * CHUNK // 2 <= peak <= window * CHUNK for peak in peaks), peaks


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_abort_ends_the_waits_of_all_members_at_once(transport: str) -> None:
    seconds = []
    for _ in range(3):
        with a_ring(3, transport) as ring:
            ended = {}

            def wait(name: str, one: AllReduce, ended: dict[str, float] = ended) -> None:
                try:
                    one.reduce(torch.zeros(10_000), step=0, bucket=0, deadline_s=DEADLINE_S)
                finally:
                    ended[name] = time.perf_counter()

            waiting = ring.pool.submit(ring.each, wait, ("a", "b"))
            time.sleep(0.05)
            assert not waiting.done()
            began = time.perf_counter()
            ring.members["a"].abort("the test wants it")
            errors = waiting.result(5)
            seconds.append(max(ended.values()) - began)
            assert "the test wants it" in str(errors["a"])
            assert "replica a ended its connection" in str(errors["b"])
    assert min(seconds) < 5, seconds  # the deadline is 10 s


def test_an_abort_ends_the_wait_for_members_that_do_not_come() -> None:
    with a_ring(2, "auto") as ring:
        members = [RingMember(name, address) for name, address in ring.addresses.items()]
        waiting = ring.pool.submit(ring.each, lambda name, one: one.connect(2, members, name, "ab", DEADLINE_S), "a")
        time.sleep(0.05)
        began = time.perf_counter()
        ring.members["a"].abort("changed its mind")
        assert "changed its mind" in str(waiting.result(5)["a"])
        assert time.perf_counter() - began < 5


def test_who_comes_late_finds_those_who_came_before_and_the_other_way_round() -> None:
    for late in "ab":
        with a_ring(2, "auto") as ring:
            members = [RingMember(name, address) for name, address in ring.addresses.items()]

            def come(name: str, one: AllReduce, late: str = late, members: list[RingMember] = members) -> None:
                time.sleep(0.2 * (name == late))
                one.connect(2, members, name, "ab", DEADLINE_S)

            assert ring.each(come) == {"a": None, "b": None}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("after", range(0, 22, 3))
def test_a_member_that_ends_within_a_sum_frees_the_others_which_go_on(
    transport: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = random_floats(3, 5 * CHUNK)
    with a_ring(3, transport) as ring:
        sends, send = [0], MemberLink.send

        def dying(link: MemberLink, *frame: Any) -> None:
            if threading.current_thread().name == "b":
                sends[0] += 1
                if sends[0] > after:
                    ring.members["b"].close()
            send(link, *frame)

        def call(name: str, one: AllReduce) -> torch.Tensor:
            threading.current_thread().name = name
            tensor = values[name].clone()
            one.reduce(tensor, step=0, bucket=0, deadline_s=DEADLINE_S)
            return tensor

        monkeypatch.setattr(MemberLink, "send", dying)
        began = time.perf_counter()
        errors = ring.each(call)
        assert time.perf_counter() - began < 8
        assert all(isinstance(error, ReduceAborted) for error in errors.values()), errors
        monkeypatch.undo()
        assert ring.connect(2, names=("a", "c")) == {"a": None, "c": None}
        wanted = bits(values["a"] + values["c"])
        assert {bits(found) for found in ring.reduce(values, names=("a", "c")).values()} == {wanted}


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "step": ({"step": 8}, "step 8 instead of 7"),
    "bucket": ({"bucket": 4}, "bucket 4 instead of 3"),
    "epoch": ({"epoch": 2}, "epoch 2 instead of 1"),
    "kind": ({"kind": 1}, "kind 1 instead of 0"),
    "size": ({"size": 1}, "size 1 instead of 40000"),
    "phase": ({"phase": 9}, "phase 9"),
    "sum too early": ({"phase": SUMMED, "chunk": 5}, "chunk 5"),
    "chunk": ({"chunk": 1}, "chunk 1, due was chunk 0"),
    "long": ({"length": 1 << 40}, "bytes, a part has 2048 at most"),
    "length": ({"length": 8}, "8 bytes of chunk 0"),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_frame_that_is_not_due_is_named(change: str, transport: str) -> None:
    changes, text = CHANGES[change]
    due = FrameHeader(1, 0, 1, 7, 3, 0, 2048 if transport == "sockets" else 0, 40_000, 0)
    with a_ring(2, transport) as ring:
        assert ring.members["b"]._ring is not None
        ring.members["b"]._ring.links[0].socket.send(due._replace(**changes).encode())
        errors = ring.reduce({"a": torch.zeros(10_000)}, ("a",))
    assert text in str(errors["a"]), errors
    assert "replica b" in str(errors["a"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_bit_of_a_header_is_checked(transport: str) -> None:
    header = FrameHeader(1, 0, 1, 7, 3, 0, 0, 4000, 0).encode()
    assert len(header) == HEADER_BYTES
    for position in range(len(header)):
        changed = bytearray(header)
        changed[position] ^= 1 << position % 8
        with pytest.raises(ValueError, match="corrupt"):
            FrameHeader.decode(changed)
    with a_ring(2, transport) as ring:
        assert ring.members["b"]._ring is not None
        ring.members["b"]._ring.links[0].socket.send(bytes(changed))
        assert "header is corrupt" in str(ring.reduce({"a": torch.zeros(1000)}, ("a",))["a"])


def test_a_payload_that_is_corrupt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SumInProgress._header

    def corrupt(one: SumInProgress, phase: int, chunk: int, payload: Any) -> FrameHeader:
        header = original(one, phase, chunk, payload)
        return header._replace(checksum=header.checksum ^ 1) if chunk == 3 else header

    monkeypatch.setattr(SumInProgress, "_header", corrupt)
    with a_ring(2, "sockets") as ring:
        errors = ring.reduce({name: torch.ones(10_000) for name in "ab"})
    assert any("part of chunk 3 that is corrupt" in str(error) for error in errors.values()), errors


def test_the_checksum_depends_on_each_byte_and_on_its_place() -> None:
    random = np.random.default_rng(0)
    for size in (0, 1, 7, 4097, 1 << 16, 3 * (1 << 16) + 5, 37 * 4096, 1 << 20):
        data = random.integers(0, 256, size, dtype=np.uint8)
        right = checksum(data)
        assert right == checksum(data.copy())
        for position in random.integers(0, size, 20 if size else 0):
            data[position] ^= 1
            assert checksum(data) != right
            data[position] ^= 1
        for first in range(0, size - size % BLOCK - BLOCK, BLOCK):  # two blocks change places
            blocks = [data[first + BLOCK : first + 2 * BLOCK], data[first : first + BLOCK], data[first + 2 * BLOCK :]]
            assert checksum(np.concatenate([data[:first], *blocks])) != right


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_frames_of_an_earlier_epoch_are_dropped(transport: str) -> None:
    values = random_floats(2, 10_000)
    with a_ring(2, transport) as ring:
        assert ring.connect(5) == {"a": None, "b": None}
        assert ring.members["b"]._ring is not None
        payload = np.ones(100, np.uint8)
        old = FrameHeader(1, 0, 4, 7, 3, 0, payload.size, 40_000, checksum(payload)).encode()
        ring.members["b"]._ring.links[0].socket.send(old + payload.tobytes())
        wanted = bits(values["a"] + values["b"])
        assert {bits(found) for found in ring.reduce(values).values()} == {wanted}


def test_strangers_are_turned_away_by_name_and_hold_nobody_up() -> None:
    with a_ring(2, "auto") as ring:
        host, port = ring.addresses["a"].split(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(100)]  # most say nothing at all
        for one in strangers[-10:]:
            one.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: everything\r\n\r\n")
        foreign = AllReduce("job", b"another token")
        other_job = AllReduce("another job", b"token")
        late = AllReduce("job", b"token")
        began = time.perf_counter()
        members = [RingMember("a", ring.addresses["a"])]
        for one, epoch in ((foreign, 2), (other_job, 2), (late, 0)):
            with pytest.raises(ReduceAborted, match=r"replica a (has|ended)"):
                one.connect(epoch, [*members, RingMember("z", one.address)], "z", "az", 5.0)
        assert ring.connect(2) == {"a": None, "b": None}
        values = random_floats(2, 100)
        assert {bits(found) for found in ring.reduce(values).values()} == {bits(values["a"] + values["b"])}
        assert time.perf_counter() - began < 3
        said = "\n".join(ring.members["a"].turned_away)
        for text in ("another protocol", "did not say who it is", "another token or job", "z came for epoch 0"):
            assert text in said
        for one in (foreign, other_job, late, *strangers):
            one.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_sends_nothing_is_missed_and_not_who_waits_for_it_as_well(transport: str) -> None:
    with a_ring(4, transport) as ring:
        names = ("a", "b", "d")
        errors = ring.reduce({name: torch.zeros(5 * CHUNK) for name in names}, names, deadline_s=4.0)
    assert {error.missed for error in errors.values()} - {()} == {("c",)}, errors  # others learn it from who was first


def test_who_does_not_come_to_an_epoch_is_missed() -> None:
    ring = Ring(3, "sockets")
    chosen = [RingMember(name, ring.addresses[name]) for name in ring.members]
    errors = ring.each(lambda name, one: one.connect(1, chosen, name, ["a", "b", "c"], 4.0), ("a", "b"))
    for member in ring.members.values():
        member.close()
    ring.pool.shutdown()
    missed = {error.missed for error in errors.values()} - {()}
    assert missed
    assert all("c" in names for names in missed), errors


def test_a_sum_half_sent_ends_with_the_deadline_which_names_who_is_awaited() -> None:
    with a_ring(3, "sockets") as ring:
        began = time.perf_counter()
        errors = ring.reduce({name: torch.zeros(5000) for name in "ab"}, ("a", "b"), deadline_s=0.3)
        assert 0.3 <= time.perf_counter() - began < 8
        assert any("awaited: replica" in str(error) and "c" in error.missed for error in errors.values())


def test_members_that_do_not_agree_are_told_in_what() -> None:
    with a_ring(2, "auto") as ring:
        members = [RingMember(name, address) for name, address in ring.addresses.items()]
        errors = ring.each(lambda name, one: one.connect(2, members, name, "ab" if name == "a" else "b", DEADLINE_S))
        assert any("has contributors ['b'] instead of ['a', 'b']" in str(error) for error in errors.values())
        assert all(isinstance(error, ReduceAborted) for error in errors.values())
        assert ring.connect(3) == {"a": None, "b": None}


def test_mistakes_are_errors_before_anything_is_sent() -> None:
    with a_ring(1, "auto") as ring:
        one, member = ring.members["a"], RingMember("a", ring.addresses["a"])
        for wrong in (torch.zeros(2, 2), torch.zeros(4)[::2], torch.zeros(2, dtype=torch.float16)):
            with pytest.raises(PlanError, match="cannot be reduced"):
                one.reduce(wrong, step=0, bucket=0, deadline_s=1)
        for seconds in (0, -1, float("nan"), float("inf")):
            with pytest.raises(PlanError, match="deadline_s"):
                one.reduce(torch.zeros(1), step=0, bucket=0, deadline_s=seconds)
        with pytest.raises(PlanError, match="does not follow"):
            one.connect(1, [member], "a", "a", 1)
        with pytest.raises(PlanError, match="distinct"):
            one.connect(2, [member, member], "a", "a", 1)
        with pytest.raises(PlanError, match="contributors"):
            one.connect(2, [member], "a", [], 1)
        one.reduce(torch.zeros(1), step=0, bucket=0, deadline_s=1)  # none of this ended the epoch


def _fork_a_process_that_lives_as_long() -> None:
    """Start what a loader of data would be: it has inherited all sockets, and its parent's end must be seen anyway."""
    parent = os.getpid()
    if os.fork() == 0:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            time.sleep(0.02)
            if os.getppid() != parent:  # it was killed; the sockets would stay open for some seconds more
                time.sleep(6)
                break
        os._exit(0)


def _replica(name: str, transport: Any, pipe: Any) -> None:
    torch.set_num_threads(1)
    one = AllReduce("job", b"token", transport=transport, chunk_bytes=1 << 16)
    pipe.send(one.address)
    while (order := pipe.recv()) is not None:
        epoch, addresses, deadline_s = order
        try:
            members = [RingMember(*pair) for pair in addresses.items()]
            one.connect(epoch, members, name, list(addresses), DEADLINE_S)
            if name == "b" and epoch == 1:
                _fork_a_process_that_lives_as_long()
            pipe.send(one.transport_used)
            step = 0
            while True:
                tensor = torch.full((1 << 20,), float(ord(name)))
                one.reduce(tensor, step=step, bucket=0, deadline_s=deadline_s)
                assert tensor[0] == tensor[-1] == sum(map(ord, addresses))
                step += 1
                if epoch > 1 and step == 3:
                    break
            pipe.send("summed")
        except ReduceAborted as error:
            pipe.send((time.monotonic(), str(error)))
    one.close()


@contextmanager
def replicas(transport: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    context = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    pipes, processes = {}, {}
    try:
        for name in "abc":
            pipes[name], theirs = context.Pipe()
            processes[name] = context.Process(target=_replica, args=(name, transport, theirs), daemon=True)
            processes[name].start()
            theirs.close()
        yield pipes, processes
    finally:
        for process in processes.values():
            process.kill()
            process.join(10)


def _answers(pipes: dict[str, Any], names: str, seconds: float) -> dict[str, Any]:
    for name in names:
        assert pipes[name].poll(seconds), name
    return {name: pipes[name].recv() for name in names}


@pytest.mark.cases(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_of_a_killed_or_stopped_process_go_on(transport: str, sign: signal.Signals) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    with replicas(transport) as (pipes, processes):
        addresses = _answers(pipes, "abc", 30)
        for pipe in pipes.values():
            pipe.send((1, addresses, 20.0 if sign == signal.SIGKILL else 4.0))
        assert set(_answers(pipes, "abc", 20).values()) == {transport}
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(processes["b"].pid, sign)
        errors = _answers(pipes, "ac", 20)
        seconds = max(at for at, _ in errors.values()) - began
        assert seconds < (4.0 if sign == signal.SIGKILL else 10.0)
        blamed = "replica b ended" if sign == signal.SIGKILL else "awaited: replica"
        assert any(blamed in text for _, text in errors.values()), errors
        left = {name: addresses[name] for name in "ac"}
        for name in left:
            pipes[name].send((2, left, 5.0))
        assert set(_answers(pipes, "ac", 20).values()) == {transport}
        assert set(_answers(pipes, "ac", 20).values()) == {"summed"}
    if before:
        assert not {name for name in set(os.listdir("/dev/shm")) - before if "all-reduce" in name}
