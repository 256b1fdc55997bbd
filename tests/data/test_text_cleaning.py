"""Cleaning of text against definitions by sets and counters."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cordillera.data.language import cleaning as module
from cordillera.data.language.cleaning import (
    Cleaner,
    CleaningConfig,
    NearDuplicates,
    minhash,
    repeated_shares,
    rows_per_band,
    shingles,
)
from cordillera.data.language.documents import Document
from cordillera.errors import DataError

OFF = {"exact": False, "near_duplicates": None, "line_repeats": None, "repeated_ngrams": {}}


def _clean(
    texts: list[str], functions: dict[str, Callable] | None = None, **settings_: object
) -> tuple[list[str], dict]:
    cleaner = Cleaner(CleaningConfig(**{**OFF, **settings_}), **(functions or {}))
    documents = [Document(text, "memory", row) for row, text in enumerate(texts, 1)]
    kept = [document.text for document in cleaner.clean(lambda: documents)]
    report = cleaner.report()
    assert report["documents"] == len(texts) == report["kept"] + sum(report["dropped"].values())
    assert report["kept"] == len(kept)
    assert report["characters kept"] == sum(map(len, kept))
    return kept, report


def _words(draw: random.Random, count: int, vocabulary: int = 2000) -> list[str]:
    return [f"w{draw.randrange(vocabulary)}" for _ in range(count)]


def _sets(text: str, size: int) -> set[tuple[str, ...]]:
    words = text.lower().split()
    size = min(size, len(words))
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)} if words else set()


@given(seed=st.integers(0, 10**6), size=st.integers(1, 6))
@settings(max_examples=60)
def test_shingles_are_a_set_of_runs_of_words(seed: int, size: int) -> None:
    draw = random.Random(seed)
    one, other = (" ".join(_words(draw, draw.randrange(0, 60), 12)) for _ in range(2))
    ours, theirs = shingles(one, size), shingles(other, size)
    assert len(ours) == len(_sets(one, size))
    assert len(np.intersect1d(ours, theirs)) == len(_sets(one, size) & _sets(other, size))


def test_shingles_see_no_case_or_punctuation_and_words_where_no_spaces_are() -> None:
    assert shingles("The cat -- sat.", 3).tolist() == shingles("the CAT, sat", 3).tolist()
    assert len(shingles("漢字かな", 2)) == 3
    assert len(shingles("... !", 3)) == 0


@given(shared=st.integers(0, 400), own=st.integers(0, 200), seed=st.integers(0, 10**6))
@settings(max_examples=120)
def test_minhash_estimates_jaccard_within_its_bound(shared: int, own: int, seed: int) -> None:
    """Five standard errors of a binomial: one example in two million lies outside."""
    values = np.unique(np.random.default_rng(seed).integers(0, 2**64, shared + 2 * own + 2, np.uint64))
    one = np.concatenate([values[:shared], values[shared : shared + own], values[-2:-1]])
    other = np.concatenate([values[:shared], values[shared + own : shared + 2 * own], values[-1:]])
    jaccard = len(np.intersect1d(one, other)) / len(np.union1d(one, other))
    hashes = 256
    estimate = float((minhash(one, hashes, seed) == minhash(other, hashes, seed)).mean())
    assert abs(estimate - jaccard) <= 5 * math.sqrt(jaccard * (1 - jaccard) / hashes) + 1 / hashes


def test_minhash_is_unbiased() -> None:
    draw = np.random.default_rng(1)
    errors = []
    for seed in range(300):
        values = draw.integers(0, 2**64, 150, np.uint64)
        signature = minhash(values[:100], 128, seed) == minhash(values[50:], 128, seed)
        errors.append(float(signature.mean()) - 1 / 3)
    assert abs(np.mean(errors)) < 4 * math.sqrt(2 / 9 / 128 / 300)
    assert np.std(errors) == pytest.approx(math.sqrt(2 / 9 / 128), rel=0.2)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.95])
def test_bands_find_pairs_at_the_threshold(threshold: float) -> None:
    rows = rows_per_band(threshold, 128)
    found = [1 - (1 - threshold**r) ** (128 // r) for r in (rows, rows + 1)]
    assert found[0] >= 0.95 > found[1]


def test_near_duplicates_are_those_of_all_pairs() -> None:
    """Pairs well above the threshold are dropped, pairs well below stay, by true similarity over all kept texts."""
    draw = random.Random(3)
    texts = [" ".join(_words(draw, 200)) for _ in range(40)]
    for text in list(texts):
        words = text.split()
        for changes in (1, 20, 60):
            copy = list(words)
            for place in draw.sample(range(len(copy)), changes):
                copy[place] = "changed"
            texts.append(" ".join(copy))
    config = CleaningConfig(near_duplicates=0.7, shingle_words=3, num_hashes=256)
    near = NearDuplicates(config)
    kept: list[set] = []
    dropped = 0
    for text in texts:
        own = _sets(text, 3)
        best = max((len(own & other) / len(own | other) for other in kept), default=0.0)
        seen = near.seen(text)
        if best > 0.85:
            assert seen
        if best < 0.55:
            assert not seen
        dropped += seen
        if not seen:
            kept.append(own)
    assert 40 <= dropped < 120


def test_copies_are_dropped_and_the_first_stays() -> None:
    texts = ["a b c", "a b c", "A b c!", "", " \n", "d"]
    kept, report = _clean(texts, exact=True)
    assert kept == ["a b c", "A b c!", "d"]
    assert report["dropped"]["exact duplicate"] == 1
    assert report["dropped"]["empty"] == 2
    kept, report = _clean(texts, exact=True, near_duplicates=0.8)
    assert kept == ["a b c", "d"]
    assert report["dropped"]["near duplicate"] == 1
    assert _clean(["...", "!!", "..."], near_duplicates=0.8)[0] == ["...", "!!", "..."]


@given(
    texts=st.lists(st.lists(st.sampled_from(["a", " a", "b", "c c", "", "d"]), max_size=5).map("\n".join), max_size=14),
    limit=st.integers(1, 4),
    bucket=st.integers(1, 6),
    exact=st.booleans(),
)
@settings(max_examples=120)
def test_lines_are_dropped_that_recur_in_a_bucket(texts: list[str], limit: int, bucket: int, exact: bool) -> None:
    entered = [text for text in texts if text.strip()]
    if exact:
        entered = list(dict.fromkeys(entered))
    expected, lines_dropped = [], 0
    for begin in range(0, len(entered), bucket):
        group = entered[begin : begin + bucket]
        counts = Counter(line.strip() for text in group for line in text.split("\n") if line.strip())
        for text in group:
            lines = [line for line in text.split("\n") if counts[line.strip()] <= limit]
            lines_dropped += len(text.split("\n")) - len(lines)
            if "".join(lines).strip():
                expected.append("\n".join(lines))
    kept, report = _clean(texts, exact=exact, line_repeats=limit, line_bucket=bucket)
    assert kept == expected
    assert report["lines dropped"] == lines_dropped
    assert report["dropped"]["only repeated lines"] == len(entered) - len(expected)


def test_many_lines_are_counted_in_parts() -> None:
    counter = module._LineCounter()
    draw = np.random.default_rng(0)
    everything = [draw.integers(0, 300_000, 700_000).astype(np.uint64) for _ in range(4)]
    for part in everything:
        counter.add(part)
    assert len(counter.pending) < 4
    values, counts = np.unique(np.concatenate(everything), return_counts=True)
    np.testing.assert_array_equal(counter.more_often_than(9), values[counts > 9])


@given(seed=st.integers(0, 10**6), words=st.integers(1, 5))
@settings(max_examples=100)
def test_the_repeated_share_is_that_of_marked_words(seed: int, words: int) -> None:
    draw = random.Random(seed)
    found = [draw.choice(["a", "bb", "ccc", "漢"]) for _ in range(draw.randrange(0, 40))]
    seen, marked = set(), set()
    for i in range(len(found) - words + 1):
        gram = tuple(found[i : i + words])
        if gram in seen:
            marked |= set(range(i, i + words))
        seen.add(gram)
    expected = sum(len(found[i]) for i in marked) / max(sum(map(len, found)), 1)
    assert list(repeated_shares("  ".join(found), [words])) == [pytest.approx(expected, abs=1e-12)]


def test_every_reason_is_counted_once() -> None:
    log = "error in line one two three " * 9
    texts = ["good text here", log, "guter Text hier", "bad"]
    functions: dict[str, Callable] = {
        "language": lambda text: "de" if "guter" in text else "en",
        "quality": lambda text: 0.1 if text == "bad" else 0.9,
    }
    kept, report = _clean(texts, functions, repeated_ngrams={5: 0.15}, languages=("en", "fr"), min_quality=0.5)
    assert kept == ["good text here"]
    assert {reason for reason, count in report["dropped"].items() if count == 1} == {
        "repeats itself",
        "other language",
        "low quality",
    }


def test_the_defaults_keep_prose_and_are_the_same_each_time() -> None:
    draw = random.Random(0)
    texts = [" ".join(_words(draw, 300)) + "\nSubscribe now" for _ in range(20)]
    documents = [Document(text, "memory") for text in texts]
    cleaner = Cleaner(CleaningConfig())
    first = [document.text for document in cleaner.clean(lambda: documents)]
    report = cleaner.report()
    assert first == [text.removesuffix("\nSubscribe now") for text in texts]
    assert [document.text for document in cleaner.clean(lambda: documents)] == first
    assert cleaner.report() == report


def test_bad_settings_and_functions_are_refused() -> None:
    with pytest.raises(DataError, match="languages and the function language belong together"):
        Cleaner(CleaningConfig(languages=("en",)))
    with pytest.raises(DataError, match="min_quality and the function quality belong together"):
        Cleaner(CleaningConfig(), quality=lambda text: 1.0)
    with pytest.raises(DataError, match="memory:1: the quality function gave no number"):
        _clean(["a"], {"quality": lambda text: float("nan")}, min_quality=0.5)
    for wrong in ({"near_duplicates": 1.0}, {"repeated_ngrams": {0: 0.1}}, {"repeated_ngrams": {3: 1.5}}, {"x": 1}):
        with pytest.raises(ValidationError):
            CleaningConfig(**wrong)


def test_a_corpus_that_grows_between_two_readings_is_refused() -> None:
    documents = [Document("a", "memory", 1)]

    def read() -> list[Document]:
        documents.append(Document(f"b{len(documents)}", "memory", len(documents) + 1))
        return list(documents)

    with pytest.raises(DataError, match="memory:3: the corpus has grown"):
        list(Cleaner(CleaningConfig()).clean(read))


_versions = st.tuples(st.sampled_from(["", "a", "b", "c"]), st.sampled_from(["", "x", "y", "z"]), st.integers(0, 3))


@given(versions=st.lists(_versions, min_size=1, max_size=12), dated=st.booleans(), kind=st.sampled_from([int, str]))
@settings(max_examples=150)
def test_of_a_page_the_newest_version_stays(
    versions: list[tuple[str, str, int]], dated: bool, kind: Callable[[int], int | str]
) -> None:
    """By its date, else by its place; the later of two of one date. Empty versions and what is no page do not count."""
    documents = [
        Document(text, "memory", row, url, kind(date) if dated and url else None)
        for row, (url, text, date) in enumerate(versions)
    ]
    ages = [date if dated else 0 for _, _, date in versions]
    expected = [
        document
        for row, document in enumerate(documents)
        if document.text
        and not any(
            other.url == document.url and other.text and (ages[i], i) > (ages[row], row)
            for i, other in enumerate(documents)
            if document.url
        )
    ]
    config = CleaningConfig(**OFF, url_field="url", date_field="date" if dated else None)
    cleaner = Cleaner(config)
    if not any(document.url and document.text for document in documents):
        with pytest.raises(DataError, match="no document has an address in 'url'"):
            list(cleaner.clean(lambda: documents))
        return
    assert list(cleaner.clean(lambda: documents)) == expected
    dropped = cleaner.report()["dropped"]
    assert dropped["empty"] == sum(not document.text for document in documents)
    assert dropped["older version of its page"] == len(documents) - len(expected) - dropped["empty"]


def test_dates_of_one_page_are_of_one_kind() -> None:
    documents = [Document("one", "memory", 1, "a", 2020), Document("two", "memory", 2, "a", "2021")]
    cleaner = Cleaner(CleaningConfig(**OFF, url_field="url", date_field="date"))
    with pytest.raises(DataError, match="memory:2: dates of a are text in one place and a number in another"):
        list(cleaner.clean(lambda: documents))
    with pytest.raises(ValidationError, match="date_field: says which version"):
        CleaningConfig(date_field="date")


def mixed(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), in integers of any size."""
    every = 2**64 - 1
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & every
    value = (value ^ value >> 27) * 0x94D049BB133111EB & every
    return value ^ value >> 31


@pytest.mark.parametrize("seed", [0, 7])
def test_signatures_are_the_least_mixed_hashes(seed: int) -> None:
    hashes = np.random.default_rng(1).integers(0, 2**64, 50, dtype=np.uint64)
    seeds = np.random.Generator(np.random.PCG64(seed)).integers(0, 2**64, 16, np.uint64)
    expected = [min(mixed(int(one) ^ int(key)) for one in hashes) >> 32 for key in seeds]
    assert minhash(hashes, 16, seed).tolist() == expected
