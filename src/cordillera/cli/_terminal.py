"""Standard output that keeps working after its terminal was closed."""

from __future__ import annotations

import errno
import os
from typing import IO, Any, cast


class Terminal:
    """A file that drops output after its terminal was closed, so that work can still be saved."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    @classmethod
    def of(cls, file: IO[str]) -> IO[str]:
        """Wrap standard output or standard error."""
        return cast("IO[str]", cls(file))

    def write(self, text: str) -> int:
        """Write text and return the number of characters."""
        try:
            return self._file.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        """Flush the file's buffer."""
        try:
            self._file.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _drop(self, error: OSError) -> None:
        if error.errno != errno.EIO:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            try:
                os.write(number, b"")
            except OSError:
                os.dup2(nowhere, number)
        os.close(nowhere)
