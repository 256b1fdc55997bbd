"""Every plan is proved by the verifier and run exactly; what is broken is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.errors import PlanError
from cordillera.planning.network.collective_algorithms import (
    direct_all_gather,
    doubling_all_gather,
    plan_steps,
    ring_all_gather,
)
from cordillera.planning.network.collective_plans import (
    Chunk,
    CollectivePlan,
    Transfer,
    all_reduced,
    compose,
    reverse,
    scattered,
    verify,
)
from tests.planning.domain_plans import hierarchical_all_reduce
from tests.planning.executed_plans import buffer_size, execute

GATHERS: dict[str, Callable[[int], CollectivePlan]] = {
    "ring": ring_all_gather,
    "bidirectional": lambda n: ring_all_gather(n, bidirectional=True),
    "ring in another order": lambda n: ring_all_gather(n, order=[*range(1, n, 2), *range(0, n, 2)]),
    "doubling": doubling_all_gather,
    "direct": direct_all_gather,
}
MAKERS: dict[str, Callable[[int], CollectivePlan]] = {
    **{f"{name} all-gather": gather for name, gather in GATHERS.items()},
    **{f"{name} reduce-scatter": lambda n, g=gather: scattered(g(n)) for name, gather in GATHERS.items()},  # type: ignore[misc]
    **{f"{name} all-reduce": lambda n, g=gather: all_reduced(g(n)) for name, gather in GATHERS.items()},  # type: ignore[misc]
    "all-to-all": lambda n: CollectivePlan(
        "all-to-all",
        "direct",
        n,
        tuple(Chunk(1, source, target) for source in range(n) for target in range(n)),
        plan_steps([[Transfer(a, b, (a * n + b,), False) for a in range(n) for b in range(n) if a != b]]),
    ),
    "chain broadcast": lambda n: chain(n, n // 2),
    "chain reduce": lambda n: reverse(chain(n, 0), "reduce"),
}
DOMAINS = [[1], [4], [2, 2], [1, 1, 1], [2, 3], [1, 4], [3, 5, 4], [2, 2, 2, 2], [6, 1, 6], [7, 8, 9]]


def chain(n: int, root: int) -> CollectivePlan:
    """A broadcast along a chain in two chunks: each rank passes on a chunk while it receives the next."""
    steps = [
        [
            Transfer((rank + root) % n, (rank + 1 + root) % n, (s - rank,), False)
            for rank in range(max(0, s - 1), min(n - 1, s + 1))
        ]
        for s in range(n)
    ]
    return CollectivePlan("broadcast", "chain", n, (Chunk(1, root, None), Chunk(1, root, None)), plan_steps(steps))


def check(plan: CollectivePlan, n: int) -> None:
    """Verify it, run it on integers and compare with numpy."""
    verify(plan, n)
    random = np.random.default_rng(n)
    root = plan.chunks[0].origin
    length = n * 3 if plan.collective == "all-to-all" else 3 * buffer_size(plan) + 1
    if plan.collective == "all-gather":
        length = 5
    inputs = [random.integers(-(2**40), 2**40, length) for _ in range(n)]
    total = np.sum(inputs, axis=0)
    if plan.collective == "all-reduce":
        expected = [total] * n
    elif plan.collective == "all-gather":
        expected = [np.concatenate(inputs)] * n
    elif plan.collective == "reduce-scatter":
        assert [chunk.destination for chunk in plan.chunks] == list(range(n))
        ends = np.cumsum([chunk.size for chunk in plan.chunks])
        expected = np.split(total, [int(end * length // ends[-1]) for end in ends[:-1]])
    elif plan.collective == "all-to-all":
        blocks = np.reshape(inputs, (n, n, 3))
        expected = [blocks[:, rank].ravel() for rank in range(n)]
    elif plan.collective == "broadcast":
        assert root is not None
        expected = [inputs[root]] * n
    else:
        target = plan.chunks[0].destination
        expected = [total if rank == target else np.empty(0, np.int64) for rank in range(n)]
    before = [values.copy() for values in inputs]
    for got, wanted in zip(execute(plan, inputs), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    for values, copy in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(values, copy)


@pytest.mark.parametrize("name", MAKERS)
def test_every_collective_is_exact(name: str) -> None:
    for n in (*range(1, 10), 13, 16, 24):
        check(MAKERS[name](n), n)


@pytest.mark.parametrize("gather", [ring_all_gather, doubling_all_gather, direct_all_gather])
@pytest.mark.parametrize("sizes", DOMAINS, ids=str)
def test_hierarchical_all_reduce_is_exact_over_unequal_domains(
    sizes: list[int], gather: Callable[[int], CollectivePlan]
) -> None:
    check(hierarchical_all_reduce(sizes, gather), sum(sizes))


def test_hierarchical_all_reduce_crosses_with_one_copy_of_the_data_each_way() -> None:
    plan = hierarchical_all_reduce([3, 5])
    crossing = sum(
        plan.chunks[chunk].size
        for step in plan.steps
        for sent in step
        if sent.source < 3 <= sent.target
        for chunk in sent.chunks
    )
    assert crossing == buffer_size(plan)  # half of it to be reduced, half reduced


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 12, 16, 31])
def test_steps_and_bytes_are_as_few_as_published(n: int) -> None:
    logarithm = (n - 1).bit_length()
    steps = {
        "ring all-reduce": 2 * (n - 1),
        "bidirectional all-gather": n // 2,
        "doubling all-reduce": 2 * logarithm,
        "direct reduce-scatter": 1,
    }
    for name, count in steps.items():
        assert len(MAKERS[name](n).steps) == count, name
    for name in ("doubling all-gather", "ring all-gather", "doubling reduce-scatter", "direct reduce-scatter"):
        sent = np.zeros(n, int)
        for step in MAKERS[name](n).steps:
            for transfer in step:
                sent[transfer.source] += len(transfer.chunks)
        assert (sent == n - 1).all(), name


def test_halving_and_doubling_sends_little_far_and_much_near() -> None:
    plan = doubling_all_gather(8)
    assert [(abs(step[0].target - step[0].source), len(step[0].chunks)) for step in plan.steps] == [
        (4, 1),
        (2, 2),
        (1, 4),
    ]


def _without(plan: CollectivePlan, s: int, i: int) -> CollectivePlan:
    step = plan.steps[s]
    return replace(plan, steps=(*plan.steps[:s], step[:i] + step[i + 1 :], *plan.steps[s + 1 :]))


def _with(plan: CollectivePlan, s: int, sent: Transfer) -> CollectivePlan:
    return replace(plan, steps=(*plan.steps[:s], (*plan.steps[s], sent), *plan.steps[s + 1 :]))


def test_the_verifier_names_what_is_wrong() -> None:
    gather = ring_all_gather(4)
    reduce = compose(scattered(ring_all_gather(4, order=[3, 2, 1, 0])), gather, "all-reduce")
    direct = all_reduced(direct_all_gather(3))
    broken = [
        (_without(gather, 2, 0), r"rank 1, chunk 2: lacks the contributions of ranks \[2\]"),
        (_without(gather, 0, 0), r"step 1, rank 1 to rank 2: rank 1 does not have chunk 0 yet"),
        (_without(direct, 0, 0), r"rank 0, chunk 0: lacks the contributions of ranks \[1\]"),
        (
            _with(reduce, 3, Transfer(1, 2, (2,), True)),
            r"rank 2, chunk 2: has those of ranks \[0, 1, 3\] more than once",
        ),
        (_with(gather, 0, Transfer(0, 0, (0,), False)), "step 0, rank 0 to rank 0: a rank sends to itself"),
        (_with(gather, 0, Transfer(0, 4, (0,), False)), "there are only ranks 0 to 3"),
        (_with(gather, 0, Transfer(0, 2, (9,), False)), "there is no chunk 9"),
        (_with(gather, 0, Transfer(0, 2, (), False)), "nothing is sent"),
        (_with(gather, 0, Transfer(0, 1, (0,), False)), "chunk 0 of rank 1 is written twice in this step"),
        (replace(gather, chunks=(*gather.chunks[:3], Chunk(1, 7, None))), "chunk 3 belongs to rank 7"),
        (replace(gather, chunks=(*gather.chunks[:3], Chunk(0, 3, None))), "chunk 3 has size 0"),
        (replace(reduce, steps=reduce.steps[:-1]), "lacks the contributions"),
        (replace(reduce, steps=reduce.steps + reduce.steps[:1]), "more than once"),
    ]
    for plan, message in broken:
        with pytest.raises(PlanError, match=message):
            verify(plan)
    with pytest.raises(PlanError, match="ring all-gather over 4 ranks: it is not over 5 ranks"):
        verify(gather, 5)


@given(st.sampled_from(sorted(MAKERS)), st.integers(2, 8), st.data())
@settings(max_examples=60)
def test_no_transfer_can_be_left_out(name: str, n: int, data: st.DataObject) -> None:
    plan = MAKERS[name](n)
    s = data.draw(st.integers(0, len(plan.steps) - 1))
    i = data.draw(st.integers(0, len(plan.steps[s]) - 1))
    with pytest.raises(PlanError):
        verify(_without(plan, s, i))


def test_plans_that_do_not_fit_are_not_joined_or_turned() -> None:
    with pytest.raises(PlanError, match="cannot be run backwards"):
        reverse(all_reduced(ring_all_gather(3)), "all-reduce")
    with pytest.raises(PlanError, match="it is over 4 and 4"):
        compose(scattered(ring_all_gather(3)), ring_all_gather(4), "all-reduce")
    with pytest.raises(PlanError, match="chunk 0 starts elsewhere"):
        compose(ring_all_gather(3), ring_all_gather(3), "all-gather")


def test_impossible_arguments_are_refused_by_name() -> None:
    for gather in (ring_all_gather, doubling_all_gather, direct_all_gather):
        with pytest.raises(ValueError, match="n is 0"):
            gather(0)
    with pytest.raises(ValueError, match="order must name each of the 3 ranks once"):
        ring_all_gather(3, order=[0, 1, 1])
