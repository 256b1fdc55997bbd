"""Fields of plain data from a file, checked as they are taken."""

from __future__ import annotations

import math
from typing import Any

from cordillera.distributed.tracing.rank_trace import PeerProgress
from cordillera.errors import DataError

_LARGEST = 1 << 63
_REQUIRED = object()


class EntryFields:
    """Fields of one dict of a file.

    Args:
        content: The dict.
        where: Its place, for errors.

    Raises:
        DataError: If ``content`` is not a dict.
    """

    __slots__ = ("content", "where")

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, dict):
            raise DataError(f"is a {type(content).__name__} and not a dict", where=where)
        self.content, self.where = content, where

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        """Return a value of the given kind; None counts as absent if there is a default."""
        value = self.content.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if not isinstance(value, kind):
            raise self.wrong(key, value)
        return value

    def wrong(self, key: str, value: Any) -> DataError:
        """Return the error for a missing or invalid value of ``key``."""
        if key not in self.content:
            return DataError(f"has no {key}", where=self.where)
        return DataError(f"{key} cannot be {str(value)[:60]!r}", where=self.where)

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """Return a string."""
        value: str = self.take(key, str, default)
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: Any = _REQUIRED) -> Any:
        """Return one of some strings."""
        value = self.take(key, str, default)
        if value not in choices:
            raise self.wrong(key, value)
        return value

    def whole(self, key: str, default: Any = _REQUIRED) -> int:
        """Return an integer of at least 0."""
        value = self.content.get(key, default)
        if type(value) is not int or not 0 <= value < _LARGEST:
            raise self.wrong(key, value)
        return value

    def optional(self, key: str) -> int | None:
        """Return an integer of at least 0, or None."""
        return None if self.content.get(key) is None else self.whole(key)

    def time(self, key: str) -> int | None:
        """Return a time in nanoseconds; 0, which torch's JSON has for no time, and a missing key are None."""
        return self.optional(key) or None

    def amount(self, key: str) -> float | None:
        """Return a finite number of at least 0, or None."""
        value = self.content.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self.wrong(key, value)
        return float(value)

    def numbers(self, key: str) -> tuple[int, ...]:
        """Return integers of at least 0; a missing key is none."""
        value = self.take(key, (list, tuple), ())
        if not all(type(one) is int and 0 <= one < _LARGEST for one in value):
            raise self.wrong(key, value)
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return strings; a missing key is none."""
        value = self.take(key, (list, tuple), ())
        if not all(type(one) is str for one in value):
            raise self.wrong(key, value)
        return tuple(value)

    def shapes(self, key: str) -> tuple[tuple[int, ...], ...]:
        """Return shapes of tensors; a missing key is none."""
        value = self.take(key, (list, tuple), ())
        for shape in value:
            if not isinstance(shape, (list, tuple)) or not all(type(n) is int and 0 <= n < _LARGEST for n in shape):
                raise self.wrong(key, value)
        return tuple(tuple(shape) for shape in value)

    def progress(self, key: str) -> tuple[PeerProgress, ...]:
        """Return the messages with each peer; a missing key is none."""
        value = self.take(key, (list, tuple), ())
        for row in value:
            if (
                not isinstance(row, (list, tuple))
                or len(row) not in (4, 5)
                or not all(type(n) is int and n >= 0 for n in row)
            ):
                raise self.wrong(key, value)
        return tuple(PeerProgress(*row) for row in value)

    def inner(self, key: str) -> EntryFields | None:
        """Return the fields of a dict in this one, or None if it is absent."""
        value = self.content.get(key)
        return None if value is None else EntryFields(value, f"{self.where}, {key}")
