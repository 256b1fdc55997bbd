"""Launch of a job's processes on this machine.

:func:`launch` starts the processes and waits for them. It reports once which rank failed, ended or stalled. It alone
receives Ctrl-C and forwards it to the ranks, and it leaves no rank running. A rank whose launcher is killed ends
itself. Each process runs within :func:`~cordillera.distributed.job.job.join_job`, as under any other launcher.

On Linux, CPU jobs load torch and Numba once, in a process from which all ranks are forked, as loading takes seconds for
each rank. That process stays for the next launch, and ends with the launcher.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, field_validator

from cordillera.distributed.job.environment import TOKEN, JobBackend, checked_deadline, job_key
from cordillera.distributed.job.failures import Failure, pack, unpack
from cordillera.distributed.job.heartbeats import HeartbeatBoard, Verdict, named
from cordillera.distributed.job.job import STOPPING, handling, join_job
from cordillera.distributed.job.store import JobStore, StoreError, hold_store
from cordillera.distributed.job.watchdog import ABANDONED, WatchdogConfig
from cordillera.errors import DependencyError, PlanError, RankError, printable
from cordillera.kernels.threads import usable_cores

_POLL_S = 0.1
_FIND_S = 20.0  # longest wait for the store in this process to answer
_FINISH_S = 15.0  # longest time from the result, or from the failure, of a process to its end
_SAME_S = 1.0  # signals within this time count as one, as a launcher may repeat the terminal's signal
_LAST_LINES, _LAST_BYTES = 5, 4_000
_PREFIX = "cordillera/0/1"  # prefix that join_job uses for the first job of the first attempt

_starting = threading.Lock()  # the environment is shared by all threads


class LaunchConfig(BaseModel):
    """Settings for starting processes.

    Attributes:
        device_type: ``cpu``, or ``cuda`` with a GPU for each process.
        threads: Number of CPU threads of each process; None for an equal share of the cores.
        deadline_s: Longest time from the moment at which a process stops, or stands still while others wait for it, to
            the end of the job, in seconds.
        backend: Backend of torch.distributed, as for :func:`~cordillera.distributed.job.job.join_job`.
        remedy: Advice for errors about a process that ended, for instance the command that resumes the run.
        loaded: Modules that processes on CPUs need, take long to load and start no threads. They are loaded once,
            before the processes are forked; the first launch in this process decides which.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device_type: Literal["cpu", "cuda"] = "cpu"
    threads: int | None = Field(None, ge=1)
    deadline_s: float = Field(300.0, gt=0, allow_inf_nan=False)
    backend: JobBackend = "auto"
    remedy: str = "start it again; what was saved is intact"
    loaded: tuple[str, ...] = ("torch.distributed.fsdp", "numba")

    _is_deadline = field_validator("deadline_s")(checked_deadline)


class _Done(NamedTuple):
    result: bytes


class _Death(NamedTuple):
    code: int


class _Told(NamedTuple):
    message: bytes


_to_launcher: Connection | None = None  # set in ranks


def tell(message: Any) -> None:
    """Send a picklable message from a rank to the process that launched it, which calls ``hear`` with it.

    Raises:
        PlanError: If :func:`launch` did not start this process.
    """
    if _to_launcher is None:
        raise PlanError("this process was not started by cordillera.distributed.job.launch", where="tell")
    _to_launcher.send_bytes(pickle.dumps(_Told(pickle.dumps(message))))


