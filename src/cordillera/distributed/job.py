"""A process's part in its job: its process group from the first moment to the last, under a watch.

Processes that :func:`cordillera.distributed.launch.launch`, ``torchrun`` or SLURM started find in their environment
which of them they are; one that nobody started so is a job by itself. Gloo aborts a process that ends while its
threads are at work, so all processes wait for one another before any destroys its group.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cordillera.distributed.hearts import RankError
from cordillera.distributed.watch import Watch, WatchConfig
from cordillera.errors import DependencyError, PlanError

_END_S = 10  # of a process that failed: torch waits for collectives that were begun
_SAME_S = 1.0  # launchers send again what the terminal has sent: signals within this time are one


class Job(NamedTuple):
    """What a process is in its job.

    Attributes:
        rank: Its number.
        size: Processes.
        watch: Over all of them.
        restarts: How often the launcher has started all of them anew, because one ended (``torchrun --max-restarts``).
        store: What processes keep for those that are started in their place; the launcher holds it.
    """

    rank: int
    size: int
    watch: Watch
    restarts: int
    store: dist.Store


_job: Job | None = None
_joined = 0


@contextlib.contextmanager
def join_job(
    device_type: str = "cpu",
    deadline_s: float = 300.0,
    *,
    stop: threading.Event | None = None,
    abandon: Callable[[RankError], None] | None = None,
) -> Iterator[Job]:
    """Be one of the job's processes, with a process group, until the end of the ``with`` block.

    A launcher's environment (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``, and ``LOCAL_RANK`` for its
    GPU) says which; without it, the job is this process. A group that exists is used and left as it is, and within a
    job, joining gives that job. Ctrl-C and SIGTERM set the watch's ``stop``; a second one raises KeyboardInterrupt.

    Args:
        device_type: ``cpu`` or ``cuda``.
        deadline_s: The longest that one wait for other processes may take, seconds; for all to come, 120 or that.
        stop: What a request to stop sets; made if None.
        abandon: Ends this process at once, with an error that its main thread did not raise.

    Raises:
        RankError: If another process ended, stalled or failed, instead of torch's error where a collective broke.
        PlanError: If the environment says this in part only.
        DependencyError: If there is no GPU for this process.
    """
    global _job, _joined
    if _job is not None:
        yield _job
        return
    if not dist.is_available():
        raise DependencyError("this build of torch has no torch.distributed", where="torch")
    device = _device(device_type)
    config = WatchConfig(deadline_s)
    is_owner = not dist.is_initialized()
    store, rank, size, host = _rendezvous(config.join_s) if is_owner else _existing()
    _joined += 1
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # a launcher may keep its store over several
    kept = dist.PrefixStore(f"cordillera/kept/{_joined}", store)
    store = dist.PrefixStore(f"cordillera/{restarts}/{_joined}", store)
    watch = Watch(config, store, rank, size, host=host, stop=stop, abandon=abandon)
    try:
        with stopped_by_signals(watch.stop), watch, watch.explaining():
            if is_owner:
                watch.meet("beginning")  # the time that a group takes for connections is one wait's
                if device is not None:
                    torch.cuda.set_device(device)
                backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
                dist.init_process_group(
                    backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=deadline_s)
                )
            _job = Job(rank, size, watch, restarts, kept)
            yield _job
            watch.leave()
    except BaseException:
        if is_owner and size > 1:
            atexit.register(_end_soon)
        elif is_owner and dist.is_initialized():
            dist.destroy_process_group()
        raise
    finally:
        _job = None
    if is_owner:
        dist.destroy_process_group()


def _rendezvous(join_s: float) -> tuple[dist.Store, int, int, str]:
    """A store for all processes of the job, this one's rank, their number, and who holds the store."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return dist.HashStore(), 0, 1, "this process"
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise PlanError(
            f"RANK and WORLD_SIZE are set, {' and '.join(absent)} {'are' if len(absent) > 1 else 'is'} not",
            where="environment",
            remedy="the launcher must say where rank 0 is to be found; for one process, unset RANK",
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=join_s)))
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankError(
            f"did not find the job's store at {address} within {join_s:g} s",
            where=f"rank {rank}",
            remedy="see whether rank 0 has begun, and whether MASTER_ADDR and MASTER_PORT lead there",
        ) from error
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return store, rank, size, "the launcher" if is_launchers else "rank 0"


def _existing() -> tuple[dist.Store, int, int, str]:
    store = dist.distributed_c10d._get_default_store()
    return store, dist.get_rank(), dist.get_world_size(), "rank 0"


def _device(device_type: str) -> int | None:
    """The GPU of this process, by its number on the machine."""
    if device_type != "cuda":
        return None
    here, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if here >= count:
        raise DependencyError(
            f"there is no GPU for process {here} of this machine, which has {count}",
            where="LOCAL_RANK",
            remedy="start as many processes on a machine as it has GPUs, or use the CPU",
        )
    return here


@contextlib.contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask to stop, a second one raises KeyboardInterrupt; in the main thread alone.

    Signals that are ignored stay so: then a launcher tells.

    Args:
        stop: What the first one sets.
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

    heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_soon() -> None:
    """At the end of a process that failed: should torch wait there for those that do not come, the system ends it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_END_S)
