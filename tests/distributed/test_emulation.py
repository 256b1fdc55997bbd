"""Groups on an emulated switch: sums are those of the plan, times those of the links, and every wait ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.distributed.transport.emulation import EmulatedFault, EmulatedGroup, EmulatedSwitch
from cordillera.distributed.transport.exchanges import INLINE_BYTES, FragmentLimits
from cordillera.distributed.transport.frames import HEADER_BYTES
from cordillera.distributed.transport.operations import Offer, Take, TransportOperation
from cordillera.distributed.transport.signatures import signed
from cordillera.errors import PlanError
from cordillera.planning.network.collective_algorithms import direct_all_gather, doubling_all_gather, ring_all_gather
from cordillera.planning.network.collective_plans import CollectivePlan, all_reduced, scattered
from tests.planning.executed_plans import execute

GATHERS = {"ring": ring_all_gather, "doubling": doubling_all_gather, "direct": direct_all_gather}
SWITCHES = st.builds(
    EmulatedSwitch,
    latency_s=st.floats(0, 1e-3),
    bytes_per_s=st.floats(1e6, 1e11),
    packet_bytes=st.integers(1 << 12, 1 << 20),
    frame_s=st.floats(0, 1e-4),
)
LIMITS = st.builds(
    FragmentLimits, fragment_bytes=st.integers(64, 4096).map(lambda n: 16 * n), of_transfer=st.integers(1, 5),
    of_rank=st.integers(1, 9),
)  # fmt: skip


def memory_of(plan: CollectivePlan, inputs: Sequence[Any]) -> list[list[Tensor]]:
    memory = []
    for rank in range(plan.ranks):
        held = plan.held_at_start(rank)
        parts = dict(zip(held, np.split(inputs[rank], len(held)), strict=True))
        length = len(inputs[0]) // len(plan.held_at_start(0))
        memory.append([torch.tensor(parts[i]) if i in parts else torch.zeros(length, dtype=torch.int64)
                       for i in range(len(plan.chunks))])  # fmt: skip
    return memory


@settings(max_examples=25)
@given(
    algorithm=st.sampled_from(sorted(GATHERS)), kind=st.sampled_from(["gather", "scatter", "reduce"]),
    n=st.integers(1, 9) | st.just(17), length=st.sampled_from([0, 1, 7, 5000]), switch=SWITCHES, limits=LIMITS,
    seed=st.integers(0, 999),
)  # fmt: skip
def test_plans_end_as_the_planner_says_on_any_switch(
    algorithm: str, kind: str, n: int, length: int, switch: EmulatedSwitch, limits: FragmentLimits, seed: int
) -> None:
    gather = GATHERS[algorithm](n)
    plan = {"gather": lambda: gather, "scatter": lambda: scattered(gather), "reduce": lambda: all_reduced(gather)}[
        kind
    ]()
    numbers = np.random.default_rng(seed)
    inputs = [numbers.integers(-(2**40), 2**40, length * len(plan.held_at_start(rank))) for rank in range(n)]
    memory, group = memory_of(plan, inputs), EmulatedGroup(n, switch, limits=limits)
    group.start(plan, memory, torch.add, timeout_s=1e6)
    group.run()
    assert [one.reason for one in group.progress] == [None] * n
    for rank, (chunks, want) in enumerate(zip(memory, execute(plan, inputs), strict=True)):
        assert np.array_equal(torch.cat([chunks[i] for i in plan.held_at_end(rank)]).numpy(), want)
        most = max(limits.fragment_bytes * (limits.of_rank + n), 1)
        assert group.progress[rank].exchanges.counters.peak_in_flight_bytes <= most
    assert all(0 <= end <= group.now_s for end in group.ended_s)


def passing(size: int, switch: EmulatedSwitch, limits: FragmentLimits | None = None) -> EmulatedGroup:
    group = EmulatedGroup(2, switch, limits=limits)
    data, got = torch.arange(size).to(torch.uint8), torch.zeros(size, dtype=torch.uint8)
    for rank, task in ((0, Offer(peer=1, views=[data])), (1, Take(peer=0, views=[got]))):
        group.post(rank, TransportOperation("broadcast", signed("broadcast"), [task]))
    group.run()
    assert torch.equal(data, got)
    return group


def test_a_message_takes_what_its_frames_take() -> None:
    """Worked out by hand: every packet is sent twice, by its rank and by the switch, while the next one comes."""
    switch = EmulatedSwitch(latency_s=1e-3, bytes_per_s=1e6, packet_bytes=1000, frame_s=1e-4)
    inline = INLINE_BYTES + HEADER_BYTES
    last = (inline - 1) % 1000 + 1
    seconds = inline / 1e6 + last / 1e6 + (1000 - last) / 1e6 + 1e-3 + 1e-4
    assert passing(INLINE_BYTES, switch).now_s == pytest.approx(seconds)
    # an offer, a request, and the data in one fragment
    size = INLINE_BYTES + 1
    control = 2 * HEADER_BYTES / 1e6 + 1e-3 + 1e-4
    request = 2 * (HEADER_BYTES + 16) / 1e6 + 1e-3 + 1e-4
    whole = size + HEADER_BYTES
    last = (whole - 1) % 1000 + 1
    data = whole / 1e6 + last / 1e6 + (1000 - last) / 1e6 + 1e-3 + 1e-4
    group = passing(size, switch)
    assert group.ended_s[1] == pytest.approx(control + request + data)
    assert group.ended_s[0] == pytest.approx(control + request + data + control)


@settings(max_examples=30)
@given(senders=st.integers(1, 12), size=st.integers(20_000, 400_000), limits=LIMITS)
def test_what_waits_in_the_switch_is_no_more_than_what_is_on_its_way(
    senders: int, size: int, limits: FragmentLimits
) -> None:
    group = EmulatedGroup(senders + 1, EmulatedSwitch(packet_bytes=4096), limits=limits)
    takes = [Take(peer=rank, views=[torch.zeros(size, dtype=torch.uint8)]) for rank in range(1, senders + 1)]
    for rank in range(1, senders + 1):
        offer = Offer(peer=0, views=[torch.ones(size, dtype=torch.uint8)])
        group.post(rank, TransportOperation("gather", signed("gather"), [offer]))
    group.post(0, TransportOperation("gather", signed("gather"), takes))  # type: ignore[arg-type]
    group.run()
    assert all(bool((take.views[0] == 1).all()) for take in takes)
    peak = group.progress[0].exchanges.counters.peak_in_flight_bytes
    assert peak <= limits.fragment_bytes * (limits.of_rank + senders)
    headers = HEADER_BYTES * (peak // limits.fragment_bytes + 2 * senders)
    assert group.peak_queue_bytes <= peak + headers


FATES = st.sampled_from(["ends", "stops", "loses"])


@settings(max_examples=30)
@given(
    algorithm=st.sampled_from(["ring", "doubling"]), n=st.sampled_from([2, 3, 5, 16]), fate=FATES,
    when=st.floats(0, 1.2), victim=st.integers(0, 10**6), length=st.sampled_from([1, 9000]),
)  # fmt: skip
def test_whatever_happens_to_a_rank_every_wait_of_the_others_ends_in_time_with_one_reason(
    algorithm: str, n: int, fate: Any, when: float, victim: int, length: int
) -> None:
    plan = all_reduced(GATHERS[algorithm](n))
    healthy = EmulatedGroup(n)
    healthy.start(plan, memory_of(plan, [np.ones(length * n, dtype=np.int64)] * n), torch.add)
    healthy.run()
    deadline_s = 2 * healthy.now_s
    struck = victim % n
    fault = EmulatedFault(struck, when * healthy.now_s, fate)
    group = EmulatedGroup(n, faults=[fault])
    memory = memory_of(plan, [np.ones(length * n, dtype=np.int64)] * n)
    group.start(plan, memory, torch.add, timeout_s=deadline_s)
    operations = [next(iter(one.running), None) for one in group.progress]
    group.run()
    alive = [rank for rank in range(n) if rank != struck or fate == "loses"]
    for rank in alive:
        assert not group.progress[rank].running
        assert group.ended_s[rank] <= deadline_s + 1e-3
        operation = operations[rank]
        if operation is not None and operation.error is not None:
            assert str(operation.error).count("rank") >= 1
        else:
            assert all(bool((chunk == n).all()) for chunk in memory[rank])
    failed = [rank for rank in alive if group.progress[rank].reason is not None]
    if failed and fate == "ends":
        said = {group.progress[rank].reason for rank in failed}
        assert said <= {f"rank {struck} ended its connection", f"rank {struck} could not be reached"}
    if when > 1.1:
        assert not failed


def test_a_thousand_ranks_end_with_the_reason_of_the_first() -> None:
    n = 1024
    group = EmulatedGroup(n, faults=[EmulatedFault(500, 1e-4, "ends")])
    values = [torch.zeros(1) for _ in range(n)]
    operations = []
    for rank in range(n):  # a value is passed from rank to rank
        take = Take(peer=rank - 1, views=[values[rank].view(torch.uint8)]) if rank else None
        offer = Offer(peer=rank + 1, views=[values[rank].view(torch.uint8)]) if rank + 1 < n else None
        tasks: list[Any] = [one for one in (take, offer) if one is not None]
        if take is not None and offer is not None:
            offer.after(take)
        operations.append(TransportOperation("broadcast", signed("broadcast", torch.float32), tasks, timeout_s=1.0))
    for rank, operation in enumerate(operations):
        group.post(rank, operation)
    group.run()
    reasons = {one.reason for rank, one in enumerate(group.progress) if rank > 500}
    assert reasons == {"rank 500 ended its connection"}
    assert max(end for rank, end in enumerate(group.ended_s) if rank > 500 and not math.isnan(end)) < 0.1


def test_arguments_are_refused_by_name() -> None:
    for name, value in (("latency_s", -1.0), ("bytes_per_s", 0.0), ("packet_bytes", 0), ("frame_s", math.inf)):
        with pytest.raises(PlanError, match=name):
            EmulatedSwitch(**{name: value})
    with pytest.raises(PlanError, match="0 ranks"):
        EmulatedGroup(0)
    with pytest.raises(PlanError, match="is of no rank"):
        EmulatedGroup(2, faults=[EmulatedFault(2, 0.0, "ends")])
    with pytest.raises(PlanError, match="not over 3 ranks"):
        EmulatedGroup(3).start(ring_all_gather(2), [])
