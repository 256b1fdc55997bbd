"""Freed memory stays with the process, unless the environment says otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from cordillera.kernels.host_memory import keep_freed_memory

FAULTS = """
import resource, sys
import numpy
from cordillera.kernels.host_memory import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "keep" else None)
def use():
    blocks = [numpy.ones(2**20) for _ in range(3)]  # 8 MiB each
for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    # NumPy asks for huge pages, which would hide how many pages are touched
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, mode],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**clean, "NUMPY_MADVISE_HUGEPAGE": "0"},
    )
    said, count = done.stdout.split()
    return said, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library can be told to keep memory")
def test_kept_memory_is_not_asked_for_again() -> None:
    said, kept = faults("keep")
    _, given_back = faults("leave")
    assert said == "None"
    assert kept * 10 < given_back


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "1000"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0")]
)
def test_thresholds_of_the_environment_are_left_alone(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert keep_freed_memory() == f"the environment sets {name}"


def test_other_systems_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "only the GNU C library" in (keep_freed_memory() or "")
