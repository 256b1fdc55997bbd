"""Attention over ragged sequences and its gradients on GPUs, in Triton.

One program computes a tile of queries of a sequence and head over the keys that they see, range by range, and so do the
gradients of queries; gradients of keys and values are those of one program for each tile of keys, over all queries that
see them. No atomics: results repeat bit for bit. Nothing waits for the GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cordillera.kernels.attention.jagged_call import RANGES, SCORES
from cordillera.kernels.triton_support import is_interpreted

if TYPE_CHECKING:
    from cordillera.kernels.attention.jagged_call import JaggedCall

_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453
# Queries and keys of a tile, warps, and stages of the loop: among the fastest on an H200.
_TILES = {
    "narrow": {"forward": (64, 32, 4, 3), "queries": (64, 32, 4, 3), "keys": (64, 64, 4, 2)},
    "wide": {"forward": (64, 64, 4, 1), "queries": (64, 64, 4, 1), "keys": (64, 32, 4, 1)},
}


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _share(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Function of single scores."""
    if KIND == 1:
        found = x
    elif KIND == 2:
        found = x * tl.sigmoid(x)
    elif KIND == 3:
        found = x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == 4:
        found = 0.5 * x * (1 + _tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x)))
    elif KIND == 5:
        found = tl.where(x < 0, 0.0, x)
    elif KIND == 6:
        found = tl.where(x < 0, 0.0, x * x)
    elif KIND == 7:
        found = tl.where(x < 0, 0.01 * x, x)
    elif KIND == 8:
        found = tl.where(x <= -3, 0.0, tl.where(x >= 3, x, x * (x + 3) / 6))
    else:
        found = _tanh(x)
    return found


