"""Packed weights against their definition, and their products against those of bfloat16 weights, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cordillera.errors import NumericsError
from cordillera.kernels.dense import few_rows, packed_rows
from cordillera.kernels.dense.few_rows import FewRowsLinear
from cordillera.kernels.dense.packed_rows import PackedRows, packed_linear, unpacked
from cordillera.kernels.dense.tiled_products import takes
from cordillera.numerics.quantization.packed_linear import PackedLinear, pack_rows
from tests.kernels.conftest import by

WAYS = ["amx", "tiles", "loops"]


def drawn(outputs: int, groups: int, bits: int, seed: int = 0) -> PackedRows:
    draws = torch.Generator().manual_seed(seed)
    if bits == 4:
        codes = torch.randint(0, 256, (outputs, groups, 16), generator=draws).to(torch.uint8)
    else:
        codes = torch.randint(-128, 128, (outputs, groups, 32), generator=draws).to(torch.int8)
    scales = torch.randn(outputs, groups, 2, generator=draws)
    scales[torch.rand(outputs, groups, generator=draws) < 0.1] = 0.0
    return PackedRows(codes, (scales if bits == 4 else scales[..., :1]).half().contiguous())


def by_definition(packed: PackedRows) -> np.ndarray:
    codes, scales = packed.codes.numpy(), packed.scales.numpy().astype(np.float32)
    if codes.dtype == np.uint8:
        codes = np.concatenate([codes % 16, codes // 16], -1)
    weights = codes.astype(np.float32) * scales[..., :1]
    return (weights + scales[..., 1:] if scales.shape[-1] == 2 else weights).reshape(packed.shape)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "groups"), [(16, 1), (48, 3), (80, 18)])
def test_weights_are_codes_times_scales(way: str, bits: int, outputs: int, groups: int) -> None:
    packed = drawn(outputs, groups, bits)
    with by(way, few_rows, packed_rows):
        found = unpacked(packed)
    assert torch.equal(found, torch.from_numpy(by_definition(packed)).bfloat16())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_that_are_not_finite_give_weights_that_are_not(way: str, bits: int) -> None:
    packed = drawn(16, 8, bits)
    odd = np.array([0x7FFF, 0xFFFF, 0x7E00, 0x7C00, 0xFC00, 0x7C01], np.uint16).view(np.float16)  # NaN and infinities
    packed.scales[:6, :, 0] = torch.from_numpy(odd)[:, None]
    if bits == 4:
        packed.scales[6:12, :, 1] = torch.from_numpy(odd)[:, None]
    with by(way, few_rows, packed_rows):
        found = unpacked(packed)
    with np.errstate(invalid="ignore"):
        wanted = torch.from_numpy(by_definition(packed)).bfloat16()
    assert not wanted[: 12 if bits == 4 else 6].isfinite().all(1).any()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=25)
@given(
    rows=st.integers(0, 9) | st.sampled_from([15, 16, 17, 31, 32, 33, 40]),
    groups=st.integers(1, 6),
    blocks=st.integers(1, 5) | st.just(40),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_unpacked_weights_to_the_bit(
    way: str, bits: int, rows: int, groups: int, blocks: int, seed: int
) -> None:
    packed = drawn(16 * blocks, groups, bits, seed)
    x = torch.randn(rows, 32 * groups, generator=torch.Generator().manual_seed(seed)).bfloat16()
    weight = torch.from_numpy(by_definition(packed)).bfloat16()
    with by(way, few_rows, packed_rows), torch.inference_mode():
        assert torch.equal(packed_linear(x, packed), FewRowsLinear(nn.Parameter(weight, requires_grad=False))(x))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_the_same_beside_any_others_and_nan_stays(bits: int) -> None:
    layer = PackedLinear(drawn(64, 4, bits))
    x = torch.randn(20, 128).bfloat16()
    x[3, 5] = torch.nan
    with torch.inference_mode():
        whole = layer(x)
        assert whole[3].isnan().all()
        for row in range(20):
            torch.testing.assert_close(layer(x[row : row + 1])[0], whole[row], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(layer.first(32)(x), whole[:, :32], rtol=0, atol=0, equal_nan=True)
    with pytest.raises(NumericsError, match="no gradients"):
        layer(x.requires_grad_())


@settings(max_examples=60)
@given(
    bits=st.sampled_from([4, 8]),
    size=st.sampled_from([1e-6, 1e-3, 1.0, 1e3]),
    shift=st.sampled_from([0.0, 0.3, -2.0]),
    seed=st.integers(0, 99),
)
def test_rounding_is_off_by_half_a_step_at_most(bits: int, size: float, shift: float, seed: int) -> None:
    weight = size * (shift + torch.randn(16, 96, generator=torch.Generator().manual_seed(seed)))
    found = torch.from_numpy(by_definition(pack_rows(weight, bits))).view(16, 3, 32)
    groups = weight.view(16, 3, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15 if bits == 4 else groups.abs().amax(-1, keepdim=True) / 127
    # float16's rounding of the scale moves the ends of a group, that of its least weight all of it
    lost = 16 * 2**-11 * step + 2**-10 * low.abs() if bits == 4 else 127 * 2**-11 * step
    assert bool(((found - groups).abs() <= 0.5001 * step + lost + 1e-5 * size + 2**-24 * 128).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_equal_weights_are_kept(bits: int) -> None:
    weight = torch.zeros(16, 64)
    weight[:, 32:] = 0.5
    assert torch.equal(unpacked(pack_rows(weight, bits)).float(), weight)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(NumericsError, match="not made of 16 outputs by 32 inputs"):
        pack_rows(torch.ones(16, 40), 4)
    with pytest.raises(NumericsError, match="weight"):
        pack_rows(torch.full((16, 32), torch.nan), 8)
    with pytest.raises(NumericsError, match="beyond what scales in float16 reach"):
        pack_rows(torch.full((16, 32), 1e8), 4)
    assert not takes(0, 32)
    assert not takes(24, 32)
