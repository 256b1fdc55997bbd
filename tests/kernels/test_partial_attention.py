"""Attention pieces: every back end against dense softmax in float64, merging, and what torch's kernel does alone."""

from __future__ import annotations

import itertools
import math
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from _document_blocks import document_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import CordilleraError, PlanError
from cordillera.kernels.attention import flash_cpu
from cordillera.kernels.attention import math as math_attention
from cordillera.kernels.attention import varlen as varlen_attention
from cordillera.kernels.attention.merge import merge
from cordillera.kernels.attention.partial import attention_backward, choose_backend, partial_attention
from cordillera.kernels.attention.relation import (
    Positions,
    Relation,
    RowBlock,
    as_blocks,
    blocks_between,
    dense_mask,
)

BACKENDS = ["math", "flash", "varlen"]
CLOSE = {"rtol": 1e-10, "atol": 1e-10}

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rows(count: int, heads: int, dim: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(count, heads, dim, seed=seed, dtype=dtype)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Softmax attention as it is written in a book, with repeated heads."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    has_keys = mask.any(1)
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    scores = scores.masked_fill(~has_keys[:, None, None], 0.0)  # keeps gradients of rows without keys finite
    probabilities = scores.softmax(-1) * has_keys[:, None, None]
    lse = scores.logsumexp(-1) if len(k) else scores.sum(-1)
    return torch.einsum("qhk,khd->qhd", probabilities, v), lse.masked_fill(~has_keys[:, None], -torch.inf)


def rule(relation: Relation, queries: int, keys: int) -> Tensor:
    """Which query sees which key, by the words of the definitions, pair by pair."""
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    if isinstance(relation, Positions):
        for i, (document, position) in enumerate(zip(relation.q_documents, relation.q_positions, strict=True)):
            for j, (other, key) in enumerate(zip(relation.k_documents, relation.k_positions, strict=True)):
                mask[i, j] = bool(document == other and document >= 0 and key <= position)
        return mask
    if isinstance(relation, str):
        relation = [] if relation == "empty" else [RowBlock(0, queries, 0, keys, relation == "causal")]
    for q_start, q_stop, k_start, k_stop, causal in relation:
        for i in range(q_start, q_stop):
            for j in range(k_start, k_stop):
                mask[i, j] |= not causal or k_stop - 1 - j >= q_stop - 1 - i
    return mask


def cuts(draw: st.DrawFn, total: int, most: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, total), max_size=most))
    return [0, *sorted(inner), total]


