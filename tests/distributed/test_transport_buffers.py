"""Buffers that overlap, messages from any rank, barriers that name who is absent, sparse sums."""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.distributed.tracing.flight_recorder import read_traces, write_trace
from cordillera.distributed.tracing.rank_trace import ANY_RANK
from cordillera.distributed.transport import communicator
from cordillera.distributed.transport.exchanges import OperationFailed
from cordillera.distributed.transport.operations import Offer, Take, TransportOperation
from cordillera.distributed.transport.process_group import TransportProcessGroup
from cordillera.distributed.transport.progress import TransportError
from cordillera.distributed.transport.signatures import signed
from cordillera.distributed.transport.tensors import refuse_overlaps
from cordillera.distributed.transport.tracer import TRACES, OperationTracer, rank_trace
from cordillera.distributed.transport.verbs import Window
from cordillera.errors import PlanError
from tests.distributed.test_transport import PATHS, Group, VirtualNetwork, message, options

SPANS = st.tuples(st.integers(0, 20), st.integers(0, 5))


@settings(max_examples=400)
@given(outputs=st.lists(SPANS, max_size=5), inputs=st.lists(SPANS, max_size=5), kept=st.integers(0, 4))
def test_overlaps_are_refused_exactly_where_an_element_is_in_two_places(
    outputs: list[tuple[int, int]], inputs: list[tuple[int, int]], kept: int
) -> None:
    memory = torch.zeros(30, dtype=torch.int32)

    def elements(span: tuple[int, int]) -> set[int]:
        return set(range(span[0], span[0] + span[1]))

    def part(span: tuple[int, int]) -> Tensor:
        return memory[span[0] : span[0] + span[1]]

    pair = (inputs[kept], outputs[kept]) if kept < min(len(inputs), len(outputs)) else None
    wrong = any(elements(one) & elements(other) for at, one in enumerate(outputs) for other in outputs[:at])
    for one in inputs:
        is_copy = pair is not None and pair[0] == pair[1] and one == pair[0]
        wrong |= not is_copy and any(elements(one) & elements(other) for other in outputs)
    pairs = [] if pair is None else [(part(pair[0]), part(pair[1]))]
    with pytest.raises(PlanError, match="overlap") if wrong else contextlib.nullcontext():
        refuse_overlaps("all_gather", [part(one) for one in outputs], [part(one) for one in inputs], pairs)


def test_collectives_refuse_overlapping_buffers_by_name_and_take_those_in_place() -> None:
    x = torch.arange(12.0)
    two, other = [x[:4], x[2:6]], [torch.zeros(4), torch.zeros(4)]
    refused: list[tuple[Callable[[TransportProcessGroup], Any], str]] = [
        (lambda one: one.allgather([two], [torch.ones(4)], c10d.AllgatherOptions()), "all_gather: outputs 0 and 1"),
        (lambda one: one.allgather([[x[:4], x[4:8]]], [x[2:6]], c10d.AllgatherOptions()), "input 0 overlaps output"),
        (lambda one: one.all_gather_single(x[:8], x[1:5], c10d.AllgatherOptions()), "input 0 overlaps output 1"),
        (lambda one: one.alltoall(other, [other[1], other[0]], c10d.AllToAllOptions()), "input 0 overlaps output 1"),
        (lambda one: one.all_to_all_single(x, x, None, None, c10d.AllToAllOptions()), "all_to_all: input 1 overlaps"),
        (lambda one: one.all_to_all_single(x[:8], x[2:10], None, None, c10d.AllToAllOptions()), "overlaps output"),
        (lambda one: one.reduce_scatter_single(x[3:9], x, c10d.ReduceScatterOptions()), "input 0 overlaps output 0"),
        (lambda one: one.reduce_scatter_single(x[6:12], x, c10d.ReduceScatterOptions()), "input 1 overlaps output 0"),
        (lambda one: one.allreduce_coalesced(two, c10d.AllreduceOptions()), "all_reduce: outputs 0 and 1 overlap"),
        (lambda one: one.gather([two], [torch.ones(4)], options(c10d.GatherOptions, rootRank=0)), "gather: outputs"),
        (lambda one: one.scatter([x[:4]], [two], options(c10d.ScatterOptions, rootRank=0)), "scatter: input 1"),
    ]
    with Group(2) as group:
        for call, said in refused:
            with pytest.raises(PlanError, match=said):
                call(group.groups[0])

        def in_place(rank: int, one: TransportProcessGroup) -> list[list[float]]:
            gathered = torch.full((4,), 10.0 * rank)
            one.all_gather_single(gathered, gathered[2 * rank : 2 * rank + 2], c10d.AllgatherOptions()).wait()
            given_ = torch.arange(4.0) + rank
            one.reduce_scatter_single(given_[2 * rank : 2 * rank + 2], given_, c10d.ReduceScatterOptions()).wait()
            sent = [torch.full((1,), float(rank))] * 2  # inputs may overlap each other
            got = torch.zeros(2)
            one.alltoall([got[:1], got[1:]], sent, c10d.AllToAllOptions()).wait()
            return [gathered.tolist(), given_[2 * rank : 2 * rank + 2].tolist(), got.tolist()]

        assert group.each(in_place) == [
            [[0.0, 0.0, 10.0, 10.0], [1.0, 3.0], [0.0, 1.0]],
            [[0.0, 0.0, 10.0, 10.0], [5.0, 7.0], [0.0, 1.0]],
        ]


