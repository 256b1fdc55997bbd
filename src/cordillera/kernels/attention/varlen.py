"""Attention pieces by the FlashAttention kernels of CUDA builds of torch: many blocks in one call.

These are the kernels under :mod:`torch.nn.attention.varlen`, called such that the log-sum-exp of all pieces can be
given to the backward pass of one. No row of queries or keys occurs twice in a call, so that results are combined in one
order, without atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cordillera.errors import PlanError
from cordillera.kernels.attention.merge import merge
from cordillera.kernels.attention.relation import Positions, Relation, RowBlock, as_blocks


class _Layer(NamedTuple):
    """Blocks of one kind that share no row."""

    causal: bool
    rows: NDArray[np.bool_]  # queries that are taken
    keys: NDArray[np.bool_]  # keys that are taken
    blocks: list[RowBlock]

    def has_room(self, block: RowBlock) -> bool:
        taken = self.rows[block.q_start : block.q_stop].any() or self.keys[block.k_start : block.k_stop].any()
        return self.causal == block.causal and not taken

    def add(self, block: RowBlock) -> None:
        self.rows[block.q_start : block.q_stop] = self.keys[block.k_start : block.k_stop] = True
        self.blocks.append(block)


class _Call(NamedTuple):
    """Blocks of one kind, with their rows one block after another."""

    rows: Tensor  # int64, rows of queries
    keys: Tensor  # int64, rows of keys
    q_offsets: Tensor  # int32
    k_offsets: Tensor  # int32
    longest: tuple[int, int]  # most queries and keys of a block
    causal: bool


def forward(q: Tensor, k: Tensor, v: Tensor, relation: Relation, scale: float) -> tuple[Tensor, Tensor]:
    """Compute outputs and log-sum-exps, in float32, as described in ``partial.partial_attention``."""
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=out.dtype, device=q.device)
    for call in _calls(relation, len(q), len(k), q.device):
        part, part_lse = _kernel(q[call.rows], k[call.keys], v[call.keys], call, scale)
        part_lse = part_lse.t()
        broken = ~part_lse.isfinite()  # every query has a key, so the scores were not finite
        piece = part.masked_fill(broken[..., None], torch.nan), part_lse.masked_fill(broken, torch.nan)
        out[call.rows], lse[call.rows] = merge([(out[call.rows], lse[call.rows]), piece])
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, relation: Relation, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients in float32, as described in ``partial.attention_backward``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    for call in _calls(relation, len(q), len(k), q.device):
        grads = _kernel_backward(
            dout[call.rows].to(q.dtype), q[call.rows], k[call.keys], v[call.keys], out[call.rows].to(q.dtype),
            lse[call.rows].t().contiguous(), call, scale,
        )  # fmt: skip
        for total, at, grad in zip((dq, dk, dv), (call.rows, call.keys, call.keys), grads, strict=True):
            total[at] += grad
    return dq, dk, dv


def _kernel(q: Tensor, k: Tensor, v: Tensor, call: _Call, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs ``[Tq, H, D]`` and log-sum-exps ``[H, Tq]``; blocks are aligned at the bottom right."""
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, call.q_offsets, call.k_offsets, *call.longest, 0.0, call.causal, False, scale=scale
    )
    return found[0], found[1]


def _kernel_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: _Call, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, given log-sum-exps ``[H, Tq]``."""
    # state of dropout's random numbers, which are not used
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, call.q_offsets, call.k_offsets, *call.longest, 0.0, call.causal, state, unused,
        scale=scale,
    )  # fmt: skip
    return grads


def _calls(relation: Relation, queries: int, keys: int, device: torch.device) -> Iterator[_Call]:
    """Calls that cover a relation."""
    if isinstance(relation, Positions):
        raise PlanError("varlen runs blocks, not positions", where="relation", remedy='backend="auto"')
    layers: list[_Layer] = []
    for block in as_blocks(relation, queries, keys):
        layer = next((layer for layer in layers if layer.has_room(block)), None)
        if layer is None:
            layer = _Layer(block.causal, np.zeros(queries, np.bool_), np.zeros(keys, np.bool_), [])
            layers.append(layer)
        layer.add(block)
    for causal, _, _, members in layers:
        sizes = [(block.q_stop - block.q_start, block.k_stop - block.k_start) for block in members]
        rows = np.concatenate([np.arange(block.q_start, block.q_stop) for block in members])
        columns = np.concatenate([np.arange(block.k_start, block.k_stop) for block in members])
        q_sizes, k_sizes = zip(*sizes, strict=True)
        yield _Call(
            torch.from_numpy(rows).to(device),
            torch.from_numpy(columns).to(device),
            torch.tensor([0, *accumulate(q_sizes)], dtype=torch.int32, device=device),
            torch.tensor([0, *accumulate(k_sizes)], dtype=torch.int32, device=device),
            (max(q_sizes), max(k_sizes)),
            causal,
        )
