"""Streams of documents from one corpus or a mixture: in a fixed order, dealt to ranks, resumable at the exact token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from cordillera.data.language.shards import Documents
from cordillera.errors import DataError

_ORDER, _DEAL = 1, 2
"""Purposes of random streams, as keys that give each stream its own numbers."""


class StreamConfig(BaseModel):
    """Order of documents.

    Attributes:
        weights: Share of tokens of each source, above 0. Default: sources in proportion to their sizes.
        shuffle: Whether every epoch of a source has a random order of its own; otherwise the order on disk.
        seed: Seed of the orders and of the dealing to ranks.
        epochs: Number of passes over each source; None for no end. A mixture goes on without the sources that have
            ended.
        max_length: Largest number of tokens of a document; None for no limit.
        long_documents: Treatment of longer documents: ``refuse`` (an error before anything is read), ``drop``, or
            ``cut`` (into neighbouring parts of at most ``max_length``, which count as documents of their own).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: tuple[float, ...] | None = None
    shuffle: bool = True
    seed: int = Field(0, ge=0)
    epochs: int | None = Field(1, ge=1)
    max_length: int | None = Field(None, ge=1)
    long_documents: Literal["refuse", "drop", "cut"] = "refuse"


@dataclass(frozen=True)
class DocumentPiece:
    """Neighbouring tokens of one document.

    Attributes:
        tokens: ``uint16`` or ``uint32 [T]``, a view of the file.
        source: Number of the corpus.
        document: Number of the document in the corpus.
        start: Position of the first token in the document.
        ends: Whether the document (or its part, if it was cut) ends here.
    """

    tokens: np.ndarray
    source: int
    document: int
    start: int
    ends: bool


