"""Causal attention within documents that lie one after another in one row of tokens.

Queries, keys and values are packed: ``[T, heads, head_dim]`` with ``offsets [B + 1]``, as in :mod:`cordillera.jagged`.
No token sees another document, nothing is padded, and documents may be empty (Grattafiori et al. 2024, section 3.2). Of
``H`` query heads and ``G`` key heads, query head ``h`` reads key head ``h // (H / G)`` (Ainslie et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from cordillera.kernels.repeatable import is_in_order

# The import loads torch's compiler, which takes a second; builds that cannot run the kernel skip it.
varlen: Any = None
if torch.backends.cuda.is_built():
    with suppress(ImportError):
        from torch.nn.attention import varlen

# Older versions need as many heads of keys as of queries.
_VARLEN_GROUPS = varlen is not None and "enable_gqa" in signature(varlen.varlen_attn).parameters
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
# Dtypes, shortest length and divisor of the width for which our kernel on CPUs is faster than torch's.
_OWN_DTYPES = (torch.float32, torch.bfloat16)
_OWN_LENGTH, _OWN_WIDTH = 64, 16


def document_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Compute causal attention within each document, scores scaled by ``1 / sqrt(D)``, with the shape of ``q``.

    On a CPU, torch's fused attention runs over documents, neighbours of equal length in one batch, and our own
    (:mod:`cordillera.kernels.attention.numba_kernels`) where gradients are needed; on a GPU, 16-bit tensors go to flash
    attention over all documents at once. In float32 on a CPU, :func:`~cordillera.kernels.repeatable.in_order` if that
    holds.

    Args:
        q: ``[T, H, D]``.
        k: ``[T, G, D]``, as ``v``; ``G`` divides ``H``.
        offsets: Start of each document, and ``T``; ``int32`` or ``int64 [B + 1]``. On the CPU beside tensors on a GPU,
            it saves each call a wait for the GPU.
    """
    if q.is_cuda and q.dtype in _FLASH_DTYPES and varlen is not None:
        longest = int((offsets[1:] - offsets[:-1]).max()) if offsets.numel() > 1 else 0
        starts = offsets.to(q.device, torch.int32)
        grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        if grouped and not _VARLEN_GROUPS:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            grouped = {}
        out = varlen.varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **grouped)
        assert isinstance(out, Tensor)  # a pair only when asked for
        return out
    parts = []
    for start, documents, length in _runs(offsets.tolist()):
        q_, k_, v_ = (  # [documents, heads, length, D]
            t[start : start + documents * length].unflatten(0, (documents, length)).transpose(1, 2) for t in (q, k, v)
        )
        out = _causal_attention(q_, k_, v_)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts) if parts else torch.zeros_like(q)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention ``[B, H, n, D]`` to ``k`` and ``v [B, G, n, D]``; training on a CPU uses our own kernel."""
    is_trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    is_faster = is_trained and q.dtype in _OWN_DTYPES and q.shape[2] >= _OWN_LENGTH
    if _has_own_kernel(q) and (is_faster or _is_ordered(q)):
        out: Tensor = _CausalAttention.apply(q, k, v)
        return out
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _has_own_kernel(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[3] % _OWN_WIDTH == 0 and not torch.compiler.is_compiling()


def _is_ordered(q: Tensor) -> bool:
    return q.dtype == torch.float32 and is_in_order()


class _CausalAttention(torch.autograd.Function):
    """Our own attention on CPUs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from cordillera.kernels.attention.numba_kernels import causal_attention, causal_attention_in_order

        attend = causal_attention_in_order if _is_ordered(q) else causal_attention
        out, logsumexp = attend(q, k, v)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        from cordillera.kernels.attention.numba_kernels import causal_attention_backward

        q, k, v, out, logsumexp = ctx.saved_tensors
        found = causal_attention_backward(gradient, q, k, v, out, logsumexp)
        return tuple(one.to(like.dtype) for one, like in zip(found, (q, k, v), strict=True))


def _runs(offsets: list[int]) -> Iterator[tuple[int, int, int]]:
    """Start, number and length of neighbouring documents of equal length, without empty ones."""
    start, count, length = 0, 0, 0
    for a, b in pairwise(offsets):
        if b - a == length and count:
            count += 1
        elif b > a:
            if count:
                yield start, count, length
            start, count, length = a, 1, b - a
    if count:
        yield start, count, length


def continued_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Compute attention of the last ``n`` tokens of sequences, ``[B, n, H, D]``, to all ``m``.

    Keys and values are ``[B, G, m, D]`` with ``m >= n``; ``G`` divides ``H``. Query heads that share a key head are
    stacked as rows of one product, so that keys and values are read once.

    Args:
        seen: Which of the last ``n`` tokens each of them sees, ``bool [B, n, n]``; None for itself and earlier ones.
    """
    batch, n, heads, width = q.shape
    groups, m = k.shape[1], k.shape[2]
    if seen is None and _has_own_kernel(q) and _is_ordered(q) and not q.requires_grad:
        from cordillera.kernels.attention.numba_kernels import causal_attention_in_order

        return causal_attention_in_order(q.transpose(1, 2), k, v)[0].transpose(1, 2)
    if n == m and seen is None:
        out = scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=heads != groups)
        return out.transpose(1, 2)
    rows = q.view(batch, n, groups, heads // groups, width).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, G, H/G n, D]
    mask = None
    if seen is not None:
        before = seen.new_ones(batch, n, m - n)
        mask = torch.cat([before, seen], 2).repeat(1, heads // groups, 1)[:, None]  # [B, 1, H/G n, m]
    elif n > 1:  # torch's own causal mask is aligned at the top left when lengths differ
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril_(m - n).repeat(heads // groups, 1)
    out = scaled_dot_product_attention(rows, k, v, attn_mask=mask)
    return out.unflatten(2, (heads // groups, n)).permute(0, 3, 1, 2, 4).flatten(2, 3)
