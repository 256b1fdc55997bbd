"""Events of a job of replicas: one file for each writer, one sealed JSON line for each event.

A replica writes an event for each attempt at a step: ``step`` with ``outcome`` (``committed``, ``discarded``), epoch,
step, lineage and that before it, participants, first iteration and number of iterations, and the seconds of its phases;
``joined`` before the first one and ``left`` after the last.
The launcher writes which processes began and ended, the coordinator every change of members. All have ``at``, seconds
since 1970, by a clock that does not jump while a writer lasts.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

from cordillera.errors import RunError
from cordillera.files import parse_sealed, read_text, sealed_json
from cordillera.run import disk_errors

FOLDER = "replicas"
"""Folder of the files in the folder of a run."""

_MOST_BYTES = 1 << 30
_MOST_WAITING = 10_000


class EventLog:
    """Writer of one file of events; several threads may write.

    Args:
        path: File, which is appended to; None for a writer that writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._lost = 0
        self._began = time.time() - time.monotonic()
        if path is not None:
            with disk_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                _end_line(path)

    def write(self, kind: str, **content: Any) -> None:
        """Append an event of a ``kind`` with its ``content``, values of JSON.

        Where the disk is full, training goes on, and events wait until there is space. If too many wait, later ones
        are dropped, and the first one after them says how many were ``lost``.
        """
        if self.path is None:
            return
        with self._lock:
            if self._lost:
                content["lost"] = self._lost
            line = sealed_json({"kind": kind, "at": self._began + time.monotonic(), **content}, line=True)
            self._waiting.append(line.encode())
            lines = b"".join(self._waiting)
            try:
                with open(self.path, "ab", buffering=0) as file:
                    size = file.tell()
                    if file.write(lines) != len(lines):  # a disk that fills up writes a part first
                        file.truncate(size)
                        raise OSError(errno.ENOSPC, "no space")
            except OSError:
                if len(self._waiting) > _MOST_WAITING:
                    self._waiting.pop()
                    self._lost += 1
            else:
                self._waiting.clear()
                self._lost = 0


def _end_line(path: Path) -> None:
    """Cut off a line that was not written to its end."""
    if path.exists():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all writers in a run's folder, by time; ``writer`` is the name of each one's file.

    Raises:
        RunError: If a line is damaged. A line that was cut off in writing is left out.
    """
    found = []
    for path in sorted((folder / FOLDER).glob("*.jsonl")):
        lines = read_text(path, error=RunError, limit=_MOST_BYTES).split("\n")
        for number, line in enumerate(lines[:-1], 1):
            where = f"{path}, line {number}"
            content = parse_sealed(f"{line}\n", where, line=True, required=True, error=RunError)
            if not isinstance(content.get("at"), int | float):
                raise RunError("does not say when it was", where=where)
            found.append({**content, "writer": path.stem})
    return sorted(found, key=lambda event: event["at"])
