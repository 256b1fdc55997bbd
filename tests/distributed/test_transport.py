"""Collectives of our own: exact, the same on all ranks, checked against what each rank waits for, and never stuck."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.distributed.transport import exchanges
from cordillera.distributed.transport.communicator import Communicator
from cordillera.distributed.transport.exchanges import Exchanges, FragmentLimits, OperationFailed
from cordillera.distributed.transport.frames import (
    HEADER_BYTES,
    BrokenConnection,
    Connection,
    FrameKind,
    TransportFrame,
)
from cordillera.distributed.transport.meeting import Meeting
from cordillera.distributed.transport.operations import (
    Local,
    Offer,
    PeerTask,
    Take,
    TransportOperation,
    as_bytes,
    program,
    tasks_of,
)
from cordillera.distributed.transport.peer_memory import MemoryProof, PeerMemory, seen_by_proof
from cordillera.distributed.transport.process_group import TransportOptions, TransportProcessGroup
from cordillera.distributed.transport.progress import TransportError
from cordillera.distributed.transport.signatures import signed
from cordillera.distributed.transport.verbs import all_to_all_dynamic
from cordillera.errors import PlanError
from cordillera.planning.network.collective_algorithms import direct_all_gather, doubling_all_gather, ring_all_gather
from cordillera.planning.network.collective_plans import CollectivePlan, all_reduced, scattered
from tests.planning.domain_plans import hierarchical_all_reduce
from tests.planning.executed_plans import execute

PATHS = ("auto", "sockets")
TIMEOUT = timedelta(seconds=20)
PLANS: dict[str, Callable[[int], CollectivePlan]] = {
    "ring": lambda n: all_reduced(ring_all_gather(n)),
    "bidirectional ring": lambda n: all_reduced(ring_all_gather(n, bidirectional=True)),
    "doubling": lambda n: all_reduced(doubling_all_gather(n)),
    "direct": lambda n: all_reduced(direct_all_gather(n)),
    "ring reduce-scatter": lambda n: scattered(ring_all_gather(n)),
    "doubling all-gather": doubling_all_gather,
}


class VirtualNetwork:
    """Ranks in one thread, whose frames are delivered in a random order that keeps the order between two ranks."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.done: list[TransportOperation] = []
        self.queues: dict[tuple[int, int], deque[tuple[TransportFrame, bytes]]] = {}
        self.ranks = [Exchanges(rank, VirtualWire(self, rank), self.done.append) for rank in range(ranks)]

    def run(self) -> None:
        while waiting := [pair for pair, queue in self.queues.items() if queue]:
            source, target = self.random.choice(waiting)
            frame, data = self.queues[source, target].popleft()
            rank = self.ranks[target]
            place = rank.place(source, frame)
            place[:] = data
            rank.arrived(source, frame, place)


class VirtualWire:
    def __init__(self, network: VirtualNetwork, rank: int) -> None:
        self.network, self.rank = network, rank

    def open(self, peer: int, operation: TransportOperation) -> bool:
        return True

    def send(self, peer: int, frame: TransportFrame, *payload: memoryview) -> bool:
        data = b"".join(bytes(part) for part in payload)
        assert len(data) == frame.length
        self.network.queues.setdefault((self.rank, peer), deque()).append((frame, data))
        return True

    def memory(self, peer: int) -> None:
        return None


def chunks_of(plan: CollectivePlan, rank: int, length: int, given: np.ndarray[Any, Any]) -> list[Tensor]:
    """Memory of every chunk of a rank, with what it holds at the start."""
    found = [torch.zeros(length, dtype=torch.int64) for _ in plan.chunks]
    held = plan.held_at_start(rank)
    for chunk, part in zip(held, np.split(given, len(held)), strict=True):
        found[chunk].copy_(torch.from_numpy(part))
    return found


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(PLANS)),
    n=st.integers(1, 9) | st.sampled_from([16, 33, 64]),
    length=st.sampled_from([0, 1, 5, 70]),
    seed=st.integers(0, 2**31),
)
def test_every_plan_ends_as_the_planner_says_however_its_fragments_are_delivered(
    name: str, n: int, length: int, seed: int
) -> None:
    check_plan(PLANS[name](n), length, seed)


