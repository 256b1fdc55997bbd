"""Ragged attention against dense attention of each sequence alone, in float64, with masks from their definitions."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import CordilleraError, DataError, DependencyError
from cordillera.kernels.attention.jagged import jagged_attention
from cordillera.kernels.attention.jagged_call import JaggedMask
from cordillera.kernels.attention.merge import merge
from cordillera.kernels.attention.numba_tiles import BLOCK, COLUMNS, ROWS
from tests.kernels.interpreter import check_in_interpreter

# nothing, one, and one less, as many and one more than rows of a tile, columns of a tile and keys of a block
LENGTHS = (0, 1, ROWS - 1, ROWS, ROWS + 1, COLUMNS - 1, COLUMNS, COLUMNS + 1, 0, BLOCK - 1, BLOCK, BLOCK + 1, 70)
CANDIDATES = (0, 0, 2, ROWS, 0, 5, 1, 0, 0, 3, 40, 1, 70)
MASKS = {
    "all": JaggedMask(),
    "causal": JaggedMask(causal=True),
    "window": JaggedMask(window=12),
    "causal window": JaggedMask(causal=True, window=9),
    "semi-local": JaggedMask(causal=True, window=20, global_positions=4),
    "context": JaggedMask(causal=True, context=6),
    "candidates": JaggedMask(causal=True, candidates=torch.tensor(CANDIDATES)),
    "candidates of all": JaggedMask(candidates=torch.tensor(CANDIDATES)),
    "everything": JaggedMask(
        causal=True, window=30, global_positions=3, context=5, candidates=torch.tensor(CANDIDATES)
    ),
}
SCORES = ("softmax", "identity", "silu", "gelu", "fast_gelu", "relu", "relu2", "leaky_relu", "hardswish", "tanh")


def offsets_of(lengths: tuple[int, ...] | list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tensors(
    rows: int, heads: int = 2, groups: int = 1, dim: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    shapes = ((rows, heads, dim), (rows, groups, dim), (rows, groups, dim))
    q, k, v = (normal(*shape, seed=3 * seed + n, dtype=dtype).requires_grad_() for n, shape in enumerate(shapes))
    return q, k, v


def sees(mask: JaggedMask, query: int, key: int, length: int, candidates: int) -> bool:
    """Whether a query sees a key, by the words of :class:`JaggedMask`; positions of storage."""
    if mask.newest_first:
        query, key = length - 1 - query, length - 1 - key
    history = length - candidates
    if key >= history:
        return key == query
    if query < min(mask.context, history):
        return True
    at = min(query, history)
    if mask.causal and key > at:
        return False
    if mask.window is not None and not (mask.causal and key < mask.global_positions):
        return abs(at - key) < mask.window or key < mask.global_positions
    return True


def seen(mask: JaggedMask, lengths: tuple[int, ...], b: int) -> Tensor:
    count = 0 if mask.candidates is None else int(mask.candidates[b])
    n = lengths[b]
    rows = [[sees(mask, i, j, n, count) for j in range(n)] for i in range(n)]
    return torch.tensor(rows, dtype=torch.bool).reshape(n, n)


def share(score: str, x: Tensor) -> Tensor:
    """Functions of single scores, from their definitions."""
    normal_below = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    found = {
        "identity": x,
        "silu": x / (1 + torch.exp(-x)),
        "gelu": x * normal_below,
        "fast_gelu": x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "relu": x.clamp(min=0),
        "relu2": x.clamp(min=0) ** 2,
        "leaky_relu": x.clamp(min=0) + 0.01 * x.clamp(max=0),
        "hardswish": x * (x + 3).clamp(0, 6) / 6,
        "tanh": torch.tanh(x),
    }
    return found[score]


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, score: str = "softmax", divisor: float = 1.0) -> Tensor:
    """Attention of one sequence alone, ``[n, H, D]``, with rows of zeros where a query sees nothing."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    if score == "softmax":
        shares = torch.softmax(scores.masked_fill(~visible, -1e300), -1).masked_fill(~visible, 0.0)
    else:
        shares = (share(score, scores) / divisor).masked_fill(~visible, 0.0)
    return torch.einsum("hqk,khd->qhd", shares, v)


