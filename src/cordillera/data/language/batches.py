"""Training iterations of packed text, the same on every rank.

All ranks share one stream of documents and one plan of which documents are computed together. Only the rank that
computes a microbatch reads its tokens. Neither the plan nor its state depends on the mesh, so a run resumes at the
exact token on any other mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, overload

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from cordillera.data.language.corpora import TextCorpora, TextDataConfig
from cordillera.data.language.shards import Documents
from cordillera.data.language.stream import DocumentStream, StreamConfig
from cordillera.data.packing.packer import Packer, PackingConfig, global_batches
from cordillera.data.packing.statistics import choose_thresholds
from cordillera.data.packing.work import DocumentWork
from cordillera.errors import DataError
from cordillera.partition import imbalance

_SAMPLE_BATCHES, _SAMPLE_DOCUMENTS = 100, 8_000
"""Largest numbers of batches and of documents of the stream on which thresholds are tuned."""


IGNORED = -100
"""Label of a token that predicts nothing, as in torch."""


class PackedTokens(NamedTuple):
    """Microbatch of documents, one after another.

    Attributes:
        tokens: ``int64 [T]``.
        offsets: Start of each document, and ``T``; ``int64 [B + 1]``.
        labels: Target of each token, or ``IGNORED``, ``int64 [T]``; None for the next token of its document.
        documents: Values of each document, ``[B]``, or of each token, ``[T]``, by name; None for none.
    """

    tokens: Tensor
    offsets: Tensor
    labels: Tensor | None = None
    documents: Mapping[str, Tensor] | None = None


class DocumentPart(NamedTuple):
    """Location of neighbouring tokens of a document.

    Attributes:
        source: Number of the corpus.
        document: Number of the document in the corpus.
        start: Position of the first token in the document.
        length: Number of tokens.
    """

    source: int
    document: int
    start: int
    length: int


class BatchConfig(BaseModel):
    """Packing of documents into microbatches: the section ``[packing]`` of a language model's recipe.

    Attributes:
        tokens: Number of tokens of an iteration, over all copies of the model; a mean, because documents stay whole.
        context: Mean number of tokens of a microbatch; also the longest document, unless ``data.max_length`` is set.
        microbatches: Number of microbatches of an iteration, over all copies. Default: ``tokens / context``, rounded
            up, or more if the mesh needs more.
        method: ``balanced`` by predicted work, with queues for the longest documents (WLB-LLM, Wang et al. 2025);
            ``greedy`` gives microbatches of about equally many tokens; both keep documents whole. ``fixed`` lays all
            documents in a row and cuts it into microbatches of equally many tokens: documents are cut at their ends.
        bound: Largest number of tokens of a microbatch, limited by the memory of a device. Default: 1.5 times
            ``context``; for ``fixed``, ``context``.
        thresholds: Document lengths at which queues begin, in tokens; empty for no queues. Default: thresholds that
            balance a sample of the text best.
        queues: Largest number of thresholds to search for; fewer are taken where they balance as well.
        delay: Largest mean number of iterations that tokens may wait, for thresholds that are searched for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(16_384, ge=2, le=2**32)
    context: int = Field(2_048, ge=2, le=2**32)
    microbatches: int | None = Field(None, ge=1, le=2**20)
    method: Literal["balanced", "greedy", "fixed"] = "balanced"
    bound: int | None = Field(None, ge=2, le=2**32)
    thresholds: tuple[int, ...] | None = None
    queues: int = Field(2, ge=0, le=3)
    delay: float = Field(0.6, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _agrees(self) -> BatchConfig:
        if self.bound is not None and self.bound < self.context:
            raise ValueError(f"bound: {self.bound} is below the context of {self.context}")
        if self.thresholds and self.method != "balanced":
            raise ValueError(f"thresholds: packing that is {self.method} has no queues")
        PackingConfig.rising(self.thresholds or ())
        return self

    @property
    def most(self) -> int:
        """Largest number of tokens of a microbatch."""
        if self.bound is not None:
            return self.bound
        return self.context if self.method == "fixed" else self.context * 3 // 2

    def count(self, at_least: int = 1) -> int:
        """Return the number of microbatches of an iteration, ``at_least`` the mesh's copies times pipeline stages."""
        return self.microbatches or max(-(-self.tokens // self.context), at_least)


class Batches(Protocol):
    """Iterations of a training, which resume where they were saved."""

    def __iter__(self) -> Iterator[TextIteration]: ...
    def __next__(self) -> TextIteration: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position, fit for JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position."""
        ...


class HeldOutMicrobatches(Protocol):
    """Microbatches to evaluate on."""

    def __len__(self) -> int: ...

    def neighbours(self, first: int, count: int) -> Sequence[PackedTokens]:
        """Return ``count`` microbatches from ``first`` on, fewer at the end."""
        ...


class Microbatches(Sequence[PackedTokens]):
    """Microbatches whose tokens are read on first access.

    A microbatch without documents is one token that predicts nothing, so that every place of a schedule is filled.
    """

    def __init__(self, sources: Sequence[Documents], parts: Sequence[Sequence[DocumentPart]]) -> None:
        self.parts, self._sources = parts, sources
        self._read: dict[int, PackedTokens] = {}

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, index: int) -> PackedTokens: ...

    @overload
    def __getitem__(self, index: slice) -> list[PackedTokens]: ...

    def __getitem__(self, index: int | slice) -> PackedTokens | list[PackedTokens]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        if place not in self._read:
            self._read[place] = self._pack(self.parts[place])
        return self._read[place]

    def _pack(self, parts: Sequence[DocumentPart]) -> PackedTokens:
        return _packed(self._sources, parts)

    def neighbours(self, first: int, count: int) -> Microbatches:
        """Return ``count`` microbatches from ``first`` on, fewer at the end, with a cache of tokens of their own."""
        return Microbatches(self._sources, self.parts[first : first + count])


def _packed(sources: Sequence[Documents], parts: Sequence[DocumentPart]) -> PackedTokens:
    if not parts:
        return PackedTokens(torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1]))
    tokens = [sources[part.source][part.document][part.start : part.start + part.length] for part in parts]
    offsets = np.concatenate([[0], np.cumsum([part.length for part in parts])])
    return PackedTokens(torch.from_numpy(np.concatenate(tokens).astype(np.int64)), torch.from_numpy(offsets))


@dataclass(frozen=True)
class TextIteration:
    """Microbatches of one optimizer step.

    Attributes:
        number: Number of the iteration, from 0.
        microbatches: Microbatches of the whole job; a rank indexes only those that it computes.
        lengths: Lengths of the documents in each microbatch, in tokens.
        imbalance: Predicted work of the heaviest microbatch over that of the mean one.
        delay: Mean number of iterations that a token waited for its microbatch.
    """

    number: int
    microbatches: Sequence[PackedTokens]
    lengths: list[list[int]]
    imbalance: float
    delay: float

    @property
    def tokens(self) -> int:
        """Number of tokens of all microbatches."""
        return sum(map(sum, self.lengths))

    @property
    def documents(self) -> int:
        """Number of documents, or parts of cut ones, of all microbatches."""
        return sum(map(len, self.lengths))


class TextBatches(Iterator[TextIteration]):
    """Iterations over a text, endless or for a number of epochs; at the end, documents that still wait are packed.

    Every document comes once per epoch. Iterations in which every document is a single token, which predicts nothing,
    are skipped.

    Args:
        config: Text and the order of its documents.
        batch: Packing of documents into microbatches.
        corpora: Result of :func:`cordillera.data.language.corpora.prepare_corpora`, for ``config``.
        work: Predicted work of a document.
        microbatches: Number of microbatches of an iteration; result of :meth:`BatchConfig.count`.
        seed: Seed of the order of documents.

    Raises:
        DataError: Documents or batches do not fit into the microbatches; or, while iterating, nothing can be predicted.
    """

    def __init__(
        self,
        config: TextDataConfig,
        batch: BatchConfig,
        corpora: TextCorpora,
        *,
        work: DocumentWork,
        microbatches: int,
        seed: int = 0,
    ) -> None:
        if batch.tokens > microbatches * batch.most:
            raise DataError(
                f"{batch.tokens} tokens do not fit into {microbatches} microbatches of at most {batch.most}",
                where="packing.tokens",
                remedy="more microbatches, or a longer packing.bound",
            )
        if batch.method == "fixed" and batch.tokens < 2 * microbatches:
            raise DataError(
                f"{batch.tokens} tokens in {microbatches} rows: a single token predicts nothing",
                where="packing.tokens",
                remedy="more tokens, or fewer microbatches",
            )
        longest = config.max_length
        if batch.method != "fixed":
            longest = longest or batch.context
            if longest > batch.most:
                raise DataError(
                    f"documents of {longest} tokens do not fit into microbatches of at most {batch.most}",
                    where="data.max_length",
                    remedy="shorter documents, or a longer packing.bound",
                )
        self.batch, self.work, self.microbatches = batch, work, microbatches
        self._sources = corpora.training
        self._order = StreamConfig(
            weights=corpora.weights,
            shuffle=config.shuffle,
            seed=seed,
            epochs=config.epochs,
            max_length=longest,
            long_documents=config.long_documents,
        )
        self._stream = DocumentStream(self._sources, self._order)
        self._number = self._taken = 0
        self._packer: Packer | None = None
        self._waiting: dict[int, DocumentPart] = {}

    def __iter__(self) -> TextBatches:
        return self

    def __next__(self) -> TextIteration:
        passed, epoch = 0, sum(self._stream.counts["tokens"])
        while passed <= epoch:
            parts, delay = self._rows() if self.batch.method == "fixed" else self._pack()
            if not any(parts):
                raise StopIteration
            if any(part.length > 1 for one in parts for part in one):
                break
            passed += sum(len(one) for one in parts)
        else:
            raise DataError(
                "a whole epoch gave nothing to predict: every document, or part of one, is a single token",
                where="data",
                remedy="longer documents, or data.bos and data.eos, or longer rows",
            )
        lengths = [[part.length for part in one] for one in parts]
        self._number += 1
        return TextIteration(
            self._number - 1,
            Microbatches(self._sources, parts),
            lengths,
            imbalance([self.work.of(one) for one in lengths]),
            delay,
        )

    @property
    def thresholds(self) -> tuple[int, ...]:
        """Thresholds of the queues, in tokens."""
        return () if self.batch.method == "fixed" else self._packing().config.thresholds

    def _rows(self) -> tuple[list[list[DocumentPart]], float]:
        ends = [self.batch.tokens * place // self.microbatches for place in range(self.microbatches + 1)]
        rows = [self._stream.read(end - begin) for begin, end in itertools.pairwise(ends)]
        return [[DocumentPart(p.source, p.document, p.start, len(p.tokens)) for p in row] for row in rows], 0.0

    def _pack(self) -> tuple[list[list[DocumentPart]], float]:
        """Pack the next iteration that has documents; an empty one at the end."""
        packer = self._packing()
        while True:
            new: list[DocumentPart] = []
            # Documents that fit badly could pile up without bound: none is taken in while a whole batch remains.
            if packer.remaining < self.batch.tokens:
                new = self._take()
            is_over = not new and packer.remaining < self.batch.tokens
            self._waiting.update(enumerate(new, packer.arrived))
            if is_over:
                found = next(packer.drain(), None)
                if found is None:
                    return [], 0.0
            else:
                found = packer.pack([part.length for part in new])
            if found.tokens:
                break
        waited = sum((found.number - document.arrival) * document.length for document in found.documents)
        parts = [[self._waiting.pop(document.number) for document in one] for one in found.microbatches]
        return parts, waited / found.tokens

    def _take(self) -> list[DocumentPart]:
        """Take the next global batch: documents through the one that reaches a multiple of its tokens in the stream."""
        new: list[DocumentPart] = []
        end = (self._taken // self.batch.tokens + 1) * self.batch.tokens
        while self._taken < end:
            piece = next(self._stream, None)
            if piece is None:
                break
            new.append(DocumentPart(piece.source, piece.document, piece.start, len(piece.tokens)))
            self._taken += len(piece.tokens)
        return new

    def _packing(self) -> Packer:
        if self._packer is None:
            self._packer = self._packer_of(self._thresholds())
        return self._packer

    def _packer_of(self, thresholds: tuple[int, ...]) -> Packer:
        config = PackingConfig(microbatches=self.microbatches, bound=self.batch.most, thresholds=thresholds)
        by = self.work if self.batch.method == "balanced" else DocumentWork(token=1.0, squared=0.0)
        return Packer(config, by)

    def _thresholds(self) -> tuple[int, ...]:
        batch = self.batch
        if batch.method != "balanced" or batch.thresholds is not None:
            return batch.thresholds or ()
        stream = DocumentStream(self._sources, self._order)
        some = (len(piece.tokens) for piece in itertools.islice(stream, _SAMPLE_DOCUMENTS))
        sample = list(itertools.islice(global_batches(some, batch.tokens), _SAMPLE_BATCHES))
        plain = PackingConfig(microbatches=self.microbatches, bound=batch.most)
        return choose_thresholds(sample, plain, self.work, batch.queues, batch.delay)

    def state_dict(self) -> dict[str, Any]:
        """Return the position to the token, fit for JSON, equal on every rank; waiting documents make it longer."""
        return {
            "number": self._number,
            "taken": self._taken,
            "batch": self._identity(),
            "stream": self._stream.state_dict(),
            "packer": None if self._packer is None else self._packer.state_dict(),
            "waiting": [[number, *part] for number, part in sorted(self._waiting.items())],
        }

    def _identity(self) -> dict[str, Any]:
        return {"method": self.batch.method, "tokens": self.batch.tokens, "most": self.batch.most}

    def _resumed(self, state: dict[str, Any]) -> Packer:
        """Restore a packer; the number of microbatches and the predicted work may differ from the saved ones."""
        given = self.batch.thresholds
        packer = self._packer_of(tuple(map(int, state["config"]["thresholds"])) if given is None else given)
        own = packer.state_dict()
        if any(state[name] != own[name] for name in ("config", "workload")):
            waiting = sorted(itertools.chain(state["remained"], *state["queues"]))
            changed = {name: own[name] for name in ("config", "workload", "queues")}
            state = {**state, **changed, "remained": waiting}
        packer.load_state_dict(state)
        return packer

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position in the same text and packing, with any number of ranks and of microbatches.

        Raises:
            DataError: The state belongs to another text, order or packing, or is damaged; the iterations stay
                unchanged.
        """
        stream = DocumentStream(self._sources, self._order)
        try:
            if state["batch"] != self._identity():
                raise DataError(
                    f"the saved position belongs to another packing, {state['batch']}",
                    where="state of the text, batch",
                    remedy="go on with what it was saved with, or start anew",
                )
            number, taken = int(state["number"]), int(state["taken"])
            waiting = {int(one[0]): DocumentPart(*map(int, one[1:])) for one in state["waiting"]}
            stream.load_state_dict(state["stream"])
            packer = None
            if state["packer"] is not None:
                packer = self._resumed(state["packer"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"the saved position is damaged ({error!r})", where="state of the text") from None
        known = {} if packer is None else {document.number: document.length for document in packer.waiting}
        if known != {number: part.length for number, part in waiting.items()} or not all(
            map(self._exists, waiting.values())
        ):
            raise DataError("the saved position is damaged: its documents do not agree", where="state of the text")
        self._stream, self._packer, self._waiting = stream, packer, waiting
        self._number, self._taken = number, taken

    def _exists(self, part: DocumentPart) -> bool:
        if not 0 <= part.source < len(self._sources):
            return False
        documents = self._sources[part.source]
        if not 0 <= part.document < len(documents):
            return False
        length = int(documents.offsets[part.document + 1] - documents.offsets[part.document])
        return part.start >= 0 and 1 <= part.length <= length - part.start
