"""The passes around an integer product against the same arithmetic in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.kernels.numba_requantize import dequantize_pass, quantize_pass, requantize_pass

seeds = st.integers(0, 2**31)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, rows=st.integers(1, 9), inner=st.integers(1, 70), zero_point=st.integers(0, 255))
def test_codes_are_a_fused_multiply_add_rounded_to_even(seed: int, rows: int, inner: int, zero_point: int) -> None:
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)) * 5
    x[0, 0] = 2.5  # a tie
    codes, finite = quantize_pass(x, 1.0, zero_point)
    expected = (x.double() + zero_point).float().round().clamp(0, 255).to(torch.uint8)
    assert finite
    assert torch.equal(codes, expected)
    scaled, _ = quantize_pass(x, 17.3, zero_point)
    factor = torch.tensor(17.3).double()
    assert torch.equal(scaled, (x.double() * factor + zero_point).float().round().clamp(0, 255).to(torch.uint8))


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 7, 63, 64, 99])
def test_a_value_that_is_not_finite_is_seen_wherever_it_stands(value: float, place: int) -> None:
    x = torch.zeros(4, 25)
    x.view(-1)[place] = value
    assert not quantize_pass(x, 1.0, 0)[1]
    x.view(-1)[place] = 3.4e38
    codes, finite = quantize_pass(x, 1.0, 3)
    assert finite
    assert int(codes.view(-1)[place]) == 255


@settings(max_examples=50, deadline=None)
@given(
    seed=seeds, rows=st.integers(1, 9), outputs=st.integers(1, 70), zero_point=st.integers(0, 255), relu=st.booleans()
)
def test_outputs_are_the_formula(seed: int, rows: int, outputs: int, zero_point: int, relu: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    sums = torch.randint(-(2**20), 2**20, (rows, outputs), generator=generator, dtype=torch.int32)
    offset = torch.randint(-(2**10), 2**10, (outputs,), generator=generator, dtype=torch.int32)
    shift, multiplier = torch.randn(outputs, generator=generator) * 100, torch.rand(outputs, generator=generator) * 1e-3
    arrays = offset.numpy(), shift.numpy(), multiplier.numpy()
    codes = ((sums - offset).float() + shift) * multiplier
    expected = (codes.round() + zero_point).clamp(zero_point if relu else 0, 255).to(torch.uint8)
    assert torch.equal(requantize_pass(sums, *arrays, zero_point, relu=relu), expected)
    values = (sums - offset).float() * multiplier + shift
    values = values.relu() if relu else values
    assert torch.equal(dequantize_pass(sums, arrays[0], arrays[2], arrays[1], relu=relu), values)
