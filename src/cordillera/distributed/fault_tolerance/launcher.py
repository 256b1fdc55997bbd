"""Launch of a job of replicas on this machine: its coordinator, its replicas, and new ones for those that fail.

Processes are forked from one that has loaded torch, so that a replica that failed is back within a second or two.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cordillera.distributed.fault_tolerance.coordination import FaultToleranceConfig
from cordillera.distributed.fault_tolerance.coordinator import Coordinator, CoordinatorLog
from cordillera.distributed.fault_tolerance.events import FOLDER, EventLog, read_events
from cordillera.distributed.fault_tolerance.replica import ReplicaPlace
from cordillera.distributed.job.environment import TOKEN
from cordillera.distributed.job.job import STOPPING
from cordillera.distributed.job.launch import LaunchConfig, counted_signals, launch, process_context, start_tracker
from cordillera.errors import CordilleraError, PeerError, RunError
from cordillera.run import disk_errors, write_atomically

_AGAIN_S = 0.2  # delay before a replica or a coordinator is restarted
_LOOK_S = 0.1
_FINISH_S = 30.0  # longest time from the first replica's end to that of the others
_COORDINATOR, _SECRET, _IDENTITY = "coordinator.log", "secret", "identity"


@dataclass
class _Slot:
    """One replica of the job, through all of its starts."""

    name: str
    thread: threading.Thread | None = None
    failures: list[BaseException] = field(default_factory=list)
    starts: int = 0
    is_over: bool = False
    is_late: bool = False  # another one finished before it had trained


def replica_names(count: int) -> list[str]:
    """Return the names of the replicas of a job; their order is that of their rings."""
    return [f"r{number:0{len(str(count - 1))}d}" for number in range(count)]


class ReplicaLauncher:
    """Launcher of the replicas of one job.

    Args:
        work: Function that a rank calls as ``work(rank, place, *arguments)``, with a :class:`ReplicaPlace`; importable.
        size: Number of processes of each replica.
        tolerance: Number of replicas and deadlines.
        configuration: Digest of all that must be equal on replicas.
        folder: Folder of the run, in which the coordinator's log and the events are.
        config: Settings for starting processes.
        hear: Function that is called with every message that a rank sends.
    """

    def __init__(
        self,
        work: Callable[..., Any],
        size: int,
        arguments: Sequence[Any],
        *,
        tolerance: FaultToleranceConfig,
        configuration: str,
        folder: Path,
        config: LaunchConfig,
        hear: Callable[[Any], object] | None = None,
    ) -> None:
        self._work, self._size, self._arguments, self._tolerance = work, size, tuple(arguments), tolerance
        self._configuration, self._folder, self._config, self._hear = configuration, folder, config, hear
        self._token = secrets.token_bytes(32)
        self._events = EventLog(folder / FOLDER / "launcher.jsonl")
        self._lock = threading.Lock()
        self._results: list[Any] = []
        self._stop = 0
        self._port = 0
        self._coordinator: tuple[Any, Connection] | None = None

    def run(self) -> Any:
        """Run the job; return what rank 0 of the first replica that ended returned.

        Raises:
            CordilleraError: If every replica was given up: the error of the first.
            KeyboardInterrupt: At the second Ctrl-C, SIGTERM or SIGHUP.
        """
        log = self._folder / FOLDER / _COORDINATOR
        log.unlink(missing_ok=True)  # a job begins with what its checkpoints hold
        with counted_signals() as counted:
            self._start_coordinator()
            slots = [_Slot(name) for name in replica_names(self._tolerance.replicas)]
            try:
                for slot in slots:
                    slot.thread = threading.Thread(target=self._keep, args=(slot,), name=f"cordillera {slot.name}")
                    slot.thread.start()
                self._wait(slots, counted)
            finally:
                self._stop = max(self._stop, 2)
                for slot in slots:
                    if slot.thread is not None:
                        slot.thread.join()
                self._end_coordinator()
        if self._results:
            return self._results[0]
        raise next((slot.failures[-1] for slot in slots if slot.failures), KeyboardInterrupt())

    def _wait(self, slots: list[_Slot], counted: Callable[[], int]) -> None:
        until = float("inf")
        while not all(slot.is_over for slot in slots):
            time.sleep(_LOOK_S)
            self._stop = max(self._stop, counted())
            if counted() > 1:
                raise KeyboardInterrupt
            self._keep_coordinator()
            if self._results:
                for slot in slots:
                    slot.is_late = slot.is_late or not (slot.is_over or self._has_trained(slot))
                until = min(until, time.monotonic() + self._tolerance.deadline_s + _FINISH_S)
            if time.monotonic() > until:  # a stalled replica must not block the others
                return

    def _keep(self, slot: _Slot) -> None:
        """Start a replica, and restart it when it fails, in a thread of its own."""
        try:
            while not self._results and not self._stop:
                self._start(slot)
                if not self._is_worth_another(slot):
                    return
                time.sleep(_AGAIN_S)
        except Exception as error:  # such as events that are damaged
            slot.failures.append(error)
        finally:
            slot.is_over = True

    def _start(self, slot: _Slot) -> None:
        slot.starts += 1
        place = ReplicaPlace(slot.name, f"127.0.0.1:{self._port}", self._token, self._configuration)
        self._events.write("started", replica=slot.name, attempt=slot.starts)
        try:
            result = launch(
                self._work,
                self._size,
                (place, *self._arguments),
                config=self._config,
                hear=self._heard,
                asked=lambda: 2 if slot.is_late else self._stop,
            )
        except BaseException as error:
            slot.failures.append(error)
            if not self._results:
                why = str(error).partition("\n")[0] or type(error).__name__
                self._events.write("ended", replica=slot.name, attempt=slot.starts, why=why)
            return
        with self._lock:
            self._results.append(result)
        self._events.write("finished", replica=slot.name, attempt=slot.starts)

    def _heard(self, message: Any) -> None:
        if self._hear is not None:
            with self._lock:
                self._hear(message)

    def _is_worth_another(self, slot: _Slot) -> bool:
        """Whether a replica that ended is started again."""
        if self._results or self._stop:
            return False
        last, most = slot.failures[-1], self._tolerance.retries
        if not isinstance(last, CordilleraError):
            return False
        if isinstance(last, PeerError):
            in_a_row = self._starts_without_commit(slot)
            why = f"{in_a_row} starts without a committed step"
        elif isinstance(last, RunError):  # a file cannot be written: space may be freed, or another machine have some
            what = last.what
            alike = itertools.takewhile(lambda one: getattr(one, "what", "") == what, reversed(slot.failures))
            in_a_row = sum(1 for _ in alike)
            why = f"{in_a_row} times in a row: {what}"
        else:  # a restart would fail in the same way
            in_a_row, why = most + 1, last.what
        if in_a_row > most:
            self._events.write("given up", replica=slot.name, why=why)
        return in_a_row <= most

    def _has_trained(self, slot: _Slot) -> bool:
        """Whether this start of a replica has committed a step."""
        return self._starts_without_commit(slot) == 0

    def _starts_without_commit(self, slot: _Slot) -> int:
        found = 0
        for event in reversed(read_events(self._folder)):
            if event["writer"] == slot.name and event.get("outcome") == "committed":
                break
            found += event["kind"] == "started" and event["replica"] == slot.name
        return found

    def _start_coordinator(self) -> None:
        context = process_context(self._config)
        start_tracker()
        here, there = context.Pipe()
        log = self._folder / FOLDER / _COORDINATOR
        process = context.Process(
            target=_coordinate,
            args=(there, self._tolerance, self._configuration, self._token, str(log), self._port),
            name="cordillera coordinator",
        )
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        there.close()
        found = here.recv()
        if isinstance(found, BaseException):
            process.join()
            raise found
        self._port = found
        self._coordinator = (process, here)
        self._events.write("coordinator", process=process.pid, port=self._port)

    def _keep_coordinator(self) -> None:
        assert self._coordinator is not None
        process, pipe = self._coordinator
        if process.exitcode is not None:
            pipe.close()
            self._events.write("coordinator ended", code=process.exitcode)
            time.sleep(_AGAIN_S)
            self._start_coordinator()

    def _end_coordinator(self) -> None:
        if self._coordinator is not None:
            process, pipe = self._coordinator
            pipe.close()
            process.kill()
            process.join()


def job_secret(folder: Path) -> bytes:
    """Return the secret of the job of a run, from ``CORDILLERA_JOB_TOKEN`` or else from the run's folder.

    Raises:
        RunError: If there is none.
    """
    path = folder / FOLDER / _SECRET
    if given := os.environ.get(TOKEN):
        return given.encode()
    if not path.is_file():
        raise RunError(
            "holds no secret of a job", where=str(path), remedy=f"begin it with `cordillera coordinate`, or set {TOKEN}"
        )
    return path.read_bytes()


def job_identity(folder: Path) -> str:
    """Return the identity of a run, which differs even from an earlier run of the same folder; created on first use.

    Raises:
        RunError: If it cannot be written.
    """
    path = folder / FOLDER / _IDENTITY
    if not path.exists():
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(path, secrets.token_hex(8), new=True)
        except RunError:
            if not path.exists():  # else another replica was first
                raise
    return path.read_text(encoding="ascii")


def _write_secret(folder: Path) -> bytes:
    """Return the secret of a new job; unless the environment has it, it is written for replicas of the same user."""
    if given := os.environ.get(TOKEN):
        return given.encode()
    path, secret = folder / FOLDER / _SECRET, secrets.token_hex(32).encode()
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
    return secret


class ReplicaService:
    """Coordinator of replicas that are started elsewhere, in this process.

    Args:
        folder: Folder of the run.
        tolerance: Number of replicas and deadlines.
        configuration: Digest of all that must be equal on replicas.
        host: Address to listen at.
        port: Port; 0 for one that is free.

    Attributes:
        address: ``HOST:PORT`` at which it listens.

    Raises:
        PlanError: If it cannot listen there.
        RunError: If another coordinator serves the run.
    """

    def __init__(
        self, folder: Path, tolerance: FaultToleranceConfig, configuration: str, *, host: str, port: int
    ) -> None:
        events = EventLog(folder / FOLDER / "coordinator.jsonl")
        path = folder / FOLDER / _COORDINATOR
        log = CoordinatorLog(path)
        path.unlink(missing_ok=True)  # a job begins with what its checkpoints hold
        secret = _write_secret(folder)
        self._coordinator = Coordinator(
            tolerance.rules,
            configuration,
            secret,
            log=log,
            host=host,
            port=port,
            hear=lambda event: events.write(**event),
        )
        self.address = self._coordinator.address
        started = EventLog(folder / FOLDER / "launcher.jsonl")
        started.write("coordinator", process=os.getpid(), port=int(self.address.rpartition(":")[2]))

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Answer replicas until the job is over and they have left, or a second request to stop."""
        thread = threading.Thread(target=self._coordinator.serve, name="cordillera decisions")
        with counted_signals() as counted:
            thread.start()
            try:
                while not (is_over() and not self._coordinator.replicas):
                    time.sleep(_LOOK_S)
                    if counted():
                        self._coordinator.stop()
                        if counted() > 1 or not self._coordinator.replicas:
                            return
            finally:
                self._coordinator.close()
                thread.join()


def _coordinate(
    pipe: Connection, tolerance: FaultToleranceConfig, configuration: str, token: bytes, log: str, port: int
) -> None:
    """Be the coordinator: the target function of its process, which ends with the launcher."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    events = EventLog(Path(log).with_name("coordinator.jsonl"))

    try:
        coordinator = Coordinator(
            tolerance.rules,
            configuration,
            token,
            log=CoordinatorLog(Path(log)),
            port=port,
            hear=lambda event: events.write(**event),
        )
    except BaseException as error:
        pipe.send(error)
        raise
    pipe.send(int(coordinator.address.rpartition(":")[2]))

    def end() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    coordinator.serve()
