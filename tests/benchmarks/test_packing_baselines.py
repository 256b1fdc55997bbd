"""Packing baselines conserve the stream, and no packing of a batch is better than the exact one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from _packing_baselines import exact, exactly, fixed_length, in_arrival_order
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.packing.packer import PackedDocument, PackingConfig, global_batches
from cordillera.data.packing.statistics import packed
from cordillera.data.packing.work import DocumentWork
from cordillera.errors import DataError
from cordillera.partition import loads

WORK = DocumentWork.of_break_even(50)
CONTEXT = 100

small = st.lists(st.integers(0, 30).map(float), min_size=0, max_size=7)
few_bins = st.integers(1, 4)
streams = st.lists(st.integers(1, CONTEXT), max_size=60)


def arrivals(lengths: list[int], microbatches: int) -> list[PackedDocument]:
    batches = global_batches(lengths, microbatches * CONTEXT)
    pairs = ((length, number) for number, batch in enumerate(batches) for length in batch)
    return [PackedDocument(i, length, number) for i, (length, number) in enumerate(pairs)]


@given(lengths=st.lists(st.integers(1, 350), max_size=40), microbatches=st.integers(1, 4))
@settings(max_examples=80)
def test_arrival_order_with_cuts_fills_every_sequence(lengths: list[int], microbatches: int) -> None:
    found = list(in_arrival_order(lengths, microbatches, CONTEXT, cut=True))
    parts = [document for one in found for document in one.documents]
    assert [number for number, _, _ in parts] == sorted(number for number, _, _ in parts)
    for number, length in enumerate(lengths):
        assert sum(part.length for part in parts if part.number == number) == length
    tokens = [microbatch.tokens for one in found for microbatch in one.microbatches]
    assert all(len(one.microbatches) == microbatches for one in found)
    assert tokens[: sum(lengths) // CONTEXT] == [CONTEXT] * (sum(lengths) // CONTEXT)
    assert sum(tokens) == sum(lengths)


@given(lengths=streams, microbatches=st.integers(1, 4))
@settings(max_examples=80)
def test_arrival_order_keeps_documents_whole_and_in_order(lengths: list[int], microbatches: int) -> None:
    found = list(in_arrival_order(lengths, microbatches, CONTEXT))
    assert [(d.number, d.length) for one in found for d in one.documents] == list(enumerate(lengths))
    full = [microbatch for one in found for microbatch in one.microbatches]
    assert all(microbatch.tokens <= CONTEXT for microbatch in full)
    for one, two in itertools.pairwise(full):  # a sequence ends only where the next document does not fit
        assert not two or one.tokens + two[0].length > CONTEXT


@given(lengths=streams, microbatches=st.integers(1, 4), window=st.integers(1, 4))
@settings(max_examples=80)
def test_windows_pack_every_document_once_within_the_context(
    lengths: list[int], microbatches: int, window: int
) -> None:
    found = list(fixed_length(lengths, microbatches, CONTEXT, window, WORK))
    assert sorted(d for one in found for d in one.documents) == arrivals(lengths, microbatches)
    assert all(m.tokens <= CONTEXT for one in found for m in one.microbatches)
    assert [one.number for one in found] == list(range(len(found)))


@given(lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=12), microbatches=st.integers(2, 3))
@settings(max_examples=25)
def test_no_packing_of_a_batch_is_better_than_the_exact_one(lengths: list[int], microbatches: int) -> None:
    bound = 4 * CONTEXT
    best = list(exactly(lengths, microbatches, CONTEXT, bound, WORK, gap=0.0))
    greedy = packed(
        list(global_batches(lengths, microbatches * CONTEXT)),
        PackingConfig(microbatches=microbatches, bound=bound),
        WORK,
    )
    assert sorted(d for one in best for d in one.documents) == arrivals(lengths, microbatches)
    assert len(best) == len(greedy)
    for ours, theirs in zip(greedy, best, strict=True):
        most = [max(WORK.of(m.lengths) for m in one.microbatches) for one in (ours, theirs)]
        assert most[1] <= most[0] * (1 + 1e-6)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(DataError, match="101 tokens"):
        list(fixed_length([101], 2, CONTEXT, 1, WORK))
    with pytest.raises(DataError, match="document 1: 101 tokens"):
        list(in_arrival_order([50, 101], 2, CONTEXT))
    with pytest.raises(DataError, match="no window"):
        list(fixed_length([1], 2, CONTEXT, 0, WORK))
    with pytest.raises(DataError, match="do not fit"):
        list(exactly([100, 100, 100], 2, 150, 150, WORK))


def best(weights: list[float], bins: int, sizes: list[float] | None = None, room: float = 0.0) -> float:
    """By enumeration; infinity where nothing fits."""
    found = math.inf
    for places in itertools.product(range(bins), repeat=len(weights)):
        array = np.array(places, dtype=np.int64)
        if sizes is None or not len(sizes) or loads(sizes, array, bins).max() <= room:
            found = min(found, loads(weights, array, bins).max())
    return found


@given(weights=small, bins=few_bins)
@settings(max_examples=40)
def test_the_exact_partition_is_that_of_enumeration(weights: list[float], bins: int) -> None:
    assert loads(weights, exact(weights, bins), bins).max() == best(weights, bins)


@given(
    items=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=6), bins=few_bins, room=st.integers(0, 20)
)
@settings(max_examples=40)
def test_the_exact_partition_with_sizes_is_that_of_enumeration(
    items: list[tuple[int, int]], bins: int, room: int
) -> None:
    weights, sizes = [float(weight) for weight, _ in items], [float(size) for _, size in items]
    expected = best(weights, bins, sizes, room)
    if math.isinf(expected):
        with pytest.raises(DataError, match="do not fit"):
            exact(weights, bins, sizes, room)
    else:
        places = exact(weights, bins, sizes, room)
        assert loads(weights, places, bins).max() == expected
        assert (loads(sizes, places, bins) <= room).all()


def test_the_exact_partition_refuses_what_it_cannot_take() -> None:
    with pytest.raises(DataError, match="weights, item 1"):
        exact([1.0, math.nan, 2.0], 2)
    with pytest.raises(DataError, match="0 bins"):
        exact([1.0], 0)
