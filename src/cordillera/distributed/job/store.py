"""Signed values that the processes of a job exchange through a store, with a deadline for every call.

torch's stores do not authenticate users: any process that reaches the TCP port can read, write and delete keys.
Therefore every value is signed with the job's key, and values without a valid signature count as absent. A TCP
connection to a store may also stop answering because a link is down or a host is suspended. torch then waits in a call
during which Python handles no signals. Therefore a separate thread makes the calls, and callers wait at most until the
deadline.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

_MOST_BYTES = 65_536  # largest value
_ABSENT = "absent"  # stands for a value that is absent or not signed
_SLICE_S = 0.5

_Result = TypeVar("_Result")


class StoreError(RuntimeError):
    """The job's store has ended or has closed the connection."""


class StoreSilent(StoreError):
    """The job's store did not answer within the deadline."""


def within(seconds: float, function: Callable[[], _Result]) -> _Result:
    """Call a function that Python cannot interrupt, in a separate thread that is abandoned after ``seconds``.

    Time during which this process was suspended does not count. Signals are handled during the wait.

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


def hold_store(address: str, listener: socket.socket, deadline_s: float, seconds: float) -> dist.TCPStore:
    """Return a store that this process holds at the port of ``listener``, which it takes over.

    Raises:
        RuntimeError: If the store cannot be reached at ``address``, after ``deadline_s``.
        TimeoutError: If it does not answer within ``seconds``.
    """
    port = listener.getsockname()[1]

    def hold() -> dist.TCPStore:
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=deadline_s),
        )

    return within(seconds, hold)


class JobStore:
    """Values of one job in a store, by key; values are those that JSON can represent.

    Args:
        key: Key that signs values, equal in all processes (:func:`cordillera.distributed.job.environment.job_key`).
        deadline_s: Longest time of a call, in seconds.
    """

    def __init__(self, store: dist.Store, key: bytes = b"", deadline_s: float = 60.0) -> None:
        self._store, self._key, self._deadline_s = store, key, deadline_s
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_silent = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        """Write a value; a :class:`StoreError` says that the store did not answer in time."""
        text = self._sign(key, value)
        self._call(lambda: self._store.set(key, text))

    def first(self, key: str, value: Any) -> Any:
        """Write a value unless the key has one, and return the value of the key."""
        text = self._sign(key, value)

        def propose() -> bytes:
            found: bytes = self._store.compare_set(key, "", text)
            if self._read(key, found) is None:  # written by another process
                self._store.set(key, text)
                return text.encode()
            return found

        return self._read(key, self._call(propose))

    def read(self, keys: Sequence[str]) -> list[Any]:
        """Return the current values of keys; None for values that are absent or not signed with the job's key."""

        # Unlike get, this does not wait for a key that was deleted.
        def look() -> list[bytes]:
            return [self._store.compare_set(key, _ABSENT, _ABSENT) for key in keys]

        return [self._read(key, text) for key, text in zip(keys, self._call(look), strict=True)]

    def close(self) -> None:
        """End the thread that makes the calls, after the call in progress."""
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
        left -= min(time.monotonic() - began, 2 * _SLICE_S)  # longer: this process was suspended
    return done.is_set()
