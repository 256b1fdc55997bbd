"""Requests of many callers, computed together by one thread.

The thread takes whatever waits when it is free, so that a single request is computed at once and requests that arrive
during a computation share the next one. The queue is bounded; requests whose deadline has passed or whose caller has
left are dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cordillera.errors import OverloadError, UnavailableError

Work = TypeVar("Work")
Answer = TypeVar("Answer")


class DeadlineError(UnavailableError):
    """A request was not computed before its deadline."""


class ClosedError(UnavailableError):
    """The service has been closed."""


@dataclass
class _Waiting(Generic[Work, Answer]):
    work: Work
    rows: int
    deadline: float | None
    arrived: float
    future: Future[Answer] = field(default_factory=Future)


class MicroBatcher(Generic[Work, Answer]):
    """Queue of requests, and the thread that computes them in batches, in the order of their arrival.

    If a batch fails, its requests are computed one by one, so that only those at fault fail.

    Args:
        compute: Function from requests to their answers, called by one thread.
        max_rows: Number of rows from which a batch takes no further request. A larger request is a batch of its own.
        max_queue_rows: Largest number of rows that wait. A larger request is refused even if nothing waits.
        on_batch: Function called with the number of rows of each batch before it is computed, or None.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Work]], Sequence[Answer]],
        *,
        max_rows: int = 1024,
        max_queue_rows: int = 16_384,
        on_batch: Callable[[int], object] | None = None,
    ) -> None:
        self._compute, self._on_batch = compute, on_batch
        self.max_rows, self.max_queue_rows = max_rows, max_queue_rows
        self._waiting: deque[_Waiting[Work, Answer]] = deque()
        self._rows, self._closed = 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="micro-batcher", daemon=True)
        self._thread.start()

    @property
    def queue_rows(self) -> int:
        """Number of rows that wait."""
        return self._rows

    def submit(self, work: Work, rows: int, *, deadline: float | None = None) -> Future[Answer]:
        """Queue a request of a number of rows, and return the future of its answer, which may be cancelled.

        Args:
            deadline: Time of :func:`time.monotonic` after which the request is dropped; None for never.

        Raises:
            OverloadError: If the queue has no room.
            ClosedError: If the batcher has been closed.
        """
        one = _Waiting[Work, Answer](work, rows, deadline, time.monotonic())
        with self._changed:
            if self._closed:
                raise ClosedError("the server is shutting down", remedy="send the request to another server")
            if self._rows + rows > self.max_queue_rows:
                self._forget_cancelled()
            if self._rows + rows > self.max_queue_rows:
                raise OverloadError(
                    f"{self._rows} rows wait and {rows} more do not fit into the queue of {self.max_queue_rows}",
                    remedy="try again later, with fewer rows in a request",
                )
            self._waiting.append(one)
            self._rows += rows
            self._changed.notify()
        return one.future

    def close(self, timeout: float | None = None) -> bool:
        """Refuse further requests, compute those that wait, and return whether the thread ended within ``timeout``.

        ``timeout`` is in seconds; None waits for the end. Requests that still wait after it fail with
        :class:`ClosedError`.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return True
        with self._changed:
            left, self._rows = list(self._waiting), 0
            self._waiting.clear()
        for one in left:
            if one.future.set_running_or_notify_cancel():
                one.future.set_exception(ClosedError("the server shut down before the request was computed"))
        return False

    def _forget_cancelled(self) -> None:
        kept = [one for one in self._waiting if not one.future.cancelled()]
        self._waiting = deque(kept)
        self._rows = sum(one.rows for one in kept)

    def _run(self) -> None:
        while True:
            batch = self._next()
            if batch is None:
                return
            if batch:
                self._answer(batch)
            del batch  # free requests and answers while the thread waits

    def _next(self) -> list[_Waiting[Work, Answer]] | None:
        """Wait for requests and take a batch of those that are still wanted; None when closed and empty."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            taken, rows = list[_Waiting[Work, Answer]](), 0
            while self._waiting and (not taken or rows + self._waiting[0].rows <= self.max_rows):
                one = self._waiting.popleft()
                self._rows -= one.rows
                if self._wanted(one):
                    taken.append(one)
                    rows += one.rows
        return taken

    def _wanted(self, one: _Waiting[Work, Answer]) -> bool:
        if not one.future.set_running_or_notify_cancel():
            return False
        if one.deadline is None or time.monotonic() < one.deadline:
            return True
        waited = time.monotonic() - one.arrived
        one.future.set_exception(
            DeadlineError(
                f"was not computed within its deadline: it waited for {waited:.3f} s", remedy="try again later"
            )
        )
        return False

    def _answer(self, batch: list[_Waiting[Work, Answer]]) -> None:
        if self._on_batch is not None:
            self._on_batch(sum(one.rows for one in batch))
        try:
            answers = self._compute([one.work for one in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            for one in batch:
                self._answer_alone(one)
            return
        for one, answer in zip(batch, answers, strict=True):
            one.future.set_result(answer)

    def _answer_alone(self, one: _Waiting[Work, Answer]) -> None:
        try:
            [answer] = self._compute([one.work])
        except Exception as error:
            one.future.set_exception(error)
        else:
            one.future.set_result(answer)
