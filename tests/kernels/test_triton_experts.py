"""What experts compute between products in Triton, beside torch; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.interpreter import check_in_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU, or Triton's interpreter"
)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_they_agree_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    check_in_interpreter(__file__)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), expected.double(), rtol=error, atol=error)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_triton_activates(dtype: torch.dtype, gated: bool) -> None:
    from cordillera.kernels.triton_experts import activated

    a, b = normal(7, 200, dtype=dtype), normal(7, 200, dtype=dtype, seed=1)
    expected = functional.silu(a.double()) * (b.double() if gated else 1)
    close(activated(a, b if gated else None), expected, dtype)
    assert activated(a[:0], None).shape == (0, 200)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("width", [24, 1100])
def test_triton_differentiates(dtype: torch.dtype, gated: bool, width: int) -> None:
    """By autograd in float64; the last two positions belong to no expert."""
    from cordillera.kernels.triton_experts import differentiated

    a, b, u = (normal(6, width, dtype=dtype, seed=seed) for seed in range(3))
    gates, slots = normal(3, 2, seed=3), torch.tensor([4, 0, 3, 1, 5, 2], device=DEVICE, dtype=torch.int32)
    u[4:] = torch.nan
    of_slots = gates.flatten()[slots.long()].double().requires_grad_()
    exact = [x.double().requires_grad_() for x in (a, b)]
    y = functional.silu(exact[0]) * (exact[1] if gated else 1) * of_slots[:, None]
    wanted = torch.autograd.grad(y, [exact[0], of_slots, *exact[1 : 1 + gated]], u.double())
    found = differentiated(a, b if gated else None, u.clone(), gates, slots, torch.tensor(4, device=DEVICE))
    close(found[0], y, dtype)
    close(found[1][:4], wanted[0][:4], dtype)
    if gated:
        close(found[2][:4], wanted[2][:4], dtype)
    torch.testing.assert_close(found[3][:4].double(), wanted[1][:4], rtol=1e-3, atol=1e-3)
    assert not found[3][4:].any()


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_triton_sums_the_rows_of_a_token(dtype: torch.dtype, gated: bool) -> None:
    from cordillera.kernels.triton_experts import combined

    rows, gates = normal(8, 1030, dtype=dtype), normal(4, 2, seed=1)
    rows[6:] = torch.nan  # of no expert
    places = torch.tensor([[0, 3], [6, 1], [7, 7], [5, 2]], device=DEVICE, dtype=torch.int32)
    found = combined(rows, gates if gated else None, places, torch.tensor(6, device=DEVICE))
    weights = gates.double() if gated else torch.ones_like(gates, dtype=torch.float64)
    filled = torch.where(places[..., None] < 6, rows[places.long()].double(), 0.0)
    close(found, (filled * weights[..., None]).sum(1), dtype)
    assert found.dtype == dtype