@triton.jit
def _slope(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Derivative of the function of single scores."""
    if KIND == 1:
        found = tl.zeros_like(x) + 1
    elif KIND == 2:
        s = tl.sigmoid(x)
        found = s * (1 + x * (1 - s))
    elif KIND == 3:
        found = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == 4:
        t = _tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x))
        found = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
    elif KIND == 5:
        found = tl.where(x <= 0, 0.0, 1.0)
    elif KIND == 6:
        found = tl.where(x <= 0, 0.0, 2 * x)
    elif KIND == 7:
        found = tl.where(x <= 0, 0.01, 1.0)
    elif KIND == 8:
        found = tl.where(x <= -3, 0.0, tl.where(x >= 3, 1.0, (2 * x + 3) / 6))
    else:
        t = _tanh(x)
        found = 1 - t * t
    return found


# One piece, as Triton compiles it: loads, the loop over keys of each range, stores.
@triton.jit
def _forward(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, ends: tl.tensor, q_starts: tl.tensor,
    q_lengths: tl.tensor, rows: tl.tensor, of_keys: tl.tensor, k_starts: tl.tensor, k_lengths: tl.tensor,
    ranges: tl.tensor, factors: tl.tensor, bias: tl.tensor, scale: tl.tensor, q_row: tl.tensor, q_head: tl.tensor,
    k_row: tl.tensor, k_head: tl.tensor, v_row: tl.tensor, v_head: tl.tensor, bias_b: tl.tensor, bias_h: tl.tensor,
    bias_i: tl.tensor, bias_j: tl.tensor, heads: tl.tensor, group: tl.tensor, KIND: tl.constexpr,
    RANGED: tl.constexpr, BIASED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count, row = tl.load(q_lengths + b), tl.load(rows + b)
    s = tl.load(of_keys + b)
    start, length = tl.load(k_starts + s), tl.load(k_lengths + s)
    i = tile * BM + tl.arange(0, BM)
    inside = i < count
    columns = tl.arange(0, WIDTH)
    in_width = columns[None, :] < D
    places = (tl.load(q_starts + b) + i.to(tl.int64))[:, None] * q_row + h * q_head + columns[None, :]
    queries = tl.load(q + places, mask=inside[:, None] & in_width, other=0.0)
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, WIDTH], tl.float32)
    alive = tile * BM < count
    factor = tl.zeros([BM], tl.float32) + 1
    if KIND != 0:
        factor = tl.load(factors + row + i, mask=inside, other=0.0)
    for n in tl.static_range(COUNT):
        if RANGED:
            own = ranges + ((row + i.to(tl.int64)) * COUNT + n) * 2
            low, high = tl.load(own, mask=inside, other=0), tl.load(own + 1, mask=inside, other=0)
            first = tl.min(tl.where(low < high, low, 2147483647), 0)
            last = tl.max(tl.where(low < high, high, 0), 0)
            first = tl.minimum(first, last) // BN * BN
        else:
            low, high = tl.zeros([BM], tl.int32), tl.zeros([BM], tl.int32) + length.to(tl.int32)
            first, last = 0, tl.where(alive, length, 0).to(tl.int32)
        for j0 in range(first, last, BN):
            j = j0 + tl.arange(0, BN)
            there = (j < length)[:, None] & in_width
            at = start + j.to(tl.int64)
            keys = tl.load(k + at[:, None] * k_row + (h // group) * k_head + columns[None, :], mask=there, other=0.0)
            values = tl.load(v + at[:, None] * v_row + (h // group) * v_head + columns[None, :], mask=there, other=0.0)
            x = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            seen = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None]) & inside[:, None]
            if BIASED:
                added = bias + b * bias_b + h * bias_h + i[:, None] * bias_i + j[None, :] * bias_j
                x += tl.load(added, mask=seen, other=0.0).to(tl.float32)
            if KIND == 0:
                x = tl.where(seen, x * 1.4426950408889634, float("-inf"))
                most = tl.maximum(highest, tl.max(x, 1))
                shift = tl.where(most == float("-inf"), 0.0, most)
                shares = tl.exp2(x - shift[:, None])
                old = tl.exp2(highest - shift)
                total = total * old + tl.sum(shares, 1)
                sums *= old[:, None]
                highest = most
            else:
                shares = tl.where(seen, _share(x, KIND) * factor[:, None], 0.0)
            sums += tl.dot(shares.to(values.dtype), values, input_precision=PRECISION)
    places = (row + i.to(tl.int64)) * heads + h
    if KIND == 0:
        total = tl.where(total > 0, total, 1.0)  # NaN of a row becomes that of its shares
        sums /= total[:, None]
        tl.store(ends + places, highest + tl.log2(total), mask=inside)
    tl.store(
        out + places[:, None] * D + columns[None, :], sums.to(out.dtype.element_ty), mask=inside[:, None] & in_width
    )


@triton.jit
def _both_slopes(
    x: tl.tensor, shares_gradient: tl.tensor, seen: tl.tensor, ends: tl.tensor, along: tl.tensor, factor: tl.tensor,
    KIND: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Shares, and gradients of the scores."""
    if KIND == 0:
        shares = tl.where(seen, tl.exp2(x * 1.4426950408889634 - ends), 0.0)
        slopes = shares * (shares_gradient - along)
    else:
        shares = tl.where(seen, _share(x, KIND) * factor, 0.0)
        slopes = tl.where(seen, _slope(x, KIND) * factor * shares_gradient, 0.0)
    return shares, slopes


@triton.jit
def _backward_queries(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, ends: tl.tensor, along: tl.tensor, dq: tl.tensor,
    q_starts: tl.tensor, q_lengths: tl.tensor, rows: tl.tensor, of_keys: tl.tensor, k_starts: tl.tensor,
    k_lengths: tl.tensor, ranges: tl.tensor, factors: tl.tensor, bias: tl.tensor, scale: tl.tensor, q_row: tl.tensor,
    q_head: tl.tensor, k_row: tl.tensor, k_head: tl.tensor, v_row: tl.tensor, v_head: tl.tensor, bias_b: tl.tensor,
    bias_h: tl.tensor, bias_i: tl.tensor, bias_j: tl.tensor, heads: tl.tensor, group: tl.tensor, KIND: tl.constexpr,
    RANGED: tl.constexpr, BIASED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count, row = tl.load(q_lengths + b), tl.load(rows + b)
    s = tl.load(of_keys + b)
    start, length = tl.load(k_starts + s), tl.load(k_lengths + s)
    i = tile * BM + tl.arange(0, BM)
    inside = i < count
    columns = tl.arange(0, WIDTH)
    in_width = columns[None, :] < D
    both = inside[:, None] & in_width
    places = (tl.load(q_starts + b) + i.to(tl.int64))[:, None] * q_row + h * q_head + columns[None, :]
    queries = tl.load(q + places, mask=both, other=0.0)
    places = (row + i.to(tl.int64)) * heads + h
    incoming = tl.load(dout + places[:, None] * D + columns[None, :], mask=both, other=0.0)
    factor = tl.zeros([BM], tl.float32) + 1
    own_ends, own_along = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    if KIND != 0:
        factor = tl.load(factors + row + i, mask=inside, other=0.0)
    else:
        own_ends, own_along = (
            tl.load(ends + places, mask=inside, other=0.0), tl.load(along + places, mask=inside, other=0.0)
        )  # fmt: skip
    sums = tl.zeros([BM, WIDTH], tl.float32)
    alive = tile * BM < count
    for n in tl.static_range(COUNT):
        if RANGED:
            own = ranges + ((row + i.to(tl.int64)) * COUNT + n) * 2
            low, high = tl.load(own, mask=inside, other=0), tl.load(own + 1, mask=inside, other=0)
            first = tl.min(tl.where(low < high, low, 2147483647), 0)
            last = tl.max(tl.where(low < high, high, 0), 0)
            first = tl.minimum(first, last) // BN * BN
        else:
            low, high = tl.zeros([BM], tl.int32), tl.zeros([BM], tl.int32) + length.to(tl.int32)
            first, last = 0, tl.where(alive, length, 0).to(tl.int32)
        for j0 in range(first, last, BN):
            j = j0 + tl.arange(0, BN)
            there = (j < length)[:, None] & in_width
            at = start + j.to(tl.int64)
            keys = tl.load(k + at[:, None] * k_row + (h // group) * k_head + columns[None, :], mask=there, other=0.0)
            values = tl.load(v + at[:, None] * v_row + (h // group) * v_head + columns[None, :], mask=there, other=0.0)
            x = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            seen = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None]) & inside[:, None]
            if BIASED:
                added = bias + b * bias_b + h * bias_h + i[:, None] * bias_i + j[None, :] * bias_j
                x += tl.load(added, mask=seen, other=0.0).to(tl.float32)
            of_shares = tl.dot(incoming, tl.trans(values), input_precision=PRECISION)
            _, slopes = _both_slopes(x, of_shares, seen, own_ends[:, None], own_along[:, None], factor[:, None], KIND)
            sums += tl.dot(slopes.to(keys.dtype), keys, input_precision=PRECISION)
    tl.store(dq + places[:, None] * D + columns[None, :], sums * scale, mask=both)


# One piece, as Triton compiles it: loads, the tiles of queries that see a key, the loop over these, stores.
@triton.jit
def _backward_keys(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, ends: tl.tensor, along: tl.tensor, dk: tl.tensor,
    dv: tl.tensor, begins: tl.tensor, readers: tl.tensor, q_starts: tl.tensor, q_lengths: tl.tensor, rows: tl.tensor,
    k_starts: tl.tensor, k_lengths: tl.tensor, ranges: tl.tensor, factors: tl.tensor, bias: tl.tensor,
    scale: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, k_row: tl.tensor, k_head: tl.tensor, v_row: tl.tensor,
    v_head: tl.tensor, bias_b: tl.tensor, bias_h: tl.tensor, bias_i: tl.tensor, bias_j: tl.tensor, heads: tl.tensor,
    group: tl.tensor, groups: tl.tensor, KIND: tl.constexpr, RANGED: tl.constexpr, BIASED: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, COUNT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    tile, g, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length = tl.load(k_starts + s), tl.load(k_lengths + s)
    j = tile * BN + tl.arange(0, BN)
    columns = tl.arange(0, WIDTH)
    in_width = columns[None, :] < D
    there = (j < length)[:, None] & in_width
    at = start + j.to(tl.int64)
    keys = tl.load(k + at[:, None] * k_row + g * k_head + columns[None, :], mask=there, other=0.0)
    values = tl.load(v + at[:, None] * v_row + g * v_head + columns[None, :], mask=there, other=0.0)
    of_keys, of_values = tl.zeros([BN, WIDTH], tl.float32), tl.zeros([BN, WIDTH], tl.float32)
    begin, end = tl.load(begins + s), tl.load(begins + s + 1)
    end = tl.where(tile * BN < length, end, begin)
    for reader in range(begin, end):
        b = tl.load(readers + reader)
        count, row, q_start = tl.load(q_lengths + b), tl.load(rows + b), tl.load(q_starts + b)
        first, last = 0, count.to(tl.int32)
        if RANGED:  # tiles of queries that see a key: none of the loop below is skipped, so that its loads can be ahead
            first, last = count.to(tl.int32), 0
            for i0 in range(0, count.to(tl.int32), BM):
                i = i0 + tl.arange(0, BM)
                sees = tl.zeros([BM], tl.int32)
                for n in tl.static_range(COUNT):
                    own = ranges + ((row + i.to(tl.int64)) * COUNT + n) * 2
                    low, high = tl.load(own, mask=i < count, other=0), tl.load(own + 1, mask=i < count, other=0)
                    low, high = tl.maximum(low, tile * BN), tl.minimum(high, tile * BN + BN)
                    sees = tl.where(low < high, 1, sees)
                any_sees = tl.max(sees, 0) > 0
                first = tl.where(any_sees, tl.minimum(first, i0), first)
                last = tl.where(any_sees, i0 + BM, last)
        for h in range(g * group, (g + 1) * group):
            for i0 in range(first, last, BM):
                i = i0 + tl.arange(0, BM)
                inside = i < count
                if RANGED:
                    seen = (j[None, :] < 0) & inside[:, None]
                    for n in tl.static_range(COUNT):
                        own = ranges + ((row + i.to(tl.int64)) * COUNT + n) * 2
                        low, high = tl.load(own, mask=inside, other=0), tl.load(own + 1, mask=inside, other=0)
                        seen = seen | ((j[None, :] >= low[:, None]) & (j[None, :] < high[:, None]))
                else:
                    seen = (j < length)[None, :] & inside[:, None]
                both = inside[:, None] & in_width
                places = (q_start + i.to(tl.int64))[:, None] * q_row + h * q_head + columns[None, :]
                queries = tl.load(q + places, mask=both, other=0.0)
                places = (row + i.to(tl.int64)) * heads + h
                incoming = tl.load(dout + places[:, None] * D + columns[None, :], mask=both, other=0.0)
                factor = tl.zeros([BM], tl.float32) + 1
                own_ends, own_along = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
                if KIND != 0:
                    factor = tl.load(factors + row + i, mask=inside, other=0.0)
                else:
                    own_ends = tl.load(ends + places, mask=inside, other=0.0)
                    own_along = tl.load(along + places, mask=inside, other=0.0)
                x = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
                if BIASED:
                    added = bias + b * bias_b + h * bias_h + i[:, None] * bias_i + j[None, :] * bias_j
                    x += tl.load(added, mask=seen, other=0.0).to(tl.float32)
                of_shares = tl.dot(incoming, tl.trans(values), input_precision=PRECISION)
                shares, slopes = _both_slopes(
                    x, of_shares, seen, own_ends[:, None], own_along[:, None], factor[:, None], KIND
                )
                of_values += tl.dot(tl.trans(shares.to(incoming.dtype)), incoming, input_precision=PRECISION)
                of_keys += tl.dot(tl.trans(slopes.to(queries.dtype)), queries, input_precision=PRECISION)
    places = (start + j.to(tl.int64)) * groups + g
    tl.store(dk + places[:, None] * D + columns[None, :], of_keys * scale, mask=there)
    tl.store(dv + places[:, None] * D + columns[None, :], of_values, mask=there)


def _settings(q: Tensor, call: JaggedCall, kernel: str) -> dict[str, Any]:
    """Constants of a kernel, one of those in ``_TILES``."""
    width = max(16, triton.next_power_of_2(q.shape[2]))
    rows, keys, warps, stages = (16, 16, 4, 1) if is_interpreted() else _tiles(kernel, q.dtype, width)
    return {
        "KIND": SCORES.index(call.score), "RANGED": call.ranges is not None, "BIASED": call.bias is not None,
        "D": q.shape[2], "WIDTH": width, "BM": rows, "BN": keys, "COUNT": RANGES if call.ranges is not None else 1,
        "PRECISION": _precision(q), "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _tiles(kernel: str, dtype: torch.dtype, width: int) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps, and stages of the loop, for heads of ``width`` numbers."""
    fits = width <= 128 if dtype != torch.float32 else width <= 64
    return _TILES["wide" if dtype == torch.float32 else "narrow"][kernel] if fits else (32, 32, 4, 1)


def _precision(q: Tensor) -> str:
    """How products of float32 are made: of three in TF32, which are about as exact, or of one where torch may."""
    if q.dtype != torch.float32 or is_interpreted() or torch.cuda.get_device_capability(q.device) < (8, 0):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _strides(q: Tensor, k: Tensor, v: Tensor, call: JaggedCall) -> tuple[Any, ...]:
    bias = call.bias
    of_bias = (0, 0, 0, 0) if bias is None else bias.stride()
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), *of_bias)
    return *strides, q.shape[1], q.shape[1] // k.shape[1]


def _tensors(q: Tensor, call: JaggedCall) -> tuple[Tensor, Tensor, Tensor]:
    """Ranges, factors and bias; something in the place of those that are not used."""
    ranges = call.q_lengths if call.ranges is None else call.ranges
    return ranges, call.factors.float(), q if call.bias is None else call.bias.detach()


def forward(q: Tensor, k: Tensor, v: Tensor, call: JaggedCall, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the output in the dtype of the queries, and log-sum-exps in base 2, ``float32 [T, H]``."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.zeros((call.out_rows, *q.shape[1:]), dtype=q.dtype, device=q.device)
    rows = call.out_rows if call.score == "softmax" else 0
    ends = torch.full((rows, q.shape[1]), -torch.inf, device=q.device)
    settings = _settings(q, call, "forward")
    grid = (triton.cdiv(call.longest_q, settings["BM"]), q.shape[1], len(call.rows))
    if all(grid):
        _forward[grid](
            q, k, v, out, ends, call.q_starts, call.q_lengths, call.rows, call.of_keys, call.k_starts,
            call.k_lengths, *_tensors(q, call), scale, *_strides(q, k, v, call), **settings,
        )  # fmt: skip
    return out, ends


def backward(
    dout: Tensor,
    dends: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    ends: Tensor,
    call: JaggedCall,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients in float32: of queries as the output, of keys, and of values."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    dout = dout.to(q.dtype).contiguous()
    along = ends
    if call.score == "softmax":
        along = ((dout.float() * out.float()).sum(-1) - dends).contiguous()
        ends = ends.masked_fill(ends == -torch.inf, 0.0)
    dq = torch.zeros(out.shape, device=q.device)
    dk, dv = torch.zeros(k.shape, device=q.device), torch.zeros(v.shape, device=q.device)
    settings, heads = _settings(q, call, "queries"), q.shape[1]
    starts = (call.q_starts, call.q_lengths, call.rows)
    keys = (call.k_starts, call.k_lengths)
    grid = (triton.cdiv(call.longest_q, settings["BM"]), heads, len(call.rows))
    if all(grid):
        _backward_queries[grid](
            q, k, v, dout, ends, along, dq, *starts, call.of_keys, *keys, *_tensors(q, call), scale,
            *_strides(q, k, v, call), **settings,
        )  # fmt: skip
    readers = call.of_keys.argsort(stable=True)
    bounds = torch.arange(len(call.k_starts) + 1, device=q.device)
    begins = torch.searchsorted(call.of_keys[readers].contiguous(), bounds)
    settings = _settings(q, call, "keys")
    grid = (triton.cdiv(call.longest_k, settings["BN"]), k.shape[1], len(call.k_starts))
    if all(grid):
        _backward_keys[grid](
            q, k, v, dout, ends, along, dk, dv, begins, readers, *starts, *keys, *_tensors(q, call), scale,
            *_strides(q, k, v, call), k.shape[1], **settings,
        )  # fmt: skip
    return dq, dk, dv
