"""Our causal attention on CPUs and its gradients against the definition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.kernels.attention import numba_kernels as numba_attention
from cordillera.kernels.attention.documents import continued_attention, document_attention
from cordillera.kernels.repeatable import in_order

# Around the tile's rows and columns and the block of keys, and below the length from which the kernel is used.
LENGTHS = st.lists(st.sampled_from([0, 1, 40, 64, 65, 79, 96, 255, 256, 257, 300]), min_size=1, max_size=3).filter(any)
HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1)])


def dense(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    group = q.shape[1] // k.shape[1]
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    allowed = (owner[:, None] == owner) & torch.ones(len(owner), len(owner)).tril().bool()
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[2])
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~allowed, -math.inf).softmax(-1), v)


def drawn(tokens: int, heads: tuple[int, int], width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens + heads[0])
    return [
        torch.randn(tokens, count, width, generator=generator, dtype=torch.float64)
        for count in (heads[0], heads[1], heads[1], heads[0])
    ]


def computed(inputs: list[Tensor], lengths: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What attention gives, and the gradients of queries, keys and values."""
    *leaves, weights = (t.to(dtype) for t in inputs)
    leaves = [t.requires_grad_() for t in leaves]
    out = document_attention(*leaves, torch.tensor([0, *lengths]).cumsum(0))
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def gradients(inputs: list[Tensor], lengths: list[int]) -> list[Tensor]:
    return computed(inputs, lengths)[1:]


@settings(max_examples=25)
@given(
    lengths=LENGTHS,
    heads=HEADS,
    width=st.sampled_from([16, 32, 48, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_they_are_those_of_the_definition(
    lengths: list[int], heads: tuple[int, int], width: int, dtype: torch.dtype
) -> None:
    inputs = [t.to(dtype).double() for t in drawn(sum(lengths), heads, width)]
    *leaves, weights = inputs
    leaves = [t.clone().requires_grad_() for t in leaves]
    whole = dense(*leaves, lengths)
    expected = [whole.detach(), *torch.autograd.grad(whole, leaves, weights)]
    for found, wanted in zip(computed(inputs, lengths, dtype), expected, strict=True):
        assert found.dtype == dtype
        largest = 1.0 if not wanted.numel() else max(1.0, float(wanted.abs().max()))
        tolerance = largest * (5e-6 if dtype == torch.float32 else 1e-2)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)


def test_they_are_this_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = numba_attention.causal_attention_backward

    def counted(*arguments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(arguments[1].shape)
        return kernel(*arguments)

    monkeypatch.setattr(numba_attention, "causal_attention_backward", counted)
    gradients(drawn(292, (2, 1), 16), [100, 100, 64, 28])
    assert sorted(calls) == [(1, 2, 64, 16), (2, 2, 100, 16)]  # a short document is torch's


def test_threads_do_not_change_a_bit() -> None:
    inputs, found = drawn(300, (3, 1), 16), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(computed(inputs, [300]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_comes_later_changes_no_bit_of_earlier_tokens() -> None:
    inputs = drawn(300, (2, 2), 16)
    clean = computed(inputs, [300])
    for t in inputs[:3]:
        t[290:] = 7.0
    for was, now in zip(clean[:2], computed(inputs, [300])[:2], strict=True):
        assert torch.equal(was[:290], now[:290])
        assert not torch.equal(was[290:], now[290:])


@pytest.mark.parametrize("which", range(4))
def test_a_number_that_is_none_stays_none(which: int) -> None:
    inputs = drawn(80, (2, 1), 16)
    inputs[which][79] = math.nan
    out, dq, dk, dv = computed(inputs, [80])
    assert out[79].isnan().all() == (which != 3)
    assert dq[79].isnan().all()
    assert any(t[79].isnan().any() for t in (dk, dv))
    assert dq[:64].isfinite().all()


def test_scores_beyond_the_exponentials_range_give_what_torch_gives() -> None:
    inputs = drawn(100, (1, 1), 16)
    inputs[0] *= 300.0
    *leaves, weights = inputs
    leaves = [t.clone().requires_grad_() for t in leaves]
    whole = dense(*leaves, [100])
    expected = [whole.detach(), *torch.autograd.grad(whole, leaves, weights)]
    for found, wanted in zip(computed(inputs, [100]), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


@pytest.mark.cases(2)
@pytest.mark.parametrize("length", [1, 17, 256, 257, 300])
def test_a_token_has_the_same_bits_in_any_part_of_a_document(length: int) -> None:
    q, k, v = (one.float() for one in drawn(length, (4, 2), 48)[:3])
    with in_order():
        whole = document_attention(q, k, v, torch.tensor([0, length]))
        for count in (1, 3, 16, 255, length):
            if count <= length:
                keys, values = (one.transpose(0, 1)[None] for one in (k, v))
                assert torch.equal(continued_attention(q[None, -count:], keys, values)[0], whole[-count:])
