"""Fingerprint of a measurement: processor, libraries, date, commit."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

LIBRARIES = (
    "cordillera",
    "torch",
    "triton",
    "fbgemm-gpu-cpu",
    "numba",
    "numpy",
    "polars",
    "scipy",
    "fuxictr",
    "torchrec",
    "transformers",
    "llama-cpp-python",
)
CHECKOUT = Path(__file__).resolve().parent.parent
ARCHIVED = CHECKOUT / "benchmarks" / "_archived_commit.txt"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return next((value.strip() for key, value in fields.items() if key.strip() == "model name"), platform.machine())


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _commit() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout and whether files differ from it.

    ``git archive`` writes its commit into a file of the copy, and copies nothing that is not committed.
    """
    found = _git("rev-parse", "HEAD")
    if found is None:
        archived = ARCHIVED.read_text().strip() if ARCHIVED.exists() else ""
        return (archived, False) if re.fullmatch(r"[0-9a-f]{40}", archived) else (None, None)
    # results of parts measured just before are not changes of code
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results")
    return found, None if changes is None else bool(changes)


def _gpu() -> dict[str, Any] | None:
    """Describe the GPU that is measured; None without one."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        driver = said.split("\n")[0].strip()
    return {
        "name": found.name,
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": driver,
    }


def busy() -> float | None:
    """Return the mean number of running processes over the last minute, including this one; None if unknown."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def fingerprint() -> dict[str, Any]:
    """Describe this machine and this code for JSON, so that a figure can be judged and measured again.

    Keys are processor, cores, threads, memory in bytes, GPU, operating system, Python, the versions of installed
    libraries, date in UTC, the commit of the checkout and whether files differed from it.
    """
    libraries = {}
    for name in LIBRARIES:
        try:
            libraries[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            libraries[name] = None
    commit, changed = _commit()
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(),
        "gpu": _gpu(),
        "load": busy(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "libraries": libraries,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "uncommitted_changes": changed,
    }