@settings(max_examples=200)
@given(seed=st.integers(0, 2**31), senders=st.integers(1, 4), sent=st.integers(1, 5), size=st.sampled_from([9, 40_000]))
def test_a_message_goes_to_the_first_of_those_that_wait_for_it(seed: int, senders: int, sent: int, size: int) -> None:
    chance = random.Random(seed)
    network, target = VirtualNetwork(senders + 1, seed), senders
    queues: dict[int, deque[TransportOperation]] = {rank: deque() for rank in range(senders + 1)}
    for rank in range(senders):
        for number in range(sent):
            value = torch.full((size,), 10 * rank + number, dtype=torch.uint8)
            queues[rank].append(message(Offer(peer=target, index=number, views=[value]), tag=3))
    places, wanted = [], []
    for _ in range(senders * sent + chance.randrange(3)):
        wanted.append(chance.choice([*range(senders), ANY_RANK, ANY_RANK]))
        places.append(torch.full((size,), 255, dtype=torch.uint8))
        sources = set(range(senders)) if wanted[-1] == ANY_RANK else set()
        queues[target].append(message(Take(peer=wanted[-1], views=[places[-1]], sources=sources), tag=3))
    receives = list(queues[target])
    while ready := [rank for rank, queue in queues.items() if queue]:
        rank = chance.choice(ready)
        network.ranks[rank].post(queues[rank].popleft())
        if chance.random() < 0.3:
            network.run()
    network.run()
    last = dict.fromkeys(range(senders), -1)
    got = dict.fromkeys(range(senders), 0)
    for place, source, operation in zip(places, wanted, receives, strict=True):
        if operation not in network.done:
            continue
        assert (place == place[0]).all()
        rank, number = divmod(int(place[0]), 10)
        task = operation.tasks[0]
        assert isinstance(task, Take)
        assert task.peer == rank  # also if any rank could send it
        assert source in (rank, ANY_RANK)
        assert task.index == number == last[rank] + 1  # messages of a rank do not overtake each other
        last[rank], got[rank] = number, got[rank] + 1
    for source, operation in zip(wanted, receives, strict=True):
        task = operation.tasks[0]
        if operation not in network.done and source != ANY_RANK:  # for traces, as if nothing took what will come
            assert isinstance(task, Take)
            last[source] += 1
            assert task.index == last[source]
    waiting = {source for source, one in zip(wanted, receives, strict=True) if one not in network.done}
    for rank in range(senders):  # nothing waits for what is there
        assert got[rank] == sent or waiting.isdisjoint({rank, ANY_RANK})


def test_an_offer_that_comes_twice_is_refused() -> None:
    network = VirtualNetwork(2, 0)
    place = torch.zeros(9, dtype=torch.uint8)
    network.ranks[0].post(message(Offer(peer=1, views=[place]), tag=3))
    frame, data = network.queues[0, 1][0]
    network.ranks[1].post(message(Take(peer=ANY_RANK, views=[place], sources={0}), tag=3))
    network.ranks[1].arrived(0, frame, memoryview(bytearray(data)))
    with pytest.raises(Exception, match="sent an offer twice"):
        network.ranks[1].arrived(0, frame, memoryview(bytearray(data)))


