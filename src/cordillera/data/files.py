"""Files that are whole or not there: checksums, writes beside and renames, errors of the disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cordillera.errors import DataError


def cache_folder(chosen: str | Path | None = None) -> Path:
    """Where prepared data is kept: ``chosen``, else ``$CORDILLERA_CACHE``, else ``~/.cache/cordillera``."""
    return Path(chosen or os.environ.get("CORDILLERA_CACHE") or Path.home() / ".cache" / "cordillera").expanduser()


def expand_paths(path: str | Sequence[str]) -> tuple[Path, ...]:
    """Files of a path, a folder (its files by name) or several of them, in order; ``~`` is the home folder.

    Raises:
        DataError: a folder holds no files, or a pattern finds none.
    """
    files: list[Path] = []
    for name in [path] if isinstance(path, str) else path:
        place = Path(name).expanduser()
        if place.is_dir():
            inside = sorted(file for file in place.iterdir() if file.is_file() and not file.name.startswith((".", "_")))
            if not inside:
                raise DataError("the folder holds no files", where=str(place))
            files += inside
        elif any(mark in name for mark in "*?[") and not place.exists():
            found = sorted(place.parent.glob(place.name))
            if not found:
                raise DataError("no file fits the pattern", where=str(place))
            files += found
        else:
            files.append(place)
    return tuple(Path(os.path.abspath(file)) for file in files)


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about a full or closed disk into an error that says what to do.

    Raises:
        DataError: writing failed.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            "the disk is full" if full else f"cannot be written ({error.strerror or error})",
            where=str(path),
            remedy="free space, or choose another folder with cache_dir or the variable CORDILLERA_CACHE",
        ) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file beside its place, flush it to the disk, and rename it.

    Args:
        path: Its place; the folder is made.
        content: All of it.

    Raises:
        DataError: writing failed; the old file, if any, is still there.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(beside, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def folder_beside(final: Path) -> Iterator[Path]:
    """A folder to fill, that takes the place of ``final`` if the block ends well and disappears if it does not.

    If another process has finished ``final`` meanwhile, that one stays: both hold the same.

    Raises:
        DataError: writing failed.
    """
    beside = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}")
    try:
        with disk_errors(final):
            beside.mkdir(parents=True)
        yield beside
        with disk_errors(final):
            for name in os.listdir(beside):
                _sync(beside / name)
            _sync(beside)
            try:
                os.rename(beside, final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            _sync(final.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sealed(content: dict[str, Any]) -> bytes:
    """JSON that carries the SHA-256 of its own content."""
    body = json.dumps(content, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "content": content}, indent=1).encode()


def unsealed(path: Path) -> dict[str, Any]:
    """Read what :func:`sealed` wrote.

    Raises:
        DataError: the file is missing, is not such JSON, or does not fit its checksum.
    """
    remedy = "delete the folder and prepare the data again"
    try:
        written = path.read_bytes()
        content: dict[str, Any] = json.loads(written)["content"]
    except FileNotFoundError:
        raise DataError("the file is missing", where=str(path), remedy=remedy) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"the file is damaged ({error})", where=str(path), remedy=remedy) from None
    if sealed(content) != written:  # a byte between values is a byte of the file, too
        raise DataError("the file is damaged: checksum does not fit", where=str(path), remedy=remedy)
    return content
