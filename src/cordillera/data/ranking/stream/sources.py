"""Files of a stream, which are read once, in order, while more may arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from cordillera.data.paths import expand_paths
from cordillera.data.ranking.features import Schema
from cordillera.data.ranking.logs.click_logs import FileFormat, FileLog, RowChunk, guess_format
from cordillera.errors import DataError


class FileSource:
    """Reader of the rows of files, with a position that can be saved.

    Args:
        name: Name for errors.
        paths: File, folder or pattern, or several of them.
        schema: Schema of the events.
        format: Format of the files; None for the one that their names imply.
        rows: Largest number of rows of a chunk.

    Attributes:
        latest: Latest time of the rows read, in seconds; None before the first one. The reader of the rows sets it.
    """

    def __init__(
        self, name: str, paths: str | tuple[str, ...], schema: Schema, format: FileFormat | None, rows: int
    ) -> None:
        self.name = name
        self.latest: int | None = None
        self._paths, self._schema, self._format, self._rows = paths, schema, format, rows
        self._files: tuple[Path, ...] = ()  # files at the last listing
        self._done: list[list[Any]] = []  # name, bytes and rows of completely read files
        self._begun, self._offset = "", 0  # name of the current file, and number of its rows read so far
        self._chunks: Iterator[RowChunk] | None = None
        self._ahead: RowChunk | DataError | None = None

    def next(self) -> RowChunk | None:
        """Return the next rows with their place; None if all rows that there are have been read.

        A file that was not read to its end, as it holds a mistake, may be corrected.

        Raises:
            DataError: If a file cannot be read, or has changed since it was read.
        """
        while True:
            path = self._following()
            if path is None:
                return None
            if self._chunks is None:
                self._chunks = self._pieces(path)
                self._look_ahead()
            piece = self._ahead
            if isinstance(piece, DataError):
                self._chunks = self._ahead = None
                raise piece
            if piece is not None or self._offset:
                break
            self._done.append([str(path), path.stat().st_size, 0])  # a file without rows
            self._chunks = None
        if piece is None:
            raise DataError(
                f"the file has fewer than the {self._offset:,} rows that were read of it",
                where=str(path),
                remedy="restore it; write new rows to new files",
            )
        self._begun, self._offset = str(path), self._offset + len(piece[0])
        self._look_ahead()
        if self._ahead is None:
            self._done.append([str(path), path.stat().st_size, self._offset])
            self._begun, self._offset, self._chunks = "", 0, None
        return piece

    def _look_ahead(self) -> None:
        """Read the piece after next, so that the end of a file is known with its last piece."""
        assert self._chunks is not None
        try:
            self._ahead = next(self._chunks, None)
        except DataError as error:
            self._ahead = error

    def check(self) -> None:
        """Check that there is a file.

        Raises:
            DataError: If there is none.
        """
        expand_paths(self._paths)

    def _following(self) -> Path | None:
        """Return the file that is read, or the next one; None after the last one."""
        if len(self._files) <= len(self._done):
            self._files = self._listed()  # new files may have arrived
        return self._files[len(self._done)] if len(self._files) > len(self._done) else None

    def _listed(self) -> tuple[Path, ...]:
        """Return all files, after comparing them with those that were read."""
        try:
            paths = expand_paths(self._paths)
        except DataError:
            if self._done or self._begun:
                raise
            return ()  # no file has arrived yet
        names = [str(path) for path in paths]
        read = [*self._done, *([[self._begun, None, 0]] if self._begun else [])]
        for place, (name, size, _) in enumerate(read):
            if place >= len(names) or names[place] != name:
                found = names[place] if place < len(names) else "none"
                raise DataError(
                    f"file {place + 1} of {self.name} was {name}, and now it is {found}",
                    where=name,
                    remedy="keep the files that were read; names of new files must come after theirs",
                )
            if size is not None and paths[place].stat().st_size != size:
                raise DataError(
                    f"the file has changed since it was read: it had {size:,} bytes",
                    where=name,
                    remedy="restore it; write new rows to new files",
                )
        return paths

    def _pieces(self, path: Path) -> Iterator[RowChunk]:
        """Iterate over the rows of a file that were not read yet, in pieces."""
        skip, kind = self._offset, self._format or guess_format(path)
        if kind == "parquet" and _is_empty(path):
            return
        for frame, place in FileLog(self._schema, (path,), kind).chunks():
            first = min(skip, len(frame))
            skip -= first
            for start in range(first, len(frame), self._rows):
                part = frame.slice(start, self._rows)
                yield part, place.of_rows(np.arange(start, start + len(part)))

    def to_state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {"done": self._done, "begun": self._begun, "offset": self._offset, "latest": self.latest}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`to_state`."""
        self._done, self.latest = [list(one) for one in state["done"]], state["latest"]
        self._begun, self._offset, self._chunks, self._files = state["begun"], state["offset"], None, ()


def _is_empty(path: Path) -> bool:
    """Return whether a Parquet file is complete and has no rows, such as the file of an hour without events."""
    with contextlib.suppress(pa.ArrowException, OSError, ValueError):
        return bool(pyarrow.parquet.read_metadata(path).num_rows == 0)
    return False