def check_plan(plan: CollectivePlan, length: int, seed: int) -> None:
    n = plan.ranks
    random_numbers = np.random.default_rng(seed)
    inputs = [random_numbers.integers(-(2**40), 2**40, length * len(plan.held_at_start(r))) for r in range(n)]
    network = VirtualNetwork(n, seed)
    memory = [chunks_of(plan, rank, length, inputs[rank]) for rank in range(n)]
    operations = []
    for rank in network.random.sample(range(n), n):
        tasks = tasks_of(program(plan, rank), [as_bytes(one) for one in memory[rank]], torch.int64, torch.add)
        operations.append(TransportOperation("all_reduce", signed("all_reduce", torch.int64), tasks, sequence=0))
        network.ranks[rank].post(operations[-1])
    network.run()
    assert len(network.done) == n
    for rank, (got, want) in enumerate(zip(memory, execute(plan, inputs), strict=True)):
        held = [got[chunk] for chunk in plan.held_at_end(rank)]
        assert np.array_equal(torch.cat(held).numpy(), want)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of a few bytes that take several fragments and blocks."""
    monkeypatch.setattr(exchanges, "INLINE_BYTES", 16)
    monkeypatch.setattr(exchanges, "FragmentLimits", partial(FragmentLimits, fragment_bytes=64))
    monkeypatch.setattr(exchanges, "_BLOCK_BYTES", 96)
    monkeypatch.setattr(exchanges, "_COPY_BYTES", 256)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", sorted(PLANS))
def test_plans_in_fragments(name: str) -> None:
    for n, length, seed in ((2, 100, 1), (3, 33, 2), (5, 17, 3), (8, 9, 4)):
        check_plan(PLANS[name](n), length, seed)


@pytest.mark.parametrize("domains", [[2, 2], [2, 3], [3, 5, 4], [6, 1, 6]])
def test_hierarchical_plans(domains: list[int]) -> None:
    check_plan(hierarchical_all_reduce(domains), 6, 5)


def test_no_more_fragments_are_on_their_way_than_the_window_allows(small: None) -> None:
    network = VirtualNetwork(2, 7)
    data, into = torch.arange(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    for rank, task in ((0, Offer(peer=1, views=[data])), (1, Take(peer=0, views=[into]))):
        network.ranks[rank].post(TransportOperation("broadcast", signed("broadcast"), [task], sequence=0))
    network.run()
    assert torch.equal(into, data)
    assert network.ranks[1].counters.peak_in_flight_bytes == 4 * 64


def test_messages_are_matched_in_the_order_of_their_posting_whatever_comes_first() -> None:
    network = VirtualNetwork(3, 11)
    got = {source: [torch.zeros(9, dtype=torch.uint8) for _ in range(5)] for source in (0, 1)}
    posts: list[tuple[int, TransportOperation]] = []
    for source in (0, 1):
        for number in range(5):
            value = torch.full((9,), 10 * source + number, dtype=torch.uint8)
            posts.append((source, message(Offer(peer=2, index=number, views=[value]), tag=3)))
            posts.append((2, message(Take(peer=source, views=[got[source][number]]), tag=3)))
    order = list(range(len(posts)))
    network.random.shuffle(order)
    queues = {rank: deque(one for at, one in posts if at == rank) for rank in range(3)}
    for rank in (posts[at][0] for at in order):  # ranks in any order, each one's messages in theirs
        operation = queues[rank].popleft()
        network.ranks[rank].post(operation)
    network.run()
    for source, tensors in got.items():
        assert [int(one[0]) for one in tensors] == [10 * source + number for number in range(5)]


def message(task: PeerTask, tag: int) -> TransportOperation:
    return TransportOperation("message", signed("message"), [task], is_message=True, sequence=tag)


class Group:
    """Ranks in threads of this process, each with a process group of its own."""

    def __init__(
        self, size: int, path: Any = "auto", timeout: timedelta = TIMEOUT, stores: Sequence[dist.Store] = ()
    ) -> None:
        stores, self.size = stores or [dist.HashStore()] * size, size
        self.groups = [
            TransportProcessGroup(store, rank, size, timeout, options=TransportOptions(path))
            for rank, store in enumerate(stores)
        ]
        self.pool = ThreadPoolExecutor(size)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self.groups:
            group.shutdown()
        self.pool.shutdown()

    def each(self, call: Callable[[int, TransportProcessGroup], Any]) -> list[Any]:
        """What the call returned or raised at each rank."""

        def attempt(rank: int) -> Any:
            try:
                return call(rank, self.groups[rank])
            except (TransportError, PlanError) as error:
                return error

        return list(self.pool.map(attempt, range(self.size)))


def options(kind: Any, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def values(rank: int, length: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (length,), generator=generator).to(dtype)


LENGTHS = st.sampled_from([0, 1, 3, 1000, 8191, 8192, 20_001, 300_000])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool])


@settings(max_examples=25)
@given(n=st.integers(1, 4), path=st.sampled_from(PATHS), length=LENGTHS, dtype=DTYPES, seed=st.integers(0, 1000))
def test_a_sum_is_exact_for_integers_within_rounding_for_floats_and_the_same_on_all_ranks(
    n: int, path: str, length: int, dtype: torch.dtype, seed: int
) -> None:
    given_values = [values(rank, length, dtype, seed) for rank in range(n)]
    with Group(n, path) as group:
        got = group.each(lambda rank, one: summed(one, given_values[rank].clone()))
    assert all(torch.equal(one.view(torch.uint8), got[0].view(torch.uint8)) for one in got)
    if dtype.is_floating_point:
        wide = torch.stack([one.double() for one in given_values])
        bound = n * torch.finfo(dtype).eps * wide.abs().sum(0)
        assert ((got[0].double() - wide.sum(0)).abs() <= bound).all()
    else:
        want = given_values[0].clone()
        for one in given_values[1:]:
            want = want + one
        assert torch.equal(got[0], want)


def summed(group: TransportProcessGroup, tensor: Tensor) -> Tensor:
    group.allreduce([tensor], c10d.AllreduceOptions()).wait()
    return tensor


@pytest.mark.parametrize("length", [7, 100_000])
@pytest.mark.parametrize("name", ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_reductions_are_those_of_torch(name: str, length: int) -> None:
    is_bits = name.startswith("B")
    dtype = torch.int32 if is_bits else torch.float64
    given_values = [values(rank, length, dtype, 3) for rank in range(3)]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "SUM": lambda x: x.sum(0), "AVG": lambda x: x.mean(0), "PRODUCT": lambda x: x.prod(0),
        "MIN": lambda x: x.amin(0), "MAX": lambda x: x.amax(0), "BAND": lambda x: x[0] & x[1] & x[2],
        "BOR": lambda x: x[0] | x[1] | x[2], "BXOR": lambda x: x[0] ^ x[1] ^ x[2],
    }  # fmt: skip
    want = functions[name](torch.stack(given_values))
    opts = options(c10d.AllreduceOptions, reduceOp=getattr(dist.ReduceOp, name))

    def call(rank: int, one: TransportProcessGroup) -> list[Tensor]:
        whole, root, part = given_values[rank].clone(), given_values[rank].clone(), torch.empty(length, dtype=dtype)
        one.allreduce([whole], opts).wait()
        one.reduce([root], options(c10d.ReduceOptions, reduceOp=opts.reduceOp, rootRank=1)).wait()
        scatter = options(c10d.ReduceScatterOptions, reduceOp=opts.reduceOp)
        one.reduce_scatter_single(part, given_values[rank].repeat(3), scatter).wait()
        return [whole, part, *([root] if rank == 1 else [])]

    with Group(3) as group:
        for results in group.each(call):
            for result in results:
                torch.testing.assert_close(result, want, rtol=1e-12, atol=1e-12)


def test_bytes_pass_once_through_memory_or_in_fragments_through_sockets() -> None:
    for path in PATHS:
        with Group(2, path) as group:
            group.each(lambda rank, one: summed(one, torch.ones(100_000)))
            for one in group.groups:
                counters = one.communicator.counters
                passed = {"auto": counters.memory_bytes, "sockets": counters.socket_bytes}
                assert passed == {"auto": 0, "sockets": 0, path: 400_000}  # half of it to add, half of it to copy


def test_nan_and_infinity_are_passed_on() -> None:
    def call(rank: int, one: TransportProcessGroup) -> Tensor:
        tensor = torch.tensor([1.0, 2.0, 3.0])
        if rank == 1:
            tensor[0], tensor[1] = float("nan"), float("inf")
        return summed(one, tensor)

    with Group(2) as group:
        for got in group.each(call):
            assert got[0].isnan()
            assert got[1:].tolist() == [float("inf"), 6.0]


@settings(max_examples=15)
@given(n=st.integers(1, 4), path=st.sampled_from(PATHS), seed=st.integers(0, 1000), scale=st.sampled_from([1, 9000]))
def test_an_exchange_of_any_sizes_gives_every_rank_what_the_others_have_for_it(
    n: int, path: str, seed: int, scale: int
) -> None:
    sizes = np.random.default_rng(seed).integers(0, 4, (n, n)) * scale

    def call(rank: int, one: TransportProcessGroup) -> bool:
        sent = [torch.full((int(size),), 10 * rank + peer) for peer, size in enumerate(sizes[rank])]
        received = [torch.empty(int(sizes[peer][rank]), dtype=torch.int64) for peer in range(n)]
        one.alltoall(received, sent, c10d.AllToAllOptions()).wait()
        whole = torch.empty(int(sizes[:, rank].sum()), dtype=torch.int64)
        splits = [sizes[:, rank].tolist(), sizes[rank].tolist()]
        one.all_to_all_single(whole, torch.cat(sent), splits[0], splits[1], c10d.AllToAllOptions()).wait()
        return torch.equal(whole, torch.cat(received)) and all(
            (part == 10 * peer + rank).all() for peer, part in enumerate(received)
        )

    with Group(n, path) as group:
        assert group.each(call) == [True] * n


@settings(max_examples=25)
@given(n=st.integers(1, 4), path=st.sampled_from(PATHS), seed=st.integers(0, 1000), scale=st.sampled_from([1, 9000]))
def test_rows_whose_number_only_the_sender_knows_go_to_other_ranks_and_back(
    n: int, path: str, seed: int, scale: int
) -> None:
    sizes = torch.randint(0, 4, (n, n), generator=torch.Generator().manual_seed(seed)) * scale
    given = [[torch.full((size, 3), float(10 * rank + to)) for to, size in enumerate(sizes[rank])] for rank in range(n)]

    def call(rank: int, one: TransportProcessGroup) -> tuple[list[Tensor], list[Tensor]]:
        work, come = all_to_all_dynamic(one, given[rank])
        work.wait()
        work, back = all_to_all_dynamic(one, come)
        work.wait()
        return come, back

    with Group(n, path) as group:
        found = group.each(call)
        counters = [one.communicator.counters for one in group.groups]
    for rank, (come, back) in enumerate(found):
        assert all(torch.equal(part, given[peer][rank]) for peer, part in enumerate(come))
        assert all(map(torch.equal, back, given[rank]))
    if scale > 1:  # parts that do not travel with their offers: as many bytes pass as there are, and nothing else
        moved = int(sizes.sum() - sizes.diagonal().sum()) * 3 * 4
        assert sum(one.memory_bytes + one.socket_bytes for one in counters) == 2 * moved


def test_an_exchange_of_unknown_sizes_refuses_what_cannot_be() -> None:
    with Group(2) as group:
        for parts, said in (
            ([torch.zeros(1, 2)], r"parts are \[\[1, 2\]\] for 2 ranks"),
            ([torch.zeros(1, 2), torch.zeros(1, 3)], r"parts are \[\[1, 2\], \[1, 3\]\]"),
            ([torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int32)], "parts are"),
            ([torch.zeros(1, 0), torch.zeros(1, 0)], "rows without numbers"),
        ):
            with pytest.raises(PlanError, match=said):
                all_to_all_dynamic(group.groups[0], parts)

        def call(rank: int, one: TransportProcessGroup) -> None:
            parts = [torch.zeros(9, 3 if rank else 2)] * 2
            all_to_all_dynamic(one, parts, most_rows=20)[0].wait()

        error, _ = group.each(call)
    assert "offers 108 bytes to all_to_all_dynamic 0, which are no rows of rank 0, or too many" in str(error)
    with Group(2) as group:
        errors = group.each(lambda rank, one: all_to_all_dynamic(one, [torch.zeros(21, 1)] * 2, most_rows=20)[0].wait())
    assert "offers 84 bytes to all_to_all_dynamic 0, which are no rows" in str(errors)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("length", [0, 5, 50_000])
def test_what_is_gathered_scattered_and_broadcast_arrives(path: str, length: int) -> None:
    def call(rank: int, one: TransportProcessGroup) -> None:
        own, n = torch.full((length,), float(rank)), one.size()
        lists = [torch.empty(length) for _ in range(n)]
        one.allgather([lists], [own], c10d.AllgatherOptions()).wait()
        flat = torch.empty(n * length)
        one.all_gather_single(flat, own, c10d.AllgatherOptions()).wait()
        assert torch.equal(flat, torch.cat(lists))
        assert all((part == peer).all() for peer, part in enumerate(lists))
        root = options(c10d.GatherOptions, rootRank=1)
        gathered = [torch.empty(length) for _ in range(n)] if rank == 1 else []
        one.gather([gathered] if rank == 1 else [], [own], root).wait()
        assert rank != 1 or torch.equal(torch.cat(gathered), flat)
        got = torch.empty(length)
        one.scatter([got], [lists] if rank == 1 else [], options(c10d.ScatterOptions, rootRank=1)).wait()
        assert torch.equal(got, own)
        one.broadcast([got], options(c10d.BroadcastOptions, rootRank=2)).wait()
        assert (got == 2).all()
        one.barrier(c10d.BarrierOptions()).wait()

    with Group(3, path) as group:
        assert group.each(call) == [None] * 3


def test_several_tensors_travel_as_one_operation() -> None:
    def call(rank: int, one: TransportProcessGroup) -> None:
        tensors = [torch.full((size,), float(rank + 1)) for size in (3, 20_000, 7)]
        one.allreduce_coalesced(tensors, c10d.AllreduceCoalescedOptions()).wait()
        assert all((tensor == 6).all() for tensor in tensors)
        outputs = [torch.empty(3 * size) for size in (2, 9_000)]
        inputs = [torch.full((size,), float(rank)) for size in (2, 9_000)]
        one.all_gather_single_coalesced(outputs, inputs, c10d.AllgatherOptions()).wait()
        assert all(torch.equal(o.view(3, -1)[:, 0], torch.arange(3.0)) for o in outputs)

    with Group(3) as group:
        assert group.each(call) == [None] * 3


def test_operations_advance_while_nobody_waits_and_tell_their_future() -> None:
    def call(rank: int, one: TransportProcessGroup) -> float:
        tensors = [torch.full((50_000,), float(rank + 1)) for _ in range(4)]
        works = [one.allreduce([tensor], c10d.AllreduceOptions()) for tensor in tensors]
        told = threading.Event()
        works[-1].get_future().then(lambda future: told.set())
        assert told.wait(10)
        assert all(work.is_completed() for work in works)
        return float(sum(tensor[0] for tensor in tensors))

    with Group(2) as group:
        assert group.each(call) == [12.0, 12.0]


def test_a_future_may_begin_another_operation() -> None:
    def call(rank: int, one: TransportProcessGroup) -> float:
        first, second = torch.ones(20_000), torch.ones(20_000)

        def then(_: Any) -> float:
            summed(one, second)
            return float(second[0])

        return one.allreduce([first], c10d.AllreduceOptions()).get_future().then(then).wait()

    with Group(2) as group:
        assert group.each(call) == [2.0, 2.0]


def test_numbers_of_messages_pass_the_largest_of_32_bits() -> None:
    with Group(2) as group:
        sender, receiver = (one.communicator for one in group.groups)
        sender._numbers[1, 0] = itertools.count((1 << 32) - 1)
        receiver._progress.exchanges._matched[0, 0] = (1 << 32) - 1

        def call(rank: int, one: TransportProcessGroup) -> list[float]:
            got = []
            for value in (1.0, 2.0):
                tensor = torch.full((4,), value if rank == 0 else 0.0)
                (one.send([tensor], 1) if rank == 0 else one.recv([tensor], 0)).wait()
                got.append(float(tensor[0]))
            return got

        assert group.each(call) == [[1.0, 2.0]] * 2


def test_messages_that_leave_with_a_later_one_are_done() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with Group(2) as group, ours, theirs:
        communicator, part = group.groups[0].communicator, torch.ones(16 << 10, dtype=torch.uint8)
        assert communicator._driver.acquire(timeout=10)  # so that messages are sent here and now
        communicator._met.append(Meeting(1, ours, None))
        works = []

        def send() -> bool:
            works.append(group.groups[0].send([part], 1))
            communicator._admit()
            connection = communicator._peers[1].connection
            assert connection is not None
            return connection.has_outgoing

        while not send():
            pass
        with contextlib.suppress(BlockingIOError):
            while theirs.recv(1 << 20):
                pass
        assert not send()
        communicator._release()
        for work in works:
            work.wait(timedelta(seconds=5))


# --- what cannot be ------------------------------------------------------------------------------------------------


def differing(group: Group, calls: Sequence[Callable[[TransportProcessGroup], Any]]) -> list[str]:
    errors = group.each(lambda rank, one: calls[rank](one).wait())
    found = [error.what for error in errors if isinstance(error, TransportError)]
    assert found, errors  # who sends little may be done before the other sees it
    return found


@pytest.mark.parametrize("length", [4, 60_000])
def test_ranks_that_do_not_agree_are_told_what_the_other_does(length: int) -> None:
    reduce, gather = c10d.AllreduceOptions(), c10d.AllgatherOptions()
    cases: list[tuple[list[Callable[[TransportProcessGroup], Any]], str]] = [
        ([lambda g: g.allreduce([torch.ones(length)], reduce),
          lambda g: g.allreduce([torch.ones(length, dtype=torch.int32)], reduce)], "all_reduce of int32"),
        ([lambda g: g.allreduce([torch.ones(length)], reduce),
          lambda g: g.allreduce([torch.ones(length + 8)], reduce)], "bytes"),
        ([lambda g: g.allreduce([torch.ones(length)], reduce),
          lambda g: g.all_gather_single(torch.empty(2 * length), torch.ones(length), gather)], "all_gather"),
        ([lambda g: g.broadcast([torch.ones(length)], options(c10d.BroadcastOptions, rootRank=0)),
          lambda g: g.broadcast([torch.ones(length // 2)], options(c10d.BroadcastOptions, rootRank=0))], "bytes"),
    ]  # fmt: skip
    for calls, said in cases:
        with Group(2) as group:
            assert any(said in what for what in differing(group, calls))


def test_a_timeout_may_be_of_months() -> None:
    def call(rank: int, one: TransportProcessGroup) -> float:
        time.sleep(0.1 * rank)  # so that the other waits
        return float(summed(one, torch.ones(9))[0])

    with Group(2, timeout=timedelta(days=90)) as group:
        assert group.each(call) == [2.0, 2.0]


def test_a_rank_that_does_not_come_is_named() -> None:
    with Group(3, timeout=timedelta(seconds=4)) as group:
        begun = time.monotonic()
        errors = group.each(lambda rank, one: summed(one, torch.ones(9)) if rank < 2 else None)
        assert time.monotonic() - begun < 20
    assert "awaited: rank 2" in errors[0].what
    assert errors[2] is None


def test_an_error_of_what_is_computed_ends_the_operation() -> None:
    def failing() -> None:
        raise ArithmeticError("no sum")

    with Group(2) as group:

        def call(rank: int, one: TransportProcessGroup) -> None:
            operation = TransportOperation("barrier", signed("barrier"), [Local(run=failing)])
            one.communicator.start(operation)
            with pytest.raises(TransportError, match="ArithmeticError: no sum"):
                one.communicator.wait(operation)

        assert group.each(call) == [None, None]


def test_an_abort_ends_every_wait_at_once_and_the_first_reason_counts() -> None:
    with Group(3) as group:
        for one in group.groups:  # so that all are connected
            assert one.size() == 3
        group.each(lambda rank, one: summed(one, torch.ones(9)))

        def call(rank: int, one: TransportProcessGroup) -> float:
            if rank == 2:
                time.sleep(0.2)
                one.communicator.abort("the first reason")
                one.communicator.abort("the second reason")
                return time.monotonic()
            with pytest.raises(TransportError, match=r"rank 2 gave up: the first reason|rank 2 ended"):
                summed(one, torch.ones(9))
            return time.monotonic()

        ended = group.each(call)
    assert max(ended) - ended[2] < 5  # the limit of an operation is 20 s


def test_a_rank_that_has_just_come_hears_why_the_other_gave_up() -> None:
    ours, theirs = socket.socketpair()
    with Group(2) as group, ours, theirs:
        communicator = group.groups[0].communicator
        assert communicator._driver.acquire(timeout=10)  # so that the thread that drives does not begin
        waited = group.groups[0].recv([torch.ones(3)], 1)
        communicator._met.append(Meeting(1, ours, None))
        communicator._progress.give_up("rank 1 ended")
        communicator._fail()
        communicator._release()
        with pytest.raises(TransportError, match="rank 1 ended"):
            waited.wait()
        theirs.settimeout(10)
        said = theirs.recv(4096)
        assert TransportFrame.decode(said[:HEADER_BYTES]).kind == FrameKind.ABORT
        assert said[HEADER_BYTES:] == b"rank 1 ended"


def test_nobody_takes_bytes_that_changed_after_their_rank_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    original, asked, changed = PeerMemory._copy, threading.Event(), threading.Event()
    given, taken = torch.ones(30_000), torch.zeros(30_000)

    def copy(*arguments: Any) -> None:
        if arguments[-1] == given.nbytes:
            asked.set()
            assert changed.wait(10)
        original(*arguments)

    monkeypatch.setattr(PeerMemory, "_copy", copy)
    with Group(2) as group:

        def call(rank: int, one: TransportProcessGroup) -> None:
            if rank == 1:
                one.recv([taken], 0).wait()
                return
            work = one.send([given], 1)
            assert asked.wait(10)
            one.communicator.abort("the reason")
            with pytest.raises(TransportError, match="the reason"):
                work.wait()
            given.fill_(2)  # it is the caller's again
            changed.set()

        assert "the reason" in str(group.each(call)[1]), taken


@pytest.mark.parametrize("spans", [1, 2])
def test_memory_is_of_no_use_once_its_proof_was_withdrawn(spans: int) -> None:
    proof, there, here = MemoryProof(), torch.arange(20), torch.zeros(20, dtype=torch.int64)
    memory = seen_by_proof(proof.shown)
    assert memory is not None

    def read() -> None:
        sides = [[(part.data_ptr(), part.nbytes) for part in side.chunk(spans)] for side in (there, here)]
        memory.read_all(*sides)

    read()
    assert torch.equal(there, here)
    proof.withdraw()
    with pytest.raises(OSError, match="given up"):
        read()
    assert seen_by_proof(proof.shown) is None


@pytest.mark.parametrize(
    "shown", [None, [], [0, 0, "00" * 32], [1, 2, "00"], [-1, 8, "00" * 32], [os.getpid(), -8, "00" * 32],
              [os.getpid(), 1 << 80, "00" * 32], [os.getpid(), 4096, "00" * 32], [os.getpid(), 4096, "xy" * 32],
              ["1", 8, "00" * 32], [1 << 80, 8, "00" * 32]]
)  # fmt: skip
def test_a_proof_that_is_none_is_not_believed(shown: object) -> None:
    assert seen_by_proof(shown) is None


def test_a_group_that_was_destroyed_leaves_no_wait_of_others_undone() -> None:
    with Group(3) as group:
        group.each(lambda rank, one: summed(one, torch.ones(9)))
        group.groups[2].shutdown()

        def call(rank: int, one: TransportProcessGroup) -> float | None:
            if rank == 2:
                return None
            tensor = torch.full((30_000,), float(rank))
            (one.send([tensor], 1) if rank == 0 else one.recv([tensor], 0)).wait()  # needs rank 2 no more
            with pytest.raises(TransportError, match="rank 2"):
                summed(one, tensor)
            return float(tensor[0])

        assert group.each(call)[0] == 0.0


def test_what_cannot_be_carried_is_refused_by_name() -> None:
    reduce, negative = c10d.AllreduceOptions(), options(c10d.AllreduceOptions, timeout=timedelta(seconds=-5))
    average = options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.AVG)
    bits = options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.BAND)
    with Group(1) as group:
        one = group.groups[0]
        for call, said in (
            (lambda: one.allreduce([torch.ones(4, 4).t()], reduce), "not contiguous"),
            (lambda: one.allreduce([torch.ones(4, device="meta")], reduce), "meta"),
            (lambda: one.allreduce([torch.eye(3).to_sparse_csr()], reduce), "torch.sparse_csr on cpu cannot"),
            (lambda: one.allreduce([torch.eye(3).to_sparse()], average), "avg of sparse tensors"),
            (lambda: one.broadcast([torch.eye(3).to_sparse()], c10d.BroadcastOptions()), "not contiguous"),
            (lambda: one.allreduce([torch.ones(3)], negative), "timeout is -5 s"),
            (lambda: one.all_gather_single(torch.empty(3), torch.ones(4), c10d.AllgatherOptions()), "fit"),
            (lambda: one.alltoall([torch.ones(1)] * 2, [torch.ones(1)] * 2, c10d.AllToAllOptions()), "2 tensors for 1"),
            (lambda: one.all_to_all_single(torch.ones(3), torch.ones(3), [2], [3], c10d.AllToAllOptions()), "[2]"),
            (lambda: one.send([torch.ones(1)], 0), "itself"),
            (lambda: one.recv_anysource([torch.ones(1)]), "no other rank"),
            (lambda: one.allreduce_coalesced([], reduce), "got 0 tensors"),
            (lambda: one.allreduce([torch.ones(1, dtype=torch.int32)], average), "AVG of torch.int32"),
            (lambda: one.allreduce([torch.ones(1)], bits), "BAND of torch.float32"),
            (lambda: one.set_timeout(timedelta(0)), "timeout is 0 s"),
        ):  # fmt: skip
            with pytest.raises(PlanError, match=said.replace("[", r"\[")):
                call()
    with pytest.raises(PlanError, match="rank is 3 of 2"):
        Communicator(dist.HashStore(), 3, 2, timeout_s=1.0)
    with pytest.raises(PlanError, match="path is shared"):
        TransportProcessGroup(dist.HashStore(), 0, 1, TIMEOUT, options=TransportOptions("shared"))  # type: ignore[arg-type]


def test_frames_that_nobody_waits_for_are_refused_by_name() -> None:
    rank = VirtualNetwork(2, 0).ranks[0]
    sign = signed("all_reduce", torch.float32)
    for kind, said in (
        (FrameKind.TAKEN, "took what nobody offered"),
        (FrameKind.GET, "asked for bytes that nobody offered"),
        (FrameKind.DATA, "a fragment that nobody asked for"),
    ):
        frame = TransportFrame(kind, sign, 0, 0, 64, 16 if kind != FrameKind.TAKEN else 0)
        with pytest.raises(BrokenConnection, match=said):
            rank.arrived(1, frame, rank.place(1, frame))
    with pytest.raises(BrokenConnection, match="a frame of"):
        rank.place(1, TransportFrame(FrameKind.INLINE, sign, 0, 0, 1 << 30, 1 << 30))
    rank.post(
        TransportOperation(
            "all_reduce", sign, [Take(peer=1, index=0, views=[torch.empty(8, dtype=torch.uint8)])], sequence=0
        )
    )
    with pytest.raises(OperationFailed, match="offers to all_reduce 0 what rank 0 does not take"):
        rank.arrived(1, TransportFrame(FrameKind.OFFER, sign, 0, 5, 64, 0), memoryview(b""))


SENT: dict[FrameKind, tuple[str, int]] = {  # how bytes pass, and how many numbers, where such frames are sent
    FrameKind.INLINE: ("sockets", 100),
    FrameKind.OFFER: ("auto", 700_000),
    FrameKind.TAKEN: ("auto", 700_000),
    FrameKind.GET: ("sockets", 700_000),
    FrameKind.DATA: ("sockets", 700_000),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("fate", ["lost", "doubled", "late"])
def test_a_frame_that_is_lost_doubled_or_late_gives_an_error_or_the_sum(
    kind: FrameKind, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections lose nothing; a defect of this program would."""
    original, held, lock = Connection.send, [], threading.Lock()
    count = itertools.count()

    def send(self: Connection, frame: TransportFrame, *payload: memoryview) -> None:
        with lock:
            struck = frame.kind == kind and next(count) == 1
        if not struck or fate == "doubled":
            original(self, frame, *payload)
        if struck and fate == "doubled":
            original(self, frame, *payload)
        elif struck and fate == "late":
            held.append((self, frame, *payload))
        elif held and held[0][0] is self:
            original(*held.pop())

    path, length = SENT[kind]
    given = [torch.arange(length, dtype=torch.float32) * (rank + 1) for rank in range(2)]
    began = time.monotonic()
    with Group(2, path) as group:
        group.each(lambda rank, one: summed(one, torch.ones(9)))
        for one in group.groups:
            one.set_timeout(timedelta(seconds=3))
        monkeypatch.setattr(Connection, "send", send)
        found = [group.each(lambda rank, one: summed(one, given[rank].clone())) for _ in range(2)]
    assert next(count) > 1
    assert time.monotonic() - began < 60
    for results in found:
        for result in results:
            assert isinstance(result, TransportError) or torch.equal(result, given[0] + given[1])
    if fate == "lost":
        errors = [str(one) for results in found for one in results if isinstance(one, TransportError)]
        said = ("took longer than its timeout of 3 s; awaited: rank", "sent a fragment that nobody asked for")
        assert any(one in text for text in errors for one in said), found


