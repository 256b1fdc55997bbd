"""A process's part in its job: its process group and its watchdog, from beginning to end.

Processes that :func:`cordillera.distributed.job.launch.launch`, ``torchrun`` or SLURM started find their rank in the
environment. Without a launcher, the job consists of this process alone. Gloo aborts a process that ends while its
threads are at work, so all processes wait for one another before any destroys its group.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import ipaddress
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cordillera.distributed.job.environment import JobBackend, JobPlace, job_key, place_in_job
from cordillera.distributed.job.heartbeats import Verdict
from cordillera.distributed.job.store import JobStore, StoreError, hold_store, within
from cordillera.distributed.job.watchdog import JOIN_S, Watchdog, WatchdogConfig
from cordillera.errors import DependencyError, PlanError, RankError, printable

_END_S = 60  # seconds until a failed process is ended although torch still waits
_TAKEN_S = 10.0  # seconds within which a port must answer if something listens on it
_LOOK_S = 0.1
_SAME_S = 1.0  # signals within this time count as one, as launchers may repeat the terminal's signal


STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that ask a process to stop; SIGHUP is sent when the terminal is closed."""


class Job(NamedTuple):
    """Place of a process in its job.

    Attributes:
        watchdog: Watchdog over all processes.
        restarts: Number of times that the launcher has restarted all processes (``torchrun --max-restarts``).
        store: Store that survives a restart of the processes; the launcher holds it.
    """

    rank: int
    size: int
    watchdog: Watchdog
    restarts: int
    store: JobStore


_job: Job | None = None
_joined = 0
# Stores that this process holds, by address and port; successive jobs share them.
_held: dict[tuple[str, int], dist.TCPStore] = {}


@contextlib.contextmanager
def join_job(
    device_type: str = "cpu",
    deadline_s: float = 300.0,
    *,
    backend: JobBackend = "auto",
    join_s: float = JOIN_S,
    stop: threading.Event | None = None,
    abandon: Callable[[RankError], None] | None = None,
) -> Iterator[Job]:
    """Join a job as one of its processes, with a process group, until the end of the ``with`` block.

    The rank is taken from the launcher's environment (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``, and
    ``LOCAL_RANK`` for the GPU); without it, the job is this process alone. An existing process group is used and not
    destroyed, and within a job, joining again returns that job. Ctrl-C, SIGTERM and SIGHUP set the watchdog's ``stop``;
    a second signal, or one before all processes have joined, raises KeyboardInterrupt. Values that the processes
    exchange are signed with the environment's ``CORDILLERA_JOB_TOKEN``, which only
    :func:`~cordillera.distributed.job.launch.launch` sets.

    Args:
        device_type: ``cpu`` or ``cuda``.
        deadline_s: Longest time of one wait for other processes, in seconds.
        backend: ``auto`` for gloo on CPUs and NCCL on GPUs, or ``cordillera`` for Cordillera's own on CPUs.
        join_s: Longest time until all processes have joined, in seconds.
        stop: Event that a request to stop sets; None for a new one.
        abandon: Function that ends this process at once, with an error that its main thread did not raise; None for the
            watchdog's default.

    Raises:
        RankError: If another process ended, stalled or failed, in place of torch's error of a broken collective; or if
            a process did not join, or two processes have the same rank.
        PlanError: If an environment variable of the launcher is missing or invalid, or a backend is for CPUs.
        DependencyError: If there is no GPU for this process.
    """
    global _job, _joined
    if _job is not None:
        yield _job
        return
    if not dist.is_available():
        raise DependencyError("this build of torch has no torch.distributed", where="torch")
    place = place_in_job()
    device = _device(device_type, place)
    config = WatchdogConfig(deadline_s, join_s)
    is_owner = not dist.is_initialized()
    found, rank, size, host = _rendezvous(place, join_s) if is_owner else _existing()
    _joined += 1
    restarts = place.restarts if place else 0  # a launcher may keep its store over several restarts
    kept = _job_store(found, f"cordillera/kept/{_joined}", config)
    scope = f"cordillera/{restarts}/{_joined}"
    board = _job_store(found, scope, config)
    watchdog = Watchdog(config, board, rank, size, host=host, stop=stop, abandon=abandon)
    try:
        if is_owner and size > 1:
            _call_roll(board, rank, size, watchdog, is_holder=found in _held.values())
        with contextlib.ExitStack() as handled, watchdog, watchdog.explaining():
            if is_owner:
                watchdog.meet("beginning")  # limits the connection of the group to one wait
            handled.enter_context(stopped_by_signals(watchdog.stop))  # active until the cause of an error is found
            if is_owner:
                if device is not None:
                    torch.cuda.set_device(device)
                store = dist.PrefixStore(scope, found)
                deadline = timedelta(seconds=deadline_s)
                dist.init_process_group(
                    _backend(backend, device_type), store=store, rank=rank, world_size=size, timeout=deadline
                )
            _job = Job(rank, size, watchdog, restarts, kept)
            yield _job
            watchdog.leave()
    except BaseException:
        if is_owner and size > 1:
            atexit.register(_end_soon)
        elif is_owner and dist.is_initialized():
            dist.destroy_process_group()
        raise
    finally:
        _job = None
        for one in (kept, board):
            one.close()
    if is_owner:
        dist.destroy_process_group()


