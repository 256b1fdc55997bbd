"""How all kernels are compiled by Numba: at their first call, without the interpreter's lock, without torch.

Compiled code is kept on disk where a folder can be written to. Numba takes it for fresh as long as the file of the
function itself is the same; here the files that this one imports kernels from count as well, for their functions are
compiled into it.
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

_IMPORT = re.compile(r"^from cordillera\.kernels\.(\w+) import", re.MULTILINE)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile at first call, with IEEE's rules for division, without the interpreter's lock.

    Args:
        options: Further options of ``numba.njit``.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        settings = {"error_model": "numpy", "nogil": True, **options}
        try:
            kernel = numba.njit(cache=True, **settings)(function)
        except RuntimeError:  # no folder for the cache can be written to: compile in every process
            return numba.njit(**settings)(function)
        _depend(kernel, digest_of_imports(Path(inspect.getfile(function))))
        return kernel

    return wrap


def _depend(kernel: Any, digest: str) -> None:
    """Make compiled code on disk stale when other files change than its own."""
    if digest:
        # Numba has no public way; where it keeps the stamp elsewhere, its own one must do.
        with contextlib.suppress(AttributeError):
            file = kernel._cache._cache_file
            file._source_stamp = (file._source_stamp, digest)


@lru_cache(maxsize=64)
def digest_of_imports(file: Path) -> str:
    """SHA-256 of the kernels' files that a file imports from, directly or through others; empty if there is none.

    Args:
        file: Of kernels; the others lie beside it.
    """
    found: dict[str, bytes] = {}

    def visit(one: Path) -> None:
        for name in _IMPORT.findall(one.read_text(encoding="utf-8")):
            other = file.with_name(f"{name}.py")
            if name not in found and name != file.stem and other.is_file():
                found[name] = other.read_bytes()
                visit(other)

    with contextlib.suppress(OSError):  # sources may be packed away
        visit(file)
    content = hashlib.sha256()
    for name in sorted(found):
        content.update(name.encode() + found[name])
    return content.hexdigest() if found else ""
