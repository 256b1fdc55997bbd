"""Bad days of every part of numerics: numbers that are too large, shapes that do not fit, states that were spoilt."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch.candidates import CANDIDATES
from cordillera.numerics.dispatch.dispatch import forward_products, planned
from cordillera.numerics.dispatch.plan import KernelChoice, PrecisionPlan, machine, weights_digest
from cordillera.numerics.dispatch.row_statistics import RowStatistics, Tier
from cordillera.numerics.dispatch.stored_linear import StoredLinear
from cordillera.numerics.formats.formats import INTEGERS
from cordillera.numerics.quantization.integer_linear import quantize_weight
from cordillera.numerics.quantization.quantized_linear import LinearConfig, QuantizedLinear
from cordillera.numerics.quantization.quantizers import AffineParameters, Granularity, choose_symmetric, quantize

INT8 = INTEGERS["int8"]
IN_EIGHT_BITS = LinearConfig(float_below=0)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("size", [1e20, 3e38])
@pytest.mark.parametrize("tier", list(Tier))
def test_finite_rows_of_any_size_leave_statistics_finite(tier: Tier, size: float) -> None:
    x = torch.randn(50, 4)
    x[::2, 0], x[1::2, 0] = size, -size
    found = RowStatistics(4, tier)
    assert found.update(x)
    torch.testing.assert_close(found.mean, x.double().mean(0), rtol=1e-6, atol=1e-6 * size)
    torch.testing.assert_close(found.variance(), x.double().var(0), rtol=1e-5, atol=0)
    if size < 1e30:  # a drawn row may lie beyond the largest number of float32 only where the data almost did
        assert torch.isfinite(found.sample(20)).all()


def test_rows_whose_squares_float64_cannot_sum_are_left_out_and_counted() -> None:
    found = RowStatistics(2)
    assert not found.update(torch.tensor([[1e200, 0.0], [0.0, 1.0]], dtype=torch.float64))
    assert (found.count, found.skipped) == (0, 1)
    assert found.update(torch.tensor([[1e120, 0.0], [0.0, 1.0]], dtype=torch.float64))
    assert float(found.variance()[0]) == pytest.approx(0.5e240)


def test_ranges_that_cannot_be_are_refused_with_the_tensor_and_the_place() -> None:
    with pytest.raises(NumericsError, match=r"^weight: no range at \(1, 0\).*-3e\+38 to 3e\+38"):
        quantize(torch.tensor([[0.0, 1.0], [3e38, -3e38]]), INT8, Granularity.row, name="weight")
    for peak in (-3.0, math.nan, math.inf):
        with pytest.raises(NumericsError, match=r"no range at \(1,\)"):
            choose_symmetric(torch.tensor([1.0, peak]), INT8)
    scales = AffineParameters(torch.ones(2, 1), None)
    with pytest.raises(NumericsError, match=r"weight: \[2, 1\] scales or zero points for \[3, 1\] blocks"):
        quantize(torch.randn(3, 4), INT8, Granularity.row, parameters=scales, name="weight")


def test_a_bias_that_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(NumericsError, match=r"bias: element \(1,\) is inf"):
        quantize_weight(torch.randn(2, 2), torch.tensor([0.0, 1e300], dtype=torch.float64))


def _dispatched(linear: nn.Linear, kernel: str) -> nn.Module:
    """The layer by one kernel, for at most 64 rows; more are computed in float32."""
    outputs, inputs = linear.weight.shape
    choice = KernelChoice("0", "forward", 64, outputs, inputs, kernel, input_range=(-4.0, 4.0))
    weights = weights_digest({"0": (linear.weight, linear.bias)})
    return planned(nn.Sequential(linear), PrecisionPlan((choice,), machine(), {}, weights=weights))["0"]


def _quantized(linear: nn.Linear) -> nn.Module:
    return QuantizedLinear.from_linear(linear, None, config=IN_EIGHT_BITS)


LAYERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "quantized": _quantized,
    "quantized, in float32 for few rows": QuantizedLinear.from_linear,
    **{
        f"stored: {kernel}": lambda linear, kernel=kernel: StoredLinear.of(linear, kernel, torch.randn(200, 64))
        for kernel in CANDIDATES
    },
    **{f"dispatched: {kernel}": lambda linear, kernel=kernel: _dispatched(linear, kernel) for kernel in CANDIDATES},
}
"""Everything that stands in a linear layer's place, by name."""


@pytest.mark.parametrize("name", LAYERS)
def test_the_layout_of_memory_changes_nothing(name: str) -> None:
    layer = LAYERS[name](nn.Linear(64, 32))
    x = torch.randn(6, 64)
    # Whole numbers do not depend on the order of sums, which torch chooses by layout for the others.
    whole = "dynamic" in name or "static" in name or name == "quantized"
    near = (1e-2, 1e-2) if "bf16" in name or "weights" in name else (1e-5, 1e-6)
    rtol, atol = (0.0, 0.0) if whole else near
    same = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    exact = layer(x)
    same(layer(x.t().contiguous().t()), exact)
    same(layer(torch.stack([x, -x], 2)[..., 0]), exact)
    same(layer(x.view(2, 3, 64)), exact.view(2, 3, 32))
    same(layer(x[:1].expand(6, 64)), layer(x[:1].repeat(6, 1)))
    same(layer(x[:, :1].expand(6, 64)), layer(x[:, :1].repeat(1, 64)))


