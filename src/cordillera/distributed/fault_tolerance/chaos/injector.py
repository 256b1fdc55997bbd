"""Injection of faults into a running job, and their end.

Nothing in the job helps: processes get signals, their connections are shut down, what they may write is limited, and
files are written, as a kernel, a machine, a network or a disk that fails would have it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cordillera.distributed.fault_tolerance.chaos.plan import Fault
from cordillera.distributed.fault_tolerance.chaos.processes import JobProcess
from cordillera.distributed.fault_tolerance.chaos.running_job import RunningJob
from cordillera.distributed.fault_tolerance.events import FOLDER, EventLog
from cordillera.run import disk_errors

_LOOK_S = 0.02
_END_S = 0.25  # interval of checks whether the job has ended
_CYCLE_S = 0.1  # period of a slowed process, which runs for a part of it
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was done.

    Attributes:
        fault: Injected fault.
        at: Seconds since the start of the injection.
        step: Newest step of the job.
        process: Number of the process; None for a checkpoint.
        details: Further values of the event.
    """

    fault: Fault
    at: float
    step: int
    process: int | None
    details: dict[str, Any] = field(default_factory=dict)


class FlippedBit(NamedTuple):
    """A bit that was flipped in a file."""

    path: Path
    offset: int
    bit: int
    value: int  # value of the byte after the fault


