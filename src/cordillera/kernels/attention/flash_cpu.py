"""Attention pieces by torch's flash kernel for CPUs, with workarounds for its limits.

The kernel's causal mask is aligned at the top left, so a causal block becomes a rectangle and a square. It ends the
process on empty lists, so it gets none. It gives rows without a key, which only masks have, a log-sum-exp of 0, which
is corrected. It computes whole tiles of 512 keys, so in the backward pass small squares are cut into smaller ones along
the diagonal and rectangles below it. Calls of one shape at regular distances become one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count, takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cordillera.kernels.attention.merge import merge
from cordillera.kernels.attention.relation import Positions, Relation, RowBlock, as_blocks

_MASK_ROWS = 1024  # queries whose mask is made at a time
# Backward, squares up to the larger size are halved down to the smaller, in which the kernel's own mask saves nothing.
# Forward, merging the results of halves takes longer than they save.
_SMALLEST, _LARGEST = 128, 4096


class _Piece(NamedTuple):
    """One call of the kernel: a batch of equal rectangles at regular distances."""

    queries: int  # queries of each rectangle
    keys: int
    causal: bool  # square
    batch: int
    q_start: int  # first query of the first rectangle
    k_start: int
    q_step: int  # queries from the start of one rectangle to the next
    k_step: int
    mask: Tensor | None  # bool [queries, keys]

    def of_queries(self, x: Tensor) -> Tensor:
        """View of the queries' rows of a tensor, ``[batch, queries, ...]``."""
        return _rows(x, self.q_start, self.q_step, self.batch, self.queries)

    def of_keys(self, x: Tensor) -> Tensor:
        """View of the keys' rows of a tensor, ``[batch, keys, ...]``."""
        return _rows(x, self.k_start, self.k_step, self.batch, self.keys)


def forward(q: Tensor, k: Tensor, v: Tensor, relation: Relation, scale: float) -> tuple[Tensor, Tensor]:
    """Compute outputs and log-sum-exps, in float32 or float64, as described in ``partial.partial_attention``."""
    q, k, v = _side_by_side(q, k, v)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=wide)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide)
    filled = np.zeros(len(q), dtype=np.bool_)
    finite = all(not x.numel() or bool(torch.isfinite(torch.stack(x.aminmax())).all()) for x in (q, k))
    for piece in _pieces(relation, len(q), len(k), halve=False):
        found = _forward(q, k, v, piece, scale, finite)
        rows = [piece.of_queries(x) for x in (out, lse)]
        span = slice(piece.q_start, piece.q_start + piece.q_step * (piece.batch - 1) + piece.queries)
        if filled[span].any():
            out_here, lse_here = (x.flatten(0, 1) for x in rows)
            found = merge([(out_here, lse_here), (found[0].flatten(0, 1), found[1].flatten(0, 1))])
        filled[span] = True
        for row, new in zip(rows, found, strict=True):
            row.copy_(new.view(row.shape))
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, relation: Relation, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients in float32 or float64, as described in ``partial.attention_backward``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
    dout, out, q, k, v = _side_by_side(dout.to(q.dtype), out.to(q.dtype), q, k, v)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # value that the kernel returns for a fully masked row
    for piece in _pieces(relation, len(q), len(k), halve=True):
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            piece.of_queries(dout).transpose(1, 2),
            piece.of_queries(q).transpose(1, 2),
            piece.of_keys(k).transpose(1, 2),
            piece.of_keys(v).transpose(1, 2),
            piece.of_queries(out).transpose(1, 2),
            piece.of_queries(lse).transpose(1, 2),
            0.0,
            piece.causal,
            attn_mask=_added(piece.mask, q.dtype),
            scale=scale,
        )
        totals = piece.of_queries(dq), piece.of_keys(dk), piece.of_keys(dv)
        for total, grad in zip(totals, grads, strict=True):
            total += grad.transpose(1, 2)
    return dq, dk, dv


