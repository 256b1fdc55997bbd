"""Experts over all routed tokens at once, by PyTorch's grouped products: a layer of experts on GPUs.

Tokens are sorted by expert, gathered once, and multiplied in one kernel for all experts. Sums over a token's choices
are made in the order of the choices, so that results do not depend on the order in which a GPU finishes. Nothing is
read back from the device.

Rows that no expert has (choices that are masked out) stand last; grouped products leave them undefined, and sums leave
them out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from cordillera.errors import DataError
from cordillera.kernels.numba_experts import activated, differentiated

_ALIGNED = 16  # bytes, of the rows that grouped products take
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_grouped(x: Tensor, w1: Tensor) -> None:
    """Check that grouped products take tokens ``x [L, d]`` and weights ``w1 [E, d, h]``.

    Raises:
        DataError: If they do not; the message names the argument.
    """
    if x.dtype not in _DTYPES:
        raise DataError(f"is {x.dtype}, experts on a GPU need 32 or 16 bits", where="x")
    step = _ALIGNED // x.element_size()
    for name, width in (("x", w1.shape[1]), ("w1", w1.shape[2])):
        if width % step:
            raise DataError(f"has a width of {width}, experts on a GPU need a multiple of {step}", where=name)


def sorted_index(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bring choices ``[L, k]`` into the order of their experts, stably; those that are masked out (-1) come last.

    Returns:
        Choice at each position, ``int32 [L * k]``; position of each choice, ``int32 [L, k]``, -1 if it is masked out;
        first position of each expert and of the masked ones, ``int64 [E + 1]``.
    """
    flat = experts.reshape(-1).long()
    ordered, slots = torch.where(flat < 0, num_experts, flat).sort(stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=flat.device))
    slots = slots.int()
    return slots, torch.where(experts < 0, -1, _places(slots).view(experts.shape)), offsets


def grouped_forward(
    x: Tensor, gates: Tensor, slots: Tensor, offsets: Tensor, w1: Tensor, w3: Tensor, w2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Compute the output ``[L, d]``, both products with ``x`` and the input of ``w3``, ``[L * k, h]``.

    Arguments are those of :func:`~cordillera.kernels.moe.expert_mlp`, with what :func:`sorted_index` returns.
    """
    of_experts = partial(grouped_mm, offs=offsets[1:].int())
    a, b = _products(x, gates, slots, w1, w2, of_experts)
    y = _fused().activated(a, b) if _has_fused(x) else activated(a, b)
    return _combined(of_experts(y, w3), gates, slots, offsets).to(x.dtype), a, b, y


def grouped_backward(
    dout: Tensor, x: Tensor, gates: Tensor, slots: Tensor, offsets: Tensor, w1: Tensor, w3: Tensor, w2: Tensor | None,
    products: tuple[Tensor, Tensor | None] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute the gradients of ``x``, the gates, ``w1``, ``w3`` and ``w2``.

    ``products`` are the two with ``x`` that :func:`grouped_forward` returns, or None to compute them again.
    """
    of_experts = partial(grouped_mm, offs=offsets[1:].int())
    tokens, idle = slots // gates.shape[1], (offsets.diff() == 0)[:, None, None]
    if products is None:
        products = _products(x, gates, slots, w1, w2, of_experts)
    incoming = dout.index_select(0, tokens)
    y, da, db, sums = _differentiated(*products, of_experts(incoming, w3.mT), gates, slots, offsets)
    del products
    dgates = torch.empty_like(sums).index_copy_(0, slots.long(), sums).to(gates.dtype)
    dw3 = of_experts(y.T, incoming).masked_fill_(idle, 0)
    del y, incoming  # free large tensors before the next are allocated
    rows, dw2 = x.index_select(0, tokens), None
    dw1 = of_experts(rows.T, da).masked_fill_(idle, 0)
    if w2 is not None:
        dw2 = of_experts(rows.T, db).masked_fill_(idle, 0)
    del rows
    drows = of_experts(da, w1.mT)
    if w2 is not None:
        drows += of_experts(db, w2.mT)
    return _combined(drows, None, slots, offsets, gates.shape[1]).to(x.dtype), dgates.view(gates.shape), dw1, dw3, dw2


def _has_fused(x: Tensor) -> bool:
    """Whether what lies between products runs in one pass, in Triton."""
    return x.is_cuda and find_spec("triton") is not None


def _fused() -> ModuleType:
    return import_module("cordillera.kernels.triton_experts")


def _products(
    x: Tensor, gates: Tensor, slots: Tensor, w1: Tensor, w2: Tensor | None, of_experts: Callable[..., Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Products of the routed tokens with ``w1`` and ``w2``."""
    rows = x.index_select(0, slots // gates.shape[1])
    return of_experts(rows, w1), None if w2 is None else of_experts(rows, w2)


def _differentiated(
    a: Tensor, b: Tensor | None, u: Tensor, gates: Tensor, slots: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input of ``w3`` and gradients of ``a`` and ``b``, times the weights of the choices; and gradients of these."""
    if _has_fused(a):
        found: tuple[Tensor, Tensor, Tensor, Tensor] = _fused().differentiated(a, b, u, gates, slots, offsets[-1])
        return found
    gate = gates.reshape(-1).index_select(0, slots)
    y, da, db, sums = differentiated(a, b, u, gate)
    return (y * gate[:, None]).to(a.dtype), da, db, torch.where(_is_routed(slots, offsets), sums, 0.0)


def _places(slots: Tensor) -> Tensor:
    """Position of each choice, ``int32 [L * k]``."""
    place = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    return torch.empty_like(place).index_copy_(0, slots.long(), place)


def _is_routed(slots: Tensor, offsets: Tensor) -> Tensor:
    """Whether a position belongs to an expert, ``bool [L * k]``."""
    return torch.arange(len(slots), device=slots.device) < offsets[-1]


def _combined(rows: Tensor, gates: Tensor | None, slots: Tensor, offsets: Tensor, choices: int | None = None) -> Tensor:
    """Sum the ``rows [L * k, d]`` of each token in the order of its ``choices``, ``[L, d]``, in 32 bits.

    They are weighted by ``gates [L, k]``, or not at all without.
    """
    places = _places(slots).view(-1, gates.shape[1] if gates is not None else choices or 1)
    if _has_fused(rows):
        summed: Tensor = _fused().combined(rows, gates, places, offsets[-1])
        return summed
    routed = (places < offsets[-1])[..., None]
    out = torch.zeros(len(places), rows.shape[1], device=rows.device)
    for choice in range(places.shape[1]):
        row = rows.index_select(0, places[:, choice]).float()
        row = row if gates is None else row * gates[:, choice, None].float()
        out += torch.where(routed[:, choice], row, 0.0)
    return out
