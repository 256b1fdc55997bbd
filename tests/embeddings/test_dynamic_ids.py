"""The map from ids to rows: against a dictionary, and what admission, eviction and states promise."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.embeddings.dynamic_ids import DynamicRowsConfig, IdMap
from cordillera.errors import CheckpointError, DataError

pytest.importorskip("numba")


def ids(seed: int, count: int = 60, among: int = 40) -> Tensor:
    """Ids over the whole range of int64, negative ones and 0 included."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-among // 2, among // 2, (count,), generator=generator)) * (2**57 + 12345)


def parts(count: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([0, count // 3, count // 3, count]), torch.tensor([1, 2, 0])


def run(index: IdMap, seeds: range, evict: bool = False) -> list[Tensor]:
    found = []
    for seed in seeds:
        batch = ids(seed)
        found.append(index.find_or_insert(batch, *parts(batch.numel())).rows)
        index.clock += 1
        if evict and index.clock % 3 == 0:
            index.evict()
    return found


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(-5, 5)), max_size=30), max_size=12),
    st.integers(1, 4),
    st.sampled_from([None, 1, 3]),
)
def test_rows_are_those_of_a_dictionary(
    calls: list[list[tuple[int, int]]], min_count: int, max_age: int | None
) -> None:
    index = IdMap(3, DynamicRowsConfig(min_count=min_count, max_age=max_age), capacity=3)
    rows: dict[tuple[int, int], int] = {}
    counts: dict[tuple[int, int], int] = defaultdict(int)
    last: dict[tuple[int, int], int] = {}
    for clock, call in enumerate(calls):
        call = sorted(call, key=lambda pair: pair[0])
        tables = [table for table, _ in call]
        bounds = torch.tensor([sum(t < table for t in tables) for table in range(4)])
        found = index.find_or_insert(torch.tensor([key for _, key in call], dtype=torch.int64), bounds, torch.arange(3))
        for pair in call:
            last[pair] = clock + 1
            if pair not in rows:
                counts[pair] += 1
                if counts[pair] >= min_count:
                    rows[pair] = next(row for row in range(3, 1000) if row not in rows.values())
        assert found.rows.tolist() == [rows.get(pair, pair[0]) for pair in call]
        index.clock = clock + 1
        if max_age is not None and clock % 2:
            gone = [pair for pair, used in last.items() if index.clock - used > max_age]
            assert index.evict().tolist() == sorted(rows[pair] for pair in gone if pair in rows)
            for pair in gone:
                del last[pair]
                rows.pop(pair, None)
                counts.pop(pair, None)
    assert index.num_rows == 3 + len(rows)


def test_finding_changes_nothing_and_knows_no_collisions() -> None:
    index = IdMap(capacity=4)
    keys = torch.cat([torch.arange(50_000), torch.arange(50_000) << 32, -torch.arange(1, 50_000)]).unique()
    rows = index.find_or_insert(keys).rows
    assert rows.unique().numel() == keys.numel()
    before = index.state()
    assert torch.equal(index.find(keys), rows)
    assert index.find(torch.tensor([2**40 + 5])).tolist() == [-1]
    assert index.find(torch.tensor([2**40 + 5]), shared=True).tolist() == [0]
    assert all(torch.equal(before[name], tensor) for name, tensor in index.state().items())


def test_an_id_as_uint64_is_the_same_bits() -> None:
    index = IdMap()
    rows = index.find_or_insert(torch.tensor([-1, 5])).rows
    assert torch.equal(index.find(torch.tensor([2**64 - 1, 5], dtype=torch.uint64)), rows)


def test_threads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    import cordillera.kernels.numba_support as support

    def states(threads: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        monkeypatch.setattr(support, "threads_for", lambda values: threads)
        index = IdMap(3, DynamicRowsConfig(min_count=2, max_age=4), capacity=4)
        return run(index, range(12), evict=True), index.state()

    one, two = states(1), states(2)
    assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])


def test_the_least_used_go_first_and_those_of_the_last_update_stay() -> None:
    index = IdMap(config=DynamicRowsConfig(max_rows=2, evict_by="use"), capacity=8)
    for batch in ([1, 1, 1], [2, 3], [2], [3], [3, 4]):
        index.find_or_insert(torch.tensor(batch))
        index.clock += 1
    evicted = index.evict()
    assert index.find(torch.tensor([1, 2, 3, 4])).tolist() == [-1, -1, 3, 4]
    assert evicted.tolist() == [1, 2]
    assert index.find_or_insert(torch.tensor([9, 8, 7])).rows.tolist() == [1, 2, 5]  # the lowest free rows first


@pytest.mark.parametrize("evict", [False, True])
def test_a_loaded_state_goes_on_as_the_original(evict: bool) -> None:
    config = DynamicRowsConfig(min_count=2, max_age=2)
    first, second = IdMap(3, config, capacity=4), IdMap(3, config, capacity=100)
    run(first, range(10), evict)
    second.load(first.state())
    second.clock = first.clock
    for a, b in zip(run(first, range(10, 20), evict), run(second, range(10, 20), evict), strict=True):
        assert torch.equal(a, b)


def test_changes_are_known_for_as_long_as_removed_ids_are_kept() -> None:
    index = IdMap(config=DynamicRowsConfig(max_age=1, keep_removed=3), capacity=8)
    for number in range(6):
        index.find_or_insert(torch.tensor([number]))
        index.clock += 1
        index.evict()
    for since in (3, 4, 5, 6):
        index.changes(since)
    for since in (2, 0, 7, -1):
        with pytest.raises(CheckpointError, match="are not known"):
            index.changes(since)


def test_impossible_states_are_refused_and_leave_the_map_as_it_was() -> None:
    index = IdMap(3, DynamicRowsConfig(min_count=2))
    run(index, range(4))
    before = index.state()
    twice = {**before, "row_ids": before["row_ids"].clone(), "row_tables": before["row_tables"].clone()}
    twice["row_ids"][4], twice["row_tables"][4] = before["row_ids"][3], before["row_tables"][3]
    foreign = {**before, "row_tables": before["row_tables"] + 1}
    uncounted = {**before, "candidate_payloads": before["candidate_payloads"] & ~(1 << 46)}
    for bad in (twice, foreign, uncounted, {}):
        with pytest.raises(CheckpointError, match="no map of ids is in"):
            index.load(bad)
        assert all(torch.equal(before[name], tensor) for name, tensor in index.state().items())


def test_wrong_arguments_are_refused() -> None:
    index = IdMap(2)
    with pytest.raises(DataError, match="int64 or uint64"):
        index.find(torch.zeros(3))
    for bounds, tables in (([0, 2], [0]), ([0, 3], [2]), ([0, 3, 3], [0]), ([3, 0, 3], [0, 1])):
        with pytest.raises(DataError, match="bounds must be"):
            index.find(torch.zeros(3, dtype=torch.int64), torch.tensor(bounds), torch.tensor(tables))
    with pytest.raises(DataError, match="num_tables"):
        IdMap(0)
