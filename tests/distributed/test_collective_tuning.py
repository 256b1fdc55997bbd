"""Rules for the plans of collectives: results do not depend on them, files keep them, and timings make them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.distributed.collective_tuning import (
    CollectiveTuning,
    PlanTiming,
    TuningRule,
    candidates,
    gather_plan,
    read_tuning,
    rules_of,
    time_plans,
    write_tuning,
)
from cordillera.distributed.transport.process_group import TransportProcessGroup
from cordillera.errors import CordilleraError
from cordillera.planning.network.collective_algorithms import hierarchical_all_gather
from cordillera.planning.network.collective_plans import all_reduced, scattered, verify
from tests.distributed.test_transport import PATHS, Group

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def always(plan: str, ranks: int) -> CollectiveTuning:
    return CollectiveTuning(
        rules=tuple(TuningRule(collective=one, ranks=ranks, most_bytes=1 << 40, plan=plan) for one in COLLECTIVES)
    )


@settings(max_examples=40)
@given(
    n=st.sampled_from([1, 2, 3, 4, 6]),
    path=st.sampled_from(PATHS),
    size=st.sampled_from([0, 1, 7, 1000, 40_003]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_results_do_not_depend_on_the_plan_and_inputs_stay_as_they_are(
    n: int, path: str, size: int, seed: int, data: Any
) -> None:
    """Sums of whole numbers are exact; sizes differ between ranks where torch.distributed lets them."""
    plans = ["direct", "ring", "bidirectional", "doubling"] + [
        f"hierarchical-{k}" for k in range(1, n + 1) if n % k == 0
    ]
    tuning = always(data.draw(st.sampled_from(plans)), n)
    given = [torch.randint(-99, 99, (size,), generator=torch.Generator().manual_seed(seed + r)) for r in range(n)]

    def call(rank: int, one: TransportProcessGroup) -> None:
        one.tuning = tuning
        total = given[rank].clone()
        one.allreduce([total], dist.AllreduceOptions()).wait()
        assert torch.equal(total, sum(given[1:], given[0]))
        sizes = [(size + r) // (1 + r % 2) for r in range(n)]
        gathered = [torch.empty(length) for length in sizes]
        one.allgather([gathered], [torch.full((sizes[rank],), float(rank))]).wait()
        assert all((part == r).all() and len(part) == sizes[r] for r, part in enumerate(gathered))
        inputs = [torch.full((length,), float(10 * rank + r)) for r, length in enumerate(sizes)]
        output = torch.empty(sizes[rank])
        one.reduce_scatter([output], [inputs], dist.ReduceScatterOptions()).wait()
        assert (output == sum(10 * r + rank for r in range(n))).all()
        assert all((part == 10 * rank + r).all() for r, part in enumerate(inputs))

    with Group(n, path) as group:
        assert group.each(call) == [None] * n


@pytest.mark.parametrize("plan", ["ring", "bidirectional", "doubling", "hierarchical-2"])
def test_floats_are_within_the_rounding_of_their_sum_and_equal_on_all_ranks(plan: str) -> None:
    given = [torch.randn(30_001, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]

    def call(rank: int, one: TransportProcessGroup) -> torch.Tensor:
        one.tuning = always(plan, 4)
        total = given[rank].clone()
        one.allreduce([total], dist.AllreduceOptions()).wait()
        return total

    with Group(4) as group:
        found = group.each(call)
    exact = torch.stack(given).double().sum(0)
    bound = 4 * torch.finfo(torch.float32).eps * torch.stack(given).double().abs().sum(0)
    assert ((found[0].double() - exact).abs() <= bound).all()
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_ranks_with_different_rules_are_told() -> None:
    with Group(2) as group:

        def call(rank: int, one: TransportProcessGroup) -> None:
            one.tuning = always("ring" if rank else "direct", 2)
            one.allreduce([torch.ones(100_000)], dist.AllreduceOptions()).wait()

        errors = group.each(call)
    assert "all_reduce of float32 (sum, ring)" in str(errors[0])


@pytest.mark.parametrize(("hosts", "each"), [(1, 4), (2, 3), (4, 4), (3, 1), (5, 8)])
def test_between_groups_every_chunk_passes_once(hosts: int, each: int) -> None:
    plan = hierarchical_all_gather(hosts * each, each)
    for one in (plan, scattered(plan), all_reduced(plan)):
        verify(one)
    between = [
        (sent.target // each, chunk)
        for step in plan.steps
        for sent in step
        if sent.source // each != sent.target // each
        for chunk in sent.chunks
    ]
    assert len(between) == len(set(between)) == hosts * (hosts - 1) * each
    with pytest.raises(ValueError, match="cannot be divided into groups of 3"):
        hierarchical_all_gather(8, 3)


def test_the_narrowest_rule_that_fits_holds() -> None:
    rules = [("ring", 4, 1000), ("doubling", 4, 100), ("ring", 2, 10)]
    tuning = CollectiveTuning(
        rules=tuple(TuningRule(collective="all_reduce", ranks=n, most_bytes=b, plan=p) for p, n, b in rules)
    )
    found = [tuning.plan("all_reduce", 4, size) for size in (0, 100, 101, 1000, 1001, 1 << 20)]
    assert found == ["doubling", "doubling", "ring", "ring", "gathered", "direct"]
    assert tuning.plan("all_gather", 4, 50) == "direct"
    assert tuning.plan("all_reduce", 3, 32 << 10) == "gathered"


def test_rules_change_between_the_sizes_that_were_timed(tmp_path: Path) -> None:
    timings = [
        PlanTiming("all_reduce", size, {"direct": 2.0, "ring": 1.0}, plan)
        for size, plan in ((1 << 10, "gathered"), (1 << 14, "gathered"), (1 << 16, "ring"), (1 << 20, "direct"))
    ]
    tuning = rules_of([*timings, PlanTiming("all_gather", 1 << 10, {"direct": 1.0}, "direct")], 4)
    assert [(one.collective, one.most_bytes, one.plan) for one in tuning.rules] == [
        ("all_reduce", 1 << 15, "gathered"), ("all_reduce", 1 << 18, "ring"), ("all_reduce", 1 << 62, "direct"),
        ("all_gather", 1 << 62, "direct"),
    ]  # fmt: skip
    write_tuning(tuning, tmp_path / "t.toml", ["How it was made"])
    assert read_tuning(tmp_path / "t.toml") == tuning


RULE = '[[rules]]\ncollective = "all_reduce"\nranks = 4\nmost_bytes = 9\nplan = "ring"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules = 3", "rules must be"),
        (RULE.replace("ring", "star"), r"rules\[0\]\.plan"),
        (RULE.replace("ring", "hierarchical-3"), "no plan hierarchical-3 over 4 ranks"),
        (RULE.replace("all_reduce", "all_gather").replace("ring", "gathered"), "all_gather cannot be gathered"),
        (RULE.replace("most_bytes", "bytes"), "bytes"),
        (RULE.replace("= 4", "= 0"), r"rules\[0\]\.ranks"),
        (RULE.replace("= 4", f"= {10**12}"), r"rules\[0\]\.ranks"),
        (RULE.replace("ring", f"hierarchical-{'9' * 5000}"), r"rules\[0\]\.plan"),
        ("x = [", "TOML"),
    ],
)
def test_files_that_are_not_acceptable_are_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(CordilleraError, match=said) as error:
        read_tuning(tmp_path / "t.toml")
    assert "t.toml" in str(error.value)
    with pytest.raises(CordilleraError, match=r"u\.toml"):
        read_tuning(tmp_path / "u.toml")


def test_all_ranks_time_the_same_plans_and_choose_the_same() -> None:
    def call(rank: int, one: TransportProcessGroup) -> Any:
        before = one.tuning
        found = [time_plans(one, name, 8192, rounds=3) for name in COLLECTIVES]
        assert one.tuning is before
        return found

    with Group(4) as group:
        found = group.each(call)
    assert found[1:] == found[:-1]
    for name, one in zip(COLLECTIVES, found[0], strict=True):
        assert list(one.seconds) == candidates(name, 4, 8192)
        assert one.chosen in one.seconds
        assert min(one.seconds.values()) > 0
    assert found[0][0].usual == "gathered"
    assert set(found[0][0].seconds) == {"direct", "ring", "bidirectional", "doubling", "hierarchical-2", "gathered"}


def test_every_plan_is_timed_under_its_name_at_sizes_below_four_bytes_a_rank() -> None:
    ran = []

    class Recording:
        tuning = CollectiveTuning()

        def size(self) -> int:
            return 4

        def barrier(self) -> Any:
            return MagicMock()

        def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
            if self.tuning.rules:
                ran.append(self.tuning.plan("all_reduce", 4, tensors[0].nbytes))
            return MagicMock()

    one: Any = Recording()
    found = time_plans(one, "all_reduce", 4, rounds=1)
    assert set(ran) == set(found.seconds) == set(candidates("all_reduce", 4, 4))


def test_every_candidate_is_a_plan() -> None:
    for name, ranks in itertools.product(COLLECTIVES, (1, 2, 3, 4, 8, 12)):
        for plan in candidates(name, ranks, 1 << 20):
            assert gather_plan(plan, ranks).ranks == ranks
