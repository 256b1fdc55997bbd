"""Partitions against enumeration, against proven bounds, and with input that is none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera import partition
from cordillera.errors import DataError
from cordillera.partition import NOWHERE, Bins, imbalance, loads

METHODS: dict[str, Callable[[list[float], int], Bins]] = {
    "list": partition.list_scheduling,
    "longest": partition.longest_processing_time,
    "differencing": partition.karmarkar_karp,
    "two keys": lambda weights, bins: partition.two_key_greedy(weights, weights, bins, math.inf),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)

small = st.lists(st.integers(0, 30).map(float), min_size=0, max_size=7)
many = st.lists(st.floats(0, 1e6), min_size=0, max_size=60)
few_bins = st.integers(1, 4)


def heaviest(weights: list[float], places: Bins, bins: int) -> float:
    return float(loads(weights, places, bins).max())


def best(weights: list[float], bins: int) -> float:
    """By enumeration."""
    places = itertools.product(range(bins), repeat=len(weights))
    return min(heaviest(weights, np.array(one, dtype=np.int64), bins) for one in places)


@every_method
@given(weights=small, bins=few_bins)
@settings(max_examples=25)
def test_every_item_is_in_one_bin(method: Callable[..., Bins], weights: list[float], bins: int) -> None:
    places = method(weights, bins)
    assert places.dtype == np.int64
    assert places.shape == (len(weights),)
    assert ((places >= 0) & (places < bins)).all()
    assert loads(weights, places, bins).sum() == pytest.approx(sum(weights))


@given(weights=small, bins=few_bins)
@settings(max_examples=60)
def test_greedy_methods_keep_their_proven_bounds(weights: list[float], bins: int) -> None:
    least = best(weights, bins)
    longest = heaviest(weights, partition.longest_processing_time(weights, bins), bins)
    assert longest <= (4 / 3 - 1 / (3 * bins)) * least + 1e-9
    assert heaviest(weights, partition.list_scheduling(weights, bins), bins) <= (2 - 1 / bins) * least + 1e-9


@given(weights=many, bins=st.integers(1, 9))
@settings(max_examples=80)
def test_no_bin_exceeds_the_mean_by_more_than_an_item(weights: list[float], bins: int) -> None:
    for method in (partition.list_scheduling, partition.longest_processing_time):
        found = loads(weights, method(weights, bins), bins)
        assert found.max() - found.mean() <= max(weights, default=0.0) + 1e-6


@given(
    items=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10)), max_size=40),
    bins=st.integers(1, 6),
    room=st.integers(0, 40),
)
@settings(max_examples=80)
def test_no_bin_holds_more_than_its_room(items: list[tuple[float, int]], bins: int, room: int) -> None:
    weights, sizes = [weight for weight, _ in items], [float(size) for _, size in items]
    for method in (partition.list_scheduling, partition.longest_processing_time):
        places = method(weights, bins, sizes, room)
        held = loads(sizes, places, bins)
        assert (held <= room).all()
        left = [size for size, place in zip(sizes, places, strict=True) if place == NOWHERE]
        assert all(size > room - held.min() for size in left)  # what is left fits nowhere
    places = partition.two_key_greedy(weights, sizes, bins, room)
    held = loads(sizes, places, bins)
    assert (held <= room).all()
    assert all(s > room - held.min() for s, place in zip(sizes, places, strict=True) if place == NOWHERE)


@given(weights=small, bins=few_bins)
@settings(max_examples=60)
def test_differencing_is_near_the_optimum(weights: list[float], bins: int) -> None:
    """Bounds: 7/6 for two bins (Fischetti, Martello 1987), 4/3 - 1/(3 (m - 1)) for more (Michiels et al. 2003)."""
    found = heaviest(weights, partition.karmarkar_karp(weights, bins), bins)
    bound = 7 / 6 if bins <= 2 else 4 / 3 - 1 / (3 * (bins - 1))
    assert found <= bound * best(weights, bins) + 1e-9


def test_differencing_finds_what_longest_processing_time_misses() -> None:
    weights = [8.0, 7.0, 6.0, 5.0, 4.0]
    assert heaviest(weights, partition.longest_processing_time(weights, 2), 2) == 17
    assert heaviest(weights, partition.karmarkar_karp(weights, 2), 2) == 16
    random = np.random.default_rng(0)
    several = [random.pareto(1.5, 100).tolist() for _ in range(20)]
    ratios = [
        (
            heaviest(one, partition.karmarkar_karp(one, 8), 8),
            heaviest(one, partition.longest_processing_time(one, 8), 8),
        )
        for one in several
    ]
    assert np.mean([ours / other for ours, other in ratios]) < 1.0


@given(
    items=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10)), max_size=12),
    bins=st.integers(1, 4),
    room=st.integers(0, 40),
)
@settings(max_examples=60)
def test_differencing_keeps_the_room_or_assigns_nothing(items: list[tuple[float, int]], bins: int, room: int) -> None:
    weights, sizes = [weight for weight, _ in items], [float(size) for _, size in items]
    places = partition.karmarkar_karp(weights, bins, sizes, room)
    assert (places == NOWHERE).all() or ((places >= 0).all() and loads(sizes, places, bins).max() <= room)


def test_two_keys_take_the_shortest_bin_where_the_lightest_is_full() -> None:
    # The long light item fills bin 0's room; the next light one goes there by weight and does not fit.
    places = partition.two_key_greedy([1.0, 5.0, 4.0], [9.0, 4.0, 2.0], 2, 10.0)
    assert places.tolist() == [0, 1, 1]
    assert partition.two_key_greedy([1.0, 1.0], [10.0, 1.0], 1, 10.0).tolist() == [0, NOWHERE]  # filled exactly


@every_method
def test_equal_items_go_to_the_lowest_bin_first(method: Callable[..., Bins]) -> None:
    first = method([3.0] * 6, 3)
    assert loads([3.0] * 6, first, 3).tolist() == [6, 6, 6]
    for _ in range(3):
        assert method([3.0] * 6, 3).tolist() == first.tolist()
    if method in (partition.list_scheduling, partition.longest_processing_time):
        assert first.tolist() == [0, 1, 2, 0, 1, 2]


@every_method
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_weights_that_are_none_are_refused_by_place(method: Callable[..., Bins], value: float) -> None:
    with pytest.raises(DataError, match="weights, item 1"):
        method([1.0, value, 2.0], 2)


@every_method
def test_no_bins_and_shapes_that_are_none_are_refused(method: Callable[..., Bins]) -> None:
    with pytest.raises(DataError, match="0 bins"):
        method([1.0], 0)
    with pytest.raises(DataError, match="2 dimensions"):
        method([[1.0]], 2)  # type: ignore[list-item]
    with pytest.raises(DataError, match="too large"):
        method([1e308, 1e308], 2)
    with pytest.raises(DataError, match="not numbers"):
        method(["x"], 2)  # type: ignore[list-item]


def test_sizes_and_room_are_checked() -> None:
    with pytest.raises(DataError, match="belong together"):
        partition.list_scheduling([1.0], 1, sizes=[1.0])
    with pytest.raises(DataError, match="2 sizes for 1 weights"):
        partition.two_key_greedy([1.0], [1.0, 1.0], 1, 4.0)
    with pytest.raises(DataError, match="sizes, item 0"):
        partition.two_key_greedy([1.0], [math.nan], 1, 4.0)
    with pytest.raises(DataError, match="nan is no room"):
        partition.two_key_greedy([1.0], [1.0], 1, math.nan)


def test_imbalance_is_the_heaviest_over_the_mean() -> None:
    assert imbalance([1.0, 3.0]) == 1.5
    assert imbalance([0.0, 0.0]) == 1.0
