"""Attention over ragged sequences, one after another without padding: user histories, candidates, documents.

Queries, keys and values are packed: ``[T, heads, D]`` with the offsets of the sequences, as in
:mod:`cordillera.jagged`. Nothing is padded and nothing of the size of a length squared is kept, so memory grows with
the number of rows. Scores become shares by a softmax or by a function of each score alone, as in HSTU.

Source: Jagged Flash Attention (Xu et al. 2024, arXiv 2409.15373); algorithms 1 and 2 of FlashAttention-2 (Dao 2023,
arXiv 2307.08691); functions of single scores as in HSTU (Zhai et al. 2024, arXiv 2402.17152). The masks
(:mod:`cordillera.kernels.attention.jagged_call`) and the order of the work are ours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

from cordillera.errors import DependencyError
from cordillera.kernels.attention.jagged_call import JaggedCall, JaggedMask, ScoreFunction, checked_call

JaggedBackend = Literal["auto", "math", "numba", "triton"]

_NUMBA_DTYPES = (torch.float32, torch.bfloat16)
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "fast_gelu": partial(functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "leaky_relu": functional.leaky_relu,
    "hardswish": functional.hardswish,
    "tanh": torch.tanh,
}


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    q_offsets: Tensor | None = None,
    kv_index: Tensor | None = None,
    broadcast: bool = False,
    mask: JaggedMask | None = None,
    score: ScoreFunction = "softmax",
    divisor: float | Tensor = 1.0,
    scale: float | None = None,
    bias: Tensor | None = None,
    longest: int | None = None,
    backend: JaggedBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute attention within each of ``B`` sequences of keys. Differentiable.

    Args:
        q: Queries, ``[T, H, D]``; with ``broadcast``, ``[F, H, D]``.
        k: Keys, ``[T', G, D]``, as ``v``; ``G`` divides ``H``, and query head ``h`` reads key head ``h // (H / G)``.
        v: Values, in the shape of ``k``.
        offsets: Start of each sequence of keys and the end of the last, ``int32`` or ``int64 [B + 1]``. Rows after the
            last end belong to no sequence: they may hold anything, and get outputs and gradients of 0.
        q_offsets: Offsets of the sequences of queries; None for those of the keys.
        kv_index: Sequence of keys that each sequence of queries reads, integers ``[Bq]``, where many may read one (as
            the candidates of a request read one history); None for its own.
        broadcast: Whether all sequences of keys are read by the same ``F`` queries. The output is then
            ``[B F, H, D]``, and the gradient of ``q`` is summed over the sequences in their order.
        mask: Keys that a query sees; None for all of its sequence. Masks that hide keys need queries and keys with the
            same offsets.
        score: ``"softmax"``, or a function of each score, whose values are the shares of the values without a sum of
            one: ``"identity"``, ``"silu"``, ``"gelu"``, ``"fast_gelu"`` (by tanh), ``"relu"``, ``"relu2"`` (its
            square), ``"leaky_relu"`` (0.01), ``"hardswish"``, ``"tanh"``.
        divisor: Divisor of these shares, a number or ``[T]`` (one a query); HSTU divides by the longest length. No
            gradient flows to it. Not used with softmax.
        scale: Factor of the products of queries and keys; None for ``1 / sqrt(D)``.
        bias: Added to the scaled scores: ``[B, H, N, M]``, or 1 for ``B`` and ``H``, with ``N`` and ``M`` no shorter
            than the longest sequences of queries and keys.
        longest: Length of the longest sequence of queries and keys. Needed if offsets are on a GPU, where finding it
            would wait for the GPU; their values are then not checked.
        backend: ``"math"`` for torch's products, sequence by sequence, anywhere and in float64: the reference;
            ``"numba"`` for our kernels on CPUs, in float32 or bfloat16; ``"triton"`` for those on GPUs, in bfloat16 and
            float16 too; ``"auto"`` for the fastest of these.

    Returns:
        The output, as the queries, and the log-sum-exp of each query's scores ``[T, H]``, in float32 or float64, -inf
        without keys; for other scores than softmax, a tensor ``[0]``. A query without keys gets an output of 0.

    Raises:
        DataError: Shapes, dtypes, devices, offsets or the mask do not fit together; the message names the argument.
        DependencyError: The back end cannot run the call.
    """
    call = checked_call(
        q, k, v, offsets, q_offsets, kv_index, broadcast, mask or JaggedMask(), score, divisor, bias, longest
    )
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    chosen = _chosen(q, backend)
    if chosen == "math":
        return _by_products(q, k, v, call, scale)
    out, ends = _JaggedAttention.apply(q, k, v, bias, call, scale, chosen)
    return out, ends