class FaultInjector:
    """Injector of faults into one job.

    Args:
        job: Running job.
        faults: Faults with all that is open drawn.
        on_fault: Function that is called with each fault that was done.
    """

    def __init__(
        self, job: RunningJob, faults: Sequence[Fault], on_fault: Callable[[InjectedFault], object] | None = None
    ) -> None:
        self._job, self._on_fault = job, on_fault
        self._pending: list[tuple[Fault, float | None]] = [(fault, None) for fault in faults]
        self._active: list[tuple[float, Iterator[float]]] = []
        self._events = EventLog(job.run.folder / FOLDER / "chaos.jsonl")
        self._began = 0.0
        self._is_asked = False

    def inject(self, *, stay: bool = False) -> list[Fault]:
        """Inject each fault when it is due, until all faults or the job have ended; then undo the remaining ones.

        A fault of a process that does not run waits for its successor.

        Args:
            stay: Whether to wait for the end of the job.

        Returns:
            Faults that were not injected.

        Raises:
            KeyboardInterrupt: After Ctrl-C, SIGTERM or SIGHUP.
            RunError: If an event cannot be written or read, or a checkpoint not be written.
        """
        self._began = looked = time.monotonic()
        with self._told_by_signals():
            try:
                while (self._pending or self._active or stay) and not self._is_asked:
                    now = time.monotonic()
                    self._job.look()
                    if now - looked > _END_S:
                        if self._job.is_over:
                            break
                        looked = now
                    self._go_on(now)
                    self._start_due(now)
                    next_s = min((due for due, _ in self._active), default=now + _LOOK_S) - time.monotonic()
                    time.sleep(min(_LOOK_S, max(0.0, next_s)))
            finally:
                self._end_all()
        if self._is_asked:
            raise KeyboardInterrupt
        return [fault for fault, _ in self._pending]

    @contextlib.contextmanager
    def _told_by_signals(self) -> Iterator[None]:
        """Take note of signals, which would otherwise end this process between a stop and what undoes it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: object) -> None:
            self._is_asked = True

        before = {number: signal.signal(number, note) for number in _STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _go_on(self, now: float) -> None:
        """Continue faults whose next moment has come."""
        for entry in [one for one in self._active if one[0] <= now]:
            wait = next(entry[1], None)
            self._active.remove(entry)
            if wait is not None:
                self._active.append((time.monotonic() + wait, entry[1]))

    def _start_due(self, now: float) -> None:
        """Do faults whose moment has come; those whose process does not run stay."""
        left: list[tuple[Fault, float | None]] = []
        for fault, since in self._pending:
            if since is None and (fault.at_step is None or self._job.step >= fault.at_step):
                since = self._began if fault.at_step is None else now
            if since is None or now < since + fault.after_s:
                left.append((fault, since))
                continue
            action = self._action(fault)
            wait = None if action is None else next(action, None)
            if action is None or wait is None:
                left.append((fault, since))
            else:
                self._active.append((time.monotonic() + wait, action))
        self._pending = left

    def _end_all(self) -> None:
        """Undo all faults, whatever happens."""
        with contextlib.ExitStack() as stack:
            for _, action in self._active:
                stack.callback(action.close)  # type: ignore[attr-defined]
            self._active = []

    def _action(self, fault: Fault) -> Iterator[float] | None:
        """Return a fault as steps with the seconds between them; the first one does it, closing it undoes it."""
        if fault.what == "corrupt-checkpoint":
            return self._corrupt(fault)
        if fault.what in ("kill-coordinator", "pause-coordinator"):
            process = self._job.coordinator()
        else:
            assert fault.replica is not None
            assert fault.rank is not None
            process = self._job.rank(fault.replica, fault.rank)
        if process is None:
            return None
        kinds: dict[str, Callable[[Fault, JobProcess], Iterator[float]]] = {
            "kill": self._kill, "kill-coordinator": self._kill, "stop": self._stop, "pause-coordinator": self._stop,
            "slow": self._slow, "cut": self._cut, "full-disk": self._fill,
        }  # fmt: skip
        return kinds[fault.what](fault, process)

    def _kill(self, fault: Fault, process: JobProcess) -> Iterator[float]:
        if process.send(signal.SIGKILL):
            self._tell(fault, process.pid)
            yield 0.0

    def _stop(self, fault: Fault, process: JobProcess) -> Iterator[float]:
        assert fault.seconds is not None
        with self._held(fault, process) as hold:
            if hold():
                self._tell(fault, process.pid)
                yield fault.seconds

    def _slow(self, fault: Fault, process: JobProcess) -> Iterator[float]:
        assert fault.seconds is not None
        assert fault.factor is not None
        until, running = time.monotonic() + fault.seconds, _CYCLE_S / fault.factor
        with self._held(fault, process) as hold:
            if not hold():
                return
            self._tell(fault, process.pid)
            while True:
                yield _CYCLE_S - running
                process.release(hold)
                yield running
                if time.monotonic() >= until or not hold():
                    return

    def _cut(self, fault: Fault, process: JobProcess) -> Iterator[float]:
        if count := process.cut():
            self._tell(fault, process.pid, connections=count)
            yield 0.0

    def _fill(self, fault: Fault, process: JobProcess) -> Iterator[float]:
        assert fault.seconds is not None
        began, who = time.monotonic(), object()
        if not process.fill_disk(who):
            return
        try:
            self._tell(fault, process.pid)
            yield fault.seconds
        finally:
            process.empty_disk(who)
            self._tell_over(fault, process.pid, began)

    @contextlib.contextmanager
    def _held(self, fault: Fault, process: JobProcess) -> Iterator[Callable[[], bool]]:
        """Yield a function that stops a process; the process is always continued afterwards."""
        hold = _Hold(process)
        began = time.monotonic()
        try:
            yield hold
        finally:
            process.release(hold)
            if hold.is_used:
                self._tell_over(fault, process.pid, began)

    def _corrupt(self, fault: Fault) -> Iterator[float]:
        assert fault.place is not None
        assert fault.bit is not None
        checkpoints, began = self._job.run.checkpoints, time.monotonic()
        flipped = flip_bit(checkpoints, fault.place, fault.bit)
        if flipped is None:
            return
        try:
            name = flipped.path.relative_to(checkpoints).as_posix()
            self._tell(fault, None, file=name, offset=flipped.offset, bit=flipped.bit)
            yield fault.seconds or 0.0
        finally:
            if fault.seconds is not None:
                mend(flipped)
                self._tell_over(fault, None, began)

    def _tell(self, fault: Fault, process: int | None, **details: Any) -> None:
        at = time.monotonic() - self._began
        known = {"replica": fault.replica, "rank": fault.rank, "process": process, "seconds": fault.seconds}
        self._events.write("fault", what=fault.what, **known, factor=fault.factor, step=self._job.step, **details)
        if self._on_fault is not None:
            self._on_fault(InjectedFault(fault, at, self._job.step, process, details))

    def _tell_over(self, fault: Fault, process: int | None, began: float) -> None:
        known = {"replica": fault.replica, "rank": fault.rank, "process": process}
        self._events.write("fault over", what=fault.what, **known, seconds=time.monotonic() - began)


class _Hold:
    """Hold on a process; a call stops the process and returns whether it was running."""

    def __init__(self, process: JobProcess) -> None:
        self._stop = partial(process.hold, self)
        self.is_used = False

    def __call__(self) -> bool:
        is_stopped = self._stop()
        self.is_used |= is_stopped
        return is_stopped


def flip_bit(checkpoints: Path, place: float, bit: int) -> FlippedBit | None:
    """Flip a bit in the newest complete checkpoint; return None if there is none.

    Args:
        checkpoints: Folder of all checkpoints.
        place: Which byte of all of its files in the order of their names, from 0 to 1.
        bit: Which bit of this byte.

    Raises:
        RunError: If the file cannot be written.
    """
    complete = (path for path in checkpoints.glob("step-*") if path.name[5:].isdigit())
    newest = max(complete, key=lambda path: int(path.name[5:]), default=None)
    if newest is None:
        return None
    with disk_errors(newest), contextlib.suppress(FileNotFoundError):  # a newer one may take its place at this moment
        sizes = {path: path.stat().st_size for path in sorted(newest.rglob("*")) if path.is_file()}
        offset = int(place * sum(sizes.values()))
        for path, size in sizes.items():
            if offset < size:
                return FlippedBit(path, offset, bit, _flip(path, offset, bit))
            offset -= size
    return None


def _flip(path: Path, offset: int, bit: int) -> int:
    """Flip a bit of a file; return the value of its byte."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        value = file.read(1)[0] ^ 1 << bit
        file.seek(offset)
        file.write(bytes([value]))
    return value


def mend(flipped: FlippedBit) -> None:
    """Flip a bit back, unless its file was removed or rewritten."""
    with contextlib.suppress(FileNotFoundError), open(flipped.path, "r+b", buffering=0) as file:
        file.seek(flipped.offset)
        if file.read(1) == bytes([flipped.value]):
            file.seek(flipped.offset)
            file.write(bytes([flipped.value ^ 1 << flipped.bit]))
