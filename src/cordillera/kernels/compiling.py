"""How all kernels are compiled by Numba: at their first call, without the interpreter's lock, without torch.

Compiled code is kept on disk where a folder can be written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile at first call, with IEEE's rules for division, without the interpreter's lock.

    Args:
        options: Further options of ``numba.njit``.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        settings = {"error_model": "numpy", "nogil": True, **options}
        try:
            return numba.njit(cache=True, **settings)(function)
        except RuntimeError:  # no folder for the cache can be written to: compile in every process
            return numba.njit(**settings)(function)

    return wrap