def expected(inputs: tuple[Tensor, ...], mask: JaggedMask, score: str, divisor: float, gradient: Tensor):
    """Output and gradients of all sequences, in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in inputs)
    bounds = offsets_of(LENGTHS).tolist()
    parts = [
        dense(q[a:b], k[a:b], v[a:b], seen(mask, LENGTHS, n), score, divisor)
        for n, (a, b) in enumerate(pairwise(bounds))
        if b > a
    ]
    out = torch.cat(parts)
    return out, *torch.autograd.grad(out, (q, k, v), gradient.double())


def found(inputs, gradient, **options):
    out, _ = jagged_attention(*inputs, offsets_of(LENGTHS), **options)
    return out, *torch.autograd.grad(out, inputs, gradient)


def assert_close(one, other, tolerance: float) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), one, other, strict=True):
        a, b = a.detach().double(), b.detach()
        assert a.shape == b.shape
        if not a.numel():
            continue
        error = (a - b).abs().max() / max(1.0, float(b.abs().max()))
        assert float(error) <= tolerance, f"{name}: {float(error):.2e}"


@pytest.mark.cases(2)
@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_what_their_words_say(name: str, newest_first: bool) -> None:
    mask = replace(MASKS[name], newest_first=newest_first)
    inputs = tensors(sum(LENGTHS))
    gradient = normal(sum(LENGTHS), 2, 16, seed=9)
    wanted = expected(inputs, mask, "softmax", 1.0, gradient)
    assert_close(found(inputs, gradient, mask=mask, backend="numba"), wanted, 2e-6)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    assert_close(found(wide, gradient.double(), mask=mask, backend="math"), wanted, 1e-12)


@pytest.mark.cases(2)
@pytest.mark.parametrize("score", SCORES)
def test_scores_are_what_their_formulas_say(score: str) -> None:
    mask, divisor = MASKS["everything"], 1.0 if score == "softmax" else 50.0
    inputs = tensors(sum(LENGTHS), heads=2, groups=2, dim=24)
    gradient = normal(sum(LENGTHS), 2, 24, seed=9)
    wanted = expected(inputs, mask, score, divisor, gradient)
    options = {"mask": mask, "score": score, "divisor": divisor}
    assert_close(found(inputs, gradient, **options), wanted, 2e-6)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    assert_close(found(wide, gradient.double(), **options), wanted, 1e-12)


@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 1, 8), (4, 2, 48), (3, 3, 5)])
def test_heads_and_widths(heads: int, groups: int, dim: int) -> None:
    inputs = tensors(sum(LENGTHS), heads, groups, dim)
    gradient = normal(sum(LENGTHS), heads, dim, seed=9)
    wanted = expected(inputs, MASKS["causal"], "softmax", 1.0, gradient)
    assert_close(found(inputs, gradient, mask=MASKS["causal"], backend="numba"), wanted, 2e-6)


@pytest.mark.slow
def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    inputs = tuple(x.detach().requires_grad_() for x in tensors(sum(LENGTHS), dtype=torch.bfloat16))
    gradient = normal(sum(LENGTHS), 2, 16, seed=9, dtype=torch.bfloat16)
    got = found(inputs, gradient, mask=MASKS["causal"])
    assert all(x.dtype == torch.bfloat16 for x in got)
    assert_close(got, expected(inputs, MASKS["causal"], "softmax", 1.0, gradient), 8e-3)


@settings(max_examples=25, derandomize=True)
@given(lengths=st.lists(st.integers(0, 40), max_size=6), data=st.data())
def test_any_lengths_and_readers_are_those_of_dense_attention(lengths: list[int], data) -> None:
    """Sequences of queries that read a sequence of keys of their choice."""
    readers = data.draw(st.lists(st.integers(0, max(0, len(lengths) - 1)), max_size=6 if lengths else 0))
    q_lengths = [data.draw(st.integers(0, 12)) for _ in readers]
    q, _, _ = tensors(sum(q_lengths))
    _, k, v = tensors(sum(lengths), seed=1)
    ends, q_ends = offsets_of(lengths).tolist(), offsets_of(q_lengths).tolist()
    out, lse = jagged_attention(
        q, k, v, offsets_of(lengths), q_offsets=offsets_of(q_lengths),
        kv_index=torch.tensor(readers, dtype=torch.int64),
    )  # fmt: skip
    gradient = normal(*out.shape, seed=9)
    q_, k_, v_ = (x.detach().double().requires_grad_() for x in (q, k, v))
    parts = [q_.new_zeros(0, 2, 16)]
    for n, s in enumerate(readers):
        own, keys = slice(q_ends[n], q_ends[n + 1]), slice(ends[s], ends[s + 1])
        parts.append(dense(q_[own], k_[keys], v_[keys], torch.ones(q_lengths[n], lengths[s], dtype=torch.bool)))
    wanted = torch.cat(parts)
    if wanted.numel():
        grads = torch.autograd.grad(wanted, (q_, k_, v_), gradient.double())
        assert_close((out, *torch.autograd.grad(out, (q, k, v), gradient)), (wanted, *grads), 2e-6)
    without = torch.tensor([lengths[s] == 0 for s in readers], dtype=torch.bool)
    assert torch.equal(
        lse.isneginf().all(1), torch.repeat_interleave(without, torch.tensor(q_lengths, dtype=torch.int64))
    )


def test_queries_of_all_sequences_are_those_of_copies_and_their_gradient_is_summed() -> None:
    q = normal(5, 2, 16).requires_grad_()
    _, k, v = tensors(sum(LENGTHS))
    out, lse = jagged_attention(q, k, v, offsets_of(LENGTHS), broadcast=True)
    copies = q.detach().repeat(len(LENGTHS), 1, 1).requires_grad_()
    again, lse_again = jagged_attention(
        copies, k, v, offsets_of(LENGTHS), q_offsets=torch.arange(0, 5 * len(LENGTHS) + 1, 5)
    )
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    gradient = normal(*out.shape, seed=9)
    (summed,), (apart,) = torch.autograd.grad(out, q, gradient), torch.autograd.grad(again, copies, gradient)
    assert torch.equal(summed, apart.view(len(LENGTHS), 5, 2, 16).sum(0))


@pytest.mark.parametrize("score", ["softmax", "silu"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (len(LENGTHS), 1), (len(LENGTHS), 2)])
def test_a_bias_is_added_and_has_its_gradient(shape: tuple[int, int], score: str) -> None:
    inputs, most = tensors(sum(LENGTHS)), max(LENGTHS)
    bias = normal(*shape, most + 1, most + 2, seed=5).requires_grad_()
    out, _ = jagged_attention(*inputs, offsets_of(LENGTHS), mask=MASKS["causal"], bias=bias, score=score)
    gradient = normal(*out.shape, seed=9) / most
    got = torch.autograd.grad(out, (*inputs, bias), gradient)
    q, k, v, b = (x.detach().double().requires_grad_() for x in (*inputs, bias))
    parts = []
    for n, (first, last) in enumerate(pairwise(offsets_of(LENGTHS).tolist())):
        length = last - first
        scores = torch.einsum("qhd,khd->hqk", q[first:last], k[first:last].repeat_interleave(2, 1)) / 4
        scores = scores + b.expand(len(LENGTHS), 2, -1, -1)[n, :, :length, :length]
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        if score == "softmax":
            shares = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
        else:
            shares = share(score, scores).masked_fill(~visible, 0.0)
        parts.append(torch.einsum("hqk,khd->qhd", shares, v[first:last].repeat_interleave(2, 1)))
    wanted = torch.cat(parts)
    assert_close(
        (out, *got[:3]), (wanted, *torch.autograd.grad(wanted, (q, k, v), gradient.double(), retain_graph=True)), 3e-6
    )
    of_bias = torch.autograd.grad(wanted, b, gradient.double())[0]
    assert float((got[3] - of_bias).abs().max() / of_bias.abs().max()) < 3e-6


@pytest.mark.slow
def test_gradients_of_the_reference_are_those_of_differences() -> None:
    lengths = [3, 0, 4]
    inputs = tensors(7, dim=3, dtype=torch.float64)
    for score in SCORES:
        torch.manual_seed(0)
        mask = JaggedMask(causal=True, candidates=torch.tensor([1, 0, 2]))
        assert torch.autograd.gradcheck(
            lambda *x, score=score, mask=mask: jagged_attention(*x, offsets_of(lengths), mask=mask, score=score), inputs
        )


def test_log_sum_exps_merge_halves_and_have_gradients() -> None:
    """Of attention to the first and to the second half of the keys, in one sequence."""
    q, k, v = tensors(40, heads=2, groups=2)
    whole, lse = jagged_attention(q, k, v, torch.tensor([0, 40]))
    ends = torch.tensor([0, 40])
    halves = [
        jagged_attention(q, k[own], v[own], torch.tensor([0, len(k[own])]), q_offsets=ends)
        for own in (slice(0, 17), slice(17, 40))
    ]
    merged, merged_lse = merge(halves)
    torch.testing.assert_close(merged, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(merged_lse, lse, atol=1e-6, rtol=1e-6)
    gradients = normal(*whole.shape, seed=7), normal(*lse.shape, seed=8)
    for one, other in zip(
        torch.autograd.grad((whole, lse), (q, k, v), gradients),
        torch.autograd.grad((merged, merged_lse), (q, k, v), gradients),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("backend", ["numba", "math"])
def test_no_bit_of_a_sequence_depends_on_another(backend: str) -> None:
    """Not even on one that is NaN throughout, nor on what lies after the last sequence."""
    inputs = tensors(sum(LENGTHS) + 5)
    bounds, mask = offsets_of(LENGTHS).tolist(), MASKS["causal"]
    gradient = normal(sum(LENGTHS) + 5, 2, 16, seed=9)

    def run(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = tuple(x.detach().clone().requires_grad_() for x in given)
        out, lse = jagged_attention(*given, offsets_of(LENGTHS), mask=mask, backend=backend)
        return out, lse, *torch.autograd.grad(out, given, gradient)

    before = run(inputs)
    spoilt = tuple(x.detach().clone() for x in inputs)
    first, last = bounds[10], bounds[11]
    for x in spoilt:
        x[first:last], x[bounds[-1] :] = torch.nan, torch.nan
    after = run(spoilt)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:first], b[:first])
        assert torch.equal(a[last : bounds[-1]], b[last : bounds[-1]])
        assert b[first:last].isnan().all()
    for a in (after[0], *after[2:]):
        assert not a[bounds[-1] :].any()


def test_a_sequence_alone_has_the_bits_of_one_among_others() -> None:
    inputs = tensors(sum(LENGTHS))
    bounds = offsets_of(LENGTHS).tolist()
    whole, _ = jagged_attention(*inputs, offsets_of(LENGTHS), mask=JaggedMask(causal=True))
    for first, last in pairwise(bounds):
        alone, _ = jagged_attention(
            *(x[first:last] for x in inputs), offsets_of([last - first]), mask=JaggedMask(causal=True)
        )
        assert torch.equal(alone, whole[first:last])


def test_threads_and_runs_do_not_matter() -> None:
    inputs, gradient = tensors(sum(LENGTHS), groups=2), normal(sum(LENGTHS), 2, 16, seed=9)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append(found(inputs, gradient, mask=MASKS["semi-local"]))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("magnitude", [1e4, -1e4])
def test_large_scores_stay_finite(magnitude: float) -> None:
    """In whole and partial tiles; kernels that let padding into the largest score lose very negative ones."""
    q, k, v = tensors(sum(LENGTHS), groups=2)
    q, k = (
        torch.full_like(q, math.sqrt(abs(magnitude) / 4)),
        torch.full_like(k, magnitude / math.sqrt(abs(magnitude) * 4)),
    )
    assert float((q[0, 0] * k[0, 0]).sum() / 4) == pytest.approx(magnitude)
    q.requires_grad_()
    out, lse = jagged_attention(q, k, v, offsets_of(LENGTHS))
    for first, last in pairwise(offsets_of(LENGTHS).tolist()):
        if last > first:
            torch.testing.assert_close(
                out[first:last], v[first:last].mean(0, keepdim=True).expand(last - first, -1, -1)
            )
    assert lse[0, 0].item() == pytest.approx(magnitude)
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def test_nan_and_infinity_stay_in_sight() -> None:
    q, k, v = (x.detach() for x in tensors(40, groups=2))
    for bad in (math.nan, math.inf):
        spoilt = k.clone()
        spoilt[10, 0, 0] = bad
        out, _ = jagged_attention(q, spoilt, v, torch.tensor([0, 40]), mask=JaggedMask(causal=True))
        assert out[:10].isfinite().all()
        assert not out[10:, 0].isfinite().all()
        assert out[:, 1].isfinite().all()


def test_both_types_of_offsets_are_equal_and_nothing_is_a_result() -> None:
    inputs = tensors(sum(LENGTHS))
    one, _ = jagged_attention(*inputs, offsets_of(LENGTHS))
    other, _ = jagged_attention(*inputs, offsets_of(LENGTHS).int())
    assert torch.equal(one, other)
    for lengths in ([], [0], [0, 0]):
        q, k, v = tensors(0)
        out, lse = jagged_attention(q, k, v, offsets_of(lengths))
        assert out.shape == (0, 2, 16)
        assert lse.shape == (0, 2)
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


GOOD = torch.tensor([0, 2, 6])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"offsets": torch.tensor([1, 6])}, "offsets: must start at 0"),
        ({"offsets": torch.tensor([0, 4, 2])}, "offsets: must not decrease, but do after entry 1"),
        ({"offsets": torch.tensor([0, 7])}, "offsets: end at 7, past the 6 rows"),
        ({"offsets": torch.tensor([0.0, 6.0])}, "offsets: must be int32 or int64"),
        ({"offsets": torch.tensor([[0, 6]])}, "offsets: must be int32 or int64 of one dimension"),
        ({"q_offsets": torch.tensor([0, 6])}, "q_offsets: hold 1 sequences, the keys 2"),
        ({"q_offsets": torch.tensor([0, 9, 6])}, "q_offsets: must not decrease"),
        ({"kv_index": torch.tensor([0, 2])}, "kv_index: entry 1 is 2, of 2 sequences"),
        ({"kv_index": torch.tensor([0, -1])}, "kv_index: entry 1 is -1"),
        ({"kv_index": torch.tensor([0])}, "kv_index: needs 2 integers"),
        ({"broadcast": True, "kv_index": torch.tensor([0, 1])}, "broadcast: has queries of its own"),
        ({"broadcast": True, "mask": JaggedMask(causal=True)}, "mask: hides keys"),
        ({"kv_index": torch.tensor([1, 0]), "mask": JaggedMask(causal=True)}, "mask: hides keys"),
        ({"mask": JaggedMask(window=0)}, "mask.window: must be at least 1"),
        ({"mask": JaggedMask(causal=True, context=-1)}, "mask.context: must not be negative"),
        ({"mask": JaggedMask(causal=True, global_positions=2)}, "mask.global_positions: has no effect"),
        ({"mask": JaggedMask(context=2)}, "mask.context: has no effect"),
        ({"mask": JaggedMask(candidates=torch.tensor([1]))}, "mask.candidates: needs 2 integers"),
        ({"mask": JaggedMask(candidates=torch.tensor([1, 5]))}, "mask.candidates: sequence 1 of 4 rows has 5"),
        ({"mask": JaggedMask(candidates=torch.tensor([-1, 0]))}, "mask.candidates: sequence 0 of 2 rows has -1"),
        ({"score": "sine"}, "score: 'sine' is not known"),
        ({"divisor": 2.0}, "divisor: divides shares that sum to one"),
        ({"score": "silu", "divisor": 0.0}, "divisor: must be a number other than 0"),
        ({"score": "silu", "divisor": torch.ones(5)}, "divisor: needs 6 numbers"),
        ({"bias": torch.zeros(1, 1, 3, 4)}, "bias: of shape"),
        ({"bias": torch.zeros(1, 1, 4, 4).double()}, "bias: is torch.float64"),
        ({"backend": "fast"}, "backend: no back end 'fast'"),
        ({"q": torch.zeros(6, 2, 8)}, "q, k, v: have the shapes"),
        ({"q": torch.zeros(6, 3, 16), "k": torch.zeros(6, 2, 16), "v": torch.zeros(6, 2, 16)}, "k: 2 heads of keys"),
        ({"v": torch.zeros(6, 1, 16).double()}, "q, k, v: have the dtypes"),
        ({"q": torch.zeros(5, 2, 16)}, "q_offsets: end at 6, past the 5 rows"),
    ],
)  # fmt: skip
def test_mistakes_name_the_argument(options: dict, named: str) -> None:
    q, k, v = (x.detach() for x in tensors(6))
    given = {"q": q, "k": k, "v": v, "offsets": GOOD} | options
    with pytest.raises(CordilleraError) as error:
        jagged_attention(**given)
    assert str(error.value).startswith(named)
    assert isinstance(error.value, DependencyError if named.startswith("backend") else DataError)


def test_our_kernels_refuse_what_they_cannot_run() -> None:
    with pytest.raises(DependencyError, match="numba runs float32 and bfloat16"):
        jagged_attention(*tensors(6, dtype=torch.float64), GOOD, backend="numba")


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
@pytest.mark.slow
def test_kernels_of_gpus_agree_in_their_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    check_in_interpreter(__file__)


GPU_CASES = {
    **{name: {"mask": mask} for name, mask in MASKS.items()},
    "newest first": {"mask": replace(MASKS["everything"], newest_first=True)},
    **{score: {"score": score, "mask": MASKS["causal"], "divisor": 20.0} for score in SCORES[1:]},
    "bias": {"bias": (1, 2)},
    "bias of all": {"bias": (6, 1), "score": "silu", "divisor": 20.0},
}
GPU_LENGTHS = (0, 1, 15, 16, 17, 40)


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU, or Triton's interpreter")
@pytest.mark.parametrize("name", GPU_CASES)
def test_triton_equals_the_reference(name: str) -> None:
    device = "cpu" if INTERPRETED else "cuda"
    options = dict(GPU_CASES[name])
    mask = options.get("mask")
    if mask is not None and mask.candidates is not None:
        options["mask"] = replace(mask, candidates=torch.tensor([0, 1, 3, 0, 17, 2]))
    tensors_ = [x.detach().to(device).requires_grad_() for x in tensors(sum(GPU_LENGTHS) + 3, 2, 1, 20)]
    if "bias" in options:
        bias = normal(*options["bias"], 40, 41, seed=4).to(device).requires_grad_()
        options["bias"] = bias
        tensors_.append(bias)
    gradient = normal(sum(GPU_LENGTHS) + 3, 2, 20, seed=9).to(device)
    results = []
    for backend in ("triton", "math"):
        out, lse = jagged_attention(*tensors_[:3], offsets_of(GPU_LENGTHS), backend=backend, **options)
        loss = (out * gradient).sum()
        if options.get("score", "softmax") == "softmax":
            loss = loss + lse.masked_fill(lse == -torch.inf, 0.0).sum()
        results.append((out, lse, *torch.autograd.grad(loss, tensors_)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU, or Triton's interpreter")
@pytest.mark.parametrize("way", ["readers", "broadcast"])
def test_triton_reads_keys_of_others(way: str) -> None:
    device = "cpu" if INTERPRETED else "cuda"
    q = normal(23, 4, 16).to(device).requires_grad_()
    _, k, v = (x.detach().to(device).requires_grad_() for x in tensors(60, 4, 2))
    options = {"broadcast": True}
    if way == "readers":
        options = {"q_offsets": torch.tensor([0, 1, 20, 20, 23]), "kv_index": torch.tensor([2, 0, 1, 2])}
    results = []
    for backend in ("triton", "math"):
        out, _ = jagged_attention(q, k, v, torch.tensor([0, 30, 30, 58]), backend=backend, **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_nothing_of_the_size_of_a_length_squared_is_kept() -> None:
    """Saved for the backward pass are queries, keys, values, the output and log-sum-exps."""
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    q, k, v = tensors(300)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out, _ = jagged_attention(q, k, v, torch.tensor([0, 300]), mask=JaggedMask(causal=True))
    own = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    assert sum(size for place, size in saved.items() if place not in own) == out.nbytes + 300 * 2 * 4
