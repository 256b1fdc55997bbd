"""Cleaning of a text corpus before a model learns from it (Llama 3, section 3.1.1).

Removed in this order: empty documents, older versions of a page, exact duplicates, near duplicates (MinHash), lines
that recur all over the corpus, documents that repeat themselves, other languages, low quality. Every dropped document
is counted under its reason.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordillera.data.language.documents import Date, Document
from cordillera.errors import DataError
from cordillera.kernels.compiling import compiled
from cordillera.kernels.embeddings.numba_random import mix

EMPTY, OLDER, EXACT, NEAR = "empty", "older version of its page", "exact duplicate", "near duplicate"
LINES, NGRAMS, LANGUAGE, QUALITY = "only repeated lines", "repeats itself", "other language", "low quality"
REASONS = (EMPTY, OLDER, EXACT, NEAR, LINES, NGRAMS, LANGUAGE, QUALITY)
_COUNTED = ("documents", "kept", "lines", "lines dropped", "characters", "characters kept")

# Scripts without spaces between words: each character counts as a word (kana, Han, Thai, Lao).
_DENSE = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORDS = re.compile(rf"[{_DENSE}]|[^\W{_DENSE}]+")


class CleaningConfig(BaseModel):
    """Rules by which documents and lines are dropped.

    Attributes:
        url_field: Key or column of JSON lines and Parquet that holds the address of a page. Only the newest version of
            a page is kept. None if documents are not pages.
        date_field: Key or column that orders the versions of a page: a number, or text that sorts by time, as ISO 8601
            does. None for the order in which they are read.
        exact: Whether to drop documents whose text was seen before.
        near_duplicates: Estimated Jaccard similarity to a kept document from which a document is dropped. None to keep
            near duplicates.
        shingle_words: Number of words in a shingle; similarity is that of the sets of shingles.
        num_hashes: Number of hashes in a MinHash signature. The estimate's standard error is
            ``sqrt(J (1 - J) / num_hashes)``.
        seed: Seed of the hash functions.
        line_repeats: Most occurrences of a line in a bucket; all occurrences of a more frequent line are dropped. None
            to keep all lines.
        line_bucket: Number of documents in a bucket.
        repeated_ngrams: Highest share of a document's characters that may lie in n-grams seen earlier in it, by number
            of words in the n-gram (Rae et al. 2021, table A1).
        languages: Languages to keep, by the names that the ``language`` function returns. None for all.
        min_quality: Lowest score of the ``quality`` function that is kept. None for no limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url_field: str | None = None
    date_field: str | None = None
    exact: bool = True
    near_duplicates: float | None = Field(0.8, gt=0, lt=1)
    shingle_words: int = Field(5, ge=1)
    num_hashes: int = Field(128, ge=8, le=4096)
    seed: int = Field(0, ge=0)
    line_repeats: int | None = Field(6, ge=1)
    line_bucket: int = Field(30_000_000, ge=1)
    repeated_ngrams: dict[int, float] = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
    languages: tuple[str, ...] | None = None
    min_quality: float | None = None

    @model_validator(mode="after")
    def _ngrams_are_possible(self) -> CleaningConfig:
        wrong = [n for n, share in self.repeated_ngrams.items() if n < 1 or not 0 <= share <= 1]
        if wrong:
            raise ValueError(f"repeated_ngrams: {wrong[0]} must be at least 1 word, and its share from 0 to 1")
        if self.date_field is not None and self.url_field is None:
            raise ValueError("date_field: says which version of a page is newer; url_field says which page it is")
        return self


@compiled()
def _piece_hashes(content: np.ndarray, separator: int) -> np.ndarray:
    """64-bit hashes of the pieces between separators: FNV-1a, then SplitMix64's finaliser."""
    count = 1
    for byte in content:
        count += byte == separator
    found = np.empty(count, np.uint64)
    position, value = 0, np.uint64(0xCBF29CE484222325)
    for i in range(len(content) + 1):
        if i == len(content) or content[i] == separator:
            value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            found[position] = value ^ (value >> np.uint64(31))
            position, value = position + 1, np.uint64(0xCBF29CE484222325)
        else:
            value = (value ^ np.uint64(content[i])) * np.uint64(0x100000001B3)
    return found


