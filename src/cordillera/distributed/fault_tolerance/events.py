"""Events of a job of replicas: one file for each writer, one sealed JSON line for each event.

A replica writes an event for each attempt at a step: ``step`` with ``outcome`` (``committed``, ``discarded``), epoch,
step, lineage and that before it, participants, first iteration and number of iterations, and the seconds of its phases;
``joined`` before the first one and ``left`` after the last.
The launcher writes which processes began and ended, the coordinator every change of members. All have ``at``, seconds
since 1970, by a clock that does not jump while a writer lasts.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
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
        RunError: If a line is damaged or repeated, or a file ends with zeros. A line that was cut off in writing is
            left out.
    """
    found = []
    for path in sorted((folder / FOLDER).glob("*.jsonl")):
        lines = read_text(path, error=RunError, limit=_MOST_BYTES).split("\n")
        if "\0" in lines[-1]:  # after a power failure, or from a disk that loses blocks
            raise RunError("ends with zeros", where=f"{path}, line {len(lines)}")
        numbers: dict[str, int] = {}
        for number, line in enumerate(lines[:-1], 1):
            where = f"{path}, line {number}"
            if (first := numbers.setdefault(line, number)) != number:
                raise RunError(f"is line {first} again", where=where)
            content = parse_sealed(f"{line}\n", where, line=True, required=True, error=RunError)
            if not isinstance(content.get("at"), int | float):
                raise RunError("does not say when it was", where=where)
            found.append({**content, "writer": path.stem})
    return sorted(found, key=lambda event: event["at"])


def find_gaps(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the missing events, such as those of lost lines of a file, as pairs of a writer and a text.

    Every participant of a committed step writes its outcome, unless it is killed before, and the coordinator writes
    every epoch.

    Args:
        events: Result of :func:`read_events`, with the values that their kinds have.
    """
    steps: dict[str, tuple[int, set[str]]] = {}  # step and participants of each lineage
    own: dict[str, set[str]] = defaultdict(set)
    epochs: dict[str, set[int]] = {"step": set(), "epoch": set()}
    for event in events:
        kind, writer = event["kind"], event["writer"]
        if kind in epochs:
            epochs[kind].add(event["epoch"])
        if kind == "step":
            own[writer].add(event["lineage"])
            if event["outcome"] == "committed":
                steps.setdefault(event["lineage"], (event["step"], set()))[1].update(event["participants"])
    found = []
    for name in sorted({name for _, names in steps.values() for name in names}):
        lost = {step for lineage, (step, names) in steps.items() if name in names and lineage not in own[name]}
        if lost:
            found.append((name, f"wrote nothing about {_counted('committed step', lost)}"))
    if lost := epochs["step"] - epochs["epoch"]:
        found.append(("coordinator", f"wrote nothing about {_counted('epoch', lost)}"))
    return found


def _counted(what: str, numbers: set[int]) -> str:
    first, last = min(numbers), max(numbers)
    return f"{what} {first}" if first == last else f"{len(numbers):,} {what}s from {first:,} to {last:,}"


def _place_of(event: Mapping[str, Any]) -> str:
    return f"{event.get('writer', 'unknown')}.jsonl, event {event.get('kind')!r} of {event.get('at')}"


def value_of(event: Mapping[str, Any], key: str, is_right: Callable[[Any], bool], wanted: str) -> Any:
    """Return the value of ``key`` in an ``event``, if it ``is_right``.

    Raises:
        RunError: If not; the message says what was ``wanted``.
    """
    if not is_right(value := event.get(key)):
        raise RunError(f"{key} is {value!r}, not {wanted}", where=_place_of(event))
    return value


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


def time_of(event: Mapping[str, Any]) -> float:
    """Return the time of an ``event`` in seconds since 1970; see :func:`value_of` for errors."""
    return float(value_of(event, "at", _is_number, "a time"))


def count_of(event: Mapping[str, Any], key: str) -> int:
    """Return the count ``key`` of an ``event``; see :func:`value_of` for errors."""
    return int(value_of(event, key, lambda one: type(one) is int and one >= 0, "a count"))


def name_of(event: Mapping[str, Any], key: str) -> str:
    """Return the text ``key`` of an ``event``; see :func:`value_of` for errors."""
    return str(value_of(event, key, lambda one: isinstance(one, str), "a text"))


def names_of(event: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the list of names ``key`` of an ``event``; see :func:`value_of` for errors."""
    is_right = lambda one: isinstance(one, list | tuple) and all(isinstance(x, str) for x in one)  # noqa: E731
    return tuple(value_of(event, key, is_right, "a list of names"))


def is_times(value: Any) -> bool:
    """Return whether a ``value`` holds the seconds of phases and of ``all``."""
    return isinstance(value, Mapping) and "all" in value and all(_is_number(x) and x >= 0 for x in value.values())
