"""Emulated products with scales and formats of gradients, beside scale, quantise, multiply, unscale in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.kernels.dense.layers import factorization_machine, linear_relu, pairwise_dots
from cordillera.numerics.emulation.emulation import EmulatedProducts, EmulationConfig
from cordillera.numerics.emulation.scaling import LossScale, round_scaled, scale_of
from cordillera.numerics.emulation.weight_storage import WeightStorage
from cordillera.numerics.formats.formats import FORMATS, Format
from cordillera.numerics.formats.mx import round_to_blocks
from cordillera.numerics.formats.rounding import decode, encode, round_to


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x * spread ** torch.randn(shape, generator=torch.Generator().manual_seed(seed + 100))


def values(x: Tensor, format: Format, scale: str) -> Tensor:
    """What rows of a left operand stand for, in float64, by codes or rounded blocks."""
    if scale == "block":
        return round_to_blocks(x, format).double()
    largest = x.abs().amax(-1, keepdim=True) if scale == "row" else x.abs().max()
    by = (largest.double() / format.max).float()
    by = torch.where(by == 0, 1.0, by)
    quotient = (x.double() / by.double()).float()  # as float32 divides
    return decode(encode(quotient, format, saturate=True), format).double() * by.double()


@pytest.mark.parametrize("scale", ["tensor", "row", "block"])
@pytest.mark.parametrize("gradients", [None, "e5m2"])
def test_all_products_of_a_linear_layer_are_scaled_rounded_multiplied_and_unscaled(scale: str, gradients) -> None:
    config = EmulationConfig(format="e4m3fn", gradient_format=gradients, scale=scale)
    forward, backward = FORMATS["e4m3fn"], FORMATS[gradients or "e4m3fn"]
    # gradients far below the smallest value of either format
    x, weight, upstream = normal(40, 70, spread=3.0), normal(50, 70, seed=1), normal(40, 50, seed=2) * 1e-7
    x.requires_grad_()
    weight, bias = nn.Parameter(weight), nn.Parameter(normal(50, seed=3))
    with EmulatedProducts(config):
        output = F.linear(x, weight, bias)
        output.backward(upstream)
    with torch.no_grad():
        w, u = weight.detach(), upstream
        expected = values(x, forward, scale) @ values(w, forward, scale).t() + bias.double()
        by_x = values(u, backward, scale) @ values(w.t().contiguous(), forward, scale).t()
        of_weight = values(u.t().contiguous(), backward, scale) @ values(x.t().contiguous(), forward, scale).t()
    for found, exact in ((output.detach(), expected), (x.grad, by_x), (weight.grad, of_weight)):
        assert float((found.double() - exact).norm() / exact.norm()) < 1e-6
    assert float((x.grad - upstream @ w).norm() / (upstream @ w).norm()) < 0.1
    with EmulatedProducts(EmulationConfig(format="e4m3fn")):
        assert not bool((upstream @ w).any())  # without a scale nothing is left


def test_gradients_of_weights_stay_exact_when_asked_and_no_other_product_does() -> None:
    config = EmulationConfig(format="e4m3fn", gradient_format="e5m2", scale="row", weight_gradients="float32")
    first, second = nn.Parameter(normal(12, 8)), nn.Parameter(normal(6, 12, seed=1))
    x = normal(32, 8, seed=2).requires_grad_()
    with EmulatedProducts(config):
        hidden = F.linear(x, first)
        hidden.retain_grad()
        output = linear_relu(hidden, second, torch.zeros(6, requires_grad=True))
        output.backward(upstream := normal(32, 6, seed=3))
    masked = upstream * (output.detach() > 0)
    torch.testing.assert_close(second.grad, masked.t() @ hidden.detach())
    torch.testing.assert_close(first.grad, hidden.grad.t() @ x.detach())
    assert float((hidden.grad - masked @ second.detach()).norm() / hidden.grad.norm()) > 0.01


def test_operands_of_our_own_kernels_are_told_from_gradients() -> None:
    """Gradients of these formats are all flushed to zero, numbers that are none stay."""
    config = EmulationConfig(format="bf16", gradient_format="e2m1", weights="master")
    x, y, weight = normal(6, 4, 8).requires_grad_(), nn.Parameter(normal(4, 3, seed=1)), nn.Parameter(normal(5, 4))
    pairs, columns = torch.tensor([4, 8, 9, 12, 13, 14]), torch.zeros(4, 4, dtype=torch.int64)
    i, j = torch.tril_indices(4, 4, -1)
    columns[i, j] = columns[j, i] = torch.arange(6)
    for upstream, is_zero in ((0.01, True), (1.0, False)):
        x.grad = y.grad = weight.grad = None
        with EmulatedProducts(config):
            results = [*factorization_machine(x, y, weight), pairwise_dots(x, pairs, columns.flatten(), False)]
            torch.autograd.backward(results, [torch.full_like(result, upstream) for result in results])
        assert all(bool(leaf.grad.any()) is not is_zero for leaf in (x, y, weight))


@settings(max_examples=60)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=12),
    st.sampled_from(["fp16", "e4m3fn", "e4m3fnuz", "e5m2", "e3m2", "e2m3", "e2m1"]),
    st.booleans(),
)
def test_scaled_rounding_has_the_formats_relative_error_and_uses_its_range(numbers, name, power_of_two) -> None:
    format, x = FORMATS[name], torch.tensor([numbers])
    scale = scale_of(x, format, -1, power_of_two=power_of_two)
    codes = round_scaled(x, scale, format)
    assert torch.equal(codes, round_to(codes, format))
    largest = float(x.abs().max())
    if largest == 0:
        assert float(scale) == 1
        return
    if power_of_two:
        assert float(torch.frexp(scale)[0]) == 0.5
    if float(scale) > 2.0**-126:
        assert format.max / 2 * 0.999 < float(codes.abs().max()) <= format.max
    error = (codes.double() * scale.double() - x.double()).abs()
    step = 2.0 ** -(format.mantissa_bits + 1)
    allowed = (x.double().abs() * step).clamp(min=float(scale) * format.min_subnormal / 2)
    assert bool((error <= allowed * (1 + 1e-5)).all())


@pytest.mark.parametrize("scale", ["tensor", "row", "block"])
def test_zeros_are_exact_and_empty_operands_give_what_they_should(scale: str) -> None:
    with EmulatedProducts(EmulationConfig(format="e4m3fn", scale=scale)):
        assert not bool((torch.zeros(3, 4) @ normal(4, 5)).any())
        assert not bool((torch.zeros(3, 0) @ torch.zeros(0, 5)).any())
        assert (torch.zeros(0, 4) @ normal(4, 5)).shape == (0, 5)
        eye = torch.eye(5)
        for found, expected in (
            (eye @ eye, eye),
            (torch.mv(eye, eye[0]), eye[0]),
            (torch.dot(eye[0], eye[0]), torch.tensor(1.0)),
            (torch.addmm(torch.full((5, 5), torch.nan), eye, eye, beta=0, alpha=2), 2 * eye),
            (torch.addmm(4 * eye, eye, eye, beta=0.5, alpha=2), 4 * eye),
            (torch.addmm(eye, eye, eye, beta=3), 4 * eye),
            (torch.addbmm(eye, eye.expand(3, 5, 5), eye.expand(3, 5, 5)), 4 * eye),
            (torch.mm(eye, eye, out=torch.empty(5, 5)), eye),
            (torch.zeros(5, 5).addmm_(eye, eye), eye),
        ):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", ["tensor", "row", "block"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none_and_spoils_no_other_row(scale: str, bad: float) -> None:
    x, y = normal(4, 6), normal(6, 5, seed=1)
    with EmulatedProducts(EmulationConfig(format="e4m3fn", scale=scale)):
        clean = x @ y
        x[1, 2] = bad
        product = x @ y
    assert not bool(product[1].isfinite().any())
    assert bool(product[[0, 2, 3]].isfinite().all())
    if scale != "tensor":
        assert torch.equal(product[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("scale", ["tensor", "row", "block"])
def test_scaled_steps_have_the_same_bits_with_one_thread_and_two(scale: str) -> None:
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            weight = nn.Parameter(normal(96, 64))
            config = EmulationConfig(format="e4m3fn", gradient_format="e5m2", scale=scale, rounding="stochastic")
            with EmulatedProducts(config, 3):
                F.linear(normal(300, 64, seed=1), weight).square().mean().backward()
            found.append(weight.grad)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])


def test_a_loss_scale_rounds_as_multiplying_the_loss_does() -> None:
    def gradient(config: EmulationConfig, by_hand: float, scale: float) -> tuple[Tensor, bool]:
        weight = nn.Parameter(normal(8, 16))
        x = normal(32, 16, seed=1).requires_grad_()
        hidden = nn.Parameter(normal(4, 8, seed=2))
        with EmulatedProducts(config, loss_scale=scale) as products:
            loss = F.linear(F.linear(x, weight).relu(), hidden).square().sum() * 1e-7
            (loss * by_hand).backward()
        return weight.grad / by_hand, products.overflowed

    plain = EmulationConfig(format="fp16", gradient_format="e5m2")
    scaled = plain.model_copy(update={"loss_scale": "dynamic"})
    by_hand, _ = gradient(plain, 2.0**20, 1.0)
    ours, overflowed = gradient(scaled, 1.0, 2.0**20)
    assert torch.equal(ours, by_hand)
    assert not overflowed
    assert not bool(gradient(plain, 1.0, 1.0)[0].any())  # what both are for
    assert gradient(scaled, 1.0, 2.0**40)[1]
    # a format without infinity does not hide it
    assert gradient(scaled.model_copy(update={"gradient_format": "e4m3fn"}), 1.0, 2.0**40)[1]


def test_a_loss_scale_halves_grows_and_gives_up() -> None:
    scale = LossScale(1024, window=3)
    for overflowed, value in ((False, 1024), (False, 1024), (False, 2048), (True, 1024), (False, 1024), (True, 512)):
        scale.update(overflowed)
        assert scale.value == value
    other = LossScale(window=3)
    other.load_state_dict(scale.state_dict())
    assert (other.value, other.steady) == (512, 0)
    scale.value = 2.0**-32
    with pytest.raises(NumericsError, match="not finite with a loss scale of"):
        scale.update(True)
    with pytest.raises(NumericsError, match="or 'dynamic'"):
        LossScale(8, None).update(True)
    with pytest.raises(NumericsError, match="power of two"):
        LossScale(1000)


@pytest.mark.parametrize("scale", ["tensor", "row", "block"])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_weights_without_a_master_are_kept_with_scales_row_by_row(scale: str, rounding: str) -> None:
    config = EmulationConfig(format="e4m3fn", scale=scale, weights="none", weight_rounding=rounding)
    whole, part = (normal(50, 40) * 1e-4 for _ in range(2))  # all of it below the format's smallest value
    exact = whole.clone()
    storages = [WeightStorage(config, {"table": weight}) for weight in (whole, part)]
    assert float((whole - exact).norm() / exact.norm()) < 0.06
    rows = torch.tensor([3, 7, 49])
    for weight, storage, some in zip((whole, part), storages, (None, {"table": rows}), strict=True):
        storage.before_update(some)
        weight[rows] += 1e-5
        storage.after_update(1, some)
    assert torch.equal(whole[rows], part[rows]) or rounding == "nearest_even"
    if rounding == "nearest_even":
        # rounding again what is of the format changes at most the last bit of a scale's product
        torch.testing.assert_close(whole, part, rtol=1e-6, atol=0)


def test_a_master_with_scales_is_what_the_weights_hold() -> None:
    weight = normal(5, 5)
    before = weight.clone()
    storage = WeightStorage(EmulationConfig(format="e4m3fn", scale="tensor"), {"w": weight})
    storage.before_update()
    storage.after_update(1)
    assert torch.equal(weight, before)
    assert storage.state_dict() == {}
    assert torch.equal(storage.full("w"), before)


def test_keys_that_contradict_each_other_are_refused() -> None:
    for keys, message in (
        ({"power_of_two": True}, "power_of_two is of scale"),
        ({"scale": "block", "flush_subnormals": True}, "not defined for scale = 'block'"),
        ({"scale": "row", "loss_scale": "dynamic"}, "gradients have scales already"),
        ({"rounding": "toward_zero", "loss_scale": "dynamic"}, "hides overflows"),
        ({"scale": "row", "weight_rounding": "stochastic"}, "set rounding"),
        ({"loss_scale": 1000.0}, "must be a power of two"),
        ({"loss_scale": -1.0}, "must be a power of two"),
    ):
        with pytest.raises(ValidationError, match=message):
            EmulationConfig(**keys)
