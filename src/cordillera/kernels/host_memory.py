"""Host memory: reuse of freed blocks by later training steps, and large pages.

Each step allocates and frees the same large tensors. The GNU C library returns such blocks to the system when they are
freed, and the next step pays for getting them again: the system clears every page at its first touch, which in small
models takes longer than the arithmetic.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Parameters of mallopt(3), from the GNU C library's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT = 2**31 - 1  # most free bytes kept at the top of the heap: the largest int
_FROM_HEAP = 32 * 2**20  # larger blocks are mapped separately and returned; the largest value the library accepts

_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGE = 2 * 1024 * 1024


def keep_freed_memory() -> str | None:
    """Make this process keep freed blocks of up to 32 MiB; return None, or the reason why the setting was not changed.

    The setting holds for the whole process and cannot be undone. Peak memory does not change; memory that was needed
    once stays with the process (up to 2 GiB of it free at a time). Nothing is changed where the environment already
    sets the library's thresholds (such as ``MALLOC_TRIM_THRESHOLD_``, or ``GLIBC_TUNABLES`` for malloc).
    """
    for name in _VARIABLES:
        if os.environ.get(name):
            return f"the environment sets {name}"
    if "glibc.malloc" in os.environ.get(_TUNABLES, ""):
        return f"the environment sets {_TUNABLES}"
    if not sys.platform.startswith("linux"):
        return "only the GNU C library of Linux can be told to"
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return "only the GNU C library can be told to"
    if not (library.mallopt(_MMAP_THRESHOLD, _FROM_HEAP) and library.mallopt(_TRIM_THRESHOLD, _KEPT)):
        return "the C library refused"
    return None


@lru_cache(maxsize=1)
def _madvise() -> Any:
    """The C library's function that advises the system on memory, or None."""
    return getattr(ctypes.CDLL(None), "madvise", None)


def on_huge_pages(tensor: Tensor) -> Tensor:
    """Ask Linux to back a ``tensor`` that is not yet written to by large pages, and return it.

    Rows are read at random from far more memory than the processor caches addresses for: with pages of 2 MiB instead of
    4 KiB a lookup takes about half the time.
    """
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu":
        return tensor
    first = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    last = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // _HUGE_PAGE * _HUGE_PAGE
    if last > first:
        madvise = _madvise()
        if madvise is not None:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), getattr(mmap, "MADV_HUGEPAGE", 14))
    return tensor