@pytest.mark.parametrize("path", PATHS)
def test_messages_from_any_rank_name_their_sender(path: str) -> None:
    def call(rank: int, one: TransportProcessGroup) -> Any:
        if rank:
            one.send([torch.full((30_000,), float(rank))], 0, 7).wait()
            return None
        found = []
        for _ in range(2):
            tensor = torch.zeros(30_000)
            work = one.recv_anysource([tensor], 7)
            work.wait()
            assert (tensor == work.source_rank()).all()
            found.append(work.source_rank())
        return sorted(found)

    with Group(3, path) as group:
        assert group.each(call)[0] == [1, 2]


def test_a_message_from_any_rank_is_given_up_when_all_others_are_gone_or_time_is_over() -> None:
    with Group(3) as group:
        group.each(lambda rank, one: one.barrier(c10d.BarrierOptions()).wait())
        group.groups[0].set_timeout(timedelta(seconds=1))
        work = group.groups[0].recv_anysource([torch.zeros(1)])
        group.groups[1].shutdown()
        with pytest.raises(TransportError, match="took longer than its timeout of 1 s; awaited: any rank"):
            work.wait()
    with Group(3) as group:
        group.each(lambda rank, one: one.barrier(c10d.BarrierOptions()).wait())
        work = group.groups[0].recv_anysource([torch.zeros(1)])
        group.groups[1].shutdown()
        group.groups[2].shutdown()
        with pytest.raises(TransportError, match=r"rank [12] ended its connection"):
            work.wait()
    network = VirtualNetwork(2, 0)
    network.ranks[0].post(message(Take(peer=ANY_RANK, views=[torch.zeros(1)], sources={1}), tag=0))
    assert network.ranks[0].lost(1) == 1
    network.ranks[0].post(message(Take(peer=ANY_RANK, views=[torch.zeros(1)], sources={1, 2}), tag=0))
    assert network.ranks[0].lost(1) == 0

    def refuse(peer: int, operation: TransportOperation) -> bool:
        raise OperationFailed(f"rank {peer} is gone")

    network.ranks[0]._wire.open = refuse  # type: ignore[method-assign]
    with pytest.raises(OperationFailed, match="rank 2 is gone"):
        network.ranks[0].post(message(Take(peer=ANY_RANK, views=[torch.zeros(1)], sources={1, 2}), tag=0))


def test_what_is_called_at_the_end_of_an_operation_may_wait_for_others() -> None:
    started = options(c10d.AllreduceOptions, asyncOp=True)

    def nested(one: TransportProcessGroup, depth: int) -> Any:
        tensor = torch.full((30_000,), float(depth))
        future = one.allreduce([tensor], started).get_future()
        if not depth:
            return future.then(lambda done: float(done.value()[0][0]))
        return future.then(lambda done: float(done.value()[0][0]) + nested(one, depth - 1).wait())

    with Group(2) as group:
        for _ in range(20):
            assert group.each(lambda rank, one: nested(one, 3).wait()) == [12.0, 12.0]


def test_a_monitored_barrier_names_the_first_or_all_who_are_absent() -> None:
    for every, said in ((False, "Rank 1 failed to pass monitoredBarrier"), (True, "Ranks 1, 3 failed to pass")):

        def call(rank: int, one: TransportProcessGroup, every: bool = every) -> None:
            one.monitored_barrier()
            if rank % 2 == 0:
                one.monitored_barrier(timedelta(seconds=3), every)

        with Group(4) as group:
            first, _, third, _ = group.each(call)
        assert said in str(first)
        assert "Rank 2 successfully reached monitoredBarrier, but received errors" in str(third)
        assert isinstance(first, TransportError)
        assert isinstance(third, TransportError)
    with Group(2) as group, pytest.raises(TransportError, match="Rank 1 timed out in monitoredBarrier"):
        group.groups[1].monitored_barrier(timedelta(0))