def launch(
    work: Callable[..., Any],
    size: int,
    arguments: Sequence[Any] = (),
    *,
    config: LaunchConfig | None = None,
    hear: Callable[[Any], object] | None = None,
    asked: Callable[[], int] | None = None,
) -> Any:
    """Run a function in ``size`` processes on this machine, which form a process group; return its result on rank 0.

    The processes watch each other. Rank 0 writes to the terminal, the others are silent. Ctrl-C, SIGTERM and SIGHUP ask
    the ranks to stop (:attr:`Watchdog.stop <cordillera.distributed.job.watchdog.Watchdog>`); a second one ends all of
    them at once. In the ranks, :func:`~cordillera.distributed.job.job.join_job` returns the job and its watchdog.
    Values that the ranks exchange are signed with a secret that only they receive.

    Args:
        work: Function called as ``work(rank, *arguments)``; it must be importable by the processes.
        arguments: Arguments of ``work``; they must be picklable.
        config: Settings for starting the processes; None for the defaults.
        hear: Function called with every message that a rank sends by :func:`tell`, in order. If it raises an error, all
            ranks are ended.
        asked: Function that returns how often it was asked to stop, for a call in a thread, where no signals come.

    Raises:
        RankError: If a rank was ended or stalled; the message names the rank.
        CordilleraError: If a rank raised one. The class is preserved; the rank is named unless all ranks raised the
            same error.
        DependencyError: If there are fewer GPUs than processes.
        KeyboardInterrupt: At the second Ctrl-C, SIGTERM or SIGHUP.
    """
    config = config or LaunchConfig()
    if config.device_type == "cuda" and torch.cuda.device_count() < size:
        raise DependencyError(
            f"{size} processes take {size} GPUs, there are {torch.cuda.device_count()}",
            where="processes",
            remedy="start fewer, or use the CPU",
        )
    payload = pickle.dumps((work, tuple(arguments)))
    with counted_signals() as counted:
        token = secrets.token_hex(32)
        listener = socket.create_server(("127.0.0.1", 0), backlog=4 * size)
        port = listener.getsockname()[1]
        ranks: list[_Rank] = []
        try:
            store = _hold_store(listener, config)
            _start(ranks, size, payload, config, port, token)
            return _Supervisor(ranks, store, token, config, asked or counted, hear).result()
        finally:
            for rank in ranks:
                rank.end()


def _hold_store(listener: socket.socket, config: LaunchConfig) -> dist.TCPStore:
    seconds = config.deadline_s
    try:
        return hold_store("127.0.0.1", listener, seconds, min(seconds, _FIND_S))
    except (RuntimeError, TimeoutError) as error:
        raise RankError(
            "the processes cannot reach each other at 127.0.0.1", remedy="see whether the loopback link is up"
        ) from error


class _Rank:
    """Process of a rank, as seen by its launcher."""

    def __init__(self, number: int, process: Any, pipe: Connection, log: IO[bytes]) -> None:
        self.number, self.process, self.log = number, process, log
        self.pipe: Connection | None = pipe
        self.outcome: _Done | Failure | _Death | None = None
        self.known = 0.0  # time.monotonic() of the outcome

    def look(self, hear: Callable[[Any], object] | None) -> None:
        """Read the process's messages, and note how it ended if it has ended."""
        code = self.process.exitcode  # read before its messages, so that none are missed
        messages = []
        try:
            while self.pipe is not None and self.pipe.poll():
                said = pickle.loads(self.pipe.recv_bytes())
                if not isinstance(said, _Told):
                    self._note(said)
                elif hear is not None:
                    messages.append(pickle.loads(said.message))
        except (EOFError, OSError):
            self.pipe = None
        for message in messages:
            hear(message)  # type: ignore[misc]
        if code is not None:
            self._note(_Death(code))

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            if self.pipe is not None:
                self.pipe.send_bytes(b"stop")

    def end(self) -> None:
        """Kill the process and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()

    def last_words(self) -> str:
        """Return the last lines of the process's log; empty for rank 0, which writes to the terminal."""
        size = os.fstat(self.log.fileno()).st_size
        text = os.pread(self.log.fileno(), _LAST_BYTES, max(0, size - _LAST_BYTES)).decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return "".join(f"\n  | {printable(line)}" for line in lines[-_LAST_LINES:])

    def _note(self, outcome: _Done | Failure | _Death) -> None:
        if self.outcome is None:
            self.outcome, self.known = outcome, time.monotonic()


