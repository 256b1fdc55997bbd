"""Tokenised documents on disk: memory-mapped shards of tokens with the documents' offsets.

A corpus is one folder: ``meta.json``, and for each shard ``shard-00000.tokens`` (``uint16`` or ``uint32``,
little-endian), ``shard-00000.offsets`` (``int64 [documents + 1]``, from 0) and ``shard-00000.hashes`` (hashes of the
texts, ``uint64 [documents]``). A document never spans two shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from cordillera.data.files import disk_errors, is_intact, write_bytes
from cordillera.errors import DataError
from cordillera.files import read_sealed, sealed_json

FORMAT = 2
_REMEDY = "delete the folder and prepare the text again"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smaller of ``uint16`` and ``uint32`` that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Writes documents into shards, and continues after the shards that are already complete.

    Each shard's facts are written last, so a shard without them is incomplete and is written again.

    Args:
        vocab_size: Size of the tokenizer's vocabulary, which decides the dtype.
        shard_tokens: Number of tokens at which a shard is closed.
    """

    def __init__(self, folder: Path, vocab_size: int, shard_tokens: int) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, token_dtype(vocab_size), shard_tokens
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.shards: list[dict[str, Any]] = []
        while (facts := folder / f"shard-{len(self.shards):05}.json").exists():
            self.shards.append(read_sealed(facts, required=True, remedy=_REMEDY))
        self._file: BinaryIO | None = None

    @property
    def documents(self) -> int:
        """Number of documents in complete shards."""
        return sum(shard["documents"] for shard in self.shards)

    @property
    def _name(self) -> str:
        return f"shard-{len(self.shards):05}"

    def append(self, tokens: Sequence[int] | np.ndarray, text_hash: int) -> None:
        """Add one document of ``tokens``.

        Args:
            text_hash: 64-bit hash of the document's text, which identifies the document whatever the tokenizer.

        Raises:
            DataError: the disk is full or cannot be written.
        """
        with disk_errors(self.folder):
            if self._file is None:
                self._file = open(self.folder / f"{self._name}.tokens", "wb", buffering=1 << 20)  # noqa: SIM115
                self._digest, self._ends, self._hashes = hashlib.sha256(), [0], list[int]()
            content = np.asarray(tokens, self.dtype).tobytes()
            self._file.write(content)
        self._digest.update(content)
        self._ends.append(self._ends[-1] + len(tokens))
        self._hashes.append(text_hash)
        if self._ends[-1] >= self.shard_tokens:
            self.close()

    def close(self) -> None:
        """Finish the open shard, if there is one."""
        if self._file is None:
            return
        with disk_errors(self.folder):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self._file = None
        digests = {"tokens": self._digest.hexdigest()}
        for name, values in (("offsets", np.array(self._ends, "<i8")), ("hashes", np.array(self._hashes, "<u8"))):
            write_bytes(self.folder / f"{self._name}.{name}", values.tobytes())
            digests[name] = hashlib.sha256(values.tobytes()).hexdigest()
        facts = {"documents": len(self._ends) - 1, "tokens": self._ends[-1], "sha256": digests}
        write_bytes(self.folder / f"{self._name}.json", sealed_json(facts).encode())
        self.shards.append(facts)

    def abandon(self) -> None:
        """Close the open shard without finishing it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def finish(self, facts: dict[str, Any]) -> None:
        """Close the last shard and write ``meta.json``, with ``facts``, which makes a corpus of the folder."""
        self.close()
        meta = {"format": FORMAT, "dtype": self.dtype.str, "shards": self.shards, "facts": facts}
        write_bytes(self.folder / "meta.json", sealed_json(meta).encode())
        for number in range(len(self.shards)):
            (self.folder / f"shard-{number:05}.json").unlink()


class Documents(Protocol):
    """Tokenised documents: a corpus, or a part of one.

    Attributes:
        offsets: Start of each document, in order, and the end of the last, ``int64 [documents + 1]``.
        hashes: Hashes of the documents' texts, ``uint64 [documents]``.
    """

    folder: Path
    offsets: np.ndarray
    hashes: np.ndarray

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all tokens and of where documents end."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...


class TextDataset:
    """A tokenised corpus, memory-mapped; ``dataset[i]`` is document ``i``, ``uint16`` or ``uint32 [T]``.

    Args:
        folder: Folder that :func:`cordillera.data.language.tokenised.prepare_text` wrote.
        verify: Whether to compare every file with its checksum, which reads 1 to 2 GB a second.

    Raises:
        DataError: a file is missing, truncated or damaged; the file is named.
    """

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        self.folder = Path(folder)
        meta = read_sealed(self.folder / "meta.json", required=True, remedy=_REMEDY)
        if meta.get("format") != FORMAT:
            raise DataError(f"format {meta.get('format')} is not known here", where=str(folder), remedy=_REMEDY)
        self.dtype, self.facts, self._shards = np.dtype(meta["dtype"]), meta["facts"], meta["shards"]
        self._tokens: list[np.ndarray] = []
        offsets, documents, hashes = [np.zeros(1, np.int64)], [0], [np.zeros(0, np.uint64)]
        for number, shard in enumerate(self._shards):
            ends = self._map(number, "offsets", np.dtype("<i8"), shard["documents"] + 1)
            if ends[0] != 0 or ends[-1] != shard["tokens"] or (np.diff(ends) < 0).any():
                raise DataError(
                    "the file is damaged: offsets do not go up", where=self._place(number, "offsets"), remedy=_REMEDY
                )
            self._tokens.append(self._map(number, "tokens", self.dtype, shard["tokens"]))
            hashes.append(self._map(number, "hashes", np.dtype("<u8"), shard["documents"]))
            offsets.append(ends[1:] + offsets[-1][-1])
            documents.append(documents[-1] + shard["documents"])
        self.offsets = np.concatenate(offsets)
        """Start of each document in the corpus, and the end of the last, ``int64 [documents + 1]``."""
        self.hashes = np.concatenate(hashes)
        """Hashes of the documents' texts, ``uint64 [documents]``."""
        self._first = np.array(documents)
        if verify:
            self.verify()

    def _place(self, number: int, suffix: str) -> str:
        return str(self.folder / f"shard-{number:05}.{suffix}")

    def _map(self, number: int, suffix: str, dtype: np.dtype[Any], count: int) -> np.ndarray:
        path = Path(self._place(number, suffix))
        if not path.exists():
            raise DataError("the file is missing", where=str(path), remedy=_REMEDY)
        found, expected = path.stat().st_size, count * dtype.itemsize
        if found != expected:
            raise DataError(f"the file holds {found} bytes, {expected} were written", where=str(path), remedy=_REMEDY)
        return np.memmap(path, dtype, "r") if count else np.empty(0, dtype)

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the checksums of the tokens and offsets of all shards."""
        text = "".join(shard["sha256"]["tokens"] + shard["sha256"]["offsets"] for shard in self._shards)
        return hashlib.sha256(text.encode()).hexdigest()

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        shard = int(self._first.searchsorted(index, side="right")) - 1
        base = self.offsets[self._first[shard]]
        return self._tokens[shard][self.offsets[index] - base : self.offsets[index + 1] - base]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def verify(self) -> None:
        """Compare every file with its checksum.

        Raises:
            DataError: a checksum does not match; the file is named.
        """
        for number, shard in enumerate(self._shards):
            for suffix, expected in shard["sha256"].items():
                if not is_intact(Path(self._place(number, suffix)), expected):
                    where = self._place(number, suffix)
                    raise DataError("the file is damaged: checksum does not fit", where=where, remedy=_REMEDY)


class ChosenDocuments:
    """Documents of a corpus that the mask ``chosen``, ``bool [documents]``, selects, in the order of the corpus."""

    def __init__(self, dataset: TextDataset, chosen: np.ndarray) -> None:
        self.folder, self.dataset = dataset.folder, dataset
        self.numbers = np.flatnonzero(chosen)
        self.offsets = np.concatenate([[0], np.cumsum(np.diff(dataset.offsets)[self.numbers])])
        self.hashes = dataset.hashes[self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.dataset[int(self.numbers[index])]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the corpus's fingerprint and of the selection."""
        return hashlib.sha256(self.dataset.fingerprint.encode() + self.numbers.astype("<i8").tobytes()).hexdigest()
