"""Compilation of kernels by Numba: at their first call, without the interpreter's lock, without torch.

Compiled code is cached on disk where a folder is writable. Numba considers it up to date as long as the function's own
file is unchanged; here the files from which that file imports kernels count too, as they are compiled into it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from cordillera.kernels.compiled_files import digest_of_imports


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile at first call, with IEEE's rules for division and without the interpreter's lock."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        settings = {"error_model": "numpy", "nogil": True, **options}
        try:
            kernel = numba.njit(cache=True, **settings)(function)
        except RuntimeError:  # no writable folder for the cache: compile in every process
            return numba.njit(**settings)(function)
        _depend(kernel, digest_of_imports(Path(inspect.getfile(function))))
        return kernel

    return wrap


def _depend(kernel: Any, digest: str) -> None:
    """Make cached code stale when files other than its own change."""
    if digest:
        # Numba has no public interface for this; where it keeps the stamp elsewhere, its own stamp stays.
        with contextlib.suppress(AttributeError):
            file = kernel._cache._cache_file
            file._source_stamp = (file._source_stamp, digest)