class _Supervisor:
    """Supervision of the ranks from their start to their end."""

    def __init__(
        self,
        ranks: list[_Rank],
        store: dist.Store,
        token: str,
        config: LaunchConfig,
        asked: Callable[[], int],
        hear: Callable[[Any], object] | None,
    ) -> None:
        self._ranks, self._config, self._asked, self._hear = ranks, config, asked, hear
        self._watched = watched = WatchdogConfig(config.deadline_s)
        self._store = JobStore(dist.PrefixStore(_PREFIX, store), job_key(_PREFIX, token), watched.patience_s)
        self._board = HeartbeatBoard(self._store, len(ranks), watched.patience_s, watched.join_s)
        self._lost: Verdict | None = None
        self._is_stopping = False
        self._is_over, self._wake = threading.Event(), threading.Event()

    @property
    def _verdict(self) -> Verdict | None:
        return self._board.verdict or self._lost

    def result(self) -> Any:
        """Wait until all ranks have ended, and return the result of rank 0."""
        # The store may not answer, so this thread, which handles signals, never calls it.
        threading.Thread(target=self._keep_looking, name="cordillera launcher", daemon=True).start()
        try:
            return self._result()
        finally:
            self._is_over.set()
            self._wake.set()
            self._store.close()

    def _result(self) -> Any:
        since = float("inf")  # time.monotonic() of the first sign that the job ends
        while not all(rank.process.exitcode is not None for rank in self._ranks):
            pipes = [rank.pipe for rank in self._ranks if rank.pipe is not None]
            wait([*pipes, *(rank.process.sentinel for rank in self._ranks if rank.process.exitcode is None)], _POLL_S)
            for rank in self._ranks:
                rank.look(self._hear)
            self._pass_on_signals()
            now = time.monotonic()
            outcomes = [rank.outcome for rank in self._ranks]
            if any(isinstance(outcome, _Death) for outcome in outcomes):
                self._wake.set()
            verdict = self._verdict
            if verdict is not None or any(outcomes):
                since = min(since, now)
            if now - since > self._patience() or (verdict is not None and self._have_others_ended(verdict)):
                break
        for rank in self._ranks:
            rank.look(self._hear)
        first = self._ranks[0].outcome
        if isinstance(first, _Done) and all(isinstance(rank.outcome, _Done) for rank in self._ranks):
            return pickle.loads(first.result)
        raise self._error()

    def _patience(self) -> float:
        """Return the seconds that ranks may take to end; more if a rank ends on its own and the others are notified."""
        verdict, outcomes = self._verdict, [rank.outcome for rank in self._ranks]
        is_ending = any(isinstance(o, _Done) or (isinstance(o, Failure) and not o.is_consequence) for o in outcomes)
        return _FINISH_S if is_ending or (verdict and verdict.is_own) else self._watched.grace_s + 1

    def _have_others_ended(self, verdict: Verdict) -> bool:
        """Return whether all ranks have ended, except those of the verdict that do not end on their own."""
        stopped = () if verdict.is_own else verdict.ranks
        return all(rank.outcome is not None for rank in self._ranks if rank.number not in stopped)

    def _pass_on_signals(self) -> None:
        count = self._asked()
        if count > 1:
            raise KeyboardInterrupt
        if count and not self._is_stopping:
            self._is_stopping = True
            for rank in self._ranks:
                rank.stop()

    def _keep_looking(self) -> None:
        """Read the store repeatedly, in a separate thread."""
        try:
            while not self._is_over.is_set():
                self._judge()
                self._wake.wait(self._watched.beat_s / 2)
                self._wake.clear()
        except StoreError as error:
            if not self._is_over.is_set():
                what = f"the job's store, at 127.0.0.1, {error}"
                self._lost = Verdict((), what, "see whether the loopback link is up")

    def _judge(self) -> None:
        """Detect reasons why the ranks cannot continue, and notify the ranks."""
        if self._verdict is not None or any(isinstance(rank.outcome, _Done) for rank in self._ranks):
            return
        self._board.look()
        verdict = self._board.verdict
        deaths = [rank for rank in self._ranks if isinstance(rank.outcome, _Death)]
        if verdict is None and deaths:
            verdict = self._death(deaths[0])
        is_watched = len(self._ranks) > 1  # one alone writes no heartbeats
        if verdict is None and is_watched:
            verdict = self._board.judge()
        if verdict is None and is_watched and self._is_stopping and self._board.still() > self._config.deadline_s:
            what = f"no rank moved for {self._config.deadline_s:g} s after they were asked to stop"
            verdict = Verdict((), what, "see what they do")
        if verdict is not None:
            self._board.accuse(verdict)

    def _death(self, rank: _Rank) -> Verdict:
        assert isinstance(rank.outcome, _Death)
        code = -rank.outcome.code
        if code == signal.SIGKILL:
            how = "was ended by SIGKILL (by hand, or for want of memory)"
        else:
            how = f"was ended by {_name(code)}" if code > 0 else f"ended with exit code {-code}"
        words = "" if code == signal.SIGKILL else rank.last_words()
        where = (
            f"; {self._board.describe(rank.number)}" if len(self._ranks) > 1 else ""
        )  # one alone writes no heartbeats
        what = f"rank {rank.number} {how}{where}{words}"
        return Verdict((rank.number,), what, "see why")

    def _named(self, verdict: Verdict) -> RankError:
        return verdict._replace(remedy=f"{verdict.remedy}; {self._config.remedy}").error()

    def _error(self) -> BaseException:
        """Return the first error that is not a consequence of another one."""
        ended = sorted((rank for rank in self._ranks if rank.outcome is not None), key=lambda rank: rank.known)
        first = next((rank for rank in ended if not _is_consequence(rank.outcome)), None)
        verdict = self._verdict
        if self._is_stopping and (_is_exit(first.outcome) if first else verdict is None):
            return KeyboardInterrupt()
        if first is None and verdict is not None:
            return self._named(verdict)
        first = first or next(rank for rank in ended if not isinstance(rank.outcome, _Done))
        if isinstance(first.outcome, _Death):
            return self._named(self._death(first))
        assert isinstance(first.outcome, Failure)
        failures = {rank.number: rank.outcome for rank in ended if isinstance(rank.outcome, Failure)}
        alike = sorted(number for number, failure in failures.items() if failure.text == first.outcome.text)
        others = {
            f"rank {number} failed as well: {failure.text}"
            for number, failure in failures.items()
            if number not in alike and not failure.is_consequence
        }
        return unpack(first.outcome, None if len(alike) == len(self._ranks) else named(alike), sorted(others))


