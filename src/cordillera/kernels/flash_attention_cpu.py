"""Attention pieces by torch's flash kernel for CPUs, which knows less than they need.

Its causal mask is aligned at the top left, so a causal block becomes a rectangle and a square. It ends the process on
empty lists, so it gets none. It gives rows without a key a log-sum-exp of 0, so only masks have such rows and they are
put right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cordillera.kernels.attention_relation import Block, Positions, Relation, as_blocks

_MASK_ROWS = 1024  # of queries whose mask is made at a time


class _Piece(NamedTuple):
    """One call of the kernel: rows of queries and keys, and how they see each other."""

    queries: slice
    keys: slice
    causal: bool  # square
    mask: Tensor | None  # bool, of these queries and keys


def forward(q: Tensor, k: Tensor, v: Tensor, relation: Relation, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps (:func:`cordillera.kernels.partial_attention.partial_attention`).

    Args:
        q: ``[Tq, H, D]``.
        k: ``[Tk, KV, D]``.
        v: ``[Tk, KV, D]``.
        relation: Which keys a query sees.
        scale: Of the scores.

    Returns:
        Both in float32, or float64 if ``q`` is.
    """
    from cordillera.kernels.partial_attention import merge

    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=wide)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide)
    filled = np.zeros(len(q), dtype=np.bool_)
    by_rows: dict[tuple[int, int], list[_Piece]] = {}
    for piece in _pieces(relation, len(q), len(k)):
        by_rows.setdefault((piece.queries.start, piece.queries.stop), []).append(piece)
    for (start, stop), pieces in by_rows.items():
        parts = [_forward(q, k, v, piece, scale) for piece in pieces]
        if filled[start:stop].any():
            parts.append((out[start:stop], lse[start:stop]))
        out[start:stop], lse[start:stop] = parts[0] if len(parts) == 1 else merge(parts)
        filled[start:stop] = True
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, relation: Relation, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, in float32, or float64 if ``q`` is.

    Args:
        dout: ``[Tq, H, D]``, of ``out``.
        q: As in :func:`forward`.
        k: Likewise.
        v: Likewise.
        out: ``[Tq, H, D]``, over all keys that a query sees anywhere.
        lse: ``[Tq, H]`` likewise.
        relation: As in :func:`forward`.
        scale: Likewise.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # the kernel's own for a row without keys, in a mask
    for piece in _pieces(relation, len(q), len(k)):
        rows, keys = piece.queries, piece.keys
        queried = (_by_head(x[rows].to(q.dtype)) for x in (dout, q))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *queried,
            _by_head(k[keys]),
            _by_head(v[keys]),
            _by_head(out[rows].to(q.dtype)),
            lse[rows].t()[None],
            0.0,
            piece.causal,
            attn_mask=_added(piece.mask, q.dtype),
            scale=scale,
        )
        for total, at, grad in zip((dq, dk, dv), (rows, keys, keys), grads, strict=True):
            total[at] += grad[0].transpose(0, 1)
    return dq, dk, dv


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as what is added to scores."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)[None, None]


def _pieces(relation: Relation, queries: int, keys: int) -> list[_Piece]:
    """Calls of the kernel that cover a relation."""
    if not isinstance(relation, Positions):
        return _rectangles(as_blocks(relation, queries, keys))
    if not keys:
        return []
    starts = range(0, queries, _MASK_ROWS)
    everything = slice(0, keys)
    return [
        _Piece(
            slice(start, min(start + _MASK_ROWS, queries)), everything, False, relation.mask(start, start + _MASK_ROWS)
        )
        for start in starts
    ]


def _rectangles(blocks: Sequence[Block]) -> list[_Piece]:
    pieces = []
    for q_start, q_stop, k_start, k_stop, causal in blocks:
        rows = slice(q_start, q_stop)
        square = k_stop - (q_stop - q_start) if causal else k_stop  # from here on a query does not see all
        if k_start < square:
            pieces.append(_Piece(rows, slice(k_start, square), False, None))
        if square < k_stop:
            pieces.append(_Piece(rows, slice(square, k_stop), True, None))
    return pieces


def _forward(q: Tensor, k: Tensor, v: Tensor, piece: _Piece, scale: float) -> tuple[Tensor, Tensor]:
    queries, keys = q[piece.queries], k[piece.keys]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _by_head(queries),
        _by_head(keys),
        _by_head(v[piece.keys]),
        0.0,
        piece.causal,
        attn_mask=_added(piece.mask, q.dtype),
        scale=scale,
    )
    out, lse = out[0].transpose(0, 1), lse[0].t()
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = out.to(wide), lse.to(wide)
    if piece.mask is not None:
        lse = lse.masked_fill(~piece.mask.any(1)[:, None], -torch.inf)
    poisoned = _poisoned(queries, keys, piece)
    if poisoned is not None:
        out, lse = out.masked_fill(poisoned[..., None], torch.nan), lse.masked_fill(poisoned, torch.nan)
    return out, lse


def _poisoned(q: Tensor, k: Tensor, piece: _Piece) -> Tensor | None:
    """``bool [Tq, H]``: who sees a score that is not finite, of which the kernel may make a number; None for nobody."""
    if all(bool(torch.isfinite(torch.stack(x.aminmax())).all()) for x in (q, k)):
        return None
    bad_keys = ~k.isfinite().all(-1).repeat_interleave(q.shape[1] // k.shape[1], 1)  # [Tk, H]
    if piece.causal:
        seen = bad_keys.cummax(0).values
    elif piece.mask is not None:
        seen = (piece.mask.double() @ bad_keys.double()) > 0
    else:
        seen = bad_keys.any(0).expand(q.shape[:2])
    has_keys = True if piece.mask is None else piece.mask.any(1)[:, None]
    return seen | (~q.isfinite().all(-1) & has_keys)
