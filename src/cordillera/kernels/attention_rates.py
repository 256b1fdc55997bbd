"""Measurement of causal attention by the lengths of queries and keys, for choosing how documents are cut."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from cordillera.kernels.attention.partial import attention_backward, partial_attention
from cordillera.kernels.attention.relation import RowBlock


def measure(
    queries: Sequence[int],
    keys: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    rounds: int = 5,
) -> list[list[float]]:
    """Measure the median time of forward and backward for each pair of lengths, after one round to warm up.

    Args:
        queries: Numbers of queries, which are the last tokens of each length in ``keys``.
        keys: Numbers of keys; where there are fewer keys than queries, as many queries are used.
        heads: Number of heads of queries.
        kv_heads: Number of heads of keys and values.
        head_dim: Width of a head.
        device: ``cpu`` or ``cuda``.
        dtype: Dtype of all tensors.
        rounds: Number of rounds of each pair.

    Returns:
        Seconds ``[queries][keys]``.
    """
    table = []
    for q_length in queries:
        row = []
        for k_length in keys:
            size = min(q_length, k_length)
            q, dout = (torch.randn(size, heads, head_dim, device=device).to(dtype) for _ in range(2))
            k, v = (torch.randn(k_length, kv_heads, head_dim, device=device).to(dtype) for _ in range(2))
            relation = [RowBlock(0, size, 0, k_length, causal=True)]
            seconds = []
            for _ in range(1 + rounds):
                _synchronize(device)
                began = time.perf_counter()
                out, lse = partial_attention(q, k, v, relation)
                attention_backward(dout, q, k, v, out, lse, relation)
                _synchronize(device)
                seconds.append(time.perf_counter() - began)
            row.append(statistics.median(seconds[1:]))
        table.append(row)
    return table


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
