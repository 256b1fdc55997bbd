"""The layer in one kernel against the same arithmetic in torch, tile by tile and edge by edge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.kernels import vnni_linear

pytestmark = pytest.mark.skipif(not vnni_linear.available(), reason="this processor has no AVX-512 VNNI")
seeds = st.integers(0, 2**31)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, rows=st.integers(1, 9), inner=st.integers(1, 70), zero_point=st.integers(0, 255))
def test_codes_are_a_fused_multiply_add_rounded_to_even(seed: int, rows: int, inner: int, zero_point: int) -> None:
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)) * 5
    x[0, 0] = 2.5  # a tie
    for reciprocal in (1.0, 17.3):
        codes = vnni_linear.quantize(x, reciprocal, zero_point)
        factor = torch.tensor(reciprocal).double()
        expected = (x.double() * factor + zero_point).float().round().clamp(0, 255).to(torch.uint8)
        assert codes is not None
        assert codes.shape[1] % 4 == 0
        assert torch.equal(torch.from_numpy(codes[:, :inner]), expected)


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 7, 63, 64, 99])
def test_a_value_that_is_not_finite_is_seen_wherever_it_stands(value: float, place: int) -> None:
    x = torch.zeros(4, 25)
    x.view(-1)[place] = value
    assert vnni_linear.quantize(x, 1.0, 0) is None
    weights, ones = vnni_linear.pack(torch.ones(3, 25, dtype=torch.int8)), np.ones(3, np.float32)
    assert vnni_linear.linear(x, 1.0, 0, weights, np.zeros(3, np.int32), ones, ones, relu=False) is None
    x.view(-1)[place] = 3.4e38
    codes = vnni_linear.quantize(x, 1.0, 3)
    assert codes is not None
    assert codes[place // 25, place % 25] == 255


@settings(max_examples=60, deadline=None)
@given(seed=seeds, rows=st.integers(0, 15), outputs=st.integers(1, 140), inner=st.integers(1, 40),
       zero_point=st.integers(0, 255), relu=st.booleans())  # fmt: skip
def test_values_and_codes_are_the_formula(
    seed: int, rows: int, outputs: int, inner: int, zero_point: int, relu: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (outputs, inner), generator=generator, dtype=torch.int8)
    x = torch.randn(rows, inner, generator=generator) * 60
    offset = torch.randint(-(2**10), 2**10, (outputs,), generator=generator, dtype=torch.int32)
    shift, unit = torch.randn(outputs, generator=generator) * 100, torch.rand(outputs, generator=generator) * 1e-3
    packed, arrays = vnni_linear.pack(weight), (offset.numpy(), unit.numpy(), shift.numpy())
    codes = (x.double() + zero_point).float().round().clamp(0, 255)
    sums = (codes.double() @ weight.double().t() - offset).float()

    values = (sums.double() * unit.double() + shift.double()).float()
    values = values.relu() if relu else values
    found = vnni_linear.linear(x, 1.0, zero_point, packed, *arrays, relu=relu)
    assert found is not None
    assert torch.equal(found, values)
    held = vnni_linear.quantize(x, 1.0, zero_point)
    assert torch.equal(vnni_linear.to_values(held, packed, *arrays, relu=relu), values)

    steps = (((sums + shift) * unit).round() + zero_point).clamp(zero_point if relu else 0, 255).to(torch.uint8)
    out = vnni_linear.to_codes(held, packed, offset.numpy(), shift.numpy(), unit.numpy(), zero_point, relu=relu)
    assert torch.equal(torch.from_numpy(out[:, :outputs]), steps)


floats = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-(2.0**-10), 2.0**-10, width=32)


@settings(max_examples=200, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=9))
def test_a_batch_chooses_the_scale_that_torch_would(values: list[float]) -> None:
    x = torch.tensor([values])
    low, high, _ = vnni_linear._ends(x.numpy())
    assert (low, high) == (float(x.min()), float(x.max()))
    scale, zero_point = vnni_linear._choose(low, high)
    theirs = torch._choose_qparams_per_tensor(x, False)
    assert (float(scale), int(zero_point)) == (float(torch.tensor(theirs[0])), theirs[1])


def test_the_largest_codes_do_not_saturate() -> None:
    weight = torch.full((5, 1000), 127, dtype=torch.int8)
    weight[1] = -128
    ones, zeros = np.ones(5, np.float32), np.zeros(5, np.float32)
    x = torch.full((7, 1000), 255.0)
    found = vnni_linear.linear(x, 1.0, 0, vnni_linear.pack(weight), np.zeros(5, np.int32), ones, zeros, relu=False)
    assert found is not None
    assert found[:, 0].tolist() == [255 * 127 * 1000] * 7
    assert found[:, 1].tolist() == [-255 * 128 * 1000] * 7