@compiled()
def _combined(words: np.ndarray, size: int) -> np.ndarray:
    """Hashes of all runs of ``size`` neighbouring words."""
    found = np.empty(len(words) - size + 1, np.uint64)
    for i in range(len(found)):
        value = np.uint64(size)
        for j in range(size):
            value = (value ^ words[i + j]) * np.uint64(0x9E3779B97F4A7C15)
            value ^= value >> np.uint64(29)
        found[i] = value
    return found


@compiled()
def _minima(shingles: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Upper 32 bits of the smallest hash, for every seed."""
    found = np.empty(len(seeds), np.uint32)
    for k in range(len(seeds)):
        least = np.uint64(0xFFFFFFFFFFFFFFFF)
        for shingle in shingles:
            least = min(least, mix(shingle ^ seeds[k]))
        found[k] = least >> np.uint64(32)
    return found


def _hashes(text: str, separator: str) -> np.ndarray:
    return _piece_hashes(np.frombuffer(text.encode("utf-8"), np.uint8), ord(separator))


def shingles(text: str, words: int) -> np.ndarray:
    """Return distinct hashes of the runs of ``words`` words of a ``text``, sorted, ``uint64``; none without words.

    Case and punctuation do not count, and a text with fewer words is one run.
    """
    found = _WORDS.findall(text.lower())
    if not found:
        return np.empty(0, np.uint64)
    return np.unique(_combined(_hashes(" ".join(found), " "), min(words, len(found))))


def minhash(hashes: np.ndarray, num_hashes: int, seed: int = 0) -> np.ndarray:
    """Compute a signature ``uint32 [num_hashes]``, drawn with ``seed``, from the hashes of a set (Broder 1997).

    Two sets of Jaccard similarity ``J`` agree in a share of the entries with mean ``J`` and variance ``J (1 - J) /
    num_hashes``.

    Args:
        hashes: Hashes of a set, ``uint64 [N]``, at least one.
    """
    seeds = np.random.Generator(np.random.PCG64(seed)).integers(0, 2**64, num_hashes, np.uint64)
    return _minima(hashes, seeds)


def rows_per_band(threshold: float, num_hashes: int) -> int:
    """Return the most rows in a band with which locality-sensitive hashing by ``num_hashes`` finds similar pairs.

    Pairs of similarity ``threshold``, above 0, share a band with a chance of 0.95, ``1 - (1 - J^r)^(K // r)``, or more.
    """
    fitting = [rows for rows in range(1, num_hashes + 1) if 1 - (1 - threshold**rows) ** (num_hashes // rows) >= 0.95]
    return max(fitting, default=1)


class NearDuplicates:
    """Index of kept documents that finds near duplicates.

    Bands of MinHash signatures select candidates, which are checked by their estimated similarity. Memory per kept
    document is 4 bytes a hash and about 100 bytes a band.
    """

    def __init__(self, config: CleaningConfig) -> None:
        assert config.near_duplicates is not None
        self.config, self.threshold = config, config.near_duplicates
        self.rows = rows_per_band(self.threshold, config.num_hashes)
        self.bands: list[dict[bytes, list[int]]] = [{} for _ in range(config.num_hashes // self.rows)]
        self.signatures = np.empty((1024, config.num_hashes), np.uint32)
        self.count = 0

    def seen(self, text: str) -> bool:
        """Return whether a document like ``text`` was kept; if not, keep this one. Texts without words never match."""
        hashes = shingles(text, self.config.shingle_words)
        if not len(hashes):
            return False
        signature = minhash(hashes, self.config.num_hashes, self.config.seed)
        keys = [signature[i * self.rows : (i + 1) * self.rows].tobytes() for i in range(len(self.bands))]
        candidates = {other for band, key in zip(self.bands, keys, strict=True) for other in band.get(key, ())}
        if candidates:
            equal = (self.signatures[sorted(candidates)] == signature).mean(axis=1)
            if equal.max() >= self.threshold:
                return True
        if self.count == len(self.signatures):
            self.signatures = np.concatenate([self.signatures, np.empty_like(self.signatures)])
        self.signatures[self.count] = signature
        for band, key in zip(self.bands, keys, strict=True):
            band.setdefault(key, []).append(self.count)
        self.count += 1
        return False


def repeated_shares(text: str, sizes: Iterable[int]) -> Iterator[float]:
    """Yield, for each number of words in ``sizes``, the share of a text's characters in n-grams found earlier in it."""
    words = text.split()
    hashes = _hashes(" ".join(words), " ")
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    for size in sizes:
        if len(words) <= size:
            yield 0.0
            continue
        grams = _combined(hashes, size)
        order = np.argsort(grams, kind="stable")
        ordered = grams[order]
        again = order[1:][ordered[1:] == ordered[:-1]]
        starts = np.zeros(len(words) + 1, np.int64)
        starts[again] += 1
        starts[again + size] -= 1
        yield float(lengths[np.cumsum(starts[:-1]) > 0].sum() / lengths.sum())


class _LineCounter:
    """Counts hashes in sorted arrays: 16 bytes for every distinct line."""

    def __init__(self) -> None:
        self.values, self.counts = np.empty(0, np.uint64), np.empty(0, np.int64)
        self.pending: list[np.ndarray] = []
        self.size = 0

    def add(self, hashes: np.ndarray) -> None:
        self.pending.append(hashes)
        self.size += len(hashes)
        if self.size > max(1 << 20, len(self.values)):
            self._merge()

    def _merge(self) -> None:
        values, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *self.pending]), return_counts=True)
        merged, places = np.unique(np.concatenate([self.values, values]), return_inverse=True)
        sums = np.zeros(len(merged), np.int64)
        np.add.at(sums, places, np.concatenate([self.counts, counts]))
        self.values, self.counts, self.pending, self.size = merged, sums, [], 0

    def more_often_than(self, limit: int) -> np.ndarray:
        self._merge()
        return self.values[self.counts > limit]


