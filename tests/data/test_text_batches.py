"""Iterations of text: every token once, the same after any stop and on any mesh, balanced as the method says."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cordillera.data.language.batches import BatchConfig, TextBatches, TextIteration
from cordillera.data.language.corpora import TextDataConfig
from cordillera.data.language.held_out import held_out_batches
from cordillera.data.packing.work import DocumentWork
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
@settings(max_examples=60)
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
@settings(max_examples=40)
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
@settings(max_examples=60)
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
@settings(max_examples=40)
def test_another_number_of_microbatches_goes_on_with_the_same_documents(
    made: list[list[int]], batch: BatchConfig, other: int, seed: int, after: int
) -> None:
    microbatches = max(min(other, batch.tokens // 2), -(-batch.tokens // batch.most))
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


def skewed(seed: int, documents: int = 4000) -> list[int]:
    """Many short documents, few as long as the context."""
    random = np.random.default_rng(seed)
    return np.minimum(np.exp(random.normal(3.2, 1.4, documents)).astype(int) + 2, 512).tolist()


def test_balance_is_worth_its_delay() -> None:
    """Documents whole with queues beat documents whole without, beat rows; and every method gives the tokens asked."""
    work = DocumentWork.of_break_even(128)
    imbalance, delay, mean = {}, {}, {}
    for method in ("balanced", "greedy", "fixed"):
        batch = BatchConfig(tokens=2048, context=512, method=method)
        made = TextBatches(text(), batch, corpora(skewed(1)), work=work, microbatches=4)
        found = list(itertools.islice(made, 120))
        tokens = sum(one.tokens for one in found)
        mean[method] = tokens / len(found)
        imbalance[method] = float(np.mean([one.imbalance for one in found]))
        delay[method] = sum(one.delay * one.tokens for one in found) / tokens
    assert all(abs(value - 2048) < 60 for value in mean.values())
    assert imbalance["balanced"] < 1.06
    assert imbalance["balanced"] < imbalance["greedy"] - 0.05
    assert imbalance["balanced"] < imbalance["fixed"] - 0.05
    assert 0 < delay["balanced"] < 0.7
    assert delay["fixed"] == 0


def test_what_is_reported_is_what_was_packed() -> None:
    arrived, batch = 0, BatchConfig(tokens=2048, context=512, thresholds=(256,))
    made = TextBatches(text(shuffle=False), batch, corpora(skewed(2)), work=WORK, microbatches=4)
    lengths = skewed(2)
    arrival = {}
    for document, length in enumerate(lengths):  # a batch is full with the document that reaches its end
        arrival[document] = arrived // 2048
        arrived += length
    for one in itertools.islice(made, 30):
        work = [WORK.of(some) for some in one.lengths]
        assert one.imbalance == pytest.approx(max(work) / np.mean(work))
        parts = [part for some in one.microbatches.parts for part in some]
        waited = sum((one.number - arrival[part.document]) * part.length for part in parts)
        assert one.delay == pytest.approx(waited / one.tokens)


def test_documents_that_fit_badly_do_not_gather() -> None:
    """Of documents of 0.8 contexts only one fits into 1.5: the stream is taken in as slowly as it is used."""
    made = batches([[80] * 2000], BatchConfig(tokens=400, context=100, thresholds=()))
    for one in itertools.islice(made, 200):
        assert one.documents == 4
        assert len(made.state_dict()["waiting"]) <= 2 * 400 // 80


def test_thresholds_that_were_looked_for_are_kept() -> None:
    """Resuming does not look for them again: they might come out otherwise."""
    work, batch = DocumentWork.of_break_even(128), BatchConfig(tokens=2048, context=512)
    made = TextBatches(text(), batch, corpora(skewed(1)), work=work, microbatches=4)
    next(made)
    assert len(made.thresholds) == 2
    state = made.state_dict()
    state["packer"]["config"]["thresholds"] = [100, 200]
    state["packer"]["queues"] = [[], []]
    state["waiting"] = [[document[0], *_part(state, document[0])] for document in state["packer"]["remained"]]
    again = TextBatches(text(), batch, corpora(skewed(1)), work=work, microbatches=4)
    again.load_state_dict(state)
    assert again.thresholds == (100, 200)
    given = TextBatches(
        text(), batch.model_copy(update={"thresholds": (50,)}), corpora(skewed(1)), work=work, microbatches=4
    )
    given.load_state_dict(made.state_dict())
    assert given.thresholds == (50,)


def _part(state: dict[str, Any], number: int) -> list[int]:
    return next(part[1:] for part in state["waiting"] if part[0] == number)


def test_queues_that_would_unbalance_are_not_made() -> None:
    """Of documents that are all as long as the context, each microbatch gets one: waiting can only make it worse."""
    batch = BatchConfig(tokens=2048, context=512)
    made = TextBatches(text(), batch, corpora([512] * 900), work=WORK, microbatches=4)
    assert made.thresholds == ()
    assert {one.imbalance for one in itertools.islice(made, 100)} == {1.0}


def test_without_thresholds_that_keep_the_delay_there_are_none() -> None:
    batch = BatchConfig(tokens=2048, context=512, delay=0.0)
    made = TextBatches(text(), batch, corpora(skewed(1)), work=WORK, microbatches=4)
    assert made.thresholds == ()


def test_states_of_something_else_are_refused() -> None:
    batch = BatchConfig(tokens=80, context=40, thresholds=(30,))
    lengths = [5, 38, 17, 40, 2, 31, 9, 40]
    made = batches([lengths], batch)
    first = next(made)
    state = json.loads(json.dumps(made.state_dict()))
    assert state["waiting"]
    for other, message in (
        (batches([lengths], BatchConfig(tokens=90, context=40, thresholds=(30,))), "another packing"),
        (batches([lengths], BatchConfig(tokens=80, context=40, method="fixed")), "another packing"),
        (batches([lengths, [4]], batch), "other corpora"),
        (batches([lengths], batch, seed=1), "other settings"),
    ):
        before = other.state_dict()
        with pytest.raises(DataError, match=message):
            other.load_state_dict(state)
        assert other.state_dict() == before
    number, *part = state["waiting"][0]
    for damage in (
        {"waiting": []},
        {"waiting": [*state["waiting"], state["waiting"][0][:2]]},
        {"waiting": [[number, 7, *part[1:]], *state["waiting"][1:]]},
        {"waiting": [[number, part[0], 99, *part[2:]], *state["waiting"][1:]]},
        {"waiting": [[number, *part[:2], 39, part[3]], *state["waiting"][1:]]},
        {"number": None},
        {"packer": {}},
        {"taken": "x"},
    ):
        again = batches([lengths], batch)
        with pytest.raises(DataError, match="damaged"):
            again.load_state_dict({**state, **damage})
        with pytest.raises(DataError, match="damaged"):
            again.load_state_dict({key: value for key, value in state.items() if key not in damage})
        assert shown(next(again)) == shown(first)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bound": 100, "context": 200}, "below the context"),
        ({"thresholds": (3, 2)}, "does not rise"),
        ({"thresholds": (3,), "method": "greedy"}, "no queues"),
        ({"method": "sorted"}, "method"),
        ({"tokens": 1}, "tokens"),
    ],
)
def test_packings_that_are_none_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BatchConfig(**values)


def test_a_bound_may_be_the_context() -> None:
    assert BatchConfig(bound=200, context=200).most == 200
    assert [BatchConfig(context=200, method=method).most for method in ("fixed", "balanced")] == [200, 300]


def test_batches_and_documents_that_do_not_fit_are_refused() -> None:
    batch = BatchConfig(tokens=160, context=40)
    assert (batch.count(), batch.count(6), batch.model_copy(update={"microbatches": 5}).count(6)) == (4, 6, 5)
    with pytest.raises(DataError, match="160 tokens do not fit into 2 microbatches of at most 60"):
        batches([[9]], batch, microbatches=2)
    with pytest.raises(DataError, match="3 tokens in 2 rows"):
        batches([[9]], BatchConfig(tokens=3, context=40, method="fixed"), microbatches=2)
    with pytest.raises(DataError, match="documents of 61 tokens do not fit"):
        batches([[9]], batch, max_length=61)
    with pytest.raises(DataError, match="longer than 40 tokens"):
        batches([[9, 50]], batch, long_documents="refuse")


def test_long_documents_are_cut_at_the_context_or_at_the_ends_of_rows() -> None:
    whole = next(batches([[100]], BatchConfig(tokens=160, context=40), shuffle=False, epochs=1))
    assert sorted(itertools.chain(*whole.lengths)) == [20, 40, 40]
    rows = next(batches([[30, 100]], BatchConfig(tokens=120, context=40, method="fixed"), shuffle=False, epochs=1))
    assert rows.lengths == [[30, 10], [40], [40]]


@given(held=sources, context=st.sampled_from([2, 7, 40]), most=st.sampled_from([None, 1, 50]))
@settings(max_examples=60)
def test_every_held_out_token_but_a_documents_first_is_predicted_once(
    held: list[list[int]], context: int, most: int | None
) -> None:
    held = [[min(length, 256) for length in lengths] for lengths in held]
    made = corpora([9], held_out=held)
    for documents in made.held_out:  # bytes and the two special tokens
        documents._tokens = [np.arange(len(documents._tokens[0])) * 7 % 258]  # type: ignore[attr-defined]
    found = held_out_batches(made, BatchConfig(context=context), tokens=most)
    predicted: list[int] = []
    count = 0
    for microbatch in found.microbatches:
        bounds = microbatch.offsets.tolist()
        assert len(microbatch.tokens) == bounds[-1] <= context
        count += bounds[-1]
        for begin, end in itertools.pairwise(bounds):
            predicted += microbatch.tokens[begin + 1 : end].tolist()
    assert (count, len(predicted)) == (found.tokens, found.targets)
    assert sum(token < 256 for token in predicted) == found.bytes
    if most is None:
        expected = [token for documents in made.held_out for document in documents for token in document[1:].tolist()]
        assert sorted(predicted) == sorted(expected)
        assert found.documents == sum(length > 1 for lengths in held for length in lengths)
    else:
        assert found.tokens < most + context


def test_nothing_held_out_is_nothing_to_evaluate() -> None:
    found = held_out_batches(corpora([9]), BatchConfig())
    assert (len(found.microbatches), found.tokens, found.targets, found.bytes) == (0, 0, 0, 0)
