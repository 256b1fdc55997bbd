"""Emulated products: every operand of every product, forward and backward, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.kernels.dense.layers import (
    batched_matmul,
    factorization_machine,
    left_product,
    linear_relu,
    pairwise_dots,
)
from cordillera.numerics.emulation.emulation import EmulatedProducts, EmulationConfig
from cordillera.numerics.formats.formats import FORMATS
from cordillera.numerics.formats.rounding import Rounding, round_to

BF16 = EmulationConfig()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def r(x: Tensor, config: EmulationConfig = BF16) -> Tensor:
    return round_to(x, config.target, Rounding(config.rounding))


CONFIGS = [
    EmulationConfig(format=f, rounding=m) for f in ("bf16", "fp16", "e5m2") for m in ("nearest_even", "toward_zero")
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_linear_layer_rounds_both_operands_of_all_three_products_and_each_result_once(
    config: EmulationConfig,
) -> None:
    x, weight, bias, upstream = normal(7, 5), normal(3, 5, seed=1), normal(3, seed=2), normal(7, 3, seed=3)
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    with EmulatedProducts(config):
        output = F.linear(x, weight, bias)
        output.backward(upstream)
    with torch.no_grad():
        assert torch.equal(output, r(torch.addmm(bias, r(x, config), r(weight, config).t()), config))
        assert torch.equal(x.grad, r(r(upstream, config) @ r(weight, config), config))
        assert torch.equal(weight.grad, r(r(upstream, config).t() @ r(x, config), config))
        assert torch.equal(bias.grad, upstream.sum(0))  # a sum, not a product


def test_bfloat16_rounds_as_autocast_does() -> None:
    torch.manual_seed(0)
    # without biases, which autocast rounds and the study keeps in float32
    layers = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    x, upstream = normal(64, 16), round_to(normal(64, 8, seed=1), FORMATS["bf16"])
    found = []
    for region in (EmulatedProducts(BF16), torch.autocast("cpu", torch.bfloat16)):
        with region:
            output = layers(x)
        with region if isinstance(region, EmulatedProducts) else torch.enable_grad():
            output.float().backward(upstream)
        found.append([output.detach().float(), *(parameter.grad.clone() for parameter in layers.parameters())])
        layers.zero_grad()
    for ours, native in zip(*found, strict=True):  # what differs was added up in another order
        assert float((ours == native).double().mean()) > 0.9
        torch.testing.assert_close(ours, native, rtol=2.0**-7, atol=2.0**-7 * float(native.abs().max()))


def test_our_own_kernels_are_emulated_forward_and_backward() -> None:
    x, weight, bias = normal(6, 4, 8), normal(3, 4, seed=1), normal(5, seed=2)
    pairs = torch.tensor([4, 8, 9, 12, 13, 14])
    column_of = torch.zeros(4, 4, dtype=torch.int64)
    i, j = torch.tril_indices(4, 4, -1)
    column_of[i, j] = column_of[j, i] = torch.arange(6)

    def all_of(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [
            batched_matmul(x, x.mT),
            left_product(weight, x),
            *factorization_machine(x, weight.t().contiguous(), weight),
            pairwise_dots(x, pairs, column_of.flatten(), False),
            linear_relu(x.flatten(1), normal(5, 32, seed=5), bias),
        ]

    def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[list[Tensor]]:
        """Of each output by the leaves that it has."""
        found = []
        for output in outputs:
            of_leaves = torch.autograd.grad(
                output, leaves, torch.ones_like(output), retain_graph=True, allow_unused=True
            )
            found.append([gradient for gradient in of_leaves if gradient is not None])
        return found

    leaves = [x.requires_grad_(), weight.requires_grad_()]
    with EmulatedProducts(BF16):
        emulated = all_of(*leaves)
        emulated_gradients = gradients(emulated, leaves)
    plain = all_of(*leaves)
    plain_gradients = gradients(plain, leaves)
    for ours, theirs in zip(emulated, plain, strict=True):
        assert torch.equal(ours, r(ours))  # of the format
        assert not torch.equal(theirs, r(theirs))
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2 * float(theirs.detach().abs().max()))
    for ours, theirs in zip(emulated_gradients, plain_gradients, strict=True):
        for mine, exact in zip(ours, theirs, strict=True):
            assert not torch.equal(mine, exact)
            torch.testing.assert_close(mine, exact, rtol=3e-2, atol=3e-2 * float(exact.abs().max()))


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_products_are_seen_with_and_without_gradients(region: type) -> None:
    x, y = normal(4, 6), normal(6, 6, seed=1)
    with region(), EmulatedProducts(BF16):
        found = [F.linear(x, y), x @ y, torch.einsum("ij,jk->ik", x, y), torch.matmul(x[0], y), F.linear(x[None], y)]
        in_place = torch.zeros(4, 6).addmm_(x, y)
        out = torch.mm(x, y, out=torch.empty(4, 6))
    for product in [*found, in_place, out]:
        assert torch.equal(product, r(product))
    assert torch.equal(found[1], r(r(x) @ r(y)))
    assert torch.equal(in_place, found[1])
    assert torch.equal(out, found[1])


def test_stochastic_products_repeat_with_their_step_and_differ_between_steps() -> None:
    config = EmulationConfig(rounding="stochastic", seed=3)
    x, y = normal(40, 6), normal(6, 30, seed=1)

    def product(step: int, config: EmulationConfig = config) -> tuple[Tensor, Tensor]:
        with EmulatedProducts(config, step):
            return x @ y, x @ y

    first, second = product(4)
    assert not torch.equal(first, second)  # every rounding has bits of its own
    assert torch.equal(product(4)[0], first)
    assert torch.equal(product(4)[1], second)
    assert not torch.equal(product(5)[0], first)
    assert not torch.equal(product(4, config.model_copy(update={"seed": 4}))[0], first)


def test_what_is_no_number_passes_through() -> None:
    x = normal(3, 3)
    x[1, 1] = torch.nan
    with EmulatedProducts(EmulationConfig(format="e4m3fn")):
        product = x @ torch.eye(3)
    assert bool(product[1].isnan().all())
    assert bool(product[0].isfinite().all())


def test_products_that_cannot_be_emulated_are_refused() -> None:
    q = normal(1, 2, 4, 8)
    with EmulatedProducts(BF16), pytest.raises(NumericsError, match="cannot be rounded from outside"):
        F.scaled_dot_product_attention(q, q, q)
    with EmulatedProducts(BF16), pytest.raises(NumericsError, match="convolution"):
        F.conv1d(normal(1, 2, 8), normal(3, 2, 3))


def test_subnormal_numbers_are_flushed_when_asked() -> None:
    tiny = FORMATS["fp16"].min_normal / 2
    x = torch.full((2, 2), tiny)
    with EmulatedProducts(EmulationConfig(format="fp16", flush_subnormals=True)):
        assert not bool((x @ torch.eye(2)).any())
    with EmulatedProducts(EmulationConfig(format="fp16")):
        assert bool((x @ torch.eye(2)).all())