class Cleaner:
    """Cleans a corpus.

    Where the configuration asks for it, the corpus is read once more to find the newest version of each page, and once
    more to count recurring lines.

    Args:
        language: Function that names the language of a text; required for ``languages``.
        quality: Function that scores a text; required for ``min_quality``.

    Raises:
        DataError: a function is missing that the configuration needs, or one is given that it does not use.
    """

    def __init__(
        self,
        config: CleaningConfig,
        *,
        language: Callable[[str], str] | None = None,
        quality: Callable[[str], float] | None = None,
    ) -> None:
        for name, function, key in (("language", language, "languages"), ("quality", quality, "min_quality")):
            if (function is None) != (getattr(config, key) is None):
                raise DataError(
                    f"the setting {key} and the function {name} belong together; one of them is missing",
                    where="cleaning",
                    remedy=f"set {key} and give {name}=, or neither",
                )
        self.config, self.language, self.quality = config, language, quality
        self._counts, self._dropped = dict.fromkeys(_COUNTED, 0), dict.fromkeys(REASONS, 0)

    def clean(self, documents: Callable[[], Iterable[Document]]) -> Iterator[Document]:
        """Iterate over the documents that are kept, in order, without the lines that recur.

        Args:
            documents: Function that reads the corpus from its beginning at every call.

        Raises:
            DataError: the corpus grows while it is read, no document has an address, dates of a page differ in type, or
                the quality function returns NaN.
        """
        self._counts, self._dropped = dict.fromkeys(_COUNTED, 0), dict.fromkeys(REASONS, 0)
        reasons = ("", *REASONS)
        judge = self._judge(self._newest(documents()) if self.config.url_field is not None else {})
        verdicts, frequent = array("B"), list[np.ndarray]()
        if self.config.line_repeats is not None:
            frequent = list(self._count_lines(documents(), judge, verdicts))
        entered = 0
        for number, document in enumerate(documents()):
            if frequent and number >= len(verdicts):
                raise DataError("the corpus has grown while it was read", where=f"{document.file}:{document.row}")
            reason = reasons[verdicts[number]] if frequent else judge(document, number)
            text = document.text
            self._counts["documents"] += 1
            self._counts["characters"] += len(text)
            if not reason:
                if frequent:
                    text = self._without_lines(text, frequent[entered // self.config.line_bucket])
                entered += 1
                reason = self._reason(text, document)
            if reason:
                self._dropped[reason] += 1
                continue
            self._counts["kept"] += 1
            self._counts["characters kept"] += len(text)
            yield document if text is document.text else replace(document, text=text)

    def report(self) -> dict[str, Any]:
        """Return the counts of documents read, kept, and dropped by reason; final once :meth:`clean` is exhausted."""
        return {**self._counts, "dropped": dict(self._dropped)}

    def _newest(self, documents: Iterable[Document]) -> dict[bytes, tuple[Date, int]]:
        """Date and number of the newest version of every page, by a hash of its address."""
        newest: dict[bytes, tuple[Date, int]] = {}
        for number, document in enumerate(documents):
            if not document.url or not document.text.strip():  # an empty version of a page replaces no other
                continue
            page = _page(document)
            date = number if document.date is None else document.date
            before = newest.get(page, (date, number))[0]
            if isinstance(date, str) != isinstance(before, str):
                raise DataError(
                    f"dates of {document.url} are text in one place and a number in another: {before!r}, {date!r}",
                    where=f"{document.file}:{document.row}",
                )
            if date >= before:  # type: ignore[operator]
                newest[page] = date, number
        if not newest:
            raise DataError(
                f"no document has an address in '{self.config.url_field}'", where="cleaning", remedy="set url_field"
            )
        return newest

    def _judge(self, newest: dict[bytes, tuple[Date, int]]) -> Callable[[Document, int], str]:
        """Make a stateful function that returns why a document is dropped before lines are counted, or ``""``."""
        texts: set[bytes] = set()
        near = NearDuplicates(self.config) if self.config.near_duplicates is not None else None

        def judge(document: Document, number: int) -> str:
            text = document.text
            if not text.strip():
                return EMPTY
            if newest and document.url and newest.get(_page(document), ("", number))[1] != number:
                return OLDER
            if self.config.exact:
                digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if digest in texts:
                    return EXACT
                texts.add(digest)
            return NEAR if near is not None and near.seen(text) else ""

        return judge

    def _count_lines(
        self, documents: Iterable[Document], judge: Callable[[Document, int], str], verdicts: array[int]
    ) -> Iterator[np.ndarray]:
        """Yield sorted hashes of the lines that recur too often, for every bucket."""
        assert self.config.line_repeats is not None
        counter, entered = _LineCounter(), 0
        for number, document in enumerate(documents):
            reason = judge(document, number)
            verdicts.append(REASONS.index(reason) + 1 if reason else 0)
            if reason:
                continue
            if entered and entered % self.config.line_bucket == 0:
                yield counter.more_often_than(self.config.line_repeats)
                counter = _LineCounter()
            entered += 1
            lines = _lines(document.text)
            counter.add(_hashes("\n".join(lines), "\n")[np.fromiter(map(bool, lines), bool, len(lines))])
        yield counter.more_often_than(self.config.line_repeats)

    def _without_lines(self, text: str, frequent: np.ndarray) -> str:
        lines = _lines(text)
        full = np.fromiter(map(bool, lines), bool, len(lines))
        self._counts["lines"] += int(full.sum())
        drop = np.isin(_hashes("\n".join(lines), "\n"), frequent) & full
        if not drop.any():
            return text
        self._counts["lines dropped"] += int(drop.sum())
        return "\n".join(line for line, gone in zip(text.split("\n"), drop, strict=True) if not gone)

    def _reason(self, text: str, document: Document) -> str:
        if not text.strip():
            return LINES
        config = self.config
        shares = repeated_shares(text, config.repeated_ngrams)
        if any(found > most for found, most in zip(shares, config.repeated_ngrams.values(), strict=True)):
            return NGRAMS
        if self.language is not None and self.language(text) not in (config.languages or ()):
            return LANGUAGE
        if self.quality is not None and config.min_quality is not None:
            score = self.quality(text)
            if score != score:
                raise DataError("the quality function gave no number", where=f"{document.file}:{document.row}")
            if score < config.min_quality:
                return QUALITY
        return ""


def _page(document: Document) -> bytes:
    return hashlib.blake2b(document.url.encode(), digest_size=16).digest()


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n")]
