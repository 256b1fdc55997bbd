"""Preparation of a tokenised corpus from text files."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import os
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cordillera.data.files import cache_folder, disk_errors
from cordillera.data.language.cleaning import Cleaner, CleaningConfig
from cordillera.data.language.data_folders import data_files
from cordillera.data.language.documents import Document, read_documents
from cordillera.data.language.shards import FORMAT, ShardWriter, TextDataset
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError, at_key

PYTHON_LIBRARY = "python-library"
"""Name of the corpus that needs no files of the user."""

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 256
_DEADLINE_S = 600.0
_POLL_S = 0.2


class TextSettings(BaseModel):
    """Tokenisation of text, the same for one corpus and for a mixture.

    Attributes:
        path: File, folder or pattern, or several of them, read as one corpus; ``python-library`` is the source of the
            running Python's standard library, which every machine has.
        tokenizer: File or folder of a tokenizer; or ``bytes``, or the name of an asset, such as ``smollm2``.
        text_field: Key or column of the text in JSON lines, Parquet and Arrow.
        unit: Unit that is a document in a plain text file: the ``file``, or every ``line``.
        bos: Whether documents begin with the begin-of-text token. Default: what the tokenizer's model expects.
        eos: Whether documents end with the end-of-text token.
        cleaning: Rules for dropping documents. Default: empty documents only.
        shard_tokens: Number of tokens at which a shard of the prepared corpus is closed.
        processes: Number of processes that tokenise; 0 to tokenise in the calling process. The result is the same.
        cache_dir: Folder of prepared corpora. Default: ``$CORDILLERA_CACHE``, else ``~/.cache/cordillera``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str | tuple[str, ...] | None = None
    tokenizer: str = "bytes"
    text_field: str = "text"
    unit: Literal["file", "line"] = "file"
    bos: bool | None = None
    eos: bool = True
    cleaning: CleaningConfig | None = None
    shard_tokens: int = Field(1 << 27, ge=1)
    processes: int = Field(0, ge=0)
    cache_dir: str | None = None


class TextConfig(TextSettings):
    """Text of one corpus, and its tokenisation."""

    path: str | tuple[str, ...]


def text_files(path: str | Sequence[str]) -> tuple[Path, ...]:
    """Return the files of a corpus, in the order in which they are read.

    Args:
        path: Files, folders or patterns, as in :func:`cordillera.data.language.data_folders.data_files`; or
            ``python-library``, the source files of the standard library of the running Python, without its tests: real
            text of very unequal lengths that every machine has (a folder of that name is ``./python-library``).
    """
    found: list[Path] = []
    for one in [path] if isinstance(path, str) else path:
        found += _python_library() if one == PYTHON_LIBRARY else data_files(one)
    for file in found:
        if not file.is_file():
            raise DataError("there is no such file", where=str(file))
    return tuple(found)


def _python_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _NOT_LIBRARY]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    found = sorted(file for file in found if file.stat().st_size)
    if not found:
        raise DataError("this Python came without the sources of its library", where=str(root))
    return found


def _name(path: str | Sequence[str], files: Sequence[Path]) -> str:
    """Name of a corpus in the cache, before its key."""
    named = PYTHON_LIBRARY in ([path] if isinstance(path, str) else path)
    return PYTHON_LIBRARY if named else files[0].name.split(".")[0]


