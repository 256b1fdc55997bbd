"""Number of threads of the CPU kernels, and the way in which they wait for one another.

A training step divides its work among threads several hundred times, and after each part all threads wait for the
slowest. GNU's OpenMP, which torch and Numba use on Linux, lets a waiting thread spin for about a millisecond before it
sleeps. If another process computes on the same machine, a spinning thread can occupy the processor that the slowest
thread needs; two threads then take 5 to 20 times as long as one. A short spin avoids this. On an idle machine it costs
a few per cent, so the spin is ten times as long if nothing else runs when the process begins.
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

SPINS_ALONE = 10_000
"""Turns of GNU's waiting loop: on an idle machine as fast as the default; beside other processes half as fast."""

_SPINS_BESIDE = 1000  # iterations of GNU OpenMP's spin loop, some tens of microseconds
_LOOKS = 9  # samples of the number of running threads, a millisecond apart
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_LOOK_S = 0.25  # long compared with the system's clock tick, a hundredth of a second
_BUSY = 0.5  # least load of others, in processors, that counts

_too_late = False


def limit_spinning() -> None:
    """Make OpenMP's threads spin only briefly before they sleep, unless the environment sets how they wait.

    OpenMP reads its settings when torch loads it, so this must be called before torch is imported. Child processes
    inherit the setting.
    """
    global _too_late
    if not any(os.environ.get(name) for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(_SPINS_BESIDE if _others_run() else SPINS_ALONE)
        _too_late = "torch" in sys.modules


def _others_run() -> bool:
    """Whether other processes compute now, by the number of threads that Linux runs."""
    busy = 0
    for _ in range(_LOOKS):
        try:
            running = Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0]
            busy += int(running) > 1  # one is this thread
        except (OSError, ValueError, IndexError):
            return False
        time.sleep(0.001)
    return busy > _LOOKS // 2


def spins_long(most: int = _SPINS_BESIDE) -> str | None:
    """Return why waiting threads keep processors busy; None if they soon sleep, after at most ``most`` turns."""
    if not sys.platform.startswith("linux"):
        return "this system's OpenMP lets threads spin while they wait"
    if _too_late:
        return "torch was imported before cordillera, so its threads spin while they wait: import cordillera first"
    spins = os.environ.get("GOMP_SPINCOUNT", "")
    if spins:
        if spins.isdigit() and int(spins) <= most:
            return None
        return f"GOMP_SPINCOUNT={spins} lets threads spin while they wait"
    if os.environ.get("OMP_WAIT_POLICY", "").strip().upper() == "PASSIVE":
        return None
    return "OMP_WAIT_POLICY lets threads spin while they wait"


def usable_cores() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _whole_cores() -> int:
    """Number of cores of the processors that this process may run on: two processors may be one core."""
    if not hasattr(os, "sched_getaffinity"):
        return usable_cores()
    siblings = set()
    for number in os.sched_getaffinity(0):
        place = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        try:
            siblings.add(place.read_text(encoding="utf-8").strip())
        except OSError:
            return usable_cores()
    return len(siblings)


def quota(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the number of processors whose time the control groups grant this process, or None without a limit."""
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
    """Return how many of this process's processors other processes keep busy, measured for a number of seconds.

    Other threads of this process do not count.
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
    """Busy seconds of this process's processors since the system started; None where the system does not count them."""
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
    """Number of compute threads, with a message if it is not the number of processors or will be slow."""

    count: int
    why: str = ""


def choose_threads() -> ThreadChoice:
    """Choose the number of threads that computes fastest under the current load of other processes.

    A number that the environment (``OMP_NUM_THREADS``, ``MKL_NUM_THREADS``) or ``torch.set_num_threads`` has set is
    kept. Otherwise it is the number of processors within the control group's quota. Processors that other processes
    keep busy are subtracted if more than half remain; if fewer remain, sharing all processors is faster, as long as
    waiting threads sleep. The choice takes a quarter of a second.
    """
    import torch

    cores = usable_cores()
    own = torch.get_num_threads()
    if any(os.environ.get(name) for name in _COUNTS) or own not in (cores, _whole_cores()):
        return ThreadChoice(own)
    cores = own  # torch takes one thread per core, also where a core is two processors
    share = quota()
    return decide(cores, share, used_by_others() if cores > 1 else 0.0, spins_long() if cores > 1 else None)


def decide(cores: int, share: float | None, others: float, spinning: str | None) -> ThreadChoice:
    """Apply the rule of :func:`choose_threads` to a number of processors and their measured load."""
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
