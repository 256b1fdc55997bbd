"""Linear layers in whole numbers: offsets against plain sums, engines against the reference, faults by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.quantization.engines import (
    ReferenceEngine,
    TorchEngine,
    dynamic_parameters,
    make_engine,
    saturates,
)
from cordillera.numerics.quantization.integer_linear import (
    UINT8,
    LinearWeight,
    dequantize_product,
    integer_product,
    make_weight,
    quantize_weight,
    requantize,
)
from cordillera.numerics.quantization.quantizers import choose_affine

needs_kernels = pytest.mark.skipif(
    not {"x86", "fbgemm"} & set(torch.backends.quantized.supported_engines), reason="torch has no x86 kernels here"
)
needs_wide_products = pytest.mark.skipif(
    saturates(), reason="torch's products of eight-bit codes saturate on processors without VNNI instructions"
)
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 40)


def _weight(seed: int, outputs: int, inner: int, symmetric: bool, bias: bool = True) -> LinearWeight:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(outputs, inner, generator=generator) * 0.1 + (0 if symmetric else 0.05)
    shift = torch.randn(outputs, generator=generator)
    return quantize_weight(values, shift if bias else None, symmetric=symmetric)


def _codes(seed: int, rows: int, inner: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(0, 256, (rows, inner), generator=generator, dtype=torch.uint8)


@settings(max_examples=60)
@given(seed=seeds, rows=sizes, outputs=sizes, inner=sizes, symmetric=st.booleans(), zero_point=st.integers(0, 255))
def test_offsets_give_the_sums_of_the_definition(
    seed: int, rows: int, outputs: int, inner: int, symmetric: bool, zero_point: int
) -> None:
    weight, codes = _weight(seed, outputs, inner, symmetric), _codes(seed, rows, inner)
    shift = 0 if weight.zero_point is None else weight.zero_point.long()[:, None]
    direct = ((codes.long() - zero_point)[:, None, :] * (weight.codes.long() - shift)[None]).sum(2)
    assert torch.equal(integer_product(codes, zero_point, weight), direct)


@needs_kernels
def test_the_reference_and_torchs_integer_product_agree() -> None:
    weight, codes = _weight(0, 64, 96, True), _codes(0, 33, 96)
    assert torch.equal(torch._int_mm(codes, weight.codes.t()).long(), integer_product(codes, 0, weight))


@settings(max_examples=40)
@given(seed=seeds, symmetric=st.booleans(), relu=st.booleans())
def test_requantisation_is_the_float64_formula_but_for_ties(seed: int, symmetric: bool, relu: bool) -> None:
    weight, codes = _weight(seed, 50, 64, symmetric), _codes(seed, 100, 64)
    product = integer_product(codes, 77, weight)
    exact = product.double() * weight.scale.double() * 0.03 + weight.bias.double()  # type: ignore[union-attr]
    output = choose_affine(exact.min(), exact.max(), UINT8)
    steps = exact / output.scale.double() + int(output.zero_point)  # type: ignore[arg-type]
    low = int(output.zero_point) if relu else 0  # type: ignore[arg-type]
    expected = steps.round().clamp(low, 255)
    found = requantize(product, weight, 0.03, output, relu=relu).double()
    apart = (found - expected).abs()
    assert float(apart.max()) <= 1
    assert int((apart > 0).sum()) <= 2
    near_tie = ((steps - steps.floor()) - 0.5).abs() < 1e-3
    assert bool(near_tie[apart > 0].all())
    values = dequantize_product(product, weight, 0.03, relu=relu).double()
    torch.testing.assert_close(values, exact.relu() if relu else exact, rtol=1e-5, atol=1e-5)


@needs_kernels
@needs_wide_products
@settings(max_examples=40)
@given(seed=seeds, rows=sizes, outputs=sizes, inner=st.integers(1, 200), symmetric=st.booleans(), relu=st.booleans(),
       bias=st.booleans())  # fmt: skip
def test_torchs_kernels_give_the_codes_of_the_reference(
    seed: int, rows: int, outputs: int, inner: int, symmetric: bool, relu: bool, bias: bool
) -> None:
    weight = _weight(seed, outputs, inner, symmetric, bias)
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)) * 2 + 0.5
    reference, fast = ReferenceEngine(weight), TorchEngine(weight)
    given_ = dynamic_parameters(x)
    assert torch.equal(reference.codes(x, *given_), fast.plain(fast.codes(x, *given_)))
    y = reference.from_float(x, *given_, relu)
    assert torch.equal(fast.from_float(x, *given_, relu), y)
    assert torch.equal(fast.dynamic(x, relu), reference.dynamic(x, relu))
    scale, zero_point = choose_affine(y.min(), y.max(), UINT8)
    wanted = float(scale), int(zero_point)  # type: ignore[arg-type]
    ours = reference.from_codes(reference.codes(x, *given_), *given_, *wanted, relu)
    theirs = fast.plain(fast.from_codes(fast.codes(x, *given_), *given_, *wanted, relu))
    apart = (ours.int() - theirs.int()).abs()
    assert int(apart.max()) <= 1
    assert int((apart > 0).sum()) <= max(1, ours.numel() // 10_000)


@needs_kernels
@needs_wide_products
@pytest.mark.parametrize("symmetric", [True, False])
def test_over_a_million_outputs_kernels_differ_from_the_reference_by_ties_only(symmetric: bool) -> None:
    weight, codes = _weight(5, 1024, 512, symmetric), _codes(5, 1024, 512)
    reference, fast = ReferenceEngine(weight), TorchEngine(weight)
    x = reference.values(codes, 0.02, 120)
    assert torch.equal(fast.plain(fast.codes(x, 0.02, 120)), codes)  # values of codes are those codes again
    ours = reference.from_codes(codes, 0.02, 120, 0.05, 130, True)
    apart = (ours.int() - fast.plain(fast.from_codes(fast.codes(x, 0.02, 120), 0.02, 120, 0.05, 130, True)).int()).abs()
    assert int(apart.max()) <= 1
    assert int((apart > 0).sum()) < ours.numel() / 10_000
    assert len(ours.unique()) > 10


@needs_kernels
@needs_wide_products
def test_seven_bits_are_torchs_reduced_range() -> None:
    weight = _weight(1, 16, 32, True)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    narrow, wide = (TorchEngine(weight, seven_bits=seven).dynamic(x, False) for seven in (True, False))
    torch.testing.assert_close(narrow, ReferenceEngine(weight, seven_bits=True).dynamic(x, False), rtol=1e-5, atol=1e-5)
    exact = x @ weight.dequantize().t() + weight.bias
    assert float((wide - exact).norm()) < 0.7 * float((narrow - exact).norm())


@needs_kernels
def test_where_products_saturate_torchs_kernels_are_taken_for_seven_bits_only(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight(1, 16, 32, True)
    monkeypatch.setattr("cordillera.numerics.quantization.engines.saturates", lambda: True)
    assert isinstance(make_engine(weight, seven_bits=True), TorchEngine)
    for wide in ({"seven_bits": False}, {"seven_bits": True, "static": True}):
        assert isinstance(make_engine(weight, **wide), ReferenceEngine)
        with pytest.raises(NumericsError, match="may saturate"):
            make_engine(weight, "torch", **wide)


def test_one_scale_an_output_is_finer_than_one_for_all() -> None:
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 0, 32)[:, None]
    fine, coarse = (quantize_weight(values, None, per_channel=each).dequantize() for each in (True, False))
    assert float((fine - values).norm(dim=1)[0]) < 0.05 * float((coarse - values).norm(dim=1)[0])
    torch.testing.assert_close(quantize_weight(values, None, symmetric=False).dequantize(), values, rtol=0, atol=0.03)


@pytest.mark.parametrize("shape", [(0, 8, 5), (4, 0, 5), (4, 8, 0), (0, 0, 0)])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_nothing_in_any_dimension_gives_what_a_float_layer_gives(shape: tuple[int, int, int], backend: str) -> None:
    rows, inner, outputs = shape
    values, bias = torch.randn(outputs, inner), torch.randn(outputs)
    engine = make_engine(quantize_weight(values, bias), backend)
    x = torch.zeros(rows, inner)
    expected = F.linear(x, values, bias)
    torch.testing.assert_close(engine.dynamic(x, False), expected)
    torch.testing.assert_close(engine.from_float(x, 0.1, 3, False), expected)
    codes = engine.from_codes(engine.codes(x, 0.1, 3), 0.1, 3, 0.05, 128, False)
    assert codes.shape == expected.shape
    torch.testing.assert_close(engine.values(codes, 0.05, 128), expected, rtol=0, atol=0.026)


def test_weights_that_cannot_be_packed_are_refused_by_element() -> None:
    values = torch.randn(4, 8)
    values[2, 5] = float("nan")
    with pytest.raises(NumericsError, match=r"layer 3: element \(2, 5\) is nan"):
        quantize_weight(values, None, name="layer 3")
    with pytest.raises(NumericsError, match=r"bias: element \(1,\) is inf"):
        quantize_weight(torch.randn(4, 8), torch.tensor([0, float("inf"), 0, 0]))
    codes = torch.ones(2, 3, dtype=torch.int8)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(NumericsError, match="scale"):
            make_weight(codes, torch.tensor([1.0, scale]), None, None)
    with pytest.raises(NumericsError, match="zero points"):
        make_weight(codes, torch.ones(2), torch.tensor([0, 128]), None)
    with pytest.raises(NumericsError, match="int8 codes"):
        make_weight(codes, torch.ones(3), None, None)
    with pytest.raises(NumericsError, match="int8 codes"):
        make_weight(codes.float(), torch.ones(2), None, None)
    with pytest.raises(NumericsError, match="int32"):
        make_weight(torch.ones(1, 70_000, dtype=torch.int8), torch.ones(1), None, None)
    with pytest.raises(NumericsError, match="backend"):
        make_engine(quantize_weight(torch.randn(2, 2), None), "cuda")


@needs_kernels
def test_the_engine_that_torch_had_set_stays_set() -> None:
    before = torch.backends.quantized.engine
    TorchEngine(_weight(0, 4, 4, True))
    assert torch.backends.quantized.engine == before
