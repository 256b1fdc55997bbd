"""Jagged tensors: round trips, validation, and the exchange with TorchRec."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cordillera.errors import DataError
from cordillera.jagged import (
    JaggedBatch,
    JaggedTensor,
    choose_features,
    offsets_from_lengths,
    offsets_of,
    ragged_positions,
    slice_samples,
)

LISTS = st.lists(st.lists(st.integers(-(2**62), 2**62), max_size=5), max_size=8)


@given(rows=LISTS)
def test_lists_survive_the_round_trip(rows: list[list[int]]) -> None:
    jagged = JaggedTensor.from_lists(rows).validate()
    assert jagged.to_lists() == rows
    assert len(jagged) == len(rows)
    assert jagged.lengths.tolist() == [len(row) for row in rows]


@given(lengths=st.lists(st.integers(0, 9), max_size=20))
def test_offsets_and_lengths_are_inverse(lengths: list[int]) -> None:
    offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int32))
    assert offsets.dtype == torch.int64
    assert offsets.diff().tolist() == lengths
    assert offsets[0] == 0


@given(size=st.integers(1, 6), data=st.data())
def test_features_survive_being_joined(size: int, data: st.DataObject) -> None:
    rows = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=size, max_size=size)
    features = {name: data.draw(rows) for name in data.draw(st.sets(st.sampled_from("abcd"), min_size=1))}
    weighted = data.draw(st.sampled_from(sorted(features)))
    jagged = {name: JaggedTensor.from_lists(lists) for name, lists in features.items()}
    weights = torch.rand(jagged[weighted].values.numel(), generator=torch.Generator().manual_seed(0))
    jagged[weighted] = JaggedTensor(jagged[weighted].values, jagged[weighted].offsets, weights)
    batch = JaggedBatch.from_features(jagged).validate()
    assert batch.batch_size == len(batch) == size
    assert tuple(batch) == tuple(features)
    for name, lists in features.items():
        assert batch[name].validate().to_lists() == lists
        expected = weights if name == weighted else torch.ones(sum(map(len, lists)))
        assert batch[name].weights is not None
        assert torch.equal(batch[name].weights, expected)


def test_one_feature_is_a_view() -> None:
    batch = JaggedBatch.from_features(
        {"a": JaggedTensor.from_lists([[1], [2]]), "b": JaggedTensor.from_lists([[], [3]])}
    )
    batch["b"].values[0] = 7
    assert batch.values.tolist() == [1, 2, 7]


def test_moving_keeps_everything() -> None:
    batch = JaggedBatch(("a",), torch.tensor([1, 2]), torch.arange(3), torch.ones(2), one_hot=True)
    moved = batch.to("cpu")
    assert moved.keys == batch.keys
    assert moved.one_hot
    assert torch.equal(moved.values, batch.values)
    alone = JaggedTensor(batch.values, batch.offsets, batch.weights).to("cpu")
    assert alone.weights is not None


@pytest.mark.parametrize(
    ("values", "offsets", "weights", "message"),
    [
        (3, [0.0, 3.0], None, "int32 or int64"),
        (3, [], None, "at least one entry"),
        (3, [1, 3], None, "start at 0"),
        (3, [0, 2], None, "end at the number of values"),
        (3, [0, 2, 1, 3], None, "decrease"),
        (3, [0, 3], 2, "one number a value"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_their_place(
    values: int, offsets: list[float], weights: int | None, message: str
) -> None:
    bounds = torch.tensor(offsets) if offsets else torch.empty(0, dtype=torch.int64)
    jagged = JaggedTensor(torch.arange(values), bounds, None if weights is None else torch.ones(weights))
    with pytest.raises(DataError, match=message) as caught:
        jagged.validate("clicks.csv")
    assert str(caught.value).startswith("clicks.csv: ")


def test_the_place_where_offsets_decrease_is_named() -> None:
    with pytest.raises(DataError, match="after entry 1"):
        JaggedTensor(torch.arange(3), torch.tensor([0, 2, 1, 3])).validate()


def test_batches_that_do_not_fit_are_refused() -> None:
    values, offsets = torch.arange(3), torch.arange(4)
    with pytest.raises(DataError, match="names must differ"):
        JaggedBatch(("a", "a"), values, offsets).validate()
    with pytest.raises(DataError, match="whole batches"):
        JaggedBatch(("a", "b"), values, offsets).validate()
    with pytest.raises(DataError, match="one_hot"):
        JaggedBatch(("a",), values, torch.tensor([0, 2, 3]), one_hot=True).validate()
    with pytest.raises(DataError, match="same number of samples"):
        JaggedBatch.from_features({"a": JaggedTensor.from_lists([[1]]), "b": JaggedTensor.from_lists([])})


def test_no_features_are_refused_when_joined() -> None:
    with pytest.raises(DataError):
        JaggedBatch.from_features({})


@given(size=st.integers(0, 5), data=st.data())
def test_samples_and_features_are_cut_as_lists_are(size: int, data: st.DataObject) -> None:
    rows = st.lists(st.lists(st.integers(0, 99), max_size=3), min_size=size, max_size=size)
    features = {name: data.draw(rows) for name in "abc"[: data.draw(st.integers(1, 3))]}
    one_hot = data.draw(st.booleans())
    if one_hot:
        features = {name: [[number] for number in range(size)] for name in features}
    batch = JaggedBatch.from_features({name: JaggedTensor.from_lists(lists) for name, lists in features.items()})
    weights = torch.arange(batch.values.numel()) / 8 if data.draw(st.booleans()) else None
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    batch = JaggedBatch(batch.keys, batch.values, batch.offsets.to(kind), weights, one_hot)
    first = data.draw(st.integers(0, size))
    end = data.draw(st.integers(first, size))
    places = data.draw(st.lists(st.integers(0, len(features) - 1), max_size=3))
    part, chosen = slice_samples(batch, first, end), choose_features(batch, places)
    assert part.offsets.dtype == chosen.offsets.dtype == kind
    assert (part.one_hot, chosen.one_hot) == (one_hot, one_hot)
    assert (part.weights is None) == (chosen.weights is None) == (weights is None)
    assert part.keys == batch.keys
    assert chosen.keys == tuple("abc"[place] for place in places)
    assert part.offsets.numel() == len(features) * (end - first) + 1
    assert chosen.offsets.numel() == len(places) * size + 1

    def flat(numbers: torch.Tensor | None, of: JaggedBatch) -> list[list[float]]:
        bounds = of.offsets.tolist()
        return [] if numbers is None else [numbers[a:b].tolist() for a, b in itertools.pairwise(bounds)]

    for mine, whole in ((part.values, batch.values), (part.weights, batch.weights)):
        bags = flat(whole, batch)
        expected = [bag for f in range(len(features)) for bag in bags[f * size + first : f * size + end]]
        assert flat(mine, part) == expected
    for mine, whole in ((chosen.values, batch.values), (chosen.weights, batch.weights)):
        bags = flat(whole, batch)
        assert flat(mine, chosen) == [bag for f in places for bag in bags[f * size : (f + 1) * size]]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), max_size=6))
def test_positions_of_ragged_bags_are_listed_bag_after_bag(bags: list[tuple[int, int]]) -> None:
    starts, lengths = (np.array([bag[side] for bag in bags], dtype=np.int64) for side in (0, 1))
    found = ragged_positions(starts, lengths)
    assert found.dtype == np.int64
    assert found.tolist() == [start + place for start, length in bags for place in range(length)]
    assert offsets_of(lengths).tolist() == [sum(lengths[:n]) for n in range(len(bags) + 1)]


@pytest.mark.peer
@pytest.mark.parametrize("weighted", [False, True])
def test_torchrec_conversion_shares_memory(weighted: bool) -> None:
    pytest.importorskip("torchrec", reason="torchrec is not installed (make peers)")
    values, offsets = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1, 1, 3, 4])
    batch = JaggedBatch(("a", "b"), values, offsets, torch.rand(4) if weighted else None)
    kjt = batch.to_torchrec()
    assert kjt.keys() == ["a", "b"]
    assert kjt["b"].values().tolist() == batch["b"].values.tolist()
    again = JaggedBatch.from_torchrec(kjt)
    assert again.keys == batch.keys
    assert again.values.data_ptr() == kjt.values().data_ptr() == values.data_ptr()
    assert again.offsets.data_ptr() == offsets.data_ptr()
    if weighted:
        assert again.weights is not None
        assert again.weights.data_ptr() == batch.weights.data_ptr()  # type: ignore[union-attr]
