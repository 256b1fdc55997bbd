"""What is learnt from and what is held out: apart, the same in any order and mixture, never empty by accident."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cordillera.data.language.batches import BatchConfig, TextBatches
from cordillera.data.language.corpora import TextCorpora, TextDataConfig, prepare_corpora, text_identity
from cordillera.data.language.shards import Documents
from cordillera.data.language.tokenised import PYTHON_LIBRARY, text_files
from cordillera.data.packing.work import DocumentWork
from cordillera.errors import DataError
from tests.data import vocabularies as v

TEXTS = [f"document {number} of some that are made" for number in range(300)]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes a corpus and gives its path."""

    def written(texts: list[str], name: str = "a.jsonl", field: str = "text") -> str:
        (tmp_path / name).write_text("\n".join(json.dumps({field: text}) for text in texts))
        return str(tmp_path / name)

    return written


def prepared(tmp_path: Path, **values: Any) -> TextCorpora:
    return prepare_corpora(TextDataConfig(cache_dir=str(tmp_path / "cache"), **values))


def texts(parts: tuple[Documents, ...], corpora: TextCorpora) -> list[str]:
    return [
        corpora.tokenizer.decode(documents[number].tolist(), skip_special=True)
        for documents in parts
        for number in range(len(documents))
    ]


def test_training_and_held_out_are_the_corpus_apart(write: Any, tmp_path: Path) -> None:
    found = prepared(tmp_path, path=write(TEXTS), held_out=0.2)
    training, held_out = texts(found.training, found), texts(found.held_out, found)
    assert sorted(training + held_out) == sorted(TEXTS)
    assert 30 <= len(held_out) <= 90
    assert found.facts["sources"][0]["documents"] == len(training)
    assert found.facts["held_out"][0]["documents"] == len(held_out)
    assert found.facts["sources"][0]["tokens"] == sum(len(text.encode()) + 2 for text in training)
    assert json.loads(json.dumps(found.facts))["tokenizer"]["vocab_size"] == 258


def test_the_same_documents_are_held_out_in_any_order_mixture_and_tokenizer(write: Any, tmp_path: Path) -> None:
    alone = prepared(tmp_path, path=write(TEXTS), held_out=0.1)
    expected = sorted(texts(alone.held_out, alone))
    assert expected
    turned = prepared(tmp_path, path=write(TEXTS[::-1], "b.jsonl"), held_out=0.1)
    assert sorted(texts(turned.held_out, turned)) == expected
    sources = [
        {"path": write(TEXTS[:120], "c.jsonl"), "weight": 2},
        {"path": write(TEXTS[120:], "d.jsonl"), "weight": 1},
    ]
    mixture = prepared(tmp_path, sources=sources, held_out=0.1)
    assert sorted(texts(mixture.held_out, mixture)) == expected
    assert mixture.weights == (2, 1)
    (tmp_path / "model").mkdir()
    other = prepared(tmp_path, path=write(TEXTS), held_out=0.1, tokenizer=str(v.write_json(tmp_path / "model")))
    assert sorted(texts(other.held_out, other)) == expected


def test_copies_of_a_text_are_not_on_both_sides(write: Any, tmp_path: Path) -> None:
    found = prepared(tmp_path, path=write(TEXTS[:40] * 3), held_out=0.2)
    training, held_out = texts(found.training, found), texts(found.held_out, found)
    assert held_out
    assert not set(training) & set(held_out)


@given(count=st.integers(1, 5), split=st.integers(0, 4), offset=st.integers(0, 200))
@settings(max_examples=15)
def test_of_few_documents_one_is_held_out(
    tmp_path_factory: pytest.TempPathFactory, count: int, split: int, offset: int
) -> None:
    folder = tmp_path_factory.mktemp("few")
    chosen = TEXTS[offset : offset + count]
    halves = [half for half in (chosen[:split], chosen[split:]) if half]
    sources = []
    for number, half in enumerate(halves):
        path = folder / f"{number}.jsonl"
        path.write_text("\n".join(json.dumps({"text": text}) for text in half))
        sources.append({"path": str(path)})
    found = prepared(folder, sources=sources, held_out=1e-9)
    assert sum(map(len, found.held_out)) == (1 if max(map(len, halves)) > 1 and _spares(halves, found) else 0)
    assert all(len(documents) for documents in found.training)
    none = prepared(folder, sources=sources, held_out=0)
    assert none.held_out == ()


