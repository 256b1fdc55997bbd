"""Attention's core as separate matrix products, so that each can be rounded from outside."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def plain_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Compute causal attention within documents, one document at a time, in place of an attention's core.

    Shapes are ``q [T, H, D]``, ``k`` and ``v [T, G, D]`` where ``G`` divides ``H``, ``offsets [B + 1]``. Products of
    one query head with another's keys are not computed; those with later keys are, and are masked.
    """
    heads, width = q.shape[1:]
    groups = k.shape[1]
    bounds = offsets.tolist()
    pieces = []
    for begin, end in itertools.pairwise(bounds):
        n = end - begin
        if n == 0:
            continue
        queries = q[begin:end].reshape(n, groups, heads // groups, width).permute(1, 2, 0, 3)  # [G, H / G, n, D]
        scores = queries.reshape(groups, -1, width) @ k[begin:end].permute(1, 2, 0) * width**-0.5  # [G, H / G * n, n]
        later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1).repeat(heads // groups, 1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        out = (shares @ v[begin:end].transpose(0, 1)).view(groups, heads // groups, n, width)
        pieces.append(out.permute(2, 0, 1, 3).reshape(n, heads, width))
    return torch.cat(pieces) if pieces else q
