"""Files of a stream that are read once, in order, and of which more may come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cordillera.data.files import expand_paths
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
        self._done: list[list[Any]] = []  # name, bytes and rows of files that were read to their end
        self._offset = 0  # rows read of the first file that is not done
        self._chunks: Iterator[RowChunk] | None = None

    def next(self) -> RowChunk | None:
        """Return the next rows with their place; None if all rows that there are have been read.

        Raises:
            DataError: If a file cannot be read, or has changed since it was read.
        """
        while True:
            path = self._following()
            if path is None:
                return None
            if self._chunks is None:
                self._chunks = self._pieces(path)
            piece = next(self._chunks, None)
            if piece is not None:
                self._offset += len(piece[0])
                return piece
            self._done.append([str(path), path.stat().st_size, self._offset])
            self._offset, self._chunks = 0, None

    def check(self) -> None:
        """Check that there is a file.

        Raises:
            DataError: If there is none.
        """
        expand_paths(self._paths)

    def _following(self) -> Path | None:
        """Return the file that is read, or the next one."""
        try:
            paths = expand_paths(self._paths)
        except DataError:
            if self._done or self._offset:
                raise
            return None  # no file has come yet
        names = [str(path) for path in paths]
        for place, (name, size, _) in enumerate(self._done):
            if place >= len(names) or names[place] != name:
                found = names[place] if place < len(names) else "none"
                raise DataError(
                    f"file {place + 1} of {self.name} was {name}, and now it is {found}",
                    where=name,
                    remedy="keep the files that were read; names of new files must come after theirs",
                )
            if paths[place].stat().st_size != size:
                raise DataError(
                    f"the file has changed since it was read: it had {size:,} bytes",
                    where=name,
                    remedy="restore it; write new rows to new files",
                )
        return paths[len(self._done)] if len(paths) > len(self._done) else None

    def _pieces(self, path: Path) -> Iterator[RowChunk]:
        """Iterate over the rows of a file that were not read yet, in pieces."""
        skip = self._offset
        for frame, place in FileLog(self._schema, (path,), self._format or guess_format(path)).chunks():
            first = min(skip, len(frame))
            skip -= first
            for start in range(first, len(frame), self._rows):
                part = frame.slice(start, self._rows)
                yield part, type(place)(place.source, place.first_row + start, place.unit)

    def to_state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {"done": self._done, "offset": self._offset, "latest": self.latest}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`to_state`."""
        self._done, self._offset, self.latest = [list(one) for one in state["done"]], state["offset"], state["latest"]
        self._chunks = None
