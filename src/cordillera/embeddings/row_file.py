"""Rows of tables in a file that can always be read as of its last commit.

Rows are written in place. Before a row is overwritten for the first time after a commit, its old content is appended to
a log beside the file; a commit empties the log. A file that is opened with a log, after a crash or a full disk, is
taken back to the last commit. The order of these writes holds for a process that ends at any moment, not for a machine
that loses power, because only commits wait for the disk.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from cordillera.errors import CheckpointError, RunError
from cordillera.files import read_sealed, sealed_json
from cordillera.run import disk_errors, write_atomically

_HEADER, _ROWS, _LOG = "header.json", "rows.bin", "undo.log"

ROW_FILES = (_ROWS, _HEADER)
"""Names of the files in the folder of a copy."""

_SCHEMA = 1
_BLOCK = struct.Struct("<4sIqq")  # mark, CRC-32 of what follows, update of the last commit, number of rows
_MARK = b"undo"
_COPY_ROWS = 1 << 14
_READERS, _FEW_ROWS = 16, 256  # threads that read rows, and rows that one thread reads
_DAMAGED = "copy the folder again; the folder of a training is made again from its checkpoint once it is deleted"


class RowFile:
    """Records of float32 numbers in a folder: ``rows.bin``, ``header.json`` and ``undo.log``.

    Attributes:
        step: Number of updates at the last commit.
        width: Number of float32 numbers of a record.

    Args:
        folder: Folder of the files; made if it does not exist.
        rows: Number of records.
        width: Number of float32 numbers of a record.
        identity: JSON values that an existing file must have been made with.
        read_only: Whether nothing is written: the folder holds a file, which other processes may read as well.

    Raises:
        CheckpointError: The folder holds a file of other rows, a damaged one, or none that could be read only.
        RunError: The disk is full, or the folder cannot be written.
    """

    def __init__(
        self, folder: Path | str, rows: int, width: int, identity: dict[str, Any], *, read_only: bool = False
    ) -> None:
        self.folder, self.rows, self.width, self.read_only = Path(folder), rows, width, read_only
        self.identity = {**identity, "rows": rows, "width": width}
        self.step = 0
        self._lock, self._failed = threading.Lock(), False
        self._log = -1
        self._readers: ThreadPoolExecutor | None = None
        self._saved = np.zeros(0 if read_only else rows, np.bool_)
        self._log_end = 0
        self.is_new = not read_only and not (self.folder / _HEADER).exists()
        with disk_errors(self.folder):
            if not read_only:
                self.folder.mkdir(parents=True, exist_ok=True)
            self._check_size()
        self.records = np.memmap(self.folder / _ROWS, np.float32, "r" if read_only else "r+", shape=(rows, width))
        if hasattr(mmap, "MADV_RANDOM"):
            self.records._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
        if read_only:
            return
        self._log = os.open(self.folder / _LOG, os.O_RDWR | os.O_CREAT, 0o644)
        if not self.is_new:
            self._undo(self.records, self._blocks())
        self._empty_log()

    def memory_bytes(self) -> int:
        """Return the bytes in memory, without the pages of the file that the system keeps."""
        return int(self._saved.nbytes)

    def read(self, rows: Any, parts: list[Any], slots: Any) -> None:
        """Read records ``rows``, int64, into the lines ``slots`` of ``parts``, float32 [slots, columns] each."""

        def copy(some: slice) -> None:
            column = 0
            for part in parts:
                _kernels().copy_rows(self.records, rows[some], column, part, slots[some], 0, part.shape[1])
                column += part.shape[1]

        self._share(rows.size, copy)

    def _share(self, rows: int, copy: Callable[[slice], None]) -> None:
        """Copy parts of the rows in several threads: each waits for its own pages of the disk."""
        if rows < _FEW_ROWS:
            copy(slice(None))
            return
        if self._readers is None:
            self._readers = ThreadPoolExecutor(_READERS, "row-file")
        bounds = [rows * part // _READERS for part in range(_READERS + 1)]
        list(self._readers.map(copy, map(slice, bounds[:-1], bounds[1:])))

    def write(self, rows: Any, parts: list[Any], slots: Any) -> None:
        """Write the lines ``slots`` of ``parts`` to records ``rows``, distinct int64.

        Raises:
            RunError: The disk is full, or the log cannot be written; the file is then as of the last commit when it is
                opened again.
        """
        with self._lock, self._whole():
            self._save(rows[~self._saved[rows]])
            column = 0
            for part in parts:
                _kernels().copy_rows(part, slots, 0, self.records, rows, column, part.shape[1])
                column += part.shape[1]

    def commit(self, step: int) -> None:
        """Commit all writes as the state of update ``step``, and wait for the disk.

        Raises:
            RunError: The disk is full; the file is then as of the last commit when it is opened again.
        """
        with self._lock, self._whole():
            self._commit(step)

    def _commit(self, step: int) -> None:
        self.records.flush()
        write_atomically(
            self.folder / _HEADER, sealed_json({"schema": _SCHEMA, "step": step, "identity": self.identity})
        )
        self.step, self.is_new = step, False
        self._empty_log()

    def replace(self, folder: Path | str) -> None:
        """Replace all records by the records of the file in another folder, and commit them as the state of its update.

        If this is interrupted, the folder is empty for those that open it.

        Raises:
            CheckpointError: The other folder holds a file of other rows, a damaged one, or none.
            RunError: The disk is full, or the folder cannot be written.
        """
        identity = {name: value for name, value in self.identity.items() if name not in ("rows", "width")}
        other = RowFile(folder, self.rows, self.width, identity, read_only=True)
        with self._lock, self._whole():
            (self.folder / _HEADER).unlink(missing_ok=True)
            for first in range(0, self.rows, _COPY_ROWS):
                self.records[first : first + _COPY_ROWS] = other.records[first : first + _COPY_ROWS]
            self._commit(other.step)

    def copy(self, folder: Path | str) -> None:
        """Copy the file, as of its last commit, to another folder, while rows are written; no commit may be made.

        Raises:
            RunError: The disk is full, or the folder cannot be written.
        """
        folder = Path(folder)
        with disk_errors(folder, "free some space, then copy again"):
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / _ROWS, "wb") as file:
                for first in range(0, self.rows, _COPY_ROWS):
                    file.write(self.records[first : first + _COPY_ROWS].tobytes())
            target = np.memmap(folder / _ROWS, np.float32, "r+", shape=(self.rows, self.width))
            with self._lock:  # rows overwritten during the copy were appended to the log first
                self._undo(target, self._blocks())
            target.flush()
        write_atomically(
            folder / _HEADER, sealed_json({"schema": _SCHEMA, "step": self.step, "identity": self.identity})
        )

    def close(self) -> None:
        """Close the files, without a commit."""
        if self._readers is not None:
            self._readers.shutdown()
            self._readers = None
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def __del__(self) -> None:
        if getattr(self, "_log", -1) >= 0:
            self.close()

    def _check_size(self) -> None:
        """Reserve the disk's space, so that writes in place cannot fail; refuse a file of other rows."""
        path, size = self.folder / _ROWS, 4 * self.rows * self.width
        if not self.is_new:
            header = read_sealed(
                self.folder / _HEADER, required=True, schema=_SCHEMA, error=CheckpointError, remedy=_DAMAGED
            )
            if header.get("identity") != self.identity:
                raise CheckpointError(
                    f"holds rows of {header.get('identity')}, expected {self.identity}",
                    where=str(self.folder),
                    remedy="choose another folder",
                )
            if not path.is_file() or path.stat().st_size != size:
                raise CheckpointError(f"must have {size:,} bytes", where=str(path), remedy=_DAMAGED)
            self.step = int(header["step"])
            return
        try:
            with open(path, "wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Refuse to go on after a failure, because the rows in memory and in the file no longer fit together."""
        remedy = f"free some space, then go on with --resume, or open the folder again: it is as of update {self.step}"
        if self.read_only:
            raise RunError("was opened to be read only", where=str(self.folder))
        if self._failed:
            raise RunError("an earlier write failed", where=str(self.folder), remedy=remedy)
        try:
            with disk_errors(self.folder, remedy):
                yield
        except BaseException:
            self._failed = True
            raise

    def _save(self, rows: Any) -> None:
        """Append the records ``rows`` to the log."""
        if not rows.size or self.is_new:  # no rollback is possible before the first commit
            return
        old = np.empty((rows.size, self.width), np.float32)
        self.read(rows, [old], np.arange(rows.size))
        body = rows.tobytes() + old.tobytes()
        block = _BLOCK.pack(_MARK, zlib.crc32(body), self.step, rows.size) + body
        done = 0
        while done < len(block):
            done += os.pwrite(self._log, block[done:] if done else block, self._log_end + done)
        self._log_end += len(block)
        self._saved[rows] = True

    def _blocks(self) -> Iterator[tuple[Any, Any]]:
        """Rows and old records of the log's blocks since the last commit, up to the first incomplete one."""
        size, position = os.fstat(self._log).st_size, 0
        while position + _BLOCK.size <= size:
            mark, digest, step, count = _BLOCK.unpack(os.pread(self._log, _BLOCK.size, position))
            position += _BLOCK.size
            bytes_left = count * (8 + 4 * self.width)
            if mark != _MARK or step != self.step or count < 1 or position + bytes_left > size:
                return
            body = os.pread(self._log, bytes_left, position)
            position += bytes_left
            rows = np.frombuffer(body[: 8 * count], np.int64)
            if zlib.crc32(body) != digest or rows.min() < 0 or rows.max() >= self.rows:
                return
            yield rows, np.frombuffer(body[8 * count :], np.float32).reshape(count, self.width)

    @staticmethod
    def _undo(records: Any, blocks: Iterator[tuple[Any, Any]]) -> None:
        for rows, old in blocks:
            records[rows] = old
        records.flush()

    def _empty_log(self) -> None:
        os.ftruncate(self._log, 0)
        self._log_end = 0
        self._saved[:] = False


def _kernels() -> Any:
    return import_module("cordillera.kernels.embeddings.numba_file_rows")  # compiled where they are first used
