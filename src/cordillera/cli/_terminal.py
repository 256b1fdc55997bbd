"""Standard output that outlives its terminal."""

from __future__ import annotations

import errno
import os
from typing import IO, Any, cast


class Terminal:
    """A file on a terminal; what is written after the terminal was closed is dropped, so that work can still be saved.

    Args:
        file: Standard output or standard error.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    @classmethod
    def of(cls, file: IO[str]) -> IO[str]:
        """The file, guarded.

        Args:
            file: Standard output or standard error.
        """
        return cast("IO[str]", cls(file))

    def write(self, text: str) -> int:
        """Write text.

        Args:
            text: It.
        """
        try:
            return self._file.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        """Write what is kept in memory."""
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