class _Items:
    """Items of a source, in the order on disk: documents, or parts of long ones."""

    def __init__(self, dataset: Documents, config: StreamConfig, number: int) -> None:
        self.dataset = dataset
        lengths = np.diff(dataset.offsets)
        limit = config.max_length
        long = lengths > limit if limit is not None else np.zeros(len(lengths), bool)
        self.long, self.limit = int(long.sum()), limit or max(int(lengths.max(initial=0)), 1)
        if self.long and config.long_documents == "refuse":
            first = int(long.argmax())
            raise DataError(
                f"{self.long} documents are longer than {limit} tokens; the first has {lengths[first]}",
                where=f"{dataset.folder}, document {first}",
                remedy='set long_documents to "drop" or "cut", or raise max_length',
            )
        parts = -(-lengths // self.limit)
        if config.long_documents == "drop":
            parts[long] = 0
        self.tokens = int(lengths[parts > 0].sum())
        self.first = np.concatenate([[0], np.cumsum(parts)])
        if not len(self):
            raise DataError("the corpus gives no documents", where=f"source {number}, {dataset.folder}")

    def __len__(self) -> int:
        return int(self.first[-1])

    def span(self, item: int) -> tuple[int, int, int]:
        """Document, first token and end (exclusive) of an item."""
        document = int(self.first.searchsorted(item, side="right")) - 1
        start = (item - int(self.first[document])) * self.limit
        length = int(self.dataset.offsets[document + 1] - self.dataset.offsets[document])
        return document, start, min(start + self.limit, length)


class DocumentStream:
    """An iterator over the documents of one rank, endless or for a number of epochs.

    All ranks know the order of all documents: the next document comes from the source that is furthest behind its share
    of tokens. Each rank gets one of every ``world_size`` neighbours in that order. The assignment is drawn at random
    for each such group, so that no period of the mixture coincides with the ranks. Each document goes to exactly one
    rank.

    The state of a stream cannot be loaded into another number of ranks, because ranks stop inside documents. A job that
    must resume with any number of ranks uses one stream for all of them, as
    :class:`cordillera.data.language.batches.TextBatches` does.

    Args:
        sources: Documents of each source.
        config: Weights of the sources, order, and treatment of long documents.
        rank: Number of this rank among those that share the data.
        world_size: Number of these ranks.

    Raises:
        DataError: there is no source, the rank is out of range, weights do not fit, or long documents are refused.
    """

    def __init__(
        self, sources: Sequence[Documents], config: StreamConfig, *, rank: int = 0, world_size: int = 1
    ) -> None:
        if not sources:
            raise DataError("a stream needs at least one corpus", where="sources")
        if not 0 <= rank < world_size:
            raise DataError(f"rank {rank} is not one of {world_size}", where="rank")
        self.config, self.rank, self.world_size = config, rank, world_size
        self._items = [_Items(source, config, number) for number, source in enumerate(sources)]
        weights = config.weights or tuple(float(max(items.tokens, 1)) for items in self._items)
        if len(weights) != len(sources) or not all(np.isfinite(weight) and weight > 0 for weight in weights):
            raise DataError(
                f"there are {len(sources)} sources and weights {list(weights)}",
                where="weights",
                remedy="give each source a finite weight above 0; leave out a source that is not wanted",
            )
        self.weights = weights
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._deal: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))
        self._position = 0
        self._drawn = [0] * len(sources)
        self._tokens = [0] * len(sources)
        self._current: tuple[int, int] | None = None
        self._offset = 0

    @property
    def counts(self) -> dict[str, Any]:
        """``items``, ``tokens`` and documents ``too long`` of every source in an epoch; tokens ``drawn`` so far."""
        return {
            "items": [len(items) for items in self._items],
            "tokens": [items.tokens for items in self._items],
            "too long": [items.long for items in self._items],
            "drawn": list(self._tokens),
        }

    def __iter__(self) -> Iterator[DocumentPiece]:
        return self

    def __next__(self) -> DocumentPiece:
        """Return the rest of the current document, or the next document."""
        piece = self._take(None)
        if piece is None:
            raise StopIteration
        return piece

    def read(self, tokens: int) -> list[DocumentPiece]:
        """Read ``tokens`` tokens in pieces, fewer only at the stream's end; the rest of a cut document comes next."""
        pieces: list[DocumentPiece] = []
        while tokens > 0:
            piece = self._take(tokens)
            if piece is None:
                break
            pieces.append(piece)
            tokens -= len(piece.tokens)
        return pieces

    def _take(self, most: int | None) -> DocumentPiece | None:
        while self._current is None:
            if not self._draw():
                return None
        source, item = self._current
        document, start, stop = self._items[source].span(item)
        begin = start + self._offset
        end = stop if most is None else min(stop, begin + most)
        if end == stop:
            self._current, self._offset = None, 0
        else:
            self._offset += end - begin
        tokens = self._items[source].dataset[document][begin:end]
        return DocumentPiece(tokens, source, document, begin, end == stop)

    def _draw(self) -> bool:
        """Advance one item in the order of all ranks; keep it if it belongs to this rank. Return False at the end."""
        epochs = self.config.epochs
        left = [s for s, items in enumerate(self._items) if epochs is None or self._drawn[s] < epochs * len(items)]
        if not left:
            return False
        source = min(left, key=lambda s: (self._tokens[s] / self.weights[s], s))
        epoch, index = divmod(self._drawn[source], len(self._items[source]))
        item = self._item(source, epoch, index)
        block, place = divmod(self._position, self.world_size)
        if self._owner(block, place) == self.rank:
            self._current = (source, item)
        _, start, stop = self._items[source].span(item)
        self._tokens[source] += stop - start
        self._drawn[source] += 1
        self._position += 1
        return True

    def _item(self, source: int, epoch: int, index: int) -> int:
        if not self.config.shuffle:
            return index
        if self._orders.get(source, (-1, None))[0] != epoch:
            random = np.random.Generator(np.random.PCG64([self.config.seed, _ORDER, source, epoch]))
            self._orders[source] = (epoch, random.permutation(len(self._items[source])))
        return int(self._orders[source][1][index])

    def _owner(self, block: int, place: int) -> int:
        if self.world_size == 1:
            return 0
        if self._deal[0] != block:
            random = np.random.Generator(np.random.PCG64([self.config.seed, _DEAL, block]))
            self._deal = (block, random.permutation(self.world_size))
        return int(self._deal[1][place])

    def _identity(self) -> dict[str, Any]:
        texts = [items.dataset.fingerprint for items in self._items]
        settings = self.config.model_dump_json()
        return {
            "sources": hashlib.sha256("".join(texts).encode()).hexdigest(),
            "config": hashlib.sha256(settings.encode()).hexdigest(),
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream, to the token: small and fit for JSON."""
        return {
            **self._identity(),
            "position": self._position,
            "drawn": list(self._drawn),
            "tokens": list(self._tokens),
            "current": None if self._current is None else list(self._current),
            "offset": self._offset,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the position of another stream of the same corpora, settings and rank.

        Raises:
            DataError: the state belongs to other corpora, settings or ranks, or a part of it is missing.
        """
        names = {
            "sources": "other corpora",
            "config": "other settings",
            "rank": "another rank",
            "world_size": "another number of ranks",
        }
        identity = self._identity()
        for key, what in names.items():
            if state.get(key) != identity[key]:
                remedy = "go on with what it was saved with, or start anew"
                raise DataError(f"the saved position belongs to {what}", where=f"stream state, {key}", remedy=remedy)
        try:
            position, offset = int(state["position"]), int(state["offset"])
            drawn, tokens = [int(n) for n in state["drawn"]], [int(n) for n in state["tokens"]]
            current = None if state["current"] is None else (int(state["current"][0]), int(state["current"][1]))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"the saved position is damaged ({error!r})", where="stream state") from None
        agree = len(drawn) == len(tokens) == len(self._items) and sum(drawn) == position
        if agree and current is not None:
            source, item = current
            agree = 0 <= source < len(self._items) and 0 <= item < len(self._items[source])
            if agree:
                _, start, stop = self._items[source].span(item)
                agree = 0 <= offset < stop - start
        if not agree:
            raise DataError("the saved position is damaged: its counts do not agree", where="stream state")
        self._position, self._drawn, self._tokens = position, drawn, tokens
        self._current, self._offset = current, offset