def prepare_text(
    config: TextConfig,
    *,
    language: Callable[[str], str] | None = None,
    quality: Callable[[str], float] | None = None,
    wait_s: float = 0.0,
    where: str = "path",
) -> TextDataset:
    """Read, clean and tokenise the text of ``config``; a second call opens the cached corpus.

    A preparation that was interrupted goes on after its last whole shard and gives the same files. The ``facts`` of the
    corpus count documents that were read, kept, and dropped by reason.

    Args:
        language: Function that names the language of a text, for ``cleaning.languages``. Two functions of one module
            and name count as the same.
        quality: Function that scores a text, for ``cleaning.min_quality``.
        wait_s: Longest time in seconds to wait for another process that prepares the same text.
        where: Key that errors name where the path is wrong.

    Raises:
        DataError: bad input (file and row are named), no document is left, another process prepares the same text.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    with at_key(where):
        paths = text_files(config.path)
    ends = _ends(tokenizer, tokenizer.adds_bos if config.bos is None else config.bos, config.eos)
    key = _key(config, tokenizer, ends, paths, (language, quality))
    folder = cache_folder(config.cache_dir) / "text" / f"{_name(config.path, paths)}-{key}"
    if (folder / "meta.json").exists():
        return TextDataset(folder)
    # Without a cleaning configuration empty documents are still dropped, and the report has the same counts.
    none = CleaningConfig(exact=False, near_duplicates=None, line_repeats=None, repeated_ngrams={})
    cleaner = Cleaner(config.cleaning or none, language=language, quality=quality)
    partial = folder.with_name(f".{folder.name}.partial")
    with _only_one(folder, wait_s):
        if not (folder / "meta.json").exists():
            _write(config, tokenizer, ends, paths, cleaner, partial)
            with disk_errors(folder):
                os.replace(partial, folder)
    return TextDataset(folder)


_Ends = tuple[list[int], list[int]]


def _write(
    config: TextConfig, tokenizer: Tokenizer, ends: _Ends, paths: tuple[Path, ...], cleaner: Cleaner, partial: Path
) -> None:
    if (partial / "meta.json").exists():  # interrupted between the last file and the renaming
        return
    writer = ShardWriter(partial, tokenizer.vocab_size, config.shard_tokens)
    try:
        kept = cleaner.clean(
            lambda: read_documents(
                paths,
                text_field=config.text_field,
                unit=config.unit,
                url_field=cleaner.config.url_field,
                date_field=cleaner.config.date_field,
            )
        )
        rest = itertools.islice(kept, writer.documents, None)
        before, after = ends
        with _encoders(config, tokenizer) as encode:
            hashes: deque[int] = deque()  # hashes of the texts in flight; tokens arrive in the same order
            for tokens in encode(_batches(_hashed(rest, hashes))):
                writer.append([*before, *tokens, *after], hashes.popleft())
        if not cleaner.report()["kept"]:
            raise DataError(
                f"no document is left: {_said(cleaner.report())}",
                where=str(config.path),
                remedy="check text_field, and what cleaning drops",
            )
        facts = {
            "report": cleaner.report(),
            "files": [str(path) for path in paths],
            "tokenizer": {"path": str(tokenizer.path), "fingerprint": tokenizer.fingerprint},
            "vocab_size": tokenizer.vocab_size,
            "bos_id": before[0] if before else None,
            "eos_id": after[0] if after else None,
        }
        writer.finish(facts)
    finally:
        writer.abandon()


def _said(report: dict[str, Any]) -> str:
    reasons = [f"{count} {reason}" for reason, count in report["dropped"].items() if count]
    return f"{report['documents']} were read" + (f", dropped: {', '.join(reasons)}" if reasons else "")


def _ends(tokenizer: Tokenizer, bos: bool, eos: bool) -> _Ends:
    before = tokenizer.bos_id if bos else None
    after = tokenizer.document_end_id if eos else None
    for wanted, token, name in ((bos, before, "bos"), (eos, after, "eos")):
        if wanted and token is None:
            raise DataError(
                f"the vocabulary has no token for {name}", where=str(tokenizer.path), remedy=f"set {name} = false"
            )
    return [] if before is None else [before], [] if after is None else [after]


def _key(
    config: TextConfig,
    tokenizer: Tokenizer,
    ends: _Ends,
    paths: tuple[Path, ...],
    functions: tuple[Callable[[str], Any] | None, ...],
) -> str:
    choices = config.model_dump(mode="json", exclude={"path", "tokenizer", "bos", "eos", "processes", "cache_dir"})
    choices |= {
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "ends": ends,
        "files": [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths],
        "functions": [
            f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(type(function)))}"
            for function in functions
            if function is not None
        ],
    }
    return hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()[:16]


def _hashed(documents: Iterable[Document], hashes: deque[int]) -> Iterator[Document]:
    for document in documents:
        hashes.append(int.from_bytes(hashlib.blake2b(document.text.encode(), digest_size=8).digest(), "little"))
        yield document


def _batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document.text)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


_Encode = Callable[[Iterator[list[str]]], Iterator[list[int]]]


@contextlib.contextmanager
def _encoders(config: TextConfig, tokenizer: Tokenizer) -> Iterator[_Encode]:
    """Give a function from batches of texts to their tokens, in order."""
    if config.processes == 0:
        yield lambda batches: (tokens for batch in batches for tokens in tokenizer.encode_batch(batch))
        return
    pool = ProcessPoolExecutor(
        config.processes, mp_context=get_context("spawn"), initializer=_start, initargs=(config.tokenizer,)
    )

    def encode(batches: Iterator[list[str]]) -> Iterator[list[int]]:
        # The number of batches in flight bounds memory, whatever the size of the corpus.
        waiting: deque[Future[list[list[int]]]] = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(_encode_batch, batch))
                if len(waiting) > 2 * config.processes:
                    yield from waiting.popleft().result(_DEADLINE_S)
            while waiting:
                yield from waiting.popleft().result(_DEADLINE_S)
        except BrokenProcessPool as error:
            remedy = "see whether memory ran out; start again: it goes on after the last whole shard"
            raise DataError("a process that tokenises has died", where="processes", remedy=remedy) from error
        except concurrent.futures.TimeoutError as error:
            raise DataError(f"no batch was tokenised within {_DEADLINE_S:.0f} s", where="processes") from error

    try:
        yield encode
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: Tokenizer | None = None


def _start(path: str) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = load_tokenizer(path)


def _encode_batch(texts: list[str]) -> list[list[int]]:
    assert _worker is not None
    return _worker.encode_batch(texts)


@contextlib.contextmanager
def _only_one(folder: Path, wait_s: float) -> Iterator[None]:
    """Hold the exclusive right to prepare a folder; it is released when the process ends, however it ends."""
    import fcntl

    path = folder.with_name(f".{folder.name}.lock")
    with disk_errors(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115
    deadline = time.monotonic() + wait_s
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise DataError(
                        "another process is preparing this text", where=str(folder), remedy="wait for it"
                    ) from error
            time.sleep(_POLL_S)
        yield
