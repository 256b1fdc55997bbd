"""Signatures: the properties of an operation on which ranks must agree, as small numbers in every frame."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from cordillera.errors import PlanError

_COLLECTIVES = (
    "message", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
    "barrier", "all_to_all_dynamic", "monitored_barrier", "sparse_all_reduce",
    "window", "put",
)  # fmt: skip
_PLANS = ("", "ring", "bidirectional", "doubling", "hierarchical")  # plans; the empty name is the default plan
_REDUCTIONS = ("none", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip

MESSAGE = 0
"""Number of the collective that is none: a message between two ranks."""

PUT = _COLLECTIVES.index("put")
"""Number of the one that is none either: what a rank puts into a window of another one."""

COLLECTIVE = -1
"""Kind of all others, in :func:`kind_of`."""


class Signature(NamedTuple):
    """What ranks must agree on in an operation, as small numbers.

    Attributes:
        collective: Number of the collective.
        dtype: Number of the type of the elements.
        reduction: Number of the reduction, 0 for none, and 16 times that of the plan, if it is not a usual one.
    """

    collective: int
    dtype: int
    reduction: int


def kind_of(signature: Signature) -> int:
    """Return :data:`MESSAGE`, :data:`PUT` or :data:`COLLECTIVE`."""
    return signature.collective if signature.collective in (MESSAGE, PUT) else COLLECTIVE


@functools.lru_cache(512)
def signed(collective: str, dtype: torch.dtype = torch.uint8, reduction: str = "none", plan: str = "") -> Signature:
    """Return the signature of a ``collective`` of elements of a ``dtype``, with a ``reduction``, by a ``plan``.

    Raises:
        PlanError: If the elements are of a type that is not carried.
    """
    if dtype not in _DTYPES:
        raise PlanError(f"{collective} of {dtype} is not supported", where="tensor")
    name = plan.partition("-")[0]
    number = _PLANS.index(name) if name in _PLANS else 0
    return Signature(_COLLECTIVES.index(collective), _DTYPES.index(dtype), _REDUCTIONS.index(reduction) + 16 * number)


def dtype_of(signature: Signature) -> str:
    """Return the type of the elements of a ``signature``, as torch names it."""
    return str(_DTYPES[signature.dtype]).removeprefix("torch.")


def describe(signature: Signature) -> str:
    """Return a signature in words."""
    try:
        words = f"{_COLLECTIVES[signature.collective]} of {dtype_of(signature)}"
        plan, reduction = divmod(signature.reduction, 16)
        said = [_REDUCTIONS[reduction]] * bool(reduction) + [_PLANS[plan]] * bool(plan)
        return words + (f" ({', '.join(said)})" if said else "")
    except IndexError:
        return "an operation that is not known here"
