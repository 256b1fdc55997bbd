"""Packing of documents into microbatches of equal work, with outlier delay (WLB-LLM, Wang et al. 2025).

Microbatches of equally many tokens differ in work, because attention under a document mask costs the sum of squared
lengths, and the slowest holds up the pipeline. Documents are therefore packed by predicted work into microbatches that
may differ in tokens. The longest documents, which no packing can balance, wait in queues until there is one for every
microbatch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cordillera.data.packing.work import DocumentWork
from cordillera.errors import DataError
from cordillera.partition import NOWHERE, two_key_greedy

AtLeastOne = Annotated[int, Field(ge=1)]


class PackedDocument(NamedTuple):
    """A document of a microbatch.

    Attributes:
        number: Number of the document in the stream, from 0; a loader finds the tokens by it.
        length: Length in tokens.
        arrival: Number of the iteration whose global batch brought the document, from 0.
    """

    number: int
    length: int
    arrival: int


class Microbatch(tuple[PackedDocument, ...]):
    """Documents that are computed together, each under its own mask."""

    __slots__ = ()

    @property
    def lengths(self) -> list[int]:
        """Lengths of the documents, in tokens."""
        return [document.length for document in self]

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Iteration:
    """Microbatches of one optimizer step.

    Attributes:
        number: Number of the iteration, from 0.
        microbatches: The configured number of microbatches; some are empty if there are few documents.
    """

    number: int
    microbatches: tuple[Microbatch, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of all microbatches. It differs between steps: divide a loss by its own step's number."""
        return sum(microbatch.tokens for microbatch in self.microbatches)

    @property
    def documents(self) -> list[PackedDocument]:
        """Documents of all microbatches."""
        return [document for microbatch in self.microbatches for document in microbatch]


