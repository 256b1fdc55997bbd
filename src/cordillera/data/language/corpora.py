"""Text that a language model learns from: corpora, their shares, and held-out documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordillera.data.language.cleaning import CleaningConfig
from cordillera.data.language.shards import ChosenDocuments, Documents, TextDataset
from cordillera.data.language.tokenised import TextConfig, TextSettings, prepare_text
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError, at_key

HELD_OUT = 0.01
"""Default share of documents that are held out."""


class TextSourceConfig(BaseModel):
    """One corpus of a mixture; settings that are None are taken from ``[data]``.

    Attributes:
        path: File, folder or pattern, or several of them; or ``python-library``.
        weight: Share of the tokens, relative to the other weights. Either all sources have one, or none, and then
            sources count by their sizes.
        text_field: Key or column of the text.
        unit: Unit that is a document in a plain text file: ``file`` or ``line``.
        cleaning: Rules for dropping documents.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str | tuple[str, ...]
    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    text_field: str | None = None
    unit: Literal["file", "line"] | None = None
    cleaning: CleaningConfig | None = None


class TextDataConfig(TextSettings):
    """Text that a language model learns from; the section ``[data]`` of its recipe.

    Attributes:
        sources: Corpora of a mixture, each with its ``path`` and ``weight``; an alternative to ``path``.
        held_out: Share of the documents that are evaluated on and not learnt from: those whose text has the lowest
            hashes, so the same ones in any order or mixture and with any tokenizer. At least one if there are two; 0
            for none. Default: 0.01, and none if ``validation`` is given.
        validation: File, folder or pattern, or several of them, to evaluate on instead.
        epochs: Number of passes over each source. Default: no end.
        shuffle: Whether every epoch has a random order of its own; otherwise the order of the files.
        max_length: Largest number of tokens of a document. Default: the context; none where rows are cut anyway.
        long_documents: Treatment of longer documents: ``cut`` (into parts that do not see each other), ``drop`` or
            ``refuse``.
    """

    sources: tuple[TextSourceConfig, ...] = ()
    held_out: float | None = Field(None, ge=0, lt=1)
    validation: str | tuple[str, ...] | None = None
    epochs: int | None = Field(None, ge=1)
    shuffle: bool = True
    max_length: int | None = Field(None, ge=2)
    long_documents: Literal["cut", "drop", "refuse"] = "cut"

    @model_validator(mode="after")
    def _says_one_thing(self) -> TextDataConfig:
        if bool(self.path) == bool(self.sources):
            raise ValueError("name either path or sources, for example path = 'python-library'")
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError("sources: give every source a weight, or none")
        if self.validation and self.held_out:
            raise ValueError("held_out and validation are two ways to say on what is evaluated; keep one")
        return self

    @property
    def label(self) -> str:
        """Name of the text for messages: its paths."""
        paths = [source.path for source in self.sources] or [self.path or ""]
        return ", ".join(path if isinstance(path, str) else ", ".join(path) for path in paths)

    def corpora(self) -> list[TextConfig]:
        """Return the configuration of each source."""
        common = {name: getattr(self, name) for name in TextSettings.model_fields}
        if not self.sources:
            return [TextConfig(**common)]
        own = [source.model_dump(exclude_none=True, exclude={"weight"}) for source in self.sources]
        return [TextConfig(**common | one) for one in own]


@dataclass(frozen=True)
class TextCorpora:
    """Prepared text.

    Attributes:
        training: Documents of each source that are learnt from.
        held_out: Documents that are evaluated on; may be empty.
        weights: Shares of the sources; None for shares by size.
        tokenizer: Tokenizer of all sources.
        facts: Facts that a run records about its data, fit for JSON.
    """

    training: tuple[Documents, ...]
    held_out: tuple[Documents, ...]
    weights: tuple[float, ...] | None
    tokenizer: Tokenizer
    facts: dict[str, Any]


def prepare_corpora(config: TextDataConfig, *, wait_s: float = 0.0) -> TextCorpora:
    """Read, clean and tokenise all text of ``config``, and hold documents out; a second call uses the cached corpora.

    Args:
        wait_s: Longest time in seconds to wait for another process that prepares the same text: of many that start at
            once, one prepares it and the others open the cached corpora.

    Raises:
        DataError: bad input; no document is left to learn from; another process is preparing the same text.
    """
    with at_key("data.tokenizer"):
        tokenizer = load_tokenizer(config.tokenizer)
    configs = config.corpora()
    keys = [f"data.sources[{number}].path" for number in range(len(config.sources))] or ["data.path"]
    datasets = [prepare_text(one, wait_s=wait_s, where=key) for one, key in zip(configs, keys, strict=True)]
    validation: TextDataset | None = None
    if config.validation:
        common = config.model_copy(update={"path": config.validation, "sources": ()}).corpora()[0]
        validation = prepare_text(common, wait_s=wait_s, where="data.validation")
    part = config.held_out if config.held_out is not None else 0.0 if validation else HELD_OUT
    limit = hash_limit([dataset.hashes for dataset in datasets], part)
    chosen = [dataset.hashes < limit for dataset in datasets]
    for one, held in zip(configs, chosen, strict=True):
        if held.all():
            raise DataError(
                f"no document is left to learn from: all {len(held)} are held out",
                where=f"data, {one.path}",
                remedy="lower data.held_out, or give data.validation a text of its own",
            )
    training = [
        ChosenDocuments(dataset, ~held) if held.any() else dataset
        for dataset, held in zip(datasets, chosen, strict=True)
    ]
    held_out: list[Documents] = [validation] if validation is not None else []
    held_out += [ChosenDocuments(dataset, held) for dataset, held in zip(datasets, chosen, strict=True) if held.any()]
    weights = tuple(source.weight for source in config.sources if source.weight is not None) or None
    facts = {
        "label": config.label,
        "tokenizer": {
            "name": config.tokenizer,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
        },
        "sources": [
            {"path": one.path, **_describe(documents), "report": dataset.facts["report"]}
            for one, documents, dataset in zip(configs, training, datasets, strict=True)
        ],
        "weights": weights,
        "held_out": [_describe(documents) for documents in held_out],
    }
    return TextCorpora(tuple(training), tuple(held_out), weights, tokenizer, facts)


def _describe(documents: Documents) -> dict[str, Any]:
    return {
        "folder": str(documents.folder),
        "fingerprint": documents.fingerprint,
        "documents": len(documents),
        "tokens": int(documents.offsets[-1]),
    }


def text_identity(facts: dict[str, Any]) -> list[Any]:
    """Return a value of ``facts`` that is equal where the same tokens are seen, wherever files and caches lie."""
    texts = [[part["fingerprint"] for part in facts[name]] for name in ("sources", "held_out")]
    return [facts["tokenizer"]["fingerprint"], list(facts["weights"] or ()), *texts]


def hash_limit(hashes: list[np.ndarray], part: float) -> np.uint64:
    """Return the hash below which documents are held out; copies of a text share its hash, so all or none are.

    Where none lies below, the lowest is held out too, unless that would empty a source.

    Args:
        hashes: Hashes of each source's documents, ``uint64 [documents]``.
        part: Share of the documents; 0 for none.
    """
    limit = np.uint64(min(int(part * 2.0**64), 2**64 - 1))
    if not part or any((one < limit).any() for one in hashes):
        return limit
    least = np.uint64(min(int(one.min()) for one in hashes) + 1)
    return limit if any((one < least).all() for one in hashes) else least
