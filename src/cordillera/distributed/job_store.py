"""Values that the processes of a job tell each other: signed, checked when they are read, each call with a deadline.

torch's stores know no users: whoever reaches the TCP port can read, write and delete keys. So every value carries a
signature with the job's key; what others wrote is as good as absent. A store that is a TCP connection may stop
answering (a link that is down, a host that was suspended), and torch then waits inside a call in which Python hears no
signal. So calls are made by a thread of their own, and the one who asks waits no longer than the deadline.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

_MOST_BYTES = 65_536  # of a value
_ABSENT = "absent"  # no signed value
_SLICE_S = 0.5

_Result = TypeVar("_Result")


class StoreError(RuntimeError):
    """The job's store has ended, or broke the connection."""


class StoreSilent(StoreError):
    """The job's store did not answer within the deadline."""


def within(seconds: float, function: Callable[[], _Result]) -> _Result:
    """Call a function that Python cannot interrupt, and wait for it no longer than a deadline.

    Time in which this process itself did not run is not counted. Signals are handled while it waits.

    Args:
        seconds: The deadline.
        function: Runs in a thread of its own, which is left behind when the deadline passes.

    Raises:
        TimeoutError: If the deadline passes.
    """
    found: list[Any] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append((function(), None))
        except BaseException as error:
            found.append((None, error))
        done.set()

    threading.Thread(target=run, name="cordillera call", daemon=True).start()
    if not _wait(done, seconds):
        raise TimeoutError
    result, error = found[0]
    if error is not None:
        raise error
    return result


class JobStore:
    """Values of one job in a store, by key: what JSON can hold.

    Args:
        store: Reached by all processes of the job.
        key: Signs values, equal in all processes (:func:`cordillera.distributed.environment.job_key`).
        deadline_s: The longest that a call may take, seconds.
    """

    def __init__(self, store: dist.Store, key: bytes = b"", deadline_s: float = 60.0) -> None:
        self._store, self._key, self._deadline_s = store, key, deadline_s
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_silent = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        """Write a value.

        Args:
            key: Its key.
            value: What JSON can hold.

        Raises:
            StoreError: If the store does not take it in time.
        """
        text = self._sign(key, value)
        self._call(lambda: self._store.set(key, text))

    def first(self, key: str, value: Any) -> Any:
        """Write a value unless one was written before, and return the one that stands.

        Args:
            key: Its key.
            value: What JSON can hold.

        Raises:
            StoreError: If the store does not answer in time.
        """
        text = self._sign(key, value)

        def propose() -> bytes:
            found: bytes = self._store.compare_set(key, "", text)
            if self._read(key, found) is None:  # somebody else's
                self._store.set(key, text)
                return text.encode()
            return found

        return self._read(key, self._call(propose))

    def read(self, keys: Sequence[str]) -> list[Any]:
        """Values as they stand now; None for those that are absent or not signed with the job's key.

        Args:
            keys: Their keys.

        Raises:
            StoreError: If the store does not answer in time.
        """

        # unlike get, this does not wait for a key that somebody has deleted
        def look() -> list[bytes]:
            return [self._store.compare_set(key, _ABSENT, _ABSENT) for key in keys]

        return [self._read(key, text) for key, text in zip(keys, self._call(look), strict=True)]

    def close(self) -> None:
        """End the thread that makes the calls; one that still waits ends with its call."""
        self._is_silent = True
        self._calls.put(None)

    def _sign(self, key: str, value: Any) -> str:
        text = json.dumps(value)
        return f"{self._signature(key, text)} {text}"

    def _signature(self, key: str, text: str) -> str:
        return hmac.new(self._key, f"{key}\0{text}".encode(), hashlib.sha256).hexdigest()

    def _read(self, key: str, found: bytes) -> Any:
        if len(found) > _MOST_BYTES:
            return None
        try:
            signature, _, text = found.decode("ascii").partition(" ")
            if not hmac.compare_digest(signature, self._signature(key, text)):
                return None
            return json.loads(text)
        except (ValueError, RecursionError):
            return None

    def _call(self, function: Callable[[], _Result]) -> _Result:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._make_calls, name="cordillera store", daemon=True)
                self._thread.start()
        done, found = threading.Event(), []  # type: tuple[threading.Event, list[Any]]
        self._calls.put((function, done, found))
        if self._is_silent or not _wait(done, self._deadline_s):
            self._is_silent = True
            raise StoreSilent(f"did not answer for {self._deadline_s:g} s")
        result, error = found[0]
        if error is not None:
            raise StoreError(str(error).partition("\n")[0]) from error
        return result

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            function, done, found = call
            try:
                found.append((function(), None))
            except Exception as error:
                found.append((None, error))
            done.set()


def _wait(done: threading.Event, seconds: float) -> bool:
    left = seconds
    while left > 0:
        began = time.monotonic()
        if done.wait(min(left, _SLICE_S)):
            return True
        left -= min(time.monotonic() - began, 2 * _SLICE_S)  # more is time in which this process was stopped
    return done.is_set()
