"""Files of compiled kernels: those that one was made of decide whether its compiled code on disk is up to date."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

_IMPORT = re.compile(r"^from cordillera\.(kernels\.[\w.]+) import", re.MULTILINE)
_PACKAGE = Path(__file__).parents[1]


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


def place_compiled_code() -> None:
    """Choose a folder for Numba's compiled code if this user has no home folder, unless the environment names one.

    Numba would make a folder named ``~`` in the working directory. The folder is in that of prepared data, or else a
    temporary one, which is removed at the end: nobody else may write what Numba reads as code. Numba reads the setting
    when it is imported; child processes inherit it.
    """
    if os.environ.get("NUMBA_CACHE_DIR") or os.path.isabs(os.path.expanduser("~")):
        return
    if cache := os.environ.get("CORDILLERA_CACHE"):
        os.environ["NUMBA_CACHE_DIR"] = os.path.abspath(os.path.join(cache, "numba"))
        return
    with contextlib.suppress(OSError):
        folder, process = tempfile.mkdtemp(prefix="cordillera-numba-"), os.getpid()
        os.environ["NUMBA_CACHE_DIR"] = folder
        atexit.register(_remove_of, process, folder)


def _remove_of(process: int, folder: str) -> None:
    """Remove a folder at the end of the process that made it, not at that of a copy of the process."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
