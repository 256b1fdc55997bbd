"""Streams of documents: every one exactly once, the same after any stop, shares that are kept."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cordillera.data.language.shards import ShardWriter, TextDataset
from cordillera.data.language.stream import DocumentPiece, DocumentStream, StreamConfig
from cordillera.errors import DataError
from tests.data.corpora import MemoryCorpus


def _texts(pieces: list[DocumentPiece]) -> list[tuple[int, int, int, list[int], bool]]:
    return [(p.source, p.document, p.start, p.tokens.tolist(), p.ends) for p in pieces]


_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=25)


@given(
    sources=st.lists(_lengths, min_size=1, max_size=3),
    world=st.integers(1, 5),
    epochs=st.integers(1, 2),
    shuffle=st.booleans(),
    seed=st.integers(0, 100),
    limit=st.sampled_from([None, 1, 7, 40]),
    long=st.sampled_from(["drop", "cut"]),
)
@settings(max_examples=60)
def test_every_document_comes_exactly_once_an_epoch_over_all_ranks(
    sources: list[list[int]],
    world: int,
    epochs: int,
    shuffle: bool,
    seed: int,
    limit: int | None,
    long: str,
) -> None:
    if long == "drop" and limit is not None:
        sources = [[1, *lengths] for lengths in sources]
    corpora = [MemoryCorpus(lengths) for i, lengths in enumerate(sources)]
    config = StreamConfig(epochs=epochs, shuffle=shuffle, seed=seed, max_length=limit, long_documents=long)
    found: Counter[tuple[int, int]] = Counter()
    sizes = []
    for rank in range(world):
        pieces = list(DocumentStream(corpora, config, rank=rank, world_size=world))
        sizes.append(len(pieces))
        for piece in pieces:
            assert piece.ends
            assert limit is None or len(piece.tokens) <= limit
            assert (
                piece.tokens.tolist()
                == corpora[piece.source][piece.document][piece.start :][: len(piece.tokens)].tolist()
            )
            found.update((piece.source, int(token)) for token in piece.tokens)
    expected = {
        (source, int(token))
        for source, corpus in enumerate(corpora)
        for document in corpus
        for token in document
        if limit is None or long == "cut" or len(document) <= limit
    }
    assert found == dict.fromkeys(expected, epochs)
    assert max(sizes) - min(sizes) <= 1


@given(
    sources=st.lists(_lengths, min_size=1, max_size=3),
    world=st.integers(1, 4),
    reads=st.lists(st.integers(0, 90), max_size=6),
    shuffle=st.booleans(),
    epochs=st.sampled_from([1, 2, None]),
    limit=st.sampled_from([None, 9]),
)
@settings(max_examples=80)
def test_a_stream_goes_on_from_anywhere_as_if_never_stopped(
    sources: list[list[int]],
    world: int,
    reads: list[int],
    shuffle: bool,
    epochs: int | None,
    limit: int | None,
) -> None:
    corpora = [MemoryCorpus(lengths) for i, lengths in enumerate(sources)]
    config = StreamConfig(epochs=epochs, shuffle=shuffle, max_length=limit, long_documents="cut")
    place = {"rank": world - 1, "world_size": world}
    stream = DocumentStream(corpora, config, **place)
    for count in reads:
        stream.read(count)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = DocumentStream(corpora, config, **place)
    resumed.load_state_dict(state)
    assert _texts(resumed.read(300)) == _texts(stream.read(300))
    assert resumed.state_dict() == stream.state_dict()


@given(lengths=_lengths, counts=st.lists(st.integers(1, 50), min_size=1, max_size=20))
@settings(max_examples=40)
def test_reading_by_tokens_gives_the_documents_cut_anywhere(lengths: list[int], counts: list[int]) -> None:
    corpus = MemoryCorpus(lengths)
    stream = DocumentStream([corpus], StreamConfig(epochs=None))
    whole = DocumentStream([corpus], StreamConfig(epochs=None))
    tokens: list[int] = []
    ends: list[int] = []
    for count in counts:
        pieces = stream.read(count)
        assert sum(len(piece.tokens) for piece in pieces) == count
        for piece in pieces:
            tokens += piece.tokens.tolist()
            ends += [len(tokens)] if piece.ends else []
    expected: list[int] = []
    expected_ends = []
    while len(expected) < len(tokens):
        expected += next(whole).tokens.tolist()
        expected_ends.append(len(expected))
    assert tokens == expected[: len(tokens)]
    assert ends == [end for end in expected_ends if end <= len(tokens)]
    rest = next(stream)
    assert rest.ends


def test_read_ends_with_the_stream() -> None:
    stream = DocumentStream([MemoryCorpus([3, 4])], StreamConfig())
    assert sum(len(piece.tokens) for piece in stream.read(100)) == 7
    assert stream.read(5) == []
    assert list(stream) == []


@given(weights=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=4), seed=st.integers(0, 50))
@settings(max_examples=25)
def test_a_mixture_keeps_its_shares_of_tokens(weights: list[float], seed: int) -> None:
    """At every moment the shares over all ranks are within one document of those asked for."""
    draw = np.random.default_rng(seed)
    corpora = [MemoryCorpus(draw.integers(1, 30 * (i + 1), 20).tolist()) for i in range(len(weights))]
    stream = DocumentStream(corpora, StreamConfig(weights=tuple(weights), epochs=None, seed=seed))
    drawn = [0] * len(weights)
    for _ in range(200):
        piece = next(stream)
        drawn[piece.source] += len(piece.tokens)
        assert stream.counts["drawn"] == drawn
        levels = [count / weight for count, weight in zip(drawn, weights, strict=True)]
        longest = max(int(np.diff(c.offsets).max()) / weight for c, weight in zip(corpora, weights, strict=True))
        assert max(levels) - min(levels) <= longest


def test_a_mixture_of_equal_documents_does_not_fall_in_step_with_the_ranks() -> None:
    """Two sources that alternate, two ranks: each rank still sees both."""
    corpora = [MemoryCorpus([5] * 400) for i in range(2)]
    config = StreamConfig(weights=(1, 1))
    for rank in range(2):
        sources = [piece.source for piece in DocumentStream(corpora, config, rank=rank, world_size=2)]
        assert 0.4 < np.mean(sources) < 0.6


def test_orders_come_from_the_seed_and_the_epoch() -> None:
    corpus = MemoryCorpus([2] * 50)

    def order(**settings_: object) -> list[int]:
        return [piece.document for piece in DocumentStream([corpus], StreamConfig(**settings_))]

    twice = order(epochs=2)
    assert sorted(twice[:50]) == sorted(twice[50:]) == list(range(50))
    assert twice[:50] != twice[50:]
    assert order(epochs=2) == twice
    assert order(seed=1) != twice[:50]
    assert order(shuffle=False, epochs=2) == [*range(50)] * 2


def test_long_documents_are_refused_dropped_or_cut() -> None:
    corpus = MemoryCorpus([4, 10, 3, 11])
    with pytest.raises(DataError, match="document 1: 2 documents are longer than 5 tokens; the first has 10"):
        DocumentStream([corpus], StreamConfig(max_length=5))
    for choice, spans in (
        ("drop", [(0, 0, 4), (2, 0, 3)]),
        ("cut", [(0, 0, 4), (1, 0, 5), (1, 5, 5), (2, 0, 3), (3, 0, 5), (3, 5, 5), (3, 10, 1)]),
    ):
        config = StreamConfig(max_length=5, long_documents=choice, shuffle=False)
        stream = DocumentStream([corpus], config)
        assert [(p.document, p.start, len(p.tokens)) for p in stream] == spans
        assert stream.counts["too long"] == [2]
        assert stream.counts["tokens"] == [sum(length for _, _, length in spans)]
    with pytest.raises(DataError, match="gives no documents"):
        DocumentStream([corpus], StreamConfig(max_length=2, long_documents="drop"))


def test_states_of_something_else_are_refused() -> None:
    one, other = MemoryCorpus([3, 4]), MemoryCorpus([3, 5])
    stream = DocumentStream([one], StreamConfig())
    stream.read(2)
    state = stream.state_dict()
    for sources, settings_, place, message in (
        ([other], {}, {}, "other corpora"),
        ([one, one], {}, {}, "other corpora"),
        ([one], {"seed": 1}, {}, "other settings"),
        ([one], {}, {"rank": 0, "world_size": 2}, "another number of ranks"),
    ):
        with pytest.raises(DataError, match=message):
            DocumentStream(sources, StreamConfig(**settings_), **place).load_state_dict(state)
    for damage in (
        {"drawn": [9]},
        {"drawn": None},
        {"current": [0, 99]},
        {"current": [4, 0]},
        {"offset": 50},
        {"tokens": []},
    ):
        with pytest.raises(DataError, match="damaged"):
            stream.load_state_dict({**state, **damage})
    assert stream.state_dict() == state


def test_a_stream_reads_a_corpus_on_disk(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 100, 4)
    for document in ([1, 2, 3], [4, 5], [6]):
        writer.append(document, sum(document))
    writer.finish({})
    stream = DocumentStream([TextDataset(tmp_path)], StreamConfig(shuffle=False))
    assert [piece.tokens.tolist() for piece in stream.read(4)] == [[1, 2, 3], [4]]
    again = DocumentStream([TextDataset(tmp_path)], StreamConfig(shuffle=False))
    again.load_state_dict(stream.state_dict())
    assert [piece.tokens.tolist() for piece in again] == [[5], [6]]


def test_bad_settings_are_refused() -> None:
    corpus = MemoryCorpus([3])
    with pytest.raises(DataError, match="at least one corpus"):
        DocumentStream([], StreamConfig())
    with pytest.raises(DataError, match="rank 2 is not one of 2"):
        DocumentStream([corpus], StreamConfig(), rank=2, world_size=2)
    for weights in ((1.0, 1.0), (0.0,), (-1.0,), (float("nan"),), (float("inf"),)):
        with pytest.raises(DataError, match="there are 1 sources and weights"):
            DocumentStream([corpus], StreamConfig(weights=weights))
    for wrong in ({"epochs": 0}, {"max_length": 0}, {"long_documents": "x"}, {"seed": -1}):
        with pytest.raises(ValidationError):
            StreamConfig(**wrong)