def process_context(config: LaunchConfig) -> Any:
    """Return the way to start processes: afresh with GPUs or on other systems, where libraries do not allow a fork."""
    if config.device_type != "cpu" or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    util.get_temp_dir()  # ranks know it from now on
    context.set_forkserver_preload([__name__, *config.loaded])
    return context


def start_tracker() -> None:
    """Start the resource tracker with its warnings silenced.

    The start unblocks signals, so it must precede the call that blocks them.
    """
    with _starting, _environment({"PYTHONWARNINGS": "ignore:resource_tracker"}):
        resource_tracker.ensure_running()


def _start(ranks: list[_Rank], size: int, payload: bytes, config: LaunchConfig, port: int, token: str) -> None:
    """Start the processes and append each to ``ranks``, also if a later one fails to start."""
    context = process_context(config)
    start_tracker()
    threads = config.threads or max(1, usable_cores() // size)
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    job = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        TOKEN: token,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    if loopback:
        job |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    # signals stay pending until a process has set its handlers
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        for number in range(size):
            pipe, other = context.Pipe()
            log = tempfile.TemporaryFile()  # noqa: SIM115 (unnamed, deleted with its last process)
            outputs = _Outputs([log.fileno()] * 2 if number else [1, 2])
            with _starting, _environment({**job, "RANK": str(number), "LOCAL_RANK": str(number)}):
                process = context.Process(
                    target=_be_rank,
                    args=(payload, other, config, threads, outputs, dict(os.environ)),
                    name=f"cordillera rank {number}",
                )
                process.start()
            other.close()
            ranks.append(_Rank(number, process, pipe, log))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Outputs:
    """Descriptors of a rank's standard output and error, passed to its process; those that are closed are left out."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> tuple[Any, ...]:
        once = {one: DupFd(one) for one in dict.fromkeys(self._descriptors) if _is_open(one)}
        return _handed, ([once.get(one) for one in self._descriptors],)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _handed(descriptors: list[Any]) -> list[int | None]:
    return [None if one is None else int(one.detach()) for one in descriptors]


def _be_rank(
    payload: bytes,
    pipe: Connection,
    config: LaunchConfig,
    threads: int,
    outputs: list[int | None],
    environment: dict[str, str],
) -> None:
    """Run one rank: the target function of its process."""
    global _to_launcher
    os.environ.clear()  # a process that was forked has the environment of an earlier moment
    os.environ.update(environment)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"cordillera {environment['RANK']}", encoding="ascii")  # its name in `top`
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # processes that it starts end with it
    stop = threading.Event()
    for number in STOPPING:  # the launcher forwards the terminal's signals
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    threading.Thread(target=_listen, args=(pipe, stop), daemon=True).start()
    _to_launcher = pipe
    streams = (sys.stdout, sys.stderr)
    for stream, output in zip(streams, outputs, strict=True):
        if output is not None:
            stream.flush()
            os.dup2(output, stream.fileno())
    for output in {one for one in outputs if one is not None} - {stream.fileno() for stream in streams}:
        os.close(output)
    torch.set_num_threads(threads)
    try:
        work, arguments = pickle.loads(payload)
        abandon = partial(_give_up, pipe)
        with join_job(config.device_type, config.deadline_s, backend=config.backend, stop=stop, abandon=abandon) as job:
            result = work(job.rank, *arguments)
        pipe.send_bytes(pickle.dumps(_Done(pickle.dumps(result if job.rank == 0 else None))))
    except BaseException as error:
        _give_up(pipe, error)


def _listen(pipe: Connection, stop: threading.Event) -> None:
    """Set ``stop`` when the launcher asks to stop, and end this process when the launcher has ended."""
    with contextlib.suppress(EOFError, OSError):
        while pipe.recv_bytes():
            stop.set()
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)  # the launcher's, which a killed one leaves
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _give_up(pipe: Connection, error: BaseException) -> None:
    """Report an error and exit at once, as torch would wait for unfinished collectives."""
    with contextlib.suppress(OSError):
        pipe.send_bytes(pickle.dumps(pack(error)))
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
            output.flush()
    os._exit(ABANDONED if isinstance(error, RankError) else 1)


def _is_consequence(outcome: _Done | Failure | _Death | None) -> bool:
    """Whether a process ended normally or because of another one; gloo aborts some processes whose peers are gone."""
    if isinstance(outcome, Failure):
        return outcome.is_consequence
    return not isinstance(outcome, _Death) or outcome.code in (-signal.SIGABRT, ABANDONED)


def _name(number: int) -> str:
    """Return the name of a signal; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_exit(outcome: _Done | Failure | _Death | None) -> bool:
    return isinstance(outcome, Failure) and outcome.is_exit


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started within the ``with`` statement."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def counted_signals() -> Iterator[Callable[[], int]]:
    """Count the signals that ask to stop within the ``with`` block; outside the main thread, none come."""
    times: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return

    def handle(number: int, frame: Any) -> None:
        if not times or time.monotonic() - times[-1] > _SAME_S:
            times.append(time.monotonic())

    with handling(handle):
        yield lambda: len(times)
