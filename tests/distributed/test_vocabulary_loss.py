"""The loss in chunks against torch's own, of all logits at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cordillera.distributed.vocabulary_loss import IGNORED, summed_cross_entropy


def case(n: int, seed: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(n, 6, generator=generator, dtype=torch.float64)
    weight = scale * torch.randn(11, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 11, (n,), generator=generator)
    labels[torch.rand(n, generator=generator) < 0.3] = IGNORED
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


@given(n=st.integers(0, 20), rows=st.integers(1, 25), seed=st.integers(0, 99))
def test_loss_and_gradients_are_those_of_whole_logits(n: int, rows: int, seed: int) -> None:
    hidden, weight, labels = case(n, seed)
    found = summed_cross_entropy(hidden, weight, labels, rows=rows)
    expected = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    factor = torch.tensor(0.37, dtype=torch.float64)
    ours = torch.autograd.grad(found * factor, (hidden, weight))
    theirs = torch.autograd.grad(expected * factor, (hidden, weight))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_without_gradients_it_is_the_same_loss() -> None:
    hidden, weight, labels = case(20, 4)
    expected = summed_cross_entropy(hidden, weight, labels, rows=7)
    with torch.no_grad():
        found = summed_cross_entropy(hidden, weight, labels, rows=7)
    assert not found.requires_grad
    assert torch.equal(found, expected)


def test_rows_beyond_the_labels_have_no_target() -> None:
    hidden, weight, labels = case(20, 5)
    found = torch.autograd.grad(summed_cross_entropy(hidden, weight, labels[:13]), hidden)[0]
    expected = torch.autograd.grad(summed_cross_entropy(hidden[:13], weight, labels[:13]), hidden)[0]
    assert torch.equal(found, expected)


def test_half_precision_sums_in_single() -> None:
    hidden, weight, labels = case(300, 1, torch.bfloat16)
    found = summed_cross_entropy(hidden, weight, labels, rows=17)
    assert found.dtype == torch.float32
    expected = F.cross_entropy((hidden @ weight.T).double(), labels, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    found.backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    wide = weight.detach().float().requires_grad_()
    F.cross_entropy(hidden.detach().float() @ wide.T, labels, ignore_index=IGNORED, reduction="sum").backward()
    assert float((weight.grad.float() - wide.grad).abs().max() / wide.grad.abs().max()) < 0.02


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, labels = case(50, 2, torch.float32, scale=60.0)
    found = summed_cross_entropy(hidden, weight, labels)
    expected = F.cross_entropy((hidden @ weight.T).double(), labels, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("where", ["hidden", "weight"])
def test_what_is_no_number_stays_none(where: str) -> None:
    hidden, weight, labels = case(9, 3)
    with torch.no_grad():
        {"hidden": hidden, "weight": weight}[where][1] = torch.nan
    labels[1] = 4
    assert torch.isnan(summed_cross_entropy(hidden, weight, labels))
