"""Attention within documents against the definition, written out densely in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.jagged import offsets_from_lengths
from cordillera.kernels.attention.documents import continued_attention, document_attention

pytestmark = pytest.mark.usefixtures("one_thread")


def _dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Softmax attention under a mask ``[Tq, Tk]``, head by head; ``q [Tq, H, D]``, ``k, v [Tk, G, D]``."""
    out = []
    for head in range(q.shape[1]):
        group = head * k.shape[1] // q.shape[1]
        scores = q[:, head].double() @ k[:, group].double().T / math.sqrt(q.shape[2])
        out.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v[:, group].double())
    return torch.stack(out, 1)


def _same_document_and_not_later(lengths: list[int]) -> Tensor:
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return (owner[:, None] == owner) & torch.ones(len(owner), len(owner)).tril().bool()


def _draw(lengths: list[int], heads: int, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    tokens = sum(lengths)
    shapes = ((tokens, heads, 8), (tokens, groups, 8), (tokens, groups, 8))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


_LENGTHS = st.lists(st.sampled_from([0, 0, 1, 3, 3, 3, 5, 17]), min_size=0, max_size=7)
_HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)])


@settings(max_examples=60)
@given(lengths=_LENGTHS, heads=_HEADS, dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_it_is_softmax_attention_under_a_mask_of_documents(
    lengths: list[int], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    q, k, v = _draw(lengths, *heads, dtype)
    out = document_attention(q, k, v, offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64)))
    assert out.dtype == dtype
    assert out.shape == q.shape
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    if lengths:
        expected = _dense(q, k, v, _same_document_and_not_later(lengths))
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_computes_the_same(dtype: torch.dtype, heads: int, groups: int, device: str) -> None:
    """With offsets on either side."""
    lengths = [5, 0, 130, 1, 7, 7]
    inputs = _draw(lengths, heads, groups, dtype)
    offsets = offsets_from_lengths(torch.tensor(lengths))
    moved = [t.cuda().requires_grad_() for t in inputs]
    out = document_attention(*moved, offsets.to(device))
    exact = [t.double().requires_grad_() for t in inputs]
    expected = _dense(*exact, _same_document_and_not_later(lengths))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad(out.sum(), moved), torch.autograd.grad(expected.sum(), exact)
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=4 * tolerance, atol=4 * tolerance)


@settings(max_examples=20)
@given(lengths=_LENGTHS.filter(lambda lengths: sum(lengths) > 0), heads=_HEADS)
def test_gradients_are_those_of_the_definition(lengths: list[int], heads: tuple[int, int]) -> None:
    inputs = [t.requires_grad_() for t in _draw(lengths, *heads, torch.float64)]
    weights = torch.randn(sum(lengths), heads[0], 8, dtype=torch.float64)
    offsets = offsets_from_lengths(torch.tensor(lengths))
    ours = torch.autograd.grad((document_attention(*inputs, offsets) * weights).sum(), inputs)
    expected = torch.autograd.grad((_dense(*inputs, _same_document_and_not_later(lengths)) * weights).sum(), inputs)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_nothing_of_another_document_or_of_the_future_leaks_in() -> None:
    q, k, v = _draw([3, 3, 4], 4, 2, torch.float32)
    clean = document_attention(q, k, v, torch.tensor([0, 3, 6, 10]))
    for poisoned in (k, v):
        poisoned[0:3] = poisoned[6:] = math.nan  # the other documents
        poisoned[5] = 1e4  # the last token of the second one; zero times NaN would be NaN
    seen = document_attention(q, k, v, torch.tensor([0, 3, 6, 10]))
    assert torch.equal(seen[3:5], clean[3:5])
    assert not torch.equal(seen[5], clean[5])
    assert seen[0:3].isnan().all()


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3),
    n=st.integers(1, 5),
    past=st.sampled_from([0, 1, 2, 30]),
    heads=_HEADS,
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_continued_attention_aligns_the_mask_with_the_last_token(
    batch: int, n: int, past: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    total = past + n
    q, k, v = _draw([batch * total], *heads, dtype)
    q, k, v = (t.unflatten(0, (batch, total)) for t in (q, k, v))
    out = continued_attention(q[:, past:].contiguous(), k.transpose(1, 2), v.transpose(1, 2))
    causal = torch.ones(total, total).tril().bool()[past:]
    expected = torch.stack([_dense(q[b, past:], k[b], v[b], causal) for b in range(batch)])
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