def _chosen(q: Tensor, backend: str) -> str:
    """Back end that runs a call."""
    kind = q.device.type
    fits = {
        "math": "",
        "numba": "" if kind == "cpu" and q.dtype in _NUMBA_DTYPES else "float32 and bfloat16 on CPUs",
        "triton": _without_triton(q),
    }
    if backend == "auto" and type(_get_current_dispatch_mode()).__module__ == "torch.utils.flop_counter":
        return "math"  # operations of this backend can be counted
    if backend == "auto":
        preferred = "numba" if kind == "cpu" else "triton"
        return "math" if fits[preferred] else preferred
    if backend not in fits:
        raise DependencyError(f"no back end {backend!r}", where="backend", remedy=f"auto, {', '.join(fits)}")
    if fits[backend]:
        raise DependencyError(
            f"{backend} runs {fits[backend]}, these are {q.dtype} on {q.device}", where="backend", remedy="auto"
        )
    return backend


def _without_triton(q: Tensor) -> str:
    """What Triton's kernels run, if it is not this; in its interpreter, they run on CPUs."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and q.dtype == torch.float32
    fits = q.is_cuda and q.dtype in _TRITON_DTYPES and find_spec("triton") is not None
    return "" if fits or interpreted else "float32, bfloat16 and float16 on GPUs, with triton installed"


def _by_products(q: Tensor, k: Tensor, v: Tensor, call: JaggedCall, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention with torch's products, sequence by sequence; torch computes the gradients."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (_pieces(x, call.k_lengths) for x in (k, v))
    out, ends = [q.new_zeros((0, *q.shape[1:]), dtype=wide)], [q.new_zeros((0, q.shape[1]), dtype=wide)]
    queries = [q] * len(call.rows) if call.is_broadcast else _pieces(q, call.q_lengths)
    for b, (s, row) in enumerate(zip(call.of_keys.tolist(), call.rows.tolist(), strict=True)):
        scores = _scores(queries[b].to(wide), keys[s].to(wide), call, b, scale)
        own_ends = None
        if call.score == "softmax":
            own_ends = scores.masked_fill(~_seen(call, row, scores), -torch.inf).logsumexp(-1)
            ends.append(own_ends.T)
        shares = _shares(scores, call, row, own_ends)
        out.append(torch.einsum("hqk,khd->qhd", shares, _repeated(values[s].to(wide), q.shape[1])))
    rest = call.out_rows - sum(len(part) for part in out)
    out.append(q.new_zeros((rest, *q.shape[1:]), dtype=wide))
    if call.score == "softmax":
        ends.append(q.new_full((rest, q.shape[1]), -torch.inf, dtype=wide))
    return torch.cat(out).to(q.dtype), torch.cat(ends)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Heads of keys, ``[T, G, D]``, for each of ``heads`` heads of queries."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _scores(queries: Tensor, keys: Tensor, call: JaggedCall, b: int, scale: float) -> Tensor:
    """Scaled scores of a sequence with its bias, ``[H, queries, keys]``."""
    scores = torch.einsum("qhd,khd->hqk", queries, _repeated(keys, queries.shape[1])) * scale
    return scores if call.bias is None else scores + call.bias[b, :, : len(queries), : len(keys)].to(scores)


def _shares(scores: Tensor, call: JaggedCall, row: int, ends: Tensor | None) -> Tensor:
    """Attention weights, 0 where a query does not see a key; ``ends [H, queries]`` are log-sum-exps of softmax."""
    if ends is not None:
        shares = (scores - ends.masked_fill(ends == -torch.inf, 0.0)[..., None]).exp()
    else:
        factors = call.factors[row : row + scores.shape[1], None].to(scores)
        shares = _FUNCTIONS[call.score](scores) * factors
    return shares.masked_fill(~_seen(call, row, scores), 0.0)


def _pieces(x: Tensor, lengths: Tensor) -> Sequence[Tensor]:
    """Rows of each sequence, by one split: slices would each have a gradient of the whole size."""
    return x[: int(lengths.sum())].split(lengths.tolist())


def _seen(call: JaggedCall, row: int, scores: Tensor) -> Tensor:
    """Keys that the queries of a sequence see, ``bool [queries, keys]``, for its scores ``[H, queries, keys]``."""
    _, queries, keys = scores.shape
    if call.ranges is None:
        return torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    own, at = call.ranges[row : row + queries, :, :, None], torch.arange(keys, device=scores.device)
    return ((own[:, :, 0] <= at) & (at < own[:, :, 1])).any(1)


class _JaggedAttention(torch.autograd.Function):
    """Our kernels on CPUs and GPUs."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: JaggedCall, scale: float, backend: str
    ) -> tuple[Tensor, Tensor]:
        out, ends = _kernels(backend).forward(q.detach(), k.detach(), v.detach(), call, scale)
        ctx.save_for_backward(q, k, v, out, ends)
        ctx.call, ctx.scale, ctx.backend = call, scale, backend
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.set_materialize_grads(False)
        ends = ends * math.log(2)
        if call.score != "softmax":
            ctx.mark_non_differentiable(ends)
        return out, ends

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dends: Tensor | None) -> tuple[Any, ...]:
        (q, k, v, out, ends), call, scale = ctx.saved_tensors, ctx.call, ctx.scale
        dout = torch.zeros_like(out) if dout is None else dout
        dends = torch.zeros_like(ends) if dends is None else dends
        dq, dk, dv = _kernels(ctx.backend).backward(dout, dends, q, k, v, out, ends, call, scale)
        if call.is_broadcast:
            dq = dq.view(-1, *q.shape).sum(0)
        found = tuple(grad.to(x.dtype) for grad, x in zip((dq, dk, dv), (q, k, v), strict=True))
        dbias = None
        if ctx.needs_input_grad[3]:
            dbias = _bias_gradient(dout, dends, out, ends, q, k, v, call, scale, ctx.bias_shape)
        return *found, dbias, None, None, None