def _backend(chosen: JobBackend, device_type: str) -> str:
    """Return the backend of a process group as torch.distributed names it."""
    if chosen == "auto":
        return "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
    if device_type != "cpu":
        raise PlanError(f"{chosen} is for CPUs, the device is {device_type}", where="parallel.backend", remedy="auto")
    from cordillera.distributed.transport import process_group  # only jobs that choose it load it

    process_group.register()
    return process_group.BACKEND


def _job_store(store: dist.Store, scope: str, config: WatchdogConfig) -> JobStore:
    # a separate client, as the main thread may be waiting in the other
    return JobStore(dist.PrefixStore(scope, store.clone()), job_key(scope), config.patience_s)  # type: ignore[attr-defined]


def _rendezvous(place: JobPlace | None, join_s: float) -> tuple[dist.Store, int, int, str]:
    """Return a store for all processes of the job, this process's rank, their number, and the holder of the store."""
    if place is None:
        return dist.HashStore(), 0, 1, "this process"
    began = time.monotonic()
    listening = None
    if place.rank == 0 and not place.is_launchers:
        held = _held.get((place.address, place.port))
        if held is not None:
            return held, 0, place.size, "rank 0"
        listening = _listen(place)
        join_s = min(join_s, _TAKEN_S)  # the port is in use
    try:
        _find(place, join_s)
        store = _connect(place, listening, began + join_s - time.monotonic())
    except OSError as error:
        if listening is not None:
            what, remedy = "does not reach the job's store, which it holds, at", "see whether MASTER_ADDR is its own"
        elif place.rank == 0 and not place.is_launchers:
            what, remedy = "finds another program at", "set MASTER_PORT to a port that is free"
        else:
            who = "the launcher" if place.is_launchers else "rank 0"
            what = "did not find the job's store at"
            remedy = f"see whether {who} has begun, and whether MASTER_ADDR and MASTER_PORT lead there"
        why = f" ({error.strerror})" if error.strerror else ""
        raise RankError(
            f"{what} {place.address}:{place.port}{why}; waited {join_s:g} s",
            where=f"rank {place.rank}",
            remedy=remedy,
        ) from error
    finally:
        if listening is not None:
            listening.close()
    if place.rank == 0 and listening is not None:
        _held[place.address, place.port] = store
    return store, place.rank, place.size, "the launcher" if place.is_launchers else "rank 0"


def _listen(place: JobPlace) -> socket.socket | None:
    """Return a socket for the store that this process holds; None if the port is taken."""
    address = "127.0.0.1" if place.address == "localhost" else place.address
    try:
        is_loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        is_loopback = False  # a host name
    host = address if is_loopback else ""
    is_dual = not is_loopback and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, place.port), family=family, backlog=2 * place.size, dualstack_ipv6=is_dual)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise PlanError(
            f"cannot listen at {place.address}:{place.port}: {error.strerror}",
            where="MASTER_PORT",
            remedy="set MASTER_PORT to a port above 1023 that is free, and MASTER_ADDR to an address of this machine",
        ) from error


