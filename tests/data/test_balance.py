"""Samples divided over ranks: every one once, with equal work, equally on all ranks."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from _freescale_balance import straggler_share
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.ranking.balance import divide, positions, sample_costs
from cordillera.errors import DataError
from cordillera.jagged import JaggedBatch, JaggedTensor, slice_samples, take_samples

COSTS = st.lists(st.one_of(st.just(0.0), st.floats(0, 1e6)), max_size=40)


@given(COSTS, st.integers(1, 9), st.sampled_from(["none", "fixed", "variable"]))
def test_every_sample_is_on_one_rank(costs: list[float], ranks: int, balance: str) -> None:
    found = divide(np.array(costs), ranks, balance)  # type: ignore[arg-type]
    assert len(found) == ranks
    assert sorted(np.concatenate(found).tolist()) == list(range(len(costs)))
    assert all((np.diff(samples) > 0).all() for samples in found)
    joined = np.concatenate(found)
    assert joined[positions(found)].tolist() == list(range(len(costs)))
    again = divide(np.array(costs), ranks, balance)  # type: ignore[arg-type]
    assert all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))
    if balance != "variable":
        counts = [len(samples) for samples in found]
        assert max(counts) - min(counts) <= 1
    elif min(costs, default=0) > 0 and len(costs) >= ranks:
        assert min(len(samples) for samples in found) > 0


def test_without_balance_ranks_have_consecutive_samples() -> None:
    assert [one.tolist() for one in divide(np.ones(7), 3, "none")] == [[0, 1], [2, 3], [4, 5, 6]]


def test_a_fixed_size_is_dealt_out_in_zig_zag() -> None:
    costs = np.array([9.0, 1, 8, 2, 7, 3])
    assert [one.tolist() for one in divide(costs, 2, "fixed")] == [[0, 3, 5], [1, 2, 4]]
    # by cost 0 2 4 5 3 1: rank 0 takes the first, the fourth and the fifth


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=4, max_size=8), st.integers(2, 3))
def test_a_variable_size_is_near_the_best_division(costs: list[int], ranks: int) -> None:
    work = np.array(costs, dtype=float)
    best = min(
        max(sum(cost for cost, at in zip(costs, places, strict=True) if at == rank) for rank in range(ranks))
        for places in itertools.product(range(ranks), repeat=len(costs))
    )
    found = max(work[samples].sum() for samples in divide(work, ranks, "variable"))
    assert best <= found <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9  # Graham's bound


def history_lengths(samples: int, seed: int) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).lognormal(7.0, 1.6, samples), 21_000).round()


@pytest.mark.parametrize("balance", ["fixed", "variable"])
def test_histories_of_the_paper_wait_nine_times_less(balance: str) -> None:
    for seed in range(5):
        costs = 1 + history_lengths(64 * 128, seed)
        before = straggler_share(costs, divide(costs, 64, "none"))
        began = time.process_time()
        found = divide(costs, 64, balance)  # type: ignore[arg-type]
        assert time.process_time() - began < 0.5
        assert before > 0.15
        assert straggler_share(costs, found) < before / 9


@pytest.mark.parametrize("balance", ["fixed", "variable"])
def test_one_giant_and_equal_samples(balance: str) -> None:
    giant = np.array([1.0] * 20 + [1000.0])
    found = divide(giant, 4, balance)  # type: ignore[arg-type]
    (held,) = (samples for samples in found if 20 in samples)
    assert len(held) == (1 if balance == "variable" else 6 if len(held) == 6 else 5)
    assert straggler_share(np.ones(8), divide(np.ones(8), 4, balance)) == 0  # type: ignore[arg-type]
    assert straggler_share(np.zeros(3), divide(np.zeros(3), 2, balance)) == 0  # type: ignore[arg-type]
    assert straggler_share(np.array([3.0, 1.0]), [np.array([0]), np.array([1])]) == pytest.approx(1 / 3)


def test_costs_that_are_none_are_refused() -> None:
    for cost in (-1.0, np.nan, np.inf):
        for balance in ("fixed", "variable"):
            with pytest.raises(DataError):
                divide(np.array([1.0, cost]), 2, balance)  # type: ignore[arg-type]


def batch(weights: bool = False) -> JaggedBatch:
    lists = JaggedTensor.from_lists([[1, 2, 3], [], [4], [5, 6]])
    ones = JaggedTensor(torch.arange(4), torch.arange(5), torch.arange(4.0) if weights else None)
    return JaggedBatch.from_features({"history": lists, "item": ones})


def test_costs_count_ids_and_squares_of_lengths() -> None:
    assert sample_costs(batch()).tolist() == [4, 1, 2, 3]
    assert sample_costs(batch(), 10.0, 0.5).tolist() == [10 + 4 + 5, 10 + 1 + 0.5, 10 + 2 + 1, 10 + 3 + 2.5]


@given(st.lists(st.integers(0, 3), max_size=6), st.booleans())
def test_samples_that_are_taken_are_those_of_lists(samples: list[int], weights: bool) -> None:
    given_batch = batch(weights)
    found = take_samples(given_batch, np.array(samples, dtype=np.int64)).validate()
    for key in given_batch.keys:
        lists = given_batch[key].to_lists()
        assert found[key].to_lists() == [lists[at] for at in samples]
    if weights:
        assert found.weights is not None
        assert found["item"].weights.tolist() == [float(at) for at in samples]  # type: ignore[union-attr]


def test_neighbours_that_are_taken_are_a_slice() -> None:
    one_hot = JaggedBatch(("a", "b"), torch.arange(10), torch.arange(11, dtype=torch.int32), one_hot=True)
    for given_batch in (batch(), one_hot):
        taken, cut = take_samples(given_batch, np.arange(1, 3)), slice_samples(given_batch, 1, 3)
        assert taken.values.equal(cut.values)
        assert taken.offsets.equal(cut.offsets)
        assert taken.offsets.dtype == cut.offsets.dtype
        assert taken.one_hot == cut.one_hot
