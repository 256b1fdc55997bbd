"""Exact sparse update on GPUs, in Triton: torch sorts the ids, then one program reduces and updates one distinct row.

No atomics: one program sums a row's gradients in float64, some neighbouring positions at a time, so results repeat bit
for bit. One position at a time, the most frequent row of a batch would be waited for.
Numbers such as ``beta2`` are passed in a float64 tensor, because Triton would round a Python float to float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from cordillera.kernels.triton_support import is_interpreted

if TYPE_CHECKING:
    from cordillera.kernels.embeddings.update import Update

_RULES = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3}
_PIECES = 16  # positions that are loaded at once


def unavailable() -> str | None:
    """Return why Triton cannot be used here, or None if it can."""
    return None if torch.cuda.is_available() or is_interpreted() else "triton needs a GPU, and torch sees none"


def unsupported(optimizer: str, dtype: torch.dtype, device: str) -> str | None:
    """Return why a table cannot be updated by this back end, or None if it can."""
    if dtype != torch.float32:
        return f"the triton back end updates float32 tables, these are {dtype}"
    if device == "cuda" or is_interpreted():
        return None
    return f"the triton back end runs on GPUs, the tables are on {device!r}"


@triton.jit
def _update(
    distinct: tl.tensor, starts: tl.tensor, order: tl.tensor, sources: tl.tensor, grad: tl.tensor,
    value_weights: tl.tensor, weight: tl.tensor, first_state: tl.tensor, second_state: tl.tensor, numbers: tl.tensor,
    DIM: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr, WEIGHTED: tl.constexpr, DECAYS: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:  # fmt: skip
    segment = tl.program_id(0)
    row = tl.load(distinct + segment)
    first, last = tl.load(starts + segment), tl.load(starts + segment + 1)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    reduced = tl.zeros([BLOCK], dtype=tl.float64)
    for i in range(first, last, PIECES):
        at = i + tl.arange(0, PIECES)
        position = tl.load(order + at, mask=at < last, other=0)
        source = tl.load(sources + position, mask=at < last, other=0)
        both = (at < last)[:, None] & inside[None, :]
        pieces = tl.load(grad + source[:, None] + columns[None, :], mask=both, other=0.0).to(tl.float32).to(tl.float64)
        if WEIGHTED:
            pieces *= tl.load(value_weights + position, mask=at < last, other=0.0).to(tl.float64)[:, None]
        reduced += tl.sum(pieces, 0)
    learning_rate, eps = tl.load(numbers), tl.load(numbers + 1)
    target = weight + row * DIM + columns
    old = tl.load(target, mask=inside, other=0.0).to(tl.float64)
    if DECAYS:
        reduced += tl.load(numbers + 8) * old
    if RULE == 0:
        change = reduced
    elif RULE == 1:
        at = first_state + row * DIM + columns
        squares = tl.load(at, mask=inside, other=0.0).to(tl.float64) + reduced * reduced
        tl.store(at, squares.to(weight.dtype.element_ty), mask=inside)
        change = reduced / (tl.sqrt(squares) + eps)
    elif RULE == 2:
        square = tl.load(first_state + row).to(tl.float64) + tl.sum(reduced * reduced, 0) / DIM
        tl.store(first_state + row, square.to(weight.dtype.element_ty))
        change = reduced / (tl.sqrt(square) + eps)
    else:
        decay1, rest1, decay2, rest2 = (
            tl.load(numbers + 2),
            tl.load(numbers + 3),
            tl.load(numbers + 4),
            tl.load(numbers + 5),
        )
        at1, at2 = first_state + row * DIM + columns, second_state + row * DIM + columns
        mean = decay1 * tl.load(at1, mask=inside, other=0.0).to(tl.float64) + rest1 * reduced
        square = decay2 * tl.load(at2, mask=inside, other=0.0).to(tl.float64) + rest2 * reduced * reduced
        tl.store(at1, mean.to(weight.dtype.element_ty), mask=inside)
        tl.store(at2, square.to(weight.dtype.element_ty), mask=inside)
        change = (mean / tl.load(numbers + 6)) / (tl.sqrt(square) / tl.load(numbers + 7) + eps)
    tl.store(target, (old - learning_rate * change).to(weight.dtype.element_ty), mask=inside)


def update(call: Update) -> None:
    """Run one update, already checked (:func:`cordillera.kernels.embeddings.update.sparse_update`)."""
    optimizer, weight, rows, offsets = call.optimizer, call.weight, call.rows, call.offsets
    grad, value_weights = call.grad, call.value_weights
    batch, _, dim = grad.shape
    if dim > 1 and grad.stride(2) != 1:
        grad = grad.contiguous()
    ordered, order = torch.sort(rows, stable=True)
    distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(counts, 0, out=starts[1:])
    bags = torch.arange(rows.numel(), device=rows.device)
    if offsets is not None:
        lengths = offsets.diff().to(torch.int64)
        bags = torch.arange(lengths.numel(), device=rows.device)
        bags = torch.repeat_interleave(bags, lengths, output_size=rows.numel())
    sources = bags % batch * grad.stride(0) + bags // batch * grad.stride(1)
    correction1, correction2 = call.corrections
    numbers = torch.tensor(
        [
            call.learning_rate,
            optimizer.eps,
            optimizer.beta1,
            1 - optimizer.beta1,
            optimizer.beta2,
            1 - optimizer.beta2,
            correction1,
            math.sqrt(correction2),
            optimizer.weight_decay,
        ],
        dtype=torch.float64,
        device=rows.device,
    )
    stored = [*call.state.values(), weight, weight]
    _update[(distinct.numel(),)](
        distinct, starts, order, sources, grad,
        sources if value_weights is None else value_weights.detach().contiguous(), weight, stored[0], stored[1],
        numbers, DIM=dim, BLOCK=triton.next_power_of_2(dim), RULE=_RULES[optimizer.name],
        WEIGHTED=value_weights is not None, DECAYS=optimizer.weight_decay != 0,
        PIECES=_PIECES, num_warps=1,
    )  # fmt: skip
