"""Iterations of text: every token once, the same after any stop and on any mesh, balanced as the method says."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.document_work import DocumentWork
from cordillera.data.text_batches import BatchConfig, TextBatches, TextIteration
from cordillera.data.text_corpora import TextDataConfig
from cordillera.errors import DataError
from tests.data.corpora import corpora

WORK = DocumentWork.of_break_even(20)

sources = st.lists(
    st.lists(st.integers(1, 60), min_size=1, max_size=25).filter(lambda made: max(made) > 4), min_size=1, max_size=3
)
packings = st.builds(
    BatchConfig,
    tokens=st.sampled_from([2, 40, 90, 160]),
    context=st.sampled_from([40, 61]),
    method=st.sampled_from(["balanced", "greedy", "fixed"]),
    queues=st.sampled_from([0, 1]),
)


def text(**values: Any) -> TextDataConfig:
    return TextDataConfig(path="made", **values)


def batches(
    made: list[list[int]], batch: BatchConfig, *, microbatches: int | None = None, seed: int = 0, **values: Any
) -> TextBatches:
    return TextBatches(
        text(**values), batch, corpora(*made), work=WORK, microbatches=microbatches or batch.count(), seed=seed
    )


def shown(one: TextIteration) -> Any:
    tokens = [(m.tokens.tolist(), m.offsets.tolist()) for m in one.microbatches]
    return one.number, tokens, one.lengths, one.imbalance, one.delay


def tokens_of(iterations: list[TextIteration]) -> Counter[tuple[int, int, int]]:
    """How often every token came, by its place."""
    return Counter(
        (part.source, part.document, part.start + i)
        for one in iterations
        for parts in one.microbatches.parts
        for part in parts
        for i in range(part.length)
    )


@given(made=sources, batch=packings, epochs=st.integers(1, 2), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_every_token_comes_once_an_epoch(made: list[list[int]], batch: BatchConfig, epochs: int, seed: int) -> None:
    found = list(batches(made, batch, epochs=epochs, seed=seed))
    counts = tokens_of(found)
    for source, lengths in enumerate(made):
        for document, length in enumerate(lengths):
            for place in range(length):
                count = counts.pop((source, document, place), 0)
                # What lies alone with one token predicts nothing and is passed over; only an end can do that.
                assert count == epochs or place in (0, length - 1) or place % batch.context == 0
                assert count <= epochs
    assert not counts
    for number, one in enumerate(found):
        assert one.number == number
        assert len(one.microbatches) == len(one.lengths) == batch.count()
        assert all(sum(lengths) <= batch.most for lengths in one.lengths)
        assert one.tokens == sum(map(sum, one.lengths))
        assert one.documents == sum(map(len, one.lengths))


@given(made=sources, batch=packings, seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_tokens_are_those_of_the_documents(made: list[list[int]], batch: BatchConfig, seed: int) -> None:
    of = corpora(*made).training
    for one in itertools.islice(batches(made, batch, seed=seed), 5):
        for microbatch, parts in zip(one.microbatches, one.microbatches.parts, strict=True):
            assert microbatch.tokens.dtype == microbatch.offsets.dtype == torch.int64
            assert microbatch.labels is None
            if not parts:
                assert microbatch.tokens.tolist() == [0]
                assert microbatch.offsets.tolist() == [0, 1]
                continue
            bounds = microbatch.offsets.tolist()
            assert bounds == [0, *itertools.accumulate(part.length for part in parts)]
            for part, (begin, end) in zip(parts, itertools.pairwise(bounds), strict=True):
                whole = of[part.source][part.document]
                expected = whole[part.start : part.start + part.length]
                assert microbatch.tokens[begin:end].tolist() == expected.tolist()


@given(made=sources, batch=packings, epochs=st.sampled_from([1, 2, None]), seed=st.integers(0, 9), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_crash_after_any_iteration_changes_nothing(
    made: list[list[int]], batch: BatchConfig, epochs: int | None, seed: int, data: st.DataObject
) -> None:
    """Each iteration is made by a new process, as it were, from the state of the one before."""
    whole = [
        shown(one) for one in itertools.islice(batches(made, batch, epochs=epochs, seed=seed, shuffle=seed > 4), 12)
    ]
    stops = data.draw(st.sets(st.integers(0, 12)))
    current, found = batches(made, batch, epochs=epochs, seed=seed, shuffle=seed > 4), []
    for number in range(12):
        if number in stops:
            state = json.loads(json.dumps(current.state_dict()))
            current = batches(made, batch, epochs=epochs, seed=seed, shuffle=seed > 4)
            current.load_state_dict(state)
            assert current.state_dict() == state
        one = next(current, None)
        if one is None:
            break
        found.append(shown(one))
    assert found == whole


@given(made=sources, batch=packings, other=st.integers(1, 6), seed=st.integers(0, 9), after=st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_another_number_of_microbatches_goes_on_with_the_same_documents(
    made: list[list[int]], batch: BatchConfig, other: int, seed: int, after: int
) -> None:
    microbatches = max(other, -(-batch.tokens // batch.most))
    first = batches(made, batch, epochs=1, seed=seed)
    found = list(itertools.islice(first, after))
    then = batches(made, batch, epochs=1, seed=seed, microbatches=microbatches)
    then.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += list(then)
    everything = tokens_of(list(batches(made, batch, epochs=1, seed=seed)))
    counts = tokens_of(found)
    assert max(counts.values(), default=1) == 1
    # at most one lonely token at either end, see test_every_token_comes_once_an_epoch
    assert abs(sum(counts.values()) - sum(everything.values())) <= 2 * sum(map(len, made))


@pytest.mark.parametrize("method", ["balanced", "fixed"])
def test_text_that_predicts_nothing_is_refused(method: Any) -> None:
    with pytest.raises(DataError, match="nothing to predict"):
        next(batches([[1] * 9], BatchConfig(tokens=4, context=4, method=method)))
    assert list(batches([[1] * 9], BatchConfig(tokens=4, context=4, method=method), epochs=1)) == []
