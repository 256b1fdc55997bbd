"""Iterations of text, prepared by a thread while others are computed."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from cordillera.data.language.batches import Batches, TextIteration
from cordillera.errors import DataError

_POLL_S = 0.1

_Item = tuple[TextIteration, dict[str, Any]] | BaseException


class PrefetchedBatches(Iterator[TextIteration]):
    """Iterator over the iterations of :class:`TextBatches` that plans and reads some of them ahead.

    Its state is that of the iterations that were taken, not of those prepared, so a run that resumes from it skips
    none.

    Args:
        batches: Iterations to prepare; not to be used elsewhere meanwhile.
        part: Microbatches of each iteration that are read ahead: those that this rank computes.
        ahead: Largest number of iterations that are prepared ahead.
        deadline_s: Longest time in seconds to wait for an iteration.

    Attributes:
        waited: Seconds spent waiting for iterations since the beginning.

    Raises:
        DataError: ``ahead`` is below 1.
    """

    def __init__(
        self, batches: Batches, *, part: slice = slice(None), ahead: int = 2, deadline_s: float = 600.0
    ) -> None:
        if ahead < 1:
            raise DataError(f"{ahead} iterations cannot be read ahead", where="ahead", remedy="at least 1")
        self.batches, self.part, self.ahead, self.deadline_s = batches, part, ahead, deadline_s
        self.waited = 0.0
        self._state: dict[str, Any] | None = None
        self._end: BaseException | None = None
        self._ready: queue.Queue[_Item] | None = None
        self._thread: threading.Thread | None = None
        self._stop: weakref.finalize | None = None

    def __iter__(self) -> PrefetchedBatches:
        return self

    def __next__(self) -> TextIteration:
        """Return the next iteration.

        Raises:
            DataError: No iteration was prepared in time, or its preparation failed.
        """
        if self._end is not None:
            raise self._end
        if self._ready is None:
            self._start()
        assert self._ready is not None
        began = time.perf_counter()
        try:
            item = self._ready.get(timeout=self.deadline_s)
        except queue.Empty:
            raise DataError(
                f"no iteration was prepared within {self.deadline_s:g} s",
                where="data",
                remedy="see whether disks answer",
            ) from None
        finally:
            self.waited += time.perf_counter() - began
        if isinstance(item, BaseException):
            self._end = item
            raise item
        iteration, self._state = item
        return iteration

    def _start(self) -> None:
        self._ready = queue.Queue(maxsize=self.ahead)
        stop = threading.Event()
        # The thread holds no reference to this object, so an object that is dropped without being closed ends it too.
        self._stop = weakref.finalize(self, stop.set)
        self._state = self.batches.state_dict()
        self._thread = threading.Thread(
            target=_prepare,
            args=(self.batches, self.part, self._ready, stop),
            name="cordillera-prefetch",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and discard iterations that were prepared but not taken; resuming prepares them again.

        Raises:
            DataError: The thread did not stop in time.
        """
        if self._thread is None or self._stop is None:
            return
        self._stop()
        self._thread.join(self.deadline_s)
        if self._thread.is_alive():
            raise DataError(f"the thread that reads ahead did not stop within {self.deadline_s:g} s", where="data")
        self._thread = self._stop = self._ready = None
        if self._state is not None:
            self.batches.load_state_dict(self._state)

    def __enter__(self) -> PrefetchedBatches:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.close()
        elif self._stop is not None:
            self._stop()  # waiting for the thread would delay the error

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iterations that were taken; see their own ``state_dict``."""
        return self.batches.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the state of these or of plain batches.

        Raises:
            DataError: The state belongs to another text, order or packing, or is damaged; the iterations stay
                unchanged.
        """
        self.close()
        self.batches.load_state_dict(state)
        self._state = self._end = None


class LiveBatches(Iterator[TextIteration]):
    """Iterations that are prepared when they are asked for, because they depend on the weights.

    Args:
        batches: Iterations.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __next__(self) -> TextIteration:
        return next(self.batches)

    def __enter__(self) -> LiveBatches:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iterations that were taken."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position."""
        self.batches.load_state_dict(state)


class IterationsAhead(Iterator[TextIteration]):
    """Iterations that can be looked at before they are taken, so that a step that is given up takes none.

    Args:
        batches: Iterations.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self._state = batches.state_dict()
        self._ahead: deque[tuple[TextIteration, dict[str, Any]]] = deque()

    def __next__(self) -> TextIteration:
        found = self.look(1)
        if not found:
            raise StopIteration
        self.take(1)
        return found[0]

    def look(self, count: int) -> list[TextIteration]:
        """Return the next ``count`` iterations, fewer at the end."""
        while len(self._ahead) < count and (found := next(self.batches, None)) is not None:
            self._ahead.append((found, self.batches.state_dict()))
        return [one for one, _ in itertools.islice(self._ahead, count)]

    def take(self, count: int) -> None:
        """Go on after ``count`` iterations that :meth:`look` has returned."""
        for _ in range(count):
            _, self._state = self._ahead.popleft()

    def __enter__(self) -> IterationsAhead:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iterations that were taken."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position."""
        self.batches.load_state_dict(state)
        self._state = self.batches.state_dict()
        self._ahead.clear()


def _prepare(batches: Batches, part: slice, ready: queue.Queue[_Item], stop: threading.Event) -> None:
    def put(item: _Item) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False

    try:
        for iteration in batches:
            iteration.microbatches[part]
            if not put((iteration, batches.state_dict())):
                return
        put(StopIteration())
    except BaseException as error:  # carried over to the consumer's thread
        put(error)