@st.composite
def relations(draw: st.DrawFn) -> tuple[Relation, int, int]:
    """Of every kind, with the numbers of queries and keys."""
    queries, keys = draw(st.integers(0, 24)), draw(st.integers(0, 24))
    kind = draw(st.sampled_from(["full", "causal", "empty", "documents", "blocks", "chunks", "positions"]))
    if kind in ("full", "causal", "empty"):
        return kind, queries, keys  # type: ignore[return-value]
    if kind == "documents":
        q_offsets = cuts(draw, queries, 4)
        inner = draw(st.lists(st.integers(0, keys), min_size=len(q_offsets) - 2, max_size=len(q_offsets) - 2))
        return document_blocks(q_offsets, [0, *sorted(inner), keys]), queries, keys
    if kind == "blocks":  # a grid, of which some cells are there
        grid = [(*a, *b) for a in pairwise(cuts(draw, queries, 3)) for b in pairwise(cuts(draw, keys, 3))]
        chosen = draw(st.lists(st.booleans(), min_size=len(grid), max_size=len(grid)))
        causal = draw(st.lists(st.booleans(), min_size=len(grid), max_size=len(grid)))
        return (
            [RowBlock(*cell, causal=c) for cell, c, here in zip(grid, causal, chosen, strict=True) if here],
            queries,
            keys,
        )
    if kind == "chunks":
        pieces: list[Sequence[tuple[int, int, int]]] = []
        for total in (queries, keys):
            lengths = [b - a for a, b in pairwise(cuts(draw, total, 3))]
            pieces.append(
                [(draw(st.integers(0, 5)) * 10 + i, s := draw(st.integers(0, 9)), s + n) for i, n in enumerate(lengths)]
            )
        pieces = [[(d // 30, a, b) for d, a, b in side] for side in pieces]
        pieces[1] = disjoint(pieces[1])
        return blocks_between(*pieces), queries, sum(b - a for _, a, b in pieces[1])
    numbers = st.integers(-1, 3)
    documents = [
        torch.tensor(draw(st.lists(numbers, min_size=n, max_size=n)), dtype=torch.int64) for n in (queries, keys)
    ]
    positions = [
        torch.tensor(draw(st.lists(numbers, min_size=n, max_size=n)), dtype=torch.int64) for n in (queries, keys)
    ]
    return Positions(documents[0], positions[0], documents[1], positions[1]), queries, keys


def disjoint(pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Each after the piece of its document before it."""
    ends: dict[int, int] = {}
    moved = []
    for document, start, stop in pieces:
        first = max(start, ends.get(document, 0))
        moved.append((document, first, first + stop - start))
        ends[document] = first + stop - start
    return moved


def emulate_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA kernels by what they are documented to compute: block by block, aligned at the bottom right."""

    def blocks(call: varlen_attention._Call) -> list[RowBlock]:
        found = document_blocks(call.q_offsets.tolist(), call.k_offsets.tolist())
        sizes = [(b.q_stop - b.q_start, b.k_stop - b.k_start) for b in found]
        assert call.longest == tuple(map(max, zip(*sizes, strict=True)))
        assert call.q_offsets.dtype == call.k_offsets.dtype == torch.int32
        assert len(set(call.rows.tolist())) == len(call.rows)
        assert len(set(call.keys.tolist())) == len(call.keys)
        return [block._replace(causal=call.causal) for block in found]

    def kernel(q: Tensor, k: Tensor, v: Tensor, call: varlen_attention._Call, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = math_attention.forward(q, k, v, blocks(call), scale)
        return out, lse.t()

    def kernel_backward(*arguments: Tensor | varlen_attention._Call | float) -> tuple[Tensor, ...]:
        *tensors, lse, call, scale = arguments
        return math_attention.backward(*tensors, lse.t(), blocks(call), scale)  # type: ignore[arg-type,union-attr]

    monkeypatch.setattr(varlen_attention, "_kernel", kernel)
    monkeypatch.setattr(varlen_attention, "_kernel_backward", kernel_backward)
    monkeypatch.setattr("cordillera.kernels.attention.partial.choose_backend", lambda q, relation, backend: backend)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    case=relations(), groups=st.sampled_from([(1, 1), (4, 2), (3, 1)]), seed=st.integers(0, 99), lse_too=st.booleans()
)
@settings(max_examples=150)
def test_every_back_end_is_dense_softmax_with_its_gradients(
    backend: str, case: tuple[Relation, int, int], groups: tuple[int, int], seed: int, lse_too: bool
) -> None:
    """Outputs, log-sum-exps and the gradients of both; varlen's own kernels are emulated."""
    relation, queries, keys = case
    if backend == "varlen" and isinstance(relation, Positions):
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        if backend == "varlen":
            emulate_varlen(monkeypatch)
        inputs = [
            rows(queries, groups[0], 4, seed),
            rows(keys, groups[1], 4, seed + 1),
            rows(keys, groups[1], 4, seed + 2),
        ]
        weights, lse_weights = normal(queries, groups[0], 4, seed=seed + 3), normal(queries, groups[0], seed=seed + 4)
        mask = rule(relation, queries, keys)
        assert torch.equal(dense_mask(relation, queries, keys), mask)
        found = []
        for attend in (lambda *x: partial_attention(*x, relation, backend=backend), lambda *x: dense(*x, mask)):  # type: ignore[arg-type]
            leaves = [x.clone().requires_grad_() for x in inputs]
            out, lse = attend(*leaves)
            value = (out * weights).sum()
            if lse_too:
                value = value + (lse.masked_fill(~mask.any(1)[:, None], 0.0) * lse_weights).sum()
            value.backward()
            found.append([out, lse, *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


@given(
    case=relations(),
    labels=st.lists(st.integers(0, 2), min_size=24, max_size=24),
    shift=st.sampled_from([0.0, -500.0, 900.0]),
    backend=st.sampled_from(["math", "flash"]),
)
@settings(max_examples=100)
def test_pieces_of_the_keys_merge_to_all_of_them(
    case: tuple[Relation, int, int], labels: list[int], shift: float, backend: str
) -> None:
    """Forwards through the merge, backwards both by autograd through it and by the merged log-sum-exp.

    A constant is added to all scores, by a column of ones.
    """
    relation, queries, keys = case
    mask = rule(relation, queries, keys)
    q, k, v = rows(queries, 2, 4, 0), rows(keys, 1, 4, 1), rows(keys, 1, 4, 2)
    q[..., 0], k[..., 0] = 1, shift
    inputs = [x.requires_grad_() for x in (q, k, v)]
    weights, lse_weights = rows(queries, 2, 4, 3), normal(queries, 2, seed=4)
    expected_out, expected_lse = dense(q, k, v, mask, scale=1.0)
    value = (expected_out * weights).sum() + (expected_lse.masked_fill(~mask.any(1)[:, None], 0.0) * lse_weights).sum()
    expected = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)

    label = torch.tensor(labels)[:keys]
    members = [(label == i).nonzero()[:, 0] for i in range(3)]
    # a general relation of a piece: each query its own document of all the keys that it sees
    relations_of = [columns_of(mask[:, at]) for at in members]
    pieces = [
        partial_attention(q, k[at], v[at], blocks, scale=1.0, backend=backend)  # type: ignore[arg-type]
        for at, blocks in zip(members, relations_of, strict=True)
    ]
    out, lse = merge(pieces)
    torch.testing.assert_close(out, expected_out, rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-10, atol=1e-9)
    value = (out * weights).sum() + (lse.masked_fill(~mask.any(1)[:, None], 0.0) * lse_weights).sum()
    grads = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)
    by_hand = [torch.zeros_like(x) for x in inputs]
    for at, blocks in zip(members, relations_of, strict=True):
        detached = (x.detach() for x in (weights, q, k[at], v[at], out, lse))
        dq, dk, dv = attention_backward(*detached, blocks, dlse=lse_weights, scale=1.0, backend=backend)  # type: ignore[arg-type]
        by_hand[0] += dq
        by_hand[1][at] += dk
        by_hand[2][at] += dv
    tolerance = 1e-9 * max(1.0, abs(shift))  # scores of a thousand have fewer digits behind the point
    for one, other, third in zip(grads, by_hand, expected, strict=True):
        torch.testing.assert_close(one, third, rtol=1e-9, atol=tolerance)
        torch.testing.assert_close(other, third, rtol=1e-9, atol=tolerance)


def columns_of(mask: Tensor) -> list[RowBlock]:
    """A mask as blocks of one query and one key."""
    return [RowBlock(i, i + 1, j, j + 1, False) for i, j in mask.nonzero().tolist()]


@given(st.permutations(range(4)), st.lists(st.booleans(), min_size=4, max_size=4))
def test_merging_does_not_depend_on_order_or_grouping(order: list[int], have_keys: list[bool]) -> None:
    parts = [(rows(3, 2, 4, seed), normal(3, 2, seed=seed + 50) * 30) for seed in range(4)]
    for i in range(4):
        if not have_keys[i]:
            parts[i] = (torch.zeros(3, 2, 4, dtype=torch.float64), torch.full((3, 2), -torch.inf, dtype=torch.float64))
    whole = merge(parts)
    shuffled = merge([parts[i] for i in order])
    grouped = merge([merge(parts[:2]), merge(parts[2:])])
    for found in (shuffled, grouped):
        for one, other in zip(found, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_without_keys_anywhere_the_merge_and_its_gradient_are_zero() -> None:
    out = torch.zeros(2, 1, 4, dtype=torch.float64, requires_grad=True)
    lse = torch.tensor([[-torch.inf], [0.5]], dtype=torch.float64, requires_grad=True)
    merged, merged_lse = merge([(out, lse), (out, torch.full((2, 1), -torch.inf, dtype=torch.float64))])
    assert merged.abs().max() == 0
    assert merged_lse[:, 0].tolist() == [-torch.inf, 0.5]
    (merged.sum() + merged_lse[1, 0]).backward()
    assert torch.isfinite(out.grad).all()  # type: ignore[arg-type]
    assert lse.grad[:, 0].tolist() == [0, 1]  # type: ignore[index]


@pytest.mark.parametrize("backend", ["math", "flash"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("relation", ["full", "causal", "mask"])
def test_what_is_not_finite_never_becomes_a_number(
    backend: str, dtype: torch.dtype, bad: float, which: int, relation: str
) -> None:
    """Whoever sees it gets something that is not finite; where nobody does, results are as without it."""
    inputs = [rows(40, 1, 8, seed, dtype) for seed in range(3)]
    spoilt = [x.clone() for x in inputs]
    spoilt[which][7, 0, 3] = bad
    row = torch.arange(40)
    nothing = torch.zeros(40, dtype=torch.int64)
    given_relation: Relation = Positions(nothing, row, nothing, row) if relation == "mask" else relation  # type: ignore[assignment]
    out, lse = partial_attention(spoilt[0], spoilt[1], spoilt[2], given_relation, backend=backend)  # type: ignore[arg-type]
    sees = torch.ones(40, dtype=torch.bool) if relation == "full" else row >= 7
    if which == 0:
        sees = row == 7
    if math.isnan(bad) or backend == "flash" or which == 2:
        assert not out[sees].isfinite().all(-1).any()
    if math.isnan(bad) and which < 2:
        assert lse[sees].isnan().all()
    again, _ = merge([(out, lse), (torch.zeros_like(out), torch.full_like(lse, -torch.inf))])
    assert torch.equal(again.isfinite(), out.isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_its_inputs(dtype: torch.dtype) -> None:
    """Log-sum-exps and gradients stay in float32, and many pieces are no worse than one."""
    q, k, v, dout = (rows(256, 2, 16, seed, dtype) for seed in range(4))
    offsets = [0, 100, 256]
    blocks = document_blocks(offsets)
    expected, expected_lse = partial_attention(*(x.double() for x in (q, k, v)), blocks)
    expected_grads = attention_backward(*(x.double() for x in (dout, q, k, v)), expected, expected_lse, blocks)
    out, lse = partial_attention(q, k, v, blocks)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    pieces = [
        partial_attention(
            q,
            k[at : at + 16],
            v[at : at + 16],
            Positions(*coordinates(256, offsets), *(x[at : at + 16] for x in coordinates(256, offsets))),
        )
        for at in range(0, 256, 16)
    ]
    step = torch.finfo(dtype).eps
    for found in (out, merge(pieces)[0]):
        torch.testing.assert_close(found.double(), expected, rtol=2 * step, atol=2 * step)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=max(1e-5, step))
    for one, other in zip(attention_backward(dout, q, k, v, out, lse, blocks), expected_grads, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=8 * step, atol=16 * step)


def coordinates(count: int, offsets: list[int]) -> tuple[Tensor, Tensor]:
    row = torch.arange(count)
    document = torch.bucketize(row, torch.tensor(offsets[1:]), right=True)
    return document, row - torch.tensor(offsets)[document]


@pytest.mark.parametrize("backend", ["math", "flash"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_layout_in_memory_will_do(backend: str, order: tuple[int, ...]) -> None:
    """Views with transposed strides, parts of wider tensors, and gradients that are one number for all."""
    plain = [rows(150, 2, 8, seed) for seed in range(3)]
    back = torch.tensor(order).argsort().tolist()
    wide = [torch.cat([x, x], 2).permute(order).contiguous().permute(back) for x in plain]
    found = []
    for inputs in (plain, [x[..., 8:] for x in wide]):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, _ = partial_attention(*leaves, "causal", backend=backend)  # type: ignore[arg-type]
        grads = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        transposed = torch.autograd.grad(out.transpose(0, 2).contiguous().pow(2).sum(), leaves)
        found.append([out.detach(), *grads, *transposed])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_positions_of_many_rows_are_masked_in_parts() -> None:
    q, k, v = (rows(2100, 1, 8, seed) for seed in range(3))
    place = coordinates(2100, [0, 700, 2100])
    by_mask = partial_attention(q, k, v, Positions(*place, *place))
    by_blocks = partial_attention(q, k, v, document_blocks([0, 700, 2100]))
    for one, other in zip(by_mask, by_blocks, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": torch.zeros(3, 3, 4)}, "shapes"),
        ({"k": torch.zeros(3, 3, 4), "v": torch.zeros(3, 3, 4)}, "do not divide"),
        ({"k": torch.zeros(3, 1, 4, dtype=torch.float64)}, "dtypes"),
        ({"q": torch.zeros(3, 2, 0)}, "shapes"),
        ({"relation": "diagonal"}, "not known"),
        ({"relation": [RowBlock(0, 3, 0, 4, False)]}, "does not fit"),
        ({"relation": [RowBlock(2, 1, 0, 3, False)]}, "does not fit"),
        ({"relation": Positions(*[torch.zeros(2, dtype=torch.int64)] * 4)}, "positions of"),
        ({"backend": "varlen"}, "on CUDA"),
        ({"backend": "cudnn"}, "no back end"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], said: str) -> None:
    arguments: dict[str, object] = {"q": torch.zeros(3, 2, 4), "k": torch.zeros(3, 1, 4), "v": torch.zeros(3, 1, 4)}
    with pytest.raises(CordilleraError, match=said):
        partial_attention(**{"relation": "full", **arguments, **change})  # type: ignore[arg-type]


def test_nothing_cannot_be_merged() -> None:
    with pytest.raises(PlanError, match="no piece"):
        merge([])


def test_on_cpus_the_flash_kernel_is_chosen() -> None:
    assert choose_backend(torch.zeros(1, 1, 8), "full") == "flash"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_on_cuda_is_the_reference(dtype: torch.dtype) -> None:
    offsets = [0, 1, 300, 800]
    relation = [*document_blocks(offsets), RowBlock(300, 800, 0, 200, False)]
    inputs = [rows(800, heads, 64, seed, dtype).cuda() for seed, heads in enumerate((8, 2, 2, 8))]
    q, k, v, dout = inputs
    assert choose_backend(q, relation) == "varlen"
    wide = [x.double() for x in inputs]
    expected, expected_lse = partial_attention(*wide[:3], relation, backend="math")
    out, lse = partial_attention(q, k, v, relation)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=2 * step, atol=2 * step)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)
    dlse = torch.randn_like(lse)
    expected_grads = attention_backward(
        wide[3], *wide[:3], expected, expected_lse, relation, dlse=dlse.double(), backend="math"
    )
    for one, other in zip(
        attention_backward(dout, q, k, v, out, lse, relation, dlse=dlse), expected_grads, strict=True
    ):
        torch.testing.assert_close(one.double(), other, rtol=16 * step, atol=16 * step * float(other.abs().max()))


# ------------------------------------------------------------------------------ what torch's kernel does by itself


def by_head(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def test_torch_aligns_causal_masks_at_the_top_left() -> None:
    q, k = rows(3, 1, 8, 0), rows(5, 1, 8, 1)
    _, lse = flash(by_head(q), by_head(k), by_head(k), 0.0, True)
    expected = dense(q, k, k, torch.ones(3, 5, dtype=torch.bool).tril())[1]
    torch.testing.assert_close(lse[0].t(), expected, **CLOSE)


def test_torch_gives_rows_without_a_key_a_log_sum_exp_of_zero() -> None:
    q, k = rows(3, 1, 8, 0), rows(5, 1, 8, 1)
    out, lse = flash(by_head(q), by_head(k), by_head(k), attn_mask=torch.full((1, 1, 3, 5), -torch.inf).double())
    assert lse.abs().max() == out.abs().max() == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="a division by 0 that x86 traps")
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_torch_dies_on_empty_lists(queries: int, keys: int) -> None:
    program = (
        f"import torch; q, k = torch.ones(1, 1, {queries}, 8), torch.ones(1, 1, {keys}, 8); "
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120).returncode == -signal.SIGFPE
    )
    out, lse = partial_attention(torch.ones(queries, 1, 8), torch.ones(keys, 1, 8), torch.ones(keys, 1, 8), "full")
    assert out.abs().sum() == 0
    assert (lse == -torch.inf).all()


def test_blocks_leave_out_what_sees_nothing() -> None:
    assert as_blocks("causal", 5, 2) == [RowBlock(3, 5, 0, 2, True)]
    assert as_blocks("full", 5, 0) == as_blocks("empty", 5, 5) == []


@pytest.mark.parametrize("halve", [False, True])
def test_calls_of_the_kernel_cover_every_pair_once(halve: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares of 1 to 40 and 70 rows, of which those up to 32 are cut down to 4, beside rectangles of keys."""
    monkeypatch.setattr(flash_cpu, "_SMALLEST", 4)
    monkeypatch.setattr(flash_cpu, "_LARGEST", 32)
    flash_cpu._batches.cache_clear()
    try:
        for queries, before in itertools.product([*range(1, 41), 70], (0, 3)):
            block = RowBlock(2, 2 + queries, 1, 1 + before + queries, True)
            squares = [part for part in flash_cpu._parts(block, halve) if part.causal]
            largest = max(part.q_stop - part.q_start for part in squares)
            assert largest == (min(4, queries) if halve and queries <= 32 else queries)
            again = RowBlock(2 + queries, 2 + 2 * queries, 1, 1 + before, False)
            pairs = torch.zeros(2 + 2 * queries, 1 + before + queries, dtype=torch.int64)
            for piece in flash_cpu._batches((block, again), halve):
                own = torch.zeros_like(pairs)
                for turn in range(piece.batch):
                    q, k = piece.q_start + turn * piece.q_step, piece.k_start + turn * piece.k_step
                    seen = torch.ones(piece.queries, piece.keys, dtype=torch.int64)
                    own[q : q + piece.queries, k : k + piece.keys] += seen.tril() if piece.causal else seen
                assert int(own.max()) <= 1
                pairs += own
            expected = torch.zeros_like(pairs)
            for i in range(queries):
                expected[2 + i, 1 : 1 + before + i + 1] = 1
                expected[2 + queries + i, 1 : 1 + before] = 1
            assert torch.equal(pairs, expected)
    finally:
        flash_cpu._batches.cache_clear()
