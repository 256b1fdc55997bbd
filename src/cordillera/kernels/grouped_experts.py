"""Experts over all routed tokens at once, by PyTorch's grouped products: what GPUs compute for a layer of experts.

Tokens are sorted by expert, gathered once, and multiplied in one kernel for all experts. Sums over a token's choices
are made in the order of the choices, so that results do not depend on the order in which a GPU finishes. Nothing is
read back from the device.

Rows that no expert has (choices that are masked out) stand last; grouped products leave them undefined, and sums leave
them out.
"""

from __future__ import annotations

from functools import partial

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
    rows = x.index_select(0, slots // gates.shape[1])
    a, b = of_experts(rows, w1), None if w2 is None else of_experts(rows, w2)
    y = activated(a, b)
    return _combined(of_experts(y, w3), gates, slots, offsets).to(x.dtype), a, b, y


def grouped_backward(
    dout: Tensor, x: Tensor, gates: Tensor, slots: Tensor, offsets: Tensor, w1: Tensor, w3: Tensor, w2: Tensor | None,
    products: tuple[Tensor, Tensor | None] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute the gradients of ``x``, the gates, ``w1``, ``w3`` and ``w2``.

    ``products`` are the two with ``x`` that :func:`grouped_forward` returns, or None to compute them again.
    """
    of_experts = partial(grouped_mm, offs=offsets[1:].int())
    tokens, gate = slots // gates.shape[1], gates.reshape(-1).index_select(0, slots)[:, None]
    rows, incoming = x.index_select(0, tokens), dout.index_select(0, tokens)
    if products is None:
        products = of_experts(rows, w1), None if w2 is None else of_experts(rows, w2)
    y, da, db, sums = differentiated(*products, of_experts(incoming, w3.mT))
    sums = torch.where(_is_routed(slots, offsets), sums, 0.0).to(gates.dtype)
    dgates = torch.empty_like(sums).index_copy_(0, slots.long(), sums)
    rows, incoming = (rows * gate).to(x.dtype), (incoming * gate).to(x.dtype)
    idle = (offsets.diff() == 0)[:, None, None]
    dw1, dw3 = of_experts(rows.T, da).masked_fill_(idle, 0), of_experts(y.T, incoming).masked_fill_(idle, 0)
    dw2, drows = None, of_experts(da, w1.mT)
    if w2 is not None:
        dw2 = of_experts(rows.T, db).masked_fill_(idle, 0)
        drows += of_experts(db, w2.mT)
    return _combined(drows, gates, slots, offsets).to(x.dtype), dgates.view(gates.shape), dw1, dw3, dw2


def _places(slots: Tensor) -> Tensor:
    """Position of each choice, ``int32 [L * k]``."""
    place = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    return torch.empty_like(place).index_copy_(0, slots.long(), place)


def _is_routed(slots: Tensor, offsets: Tensor) -> Tensor:
    """Whether a position belongs to an expert, ``bool [L * k]``."""
    return torch.arange(len(slots), device=slots.device) < offsets[-1]


def _combined(rows: Tensor, gates: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    """Sum the weighted ``rows [L * k, d]`` of each token in the order of its choices, ``[L, d]``, in 32 bits."""
    places = _places(slots).view(gates.shape)
    routed = (places < offsets[-1])[..., None]
    out = torch.zeros(len(gates), rows.shape[1], device=rows.device)
    for choice in range(gates.shape[1]):
        row = rows.index_select(0, places[:, choice]).float() * gates[:, choice, None].float()
        out += torch.where(routed[:, choice], row, 0.0)
    return out