@settings(max_examples=20)
@given(n=st.integers(1, 4), path=st.sampled_from(PATHS), seed=st.integers(0, 1000), most=st.sampled_from([0, 3, 900]))
def test_sparse_sums_equal_dense_ones_and_are_the_same_on_all_ranks(n: int, path: str, seed: int, most: int) -> None:
    def part(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        count = int(torch.randint(0, most + 1, (1,), generator=generator))
        rows = torch.randint(0, 50, (2, count), generator=generator)  # some of them twice
        return torch.sparse_coo_tensor(
            rows, torch.randn(count, 3, generator=generator), (50, 50, 3), check_invariants=True
        )

    def call(rank: int, one: TransportProcessGroup) -> Tensor:
        tensor = part(rank)
        assert one.allreduce([tensor], c10d.AllreduceOptions()).wait()
        return tensor.to_dense()

    with Group(n, path) as group:
        got = group.each(call)
    want = sum(part(rank).double().to_dense() for rank in range(n))
    assert all(torch.equal(one, got[0]) for one in got)
    torch.testing.assert_close(got[0].double(), want, rtol=1e-5, atol=1e-5)


def test_sparse_tensors_of_different_shapes_are_an_error_that_names_both() -> None:
    for shapes, said in (((3, 4), "[4, 4] with 1 sparse dimensions"), ((3, (3, 3, 3)), "bytes")):

        def call(rank: int, one: TransportProcessGroup, shapes: tuple[Any, Any] = shapes) -> None:
            shape = shapes[rank]
            tensor = (torch.ones(shape) if isinstance(shape, tuple) else torch.eye(shape)).to_sparse(1)
            one.allreduce([tensor], c10d.AllreduceOptions()).wait()

        with Group(2) as group:
            errors = group.each(call)
        assert all(isinstance(error, TransportError) for error in errors)
        assert said in str(errors[0])


def test_times_of_all_groups_of_a_trace_are_of_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**18, 2 * 10**18, 10**8))
    monkeypatch.setattr("cordillera.distributed.transport.tracer.time.time_ns", lambda: next(clock))  # 0.1 s a look
    tracers = [OperationTracer(name, (0, 1)) for name in ("pair", "all")]
    for tracer in tracers:
        tracer.ended(TransportOperation("all_reduce", signed("all_reduce"), [], sequence=0))
    found = rank_trace([(tracer, ()) for tracer in tracers], 0)
    first, second = found.collectives
    assert first.communicator == "pair"
    assert second.enqueued_ns - first.enqueued_ns < 5e7
    assert found.written_ns is not None
    assert 0 <= found.written_ns - (second.ended_ns or 0) < 5e7


def test_traces_of_windows_are_read_and_sizes_are_in_elements(tmp_path: Path) -> None:
    def call(rank: int, one: TransportProcessGroup) -> None:
        one.allreduce([torch.ones(6, dtype=torch.float64)], c10d.AllreduceOptions()).wait()
        with Window(one, torch.zeros(4)) as window:
            (window.signal if rank == 0 else window.wait_signal)(1 - rank)

    with Group(2) as group:
        assert group.each(call) == [None, None]
        for rank, one in enumerate(group.groups):
            write_trace(rank_trace([(one.communicator._tracer, ())], rank), tmp_path)
    sent, taken = read_traces(tmp_path)
    assert [one.input_sizes for one in sent.collectives if one.op == "all_reduce"] == [((6,),)]
    ((signal,), (wait,)) = ([one for one in found.collectives if one.peer is not None] for found in (sent, taken))
    assert (signal.op, wait.op, signal.channel) == ("send", "recv", wait.channel)
    assert signal.channel is not None


def test_a_trace_holds_nothing_of_an_earlier_job_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, fresh in (("_LIVE", weakref.WeakSet()), ("_LEFT", deque()), ("_GAVE_UP", threading.Event())):
        monkeypatch.setattr(communicator, name, fresh)
    for job in ("first", "second"):
        (tmp_path / job).mkdir()
        monkeypatch.setenv(TRACES, str(tmp_path / job))
        with Group(1) as group:
            group.each(lambda rank, one: one.barrier(c10d.BarrierOptions()).wait())
        (trace,) = read_traces(tmp_path / job)
        assert [one.op for one in trace.collectives] == ["barrier"]
