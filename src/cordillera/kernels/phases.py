"""Phases that the threads of one kernel go through together: each takes the items that no other took, then waits.

Restarting a kernel's threads for each step of a computation, and calling it from Python, takes longer than small
steps do. Here they start once. It works for any number of threads, also if one of them comes late or does everything
alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cordillera.kernels.compiling import compiled

_WIDE = ir.IntType(64)
_APART = 64  # bytes between counters that several threads write
_PATIENCE = 1 << 12  # polls of a counter before the thread yields


def phase_counters(phases: int) -> np.ndarray:
    """Return counters for ``phases`` phases; a kernel uses them once."""
    return np.zeros((phases, 2 * _APART // 8), np.int64)


@intrinsic
def _add(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to an integer atomically and return the old value, with acquire and release ordering."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _WIDE.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _read(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _WIDE.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _let_run(typing_context: Any) -> Any:
    """Yield to other threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(builder.module.globals.get("sched_yield") or ir.Function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.none(), generate


@compiled()
def take(counters: Any, phase: Any) -> Any:
    """Return the number of an item of a phase that no thread took before; may be more than there are."""
    return _add(np.int64(counters.ctypes.data) + 2 * _APART * phase, 1)


@compiled()
def finish(counters: Any, phase: Any) -> None:
    """Mark an item of a phase as done."""
    _add(np.int64(counters.ctypes.data) + 2 * _APART * phase + _APART, 1)


@compiled()
def wait(counters: Any, phase: Any, items: Any) -> None:
    """Wait until all items of a phase are done."""
    looks, done = 0, np.int64(counters.ctypes.data) + 2 * _APART * phase + _APART
    while _read(done) < items:
        looks += 1
        if looks > _PATIENCE:
            _let_run()
