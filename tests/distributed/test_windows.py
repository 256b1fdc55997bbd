"""Windows: what ranks put into each other's memory, and signals that come behind it."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.distributed.transport.frames import BrokenConnection, FrameKind, TransportFrame, encode_spans
from cordillera.distributed.transport.operations import Offer, Take, TransportOperation, as_bytes
from cordillera.distributed.transport.process_group import BACKEND, TransportProcessGroup, register
from cordillera.distributed.transport.progress import TransportError
from cordillera.distributed.transport.signatures import signed
from cordillera.distributed.transport.verbs import Window
from cordillera.errors import PlanError
from tests.distributed.processes import needs_gloo, run_processes
from tests.distributed.test_transport import PATHS, Group, VirtualNetwork


@settings(max_examples=30)
@given(
    n=st.integers(1, 4),
    path=st.sampled_from(PATHS),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1, 3000, 400_000]),
    waits=st.booleans(),
)
def test_what_was_put_before_a_signal_is_there_after_it(n: int, path: str, seed: int, scale: int, waits: bool) -> None:
    """Small, large and empty puts from all to all; each writes into a part of its own."""
    counts = torch.randint(0, 4, (n, n, 3), generator=torch.Generator().manual_seed(seed)) * scale
    total = int(counts.sum(dim=(0, 2)).max()) + 1

    def call(rank: int, group: TransportProcessGroup) -> Tensor:
        with Window(group, torch.full((total,), -1.0)) as window:
            kept = []
            for peer in range(n):
                offset = int(counts[:rank, peer].sum())
                for number, count in enumerate(counts[rank, peer].tolist()):
                    kept.append(torch.full((count,), float(100 * rank + 10 * peer + number)))
                    window.put(kept[-1], peer, offset, async_op=not waits and peer != rank)
                    offset += count
                if peer != rank:
                    window.signal(peer, async_op=not waits)
            for peer in range(n):
                if peer != rank:
                    window.wait_signal(peer)
            return window.tensor.clone()

    with Group(n, path) as group:
        found = group.each(call)
    for rank, memory in enumerate(found):
        expected = torch.full((total,), -1.0)
        at = 0
        for source in range(n):
            for number, count in enumerate(counts[source, rank].tolist()):
                expected[at : at + count] = float(100 * source + 10 * rank + number)
                at += count
        assert torch.equal(memory, expected), (rank, memory, expected)


@settings(max_examples=40)
@given(n=st.integers(2, 16), seed=st.integers(0, 10_000), size=st.sampled_from([0, 5, 40_000, 3_000_000]))
def test_in_any_order_of_deliveries_a_signal_comes_behind_its_puts(n: int, seed: int, size: int) -> None:
    network = VirtualNetwork(n, seed)
    memory = [torch.zeros(n, size, dtype=torch.uint8) for _ in range(n)]
    signature, none = signed("put"), torch.empty(0, dtype=torch.uint8)
    seen: list[bool] = []
    for rank, exchanges in enumerate(network.ranks):
        exchanges.windows[0] = as_bytes(memory[rank]), signature
    for rank, exchanges in enumerate(network.ranks):
        target, source = (rank + 1) % n, (rank - 1) % n
        wait = TransportOperation(
            "wait_signal", signed("message"), [Take(peer=source, views=[none])], is_message=True, sequence=-5,
            finish=lambda rank=rank, source=source: seen.append(bool((memory[rank][source] == source + 1).all())),
        )  # fmt: skip
        data = torch.full((size,), rank + 1, dtype=torch.uint8)
        put = TransportOperation(
            "put", signature, [Offer(peer=target, views=[data], place=rank * size)], is_message=True, sequence=0
        )
        tell = TransportOperation(
            "signal", signed("message"), [Offer(peer=target, views=[none])], is_message=True, sequence=-5,
            follows=[put],
        )  # fmt: skip
        for operation in (wait, put, tell):
            exchanges.post(operation)
    network.run()
    assert seen == [True] * n
    assert len(network.done) == 3 * n  # who is written to posted nothing for it


def test_the_other_rank_need_not_call_anything() -> None:
    """It computes, or sleeps, and the memory changes; what it does with the group meanwhile goes on as well."""
    with Group(2) as group:

        def call(rank: int, one: TransportProcessGroup) -> Any:
            window = Window(one, torch.zeros(100_000))
            if rank:
                for value in range(1, 6):
                    window.put(torch.full((100_000,), float(value)), 0)
                window.signal(0)
            else:
                deadline = time.monotonic() + 10
                while window.tensor[-1] != 5 and time.monotonic() < deadline:
                    time.sleep(0.002)
            total = torch.ones(10)
            one.allreduce([total], dist.AllreduceOptions()).wait()
            if not rank:
                window.wait_signal(1)
            window.close()
            window.close()
            return window.tensor[0].item(), total[0].item()

        assert group.each(call) == [(5.0, 2.0), (0.0, 2.0)]


def test_a_put_arrives_soon_while_the_other_rank_does_nothing() -> None:
    with Group(2) as group:

        def call(rank: int, one: TransportProcessGroup) -> float:
            with Window(one, torch.zeros(1000)) as window:
                begin = time.monotonic()
                if rank:
                    for _ in range(1000):
                        window.put(torch.ones(1000), 0)
                    window.signal(0)
                else:
                    window.wait_signal(1)
                return time.monotonic() - begin

        assert max(group.each(call)) < 10.0  # looking every 20 ms, as without windows, would take 20 s


def test_what_cannot_be_is_refused_by_name() -> None:
    with Group(2) as group:

        def call(rank: int, one: TransportProcessGroup) -> list[str]:
            window = Window(one, torch.zeros(10 if rank else 20))
            said = []
            for attempt in (
                lambda: window.put(torch.ones(11), 1),
                lambda: window.put(torch.ones(1), 1, 10),
                lambda: window.put(torch.ones(1), 1, -1),
                lambda: window.put(torch.ones(1, dtype=torch.int32), 1),
                lambda: window.put(torch.ones(4, 4).t(), 1),
                lambda: window.put(torch.ones(1), 2),
                lambda: window.put(torch.ones(1), 1, timeout=timedelta(seconds=-1)),
                lambda: window.signal(rank),
                lambda: window.wait_signal(-1),
            ):
                with pytest.raises(PlanError) as error:
                    attempt()
                said.append(error.value.what)
            window.put(torch.ones(1), 1 - rank)  # what was refused took no number
            window.signal(1 - rank)
            window.wait_signal(1 - rank)
            assert window.tensor[0] == 1
            window.close()
            with pytest.raises(PlanError) as error:
                window.put(torch.ones(1), 1)
            return [*said, error.value.what]

        (said, _) = group.each(call)
    assert said[0] == "11 elements at 0 do not fit in the 10 of rank 1"
    assert said[1] == "1 elements at 10 do not fit in the 10 of rank 1"
    assert "int32 cannot be put into one of" in said[3]
    assert "not contiguous" in said[4]
    assert said[5] == "rank is 2"
    assert "timeout is -1 s" in said[6]
    assert said[-1] == "it is closed"
    with Group(2) as group:
        errors = group.each(lambda rank, one: Window(one, torch.zeros(1, dtype=torch.int32 if rank else torch.int64)))
    assert all("tensors of 2 types" in str(error) for error in errors)


def test_a_rank_does_not_trust_what_others_put() -> None:
    """A frame is held against the window of this rank, whatever the sender knows of it."""
    for size, number, sequence, said in (
        (8, 0, 0, "puts 8 bytes at byte 12 of a window of 16 of rank 0"),
        (4, 0, 3, "puts into a window that rank 0 has not opened"),
        (4, 1, 0, "sent a put twice, or not all of one"),
    ):
        rank = VirtualNetwork(2, 0).ranks[0]
        rank.windows[0] = torch.zeros(16, dtype=torch.uint8), signed("put")
        data = bytearray(encode_spans([(12, size)]) + bytes(size))
        frame = TransportFrame(FrameKind.INLINE, signed("put"), sequence, number, size, len(data))
        with pytest.raises(Exception, match=said):
            rank.arrived(1, frame, memoryview(data))
    rank.windows[0] = torch.zeros(16, dtype=torch.uint8), signed("put", torch.float32)
    frame = TransportFrame(FrameKind.INLINE, signed("put"), 0, 0, 4, 20)
    with pytest.raises(Exception, match="rank 1 is at put of uint8, rank 0 at put of float32"):
        rank.arrived(1, frame, memoryview(bytearray(encode_spans([(12, 4)]) + bytes(4))))
    with pytest.raises(BrokenConnection):
        rank.arrived(1, frame._replace(length=3), memoryview(bytearray(3)))


def test_a_signal_that_does_not_come_ends_the_wait() -> None:
    both = threading.Barrier(2)
    with Group(2) as group:

        def call(rank: int, one: TransportProcessGroup) -> float:
            window = Window(one, torch.zeros(4))
            both.wait(30)
            begin = time.monotonic()
            if not rank:
                with pytest.raises(TransportError, match=r"wait_signal took longer than its timeout of 0\.3 s"):
                    window.wait_signal(1, timeout=timedelta(seconds=0.3))
            else:
                with pytest.raises(TransportError, match="rank 0 gave up: wait_signal took longer"):
                    window.wait_signal(0)
            return time.monotonic() - begin

        seconds = group.each(call)
        assert seconds[0] > 0.2
        assert max(seconds) < 10  # the limit of an operation is 20 s


def test_threads_do_not_stay_behind_windows() -> None:
    def count() -> int:
        return sum(one.name == "cordillera transport" for one in threading.enumerate())

    before = count()
    with Group(2) as group:
        group.each(lambda rank, one: Window(one, torch.zeros(4)))
    deadline = time.monotonic() + 20
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() <= before


def dies_while_it_puts(rank: int, folder: str) -> dict[str, Any]:
    register()
    group = dist.new_group(backend=BACKEND, timeout=timedelta(seconds=10))
    window = Window(group, torch.zeros(10_000_000))
    if rank == 2:
        window.put(torch.ones(10_000_000), 0)
        window.put(torch.ones(10_000_000), 0, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    begin, said = time.monotonic(), ""
    try:
        window.wait_signal(2)
    except TransportError as error:
        said = error.what
    took = time.monotonic() - begin
    survivors = dist.new_group([0, 1], backend=BACKEND, use_local_synchronization=True)
    with Window(survivors, torch.zeros(3)) as again:
        again.put(torch.full((1,), rank + 1.0), 1 - rank, rank)
        again.signal(1 - rank)
        again.wait_signal(1 - rank)
    torch.save({"took": took, "said": said, "again": again.tensor.tolist()}, f"{folder}/{rank}.pt")
    os._exit(0)  # gloo would wait for the rank that was killed


@needs_gloo
def test_a_rank_that_dies_while_it_puts_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    ended = run_processes(3, tmp_path, dies_while_it_puts, 120)
    assert ended.codes[2] == -signal.SIGKILL, ended.said
    assert set(ended.found) == {0, 1}, ended.said
    for rank, found in ended.found.items():
        assert "rank 2" in found["said"]
        assert found["took"] < 5
        assert found["again"] == ([0.0, 2.0, 0.0] if rank == 0 else [1.0, 0.0, 0.0])
