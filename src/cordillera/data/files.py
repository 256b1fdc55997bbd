"""Files that are complete or absent: checksums, writes beside and renames, errors of the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cordillera.errors import DataError
from cordillera.files import sync

_UNFINISHED = ".unfinished"


def cache_folder(chosen: str | Path | None = None) -> Path:
    """Return the folder of prepared data: ``chosen``, else ``$CORDILLERA_CACHE``, else ``~/.cache/cordillera``.

    Raises:
        DataError: If it is to be in the home folder of a user that has none.
    """
    folder = chosen or os.environ.get("CORDILLERA_CACHE") or "~/.cache/cordillera"
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise DataError(
            "this user has no home folder (HOME is not set)",
            where=str(folder),
            remedy="set CORDILLERA_CACHE to a folder that can be written",
        ) from error


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def is_intact(path: Path, sha256: str) -> bool:
    """Whether ``path`` is an ordinary file with this checksum; a folder, a pipe or a missing file is not."""
    return path.is_file() and checksum(path) == sha256


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of a full or read-only disk into a :class:`DataError` with a remedy."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            "the disk is full" if full else f"cannot be written ({error.strerror or error})",
            where=str(path),
            remedy=f"{'free some space, or ' * full}choose another folder; that of prepared data is data.cache_dir in "
            "a recipe, or CORDILLERA_CACHE in the environment",
        ) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically and flush it to the disk; its folder is created, and an error leaves an old file."""
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
def folder_beside(final: Path, replaces: bool = False) -> Iterator[Path]:
    """Create a temporary folder that is renamed to ``final`` if the block succeeds and is removed if it fails.

    If another process has finished ``final`` meanwhile, that folder is kept, as both hold the same. Folders that killed
    processes left beside ``final`` are removed.

    Args:
        replaces: Whether a folder ``final`` that is there is removed, after the new one has its name.
    """
    with _unfinished_folder(final) as beside:
        yield beside
        with disk_errors(final):
            for name in os.listdir(beside):
                sync(beside / name)
            sync(beside)
            old = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.replaced")
            if replaces and final.exists():
                os.rename(final, old)
            try:
                os.rename(beside, final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            sync(final.parent)
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def file_beside(final: Path) -> Iterator[Path]:
    """Yield a temporary file's path; the file replaces ``final`` if the block succeeds and is removed if it fails.

    What killed processes left beside ``final`` is removed.
    """
    with _unfinished_folder(final) as beside:
        yield beside / final.name
        with disk_errors(final):
            sync(beside / final.name)
            os.replace(beside / final.name, final)
            sync(final.parent)


@contextmanager
def _unfinished_folder(final: Path) -> Iterator[Path]:
    """Create a folder beside ``final`` that is removed at the end, if it is still there."""
    with disk_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final.parent)
        beside, lock = _locked_folder(final)
    try:
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        os.close(lock)


def _locked_folder(final: Path) -> tuple[Path, int]:
    """Create a folder beside ``final`` and return it with the descriptor of its lock, which ends with the process."""
    while True:
        beside = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}{_UNFINISHED}")
        beside.mkdir()
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(beside, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = beside.exists()
            except BlockingIOError:
                held = False
            except OSError:  # a file system without locks, where no folder is ever considered abandoned
                held = True
            if held:
                return beside, descriptor
            os.close(descriptor)  # another process has just removed the folder as abandoned


def _remove_abandoned(parent: Path) -> None:
    """Remove unfinished folders that no running process holds."""
    for folder in parent.glob(f".*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