@pytest.mark.parametrize("name", LAYERS)
def test_no_rows_give_no_rows_and_a_wrong_width_is_refused(name: str) -> None:
    layer = LAYERS[name](nn.Linear(64, 32))
    assert layer(torch.zeros(0, 64)).shape == (0, 32)
    assert layer(torch.zeros(0, 5, 64)).shape == (0, 5, 32)
    for width in (32, 63, 128):
        with pytest.raises(NumericsError, match="inputs for 64"):
            layer(torch.zeros(2, width))


@pytest.mark.parametrize("name", LAYERS)
def test_a_model_that_is_cast_keeps_its_codes_and_scales(name: str) -> None:
    layer = LAYERS[name](nn.Linear(64, 32))
    x = torch.randn(6, 64)
    exact = copy.deepcopy(layer)(x)
    if name.startswith("dispatched"):
        return  # it holds the weight itself, which a cast rounds as anywhere
    for cast in (nn.Module.half, nn.Module.bfloat16, nn.Module.double):
        assert torch.equal(cast(copy.deepcopy(layer))(x), exact)
        again = LAYERS[name](nn.Linear(64, 32))
        again.load_state_dict(cast(copy.deepcopy(layer)).state_dict())
        assert torch.equal(again(x), exact)


@pytest.mark.parametrize("name", LAYERS)
def test_float64_is_never_taken_silently(name: str) -> None:
    with pytest.raises(NumericsError, match="float64"):
        LAYERS[name](nn.Linear(64, 32).double())
    statistics = RowStatistics(64)
    statistics.update(torch.randn(9, 64))
    with pytest.raises(NumericsError, match="0: is float64"):
        forward_products(nn.Sequential(nn.Linear(64, 32).double()), {"0": statistics})


@pytest.mark.parametrize("kernel", CANDIDATES)
def test_a_planned_layer_of_half_precision_gives_its_dtype_back_for_any_number_of_rows(kernel: str) -> None:
    linear = nn.Linear(64, 32).half()
    layer, single = _dispatched(linear, kernel), copy.deepcopy(linear).float()
    for rows in (3, 100):
        x = torch.randn(rows, 64).half()
        y = layer(x)
        assert y.dtype == torch.float16
        error = (y.float() - single(x.float())).norm() / single(x.float()).norm()
        assert float(error) < (0.15 if "int4" in kernel else 0.05)


def test_what_is_loaded_beside_other_mistakes_is_checked_and_packed() -> None:
    """Loading a larger model leniently must not leave new codes behind an engine that multiplies by the old ones."""
    model, other = (nn.Sequential(nn.Linear(64, 64), _quantized(nn.Linear(64, 64))) for _ in range(2))
    x = torch.randn(300, 64)
    state = other.state_dict()
    del state["0.bias"]
    model.load_state_dict({**state, "of another part": torch.zeros(1)}, strict=False)
    assert torch.equal(model[1](x), other[1](x))
    spoilt = {**state, "1.codes": state["1.codes"].clone()}
    spoilt["1.codes"][3, 5] ^= 1
    with pytest.raises(NumericsError, match="SHA-256"):
        model.load_state_dict(spoilt, strict=False)
    del state["1.codes"]
    with pytest.raises(NumericsError, match=r"lacks 1\.codes"):
        model.load_state_dict(state, strict=False)
    before = copy.deepcopy(other)
    other.load_state_dict({}, strict=False)
    assert torch.equal(other[1](x), before[1](x))


@pytest.mark.parametrize("kernel", CANDIDATES)
def test_a_stored_layer_that_ran_before_it_is_loaded_runs_with_what_was_loaded(kernel: str) -> None:
    rows, x = torch.randn(200, 64), torch.randn(6, 64)
    first, second = (StoredLinear.of(nn.Linear(64, 32), kernel, rows) for _ in range(2))
    first(x)
    first.load_state_dict(second.state_dict())
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize("kernel", [name for name in CANDIDATES if name not in ("fp32", "bf16")])
def test_a_layer_that_a_kernel_does_not_compute_is_refused_by_name(kernel: str) -> None:
    for outputs, inputs in ((0, 64), (64, 0)):
        with pytest.raises(NumericsError, match=kernel):
            StoredLinear.of(nn.Linear(inputs, outputs), kernel, torch.zeros(3, inputs))


@pytest.mark.parametrize("input", [None, AffineParameters(torch.tensor(0.04), torch.tensor(128))])
@pytest.mark.parametrize("relu", [False, True])
def test_one_and_two_threads_give_the_same_bits_by_whatever_kernel(input: AffineParameters | None, relu: bool) -> None:
    """Whichever kernel is the faster depends on the threads that are set when a layer is packed, and when it runs."""
    linear, before = nn.Linear(96, 80), torch.get_num_threads()
    outputs = []
    try:
        for packed in (1, 2):
            torch.set_num_threads(packed)
            layer = QuantizedLinear.from_linear(linear, input, relu=relu, config=IN_EIGHT_BITS)
            for running in (1, 2):
                torch.set_num_threads(running)
                outputs.append([layer(torch.linspace(-3, 5, rows * 96).view(rows, 96)) for rows in (1, 7, 300, 700)])
    finally:
        torch.set_num_threads(before)
    for others in outputs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(outputs[0], others, strict=True))
