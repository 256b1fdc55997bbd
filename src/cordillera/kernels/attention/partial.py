"""Attention to some of the keys, such that the results for others can be merged in later.

A piece is an output with the log-sum-exp of its scores. Context parallelism, split caches and trees compute pieces
where the keys are and combine them with one :func:`merge`; in the backward pass, each piece needs only the merged
output and log-sum-exp.

Source: the log-sum-exp and its backward as in Dao 2023 (arXiv 2307.08691), sections 3.1 and 3.2; merging as in Yang et
al. 2024 (arXiv 2411.01783), equation 4.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cordillera.errors import DependencyError, PlanError
from cordillera.kernels.attention import flash_cpu as flash_attention_cpu
from cordillera.kernels.attention import math as math_attention
from cordillera.kernels.attention import varlen as varlen_attention
from cordillera.kernels.attention.relation import Positions, Relation

AttentionBackend = Literal["auto", "math", "flash", "varlen"]

_BACKENDS = {"math": math_attention, "flash": flash_attention_cpu, "varlen": varlen_attention}
_PADDING = 8  # kernels need head dimensions that are multiples of it


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    relation: Relation,
    *,
    scale: float | None = None,
    backend: AttentionBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention to some of the keys, with the log-sum-exp for merging other keys in. Differentiable.

    Args:
        q: Queries, ``[Tq, H, D]``, floating point.
        k: Keys, ``[Tk, KV, D]``, where ``KV`` divides ``H``: query head ``h`` uses key head ``h // (H // KV)``.
        v: Values, ``[Tk, KV, D]``.
        relation: Keys that each query sees: ``"full"``, ``"causal"`` (aligned at the bottom right), ``"empty"``, blocks
            of rows, or positions. Blocks may share queries or keys, but no pair of both.
        scale: Factor of the scores; None for ``1 / sqrt(D)``.
        backend: ``"math"`` anywhere, dense and in float64; ``"flash"`` on CPUs; ``"varlen"`` on CUDA, for blocks in
            half precision; ``"auto"`` for the fastest of these.

    Returns:
        The output ``[Tq, H, D]`` in the dtype of ``q``, and the natural log-sum-exp of the scores ``[Tq, H]`` in
        float32, or float64 if ``q`` is. A query without keys gets an output of 0 and a log-sum-exp of -inf. Queries and
        keys that are not finite give NaN in all rows that see them.

    Raises:
        PlanError: Shapes, dtypes and relation do not fit together.
        DependencyError: The back end cannot run the call on this device.
    """
    _check(q, k, v, relation)
    chosen = choose_backend(q, relation, backend)
    out, lse = _Attention.apply(q, k, v, relation, _scale(q, scale), chosen)
    return out, lse


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    relation: Relation,
    *,
    dlse: Tensor | None = None,
    scale: float | None = None,
    backend: AttentionBackend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of one piece, given the output and log-sum-exp over all pieces.

    The contributions of a query's pieces to ``dq`` add up to its gradient.

    Args:
        dout: Gradient of the merged output, ``[Tq, H, D]``.
        q: Queries, ``[Tq, H, D]``, as in :func:`partial_attention`.
        k: Keys of this piece, ``[Tk, KV, D]``.
        v: Values of this piece, ``[Tk, KV, D]``.
        out: Merged output, ``[Tq, H, D]``.
        lse: Merged log-sum-exp, ``[Tq, H]``.
        relation: Keys of this piece that each query sees.
        dlse: Gradient of the merged log-sum-exp, ``[Tq, H]``; None for zeros.
        scale: Factor of the scores; None for ``1 / sqrt(D)``.
        backend: Back end, as in :func:`partial_attention`.

    Returns:
        ``dq``, ``dk`` and ``dv`` in float32, or float64 if ``q`` is, to be added up in that precision.

    Raises:
        PlanError: Shapes, dtypes and relation do not fit together.
        DependencyError: The back end cannot run the call on this device.
    """
    _check(q, k, v, relation)
    chosen, scale = choose_backend(q, relation, backend), _scale(q, scale)
    if dlse is None:
        return _BACKENDS[chosen].backward(dout, q, k, v, out, lse, relation, scale)
    # A kernel subtracts sum(dout * out) from the gradients of the probabilities. One more column adds -dlse to that sum
    # and, as queries, keys and values have zeros there, nothing to any product.
    dim = q.shape[-1]
    q, k, v, out = (torch.nn.functional.pad(x, (0, _PADDING)) for x in (q, k, v, out))
    dout = torch.nn.functional.pad(dout.to(lse.dtype), (0, _PADDING))
    out[..., dim] = 1
    dout[..., dim] = -dlse.masked_fill(lse == -torch.inf, 0.0)
    grads = _BACKENDS[chosen].backward(dout, q, k, v, out, lse, relation, scale)
    return grads[0][..., :dim], grads[1][..., :dim], grads[2][..., :dim]


def choose_backend(q: Tensor, relation: Relation, backend: AttentionBackend = "auto") -> AttentionBackend:
    """Return the back end that runs a call.

    Args:
        q: Queries of the call.
        relation: Relation of the call.
        backend: Requested back end.

    Raises:
        DependencyError: The requested back end is unknown or cannot run the call.
    """
    kind = q.device.type
    fits_varlen = kind == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and not isinstance(relation, Positions)
    if backend == "auto":
        return "flash" if kind == "cpu" else "varlen" if fits_varlen else "math"
    if backend not in _BACKENDS:
        raise DependencyError(f"no back end {backend!r}", where="backend", remedy=f"auto, {', '.join(_BACKENDS)}")
    if backend == "flash" and kind != "cpu":
        raise DependencyError(f"flash runs on CPUs, the queries are on {kind}", where="backend", remedy="auto")
    if backend == "varlen" and not fits_varlen:
        raise DependencyError(
            f"varlen runs blocks of bfloat16 or float16 on CUDA, these are {q.dtype} on {kind}",
            where="backend",
            remedy="auto",
        )
    return backend


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, relation: Relation, scale: float, backend: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        out, lse = _BACKENDS[backend].forward(q, k, v, relation, scale)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.relation, ctx.scale, ctx.backend = relation, scale, backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 6
        dout = torch.zeros_like(out) if dout is None else dout
        grads = attention_backward(
            dout, q, k, v, out, lse, ctx.relation, dlse=dlse, scale=ctx.scale, backend=ctx.backend
        )
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)), None, None, None


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _check(q: Tensor, k: Tensor, v: Tensor, relation: Relation) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or k.shape[2] != q.shape[2] or not q.shape[2]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise PlanError(f"shapes {shapes}", where="attention", remedy="q [Tq, H, D], k and v [Tk, KV, D]")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise PlanError(f"{k.shape[1]} heads of keys do not divide {q.shape[1]} of queries", where="attention")
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise PlanError(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}", where="attention", remedy="one floating-point dtype")
    if isinstance(relation, Positions):
        sizes = tuple(len(x) for x in (relation.q_documents, relation.q_positions))
        sizes += tuple(len(x) for x in (relation.k_documents, relation.k_positions))
        if sizes != (len(q), len(q), len(k), len(k)):
            raise PlanError(f"positions of {sizes} rows for {len(q)} queries and {len(k)} keys", where="relation")
