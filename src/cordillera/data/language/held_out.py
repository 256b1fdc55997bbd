"""Microbatches of the held-out documents, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cordillera.data.language.batches import BatchConfig, DocumentPart, Microbatches
from cordillera.data.language.corpora import TextCorpora


@dataclass(frozen=True)
class HeldOut:
    """Microbatches for evaluation, the same at every evaluation.

    Attributes:
        microbatches: Microbatches of the whole job, each of at most the context; none if no document was held out.
        documents: Number of documents in them.
        tokens: Number of tokens of all microbatches.
        targets: Number of tokens that are predicted.
        bytes: Bytes of the text that the targets stand for. ``loss / ln 2 / bytes`` of the targets' summed loss is bits
            per byte, which can be compared between tokenizers.
    """

    microbatches: Microbatches
    documents: int
    tokens: int
    targets: int
    bytes: int


def held_out_batches(corpora: TextCorpora, batch: BatchConfig, *, tokens: int | None = None) -> HeldOut:
    """Pack the held-out documents of ``corpora``, those with the lowest hashes first.

    Documents longer than the context are cut; a part begins with the last token of the one before, so that every token
    of a document but its first is predicted exactly once.

    Args:
        batch: Packing; its ``context`` is the largest number of tokens of a microbatch.
        tokens: Number of tokens after which to stop, exceeded by less than a context. None takes all.
    """
    packed: list[list[DocumentPart]] = []
    room = total = 0
    for part in _parts(corpora, batch.context):
        if tokens is not None and total >= tokens:
            break
        if part.length > room:
            packed.append([])
            room = batch.context
        packed[-1].append(part)
        room, total = room - part.length, total + part.length
    widths = np.array([len(content or b"") for content in corpora.tokenizer.token_bytes])
    widths[list(corpora.tokenizer.special_tokens.values())] = 0
    parts = [part for one in packed for part in one]
    texts = (corpora.held_out[p.source][p.document][p.start + 1 : p.start + p.length] for p in parts)
    return HeldOut(
        Microbatches(corpora.held_out, packed),
        len({part[:2] for part in parts}),
        total,
        total - len(parts),
        sum(int(widths[text].sum()) for text in texts),
    )


def _parts(corpora: TextCorpora, context: int) -> Iterator[DocumentPart]:
    """Parts of at least two tokens, in the order of the documents' hashes."""
    order = sorted(
        (int(value), source, document)
        for source, documents in enumerate(corpora.held_out)
        for document, value in enumerate(documents.hashes)
    )
    for _, source, document in order:
        offsets = corpora.held_out[source].offsets
        length = int(offsets[document + 1] - offsets[document])
        for start in range(0, length - 1, context - 1):
            yield DocumentPart(source, document, start, min(context, length - start))
