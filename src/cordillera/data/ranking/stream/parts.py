"""Folder of joined streams, which holds every example exactly once, however the process ends.

``STREAM/part-NNNNNNNN.parquet`` holds the examples of commit ``N``, ``state/NNNNNNNN/`` the state for the next commit.
A commit writes its parts under temporary names, then the state, and renames the parts last. Opening the folder
completes the renames of the newest state and removes files that belong to no commit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from cordillera.data.files import checksum, disk_errors, folder_beside, is_intact, write_bytes
from cordillera.data.ranking.frames import parquet_bytes
from cordillera.errors import DataError
from cordillera.files import read_sealed, sealed_json, sync

_PART = re.compile(r"^(\.?)part-(\d{8})\.parquet(\.tmp)?$")
_REMEDY = "delete the folder and augment again"


class StreamFolder:
    """Parts and state of joined streams.

    Args:
        folder: Folder, which is created if need be.
        streams: Names of the streams.

    Attributes:
        step: Number of the newest commit; 0 before the first one.
    """

    def __init__(self, folder: Path, streams: tuple[str, ...]) -> None:
        self.folder, self.streams, self.step = folder, streams, 0
        with disk_errors(folder):
            for name in ("state", *streams):
                (folder / name).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder in the region.

        Raises:
            DataError: If another process holds it.
        """
        with disk_errors(self.folder):
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    "another process writes into it", where=str(self.folder), remedy="wait until it has ended"
                ) from None
            except OSError as error:
                warnings.warn(
                    f"{self.folder}: this file system has no locks ({error.strerror}); start one process at a time",
                    stacklevel=3,
                )
            yield
        finally:
            os.close(descriptor)

    def restore(self) -> tuple[dict[str, pl.DataFrame], dict[str, Any]] | None:
        """Read the newest state and bring the parts into its order; None before the first commit.

        Raises:
            DataError: If the state is damaged, or a part of the newest commit is missing.
        """
        steps = sorted(int(path.name) for path in (self.folder / "state").iterdir() if path.name.isdigit())
        self.step = steps[-1] if steps else 0
        if not steps:
            self._tidy()
            return None
        place = self._state(self.step)
        state = read_sealed(place / "state.json", required=True, remedy=_REMEDY)
        frames = {}
        for name, digest in state["frames"].items():
            path = place / f"{name}.parquet"
            if not is_intact(path, digest):
                raise DataError("is missing or damaged", where=str(path), remedy=_REMEDY)
            frames[name] = pl.read_parquet(path, glob=False)
        self._reveal(state["parts"])
        self._tidy()
        return frames, state["content"]

    def commit(
        self, frames: Mapping[str, pl.DataFrame], content: Mapping[str, Any], parts: Mapping[str, pl.DataFrame]
    ) -> None:
        """Write the examples that are complete, by stream, and what waits, all of it or nothing.

        Args:
            frames: Waiting rows.
            content: More of the state, as JSON values.
            parts: Examples by stream; empty ones are not written.

        Raises:
            DataError: If the disk is full or cannot be written.
        """
        try:
            self._commit(frames, content, parts)
        except DataError:
            self._tidy()
            raise

    def _commit(
        self, frames: Mapping[str, pl.DataFrame], content: Mapping[str, Any], parts: Mapping[str, pl.DataFrame]
    ) -> None:
        step = self.step + 1
        written = [stream for stream, frame in parts.items() if len(frame)]
        for stream in written:
            hidden = self._hidden(stream, step)
            with disk_errors(hidden), open(hidden, "wb") as file:
                file.write(parquet_bytes(parts[stream]))
                file.flush()
                os.fsync(file.fileno())
        with folder_beside(self._state(step)) as beside:
            digests = {}
            for name, frame in frames.items():
                path = beside / f"{name}.parquet"
                write_bytes(path, parquet_bytes(frame))
                digests[name] = checksum(path)
            state = {"frames": digests, "parts": written, "content": dict(content)}
            write_bytes(beside / "state.json", sealed_json(state).encode())
        self.step = step
        self._reveal(written)
        shutil.rmtree(self._state(step - 1), ignore_errors=True)

    def _state(self, step: int) -> Path:
        return self.folder / "state" / f"{step:08d}"

    def _part(self, stream: str, step: int) -> Path:
        return self.folder / stream / f"part-{step:08d}.parquet"

    def _hidden(self, stream: str, step: int) -> Path:
        return self.folder / stream / f".part-{step:08d}.parquet.tmp"

    def _reveal(self, streams: list[str]) -> None:
        """Give the parts of the newest commit their names."""
        for stream in streams:
            hidden, part = self._hidden(stream, self.step), self._part(stream, self.step)
            with disk_errors(part):
                if hidden.exists():
                    os.replace(hidden, part)
                sync(part.parent)
            if not part.exists():
                raise DataError("the newest part is missing", where=str(part), remedy=_REMEDY)

    def _tidy(self) -> None:
        """Remove parts and states that belong to no commit."""
        for stream in self.streams:
            for path in (self.folder / stream).iterdir():
                match = _PART.match(path.name)
                if match and int(match[2]) > self.step:
                    path.unlink()
        for path in (self.folder / "state").iterdir():
            if path.name.isdigit() and int(path.name) < self.step:
                shutil.rmtree(path, ignore_errors=True)