class PackingConfig(BaseModel):
    """Settings of a :class:`Packer`.

    Attributes:
        microbatches: Number of microbatches of an iteration, over all pipelines: ``PP x DP`` in the paper.
        bound: Largest number of tokens of a microbatch, limited by the memory of a device. A bound above the context
            lets microbatches of short documents balance the attention of long ones.
        thresholds: Rising document lengths ``L_1 < L_2 < ...``: documents from ``L_i`` tokens on, and shorter than
            ``L_{i+1}``, wait in queue ``i``. Empty for no queues.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    microbatches: AtLeastOne
    bound: AtLeastOne
    thresholds: tuple[AtLeastOne, ...] = ()

    @field_validator("thresholds")
    @classmethod
    def rising(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        """Validate that each threshold is above the one before."""
        if any(a >= b for a, b in itertools.pairwise(value)):
            raise ValueError(f"{list(value)} does not rise")
        return value


class Packer:
    """Packs one global batch after another; the result depends only on the batches given, and is equal on all ranks.

    Attributes:
        config: Settings of the packing.
        workload: Predicted work of a document.
    """

    def __init__(self, config: PackingConfig, workload: DocumentWork) -> None:
        self.config, self.workload = config, workload
        self._iteration = self._arrived = 0
        self._queues: list[deque[PackedDocument]] = [deque() for _ in config.thresholds]
        self._remained: list[PackedDocument] = []

    @property
    def waiting(self) -> list[PackedDocument]:
        """Documents that have arrived and are not yet in an iteration, in the order of their arrival."""
        return sorted(itertools.chain(self._remained, *self._queues))

    @property
    def arrived(self) -> int:
        """Number of documents that have arrived, which is the number of the next one."""
        return self._arrived

    @property
    def remaining(self) -> int:
        """Number of tokens of the documents that found no room in the last iteration, without those in queues."""
        return sum(document.length for document in self._remained)

    def pack(self, lengths: Iterable[int]) -> Iteration:
        """Take the ``lengths`` in tokens of a global batch's documents, and return an iteration (algorithm 1).

        Raises:
            DataError: A document is empty or longer than the bound; no document is taken in then.
        """
        new: list[PackedDocument] = []
        for document in self._received(lengths):
            queue = sum(document.length >= threshold for threshold in self.config.thresholds)
            (self._queues[queue - 1] if queue else new).append(document)
        for waiting in self._queues:
            # One for each microbatch; several rounds only if the queue holds that many, so that it does not grow.
            ready = len(waiting) // self.config.microbatches * self.config.microbatches
            new += [waiting.popleft() for _ in range(ready)]
        return self._emitted(new)

    def drain(self) -> Iterator[Iteration]:
        """Yield iterations of all documents that wait at the stream's end; some can be unbalanced or partly empty."""
        new = list(itertools.chain(*self._queues))
        for waiting in self._queues:
            waiting.clear()
        while new or self._remained:
            yield self._emitted(new)
            new = []

    def _received(self, lengths: Iterable[int]) -> list[PackedDocument]:
        documents = []
        for number, value in enumerate(lengths, self._arrived):
            try:
                length = index(value)
            except TypeError:
                raise DataError(f"{value!r} is not a number of tokens", where=f"document {number}") from None
            if not 1 <= length <= self.config.bound:
                raise DataError(
                    f"{length} tokens do not fit into microbatches of 1 to {self.config.bound}",
                    where=f"document {number}",
                    remedy="leave empty documents out; cut long ones, or raise the bound",
                )
            documents.append(PackedDocument(number, length, self._iteration))
        self._arrived += len(documents)
        return documents

    def _emitted(self, new: list[PackedDocument]) -> Iteration:
        new.sort(key=lambda document: (-document.length, document.number))
        documents = self._remained + new
        lengths = [document.length for document in documents]
        work = list(map(self.workload, lengths))
        places = two_key_greedy(work, lengths, self.config.microbatches, self.config.bound).tolist()
        packed: list[list[PackedDocument]] = [[] for _ in range(self.config.microbatches)]
        for document, place in zip(documents, places, strict=True):
            if place != NOWHERE:
                packed[place].append(document)
        # The oldest document goes first, into an empty microbatch, where it fits: no document waits for ever.
        self._remained = sorted(d for d, place in zip(documents, places, strict=True) if place == NOWHERE)
        self._iteration += 1
        return Iteration(self._iteration - 1, tuple(map(Microbatch, packed)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`, fit for JSON."""
        return {
            "config": self.config.model_dump(mode="json"),
            "workload": self.workload.model_dump(mode="json"),
            "iteration": self._iteration,
            "arrived": self._arrived,
            "queues": [[list(document) for document in queue] for queue in self._queues],
            "remained": [list(document) for document in self._remained],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a packer with the same configuration and workload.

        The stream must continue with document ``state["arrived"]``; tokens of waiting documents are read again by
        number.

        Raises:
            DataError: The state belongs to another packer or is damaged; this packer stays unchanged.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise DataError(f"keys are {', '.join(map(str, state))}", where="state of a packer",
                            remedy=f"they must be {', '.join(own)}")  # fmt: skip
        for name in ("config", "workload"):
            if state[name] != own[name]:
                raise DataError(
                    f"{name} was {state[name]}, now it is {own[name]}", where="state of a packer",
                    remedy="resume with the same, or drain the packer before it is changed",
                )  # fmt: skip
        try:
            queues = [deque(PackedDocument(*map(int, one)) for one in queue) for queue in state["queues"]]
            remained = [PackedDocument(*map(int, one)) for one in state["remained"]]
            iteration, arrived = int(state["iteration"]), int(state["arrived"])
        except (TypeError, ValueError) as error:
            raise DataError(f"is damaged: {error}", where="state of a packer") from error
        numbers = [document.number for document in itertools.chain(remained, *queues)]
        if len(queues) != len(self._queues) or len(set(numbers)) != len(numbers) or max(numbers, default=-1) >= arrived:
            raise DataError("is damaged: documents are twice in it, or never arrived", where="state of a packer")
        self._queues, self._remained = queues, remained
        self._iteration, self._arrived = iteration, arrived


def global_batches(lengths: Iterable[int], tokens: int) -> Iterator[list[int]]:
    """Cut a stream of document lengths into batches of about equally many tokens; the last may be short.

    A batch ends with the document that reaches a multiple of ``tokens``, counted from the beginning of the stream:
    sizes differ by up to a document, their mean does not.

    Args:
        tokens: Number of tokens of a batch: microbatches times context.

    Raises:
        DataError: ``tokens`` is below 1.
    """
    if tokens < 1:
        raise DataError(f"{tokens} tokens are no batch", where="tokens", remedy="at least 1")
    batch: list[int] = []
    taken, end = 0, tokens
    for length in lengths:
        batch.append(length)
        taken += length
        if taken >= end:
            yield batch
            batch = []
            end = (taken // tokens + 1) * tokens
    if batch:
        yield batch
