"""Threads of the CPU's kernels: how they wait for one another, and how many there are.

A step divides its work among threads many hundred times, and after each part they wait for the last one. GNU's OpenMP,
which torch and Numba use on Linux, lets a waiting thread spin for about a millisecond before it sleeps. Where another
process computes, the thread that is waited for may have lost its processor to one that only spins: two threads then
take 5 to 20 times as long as one. A short spin keeps the speed of an idle machine and avoids this.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MOST_THREADS = 1024
"""Largest number of threads that a recipe may ask for."""

_SPINS = 1000  # turns of GNU's waiting loop, some tens of microseconds
_MOST_SPINS = 10_000  # above, beside other processes, waiting costs more than the work
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_LOOK_S = 0.25  # the system counts in hundredths of a second
_BUSY = 0.5  # processors; what is less comes and goes on any machine

_too_late = False


def limit_spinning() -> None:
    """Let OpenMP's threads spin briefly before they sleep, unless the environment says how they wait.

    The library reads its settings when torch loads it, so this has to be done before torch is imported; processes that
    are started from this one inherit it.
    """
    global _too_late
    if not any(os.environ.get(name) for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(_SPINS)
        _too_late = "torch" in sys.modules


def spins_long() -> str | None:
    """Why waiting threads of this process keep their processors busy, or None if they soon sleep."""
    if not sys.platform.startswith("linux"):
        return "this system's OpenMP lets threads spin while they wait"
    if _too_late:
        return "torch was imported before cordillera, so its threads spin while they wait: import cordillera first"
    spins = os.environ.get("GOMP_SPINCOUNT", "")
    if spins:
        if spins.isdigit() and int(spins) <= _MOST_SPINS:
            return None
        return f"GOMP_SPINCOUNT={spins} lets threads spin while they wait"
    if os.environ.get("OMP_WAIT_POLICY", "").strip().upper() == "PASSIVE":
        return None
    return "OMP_WAIT_POLICY lets threads spin while they wait"


def usable_cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Processors' worth of time that the control groups of this process leave it, or None for no limit.

    Args:
        cgroups: Where control groups are mounted.
        own: File that names those of this process.
    """
    found: list[float] = []
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            root = cgroups / controllers if controllers else cgroups
            if controllers and "cpu" not in controllers.split(","):
                continue
            folder = root / path.lstrip("/")
            for one in (folder, *folder.parents):
                if one == root.parent:
                    break
                with contextlib.suppress(OSError, ValueError):
                    if controllers:
                        limit = (one / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
                        period = (one / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
                    else:
                        limit, period = (one / "cpu.max").read_text(encoding="utf-8").split()
                    if limit not in ("max", "-1"):
                        found.append(float(limit) / float(period))
    return min(found, default=None)


def used_by_others(seconds: float = _LOOK_S) -> float:
    """Processors that other processes keep busy, of those that this process may run on.

    Args:
        seconds: How long to look; other threads of this process do not count.
    """
    before, own, began = _busy_seconds(), time.process_time(), time.perf_counter()
    if before is None:
        with contextlib.suppress(OSError):
            return max(0.0, min(os.getloadavg()[0] - 1, float(usable_cores())))  # this process counts as one
        return 0.0
    time.sleep(seconds)
    after, own, seconds = _busy_seconds(), time.process_time() - own, time.perf_counter() - began
    return max(0.0, min(((after or 0.0) - before - own) / seconds, float(usable_cores())))


def _busy_seconds() -> float | None:
    """Seconds since the start of the system that the processors of this process were busy; None where none says."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines()]
        ticks = [[int(value) for value in fields[1:9]] for fields in lines if fields and fields[0] in names]
        # user, nice, system, idle, waiting for a disk, interrupts, soft interrupts, taken by other machines
        return sum(sum(row) - row[3] - row[4] for row in ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class ThreadChoice:
    """How many threads compute.

    Attributes:
        count: Number of threads.
        why: A line for people where it is not simply all processors, or where others slow them down; else empty.
    """

    count: int
    why: str = ""


def choose_threads() -> ThreadChoice:
    """Number of threads that computes fastest beside what other processes do now.

    The number stays as it is where the environment (``OMP_NUM_THREADS``, ``MKL_NUM_THREADS``) or
    ``torch.set_num_threads`` has set it. Otherwise it is that of the processors within the control group's quota, less
    those that other processes keep busy if more than half remain: with fewer, sharing all of them is faster, as long as
    waiting threads sleep. Takes a quarter of a second.
    """
    import torch

    cores = usable_cores()
    if any(os.environ.get(name) for name in _COUNTS) or torch.get_num_threads() != cores:
        return ThreadChoice(torch.get_num_threads())
    share = quota()
    return decide(cores, share, used_by_others() if cores > 1 else 0.0, spins_long() if cores > 1 else None)


def decide(cores: int, share: float | None, others: float, spinning: str | None) -> ThreadChoice:
    """The rule of :func:`choose_threads`.

    Args:
        cores: Processors that the process may run on.
        share: Processors' worth of time that it is given, or None.
        others: Processors that other processes keep busy.
        spinning: Why threads spin while they wait, or None if they soon sleep.
    """
    most = cores if share is None else max(1, min(cores, math.ceil(share)))
    reasons = [f"the control group allows {share:.2g} processors"] if share is not None and most < cores else []
    count = most
    if others >= _BUSY:
        free = max(1, min(most, cores - round(others)))
        count = free if spinning or 2 * free > most else most
        reasons.append(f"other processes keep {others:.1f} of {cores} processors busy")
        if spinning and count < most:
            reasons.append(spinning)
    return ThreadChoice(count, f"{count} of {cores}: {'; '.join(reasons)}" if reasons else "")
