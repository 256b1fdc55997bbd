"""Every kernel computes the layer to its precision, loses the rows that are lost, and no others."""

from __future__ import annotations

import math

import pytest
import torch

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch.accuracy import Accuracy
from cordillera.numerics.dispatch.candidates import CANDIDATES, Candidate, Kernel, Shape, candidate, chosen
from cordillera.numerics.quantization.engines import saturates

LEAST = {
    "fp32": 120.0,
    "bf16": 48.0,
    "fp16 weights": 65.0,
    "int8 dynamic": 36.0,
    "int8 static": 36.0,
    "int8 weights": 40.0,
    "int4 weights": 20.0,
    "fp8 rows": 27.0,
}
SEVEN_BITS_DB = 3.0
"""What inputs of seven bits cost beside weights of eight, where products of eight bits would saturate."""
CPU = torch.device("cpu")


def case(rows: int, outputs: int, inputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, inputs, generator=generator),
        torch.randn(outputs, inputs, generator=generator),
        torch.randn(outputs, generator=generator),
    )


def packed(one: Candidate, rows: int, outputs: int, inputs: int) -> tuple[Kernel, torch.Tensor, torch.Tensor]:
    """Kernel, input, exact output; skips what this machine or shape does not allow."""
    x, weight, bias = case(rows, outputs, inputs)
    reason = one.supports(Shape(rows, outputs, inputs), CPU)
    if reason:
        pytest.skip(reason)
    return one.pack(weight, bias, x), x, x.double() @ weight.double().T + bias.double()


@pytest.mark.parametrize("shape", [(64, 128, 96), (5, 48, 64), (1, 32, 32), (7, 33, 31), (3, 1, 5)], ids=str)
@pytest.mark.parametrize("one", CANDIDATES.values(), ids=list(CANDIDATES))
def test_a_kernel_is_as_accurate_as_its_format(one: Candidate, shape: tuple[int, int, int]) -> None:
    kernel, x, exact = packed(one, *shape)
    before = x.clone()
    # A handful of values is judged less sharply: their signal may happen to be small.
    least = LEAST[one.name] - (12 if exact.numel() < 100 else 0)
    if saturates() and one.name == "int8 dynamic":
        least -= SEVEN_BITS_DB
    assert Accuracy.of(kernel(x), exact).sqnr_db > least
    assert torch.equal(x, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("one", CANDIDATES.values(), ids=list(CANDIDATES))
def test_what_is_no_number_is_lost_in_its_row_alone(one: Candidate, bad: float) -> None:
    kernel, x, _ = packed(one, 9, 64, 64)
    clean, spoilt = kernel(x), x.clone()
    spoilt[4, 17] = bad
    found = kernel(spoilt)
    assert not torch.isfinite(found[4]).any()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    if one.name.startswith("int8 dynamic"):  # the lost row no longer widens the range of the whole
        assert Accuracy.of(found[others], clean[others]).sqnr_db > 30
    else:
        assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("one", CANDIDATES.values(), ids=list(CANDIDATES))
def test_odd_inputs(one: Candidate) -> None:
    kernel, x, _ = packed(one, 8, 64, 64)
    assert kernel(x[:0]).shape == (0, 64)
    strided = torch.stack([x, x], 2).reshape(8, 128)[:, ::2]
    assert torch.equal(kernel(strided), kernel(x))
    assert torch.isfinite(kernel(torch.zeros(3, 64))).all()
    large = x * 1e30  # finite, though its sum or its square is not
    assert bool(torch.isfinite(kernel(large * 1e6)[:, 0]).any()) or one.name in ("fp32", "bf16")


@pytest.mark.parametrize("one", CANDIDATES.values(), ids=list(CANDIDATES))
def test_constant_and_zero_weights(one: Candidate) -> None:
    if reason := one.supports(Shape(4, 32, 32), CPU):
        pytest.skip(reason)
    x = case(4, 32, 32)[0]
    for weight in (torch.zeros(32, 32), torch.full((32, 32), 0.5)):
        exact = x.double() @ weight.double().T
        found = one.pack(weight, None, x)(x)
        assert float((found - exact).abs().max()) < 0.06 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("name", list(CANDIDATES))
def test_weights_that_do_not_fit_are_refused(name: str) -> None:
    x, weight, _ = case(4, 32, 32)
    weight[3, 5] = math.nan
    with pytest.raises(NumericsError, match=r"\(3, 5\)"):
        candidate(name).pack(weight, None, x)
    weight[3, 5] = 1e5
    with pytest.raises(NumericsError, match="beyond float16"):
        candidate("fp16 weights").pack(weight, None, x)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(NumericsError, match="one of fp32, bf16"):
        candidate("int3")
    assert [one.name for one in chosen(["bf16"])] == ["fp32", "bf16"]


def test_small_channels_keep_their_digits() -> None:
    x, weight, _ = case(16, 32, 32)
    weight *= torch.logspace(-12, 0, 32).unsqueeze(1)
    found = candidate("int8 weights").pack(weight, None, x)(x)
    exact = x.double() @ weight.double().T
    assert min(Accuracy.of(found[:, n], exact[:, n]).sqnr_db for n in range(32)) > 30


@pytest.mark.parametrize("one", CANDIDATES.values(), ids=list(CANDIDATES))
def test_what_is_kept_is_small_and_whole(one: Candidate) -> None:
    """A kernel of what was kept, copied, is that of the weight."""
    x, weight, bias = case(16, 32, 64)
    if reason := one.supports(Shape(16, 32, 64), CPU):
        pytest.skip(reason)
    stored = one.store(weight, x if one.calibrated else None)
    again = {name: tensor.clone() for name, tensor in stored.items()}
    plain = one.load(again, bias, False)(x)
    assert torch.equal(plain, one.pack(weight, bias, x)(x))
    assert torch.equal(one.load(again, bias, True)(x), plain.relu())
    bits = {"fp32": 32, "bf16": 16, "fp16 weights": 16, "int4 weights": 5}.get(one.name, 9)
    assert sum(t.numel() * t.element_size() for t in stored.values()) <= bits / 8 * weight.numel() + 8