def _kernels(backend: str) -> Any:
    """Module of a back end."""
    if backend == "numba":
        from cordillera.kernels.attention import numba_jagged

        return numba_jagged
    from cordillera.kernels.attention import triton_jagged

    return triton_jagged


def _bias_gradient(
    dout: Tensor, dends: Tensor, out: Tensor, ends: Tensor, q: Tensor, k: Tensor, v: Tensor, call: JaggedCall,
    scale: float, shape: torch.Size,
) -> Tensor:  # fmt: skip
    """Gradient of the bias, sequence by sequence in their order."""
    total = torch.zeros(shape, device=q.device)
    delta = (dout.float() * out.float()).sum(-1) - dends if call.score == "softmax" else None
    for b in range(len(call.rows)):
        row, length, s = int(call.rows[b]), int(call.q_lengths[b]), call.of_keys[b]
        own, of_q = slice(row, row + length), slice(int(call.q_starts[b]), int(call.q_starts[b]) + length)
        keys = slice(int(call.k_starts[s]), int(call.k_starts[s] + call.k_lengths[s]))
        with torch.enable_grad():
            scores = _scores(q[of_q].detach().float(), k[keys].detach().float(), call, b, scale).detach()
            scores.requires_grad_()
            shares = _shares(scores, call, row, None if delta is None else ends[own].T * math.log(2))
        dshares = torch.einsum("qhd,khd->hqk", dout[own].float(), _repeated(v[keys].float(), q.shape[1]))
        if delta is not None:
            dscores = shares.detach() * (dshares - delta[own].T[..., None])
        else:
            dscores = torch.autograd.grad(shares, scores, dshares)[0]
        into = total[b if shape[0] > 1 else 0]
        into[:, :length, : dscores.shape[2]] += dscores if shape[1] > 1 else dscores.sum(0, keepdim=True)
    return total
