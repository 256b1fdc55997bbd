"""What experts compute between their products on GPUs, each in one pass over memory, in Triton.

No atomics: results repeat bit for bit. Nothing waits for the GPU. Sums are made in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # numbers that a program handles at once


@triton.jit
def _activate(
    a: tl.tensor, b: tl.tensor, y: tl.tensor, count: tl.tensor, GATED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + at, mask=at < count, other=0.0).to(tl.float32)
    found = x * tl.sigmoid(x)
    if GATED:
        found *= tl.load(b + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y + at, found.to(y.dtype.element_ty), mask=at < count)


@triton.jit
def _differentiate(
    a: tl.tensor, b: tl.tensor, u: tl.tensor, gates: tl.tensor, slots: tl.tensor, end: tl.tensor, y: tl.tensor,
    da: tl.tensor, sums: tl.tensor, H: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(gates + tl.load(slots + row)).to(tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, H, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        at = row * H + columns
        x = tl.load(a + at, mask=columns < H, other=0.0).to(tl.float32)
        given = tl.load(u + at, mask=columns < H, other=0.0).to(tl.float32)
        other = tl.zeros([BLOCK], tl.float32) + 1
        if GATED:
            other = tl.load(b + at, mask=columns < H, other=0.0).to(tl.float32)
        s = tl.sigmoid(x)
        silu = x * s
        products += given * silu * other
        given *= gate
        tl.store(y + at, (gate * silu * other).to(y.dtype.element_ty), mask=columns < H)
        tl.store(da + at, (given * other * (s + silu * (1 - s))).to(y.dtype.element_ty), mask=columns < H)
        if GATED:
            tl.store(u + at, (given * silu).to(y.dtype.element_ty), mask=columns < H)
    total = tl.sum(products, 0)
    tl.store(sums + row, tl.where(row < tl.load(end), total, 0.0))


@triton.jit
def _combine(
    rows: tl.tensor, gates: tl.tensor, places: tl.tensor, end: tl.tensor, out: tl.tensor, D: tl.constexpr,
    CHOICES: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(end)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places + token * CHOICES + choice).to(tl.int64)
        row = tl.load(rows + place * D + columns, mask=(columns < D) & (place < last), other=0.0).to(tl.float32)
        if GATED:
            row *= tl.load(gates + token * CHOICES + choice).to(tl.float32)
        total += tl.where(place < last, row, 0.0)
    tl.store(out + token * D + columns, total.to(out.dtype.element_ty), mask=columns < D)


def _block(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))


def activated(a: Tensor, b: Tensor | None) -> Tensor:
    """Compute ``silu(a) b``, or ``silu(a)`` without ``b``, of rows ``[n, h]``."""
    y = torch.empty_like(a)
    if a.numel():
        grid = (triton.cdiv(a.numel(), _BLOCK),)
        _activate[grid](a, a if b is None else b, y, a.numel(), GATED=b is not None, BLOCK=_BLOCK)
    return y


def differentiated(
    a: Tensor, b: Tensor | None, u: Tensor, gates: Tensor, slots: Tensor, end: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Recompute the input of ``w3`` and compute gradients from its gradient, ``u [n, h]``, which is overwritten.

    Args:
        a: Product of tokens with ``w1``, ``[n, h]``, and ``b`` that with ``w2`` or None.
        gates: Weight of each choice, ``[L, k]``.
        slots: Choice at each of the ``n`` positions.
        end: Number of positions that belong to an expert, ``int64 []``.

    Returns:
        The input of ``w3`` and the gradients of ``a`` and ``b`` (meaningless without one), times the weights of the
        choices; and the gradients of these, ``float32 [n]``, 0 where no expert is.
    """
    y, da = torch.empty_like(a), torch.empty_like(a)
    sums = torch.empty(len(a), dtype=torch.float32, device=a.device)
    if a.numel():
        width = a.shape[1]
        _differentiate[(len(a),)](
            a, a if b is None else b, u, gates.reshape(-1), slots, end, y, da, sums, H=width, GATED=b is not None,
            BLOCK=_block(width),
        )  # fmt: skip
    return y, da, u, sums


def combined(rows: Tensor, gates: Tensor | None, places: Tensor, end: Tensor) -> Tensor:
    """Sum the rows of each token in the order of its choices, ``[L, d]`` in the dtype of ``rows [n, d]``.

    Args:
        gates: Weight of each choice, ``[L, k]``; None for 1.
        places: Position of each choice, ``int32 [L, k]``.
        end: Number of positions that belong to an expert, ``int64 []``; others are left out.
    """
    out = rows.new_empty(len(places), rows.shape[1])
    if out.numel():
        block = _block(rows.shape[1])
        grid = (len(places), triton.cdiv(rows.shape[1], block))
        _combine[grid](
            rows, places if gates is None else gates.contiguous(), places.contiguous(), end, out, D=rows.shape[1],
            CHOICES=places.shape[1], GATED=gates is not None, BLOCK=block,
        )  # fmt: skip
    return out