def _spares(halves: list[list[str]], found: TextCorpora) -> bool:
    """Whether the lowest hash lies in a source that has others."""
    lowest = [min(int(value) for value in _all_hashes(documents)) for documents in found.training]
    return len(halves[lowest.index(min(lowest))]) > 1


def _all_hashes(documents: Documents) -> list[int]:
    return list(getattr(documents, "dataset", documents).hashes)


def test_a_validation_text_is_taken_instead(write: Any, tmp_path: Path) -> None:
    found = prepared(tmp_path, path=write(TEXTS[:50]), validation=write(TEXTS[50:60], "b.jsonl"))
    assert texts(found.training, found) == TEXTS[:50]
    assert texts(found.held_out, found) == TEXTS[50:60]


def test_sources_say_what_differs(write: Any, tmp_path: Path) -> None:
    sources = [
        {"path": write(TEXTS[:9], "a.jsonl", "body"), "text_field": "body"},
        {"path": write(TEXTS[9:20], "b.jsonl")},
    ]
    found = prepared(tmp_path, sources=sources, held_out=0)
    assert texts(found.training, found) == TEXTS[:20]
    assert found.weights is None


def test_the_standard_library_is_a_corpus(tmp_path: Path) -> None:
    files = text_files(PYTHON_LIBRARY)
    assert files == text_files(PYTHON_LIBRARY)
    assert any(file.name == "argparse.py" for file in files)
    assert not any({"test", "tests", "site-packages", "__pycache__"} & set(file.parts) for file in files)
    assert len(files) > 100


def test_a_part_of_a_corpus_is_trained_on(write: Any, tmp_path: Path) -> None:
    config = TextDataConfig(path=write(TEXTS), held_out=0.1, epochs=1, cache_dir=str(tmp_path / "cache"))
    found = prepare_corpora(config)
    batch = BatchConfig(tokens=256, context=64)
    work = DocumentWork.of_break_even(100)
    made = TextBatches(config, batch, found, work=work, microbatches=batch.count())
    trained = [
        found.tokenizer.decode(tokens[begin:end].tolist(), skip_special=True)
        for one in made
        for (tokens, offsets, *_), parts in zip(one.microbatches, one.microbatches.parts, strict=True)
        for begin, end in itertools.pairwise(offsets.tolist() if parts else [])
    ]
    assert sorted(trained) == sorted(texts(found.training, found))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "either path or sources"),
        ({"path": "a", "sources": [{"path": "b"}]}, "either path or sources"),
        ({"sources": [{"path": "a", "weight": 1}, {"path": "b"}]}, "every source a weight"),
        ({"path": "a", "validation": "b", "held_out": 0.1}, "keep one"),
        ({"path": "a", "held_out": 1.0}, "held_out"),
        ({"path": "a", "max_length": 1}, "max_length"),
        ({"sources": [{"path": "a", "weight": 0}]}, "weight"),
    ],
)
def test_texts_that_say_two_things_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TextDataConfig(**values)


def test_a_text_that_is_held_out_whole_is_refused(write: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all 3 are held out"):
        prepared(tmp_path, path=write([TEXTS[0]] * 3), held_out=1 - 1e-12)


def test_messages_call_a_text_by_its_paths() -> None:
    assert TextDataConfig(path=("a", "b")).label == "a, b"
    assert TextDataConfig(sources=({"path": "c"}, {"path": ("d", "e")})).label == "c, d, e"


def test_a_text_is_the_same_wherever_it_lies_and_another_once_a_word_changes(write: Any, tmp_path: Path) -> None:
    def facts(name: str, texts: list[str], cache: str, **values: Any) -> dict[str, Any]:
        sources = [{"path": [write(texts, name)], "weight": 2}, {"path": write(TEXTS[:9], f"of {name}"), "weight": 1}]
        config = TextDataConfig(sources=sources, held_out=0.2, cache_dir=str(tmp_path / cache), **values)
        return prepare_corpora(config).facts

    first = facts("a.jsonl", TEXTS, "cache")
    identity = text_identity(json.loads(json.dumps(first)))
    assert identity == text_identity(facts("a.jsonl", TEXTS, "cache"))
    assert identity == text_identity(facts("b.jsonl", TEXTS, "elsewhere"))
    assert identity != text_identity(facts("c.jsonl", [*TEXTS[:-1], "another"], "cache"))
    assert identity != text_identity(facts("a.jsonl", TEXTS, "cache", eos=False))
    assert identity != text_identity({**first, "weights": (1.0, 1.0)})
