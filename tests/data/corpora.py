"""Corpora in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cordillera.data.language.corpora import TextCorpora
from cordillera.data.language.shards import TextDataset
from cordillera.data.tokenizers.byte_level import byte_tokenizer


class MemoryCorpus(TextDataset):
    """A corpus whose tokens are all different: token ``n`` is the ``n``-th of the corpus."""

    def __init__(self, lengths: list[int], folder: str = "memory") -> None:
        self.folder = Path(folder)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.hashes = np.array([(number * 0x9E3779B97F4A7C15) % 2**64 for number in range(len(lengths))], np.uint64)
        self._first = np.array([0, len(lengths)])
        self._tokens = [np.arange(self.offsets[-1], dtype=np.uint32)]
        self._shards: list[dict[str, Any]] = [{"sha256": {"tokens": str(lengths), "offsets": ""}}]


def corpora(*sources: list[int], held_out: Sequence[list[int]] = ()) -> TextCorpora:
    """Made ones of documents of these lengths."""
    training = tuple(MemoryCorpus(lengths) for lengths in sources)
    held = tuple(MemoryCorpus(lengths) for lengths in held_out)
    return TextCorpora(training, held, None, byte_tokenizer(), {})