def test_memory_that_was_freed_is_an_error_with_the_name_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offer, "spans", lambda self: [(4096, self.size)])  # no process has memory there
    with Group(2) as group:
        errors = group.each(lambda rank, one: summed(one, torch.ones(30_000)))
    assert all(isinstance(error, TransportError) for error in errors), errors
    assert "the memory of rank" in str(errors)
    assert "could not be read (Bad address)" in str(errors)


@pytest.mark.parametrize("met", [True, False])
def test_a_store_that_goes_away_stops_only_ranks_that_have_not_met(met: bool) -> None:
    limit = timedelta(seconds=10)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit) for _ in range(3)]
    with Group(3, timeout=timedelta(seconds=4), stores=stores) as group:
        if met:
            group.each(lambda rank, one: summed(one, torch.ones(9)))
        del server  # which closes all connections to it
        began = time.monotonic()
        found = group.each(lambda rank, one: summed(one, torch.ones(30_000)))
    assert time.monotonic() - began < 15
    for one in found:
        assert isinstance(one, TransportError) if not met else torch.equal(one, torch.full((30_000,), 3.0)), found


@pytest.mark.parametrize("place", range(0, 40, 3))
def test_a_corrupt_header_is_refused(place: int) -> None:
    text = bytearray(TransportFrame(FrameKind.OFFER, signed("barrier"), 3, 4, 5, 6).encode())
    text[place % len(text)] ^= 4
    with pytest.raises(BrokenConnection, match="corrupt"):
        TransportFrame.decode(text)
