"""Compilation of kernels by Numba: at their first call, without the interpreter's lock, without torch.

Compiled code is cached on disk where a folder is writable. Numba considers it up to date as long as the file of the
function itself is unchanged; here the files from which that file imports kernels count as well, because their functions
are compiled into it.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba

_IMPORT = re.compile(r"^from cordillera\.(kernels\.[\w.]+) import", re.MULTILINE)
_PACKAGE = Path(__file__).parents[1]


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile at first call, with IEEE's rules for division, without the interpreter's lock.

    Args:
        options: Further options of ``numba.njit``.
    """

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


@lru_cache(maxsize=64)
def digest_of_imports(file: Path) -> str:
    """Return the SHA-256 of the kernel files that a file imports from, directly or indirectly; empty if there is none.

    Only kernels of this package count or, for a file elsewhere, files beside it.
    """
    found: dict[str, bytes] = {}

    def visit(one: Path) -> None:
        for name in _IMPORT.findall(one.read_text(encoding="utf-8")):
            parts = name.split(".")
            inside = one.is_relative_to(_PACKAGE)
            other = (_PACKAGE.joinpath(*parts) if inside else one.with_name(parts[-1])).with_suffix(".py")
            if name not in found and other != file and other.is_file():
                found[name] = other.read_bytes()
                visit(other)

    with contextlib.suppress(OSError):  # the sources may be missing
        visit(file)
    content = hashlib.sha256()
    for name in sorted(found):
        content.update(name.encode() + found[name])
    return content.hexdigest() if found else ""