def _side_by_side(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Make entries of a head adjacent: the kernel assumes it without a check."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _rows(x: Tensor, start: int, step: int, batch: int, length: int) -> Tensor:
    stride = x.stride(0)
    offset = x.storage_offset() + start * stride
    return x.as_strided((batch, length, *x.shape[1:]), (step * stride, *x.stride()), offset)


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Mask as values to add to scores."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)[None, None]


def _pieces(relation: Relation, queries: int, keys: int, halve: bool) -> Sequence[_Piece]:
    """Calls of the kernel that cover a relation."""
    if not isinstance(relation, Positions):
        return _batches(tuple(as_blocks(relation, queries, keys)), halve)
    if not keys:
        return []
    starts = range(0, queries, _MASK_ROWS)
    masks = [relation.mask(start, start + _MASK_ROWS) for start in starts]
    return [_Piece(len(mask), keys, False, 1, start, 0, 0, 0, mask) for start, mask in zip(starts, masks, strict=True)]


@lru_cache(maxsize=64)  # every layer needs the same
def _batches(blocks: tuple[RowBlock, ...], halve: bool) -> list[_Piece]:
    """Group rectangles and squares of one shape into few calls; no row occurs twice in a call."""
    places: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    for block in blocks:
        for q_start, q_stop, k_start, k_stop, causal in _parts(block, halve):
            places.setdefault((q_stop - q_start, k_stop - k_start, causal), []).append((q_start, k_start))
    pieces = []
    for (queries, keys, causal), starts in places.items():
        starts.sort()
        while starts:
            (q_start, k_start), steps, batch = starts[0], (0, 0), 1
            if len(starts) > 1 and starts[1][0] - q_start >= queries and starts[1][1] - k_start >= keys:
                steps = (starts[1][0] - q_start, starts[1][1] - k_start)
                regular = zip(starts, count(q_start, steps[0]), count(k_start, steps[1]), strict=False)
                batch = sum(1 for _ in takewhile(lambda at: at[0] == at[1:], regular))
            pieces.append(_Piece(queries, keys, causal, batch, q_start, k_start, *steps, None))
            del starts[:batch]
    return pieces


def _parts(block: RowBlock, halve: bool) -> Iterator[RowBlock]:
    """Squares on the diagonal and rectangles beside them."""
    q_start, q_stop, k_start, k_stop, causal = block
    square = k_stop - (q_stop - q_start) if causal else k_stop  # first key that not every query sees
    if k_start < square:
        yield RowBlock(q_start, q_stop, k_start, square, False)
    size = k_stop - square
    if not halve or size > _LARGEST:
        if size:
            yield RowBlock(q_start, q_stop, square, k_stop, True)
        return
    for first in range(0, size, _SMALLEST):
        last = min(first + _SMALLEST, size)
        yield RowBlock(q_start + first, q_start + last, square + first, square + last, True)
    width = _SMALLEST
    while width < size:
        for first in range(0, size - width, 2 * width):
            middle, last = first + width, min(first + 2 * width, size)
            yield RowBlock(q_start + middle, q_start + last, square + first, square + middle, False)
        width *= 2


def _forward(q: Tensor, k: Tensor, v: Tensor, piece: _Piece, scale: float, finite: bool) -> tuple[Tensor, Tensor]:
    """Outputs ``[batch, queries, H, D]`` and log-sum-exps ``[batch, queries, H]``."""
    queries, keys = piece.of_queries(q), piece.of_keys(k)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        piece.of_keys(v).transpose(1, 2),
        0.0,
        piece.causal,
        attn_mask=_added(piece.mask, q.dtype),
        scale=scale,
    )
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = out.transpose(1, 2).to(wide), lse.transpose(1, 2).to(wide)
    if piece.mask is not None:
        lse = lse.masked_fill(~piece.mask.any(1)[:, None], -torch.inf)
    if not finite:
        poisoned = _poisoned(queries, keys, piece)
        out, lse = out.masked_fill(poisoned[..., None], torch.nan), lse.masked_fill(poisoned, torch.nan)
    return out, lse


def _poisoned(queries: Tensor, keys: Tensor, piece: _Piece) -> Tensor:
    """Rows that see a score that is not finite, ``bool [batch, queries, H]``; the kernel may give them numbers."""
    bad_queries, bad_keys = (~x.isfinite().all(-1) for x in (queries, keys))
    bad_keys = bad_keys.repeat_interleave(queries.shape[2] // keys.shape[2], 2)  # [batch, keys, H]
    if piece.causal:
        return bad_queries | (bad_keys.cummax(1).values)
    if piece.mask is not None:
        seen = (piece.mask.double() @ bad_keys.double()) > 0
        return seen | (bad_queries & piece.mask.any(1)[:, None])
    return bad_queries | bad_keys.any(1, keepdim=True)
