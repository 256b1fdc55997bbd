"""The layer in one kernel against the same arithmetic in torch, tile by tile and edge by edge."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.kernels.dense import vnni_linear, vnni_tiles
from cordillera.kernels.numba_support import extent

pytestmark = pytest.mark.skipif(not vnni_tiles.available(), reason="this processor has no AVX-512 VNNI")
seeds = st.integers(0, 2**31)


@settings(max_examples=50)
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
        assert torch.equal(codes[:, :inner], expected)
        assert not codes[:, inner:].any()


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 7, 63, 64, 99])
def test_a_value_that_is_not_finite_is_seen_wherever_it_stands(value: float, place: int) -> None:
    x = torch.zeros(4, 25)
    x.view(-1)[place] = value
    assert vnni_linear.quantize(x, 1.0, 0) is None
    layer = vnni_linear.Layer(torch.ones(3, 25, dtype=torch.int8), torch.ones(3), torch.ones(3))
    assert layer.values(x, 1.0, 1.0, 0, relu=False) is None
    assert layer.dynamic(x, relu=False) is None
    assert layer.codes(x, 1.0, 0, 0, relu=False) is None
    x.view(-1)[place] = 3.4e38
    codes = vnni_linear.quantize(x, 1.0, 3)
    assert codes is not None
    assert codes[place // 25, place % 25] == 255


def _formula(codes: torch.Tensor, zero_point: int, weight: torch.Tensor) -> torch.Tensor:
    """Sums in whole numbers, as float32."""
    return ((codes.double() - zero_point) @ weight.double().t()).float()


@pytest.mark.parametrize("threads", [1, 2])
@settings(max_examples=60)
@given(seed=seeds, rows=st.integers(0, 15) | st.integers(90, 110), outputs=st.integers(1, 140),
       inner=st.integers(1, 40), zero_point=st.integers(0, 255), given_zero=st.integers(0, 255), relu=st.booleans(),
       scale=st.sampled_from([1.0, 0.37]))  # fmt: skip
def test_values_and_codes_are_the_formula(
    threads: int, seed: int, rows: int, outputs: int, inner: int, zero_point: int, given_zero: int, relu: bool,
    scale: float,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (outputs, inner), generator=generator, dtype=torch.int8)
    x = torch.randn(rows, inner, generator=generator) * 60
    term, factor = torch.randn(outputs, generator=generator) * 100, torch.rand(outputs, generator=generator) * 1e-3
    layer, single = vnni_linear.Layer(weight, factor, term), torch.tensor(scale)
    reciprocal = float(1 / single)
    codes = (x.double() * reciprocal + zero_point).float().round().clamp(0, 255)
    sums = _formula(codes, zero_point, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vnni_linear, "_PARALLEL_PRODUCTS", 0 if threads > 1 else 1 << 60)
        patch.setattr(vnni_linear, "threads_for", lambda values: threads)

        values = (sums.double() * (factor * single).double() + term.double()).float()
        values = values.relu() if relu else values
        found = layer.values(x, scale, reciprocal, zero_point, relu=relu)
        assert found is not None
        assert torch.equal(found, values)
        held = vnni_linear.quantize(x, reciprocal, zero_point)
        assert held is not None
        assert torch.equal(layer.values_of_codes(held, scale, zero_point, relu=relu), values)

        steps = ((sums + term) * factor).round() + given_zero
        steps = steps.clamp(given_zero if relu else 0, 255).to(torch.uint8)
        for given_input in (held, x):
            out = layer.codes(given_input, reciprocal, zero_point, given_zero, relu=relu)
            assert out is not None
            assert out.shape[1] % 4 == 0
            assert torch.equal(out[:, :outputs], steps)


@pytest.mark.parametrize(
    ("rows", "outputs", "inner"), [(7, 1000, 513), (300, 65, 2001), (1000, 128, 64), (97, 64, 9000)]
)
def test_large_layers_are_the_formula_for_any_number_of_threads(rows: int, outputs: int, inner: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randint(-128, 128, (outputs, inner), generator=generator, dtype=torch.int8)
    x = torch.randint(0, 256, (rows, inner), generator=generator).float() - 100
    layer = vnni_linear.Layer(weight, torch.ones(outputs), torch.zeros(outputs))
    expected, before = _formula(x + 100, 100, weight), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found = layer.values(x, 1.0, 1.0, 100, relu=False)
            assert found is not None
            assert torch.equal(found, expected)
            assert torch.get_num_threads() == threads
            for row in (0, rows - 1):  # whatever thread reads it
                bad = x.clone()
                bad[row, inner - 1] = float("nan")
                assert layer.values(bad, 1.0, 1.0, 100, relu=False) is None
                assert layer.dynamic(bad, relu=False) is None
            low, high = x.aminmax()
            assert vnni_linear._parallel_range(threads, x.data_ptr(), x.numel()) == vnni_linear._choose(
                np.float32(low), np.float32(high)
            )
    finally:
        torch.set_num_threads(before)


def test_copies_have_memory_of_their_own() -> None:
    weight = torch.randint(-128, 128, (70, 30), dtype=torch.int8)
    layer, x = vnni_linear.Layer(weight, torch.rand(70), torch.rand(70)), torch.randn(9, 30)
    expected = layer.values(x, 0.1, 10.0, 7, relu=True)
    file = io.BytesIO()
    pickle.dump(layer, file)
    copies = [copy.deepcopy(layer), copy.copy(layer), pickle.loads(file.getvalue())]
    del layer
    torch.randn(1 << 16)  # over memory that was given back
    for other in copies:
        assert torch.equal(other.values(x, 0.1, 10.0, 7, relu=True), expected)


def test_inputs_that_the_kernel_could_not_read_are_refused() -> None:
    layer = vnni_linear.Layer(torch.ones(3, 8, dtype=torch.int8), torch.ones(3), torch.ones(3))
    for x in (torch.ones(2, 7), torch.ones(8, 2).t(), torch.ones(2, 8, device="meta")):
        with pytest.raises(ValueError, match="8 inputs"):
            layer.values(x, 1.0, 1.0, 0, relu=False)
    with pytest.raises(ValueError, match="8 inputs"):
        layer.values_of_codes(torch.ones(2, 5, dtype=torch.uint8), 1.0, 0, relu=False)


floats = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-(2.0**-10), 2.0**-10, width=32)


@settings(max_examples=200)
@given(values=st.lists(floats, min_size=1, max_size=9))
def test_a_batch_chooses_the_scale_that_torch_would(values: list[float]) -> None:
    x = torch.tensor([values])
    low, high, _ = extent(x[0].numpy())
    assert (low, high) == (float(x.min()), float(x.max()))
    scale, zero_point = vnni_linear._choose(low, high)
    theirs = torch._choose_qparams_per_tensor(x, False)
    assert (float(scale), int(zero_point)) == (float(torch.tensor(theirs[0])), theirs[1])


def test_the_largest_codes_do_not_saturate() -> None:
    weight = torch.full((5, 1000), 127, dtype=torch.int8)
    weight[1] = -128
    layer = vnni_linear.Layer(weight, torch.ones(5), torch.zeros(5))
    found = layer.values(torch.full((7, 1000), 255.0), 1.0, 1.0, 0, relu=False)
    assert found is not None
    assert found[:, 0].tolist() == [255 * 127 * 1000] * 7
    assert found[:, 1].tolist() == [-255 * 128 * 1000] * 7
