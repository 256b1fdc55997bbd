"""How a run is asked to end: after the step in progress, by a signal or by a call."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Interrupt:
    """Whether a loop was asked to save and return. Safe from signal handlers and threads."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def ask(self) -> None:
        """Ask the loop to save and return after the step in progress."""
        self._asked.set()

    def is_asked(self) -> bool:
        """Whether it was."""
        return self._asked.is_set()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask; a second one ends all at once. The main thread alone gets them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: Any) -> None:
            if self.is_asked():
                raise KeyboardInterrupt
            self.ask()

        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