def _find(place: JobPlace, seconds: float) -> None:
    """Wait until something listens at the store's address. The wait is in Python, so that Ctrl-C is handled."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=max(0.1, min(5.0, seconds))).close()
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > until:
                if isinstance(error, OSError):
                    raise
                raise OSError(errno.EINVAL, "no name of a host") from error
            time.sleep(_LOOK_S)


def _connect(place: JobPlace, listening: socket.socket | None, seconds: float) -> dist.TCPStore:
    seconds = max(seconds, _TAKEN_S)
    timeout = timedelta(seconds=seconds)
    try:
        if listening is not None:
            return hold_store(place.address, listening, seconds, seconds)
        connect = partial(dist.TCPStore, place.address, place.port, wait_for_workers=False, timeout=timeout)
        return within(seconds, connect)
    except (RuntimeError, TimeoutError) as error:
        raise OSError(
            errno.EPROTO,
            f"port {place.port} is in use by a program that does not answer as this store: choose another MASTER_PORT",
        ) from error


def _call_roll(board: JobStore, rank: int, size: int, watchdog: Watchdog, *, is_holder: bool) -> None:
    """Register this process; raise an error if its rank is taken or the numbers of processes differ.

    The holder of the store (``is_holder``) raises it some heartbeats later, so that the others can read it.
    """
    try:
        agreed = board.first("size", size)
        own = [socket.gethostname()[:100], os.getpid(), secrets.token_hex(8)]
        first = board.first(f"here/{rank}", own) if agreed == size else own
        is_running = None not in board.read([f"here/{other}" for other in range(size)])
    except StoreError as error:
        raise watchdog.lost_store(error) from error
    if agreed == size and first == own:
        return
    if agreed != size:
        what = f"WORLD_SIZE is {size} in rank {rank} and {printable(agreed)[:10]} in another process of the job"
        remedy = "start all processes of a job with the same WORLD_SIZE, and each job with a MASTER_PORT of its own"
    else:
        what = f"two processes say that they are rank {rank}: {_who(first)} and {_who(own)}"
        remedy = "give each process a RANK of its own, and each job a MASTER_PORT of its own"
    verdict = Verdict((rank,), what, remedy)
    if not is_running:  # otherwise the job of the other processes goes on
        with contextlib.suppress(StoreError):
            watchdog.tell(verdict)
            if is_holder:
                time.sleep(3 * watchdog.config.beat_s)
    raise verdict.error()


def _who(entry: Any) -> str:
    """Describe the process of an entry in the roll."""
    if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], str) and type(entry[1]) is int:
        return f"process {entry[1]} on {printable(entry[0])[:100]}"
    return "another process"


def _existing() -> tuple[dist.Store, int, int, str]:
    store = dist.distributed_c10d._get_default_store()
    return store, dist.get_rank(), dist.get_world_size(), "rank 0"


def _device(device_type: str, place: JobPlace | None) -> int | None:
    """Return the number of this process's GPU on the machine."""
    if device_type != "cuda":
        return None
    here, count = place.local_rank if place else 0, torch.cuda.device_count()
    if here >= count:
        raise DependencyError(
            f"there is no GPU for process {here} of this machine, which has {count}",
            where="LOCAL_RANK",
            remedy="start as many processes on a machine as it has GPUs, or use the CPU",
        )
    return here


@contextlib.contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Set the event ``stop`` on Ctrl-C, SIGTERM or SIGHUP, and raise KeyboardInterrupt on a second one.

    Outside the main thread, no signals are handled. Ignored signals stay ignored; the launcher then forwards the
    request.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: list[float] = []

    def handle(number: int, frame: Any) -> None:
        if first and time.monotonic() - first[0] > _SAME_S:
            raise KeyboardInterrupt
        first.append(time.monotonic())
        stop.set()

    with handling(handle):
        yield


@contextlib.contextmanager
def handling(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Call ``handle`` on Ctrl-C, SIGTERM and SIGHUP within the ``with`` block, except for signals that are ignored."""
    heard = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_soon() -> None:
    """Prepare the exit of a process that failed, so that torch neither waits for absent ranks nor aborts the process.

    Process groups are not destroyed. A timer ends the process if anything else waits.
    """
    with contextlib.suppress(AttributeError):
        for group in list(dist.distributed_c10d._world.pg_map):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_END_S)
